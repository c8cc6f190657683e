"""Advantages: worked numbers, plain loops, and identities to neighbours."""

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowgrpo as fg
from flowgrpo.algorithms.advantage import (
    anchor_advantage,
    dense_ids,
    group_sum,
    paid_rewards,
    return_to_go,
    row_group_advantage,
)

NORMALIZERS = {"group_zscore": fg.group_zscore, "group_center": fg.group_center, "leave_one_out": fg.leave_one_out}
NAIVE = {"group_zscore": naive.zscores, "group_center": naive.centred, "leave_one_out": naive.others}


def arrays(outcome, group, valid=None):
    outcome = np.array(outcome, np.float32)
    return outcome, np.array(group), np.ones(len(outcome), bool) if valid is None else np.array(valid)


# F1: statistics over trajectories ---------------------------------------------------------------------


def two_short_wins_two_long_losses():
    """Wins of 2 turns, losses of 6: the mean over trajectories is 1/2, over turn rows 1/4."""
    turns_nt = np.arange(6) < np.array([[2], [2], [6], [6]])
    return np.array([1.0, 1.0, 0.0, 0.0], np.float32), turns_nt, np.array([7, 7, 7, 7]), np.ones(4, bool)


def test_F1_statistics_are_over_trajectories():
    """(1 - 1/2) / sqrt(4 * 1/4 / 3) = 0.866, whatever the number of turns."""
    outcome_n, turns_nt, group_n, valid_n = two_short_wins_two_long_losses()
    adv_nt = fg.multi_turn_group_advantage(outcome_n, turns_nt, group_n, valid_n)
    expected_n = np.array([0.8660, 0.8660, -0.8660, -0.8660])
    np.testing.assert_allclose(adv_nt, np.where(turns_nt, expected_n[:, None], 0.0), atol=1e-4)


def test_F9_released_code_takes_statistics_over_rows():
    """4 rows of 1 and 12 of 0: mean 1/4, deviation sqrt(3/15): +1.677 and -0.559."""
    outcome_n, turns_nt, group_n, valid_n = two_short_wins_two_long_losses()
    adv_nt = row_group_advantage(outcome_n, turns_nt, group_n, valid_n)
    expected_n = np.array([1.6771, 1.6771, -0.5590, -0.5590])
    np.testing.assert_allclose(adv_nt, np.where(turns_nt, expected_n[:, None], 0.0), atol=1e-4)


def test_F9_rows_and_trajectories_agree_where_turns_are_equal_in_number_up_to_the_deviation():
    """T turns each: same mean, and a deviation that differs only in its degrees of freedom."""
    outcome_n, group_n, valid_n = arrays([1, 1, 0, 0], [0, 0, 0, 0])
    turns_nt = np.ones((4, 3), bool)
    over_rows = row_group_advantage(outcome_n, turns_nt, group_n, valid_n)
    over_trajectories = fg.multi_turn_group_advantage(outcome_n, turns_nt, group_n, valid_n)
    np.testing.assert_allclose(over_rows, over_trajectories * np.sqrt((4 / 3) / (12 / 11)), rtol=1e-5)


# Worked numbers ---------------------------------------------------------------------------------------


