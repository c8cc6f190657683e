"""Write a model as GGUF, which llama.cpp and Ollama open.

    save_gguf("planner.gguf", model)                                 one file, matrices in float16
    save_gguf_folder("planner", model, tensor_type="q8_0")           planner.gguf, and a Modelfile for `ollama create`

Metadata, names and values come from `models.gguf`, the vocabulary from `data.gguf_vocabulary`. Norms, biases and all
other tensors of one axis stay float32, in which llama.cpp computes with them. Each tensor is converted when it is
written, so the host holds one at a time. Needs the package gguf.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.data.gguf_file import MAGIC, import_gguf
from flowgrpo.data.gguf_vocabulary import tokenizer_metadata
from flowgrpo.data.modelfile import write_modelfile
from flowgrpo.files import make_folder, replace_folder, write_atomic
from flowgrpo.models import families
from flowgrpo.models.config import yarn_magnitude
from flowgrpo.models.decoder import parameters, shape_of
from flowgrpo.models.gguf import ARCHITECTURES, ROPE_FACTORS, rope_factors, tensor_names, to_gguf, to_metadata
from flowgrpo.models.hf import CARD, Model, check_finite, write_card
from flowgrpo.models.quantised import Quantised
from flowgrpo.types import BadInput

TENSOR_TYPES = {"f16": 1, "bf16": 32, "f32": 0, "q8_0": 7}  # of matrices -> general.file_type
MODELFILE = "Modelfile"
FOLDER_FILES = ("*.gguf", MODELFILE, CARD)  # of a folder that `save_gguf_folder` may replace
LARGEST = {"f16": 65504.0, "q8_0": 127 * 65504.0}  # representable numbers; a block of q8_0 has a scale in float16
BIASES = {"o_bias": ("llama",), "gate_bias": ("llama",), "up_bias": ("llama",), "down_bias": ("llama",)}
BIASES |= dict.fromkeys(("q_bias", "k_bias", "v_bias"), ("llama", "qwen2", "qwen3"))  # architectures that add each bias
LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, by which llama.cpp infers its query scale


class _Tensor(NamedTuple):
    """A tensor of the file: the parameter and layer that it holds, and the type that it is stored in."""

    name: str
    parameter: str
    layer: int | None
    shape: tuple[int, ...]
    tensor_type: str  # one of TENSOR_TYPES


def save_gguf(path: str | Path, model: Model, *, tensor_type: str = "f16", name: str | None = None) -> None:
    """Write one file, which appears only once it is complete; an existing GGUF file is replaced, anything else refused.

    `tensor_type` is the type of matrices: f16, bf16, f32, or q8_0 (8 bits, and a scale for each 32 entries). `name` is
    what a server lists the model as, by default that of the file.
    """
    file = Path(path)
    if file.exists() and not (file.is_file() and _starts_as_gguf(file)):
        raise BadInput(f"{path} is there and is no GGUF file: name a new file, such as {file.with_suffix('')}-new.gguf")
    model = model.merged()
    metadata, tensors = _plan_file(model, tensor_type, name or file.stem)
    make_folder(file.parent)
    write_atomic(file, lambda temporary: _write_file(temporary, model, metadata, tensors))


def save_gguf_folder(
    path: str | Path,
    model: Model,
    *,
    tensor_type: str = "f16",
    temperature: float | None = None,
    card: str | None = None,
) -> None:
    """Write a folder NAME with NAME.gguf, a Modelfile, and a README.md with the text `card`.

    The folder appears only once it is complete. An existing GGUF model is replaced; a folder with anything else is
    refused. `temperature` is the one that the model was trained at, and that Ollama samples at.
    """
    name, model = Path(path).resolve().name, model.merged()
    metadata, tensors = _plan_file(model, tensor_type, name)

    def fill(stage: Path) -> None:
        _write_file(stage / f"{name}.gguf", model, metadata, tensors)
        write_modelfile(stage / MODELFILE, model.tokenizer, f"{name}.gguf", temperature=temperature)
        write_card(stage, card)

    replace_folder(path, fill, names=FOLDER_FILES, kind="a GGUF model")


def check_tensor_type(tensor_type: str) -> None:
    """Raise `BadInput` for a type that `save_gguf` does not write."""
    if tensor_type not in TENSOR_TYPES:
        raise BadInput(f"GGUF tensors are not written as {tensor_type!r}: choose one of {', '.join(TENSOR_TYPES)}")


def _starts_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


# The plan ----------------------------------------------------------------------------------------


def _plan_file(model: Model, tensor_type: str, name: str) -> tuple[dict[str, Any], list[_Tensor]]:
    """Metadata and tensors of the file; raises `BadInput` for a model that GGUF or llama.cpp can't represent."""
    check_tensor_type(tensor_type)
    import_gguf()
    architecture = ARCHITECTURES.get(str(model.hf_config.get("model_type")))
    if architecture is None:
        raise BadInput(
            f"a model of type {model.hf_config.get('model_type')} has no name in GGUF: "
            f"choose a {', '.join(ARCHITECTURES)}, or export it as a folder"
        )
    if quantised := [parameter for parameter, x in model.params.items() if isinstance(x, Quantised)]:
        raise BadInput(
            f"{quantised[0]} is quantised, and is not written so: merge it, or take `dequantise_layers` of all"
        )
    shapes = {parameter: shape_of(x, model.config) for parameter, x in parameters(model.config).items()}
    families.check_tensors("the parameters are not those of the model's config", model.params, shapes)
    if model.tokenizer is None:
        raise BadInput(
            "a model without a tokenizer can't be written as GGUF, which holds both: load it with its tokenizer"
        )
    _check_architecture(model, architecture)
    tensors = _list_tensors(model, tensor_type)
    size = sum(int(np.prod(tensor.shape)) for tensor in tensors)
    return {
        **to_metadata(model.hf_config, model.config, _context_length(model, architecture)),
        "general.type": "model",
        "general.name": name,
        "general.size_label": f"{size / 1e9:.1f}B" if size >= 1e9 else f"{size / 1e6:.0f}M",
        "general.file_type": TENSOR_TYPES[tensor_type],
        "general.quantization_version": 2,
        **tokenizer_metadata(model.tokenizer, model.config.v),
    }, tensors


