"""Prefix trees: each context can be read back from its row, what neighbours begin with is there once, nothing is lost.

`test_update` holds the step on a batch of trees to that of the other layouts (F3).
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import pytest
from family_cases import assert_same_batch, random_records
from hypothesis import given
from hypothesis import strategies as st

import flowgrpo as fg
from flowgrpo.batching.prefix_tree import count_tokens, make_packer, pack_tree, tree_sizes
from flowgrpo.types import PrefixTree, check_axes

SEEDS = st.integers(0, 10_000)
UNPACK = jax.jit(fg.batching.unpack, static_argnums=2)


class Packed(NamedTuple):
    """Records of few words, which often begin alike, and the batch that they are packed into."""

    records: list[fg.Trajectory]
    dense: fg.Trajectories
    adv: np.ndarray  # n t l
    weights: np.ndarray  # n t l
    batch: fg.Batch


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "row_length": st.sampled_from([44, 60, 200]),
        "entries": st.sampled_from([24, 50]),
        "ranks": st.sampled_from([1, 2, 3]),
        "skip_no_signal": st.booleans(),
    },
)
SPLIT = {"row_length": 10, "too_long": "split"}


def packed(seed: int, **settings) -> Packed:
    records, rng = random_records(seed, invalid=0.0), np.random.default_rng(seed)
    words = int(rng.integers(1, 4))  # with one word, contexts of equal length are equal
    for record in records:
        for turn in record.turns:
            turn.tokens[:] = rng.integers(1, words + 1, len(turn.tokens))
    dense = fg.collate(records, turns=4, length=10)
    adv = rng.normal(size=dense.tokens.shape) * (rng.random((len(records), 1, 1)) > 1 / 3)
    weights = np.where(rng.random(dense.tokens.shape) > 0.2, rng.uniform(0.5, 1.0, dense.tokens.shape), 0.0)
    adv[0], weights[0] = 1.0, 0.5
    batch = pack_tree(records, adv, weights, target=adv, **{"row_length": 44, **settings})
    return Packed(records, dense, adv.astype(np.float32), weights.astype(np.float32), batch)


def contexts_of(record: fg.Trajectory, row_length: int) -> list[list[tuple[int, int, int]]]:
    """(turn, slot, position) of each token of each context; a context that fits no row is cut before a turn."""
    contexts: list[list] = []
    position = 0
    for t, turn in enumerate(record.turns):
        if turn.starts_context or not record.extends_context or not contexts:
            contexts.append([])
            position = 0
        elif len(contexts[-1]) + len(turn.tokens) > row_length:
            contexts.append([])
        contexts[-1] += [(t, slot, position + slot) for slot in range(len(turn.tokens))]
        position += len(turn.tokens)
    return contexts


def tokens_before(record: fg.Trajectory, row_length: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(token, position) of all that a chosen token at (turn, slot) goes on from."""
    before = {}
    for context in contexts_of(record, row_length):
        for i, (t, slot, _) in enumerate(context):
            if record.turns[t].chosen[slot]:
                before[t, slot] = [(int(record.turns[u].tokens[at]), position) for u, at, position in context[:i]]
    return before


def tree_of(batch: fg.Batch) -> PrefixTree:
    assert batch.tree is not None
    return batch.tree


def path_to(tree: PrefixTree, row: int, place: int) -> list[tuple[int, int]]:
    """(token, position) of the tokens of the tree that this one sees, itself included; by definition, one by one."""
    seen = [j for j in range(place + 1) if j <= place < tree.ends[row, j]]
    return [(int(tree.tokens[row, j]), int(tree.positions[row, j])) for j in seen]


def trie(paths: list[list[tuple[int, int]]]) -> set[tuple]:
    """All beginnings of these paths."""
    return {tuple(path[: i + 1]) for path in paths for i in range(len(path))}


