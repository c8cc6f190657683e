"""One decoder for the open model families.

    x = embed(tokens);   per layer:  x += o(attention(norm(x)));  x += down(act(gate(norm(x))) * up(norm(x)))

Shape, logical axes and initialiser of every parameter are declared once, in `parameters`; the module, its
initialisation and its sharding derive from that. Layers are stacked along a leading axis and scanned. The attention
mask is `attention.visible`; a token of segment 0 is padding, attends to nothing and yields zeros. The Flax module
initialises the parameters; `make_policy` makes everything else a pure function of `params`, a flat dict of arrays.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from flowgrpo.contracts import Cache, Policy
from flowgrpo.models.attention import Attend, AttentionKernels, MaskSpec, attend, attend_cache
from flowgrpo.models.config import DecoderConfig, Rope, check_config, rope_frequencies
from flowgrpo.models.kv_cache import (
    CacheView,
    KeysValues,
    block_sizes,
    extend_cache,
    layer_cache,
    make_cache,
    num_filled_blocks,
    read_block,
    write_cache,
)
from flowgrpo.models.products import (
    apply_linear,
    fused_name,
    product_transposed,
    project,
    project_each,
    to_cpu_layout,
    to_decode_layout,
    wide_product,
)
from flowgrpo.types import Params, PyTree

QKV, GATE_UP = FUSED_GROUPS = (("q", "k", "v"), ("gate", "up"))  # matrices with the same input


class ParamGather(NamedTuple):
    """Functions that gather parameters which are sharded over several devices, where they are used."""

    lookup: Callable[[Array, Array], Array]  # (embedding, tokens) -> [r s d]
    layer: Callable[[Params], Params]  # this device's shard of a layer's parameters -> the whole parameters


# Parameters -------------------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """Shape by axis letters, and initialiser: normal with a standard deviation, or a constant."""

    axes: str  # a leading "n" is the layer
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
    """Shape of a parameter of this decoder."""
    return tuple(config.num_layers if axis == "n" else getattr(config, axis) for axis in parameter.axes)


def matrices(config: DecoderConfig) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The weight matrices of the layers, by name: their input axes (summed over) and their output axes."""
    num_inputs = {"o": 2}
    return {
        name: (
            tuple(range(1, 1 + num_inputs.get(name, 1))),
            tuple(range(1 + num_inputs.get(name, 1), len(parameter.axes))),
        )
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
    """`x` over its root mean square, in float32, apply_linear the scale."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + config.norm_eps)
    scale = jnp.expand_dims(scale.astype(jnp.float32) + config.norm_offset, tuple(range(x.ndim - 1)))
    return (normed * scale).astype(x.dtype)


def rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """Rotate each pair (i, i + e/2) of head dimensions by its angle; x is [r s head e], angles [r s 1 e/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attention(
    x: Array, layer: Params, kv: KeysValues | None, view: CacheView, config: DecoderConfig, attend: Attend
) -> tuple:
    """One layer's attention over the call's own tokens, or over the cache after they have been written to it."""
    q, k, v = project_each(x, layer, QKV)
    if config.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], config), rms_norm(k, layer["k_norm"], config)
    cosine, sine = (angle[layer["rope"]] for angle in view.angles)
    q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
    if kv is None or view.slots is None:
        q, k, v = (jnp.swapaxes(y, 1, 2) for y in (q, k, v))
        mask = MaskSpec(view.positions, view.k_positions, view.segments, view.k_segments, layer["window"], view.k_ends)
        mixed = attend(q, k, v, mask, config)
    else:
        kv = write_cache(kv, (k, v), layer, view)
        mixed = _attend_to_cache(jnp.swapaxes(q, 1, 2), kv, layer, view, config, attend)
    return project(jnp.swapaxes(mixed, 1, 2), layer, "o", inputs=2), kv


