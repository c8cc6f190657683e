"""The recipe of a cluster that trains the agent system: a master, and workers that roll out, judge and train.

    result = train(preset(rollout_workers=2, updates=20), "runs/cluster")

Rollout workers play a group under the keys that a single process would give it, reward workers judge it, trainers are
those of `cluster_trainer`. So the same run comes out, wherever its parts were done.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from flowgrpo import launch
from flowgrpo.data.task_sampling import Known, chosen
from flowgrpo.distributed.event_log import read_events
from flowgrpo.distributed.master import Master
from flowgrpo.distributed.messages import Order, Stretch
from flowgrpo.distributed.ray_backend import Backend, RayBackend
from flowgrpo.distributed.schedule import REWARD, ROLLOUT, TRAIN, Plan
from flowgrpo.distributed.simulation import Costs
from flowgrpo.distributed.worker_pool import PoolShape
from flowgrpo.distributed.workers import Player, RewardWorker, RolloutWorker
from flowgrpo.recipes import agent
from flowgrpo.recipes.cluster_config import ANY, Config, schedule_of
from flowgrpo.recipes.cluster_config import preset as preset
from flowgrpo.recipes.cluster_trainer import ClusterTrainer
from flowgrpo.recipes.hosted import HostedSetup, make_hosted_rollout, width_of
from flowgrpo.recipes.hosted_training import exam_key, keys_of_group, run_key
from flowgrpo.rollout.effects import Journal
from flowgrpo.rollout.hosted import Hosted
from flowgrpo.rollout.hosted_run import Width
from flowgrpo.rollout.records import aborted
from flowgrpo.run.run_dir import begin_anew, read_run
from flowgrpo.run.time_budget import ENDLESS, TimeBudget
from flowgrpo.types import BadInput, Task

NAME = "cluster"
T = TypeVar("T")


class Launched(NamedTuple):
    """How JAX is configured in the processes of a cluster, as in the one that starts it."""

    compilation_cache: str | None = launch.USER
    deterministic: bool = False
    exact: bool = True


PLAIN = Launched()


def pool_of(domain: str) -> str:
    """The name of the pool that judges a domain."""
    return f"{REWARD}-{domain}"


def make_worker(
    pool: str,
    name: str,
    *,
    config: Config,
    folder: Path,
    every: int,
    launched: Launched = PLAIN,
    loggers: Sequence[str] = (),
) -> Callable[[], Any]:
    """Choose the function that makes the worker of this name, to be called in its own process."""
    if pool == TRAIN:
        rank = int(name.rpartition("-")[2])
        return partial(_trainer, config, folder, launched, every=every, rank=rank, loggers=loggers)
    if pool == ROLLOUT:
        open_parts = partial(open_player, replace(config, mesh=None, trainer_workers=1), folder)
        return partial(_configured, launched, RolloutWorker, open_parts)
    return partial(_configured, launched, RewardWorker, partial(agent.open_reward, config))


def _trainer(config: Config, folder: Path, launched: Launched, *, every: int, **own: Any) -> ClusterTrainer:
    if config.trainer_workers > 1:  # each is a device, as in a process that has several
        os.environ["XLA_FLAGS"] = launch.add_flags(os.environ.get("XLA_FLAGS", ""), [launch.ONE_THREAD])
    return _configured(launched, ClusterTrainer, config, folder, every, **own)


def _configured(launched: Launched, make: Callable[..., T], *given: Any, **own: Any) -> T:
    """Make a worker in its process, where JAX is configured before."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    launch.configure(**launched._asdict())
    return make(*given, **own)


# Rollout workers --------------------------------------------------------------------------------------------


@contextmanager
def open_player(config: Config, folder: Path) -> Iterator[Player]:
    """Open the parts of a run as a player of orders, over an engine of its own."""
    judges = config.judges()

    def pool(stretch: Stretch) -> str:
        """The reward workers of its domain, or those for what has none of its own."""
        domain = stretch.played[0].task.domain
        return pool_of(domain if domain in judges else ANY)

    with agent.open(config, folder) as setup:
        width = Width(width_of(setup))  # over all orders that are played at once
        yield Player(load=partial(_load, setup), play=partial(_play, setup, width), pool=pool)


