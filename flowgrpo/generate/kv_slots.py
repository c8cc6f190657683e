"""Slots of a cache: what each holds, and how a conversation enters one in pieces of fixed shape.

Equal bits need equal shapes (E3). A token that was given is computed in a prefill of at most `chunk` tokens, padded to
one of a few widths; one that was sampled, and the given one before the first of them, in a decode step. So where the
pieces of a conversation begin and end (`cut`), and their widths, follow from its tokens alone, and a cache that was
evicted is computed again just as it was. `held_by` says how much of a conversation each slot holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flowgrpo.contracts import Conversation
from flowgrpo.generate.requests import MAX_STOPS, Job
from flowgrpo.generate.sampler import MAX_KEPT, Sampling


class TokenSpan(NamedTuple):
    """Tokens [start, end) of a conversation, computed together or one by one."""

    start: int
    end: int
    stepwise: bool  # in decode steps, one token each


def cut(chosen: Sequence[bool], *, chunk: int) -> list[TokenSpan]:
    """The pieces of all tokens but the last, which the next decode step feeds."""
    pieces: list[TokenSpan] = []
    last = len(chosen) - 1
    start = 0
    while start < last:
        # A token is fed in a decode step where the token after it was sampled.
        stepwise = bool(chosen[start + 1])
        end = start + 1
        while end < last and bool(chosen[end + 1]) == stepwise and (stepwise or end - start < chunk):
            end += 1
        pieces.append(TokenSpan(start, end, stepwise))
        start = end
    return pieces


def shared(own: list[TokenSpan], other: list[TokenSpan], common: int) -> int:
    """Say how many tokens a cache made of `other` pieces holds for `own`, where the first `common` tokens agree."""
    held = 0
    for mine, theirs in zip(own, other, strict=False):
        if mine.start != theirs.start or mine.stepwise != theirs.stepwise:
            break
        end = min(mine.end, theirs.end, common)
        if mine.stepwise or (mine.end == theirs.end and end == mine.end):
            held = end
        if end != mine.end or mine.end != theirs.end:
            break
    return held


def rest(pieces: list[TokenSpan], held: int, *, chunk: int) -> list[TokenSpan]:
    """Split what is still to be computed after the first `held` tokens into pieces of at most `chunk` tokens."""
    left = []
    for piece in pieces:
        for start in range(max(piece.start, held), piece.end, chunk):
            left.append(TokenSpan(start, min(start + chunk, piece.end), piece.stepwise))
    return left


def widths(chunk: int) -> list[int]:
    """The sizes that pieces are padded to, each to the first that holds it: a quarter, a half, the whole."""
    return sorted({-(-chunk // 4), -(-chunk // 2), chunk})


@dataclass(eq=False)
class Slot:
    """Known content of a slot's cache, and the job that decodes in it."""

    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    pieces: list[TokenSpan] = field(default_factory=list)
    weights: int = -1  # which weights it was filled with: what was decoded since may come from later ones
    job: Job | None = None
    used_at: int = 0
    head: bytes = b""  # the first of these tokens, to compare without a loop
    conversation: Conversation | None = None  # whose next request it waits for
    held_until: float = 0.0

    def record(self, job: Job, chunk: int) -> None:
        """The cache holds all of the job's tokens but the last."""
        self.tokens, self.pieces = np.array(job.tokens[:-1], np.int32), cut(job.chosen, chunk=chunk)
        self.head = self.tokens[:chunk].tobytes()

    def forget(self) -> None:
        """The cache holds nothing."""
        self.tokens, self.pieces, self.weights, self.head = np.zeros(0, np.int32), [], -1, b""
        self.conversation = None


def held_by(slots: Sequence[Slot], job: Job, weights: int, chunk: int) -> list[int]:
    """Say how many tokens of the job each slot's cache holds, as these weights alone compute them.

    A cache that was filled with older weights holds none, even where the job that lived through the swap went on
    with it. There are no weights newer than the present ones, so what was filled with those holds nothing else.
    """
    tokens, pieces = np.array(job.tokens[:-1], np.int32), cut(job.chosen, chunk=chunk)
    job.pieces = pieces
    # Nothing of a prefilled piece is held where not all of it is, and most slots differ in the first.
    first = tokens[: pieces[0].end].tobytes() if pieces and not pieces[0].stepwise else b""
    return [
        shared(pieces, slot.pieces, _common(tokens, slot.tokens))
        if slot.weights == weights and slot.head.startswith(first)
        else 0
        for slot in slots
    ]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """The number of leading tokens in which both agree."""
    size = min(len(one), len(other))
    if size == 0 or one[0] != other[0]:
        return 0
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def narrower(slots: int, narrowest: int | None) -> list[int]:
    """Say in how many rows stretches are decoded: in all slots, a quarter, a quarter of that, down to `narrowest`.

    >>> narrower(64, 4)
    [64, 16, 4]
    """
    sizes = [slots]
    while narrowest is not None and sizes[-1] // 4 >= narrowest:
        sizes.append(sizes[-1] // 4)
    return sizes


def slots_to_decode(slots: Sequence[Slot], sizes: Sequence[int]) -> list[int]:
    """Choose the slots of a stretch: those with a job, and idle ones up to the smallest of `sizes` that holds them."""
    busy_first = sorted(range(len(slots)), key=lambda index: slots[index].job is None)
    busy = sum(slot.job is not None for slot in slots)
    return sorted(busy_first[: min(size for size in sizes if size >= busy)])


def decode_inputs(slots: Sequence[Slot]) -> tuple[np.ndarray, Sampling, np.ndarray]:
    """Collect the inputs of a stretch: rows that decode [r], how they draw, their stop ids padded with -1 [r m]."""
    going_r = np.array([slot.job is not None for slot in slots])
    drawn = Sampling(*(np.ones(len(slots), dtype) for dtype in (np.float32, np.int32, np.float32, np.float32)))
    drawn.top_k[:] = MAX_KEPT
    stop_rm = np.full((len(slots), MAX_STOPS), -1, np.int32)
    for index, slot in enumerate(slots):
        if slot.job is not None:
            request = slot.job.request
            for name in Sampling._fields:
                getattr(drawn, name)[index] = getattr(request, name)
            stop_rm[index, : len(request.stop_ids)] = request.stop_ids
    return going_r, drawn, stop_rm
