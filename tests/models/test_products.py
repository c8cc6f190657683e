"""Products: rows are independent to the bit in exact mode, layouts change nothing, paddings are found by trial."""

from dataclasses import replace
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import FULL, random_params

from flowgrpo import launch
from flowgrpo.models import products
from flowgrpo.models.decoder import make_policy, matrices, unstack_layers
from flowgrpo.models.lora import LoraConfig, LoraParams, init_adapter, lora_policy
from flowgrpo.models.quantised import quantise_layers

TOLERANCE = {"rtol": 0, "atol": 1e-5}
SHAPES = [(576, 960), (1536, 64), (64, 24), (200, 7), (32, 32), (96, 1024)]  # the last is crowded


@pytest.fixture
def mode(monkeypatch):
    """Set whether programs that are traced from now on are exact."""

    def choose(exact: bool) -> None:
        event = Event()
        if exact:
            event.set()
        monkeypatch.setattr(launch, "_EXACT", event)

    return choose


@pytest.mark.parametrize("multiply", [products.product, lambda x, w: products.product_transposed(x, w.T)])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_E3_a_rows_bits_do_not_depend_on_other_rows(inputs, outputs, multiply, mode):
    mode(True)
    rng = np.random.default_rng(0)
    x_ab, w_bc = rng.standard_normal((600, inputs), np.float32), rng.standard_normal((inputs, outputs), np.float32)
    program = jax.jit(lambda x, w: multiply(x, w))  # a new function, since the trace depends on the mode
    whole = np.asarray(program(x_ab, w_bc))
    np.testing.assert_allclose(whole, x_ab @ w_bc, rtol=1e-4, atol=1e-3)
    for rows in (2, 3, 7, 8, 13, 25, 32, 49, 130):
        np.testing.assert_array_equal(np.asarray(program(x_ab[:rows], w_bc)), whole[:rows], err_msg=str(rows))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 512), (512, 24)])
def test_the_gradient_of_a_crowded_product_is_right(exact, inputs, outputs, mode):
    mode(exact)
    rng = np.random.default_rng(0)
    x_ab, w_bc = (rng.standard_normal(shape, np.float32) / 8 for shape in ((60, inputs), (inputs, outputs)))
    turned = lambda x, w: products.product_transposed(x, w.T)  # noqa: E731
    expected, *actual = (
        jax.jit(jax.grad(lambda x, w, multiply=multiply: jnp.sum(jnp.sin(multiply(x, w))), argnums=(0, 1)))(x_ab, w_bc)
        for multiply in (jnp.matmul, products.product, turned)
    )
    for gradient in actual:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), gradient, expected)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("rows", "outputs"), [(7, 1024), (60, 1024), (60, 512)])
