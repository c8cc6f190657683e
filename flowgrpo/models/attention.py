"""Attention over whole rows, over blocks of a cache, or by a kernel.

    softmax(scale q k^T, under the mask) v        in float32, with grouped heads and an optional soft-cap

`visible` alone decides who sees whom, from positions, segments and window, or from a tree of contexts that share
prefixes. `attend` (or a kernel of `attention_kernels` in its place) works on the tokens of one call; `attend_cache` on
a cache, only as far as any row is filled. Both go block by block with a running softmax (Dao et al., 2022,
arXiv:2205.14135); of a tree or a long row, pairs of blocks in which nobody sees anything are skipped, forward and
backward.
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
COLUMNS = 8  # of a product that is used for a sum; with a single one it would be a product with a vector
BRANCH = 64  # queries and keys of a block in a tree, whose branches are short; on a CPU it halves the time
UNROLLED = 8  # so many blocks of a cache are compiled one after the other; more are looped over
TILED = 4  # so many blocks of a plain row are compiled one after the other, for each block of queries; else a loop
FAR = 1 << 30  # beyond every position and segment, and so that the difference of two is an int32
LOWEST = -1e30  # a logit that no visible one comes near to, and that float32 can subtract

Part = tuple[Array, Array, Array]  # keys and values [r k c e] of a block, and who sees them [r s c]


class Sight(NamedTuple):
    """Positions and segments of queries and keys, and how far a query looks back: all that `visible` depends on.

    In a tree of contexts, which `k_end` makes of it, segments number the tokens of the row from 1 in depth-first order.
    """

    q_position: Array  # r s
    k_position: Array  # r c
    q_segment: Array  # r s: 0 is padding
    k_segment: Array  # r c
    window: Array | int  # of the layer
    k_end: Array | None = None  # r c: number of the last token that sees the key, 0 of padding; None: there is no tree


class Slots(NamedTuple):
    """A cache, and the slots of it that a step of one token a row reads."""

    k: Array  # n r k c e
    v: Array
    index: Array | int  # of the layer
    filled: Array  # r: so many slots, from the first on; none of a row that does not take part


Attend = Callable[[Array, Array, Array, Sight, DecoderConfig], Array]
AttendSlots = Callable[[Array, Slots, Sight, DecoderConfig], Array]


@dataclass(frozen=True)
class Kernels:
    """An `Attend` with a kernel over a cache beside it."""

    rows: Attend
    slots: AttendSlots
    takes: Callable[[Array, Array], bool]  # whether `slots` is for queries [r h s e] and keys of a cache [n r k c e]

    def __call__(self, q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> Array:
        """Attend to whole rows."""
        return self.rows(q, k, v, sight, config)


def visible(
    q_position: Array,
    k_position: Array,
    q_segment: Array,
    k_segment: Array,
    window: Array | int,
    k_end: Array | None = None,
) -> Array:
    """Whether a query sees a key: same segment or the key's subtree, not later, nearer than `window` -> [r q k]."""
    distance = q_position[:, :, None] - k_position[:, None, :]
    q_segment, k_segment = q_segment[:, :, None], k_segment[:, None, :]
    first, last = k_segment, k_segment if k_end is None else k_end[:, None, :]
    return (first <= q_segment) & (q_segment <= last) & (q_segment > 0) & (distance >= 0) & (distance < window)


