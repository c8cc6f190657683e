"""Read and write checkpoints in the Hugging Face format.

    folder, GGUF file, hub id -> load_model -> Model(policy, params, text, config, source) -> save_model -> folder

A folder holds config.json, safetensors and a tokenizer. Reading goes parameter by parameter, and a layer or some rows
at a time within one (`read_array`): beside what is placed already, the host never holds more than the largest shard and
one layer, mapped pages of files included, however many devices share an array. Writing holds one shard. Names and axes
are those of `families`; a tensor's name is the same whether the folder held more than a text model (`open_tensors`).
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
from flowgrpo.data.foreign_files import check_file, check_files, inside
from flowgrpo.data.gguf_file import is_gguf, read_header
from flowgrpo.data.named_models import find_gguf
from flowgrpo.data.tokenizer import load_text, start
from flowgrpo.files import parse_json, replace_folder
from flowgrpo.models import families, gguf
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import Params, make_policy, matrices, parameters, shape_of
from flowgrpo.models.free_memory import check_room
from flowgrpo.models.quantised import Quantised, check_kind, quantise_matrix
from flowgrpo.types import BadInput, first_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CARD = "README.md"
# Of text-only folders, of old and of new multimodal ones; what other parts of those are called; old buffers.
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
IGNORED = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|.*\.rotary_emb\.inv_freq$")


def read_json(path: Path, belongs: str = "a model folder holds config.json and safetensors") -> dict[str, Any]:
    """The object that a JSON file holds."""
    if not path.exists():
        raise BadInput(f"{path} is missing; {belongs}")
    check_file(path, Path(os.path.realpath(path.parent)))
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadInput(f"{path} holds a {type(found).__name__}, where one JSON object belongs")
    return found


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as the file calls it

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A copy of the tensor, or of these entries of its first axis; `BadInput` where one is no finite number."""
        with _opened(self.path) as file:  # a single number has no axis of which entries could be read
            values = file.get_slice(self.name)[start:stop] if self.shape else file.get_tensor(self.name)
        check_finite(values, f"{self.path}: {self.name}")
        return values


Tensors = Mapping[str, Stored | gguf.FileTensor]


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the text model in the folder, by the name that it has in a text-only folder."""
    found = {name: stored for path in _weight_files(folder) for name, stored in list_tensors(path).items()}
    prefix = next((each for each in PREFIXES if f"{each}embed_tokens.weight" in found), "model.")
    return {_plain(name, prefix): stored for name, stored in found.items() if not IGNORED.match(name)}


def list_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of a file by its name."""
    with _opened(path) as file:
        _check_header(path)
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: Stored(path, name, tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}  # bits that are all set in NaN and infinity


def check_finite(values: np.ndarray, what: str) -> None:
    """Raise `BadInput` for NaN or infinity: some 50 ms of a gigabyte in float32, 120 in 16 bits."""
    bits = EXPONENT.get(values.dtype.name)
    if bits is None:
        is_finite = not np.issubdtype(values.dtype, np.floating) or np.isfinite(values).all()
    else:  # as numbers of 16 bits, which takes a quarter of the time
        is_finite = not values.size or (np.ascontiguousarray(values).view(np.uint16) & bits).max() != bits
    if not is_finite:
        raise BadInput(f"{what} holds NaN or infinity in {values.dtype.name}: copy the file again, or save it anew")


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a file of tensors with the permissions of any new file; `OSError` where the system can't."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)  # safetensors lets only the owner read


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    check_file(path, Path(os.path.realpath(path.parent)))

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} can't be read as safetensors: {error}") from error


