"""A cluster of threads for tests: calls can be lost or hang, and any fault would change the bits of the run."""

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo.contracts import Completion, Reward, RewardResult
from flowgrpo.data import task_sampling
from flowgrpo.distributed.master import Master
from flowgrpo.distributed.messages import RolloutJob, RolloutSlice, versions
from flowgrpo.distributed.ray_backend import WorkerLost
from flowgrpo.distributed.schedule import REWARD, ROLLOUT, TRAIN, Plan
from flowgrpo.distributed.worker_pool import ClusterSettings, take_heartbeat
from flowgrpo.distributed.workers import RewardWorker, RolloutFunctions, RolloutWorker, TrainerStart
from flowgrpo.rollout import records
from flowgrpo.rollout.records import PartialTrajectory, RecordedTrajectory, make_turn
from flowgrpo.types import Task

METRICS = {"success": 0.5, "zero_signal_groups": 0.25}  # of every update


class Ref:
    """Reference to a value that a call will return."""

    def __init__(self):
        self.value: Any = None
        self.error: BaseException | None = None
        self.ready = threading.Event()

    def get(self) -> Any:
        self.ready.wait()
        if self.error is not None:
            raise self.error
        return self.value


class ThreadBackend:
    """Stand-in for `RayBackend`, in threads; open calls of a killed worker are lost, whatever its threads still do."""

    def __init__(self, before: Callable[[str, str, int], None] = lambda *_: None):
        """`before(worker, method, calls)` runs in the worker's thread before each call, and may raise or hang."""
        self.before, self.workers, self.jobs, self.open_calls = before, {}, {}, {}
        self.changed: queue.SimpleQueue = queue.SimpleQueue()
        self.calls, self.started = 0, []

    def start(self, name: str, make: Callable[[], Any], *, threads: int) -> None:
        """Start a worker; its threads end with the process, since one of a killed worker may wait for ever."""
        self.started.append(name)
        jobs = self.jobs[name] = queue.SimpleQueue()
        self.open_calls[name] = set()
        worker = self.workers[name] = Future()
        jobs.put(partial(_make, worker, make))
        for _ in range(threads):
            threading.Thread(target=_run_all, args=(jobs,), daemon=True).start()

    def call(self, name: str, method: str, *args: Any, returns: int = 1) -> tuple[Ref, ...]:
        refs = tuple(Ref() for _ in range(returns))
        self.open_calls[name].add(refs)
        self.calls += 1
        self.jobs[name].put(partial(self._run, name, self.workers[name], method, args, refs, self.calls))
        return refs

    def _run(self, name, worker, method, args, refs, count) -> None:
        values, error = [None] * len(refs), None
        try:
            self.before(name, method, count)
            value = getattr(worker.result(), method)(*[x.get() if isinstance(x, Ref) else x for x in args])
            values = [value] if len(refs) == 1 else list(value)
        except BaseException as raised:
            error = raised
        self._resolve(name, refs, values, error)

    def _resolve(self, name, refs, values, error) -> None:
        if refs in self.open_calls[name]:
            self.open_calls[name].discard(refs)
            for ref, value in zip(refs, values, strict=True):
                ref.value, ref.error = value, error
                ref.ready.set()
            self.changed.put(None)

    def wait(self, refs: Sequence[Ref], seconds: float) -> list[Ref]:
        deadline = time.monotonic() + seconds
        while not (done := [ref for ref in refs if ref.ready.is_set()]):
            try:
                self.changed.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                return []
        return done

    def get(self, ref: Ref) -> Any:
        return ref.get()

    def kill(self, name: str) -> None:
        for refs in list(self.open_calls[name]):
            self._resolve(name, refs, [None] * len(refs), WorkerLost("killed"))


def _make(worker: Future, make: Callable[[], Any]) -> None:
    try:
        worker.set_result(make())
    except BaseException as raised:
        worker.set_exception(raised)


def _run_all(jobs: queue.SimpleQueue) -> None:
    while True:
        jobs.get()()


