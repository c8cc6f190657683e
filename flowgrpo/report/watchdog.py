"""Timing of an iteration's stages, in seconds, and a warning with those still open where it takes too long.

    watch = StageWatchdog(600.0)
    with watch.iteration(12):
        with watch.stage("rollout"):
            watch.ask(pending)          # a function that says what is awaited
            ...

After 600 s, and again after each 600 s more, a daemon thread says which stages are open and what they wait for (S3).
It ends nothing: what can be ended has a deadline of its own, and a program on a device can't be.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from flowgrpo.types import BadInput

SHOWN = 8  # things that are named; the others are counted

Pending = Callable[[], Sequence[str]]  # what is awaited, in words; called from another thread


def to_stderr(sentence: str) -> None:
    """Say it in the terminal."""
    print(sentence, file=sys.stderr, flush=True)


class StageWatchdog:
    """The stages of the iteration that is under way, and the seconds that each took."""

    def __init__(self, seconds: float | None = None, *, tell: Callable[[str], None] = to_stderr):
        """`tell` is told what is stuck after so many seconds; never, where `seconds` is None."""
        if seconds is not None and not seconds > 0:
            raise BadInput(f"an iteration is watched after {seconds} s: give more than 0, or None")
        self._limit, self._tell = seconds, tell
        self._open: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._pending: list[Pending] = []

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Watch what happens in the block."""
        over, began = threading.Event(), time.monotonic()
        self._open, self._seconds, self._pending = {}, {}, []
        if self._limit is not None:
            arguments = (number, began, over)
            threading.Thread(target=self._watch, args=arguments, name="flowgrpo-watch", daemon=True).start()
        try:
            yield
        finally:
            over.set()
            self._seconds["iteration"] = time.monotonic() - began

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as this stage; several may be open, in several threads."""
        self._open[name] = time.monotonic()
        try:
            yield
        finally:
            began = self._open.pop(name, None)
            if began is not None:  # or else another thread has ended it, or the iteration is over
                self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def ask(self, pending: Pending) -> None:
        """Register a function to ask what this iteration waits for."""
        self._pending.append(pending)

    @property
    def seconds(self) -> dict[str, float]:
        """Say how long each stage took, and the whole iteration."""
        return dict(self._seconds)

    def sentence(self, number: int, seconds: float) -> str:
        """Describe in one sentence which stages of the iteration are open, for how long, and what it waits for."""
        now = time.monotonic()
        stages = ", ".join(f"{name} for {now - began:.0f} s" for name, began in self._open.copy().items())
        awaited = [word for pending in self._pending for word in pending()]
        more = [f"and {len(awaited) - SHOWN} more"] if len(awaited) > SHOWN else []
        what = "; it waits for " + ", ".join([*awaited[:SHOWN], *more]) if awaited else ""
        return f"update {number} has taken {seconds:.0f} s: {stages or 'between its stages'}{what}"

    def _watch(self, number: int, began: float, over: threading.Event) -> None:
        while not over.wait(self._limit):
            self._tell(self.sentence(number, time.monotonic() - began))
