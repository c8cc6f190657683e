"""The trainer of a cluster: a `Session` whose trajectories come from other workers, or from the records of a run.

    trainer = ClusterTrainer(config, folder, every=10)
    trainer.build();   trainer.start();   metrics, weights = trainer.train(*slices)

So updates, checkpoints, metrics and the result equal those of a single process, bit for bit. `replay_run` repeats the
updates of a finished run from its records (S2).
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

from flowgrpo import launch
from flowgrpo.data.task_sampling import NO_RATES
from flowgrpo.distributed import cluster_state, schedule
from flowgrpo.distributed.event_log import read_events
from flowgrpo.distributed.messages import RolloutSlice
from flowgrpo.distributed.worker_pool import Heartbeat, take_heartbeat
from flowgrpo.distributed.workers import TrainerStart, process_and_host
from flowgrpo.recipes import agent
from flowgrpo.recipes.cluster_config import Config
from flowgrpo.report.metrics import MetricsWriter
from flowgrpo.rollout.effects import EffectLog
from flowgrpo.rollout.records import RecordedTrajectory, RolloutResult, from_json
from flowgrpo.training.checkpoints import Checkpoints, params_sha256
from flowgrpo.training.hosted_training import HostedTrainable, make_hosted_iteration, to_judged_rollout
from flowgrpo.training.iteration import Rollout, RolloutCallbacks
from flowgrpo.training.kill_series import result_of
from flowgrpo.training.language_model import (
    HostedSetup,
    compare_before_after,
    evaluate_trajectories,
    write_trajectories,
)
from flowgrpo.training.run_dir import START
from flowgrpo.training.session import Session, trainable_folder, validation_of
from flowgrpo.training.stages import TrainState
from flowgrpo.types import JSON, BadInput, Ledger, Metrics, Params, PyTree

NAME = "cluster"
MASTER_METRICS = ("update", "success", "seconds", "zero_signal_groups")  # of an update, sent to the master
LOCK_TIMEOUT = 60.0  # seconds for which processes of a killed master may still lock the folder


class _RemoteRolloutTrainable(HostedTrainable):
    """The stages of a run whose rollouts are made elsewhere, and whose checkpoints contain the master's state."""

    has_extra_state = True

    def __init__(self, setup: HostedSetup, recipe: str):
        super().__init__(setup, recipe)
        self.extra_state = None