def check(case: Packed, row_length: int, *, skip: bool) -> None:
    """Each trained token of each context is there once, after exactly what it goes on from; no row holds more."""
    batch, tree, seen, rows = case.batch, tree_of(case.batch), [], {}
    for row, slot in np.argwhere(batch.segments > 0):
        n, t, at = (int(x[row, slot]) for x in (batch.trajectory, batch.turn, batch.slot))
        record = case.records[n]
        path = path_to(tree, row, int(tree.predecessor[row, slot]))
        assert path == tokens_before(record, row_length)[t, at]
        assert batch.positions[row, slot] == dict(positions_of(record, row_length))[t, at]
        assert batch.tokens[row, slot] == record.turns[t].tokens[at]
        assert batch.group[row, slot] == record.group
        assert batch.chosen[row, slot]
        for name, x_ntl in {"advantage": case.adv, "weight": case.weights, "target": case.adv}.items():
            assert getattr(batch, name)[row, slot] == x_ntl[n, t, at], name
        seen.append((n, t, at))
        rows.setdefault(int(row), []).append(path)
    counts_ntl = case.dense.chosen & (case.weights != 0) & ((case.adv != 0) | (not skip))
    taken = np.flatnonzero(counts_ntl.any(axis=(1, 2)))
    expected = [(n, t, at) for n in taken for t, at in tokens_before(case.records[n], row_length)]
    assert sorted(seen) == sorted(expected)
    for row in range(len(batch.tokens)):
        real = tree.ends[row] > 0
        assert real.sum() == len(trie(rows.get(row, []))), "what is shared is there once, and nothing else is"
        assert not real[real.sum() :].any(), "padding comes last"
        own = batch.segments[row] > 0
        assert not own[own.sum() :].any()
        assert (np.diff(batch.segments[row][own]) >= 0).all()
    assert (tree.ends <= (tree.ends > 0).sum(axis=1, keepdims=True)).all()


