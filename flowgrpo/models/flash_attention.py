"""Flash attention over packed rows as a Pallas kernel for GPUs, forward and backward (Dao, 2023, arXiv:2307.08691).

    softmax(cap(scale q k^T), under `attention.visible`) v

The kernel is given positions and segments, and not a mask, so nothing of queries by keys is ever written down. Blocks
that can't meet, because of their segments, positions or window, are neither read nor computed: the work of a packed row
is that of its segments. Windows are data, so that layers with different ones share a program.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from flowgrpo.models.attention import LOWEST, Sight, scale_of
from flowgrpo.models.config import DecoderConfig

BLOCK = 128  # queries of a block forward; it has half as many keys, and backward half as many of both
NARROWEST = 16  # head dimension that is multiplied; a smaller one is filled up with zeros
LARGEST = np.iinfo(np.int32).max
LOG2E = math.log2(math.e)  # the kernels take powers of 2, which GPUs have an instruction for


class KernelSettings(NamedTuple):
    """All that is known when a kernel is compiled."""

    block: int
    scale: float
    cap: float | None
    interpret: bool

    def launch(self, kernel, name: str, e: int, **how):
        """A kernel as a function of arrays."""
        params = triton.CompilerParams(num_warps=4 if e <= 64 else 8, num_stages=2)
        kernel = partial(kernel, settings=self)
        return pl.pallas_call(kernel, name=name, compiler_params=params, interpret=self.interpret, **how)


def flash_rows(
    q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig, *, interpret: bool = False, block: int = BLOCK
) -> Array:
    """Attend like `attention.attend`, multiplying in the type of the queries: [r h s e], [r k c e] -> [r h s e].

    Padding counts as zeros, whatever it holds. `interpret` runs the kernels on any machine; a `block` is of so many
    queries.
    """
    length, e = q.shape[2:]
    wide = max(NARROWEST, 1 << (e - 1).bit_length())
    laid = _lay(sight, q.shape[0], block)
    keep = sight.q_segment > 0, laid.k_segment[:, : k.shape[2]] != 0
    q, k, v = (_fill(x.astype(q.dtype), real, block, wide) for x, real in zip((q, k, v), keep + keep[1:], strict=True))
    out: Array = _flash(q, k, v, laid, KernelSettings(block, scale_of(config), config.attention_softcap, interpret))
    return out[:, :, :length, :e]


class _Laid(NamedTuple):
    """`Sight` as the kernels read it: int32 of every row, in whole blocks.

    Segments from `k_segment` to `k_end` see a key; without a tree, these are the same one.
    """

    q_position: Array
    k_position: Array
    q_segment: Array
    k_segment: Array
    k_end: Array
    window: Array  # [1]


def _lay(sight: Sight, rows: int, block: int) -> _Laid:
    def lay(x: Array) -> Array:
        x = jnp.broadcast_to(x, (rows, x.shape[1])).astype(jnp.int32)
        return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)])

    end = sight.k_segment if sight.k_end is None else sight.k_end
    of_tokens = [lay(x) for x in (sight.q_position, sight.k_position, sight.q_segment, sight.k_segment, end)]
    return _Laid(*of_tokens, jnp.asarray(sight.window, jnp.int32).reshape(1))  # pyright: ignore[reportCallIssue]


def _fill(x: Array, keep: Array, block: int, wide: int) -> Array:
    """Fill up to a head dimension that the kernels take, with zeros where nothing is to be kept."""
    x = jnp.where(keep[:, None, :, None], x, jnp.zeros((), x.dtype))
    return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % block), (0, wide - x.shape[3])])


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(q: Array, k: Array, v: Array, sight: _Laid, settings: KernelSettings) -> Array:
    return _flash_forward(q, k, v, sight, settings)[0]


def _flash_forward(q: Array, k: Array, v: Array, sight: _Laid, settings: KernelSettings) -> tuple[Array, tuple]:
    rows, heads, length, _ = q.shape
    meets = _meets(sight, settings.block, settings.block // 2)
    out, weight = settings.launch(
        _forward_kernel,
        "flash_forward",
        q.shape[3],
        grid=(length // settings.block, heads, rows),
        in_specs=[*_for_queries(q, k, settings.block)],
        out_specs=[_tile(q, settings.block), _numbers(settings.block)],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)],
    )(*_span(meets), *sight, q, k, v)
    return out, (q, k, v, sight, out, weight)


def _flash_backward(settings: KernelSettings, kept: tuple, d_out: Array) -> tuple:
    """With shares p and d_p = d_out v:  d_v = p d_out,  d_logits = p (d_p - <d_out, out>)."""
    q, k, v, sight, out, weight = kept
    through = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    given = (sight, q, k, v, d_out, weight, through, settings, _meets(sight, settings.block // 2, settings.block // 2))
    return _query_gradient(*given), *_key_gradients(*given), None


_flash.defvjp(_flash_forward, _flash_backward)


def _query_gradient(sight: _Laid, q, k, v, d_out, weight, through, settings: KernelSettings, meets: Array) -> Array:
    rows, heads, length, _ = q.shape
    block = settings.block // 2
    return settings.launch(
        _query_kernel,
        "flash_backward_queries",
        q.shape[3],
        grid=(length // block, heads, rows),
        in_specs=[*_for_queries(q, k, block), _tile(q, block), _numbers(block), _numbers(block)],
        out_specs=_tile(q, block),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(*_span(meets), *sight, q, k, v, d_out, weight, through)


def _key_gradients(
    sight: _Laid, q, k, v, d_out, weight, through, settings: KernelSettings, meets: Array
) -> list[Array]:
    rows, heads, length, e = q.shape
    block, group, blocks = settings.block // 2, heads // k.shape[1], k.shape[2] // (settings.block // 2)
    queries = pl.BlockSpec((None, group, length, e), lambda _, h, r: (r, h, 0, 0))
    numbers = pl.BlockSpec((None, group, length), lambda _, h, r: (r, h, 0))
    tile = _tile(k, block)
    return settings.launch(
        _key_kernel,
        "flash_backward_keys",
        e,
        grid=(blocks, k.shape[1], rows),
        in_specs=[*_for_sight(blocks, _whole(length), _line(block)), queries, tile, tile, queries, numbers, numbers],
        out_specs=[tile, tile],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
    )(*_span(meets.swapaxes(1, 2)), *sight, q, k, v, d_out, weight, through)


def _for_queries(q: Array, k: Array, block: int) -> list[pl.BlockSpec]:
    """Spans, sight, a block of queries, and all keys and values of their head."""
    (_, heads, length, _), (_, k_heads, keys, e) = q.shape, k.shape
    group = heads // k_heads
    pair = pl.BlockSpec((None, None, keys, e), lambda _, h, r: (r, h // group, 0, 0))
    return [*_for_sight(length // block, _line(block), _whole(keys)), _tile(q, block), pair, pair]


def _for_sight(blocks: int, queries: pl.BlockSpec, keys: pl.BlockSpec) -> list[pl.BlockSpec]:
    """The spans of so many blocks; positions and segments of queries and keys, the keys' ends, and the window."""
    window = pl.BlockSpec((1,), lambda *_: (0,))
    return [_whole(blocks), _whole(blocks), queries, keys, queries, keys, keys, window]


