"""The trainer of a cluster: a `Session` whose trajectories others have played and judged, or which are replayed.

    trainer = ClusterTrainer(config, folder, every=10)
    trainer.open();   trainer.begin();   figures, weights = trainer.train(*stretches)

So updates, checkpoints, metrics and the result are those of a single process, to the bit. `replay_run` makes the
updates of a finished run again from what it recorded (S2).
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

from flowgrpo import launch, loop
from flowgrpo.data.task_sampling import EMPTY
from flowgrpo.distributed import cluster_state, schedule
from flowgrpo.distributed.event_log import read_events
from flowgrpo.distributed.messages import Stretch
from flowgrpo.distributed.worker_pool import Heartbeat, take_heartbeat
from flowgrpo.distributed.workers import TrainerStart, process_and_host
from flowgrpo.recipes import agent
from flowgrpo.recipes.cluster_config import Config
from flowgrpo.recipes.hosted import HostedSetup, compare_before_after, played_metrics, record
from flowgrpo.recipes.hosted_training import HostedWork, learned_from, make_hosted_step
from flowgrpo.report.metrics import Metrics
from flowgrpo.rollout.effects import Journal
from flowgrpo.rollout.hosted import Hosted
from flowgrpo.rollout.records import Played, from_json
from flowgrpo.run.checkpoints import Checkpoints, params_sha256
from flowgrpo.run.kill_series import result_of
from flowgrpo.run.run_dir import START
from flowgrpo.run.session import Session, validation_of, work_folder
from flowgrpo.staged import JudgedRollout, RolloutCallbacks
from flowgrpo.types import BadInput, Ledger

NAME = "cluster"
TOLD = ("update", "success", "seconds", "zero_signal_groups")  # of an update's figures, to the master
LOCKED = 60.0  # seconds in which processes of a master that was killed may still hold the folder


class _RemoteWork(HostedWork):
    """The stages of a run whose rollouts are elsewhere, and whose checkpoints hold what the master knows."""

    remembers = True

    def __init__(self, setup: HostedSetup, recipe: str):
        super().__init__(setup, recipe)
        self.memory = None


class ClusterTrainer:
    """A `Session` whose trajectories others have played and judged; see `workers.Trainer`.

    Several of them are one `jax.distributed` group and make the same calls; the first one writes into the run's folder,
    the others into one of their own, which ends with them.
    """

    def __init__(self, config: Config, folder: Path, every: int, *, rank: int = 0, loggers: Sequence[str] = ()):
        self._config, self._every, self._folder, self._rank = config, every, folder, rank
        self._loggers = loggers
        self._stack = ExitStack()
        self._given = Stretch()
        self._began = time.monotonic()

    def about(self) -> dict[str, Any]:
        """Report its process and host, and the `address` at which the others could meet it."""
        try:
            address = socket.gethostbyname(socket.gethostname())
        except OSError:  # the host's name has none
            address = "127.0.0.1"
        with socket.socket() as found:
            found.bind(("", 0))
            return process_and_host() | {"address": f"{address}:{found.getsockname()[1]}"}

    def meet(self, address: str) -> None:
        """Become one of the group."""
        if self._config.trainer_workers > 1:
            launch.join(address, self._config.trainer_workers, self._rank)
            multihost_utils.sync_global_devices("all are there")  # at once, since they don't wait long for each other

    def open(self) -> None:
        """Make all parts; the first one writes what the others begin with."""
        folder, config = self._folder, self._config
        if self._rank == 0:
            self._stack.enter_context(work_folder(NAME, config, folder, patience=LOCKED))
        self.setup = self._stack.enter_context(agent.open(config, folder))
        self.session = Session(_RemoteWork(self.setup, NAME), folder)
        self._step = make_hosted_step(self.setup, self._roll_out)

    def heartbeat(self) -> Heartbeat:
        """Say how it is; the master knows what it is at."""
        return take_heartbeat()

    def begin(self) -> TrainerStart:
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
        return TrainerStart(update, session.is_due(self._every), memory, known)

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

    def _roll_out(self, run: loop.Run, told: RolloutCallbacks) -> JudgedRollout:
        """Make the rollout of this update from what other workers have played."""
        hosted = Hosted(self._given.played, (), Ledger(), 0, {})
        rolled = learned_from(self.setup, run, hosted)
        told.played(rolled.trajectories)
        return rolled

    def examined(self, memory: Any, *stretches: Stretch) -> dict[str, Any]:
        """The figures of an examination, written down; a checkpoint, which holds the master's memory too."""
        played = _in_order(stretches)
        seen = played_metrics(played, self.setup.env.tools)
        self.session.examined(validation_of(seen), self._metrics, self._remembered(memory))
        update = self._saved()
        if self._rank == 0:
            self.session.progress.say(f"update {update}: validation success {seen.success:.3f}")
        return {"update": update, "success": seen.success}

    def save(self, memory: Any) -> int:
        """Write a checkpoint of an update that was not examined, with the master's memory -> the update."""
        self.session.save(self._remembered(memory))
        return self._saved()

    def _remembered(self, memory: Any) -> Any:
        """The master's memory, with what is known of the tasks where they are chosen."""
        if self.setup.prompts is None:
            return memory
        return memory | {"prompts": self.setup.prompts.saved(int(self.session.run.update))}

    def _saved(self) -> int:
        """Wait until the checkpoint is there, and forget what it covers -> its update."""
        self.session.checkpoints.wait()
        update = int(self.session.run.update)
        if self._rank == 0:
            Journal(self._folder / "journal").forget(update)
        return update

    def candidates(self) -> tuple[int, Any, Any]:
        """The weights of the warm start, and the best ones."""
        if self._rank:
            self.session.checkpoints = Checkpoints(self._folder, best="validation")
        return 2, self._part(self.session.start), self._part(self.session.best_params()[1])

    def finish(self, cluster: Mapping[str, Any], count: int, *stretches: Stretch) -> dict[str, Any]:
        """The table and the result, with what the master has to add."""
        if self._rank:
            return {}
        played = [_in_order(stretches[:count]), _in_order(stretches[count:])]
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


