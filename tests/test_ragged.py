"""Ragged records to flat and to padded arrays, and every input that can't be used with its one clear error."""

import re
from dataclasses import replace

import numpy as np
import pytest
from cases import make_turn, random_records
from hypothesis import given
from hypothesis import strategies as st

import flowgrpo as fg
from flowgrpo.ragged import flatten, token_index
from flowgrpo.types import check_axes

SEEDS = st.integers(0, 10_000)
PER_TOKEN = ("tokens", "chosen", "logp_sampled")


def a_turn(context: int = 1, action: int = 2, **fields) -> fg.Turn:
    return make_turn(np.random.default_rng(0), context, action, **fields)


def a_record(*turns: fg.Turn, **fields) -> fg.Trajectory:
    return fg.Trajectory(turns or (a_turn(),), **{"outcome": 1.0, "group": 0, **fields})


# Collate ----------------------------------------------------------------------------------------------


def test_collate_pads_two_trajectories_as_written_out_by_hand():
    first = fg.Turn(np.array([5, 6, 7]), np.array([False, True, True]), np.array([0, -1, -2.0]), version=4, anchor=9)
    second = fg.Turn(np.array([8]), np.array([True]), np.array([-3.0]), version=np.array([6]), anchor=-2)
    records = [
        fg.Trajectory([first, second], 0.5, 30, True, fg.Status.TURN_LIMIT, appends=False),
        fg.Trajectory([second], None, -4, False, fg.Status.ABORTED),
    ]
    found = fg.collate(records)
    assert found.tokens.tolist() == [[[5, 6, 7], [8, 0, 0]], [[8, 0, 0], [0, 0, 0]]]
    assert found.chosen.tolist() == [[[False, True, True], [True, False, False]], [[True, False, False], [False] * 3]]
    assert found.logp_sampled.tolist() == [[[0, -1, -2], [-3, 0, 0]], [[-3, 0, 0], [0, 0, 0]]]
    assert found.version.tolist() == [[[4, 4, 4], [6, 0, 0]], [[6, 0, 0], [0, 0, 0]]]
    assert found.turns.tolist() == [[True, True], [True, False]]
    assert found.length.tolist() == [[3, 1], [1, 0]]
    assert found.reward[0].tolist() == [0.5, 0.5]
    assert np.isnan(found.reward[1, 0])
    assert found.reward[1, 1] == 0
    assert found.outcome[0] == 0.5
    assert np.isnan(found.outcome[1])
    assert found.status.tolist() == [1, 7]
    assert found.group.tolist() == [30, -4]
    assert found.correct.tolist() == [True, False]
    assert found.appends.tolist() == [False, True]
    assert found.by_turn.tolist() == [False, False]
    assert found.anchor[0, 0] != found.anchor[0, 1] == found.anchor[1, 0]
    assert found.anchor[1, 1] == 0


@given(SEEDS, st.booleans())
def test_collate_puts_every_value_in_its_place(seed, by_turn):
    records = random_records(seed, by_turn=by_turn)
    found = fg.collate(records)
    check_axes(found)
    for i, record in enumerate(records):
        assert found.turns[i].tolist() == [t < len(record.turns) for t in range(found.turns.shape[1])]
        for t, turn in enumerate(record.turns):
            size = len(turn.tokens)
            assert found.length[i, t] == size
            for name in PER_TOKEN:
                np.testing.assert_array_equal(getattr(found, name)[i, t, :size], getattr(turn, name), err_msg=name)
            assert set(found.version[i, t, :size]) == {turn.version}
        fields = ("correct", "status", "group", "appends")
        assert [getattr(found, name)[i] for name in fields] == [getattr(record, name) for name in fields]


@given(SEEDS)
def test_padding_is_zero(seed):
    found = fg.collate(random_records(seed), turns=6, length=15)
    padding_ntl = np.arange(15) >= found.length[:, :, None]
    for name in (*PER_TOKEN, "version"):
        assert not getattr(found, name)[padding_ntl].any(), name
    for name in ("reward", "anchor", "length"):
        assert not getattr(found, name)[~found.turns].any(), name