def test_worked_numbers_of_one_group():
    """Rewards 1, 0, 0, 3: mean 1, squares 0 1 1 4, unbiased deviation sqrt 2; others' means 1, 4/3, 4/3, 1/3."""
    outcome_n, group_n, valid_n = arrays([1, 0, 0, 3], [5, 5, 5, 5])
    root = 2**0.5
    np.testing.assert_allclose(fg.group_center(outcome_n, group_n, valid_n), [0, -1, -1, 2], atol=1e-6)
    np.testing.assert_allclose(
        fg.group_zscore(outcome_n, group_n, valid_n), [0, -1 / root, -1 / root, 2 / root], atol=1e-5
    )
    np.testing.assert_allclose(fg.leave_one_out(outcome_n, group_n, valid_n), [0, -4 / 3, -4 / 3, 8 / 3], atol=1e-6)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.25, 1.0, 0.91]), st.sampled_from([-3, 0, 11]), st.booleans()),
        min_size=12,
        max_size=12,
    )
)
def test_normalizers_equal_plain_loops(rows):
    outcome_n, group_n, valid_n = arrays(*map(list, zip(*rows, strict=True)))
    members = [
        {"group": g, "outcome": float(r), "i": i}
        for i, (r, g, v) in enumerate(zip(outcome_n, group_n, valid_n, strict=True))
        if v
    ]
    for name, normalize in NORMALIZERS.items():
        by_id = naive.spread_over_group(members, {id(m): m["outcome"] for m in members}, NAIVE[name])
        expected_n = np.zeros(12)
        expected_n[[m["i"] for m in members]] = [by_id[id(m)] for m in members]
        np.testing.assert_allclose(normalize(outcome_n, group_n, valid_n), expected_n, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("normalize", NORMALIZERS.values(), ids=NORMALIZERS)
def test_group_ids_are_any_integers_in_any_order(normalize):
    """Renaming groups, mixing their order and ids of 60 bits change nothing."""
    outcome_n, _, valid_n = arrays([1, 0, 2, 5, 5, 1], [0] * 6)
    plain_n = normalize(outcome_n, np.array([0, 0, 0, 1, 1, 1]), valid_n)
    for ids in ([-9, 4], [2**60, 2**60 + 2**40], [-(2**31), 2**31 - 1]):
        group_n = np.repeat(np.array(ids), 3)
        np.testing.assert_array_equal(normalize(outcome_n, group_n, valid_n), plain_n)
        order = np.array([3, 0, 5, 1, 4, 2])
        np.testing.assert_allclose(normalize(outcome_n[order], group_n[order], valid_n), plain_n[order], atol=1e-6)


def test_identities_between_normalizers():
    """leave_one_out = G/(G-1) * centred, and the z-score is the centred outcome over the deviation."""
    outcome_n, group_n, valid_n = arrays([1, 0, 2, 5, 7], [0] * 5)
    centred_n = fg.group_center(outcome_n, group_n, valid_n)
    np.testing.assert_allclose(fg.leave_one_out(outcome_n, group_n, valid_n), centred_n * 5 / 4, rtol=1e-6)
    zscore_n = fg.group_zscore(outcome_n, group_n, valid_n, eps=0.0)
    np.testing.assert_allclose(zscore_n, centred_n / outcome_n.std(ddof=1), rtol=1e-6)


# F4: no spread, no advantage --------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", NORMALIZERS.values(), ids=NORMALIZERS)
@pytest.mark.parametrize("reward", [0.91, 0.1, 1e-30, 1e20, 0.0])
@pytest.mark.parametrize("size", [1, 3])
def test_F4_equal_rewards_and_singletons_give_exactly_zero(normalize, reward, size):
    """0.91 repeated has a mean that is not 0.91 in float32; a singleton gives zero, not R."""
    outcome_n, group_n, valid_n = arrays([reward] * size, [3] * size)
    assert not np.asarray(normalize(outcome_n, group_n, valid_n)).any()


def test_F4_delta_hides_nothing():
    """A spread far below delta is still a spread: signs survive, and sizes shrink by delta alone."""
    outcome_n, group_n, valid_n = arrays([0.0, 1e-6], [0, 0])
    deviation = 1e-6 / 2**0.5
    expected = 0.5e-6 / (deviation + 1e-6)
    np.testing.assert_allclose(fg.group_zscore(outcome_n, group_n, valid_n), [-expected, expected], rtol=1e-4)


# F5: invalid trajectories take no part ----------------------------------------------------------------


@pytest.mark.parametrize("normalize", NORMALIZERS.values(), ids=NORMALIZERS)
@pytest.mark.parametrize("garbage", [0.0, np.nan, np.inf, -np.inf, 1e30])
def test_F5_dropped_first_then_normalised(normalize, garbage):
    """With an invalid member the others get what they would get without it."""
    outcome_n, group_n, valid_n = arrays([1, 0, garbage, 3], [2, 2, 2, 2], [True, True, False, True])
    alone_n = normalize(outcome_n[valid_n], group_n[valid_n], np.ones(3, bool))
    adv_n = np.asarray(normalize(outcome_n, group_n, valid_n))
    np.testing.assert_allclose(adv_n[valid_n], alone_n, rtol=1e-6)
    assert adv_n[2] == 0.0


def test_F5_a_trajectory_without_turns_takes_no_part():
    outcome_n, group_n, valid_n = arrays([1, 0, 9], [0, 0, 0])
    turns_nt = np.array([[True, True], [True, False], [False, False]])
    adv_nt = fg.multi_turn_group_advantage(outcome_n, turns_nt, group_n, valid_n, normalize=fg.group_center)
    np.testing.assert_allclose(adv_nt, [[0.5, 0.5], [-0.5, 0.0], [0.0, 0.0]])


@pytest.mark.usefixtures("nan_allowed")
def test_nan_declared_valid_is_not_hidden():
    """A valid NaN makes its own group NaN, and no other."""
    outcome_n, group_n, valid_n = arrays([1, np.nan, 0, 1], [0, 0, 1, 1])
    for normalize in NORMALIZERS.values():
        adv_n = np.asarray(normalize(jnp.asarray(outcome_n), group_n, valid_n))
        assert np.isnan(adv_n[:2]).all()
        assert np.isfinite(adv_n[2:]).all()


def test_mixed_groups_counts_correct_among_the_valid():
    """All right, all wrong, mixed, and mixed only through an invalid member."""
    correct = np.array([1, 1, 0, 0, 1, 0, 1, 0], bool)
    group_n = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    valid_n = np.array([1, 1, 1, 1, 1, 1, 1, 0], bool)
    kept_n = fg.mixed_groups(correct, group_n, valid_n)
    np.testing.assert_array_equal(kept_n, group_n == 2)


# Turns and states -------------------------------------------------------------------------------------


def test_return_to_go_by_hand():
    """gamma 1/2 over payments 1, 2, 4: 1 + (2 + 4/2)/2 = 3, 2 + 2 = 4, 4; a missing turn is skipped."""
    reward_nt, turns_nt = (
        np.array([[1.0, 2.0, 4.0], [1.0, 9.0, 4.0]], np.float32),
        np.array([[1, 1, 1], [1, 0, 1]], bool),
    )
    np.testing.assert_allclose(return_to_go(reward_nt, turns_nt, gamma=0.5), [[3, 4, 4], [3, 0, 4]])


def test_anchor_advantage_by_hand():
    """State 8 of group 0 is met three times with returns 1, 2, 3; state 9 once, which gives zero."""
    return_nt = np.array([[1.0, 5.0], [2.0, 3.0]], np.float32)
    anchor_nt, turns_nt = np.array([[8, 9], [8, 8]]), np.ones((2, 2), bool)
    adv_nt = anchor_advantage(return_nt, anchor_nt, turns_nt, np.array([0, 0]), np.ones(2, bool))
    np.testing.assert_allclose(adv_nt, [[-1, 0], [0, 1]], atol=1e-5)
    apart_nt = anchor_advantage(return_nt, anchor_nt, turns_nt, np.array([0, 1]), np.ones(2, bool))
    np.testing.assert_allclose(apart_nt, [[0, 0], [-(0.5**0.5), 0.5**0.5]], atol=1e-5)


@pytest.mark.parametrize("by_turn", [False, True])
def test_paid_rewards_sum_to_the_outcome(by_turn):
    """An outcome alone falls to the last turn; payments by turn stay, and the rest falls to the last."""
    turn = {"tokens": [1], "chosen": [True], "logp_sampled": [0.0]}
    turns = [fg.Turn(**turn, reward=reward if by_turn else None) for reward in (0.5, 0.25)]
    trajectories = fg.collate([fg.Trajectory(turns, 1.0, 0), fg.Trajectory(turns[:1], 0.5, 0)])
    expected = [[0.5, 0.5], [0.5, 0.0]] if by_turn else [[0.0, 1.0], [0.5, 0.0]]
    np.testing.assert_allclose(paid_rewards(trajectories, trajectories.outcome), expected)


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), min_size=15, max_size=15))
def test_dense_ids_are_equal_exactly_where_all_keys_are(rows):
    first, second = (np.array(column) for column in zip(*rows, strict=True))
    id_m = np.asarray(dense_ids(first, second))
    same = (first[:, None] == first) & (second[:, None] == second)
    np.testing.assert_array_equal(id_m[:, None] == id_m, same)
    assert id_m.min() == 0
    assert id_m.max() == len(set(rows)) - 1
    np.testing.assert_array_equal(group_sum(np.ones(15, np.float32), jnp.asarray(id_m), np.ones(15, bool)), same.sum(1))


