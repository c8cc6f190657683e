"""One decoder for the open model families.

    x = embed(tokens);   per layer:  x += o(attention(norm(x)));  x += down(act(gate(norm(x))) * up(norm(x)))

Shape, logical axes and initialiser of every parameter are declared once, in `parameters`; the module, its
initialisation and its sharding derive from that. Layers are stacked along a leading axis and scanned. Attention sees
what `attention.visible` says; a token of segment 0 is padding, sees nothing and yields zeros. The Flax module holds the
parameters; `make_policy` splits it once, and from there on everything is a pure function of `params`, a flat dict of
arrays.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from flowgrpo.contracts import Cache, Params, Policy
from flowgrpo.models.attention import Attend, Kernels, Sight, attend, attend_cache
from flowgrpo.models.config import DecoderConfig, Rope, check_config, rope_frequencies
from flowgrpo.models.kv_cache import (
    Held,
    View,
    block,
    block_sizes,
    count_blocks,
    extend_cache,
    make_cache,
    slots_of,
    write_cache,
)
from flowgrpo.models.products import (
    fused_name,
    lay_out,
    lay_out_matrix,
    multiply,
    multiply_each,
    product_transposed,
    times,
    wide_product,
)

QKV, GATE_UP = TOGETHER = (("q", "k", "v"), ("gate", "up"))  # matrices of the same input


class Settle(NamedTuple):
    """Functions that reach parameters on several devices."""

    lookup: Callable[[Array, Array], Array]  # (embedding, tokens) -> [r s d]
    layer: Callable[[Params], Params]  # the parameters of a layer as they lie -> as they are read


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


def matrices(config: DecoderConfig) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The parameters within layers that are multiplied with: which axes are summed over, and which are left."""
    inputs = {"o": 2}
    return {
        name: (tuple(range(1, 1 + inputs.get(name, 1))), tuple(range(1 + inputs.get(name, 1), len(parameter.axes))))
        for name, parameter in parameters(config).items()
        if parameter.deviation and parameter.axes.startswith("n")
    }


class Decoder(nnx.Module):
    """The parameters of a decoder, as a Flax module."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        check_config(config)
        for name, parameter in parameters(config).items():
            noise = jax.random.normal(rngs.params(), shape_of(parameter, config), jnp.float32)
            start = parameter.constant + parameter.deviation * noise
            setattr(self, name, nnx.Param(start.astype(dtype), axes=tuple(parameter.axes)))


# The layer --------------------------------------------------------------------------------------------


def rms_norm(x: Array, scale: Array, config: DecoderConfig) -> Array:
    """`x` over its root mean square, in float32, times the scale."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + config.norm_eps)
    scale = jnp.expand_dims(scale.astype(jnp.float32) + config.norm_offset, tuple(range(x.ndim - 1)))
    return (normed * scale).astype(x.dtype)


def rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """Turn each pair (i, i + e/2) of head dimensions by its angle; x is [r s head e], angles [r s 1 e/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention(x: Array, layer: Params, held: Held | None, view: View, config: DecoderConfig, attend: Attend) -> tuple:
    """Attention of one layer over its own tokens, or over the cache after they are written to it."""
    q, k, v = multiply_each(x, layer, QKV)
    if config.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], config), rms_norm(k, layer["k_norm"], config)
    cosine, sine = (x[layer["rope"]] for x in view.angles)
    q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
    if held is None or view.slots is None:
        q, k, v = (jnp.swapaxes(y, 1, 2) for y in (q, k, v))
        sight = Sight(view.positions, view.k_positions, view.segments, view.k_segments, layer["window"], view.k_ends)
        mixed = attend(q, k, v, sight, config)
    else:
        held = write_cache(held, (k, v), layer, view)
        mixed = _attend_held(jnp.swapaxes(q, 1, 2), held, layer, view, config, attend)
    return multiply(jnp.swapaxes(mixed, 1, 2), layer, "o", inputs=2), held


def _attend_held(q: Array, held: Held, layer: Params, view: View, config: DecoderConfig, attend: Attend) -> Array:
    """Attention over a cache, by a kernel for it or in the blocks of the platform."""
    if isinstance(attend, Kernels):
        slots = slots_of(held, layer, view)
        if slots is not None and attend.takes(q, slots.k):
            sight = Sight(view.positions, view.k_positions, view.segments, view.k_segments, layer["window"])
            return attend.slots(q, slots, sight, config)

    def by_blocks(q: Array, held: Held, *, size: int) -> Array:
        block_of = partial(block, held=held, layer=layer, view=view, size=size)
        return attend_cache(q, block_of, count_blocks(view, size), config, unrolled=view.apart)

    own, wide = block_sizes(view)
    if own == wide:
        return by_blocks(q, held, size=own)
    return jax.lax.platform_dependent(q, held, cpu=partial(by_blocks, size=own), default=partial(by_blocks, size=wide))


def feed_forward(x: Array, layer: Params, config: DecoderConfig) -> Array:
    """`down(act(gate x) * up x)`."""
    act = jax.nn.silu if config.activation == "silu" else partial(jax.nn.gelu, approximate=True)
    # Computed again in the backward pass, which takes less time than to write its steps down and read them.
    gated = jax.checkpoint(lambda gate, up: act(gate) * up)
    return multiply(gated(*multiply_each(x, layer, GATE_UP)), layer, "down")


def run_layer(x: Array, layer: Params, held: Held | None, view: View, config: DecoderConfig, attend: Attend) -> tuple:
    """One layer; returns the hidden states, and keys and values with its tokens among them."""
    out, held = attention(rms_norm(x, layer["attention_norm"], config), layer, held, view, config, attend)
    x = x + (rms_norm(out, layer["attention_post_norm"], config) if config.sandwich_norms else out)
    out = feed_forward(rms_norm(x, layer["ffn_norm"], config), layer, config)
    return x + (rms_norm(out, layer["ffn_post_norm"], config) if config.sandwich_norms else out), held


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
    unroll: bool | int = 1,
    attend: Attend = attend,
    adapter=None,
    settle: Settle | None = None,
    spread: Callable[[Attend], Attend] | None = None,
    ends=None,
):
    """Final hidden states [r s d], and the cache with these tokens in it.

    By default every token is real (segment 1), and positions count on from what the cache holds. The arrays of
    an `adapter` (see `lora`) are stacked over the layers, and names and axes are those that `multiply` reads.
    On several devices `settle` says where parameters come from, and `spread` divides attention. With `ends` rows are
    trees, and `segments` number their tokens, as `Sight` has it; see `hidden_tree`.
    """
    tokens = jnp.asarray(tokens)
    segments = jnp.ones(tokens.shape, jnp.int32) if segments is None else jnp.asarray(segments)
    cache, view = extend_cache(tokens, positions, segments, cache, config)
    view = view._replace(angles=_angles(view.positions, config), k_ends=ends)
    looked_up = params["embed"][tokens] if settle is None else settle.lookup(params["embed"], tokens)
    x = looked_up * jnp.asarray(config.embed_scale, looked_up.dtype)
    x = jnp.where(segments[:, :, None] > 0, x, jnp.zeros((), x.dtype))
    by_layer = {name for name, parameter in parameters(config).items() if parameter.axes.startswith("n")}
    by_layer |= {fused_name(names) for names in TOGETHER}
    layers = {name: value for name, value in params.items() if name in by_layer} | layer_data(config) | (adapter or {})
    attend = attend if spread is None else spread(attend)
    step = partial(_step, view=view, config=config, attend=attend, settle=settle)
    # The cache is carried and not scanned over, so that a step changes it in place.
    held = None if cache is None else (cache.keys, cache.values)
    if is_laid_out(params) or (cache is not None and isinstance(cache.keys, tuple)):
        x, held = _run_apart(step, x, held, layers, config.num_layers)
    else:
        (x, held), _ = jax.lax.scan(jax.checkpoint(step) if remat else step, (x, held), layers, unroll=unroll)
    x = rms_norm(x, params["norm"], config)
    x = jnp.where(segments[:, :, None] > 0, x, jnp.zeros((), x.dtype))
    return x, None if cache is None or held is None else cache.replace(keys=held[0], values=held[1])


def hidden_tree(hidden: Callable, params: Any, tokens, positions, ends, **settings) -> Array:
    """Final hidden states [r u d] of the trees of a `Batch`: contexts that share prefixes, each token computed once.

    Tokens are in depth-first order, so those that see token j are j and what follows until `ends[j]`; 0 is padding. A
    token's state depends on the tokens before it in its context alone, and contexts that begin alike share it.
    """
    ends = jnp.asarray(ends)
    number_ru = jnp.where(ends > 0, jnp.arange(1, ends.shape[1] + 1, dtype=jnp.int32), 0)
    return hidden(params, tokens, positions, number_ru, None, ends=ends, **settings)[0]


def _step(carry, layer: Params, *, view: View, config: DecoderConfig, attend: Attend, settle: Settle | None):
    x, held = carry
    if settle is not None:
        layer = settle.layer(layer)
    return run_layer(x, layer, held, view, config, attend), None


def _run_apart(step: Callable, x: Array, held: Held | None, layers: Any, count: int) -> tuple[Array, Any]:
    """Layers one after the other, whose parameters or caches lie on their own."""
    if held is not None and not isinstance(held[0], tuple):
        for index in range(count):
            (x, held), _ = step((x, held), {name: value[index] for name, value in layers.items()})
        return x, held

    @jax.jit  # traced and lowered once, and called for each layer
    def run(x: Array, own: Held | None, layer: Params) -> tuple[Array, Held | None]:
        return step((x, own), layer | {"index": 0})[0]

    after = []
    for index in range(count):
        own = None if held is None else tuple((layers_kv[index],) for layers_kv in held)
        layer = {name: value[index] for name, value in layers.items() if name != "index"}
        x, own = run(x, own, layer)
        after.append(own)
    return x, None if held is None else tuple(tuple(own[side][0] for own in after) for side in (0, 1))


def layer_data(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Stack what differs between layers and is no parameter: index, window, angles and their magnitude."""
    unbounded = np.iinfo(np.int32).max
    return {
        "index": np.arange(config.num_layers, dtype=np.int32),
        "window": np.array([unbounded if window is None else window for window in config.windows], np.int32),
        "rope": np.array([distinct_ropes(config).index(rope) for rope in config.ropes], np.int32),
    }


