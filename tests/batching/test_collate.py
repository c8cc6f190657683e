"""Ragged records to flat and to padded arrays, and every input that can't be used with its one clear error."""

from dataclasses import replace

import numpy as np
import pytest
from family_cases import make_turn, random_records
from hypothesis import given
from hypothesis import strategies as st

import flowgrpo as fg
from flowgrpo.types import check_axes

PER_TOKEN = ("tokens", "chosen", "logp_sampled")


def a_turn(context: int = 1, action: int = 2, **fields) -> fg.Turn:
    return make_turn(np.random.default_rng(0), context, action, **fields)


def a_record(*turns: fg.Turn, **fields) -> fg.Trajectory:
    return fg.Trajectory(turns or (a_turn(),), **{"outcome": 1.0, "group": 0, **fields})


# Collate ---------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.booleans())
def test_values_are_at_their_index_and_padding_is_zero(seed, by_turn):
    records = random_records(seed, by_turn=by_turn)
    found = fg.collate(records, turns=6, length=15)
    check_axes(found)
    real_ntl = np.arange(15) < found.length[:, :, None]
    turns = [turn for record in records for turn in record.turns]
    assert found.length[found.turns].tolist() == [len(turn.tokens) for turn in turns]
    for name in PER_TOKEN:
        expected_m = np.concatenate([getattr(turn, name) for turn in turns])
        np.testing.assert_array_equal(getattr(found, name)[real_ntl], expected_m, err_msg=name)
    assert found.version[real_ntl].tolist() == [turn.version for turn in turns for _ in turn.tokens]
    for name in (*PER_TOKEN, "version"):
        assert not getattr(found, name)[~real_ntl].any(), name
    for name in ("reward", "anchor", "length"):
        assert not getattr(found, name)[~found.turns].any(), name
    for n, record in enumerate(records):
        starts_context = [
            t == 0 or turn.starts_context or not record.extends_context for t, turn in enumerate(record.turns)
        ]
        assert found.starts_context[n].tolist() == starts_context + [False] * (6 - len(starts_context))
    for name in ("correct", "status", "group"):
        assert getattr(found, name).tolist() == [getattr(record, name) for record in records]


def test_dtypes_do_not_depend_on_the_records():
    turn = fg.Turn([1, 2], [0, 1], [0, -1], version=np.array([1, 2], np.int64), reward=1)
    found = fg.collate([a_record(turn, outcome=1, correct=1, group=np.int64(3))])
    kinds = {
        np.int32: ("tokens", "version", "anchor", "status", "group", "length"),
        np.float32: ("logp_sampled", "reward", "outcome"),
        bool: ("chosen", "turns", "correct", "starts_context", "by_turn"),
    }
    for dtype, names in kinds.items():
        assert all(getattr(found, name).dtype == dtype for name in names)


def test_reward_is_by_turn_if_turns_have_rewards_else_the_outcome():
    paid = a_record(a_turn(reward=0.25), a_turn(reward=-2.0), outcome=7.0)
    zero = a_record(a_turn(reward=0.0), outcome=7.0)
    found = fg.collate([paid, zero, a_record(outcome=3.0)])
    assert found.by_turn.tolist() == [True, True, False]
    assert found.reward.tolist() == [[0.25, -2], [0, 0], [3, 0]]
    assert found.outcome.tolist() == [7, 7, 3]


def test_F5_invalid_endings_need_no_outcome():
    for outcome in (None, np.nan, np.inf):
        record = a_record(outcome=outcome, status=fg.types.Status.VERIFIER_FAILURE)
        assert fg.collate([record, a_record()]).valid.tolist() == [False, True]


@pytest.mark.parametrize(
    "ids",
    [
        [7, -(2**31), 2**31 - 1, 0],
        [2**31, 2**31 - 1, -(2**31), -(2**31) - 1],
        [2**63 + 1, 2**63, -5, 6],
        [2**80, 1, 2, 3],
    ],
)
def test_wide_group_ids_and_anchors_stay_distinct(ids):
    group_n = fg.collate([a_record(group=group) for group in ids + ids]).group
    anchor_nt = fg.collate([a_record(*[a_turn(anchor=anchor) for anchor in ids]) for _ in range(2)]).anchor
    for found in (group_n.reshape(2, -1), anchor_nt):
        assert found.dtype == np.int32
        assert len(set(found[0].tolist())) == len(ids)
        np.testing.assert_array_equal(found[0], found[1])
    assert ids[0] != 7 or group_n[:4].tolist() == ids, "what fits 32 bits stays as it is"


