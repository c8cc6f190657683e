"""Aggregation: worked weights, identities between the means, and law F2."""

from functools import partial

import jax
import numpy as np
import pytest
from cases import make_case, members, signal

import flowgrpo as fg
from flowgrpo.algorithms.weight import action_mean, constant_length, exclude_versions_before

WAYS = {
    "flow_weights": fg.flow_weights,
    "sequence_mean": fg.sequence_mean,
    "action_mean": action_mean,
    "token_mean": fg.token_mean,
    "sequence_sum": fg.sequence_sum,
    "constant_length": partial(constant_length, max_tokens=10),
}
SUM_TO_ONE = tuple(WAYS)[:4]


@jax.jit
def every_way(chosen_ntl, turns_nt, group_n, valid_n):
    return {name: weigh(chosen_ntl, turns_nt, group_n, valid_n) for name, weigh in WAYS.items()}


def weights(lengths, group=(4, 4, 9), valid=(1, 1, 1)) -> dict[str, np.ndarray]:
    """The weight of one token of each turn, in every way, for turns of these lengths."""
    lengths_nt = np.array(lengths)
    chosen_ntl = np.arange(5) < lengths_nt[:, :, None]
    found = every_way(chosen_ntl, np.ones(lengths_nt.shape, bool), np.array(group), np.array(valid, bool))
    for w_ntl in found.values():
        np.testing.assert_array_equal(w_ntl, np.where(chosen_ntl, w_ntl[:, :, :1], 0))
    return {name: np.asarray(w_ntl)[:, :, 0] for name, w_ntl in found.items()}


# Query 4 has trajectories of 1 turn (2 tokens) and of 2 turns (1 and 4 tokens); query 9 one of 1 turn (5).
WORKED = [[2, 0], [1, 4], [5, 0]]


def test_F2_worked_weights():
    """A turn without a chosen token does not count among T_i."""
    expected = {
        "flow_weights": [[1 / 8, 0], [1 / 8, 1 / 32], [1 / 10, 0]],  # 1/Q 1/G 1/T 1/|a|
        "sequence_mean": [[1 / 8, 0], [1 / 20, 1 / 20], [1 / 10, 0]],  # 1/Q 1/G 1/|o|
        "action_mean": [[1 / 12, 0], [1 / 6, 1 / 24], [1 / 10, 0]],  # 1/Q 1/(actions of the query) 1/|a|
        "token_mean": [[1 / 12, 0], [1 / 12, 1 / 12], [1 / 12, 0]],  # 12 tokens in all
        "sequence_sum": [[1 / 4, 0], [1 / 4, 1 / 4], [1 / 2, 0]],  # 1/Q 1/G
        "constant_length": [[1 / 30, 0], [1 / 30, 1 / 30], [1 / 30, 0]],  # 1/(trajectories x 10)
    }
    for name, found_nt in weights(WORKED).items():
        np.testing.assert_allclose(found_nt, expected[name], rtol=1e-6, err_msg=name)
    lost = weights(WORKED, valid=(1, 0, 1))["constant_length"]
    np.testing.assert_allclose(lost, [[1 / 20, 0], [0, 0], [1 / 20, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("valid", "shares"),
    [((1, 1, 1), (0.5, 0.5)), ((0, 1, 1), (0.5, 0.5)), ((1, 1, 0), (1, 0)), ((0, 0, 1), (0, 1)), ((0, 0, 0), (0, 0))],
)
def test_F2_mean_over_queries_is_outside(valid, shares):
    """A query has the same share however many valid trajectories it has; one without any is left out."""
    found = weights(WORKED, valid=valid)
    for name in ("flow_weights", "sequence_mean", "action_mean"):
        share_n = (found[name] * WORKED).sum(axis=1)
        assert (share_n[:2].sum(), share_n[2]) == pytest.approx(shares), name
    assert found["token_mean"].any() == any(valid)


def test_identities_between_the_means():
    """One turn each: flow = sequence mean. Equal lengths: all means agree, and the sum is the mean x length."""
    one_turn = weights([[2, 0], [5, 0], [3, 0]])
    np.testing.assert_allclose(one_turn["flow_weights"], one_turn["sequence_mean"], rtol=1e-6)
    equal = weights([[2, 2]] * 3, group=(1, 2, 3))
    for name in SUM_TO_ONE:
        np.testing.assert_allclose(equal[name], np.full((3, 2), 1 / 12), rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(equal["sequence_sum"], np.full((3, 2), 4 / 12), rtol=1e-6)


def test_means_sum_to_one_and_weigh_chosen_tokens_of_valid_trajectories_only():
    for seed in range(5):
        trajectories = make_case(seed, invalid=0.3).trajectories
        valid_n = np.asarray(trajectories.valid)
        found = every_way(trajectories.chosen, trajectories.turns, trajectories.group, valid_n)
        for name, w_ntl in found.items():
            np.testing.assert_array_equal(w_ntl > 0, trajectories.chosen & valid_n[:, None, None], err_msg=name)
            assert name not in SUM_TO_ONE or w_ntl.sum() == pytest.approx(1.0, abs=1e-5), name


def test_F2_excluded_segments_keep_their_place_in_the_denominators():
    """Tokens of older weights get weight 0; the newer ones keep theirs, and so does every other trajectory."""
    weight_ntl = np.random.default_rng(0).uniform(size=(3, 2, 5)).astype(np.float32)
    version_ntl = np.broadcast_to([3, 3, 4, 5, 5], (3, 2, 5))
    newest_ntl = exclude_versions_before(weight_ntl, version_ntl, 4)
    np.testing.assert_array_equal(newest_ntl, np.where(version_ntl >= 4, weight_ntl, 0.0))


@pytest.mark.parametrize("name", [name for name, member in members().items() if "F2" in member.keeps])
def test_F2_members_that_declare_it_weigh_as_flow_weights(name):
    x = make_case(3).trajectories
    expected_ntl = every_way(x.chosen, x.turns, x.group, np.asarray(x.valid))["flow_weights"]
    np.testing.assert_allclose(signal(members()[name])(x)[1], expected_ntl, rtol=1e-6)
