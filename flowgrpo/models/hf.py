"""Read and write checkpoints in the Hugging Face format.

    folder, GGUF file or hub id -> load_model -> Model(policy, params, tokenizer, config, hf_config)
    model -> model.save -> folder, GGUF file, or adapter

A folder holds config.json, safetensors and a tokenizer. Parameters are read one by one, each by layers or by blocks of
rows (`read_array`): apart from parameters already on a device, the host holds at most the largest shard and one layer,
memory-mapped pages included, however many devices share an array. Writing holds one shard. Tensor names and axes come
from `families`; `find_tensors` gives multimodal folders the names of text-only ones.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flowgrpo.contracts import Policy
from flowgrpo.data.foreign_files import check_file, check_files, path_inside
from flowgrpo.data.gguf_file import is_gguf, read_header
from flowgrpo.data.named_models import find_gguf
from flowgrpo.data.tokenizer import load_tokenizer, start_conversation
from flowgrpo.files import parse_json, replace_folder
from flowgrpo.models import families, gguf
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import make_policy, matrices, parameters, shape_of
from flowgrpo.models.free_memory import check_room
from flowgrpo.models.lora import LoraConfig, LoraParams, adapter_axes, init_adapter, lora_policy, merge_adapter
from flowgrpo.models.quantised import Quantised, check_kind, quantise_matrix
from flowgrpo.types import JSON, BadInput, Params, first_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CARD = "README.md"
# Prefixes of text-only folders, of old and of new multimodal ones; then vision parts and buffers that are skipped.
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
IGNORED = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|.*\.rotary_emb\.inv_freq$")


def read_json(path: Path, hint: str = "a model folder holds config.json and safetensors") -> dict[str, JSON]:
    """Parse a JSON file that holds one object; `hint` ends the error of a missing file."""
    if not path.exists():
        raise BadInput(f"{path} is missing; {hint}")
    check_file(path, Path(os.path.realpath(path.parent)))
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds a {type(value).__name__}, but must hold one JSON object")
    return value


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # in the spelling of safetensors, such as BF16

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Copy the tensor, or entries `start` to `stop` of its first axis; raises `BadInput` for NaN and infinity."""
        with _open_safetensors(self.path) as file:  # a scalar has no first axis to slice
            values = file.get_slice(self.name)[start:stop] if self.shape else file.get_tensor(self.name)
        check_finite(values, f"{self.path}: {self.name}")
        return values


Tensors = Mapping[str, StoredTensor | gguf.FileTensor]


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of the text model in a folder, by the names that a text-only folder gives them."""
    tensors = {name: tensor for path in _weight_files(folder) for name, tensor in list_tensors(path).items()}
    model_prefix = next((prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in tensors), "model.")

    def text_only_name(name: str) -> str:
        if name.startswith(model_prefix):
            return "model." + name.removeprefix(model_prefix)
        return name.removeprefix("language_model.")  # lm_head of old multimodal folders

    return {text_only_name(name): tensor for name, tensor in tensors.items() if not IGNORED.match(name)}


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a safetensors file, by name; raises `BadInput` if the header names one twice (readers differ then)."""

    def unique_names(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BadInput(f"{path} names {twice} twice in its header: save it again")
        return dict(pairs)

    with _open_safetensors(path) as file:
        with path.open("rb") as header:  # its size and form were checked when the file was opened
            json.loads(header.read(int.from_bytes(header.read(8), "little")), object_pairs_hook=unique_names)
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: StoredTensor(path, name, tuple(x.get_shape()), x.get_dtype()) for name, x in slices.items()}


EXPONENT_BITS = {"bfloat16": 0x7F80, "float16": 0x7C00}  # all set in NaN and infinity, and in no other number