def _check_header(path: Path) -> None:
    """Raise `BadInput` where a name stands twice: readers differ in which of the two they take."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BadInput(f"{path} names {twice} twice in its header: save it again")
        return dict(pairs)

    with path.open("rb") as file:  # whose header's size and form were looked at when it was opened
        json.loads(file.read(int.from_bytes(file.read(8), "little")), object_pairs_hook=once)


def _plain(name: str, prefix: str) -> str:
    if name.startswith(prefix):
        return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")  # of lm_head, in old multimodal folders


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        others = sorted(path.name for path in folder.glob("*.bin"))
        fix = f"{others[0]} is there: save it again in the safetensors format" if others else "copy them into it"
        raise BadInput(f"{folder} has no weights ({SINGLE}, or {INDEX} with its shards); {fix}")
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise BadInput(f"{folder / INDEX} has no weight_map")
    where = folder / INDEX
    names = {name if isinstance(name, str) else str(name) for name in shards.values()}
    paths = [inside(folder, name, where) for name in sorted(names)]
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        raise BadInput(f"{folder / INDEX} names {absent[0]} ({len(absent)} such), which is absent; copy it too")
    return paths


STAGED = 2**24  # bytes; so many that starting a transfer takes no time beside the transfer

Read = Callable[[int, int], np.ndarray]


class Part(NamedTuple):
    """Part of an array that one device holds."""

    device: Any  # None: the default one, to which the array is not bound
    index: tuple[slice, ...]  # with start and stop, one an axis
    value: jax.Array | None  # None until the first piece is there


def read_array(
    shape: tuple[int, ...], dtype, place: jax.sharding.Sharding | None, *, axis: int, read: Read
) -> jax.Array:
    """The array, read in pieces along `axis`."""
    parts = _parts(shape, place)
    entry = int(np.prod(shape)) // shape[axis] * np.dtype(dtype).itemsize
    step = max(1, STAGED // entry)
    for first in range(0, shape[axis], step):
        piece = read(first, min(first + step, shape[axis]))
        parts = [part._replace(value=_take_in(part, piece, first, axis)) for part in parts]
    values = [part.value for part in parts if part.value is not None]
    return values[0] if place is None else jax.make_array_from_single_device_arrays(shape, place, values)


def _parts(shape: tuple[int, ...], place: jax.sharding.Sharding | None) -> list[Part]:
    whole = tuple(slice(0, size) for size in shape)
    if place is None:
        return [Part(None, whole, None)]
    found = []
    for device, index in place.addressable_devices_indices_map(shape).items():
        bounds = zip(index or whole, shape, strict=True)
        found.append(Part(device, tuple(slice(*one.indices(size)[:2]) for one, size in bounds), None))
    return found


def _take_in(part: Part, piece: np.ndarray, start: int, axis: int) -> jax.Array | None:
    """The part's value with what it holds of a piece that begins at `start`."""
    own = part.index[axis]
    first, last = max(own.start, start), min(own.stop, start + piece.shape[axis])
    if first >= last:
        return part.value
    along = slice(first - start, last - start)
    new = piece[tuple(along if i == axis else index for i, index in enumerate(part.index))]
    moved = jax.device_put(new, part.device)
    if (first, last) == (own.start, own.stop):
        return jax.block_until_ready(moved)
    shape = [index.stop - index.start for index in part.index]
    value = jnp.zeros(shape, piece.dtype, device=part.device) if part.value is None else part.value
    # Waiting keeps the host from reading on while pieces are still on their way.
    return jax.block_until_ready(_write(value, moved, first - own.start, axis=axis))


