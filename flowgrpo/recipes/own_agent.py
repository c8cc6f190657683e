"""The recipe of a run on an agent of your own, a program or a function, whose model is trained.

    fg.recipes.own_agent.train_agent(agent, "tasks.jsonl", reward, model="path/of/model", folder="runs/mine")

    result = RECIPE.train(config, "runs/mine")     config: `preset(model, agent="python my_agent.py", tasks=...)`
    with build(config, folder) as setup: ...       the parts; gateway, agents and engine are closed with the block

The agent gets the base URL of an OpenAI-compatible API, which serves the model that is trained (`flowgrpo.gateway`).
Everything else is as in any run: checkpoints, resuming, algorithms, controls, pages of trajectories.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from flowgrpo.contracts import HostEnv, Reward, RewardResult
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.gateway.agent_env import agent_env, context_metrics
from flowgrpo.gateway.agent_start import ExternalAgent
from flowgrpo.gateway.agents import AgentHost
from flowgrpo.gateway.server import Gateway
from flowgrpo.recipes import offline_start
from flowgrpo.recipes.agent import (
    build_setup,
    check_settings,
    evaluate_params,
    load_planner,
    make_sandbox,
    print_rollout,
    reward_of,
)
from flowgrpo.recipes.own_agent_config import POSTED, Config, LimitSettings
from flowgrpo.recipes.own_agent_config import preset as preset
from flowgrpo.recipes.planner_reader import TEXT
from flowgrpo.recipes.recipe import NO_OBJECTS, Objects, Recipe, name_of
from flowgrpo.training import curriculum
from flowgrpo.training.hosted_training import hosted_trainable, training_tasks
from flowgrpo.training.language_model import (
    HostedSetup,
    format_conversation,
)
from flowgrpo.training.planner import check_planner
from flowgrpo.training.run_dir import START
from flowgrpo.training.time_budget import UNLIMITED, TimeBudget

NAME = "own_agent"
MODEL_NAME = "planner"  # the model's name in the agents' requests


def _make_env(text: ChatTokenizer, *, config: Config, turns: int) -> HostEnv:
    """The agent as an environment of its model."""
    return agent_env(
        text, turns=turns, max_tokens=config.rollout.max_tokens, context_tokens=config.rollout.context_tokens
    )


@contextmanager
def build(
    config: Config, folder: Path, *, objects: Objects = NO_OBJECTS, on_ready: Callable[[], object] | None = None
) -> Iterator[HostedSetup]:
    """The parts that these settings describe; gateway, agents and engine are closed with the block.

    `on_ready` is called when everything that the settings name was found, before anything is written.
    """
    objects.check(NAME, "agent", "tasks", "model", "algorithm", "optimizer", "reward")
    check_planner(config.model, config.devices)
    source = check_settings(config, objects)
    with ExitStack() as stack:
        draw, task_sampler = curriculum.make_task_sampler(
            config.tasks, source.draw, source.train, groups=config.rollout.queries, seed=config.run.seed
        )
        reward = objects.reward
        if reward is not None or config.tasks.reward != POSTED:
            reward = reward_of(config, source, stack.enter_context(make_sandbox(config, source)), reward)
        gateway = stack.enter_context(Gateway(model=MODEL_NAME, decode=str))
        host = stack.enter_context(
            AgentHost(
                objects.agent or config.agent.agent,
                gateway,
                timeout=config.agent.agent_seconds,
                silent_timeout=config.agent.silent_seconds,
                retries=config.agent.retries,
                has_reward=reward is not None,
            )
        )
        host.check()
        if on_ready is not None:
            on_ready()
        if config.model.model is None:
            offline_start.write_start_model(folder / START, _make_env, host.call_tool, config)
        model = load_planner(config, folder, objects)
        gateway.decode = model.tokenizer.decode
        setup = build_setup(
            stack,
            config,
            folder,
            model,
            partial(_make_env, config=config),
            objects=objects,
            name="agent of your own",
            call_tool=host.call_tool,
            reward=reward,
            tasks=draw,
            task_sampler=task_sampler,
            format_trajectory=partial(format_conversation, model.tokenizer),
            concurrency=config.agent.concurrent_agents or config.devices.slots,
        )
        setup = setup._replace(submit=host.submit_to(setup.engine.submit), rollout_metrics=context_metrics)
        if config.model.model is None:
            start = model._replace(params=setup.planner.params)
            setup = setup._replace(
                warm_start=lambda setup: offline_start.script_imitation(start, setup.env, host.call_tool, config)
            )
        yield setup


RECIPE = Recipe(
    name=NAME,
    command="train_agent",
    Config=Config,
    preset=preset,
    build=build,
    make_trainable=hosted_trainable(NAME),
    test=evaluate_params,
    planner=TEXT,
    rehearse=lambda setup: print_rollout(setup, training_tasks(setup, 0)[:4]),
)


def train_agent(
    agent: ExternalAgent,
    tasks: str | Path,
    reward: Reward | Callable[[Any, str], RewardResult] | str | None = None,
    *,
    model: str | Path,
    folder: str | Path,
    every: int = 10,
    resume: bool = True,
    budget: TimeBudget = UNLIMITED,
    **settings: Unpack[LimitSettings],
) -> dict[str, Any]:
    """Train the model of an agent that is written without training in mind -> the result.

    Args:
        agent: a command, "MODULE:FUNCTION", or a function of a task and a base URL, which returns its answer.
        tasks: a file of tasks (.jsonl, .parquet), or reasoning_gym:NAME.
        reward: a function (task, answer) -> fg.RewardResult, or its "MODULE:FUNCTION"; "posted" if agents send their
            reward themselves; None: the reward of each task's domain.
        model: a folder of weights, or a hub id.
        folder: of the run; an earlier run in it is resumed.
        every: updates between validations and checkpoints.
        resume: False deletes an earlier run in the folder.
        budget: time after which the run stops, saved.
        settings: fields of `Config`, such as updates, queries, samples, turns, algorithm, lora_rank.
    """
    function = reward if isinstance(reward, Reward) else Reward(reward) if callable(reward) else None
    config = preset(
        str(model),
        agent=agent if isinstance(agent, str) else name_of(agent),
        tasks=str(tasks),
        reward=reward if reward is None or isinstance(reward, str) else name_of(reward),
        **settings,
    )
    objects = Objects(agent=None if isinstance(agent, str) else agent, reward=function)
    return RECIPE.train(config, folder, objects=objects, every=every, resume=resume, budget=budget)
