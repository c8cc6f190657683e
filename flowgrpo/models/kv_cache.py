"""The cache of a decoder: where new tokens go, and what they see.

A row's tokens fill its slots from the first on, whatever padding stands between them. Attention reads the slots in
blocks, of which only those that are filled in some row are met.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.contracts import Cache, Params
from flowgrpo.models.attention import BLOCK, Part, visible
from flowgrpo.models.config import DecoderConfig


def make_cache(rows: int, slots: int, *, config: DecoderConfig, dtype=jnp.float32, stacked: bool = True) -> Cache:
    """An empty cache of static size; more than one block of slots is rounded up to whole blocks.

    Keys and values of all layers are `stacked`, or there is an array for each layer, which takes no copy to read.
    """
    slots = slots if slots <= BLOCK else -(-slots // BLOCK) * BLOCK

    def empty(*shape: int) -> Array | tuple[Array, ...]:  # arrays of their own, so that each can be donated
        if stacked:
            return jnp.zeros((config.num_layers, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    turned = not stacked and _turns(config)
    keys = empty(rows, config.k, *((config.e, slots) if turned else (slots, config.e)))
    values = empty(rows, config.k, slots, config.e)
    positions, segments = (jnp.zeros((rows, slots), jnp.int32) for _ in range(2))
    return Cache(keys, values, positions, segments, jnp.zeros(rows, jnp.int32))


def _turns(config: DecoderConfig) -> bool:
    """Whether keys of layers on their own lie [r k e c]: products with them are twice as fast on a CPU.

    They are not where one query of a wide head is multiplied, which is a product with a vector.
    """
    return config.h > config.k or config.e < 64


class View(NamedTuple):
    """Positions and segments of queries and keys, and slots in a cache: a layer's inputs beside its parameters."""

    positions: Array  # r s
    segments: Array  # r s
    k_positions: Array  # r c: of the keys, which are the same tokens where there is no cache
    k_segments: Array  # r c
    slots: Array | None = None  # r s: of the cache, where there is one, that the tokens go to
    blocks: Array | int = 0  # of the cache, that are filled in any row of these tokens
    turned: bool = False  # whether the cache's keys are [r k e c]
    angles: tuple[Array, ...] = ()  # cosine and sine of each rope's angles, [ropes r s 1 e/2]


Layers = Array | tuple[Array, ...]  # keys or values of all layers, [n r k c e], or an array for each
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
    filled = jnp.minimum(jnp.where(real.any(axis=1), held, 0).max(), cache.positions.shape[1])
    cache = cache.replace(positions=k_positions, segments=k_segments, next=held)
    size = _block_size(cache.positions)
    blocks = 1 if size == cache.positions.shape[1] else -(-filled // size)
    turned = isinstance(cache.keys, tuple) and _turns(config)
    return cache, View(positions, segments, k_positions, k_segments, slots, blocks, turned)


def _block_size(x_rc: Array) -> int:
    slots = x_rc.shape[1]
    if slots > BLOCK and slots % BLOCK:
        raise ValueError(f"a cache of {slots} slots is no whole number of blocks of {BLOCK}: make it by make_cache")
    return min(slots, BLOCK)


def write_cache(held: Held, new: tuple[Array, Array], layer: Params, view: View) -> Held:
    """The tokens' keys and values [r s k e] in their slots of a layer, in place where the cache is donated."""
    assert view.slots is not None
    rows, keys, values = jnp.arange(len(view.slots))[:, None], *held
    place = (rows, slice(None), view.slots)
    k_place = (rows, slice(None), slice(None), view.slots) if view.turned else place
    return _write(keys, new[0], layer["index"], k_place), _write(values, new[1], layer["index"], place)


def _write(layers: Layers, x: Array, index, place: tuple) -> Layers:
    if isinstance(layers, tuple):
        own = layers[index].at[place].set(x.astype(layers[index].dtype), mode="drop")
        return *layers[:index], own, *layers[index + 1 :]
    return layers.at[(index, *place)].set(x.astype(layers.dtype), mode="drop")


def block(index: Array, *, held: Held, layer: Params, view: View) -> Part:
    """Keys and values of one block of a layer's slots, as they lie, and who sees them."""
    size = _block_size(view.k_positions)
    pick = partial(jax.lax.dynamic_slice_in_dim, start_index=index * size, slice_size=size)
    k = _pick_block(held[0], layer["index"], index * size, size, axis=3 if view.turned else 2)
    v = _pick_block(held[1], layer["index"], index * size, size, axis=2)
    k_positions, k_segments = pick(view.k_positions, axis=1), pick(view.k_segments, axis=1)
    return k, v, visible(view.positions, k_positions, view.segments, k_segments, layer["window"])


def _pick_block(layers: Layers, index, start: Array, size: int, *, axis: int) -> Array:
    """So many slots of a layer, which lie along this axis of it; where they are all, as they lie."""
    if isinstance(layers, tuple):
        own = layers[index]
        return own if own.shape[axis] == size else jax.lax.dynamic_slice_in_dim(own, start, size, axis)
    starts, sizes = [index, 0, 0, 0, 0], [1, *layers.shape[1:]]
    starts[1 + axis], sizes[1 + axis] = start, size
    return jax.lax.dynamic_slice(layers, starts, sizes)[0]
