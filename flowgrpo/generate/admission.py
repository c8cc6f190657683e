"""Which waiting request enters which free slot of an engine, so that conversations under way keep their caches.

A conversation whose cache another one took computes what it sampled again, token by token, while all others wait. So a
request that goes on from a cache is served first, and the slot of a conversation that is under way stays its own for
some time after each answer. Beyond as many conversations as slots, new ones wait until others end.

How long a slot is held is a question of rent or buy: an idle slot costs its share of the engine, a cache computed again
costs the whole engine for so many steps, and holding it until the first has cost as much as the second is at most twice
as dear as knowing the future. `LONGEST_HOLD` bounds it, and so what an idle client of a server can keep from others.
So that those who wait get on beside conversations that never pause, one is evicted for them now and then: as long as
computing the evicted caches again takes no more than `TITHE` of the time.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from flowgrpo.generate.kv_slots import Slot
from flowgrpo.generate.requests import Job

LONGEST_HOLD = 30.0  # seconds
TITHE = 0.05
FIRST_GUESS = 0.01  # seconds of a decode step, until one was measured


class Recomputed(NamedTuple):
    """What conversations under way had computed and lost to others, so that it was computed again."""

    requests: int = 0
    tokens: int = 0  # that were sampled, and are computed again one by one


class Admission:
    """Chooses slots for requests; times are those of `time.monotonic`."""

    def __init__(self, slots: Sequence[Slot]):
        self._slots = slots
        self.step_seconds = FIRST_GUESS
        self._credit, self._credited_at = 0.0, None  # seconds that may be spent on caches computed again

    def measure(self, seconds: float, steps: int) -> None:
        """Take in how long so many decode steps took."""
        if steps:
            self.step_seconds += (seconds / steps - self.step_seconds) / 4

    def price(self, slot: Slot) -> float:
        """Seconds in which a slot's cache would be computed again; prefills are cheap beside decode steps."""
        return self.step_seconds * sum(piece.end - piece.start for piece in slot.pieces if piece.stepwise)

    def hold(self, slot: Slot, job: Job, now: float) -> None:
        """Keep a slot that a job leaves for the next request of its conversation, which has no other slot then."""
        conversation = job.request.conversation
        if conversation is None:
            return
        for other in self._slots:
            if other.conversation is conversation:
                other.conversation = None
        slot.conversation = conversation
        slot.held_until = now + min(self.price(slot) * len(self._slots), LONGEST_HOLD)

    def is_held(self, slot: Slot, now: float) -> bool:
        """Whether a free slot waits for the next request of a conversation."""
        return slot.conversation is not None and not slot.conversation.over and now < slot.held_until

    def own(self, job: Job, free: Collection[int]) -> list[int]:
        """The free slots that hold what a job's conversation has come to."""
        conversation = job.request.conversation
        return [i for i in free if conversation is not None and self._slots[i].conversation is conversation]

    def may_return(self, waiting: Sequence[Job], free: Collection[int], now: float) -> list[Job]:
        """The jobs for which `place_returning` may find a slot, which takes longer to say."""
        own = {id(self._slots[i].conversation) for i in free if self._slots[i].conversation is not None}
        any_unheld = any(not self.is_held(self._slots[i], now) for i in free)
        return [
            job
            for job in waiting
            if id(job.request.conversation) in own or (any_unheld and (job.request.chosen is not None or job.before))
        ]

    def place_returning(self, job: Job, free: Collection[int], held_r: Sequence[int], now: float) -> int | None:
        """The slot for a job that goes on from what was sampled in a free one, or that has one of its own."""
        own, unheld = self.own(job, free), [i for i in free if not self.is_held(self._slots[i], now)]
        if not (own or unheld):
            return None
        index = max(own or unheld, key=lambda i: held_r[i])
        if held_r[index] > next((piece.start for piece in job.pieces if piece.stepwise), len(job.tokens)):
            return index
        # Another context of the same conversation, such as a sub-agent's, leaves that cache alone where it can.
        return (self._best(unheld, held_r) if unheld else index) if own else None

    def place(self, job: Job, free: Collection[int], held_r: Sequence[int], now: float) -> int | None:
        """The slot for a job that goes on from none; None where it has to wait."""
        del job  # the oldest: what it asks for makes no difference
        if unheld := [i for i in free if not self.is_held(self._slots[i], now)]:
            return self._best(unheld, held_r)
        cheapest = min(free, key=lambda i: (self.price(self._slots[i]), self._slots[i].used_at))
        price = self.price(self._slots[cheapest])
        if price > self._credit:
            return None
        self._credit -= price
        return cheapest

    def _best(self, unheld: Collection[int], held_r: Sequence[int]) -> int:
        """Of slots that nobody waits for, that with most of the tokens; else the one that was idle longest.

        A conversation whose hold has passed may come back all the same, so that its slot is taken last.
        """

        def rank(index: int) -> tuple[bool, int, int]:
            slot = self._slots[index]
            return slot.conversation is None or slot.conversation.over, held_r[index], -slot.used_at

        return max(unheld, key=rank)

    def accrue(self, waiting: bool, now: float) -> None:
        """Grant a share of the time in which requests wait."""
        if waiting and self._credited_at is not None:
            self._credit += TITHE * (now - self._credited_at)
        elif not waiting:
            self._credit = 0.0
        self._credited_at = now
