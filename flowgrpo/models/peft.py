"""Read and write adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

    folder -> load_adapter -> (lora, adapter) -> save_adapter -> folder

Any feature of PEFT beyond plain low-rank products on whole projections is refused, naming its field.
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

from flowgrpo.files import replace_folder
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.families import TENSORS, check_tensors
from flowgrpo.models.hf import CARD, list_tensors, read_json, write_card, write_json, write_tensors
from flowgrpo.models.lora import PROJECTIONS, LoraConfig, adapter_shapes, check_adapter
from flowgrpo.types import JSON, BadInput, Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields that don't change what an adapter computes: its origin and how it was trained.
IGNORED = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "inference_mode", "lora_dropout"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision"),
}
# Fields that must have one of these values; other initialisations change the base too. A field that is in none of
# `ALLOWED`, `READ` and `IGNORED` must be empty.
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
    """Write a folder that PEFT and inference servers open; it appears only once it is complete.

    An existing adapter is replaced; a folder that holds anything else is refused.

    Args:
        adapter, config, lora: The adapter, the shape of its base, and its settings.
        base_model: Folder or hub id of its base, which is written to adapter_config.json.
        card: Text of a README.md.
    """
    check_adapter(adapter, config, lora)
    host = {name: np.asarray(value) for name, value in adapter.items()}
    tensors = {
        file_name: np.ascontiguousarray(host[name][layer].reshape(shape[::-1]).T)
        for file_name, (name, layer, shape) in _file_slots(config, lora).items()
    }

    def fill(stage: Path) -> None:
        write_json(stage / CONFIG, _to_peft(lora, base_model))
        write_tensors(stage / WEIGHTS, tensors)
        write_card(stage, card)

    replace_folder(path, fill, names=(CONFIG, WEIGHTS, CARD), kind="an adapter")


def load_adapter(path: str | Path, config: DecoderConfig, *, dtype=jnp.float32) -> tuple[LoraConfig, Params]:
    """Read a folder that PEFT or `save_adapter` wrote, for a base of this shape; dropout is ignored."""
    path = Path(path)
    lora = _read_lora_config(path / CONFIG, config)
    if not (path / WEIGHTS).exists():
        raise BadInput(f"{path / WEIGHTS} is missing; save the adapter in the safetensors format")
    tensors, slots = list_tensors(path / WEIGHTS), _file_slots(config, lora)
    expected = {name: slot.shape for name, slot in slots.items()}
    check_tensors(f"{path / WEIGHTS} does not fit rank, targets and model", tensors, expected)
    adapter = {name: np.empty(shape, jnp.dtype(dtype)) for name, shape in adapter_shapes(config, lora).items()}
    for file_name, slot in slots.items():
        layer = adapter[slot.name][slot.layer]
        layer[...] = tensors[file_name].read().T.reshape(layer.shape)
    return lora, {name: jnp.asarray(value) for name, value in adapter.items()}


class _AdapterSlot(NamedTuple):
    """The array of an adapter, and the layer of it, that a tensor of a file holds, and the tensor's shape there."""

    name: str
    layer: int
    shape: tuple[int, int]


def _file_slots(config: DecoderConfig, lora: LoraConfig) -> dict[str, _AdapterSlot]:
    """Every tensor of the file by its name there; A is [z, inputs] and B is [outputs, z]."""
    slots, shapes = {}, adapter_shapes(config, lora)
    for (layer, target), module in _modules(config, lora.targets).items():
        (*inputs, z), (_, *outputs) = shapes[f"{target}_a"][1:], shapes[f"{target}_b"][1:]
        stem = f"base_model.model.{module}"
        slots[f"{stem}.lora_A.weight"] = _AdapterSlot(f"{target}_a", layer, (z, math.prod(inputs)))
        slots[f"{stem}.lora_B.weight"] = _AdapterSlot(f"{target}_b", layer, (math.prod(outputs), z))
    return slots


def _modules(config: DecoderConfig, targets: tuple[str, ...]) -> dict[tuple[int, str], str]:
    """The name in transformers of the module of each layer and projection."""
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


def _read_lora_config(path: Path, config: DecoderConfig) -> LoraConfig:
    source = read_json(path, f"an adapter's folder holds {CONFIG} and {WEIGHTS}")
    for field, value in source.items():
        fits = value in ALLOWED[field] if field in ALLOWED else field in READ | IGNORED or not value
        if not fits:
            raise BadInput(f"{path}: {field} is {value!r}, which is not supported; give an adapter without it")
    absent = [field for field in ("r", "lora_alpha", "target_modules") if field not in source]
    if absent:
        raise BadInput(f"{path}: {', '.join(absent)} is missing; copy the file that PEFT wrote")
    try:
        targets = _parse_targets(source["target_modules"], config)
        return LoraConfig(source["r"], source["lora_alpha"], targets, bool(source.get("use_rslora")))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _parse_targets(target_modules: JSON, config: DecoderConfig) -> tuple[str, ...]:
    """The projections that `target_modules` names: suffixes of module names, or a regular expression of whole ones."""
    modules = _modules(config, PROJECTIONS)
    if target_modules == "all-linear":
        return PROJECTIONS
    if not isinstance(target_modules, (str, list)) or not all(isinstance(name, str) for name in target_modules):
        raise BadInput(f"target_modules is {target_modules!r}; give a list of names or a regular expression")
    if isinstance(target_modules, str):
        matching = _match_in_process(target_modules, list(modules.values()))
        matches = [{key for key, module in modules.items() if module in matching}]
    else:
        patterns = [re.compile(f"(.*\\.)?{re.escape(name)}") for name in target_modules]
        matches = [{key for key, module in modules.items() if pattern.fullmatch(module)} for pattern in patterns]
    if not all(matches):
        raise BadInput(
            f"target_modules {target_modules!r} has a name that is none of {', '.join(PROJECTIONS)} (as q_proj)"
        )
    adapted = {key for keys in matches for key in keys}  # (layer, projection)
    targets = tuple(target for target in PROJECTIONS if any(target == name for _, name in adapted))
    if len(adapted) < len(targets) * config.num_layers:
        raise BadInput("target_modules names a projection in some layers only; adapt it in all of them or in none")
    return targets


MATCH = """
import json, re, sys
pattern, names = json.load(sys.stdin)
print(json.dumps([name for name in names if re.fullmatch(pattern, name)]))
"""
MATCH_SECONDS = 10.0  # a plain expression takes a thousandth of this


def _match_in_process(pattern: str, names: list[str]) -> set[str]:
    """The names that a regular expression matches, in a process with a timeout: a stranger's may backtrack for ever."""
    try:
        re.compile(pattern)
        command = [sys.executable, "-I", "-c", MATCH]
        text = json.dumps([pattern, names]).encode()
        process = subprocess.run(command, input=text, capture_output=True, timeout=MATCH_SECONDS, check=True)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadInput(f"target_modules {pattern!r:.200} is no regular expression: {error}") from error
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise BadInput(f"target_modules {pattern!r:.200} comes to no end; give a list of names") from error
    return set(json.loads(process.stdout))
