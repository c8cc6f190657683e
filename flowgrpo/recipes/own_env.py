"""The recipe of a run on an environment of your own: a TRL-style class, gymnasium, textarena, or an OpenEnv server.

    result = train(config, "runs/mine")            config: `preset("path/of/model", env="gymnasium:Taxi-v3")`
    with build(config, folder) as setup: ...       the parts; the process and the engine are closed with it

The environment runs in a process of its own, perhaps with another Python (`flowgrpo.external_envs`), and returns its
own rewards, unless --reward names one. A task is a seed; or a line of a file, whose fields are passed to `reset`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from sys import executable
from typing import Any

from flowgrpo.contracts import HostEnv
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.external_envs.env import external_env
from flowgrpo.external_envs.process import EnvProcess
from flowgrpo.recipes import agent
from flowgrpo.recipes.agent import POOL, TaskSource, build_setup, check_settings, make_sandbox, reward_of
from flowgrpo.recipes.own_env_config import Config
from flowgrpo.recipes.own_env_config import preset as preset
from flowgrpo.training import curriculum
from flowgrpo.training.hosted_training import HostedTrainable, train_hosted
from flowgrpo.training.language_model import HostedSetup, format_conversation
from flowgrpo.training.names import SPLITS
from flowgrpo.training.planner import check_planner, load_start
from flowgrpo.training.session import TestReport
from flowgrpo.training.time_budget import UNLIMITED, TimeBudget
from flowgrpo.types import Task

NAME = "own_env"
SEEDS_PER_SPLIT = 1 << 24


def seed_tasks(config: Config) -> TaskSource:
    """Tasks that are seeds, with different seeds for each split."""

    def draw(split: str, first: int, count: int) -> list[Task]:
        base = SPLITS.index(split) * SEEDS_PER_SPLIT + config.seed * 1_000_003
        return [Task(f"{split}-{n}", "", (), "env", {"seed": base + n}) for n in range(first, first + count)]

    return TaskSource(draw=draw, train=lambda: draw("train", 0, POOL), domains=("env",))


def add_seeds(source: TaskSource) -> TaskSource:
    """The tasks of a file, each with a seed, the number of its draw, unless it has one."""

    def draw(split: str, first: int, count: int) -> list[Task]:
        drawn = enumerate(source.draw(split, first, count), first)
        return [replace(task, metadata={"seed": n, **task.metadata}) for n, task in drawn]

    return source._replace(draw=draw)


@contextmanager
def build(config: Config, folder: Path, *, on_ready: Callable[[], object] | None = None) -> Iterator[HostedSetup]:
    """The parts that these settings describe; the environment's process and the engine are closed with the block.

    `on_ready` is called when everything that the settings name was found, before anything is written.
    """
    check_planner(config)
    if config.tasks is None:
        source = seed_tasks(config)
        agent.algorithm_of(config)  # raises if it does not fit
    else:
        source = add_seeds(check_settings(config))
    kind, _, spec = config.env.partition(":")
    with ExitStack() as stack:
        draw, task_sampler = curriculum.make_task_sampler(config, source.draw, source.train, groups=config.queries)
        process = EnvProcess(kind, spec, python=config.python or executable, timeout=config.env_seconds)
        tools = stack.enter_context(process).check()
        reward = None
        if config.reward:
            reward = reward_of(config, source, stack.enter_context(make_sandbox(config, source)))
        if on_ready is not None:
            on_ready()
        assert config.model is not None  # checked by the Config
        model = load_start(config.model, config)
        yield build_setup(
            stack,
            config,
            folder,
            model,
            partial(_make_env, config=config, tools=tools),
            name=config.env,
            call_tool=process.call_tool,
            reward=reward,
            tasks=draw,
            task_sampler=task_sampler,
            format_trajectory=partial(format_conversation, model.tokenizer),
            concurrency=config.concurrent_episodes or config.slots,
        )


def _make_env(text: ChatTokenizer, *, config: Config, tools: Sequence[str], turns: int) -> HostEnv:
    return external_env(
        text,
        turns=turns,
        max_tokens=config.max_tokens,
        context_tokens=config.context_tokens,
        instructions=config.instructions,
        tools=tools,
    )


def train(
    config: Config,
    folder: str | Path,
    *,
    every: int = 10,
    resume: bool = True,
    loggers: Sequence[str] = (),
    budget: TimeBudget = UNLIMITED,
) -> dict[str, Any]:
    """Train in a folder, or resume the run there -> the result.

    Args:
        every: updates between validations and checkpoints.
        resume: False deletes an earlier run in the folder.
        loggers: names of loggers for metrics (tensorboard, wandb, trackio).
        budget: time after which the run stops, saved.
    """
    return train_hosted(
        build, HostedTrainable, NAME, config, folder, every=every, resume=resume, loggers=loggers, budget=budget
    )


def evaluate(
    config: Config, folder: Path, *, seed: int = 1000, tasks: int = 1000, samples: int = 1
) -> tuple[int | None, TestReport]:
    """Test a run's start and its best planner on fresh tasks, as `agent.evaluate` does."""
    return agent.evaluate(config, folder, seed=seed, tasks=tasks, samples=samples, make_setup=build)
