"""Packing: every token in its place exactly once, rows as full as best fit makes them, no token unaccounted.

`test_layouts` holds the values of a packed batch to those of the trajectories.
"""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from family_cases import assert_same_batch, random_records
from hypothesis import given
from hypothesis import strategies as st

import flowgrpo as fg
from flowgrpo.batching.packing import best_fit

SEEDS = st.integers(0, 10_000)
WHOLE = {"row_length": 48}  # any trajectory of `random_records` fits
SPLIT, DROP = ({"row_length": 10, "too_long": "split"}, {"row_length": 20, "too_long": "drop"})  # any turn fits


class Learned(NamedTuple):
    """Random records, and what a learner would add to them."""

    records: list[fg.Trajectory]
    adv: np.ndarray  # n t l
    weights: np.ndarray  # n t l
    dense: fg.Trajectories

    def pack(self, source=None, **settings) -> fg.Batch:
        return fg.pack(source or self.records, self.adv, self.weights, rows=60, target=self.adv, **settings)

    def taking_part(self, skip: bool) -> np.ndarray:
        """Trajectories with a chosen token that weighs something and, where others are skipped, has an advantage."""
        counts_ntl = self.dense.chosen & (self.weights != 0) & ((self.adv != 0) | (not skip))
        return counts_ntl.any(axis=(1, 2))


def learned(seed: int) -> Learned:
    """A third of the trajectories have no advantage, the invalid and a fifth of the others no weight."""
    records, rng = random_records(seed), np.random.default_rng(seed)
    dense = fg.collate(records, turns=4, length=10)
    shape = dense.tokens.shape
    adv_ntl = rng.normal(size=shape) * (rng.random((shape[0], 1, 1)) > 1 / 3)
    kept_n = (rng.random(shape[0]) > 0.2) & np.asarray(dense.valid)
    weight_ntl = rng.choice([0.0, 0.5, 2.0], size=shape, p=[0.1, 0.45, 0.45]) * kept_n[:, None, None]
    adv_ntl[0], weight_ntl[0] = 1.0, 0.5  # one trajectory takes part in any case
    return Learned(records, adv_ntl, weight_ntl, dense)


def of_turns(*lengths: int, **settings) -> fg.Trajectory:
    """One trajectory with turns of these lengths, all of their tokens chosen."""
    turns = [fg.Turn(np.arange(size), np.ones(size, bool), np.zeros(size)) for size in lengths]
    return fg.Trajectory(turns, **{"outcome": 1.0, "group": 0, **settings})


def pack_evenly(records: list[fg.Trajectory], **settings) -> fg.Batch:
    """Packed with advantage and weight 1 everywhere, into rows of four tokens by default."""
    one_nt = np.ones((len(records), max(len(record.turns) for record in records)))
    return fg.pack(records, one_nt, one_nt, **{"row_length": 4, **settings})


def segments_in(batch: fg.Batch) -> list[list[tuple]]:
    """(trajectory, turn, slot, position) of each token of each segment; those of a row are numbered from 1 on."""
    column_rs4, found = np.stack([batch.trajectory, batch.turn, batch.slot, batch.positions], axis=-1), []
    for segment_s, column_s4 in zip(batch.segments, column_rs4, strict=True):
        runs = [number for number, _ in itertools.groupby(segment_s.tolist())]
        assert runs in ([0], [*range(1, len(runs)), 0], list(range(1, len(runs) + 1))), "in order, padding last"
        found += [list(map(tuple, column_s4[segment_s == number].tolist())) for number in runs if number]
    return sorted(found)


def segments_of(records, taken, row_length: int) -> list[list[tuple]]:
    """List (trajectory, turn, slot, position) by segment of records; turns that append share one if it fits a row."""
    found = []
    for i in taken:
        parts, position = [], itertools.count()
        for t, turn in enumerate(records[i].turns):
            starts_context = turn.starts_context or not records[i].extends_context
            position = itertools.count() if starts_context else position
            places = [(i, t, slot, next(position)) for slot in range(len(turn.tokens))]
            if parts and not starts_context and len(parts[-1]) + len(places) <= row_length:
                parts[-1] += places
            else:
                parts.append(places)
        found += parts
    return sorted(found)


def taken_by(batch: fg.Batch) -> list[int]:
    return sorted(set(batch.trajectory[batch.segments > 0].tolist()))


# What takes part --------------------------------------------------------------------------------------


@given(SEEDS, st.sampled_from([WHOLE, SPLIT]), st.booleans())
def test_F5_F8_weighted_tokens_are_packed_once_unless_without_advantage(seed, into, skip):
    case = learned(seed)
    batch = case.pack(**into, skip_no_signal=skip)
    taken = np.flatnonzero(case.taking_part(skip)).tolist()
    assert segments_in(batch) == segments_of(case.records, taken, into["row_length"])
    assert fg.batching.fill_rate(batch) == (batch.segments > 0).mean()


