"""Pack trajectories into prefix trees: shared prefixes of contexts are laid out, and computed, once.

    contexts -> sort lexicographically -> neighbours share prefixes -> depth first into rows

A row holds a forest of tokens, each after those before it in its contexts; `tree_ends` is the end of each token's
subtree: i attends to j iff j <= i < end_j. For the contexts `a b c d`, `a b e` and `f`:

    tree        a  b  c  d  e  f
    positions   0  1  2  3  2  0
    ends        5  5  4  4  5  6

Scored tokens are separate entries, one for each chosen token of each context: the fields of any `Batch`, and
`predecessor`, the node of the tree whose hidden state predicts the token. Contexts share any common prefix: the
instructions of a run, the prompt of a group, turns before a branch, a text that is rendered afresh each turn. The last
token of a context predicts nothing, and is not in the tree. All of it is NumPy on the host, and the loss is that of
every other layout (F3).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from flowgrpo.batching.packing import (
    Index,
    Segments,
    TooLong,
    cut_segments,
    filled_slots,
    lay_out,
    pack,
    per_token,
    read_trajectories,
    takes_part,
)
from flowgrpo.types import BadInput, Batch, Trajectories, Trajectory

TREE_TOKENS = 4096  # maximum size of a tree, unless a context is longer: a micro-batch that fills a device
LEAST_TREE = 1024  # minimum tokens of a micro-batch: in smaller trees contexts share little
BLOCK = 128


class Contexts(NamedTuple):
    """k contexts in lexicographic order, rank by rank, and their c chosen tokens in the same order."""

    start: np.ndarray  # k: first token, as an index into the flat order
    size: np.ndarray  # k: number of tokens before the last chosen one, which have to be computed
    origin: np.ndarray  # k: position of the first token
    shared: np.ndarray  # k: number of tokens in common with the previous context
    rank: np.ndarray  # k
    count: np.ndarray  # k: number of chosen tokens
    chosen: np.ndarray  # c: number of tokens of the context before a chosen one


class Places(NamedTuple):
    """The place of each of k contexts."""

    row: np.ndarray  # within its rank
    number: np.ndarray  # within its row, from 1
    shared: np.ndarray  # number of tokens in common with the previous context of the row
    tree: np.ndarray  # slot of its first own token in the row's tree
    entry: np.ndarray  # slot of its first entry


def pack_tree(
    trajectories: Trajectories | Sequence[Trajectory],
    adv,
    weights,
    *,
    row_length: int,
    rows: int | None = None,
    ranks: int = 1,
    too_long: TooLong = "error",
    skip_no_signal: bool = False,
    target=None,
    entries: int | None = None,
) -> Batch:
    """Pack trajectories into rows of trees of `row_length` tokens, each with up to `entries` scored tokens.

    Rows are filled in the order of the contexts, so that those of a row share prefixes; what a row shares with the
    previous one is repeated. A context is never split over rows. Each rank gets the next trajectories in the order of
    their groups, equal numbers up to one, and an equal number of rows.

    Args:
        entries: scored tokens per row; by default `row_length`.

    The other arguments are those of `pack`; `too_long="split"` splits at turns.
    """
    trajectories, length_nt, begins_nt, actions_ntl = read_trajectories(trajectories)
    adv_ntl, weight_ntl = per_token("adv", adv, actions_ntl), per_token("weights", weights, actions_ntl)
    taken_n = takes_part(weight_ntl, adv_ntl if skip_no_signal else None)
    segments = cut_segments(length_nt, begins_nt, taken_n, row_length, too_long)
    source_q = np.flatnonzero(filled_slots(length_nt, actions_ntl.shape[2]))  # of each token, in the flat order
    tokens_q = np.asarray(trajectories.tokens, np.int32)[:, :, : actions_ntl.shape[2]].reshape(-1)[source_q]
    rank_n = _ranks(np.asarray(trajectories.group), taken_n, ranks, rows)
    trajectory_k = source_q[segments.start] // actions_ntl[0].size
    contexts = _sort_contexts(segments, rank_n[trajectory_k], tokens_q, actions_ntl.reshape(-1)[source_q])
    entries = row_length if entries is None else entries
    if contexts.count.max(initial=0) > entries:
        k = int(contexts.count.argmax())
        raise BadInput(
            f"trajectory {source_q[contexts.start[k]] // actions_ntl[0].size} has {contexts.count[k]} chosen tokens in "
            f"one context, but a row has {entries} entries: raise entries"
        )
    places = _fill_rows(contexts, row_length, entries)
    needed = int(places.row.max(initial=0)) + 1
    if rows is not None and needed * ranks > rows:
        raise BadInput(
            f"the batch needs {needed * ranks} rows of {row_length} tokens, but rows={rows}: raise rows or row_length"
        )
    per_rank = needed if rows is None else rows // ranks
    places = places._replace(row=places.row + contexts.rank * per_rank)
    tree = _lay_trees(contexts, places, tokens_q, (per_rank * ranks, row_length))
    index, predecessor_rs = _lay_entries(
        contexts, places, source_q, tree, (per_rank * ranks, entries), actions_ntl.shape
    )
    batch = lay_out(index, trajectories, actions_ntl, adv_ntl, weight_ntl, target)
    tokens_ru, positions_ru, ends_ru, _ = tree
    return batch.replace(
        tree_tokens=tokens_ru, tree_positions=positions_ru, tree_ends=ends_ru, predecessor=predecessor_rs
    )


def make_packer(
    use_trees: bool,
    *,
    max_trajectory_tokens: int,
    trajectories: int,
    turns: int = 1,
    micro_rows: int = 16,
    ranks: int = 1,
) -> Callable[..., Batch]:
    """`pack_tree`, or `pack` without `use_trees`, with a fixed row shape that suffices whatever is sampled.

    Args:
        use_trees: whether prefixes are shared.
        max_trajectory_tokens: tokens of the longest possible trajectory.
        trajectories: number of trajectories of a batch.
        turns: maximum number of contexts of a trajectory.
        micro_rows: a tree replaces a micro-batch of so many rows.
        ranks: see `pack`.
    """
    if use_trees:
        sizes = tree_sizes(max_trajectory_tokens, trajectories, turns, micro_rows=micro_rows, ranks=ranks)
        return partial(pack_tree, ranks=ranks, **sizes)
    contexts = trajectories * turns
    return partial(pack, row_length=max_trajectory_tokens, rows=contexts + -contexts % ranks, ranks=ranks)


def tree_sizes(
    max_trajectory_tokens: int, trajectories: int, turns: int = 1, *, micro_rows: int = 16, ranks: int = 1
) -> dict[str, int]:
    """`row_length` and `rows` for `pack_tree` that suffice even if nothing is shared.

    A tree is at most as large as a micro-batch of `micro_rows` rows, or 1,024 tokens. Long trees repeat little of the
    previous tree, and short ones leave little of the last one empty: the square root of the number of contexts balances
    the two. Its size is a multiple of 128, the block of the kernels, unless it holds a single context.
    """
    max_size = min(TREE_TOKENS, max(micro_rows * max_trajectory_tokens, LEAST_TREE))
    blocks = min(math.ceil(math.isqrt(trajectories * turns) * max_trajectory_tokens / BLOCK), max_size // BLOCK)
    row_length = max(max_trajectory_tokens, blocks * BLOCK)
    contexts = math.ceil(trajectories / ranks) * turns  # of a rank, in rows that each hold that many at least
    return {"row_length": row_length, "rows": ranks * math.ceil(contexts / (row_length // max_trajectory_tokens))}


def count_tokens(batch: Batch) -> tuple[int, int]:
    """(number of tokens of all contexts laid out separately, number computed); equal if nothing is shared."""
    segments_rs = np.asarray(batch.segments)
    if batch.tree is None:
        return (tokens := int((segments_rs > 0).sum())), tokens
    ends_ru, predecessor_rs = np.asarray(batch.tree_ends), np.asarray(batch.predecessor)
    place_u = np.arange(ends_ru.shape[1])
    before_ru = np.pad(np.maximum.accumulate(ends_ru, axis=1), ((0, 0), (1, 0)))[:, :-1]
    root_ru = np.maximum.accumulate(np.where(place_u >= before_ru, place_u, 0), axis=1)
    positions_ru = np.asarray(batch.tree_positions)
    depth_ru = positions_ru - np.take_along_axis(positions_ru, root_ru, axis=1) + 1
    depth_rs = np.take_along_axis(depth_ru, np.maximum(predecessor_rs, 0), axis=1)
    longest = np.zeros((len(segments_rs), segments_rs.max(initial=0) + 1), np.int64)
    row_rs = np.broadcast_to(np.arange(len(segments_rs))[:, None], segments_rs.shape)
    np.maximum.at(longest, (row_rs, segments_rs), np.where(predecessor_rs < 0, 0, depth_rs))
    return int(longest[:, 1:].sum()), int((ends_ru > 0).sum())


# Contexts -----------------------------------------------------------------------------------------------


def _ranks(group_n: np.ndarray, taken_n: np.ndarray, ranks: int, rows: int | None) -> np.ndarray:
    """The rank of each trajectory that takes part: equal numbers, in the order of their groups."""
    if ranks < 1 or (rows is not None and (rows < 1 or rows % ranks)):
        raise BadInput(f"rows={rows} can't be shared equally by ranks={ranks}: use a positive multiple")
    taken = np.flatnonzero(taken_n)
    order = taken[np.argsort(group_n[taken], kind="stable")]
    rank_n = np.zeros(len(group_n), np.int64)
    rank_n[order] = np.arange(len(order)) * ranks // max(len(order), 1)
    return rank_n


def _sort_contexts(segments: Segments, rank_k: np.ndarray, tokens_q: np.ndarray, chosen_q: np.ndarray) -> Contexts:
    """Contexts with a chosen token, cut before the last one and sorted; contexts of different ranks share nothing."""
    chosen = np.flatnonzero(chosen_q)
    first_k = np.searchsorted(chosen, segments.start)
    count_k = np.searchsorted(chosen, segments.start + segments.length) - first_k
    size_k = np.where(count_k > 0, chosen[np.minimum(first_k + count_k, len(chosen)) - 1] - segments.start, 0)
    words = tokens_q.astype(">i4").tobytes()  # big-endian, so that bytes have the order of the numbers
    keys = [
        (rank, origin, words[4 * start : 4 * (start + size)])
        for rank, origin, start, size in _zip_columns(rank_k, segments.origin, segments.start, size_k)
    ]
    order_k = np.array(sorted(np.flatnonzero(count_k), key=keys.__getitem__), np.int64)
    start_k, size_k, origin_k, rank_k = (x[order_k] for x in (segments.start, size_k, segments.origin, rank_k))
    count_k, first_k = count_k[order_k], first_k[order_k]
    alike_k = np.zeros(len(order_k), bool)
    alike_k[1:] = (origin_k[1:] == origin_k[:-1]) & (rank_k[1:] == rank_k[:-1])
    common_k = np.where(alike_k, np.minimum(size_k, np.roll(size_k, 1)), 0)
    index, previous = (np.repeat(x, common_k) + _index_in_runs(common_k) for x in (start_k, np.roll(start_k, 1)))
    differing = np.append(np.flatnonzero(tokens_q[index] != tokens_q[previous]), len(index))
    begin_k = np.cumsum(common_k) - common_k
    shared_k = np.minimum(differing[np.searchsorted(differing, begin_k)] - begin_k, common_k)
    chosen_c = chosen[np.repeat(first_k, count_k) + _index_in_runs(count_k)] - np.repeat(start_k, count_k)
    return Contexts(start_k, size_k, origin_k, shared_k, rank_k, count_k, chosen_c)


def _zip_columns(*columns: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Rows of several columns, as Python integers."""
    return zip(*(column.tolist() for column in columns), strict=True)


