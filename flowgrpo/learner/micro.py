"""Micro-batches: a batch's rows, a few at a time; what is computed of them adds up to what the whole gives (F3).

Only rows that are wanted are visited, in as many micro-batches as they fill. Their number is data and not shape, so
that batches of any fill share one program.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.contracts import Scores
from flowgrpo.spread import Spread, abreast, lay, map_rows, sum_rows
from flowgrpo.types import Batch

Score = Callable[[Any, Batch], Scores]  # (params, batch) -> what they say of it


class Visit(NamedTuple):
    """Which rows are visited, `size` at a time (i counts the slots of all micro-batches)."""

    row_i: Array  # the wanted ones first
    wanted: Array  # how many they are
    size: int

    @property
    def trips(self) -> Array:
        """How many micro-batches hold a wanted row."""
        return (self.wanted + self.size - 1) // self.size


def visit(wanted_r: Array, size: int) -> Visit:
    """The wanted rows, in their order, in micro-batches of at most `size`."""
    size = min(size, len(wanted_r))
    row_r = jnp.argsort(~wanted_r, stable=True)
    return Visit(jnp.pad(row_r, (0, -len(row_r) % size)), wanted_r.sum(dtype=jnp.int32), size)


def accumulate(
    function: Callable[[Any, Batch], tuple], shared, batch: Batch, wanted_r: Array, size: int, mesh: Spread = None
) -> tuple:
    """`function(shared, micro-batch)` over the wanted rows: it gives (what is summed, what the largest is kept of).

    Each device of a mesh takes `size` rows at a time.
    """
    return sum_rows(partial(_accumulate, function, size * abreast(mesh), mesh), mesh, shared, batch, wanted_r)


def _accumulate(function, size: int, mesh: Spread, shared, batch: Batch, wanted_r: Array) -> tuple:
    rows = visit(wanted_r, size)
    sums, largest = jax.eval_shape(function, shared, _take(batch, rows, 0)[0])
    start = (
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums),
        jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), largest),
    )

    def add(index, carry):
        more, other = function(shared, lay(_take(batch, rows, index)[0], mesh))
        return jax.tree.map(jnp.add, carry[0], more), jax.tree.map(jnp.maximum, carry[1], other)

    return jax.lax.fori_loop(0, rows.trips, add, start)


def score_rows(score: Score, params, batch: Batch, wanted_r: Array, size: int, mesh: Spread = None) -> Array:
    """Log-probabilities of the wanted rows, 0 in the others; no gradient -> logp_rs."""
    return map_rows(partial(_score_rows, score, size * abreast(mesh), mesh), mesh, params, (batch, wanted_r))


def _score_rows(score: Score, size: int, mesh: Spread, params, pair: tuple[Batch, Array]) -> Array:
    batch, rows = pair[0], visit(pair[1], size)

    def fill(index, logp_rs):
        part, row_i = _take(batch, rows, index)
        logp_is = jax.lax.stop_gradient(score(params, lay(part, mesh)).logp).astype(jnp.float32)
        return logp_rs.at[row_i].set(logp_is, mode="drop")

    return jax.lax.fori_loop(0, rows.trips, fill, jnp.zeros(batch.tokens.shape, jnp.float32))


def _take(batch: Batch, rows: Visit, index) -> tuple[Batch, Array]:
    """Micro-batch number `index`, and where its rows stand; what only fills it up is padding, and stands outside."""
    row_i = jax.lax.dynamic_slice_in_dim(rows.row_i, index * rows.size, rows.size)
    real_i = index * rows.size + jnp.arange(rows.size) < rows.wanted
    part = jax.tree.map(lambda x_rs: jnp.asarray(x_rs)[row_i], batch)
    part = part.replace(segments=jnp.where(real_i[:, None], part.segments, 0))
    return part, jnp.where(real_i, row_i, len(batch.tokens))
