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


def of_lengths(lengths) -> list[fg.Trajectory]:
    """One trajectory of one turn for each length, all of its tokens chosen."""
    return [of_turns(size) for size in lengths]


def all_chosen(size: int) -> fg.Turn:
    return fg.Turn(np.arange(size), np.ones(size, bool), np.zeros(size))


def of_turns(*lengths: int, **settings) -> fg.Trajectory:
    """One trajectory with turns of these lengths, all of their tokens chosen."""
    return fg.Trajectory([all_chosen(size) for size in lengths], **{"outcome": 1.0, "group": 0, **settings})


def pack_evenly(records: list[fg.Trajectory], **settings) -> fg.Batch:
    """Packed with advantage and weight 1 everywhere."""
    one_nt = np.ones((len(records), max(len(record.turns) for record in records)))
    return fg.pack(records, one_nt, one_nt, **settings)


# Reading a batch --------------------------------------------------------------------------------------


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


def fills(batch: fg.Batch) -> list[int]:
    return (batch.segments > 0).sum(axis=1).tolist()


# Content ----------------------------------------------------------------------------------------------


@given(SEEDS)
def test_every_token_that_takes_part_is_there_once_in_its_segment_at_its_position(seed):
    case = learned(seed)
    found = sorted((run.places, run.positions) for run in runs(case.pack()))
    assert found == sorted(whole_segments(case.records, np.flatnonzero(case.trains.any(axis=(1, 2))).tolist()))


@given(SEEDS)
def test_every_token_has_the_values_of_its_place(seed):
    case = learned(seed)
    batch = case.pack(target=case.adv + 1)
    real_rs = batch.segments > 0
    place = (batch.trajectory[real_rs], batch.turn[real_rs], batch.slot[real_rs])
    for name in ("tokens", "chosen", "logp_sampled"):
        np.testing.assert_array_equal(getattr(batch, name)[real_rs], getattr(case.dense, name)[place], err_msg=name)
    for name, x_ntl in {"advantage": case.adv, "weight": case.weights, "target": case.adv + 1}.items():
        expected_ntl = np.where(case.dense.chosen, x_ntl, 0)
        np.testing.assert_array_equal(getattr(batch, name)[real_rs], expected_ntl[place], err_msg=name)
    np.testing.assert_array_equal(batch.group[real_rs], case.dense.group[place[0]])


@given(SEEDS)
def test_padding_says_so_in_every_field(seed):
    batch = learned(seed).pack(rows=14)
    padding_rs = batch.segments == 0
    assert padding_rs.any()
    for name in ("trajectory", "turn", "slot", "group"):
        assert (getattr(batch, name)[padding_rs] == -1).all(), name
    for name in ("tokens", "positions", "chosen", "logp_sampled", "logp_old", "advantage", "weight"):
        assert not getattr(batch, name)[padding_rs].any(), name


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


def assert_same_batch(found: fg.Batch, expected: fg.Batch):
    for item in fields(fg.Batch):
        left, right = getattr(found, item.name), getattr(expected, item.name)
        assert (left is None) == (right is None), item.name
        if left is not None:
            assert left.dtype == right.dtype, item.name
            np.testing.assert_array_equal(left, right, err_msg=item.name)


@given(SEEDS, st.booleans(), st.sampled_from([1, 2, 3]), st.sampled_from(["drop", "split"]))
def test_ragged_and_dense_trajectories_give_the_same_batch(seed, skip, ranks, too_long):
    case = learned(seed)
    settings = {"row_length": 20, "ranks": ranks, "skip_no_signal": skip, "too_long": too_long, "target": case.adv}
    settings["rows"] = 60
    assert_same_batch(fg.pack(case.dense, case.adv, case.weights, **settings), case.pack(**settings))


@pytest.mark.usefixtures("nan_allowed")
def test_arrays_on_a_device_give_the_same_batch():
    case = learned(3)
    found = fg.pack(*jax.tree.map(jnp.asarray, (case.dense, case.adv, case.weights)), row_length=ROW)
    assert_same_batch(found, case.pack())


