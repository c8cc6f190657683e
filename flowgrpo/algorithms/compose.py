"""Bind the parts of an algorithm together: a new member of the family is one call of `compose`.

advantage of an outcome  x  ratio and clip  x  aggregation  +  KL
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array

from flowgrpo.algorithms import loss as losses
from flowgrpo.algorithms.advantage import last_turns, mixed_groups
from flowgrpo.algorithms.aggregation import Weigh
from flowgrpo.algorithms.options import Options, check_options, is_off, shaped_outcome
from flowgrpo.contracts import Algorithm
from flowgrpo.types import Trajectories, check_axes

Advantage = Callable[[Trajectories, Array, Array, Options], Array]  # (trajectories, outcome_n, valid_n, options) -> adv


def compose(
    name: str,
    *,
    advantage: Advantage,
    weigh: Weigh,
    surrogate: losses.Surrogate,
    options: Options = Options(),  # noqa: B008
    by: tuple[str, ...] = (),
    clip: tuple | None = None,
    keeps: str = "",
    needs: str = "",
    skips: bool = True,
) -> Algorithm:
    """An `Algorithm` from its parts.

    `by` names the batch fields that make a sequence where the surrogate reads sums over one; `clip`
    holds the widths (low, high) for the clip fractions among the metrics.
    """
    check_options(name, options)

    def weights(trajectories: Trajectories) -> Array:
        valid_n = taking_part(trajectories, options)
        return weigh(trajectories.actions, trajectories.turns, trajectories.group, valid_n)

    sequence_corrected = options.correction is not None and options.correction.level == "sequence"
    return Algorithm(
        name=name,
        advantages=bind(advantage, options),
        weights=weights,
        loss=partial(losses.token_loss, name=name, surrogate=surrogate, options=options, by=by, clip=clip),
        sums=partial(losses.token_sums, by=by, correction=options.correction) if by or sequence_corrected else None,
        keeps=frozenset(keeps.split()),
        needs=needs_of(options) | frozenset(needs.split()),
        before=frozenset(("logp_ref",) if options.kl_in_reward else ()),
        skips=skips and not options.kl_in_loss and is_off(options.entropy_bonus),
        reference_every=options.reference_every,
    )


def last_turn_only(algorithm: Algorithm) -> Algorithm:
    """The algorithm without its broadcast, for comparison: only the last turn of a trajectory has an advantage."""

    def advantages(trajectories: Trajectories) -> Array:
        adv, last_nt = algorithm.advantages(trajectories), last_turns(trajectories.turns)
        return jnp.where(last_nt.reshape(*last_nt.shape, *(1,) * (adv.ndim - 2)), adv, 0.0)

    return algorithm._replace(name=f"{algorithm.name}_last_turn", advantages=advantages)


def newest_segment_only(algorithm: Algorithm) -> Algorithm:
    """Make an algorithm learn from the newest version's tokens alone, where several versions spoke in a trajectory.

    Tokens of the others keep their place in the denominators, and so the rest its weight (F2).
    """

    def weights(trajectories: Trajectories) -> Array:
        version_ntl = jnp.where(trajectories.actions, trajectories.version, -1)
        newest_n = version_ntl.max(axis=(1, 2))
        return jnp.where(version_ntl == newest_n[:, None, None], algorithm.weights(trajectories), 0.0)

    return algorithm._replace(name=f"{algorithm.name}_newest", weights=weights)


def needs_of(options: Options) -> frozenset[str]:
    """List which of `logp_ref`, `logp_old` and `entropy` must be scored before the loss, for these options."""
    needs = {
        "logp_ref": options.kl_in_loss or options.kl_in_reward,
        "logp_old": options.correction is not None,
        "entropy": not is_off(options.entropy_bonus),
    }
    return frozenset(name for name, needed in needs.items() if needed)


def taking_part(trajectories: Trajectories, options: Options) -> Array:
    """Trajectories that are valid and, under dynamic sampling, in a group of mixed correctness -> bool_n."""
    check_axes(trajectories)
    if not options.dynamic_sampling:
        return trajectories.valid
    return mixed_groups(trajectories.correct, trajectories.group, trajectories.valid)


def bind(advantage: Advantage, options: Options) -> Callable[[Trajectories], Array]:
    """`advantage` as a function of the trajectories alone."""

    def advantages(trajectories: Trajectories) -> Array:
        valid_n = taking_part(trajectories, options)
        outcome_n = shaped_outcome(trajectories, options)
        return advantage(trajectories, outcome_n, valid_n, options)

    return advantages
