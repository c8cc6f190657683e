"""Pack ragged or dense trajectories into fixed rows of tokens: `pack` makes a `Batch`, `account` its ledger.

    sort by length -> assign to ranks -> best fit into rows -> an equal number of rows for every rank

A context is one segment: a whole trajectory if its turns extend one context, a turn if each is rendered afresh.
Segments do not attend to each other; `prefix_tree` packs shared prefixes once. All of it is NumPy on the host;
`layouts` has plain layouts that compile. The loss is the same in all of them (F3).
"""

import bisect
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from flowgrpo.batching.collate import collate
from flowgrpo.batching.layouts import resolve_lengths, token_fields
from flowgrpo.types import BadInput, Batch, Fate, Ledger, Trajectories, Trajectory, check_axes

TooLong = Literal["error", "split", "drop"]


class Segments(NamedTuple):
    """k runs of the flat token order, each contiguous in one row."""

    start: np.ndarray  # first token, as an index into the flat order
    length: np.ndarray
    origin: np.ndarray  # position of its first token: not 0 if a trajectory was split at a turn


def pack(
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
) -> Batch:
    """Pack trajectories into rows of `row_length` tokens, best fit, an equal number of adjacent rows for each rank.

    Args:
        trajectories: dense, or ragged records. `logp_old` is theirs if it was scored, else `logp_sampled`.
        adv: advantages [n, t] (for all chosen tokens of a turn) or [n, t, l].
        weights: weights of the tokens in the loss, of the same shape; trajectories of weight 0 are left out.
        row_length: tokens of a row.
        rows: number of rows over all ranks; by default as many as needed.
        ranks: processes, or mini-batches, among which trajectories are distributed.
        too_long: what to do with a context longer than a row: "error"; "split" at turns (later parts keep their
            positions but no longer see the earlier ones, so score `logp_old` afterwards); or "drop" the trajectory.
        skip_no_signal: also leave out trajectories without an advantage, which is exact for algorithms with
            `skips_zero_advantage` (F8).
        target: the critic's targets, shaped like `adv`.
    """
    trajectories, length_nt, begins_nt, actions_ntl = read_trajectories(trajectories)
    adv_ntl, weight_ntl = per_token("adv", adv, actions_ntl), per_token("weights", weights, actions_ntl)
    segments = cut_segments(
        length_nt, begins_nt, takes_part(weight_ntl, adv_ntl if skip_no_signal else None), row_length, too_long
    )
    row_k, offset_k, num_rows = _assign(segments.length, row_length, ranks, rows)
    exists_ntl = filled_slots(length_nt, actions_ntl.shape[2])
    index = _index(segments, row_k, offset_k, (num_rows, row_length), exists_ntl)
    return lay_out(index, trajectories, actions_ntl, adv_ntl, weight_ntl, target)


def lay_out(index: "Index", trajectories: Trajectories, actions_ntl, adv_ntl, weight_ntl, target) -> Batch:
    """The batch laid out by `index`."""
    fields = token_fields(trajectories, lambda x_ntl: index.gather(np.asarray(x_ntl, np.float32)))
    if target is not None:
        fields["target"] = index.gather(per_token("target", target, actions_ntl))
    trajectory_rs, turn_rs, slot_rs = index.unravel()
    return Batch(
        tokens=index.gather(np.asarray(trajectories.tokens, np.int32)),
        positions=index.positions,
        segments=index.segments,
        trajectory=trajectory_rs,
        turn=turn_rs,
        slot=slot_rs,
        group=np.where(index.segments > 0, np.asarray(trajectories.group)[trajectory_rs], -1),
        chosen=index.gather(actions_ntl),
        advantage=index.gather(adv_ntl),
        weight=index.gather(weight_ntl),
        version=index.gather(np.asarray(trajectories.version, np.int32)),
        **fields,
    )


def fill_rate(batch: Batch) -> float:
    """Fraction of slots that contain a token; of the tree's slots, if rows are trees."""
    return float((np.asarray(batch.segments if batch.tree is None else batch.tree.ends) > 0).mean())


