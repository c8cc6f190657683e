"""Packing: every token in its place exactly once, rows as full as best fit makes them, no token unaccounted."""

import itertools
import re
from dataclasses import fields, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_records, score
from hypothesis import given
from hypothesis import strategies as st

import flowgrpo as fg
from flowgrpo.packing import best_fit

SEEDS = st.integers(0, 10_000)
SIZES = {"turns": 4, "length": 10}  # what `random_records` needs at most
ROW = 48  # holds any of its trajectories, which have up to 40 tokens


class Learned(NamedTuple):
    """Random records, and what a learner would add to them."""

    records: list[fg.Trajectory]
    adv: np.ndarray  # n t l
    weights: np.ndarray  # n t l
    dense: fg.Trajectories

    def pack(self, **settings) -> fg.Batch:
        return fg.pack(self.records, self.adv, self.weights, **{"row_length": ROW, **settings})

    @property
    def trains(self) -> np.ndarray:
        """Tokens that are chosen and weigh something -> bool_ntl."""
        return self.dense.chosen & (self.weights != 0)


def learned(seed: int) -> Learned:
    """A third of the trajectories have no advantage, the invalid and a fifth of the others no weight."""
    records = random_records(seed)
    dense = fg.collate(records, **SIZES)
    rng = np.random.default_rng(seed)
    shape = dense.tokens.shape
    adv_ntl = rng.normal(size=shape).astype(np.float32) * (rng.random((shape[0], 1, 1)) > 1 / 3)
    kept_n = (rng.random(shape[0]) > 0.2) & [fg.ENDINGS[record.status].counts for record in records]
    kept_n |= np.arange(shape[0]) == 0  # one trajectory takes part in any case
    adv_ntl[0] = 1.0
    weight_ntl = rng.choice([0.0, 0.5, 2.0], size=shape, p=[0.1, 0.45, 0.45]).astype(np.float32)
    weight_ntl[0] = 0.5
    return Learned(records, adv_ntl, weight_ntl * kept_n[:, None, None], dense)


def of_turns(*lengths: int, **settings) -> fg.Trajectory:
    """One trajectory with turns of these lengths, all of their tokens chosen."""
    turns = [fg.Turn(np.arange(size), np.ones(size, bool), np.zeros(size)) for size in lengths]
    return fg.Trajectory(turns, **{"outcome": 1.0, "group": 0, **settings})


def of_lengths(lengths) -> list[fg.Trajectory]:
    """One trajectory of one turn for each length."""
    return [of_turns(size) for size in lengths]


def pack_evenly(records: list[fg.Trajectory], **settings) -> fg.Batch:
    """Packed with advantage and weight 1 everywhere."""
    one_nt = np.ones((len(records), max(len(record.turns) for record in records)))
    return fg.pack(records, one_nt, one_nt, **settings)


class Run(NamedTuple):
    """A segment as it stands in a batch."""

    row: int
    places: list[tuple[int, int, int]]  # (trajectory, turn, slot)
    positions: list[int]


def runs(batch: fg.Batch) -> list[Run]:
    """Every segment, after checking that each row numbers its segments 1.. and lets none of them break off."""
    found = []
    for r, segment_s in enumerate(batch.segments):
        bounds = [0, *(np.flatnonzero(np.diff(segment_s)) + 1).tolist(), len(segment_s)]
        numbers = segment_s[bounds[:-1]].tolist()
        num_segments = len(numbers) - (numbers[-1] == 0)
        assert numbers[:num_segments] == list(range(1, num_segments + 1))
        for start, end in itertools.pairwise(bounds[: num_segments + 1]):
            columns = (x[r, start:end].tolist() for x in (batch.trajectory, batch.turn, batch.slot))
            found.append(Run(r, list(zip(*columns, strict=True)), batch.positions[r, start:end].tolist()))
    return found


def whole_segments(records, taken) -> list[tuple[list, list]]:
    """(places, positions) that the trajectories in `taken` must get: one for each, or one for each turn."""
    expected = []
    for i in taken:
        turns = [[(i, t, slot) for slot in range(len(turn.tokens))] for t, turn in enumerate(records[i].turns)]
        together = [list(itertools.chain(*turns))] if records[i].appends else turns
        expected += [(places, list(range(len(places)))) for places in together]
    return expected


