"""Actor and critic: values where PPO reads them, one forward pass over a shared trunk, rates and parts of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_learner import (
    BIGRAMS,
    SCORE,
    SETTINGS,
    WIDTH,
    WORDS,
    assert_close,
    assert_figures,
    compiled,
    fresh,
    init,
    rows_of,
    sampled_case,
    unsplit,
)

import flowgrpo as fg
from flowgrpo.learner.critic import (
    explained_variance,
    make_value_score,
    partition_optimizer,
    separate_network,
    shared_trunk,
    with_critic,
    without_critic,
)
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import Critic, values_before
from flowgrpo.models.lora import LoraParams
from flowgrpo.models.trainable import ADAPTER, ActorCritic, actor_critic, actor_params

CONFIG = DecoderConfig(v=WORDS, d=WIDTH, h=1, k=1, e=WIDTH, f=WIDTH, windows=(None,), ropes=(None,))  # type: ignore
PPO = fg.ppo(beta=0.0)
PASSES = []  # forward passes that were traced


def counted(params, tokens, *rest):
    PASSES.append(tokens)
    return BIGRAMS.hidden(params, tokens, *rest)


def apply_values(params, tokens, positions=None, segments=None):
    value_rs = counted(params, tokens, positions, segments)[0] @ params["value"]
    return value_rs if segments is None else jnp.where(segments > 0, value_rs, 0.0)


POLICY = BIGRAMS._replace(hidden=counted)
KINDS = {
    "own": separate_network(POLICY, Critic(lambda key: init(key) | {"value": jnp.zeros(WIDTH)}, apply_values)),
    "shared": shared_trunk(POLICY, CONFIG),
}


def case(kind: str):
    """Return parameters of both with a head that says something, and a batch."""
    policy, trajectories = sampled_case(0)
    params = with_critic(KINDS[kind], jax.random.key(0), policy)
    head = jax.random.normal(jax.random.key(1), (WIDTH,))
    return params._replace(critic=params.critic | {"value": head}), rows_of(PPO, trajectories)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "passes"), [("own", 2), ("shared", 1)])
def test_scores_have_the_value_before_each_token(kind, passes):
    """The value loss reaches the policy through a shared trunk only."""
    params, batch = case(kind)
    score = make_value_score(POLICY, KINDS[kind], **SETTINGS)

    @jax.jit
    def look(params):
        trunk = params.critic if kind == "own" else params.policy | params.critic
        value_rs = apply_values(trunk, batch.tokens, batch.positions, batch.segments)
        slope = jax.grad(lambda params: jnp.square(score(params, batch).value).sum())(params)
        return score(params, batch), values_before(value_rs, batch.segments), slope

    PASSES.clear()
    jax.eval_shape(score, params, batch)
    assert len(PASSES) == passes
    scores, value_rs, slope = look(params)
    plain = SCORE(params.policy, batch)
    np.testing.assert_allclose(scores.logp, plain.logp, atol=1e-6)
    np.testing.assert_allclose(scores.entropy, plain.entropy, atol=1e-6)
    np.testing.assert_allclose(scores.value, value_rs, atol=1e-5)
    assert bool(jnp.abs(slope.policy["mix"]).max() > 0) == (kind == "shared")
    assert jnp.abs(slope.critic["value"]).max() > 0


@pytest.mark.slow
def test_F3_actor_and_critic_move_by_their_unsplit_gradient():
    params, batch = case("own")
    score = make_value_score(POLICY, KINDS["own"], **SETTINGS)
    state, metrics = compiled(PPO, score=score)(fresh(params), batch)
    grads, figures = unsplit(PPO, score)(params, batch)
    assert float(metrics["value_loss"]) > 0
    assert_figures(metrics, figures)
    for part in ("policy", "critic"):
        own, grad = getattr(params, part), getattr(grads, part)
        assert_close(getattr(state.params, part), jax.tree.map(jnp.subtract, own, grad), own)


def test_actor_and_critic_have_their_own_rate_and_clip():
    params = ActorCritic({"w": jnp.ones(3)}, {"w": jnp.ones(3)})
    clipped = [optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate)) for rate in (0.1, 0.5)]
    optimizer = partition_optimizer(*clipped)
    large = ActorCritic({"w": jnp.array([0.0, 0.3, 0.4])}, {"w": jnp.array([0.0, 30.0, 40.0])})
    updates, _ = jax.jit(optimizer.update)(large, optimizer.init(params), params)
    np.testing.assert_allclose(updates.policy["w"], [0.0, -0.03, -0.04], atol=1e-6)
    np.testing.assert_allclose(updates.critic["w"], [0.0, -0.3, -0.4], atol=1e-6)
    with pytest.raises(fg.BadInput, match=r"for ActorCritic parameters, not dict: pass those of both"):
        optimizer.init({"w": jnp.ones(3)})


def test_a_reference_holds_the_adapter_without_the_critic():
    """`actor_params` gives the policy's parameters, with a critic beside them or not."""
    trainable = actor_critic(ADAPTER)
    params = ActorCritic(LoraParams({"w": 1}, {"a": 2}), {"value": 3})
    part = trainable.split(params)
    assert part == ActorCritic({"a": 2}, {"value": 3})
    moved = ActorCritic(LoraParams({"w": 1}, {"a": 4}), {"value": 5})
    assert trainable.merge(params, ActorCritic({"a": 4}, {"value": 5})) == moved
    reference = without_critic(part)
    assert reference == ActorCritic({"a": 2}, None)
    assert trainable.merge(params, reference) == params
    assert without_critic({"a": 2}) == {"a": 2}
    assert actor_params(params) is params.policy
    assert actor_params(params.policy) is params.policy
    assert with_critic(None, jax.random.key(0), params.policy) is params.policy


@pytest.mark.usefixtures("nan_allowed")
def test_explained_variance_by_hand():
    """F6: whatever stands among the targets and values of tokens that carry no loss changes nothing."""
    _, batch = case("own")
    live_rs, explained = batch.loss_mask, jax.jit(explained_variance)
    target_rs = jnp.arange(batch.tokens.size, dtype=jnp.float32).reshape(batch.tokens.shape) % 7.0
    values = {1.0: target_rs, 0.75: target_rs / 2, 0.0: jnp.full_like(target_rs, 3.0)}
    for share, value_rs in values.items():
        dirty = {"target": jnp.where(live_rs, target_rs, jnp.nan), "value_old": jnp.where(live_rs, value_rs, jnp.inf)}
        np.testing.assert_allclose(explained(batch.replace(**dirty))["explained_variance"], share, atol=1e-5)
    flat = batch.replace(target=jnp.ones_like(target_rs), value_old=target_rs)
    assert float(explained(flat)["explained_variance"]) == 0.0
    assert explained_variance(batch.replace(target=None)) == {}
