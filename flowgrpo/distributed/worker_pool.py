"""Start, call and replace the workers of a master: calls go out by `WorkerPool.call`, answers come in by `.news`.

    workers.launch("rollout-0")
    workers.call("rollout-0", "play", order, returns=2, what="group 7", group=7, ticket=3)
    for news in workers.news(): ...          # an Answer; or Gone: ended, silent, or too late with a verdict

Trainers are one: what they are asked to do together is answered once all have. A `Heartbeat` is what a worker
reports of itself: its current work, and how busy the processor and the GPUs are.
"""

import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from flowgrpo.distributed.event_log import EventLog
from flowgrpo.distributed.ray_backend import Backend, Lost
from flowgrpo.distributed.schedule import REWARD, ROLLOUT, TRAIN
from flowgrpo.types import BadInput

PATIENCE = 5.0  # seconds that the driver's own tool may take
FRESH = 10.0  # seconds in which it is asked once, since each time a process is started


class Heartbeat(NamedTuple):
    """How a worker is."""

    words: tuple[str, ...]  # what it is at, the longest first
    cpu: float  # seconds of processor time so far
    gpu: float | None  # share of the time in which its GPUs were busy; None where it was given none, or nobody can say


def take_heartbeat(words: Sequence[str] = ()) -> Heartbeat:
    """That of this process."""
    share = _recent_share(os.environ.get("CUDA_VISIBLE_DEVICES", ""), time.monotonic() // FRESH)
    return Heartbeat(tuple(words), time.process_time(), share)


@lru_cache(maxsize=1)
def _recent_share(devices: str, _period: float) -> float | None:
    """Measure `gpu_share` once in a period of `FRESH` seconds; later calls in it get the cached value."""
    return gpu_share(devices)


def gpu_share(devices: str) -> float | None:
    """Say how busy these GPUs are, in the mean, as NVIDIA's driver says."""
    tool = shutil.which("nvidia-smi")
    if not devices or tool is None:
        return None
    command = [tool, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--id={devices}"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout.split()
        return sum(map(float, said)) / len(said) / 100
    except (OSError, subprocess.SubprocessError, ValueError, ZeroDivisionError):
        return None  # "[N/A]", and drivers that are not there: a figure for people, which may be missing


STARTS = 3  # times that a worker may end while it starts
HEARTBEAT_SECONDS = 1.0  # seconds, at most, in which deadlines are looked after
REFUSED_AFTER = 2  # times that a reward may be late with the same trajectories
NO_HEARTBEAT = Heartbeat((), 0.0, None)


class PoolShape(NamedTuple):
    """How many workers there are, their deadlines, and how many tasks an examination has."""

    rollout: int = 1
    rewards: Mapping[str, int] = {REWARD: 1}  # by pool
    trainers: int = 1
    room: int = 4  # groups that a rollout worker plays at a time
    validation_tasks: int = 128
    test_tasks: int = 400
    judge_seconds: float = 600.0
    silent_seconds: float = 120.0
    watch_seconds: float = 600.0

    def names(self) -> dict[str, str]:
        """All workers, with the pool of each."""
        named = {f"{TRAIN}-{i}": TRAIN for i in range(self.trainers)}
        named |= {f"{ROLLOUT}-{i}": ROLLOUT for i in range(self.rollout)}
        return named | {f"{pool}-{i}": pool for pool, count in self.rewards.items() for i in range(count)}


@dataclass(eq=False)
class PendingCall:
    """A call that is under way."""

    worker: str
    method: str
    since: float
    data: Any = None  # a reference to what else it returns
    what: str = ""  # it is about, for people
    group: int = -1
    ticket: int = -1
    exam: Any = None  # of which this is a share
    share: int = -1
    joint: "JointCall | None" = None  # of a call that all trainers were given


@dataclass(eq=False)
class JointCall:
    """A call of all trainers: it is answered when all have, by what the first one says."""

    left: int
    first: "CallEnded | None" = None


class CallEnded(NamedTuple):
    """A call has ended."""

    doing: PendingCall
    value: Any


class WorkerGone(NamedTuple):
    """A worker is not there any more, or is to be ended."""

    worker: str
    why: str


@dataclass
class WorkerStatus:
    """Known state of a worker: its process, its failed starts, its last heartbeat."""

    pid: int = -1
    host: str = ""
    launched: bool = False
    there: bool = False
    starts: int = 0  # that failed, one after another
    asked: float = 0.0  # what it is at
    told: float = 0.0  # when it was last spoken of
    tokens: int = 0
    heartbeat: Heartbeat = NO_HEARTBEAT
    cpu: float | None = None  # share of a core, between its last two heartbeats
    felt: float = 0.0  # when the last one came

    def take(self, heartbeat: Heartbeat, now: float) -> None:
        """Say how it is now."""
        if 0 < self.heartbeat.cpu <= heartbeat.cpu:  # or else it is another process, or the first time
            self.cpu = (heartbeat.cpu - self.heartbeat.cpu) / max(now - self.felt, 1e-3)
        self.heartbeat, self.felt = heartbeat, now


class WorkerPool:
    """The workers of a run, by name."""

    def __init__(
        self,
        backend: Backend,
        shape: PoolShape,
        make: Callable[[str, str], Callable[[], Any]],
        log: EventLog,
        tell: Callable[[str], None],
    ):
        self.backend, self.shape, self.make, self.log, self.tell = backend, shape, make, log, tell
        self.names = shape.names()
        self.seen = {name: WorkerStatus() for name in self.names}
        self.calls: dict[Any, PendingCall] = {}
        self.lost: list[str] = []
        self.late: Counter[str] = Counter()  # verdicts, by what they were about
        self._looked = 0.0

    # Workers ------------------------------------------------------------------------------------------

    def of(self, pool: str) -> list[str]:
        """All workers of a pool."""
        return [name for name, other in self.names.items() if other == pool]

    def there(self, pool: str) -> list[str]:
        """Those of a pool that have started."""
        return [name for name in self.of(pool) if self.seen[name].there]

    def launch(self, names: Sequence[str]) -> None:
        """Start workers; what each says of itself shows that it is there."""
        for name in names:
            seen = self.seen[name]
            seen.launched, seen.there = True, False
            threads = (self.shape.room if self.names[name] == ROLLOUT else 1) + 4
            self.backend.start(name, self.make(self.names[name], name), threads=threads)
            self.call(name, "about")

    def lose(self, gone: WorkerGone) -> None:
        """Note that a worker is gone; an error where it doesn't come to its start at all."""
        name, seen = gone.worker, self.seen[gone.worker]
        self.tell(f"{name} (process {seen.pid}) {gone.why}: another takes its place")
        self.log.write("lost", worker=name, why=gone.why)
        self.lost.append(name)
        seen.starts += not seen.there
        if seen.starts >= STARTS:
            raise BadInput(f"{name} has ended {STARTS} times while it started: {gone.why}")

    def replace(self, names: Sequence[str]) -> None:
        """Others take the places of these; what they were asked is not awaited any more."""
        self.calls = {ref: doing for ref, doing in self.calls.items() if doing.worker not in names}
        for name in names:
            self.backend.kill(name)
        self.launch(names)

    # Calls --------------------------------------------------------------------------------------------

    def call(self, worker: str, method: str, *given: Any, returns: int = 1, **about: Any) -> None:
        """Begin a call; `about` are fields of `PendingCall`."""
        refs = self.backend.call(worker, method, *given, returns=returns)
        data = refs[1] if returns == 2 else refs[1:]
        self.calls[refs[0]] = PendingCall(worker, method, time.monotonic(), data, **about)

    def call_trainers(self, method: str, *given: Any, returns: int = 1) -> None:
        """Begin one call on all trainers; it is answered once all have, and the next one has to wait for that."""
        joint = JointCall(self.shape.trainers)
        for name in self.of(TRAIN):
            self.call(name, method, *given, returns=returns, joint=joint)

    def news(self) -> Iterator[CallEnded | WorkerGone]:
        """Yield what is heard within `HEARTBEAT_SECONDS`; the caller may call and replace workers meanwhile."""
        for ref in self.backend.wait(list(self.calls), HEARTBEAT_SECONDS):
            doing = self.calls.pop(ref, None)
            if doing is not None:  # or else of a worker that was replaced meanwhile
                yield from self._heard(doing, ref)
        now = time.monotonic()
        if now - self._looked >= HEARTBEAT_SECONDS:
            self._looked = now
            self._ask(now)
            yield from self._overdue(now)

    def _heard(self, doing: PendingCall, ref: Any) -> Iterator[CallEnded | WorkerGone]:
        try:
            value = self.backend.get(ref)
        except Lost as error:
            yield WorkerGone(doing.worker, f"has ended ({' '.join(str(error).split())[:160]})")
            return
        if doing.method == "heartbeat":
            self.seen[doing.worker].take(value, time.monotonic())
        elif doing.joint is None:
            yield CallEnded(doing, value)
        else:
            joint = doing.joint
            joint.left -= 1
            joint.first = CallEnded(doing, value) if doing.worker == f"{TRAIN}-0" else joint.first
            if not joint.left and joint.first is not None:
                yield joint.first

    def started(self, name: str, about: Mapping[str, Any]) -> None:
        """A worker has said where it is."""
        seen = self.seen[name]
        seen.pid, seen.host, seen.there, seen.starts = about["pid"], about["host"], True, 0
        self.log.write("started", worker=name, pid=seen.pid)

    # Deadlines ----------------------------------------------------------------------------------------

    def refusal(self, what: str) -> str:
        """Say why this is not to be judged any more; "" where it is."""
        late = self.late[what] >= REFUSED_AFTER
        return f"the reward did not return within {self.shape.judge_seconds:g} s" if late else ""

    def _ask(self, now: float) -> None:
        """Ask everybody what they are at, often enough for every deadline, and no more often."""
        shape = self.shape
        between = max(HEARTBEAT_SECONDS, min(shape.silent_seconds, shape.judge_seconds, shape.watch_seconds) / 30)
        asked = {doing.worker for doing in self.calls.values() if doing.method == "heartbeat"}
        for name, seen in self.seen.items():
            if seen.there and name not in asked and now - seen.asked >= between:
                seen.asked = now
                self.call(name, "heartbeat")

    def _overdue(self, now: float) -> Iterator[WorkerGone]:
        """Yield the workers that are silent or have judged for too long; report other calls that take long."""
        for ref, doing in list(self.calls.items()):
            if ref not in self.calls:
                continue  # of a worker that was replaced just now
            name, seen, took = doing.worker, self.seen[doing.worker], now - doing.since
            at = f", at {', '.join(seen.heartbeat.words[:3])}" if seen.heartbeat.words else ""
            if doing.method == "heartbeat" and took > self.shape.silent_seconds:
                yield WorkerGone(name, f"has been silent for {took:.0f} s{at}")
            elif doing.method == "judge" and took > self.shape.judge_seconds:
                self.late[doing.what] += 1
                yield WorkerGone(name, f"has judged {doing.what} for {took:.0f} s{at}")
            elif took > self.shape.watch_seconds and now - seen.told > self.shape.watch_seconds:
                seen.told = now
                self.tell(f"{name} (process {seen.pid}): {f'{doing.method} {doing.what}'.strip()} for {took:.0f} s{at}")