# GAE --------------------------------------------------------------------------------------------------


def test_gae_by_hand():
    """gamma 1/2, lambda 1/2, rewards 1 1, values 2 4, V after the end 8: the last delta is 1 + 4 - 4 = 1,
    the first 1 + 2 - 2 = 1 plus a quarter of the last."""
    adv_t, return_t = fg.gae(jnp.ones(2), jnp.array([2.0, 4.0]), jnp.zeros(2), gamma=0.5, lam=0.5, last_value=8.0)
    np.testing.assert_allclose(adv_t, [1.25, 1.0])
    np.testing.assert_allclose(return_t, [3.25, 5.0])


def test_gae_a_done_step_sees_nothing_after_it():
    reward_t, value_t = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 0.25, 7.0])
    adv_t, _ = fg.gae(reward_t, value_t, jnp.array([0.0, 1.0, 0.0]), gamma=0.9, lam=0.8)
    short_t, _ = fg.gae(reward_t[:2], value_t[:2], jnp.zeros(2), gamma=0.9, lam=0.8, last_value=0.0)
    np.testing.assert_allclose(adv_t[:2], short_t, rtol=1e-6)


@pytest.mark.parametrize("done", [0.0, 1.0])
def test_gae_identities_lambda_one_and_zero(done):
    """lambda = 1: return minus value; lambda = 0: the one-step error."""
    rng = np.random.default_rng(0)
    reward_t, value_t = (rng.normal(size=6).astype(np.float32) for _ in range(2))
    done_t = jnp.array([0, 0, 0, 0, 0, done], jnp.float32)
    after = 2.0 * (1 - done)
    to_go = naive.returns_to_go([*reward_t.tolist(), after], 0.9)[:-1]
    adv_t, return_t = fg.gae(reward_t, value_t, done_t, gamma=0.9, lam=1.0, last_value=2.0)
    np.testing.assert_allclose(adv_t, np.array(to_go) - value_t, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(return_t, to_go, rtol=1e-5, atol=1e-5)
    adv_t, _ = fg.gae(reward_t, value_t, done_t, gamma=0.9, lam=0.0, last_value=2.0)
    np.testing.assert_allclose(adv_t, reward_t + 0.9 * np.append(value_t[1:], after) - value_t, rtol=1e-5, atol=1e-6)


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 99))
def test_gae_skips_masked_steps_as_if_they_were_not_there(mask, seed):
    rng = np.random.default_rng(seed)
    mask_t = np.array(mask)
    reward_t, value_t = (rng.normal(size=8).astype(np.float32) for _ in range(2))
    garbage_t = np.where(mask_t, value_t, np.nan).astype(np.float32)
    adv_t, return_t = fg.gae(reward_t, garbage_t, np.zeros(8), gamma=0.9, lam=0.8, last_value=0.5, mask_t=mask_t)
    kept = naive.gae(reward_t[mask_t].tolist(), value_t[mask_t].tolist(), 0.5, 0.9, 0.8)
    np.testing.assert_allclose(np.asarray(adv_t)[mask_t], kept, rtol=1e-5, atol=1e-5)
    assert not np.asarray(adv_t)[~mask_t].any()
    np.testing.assert_allclose(np.asarray(return_t)[mask_t], np.array(kept) + value_t[mask_t], rtol=1e-5, atol=1e-5)


