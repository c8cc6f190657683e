"""The two pytrees and what follows from a status; the ledger of generated tokens."""

import re

import jax
import numpy as np
import pytest
from family_cases import make_turn, random_records, score

import flowgrpo as fg
from flowgrpo.types import BOOTSTRAPS, COUNTS, check_axes, map_axis


def dense(**changes) -> fg.Trajectories:
    """Twelve trajectories of up to 4 turns of up to 10 tokens."""
    return fg.collate(random_records(0), turns=4, length=10).replace(**changes)


def small_batch(**changes) -> fg.Batch:
    """One row of eight tokens."""
    records = [fg.Trajectory([make_turn(np.random.default_rng(0), 2, 2)], 1.0, 0)]
    return fg.pack(records, np.ones((1, 1)), np.ones((1, 1)), row_length=8).replace(**changes)


# check_axes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (dense(chosen=np.zeros((12, 3, 10))), "Trajectories.chosen has 3 on axis t, but tokens has 4"),
        (dense(by_turn=np.zeros(1)), "Trajectories.by_turn has 1 on axis n, but tokens has 12"),
        (dense(logp_ref=np.zeros((12, 4, 1))), "Trajectories.logp_ref has 1 on axis l, but tokens has 10"),
        (dense(reward=np.zeros(12)), "Trajectories.reward has shape (12,), but its axes are (n, t)"),
        (dense(status=np.zeros(())), "Trajectories.status has shape (), but its axes are (n)"),
        (small_batch(group=np.zeros((2, 8))), "Batch.group has 2 on axis r, but tokens has 1"),
        (small_batch(target=np.zeros((1, 9))), "Batch.target has 9 on axis s, but tokens has 8"),
    ],
)
def test_axes_that_disagree_are_named_with_both_sizes(tree, message):
    with pytest.raises(fg.BadInput, match=f"^{re.escape(message)}$"):
        check_axes(tree)
    for whole in (dense(length=None, starts_context=None, by_turn=None), score(dense()), small_batch()):
        check_axes(whole)


@pytest.mark.parametrize("tree", [score(dense()), small_batch()], ids=["Trajectories", "Batch"])
def test_map_axis_changes_every_field_that_has_the_axis(tree):
    """Whatever fields there are: sizes agree afterwards, and twice of an axis, halved again, is the same tree."""
    for position, axis in enumerate("ntl" if isinstance(tree, fg.Trajectories) else "rs"):
        twice = map_axis(tree, axis, lambda x, place: np.repeat(x, 2, place))
        check_axes(twice)
        assert np.shape(twice.tokens)[position] == 2 * np.shape(tree.tokens)[position]
        again = map_axis(twice, axis, lambda x, place: np.take(x, np.arange(0, x.shape[place], 2), place))
        jax.tree.map(np.testing.assert_array_equal, again, tree)
    with pytest.raises(fg.BadInput, match="has no axis 'z'; choose from"):
        map_axis(tree, "z", np.sum)


# What follows from a status, from turns and from weights ----------------------------------------------


def test_F5_which_endings_count_and_which_bootstrap():
    counting, cut = ["FINISHED", "TURN_LIMIT", "TOKEN_LIMIT", "TIMEOUT", "REPETITION"], ["TURN_LIMIT", "TOKEN_LIMIT"]
    found = one_each(len(fg.types.Status), status=np.array(fg.types.Status))
    for status, valid, bootstraps in zip(fg.types.Status, found.valid, found.bootstraps, strict=True):
        expected = (status.name in counting, status.name in cut)
        assert (valid, bootstraps) == (COUNTS[status], BOOTSTRAPS[status]) == fg.types.ENDINGS[status][:2] == expected


def one_each(num: int, **changes) -> fg.Trajectories:
    """`num` trajectories of two turns of three tokens, the last of them chosen; the second turn does not exist."""
    records = [fg.Trajectory([make_turn(np.random.default_rng(0), 2, 1)], 1.0, 0)] * num
    made = {"chosen": np.tile([False, False, True], (num, 2, 1)), "length": None} | changes
    return fg.collate(records, turns=2, length=3).replace(**made)


def test_F5_valid_needs_a_finite_outcome_and_a_chosen_token():
    outcome_n = np.array([0.0, -3.0, np.nan, np.inf, -np.inf, 1.0], np.float32)
    trajectories = one_each(6, outcome=outcome_n)
    trajectories.chosen[5, 0] = False  # what is left is chosen in a turn that does not exist
    assert trajectories.valid.tolist() == [True, True, False, False, False, False]


def test_acted_counts_existing_turns_with_a_chosen_token():
    trajectories = one_each(3, turns=np.array([[True, True], [True, True], [True, False]]))
    trajectories.chosen[1, 0] = False
    cut = one_each(2, length=np.array([[3, 0], [2, 0]]))
    acted = jax.jit(lambda x: x.acted)
    for tree, expected in (
        (trajectories, [[True] * 2, [False, True], [True, False]]),
        (cut, [[True, False], [False] * 2]),
    ):
        assert tree.acted.tolist() == acted(tree).tolist() == expected


def test_loss_mask_is_chosen_tokens_of_non_zero_weight():
    batch = small_batch()
    assert batch.loss_mask.tolist() == [[False, False, True, True] + [False] * 4]
    everywhere = batch.replace(chosen=np.ones((1, 8), bool), weight=np.ones((1, 8), np.float32))
    assert everywhere.loss_mask.tolist() == [[True] * 4 + [False] * 4]
    assert not batch.replace(weight=np.zeros((1, 8), np.float32)).loss_mask.any()


def test_A6_ledgers_add_and_account_for_every_token():
    left = fg.types.Ledger(5, {fg.types.Fate.TRAINED: 3, fg.types.Fate.DROPPED_TOO_LONG: 2})
    right = fg.types.Ledger(4, {fg.types.Fate.TRAINED: 1, fg.types.Fate.MASKED_INVALID: 3})
    total = fg.types.Ledger(
        9, {fg.types.Fate.TRAINED: 4, fg.types.Fate.DROPPED_TOO_LONG: 2, fg.types.Fate.MASKED_INVALID: 3}
    )
    assert left + right == total.check() == right + left
    assert left + fg.types.Ledger().check() == left
    assert {fate.name.split("_")[0] for fate in fg.types.Fate} == {"TRAINED", "MASKED", "DROPPED"}


@pytest.mark.parametrize(("trained", "masked"), [(6, 3), (8, 3), (11, -1)])
def test_A6_counts_that_do_not_add_up_raise(trained, masked):
    ledger = fg.types.Ledger(10, {fg.types.Fate.TRAINED: trained, fg.types.Fate.MASKED_INVALID: masked})
    words = f"10 tokens were generated, but {trained + masked} are accounted for: trained {trained}, masked_invalid"
    with pytest.raises(AssertionError, match=f"^{words} {masked}$"):
        ledger.check()
