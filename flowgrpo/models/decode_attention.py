"""Attention of one token a row over a cache as a Pallas kernel for GPUs (Dao et al., 2023, Flash-Decoding).

    softmax(cap(scale q k^T), under `attention.visible`) v

Keys and values are read where they lie, in the cache of all layers, and of each row only as far as it is filled and its
token sees. The slots are divided at fixed places, so that few rows keep a whole GPU busy: a program mixes the values of
one part for the heads that share it, and a second kernel puts the parts together. Neither the places nor the order of a
sum depend on other rows or on how far they are filled (E3).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from flowgrpo.models.attention import LOWEST, Sight, Slots, scale_of
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.flash_attention import LARGEST, NARROWEST, KernelSettings, add_block, finish, nothing_yet, sees

BLOCK = 64  # slots that are multiplied at once; a cache is a whole number of them
BLOCKS = 4  # of a part, which one program goes through
HEADS = 16  # queries that a GPU multiplies at least; fewer that share keys are filled up


def takes(q: Array, k: Array) -> bool:
    """Say whether the kernel is for these queries [r h s e] and keys of a cache [n r k c e]."""
    length, e = q.shape[2:]
    whole = k.shape[3] % BLOCK == 0 and e >= NARROWEST and e & (e - 1) == 0
    return length == 1 and whole and q.dtype in (jnp.bfloat16, jnp.float16)


def attend_slots(
    q: Array, slots: Slots, sight: Sight, config: DecoderConfig, *, interpret: bool = False, block: int = BLOCK
) -> Array:
    """Attend like `attention.attend_cache`, with one query a row: [r h 1 e] -> [r h 1 e].

    Slots that are not filled count as zeros, whatever they hold. `interpret` runs the kernels on any machine; a `block`
    is of so many slots.
    """
    settings = KernelSettings(block, scale_of(config), config.attention_softcap, interpret)
    rows, heads, _, e = q.shape
    q = q.reshape(rows, config.k, heads // config.k, e)
    mixed, weight = _mix_parts(q, slots, sight, settings)
    return _combine_parts(mixed, weight, slots.filled, q, settings).reshape(rows, heads, 1, e)


def _mix_parts(q: Array, slots: Slots, sight: Sight, settings: KernelSettings) -> tuple[Array, Array]:
    """The mean of the values of each part [r k parts g e], and the logarithm of its sum over the keys [r k parts g].

    Parts are filled up to a power of two; those that are not filled with slots are not written.
    """
    (rows, heads, group, e), size = q.shape, settings.block * BLOCKS
    parts = -(-slots.k.shape[3] // size)
    wide = max(HEADS, _power(group))
    row, whole = pl.BlockSpec((1,), lambda _, __, r: (r,)), pl.BlockSpec(memory_space=pl.ANY)
    one, line = pl.BlockSpec((1,), lambda *_: (0,)), pl.BlockSpec((None, size), lambda i, _, r: (r, i))
    shape = (rows, heads, _power(parts), group)
    return settings.launch(
        partial(_part_kernel, group=group),
        "decode_parts",
        e,
        grid=(parts, heads, rows),
        in_specs=[one, one, row, row, row, line, line, _heads_of_row(wide, e), whole, whole],
        out_specs=[
            pl.BlockSpec((None, None, None, wide, e), lambda i, h, r: (r, h, i, 0, 0)),
            pl.BlockSpec((None, None, None, wide), lambda i, h, r: (r, h, i, 0)),
        ],
        out_shape=[jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*shape, e), shape)],
    )(
        *(jnp.asarray(x, jnp.int32).reshape(1) for x in (slots.index, sight.window)),
        *(x.reshape(rows) for x in (slots.filled, sight.q_position, sight.q_segment)),
        sight.k_position,
        sight.k_segment,
        q,
        slots.k,
        slots.v,
    )


def _heads_of_row(wide: int, e: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, wide, e), lambda _, h, r: (r, h, 0, 0))


def _combine_parts(mixed: Array, weight: Array, filled: Array, q: Array, settings: KernelSettings) -> Array:
    """The mean over all parts, in the shape and type of the queries."""
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
    )(filled, mixed, weight)


def _power(x: int) -> int:
    """The power of two that is not smaller."""
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
    weight,
    *,
    settings: KernelSettings,
    group: int,
):
    """The queries of a row that share keys over the blocks of one part that they see, with a running softmax."""
    part, head, row = (pl.program_id(axis) for axis in range(3))
    size = settings.block
    before, own = part * size * BLOCKS, (q_position[...], q_segment[...])
    is_query = jnp.arange(q.shape[0]) < group
    queries = triton.load(q, mask=jnp.broadcast_to(is_query[:, None], q.shape), other=0)

    def look(start, count: int) -> tuple[Array, Array]:
        """Tell which of so many slots are filled, and which are seen."""
        at, is_filled = pl.ds(start, count), before + start + jnp.arange(count) < filled[0]
        position, segment = (triton.load(x.at[at], mask=is_filled, other=0) for x in (k_position, k_segment))
        return is_filled, sees(own, (position, segment, segment), window[0])

    def step(block, running):
        is_filled, seen = look(block * size, size)
        where = index[0], row, head, pl.ds(before + block * size, size), slice(None)
        kept = jnp.broadcast_to(is_filled[:, None], (size, q.shape[1]))
        keys, values = (triton.load(x.at[where], mask=kept, other=0).astype(queries.dtype) for x in (k, v))
        return add_block(running, seen, queries, keys, values, settings)

    # Windows and other segments leave blocks at either end that nothing is seen of.
    seen, number = look(0, size * BLOCKS)[1], jnp.arange(size * BLOCKS)[None]
    first, end = jnp.where(seen, number, LARGEST).min(), jnp.where(seen, number + 1, 0).max()
    running = jax.lax.fori_loop(first // size, (end + size - 1) // size, step, nothing_yet(queries))
    out_of_part, sum_of_part = finish(running)
    kept = is_query & (before < filled[0])
    triton.store(mixed, out_of_part, mask=jnp.broadcast_to(kept[:, None], mixed.shape))
    triton.store(weight, sum_of_part, mask=kept)


def _combine_kernel(filled, mixed, weight, out, *, settings: KernelSettings):
    """The parts of one query; one of which nothing is seen counts for nothing."""
    parts, e = mixed.shape
    written = jnp.arange(parts) * (settings.block * BLOCKS) < filled[0]
    logarithm = triton.load(weight, mask=written, other=LOWEST)
    values = triton.load(mixed, mask=jnp.broadcast_to(written[:, None], (parts, e)), other=0)
    share = jnp.exp2(logarithm - logarithm.max())
    out[...] = ((share[:, None] * values).sum(axis=0) / share.sum()).astype(out.dtype)
