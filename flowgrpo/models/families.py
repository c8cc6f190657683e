"""The model families: config.json -> `DecoderConfig`, and the names that published tensors go by.

transformers' own config classes fill in the defaults of a family and bring old and new fields for rotary
positions into one form; what a family computes differently is one small function each. `TENSORS` maps our
parameters to the names and axes in the files, for reading and for writing.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.models.config import DecoderConfig, Rope, check_config, yarn_magnitude
from flowgrpo.models.decoder import parameters
from flowgrpo.types import BadInput, first_line

Source = dict[str, Any]  # what a config.json holds
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # ours, and how the files call them
MOST_TOLD = 10  # faults of a folder that its refusal lists


# What a family computes differently -------------------------------------------------------------------


class Family(NamedTuple):
    """The class of transformers that opens it, and the fields of `DecoderConfig` that follow from its config."""

    architecture: str
    settings: Callable[[Any], dict[str, Any]]


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
    # transformers reads attn_logit_softcapping here too, but never applies it.
    "gemma3_text": Family(
        "Gemma3ForCausalLM", lambda config: _gemma2(config) | {"qk_norm": True, "attention_softcap": None}
    ),
}
WITH_TEXT_PART = {"Gemma3ForConditionalGeneration": "gemma3_text"}  # of which only the text part is read
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


# config.json -> DecoderConfig -------------------------------------------------------------------------


def text_source(raw: Mapping[str, Any], where: str = "config.json") -> Source:
    """The config of the text model, checked to be of a supported family; a multimodal one gives its text part."""
    source = copy.deepcopy(dict(raw))
    named = source.get("architectures") or [None]
    architecture = named[0] if isinstance(named, list) else named
    if not isinstance(architecture, str | None):
        raise BadInput(f"{where}: architectures is {named!r:.80}, but must be a list of one name")
    if not isinstance(source.get("text_config", {}), dict):
        raise BadInput(f"{where}: text_config is {source['text_config']!r:.80}, but must be an object")
    if architecture in WITH_TEXT_PART:
        outer = {key: source[key] for key in ("dtype", "torch_dtype", "eos_token_id") if key in source}
        architecture, source = None, outer | source.get("text_config", {})
        source["model_type"] = source.get("model_type", "gemma3_text")
        source.pop("architectures", None)
    kind = source.get("model_type")
    if "moe" in str(kind) or any(source.get(key) for key in _EXPERTS):
        raise BadInput(f"{where}: {architecture or kind} is a mixture of experts, which is not supported")
    family = FAMILIES.get(str(kind))
    if family is None or architecture not in (None, family.architecture):
        supported = ", ".join([*(known.architecture for known in FAMILIES.values()), *WITH_TEXT_PART])
        raise BadInput(f"{where}: architecture {architecture or kind} is not supported; supported are {supported}")
    if source.get("quantization_config"):
        raise BadInput(
            f"{where}: the weights are quantised by {_quantised_by(source['quantization_config'])}, which is not read: "
            'give the model that they were made of, and quantise it here (quantised="int8" or "nf4")'
        )
    source["architectures"] = [family.architecture]
    return source


def _quantised_by(given: Any) -> str:
    """The method that a quantization_config names; bitsandbytes' older ones name none."""
    fields = given if isinstance(given, Mapping) else {}
    older = "bitsandbytes" if any(str(key).startswith(("load_in_", "bnb_")) for key in fields) else "an unnamed method"
    return str(fields.get("quant_method") or older)


# Far above any published model; whatever has these sizes is listed, and compiled, before its weights are missed.
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
LEAST = {"max_window_layers": 0, "intermediate_size": 0, "num_hidden_layers": 0}  # whose zeros are refused below


def check_numbers(source: Mapping[str, Any], where: str) -> None:
    """Raise `BadInput` for sizes that are no whole numbers within bounds, and for any number that is not finite."""
    for name, most in LARGEST.items():
        size, least = source.get(name), LEAST.get(name, 1)
        if size is not None and (type(size) is not int or not least <= size <= most):
            raise BadInput(f"{where}: {name} is {size!r:.80}, but must be a whole number from {least} to {most}")
    for name, value in _numbers(source, ""):
        if not math.isfinite(value):
            raise BadInput(
                f"{where}: {name} is {value}, but must be a finite number: write the one it was trained with"
            )


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """All floats in nested JSON by the path of their fields."""
    if isinstance(value, float):
        yield name, value
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _numbers(part, f"{name}.{key}" if name else str(key))


def decoder_config(source: Source, where: str = "config.json") -> DecoderConfig:
    """Convert a text model's config to the `DecoderConfig` that holds what the decoder needs to know of it."""
    from transformers import AutoConfig

    check_numbers(source, where)
    kinds = source.get("layer_types")
    if isinstance(kinds, list) and len(kinds) > LARGEST["num_hidden_layers"]:
        most = LARGEST["num_hidden_layers"]
        raise BadInput(f"{where}: layer_types has {len(kinds)} entries, where {most} are the most")
    fields = {key: value for key, value in copy.deepcopy(source).items() if key != "model_type"}
    try:
        full = AutoConfig.for_model(source["model_type"], **fields)
    except Exception as error:  # each field is checked by transformers, with exceptions of many classes
        raise BadInput(f"{where}: transformers refuses it: {' '.join(str(error).split())}") from error
    if getattr(full, "use_bidirectional_attention", None):
        raise BadInput(f"{where}: use_bidirectional_attention is set, but the decoder is causal")
    try:
        config = _decoder_config(full)
        check_config(config)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{where}: its settings have no sense together ({first_line(error)}): fix them") from error
    return config


