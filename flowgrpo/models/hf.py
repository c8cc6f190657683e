"""Checkpoints in the Hugging Face format, in and out: a folder with config.json, safetensors and tokenizer.

    folder or hub id -> load_model -> Model(policy, params, text, config, source) -> save_model -> folder

Reading goes parameter by parameter, and a layer or some rows at a time within one: beside what is placed already, the
host holds never more than the largest shard and one layer, mapped pages of files included. Writing holds one
shard. What `families` says of names and axes serves both.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.contracts import Policy
from flowgrpo.files import replace_folder
from flowgrpo.models import families
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import Params, make_policy, parameters, shape_of
from flowgrpo.models.placed import fill
from flowgrpo.models.stored import INDEX, SINGLE, Stored, find_tensors, read_json, write_tensors
from flowgrpo.types import BadInput

Placing = jax.sharding.Sharding | Callable[[str, str], jax.sharding.Sharding]

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # ours, and how the files call them
FILES = (  # what a folder that was written here may hold; tokenizers have more than one file
    *("config.json", "generation_config.json", "model*.safetensors", INDEX, "tokenizer*", "chat_template.*"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
)
HUB_FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.txt", "*.jinja"]


class Model(NamedTuple):
    """A policy with its parameters, and what is needed to write it back."""

    policy: Policy
    params: Params
    text: Any  # tokenizer and chat rendering, or None
    config: DecoderConfig
    source: families.Source  # config.json

    @property
    def banned(self) -> tuple[int, ...]:
        """Ids that are never to be sampled: padding, and rows of the embedding that no token has."""
        padding = () if self.text.pad_id in self.text.stop_ids else (self.text.pad_id,)
        return (*padding, *range(self.text.vocab_size, self.config.v))


def load_model(path: str | Path, *, dtype="float32", sharding: Placing | None = None, text: bool = True) -> Model:
    """Read a folder or a hub id.

    `dtype` is what the parameters are stored in, whatever the files have. `sharding`, one for all or a function
    of a parameter's name and axes, says where each goes as soon as it is complete. `text=False` reads no tokenizer.
    """
    folder, source, config = _shape(path)
    dtype, words = _dtype(dtype), _text(folder) if text else None
    tensors = find_tensors(folder)
    _check_tensors(folder, tensors, config)
    params = {name: _read(name, tensors, config, dtype, sharding) for name in parameters(config)}
    return Model(make_policy(config, dtype=dtype), params, words, config, source)


def check_model(path: str | Path) -> None:
    """Raise `BadInput` where `load_model` would, or where the chat template writes no message; no weights are read."""
    from flowgrpo.text import start

    folder, _, config = _shape(path)
    start(_text(folder), [{"role": "user", "content": "x"}])
    _check_tensors(folder, find_tensors(folder), config)


def init_model(source: Mapping[str, Any], key: jax.Array, *, dtype="float32") -> Model:
    """A random model of the shape that a config.json says, without tokenizer."""
    checked = families.text_source(source)
    config = families.decoder_config(checked)
    policy = make_policy(config, dtype=_dtype(dtype))
    return Model(policy, jax.jit(policy.init)(key), None, config, checked)


def save_model(path: str | Path, model: Model, *, max_shard_bytes: float = 5e9) -> None:
    """Write a folder that transformers and inference servers open; it appears when it is whole.

    Shards above `max_shard_bytes` get an index. A model that is there is replaced, with all its files; a folder that
    holds anything else is refused.
    """
    _check_params(model)
    replace_folder(path, lambda stage: _write(stage, model, max_shard_bytes), names=FILES, what="a model")


# The folder -------------------------------------------------------------------------------------------


def _folder(path: str | Path) -> Path:
    """The folder itself, or the local copy of what a hub id names."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)):
        raise BadInput(f"model folder {path} does not exist; give a folder with config.json, or a hub id owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=HUB_FILES))
    except Exception as error:  # offline, unknown, gated: each has its own class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"{path} is no folder here, and the hub does not give a model of this id: {reason}") from error


def _shape(path: str | Path) -> tuple[Path, families.Source, DecoderConfig]:
    """Find the folder, and read from it the config.json and the shape that it describes."""
    folder = _folder(path)
    where = str(folder / "config.json")
    source = families.text_source(read_json(folder / "config.json"), where)
    return folder, source, families.decoder_config(source, where)


def _text(folder: Path):
    from flowgrpo.text import load_text

    return load_text(folder)


def _dtype(dtype) -> np.dtype:
    name = str(getattr(dtype, "__name__", dtype))
    if name not in DTYPES:
        raise BadInput(f"dtype {name} can't hold parameters; choose one of {', '.join(DTYPES)}")
    return jnp.dtype(name)


# Reading ----------------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """Place of a file's tensor among the parameters, and the shape that it has in the file."""

    name: str
    layer: int | None
    shape: tuple[int, ...]


def _slots(config: DecoderConfig) -> dict[str, _Slot]:
    """Every tensor that belongs in the files, by its name there: layer by layer, then what there is once."""
    table, declared = families.tensors_of(config), parameters(config)
    slots = {}
    for layer in [*range(config.num_layers), None]:
        for name, tensor in table.items():
            if declared[name].axes.startswith("n") == (layer is not None):
                slots[tensor.name.format(n=layer)] = _Slot(name, layer, families.file_shape(tensor, config))
    return slots


def _check_tensors(folder: Path, tensors: Mapping[str, Stored], config: DecoderConfig) -> None:
    """Raise one error for all that is missing, unexpected, wrongly shaped or of a dtype that can't be read."""
    expected = {name: slot.shape for name, slot in _slots(config).items()}
    tied = {families.TENSORS["unembed"].name} if config.tied else set()
    wrong = [f"{name} is missing" for name in expected if name not in tensors]
    wrong += [f"{name} is unexpected" for name in sorted(set(tensors) - set(expected) - tied)]
    for name in (name for name in expected if name in tensors):
        shape, dtype = tensors[name].shape, tensors[name].dtype
        if shape != expected[name]:
            wrong.append(f"{name} has shape {list(shape)} and not {list(expected[name])}")
        elif dtype not in DTYPES.values():
            wrong.append(f"{name} is {dtype} and not one of {', '.join(DTYPES.values())}")
    _raise_all(f"the tensors in {folder} are not those of its config.json", wrong)


def _raise_all(what: str, wrong: list[str], most: int = 10) -> None:
    if wrong:
        rest = f"; and {len(wrong) - most} more" if len(wrong) > most else ""
        raise BadInput(f"{what}, {len(wrong)} wrong: {'; '.join(wrong[:most])}{rest}")


def _read(name: str, tensors: Mapping[str, Stored], config: DecoderConfig, dtype, sharding: Placing | None):
    """One parameter, brought to where it belongs a layer at a time, or some rows at a time where it has no layers."""
    axes, tensor = parameters(config)[name].axes, families.tensors_of(config)[name]
    shape, stacked = shape_of(parameters(config)[name], config), axes.startswith("n")
    axis = 0 if stacked else axes.index(tensor.axes[0])

    def read(start: int, stop: int) -> np.ndarray:
        host = np.empty([*shape[:axis], stop - start, *shape[axis + 1 :]], dtype)
        if not stacked:
            host[...] = families.from_file(tensors[tensor.name].read(start, stop), tensor, axes, config)
        for n, layer in enumerate(host if stacked else ()):
            stored = tensors[tensor.name.format(n=start + n)].read()
            layer[...] = families.from_file(stored, tensor, axes.removeprefix("n"), config)
        return host

    place = sharding if sharding is None or isinstance(sharding, jax.sharding.Sharding) else sharding(name, axes)
    return fill(shape, dtype, place, axis=axis, read=read)


# Writing ----------------------------------------------------------------------------------------------


def _check_params(model: Model) -> None:
    expected = {name: shape_of(parameter, model.config) for name, parameter in parameters(model.config).items()}
    wrong = [f"{name} is missing" for name in expected if name not in model.params]
    wrong += [f"{name} is unexpected" for name in model.params if name not in expected]
    for name in (name for name in expected if name in model.params):
        if model.params[name].shape != expected[name]:
            wrong.append(f"{name} has shape {list(model.params[name].shape)} and not {list(expected[name])}")
    _raise_all("the parameters are not those of the model's config", wrong)


def _write(stage: Path, model: Model, max_shard_bytes: float) -> None:
    """Everything that belongs in the folder."""
    shards = _shards(model, max_shard_bytes)
    for file, slots in shards.items():
        write_tensors(stage / file, {name: _take(slot, model) for name, slot in slots.items()})
    if len(shards) > 1:
        total = sum(value.nbytes for value in model.params.values())
        where = {name: file for file, slots in shards.items() for name in slots}
        _write_json(stage / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
    key = "torch_dtype" if "torch_dtype" in model.source else "dtype"
    _write_json(stage / "config.json", {**model.source, key: jnp.dtype(model.params["embed"].dtype).name})
    if model.text is not None:
        model.text.save(stage)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _take(slot: _Slot, model: Model) -> np.ndarray:
    """A tensor as it goes into a file."""
    value = model.params[slot.name]
    if slot.layer is not None:  # a traced index, so that one program serves all layers
        value = jax.lax.dynamic_index_in_dim(value, jnp.int32(slot.layer), keepdims=False)
    axes = parameters(model.config)[slot.name].axes.removeprefix("n")
    return families.to_file(np.asarray(value), families.tensors_of(model.config)[slot.name], axes, model.config)


def _shards(model: Model, max_shard_bytes: float) -> dict[str, dict[str, _Slot]]:
    """Which tensors go into which file, in order; one that is larger than a shard has a shard of its own."""
    groups, size = [{}], 0
    for name, slot in _slots(model.config).items():
        own = int(np.prod(slot.shape)) * model.params[slot.name].dtype.itemsize
        if groups[-1] and size + own > max_shard_bytes:
            groups, size = [*groups, {}], 0
        groups[-1][name] = slot
        size += own
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}
