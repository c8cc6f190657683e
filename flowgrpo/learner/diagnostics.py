"""Diagnostics: metrics of an update besides those of its algorithm, computed from scores and a batch.

    kl_old              mean of  rho - 1 - log rho,  rho = pi_theta / pi_old: how far the steps went
    kl                  to the reference (k3), if the algorithm has no KL term but the batch has logp_ref
    ratio_p01, _p50, _p99       quantiles of rho over tokens with loss
    ratio_histogram             histogram of rho over tokens with loss, in the bins of `report.metrics`
    advantage_std, _min, _max, _histogram   over tokens with loss
    sampler_kl          mean of  rho - 1 - log rho,  rho = pi_theta / pi_sampled, before the first step, over tokens
                        sampled by the current weights: 0 up to rounding, unless sampler and learner disagree
    zero_signal_groups  fraction of groups in which no token has an advantage
    task_information    mutual information of task and first action; for callers who add it
    *_by_turn           kl, kl_old, entropy and the clip fractions by turn, and live_tokens

All but those of advantages are sums over tokens, so they add up over micro-batches, devices and steps (F3). Quantiles
are read from a histogram whose bins are a twentieth of log rho wide, and 5e-6 around 0; sixteen of them make one bin of
the metric. An algorithm's metrics are linear in the weights, so those of a turn are its metrics with weight 0 for all
other turns.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from flowgrpo import masked
from flowgrpo.algorithms.advantage import dense_ids, group_sum
from flowgrpo.algorithms.loss import weighted_sums
from flowgrpo.contracts import Algorithm, Metrics, Scores
from flowgrpo.report.metrics import ADVANTAGE, ADVANTAGE_SIDE, ADVANTAGE_STEP, NEAR, RATIO, RATIO_SIDE, RATIO_STEP
from flowgrpo.types import AnyArray, Batch, Trajectories

BY_TURN = ("kl", "kl_old", "entropy", "clip_low_fraction", "clip_high_fraction")
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
FINER = 16  # bins per bin of the metric
HALF, STEP = RATIO_SIDE * FINER, RATIO_STEP / FINER  # bins on either side of 0, their width in asinh(log rho / NEAR)
FAR = 20.0  # larger log-ratios are clipped to this one, whose exp is finite


class DiagnosticsSettings(NamedTuple):
    """Settings of `observe`; static."""

    turns: int = 8  # number of turns with separate metrics; the last one includes all later ones
    warns: bool = True  # about a sampler that disagrees, by a host callback; JAX then can't cache the program


DEFAULT_DIAGNOSTICS = DiagnosticsSettings()


# Sums of a micro-batch ---------------------------------------------------------------------------------


def observe(
    settings: DiagnosticsSettings, algorithm: Algorithm, scores: Scores, batch: Batch, metrics: Metrics
) -> dict[str, Metrics]:
    """The algorithm's metrics and the diagnostics, as sums for `metrics_of_sums`."""
    scores = jax.tree.map(stop_gradient, scores)
    if algorithm.sequence_sums is not None and batch.sequence_sum is None:
        # Over whole sequences, before the weights of other turns are set to 0.
        batch = algorithm.sequence_sums(batch, jnp.asarray(scores.logp))
    turn_rs = jnp.minimum(jnp.asarray(batch.turn), settings.turns - 1)

    def of_turn(turn: Array) -> Metrics:
        part = batch.replace(weight=masked.fill(batch.weight, batch.loss_mask & (turn_rs == turn)))
        metrics = _kl_sums(scores, part) | algorithm.loss(scores, part)[1]
        return {name: metrics[name] for name in (*BY_TURN, "weight") if name in metrics}

    return {
        "means": _kl_sums(scores, batch) | metrics,
        "by_turn": jax.vmap(of_turn)(jnp.arange(settings.turns)),
        "counts": {
            "log_ratios": _histogram(_log_ratio(scores, batch), batch.loss_mask),
            "turns": _count(turn_rs, batch.loss_mask, settings.turns),
        },
    }


