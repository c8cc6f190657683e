"""The learner's state, carried from update to update, and its optimizer.

`init_learner` makes the state, one frozen pytree: it can be donated, vmapped over seeds, sharded and saved as it is.
`adamw` chains

    clip of the global norm -> scale -> weight decay -> - rate

where the scale is `base`, any gradient transformation: AdamW's float moments (`optax.scale_by_adam()`), the same in
8 bits (`adam8bit.scale_by_adam_8bit()`), or Adafactor's rows and columns (`scale_by_adafactor()`). Bytes of optimizer
state per parameter of an m x n matrix: 8, 2.01 and 4 (m + n) / mn.
"""

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
import optax
import optax.contrib
from flax import struct
from jax import Array
from jaxtyping import Int

from flowgrpo.models.trainable import ALL_PARAMS, TrainableSubset
from flowgrpo.types import Params, PyTree, check_range

MatrixAxes = tuple[tuple[int, ...], tuple[int, ...]]  # (axes that a product sums over, axes that it keeps)
MUON = 5.0  # learning rate of Muon relative to that of AdamW


# State ------------------------------------------------------------------------------------------------


class LearnerState(struct.PyTreeNode):
    """Parameters, the optimizer state of the trainable part, and two counters."""

    params: Params
    optimizer: PyTree  # the optimizer's state
    version: Int[Array, ""]  # number of updates that changed the parameters
    skipped: Int[Array, ""]  # number of steps skipped because loss or gradient was not finite


def init_learner(
    params: Params, optimizer: optax.GradientTransformation, trainable: TrainableSubset = ALL_PARAMS
) -> LearnerState:
    """The state before the first update, with an optimizer state of the `trainable` part."""
    return LearnerState(params, optimizer.init(trainable.split(params)), jnp.int32(0), jnp.int32(0))


# Optimizers -------------------------------------------------------------------------------------------


def adamw(
    learning_rate,
    *,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    final_fraction: float = 0.0,
    weight_decay=0.0,
    clip_norm: float | None = 1.0,
    base: optax.GradientTransformation | None = None,
    matrices: Mapping[str, MatrixAxes] | None = None,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter, 2019), or another `base`, after clipping by the global norm.

    Args:
        learning_rate: peak rate; may be vmapped, as may `weight_decay`.
        warmup_steps: optimizer steps (one per mini-batch) of a linear warm-up.
        decay_steps: optimizer steps of a cosine decay after it; None: a constant rate.
        final_fraction: the rate at the end of the decay, as a fraction of `learning_rate`.
        weight_decay: decoupled weight decay.
        clip_norm: maximum global norm of the gradient; None: no clip.
        base: replaces `optax.scale_by_adam()`.
        matrices: names of parameters that take Muon's orthogonal steps (Jordan et al., 2024), of about `MUON` times the
            size of AdamW's; each with the axes that a product with it sums over, and those that it keeps.
    """
    check = partial(check_range, "adamw")
    check("learning_rate", learning_rate, 0.0)
    check("warmup_steps", warmup_steps, 0, whole=True)
    check("decay_steps", decay_steps, 1, whole=True, optional=True)
    check("final_fraction", final_fraction, 0.0, 1.0)
    check("weight_decay", weight_decay, 0.0)
    check("clip_norm", clip_norm, 0.0, exclusive=True, optional=True)
    clip = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
    decays = not isinstance(weight_decay, (int, float)) or weight_decay != 0
    decay = [optax.add_decayed_weights(weight_decay)] if decays else []
    rate = _schedule(learning_rate, warmup_steps, decay_steps, final_fraction)
    decay_and_rate = [*decay, optax.scale_by_learning_rate(rate)]
    plain = optax.chain(optax.scale_by_adam() if base is None else base, *decay_and_rate)
    if matrices is None:
        return optax.chain(*clip, plain)

    def dimension_numbers(params: Params) -> PyTree:
        """For optax, which leaves parameters outside of the partition masked."""
        return {
            name: x if isinstance(x, optax.MaskedNode) else optax.contrib.MuonDimensionNumbers(*matrices[name])
            for name, x in params.items()
        }

    muon = optax.chain(
        optax.contrib.scale_by_muon(weight_dimension_numbers=dimension_numbers), optax.scale(MUON), *decay_and_rate
    )
    return optax.chain(
        *clip, optax.partition({True: muon, False: plain}, lambda params: {name: name in matrices for name in params})
    )


def scale_by_adafactor(
    *, decay_rate: float = 0.8, min_axis: int = 128, b1: float | None = None
) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern, 2018) at a given rate: second moments as a product of rows and columns.

    Arrays with two axes of at least `min_axis` are factored. The root mean square of a step is at most 1 in each array;
    with `b1` steps are averaged, which needs as much memory again as the parameters.
    """
    factored = optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=min_axis)
    average = [] if b1 is None else [optax.ema(b1, debias=False)]
    return optax.chain(factored, optax.clip_by_block_rms(1.0), *average)


def _schedule(learning_rate, warmup_steps: int, decay_steps: int | None, final_fraction: float):
    """The learning rate as a function of the step, or a number if it is constant."""
    if warmup_steps == 0 and decay_steps is None:
        return learning_rate
    after = optax.constant_schedule(learning_rate)
    if decay_steps is not None:
        decay = optax.cosine_decay_schedule(1.0, decay_steps, final_fraction)
        after = _times(learning_rate, decay)
    if warmup_steps == 0:
        return after
    # The rate of the first step is 1 / (warmup + 1) of the peak, not 0.
    warmup = _times(learning_rate, optax.linear_schedule(1 / (warmup_steps + 1), 1.0, warmup_steps))
    return optax.join_schedules([warmup, after], [warmup_steps])


def _times(rate, schedule: optax.Schedule) -> optax.Schedule:
    return lambda step: rate * schedule(step)
