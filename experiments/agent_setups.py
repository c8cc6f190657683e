"""Settings of a run on the agent system, and the parts that they build.

Settings are one flat dict, which `run.json` keeps beside a run's results. Without `model` they are those of the offline
run: a small model that is made and warm-started here, the tasks of `offline_tasks`, roles of plain code. With one they
are those of the paper (AgentFlow, arXiv:2510.05592), and the other roles are spoken by the model's own frozen weights.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import optax

from experiments import domains, offline_tasks, offline_warmstart, prompts
from experiments.agent_tasks import Source, tasks_of
from experiments.hosted_setup import HostedSetup, make_engine, make_residency
from experiments.members import base_of, make_algorithm, make_reward, make_tool
from experiments.planner_setup import PLANNER, check_planner, frozen, load_start, make_planner
from flowgrpo import launch, loop
from flowgrpo.agent import roles
from flowgrpo.agent.rendering import appending, fresh
from flowgrpo.agent.roles import Role, Rule, Schema
from flowgrpo.agent.show import show
from flowgrpo.agent.speak import either, remote_speaker, speaker
from flowgrpo.agent.state import DONE
from flowgrpo.agent.system import agent_system
from flowgrpo.algorithms.compose import newest_segment_only
from flowgrpo.algorithms.options import Correction
from flowgrpo.contracts import Algorithm, Do, HostEnv, Reward, Tool
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.remote import remote
from flowgrpo.generate.wire import TextRequest
from flowgrpo.learner.folder import START
from flowgrpo.learner.state import make_optimizer
from flowgrpo.models.hf import Model, check_model
from flowgrpo.rollout.records import Played
from flowgrpo.rollout.replay import last_state
from flowgrpo.sandbox import Limits, Sandbox
from flowgrpo.text import Text
from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.corpus import Corpus, Document
from flowgrpo.tools.mcp import Stdio, mcp_tools
from flowgrpo.tools.python import python
from flowgrpo.tools.search import read_corpus, search
from flowgrpo.tools.toolset import ToolFailure, toolset
from flowgrpo.types import BadInput, Task

PAPER: dict[str, Any] = PLANNER | {
    "algorithm": "flow_grpo",
    "control": "none",
    "queries": 32,
    "samples": 8,
    "learning_rate": 1e-6,
    "beta": 0.001,
    "clip_high": 0.2,
    "temperature": 0.5,
    "turns": 3,
    "exam_turns": 10,
    "max_tokens": 2048,
    "context_tokens": 8192,
    "memory_tokens": 4096,
    "rendering": "fresh",
    "executor": "model",
    "verifier": "model",
    "generator": "model",
    "analyst": "model",
    "tools": "calculator,python,search",
    "updates": 150,
    "decay": 1.0,
    "micro_rows": 1,
    "slots": 32,
    "validation_tasks": 64,
    "dtype": "bfloat16",
    "remat": True,
    "warm_steps": 0,
    "demonstrations": 0,
    "decay_updates": 150,
    "chunk": 256,
    "steps": 16,
    "passages": 3,
    "tool_seconds": 30.0,
    "turn_seconds": 300.0,
    "group_seconds": 1800.0,
    "recorded": 1,  # groups of each update whose trajectories are written
    "test_tasks": 256,
    "tasks": None,
    "corpus": None,
    "mcp": (),
    "domains": "",
}
OFFLINE: dict[str, Any] = PAPER | {
    "learning_rate": 1e-3,
    "beta": 0.0,
    "clip_high": 0.28,
    "temperature": 1.0,
    "turns": 4,
    "exam_turns": 4,
    "max_tokens": 40,
    "context_tokens": 256,
    "memory_tokens": 200,
    "rendering": "append",
    "executor": "rule",
    "verifier": "rule",
    "generator": "rule",
    "analyst": "none",
    "updates": 100,
    "decay": 0.2,
    "micro_rows": 8,
    "slots": 64,
    "validation_tasks": 128,
    "dtype": "float32",
    "remat": False,
    "decay_updates": 100,
    "chunk": 32,
    "steps": 8,
    "passages": 1,
    "tool_seconds": 10.0,
    "turn_seconds": 60.0,
    "group_seconds": 300.0,
    "test_tasks": 400,
    "recorded": 4,  # one of each domain
    "warm_steps": 800,
    "warm_rate": 3e-3,
    "warm_rows": 16,
    "demonstrations": 4000,
    "domains": ",".join(offline_tasks.DOMAINS),
}
MAY_BE_LEFT_OUT = ("reward", "fields", "domain")  # settings that are there only where they are given
CONTROLS = ("none", "shuffled_rewards")
RENDERINGS = {"fresh": fresh, "append": appending}
BRIEF = ""  # the small model learns what to do from demonstrations
PROBE = 60.0  # seconds in which a server that speaks a role has to answer at the start
SIZES = ("queries", "samples", "temperature", "micro_rows")
SPOKEN = {
    "executor": roles.executor,
    "verifier": roles.verifier,
    "generator": roles.generator,
    "analyst": roles.analyst,
}
RULES = {"executor": roles.rule_executor, "verifier": roles.rule_verifier, "generator": roles.rule_generator}
ROLES = ("executor", "verifier", "generator", "analyst")


def settings_of(model: str | None, **chosen: Any) -> dict[str, Any]:
    """The preset, offline or the paper's, with what was chosen in its place; `None` is no choice."""
    preset = (OFFLINE if model is None else PAPER) | {"model": model, "seed": 0}
    unknown = sorted(set(chosen) - {*preset, *MAY_BE_LEFT_OUT})
    if unknown:
        raise BadInput(f"{unknown[0]!r} is no setting of this run; they are {', '.join(preset)}")
    settings = preset | {name: value for name, value in chosen.items() if value is not None}
    if settings["max_tokens"] >= settings["context_tokens"]:
        room = f"--context_tokens={settings['context_tokens']}, which holds both"
        raise BadInput(f"--max_tokens={settings['max_tokens']} leaves no room for a context within {room}")
    return settings