def _tile(x: Array, block: int) -> pl.BlockSpec:
    """One block and head of [r heads tokens e], by the numbers of the grid."""
    return pl.BlockSpec((None, None, block, x.shape[3]), lambda i, h, r: (r, h, i, 0))


def _numbers(block: int) -> pl.BlockSpec:
    """One block and head of [r heads tokens]."""
    return pl.BlockSpec((None, None, block), lambda i, h, r: (r, h, i))


def _line(block: int) -> pl.BlockSpec:
    """One block of [r tokens]."""
    return pl.BlockSpec((None, block), lambda i, _, r: (r, i))


def _whole(size: int) -> pl.BlockSpec:
    """All of a row of [r size]."""
    return pl.BlockSpec((None, size), lambda _, __, r: (r, 0))


# Which blocks meet ------------------------------------------------------------------------------------


def _meets(sight: _Laid, queries: int, keys: int) -> Array:
    """Say whether any query of a block may see any key of another, by the ends of their ranges -> [r queries keys]."""
    q_low, q_high = _range(sight.q_segment, sight.q_segment, sight.q_segment, queries)
    k_low, k_high = _range(sight.k_segment, sight.k_segment, sight.k_end, keys)
    same = (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
    q_low, q_high = _range(sight.q_segment, sight.q_position, sight.q_position, queries)
    k_low, k_high = _range(sight.k_segment, sight.k_position, sight.k_position, keys)
    near = q_low[:, :, None] - k_high[:, None] < sight.window[0]
    return same & near & (k_low[:, None] <= q_high[:, :, None])


def _range(segment: Array, low: Array, high: Array, block: int) -> tuple[Array, Array]:
    """Lowest and highest number of what is no padding in each block."""
    real, blocks = segment != 0, (len(segment), -1, block)
    low, high = jnp.where(real, low, LARGEST), jnp.where(real, high, 0)
    return low.reshape(blocks).min(axis=2), high.reshape(blocks).max(axis=2)


def _span(meets: Array) -> tuple[Array, Array]:
    """The first block that is met along the last axis, and the one behind the last; both 0 where none is."""
    found, count = meets.any(axis=-1), meets.shape[-1]
    first, last = meets.argmax(axis=-1), count - meets[..., ::-1].argmax(axis=-1)
    return tuple(jnp.where(found, x, 0).astype(jnp.int32) for x in (first, last))  # pyright: ignore


# The kernels ------------------------------------------------------------------------------------------


def _forward_kernel(
    first,
    end,
    q_position,
    k_position,
    q_segment,
    k_segment,
    k_end,
    window,
    q,
    k,
    v,
    out,
    weight,
    *,
    settings: KernelSettings,
):
    """A block of queries over the blocks of keys that it meets, with a running softmax."""
    number, size = pl.program_id(0), settings.block // 2
    queries, own = q[...], (q_position[...], q_segment[...])

    def step(index, running):
        at = pl.ds(index * size, size)
        seen = sees(own, (k_position[at], k_segment[at], k_end[at]), window[0])
        return add_block(running, seen, queries, k[at, :], v[at, :], settings)

    running = jax.lax.fori_loop(first[number], end[number], step, nothing_yet(queries))
    mixed, weight[...] = finish(running)
    out[...] = mixed.astype(out.dtype)


def _query_kernel(
    first,
    end,
    q_position,
    k_position,
    q_segment,
    k_segment,
    k_end,
    window,
    q,
    k,
    v,
    d_out,
    weight,
    through,
    d_q,
    *,
    settings: KernelSettings,
):
    """The gradient of a block of queries."""
    number, size = pl.program_id(0), settings.block // 2
    queries, mixed, own = q[...], d_out[...], (q_position[...], q_segment[...])
    given = (weight[...], through[...])

    def step(index, total):
        at = pl.ds(index * size, size)
        seen, keys = sees(own, (k_position[at], k_segment[at], k_end[at]), window[0]), k[at, :]
        _, d_logits = _backward(seen, queries, keys, v[at, :], mixed, given, settings)
        return total + triton.dot(d_logits.astype(keys.dtype), keys)

    total = jax.lax.fori_loop(first[number], end[number], step, jnp.zeros(queries.shape, jnp.float32))
    d_q[...] = (total * settings.scale).astype(d_q.dtype)


def _key_kernel(
    first,
    end,
    q_position,
    k_position,
    q_segment,
    k_segment,
    k_end,
    window,
    q,
    k,
    v,
    d_out,
    weight,
    through,
    d_k,
    d_v,
    *,
    settings: KernelSettings,
):
    """The gradients of a block of keys and its values, of all heads that share them."""
    number, size = pl.program_id(0), settings.block // 2
    keys, values, own = k[...], v[...], (k_position[...], k_segment[...], k_end[...])

    def step(index, totals, head):
        total_k, total_v = totals
        at = pl.ds(index * size, size)
        seen = sees((q_position[at], q_segment[at]), own, window[0])
        queries, mixed = q[head, at, :], d_out[head, at, :]
        given = (weight[head, at], through[head, at])
        shares, d_logits = _backward(seen, queries, keys, values, mixed, given, settings)
        total_k = total_k + triton.dot(d_logits.astype(queries.dtype), queries, trans_a=True)
        return total_k, total_v + triton.dot(shares.astype(mixed.dtype), mixed, trans_a=True)

    def of_head(head, totals):
        return jax.lax.fori_loop(first[number], end[number], partial(step, head=head), totals)

    empty = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(keys.shape, jnp.float32))
    total_k, total_v = jax.lax.fori_loop(0, q.shape[0], of_head, empty)
    d_k[...] = (total_k * settings.scale).astype(d_k.dtype)
    d_v[...] = total_v.astype(d_v.dtype)


