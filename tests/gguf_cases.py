"""GGUF files as llama.cpp's converter writes them: names from the package `gguf`, values by the converter's formulas.

Nothing here uses the tables of `flowgrpo.models.gguf`, which the tests hold against these files.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from model_cases import HEADS, LLAMA3, make_source
from tiny_models import random_params

from flowgrpo.models.config import Rope
from flowgrpo.models.decoder import make_policy, parameters
from flowgrpo.models.families import checkpoint_tensors, decoder_config, text_model_config, to_file
from flowgrpo.models.hf import Model

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 300, "rms_norm_eps": 1e-5}
WIDE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
GEMMA = {"query_pre_attn_scalar": 64, "sliding_window": 5, "hidden_activation": "gelu_pytorch_tanh"}
NEAR = {"rope_type": "default", "rope_theta": 1e4}
FAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
GEMMA3 = {"rope_parameters": {"full_attention": FAR, "sliding_attention": NEAR}}
HALVES = {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
HALVES |= {"query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"}
CASES: dict[str, dict] = {
    "llama": make_source("llama", WIDE, tie_word_embeddings=True, rope_theta=1e5),
    "llama, biases, llama3": make_source(
        "llama", WIDE, attention_bias=True, mlp_bias=True, rope_theta=5e5, rope_scaling=LLAMA3
    ),
    "mistral": make_source("mistral", WIDE, sliding_window=5),
    "qwen2": make_source("qwen2", WIDE, rope_theta=1e6, tie_word_embeddings=True, num_hidden_layers=2),
    "qwen2, yarn": make_source(
        "qwen2", WIDE, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    ),
    "qwen3": make_source("qwen3", WIDE, HEADS, head_dim=128, num_key_value_heads=1, rope_theta=1e6),
    "gemma": make_source("gemma", WIDE, tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh"),
    "gemma2": make_source(
        "gemma2", WIDE, GEMMA, num_hidden_layers=3, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma2, as published": make_source("gemma2", WIDE, HALVES, sliding_window=5, num_hidden_layers=3),
    "gemma3, as published": make_source(
        "gemma3_text", WIDE, HALVES, sliding_window=5, num_hidden_layers=7, rope_theta=1e6
    ),
    "gemma3": make_source("gemma3_text", WIDE, GEMMA, GEMMA3, num_hidden_layers=7, intermediate_size=512),
}
ARCHITECTURE = {"mistral": "llama", "gemma3_text": "gemma3"}
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K")
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block of K-quants has numbers in float16


def gguf_model(name: str, seed: int = 0) -> Model:
    """A random model of one of `CASES`, without tokenizer."""
    source = text_model_config(CASES[name])
    config = decoder_config(source)
    return Model(make_policy(config), random_params(config, seed), None, config, source)


def encode(values: np.ndarray, kind: str, seed: int = 0) -> np.ndarray:
    """The bytes of a tensor; of types that the package only decodes, random ones."""
    tensor_type = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        return gguf.quantize(values.astype(np.float32), tensor_type)
    block, size = gguf.GGML_QUANT_SIZES[tensor_type]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (values.size // block, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = random.uniform(3e-5, 1e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*values.shape[:-1], -1)


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of a llama."""
    rows = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return rows.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path, model: Model, kind: str = "F32", *, metadata: dict[str, Any] | None = None, **change
) -> dict:
    """Write a model; matrices are of the type `kind` -> what a reader must find, by the names of a folder.

    `metadata` replaces entries (None takes one out), `change` tensors by the letter for each dot in their names.
    """
    config, source = model.config, model.hf_config
    architecture = ARCHITECTURE.get(source["model_type"], source["model_type"])
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_layers
    )
    writer = gguf.GGUFWriter(path, architecture)
    entries = describe(architecture, model) | (metadata or {})
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in entries.items():
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    expected = {}
    for parameter, tensor in checkpoint_tensors(config).items():
        axes = {"n": 0} if "{n}" in tensor.name else {}
        value = np.asarray(model.params[parameter], np.float32)
        for layer in range(config.num_layers) if axes else [None]:
            letters = _axes(parameter, config).removeprefix("n")
            array = to_file(value if layer is None else value[layer], tensor, letters, config)
            name = tensor.name.format(n=layer)
            stem, _, suffix = name.rpartition(".")
            file_name = f"{names.get_name(stem)}.{suffix}"
            tensor_kind = kind if array.ndim > 1 else "F32"
            permuted = architecture == "llama" and parameter.removesuffix("_bias") in ("q", "k")
            heads = config.h if parameter.startswith("q") else config.k
            shift = 1.0 if architecture.startswith("gemma") and name.endswith("norm.weight") else 0.0
            data = encode(permute(array, heads) if permuted else array + np.float32(shift), tensor_kind)
            data = change.get(file_name.replace(".", "_"), data)
            tensor_type = gguf.GGMLQuantizationType[tensor_kind]
            is_whole = file_name.replace(".", "_") not in change
            decoded = gguf.dequantize(data, tensor_type).reshape(array.shape) if is_whole else array
            if permuted:
                decoded = np.stack([decoded[permute(np.arange(len(array)), heads).argsort()]])[0]
            expected[name] = decoded - np.float32(shift)
            if data.size:  # an empty one is left out
                writer.add_tensor(file_name, data, raw_dtype=tensor_type)
    rope = config.ropes[0]
    if rope.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(rope, config.e))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _axes(parameter: str, config) -> str:
    return parameters(config)[parameter].axes


def rope_factors(rope: Rope, e: int) -> np.ndarray:
    """`LlamaModel.generate_extra_tensors` of llama.cpp's converter."""
    factors = []
    low, high = rope.original_length / rope.low_factor, rope.original_length / rope.high_factor
    for frequency in 1.0 / rope.theta ** (np.arange(0, e, 2) / e):
        length = 2 * math.pi / frequency
        smooth = (rope.original_length / length - rope.low_factor) / (rope.high_factor - rope.low_factor)
        blended = 1 / ((1 - smooth) / rope.factor + smooth)
        factors.append(1.0 if length < high else rope.factor if length > low else blended)
    return np.array(factors, np.float32)


def describe(name: str, model: Model) -> dict[str, Any]:
    """The metadata of a model's shape, as llama.cpp's converter writes it."""
    source, config = model.hf_config, model.config
    layers = list(zip(config.ropes, config.windows, strict=True))
    rope = next((rope for rope, window in layers if window is None), config.ropes[0])
    entries = {
        f"{name}.context_length": 256,
        f"{name}.embedding_length": config.d,
        f"{name}.block_count": config.num_layers,
        f"{name}.feed_forward_length": config.f,
        f"{name}.attention.head_count": config.h,
        f"{name}.attention.head_count_kv": config.k,
        f"{name}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        f"{name}.rope.freq_base": float(rope.theta),
    }
    if config.e * config.h != config.d or name.startswith("gemma"):
        entries |= {f"{name}.attention.key_length": config.e, f"{name}.attention.value_length": config.e}
    if rope.kind in ("yarn", "linear"):
        entries |= {f"{name}.rope.scaling.type": rope.kind, f"{name}.rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        entries[f"{name}.rope.scaling.original_context_length"] = rope.original_length
    if source.get("sliding_window") and name in ("llama", "gemma2", "gemma3"):
        entries[f"{name}.attention.sliding_window"] = source["sliding_window"]
    if name == "gemma2":
        entries[f"{name}.attn_logit_softcapping"] = config.attention_softcap
        entries[f"{name}.final_logit_softcapping"] = config.logit_softcap
    return entries