def check_settings(settings: Mapping[str, Any]) -> Source:
    """Raise `BadInput` for what is wrong with roles, learning, model and tasks, of which the tasks are returned."""
    for name in ROLES:
        check_role(name, settings[name])
    algorithm_of(settings)
    optimizer_of(settings)
    if settings["model"] is not None:
        check_model(settings["model"])
    return tasks_of(settings)


@contextmanager
def open_setup(
    settings: Mapping[str, Any], folder: Path, *, begin: Callable[[], None] = lambda: None
) -> Iterator[HostedSetup]:
    """The parts that these settings describe; sandbox, servers and engines live as long as the block.

    `begin` is called when everything that is named was found and has answered: before that nothing is written, and
    no program compiled.
    """
    check_planner(settings)
    source = check_settings(settings)
    with ExitStack() as stack:
        draw, hard = prompts.choose(settings, source.draw, source.train, groups=settings["queries"])
        sandbox = stack.enter_context(_sandbox(settings, source))
        reward = _reward(settings, source, sandbox)
        own = _tools(settings, sandbox, stack)
        tools = stack.enter_context(toolset(own, seconds=settings["tool_seconds"], workers=settings["slots"]))
        endpoints = _endpoints(settings, stack)
        begin()
        make = partial(make_env, schemas=tools.schemas, settings=settings)
        if settings["model"] is None:
            offline_warmstart.write_start(folder / START, make, tools.do, settings)
        model = load_start(settings["model"] or folder / START, settings)
        planner = make_planner(model, settings)
        served = model._replace(policy=planner.served, params=planner.serve(planner.params))
        engine = stack.enter_context(make_engine(served, settings))
        speakers, spoken = _speakers(settings, frozen(model, settings), stack)
        env, exam_env = (make(model.text, turns=settings[name]) for name in ("turns", "exam_turns"))
        yield HostedSetup(
            name="agent",
            settings=settings,
            folder=folder,
            model=model,
            planner=planner,
            env=env,
            exam_env=exam_env,
            engine=engine,
            residency=stack.enter_context(make_residency(settings, folder)),
            do=either(tools.do, endpoints | speakers),
            reward=reward,
            tasks=draw,
            prompts=hard,
            algorithm=algorithm_of(settings),
            optimizer=optimizer_of(settings),
            sizes=loop.Settings(**{name: settings[name] for name in SIZES}, compute_dtype=planner.compute_dtype),
            warm_start=partial(
                offline_warmstart.warm_start, model._replace(params=planner.params), env, tools.do, settings
            ),
            story=partial(_story, model.text),
            spoken=spoken,
        )


