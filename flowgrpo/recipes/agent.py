"""The recipe of a run on the agent system: its planner is trained in the flow, with real tools.

result = RECIPE.train(preset(updates=3), "runs/agent")

with build(config, folder) as setup: ...      the parts; sandbox, servers and engines are closed with the block
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from flowgrpo.agent.rendering import fresh_context, growing_context
from flowgrpo.agent.role_backends import endpoint_role, frozen_role, route_calls
from flowgrpo.agent.state import DONE
from flowgrpo.agent.system import AgentLimits, AgentRoles, agent_system
from flowgrpo.agent.transcript import show_transcript
from flowgrpo.algorithms.compose import newest_segment_only
from flowgrpo.algorithms.options import Correction
from flowgrpo.contracts import Algorithm, HostEnv, Reward, Tool, ToolRunner
from flowgrpo.data.task_files import parse_fields, read_tasks, to_tasks
from flowgrpo.data.tasks import Tasks, split_tasks
from flowgrpo.data.tokenizer import ChatTokenizer, Messages, start_conversation
from flowgrpo.data.tool_calls import Schema, signature
from flowgrpo.files import make_folder, read_json, write_atomic
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.openai_client import remote
from flowgrpo.generate.openai_wire import TextRequest
from flowgrpo.generate.remote_engine import WEIGHT_SENDERS, RemoteEngine
from flowgrpo.learner.loss_scale import optimizer_for
from flowgrpo.models.hf import Model, check_model, save_model
from flowgrpo.recipes import offline_start, offline_tasks, registry
from flowgrpo.recipes.agent_config import Config, OfflineTasksSection, TaskConfig
from flowgrpo.recipes.agent_config import preset as preset
from flowgrpo.recipes.agent_warm_start import check_format_followed, format_compliance, make_warm_start
from flowgrpo.recipes.planner_reader import TEXT
from flowgrpo.recipes.recipe import NO_OBJECTS, Objects, Recipe, name_of
from flowgrpo.recipes.registry import (
    check_reward,
    check_tools,
    decayed_adamw,
    make_algorithm,
    make_base_optimizer,
    make_reward,
    make_tool,
)
from flowgrpo.recipes.task_sets import TASK_SETS, TaskSet
from flowgrpo.renamed import SETTINGS, current_names
from flowgrpo.report.progress import with_progress
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.rollout.replay import last_state
from flowgrpo.sandbox import Limits, Sandbox
from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.mcp import Stdio, mcp_tools
from flowgrpo.tools.python import python
from flowgrpo.tools.search import Corpus, Document, read_corpus, search
from flowgrpo.tools.toolset import ToolFailure, Toolset, toolset
from flowgrpo.training import curriculum
from flowgrpo.training.config import flat_settings
from flowgrpo.training.curriculum import Draw, HardTaskSampler
from flowgrpo.training.hosted_training import hosted_trainable, training_tasks
from flowgrpo.training.language_model import (
    HostedSetup,
    compare_before_after,
    compile_engines,
    draw_from,
    make_engine,
    make_offloader,
    roll_out_split,
    roll_out_tasks,
    sizes_of,
)
from flowgrpo.training.names import BUILTIN_EXAMPLES
from flowgrpo.training.planner import check_planner, frozen_start, load_start, make_planner, template_of
from flowgrpo.training.run_files import EXAMPLES, RUN, START
from flowgrpo.training.session import TestReport
from flowgrpo.training.settings import HostedConfig
from flowgrpo.training.warm_start import no_warm_start
from flowgrpo.types import JSON, BadInput, Params, Task

NAME = "agent"
FRESH = 1 << 20  # first test task of `evaluate`, so that it shares none with the run's own table
POOL = 512  # number of offline tasks among which --prompts=hard and curriculum choose


class TaskSource(NamedTuple):
    """The tasks of a run."""

    draw: Draw
    train: Callable[[], Sequence[Task]]  # the training tasks among which --prompts chooses
    domains: tuple[str, ...]


def builtin_task_set(config: TaskConfig) -> TaskSet | None:
    """The built-in task set that --tasks names; None if it names a file or nothing."""
    return TASK_SETS.get(config.tasks.tasks or "")


def task_source_of(
    config: TaskConfig, tasks: Tasks | Sequence[Task | Mapping[str, JSON]] | None = None, *, any_fields: bool = False
) -> TaskSource:
    """These tasks; or those of a built-in set, of a file, or of the offline world."""
    seed = config.run.seed
    if tasks is not None:
        return _source_of(to_tasks(tasks, domain=config.tasks.domain, any_fields=any_fields), seed)
    if (task_set := builtin_task_set(config)) is not None:
        return TaskSource(
            draw=partial(task_set.draw, seed),
            train=lambda: task_set.draw(seed, "train", 0, POOL),
            domains=(task_set.examples[0].domain,),
        )
    if config.tasks.tasks is None:
        if config.model.model is not None or not isinstance(config.tasks, OfflineTasksSection):
            sets = ", ".join(TASK_SETS)
            raise BadInput(f"--model needs --tasks: a .jsonl or .parquet file of tasks, reasoning_gym:NAME, or {sets}")
        names = tuple(config.tasks.domains.split(","))
        return TaskSource(
            draw=lambda split, first, count: offline_tasks.make_tasks(seed, first, count, split, names),
            train=lambda: offline_tasks.make_tasks(seed, 0, POOL, "train", names),
            domains=names,
        )
    fields = parse_fields(list(config.tasks.fields))
    return _source_of(
        to_tasks(config.tasks.tasks, fields=fields, domain=config.tasks.domain, any_fields=any_fields), seed
    )


def _source_of(tasks: Tasks, seed: int) -> TaskSource:
    return TaskSource(
        draw=draw_from(tasks, seed),
        train=lambda: split_tasks(tasks)["train"].items,
        domains=tuple({task.domain for task in tasks}),
    )


RENDERINGS = {"fresh": fresh_context, "append": growing_context}
EXAMPLES_DEPEND_ON = ("examples", "tasks", "actions", "tools", "mcp", "corpus", "search_top_k", "memory_tokens")
PROBE_SECONDS = 60.0  # timeout of the first request to a server that speaks a role
SPOKEN_ROLES = {
    "executor": roles.executor,
    "verifier": roles.verifier,
    "generator": roles.generator,
    "analyst": roles.analyst,
}
RULE_ROLES = {"executor": roles.rule_executor, "verifier": roles.rule_verifier, "generator": roles.rule_generator}


def check_settings(config: TaskConfig, objects: Objects = NO_OBJECTS, *, any_fields: bool = False) -> TaskSource:
    """Check algorithm, optimizer, model and tasks, which may have `any_fields`; raises `BadInput`, or returns them."""
    algorithm_of(config, objects.algorithm)
    optimizer_of(config, objects.optimizer)
    check_start(config, objects)
    return task_source_of(config, objects.tasks, any_fields=any_fields)


def check_start(config: HostedConfig, objects: Objects) -> None:
    """Raise `BadInput` unless the model that the settings or the objects name can be loaded, and renders messages."""
    if objects.model is None:
        if config.model.model is not None:
            check_model(config.model.model, template_of(config.model))
        return
    if not isinstance(objects.model, Model) or objects.model.tokenizer is None:
        given = "a model without a tokenizer" if isinstance(objects.model, Model) else repr(objects.model)[:80]
        raise BadInput(f"the model is {given}, and has to read and write text: give fg.load_model(...)")
    if config.model.model is None:
        raise BadInput(
            f"other settings follow from the model: give its name to the preset, too, model={name_of(objects.model)!r}"
        )
    if config.model.chat_template is not None:
        raise BadInput("--chat_template is of a model that is loaded by its name: load this one with template=")
    start_conversation(objects.model.tokenizer, [{"role": "user", "content": "x"}])


def load_planner(config: HostedConfig, folder: Path, objects: Objects) -> Model:
    """The planner's start: this object, the model that the settings name, or the one that was made in the folder."""
    assert objects.model is None or isinstance(objects.model, Model)  # by `check_start`
    return load_start(config.model.model or folder / START, config.model, objects.model)