def _context_length(model: Model, architecture: str) -> int:
    """The longest context; for a mistral its window, since llama.cpp runs it as a llama, with full attention."""
    length = int(model.hf_config.get("max_position_embeddings") or 2048)
    windows = [window for window in model.config.windows if window is not None]
    return min([length, *windows]) if architecture == "llama" else length


def _check_architecture(model: Model, name: str) -> None:
    """Raise `BadInput` for what llama.cpp computes differently, and no metadata key can change."""
    config = model.config
    for parameter in model.params:
        if parameter.endswith("bias") and name not in BIASES[parameter]:
            raise BadInput(f"llama.cpp adds no {parameter} in a {name}: export the model as a folder")
    if name in ("gemma", "gemma2") and not config.tied:
        raise BadInput(f"llama.cpp has no unembedding in a {name} but its embedding: export the model as a folder")
    divisor = config.d / config.h if config.num_layers == LARGE_GEMMA.get(name) else config.e
    if config.query_scale is not None and abs(config.query_scale * divisor**0.5 - 1) > 1e-6:
        raise BadInput(
            f"llama.cpp divides the queries of this {name} by the root of {divisor:g}, and the model by that of "
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
    """Tensors of the file: layer by layer, then those outside layers. Rows that are no multiple of 32 are f16."""
    declared, published = parameters(model.config), families.checkpoint_tensors(model.config)
    tensors = []
    for layer in [*range(model.config.num_layers), None]:
        for parameter, name in tensor_names(model.config).items():
            if declared[parameter].axes.startswith("n") == (layer is not None):
                shape = families.file_shape(published[parameter], model.config)
                stored_as = "f32" if len(shape) == 1 else tensor_type
                stored_as = "f16" if stored_as == "q8_0" and shape[-1] % 32 else stored_as
                tensors.append(_Tensor(name.format(n=layer), parameter, layer, shape, stored_as))
    factors = rope_factors(model.config)
    if factors is not None:
        tensors.append(_Tensor(ROPE_FACTORS, "", None, factors.shape, "f32"))
    return tensors


# The file -----------------------------------------------------------------------------------------------


def _write_file(path: Path, model: Model, metadata: dict[str, Any], tensors: list[_Tensor]) -> None:
    """Write header, metadata, the table of tensors, then their values, each at a multiple of 32 bytes."""
    gguf = import_gguf()
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    types = {tensor.name: gguf.GGMLQuantizationType[tensor.tensor_type.upper()] for tensor in tensors}
    try:
        for key, value in metadata.items():
            if key == "general.architecture":  # the writer adds it by itself
                continue
            # In the types that llama.cpp reads.
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
            # By `write`, whose errors name the cause, such as a full disk; those of `tofile` don't.
            file.write(np.ascontiguousarray(gguf.quantize(values, types[tensor.name])).data)
        writer.write_padding(file, file.tell())
    finally:
        writer.close()


def _values(model: Model, tensors: list[_Tensor]) -> Iterator[np.ndarray]:
    """Each tensor in float32, rows first; raises `BadInput` for a number that its type can't represent."""
    architecture = ARCHITECTURES[str(model.hf_config["model_type"])]
    for tensor in tensors:
        if tensor.name == ROPE_FACTORS:
            yield np.asarray(rope_factors(model.config))
            continue
        value = model.params[tensor.parameter]
        if tensor.layer is not None:  # by a traced index, so that all layers share one program
            value = jax.lax.dynamic_index_in_dim(value, jnp.int32(tensor.layer), keepdims=False)
        axes = parameters(model.config)[tensor.parameter].axes.removeprefix("n")
        published = families.checkpoint_tensors(model.config)[tensor.parameter]
        array = families.to_file(np.asarray(value).astype(np.float32), published, axes, model.config)
        check_finite(array, f"parameter {tensor.parameter}")
        if np.abs(array).max(initial=0.0) > LARGEST.get(tensor.tensor_type, np.inf):
            raise BadInput(
                f"parameter {tensor.parameter} holds numbers too large for {tensor.tensor_type}: choose bf16 or f32"
            )
        yield to_gguf(array, tensor.parameter, model.config, architecture)