@contextmanager
def open_reward(settings: Mapping[str, Any]) -> Iterator[Reward]:
    """The rewards alone, as `open_setup` routes them; their sandbox lives as long as the block."""
    source = tasks_of(settings)
    with _sandbox(settings, source) as sandbox:
        yield _reward(settings, source, sandbox)


def _sandbox(settings: Mapping[str, Any], source: Source) -> Sandbox:
    """The sandbox of tools and rewards."""
    judged = () if settings.get("reward") else (*source.domains, settings.get("domain", ""))
    return Sandbox(workers=launch.cores(), preload=domains.preload(judged))


def _reward(settings: Mapping[str, Any], source: Source, sandbox: Sandbox) -> Reward:
    """The reward of one's own, or that of each domain; no task is without."""
    if settings.get("reward"):
        return make_reward(settings["reward"], source.draw("train", 0, 1)[0])
    default = settings.get("domain", None if settings["tasks"] else "answer")
    missing = [name for name in source.domains if name not in domains.DOMAINS]
    known = ", ".join(domains.DOMAINS)
    if default not in (None, *domains.DOMAINS):
        raise BadInput(f"--domain={default} has no reward; choose from {known}")
    if missing and default is None:
        raise BadInput(
            f"{settings['tasks']}: tasks of the domain {missing[0]!r} have no reward (there are {known}): have them "
            "judged like one of these, such as --domain=answer, or by a function of yours, --reward=MODULE:FUNCTION"
        )
    return domains.route(domains.Means(sandbox=sandbox), default=default)


def make_env(text: Text, *, schemas: Sequence[Schema], settings: Mapping[str, Any], turns: int) -> HostEnv:
    """The agent system over these tools."""
    brief = {"instructions": BRIEF, "describe": itemgetter("name")} if settings["model"] is None else {}
    return agent_system(
        text,
        schemas=schemas,
        planner=roles.planner(**brief),
        **{name: _role(name, settings[name]) for name in ROLES},
        turns=turns,
        rendering=RENDERINGS[settings["rendering"]],
        **{name: settings[name] for name in ("max_tokens", "context_tokens", "memory_tokens")},
    )


# Roles --------------------------------------------------------------------------------------------------


def _role(name: str, who: str) -> Role | Rule | None:
    """Make what plays a role: plain code, or a `Role` that is spoken; None for an analyst of "none"."""
    if who == "none" and name == "analyst":
        return None
    if who != "rule":
        return SPOKEN[name]()
    return RULES[name]


def players(name: str) -> tuple[str, str]:
    """Name who may play a role, beside a server: an analyst may be left out, and the others may be plain code."""
    return ("model", "rule") if name in RULES else ("model", "none")


def check_role(name: str, who: str) -> None:
    """Raise `BadInput` for a name that nobody has."""
    url, _, model = who.partition("#")
    if who not in players(name) and not ("://" in url and model):
        raise BadInput(f"--{name}={who} must be {', '.join(players(name))}, or a server and its model, as URL#MODEL")


def _speakers(settings: Mapping[str, Any], model: Model, stack: ExitStack) -> tuple[dict[str, Do], Engine | None]:
    """Open a speaker for the roles that the planner's first weights speak, frozen, and the engine behind it."""
    asked = [name for name in ROLES if settings[name] == "model"]
    if not asked:
        return {}, None
    engine = stack.enter_context(make_engine(model, settings, kept=1))
    spoken = speaker(
        model.text,
        engine.generate,
        max_tokens=settings["max_tokens"],
        prompt_tokens=settings["context_tokens"] - settings["max_tokens"],
        top_k=1,
        deadline=settings["turn_seconds"],
    )
    return dict.fromkeys(asked, spoken), engine


def _endpoints(settings: Mapping[str, Any], stack: ExitStack) -> dict[str, Do]:
    """Open a speaker for each role that an OpenAI-compatible server speaks, which has to answer now."""
    return {name: _endpoint(name, settings, stack) for name in ROLES if "://" in settings[name]}


def _endpoint(name: str, settings: Mapping[str, Any], stack: ExitStack) -> Do:
    """A role that a server speaks: `URL#model`."""
    url, _, model = settings[name].partition("#")
    server = remote(url, model=model)
    stack.callback(server.close)
    print(f"--{name}: asking {server.url} for a first token", file=sys.stderr, flush=True)
    said = server.generate([TextRequest([{"role": "user", "content": "Hello"}], max_tokens=1, deadline=PROBE)])[0]
    if said.error is not None:
        raise BadInput(f"--{name}={settings[name]} does not answer ({said.error}): start the server, or mend the URL")

    def complete(**asked: Any):
        return server.generate([TextRequest(**asked)])[0]

    return remote_speaker(complete, max_tokens=settings["max_tokens"], deadline=settings["turn_seconds"])


