"""Attention: block by block it is the plain formula, and other rows change no bit of it; kernels keep the mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowgrpo as fg
from flowgrpo.models import attention
from flowgrpo.models.attention import attend, attend_cache, fused, visible
from flowgrpo.models.cache import BLOCK
from flowgrpo.models.config import DecoderConfig, Rope

PLAIN = DecoderConfig(v=11, d=16, h=4, k=2, e=8, f=16, windows=(None,), ropes=(Rope(),))
CAPPED = DecoderConfig(v=11, d=16, h=4, k=2, e=8, f=16, windows=(None,), ropes=(Rope(),), attention_softcap=2.0)
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
    seen = visible(*(jnp.asarray(x, jnp.int32) for x in (q_positions, k_positions, q_segments, k_segments)), 50)
    return q, k, v, seen


def by_blocks(packed, blocks: int, config):
    q, k, v, seen = packed

    def block_of(index):
        at = (index * BLOCK, BLOCK)
        return tuple(jax.lax.dynamic_slice_in_dim(x, *at, axis=2) for x in (k, v, seen))

    return jax.jit(lambda n: attend_cache(q, block_of, n, config))(blocks)


def naive(packed, config):
    """The formula for one query and head after the other, in float64."""
    q, k, v, seen = (np.asarray(x, np.float64) for x in packed)
    out = np.zeros(q.shape)
    for r, h, s in np.ndindex(*q.shape[:3]):
        logits = k[r, h // 2] @ q[r, h, s] * 8**-0.5
        if config.attention_softcap:
            logits = config.attention_softcap * np.tanh(logits / config.attention_softcap)
        shares = np.exp(logits) * seen[r, s]
        if shares.sum() > 0:
            out[r, h, s] = shares @ v[r, h // 2] / shares.sum()
    return out


@pytest.mark.slow
@pytest.mark.parametrize("config", [PLAIN, CAPPED])
def test_both_ways_are_the_formula(packed, config):
    expected = naive(packed, config)
    np.testing.assert_allclose(attend(*packed, config), expected, atol=2e-6)
    np.testing.assert_allclose(by_blocks(packed, 2, config), expected, atol=2e-6)


def test_E3_blocks_that_a_row_does_not_see_change_no_bit(packed):
    q, k, v, seen = packed
    short = (q, k, v, seen & (jnp.arange(SLOTS) < BLOCK)[None, None])
    np.testing.assert_array_equal(by_blocks(short, 1, PLAIN), by_blocks(short, 2, PLAIN))


def test_F7_a_call_and_a_cache_are_summed_in_one_order(packed):
    ours = jax.jit(lambda q, k, v, seen: attend(q, k, v, seen, PLAIN))(*packed)
    np.testing.assert_array_equal(ours, by_blocks(packed, 2, PLAIN))


@pytest.mark.slow
def test_many_blocks_are_looped_over_with_the_same_result_and_gradient(packed, monkeypatch):
    q, k, v, seen = (x if x.shape[2] == QUERIES else x[:, :, : SLOTS - 9] for x in packed)

    def value_and_slopes():
        return jax.value_and_grad(lambda q, k, v: (attend(q, k, v, seen, CAPPED) ** 2).sum(), argnums=(0, 1, 2))(
            q, k, v
        )

    expected = value_and_slopes()
    monkeypatch.setattr(attention, "UNROLLED", 1)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), value_and_slopes(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("config", [PLAIN, CAPPED])
def test_the_gradient_is_that_of_the_formula(packed, config):
    q, k, v, seen = packed
    target = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def formula(q, k, v):
        logits = jnp.einsum("rhse,rhce->rhsc", q, jnp.repeat(k, 2, axis=1)) * 8**-0.5
        if config.attention_softcap is not None:
            logits = config.attention_softcap * jnp.tanh(logits / config.attention_softcap)
        shares = jnp.where(seen[:, None], jnp.exp(logits), 0.0)
        total = shares.sum(axis=-1, keepdims=True)
        return jnp.einsum("rhsc,rhce->rhse", shares / jnp.where(total > 0, total, 1.0), jnp.repeat(v, 2, axis=1))

    ours, theirs = (
        jax.grad(lambda *x, way=way: (way(*x) * target).sum(), argnums=(0, 1, 2))(q, k, v)
        for way in (lambda *x: attend(*x, seen, config), formula)
    )
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected, atol=5e-6)


def test_nothing_of_a_block_is_kept_for_the_backward_pass(packed):
    q, k, v, seen = packed
    _, back = jax.vjp(lambda q, k, v: attend(q, k, v, seen, PLAIN), q, k, v)
    kept = sum(x.size for x in jax.tree.leaves(back))
    # Inputs, the result, who sees whom, and one number a query and head.
    assert kept <= 2 * q.size + k.size + v.size + seen.size + q.size // 8


def test_no_blocks_at_all_give_zeros(packed):
    assert not by_blocks(packed, 0, PLAIN).any()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_M2_a_kernel_keeps_segments_apart_and_its_gradient_is_finite(packed, implementation):
    q, k, v, seen = packed
    kernel = fused(implementation)
    np.testing.assert_allclose(kernel(q, k, v, seen, PLAIN), attend(q, k, v, seen, PLAIN), atol=2e-6)
    target = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def loss(way):
        return jax.grad(lambda q, k, v: (way(q, k, v, seen, PLAIN) * target).sum(), argnums=(0, 1, 2))(q, k, v)

    for ours, theirs in zip(loss(attend), loss(kernel), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=5e-6)
    unseen = ~seen.any(axis=1)
    assert not jnp.where(unseen[:, None, :, None], loss(kernel)[1], 0).any()


def test_a_kernel_refuses_what_it_can_not_do(packed):
    with pytest.raises(fg.BadInput, match="soft-cap"):
        fused()(*packed, CAPPED)
