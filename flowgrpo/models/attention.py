"""Attention over whole rows, over blocks of a cache, or by a kernel.

    softmax(scale q k^T, under the mask) v        in float32, with grouped heads and an optional soft-cap

`visible` is the mask, from positions, segments and window, or from a tree of contexts that share prefixes. `attend` (or
a kernel of `attention_kernels` in its place) works on the tokens of one call; `attend_cache` on a cache, up to the last
slot that any row has filled. Both go block by block with a running softmax (Dao et al., 2022, arXiv:2205.14135). In a
tree or a long row, pairs of blocks that are masked out entirely are skipped, forward and backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.models.config import DecoderConfig

T = TypeVar("T")
PRECISE = jax.lax.Precision.HIGHEST  # products of float32 are of float32 on every platform
BLOCK = 128  # keys that are attended to at once
SUM_COLUMNS = 8  # of ones, in a product that computes a sum; with one it would be compiled as a product with a vector
TREE_BLOCK = 64  # queries and keys of a block in a tree, whose branches are short; halves the time on a CPU
MAX_UNROLLED_BLOCKS = 8  # of a cache: a larger one is looped over
MAX_TILED_BLOCKS = 4  # of a plain row: the pairs of blocks of a longer one are looped over
FAR = 1 << 30  # beyond every position and segment, and so that the difference of two is an int32
LOWEST = -1e30  # a logit that no visible one comes near to, and that float32 can subtract

KVBlock = tuple[Array, Array, Array]  # keys and values of a block [r k c e], and the mask of queries and keys [r s c]


class MaskSpec(NamedTuple):
    """All that the attention mask (`visible`) depends on: positions and segments of queries and keys, and the window.

    In a tree of contexts (with `k_end`) segments number the tokens of the row from 1, in depth-first order.
    """

    q_position: Array  # r s
    k_position: Array  # r c
    q_segment: Array  # r s: 0 is padding
    k_segment: Array  # r c
    window: Array | int  # of the layer
    k_end: Array | None = None  # r c: number of the last token that sees the key, 0 of padding; None: not a tree


class LayerCache(NamedTuple):
    """One layer of a cache, as a kernel for one query a row reads it."""

    k: Array  # n r k c e
    v: Array
    index: Array | int  # of the layer
    filled: Array  # r: number of filled slots, which are the first; 0 for a row that takes no part


Attend = Callable[[Array, Array, Array, MaskSpec, DecoderConfig], Array]
AttendCache = Callable[[Array, LayerCache, MaskSpec, DecoderConfig], Array]


@dataclass(frozen=True)
class AttentionKernels:
    """An `Attend` with a kernel for whole rows, and one for a cache."""

    rows: Attend
    cached: AttendCache
    supports: Callable[[Array, Array], bool]  # whether `cached` takes queries [r h s e] and keys of a cache [n r k c e]

    def __call__(self, q: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig) -> Array:
        """Attention over whole rows."""
        return self.rows(q, k, v, mask, config)


def visible(
    q_position: Array,
    k_position: Array,
    q_segment: Array,
    k_segment: Array,
    window: Array | int,
    k_end: Array | None = None,
) -> Array:
    """The attention mask: same segment (or the key's subtree), key not later, nearer than `window` -> bool [r q k]."""
    distance = q_position[:, :, None] - k_position[:, None, :]
    q_segment, k_segment = q_segment[:, :, None], k_segment[:, None, :]
    first, last = k_segment, k_segment if k_end is None else k_end[:, None, :]
    return (first <= q_segment) & (q_segment <= last) & (q_segment > 0) & (distance >= 0) & (distance < window)


def attend(q: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig) -> Array:
    """Plain attention: [r h s e], [r k c e] -> [r h s e]; a query that sees nothing gives zeros.

    The queries are the last s tokens of the keys (in a tree: all of them), and a segment's tokens are in the order of
    their positions, so no block of queries sees a later block of keys. Blocks are those of `attend_cache`, so that
    sampling and scoring sum in the same order (F7). The backward pass keeps one number a query (the logsumexp) and
    recomputes probabilities block by block: neither logits nor mask are ever materialised as [s c].
    """
    return _attend(q, k, v, mask, config)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig) -> Array:
    return _attend_forward(q, k, v, mask, config)[0]


