"""Workers of a cluster, made from the parts of a hosted run, each opened in a process of its own.

    make = partial(make_worker, settings=settings, folder=folder, every=10)
    Master(crew, plan, shape, exams, make, folder).run()

Rollout workers play a group under the keys that a single process would give it, reward workers judge it, trainers are
those of `cluster_trainer`. So the same run comes out, wherever its parts were done.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import agent_setups
from experiments.cluster_trainer import ClusterTrainer
from experiments.hosted_setup import HostedSetup, make_rollout, width_of
from experiments.hosted_work import exam_key, keys_of_group, run_key
from flowgrpo import launch
from flowgrpo.distributed.orders import Order, Stretch
from flowgrpo.distributed.workers import Judge, Player, RewardWorker, RolloutWorker, Trainer
from flowgrpo.rollout.hosted import Hosted
from flowgrpo.rollout.journal import Journal
from flowgrpo.rollout.judging import is_solved
from flowgrpo.rollout.records import aborted
from flowgrpo.rollout.width import Width
from flowgrpo.schedule import REWARD, ROLLOUT, TRAIN
from flowgrpo.types import Task

ANY = "any"  # the domain whose reward workers judge what no others do


def make_worker(
    pool: str, name: str, *, settings: Mapping[str, Any], folder: Path, every: int, loggers: Sequence[str] = ()
) -> Callable[[], Any]:
    """Choose the function that makes the worker of this name, to be called in its own process."""
    opens = {"settings": dict(settings), "folder": folder}
    if pool == TRAIN:
        return partial(_trainer, **opens, every=every, rank=int(name.rpartition("-")[2]), loggers=loggers)
    kind = _rollout_worker if pool == ROLLOUT else _reward_worker
    return partial(kind, **opens)


def _rollout_worker(settings: Mapping[str, Any], folder: Path) -> RolloutWorker:
    _configure(settings)
    return RolloutWorker(partial(open_player, {**settings, "mesh": None}, folder))  # which is the trainers'


def _reward_worker(settings: Mapping[str, Any], folder: Path) -> RewardWorker:
    del folder
    _configure(settings)
    return RewardWorker(partial(open_judge, settings))


def _trainer(settings: Mapping[str, Any], folder: Path, every: int, rank: int, loggers: Sequence[str]) -> Trainer:
    if settings["trainer_workers"] > 1:  # each is a device, as in a process that has several
        os.environ["XLA_FLAGS"] = launch.add_flags(os.environ.get("XLA_FLAGS", ""), [launch.ONE_THREAD])
    _configure(settings)
    return ClusterTrainer(settings, folder, every, rank=rank, loggers=loggers)


def _configure(settings: Mapping[str, Any]) -> None:
    """JAX in a worker's process, as the command's own flags have it."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    launch.configure(compilation_cache=settings["compilation_cache"], deterministic=settings["deterministic"])


# Rollout workers --------------------------------------------------------------------------------------------


@contextmanager
def open_player(settings: Mapping[str, Any], folder: Path) -> Iterator[Player]:
    """Open the parts of a run as a player of orders, over an engine of its own."""
    with agent_setups.open_setup(settings, folder) as setup:
        yield player_of(setup)


def player_of(setup: HostedSetup) -> Player:
    """Make a player of orders from parts that are open, as `open_player` does."""
    width = Width(width_of(setup))  # over all orders that are played at once
    return Player(
        load=partial(_load, setup),
        play=partial(_play, setup, width),
        pool=partial(_pool, setup.settings["reward_workers"]),
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


def _play(setup: HostedSetup, width: Width, order: Order, begun: Stretch, on_start) -> Stretch:
    """Groups of an update, or tasks of an examination; what had begun goes on."""
    if order.kind != "train":
        return _play_exam(setup, width, order, on_start)
    sizes, (number,) = setup.sizes, order.numbers
    groups = sizes.queries * sizes.oversample
    update, index = divmod(number, groups)
    journal = Journal(setup.folder / "journal", update)
    own = {"width": width, "journal": journal if order.budget is None else None}  # what goes on is stopped elsewhere
    rollout = make_rollout(setup, setup.env, do=journal.effects(setup.do), reward=None, **own)
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
    keys = jax.random.split(exam_key(setup, split), setup.settings[f"{split}_tasks"])
    tasks = [setup.tasks(split, number, 1)[0] for number in order.numbers]
    rollout = make_rollout(setup, setup.exam_env, do=setup.do, reward=None, width=width)
    found = rollout(tasks, keys[np.array(order.numbers)], order.numbers, on_start=on_start)
    return _stretch(Stretch(), found, goes_on=False)


# Reward workers ---------------------------------------------------------------------------------------------


@contextmanager
def open_judge(settings: Mapping[str, Any]) -> Iterator[Judge]:
    """The rewards of a run, without its models."""
    with agent_setups.open_reward(settings) as reward:
        yield Judge(reward, is_solved)
