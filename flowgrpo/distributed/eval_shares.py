"""Distribute an evaluation over rollout workers in shards of tasks, and collect the judged slices; a shard whose worker
is lost is rolled out again."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flowgrpo.distributed.messages import RolloutJob
from flowgrpo.distributed.schedule import ROLLOUT
from flowgrpo.distributed.worker_pool import PendingCall, WorkerPool


@dataclass(eq=False)
class Evaluation:
    """An evaluation that is under way."""

    name: str
    min_loads: int  # see `RolloutJob`
    shards: list[tuple[int, ...]]  # the indices of tasks
    on_done: Callable[[list[Any]], None]
    rolled_out: dict[int, Any] = field(default_factory=dict)  # by shard: reference to its slice
    pools: dict[int, str] = field(default_factory=dict)  # by shard: the reward workers that judge it
    judged: dict[int, Any] = field(default_factory=dict)  # by shard: reference to its judged slice


class Evaluator:
    """Runs one evaluation at a time."""

    def __init__(self, workers: WorkerPool):
        self._workers = workers
        self._evaluation: Evaluation | None = None

    def start(self, name: str, num_tasks: int, min_loads: int, on_done: Callable[[list[Any]], None]) -> None:
        """Distribute `num_tasks` over all rollout workers; `on_done` gets the judged slices, by shard."""
        count = min(len(self._workers.workers_of(ROLLOUT)), num_tasks)
        shards = [tuple(range(num_tasks))[i::count] for i in range(count)]
        self._evaluation = Evaluation(name, min_loads, shards, on_done)
        self.dispatch()

    def cancel(self) -> None:
        """Forget the evaluation."""
        self._evaluation = None

    def add_rollout(self, call: PendingCall, pool: str) -> None:
        """A shard was rolled out, and is to be judged by this pool; by none if it is empty."""
        call.evaluation.rolled_out[call.shard], call.evaluation.pools[call.shard] = call.data, pool
        if not pool:
            call.evaluation.judged[call.shard] = call.data
        self.dispatch()

    def add_judged(self, call: PendingCall) -> None:
        """A shard was judged."""
        call.evaluation.judged[call.shard] = call.data
        self.dispatch()

    def dispatch(self) -> None:
        """Call workers for the shards that nobody works on, and finish when all are judged."""
        evaluation = self._evaluation
        if evaluation is None:
            return
        under_way = {call.shard for call in self._workers.calls.values() if call.evaluation is evaluation}
        for shard, indices in enumerate(evaluation.shards):
            if shard in evaluation.judged or shard in under_way:
                continue
            subject = f"shard {shard} of {evaluation.name}"
            if shard in evaluation.rolled_out:
                method, pool = "judge", evaluation.pools[shard]
                args: tuple = (evaluation.rolled_out[shard], self._workers.refusal(subject))
            else:
                method, pool = "roll_out", ROLLOUT
                args = (RolloutJob(evaluation.name, indices, evaluation.min_loads),)
            if ready := self._workers.ready(pool):
                worker = ready[shard % len(ready)]
                self._workers.call(
                    worker, method, *args, returns=2, subject=subject, evaluation=evaluation, shard=shard
                )
        if len(evaluation.judged) == len(evaluation.shards):
            self._evaluation = None
            evaluation.on_done([evaluation.judged[shard] for shard in range(len(evaluation.shards))])
