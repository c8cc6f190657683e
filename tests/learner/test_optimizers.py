"""Optimizers that remember less: Adam in 8 bits beside float Adam, Adafactor; their bytes, and where these lie."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_learner import BIGRAMS, PLAIN, SETTINGS, rows_of, sampled_case

from flowgrpo.learner.adam8bit import BLOCK, dequantize, quantize, scale_by_adam_8bit
from flowgrpo.learner.state import adamw, init_learner, scale_by_adafactor
from flowgrpo.learner.update import UpdateSettings, make_update

SHAPES = {"wide": (20, 300), "heads": (2, 32, 4, 8), "scalar": (), "bias": (7,)}


@pytest.fixture(autouse=True)
def promotion():
    """Optax is written for standard promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def numbers(seed: int, shape) -> jnp.ndarray:
    """Numbers over three orders of magnitude, of both signs."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.choice([-1.0, 1.0], shape) * 10 ** rng.uniform(-3, 0, shape), jnp.float32)


def descend(base, steps: int = 300, rate: float = 0.01) -> tuple[np.ndarray, optax.OptState]:
    """The loss step by step on a quadratic whose curvatures span three orders of magnitude, under noise."""
    curve, goal = 10 * jnp.abs(numbers(0, (20, 300))), numbers(1, (20, 300)) + 1.0
    optimizer = optax.chain(base, optax.scale_by_learning_rate(rate))

    def step(carry, key):
        params, memory = carry
        grad = curve * (params - goal + 0.3 * jax.random.normal(key, goal.shape))
        updates, memory = optimizer.update(grad, memory, params)
        return (optax.apply_updates(params, updates), memory), 0.5 * (curve * (params - goal) ** 2).sum()

    start = jnp.zeros(goal.shape), optimizer.init(goal)
    (_, memory), losses = jax.lax.scan(step, start, jax.random.split(jax.random.key(0), steps))
    return np.asarray(losses), memory


# The code -----------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=2)
def code_all(x, chance_c, dtype):
    """Encode `x` as `dtype` and decode it, under each of many chances -> [chance, *shape of x]."""
    return jax.vmap(lambda chance: dequantize(quantize(x, dtype, jnp.full(x.shape, chance))))(chance_c)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_codes_are_adjacent_levels_and_unbiased(shape):
    x = numbers(2, shape)
    chances = jnp.linspace(0.0, 1.0, 512, endpoint=False)
    for value, dtype in ((x, jnp.int8), (x * x, jnp.uint8)):
        every = code_all(value, chances, dtype)
        np.testing.assert_allclose(every[0] / value, 1.0, atol=0.1)
        np.testing.assert_allclose(every.mean(axis=0) / value, 1.0, atol=1e-3)


def test_small_moments_survive_or_are_unbiased():
    """Far below the largest of their block: nothing divides by 0, and nothing is pushed by more than there was."""
    v = jnp.ones(BLOCK).at[1].set(1e-30).at[2].set(0.0)
    found = code_all(v, jnp.array([0.99]), jnp.uint8)[0]
    assert 0 < found[1] < 1e-9
    assert found[2] == 0
    m = jnp.ones(BLOCK).at[1].set(-1e-6)
    every = code_all(m, jnp.linspace(0.0, 1.0, 4096), jnp.int8)
    np.testing.assert_allclose(every[:, 1].mean(), -1e-6, rtol=0.05)


def test_recoding_changes_nothing():
    """The levels of a block stay when its largest entry changes: a moment that nothing moves does not wander."""
    x = code_all(numbers(3, (4, BLOCK)), jnp.array([0.5]), jnp.int8)[0]
    again = code_all(x.at[:, 0].set(5.0), jnp.array([0.01]), jnp.int8)[0]
    np.testing.assert_allclose(again[:, 1:], x[:, 1:], rtol=1e-5)


# Beside float Adam --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_adam_in_8_bits_descends_as_adam_does():
    (exact, floats), (found, codes) = descend(optax.scale_by_adam()), descend(scale_by_adam_8bit())
    np.testing.assert_allclose(found[[50, 100, 200, 299]], exact[[50, 100, 200, 299]], rtol=0.05)
    assert exact[299] < 0.1 * exact[0]
    assert nbytes(codes) <= 0.26 * nbytes(floats)


@pytest.mark.parametrize("shape", [(4096,), (32, 64), (2, 128, 8, 8)])
def test_8_bit_moments_are_under_a_third_of_the_bytes(shape):
    params = jnp.zeros(shape)
    assert nbytes(scale_by_adam_8bit().init(params)) <= 0.3 * nbytes(optax.scale_by_adam().init(params))


def test_the_first_step_is_adams():
    """Moments are exact until they are coded."""
    grads = {name: numbers(4, shape) for name, shape in SHAPES.items()}
    steps = []
    for base in (optax.scale_by_adam(), scale_by_adam_8bit()):
        steps.append(jax.jit(base.update)(grads, base.init(grads))[0])
    for a, b in zip(*map(jax.tree.leaves, steps), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_parameter_without_gradient_stops_moving():
    """Its first moment falls to nothing, where to the nearest level it would stay and push for ever."""
    base, params = scale_by_adam_8bit(), jnp.zeros(BLOCK)
    update = jax.jit(base.update)
    memory = base.init(params)
    for step in range(200):
        grad = jnp.ones(BLOCK).at[1].set(float(step == 0))
        updates, memory = update(grad, memory)
    assert abs(float(updates[1])) < 1e-3
    np.testing.assert_allclose(updates[0], 1.0, rtol=0.15)


def test_codes_are_sharded_as_their_parameters():
    """Sharded over four devices along either axis: the same steps, and no device holds more than its share of codes."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    grad, base = numbers(5, (8, 2048)), scale_by_adam_8bit()
    step = jax.jit(base.update)
    expected = grad
    memory = base.init(grad)
    for _ in range(3):
        expected, memory = step(grad, memory)
    for spec in (("data", None), (None, "data")):
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        spread = jax.device_put(grad, place)
        found, held = spread, jax.device_put(base.init(grad), jax.sharding.NamedSharding(mesh, jax.P()))
        held = held._replace(mu=jax.device_put(held.mu, place), nu=jax.device_put(held.nu, place))
        for _ in range(3):
            found, held = step(spread, held)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
        assert held.mu.code.addressable_shards[0].data.size == grad.size // 4