@contextmanager
def build(
    config: Config, folder: Path, *, objects: Objects = NO_OBJECTS, on_ready: Callable[[], object] | None = None
) -> Iterator[HostedSetup]:
    """The parts that these settings describe; sandbox, servers and engines are closed with the block.

    `on_ready` is called when everything that the settings name was found and has answered. Nothing is written, and no
    program compiled, before that.
    """
    objects.check(NAME, "tasks", "model", "algorithm", "optimizer", "reward", "tools")
    check_planner(config.model, config.devices)
    source = check_settings(config, objects)
    with ExitStack() as stack:
        draw, task_sampler = curriculum.make_task_sampler(
            config.tasks, source.draw, source.train, groups=config.rollout.queries, seed=config.run.seed
        )
        sandbox = stack.enter_context(make_sandbox(config, source))
        reward = reward_of(config, source, sandbox, objects.reward)
        chosen_tools = _make_tools(config, sandbox, stack) if objects.tools is None else check_tools(objects.tools)
        tools = stack.enter_context(
            toolset(chosen_tools, timeout=config.agent.tool_seconds, concurrency=config.devices.slots)
        )
        endpoints = {
            name: _open_endpoint(name, backend, config, stack)
            for name, backend in config.roles.settings().items()
            if "://" in backend
        }
        tasks_shown = example_tasks(config, source)
        if on_ready is not None:
            on_ready()

        make_plain_env = partial(_make_env, schemas=tools.schemas, config=config)
        if config.model.model is None:
            offline_start.write_start_model(folder / START, make_plain_env, tools.call_tool, config)
        model = load_planner(config, folder, objects)
        examples = _render_examples(config, model.tokenizer, tasks_shown, tools, folder)
        make_example_env = partial(make_plain_env, examples=examples)
        setup = build_setup(
            stack,
            config,
            folder,
            model,
            make_plain_env if config.agent.drop_examples else make_example_env,
            objects=objects,
            name="agent",
            call_tool=tools.call_tool,
            reward=reward,
            tasks=draw,
            task_sampler=task_sampler,
            format_trajectory=partial(_format_trajectory, model.tokenizer),
        )
        speakers, role_engine = _open_speakers(config, frozen_start(model, config.model), stack)
        setup = setup._replace(call_tool=route_calls(tools.call_tool, endpoints | speakers), role_engine=role_engine)
        if config.model.model is None:
            start = model._replace(params=setup.planner.params)
            yield setup._replace(
                warm_start=lambda setup: offline_start.script_imitation(start, setup.env, tools.call_tool, config)
            )
            return
        yield setup._replace(
            rollout_metrics=format_compliance,
            check_first_rollout=partial(check_format_followed, text=model.tokenizer, config=config),
            warm_start=partial(
                make_warm_start,
                config=config,
                make_env=make_example_env,
                form=ACTION_FORMS[config.agent.actions],
                schemas=tools.schemas,
            ),
        )


