"""Conversion between GGUF, the format of llama.cpp, and the contents of a Hugging Face folder.

    metadata     <-> config.json       from_metadata, to_metadata
    tensor names <-> tensor names      tensor_names
    values       <-> values            from_gguf, to_gguf

Values differ in two places. llama.cpp rotates neighbours (2 i, 2 i + 1) of a llama's heads, and Hugging Face rotates
(i, i + e / 2), so the rows of q and k are in another order; and Gemma's norms are stored as the factor, 1 + w. `hf`
reads a file through `read_gguf_config` and `find_tensors`, as if it were a folder.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.data.gguf_file import GGUFFile, GGUFTensor
from flowgrpo.models import families
from flowgrpo.models.config import DecoderConfig, Rope, rope_frequencies
from flowgrpo.models.decoder import parameters
from flowgrpo.types import BadInput

Metadata = Mapping[str, Any]

MODEL_TYPES: Mapping[str, str] = {  # general.architecture -> model_type
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
ARCHITECTURES: Mapping[str, str] = {kind: name for name, kind in MODEL_TYPES.items()} | {"mistral": "llama"}
PERMUTED = frozenset(("q", "k", "q_bias", "k_bias"))  # parameters of a llama whose rows are in another order
ROPE_FACTORS = "rope_freqs.weight"  # divisor of the angle of each pair of dimensions: Llama 3's rule

_LAYER = "blk.{n}."
NAMES: Mapping[str, str] = {  # parameter -> tensor
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "unembed": "output.weight",
    "attention_norm": _LAYER + "attn_norm.weight",
    "attention_post_norm": _LAYER + "post_attention_norm.weight",
    "ffn_norm": _LAYER + "ffn_norm.weight",
    "ffn_post_norm": _LAYER + "post_ffw_norm.weight",
    "q": _LAYER + "attn_q.weight",
    "k": _LAYER + "attn_k.weight",
    "v": _LAYER + "attn_v.weight",
    "o": _LAYER + "attn_output.weight",
    "q_bias": _LAYER + "attn_q.bias",
    "k_bias": _LAYER + "attn_k.bias",
    "v_bias": _LAYER + "attn_v.bias",
    "o_bias": _LAYER + "attn_output.bias",
    "q_norm": _LAYER + "attn_q_norm.weight",
    "k_norm": _LAYER + "attn_k_norm.weight",
    "gate": _LAYER + "ffn_gate.weight",
    "up": _LAYER + "ffn_up.weight",
    "down": _LAYER + "ffn_down.weight",
    "gate_bias": _LAYER + "ffn_gate.bias",
    "up_bias": _LAYER + "ffn_up.bias",
    "down_bias": _LAYER + "ffn_down.bias",
}


def tensor_names(config: DecoderConfig) -> dict[str, str]:
    """The name of each parameter's tensor in GGUF; `{n}` in it is the layer."""
    return {name: NAMES[name] for name in parameters(config)}


# Reading ------------------------------------------------------------------------------------------------


class FileTensor(NamedTuple):
    """A tensor of a GGUF file, read as a Hugging Face folder would hold it."""

    tensor: GGUFTensor
    parameter: str
    config: DecoderConfig
    architecture: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, rows first."""
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        """Dtype that `read` returns, as safetensors names it."""
        return "F32"

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read the tensor, or entries `start` to `stop` of its first axis; raises `BadInput` for NaN and infinity."""
        if self.architecture == "llama" and self.parameter in PERMUTED:  # any of its rows may come from all over a head
            return from_gguf(self.tensor.read(), self.parameter, self.config, self.architecture)[start:stop]
        return from_gguf(self.tensor.read(start, stop), self.parameter, self.config, self.architecture)


def read_gguf_config(file: GGUFFile) -> families.ConfigJSON:
    """The config.json that corresponds to a GGUF file's metadata."""
    factors = file.tensors.get(ROPE_FACTORS)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    try:
        return from_metadata(file.metadata, shapes, None if factors is None else factors.read())
    except BadInput as error:
        raise BadInput(f"{file.path}: {error}") from None


