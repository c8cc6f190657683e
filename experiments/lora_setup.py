"""Adapter settings of a run: `lora_rank` (0 or absent: all parameters are trained), alpha, targets."""

from collections.abc import Mapping
from typing import Any

from flowgrpo.models.lora import PROJECTIONS, LoraConfig

LORA: dict[str, Any] = {"lora_rank": 0, "lora_alpha": 32.0, "lora_targets": ",".join(PROJECTIONS)}


def lora_of(settings: Mapping[str, Any]) -> LoraConfig | None:
    """The adapter of a run; None where it has none."""
    if not settings.get("lora_rank"):
        return None
    targets = tuple(settings["lora_targets"].split(","))
    return LoraConfig(rank=settings["lora_rank"], alpha=settings["lora_alpha"], targets=targets)
