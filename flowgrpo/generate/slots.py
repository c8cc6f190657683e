"""Slots, as the host knows them: what each cache holds, who decodes there, where the beginning of a conversation is."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flowgrpo.generate.jobs import MAX_STOPS, Job
from flowgrpo.generate.pieces import Piece, cut, shared
from flowgrpo.generate.sampler import MAX_KEPT, Sampling


@dataclass(eq=False)
class Slot:
    """Known content of a slot's cache, and the job that decodes in it."""

    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    pieces: list[Piece] = field(default_factory=list)
    weights: int = -1  # which weights it was filled with: what was decoded since may come from later ones
    job: Job | None = None
    used_at: int = 0

    def record(self, job: Job, chunk: int) -> None:
        """The cache holds all of the job's tokens but the last."""
        self.tokens, self.pieces = np.array(job.tokens[:-1], np.int32), cut(job.chosen, chunk=chunk)

    def forget(self) -> None:
        """The cache holds nothing."""
        self.tokens, self.pieces, self.weights = np.zeros(0, np.int32), [], -1


def held_by(slots: Sequence[Slot], job: Job, weights: int, chunk: int) -> list[int]:
    """How many tokens of the job each slot's cache holds, as these weights alone compute them.

    A cache that was filled with older weights holds none, even where the job that lived through the swap went on
    with it. There are no weights newer than the present ones, so what was filled with those holds nothing else.
    """
    tokens, pieces = np.array(job.tokens[:-1], np.int32), cut(job.chosen, chunk=chunk)
    return [
        shared(pieces, slot.pieces, _common(tokens, slot.tokens)) if slot.weights == weights else 0 for slot in slots
    ]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """The number of leading tokens in which both agree."""
    size = min(len(one), len(other))
    if size == 0 or one[0] != other[0]:
        return 0
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def columns(slots: Sequence[Slot]) -> tuple[np.ndarray, Sampling, np.ndarray]:
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
