"""Copies of cache rows, in place: the filled part of one row becomes the prefix of another."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.contracts import Cache

BLOCK = 128  # slots that are copied at once, of an array that has more


def copy_rows(cache: Cache, source_n: Array, target_n: Array, length_n: Array, count: Array | int) -> Cache:
    """Copy the first `length` tokens of row `source` to row `target`, for the first `count` of these copies.

    They are made one after the other. A row may be its own source, and then keeps its prefix.
    """
    capacity = cache.positions.shape[1]

    def label(i, carry):
        positions, segments, next_r = carry
        segments_c = jnp.where(jnp.arange(capacity) < length_n[i], segments[source_n[i]], 0)
        positions = positions.at[target_n[i]].set(positions[source_n[i]])
        return positions, segments.at[target_n[i]].set(segments_c), next_r.at[target_n[i]].set(length_n[i])

    labels = jax.lax.fori_loop(0, count, label, (cache.positions, cache.segments, cache.next))
    length_n = jnp.where((jnp.arange(len(source_n)) < count) & (source_n != target_n), length_n, 0)
    copy = partial(_copy_layers, source_n=source_n, target_n=target_n, length_n=length_n)
    positions, segments, next_r = labels
    return Cache(copy(cache.keys), copy(cache.values), positions, segments, next_r)


def _copy_layers(layers, *, source_n: Array, target_n: Array, length_n: Array):
    """Keys or values: one array of all layers, or one of each layer, which may be a tuple of blocks of slots."""
    copy = partial(_copy_slots, source_n=source_n, target_n=target_n)
    if not isinstance(layers, tuple):
        return copy(layers, length_n=length_n)
    copied = []
    for layer in layers:
        if isinstance(layer, tuple):
            offsets = [sum(block.shape[-2] for block in layer[:number]) for number in range(len(layer))]
            blocks = zip(offsets, layer, strict=True)
            copied.append(tuple(copy(block, length_n=length_n - offset) for offset, block in blocks))
        else:
            copied.append(copy(layer, length_n=length_n))
    return tuple(copied)


def _copy_slots(x: Array, *, source_n: Array, target_n: Array, length_n: Array) -> Array:
    """The first `length` slots, rounded up to blocks, of each row [r k c e] or [n r k c e]."""
    *layers, _, heads, capacity, width = x.shape
    size = BLOCK if capacity % BLOCK == 0 else capacity
    sizes = (*layers, 1, heads, size, width)
    blocks_n = -(-jnp.clip(length_n, 0, capacity) // size)
    order_n = jnp.argsort(blocks_n == 0, stable=True)  # those that copy anything, in their order

    def copy_row(number, x: Array) -> Array:
        i = order_n[number]

        def place(row, block) -> tuple:
            return (*(0 for _ in layers), row, 0, block * size, 0)

        def copy_block(block, x: Array) -> Array:
            part = jax.lax.dynamic_slice(x, place(source_n[i], block), sizes)
            return jax.lax.dynamic_update_slice(x, part, place(target_n[i], block))

        return jax.lax.fori_loop(0, blocks_n[i], copy_block, x)

    # With an axis added, a cache of one head would be copied as a whole before and after.
    return jax.lax.fori_loop(0, (blocks_n > 0).sum(), copy_row, x)
