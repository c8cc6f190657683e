"""Settings of learning from a file of conversations."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from flowgrpo.errors import BadInput
from flowgrpo.files import is_file
from flowgrpo.recipes.names import ATTENTION, DTYPES
from flowgrpo.run.config import RunConfig, setting

RATES = {"sft": 1e-5, "dpo": 1e-6}  # learning rates by method, where none is given


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Settings of learning from a file of conversations."""

    method: str = setting("sft", "Imitate demonstrations, or learn preferences.", "What is run", choices=RATES)
    data: str = setting("", "The examples, a .jsonl file.", "What is run")
    data_sha256: str = setting("", "Of the examples; of the file, where it is empty.")
    model: str = setting("", "Model folder, GGUF file, smollm2, gemma3, or hub id.", "What is run")
    epochs: float = setting(1.0, "How often every example is seen.", "Sizes", at_least=0.0)
    batch: int = setting(16, "Examples of a step.", "Sizes", at_least=1)
    max_tokens: int = setting(1024, "Tokens of a conversation at most.", "Sizes", at_least=2)
    held_out: float = setting(0.1, "The share of examples that are held out.", "Sizes", at_least=0.0, at_most=0.9)
    learning_rate: float | None = setting(None, "At its highest.", "Learning", at_least=0.0)
    beta: float = setting(0.1, "How strongly DPO holds on to the model that it begins with.", "Learning", at_least=0.0)
    micro_rows: int = setting(8, "Rows that go through the model together.", "Devices and memory", at_least=1)
    dtype: str = setting("float32", "What the weights are held in.", "Devices and memory", choices=DTYPES)
    attention: str = setting("auto", "What computes attention; by platform.", "Devices and memory", choices=ATTENTION)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_file(Path(self.data)):
            raise BadInput(f"{self.data or '--data'} is no file: give the path of the examples as --data")
        if not self.model:
            raise BadInput("--model must be given: a model folder, or a hub id")
        sha = sha256(Path(self.data).read_bytes()).hexdigest()
        object.__setattr__(self, "data_sha256", self.data_sha256 or sha)
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", RATES[self.method])

    @classmethod
    def defaults(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Those that fit the method."""
        plain = super().defaults(chosen)
        return plain | {"learning_rate": RATES.get(chosen.get("method", plain["method"]))}
