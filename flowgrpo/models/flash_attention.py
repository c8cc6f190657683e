"""Flash attention over packed rows as a Pallas kernel for GPUs, forward and backward (Dao, 2023, arXiv:2307.08691).

    softmax(cap(scale q k^T), under `attention.visible`) v

The kernels get positions and segments, and no mask, so that no array of queries by keys is ever materialised. Pairs of
blocks that are masked out entirely, because of segments, positions or window, are neither read nor computed: the work
of a packed row is that of its segments. Windows are data, so that layers with different ones share a program.
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

from flowgrpo.models.attention import LOWEST, MaskSpec, attention_scale
from flowgrpo.models.config import DecoderConfig

BLOCK = 128  # queries of a block forward; blocks of keys, and all blocks backward, are half as large
MIN_HEAD_DIM = 16  # a smaller head dimension is padded with zeros
LARGEST = np.iinfo(np.int32).max
LOG2E = math.log2(math.e)  # the kernels compute powers of 2, for which GPUs have an instruction


class KernelSettings(NamedTuple):
    """What is static when a kernel is compiled."""

    block: int  # queries of a block
    scale: float  # of the products of queries and keys
    cap: float | None  # soft-cap of the logits
    interpret: bool  # run on any machine, for tests

    def launch(self, kernel, name: str, e: int, **specs):
        """Make a kernel a function of arrays; `specs` are those of `pl.pallas_call`."""
        params = triton.CompilerParams(num_warps=4 if e <= 64 else 8, num_stages=2)
        kernel = partial(kernel, settings=self)
        return pl.pallas_call(kernel, name=name, compiler_params=params, interpret=self.interpret, **specs)


def flash_rows(
    q: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig, *, interpret: bool = False, block: int = BLOCK
) -> Array:
    """`attention.attend`, multiplying in the dtype of the queries: [r h s e], [r k c e] -> [r h s e].

    Padding is read as zeros, whatever it contains. `interpret` runs the kernels on any machine; `block` is the number
    of queries of a block.
    """
    length, e = q.shape[2:]
    head_dim = max(MIN_HEAD_DIM, 1 << (e - 1).bit_length())
    kernel_mask = _to_kernel_mask(mask, q.shape[0], block)
    keep = mask.q_segment > 0, kernel_mask.k_segment[:, : k.shape[2]] != 0
    q, k, v = (
        _pad(x.astype(q.dtype), real, block, head_dim) for x, real in zip((q, k, v), keep + keep[1:], strict=True)
    )
    out: Array = _flash(
        q, k, v, kernel_mask, KernelSettings(block, attention_scale(config), config.attention_softcap, interpret)
    )
    return out[:, :, :length, :e]


class _KernelMask(NamedTuple):
    """`MaskSpec` as the kernels read it: int32 for each row, padded to whole blocks.

    A key is visible to segments from `k_segment` to `k_end`; without a tree the two are equal.
    """

    q_position: Array
    k_position: Array
    q_segment: Array
    k_segment: Array
    k_end: Array
    window: Array  # [1]


def _to_kernel_mask(mask: MaskSpec, rows: int, block: int) -> _KernelMask:
    def pad(x: Array) -> Array:
        x = jnp.broadcast_to(x, (rows, x.shape[1])).astype(jnp.int32)
        return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)])

    end = mask.k_segment if mask.k_end is None else mask.k_end
    arrays = [pad(x) for x in (mask.q_position, mask.k_position, mask.q_segment, mask.k_segment, end)]
    return _KernelMask(*arrays, jnp.asarray(mask.window, jnp.int32).reshape(1))  # pyright: ignore[reportCallIssue]


def _pad(x: Array, real: Array, block: int, head_dim: int) -> Array:
    """Pad with zeros to whole blocks and to `head_dim`, and zero what is not `real`."""
    x = jnp.where(real[:, None, :, None], x, jnp.zeros((), x.dtype))
    return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % block), (0, head_dim - x.shape[3])])


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(q: Array, k: Array, v: Array, mask: _KernelMask, settings: KernelSettings) -> Array:
    return _flash_forward(q, k, v, mask, settings)[0]


def _flash_forward(q: Array, k: Array, v: Array, mask: _KernelMask, settings: KernelSettings) -> tuple[Array, tuple]:
    rows, heads, length, _ = q.shape
    visible = _visible_blocks(mask, settings.block, settings.block // 2)
    out, logsumexp = settings.launch(
        _forward_kernel,
        "flash_forward",
        q.shape[3],
        grid=(length // settings.block, heads, rows),
        in_specs=[*_query_specs(q, k, settings.block)],
        out_specs=[_head_block(q, settings.block), _per_query_block(settings.block)],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)],
    )(*_block_range(visible), *mask, q, k, v)
    return out, (q, k, v, mask, out, logsumexp)


def _flash_backward(settings: KernelSettings, residuals: tuple, d_out: Array) -> tuple:
    """With probabilities p and d_p = d_out v:  d_v = p d_out,  d_logits = p (d_p - <d_out, out>)."""
    q, k, v, mask, out, logsumexp = residuals
    d_dot_out = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    visible = _visible_blocks(mask, settings.block // 2, settings.block // 2)
    arguments = (mask, q, k, v, d_out, logsumexp, d_dot_out, settings, visible)
    return _query_gradient(*arguments), *_key_gradients(*arguments), None


_flash.defvjp(_flash_forward, _flash_backward)


def _query_gradient(
    mask: _KernelMask, q, k, v, d_out, logsumexp, d_dot_out, settings: KernelSettings, visible: Array
) -> Array:
    rows, heads, length, _ = q.shape
    block = settings.block // 2
    return settings.launch(
        _query_kernel,
        "flash_backward_queries",
        q.shape[3],
        grid=(length // block, heads, rows),
        in_specs=[*_query_specs(q, k, block), _head_block(q, block), _per_query_block(block), _per_query_block(block)],
        out_specs=_head_block(q, block),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(*_block_range(visible), *mask, q, k, v, d_out, logsumexp, d_dot_out)


def _key_gradients(
    mask: _KernelMask, q, k, v, d_out, logsumexp, d_dot_out, settings: KernelSettings, visible: Array
) -> list[Array]:
    rows, heads, length, e = q.shape
    block, group, blocks = settings.block // 2, heads // k.shape[1], k.shape[2] // (settings.block // 2)
    queries = pl.BlockSpec((None, group, length, e), lambda _, h, r: (r, h, 0, 0))
    numbers = pl.BlockSpec((None, group, length), lambda _, h, r: (r, h, 0))
    tile = _head_block(k, block)
    return settings.launch(
        _key_kernel,
        "flash_backward_keys",
        e,
        grid=(blocks, k.shape[1], rows),
        in_specs=[
            *_mask_specs(blocks, _whole_row(length), _row_block(block)),
            queries,
            tile,
            tile,
            queries,
            numbers,
            numbers,
        ],
        out_specs=[tile, tile],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
    )(*_block_range(visible.swapaxes(1, 2)), *mask, q, k, v, d_out, logsumexp, d_dot_out)


def _query_specs(q: Array, k: Array, block: int) -> list[pl.BlockSpec]:
    """Specs of the block ranges, the mask, a block of queries, and all keys and values of their head."""
    (_, heads, length, _), (_, k_heads, keys, e) = q.shape, k.shape
    group = heads // k_heads
    pair = pl.BlockSpec((None, None, keys, e), lambda _, h, r: (r, h // group, 0, 0))
    return [*_mask_specs(length // block, _row_block(block), _whole_row(keys)), _head_block(q, block), pair, pair]


def _mask_specs(blocks: int, queries: pl.BlockSpec, keys: pl.BlockSpec) -> list[pl.BlockSpec]:
    """Specs of the ranges of `blocks` blocks, then of the mask: positions, segments, the keys' ends, the window."""
    window = pl.BlockSpec((1,), lambda *_: (0,))
    return [_whole_row(blocks), _whole_row(blocks), queries, keys, queries, keys, keys, window]


