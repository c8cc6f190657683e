"""The shape of a decoder: sizes by axis letter, and what differs between the model families.

The families differ in few things: which projections have a bias, how norms are applied, how positions become rotary
angles, and which layers have a sliding window. Windows and angles are data, one entry a layer, so that all layers are
alike and one scan runs over them.
"""

import math
from dataclasses import dataclass

import numpy as np

from flowgrpo.types import BadInput


@dataclass(frozen=True)
class Rope:
    """How positions become rotary angles: the base, and the rule by which the context was extended, if it was."""

    theta: float = 10_000.0
    kind: str = "default"  # or linear, llama3, yarn
    factor: float = 1.0
    original_length: int = 0
    low_factor: float = 1.0  # llama3
    high_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0  # of cosine and sine; yarn's attention factor


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that the decoder's computation depends on."""

    v: int  # vocabulary
    d: int  # model
    h: int  # heads
    k: int  # kv-heads
    e: int  # head-dim
    f: int  # ffn
    windows: tuple[int | None, ...]  # one a layer; None is full attention
    ropes: tuple[Rope, ...]  # one a layer
    activation: str = "silu"  # or gelu_tanh
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to a norm's scale: 1 in Gemma
    sandwich_norms: bool = False  # norms after attention and ffn too: Gemma 2 and 3
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    tied: bool = False  # the unembedding is the embedding
    embed_scale: float = 1.0
    query_scale: float | None = None  # None: 1 / sqrt(e)
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    init_scale: float = 0.02

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.windows)


def small_config(v: int, *, d: int = 64, layers: int = 2, head: int = 16, theta: float = 1000.0) -> DecoderConfig:
    """A small decoder to train from scratch, with tied embeddings.

    Args:
        v: Size of the vocabulary.
        d: Model dimension.
        layers: Number of layers.
        head: Dimension of a head; there are `d / head` of them.
        theta: Base of the rotary angles; the default suits contexts of a few hundred tokens.
    """
    return DecoderConfig(
        v=v,
        d=d,
        h=d // head,
        k=d // head,
        e=head,
        f=2 * d,
        windows=(None,) * layers,
        ropes=(Rope(theta=theta),) * layers,
        tied=True,
        init_scale=0.05,
    )


def check_config(config: DecoderConfig) -> None:
    """Raise `BadInput` for an impossible shape."""
    sizes = {axis: getattr(config, axis) for axis in "vdhkef"} | {"number of layers": config.num_layers}
    for name, size in sizes.items():
        if size < 1:
            raise BadInput(f"{name} is {size}, but every size of a decoder is at least 1")
    if config.h % config.k:
        raise BadInput(f"{config.h} heads can't share {config.k} kv-heads equally")
    if config.e % 2:
        raise BadInput(f"the head dimension is {config.e}, but rotary positions need an even one")
    if len(config.ropes) != config.num_layers:
        raise BadInput(f"there are {config.num_layers} windows but {len(config.ropes)} ropes: one of each a layer")
    for name in ("norm_eps", "embed_scale", "init_scale", "query_scale", "attention_softcap", "logit_softcap"):
        value = getattr(config, name)
        may_be_zero = name in ("norm_eps", "init_scale")
        if value is not None and not (_is_number(value) and (value > 0 or (may_be_zero and value == 0))):
            raise BadInput(f"{name} is {value!r}, but must be a finite number above 0")
    for window in config.windows:
        if window is not None and (type(window) is not int or window < 1):
            raise BadInput(f"a layer's window is {window!r}, but must be a whole number above 0")
    for rope in dict.fromkeys(config.ropes):
        _check_rope(rope, config.e)
    if config.activation not in ("silu", "gelu_tanh"):
        raise BadInput(f"activation {config.activation!r} is unknown; choose silu or gelu_tanh")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_rope(rope: Rope, e: int) -> None:
    """Raise `BadInput` for settings that give no finite angles."""
    for name in ("theta", "factor", "low_factor", "high_factor", "beta_fast", "beta_slow", "magnitude"):
        if not _is_number(value := getattr(rope, name)) or value <= 0:
            raise BadInput(f"rope_{name} is {value!r}, but must be a finite number above 0")
    if rope.kind == "llama3" and rope.high_factor <= rope.low_factor:
        raise BadInput(f"high_freq_factor is {rope.high_factor}, but must be above low_freq_factor, {rope.low_factor}")
    if type(rope.original_length) is not int or rope.original_length < 0:
        raise BadInput(f"original_max_position_embeddings is {rope.original_length!r}, but must be a whole number")
    try:
        with np.errstate(all="ignore"):
            is_finite = np.isfinite(rope_frequencies(rope, e)).all()
    except BadInput:  # an unknown kind
        raise
    except (ArithmeticError, ValueError):
        is_finite = False
    if not is_finite:
        raise BadInput(f"the {rope.kind} rotary positions have no finite angles: fix {rope}")


# Angles -----------------------------------------------------------------------------------------------


def rope_frequencies(rope: Rope, e: int) -> np.ndarray:
    """Angle per position for each pair of head dimensions -> [e / 2].

    Rounded as in transformers, in the exponent, the power and its inverse: an angle is the product with the position,
    so the last bit of a frequency changes log-probabilities by 3e-5 after a thousand tokens.
    """
    exponent = np.arange(0, e, 2, dtype=np.float32) / np.float32(e)
    frequency = (1 / (rope.theta ** exponent.astype(np.float64)).astype(np.float32)).astype(np.float64)
    if rope.kind == "default":
        return frequency.astype(np.float32)
    rules = {"linear": lambda rope, frequency, _: frequency / rope.factor, "llama3": _llama3, "yarn": _yarn}
    if rope.kind not in rules:
        raise BadInput(f"rope scaling {rope.kind!r} is not supported; supported are default, {', '.join(rules)}")
    return rules[rope.kind](rope, frequency, e).astype(np.float32)


def _llama3(rope: Rope, frequency: np.ndarray, e: int) -> np.ndarray:
    """Llama 3.1: low frequencies are divided by the factor, high ones are unchanged, and a blend in between."""
    turns = rope.original_length * frequency / (2 * math.pi)
    blend = np.clip((turns - rope.low_factor) / (rope.high_factor - rope.low_factor), 0.0, 1.0)
    return (1 - blend) * frequency / rope.factor + blend * frequency


def _yarn(rope: Rope, frequency: np.ndarray, e: int) -> np.ndarray:
    """YaRN (Peng et al., 2023): fast dimensions are unchanged, slow ones divided by the factor, a ramp in between."""
    low, high = (_yarn_dimension(rope, e, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, e - 1)
    ramp = np.clip((np.arange(e // 2) - low) / ((high - low) or 1e-3), 0.0, 1.0)
    return frequency / rope.factor * ramp + frequency * (1 - ramp)


def _yarn_dimension(rope: Rope, e: int, turns: float) -> float:
    """The dimension that makes `turns` full rotations over the original length."""
    return e * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def yarn_magnitude(factor: float, mscale: float | None = None, mscale_all: float | None = None) -> float:
    """YaRN's attention factor for a context extended by `factor`."""

    def attention_factor(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return attention_factor(mscale) / attention_factor(mscale_all) if mscale and mscale_all else attention_factor(1.0)
