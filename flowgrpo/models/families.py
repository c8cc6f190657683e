"""The model families: config.json -> `DecoderConfig`, and the names of tensors in published checkpoints.

transformers' config classes fill in the defaults of a family and normalise old and new fields for rotary positions;
what a family computes differently is one small function each. `TENSORS` maps our parameters to the names and axes in
the files, for reading and for writing.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.models.config import DecoderConfig, Rope, check_config, yarn_magnitude
from flowgrpo.models.decoder import parameters
from flowgrpo.types import JSON, BadInput, first_line

ConfigJSON = dict[str, JSON]  # the object in a config.json
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # our name -> name in safetensors
MAX_LISTED = 10  # faults of a checkpoint that an error lists


# What a family computes differently -------------------------------------------------------------------


class Family(NamedTuple):
    """One model family of transformers."""

    architecture: str  # its class in transformers
    settings: Callable[[Any], dict[str, Any]]  # transformers' config -> fields of `DecoderConfig`


def _biased(config) -> dict[str, Any]:
    return {"qkv_bias": config.attention_bias, "o_bias": config.attention_bias}


def _gemma(config) -> dict[str, Any]:
    return _biased(config) | {"norm_offset": 1.0, "embed_scale": config.hidden_size**0.5}


def _gemma2(config) -> dict[str, Any]:
    return _gemma(config) | {
        "sandwich_norms": True,
        "query_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
    }


FAMILIES: Mapping[str, Family] = {  # by model_type
    "qwen2": Family("Qwen2ForCausalLM", lambda _: {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", lambda config: _biased(config) | {"qk_norm": True}),
    "llama": Family("LlamaForCausalLM", lambda config: _biased(config) | {"ffn_bias": config.mlp_bias}),
    "mistral": Family("MistralForCausalLM", lambda _: {}),
    "gemma": Family("GemmaForCausalLM", _gemma),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2),
    # transformers reads attn_logit_softcapping for this family too, but never applies it.
    "gemma3_text": Family(
        "Gemma3ForCausalLM", lambda config: _gemma2(config) | {"qk_norm": True, "attention_softcap": None}
    ),
}
MULTIMODAL = {"Gemma3ForConditionalGeneration": "gemma3_text"}  # only their text model is read
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


# config.json -> DecoderConfig -------------------------------------------------------------------------


def text_model_config(raw: Mapping[str, JSON], location: str = "config.json") -> ConfigJSON:
    """The config of the text model, checked to be of a supported family; of a multimodal model that of its text part.

    `location` names the config in errors.
    """
    source = copy.deepcopy(dict(raw))
    architectures = source.get("architectures") or [None]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(architecture, str | None):
        raise BadInput(f"{location}: architectures is {architectures!r:.80}, but must be a list of one name")
    if not isinstance(source.get("text_config", {}), dict):
        raise BadInput(f"{location}: text_config is {source['text_config']!r:.80}, but must be an object")
    if architecture in MULTIMODAL:
        outer = {key: source[key] for key in ("dtype", "torch_dtype", "eos_token_id") if key in source}
        architecture, source = None, outer | source.get("text_config", {})
        source["model_type"] = source.get("model_type", "gemma3_text")
        source.pop("architectures", None)
    model_type = source.get("model_type")
    if "moe" in str(model_type) or any(source.get(key) for key in _EXPERTS):
        raise BadInput(f"{location}: {architecture or model_type} is a mixture of experts, which is not supported")
    family = FAMILIES.get(str(model_type))
    if family is None or architecture not in (None, family.architecture):
        supported = ", ".join([*(family.architecture for family in FAMILIES.values()), *MULTIMODAL])
        raise BadInput(
            f"{location}: architecture {architecture or model_type} is not supported; supported are {supported}"
        )
    if quantization := source.get("quantization_config"):
        fields = quantization if isinstance(quantization, Mapping) else {}
        is_bitsandbytes = any(str(key).startswith(("load_in_", "bnb_")) for key in fields)  # old ones name no method
        method = fields.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "an unnamed method")
        raise BadInput(
            f"{location}: the weights are quantised by {method}, which is not read: "
            'give the model that they were made of, and quantise it here (quantised="int8" or "nf4")'
        )
    source["architectures"] = [family.architecture]
    return source


# Far above any published model: a larger size would be listed, and compiled, before its weights are found missing.
LARGEST: Mapping[str, int] = {
    "num_hidden_layers": 4096,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
    "sliding_window_pattern": 4096,
    "max_window_layers": 4096,
    "image_size": 1 << 14,
    "patch_size": 1 << 14,
    "projection_dim": 1 << 20,
    "projection_size": 1 << 20,
}
LEAST = {"max_window_layers": 0, "intermediate_size": 0, "num_hidden_layers": 0}  # `check_config` refuses zeros later


def check_numbers(source: Mapping[str, Any], location: str) -> None:
    """Raise `BadInput` for sizes that are no whole numbers within bounds, and for numbers that are not finite."""
    for name, most in LARGEST.items():
        size, least = source.get(name), LEAST.get(name, 1)
        if size is not None and (type(size) is not int or not least <= size <= most):
            raise BadInput(f"{location}: {name} is {size!r:.80}, but must be a whole number from {least} to {most}")
    for name, value in _numbers(source, ""):
        if not math.isfinite(value):
            raise BadInput(
                f"{location}: {name} is {value}, but must be a finite number: write the one it was trained with"
            )


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """All floats in nested JSON, with the path of each."""
    if isinstance(value, float):
        yield name, value
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _numbers(part, f"{name}.{key}" if name else str(key))


def decoder_config(source: ConfigJSON, location: str = "config.json") -> DecoderConfig:
    """The decoder's shape from a text model's config.json."""
    from transformers import AutoConfig

    check_numbers(source, location)
    layer_types, most = source.get("layer_types"), LARGEST["num_hidden_layers"]
    if isinstance(layer_types, list) and len(layer_types) > most:
        raise BadInput(f"{location}: layer_types has {len(layer_types)} entries, but may have {most} at most")
    fields = {key: value for key, value in copy.deepcopy(source).items() if key != "model_type"}
    try:
        full = AutoConfig.for_model(source["model_type"], **fields)
    except Exception as error:  # each field is checked by transformers, with exceptions of many classes
        raise BadInput(f"{location}: transformers refuses it: {' '.join(str(error).split())}") from error
    if getattr(full, "use_bidirectional_attention", None):
        raise BadInput(f"{location}: use_bidirectional_attention is set, but the decoder is causal")
    try:
        config = _decoder_config(full)
        check_config(config)
    except BadInput as error:
        raise BadInput(f"{location}: {error}") from None
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{location}: its settings do not fit together ({first_line(error)}): fix them") from error
    return config


def _decoder_config(full) -> DecoderConfig:
    activation = getattr(full, "hidden_activation", None) or full.hidden_act
    layer_types = _layer_types(full)
    ropes = {layer_type: _rope(full, layer_type) for layer_type in set(layer_types)}
    e = getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads
    return DecoderConfig(
        v=full.vocab_size,
        d=full.hidden_size,
        h=full.num_attention_heads,
        k=full.num_key_value_heads,
        e=e,
        f=full.intermediate_size,
        windows=tuple(full.sliding_window if x == "sliding_attention" else None for x in layer_types),
        ropes=tuple(ropes[layer_type] for layer_type in layer_types),
        activation={"gelu_pytorch_tanh": "gelu_tanh"}.get(activation, str(activation)),
        norm_eps=full.rms_norm_eps,
        tied=bool(full.tie_word_embeddings),
        init_scale=full.initializer_range,
        **FAMILIES[full.model_type].settings(full),
    )


def _layer_types(full) -> list[str]:
    """Whether each layer sees everything or a sliding window; with a window, all layers of a Mistral slide."""
    if full.model_type == "mistral":
        layer_types = ["sliding_attention" if full.sliding_window else "full_attention"] * full.num_hidden_layers
    else:
        layer_types = getattr(full, "layer_types", None) or ["full_attention"] * full.num_hidden_layers
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise BadInput(f"layer_types has {', '.join(unknown)}; supported are full_attention and sliding_attention")
    return list(layer_types)


def _rope(full, layer_type: str) -> Rope:
    """The rotary positions of one type of layer."""
    fields = full.rope_parameters
    fields = fields.get(layer_type) if isinstance(fields.get(layer_type), dict) else fields
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise BadInput("partial_rotary_factor is set, but the decoder rotates whole heads")
    kind, original_length = fields["rope_type"], fields.get("original_max_position_embeddings") or 0
    factor = fields.get("factor")
    if factor is None:
        factor = full.max_position_embeddings / original_length if original_length else 1.0
    magnitude = 1.0
    if kind == "yarn":
        magnitude = fields.get("attention_factor")
        if magnitude is None:
            magnitude = yarn_magnitude(factor, fields.get("mscale"), fields.get("mscale_all_dim"))
    return Rope(
        theta=fields["rope_theta"],
        kind=kind,
        factor=factor,
        original_length=original_length,
        low_factor=fields.get("low_freq_factor", 1.0),
        high_factor=fields.get("high_freq_factor", 4.0),
        beta_fast=fields.get("beta_fast") or 32.0,
        beta_slow=fields.get("beta_slow") or 1.0,
        truncate=fields.get("truncate", True),
        magnitude=magnitude,
    )


# Names of tensors ---------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """Name and axes of a tensor in a file; letters without a space between them are one axis there."""

    name: str
    axes: str


_LAYER = "model.layers.{n}."
TENSORS: Mapping[str, Tensor] = {
    "embed": Tensor("model.embed_tokens.weight", "v d"),
    "norm": Tensor("model.norm.weight", "d"),
    "unembed": Tensor("lm_head.weight", "v d"),
    "attention_norm": Tensor(_LAYER + "input_layernorm.weight", "d"),
    "ffn_norm": Tensor(_LAYER + "post_attention_layernorm.weight", "d"),
    "q": Tensor(_LAYER + "self_attn.q_proj.weight", "he d"),
    "k": Tensor(_LAYER + "self_attn.k_proj.weight", "ke d"),
    "v": Tensor(_LAYER + "self_attn.v_proj.weight", "ke d"),
    "o": Tensor(_LAYER + "self_attn.o_proj.weight", "d he"),
    "q_bias": Tensor(_LAYER + "self_attn.q_proj.bias", "he"),
    "k_bias": Tensor(_LAYER + "self_attn.k_proj.bias", "ke"),
    "v_bias": Tensor(_LAYER + "self_attn.v_proj.bias", "ke"),
    "o_bias": Tensor(_LAYER + "self_attn.o_proj.bias", "d"),
    "q_norm": Tensor(_LAYER + "self_attn.q_norm.weight", "e"),
    "k_norm": Tensor(_LAYER + "self_attn.k_norm.weight", "e"),
    "gate": Tensor(_LAYER + "mlp.gate_proj.weight", "f d"),
    "up": Tensor(_LAYER + "mlp.up_proj.weight", "f d"),
    "down": Tensor(_LAYER + "mlp.down_proj.weight", "d f"),
    "gate_bias": Tensor(_LAYER + "mlp.gate_proj.bias", "f"),
    "up_bias": Tensor(_LAYER + "mlp.up_proj.bias", "f"),
    "down_bias": Tensor(_LAYER + "mlp.down_proj.bias", "d"),
}
# With four norms a layer, post_attention_layernorm is the norm after attention, and not the one before the ffn.
FOUR_NORMS: Mapping[str, Tensor] = {
    "attention_post_norm": Tensor(_LAYER + "post_attention_layernorm.weight", "d"),
    "ffn_norm": Tensor(_LAYER + "pre_feedforward_layernorm.weight", "d"),
    "ffn_post_norm": Tensor(_LAYER + "post_feedforward_layernorm.weight", "d"),
}


def checkpoint_tensors(config: DecoderConfig) -> dict[str, Tensor]:
    """The tensor of each parameter; `{n}` in its name is the layer."""
    table = {**TENSORS, **FOUR_NORMS} if config.sandwich_norms else TENSORS
    return {name: table[name] for name in parameters(config)}


def check_tensors(
    message: str, tensors: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], *, spare: Collection[str] = ()
) -> None:
    """Raise one `BadInput` for all tensors that are missing, unexpected, or of a wrong shape or dtype.

    `message` starts the error. Tensors named in `spare` are allowed, but not required.
    """
    faults = [f"{name} is missing" for name in expected if name not in tensors]
    faults += [f"{name} is unexpected" for name in sorted(tensors.keys() - expected.keys() - set(spare))]
    for name in (name for name in expected if name in tensors):
        shape, dtype = tuple(tensors[name].shape), tensors[name].dtype
        if shape != expected[name]:
            faults.append(f"{name} has shape {list(shape)} and not {list(expected[name])}")
        elif isinstance(dtype, str) and dtype not in DTYPES.values():  # of a tensor in a file
            faults.append(f"{name} is {dtype} and not one of {', '.join(DTYPES.values())}")
    if faults:
        more = f"; and {len(faults) - MAX_LISTED} more" if len(faults) > MAX_LISTED else ""
        raise BadInput(f"{message}, {len(faults)} wrong: {'; '.join(faults[:MAX_LISTED])}{more}")


def file_shape(tensor: Tensor, config: DecoderConfig) -> tuple[int, ...]:
    """Shape of a tensor in a file."""
    return tuple(int(np.prod([getattr(config, axis) for axis in group])) for group in tensor.axes.split())


def from_file(array: np.ndarray, tensor: Tensor, axes: str, config: DecoderConfig) -> np.ndarray:
    """A tensor of a file, or some of its rows, as a view with our axes (without the layer)."""
    letters = tensor.axes.replace(" ", "")
    split = array.reshape([-1, *(getattr(config, axis) for axis in letters[1:])])
    return split.transpose([letters.index(axis) for axis in axes])


def to_file(array: np.ndarray, tensor: Tensor, axes: str, config: DecoderConfig) -> np.ndarray:
    """The inverse of `from_file`, as a new array."""
    letters = tensor.axes.replace(" ", "")
    split = array.transpose([axes.index(axis) for axis in letters])
    return np.ascontiguousarray(split).reshape(file_shape(tensor, config))
