"""A cluster of threads for tests: calls that can be lost or hang, and a run whose bits any fault would change."""

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

from flowgrpo.contracts import Completion, Reward, Scored
from flowgrpo.data import task_sampling
from flowgrpo.distributed.master import Master
from flowgrpo.distributed.messages import Order, Stretch, versions
from flowgrpo.distributed.ray_backend import Lost
from flowgrpo.distributed.schedule import REWARD, ROLLOUT, TRAIN, Plan
from flowgrpo.distributed.worker_pool import PoolShape, take_heartbeat
from flowgrpo.distributed.workers import Player, RewardWorker, RolloutWorker, TrainerStart
from flowgrpo.rollout import records
from flowgrpo.rollout.records import Played, Unfinished, make_turn
from flowgrpo.run.time_budget import ENDLESS
from flowgrpo.types import Task

FIGURES = {"success": 0.5, "zero_signal_groups": 0.25}  # of every update


class Ref:
    """Something that will be there."""

    def __init__(self):
        self.value: Any = None
        self.error: BaseException | None = None
        self.there = threading.Event()

    def get(self) -> Any:
        self.there.wait()
        if self.error is not None:
            raise self.error
        return self.value


class ThreadBackend:
    """Stand-in for `RayBackend`, in threads; a killed worker answers no open call, whatever it goes on doing."""

    def __init__(self, before: Callable[[str, str, int], None] = lambda *_: None):
        """`before(worker, method, calls)` runs in the worker's thread before each call, and may raise or hang."""
        self.before, self.workers, self.jobs, self.open = before, {}, {}, {}
        self.changed: queue.SimpleQueue = queue.SimpleQueue()
        self.calls, self.started = 0, []

    def start(self, name: str, make: Callable[[], Any], *, threads: int) -> None:
        """The threads end with the process: one of a killed worker may wait for ever."""
        self.started.append(name)
        jobs = self.jobs[name] = queue.SimpleQueue()
        self.open[name] = set()
        made = self.workers[name] = Future()
        jobs.put(partial(_settle, made, make))
        for _ in range(threads):
            threading.Thread(target=_do_all, args=(jobs,), daemon=True).start()

    def call(self, name: str, method: str, *given: Any, returns: int = 1) -> tuple[Ref, ...]:
        refs = tuple(Ref() for _ in range(returns))
        self.open[name].add(refs)
        self.calls += 1
        self.jobs[name].put(partial(self._run, name, self.workers[name], method, given, refs, self.calls))
        return refs

    def _run(self, name, worker, method, given, refs, count) -> None:
        values, error = [None] * len(refs), None
        try:
            self.before(name, method, count)
            value = getattr(worker.result(), method)(*[x.get() if isinstance(x, Ref) else x for x in given])
            values = [value] if len(refs) == 1 else list(value)
        except BaseException as raised:
            error = raised
        self._settle(name, refs, values, error)

    def _settle(self, name, refs, values, error) -> None:
        if refs in self.open[name]:
            self.open[name].discard(refs)
            for ref, value in zip(refs, values, strict=True):
                ref.value, ref.error = value, error
                ref.there.set()
            self.changed.put(None)

    def wait(self, refs: Sequence[Ref], seconds: float) -> list[Ref]:
        until = time.monotonic() + seconds
        while not (done := [ref for ref in refs if ref.there.is_set()]):
            try:
                self.changed.get(timeout=max(until - time.monotonic(), 0))
            except queue.Empty:
                return []
        return done

    def get(self, ref: Ref) -> Any:
        return ref.get()

    def kill(self, name: str) -> None:
        for refs in list(self.open[name]):
            self._settle(name, refs, [None] * len(refs), Lost("killed"))


def _settle(made: Future, make: Callable[[], Any]) -> None:
    try:
        made.set_result(make())
    except BaseException as raised:
        made.set_exception(raised)


def _do_all(jobs: queue.SimpleQueue) -> None:
    while True:
        jobs.get()()


