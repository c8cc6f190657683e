"""Time that a command may take, on a machine that is lent for some hours: it ends in order, and goes on another day.

    budget = time_budget("8h50m")        from now
    train(config, folder, budget=budget)

A run looks at its budget between its updates, never within one. Where it is over, `OutOfTime` is raised, which ends the
run as Ctrl-C does: it is saved, and goes on to the same bits (S1). A budget is no setting, so each session has its own.
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
    """A time budget is over. What Ctrl-C ends in order ends likewise; a command's status is then 0."""


@dataclass(frozen=True)
class TimeBudget:
    """So many seconds from when the clock stood at `began`."""

    words: str  # as it was given
    seconds: float
    began: float
    clock: Callable[[], float] = time.monotonic

    def is_over(self) -> bool:
        """Say whether no time is left."""
        return self.clock() - self.began >= self.seconds

    def check(self) -> None:
        """Raise `OutOfTime` where no time is left."""
        if self.is_over():
            raise OutOfTime(f"the time budget of {self.words} is over")


ENDLESS = TimeBudget("no end", math.inf, 0.0)


def time_budget(
    words: str, *, began: float | None = None, clock: Callable[[], float] = time.monotonic, of: str = "time_budget"
) -> TimeBudget:
    """Make the budget that `words` such as 8h50m, 45m or 90s give, from now or from when the clock stood at `began`.

    `of` names where the words come from, for the sentence that refuses them.
    """
    parts = PARTS.fullmatch(words)
    seconds = sum(int(part or 0) * size for part, size in zip(parts.groups(), SECONDS, strict=True)) if parts else 0
    if not seconds:
        raise BadInput(f"{of}={words} is no length of time: write hours, minutes and seconds, such as 8h50m or 90s")
    return TimeBudget(words, float(seconds), clock() if began is None else began, clock)