def test_dtypes_do_not_depend_on_what_the_records_hold():
    turn = fg.Turn([1, 2], [0, 1], [0, -1], version=np.array([1, 2], np.int64), reward=1)
    found = fg.collate([a_record(turn, outcome=1, correct=1, group=np.int64(3))])
    kinds = {
        np.int32: ("tokens", "version", "anchor", "status", "group", "length"),
        np.float32: ("logp_sampled", "reward", "outcome"),
        bool: ("chosen", "turns", "correct", "appends", "by_turn"),
    }
    for dtype, names in kinds.items():
        for name in names:
            assert getattr(found, name).dtype == dtype, name


def test_version_is_one_number_a_turn_or_one_a_token():
    records = [a_record(a_turn(1, 2, version=3), a_turn(1, 1, version=np.array([4, 5])))]
    assert fg.collate(records).version.tolist() == [[[3, 3, 3], [4, 5, 0]]]


def test_reward_is_by_turn_where_turns_are_paid_and_the_outcome_elsewhere():
    paid = a_record(a_turn(reward=0.25), a_turn(reward=-2.0), outcome=7.0)
    zero = a_record(a_turn(reward=0.0), outcome=7.0)
    found = fg.collate([paid, zero, a_record(outcome=3.0)])
    assert found.by_turn.tolist() == [True, True, False]
    assert found.reward.tolist() == [[0.25, -2], [0, 0], [3, 0]]
    assert found.outcome.tolist() == [7, 7, 3]


@pytest.mark.parametrize("outcome", [None, np.nan, np.inf])
def test_F5_an_ending_that_does_not_count_needs_no_outcome(outcome):
    record = a_record(outcome=outcome, status=fg.Status.VERIFIER_FAILURE)
    assert fg.collate([record, a_record()]).valid.tolist() == [False, True]


WIDE = {
    "signed 64-bit": [2**62 + 1, 2**62, -(2**62), 0],
    "hashes": [hash((seed, "state")) for seed in range(4)],
    "unsigned 64-bit": [2**64 - 1, 2**64 - 2, 2**63 + 1, 2**63],
    "unsigned 64-bit, some of them small": [2**63 + 1, 2**63, 5, 6],
    "unsigned and negative": [2**63 + 1, 2**63, -5, -6],
    "the least of 64 bits": [-(2**63), 0, 1, 2],
    "wider than 64 bits": [2**80 + 1, 2**80, 5, -6],
    "just past 32 bits": [2**31, 2**31 - 1, -(2**31), -(2**31) - 1],
}


@pytest.mark.parametrize("ids", WIDE.values(), ids=WIDE)
def test_wide_group_ids_stay_distinct_and_equal_ones_equal(ids):
    found_n = fg.collate([a_record(group=group) for group in ids + ids]).group
    assert found_n.dtype == np.int32
    assert len(set(found_n.tolist())) == len(ids)
    np.testing.assert_array_equal(found_n[: len(ids)], found_n[len(ids) :])


@pytest.mark.parametrize("ids", WIDE.values(), ids=WIDE)
def test_wide_anchors_stay_distinct_and_equal_ones_equal(ids):
    found_nt = fg.collate([a_record(*[a_turn(anchor=anchor) for anchor in ids]) for _ in range(2)]).anchor
    assert found_nt.dtype == np.int32
    assert len(set(found_nt[0].tolist())) == len(ids)
    np.testing.assert_array_equal(found_nt[0], found_nt[1])


def test_group_ids_of_32_bits_stay_as_they_are():
    assert fg.collate([a_record(group=group) for group in (7, -3, 2**31 - 1)]).group.tolist() == [7, -3, 2**31 - 1]


def test_sizes_are_the_largest_that_occur_or_those_given():
    records = [a_record(a_turn(1, 2), a_turn(1, 1)), a_record(a_turn(2, 3))]
    assert fg.collate(records).tokens.shape == (2, 2, 5)
    wide = fg.collate(records, turns=4, length=9)
    check_axes(wide)
    assert wide.tokens.shape == (2, 4, 9)
    np.testing.assert_array_equal(wide.tokens[:, :2, :5], fg.collate(records).tokens)
    assert fg.collate(records, turns=2, length=5).tokens.shape == (2, 2, 5), "sizes that just suffice are fine"


