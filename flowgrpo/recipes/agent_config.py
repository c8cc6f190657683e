"""Settings of a run on the agent system: `Config`, and `preset`, which fits them to a model and its tasks.

Without a `model` the defaults are those of the offline run: a small model that is made and warm-started here, the tasks
of `offline_tasks`, roles of plain code. With one they are those of the paper (AgentFlow, arXiv:2510.05592), and the
model's own frozen weights speak the other roles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from flowgrpo.errors import BadInput
from flowgrpo.training.config import make_config, setting
from flowgrpo.training.names import (
    ACTION_FORMS,
    ALGORITHMS,
    BUILTIN_EXAMPLES,
    OFFLINE_DOMAINS,
    PACKAGED_MODELS,
    TASK_SETS,
)
from flowgrpo.training.settings import ChoiceConfig, ChoiceSettings, HostedConfig, HostedSettings

ROLES = ("executor", "verifier", "generator", "analyst")
CONTROLS = ("none", "shuffled_rewards")
KEEP_EXAMPLES = ("none", "expert")  # warm starts that imitate nothing that was sampled with examples in the prompt
ROLE_BACKENDS = "model (the start's frozen weights), rule (plain code), or an OpenAI-compatible server as URL#MODEL"


def check_role(name: str, backend: str) -> None:
    """Raise `BadInput` if `backend` is neither the model, nor a rule (for an analyst: none), nor a server."""
    url, _, model = backend.partition("#")
    builtin = ("model", "none") if name == "analyst" else ("model", "rule")
    if backend not in builtin and not ("://" in url and model):
        raise BadInput(f"--{name}={backend} must be {', '.join(builtin)}, or a server and its model, as URL#MODEL")


@dataclass(frozen=True, kw_only=True)
class TaskConfig(HostedConfig, ChoiceConfig):
    """Settings of a run on tasks that a reward judges, whatever agent answers them."""

    updates: int = setting(50, "Number of RL updates.", "Sizes", at_least=0, may_change=True)
    learning_rate: float = setting(5e-4, "Learning rate of RL.", "Learning", at_least=0.0)
    mini_batches: int = setting(4, "Number of gradient steps per update.", "Learning", at_least=1)
    temperature: float = setting(0.8, "Sampling temperature of the planner; 0: greedy.", "Sampling", at_least=0.0)
    reward: str | None = setting(
        None,
        "Reward of all tasks as MODULE:FUNCTION, a function (task, answer) -> fg.RewardResult or an fg.Reward; none: "
        "the reward of each task's domain.",
        "Run",
    )
    algorithm: str = setting("flow_grpo", "Algorithm.", "Run", choices=ALGORITHMS)
    control: str = setting(
        "none", "Control experiment: none, or shuffle the rewards within each group.", "Run", choices=CONTROLS
    )
    domains: str = setting(",".join(OFFLINE_DOMAINS), "Domains of the offline tasks, separated by commas.", "Agents")
    turns: int = setting(4, "Maximum number of planner turns per trajectory in training.", "Sizes", at_least=1)
    eval_turns: int = setting(
        4, "Maximum number of planner turns per trajectory in evaluations.", "Sizes", at_least=1, was="exam_turns"
    )
    decay_to: float = setting(
        0.2,
        "Fraction of the learning rate that is left after decay_updates; 1: constant.",
        "Learning",
        at_least=0.0,
        at_most=1.0,
        was="decay",
    )
    # Not `updates`, so that a run that is resumed with more updates equals one that had them from the start.
    decay_updates: int = setting(50, "Number of updates over which the learning rate decays.", "Learning", at_least=1)
    warm_steps: int = setting(800, "Maximum number of imitation steps before RL; 0: none.", "Learning", at_least=0)
    demonstrations: int = setting(8000, "Number of tasks with a demonstration to imitate.", "Learning", at_least=0)
    correction: float = setting(
        0.0,
        "Cap of the importance weight pi_old / pi_sampled for tokens of older weights or another engine; 0: no "
        "correction.",
        "Learning",
        at_least=0.0,
    )
    sampling_server: str | None = setting(
        None,
        "Server that samples instead of this process, as URL#MODEL: token ids in, ids and log-probabilities out.",
        "Devices and memory",
        was="sampled_by",
    )
    weight_transfer: str = setting(
        "gateway",
        "Protocol by which the sampling server loads new weights.",
        "Devices and memory",
        choices=("gateway", "vllm", "sglang"),
        was="handed_over",
    )
    weight_folder: str | None = setting(
        None,
        "Folder through which the sampling server gets new weights; by default one in the run's folder.",
        "Devices and memory",
        was="served_folder",
    )
    loss_versions: str = setting(
        "all",
        "Tokens in the loss: all, or only those of the newest weights in a trajectory.",
        None,
        choices=("all", "newest"),
        was="learn_from",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling_server is None:
            return
        url, _, model = self.sampling_server.partition("#")
        if "://" not in url or not model:
            raise BadInput(f"--sampling_server={self.sampling_server} must be a server and its model, as URL#MODEL")
        if self.lora_rank or self.offload != "none":
            raise BadInput("--sampling_server takes whole weights from the device: leave out --lora_rank and --offload")


class TaskSettings(HostedSettings, ChoiceSettings, total=False):
    """Settings of a run on tasks, but for `model`, `tasks` and `reward`, as keyword arguments."""

    algorithm: str
    domains: str
    turns: int
    eval_turns: int
    decay_to: float
    decay_updates: int
    demonstrations: int
    correction: float
    sampling_server: str | None
    weight_transfer: str
    weight_folder: str | None
    loss_versions: str


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Settings of a run on the agent system; the defaults are those of the offline run, see `preset`."""

    corpus: str | None = setting(
        None, "Documents of the search tool: a .jsonl, .txt or .md file, or a folder of them.", "Run"
    )
    tools: str = setting(
        "calculator,python,search",
        "Tools, separated by commas: calculator, python, search, or MODULE:FUNCTION with types and a docstring.",
        "Agents",
    )
    mcp: tuple[str, ...] = setting((), "An MCP server: its command or its URL.", "Agents", repeated=True)
    actions: str = setting(
        "lines",
        "Form of the planner's actions: lines (Tool: and Context:), calls such as calculator(1 + 2), or tool_calls in "
        "the tags of Qwen and Hermes.",
        "Agents",
        choices=ACTION_FORMS,
    )
    examples: str = setting(
        "none",
        "Few-shot examples in the prompt: none, tasks (those of a built-in task set), or a file of tasks with steps.",
        "Agents",
    )
    drop_examples: bool = setting(
        False,
        "Leave the examples out of the prompt after the warm start, which then imitates answers that were sampled with "
        "them: contexts become short, and training cheap.",
        "Agents",
    )
    warm_start: str = setting(
        "none",
        "Demonstrations that a given model imitates before RL: none, expert (the steps in the tasks), own (its own "
        "right answers), or the right answers of another model: folder, GGUF file, name, or hub id.",
        "Learning",
    )
    warm_temperature: float = setting(
        1.0, "Sampling temperature of the answers that a warm start imitates.", "Sampling", at_least=0.0
    )
    instructions: str = setting(
        "", "Instructions in the planner's prompt, after those of the form of its actions.", "Agents"
    )
    rendering: str = setting(
        "append",
        "Contexts of a trajectory: fresh (each turn's context is rendered anew), or append (one growing conversation).",
        "Agents",
        choices=("fresh", "append"),
    )
    executor: str = setting("rule", f"Backend of the executor: {ROLE_BACKENDS}.", "Agents")
    verifier: str = setting("rule", f"Backend of the verifier: {ROLE_BACKENDS}.", "Agents")
    generator: str = setting("rule", f"Backend of the generator: {ROLE_BACKENDS}.", "Agents")
    analyst: str = setting("none", "Backend of the analyst: model, none, or URL#MODEL.", "Agents")
    memory_tokens: int = setting(200, "Maximum number of tokens of the planner's memory.", "Sizes", at_least=1)
    search_top_k: int = setting(1, "Number of passages that a search returns.", "Sizes", at_least=1, was="passages")
    tool_seconds: float = setting(10.0, "Timeout of a tool call in seconds.", "Sampling", at_least=0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, backend in self.roles.items():
            check_role(name, backend)
        if self.actions != "lines" and self.rendering != "append":
            raise BadInput(
                f"--actions={self.actions} makes a conversation of calls and answers: give --rendering=append"
            )
        if self.warm_start != "none" and self.model is None:
            raise BadInput(f"--warm_start={self.warm_start} needs --model: the small model here imitates a script")
        if self.warm_start != "none" and not (self.warm_steps and self.demonstrations):
            raise BadInput(f"--warm_start={self.warm_start} needs --warm_steps and --demonstrations, of which one is 0")
        if self.drop_examples and self.warm_start in KEEP_EXAMPLES:
            raise BadInput(
                "--drop_examples needs a warm start on answers sampled with them: give --warm_start=own, too"
            )
        if self.examples == BUILTIN_EXAMPLES and self.tasks not in TASK_SETS:
            known = ", ".join(TASK_SETS)
            raise BadInput(f"--examples=tasks needs --tasks={known}, not {self.tasks}: give a file of examples")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of the offline run; with a model those of the paper, or of a small model on a built-in task set."""
        if not chosen.get("model"):
            return super().defaults(chosen)
        defaults = super().defaults(chosen) | PAPER | {"chat_template": BASE_TEMPLATES.get(chosen["model"])}
        if (tasks := chosen.get("tasks")) in TASK_SETS:
            # How a planner learns the form of an action. An expert's demonstrations need no examples in the prompt, and
            # many of them are cheap, above all of one-turn tasks; sampled answers are sampled with examples, and
            # imitated without them.
            warm_start = chosen.get("warm_start", "expert")
            warm: dict[str, Any] = {"warm_start": warm_start, "examples": "none"}
            if warm_start != "expert":
                warm |= {"examples": BUILTIN_EXAMPLES, "drop_examples": warm_start not in KEEP_EXAMPLES}
            elif tasks in ONE_TURN:
                warm |= {"demonstrations": 2048, "warm_steps": 128}
            else:
                warm |= {"demonstrations": 512}
            return defaults | SMALL | {"tools": TASK_SETS[tasks], **ONE_TURN.get(tasks, {}), **warm}
        return defaults | SMALL if chosen["model"] in PACKAGED_MODELS else defaults

    @property
    def roles(self) -> dict[str, str]:
        """Backend of each role beside the planner."""
        return {
            "executor": self.executor,
            "verifier": self.verifier,
            "generator": self.generator,
            "analyst": self.analyst,
        }


# With a model: those settings of the paper (AgentFlow, arXiv:2510.05592) that every agent has.
LARGE: dict[str, Any] = {
    "learning_rate": 1e-6,
    "mini_batches": 1,
    "beta": 0.001,
    "clip_high": 0.2,
    "temperature": 0.5,
    "max_tokens": 2048,
    "context_tokens": 8192,
    "updates": 150,
    "decay_to": 1.0,
    "decay_updates": 150,
    "micro_rows": 1,
    "slots": 32,
    "validation_tasks": 64,
    "test_tasks": 256,
    "dtype": "bfloat16",
    "remat": True,
    "warm_steps": 0,
    "demonstrations": 0,
    "prefill_chunk": 256,
    "decode_steps": 16,
    "turn_seconds": 300.0,
    "group_seconds": 1800.0,
    "recorded_groups": 1,
    "domains": "",
}
PAPER: dict[str, Any] = LARGE | {
    "turns": 3,
    "eval_turns": 10,
    "memory_tokens": 4096,
    "rendering": "fresh",
    **dict.fromkeys(ROLES, "model"),
    "search_top_k": 3,
    "tool_seconds": 30.0,
}

# A pretrained model of some hundred million parameters on a CPU.
SMALL: dict[str, Any] = {
    "learning_rate": 1e-4,
    "lora_rank": 16,
    "beta": 0.0,
    "clip_high": 0.28,
    "temperature": 1.0,
    "max_tokens": 24,
    "context_tokens": 1152,  # nine cache blocks: more than eight are a loop, which compiles in half the time
    "turns": 4,
    "eval_turns": 4,
    "mini_batches": 2,
    "queries": 8,
    "samples": 8,
    "updates": 24,
    "decay_to": 0.1,
    "decay_updates": 24,
    "micro_rows": 1,
    "slots": 64,
    "validation_tasks": 64,
    "test_tasks": 200,
    "dtype": "float32",
    "remat": False,
    "decode_steps": 4,  # an action has some ten tokens
    "prefill_chunk": 32,  # common prefixes of contexts are shared in pieces of this size
    "memory_tokens": 128,
    "actions": "calls",
    "rendering": "append",
    "warm_temperature": 0.7,  # at which a pretrained model keeps to the form of the examples
    "warm_steps": 32,
    "warm_rows": 2,
    "warm_rate": 5e-4,
    "demonstrations": 128,
    "executor": "rule",
    "verifier": "rule",
    "generator": "rule",
    "analyst": "none",
    "search_top_k": 1,
    "recorded_groups": 2,
}
# Chat templates of packaged models that come without one.
BASE_TEMPLATES = {"gemma3": "lines"}
# Task sets of one turn without a tool, whose contexts are short; four names take 27 tokens.
ONE_TURN: dict[str, dict[str, Any]] = {
    "reverse_text": {"context_tokens": 384, "warm_rows": 3},
    "alphabet_sort": {"context_tokens": 384, "warm_rows": 3, "max_tokens": 32},
}


class Settings(TaskSettings, total=False):
    """Settings of a run on the agent system, but for `model`, as keyword arguments of `preset`."""

    tasks: str | None
    reward: str | None
    corpus: str | None
    tools: str
    mcp: tuple[str, ...]
    actions: str
    examples: str
    drop_examples: bool
    warm_start: str
    warm_temperature: float
    instructions: str
    executor: str
    verifier: str
    generator: str
    analyst: str
    memory_tokens: int
    search_top_k: int
    tool_seconds: float


def preset(model: str | None = None, **settings: Unpack[Settings]) -> Config:
    """A Config with these settings; the others are those of the offline run, or fit the model and its tasks."""
    return make_config(Config, {**settings, "model": model})