def check_finite(values: np.ndarray, what: str) -> None:
    """Raise `BadInput` for NaN or infinity; takes some 50 ms per gigabyte in float32, 120 ms in 16 bits."""
    bits = EXPONENT_BITS.get(values.dtype.name)
    if bits is None:
        is_finite = not np.issubdtype(values.dtype, np.floating) or np.isfinite(values).all()
    else:  # on the bits, which takes a quarter of the time of np.isfinite
        is_finite = not values.size or (np.ascontiguousarray(values).view(np.uint16) & bits).max() != bits
    if not is_finite:
        raise BadInput(f"{what} holds NaN or infinity in {values.dtype.name}: copy the file again, or save it anew")


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file with the permissions of any new file; raises `OSError` if the system can't."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)  # safetensors creates files that only the owner can read


def _open_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    check_file(path, Path(os.path.realpath(path.parent)))

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} can't be read as safetensors: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the single one, or the shards that the index names."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        others = sorted(path.name for path in folder.glob("*.bin"))
        fix = f"{others[0]} is there: save it again in the safetensors format" if others else "copy them into it"
        raise BadInput(f"{folder} has no weights ({SINGLE}, or {INDEX} with its shards); {fix}")
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise BadInput(f"{folder / INDEX} has no weight_map")
    names = {name if isinstance(name, str) else str(name) for name in shards.values()}
    paths = [path_inside(folder, name, folder / INDEX) for name in sorted(names)]
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        raise BadInput(f"{folder / INDEX} names {absent[0]} ({len(absent)} such), which is absent; copy it too")
    return paths


CHUNK_BYTES = 2**24  # per transfer to a device, so that its latency is negligible

ReadChunk = Callable[[int, int], np.ndarray]  # (start, stop) along an axis -> those entries


class DeviceShard(NamedTuple):
    """The part of an array that one device holds, while it is being read."""

    device: Any  # None: the default device, to which the array is not committed
    index: tuple[slice, ...]  # start and stop along each axis
    value: jax.Array | None  # None until its first chunk has arrived


