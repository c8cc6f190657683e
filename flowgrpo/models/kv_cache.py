"""The KV cache of a decoder: which slots new tokens are written to, and how attention reads it.

A row's tokens fill its slots from the first on, without gaps for padding. Attention reads the slots in blocks, and only
those that some row has filled. Blocks are larger on accelerators, where a step costs more than the slots it reads. A
TPU is written to row by row: for a scatter it would change the layout of the whole cache.

A call may be for some rows only (`Cache.rows`), each of which continues at its own `Cache.next`; these rows are read
and written in place, and only as far as they are filled. Such a row may be named twice, for tokens that follow each
other.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.contracts import Cache
from flowgrpo.models.attention import BLOCK, MAX_UNROLLED_BLOCKS, PRECISE, KVBlock, LayerCache, visible
from flowgrpo.models.config import DecoderConfig
from flowgrpo.types import Params

WIDE_BLOCKS = (1024, 512, 256)  # slots, on accelerators: the first that divides the cache
ALIGNED = 16  # slots that a TPU writes as a whole
ROW_BY_ROW = 64  # largest number of rows that are written one after the other; each is compiled

Layer = Array | tuple[Array, ...]  # keys or values of a layer, [r k c e], or an array for each block
Layers = Array | tuple[Layer, ...]  # of all layers, [n r k c e], or of each
KeysValues = tuple[Layers, Layers]


def make_cache(rows: int, slots: int, *, config: DecoderConfig, dtype=jnp.float32, stacked: bool = True) -> Cache:
    """An empty cache of static size; more than one block of slots is rounded up to whole blocks.

    `stacked` keeps keys and values of all layers in one array each. Otherwise each layer has its own arrays, one for
    each block if there are few, which can be read without a copy.
    """
    slots = slots if slots <= BLOCK else -(-slots // BLOCK) * BLOCK
    count = 0 if stacked else _num_block_arrays(slots)

    def empty() -> Layers:  # separate arrays, so that each can be donated
        if stacked:
            return jnp.zeros((config.num_layers, rows, config.k, slots, config.e), dtype)
        shape = (rows, config.k, BLOCK if count else slots, config.e)
        layers = [tuple(jnp.zeros(shape, dtype) for _ in range(count or 1)) for _ in range(config.num_layers)]
        return tuple(blocks if count else blocks[0] for blocks in layers)

    positions, segments = (jnp.zeros((rows, slots), jnp.int32) for _ in range(2))
    return Cache(empty(), empty(), positions, segments, jnp.zeros(rows, jnp.int32))


def _num_block_arrays(slots: int) -> int:
    """Number of blocks of an unstacked layer that are arrays of their own; 0 if it has one block, or too many."""
    count = slots // BLOCK
    return count if 1 < count <= MAX_UNROLLED_BLOCKS else 0


class CacheView(NamedTuple):
    """What a layer reads besides its parameters: positions and segments of queries and keys, and slots of the cache."""

    positions: Array  # r s
    segments: Array  # r s
    k_positions: Array  # r c: of the keys; without a cache these are the same tokens
    k_segments: Array  # r c
    slots: Array | None = None  # r s: slot of the cache that each token is written to; None: no cache
    filled: Array | None = None  # r: number of filled slots of the cache; 0 for a row without real tokens
    block_arrays: int = 0  # number of blocks of a layer that are arrays of their own
    k_ends: Array | None = None  # r c: ends of the keys' subtrees, if the row is a tree of contexts
    angles: tuple[Array, ...] = ()  # cosine and sine of each rope's angles, [ropes r s 1 e/2]
    rows: Array | None = None  # r: rows of the cache that the call is for; None: all, in order


def extend_cache(
    tokens, positions, segments, cache: Cache | None, config: DecoderConfig
) -> tuple[Cache | None, CacheView]:
    """The cache with positions and segments of the new tokens (not yet their keys and values), and the layers' view."""
    real = segments > 0
    count = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    if cache is None:
        positions = count if positions is None else jnp.asarray(positions)
        return None, CacheView(positions, segments, positions, segments)
    positions = count + cache.next[:, None] if positions is None else jnp.asarray(positions)
    rows, capacity = cache.rows, cache.positions.shape[1]
    # Real tokens go to the first free slots, whatever padding there is between them; padding is not written.
    slots = jnp.where(real, cache.next[:, None] + count, capacity)
    at = (jnp.arange(len(tokens)) if rows is None else rows)[:, None], slots
    k_positions = cache.positions.at[at].set(positions, mode="drop")
    k_segments = cache.segments.at[at].set(segments, mode="drop")
    next_slot = cache.next + real.sum(axis=1, dtype=jnp.int32)
    cache = cache.replace(positions=k_positions, segments=k_segments, next=next_slot)
    if rows is not None:
        k_positions, k_segments = (x.at[rows].get(mode="clip") for x in (k_positions, k_segments))
    filled = jnp.minimum(jnp.where(real.any(axis=1), next_slot, 0), capacity)
    block_arrays = _num_block_arrays(capacity) if isinstance(cache.keys, tuple) else 0
    return cache, CacheView(positions, segments, k_positions, k_segments, slots, filled, block_arrays, rows=rows)


def block_sizes(view: CacheView) -> tuple[int, int]:
    """Number of slots that are attended to at once: on a CPU, and on an accelerator."""
    slots = view.k_positions.shape[1]
    if slots > BLOCK and slots % BLOCK:
        raise ValueError(f"a cache of {slots} slots is no whole number of blocks of {BLOCK}: make it by make_cache")
    cpu_size = min(slots, BLOCK)
    if view.block_arrays:
        return cpu_size, cpu_size
    return cpu_size, next((size for size in WIDE_BLOCKS if slots % size == 0), cpu_size)