def _attend_forward(q: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig) -> tuple[Array, tuple]:
    grouped = _group(q, config)
    if _is_tiled(k, mask):
        tiles = []
        for tile in _tiles(q, k):
            queries = grouped[:, :, :, tile.queries]
            running = _empty(queries)
            for kv_block in _kv_blocks(tile, k, v, mask):
                running = _add(running, kv_block, grouped=queries, config=config)
            tiles.append(running)
        running = jax.tree.map(lambda *x: jnp.concatenate(x, axis=3), *tiles)
    else:
        running = _forward_by_pairs(grouped, k, v, mask, config)
    out = _finish(running, q)
    logsumexp = running.highest + jnp.log(jnp.where(running.total > 0, running.total, 1.0))
    return out, (q, k, v, mask, out, logsumexp)


def _is_tiled(k: Array, mask: MaskSpec) -> bool:
    """Whether all pairs of blocks are unrolled; a tree is looped over, since most of its pairs are skipped."""
    return mask.k_end is None and k.shape[2] <= MAX_TILED_BLOCKS * BLOCK


def _attend_backward(config: DecoderConfig, residuals: tuple, d_out: Array) -> tuple:
    """With p = softmax and d_p = d_out v:  d_v = p d_out,  d_logits = p (d_p - <d_out, out>)  (Dao et al., 2022)."""
    q, k, v, mask, out, logsumexp = residuals
    grouped, d_mixed = _group(q, config), _group(d_out, config)
    d_dot_out = (d_mixed.astype(jnp.float32) * _group(out, config).astype(jnp.float32)).sum(axis=-1)
    by_query = (grouped, d_mixed, logsumexp, d_dot_out)
    backward = _backward_by_tiles if _is_tiled(k, mask) else _backward_by_pairs
    d_q, d_k, d_v = backward(by_query, q, k, v, mask, config)
    return d_q.astype(q.dtype).reshape(q.shape), d_k.astype(k.dtype), d_v.astype(v.dtype), None


def _backward_by_tiles(by_query: tuple, q: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig) -> tuple:
    """Gradients of queries, keys and values, one block of queries after the other."""
    tiles, d_queries = _tiles(q, k), []
    d_pairs: list[list] = [[] for _ in range(tiles[-1].blocks)]  # for each block of keys, one (d_k, d_v) a tile
    for tile in tiles:
        of_tile = tuple(x[:, :, :, tile.queries] for x in by_query)
        d_q = jnp.zeros(of_tile[0].shape, jnp.float32)
        for pairs, kv_block in zip(d_pairs, _kv_blocks(tile, k, v, mask), strict=False):
            d_q, pair = _block_gradients(d_q, kv_block, by_query=of_tile, config=config)
            pairs.append(pair)
        d_queries.append(d_q)
    d_k, d_v = zip(*(map(partial(reduce, jnp.add), zip(*pairs, strict=True)) for pairs in d_pairs), strict=True)
    return jnp.concatenate(d_queries, axis=3), *(jnp.concatenate(x, axis=2) for x in (d_k, d_v))


def _block_gradients(
    d_q: Array, kv_block: KVBlock, *, by_query: tuple, config: DecoderConfig
) -> tuple[Array, tuple[Array, Array]]:
    """Add one block's part to the gradient of the queries, and compute the gradients of its keys and values.

    Logits are [keys, queries] here: a CPU multiplies by a transposed matrix at half the rate, and in this order only
    the queries' gradient needs one.
    """
    grouped, d_mixed, logsumexp, d_dot_out = by_query
    k, v = (x.astype(grouped.dtype) for x in kv_block[:2])
    product = partial(jnp.einsum, precision=PRECISE, preferred_element_type=jnp.float32)
    mask = jnp.swapaxes(kv_block[2], 1, 2)[:, None, :, None]
    logits = _masked_logits(product("rkce,rkgse->rkcgs", k, grouped), mask, config)
    probs = jnp.where(mask, jnp.exp(logits - logsumexp[:, :, None]), 0.0)
    d_v = product("rkcgs,rkgse->rkce", probs.astype(v.dtype), d_mixed)
    d_logits = probs * (product("rkce,rkgse->rkcgs", v, d_mixed) - d_dot_out[:, :, None])
    if config.attention_softcap is not None:
        d_logits *= 1.0 - (jnp.where(mask, logits, 0.0) / config.attention_softcap) ** 2
    d_logits = (d_logits * attention_scale(config)).astype(k.dtype)
    d_q = d_q + product("rkcgs,rkce->rkgse", d_logits, k)
    return d_q, (product("rkcgs,rkgse->rkce", d_logits, grouped), d_v)