@partial(jax.jit, static_argnames="axis", donate_argnums=0)
def _write(value: jax.Array, piece: jax.Array, start, *, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(value, piece, start, axis)


Placing = jax.sharding.Sharding | Callable[[str, str], jax.sharding.Sharding]

FILES = (  # what a folder that was written here may hold; tokenizers have more than one file
    *("config.json", "generation_config.json", "model*.safetensors", INDEX, "tokenizer*", "chat_template.*"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", CARD),
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


def load_model(
    path: str | Path,
    *,
    dtype="float32",
    sharding: Placing | None = None,
    text: bool = True,
    quantised: str | None = None,
    template: str | None = None,
) -> Model:
    """Read a folder, a GGUF file, a model that comes as a package ("smollm2", "gemma3"), or a hub id.

    `dtype` is what the parameters are stored in, whatever the files have. `sharding`, one for all or a function
    of a parameter's name and axes, says where each goes as soon as it is complete. `text=False` reads no tokenizer.
    `quantised` is "int8" or "nf4" for matrices of layers that are quantised on the host, a layer at a time, so that no
    device ever holds the whole model in `dtype`. `template` (Jinja) takes the place of the chat template.
    """
    kind = None if quantised is None else check_kind(quantised)
    folder, source, config = _shape(path)
    dtype = _dtype(dtype)
    tensors = _tensors(folder, config)
    if sharding is None:
        check_room(folder, config, dtype, kind)
    words = load_text(folder, template) if text else None
    _check_ids(folder, words, config)
    coded = {} if kind is None else dict.fromkeys(matrices(config), kind)
    params = {name: _read(name, tensors, config, dtype, sharding, coded.get(name)) for name in parameters(config)}
    return Model(make_policy(config, dtype=dtype, apart=True), params, words, config, source)


def check_model(path: str | Path, template: str | None = None) -> None:
    """Raise `BadInput` where `load_model` would, or where the chat template writes no message; no weights are read."""
    folder, _, config = _shape(path)
    text = load_text(folder, template)
    start(text, [{"role": "user", "content": "x"}])
    _check_ids(folder, text, config)
    _tensors(folder, config)


def init_model(source: Mapping[str, Any], key: jax.Array, *, dtype="float32") -> Model:
    """A random model of the shape that a config.json says, without tokenizer."""
    checked = families.text_source(source)
    config = families.decoder_config(checked)
    policy = make_policy(config, dtype=_dtype(dtype))
    return Model(policy, jax.jit(policy.init)(key), None, config, checked)


def save_model(path: str | Path, model: Model, *, max_shard_bytes: float = 5e9, card: str | None = None) -> None:
    """Write a folder that transformers and inference servers open; it appears when it is whole.

    Shards above `max_shard_bytes` get an index; `card` is the text of a README.md. A model that is there is replaced,
    with all its files; a folder that holds anything else is refused.
    """
    coded = [name for name, x in model.params.items() if isinstance(x, Quantised)]
    if coded:
        raise BadInput(f"{coded[0]} is quantised, and is not written so: merge it, or take `dequantise_layers` of all")
    expected = {name: shape_of(parameter, model.config) for name, parameter in parameters(model.config).items()}
    families.check_tensors("the parameters are not those of the model's config", model.params, expected)

    def fill(stage: Path) -> None:
        _write_model(stage, model, max_shard_bytes)
        write_card(stage, card)

    replace_folder(path, fill, names=FILES, what="a model")


# The folder -------------------------------------------------------------------------------------------


def _folder(path: str | Path) -> Path:
    """The folder or the GGUF file itself, or the local copy of what a hub id names."""
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


def _shape(
    path: str | Path, adapt: Callable[[families.Source, str], families.Source] = lambda source, _: source
) -> tuple[Path, families.Source, DecoderConfig]:
    """Find the folder, and read from it the config.json, which may be adapted, and the shape that it describes."""
    folder = _folder(path)
    is_file = is_gguf(folder)
    where = str(folder if is_file else folder / "config.json")
    raw = gguf.read_source(read_header(folder)) if is_file else read_json(folder / "config.json")
    source = families.text_source(adapt(raw, where), where)
    return folder, source, families.decoder_config(source, where)


def _check_ids(folder: Path, text: Any, config: DecoderConfig) -> None:
    """Raise `BadInput` for ids that the embedding has no row for; added tokens may, where nothing is ended with them.

    Gemma 3's text models come with a token for images, which has none.
    """
    if text is None or text.vocab_size <= config.v:
        return
    added = set(text.tokenizer.get_added_vocab().values()) - {*text.stop_ids, text.pad_id}
    beyond = sorted(i for i in text.tokenizer.get_vocab().values() if i >= config.v and i not in added)
    if beyond:
        raise BadInput(
            f"{folder}: its tokenizer has the id {beyond[0]}, but vocab_size in its config.json is {config.v}: "
            "copy the tokenizer that belongs to these weights"
        )


def _dtype(dtype) -> np.dtype:
    name = str(getattr(dtype, "__name__", dtype))
    if name not in families.DTYPES:
        raise BadInput(f"dtype {name} can't hold parameters; choose one of {', '.join(families.DTYPES)}")
    return jnp.dtype(name)


# Reading ----------------------------------------------------------------------------------------------


class _FileSlot(NamedTuple):
    """Place of a file's tensor among the parameters, and the shape that it has in the file."""

    name: str
    layer: int | None
    shape: tuple[int, ...]


def _slots(config: DecoderConfig) -> dict[str, _FileSlot]:
    """Every tensor that belongs in the files, by its name there: layer by layer, then what there is once."""
    table, declared = families.tensors_of(config), parameters(config)
    slots = {}
    for layer in [*range(config.num_layers), None]:
        for name, tensor in table.items():
            if declared[name].axes.startswith("n") == (layer is not None):
                slots[tensor.name.format(n=layer)] = _FileSlot(name, layer, families.file_shape(tensor, config))
    return slots


def _tensors(folder: Path, config: DecoderConfig) -> Tensors:
    """The tensors of a folder or a GGUF file, which are those that the shape asks for."""
    if is_gguf(folder):
        return gguf.find_tensors(read_header(folder), config)
    tensors = find_tensors(folder)
    _check_tensors(folder, tensors, config)
    return tensors


def _check_tensors(folder: Path, tensors: Tensors, config: DecoderConfig) -> None:
    expected = {name: slot.shape for name, slot in _slots(config).items()}
    tied = [families.TENSORS["unembed"].name] if config.tied else []
    families.check_tensors(f"the tensors in {folder} are not those of its config.json", tensors, expected, spare=tied)


def _read(
    name: str,
    tensors: Tensors,
    config: DecoderConfig,
    dtype,
    sharding: Placing | None,
    quantised: str | None = None,
) -> Any:
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

    place = _place(sharding, name, axes)
    if quantised is None:
        return read_array(shape, dtype, place, axis=axis, read=read)
    return _read_quantised(shape, place, matrices(config)[name][0], quantised, read)


def _read_quantised(
    shape: tuple[int, ...], place: jax.sharding.Sharding | None, summed: tuple[int, ...], kind: str, read: Read
) -> Quantised:
    """Layers read and quantised one at a time: values go to their devices at once, the few scales at the end."""
    blank = jax.eval_shape(lambda: quantise_matrix(jnp.zeros(shape), summed, kind=kind))
    scales = []

    def read_values(start: int, stop: int) -> np.ndarray:
        parts = [quantise_matrix(read(n, n + 1), summed, kind=kind) for n in range(start, stop)]
        scales.extend(part.scales for part in parts)
        return np.concatenate([part.values for part in parts])

    values = read_array(blank.values.shape, blank.values.dtype, place, axis=0, read=read_values)
    # The axes of scales can't be divided as those of their values; they are few enough to lie on every device.
    whole = NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place
    return blank.replace(values=values, scales=jax.device_put(np.concatenate(scales), whole))


def _place(sharding: Placing | None, name: str, axes: str) -> jax.sharding.Sharding | None:
    return sharding if sharding is None or isinstance(sharding, jax.sharding.Sharding) else sharding(name, axes)


# Writing ----------------------------------------------------------------------------------------------


def _write_model(stage: Path, model: Model, max_shard_bytes: float) -> None:
    """Everything that belongs in the folder."""
    shards = _shards(model, max_shard_bytes)
    for file, slots in shards.items():
        write_tensors(stage / file, {name: _take(slot, model) for name, slot in slots.items()})
    if len(shards) > 1:
        total = sum(value.nbytes for value in model.params.values())
        where = {name: file for file, slots in shards.items() for name in slots}
        write_json(stage / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
    key = "torch_dtype" if "torch_dtype" in model.source else "dtype"
    write_json(stage / "config.json", {**model.source, key: jnp.dtype(model.params["embed"].dtype).name})
    if model.text is not None:
        model.text.save(stage)


def write_card(folder: Path, text: str | None) -> None:
    """Write a README.md, where there is a text."""
    if text is not None:
        (folder / CARD).write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file for people to read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _take(slot: _FileSlot, model: Model) -> np.ndarray:
    """A tensor as it goes into a file."""
    value = model.params[slot.name]
    if slot.layer is not None:  # a traced index, so that one program serves all layers
        value = jax.lax.dynamic_index_in_dim(value, jnp.int32(slot.layer), keepdims=False)
    axes = parameters(model.config)[slot.name].axes.removeprefix("n")
    return families.to_file(np.asarray(value), families.tensors_of(model.config)[slot.name], axes, model.config)


def _shards(model: Model, max_shard_bytes: float) -> dict[str, dict[str, _FileSlot]]:
    """Say which tensors go into which file, in order; one that is larger than a shard has a shard of its own."""
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