def build_setup(
    stack: ExitStack,
    config: TaskConfig,
    folder: Path,
    model: Model,
    make_env: Callable[..., HostEnv],
    *,
    objects: Objects,
    name: str,
    call_tool: ToolRunner,
    reward: Reward | None,
    tasks: Draw,
    task_sampler: HardTaskSampler | None,
    format_trajectory: Callable[[HostEnv, RecordedTrajectory], str],
    concurrency: int | None = None,
) -> HostedSetup:
    """The parts that every run on tasks has, around its environment, without a warm start.

    Args:
        stack: closes engine and offloader.
        make_env: `make_env(tokenizer, turns=...)`.
        objects: whose algorithm and optimizer replace those that the settings name.
        name: the run's name in its result.
        call_tool: runs a tool call.
        reward: None if the environment returns rewards.
        tasks: draws tasks of a split.
        task_sampler: chooses the training tasks instead of `tasks`, if it is not None.
        format_trajectory: a trajectory as text.
        concurrency: trajectories that run at a time; None: the number of slots.
    """
    planner = make_planner(model, config.model, config.devices, seed=config.run.seed)
    for_engine = model._replace(policy=planner.engine_policy, params=planner.to_engine(planner.params))
    env, eval_env = (
        make_env(model.tokenizer, turns=turns) for turns in (config.rollout.turns, config.rollout.eval_turns)
    )
    if config.server.sampling_server is None:
        engine: Engine | RemoteEngine = make_engine(for_engine, config)
    else:
        url, _, server_model = config.server.sampling_server.partition("#")
        weight_folder = make_folder(Path(config.server.weight_folder or folder / "served"))
        server = remote(url, server_model, api_key=os.environ.get("OPENAI_API_KEY"), concurrency=config.devices.slots)

        def save(params: Params, path: Path) -> None:
            save_model(path, for_engine._replace(params=params))

        send_weights = WEIGHT_SENDERS[config.server.weight_transfer](server.url, save, weight_folder)
        engine = RemoteEngine(
            server, send_weights=send_weights, banned=model.banned, timeout=config.rollout.group_seconds
        )
    return HostedSetup(
        name=name,
        config=config,
        folder=folder,
        model=model,
        planner=planner,
        env=env,
        eval_env=eval_env,
        engine=stack.enter_context(engine),
        offloader=stack.enter_context(make_offloader(config.devices, folder)),
        call_tool=call_tool,
        reward=reward,
        tasks=tasks,
        task_sampler=task_sampler,
        task_metrics=partial(curriculum.curriculum_metrics, config.tasks),
        algorithm=algorithm_of(config, objects.algorithm),
        optimizer=optimizer_of(config, objects.optimizer),
        sizes=sizes_of(config.rollout, config.learner, planner),
        warm_start=lambda _: no_warm_start(planner.params),
        format_trajectory=format_trajectory,
        concurrency=concurrency,
    )


