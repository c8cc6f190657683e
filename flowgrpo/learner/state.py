"""The state that a learner carries from update to update.

State is one frozen pytree: it can be donated, vmapped over seeds, sharded and saved as it is.
"""

from typing import Any

import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jaxtyping import Int

from flowgrpo.learner.optimizers import MUON as MUON
from flowgrpo.learner.optimizers import make_optimizer as make_optimizer
from flowgrpo.learner.trained import WHOLE, Trained


class LearnerState(struct.PyTreeNode):
    """Parameters, what the optimizer remembers of those that it moves, and two counters."""

    params: Any
    optimizer: Any
    version: Int[Array, ""]  # of the parameters: updates that changed them
    skipped: Int[Array, ""]  # steps left out because loss or gradient was not finite


def init_learner(params, optimizer: optax.GradientTransformation, trained: Trained = WHOLE) -> LearnerState:
    """The state before the first update; the optimizer remembers what is `trained`."""
    return LearnerState(params, optimizer.init(trained.take(params)), jnp.int32(0), jnp.int32(0))
