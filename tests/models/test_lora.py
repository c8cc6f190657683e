"""Adapters: nothing changes at the start, the base is shared and gets no gradient, merged equals adapted."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import FULL, random_params

from flowgrpo.models.decoder import make_policy, parameters
from flowgrpo.models.lora import (
    PROJECTIONS,
    LoraConfig,
    LoraParams,
    adapter_axes,
    adapter_shapes,
    init_adapter,
    lora_policy,
    merge_adapter,
)
from flowgrpo.types import BadInput

LORA, SOME = LoraConfig(5, 8.0), LoraConfig(5, 4.0, ("q", "down"), rslora=True)
TOKENS_RS = np.random.default_rng(5).integers(0, FULL.v, (2, 9)).astype(np.int32)
ALONE_RS, IN_ORDER_RS = np.ones((2, 9), np.int32), np.tile(np.arange(9, dtype=np.int32), (2, 1))


def adapted(lora) -> LoraParams:
    """Random base and adapter, with biases and a B that are not zero."""
    random, shapes = np.random.default_rng(7), adapter_shapes(FULL, lora).items()
    adapter = {name: jnp.asarray(random.normal(0, 0.3, shape), jnp.float32) for name, shape in shapes}
    return LoraParams(random_params(FULL), adapter)


@cache
def applied(lora=None):
    """The base or an adapted policy, compiled once."""
    return jax.jit((make_policy(FULL) if lora is None else lora_policy(FULL, lora)).apply)


def logits(params, lora=None, *, tokens=TOKENS_RS, positions=IN_ORDER_RS, segments=ALONE_RS):
    return applied(lora)(params, tokens, positions, segments)[0]


@cache
def slopes(lora=None, **settings):
    """The gradient of a loss of all parameters."""
    policy = make_policy(FULL) if lora is None else lora_policy(FULL, lora, **settings)
    return jax.jit(jax.grad(lambda params: (policy.apply(params, TOKENS_RS)[0] ** 2).mean()))


@pytest.mark.parametrize("lora", [LORA, SOME])
def test_a_new_adapter_changes_nothing_and_merged_equals_adapted(lora):
    params = adapted(lora)
    before, merged = logits(params.base), merge_adapter(params, FULL, lora)
    actual = logits(params, lora)
    np.testing.assert_allclose(actual, logits(merged), atol=3e-5, rtol=0)
    assert np.abs(actual - before).max() > 0.05
    assert {name for name in params.base if merged[name] is not params.base[name]} == set(lora.targets)
    fresh = params._replace(adapter=init_adapter(jax.random.key(1), FULL, lora))
    np.testing.assert_allclose(logits(fresh, lora), before, atol=1e-5, rtol=0)
    jax.tree.map(np.testing.assert_array_equal, merge_adapter(fresh, FULL, lora), params.base)


def test_merge_adapter_is_the_sum_over_the_rank():
    assert (LoraConfig(4, 8.0).scale, LoraConfig(4, 8.0, rslora=True).scale) == (2.0, 4.0)
    lora = LoraConfig(2, 6.0)
    params = adapted(lora)
    merged = merge_adapter(params, FULL, lora)
    for name in PROJECTIONS:
        a, b = (np.asarray(params.adapter[f"{name}_{side}"]) for side in "ab")
        expected = np.array(params.base[name])
        for layer, z in np.ndindex(FULL.num_layers, lora.rank):
            expected[layer] += 3.0 * np.multiply.outer(a[layer, ..., z], b[layer, z])
        np.testing.assert_allclose(merged[name], expected, atol=1e-6)


def test_a_bfloat16_base_under_a_float32_adapter():
    wide = adapted(LORA)
    params = wide._replace(base={name: value.astype(jnp.bfloat16) for name, value in wide.base.items()})
    policy = lora_policy(FULL, LORA, dtype=jnp.bfloat16)
    hidden, cache = jax.jit(policy.hidden)(params, TOKENS_RS, cache=policy.make_cache(2, 9))
    assert hidden.dtype == cache.keys.dtype == jnp.bfloat16
    expected, actual = np.asarray(logits(wide, LORA)), np.asarray(policy.unembed(params, hidden))
    assert np.abs(actual - expected).mean() < 0.03 * expected.std()


def test_arrays_have_the_declared_axes_and_dtypes():
    axes, init = adapter_axes(LORA), lora_policy(FULL, LORA, dtype=jnp.bfloat16).init
    actual = jax.eval_shape(init, jax.random.key(0))
    assert {name: value.shape for name, value in actual.adapter.items()} == adapter_shapes(FULL, LORA)
    assert [{value.dtype.name for value in part.values()} for part in actual] == [{"bfloat16"}, {"float32"}]
    for name in PROJECTIONS:
        assert axes[f"{name}_a"][:-1] + axes[f"{name}_b"][2:] == parameters(FULL)[name].axes


def test_initial_adapter_is_random_and_independent_of_other_targets():
    all_targets, only_v = (
        init_adapter(jax.random.key(3), FULL, LoraConfig(4, 4.0, names)) for names in (PROJECTIONS, ("v",))
    )
    np.testing.assert_array_equal(all_targets["v_a"], only_v["v_a"])
    assert not (all_targets["k_a"] == all_targets["v_a"]).any()
    for name in PROJECTIONS:
        a = np.asarray(all_targets[f"{name}_a"])
        bound = np.prod(a.shape[1:-1]) ** -0.5
        assert 0.9 * bound < np.abs(a).max() <= bound


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_base_has_no_gradient_and_adapter_that_of_merged_weights(remat):
    """At the start B alone moves."""
    params = adapted(LORA)
    grad = slopes(LORA, remat=remat)(params)
    assert not any(np.asarray(value).any() for value in grad.base.values())
    merged, back = jax.vjp(lambda adapter: merge_adapter(LoraParams(params.base, adapter), FULL, LORA), params.adapter)
    (expected,) = back(slopes()(merged))
    for name, value in grad.adapter.items():
        assert (np.abs(np.asarray(value)).reshape(FULL.num_layers, -1).max(axis=1) > 0).all(), name
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(value / scale, expected[name] / scale, atol=2e-5, err_msg=name)
    fresh = params._replace(adapter=init_adapter(jax.random.key(1), FULL, LORA))
    moved = slopes(LORA, remat=remat)(fresh).adapter
    assert all(np.asarray(value).any() == name.endswith("_b") for name, value in moved.items())


def test_cached_decode_equals_full_forward_and_segments_are_isolated():
    params, cache, parts = adapted(LORA), lora_policy(FULL, LORA).make_cache(2, 12), []
    for chunk in np.split(TOKENS_RS, 3, axis=1):
        part, cache = applied(LORA)(params, chunk, cache=cache)
        parts.append(part)
    whole, second = logits(params, LORA), logits(params, LORA, tokens=np.roll(TOKENS_RS, -4, axis=1))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-5, rtol=0)
    segments_rs, positions_rs = np.array([[1] * 4 + [2] * 4 + [0]] * 2), np.array([[*range(4)] * 2 + [0]] * 2)
    packed = logits(params, LORA, positions=positions_rs.astype(np.int32), segments=segments_rs.astype(np.int32))
    np.testing.assert_allclose(packed[:, :4], whole[:, :4], atol=1e-5, rtol=0)
    np.testing.assert_allclose(packed[:, 4:8], second[:, :4], atol=1e-5, rtol=0)


def test_targets_and_adapters_that_do_not_fit_are_refused():
    for targets in ((), ("q", "q"), ("embed",)):
        with pytest.raises(BadInput, match="targets are"):
            LoraConfig(targets=targets)
    lora, params = LoraConfig(3, targets=("q",)), adapted(LoraConfig(3, targets=("q", "v")))
    for use in (lambda: lora_policy(FULL, lora).apply(params, TOKENS_RS), lambda: merge_adapter(params, FULL, lora)):
        with pytest.raises(BadInput, match="v_a is unexpected"):
            use()