def sampler_sums(scores: Scores, batch: Batch, version: Array) -> Metrics:
    """Sums for `sampler_kl`, over tokens that the current weights sampled."""
    fresh_rs = batch.loss_mask & (jnp.asarray(batch.version) == version)
    kl_rs = _k3(_difference(stop_gradient(scores.logp), batch.logp_sampled, fresh_rs))
    return {"kl": masked.sum(kl_rs, fresh_rs), "tokens": masked.count(fresh_rs)}


def _kl_sums(scores: Scores, batch: Batch) -> Metrics:
    """Sums for `kl_old`, and for `kl` if there is a reference; independent of the algorithm."""
    live_rs, weight_rs = batch.loss_mask, masked.fill(batch.weight, batch.loss_mask)
    kl = {"kl_old": _k3(_log_ratio(scores, batch))}
    if batch.logp_ref is not None:
        kl["kl"] = _k3(_difference(batch.logp_ref, scores.logp, live_rs))
    return weighted_sums(kl, weight_rs, live_rs)


def _log_ratio(scores: Scores, batch: Batch) -> Array:
    return _difference(scores.logp, batch.logp_old, batch.loss_mask)


def _difference(logp_rs: AnyArray, other_rs: AnyArray, live_rs: Array) -> Array:
    return jnp.clip(masked.fill(logp_rs, live_rs) - masked.fill(other_rs, live_rs), -FAR, FAR)


def _k3(d_rs: Array) -> Array:
    return jnp.expm1(d_rs) - d_rs


def _histogram(x_rs: Array, live_rs: Array) -> Array:
    place_rs = jnp.floor(jnp.arcsinh(x_rs / NEAR) / STEP).astype(jnp.int32) + HALF
    return _count(jnp.clip(place_rs, 0, 2 * HALF - 1), live_rs, 2 * HALF)


def _count(index_rs: Array, live_rs: Array, size: int) -> Array:
    """Number of tokens with loss of each index."""
    return jnp.zeros(size, jnp.float32).at[index_rs.ravel()].add(live_rs.ravel().astype(jnp.float32))


# Metrics of an update ----------------------------------------------------------------------------------


def metrics_of_sums(sums: dict[str, Metrics]) -> Metrics:
    """Means, means by turn and quantiles from the sums of an update."""
    metrics = _means(sums["means"])
    if "by_turn" in sums:
        metrics |= {f"{name}_by_turn": x_t for name, x_t in _means(sums["by_turn"]).items()}
        metrics["live_tokens_by_turn"] = sums["counts"]["turns"]
        quantiles = jnp.array(list(QUANTILES.values()), jnp.float32)
        ratios = jax.vmap(_quantile, (None, 0))(sums["counts"]["log_ratios"], quantiles)
        metrics |= {f"ratio_{name}": ratio for name, ratio in zip(QUANTILES, ratios, strict=True)}
        metrics[RATIO] = sums["counts"]["log_ratios"].reshape(-1, FINER).sum(axis=1).astype(jnp.int32)
    return metrics


def _means(sums: Metrics) -> Metrics:
    """Each sum divided by the sum of the weights; 0 if that is 0."""
    weight = sums["weight"]
    has_weight = weight > 0
    divided = {name: x / jnp.where(has_weight, weight, 1.0) for name, x in sums.items() if name != "weight"}
    return {name: jnp.where(has_weight, x, 0.0) for name, x in divided.items()}


def _quantile(count_b: Array, quantile: Array) -> Array:
    """A quantile of the ratio, read from the histogram; 0 if that is empty."""
    below_b = jnp.cumsum(count_b)
    rank = quantile * below_b[-1]
    bin_ = jnp.argmax((below_b >= rank) & (count_b > 0))
    inside = 1.0 - (below_b[bin_] - rank) / jnp.maximum(count_b[bin_], 1.0)
    log_ratio = jnp.sinh(((bin_ - HALF).astype(jnp.float32) + jnp.clip(inside, 0.0, 1.0)) * STEP) * NEAR
    return jnp.where(below_b[-1] > 0, jnp.exp(log_ratio), 0.0)