@contextmanager
def build_reward(config: Config) -> Iterator[Reward]:
    """The reward alone, as `build` makes it; its sandbox is closed with the block."""
    source = task_source_of(config)
    with make_sandbox(config, source) as sandbox:
        yield reward_of(config, source, sandbox)


def make_sandbox(config: TaskConfig, source: TaskSource) -> Sandbox:
    """The sandbox of tools and rewards, with the modules that the tasks' rewards need."""
    judged = () if config.tasks.reward else (*source.domains, config.tasks.domain or "")
    return Sandbox(workers=launch.num_cores(), preload=registry.modules_to_preload(judged))


def reward_of(config: TaskConfig, source: TaskSource, sandbox: Sandbox, reward: Reward | None = None) -> Reward:
    """This reward; or that which --reward names, or that of each task's domain. `BadInput` if a task has none."""
    if reward is not None:
        return check_reward(reward, name_of(reward), source.draw("train", 0, 1)[0])
    if config.tasks.reward:
        return make_reward(config.tasks.reward, source.draw("train", 0, 1)[0])
    default = config.tasks.domain or (None if config.tasks.tasks else "answer")
    without = [name for name in source.domains if name not in registry.DOMAINS]
    known = ", ".join(registry.DOMAINS)
    if default not in (None, *registry.DOMAINS):
        raise BadInput(f"--domain={default} has no reward; choose from {known}")
    if without and default is None:
        raise BadInput(
            f"{config.tasks.tasks}: tasks of the domain {without[0]!r} have no reward (there are {known}): have them "
            "judged like one of these, such as --domain=answer, or by a function of yours, --reward=MODULE:FUNCTION"
        )
    return registry.route_by_domain(registry.RewardContext(sandbox=sandbox), default=default)


