"""Prefill of requests that enter together: a trie over slots, each piece of which is computed once.

The first request with some prefix computes it in its own slot; a request that shares it starts with a copy and computes
the rest. A `SlotFill` says what a slot starts from and which spans it still lacks, `FillPlan.waves` in which order that
can be done, and `make_batches` which spans are computed in one call, of one of a few shapes. Spans of one slot may be
in one call: a later one attends to what an earlier one has just written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flowgrpo.generate.kv_slots import TokenSpan, padded_widths, remaining_spans
from flowgrpo.generate.requests import Job

ROWS = (1, 4)  # spans of a call: one alone, or as many as bring products near the machine's rate


class PrefillStats(NamedTuple):
    """Tokens of contexts, without the last of each, which a decode step feeds."""

    prompt_tokens: int = 0  # that requests came with
    computed: int = 0  # of these, and again after new weights or a release; the others were in a slot


@dataclass(eq=False)
class SlotFill:
    """A slot that is being filled: it starts with `copied` tokens of slot `source`, and computes the rest."""

    slot: int
    job: Job
    source: int
    copied: int
    after: "SlotFill | None"  # computes what this one starts with; None if the source has it already
    spans: list[TokenSpan]  # still to be computed, in their order
    length: int = 0  # tokens of this job that the slot has
    started: bool = False

    def start(self) -> bool:
        """Whether the copy can be made now; from then on it counts as made."""
        if self.started or (self.after is not None and self.after.length < self.copied):
            return False
        self.started, self.length = True, self.copied
        return True


@dataclass
class FillPlan:
    """The fills of one round of admission, in the order in which their requests entered; at most one a slot."""

    fills: dict[int, SlotFill] = field(default_factory=dict)

    def add(self, slot: int, job: Job, cached_r: Sequence[int], chunk: int) -> SlotFill:
        """Plan to fill a slot; `cached_r` are the tokens of the job that each slot has, after the fills before it.

        What an earlier fill copies from a slot is still there then: copies are made in order, before anything is
        computed, unless they wait for what is computed in this round, which nothing overwrites.
        """
        source = max(range(len(cached_r)), key=lambda i: (cached_r[i], i == slot))
        copied = cached_r[source]
        spans = remaining_spans(job.spans, copied, chunk=chunk)
        fill = SlotFill(slot, job, source, copied, self.fills.get(source), spans)
        self.fills[slot] = fill
        return fill

    def waves(self) -> Iterator[tuple[list[SlotFill], list[tuple[SlotFill, TokenSpan]]]]:
        """(copies, spans) until all slots are filled: copies in order, then the spans that can be computed after them.

        A wave has a slot's prefills up to the next token that was sampled, or one span of such tokens alone.
        """
        fills = list(self.fills.values())
        while True:
            copies = [fill for fill in fills if fill.start()]
            spans: list[tuple[SlotFill, TokenSpan]] = []
            for fill in fills:
                count = next((n for n, span in enumerate(fill.spans) if span.stepwise), len(fill.spans))
                size = max(count, 1) if fill.started else 0
                spans += [(fill, span) for span in fill.spans[:size]]
                del fill.spans[:size]
            if not (copies or spans):
                return
            yield copies, spans
            for fill, span in spans:
                fill.length = span.end


class PrefillBatch(NamedTuple):
    """Spans of one width, computed in one call; an unused row has the index of a slot that doesn't exist."""

    slot_p: np.ndarray
    start_p: np.ndarray
    tokens_pc: np.ndarray
    size_p: np.ndarray


def make_batches(spans: Sequence[tuple[SlotFill, TokenSpan]], *, chunk: int, slots: int) -> list[PrefillBatch]:
    """Batch these prefills, each padded to the first of `padded_widths` that fits it, which its length alone decides.

    Those of one slot come in their order, and stay in it: a call is never before one that it attends to.
    """
    by_width: dict[int, list[tuple[SlotFill, TokenSpan]]] = {}
    for fill, span in spans:
        width = next(width for width in padded_widths(chunk) if width >= span.end - span.start)
        by_width.setdefault(width, []).append((fill, span))
    batches = []
    # Only the last span of a slot is not whole, so wide calls first keep the order of each slot.
    for width in sorted(by_width, reverse=True):
        left = sorted(by_width[width], key=lambda pair: pair[1].start)
        while left:
            rows = next((rows for rows in reversed(ROWS) if 2 * len(left) > rows), ROWS[0])
            batch = empty_batch(rows, width, slots)
            for row, (fill, (start, end, _)) in enumerate(left[:rows]):
                batch.slot_p[row], batch.start_p[row], batch.size_p[row] = fill.slot, start, end - start
                batch.tokens_pc[row, : end - start] = fill.job.tokens[start:end]
            batches.append(batch)
            left = left[rows:]
    return batches


def empty_batch(rows: int, width: int, slots: int) -> PrefillBatch:
    """A batch without a span."""
    zeros_p = np.zeros(rows, np.int32)
    return PrefillBatch(np.full(rows, slots, np.int32), zeros_p, np.zeros((rows, width), np.int32), zeros_p.copy())
