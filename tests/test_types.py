"""The two pytrees and what follows from a status; the ledger of generated tokens."""

import re

import jax
import numpy as np
import pytest
from cases import make_turn, random_records, score

import flowgrpo as fg
from flowgrpo.types import BOOTSTRAPS, COUNTS, check_axes


def dense(**changes) -> fg.Trajectories:
    """Twelve trajectories of up to 4 turns of up to 10 tokens."""
    return fg.collate(random_records(0), turns=4, length=10).replace(**changes)


def small_batch(**changes) -> fg.Batch:
    """One row of eight tokens."""
    records = [fg.Trajectory([make_turn(np.random.default_rng(0), 2, 2)], 1.0, 0)]
    return fg.pack(records, np.ones((1, 1)), np.ones((1, 1)), row_length=8).replace(**changes)


# check_axes -------------------------------------------------------------------------------------------


def test_fields_that_agree_pass_with_and_without_the_optional_ones():
    bare = dense(length=None, appends=None, by_turn=None)
    for tree in (bare, dense(), score(dense()), small_batch(), small_batch(target=np.zeros((1, 8)))):
        assert check_axes(tree) is None


@pytest.mark.parametrize(
    ("field", "shape", "message"),
    [
        ("chosen", (12, 3, 10), "Trajectories.chosen has 3 on axis t, but tokens has 4"),
        ("chosen", (12, 4, 9), "Trajectories.chosen has 9 on axis l, but tokens has 10"),
        ("outcome", (11,), "Trajectories.outcome has 11 on axis n, but tokens has 12"),
        ("turns", (12, 5), "Trajectories.turns has 5 on axis t, but tokens has 4"),
        ("by_turn", (1,), "Trajectories.by_turn has 1 on axis n, but tokens has 12"),
        ("logp_ref", (12, 4, 1), "Trajectories.logp_ref has 1 on axis l, but tokens has 10"),
        ("last_value", (13,), "Trajectories.last_value has 13 on axis n, but tokens has 12"),
    ],
)
def test_axis_sizes_that_disagree_name_both_fields_the_axis_and_both_sizes(field, shape, message):
    with pytest.raises(fg.BadInput, match=f"^{re.escape(message)}$"):
        check_axes(dense(**{field: np.zeros(shape)}))


@pytest.mark.parametrize(
    ("field", "shape", "message"),
    [
        ("reward", (12,), "Trajectories.reward has shape (12,), but its axes are (n, t)"),
        ("outcome", (12, 1), "Trajectories.outcome has shape (12, 1), but its axes are (n)"),
        ("value", (12, 4), "Trajectories.value has shape (12, 4), but its axes are (n, t, l)"),
        ("status", (), "Trajectories.status has shape (), but its axes are (n)"),
    ],
)
def test_a_wrong_rank_names_the_field_its_shape_and_its_axes(field, shape, message):
    with pytest.raises(fg.BadInput, match=f"^{re.escape(message)}$"):
        check_axes(dense(**{field: np.zeros(shape)}))


@pytest.mark.parametrize(
    ("field", "shape", "message"),
    [
        ("weight", (1, 7), "Batch.weight has 7 on axis s, but tokens has 8"),
        ("group", (2, 8), "Batch.group has 2 on axis r, but tokens has 1"),
        ("target", (1, 9), "Batch.target has 9 on axis s, but tokens has 8"),
        ("correction", (8,), "Batch.correction has shape (8,), but its axes are (r, s)"),
    ],
)
def test_a_batch_is_checked_as_well(field, shape, message):
    with pytest.raises(fg.BadInput, match=f"^{re.escape(message)}$"):
        check_axes(small_batch(**{field: np.zeros(shape)}))


def test_bad_input_is_a_value_error():
    assert issubclass(fg.BadInput, ValueError)


# Endings ----------------------------------------------------------------------------------------------


def test_every_status_has_an_ending_with_a_reason():
    assert set(fg.ENDINGS) == set(fg.Status)
    assert [status.value for status in fg.Status] == list(range(len(fg.Status))), "a status indexes COUNTS"
    assert all(ending.why for ending in fg.ENDINGS.values())


@pytest.mark.parametrize(
    ("status", "counts", "bootstraps"),
    [
        ("FINISHED", True, False),
        ("TURN_LIMIT", True, True),
        ("TOKEN_LIMIT", True, True),
        ("TIMEOUT", True, False),
        ("REPETITION", True, False),
        ("TOOL_FAILURE", False, False),
        ("VERIFIER_FAILURE", False, False),
        ("ABORTED", False, False),
    ],
)
def test_F5_which_endings_count_and_which_bootstrap(status, counts, bootstraps):
    status = fg.Status[status]
    assert fg.ENDINGS[status][:2] == (counts, bootstraps)
    assert (COUNTS[status], BOOTSTRAPS[status]) == (counts, bootstraps)


# Derived fields ---------------------------------------------------------------------------------------


