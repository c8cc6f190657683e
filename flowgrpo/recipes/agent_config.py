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
from flowgrpo.recipes.names import ALGORITHMS, OFFLINE_DOMAINS
from flowgrpo.run.config import make_config, setting

ROLES = ("executor", "verifier", "generator", "analyst")
CONTROLS = ("none", "shuffled_rewards")
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
    warm_steps: int = setting(800, "Steps of imitation at most, in the offline run.", "Learning", at_least=0)
    demonstrations: int = setting(8000, "How many are imitated, in the offline run.", "Learning", at_least=0)
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

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the offline run, or those of the paper for a model."""
        return super().defaults(chosen) | (PAPER if chosen.get("model") else {})

    @property
    def roles(self) -> dict[str, str]:
        """Name who plays each role beside the planner."""
        return {
            "executor": self.executor,
            "verifier": self.verifier,
            "generator": self.generator,
            "analyst": self.analyst,
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


def preset(model: str | None = None, **chosen: Any) -> Config:
    """The settings that fit the offline run, or those of the paper for a model, with what was chosen in their place."""
    return make_config(Config, chosen | {"model": model})