def _load(setup: HostedSetup, part: Any, version: int) -> None:
    planner = setup.planner
    setup.engine.swap(planner.serve(planner.trained.put(planner.params, jax.device_put(part))), version)


def _play(setup: HostedSetup, width: Width, order: Order, begun: Stretch, on_start) -> Stretch:
    """Groups of an update, or tasks of an examination; what had begun goes on."""
    if order.kind != "train":
        return _play_exam(setup, width, order, on_start)
    sizes, (number,) = setup.sizes, order.numbers
    groups = sizes.queries * sizes.oversample
    update, index = divmod(number, groups)
    journal = Journal(setup.folder / "journal", update)
    own = {"width": width, "journal": journal if order.budget is None else None}  # what goes on is stopped elsewhere
    rollout = make_hosted_rollout(setup, setup.env, do=journal.effects(setup.do), reward=None, **own)
    more = {"unfinished": begun.unfinished, "budget": order.budget, "on_start": on_start}
    with journal.at(f"group-{number}", update):
        if begun.played or begun.unfinished:
            found = rollout((), (), (), **more)
        else:
            keys = keys_of_group(run_key(setup), update, index, groups=groups, samples=sizes.samples)
            found = rollout([_task(setup, order)] * sizes.samples, keys, np.full(sizes.samples, index), **more)
    return _stretch(begun, found, goes_on=order.budget is not None)


def _task(setup: HostedSetup, order: Order) -> Task:
    """The task of an order's group."""
    if order.task is None:
        return setup.tasks("train", order.numbers[0], 1)[0]
    assert setup.prompts is not None, "a task was chosen, but this run's tasks have no numbers"
    return setup.prompts.pool[order.task]


def _stretch(begun: Stretch, found: Hosted, *, goes_on: bool) -> Stretch:
    """All that has ended, in the order of samples; what nobody will resume has no outcome."""
    late = [] if goes_on else found.unfinished
    ended = [aborted(one, "its group's deadline passed while it waited for the engine") for one in late]
    every = sorted([*begun.played, *found.played, *ended], key=lambda one: (one.group, one.sample))
    return Stretch(tuple(every), found.unfinished if goes_on else ())


def _play_exam(setup: HostedSetup, width: Width, order: Order, on_start) -> Stretch:
    split = order.kind.partition("-")[0]
    count = setup.config.validation_tasks if split == "validation" else setup.config.test_tasks
    keys = jax.random.split(exam_key(setup, split), count)
    tasks = [setup.tasks(split, number, 1)[0] for number in order.numbers]
    rollout = make_hosted_rollout(setup, setup.exam_env, do=setup.do, reward=None, width=width)
    found = rollout(tasks, keys[np.array(order.numbers)], order.numbers, on_start=on_start)
    return _stretch(Stretch(), found, goes_on=False)


# The recipe ---------------------------------------------------------------------------------------------


def train(
    config: Config,
    folder: str | Path,
    *,
    every: int = 10,
    resume: bool = True,
    loggers: Sequence[str] = (),
    backend: Backend | None = None,
    launched: Launched = PLAIN,
    on_turn: Callable[[Master], None] = lambda _: None,
    budget: TimeBudget = ENDLESS,
) -> dict[str, Any]:
    """Master a cluster to the end of the run -> its result; without a `backend`, over a Ray of this machine's own."""
    path, plan = Path(folder).absolute(), schedule_of(config)
    source = agent.check_settings(config)
    agent.example_tasks(config, source)  # which raises where they are wrong, before anything is removed
    if not resume:
        begin_anew(path)
    shape = PoolShape(
        rollout=config.rollout_workers,
        rewards={pool_of(domain): count for domain, count in config.judges().items()},
        trainers=config.trainer_workers,
        room=config.room,
        validation_tasks=config.validation_tasks,
        test_tasks=config.test_tasks,
        judge_seconds=config.judge_seconds,
        silent_seconds=config.silent_seconds,
        watch_seconds=config.watch_seconds,
    )
    make = partial(make_worker, config=config, folder=path, every=every, launched=launched, loggers=loggers)
    choose = partial(choose_task, config.seed, len(source.train())) if config.prompts == "hard" else None
    with nullcontext(backend) if backend is not None else RayBackend(None) as workers:
        return Master(workers, plan, shape, make, path, choose=choose, on_turn=on_turn, budget=budget).run()