# Flatten ----------------------------------------------------------------------------------------------


@given(SEEDS)
def test_flatten_lays_all_tokens_end_to_end(seed):
    records = random_records(seed)
    flat = flatten(records)
    places = [
        (i, t, slot)
        for i, record in enumerate(records)
        for t, turn in enumerate(record.turns)
        for slot in range(len(turn.tokens))
    ]
    assert list(zip(flat.trajectory.tolist(), flat.turn.tolist(), flat.slot.tolist(), strict=True)) == places
    for name in PER_TOKEN:
        expected_m = np.array([getattr(records[i].turns[t], name)[slot] for i, t, slot in places])
        np.testing.assert_array_equal(getattr(flat, name), expected_m, err_msg=name)
    assert flat.appends.tolist() == [record.appends for record in records]
    assert flat.group.tolist() == [record.group for record in records]
    np.testing.assert_array_equal(flat.length, fg.collate(records).length)


def test_token_index_skips_turns_without_tokens():
    trajectory_m, turn_m, slot_m = token_index(np.array([[2, 0, 1], [0, 3, 0]]))
    assert trajectory_m.tolist() == [0, 0, 0, 1, 1, 1]
    assert turn_m.tolist() == [0, 0, 2, 1, 1, 1]
    assert slot_m.tolist() == [0, 1, 0, 0, 1, 2]


def test_a_log_probability_that_is_not_finite_is_fine_where_nothing_was_chosen():
    turn = replace(a_turn(1, 1), logp_sampled=np.array([np.nan, -1.0]))
    assert flatten([a_record(turn)]).chosen.tolist() == [False, True]


# What can't be used -----------------------------------------------------------------------------------


def after_two(bad: fg.Trajectory) -> list[fg.Trajectory]:
    """The bad record as trajectory 2, after one of two turns and one of one."""
    return [a_record(a_turn(), a_turn()), a_record(), bad, a_record()]


def second_turn(**changes) -> list[fg.Trajectory]:
    """Records whose trajectory 2, turn 1 (of 3 tokens) has these changes."""
    return after_two(a_record(a_turn(2, 2), replace(a_turn(1, 2), **changes), a_turn()))


