"""Advantages: worked numbers, plain loops, and identities to neighbours."""

import re
from functools import partial

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
    return_to_go,
    row_group_advantage,
    turn_index,
    turn_rewards,
)

NORMALIZERS = {
    "group_zscore": fg.group_zscore,
    "group_center": fg.algorithms.group_center,
    "leave_one_out": fg.algorithms.leave_one_out,
}
NAIVE = {"group_zscore": naive.zscores, "group_center": naive.centred, "leave_one_out": naive.others}
N = 12  # one shape, compiled once


@jax.jit
def every_normalizer(outcome_n, group_n, valid_n):
    return {name: normalize(outcome_n, group_n, valid_n) for name, normalize in NORMALIZERS.items()}


def normalized(outcome, group=None) -> dict[str, np.ndarray]:
    """Apply each normalizer to up to twelve valid trajectories; the rest is invalid, and of the first group."""
    size, group = len(outcome), group or [0] * len(outcome)
    outcome_n, group_n = np.zeros(N, np.float32), np.full(N, group[0])
    outcome_n[:size], group_n[:size] = outcome, group
    found = every_normalizer(outcome_n, group_n, np.arange(N) < size)
    assert not any(np.asarray(adv_n)[size:].any() for adv_n in found.values())
    return {name: np.asarray(adv_n)[:size] for name, adv_n in found.items()}


# Groups -----------------------------------------------------------------------------------------------


def test_worked_numbers_of_one_group():
    """Rewards 1, 0, 0, 3: mean 1, squares 0 1 1 4, unbiased deviation sqrt 2; others' means 1, 4/3, 4/3, 1/3."""
    found, root = normalized([1, 0, 0, 3]), 2**0.5
    np.testing.assert_allclose(found["group_center"], [0, -1, -1, 2], atol=1e-6)
    np.testing.assert_allclose(found["group_zscore"], [0, -1 / root, -1 / root, 2 / root], atol=1e-5)
    np.testing.assert_allclose(found["leave_one_out"], [0, -4 / 3, -4 / 3, 8 / 3], atol=1e-6)


ROWS = st.tuples(st.sampled_from([0.0, 0.25, 1.0, 0.91]), st.sampled_from([-3, 0, 11]), st.booleans())


@given(st.lists(ROWS, min_size=N, max_size=N), st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e30]))
def test_F5_normalizers_equal_plain_loops_over_valid_trajectories(rows, garbage):
    members = [{"group": g, "outcome": np.float32(r), "i": i} for i, (r, g, v) in enumerate(rows) if v]
    outcome_n, group_n, valid_n = (np.array(column) for column in zip(*rows, strict=True))
    with jax.debug_nans(False):
        found = every_normalizer(np.where(valid_n, outcome_n, garbage).astype(np.float32), group_n, valid_n)
    for name, found_n in found.items():
        by_id, expected_n = naive.over_groups(members, NAIVE[name]), np.zeros(N)
        expected_n[[m["i"] for m in members]] = [by_id[id(m)] for m in members]
        np.testing.assert_allclose(found_n, expected_n, atol=1e-5, err_msg=name)


@jax.jit
def ids_and_counts(first_m, second_m):
    id_m = dense_ids(first_m, second_m)
    return id_m, group_sum(jnp.ones(len(id_m)), id_m, jnp.ones(len(id_m), bool))


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), min_size=15, max_size=15))
def test_dense_ids_are_equal_exactly_for_equal_keys(rows):
    first, second = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    id_m, count_m = map(np.asarray, ids_and_counts(first, second))
    same = (first[:, None] == first) & (second[:, None] == second)
    np.testing.assert_array_equal(id_m[:, None] == id_m, same)
    assert id_m.min() == 0
    assert id_m.max() == len(set(rows)) - 1
    np.testing.assert_array_equal(count_m, same.sum(1))


def test_F4_equal_rewards_and_singletons_give_exactly_zero():
    """0.91 repeated has a mean that is not 0.91 in float32; a singleton gives zero, not R; eps shrinks sizes alone."""
    for reward in (0.91, 0.1, 1e-30, 1e20, 0.0):
        for name, adv_n in normalized([reward] * 11, [3] * 7 + [4] * 3 + [5]).items():
            assert not adv_n.any(), name
    expected = 0.5e-6 / (1e-6 / 2**0.5 + 1e-6)
    np.testing.assert_allclose(normalized([0.0, 1e-6])["group_zscore"], [-expected, expected], rtol=1e-4)


@pytest.mark.usefixtures("nan_allowed")
def test_nan_declared_valid_is_not_hidden():
    """A valid NaN makes its own group NaN, and no other."""
    for adv_n in normalized([1, np.nan, 0, 1], [0, 0, 1, 1]).values():
        np.testing.assert_array_equal(np.isnan(adv_n), [True, True, False, False])


# Over turns -------------------------------------------------------------------------------------------


