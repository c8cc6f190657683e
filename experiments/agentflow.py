"""The agent system, trained in the flow: a planner learns which tool to call with what, and when to answer.

    python -m experiments.agentflow
    python -m experiments.agentflow --seed=1 --workdir=runs/mine --control=shuffled_rewards
    python -m experiments.agentflow --dry_run
    python -m experiments.agentflow --dry_run=compile --model=PATH --mesh=fsdp=8 --cpu_devices=8 --device_memory=80GiB
    python -m experiments.agentflow --model=PATH --tasks=train.jsonl --corpus=wiki.jsonl

Without --model everything is made here and runs offline on a CPU: a small model with its own tokenizer imitates flawed
demonstrations of the real tools (calculator, Python in the sandbox, search), and is then trained by Flow-GRPO on four
domains at once: mathematics, code that is tested, questions over a corpus, drawings. With --model the settings are
those of the paper (batch 32, group 8, learning rate 1e-6, KL 0.001, clip 0.2, temperature 0.5, 3 turns in training and
10 in examinations, 2048 new tokens), and executor, verifier and generator are spoken by the model's frozen weights.

Expected offline, on tasks of combinations that were never trained: success from 38 to 80 % and from 45 to 87 % with
seeds 11 and 12, tool errors from 14 to 3 % and from 13 to 0.3 %, in 38 minutes on one busy core.

At the end the table compares warm start and best checkpoint on tasks of combinations that neither training nor the
choice of the checkpoint has seen: success, tool errors, turns and tools, by domain. The work directory holds
`metrics.jsonl`, `timings.jsonl`, `curves.png`, `result.json`, `checkpoints/`, and `trajectories/`, a line of JSON each,
which can be replayed without tools. The same command goes on where a run was stopped.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments import agent_setups, common, loggers, planner_flags
from experiments.benchmarks.measured import show_lines
from experiments.dry_runs import hosted_rows, parse_memory
from experiments.headings import heading
from experiments.hosted_setup import HostedSetup, compile_engines, play
from experiments.hosted_work import hosted_work, training_tasks
from experiments.loggers import chosen_loggers
from experiments.members import ALGORITHMS
from experiments.prompts import PROMPTS, prompt_settings
from experiments.published import shape_of_model
from experiments.session import MAY_DIFFER, one_run
from flowgrpo.learner.floor import count_parameters
from flowgrpo.learner.folder import begin_anew, check_own
from flowgrpo.types import BadInput

heading("What is run")
_MODEL = flags.DEFINE_string("model", None, "Model folder, or hub id; without one, a small model is made.")
_TASKS = flags.DEFINE_string("tasks", None, "Task file (.jsonl, .parquet) or reasoning_gym:NAME; needed with --model.")
_CORPUS = flags.DEFINE_string("corpus", None, "What search looks through: a .jsonl, .txt or .md file, or a folder.")
_FIELDS = flags.DEFINE_list("fields", [], "Names of fields in the task file, such as query=question,answers=gold.")
_DOMAIN = flags.DEFINE_string("domain", None, "The domain of tasks that name none, or one that nobody judges.")
_REWARD = flags.DEFINE_string(
    "reward", None, "Judge all tasks by MODULE:FUNCTION, a function (task, answer) -> fg.Scored, or a fg.Reward."
)
_ALGORITHM = flags.DEFINE_enum("algorithm", None, list(ALGORITHMS), "Member of the family; flow_grpo by default.")
_CONTROL = flags.DEFINE_enum("control", None, agent_setups.CONTROLS, "Shuffle the rewards within groups.")
_PROMPTS = flags.DEFINE_enum(
    "prompts", "uniform", PROMPTS, "Which tasks come up: all, those that fail, easy ones first."
)
_DIFFICULTY = flags.DEFINE_string("difficulty", None, "Field of a task's metadata: a number, for --prompts=curriculum.")
_CURRICULUM = flags.DEFINE_integer(
    "curriculum_updates", None, "Length of the curriculum; --updates by default.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of everything.")
_DRY = flags.DEFINE_flag(
    flags.Flag(
        name="dry_run",
        default="false",
        parser=flags.EnumParser(["false", "true", "compile"]),
        serializer=flags.ArgumentSerializer(),
        help_string="Print the first prompts and one rollout, and stop; or, as --dry_run=compile, what the programs of "
        "the run take of a device, without weights.",
        boolean=True,  # which may stand without a value
    )
)
heading("The agents")
_TOOLS = flags.DEFINE_string(
    "tools", None, "Tools, by commas: calculator, python, search, or MODULE:FUNCTION, which has types and a docstring."
)
_MCP = flags.DEFINE_multi_string("mcp", [], "An MCP server: a command, or the URL of one.")
_DOMAINS = flags.DEFINE_string("domains", None, "Domains of the offline tasks, by commas.")
_RENDERING = flags.DEFINE_enum(
    "rendering", None, list(agent_setups.RENDERINGS), "Contexts afresh, or one that appends."
)
_ROLES = {
    name: flags.DEFINE_string(
        name, None, f"Who plays the {name}: {', '.join(agent_setups.players(name))}, or a server, as URL#MODEL."
    )
    for name in agent_setups.ROLES
}
heading("Sizes")
_UPDATES = flags.DEFINE_integer("updates", None, "Updates of the reinforcement phase.", lower_bound=0)
_QUERIES = flags.DEFINE_integer("queries", None, "Queries of an update.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", None, "Trajectories of a query.", lower_bound=2)
_TURNS = flags.DEFINE_integer("turns", None, "Turns of the planner in training.", lower_bound=1)
_EXAM_TURNS = flags.DEFINE_integer("exam_turns", None, "Turns of the planner in examinations.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "New tokens of an action.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context_tokens", None, "Tokens of a context with its action.", lower_bound=2)
_VALIDATION = flags.DEFINE_integer("validation_tasks", None, "Tasks of each validation.", lower_bound=1)
_TEST = flags.DEFINE_integer("test_tasks", None, "Test tasks of the final table.", lower_bound=1)
heading("Learning")
_RATE = flags.DEFINE_float("learning_rate", None, "Of the reinforcement phase.", lower_bound=0.0)
_BETA = flags.DEFINE_float("beta", None, "Weight of the KL term.", lower_bound=0.0)
_WARM = flags.DEFINE_integer("warm_steps", None, "Steps of imitation at most, in the offline run.", lower_bound=0)
_SHOWN = flags.DEFINE_integer("demonstrations", None, "How many are imitated, in the offline run.", lower_bound=20)
heading("Sampling")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Of the planner's words.", lower_bound=0.0)
_PATIENCE = flags.DEFINE_float("turn_seconds", None, "Of what follows one action of the planner.", lower_bound=0.1)
heading("Devices and memory")
_SLOTS = flags.DEFINE_integer("slots", None, "Requests that decode together.", lower_bound=2)
_MEMORY = flags.DEFINE_string("device_memory", None, "Of a device, for --dry_run=compile: 80GiB, 24GB.")
heading("Files and resuming")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results lie; runs/agentflow-SEED by default.")
_RESUME = flags.DEFINE_bool("resume", True, "Go on with what is in the work directory; --noresume begins anew.")
_EVERY = flags.DEFINE_integer("checkpoint_every", 10, "Updates between validations and checkpoints.", lower_bound=1)
flags.adopt_module_key_flags(planner_flags)
flags.adopt_module_key_flags(loggers)


def _is_player(name: str, who: str | None) -> bool:
    """Whether a role's flag can be honoured; raises what absl makes a sentence of."""
    try:
        agent_setups.check_role(name, who or agent_setups.PAPER[name])
    except BadInput as error:
        raise flags.ValidationError(str(error)) from None
    return True


