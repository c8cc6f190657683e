"""The recipe of a run on the agent system: its planner is trained in the flow, with real tools.

with open(config, folder) as setup: ...      the parts, while sandbox, servers and engines live
result = train(Config(updates=3), "runs/agent")
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

from flowgrpo import launch
from flowgrpo.agent import roles
from flowgrpo.agent.action_forms import ACTION_FORMS
from flowgrpo.agent.examples import worked_examples
from flowgrpo.agent.rendering import appending, fresh
from flowgrpo.agent.role_backends import either, remote_speaker, speaker
from flowgrpo.agent.state import DONE
from flowgrpo.agent.system import agent_system
from flowgrpo.agent.tool_arguments import Schema, signature
from flowgrpo.agent.transcript import show_transcript
from flowgrpo.algorithms.compose import newest_segment_only
from flowgrpo.algorithms.options import Correction
from flowgrpo.contracts import Algorithm, Do, HostEnv, Reward, Tool
from flowgrpo.data.task_files import parse_fields, read_tasks
from flowgrpo.data.tasks import split_tasks
from flowgrpo.data.tokenizer import Messages, Text, start
from flowgrpo.files import make_folder, read_json, write_whole
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.openai_client import remote
from flowgrpo.generate.openai_wire import TextRequest
from flowgrpo.generate.remote_engine import UPDATES, RemoteEngine
from flowgrpo.learner.loss_scale import optimizer_for
from flowgrpo.models.hf import Model, check_model, save_model
from flowgrpo.recipes import offline_start, offline_tasks, registry, task_choice
from flowgrpo.recipes.agent_config import Config, TaskConfig
from flowgrpo.recipes.agent_config import preset as preset
from flowgrpo.recipes.agent_warm_start import check_format_followed, make_warm_start, obedience
from flowgrpo.recipes.hosted import (
    HostedSetup,
    compare_before_after,
    compile_engines,
    do_nothing,
    draw_from,
    examine,
    make_engine,
    make_residency,
    play_tasks,
    sizes_of,
)
from flowgrpo.recipes.hosted_training import HostedWork, begin_hosted, train_hosted, training_tasks
from flowgrpo.recipes.names import WITH_THE_TASKS
from flowgrpo.recipes.planner import check_planner, frozen, load_start, make_planner, template_of
from flowgrpo.recipes.registry import base_of, falling_optimizer, make_algorithm, make_reward, make_tool
from flowgrpo.recipes.task_choice import Draw
from flowgrpo.recipes.task_sets import TASK_SETS, TaskSet
from flowgrpo.report.progress import with_progress
from flowgrpo.rollout.records import Played
from flowgrpo.rollout.replay import last_state
from flowgrpo.run.run_dir import START, read_run
from flowgrpo.run.run_files import EXAMPLES, RUN
from flowgrpo.run.session import Tested, open_session
from flowgrpo.run.time_budget import ENDLESS, TimeBudget
from flowgrpo.run.warm_start import no_warm_start
from flowgrpo.sandbox import Limits, Sandbox
from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.mcp import Stdio, mcp_tools
from flowgrpo.tools.python import python
from flowgrpo.tools.search import Corpus, Document, read_corpus, search
from flowgrpo.tools.toolset import ToolFailure, Toolset, toolset
from flowgrpo.types import BadInput, Task

NAME = "agent"
FRESH = 1 << 20  # test tasks of `evaluate` from this one on: others than those of the run's own table
POOL = 512  # offline tasks that are met again and again, where tasks are chosen by what is known of them


class Source(NamedTuple):
    """The tasks of a run."""

    draw: Draw
    train: Callable[[], Sequence[Task]]  # those of training that have a number, in the order of their numbers
    domains: tuple[str, ...]


def task_set_of(config: TaskConfig) -> TaskSet | None:
    """The tasks that are made here, where `--tasks` names such a set."""
    return TASK_SETS.get(config.tasks or "")


def tasks_of(config: TaskConfig) -> Source:
    """Those of a file, or of the offline world, which never end: the first `POOL` of them have a number."""
    seed = config.seed
    if (made := task_set_of(config)) is not None:
        return Source(
            draw=partial(made.draw, seed),
            train=lambda: made.draw(seed, "train", 0, POOL),
            domains=(made.examples[0].domain,),
        )
    if config.tasks is None:
        if config.model is not None:
            sets = ", ".join(TASK_SETS)
            raise BadInput(f"--model needs --tasks: a .jsonl or .parquet file of tasks, reasoning_gym:NAME, or {sets}")
        names = tuple(config.domains.split(","))
        return Source(
            draw=lambda split, first, count: offline_tasks.make_tasks(seed, first, count, split, names),
            train=lambda: offline_tasks.make_tasks(seed, 0, POOL, "train", names),
            domains=names,
        )
    fields = parse_fields(list(config.fields))
    read = read_tasks(config.tasks, fields=fields, domain=config.domain)
    return Source(
        draw=draw_from(read, seed),
        train=lambda: split_tasks(read)["train"].items,
        domains=tuple({task.domain for task in read}),
    )


RENDERINGS = {"fresh": fresh, "append": appending}
BRIEF = ""  # the small model learns what to do from demonstrations
EXAMPLES_DEPEND_ON = ("examples", "tasks", "actions", "tools", "mcp", "corpus", "passages", "memory_tokens")
PROBE = 60.0  # seconds in which a server that speaks a role has to answer at the start
SPOKEN = {
    "executor": roles.executor,
    "verifier": roles.verifier,
    "generator": roles.generator,
    "analyst": roles.analyst,
}
RULES = {"executor": roles.rule_executor, "verifier": roles.rule_verifier, "generator": roles.rule_generator}


def check_settings(config: TaskConfig) -> Source:
    """Raise `BadInput` for what is wrong with learning, model and tasks, of which the tasks are returned."""
    algorithm_of(config)
    optimizer_of(config)
    if config.model is not None:
        check_model(config.model, template_of(config))
    return tasks_of(config)


@contextmanager
def open(config: Config, folder: Path, *, begin: Callable[[], object] = do_nothing) -> Iterator[HostedSetup]:
    """The parts that these settings describe; sandbox, servers and engines live as long as the block.

    `begin` is called when everything that is named was found and has answered: before that nothing is written, and
    no program compiled.
    """
    check_planner(config)
    source = check_settings(config)
    with ExitStack() as stack:
        draw, hard = task_choice.choose(config, source.draw, source.train, groups=config.queries)
        sandbox = stack.enter_context(make_sandbox(config, source))
        reward = reward_of(config, source, sandbox)
        own = _tools(config, sandbox, stack)
        tools = stack.enter_context(toolset(own, seconds=config.tool_seconds, workers=config.slots))
        served_by = {name: who for name, who in config.roles.items() if "://" in who}
        endpoints = {name: _endpoint(name, who, config, stack) for name, who in served_by.items()}
        shown = example_tasks(config, source)
        begin()
        make = partial(_make_env, schemas=tools.schemas, config=config)
        if config.model is None:
            offline_start.write_start(folder / START, make, tools.do, config)
        model = load_start(config.model or folder / START, config)
        make_with_examples = partial(make, examples=_examples(config, model.text, shown, tools, folder))
        make = make if config.drop_examples else make_with_examples
        setup = assemble(
            stack,
            config,
            folder,
            model,
            make,
            name="agent",
            do=tools.do,
            reward=reward,
            tasks=draw,
            prompts=hard,
            story=partial(_story, model.text),
        )
        form = ACTION_FORMS[config.actions]
        speakers, spoken = _speakers(config, frozen(model, config), stack)
        start = model._replace(params=setup.planner.params)
        setup = setup._replace(do=either(tools.do, endpoints | speakers), spoken=spoken)
        if config.model is None:
            yield setup._replace(
                warm_start=lambda setup: offline_start.script_imitation(start, setup.env, tools.do, config)
            )
            return
        how = {"config": config, "make_env": make_with_examples, "form": form, "schemas": tools.schemas}
        yield setup._replace(
            seen=obedience,
            check_first=partial(check_format_followed, text=model.text, config=config),
            warm_start=partial(make_warm_start, **how),
        )


def _engine(model: Model, config: TaskConfig, folder: Path) -> Engine | RemoteEngine:
    """The engine of this process, or one that stands for a server."""
    if config.sampled_by is None:
        return make_engine(model, config)
    url, _, name = config.sampled_by.partition("#")

    def save(params: Any, path: Path) -> None:
        save_model(path, model._replace(params=params))

    where = make_folder(Path(config.served_folder or folder / "served"))
    server = remote(url, name, api_key=os.environ.get("OPENAI_API_KEY"), concurrency=config.slots)
    hand_over = UPDATES[config.handed_over](server.url, save, where)
    return RemoteEngine(server, hand_over=hand_over, banned=model.banned, seconds=config.group_seconds)


def assemble(
    stack: ExitStack, config: TaskConfig, folder: Path, model: Model, make_env: Callable[..., HostEnv], **own: Any
) -> HostedSetup:
    """Make what every run on tasks has, around its environment: `make_env(text, turns=...)`; `own` are the other parts.

    Nothing is imitated before, unless `warm_start` is replaced.
    """
    planner = make_planner(model, config)
    served = model._replace(policy=planner.served, params=planner.serve(planner.params))
    env, exam_env = (make_env(model.text, turns=turns) for turns in (config.turns, config.exam_turns))
    return HostedSetup(
        config=config,
        folder=folder,
        model=model,
        planner=planner,
        env=env,
        exam_env=exam_env,
        engine=stack.enter_context(_engine(served, config, folder)),
        residency=stack.enter_context(make_residency(config, folder)),
        share=partial(task_choice.open_share, config),
        algorithm=algorithm_of(config),
        optimizer=optimizer_of(config),
        sizes=sizes_of(config, planner),
        warm_start=lambda _: no_warm_start(planner.params),
        **own,
    )


@contextmanager
def open_reward(config: Config) -> Iterator[Reward]:
    """The rewards alone, as `open` routes them; their sandbox lives as long as the block."""
    source = tasks_of(config)
    with make_sandbox(config, source) as sandbox:
        yield reward_of(config, source, sandbox)


def make_sandbox(config: TaskConfig, source: Source) -> Sandbox:
    """The sandbox of tools and rewards."""
    judged = () if config.reward else (*source.domains, config.domain or "")
    return Sandbox(workers=launch.cores(), preload=registry.preload(judged))


def reward_of(config: TaskConfig, source: Source, sandbox: Sandbox) -> Reward:
    """The reward of one's own, or that of each domain; no task is without."""
    if config.reward:
        return make_reward(config.reward, source.draw("train", 0, 1)[0])
    default = config.domain or (None if config.tasks else "answer")
    missing = [name for name in source.domains if name not in registry.DOMAINS]
    known = ", ".join(registry.DOMAINS)
    if default not in (None, *registry.DOMAINS):
        raise BadInput(f"--domain={default} has no reward; choose from {known}")
    if missing and default is None:
        raise BadInput(
            f"{config.tasks}: tasks of the domain {missing[0]!r} have no reward (there are {known}): have them "
            "judged like one of these, such as --domain=answer, or by a function of yours, --reward=MODULE:FUNCTION"
        )
    return registry.route(registry.Means(sandbox=sandbox), default=default)


