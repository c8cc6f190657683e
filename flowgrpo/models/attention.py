"""Attention: queries, keys, values and who sees whom flow in, mixed values flow out.

    softmax(scale q k^T, under the mask) v        in float32, with grouped heads and an optional soft-cap

`visible` alone decides who sees whom, from positions, segments and window. `attend` (or a kernel in its place)
works on the tokens of one call; `attend_cache` on a cache, only as far as any row is filled. Both go block by block
with a running softmax (Dao et al., 2022, arXiv:2205.14135).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.models.config import DecoderConfig
from flowgrpo.types import BadInput

BLOCK = 128  # keys that are attended to at once
COLUMNS = 8  # of a product that is used for a sum; with a single one it would be a product with a vector
UNROLLED = 8  # so many blocks are compiled one after the other; more are looped over
LOWEST = -1e30  # a logit that no visible one comes near to, and that float32 can subtract

Part = tuple[Array, Array, Array]  # keys and values [r k c e] of a block, and who sees them [r s c]
Attend = Callable[[Array, Array, Array, Array, DecoderConfig], Array]


def visible(q_position: Array, k_position: Array, q_segment: Array, k_segment: Array, window: Array | int) -> Array:
    """Whether a query sees a key: same segment, not padding, not later, nearer than `window` -> [r q k]."""
    distance = q_position[:, :, None] - k_position[:, None, :]
    same = (q_segment[:, :, None] == k_segment[:, None, :]) & (q_segment[:, :, None] > 0)
    return same & (distance >= 0) & (distance < window)


def attend(q: Array, k: Array, v: Array, seen: Array, config: DecoderConfig) -> Array:
    """Plain attention: [r h s e], [r k c e], [r s c] -> [r h s e]; a query that sees nothing gives zeros.

    In the same blocks as `attend_cache`, so that what is sampled and what is scored are summed in one order (F7).
    """
    grouped = _group(q, config)
    add = partial(_add, grouped=grouped, config=config)
    blocks = -(-k.shape[2] // BLOCK)
    if blocks <= UNROLLED:
        running = _empty(grouped)
        for at in range(0, k.shape[2], BLOCK):
            part = slice(at, at + BLOCK)
            running = add(running, (k[:, :, part], v[:, :, part], seen[:, :, part]))
    else:
        parts = tuple(_in_blocks(x, blocks) for x in (k, v, seen))
        # What a block mixes is computed again in the backward pass: no logits are ever [s c].
        again = jax.checkpoint(lambda running, part: (add(running, part), None))
        running, _ = jax.lax.scan(again, _empty(grouped), parts)
    return _finish(running, q)


def _in_blocks(x: Array, blocks: int) -> Array:
    """[r _ c ...] -> [blocks r _ BLOCK ...], what is missing from the last being zeros that nobody sees."""
    short = blocks * BLOCK - x.shape[2]
    x = jnp.pad(x, [(0, 0), (0, 0), (0, short)] + [(0, 0)] * (x.ndim - 3))
    return jnp.moveaxis(x.reshape(*x.shape[:2], blocks, BLOCK, *x.shape[3:]), 2, 0)


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


def attend_cache(q: Array, block_of: Callable[[Array], Part], blocks: Array, config: DecoderConfig) -> Array:
    """The same over the first `blocks` blocks of a cache; `block_of` gives keys, values and mask of one of them.

    A block that a row does not see changes nothing of it, not even a bit, so a row's result does not depend on how far
    other rows are filled (E3).
    """
    grouped = _group(q, config)

    def add(index, running):
        return _add(running, block_of(index), grouped=grouped, config=config)

    return _finish(jax.lax.fori_loop(0, blocks, add, _empty(grouped)), q)


class _Running(NamedTuple):
    """A softmax and what it mixes, over the blocks so far."""

    highest: Array  # r k g s
    total: Array  # r k g s: of exp(logit - highest)
    mixed: Array  # r k g s e: the same sum, over values


def _empty(grouped: Array) -> _Running:
    lowest = jnp.full(grouped.shape[:-1], LOWEST, jnp.float32)
    return _Running(lowest, jnp.zeros_like(lowest), jnp.zeros(grouped.shape, jnp.float32))


def _add(running: _Running, part: Part, *, grouped: Array, config: DecoderConfig) -> _Running:
    """One block more."""
    k, v = (x.astype(grouped.dtype) for x in part[:2])
    seen = part[2]
    logits = _logits(grouped, k, seen, config)
    # What is subtracted cancels; its gradient need not be taken.
    highest = jax.lax.stop_gradient(jnp.maximum(running.highest, logits.max(axis=-1)))
    shares = jnp.where(seen[:, None, None], jnp.exp(logits - highest[..., None]), 0.0)
    faded = jnp.exp(running.highest - highest)
    mixed = jnp.einsum("rkgsc,rkce->rkgse", shares.astype(v.dtype), v, preferred_element_type=jnp.float32)
    # The shares are summed by a product like that with the values: its order is the same for every row and query, and
    # that of a sum over an axis, or of a product with a vector, is not.
    ones = jnp.ones((*v.shape[:3], COLUMNS), jnp.float32)
    total = jnp.einsum("rkgsc,rkce->rkgse", shares, ones)[..., 0]
    return _Running(highest, running.total * faded + total, running.mixed * faded[..., None] + mixed)


def _finish(running: _Running, q: Array) -> Array:
    """The mean of the values, in the shape and dtype of the queries."""
    total = jnp.where(running.total > 0, running.total, 1.0)
    return (running.mixed / total[..., None]).astype(q.dtype).reshape(q.shape)


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