for role in agent_setups.ROLES:
    flags.register_validator(role, partial(_is_player, role))


def read_flags() -> dict[str, Any]:
    """The run's settings: the preset, with what the flags say, on the devices that are here."""
    return chosen_settings() | {"devices": jax.device_count()}


def chosen_settings() -> dict[str, Any]:
    """The preset, with what the flags say."""
    chosen = {
        "seed": _SEED.value,
        "tasks": _TASKS.value,
        "corpus": _CORPUS.value,
        "tools": _TOOLS.value,
        "mcp": list(_MCP.value) or None,
        "domains": _DOMAINS.value,
        "rendering": _RENDERING.value,
        **{name: flag.value for name, flag in _ROLES.items()},
        "algorithm": _ALGORITHM.value,
        "control": _CONTROL.value,
        "updates": _UPDATES.value,
        "queries": _QUERIES.value,
        "samples": _SAMPLES.value,
        "learning_rate": _RATE.value,
        "beta": _BETA.value,
        "temperature": _TEMPERATURE.value,
        "turns": _TURNS.value,
        "exam_turns": _EXAM_TURNS.value,
        "max_tokens": _MAX_TOKENS.value,
        "context_tokens": _CONTEXT.value,
        "slots": _SLOTS.value,
        "warm_steps": _WARM.value,
        "demonstrations": _SHOWN.value,
        "validation_tasks": _VALIDATION.value,
        "test_tasks": _TEST.value,
        "fields": _FIELDS.value or None,
        "domain": _DOMAIN.value,
        "reward": _REWARD.value,
        "turn_seconds": _PATIENCE.value,
        **planner_flags.planner_choices(),
    }
    settings = agent_setups.settings_of(_MODEL.value, **chosen)
    own = {"difficulty": _DIFFICULTY.value, "curriculum_updates": _CURRICULUM.value}
    return settings | prompt_settings(_PROMPTS.value, updates=settings["updates"], **own)


