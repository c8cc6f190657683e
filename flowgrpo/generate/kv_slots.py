"""Slots of a KV cache: the content of each, and how a conversation is split into spans of fixed shape.

Equal bits need equal shapes (E3). A token that was given is computed in a prefill of at most `chunk` tokens, padded to
one of a few widths; one that was sampled, and the given one before the first of them, in a decode step. So the bounds
of a conversation's spans (`split_spans`) and their widths follow from its tokens alone, and a cache that was evicted is
computed again just as it was. `cached_lengths` gives how much of a conversation each slot has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flowgrpo.contracts import Conversation
from flowgrpo.generate.requests import MAX_STOPS, Job
from flowgrpo.generate.sampler import MAX_TOP_K, Sampling


class TokenSpan(NamedTuple):
    """Tokens [start, end) of a conversation, computed together or one by one."""

    start: int
    end: int
    stepwise: bool  # in decode steps, one token each


def split_spans(chosen: Sequence[bool], *, chunk: int) -> list[TokenSpan]:
    """The spans of all tokens but the last, which the next decode step feeds."""
    spans: list[TokenSpan] = []
    last = len(chosen) - 1
    start = 0
    while start < last:
        # A token is fed in a decode step if the token after it was sampled.
        stepwise = bool(chosen[start + 1])
        end = start + 1
        while end < last and bool(chosen[end + 1]) == stepwise and (stepwise or end - start < chunk):
            end += 1
        spans.append(TokenSpan(start, end, stepwise))
        start = end
    return spans


def reusable_length(spans: list[TokenSpan], cached: list[TokenSpan], common: int) -> int:
    """Number of tokens of `spans` that a cache made of `cached` spans has, if the first `common` tokens agree."""
    length = 0
    for span, other in zip(spans, cached, strict=False):
        if span.start != other.start or span.stepwise != other.stepwise:
            break
        end = min(span.end, other.end, common)
        if span.stepwise or (span.end == other.end and end == span.end):
            length = end
        if end != span.end or span.end != other.end:
            break
    return length


def remaining_spans(spans: list[TokenSpan], length: int, *, chunk: int) -> list[TokenSpan]:
    """What is still to be computed after the first `length` tokens, in spans of at most `chunk` tokens."""
    return [
        TokenSpan(start, min(start + chunk, span.end), span.stepwise)
        for span in spans
        for start in range(max(span.start, length), span.end, chunk)
    ]


def padded_widths(chunk: int) -> list[int]:
    """The widths to which prefills are padded, each to the first that fits: a quarter, a half, the whole `chunk`."""
    return sorted({-(-chunk // 4), -(-chunk // 2), chunk})


@dataclass(eq=False)
class Slot:
    """Content of a slot's cache, and the job that decodes in it."""

    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    spans: list[TokenSpan] = field(default_factory=list)
    weights: int = -1  # number of the weights it was filled with; later decode steps may have used newer ones
    job: Job | None = None
    used_at: int = 0
    head: bytes = b""  # the first of these tokens, to compare without a loop
    conversation: Conversation | None = None  # whose next request it is reserved for
    held_until: float = 0.0  # by time.monotonic

    def record(self, job: Job, chunk: int) -> None:
        """Note that the cache has all of the job's tokens but the last."""
        self.tokens, self.spans = np.array(job.tokens[:-1], np.int32), split_spans(job.chosen, chunk=chunk)
        self.head = self.tokens[:chunk].tobytes()

    def clear(self) -> None:
        """Note that the cache is empty."""
        self.tokens, self.spans, self.weights, self.head = np.zeros(0, np.int32), [], -1, b""
        self.conversation = None


def cached_lengths(slots: Sequence[Slot], job: Job, weights: int, chunk: int) -> list[int]:
    """Number of the job's tokens that each slot's cache has, as these weights alone compute them.

    A cache that was filled with older weights has none, even if its job lived through the update and continued with it.
    There are no weights newer than the present ones, so a cache that was filled with those has nothing else.
    """
    tokens, spans = np.array(job.tokens[:-1], np.int32), split_spans(job.chosen, chunk=chunk)
    job.spans = spans
    # A prefilled span counts as a whole or not at all, and most slots differ in the first.
    first = tokens[: spans[0].end].tobytes() if spans and not spans[0].stepwise else b""
    return [
        reusable_length(spans, slot.spans, _common_prefix(tokens, slot.tokens))
        if slot.weights == weights and slot.head.startswith(first)
        else 0
        for slot in slots
    ]


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens in which both agree."""
    size = min(len(a), len(b))
    if size == 0 or a[0] != b[0]:
        return 0
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def decode_widths(slots: int, min_decode_batch: int | None) -> list[int]:
    """Row counts in which the engine decodes: all slots, a quarter, a quarter of that, down to `min_decode_batch`.

    >>> decode_widths(64, 4)
    [64, 16, 4]
    """
    sizes = [slots]
    while min_decode_batch is not None and sizes[-1] // 4 >= min_decode_batch:
        sizes.append(sizes[-1] // 4)
    return sizes


def slots_to_decode(slots: Sequence[Slot], sizes: Sequence[int]) -> list[int]:
    """Indices of the slots with a job, filled up with idle ones to the smallest of `sizes` that fits them."""
    busy_first = sorted(range(len(slots)), key=lambda index: slots[index].job is None)
    busy = sum(slot.job is not None for slot in slots)
    return sorted(busy_first[: min(size for size in sizes if size >= busy)])


def decode_inputs(slots: Sequence[Slot]) -> tuple[np.ndarray, Sampling, np.ndarray]:
    """(rows that have a job [r], sampling settings of each row, stop ids padded with -1 [r m])."""
    has_job_r = np.array([slot.job is not None for slot in slots])
    settings = Sampling(*(np.ones(len(slots), dtype) for dtype in (np.float32, np.int32, np.float32, np.float32)))
    settings.top_k[:] = MAX_TOP_K
    stop_rm = np.full((len(slots), MAX_STOPS), -1, np.int32)
    for index, slot in enumerate(slots):
        if slot.job is not None:
            request = slot.job.request
            for name in Sampling._fields:
                getattr(settings, name)[index] = getattr(request, name)
            stop_rm[index, : len(request.stop_ids)] = request.stop_ids
    return has_job_r, settings, stop_rm