def read_array(
    shape: tuple[int, ...], dtype, sharding: jax.sharding.Sharding | None, *, axis: int, read: ReadChunk
) -> jax.Array:
    """Read an array chunk by chunk along `axis`, each chunk sent to its devices before the next is read."""
    whole = tuple(slice(0, size) for size in shape)
    if sharding is None:
        shards = [DeviceShard(None, whole, None)]
    else:
        shards = []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            bounds = zip(index or whole, shape, strict=True)
            shards.append(DeviceShard(device, tuple(slice(*x.indices(size)[:2]) for x, size in bounds), None))
    entry_bytes = int(np.prod(shape)) // shape[axis] * np.dtype(dtype).itemsize
    step = max(1, CHUNK_BYTES // entry_bytes)
    for start in range(0, shape[axis], step):
        chunk = read(start, min(start + step, shape[axis]))
        shards = [shard._replace(value=_add_chunk(shard, chunk, start, axis)) for shard in shards]
    values = [shard.value for shard in shards if shard.value is not None]
    return values[0] if sharding is None else jax.make_array_from_single_device_arrays(shape, sharding, values)


def _add_chunk(shard: DeviceShard, chunk: np.ndarray, start: int, axis: int) -> jax.Array | None:
    """The shard's value after its overlap with a chunk that starts at `start` has been copied into it."""
    span = shard.index[axis]
    first, last = max(span.start, start), min(span.stop, start + chunk.shape[axis])
    if first >= last:
        return shard.value
    along = slice(first - start, last - start)
    overlap = chunk[tuple(along if i == axis else index for i, index in enumerate(shard.index))]
    on_device = jax.device_put(overlap, shard.device)
    if (first, last) == (span.start, span.stop):
        return jax.block_until_ready(on_device)
    shape = [index.stop - index.start for index in shard.index]
    value = jnp.zeros(shape, chunk.dtype, device=shard.device) if shard.value is None else shard.value
    # Blocking keeps the host from reading more chunks while earlier ones are still being transferred.
    return jax.block_until_ready(_write_chunk(value, on_device, first - span.start, axis=axis))


@partial(jax.jit, static_argnames="axis", donate_argnums=0)
def _write_chunk(value: jax.Array, chunk: jax.Array, start, *, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(value, chunk, start, axis)


# One sharding for all parameters, or a function (name, axis letters) -> sharding.
Placement = jax.sharding.Sharding | Callable[[str, str], jax.sharding.Sharding]

FILES = (  # of a folder that `save_model` may replace; a tokenizer has several
    *("config.json", "generation_config.json", "model*.safetensors", INDEX, "tokenizer*", "chat_template.*"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", CARD),
)
HUB_FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.txt", "*.jinja"]


class Model(NamedTuple):
    """A policy with its parameters, its tokenizer, and the configuration that is written back with it."""

    policy: Policy
    params: Params
    tokenizer: Any  # a ChatTokenizer; None if it was loaded without
    config: DecoderConfig
    hf_config: families.ConfigJSON  # config.json of the Hugging Face folder
    lora: LoraConfig | None = None  # of its adapter: `policy` is then a `lora_policy`, and `params` are `LoraParams`
    source: str | None = None  # path or hub id that it was read from

    @property
    def banned(self) -> tuple[int, ...]:
        """Ids that must never be sampled: padding, and rows of the embedding without a token."""
        tokenizer = self.tokenizer
        padding = () if tokenizer.pad_id in tokenizer.stop_ids else (tokenizer.pad_id,)
        return (*padding, *range(tokenizer.vocab_size, self.config.v))

    @property
    def base(self) -> "Model":
        """The model without its adapter; itself if it has none."""
        if self.lora is None:
            return self
        policy = make_policy(self.config, dtype=self.params.base["embed"].dtype, unstack_on_cpu=True)
        return self._replace(policy=policy, params=self.params.base, lora=None)

    def with_adapter(self, lora: LoraConfig, adapter: Params) -> "Model":
        """The base of this model with another adapter."""
        base = self.base
        policy = lora_policy(self.config, lora, dtype=base.params["embed"].dtype, unstack_on_cpu=True)
        return base._replace(policy=policy, params=LoraParams(base.params, adapter), lora=lora)

    def merged(self) -> "Model":
        """The plain model that computes the same, with its adapter merged into the weights; itself if it has none."""
        if self.lora is None:
            return self
        params = merge_adapter(self.params, self.config, self.lora)
        policy = make_policy(self.config, dtype=params["embed"].dtype, unstack_on_cpu=True)
        return self._replace(policy=policy, params=params, lora=None)

    def save(self, path: str | Path, *, adapter_only: bool = False, card: str | None = None) -> None:
        """Write the model, with its adapter merged: a Hugging Face folder, or a GGUF file if the path ends in .gguf.

        Args:
            path: Folder, or file NAME.gguf; what is there is replaced if it is such a model, and refused otherwise.
            adapter_only: Write the adapter alone, as a folder in PEFT's format.
            card: Text of the folder's README.md.
        """
        from flowgrpo.models import gguf_export, peft  # which need this module

        is_file = Path(path).suffix == ".gguf"
        if adapter_only and self.lora is None:
            raise BadInput("the model has no adapter: leave out adapter_only, or load it with lora=16")
        if is_file and (adapter_only or card is not None):
            raise BadInput(f"{path} is one file, for a whole model: name a folder for an adapter or a card")
        if is_file:
            gguf_export.save_gguf(path, self)
        elif adapter_only:
            assert self.lora is not None
            peft.save_adapter(path, self.params.adapter, self.config, self.lora, base_model=self.source, card=card)
        else:
            save_model(path, self, card=card)


def load_model(
    path: str | Path,
    *,
    dtype="float32",
    sharding: Placement | None = None,
    tokenizer: bool = True,
    quantised: str | None = None,
    template: str | None = None,
    lora: int | LoraConfig | None = None,
    seed: int = 0,
) -> Model:
    """Read a model from a folder, a GGUF file, an installed package ("smollm2", "gemma3"), or a hub id.

    Args:
        dtype: Type that parameters are stored in, whatever the files hold: float32, bfloat16 or float16.
        sharding: One for all parameters, or a function of a parameter's name and axis letters; each parameter goes to
            its devices as soon as it is read. None: the default device.
        tokenizer: Whether to read the tokenizer too.
        quantised: "int8" or "nf4" quantises the matrices of the layers, on the host and a layer at a time, so that no
            device ever holds the whole model in `dtype`.
        template: A Jinja chat template, in place of the model's own.
        lora: Rank, or settings, of a new adapter to train over the frozen weights; None: none.
        seed: Of the adapter's initial values.
    """
    if lora is not None and not isinstance(lora, LoraConfig):
        lora = LoraConfig(rank=lora)
    kind = None if quantised is None else check_kind(quantised)
    folder, hf_config, config = read_config(path)
    dtype = to_dtype(dtype)
    tensors = _find_model_tensors(folder, config)
    if sharding is None:
        check_room(folder, config, dtype, kind)
    chat_tokenizer = load_tokenizer(folder, template) if tokenizer else None
    _check_ids(folder, chat_tokenizer, config)
    kinds = {} if kind is None else dict.fromkeys(matrices(config), kind)
    params = {
        name: read_parameter(name, tensors, config, dtype, sharding, kinds.get(name)) for name in parameters(config)
    }
    if lora is None:
        policy = make_policy(config, dtype=dtype, unstack_on_cpu=True)
        return Model(policy, params, chat_tokenizer, config, hf_config, source=str(path))
    adapter = init_adapter(jax.random.key(seed), config, lora)
    for name, axes in adapter_axes(lora).items():
        adapter[name] = jax.device_put(adapter[name], sharding_of(sharding, name, axes))
    policy = lora_policy(config, lora, dtype=dtype, unstack_on_cpu=True)
    return Model(policy, LoraParams(params, adapter), chat_tokenizer, config, hf_config, lora, str(path))


def check_model(path: str | Path, template: str | None = None) -> None:
    """Raise `BadInput` if `load_model` would, or if the chat template can't render a message; reads no weights."""
    folder, _, config = read_config(path)
    tokenizer = load_tokenizer(folder, template)
    start_conversation(tokenizer, [{"role": "user", "content": "x"}])
    _check_ids(folder, tokenizer, config)
    _find_model_tensors(folder, config)


def init_model(hf_config: Mapping[str, JSON], key: jax.Array, *, dtype="float32") -> Model:
    """A randomly initialised model of the shape that a config.json describes, without tokenizer."""
    text_config = families.text_model_config(hf_config)
    config = families.decoder_config(text_config)
    policy = make_policy(config, dtype=to_dtype(dtype))
    return Model(policy, jax.jit(policy.init)(key), None, config, text_config)


def save_model(path: str | Path, model: Model, *, max_shard_bytes: float = 5e9, card: str | None = None) -> None:
    """Write a folder that transformers and inference servers open; it appears only once it is complete.

    Parameters of more than `max_shard_bytes` are written as several files with an index. `card` is the text of a
    README.md. An existing model is replaced with all its files; a folder that holds anything else is refused. An
    adapter is merged into the weights.
    """
    model = model.merged()
    quantised = [name for name, x in model.params.items() if isinstance(x, Quantised)]
    if quantised:
        raise BadInput(
            f"{quantised[0]} is quantised, and is not written so: merge it, or take `dequantise_layers` of all"
        )
    expected = {name: shape_of(parameter, model.config) for name, parameter in parameters(model.config).items()}
    families.check_tensors("the parameters are not those of the model's config", model.params, expected)

    def fill(stage: Path) -> None:
        shards = _assign_shards(model, max_shard_bytes)
        for file, slots in shards.items():
            write_tensors(stage / file, {name: _to_file_tensor(slot, model) for name, slot in slots.items()})
        if len(shards) > 1:
            total = sum(value.nbytes for value in model.params.values())
            file_of = {name: file for file, slots in shards.items() for name in slots}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
            write_json(stage / INDEX, index)
        dtype_key = "torch_dtype" if "torch_dtype" in model.hf_config else "dtype"
        dtype = jnp.dtype(model.params["embed"].dtype).name
        write_json(stage / "config.json", {**model.hf_config, dtype_key: dtype})
        if model.tokenizer is not None:
            model.tokenizer.save(stage)
        write_card(stage, card)

    replace_folder(path, fill, names=FILES, kind="a model")


# The folder -------------------------------------------------------------------------------------------


def find_folder(path: str | Path) -> Path:
    """The folder or GGUF file that a path, a package name or a hub id stands for; hub models are downloaded."""
    if (file := find_gguf(path)) is not None:
        return file
    folder = Path(path).expanduser()
    if folder.is_dir():
        check_files(folder)
        return folder
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)):
        raise BadInput(
            f"model folder {path} does not exist; give a folder with config.json, a GGUF file, or a hub id owner/name"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=HUB_FILES))
    except Exception as error:  # offline, unknown, gated: each has its own class
        why = first_line(error)
        raise BadInput(f"{path} is no folder here, and the hub does not give a model of this id: {why}") from error