def test_extra_columns_of_a_crowded_matrix_are_cut_off(exact, rows, outputs, mode):
    mode(exact)
    x_ab, w_bc = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((rows, 40), (40, outputs)))
    in_layout = products.to_cpu_layout(jnp.asarray(w_bc).reshape(40, 8, -1), 1)
    assert [piece.shape for piece in in_layout.pieces] == [(40, outputs + products.EXTRA_COLUMNS)]
    assert in_layout.shape == (40, 8, outputs // 8)
    out = np.asarray(jax.jit(products.apply_linear)(x_ab, in_layout))
    np.testing.assert_array_equal(out, jax.jit(products.apply_linear)(x_ab, w_bc))
    np.testing.assert_allclose(out, x_ab @ w_bc, rtol=1e-4, atol=1e-4)
    assert products.to_cpu_layout(jnp.zeros((40, 1000)), 1).shape == (40, 1000)  # unchanged


@pytest.mark.parametrize("name", ["product", "wide_product"])
def test_E3_a_rows_bits_do_not_depend_on_others_in_bfloat16(name, mode):
    mode(True)
    rng = np.random.default_rng(0)
    x_ab, w_bc = (
        jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in ((130, 576), (576, 97))
    )
    multiply = jax.jit(lambda x, w: getattr(products, name)(x, w))
    whole = np.asarray(multiply(x_ab, w_bc))
    assert whole.dtype == (jnp.float32 if name == "wide_product" else jnp.bfloat16)
    for rows in (2, 3, 7, 8, 13, 25, 32, 49):
        np.testing.assert_array_equal(np.asarray(multiply(x_ab[:rows], w_bc)), whole[:rows], err_msg=str(rows))


def test_rows_are_padded_in_exact_mode_alone(mode):
    shapes = {}
    for exact in (True, False):
        mode(exact)
        program = jax.make_jaxpr(lambda x, w: products.product(x, w))(jnp.zeros((13, 48)), jnp.zeros((48, 32)))
        shapes[exact] = "pad[" in str(program)
    assert shapes == {True: True, False: False}


def test_E3_a_long_sum_is_split_if_no_padding_helps(mode, monkeypatch):
    mode(True)
    monkeypatch.setattr(products, "exact_padding", lambda *_: None)
    x_ab, w_bc = np.random.default_rng(0).standard_normal((2, 40, 400), np.float32)
    out = jax.jit(lambda x, w: products.product(x, w))(x_ab, w_bc.T)
    in_layout = products.to_cpu_layout(jnp.asarray(w_bc.T), 1)
    assert [len(piece) for piece in in_layout.pieces] == [192, 192, 16]
    np.testing.assert_array_equal(out, jax.jit(products.apply_linear)(x_ab, in_layout))
    np.testing.assert_allclose(out, x_ab @ w_bc.T, rtol=1e-4, atol=1e-4)


def test_exact_padding_is_the_least_number_from_which_all_agree(monkeypatch):
    def multiply(x, w):  # of fewer than 36 rows, and of 516, otherwise than of others
        return x @ w + (1.0 if len(x) < 36 else 0.0)

    monkeypatch.setattr(products, "_matmul", multiply)
    assert products._try_paddings(16, 16) == 36
    monkeypatch.setattr(products, "_matmul", lambda x, w: x @ w + len(x))
    products._find_padding.cache_clear()
    assert products.exact_padding(16, 16) == products.TRIED_ROWS[-1]  # if the product is cheap
    monkeypatch.setattr(products, "MAX_PADDED_WORK", 0)
    assert products.exact_padding(16, 16) is None
    products._find_padding.cache_clear()


@pytest.mark.parametrize("config", [FULL, replace(FULL, tied=not FULL.tied)])
def test_fused_matrices_give_the_same_as_separate_ones(config):
    """With biases, normed queries, grouped heads, and the embedding as unembedding."""
    tokens_rs = np.arange(12).reshape(2, 6) % 11
    policy, params = make_policy(config), random_params(config)
    in_layout = unstack_layers(params, config=config)
    assert {"q+k+v", "gate+up"} <= {*in_layout}
    assert "q" not in in_layout
    actual, expected = (jax.jit(policy.apply)(x, tokens_rs)[0] for x in (in_layout, params))
    np.testing.assert_allclose(actual, expected, **TOLERANCE)
    assert unstack_layers(in_layout, config=config) is in_layout


@pytest.mark.parametrize("kind", [None, "int8"])
def test_an_adapter_decodes_over_unstacked_parameters(kind):
    config, lora = FULL, LoraConfig(rank=2, targets=("q", "v", "up", "down"))
    base = random_params(config)
    base = base if kind is None else quantise_layers(base, matrices(config), kind=kind)
    adapter = jax.tree.map(lambda x: x + 0.02, init_adapter(jax.random.key(0), config, lora))
    policy, tokens_rs = lora_policy(config, lora, unstack_on_cpu=True), np.arange(12).reshape(2, 6) % 11
    params = LoraParams(base, adapter)
    assert policy.unstack_layers is not None
    in_layout = policy.unstack_layers(params)
    assert ("q+k+v" in in_layout.base) == (kind is None)
    actual, expected = (jax.jit(policy.apply)(x, tokens_rs)[0] for x in (in_layout, params))
    np.testing.assert_allclose(actual, expected, **TOLERANCE)
    bare = make_policy(config).apply(base, tokens_rs)[0]
    assert np.abs(actual - bare).max() > 0.01  # the adapter does something
