"""The recipe of a run on an environment of your own: a TRL-style class, gymnasium, textarena, or an OpenEnv server.

    with open(config, folder) as setup: ...        the parts, while the environment's process and the engine live
    result = train(config, "runs/mine")            config: `preset("path/of/model", env="gymnasium:Taxi-v3")`

The environment lives in a process of its own, perhaps of another Python (`flowgrpo.external_envs`), and pays by itself,
unless a reward is named. A task is a seed; or a line of a file, whose fields its `reset` is given.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from sys import executable
from typing import Any

from flowgrpo.contracts import HostEnv
from flowgrpo.data.tokenizer import Text
from flowgrpo.external_envs.env import external_env
from flowgrpo.external_envs.process import EnvProcess
from flowgrpo.recipes import agent, task_choice
from flowgrpo.recipes.agent import POOL, Source, assemble, check_settings, make_sandbox, reward_of
from flowgrpo.recipes.hosted import HostedSetup, do_nothing, plain_story
from flowgrpo.recipes.hosted_training import HostedWork, train_hosted
from flowgrpo.recipes.own_env_config import Config
from flowgrpo.recipes.own_env_config import preset as preset
from flowgrpo.recipes.planner import check_planner, load_start
from flowgrpo.run.session import Tested
from flowgrpo.run.time_budget import ENDLESS, TimeBudget
from flowgrpo.types import Task

NAME = "own_env"
SPLITS = ("train", "validation", "test")
ROOM = 1 << 24  # seeds of a split


def seeds_of(config: Config) -> Source:
    """Tasks that are seeds, others for each split; the first `POOL` of training have a number."""

    def draw(split: str, first: int, count: int) -> list[Task]:
        base = SPLITS.index(split) * ROOM + config.seed * 1_000_003
        return [Task(f"{split}-{n}", "", (), "env", {"seed": base + n}) for n in range(first, first + count)]

    return Source(draw=draw, train=lambda: draw("train", 0, POOL), domains=("env",))


def tasks_with_seeds(source: Source) -> Source:
    """The tasks of a file, each with a seed, which is the number of its draw."""

    def draw(split: str, first: int, count: int) -> list[Task]:
        drawn = enumerate(source.draw(split, first, count), first)
        return [replace(task, metadata={"seed": n, **task.metadata}) for n, task in drawn]

    return source._replace(draw=draw)


@contextmanager
def open(config: Config, folder: Path, *, begin: Callable[[], object] = do_nothing) -> Iterator[HostedSetup]:
    """The parts that these settings describe; the environment's process and the engine live as long as the block."""
    check_planner(config)
    if config.tasks is None:
        source = seeds_of(config)
        agent.algorithm_of(config)
    else:
        source = tasks_with_seeds(check_settings(config))
    kind, _, spec = config.env.partition(":")
    with ExitStack() as stack:
        draw, hard = task_choice.choose(config, source.draw, source.train, groups=config.queries)
        process = EnvProcess(kind, spec, python=config.python or executable, seconds=config.env_seconds)
        tools = stack.enter_context(process).check()
        judge = None
        if config.reward:
            judge = reward_of(config, source, stack.enter_context(make_sandbox(config, source)))
        begin()
        assert config.model is not None
        model = load_start(config.model, config)
        make = partial(_make_env, config=config, tools=tools)
        own = {
            "do": process.do,
            "width": config.episodes or config.slots,
            "reward": judge,
            "tasks": draw,
            "prompts": hard,
        }
        yield assemble(
            stack, config, folder, model, make, name=config.env, story=partial(plain_story, model.text), **own
        )


def _make_env(text: Text, *, config: Config, tools: Sequence[str], turns: int) -> HostEnv:
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
    budget: TimeBudget = ENDLESS,
) -> dict[str, Any]:
    """Train in a folder, or go on there -> the result; a validation and a checkpoint come `every` so many updates."""
    how: dict[str, Any] = {"every": every, "resume": resume, "loggers": loggers, "budget": budget}
    return train_hosted(open, HostedWork, NAME, config, folder, **how)


def evaluate(config: Config, folder: Path, **sizes: int) -> tuple[int | None, Tested]:
    """Test a run's start and its best planner on fresh tasks -> (the update of the best, figures by domain, too)."""
    return agent.evaluate(config, folder, open_setup=open, **sizes)