def find_tensors(file: GGUFFile, config: DecoderConfig) -> dict[str, FileTensor]:
    """Every tensor by its name in a Hugging Face folder; raises `BadInput` unless they are those of this shape."""
    architecture = str(file.metadata.get("general.architecture"))
    in_folder, names = families.checkpoint_tensors(config), tensor_names(config)
    slots = {}
    for parameter, name in names.items():
        layers = range(config.num_layers) if "{n}" in name else [None]
        slots |= {name.format(n=layer): (parameter, layer) for layer in layers}
    expected = {name: families.file_shape(in_folder[parameter], config) for name, (parameter, _) in slots.items()}
    families.check_tensors(
        f"the tensors in {file.path} are not those of its metadata", file.tensors, expected, spare=[ROPE_FACTORS]
    )
    return {
        in_folder[parameter].name.format(n=layer): FileTensor(file.tensors[name], parameter, config, architecture)
        for name, (parameter, layer) in slots.items()
    }


# Values -------------------------------------------------------------------------------------------------


def is_shifted(parameter: str, config: DecoderConfig) -> bool:
    """Whether the tensor is stored as 1 + w: the norms of Gemma."""
    return bool(config.norm_offset) and parameter.endswith("norm")


def from_gguf(array: np.ndarray, parameter: str, config: DecoderConfig, architecture: str) -> np.ndarray:
    """A whole tensor, dequantised, as it is in a Hugging Face file."""
    if is_shifted(parameter, config):
        return array - np.asarray(config.norm_offset, array.dtype)
    if architecture == "llama" and parameter in PERMUTED:
        return array.reshape(-1, config.e // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array


def to_gguf(array: np.ndarray, parameter: str, config: DecoderConfig, architecture: str) -> np.ndarray:
    """The inverse of `from_gguf`; norms that are stored as 1 + w must be given in float32."""
    if is_shifted(parameter, config):
        return array + np.asarray(config.norm_offset, array.dtype)
    if architecture == "llama" and parameter in PERMUTED:
        return array.reshape(-1, 2, config.e // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array


# config.json --------------------------------------------------------------------------------------------


def from_metadata(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], factors: np.ndarray | None = None
) -> families.ConfigJSON:
    """The config.json of a file, from its metadata, the shapes of its tensors (rows first) and its rope factors."""
    name = str(metadata.get("general.architecture"))  # the prefix of its keys
    if name not in MODEL_TYPES:
        raise BadInput(
            f"general.architecture is {name!r}, which is not supported; supported are {', '.join(MODEL_TYPES)}"
        )

    def field(key: str, *default: Any) -> Any:
        value = metadata.get(f"{name}.{key}", *default)
        if value is None and not default:
            raise BadInput(f"{name}.{key} is missing in its metadata: convert the model again")
        return value

    d, heads, layers = field("embedding_length"), field("attention.head_count"), field("block_count")
    e = field("attention.key_length", None)
    if not e:
        if not isinstance(heads, int) or not isinstance(d, int) or heads < 1 or d % heads:
            raise BadInput(
                f"{name}.attention.head_count is {heads!r}, which does not divide {name}.embedding_length {d!r}"
            )
        e = d // heads
    source: families.ConfigJSON = {
        "model_type": MODEL_TYPES[name],
        "vocab_size": shapes.get(NAMES["embed"], (field("vocab_size", None),))[0],
        "hidden_size": d,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": e,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": NAMES["unembed"] not in shapes,
    }
    for key, gguf_key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{gguf_key}_token_id")) is not None:
            source[key] = token_id
    if source["vocab_size"] is None:
        raise BadInput(f"{NAMES['embed']} is missing among its tensors: convert the model again")
    if field("attention.value_length", e) != e:
        raise BadInput(
            f"{name}.attention.value_length is {field('attention.value_length')}, but its keys have {e} numbers"
        )
    for key in ("expert_count", "expert_used_count"):
        if field(key, None):
            raise BadInput(f"{name}.{key} is {field(key)}: a mixture of experts is not supported")
    rope = _rope_source(metadata, name, source, factors)
    if name in ("llama", "qwen3"):
        source["attention_bias"] = NAMES["q_bias"].format(n=0) in shapes
    if name == "llama":
        source["mlp_bias"] = NAMES["gate_bias"].format(n=0) in shapes
    if name.startswith("gemma"):
        source["hidden_activation"] = "gelu_pytorch_tanh"
    window = field("attention.sliding_window", None)
    if name in ("gemma2", "gemma3"):
        is_27b = (name, layers) in ((("gemma2", 46)), ("gemma3", 62))  # whose query scale is in no key
        source["query_pre_attn_scalar"] = d / heads if is_27b else e
        source["sliding_window"] = window
        source["layer_types"] = _layer_types(
            field("attention.sliding_window_pattern", 2 if name == "gemma2" else 6), layers
        )
        source["final_logit_softcapping"] = field("final_logit_softcapping", 30.0 if name == "gemma2" else None)
        source["attn_logit_softcapping"] = field("attn_logit_softcapping", 50.0 if name == "gemma2" else None)
    elif window and name == "llama":
        source["model_type"], source["sliding_window"] = "mistral", window
    if name == "gemma3":
        sliding_rope = {"rope_type": "default", "rope_theta": field("rope.freq_base_swa", 10000.0)}
        source["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding_rope}
    else:
        source["rope_parameters"] = rope
    return source


def to_metadata(source: Mapping[str, Any], config: DecoderConfig, context_length: int) -> dict[str, Any]:
    """The metadata of a model's shape that llama.cpp reads: integers are uint32 there, other numbers float32.

    `general.architecture` comes first. The file also needs the tensor `rope_factors`, unless that is None.
    """
    model_type = str(source.get("model_type"))
    name = ARCHITECTURES[model_type]
    windows, ropes = {window for window in config.windows if window is not None}, set(config.ropes)
    layers = list(zip(config.ropes, config.windows, strict=True))
    full_rope = next((rope for rope, window in layers if window is None), config.ropes[0])
    metadata: dict[str, Any] = {
        "general.architecture": name,
        f"{name}.vocab_size": config.v,
        f"{name}.context_length": context_length,
        f"{name}.embedding_length": config.d,
        f"{name}.block_count": config.num_layers,
        f"{name}.feed_forward_length": config.f,
        f"{name}.attention.head_count": config.h,
        f"{name}.attention.head_count_kv": config.k,
        f"{name}.attention.key_length": config.e,
        f"{name}.attention.value_length": config.e,
        f"{name}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        f"{name}.rope.dimension_count": config.e,
        f"{name}.rope.freq_base": float(full_rope.theta),
    }
    if full_rope.kind in ("linear", "yarn"):
        metadata[f"{name}.rope.scaling.type"] = full_rope.kind
        metadata[f"{name}.rope.scaling.factor"] = float(full_rope.factor)
    if full_rope.kind == "yarn":
        metadata[f"{name}.rope.scaling.original_context_length"] = full_rope.original_length
        metadata[f"{name}.rope.scaling.yarn_beta_fast"] = float(full_rope.beta_fast)
        metadata[f"{name}.rope.scaling.yarn_beta_slow"] = float(full_rope.beta_slow)
    if windows:
        if len(windows) > 1:
            raise BadInput(
                f"layers with windows of {sorted(windows)} tokens have no form in GGUF, which has one window"
            )
        metadata[f"{name}.attention.sliding_window"] = next(iter(windows))
    if name in ("gemma2", "gemma3"):
        pattern = 2 if name == "gemma2" else 6
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        if kinds != _layer_types(pattern, config.num_layers):
            raise BadInput(
                f"llama.cpp lets every layer but each {pattern}th of {name} see a window, and this model doesn't"
            )
        metadata[f"{name}.attention.sliding_window_pattern"] = pattern
    elif len(ropes) > 1 or (windows and model_type != "mistral"):
        raise BadInput(f"{name} has one kind of layer in GGUF, and this model has several")
    if name == "gemma3":
        sliding_rope = next((rope for rope, window in layers if window), None)
        if sliding_rope is not None:
            metadata[f"{name}.rope.freq_base_swa"] = float(sliding_rope.theta)
    if config.attention_softcap:
        metadata[f"{name}.attn_logit_softcapping"] = float(config.attention_softcap)
    if config.logit_softcap:
        metadata[f"{name}.final_logit_softcapping"] = float(config.logit_softcap)
    return metadata


def _layer_types(pattern: int | Collection[bool], layers: int) -> list[str]:
    """The type of each layer: every `pattern`th has full attention; or a list that is true for sliding layers."""
    if isinstance(pattern, int):
        is_sliding = [bool(pattern) and (i + 1) % pattern != 0 for i in range(layers)]
    else:
        is_sliding = list(pattern)
    return ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]


# Rotary positions ---------------------------------------------------------------------------------------


def _rope_source(
    metadata: Metadata, name: str, source: families.ConfigJSON, factors: np.ndarray | None
) -> dict[str, Any]:
    """`rope_parameters` of the layers with full attention."""

    def field(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.rope.{key}", default)

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": field("freq_base", 10000.0)}
    kind, e = field("scaling.type", "none"), source["head_dim"]
    if field("dimension_count", e) != e:
        raise BadInput(
            f"{name}.rope.dimension_count is {field('dimension_count')}, but the decoder rotates whole heads, of {e}"
        )
    if factors is not None:
        return rope | {"rope_type": "llama3"} | fit_llama3(factors, rope["rope_theta"], e)
    if kind == "linear" or (kind == "none" and field("scale_linear", 1.0) != 1.0):
        return rope | {"rope_type": "linear", "factor": field("scaling.factor", field("scale_linear"))}
    if kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": field("scaling.factor")}
        rope["original_max_position_embeddings"] = field("scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if (value := field(f"scaling.yarn_{key}")) is not None:
                rope[key] = value
        return rope
    if kind != "none":
        raise BadInput(
            f"{name}.rope.scaling.type is {kind!r}, which is not supported; supported are none, linear, yarn"
        )
    return rope


def rope_factors(config: DecoderConfig) -> np.ndarray | None:
    """Divisor of the angle of each pair by Llama 3's rule, in float32, for `ROPE_FACTORS`; None for another rule."""
    rope = config.ropes[0]
    if rope.kind != "llama3":
        return None
    plain = Rope(theta=rope.theta)
    return (rope_frequencies(plain, config.e).astype(np.float64) / rope_frequencies(rope, config.e)).astype(np.float32)


def fit_llama3(factors: np.ndarray, theta: float, e: int) -> dict[str, Any]:
    """Settings of Llama 3's rule that give these factors; the published settings if they do.

    The angle of a pair that turns `t` times over the original length is divided by 1 / (b + (1 - b) / factor), with
    b = (t - low) / (high - low) clipped to 0..1: a line in t, which two factors between the ends fix, up to `low`.
    """
    factors = np.asarray(factors, np.float64)
    factor = float(np.float32(factors.max()))
    turns_per_token = theta ** -(np.arange(0, e, 2) / e) / (2 * math.pi)

    def gives_factors(low: float, high: float, length: int) -> bool:
        rope = Rope(theta=theta, kind="llama3", factor=factor, original_length=length, low_factor=low, high_factor=high)
        plain = rope_frequencies(Rope(theta=theta), e).astype(np.float64)
        return bool(np.allclose(plain / rope_frequencies(rope, e), factors, rtol=1e-5))

    if factors.shape == (e // 2,) and np.isfinite(factors).all() and factors.min() > 0:
        with np.errstate(all="ignore"):
            blend = (1 / factors - 1 / factor) / (1 - 1 / factor)
        between = np.flatnonzero((blend > 1e-4) & (blend < 1 - 1e-4))
        candidates = [(1.0, 4.0, 8192)]
        if between.size >= 2:
            slope, start = np.polyfit(turns_per_token[between], blend[between], 1)
            candidates.append((1.0, round(1.0 - 1.0 / float(start), 5), round(float(-slope / start))))
        elif between.size == 1:
            turns, b = turns_per_token[between[0]], blend[between[0]]
            candidates += [
                (1.0, high, round(float((1.0 + (high - 1.0) * b) / turns))) for high in (4.0, 2.0, 1.5, 1.25)
            ]
        elif (blend > 0.5).any():
            candidates.append((1.0, 4.0, math.ceil(4.0 / turns_per_token[blend > 0.5].min())))
        for low, high, length in candidates:
            if high > low and length > 0 and gives_factors(low, high, length):
                values = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
                return values | {"original_max_position_embeddings": length}
    raise BadInput(f"{ROPE_FACTORS} does not follow the rule of Llama 3, the only one that is read there")