def one_each(num: int) -> fg.Trajectories:
    """`num` trajectories of two turns of three tokens, the last of them chosen; the second turn does not exist."""
    chosen_ntl = np.zeros((num, 2, 3), bool)
    chosen_ntl[:, :, 2] = True
    turns_nt = np.tile([True, False], (num, 1))
    return fg.Trajectories(
        tokens=np.ones((num, 2, 3), np.int32),
        chosen=chosen_ntl,
        logp_sampled=np.zeros((num, 2, 3), np.float32),
        version=np.zeros((num, 2, 3), np.int32),
        turns=turns_nt,
        reward=np.zeros((num, 2), np.float32),
        anchor=np.zeros((num, 2), np.int32),
        outcome=np.ones(num, np.float32),
        correct=np.ones(num, bool),
        status=np.zeros(num, np.int32),
        group=np.zeros(num, np.int32),
    )


def test_F5_valid_follows_the_status():
    trajectories = one_each(8).replace(status=np.arange(8))
    assert trajectories.valid.tolist() == [True] * 5 + [False] * 3


def test_F5_valid_wants_a_finite_outcome():
    outcome_n = np.array([0.0, -3.0, np.nan, np.inf, -np.inf], np.float32)
    assert one_each(5).replace(outcome=outcome_n).valid.tolist() == [True, True, False, False, False]


def test_F5_valid_wants_a_chosen_token_in_a_turn_that_exists():
    trajectories = one_each(2)
    trajectories.chosen[0, 0] = False  # what is left is chosen in a turn that does not exist
    assert trajectories.valid.tolist() == [False, True]


def test_acted_counts_turns_that_exist_and_chose():
    trajectories = one_each(3).replace(turns=np.array([[True, True], [True, True], [True, False]]))
    trajectories.chosen[1, 0] = False
    assert trajectories.acted.tolist() == [[True, True], [False, True], [True, False]]


def test_what_is_chosen_past_the_length_of_a_turn_is_never_read():
    trajectories = one_each(2).replace(length=np.array([[3, 0], [2, 0]]))
    assert trajectories.acted.tolist() == [[True, False], [False, False]]
    assert trajectories.valid.tolist() == [True, False]


def test_bootstraps_follows_the_status():
    trajectories = one_each(8).replace(status=np.arange(8))
    assert trajectories.bootstraps.tolist() == [False, True, True] + [False] * 5


def test_derived_fields_are_the_same_under_jit():
    trajectories = dense()
    for name in ("valid", "acted", "bootstraps"):
        compiled = jax.jit(lambda tree, name=name: getattr(tree, name))(trajectories)
        np.testing.assert_array_equal(compiled, getattr(trajectories, name))
        assert 0 < compiled.sum() < compiled.size, "both truth values must occur"


def test_live_tokens_are_chosen_weigh_something_and_are_no_padding():
    batch = small_batch()
    assert batch.live.tolist() == [[False, False, True, True] + [False] * 4]
    everywhere = batch.replace(chosen=np.ones((1, 8), bool), weight=np.ones((1, 8), np.float32))
    assert everywhere.live.tolist() == [[True] * 4 + [False] * 4]
    assert not batch.replace(weight=np.zeros((1, 8), np.float32)).live.any()


# The ledger -------------------------------------------------------------------------------------------


def test_A6_an_empty_ledger_balances():
    assert fg.Ledger().check() == fg.Ledger()


def test_A6_ledgers_add_number_by_number():
    left = fg.Ledger(5, {fg.Fate.TRAINED: 3, fg.Fate.DROPPED_TOO_LONG: 2})
    right = fg.Ledger(4, {fg.Fate.TRAINED: 1, fg.Fate.MASKED_INVALID: 3})
    total = fg.Ledger(9, {fg.Fate.TRAINED: 4, fg.Fate.DROPPED_TOO_LONG: 2, fg.Fate.MASKED_INVALID: 3})
    assert left + right == total == right + left
    assert left + fg.Ledger() == left
    assert total.check() is total
    assert left.fates == {fg.Fate.TRAINED: 3, fg.Fate.DROPPED_TOO_LONG: 2}, "adding changes neither summand"


@pytest.mark.parametrize("trained", [6, 8])
def test_A6_a_token_too_few_or_too_many_raises_with_the_numbers(trained):
    ledger = fg.Ledger(10, {fg.Fate.TRAINED: trained, fg.Fate.MASKED_INVALID: 3})
    message = f"10 tokens were generated, but {trained + 3} are accounted for: trained {trained}, masked_invalid 3"
    with pytest.raises(AssertionError, match=f"^{message}$"):
        ledger.check()


def test_A6_a_negative_count_raises_though_the_sum_is_right():
    ledger = fg.Ledger(10, {fg.Fate.TRAINED: 11, fg.Fate.DROPPED_NO_SIGNAL: -1})
    with pytest.raises(AssertionError, match="dropped_no_signal -1"):
        ledger.check()


def test_A6_every_fate_says_whether_the_token_was_trained_masked_or_dropped():
    assert {fate.name.split("_")[0] for fate in fg.Fate} == {"TRAINED", "MASKED", "DROPPED"}