def _make_env(text: Text, *, schemas: Sequence[Schema], config: Config, turns: int, examples: Messages = ()) -> HostEnv:
    """The agent system over these tools."""
    form = ACTION_FORMS[config.actions]
    brief: dict[str, Any] = {"instructions": BRIEF, "describe": itemgetter("name")}
    if config.model is not None:
        brief = {"instructions": "\n".join(filter(None, (form.instructions, instructions_of(config))))}
    if task_set_of(config) is not None:
        brief["describe"] = signature
    players: dict[str, Any] = {  # plain code, or a `Role` that is spoken; None for an analyst of "none"
        name: None if who == "none" else RULES[name] if who == "rule" else SPOKEN[name]()
        for name, who in config.roles.items()
    }
    return agent_system(
        text,
        schemas=schemas,
        planner=roles.planner(form=form, examples=examples, **brief),
        **players,
        turns=turns,
        rendering=RENDERINGS[config.rendering],
        max_tokens=config.max_tokens,
        context_tokens=config.context_tokens,
        memory_tokens=config.memory_tokens,
    )


# Examples ------------------------------------------------------------------------------------------------


def instructions_of(config: Config) -> str:
    """What the planner is told beside the form of its actions."""
    made = task_set_of(config)
    return config.instructions or ("" if made is None else made.instructions)