def _decoder_config(full) -> DecoderConfig:
    act = getattr(full, "hidden_activation", None) or full.hidden_act
    kinds = _layer_kinds(full)
    ropes = {kind: _rope(full, kind) for kind in set(kinds)}
    e = getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads
    return DecoderConfig(
        v=full.vocab_size,
        d=full.hidden_size,
        h=full.num_attention_heads,
        k=full.num_key_value_heads,
        e=e,
        f=full.intermediate_size,
        windows=tuple(full.sliding_window if kind == "sliding_attention" else None for kind in kinds),
        ropes=tuple(ropes[kind] for kind in kinds),
        activation={"gelu_pytorch_tanh": "gelu_tanh"}.get(act, str(act)),
        norm_eps=full.rms_norm_eps,
        tied=bool(full.tie_word_embeddings),
        init_scale=full.initializer_range,
        **FAMILIES[full.model_type].settings(full),
    )


def _layer_kinds(full) -> list[str]:
    """Say which layers see a window only; Mistral's all do where it has one."""
    if full.model_type == "mistral":
        kinds = ["sliding_attention" if full.sliding_window else "full_attention"] * full.num_hidden_layers
    else:
        kinds = getattr(full, "layer_types", None) or ["full_attention"] * full.num_hidden_layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise BadInput(f"layer_types has {', '.join(unknown)}; supported are full_attention and sliding_attention")
    return list(kinds)


def _rope(full, kind: str) -> Rope:
    """The rotary positions of one kind of layer."""
    given = full.rope_parameters
    given = given.get(kind) if isinstance(given.get(kind), dict) else given
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise BadInput("partial_rotary_factor is set, but the decoder turns whole heads")
    rule, original = given["rope_type"], given.get("original_max_position_embeddings") or 0
    factor = given.get("factor")
    if factor is None:
        factor = full.max_position_embeddings / original if original else 1.0
    magnitude = 1.0
    if rule == "yarn":
        magnitude = given.get("attention_factor")
        if magnitude is None:
            magnitude = yarn_magnitude(factor, given.get("mscale"), given.get("mscale_all_dim"))
    return Rope(
        theta=given["rope_theta"],
        kind=rule,
        factor=factor,
        original_length=original,
        low_factor=given.get("low_freq_factor", 1.0),
        high_factor=given.get("high_freq_factor", 4.0),
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        truncate=given.get("truncate", True),
        magnitude=magnitude,
    )


# The names of tensors ---------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """Name and axes of a tensor in a file; letters that stand together are one axis there."""

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
# Where there are four norms a layer, post_attention_layernorm is another one.
FOUR_NORMS: Mapping[str, Tensor] = {
    "attention_post_norm": Tensor(_LAYER + "post_attention_layernorm.weight", "d"),
    "ffn_norm": Tensor(_LAYER + "pre_feedforward_layernorm.weight", "d"),
    "ffn_post_norm": Tensor(_LAYER + "post_feedforward_layernorm.weight", "d"),
}


def tensors_of(config: DecoderConfig) -> dict[str, Tensor]:
    """The tensor of each parameter; `{n}` in its name stands for the layer."""
    table = {**TENSORS, **FOUR_NORMS} if config.sandwich_norms else TENSORS
    return {name: table[name] for name in parameters(config)}


def check_tensors(
    what: str, found: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], *, spare: Collection[str] = ()
) -> None:
    """Raise one `BadInput` for all that is missing, unexpected (not `spare`), wrongly shaped or of an unknown dtype."""
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is unexpected" for name in sorted(found.keys() - expected.keys() - set(spare))]
    for name in (name for name in expected if name in found):
        shape, dtype = tuple(found[name].shape), found[name].dtype
        if shape != expected[name]:
            wrong.append(f"{name} has shape {list(shape)} and not {list(expected[name])}")
        elif isinstance(dtype, str) and dtype not in DTYPES.values():  # of a tensor in a file
            wrong.append(f"{name} is {dtype} and not one of {', '.join(DTYPES.values())}")
    if wrong:
        rest = f"; and {len(wrong) - MOST_TOLD} more" if len(wrong) > MOST_TOLD else ""
        raise BadInput(f"{what}, {len(wrong)} wrong: {'; '.join(wrong[:MOST_TOLD])}{rest}")


def file_shape(tensor: Tensor, config: DecoderConfig) -> tuple[int, ...]:
    """The shape that a tensor has in a file."""
    return tuple(int(np.prod([getattr(config, axis) for axis in group])) for group in tensor.axes.split())


def from_file(array: np.ndarray, tensor: Tensor, axes: str, config: DecoderConfig) -> np.ndarray:
    """A tensor as it stands in a file, or some of its rows, as a view with our axes (without the layer)."""
    letters = tensor.axes.replace(" ", "")
    wide = array.reshape([-1, *(getattr(config, axis) for axis in letters[1:])])
    return wide.transpose([letters.index(axis) for axis in axes])


def to_file(array: np.ndarray, tensor: Tensor, axes: str, config: DecoderConfig) -> np.ndarray:
    """The inverse of `from_file`, as an array of its own."""
    letters = tensor.axes.replace(" ", "")
    wide = array.transpose([axes.index(axis) for axis in letters])
    return np.ascontiguousarray(wide).reshape(file_shape(tensor, config))