class ClusterTrainer:
    """A `Session` whose trajectories come from other workers; the master calls its methods.

    Several trainers are one `jax.distributed` group and make the same calls. The first one writes into the run's
    folder, the others into temporary folders of their own.
    """

    def __init__(self, config: Config, folder: Path, every: int, *, rank: int = 0, loggers: Sequence[str] = ()):
        """Build nothing yet; `build` does.

        Args:
            config: settings of the run.
            folder: of the run.
            every: updates between validations and checkpoints.
            rank: number of this trainer in its group.
            loggers: names of loggers for metrics.
        """
        self._config, self._every, self._folder, self._rank = config, every, folder, rank
        self._loggers = loggers
        self._stack = ExitStack()
        self._batch = RolloutSlice()
        self._started_at = time.monotonic()

    def describe(self) -> dict[str, JSON]:
        """Process id and host, and the `address` at which the other trainers can join it."""
        try:
            address = socket.gethostbyname(socket.gethostname())
        except OSError:  # the host's name has no address
            address = "127.0.0.1"
        with socket.socket() as free:
            free.bind(("", 0))
            return process_and_host() | {"address": f"{address}:{free.getsockname()[1]}"}

    def join_group(self, address: str) -> None:
        """Join the group of trainers, if there are several."""
        if self._config.cluster.trainer_workers > 1:
            launch.join(address, self._config.cluster.trainer_workers, self._rank)
            multihost_utils.sync_global_devices("all have joined")  # at once, since their timeout is short

    def build(self) -> None:
        """Make all parts; the first trainer writes what the others start with."""
        folder, config = self._folder, self._config
        if self._rank == 0:
            self._stack.enter_context(trainable_folder(NAME, config, folder, lock_timeout=LOCK_TIMEOUT))
        self.setup = self._stack.enter_context(agent.build(config, folder))
        self.session = Session(_RemoteRolloutTrainable(self.setup, NAME), folder)
        self._step = make_hosted_iteration(self.setup, self._roll_out)

    def heartbeat(self) -> Heartbeat:
        """State of this process; the master knows what it is doing."""
        return take_heartbeat()

    def start(self) -> TrainerStart:
        """Start from the checkpoint, or else from the warm start."""
        session = self.session
        if session.restore() and self._rank == 0:
            session.progress.log(f"resuming at update {int(session.state.update)} of {self._folder}")
        if self._rank:
            own_folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            session.folder, session.checkpoints = own_folder, Checkpoints(own_folder, keep=1, background=True)
            self._metrics = self._stack.enter_context(MetricsWriter(own_folder))
        else:
            self._metrics = self._stack.enter_context(session.open_metrics(self._loggers))
        self._stack.enter_context(session.checkpoints)
        if session.snapshot is None:
            session.warm_start(self._metrics)
        update, sampler, master_state = int(session.state.update), self.setup.task_sampler, session.extra_state
        if sampler is not None and master_state is not None:
            sampler.restore(update, master_state["prompts"])
        rates = NO_RATES if sampler is None else sampler.rates(update)
        return TrainerStart(update, session.is_validation_due(self._every), master_state, rates)

    def weights(self) -> tuple[int, Params]:
        """The version, and the trained parameters on the host."""
        learner = self.session.state.learner
        return int(learner.version), self._to_host(learner.params)

    def _to_host(self, params: Params) -> Params:
        """Copy the trained parameters to the host, gathered if they are sharded over processes."""

        def copy(x: Any) -> Any:
            is_whole = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
            return jax.device_get(x) if is_whole else multihost_utils.process_allgather(x, tiled=True)

        return jax.tree.map(copy, self.setup.planner.trainable.split(params))

    def train(self, *slices: RolloutSlice) -> tuple[Metrics, Params]:
        """One update from these groups, all of which are recorded -> metrics for the master, and the new weights."""
        self._batch = renumber_groups(slices)
        update = int(self.session.state.update) + 1
        write_trajectories(self.session.folder / "batches" / f"{update:06d}.jsonl", self._batch.trajectories)
        metrics = self.session.run_update(self._step, self._metrics)
        version, weights = self.weights()
        sampler = self.setup.task_sampler
        sent = {name: metrics[name] for name in MASTER_METRICS if name in metrics}
        sent |= {"version": version, "due": self.session.is_validation_due(self._every)}
        sent |= {"known": NO_RATES if sampler is None else sampler.changed_rates(update - 1)}
        return sent, weights

    def _roll_out(self, state: TrainState, callbacks: RolloutCallbacks) -> Rollout:
        """The rollout of this update, from the trajectories of other workers."""
        result = RolloutResult(self._batch.trajectories, (), Ledger(), 0, {})
        rollout = to_judged_rollout(self.setup, state, result)
        callbacks.on_all_sampled(rollout.trajectories)
        return rollout

    def record_evaluation(self, master_state: PyTree, *slices: RolloutSlice) -> Metrics:
        """Record a validation, and write a checkpoint with the master's state."""
        evaluation = evaluate_trajectories(_in_order(slices), self.setup.env.tools)
        self.session.record_validation(validation_of(evaluation), self._metrics, self._extra_state(master_state))
        update = self._finish_save()
        if self._rank == 0:
            self.session.progress.log(f"update {update}: validation success {evaluation.success:.3f}")
        return {"update": update, "success": evaluation.success}

    def save(self, master_state: PyTree) -> int:
        """Write a checkpoint without a validation, with the master's state -> the update."""
        self.session.save(self._extra_state(master_state))
        return self._finish_save()

    def _extra_state(self, master_state: PyTree) -> PyTree:
        """The master's state, and the success rates of the tasks if tasks are chosen by them."""
        if self.setup.task_sampler is None:
            return master_state
        return master_state | {"prompts": self.setup.task_sampler.to_checkpoint(int(self.session.state.update))}

    def _finish_save(self) -> int:
        """Wait until the checkpoint is written, and delete the recorded effects that it covers -> its update."""
        self.session.checkpoints.wait()
        update = int(self.session.state.update)
        if self._rank == 0:
            EffectLog(self._folder / "journal").delete_before(update)
        return update

    def test_params(self) -> tuple[int, Params, Params]:
        """How many sets of weights are tested, and these: those of the start, and the best ones."""
        if self._rank:
            self.session.checkpoints = Checkpoints(self._folder, best="validation")
        return 2, self._to_host(self.session.start_params), self._to_host(self.session.best_params()[1])

    def finish(self, cluster: Mapping[str, Any], count: int, *slices: RolloutSlice) -> dict[str, Any]:
        """Write the table and the result.

        Args:
            cluster: what the master adds to the result.
            count: number of slices before training; the others are after it.
            slices: of the test.
        """
        if self._rank:
            return {}
        rollouts = [_in_order(slices[:count]), _in_order(slices[count:])]
        for when, trajectories in zip(("before", "after"), rollouts, strict=True):
            write_trajectories(self._folder / "trajectories" / f"test-{when}.jsonl", trajectories)
        report = compare_before_after(self.setup, rollouts)
        report = report._replace(results={**report.results, **cluster})
        result = self.session.finish((time.monotonic() - self._started_at) / 60, report)
        self.close()
        return result

    def close(self) -> None:
        """Release the folder."""
        self._stack.close()


