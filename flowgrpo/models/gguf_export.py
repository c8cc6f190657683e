"""Write a model as GGUF, which llama.cpp and Ollama open.

    save_gguf("planner.gguf", model)                                 one file, matrices in float16
    save_gguf_folder("planner", model, tensor_type="q8_0")           planner.gguf, and a Modelfile for `ollama create`

Metadata, names and values are those of `models.gguf`, the vocabulary that of `data.gguf_vocabulary`. Norms, biases and
all else of one axis stay float32, which is what llama.cpp computes them in. A tensor is converted when it is written,
so beside the parameters the host holds one of them. Needs the package gguf.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.data.gguf_file import MAGIC, import_gguf
from flowgrpo.data.gguf_vocabulary import vocabulary
from flowgrpo.data.modelfile import write_modelfile
from flowgrpo.files import make_folder, replace_folder, write_whole
from flowgrpo.models import families
from flowgrpo.models.config import yarn_magnitude
from flowgrpo.models.decoder import parameters, shape_of
from flowgrpo.models.gguf import ARCHITECTURES, ROPE_FACTORS, rope_factors, tensor_names, to_gguf, to_metadata
from flowgrpo.models.hf import CARD, Model, check_finite, write_card
from flowgrpo.models.quantised import Quantised
from flowgrpo.types import BadInput

TENSOR_TYPES = {"f16": 1, "bf16": 32, "f32": 0, "q8_0": 7}  # of matrices, and what general.file_type says then
MODELFILE = "Modelfile"
FOLDER_FILES = ("*.gguf", MODELFILE, CARD)  # what a folder that was written here may hold
LARGEST = {"f16": 65504.0, "q8_0": 127 * 65504.0}  # numbers; a block of q8_0 has a scale in float16
BIASES = {"o_bias": ("llama",), "gate_bias": ("llama",), "up_bias": ("llama",), "down_bias": ("llama",)}
BIASES |= dict.fromkeys(("q_bias", "k_bias", "v_bias"), ("llama", "qwen2", "qwen3"))  # which architectures add them
LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, from which llama.cpp knows its query scale


class _Tensor(NamedTuple):
    """A tensor of the file: which parameter it is, of which layer, and how it is stored."""

    name: str
    parameter: str
    layer: int | None
    shape: tuple[int, ...]
    stored: str  # one of TENSOR_TYPES


def save_gguf(path: str | Path, model: Model, *, tensor_type: str = "f16", name: str | None = None) -> None:
    """Write one file, which appears when it is whole; a GGUF file that is there is replaced, anything else refused.

    `tensor_type` is what matrices are stored in: f16, bf16, f32, or q8_0, 8 bits and a scale for 32 of them. `name`
    is what a server lists the model as, by default that of the file.
    """
    place = Path(path)
    if place.exists() and not _is_gguf(place):
        raise BadInput(
            f"{path} is there and is no GGUF file: name a new file, such as {place.with_suffix('')}-new.gguf"
        )
    metadata, tensors = _plan(model, tensor_type, name or place.stem)
    make_folder(place.parent)
    write_whole(place, lambda beside: _write(beside, model, metadata, tensors))


def save_gguf_folder(
    path: str | Path,
    model: Model,
    *,
    tensor_type: str = "f16",
    temperature: float | None = None,
    card: str | None = None,
) -> None:
    """Write NAME.gguf into the folder NAME, with a Modelfile beside it, and a README.md of the text `card`.

    The folder appears when it is whole. One that holds a GGUF model is replaced; one that holds anything else, refused.
    `temperature` is what the model was trained at, and Ollama samples at.
    """
    name = Path(path).resolve().name
    metadata, tensors = _plan(model, tensor_type, name)

    def fill(stage: Path) -> None:
        _write(stage / f"{name}.gguf", model, metadata, tensors)
        write_modelfile(stage / MODELFILE, model.text, f"{name}.gguf", temperature=temperature)
        write_card(stage, card)

    replace_folder(path, fill, names=FOLDER_FILES, what="a GGUF model")


def check_tensor_type(tensor_type: str) -> None:
    """Raise `BadInput` for a type that is not written."""
    if tensor_type not in TENSOR_TYPES:
        raise BadInput(f"GGUF tensors are not written as {tensor_type!r}: choose one of {', '.join(TENSOR_TYPES)}")


def _is_gguf(place: Path) -> bool:
    if not place.is_file():
        return False
    with place.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


# What is written ----------------------------------------------------------------------------------------


def _plan(model: Model, tensor_type: str, name: str) -> tuple[dict[str, Any], list[_Tensor]]:
    """The metadata and the tensors of the file; `BadInput` for a model that GGUF or llama.cpp has no form for."""
    check_tensor_type(tensor_type)
    import_gguf()
    architecture = ARCHITECTURES.get(str(model.source.get("model_type")))
    if architecture is None:
        raise BadInput(
            f"a model of type {model.source.get('model_type')} has no name in GGUF: "
            f"choose a {', '.join(ARCHITECTURES)}, or export it as a folder"
        )
    if coded := [parameter for parameter, x in model.params.items() if isinstance(x, Quantised)]:
        raise BadInput(f"{coded[0]} is quantised, and is not written so: merge it, or take `dequantise_layers` of all")
    shapes = {parameter: shape_of(x, model.config) for parameter, x in parameters(model.config).items()}
    families.check_tensors("the parameters are not those of the model's config", model.params, shapes)
    if model.text is None:
        raise BadInput(
            "a model without a tokenizer can't be written as GGUF, which holds both: load it with its tokenizer"
        )
    _check_architecture(model, architecture)
    tensors = _list_tensors(model, tensor_type)
    size = sum(int(np.prod(tensor.shape)) for tensor in tensors)
    return {
        **to_metadata(model.source, model.config, _context_length(model, architecture)),
        "general.type": "model",
        "general.name": name,
        "general.size_label": f"{size / 1e9:.1f}B" if size >= 1e9 else f"{size / 1e6:.0f}M",
        "general.file_type": TENSOR_TYPES[tensor_type],
        "general.quantization_version": 2,
        **vocabulary(model.text, model.config.v),
    }, tensors


def _context_length(model: Model, architecture: str) -> int:
    """The longest context; of a mistral its window, for llama.cpp lets a llama see everything."""
    length = int(model.source.get("max_position_embeddings") or 2048)
    windows = [window for window in model.config.windows if window is not None]
    return min([length, *windows]) if architecture == "llama" else length


def _check_architecture(model: Model, name: str) -> None:
    """Raise `BadInput` for what llama.cpp computes otherwise, and no key says."""
    config = model.config
    for parameter in model.params:
        if parameter.endswith("bias") and name not in BIASES[parameter]:
            raise BadInput(f"llama.cpp adds no {parameter} in a {name}: export the model as a folder")
    if name in ("gemma", "gemma2") and not config.tied:
        raise BadInput(f"llama.cpp has no unembedding in a {name} but its embedding: export the model as a folder")
    wide = config.d / config.h if config.num_layers == LARGE_GEMMA.get(name) else config.e
    if config.query_scale is not None and abs(config.query_scale * wide**0.5 - 1) > 1e-6:
        raise BadInput(
            f"llama.cpp divides the queries of this {name} by the root of {wide:g}, and the model by that of "
            f"{config.query_scale**-2:g} (query_pre_attn_scalar): export it as a folder"
        )
    if name == "qwen2" and config.h * config.e != config.d:
        raise BadInput(
            f"heads of {config.e} numbers have no place in a qwen2 of GGUF: {config.d} / {config.h} belong there"
        )
    for rope, window in zip(config.ropes, config.windows, strict=True):
        if rope.kind == "yarn" and (not rope.truncate or abs(rope.magnitude - yarn_magnitude(rope.factor)) > 1e-6):
            raise BadInput(
                "llama.cpp derives the attention factor of yarn, and this model sets it: export it as a folder"
            )
        if rope.kind not in ("default", "linear", "yarn") and not (rope.kind == "llama3" and name == "llama"):
            raise BadInput(f"rotary positions of {rope.kind} have no form in a {name} of GGUF: export it as a folder")
        if name.startswith("gemma") and window is not None and rope.kind != "default":
            raise BadInput(f"llama.cpp doesn't stretch positions within a window of a {name}: export it as a folder")


def _list_tensors(model: Model, tensor_type: str) -> list[_Tensor]:
    """Layer by layer, then what there is once. Rows that blocks of 32 don't fill are f16, as llama.cpp has them."""
    declared, published = parameters(model.config), families.tensors_of(model.config)
    tensors = []
    for layer in [*range(model.config.num_layers), None]:
        for parameter, name in tensor_names(model.config).items():
            if declared[parameter].axes.startswith("n") == (layer is not None):
                shape = families.file_shape(published[parameter], model.config)
                stored = "f32" if len(shape) == 1 else tensor_type
                stored = "f16" if stored == "q8_0" and shape[-1] % 32 else stored
                tensors.append(_Tensor(name.format(n=layer), parameter, layer, shape, stored))
    factors = rope_factors(model.config)
    if factors is not None:
        tensors.append(_Tensor(ROPE_FACTORS, "", None, factors.shape, "f32"))
    return tensors