def example_tasks(config: Config, source: Source) -> Sequence[Task]:
    """The tasks that are to be worked examples, none of which the run is measured by."""
    made = task_set_of(config)
    if config.examples == "none":
        return ()
    if config.examples == WITH_THE_TASKS:
        assert made is not None  # as the Config demands
        tasks = made.examples
    else:
        fields = parse_fields(list(config.fields))
        tasks = tuple(read_tasks(config.examples, fields=fields, domain=config.domain or "answer"))
    _check_unseen(config, tasks, source)
    return tasks


def _examples(config: Config, text: Text, tasks: Sequence[Task], tools: Toolset, folder: Path) -> Messages:
    """The worked examples of a run, as they were when it began: a tool may say something else today."""
    if not tasks:
        return ()
    path, settings = folder / EXAMPLES, config.to_json()
    made_with = {name: settings[name] for name in EXAMPLES_DEPEND_ON}
    if path.exists() and (folder / RUN).exists():  # or else a dry run made them
        saved = read_json(path, "remove it, and the examples are made anew")
        if saved.get("made_with") == made_with:
            return saved["messages"]
    form = ACTION_FORMS[config.actions]
    messages = worked_examples(text, form, tasks, tools.do, schemas=tools.schemas, memory_tokens=config.memory_tokens)
    length, room = len(start(text, messages).tokens), config.context_tokens - config.max_tokens
    if length >= room:
        raise BadInput(
            f"--examples={config.examples} take {length} tokens, and --context_tokens={config.context_tokens} leaves "
            f"{room} before an action of --max_tokens={config.max_tokens}: raise it, or give fewer examples"
        )
    saved = {"made_with": made_with, "messages": messages}
    write_whole(make_folder(folder) / EXAMPLES, json.dumps(saved, indent=1) + "\n")
    return messages