# Tools and tasks ----------------------------------------------------------------------------------------


def _tools(settings: Mapping[str, Any], sandbox: Sandbox, stack: ExitStack) -> list[Tool]:
    """The tools that are named, of one's own, too, and those of MCP servers."""
    limits = Limits(seconds=settings["tool_seconds"])
    known: dict[str, Callable[[], Tool]] = {
        "calculator": calculator,
        "python": lambda: python(sandbox, limits=limits, pure=settings["model"] is None),
        "search": lambda: search(_corpus(settings), top=settings["passages"]),
    }
    names = [name for name in settings["tools"].split(",") if name]
    unknown = [name for name in names if name not in known and ":" not in name]
    if unknown:
        raise BadInput(
            f"--tools: {unknown[0]!r} is none of {', '.join(known)}, nor MODULE:FUNCTION; servers are named by --mcp"
        )
    found = [known[name]() if name in known else make_tool(name) for name in names]
    for server in settings["mcp"]:
        try:
            found += stack.enter_context(mcp_tools(_server(server))).tools
        except ToolFailure as error:
            raise BadInput(f"--mcp={server}: {error}; mend the command or the URL, or start the server") from None
    return found


def _server(named: str) -> Stdio | str:
    """An MCP server: the URL of one, or the command that starts one."""
    words = shlex.split(named)
    if not words:
        raise BadInput("--mcp is empty: give the command of an MCP server, or its URL")
    return named if "://" in named else Stdio(words[0], words[1:])


def _corpus(settings: Mapping[str, Any]) -> Corpus:
    """The corpus that is named, or that of the offline world."""
    if settings["corpus"] is not None:
        return read_corpus(settings["corpus"])
    if settings["model"] is not None:
        raise BadInput("the tool search needs --corpus: a .jsonl, .txt or .md file, or a folder of them")
    texts = enumerate(offline_tasks.passages(), 1)
    return Corpus(tuple(Document(one["title"], one["text"], "corpus.jsonl", n, False) for n, one in texts))


# What is looked at ----------------------------------------------------------------------------------------


def first_prompt(env: HostEnv, text: Text, task: Task, do: Do) -> str:
    """The first prompt as the planner is given it; where the episode is over before, what ended it."""
    state, said = env.reset(jax.random.key(0), task, do)
    if state.stage == DONE:
        return f"there is no first prompt, since the planner never came to speak: {state.reason}"
    return f"the first prompt, {len(said.tokens)} tokens:\n{text.decode(said.tokens)}"


def _story(text: Text, env: HostEnv, played: Played) -> str:
    """A trajectory as text to read: gone through again from its record."""
    if not played.lens:
        return f"{played.task.query}\nended before its first turn: {played.reason}"
    return show(text, last_state(env, played), played.trajectory.turns)


# Learning -----------------------------------------------------------------------------------------------


def algorithm_of(settings: Mapping[str, Any]) -> Algorithm:
    """The member of the family, with its clipping and its KL term."""
    if settings["control"] not in CONTROLS:
        raise BadInput(f"control {settings['control']!r} is unknown; choose from {', '.join(CONTROLS)}")
    most = settings["turns"] * settings["max_tokens"]
    own: dict[str, Any] = {name: settings[name] for name in ("beta", "clip_high")}
    if settings.get("correction"):  # of a cluster whose rollouts are older than its weights
        own["correction"] = Correction(settings["correction"])
    algorithm = make_algorithm(settings["algorithm"], **own, max_tokens=most)
    if algorithm.targets is not None:
        raise BadInput(f"--algorithm={settings['algorithm']} needs a critic, which this run has none of: take another")
    return newest_segment_only(algorithm) if settings.get("learn_from") == "newest" else algorithm


def optimizer_of(settings: Mapping[str, Any]) -> optax.GradientTransformation:
    """The optimizer, with the fall of its rate."""
    decays = settings["decay"] < 1
    fall = {"decay_steps": settings["decay_updates"], "final_share": settings["decay"]} if decays else {}
    return make_optimizer(learning_rate=settings["learning_rate"], base=base_of(settings["optimizer"]), **fall)
