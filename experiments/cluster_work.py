"""What the workers of a cluster run: the parts of a hosted run, each opened in a process of its own.

    make = partial(make_worker, settings=settings, folder=folder, every=10)
    Master(crew, plan, shape, exams, make, folder).run()

Rollout workers play a group under the keys that a single process would give it; reward workers judge it; trainers are a
`Session`, whose trajectories come from the others. So the same run comes out, wherever its parts were done.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments import agent_setups
from experiments.hosted_work import (
    HostedSetup,
    compare_before_after,
    exam_key,
    hosted_work,
    judge,
    keys_of_group,
    learned_from,
    make_rollout,
    make_step,
    record,
    run_key,
)
from experiments.session import MAY_DIFFER, Session
from flowgrpo import launch, loop
from flowgrpo.distributed.orders import Order, Stretch, pack_stretch
from flowgrpo.distributed.workers import Begun, Judge, Player, RewardWorker, RolloutWorker, about
from flowgrpo.learner.checkpoint import Checkpoints
from flowgrpo.learner.folder import run_folder
from flowgrpo.report.metrics import Metrics
from flowgrpo.rollout.hosted import Hosted
from flowgrpo.rollout.journal import Journal
from flowgrpo.rollout.records import Played, aborted
from flowgrpo.schedule import REWARD, ROLLOUT, TRAIN
from flowgrpo.staged import Rolled, Told
from flowgrpo.types import BadInput, Ledger

LOCKED = 60.0  # seconds in which processes of a master that was killed may still hold the folder
ANY = "any"  # the domain whose reward workers judge what no others do


def make_worker(pool: str, name: str, *, settings: Mapping[str, Any], folder: Path, every: int) -> Callable[[], Any]:
    """What makes the worker of this name in its own process."""
    opens = {"settings": dict(settings), "folder": folder}
    if pool == TRAIN:
        return partial(_trainer, **opens, every=every, rank=int(name.rpartition("-")[2]))
    kind = _rollout_worker if pool == ROLLOUT else _reward_worker
    return partial(kind, **opens)


def _rollout_worker(settings: Mapping[str, Any], folder: Path) -> RolloutWorker:
    _configure(settings)
    return RolloutWorker(partial(open_player, {**settings, "mesh": None}, folder))  # which is the trainers'


def _reward_worker(settings: Mapping[str, Any], folder: Path) -> RewardWorker:
    del folder
    _configure(settings)
    return RewardWorker(partial(open_judge, settings))


def _trainer(settings: Mapping[str, Any], folder: Path, every: int, rank: int) -> "ClusterTrainer":
    if settings["trainer_workers"] > 1:  # each is a device, as in a process that has several
        os.environ["XLA_FLAGS"] = launch.add_flags(os.environ.get("XLA_FLAGS", ""), [launch.ONE_THREAD])
    _configure(settings)
    return ClusterTrainer(settings, folder, every, rank=rank)


def _configure(settings: Mapping[str, Any]) -> None:
    """JAX in a worker's process, as the command's own flags have it."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    launch.configure(compilation_cache=settings["compilation_cache"], deterministic=settings["deterministic"])


# Rollout workers --------------------------------------------------------------------------------------------


@contextmanager
def open_player(settings: Mapping[str, Any], folder: Path) -> Iterator[Player]:
    """What plays orders over an engine of its own."""
    with agent_setups.open_setup(settings, folder) as setup:
        yield player_of(setup)


def player_of(setup: HostedSetup) -> Player:
    """The same of parts that are open."""
    return Player(
        load=partial(_load, setup), play=partial(_play, setup), pool=partial(_pool, setup.settings["reward_workers"])
    )


def _load(setup: HostedSetup, part: Any, version: int) -> None:
    planner = setup.planner
    setup.engine.swap(planner.serve(planner.trained.put(planner.params, jax.device_put(part))), version)


def _pool(workers: Mapping[str, int], stretch: Stretch) -> str:
    """The reward workers of its domain, or those for what has none of its own."""
    domain = stretch.played[0].task.domain
    return pool_of(domain if domain in workers else ANY)


def pool_of(domain: str) -> str:
    """The name of the pool that judges a domain."""
    return f"{REWARD}-{domain}"


