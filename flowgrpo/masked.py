"""Reductions under a mask: statistics of the unmasked entries.

Every reduction under a mask goes through here, for one reason: what is in a masked slot (NaN,
infinity, 1e30) must reach neither the value nor the gradient (law F6), so a slot is replaced before
anything is computed from it. Everything is float32. An empty mask gives 0.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from flowgrpo.types import AnyArray


def fill(x: AnyArray, mask: AnyArray, value: float = 0.0) -> Array:
    """`x` as float32 where `mask`, `value` elsewhere; nothing flows back into masked slots.

    A host array is filled on the host, so that its garbage never reaches a device: `jax_debug_nans` stays usable.
    """
    if isinstance(x, np.ndarray) and not isinstance(mask, Tracer):
        x = np.where(np.asarray(mask), x, value)
    return jnp.where(jnp.asarray(mask), jnp.asarray(x).astype(jnp.float32), jnp.float32(value))


def count(mask: AnyArray, axis=None, keepdims: bool = False) -> Array:
    """Number of unmasked entries (float32)."""
    return jnp.asarray(mask).sum(axis=axis, keepdims=keepdims, dtype=jnp.float32)


def sum(x: AnyArray, mask: AnyArray, axis=None, keepdims: bool = False) -> Array:
    """Sum of the unmasked entries."""
    return fill(x, mask).sum(axis=axis, keepdims=keepdims)


def mean(x: AnyArray, mask: AnyArray, axis=None, keepdims: bool = False) -> Array:
    """Mean of the unmasked entries; 0 if there are none."""
    return sum(x, mask, axis, keepdims) / jnp.maximum(count(mask, axis, keepdims), 1.0)


def variance(x: AnyArray, mask: AnyArray, axis=None, keepdims: bool = False, ddof: int = 0) -> Array:
    """Variance of the unmasked entries; 0 unless there are more than `ddof`."""
    deviation = fill(x, mask) - mean(x, mask, axis, keepdims=True)
    squares = sum(deviation**2, mask, axis, keepdims)
    freedom = count(mask, axis, keepdims) - ddof
    return jnp.where(freedom > 0, squares / jnp.maximum(freedom, 1.0), 0.0)


def varies(x: AnyArray, mask: AnyArray, axis=None, keepdims: bool = False) -> Array:
    """Whether two unmasked entries differ, decided by max > min and not by a small deviation (F4). NaN differs."""
    largest = fill(x, mask, -jnp.inf).max(axis=axis, keepdims=keepdims)
    smallest = fill(x, mask, jnp.inf).min(axis=axis, keepdims=keepdims)
    return ~(largest <= smallest)


def whiten(x: AnyArray, mask: AnyArray, axis=None, *, eps: float = 1e-6) -> Array:
    """Unmasked entries normalised to mean 0 and unbiased deviation 1; 0 if they are all equal."""
    deviation = fill(x, mask) - mean(x, mask, axis, keepdims=True)
    scale = jnp.sqrt(fill(variance(x, mask, axis, True, ddof=1), varies(x, mask, axis, True), 1.0))
    return fill(deviation / (scale + eps), jnp.asarray(mask) & varies(x, mask, axis, True))