# In an update -------------------------------------------------------------------------------------------


BASE_DTYPES = {"adamw": None, "adamw8bit": scale_by_adam_8bit(), "adafactor": scale_by_adafactor(min_axis=8)}


@pytest.mark.slow
def test_every_base_optimizer_learns():
    """A hundred updates on one batch: the loss of 8 bits falls as far as AdamW's, that of Adafactor too."""
    params, trajectories = sampled_case(34, invalid=0.0)
    batch, falls = rows_of(PLAIN, trajectories, "by_trajectory"), {}
    for name, base in BASE_DTYPES.items():
        optimizer = adamw(0.01, base=base)
        settings = UpdateSettings(rescore=True, diagnostics=None, **SETTINGS)
        update = jax.jit(make_update(BIGRAMS, PLAIN, optimizer, settings))
        state, losses = init_learner(params, optimizer), []
        for _ in range(100):
            state, metrics = update(state, batch.replace(logp_sampled=batch.logp_old))
            losses.append(float(metrics["surrogate"]))
        falls[name] = float(jnp.abs(state.params["mix"] - params["mix"]).mean())
    np.testing.assert_allclose(falls["adamw8bit"], falls["adamw"], rtol=0.05)
    assert falls["adafactor"] > 0.1 * falls["adamw"]


def test_adafactor_state_is_rows_and_columns():
    params = jnp.zeros((256, 512))
    assert nbytes(scale_by_adafactor().init(params)) < 0.01 * params.nbytes
    grads = numbers(6, params.shape)
    base = scale_by_adafactor()
    step, _ = base.update(grads, base.init(params), params)
    np.testing.assert_array_equal(jnp.sign(step), jnp.sign(grads))
    assert float(jnp.sqrt((step**2).mean())) <= 1.0 + 1e-5
