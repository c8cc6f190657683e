"""Choose the part of the parameters that an update changes: all of them, an adapter, the actor and its critic.

    part = trained.take(params);   params = trained.put(params, part)

The gradient, the optimizer's memory and the reference are of the part alone: what is frozen is stored once, and
`put(params, reference)` is the whole reference. A part may be any pytree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Trained(NamedTuple):
    """A part of the parameters, and how it goes back; pure."""

    take: Callable[[Any], Any]  # params -> part
    put: Callable[[Any, Any], Any]  # (params, part) -> params


WHOLE = Trained(lambda params: params, lambda _, part: part)
ADAPTER = Trained(lambda params: params.adapter, lambda params, part: params._replace(adapter=part))


def cast(params: Any, dtype: Any) -> Any:
    """The parameters in another type of number, to compute with; gradients flow back in their own."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)


# Actor and critic --------------------------------------------------------------------------------


class ActorCritic(NamedTuple):
    """Parameters of a policy and of its critic; in a reference, which needs no values, `critic` is None."""

    policy: Any
    critic: Any


def acting(params: Any) -> Any:
    """The policy's own parameters."""
    return params.policy if isinstance(params, ActorCritic) else params


def actor_critic(trained: Trained = WHOLE) -> Trained:
    """Build the `Trained` of an `ActorCritic`: the part of the policy that `trained` takes, and all of its critic."""

    def put(params: ActorCritic, part: ActorCritic) -> ActorCritic:
        critic = params.critic if part.critic is None else part.critic
        return ActorCritic(trained.put(params.policy, part.policy), critic)

    return Trained(lambda params: ActorCritic(trained.take(params.policy), params.critic), put)
