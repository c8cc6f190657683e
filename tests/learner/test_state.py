"""Learner state and optimizer: the schedule by numbers, AdamW against optax's own, settings that can't be."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flowgrpo.learner.state import MUON, adamw, init_learner

PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.float32(3.0)}
GRADS = {"w": jnp.array([0.5, 4.0]), "b": jnp.float32(-1.0)}


@pytest.fixture(autouse=True)
def promotion():
    """Optax is written for standard promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def walk(optimizer, steps):
    """The parameters after each of `steps` steps with one gradient."""
    state, path = init_learner(PARAMS, optimizer), []
    for _ in range(steps):
        updates, memory = optimizer.update(GRADS, state.optimizer, state.params)
        state = state.replace(params=optax.apply_updates(state.params, updates), optimizer=memory)
        path.append(state.params)
    return path


def test_adamw_clips_the_global_norm_first():
    own = adamw(0.1, weight_decay=0.05, clip_norm=2.0)
    theirs = optax.chain(optax.clip_by_global_norm(2.0), optax.adamw(0.1, weight_decay=0.05))
    for found, expected in zip(walk(own, 3), walk(theirs, 3), strict=True):
        chex.assert_trees_all_close(found, expected, rtol=1e-6)
    plain = walk(adamw(0.1, clip_norm=None), 2)
    chex.assert_trees_all_close(plain, walk(optax.adam(0.1), 2), rtol=1e-6)


def test_the_rate_warms_up_then_decays():
    """Adam's first steps with one gradient are the rate long: .1 x (1/3, 2/3, 1), then a cosine over 4 to a tenth."""
    path = walk(adamw(0.1, warmup_steps=2, decay_steps=4, final_fraction=0.1), 7)
    places = np.array([3.0, *(float(params["b"]) for params in path)])
    fall = 0.1 + 0.9 * (1 + np.cos(np.pi * np.array([0, 1, 2, 3, 4]) / 4)) / 2
    np.testing.assert_allclose(np.diff(places), 0.1 * np.array([1 / 3, 2 / 3, *fall]), rtol=1e-3)


def test_the_rate_can_be_vmapped():
    def step(rate):
        return walk(adamw(rate, warmup_steps=1), 2)[-1]["b"]

    rates = jnp.array([0.1, 0.01])
    np.testing.assert_allclose(jax.vmap(step)(rates), 3.0 + 1.5 * rates, rtol=1e-3)


def test_init_learner_is_the_state_before_the_first_update():
    state = init_learner(PARAMS, adamw(0.1))
    assert (int(state.version), int(state.skipped)) == (0, 0)
    chex.assert_trees_all_equal(state.params, PARAMS)


def test_matrices_take_orthogonal_steps_and_others_adam():
    """Of a gradient of any size and shape Muon keeps the directions: all singular values of a step are about equal."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.zeros((2, 6, 2, 3)), "b": jnp.zeros(6)}  # two layers of 6 x (2 x 3)
    grads = {"w": jnp.asarray(rng.normal(size=(2, 6, 2, 3)), jnp.float32), "b": jnp.ones(6)}
    optimizer = adamw(0.1, clip_norm=None, matrices={"w": ((1,), (2, 3))})
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(updates["b"], -0.1, rtol=1e-4)
    for layer in np.asarray(updates["w"]).reshape(2, 6, 6):
        values = np.linalg.svd(layer, compute_uv=False)
        assert values.min() > 0.1 * MUON * 0.5
        assert values.max() < 0.1 * MUON * 1.5