def _make_env(
    text: ChatTokenizer, *, schemas: Sequence[Schema], config: Config, turns: int, examples: Messages = ()
) -> HostEnv:
    """The agent system over these tools."""
    form = ACTION_FORMS[config.agent.actions]
    if config.model.model is None:  # the small model learns from demonstrations what to do
        prompt: dict[str, Any] = {"instructions": "", "describe": itemgetter("name")}
    else:
        prompt = {"instructions": "\n".join(filter(None, (form.instructions, instructions_of(config))))}
    if builtin_task_set(config) is not None:
        prompt["describe"] = signature
    other_roles: dict[str, Any] = {  # plain code, or a `Role` that a model speaks; None for an analyst of "none"
        name: None if backend == "none" else RULE_ROLES[name] if backend == "rule" else SPOKEN_ROLES[name]()
        for name, backend in config.roles.settings().items()
    }
    return agent_system(
        text,
        schemas=schemas,
        roles=AgentRoles(planner=roles.planner(form=form, examples=examples, **prompt), **other_roles),
        limits=AgentLimits(
            turns=turns,
            max_tokens=config.rollout.max_tokens,
            context_tokens=config.rollout.context_tokens,
            memory_tokens=config.agent.memory_tokens,
        ),
        rendering=RENDERINGS[config.rollout.rendering],
    )


# Examples ------------------------------------------------------------------------------------------------


def instructions_of(config: Config) -> str:
    """Instructions in the planner's prompt, after those of the form of its actions."""
    task_set = builtin_task_set(config)
    return config.agent.instructions or ("" if task_set is None else task_set.instructions)


def example_tasks(config: Config, source: TaskSource) -> Sequence[Task]:
    """The tasks of the few-shot examples; raises `BadInput` if one of them is a validation or test task."""
    if config.agent.examples == "none":
        return ()
    if config.agent.examples == BUILTIN_EXAMPLES:
        task_set = builtin_task_set(config)
        assert task_set is not None  # checked by the Config
        examples: Sequence[Task] = task_set.examples
    else:
        fields = parse_fields(list(config.tasks.fields))
        examples = tuple(read_tasks(config.agent.examples, fields=fields, domain=config.tasks.domain or "answer"))
    id_by_query = {example.query: example.id for example in examples}
    for split, count in (("validation", config.evaluation.validation_tasks), ("test", config.evaluation.test_tasks)):
        for task in source.draw(split, 0, count):
            if task.query in id_by_query:
                raise BadInput(
                    f"--examples={config.agent.examples}: the example {id_by_query[task.query]!r} is a task of the "
                    f"{split} ({task.query!r:.80}): take one that the run is not measured by"
                )
    return examples


def _render_examples(
    config: Config, tokenizer: ChatTokenizer, tasks: Sequence[Task], tools: Toolset, folder: Path
) -> Messages:
    """The few-shot examples of a run as messages. A resumed run reads them, since a tool may answer otherwise today."""
    if not tasks:
        return ()
    path, settings = folder / EXAMPLES, flat_settings(config.to_json())
    made_with = {name: settings[name] for name in EXAMPLES_DEPEND_ON}
    if path.exists() and (folder / RUN).exists():  # without a run, a dry run wrote them
        saved = read_json(path, "remove it, and the examples are made anew")
        if current_names(saved.get("made_with") or {}, SETTINGS) == made_with:
            return saved["messages"]
    form = ACTION_FORMS[config.agent.actions]
    messages = worked_examples(
        tokenizer, form, tasks, tools.call_tool, schemas=tools.schemas, memory_tokens=config.agent.memory_tokens
    )
    length = len(start_conversation(tokenizer, messages).tokens)
    room = config.rollout.context_tokens - config.rollout.max_tokens
    if length >= room:
        raise BadInput(
            f"--examples={config.agent.examples} take {length} tokens, and "
            f"--context_tokens={config.rollout.context_tokens} leaves {room} before an action of "
            f"--max_tokens={config.rollout.max_tokens}: raise it, or give fewer examples"
        )
    saved = {"made_with": made_with, "messages": messages}
    write_atomic(make_folder(folder) / EXAMPLES, json.dumps(saved, indent=1) + "\n")
    return messages


# Roles --------------------------------------------------------------------------------------------------