def account(trajectories: Trajectories | Sequence[Trajectory], weights, batch: Batch, *, adv=None) -> Ledger:
    """Count every generated token by its fate between trajectories and batch (A6).

    Pass `adv` if the batch was packed with `skip_no_signal`. Raises if tokens of non-zero weight are missing for no
    known reason.
    """
    trajectories, length_nt, begins_nt, actions_ntl = read_trajectories(trajectories)
    weight_ntl, count = per_token("weights", weights, actions_ntl), len(length_nt)
    valid_n = np.asarray(trajectories.valid)
    trained_n = np.bincount(np.asarray(batch.trajectory)[np.asarray(batch.loss_mask)], minlength=count)
    weighted_n = (actions_ntl & (weight_ntl != 0)).sum(axis=(1, 2))
    weightless_n = actions_ntl.sum(axis=(1, 2)) - weighted_n
    skipped_n = np.zeros(count, bool) if adv is None else ~takes_part(weight_ntl, per_token("adv", adv, actions_ntl))
    absent_n = trained_n == 0
    row_length = (batch.tokens if batch.tree is None else batch.tree.tokens).shape[1]
    too_long_n = absent_n & ~skipped_n & (_longest(length_nt, begins_nt) > row_length)
    fates = {
        Fate.TRAINED: trained_n.sum(),
        Fate.MASKED_INVALID: weightless_n[~valid_n].sum(),
        Fate.MASKED_WEIGHTLESS: weightless_n[valid_n].sum(),
        Fate.DROPPED_TOO_LONG: weighted_n[too_long_n].sum(),
        Fate.DROPPED_NO_SIGNAL: weighted_n[absent_n & skipped_n].sum(),
    }
    return Ledger(int(actions_ntl.sum()), {fate: int(tokens) for fate, tokens in fates.items()}).check()


# Reading ----------------------------------------------------------------------------------------------


def read_trajectories(
    trajectories: Trajectories | Sequence[Trajectory],
) -> tuple[Trajectories, np.ndarray, np.ndarray, np.ndarray]:
    """(dense trajectories, length_nt, begins_nt, actions_ntl), the last cut to the longest turn's slots."""
    if not isinstance(trajectories, Trajectories):
        trajectories = collate(trajectories)
    check_axes(trajectories)
    length_nt, begins_nt = (np.asarray(x) for x in resolve_lengths(trajectories))
    slots = np.shape(trajectories.tokens)[2]
    if length_nt.max() > slots:
        raise BadInput(f"Trajectories.length says {length_nt.max()}, but a turn has {slots} slots")
    longest = max(int(length_nt.max()), 1)
    return (
        trajectories,
        length_nt,
        begins_nt,
        np.asarray(trajectories.chosen)[:, :, :longest] & filled_slots(length_nt, longest),
    )


def filled_slots(length_nt: np.ndarray, slots: int) -> np.ndarray:
    """Whether a slot contains a token -> bool_ntl."""
    return np.arange(slots) < length_nt[:, :, None]


def per_token(name: str, x, actions_ntl: np.ndarray) -> np.ndarray:
    """An [n, t] or [n, t, l] array at the chosen tokens, 0 elsewhere -> x_ntl."""
    x, (num_trajectories, num_turns, slots) = np.asarray(x), actions_ntl.shape
    if x.ndim not in (2, 3) or x.shape[0] != num_trajectories or x.shape[1] < num_turns:
        raise BadInput(
            f"{name} has shape {x.shape}, but there are {num_trajectories} trajectories of up to {num_turns} turns"
        )
    if x.ndim == 3 and x.shape[2] < slots:
        raise BadInput(f"{name} has {x.shape[2]} slots a turn, but a turn has {slots} tokens")
    x_ntl = x[:, :num_turns, None] if x.ndim == 2 else x[:, :num_turns, :slots]
    return np.where(actions_ntl, x_ntl, 0).astype(np.float32)


# From trajectories to segments ------------------------------------------------------------------------


def takes_part(weight_ntl: np.ndarray, adv_ntl: np.ndarray | None) -> np.ndarray:
    """Whether a trajectory has a token of non-zero weight (and of non-zero advantage, if `adv_ntl` is given)."""
    counts_ntl = weight_ntl != 0 if adv_ntl is None else (weight_ntl != 0) & (adv_ntl != 0)
    return counts_ntl.any(axis=(1, 2))


def cut_segments(
    full_length_nt: np.ndarray, begins_nt: np.ndarray, taken_n: np.ndarray, row_length: int, too_long: TooLong
) -> Segments:
    """One segment for each context; longer ones than a row are handled as `too_long` says."""
    if too_long not in ("error", "split", "drop"):
        raise BadInput(f"too_long is {too_long!r}, but must be error, split or drop")
    length_nt = full_length_nt * taken_n[:, None]
    longest_n = _longest(length_nt, begins_nt)
    over_n = longest_n > row_length
    if over_n.any() and too_long == "error":
        i = int(over_n.argmax())
        raise BadInput(
            f"trajectory {i} has {longest_n[i]} tokens in one context, "
            f"but a row holds {row_length}: raise row_length, or pass too_long='split' or 'drop'"
        )
    if over_n.any() and too_long == "drop":
        length_nt = length_nt * ~over_n[:, None]
    cut_nt = _cuts(length_nt, begins_nt, over_n & (too_long == "split"), row_length)
    return _between_cuts(full_length_nt, length_nt, begins_nt, cut_nt)


