"""Actor and critic: their parameters as one pytree, and scores with values.

    params = ActorCritic(policy, critic)        score(params, batch) -> Scores(logp, entropy, value)

The critic is a separate network (`separate_network`) or a head on the policy's hidden states (`shared_trunk`), for
which one forward pass computes everything. `Scores.value` is the value before its token. `actor_params(params)` are the
parameters that act, are sampled from and are saved as a model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from flowgrpo import masked
from flowgrpo.contracts import Policy, Scores
from flowgrpo.generate.sampler import before_tokens, score_next, score_states
from flowgrpo.learner.update import Score
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import Critic, critic_from_policy, init_head, value_head, values_before
from flowgrpo.models.lora import LoraParams
from flowgrpo.models.trainable import ActorCritic
from flowgrpo.types import BadInput, Batch, Metrics, Params


class ValueModel(NamedTuple):
    """A critic for a policy, as pure functions."""

    init: Callable[[Array, Params], Params]  # (key, the policy's parameters) -> the critic's
    values: Callable[..., tuple[Array, Array]]  # (params, tokens, positions, segments) -> (hidden, value after each)
    tree_values: Callable[..., tuple[Array, Array]]  # (params, tokens, positions, ends) of a tree -> the same
    reads_trees: bool = False  # whether policy and critic both read prefix trees


def with_critic(critic: ValueModel | None, key: Array, params: Params) -> Params:
    """A policy's parameters with those of a new critic; unchanged without a critic."""
    return params if critic is None else ActorCritic(params, critic.init(key, params))


def without_critic(part: Params) -> Params:
    """The trainable part without a critic, as a reference has none."""
    return part._replace(critic=None) if isinstance(part, ActorCritic) else part


# Values -----------------------------------------------------------------------------------------------


def separate_network(
    policy: Policy, critic: Critic, *, init: Callable[[Array, Params], Params] | None = None
) -> ValueModel:
    """A critic with its own trunk, which `init` may copy from the policy's (`copied_trunk`)."""

    def values(params: ActorCritic, tokens, positions, segments) -> tuple[Array, Array]:
        states_rsd = policy.hidden(params.policy, tokens, positions, segments, None)[0]
        return states_rsd, critic.apply(params.critic, tokens, positions, segments)

    def tree_values(params: ActorCritic, tokens, positions, ends) -> tuple[Array, Array]:
        if critic.apply_tree is None:
            raise BadInput("the rows share prefixes, and this critic has no apply_tree: pack plain rows")
        states_rud = _trees_of(policy)(params.policy, tokens, positions, ends)
        return states_rud, critic.apply_tree(params.critic, tokens, positions, ends)

    reads_trees = policy.hidden_tree is not None and critic.apply_tree is not None
    return ValueModel((lambda key, _: critic.init(key)) if init is None else init, values, tree_values, reads_trees)


def copied_trunk(config: DecoderConfig) -> Callable[[Array, Params], Params]:
    """An `init` that copies the policy's trunk (with an adapter, that of its base) into the critic."""

    def init(_key: Array, policy_params: Params) -> Params:
        return critic_from_policy(
            policy_params.base if isinstance(policy_params, LoraParams) else policy_params, config
        )

    return init


def shared_trunk(policy: Policy, config: DecoderConfig) -> ValueModel:
    """A head on the policy's hidden states; the value loss also trains the policy's trunk."""

    def values(params: ActorCritic, tokens, positions, segments) -> tuple[Array, Array]:
        states_rsd = policy.hidden(params.policy, tokens, positions, segments, None)[0]
        return states_rsd, masked.fill(value_head(params.critic, states_rsd), segments > 0)

    def tree_values(params: ActorCritic, tokens, positions, ends) -> tuple[Array, Array]:
        states_rud = _trees_of(policy)(params.policy, tokens, positions, ends)
        return states_rud, masked.fill(value_head(params.critic, states_rud), ends > 0)

    return ValueModel(lambda _key, _params: init_head(config), values, tree_values, policy.hidden_tree is not None)


def _trees_of(policy: Policy) -> Callable[..., Array]:
    if policy.hidden_tree is None:
        raise BadInput("the rows share prefixes, and this policy has no hidden_tree: pack plain rows")
    return policy.hidden_tree


def make_value_score(
    policy: Policy,
    critic: ValueModel,
    *,
    temperature: float | Array = 1.0,
    banned: tuple[int, ...] = (),
    chunk: int = 1024,
) -> Score:
    """The `score` of an update with a critic: log-probability, entropy and value of each token."""
    settings: dict[str, Any] = {"temperature": temperature, "banned": banned, "chunk": chunk}

    def score(params: ActorCritic, batch: Batch) -> Scores:
        tokens, positions, segments = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments))
        if (tree := batch.tree) is not None:
            real = (segments > 0) & (jnp.asarray(tree.predecessor) >= 0)
            trees = (jnp.asarray(x) for x in (tree.tokens, tree.positions, tree.ends))
            states_rud, value_ru = critic.tree_values(params, *trees)
            states_rsd, value_rs = (before_tokens(x, tree, real) for x in (states_rud, value_ru))
            scores = score_next(policy, params.policy, states_rsd, tokens, real, **settings)
            return scores._replace(value=masked.fill(value_rs, real))
        states_rsd, value_rs = critic.values(params, tokens, positions, segments)
        scores = score_states(policy, params.policy, states_rsd, tokens, segments, wanted=batch.chosen, **settings)
        return scores._replace(value=values_before(value_rs, segments))

    return score


def explained_variance(batch: Batch) -> Metrics:
    """1 - Var(target - value_old) / Var(target) over tokens with loss; 0 if the targets don't vary."""
    if batch.target is None or batch.value_old is None:
        return {}
    live_rs = batch.loss_mask
    target_rs = masked.fill(batch.target, live_rs)
    variance = masked.variance(target_rs, live_rs)
    residual = masked.variance(target_rs - masked.fill(batch.value_old, live_rs), live_rs)
    return {"explained_variance": jnp.where(variance > 0, 1.0 - residual / jnp.where(variance > 0, variance, 1.0), 0.0)}


# Optimizer ------------------------------------------------------------------------------------------------


def partition_optimizer(
    policy: optax.GradientTransformation, critic: optax.GradientTransformation
) -> optax.GradientTransformation:
    """An optimizer of `ActorCritic` from one for each part, with separate learning rates and gradient norms."""

    def labels(params: Params) -> ActorCritic:
        if not isinstance(params, ActorCritic):
            raise BadInput(
                f"this optimizer is for ActorCritic parameters, not {type(params).__name__}: pass those of both"
            )
        return ActorCritic("policy", "critic")

    return optax.partition({"policy": policy, "critic": critic}, labels)