def _open_speakers(config: Config, model: Model, stack: ExitStack) -> tuple[dict[str, ToolRunner], Engine | None]:
    """Speakers of the roles with the backend "model", the planner's frozen start, and the engine that they share."""
    names = [name for name, backend in config.roles.settings().items() if backend == "model"]
    if not names:
        return {}, None
    engine = stack.enter_context(make_engine(model, config, max_recorded_top_k=1))
    speak = frozen_role(
        model.tokenizer,
        engine.generate,
        max_tokens=config.rollout.max_tokens,
        prompt_tokens=config.rollout.context_tokens - config.rollout.max_tokens,
        top_k=1,
        deadline=config.rollout.turn_seconds,
    )
    return dict.fromkeys(names, speak), engine


def _open_endpoint(name: str, backend: str, config: Config, stack: ExitStack) -> ToolRunner:
    """The speaker of a role on an OpenAI-compatible server, `URL#MODEL`, which must answer a first request."""
    url, _, model = backend.partition("#")
    server = remote(url, model=model)
    stack.callback(server.close)
    print(f"--{name}: asking {server.url} for a first token", file=sys.stderr, flush=True)
    hello = TextRequest([{"role": "user", "content": "Hello"}], max_tokens=1, deadline=PROBE_SECONDS)
    response = server.generate([hello])[0]
    if response.error is not None:
        raise BadInput(f"--{name}={backend} does not answer ({response.error}): start the server, or fix the URL")

    def complete(**request: Any):
        return server.generate([TextRequest(**request)])[0]

    return endpoint_role(complete, max_tokens=config.rollout.max_tokens, deadline=config.rollout.turn_seconds)


# Tools --------------------------------------------------------------------------------------------------


def _make_tools(config: Config, sandbox: Sandbox, stack: ExitStack) -> list[Tool]:
    """The tools of --tools, then those of the MCP servers."""
    limits = Limits(seconds=config.agent.tool_seconds)
    builtin: dict[str, Callable[[], Tool]] = {
        "calculator": calculator,
        "python": lambda: python(sandbox, limits=limits, pure=config.model.model is None),
        "search": lambda: search(_corpus(config), top=config.agent.search_top_k),
    }
    names = [name for name in config.agent.tools.split(",") if name]
    unknown = [name for name in names if name not in builtin and ":" not in name]
    if unknown:
        raise BadInput(
            f"--tools: {unknown[0]!r} is none of {', '.join(builtin)}, nor MODULE:FUNCTION; servers are named by --mcp"
        )
    tools = [builtin[name]() if name in builtin else make_tool(name) for name in names]
    for server in config.agent.mcp:
        words = shlex.split(server)
        if not words:
            raise BadInput("--mcp is empty: give the command of an MCP server, or its URL")
        try:
            tools += stack.enter_context(mcp_tools(server if "://" in server else Stdio(words[0], words[1:]))).tools
        except ToolFailure as error:
            raise BadInput(f"--mcp={server}: {error}; fix the command or the URL, or start the server") from None
    return tools


def _corpus(config: Config) -> Corpus:
    """The documents of the search tool: those of --corpus, of the built-in task set, or of the offline world."""
    if config.agent.corpus is not None:
        return read_corpus(config.agent.corpus)
    task_set = builtin_task_set(config)
    if task_set is not None and task_set.passages is not None:
        return corpus_of(task_set.passages())
    if config.model.model is not None:
        raise BadInput("the tool search needs --corpus: a .jsonl, .txt or .md file, or a folder of them")
    return corpus_of(offline_tasks.passages())


def corpus_of(passages: Sequence[Mapping[str, str]]) -> Corpus:
    """A corpus of generated passages, as if they were the lines of a file."""
    return Corpus(
        tuple(
            Document(passage["title"], passage["text"], "corpus.jsonl", number, False)
            for number, passage in enumerate(passages, 1)
        )
    )


