"""Start, call and replace the workers of a master: calls go out by `WorkerPool.call`, results come in by `.poll`.

    workers.launch(["rollout-0"])
    workers.call("rollout-0", "roll_out", job, returns=2, subject="group 7", group=7, ticket=3)
    for news in workers.poll(): ...          # a CallResult; or WorkerGone: it died, is silent, or judges for too long

Trainers act as one: a call to all of them has a result once every one has answered. A `Heartbeat` is what a worker
reports of itself: its current work, and how busy its processor and GPUs are.
"""

import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypedDict, Unpack

from flowgrpo.distributed.event_log import EventLog
from flowgrpo.distributed.ray_backend import Backend, WorkerLost
from flowgrpo.distributed.schedule import REWARD, ROLLOUT, TRAIN
from flowgrpo.training.time_budget import UNLIMITED, TimeBudget
from flowgrpo.types import JSON, BadInput

GPU_QUERY_SECONDS = 5.0  # timeout of nvidia-smi
GPU_CACHE_SECONDS = 10.0  # how long its answer is reused, since each query starts a process
MAX_FAILED_STARTS = 3  # consecutive times that a worker may die while it starts
HEARTBEAT_SECONDS = 1.0  # longest wait between two checks of deadlines
MAX_LATE_REWARDS = 2  # times that the reward of the same trajectories may be late until it is given up


class Heartbeat(NamedTuple):
    """What a worker reports of itself."""

    activities: tuple[str, ...]  # what it is doing, for people, the longest running first
    cpu_seconds: float  # processor time so far
    gpu_utilization: float | None  # fraction of the time; None if it has no GPUs, or the driver does not say


NO_HEARTBEAT = Heartbeat((), 0.0, None)


def take_heartbeat(activities: Sequence[str] = ()) -> Heartbeat:
    """The heartbeat of this process."""
    devices, period = os.environ.get("CUDA_VISIBLE_DEVICES", ""), time.monotonic() // GPU_CACHE_SECONDS
    return Heartbeat(tuple(activities), time.process_time(), _cached_gpu_utilization(devices, period))


@lru_cache(maxsize=1)
def _cached_gpu_utilization(devices: str, _period: float) -> float | None:
    return measure_gpu_utilization(devices)