NAMES = "FINISHED 0, TURN_LIMIT 1, .*, ABORTED 7"
UNUSABLE = {
    "no trajectories": ([], "there are no trajectories"),
    "no turns": (after_two(replace(a_record(), turns=())), "trajectory 2 has no turns"),
    "fewer tokens": (
        second_turn(tokens=np.ones(2, int)),
        "trajectory 2, turn 1: the lengths disagree: tokens 2, chosen 3, logp_sampled 3",
    ),
    "fewer chosen": (
        second_turn(chosen=np.ones(2, bool)),
        "trajectory 2, turn 1: the lengths disagree: tokens 3, chosen 2, logp_sampled 3",
    ),
    "more log-probabilities": (
        second_turn(logp_sampled=np.zeros(4)),
        "trajectory 2, turn 1: the lengths disagree: tokens 3, chosen 3, logp_sampled 4",
    ),
    "all lengths different": (
        second_turn(tokens=[], chosen=[True], logp_sampled=[0.0, 0.0]),
        "trajectory 2, turn 1: the lengths disagree: tokens 0, chosen 1, logp_sampled 2",
    ),
    "first turn of all": (
        [a_record(replace(a_turn(1, 2), chosen=[True]))],
        "trajectory 0, turn 0: the lengths disagree: tokens 3, chosen 1, logp_sampled 3",
    ),
    "first turn of a later trajectory": (
        after_two(a_record(replace(a_turn(1, 2), chosen=[True]), a_turn())),
        "trajectory 2, turn 0: the lengths disagree: tokens 3, chosen 1, logp_sampled 3",
    ),
    "empty turn": (second_turn(tokens=[], chosen=[], logp_sampled=[]), "trajectory 2, turn 1 has no tokens"),
    "no outcome": (after_two(a_record(outcome=None)), "trajectory 2 is FINISHED but its outcome is None"),
    "outcome NaN": (
        after_two(a_record(outcome=np.nan, status=fg.Status.TIMEOUT)),
        "trajectory 2 is TIMEOUT but its outcome is nan",
    ),
    "outcome infinite": (
        after_two(a_record(outcome=-np.inf, status=fg.Status.REPETITION)),
        "trajectory 2 is REPETITION but its outcome is -inf",
    ),
    "unknown status": (after_two(a_record(status=8)), f"trajectory 2 has status 8, which is none of {NAMES}"),
    "negative status": (after_two(a_record(status=-1)), f"trajectory 2 has status -1, which is none of {NAMES}"),
    "no status": (after_two(a_record(status=None)), f"trajectory 2 has status None, which is none of {NAMES}"),
    "one turn paid": (
        after_two(a_record(a_turn(), a_turn(), a_turn(reward=0.0))),
        "trajectory 2 has a reward on 1 of 3 turns: pay every turn, or none",
    ),
    "one turn not paid": (
        after_two(a_record(a_turn(reward=0.0), a_turn(), a_turn(reward=1.0))),
        "trajectory 2 has a reward on 2 of 3 turns: pay every turn, or none",
    ),
    "log-probability NaN": (
        second_turn(logp_sampled=np.array([np.nan, -1, np.nan])),
        re.escape("trajectory 2, turn 1 has a chosen token (slot 2) whose log-probability is nan: it must be finite"),
    ),
    "log-probability -inf": (
        second_turn(logp_sampled=np.array([0, -np.inf, -1])),
        re.escape("trajectory 2, turn 1 has a chosen token (slot 1) whose log-probability is -inf: it must be finite"),
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_records_that_cannot_be_used_name_the_place(name):
    records, message = UNUSABLE[name]
    for use in (fg.collate, flatten):
        with pytest.raises(fg.BadInput, match=f"^{message}"):
            use(records)


@pytest.mark.parametrize("status", [status for status in fg.Status if fg.ENDINGS[status].counts])
def test_F5_an_ending_that_counts_needs_an_outcome_and_the_error_says_what_else_to_give(status):
    with pytest.raises(fg.BadInput, match=r"give it a finite outcome, or the status .*VERIFIER_FAILURE"):
        fg.collate([a_record(outcome=None, status=status)])


@pytest.mark.parametrize("versions", [0, 1, 2, 4])
def test_a_wrong_number_of_versions_names_turn_and_both_numbers(versions):
    with pytest.raises(fg.BadInput, match=f"^trajectory 2, turn 1 has 3 tokens, but {versions} versions$"):
        fg.collate(second_turn(version=np.arange(versions)))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"turns": 1}, "turns=1, but the records need 2"),
        ({"length": 4}, "length=4, but the records need 5"),
        ({"turns": 0, "length": 9}, "turns=0, but the records need 2"),
    ],
)
def test_sizes_that_are_too_small_name_both_numbers(sizes, message):
    with pytest.raises(fg.BadInput, match=f"^{message}$"):
        fg.collate([a_record(a_turn(1, 2), a_turn(1, 1)), a_record(a_turn(2, 3))], **sizes)


def test_a_reward_that_is_not_finite_names_its_turn():
    turns = [fg.Turn([1], [True], [-1.0], reward=reward) for reward in (0.5, float("nan"))]
    with pytest.raises(fg.BadInput, match=r"^trajectory 0, turn 1 has reward nan: it must be finite$"):
        fg.collate([fg.Trajectory(turns, 1.0, 0)])


def test_an_outcome_beyond_float32_is_refused():
    with pytest.raises(fg.BadInput, match="its outcome is 1e\\+300"):
        fg.collate([fg.Trajectory([fg.Turn([1], [True], [-1.0])], 1e300, 0)])
