"""Which part of the parameters an update changes: all of them, an adapter, or the actor and its critic.

    part = trainable.split(params);   params = trainable.merge(params, part)

Gradient, optimizer state and reference cover the trainable part alone: frozen parameters are stored once, and
`merge(params, reference)` is the whole reference. A part may be any pytree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowgrpo.types import Params, PyTree


class TrainableSubset(NamedTuple):
    """Two pure functions: one splits the trainable part off the parameters, the other merges it back."""

    split: Callable[[Params], PyTree]  # params -> part
    merge: Callable[[Params, PyTree], Params]  # (params, part) -> params


ALL_PARAMS = TrainableSubset(lambda params: params, lambda _, part: part)
ADAPTER = TrainableSubset(lambda params: params.adapter, lambda params, part: params._replace(adapter=part))


def cast(params: Params, dtype: Any) -> Params:
    """Floating-point parameters cast to the compute dtype; gradients flow back in the dtype of the parameters."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)


# Actor and critic --------------------------------------------------------------------------------


class ActorCritic(NamedTuple):
    """Parameters of a policy and of its critic; in a reference, which needs no values, `critic` is None."""

    policy: Params
    critic: Params


def actor_params(params: Params) -> Params:
    """The policy's parameters, without those of a critic."""
    return params.policy if isinstance(params, ActorCritic) else params


def actor_critic(trainable: TrainableSubset = ALL_PARAMS) -> TrainableSubset:
    """The subset of an `ActorCritic` that trains the policy's part given by `trainable`, and the whole critic."""

    def merge(params: ActorCritic, part: ActorCritic) -> ActorCritic:
        critic = params.critic if part.critic is None else part.critic
        return ActorCritic(trainable.merge(params.policy, part.policy), critic)

    return TrainableSubset(lambda params: ActorCritic(trainable.split(params.policy), params.critic), merge)
