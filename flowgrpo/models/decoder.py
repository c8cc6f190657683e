"""One decoder for the open model families: tokens flow in, hidden states and logits flow out.

    x = embed(tokens);   per layer:  x += o(attention(norm(x)));  x += down(act(gate(norm(x))) * up(norm(x)))

Shape, logical axes and initialiser of every parameter are declared once, in `parameters`; the module, its
initialisation and its sharding derive from that. Layers are stacked along a leading axis and scanned.
`visible` alone decides who sees whom, from positions, segments and window; a token of segment 0 is
padding, sees nothing and yields zeros.

The Flax module holds the parameters; `make_policy` splits it once, and from there on everything is a pure
function of `params`, a flat dict of arrays.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from flowgrpo.contracts import Cache, Params, Policy
from flowgrpo.models.config import DecoderConfig, check_config, rope_frequencies

# Parameters -------------------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """Shape by axis letters, and how it starts: a standard deviation, or a constant."""

    axes: str  # "n" stands for the layer
    deviation: float = 0.0
    constant: float = 0.0


def parameters(config: DecoderConfig) -> dict[str, Parameter]:
    """Every parameter of the decoder by name: the one place that declares them."""
    weight, scale = partial(Parameter, deviation=config.init_scale), 1.0 - config.norm_offset
    names = {
        "embed": weight("vd"),
        "norm": Parameter("d", constant=scale),
        "attention_norm": Parameter("nd", constant=scale),
        "ffn_norm": Parameter("nd", constant=scale),
        "q": weight("ndhe"),
        "k": weight("ndke"),
        "v": weight("ndke"),
        "o": weight("nhed"),
        "gate": weight("ndf"),
        "up": weight("ndf"),
        "down": weight("nfd"),
    }
    if not config.tied:
        names["unembed"] = weight("dv")
    if config.qkv_bias:
        names |= {"q_bias": Parameter("nhe"), "k_bias": Parameter("nke"), "v_bias": Parameter("nke")}
    if config.o_bias:
        names["o_bias"] = Parameter("nd")
    if config.ffn_bias:
        names |= {"gate_bias": Parameter("nf"), "up_bias": Parameter("nf"), "down_bias": Parameter("nd")}
    if config.qk_norm:
        names |= {"q_norm": Parameter("ne", constant=scale), "k_norm": Parameter("ne", constant=scale)}
    if config.sandwich_norms:
        names |= {key: Parameter("nd", constant=scale) for key in ("attention_post_norm", "ffn_post_norm")}
    return names


def shape_of(parameter: Parameter, config: DecoderConfig) -> tuple[int, ...]:
    """The sizes of its axes."""
    return tuple(config.num_layers if axis == "n" else getattr(config, axis) for axis in parameter.axes)


def is_stacked(name: str, config: DecoderConfig) -> bool:
    """Whether a parameter has one entry a layer."""
    return parameters(config)[name].axes.startswith("n")


class Decoder(nnx.Module):
    """The parameters of a decoder, as a Flax module."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        check_config(config)
        for name, parameter in parameters(config).items():
            noise = jax.random.normal(rngs.params(), shape_of(parameter, config), jnp.float32)
            start = parameter.constant + parameter.deviation * noise
            setattr(self, name, nnx.Param(start.astype(dtype), axes=tuple(parameter.axes)))


# Who sees whom ----------------------------------------------------------------------------------------


def visible(q_position: Array, k_position: Array, q_segment: Array, k_segment: Array, window: Array | int) -> Array:
    """Whether a query sees a key: same segment, not padding, not later, nearer than `window` -> [r q k]."""
    distance = q_position[:, :, None] - k_position[:, None, :]
    same = (q_segment[:, :, None] == k_segment[:, None, :]) & (q_segment[:, :, None] > 0)
    return same & (distance >= 0) & (distance < window)


def make_cache(rows: int, slots: int, *, config: DecoderConfig, dtype=jnp.float32) -> Cache:
    """An empty cache of static size."""
    shape = (config.num_layers, rows, config.k, slots, config.e)
    # Arrays of their own, so that each can be donated.
    keys, values = (jnp.zeros(shape, dtype) for _ in range(2))
    positions, segments = (jnp.zeros((rows, slots), jnp.int32) for _ in range(2))
    return Cache(keys, values, positions, segments, jnp.zeros(rows, jnp.int32))


# The layer --------------------------------------------------------------------------------------------


class View(NamedTuple):
    """What a layer needs to know beside its parameters."""

    positions: Array  # r s
    segments: Array  # r s
    k_positions: Array  # r c: of the keys, which are the same tokens where there is no cache
    k_segments: Array  # r c
    slots: Array | None  # r s: where the tokens go in the cache