# jit, vmap, grad and dtypes ---------------------------------------------------------------------------


def test_advantages_jit_vmap_and_differentiate():
    rng = np.random.default_rng(0)
    outcome_bn = jnp.asarray(rng.normal(size=(3, 6)).astype(np.float32))
    group_bn = jnp.asarray(rng.integers(0, 2, (3, 6)))
    valid_bn = jnp.asarray(rng.random((3, 6)) < 0.8)
    for normalize in NORMALIZERS.values():
        looped = jnp.stack([normalize(*row) for row in zip(outcome_bn, group_bn, valid_bn, strict=True)])
        np.testing.assert_allclose(jax.jit(jax.vmap(normalize))(outcome_bn, group_bn, valid_bn), looped, atol=1e-6)
        slope_n = jax.grad(lambda x_n: normalize(x_n, group_bn[0], valid_bn[0])[0])(outcome_bn[0])  # noqa: B023
        assert np.isfinite(slope_n).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, bool])
def test_everything_is_float32_inside(dtype):
    outcome_n = jnp.array([1, 0, 1, 1]).astype(dtype)
    group_n, valid_n = jnp.zeros(4, jnp.int32), jnp.ones(4, bool)
    for normalize in NORMALIZERS.values():
        adv_n = normalize(outcome_n, group_n, valid_n)
        assert adv_n.dtype == jnp.float32
        np.testing.assert_allclose(adv_n, normalize(outcome_n.astype(jnp.float32), group_n, valid_n))