def renumber_groups(slices: Sequence[RolloutSlice]) -> RolloutSlice:
    """One batch of all groups, numbered in the order of the slices."""
    numbers: dict[tuple[int, int], int] = {}
    trajectories = []
    for index, rollout_slice in enumerate(slices):
        for trajectory in rollout_slice.trajectories:
            group = numbers.setdefault((index, trajectory.group), len(numbers))
            trajectories.append(replace(trajectory, group=group))
    return RolloutSlice(tuple(trajectories))


def _in_order(slices: Sequence[RolloutSlice]) -> list[RecordedTrajectory]:
    """The trajectories of an evaluation, in the order of its tasks."""
    trajectories = [trajectory for rollout_slice in slices for trajectory in rollout_slice.trajectories]
    return sorted(trajectories, key=lambda trajectory: (trajectory.group, trajectory.sample))


def replay_run(folder: Path, config: Config, plan: schedule.Plan) -> dict[str, Any]:
    """Repeat a run's updates from its records -> the hash of the parameters, and whether it is that of the run."""
    batches = sorted((folder / "batches").glob("*.jsonl"))
    if not batches:
        raise BadInput(f"{folder} has no batches/: give the work directory of a cluster's run")
    events = replay_schedule(folder / "events.jsonl", plan)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / START).symlink_to((folder / START).absolute())
        trainer = ClusterTrainer(config.replace(trainer_workers=1), Path(scratch), every=10**9)
        trainer.build()
        trainer.start()
        for path in batches:
            metrics, _ = trainer.train(RolloutSlice(tuple(from_json(line) for line in path.read_text().splitlines())))
            print(f"update {metrics['update']} of {len(batches)}: success {metrics['success']:.3f}", flush=True)
        sha = params_sha256(trainer.session.state.learner.params)
        trainer.close()
    recorded = result_of(folder)["params_sha256"]
    return {
        "updates": len(batches),
        "events": events,
        "params_sha256": sha,
        "there": recorded,
        "same": sha == recorded,
    }


def replay_schedule(path: Path, plan: schedule.Plan) -> int:
    """Replay the events of a log through the schedule, which must give the recorded updates -> number of events.

    The replay ends where the run was resumed from a checkpoint, since the state of the schedule then is not in the log.
    """
    state, recorded, replayed, count = cluster_state.ClusterState(), [], [], 0
    for line in read_events(path):
        if line["what"] == "resumed" and (line["update"] or count):
            return count
        if line["what"] == "event":
            count += 1
            state, commands = schedule.advance(plan, state, schedule.Event(**line["event"]))
            replayed += [list(command.groups) for command in commands if command.kind == "train"]
        elif line["what"] == "train":
            recorded.append(line["groups"])
    if replayed[: len(recorded)] != recorded:
        raise BadInput(f"{path} records other updates than its events lead to: it was written by another version")
    return count