def _head_block(x: Array, block: int) -> pl.BlockSpec:
    """One block and head of [r heads tokens e], by the program's place in the grid."""
    return pl.BlockSpec((None, None, block, x.shape[3]), lambda i, h, r: (r, h, i, 0))


def _per_query_block(block: int) -> pl.BlockSpec:
    """One block and head of [r heads tokens]."""
    return pl.BlockSpec((None, None, block), lambda i, h, r: (r, h, i))


def _row_block(block: int) -> pl.BlockSpec:
    """One block of [r tokens]."""
    return pl.BlockSpec((None, block), lambda i, _, r: (r, i))


def _whole_row(size: int) -> pl.BlockSpec:
    """A whole row of [r size]."""
    return pl.BlockSpec((None, size), lambda _, __, r: (r, 0))


# Pairs of blocks ------------------------------------------------------------------------------------


def _visible_blocks(mask: _KernelMask, queries: int, keys: int) -> Array:
    """Whether any query of a block may see any key of another, by the ranges of their mask -> [r queries keys]."""
    q_low, q_high = _range(mask.q_segment, mask.q_segment, mask.q_segment, queries)
    k_low, k_high = _range(mask.k_segment, mask.k_segment, mask.k_end, keys)
    same = (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
    q_low, q_high = _range(mask.q_segment, mask.q_position, mask.q_position, queries)
    k_low, k_high = _range(mask.k_segment, mask.k_position, mask.k_position, keys)
    near = q_low[:, :, None] - k_high[:, None] < mask.window[0]
    return same & near & (k_low[:, None] <= q_high[:, :, None])


def _range(segment: Array, low: Array, high: Array, block: int) -> tuple[Array, Array]:
    """Lowest and highest number in each block, without padding."""
    real, blocks = segment != 0, (len(segment), -1, block)
    low, high = jnp.where(real, low, LARGEST), jnp.where(real, high, 0)
    return low.reshape(blocks).min(axis=2), high.reshape(blocks).max(axis=2)


def _block_range(visible: Array) -> tuple[Array, Array]:
    """The first visible block along the last axis, and one past the last; both 0 if none is visible."""
    any_visible, count = visible.any(axis=-1), visible.shape[-1]
    first, end = visible.argmax(axis=-1), count - visible[..., ::-1].argmax(axis=-1)
    return tuple(jnp.where(any_visible, x, 0).astype(jnp.int32) for x in (first, end))  # pyright: ignore


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
    logsumexp,
    *,
    settings: KernelSettings,
):
    """Attention of a block of queries over the blocks of keys that it may see, with a running softmax."""
    number, size = pl.program_id(0), settings.block // 2
    queries, q_mask = q[...], (q_position[...], q_segment[...])

    def step(index, running):
        at = pl.ds(index * size, size)
        mask = block_mask(q_mask, (k_position[at], k_segment[at], k_end[at]), window[0])
        return add_block(running, mask, queries, k[at, :], v[at, :], settings)

    running = jax.lax.fori_loop(first[number], end[number], step, empty_softmax(queries))
    mixed, logsumexp[...] = finish(running)
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
    logsumexp,
    d_dot_out,
    d_q,
    *,
    settings: KernelSettings,
):
    """The gradient of a block of queries."""
    number, size = pl.program_id(0), settings.block // 2
    queries, d_mixed, q_mask = q[...], d_out[...], (q_position[...], q_segment[...])
    by_query = (logsumexp[...], d_dot_out[...])

    def step(index, total):
        at = pl.ds(index * size, size)
        mask, keys = block_mask(q_mask, (k_position[at], k_segment[at], k_end[at]), window[0]), k[at, :]
        _, d_logits = _block_gradients(mask, queries, keys, v[at, :], d_mixed, by_query, settings)
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
    logsumexp,
    d_dot_out,
    d_k,
    d_v,
    *,
    settings: KernelSettings,
):
    """The gradients of a block of keys and values, summed over all heads that share them."""
    number, size = pl.program_id(0), settings.block // 2
    keys, values, k_mask = k[...], v[...], (k_position[...], k_segment[...], k_end[...])

    def step(index, totals, head):
        total_k, total_v = totals
        at = pl.ds(index * size, size)
        mask = block_mask((q_position[at], q_segment[at]), k_mask, window[0])
        queries, d_mixed = q[head, at, :], d_out[head, at, :]
        by_query = (logsumexp[head, at], d_dot_out[head, at])
        probs, d_logits = _block_gradients(mask, queries, keys, values, d_mixed, by_query, settings)
        total_k = total_k + triton.dot(d_logits.astype(queries.dtype), queries, trans_a=True)
        return total_k, total_v + triton.dot(probs.astype(d_mixed.dtype), d_mixed, trans_a=True)

    def of_head(head, totals):
        return jax.lax.fori_loop(first[number], end[number], partial(step, head=head), totals)

    empty = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(keys.shape, jnp.float32))
    total_k, total_v = jax.lax.fori_loop(0, q.shape[0], of_head, empty)
    d_k[...] = (total_k * settings.scale).astype(d_k.dtype)
    d_v[...] = total_v.astype(d_v.dtype)


