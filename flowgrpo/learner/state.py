"""The state that a learner carries from update to update, and the optimizer that moves it.

`init_learner` makes the state, one frozen pytree: it can be donated, vmapped over seeds, sharded and saved as it is.
`make_optimizer` chains

    clip of the global norm -> scale -> weight decay -> - rate

where the scale is `base`, any gradient transformation: AdamW's float moments (`optax.scale_by_adam()`), the same in
8 bits (`quantised.scale_by_adam_8bit()`), or Adafactor's rows and columns (`scale_by_adafactor()`). Bytes that each
remembers, for a parameter of an m x n matrix: 8, 2.01 and 4 (m + n) / mn.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import optax
import optax.contrib
from flax import struct
from jax import Array
from jaxtyping import Int

from flowgrpo.models.trainable import WHOLE, Trained
from flowgrpo.types import check_range

Summed = tuple[tuple[int, ...], tuple[int, ...]]  # axes of a parameter that a product sums over, and that it leaves
MUON = 5.0  # times the rate: a step of Muon against one of AdamW


# State ------------------------------------------------------------------------------------------------


class LearnerState(struct.PyTreeNode):
    """Parameters, what the optimizer remembers of those that it moves, and two counters."""

    params: Any
    optimizer: Any
    version: Int[Array, ""]  # of the parameters: updates that changed them
    skipped: Int[Array, ""]  # steps left out because loss or gradient was not finite


def init_learner(params, optimizer: optax.GradientTransformation, trained: Trained = WHOLE) -> LearnerState:
    """The state before the first update; the optimizer remembers what is `trained`."""
    return LearnerState(params, optimizer.init(trained.take(params)), jnp.int32(0), jnp.int32(0))


# Optimizers -------------------------------------------------------------------------------------------


def make_optimizer(
    *,
    learning_rate,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    final_share: float = 0.0,
    weight_decay=0.0,
    clip_norm: float | None = 1.0,
    base: optax.GradientTransformation | None = None,
    matrices: Mapping[str, Summed] | None = None,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter, 2019), or `base` in the place of its Adam, behind a clip of the global norm.

    The rate rises over `warmup_steps` and then falls along a cosine over `decay_steps` to `final_share` of
    itself; both count optimizer steps, one for each mini-batch. `learning_rate` and `weight_decay` may be vmapped.
    The parameters that `matrices` names, with the axes that a product with them sums over and those it leaves, take
    Muon's orthogonal steps (Jordan et al., 2024) of about `MUON` times the size of AdamW's.
    """
    check = partial(check_range, "make_optimizer")
    check("learning_rate", learning_rate, 0.0)
    check("warmup_steps", warmup_steps, 0, whole=True)
    check("decay_steps", decay_steps, 1, whole=True, optional=True)
    check("final_share", final_share, 0.0, 1.0)
    check("weight_decay", weight_decay, 0.0)
    check("clip_norm", clip_norm, 0.0, exclusive=True, optional=True)
    clip = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
    decays = not isinstance(weight_decay, (int, float)) or weight_decay != 0
    rest = [optax.add_decayed_weights(weight_decay)] if decays else []
    rate = _schedule(learning_rate, warmup_steps, decay_steps, final_share)
    rest.append(optax.scale_by_learning_rate(rate))
    plain = optax.chain(optax.scale_by_adam() if base is None else base, *rest)
    if matrices is None:
        return optax.chain(*clip, plain)
    numbers: Any = partial(_numbers, matrices)
    names = set(matrices)
    muon = optax.chain(optax.contrib.scale_by_muon(weight_dimension_numbers=numbers), optax.scale(MUON), *rest)
    return optax.chain(
        *clip, optax.partition({True: muon, False: plain}, lambda params: {name: name in names for name in params})
    )


def scale_by_adafactor(
    *, decay_rate: float = 0.8, least_axis: int = 128, b1: float | None = None
) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern, 2018) at a given rate: second moments as a product of rows and columns.

    Arrays with two axes of at least `least_axis` are factored. A step's root mean square, array by array, is at most 1;
    with `b1` steps are averaged, which remembers as much again as the parameters hold.
    """
    factored = optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=least_axis)
    average = [] if b1 is None else [optax.ema(b1, debias=False)]
    return optax.chain(factored, optax.clip_by_block_rms(1.0), *average)


def _numbers(matrices: Mapping[str, Summed], params: Mapping) -> dict:
    """For optax: what it leaves out of a partition stays as it is."""
    return {
        name: x if isinstance(x, optax.MaskedNode) else optax.contrib.MuonDimensionNumbers(*matrices[name])
        for name, x in params.items()
    }


def _schedule(learning_rate, warmup_steps: int, decay_steps: int | None, final_share: float):
    """The rate as a function of the step; a number where it does not change."""
    if warmup_steps == 0 and decay_steps is None:
        return learning_rate
    after = optax.constant_schedule(learning_rate)
    if decay_steps is not None:
        fall = optax.cosine_decay_schedule(1.0, decay_steps, final_share)
        after = _times(learning_rate, fall)
    if warmup_steps == 0:
        return after
    # The first step has a rate too: 1 / (warmup + 1) of the whole.
    rise = _times(learning_rate, optax.linear_schedule(1 / (warmup_steps + 1), 1.0, warmup_steps))
    return optax.join_schedules([rise, after], [warmup_steps])


def _times(rate, schedule: optax.Schedule) -> optax.Schedule:
    return lambda step: rate * schedule(step)
