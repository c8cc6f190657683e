"""Aggregation: worked weights, identities between the means, and law F2."""

from functools import partial

import jax
import numpy as np
import pytest
from family_cases import make_case, members, signal

import flowgrpo as fg
from flowgrpo.algorithms.aggregation import action_mean, constant_length, exclude_versions_before

WAYS = {
    "flow_weights": fg.flow_weights,
    "sequence_mean": fg.algorithms.sequence_mean,
    "action_mean": action_mean,
    "token_mean": fg.algorithms.token_mean,
    "sequence_sum": fg.algorithms.sequence_sum,
    "constant_length": partial(constant_length, max_tokens=10),
}


@jax.jit
def every_way(chosen_ntl, turns_nt, group_n, valid_n):
    return {name: weigh(chosen_ntl, turns_nt, group_n, valid_n) for name, weigh in WAYS.items()}


def test_F2_worked_weights():
    """Query 4 has trajectories of 1 turn (2 tokens) and 2 (1 and 4), query 9 one of 1 (1), query 5 an invalid one.

    A turn without a chosen token does not count among T_i.
    """
    lengths_nt = np.array([[2, 0], [1, 4], [1, 0], [3, 3]])
    expected = {
        "flow_weights": [[1 / 8, 0], [1 / 8, 1 / 32], [1 / 2, 0]],  # 1/Q 1/G 1/T 1/|a|
        "sequence_mean": [[1 / 8, 0], [1 / 20, 1 / 20], [1 / 2, 0]],  # 1/Q 1/G 1/|o|
        "action_mean": [[1 / 12, 0], [1 / 6, 1 / 24], [1 / 2, 0]],  # 1/Q 1/(actions of the query) 1/|a|
        "token_mean": [[1 / 8, 0], [1 / 8, 1 / 8], [1 / 8, 0]],  # 8 tokens in all
        "sequence_sum": [[1 / 4, 0], [1 / 4, 1 / 4], [1 / 2, 0]],  # 1/Q 1/G
        "constant_length": [[1 / 30, 0], [1 / 30, 1 / 30], [1 / 30, 0]],  # 1/(trajectories x 10)
    }
    chosen_ntl = np.arange(5) < lengths_nt[:, :, None]
    for name, found_ntl in every_way(
        chosen_ntl, np.ones((4, 2), bool), np.array([4, 4, 9, 5]), np.array([1, 1, 1, 0])
    ).items():
        expected_ntl = np.where(chosen_ntl, np.array([*expected[name], [0, 0]])[:, :, None], 0)
        np.testing.assert_allclose(found_ntl, expected_ntl, rtol=1e-6, err_msg=name)


def test_means_sum_to_one_over_chosen_tokens_of_valid_trajectories():
    for seed in range(5):
        trajectories = make_case(seed, invalid=0.3).trajectories
        valid_n = np.asarray(trajectories.valid) & (seed < 4)
        found = every_way(trajectories.chosen, trajectories.turns, trajectories.group, valid_n)
        for name, w_ntl in found.items():
            np.testing.assert_array_equal(w_ntl > 0, trajectories.chosen & valid_n[:, None, None], err_msg=name)
            assert name not in tuple(WAYS)[:4] or w_ntl.sum() == pytest.approx(float(seed < 4)), name


@pytest.mark.parametrize("name", WAYS)
def test_arrays_that_do_not_fit_are_named(name):
    with pytest.raises(fg.BadInput, match=r"weights: .*group_n"):
        WAYS[name](np.ones((3, 2, 4), bool), np.ones((3, 2), bool), np.zeros(2, int), np.ones(3, bool))


def test_F2_excluded_segments_still_count_in_the_denominators():
    """Tokens of older weights get weight 0; the newer ones keep theirs, and so does every other trajectory."""
    weight_ntl = np.random.default_rng(0).uniform(size=(3, 2, 5)).astype(np.float32)
    version_ntl = np.broadcast_to([3, 3, 4, 5, 5], (3, 2, 5))
    newest_ntl = exclude_versions_before(weight_ntl, version_ntl, 4)
    np.testing.assert_array_equal(newest_ntl, np.where(version_ntl >= 4, weight_ntl, 0.0))


def test_F2_members_that_declare_it_weigh_as_flow_weights():
    x = make_case(3).trajectories
    expected_ntl = every_way(x.chosen, x.turns, x.group, np.asarray(x.valid))["flow_weights"]
    for member in members().values():
        assert "F2" not in member.laws or np.allclose(signal(member)(x)[1], expected_ntl, rtol=1e-6)
