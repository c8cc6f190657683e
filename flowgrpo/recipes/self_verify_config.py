"""Settings of a run on self-verification."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowgrpo.errors import BadInput
from flowgrpo.recipes.hosted_config import HostedConfig
from flowgrpo.run.config import make_config, setting


@dataclass(frozen=True, kw_only=True)
class Config(HostedConfig):
    """Settings of a run on self-verification; the defaults are those of the offline run, see `preset`."""

    updates: int = setting(40, "Updates of the reinforcement phase.", "Sizes", at_least=0, may_differ=True)
    queries: int = setting(16, "Questions of an update.", "Sizes", at_least=1)
    max_tokens: int = setting(4, "Tokens of an answer.", "Sizes", at_least=1)
    context_tokens: int = setting(32, "Tokens of a question with its answer.", "Sizes", at_least=2)
    validation_tasks: int = setting(256, "Questions of each validation.", "Sizes", at_least=1)
    recorded: int = setting(2, "Groups of an update whose trajectories are written.", "Sizes", at_least=0)
    learning_rate: float = setting(3e-4, "Of the reinforcement phase.", "Learning", at_least=0.0)
    beta: float = setting(0.001, "Weight of the KL to the start; at 0 it is not measured.", "Learning", at_least=0.0)
    micro_rows: int = setting(32, "Rows that go through the model together.", "Learning", at_least=1)
    right: float = setting(0.45, "Of the answers that the small model imitates.", "Learning", at_least=0.0, at_most=1.0)
    overlooked: float = setting(
        0.15, "Of the wrong answers that its judge is shown: called right.", "Learning", at_least=0.0, at_most=1.0
    )
    doubted: float = setting(0.05, "Of the right ones: called wrong.", "Learning", at_least=0.0, at_most=1.0)
    warm_tasks: int = setting(10000, "Questions that the small model is shown.", "Learning", at_least=1)
    warm_steps: int = setting(400, "Steps of imitation at most, in the offline run.", "Learning", at_least=0)
    warm_rows: int = setting(48, "Rows of a step of imitation.", "Learning", at_least=1)
    group_seconds: float = setting(
        600.0, "Of a group, until it goes on without what is late.", "Sampling", at_least=0.1
    )
    slots: int = setting(32, "Requests that decode together.", "Devices and memory", at_least=2)
    steps: int = setting(4, "Tokens that are decoded between two looks at the queue.", "Devices and memory", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tasks is not None and self.model is None:
            raise BadInput("--tasks needs --model: the small model that is made here can answer its own questions only")
        if self.temperature <= 0:
            raise BadInput(f"--temperature={self.temperature} samples the same answer always: give more than 0")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the offline run, or those that fit a model."""
        return super().defaults(chosen) | (GIVEN if chosen.get("model") else {})


GIVEN: dict[str, Any] = {  # with a model
    "updates": 100,
    "queries": 32,
    "learning_rate": 1e-6,
    "max_tokens": 512,
    "context_tokens": 2048,
    "chunk": 64,
    "steps": 16,
    "micro_rows": 1,
    "validation_tasks": 128,
    "dtype": "bfloat16",
    "remat": True,
    "warm_steps": 0,
}


def preset(model: str | None = None, **chosen: Any) -> Config:
    """The settings that fit the offline run, or a given model, with what was chosen in their place."""
    return make_config(Config, chosen | {"model": model})