def _play(setup: HostedSetup, order: Order, begun: Stretch, on_start) -> Stretch:
    """Groups of an update, or tasks of an examination; what had begun goes on."""
    if order.kind != "train":
        return _play_exam(setup, order, on_start)
    sizes, (number,) = setup.sizes, order.numbers
    groups = sizes.queries * sizes.oversample
    update, index = divmod(number, groups)
    journal = Journal(setup.folder / "journal", update)
    rollout = make_rollout(setup, setup.env, do=journal.effects(setup.do), reward=None)
    more = {"unfinished": begun.unfinished, "budget": order.budget, "on_start": on_start}
    with journal.at(f"group-{number}", update):
        if begun.played or begun.unfinished:
            found = rollout((), (), (), **more)
        else:
            keys = keys_of_group(run_key(setup), update, index, groups=groups, samples=sizes.samples)
            tasks = setup.tasks("train", number, 1) * sizes.samples
            found = rollout(tasks, keys, np.full(len(tasks), index), **more)
    return _stretch(begun, found, goes_on=order.budget is not None)


def _stretch(begun: Stretch, found: Hosted, *, goes_on: bool) -> Stretch:
    """All that has ended, in the order of samples; what nobody will resume has no outcome."""
    late = [] if goes_on else found.unfinished
    ended = [aborted(one, "its group's deadline passed while it waited for the engine") for one in late]
    every = sorted([*begun.played, *found.played, *ended], key=lambda one: (one.group, one.sample))
    return Stretch(tuple(every), found.unfinished if goes_on else ())


def _play_exam(setup: HostedSetup, order: Order, on_start) -> Stretch:
    split = order.kind.partition("-")[0]
    keys = jax.random.split(exam_key(setup, split), setup.settings[f"{split}_tasks"])
    tasks = [setup.tasks(split, number, 1)[0] for number in order.numbers]
    rollout = make_rollout(setup, setup.exam_env, do=setup.do, reward=None)
    found = rollout(tasks, keys[np.array(order.numbers)], order.numbers, on_start=on_start)
    return _stretch(Stretch(), found, goes_on=False)


# Reward workers ---------------------------------------------------------------------------------------------


@contextmanager
def open_judge(settings: Mapping[str, Any]) -> Iterator[Judge]:
    """The rewards of a run, without its models."""
    with agent_setups.open_reward(settings) as reward:
        yield Judge(reward, HostedSetup._field_defaults["solved"])


# Trainers ---------------------------------------------------------------------------------------------------


