"""Held-out splits without tables: a hash of what a task is made of deals it to a split.

A task's *combination* is a short row of integers (say template, operators and letters). Its hash alone says which split
it belongs to, 8 : 1 : 1, so no combination is in two of them, whoever draws it and whenever.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.envs.env import split_index

STARTS = (0, 8, 9, 10)  # of ten hands, train is dealt eight


def hashed(numbers: Array) -> Array:
    """A row of int32 in 32 well mixed bits (murmur3), as int32."""
    mixed = jnp.uint32(len(numbers))
    for number in numbers.astype(jnp.uint32):
        part = number * jnp.uint32(0xCC9E2D51)
        part = (part << 15 | part >> 17) * jnp.uint32(0x1B873593)
        mixed = mixed ^ part
        mixed = (mixed << 13 | mixed >> 19) * 5 + jnp.uint32(0xE6546B64)
    mixed = (mixed ^ mixed >> 16) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> 13) * jnp.uint32(0xC2B2AE35)
    return jax.lax.bitcast_convert_type(mixed ^ mixed >> 16, jnp.int32)


def dealt(combination: Array, split: str) -> Array:
    """Whether the hash deals this combination to this split."""
    index = split_index(split)
    hand = hashed(combination) % 10
    return (hand >= STARTS[index]) & (hand < STARTS[index + 1])


def draw(key: Array, split: str, propose: Callable[[Array], Any], combination: Callable[[Any], Array]) -> Any:
    """The first thing that `propose` makes of this key's numbered keys and the hash deals to the split."""

    def another(tried):
        tries, _, _ = tried
        proposal = propose(jax.random.fold_in(key, tries))
        return tries + 1, proposal, dealt(combination(proposal), split)

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(propose, key))
    start = (jnp.uint32(0), nothing, jnp.zeros((), bool))
    return jax.lax.while_loop(lambda tried: ~tried[2], another, start)[1]
