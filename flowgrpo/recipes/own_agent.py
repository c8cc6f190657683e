"""The recipe of a run on an agent of your own, a program or a function, which is trained as it is.

    fg.train_agent(agent, "tasks.jsonl", reward, model="path/of/model", folder="runs/mine")

    with open(config, folder) as setup: ...        the parts, while gateway, agents and engine live
    result = train(config, "runs/mine")            config: `preset(model, agent="python my_agent.py", tasks=...)`

The agent is given a base URL of the OpenAI API, behind which the model that is trained answers (`flowgrpo.gateway`).
All else is as in any run: checkpoints, going on, algorithms, controls, pages of trajectories.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

from flowgrpo.contracts import HostEnv, Reward, Scored
from flowgrpo.data.tokenizer import Text
from flowgrpo.gateway.agent_env import agent_env, context_figures
from flowgrpo.gateway.agent_start import Agent
from flowgrpo.gateway.agents import AgentHost
from flowgrpo.gateway.server import Gateway
from flowgrpo.recipes import agent as agent_recipe
from flowgrpo.recipes import offline_start, task_choice
from flowgrpo.recipes.agent import (
    Source,
    assemble,
    check_settings,
    make_sandbox,
    reward_of,
)
from flowgrpo.recipes.hosted import (
    HostedSetup,
    compile_engines,
    do_nothing,
    plain_story,
    play_tasks,
)
from flowgrpo.recipes.hosted_training import HostedWork, begin_hosted, train_hosted, training_tasks
from flowgrpo.recipes.own_agent_config import POSTED, Config
from flowgrpo.recipes.own_agent_config import preset as preset
from flowgrpo.recipes.planner import check_planner, load_start
from flowgrpo.run.run_dir import START
from flowgrpo.run.session import Tested
from flowgrpo.run.time_budget import ENDLESS, TimeBudget

NAME = "own_agent"
SERVED = "planner"  # the name of the model, as agents ask for it


def _make_env(text: Text, *, config: Config, turns: int) -> HostEnv:
    """Make the environment that the agent is to its model."""
    return agent_env(text, turns=turns, max_tokens=config.max_tokens, context_tokens=config.context_tokens)


@contextmanager
def open(
    config: Config,
    folder: Path,
    *,
    begin: Callable[[], object] = do_nothing,
    agent: Agent | None = None,
    reward: Reward | None = None,
) -> Iterator[HostedSetup]:
    """The parts that these settings describe; gateway, agents and engine live as long as the block.

    `agent` and `reward` stand in the place of those that the settings name.
    """
    check_planner(config)
    source = check_settings(config)
    with ExitStack() as stack:
        draw, hard = task_choice.choose(config, source.draw, source.train, groups=config.queries)
        judge = reward or _reward(config, source, stack)
        gateway = stack.enter_context(Gateway(model=SERVED, spell=str))
        host = stack.enter_context(
            AgentHost(
                agent or config.agent,
                gateway,
                seconds=config.agent_seconds,
                silence=config.silent_seconds,
                retries=config.retries,
                judged=judge is not None,
            )
        )
        host.check()
        begin()
        if config.model is None:
            offline_start.write_start(folder / START, _make_env, host.do, config)
        model = load_start(config.model or folder / START, config)
        gateway.spell = model.text.decode
        make = partial(_make_env, config=config)
        own = {"do": host.do, "width": config.agents or config.slots, "reward": judge, "tasks": draw, "prompts": hard}
        story = partial(plain_story, model.text)
        setup = assemble(stack, config, folder, model, make, name="agent of your own", story=story, **own)
        setup = setup._replace(submit=host.submit_to(setup.engine.submit), seen=context_figures)
        if config.model is None:
            start = model._replace(params=setup.planner.params)
            setup = setup._replace(
                warm_start=lambda setup: offline_start.script_imitation(start, setup.env, host.do, config)
            )
        yield setup


def _reward(config: Config, source: Source, stack: ExitStack) -> Reward | None:
    """The reward that is named, or that of each domain; None where agents give it."""
    if config.reward == POSTED:
        return None
    return reward_of(config, source, stack.enter_context(make_sandbox(config, source)))


def train(
    config: Config,
    folder: str | Path,
    *,
    agent: Agent | None = None,
    reward: Reward | None = None,
    every: int = 10,
    resume: bool = True,
    loggers: Sequence[str] = (),
    budget: TimeBudget = ENDLESS,
) -> dict[str, Any]:
    """Train in a folder, or go on there -> the result; a validation and a checkpoint come `every` so many updates."""
    how: dict[str, Any] = {"every": every, "resume": resume, "loggers": loggers, "budget": budget}
    return train_hosted(partial(open, agent=agent, reward=reward), HostedWork, NAME, config, folder, **how)


def train_agent(
    agent: Agent,
    tasks: str | Path,
    reward: Reward | Callable[[Any, str], Scored] | str | None = None,
    *,
    model: str | Path,
    folder: str | Path,
    every: int = 10,
    resume: bool = True,
    budget: TimeBudget = ENDLESS,
    **settings: Any,
) -> dict[str, Any]:
    """Train the model of an agent that knows nothing of training -> the result.

    agent       a command, "MODULE:FUNCTION", or a function of a task and a base URL, which returns its answer
    tasks       a file of tasks (.jsonl, .parquet), or reasoning_gym:NAME
    reward      a function (task, answer) -> fg.Scored, or its "MODULE:FUNCTION"; "posted" where agents give it
                themselves; None: that of each task's domain
    model       a folder of weights, or a hub id
    folder      of the run; one that is there goes on
    settings    fields of `Config`, such as updates, queries, samples, turns, algorithm, lora_rank
    """
    named = agent if isinstance(agent, str) else _name_of(agent)
    judge = reward if isinstance(reward, Reward) else Reward(reward) if callable(reward) else None
    called = _name_of(reward) if judge is not None else reward
    given = {"agent": named, "tasks": str(tasks), "reward": called, **settings}
    config = preset(str(model), **given)
    own = None if isinstance(agent, str) else agent
    return train(config, folder, agent=own, reward=judge, every=every, resume=resume, budget=budget)


def _name_of(thing: Any) -> str:
    """A name for what is no name itself, for the record of a run."""
    if isinstance(thing, list | tuple):
        return " ".join(map(str, thing))
    where, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{where}:{name}"


def rehearse(config: Config, folder: str | Path) -> None:
    """Print one rollout of each of the first tasks, as the model sees it."""
    path = begin_hosted(NAME, config, folder, resume=True)
    with open(config, path) as setup:
        setup = compile_engines(setup)
        tasks = training_tasks(setup, 0)[:4]
        played = play_tasks(setup, setup.env, tasks, jax.random.key(config.seed), samples=1)
        if setup.progress is not None:
            setup.progress.end()
        for one in played.played:
            why = one.scored.reason if one.scored else one.reason
            print(f"{setup.story(setup.env, one)}\nreward    {one.outcome} {why}\n")


def evaluate(config: Config, folder: Path, **sizes: int) -> tuple[int | None, Tested]:
    """Test a run's start and its best planner on fresh tasks -> (the update of the best, figures by domain, too)."""
    return agent_recipe.evaluate(config, folder, open_setup=open, **sizes)