def _attend_to_cache(
    q: Array, kv: KeysValues, layer: Params, view: CacheView, config: DecoderConfig, attend: Attend
) -> Array:
    """Attention over a cache, by a kernel if there is one for this shape, else in the block size of the platform."""
    if isinstance(attend, AttentionKernels):
        cache = layer_cache(kv, layer, view)
        if cache is not None and attend.supports(q, cache.k):
            mask = MaskSpec(view.positions, view.k_positions, view.segments, view.k_segments, layer["window"])
            return attend.cached(q, cache, mask, config)

    def by_blocks(q: Array, kv: KeysValues, *, size: int) -> Array:
        block_of = partial(read_block, kv=kv, layer=layer, view=view, size=size)
        return attend_cache(q, block_of, num_filled_blocks(view, size), config, unrolled=view.block_arrays)

    cpu_size, accelerator_size = block_sizes(view)
    if cpu_size == accelerator_size:
        return by_blocks(q, kv, size=cpu_size)
    return jax.lax.platform_dependent(
        q, kv, cpu=partial(by_blocks, size=cpu_size), default=partial(by_blocks, size=accelerator_size)
    )


def feed_forward(x: Array, layer: Params, config: DecoderConfig) -> Array:
    """`down(act(gate x) * up x)`."""
    act = jax.nn.silu if config.activation == "silu" else partial(jax.nn.gelu, approximate=True)
    # Recomputed in the backward pass, which takes less time than writing and reading the residuals.
    gated = jax.checkpoint(lambda gate, up: act(gate) * up)
    return project(gated(*project_each(x, layer, GATE_UP)), layer, "down")


def run_layer(
    x: Array, layer: Params, kv: KeysValues | None, view: CacheView, config: DecoderConfig, attend: Attend
) -> tuple:
    """One layer -> the hidden states, and the cache's keys and values with this call's tokens written to them."""
    out, kv = attention(rms_norm(x, layer["attention_norm"], config), layer, kv, view, config, attend)
    x = x + (rms_norm(out, layer["attention_post_norm"], config) if config.sandwich_norms else out)
    out = feed_forward(rms_norm(x, layer["ffn_norm"], config), layer, config)
    return x + (rms_norm(out, layer["ffn_post_norm"], config) if config.sandwich_norms else out), kv


# The whole decoder ------------------------------------------------------------------------------------


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
    gather: ParamGather | None = None,
    shard_attention: Callable[[Attend], Attend] | None = None,
    ends=None,
):
    """Final hidden states [r s d], and the cache with these tokens written to it.

    Args:
        tokens: Token ids [r s].
        positions: Position of each token; by default real tokens count on from those in the cache.
        segments: Number of each token's segment; 0 is padding. By default every token is real (segment 1).
        cache: Keys and values of earlier tokens; None attends to the tokens of this call alone.
        config, remat, unroll, attend: as in `make_policy`.
        adapter: Arrays of a LoRA adapter stacked over the layers, under the names that `project` reads.
        gather: On several devices, how sharded parameters are reached.
        shard_attention: On several devices, makes `attend` run on each device's own heads.
        ends: Rows are trees, and `segments` number their tokens, as described in `MaskSpec`; see `hidden_tree`.
    """
    tokens = jnp.asarray(tokens)
    segments = jnp.ones(tokens.shape, jnp.int32) if segments is None else jnp.asarray(segments)
    cache, view = extend_cache(tokens, positions, segments, cache, config)
    view = view._replace(angles=_angles(view.positions, config), k_ends=ends)
    embedded = params["embed"][tokens] if gather is None else gather.lookup(params["embed"], tokens)
    x = embedded * jnp.asarray(config.embed_scale, embedded.dtype)
    x = jnp.where(segments[:, :, None] > 0, x, jnp.zeros((), x.dtype))
    stacked_names = {name for name, parameter in parameters(config).items() if parameter.axes.startswith("n")}
    stacked_names |= {fused_name(names) for names in FUSED_GROUPS}
    layers: PyTree = {name: value for name, value in params.items() if name in stacked_names}
    layers |= layer_constants(config) | (adapter or {})
    attend = attend if shard_attention is None else shard_attention(attend)

    def step(carry, layer: Params):
        x, kv = carry
        if gather is not None:
            layer = gather.layer(layer)
        return run_layer(x, layer, kv, view, config, attend), None

    # The cache is carried and not scanned over, so that a step changes it in place.
    kv = None if cache is None else (cache.keys, cache.values)
    if is_unstacked(params) or (cache is not None and isinstance(cache.keys, tuple)):
        x, kv = _run_unstacked(step, x, kv, layers, config.num_layers)
    else:
        (x, kv), _ = jax.lax.scan(jax.checkpoint(step) if remat else step, (x, kv), layers, unroll=unroll)
    x = rms_norm(x, params["norm"], config)
    x = jnp.where(segments[:, :, None] > 0, x, jnp.zeros((), x.dtype))
    return x, None if cache is None or kv is None else cache.replace(keys=kv[0], values=kv[1])


