"""Loss scaling for gradients in float16, which holds nothing below 6e-8 or above 65,504 (Micikevicius et al., 2018).

    g = grad(scale * loss) / scale        the division in float32

A step whose gradient is not finite is skipped, and the scale halved; after `GROW_AFTER` consecutive steps that were
taken it is doubled. `with_loss_scale(optimizer)` keeps the scale in the optimizer state, so it is checkpointed with the
moments, and an update reads it there; other runs have no such state. Scales are powers of two: unless something
overflows or vanishes, the scaled gradient has the digits of the unscaled one.
"""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import DTypeLike

from flowgrpo.types import Params, PyTree

FIRST = 2.0**16
SMALLEST, LARGEST = 1.0, 2.0**24
GROW_AFTER = 2000  # steps


class ScaledState(NamedTuple):
    """Optimizer state with the loss scale."""

    scale: Array
    good: Array  # number of steps taken since the scale last changed
    inner: PyTree  # state of the wrapped optimizer


def with_loss_scale(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with a loss scale in its state; it receives unscaled gradients."""

    def init(params: Params) -> ScaledState:
        return ScaledState(jnp.float32(FIRST), jnp.int32(0), optimizer.init(params))

    def update(updates: PyTree, state: PyTree, params: Params = None) -> tuple[PyTree, ScaledState]:
        updates, inner = optimizer.update(updates, state.inner, params)
        return updates, state._replace(inner=inner)

    return optax.GradientTransformation(init, update)


def optimizer_for(dtype: DTypeLike, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer for a compute dtype: with a loss scale in float16, unchanged in any other."""
    return with_loss_scale(optimizer) if jnp.dtype(dtype) == jnp.float16 else optimizer


def adjust_scale(state: ScaledState, taken: Array, skipped: Array) -> ScaledState:
    """Update the scale after a step that was taken, skipped, or neither."""
    good = state.good + taken.astype(jnp.int32)
    grows = good == GROW_AFTER
    grown = jnp.where(grows, jnp.minimum(2 * state.scale, LARGEST), state.scale)
    scale = jnp.where(skipped, jnp.maximum(state.scale / 2, SMALLEST), grown)
    return state._replace(scale=scale, good=jnp.where(grows | skipped, 0, good))