def sees(queries: tuple[Array, Array], keys: tuple[Array, Array, Array], window: Array) -> Array:
    """`attention.visible` of two blocks; keys have a position, and the first and the last segment that see them."""
    (q_position, q_segment), (k_position, k_first, k_last) = queries, keys
    distance = q_position[:, None] - k_position[None, :]
    meets = (k_first[None, :] <= q_segment[:, None]) & (q_segment[:, None] <= k_last[None, :])
    return meets & (q_segment[:, None] > 0) & (distance >= 0) & (distance < window)


def nothing_yet(queries: Array) -> tuple[Array, Array, Array]:
    """Start a running softmax of queries [q e]: its highest logit, its total and what it mixes."""
    length, e = queries.shape
    return jnp.full(length, LOWEST), jnp.zeros(length, jnp.float32), jnp.zeros((length, e), jnp.float32)


def add_block(
    running: tuple[Array, Array, Array], seen: Array, queries: Array, k: Array, v: Array, settings: KernelSettings
) -> tuple[Array, Array, Array]:
    """Add a block of keys and values; one that is not seen changes no bit."""
    highest, total, mixed = running
    logits = jnp.where(seen, _logits(queries, k, settings) * LOG2E, LOWEST)
    higher = jnp.maximum(highest, logits.max(axis=1))
    shares = jnp.where(seen, jnp.exp2(logits - higher[:, None]), 0.0)
    faded = jnp.exp2(highest - higher)
    mixed = mixed * faded[:, None] + triton.dot(shares.astype(v.dtype), v)
    return higher, total * faded + shares.sum(axis=1), mixed


def finish(running: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """Compute the mean of the values, and the logarithm to base 2 of the sum over the keys."""
    highest, total, mixed = running
    total = jnp.where(total > 0, total, 1.0)
    return mixed / total[:, None], highest + jnp.log2(total)


def _logits(queries: Array, keys: Array, settings: KernelSettings) -> Array:
    logits = triton.dot(queries, keys, trans_b=True) * settings.scale
    return logits if settings.cap is None else settings.cap * jnp.tanh(logits / settings.cap)


def _backward(seen, queries, keys, values, d_mixed, given: tuple, settings: KernelSettings) -> tuple[Array, Array]:
    """Shares of a block, and the gradient of its logits before they are scaled."""
    weight, through = given
    logits = _logits(queries, keys, settings)
    shares = jnp.where(seen, jnp.exp2(logits * LOG2E - weight[:, None]), 0.0)
    d_logits = jnp.where(seen, shares * (triton.dot(d_mixed, values, trans_b=True) - through[:, None]), 0.0)
    if settings.cap is not None:
        d_logits *= 1.0 - (logits / settings.cap) ** 2
    return shares, d_logits
