"""Attention over packed rows by JAX's splash attention, a kernel for TPUs.

The kernel gets segments, and computes the rest of the mask from indices in the row, so that no array of queries by keys
is ever materialised. Blocks of later keys, or of keys beyond the window, are skipped.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash_kernels
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import MultiHeadMask

from flowgrpo.models.attention import MaskSpec, attention_scale
from flowgrpo.models.config import DecoderConfig

BLOCKS = (512, 256, 128)  # queries, and keys, of a block of splash; rows are padded to a multiple of the last
BLOCK_SETTINGS = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
BLOCK_SETTINGS += ("block_q_dq", "block_kv_dq")
MAX_TOKENS = 8192  # that are computed at once
LANES = 64  # head dimensions are padded to a multiple of this


def splash_rows(
    q: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig, *, interpret: bool = False
) -> Array:
    """`attention.attend` by splash attention: [r h s e], [r k s e] -> [r h s e].

    The kernel compares indices in the row instead of positions. So the tokens of a segment must be in the order of
    their positions, and adjacent if a window is shorter than the row, as in a packed batch. Padding is read as zeros,
    whatever it contains. `interpret` runs the kernel on any machine.
    """
    length, e = q.shape[2:]
    q = (q.astype(jnp.float32) * attention_scale(config)).astype(q.dtype)
    q, k, v = (_pad(x.astype(q.dtype), mask.q_segment) for x in (q, k, v))
    segments = jnp.pad(mask.q_segment, [(0, 0), (0, q.shape[2] - length)])
    windows = sorted({length if window is None else min(window, length) for window in config.windows})
    kernels = [partial(_splash_with_window, window=window, config=config, interpret=interpret) for window in windows]
    index = sum(jnp.asarray(mask.window > window, jnp.int32) for window in windows[:-1])
    out = kernels[0](q, k, v, segments) if len(kernels) == 1 else jax.lax.switch(index, kernels, q, k, v, segments)
    # For the kernel, padding is a segment, so that each query sees something.
    return jnp.where(mask.q_segment[:, None, :, None] > 0, out[:, :, :length, :e], jnp.zeros((), out.dtype))


def _pad(x: Array, segment: Array) -> Array:
    """Pad [r _ s e] with zeros to whole blocks, and zero its padding."""
    x = jnp.where(segment[:, None, :, None] > 0, x, jnp.zeros((), x.dtype))
    return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % BLOCKS[-1]), (0, -x.shape[3] % LANES)])


def _splash_with_window(
    q: Array, k: Array, v: Array, segments: Array, *, window: int, config: DecoderConfig, interpret: bool
) -> Array:
    """The kernel with a static window."""
    heads, length = q.shape[1:3]
    mask = splash_kernels.LocalMask((length, length), (window - 1, 0), 0)
    if window >= length:
        mask = splash_kernels.CausalMask((length, length))
    size = next(block for block in BLOCKS if length % block == 0)
    kernel = splash_kernels.make_splash_mha(
        MultiHeadMask([mask] * heads),
        block_sizes=splash_kernels.BlockSizes(**dict.fromkeys(BLOCK_SETTINGS, size)),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=config.attention_softcap,
        interpret=interpret,
    )
    # The kernel writes 128 copies of one number per query and head, so rows are computed in groups; a core of a TPU
    # computes them one after the other anyway.
    return jax.lax.map(
        lambda row: kernel(*row[:3], splash_kernels.SegmentIds(row[3], row[3])),
        (q, k, v, segments),
        batch_size=max(1, MAX_TOKENS // length),
    )