def positions_of(record: fg.Trajectory, row_length: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Places of a record's tokens, with the position of each."""
    return (((t, at), position) for context in contexts_of(record, row_length) for t, at, position in context)


@given(SEEDS, SETTINGS)
def test_F10_rows_are_the_tries_of_their_contexts(seed, settings):
    case = packed(seed, **settings)
    check(case, settings.get("row_length", 44), skip=settings.get("skip_no_signal", False))
    assert case.batch.tokens.shape == (len(case.batch.tokens), settings.get("entries", settings.get("row_length", 44)))


@given(SEEDS)
def test_later_parts_of_a_split_context_keep_their_positions(seed):
    check(packed(seed, **SPLIT), 10, skip=False)


@given(SEEDS, SETTINGS)
def test_ragged_and_dense_trajectories_give_the_same_trees(seed, settings):
    case = packed(seed, **settings)
    dense = pack_tree(case.dense, case.adv, case.weights, target=case.adv, **{"row_length": 44, **settings})
    assert_same_batch(dense, case.batch)
    check_axes(dense)


@given(SEEDS, SETTINGS)
def test_tokens_are_counted_as_laid_out_and_as_computed(seed, settings):
    case = packed(seed, **settings)
    alone = 0
    for n in set(case.batch.trajectory.ravel().tolist()) - {-1}:
        record = case.records[n]
        for context in contexts_of(record, settings.get("row_length", 44)):
            chosen = [i for i, (t, at, _) in enumerate(context) if record.turns[t].chosen[at]]
            alone += chosen[-1] if chosen else 0
    assert count_tokens(case.batch) == (alone, (tree_of(case.batch).ends > 0).sum())
    plain = fg.pack(case.records, case.adv, case.weights, row_length=44)
    assert count_tokens(plain) == ((plain.segments > 0).sum(),) * 2


@given(SEEDS, st.sampled_from([44, 90, 200]), st.sampled_from([1, 2, 3]), st.booleans())
def test_ranks_hold_equal_numbers_of_whole_trajectories(seed, row_length, ranks, skip):
    case = packed(seed, row_length=row_length, ranks=ranks, skip_no_signal=skip)
    rank_rs = np.arange(len(case.batch.tokens))[:, None] * ranks // len(case.batch.tokens)
    real_rs = case.batch.segments > 0
    rank_rs = np.broadcast_to(rank_rs, real_rs.shape)
    pairs = {(int(n), int(rank)) for n, rank in zip(case.batch.trajectory[real_rs], rank_rs[real_rs], strict=True)}
    assert len(pairs) == len({n for n, _ in pairs})
    counts = np.bincount([rank for _, rank in pairs], minlength=ranks)
    assert np.ptp(counts) <= 1
    order = sorted(pairs, key=lambda pair: (case.records[pair[0]].group, pair[0]))
    assert [rank for _, rank in order] == sorted(rank for _, rank in pairs)
    for micro_rows in (1, 3):
        sizes = {
            "max_trajectory_tokens": 44,
            "trajectories": len(case.records),
            "turns": 4,
            "micro_rows": micro_rows,
            "ranks": ranks,
        }
        again = make_packer(True, **sizes)(case.records, case.adv, case.weights, skip_no_signal=skip)
        assert tree_of(again).tokens.shape == (tree_sizes(**sizes)["rows"], tree_sizes(**sizes)["row_length"])


@pytest.mark.parametrize(
    ("longest", "trajectories", "micro_rows", "row_length"),
    [
        (600, 64, 1, 1024),  # a tree has 1,024 tokens at least
        (600, 64, 3, 1792),  # or those of a micro-batch, in whole blocks
        (600, 64, 16, 4096),  # up to a bound
        (5000, 64, 1, 5000),  # that a longer context passes
        (100, 16, 16, 512),  # of few contexts several rows, so that none is nearly empty
        (20, 4, 1, 128),
    ],
)
def test_tree_lengths_balance_repetition_and_waste(longest, trajectories, micro_rows, row_length):
    assert tree_sizes(longest, trajectories, micro_rows=micro_rows)["row_length"] == row_length


def of_one_turn(context: list[int], *actions: int, group: int = 0, **settings) -> fg.Trajectory:
    chosen = np.array([False] * len(context) + [True] * len(actions))
    turn = fg.Turn(np.array([*context, *actions]), chosen, np.zeros(len(chosen)))
    return fg.Trajectory([turn], 1.0, group, **settings)


ASKED = [
    of_one_turn([1, 2, 3, 4], 5, 6),
    of_one_turn([7, 8, 9], 5, group=1),
    of_one_turn([1, 2, 3, 4], 6),
    of_one_turn([1, 2, 3, 4], 5, 5, 5),
    of_one_turn([7, 3, 9], 6, group=1),
]


def pack_asked(records=ASKED, **sizes) -> fg.Batch:
    one_nt = np.ones((len(records), 1))
    return pack_tree(records, one_nt, one_nt, **{"row_length": 12, **sizes})


def test_trees_by_hand():
    """Whoever begins alike; a chosen token that another one goes on from is there once, and is scored for each."""
    batch = pack_asked()
    assert tree_of(batch).tokens.tolist() == [[1, 2, 3, 4, 5, 5, 7, 3, 9, 8, 9, 0]]
    assert tree_of(batch).positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 1, 2, 0]]
    assert tree_of(batch).ends.tolist() == [[6, 6, 6, 6, 6, 6, 11, 9, 9, 11, 11, 0]]
    assert batch.tokens.tolist() == [[6, 5, 6, 5, 5, 5, 6, 5, 0, 0, 0, 0]]
    assert tree_of(batch).predecessor.tolist() == [[3, 3, 4, 3, 4, 5, 8, 10, -1, -1, -1, -1]]
    assert batch.trajectory.tolist() == [[2, 0, 0, 3, 3, 3, 4, 1, -1, -1, -1, -1]]
    assert batch.segments.tolist() == [[1, 2, 2, 3, 3, 3, 4, 5, 0, 0, 0, 0]]
    assert count_tokens(batch) == (4 + 5 + 6 + 3 + 3, 11)
    assert fg.batching.fill_rate(batch) == 11 / 12
    by_rows = pack_asked(row_length=7, entries=4, rows=5)
    assert tree_of(by_rows).tokens.tolist() == [
        [1, 2, 3, 4, 5, 0, 0],  # entries are full
        [1, 2, 3, 4, 5, 5, 0],
        [7, 3, 9, 8, 9, 0, 0],
        [0] * 7,
        [0] * 7,
    ]
    assert by_rows.tokens.shape == (5, 4)
    parted = pack_asked(ranks=2)  # groups 0 0 0 | 1 1, but the first rank takes one more
    assert [sorted({*row} - {-1}) for row in parted.trajectory.tolist()] == [[0, 2, 3], [1, 4]]


