"""Settings of a run on self-verification: `Config`, and `preset`, which fits them to a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from flowgrpo.errors import BadInput
from flowgrpo.training.config import make_config, setting
from flowgrpo.training.settings import HostedConfig, HostedSettings


@dataclass(frozen=True, kw_only=True)
class Config(HostedConfig):
    """Settings of a run on self-verification; the defaults are those of the offline run, see `preset`."""

    updates: int = setting(40, "Number of RL updates.", "Sizes", at_least=0, may_change=True)
    queries: int = setting(16, "Number of questions (groups) per update.", "Sizes", at_least=1)
    max_tokens: int = setting(4, "Maximum number of tokens of an answer.", "Sizes", at_least=1)
    context_tokens: int = setting(32, "Maximum number of tokens of a question with its answer.", "Sizes", at_least=2)
    validation_tasks: int = setting(256, "Number of questions per validation.", "Sizes", at_least=1)
    recorded_groups: int = setting(
        2,
        "Number of groups per update whose trajectories are written to trajectories/; 0: none.",
        "Sizes",
        at_least=0,
        was="recorded",
    )
    learning_rate: float = setting(3e-4, "Learning rate of RL.", "Learning", at_least=0.0)
    beta: float = setting(0.001, "KL coefficient to the start; at 0 the KL is not measured.", "Learning", at_least=0.0)
    micro_rows: int = setting(32, "Number of rows per forward and backward pass (micro-batch).", "Learning", at_least=1)
    imitated_accuracy: float = setting(
        0.45,
        "Fraction of right answers among those that the small model imitates.",
        "Learning",
        at_least=0.0,
        at_most=1.0,
        was="right",
    )
    judge_false_positives: float = setting(
        0.15,
        "Fraction of wrong answers that the small model's judge learns to call right.",
        "Learning",
        at_least=0.0,
        at_most=1.0,
        was="overlooked",
    )
    judge_false_negatives: float = setting(
        0.05,
        "Fraction of right answers that the small model's judge learns to call wrong.",
        "Learning",
        at_least=0.0,
        at_most=1.0,
        was="doubted",
    )
    warm_tasks: int = setting(10000, "Number of questions that the small model imitates.", "Learning", at_least=1)
    warm_steps: int = setting(
        400, "Maximum number of imitation steps before RL, in the offline run.", "Learning", at_least=0
    )
    warm_rows: int = setting(48, "Number of rows per imitation step.", "Learning", at_least=1)
    group_seconds: float = setting(
        600.0,
        "Timeout of a group in seconds; its late trajectories are aborted and take no part in the update.",
        "Sampling",
        at_least=0.1,
    )
    slots: int = setting(32, "Number of engine slots: requests that decode together.", "Devices and memory", at_least=2)
    decode_steps: int = setting(
        4,
        "Number of tokens per slot that the engine decodes before it looks at new requests.",
        "Devices and memory",
        at_least=1,
        was="steps",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tasks is not None and self.model is None:
            raise BadInput("--tasks needs --model: the small model that is made here can only answer its own questions")
        if self.temperature <= 0:
            raise BadInput(f"--temperature={self.temperature} always samples the same answer: give more than 0")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of the offline run, or those that fit a given model."""
        return super().defaults(chosen) | (WITH_MODEL if chosen.get("model") else {})


WITH_MODEL: dict[str, Any] = {
    "updates": 100,
    "queries": 32,
    "learning_rate": 1e-6,
    "max_tokens": 512,
    "context_tokens": 2048,
    "prefill_chunk": 64,
    "decode_steps": 16,
    "micro_rows": 1,
    "validation_tasks": 128,
    "dtype": "bfloat16",
    "remat": True,
    "warm_steps": 0,
}


class Settings(HostedSettings, total=False):
    """Settings of a run on self-verification, but for `model`, as keyword arguments of `preset`."""

    tasks: str | None
    imitated_accuracy: float
    judge_false_positives: float
    judge_false_negatives: float
    warm_tasks: int


def preset(model: str | None = None, **settings: Unpack[Settings]) -> Config:
    """A Config with these settings; the others are those of the offline run, or fit a given model."""
    return make_config(Config, {**settings, "model": model})