class ClusterTrainer:
    """A `Session` whose trajectories others have played and judged; see `workers.Trainer`.

    Several of them are one `jax.distributed` group and make the same calls; the first one writes into the run's folder,
    the others into one of their own, which ends with them.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path, every: int, *, rank: int = 0):
        self._settings, self._every, self._folder, self._rank = dict(settings), every, folder, rank
        self._stack = ExitStack()
        self._given = Stretch()
        self._began = time.monotonic()

    def about(self) -> dict[str, Any]:
        """Where it runs, and where the others could meet it."""
        return about() | {"address": f"{_own_address()}:{_free_port()}"}

    def meet(self, address: str) -> None:
        """Become one of the group."""
        if self._settings["trainer_workers"] > 1:
            launch.join(address, self._settings["trainer_workers"], self._rank)
            multihost_utils.sync_global_devices("all are there")  # at once, since they don't wait long for each other

    def open(self) -> None:
        """Make all parts; the first one writes what the others begin with."""
        folder = self._folder
        settings = self._settings | {"devices": jax.device_count()}
        if self._rank == 0:
            self._stack.enter_context(_own_folder(folder, recorded(settings)))
        self.setup = self._stack.enter_context(agent_setups.open_setup(settings, folder))
        work = hosted_work(self.setup)._replace(settings=recorded(settings), remembers=True)
        self.session = Session(work, folder)
        self._step = make_step(self.setup, self._roll_out)

    def pending(self) -> list[str]:
        """What is under way, in words; the master knows it."""
        return []

    def begin(self) -> Begun:
        """From the checkpoint, or from the warm start."""
        session, own = self.session, self._folder
        if session.restore() and self._rank == 0:
            session.progress.say(f"going on at update {int(session.run.update)} of {self._folder}")
        if self._rank:
            own = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            session.folder, session.checkpoints = own, Checkpoints(own, keep=1, background=True)
        self._metrics = self._stack.enter_context(
            Metrics(own, session.at and session.at.position if own is self._folder else None)
        )
        self._stack.enter_context(session.checkpoints)
        if session.at is None:
            session.warm_start(self._metrics)
        return Begun(int(session.run.update), session.is_due(self._every), session.memory)

    def weights(self) -> tuple[int, Any]:
        """The version, and what is trained, on the host."""
        learner = self.session.run.learner
        return int(learner.version), self._part(learner.params)

    def _part(self, params: Any) -> Any:
        """What is trained, on the host; whole, where it is divided among processes."""
        return jax.tree.map(_on_host, self.setup.planner.trained.take(params))

    def train(self, *stretches: Stretch) -> tuple[dict[str, Any], Any]:
        """One update from these groups, which are recorded whole; its figures, and the weights after it."""
        self._given = renumbered(stretches)
        update = int(self.session.run.update) + 1
        path = self.session.folder / "batches" / f"{update:06d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(pack_stretch(self._given))
        figures = self.session.advance(self._step, self._metrics)
        version, weights = self.weights()
        told = {name: figures[name] for name in ("update", "success", "seconds") if name in figures}
        return {**told, "version": version, "due": self.session.is_due(self._every)}, weights

    def _roll_out(self, run: loop.Run, told: Told) -> Rolled:
        """What others have played, as the rollout of this update."""
        hosted = Hosted(self._given.played, (), Ledger(), 0, {})
        rolled = learned_from(self.setup, run, hosted)
        told.played(rolled.rollout.trajectories)
        return rolled

    def examined(self, memory: Any, *stretches: Stretch) -> dict[str, Any]:
        """The figures of an examination, written down; a checkpoint, which holds the master's memory too."""
        played = in_order(stretches)
        seen = judge(played, self.setup.env.tools)
        self.session.examined(seen, self._metrics, memory)
        self.session.checkpoints.wait()
        update = int(self.session.run.update)
        if self._rank == 0:
            Journal(self._folder / "journal").forget(update)
            self.session.progress.say(f"update {update}: validation success {seen.success:.3f}")
        return {"update": update, "success": seen.success}

    def candidates(self) -> tuple[int, Any, Any]:
        """The weights of the warm start, and the best ones."""
        if self._rank:
            self.session.checkpoints = Checkpoints(self._folder, best="validation")
        return 2, self._part(self.session.start), self._part(self.session.best_params()[1])

    def finish(self, cluster: Mapping[str, Any], count: int, *stretches: Stretch) -> dict[str, Any]:
        """The table and the result, with what the master has to add."""
        if self._rank:
            return {}
        played = [in_order(stretches[:count]), in_order(stretches[count:])]
        for when, own in zip(("before", "after"), played, strict=True):
            record(self._folder / "trajectories" / f"test-{when}.jsonl", own)
        tested = compare_before_after(self.setup, played)
        tested = tested._replace(more={**tested.more, **cluster})
        result = self.session.finish((time.monotonic() - self._began) / 60, tested)
        self.close()
        return result

    def close(self) -> None:
        """Leave the folder."""
        self._stack.close()


def _on_host(x: Any) -> Any:
    whole = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
    return jax.device_get(x) if whole else multihost_utils.process_allgather(x, tiled=True)


def _own_address() -> str:
    """Where other hosts reach this one."""
    host = socket.gethostname()
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def recorded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the bits of a run depend on: those of its workers are not among them."""
    return {name: value for name, value in settings.items() if name not in ("compilation_cache", "reward_workers")}


def renumbered(stretches: tuple[Stretch, ...]) -> Stretch:
    """One batch of groups, numbered as they come."""
    numbers: dict[tuple[int, int], int] = {}
    played = []
    for index, stretch in enumerate(stretches):
        for one in stretch.played:
            group = numbers.setdefault((index, one.group), len(numbers))
            played.append(replace(one, group=group, trajectory=replace(one.trajectory, group=group)))
    return Stretch(tuple(played))


def in_order(stretches: tuple[Stretch, ...]) -> list[Played]:
    """The trajectories of an examination, in the order of its tasks."""
    return sorted((one for stretch in stretches for one in stretch.played), key=lambda one: (one.group, one.sample))


@contextmanager
def _own_folder(folder: Path, settings: Mapping[str, Any]) -> Iterator[Path]:
    """The run's folder, once the processes of a master that was killed have left it."""
    until = time.monotonic() + LOCKED
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(run_folder(folder, dict(settings), may_differ=MAY_DIFFER))
                break
            except BadInput as error:
                if "another process works in" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.5)
        yield folder