_attend.defvjp(_attend_forward, _attend_backward)


class _Tile(NamedTuple):
    """Queries that end in the same block of keys, and the number of blocks of keys that they may see."""

    queries: slice
    blocks: int


def _tiles(q: Array, k: Array) -> list[_Tile]:
    """All queries, which are the last of the keys' tokens, block by block."""
    length, before = k.shape[2], k.shape[2] - q.shape[2]
    starts = range(0, length, BLOCK)
    spans = [(max(start, before), min(start + BLOCK, length)) for start in starts]
    return [_Tile(slice(a - before, b - before), n) for n, (a, b) in enumerate(spans, start=1) if b > before]


def _kv_blocks(tile: _Tile, k: Array, v: Array, mask: MaskSpec) -> list[KVBlock]:
    """The blocks of keys that a tile may see; the last one may be shorter."""
    tile_mask = mask._replace(q_position=mask.q_position[:, tile.queries], q_segment=mask.q_segment[:, tile.queries])
    kv_blocks = []
    for start in range(0, tile.blocks * BLOCK, BLOCK):
        span = slice(start, start + BLOCK)
        k_block, v_block = k[:, :, span], v[:, :, span]
        block_mask = tile_mask._replace(
            k_end=None if mask.k_end is None else mask.k_end[:, span],
            k_position=mask.k_position[:, span],
            k_segment=mask.k_segment[:, span],
        )
        kv_blocks.append((k_block, v_block, visible(*block_mask)))
    return kv_blocks


# Pairs of blocks --------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """Queries or keys with their part of the mask, in blocks along the tokens; every array is [blocks r ...]."""

    arrays: tuple[Array, ...]  # blocks r k ... size ...
    position: Array  # blocks r size
    segment: Array
    end: Array | None = None  # of keys in a tree


def _forward_by_pairs(grouped: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig) -> "_Running":
    """One block of queries after the other, each over the blocks of keys that it sees."""
    size = _pair_size(mask)
    queries, keys = _query_blocks((grouped,), mask, size), _key_blocks(k, v, mask, size)

    def attend_block(carry: None, block: tuple[_Blocks, Array, Array]) -> tuple[None, "_Running"]:
        q_block, order, count = block

        def add(index: Array, running: "_Running") -> "_Running":
            kv_block = _kv_block(q_block, _pick(keys, order[index]), mask.window)
            return _add(running, kv_block, grouped=q_block.arrays[0], config=config)

        return carry, jax.lax.fori_loop(0, count, add, _empty(q_block.arrays[0]))

    _, running = jax.lax.scan(attend_block, None, (queries, *_visible_blocks(queries, keys, mask.window)))
    return jax.tree.map(lambda x: _join(x, 3, grouped.shape[3]), running)


def _backward_by_pairs(by_query: tuple, q: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig) -> tuple:
    """Gradients of queries, keys and values, over the same pairs of blocks."""
    size = _pair_size(mask)
    queries, keys = _query_blocks(by_query, mask, size), _key_blocks(k, v, mask, size)

    def backward_block(d_pair: tuple[Array, Array], block: tuple[_Blocks, Array, Array]) -> tuple:
        q_block, order, count = block

        def add(index: Array, carry: tuple) -> tuple:
            d_q, d_pair = carry
            kv_block = _kv_block(q_block, _pick(keys, order[index]), mask.window)
            d_q, change = _block_gradients(d_q, kv_block, by_query=q_block.arrays, config=config)
            total = jax.tree.map(jnp.add, _pick(d_pair, order[index]), change)
            put = partial(jax.lax.dynamic_update_index_in_dim, index=order[index], axis=0)
            return d_q, jax.tree.map(put, d_pair, total)

        d_q = jnp.zeros(q_block.arrays[0].shape, jnp.float32)
        d_q, d_pair = jax.lax.fori_loop(0, count, add, (d_q, d_pair))
        return d_pair, d_q

    d_k, d_v = (jnp.zeros(x.shape, jnp.float32) for x in keys.arrays)
    d_pair, d_q = jax.lax.scan(backward_block, (d_k, d_v), (queries, *_visible_blocks(queries, keys, mask.window)))
    return _join(d_q, 3, q.shape[2]), *(_join(x, 2, k.shape[2]) for x in d_pair)


