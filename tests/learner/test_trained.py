"""A part of the parameters: an adapter trains and its base stays; masters, donation, and F3 of what is accumulated."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_learner import BIGRAMS, OPTIMIZERS, PLAIN, SETTINGS, WIDTH, hidden, init, rows_of, sampled_case

import flowgrpo as fg
from flowgrpo.learner.state import LearnerState, init_learner, make_optimizer
from flowgrpo.learner.trained import ADAPTER, WHOLE
from flowgrpo.learner.update import cast, make_score, make_update
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.lora import Adapted

pytestmark = pytest.mark.slow

ADAM = make_optimizer(learning_rate=0.01, warmup_steps=2, weight_decay=0.01, clip_norm=0.5)


def hidden_adapted(params: Adapted, *arrays):
    return hidden(params.base | {"mix": params.base["mix"] + params.adapter["a"] @ params.adapter["b"]}, *arrays)


ADAPTED = fg.Policy(init, hidden_adapted, lambda params, x: x @ params.base["unembed"])


def with_adapter(base) -> Adapted:
    """The base with an adapter of rank 2 that changes nothing yet."""
    a = jax.random.normal(jax.random.key(7), (WIDTH, 2)) / 2
    return Adapted(base, {"a": a, "b": jnp.zeros((2, WIDTH))})


def distance(one, two) -> float:
    """The norm of what lies between two trees."""
    return float(jnp.sqrt(sum(jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True))))


@pytest.fixture(scope="module")
def adapted():
    """One update of an adapter: (update, state before, batch, state after, metrics)."""
    params, trajectories = sampled_case(30)
    state = init_learner(with_adapter(params), ADAM, ADAPTER)
    update = jax.jit(make_update(ADAPTED, PLAIN, ADAM, trained=ADAPTER, mini_batches=2, **SETTINGS))
    batch = rows_of(PLAIN, trajectories, "by_trajectory")
    return update, state, batch, *update(state, batch)


# A part -------------------------------------------------------------------------------------------------


def test_an_adapter_is_trained_and_its_base_comes_out_as_it_went_in(adapted):
    _, state, _, after, metrics = adapted
    assert distance(after.params.adapter, state.params.adapter) > 0
    assert float(metrics["steps"]) == 2.0
    chex.assert_trees_all_equal(after.params.base, state.params.base)


def test_the_optimizer_remembers_the_part_alone(adapted):
    _, state, *_ = adapted
    shapes = [x.shape for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert sorted(shapes) == sorted([(WIDTH, 2), (2, WIDTH)] * 2)


def test_the_gradient_of_an_adapter_is_that_of_the_loss(adapted):
    """The norm that is reported: of the part, before it is clipped; the first of two mini-batches, alone."""
    _, state, batch, _, _ = adapted
    score = make_score(ADAPTED, **SETTINGS)

    def loss(adapter):
        return PLAIN.loss(score(state.params._replace(adapter=adapter), batch), batch)[0]

    update = jax.jit(make_update(ADAPTED, PLAIN, ADAM, trained=ADAPTER, **SETTINGS))
    norm = optax.tree.norm(jax.grad(loss)(state.params.adapter))
    np.testing.assert_allclose(update(state, batch)[1]["grad_norm"], norm, rtol=1e-4)


@pytest.mark.usefixtures("nan_allowed")
def test_a_step_of_a_part_that_is_not_finite_is_left_out_and_counted(adapted):
    """One of two mini-batches is poisoned, then a number of the base."""
    update, state, batch, *_ = adapted
    after, metrics = update(state, batch.replace(advantage=batch.advantage.at[:8].multiply(jnp.nan)))
    assert (int(after.skipped), float(metrics["skipped"]), float(metrics["steps"])) == (1, 1.0, 1.0)
    assert np.isfinite(optax.tree.norm(after.params.adapter))
    broken = state.params.base | {"unembed": state.params.base["unembed"] * jnp.inf}
    again, metrics = update(after.replace(params=after.params._replace(base=broken)), batch)
    assert (int(again.skipped), int(again.version), float(metrics["steps"])) == (3, 1, 0.0)
    chex.assert_trees_all_equal((again.params.adapter, again.optimizer), (after.params.adapter, after.optimizer))


def test_a_reference_is_whole_parameters(adapted):
    """The base under no adapter is the start, which pulls by nothing; under another it pulls."""
    _, state, batch, *_ = adapted
    algorithm, optimizer = fg.grpo(beta=1.0), optax.sgd(0.5)
    state = init_learner(state.params, optimizer, ADAPTER)
    update = jax.jit(make_update(ADAPTED, algorithm, optimizer, trained=ADAPTER, **SETTINGS))
    batch = batch.replace(advantage=jnp.zeros_like(batch.advantage), logp_ref=None)
    other = state.params._replace(adapter=jax.tree.map(lambda x: x + 0.3, state.params.adapter))
    (still, same), (moved, pulled) = (update(state, batch, reference) for reference in (state.params, other))
    assert (float(same["kl"]), distance(still.params, state.params)) == (0.0, 0.0)
    assert float(pulled["kl"]) > 0
    assert distance(moved.params.adapter, state.params.adapter) > 0


# Masters, and buffers -----------------------------------------------------------------------------------


def test_float32_parameters_are_scored_in_bfloat16_and_moved_in_float32():
    """Steps too small for bfloat16 to see are steps of the masters, along the gradient of float32."""
    policy = make_policy(DecoderConfig(v=97, d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),)))
    params, optimizer, (_, trajectories) = policy.init(jax.random.key(0)), optax.sgd(1e-5), sampled_case(31)
    batch = rows_of(PLAIN, trajectories)
    seen, updates = [], {}
    score = make_score(policy, **SETTINGS)

    def spy(params, batch):
        seen.append({x.dtype for x in jax.tree.leaves(params)})
        return score(params, batch)

    for dtype in (None, jnp.bfloat16):
        state = init_learner(params, optimizer)
        update = jax.jit(make_update(policy, fg.gspo(), optimizer, score=spy, compute_dtype=dtype, **SETTINGS))
        for _ in range(3):
            state, metrics = update(state, batch)
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
        updates[dtype] = jax.tree.map(jnp.subtract, state.params, params), metrics["grad_norm"]
        embeds = [cast(tree["embed"], jnp.bfloat16) for tree in (state.params, params)]
        assert (embeds[0] == embeds[1]).mean() > 0.99
    assert seen[0] == {jnp.dtype(jnp.float32)}
    assert seen[-1] == {jnp.dtype(jnp.bfloat16)}
    (exact, norm), (found, other) = updates[None], updates[jnp.bfloat16]
    assert distance(found, exact) < 0.1 * float(optax.tree.norm(exact))
    np.testing.assert_allclose(other, norm, rtol=0.1)


@pytest.mark.usefixtures("nan_allowed")  # nothing is donated where NaN are looked for
@pytest.mark.parametrize("adapter", [False, True])
def test_a_state_can_be_donated(adapter, adapted):
    """All of its buffers are used again (else there is a warning, which is an error here), the base's where it lies."""
    policy, trained = (ADAPTED, ADAPTER) if adapter else (BIGRAMS, WHOLE)
    _, start, batch, *_ = adapted
    params = start.params if adapter else start.params.base
    state, own = (init_learner(jax.tree.map(jnp.copy, params), ADAM, trained) for _ in range(2))
    update = make_update(policy, PLAIN, ADAM, trained=trained, mini_batches=2, epochs=2, **SETTINGS)
    places = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(own)}
    expected, found = jax.jit(update)(state, batch)[0], jax.jit(update, donate_argnums=0)(own, batch)[0]
    assert all(x.is_deleted() for x in jax.tree.leaves(own))
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(found)} == places
    assert distance(found.params, expected.params) <= 1e-6 * distance(expected.params, params)


