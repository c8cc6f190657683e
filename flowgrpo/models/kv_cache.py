"""The cache of a decoder: where new tokens go, and what they see.

A row's tokens fill its slots from the first on, whatever padding stands between them. Attention reads the slots in
blocks, of which only those that are filled in some row are met. Blocks are larger on accelerators, where a step costs
more than the slots it reads. A TPU writes row by row: it would lay the whole cache out anew for a scatter.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.contracts import Cache, Params
from flowgrpo.models.attention import BLOCK, PRECISE, UNROLLED, Part, Slots, visible
from flowgrpo.models.config import DecoderConfig

WIDE_BLOCKS = (1024, 512, 256)  # of slots, on accelerators: the first that a cache is a whole number of
ALIGNED = 16  # slots that a TPU writes as a whole
ROW_BY_ROW = 64  # rows at most that are written one after the other; each is compiled


def make_cache(rows: int, slots: int, *, config: DecoderConfig, dtype=jnp.float32, stacked: bool = True) -> Cache:
    """An empty cache of static size; more than one block of slots is rounded up to whole blocks.

    Keys and values of all layers are `stacked`; or there is an array for each layer, and for each of its blocks where
    they are few, which takes no copy to read.
    """
    slots = slots if slots <= BLOCK else -(-slots // BLOCK) * BLOCK
    count = 0 if stacked else _blocks_apart(slots)

    def empty() -> Layers:  # arrays of their own, so that each can be donated
        if stacked:
            return jnp.zeros((config.num_layers, rows, config.k, slots, config.e), dtype)
        shape = (rows, config.k, BLOCK if count else slots, config.e)
        arrays = [tuple(jnp.zeros(shape, dtype) for _ in range(count or 1)) for _ in range(config.num_layers)]
        return tuple(blocks if count else blocks[0] for blocks in arrays)

    positions, segments = (jnp.zeros((rows, slots), jnp.int32) for _ in range(2))
    return Cache(empty(), empty(), positions, segments, jnp.zeros(rows, jnp.int32))


def _blocks_apart(slots: int) -> int:
    """Say how many blocks of a layer on its own are arrays: none where there is one, or more than are unrolled."""
    count = slots // BLOCK
    return count if 1 < count <= UNROLLED else 0


class View(NamedTuple):
    """Positions and segments of queries and keys, and slots in a cache: a layer's inputs beside its parameters."""

    positions: Array  # r s
    segments: Array  # r s
    k_positions: Array  # r c: of the keys, which are the same tokens where there is no cache
    k_segments: Array  # r c
    slots: Array | None = None  # r s: of the cache, where there is one, that the tokens go to
    filled: Array | None = None  # r: slots of the cache that are filled; none of a row without real tokens
    apart: int = 0  # how many blocks of a layer are arrays of their own
    k_ends: Array | None = None  # r c: of the keys' subtrees, where the row is a tree of contexts
    angles: tuple[Array, ...] = ()  # cosine and sine of each rope's angles, [ropes r s 1 e/2]


Layer = Array | tuple[Array, ...]  # keys or values of a layer, [r k c e], or an array for each block
Layers = Array | tuple[Layer, ...]  # of all layers, [n r k c e], or of each
Held = tuple[Layers, Layers]


def extend_cache(tokens, positions, segments, cache: Cache | None, config: DecoderConfig) -> tuple[Cache | None, View]:
    """The cache with positions and segments of the new tokens, and what the layers see."""
    real = segments > 0
    count = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    if cache is None:
        positions = count if positions is None else jnp.asarray(positions)
        return None, View(positions, segments, positions, segments)
    positions = count + cache.next[:, None] if positions is None else jnp.asarray(positions)
    # Real tokens move up to the first free slots, whatever padding stands between them; padding goes nowhere.
    slots = jnp.where(real, cache.next[:, None] + count, cache.positions.shape[1])
    rows = jnp.arange(len(tokens))[:, None]
    k_positions = cache.positions.at[rows, slots].set(positions, mode="drop")
    k_segments = cache.segments.at[rows, slots].set(segments, mode="drop")
    held = cache.next + real.sum(axis=1, dtype=jnp.int32)
    filled = jnp.minimum(jnp.where(real.any(axis=1), held, 0), cache.positions.shape[1])
    cache = cache.replace(positions=k_positions, segments=k_segments, next=held)
    apart = _blocks_apart(cache.positions.shape[1]) if isinstance(cache.keys, tuple) else 0
    return cache, View(positions, segments, k_positions, k_segments, slots, filled, apart)


def block_sizes(view: View) -> tuple[int, int]:
    """Count the slots that are attended to at once: on a CPU, and on an accelerator."""
    slots = view.k_positions.shape[1]
    if slots > BLOCK and slots % BLOCK:
        raise ValueError(f"a cache of {slots} slots is no whole number of blocks of {BLOCK}: make it by make_cache")
    own = min(slots, BLOCK)
    return own, own if view.apart else next((size for size in WIDE_BLOCKS if slots % size == 0), own)


