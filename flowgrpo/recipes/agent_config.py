"""Settings of a run on the agent system.

Without a `model` they are those of the offline run: a small model that is made and warm-started here, the tasks of
`offline_tasks`, roles of plain code. With one they are those of the paper (AgentFlow, arXiv:2510.05592), and the other
roles are spoken by the model's own frozen weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowgrpo.errors import BadInput
from flowgrpo.recipes.hosted_config import ChoiceConfig, HostedConfig
from flowgrpo.recipes.names import ACTION_FORMS, ALGORITHMS, OFFLINE_DOMAINS, PACKAGED, TASK_SETS, WITH_THE_TASKS
from flowgrpo.run.config import make_config, setting

ROLES = ("executor", "verifier", "generator", "analyst")
CONTROLS = ("none", "shuffled_rewards")
KEEP_EXAMPLES = ("none", "expert")  # warm starts on what nobody said with examples
SERVED = "model, rule, or an OpenAI-compatible server and its model, as URL#MODEL"


def players(name: str) -> tuple[str, str]:
    """Name who may play a role, beside a server: an analyst may be left out, and the others may be plain code."""
    return ("model", "none") if name == "analyst" else ("model", "rule")


def check_role(name: str, who: str) -> None:
    """Raise `BadInput` for a name that nobody has."""
    url, _, model = who.partition("#")
    if who not in players(name) and not ("://" in url and model):
        raise BadInput(f"--{name}={who} must be {', '.join(players(name))}, or a server and its model, as URL#MODEL")


@dataclass(frozen=True, kw_only=True)
class TaskConfig(HostedConfig, ChoiceConfig):
    """Settings of a run on tasks that a reward judges, whatever agent answers them."""

    updates: int = setting(50, "Updates of the reinforcement phase.", "Sizes", at_least=0, may_differ=True)
    learning_rate: float = setting(5e-4, "Of the reinforcement phase.", "Learning", at_least=0.0)
    mini_batches: int = setting(4, "Gradient steps of an update.", "Learning", at_least=1)
    temperature: float = setting(0.8, "Of the planner's words.", "Sampling", at_least=0.0)
    reward: str | None = setting(
        None,
        "Judge all tasks by MODULE:FUNCTION, a function (task, answer) -> fg.Scored, or a fg.Reward.",
        "What is run",
    )
    algorithm: str = setting("flow_grpo", "Member of the family.", "What is run", choices=ALGORITHMS)
    control: str = setting("none", "Shuffle the rewards within groups.", "What is run", choices=CONTROLS)
    domains: str = setting(",".join(OFFLINE_DOMAINS), "Domains of the offline tasks, by commas.", "The agents")
    turns: int = setting(4, "Turns of the planner in training.", "Sizes", at_least=1)
    exam_turns: int = setting(4, "Turns of the planner in examinations.", "Sizes", at_least=1)
    decay: float = setting(
        0.2, "Share of the learning rate that is left after decay_updates.", "Learning", at_least=0.0, at_most=1.0
    )
    # Not `updates`, so that a run that is made longer goes on as if all updates had been asked for at once.
    decay_updates: int = setting(50, "Updates in which the learning rate falls.", "Learning", at_least=1)
    warm_steps: int = setting(800, "Steps of imitation at most.", "Learning", at_least=0)
    demonstrations: int = setting(8000, "Tasks that are demonstrated, for the imitation.", "Learning", at_least=0)
    correction: float = setting(
        0.0, "Bound of the correction for tokens of other weights or another engine; 0: none.", "Learning", at_least=0.0
    )
    sampled_by: str | None = setting(
        None,
        "A server that samples, as URL#MODEL: it takes ids and gives ids and log-probabilities; None: this process.",
        "Devices and memory",
    )
    handed_over: str = setting(
        "gateway", "How that server takes weights.", "Devices and memory", choices=("gateway", "vllm", "sglang")
    )
    served_folder: str | None = setting(
        None, "The folder from which it reads them; one of the run's own by default.", "Devices and memory"
    )
    learn_from: str = setting("all", "Versions whose tokens are in the loss.", None, choices=("all", "newest"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampled_by is None:
            return
        url, _, model = self.sampled_by.partition("#")
        if "://" not in url or not model:
            raise BadInput(f"--sampled_by={self.sampled_by} must be a server and its model, as URL#MODEL")
        if self.lora_rank or self.offload != "none":
            raise BadInput("--sampled_by takes whole weights, which stay where they are: no --lora_rank, no --offload")


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Settings of a run on the agent system; the defaults are those of the offline run, see `preset`."""

    corpus: str | None = setting(
        None, "What search looks through: a .jsonl, .txt or .md file, or a folder.", "What is run"
    )
    tools: str = setting(
        "calculator,python,search",
        "Tools, by commas: calculator, python, search, or MODULE:FUNCTION, which has types and a docstring.",
        "The agents",
    )
    mcp: tuple[str, ...] = setting((), "An MCP server: a command, or the URL of one.", "The agents", repeated=True)
    actions: str = setting(
        "lines",
        "How the planner writes an action: lines Tool: and Context:, calls such as calculator(1 + 2), or tool_calls in "
        "the tags of Qwen and Hermes.",
        "The agents",
        choices=ACTION_FORMS,
    )
    examples: str = setting(
        "none",
        "Worked examples before the question: none, tasks (those of --tasks=word_problems and its like), or a file.",
        "The agents",
    )
    drop_examples: bool = setting(
        False,
        "Leave the examples out of the prompt after the warm start, which imitates what was said with them: contexts "
        "become short, and all else cheap.",
        "The agents",
    )
    warm_start: str = setting(
        "none",
        "What a given model imitates first: none, expert (the steps that tasks carry), own (its own right answers), or "
        "the right answers of another model: folder, GGUF file, name, or hub id.",
        "Learning",
    )
    warm_temperature: float = setting(
        1.0, "Sampling temperature of the answers that a warm start imitates.", "Sampling", at_least=0.0
    )
    instructions: str = setting("", "What the planner is told beside the form of its actions.", "The agents")
    rendering: str = setting(
        "append", "Render each context afresh, or append to one.", "The agents", choices=("fresh", "append")
    )
    executor: str = setting("rule", f"Who plays the executor: {SERVED}.", "The agents")
    verifier: str = setting("rule", f"Who plays the verifier: {SERVED}.", "The agents")
    generator: str = setting("rule", f"Who plays the generator: {SERVED}.", "The agents")
    analyst: str = setting("none", "Who plays the analyst: model, none, or URL#MODEL.", "The agents")
    memory_tokens: int = setting(200, "Tokens of what the planner remembers.", "Sizes", at_least=1)
    passages: int = setting(1, "Passages that a search returns.", "Sizes", at_least=1)
    tool_seconds: float = setting(10.0, "Of a call of a tool.", "Sampling", at_least=0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, who in self.roles.items():
            check_role(name, who)
        if self.actions != "lines" and self.rendering != "append":
            raise BadInput(
                f"--actions={self.actions} makes a conversation of calls and answers: give --rendering=append"
            )
        if self.warm_start != "none" and self.model is None:
            raise BadInput(f"--warm_start={self.warm_start} needs --model: the small model here imitates a script")
        if self.warm_start != "none" and not (self.warm_steps and self.demonstrations):
            raise BadInput(f"--warm_start={self.warm_start} needs --warm_steps and --demonstrations, of which one is 0")
        if self.drop_examples and self.warm_start in KEEP_EXAMPLES:
            raise BadInput("--drop_examples is for a warm start on what was said with them: give --warm_start=own, too")
        if self.examples == WITH_THE_TASKS and self.tasks not in TASK_SETS:
            known = ", ".join(TASK_SETS)
            raise BadInput(f"--examples=tasks are those of --tasks={known}, not of {self.tasks}: give a file of them")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the offline run, those of the paper for a model, or those of a small model for a set of tasks."""
        if not chosen.get("model"):
            return super().defaults(chosen)
        defaults = super().defaults(chosen) | PAPER | {"chat_template": BASE_TEMPLATES.get(chosen["model"])}
        if (tasks := chosen.get("tasks")) in TASK_SETS:
            return defaults | SMALL | {"tools": TASK_SETS[tasks], **ONE_TURN.get(tasks, {}), **_first_steps(chosen)}
        return defaults | SMALL if chosen["model"] in PACKAGED else defaults

    @property
    def roles(self) -> dict[str, str]:
        """Name who plays each role beside the planner."""
        return {
            "executor": self.executor,
            "verifier": self.verifier,
            "generator": self.generator,
            "analyst": self.analyst,
        }


def _first_steps(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """How a planner learns the form of an action, for a set of tasks whose tasks carry their steps.

    An expert's demonstrations need no examples, and many of them cost little: least where a task has one turn. What is
    sampled is sampled with examples, and imitated without them.
    """
    warm_start = chosen.get("warm_start", "expert")
    if warm_start == "expert":
        many = {"demonstrations": 2048, "warm_steps": 128} if chosen["tasks"] in ONE_TURN else {"demonstrations": 512}
        return {"warm_start": warm_start, "examples": "none", **many}
    return {
        "warm_start": warm_start,
        "examples": WITH_THE_TASKS,
        "drop_examples": warm_start not in KEEP_EXAMPLES,
    }


# With a model: the settings of the paper (AgentFlow, arXiv:2510.05592), as far as any agent has them.
LARGE: dict[str, Any] = {
    "learning_rate": 1e-6,
    "mini_batches": 1,
    "beta": 0.001,
    "clip_high": 0.2,
    "temperature": 0.5,
    "max_tokens": 2048,
    "context_tokens": 8192,
    "updates": 150,
    "decay": 1.0,
    "decay_updates": 150,
    "micro_rows": 1,
    "slots": 32,
    "validation_tasks": 64,
    "test_tasks": 256,
    "dtype": "bfloat16",
    "remat": True,
    "warm_steps": 0,
    "demonstrations": 0,
    "chunk": 256,
    "steps": 16,
    "turn_seconds": 300.0,
    "group_seconds": 1800.0,
    "recorded": 1,
    "domains": "",
}
PAPER: dict[str, Any] = LARGE | {
    "turns": 3,
    "exam_turns": 10,
    "memory_tokens": 4096,
    "rendering": "fresh",
    **dict.fromkeys(ROLES, "model"),
    "passages": 3,
    "tool_seconds": 30.0,
}

# A pretrained model of some hundred million parameters on a processor.
SMALL: dict[str, Any] = {
    "learning_rate": 1e-4,
    "lora_rank": 16,
    "beta": 0.0,
    "clip_high": 0.28,
    "temperature": 1.0,
    "max_tokens": 24,
    "context_tokens": 1152,  # nine blocks of a cache: more than eight are looped over, which compiles in half the time
    "turns": 4,
    "exam_turns": 4,
    "mini_batches": 2,
    "queries": 8,
    "samples": 8,
    "updates": 24,
    "decay": 0.1,
    "decay_updates": 24,
    "micro_rows": 1,
    "slots": 64,
    "validation_tasks": 64,
    "test_tasks": 200,
    "dtype": "float32",
    "remat": False,
    "steps": 4,  # an action has some ten tokens
    "chunk": 32,  # what contexts begin with alike is shared in pieces of so many tokens
    "memory_tokens": 128,
    "actions": "calls",
    "rendering": "append",
    "warm_temperature": 0.7,  # at which a pretrained model keeps to a form that it sees in examples
    "warm_steps": 32,
    "warm_rows": 2,
    "warm_rate": 5e-4,
    "demonstrations": 128,
    "executor": "rule",
    "verifier": "rule",
    "generator": "rule",
    "analyst": "none",
    "passages": 1,
    "recorded": 2,
}
# Of packaged models that come without one.
BASE_TEMPLATES = {"gemma3": "lines"}
# Sets of tasks of one turn without a tool, whose contexts are short; four names take 27 tokens.
ONE_TURN: dict[str, dict[str, Any]] = {
    "reverse_text": {"context_tokens": 384, "warm_rows": 3},
    "alphabet_sort": {"context_tokens": 384, "warm_rows": 3, "max_tokens": 32},
}


def preset(model: str | None = None, **chosen: Any) -> Config:
    """The settings that fit the offline run, or those of the paper for a model, with what was chosen in their place."""
    return make_config(Config, chosen | {"model": model})