def taken_by(batch: fg.Batch) -> list[int]:
    return sorted(set(batch.trajectory[batch.segments > 0].tolist()))


def fills(batch: fg.Batch, ranks: int = 1) -> list[list[int]]:
    """Tokens in each row of each rank, where the rows of a rank are adjacent."""
    return (batch.segments > 0).sum(axis=1).reshape(ranks, -1).tolist()


def assert_same_batch(found: fg.Batch, expected: fg.Batch):
    for item in fields(fg.Batch):
        left, right = getattr(found, item.name), getattr(expected, item.name)
        assert (left is None) == (right is None), item.name
        if left is not None:
            assert left.dtype == right.dtype, item.name
            np.testing.assert_array_equal(left, right, err_msg=item.name)


def assert_padding(batch: fg.Batch, shape: tuple[int, int]):
    """The batch has this shape and holds no token."""
    assert batch.tokens.shape == shape
    assert not batch.segments.any()
    assert (batch.trajectory == -1).all()
    assert fg.fill_rate(batch) == 0


# Content ----------------------------------------------------------------------------------------------


@given(SEEDS)
def test_every_token_that_takes_part_is_there_once_with_the_values_of_its_place_and_padding_says_so(seed):
    case = learned(seed)
    batch = case.pack(rows=14, target=case.adv + 1)
    found = sorted((run.places, run.positions) for run in runs(batch))
    assert found == sorted(whole_segments(case.records, np.flatnonzero(case.trains.any(axis=(1, 2))).tolist()))
    real_rs = batch.segments > 0
    assert not real_rs.all()
    place = (batch.trajectory[real_rs], batch.turn[real_rs], batch.slot[real_rs])
    expected = {name: getattr(case.dense, name) for name in ("tokens", "chosen", "logp_sampled")}
    own = {"advantage": case.adv, "weight": case.weights, "target": case.adv + 1}
    expected |= {name: np.where(case.dense.chosen, x_ntl, 0) for name, x_ntl in own.items()}
    for name, x_ntl in expected.items():
        np.testing.assert_array_equal(getattr(batch, name)[real_rs], x_ntl[place], err_msg=name)
        assert not getattr(batch, name)[~real_rs].any(), name
    np.testing.assert_array_equal(batch.group[real_rs], case.dense.group[place[0]])
    for name in ("trajectory", "turn", "slot", "group"):
        assert (getattr(batch, name)[~real_rs] == -1).all(), name
    assert not batch.positions[~real_rs].any()


def test_a_batch_written_out_by_hand():
    first = fg.Turn([5, 6], [False, True], [0.0, -1.0])
    second = fg.Turn([7, 8, 9], [False, True, True], [0.0, -2.0, -3.0])
    records = [fg.Trajectory([first], 1.0, 4), fg.Trajectory([first, second], 1.0, 3, appends=False)]
    batch = fg.pack(records, [[1, 0], [2, 3]], [[0.5, 0], [0.25, 0.125]], row_length=8)
    assert batch.tokens.tolist() == [[7, 8, 9, 5, 6, 5, 6, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 0]]
    assert batch.segments.tolist() == [[1, 1, 1, 2, 2, 3, 3, 0]]
    assert batch.trajectory.tolist() == [[1, 1, 1, 0, 0, 1, 1, -1]]
    assert batch.turn.tolist() == [[1, 1, 1, 0, 0, 0, 0, -1]]
    assert batch.slot.tolist() == [[0, 1, 2, 0, 1, 0, 1, -1]]
    assert batch.group.tolist() == [[3, 3, 3, 4, 4, 3, 3, -1]]
    assert batch.chosen.tolist() == [[False, True, True, False, True, False, True, False]]
    assert batch.logp_sampled.tolist() == [[0, -2, -3, 0, -1, 0, -1, 0]]
    assert batch.advantage.tolist() == [[0, 3, 3, 0, 1, 0, 2, 0]]
    assert batch.weight.tolist() == [[0, 0.125, 0.125, 0, 0.5, 0, 0.25, 0]]
    assert fg.fill_rate(batch) == 7 / 8