# What is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: fg.group_zscore(np.zeros(3), np.zeros(2, int), np.ones(3, bool)),
            "group_n has 2 on axis n, but outcome_n",
        ),
        (lambda: fg.group_center(np.zeros((3, 1)), np.zeros(3, int), np.ones(3, bool)), "outcome_n has shape (3, 1)"),
        (lambda: fg.leave_one_out(np.zeros(0), np.zeros(0, int), np.ones(0, bool)), "there is nothing on axis n"),
        (lambda: fg.mixed_groups(np.zeros(3, bool), np.zeros(3, int), np.ones(4, bool)), "valid_n has 4 on axis n"),
        (
            lambda: fg.multi_turn_group_advantage(
                np.zeros(3), np.ones((4, 2), bool), np.zeros(3, int), np.ones(3, bool)
            ),
            "multi_turn_group_advantage: turns_nt has 4 on axis n, but outcome_n has 3",
        ),
        (
            lambda: fg.flow_weights(
                np.ones((3, 2, 5), bool), np.ones((3, 4), bool), np.zeros(3, int), np.ones(3, bool)
            ),
            "weights: turns_nt has 4 on axis t, but chosen_ntl has 2",
        ),
        (lambda: fg.gae(np.zeros(3), np.zeros(2), np.zeros(3), gamma=1.0, lam=1.0), "gae: value_t has 2 on axis t"),
    ],
)
def test_mismatched_or_empty_arrays_get_one_clear_sentence(call, words):
    with pytest.raises(fg.BadInput) as caught:
        call()
    assert words in str(caught.value)


def test_masks_may_be_numbers():
    """0 and 1 as integers or floats are masks too, as other code bases write them."""
    outcome_n, turns_nt, group_n, valid_n = two_short_wins_two_long_losses()
    expected_nt = fg.multi_turn_group_advantage(outcome_n, turns_nt, group_n, valid_n)
    for dtype in (np.int32, np.float32):
        found_nt = fg.multi_turn_group_advantage(outcome_n, turns_nt.astype(dtype), group_n, valid_n.astype(dtype))
        np.testing.assert_array_equal(found_nt, expected_nt)