class Work:
    """A run of numbers: what was played and judged decides what the weights become, to the last bit."""

    def __init__(self, *, turns: int = 3, samples: int = 2, hangs: Callable[[int], None] = lambda _: None):
        self.turns, self.samples, self.hangs = turns, samples, hangs
        self.saved: dict[str, Any] | None = None  # the checkpoint
        self.batches: dict[int, list[Stretch]] = {}
        self.slow: list[float] = []  # seconds of the next calls of trainers

    def make(self, pool: str, name: str, *, every: int) -> Callable[[], Any]:
        del name
        if pool == TRAIN:
            return partial(FakeTrainer, self, every)
        if pool == ROLLOUT:
            return partial(RolloutWorker, self.open_player)
        return partial(RewardWorker, self.open_reward)

    @contextmanager
    def open_player(self):
        held: dict[str, Any] = {}
        yield Player(
            lambda params, version: held.update(params=params, version=version), partial(self.play, held), pool_of
        )

    def play(self, held: dict[str, Any], order: Order, begun: Stretch, on_start) -> Stretch:
        on_start(lambda: [f"groups {order.numbers}"])
        played = list(begun.played)
        if begun.unfinished:
            ends = [self.go_on(held, one, order.budget) for one in begun.unfinished]
        else:
            news = [
                Unfinished(task(n if order.task is None else order.task), (n, i), n, i, (), (), (), (), (), 0.0)
                for n in order.numbers
                for i in range(self.samples)
            ]
            ends = [self.go_on(held, one, order.budget) for one in news]
        unfinished = [one for one in ends if isinstance(one, Unfinished)]
        played += [one for one in ends if isinstance(one, Played)]
        played.sort(key=lambda one: (one.group, one.sample))
        return Stretch(tuple(played), tuple(unfinished))

    def go_on(self, held, one: Unfinished, budget: int | None) -> Played | Unfinished:
        """A trajectory of a few turns, as many as its key says; each token follows from key and weights."""
        turns, said, begun = list(one.turns), 0, [] if one.begun is None else list(one.begun.sampled.tokens)
        chose = [] if one.begun is None else list(one.begun.sampled.version)
        while len(turns) < self.turns + one.sample % 2 + 2 * (one.group % 2):
            if budget is not None and said == budget:
                sampled = Completion(begun, [-0.5] * len(begun), chose, "budget")
                cut = records.CutAction((1,), 0, sampled) if begun else None
                marks = {"tools": ("",) * len(turns), "errors": (False,) * len(turns)}
                return replace(one, turns=tuple(turns), lens=(0,) * (len(turns) + 1), begun=cut, **marks)
            digest = hashlib.sha256(f"{one.key} {len(turns)} {held['params'].tobytes().hex()}".encode()).digest()
            begun, chose, said = [*begun, digest[len(begun)]], [*chose, held["version"]], said + 1
            if len(begun) == 2:
                turns.append(make_turn([1], begun, [-0.5, -0.5], np.array([chose[0], *chose], np.int32), None, 0))
                begun, chose = [], []
        marks = {"tools": ("",) * len(turns), "errors": (False,) * len(turns), "lens": (0,) * (len(turns) + 1)}
        fields = {"task": one.task, "key": one.key, "group": one.group, "sample": one.sample, "seconds": 0.0} | marks
        return Played(**fields, turns=tuple(turns), outcome=0.0, output=str(turns[-1].tokens[-1]))

    @contextmanager
    def open_reward(self):
        def many(tasks, outputs):
            self.hangs(int(tasks[0].id))
            return [Scored(min(2 * int(output) / 255, 1.0)) for output in outputs]  # of which half are solved

        yield Reward(lambda task, output: many([task], [output])[0], many)

    def master(
        self,
        backend: ThreadBackend,
        plan: Plan,
        folder: Path,
        *,
        tell=lambda _: None,
        choose=None,
        budget=ENDLESS,
        **shape,
    ) -> Master:
        sizes = {"rollout": 2, "rewards": {f"{REWARD}-any": 2}, "room": 2, "validation_tasks": 5, "test_tasks": 4}
        make = partial(self.make, every=shape.pop("every", 2))
        given = {"tell": tell, "choose": choose, "budget": budget}
        return Master(backend, plan, PoolShape(**{**sizes, **shape}), make, folder, **given)