def hidden_tree(hidden: Callable, params: Params, tokens, positions, ends, **settings) -> Array:
    """Final hidden states [r u d] of the trees of a `Batch`: contexts that share prefixes, each token computed once.

    Tokens are in depth-first order: token j is visible to itself and to those after it, up to `ends[j]`; 0 is padding.
    A token's state depends only on the tokens before it in its context, so contexts with a common prefix share it.
    """
    ends = jnp.asarray(ends)
    number_ru = jnp.where(ends > 0, jnp.arange(1, ends.shape[1] + 1, dtype=jnp.int32), 0)
    return hidden(params, tokens, positions, number_ru, None, ends=ends, **settings)[0]


def _run_unstacked(step: Callable, x: Array, kv: KeysValues | None, layers: Any, count: int) -> tuple[Array, Any]:
    """Run layers one after the other whose parameters or caches are arrays of their own."""
    if kv is not None and not isinstance(kv[0], tuple):
        for index in range(count):
            (x, kv), _ = step((x, kv), {name: value[index] for name, value in layers.items()})
        return x, kv

    @jax.jit  # traced and lowered once, and called for each layer
    def run(x: Array, layer_kv: KeysValues | None, layer: Params) -> tuple[Array, KeysValues | None]:
        return step((x, layer_kv), layer | {"index": 0})[0]

    new_kv = []
    for index in range(count):
        layer_kv = None if kv is None else tuple((side[index],) for side in kv)
        layer = {name: value[index] for name, value in layers.items() if name != "index"}
        x, layer_kv = run(x, layer_kv, layer)
        new_kv.append(layer_kv)
    return x, None if kv is None else tuple(tuple(layer_kv[side][0] for layer_kv in new_kv) for side in (0, 1))


def layer_constants(config: DecoderConfig) -> dict[str, np.ndarray]:
    """What differs between layers and is no parameter, stacked: the layer's index, its window, and its rope."""
    unbounded = np.iinfo(np.int32).max
    return {
        "index": np.arange(config.num_layers, dtype=np.int32),
        "window": np.array([unbounded if window is None else window for window in config.windows], np.int32),
        "rope": np.array([distinct_ropes(config).index(rope) for rope in config.ropes], np.int32),
    }


def distinct_ropes(config: DecoderConfig) -> list[Rope]:
    """The distinct ropes of the layers, in order of first use."""
    return list(dict.fromkeys(config.ropes))


def _angles(positions: Array, config: DecoderConfig) -> tuple[Array, Array]:
    """Cosine and sine of each rope's angles [ropes r s 1 e/2], computed once for all its layers."""
    ropes = distinct_ropes(config)
    frequency = np.stack([rope_frequencies(rope, config.e) for rope in ropes])[:, None, None, None]
    magnitude = np.array([rope.magnitude for rope in ropes], np.float32)[:, None, None, None, None]

    def cos_sin(positions: Array) -> tuple[Array, Array]:
        angle = positions.astype(jnp.float32)[None, :, :, None, None] * frequency
        return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude

    def in_branch(positions: Array) -> tuple[Array, Array]:
        # On a CPU XLA would recompute them for each head and layer, but it does not recompute the result of a branch;
        # this one is always taken, which XLA can't know.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(cos_sin, positions))
        return jax.lax.cond(positions.max() > -2, cos_sin, lambda _: zeros, positions)

    return jax.lax.platform_dependent(positions, cpu=in_branch, default=cos_sin)