def distinct_ropes(config: DecoderConfig) -> list[Rope]:
    """The ropes of all layers, each once."""
    return list(dict.fromkeys(config.ropes))


def _angles(positions: Array, config: DecoderConfig) -> tuple[Array, Array]:
    """Cosine and sine of each rope's angles [ropes r s 1 e/2], which all of its layers share."""
    ropes = distinct_ropes(config)
    frequency = np.stack([rope_frequencies(rope, config.e) for rope in ropes])[:, None, None, None]
    magnitude = np.array([rope.magnitude for rope in ropes], np.float32)[:, None, None, None, None]

    def turn(positions: Array) -> tuple[Array, Array]:
        angle = positions.astype(jnp.float32)[None, :, :, None, None] * frequency
        return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude

    def in_branch(positions: Array) -> tuple[Array, Array]:
        # XLA would compute them again for each head and layer on a CPU, but not what comes out of a branch; this one
        # is always taken, which XLA can't know.
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(turn, positions))
        return jax.lax.cond(positions.max() > -2, turn, lambda _: blank, positions)

    return jax.lax.platform_dependent(positions, cpu=in_branch, default=turn)


def unstack_layers(params: Params, *, config: DecoderConfig, together: Sequence[Sequence[str]] = TOGETHER) -> Any:
    """Lay the parameters out for many small steps: each layer's on their own, matrices of one input beside each other.

    Taken from a stack in each step, they would be copied in each step. The unembedding lies as it is multiplied with,
    also where it is the embedding. What is laid out already stays as it is.
    """
    if is_laid_out(params):
        return params
    declared = parameters(config)
    inputs = {name: len(axes) for name, (axes, _) in matrices(config).items()}
    stacks = {name: value for name, value in params.items() if declared[name].axes.startswith("n")}
    apart = zip(*stacks.values(), strict=True)
    layers = [lay_out(dict(zip(stacks, layer, strict=True)), inputs, together) for layer in apart]
    unembed = lay_out_matrix(params["embed"].T if config.tied else params["unembed"], 1)
    whole: dict[str, Any] = {"embed": params["embed"], "norm": params["norm"], "unembed": unembed}
    whole |= {name: tuple(layer[name] for layer in layers) for name in layers[0]}
    return whole


