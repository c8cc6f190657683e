"""Quantised layers: their distance from the original, and that they compute exactly what their decoded form does."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from model_cases import random_model
from tiny_models import FULL, random_params

from flowgrpo.models import hf
from flowgrpo.models.decoder import make_policy, matrices, unstack_layers
from flowgrpo.models.kv_cache import make_cache
from flowgrpo.models.lora import LoraConfig, LoraParams, adapter_shapes, lora_policy, merge_adapter
from flowgrpo.models.quantised import (
    INT8_MAX,
    KINDS,
    LEVELS,
    Quantised,
    dequantise_layers,
    dequantise_matrix,
    quantise_layers,
    quantise_matrix,
    times_quantised,
)
from flowgrpo.parallel.sharding import decoder_axes, make_mesh, parse_mesh, shard_policy, state_shardings
from flowgrpo.training.tree_io import from_leaves, to_leaves
from flowgrpo.types import BadInput

LORA = LoraConfig(3, 6.0, ("q", "o", "down"))
TOKENS_RS = np.random.default_rng(5).integers(0, FULL.v, (2, 9)).astype(np.int32)
BOUNDS = {"int8": 0.03, "nf4": 0.3}  # of logits, in their standard deviation; docs/scale.md states them


@cache
def base(kind: str):
    return quantise_layers(random_params(FULL), matrices(FULL), kind=kind)


@cache
def plain(kind: str):
    return dequantise_layers(base(kind), dtype=jnp.float32)


def adapter():
    random = np.random.default_rng(7)
    return {name: jnp.asarray(random.normal(0, 0.3, s), jnp.float32) for name, s in adapter_shapes(FULL, LORA).items()}


@cache
def logits():
    return jax.jit(lambda params, tokens: make_policy(FULL).apply(params, tokens)[0])


@cache
def slopes():
    """The gradient of a loss of base and adapter."""
    policy = lora_policy(FULL, LORA)
    loss = lambda adapter_params, base: (policy.apply(LoraParams(base, adapter_params), TOKENS_RS)[0] ** 2).mean()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))


# One matrix -------------------------------------------------------------------------------------------


def test_levels_are_those_that_were_published():
    above = [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
    below = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911]
    np.testing.assert_allclose(LEVELS, [*below, 0.0, *above], atol=6e-5)


def test_worked_numbers_of_int8():
    coded = quantise_matrix(np.array([[254.0, 0.0, 1.0], [-127.0, 0.0, 0.5]], np.float32), (0,), kind="int8")
    np.testing.assert_array_equal(coded.values, [[127, 0, 127], [-64, 0, 64]])
    np.testing.assert_allclose(coded.scales, [[2.0, 1 / 127, 1 / 127]])


def test_nf4_levels_round_trip_and_each_block_has_its_scale():
    w = np.stack([np.tile(LEVELS, 4), np.tile(LEVELS[::-1], 4) * 8, np.zeros(64, np.float32)]).reshape(1, -1)
    coded = quantise_matrix(w, (1,), kind="nf4")
    assert (coded.values.shape, coded.values.dtype) == ((1, 96), jnp.uint8)
    assert coded.shape == (1, 192)
    np.testing.assert_array_equal(coded.scales.astype(np.float32), [[1.0, 8.0, 1.0]])
    np.testing.assert_array_equal(dequantise_matrix(coded, jnp.float32), w)


@pytest.mark.parametrize("summed", [(1,), (1, 2)])
def test_entries_are_rounded_to_the_nearest_level(summed):
    w = np.random.default_rng(1).normal(size=(2, 6, 128, 5)).astype(np.float32)
    coded = quantise_matrix(w, summed, kind="int8")
    largest = np.abs(w).max(axis=summed, keepdims=True)
    assert (np.abs(dequantise_matrix(coded, jnp.float32) - w) <= largest / INT8_MAX / 2 * 1.001).all()
    coded = quantise_matrix(w, summed, kind="nf4")
    at = max(summed)
    size = {1: 2, 2: 64}[at]  # the largest power of two that divides 6, and a whole block
    blocks = w.reshape(*w.shape[:at], -1, size, *w.shape[at + 1 :])
    largest = np.broadcast_to(np.abs(blocks).max(axis=at + 1, keepdims=True), blocks.shape).reshape(w.shape)
    widest = np.diff(LEVELS).max() / 2 + 1 / 256  # and what rounding the scale may take
    assert (np.abs(dequantise_matrix(coded, jnp.float32) - w) <= largest * widest).all()


@pytest.mark.parametrize("kind", KINDS)
def test_host_and_device_quantise_alike(kind):
    w = np.random.default_rng(2).normal(size=(2, 64, 3)).astype(np.float32)
    host, device = quantise_matrix(w, (1,), kind=kind), quantise_matrix(jnp.asarray(w), (1,), kind=kind)
    assert isinstance(host.values, np.ndarray)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), host, device)


def test_unknown_kinds_and_odd_inputs_are_refused():
    with pytest.raises(BadInput, match="can't be quantised as 'int4'; choose one of int8, nf4"):
        quantise_layers(random_params(FULL), matrices(FULL), kind="int4")
    with pytest.raises(BadInput, match=r"has 5 inputs: nf4 needs an even number"):
        quantise_matrix(np.ones((5, 2), np.float32), (0,), kind="nf4")


# A model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_decoded_models_and_are_near_the_originals(kind):
    actual, whole = logits()(base(kind), TOKENS_RS), logits()(random_params(FULL), TOKENS_RS)
    np.testing.assert_allclose(actual, logits()(plain(kind), TOKENS_RS), atol=5e-5)
    error = np.sqrt(np.mean((actual - whole) ** 2)) / np.std(whole)
    assert BOUNDS[kind] / 10 < error < BOUNDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_over_quantised_bases_learn_as_over_decoded_ones(kind):
    adapter_params, pair = adapter(), [slopes()(adapter(), base_params) for base_params in (base(kind), plain(kind))]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-5), *pair)
    merged = merge_adapter(LoraParams(base(kind), adapter_params), FULL, LORA)
    assert not any(isinstance(x, Quantised) for x in merged.values())
    jax.tree.map(
        np.testing.assert_array_equal, merged, merge_adapter(LoraParams(plain(kind), adapter_params), FULL, LORA)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_reaches_scales(kind):
    coded, x = quantise_matrix(jnp.ones((4, 3)), (0,), kind=kind), jnp.ones((2, 4))
    times = lambda x, scales: times_quantised(x, coded.replace(scales=scales), jnp.matmul).sum()  # noqa: E731
    of_x, of_scales = jax.grad(times, (0, 1))(x, coded.scales)
    np.testing.assert_allclose(of_x, 3.0, rtol=1e-6)
    assert not np.any(of_scales)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_keeps_no_decoded_layers(kind):
    """All layers' matrices as numbers would take what quantising them has saved."""
    policy = lora_policy(FULL, LORA)
    loss = lambda adapter_params, base: policy.apply(LoraParams(base, adapter_params), TOKENS_RS[:1, :2])[0].mean()  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss))(adapter(), base(kind))
    scans = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    residuals = [x.aval for scan in scans for x in scan.outvars if jnp.issubdtype(x.aval.dtype, jnp.floating)]
    assert len(scans) == 2
    assert residuals
    assert all(x.size < FULL.num_layers * FULL.d * FULL.e for x in residuals)