def unstack_layers(
    params: Params, *, config: DecoderConfig, fused_groups: Sequence[Sequence[str]] = FUSED_GROUPS
) -> Any:
    """Parameters in the layout of many small steps: a separate array for each layer, matrices of one input fused.

    Slices of a stack would be copied in every step. The unembedding is stored as it is multiplied with, even if it is
    the embedding. Parameters that are in this layout already are returned as they are.
    """
    if is_unstacked(params):
        return params
    declared = parameters(config)
    num_inputs = {name: len(input_axes) for name, (input_axes, _) in matrices(config).items()}
    stacks = {name: value for name, value in params.items() if declared[name].axes.startswith("n")}
    layers = [
        to_decode_layout(dict(zip(stacks, layer, strict=True)), num_inputs, fused_groups)
        for layer in zip(*stacks.values(), strict=True)
    ]
    unembed = to_cpu_layout(params["embed"].T if config.tied else params["unembed"], 1)
    unstacked: dict[str, Any] = {"embed": params["embed"], "norm": params["norm"], "unembed": unembed}
    unstacked |= {name: tuple(layer[name] for layer in layers) for name in layers[0]}
    return unstacked


def is_unstacked(params: Params) -> bool:
    """Whether each layer's parameters are separate arrays, as `unstack_layers` makes them."""
    return isinstance(params["attention_norm"], tuple)


def unembed(params: Params, hidden: Array, *, config: DecoderConfig) -> Array:
    """Logits in float32: [... d] -> [... v]."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    is_tied, is_wide = "unembed" not in params, hidden.dtype == jnp.float32
    if is_wide:
        logits = product_transposed(flat, params["embed"]) if is_tied else apply_linear(flat, params["unembed"])
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
    unstack_on_cpu: bool = False,
    attend: Attend = attend,
) -> Policy:
    """The decoder as pure functions of its parameters.

    Args:
        dtype: Type of the initial parameters and of the cache.
        remat: Recompute each layer in the backward pass.
        unroll: Number of layers compiled in a row (True: all) instead of a loop over them, which makes an update of a
            few small layers a quarter faster on a CPU. True also decodes with unstacked layers.
        unstack_on_cpu: On a CPU, decode with layers whose parameters and caches are arrays of their own: slices of
            stacks would be copied in every step.
        attend: Attention over whole rows, for training: the plain formula, or a kernel (see `attention_kernels`). Over
            a cache it is `attend_cache`, unless `attend` brings a kernel for caches.
    """
    check_config(config)
    hidden_states = partial(hidden, config=config, remat=remat, unroll=unroll, attend=attend)
    has_kernels = isinstance(attend, AttentionKernels)

    def is_unstacked_here() -> bool:  # asks for the platform as late as possible
        return unroll is True or (unstack_on_cpu and not has_kernels and jax.default_backend() == "cpu")

    def init(key: Array) -> Params:
        _, state = nnx.split(Decoder(config, rngs=nnx.Rngs(params=key), dtype=dtype))
        return nnx.to_pure_dict(state)

    def make_decode_cache(rows: int, slots: int) -> Cache:
        return make_cache(rows, slots, config=config, dtype=dtype, stacked=not is_unstacked_here())

    def unstack(params: Params) -> Params:
        if has_kernels and unroll is not True:
            return unstack_layers(params, config=config, fused_groups=())
        return unstack_layers(params, config=config) if is_unstacked_here() else params

    return Policy(
        init=init,
        hidden=hidden_states,
        unembed=partial(unembed, config=config),
        make_cache=make_decode_cache,
        unstack_layers=unstack if unroll is True or unstack_on_cpu or has_kernels else None,
        hidden_tree=partial(hidden_tree, hidden_states),
    )