def renumbered(stretches: tuple[Stretch, ...]) -> Stretch:
    """One batch of groups, numbered as they come."""
    numbers: dict[tuple[int, int], int] = {}
    played = []
    for index, stretch in enumerate(stretches):
        for one in stretch.played:
            group = numbers.setdefault((index, one.group), len(numbers))
            played.append(replace(one, group=group))
    return Stretch(tuple(played))


def _in_order(stretches: tuple[Stretch, ...]) -> list[Played]:
    """The trajectories of an examination, in the order of its tasks."""
    return sorted((one for stretch in stretches for one in stretch.played), key=lambda one: (one.group, one.sample))


def replay_run(folder: Path, config: Config, plan: schedule.Plan) -> dict[str, Any]:
    """Its updates again -> what came of them, and whether that is what the run had come to."""
    batches = sorted((folder / "batches").glob("*.jsonl"))
    if not batches:
        raise BadInput(f"{folder} has no batches/: give the work directory of a cluster's run")
    events = replay_schedule(folder / "events.jsonl", plan)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / START).symlink_to((folder / START).absolute())
        trainer = ClusterTrainer(replace(config, trainer_workers=1), Path(scratch), every=10**9)
        trainer.open()
        trainer.begin()
        for path in batches:
            figures, _ = trainer.train(Stretch(tuple(from_json(line) for line in path.read_text().splitlines())))
            print(f"update {figures['update']} of {len(batches)}: success {figures['success']:.3f}", flush=True)
        sha = params_sha256(trainer.session.run.learner.params)
        trainer.close()
    there = result_of(folder)["params_sha256"]
    return {"updates": len(batches), "events": events, "params_sha256": sha, "there": there, "same": sha == there}


def replay_schedule(path: Path, plan: schedule.Plan) -> int:
    """Send the events through the schedule again, which must give the updates that were made -> how many there were.

    If the run went back to a checkpoint, the schedule did too: its state then is not in the log, and the events from
    there on are taken up where the log says with which groups.
    """
    state, there, again, count = cluster_state.ClusterState(), [], [], 0
    for line in read_events(path):
        if line["what"] == "resumed" and (line["update"] or count):
            return count  # checked as far as one process went
        if line["what"] == "event":
            count += 1
            state, commands = schedule.advance(plan, state, schedule.Event(**line["event"]))
            again += [list(command.groups) for command in commands if command.kind == "train"]
        elif line["what"] == "train":
            there.append(line["groups"])
    if again[: len(there)] != there:
        raise BadInput(f"{path} tells of other updates than its events lead to: it was written by another version")
    return count