def read_config(
    path: str | Path, adapt: Callable[[families.ConfigJSON, str], families.ConfigJSON] = lambda hf_config, _: hf_config
) -> tuple[Path, families.ConfigJSON, DecoderConfig]:
    """The folder (or GGUF file), its config.json after `adapt(config_json, location)`, and the decoder's shape."""
    folder = find_folder(path)
    is_file = is_gguf(folder)
    location = str(folder if is_file else folder / "config.json")
    raw = gguf.read_gguf_config(read_header(folder)) if is_file else read_json(folder / "config.json")
    hf_config = families.text_model_config(adapt(raw, location), location)
    return folder, hf_config, families.decoder_config(hf_config, location)


def _check_ids(folder: Path, tokenizer: Any, config: DecoderConfig) -> None:
    """Raise `BadInput` for token ids without a row in the embedding.

    Added tokens may lack one unless generation stops at them: Gemma 3's text models have such a token for images.
    """
    if tokenizer is None or tokenizer.vocab_size <= config.v:
        return
    hf_tokenizer = tokenizer.hf_tokenizer
    added = set(hf_tokenizer.get_added_vocab().values()) - {*tokenizer.stop_ids, tokenizer.pad_id}
    without_row = sorted(i for i in hf_tokenizer.get_vocab().values() if i >= config.v and i not in added)
    if without_row:
        raise BadInput(
            f"{folder}: its tokenizer has the id {without_row[0]}, but vocab_size in its config.json is {config.v}: "
            "copy the tokenizer that belongs to these weights"
        )