def attend(q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> Array:
    """Plain attention: [r h s e], [r k c e] -> [r h s e]; a query that sees nothing gives zeros.

    The queries are the last s of the keys' tokens, and those of a segment stand in the order of their positions, so a
    block of queries meets no later block of keys; in a tree they are all. The blocks are those of `attend_cache`, so
    that what is sampled and what is scored are summed in one order (F7). The backward pass keeps one number a query and
    computes shares again, block by block: neither logits nor mask are ever [s c] as a whole, and nothing is kept of a
    block.
    """
    return _attended(q, k, v, sight, config)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attended(q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> Array:
    return _attend_forward(q, k, v, sight, config)[0]


def _attend_forward(q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> tuple[Array, tuple]:
    grouped = _group(q, config)
    if _is_tiled(k, sight):
        tiles = [_attend_tile(tile, grouped, k, v, sight, config) for tile in _tiles(q, k)]
        running = jax.tree.map(lambda *x: jnp.concatenate(x, axis=3), *tiles)
    else:
        running = _forward_by_pairs(grouped, k, v, sight, config)
    out = _finish(running, q)
    weight = running.highest + jnp.log(jnp.where(running.total > 0, running.total, 1.0))
    return out, (q, k, v, sight, out, weight)


def _is_tiled(k: Array, sight: Sight) -> bool:
    """Whether all pairs of blocks are compiled one after the other; of a tree most are skipped, which takes a loop."""
    return sight.k_end is None and k.shape[2] <= TILED * BLOCK


def _attend_tile(tile: "_Tile", grouped: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> "_Running":
    """A block of queries over the blocks of keys that it may see."""
    own = grouped[:, :, :, tile.queries]
    running = _empty(own)
    for part in _parts(tile, k, v, sight):
        running = _add(running, part, grouped=own, config=config)
    return running


def _attend_backward(config: DecoderConfig, kept: tuple, d_out: Array) -> tuple:
    """With shares p and d_p = d_out v:  d_v = p d_out,  d_logits = p (d_p - <d_out, out>)  (Dao et al., 2022)."""
    q, k, v, sight, out, weight = kept
    grouped, d_mixed = _group(q, config), _group(d_out, config)
    through = (d_mixed.astype(jnp.float32) * _group(out, config).astype(jnp.float32)).sum(axis=-1)
    given = (grouped, d_mixed, weight, through)
    by_blocks = _backward_by_tiles if _is_tiled(k, sight) else _backward_by_pairs
    d_q, d_k, d_v = by_blocks(given, q, k, v, sight, config)
    return d_q.astype(q.dtype).reshape(q.shape), d_k.astype(k.dtype), d_v.astype(v.dtype), None


def _backward_by_tiles(given: tuple, q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> tuple:
    """The gradients of queries, keys and values, block of queries by block of queries."""
    tiles, of_queries = _tiles(q, k), []
    of_pairs: list[list] = [[] for _ in range(tiles[-1].blocks)]
    for tile in tiles:
        own = tuple(x[:, :, :, tile.queries] for x in given)
        d_q = jnp.zeros(own[0].shape, jnp.float32)
        for pairs, part in zip(of_pairs, _parts(tile, k, v, sight), strict=False):
            d_q, pair = _back(d_q, part, given=own, config=config)
            pairs.append(pair)
        of_queries.append(d_q)
    d_k, d_v = zip(*(map(partial(reduce, jnp.add), zip(*pairs, strict=True)) for pairs in of_pairs), strict=True)
    return jnp.concatenate(of_queries, axis=3), *(jnp.concatenate(x, axis=2) for x in (d_k, d_v))


def _back(d_q: Array, part: Part, *, given: tuple, config: DecoderConfig) -> tuple[Array, tuple[Array, Array]]:
    """Add one block's share to the gradient of the queries, and compute the gradients of its keys and values.

    Logits stand by keys and then queries here: a CPU multiplies by a transposed matrix at half the rate, and so only
    the queries' gradient needs one.
    """
    grouped, d_mixed, weight, through = given
    k, v = (x.astype(grouped.dtype) for x in part[:2])
    product = partial(jnp.einsum, precision=PRECISE, preferred_element_type=jnp.float32)
    seen = jnp.swapaxes(part[2], 1, 2)[:, None, :, None]
    logits = _mask(product("rkce,rkgse->rkcgs", k, grouped), seen, config)
    shares = jnp.where(seen, jnp.exp(logits - weight[:, :, None]), 0.0)
    d_v = product("rkcgs,rkgse->rkce", shares.astype(v.dtype), d_mixed)
    d_logits = shares * (product("rkce,rkgse->rkcgs", v, d_mixed) - through[:, :, None])
    if config.attention_softcap is not None:
        d_logits *= 1.0 - (jnp.where(seen, logits, 0.0) / config.attention_softcap) ** 2
    d_logits = (d_logits * scale_of(config)).astype(k.dtype)
    d_q = d_q + product("rkcgs,rkce->rkgse", d_logits, k)
    return d_q, (product("rkcgs,rkgse->rkce", d_logits, grouped), d_v)


_attended.defvjp(_attend_forward, _attend_backward)


class _Tile(NamedTuple):
    """Queries that end in the same block of keys, and how many blocks they may see."""

    queries: slice
    blocks: int


def _tiles(q: Array, k: Array) -> list[_Tile]:
    """All queries, which are the last of the keys' tokens, block by block."""
    length, before = k.shape[2], k.shape[2] - q.shape[2]
    starts = range(0, length, BLOCK)
    spans = [(max(start, before), min(start + BLOCK, length)) for start in starts]
    return [_Tile(slice(a - before, b - before), n) for n, (a, b) in enumerate(spans, start=1) if b > before]


def _parts(tile: _Tile, k: Array, v: Array, sight: Sight) -> list[Part]:
    """The blocks that a tile may see, one by one, the last as short as it is."""
    at = [slice(start, start + BLOCK) for start in range(0, tile.blocks * BLOCK, BLOCK)]
    own = sight._replace(q_position=sight.q_position[:, tile.queries], q_segment=sight.q_segment[:, tile.queries])
    return [(k[:, :, part], v[:, :, part], visible(*_look_at(own, lambda x, part=part: x[:, part]))) for part in at]


def _look_at(sight: Sight, part: Callable[[Array], Array]) -> Sight:
    """A part of the keys."""
    end = None if sight.k_end is None else part(sight.k_end)
    return sight._replace(k_position=part(sight.k_position), k_segment=part(sight.k_segment), k_end=end)


# Pairs of blocks that meet ----------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """Queries or keys, and what goes with them, in blocks along the tokens; every array is [blocks r ...]."""

    arrays: tuple[Array, ...]  # blocks r k ... size ...
    position: Array  # blocks r size
    segment: Array
    end: Array | None = None  # of keys in a tree


def _forward_by_pairs(grouped: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> "_Running":
    """Block after block of queries, each over the blocks of keys that it meets."""
    size = _pair_size(sight)
    queries, keys = _query_blocks((grouped,), sight, size), _key_blocks(k, v, sight, size)

    def attend_block(carry: None, block: tuple[_Blocks, Array, Array]) -> tuple[None, "_Running"]:
        own, met, count = block

        def add(index: Array, running: "_Running") -> "_Running":
            part = _pair(own, _pick(keys, met[index]), sight.window)
            return _add(running, part, grouped=own.arrays[0], config=config)

        return carry, jax.lax.fori_loop(0, count, add, _empty(own.arrays[0]))

    _, running = jax.lax.scan(attend_block, None, (queries, *_met_blocks(queries, keys, sight.window)))
    return jax.tree.map(lambda x: _join(x, 3, grouped.shape[3]), running)


def _backward_by_pairs(given: tuple, q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> tuple:
    """The gradients of queries, keys and values, by the same pairs."""
    size = _pair_size(sight)
    queries, keys = _query_blocks(given, sight, size), _key_blocks(k, v, sight, size)

    def back_block(d_pair: tuple[Array, Array], block: tuple[_Blocks, Array, Array]) -> tuple:
        own, met, count = block

        def add(index: Array, carry: tuple) -> tuple:
            d_q, d_pair = carry
            part = _pair(own, _pick(keys, met[index]), sight.window)
            d_q, more = _back(d_q, part, given=own.arrays, config=config)
            more = jax.tree.map(jnp.add, _pick(d_pair, met[index]), more)
            put = partial(jax.lax.dynamic_update_index_in_dim, index=met[index], axis=0)
            return d_q, jax.tree.map(put, d_pair, more)

        d_q = jnp.zeros(own.arrays[0].shape, jnp.float32)
        d_q, d_pair = jax.lax.fori_loop(0, count, add, (d_q, d_pair))
        return d_pair, d_q

    d_k, d_v = (jnp.zeros(x.shape, jnp.float32) for x in keys.arrays)
    d_pair, d_q = jax.lax.scan(back_block, (d_k, d_v), (queries, *_met_blocks(queries, keys, sight.window)))
    return _join(d_q, 3, q.shape[2]), *(_join(x, 2, k.shape[2]) for x in d_pair)


def _pair_size(sight: Sight) -> int:
    """Queries and keys of a block; of plain rows as of a cache, so that their sums go in its order (F7)."""
    return BLOCK if sight.k_end is None else BRANCH


def _query_blocks(arrays: tuple[Array, ...], sight: Sight, size: int) -> _Blocks:
    """Arrays [r k g s ...] and the queries' sight in blocks."""
    split = tuple(_split(x, 3, size) for x in arrays)
    return _Blocks(split, _split(sight.q_position, 1, size), _split(sight.q_segment, 1, size))


def _key_blocks(k: Array, v: Array, sight: Sight, size: int) -> _Blocks:
    """Keys, values and the keys' sight in blocks."""
    position, segment = _split(sight.k_position, 1, size), _split(sight.k_segment, 1, size)
    end = None if sight.k_end is None else _split(sight.k_end, 1, size)
    return _Blocks((_split(k, 2, size), _split(v, 2, size)), position, segment, end)


def _pick(blocks: T, index: Array) -> T:
    """One block of every array."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), blocks)


def _pair(queries: _Blocks, keys: _Blocks, window: Array | int) -> Part:
    """One block of keys, and who of a block of queries sees it."""
    k, v = keys.arrays
    return k, v, visible(queries.position, keys.position, queries.segment, keys.segment, window, keys.end)


def _met_blocks(queries: _Blocks, keys: _Blocks, window: Array | int) -> tuple[Array, Array]:
    """Sort the blocks of keys, for each block of queries those first in which any row may see something -> [q k];
    and how many those are -> [q].

    It is decided by the ranges of positions and segments in a block, so that no array of queries by keys is needed.
    """
    (q_first, q_last), (q_low, q_high) = _range(queries.segment, queries), _range(queries.position, queries)
    (k_first, k_last), (k_low, k_high) = _range(keys.segment, keys), _range(keys.position, keys)
    if keys.end is not None:
        k_last = keys.end.max(axis=-1)
    meets = (k_first[None] <= q_last[:, None]) & (q_first[:, None] <= k_last[None])
    meets &= (k_low[None] <= q_high[:, None]) & (q_low[:, None] - k_high[None] < window)
    meets = meets.any(axis=-1)
    return jnp.argsort(~meets, axis=1, stable=True), meets.sum(axis=1, dtype=jnp.int32)


def _range(x: Array, blocks: _Blocks) -> tuple[Array, Array]:
    """Lowest and highest number in each block, without padding; of nothing but padding no number is in the range."""
    real = blocks.segment > 0
    return jnp.where(real, x, FAR).min(axis=-1), jnp.where(real, x, -FAR).max(axis=-1)


def _split(x: Array, axis: int, size: int) -> Array:
    """Divide an axis into blocks, which come first: [r s ...] -> [blocks r size ...], zeros filling up the last."""
    short = -x.shape[axis] % size
    x = jnp.pad(x, [(0, short if at == axis else 0) for at in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _join(x: Array, axis: int, length: int) -> Array:
    """The inverse, of so many tokens."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


# A cache ----------------------------------------------------------------------------------------------


def attend_cache(
    q: Array,
    block_of: Callable[[Array | int], Part],
    blocks: Array | int,
    config: DecoderConfig,
    *,
    unrolled: int = 0,
) -> Array:
    """Attend to the first `blocks` blocks of a cache, like `attend`; `block_of` gives keys, values and mask of one.

    If the cache has so many blocks `unrolled`, `block_of` is asked for each by its number, and those past the first
    `blocks` are skipped.

    A block that a row does not see changes nothing of it, not even a bit, so a row's result does not depend on how far
    other rows are filled (E3).
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
    mixed = _products("rkgsc,rkce->rkgse", shares.astype(v.dtype), v)
    return _Running(highest, running.total * faded + total_of(shares), running.mixed * faded[..., None] + mixed)


def _products(which: str, x: Array, block: Array) -> Array:
    """Products of queries or shares [r k g s _] with keys or values of a block, in float32."""
    product = partial(jnp.einsum, which, precision=PRECISE, preferred_element_type=jnp.float32)
    if x.shape[3] > 1:
        return product(x, block)
    return jax.lax.platform_dependent(x, block, cpu=partial(_by_vectors, product), default=product)


def _by_vectors(product: Callable[[Array, Array], Array], x: Array, block: Array) -> Array:
    """Head by head: XLA multiplies a vector three times as fast as a matrix of a few rows."""
    return jnp.concatenate([product(x[:, :, head : head + 1], block) for head in range(x.shape[2])], axis=2)


def total_of(shares: Array) -> Array:
    """Sum over the keys [r k g s c]; over those of several queries by a product like that with the values.

    Its order is the same for each of the queries; that of a sum over an axis, or of a product with a vector, is not.
    """
    if shares.shape[3] == 1:
        return shares.sum(axis=-1)
    ones = jnp.ones((*shares.shape[:2], shares.shape[-1], COLUMNS), jnp.float32)
    return jnp.einsum("rkgsc,rkce->rkgse", shares, ones, precision=PRECISE)[..., 0]


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
    return _mask(_products("rkgse,rkce->rkgsc", grouped, k), seen[:, None, None], config)


def _mask(products: Array, seen: Array, config: DecoderConfig) -> Array:
    """Logits from products of queries and keys."""
    logits = products * scale_of(config)
    if config.attention_softcap is not None:
        logits = config.attention_softcap * jnp.tanh(logits / config.attention_softcap)
    return jnp.where(seen, logits, LOWEST)


def scale_of(config: DecoderConfig) -> float:
    """Factor of the products of queries and keys."""
    return config.e**-0.5 if config.query_scale is None else config.query_scale