def choose_task(seed: int, count: int, known: Known, group: int) -> int:
    """The number of a group's task, as a single process would choose it."""
    return chosen(known, seed, group, count)


def read_cluster_config(folder: Path) -> Config:
    """The Config of a cluster's run."""
    there = read_run(folder)
    if there["recipe"] != NAME:
        raise BadInput(
            f"{folder} is no cluster's run: a run of one process goes on, or begins again, by its own command"
        )
    return Config.from_json(there["settings"])


# What was measured --------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """A run of a cluster, by the clock."""

    plan: Plan
    workers: int
    room: int
    judges: int
    stretches: list[tuple[int, float]]  # tokens of the longest trajectory, seconds
    lengths: list[np.ndarray]  # tokens of the trajectories of a group
    judging: list[float]  # seconds of a group
    training: list[float]  # seconds of an update
    iteration_seconds: float  # median


def measured_run(folder: Path) -> Measured:
    """Read off the log of a run that was not disturbed; its first update, which compiles, is left out."""
    config = read_cluster_config(folder)
    lines = list(read_events(folder / "events.jsonl"))
    trains = [line["at"] for line in lines if line["what"] == "train"]
    dones = [line for line in lines if line["what"] == "trained"]
    if len(trains) < 3 or not dones:
        raise BadInput(f"{folder} has made {len(trains)} updates: give one of at least 3")
    late = [line for line in lines if line["at"] > trains[0]]
    joined = [line["event"] for line in lines if line["what"] == "event" and line["event"]["kind"] == "joined"]
    rolled = [line for line in late if line["what"] == "rolled"]
    return Measured(
        plan=schedule_of(config),
        workers=len({event["worker"] for event in joined if event["pool"] == "rollout"}),
        room=max(event.get("room", 1) for event in joined),
        judges=len({event["worker"] for event in joined if event["pool"] != "rollout"}),
        stretches=[(max(line["lengths"]), line["seconds"]) for line in rolled],
        lengths=[np.array(line["lengths"]) for line in rolled if line["whole"]],
        judging=[line["seconds"] for line in late if line["what"] == "judged"],
        training=[line["seconds"] for line in dones[1:]],
        iteration_seconds=float(np.median(iterations(lines))),
    )


def iterations(lines: list[dict[str, Any]]) -> list[float]:
    """Seconds from update to update, where nothing was examined or saved in between; the first one is left out."""
    found, last, starts = [], None, 0
    for line in lines:
        if line["what"] == "train":
            starts += 1
            found += [line["at"] - last] if last is not None and starts > 2 else []
            last = line["at"]
        elif line["what"] in ("saved", "resumed", "lost"):
            last = None
    if not found:
        raise BadInput("every update of this run was examined: give a run whose checkpoints are further apart")
    return found


def costs_of(run: Measured) -> Costs:
    """The costs of a simulation, drawn from what was measured; seconds of a stretch by a line through its tokens."""
    tokens, seconds = np.array(run.stretches).T
    slope = max(float(np.polyfit(tokens, seconds, 1)[0]), 0.0) if len(set(tokens)) > 1 else 0.0
    return Costs(
        lengths=lambda random: run.lengths[int(random.integers(len(run.lengths)))],
        token_seconds=slope,
        overhead_seconds=max(float(np.mean(seconds) - slope * np.mean(tokens)), 0.0),
        judge_seconds=lambda random: run.judging[int(random.integers(len(run.judging)))] if run.judging else 0.0,
        train_seconds=float(np.median(run.training)),
    )