def task(number: int) -> Task:
    return Task(str(number), f"question {number}", ("1",), "numbers")


def pool_of(_: Stretch) -> str:
    return f"{REWARD}-any"


class FakeTrainer:
    """Weights that are a hash of all that was learned, in order."""

    def __init__(self, work: Work, every: int):
        self.work, self.every = work, every
        self.params, self.update, self.seen = np.zeros(4, np.float64), 0, False
        self.known = self.news = task_sampling.EMPTY
        self.busy = self.begun = False

    def about(self):
        return {"pid": 1, "host": "here", "address": "here:1"}

    def meet(self, address):
        assert address == "here:1"

    def open(self):
        assert self.update == 0

    def heartbeat(self):
        return take_heartbeat()

    def begin(self) -> TrainerStart:
        self.begun = True
        saved = self.work.saved
        if saved is not None:
            self.params, self.update, self.seen = saved["params"], saved["update"], saved["seen"]
            self.known = saved["known"]
        return TrainerStart(self.update, self.is_due(), saved and saved["memory"], self.known)

    def is_due(self) -> bool:
        return not self.seen and self.update % self.every == 0

    def weights(self):
        return self.update, self.params

    @contextmanager
    def alone(self):
        """One call at a time, however long this one takes."""
        assert self.begun
        assert not self.busy
        self.busy = True
        time.sleep(self.work.slow.pop() if self.work.slow else 0)
        yield
        self.busy = False

    def train(self, *stretches: Stretch):
        with self.alone():
            return self.learn(*stretches)

    def learn(self, *stretches: Stretch):
        self.work.batches[self.update] = list(stretches)
        said = [
            (one.task.id, one.sample, one.outcome, [turn.tokens.tolist() for turn in one.turns])
            for stretch in stretches
            for one in stretch.played
        ]
        first = [stretch.played[0] for stretch in stretches]
        success = {group: float(one.correct) for group, one in enumerate(first)}
        after = task_sampling.update_known(self.known, [int(one.task.id) for one in first], success)
        self.news = {number: share for number, share in after.items() if self.known.get(number) != share}
        self.known = after
        digest = hashlib.sha256(repr((self.params.tolist(), said)).encode()).digest()
        self.params = np.frombuffer(digest, np.uint64).astype(np.float64)
        self.update, self.seen = self.update + 1, False
        return {"version": self.update, "due": self.is_due(), "known": self.news} | FIGURES, self.params

    def examined(self, memory, *stretches: Stretch):
        with self.alone():
            return self.note(memory, *stretches)

    def note(self, memory, *stretches: Stretch):
        assert sum(len(stretch.played) for stretch in stretches) == 5 * self.work.samples
        assert all(one.scored is not None for stretch in stretches for one in stretch.played)
        self.seen = True
        self.keep(memory)
        return {"update": self.update}

    def save(self, memory):
        with self.alone():
            self.keep(memory)
            return self.update

    def keep(self, memory):
        self.work.saved = {"params": self.params, "update": self.update, "memory": memory, "known": self.known}
        self.work.saved["seen"] = self.seen

    def candidates(self):
        return 2, np.zeros(4, np.float64), self.params

    def finish(self, cluster, count, *stretches: Stretch):
        before, after = stretches[:count], stretches[count:]
        assert {version for stretch in before for version in versions(stretch)} == {0}
        assert {version for stretch in after for version in versions(stretch)} == {self.update}
        return {"sha": self.params.tobytes().hex(), "update": self.update, **cluster}
