"""Attention: queries, keys, values and who sees whom flow in, mixed values flow out.

    softmax(scale q k^T, under the mask) v        in float32, with grouped heads and an optional soft-cap

`visible` alone decides who sees whom, from positions, segments and window. `attend` (or a kernel in its place)
works on the tokens of one call; `attend_cache` on a cache, block by block and only as far as any row is filled
(Dao et al., 2022, arXiv:2205.14135).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.models.config import DecoderConfig
from flowgrpo.types import BadInput

LOWEST = -1e30  # a logit that no visible one comes near to, and that float32 can subtract

Attend = Callable[[Array, Array, Array, Array, DecoderConfig], Array]


def visible(q_position: Array, k_position: Array, q_segment: Array, k_segment: Array, window: Array | int) -> Array:
    """Whether a query sees a key: same segment, not padding, not later, nearer than `window` -> [r q k]."""
    distance = q_position[:, :, None] - k_position[:, None, :]
    same = (q_segment[:, :, None] == k_segment[:, None, :]) & (q_segment[:, :, None] > 0)
    return same & (distance >= 0) & (distance < window)


def attend(q: Array, k: Array, v: Array, seen: Array, config: DecoderConfig) -> Array:
    """Plain attention: [r h s e], [r k c e], [r s c] -> [r h s e]; a query that sees nothing gives zeros."""
    grouped = _group(q, config)
    logits = _logits(grouped, k, seen, config)
    shares = jnp.where(seen[:, None, None], jax.nn.softmax(logits, axis=-1), 0.0).astype(v.dtype)
    mixed = jnp.einsum("rkgsc,rkce->rkgse", shares, v, preferred_element_type=jnp.float32)
    return mixed.astype(q.dtype).reshape(q.shape)


def fused(implementation: str | None = None) -> Attend:
    """`attend` through `jax.nn.dot_product_attention`: "cudnn" on a GPU, "xla" anywhere, None for JAX's own choice.

    Packed rows stay apart because the kernel is given the whole mask, and not segment ids, which some kernels ignore.
    """
    return partial(_fused, implementation=implementation)


def _fused(q: Array, k: Array, v: Array, seen: Array, config: DecoderConfig, *, implementation) -> Array:
    if config.attention_softcap is not None:
        raise BadInput("no fused attention has the soft-cap that this model's attention needs: use `attend`")
    something = seen.any(axis=-1)
    # A kernel may answer a query that sees nothing with NaN; it is shown everything, and its result thrown away.
    mask = (seen | ~something[:, :, None])[:, None]
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    mixed = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=_scale(config), implementation=implementation)
    return jnp.swapaxes(jnp.where(something[:, :, None, None], mixed, jnp.zeros((), mixed.dtype)), 1, 2)


def attend_cache(q: Array, block_of: Callable[[Array], tuple[Array, Array, Array]], blocks: Array, config) -> Array:
    """The same over the first `blocks` blocks of a cache; `block_of` gives keys, values and mask of one of them.

    Each block is added to a running softmax. One that a row does not see changes nothing of it, not even a bit,
    so a row's result does not depend on how far other rows are filled (E3).
    """
    grouped = _group(q, config)

    def add(index, carry):
        highest, total, mixed = carry
        k, v, seen = block_of(index)
        logits = _logits(grouped, k.astype(q.dtype), seen, config)
        higher = jnp.maximum(highest, logits.max(axis=-1))
        shares = jnp.where(seen[:, None, None], jnp.exp(logits - higher[..., None]), 0.0)
        faded = jnp.exp(highest - higher)
        more = jnp.einsum(
            "rkgsc,rkce->rkgse", shares.astype(q.dtype), v.astype(q.dtype), preferred_element_type=jnp.float32
        )
        return higher, total * faded + shares.sum(axis=-1), mixed * faded[..., None] + more

    lowest = jnp.full(grouped.shape[:-1], LOWEST, jnp.float32)
    start = (lowest, jnp.zeros_like(lowest), jnp.zeros(grouped.shape, jnp.float32))
    _, total, mixed = jax.lax.fori_loop(0, blocks, add, start)
    return (mixed / jnp.where(total > 0, total, 1.0)[..., None]).astype(q.dtype).reshape(q.shape)


def _group(q: Array, config: DecoderConfig) -> Array:
    """[r h s e] -> [r k g s e]."""
    rows, _, length, e = q.shape
    return q.reshape(rows, config.k, config.h // config.k, length, e)


def _logits(grouped: Array, k: Array, seen: Array, config: DecoderConfig) -> Array:
    """Scaled and capped in float32, `LOWEST` where nothing is seen -> [r k g s c]."""
    logits = jnp.einsum("rkgse,rkce->rkgsc", grouped, k, preferred_element_type=jnp.float32) * _scale(config)
    if config.attention_softcap is not None:
        logits = config.attention_softcap * jnp.tanh(logits / config.attention_softcap)
    return jnp.where(seen[:, None, None], logits, LOWEST)


def _scale(config: DecoderConfig) -> float:
    return config.e**-0.5 if config.query_scale is None else config.query_scale