@given(SEEDS, st.booleans(), st.sampled_from([1, 2, 3]), st.sampled_from(["drop", "split"]))
def test_ragged_and_dense_trajectories_give_the_same_batch(seed, skip, ranks, too_long):
    case = learned(seed)
    settings = {"row_length": 20, "rows": 60, "ranks": ranks, "skip_no_signal": skip, "too_long": too_long}
    found = fg.pack(case.dense, case.adv, case.weights, **settings, target=case.adv)
    assert_same_batch(found, case.pack(**settings, target=case.adv))


@pytest.mark.usefixtures("nan_allowed")
def test_arrays_on_a_device_give_the_same_batch():
    case = learned(3)
    found = fg.pack(*jax.tree.map(jnp.asarray, (case.dense, case.adv, case.weights)), row_length=ROW)
    assert_same_batch(found, case.pack())


def test_scored_fields_come_from_the_trajectories_and_logp_old_is_else_logp_sampled():
    case = learned(5)
    scored = score(case.dense)
    batch = fg.pack(scored, case.adv, case.weights, row_length=ROW)
    real_rs = batch.segments > 0
    place = (batch.trajectory[real_rs], batch.turn[real_rs], batch.slot[real_rs])
    for name, x_ntl in {"logp_old": scored.logp_old, "logp_ref": scored.logp_ref, "value_old": scored.value}.items():
        np.testing.assert_array_equal(getattr(batch, name)[real_rs], x_ntl[place], err_msg=name)
        assert not getattr(batch, name)[~real_rs].any(), name
    for bare in (case.pack(), fg.pack(case.dense, case.adv, case.weights, row_length=ROW)):
        np.testing.assert_array_equal(bare.logp_old, bare.logp_sampled)
        assert bare.logp_ref is bare.value_old is bare.target is None


def test_F6_advantages_of_turns_wider_ones_and_garbage_where_nothing_was_chosen_give_the_same_batch():
    case = learned(4)
    adv_nt, weight_nt = case.adv[:, :, 0], case.weights[:, :, 1]
    by_token = [np.repeat(x_nt[:, :, None], 10, axis=2) for x_nt in (adv_nt, weight_nt)]
    expected = fg.pack(case.records, *by_token, row_length=ROW, target=by_token[0])
    assert_same_batch(fg.pack(case.records, adv_nt, weight_nt, row_length=ROW, target=adv_nt), expected)
    chosen_ntl = np.pad(case.dense.chosen, ((0, 0), (0, 3), (0, 5)))
    wide = [np.pad(x_ntl, ((0, 0), (0, 3), (0, 5))) for x_ntl in (case.adv, case.weights)]
    dirty = [np.where(chosen_ntl, x_ntl, np.nan) for x_ntl in wide]
    found = fg.pack(case.records, *dirty, row_length=ROW, target=dirty[0], skip_no_signal=True)
    assert_same_batch(found, case.pack(target=case.adv, skip_no_signal=True))


# What takes part --------------------------------------------------------------------------------------


@given(SEEDS)
def test_F5_what_weighs_nothing_is_left_out_and_F8_exactly_what_has_no_advantage_can_be(seed):
    case = learned(seed)
    signal_n = (case.trains & (case.adv != 0)).any(axis=(1, 2))
    assert taken_by(case.pack(skip_no_signal=True)) == np.flatnonzero(signal_n).tolist()
    assert taken_by(case.pack()) == np.flatnonzero(case.trains.any(axis=(1, 2))).tolist()


def test_a_weight_counts_only_on_a_chosen_token_and_F8_an_advantage_on_one_that_weighs_something():
    case = learned(1)
    weight_ntl = np.where(case.dense.chosen, 0.0, 1.0)
    weight_ntl[3] = 1.0
    assert taken_by(fg.pack(case.records, case.adv, weight_ntl, row_length=ROW)) == [3]
    adv_nt, weight_nt = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])
    batch = fg.pack([of_turns(2, 2)] * 2, adv_nt, weight_nt, row_length=4, skip_no_signal=True)
    assert taken_by(batch) == [1]


