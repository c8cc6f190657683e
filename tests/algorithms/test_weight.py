"""Aggregation: worked weights, identities between the means, and law F2."""

import jax
import numpy as np
import pytest
from cases import make_case, members

import flowgrpo as fg
from flowgrpo.algorithms.weight import action_mean, constant_length, exclude_versions_before

SUM_TO_ONE = {
    "flow_weights": fg.flow_weights,
    "sequence_mean": fg.sequence_mean,
    "action_mean": action_mean,
    "token_mean": fg.token_mean,
}


def worked():
    """Query 4 has trajectories of 1 turn (2 tokens) and of 2 turns (1 and 4 tokens); query 9 one of 1 turn (5)."""
    lengths_nt = np.array([[2, 0], [1, 4], [5, 0]])
    chosen_ntl = np.arange(5) < lengths_nt[:, :, None]
    return chosen_ntl, lengths_nt > 0, np.array([4, 4, 9]), np.ones(3, bool)


def by_turn(weights_ntl):
    """The weight of one token of each turn."""
    return np.asarray(weights_ntl)[:, :, 0]


@pytest.mark.parametrize(
    ("weigh", "expected"),
    [
        (fg.flow_weights, [[1 / 8, 0], [1 / 8, 1 / 32], [1 / 10, 0]]),  # 1/Q 1/G 1/T 1/|a|
        (fg.sequence_mean, [[1 / 8, 0], [1 / 20, 1 / 20], [1 / 10, 0]]),  # 1/Q 1/G 1/|o|
        (fg.sequence_sum, [[1 / 4, 0], [1 / 4, 1 / 4], [1 / 2, 0]]),  # 1/Q 1/G
        (action_mean, [[1 / 12, 0], [1 / 6, 1 / 24], [1 / 10, 0]]),  # 1/Q 1/(actions of the query) 1/|a|
        (fg.token_mean, [[1 / 12, 0], [1 / 12, 1 / 12], [1 / 12, 0]]),  # 12 tokens in all
    ],
)
def test_F2_worked_weights(weigh, expected):
    np.testing.assert_allclose(by_turn(weigh(*worked())), expected, rtol=1e-6)


def test_constant_length_divides_by_valid_trajectories_times_max_tokens():
    chosen_ntl, turns_nt, group_n, _ = worked()
    valid_n = np.array([True, False, True])
    weights_ntl = constant_length(chosen_ntl, turns_nt, group_n, valid_n, max_tokens=10)
    np.testing.assert_allclose(by_turn(weights_ntl), [[1 / 20, 0], [0, 0], [1 / 20, 0]], rtol=1e-6)


@pytest.mark.parametrize("weigh", SUM_TO_ONE.values(), ids=SUM_TO_ONE)
@pytest.mark.parametrize("seed", range(5))
def test_means_sum_to_one_and_weigh_chosen_tokens_of_valid_trajectories_only(weigh, seed):
    trajectories = make_case(seed, invalid=0.3).trajectories
    valid_n = np.asarray(trajectories.valid)
    weights_ntl = np.asarray(weigh(trajectories.chosen, trajectories.turns, trajectories.group, valid_n))
    assert weights_ntl.sum() == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_array_equal(weights_ntl > 0, trajectories.chosen & valid_n[:, None, None])


def test_F2_mean_over_queries_is_outside():
    """A query has the same share however many valid trajectories it has; one without any is left out."""
    chosen_ntl, turns_nt, group_n, _ = worked()
    for valid_n, shares in (
        ([1, 1, 1], [0.5, 0.5]),
        ([0, 1, 1], [0.5, 0.5]),
        ([1, 1, 0], [1.0, 0.0]),
        ([0, 0, 1], [0.0, 1.0]),
    ):
        weights_ntl = np.asarray(fg.flow_weights(chosen_ntl, turns_nt, group_n, np.array(valid_n, bool)))
        assert [weights_ntl[group_n == g].sum() for g in (4, 9)] == pytest.approx(shares)