@given(SEEDS, st.booleans(), st.sampled_from([1, 2, 3]), st.sampled_from([SPLIT, DROP]))
def test_ragged_and_dense_trajectories_give_the_same_batch(seed, skip, ranks, into):
    case = learned(seed)
    settings = {"ranks": ranks, "skip_no_signal": skip, **into}
    assert_same_batch(case.pack(case.dense, **settings), case.pack(**settings))


def test_without_weights_the_batch_is_all_padding():
    case, one_nt = learned(0), np.ones((12, 4))
    silent = case.dense.replace(chosen=np.zeros_like(case.dense.chosen), length=None)
    for source, weight_nt in ((case.records, 0 * one_nt), (silent, one_nt)):
        batch = fg.pack(source, one_nt, weight_nt, row_length=8, rows=6, ranks=6)
        assert batch.tokens.shape == (6, 8)
        assert not batch.segments.any()
        assert all((x == -1).all() for x in (batch.trajectory, batch.turn, batch.slot, batch.group))


# Rows and ranks ---------------------------------------------------------------------------------------


def slow_best_fit(lengths: list[int], row_length: int) -> list[int]:
    """Fill rows where items are placed one by one, longest first, into the fullest that takes them."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        taking = [room for room in rooms if room >= length]
        if taking:
            rooms[rooms.index(min(taking))] -= length
        else:
            rooms.append(row_length - length)
    return sorted(row_length - room for room in rooms)


rows_and_lengths = st.integers(1, 40).flatmap(
    lambda row_length: st.tuples(st.just(row_length), st.lists(st.integers(1, row_length), min_size=4, max_size=120))
)


@given(rows_and_lengths)
def test_best_fit_equals_placing_segments_one_by_one(drawn):
    row_length, lengths = drawn
    row_k, offset_k, num_rows = best_fit(np.array(lengths), row_length)
    holds_rs = np.zeros((num_rows, row_length), int)
    for row, offset, length in zip(row_k, offset_k, lengths, strict=True):
        assert offset + length <= row_length
        holds_rs[row, offset : offset + length] += 1
    assert sorted(holds_rs.sum(axis=1).tolist()) == slow_best_fit(lengths, row_length)
    assert holds_rs.max() == 1
    assert (np.diff(holds_rs, axis=1) <= 0).all(), "what is filled comes first"


@given(rows_and_lengths, st.integers(1, 4))
def test_ranks_get_equal_rows_and_nearly_equal_tokens(drawn, ranks):
    row_length, lengths = drawn
    batch = pack_evenly([of_turns(size) for size in lengths], row_length=row_length, ranks=ranks)
    assert sorted((one[0][0], len(one)) for one in segments_in(batch)) == list(enumerate(lengths))
    assert np.ptp((batch.segments > 0).reshape(ranks, -1).sum(axis=1)) <= max(lengths)
    assert np.ptp(batch.segments.max(axis=1).reshape(ranks, -1).sum(axis=1)) <= 1, "so are trajectories"


def test_ranks_and_fixed_rows_by_hand():
    many = [4, 4, 4, 4, 1, 1]
    for lengths, settings, expected in (
        ([8, 7, 6, 5, 4, 3, 2, 1], {"row_length": 18, "ranks": 2}, [[18], [18]]),  # dealt there and back again
        (many, {"ranks": 2}, [[4, 4, 1], [4, 4, 1]]),
        ([2, 4, 2, 2, 2], {"ranks": 2}, [[4, 4], [4, 0]]),  # a rank that needs fewer rows gets padding
        ([3, 2], {"ranks": 3}, [[3], [2], [0]]),
        (many, {"rows": 5}, [[4, 4, 4, 4, 2]]),
        (many, {"rows": 8, "ranks": 2}, [[4, 4, 1, 0], [4, 4, 1, 0]]),
    ):
        batch = pack_evenly([of_turns(size) for size in lengths], **settings)
        assert (batch.segments > 0).sum(axis=1).reshape(len(expected), -1).tolist() == expected


# Too long, and what can't be used ---------------------------------------------------------------------

LONG = [of_turns(4), of_turns(3, 4, 2, 5), of_turns(4, 8, extends_context=False)]  # the second fits no row of eight
DENSE, ONE_NT = fg.collate(LONG), np.ones((3, 4))


def test_trajectories_too_long_for_a_row_can_be_dropped():
    for row_length, taken in ((8, [0, 2]), (7, [0]), (14, [0, 1, 2]), (3, [])):
        assert taken_by(pack_evenly(LONG, row_length=row_length, too_long="drop")) == taken
    weight_nt = ONE_NT * [[1.0], [0.0], [1.0]]
    assert taken_by(fg.pack(LONG, ONE_NT, weight_nt, row_length=8)) == [0, 2]
    assert taken_by(fg.pack(LONG, weight_nt, ONE_NT, row_length=8, skip_no_signal=True)) == [0, 2]


def test_splits_happen_only_at_full_rows():
    found = segments_in(pack_evenly([of_turns(2, 3, 1, 4)], too_long="split"))
    assert [[turn for _, turn, *_ in segment] for segment in found] == [[0, 0], [1, 1, 1, 2], [3] * 4]


@pytest.mark.parametrize(
    ("which", "settings", "message"),
    [
        ([0, 1], {"row_length": 8}, "trajectory 1 has 14 tokens in one context, but a row holds 8: .*split.*drop"),
        ([0, 2], {"row_length": 7}, "trajectory 1 has 8 tokens in one context, but a row holds 7"),
        ([0, 1], {"row_length": 4, "too_long": "split"}, "trajectory 1, turn 3 has 5 tokens, but a row holds 4, and a"),
        ([0], {"too_long": "truncate"}, "too_long is 'truncate', but must be error, split or drop$"),
        ([0] * 5, {"rows": 4}, "the batch needs 5 rows of 4 tokens, but rows=4"),
        ([0] * 5, {"rows": 4, "ranks": 2}, "the batch needs 6 rows of 4 tokens, but rows=4"),
        ([0], {"rows": 3, "ranks": 2}, "rows=3 can't be shared equally by ranks=2"),
        ([0], {"rows": 0}, "rows=0 can't be shared equally by ranks=1"),
        ([0], {"ranks": 0}, "rows=None can't be shared equally by ranks=0"),
    ],
)
def test_unpackable_trajectories_are_named_with_both_sizes(which, settings, message):
    with pytest.raises(fg.BadInput, match=f"^{message}"):
        pack_evenly([LONG[i] for i in which], **settings)


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        *(
            (LONG, {"adv": np.ones(shape)}, "adv has .* 3 trajectories of up to 4 turns")
            for shape in (3, (2, 4), (3, 3))
        ),
        (LONG, {"weights": np.ones((3, 4, 8, 1))}, "weights has shape .* 3 trajectories of up to 4 turns"),
        (LONG, {"target": np.ones((3, 4, 7))}, "target has 7 slots a turn, but a turn has 8 tokens"),
        (DENSE.replace(group=np.zeros(2, int)), {}, "Trajectories.group has 2 on axis n, but tokens has 3"),
        (DENSE.replace(length=DENSE.length + 1), {}, "Trajectories.length says 9, but a turn has 8 slots"),
    ],
)
def test_wrong_shapes_are_named(source, changes, message):
    with pytest.raises(fg.BadInput, match=f"^{message}$"):
        fg.pack(source, **{"adv": ONE_NT, "weights": ONE_NT, **changes}, row_length=20)


# The ledger -------------------------------------------------------------------------------------------


@given(SEEDS, st.sampled_from([WHOLE, SPLIT, DROP]), st.booleans())
def test_A6_every_token_is_trained_masked_or_dropped(seed, into, skip):
    case, expected = (
        learned(seed),
        dict.fromkeys([fate for fate in fg.types.Fate if fate <= fg.types.Fate.DROPPED_NO_SIGNAL], 0),
    )
    valid_n, signal_n, length_nt = np.asarray(case.dense.valid), case.taking_part(True), case.dense.length
    for i, t, slot in np.argwhere(case.dense.chosen):
        context_t = np.cumsum(case.dense.starts_context[i])
        longest = max(length_nt[i][context_t == context].sum() for context in context_t)
        if case.weights[i, t, slot] == 0:
            fate = fg.types.Fate.MASKED_WEIGHTLESS if valid_n[i] else fg.types.Fate.MASKED_INVALID
        elif skip and not signal_n[i]:
            fate = fg.types.Fate.DROPPED_NO_SIGNAL
        else:
            fits = into == SPLIT or longest <= into["row_length"]
            fate = fg.types.Fate.TRAINED if fits else fg.types.Fate.DROPPED_TOO_LONG
        expected[fate] += 1
    batch, adv = case.pack(**into, skip_no_signal=skip), case.adv if skip else None
    ledger = fg.types.Ledger(int(case.dense.chosen.sum()), expected)
    for source in (case.records, case.dense):
        assert fg.batching.account(source, case.weights, batch, adv=adv) == ledger


def test_A6_other_weights_or_a_lost_token_raise():
    """A trajectory is in the batch or not, so no rule of packing explains a part of one."""
    records, ones = [of_turns(4), of_turns(3)], np.ones((2, 1))
    for lost, weights in (([], [[1.0], [0.0]]), ([0], ones), ([5], ones)):
        batch = pack_evenly(records, row_length=8)
        batch.chosen[0, lost] = False
        with pytest.raises(AssertionError, match="7 tokens were generated"):
            fg.batching.account(records, weights, batch)