def test_unstacked_quantised_layers_give_the_same_logits():
    policy = make_policy(FULL, unroll=True)
    placed = unstack_layers(base("int8"), config=FULL)
    cache = make_cache(2, 16, config=FULL, stacked=False)
    actual, _ = jax.jit(policy.apply)(placed, TOKENS_RS, None, None, cache)
    np.testing.assert_allclose(actual, logits()(base("int8"), TOKENS_RS), atol=5e-5)


# Files, devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_quantised_while_it_is_read(monkeypatch, tmp_path, kind):
    model = random_model("gemma2")
    hf.save_model(tmp_path, model)
    monkeypatch.setattr(hf, "CHUNK_BYTES", 3000)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))

    def place(_, axes):
        return NamedSharding(mesh, PartitionSpec(*({"d": "a", "f": "b"}.get(axis) for axis in axes)))

    expected = quantise_layers(model.params, matrices(model.config), kind=kind)
    for sharding in (None, place) if kind == "int8" else (None,):
        actual = hf.load_model(tmp_path, tokenizer=False, sharding=sharding, quantised=kind)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), actual.params, expected)
        gate: Any = actual.params["gate"]
        assert sharding is None or gate.values.sharding == place("gate", "ndf")
    with pytest.raises(BadInput, match="q is quantised, and is not written so: merge it"):
        hf.save_model(tmp_path / "other", actual)


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_quantised_values_give_the_same_logits(kind):
    mesh, axes = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2")), decoder_axes(FULL)
    shardings = state_shardings(base(kind), mesh, axes)
    placed, over = jax.device_put(base(kind), shardings), [shardings["gate"].values.spec, shardings["gate"].scales.spec]
    assert over[0] == PartitionSpec(None, "fsdp", "tensor")
    assert over[1] == PartitionSpec(None, None, "tensor")  # one block of 32 inputs, or none
    policy = shard_policy(make_policy(FULL), mesh, axes)
    actual = jax.jit(lambda params, tokens: policy.apply(params, tokens)[0])(placed, np.tile(TOKENS_RS, (2, 1)))
    np.testing.assert_allclose(actual[:2], logits()(base(kind), TOKENS_RS), atol=1e-4)


def test_a_checkpoint_keeps_quantised_parameters():
    for kind in KINDS:
        blank = jax.tree.map(jnp.zeros_like, base(kind))
        actual = from_leaves(to_leaves(base(kind)), blank)
        assert actual["q"].kind == kind
        jax.tree.map(np.testing.assert_array_equal, actual, base(kind))