def _pair_size(mask: MaskSpec) -> int:
    """Queries and keys of a block; in plain rows that of a cache, so that sums go in the same order (F7)."""
    return BLOCK if mask.k_end is None else TREE_BLOCK


def _query_blocks(arrays: tuple[Array, ...], mask: MaskSpec, size: int) -> _Blocks:
    """Arrays [r k g s ...], and positions and segments of the queries, in blocks."""
    split = tuple(_split(x, 3, size) for x in arrays)
    return _Blocks(split, _split(mask.q_position, 1, size), _split(mask.q_segment, 1, size))


def _key_blocks(k: Array, v: Array, mask: MaskSpec, size: int) -> _Blocks:
    """Keys and values, and positions, segments and ends of the keys, in blocks."""
    position, segment = _split(mask.k_position, 1, size), _split(mask.k_segment, 1, size)
    end = None if mask.k_end is None else _split(mask.k_end, 1, size)
    return _Blocks((_split(k, 2, size), _split(v, 2, size)), position, segment, end)


def _pick(blocks: T, index: Array) -> T:
    """One block of every array."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), blocks)


def _kv_block(queries: _Blocks, keys: _Blocks, window: Array | int) -> KVBlock:
    """One block of keys with its mask for one block of queries."""
    k, v = keys.arrays
    return k, v, visible(queries.position, keys.position, queries.segment, keys.segment, window, keys.end)


def _visible_blocks(queries: _Blocks, keys: _Blocks, window: Array | int) -> tuple[Array, Array]:
    """For each block of queries: the blocks of keys, those first that it may see in any row -> [q k]; and how many
    those are -> [q].

    Decided by the ranges of positions and segments in a block, so that no array of queries by keys is needed.
    """
    (q_first, q_last), (q_low, q_high) = _range(queries.segment, queries), _range(queries.position, queries)
    (k_first, k_last), (k_low, k_high) = _range(keys.segment, keys), _range(keys.position, keys)
    if keys.end is not None:
        k_last = keys.end.max(axis=-1)
    may_see = (k_first[None] <= q_last[:, None]) & (q_first[:, None] <= k_last[None])
    may_see &= (k_low[None] <= q_high[:, None]) & (q_low[:, None] - k_high[None] < window)
    may_see = may_see.any(axis=-1)
    return jnp.argsort(~may_see, axis=1, stable=True), may_see.sum(axis=1, dtype=jnp.int32)


def _range(x: Array, blocks: _Blocks) -> tuple[Array, Array]:
    """Lowest and highest number in each block without padding; the range of a block of padding is empty."""
    real = blocks.segment > 0
    return jnp.where(real, x, FAR).min(axis=-1), jnp.where(real, x, -FAR).max(axis=-1)


def _split(x: Array, axis: int, size: int) -> Array:
    """Split an axis into blocks, which become the first axis: [r s ...] -> [blocks r size ...], zero-padded."""
    short = -x.shape[axis] % size
    x = jnp.pad(x, [(0, short if at == axis else 0) for at in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _join(x: Array, axis: int, length: int) -> Array:
    """The inverse of `_split`, for `length` tokens."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


# A cache ----------------------------------------------------------------------------------------------


