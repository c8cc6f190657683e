"""Attention: block by block it is the plain formula, and other rows change no bit of it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.models import attention
from flowgrpo.models.attention import MaskSpec, attend, attend_cache, visible
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.kv_cache import BLOCK

PLAIN = DecoderConfig(v=11, d=16, h=4, k=2, e=8, f=16, windows=(None,), ropes=(Rope(),))
CAPPED = replace(PLAIN, attention_softcap=2.0)
ROWS, QUERIES, SLOTS = 3, 5, 2 * BLOCK


@pytest.fixture(scope="module")
def packed():
    """Queries at the end of packed rows, some of them padding; keys of two segments, a gap and free slots."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(ROWS, heads, length, 8)), jnp.float32)
        for heads, length in ((4, QUERIES), (2, SLOTS), (2, SLOTS))
    )
    k_segments = np.where(np.arange(SLOTS) < 30, 1, 2) * (np.arange(SLOTS) < np.array([[80], [40], [0]]))
    k_positions = np.tile(np.arange(SLOTS), (ROWS, 1))
    q_segments = np.array([[1, 2, 2, 2, 0], [1, 1, 2, 2, 2], [0] * 5])
    q_positions = np.array([[20, 77, 78, 79, 0], [3, 29, 37, 38, 39], [0] * 5])
    mask = [jnp.asarray(x, jnp.int32) for x in (q_positions, k_positions, q_segments, k_segments)]
    return q, k, v, MaskSpec(mask[0], mask[1], mask[2], mask[3], 50)


def by_blocks(packed, blocks: int, config, **settings):
    q, k, v, mask = packed
    pairs = visible(*mask)

    def block_of(index):
        at = (index * BLOCK, BLOCK)
        keys, values, pair_block = (jax.lax.dynamic_slice_in_dim(x, *at, axis=2) for x in (k, v, pairs))
        return keys, values, pair_block

    return jax.jit(lambda n: attend_cache(q, block_of, n, config, **settings))(blocks)


def formula(q, k, v, mask, config):
    visible_pairs = visible(*mask)
    logits = jnp.einsum("rhse,rhce->rhsc", q, jnp.repeat(k, 2, axis=1)) * 8**-0.5
    if config.attention_softcap is not None:
        logits = config.attention_softcap * jnp.tanh(logits / config.attention_softcap)
    weights = jnp.where(visible_pairs[:, None], jnp.exp(logits), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("rhsc,rhce->rhse", weights / jnp.where(total > 0, total, 1.0), jnp.repeat(v, 2, axis=1))


def check_formula(attend_fn, packed, config):
    """The result and its gradient are those of the formula."""
    q, k, v, mask = packed
    target = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def run(attend_fn):
        out, backward = jax.vjp(lambda q, k, v: attend_fn(q, k, v, mask, config), q, k, v)
        return out, *backward(target)

    actual, expected = (jax.jit(run, static_argnums=0)(attend_fn) for attend_fn in (attend_fn, formula))
    jax.tree.map(partial(np.testing.assert_allclose, atol=5e-6, rtol=0), actual, expected)
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("config", [PLAIN, CAPPED])
def test_attention_and_its_gradient_are_those_of_the_formula(packed, config, monkeypatch):
    out, *_ = check_formula(attend, packed, config)
    np.testing.assert_allclose(by_blocks(packed, 2, config), out, atol=2e-6)
    monkeypatch.setattr(attention, "MAX_TILED_BLOCKS", 1)  # blocks are looped over, the last a short one
    q, k, v, mask = packed
    mask = mask._replace(k_position=mask.k_position[:, :-9], k_segment=mask.k_segment[:, :-9])
    check_formula(lambda *arguments: attend(*arguments), (q, k[:, :, :-9], v[:, :, :-9], mask), config)


@pytest.mark.parametrize("queries", [40, 21])
def test_tiles_of_queries_cover_the_keys_that_they_may_see(monkeypatch, queries):
    """Rows of two packed segments over three blocks of keys, the last a short one; all queries, or the last of them."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    assert [(tile.queries, tile.blocks) for tile in attention._tiles(*tokens(queries, 40)[:2])] == {
        40: [(slice(0, 16), 1), (slice(16, 32), 2), (slice(32, 40), 3)],
        21: [(slice(0, 13), 2), (slice(13, 21), 3)],
    }[queries]
    q, k, v = tokens(queries, 40)
    places, second = jnp.arange(40)[None], jnp.array([[25], [3]])  # where the second segment begins
    segments = jnp.where(places < second, 1, 2)
    positions = jnp.where(segments == 1, places, places - second)
    mask = MaskSpec(positions[:, -queries:], positions, segments[:, -queries:], segments, 20)
    check_formula(lambda *arguments: attend(*arguments), (q, k, v, mask), CAPPED)


def tokens(queries: int, keys: int):
    """Queries, keys and values of two rows."""
    rng = np.random.default_rng(1)
    sizes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    return [jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes]


def test_E3_blocks_that_are_masked_out_change_no_bit(packed):
    q, k, v, mask = packed
    short = (q, k, v, mask._replace(k_segment=jnp.where(jnp.arange(SLOTS) < BLOCK, mask.k_segment, 0)))
    np.testing.assert_array_equal(by_blocks(short, 1, PLAIN), by_blocks(short, 2, PLAIN))
    assert not by_blocks(short, 0, PLAIN).any()
    unrolled = [by_blocks(short, blocks, PLAIN, unrolled=2) for blocks in (1, 2)]
    np.testing.assert_array_equal(*unrolled)
    np.testing.assert_allclose(unrolled[0], by_blocks(short, 1, PLAIN), rtol=0, atol=1e-6)


def test_F7_rows_and_cache_are_summed_in_the_same_order(packed):
    ours = jax.jit(lambda q, k, v, mask: attend(q, k, v, mask, PLAIN))(*packed)
    np.testing.assert_array_equal(ours, by_blocks(packed, 2, PLAIN))


def test_residuals_have_no_mask_and_nothing_per_block(packed):
    q, k, v, mask = packed
    _, backward = jax.vjp(lambda q, k, v: attend(q, k, v, mask, PLAIN), q, k, v)
    residual_size = sum(x.size for x in jax.tree.leaves(backward))
    # Inputs, the result, positions and segments, and one number a query and head.
    assert residual_size <= 2 * q.size + k.size + v.size + 2 * ROWS * (QUERIES + SLOTS) + 1 + q.size // 8


@pytest.mark.parametrize("tiled", [4, 1])  # blocks one after the other, or looped over
def test_a_long_row_makes_no_array_of_queries_by_keys(monkeypatch, tiled):
    monkeypatch.setattr(attention, "BLOCK", 16)
    monkeypatch.setattr(attention, "MAX_TILED_BLOCKS", tiled)
    q, k, v = tokens(40, 40)
    places = jnp.broadcast_to(jnp.arange(40), (2, 40))
    mask = MaskSpec(places, places, jnp.ones_like(places), jnp.ones_like(places), 20)
    run = jax.make_jaxpr(jax.grad(lambda q: (attend(q, k, v, mask, PLAIN) ** 2).sum()))(q)
    assert "40,16]" in str(run) or "16,16]" in str(run)
    assert "40,40]" not in str(run)
