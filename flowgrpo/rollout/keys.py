"""Keys of hosted rollouts: all that trajectories draw from, derived at once, and as numbers that a record can hold.

The environment's randomness comes from `fold_in(key, 0)`, that of turn t from `fold_in(key, 1 + t)`, as in the compiled
rollout. One program derives them all, because a dispatch for each turn would cost more than many a turn.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.types import BadInput


def words_of(keys) -> list[tuple[int, ...]]:
    """The keys [n] of `jax.random.key` as numbers."""
    if not len(keys):
        return []
    keys = jnp.stack(list(keys)) if isinstance(keys, (list, tuple)) else keys
    own = jax.random.key_impl(jax.random.key(0))
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.ndim != 1 or jax.random.key_impl(keys) != own:
        raise BadInput(
            f"keys of a rollout are one axis of typed keys of {own}, as jax.random.split(jax.random.key(0), n)"
        )
    return [tuple(words) for words in np.asarray(jax.random.key_data(keys)).tolist()]


def derive(words: Sequence[tuple[int, ...]], turns: int) -> np.ndarray:
    """For each key the words of the environment's, then those of every turn's: [n, 1 + turns, words]."""
    if not words:
        return np.zeros((0, turns + 1, 0), np.uint32)
    # Padded to a power of two, and not to a small one, so that few sizes are compiled.
    words_nw = np.zeros((max(64, 1 << (len(words) - 1).bit_length()), len(words[0])), np.uint32)
    words_nw[: len(words)] = words
    return np.asarray(_derive(words_nw, turns=turns))[: len(words)]


def key_of(words_w: np.ndarray) -> Array:
    """The key of these words."""
    return jax.random.wrap_key_data(words_w)  # type: ignore[arg-type]


@partial(jax.jit, static_argnames="turns")
def _derive(words_nw: Array, *, turns: int) -> Array:
    fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))
    return jax.random.key_data(fold(jax.random.wrap_key_data(words_nw), jnp.arange(turns + 1)))