# The file -----------------------------------------------------------------------------------------------


def _write(path: Path, model: Model, metadata: dict[str, Any], tensors: list[_Tensor]) -> None:
    """Header, metadata, the table of tensors, then their values, each at a multiple of 32 bytes."""
    gguf = import_gguf()
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    types = {tensor.name: gguf.GGMLQuantizationType[tensor.stored.upper()] for tensor in tensors}
    try:
        for key, value in metadata.items():
            if key != "general.architecture":  # which the writer puts first
                _add(writer, key, value)
        for tensor in tensors:
            entries, size = gguf.GGML_QUANT_SIZES[types[tensor.name]]
            length = int(np.prod(tensor.shape)) // entries * size
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype("float32"), length, types[tensor.name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        (file,) = writer.fout
        for tensor, values in zip(tensors, _values(model, tensors), strict=True):
            writer.write_padding(file, file.tell())
            # By `write`, whose errors say what is wrong, such as a full disk; those of `tofile` don't.
            file.write(np.ascontiguousarray(gguf.quantize(values, types[tensor.name])).data)
        writer.write_padding(file, file.tell())
    finally:
        writer.close()


def _values(model: Model, tensors: list[_Tensor]) -> Iterator[np.ndarray]:
    """Each tensor in float32, rows first; `BadInput` for a number that its type can't hold."""
    architecture = ARCHITECTURES[str(model.source["model_type"])]
    for tensor in tensors:
        if tensor.name == ROPE_FACTORS:
            yield np.asarray(rope_factors(model.config))
            continue
        value = model.params[tensor.parameter]
        if tensor.layer is not None:  # a traced index, so that one program serves all layers
            value = jax.lax.dynamic_index_in_dim(value, jnp.int32(tensor.layer), keepdims=False)
        axes = parameters(model.config)[tensor.parameter].axes.removeprefix("n")
        published = families.tensors_of(model.config)[tensor.parameter]
        array = families.to_file(np.asarray(value).astype(np.float32), published, axes, model.config)
        check_finite(array, f"parameter {tensor.parameter}")
        if np.abs(array).max(initial=0.0) > LARGEST.get(tensor.stored, np.inf):
            raise BadInput(
                f"parameter {tensor.parameter} holds numbers too large for {tensor.stored}: choose bf16 or f32"
            )
        yield to_gguf(array, tensor.parameter, model.config, architecture)


def _add(writer: Any, key: str, value: Any) -> None:
    """One entry of the metadata, in the type that llama.cpp reads."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
