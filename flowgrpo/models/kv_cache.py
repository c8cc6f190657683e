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
from flowgrpo.models.attention import BLOCK, visible
from flowgrpo.models.config import DecoderConfig


def make_cache(rows: int, slots: int, *, config: DecoderConfig, dtype=jnp.float32) -> Cache:
    """An empty cache of static size; more than one block of slots is rounded up to whole blocks."""
    slots = slots if slots <= BLOCK else -(-slots // BLOCK) * BLOCK
    shape = (config.num_layers, rows, config.k, slots, config.e)
    # Arrays of their own, so that each can be donated.
    keys, values = (jnp.zeros(shape, dtype) for _ in range(2))
    positions, segments = (jnp.zeros((rows, slots), jnp.int32) for _ in range(2))
    return Cache(keys, values, positions, segments, jnp.zeros(rows, jnp.int32))


class View(NamedTuple):
    """Positions and segments of queries and keys, and slots in a cache: a layer's inputs beside its parameters."""

    positions: Array  # r s
    segments: Array  # r s
    k_positions: Array  # r c: of the keys, which are the same tokens where there is no cache
    k_segments: Array  # r c
    slots: Array | None = None  # r s: of the cache, where there is one, that the tokens go to
    blocks: Array | int = 0  # of the cache, that are filled in any row of these tokens


Held = tuple[Array, Array]  # keys and values of all layers, [n r k c e]


def extend_cache(tokens, positions, segments, cache: Cache | None) -> tuple[Cache | None, View]:
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
    blocks = -(-filled // _block_size(cache.positions))
    return cache, View(positions, segments, k_positions, k_segments, slots, blocks)


def _block_size(x_rc: Array) -> int:
    slots = x_rc.shape[1]
    if slots > BLOCK and slots % BLOCK:
        raise ValueError(f"a cache of {slots} slots is no whole number of blocks of {BLOCK}: make it by make_cache")
    return min(slots, BLOCK)


def write_cache(held: Held, new: Held, layer: Array, slots: Array) -> Held:
    """The tokens' keys and values [r s k e] in their slots of a layer, in place where the cache is donated."""
    rows = jnp.arange(len(slots))[:, None]
    pairs = zip(held, new, strict=True)
    keys, values = (old.at[layer, rows, :, slots].set(x.astype(old.dtype), mode="drop") for old, x in pairs)
    return keys, values


def block(index: Array, *, held: Held, layer: Params, view: View) -> tuple[Array, Array, Array]:
    """Keys and values [r k c e] of one block of a layer's slots, and who sees them."""
    size = _block_size(view.k_positions)
    pick = partial(jax.lax.dynamic_slice_in_dim, start_index=index * size, slice_size=size)
    k, v = (
        jax.lax.dynamic_slice(x, (layer["index"], 0, 0, index * size, 0), (1, *x.shape[1:3], size, x.shape[4]))[0]
        for x in held
    )
    k_positions, k_segments = pick(view.k_positions, axis=1), pick(view.k_segments, axis=1)
    return k, v, visible(view.positions, k_positions, view.segments, k_segments, layer["window"])