# Advantages ------------------------------------------------------------------------------------------


def batch_signal(batch: Batch) -> Metrics:
    """Statistics of the advantages of a batch; `signal` includes what packing left out."""
    return _signal(jnp.asarray(batch.advantage), batch.loss_mask, batch.loss_mask, jnp.asarray(batch.group))


def signal(trajectories: Trajectories, adv: AnyArray, weights: AnyArray) -> Metrics:
    """Statistics of the advantages of all valid trajectories.

    A group that was filtered, or sampled and not used, counts as one without signal.
    """
    adv_ntl = jnp.asarray(adv).reshape(*jnp.shape(adv), *(1,) * (3 - jnp.ndim(adv)))
    chosen_ntl = trajectories.action_mask & trajectories.valid[:, None, None]
    group_ntl = jnp.broadcast_to(dense_ids(trajectories.group)[:, None, None], chosen_ntl.shape)
    return _signal(
        jnp.broadcast_to(adv_ntl, chosen_ntl.shape), chosen_ntl & (jnp.asarray(weights) != 0), chosen_ntl, group_ntl
    )


def _signal(adv: Array, live: Array, chosen: Array, group: Array) -> Metrics:
    """All arrays have one shape. Groups are those with a chosen token; advantages that are not finite are ignored."""
    live &= jnp.isfinite(masked.fill(adv, live))
    signal = live & (masked.fill(adv, live) != 0)
    groups = _num_distinct(group, chosen)
    some = live.any()
    return {
        "advantage_std": jnp.sqrt(masked.variance(adv, live)),
        "advantage_min": jnp.where(some, masked.fill(adv, live, jnp.inf).min(), 0.0),
        "advantage_max": jnp.where(some, masked.fill(adv, live, -jnp.inf).max(), 0.0),
        ADVANTAGE: _advantage_histogram(masked.fill(adv, live), live),
        "zero_signal_groups": (groups - _num_distinct(group, signal)) / jnp.maximum(groups, 1.0),
    }


def task_information(trajectories: Trajectories) -> jax.Array:
    """Mutual information of task and first action in nats, estimated from counts (RAGEN-2, 2026).

    0 if first actions don't depend on the task; in small groups the estimate is too high.
    """
    first_nl = jnp.where(trajectories.action_mask[:, 0], trajectories.tokens[:, 0], 0)
    action_n, group_n, valid_n = dense_ids(*first_nl.T), dense_ids(trajectories.group), trajectories.valid
    one_n = jnp.ones(len(action_n))
    joint_n, of_action_n, of_group_n = (
        group_sum(one_n, id_n, valid_n) for id_n in (dense_ids(action_n, group_n), action_n, group_n)
    )
    ratio_n = masked.fill(joint_n * valid_n.sum(dtype=jnp.float32) / (of_action_n * of_group_n), valid_n, 1.0)
    return masked.mean(jnp.log(ratio_n), valid_n)


def _advantage_histogram(adv: Array, live: Array) -> Array:
    size = 2 * ADVANTAGE_SIDE + 1
    place = jnp.clip(jnp.round(adv / ADVANTAGE_STEP), -ADVANTAGE_SIDE, ADVANTAGE_SIDE).astype(jnp.int32)
    return _count(place + ADVANTAGE_SIDE, live, size).astype(jnp.int32)


def _num_distinct(id_: Array, mask: Array) -> Array:
    """Number of distinct ids under the mask."""
    some = jnp.where(mask, id_, jnp.iinfo(id_.dtype).min).max()  # an unmasked id, in place of masked ones
    sorted_m = jnp.sort(jnp.where(mask, id_, some).ravel())
    return masked.count(sorted_m[1:] != sorted_m[:-1]) + mask.any().astype(jnp.float32)
