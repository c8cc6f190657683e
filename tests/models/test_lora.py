"""Adapters: nothing changes at the start, the base is shared and gets no gradient, merged equals adapted."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy, parameters, shape_of
from flowgrpo.models.lora import (
    PROJECTIONS,
    Adapted,
    LoraConfig,
    adapter_axes,
    adapter_shapes,
    init_adapter,
    lora_policy,
    merge,
)
from flowgrpo.types import BadInput

pytestmark = pytest.mark.slow

PLAIN = DecoderConfig(v=31, d=12, h=4, k=2, e=6, f=20, windows=(None, 5, None), ropes=(Rope(),) * 3, init_scale=0.3)
BIASED = dataclasses.replace(PLAIN, qkv_bias=True, o_bias=True, ffn_bias=True)
GEMMA = dataclasses.replace(
    PLAIN,
    activation="gelu_tanh",
    norm_offset=1.0,
    sandwich_norms=True,
    qk_norm=True,
    tied=True,
    embed_scale=12**0.5,
    attention_softcap=20.0,
    logit_softcap=10.0,
)
CONFIGS = {"biased": BIASED, "gemma": GEMMA}
LORA = LoraConfig(5, 8.0)


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def tokens_rs():
    return jax.random.randint(jax.random.key(5), (2, 9), 0, PLAIN.v)


@cache
def base_of(config):
    """A random base, biases too; drawn by NumPy, where nothing is compiled for a shape."""
    draw, base = np.random.default_rng(2), {}
    for name, parameter in parameters(config).items():
        noise = draw.normal(0, config.init_scale, shape_of(parameter, config))
        base[name] = jnp.asarray(parameter.constant + noise, jnp.float32)
    return base


def adapted(config, lora) -> Adapted:
    """Random base and adapter, with a B that is not zero."""
    draw = np.random.default_rng(7)
    shapes = adapter_shapes(config, lora).items()
    return Adapted(
        base_of(config), {name: jnp.asarray(draw.normal(0, 0.3, shape), jnp.float32) for name, shape in shapes}
    )


@cache
def base_apply(config):
    return jax.jit(make_policy(config).apply)


@cache
def lora_apply(config, lora):
    return jax.jit(lora_policy(config, lora).apply)


# What it computes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_start_equals_the_base(config, tokens_rs, dtype):
    lora = LoraConfig()
    base = {name: value.astype(dtype) for name, value in base_of(config).items()}
    params = Adapted(base, init_adapter(jax.random.key(1), config, lora))
    expected = base_apply(config)(params.base, tokens_rs)[0]
    # Two programs, so float32 may round differently; bfloat16 weights keep more than their rounding leaves.
    np.testing.assert_allclose(lora_apply(config, lora)(params, tokens_rs)[0], expected, atol=1e-5, rtol=0)
    merged = merge(params, config, lora)
    assert all((merged[name] == params.base[name]).all() for name in params.base)


@pytest.mark.parametrize("lora", [LORA, LoraConfig(5, 4.0, ("q", "v"), rslora=True), LoraConfig(5, 9.0, ("o", "down"))])
def test_merged_equals_adapted(config, tokens_rs, lora):
    params = adapted(config, lora)
    found = lora_apply(config, lora)(params, tokens_rs)[0]
    merged = merge(params, config, lora)
    np.testing.assert_allclose(found, base_apply(config)(merged, tokens_rs)[0], atol=3e-5, rtol=0)
    assert np.abs(found - base_apply(config)(params.base, tokens_rs)[0]).max() > 0.05


@pytest.mark.parametrize("name", PROJECTIONS)
def test_merging_is_the_sum_over_the_rank_by_hand(name):
    lora = LoraConfig(2, 6.0, (name,))
    params = adapted(PLAIN, lora)
    base, a, b = (np.asarray(x) for x in (params.base[name], *(params.adapter[f"{name}_{side}"] for side in "ab")))
    expected = base.copy()
    for layer in range(PLAIN.num_layers):
        for z in range(lora.rank):
            expected[layer] += 3.0 * np.multiply.outer(a[layer, ..., z], b[layer, z])
    np.testing.assert_allclose(merge(params, PLAIN, lora)[name], expected, atol=1e-6)


def test_the_scale_is_alpha_over_rank_or_over_its_root():
    assert LoraConfig(4, 8.0).scale == 2.0
    assert LoraConfig(4, 8.0, rslora=True).scale == 4.0


def test_a_bfloat16_base_under_a_float32_adapter(config, tokens_rs):
    wide = adapted(config, LORA)
    params = wide._replace(base={name: value.astype(jnp.bfloat16) for name, value in wide.base.items()})
    policy = lora_policy(config, LORA, dtype=jnp.bfloat16)
    hidden, cache = jax.jit(policy.hidden)(params, tokens_rs, cache=policy.make_cache(2, 9))
    assert hidden.dtype == cache.keys.dtype == jnp.bfloat16
    expected = np.asarray(lora_apply(config, LORA)(wide, tokens_rs)[0])
    found = np.asarray(policy.unembed(params, hidden))
    assert np.abs(found - expected).mean() < 0.03 * expected.std()


def test_arrays_have_the_declared_axes(config):
    shapes, axes = adapter_shapes(config, LORA), adapter_axes(LORA)
    found = jax.eval_shape(lora_policy(config, LORA, dtype=jnp.bfloat16).init, jax.random.key(0))
    assert {name: (value.shape, value.dtype) for name, value in found.adapter.items()} == {
        name: (shape, jnp.float32) for name, shape in shapes.items()
    }
    assert {value.dtype for value in found.base.values()} == {jnp.dtype(jnp.bfloat16)}
    for name in PROJECTIONS:
        a_axes, b_axes = axes[f"{name}_a"], axes[f"{name}_b"]
        assert a_axes[:-1] + b_axes[2:] == parameters(config)[name].axes
        assert shapes[f"{name}_a"][:-1] + shapes[f"{name}_b"][2:] == shape_of(parameters(config)[name], config)


def test_a_start_is_random_and_does_not_depend_on_the_other_targets():
    every, some = (init_adapter(jax.random.key(3), PLAIN, LoraConfig(4, 4.0, names)) for names in (PROJECTIONS, ("v",)))
    np.testing.assert_array_equal(every["v_a"], some["v_a"])
    assert not (every["k_a"] == every["v_a"]).any()
    for name in PROJECTIONS:
        a = np.asarray(every[f"{name}_a"])
        bound = np.prod(a.shape[1:-1]) ** -0.5
        assert 0.9 * bound < np.abs(a).max() <= bound
        assert not np.asarray(every[f"{name}_b"]).any()


# Sharing and gradients --------------------------------------------------------------------------------


def square(policy, tokens_rs):
    """A loss of all parameters."""
    return lambda params: (policy.apply(params, tokens_rs)[0] ** 2).mean()


def equal_to_scale(found, expected):
    """Equal to rounding, array by array."""
    for name in expected:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(found[name] / scale, expected[name] / scale, atol=2e-5, err_msg=name)


def test_the_base_gets_no_gradient_and_the_adapter_that_of_the_merged_weights(config, tokens_rs):
    params, merged_loss = adapted(config, LORA), square(make_policy(config), tokens_rs)
    grad = jax.jit(jax.grad(square(lora_policy(config, LORA), tokens_rs)))(params)
    assert not any(np.asarray(value).any() for value in grad.base.values())
    for name, value in grad.adapter.items():
        assert np.isfinite(value).all(), name
        assert (np.abs(np.asarray(value)).reshape(config.num_layers, -1).max(axis=1) > 0).all(), name
    through = jax.grad(lambda adapter: merged_loss(merge(Adapted(params.base, adapter), config, LORA)))
    equal_to_scale(grad.adapter, jax.jit(through)(params.adapter))


def test_layers_that_are_computed_again_give_the_same_gradient(tokens_rs):
    base, adapter = adapted(PLAIN, LORA)
    losses = [square(lora_policy(PLAIN, LORA, remat=remat), tokens_rs) for remat in (False, True)]
    once, again = (jax.jit(jax.grad(lambda adapter, f=f: f(Adapted(base, adapter))))(adapter) for f in losses)
    equal_to_scale(again, once)


def test_roles_share_the_arrays_of_one_base_and_at_first_only_b_moves(tokens_rs):
    base, lora = base_of(PLAIN), LoraConfig(3, targets=("q", "v"))
    before = base_apply(PLAIN)(base, tokens_rs)[0]
    params = Adapted(base, init_adapter(jax.random.key(1), PLAIN, lora))
    grad = jax.jit(jax.grad(square(lora_policy(PLAIN, lora), tokens_rs)))(params)
    assert all(np.asarray(value).any() == name.endswith("_b") for name, value in grad.adapter.items())
    stepped = params._replace(adapter=jax.tree.map(lambda x, g: x - g, params.adapter, grad.adapter))
    assert all(stepped.base[name] is base[name] for name in base)
    np.testing.assert_array_equal(base_apply(PLAIN)(stepped.base, tokens_rs)[0], before)
    assert (lora_apply(PLAIN, lora)(stepped, tokens_rs)[0] != before).any()
    merged = merge(stepped, PLAIN, lora)
    assert {name for name in base if merged[name] is not base[name]} == {"q", "v"}


def test_a_step_with_another_adapter_does_not_trace_again(tokens_rs):
    params, policy, traces = adapted(PLAIN, LORA), lora_policy(PLAIN, LORA), []

    @jax.jit
    def run(params):
        traces.append(1)
        return policy.apply(params, tokens_rs)[0]

    first, second = run(params), run(params._replace(adapter=jax.tree.map(lambda x: x * 2, params.adapter)))
    assert len(traces) == 1
    assert (first != second).any()


# Caches and packing -----------------------------------------------------------------------------------


def test_cached_decode_equals_the_full_forward(config, tokens_rs):
    params, step = adapted(config, LORA), lora_apply(config, LORA)
    cache, parts = lora_policy(config, LORA).make_cache(2, 12), []
    full = step(params, tokens_rs)[0]
    for begin, end in [(0, 6), (6, 7), (7, 8), (8, 9)]:
        logits, cache = step(params, tokens_rs[:, begin:end], cache=cache)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), full, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(cache.next, [9, 9])


def test_packed_rows_do_not_see_each_other(config, tokens_rs):
    policy, params = lora_policy(config, LORA), adapted(config, LORA)
    apply = lora_apply(config, LORA)
    one, two = tokens_rs[:1, :4], tokens_rs[:1, 4:8]
    packed = jnp.concatenate([one, two, jnp.zeros((1, 2), int)], axis=1)
    segments_rs = jnp.array([[1] * 4 + [2] * 4 + [0] * 2])
    positions_rs = jnp.array([[0, 1, 2, 3] * 2 + [0] * 2])
    found = apply(params, packed, positions_rs, segments_rs)[0]
    np.testing.assert_allclose(found[:, :4], apply(params, one)[0], atol=1e-5, rtol=0)
    np.testing.assert_allclose(found[:, 4:8], apply(params, two)[0], atol=1e-5, rtol=0)
    hidden, _ = jax.jit(policy.hidden)(params, packed, positions_rs, segments_rs)
    assert not np.asarray(hidden[:, 8:]).any()


@pytest.mark.parametrize("targets", [(), ("q", "q"), ("embed",)])
def test_targets_are_checked(targets):
    with pytest.raises(BadInput, match="targets are"):
        LoraConfig(targets=targets)


def test_a_wrong_adapter_is_refused_where_it_is_used(tokens_rs):
    lora = LoraConfig(3, targets=("q",))
    params = adapted(PLAIN, LoraConfig(3, targets=("q", "v")))
    with pytest.raises(BadInput, match="v_a is unexpected"):
        lora_policy(PLAIN, lora).apply(params, tokens_rs)
    with pytest.raises(BadInput, match="v_a is unexpected"):
        merge(params, PLAIN, lora)