def to_dtype(dtype) -> np.dtype:
    """A dtype or its name as a dtype that parameters can be stored in."""
    name = str(getattr(dtype, "__name__", dtype))
    if name not in families.DTYPES:
        raise BadInput(f"dtype {name} can't hold parameters; choose one of {', '.join(families.DTYPES)}")
    return jnp.dtype(name)


# Reading ----------------------------------------------------------------------------------------------


class _FileSlot(NamedTuple):
    """The parameter, and the layer of it, that a tensor of a file holds, and the tensor's shape in the file."""

    name: str
    layer: int | None
    shape: tuple[int, ...]


def _file_slots(config: DecoderConfig) -> dict[str, _FileSlot]:
    """Every tensor of a checkpoint, by its name there: layer by layer, then those outside layers."""
    table, declared = families.checkpoint_tensors(config), parameters(config)
    slots = {}
    for layer in [*range(config.num_layers), None]:
        for name, tensor in table.items():
            if declared[name].axes.startswith("n") == (layer is not None):
                slots[tensor.name.format(n=layer)] = _FileSlot(name, layer, families.file_shape(tensor, config))
    return slots


def _find_model_tensors(folder: Path, config: DecoderConfig) -> Tensors:
    """The tensors of a folder or a GGUF file, checked to be those that the decoder's shape requires."""
    if is_gguf(folder):
        return gguf.find_tensors(read_header(folder), config)
    tensors = find_tensors(folder)
    check_model_tensors(folder, tensors, config)
    return tensors