def test_scored_fields_come_from_the_trajectories():
    case = learned(5)
    scored = score(case.dense)
    batch = fg.pack(scored, case.adv, case.weights, row_length=ROW)
    real_rs = batch.segments > 0
    place = (batch.trajectory[real_rs], batch.turn[real_rs], batch.slot[real_rs])
    for name, x_ntl in {"logp_old": scored.logp_old, "logp_ref": scored.logp_ref, "value_old": scored.value}.items():
        np.testing.assert_array_equal(getattr(batch, name)[real_rs], x_ntl[place], err_msg=name)
        assert not getattr(batch, name)[~real_rs].any(), name
    assert (batch.logp_old != batch.logp_sampled).any()


def test_what_was_not_scored_is_absent_and_logp_old_is_logp_sampled():
    for batch in (learned(5).pack(), fg.pack(*learned(5)[3:], *learned(5)[1:3], row_length=ROW)):
        np.testing.assert_array_equal(batch.logp_old, batch.logp_sampled)
        assert batch.logp_old.any()
        assert batch.logp_ref is batch.value_old is batch.target is None


def test_advantages_of_turns_and_of_tokens_agree():
    case = learned(2)
    adv_nt, weight_nt = case.adv[:, :, 0], case.weights[:, :, 1]
    wide = [np.repeat(x_nt[:, :, None], 10, axis=2) for x_nt in (adv_nt, weight_nt)]
    by_token = fg.pack(case.records, *wide, row_length=ROW, target=wide[0])
    assert_same_batch(fg.pack(case.records, adv_nt, weight_nt, row_length=ROW, target=adv_nt), by_token)
    assert by_token.advantage.any()


def test_advantages_may_be_wider_than_the_records():
    case = learned(2)
    wide = [np.pad(x_ntl, ((0, 0), (0, 3), (0, 5)), constant_values=9.0) for x_ntl in (case.adv, case.weights)]
    assert_same_batch(fg.pack(case.records, *wide, row_length=ROW), case.pack())


def test_F6_garbage_where_nothing_was_chosen_is_never_read():
    case = learned(4)
    dirty = [np.where(case.dense.chosen, x_ntl, np.nan) for x_ntl in (case.adv, case.weights)]
    found = fg.pack(case.records, *dirty, row_length=ROW, target=dirty[0], skip_no_signal=True)
    assert_same_batch(found, case.pack(target=case.adv, skip_no_signal=True))


# What takes part --------------------------------------------------------------------------------------


def test_F5_what_weighs_nothing_is_left_out():
    case = learned(0)
    counts_n = np.array([fg.ENDINGS[record.status].counts for record in case.records])
    weight_nt = np.tile(counts_n[:, None], (1, 4)).astype(np.float32)
    weight_nt[5] = 0
    batch = fg.pack(case.records, np.ones((12, 4)), weight_nt, row_length=ROW)
    assert taken_by(batch) == [i for i in range(12) if counts_n[i] and i != 5]
    assert not counts_n.all()
    assert counts_n[5]


def test_a_weight_where_nothing_was_chosen_does_not_make_a_trajectory_take_part():
    case = learned(1)
    weight_ntl = np.where(case.dense.chosen, 0.0, 1.0)
    weight_ntl[3] = 1.0
    assert taken_by(fg.pack(case.records, case.adv, weight_ntl, row_length=ROW)) == [3]


@given(SEEDS)
def test_F8_skipping_leaves_out_exactly_what_has_no_advantage(seed):
    case = learned(seed)
    signal_n = (case.trains & (case.adv != 0)).any(axis=(1, 2))
    assert taken_by(case.pack(skip_no_signal=True)) == np.flatnonzero(signal_n).tolist()
    assert taken_by(case.pack()) == np.flatnonzero(case.trains.any(axis=(1, 2))).tolist()


