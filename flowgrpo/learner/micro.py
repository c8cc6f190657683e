"""Micro-batches: a batch's rows, a few at a time; what is computed of them adds up to what the whole gives (F3).

Rows that matter are moved to the front, and only as many micro-batches are visited as hold one of them.
The number is data and not shape, so that batches of any fill share one program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.contracts import Scores
from flowgrpo.types import Batch

INDEX_FIELDS = ("trajectory", "turn", "slot", "group")

Score = Callable[[Any, Batch], Scores]  # (params, batch) -> what they say of it


def pad_rows(batch: Batch, multiple: int) -> Batch:
    """The batch with empty rows at its end, so that their number is a multiple."""
    short = -batch.tokens.shape[0] % multiple
    if short == 0:
        return batch

    def pad(x_rs, value=0) -> Array:
        return jnp.pad(x_rs, ((0, short), (0, 0)), constant_values=value)

    index = {name: pad(getattr(batch, name), -1) for name in INDEX_FIELDS}
    return jax.tree.map(pad, batch).replace(**index)


def sort_rows(batch: Batch, rank_r: Array) -> Batch:
    """The rows by rank, equal ones in their order."""
    order_r = jnp.argsort(rank_r, stable=True)
    return jax.tree.map(lambda x_rs: jnp.asarray(x_rs)[order_r], batch)


def trips(wanted_r: Array, size: int) -> Array:
    """How many micro-batches of `size` rows it takes to visit the wanted rows, which come first."""
    return (wanted_r.sum(dtype=jnp.int32) + size - 1) // size


def accumulate(function: Callable[[Batch], tuple], batch: Batch, count: Array, size: int) -> tuple:
    """`function` over the first `count` micro-batches: it gives (what is summed, what the largest is kept of)."""
    sums, largest = jax.eval_shape(function, _rows(batch, 0, size))
    start = (
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums),
        jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), largest),
    )

    def add(index, carry):
        more, other = function(_rows(batch, index, size))
        return jax.tree.map(jnp.add, carry[0], more), jax.tree.map(jnp.maximum, carry[1], other)

    return jax.lax.fori_loop(0, count, add, start)


def score_rows(score: Score, params, batch: Batch, count: Array, size: int) -> Array:
    """Log-probabilities of the first `count` micro-batches, 0 in the rows after them; no gradient -> logp_rs."""

    def fill(index, logp_rs):
        logp = jax.lax.stop_gradient(score(params, _rows(batch, index, size)).logp)
        return jax.lax.dynamic_update_slice_in_dim(logp_rs, logp.astype(jnp.float32), index * size, axis=0)

    return jax.lax.fori_loop(0, count, fill, jnp.zeros(batch.tokens.shape, jnp.float32))


def _rows(batch: Batch, index, size: int) -> Batch:
    """Micro-batch number `index`."""
    return jax.tree.map(lambda x_rs: jax.lax.dynamic_slice_in_dim(jnp.asarray(x_rs), index * size, size), batch)
