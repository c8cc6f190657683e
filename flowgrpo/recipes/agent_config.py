"""Settings of a run on the agent system: `Config`, and `preset`, which fits them to a model and its tasks.

Without a `model` the defaults are those of the offline run: a small model that is made and warm-started here, the tasks
of `offline_tasks`, roles of plain code. With one they are those of the paper (AgentFlow, arXiv:2510.05592), and the
model's own frozen weights speak the other roles.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

from flowgrpo.errors import BadInput
from flowgrpo.training.config import Section, make_config, setting
from flowgrpo.training.names import (
    ACTION_FORMS,
    ALGORITHMS,
    BUILTIN_EXAMPLES,
    OFFLINE_DOMAINS,
    PACKAGED_MODELS,
    TASK_SETS,
)
from flowgrpo.training.settings import (
    ChosenTasksSection,
    HostedConfig,
    HostedRunSection,
    HostedSettings,
    LearnerSection,
    RolloutSection,
    WarmStartSection,
    WarmStartSettings,
)

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
class TaskRunSection(HostedRunSection):
    """How long a run is, what it records, and its control experiment."""

    control: str = setting(
        "none", "Control experiment: none, or shuffle the rewards within each group.", "Run", choices=CONTROLS
    )


@dataclass(frozen=True, kw_only=True)
class RewardedTasksSection(ChosenTasksSection):
    """Tasks, how they are chosen, and what judges their answers."""

    reward: str | None = setting(
        None,
        "Reward of all tasks as MODULE:FUNCTION, a function (task, answer) -> fg.RewardResult or an fg.Reward; none: "
        "the reward of each task's domain.",
        "Run",
    )


@dataclass(frozen=True, kw_only=True)
class OfflineTasksSection(RewardedTasksSection):
    """Tasks as above, or without a file those that are made here."""

    domains: str = setting(",".join(OFFLINE_DOMAINS), "Domains of the offline tasks, separated by commas.", "Agents")


@dataclass(frozen=True, kw_only=True)
class TurnsSection(RolloutSection):
    """Rollouts of several turns."""

    turns: int = setting(4, "Maximum number of planner turns per trajectory in training.", "Sizes", at_least=1)
    eval_turns: int = setting(
        4, "Maximum number of planner turns per trajectory in evaluations.", "Sizes", at_least=1, was="exam_turns"
    )


@dataclass(frozen=True, kw_only=True)
class AlgorithmSection(LearnerSection):
    """The algorithm, its correction of stale tokens, and the decay of its learning rate."""

    algorithm: str = setting(
        "flow_grpo", "Algorithm, or MODULE:NAME of an fg.Algorithm.", "Run", choices=ALGORITHMS, imports=True
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
    correction: float = setting(
        0.0,
        "Cap of the importance weight pi_old / pi_sampled for tokens of older weights or another engine; 0: no "
        "correction.",
        "Learning",
        at_least=0.0,
    )
    loss_versions: str = setting(
        "all",
        "Tokens in the loss: all, or only those of the newest weights in a trajectory.",
        None,
        choices=("all", "newest"),
        was="learn_from",
    )


@dataclass(frozen=True, kw_only=True)
class DemonstrationsSection(WarmStartSection):
    """Imitation of demonstrations before reinforcement learning."""

    demonstrations: int = setting(8000, "Number of tasks with a demonstration to imitate.", "Learning", at_least=0)


@dataclass(frozen=True, kw_only=True)
class ServerSection(Section):
    """A server that samples instead of this process."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling_server is None:
            return
        url, _, model = self.sampling_server.partition("#")
        if "://" not in url or not model:
            raise BadInput(f"--sampling_server={self.sampling_server} must be a server and its model, as URL#MODEL")


@dataclass(frozen=True, kw_only=True)
class TaskConfig(HostedConfig):
    """Sections of every run on tasks that a reward judges, whatever agent answers them."""

    run: TaskRunSection
    tasks: RewardedTasksSection
    rollout: TurnsSection
    learner: AlgorithmSection
    server: ServerSection

    def __post_init__(self) -> None:
        if self.tasks.prompts == "curriculum":
            # Resolved here, so that a run that is resumed with more updates keeps its curriculum.
            updates = self.tasks.curriculum_updates or max(self.run.updates, 1)
            object.__setattr__(self, "tasks", replace(self.tasks, curriculum_updates=updates))
        if self.server.sampling_server is not None and (self.model.lora_rank or self.devices.offload != "none"):
            raise BadInput("--sampling_server takes whole weights from the device: leave out --lora_rank and --offload")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of a small model that is made here."""
        return super().defaults(chosen) | {
            "updates": 50,
            "learning_rate": 5e-4,
            "mini_batches": 4,
            "temperature": 0.8,
        }


class TaskSettings(HostedSettings, total=False):
    """Settings of a run on tasks, but for `model`, `tasks` and `reward`, as keyword arguments."""

    prompts: str
    difficulty: str | None
    curriculum_updates: int | None
    turns: int
    eval_turns: int
    algorithm: str
    decay_to: float
    decay_updates: int
    correction: float
    loss_versions: str
    sampling_server: str | None
    weight_transfer: str
    weight_folder: str | None


class OfflineSettings(TaskSettings, WarmStartSettings, total=False):
    """Settings of a run on tasks that may be made here, with a warm start, as keyword arguments."""

    domains: str
    demonstrations: int


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(TaskConfig):
    """Sections of a run whose model and tasks may be made here: the model then imitates a script."""

    tasks: OfflineTasksSection
    warm_start: DemonstrationsSection

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of a small model that is made here, and imitates."""
        return super().defaults(chosen) | {"warm_steps": 800}


