"""Attention over whole rows, over blocks of a cache, or by a kernel.

    softmax(scale q k^T, under the mask) v        in float32, with grouped heads and an optional soft-cap

`visible` alone decides who sees whom, from positions, segments and window. `attend` (or a kernel of
`attention_kernels` in its place) works on the tokens of one call; `attend_cache` on a cache, only as far as any row is
filled. Both go block by block with a running softmax (Dao et al., 2022, arXiv:2205.14135).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.models.config import DecoderConfig

PRECISE = jax.lax.Precision.HIGHEST  # products of float32 are of float32 on every platform
BLOCK = 128  # keys that are attended to at once
COLUMNS = 8  # of a product that is used for a sum; with a single one it would be a product with a vector
UNROLLED = 8  # so many blocks of a cache are compiled one after the other; more are looped over
TILED = 4  # so many blocks of a row are compiled one after the other, for each block of queries; more are looped over
LOWEST = -1e30  # a logit that no visible one comes near to, and that float32 can subtract

Part = tuple[Array, Array, Array]  # keys and values [r k c e] of a block, and who sees them [r s c]


class Sight(NamedTuple):
    """Positions and segments of queries and keys, and how far a query looks back: all that `visible` depends on."""

    q_position: Array  # r s
    k_position: Array  # r c
    q_segment: Array  # r s: 0 is padding
    k_segment: Array  # r c
    window: Array | int  # of the layer
    k_shared: Array | None = None  # r c: keys of a prompt, which the queries of all segments see; None: there are none


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
    k_shared: Array | None = None,
) -> Array:
    """Say if a query sees a key: same segment or shared, no padding, not later, nearer than `window` -> [r q k]."""
    distance = q_position[:, :, None] - k_position[:, None, :]
    same = q_segment[:, :, None] == k_segment[:, None, :]
    if k_shared is not None:
        same |= k_shared[:, None, :]
    return same & (q_segment[:, :, None] > 0) & (distance >= 0) & (distance < window)


def attend(q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> Array:
    """Plain attention: [r h s e], [r k c e] -> [r h s e]; a query that sees nothing gives zeros.

    The queries are the last s of the keys' tokens, and those of a segment stand in the order of their positions, so a
    block of queries meets no later block of keys. The blocks are those of `attend_cache`, so that what is sampled and
    what is scored are summed in one order (F7). The backward pass keeps one number a query and computes shares again,
    block by block: neither logits nor mask are ever [s c] as a whole, and nothing is kept of a block.
    """
    return _attended(q, k, v, sight, config)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attended(q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> Array:
    return _attend_forward(q, k, v, sight, config)[0]


def _attend_forward(q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> tuple[Array, tuple]:
    grouped = _group(q, config)
    if k.shape[2] <= TILED * BLOCK:
        tiles = [_attend_tile(tile, grouped, k, v, sight, config) for tile in _tiles(q, k)]
        running = jax.tree.map(lambda *x: jnp.concatenate(x, axis=3), *tiles)
    else:
        add = partial(_add, grouped=grouped, config=config)

        def step(running: _Running, block: tuple) -> tuple[_Running, None]:
            return add(running, _see_block(block, sight)), None

        running, _ = jax.lax.scan(step, _empty(grouped), _in_blocks(k, v, sight))
    out = _finish(running, q)
    weight = running.highest + jnp.log(jnp.where(running.total > 0, running.total, 1.0))
    return out, (q, k, v, sight, out, weight)


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
    if k.shape[2] <= TILED * BLOCK:
        d_q, d_k, d_v = _backward_by_tiles(given, q, k, v, sight, config)
    else:
        back, d_q = partial(_back, given=given, config=config), jnp.zeros(grouped.shape, jnp.float32)
        d_q, pair = jax.lax.scan(lambda d_q, x: back(d_q, _see_block(x, sight)), d_q, _in_blocks(k, v, sight))
        d_k, d_v = (_out_of_blocks(x, k.shape[2]) for x in pair)
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
    """Add one block's share to the gradient of the queries, and compute the gradients of its keys and values."""
    grouped, d_mixed, weight, through = given
    k, v = (x.astype(grouped.dtype) for x in part[:2])
    seen, product = part[2][:, None, None], partial(jnp.einsum, precision=PRECISE, preferred_element_type=jnp.float32)
    logits = _logits(grouped, k, part[2], config)
    shares = jnp.where(seen, jnp.exp(logits - weight[..., None]), 0.0)
    d_v = product("rkgsc,rkgse->rkce", shares.astype(v.dtype), d_mixed)
    d_logits = shares * (product("rkgse,rkce->rkgsc", d_mixed, v) - through[..., None])
    if config.attention_softcap is not None:
        d_logits *= 1.0 - (jnp.where(seen, logits, 0.0) / config.attention_softcap) ** 2
    d_logits = (d_logits * scale_of(config)).astype(k.dtype)
    d_q = d_q + product("rkgsc,rkce->rkgse", d_logits, k)
    return d_q, (product("rkgsc,rkgse->rkce", d_logits, grouped), d_v)


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
    shared = None if sight.k_shared is None else part(sight.k_shared)
    return sight._replace(k_position=part(sight.k_position), k_segment=part(sight.k_segment), k_shared=shared)


def _in_blocks(k: Array, v: Array, sight: Sight) -> tuple:
    """[r _ c ...] -> [blocks r _ BLOCK ...], what is missing from the last being keys of segment 0."""
    keys = _look_at(sight, lambda x: _divide(x[:, None])[:, :, 0])
    return _divide(k), _divide(v), (keys.k_position, keys.k_segment, keys.k_shared)


def _see_block(block: tuple, sight: Sight) -> Part:
    """One of these blocks, and who sees it."""
    k, v, (k_position, k_segment, k_shared) = block
    sight = sight._replace(k_position=k_position, k_segment=k_segment, k_shared=k_shared)
    return k, v, visible(*sight)


def _divide(x: Array) -> Array:
    blocks = -(-x.shape[2] // BLOCK)
    short = blocks * BLOCK - x.shape[2]
    x = jnp.pad(x, [(0, 0), (0, 0), (0, short)] + [(0, 0)] * (x.ndim - 3))
    return jnp.moveaxis(x.reshape(*x.shape[:2], blocks, BLOCK, *x.shape[3:]), 2, 0)


def _out_of_blocks(x: Array, length: int) -> Array:
    """The inverse, for keys and values: [blocks r k BLOCK e] -> [r k c e]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, :length]


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
    logits = _products("rkgse,rkce->rkgsc", grouped, k) * scale_of(config)
    if config.attention_softcap is not None:
        logits = config.attention_softcap * jnp.tanh(logits / config.attention_softcap)
    return jnp.where(seen[:, None, None], logits, LOWEST)


def scale_of(config: DecoderConfig) -> float:
    """Factor of the products of queries and keys."""
    return config.e**-0.5 if config.query_scale is None else config.query_scale
