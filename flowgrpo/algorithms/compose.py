"""`algorithm` and `compose` bind the parts of an algorithm together; a new member of the family is one call.

    advantage of an outcome  x  ratio and clip  x  aggregation  +  KL

An algorithm of one's own is often an advantage function alone:

    @fg.algorithm(weights=fg.flow_weights, surrogate=fg.clip(0.2, 0.28))
    def hopeful(outcome_n, group_n, valid_n):
        centred_n = fg.group_center(outcome_n, group_n, valid_n)
        return jnp.where(centred_n > 0, 2.0, 1.0) * centred_n
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Unpack, overload

import jax.numpy as jnp
from jax import Array

from flowgrpo import masked
from flowgrpo.algorithms import loss as losses
from flowgrpo.algorithms.advantage import Normalize, last_turns, mixed_groups, multi_turn_group_advantage
from flowgrpo.algorithms.aggregation import Aggregation, flow_weights
from flowgrpo.algorithms.options import (
    OptionKeywords,
    Options,
    check_options,
    is_off,
    overlong_penalty,
    read_options,
    reward_kl,
)
from flowgrpo.contracts import Algorithm
from flowgrpo.types import BadInput, Status, Trajectories, check_axes

Advantage = Callable[[Trajectories, Array, Array, Options], Array]  # (trajectories, outcome_n, valid_n, options) -> adv
SYMMETRIC_CLIP = losses.clip(0.2)
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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
        surrogate: a function of `loss`, with its settings bound, or `clip(low, high)`.
        options: the options that combine.
        sequence: the batch fields that identify a sequence, for a surrogate that reads sums over one.
        clip: the widths (low, high), for the clip fractions among the metrics; those of a `clip(low, high)` by itself.
        traits: what the formula promises and needs.
    """
    check_options(name, options)
    if isinstance(surrogate, losses.ClipSurrogate):
        clip = clip or (surrogate.low, surrogate.high)
        surrogate = surrogate._replace(dual=options.dual_clip)

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


@overload
def algorithm(advantage: Callable[..., Array], /) -> Algorithm: ...


@overload
def algorithm(
    *,
    weights: Aggregation = flow_weights,
    surrogate: losses.Surrogate = SYMMETRIC_CLIP,
    sequence: tuple[str, ...] = (),
    traits: Traits | None = None,
    **options: Unpack[OptionKeywords],
) -> Callable[[Callable[..., Array]], Algorithm]: ...


def algorithm(
    advantage: Callable[..., Array] | None = None,
    /,
    *,
    weights: Aggregation = flow_weights,
    surrogate: losses.Surrogate = SYMMETRIC_CLIP,
    sequence: tuple[str, ...] = (),
    traits: Traits | None = None,
    **options: Unpack[OptionKeywords],
) -> Algorithm | Callable[[Callable[..., Array]], Algorithm]:
    """Make an `Algorithm` of an advantage function, after which it is named: a decorator, with or without settings.

    Args:
        advantage: `(outcome_n, group_n, valid_n) -> adv_n`, which sees each trajectory that takes part once, and whose
            result is broadcast over the turns; or `(trajectories) -> adv_nt` or `adv_ntl`, for advantages that differ
            by turn or token. Outcomes have the length penalty and the KL in the reward subtracted, if there are any.
        weights: the aggregation, a function of `aggregation`; that of Flow-GRPO by default.
        surrogate: `clip(low, high)`, or a function of `loss` with its settings bound.
        sequence: the batch fields that identify a sequence, for a surrogate that reads sums over one.
        traits: what the formula promises and needs; by default rows without advantage are skipped under a `clip`.
        options: the fields of `Options`.
    """
    if advantage is None:
        return partial(
            _from_function, weights=weights, surrogate=surrogate, sequence=sequence, traits=traits, settings=options
        )
    return _from_function(
        advantage, weights=weights, surrogate=surrogate, sequence=sequence, traits=traits, settings=options
    )


def _from_function(
    function: Callable[..., Array],
    *,
    weights: Aggregation,
    surrogate: losses.Surrogate,
    sequence: tuple[str, ...],
    traits: Traits | None,
    settings: OptionKeywords,
) -> Algorithm:
    """The algorithm of an advantage function, whose parameters say which kind it is."""
    name = getattr(function, "__name__", "algorithm")
    is_clip = isinstance(surrogate, losses.ClipSurrogate)
    if clips := sorted({"clip_low", "clip_high"} & set(settings)):
        raise BadInput(f"{name} has no option {', '.join(clips)}: the clip range is surrogate=fg.clip(low, high)")
    return compose(
        name,
        advantage=_to_advantage(name, function),
        weights=weights,
        surrogate=surrogate,
        options=read_options(name, settings, rejects=() if is_clip else ("dual_clip",)),
        sequence=sequence,
        traits=Traits(skips_zero_advantage=is_clip) if traits is None else traits,
    )


def _to_advantage(name: str, function: Callable[..., Array]) -> Advantage:
    """An advantage of `compose` from a function of three arrays, or of trajectories."""
    forms = "(outcome_n, group_n, valid_n) -> adv_n or (trajectories) -> adv_nt"
    if not callable(function):
        raise BadInput(f"algorithm: {function!r:.60} is no function: decorate a function {forms}")
    parameters = inspect.signature(function).parameters.values()
    required = [item for item in parameters if item.default is item.empty]
    if len(required) not in (1, 3) or any(item.kind not in POSITIONAL for item in required):
        raise BadInput(f"{name}{inspect.signature(function)} is no advantage function: it must be {forms}")

    def checked(adv: Array, *shapes: tuple[int, ...]) -> Array:
        if jnp.shape(adv) not in shapes:
            expected = " or ".join(str(shape) for shape in shapes)
            raise BadInput(f"{name} returns an advantage of shape {jnp.shape(adv)}, but it must be {expected}")
        return adv

    if len(required) == 3:

        def normalize(outcome_n, group_n, valid_n) -> Array:
            return checked(function(outcome_n, group_n, valid_n), jnp.shape(outcome_n))

        return outcome_advantage(normalize)

    def advantage(trajectories, outcome_n, valid_n, options) -> Array:
        outcome_n = outcome_n - reward_kl(trajectories, options).sum(axis=(1, 2))
        status_n = jnp.where(valid_n, trajectories.status, Status.ABORTED)  # so that `valid` is who takes part
        adv = function(trajectories.replace(outcome=outcome_n, status=status_n))
        adv = checked(adv, trajectories.turns.shape, trajectories.action_mask.shape)
        live_nt = trajectories.acted & valid_n[:, None]
        return masked.fill(adv, live_nt if adv.ndim == 2 else live_nt[:, :, None] & trajectories.action_mask)

    return advantage


def outcome_advantage(
    normalize: Normalize, over: Callable[..., Array] = multi_turn_group_advantage, **settings: float
) -> Advantage:
    """The outcome (less its KL, if KL is in the reward), normalised over the group."""

    def advantage(trajectories, outcome_n, valid_n, options) -> Array:
        outcome_n = outcome_n - reward_kl(trajectories, options).sum(axis=(1, 2))
        return over(
            outcome_n, trajectories.acted, trajectories.group, valid_n, normalize=partial(normalize, **settings)
        )

    return advantage


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
        outcome_n = masked.fill(trajectories.outcome, trajectories.valid)
        if options.overlong is not None:
            length_n = masked.count(trajectories.action_mask, axis=(1, 2))
            outcome_n = outcome_n + overlong_penalty(length_n, options.overlong)
        return advantage(trajectories, outcome_n, valid_n, options)

    return advantages
