"""Workers of each kind: ordinary objects, which a backend puts into processes of their own.

    RolloutWorker   an engine and an agent system:   RolloutJob -> RolloutSlice
    RewardWorker    rewards:                         RolloutSlice -> the same, judged

Both are made of functions that are passed in, the very ones that a single process runs. The third kind is
`recipes.cluster_trainer.ClusterTrainer`; several trainers make the same calls in the same order, as one
`jax.distributed` group. A worker may be killed at any moment: its state can always be made again.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.data.task_sampling import NO_RATES, SuccessRates
from flowgrpo.distributed.messages import RolloutJob, RolloutSlice, SliceSummary, lengths, versions
from flowgrpo.distributed.worker_pool import Heartbeat, take_heartbeat
from flowgrpo.rollout.judging import is_solved, judge_outputs
from flowgrpo.rollout.records import RecordedTrajectory, awaits_reward, with_reward_result
from flowgrpo.types import JSON, BadInput, Params

LOAD_SECONDS = 600.0  # timeout of a job that waits for its weights

ListPending = Callable[[], list[str]]  # -> what a rollout is waiting for, for people
OnStart = Callable[[ListPending], None]


class RolloutFunctions(NamedTuple):
    """Functions that a rollout worker is made of."""

    load_weights: Callable[[Params, int], None]  # (trained part of the parameters, version)
    roll_out: Callable[[RolloutJob, RolloutSlice, OnStart], RolloutSlice]  # (job, slice to resume, on_start)
    pool: Callable[[RolloutSlice], str]  # -> the reward workers that are to judge it


class RolloutWorker:
    """Rolls out jobs, several at a time over one engine."""

    def __init__(self, build_functions: Callable[[], AbstractContextManager[RolloutFunctions]]):
        self._stack = ExitStack()
        self._functions = self._stack.enter_context(build_functions())
        self._loads, self._version, self._loaded = 0, -1, threading.Condition()
        self._list_pending: dict[object, ListPending] = {}  # by job under way

    def describe(self) -> dict[str, JSON]:
        """Process id and host of this worker."""
        return process_and_host()

    def load(self, params: Params, version: int, loads: int) -> int:
        """Use these weights, the `loads`-th that were published, from the next decoding step on."""
        with self._loaded:
            if loads > self._loads:  # else newer ones were faster
                self._functions.load_weights(params, version)
                self._loads, self._version = loads, version
                self._loaded.notify_all()
        return loads

    def roll_out(self, job: RolloutJob, previous: RolloutSlice | None = None) -> tuple[SliceSummary, RolloutSlice]:
        """Roll out a job, or resume the `previous` slice of it; the result has all its trajectories."""
        with self._loaded:
            if not self._loaded.wait_for(lambda: self._loads >= job.min_loads, LOAD_SECONDS):
                raise BadInput(f"the weights of {job.kind} {job.indices} did not come within {LOAD_SECONDS:g} s")
        previous, start, key = previous or RolloutSlice(), time.monotonic(), object()
        try:
            result = self._functions.roll_out(
                job, previous, lambda list_pending: self._list_pending.update({key: list_pending})
            )
        finally:
            self._list_pending.pop(key, None)
        seconds, previous_lengths, whole = time.monotonic() - start, lengths(previous), not result.unfinished
        summary = SliceSummary(
            pid=os.getpid(),
            whole=whole,
            pool=self._functions.pool(result) if whole and any(map(awaits_reward, result.trajectories)) else "",
            oldest=min(versions(result), default=self._version),
            reused=sum(previous_lengths.values()),
            lengths=tuple(size - previous_lengths.get(identity, 0) for identity, size in lengths(result).items()),
            seconds=round(seconds, 4),
        )
        return summary, result

    def heartbeat(self) -> Heartbeat:
        """State of this process, with what every job under way is waiting for."""
        return take_heartbeat([line for pending in list(self._list_pending.values()) for line in pending()])


class RewardWorker:
    """Judges trajectories, group by group."""

    def __init__(self, build_reward: Callable[[], AbstractContextManager[Reward]]):
        self._stack = ExitStack()
        self._reward = self._stack.enter_context(build_reward())
        self._under_way: dict[object, tuple[float, str]] = {}  # (start, what is judged), by call

    def describe(self) -> dict[str, JSON]:
        """Process id and host of this worker."""
        return process_and_host()

    def judge(self, rollout_slice: RolloutSlice, refusal: str = "") -> tuple[int, RolloutSlice]:
        """The slice with its rewards; with a `refusal`, trajectories that await one get none, for this reason."""
        trajectories, key = rollout_slice.trajectories, object()
        self._under_way[key] = (time.monotonic(), f"the reward of task {trajectories[0].task!r:.60}")
        try:
            results = self._score(trajectories, refusal)
        finally:
            del self._under_way[key]
        judged = [
            with_reward_result(trajectory, results[i], is_solved) if i in results else trajectory
            for i, trajectory in enumerate(trajectories)
        ]
        return os.getpid(), RolloutSlice(tuple(judged))

    def _score(self, trajectories: Sequence[RecordedTrajectory], refusal: str) -> dict[int, RewardResult]:
        """Rewards of the trajectories that await one, by index; each group is scored at once."""
        groups: dict[int, list[int]] = {}
        for index, trajectory in enumerate(trajectories):
            if awaits_reward(trajectory):
                groups.setdefault(trajectory.group, []).append(index)
        results: dict[int, RewardResult] = {}
        for indices in groups.values():
            if refusal:
                results |= {index: RewardResult(None, refusal) for index in indices}
                continue
            tasks = [trajectories[i].task for i in indices]
            outputs = [trajectories[i].output or "" for i in indices]
            results |= dict(zip(indices, judge_outputs(self._reward, tasks, outputs), strict=True))
        return results

    def heartbeat(self) -> Heartbeat:
        """State of this process, with what is being judged and for how long."""
        now = time.monotonic()
        under_way = list(self._under_way.values())
        return take_heartbeat([f"{subject} for {now - start:.0f} s" for start, subject in under_way])


class TrainerStart(NamedTuple):
    """Position from which a trainer starts: that of its checkpoint, or of the warm start."""

    update: int
    eval_due: bool  # a validation must be made before the next update
    master_state: Any  # of the checkpoint; None if there is none
    success_rates: SuccessRates = NO_RATES  # of the tasks, if tasks are chosen by them


def process_and_host() -> dict[str, JSON]:
    """Process id and host name."""
    return {"pid": os.getpid(), "host": os.uname().nodename}