def measure_gpu_utilization(devices: str) -> float | None:
    """Mean utilization of these GPUs, a fraction, by NVIDIA's driver; None if it does not say."""
    nvidia_smi = shutil.which("nvidia-smi")
    if not devices or nvidia_smi is None:
        return None
    command = [nvidia_smi, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--id={devices}"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=GPU_QUERY_SECONDS, check=True)
        percentages = run.stdout.split()
        return sum(map(float, percentages)) / len(percentages) / 100
    except (OSError, subprocess.SubprocessError, ValueError, ZeroDivisionError):
        return None  # "[N/A]", or no driver: the number is for people, and may be missing


class ClusterSettings(NamedTuple):
    """Number of workers of each kind, their deadlines, and the sizes of evaluations.

    rollout_workers     number of processes that roll out
    reward_workers      number of processes that judge, by pool
    trainer_workers     number of processes that train, as one group
    worker_capacity     number of groups that a rollout worker works on at a time
    validation_tasks    number of tasks of a validation
    test_tasks          number of tasks of a test
    judge_seconds       until a worker that judges a group is replaced
    silent_seconds      until a worker that does not answer a heartbeat is replaced
    watch_seconds       until any other call is reported as slow
    time_budget         of the run, checked after updates and evaluations
    """

    rollout_workers: int = 1
    reward_workers: Mapping[str, int] = {REWARD: 1}
    trainer_workers: int = 1
    worker_capacity: int = 4
    validation_tasks: int = 128
    test_tasks: int = 400
    judge_seconds: float = 600.0
    silent_seconds: float = 120.0
    watch_seconds: float = 600.0
    time_budget: TimeBudget = UNLIMITED

    def worker_pools(self) -> dict[str, str]:
        """The pool of each worker, by name."""
        pools = {f"{TRAIN}-{i}": TRAIN for i in range(self.trainer_workers)}
        pools |= {f"{ROLLOUT}-{i}": ROLLOUT for i in range(self.rollout_workers)}
        return pools | {f"{pool}-{i}": pool for pool, count in self.reward_workers.items() for i in range(count)}


@dataclass(eq=False)
class JointCall:
    """A call of all trainers: its result is that of the first trainer, once all have answered."""

    num_pending: int
    first_result: "CallResult | None" = None


@dataclass(eq=False)
class PendingCall:
    """A call that is under way."""

    worker: str
    method: str
    started_at: float
    data: Any = None  # reference to the second value that it returns, or references to all but the first
    subject: str = ""  # what it is about, for people
    group: int = -1
    ticket: int = -1
    evaluation: Any = None  # that it belongs to
    shard: int = -1  # of that evaluation
    joint_call: JointCall | None = None  # that it belongs to


class CallFields(TypedDict, total=False):
    """Optional fields of a `PendingCall`."""

    subject: str
    group: int
    ticket: int
    evaluation: Any
    shard: int
    joint_call: JointCall


class CallResult(NamedTuple):
    """A call has returned."""

    call: PendingCall
    value: Any


class WorkerGone(NamedTuple):
    """A worker has died, or must be replaced."""

    worker: str
    reason: str


@dataclass
class WorkerStatus:
    """What is known of a worker: its process, its failed starts, its last heartbeat."""

    pid: int = -1
    host: str = ""
    is_launched: bool = False
    is_ready: bool = False
    failed_starts: int = 0  # consecutive
    asked_at: float = 0.0  # when a heartbeat was requested
    reported_at: float = 0.0  # when a slow call was reported
    tokens: int = 0
    heartbeat: Heartbeat = NO_HEARTBEAT
    heartbeat_at: float = 0.0
    cpu_utilization: float | None = None  # fraction of a core, between the last two heartbeats

    def add_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Store a heartbeat that arrived now."""
        if 0 < self.heartbeat.cpu_seconds <= heartbeat.cpu_seconds:  # else it is the first one of a process
            seconds = max(now - self.heartbeat_at, 1e-3)
            self.cpu_utilization = (heartbeat.cpu_seconds - self.heartbeat.cpu_seconds) / seconds
        self.heartbeat, self.heartbeat_at = heartbeat, now


class WorkerPool:
    """The workers of a run, by name."""

    def __init__(
        self,
        backend: Backend,
        settings: ClusterSettings,
        make_worker: Callable[[str, str], Callable[[], Any]],
        log: EventLog,
        notify: Callable[[str], None],
    ):
        self.backend, self.settings, self.make_worker, self.log = backend, settings, make_worker, log
        self.notify = notify
        self.pools = settings.worker_pools()
        self.status = {name: WorkerStatus() for name in self.pools}
        self.calls: dict[Any, PendingCall] = {}  # by the reference to their first value
        self.lost: list[str] = []
        self.late_rewards: Counter[str] = Counter()  # by the subject of the call
        self._checked_at = 0.0

    # Workers ------------------------------------------------------------------------------------------

    def workers_of(self, pool: str) -> list[str]:
        """All workers of a pool."""
        return [name for name, other in self.pools.items() if other == pool]

    def ready(self, pool: str) -> list[str]:
        """The workers of a pool that have started."""
        return [name for name in self.workers_of(pool) if self.status[name].is_ready]

    def launch(self, names: Sequence[str]) -> None:
        """Start workers; each is ready once it has answered `describe`."""
        for name in names:
            status = self.status[name]
            status.is_launched, status.is_ready = True, False
            threads = (self.settings.worker_capacity if self.pools[name] == ROLLOUT else 1) + 4
            self.backend.start(name, self.make_worker(self.pools[name], name), threads=threads)
            self.call(name, "describe")

    def record_loss(self, gone: WorkerGone) -> None:
        """Report and log that a worker is gone; `BadInput` if it never gets through its start."""
        name, status = gone.worker, self.status[gone.worker]
        self.notify(f"{name} (process {status.pid}) {gone.reason}: another takes its place")
        self.log.write("lost", worker=name, why=gone.reason)
        self.lost.append(name)
        status.failed_starts += not status.is_ready
        if status.failed_starts >= MAX_FAILED_STARTS:
            raise BadInput(f"{name} has ended {MAX_FAILED_STARTS} times while it started: {gone.reason}")

    def replace(self, names: Sequence[str]) -> None:
        """Kill workers and start others in their places; their calls are forgotten."""
        self.calls = {ref: call for ref, call in self.calls.items() if call.worker not in names}
        for name in names:
            self.backend.kill(name)
        self.launch(names)

    def mark_ready(self, name: str, description: Mapping[str, JSON]) -> None:
        """A worker has started, and has said where it runs."""
        status = self.status[name]
        status.pid, status.host = description["pid"], description["host"]
        status.is_ready, status.failed_starts = True, 0
        self.log.write("started", worker=name, pid=status.pid)

    # Calls --------------------------------------------------------------------------------------------

    def call(self, worker: str, method: str, *args: Any, returns: int = 1, **fields: Unpack[CallFields]) -> None:
        """Start a call of a method that `returns` a number of values; `fields` are those of its `PendingCall`."""
        refs = self.backend.call(worker, method, *args, returns=returns)
        data = refs[1] if returns == 2 else refs[1:]
        self.calls[refs[0]] = PendingCall(worker, method, time.monotonic(), data, **fields)

    def call_trainers(self, method: str, *args: Any, returns: int = 1) -> None:
        """Start one call on all trainers; the next one must wait until all have answered."""
        joint_call = JointCall(self.settings.trainer_workers)
        for name in self.workers_of(TRAIN):
            self.call(name, method, *args, returns=returns, joint_call=joint_call)

    def poll(self) -> Iterator[CallResult | WorkerGone]:
        """Yield news that arrive within `HEARTBEAT_SECONDS`; the caller may call and replace workers meanwhile."""
        for ref in self.backend.wait(list(self.calls), HEARTBEAT_SECONDS):
            call = self.calls.pop(ref, None)
            if call is None:  # its worker was replaced meanwhile
                continue
            try:
                value = self.backend.get(ref)
            except WorkerLost as error:
                yield WorkerGone(call.worker, f"has ended ({' '.join(str(error).split())[:160]})")
                continue
            if call.method == "heartbeat":
                self.status[call.worker].add_heartbeat(value, time.monotonic())
            elif call.joint_call is None:
                yield CallResult(call, value)
            else:
                joint_call = call.joint_call
                joint_call.num_pending -= 1
                if call.worker == f"{TRAIN}-0":
                    joint_call.first_result = CallResult(call, value)
                if not joint_call.num_pending and joint_call.first_result is not None:
                    yield joint_call.first_result
        now = time.monotonic()
        if now - self._checked_at >= HEARTBEAT_SECONDS:
            self._checked_at = now
            self._request_heartbeats(now)
            yield from self._check_deadlines(now)

    # Deadlines ----------------------------------------------------------------------------------------

    def refusal(self, subject: str) -> str:
        """Why these trajectories are not judged any more; "" if they are."""
        is_given_up = self.late_rewards[subject] >= MAX_LATE_REWARDS
        return f"the reward did not return within {self.settings.judge_seconds:g} s" if is_given_up else ""

    def _request_heartbeats(self, now: float) -> None:
        """Request heartbeats often enough for every deadline, and no more often."""
        settings = self.settings
        shortest = min(settings.silent_seconds, settings.judge_seconds, settings.watch_seconds)
        interval = max(HEARTBEAT_SECONDS, shortest / 30)
        asked = {call.worker for call in self.calls.values() if call.method == "heartbeat"}
        for name, status in self.status.items():
            if status.is_ready and name not in asked and now - status.asked_at >= interval:
                status.asked_at = now
                self.call(name, "heartbeat")

    def _check_deadlines(self, now: float) -> Iterator[WorkerGone]:
        """Yield workers that are silent or have judged for too long; report other calls that are slow."""
        settings = self.settings
        for ref, call in list(self.calls.items()):
            if ref not in self.calls:
                continue  # its worker was replaced just now
            name, status, seconds = call.worker, self.status[call.worker], now - call.started_at
            activities = status.heartbeat.activities[:3]
            at = f", at {', '.join(activities)}" if activities else ""
            if call.method == "heartbeat" and seconds > settings.silent_seconds:
                yield WorkerGone(name, f"has been silent for {seconds:.0f} s{at}")
            elif call.method == "judge" and seconds > settings.judge_seconds:
                self.late_rewards[call.subject] += 1
                yield WorkerGone(name, f"has judged {call.subject} for {seconds:.0f} s{at}")
            elif seconds > settings.watch_seconds and now - status.reported_at > settings.watch_seconds:
                status.reported_at = now
                work = f"{call.method} {call.subject}".strip()
                self.notify(f"{name} (process {status.pid}): {work} for {seconds:.0f} s{at}")