def test_a_first_chosen_token_has_no_predecessor():
    batch = pack_asked([of_one_turn([], 3, 4), of_one_turn([], 3)])
    assert tree_of(batch).predecessor[0, :4].tolist() == [-1, -1, 0, -1]
    assert tree_of(batch).tokens[0, :2].tolist() == [3, 0]
    assert count_tokens(batch) == (1, 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"row_length": 6}, "trajectory 3 has 7 tokens in one context, but a row holds 6: raise row_length"),
        ({"entries": 2}, "trajectory 3 has 3 chosen tokens in one context, but a row has 2 entries: raise entries"),
        ({"row_length": 7, "rows": 1}, "the batch needs 2 rows of 7 tokens, but rows=1: raise rows or row_length"),
        ({"rows": 3, "ranks": 2}, "rows=3 can't be shared equally by ranks=2"),
        ({"ranks": 0}, "rows=None can't be shared equally by ranks=0"),
    ],
)
def test_contexts_that_do_not_fit_are_named_with_both_sizes(sizes, message):
    with pytest.raises(fg.BadInput, match=f"^{message}"):
        pack_asked(**sizes)


def test_without_weights_trees_are_all_padding():
    records, nothing_nt = random_records(0), np.zeros((12, 4))
    silent = fg.collate(records).replace(chosen=np.zeros_like(fg.collate(records).chosen), length=None)
    for source, weight_nt in ((records, nothing_nt), (silent, nothing_nt + 1)):
        batch = pack_tree(source, nothing_nt, weight_nt, row_length=30, rows=4, ranks=2)
        assert batch.tokens.shape == (4, 30)
        assert not batch.segments.any()
        assert not tree_of(batch).ends.any()
        assert count_tokens(batch) == (0, 0)


@given(SEEDS, st.sampled_from([{"row_length": 44}, SPLIT, {"row_length": 20, "too_long": "drop"}]), st.booleans())
def test_A6_every_token_is_trained_masked_or_dropped_in_trees_as_in_rows(seed, into, skip):
    case = packed(seed)
    settings = {**into, "skip_no_signal": skip, "rows": 60}
    adv = case.adv if skip else None
    tree, plain = (f(case.records, case.adv, case.weights, **settings) for f in (pack_tree, fg.pack))
    ledger = fg.batching.account(case.records, case.weights, tree, adv=adv)
    assert ledger == fg.batching.account(case.records, case.weights, plain, adv=adv)


@given(SEEDS)
def test_values_of_trees_are_unpacked_to_their_trajectories(seed):
    case = packed(seed, row_length=60, rows=12)
    taken_n = ((case.weights != 0) & case.dense.chosen).any(axis=(1, 2))
    back_ntl = UNPACK(case.batch.advantage, case.batch, case.dense.tokens.shape)
    np.testing.assert_array_equal(back_ntl, np.where(case.dense.chosen & taken_n[:, None, None], case.adv, 0))


def test_five_hundred_long_trajectories_take_well_under_a_second():
    rng = np.random.default_rng(0)
    count, length = 512, 2000
    tokens = rng.integers(0, 1000, (count, 1, length)).astype(np.int32)
    tokens[:, :, :1500] = np.repeat(tokens[::8, :, :1500], 8, axis=0)
    chosen = np.broadcast_to(np.arange(length) >= 1500, tokens.shape)
    dense = fg.collate([of_one_turn([1], 1)] * count)
    zeros = np.zeros(tokens.shape, np.float32)
    dense = dense.replace(tokens=tokens, chosen=chosen, logp_sampled=zeros, version=zeros.astype(np.int32))
    dense = dense.replace(length=np.full((count, 1), length), group=np.repeat(np.arange(64), 8))
    ones = np.ones((count, 1), np.float32)
    best = np.inf
    for _ in range(3):
        start = time.perf_counter()
        batch = pack_tree(dense, ones, ones, row_length=8192)
        best = min(best, time.perf_counter() - start)
    assert best < 1.0
    laid, computed = count_tokens(batch)
    assert laid == count * (length - 1)
    least = 64 * 1500 + count * 499
    assert least <= computed <= least + len(batch.tokens) * 1500, "a row begins with what it shares with the one before"


def test_prefixes_of_any_token_ids_are_shared():
    """Words above 255 are sorted by their bytes, whose order is that of the numbers."""
    words = [300, 70_000, 2, 2**30]
    records = [of_one_turn(words, 5), of_one_turn([*words[:3], 1], 5), of_one_turn(words, 256)]
    assert count_tokens(pack_asked(records, row_length=20)) == (12, 5)


def test_tree_batches_are_pytrees_of_rows():
    batch = pack_asked()
    assert all(len(x) == 1 for x in jax.tree.leaves(batch))