def test_sizes_are_the_largest_that_occur_or_as_set():
    records = [a_record(a_turn(1, 2), a_turn(1, 1)), a_record(a_turn(2, 3))]
    assert fg.collate(records).tokens.shape == fg.collate(records, turns=2, length=5).tokens.shape == (2, 2, 5)
    for sizes, words in (({"turns": 0}, "turns=0, but the records need 2"), ({"length": 4}, "length=4, but .* need 5")):
        with pytest.raises(fg.BadInput, match=f"^{words}$"):
            fg.collate(records, **sizes)


def test_context_tokens_may_have_non_finite_log_probabilities():
    turn = replace(a_turn(1, 1), logp_sampled=np.array([np.nan, -1.0]))
    assert fg.collate([a_record(turn)]).chosen.tolist() == [[[False, True]]]


# What can't be used -----------------------------------------------------------------------------------


def after_two(bad: fg.Trajectory) -> list[fg.Trajectory]:
    """The bad record as trajectory 2, after one of two turns and one of one."""
    return [a_record(a_turn(), a_turn()), a_record(), bad, a_record()]


def second_turn(**changes) -> list[fg.Trajectory]:
    """Records whose trajectory 2, turn 1 (of 3 tokens) has these changes."""
    return after_two(a_record(a_turn(2, 2), replace(a_turn(1, 2), **changes), a_turn()))


NOT_FINITE = "trajectory 2, turn 1 has a chosen token \\(slot {}\\) whose log-probability is {}: it must be finite"
UNUSABLE = [
    ([], "there are no trajectories"),
    (after_two(replace(a_record(), turns=())), "trajectory 2 has no turns"),
    (second_turn(tokens=[], chosen=[], logp_sampled=[]), "trajectory 2, turn 1 has no tokens"),
    *(
        (
            after_two(a_record(outcome=None, status=status)),
            f"trajectory 2 is {status.name} but its outcome is None: give",
        )
        for status in fg.types.Status
        if fg.types.ENDINGS[status].counts
    ),
    (after_two(a_record(outcome=np.nan, status=3)), "trajectory 2 is TIMEOUT but its outcome is nan"),
    (after_two(a_record(outcome=1e300)), "trajectory 2 is FINISHED but its outcome is 1e\\+300"),  # beyond float32
    (after_two(a_record(status=8)), "trajectory 2 has status 8, which is none of FINISHED 0, .*, ABORTED 7"),
    (after_two(a_record(status=-1)), "trajectory 2 has status -1, which is none of"),
    (after_two(a_record(a_turn(), a_turn(reward=0.0))), "trajectory 2 has a reward on 1 of 2 turns: give all"),
    (
        [a_record(a_turn(reward=1.0)), a_record(a_turn(reward=0.0), a_turn(), a_turn(reward=1.0))],
        "trajectory 1 has a reward on 2 of 3 turns: give all a reward, or none",
    ),
    (second_turn(logp_sampled=np.array([np.nan, -1, np.nan])), NOT_FINITE.format(2, "nan")),
    (second_turn(logp_sampled=np.array([0, -np.inf, -1])), NOT_FINITE.format(1, "-inf")),
]


@pytest.mark.parametrize(("records", "message"), UNUSABLE, ids=[message[:50] for _, message in UNUSABLE])
def test_invalid_records_name_trajectory_and_turn(records, message):
    for use in (fg.collate, lambda records: fg.pack(records, None, None, row_length=8)):
        with pytest.raises(fg.BadInput, match=f"^{message}"):
            use(records)


def test_versions_are_per_turn_or_per_token():
    records = [a_record(a_turn(1, 2, version=3), a_turn(1, 1, version=np.array([4, 5])))]
    assert fg.collate(records).version.tolist() == [[[3, 3, 3], [4, 5, 0]]]
