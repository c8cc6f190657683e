"""`compose` binds the parts of an algorithm together; a new member of the family is one call of it.

advantage of an outcome  x  ratio and clip  x  aggregation  +  KL
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax import Array

from flowgrpo.algorithms import loss as losses
from flowgrpo.algorithms.advantage import last_turns, mixed_groups
from flowgrpo.algorithms.aggregation import Aggregation
from flowgrpo.algorithms.options import Options, check_options, is_off, shaped_outcome
from flowgrpo.contracts import Algorithm
from flowgrpo.types import Trajectories, check_axes

Advantage = Callable[[Trajectories, Array, Array, Options], Array]  # (trajectories, outcome_n, valid_n, options) -> adv


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a member's formula promises and needs, for tests and updates; see the fields of `Algorithm`.

    Args:
        laws: of F1, F2, F4 and F8, those that it keeps, separated by spaces.
        needs: of logp_old, logp_ref, value and entropy, those to be scored besides what its options need.
        skips_zero_advantage: whether a zero advantage gives an exactly zero gradient without KL and entropy (F8).
    """

    laws: str = ""
    needs: str = ""
    skips_zero_advantage: bool = True


def compose(
    name: str,
    *,
    advantage: Advantage,
    weights: Aggregation,
    surrogate: losses.Surrogate,
    options: Options = Options(),  # noqa: B008
    sequence: tuple[str, ...] = (),
    clip: tuple | None = None,
    traits: Traits = Traits(),
) -> Algorithm:
    """An `Algorithm` from its parts.

    Args:
        name: for messages and metrics.
        advantage: `(trajectories, outcome_n, valid_n, options) -> adv_nt` or `adv_ntl`.
        weights: `(chosen_ntl, turns_nt, group_n, valid_n) -> w_ntl`, a function of `aggregation`.
        surrogate: a function of `loss`, with its settings bound.
        options: the options that combine.
        sequence: the batch fields that identify a sequence, for a surrogate that reads sums over one.
        clip: the widths (low, high), for the clip fractions among the metrics.
        traits: what the formula promises and needs.
    """
    check_options(name, options)

    def token_weights(trajectories: Trajectories) -> Array:
        valid_n = taking_part(trajectories, options)
        return weights(trajectories.action_mask, trajectories.turns, trajectories.group, valid_n)

    sequence_corrected = options.correction is not None and options.correction.level == "sequence"
    first_pass = partial(losses.token_sums, sequence=sequence, correction=options.correction)
    return Algorithm(
        name=name,
        advantages=bind(advantage, options),
        weights=token_weights,
        loss=partial(losses.token_loss, name=name, surrogate=surrogate, options=options, sequence=sequence, clip=clip),
        sequence_sums=first_pass if sequence or sequence_corrected else None,
        laws=frozenset(traits.laws.split()),
        needs=needs_of(options) | frozenset(traits.needs.split()),
        needs_for_advantages=frozenset(("logp_ref",) if options.kl_in_reward else ()),
        skips_zero_advantage=traits.skips_zero_advantage and not options.kl_in_loss and is_off(options.entropy_bonus),
        reference_every=options.reference_every,
    )


def last_turn_only(algorithm: Algorithm) -> Algorithm:
    """The algorithm with an advantage for the last turn of a trajectory only, as an ablation of the broadcast."""

    def advantages(trajectories: Trajectories) -> Array:
        adv, last_nt = algorithm.advantages(trajectories), last_turns(trajectories.turns)
        return jnp.where(last_nt.reshape(*last_nt.shape, *(1,) * (adv.ndim - 2)), adv, 0.0)

    return algorithm._replace(name=f"{algorithm.name}_last_turn", advantages=advantages)


def newest_segment_only(algorithm: Algorithm) -> Algorithm:
    """The algorithm with loss only on each trajectory's tokens of the newest weight version.

    Older tokens still count in the denominators, so the others keep their weight (F2).
    """

    def weights(trajectories: Trajectories) -> Array:
        version_ntl = jnp.where(trajectories.action_mask, trajectories.version, -1)
        newest_n = version_ntl.max(axis=(1, 2))
        return jnp.where(version_ntl == newest_n[:, None, None], algorithm.weights(trajectories), 0.0)

    return algorithm._replace(name=f"{algorithm.name}_newest", weights=weights)


def needs_of(options: Options) -> frozenset[str]:
    """Those of `logp_ref`, `logp_old` and `entropy` that must be scored before the loss, for these options."""
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
