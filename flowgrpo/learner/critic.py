"""Actor and critic: parameters side by side, and scores with values.

    params = ActorCritic(policy, critic)        score(params, batch) -> Scores(logp, entropy, value)

The critic is a network of its own (`own_network`) or a head on the policy's hidden states (`shared_trunk`), for which
one forward pass gives everything. `Scores.value` stands before its token, as `logp` does. What acts, is sampled from
and is saved as a model is `acting(params)`, whatever the parameters are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from flowgrpo import masked
from flowgrpo.contracts import Metrics, Params, Policy, Scores
from flowgrpo.generate.sampler import before_tokens, score_next, score_states
from flowgrpo.learner.update import Score
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import Critic, before, from_policy, init_head, value_head
from flowgrpo.models.lora import Adapted
from flowgrpo.models.trainable import ActorCritic
from flowgrpo.types import BadInput, Batch


class Valuation(NamedTuple):
    """A critic beside a policy, as pure functions."""

    init: Callable[[Array, Any], Params]  # (key, the policy's parameters) -> the critic's
    look: Callable[..., tuple[Array, Array]]  # (ActorCritic, tokens, positions, segments) -> (hidden, value after each)
    look_tree: Callable[..., tuple[Array, Array]]  # (ActorCritic, tokens, positions, ends) of a tree -> the same
    reads_trees: bool = False  # whether policy and critic both do


def with_critic(valuation: Valuation | None, key: Array, params: Any) -> Any:
    """A policy's parameters beside those of a new critic; themselves where there is none."""
    return params if valuation is None else ActorCritic(params, valuation.init(key, params))


def without_critic(part: Any) -> Any:
    """Drop the critic from a trained part, as a reference keeps none; a part without a critic stays as it is."""
    return part._replace(critic=None) if isinstance(part, ActorCritic) else part


# Values -----------------------------------------------------------------------------------------------


def own_network(policy: Policy, critic: Critic, *, init: Callable[[Array, Any], Params] | None = None) -> Valuation:
    """A critic with a trunk of its own, which `init` may start from the policy's; see `copied_trunk`."""

    def look(params: ActorCritic, tokens, positions, segments) -> tuple[Array, Array]:
        states_rsd = policy.hidden(params.policy, tokens, positions, segments, None)[0]
        return states_rsd, critic.apply(params.critic, tokens, positions, segments)

    def look_tree(params: ActorCritic, tokens, positions, ends) -> tuple[Array, Array]:
        if critic.apply_tree is None:
            raise BadInput("the rows share prefixes, and this critic has no apply_tree: pack plain rows")
        states_rud = _trees_of(policy)(params.policy, tokens, positions, ends)
        return states_rud, critic.apply_tree(params.critic, tokens, positions, ends)

    reads_trees = policy.hidden_tree is not None and critic.apply_tree is not None
    return Valuation((lambda key, _: critic.init(key)) if init is None else init, look, look_tree, reads_trees)


def copied_trunk(config: DecoderConfig) -> Callable[[Array, Any], Params]:
    """An `init` under which the critic's trunk is a copy of the policy's, that of the base under an adapter."""

    def init(_key: Array, policy_params: Any) -> Params:
        return from_policy(policy_params.base if isinstance(policy_params, Adapted) else policy_params, config)

    return init


def shared_trunk(policy: Policy, config: DecoderConfig) -> Valuation:
    """A head on the policy's hidden states; the value loss reaches the policy's trunk, too."""

    def look(params: ActorCritic, tokens, positions, segments) -> tuple[Array, Array]:
        states_rsd = policy.hidden(params.policy, tokens, positions, segments, None)[0]
        return states_rsd, masked.fill(value_head(params.critic, states_rsd), segments > 0)

    def look_tree(params: ActorCritic, tokens, positions, ends) -> tuple[Array, Array]:
        states_rud = _trees_of(policy)(params.policy, tokens, positions, ends)
        return states_rud, masked.fill(value_head(params.critic, states_rud), ends > 0)

    return Valuation(lambda _key, _params: init_head(config), look, look_tree, policy.hidden_tree is not None)


def _trees_of(policy: Policy) -> Callable[..., Array]:
    if policy.hidden_tree is None:
        raise BadInput("the rows share prefixes, and this policy has no hidden_tree: pack plain rows")
    return policy.hidden_tree


def make_value_score(
    policy: Policy, valuation: Valuation, *, temperature=1.0, banned: tuple[int, ...] = (), chunk: int = 1024
) -> Score:
    """The `score` of an update with a critic: log-probability, entropy, and the value before each token."""
    settings: dict[str, Any] = {"temperature": temperature, "banned": banned, "chunk": chunk}

    def score(params: ActorCritic, batch: Batch) -> Scores:
        tokens, positions, segments = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments))
        if (tree := batch.tree) is not None:
            real = (segments > 0) & (jnp.asarray(tree.after) >= 0)
            trees = (jnp.asarray(x) for x in (tree.tokens, tree.positions, tree.ends))
            states_rud, value_ru = valuation.look_tree(params, *trees)
            states_rsd, value_rs = (before_tokens(x, tree, real) for x in (states_rud, value_ru))
            scores = score_next(policy, params.policy, states_rsd, tokens, real, **settings)
            return scores._replace(value=masked.fill(value_rs, real))
        states_rsd, value_rs = valuation.look(params, tokens, positions, segments)
        scores = score_states(policy, params.policy, states_rsd, tokens, segments, wanted=batch.chosen, **settings)
        return scores._replace(value=before(value_rs, segments))

    return score


def explained_variance(batch: Batch) -> Metrics:
    """The share of the targets' variance that the values of before the update explain; 0 where they don't vary."""
    if batch.target is None or batch.value_old is None:
        return {}
    live_rs = batch.live
    target_rs = masked.fill(batch.target, live_rs)
    whole = masked.variance(target_rs, live_rs)
    rest = masked.variance(target_rs - masked.fill(batch.value_old, live_rs), live_rs)
    return {"explained_variance": jnp.where(whole > 0, 1.0 - rest / jnp.where(whole > 0, whole, 1.0), 0.0)}


# Rates ------------------------------------------------------------------------------------------------


def by_part(policy: optax.GradientTransformation, critic: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer of `ActorCritic` from one for each part, with rates and gradient norms of their own."""
    return optax.partition({"policy": policy, "critic": critic}, _labels)


def _labels(params: Any) -> ActorCritic:
    if not isinstance(params, ActorCritic):
        raise BadInput(f"this optimizer is for ActorCritic parameters, not {type(params).__name__}: pass those of both")
    return ActorCritic("policy", "critic")