def test_F8_an_advantage_counts_only_on_a_token_that_weighs_something():
    records = [of_turns(2, 2), of_turns(2, 2)]
    adv_nt, weight_nt = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])
    assert taken_by(fg.pack(records, adv_nt, weight_nt, row_length=4, skip_no_signal=True)) == [1]


def test_without_any_weight_the_batch_is_all_padding():
    case = learned(0)
    for source, rows in ((case.records, 1), (case.dense, 6)):
        batch = fg.pack(source, case.adv, np.zeros((12, 4)), row_length=ROW, rows=rows, ranks=rows)
        assert batch.tokens.shape == (rows, ROW)
        assert not batch.segments.any()
        assert (batch.trajectory == -1).all()
        assert fg.fill_rate(batch) == 0


def test_without_any_chosen_token_the_batch_is_all_padding():
    dense = learned(0).dense
    silent = dense.replace(chosen=np.zeros_like(dense.chosen), length=None)
    batch = fg.pack(silent, np.ones((12, 4)), np.ones((12, 4)), row_length=8)
    assert batch.tokens.shape == (1, 8)
    assert not batch.segments.any()


# Rows -------------------------------------------------------------------------------------------------


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
def test_best_fit_fills_rows_as_placing_one_by_one_does(drawn):
    lengths, row_length = drawn
    row_k, _, num_rows = best_fit(np.array(lengths), row_length)
    filled = np.bincount(row_k, weights=lengths, minlength=num_rows)
    assert sorted(filled.tolist()) == slow_best_fit(lengths, row_length)


@given(lengths_and_row())
def test_best_fit_neither_overlaps_nor_overflows_nor_leaves_gaps(drawn):
    lengths, row_length = drawn
    row_k, offset_k, num_rows = best_fit(np.array(lengths), row_length)
    holds_rs = np.zeros((num_rows, row_length), int)
    for row, offset, length in zip(row_k, offset_k, lengths, strict=True):
        assert offset + length <= row_length
        holds_rs[row, offset : offset + length] += 1
    assert holds_rs.max() == 1
    assert (np.diff(holds_rs, axis=1) <= 0).all(), "what is filled comes first"


def test_best_fit_by_hand():
    row_k, offset_k, num_rows = best_fit(np.array([2, 6, 3, 4, 5]), 10)
    assert num_rows == 2
    assert (row_k.tolist(), offset_k.tolist()) == ([1, 0, 1, 0, 1], [8, 0, 5, 6, 0])


def test_best_fit_of_nothing_needs_no_row():
    row_k, offset_k, num_rows = best_fit(np.zeros(0, np.int64), 10)
    assert (len(row_k), len(offset_k), num_rows) == (0, 0, 0)


@given(lengths_and_row())
def test_packed_rows_are_those_of_best_fit(drawn):
    lengths, row_length = drawn
    batch = pack_evenly(of_lengths(lengths), row_length=row_length)
    assert sorted(fills(batch)) == slow_best_fit(lengths, row_length)
    found = runs(batch)
    assert sorted(run.places[0][0] for run in found) == list(range(len(lengths)))
    assert all(len(run.places) == lengths[run.places[0][0]] for run in found)


@pytest.mark.parametrize("seed", range(3))
def test_long_tailed_lengths_fill_rows_to_97_percent(seed):
    length_n = np.random.default_rng(seed).lognormal(5, 0.5, 1000).astype(int)
    row_length = int(4 * length_n.mean())
    batch = pack_evenly(of_lengths(np.clip(length_n, 1, row_length)), row_length=row_length)
    assert 0.97 <= fg.fill_rate(batch) == np.clip(length_n, 1, row_length).sum() / batch.tokens.size <= 1


# Ranks ------------------------------------------------------------------------------------------------


def rank_fills(batch: fg.Batch, ranks: int) -> np.ndarray:
    """Tokens in each row of each rank, where the rows of a rank are adjacent."""
    return np.array(fills(batch)).reshape(ranks, -1)


