"""Float16 with a scale of the loss: gradients as in float32; an overflow costs a step; the scale is kept."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_learner import BIGRAMS, OPTIMIZERS, PLAIN, SETTINGS, assert_close, compiled, rows_of, sampled_case

import flowgrpo as fg
from flowgrpo.learner.loss_scale import FIRST, GROW_AFTER, LARGEST, SMALLEST, optimizer_for, with_loss_scale
from flowgrpo.learner.state import init_learner
from flowgrpo.learner.update import UpdateSettings, make_update
from flowgrpo.training.tree_io import from_leaves, to_leaves

OPTIMIZER = with_loss_scale(OPTIMIZERS["adam"])
UPDATE = jax.jit(
    make_update(
        BIGRAMS,
        PLAIN,
        OPTIMIZER,
        UpdateSettings(mini_batches=2, diagnostics=None, compute_dtype="float16", micro_rows=2, **SETTINGS),
    )
)
PARAMS, TRAJECTORIES = sampled_case(18, invalid=0.0)
BATCH = rows_of(PLAIN, TRAJECTORIES, "by_trajectory")


def begin(scale: float = FIRST, good: int = 0):
    state = init_learner(PARAMS, OPTIMIZER)
    memory = state.optimizer._replace(scale=jnp.float32(scale), good=jnp.int32(good))
    return state.replace(optimizer=memory)


def test_an_update_in_float16_is_that_of_float32_within_its_rounding():
    whole = compiled(PLAIN, "adam", mini_batches=2, diagnostics=None)
    expected, figures = whole(init_learner(PARAMS, OPTIMIZERS["adam"]), BATCH)
    state, found = UPDATE(begin(), BATCH)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert_close(state.params, expected.params, PARAMS, 0.05)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(found[name], figures[name], rtol=0.02, atol=1e-4)
    assert (float(found["loss_scale"]), float(found["overflows"]), float(found["steps"])) == (FIRST, 0.0, 2.0)
    assert "loss_scale" not in figures


@pytest.mark.usefixtures("nan_allowed")
def test_an_overflow_halves_the_scale_and_skips_the_step():
    state = start = begin(LARGEST)
    for index in range(1, 12):
        after, figures = UPDATE(state, BATCH)
        if figures["steps"] > 0:
            break
        assert (float(figures["overflows"]), float(figures["skipped"])) == (2.0, 0.0)
        assert float(after.optimizer.scale) == LARGEST / 4**index  # two mini-batches
        chex.assert_trees_all_equal((after.params, after.optimizer.inner), (start.params, start.optimizer.inner))
        state = after
    assert index > 1
    assert int(after.skipped) == 0
    assert int(after.version) == 1
    assert any((new != old).any() for new, old in zip(*map(jax.tree.leaves, (after.params, PARAMS)), strict=True))


@pytest.mark.usefixtures("nan_allowed")
def test_nonfinite_losses_are_skipped_and_counted():
    for scale, advantage in ((SMALLEST, 1e25), (FIRST, np.nan)):
        state, figures = UPDATE(begin(scale), BATCH.replace(advantage=jnp.full_like(BATCH.advantage, advantage)))
        assert (float(figures["skipped"]), float(figures["overflows"]), int(state.skipped)) == (2.0, 0.0, 2)
        assert float(state.optimizer.scale) >= SMALLEST


def test_the_scale_doubles_after_many_good_steps_up_to_a_limit():
    state, figures = UPDATE(begin(good=GROW_AFTER - 2), BATCH)
    assert (float(state.optimizer.scale), int(state.optimizer.good)) == (2 * FIRST, 0)
    assert float(figures["loss_scale"]) == 2 * FIRST
    idle = BATCH.replace(advantage=jnp.zeros_like(BATCH.advantage))
    state, figures = UPDATE(begin(LARGEST, GROW_AFTER - 2), idle)
    assert float(state.optimizer.scale) == LARGEST
    nothing = BATCH.replace(weight=jnp.zeros_like(BATCH.weight))
    chex.assert_trees_all_equal(UPDATE(begin(good=GROW_AFTER - 1), nothing)[0], begin(good=GROW_AFTER - 1))


def test_F8_no_advantage_is_no_gradient_at_any_scale():
    state, figures = UPDATE(begin(LARGEST), BATCH.replace(advantage=jnp.zeros_like(BATCH.advantage)))
    chex.assert_trees_all_equal(state.params, PARAMS)
    assert (float(figures["grad_norm"]), float(figures["steps"])) == (0.0, 2.0)


@pytest.mark.usefixtures("nan_allowed")
def test_S1_the_scale_resumes_from_a_checkpoint_bit_for_bit():
    state = begin(LARGEST / 2)
    for _ in range(3):
        state, _ = UPDATE(state, BATCH)
    again = from_leaves(to_leaves(jax.device_get(state)), jax.eval_shape(begin))
    assert float(again.optimizer.scale) < LARGEST / 2
    for _ in range(6):
        (state, _), (again, _) = UPDATE(state, BATCH), UPDATE(again, BATCH)
    chex.assert_trees_all_equal(again, state)


def test_other_types_have_no_scale_and_float16_is_refused_without_one():
    assert optimizer_for("bfloat16", OPTIMIZERS["adam"]) is OPTIMIZERS["adam"]
    assert optimizer_for("float16", OPTIMIZERS["adam"]) is not OPTIMIZERS["adam"]
    with pytest.raises(fg.BadInput, match=r"without a loss scale: give .* learner.with_loss_scale\(optimizer\)"):
        UPDATE(init_learner(PARAMS, OPTIMIZERS["adam"]), BATCH)