def block_mask(queries: tuple[Array, Array], keys: tuple[Array, Array, Array], window: Array) -> Array:
    """`attention.visible` for two blocks: (position, segment) of queries, (position, first, last segment) of keys."""
    (q_position, q_segment), (k_position, k_first, k_last) = queries, keys
    distance = q_position[:, None] - k_position[None, :]
    same = (k_first[None, :] <= q_segment[:, None]) & (q_segment[:, None] <= k_last[None, :])
    return same & (q_segment[:, None] > 0) & (distance >= 0) & (distance < window)


def empty_softmax(queries: Array) -> tuple[Array, Array, Array]:
    """An empty running softmax of queries [q e]: highest logit, sum of exponentials, sum of weighted values."""
    length, e = queries.shape
    return jnp.full(length, LOWEST), jnp.zeros(length, jnp.float32), jnp.zeros((length, e), jnp.float32)


def add_block(
    running: tuple[Array, Array, Array], mask: Array, queries: Array, k: Array, v: Array, settings: KernelSettings
) -> tuple[Array, Array, Array]:
    """The running softmax after one more block of keys and values; one that is not seen changes no bit."""
    highest, total, mixed = running
    logits = jnp.where(mask, _logits(queries, k, settings) * LOG2E, LOWEST)
    higher = jnp.maximum(highest, logits.max(axis=1))
    probs = jnp.where(mask, jnp.exp2(logits - higher[:, None]), 0.0)
    decay = jnp.exp2(highest - higher)
    mixed = mixed * decay[:, None] + triton.dot(probs.astype(v.dtype), v)
    return higher, total * decay + probs.sum(axis=1), mixed


def finish(running: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """The mean of the values, and the logsumexp to base 2 over the keys."""
    highest, total, mixed = running
    total = jnp.where(total > 0, total, 1.0)
    return mixed / total[:, None], highest + jnp.log2(total)


def _logits(queries: Array, keys: Array, settings: KernelSettings) -> Array:
    logits = triton.dot(queries, keys, trans_b=True) * settings.scale
    return logits if settings.cap is None else settings.cap * jnp.tanh(logits / settings.cap)


def _block_gradients(
    mask, queries, keys, values, d_mixed, by_query: tuple, settings: KernelSettings
) -> tuple[Array, Array]:
    """Probabilities of a block, and the gradient of its logits before they are scaled."""
    logsumexp, d_dot_out = by_query
    logits = _logits(queries, keys, settings)
    probs = jnp.where(mask, jnp.exp2(logits * LOG2E - logsumexp[:, None]), 0.0)
    d_logits = jnp.where(mask, probs * (triton.dot(d_mixed, values, trans_b=True) - d_dot_out[:, None]), 0.0)
    if settings.cap is not None:
        d_logits *= 1.0 - (logits / settings.cap) ** 2
    return probs, d_logits
