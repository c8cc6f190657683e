"""Slots filled for requests that enter together: a trie over slots, whose every piece is computed once.

The first request with some beginning computes it in its own slot; one that goes on from it begins with a copy and
computes what is its own. `Fill` says what a slot begins with and what it still lacks, `waves` in which order that can
be done, and `batches` which pieces are computed in one call, of one of a few shapes. Pieces of one slot may be
in one call: a later one attends to what an earlier one has just written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flowgrpo.generate.kv_slots import TokenSpan, rest, widths
from flowgrpo.generate.requests import Job

ROWS = (1, 4)  # pieces of a call: one alone, and as many as bring products near the machine's rate


class Prefilled(NamedTuple):
    """Tokens of contexts, without the last of each, which a decode step feeds."""

    prompt_tokens: int = 0  # that requests came with
    computed: int = 0  # of these, and again after new weights or a release; the others were in a slot


@dataclass(eq=False)
class Fill:
    """A slot that is being filled: it begins with `held` tokens of slot `source`, and computes its own after them."""

    slot: int
    job: Job
    source: int
    held: int
    after: "Fill | None"  # that computes what this one begins with; None where the source has it already
    pieces: list[TokenSpan]  # still to be computed, in their order
    done: int = 0  # tokens that the slot holds of this job
    begun: bool = False

    def begin(self) -> bool:
        """Whether the copy can be made now; from then on it counts as made."""
        if self.begun or (self.after is not None and self.after.done < self.held):
            return False
        self.begun, self.done = True, self.held
        return True


@dataclass
class Round:
    """The fills of a round, in the order in which their requests entered; each slot has one at most."""

    fills: dict[int, Fill] = field(default_factory=dict)

    def add(self, slot: int, job: Job, held_r: Sequence[int], chunk: int) -> Fill:
        """Plan to fill a slot, where slots hold so many tokens of the job, or will when those before it are filled.

        What an earlier fill copies from a slot is still there then: copies are made in order, before anything is
        computed, unless they wait for what is computed in this round, which nothing overwrites.
        """
        source = max(range(len(held_r)), key=lambda i: (held_r[i], i == slot))
        held = held_r[source]
        fill = Fill(slot, job, source, held, self.fills.get(source), rest(job.pieces, held, chunk=chunk))
        self.fills[slot] = fill
        return fill

    def waves(self) -> Iterator[tuple[list[Fill], list[tuple[Fill, TokenSpan]]]]:
        """(copies, pieces) until all is filled: a copy in its order, then the pieces that can be computed after it.

        Prefills of a slot up to the next token that was sampled come together, or one stretch of such tokens alone.
        """
        fills = list(self.fills.values())
        while True:
            copies = [fill for fill in fills if fill.begin()]
            pieces: list[tuple[Fill, TokenSpan]] = []
            for fill in fills:
                count = next((n for n, piece in enumerate(fill.pieces) if piece.stepwise), len(fill.pieces))
                size = max(count, 1) if fill.begun else 0
                pieces += [(fill, piece) for piece in fill.pieces[:size]]
                del fill.pieces[:size]
            if not (copies or pieces):
                return
            yield copies, pieces
            for fill, piece in pieces:
                fill.done = piece.end


class Batch(NamedTuple):
    """Pieces of one width, computed in one call; a row that none is for is that of a slot that isn't there."""

    slot_p: np.ndarray
    start_p: np.ndarray
    tokens_pc: np.ndarray
    size_p: np.ndarray


def batches(pieces: Sequence[tuple[Fill, TokenSpan]], *, chunk: int, slots: int) -> list[Batch]:
    """The calls for these prefills, each padded to the first of `widths` that holds it, as its length alone has it.

    Those of one slot come in their order, and stay in it: a call is never before one that it attends to.
    """
    by_width: dict[int, list[tuple[Fill, TokenSpan]]] = {}
    for fill, piece in pieces:
        width = next(width for width in widths(chunk) if width >= piece.end - piece.start)
        by_width.setdefault(width, []).append((fill, piece))
    calls = []
    # Only the last piece of a slot is not whole, so that wide calls first keep the order of each slot.
    for width in sorted(by_width, reverse=True):
        left = sorted(by_width[width], key=lambda pair: pair[1].start)
        while left:
            rows = next((rows for rows in reversed(ROWS) if 2 * len(left) > rows), ROWS[0])
            calls.append(_batch(left[:rows], rows, width, slots))
            left = left[rows:]
    return calls


def _batch(pieces: Sequence[tuple[Fill, TokenSpan]], rows: int, width: int, slots: int) -> Batch:
    batch = empty_batch(rows, width, slots)
    for row, (fill, (start, end, _)) in enumerate(pieces):
        batch.slot_p[row], batch.start_p[row], batch.size_p[row] = fill.slot, start, end - start
        batch.tokens_pc[row, : end - start] = fill.job.tokens[start:end]
    return batch


def empty_batch(rows: int, width: int, slots: int) -> Batch:
    """A batch without a piece."""
    zeros_p = np.zeros(rows, np.int32)
    return Batch(np.full(rows, slots, np.int32), zeros_p, np.zeros((rows, width), np.int32), zeros_p.copy())