def dry_run(setup: HostedSetup) -> None:
    """The first prompt as it is rendered, and one rollout of each of the first tasks as it is parsed."""
    tasks = training_tasks(setup, 0)[:4]
    print(f"model {setup.settings['model'] or setup.folder / agent_setups.START}, tools {', '.join(setup.env.tools)}\n")
    print(f"{agent_setups.first_prompt(setup.env, setup.model.text, tasks[0], setup.do)}\n")
    played = play(setup, setup.env, tasks, jax.random.key(setup.settings["seed"]), samples=1)
    if setup.progress is not None:
        setup.progress.end()
    for one in played.played:
        why = one.scored.reason if one.scored else one.reason
        print(f"{setup.story(setup.env, one)}\nreward    {one.trajectory.outcome} {why}\n")


def dry_compile(settings: Mapping[str, Any], folder: Path) -> None:
    """Print what the programs of the run take of a device, as a table and a JSON line."""
    if settings["model"] is None:
        with agent_setups.open_setup(settings, folder) as setup:
            config = setup.model.config
    else:
        config = shape_of_model(settings["model"])
    memory = None if _MEMORY.value is None else parse_memory(_MEMORY.value, "--device_memory")
    parts = (agent_setups.algorithm_of(settings), agent_setups.optimizer_of(settings))
    rows = hosted_rows(settings, config, *parts, memory)
    print(f"{count_parameters(config):,} parameters on {settings['mesh'] or 'one device'}: GiB of one device")
    show_lines(rows)
    print(json.dumps({"parameters": count_parameters(config), "mesh": settings["mesh"], "programs": rows}))


def main() -> None:
    """Train, or look."""
    if _DRY.value == "compile":
        jax.config.update("jax_platforms", "cpu")  # whatever there is: devices are virtual
    settings, logged = read_flags(), chosen_loggers()
    folder = Path(_WORKDIR.value or f"runs/agentflow-{_SEED.value}")
    if _DRY.value == "compile":
        dry_compile(settings, folder)
        return
    anew = not _RESUME.value and _DRY.value == "false"
    if not anew:
        check_own(folder, settings, may_differ=MAY_DIFFER)  # before a model to start with is written there
    begin = partial(begin_anew, folder) if anew else lambda: None
    with agent_setups.open_setup(settings, folder, begin=begin) as setup:
        setup = compile_engines(setup)
        if _DRY.value == "true":
            dry_run(setup)
            return
        result = one_run(hosted_work(setup), folder, every=_EVERY.value, loggers=logged)
    print(json.dumps(result))


if __name__ == "__main__":
    common.run(main, cpu_devices=1)
