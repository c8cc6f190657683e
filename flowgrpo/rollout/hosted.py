"""Roll out host environments: `hosted` makes a function from tasks and keys to trajectories with rewards.

    a thread for each trajectory:   reset -> engine -> step -> engine -> ... -> ended       one engine decodes for all
    the caller's thread:            starts them, enforces deadlines, has each group judged as soon as it has ended

While one trajectory waits for a tool the others decode, and groups that have ended are judged (R1). A trajectory
depends on its own key alone (E3), in the way of the compiled rollout, so that a pure environment gives the same
trajectories either way (E2).

The caller's thread runs the `RolloutScheduler`. The other threads run one trajectory (`trajectory_thread`) or judge one
group each, and only post the result. The scheduler never waits for a thread: what does not return in its time is left
behind in a daemon thread, and the trajectory's reason says so (S3, S4).
"""

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

from flowgrpo.contracts import HostEnv, Reward, RewardResult, ToolRunner
from flowgrpo.rollout import judging
from flowgrpo.rollout.effects import NO_DEADLINES, DeadlineStop, ExpiredDeadlines, no_effects
from flowgrpo.rollout.records import (
    PartialTrajectory,
    RecordedTrajectory,
    RolloutResult,
    awaits_reward,
    with_reward_result,
)
from flowgrpo.rollout.trajectory_builder import TrajectoryBuilder, derive_keys, key_words
from flowgrpo.rollout.trajectory_thread import Submit, TrajectoryWorker, run_trajectory
from flowgrpo.types import AnyArray, BadInput, Fate, Ledger, Status

CANCEL_GRACE = 1.0  # seconds to wait for requests that can no longer be cancelled


class ConcurrencyLimit:
    """A counting semaphore whose `take` never blocks: it registers a callback instead."""

    def __init__(self, count: int):
        if not count > 0:
            raise BadInput(f"concurrency={count}, but must be greater than 0")
        self._free, self._lock = count, threading.Lock()
        self._waiting: dict[Callable[[], None], None] = {}  # in the order of their calls

    def take(self, wake: Callable[[], None]) -> bool:
        """Take a place, or have `wake` called once, from another thread, when one may be free."""
        with self._lock:
            if not self._free:
                self._waiting[wake] = None
                return False
            self._free -= 1
            return True

    def release(self) -> None:
        """Release a place."""
        with self._lock:
            self._free += 1
            waiting, self._waiting = self._waiting, {}
        for wake in waiting:
            wake()


