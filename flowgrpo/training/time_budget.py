"""Time that a command may take, on a machine that is lent for some hours: it ends in order, and resumes another day.

    budget = time_budget("8h50m")        from now
    train(config, folder, budget=budget)

A run checks its budget between updates, never within one. When it is over, `OutOfTime` is raised, which ends the run as
Ctrl-C does: it is saved, and resumes bit for bit (S1). A budget is no setting, so each session has its own.
"""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from flowgrpo.errors import BadInput

PARTS = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
SECONDS = (3600, 60, 1)  # of each part


class OutOfTime(KeyboardInterrupt):
    """A time budget is over. Whatever handles Ctrl-C handles this too; the status of a command is then 0."""


@dataclass(frozen=True)
class TimeBudget:
    """Number of seconds from the time `started` of a clock."""

    text: str  # as it was given
    seconds: float
    started: float
    clock: Callable[[], float] = time.monotonic

    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.clock() - self.started >= self.seconds

    def check(self) -> None:
        """Raise `OutOfTime` if no time is left."""
        if self.is_over():
            raise OutOfTime(f"the time budget of {self.text} is over")


UNLIMITED = TimeBudget("no end", math.inf, 0.0)


def time_budget(
    text: str,
    *,
    started: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    source: str = "time_budget",
) -> TimeBudget:
    """A budget such as 8h50m, 45m or 90s, from now or from the time `started`.

    `source` names the setting that the text comes from, for the error.
    """
    parts = PARTS.fullmatch(text)
    seconds = sum(int(part or 0) * size for part, size in zip(parts.groups(), SECONDS, strict=True)) if parts else 0
    if not seconds:
        raise BadInput(f"{source}={text} is no length of time: write hours, minutes and seconds, such as 8h50m or 90s")
    return TimeBudget(text, float(seconds), clock() if started is None else started, clock)