def _check_unseen(config: Config, examples: Iterable[Task], source: Source) -> None:
    """Raise `BadInput` for an example that is a task of the validation or the test."""
    asked = {example.query: example.id for example in examples}
    for split, count in (("validation", config.validation_tasks), ("test", config.test_tasks)):
        for task in source.draw(split, 0, count):
            if task.query in asked:
                raise BadInput(
                    f"--examples={config.examples}: the example {asked[task.query]!r} is a task of the {split} "
                    f"({task.query!r:.80}): take one that the run is not measured by"
                )


# Roles --------------------------------------------------------------------------------------------------


def _speakers(config: Config, model: Model, stack: ExitStack) -> tuple[dict[str, Do], Engine | None]:
    """Open a speaker for the roles that the planner's first weights speak, frozen, and the engine behind it."""
    asked = [name for name, who in config.roles.items() if who == "model"]
    if not asked:
        return {}, None
    engine = stack.enter_context(make_engine(model, config, kept=1))
    spoken = speaker(
        model.text,
        engine.generate,
        max_tokens=config.max_tokens,
        prompt_tokens=config.context_tokens - config.max_tokens,
        top_k=1,
        deadline=config.turn_seconds,
    )
    return dict.fromkeys(asked, spoken), engine


def _endpoint(name: str, given: str, config: Config, stack: ExitStack) -> Do:
    """Open a speaker for a role of an OpenAI-compatible server, `URL#model`, which has to answer now."""
    url, _, model = given.partition("#")
    server = remote(url, model=model)
    stack.callback(server.close)
    print(f"--{name}: asking {server.url} for a first token", file=sys.stderr, flush=True)
    said = server.generate([TextRequest([{"role": "user", "content": "Hello"}], max_tokens=1, deadline=PROBE)])[0]
    if said.error is not None:
        raise BadInput(f"--{name}={given} does not answer ({said.error}): start the server, or fix the URL")

    def complete(**asked: Any):
        return server.generate([TextRequest(**asked)])[0]

    return remote_speaker(complete, max_tokens=config.max_tokens, deadline=config.turn_seconds)


# Tools and tasks ----------------------------------------------------------------------------------------


def _tools(config: Config, sandbox: Sandbox, stack: ExitStack) -> list[Tool]:
    """The tools that are named, of one's own, too, and those of MCP servers."""
    limits = Limits(seconds=config.tool_seconds)
    known: dict[str, Callable[[], Tool]] = {
        "calculator": calculator,
        "python": lambda: python(sandbox, limits=limits, pure=config.model is None),
        "search": lambda: search(_corpus(config), top=config.passages),
    }
    names = [name for name in config.tools.split(",") if name]
    unknown = [name for name in names if name not in known and ":" not in name]
    if unknown:
        raise BadInput(
            f"--tools: {unknown[0]!r} is none of {', '.join(known)}, nor MODULE:FUNCTION; servers are named by --mcp"
        )
    found = [known[name]() if name in known else make_tool(name) for name in names]
    for server in config.mcp:
        try:
            found += stack.enter_context(mcp_tools(_server(server))).tools
        except ToolFailure as error:
            raise BadInput(f"--mcp={server}: {error}; fix the command or the URL, or start the server") from None
    return found


