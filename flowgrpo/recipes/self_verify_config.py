"""Settings of a run on self-verification: `Config`, and `preset`, which fits them to a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from flowgrpo.errors import BadInput
from flowgrpo.training.config import make_config, setting
from flowgrpo.training.settings import HostedConfig, HostedSettings, WarmStartSection, WarmStartSettings


@dataclass(frozen=True, kw_only=True)
class ToyStartSection(WarmStartSection):
    """How the small model that is made here is taught to answer and to judge, both with mistakes."""

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


@dataclass(frozen=True, kw_only=True)
class Config(HostedConfig):
    """Settings of a run on self-verification; `preset` has those that fit a model."""

    warm_start: ToyStartSection

    def __post_init__(self) -> None:
        if self.tasks.tasks is not None and self.model.model is None:
            raise BadInput("--tasks needs --model: the small model that is made here can only answer its own questions")
        if self.rollout.temperature <= 0:
            raise BadInput(f"--temperature={self.rollout.temperature} always samples the same answer: give more than 0")

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of the offline run, or those that fit a given model."""
        return super().defaults(chosen) | OFFLINE | (WITH_MODEL if chosen.get("model") else {})


OFFLINE: dict[str, Any] = {
    "updates": 40,
    "queries": 16,
    "max_tokens": 4,
    "context_tokens": 32,
    "validation_tasks": 256,
    "recorded_groups": 2,
    "learning_rate": 3e-4,
    "beta": 0.001,
    "micro_rows": 32,
    "warm_steps": 400,
    "warm_rows": 48,
    "group_seconds": 600.0,
    "slots": 32,
    "decode_steps": 4,
}
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


class Settings(HostedSettings, WarmStartSettings, total=False):
    """Settings of a run on self-verification, but for `model`, as keyword arguments of `preset`."""

    tasks: str | None
    imitated_accuracy: float
    judge_false_positives: float
    judge_false_negatives: float
    warm_tasks: int


def preset(model: str | None = None, **settings: Unpack[Settings]) -> Config:
    """A Config with these settings; the others are those of the offline run, or fit a given model."""
    return make_config(Config, {**settings, "model": model})
