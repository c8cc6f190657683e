"""Attention over packed rows by JAX's splash attention, a kernel for TPUs.

The kernel is given segments, and computes the rest of the mask from places in the row, so that nothing of queries by
keys is ever written down. Blocks that are later, or behind the window, are skipped.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash_kernels
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import MultiHeadMask

from flowgrpo.models.attention import Sight, scale_of
from flowgrpo.models.config import DecoderConfig

BLOCKS = (512, 256, 128)  # queries, and keys, of a block of splash; a row is filled up to a multiple of the last
TILES = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
TILES += ("block_q_dq", "block_kv_dq")
AT_ONCE = 8192  # tokens
LANES = 64  # a multiple of so many head dimensions needs no filling up


def splash_rows(q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig, *, interpret: bool = False) -> Array:
    """Attend like `attention.attend`, by splash attention: [r h s e], [r k s e] -> [r h s e].

    The kernel tells what is later, and how far away, by places in the row. So the tokens of a segment stand in the
    order of their positions, and where a window is shorter than the row, side by side, as in a packed batch. Padding
    counts as zeros, whatever it holds. `interpret` runs the kernel on any machine.
    """
    length, e = q.shape[2:]
    q = (q.astype(jnp.float32) * scale_of(config)).astype(q.dtype)
    q, k, v = (_fill(x.astype(q.dtype), sight.q_segment) for x in (q, k, v))
    segments = jnp.pad(sight.q_segment, [(0, 0), (0, q.shape[2] - length)])
    windows = sorted({length if window is None else min(window, length) for window in config.windows})
    ways = [partial(_splash_within, window=window, config=config, interpret=interpret) for window in windows]
    which = sum(jnp.asarray(sight.window > window, jnp.int32) for window in windows[:-1])
    out = ways[0](q, k, v, segments) if len(ways) == 1 else jax.lax.switch(which, ways, q, k, v, segments)
    # Padding is a segment for the kernel, so that all its queries see something.
    return jnp.where(sight.q_segment[:, None, :, None] > 0, out[:, :, :length, :e], jnp.zeros((), out.dtype))


def _fill(x: Array, segment: Array) -> Array:
    """Fill up to whole blocks of [r _ s e], with zeros in padding."""
    x = jnp.where(segment[:, None, :, None] > 0, x, jnp.zeros((), x.dtype))
    return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % BLOCKS[-1]), (0, -x.shape[3] % LANES)])


def _splash_within(
    q: Array, k: Array, v: Array, segments: Array, *, window: int, config: DecoderConfig, interpret: bool
) -> Array:
    """The kernel with a window that is known when it is compiled."""
    heads, length = q.shape[1:3]
    mask = splash_kernels.LocalMask((length, length), (window - 1, 0), 0)
    if window >= length:
        mask = splash_kernels.CausalMask((length, length))
    size = next(block for block in BLOCKS if length % block == 0)
    kernel = splash_kernels.make_splash_mha(
        MultiHeadMask([mask] * heads),
        block_sizes=splash_kernels.BlockSizes(**dict.fromkeys(TILES, size)),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=config.attention_softcap,
        interpret=interpret,
    )
    # The kernel writes 128 copies of one number a query and head, so not all rows go at once; a core of a TPU computes
    # them one after the other anyway.
    return jax.lax.map(
        lambda row: kernel(*row[:3], splash_kernels.SegmentIds(row[3], row[3])),
        (q, k, v, segments),
        batch_size=max(1, AT_ONCE // length),
    )