def _longest(length_nt: np.ndarray, begins_nt: np.ndarray) -> np.ndarray:
    """Number of tokens of a trajectory's longest context, before any split."""
    return (length_nt + _before_in_context(length_nt, begins_nt)).max(axis=1)


def _before_in_context(length_nt: np.ndarray, begins_nt: np.ndarray) -> np.ndarray:
    """Number of tokens of a turn's context before the turn."""
    before_nt = np.cumsum(length_nt, axis=1) - length_nt
    return before_nt - np.maximum.accumulate(np.where(begins_nt, before_nt, 0), axis=1)


def _cuts(length_nt: np.ndarray, begins_nt: np.ndarray, split_n: np.ndarray, row_length: int) -> np.ndarray:
    """Whether a segment starts at a turn -> bool_nt."""
    cut_nt = begins_nt.copy()
    for i in np.flatnonzero(split_n):
        used = 0
        for t in np.flatnonzero(length_nt[i]):
            if length_nt[i, t] > row_length:
                raise BadInput(
                    f"trajectory {i}, turn {t} has {length_nt[i, t]} tokens, but a row holds {row_length}, "
                    "and a turn is never split: raise row_length, or pass too_long='drop'"
                )
            if begins_nt[i, t] or used + length_nt[i, t] > row_length:
                cut_nt[i, t], used = True, 0
            used += length_nt[i, t]
    return cut_nt


def _between_cuts(
    full_length_nt: np.ndarray, length_nt: np.ndarray, begins_nt: np.ndarray, cut_nt: np.ndarray
) -> Segments:
    """The segments that start at the cuts; `full_length_nt` counts all tokens, `length_nt` those that take part."""
    start_nt = (np.cumsum(full_length_nt) - full_length_nt.ravel()).reshape(full_length_nt.shape)
    number_nt = np.cumsum(cut_nt).reshape(cut_nt.shape) - 1
    length_k = np.bincount(number_nt.ravel(), weights=length_nt.ravel()).astype(np.int64)
    origin_k = _before_in_context(length_nt, begins_nt)[cut_nt]
    exists_k = length_k > 0
    return Segments(start_nt[cut_nt][exists_k], length_k[exists_k], origin_k[exists_k])


# From segments to rows --------------------------------------------------------------------------------


def _assign(length_k: np.ndarray, row_length: int, ranks: int, rows: int | None) -> tuple[np.ndarray, np.ndarray, int]:
    """(row, offset) of each segment, and the number of rows, a multiple of `ranks`."""
    if ranks < 1 or (rows is not None and (rows < 1 or rows % ranks)):
        raise BadInput(f"rows={rows} can't be shared equally by ranks={ranks}: use a positive multiple")
    order_k = np.argsort(-length_k, kind="stable")
    turn_k = np.arange(len(length_k)) % (2 * ranks)
    rank_k = np.empty(len(length_k), np.int64)
    rank_k[order_k] = np.minimum(turn_k, 2 * ranks - 1 - turn_k)  # back and forth, so that ranks even out
    row_k, offset_k = np.zeros(len(length_k), np.int64), np.zeros(len(length_k), np.int64)
    needed = 1
    for rank in range(ranks):
        segment = np.flatnonzero(rank_k == rank)
        row_k[segment], offset_k[segment], used = best_fit(length_k[segment], row_length)
        needed = max(needed, used)
    if rows is not None and needed * ranks > rows:
        raise BadInput(
            f"the batch needs {needed * ranks} rows of {row_length} tokens, but rows={rows}: raise rows or row_length"
        )
    per_rank = needed if rows is None else rows // ranks
    return row_k + rank_k * per_rank, offset_k, per_rank * ranks


