"""The recipe of a cluster that trains the agent system: a master, and workers that roll out, judge and train.

    result = RECIPE.train(preset(rollout_workers=2, updates=20), "runs/cluster")

A rollout worker rolls out a group with the keys that a single process would use, a reward worker judges it, and the
trainers are those of `cluster_trainer`. So the run is the same, wherever its parts are computed.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flowgrpo import launch
from flowgrpo.data.task_sampling import SuccessRates, sample_task
from flowgrpo.distributed.event_log import read_events
from flowgrpo.distributed.master import Master
from flowgrpo.distributed.messages import RolloutJob, RolloutSlice
from flowgrpo.distributed.ray_backend import Backend, RayBackend
from flowgrpo.distributed.schedule import REWARD, ROLLOUT, TRAIN, Plan
from flowgrpo.distributed.simulation import Costs
from flowgrpo.distributed.worker_pool import ClusterSettings
from flowgrpo.distributed.workers import OnStart, RewardWorker, RolloutFunctions, RolloutWorker
from flowgrpo.recipes import agent
from flowgrpo.recipes.cluster_config import ANY, Config, schedule_of
from flowgrpo.recipes.cluster_config import preset as preset
from flowgrpo.recipes.cluster_trainer import ClusterTrainer
from flowgrpo.recipes.planner_reader import TEXT
from flowgrpo.recipes.recipe import NO_OBJECTS, Objects, Recipe
from flowgrpo.rollout.effects import EffectLog
from flowgrpo.rollout.hosted import ConcurrencyLimit
from flowgrpo.rollout.records import RolloutResult, abort
from flowgrpo.training.hosted_training import eval_key, group_keys, hosted_trainable, run_key
from flowgrpo.training.language_model import HostedSetup, concurrency_of, make_hosted_rollout
from flowgrpo.training.run_dir import delete_run, read_run
from flowgrpo.training.time_budget import UNLIMITED, TimeBudget
from flowgrpo.types import BadInput, Metrics, Params

NAME = "cluster"


class LaunchSettings(NamedTuple):
    """How JAX is configured in the processes of a cluster, as in the one that starts it."""

    compilation_cache: str | None = launch.USER
    deterministic: bool = False
    exact: bool = True


DEFAULT_LAUNCH = LaunchSettings()


def pool_of(domain: str) -> str:
    """The name of the pool of reward workers of a domain."""
    return f"{REWARD}-{domain}"


def make_worker(
    pool: str,
    name: str,
    *,
    config: Config,
    folder: Path,
    every: int,
    launch_settings: LaunchSettings = DEFAULT_LAUNCH,
    loggers: Sequence[str] = (),
) -> Callable[[], Any]:
    """A function that makes the worker of this name, to be called in the worker's own process."""
    if pool == TRAIN:
        rank = int(name.rpartition("-")[2])
        make = partial(ClusterTrainer, config, folder, every, rank=rank, loggers=loggers)
    elif pool == ROLLOUT:
        alone = config.replace(mesh=None, trainer_workers=1)
        make = partial(RolloutWorker, partial(build_rollout_functions, alone, folder))
    else:
        make = partial(RewardWorker, partial(agent.build_reward, config))
    one_thread = (
        pool == TRAIN and config.cluster.trainer_workers > 1
    )  # each is one device, as in a process with several
    return partial(_configure_and_make, make, launch_settings, one_thread=one_thread)


def _configure_and_make(make: Callable[[], Any], launch_settings: LaunchSettings, *, one_thread: bool) -> Any:
    """Configure JAX in the worker's process, and make the worker."""
    if one_thread:
        os.environ["XLA_FLAGS"] = launch.add_flags(os.environ.get("XLA_FLAGS", ""), [launch.ONE_THREAD])
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    launch.configure(**launch_settings._asdict())
    return make()


# Rollout workers --------------------------------------------------------------------------------------------


@contextmanager
def build_rollout_functions(config: Config, folder: Path) -> Iterator[RolloutFunctions]:
    """The functions of a rollout worker, over an engine of its own."""
    judges = config.cluster.judges()

    def pool(rollout_slice: RolloutSlice) -> str:
        """The reward workers of the slice's domain, or else those of all others."""
        domain = rollout_slice.trajectories[0].task.domain
        return pool_of(domain if domain in judges else ANY)

    with agent.build(config, folder) as setup:
        limit = ConcurrencyLimit(concurrency_of(setup))  # shared by all jobs that run at the same time

        def load_weights(part: Params, version: int) -> None:
            params = setup.planner.trainable.merge(setup.planner.params, jax.device_put(part))
            setup.engine.update_weights(setup.planner.to_engine(params), version)

        def roll_out(job: RolloutJob, previous: RolloutSlice, on_start: OnStart) -> RolloutSlice:
            if job.kind == "train":
                return _roll_out_group(setup, limit, job, previous, on_start)
            return _roll_out_evaluation(setup, limit, job, on_start)

        yield RolloutFunctions(load_weights=load_weights, roll_out=roll_out, pool=pool)