def test_without_any_weight_or_chosen_token_the_batch_is_all_padding():
    case, one_nt = learned(0), np.ones((12, 4))
    for source, rows in ((case.records, 1), (case.dense, 6)):
        assert_padding(fg.pack(source, case.adv, 0 * one_nt, row_length=ROW, rows=rows, ranks=rows), (rows, ROW))
    silent = case.dense.replace(chosen=np.zeros_like(case.dense.chosen), length=None)
    assert_padding(fg.pack(silent, one_nt, one_nt, row_length=8), (1, 8))


# Rows and ranks ---------------------------------------------------------------------------------------


def slow_best_fit(lengths: list[int], row_length: int) -> list[int]:
    """How full each row gets where items are placed one by one, longest first, into the fullest that takes them."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        taking = [room for room in rooms if room >= length]
        if taking:
            rooms[rooms.index(min(taking))] -= length
        else:
            rooms.append(row_length - length)
    return sorted(row_length - room for room in rooms)


@st.composite
def lengths_and_row(draw, least: int = 1):
    row_length = draw(st.integers(1, 40))
    return draw(st.lists(st.integers(1, row_length), min_size=least, max_size=120)), row_length


@given(lengths_and_row())
def test_best_fit_fills_rows_as_placing_one_by_one_does_without_overlap_overflow_or_gaps(drawn):
    lengths, row_length = drawn
    row_k, offset_k, num_rows = best_fit(np.array(lengths), row_length)
    holds_rs = np.zeros((num_rows, row_length), int)
    for row, offset, length in zip(row_k, offset_k, lengths, strict=True):
        assert offset + length <= row_length
        holds_rs[row, offset : offset + length] += 1
    assert sorted(holds_rs.sum(axis=1).tolist()) == slow_best_fit(lengths, row_length)
    assert holds_rs.max() == 1
    assert (np.diff(holds_rs, axis=1) <= 0).all(), "what is filled comes first"
    batch = pack_evenly(of_lengths(lengths), row_length=row_length)
    assert sorted(fills(batch)[0]) == slow_best_fit(lengths, row_length)
    assert sorted((run.places[0][0], len(run.places)) for run in runs(batch)) == list(enumerate(lengths))


def test_best_fit_by_hand():
    row_k, offset_k, num_rows = best_fit(np.array([2, 6, 3, 4, 5]), 10)
    assert (row_k.tolist(), offset_k.tolist(), num_rows) == ([1, 0, 1, 0, 1], [8, 0, 5, 6, 0], 2)
    row_k, offset_k, num_rows = best_fit(np.zeros(0, np.int64), 10)
    assert (len(row_k), len(offset_k), num_rows) == (0, 0, 0)


def test_long_tailed_lengths_fill_rows_to_97_percent():
    length_n = np.random.default_rng(0).lognormal(5, 0.5, 1000).astype(int)
    row_length = int(4 * length_n.mean())
    batch = pack_evenly(of_lengths(np.clip(length_n, 1, row_length)), row_length=row_length)
    assert 0.97 <= fg.fill_rate(batch) == np.clip(length_n, 1, row_length).sum() / batch.tokens.size <= 1


@given(lengths_and_row(least=4), st.integers(1, 4))
def test_ranks_get_equally_many_rows_and_nearly_equally_many_tokens(drawn, ranks):
    lengths, row_length = drawn
    batch = pack_evenly(of_lengths(lengths), row_length=row_length, ranks=ranks)
    assert len(runs(batch)) == len(lengths)
    totals = [sum(rows) for rows in fills(batch, ranks)]
    assert sum(totals) == sum(lengths)
    assert max(totals) - min(totals) <= max(lengths)
    dealt = np.bincount([run.row * ranks // len(batch.tokens) for run in runs(batch)], minlength=ranks)
    assert dealt.max() - dealt.min() <= 1, "trajectories are dealt evenly as well"


@pytest.mark.parametrize(
    ("lengths", "settings", "expected"),
    [
        ([8, 7, 6, 5, 4, 3, 2, 1], {"row_length": 18, "ranks": 2}, [[18], [18]]),  # dealt there and back again
        ([4, 4, 4, 4, 1, 1], {"ranks": 2}, [[4, 4, 1], [4, 4, 1]]),
        ([2, 4, 2, 2, 2], {"ranks": 2}, [[4, 4], [4, 0]]),  # a rank that needs fewer rows gets padding
        ([3, 2], {"ranks": 3}, [[3], [2], [0]]),
        ([4, 4, 4, 4, 1, 1], {"rows": 7}, [[4, 4, 4, 4, 2, 0, 0]]),
        ([4, 4, 4, 4, 1, 1], {"rows": 5}, [[4, 4, 4, 4, 2]]),
        ([4, 4, 4, 4, 1, 1], {"rows": 8, "ranks": 2}, [[4, 4, 1, 0], [4, 4, 1, 0]]),
    ],
)
def test_ranks_and_fixed_rows_by_hand(lengths, settings, expected):
    batch = pack_evenly(of_lengths(lengths), **{"row_length": 4, **settings})
    assert fills(batch, len(expected)) == expected


# Too long ---------------------------------------------------------------------------------------------

LONG = [of_turns(4), of_turns(3, 4, 2, 5), of_turns(4, 8, appends=False)]  # the second fits no row of eight


def test_drop_leaves_out_what_fits_no_row_and_only_that():
    for row_length, taken in ((8, [0, 2]), (7, [0]), (14, [0, 1, 2])):
        assert taken_by(pack_evenly(LONG, row_length=row_length, too_long="drop")) == taken
    assert fills(pack_evenly(LONG[2:], row_length=8)) == [[8, 4]], "turns that are rendered afresh fit one by one"
    assert_padding(pack_evenly([LONG[1]], row_length=8, too_long="drop"), (1, 8))


def test_too_long_is_no_matter_where_a_trajectory_takes_no_part():
    weight_nt = np.array([[1.0], [0.0], [1.0]]) * np.ones(4)
    assert taken_by(fg.pack(LONG, np.ones((3, 4)), weight_nt, row_length=8)) == [0, 2]
    assert taken_by(fg.pack(LONG, weight_nt, np.ones((3, 4)), row_length=8, skip_no_signal=True)) == [0, 2]


def test_split_cuts_at_turns_and_positions_go_on():
    batch = pack_evenly(LONG, row_length=8, too_long="split")
    parts = [run for run in runs(batch) if run.places[0][0] == 1]
    found = sorted(([place[1] for place in part.places], part.positions) for part in parts)
    assert found == [([0] * 3 + [1] * 4, list(range(7))), ([2] * 2 + [3] * 5, list(range(7, 14)))]
    whole = pack_evenly(LONG, row_length=14)
    assert_same_batch(pack_evenly(LONG, row_length=14, too_long="split"), whole)


@given(SEEDS)
def test_split_keeps_every_token_and_every_weight_and_cuts_between_turns_where_it_must(seed):
    case = learned(seed)
    batch, length_nt = case.pack(row_length=10, too_long="split"), case.dense.length
    found_ntl, times_ntl = np.zeros_like(case.weights), np.zeros(case.weights.shape, int)
    real_rs = batch.segments > 0
    place = (batch.trajectory[real_rs], batch.turn[real_rs], batch.slot[real_rs])
    np.add.at(found_ntl, place, batch.weight[real_rs])
    np.add.at(times_ntl, place, 1)
    filled_ntl = np.arange(10) < length_nt[:, :, None]
    np.testing.assert_array_equal(found_ntl, np.where(case.dense.chosen, case.weights, 0))
    np.testing.assert_array_equal(times_ntl, filled_ntl & case.trains.any(axis=(1, 2), keepdims=True))
    parts = sorted((run.places, run.positions) for run in runs(batch))
    for places, positions in parts:
        i, first, last = places[0][0], places[0][1], places[-1][1]
        assert places == [(i, t, slot) for t in range(first, last + 1) for slot in range(length_nt[i, t])]
        origin = length_nt[i, :first].sum() if case.records[i].appends else 0
        assert positions == list(range(origin, origin + len(places)))
    for (left, _), (right, _) in itertools.pairwise(parts):
        if left[0][0] == right[0][0] and case.records[left[0][0]].appends:
            assert len(left) + len(right) > 10, "two parts that fit one row together stay together"


# What can't be used -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "settings", "message"),
    [
        ([0, 1], {"row_length": 8}, "trajectory 1 has 14 tokens in all, but a row holds 8: .*split.*drop"),
        ([0, 2], {"row_length": 7}, "trajectory 1 has 8 tokens in one turn, but a row holds 7"),
        ([0, 1], {"row_length": 4, "too_long": "split"}, "trajectory 1, turn 3 has 5 tokens, but a row holds 4, and a"),
        ([0, 2], {"row_length": 7, "too_long": "split"}, "trajectory 1, turn 1 has 8 tokens, but a row holds 7"),
        ([0], {"too_long": "truncate"}, "too_long is 'truncate', but must be error, split or drop$"),
        ([0] * 5, {"rows": 4}, "the batch needs 5 rows of 4 tokens, but rows=4"),
        ([0] * 5, {"rows": 4, "ranks": 2}, "the batch needs 6 rows of 4 tokens, but rows=4"),
        ([0], {"rows": 3, "ranks": 2}, "rows=3 can't be shared equally by ranks=2"),
        ([0], {"rows": 0}, "rows=0 can't be shared equally by ranks=1"),
        ([0], {"rows": -2, "ranks": 2}, "rows=-2 can't be shared"),
        ([0], {"ranks": 0}, "rows=None can't be shared equally by ranks=0"),
    ],
)
def test_what_can_not_be_packed_is_named_with_both_numbers(which, settings, message):
    with pytest.raises(fg.BadInput, match=f"^{message}"):
        pack_evenly([LONG[i] for i in which], **{"row_length": 4, **settings})


@pytest.mark.parametrize("name", ["adv", "weights", "target"])
def test_values_of_a_wrong_shape_name_what_there_is(name):
    values = {"adv": np.ones((3, 4)), "weights": np.ones((3, 4)), "target": None}
    for shape in ((), (3,), (2, 4), (4, 4), (3, 3), (3, 3, 8), (3, 4, 8, 1)):
        message = f"{name} has shape {shape}, but there are 3 trajectories of up to 4 turns"
        with pytest.raises(fg.BadInput, match=f"^{re.escape(message)}$"):
            fg.pack(LONG, **values | {name: np.ones(shape)}, row_length=20)
    with pytest.raises(fg.BadInput, match=f"^{name} has 7 slots a turn, but a turn has 8 tokens$"):
        fg.pack(LONG, **values | {name: np.ones((3, 4, 7))}, row_length=20)
    fg.pack(LONG, **values | {name: np.ones((3, 4, 8))}, row_length=20)


def test_trajectories_and_records_are_checked():
    dense, one_nt = fg.collate(LONG), np.ones((3, 4))
    with pytest.raises(fg.BadInput, match=r"^Trajectories.group has 2 on axis n, but tokens has 3$"):
        fg.pack(dense.replace(group=np.zeros(2, int)), one_nt, one_nt, row_length=20)
    with pytest.raises(fg.BadInput, match=r"^Trajectories.length says 9, but a turn has 8 slots$"):
        fg.pack(dense.replace(length=dense.length + (dense.length == 8)), one_nt, one_nt, row_length=20)
    bad = replace(LONG[0].turns[0], logp_sampled=np.zeros(3))
    with pytest.raises(fg.BadInput, match=r"^trajectory 1, turn 0: the lengths disagree: .*logp_sampled 3$"):
        pack_evenly([LONG[0], replace(LONG[0], turns=[bad])], row_length=20)


# The ledger -------------------------------------------------------------------------------------------


def expected_fates(case: Learned, row_length: int, skip: bool) -> dict[fg.Fate, int]:
    """What must become of every chosen token, one by one, where too long trajectories are dropped."""
    fates = dict.fromkeys([fate for fate in fg.Fate if fate <= fg.Fate.DROPPED_NO_SIGNAL], 0)
    for i, record in enumerate(case.records):
        sizes = [len(turn.tokens) for turn in record.turns]
        fits = (sum(sizes) if record.appends else max(sizes)) <= row_length
        signal = (case.trains[i] & (case.adv[i] != 0)).any()
        for t, slot in zip(*np.nonzero(case.dense.chosen[i]), strict=True):
            if case.weights[i, t, slot] == 0:
                counts = fg.ENDINGS[record.status].counts
                fate = fg.Fate.MASKED_WEIGHTLESS if counts else fg.Fate.MASKED_INVALID
            elif skip and not signal:
                fate = fg.Fate.DROPPED_NO_SIGNAL
            else:
                fate = fg.Fate.TRAINED if fits else fg.Fate.DROPPED_TOO_LONG
            fates[fate] += 1
    return fates


def account_as_packed(case: Learned, **settings) -> fg.Ledger:
    """The ledger, the same for ragged and dense trajectories; the number of rows is fixed to compile once."""
    batch = case.pack(**settings, rows=50)
    adv = case.adv if settings.get("skip_no_signal") else None
    ledger = fg.account(case.records, case.weights, batch, adv=adv)
    assert fg.account(case.dense, case.weights, batch, adv=adv) == ledger
    assert ledger.generated == case.dense.chosen.sum() == sum(ledger.fates.values())
    return ledger


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, ROW),
        ({"skip_no_signal": True}, ROW),
        ({"row_length": 20, "too_long": "drop"}, 20),
        ({"row_length": 10, "too_long": "split"}, ROW),
    ],
)
@given(SEEDS)
def test_A6_every_token_is_trained_masked_or_dropped(settings, longest, seed):
    case = learned(seed)
    expected = expected_fates(case, longest, skip="skip_no_signal" in settings)
    assert account_as_packed(case, **settings).fates == expected


def test_A6_each_fate_by_hand():
    records = [
        of_turns(4),
        of_turns(3, 4, 2),  # fits no row
        of_turns(5, outcome=None, status=fg.Status.ABORTED),
        of_turns(6),  # counts, but weighs nothing
        of_turns(8),  # no advantage, though it just fits a row
        of_turns(1, 2),  # its first turn weighs nothing
    ]
    weight_nt = np.array([[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 1]])
    adv_nt = np.ones((6, 3)) * np.array([1, 1, 1, 1, 0, 1])[:, None]
    batch = fg.pack(records, adv_nt, weight_nt, row_length=8, too_long="drop", skip_no_signal=True)
    assert fg.account(records, weight_nt, batch, adv=adv_nt) == fg.Ledger(
        35,
        {
            fg.Fate.TRAINED: 4 + 2,
            fg.Fate.MASKED_INVALID: 5,
            fg.Fate.MASKED_WEIGHTLESS: 6 + 1,
            fg.Fate.DROPPED_TOO_LONG: 9,
            fg.Fate.DROPPED_NO_SIGNAL: 8,
        },
    )


@pytest.mark.parametrize("appends", [False, True])
def test_A6_what_is_skipped_was_not_too_long_where_its_segments_fit_a_row(appends):
    # Six tokens in rows of four: each turn fits, so no signal is the only reason to leave the trajectory out.
    records = [of_turns(4), of_turns(3, 3, appends=appends)]
    adv_nt, weight_nt = np.array([[1.0, 1.0], [0.0, 0.0]]), np.ones((2, 2))
    batch = fg.pack(records, adv_nt, weight_nt, row_length=4, skip_no_signal=True, too_long="split")
    fates = fg.account(records, weight_nt, batch, adv=adv_nt).fates
    assert (fates[fg.Fate.TRAINED], fates[fg.Fate.DROPPED_NO_SIGNAL], fates[fg.Fate.DROPPED_TOO_LONG]) == (4, 6, 0)


def test_A6_weights_that_are_not_those_of_the_batch_or_a_token_that_it_lost_raise():
    """A trajectory is in the batch or not, so no rule of packing explains a part of one."""
    records = [of_turns(4), of_turns(3)]
    with pytest.raises(AssertionError, match="7 tokens were generated"):
        fg.account(records, np.array([[1.0], [0.0]]), pack_evenly(records, row_length=8))
    for token in (0, 5):
        batch = pack_evenly(records, row_length=8)
        batch.chosen[0, token] = False
        with pytest.raises(AssertionError, match="7 tokens were generated"):
            fg.account(records, np.ones((2, 1)), batch)
