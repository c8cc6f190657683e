"""Loss scaling for gradients in float16, which holds nothing below 6e-8 or above 65,504 (Micikevicius et al., 2018).

    g = grad(scale * loss) / scale        the division in float32

A step whose gradient is not finite is left out, and the scale halved; after `GROW_AFTER` steps in a row that were
taken it is doubled. `with_loss_scale(optimizer)` is an optimizer that remembers the scale, so it is checkpointed like
moments are, and an update finds it there; the state of a run without one is as it ever was. Scales are powers of two:
where nothing overflows or vanishes, the scaled gradient has the digits of the other.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

FIRST = 2.0**16
SMALLEST, LARGEST = 1.0, 2.0**24
GROW_AFTER = 2000  # steps


class ScaledMemory(NamedTuple):
    """An optimizer's memory beside the scale of the loss."""

    scale: Array
    good: Array  # steps that were taken since the scale last changed
    inner: Any  # the optimizer's own


def with_loss_scale(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Make the optimizer remember a scale of the loss; it is given gradients without it."""

    def init(params: Any) -> ScaledMemory:
        return ScaledMemory(jnp.float32(FIRST), jnp.int32(0), optimizer.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ScaledMemory]:
        updates, inner = optimizer.update(updates, state.inner, params)
        return updates, state._replace(inner=inner)

    return optax.GradientTransformation(init, update)


def optimizer_for(dtype: Any, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Choose the optimizer of what computes in this type: with a loss scale in float16, as it is in any other."""
    return with_loss_scale(optimizer) if jnp.dtype(dtype) == jnp.float16 else optimizer


def adjust_scale(memory: ScaledMemory, taken: Array, skipped: Array) -> ScaledMemory:
    """Change the scale after a step that was taken or skipped, or was neither."""
    good = memory.good + taken.astype(jnp.int32)
    grows = good == GROW_AFTER
    grown = jnp.where(grows, jnp.minimum(2 * memory.scale, LARGEST), memory.scale)
    scale = jnp.where(skipped, jnp.maximum(memory.scale / 2, SMALLEST), grown)
    return memory._replace(scale=scale, good=jnp.where(grows | skipped, 0, good))