def _roll_out_group(
    setup: HostedSetup, limit: ConcurrencyLimit, job: RolloutJob, previous: RolloutSlice, on_start: OnStart
) -> RolloutSlice:
    """Roll out a group of an update, or resume its previous slice."""
    sizes, (group,) = setup.sizes, job.indices
    groups = sizes.queries * sizes.oversample
    update, index = divmod(group, groups)
    journal = EffectLog(setup.folder / "journal", update)
    rollout = make_hosted_rollout(
        setup,
        setup.env,
        call_tool=journal.wrap_tools(setup.call_tool),
        reward=None,
        concurrency=limit,
        journal=journal if job.budget is None else None,  # deadlines of a cut trajectory expire elsewhere
    )
    with journal.recording(f"group-{group}", update):
        if previous.trajectories or previous.unfinished:
            result = rollout((), (), (), unfinished=previous.unfinished, budget=job.budget, on_start=on_start)
        else:
            if job.task is None:
                task = setup.tasks("train", group, 1)[0]
            else:
                assert setup.task_sampler is not None, "a task was chosen, but this run's tasks have no numbers"
                task = setup.task_sampler.pool[job.task]
            keys = group_keys(run_key(setup), update, index, groups=groups, samples=sizes.samples)
            result = rollout(
                [task] * sizes.samples, keys, [index] * sizes.samples, budget=job.budget, on_start=on_start
            )
    return _to_slice(previous, result, resumable=job.budget is not None)


def _roll_out_evaluation(
    setup: HostedSetup, limit: ConcurrencyLimit, job: RolloutJob, on_start: OnStart
) -> RolloutSlice:
    """Roll out some tasks of an evaluation, with the keys that a single process would use."""
    split = job.kind.partition("-")[0]
    count = setup.config.evaluation.validation_tasks if split == "validation" else setup.config.evaluation.test_tasks
    keys = jax.random.split(eval_key(setup, split), count)
    tasks = [setup.tasks(split, number, 1)[0] for number in job.indices]
    rollout = make_hosted_rollout(setup, setup.eval_env, call_tool=setup.call_tool, reward=None, concurrency=limit)
    result = rollout(tasks, keys[np.array(job.indices)], job.indices, on_start=on_start)
    return _to_slice(RolloutSlice(), result, resumable=False)


def _to_slice(previous: RolloutSlice, result: RolloutResult, *, resumable: bool) -> RolloutSlice:
    """All trajectories that have ended, in the order of samples; unfinished ones are aborted unless `resumable`."""
    late = [] if resumable else result.unfinished
    aborted = [abort(trajectory, "its group's deadline passed while it waited for the engine") for trajectory in late]
    ended = [*previous.trajectories, *result.trajectories, *aborted]
    ordered = sorted(ended, key=lambda trajectory: (trajectory.group, trajectory.sample))
    return RolloutSlice(tuple(ordered), result.unfinished if resumable else ())


# The recipe ---------------------------------------------------------------------------------------------