@dataclass(frozen=True)
class HostedRollout:
    """A rollout of a host environment over an engine, to be called with tasks, keys and groups.

    If contexts are extended, the engine should have `concurrency` slots: of more conversations only as many as there
    are slots are served at a time, and one whose cache was evicted is computed again token by token.

    Args:
        env: the environment.
        submit: that of an engine, from a request to a future completion.
        call_tool: runs the environment's effects.
        reward: scores the outputs of a group; None: the outcome is the sum of the environment's rewards.
        is_solved: whether a task with this reward result counts as solved.
        by_turn: the environment's rewards are kept turn by turn.
        temperature: of sampling.
        concurrency: maximal number of trajectories under way; rollouts that run at once over one engine share a
            `ConcurrencyLimit`.
        deadline: seconds for a group from the start of its first trajectory; then trajectories that wait for an effect
            end as TIMEOUT, and those that wait for the engine are returned unfinished. None: no deadline.
        turn_deadline: seconds for a reset, and for the step after an action. None: no deadline.
        judges: number of threads that call the reward, a group each.
        judge_deadline: seconds for the rewards of a group.
        repetition_limit: number of equal actions at the end of a trajectory that end it as REPETITION. None: no limit.
        expired_deadlines: deadlines that expired in an earlier attempt, which stop the same trajectories at the same
            point; those that expire now are added.
    """

    env: HostEnv
    submit: Submit
    call_tool: ToolRunner = no_effects
    reward: Reward | None = None
    is_solved: Callable[[RewardResult], bool] = judging.is_solved
    by_turn: bool = False
    temperature: float = 1.0
    concurrency: int | ConcurrencyLimit = 64
    deadline: float | None = None
    turn_deadline: float | None = None
    judges: int = 2
    judge_deadline: float = 600.0
    repetition_limit: int | None = None
    expired_deadlines: ExpiredDeadlines = NO_DEADLINES

    def __post_init__(self):
        for name in ("temperature", "deadline", "turn_deadline", "judges", "judge_deadline"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadInput(f"{name}={value}, but must be greater than 0")
        if not isinstance(self.concurrency, ConcurrencyLimit):
            ConcurrencyLimit(self.concurrency)  # raises for what is no limit
        if self.repetition_limit is not None and self.repetition_limit < 2:
            raise BadInput(f"repetition_limit={self.repetition_limit}, but must be at least 2 equal actions")

    def __call__(
        self,
        tasks: Sequence[Any],
        keys,
        groups: Sequence[int] | AnyArray,
        *,
        unfinished: Sequence[PartialTrajectory] = (),
        budget: int | None = None,
        on_start: Callable[[Callable[[], list[str]]], None] | None = None,
        on_trajectory: Callable[[RecordedTrajectory], None] | None = None,
        on_all_sampled: Callable[[RolloutResult], None] | None = None,
    ) -> RolloutResult:
        """Run all trajectories. The callbacks run in the caller's thread and must not block.

        Args:
            tasks: the task of each new trajectory.
            keys: typed JAX keys, one for each.
            groups: the number of the group of each; a group is judged together.
            unfinished: trajectories of an earlier rollout to be resumed.
            budget: tokens to sample of each trajectory in this rollout. One that needs more is returned unfinished,
                perhaps within an action; a later rollout continues that very action, under the same keys, perhaps with
                newer weights. The engine must be able to cut actions. None: no limit.
            on_start: called with a function that lists what is under way, for a watchdog.
            on_trajectory: called with each trajectory once its outcome is known.
            on_all_sampled: called once, when all turns are there but rewards may still be awaited: the outcomes of
                trajectories that are not judged yet mean nothing.
        """
        words, groups = key_words(keys), [int(group) for group in groups]
        if not len(tasks) == len(words) == len(groups):
            raise BadInput(
                f"{len(tasks)} tasks, {len(words)} keys and {len(groups)} groups: give one of each a trajectory"
            )
        if budget is not None and budget < 1:
            raise BadInput(f"budget={budget}, but must be at least one token")
        builders = [
            TrajectoryBuilder(self.env, partial.task, partial.key, partial.group, partial.sample)
            for partial in unfinished
        ]
        samples: defaultdict[int, int] = defaultdict(int)  # of each group so far
        for task, key, group in zip(tasks, words, groups, strict=True):
            builders.append(TrajectoryBuilder(self.env, task, key, group, samples[group]))
            samples[group] += 1
        keys_of = derive_keys([builder.key for builder in builders], self.env.max_turns)
        workers = [TrajectoryWorker(index, builder, keys_of[index]) for index, builder in enumerate(builders)]
        for worker, partial in zip(workers, unfinished, strict=False):
            worker.resumed, worker.seconds = partial, partial.seconds
        scheduler = RolloutScheduler(self, workers, budget, on_trajectory, on_all_sampled)
        if on_start is not None:
            on_start(scheduler.pending)
        try:
            return scheduler.run()
        finally:
            scheduler.abandon()


hosted = HostedRollout  # `fg.hosted(env, engine.submit, ...)`, as a function that makes a rollout


# The scheduler ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class WorkerGroup:
    """Workers that share a deadline and are judged together."""

    workers: list[TrajectoryWorker] = field(default_factory=list)
    num_running: int = 0  # workers that have not ended
    ends_at: float | None = None  # time of its deadline; None: it has not started, has ended, or has no deadline
    has_expired: bool = False  # its deadline, in an earlier attempt: each worker stops where it did then
    to_judge: list[int] = field(default_factory=list)  # indices of its trajectories that await a reward
    judged_since: float = 0.0

    @property
    def name(self) -> str:
        """For messages."""
        return f"group {self.workers[0].builder.group}"


class RolloutScheduler:
    """One rollout: `run` runs it, and `abandon` leaves everything behind that is still under way."""

    def __init__(
        self,
        settings: HostedRollout,
        workers: list[TrajectoryWorker],
        budget: int | None,
        on_trajectory: Callable[[RecordedTrajectory], None] | None,
        on_all_sampled: Callable[[RolloutResult], None] | None,
    ):
        self.settings, self.workers, self.budget = settings, workers, budget
        self.on_trajectory, self.on_all_sampled = on_trajectory, on_all_sampled
        limit = settings.concurrency
        self.limit = limit if isinstance(limit, ConcurrencyLimit) else ConcurrencyLimit(limit)
        self.waiting = list(reversed(workers))
        self.running: set[TrajectoryWorker] = set()
        self.groups: dict[int, WorkerGroup] = {}
        self.ready: list[WorkerGroup] = []  # to be judged
        self.judging: set[WorkerGroup] = set()
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.trajectories: dict[int, RecordedTrajectory] = {}
        self.unfinished: dict[int, PartialTrajectory] = {}
        self.num_dropped = 0  # tokens that were delivered too late to become a turn
        self.all_sampled = False
        self.start = time.monotonic()
        self.seconds = {"rollout": 0.0, "playing": 0.0, "judging": 0.0}
        for worker in workers:
            group = self.groups.setdefault(worker.builder.group, WorkerGroup())
            group.workers.append(worker)
            group.num_running += 1
            if worker.resumed is None:
                worker.earlier_stop = settings.expired_deadlines.find_stop(worker.builder.key)
            group.has_expired |= worker.earlier_stop is not None and worker.earlier_stop.of_group

    def run(self) -> RolloutResult:
        """Run and judge all trajectories."""
        while self.waiting or self.running or self.ready or self.judging:
            self._start_workers()
            self._start_judging()
            try:
                event, value = self.events.get(timeout=self._time_to_deadline())
            except queue.Empty:
                pass
            else:
                self._handle(event, value)
            self._enforce_deadlines()
            self._announce_all_sampled()
        self._announce_all_sampled()
        self.seconds["rollout"] = time.monotonic() - self.start
        return self._result()

    def _announce_all_sampled(self) -> None:
        """Once, as soon as no trajectory is under way."""
        if self.all_sampled or self.waiting or self.running:
            return
        self.all_sampled = True
        if self.on_all_sampled is not None:
            self.on_all_sampled(self._result())

    def _result(self) -> RolloutResult:
        return RolloutResult(
            trajectories=tuple(self.trajectories[index] for index in sorted(self.trajectories)),
            unfinished=tuple(self.unfinished[index] for index in sorted(self.unfinished)),
            ledger=Ledger(self.num_dropped, {Fate.DROPPED_CANCELLED: self.num_dropped} if self.num_dropped else {}),
            num_without_turns=sum(not trajectory.turns for trajectory in self.trajectories.values()),
            seconds=dict(self.seconds),
        )

    def pending(self) -> list[str]:
        """Descriptions of what is under way, the longest first; may be called from any thread."""
        now = time.monotonic()
        # Copies, which are made at once: the rollout's own thread changes these while they are read.
        running, groups = list(self.running), list(self.judging)
        waits = [(now - group.judged_since, f"the reward of {group.name}") for group in groups]
        for worker in running:
            call = worker.call
            what = f"{call.kind} {call.name!r}" if call else {"ready": "engine"}.get(worker.phase, worker.phase)
            name = f"trajectory {worker.builder.group}.{worker.builder.sample} ({what})"
            waits.append((now - worker.phase_start, name))
        words = [f"{name} for {seconds:.0f} s" for seconds, name in sorted(waits, key=lambda item: -item[0])]
        queues = {"trajectories that have not started": self.waiting, "groups that are not judged yet": self.ready}
        return words + [f"{len(items)} {name}" for name, items in queues.items() if items]

    def abandon(self) -> None:
        """Cancel what is under way; no thread changes or asks for anything from here on."""
        for worker in list(self.running):
            if worker.stop() is not None and worker.future is not None:
                worker.future.cancel()
            self._release(worker)

    # Starting and ending ------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        """Start trajectories within the concurrency limit."""
        now, settings = time.monotonic(), self.settings
        while self.waiting and self.limit.take(self._wake):
            worker = self.waiting.pop()
            group = self.groups[worker.builder.group]
            self.running.add(worker)
            if worker.earlier_stop is not None and worker.earlier_stop.phase == "queued":
                self._stop_again(worker)
                self._wake()  # since no thread will post an event
                continue
            if settings.deadline is not None and group.ends_at is None and not group.has_expired:
                group.ends_at = now + settings.deadline
            worker.started = now
            bound = (settings.submit, settings.call_tool, settings.temperature, self.budget, settings.repetition_limit)
            self._start_thread(f"{worker.index}", run_trajectory, worker, *bound, self._post)

    def _start_judging(self) -> None:
        """Start to judge groups while there are free judges."""
        now, settings = time.monotonic(), self.settings
        while self.ready and len(self.judging) < settings.judges:
            group = self.ready.pop(0)
            group.judged_since = now
            self.judging.add(group)
            reason = settings.expired_deadlines.find_unjudged(self._keys_to_judge(group))
            if reason is not None:
                self._add_rewards(group, [RewardResult(None, reason)] * len(group.to_judge))
                self._wake()
                continue
            trajectories = [self.trajectories[index] for index in group.to_judge]
            tasks = [trajectory.task for trajectory in trajectories]
            outputs = [trajectory.output or "" for trajectory in trajectories]
            self._start_thread("judge", self._judge, group, tasks, outputs)

    def _judge(self, group: WorkerGroup, tasks: Sequence[Any], outputs: Sequence[str]) -> None:
        """The thread that judges a group."""
        assert self.settings.reward is not None
        try:
            self._post("judged", (group, judging.judge_outputs(self.settings.reward, tasks, outputs)))
        except BaseException as error:
            self._post("failed", error)

    def _start_thread(self, name: str, target: Callable, *arguments) -> None:
        # A daemon, so that one that hangs doesn't keep the interpreter from ending.
        threading.Thread(target=target, args=arguments, name=f"flowgrpo-rollout-{name}", daemon=True).start()

    def _post(self, event: str, value: Any) -> None:
        self.events.put((event, value))

    def _wake(self) -> None:
        self._post("woken", None)

    def _handle(self, event: str, value: Any) -> None:
        if event == "failed":
            raise value
        if event == "late":
            self._stop_again(value)
        elif event == "ended":
            self._release(value)
            if value.phase == "held":
                self.unfinished[value.index] = value.builder.to_partial(value.seconds)
            self._finish(value)
        elif event == "judged":
            group, results = value
            if group in self.judging:  # else its deadline has passed
                self._add_rewards(group, results)

    def _release(self, worker: TrajectoryWorker) -> None:
        """Release the worker's place, and its slot of the engine."""
        worker.conversation.over = True
        if worker in self.running:
            self.running.remove(worker)
            self.limit.release()

    def _finish(self, worker: TrajectoryWorker) -> None:
        """Record a trajectory that has ended or is unfinished; its group is ready to be judged after its last one."""
        group = self.groups[worker.builder.group]
        self.seconds["playing"] = time.monotonic() - self.start
        group.num_running -= 1
        if worker.index not in self.unfinished:
            trajectory = worker.builder.finish(by_turn=self.settings.by_turn, seconds=worker.seconds)
            if self.settings.reward is not None and awaits_reward(trajectory):
                self.trajectories[worker.index] = trajectory
                group.to_judge.append(worker.index)
            else:
                self._record(worker.index, trajectory)
        if not group.num_running:
            group.ends_at = None
            group.to_judge.sort()
            if group.to_judge:
                self.ready.append(group)

    def _add_rewards(self, group: WorkerGroup, results: Sequence[RewardResult]) -> None:
        self.judging.discard(group)
        self.seconds["judging"] += time.monotonic() - group.judged_since
        for index, result in zip(group.to_judge, results, strict=True):
            self._record(index, with_reward_result(self.trajectories[index], result, self.settings.is_solved))

    def _record(self, index: int, trajectory: RecordedTrajectory) -> None:
        """Record a trajectory whose outcome is known."""
        self.trajectories[index] = trajectory
        if self.on_trajectory is not None:
            self.on_trajectory(trajectory)

    def _keys_to_judge(self, group: WorkerGroup) -> list[list[int]]:
        return [list(self.trajectories[index].key) for index in group.to_judge]

    # Deadlines ----------------------------------------------------------------------------------------

    def _time_to_deadline(self) -> float | None:
        """Seconds until a deadline may expire; None if there is none."""
        settings = self.settings
        ends = [group.ends_at for group in self.groups.values() if group.ends_at is not None]
        ends += [group.judged_since + settings.judge_deadline for group in self.judging]
        now = time.monotonic()
        if settings.turn_deadline is not None and self.running:
            starts = [worker.phase_start for worker in self.running if worker.phase in ("reset", "step")]
            # A call that starts while this thread waits ends later than any that is under way.
            ends.append(min(starts, default=now) + settings.turn_deadline)
        return max(min(ends) - now, 0.0) if ends else None

    def _enforce_deadlines(self) -> None:
        """Stop calls of the environment, groups and rewards that are late."""
        now, settings = time.monotonic(), self.settings
        if settings.turn_deadline is not None:
            for worker in list(self.running):
                start = worker.phase_start
                if worker.phase in ("reset", "step") and now >= start + settings.turn_deadline:
                    self._stop([worker], f"the turn's {settings.turn_deadline:g} s", start)
        for group in self.groups.values():
            if group.ends_at is not None and now >= group.ends_at:
                group.ends_at = None
                self._stop(group.workers, f"the group's {settings.deadline:g} s")
        for group in list(self.judging):
            if now >= group.judged_since + settings.judge_deadline:
                reason = f"the reward did not return within {settings.judge_deadline:g} s"
                settings.expired_deadlines.add_unjudged(self._keys_to_judge(group), reason)
                self._add_rewards(group, [RewardResult(None, reason)] * len(group.to_judge))

    def _stop(self, workers: Sequence[TrajectoryWorker], limit: str, phase_start: float | None = None) -> None:
        """End trajectories that wait for an effect; return those unfinished that wait for the engine or to start."""
        # All are stopped before anything else, so that none advances meanwhile.
        stopped = [(worker, phase) for worker in workers if (phase := worker.stop(phase_start)) is not None]
        # Cancel their requests; count the tokens of those that are delivered all the same.
        late = {
            worker.future: worker for worker, _ in stopped if worker.future is not None and not worker.future.cancel()
        }
        delivered = [future for future in wait(late, CANCEL_GRACE).done if future.exception() is None]
        dropped = {late[future]: len(future.result().tokens) - len(late[future].partial_tokens) for future in delivered}
        for worker, phase in stopped:
            in_call, reason = phase in ("reset", "step"), ""
            if in_call:
                awaited = f"{worker.call.kind} {worker.call.name!r}" if worker.call else f"the environment's {phase}"
                thread = f"flowgrpo-rollout-{worker.index}"
                reason = f"{awaited} did not return within {limit}: left in the thread {thread}"
            stop = DeadlineStop(
                turns=len(worker.builder.turns),
                phase=phase,
                effects=-1 if in_call and worker.call is None else len(worker.builder.log),
                of_group=phase_start is None,
                reason=reason,
                dropped=dropped.get(worker, 0),
            )
            if worker.resumed is None:
                self.settings.expired_deadlines.add_stop(worker.builder.key, stop)
            self._end_stopped(worker, stop)

    def _stop_again(self, worker: TrajectoryWorker) -> None:
        """Stop a worker at the point at which a deadline stopped it in an earlier attempt."""
        assert worker.earlier_stop is not None
        if worker.stop() is not None:
            self._end_stopped(worker, worker.earlier_stop)

    def _end_stopped(self, worker: TrajectoryWorker, stop: DeadlineStop) -> None:
        """End a stopped trajectory that was in a reset or step; return any other unfinished.

        A step that did not return, by itself or for a tool that the policy called, is the policy's doing (TIMEOUT);
        anything else is not (TOOL_FAILURE, F5).
        """
        self.num_dropped += stop.dropped
        if stop.phase in ("reset", "step"):
            is_policys_doing = stop.phase == "step" and (worker.call is None or worker.call.kind == "tool")
            status = Status.TIMEOUT if is_policys_doing else Status.TOOL_FAILURE
            worker.builder.end_in_call(status, stop.reason, worker.pending_tool)
        else:
            unchanged = worker.resumed if stop.phase in ("queued", "resumed") else None
            self.unfinished[worker.index] = unchanged or worker.builder.to_partial(worker.seconds)
        self._release(worker)
        if worker in self.waiting:
            self.waiting.remove(worker)
        self._finish(worker)