def is_laid_out(params: Params) -> bool:
    """Whether the parameters of each layer are on their own, as `unstack_layers` lays them."""
    return isinstance(params["attention_norm"], tuple)


def unembed(params: Params, hidden: Array, *, config: DecoderConfig) -> Array:
    """Logits in float32: [... d] -> [... v]."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    is_tied, is_wide = "unembed" not in params, hidden.dtype == jnp.float32
    if is_wide:
        logits = product_transposed(flat, params["embed"]) if is_tied else times(flat, params["unembed"])
    else:
        logits = wide_product(flat, params["embed"].T if is_tied else params["unembed"])
    logits = logits.reshape(*hidden.shape[:-1], -1)
    cap = config.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def make_policy(
    config: DecoderConfig,
    *,
    dtype=jnp.float32,
    remat: bool = False,
    unroll: bool | int = 1,
    apart: bool = False,
    attend: Attend = attend,
) -> Policy:
    """The decoder as pure functions of its parameters.

    `remat` computes each layer again in the backward pass. `unroll` compiles so many layers in a row (True: all of
    them) instead of looping over them, which takes a quarter off an update of a few small layers on a CPU. Where it is
    all of them, and on a CPU with `apart`, decoding has layers of its own, each with parameters and a cache in memory
    of their own: taken from stacks, they would be copied in every step. `attend` scores whole rows, for training; a
    kernel takes its place here (see `attention_kernels`). With a cache, attention is that of `attend_cache`, but where
    `attend` brings a kernel for it.
    """
    check_config(config)
    states = partial(hidden, config=config, remat=remat, unroll=unroll, attend=attend)
    lies_apart = partial(_lies_apart, unroll is True, apart and not isinstance(attend, Kernels))

    def lay_out_cache(rows: int, slots: int) -> Cache:
        return make_cache(rows, slots, config=config, dtype=dtype, stacked=not lies_apart())

    def lay_out_params(params: Params) -> Params:
        if isinstance(attend, Kernels) and unroll is not True:
            return unstack_layers(params, config=config, together=())
        return unstack_layers(params, config=config) if lies_apart() else params

    lays_out = unroll is True or apart or isinstance(attend, Kernels)
    return Policy(
        init=partial(_init, config=config, dtype=dtype),
        hidden=states,
        unembed=partial(unembed, config=config),
        make_cache=lay_out_cache,
        unstack_layers=lay_out_params if lays_out else None,
        hidden_tree=partial(hidden_tree, states),
    )


def _lies_apart(always: bool, on_cpu: bool) -> bool:
    """Whether layers decode with parameters and a cache of their own; asks for the platform as late as it can."""
    return always or (on_cpu and jax.default_backend() == "cpu")


def _init(key: Array, *, config: DecoderConfig, dtype) -> Params:
    _, state = nnx.split(Decoder(config, rngs=nnx.Rngs(params=key), dtype=dtype))
    return nnx.to_pure_dict(state)
