"""The recipe of a run on an environment of your own: a `TextEnv`, or one of another library.

    result = RECIPE.train(config, "runs/mine")     config: `preset("path/of/model", env="gymnasium:Taxi-v3")`
    with build(config, folder) as setup: ...       the parts; the process and the engine are closed with it

An environment of another library (a TRL-style class, gymnasium, textarena, an OpenEnv server) runs in a process of its
own, perhaps with another Python (`flowgrpo.external_envs`), and returns its own rewards, unless --reward names one. A
task is a seed; or a line of a file, whose fields are passed to `reset`. Lines for a `TextEnv` may have any fields.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from sys import executable
from typing import Any, NamedTuple

from flowgrpo.contracts import HostEnv, ToolRunner
from flowgrpo.data.tasks import Tasks
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.envs.text import TextEnv, to_reward
from flowgrpo.external_envs.process import EnvProcess
from flowgrpo.files import import_named
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
from flowgrpo.recipes.registry import check_reward
from flowgrpo.rollout.conversation_env import conversation_env
from flowgrpo.rollout.effects import no_effects
from flowgrpo.rollout.text_env import TextEnvRunner, check_text_env
from flowgrpo.training import curriculum
from flowgrpo.training.hosted_training import hosted_trainable, training_tasks
from flowgrpo.training.language_model import HostedSetup, format_conversation
from flowgrpo.training.names import EXTERNAL_ENVIRONMENTS, SPLITS
from flowgrpo.training.planner import check_planner
from flowgrpo.types import BadInput, Task

NAME = "own_env"
SEEDS_PER_SPLIT = 1 << 24


def seed_tasks(config: Config) -> TaskSource:
    """Tasks that are seeds, with different seeds for each split."""

    def draw(split: str, first: int, count: int) -> list[Task]:
        base = SPLITS.index(split) * SEEDS_PER_SPLIT + config.run.seed * 1_000_003
        return [Task(f"{split}-{n}", "", (), "env", {"seed": base + n}) for n in range(first, first + count)]

    return TaskSource(draw=draw, train=lambda: draw("train", 0, POOL), domains=("env",))


NO_TASKS_YET = Tasks(())  # `Objects.tasks` of a `Trainer` whose tasks come with each rollout


def later_tasks() -> TaskSource:
    """No tasks: each rollout brings its own."""

    def draw(_split: str, _first: int, _count: int) -> list[Task]:
        raise BadInput("there are no tasks: give tasks=, a file or a list, or pass some to each rollout")

    return TaskSource(draw=draw, train=lambda: draw("train", 0, POOL), domains=())


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
    check_planner(config.model, config.devices)
    with ExitStack() as stack:
        env = open_env(find_env(config, objects), config, stack)
        if config.tasks.tasks is None and objects.tasks in (None, NO_TASKS_YET):
            source = seed_tasks(config) if objects.tasks is None else later_tasks()
            check_start(config, objects)
            agent.algorithm_of(config, objects.algorithm)  # raises if it does not fit
        else:
            source = add_seeds(check_settings(config, objects, any_fields=env.runner is not None))
        draw, task_sampler = curriculum.make_task_sampler(
            config.tasks, source.draw, source.train, groups=config.rollout.queries, seed=config.run.seed
        )
        first_task = None if objects.tasks == NO_TASKS_YET else source.draw("train", 0, 1)[0]
        reward = to_reward(objects.reward)
        needs_reward = config.tasks.reward or (env.runner and env.runner.needs_reward)
        if first_task is None and needs_reward and reward is None:
            raise BadInput("tasks that come with each rollout need a reward: give reward=, or the environment one")
        if first_task is not None and (reward is not None or needs_reward):
            reward = reward_of(config, source, stack.enter_context(make_sandbox(config, source)), reward)
        elif reward is None and env.runner and env.runner.reward is not None:
            reward = env.runner.reward
            if first_task is not None:
                reward = check_reward(reward, f"{env.runner.name}.reward", first_task)
        if env.runner:
            env.runner.reward = reward
            try:
                if first_task is not None:
                    env.runner.check(first_task)
            except BadInput as error:
                has_tasks = not (config.tasks.tasks is None and objects.tasks is None)
                raise (error if has_tasks else BadInput(f"{error}; there are no tasks: give --tasks")) from None
        if on_ready is not None:
            on_ready()
        model = load_planner(config, folder, objects)
        if env.runner and first_task is not None:
            env.runner.check_prompt(env.make(model.tokenizer, turns=config.rollout.turns), first_task)
        yield build_setup(
            stack,
            config,
            folder,
            model,
            env.make,
            objects=objects,
            name=config.environment.env,
            call_tool=env.call_tool,
            reward=reward,
            tasks=draw,
            task_sampler=task_sampler,
            format_trajectory=partial(format_conversation, model.tokenizer),
            concurrency=config.environment.concurrent_episodes or config.devices.slots,
        )


class OpenedEnv(NamedTuple):
    """The environment of a run, and what runs its effects."""

    make: Callable[..., HostEnv]  # make(tokenizer, turns=...)
    call_tool: ToolRunner = no_effects
    runner: TextEnvRunner | None = None  # of a `TextEnv`


def find_env(config: Config, objects: Objects) -> Any:
    """The environment as an object; KIND:SPEC for one of another library."""
    if objects.env is not None:
        return objects.env
    if config.environment.env.partition(":")[0] in EXTERNAL_ENVIRONMENTS:
        return config.environment.env
    return import_named(
        config.environment.env, f"one of the kinds {', '.join(EXTERNAL_ENVIRONMENTS)}, or an environment"
    )


def open_env(env: Any, config: Config, stack: ExitStack) -> OpenedEnv:
    """Open an environment for a run.

    Args:
        env: KIND:SPEC of another library's; a `TextEnv` class; an `fg.HostEnv`, or a function of the tokenizer that
            returns one, which has no effects.
        config: has the sizes.
        stack: closes the process of another library's environment.
    """
    settings = config.environment
    sizes = {
        "max_tokens": config.rollout.max_tokens,
        "context_tokens": config.rollout.context_tokens,
        "instructions": settings.instructions,
    }
    if isinstance(env, str):
        kind, _, spec = env.partition(":")
        process = EnvProcess(kind, spec, python=settings.python or executable, timeout=settings.env_seconds)
        tools = stack.enter_context(process).check()
        return OpenedEnv(partial(conversation_env, tools=tools, **sizes), process.call_tool)
    if isinstance(env, type | TextEnv):
        runner = TextEnvRunner(check_text_env(env), tool_seconds=settings.env_seconds)
        return OpenedEnv(partial(runner.host_env, **sizes), runner.call_tool, runner)
    return OpenedEnv(partial(make_host_env, env, config.rollout.context_tokens))


def make_host_env(env: Any, context_tokens: int, tokenizer: ChatTokenizer, *, turns: int) -> HostEnv:
    """An `fg.HostEnv`, or what a function of the tokenizer returns, with its own limits where they are lower."""
    made = env if isinstance(env, HostEnv) else env(tokenizer) if callable(env) else env
    if not isinstance(made, HostEnv):
        raise BadInput(
            f"the environment {env!r:.80} gave {made!r:.80}, which is no fg.HostEnv: give one, a function of the "
            "tokenizer that returns one, or a class of fg.TextEnv"
        )
    if made.max_tokens >= context_tokens:
        raise BadInput(
            f"the environment {made.name} has actions of {made.max_tokens} tokens, and "
            f"--context_tokens={context_tokens} holds them with their context: raise it"
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