def test_F2_a_turn_without_a_chosen_token_does_not_count():
    """T_i counts turns with at least one chosen token, so an empty second turn changes nothing."""
    chosen_ntl = np.array([[[1, 1], [0, 0]], [[1, 0], [1, 0]]], bool)
    group_n, valid_n = np.zeros(2, int), np.ones(2, bool)
    weights_ntl = fg.flow_weights(chosen_ntl, np.ones((2, 2), bool), group_n, valid_n)
    np.testing.assert_allclose(weights_ntl, [[[1 / 4, 1 / 4], [0, 0]], [[1 / 4, 0], [1 / 4, 0]]])


def test_F2_excluded_segments_keep_their_place_in_the_denominators():
    """Tokens of older weights get weight 0; the newer ones keep theirs, and so does every other trajectory."""
    chosen_ntl, turns_nt, group_n, valid_n = worked()
    weights_ntl = np.asarray(fg.flow_weights(chosen_ntl, turns_nt, group_n, valid_n))
    version_ntl = np.where(np.arange(5) < 2, 3, 4) * np.ones(chosen_ntl.shape, int)
    newest_ntl = np.asarray(exclude_versions_before(weights_ntl, version_ntl, 4))
    np.testing.assert_array_equal(newest_ntl, np.where(version_ntl == 4, weights_ntl, 0.0))
    assert newest_ntl.sum() < 1.0


def test_identities_between_the_means():
    """One turn each: flow = sequence mean. Equal lengths: all means agree. Sum = mean x length."""
    group_n, valid_n = np.array([0, 0, 1, 1]), np.ones(4, bool)
    one_turn_ntl = np.arange(5) < np.array([2, 5, 1, 3])[:, None, None]
    flow = fg.flow_weights(one_turn_ntl, np.ones((4, 1), bool), group_n, valid_n)
    np.testing.assert_allclose(flow, fg.sequence_mean(one_turn_ntl, np.ones((4, 1), bool), group_n, valid_n), rtol=1e-6)
    equal_ntl, turns_nt = np.ones((4, 3, 2), bool), np.ones((4, 3), bool)
    for weigh in SUM_TO_ONE.values():
        np.testing.assert_allclose(weigh(equal_ntl, turns_nt, group_n, valid_n), np.full((4, 3, 2), 1 / 24), rtol=1e-6)
    total = fg.sequence_sum(equal_ntl, turns_nt, group_n, valid_n)
    np.testing.assert_allclose(total, np.full((4, 3, 2), 6 / 24), rtol=1e-6)


def test_no_valid_trajectory_weighs_nothing():
    chosen_ntl, turns_nt, group_n, valid_n = worked()
    for weigh in (*SUM_TO_ONE.values(), fg.sequence_sum):
        assert not np.asarray(weigh(chosen_ntl, turns_nt, group_n, ~valid_n)).any()


@pytest.mark.parametrize("name", [name for name, member in members().items() if "F2" in member.keeps])
def test_F2_members_that_declare_it_weigh_as_flow_weights(name):
    trajectories = make_case(3).trajectories
    expected_ntl = fg.flow_weights(trajectories.chosen, trajectories.turns, trajectories.group, trajectories.valid)
    np.testing.assert_array_equal(members()[name].weights(trajectories), expected_ntl)


def test_weights_jit_and_vmap():
    cases = [make_case(seed).trajectories for seed in range(3)]
    fields = [(case.chosen, case.turns, case.group, np.asarray(case.valid)) for case in cases]
    stacked = [np.stack(column) for column in zip(*fields, strict=True)]
    for weigh in (*SUM_TO_ONE.values(), fg.sequence_sum):
        looped = np.stack([weigh(*row) for row in fields])
        np.testing.assert_allclose(jax.jit(jax.vmap(weigh))(*stacked), looped, atol=1e-7)