class ToyRun:
    """A run over numbers: what was rolled out and judged decides what the weights become, to the last bit."""

    def __init__(self, *, turns: int = 3, samples: int = 2, before_reward: Callable[[int], None] = lambda _: None):
        """`before_reward(task)` runs before each group is scored, and may hang."""
        self.turns, self.samples, self.before_reward = turns, samples, before_reward
        self.saved: dict[str, Any] | None = None  # the checkpoint
        self.batches: dict[int, list[RolloutSlice]] = {}
        self.delays: list[float] = []  # seconds of the next calls of trainers

    def make_worker(self, pool: str, name: str, *, every: int) -> Callable[[], Any]:
        del name
        if pool == TRAIN:
            return partial(FakeTrainer, self, every)
        if pool == ROLLOUT:
            return partial(RolloutWorker, self.build_rollout)
        return partial(RewardWorker, self.build_reward)

    @contextmanager
    def build_rollout(self):
        weights: dict[str, Any] = {}
        yield RolloutFunctions(
            lambda params, version: weights.update(params=params, version=version),
            partial(self.roll_out, weights),
            pool_of,
        )

    def roll_out(self, weights: dict[str, Any], job: RolloutJob, previous: RolloutSlice, on_start) -> RolloutSlice:
        on_start(lambda: [f"groups {job.indices}"])
        starts = list(previous.unfinished) or [
            PartialTrajectory(task(n if job.task is None else job.task), (n, i), n, i, (), (), (), (), (), 0.0)
            for n in job.indices
            for i in range(self.samples)
        ]
        results = [self.resume(weights, start, job.budget) for start in starts]
        unfinished = [result for result in results if isinstance(result, PartialTrajectory)]
        trajectories = [*previous.trajectories, *(item for item in results if isinstance(item, RecordedTrajectory))]
        trajectories.sort(key=lambda trajectory: (trajectory.group, trajectory.sample))
        return RolloutSlice(tuple(trajectories), tuple(unfinished))

    def resume(self, weights, start: PartialTrajectory, budget: int | None) -> RecordedTrajectory | PartialTrajectory:
        """A trajectory of a few turns, as many as its key says; each token follows from key and weights."""
        cut = start.partial_action
        tokens = [] if cut is None else list(cut.completion.tokens)
        token_versions = [] if cut is None else list(cut.completion.version)
        turns, num_sampled = list(start.turns), 0
        while len(turns) < self.turns + start.sample % 2 + 2 * (start.group % 2):
            if budget is not None and num_sampled == budget:
                completion = Completion(tokens, [-0.5] * len(tokens), token_versions, "budget")
                return replace(
                    start,
                    turns=tuple(turns),
                    tools=("",) * len(turns),
                    errors=(False,) * len(turns),
                    effect_counts=(0,) * (len(turns) + 1),
                    partial_action=records.PartialAction((1,), 0, completion) if tokens else None,
                )
            text = f"{start.key} {len(turns)} {weights['params'].tobytes().hex()}"
            digest = hashlib.sha256(text.encode()).digest()
            tokens, token_versions = [*tokens, digest[len(tokens)]], [*token_versions, weights["version"]]
            num_sampled += 1
            if len(tokens) == 2:
                turn_versions = np.array([token_versions[0], *token_versions], np.int32)
                turns.append(make_turn([1], tokens, [-0.5, -0.5], turn_versions, None, 0))
                tokens, token_versions = [], []
        return RecordedTrajectory(
            task=start.task,
            key=start.key,
            group=start.group,
            sample=start.sample,
            seconds=0.0,
            turns=tuple(turns),
            tools=("",) * len(turns),
            errors=(False,) * len(turns),
            effect_counts=(0,) * (len(turns) + 1),
            outcome=0.0,
            output=str(turns[-1].tokens[-1]),
        )

    @contextmanager
    def build_reward(self):
        def score_all(tasks, outputs):
            self.before_reward(int(tasks[0].id))
            return [RewardResult(min(2 * int(output) / 255, 1.0)) for output in outputs]  # half of them are solved

        yield Reward(lambda task, output: score_all([task], [output])[0], score_all)

    def master(
        self,
        backend: ThreadBackend,
        plan: Plan,
        folder: Path,
        *,
        every: int = 2,
        notify=lambda _: None,
        choose_task=None,
        **settings,
    ) -> Master:
        sizes = {"rollout_workers": 2, "reward_workers": {f"{REWARD}-any": 2}, "worker_capacity": 2}
        sizes |= {"validation_tasks": 5, "test_tasks": 4}
        make_worker = partial(self.make_worker, every=every)
        cluster_settings = ClusterSettings(**{**sizes, **settings})
        return Master(backend, plan, cluster_settings, make_worker, folder, choose_task=choose_task, notify=notify)