def count_blocks(view: View, size: int) -> Array | int:
    """Count the blocks of this size that are filled in any row."""
    assert view.filled is not None
    return 1 if size == view.k_positions.shape[1] else -(-view.filled.max() // size)


def write_cache(held: Held, new: tuple[Array, Array], layer: Params, view: View) -> Held:
    """The tokens' keys and values [r s k e] in their slots of a layer, in place where the cache is donated."""
    assert view.slots is not None
    write = partial(_write_layer, index=layer["index"], slots=view.slots)
    return write(held[0], new[0]), write(held[1], new[1])


def _write_layer(layers: Layers, x: Array, *, index, slots: Array) -> Layers:
    if isinstance(layers, tuple):
        own = layers[index]
        if isinstance(own, tuple):
            parts = enumerate(own)
            own = tuple(_write(part, x, (), _within(slots, number)) for number, part in parts)
        else:
            own = _write(own, x, (), slots)
        return *layers[:index], own, *layers[index + 1 :]
    return _write(layers, x, (index,), slots)


def _within(slots: Array, number: int) -> Array:
    """Slots of a cache as those of one of its blocks, past its end where they are in another."""
    return jnp.where(slots // BLOCK == number, slots % BLOCK, BLOCK)


def _write(own: Array, x: Array, index: tuple, slots: Array) -> Array:
    scatter = partial(_scatter, index=index)
    if len(slots) > ROW_BY_ROW:
        return scatter(own, x, slots)
    return jax.lax.platform_dependent(own, x, slots, tpu=partial(_write_row_by_row, index=index), default=scatter)


def _scatter(own: Array, x: Array, slots: Array, *, index: tuple) -> Array:
    rows = jnp.arange(len(slots))[:, None]
    return own.at[(*index, rows, slice(None), slots)].set(x.astype(own.dtype), mode="drop")


def _write_row_by_row(own: Array, x: Array, slots: Array, *, index: tuple) -> Array:
    """Change an aligned stretch of each row's slots, in which its tokens' are."""
    capacity, new = own.shape[-2], x.shape[1]
    width = min(capacity, ALIGNED if new == 1 else -(-new // ALIGNED) * ALIGNED + ALIGNED)
    sizes = (*(1,) * (len(index) + 1), own.shape[-3], width, own.shape[-1])
    first_r = jnp.minimum(slots.min(axis=1) // ALIGNED * ALIGNED, capacity - width)
    taken_rws = slots[:, None, :] == first_r[:, None, None] + jnp.arange(width)[None, :, None]
    real_rs = slots < capacity
    known = jnp.where(real_rs[:, :, None, None], x, jnp.zeros((), x.dtype)).astype(own.dtype)
    # At most one token goes to a slot, and a product with 1 is exact.
    placed = jnp.einsum("rws,rske->rkwe", taken_rws.astype(own.dtype), known, precision=PRECISE)
    for row in range(len(slots)):
        at = (*index, row, 0, first_r[row], 0)
        was = jax.lax.dynamic_slice(own, at, sizes)
        now = jnp.where(taken_rws[row].any(axis=1)[None, :, None], placed[row], was)
        own = jax.lax.dynamic_update_slice(own, now.reshape(sizes), at)
    return own


def slots_of(held: Held, layer: Params, view: View) -> Slots | None:
    """The slots of a layer as they lie, in the cache of all layers or alone; None where blocks are arrays."""
    assert view.filled is not None
    k, v, index = *held, layer["index"]
    if isinstance(k, tuple) or isinstance(v, tuple):
        k, v, index = k[index], v[index], 0
        if isinstance(k, tuple) or isinstance(v, tuple):
            return None
        k, v = k[None], v[None]
    return Slots(k, v, index, view.filled)


def block(index: Array | int, *, held: Held, layer: Params, view: View, size: int) -> Part:
    """Keys and values of one block of a layer's slots, as they lie, and who sees them."""
    pick = partial(jax.lax.dynamic_slice_in_dim, start_index=index * size, slice_size=size)
    k, v = (_pick_block(layers, layer["index"], index * size, size) for layers in held)
    k_positions, k_segments = pick(view.k_positions, axis=1), pick(view.k_segments, axis=1)
    return k, v, visible(view.positions, k_positions, view.segments, k_segments, layer["window"])


def _pick_block(layers: Layers, index, start: Array | int, size: int) -> Array:
    """So many slots of a layer; where they are all, as they lie."""
    if isinstance(layers, tuple):
        own = layers[index]
        if isinstance(own, tuple):
            assert isinstance(start, int)
            return own[start // size]
        return own if own.shape[2] == size else jax.lax.dynamic_slice_in_dim(own, start, size, 2)
    sizes = (1, *layers.shape[1:3], size, layers.shape[4])
    return jax.lax.dynamic_slice(layers, (index, 0, 0, start, 0), sizes)[0]