class ClusterRecipe(Recipe[Config, HostedSetup]):
    """A recipe whose updates are made by many processes, each of which builds the parts that it needs."""

    def train(
        self,
        config: Config,
        folder: str | Path,
        *,
        objects: Objects = NO_OBJECTS,
        every: int = 10,
        resume: bool = True,
        loggers: Sequence[str] = (),
        budget: TimeBudget = UNLIMITED,
        on_update: Callable[[Metrics], object] | None = None,
        backend: Backend | None = None,
        launch_settings: LaunchSettings = DEFAULT_LAUNCH,
        on_iteration: Callable[[Master], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Run the master of a cluster to the end of the run -> the result.

        Args:
            config: settings of the run.
            folder: of the run, which all processes share.
            objects: none, since other processes can't be handed any.
            every: updates between validations and checkpoints.
            resume: False deletes an earlier run in the folder.
            loggers: names of loggers for metrics (tensorboard, wandb, trackio).
            budget: time after which the run stops, saved.
            on_update: None, since another process trains.
            backend: starts and calls the workers; None: a Ray of this machine.
            launch_settings: how JAX is configured in the workers.
            on_iteration: called after each turn of the master's loop.
        """
        objects.check(self.name)
        if on_update is not None:
            raise BadInput("the updates of a cluster are made by another process: leave out on_update")
        path, plan = Path(folder).absolute(), schedule_of(config)
        source = agent.check_settings(config)
        agent.example_tasks(config, source)  # raises if they are wrong, before anything is removed
        if not resume:
            delete_run(path)
        settings = ClusterSettings(
            rollout_workers=config.cluster.rollout_workers,
            reward_workers={pool_of(domain): count for domain, count in config.cluster.judges().items()},
            trainer_workers=config.cluster.trainer_workers,
            worker_capacity=config.cluster.worker_capacity,
            validation_tasks=config.evaluation.validation_tasks,
            test_tasks=config.evaluation.test_tasks,
            judge_seconds=config.cluster.judge_seconds,
            silent_seconds=config.cluster.silent_seconds,
            watch_seconds=config.run.watch_seconds,
            time_budget=budget,
        )
        make = partial(
            make_worker, config=config, folder=path, every=every, launch_settings=launch_settings, loggers=loggers
        )
        choose_task: Callable[[SuccessRates, int], int] | None = None  # as in a single process
        if config.tasks.prompts == "hard":
            num_tasks = len(source.train())
            choose_task = lambda rates, group: sample_task(rates, config.run.seed, group, num_tasks)  # noqa: E731
        with nullcontext(backend) if backend is not None else RayBackend(None) as workers:
            return Master(workers, plan, settings, make, path, choose_task=choose_task, on_iteration=on_iteration).run()


@contextmanager
def build(
    config: Config, folder: Path, *, objects: Objects = NO_OBJECTS, on_ready: Callable[[], object] | None = None
) -> Iterator[HostedSetup]:
    """The parts of the run in a single process, which evaluates it."""
    objects.check(NAME)
    with agent.build(config, folder, on_ready=on_ready) as setup:
        yield setup


RECIPE = ClusterRecipe(
    name=NAME,
    command="cluster",
    Config=Config,
    preset=preset,
    build=build,
    make_trainable=hosted_trainable(NAME),
    test=agent.evaluate_params,
    planner=TEXT,
)


def read_cluster_config(folder: Path) -> Config:
    """The Config of a cluster's run."""
    run = read_run(folder)
    if run["recipe"] != NAME:
        raise BadInput(f"{folder} is not the run of a cluster: resume it with its own command")
    return Config.from_json(run["settings"])


# Measurements -------------------------------------------------------------------------------------------


class RunMeasurements(NamedTuple):
    """Wall-clock measurements of a cluster's run."""

    plan: Plan
    workers: int
    capacity: int
    judges: int
    slices: list[tuple[int, float]]  # tokens of the longest trajectory, seconds
    lengths: list[np.ndarray]  # tokens of the trajectories of a group
    judging: list[float]  # seconds of a group
    training: list[float]  # seconds of an update
    iteration_seconds: float  # median


def measure_run(folder: Path) -> RunMeasurements:
    """Measurements from the event log of an undisturbed run; its first update, which compiles, is left out."""
    config = read_cluster_config(folder)
    lines = list(read_events(folder / "events.jsonl"))
    train_times = [line["at"] for line in lines if line["what"] == "train"]
    trained = [line for line in lines if line["what"] == "trained"]
    if len(train_times) < 3 or not trained:
        raise BadInput(f"{folder} has made {len(train_times)} updates: give one of at least 3")
    late = [line for line in lines if line["at"] > train_times[0]]
    joined = [line["event"] for line in lines if line["what"] == "event" and line["event"]["kind"] == "joined"]
    rolled = [line for line in late if line["what"] == "rolled"]
    return RunMeasurements(
        plan=schedule_of(config),
        workers=len({event["worker"] for event in joined if event["pool"] == "rollout"}),
        capacity=max(event.get("capacity", 1) for event in joined),
        judges=len({event["worker"] for event in joined if event["pool"] != "rollout"}),
        slices=[(max(line["lengths"]), line["seconds"]) for line in rolled],
        lengths=[np.array(line["lengths"]) for line in rolled if line["whole"]],
        judging=[line["seconds"] for line in late if line["what"] == "judged"],
        training=[line["seconds"] for line in trained[1:]],
        iteration_seconds=float(np.median(update_intervals(lines))),
    )


def update_intervals(lines: list[dict[str, Any]]) -> list[float]:
    """Seconds from update to update, without validations and saves in between; the first interval is left out."""
    intervals, last, count = [], None, 0
    for line in lines:
        if line["what"] == "train":
            count += 1
            intervals += [line["at"] - last] if last is not None and count > 2 else []
            last = line["at"]
        elif line["what"] in ("saved", "resumed", "lost"):
            last = None
    if not intervals:
        raise BadInput("this run was validated at every update: give a run with a larger --checkpoint_every")
    return intervals


def costs_of(run: RunMeasurements) -> Costs:
    """The costs of a simulation, drawn from measurements; the seconds of a slice are linear in its tokens."""
    tokens, seconds = np.array(run.slices).T
    slope = max(float(np.polyfit(tokens, seconds, 1)[0]), 0.0) if len(set(tokens)) > 1 else 0.0
    return Costs(
        lengths=lambda random: run.lengths[int(random.integers(len(run.lengths)))],
        token_seconds=slope,
        overhead_seconds=max(float(np.mean(seconds) - slope * np.mean(tokens)), 0.0),
        judge_seconds=lambda random: run.judging[int(random.integers(len(run.judging)))] if run.judging else 0.0,
        train_seconds=float(np.median(run.training)),
    )
