"""Which waiting request enters which free slot of an engine, so that conversations in progress keep their caches.

A conversation that lost its cache computes what it sampled again, token by token, while all others wait. So a request
that continues from a cache is served first, and a slot stays reserved for its conversation for some time after each
completion. If there are more conversations than slots, new ones wait until others end.

How long a slot is held is a rent-or-buy problem (ski rental): an idle slot costs its share of the engine, a cache
computed again costs the whole engine for as many steps, and holding it until the first has cost as much as the second
is at most twice as expensive as knowing the future. `MAX_HOLD_SECONDS` bounds it, and so what an idle client of a
server can keep from others. So that new requests progress next to conversations that never pause, one is evicted now
and then, as long as computing the evicted caches again takes no more than `EVICTION_FRACTION` of the time.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from flowgrpo.generate.kv_slots import Slot
from flowgrpo.generate.requests import Job

MAX_HOLD_SECONDS = 30.0
EVICTION_FRACTION = 0.05
INITIAL_STEP_SECONDS = 0.01  # of a decode step, until one was measured


class RecomputeStats(NamedTuple):
    """What conversations in progress had computed and lost to others, so that it was computed again."""

    requests: int = 0
    tokens: int = 0  # that were sampled, and are computed again one by one


class Admission:
    """Chooses slots for requests; times are those of `time.monotonic`."""

    def __init__(self, slots: Sequence[Slot]):
        self._slots = slots
        self.step_seconds = INITIAL_STEP_SECONDS
        self._credit, self._credited_at = 0.0, None  # seconds that may be spent on caches computed again

    def measure(self, seconds: float, steps: int) -> None:
        """Update the estimate of a decode step's time, given the time of `steps` steps."""
        if steps:
            self.step_seconds += (seconds / steps - self.step_seconds) / 4

    def price(self, slot: Slot) -> float:
        """Seconds that computing a slot's cache again would take; prefills are cheap compared with decode steps."""
        return self.step_seconds * sum(span.end - span.start for span in slot.spans if span.stepwise)

    def hold(self, slot: Slot, job: Job, now: float) -> None:
        """Reserve the slot that a job leaves for the next request of its conversation, which has no other slot then."""
        conversation = job.request.conversation
        if conversation is None:
            return
        for other in self._slots:
            if other.conversation is conversation:
                other.conversation = None
        slot.conversation = conversation
        slot.held_until = now + min(self.price(slot) * len(self._slots), MAX_HOLD_SECONDS)

    def is_held(self, slot: Slot, now: float) -> bool:
        """Whether a free slot is reserved for the next request of a conversation."""
        return slot.conversation is not None and not slot.conversation.over and now < slot.held_until

    def reserved_slots(self, job: Job, free: Collection[int]) -> list[int]:
        """The free slots that have the cache of a job's conversation."""
        conversation = job.request.conversation
        return [i for i in free if conversation is not None and self._slots[i].conversation is conversation]

    def may_return(self, waiting: Sequence[Job], free: Collection[int], now: float) -> list[Job]:
        """The jobs for which `place_returning`, which takes longer to decide, may find a slot."""
        reserved = {id(self._slots[i].conversation) for i in free if self._slots[i].conversation is not None}
        any_unheld = any(not self.is_held(self._slots[i], now) for i in free)
        return [
            job
            for job in waiting
            if id(job.request.conversation) in reserved
            or (any_unheld and (job.request.chosen is not None or job.num_resumed))
        ]

    def place_returning(self, job: Job, free: Collection[int], cached_r: Sequence[int], now: float) -> int | None:
        """The slot for a job that continues from what was sampled in a free one, or that has one reserved."""
        reserved, unheld = self.reserved_slots(job, free), [i for i in free if not self.is_held(self._slots[i], now)]
        if not (reserved or unheld):
            return None
        index = max(reserved or unheld, key=lambda i: cached_r[i])
        if cached_r[index] > next((span.start for span in job.spans if span.stepwise), len(job.tokens)):
            return index
        # Another context of the same conversation, such as a sub-agent's, leaves that cache alone if it can.
        return (self._best(unheld, cached_r) if unheld else index) if reserved else None

    def place(self, _: Job, free: Collection[int], cached_r: Sequence[int], now: float) -> int | None:
        """The slot for a job that continues from none; None if it has to wait."""
        if unheld := [i for i in free if not self.is_held(self._slots[i], now)]:
            return self._best(unheld, cached_r)
        cheapest = min(free, key=lambda i: (self.price(self._slots[i]), self._slots[i].used_at))
        price = self.price(self._slots[cheapest])
        if price > self._credit:
            return None
        self._credit -= price
        return cheapest

    def _best(self, unheld: Collection[int], cached_r: Sequence[int]) -> int:
        """Of slots that are not reserved, the one with most of the tokens; else the one that was idle longest.

        A conversation whose hold has passed may come back all the same, so its slot is taken last.
        """

        def rank(index: int) -> tuple[bool, int, int]:
            slot = self._slots[index]
            return slot.conversation is None or slot.conversation.over, cached_r[index], -slot.used_at

        return max(unheld, key=rank)

    def accrue(self, waiting: bool, now: float) -> None:
        """Add a fraction of the time in which requests wait to the credit for evictions."""
        if waiting and self._credited_at is not None:
            self._credit += EVICTION_FRACTION * (now - self._credited_at)
        elif not waiting:
            self._credit = 0.0
        self._credited_at = now
