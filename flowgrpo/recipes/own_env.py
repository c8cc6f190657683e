"""The recipe of a run on an environment of your own: a TRL-style class, gymnasium, textarena, or an OpenEnv server.

    result = RECIPE.train(config, "runs/mine")     config: `preset("path/of/model", env="gymnasium:Taxi-v3")`
    with build(config, folder) as setup: ...       the parts; the process and the engine are closed with it

The environment runs in a process of its own, perhaps with another Python (`flowgrpo.external_envs`), and returns its
own rewards, unless --reward names one. A task is a seed; or a line of a file, whose fields are passed to `reset`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from sys import executable
from typing import Any

from flowgrpo.contracts import HostEnv, ToolRunner
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.external_envs.env import external_env
from flowgrpo.external_envs.process import EnvProcess
from flowgrpo.recipes import agent
from flowgrpo.recipes.agent import (
    POOL,
    TaskSource,
    build_setup,
    check_settings,
    check_start,
    load_planner,
    make_sandbox,
    reward_of,
)
from flowgrpo.recipes.own_env_config import Config
from flowgrpo.recipes.own_env_config import preset as preset
from flowgrpo.recipes.planner_reader import TEXT
from flowgrpo.recipes.recipe import NO_OBJECTS, Objects, Recipe
from flowgrpo.rollout.effects import no_effects
from flowgrpo.training import curriculum
from flowgrpo.training.hosted_training import hosted_trainable, training_tasks
from flowgrpo.training.language_model import HostedSetup, format_conversation
from flowgrpo.training.names import SPLITS
from flowgrpo.training.planner import check_planner
from flowgrpo.types import BadInput, Task

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
def build(
    config: Config, folder: Path, *, objects: Objects = NO_OBJECTS, on_ready: Callable[[], object] | None = None
) -> Iterator[HostedSetup]:
    """The parts that these settings describe; the environment's process and the engine are closed with the block.

    `on_ready` is called when everything that the settings name was found, before anything is written.
    """
    objects.check(NAME, "env", "tasks", "model", "algorithm", "optimizer", "reward")
    check_planner(config)
    if config.tasks is None and objects.tasks is None:
        source = seed_tasks(config)
        check_start(config, objects)
        agent.algorithm_of(config, objects.algorithm)  # raises if it does not fit
    else:
        source = add_seeds(check_settings(config, objects))
    with ExitStack() as stack:
        draw, task_sampler = curriculum.make_task_sampler(config, source.draw, source.train, groups=config.queries)
        make_env, call_tool = (
            _open_process(config, stack) if objects.env is None else (partial(make_host_env, objects.env), no_effects)
        )
        reward = objects.reward
        if reward is not None or config.reward:
            reward = reward_of(config, source, stack.enter_context(make_sandbox(config, source)), reward)
        if on_ready is not None:
            on_ready()
        model = load_planner(config, folder, objects)
        yield build_setup(
            stack,
            config,
            folder,
            model,
            partial(make_env, config=config),
            objects=objects,
            name=config.env,
            call_tool=call_tool,
            reward=reward,
            tasks=draw,
            task_sampler=task_sampler,
            format_trajectory=partial(format_conversation, model.tokenizer),
            concurrency=config.concurrent_episodes or config.slots,
        )


def _open_process(config: Config, stack: ExitStack) -> tuple[Callable[..., HostEnv], ToolRunner]:
    """The environment that the settings name, in a process that the stack closes: `make_env`, and its tools."""
    kind, _, spec = config.env.partition(":")
    process = EnvProcess(kind, spec, python=config.python or executable, timeout=config.env_seconds)
    tools = stack.enter_context(process).check()

    def make_env(text: ChatTokenizer, *, config: Config, turns: int) -> HostEnv:
        return external_env(
            text,
            turns=turns,
            max_tokens=config.max_tokens,
            context_tokens=config.context_tokens,
            instructions=config.instructions,
            tools=tools,
        )

    return make_env, process.call_tool


def make_host_env(env: Any, text: ChatTokenizer, *, config: Config, turns: int) -> HostEnv:
    """An object as the environment of a run: an `fg.HostEnv`, or a function of the tokenizer that returns one.

    Its own limits count where they are below those of the settings.
    """
    made = env if isinstance(env, HostEnv) else env(text) if callable(env) else env
    if not isinstance(made, HostEnv):
        raise BadInput(
            f"the environment {env!r:.80} gave {made!r:.80}, which is no fg.HostEnv: give one, or a function of the "
            "tokenizer that returns one"
        )
    if made.max_tokens >= config.context_tokens:
        raise BadInput(
            f"the environment {made.name} has actions of {made.max_tokens} tokens, and "
            f"--context_tokens={config.context_tokens} holds them with their context: raise it"
        )
    return made._replace(max_turns=min(made.max_turns, turns))


RECIPE = Recipe(
    name=NAME,
    command="train_env",
    Config=Config,
    preset=preset,
    build=build,
    make_trainable=hosted_trainable(NAME),
    test=agent.evaluate_params,
    planner=TEXT,
    rehearse=lambda setup: agent.print_rollout(setup, training_tasks(setup, 0)[:4]),
)