@given(lengths_and_row(least=4), st.integers(1, 4))
def test_ranks_get_equally_many_rows_and_nearly_equally_many_tokens(drawn, ranks):
    lengths, row_length = drawn
    batch = pack_evenly(of_lengths(lengths), row_length=row_length, ranks=ranks)
    assert len(runs(batch)) == len(lengths)
    totals = rank_fills(batch, ranks).sum(axis=1)
    assert totals.sum() == sum(lengths)
    assert totals.max() - totals.min() <= max(lengths)
    dealt = np.bincount([run.row * ranks // len(batch.tokens) for run in runs(batch)], minlength=ranks)
    assert dealt.max() - dealt.min() <= 1, "trajectories are dealt evenly as well"


def test_segments_are_dealt_there_and_back_again():
    batch = pack_evenly(of_lengths([8, 7, 6, 5, 4, 3, 2, 1]), row_length=8, ranks=2)
    assert rank_fills(batch, 2).sum(axis=1).tolist() == [8 + 5 + 4 + 1, 7 + 6 + 3 + 2]


def test_rows_of_a_rank_are_adjacent():
    batch = pack_evenly(of_lengths([4, 4, 4, 4, 1, 1]), row_length=4, ranks=2)
    assert rank_fills(batch, 2).tolist() == [[4, 4, 1], [4, 4, 1]]


def test_a_rank_that_needs_fewer_rows_gets_padding():
    batch = pack_evenly(of_lengths([2, 4, 2, 2, 2]), row_length=4, ranks=2)
    assert sorted(rank_fills(batch, 2).tolist()) == [[4, 0], [4, 4]]


def test_more_ranks_than_segments_leave_ranks_with_padding_only():
    batch = pack_evenly(of_lengths([3, 2]), row_length=4, ranks=3)
    assert rank_fills(batch, 3).tolist() == [[3], [2], [0]]


def test_fixed_rows_are_shared_between_the_ranks():
    lengths = [4, 4, 4, 4, 1, 1]
    assert rank_fills(pack_evenly(of_lengths(lengths), row_length=4, rows=7), 1).tolist() == [[4, 4, 4, 4, 2, 0, 0]]
    batch = pack_evenly(of_lengths(lengths), row_length=4, rows=8, ranks=2)
    assert rank_fills(batch, 2).tolist() == [[4, 4, 1, 0], [4, 4, 1, 0]]
    assert len(runs(batch)) == 6
    assert len(pack_evenly(of_lengths(lengths), row_length=4, rows=5).tokens) == 5, "rows that just suffice are fine"


@pytest.mark.parametrize(("rows", "ranks", "needed"), [(4, 1, 5), (4, 2, 6)])
def test_too_few_rows_name_both_numbers(rows, ranks, needed):
    with pytest.raises(fg.BadInput, match=f"^the batch needs {needed} rows of 4 tokens, but rows={rows}"):
        pack_evenly(of_lengths([4, 4, 4, 4, 1, 1]), row_length=4, rows=rows, ranks=ranks)


@pytest.mark.parametrize(("rows", "ranks"), [(3, 2), (0, 1), (-2, 2), (None, 0), (4, -1)])
def test_rows_that_cannot_be_shared_equally_name_both_numbers(rows, ranks):
    with pytest.raises(fg.BadInput, match=f"^rows={rows} can't be shared equally by ranks={ranks}"):
        pack_evenly(of_lengths([2, 2]), row_length=4, rows=rows, ranks=ranks)


# Too long ---------------------------------------------------------------------------------------------

LONG = [of_turns(4), of_turns(3, 4, 2, 5), of_turns(4, 8, appends=False)]  # the second fits no row of eight


def test_too_long_is_an_error_that_names_trajectory_and_lengths():
    with pytest.raises(fg.BadInput, match=r"^trajectory 1 has 14 tokens in all, but a row holds 8: .*split.*drop"):
        pack_evenly(LONG, row_length=8)
    with pytest.raises(fg.BadInput, match=r"^trajectory 1 has 8 tokens in one turn, but a row holds 7"):
        pack_evenly([LONG[0], LONG[2]], row_length=7)


def test_a_trajectory_rendered_afresh_may_be_longer_than_a_row_in_all():
    assert sorted(fills(pack_evenly(LONG[2:], row_length=8))) == [4, 8]


def test_too_long_is_no_matter_where_a_trajectory_takes_no_part():
    weight_nt = np.array([[1.0], [0.0], [1.0]]) * np.ones(4)
    assert taken_by(fg.pack(LONG, np.ones((3, 4)), weight_nt, row_length=8)) == [0, 2]
    assert taken_by(fg.pack(LONG, weight_nt, np.ones((3, 4)), row_length=8, skip_no_signal=True)) == [0, 2]


def test_drop_leaves_out_what_fits_no_row_and_only_that():
    assert taken_by(pack_evenly(LONG, row_length=8, too_long="drop")) == [0, 2]
    assert taken_by(pack_evenly(LONG, row_length=7, too_long="drop")) == [0]
    assert taken_by(pack_evenly(LONG, row_length=14, too_long="drop")) == [0, 1, 2]


def test_drop_of_everything_leaves_padding():
    batch = pack_evenly([LONG[1]], row_length=8, too_long="drop")
    assert batch.tokens.shape == (1, 8)
    assert not batch.segments.any()


def test_split_cuts_at_turns_and_positions_go_on():
    batch = pack_evenly(LONG, row_length=8, too_long="split")
    parts = [run for run in runs(batch) if run.places[0][0] == 1]
    found = sorted(([place[1] for place in part.places], part.positions) for part in parts)
    assert found == [([0] * 3 + [1] * 4, list(range(7))), ([2] * 2 + [3] * 5, list(range(7, 14)))]


def test_split_leaves_alone_what_fits():
    whole = pack_evenly(LONG, row_length=14)
    assert_same_batch(pack_evenly(LONG, row_length=14, too_long="split"), whole)


@given(SEEDS)
def test_split_keeps_every_token_and_every_weight(seed):
    case = learned(seed)
    batch = case.pack(row_length=10, too_long="split")
    found_ntl, times_ntl = np.zeros_like(case.weights), np.zeros(case.weights.shape, int)
    real_rs = batch.segments > 0
    place = (batch.trajectory[real_rs], batch.turn[real_rs], batch.slot[real_rs])
    np.add.at(found_ntl, place, batch.weight[real_rs])
    np.add.at(times_ntl, place, 1)
    filled_ntl = np.arange(10) < case.dense.length[:, :, None]
    np.testing.assert_array_equal(found_ntl, np.where(case.dense.chosen, case.weights, 0))
    np.testing.assert_array_equal(times_ntl, filled_ntl & case.trains.any(axis=(1, 2), keepdims=True))


@given(SEEDS)
def test_split_cuts_nowhere_but_between_turns_and_not_without_need(seed):
    case = learned(seed)
    length_nt = case.dense.length
    parts = sorted((run.places, run.positions) for run in runs(case.pack(row_length=10, too_long="split")))
    for places, positions in parts:
        i, first, last = places[0][0], places[0][1], places[-1][1]
        assert places == [(i, t, slot) for t in range(first, last + 1) for slot in range(length_nt[i, t])]
        origin = length_nt[i, :first].sum() if case.records[i].appends else 0
        assert positions == list(range(origin, origin + len(places)))
    for (left, _), (right, _) in itertools.pairwise(parts):
        if left[0][0] == right[0][0] and case.records[left[0][0]].appends:
            assert len(left) + len(right) > 10, "two parts that fit one row together stay together"


def test_split_of_a_turn_longer_than_a_row_is_an_error():
    with pytest.raises(fg.BadInput, match=r"^trajectory 1, turn 3 has 5 tokens, but a row holds 4, and a turn is nev"):
        pack_evenly(LONG[:2], row_length=4, too_long="split")
    with pytest.raises(fg.BadInput, match=r"^trajectory 1, turn 1 has 8 tokens, but a row holds 7"):
        pack_evenly([LONG[0], LONG[2]], row_length=7, too_long="split")


@pytest.mark.parametrize("row_length", [8, 100])
def test_an_unknown_way_with_too_long_is_an_error(row_length):
    with pytest.raises(fg.BadInput, match=r"^too_long is 'truncate', but must be error, split or drop$"):
        pack_evenly(LONG, row_length=row_length, too_long="truncate")


# Shapes that can't be used ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adv", "weights", "target"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 4), (4, 4), (3, 3), (3, 3, 8), (3, 4, 8, 1)])
def test_values_of_a_wrong_shape_name_what_there_is(name, shape):
    values = {"adv": np.ones((3, 4)), "weights": np.ones((3, 4)), "target": None, name: np.ones(shape)}
    message = f"{name} has shape {shape}, but there are 3 trajectories of up to 4 turns"
    with pytest.raises(fg.BadInput, match=f"^{re.escape(message)}$"):
        fg.pack(LONG, **values, row_length=20)


@pytest.mark.parametrize("name", ["adv", "weights", "target"])
def test_too_few_slots_name_both_numbers(name):
    values = {"adv": np.ones((3, 4)), "weights": np.ones((3, 4)), "target": None, name: np.ones((3, 4, 7))}
    with pytest.raises(fg.BadInput, match=f"^{name} has 7 slots a turn, but a turn has 8 tokens$"):
        fg.pack(LONG, **values, row_length=20)


def test_dense_trajectories_are_checked():
    dense = fg.collate(LONG)
    with pytest.raises(fg.BadInput, match=r"^Trajectories.group has 2 on axis n, but tokens has 3$"):
        fg.pack(dense.replace(group=np.zeros(2, int)), np.ones((3, 4)), np.ones((3, 4)), row_length=20)


def test_records_are_checked():
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


@given(SEEDS)
def test_A6_every_token_is_trained_or_masked(seed):
    case = learned(seed)
    assert account_as_packed(case).fates == expected_fates(case, ROW, skip=False)


@given(SEEDS)
def test_A6_every_token_is_trained_masked_or_dropped_with_its_trajectory(seed):
    case = learned(seed)
    assert account_as_packed(case, row_length=20, too_long="drop").fates == expected_fates(case, 20, skip=False)


@given(SEEDS)
def test_A6_every_token_is_trained_masked_or_skipped(seed):
    case = learned(seed)
    assert account_as_packed(case, skip_no_signal=True).fates == expected_fates(case, ROW, skip=True)


@given(SEEDS)
def test_A6_split_trains_every_token_that_weighs_something(seed):
    case = learned(seed)
    assert account_as_packed(case, row_length=10, too_long="split").fates == expected_fates(case, ROW, skip=False)


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


def test_A6_weights_that_are_not_those_of_the_batch_raise():
    records = [of_turns(4), of_turns(3)]
    batch = pack_evenly(records, row_length=8)
    with pytest.raises(AssertionError, match="7 tokens were generated"):
        fg.account(records, np.array([[1.0], [0.0]]), batch)


@pytest.mark.parametrize("token", [0, 5])
def test_A6_a_single_token_that_a_batch_lost_raises(token):
    # A trajectory is in the batch or not, so no rule of packing explains a part of one.
    records = [of_turns(4), of_turns(3)]
    batch = pack_evenly(records, row_length=8)
    batch.chosen[0, token] = False
    with pytest.raises(AssertionError, match="7 tokens were generated"):
        fg.account(records, np.ones((2, 1)), batch)


def test_a_length_beyond_the_slots_is_refused():
    dense = fg.collate([of_turns(3)])
    with pytest.raises(fg.BadInput, match=r"^Trajectories.length says 4, but a turn has 3 slots$"):
        fg.pack(dense.replace(length=np.array([[4]])), np.ones((1, 1)), np.ones((1, 1)), row_length=8)