@dataclass(frozen=True, kw_only=True)
class RenderingSection(TurnsSection):
    """Rollouts of several turns, whose contexts may be rendered in two ways."""

    rendering: str = setting(
        "append",
        "Contexts of a trajectory: fresh (each turn's context is rendered anew), or append (one growing conversation).",
        "Agents",
        choices=("fresh", "append"),
    )


@dataclass(frozen=True, kw_only=True)
class AgentSection(Section):
    """The planner's prompt, its tools and its memory."""

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
    instructions: str = setting(
        "", "Instructions in the planner's prompt, after those of the form of its actions.", "Agents"
    )
    memory_tokens: int = setting(200, "Maximum number of tokens of the planner's memory.", "Sizes", at_least=1)
    search_top_k: int = setting(1, "Number of passages that a search returns.", "Sizes", at_least=1, was="passages")
    tool_seconds: float = setting(10.0, "Timeout of a tool call in seconds.", "Sampling", at_least=0.1)


@dataclass(frozen=True, kw_only=True)
class RolesSection(Section):
    """Backends of the roles beside the planner."""

    executor: str = setting("rule", f"Backend of the executor: {ROLE_BACKENDS}.", "Agents")
    verifier: str = setting("rule", f"Backend of the verifier: {ROLE_BACKENDS}.", "Agents")
    generator: str = setting("rule", f"Backend of the generator: {ROLE_BACKENDS}.", "Agents")
    analyst: str = setting("none", "Backend of the analyst: model, none, or URL#MODEL.", "Agents")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, backend in self.settings().items():
            check_role(name, backend)


@dataclass(frozen=True, kw_only=True)
class AnswersSection(DemonstrationsSection):
    """Imitation before reinforcement learning: of an expert, of own answers, or of another model's."""

    warm_start: str = setting(
        "none",
        "Demonstrations that a given model imitates before RL: none, expert (the steps in the tasks), own (its own "
        "right answers), or the right answers of another model: folder, GGUF file, name, or hub id.",
        "Learning",
    )
    warm_temperature: float = setting(
        1.0, "Sampling temperature of the answers that a warm start imitates.", "Sampling", at_least=0.0
    )


@dataclass(frozen=True, kw_only=True)
class Config(OfflineConfig):
    """Settings of a run on the agent system; `preset` has those that fit a model and its tasks."""

    rollout: RenderingSection
    warm_start: AnswersSection
    agent: AgentSection
    roles: RolesSection

    def __post_init__(self) -> None:
        super().__post_init__()
        agent, warm_start = self.agent, self.warm_start
        if agent.actions != "lines" and self.rollout.rendering != "append":
            raise BadInput(
                f"--actions={agent.actions} makes a conversation of calls and answers: give --rendering=append"
            )
        imitated = warm_start.warm_start
        if imitated != "none" and self.model.model is None:
            raise BadInput(f"--warm_start={imitated} needs --model: the small model here imitates a script")
        if imitated != "none" and not (warm_start.warm_steps and warm_start.demonstrations):
            raise BadInput(f"--warm_start={imitated} needs --warm_steps and --demonstrations, of which one is 0")
        if agent.drop_examples and imitated in KEEP_EXAMPLES:
            raise BadInput(
                "--drop_examples needs a warm start on answers sampled with them: give --warm_start=own, too"
            )
        if agent.examples == BUILTIN_EXAMPLES and self.tasks.tasks not in TASK_SETS:
            known = ", ".join(TASK_SETS)
            raise BadInput(f"--examples=tasks needs --tasks={known}, not {self.tasks.tasks}: give a file of examples")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of the offline run; with a model those of the paper, or of a small model on a built-in task set."""
        defaults = super().defaults(chosen)
        if not chosen.get("model"):
            return defaults
        defaults |= PAPER | {"chat_template": BASE_TEMPLATES.get(chosen["model"])}
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


# With a model nothing is made here.
GIVEN: dict[str, Any] = {"warm_steps": 0, "demonstrations": 0, "domains": ""}

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
    "prefill_chunk": 256,
    "decode_steps": 16,
    "turn_seconds": 300.0,
    "group_seconds": 1800.0,
    "recorded_groups": 1,
}
PAPER: dict[str, Any] = (
    LARGE
    | GIVEN
    | {
        "turns": 3,
        "eval_turns": 10,
        "memory_tokens": 4096,
        "rendering": "fresh",
        **dict.fromkeys(ROLES, "model"),
        "search_top_k": 3,
        "tool_seconds": 30.0,
    }
)

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


class Settings(OfflineSettings, total=False):
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
