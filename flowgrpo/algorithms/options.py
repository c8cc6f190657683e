"""Options that all members of the family share, checked once when an algorithm is built.

A number that may be vmapped (`beta`, `entropy_bonus`, a clip width) is never tested with a Python
`if` while it is traced: a plain Python 0 means "absent", anything else is present.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo import masked
from flowgrpo.types import AnyArray, BadInput, Trajectories, check_names, check_range, checked

KL_KINDS = ("k1", "k2", "k3")


@checked
class Correction(NamedTuple):
    """Stop-gradient min(pi_old / mu, cap) for stale or mismatched samplers.

    Args:
        cap: upper bound of the ratio.
        level: "token" or "sequence" (the ratio of one turn's whole action).
        mask: give ratios outside the bounds weight 0 instead of clipping them (IcePop: cap 5, low 0.5, by token).
        low: lower bound of the ratio.
    """

    cap: float = 2.0
    level: str = "token"
    mask: bool = False
    low: float = 0.0

    def check(self) -> None:
        """Raise `BadInput` for bounds or a level that can't be."""
        check_range("Correction", "cap", self.cap, 0.0, exclusive=True)
        check_range("Correction", "low", self.low, 0.0, self.cap)
        check_choice("Correction", "level", self.level, ("token", "sequence"))


@checked
class Overlong(NamedTuple):
    """DAPO's soft length penalty: 0 up to `max_tokens - buffer` chosen tokens, then down to -1 at `max_tokens`."""

    max_tokens: int
    buffer: int

    def check(self) -> None:
        """Raise `BadInput` unless 0 < buffer <= max_tokens."""
        check_range("Overlong", "max_tokens", self.max_tokens, 1, whole=True)
        check_range("Overlong", "buffer", self.buffer, 1, self.max_tokens, whole=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that combine, with their defaults; constructors take them as keyword arguments.

    Args:
        beta: strength of the KL term to the reference; 0: none. 0.001 to 0.1 is usual.
        kl: its estimator: k1, k2 or k3; None: k3 in the loss, k1 in the reward.
        kl_in: "loss" or "reward": where the KL term is added.
        kl_weighted: weight the KL term in the loss by the ratio, for off-policy data.
        entropy_bonus: added for each nat of a token's entropy; 0.003 to 0.02 is usual, see below.
        dual_clip: bound of ratio x advantage for negative advantages; above 1, 3 is usual.
        correction: a `Correction` for stale or mismatched samplers.
        dynamic_sampling: learn only from groups with 0 < correct < G (DAPO).
        overlong: an `Overlong`: the soft length penalty.
        reference_every: number of updates after which the reference becomes the current policy.

    Advantages are around 1 and a token's entropy is at most log(vocabulary), so a bonus matters little until it is
    too large: then `entropy` rises towards log(vocabulary) and `tool_errors` to 1, the sooner the higher the
    learning rate. On a small environment, 0.02 at a rate of 1e-3 was best after a dip, 0.003 changed little,
    and 0.03 at 2e-3 destroyed the policy within 40 updates.
    """

    beta: float | Array = 0.0
    kl: str | None = None
    kl_in: str = "loss"
    kl_weighted: bool = False
    entropy_bonus: float | Array = 0.0
    dual_clip: float | Array | None = None
    correction: Correction | None = None
    dynamic_sampling: bool = False
    overlong: Overlong | None = None
    reference_every: int | None = None

    @property
    def kl_kind(self) -> str:
        """The estimator in use."""
        return self.kl or ("k3" if self.kl_in == "loss" else "k1")

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl_in == "loss" and not is_off(self.beta)

    @property
    def kl_in_reward(self) -> bool:
        """Whether the reward has a KL term."""
        return self.kl_in == "reward" and not is_off(self.beta)


def is_off(number) -> bool:
    """Whether a setting is the plain Python number 0: absent, and known to be so while tracing."""
    return isinstance(number, int | float) and number == 0


class _CommonKeywords(TypedDict, total=False):
    kl: str | None
    kl_weighted: bool
    entropy_bonus: float | Array
    correction: Correction | None
    overlong: Overlong | None
    reference_every: int | None


class OptionKeywordsButBeta(_CommonKeywords, total=False):
    """The fields of `Options` as keywords of a constructor whose `beta` has another default."""

    kl_in: str
    dual_clip: float | Array | None
    dynamic_sampling: bool


class OptionKeywords(OptionKeywordsButBeta, total=False):
    """The fields of `Options` as keywords of a constructor."""

    beta: float | Array


class ReleasedKeywords(_CommonKeywords, total=False):
    """Of `flow_grpo_released`, which has its own `beta` and `dual_clip`."""

    kl_in: str
    dynamic_sampling: bool


class DapoKeywords(_CommonKeywords, total=False):
    """Of `dapo`, which has its own `dynamic_sampling`."""

    beta: float | Array
    kl_in: str
    dual_clip: float | Array | None


class PPOKeywords(_CommonKeywords, total=False):
    """Of `ppo`, which has its own `beta` and `kl_in`."""

    dual_clip: float | Array | None
    dynamic_sampling: bool


def read_options(name: str, settings: Mapping[str, Any], *, rejects: tuple[str, ...] = ()) -> Options:
    """`settings` as `Options`; raise `BadInput` for unknown ones, and for those of `rejects` that are not default."""
    check_names(name, settings, [item.name for item in fields(Options)])
    options = Options(**settings)
    refused = []
    for item in rejects:
        value = settings.get(item, getattr(Options, item))
        if isinstance(value, jax.Array) or value != getattr(Options, item):
            refused.append(item)
    if refused:
        raise BadInput(f"{name} can't honour {', '.join(refused)}: its formula has no place for it")
    return options


def check_options(name: str, options: Options) -> None:
    """Raise `BadInput` for values that are out of range or contradict each other."""
    check_range(name, "beta", options.beta, 0.0)
    check_range(name, "entropy_bonus", options.entropy_bonus, 0.0)
    check_range(name, "reference_every", options.reference_every, 1, whole=True, optional=True)
    if options.kl is not None:
        check_choice(name, "kl", options.kl, KL_KINDS)
    check_choice(name, "kl_in", options.kl_in, ("loss", "reward"))
    if options.kl_in == "loss" and options.kl == "k1":
        raise BadInput(
            f"{name}: kl='k1' in the loss has zero expected on-policy gradient; use k2, k3 or kl_in='reward'"
        )
    if options.kl_weighted and not options.kl_in_loss:
        raise BadInput(
            f"{name}: kl_weighted weighs a KL term in the loss, but there is none; set beta and kl_in='loss'"
        )
    check_range(name, "dual_clip", options.dual_clip, 1.0, exclusive=True, optional=True)
    for field, kind in (("correction", Correction), ("overlong", Overlong)):
        value = getattr(options, field)
        if not isinstance(value, kind | None):
            raise BadInput(f"{name}: {field} is {value!r}, but must be a fg.algorithms.{kind.__name__}")


def check_choice(name: str, field: str, value, choices: tuple[str, ...]) -> None:
    """Raise `BadInput` unless `value` is one of `choices`."""
    if value not in choices:
        raise BadInput(f"{name}: {field} is {value!r}, but must be one of {', '.join(choices)}")


def check_clip(name: str, clip_low, clip_high) -> None:
    """Raise `BadInput` for plain numbers that are no clip widths."""
    check_range(name, "clip_low", clip_low, 0.0)
    check_range(name, "clip_high", clip_high, 0.0)
    if isinstance(clip_low, int | float) and clip_low > 1.0:
        raise BadInput(f"{name}: clip_low is {clip_low}, but a ratio is never below 0; use at most 1")


# Options that act before the loss ------------------------------------------------------------------


def kl_estimate(logp: AnyArray, logp_ref: AnyArray, kind: str = "k3") -> Array:
    """Per-token estimate of KL(policy || reference) from tokens of the policy, d = logp_ref - logp.

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 (Schulman, 2020).
    """
    check_choice("kl_estimate", "kind", kind, KL_KINDS)
    difference = jnp.asarray(logp_ref).astype(jnp.float32) - jnp.asarray(logp).astype(jnp.float32)
    if kind == "k1":
        return -difference
    if kind == "k2":
        return 0.5 * difference**2
    return jnp.expm1(difference) - difference


def overlong_penalty(length_n: AnyArray, overlong: Overlong) -> Array:
    """Soft penalty for `length_n` chosen tokens: 0, then linear, then -1 (Yu et al., 2025) -> penalty_n."""
    over_n = jnp.asarray(length_n).astype(jnp.float32) - (overlong.max_tokens - overlong.buffer)
    return -jnp.clip(over_n / overlong.buffer, 0.0, 1.0)


def reward_kl(trajectories: Trajectories, options: Options) -> Array:
    """`beta * KL` of each chosen token; 0 unless KL is in the reward -> kl_ntl."""
    chosen_ntl = trajectories.action_mask & trajectories.valid[:, None, None]
    if not options.kl_in_reward:
        return jnp.zeros(chosen_ntl.shape, jnp.float32)
    if trajectories.logp_ref is None:
        raise BadInput("KL in the reward needs Trajectories.logp_ref: score the trajectories under the reference first")
    logp_ntl = trajectories.logp_sampled if trajectories.logp_old is None else trajectories.logp_old
    kl_ntl = kl_estimate(
        masked.fill(logp_ntl, chosen_ntl), masked.fill(trajectories.logp_ref, chosen_ntl), options.kl_kind
    )
    return jax.lax.stop_gradient(options.beta * kl_ntl)
