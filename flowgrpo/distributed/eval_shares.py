"""Deal an examination out in shares of tasks, and collect the judged stretches; a lost share is played again."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flowgrpo.distributed.messages import Order
from flowgrpo.distributed.schedule import ROLLOUT
from flowgrpo.distributed.worker_pool import PendingCall, WorkerPool


@dataclass(eq=False)
class Exam:
    """An examination that is under way."""

    kind: str
    loaded: int  # see `Order`
    shares: list[tuple[int, ...]]  # the numbers of tasks
    then: Callable[[list[Any]], None]  # what is done with all stretches
    played: dict[int, Any] = field(default_factory=dict)  # by share: what was rolled out
    pools: dict[int, str] = field(default_factory=dict)  # who judges it
    judged: dict[int, Any] = field(default_factory=dict)


class Examiner:
    """Deals out one examination at a time."""

    def __init__(self, workers: WorkerPool):
        self._workers = workers
        self._exam: Exam | None = None

    def begin(self, kind: str, tasks: int, loaded: int, then: Callable[[list[Any]], None]) -> None:
        """So many tasks over all rollout workers; `then` is given what was judged, by share."""
        count = min(len(self._workers.of(ROLLOUT)), tasks)
        self._exam = Exam(kind, loaded, [tuple(range(tasks))[i::count] for i in range(count)], then)
        self.go_on()

    def stop(self) -> None:
        """Nobody waits for it any more."""
        self._exam = None

    def take_played(self, doing: PendingCall, pool: str) -> None:
        """A share was rolled out, and awaits verdicts of this pool, or none."""
        doing.exam.played[doing.share], doing.exam.pools[doing.share] = doing.data, pool
        if not pool:
            doing.exam.judged[doing.share] = doing.data
        self.go_on()

    def take_judged(self, doing: PendingCall) -> None:
        """A share has its verdicts."""
        doing.exam.judged[doing.share] = doing.data
        self.go_on()

    def go_on(self) -> None:
        """Give out what nobody does yet; and end when all is judged."""
        exam = self._exam
        if exam is None:
            return
        under_way = {doing.share for doing in self._workers.calls.values() if doing.exam is exam}
        for share in range(len(exam.shares)):
            if share not in exam.judged and share not in under_way:
                self._give(exam, share)
        if len(exam.judged) == len(exam.shares):
            self._exam = None
            exam.then([exam.judged[share] for share in range(len(exam.shares))])

    def _give(self, exam: Exam, share: int) -> None:
        """The next thing to do with a share, to one who is there."""
        what = f"share {share} of {exam.kind}"
        if share in exam.played:
            method, pool = "judge", exam.pools[share]
            given: tuple = (exam.played[share], self._workers.refusal(what))
        else:
            method, pool = "play", ROLLOUT
            given = (Order(exam.kind, exam.shares[share], exam.loaded),)
        there = self._workers.there(pool)
        if there:
            about = {"returns": 2, "what": what, "exam": exam, "share": share}
            self._workers.call(there[share % len(there)], method, *given, **about)
