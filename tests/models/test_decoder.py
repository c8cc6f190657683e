"""The decoder by itself: cache, packing, causality, padding (M2). That it is the right one is in test_families.py."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import FULL, random_params

from flowgrpo.models import kv_cache
from flowgrpo.models.attention import visible
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy, parameters
from flowgrpo.models.products import product

NEAR = DecoderConfig(v=97, d=24, h=4, k=4, e=6, f=20, windows=(3, 2), ropes=(Rope(), Rope(kind="linear", factor=2.0)))
CONFIGS = {"full": FULL, "near": NEAR}
ROWS, LENGTH = 4, 19
TOKENS_RS = np.random.default_rng(0).integers(0, 90, (ROWS, LENGTH)).astype(np.int32)
WHOLE_RS, IN_ORDER_RS = np.ones_like(TOKENS_RS), np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
TOLERANCE = {"rtol": 0, "atol": 1e-5}


@cache
def apply(config):
    return jax.jit(make_policy(config).apply)


def forward(config, tokens_rs=TOKENS_RS, positions_rs=IN_ORDER_RS, segments_rs=WHOLE_RS):
    """Logits without cache, in one shape."""
    return np.asarray(apply(config)(random_params(config), tokens_rs, positions_rs, segments_rs)[0])


def ragged_chunks(lengths, width, random):
    """The tokens of ragged rows in chunks [r width]: each row gives some of its next ones, with padding between."""
    count_r = [0] * ROWS
    while count_r != list(lengths):
        tokens_rs, segments_rs = random.integers(0, 90, (ROWS, width)), np.zeros((ROWS, width), int)
        for r, length in enumerate(lengths):
            columns = np.flatnonzero(random.random(width) < 0.7)[: length - count_r[r]]
            tokens_rs[r, columns] = TOKENS_RS[r, count_r[r] : count_r[r] + len(columns)]
            segments_rs[r, columns] = 1
            count_r[r] += len(columns)
        yield tokens_rs.astype(np.int32), segments_rs.astype(np.int32)


CACHED = [("full", 1, 19, 1), ("full", 5, 30, 1), ("near", 19, 19, 1), ("full", 1, 19, True), ("near", 5, 130, True)]
CACHED = [(*case, kv_cache.BLOCK) for case in CACHED] + [("near", 5, 24, True, 8), ("full", 1, 72, True, 8)]


@pytest.mark.parametrize(("name", "width", "slots", "unroll", "block"), CACHED)
def test_M2_cached_decoding_equals_the_full_forward(name, width, slots, unroll, block, monkeypatch):
    """Free slots of the cache are never read, and a step of padding leaves it as it was.

    Layers are stacked, or each has parameters and a cache of its own, and there blocks may be arrays or be looped over.
    """
    monkeypatch.setattr(kv_cache, "BLOCK", block)
    config, lengths, actual = CONFIGS[name], (19, 1, 7, 12), [[] for _ in range(ROWS)]
    policy = make_policy(config, unroll=unroll)
    params, cache = random_params(config), policy.make_cache(ROWS, slots)
    keys, values = jax.tree.map(lambda x: x + 1e30, (cache.keys, cache.values))
    cache = cache.replace(keys=keys, values=values)

    @jax.jit
    def apply(params, *given):
        return policy.apply(params if policy.unstack_layers is None else policy.unstack_layers(params), *given)

    for chunk_rs, segments_rs in ragged_chunks(lengths, width, np.random.default_rng(0)):
        logits, cache = apply(params, chunk_rs, None, segments_rs, cache)
        for r in range(ROWS):
            actual[r].extend(np.asarray(logits[r])[segments_rs[r] > 0])
    assert cache.next.tolist() == list(lengths)
    for r, n in enumerate(lengths):
        np.testing.assert_allclose(actual[r], forward(config)[r, :n], **TOLERANCE)
    logits, after = apply(params, chunk_rs, None, 0 * segments_rs, cache)
    assert not np.any(logits)
    jax.tree.map(np.testing.assert_array_equal, after, cache)


@pytest.mark.parametrize("name", CONFIGS)
def test_M2_packed_rows_equal_separate_ones(name):
    """And padding yields zeros."""
    segments_rs = np.array([[1] * 8 + [0] * 2 + [2] + [7] * 7 + [0], [3] * 19, [0] * 19, [4] * 9 + [5] * 10], np.int32)
    first = np.array([[np.argmax(row == segment) for segment in row] for row in segments_rs])
    packed = forward(CONFIGS[name], TOKENS_RS, (np.arange(LENGTH)[None] - first).astype(np.int32), segments_rs)
    assert not packed[segments_rs == 0].any()
    for row, segment in [(0, 1), (0, 2), (0, 7), (1, 3), (3, 5)]:
        place = np.flatnonzero(segments_rs[row] == segment)
        alone = forward(CONFIGS[name], np.roll(TOKENS_RS, -place[0], axis=1))  # it does not see what follows
        np.testing.assert_allclose(packed[row, place], alone[row, : len(place)], **TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_M2_causality_and_isolation_by_gradient(name):
    """Which position depends on which, by the gradient of its hidden state; exact zeros if it does not."""
    config, segments_s = CONFIGS[name], np.array([1, 1, 1, 1, 1, 1, 0, 2, 2, 2, 2, 0], np.int32)
    policy, params, s = make_policy(config), random_params(config), np.arange(12, dtype=np.int32)

    def states(embed):  # tokens are all different, so an embedding is a position
        return policy.hidden(params | {"embed": embed}, s[None], segments=jnp.asarray(segments_s)[None])[0][0]

    def pulled_back(cotangent):
        return jnp.abs(jax.vjp(states, params["embed"])[1](cotangent)[0]).sum(1)[s]

    weights = np.random.default_rng(0).normal(size=(12, 1, config.d)) * np.eye(12)[:, :, None]
    # One at a time and not under vmap: XLA of jaxlib 0.10.2 on CPUs gets some batched reductions wrong.
    actual = jax.jit(partial(jax.lax.map, pulled_back))(jnp.asarray(weights, jnp.float32))
    reach = sum(12 if window is None else window - 1 for window in config.windows)
    same, distance = (segments_s[:, None] == segments_s[None]) & (segments_s[:, None] > 0), s[:, None] - s[None]
    np.testing.assert_array_equal(np.asarray(actual) > 0, same & (distance >= 0) & (distance <= reach))


def test_attention_mask_worked_by_hand():
    positions, segments = jnp.array([[0, 1, 2, 0, 0]]), jnp.array([[1, 1, 1, 2, 0]])
    visible_pairs = visible(positions, positions, segments, segments, 2)[0]
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(visible_pairs, np.array(expected, bool))


UNTIED = replace(FULL, tied=False)
PADDED_RS = np.where(np.random.default_rng(1).random(TOKENS_RS.shape) < 0.6, 1, 0).astype(np.int32)


@cache
def slopes(**settings):
    """A sum over the logits, and its gradient."""

    def sum_of(params, tokens_rs, segments_rs):
        logits, _ = policy.apply(params, tokens_rs, segments=segments_rs)
        return jnp.sum(jnp.where(segments_rs[:, :, None] > 0, jnp.sin(logits), 0.0))

    policy = make_policy(UNTIED, **settings)
    return jax.jit(jax.value_and_grad(sum_of))


@pytest.mark.usefixtures("nan_allowed")
def test_padding_never_leaks_and_every_parameter_has_a_gradient():
    params, tokens_rs = random_params(UNTIED), np.where(PADDED_RS > 0, TOKENS_RS, 96)
    poisoned = params | {"embed": params["embed"].at[96].set(jnp.nan)}
    actual, expected = (slopes()(values, tokens_rs, PADDED_RS) for values in (poisoned, params))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    for name, value in expected[1].items():
        by_layer = np.abs(value).reshape(len(value) if parameters(UNTIED)[name].axes[0] == "n" else 1, -1)
        assert np.all(by_layer.max(1) > 1e-6), name


@pytest.mark.slow
def test_rematerialised_and_unrolled_layers_give_the_same_values_and_gradients():
    results = (run(random_params(UNTIED), TOKENS_RS, PADDED_RS) for run in (slopes(), slopes(remat=True, unroll=True)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *results)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_stays_near_and_keeps_its_type(dtype):
    policy, narrow = make_policy(FULL, dtype=dtype), random_params(FULL, dtype=dtype)
    hidden, cache = jax.jit(policy.hidden)(narrow, TOKENS_RS, cache=policy.make_cache(ROWS, LENGTH))
    assert (hidden.dtype, cache.keys.dtype) == (dtype, dtype)
    actual, expected = policy.unembed(narrow, hidden), forward(FULL)
    assert actual.dtype == jnp.float32
    assert np.abs(actual - expected).mean() < 0.05 * np.abs(expected).mean() + 0.02


def test_a_7b_shape_lowers():
    sizes = {"v": 152064, "d": 3584, "h": 28, "k": 4, "e": 128, "f": 18944}
    config = DecoderConfig(**sizes, windows=(None,) * 28, ropes=(Rope(1e6),) * 28, qkv_bias=True)
    policy = make_policy(config, dtype=jnp.bfloat16, remat=True)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    assert sum(value.size for value in params.values()) == 7_615_616_512  # as published
    tokens = jax.ShapeDtypeStruct((4, 4096), jnp.int32)
    logits, _ = jax.eval_shape(policy.apply, params, tokens)
    assert (logits.shape, logits.dtype) == ((4, 4096, 152064), jnp.float32)
    jax.jit(jax.grad(lambda params, tokens: policy.apply(params, tokens)[0].sum())).lower(params, tokens)


@pytest.mark.parametrize("terms", [96, 2048])
def test_F7_bits_of_a_long_sum_do_not_depend_on_rows(terms):
    random = np.random.default_rng(0)
    x, w = (random.normal(size=shape).astype(np.float32) for shape in [(200, terms), (terms, 64)])
    whole = jax.jit(product)(x, w)
    np.testing.assert_allclose(whole, x.astype(np.float64) @ w.astype(np.float64), atol=1e-3)
    for rows in (2, 33):
        np.testing.assert_array_equal(jax.jit(product)(x[:rows], w), whole[:rows])


@pytest.mark.parametrize("wanted", [0, 1])
def test_gradient_of_a_split_product_equals_the_whole_ones(wanted):
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in [(5, 400), (400, 7)])
    actual = jax.jit(jax.grad(lambda x, w: jnp.sin(product(x, w)).sum(), argnums=wanted))(x, w)
    d_out = np.cos(np.asarray(x) @ np.asarray(w))
    np.testing.assert_allclose(actual, (d_out @ np.asarray(w).T, np.asarray(x).T @ d_out)[wanted], atol=1e-4)
