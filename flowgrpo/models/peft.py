"""Adapters in PEFT's format, in and out: adapter_config.json and adapter_model.safetensors.

    folder -> load_adapter -> (lora, adapter) -> save_adapter -> folder

All that PEFT knows beyond plain low-rank products on whole projections is refused by the name of its field.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flowgrpo.contracts import Params
from flowgrpo.files import replace_folder
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.families import TENSORS, check_tensors
from flowgrpo.models.hf import CARD, list_tensors, read_json, write_card, write_json, write_tensors
from flowgrpo.models.lora import PROJECTIONS, LoraConfig, adapter_shapes, check_adapter
from flowgrpo.types import BadInput

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields that don't change what an adapter computes: where it comes from and how it was trained.
NOTES = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "inference_mode", "lora_dropout"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision"),
}
# Fields that may have these values only; other ways to initialise change the base too. Any field that is neither
# among these nor among those that are read or noted must be empty.
ALLOWED: Mapping[str, tuple] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
READ = {"r", "lora_alpha", "target_modules", "use_rslora"}


def save_adapter(
    path: str | Path,
    adapter: Params,
    config: DecoderConfig,
    lora: LoraConfig,
    *,
    base_model: str | None = None,
    card: str | None = None,
) -> None:
    """Write a folder that PEFT and inference servers open; `base_model` is the folder or hub id that it belongs to.

    `card` is the text of a README.md. The folder appears when it is whole. An adapter that is there is replaced; a
    folder that holds anything else is refused.
    """
    check_adapter(adapter, config, lora)
    host = {name: np.asarray(value) for name, value in adapter.items()}
    tensors = {
        file_name: np.ascontiguousarray(host[name][layer].reshape(shape[::-1]).T)
        for file_name, (name, layer, shape) in _tensors(config, lora).items()
    }

    def fill(stage: Path) -> None:
        write_json(stage / CONFIG, _to_peft(lora, base_model))
        write_tensors(stage / WEIGHTS, tensors)
        write_card(stage, card)

    replace_folder(path, fill, names=(CONFIG, WEIGHTS, CARD), what="an adapter")


def load_adapter(path: str | Path, config: DecoderConfig, *, dtype=jnp.float32) -> tuple[LoraConfig, Params]:
    """Read a folder that PEFT or `save_adapter` wrote, for a base of this shape; dropout is not applied."""
    path = Path(path)
    lora = _from_peft(path / CONFIG, config)
    if not (path / WEIGHTS).exists():
        raise BadInput(f"{path / WEIGHTS} is missing; save the adapter in the safetensors format")
    found, slots = list_tensors(path / WEIGHTS), _tensors(config, lora)
    expected = {name: slot.shape for name, slot in slots.items()}
    check_tensors(f"{path / WEIGHTS} does not fit rank, targets and model", found, expected)
    adapter = {name: np.empty(shape, jnp.dtype(dtype)) for name, shape in adapter_shapes(config, lora).items()}
    for file_name, slot in slots.items():
        layer = adapter[slot.name][slot.layer]
        layer[...] = found[file_name].read().T.reshape(layer.shape)
    return lora, {name: jnp.asarray(value) for name, value in adapter.items()}


class _AdapterSlot(NamedTuple):
    """Place of a file's tensor in an adapter, and the shape that it has in the file."""

    name: str
    layer: int
    shape: tuple[int, int]


def _tensors(config: DecoderConfig, lora: LoraConfig) -> dict[str, _AdapterSlot]:
    """Every tensor of the file by its name there; A is [z, inputs] and B is [outputs, z]."""
    slots, shapes = {}, adapter_shapes(config, lora)
    for (layer, target), module in _modules(config, lora.targets).items():
        (*inputs, z), (_, *outputs) = shapes[f"{target}_a"][1:], shapes[f"{target}_b"][1:]
        stem = f"base_model.model.{module}"
        slots[f"{stem}.lora_A.weight"] = _AdapterSlot(f"{target}_a", layer, (z, math.prod(inputs)))
        slots[f"{stem}.lora_B.weight"] = _AdapterSlot(f"{target}_b", layer, (math.prod(outputs), z))
    return slots


def _modules(config: DecoderConfig, targets: tuple[str, ...]) -> dict[tuple[int, str], str]:
    """Map each layer and projection to the name of its module in transformers."""
    return {
        (layer, target): TENSORS[target].name.format(n=layer).removesuffix(".weight")
        for layer in range(config.num_layers)
        for target in targets
    }


def _to_peft(lora: LoraConfig, base_model: str | None) -> dict[str, Any]:
    whole = float(lora.alpha).is_integer()  # servers read alpha as an integer
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if whole else lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": [f"{target}_proj" for target in lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _from_peft(path: Path, config: DecoderConfig) -> LoraConfig:
    source = read_json(path, f"an adapter's folder holds {CONFIG} and {WEIGHTS}")
    for field, value in source.items():
        fits = value in ALLOWED[field] if field in ALLOWED else field in READ | NOTES or not value
        if not fits:
            raise BadInput(f"{path}: {field} is {value!r}, which is not supported; give an adapter without it")
    absent = [field for field in ("r", "lora_alpha", "target_modules") if field not in source]
    if absent:
        raise BadInput(f"{path}: {', '.join(absent)} is missing; copy the file that PEFT wrote")
    try:
        targets = _targets(source["target_modules"], config)
        return LoraConfig(source["r"], source["lora_alpha"], targets, bool(source.get("use_rslora")))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _targets(wanted, config: DecoderConfig) -> tuple[str, ...]:
    """The projections that `target_modules` means: ends of module names, or one regular expression for whole names."""
    modules = _modules(config, PROJECTIONS)
    if wanted == "all-linear":
        return PROJECTIONS
    if not isinstance(wanted, (str, list)) or not all(isinstance(each, str) for each in wanted):
        raise BadInput(f"target_modules is {wanted!r}; give a list of names or a regular expression")
    if isinstance(wanted, str):
        matching = _matching(wanted, list(modules.values()))
        hits = [{key for key, module in modules.items() if module in matching}]
    else:
        ends = [re.compile(f"(.*\\.)?{re.escape(each)}") for each in wanted]
        hits = [{key for key, module in modules.items() if end.fullmatch(module)} for end in ends]
    if not all(hits):
        raise BadInput(f"target_modules {wanted!r} has a name that is none of {', '.join(PROJECTIONS)} (as q_proj)")
    hit = {key for keys in hits for key in keys}
    targets = tuple(target for target in PROJECTIONS if any(target == each for _, each in hit))
    if len(hit) < len(targets) * config.num_layers:
        raise BadInput("target_modules names a projection in some layers only; adapt it in all of them or in none")
    return targets


MATCH = """
import json, re, sys
pattern, names = json.load(sys.stdin)
print(json.dumps([name for name in names if re.fullmatch(pattern, name)]))
"""
MATCH_SECONDS = 10.0  # a plain expression takes a thousandth of it


def _matching(pattern: str, names: list[str]) -> set[str]:
    """The names that an expression matches whole, in a process that is ended: a stranger's may go back for ever."""
    try:
        re.compile(pattern)
        command = [sys.executable, "-I", "-c", MATCH]
        text = json.dumps([pattern, names]).encode()
        found = subprocess.run(command, input=text, capture_output=True, timeout=MATCH_SECONDS, check=True)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadInput(f"target_modules {pattern!r:.200} is no regular expression: {error}") from error
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise BadInput(f"target_modules {pattern!r:.200} comes to no end; give a list of names") from error
    return set(json.loads(found.stdout))
