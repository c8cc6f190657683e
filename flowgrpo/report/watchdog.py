"""Seconds of the stages of an iteration, and a report of the stages that are open if it takes too long.

    watch = StageWatchdog(600.0)
    with watch.iteration(12):
        with watch.stage("rollout"):
            watch.add_pending(pending)          # a function that lists what is awaited
            ...

After 600 s, and every 600 s again, a daemon thread reports which stages are open and what they wait for (S3). It ends
nothing: what can be ended has a deadline of its own, and a program on a device can't be.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from flowgrpo.types import BadInput

SHOWN = 8  # awaited things that are named; the others are counted

Pending = Callable[[], Sequence[str]]  # -> what is awaited, in words; called from another thread


def print_to_stderr(sentence: str) -> None:
    """Print a sentence in the terminal."""
    print(sentence, file=sys.stderr, flush=True)


class StageWatchdog:
    """Times the stages of the current iteration, and reports it if it takes too long.

    Args:
        seconds: after which an iteration is reported, again and again; None: never.
        on_stuck: called with the report, in a thread.
    """

    def __init__(self, seconds: float | None = None, *, on_stuck: Callable[[str], None] = print_to_stderr):
        if seconds is not None and not seconds > 0:
            raise BadInput(f"an iteration is watched after {seconds} s: give more than 0, or None")
        self._limit, self._on_stuck = seconds, on_stuck
        self._open: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._pending: list[Pending] = []

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Watch the block as this iteration."""
        is_over, start = threading.Event(), time.monotonic()
        self._open, self._seconds, self._pending = {}, {}, []

        def watch() -> None:
            while not is_over.wait(self._limit):
                self._on_stuck(self.report(number, time.monotonic() - start))

        if self._limit is not None:
            threading.Thread(target=watch, name="flowgrpo-watch", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()
            self._seconds["iteration"] = time.monotonic() - start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as this stage; several may be open, in several threads."""
        self._open[name] = time.monotonic()
        try:
            yield
        finally:
            start = self._open.pop(name, None)
            if start is not None:  # else another thread has ended it, or the iteration is over
                self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def add_pending(self, pending: Pending) -> None:
        """Register a function that lists what this iteration waits for."""
        self._pending.append(pending)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage, and of the whole iteration."""
        return dict(self._seconds)

    def report(self, number: int, seconds: float) -> str:
        """A sentence: which stages of the iteration are open, for how long, and what it waits for."""
        now = time.monotonic()
        stages = ", ".join(f"{name} for {now - start:.0f} s" for name, start in self._open.copy().items())
        awaited = [words for pending in self._pending for words in pending()]
        more = [f"and {len(awaited) - SHOWN} more"] if len(awaited) > SHOWN else []
        waits = "; it waits for " + ", ".join([*awaited[:SHOWN], *more]) if awaited else ""
        return f"update {number} has taken {seconds:.0f} s: {stages or 'between its stages'}{waits}"