def check_model_tensors(folder: Path, tensors: Tensors, config: DecoderConfig) -> None:
    """Raise `BadInput` unless the tensors of a folder are those of a decoder of this shape."""
    expected = {name: slot.shape for name, slot in _file_slots(config).items()}
    tied = [families.TENSORS["unembed"].name] if config.tied else []
    families.check_tensors(f"the tensors in {folder} are not those of its config.json", tensors, expected, spare=tied)


def read_parameter(
    name: str,
    tensors: Tensors,
    config: DecoderConfig,
    dtype,
    sharding: Placement | None,
    quantised: str | None = None,
) -> Any:
    """One parameter, read and placed layer by layer, or by blocks of rows if it has no layers."""
    axes, tensor = parameters(config)[name].axes, families.checkpoint_tensors(config)[name]
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

    array_sharding = sharding_of(sharding, name, axes)
    if quantised is None:
        return read_array(shape, dtype, array_sharding, axis=axis, read=read)
    return _read_quantised(shape, array_sharding, matrices(config)[name][0], quantised, read)


def _read_quantised(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, summed: tuple[int, ...], kind: str, read: ReadChunk
) -> Quantised:
    """Read and quantise layers one at a time: values go to their devices at once, the few scales at the end."""
    abstract = jax.eval_shape(lambda: quantise_matrix(jnp.zeros(shape), summed, kind=kind))
    scales = []

    def read_values(start: int, stop: int) -> np.ndarray:
        layers = [quantise_matrix(read(n, n + 1), summed, kind=kind) for n in range(start, stop)]
        scales.extend(layer.scales for layer in layers)
        return np.concatenate([layer.values for layer in layers])

    values = read_array(abstract.values.shape, abstract.values.dtype, sharding, axis=0, read=read_values)
    # The axes of scales can't be sharded like those of their values; they are small enough to replicate.
    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    return abstract.replace(values=values, scales=jax.device_put(np.concatenate(scales), replicated))


def sharding_of(placement: Placement | None, name: str, axes: str) -> jax.sharding.Sharding | None:
    """The sharding of one parameter."""
    if placement is None or isinstance(placement, jax.sharding.Sharding):
        return placement
    return placement(name, axes)


# Writing ----------------------------------------------------------------------------------------------


def write_card(folder: Path, text: str | None) -> None:
    """Write a README.md, if there is a text."""
    if text is not None:
        (folder / CARD).write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, JSON]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _to_file_tensor(slot: _FileSlot, model: Model) -> np.ndarray:
    """A tensor as it is written to a file."""
    value = model.params[slot.name]
    if slot.layer is not None:  # by a traced index, so that all layers share one program
        value = jax.lax.dynamic_index_in_dim(value, jnp.int32(slot.layer), keepdims=False)
    axes = parameters(model.config)[slot.name].axes.removeprefix("n")
    return families.to_file(np.asarray(value), families.checkpoint_tensors(model.config)[slot.name], axes, model.config)


def _assign_shards(model: Model, max_shard_bytes: float) -> dict[str, dict[str, _FileSlot]]:
    """The tensors of each file, in order; a tensor larger than `max_shard_bytes` gets a file of its own."""
    shards, shard_bytes = [{}], 0
    for name, slot in _file_slots(model.config).items():
        tensor_bytes = int(np.prod(slot.shape)) * model.params[slot.name].dtype.itemsize
        if shards[-1] and shard_bytes + tensor_bytes > max_shard_bytes:
            shards, shard_bytes = [*shards, {}], 0
        shards[-1][name] = slot
        shard_bytes += tensor_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}
