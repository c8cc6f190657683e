"""An examination, dealt out: tasks flow in as shares, judged stretches flow out; what is lost, another plays anew."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(eq=False)
class Exam:
    """An examination that is under way."""

    kind: str
    shares: list[tuple[int, ...]]  # the numbers of tasks
    then: Callable[[list[Any]], None]  # what is done with all stretches
    played: dict[int, Any] = field(default_factory=dict)  # by share: what was rolled out
    pools: dict[int, str] = field(default_factory=dict)  # who judges it
    judged: dict[int, Any] = field(default_factory=dict)

    def name(self, share: int) -> str:
        """A share, for people."""
        return f"share {share} of {self.kind}"

    def left(self) -> Iterator[tuple[int, Literal["play", "judge"]]]:
        """What is to be done next with each share that is not judged."""
        for share in range(len(self.shares)):
            if share not in self.judged:
                yield share, "judge" if share in self.played else "play"

    def take_played(self, share: int, stretch: Any, pool: str) -> None:
        """A share was rolled out, and awaits verdicts of this pool, or none."""
        self.played[share], self.pools[share] = stretch, pool
        if not pool:
            self.judged[share] = stretch

    def is_over(self) -> bool:
        """Whether all is judged."""
        return len(self.judged) == len(self.shares)

    def stretches(self) -> list[Any]:
        """All that was judged, by share."""
        return [self.judged[share] for share in range(len(self.shares))]


def deal(kind: str, tasks: int, workers: int, then: Callable[[list[Any]], None]) -> Exam:
    """So many tasks, over so many workers at most."""
    count = min(workers, tasks)
    return Exam(kind, [tuple(range(tasks))[i::count] for i in range(count)], then)