def best_fit(length_k: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Best-fit decreasing: each segment, longest first, goes into the fullest row that takes it.

    Returns (row, offset) of each, and the number of rows. Segments of one length are placed together: a
    row that takes one becomes the fullest that takes the next, so it takes as many as fit.
    """
    row_k, offset_k = np.zeros(len(length_k), np.int64), np.zeros(len(length_k), np.int64)
    order_k = np.argsort(-length_k, kind="stable")
    sizes, counts = np.unique(-length_k, return_counts=True)
    rows, num_rows = OpenRows(), 0
    for size, end, count in zip((-sizes).tolist(), np.cumsum(counts).tolist(), counts.tolist(), strict=True):
        waiting = order_k[end - count : end]
        while len(waiting):
            room, candidates = rows.take(size)
            if not candidates:
                room, fresh = row_length, math.ceil(len(waiting) / (row_length // size))
                candidates, num_rows = list(range(num_rows, num_rows + fresh)), num_rows + fresh
            per_row = room // size
            used = min(math.ceil(len(waiting) / per_row), len(candidates))
            placed, waiting = waiting[: used * per_row], waiting[used * per_row :]
            row_k[placed] = np.repeat(candidates[:used], per_row)[: len(placed)]
            offset_k[placed] = row_length - room + size * (np.arange(len(placed)) % per_row)
            full, remainder = divmod(len(placed), per_row)
            rows.put(room - per_row * size, candidates[:full])
            rows.put(room - remainder * size, candidates[full:used])
            rows.put(room, candidates[used:])
    return row_k, offset_k, num_rows


class OpenRows:
    """Rows by their free room."""

    def __init__(self):
        self._rows: dict[int, list[int]] = {}
        self._rooms: list[int] = []  # the keys of `_rows`, sorted

    def take(self, size: int) -> tuple[int, list[int]]:
        """The smallest room of at least `size`, and all rows that have it; none if there are none."""
        index = bisect.bisect_left(self._rooms, size)
        if index == len(self._rooms):
            return 0, []
        room = self._rooms.pop(index)
        return room, self._rows.pop(room)

    def put(self, room: int, rows: list[int]) -> None:
        """Return rows with the room that they have now."""
        if room == 0 or not rows:
            return
        if room not in self._rows:
            bisect.insort(self._rooms, room)
        self._rows.setdefault(room, []).extend(rows)


class Index(NamedTuple):
    """Layout of a batch: the source of each of its tokens, and the fields that depend on the layout only."""

    source: np.ndarray  # r * s: index into the trajectories' [n, t, l], 0 on padding
    padding: np.ndarray  # slots without a token
    segments: np.ndarray  # r s
    positions: np.ndarray  # r s
    shape: tuple[int, int, int]  # n, t and l up to the longest turn

    def gather(self, x_ntl: np.ndarray) -> np.ndarray:
        """Values of the trajectories at each token of the batch; 0 on padding -> x_rs."""
        out = x_ntl[:, :, : self.shape[2]].reshape(-1).take(self.source)
        out[self.padding] = 0
        return out.reshape(self.segments.shape)

    def unravel(self) -> list[np.ndarray]:
        """Index of each token in the trajectories, -1 on padding -> [trajectory_rs, turn_rs, slot_rs]."""
        places = np.stack(np.unravel_index(self.source, self.shape)).astype(np.int32)
        places[:, self.padding] = -1
        return list(places.reshape(3, *self.segments.shape))


def _index(
    segments: Segments, row_k: np.ndarray, offset_k: np.ndarray, shape: tuple[int, int], exists_ntl: np.ndarray
) -> Index:
    """The layout of segments at their rows and offsets; segments are numbered from 1 in each row."""
    length_k = segments.length
    order_k = np.lexsort((offset_k, row_k))
    sorted_k = row_k[order_k]
    number_k = np.empty(len(length_k), np.int32)
    number_k[order_k] = np.arange(len(length_k)) - np.searchsorted(sorted_k, sorted_k, side="left") + 1
    within_q = np.arange(length_k.sum(), dtype=np.int32)
    within_q -= np.repeat((np.cumsum(length_k) - length_k).astype(np.int32), length_k)
    place_q = np.repeat(row_k * shape[1] + offset_k, length_k) + within_q
    size = math.prod(shape)
    source, number, position = np.zeros(size, np.int64), np.zeros(size, np.int32), np.zeros(size, np.int32)
    source[place_q] = np.flatnonzero(exists_ntl)[np.repeat(segments.start, length_k) + within_q]
    number[place_q] = np.repeat(number_k, length_k)
    position[place_q] = np.repeat(segments.origin.astype(np.int32), length_k) + within_q
    padding = np.flatnonzero(number == 0)
    return Index(source, padding, number.reshape(shape), position.reshape(shape), exists_ntl.shape)