def num_filled_blocks(view: CacheView, size: int) -> Array | int:
    """Number of blocks of this size that any row has filled."""
    assert view.filled is not None
    return 1 if size == view.k_positions.shape[1] else -(-view.filled.max() // size)


# Writing ----------------------------------------------------------------------------------------------


def write_cache(kv: KeysValues, new: tuple[Array, Array], layer: Params, view: CacheView) -> KeysValues:
    """Write the new tokens' keys and values [r s k e] to their slots of a layer, in place if the cache is donated."""
    assert view.slots is not None
    write = partial(_write_layer, index=layer["index"], slots=view.slots, rows=view.rows)
    return write(kv[0], new[0]), write(kv[1], new[1])


def _write_layer(layers: Layers, x: Array, *, index, slots: Array, rows: Array | None) -> Layers:
    if not isinstance(layers, tuple):
        return _write(layers, x, (index,), slots, rows)
    layer = layers[index]
    if isinstance(layer, tuple):  # slots past the end of a block are not written
        layer = tuple(
            _write(block, x, (), jnp.where(slots // BLOCK == number, slots % BLOCK, BLOCK), rows)
            for number, block in enumerate(layer)
        )
    else:
        layer = _write(layer, x, (), slots, rows)
    return *layers[:index], layer, *layers[index + 1 :]


def _write(cache: Array, x: Array, index: tuple, slots: Array, rows: Array | None) -> Array:
    """`cache[index, rows, :, slots] = x`, row by row on a TPU if there are few rows."""
    scatter = partial(_scatter, index=index, rows=rows)
    if len(slots) > ROW_BY_ROW:
        return scatter(cache, x, slots)
    by_row = partial(_write_row_by_row, index=index, rows=rows)
    return jax.lax.platform_dependent(cache, x, slots, tpu=by_row, default=scatter)


def _scatter(cache: Array, x: Array, slots: Array, *, index: tuple, rows: Array | None) -> Array:
    rows = (jnp.arange(len(slots)) if rows is None else rows)[:, None]
    return cache.at[(*index, rows, slice(None), slots)].set(x.astype(cache.dtype), mode="drop")


def _write_row_by_row(cache: Array, x: Array, slots: Array, *, index: tuple, rows: Array | None) -> Array:
    """Update an aligned window of each row's slots that contains those of its tokens."""
    capacity, new = cache.shape[-2], x.shape[1]
    width = min(capacity, ALIGNED if new == 1 else -(-new // ALIGNED) * ALIGNED + ALIGNED)
    sizes = (*(1,) * (len(index) + 1), cache.shape[-3], width, cache.shape[-1])
    first_r = jnp.minimum(slots.min(axis=1) // ALIGNED * ALIGNED, capacity - width)
    written_rws = slots[:, None, :] == first_r[:, None, None] + jnp.arange(width)[None, :, None]
    real_rs = slots < capacity
    real_x = jnp.where(real_rs[:, :, None, None], x, jnp.zeros((), x.dtype)).astype(cache.dtype)
    # At most one token goes to a slot, and a product with 1 is exact.
    placed = jnp.einsum("rws,rske->rkwe", written_rws.astype(cache.dtype), real_x, precision=PRECISE)
    for i in range(len(slots)):
        # The index of a row that does not exist is clipped to another row, which is left unchanged.
        at = (*index, i if rows is None else rows[i], 0, first_r[i], 0)
        before = jax.lax.dynamic_slice(cache, at, sizes)
        after = jnp.where(written_rws[i].any(axis=1)[None, :, None], placed[i], before)
        cache = jax.lax.dynamic_update_slice(cache, after.reshape(sizes), at)
    return cache


# Reading ----------------------------------------------------------------------------------------------


def layer_cache(kv: KeysValues, layer: Params, view: CacheView) -> LayerCache | None:
    """One layer of the cache without a copy, for a kernel; None if its blocks are separate arrays, or for some rows."""
    assert view.filled is not None
    if view.rows is not None:
        return None
    k, v, index = *kv, layer["index"]
    if isinstance(k, tuple) or isinstance(v, tuple):
        k, v, index = k[index], v[index], 0
        if isinstance(k, tuple) or isinstance(v, tuple):
            return None
        k, v = k[None], v[None]
    return LayerCache(k, v, index, view.filled)


def read_block(index: Array | int, *, kv: KeysValues, layer: Params, view: CacheView, size: int) -> KVBlock:
    """Keys and values of one block of a layer's slots, with their mask."""
    pick = partial(jax.lax.dynamic_slice_in_dim, start_index=index * size, slice_size=size)
    k, v = (_read_slots(layers, layer["index"], index * size, size, view.rows) for layers in kv)
    k_positions, k_segments = pick(view.k_positions, axis=1), pick(view.k_segments, axis=1)
    return k, v, visible(view.positions, k_positions, view.segments, k_segments, layer["window"])


def _read_slots(layers: Layers, index, start: Array | int, size: int, rows: Array | None) -> Array:
    """`size` slots of a layer from `start` on, of all rows or of `rows`; without a copy if they are the whole array."""
    if isinstance(layers, tuple):
        layer = layers[index]
        if isinstance(layer, tuple):
            assert isinstance(start, int)
            layer, start = layer[start // size], 0
        if rows is None and layer.shape[2] == size:
            return layer
        cache, index = layer[None], 0
    else:
        cache = layers
    sizes = (1, 1 if rows is not None else cache.shape[1], cache.shape[2], size, cache.shape[4])
    if rows is None:
        return jax.lax.dynamic_slice(cache, (index, 0, 0, start, 0), sizes)[0]
    return jax.vmap(lambda row: jax.lax.dynamic_slice(cache, (index, row, 0, start, 0), sizes)[0, 0])(rows)
