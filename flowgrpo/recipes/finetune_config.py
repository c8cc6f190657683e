"""Settings of learning from a file of conversations."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Unpack

from flowgrpo.errors import BadInput
from flowgrpo.files import is_file
from flowgrpo.training.config import RunConfig, RunSettings, Section, make_config, setting
from flowgrpo.training.names import ATTENTION, DTYPES

RATES = {"sft": 1e-5, "dpo": 1e-6}  # default learning rates, by method


@dataclass(frozen=True, kw_only=True)
class DataSection(Section):
    """The file of examples."""

    data: str = setting("", "File of examples (.jsonl).", "Run")
    data_sha256: str = setting("", "SHA-256 of the file of examples; computed if it is empty.")
    max_tokens: int = setting(
        1024, "Maximum number of tokens of a conversation; longer ones are left out.", "Sizes", at_least=2
    )
    held_out: float = setting(
        0.1, "Fraction of the examples that is held out for validation.", "Sizes", at_least=0.0, at_most=0.9
    )


@dataclass(frozen=True, kw_only=True)
class ModelSection(Section):
    """The model, its types and kernels."""

    model: str = setting("", "Model folder, GGUF file, smollm2, gemma3, or hub id.", "Run")
    dtype: str = setting(
        "float32",
        "Type of weights and activations in the forward pass; the master weights are float32.",
        "Devices and memory",
        choices=DTYPES,
    )
    attention: str = setting(
        "auto",
        "Attention kernel: plain (XLA), splash (TPU), flash (GPU), or auto, which follows the platform.",
        "Devices and memory",
        choices=ATTENTION,
    )


@dataclass(frozen=True, kw_only=True)
class LearnerSection(Section):
    """The method, its batches and its optimizer."""

    method: str = setting(
        "sft", "Method: sft (imitate demonstrations) or dpo (learn preferences).", "Run", choices=RATES
    )
    epochs: float = setting(1.0, "Number of passes over the examples.", "Sizes", at_least=0.0)
    batch: int = setting(16, "Number of examples per gradient step (batch size).", "Sizes", at_least=1)
    learning_rate: float | None = setting(
        None, "Peak learning rate; the method's by default.", "Learning", at_least=0.0
    )
    beta: float = setting(0.1, "KL strength (beta) of DPO.", "Learning", at_least=0.0)
    micro_rows: int = setting(
        8, "Number of rows per forward and backward pass (micro-batch).", "Devices and memory", at_least=1
    )


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Settings of learning from a file of conversations."""

    data: DataSection
    model: ModelSection
    learner: LearnerSection

    def __post_init__(self) -> None:
        path = self.data.data
        if not is_file(Path(path)):
            raise BadInput(f"{path or '--data'} is no file: give the file of examples as --data")
        if not self.model.model:
            raise BadInput("--model must be given: a model folder, or a hub id")
        sha = self.data.data_sha256 or sha256(Path(path).read_bytes()).hexdigest()
        object.__setattr__(self, "data", replace(self.data, data_sha256=sha))
        if self.learner.learning_rate is None:
            object.__setattr__(self, "learner", replace(self.learner, learning_rate=RATES[self.learner.method]))

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that fit the method."""
        plain = super().defaults(chosen)
        return plain | {"learning_rate": RATES.get(chosen.get("method", plain["method"]))}


class Settings(RunSettings, total=False):
    """Settings of learning from a file of conversations, but for `method`, as keyword arguments of `preset`."""

    data: str
    data_sha256: str
    max_tokens: int
    held_out: float
    model: str
    dtype: str
    attention: str
    epochs: float
    batch: int
    learning_rate: float | None
    beta: float
    micro_rows: int


def preset(method: str = "sft", **settings: Unpack[Settings]) -> Config:
    """A Config with these settings; the others fit the method."""
    return make_config(Config, {**settings, "method": method})