def rms_norm(x: Array, scale: Array, config: DecoderConfig) -> Array:
    """`x` over its root mean square, in float32, times the scale."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + config.norm_eps)
    scale = jnp.expand_dims(scale.astype(jnp.float32) + config.norm_offset, tuple(range(x.ndim - 1)))
    return (normed * scale).astype(x.dtype)


def rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """Turn each pair (i, i + e/2) of head dimensions by its angle; x is [r head s e], angles [r 1 s e/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attend(q: Array, k: Array, v: Array, seen: Array, config: DecoderConfig) -> Array:
    """Softmax attention of grouped heads in float32: [r h s e], [r k c e], [r s c] -> [r h s e]."""
    rows, _, length, e = q.shape
    grouped = q.reshape(rows, config.k, config.h // config.k, length, e)
    scale = e**-0.5 if config.query_scale is None else config.query_scale
    logits = jnp.einsum("rkgse,rkce->rkgsc", grouped, k, preferred_element_type=jnp.float32) * scale
    if config.attention_softcap is not None:
        logits = config.attention_softcap * jnp.tanh(logits / config.attention_softcap)
    seen = seen[:, None, None]
    logits = jnp.where(seen, logits, jnp.finfo(jnp.float32).min)
    shares = jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0.0).astype(v.dtype)
    mixed = jnp.einsum("rkgsc,rkce->rkgse", shares, v, preferred_element_type=jnp.float32)
    return mixed.astype(q.dtype).reshape(q.shape)


def multiply(x: Array, layer: Params, name: str, equation: str) -> Array:
    """`x W`; and `+ x A B`, in the dtype of A and B, where the layer has an adapter of that name (z is its rank)."""
    out = jnp.einsum(equation, x, layer[name])
    if f"{name}_a" not in layer:
        return out
    x_axes, w_axes, out_axes = equation.replace("->", ",").split(",")
    summed = "".join(axis for axis in w_axes if axis not in out_axes)
    a, b = layer[f"{name}_a"], layer[f"{name}_b"]
    low = jnp.einsum(f"{x_axes},{summed}z->rsz", x.astype(a.dtype), a)
    change = jnp.einsum(f"rsz,z{w_axes.removeprefix(summed)}->{out_axes}", low, b)
    return (out.astype(change.dtype) + change).astype(out.dtype)


def _project(x: Array, layer: Params, name: str) -> Array:
    """[r s d] -> [r head s e], with the bias where there is one."""
    out = multiply(x, layer, name, "rsd,dhe->rhse")
    return out + layer[f"{name}_bias"][None, :, None, :] if f"{name}_bias" in layer else out


def attention(x: Array, layer: Params, memory, view: View, config: DecoderConfig) -> tuple[Array, tuple]:
    """Attention of one layer over its own tokens, or over the cache after they are written to it."""
    q, k, v = (_project(x, layer, name) for name in ("q", "k", "v"))
    if config.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], config), rms_norm(k, layer["k_norm"], config)
    angle = view.positions.astype(jnp.float32)[:, None, :, None] * layer["frequency"][None, None, None, :]
    cosine, sine = (turn(angle) * layer["magnitude"] for turn in (jnp.cos, jnp.sin))
    q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
    if view.slots is not None:
        rows = jnp.arange(len(x))[:, None]
        memory = tuple(
            old.at[rows, :, view.slots].set(jnp.swapaxes(new, 1, 2).astype(old.dtype), mode="drop")
            for old, new in zip(memory, (k, v), strict=True)
        )
        k, v = (held.astype(q.dtype) for held in memory)
    seen = visible(view.positions, view.k_positions, view.segments, view.k_segments, layer["window"])
    out = multiply(attend(q, k, v, seen, config), layer, "o", "rhse,hed->rsd")
    return out + layer["o_bias"][None, None, :] if config.o_bias else out, memory


def feed_forward(x: Array, layer: Params, config: DecoderConfig) -> Array:
    """`down(act(gate x) * up x)`."""

    def linear(x, name, equation="rsd,df->rsf"):
        out = multiply(x, layer, name, equation)
        return out + layer[f"{name}_bias"][None, None, :] if config.ffn_bias else out

    act = jax.nn.silu if config.activation == "silu" else partial(jax.nn.gelu, approximate=True)
    return linear(act(linear(x, "gate")) * linear(x, "up"), "down", "rsf,fd->rsd")