def attend_cache(
    q: Array,
    block_of: Callable[[Array | int], KVBlock],
    blocks: Array | int,
    config: DecoderConfig,
    *,
    unrolled: int = 0,
) -> Array:
    """Attention to the first `blocks` blocks of a cache, like `attend`; `block_of(index)` reads one with its mask.

    With `unrolled`, the number of blocks of the cache, the loop is unrolled: `block_of` gets each index as a number,
    and blocks past the first `blocks` are skipped.

    A block that a row does not see does not change its result by a bit, so the result does not depend on how far other
    rows are filled (E3).
    """
    grouped = _group(q, config)

    def add(index, running):
        return _add(running, block_of(index), grouped=grouped, config=config)

    if isinstance(blocks, int) and blocks == 1:
        return _finish(add(0, _empty(grouped)), q)
    if unrolled:
        running = add(0, _empty(grouped))
        for index in range(1, unrolled):
            running = jax.lax.cond(index < blocks, partial(add, index), lambda running: running, running)
        return _finish(running, q)
    return _finish(jax.lax.fori_loop(0, blocks, add, _empty(grouped)), q)


class _Running(NamedTuple):
    """A running softmax and the values it has mixed, over the blocks so far."""

    highest: Array  # r k g s
    total: Array  # r k g s: of exp(logit - highest)
    mixed: Array  # r k g s e: the same sum, over values


def _empty(grouped: Array) -> _Running:
    lowest = jnp.full(grouped.shape[:-1], LOWEST, jnp.float32)
    return _Running(lowest, jnp.zeros_like(lowest), jnp.zeros(grouped.shape, jnp.float32))


def _add(running: _Running, kv_block: KVBlock, *, grouped: Array, config: DecoderConfig) -> _Running:
    """The running softmax after one more block."""
    k, v = (x.astype(grouped.dtype) for x in kv_block[:2])
    mask = kv_block[2]
    logits = _masked_logits(_products("rkgse,rkce->rkgsc", grouped, k), mask[:, None, None], config)
    # The subtracted maximum cancels, so no gradient is needed through it.
    highest = jax.lax.stop_gradient(jnp.maximum(running.highest, logits.max(axis=-1)))
    probs = jnp.where(mask[:, None, None], jnp.exp(logits - highest[..., None]), 0.0)
    decay = jnp.exp(running.highest - highest)
    mixed = _products("rkgsc,rkce->rkgse", probs.astype(v.dtype), v)
    return _Running(highest, running.total * decay + sum_keys(probs), running.mixed * decay[..., None] + mixed)


def _products(subscripts: str, x: Array, block: Array) -> Array:
    """Products of queries or probabilities [r k g s _] with keys or values of a block, in float32."""
    product = partial(jnp.einsum, subscripts, precision=PRECISE, preferred_element_type=jnp.float32)
    if x.shape[3] > 1:
        return product(x, block)

    def by_heads(x: Array, block: Array) -> Array:  # XLA multiplies a vector three times as fast as a few rows
        return jnp.concatenate([product(x[:, :, head : head + 1], block) for head in range(x.shape[2])], axis=2)

    return jax.lax.platform_dependent(x, block, cpu=by_heads, default=product)


def sum_keys(probs: Array) -> Array:
    """Sum over the keys [r k g s c]; with several queries by a product like that with the values.

    Its order is then the same for each query; that of a sum over an axis, or of a product with a vector, is not.
    """
    if probs.shape[3] == 1:
        return probs.sum(axis=-1)
    ones = jnp.ones((*probs.shape[:2], probs.shape[-1], SUM_COLUMNS), jnp.float32)
    return jnp.einsum("rkgsc,rkce->rkgse", probs, ones, precision=PRECISE)[..., 0]


def _finish(running: _Running, q: Array) -> Array:
    """The mean of the values, in the shape and dtype of the queries."""
    total = jnp.where(running.total > 0, running.total, 1.0)
    return (running.mixed / total[..., None]).astype(q.dtype).reshape(q.shape)


def _group(q: Array, config: DecoderConfig) -> Array:
    """[r h s e] -> [r k g s e]."""
    rows, _, length, e = q.shape
    return q.reshape(rows, config.k, config.h // config.k, length, e)


def _masked_logits(products: Array, mask: Array, config: DecoderConfig) -> Array:
    """Logits from products of queries and keys: scaled, soft-capped, and `LOWEST` if not `seen`."""
    logits = products * attention_scale(config)
    if config.attention_softcap is not None:
        logits = config.attention_softcap * jnp.tanh(logits / config.attention_softcap)
    return jnp.where(mask, logits, LOWEST)


def attention_scale(config: DecoderConfig) -> float:
    """Factor of the products of queries and keys."""
    return config.e**-0.5 if config.query_scale is None else config.query_scale
