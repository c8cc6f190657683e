"""Attention of one token a row over a cache as a Pallas kernel for GPUs (Dao et al., 2023, Flash-Decoding).

    softmax(cap(scale q k^T), under `attention.visible`) v

Keys and values are read in place, from the cache of all layers, and only those slots of a row that are filled and
visible to its token. The slots are split into parts at fixed places, so that few rows keep a whole GPU busy: a program
attends to one part for the heads that share it, and a second kernel combines the parts. Neither the places nor the
order of a sum depend on other rows or on how far they are filled (E3).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from flowgrpo.models.attention import LOWEST, LayerCache, MaskSpec, attention_scale
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.flash_attention import (
    LARGEST,
    MIN_HEAD_DIM,
    KernelSettings,
    add_block,
    block_mask,
    empty_softmax,
    finish,
)

BLOCK = 64  # slots that are multiplied at once; a cache must be a whole number of blocks
PART_BLOCKS = 4  # blocks of a part, which one program attends to
MIN_QUERIES = 16  # of a matrix product on a GPU; fewer queries that share keys are padded


def supports(q: Array, k: Array) -> bool:
    """Whether the kernel supports these queries [r h s e] and keys of a cache [n r k c e]."""
    length, e = q.shape[2:]
    shape_fits = k.shape[3] % BLOCK == 0 and e >= MIN_HEAD_DIM and e & (e - 1) == 0
    return length == 1 and shape_fits and q.dtype in (jnp.bfloat16, jnp.float16)


def flash_decode(
    q: Array, cache: LayerCache, mask: MaskSpec, config: DecoderConfig, *, interpret: bool = False, block: int = BLOCK
) -> Array:
    """`attention.attend_cache` with one query a row: [r h 1 e] -> [r h 1 e].

    Slots that are not filled are read as zeros, whatever they contain. `interpret` runs the kernels on any machine;
    `block` is the number of slots of a block.
    """
    settings = KernelSettings(block, attention_scale(config), config.attention_softcap, interpret)
    rows, heads, _, e = q.shape
    q = q.reshape(rows, config.k, heads // config.k, e)
    mixed, logsumexp = _attend_parts(q, cache, mask, settings)
    return _combine_parts(mixed, logsumexp, cache.filled, q, settings).reshape(rows, heads, 1, e)


def _attend_parts(q: Array, cache: LayerCache, mask: MaskSpec, settings: KernelSettings) -> tuple[Array, Array]:
    """The mean of the values of each part [r k parts g e], and its logsumexp to base 2 [r k parts g].

    The number of parts is padded to a power of two; parts without filled slots are not written.
    """
    (rows, heads, group, e), size = q.shape, settings.block * PART_BLOCKS
    parts = -(-cache.k.shape[3] // size)
    queries = max(MIN_QUERIES, _power_of_two(group))
    per_row, whole_cache = pl.BlockSpec((1,), lambda _, __, r: (r,)), pl.BlockSpec(memory_space=pl.ANY)
    scalar, part_of_row = pl.BlockSpec((1,), lambda *_: (0,)), pl.BlockSpec((None, size), lambda i, _, r: (r, i))
    query_block = pl.BlockSpec((None, None, queries, e), lambda _, h, r: (r, h, 0, 0))
    shape = (rows, heads, _power_of_two(parts), group)
    return settings.launch(
        partial(_part_kernel, group=group),
        "decode_parts",
        e,
        grid=(parts, heads, rows),
        in_specs=[scalar, scalar, *[per_row] * 3, *[part_of_row] * 2, query_block, whole_cache, whole_cache],
        out_specs=[
            pl.BlockSpec((None, None, None, queries, e), lambda i, h, r: (r, h, i, 0, 0)),
            pl.BlockSpec((None, None, None, queries), lambda i, h, r: (r, h, i, 0)),
        ],
        out_shape=[jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*shape, e), shape)],
    )(
        *(jnp.asarray(x, jnp.int32).reshape(1) for x in (cache.index, mask.window)),
        *(x.reshape(rows) for x in (cache.filled, mask.q_position, mask.q_segment)),
        mask.k_position,
        mask.k_segment,
        q,
        cache.k,
        cache.v,
    )


def _combine_parts(mixed: Array, logsumexp: Array, filled: Array, q: Array, settings: KernelSettings) -> Array:
    """The mean over all parts, in the shape and dtype of the queries."""
    (rows, heads, group, e), parts = q.shape, mixed.shape[2]
    return settings.launch(
        _combine_kernel,
        "decode_combine",
        e,
        grid=(group, heads, rows),
        in_specs=[
            pl.BlockSpec((1,), lambda _, __, r: (r,)),
            pl.BlockSpec((None, None, parts, None, e), lambda g, h, r: (r, h, 0, g, 0)),
            pl.BlockSpec((None, None, parts, None), lambda g, h, r: (r, h, 0, g)),
        ],
        out_specs=pl.BlockSpec((None, None, None, e), lambda g, h, r: (r, h, g, 0)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(filled, mixed, logsumexp)


def _power_of_two(x: int) -> int:
    """The smallest power of two that is not less than `x`."""
    return 1 << (x - 1).bit_length()


# The kernels ------------------------------------------------------------------------------------------


def _part_kernel(
    index,
    window,
    filled,
    q_position,
    q_segment,
    k_position,
    k_segment,
    q,
    k,
    v,
    mixed,
    logsumexp,
    *,
    settings: KernelSettings,
    group: int,
):
    """Attention of the queries of a row that share keys to the visible blocks of one part, with a running softmax."""
    part, head, row = (pl.program_id(axis) for axis in range(3))
    size = settings.block
    before, q_mask = part * size * PART_BLOCKS, (q_position[...], q_segment[...])  # slots before this part
    is_query = jnp.arange(q.shape[0]) < group
    queries = triton.load(q, mask=jnp.broadcast_to(is_query[:, None], q.shape), other=0)

    def slot_masks(start, count: int) -> tuple[Array, Array]:
        """Which of `count` slots are filled, and which are seen."""
        at, is_filled = pl.ds(start, count), before + start + jnp.arange(count) < filled[0]
        position, segment = (triton.load(x.at[at], mask=is_filled, other=0) for x in (k_position, k_segment))
        return is_filled, block_mask(q_mask, (position, segment, segment), window[0])

    def step(block, running):
        is_filled, mask = slot_masks(block * size, size)
        at = index[0], row, head, pl.ds(before + block * size, size), slice(None)
        loaded = jnp.broadcast_to(is_filled[:, None], (size, q.shape[1]))
        keys, values = (triton.load(x.at[at], mask=loaded, other=0).astype(queries.dtype) for x in (k, v))
        return add_block(running, mask, queries, keys, values, settings)

    # Because of windows and other segments, blocks at either end may be masked out entirely.
    mask, number = slot_masks(0, size * PART_BLOCKS)[1], jnp.arange(size * PART_BLOCKS)[None]
    first, end = jnp.where(mask, number, LARGEST).min(), jnp.where(mask, number + 1, 0).max()
    running = jax.lax.fori_loop(first // size, (end + size - 1) // size, step, empty_softmax(queries))
    part_mean, part_logsumexp = finish(running)
    stored = is_query & (before < filled[0])
    triton.store(mixed, part_mean, mask=jnp.broadcast_to(stored[:, None], mixed.shape))
    triton.store(logsumexp, part_logsumexp, mask=stored)


def _combine_kernel(filled, mixed, logsumexp, out, *, settings: KernelSettings):
    """Combine the parts of one query; a part of which nothing is seen has no weight."""
    parts, e = mixed.shape
    written = jnp.arange(parts) * (settings.block * PART_BLOCKS) < filled[0]
    part_logsumexp = triton.load(logsumexp, mask=written, other=LOWEST)
    values = triton.load(mixed, mask=jnp.broadcast_to(written[:, None], (parts, e)), other=0)
    weight = jnp.exp2(part_logsumexp - part_logsumexp.max())
    out[...] = ((weight[:, None] * values).sum(axis=0) / weight.sum()).astype(out.dtype)