def test_F1_statistics_over_trajectories_and_F9_over_rows():
    """Wins of 2 turns, losses of 6: the mean over trajectories is 1/2, over turn rows 1/4.

    (1 - 1/2) / sqrt(4 * 1/4 / 3) = 0.866, whatever the number of turns; of 4 rows of 1 and 12 of 0, the deviation
    is sqrt(3/15): +1.677 and -0.559. A fifth trajectory is invalid, and a sixth has no turn.
    """
    turns_nt = np.arange(6) < np.array([[2], [2], [6], [6], [3], [0]])
    outcome_n, valid_n = np.array([1, 1, 0, 0, 9, 9], np.float32), np.array([1, 1, 1, 1, 0, 1])
    by_trajectory, by_row = jax.jit(fg.multi_turn_group_advantage), jax.jit(row_group_advantage)
    for give, expected in ((by_trajectory, [0.8660, -0.8660]), (by_row, [1.6771, -0.5590])):
        expected_n = np.array([*np.repeat(expected, 2), 0, 0])[:, None]
        for dtype in (bool, np.int32, np.float32):  # masks may be numbers, as other code bases write them
            adv_nt = give(outcome_n, turns_nt.astype(dtype), np.full(6, 7), valid_n.astype(dtype))
            np.testing.assert_allclose(adv_nt, np.where(turns_nt, expected_n, 0.0), atol=1e-4)


def test_return_to_go_by_hand():
    """gamma 1/2 over payments 1, 2, 4: 1 + (2 + 4/2)/2 = 3, 2 + 2 = 4, 4; a missing turn is skipped."""
    reward_nt, turns_nt = np.array([[1, 2, 4], [1, 9, 4]], np.float32), np.array([[1, 1, 1], [1, 0, 1]], bool)
    np.testing.assert_allclose(return_to_go(reward_nt, turns_nt, gamma=0.5), [[3, 4, 4], [3, 0, 4]])


def test_anchor_advantage_by_hand():
    """State 8 of group 0 is met three times with returns 1, 2, 3; state 9 once, which gives zero."""
    return_nt = np.array([[1.0, 5.0], [2.0, 3.0]], np.float32)
    root = 0.5**0.5
    for wide in (0, 2**60):
        anchor_nt = np.add([[8, 9], [8, 8]], [[wide, 0], [wide, wide]])
        for groups, expected in (([0, 0], [[-1, 0], [0, 1]]), ([0, 1], [[0, 0], [-root, root]])):
            adv_nt = anchor_advantage(return_nt, anchor_nt, np.ones((2, 2), bool), np.array(groups), np.ones(2, bool))
            np.testing.assert_allclose(adv_nt, expected, atol=1e-5)


def paid_trajectories(*payments):
    """A group of trajectories whose turns are paid like this."""
    turns = [[fg.Turn([1], [True], [-0.5], reward=reward) for reward in paid] for paid in payments]
    return fg.collate([fg.Trajectory(own, float(sum(paid)), 0) for own, paid in zip(turns, payments, strict=True)])


def test_turn_index_counts_existing_turns():
    np.testing.assert_array_equal(turn_index([[1, 1, 0], [1, 0, 1]]), [[1, 2, 2], [1, 1, 2]])


def test_mt_grpo_by_hand():
    """Payments (1, 0), (3, 2) and (4): z-scores of 1 and 3 are -+0.707, of the last ones 0, 2, 4 -1, 0, 1.

    The first turns of two have both, lam times the latter; the last turns have the latter alone.
    """
    adv_nt = fg.algorithms.mt_grpo(lam=0.5).advantages(paid_trajectories((1.0, 0.0), (3.0, 2.0), (4.0,)))
    root = 0.5**0.5
    np.testing.assert_allclose(adv_nt, [[-root - 0.5, -1.0], [root, 0.0], [1.0, 0.0]], atol=1e-5)


def test_mt_grpo_of_outcomes_alone_is_the_broadcast():
    x = fg.collate([fg.Trajectory([fg.Turn([1], [True], [-0.5])] * n, float(n > 1), 0) for n in (1, 2, 3, 1)])
    expected_nt = fg.flow_grpo().advantages(x)
    np.testing.assert_allclose(fg.algorithms.mt_grpo().advantages(x), expected_nt, atol=1e-6)


def test_trloo_by_hand():
    """Returns (1, 0), (5, 2) and (4): less the mean of the others, 1 - 4.5, 5 - 2.5, 4 - 3; then 0 - 2 and 2 - 0."""
    adv_nt = fg.algorithms.trloo().advantages(paid_trajectories((1.0, 0.0), (3.0, 2.0), (4.0,)))
    np.testing.assert_allclose(adv_nt, [[-3.5, -2.0], [2.5, 2.0], [1.0, 0.0]], atol=1e-6)
    alone = fg.algorithms.trloo().advantages(paid_trajectories((1.0, 0.0), (4.0,)))
    np.testing.assert_allclose(alone, [[-3.0, 0.0], [3.0, 0.0]], atol=1e-6)