# F3: accumulation ---------------------------------------------------------------------------------------


def valued_score(params, batch):
    """A policy and a critic in one dict."""
    scores = make_score(BIGRAMS, **SETTINGS)(params["policy"], batch)
    return scores._replace(value=hidden(params["policy"], batch.tokens)[0] @ params["critic"])


def five_updates(kind: str, micro_rows: int) -> tuple[LearnerState, LearnerState, dict]:
    """The state before and after five updates on fixed batches, and the last figures."""
    params, trajectories = sampled_case(32)
    algorithm = fg.ppo(beta=0.0) if kind == "critic" else fg.flow_grpo(beta=0.05, entropy_bonus=0.01, kl_weighted=True)
    policy, settings = BIGRAMS, dict(SETTINGS)
    if kind == "critic":
        params, settings = {"policy": params, "critic": jnp.zeros(WIDTH)}, {"score": valued_score}
    if kind == "adapter":
        params, policy, settings = with_adapter(params), ADAPTED, {**SETTINGS, "trained": ADAPTER}
    start = init_learner(params, ADAM, settings.get("trained", WHOLE))
    update = make_update(
        policy, algorithm, ADAM, micro_rows=micro_rows, mini_batches=2, compute_dtype=jnp.float32, **settings
    )
    state, metrics, update = start, {}, jax.jit(update)
    batch = rows_of(algorithm, trajectories, "by_trajectory")
    for shift in range(5):
        state, metrics = update(state, batch.replace(advantage=jnp.roll(batch.advantage, shift)))
    return start, state, metrics


@pytest.mark.parametrize("kind", ["whole", "adapter", "critic"])
def test_F3_accumulation_over_rows_gives_the_same_parameters(kind):
    """Five updates in micro-batches of 1 row, 3 and 8: what lies between them is 1e-4 of the way."""
    start, expected, figures = five_updates(kind, 8)
    way = distance(expected.params, start.params)
    for micro_rows in (1, 3):
        _, state, found = five_updates(kind, micro_rows)
        assert distance(state.params, expected.params) <= 1e-4 * way
        for name, value in figures.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def test_F3_sequences_are_summed_over_devices_where_all_rows_fit_one_micro_batch():
    """The two sides of a pair lie on different devices."""
    algorithm = fg.dpo()
    params, trajectories = sampled_case(33)
    batch = rows_of(algorithm, trajectories, "by_trajectory")
    mesh = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    state = init_learner(params, OPTIMIZERS["sgd"])
    updates = [make_update(BIGRAMS, algorithm, OPTIMIZERS["sgd"], mesh=m, **SETTINGS) for m in (None, mesh)]
    one, dealt = (jax.jit(update)(state, batch)[0].params for update in updates)
    assert distance(one, dealt) <= 1e-5 * distance(one, params)