def first_prompt(env: HostEnv, text: ChatTokenizer, task: Task, call_tool: ToolRunner) -> str:
    """The planner's first prompt of a task; or why the episode ended before it."""
    state, observation = env.reset(jax.random.key(0), task, call_tool)
    if state.stage == DONE:
        return f"there is no first prompt, since the episode ended before the planner's turn: {state.reason}"
    return f"the first prompt, {len(observation.tokens)} tokens:\n{text.decode(observation.tokens)}"


def _format_trajectory(tokenizer: ChatTokenizer, env: HostEnv, trajectory: RecordedTrajectory) -> str:
    """A trajectory as text, replayed from its record."""
    if not trajectory.effect_counts:
        return f"{trajectory.task.query}\nended before its first turn: {trajectory.reason}"
    return show_transcript(tokenizer, last_state(env, trajectory), trajectory.turns)


# Learning -----------------------------------------------------------------------------------------------


def algorithm_of(config: TaskConfig, algorithm: Algorithm | None = None) -> Algorithm:
    """This algorithm; or the one that the settings name, with their clip width, KL coefficient and correction."""
    algorithm = algorithm or make_algorithm(
        config.learner.algorithm,
        beta=config.learner.beta,
        clip_high=config.learner.clip_high,
        correction=Correction(config.learner.correction) if config.learner.correction else None,
        max_tokens=config.rollout.turns * config.rollout.max_tokens,
    )
    if algorithm.name == "opd":
        raise BadInput("--algorithm=opd needs a teacher, which this run has none of: take another")
    if algorithm.targets is not None:
        raise BadInput(f"--algorithm={algorithm.name} needs a critic, which this run has none of: take another")
    return newest_segment_only(algorithm) if config.learner.loss_versions == "newest" else algorithm


def optimizer_of(
    config: TaskConfig, optimizer: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """This optimizer, or the one of the settings with the decay of its learning rate; with loss scaling in float16."""
    if optimizer is None:
        base = make_base_optimizer(config.learner.optimizer)
        steps = config.learner.decay_updates * config.learner.mini_batches
        optimizer = decayed_adamw(config.learner.learning_rate, steps, config.learner.decay_to, base=base)
    return optimizer_for(config.model.dtype, optimizer)


# The recipe ---------------------------------------------------------------------------------------------


def print_first_rollouts(setup: HostedSetup) -> None:
    """Print the first prompt, and one trajectory of each of the first tasks."""
    config, tasks = setup.config, training_tasks(setup, 0)[:4]
    print(f"model {config.model.model or setup.folder / START}, tools {', '.join(setup.env.tools)}\n")
    print(f"{first_prompt(setup.env, setup.model.tokenizer, tasks[0], setup.call_tool)}\n", flush=True)
    print_rollout(setup, tasks)


def print_rollout(setup: HostedSetup, tasks: Sequence[Task]) -> None:
    """Roll out one trajectory of each task, and print it with its reward."""
    setup = compile_engines(setup)
    result = roll_out_tasks(setup, setup.env, tasks, jax.random.key(setup.config.run.seed), samples=1)
    if setup.progress is not None:
        setup.progress.end()
    for trajectory in result.trajectories:
        reason = trajectory.reward_result.reason if trajectory.reward_result else trajectory.reason
        print(f"{setup.format_trajectory(setup.env, trajectory)}\nreward    {trajectory.outcome} {reason}\n")


def evaluate_params(
    setup: HostedSetup, params: Sequence[Params], *, seed: int = 1000, tasks: int = 1000, samples: int = 1
) -> TestReport:
    """Test the start and the best parameters on the same fresh tasks, `samples` times each, by domain."""
    key = jax.random.key(seed)
    rollouts = [
        roll_out_split(setup, weights, key, "test", tasks=tasks, samples=samples, first=FRESH).trajectories
        for weights in with_progress("play", params)
    ]
    return compare_before_after(setup, rollouts, samples=samples, ks=sorted({1, samples}))


RECIPE = Recipe(
    name=NAME,
    command="agentflow",
    Config=Config,
    preset=preset,
    build=build,
    make_trainable=hosted_trainable(NAME),
    test=evaluate_params,
    planner=TEXT,
    rehearse=print_first_rollouts,
)