def test_per_turn_zscores_are_biased_by_length_and_leave_one_out_is_not():
    """Stopping pays 0; going on pays 1 and then loses 1: each is worth 0, so the gradient of going on must vanish.

    In expectation over pairs of trajectories of a policy that goes on with p = 1/2 (exact: all four pairs).
    """
    stop, go = (0.0,), (1.0, -1.0)

    def push(algorithm):
        """E[A^1 d log pi(a^1)] of the logit of going on, which is 1/2 for going and -1/2 for stopping."""
        total = 0.0
        for pair in ((stop, stop), (stop, go), (go, stop), (go, go)):
            adv_nt = np.asarray(algorithm.advantages(paid_trajectories(*pair)))
            total += sum(adv_nt[i, 0] * (0.5 if own == go else -0.5) for i, own in enumerate(pair)) / 4
        return total

    assert push(fg.algorithms.trloo()) == pytest.approx(0.0, abs=1e-6)
    assert push(fg.algorithms.mt_grpo()) < -0.1  # a loss of the last turn is seen, its earlier pay is not


def test_turn_rewards_sum_to_the_outcome():
    """An outcome alone falls to the last turn; payments by turn stay, and the rest falls to the last."""
    turns = [fg.Turn([1], [True], [0.0], reward=reward) for reward in (0.5, 0.25)]
    x = fg.collate([fg.Trajectory(turns, 1.0, 0), fg.Trajectory(turns[:1], 0.5, 0)])
    for by_turn, expected in (
        (x.by_turn, [[0.5, 0.5], [0.5, 0]]),
        (~x.by_turn, [[0, 1], [0.5, 0]]),
        (None, [[0, 1], [0.5, 0]]),
    ):
        np.testing.assert_allclose(turn_rewards(x.replace(by_turn=by_turn), x.outcome), expected)


# Over time --------------------------------------------------------------------------------------------


def test_gae_by_hand():
    """gamma 1/2, lambda 1/2, rewards 1 1, values 2 4, V after the end 8: the last delta is 1 + 4 - 4 = 1,
    the first 1 + 2 - 2 = 1 plus a quarter of the last."""
    stream = jnp.ones(2), jnp.array([2.0, 4.0]), jnp.zeros(2)
    found = fg.algorithms.gae(*stream, gamma=0.5, lam=0.5, last_value=8.0)
    np.testing.assert_allclose(found, [[1.25, 1.0], [3.25, 5.0]])
    np.testing.assert_allclose(fg.algorithms.gae(*stream, gamma=0.5, lam=0.5)[0], [1 + 2 - 2 - 0.75, -3])


@jax.jit
def gae(reward_t, value_t, done_t, mask_t, lam):
    return fg.algorithms.gae(reward_t, value_t, done_t, gamma=0.9, lam=lam, last_value=0.5, mask_t=mask_t)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=8, max_size=8), st.sampled_from([0.0, 0.8, 1.0]))
def test_gae_equals_plain_loops_over_unmasked_steps(flags, lam):
    """A done step sees nothing after it; steps outside the mask are as if they were not there."""
    mask_t, done_t = (np.array(column) for column in zip(*flags, strict=True))
    reward_t, value_t = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    garbage_t = np.where(mask_t, value_t, np.float32(np.nan))
    found = gae(reward_t, garbage_t, done_t.astype(np.float32), mask_t, lam)
    kept, expected_t = np.flatnonzero(mask_t), np.zeros(8)
    for part in np.split(kept, np.flatnonzero(done_t[kept]) + 1):
        last_value = 0.0 if len(part) and done_t[part[-1]] else 0.5
        expected_t[part] = naive.gae(reward_t[part].tolist(), value_t[part].tolist(), last_value, 0.9, lam)
    expected = [expected_t, np.where(mask_t, expected_t + value_t, 0)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# What is refused --------------------------------------------------------------------------------------

ONES, ZEROS, TURNS = np.ones(3, bool), np.zeros(3, int), np.ones((4, 2), bool)
REFUSED = [
    (fg.group_zscore, (np.zeros(3), np.zeros(2, int), ONES), "group_n has 2 on axis n, but outcome_n has 3"),
    (fg.algorithms.group_center, (np.zeros((3, 1)), ZEROS, ONES), "outcome_n has shape (3, 1)"),
    (fg.algorithms.leave_one_out, (np.zeros(0), np.zeros(0, int), np.ones(0, bool)), "nothing on axis n"),
    (fg.algorithms.mixed_groups, (ONES, ZEROS, np.ones(4, bool)), "valid_n has 4 on axis n"),
    (fg.multi_turn_group_advantage, (np.zeros(3), TURNS, ZEROS, ONES), "multi_turn_group_advantage: turns_nt has 4"),
    (row_group_advantage, (np.zeros(3), TURNS, ZEROS, ONES), "row_group_advantage: turns_nt has 4 on axis n"),
    (fg.flow_weights, (np.ones((4, 4, 5), bool), TURNS, ZEROS, ONES), "weights: turns_nt has 2 on axis t"),
    (
        partial(fg.algorithms.gae, gamma=1.0, lam=1.0),
        (np.zeros(3), np.zeros(2), np.zeros(3)),
        "gae: value_t has 2 on axis t",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "words"), REFUSED)
def test_mismatched_or_empty_arrays_are_named(function, arguments, words):
    with pytest.raises(fg.BadInput, match=re.escape(words)):
        function(*arguments)