def run_layer(x: Array, layer: Params, memory, view: View, config: DecoderConfig) -> tuple[Array, tuple]:
    """One layer; returns the hidden states and its part of the cache."""
    out, memory = attention(rms_norm(x, layer["attention_norm"], config), layer, memory, view, config)
    x = x + (rms_norm(out, layer["attention_post_norm"], config) if config.sandwich_norms else out)
    out = feed_forward(rms_norm(x, layer["ffn_norm"], config), layer, config)
    return x + (rms_norm(out, layer["ffn_post_norm"], config) if config.sandwich_norms else out), memory


# The whole --------------------------------------------------------------------------------------------


def hidden(
    params: Params,
    tokens,
    positions=None,
    segments=None,
    cache: Cache | None = None,
    *,
    config,
    remat=False,
    adapter=None,
):
    """Final hidden states [r s d], and the cache with these tokens in it.

    By default every token is real (segment 1), and positions count on from what the cache holds. The arrays of
    an `adapter` (see `lora`) are stacked over the layers, and names and axes are those that `multiply` reads.
    """
    tokens = jnp.asarray(tokens)
    segments = jnp.ones(tokens.shape, jnp.int32) if segments is None else jnp.asarray(segments)
    cache, view = _look(tokens, positions, segments, cache)
    x = params["embed"][tokens] * jnp.asarray(config.embed_scale, params["embed"].dtype)
    x = jnp.where(segments[:, :, None] > 0, x, jnp.zeros((), x.dtype))
    stacked = {name: value for name, value in params.items() if is_stacked(name, config)} | layer_data(config)
    stacked |= adapter or {}
    step = partial(_step, view=view, config=config)
    memory = () if cache is None else (cache.keys, cache.values)
    x, memory = jax.lax.scan(jax.checkpoint(step) if remat else step, x, (stacked, memory))
    x = rms_norm(x, params["norm"], config)
    x = jnp.where(segments[:, :, None] > 0, x, jnp.zeros((), x.dtype))
    return x, None if cache is None else cache.replace(keys=memory[0], values=memory[1])


def _step(x, inputs, *, view: View, config: DecoderConfig):
    layer, memory = inputs
    return run_layer(x, layer, memory, view, config)


def _look(tokens, positions, segments, cache: Cache | None) -> tuple[Cache | None, View]:
    """The cache with positions and segments of the new tokens, and what the layers see."""
    count = jnp.cumsum(segments > 0, axis=1, dtype=jnp.int32) - 1
    if cache is None:
        positions = count if positions is None else jnp.asarray(positions)
        return None, View(positions, segments, positions, segments, None)
    positions = count + cache.next[:, None] if positions is None else jnp.asarray(positions)
    # Real tokens move up to the first free slots, whatever padding stands between them; padding goes nowhere.
    slots = jnp.where(segments > 0, cache.next[:, None] + count, cache.positions.shape[1])
    rows = jnp.arange(len(tokens))[:, None]
    k_positions = cache.positions.at[rows, slots].set(positions, mode="drop")
    k_segments = cache.segments.at[rows, slots].set(segments, mode="drop")
    held = cache.next + (segments > 0).sum(axis=1, dtype=jnp.int32)
    cache = cache.replace(positions=k_positions, segments=k_segments, next=held)
    return cache, View(positions, segments, k_positions, k_segments, slots)


def layer_data(config: DecoderConfig) -> dict[str, np.ndarray]:
    """What differs between layers and is no parameter: window, angles and their magnitude."""
    unbounded = np.iinfo(np.int32).max
    return {
        "window": np.array([unbounded if window is None else window for window in config.windows], np.int32),
        "frequency": np.stack([rope_frequencies(rope, config.e) for rope in config.ropes]),
        "magnitude": np.array([rope.magnitude for rope in config.ropes], np.float32),
    }


def unembed(params: Params, hidden: Array, *, config: DecoderConfig) -> Array:
    """Logits in float32: [... d] -> [... v]."""
    if config.tied:
        logits = jnp.einsum("...d,vd->...v", hidden, params["embed"], preferred_element_type=jnp.float32)
    else:
        logits = jnp.einsum("...d,dv->...v", hidden, params["unembed"], preferred_element_type=jnp.float32)
    cap = config.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def make_policy(config: DecoderConfig, *, dtype=jnp.float32, remat: bool = False) -> Policy:
    """The decoder as pure functions of its parameters."""
    check_config(config)
    return Policy(
        init=partial(_init, config=config, dtype=dtype),
        hidden=partial(hidden, config=config, remat=remat),
        unembed=partial(unembed, config=config),
        make_cache=partial(make_cache, config=config, dtype=dtype),
    )


def _init(key: Array, *, config: DecoderConfig, dtype) -> Params:
    _, state = nnx.split(Decoder(config, rngs=nnx.Rngs(params=key), dtype=dtype))
    return nnx.to_pure_dict(state)
