"""The trainer of a cluster: a `Session` whose trajectories others have played and judged.

    trainer = ClusterTrainer(settings, folder, every=10)
    trainer.open();   trainer.begin();   figures, weights = trainer.train(*stretches)

So updates, checkpoints, metrics and the result are those of a single process, to the bit.
"""

import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from experiments import agent_setups
from experiments.hosted_exam import compare_before_after, judge
from experiments.hosted_setup import record
from experiments.hosted_work import hosted_work, learned_from, make_step
from experiments.session import MAY_DIFFER, Session
from flowgrpo import launch, loop
from flowgrpo.distributed.orders import Stretch
from flowgrpo.distributed.pulse import Pulse, take_pulse
from flowgrpo.distributed.workers import Begun, about
from flowgrpo.learner.checkpoint import Checkpoints
from flowgrpo.learner.folder import run_folder
from flowgrpo.priorities import EMPTY
from flowgrpo.report.metrics import Metrics
from flowgrpo.rollout.hosted import Hosted
from flowgrpo.rollout.journal import Journal
from flowgrpo.rollout.records import Played
from flowgrpo.staged import Rolled, Told
from flowgrpo.types import Ledger

TOLD = ("update", "success", "seconds", "zero_signal_groups")  # of an update's figures, to the master
LOCKED = 60.0  # seconds in which processes of a master that was killed may still hold the folder


class ClusterTrainer:
    """A `Session` whose trajectories others have played and judged; see `workers.Trainer`.

    Several of them are one `jax.distributed` group and make the same calls; the first one writes into the run's folder,
    the others into one of their own, which ends with them.
    """

    def __init__(
        self, settings: Mapping[str, Any], folder: Path, every: int, *, rank: int = 0, loggers: Sequence[str] = ()
    ):
        self._settings, self._every, self._folder, self._rank = dict(settings), every, folder, rank
        self._loggers = loggers
        self._stack = ExitStack()
        self._given = Stretch()
        self._began = time.monotonic()

    def about(self) -> dict[str, Any]:
        """Report its process and host, and the `address` at which the others could meet it."""
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
            own = run_folder(folder, recorded(settings), may_differ=MAY_DIFFER, patience=LOCKED)
            self._stack.enter_context(own)
        self.setup = self._stack.enter_context(agent_setups.open_setup(settings, folder))
        work = hosted_work(self.setup)._replace(settings=recorded(settings), remembers=True, memory=None)
        self.session = Session(work, folder)
        self._step = make_step(self.setup, self._roll_out)

    def pulse(self) -> Pulse:
        """How it is; the master knows what it is at."""
        return take_pulse()

    def begin(self) -> Begun:
        """From the checkpoint, or from the warm start."""
        session = self.session
        if session.restore() and self._rank == 0:
            session.progress.say(f"going on at update {int(session.run.update)} of {self._folder}")
        if self._rank:
            own = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            session.folder, session.checkpoints = own, Checkpoints(own, keep=1, background=True)
        self._metrics = self._stack.enter_context(Metrics(own) if self._rank else session.open_metrics(self._loggers))
        self._stack.enter_context(session.checkpoints)
        if session.at is None:
            session.warm_start(self._metrics)
        update, prompts, memory = int(session.run.update), self.setup.prompts, session.memory
        if prompts is not None and memory is not None:
            prompts.restore(update, memory["prompts"])
        known = EMPTY if prompts is None else prompts.known(update)
        return Begun(update, session.is_due(self._every), memory, known)

    def weights(self) -> tuple[int, Any]:
        """The version, and what is trained, on the host."""
        learner = self.session.run.learner
        return int(learner.version), self._part(learner.params)

    def _part(self, params: Any) -> Any:
        """Copy what is trained to the host; whole, where it is divided among processes."""
        return jax.tree.map(_on_host, self.setup.planner.trained.take(params))

    def train(self, *stretches: Stretch) -> tuple[dict[str, Any], Any]:
        """One update from these groups, which are recorded whole; its figures, and the weights after it."""
        self._given = renumbered(stretches)
        update = int(self.session.run.update) + 1
        record(self.session.folder / "batches" / f"{update:06d}.jsonl", self._given.played)
        figures = self.session.advance(self._step, self._metrics)
        version, weights = self.weights()
        told = {name: figures[name] for name in TOLD if name in figures}
        known = EMPTY if self.setup.prompts is None else self.setup.prompts.shown(update - 1)
        return {**told, "version": version, "due": self.session.is_due(self._every), "known": known}, weights

    def _roll_out(self, run: loop.Run, told: Told) -> Rolled:
        """Make the rollout of this update from what other workers have played."""
        hosted = Hosted(self._given.played, (), Ledger(), 0, {})
        rolled = learned_from(self.setup, run, hosted)
        told.played(rolled.rollout.trajectories)
        return rolled

    def examined(self, memory: Any, *stretches: Stretch) -> dict[str, Any]:
        """The figures of an examination, written down; a checkpoint, which holds the master's memory too."""
        if self.setup.prompts is not None:
            memory = memory | {"prompts": self.setup.prompts.saved(int(self.session.run.update))}
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
    """Look up the address at which other hosts reach this one; 127.0.0.1 where its name has none."""
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