def task(number: int) -> Task:
    return Task(str(number), f"question {number}", ("1",), "numbers")


def pool_of(_: RolloutSlice) -> str:
    return f"{REWARD}-any"


class FakeTrainer:
    """A trainer whose weights are a hash of everything that was trained on, in order."""

    def __init__(self, run: ToyRun, every: int):
        self.run, self.every = run, every
        self.params, self.update, self.is_evaluated = np.zeros(4, np.float64), 0, False
        self.success_rates = task_sampling.NO_RATES
        self.is_busy = self.has_started = False

    def describe(self):
        return {"pid": 1, "host": "here", "address": "here:1"}

    def join_group(self, address):
        assert address == "here:1"

    def build(self):
        assert self.update == 0

    def heartbeat(self):
        return take_heartbeat()

    def start(self) -> TrainerStart:
        self.has_started = True
        saved = self.run.saved
        if saved is not None:
            self.params, self.update, self.is_evaluated = saved["params"], saved["update"], saved["is_evaluated"]
            self.success_rates = saved["success_rates"]
        return TrainerStart(self.update, self.is_eval_due(), saved and saved["memory"], self.success_rates)

    def is_eval_due(self) -> bool:
        return not self.is_evaluated and self.update % self.every == 0

    def weights(self):
        return self.update, self.params

    @contextmanager
    def exclusive(self):
        """Check that no other call is under way, and delay this one."""
        assert self.has_started
        assert not self.is_busy
        self.is_busy = True
        time.sleep(self.run.delays.pop() if self.run.delays else 0)
        yield
        self.is_busy = False

    def train(self, *slices: RolloutSlice):
        with self.exclusive():
            self.run.batches[self.update] = list(slices)
            records = [
                (item.task.id, item.sample, item.outcome, [turn.tokens.tolist() for turn in item.turns])
                for rollout_slice in slices
                for item in rollout_slice.trajectories
            ]
            first = [rollout_slice.trajectories[0] for rollout_slice in slices]
            success = {group: float(trajectory.correct) for group, trajectory in enumerate(first)}
            tasks = [int(trajectory.task.id) for trajectory in first]
            rates = task_sampling.update_rates(self.success_rates, tasks, success)
            changed = {task: rate for task, rate in rates.items() if self.success_rates.get(task) != rate}
            self.success_rates = rates
            digest = hashlib.sha256(repr((self.params.tolist(), records)).encode()).digest()
            self.params = np.frombuffer(digest, np.uint64).astype(np.float64)
            self.update, self.is_evaluated = self.update + 1, False
            return {"version": self.update, "due": self.is_eval_due(), "known": changed} | METRICS, self.params

    def record_evaluation(self, memory, *slices: RolloutSlice):
        with self.exclusive():
            trajectories = [item for rollout_slice in slices for item in rollout_slice.trajectories]
            assert len(trajectories) == 5 * self.run.samples
            assert all(trajectory.reward_result is not None for trajectory in trajectories)
            self.is_evaluated = True
            self.write_checkpoint(memory)
            return {"update": self.update}

    def save(self, memory):
        with self.exclusive():
            self.write_checkpoint(memory)
            return self.update

    def write_checkpoint(self, memory):
        self.run.saved = {
            "params": self.params,
            "update": self.update,
            "memory": memory,
            "success_rates": self.success_rates,
            "is_evaluated": self.is_evaluated,
        }

    def test_params(self):
        return 2, np.zeros(4, np.float64), self.params

    def finish(self, cluster, count, *slices: RolloutSlice):
        before, after = slices[:count], slices[count:]
        assert {version for rollout_slice in before for version in versions(rollout_slice)} == {0}
        assert {version for rollout_slice in after for version in versions(rollout_slice)} == {self.update}
        return {"sha": self.params.tobytes().hex(), "update": self.update, **cluster}
