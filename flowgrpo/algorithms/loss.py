"""Losses: `token_loss` is a weighted sum over the tokens of a batch, with a surrogate of choice.

    loss = sum over tokens of  weight * ( - surrogate(rho, A) * correction + beta KL - bonus * entropy )

with rho = pi_theta / pi_old per token. Where a formula needs a sum over a sequence (one turn's action,
a trajectory, a preference pair), a first pass computes it over the whole mini-batch, gradient stopped, and
stores it with each token; then the loss is again a sum over tokens, so micro-batches add up (F3). All of
it is float32, and a token outside the loss contributes exactly nothing, whatever its slots contain (F6).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from flowgrpo import masked
from flowgrpo.algorithms.advantage import dense_ids
from flowgrpo.algorithms.options import Correction, Options, check_clip, is_off, kl_estimate
from flowgrpo.contracts import Metrics, Scores
from flowgrpo.types import AnyArray, BadInput, Batch


class Tokens(NamedTuple):
    """Inputs of a surrogate: the tokens with loss, as float32, with 0 in every other slot. All [r, s]."""

    loss_mask: Array
    logp: Array
    logp_old: Array
    advantage: Array
    sequence_sum: Array
    sequence_count: Array


Surrogate = Callable[[Tokens], tuple[Array, Array]]  # -> (value to maximise, log of the ratio that it used)


# Surrogates -------------------------------------------------------------------------------------------


def clip_surrogate(tokens: Tokens, *, clip_low, clip_high, dual_clip=None) -> tuple[Array, Array]:
    """`min(rho A, clip(rho, 1 - low, 1 + high) A)`, token by token (Schulman et al., 2017)."""
    log_ratio_rs = tokens.logp - tokens.logp_old
    return _clip(log_ratio_rs, tokens.advantage, clip_low, clip_high, dual_clip), log_ratio_rs


class ClipSurrogate(NamedTuple):
    """`clip_surrogate` with its widths bound: what `clip` returns."""

    low: float | Array
    high: float | Array
    dual: float | Array | None = None

    def __call__(self, tokens: Tokens) -> tuple[Array, Array]:
        """Value to maximise, and log of the ratio, of each token."""
        return clip_surrogate(tokens, clip_low=self.low, clip_high=self.high, dual_clip=self.dual)


def clip(low: float | Array = 0.2, high: float | Array | None = None) -> ClipSurrogate:
    """The clipped surrogate with the ratio bounded by `1 - low` and `1 + high`; `high` is `low` if it is None."""
    high = low if high is None else high
    check_clip("clip", low, high)
    return ClipSurrogate(low, high)


def sequence_clip_surrogate(tokens: Tokens, *, clip_low, clip_high, dual_clip=None) -> tuple[Array, Array]:
    """`min(rho A, clip(rho, 1 - low, 1 + high) A)` with one rho for all tokens of a sequence.

    As `clip_surrogate`, with rho = exp(mean of log rho over the sequence) (GSPO, Zheng et al., 2025).
    The value is the sequence's; the gradient of each token is that of its own log-probability.
    """
    mean_rs = stop_gradient(tokens.sequence_sum / jnp.maximum(tokens.sequence_count, 1.0))
    log_ratio_rs = mean_rs + tokens.logp - stop_gradient(tokens.logp)
    return _clip(log_ratio_rs, tokens.advantage, clip_low, clip_high, dual_clip), log_ratio_rs


def ratio_surrogate(tokens: Tokens, *, dual_clip=None) -> tuple[Array, Array]:
    """`rho A`, not clipped."""
    log_ratio_rs = tokens.logp - tokens.logp_old
    plain_rs = jnp.exp(log_ratio_rs) * tokens.advantage
    return _floor(plain_rs, tokens.advantage, dual_clip), log_ratio_rs


def weighted_logp_surrogate(tokens: Tokens, *, clip_low, clip_high) -> tuple[Array, Array]:
    """`stop_gradient(clip(rho, 1 - low, 1 + high)) A log pi`: every token keeps its gradient (CISPO)."""
    log_ratio_rs = tokens.logp - tokens.logp_old
    ratio_rs = stop_gradient(jnp.clip(jnp.exp(log_ratio_rs), 1.0 - clip_low, 1.0 + clip_high))
    return ratio_rs * tokens.advantage * tokens.logp, log_ratio_rs


def mirror_surrogate(tokens: Tokens, *, tau) -> tuple[Array, Array]:
    """`A log pi - tau/2 (sum log rho)^2`, the square distributed over the trajectory's tokens (Kimi k1.5).

    With S = sum log rho held fixed, S log rho_j sums to S^2; a second term that is 0 in value makes
    the gradient S grad log pi_j times two, as the square has it.
    """
    log_ratio_rs = tokens.logp - tokens.logp_old
    total_rs = stop_gradient(tokens.sequence_sum)
    square_rs = total_rs * (log_ratio_rs + tokens.logp - stop_gradient(tokens.logp))
    return tokens.advantage * tokens.logp - 0.5 * tau * square_rs, log_ratio_rs


def _clip(log_ratio_rs, advantage_rs, clip_low, clip_high, dual_clip) -> Array:
    ratio_rs = jnp.exp(log_ratio_rs)
    clipped_rs = jnp.clip(ratio_rs, 1.0 - clip_low, 1.0 + clip_high)
    pessimistic_rs = jnp.minimum(ratio_rs * advantage_rs, clipped_rs * advantage_rs)
    return _floor(pessimistic_rs, advantage_rs, dual_clip)


def _floor(surrogate_rs, advantage_rs, dual_clip) -> Array:
    """Dual clip (Ye et al., 2020): at least `dual_clip * A` where A is negative."""
    if dual_clip is None:
        return surrogate_rs
    return jnp.where(advantage_rs < 0, jnp.maximum(surrogate_rs, dual_clip * advantage_rs), surrogate_rs)


# The first pass: sums over sequences ------------------------------------------------------------------


def sequence_totals(x_rs: AnyArray, batch: Batch, *by: str) -> tuple[Array, Array]:
    """Sum of `x` over the chosen tokens with equal batch fields `by`, and their number; both [r, s]."""
    own_rs = jnp.asarray(batch.chosen) & (jnp.asarray(batch.segments) > 0)
    shape, size = own_rs.shape, own_rs.size
    id_m = dense_ids(*(jnp.asarray(getattr(batch, key)).reshape(-1) for key in by))
    columns = jnp.stack([masked.fill(x_rs, own_rs).reshape(-1), own_rs.reshape(-1).astype(jnp.float32)], axis=1)
    totals = jax.ops.segment_sum(columns, id_m, num_segments=size)[id_m]
    return totals[:, 0].reshape(shape), totals[:, 1].reshape(shape)


def token_sums(batch: Batch, logp_rs: AnyArray, *, sequence: tuple[str, ...], correction: Correction | None) -> Batch:
    """The batch after the first pass, with sums of log rho over each `sequence`, and a sequence-level correction."""
    if sequence:
        own_rs = jnp.asarray(batch.chosen)
        log_ratio_rs = masked.fill(logp_rs, own_rs) - masked.fill(batch.logp_old, own_rs)
        total_rs, count_rs = sequence_totals(stop_gradient(log_ratio_rs), batch, *sequence)
        batch = batch.replace(sequence_sum=total_rs, sequence_count=count_rs)
    if correction is not None and correction.level == "sequence":
        total_rs, _ = sequence_totals(_log_mismatch(batch), batch, "trajectory", "turn")
        batch = batch.replace(correction=_bounded(total_rs, correction))
    return batch


def _log_mismatch(batch: Batch) -> Array:
    """log pi_old - log mu of the chosen tokens."""
    own_rs = jnp.asarray(batch.chosen)
    return stop_gradient(masked.fill(batch.logp_old, own_rs) - masked.fill(batch.logp_sampled, own_rs))


def _bounded(log_mismatch_rs: AnyArray, correction: Correction) -> Array:
    """The ratio pi_old / mu clipped to its bounds; with `mask`, 0 outside of them."""
    ratio_rs = jnp.exp(log_mismatch_rs)
    within_rs = jnp.clip(ratio_rs, correction.low, correction.cap)
    return jnp.where(ratio_rs == within_rs, ratio_rs, 0.0) if correction.mask else within_rs


# The loss ---------------------------------------------------------------------------------------------


def token_loss(
    scores: Scores,
    batch: Batch,
    *,
    name: str,
    surrogate: Surrogate,
    options: Options,
    sequence: tuple[str, ...] = (),
    clip: tuple | None = None,
) -> tuple[Array, Metrics]:
    """The loss of a policy-gradient member over a batch, and its metrics, both sums weighted by `weight`."""
    batch = with_first_pass(batch, scores.logp, sequence=sequence, correction=options.correction)
    live_rs, weight_rs = batch.loss_mask, masked.fill(batch.weight, batch.loss_mask)
    tokens = read_tokens(scores, batch)
    gain_rs, log_ratio_rs = surrogate(tokens)
    correction_rs = _correction(batch, options.correction, live_rs)
    loss_rs = -correction_rs * gain_rs
    extra_rs, metrics = regularisers(name, scores, batch, tokens, options)
    ratio_rs = jnp.exp(stop_gradient(log_ratio_rs))
    metrics |= {"surrogate": gain_rs, "ratio": ratio_rs, "advantage": tokens.advantage}
    if clip is not None:
        metrics["clip_low_fraction"] = (ratio_rs < 1.0 - clip[0]) & (tokens.advantage < 0)
        metrics["clip_high_fraction"] = (ratio_rs > 1.0 + clip[1]) & (tokens.advantage > 0)
    if options.correction is not None:
        metrics["correction"] = correction_rs
    loss = masked.sum(weight_rs * (loss_rs + extra_rs), live_rs)
    return loss, weighted_sums(metrics | {"weight": jnp.ones_like(weight_rs)}, weight_rs, live_rs)


def with_first_pass(
    batch: Batch, logp_rs: AnyArray, *, sequence: tuple[str, ...], correction: Correction | None
) -> Batch:
    """The batch with its sequence sums; computed over the batch itself unless it carries them already."""
    lacks_sums = sequence and batch.sequence_sum is None
    lacks_correction = correction is not None and correction.level == "sequence" and batch.correction is None
    if not (lacks_sums or lacks_correction):
        return batch
    return token_sums(
        batch,
        logp_rs,
        sequence=sequence if lacks_sums else (),
        correction=correction if lacks_correction else None,
    )


def read_tokens(scores: Scores, batch: Batch) -> Tokens:
    """The inputs of a surrogate, with 0 in every slot that carries no loss."""
    live_rs = batch.loss_mask
    zeros_rs = jnp.zeros(live_rs.shape, jnp.float32)
    return Tokens(
        loss_mask=live_rs,
        logp=masked.fill(scores.logp, live_rs),
        logp_old=masked.fill(batch.logp_old, live_rs),
        advantage=masked.fill(batch.advantage, live_rs),
        sequence_sum=zeros_rs if batch.sequence_sum is None else masked.fill(batch.sequence_sum, live_rs),
        sequence_count=zeros_rs if batch.sequence_count is None else masked.fill(batch.sequence_count, live_rs),
    )


def regularisers(name: str, scores: Scores, batch: Batch, tokens: Tokens, options: Options) -> tuple[Array, Metrics]:
    """`beta KL - bonus * entropy` per token, and both as metrics; `kl_weighted` weighs by the token's own ratio."""
    loss_rs, metrics = jnp.zeros_like(tokens.logp), {}
    if options.kl_in_loss:
        logp_ref_rs = masked.fill(required(batch.logp_ref, name, "Batch.logp_ref", "beta > 0"), tokens.loss_mask)
        kl_rs = kl_estimate(tokens.logp, logp_ref_rs, options.kl_kind)
        metrics["kl"] = kl_rs
        loss_rs += options.beta * (kl_rs * jnp.exp(tokens.logp - tokens.logp_old) if options.kl_weighted else kl_rs)
    if scores.entropy is not None:
        metrics["entropy"] = masked.fill(scores.entropy, tokens.loss_mask)
    if not is_off(options.entropy_bonus):
        entropy_rs = required(scores.entropy, name, "Scores.entropy", "an entropy bonus")
        loss_rs -= options.entropy_bonus * masked.fill(entropy_rs, tokens.loss_mask)
    return loss_rs, metrics


def required(value, name: str, field: str, reason: str):
    """`value`; raise `BadInput` if the settings need a field that is missing."""
    if value is None:
        raise BadInput(f"{name}: {field} is missing, and {reason} needs it")
    return value


def weighted_sums(metrics: Metrics, weight_rs: AnyArray, live_rs: AnyArray) -> Metrics:
    """The weighted sum of each metric over tokens with loss, without gradient."""
    sums = {key: masked.sum(weight_rs * x_rs.astype(jnp.float32), live_rs) for key, x_rs in metrics.items()}
    return jax.tree.map(stop_gradient, sums)


def _correction(batch: Batch, correction: Correction | None, live_rs: AnyArray) -> Array:
    """The importance correction of each token with loss, 1 without one."""
    if correction is None:
        return jnp.ones(live_rs.shape, jnp.float32)
    if correction.level == "sequence":
        correction_rs = required(batch.correction, "sequence-level correction", "Batch.correction", "the loss")
        return stop_gradient(masked.fill(correction_rs, live_rs, 1.0))
    return masked.fill(_bounded(_log_mismatch(batch), correction), live_rs, 1.0)