def _index_in_runs(count_k: np.ndarray) -> np.ndarray:
    """0 1 2 0 1 ...: the index within runs of these lengths."""
    return np.arange(count_k.sum()) - np.repeat(np.cumsum(count_k) - count_k, count_k)


# Rows ---------------------------------------------------------------------------------------------------


def _fill_rows(contexts: Contexts, row_length: int, entries: int) -> Places:
    """Each context goes into the row of the previous one while tree and entries have room."""
    places, row, number, tokens, scored, last = [], -1, 0, 0, 0, None
    columns = (contexts.rank, contexts.size, contexts.shared, contexts.count)
    for rank, size, shared, count in _zip_columns(*columns):
        full = tokens + size - shared > row_length or scored + count > entries
        if rank != last or full:
            row, number, tokens, scored, shared = 0 if rank != last else row + 1, 0, 0, 0, 0
        number, last = number + 1, rank
        places.append((row, number, shared, tokens, scored))
        tokens, scored = tokens + size - shared, scored + count
    return Places(*np.array(places, np.int64).reshape(-1, 5).T)


def _lay_trees(contexts: Contexts, places: Places, tokens_q: np.ndarray, shape: tuple[int, int]) -> tuple:
    """(tokens_ru, positions_ru, ends_ru, parent_c): the trees, and the flat slot of each chosen token's predecessor.

    The path of a context is the shared part of the previous path, then its own tokens. A token's subtree ends when the
    path leaves it.
    """
    own_k = contexts.size - places.shared
    begin_k = places.row * shape[1] + places.tree
    depth = np.repeat(places.shared, own_k) + _index_in_runs(own_k)
    place = np.repeat(begin_k, own_k) + _index_in_runs(own_k)
    tokens, positions, ends = (np.zeros(shape[0] * shape[1], np.int32) for _ in range(3))
    tokens[place] = tokens_q[np.repeat(contexts.start, own_k) + depth]
    positions[place] = np.repeat(contexts.origin, own_k) + depth
    used_r = np.zeros(shape[0], np.int64)
    np.maximum.at(used_r, places.row, places.tree + own_k)
    ends[place] = used_r[np.repeat(places.row, own_k)]
    path, before = np.zeros(shape[1], np.int64), 0
    parent_c, chosen = np.full(len(contexts.chosen), -1, np.int64), 0
    columns = (begin_k, places.tree, places.number, places.shared, contexts.size, contexts.count)
    for begin, tree, number, shared, size, count in _zip_columns(*columns):
        if number > 1:
            ends[path[shared:before]] = tree
        path[shared:size] = np.arange(begin, begin + size - shared)
        depth_c = contexts.chosen[chosen : chosen + count]
        parent_c[chosen : chosen + count] = np.where(depth_c > 0, path[np.maximum(depth_c, 1) - 1], -1)
        before, chosen = size, chosen + count
    return *(x.reshape(shape) for x in (tokens, positions, ends)), parent_c


def _lay_entries(
    contexts: Contexts, places: Places, source_q: np.ndarray, tree: tuple, shape: tuple[int, int], axes: tuple
) -> tuple[Index, np.ndarray]:
    """The layout of the entries, and the tree node before each (-1: none) -> predecessor_rs."""
    count_k = contexts.count
    place = np.repeat(places.row * shape[1] + places.entry, count_k) + _index_in_runs(count_k)
    size = shape[0] * shape[1]
    source, number, position = np.zeros(size, np.int64), np.zeros(size, np.int32), np.zeros(size, np.int32)
    source[place] = source_q[np.repeat(contexts.start, count_k) + contexts.chosen]
    number[place] = np.repeat(places.number, count_k)
    position[place] = np.repeat(contexts.origin, count_k) + contexts.chosen
    predecessor = np.full(size, -1, np.int32)
    parent_c, row_length = tree[3], tree[0].shape[1]
    predecessor[place] = np.where(parent_c < 0, -1, parent_c % row_length)
    padding = np.flatnonzero(number == 0)
    return Index(source, padding, number.reshape(shape), position.reshape(shape), axes), predecessor.reshape(shape)
