"""Actor and critic: values where PPO reads them, one forward pass over a shared trunk, rates and parts of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_learner import BIGRAMS, SETTINGS, WIDTH, WORDS, init, rows_of, sampled_case

import flowgrpo as fg
from flowgrpo.learner.critic import (
    ActorCritic,
    acting,
    actor_critic,
    by_part,
    explained_variance,
    make_value_score,
    own_network,
    shared_trunk,
    with_critic,
    without_critic,
)
from flowgrpo.learner.state import init_learner
from flowgrpo.learner.trained import ADAPTER
from flowgrpo.learner.update import make_score, make_update
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import Critic, before
from flowgrpo.models.lora import Adapted

CONFIG = DecoderConfig(v=WORDS, d=WIDTH, h=1, k=1, e=WIDTH, f=WIDTH, windows=(None,), ropes=(None,))  # type: ignore
PPO = fg.ppo(beta=0.0)


def init_values(key):
    return init(key) | {"value": jnp.zeros(WIDTH)}


def apply_values(params, tokens, positions=None, segments=None):
    value_rs = BIGRAMS.hidden(params, tokens, positions, segments)[0] @ params["value"]
    return value_rs if segments is None else jnp.where(segments > 0, value_rs, 0.0)


KINDS = {
    "own": own_network(BIGRAMS, Critic(init_values, apply_values)),
    "shared": shared_trunk(BIGRAMS, CONFIG),
}


def case(kind: str, seed: int = 0):
    """Parameters of both with a head that says something, and a batch."""
    policy, trajectories = sampled_case(seed)
    params = with_critic(KINDS[kind], jax.random.key(seed), policy)
    head = jax.random.normal(jax.random.key(seed + 1), (WIDTH,))
    return params._replace(critic=params.critic | {"value": head}), rows_of(PPO, trajectories)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_score_has_log_probabilities_entropies_and_the_value_before_each_token(kind):
    params, batch = case(kind)
    scores = jax.jit(make_value_score(BIGRAMS, KINDS[kind], **SETTINGS))(params, batch)
    plain = jax.jit(make_score(BIGRAMS, **SETTINGS))(params.policy, batch)
    np.testing.assert_allclose(scores.logp, plain.logp, atol=1e-6)
    np.testing.assert_allclose(scores.entropy, plain.entropy, atol=1e-6)
    trunk = params.critic if kind == "own" else params.policy | params.critic
    after_rs = apply_values(trunk, batch.tokens, batch.positions, batch.segments)
    np.testing.assert_allclose(scores.value, before(after_rs, batch.segments), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "passes"), [("own", 2), ("shared", 1)])
def test_a_shared_trunk_is_gone_through_once(kind, passes):
    params, batch = case(kind)
    seen = []

    def counted(params, tokens, *rest):
        seen.append(tokens)
        return BIGRAMS.hidden(params, tokens, *rest)

    policy = BIGRAMS._replace(hidden=counted)

    def values(params, tokens, positions=None, segments=None):
        return counted(params, tokens, positions, segments)[0] @ params["value"]

    valuation = own_network(policy, Critic(init_values, values)) if kind == "own" else shared_trunk(policy, CONFIG)
    make_value_score(policy, valuation, **SETTINGS)(params, batch)
    assert len(seen) == passes


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "moves"), [("own", False), ("shared", True)])
def test_the_value_loss_reaches_the_policy_through_a_shared_trunk_only(kind, moves):
    params, batch = case(kind)
    score = make_value_score(BIGRAMS, KINDS[kind], **SETTINGS)

    def loss(params):
        return jnp.square(score(params, batch).value).sum()

    slope = jax.grad(loss)(params)
    assert bool(jnp.abs(slope.policy["mix"]).max() > 0) == moves
    assert jnp.abs(slope.critic["value"]).max() > 0


def test_each_part_moves_at_its_own_rate_behind_its_own_clip():
    params = ActorCritic({"w": jnp.ones(3)}, {"w": jnp.ones(3)})
    clipped = [optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate)) for rate in (0.1, 0.5)]
    optimizer = by_part(*clipped)
    large = ActorCritic({"w": jnp.array([0.0, 0.3, 0.4])}, {"w": jnp.array([0.0, 30.0, 40.0])})
    updates, _ = optimizer.update(large, optimizer.init(params), params)
    np.testing.assert_allclose(updates.policy["w"], [0.0, -0.03, -0.04], atol=1e-6)
    np.testing.assert_allclose(updates.critic["w"], [0.0, -0.3, -0.4], atol=1e-6)


def test_rates_by_part_are_for_an_actor_and_its_critic():
    with pytest.raises(fg.BadInput, match=r"for ActorCritic parameters, not dict: pass those of both"):
        by_part(optax.sgd(1.0), optax.sgd(1.0)).init({"w": jnp.ones(3)})


def test_what_acts_is_the_policy_whatever_the_parameters_are():
    params = init(jax.random.key(0))
    assert acting(params) is params
    assert acting(ActorCritic(params, None)) is params
    assert with_critic(None, jax.random.key(0), params) is params


def test_an_adapter_and_the_critic_are_trained_and_a_reference_holds_the_adapter_alone():
    trained = actor_critic(ADAPTER)
    params = ActorCritic(Adapted({"w": 1}, {"a": 2}), {"value": 3})
    part = trained.take(params)
    assert part == ActorCritic({"a": 2}, {"value": 3})
    assert trained.put(params, ActorCritic({"a": 4}, {"value": 5})) == ActorCritic(
        Adapted({"w": 1}, {"a": 4}), {"value": 5}
    )
    reference = without_critic(part)
    assert reference == ActorCritic({"a": 2}, None)
    assert trained.put(params, reference) == params
    assert without_critic({"a": 2}) == {"a": 2}


@pytest.mark.slow
def test_a_critic_learns_its_targets_while_the_policy_stands_still():
    """Updates on one batch with a policy rate of 0: the value loss falls, and the policy is what it was."""
    params, batch = case("own")
    score = make_value_score(BIGRAMS, KINDS["own"], **SETTINGS)
    algorithm = fg.ppo(beta=0.0, value_clip=100.0)
    optimizer = by_part(optax.sgd(0.0), optax.adam(0.03))
    update = jax.jit(make_update(BIGRAMS, algorithm, optimizer, score=score, epochs=8))
    state, losses = init_learner(params, optimizer), []
    for _ in range(4):
        state, metrics = update(state, batch)
        losses.append(float(metrics["value_loss"]))
    assert losses[-1] < 0.5 * losses[0]
    np.testing.assert_array_equal(state.params.policy["mix"], params.policy["mix"])


def test_explained_variance_by_hand():
    _, batch = case("own")
    target_rs = jnp.where(
        batch.live, jnp.arange(batch.tokens.size, dtype=jnp.float32).reshape(batch.tokens.shape) % 7.0, 0.0
    )
    known = {"perfect": target_rs, "half": target_rs / 2, "constant": jnp.full(target_rs.shape, 3.0)}
    found = {
        name: float(explained_variance(batch.replace(target=target_rs, value_old=value_rs))["explained_variance"])
        for name, value_rs in known.items()
    }
    np.testing.assert_allclose([found["perfect"], found["half"], found["constant"]], [1.0, 0.75, 0.0], atol=1e-5)
    flat = batch.replace(target=jnp.ones(target_rs.shape), value_old=target_rs)
    assert float(explained_variance(flat)["explained_variance"]) == 0.0
    assert explained_variance(batch.replace(target=None)) == {}


@pytest.mark.usefixtures("nan_allowed")
def test_whatever_stands_in_masked_slots_changes_nothing():
    """F6: NaN among the targets and values of tokens that carry no loss."""
    _, batch = case("own")
    clean = explained_variance(batch)
    dirty = batch.replace(
        target=jnp.where(batch.live, batch.target, jnp.nan), value_old=jnp.where(batch.live, batch.value_old, jnp.inf)
    )
    np.testing.assert_allclose(explained_variance(dirty)["explained_variance"], clean["explained_variance"])
