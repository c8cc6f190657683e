"""A part of the parameters: an adapter trains and its base stays; float32 masters; buffers that are donated."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_learner import (
    BIGRAMS,
    PLAIN,
    SCORE,
    SETTINGS,
    WIDTH,
    assert_close,
    assert_figures,
    compiled,
    fresh,
    hidden,
    init,
    rows_of,
    sampled_case,
    unsplit,
)

import flowgrpo as fg
from flowgrpo.learner.diagnostics import DiagnosticsSettings
from flowgrpo.learner.state import init_learner
from flowgrpo.learner.update import make_score, make_update
from flowgrpo.models.lora import LoraParams
from flowgrpo.models.trainable import ADAPTER, cast

pytestmark = pytest.mark.slow


def hidden_adapted(params: LoraParams, *arrays):
    return hidden(params.base | {"mix": params.base["mix"] + params.adapter["a"] @ params.adapter["b"]}, *arrays)


ADAPTED = fg.contracts.Policy(init, hidden_adapted, lambda params, x: x @ params.base["unembed"])
GRPO = fg.grpo(beta=1.0)


def with_adapter(base) -> LoraParams:
    """Add an adapter of rank 2 that changes nothing yet."""
    a = jax.random.normal(jax.random.key(7), (WIDTH, 2)) / 2
    return LoraParams(base, {"a": a, "b": jnp.zeros((2, WIDTH))})


def test_F3_an_adapter_moves_by_its_gradient_and_base_stays():
    """In micro-batches, pulled to a reference that is whole parameters."""
    params, trajectories = sampled_case(30)
    params, batch = with_adapter(params), rows_of(GRPO, trajectories, "by_trajectory").replace(logp_ref=None)
    update = compiled(GRPO, policy=ADAPTED, trainable=ADAPTER, diagnostics=None, micro_rows=3)
    reference = params._replace(adapter=jax.tree.map(lambda x: x + 0.3, params.adapter))
    state, metrics = update(fresh(params, trainable=ADAPTER), batch, reference)
    score = make_score(ADAPTED, **SETTINGS)
    whole = batch.replace(logp_ref=jax.jit(score)(reference, batch).logp)
    grads, figures = unsplit(GRPO, score, ADAPTER, None)(params, whole)
    assert_close(state.params.adapter, jax.tree.map(jnp.subtract, params.adapter, grads), params.adapter)
    assert_figures(metrics, figures)
    chex.assert_trees_all_equal(state.params.base, params.base)


@pytest.mark.usefixtures("nan_allowed")  # JAX donates nothing if it checks for NaN
def test_optimizer_state_is_the_adapters_and_all_buffers_are_donated():
    """Else there is a warning, which is an error here. Steps of the part that are not finite are left out."""
    params, trajectories = sampled_case(30)
    batch, start = rows_of(PLAIN, trajectories, "by_trajectory"), fresh(with_adapter(params), "adam", ADAPTER)
    shapes = [x.shape for x in jax.tree.leaves(start.optimizer) if x.ndim]
    assert sorted(shapes) == sorted([(WIDTH, 2), (2, WIDTH)] * 2)
    settings = {"trainable": ADAPTER, "mini_batches": 2, "epochs": 2, "diagnostics": None}
    update = jax.jit(compiled(PLAIN, "adam", ADAPTED, **settings), donate_argnums=0)
    own = jax.tree.map(jnp.copy, start)
    places = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(own)}
    state, _ = update(own, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(own))
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)} == places
    expected = jax.device_get(state)
    broken = {**params, "unembed": params["unembed"] * jnp.inf}
    state, metrics = update(state.replace(params=state.params._replace(base=broken)), batch)
    assert (int(state.skipped), int(state.version), float(metrics["steps"])) == (4, 1, 0.0)
    chex.assert_trees_all_equal((state.params.adapter, state.optimizer), (expected.params.adapter, expected.optimizer))


def test_float32_parameters_are_scored_in_bfloat16_and_moved_in_float32():
    """Steps too small for bfloat16 to see are steps of the masters, along the gradient of float32."""
    (params, trajectories), optimizer, seen = sampled_case(31), optax.sgd(1e-4), []
    batch = rows_of(PLAIN, trajectories)

    def spy(params, batch):
        seen.extend({x.dtype for x in jax.tree.leaves(params)})
        return make_score(BIGRAMS, **SETTINGS)(params, batch)

    # Sampled in float32 here, so that a warning would be right.
    settings = fg.learner.UpdateSettings(compute_dtype=jnp.bfloat16, diagnostics=DiagnosticsSettings(warns=False))
    update = jax.jit(make_update(BIGRAMS, fg.algorithms.gspo(), optimizer, settings, score=spy))
    state, metrics = update(init_learner(params, optimizer), batch)
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    whole = batch.replace(logp_old=SCORE(params, batch).logp)
    grads, figures = unsplit(fg.algorithms.gspo(), diagnostics=None)(params, whole)
    assert_close(state.params, jax.tree.map(lambda x, slope: x - 1e-4 * slope, params, grads), params, 0.2)
    np.testing.assert_allclose(metrics["grad_norm"], figures["grad_norm"], rtol=0.1)
    embeds = [cast(tree["embed"], jnp.bfloat16) for tree in (state.params, params)]
    assert (embeds[0] == embeds[1]).mean() > 0.99