def _server(named: str) -> Stdio | str:
    """An MCP server: the URL of one, or the command that starts one."""
    words = shlex.split(named)
    if not words:
        raise BadInput("--mcp is empty: give the command of an MCP server, or its URL")
    return named if "://" in named else Stdio(words[0], words[1:])


def _corpus(config: Config) -> Corpus:
    """The corpus that is named, or that of the offline world."""
    if config.corpus is not None:
        return read_corpus(config.corpus)
    made = task_set_of(config)
    if made is not None and made.passages is not None:
        return corpus_of(made.passages())
    if config.model is not None:
        raise BadInput("the tool search needs --corpus: a .jsonl, .txt or .md file, or a folder of them")
    return corpus_of(offline_tasks.passages())


def corpus_of(passages: Sequence[Mapping[str, str]]) -> Corpus:
    """A corpus of passages that are made here, as if they were the lines of a file."""
    numbered = enumerate(passages, 1)
    return Corpus(tuple(Document(each["title"], each["text"], "corpus.jsonl", n, False) for n, each in numbered))


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
    return show_transcript(text, last_state(env, played), played.turns)


# Learning -----------------------------------------------------------------------------------------------


def algorithm_of(config: TaskConfig) -> Algorithm:
    """The member of the family, with its clipping and its KL term."""
    most = config.turns * config.max_tokens
    algorithm = make_algorithm(
        config.algorithm,
        beta=config.beta,
        clip_high=config.clip_high,
        correction=Correction(config.correction) if config.correction else None,
        max_tokens=most,
    )
    if algorithm.name == "opd":
        raise BadInput("--algorithm=opd needs a teacher, which this run has none of: take another")
    if algorithm.targets is not None:
        raise BadInput(f"--algorithm={config.algorithm} needs a critic, which this run has none of: take another")
    return newest_segment_only(algorithm) if config.learn_from == "newest" else algorithm


def optimizer_of(config: TaskConfig) -> optax.GradientTransformation:
    """The optimizer, with the fall of its rate, and in float16 with a scale of the loss."""
    base = base_of(config.optimizer)
    steps = config.decay_updates * config.mini_batches
    falling = falling_optimizer(config.learning_rate, steps, config.decay, base=base)
    return optimizer_for(config.dtype, falling)


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


def rehearse(config: Config, folder: str | Path) -> None:
    """Print the first prompt as it is rendered, and one rollout of each of the first tasks as it is parsed."""
    path = begin_hosted(NAME, config, folder, resume=True)
    with open(config, path) as setup:
        tasks = training_tasks(setup, 0)[:4]
        print(f"model {config.model or path / START}, tools {', '.join(setup.env.tools)}\n")
        print(f"{first_prompt(setup.env, setup.model.text, tasks[0], setup.do)}\n", flush=True)
        setup = compile_engines(setup)
        played = play_tasks(setup, setup.env, tasks, jax.random.key(config.seed), samples=1)
        if setup.progress is not None:
            setup.progress.end()
        for one in played.played:
            why = one.scored.reason if one.scored else one.reason
            print(f"{setup.story(setup.env, one)}\nreward    {one.outcome} {why}\n")


def evaluate(
    config: TaskConfig,
    folder: Path,
    *,
    seed: int = 1000,
    tasks: int = 1000,
    samples: int = 1,
    open_setup: Callable[..., AbstractContextManager[HostedSetup]] = open,
) -> tuple[int | None, Tested]:
    """Test a run's start and its best planner on fresh tasks -> (the update of the best, figures by domain, too)."""
    with open_setup(config, folder) as setup:
        session = open_session(HostedWork(setup, read_run(folder)["recipe"]), folder)
        best, final = session.best_params()
        key, sizes = jax.random.key(seed), {"tasks": tasks, "samples": samples, "first": FRESH}
        played = [
            examine(setup, one, key, "test", **sizes).played for one in with_progress("play", (session.start, final))
        ]
        return best, compare_before_after(setup, played, samples=samples, ks=sorted({1, samples}))
