"""The decoder by itself: cache, packing, causality, padding (M2). That it is the right one is in test_families.py."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.models.attention import visible
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy, parameters, product, run_layer, shape_of

pytestmark = pytest.mark.slow

PLAIN = DecoderConfig(v=67, d=24, h=4, k=4, e=6, f=20, windows=(None, None), ropes=(Rope(), Rope()))
FULL = DecoderConfig(
    v=67,
    d=24,
    h=6,
    k=2,
    e=8,
    f=20,
    windows=(4, None, 7),
    ropes=(
        Rope(theta=100.0),
        Rope(theta=1e3, kind="yarn", factor=4.0, original_length=16, magnitude=1.1),
        Rope(theta=1e3, kind="llama3", factor=8.0, original_length=32),
    ),
    activation="gelu_tanh",
    norm_offset=1.0,
    sandwich_norms=True,
    qk_norm=True,
    qkv_bias=True,
    o_bias=True,
    ffn_bias=True,
    tied=True,
    embed_scale=24**0.5,
    query_scale=0.3,
    attention_softcap=2.0,
    logit_softcap=5.0,
)
NEAR = DecoderConfig(v=67, d=24, h=6, k=3, e=4, f=20, windows=(3, 2), ropes=(Rope(), Rope(kind="linear", factor=2.0)))
CONFIGS = {"plain": PLAIN, "full": FULL, "near": NEAR}
TOLERANCE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def random():
    return np.random.default_rng(0)


def random_params(config, seed=1, dtype=jnp.float32):
    """Parameters of which none is zero or one."""
    random = np.random.default_rng(seed)
    shapes = {name: shape_of(parameter, config) for name, parameter in parameters(config).items()}
    return {name: jnp.asarray(random.normal(0.0, 0.3, shape), dtype) for name, shape in shapes.items()}


def full_forward(config, params, tokens_rs):
    """Logits of rows without padding and without cache: what the others are held against."""
    return np.asarray(jax.jit(make_policy(config).apply)(params, tokens_rs)[0])


# Cache ------------------------------------------------------------------------------------------------


def deal(rows, width, random):
    """The tokens of ragged rows in chunks [r width]: each row gives some of its next ones, with padding between."""
    given = [0] * len(rows)
    while any(n < len(row) for n, row in zip(given, rows, strict=True)):
        tokens_rs, segments_rs = random.integers(0, 67, (len(rows), width)), np.zeros((len(rows), width), int)
        for r, row in enumerate(rows):
            places = np.flatnonzero(random.random(width) < 0.7)[: len(row) - given[r]]
            tokens_rs[r, places] = row[given[r] : given[r] + len(places)]
            segments_rs[r, places] = 1
            given[r] += len(places)
        yield tokens_rs.astype(np.int32), segments_rs.astype(np.int32)


@pytest.mark.parametrize(
    ("name", "width", "slots"),
    [("full", 1, 19), ("full", 5, 19), ("full", 19, 30), ("near", 3, 19), ("near", 40, 64), ("plain", 8, 19)],
)
def test_M2_cached_decoding_equals_the_full_forward(random, name, width, slots):
    config, lengths = CONFIGS[name], (19, 1, 7, 12)
    policy, params = make_policy(config), random_params(config)
    tokens_rs = random.integers(0, 67, (4, 19)).astype(np.int32)
    step, cache = jax.jit(policy.apply), policy.make_cache(4, slots)
    found = [[] for _ in lengths]
    for chunk_rs, segments_rs in deal([row[:n] for row, n in zip(tokens_rs, lengths, strict=True)], width, random):
        logits, cache = step(params, chunk_rs, segments=segments_rs, cache=cache)
        for r in range(4):
            found[r].extend(np.asarray(logits[r])[segments_rs[r] > 0])
    assert cache.next.tolist() == list(lengths)
    expected = full_forward(config, params, tokens_rs)
    for r, n in enumerate(lengths):
        np.testing.assert_allclose(found[r], expected[r, :n], **TOLERANCE)


def test_M2_a_step_of_padding_leaves_the_cache_as_it_was(random):
    policy, params = make_policy(FULL), random_params(FULL)
    tokens_rs, ones_rs = random.integers(0, 67, (2, 6)).astype(np.int32), np.ones((2, 6), np.int32)
    step = jax.jit(policy.hidden)
    _, cache = step(params, tokens_rs, segments=ones_rs, cache=policy.make_cache(2, 9))
    hidden, after = step(params, tokens_rs, segments=0 * ones_rs, cache=cache)
    assert not np.any(hidden)
    jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_M2_what_lies_in_free_slots_is_never_read(random):
    policy, params = make_policy(FULL), random_params(FULL)
    tokens_rs = random.integers(0, 67, (2, 6)).astype(np.int32)
    clean = policy.make_cache(2, 9)
    dirty = clean.replace(keys=clean.keys + 1e30, values=clean.values + 1e30)
    step = jax.jit(policy.hidden)
    found, expected = (step(params, tokens_rs, cache=cache)[0] for cache in (dirty, clean))
    np.testing.assert_array_equal(found, expected)


# Packing and causality --------------------------------------------------------------------------------


def test_M2_packed_rows_equal_separate_ones(config, random):
    policy, params = make_policy(config), random_params(config)
    segments_rs = np.array([[1] * 9 + [0] * 2 + [2] * 1 + [7] * 8 + [0], [3] * 21], np.int32)
    tokens_rs = random.integers(0, 67, segments_rs.shape).astype(np.int32)
    first = np.array([[np.argmax(row == segment) for segment in row] for row in segments_rs])
    positions_rs = (np.arange(21)[None] - first).astype(np.int32)
    logits, _ = jax.jit(policy.apply)(params, tokens_rs, positions=positions_rs, segments=segments_rs)
    places = [np.flatnonzero(segments_rs[row] == segment) for row, segment in [(0, 1), (0, 2), (0, 7), (1, 3)]]
    alone_rs = np.zeros((4, 21), np.int32)  # what follows a segment here is not seen by it
    for r, place in enumerate(places):
        alone_rs[r, : len(place)] = tokens_rs[r // 3, place]
    expected = full_forward(config, params, alone_rs)
    for r, place in enumerate(places):
        np.testing.assert_allclose(logits[r // 3, place], expected[r, : len(place)], **TOLERANCE)


def influence(config, segments_s):
    """Which position depends on which, by the gradient of its hidden state: [s s'] of bool, exact zeros are False."""
    policy, params = make_policy(config), random_params(config)
    tokens_s = np.arange(1, len(segments_s) + 1, dtype=np.int32)  # all different, so an embedding is a position

    def states(embed):
        hidden, _ = policy.hidden(params | {"embed": embed}, tokens_s[None], segments=jnp.asarray(segments_s)[None])
        return hidden[0]

    def pulled_back(cotangent):
        return jnp.abs(jax.vjp(states, params["embed"])[1](cotangent)[0]).sum(1)[tokens_s]

    # One at a time and not under vmap: XLA of jaxlib 0.10.2 on CPUs gets some batched reductions wrong.
    basis = jnp.eye(len(segments_s) * config.d).reshape(-1, len(segments_s), config.d)
    found = jax.jit(partial(jax.lax.map, pulled_back))(basis)  # s*d s'
    return np.asarray(found.reshape(len(segments_s), config.d, -1).sum(1)) > 0


def test_M2_causality_and_isolation_by_gradient(config):
    segments_s = np.array([1, 1, 1, 1, 1, 1, 0, 2, 2, 2, 2, 0], np.int32)
    found, s = influence(config, segments_s), np.arange(12)
    reach = sum(12 if window is None else window - 1 for window in config.windows)
    same = (segments_s[:, None] == segments_s[None]) & (segments_s[:, None] > 0)
    distance = s[:, None] - s[None]
    np.testing.assert_array_equal(found, same & (distance >= 0) & (distance <= reach))


def test_who_sees_whom_by_hand():
    positions, segments = jnp.array([[0, 1, 2, 0, 0]]), jnp.array([[1, 1, 1, 2, 0]])
    seen = visible(positions, positions, segments, segments, 2)[0]
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(seen, np.array(expected, bool))


# Padding, gradients, layers ---------------------------------------------------------------------------


def weighted_sum(params, tokens_rs, segments_rs, policy):
    logits, _ = policy.apply(params, tokens_rs, segments=segments_rs)
    return jnp.sum(jnp.where(segments_rs[:, :, None] > 0, jnp.sin(logits), 0.0))


def test_padding_yields_zeros_and_touches_nothing(random):
    policy, params = make_policy(FULL), random_params(FULL)
    segments_rs = np.array([[1, 1, 0, 0, 1, 1], [0] * 6], np.int32)
    tokens_rs = random.integers(0, 60, (2, 6)).astype(np.int32)
    other_rs = np.where(segments_rs > 0, tokens_rs, 66)
    hidden, _ = jax.jit(policy.hidden)(params, tokens_rs, segments=segments_rs)
    assert not np.any(np.asarray(hidden)[segments_rs == 0])
    gradient = jax.jit(jax.grad(partial(weighted_sum, policy=policy)))
    found, expected = (gradient(params, tokens, segments_rs) for tokens in (other_rs, tokens_rs))
    for name, value in found.items():
        assert np.all(np.isfinite(value)), name
        np.testing.assert_allclose(value, expected[name], err_msg=name, **TOLERANCE)


@pytest.mark.usefixtures("nan_allowed")
def test_a_poisoned_embedding_of_padding_reaches_nothing(random):
    policy, params = make_policy(NEAR), random_params(NEAR)
    segments_rs = np.array([[1, 1, 0, 0, 1, 1]], np.int32)
    tokens_rs = np.where(segments_rs > 0, random.integers(0, 60, (1, 6)), 66).astype(np.int32)
    poisoned = params | {"embed": params["embed"].at[66].set(jnp.nan)}
    gradient = jax.jit(jax.value_and_grad(partial(weighted_sum, policy=policy)))
    found, expected = (gradient(values, tokens_rs, segments_rs) for values in (poisoned, params))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_rematerialised_and_unrolled_layers_give_the_same_values_and_gradients(random):
    params, tokens_rs = random_params(FULL), random.integers(0, 67, (2, 9)).astype(np.int32)
    segments_rs = np.array([[1] * 9, [1] * 5 + [0] * 4], np.int32)
    results = []
    for settings in ({}, {"remat": True}, {"unroll": True}):
        loss = partial(weighted_sum, policy=make_policy(FULL, **settings))
        results.append(jax.jit(jax.value_and_grad(loss))(params, tokens_rs, segments_rs))
    for found in results[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, results[0])


def test_every_parameter_of_every_layer_has_a_gradient(random):
    tokens_rs = random.integers(0, 67, (2, 9)).astype(np.int32)
    loss = partial(weighted_sum, policy=make_policy(FULL))
    gradient = jax.jit(jax.grad(loss))(random_params(FULL), tokens_rs, np.ones((2, 9), np.int32))
    for name, value in gradient.items():
        by_layer = np.abs(value).reshape(len(value) if parameters(FULL)[name].axes[0] == "n" else 1, -1)
        assert np.all(by_layer.max(1) > 1e-6), name


def test_half_precision_stays_near_and_keeps_its_type(random):
    policy, wide = make_policy(FULL, dtype=jnp.bfloat16), random_params(FULL)
    narrow = {name: value.astype(jnp.bfloat16) for name, value in wide.items()}
    exact = {name: value.astype(jnp.float32) for name, value in narrow.items()}
    tokens_rs = random.integers(0, 67, (2, 9)).astype(np.int32)
    hidden, cache = jax.jit(policy.hidden)(narrow, tokens_rs, cache=policy.make_cache(2, 9))
    assert (hidden.dtype, cache.keys.dtype) == (jnp.bfloat16, jnp.bfloat16)
    found, expected = policy.unembed(narrow, hidden), full_forward(FULL, exact, tokens_rs)
    assert found.dtype == jnp.float32
    assert np.abs(found - expected).mean() < 0.05 * np.abs(expected).mean() + 0.02


@pytest.mark.parametrize("remat", [False, True])
def test_a_7b_shape_lowers(remat):
    config = DecoderConfig(
        v=152064, d=3584, h=28, k=4, e=128, f=18944, windows=(None,) * 28, ropes=(Rope(1e6),) * 28, qkv_bias=True
    )
    policy = make_policy(config, dtype=jnp.bfloat16, remat=remat)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    assert sum(value.size for value in params.values()) == 7_615_616_512  # as published
    tokens = jax.ShapeDtypeStruct((4, 4096), jnp.int32)
    logits, _ = jax.eval_shape(policy.apply, params, tokens)
    assert (logits.shape, logits.dtype) == ((4, 4096, 152064), jnp.float32)
    loss = partial(weighted_sum, policy=policy)
    jax.jit(jax.grad(loss)).lower(params, tokens, tokens)


def test_layers_are_scanned_in_order(random):
    seen = []

    def spy(x, layer, held, view, config, attend):
        seen.append(layer["q"].shape)
        return run_layer(x, layer, held, view, config, attend)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowgrpo.models.decoder.run_layer", spy)
        tokens_rs = random.integers(0, 67, (1, 3)).astype(np.int32)
        make_policy(FULL).hidden(random_params(FULL), tokens_rs)
    assert seen == [(24, 6, 8)]  # traced once, whatever the number of layers


@pytest.mark.parametrize("terms", [96, 384, 1024, 2048])
def test_F7_bits_of_a_long_sum_do_not_depend_on_the_number_of_rows(terms):
    x, w = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(200, terms), (terms, 64)]))
    whole = jax.jit(product)(x, w)
    np.testing.assert_allclose(whole, np.asarray(x, np.float64) @ np.asarray(w, np.float64), atol=1e-3)
    for rows in (2, 16, 33):
        np.testing.assert_array_equal(jax.jit(product)(x[:rows], w), whole[:rows])


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
def test_the_gradient_of_a_divided_product_is_that_of_a_whole_one(wanted):
    x, w = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(5, 400), (400, 7)]))
    slopes, expected = (
        jax.grad(lambda x, w, way=way: jnp.sin(way(x, w)).sum(), argnums=wanted)(x, w) for way in (product, jnp.matmul)
    )
    for ours, theirs in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
