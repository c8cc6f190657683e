"""Figures about an update beside its algorithm's metrics, computed from scores and a batch.

    kl_old              mean of  rho - 1 - log rho,  rho = pi_theta / pi_old: how far the steps went
    kl                  to the reference (k3), where the algorithm has no term of its own but the batch has logp_ref
    ratio_p01, _p50, _p99       quantiles of rho over live tokens
    ratio_histogram             how many live tokens have which rho, in the bins of `report.metrics`
    advantage_std, _min, _max, _histogram   over live tokens
    sampler_kl          mean of  rho - 1 - log rho,  rho = pi_theta / pi_sampled, before the first step, over tokens
                        that these very weights have sampled: 0 up to rounding, unless sampler and learner disagree
    zero_signal_groups  share of groups in which no token has an advantage
    task_information    what first actions say of their task; in the metrics of whoever adds it
    *_by_turn           kl, kl_old, entropy and the clip fractions, turn by turn, and live_tokens

All but the advantages' figures are made of sums over tokens, so they add up over micro-batches, devices and steps
(F3). Quantiles are read from a histogram whose bins are a twentieth of log rho wide, and 5e-6 around 0; sixteen of them
make one of those that are shown. What holds for the whole holds turn by turn: an algorithm's metrics are linear in the
weights, so those of a turn are its metrics with the weight of every other turn at 0.
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
FINER = 16  # bins that make one of those that are shown
HALF, STEP = RATIO_SIDE * FINER, RATIO_STEP / FINER  # bins on either side of 0, their width in asinh(log rho / NEAR)
FAR = 20.0  # a log-ratio beyond is taken for this one: exp of it is finite


class DiagnosticsSettings(NamedTuple):
    """Settings of `observe`: how many turns are told apart; static."""

    turns: int = 8  # the last stands for all later ones, too
    # Warn from within the program where the sampler disagrees: a host callback, so that JAX's cache doesn't keep it.
    warns: bool = True


WATCH = DiagnosticsSettings()


# Of a micro-batch: sums ---------------------------------------------------------------------------------


def observe(
    watch: DiagnosticsSettings, algorithm: Algorithm, scores: Scores, batch: Batch, metrics: Metrics
) -> dict[str, Metrics]:
    """The algorithm's metrics and what is seen beside them, as sums that `metrics_of_sums` reads."""
    scores = jax.tree.map(stop_gradient, scores)
    if algorithm.sums is not None and batch.sequence_sum is None:
        # Over whole sequences, before a turn is looked at alone.
        batch = algorithm.sums(batch, jnp.asarray(scores.logp))
    turn_rs = jnp.minimum(jnp.asarray(batch.turn), watch.turns - 1)

    def of_turn(turn: Array) -> Metrics:
        own = batch.replace(weight=masked.fill(batch.weight, batch.live & (turn_rs == turn)))
        metrics = _own(scores, own) | algorithm.loss(scores, own)[1]
        return {name: metrics[name] for name in (*BY_TURN, "weight") if name in metrics}

    return {
        "means": _own(scores, batch) | metrics,
        "by_turn": jax.vmap(of_turn)(jnp.arange(watch.turns)),
        "counts": {
            "log_ratios": _histogram(_log_ratio(scores, batch), batch.live),
            "turns": _count(turn_rs, batch.live, watch.turns),
        },
    }


def sampler_sums(scores: Scores, batch: Batch, version: Array) -> Metrics:
    """Sum up `sampler_kl`; tokens of other versions say nothing, since their weights were others."""
    fresh_rs = batch.live & (jnp.asarray(batch.version) == version)
    kl_rs = _k3(_difference(stop_gradient(scores.logp), batch.logp_sampled, fresh_rs))
    return {"kl": masked.sum(kl_rs, fresh_rs), "tokens": masked.count(fresh_rs)}


def _own(scores: Scores, batch: Batch) -> Metrics:
    """Sum up `kl_old`, and `kl` where there is a reference, which need no knowledge of the algorithm."""
    live_rs, weight_rs = batch.live, masked.fill(batch.weight, batch.live)
    seen = {"kl_old": _k3(_log_ratio(scores, batch))}
    if batch.logp_ref is not None:
        seen["kl"] = _k3(_difference(batch.logp_ref, scores.logp, live_rs))
    return weighted_sums(seen, weight_rs, live_rs)


def _log_ratio(scores: Scores, batch: Batch) -> Array:
    return _difference(scores.logp, batch.logp_old, batch.live)


def _difference(logp_rs: AnyArray, other_rs: AnyArray, live_rs: Array) -> Array:
    return jnp.clip(masked.fill(logp_rs, live_rs) - masked.fill(other_rs, live_rs), -FAR, FAR)


def _k3(d_rs: Array) -> Array:
    return jnp.expm1(d_rs) - d_rs


def _histogram(x_rs: Array, live_rs: Array) -> Array:
    place_rs = jnp.floor(jnp.arcsinh(x_rs / NEAR) / STEP).astype(jnp.int32) + HALF
    return _count(jnp.clip(place_rs, 0, 2 * HALF - 1), live_rs, 2 * HALF)


def _count(index_rs: Array, live_rs: Array, size: int) -> Array:
    """Say how many live tokens have each index."""
    return jnp.zeros(size, jnp.float32).at[index_rs.ravel()].add(live_rs.ravel().astype(jnp.float32))


# Of an update: figures ----------------------------------------------------------------------------------


def metrics_of_sums(sums: dict[str, Metrics]) -> Metrics:
    """Means, means by turn and quantiles from the sums of an update."""
    figures = _means(sums["means"])
    if "by_turn" in sums:
        figures |= {f"{name}_by_turn": x_t for name, x_t in _means(sums["by_turn"]).items()}
        figures["live_tokens_by_turn"] = sums["counts"]["turns"]
        shares = jnp.array(list(QUANTILES.values()), jnp.float32)
        ratios = jax.vmap(_quantile, (None, 0))(sums["counts"]["log_ratios"], shares)
        figures |= {f"ratio_{name}": ratio for name, ratio in zip(QUANTILES, ratios, strict=True)}
        figures[RATIO] = sums["counts"]["log_ratios"].reshape(-1, FINER).sum(axis=1).astype(jnp.int32)
    return figures


def _means(sums: Metrics) -> Metrics:
    """Each sum over the sum of the weights; 0 where there are none."""
    weight = sums["weight"]
    some = weight > 0
    divided = {name: x / jnp.where(some, weight, 1.0) for name, x in sums.items() if name != "weight"}
    return {name: jnp.where(some, x, 0.0) for name, x in divided.items()}


def _quantile(count_b: Array, share: Array) -> Array:
    """The ratio below which this share of the tokens lies, read from the histogram; 0 where there are none."""
    below_b = jnp.cumsum(count_b)
    wanted = share * below_b[-1]
    bin_ = jnp.argmax((below_b >= wanted) & (count_b > 0))
    inside = 1.0 - (below_b[bin_] - wanted) / jnp.maximum(count_b[bin_], 1.0)
    log_ratio = jnp.sinh(((bin_ - HALF).astype(jnp.float32) + jnp.clip(inside, 0.0, 1.0)) * STEP) * NEAR
    return jnp.where(below_b[-1] > 0, jnp.exp(log_ratio), 0.0)


# Of advantages ------------------------------------------------------------------------------------------


def batch_signal(batch: Batch) -> Metrics:
    """Say how advantages are spread over a batch; what packing left out is not in it, so see `signal` for that."""
    return _signal(jnp.asarray(batch.advantage), batch.live, batch.live, jnp.asarray(batch.group))


def signal(trajectories: Trajectories, adv: AnyArray, weights: AnyArray) -> Metrics:
    """Measure how advantages are spread over all valid trajectories, as `batch_signal` does over a batch.

    A group that was filtered, or drawn and not taken, counts as one without signal, too.
    """
    adv_ntl = jnp.asarray(adv).reshape(*jnp.shape(adv), *(1,) * (3 - jnp.ndim(adv)))
    own_ntl = trajectories.actions & trajectories.valid[:, None, None]
    group_ntl = jnp.broadcast_to(dense_ids(trajectories.group)[:, None, None], own_ntl.shape)
    return _signal(jnp.broadcast_to(adv_ntl, own_ntl.shape), own_ntl & (jnp.asarray(weights) != 0), own_ntl, group_ntl)


def _signal(adv: Array, live: Array, own: Array, group: Array) -> Metrics:
    """All of one shape; groups are those with an `own` token, and an advantage that is no number is no advantage."""
    live &= jnp.isfinite(masked.fill(adv, live))
    speaking = live & (masked.fill(adv, live) != 0)
    groups = _distinct(group, own)
    some = live.any()
    return {
        "advantage_std": jnp.sqrt(masked.variance(adv, live)),
        "advantage_min": jnp.where(some, masked.fill(adv, live, jnp.inf).min(), 0.0),
        "advantage_max": jnp.where(some, masked.fill(adv, live, -jnp.inf).max(), 0.0),
        ADVANTAGE: _advantage_histogram(masked.fill(adv, live), live),
        "zero_signal_groups": (groups - _distinct(group, speaking)) / jnp.maximum(groups, 1.0),
    }


def task_information(played: Trajectories) -> jax.Array:
    """Estimate the mutual information between task and first action in nats, from counts (RAGEN-2, 2026).

    0 where first actions don't depend on the task; as groups are small, it is estimated too high.
    """
    first_nl = jnp.where(played.actions[:, 0], played.tokens[:, 0], 0)
    action_n, group_n, valid_n = dense_ids(*first_nl.T), dense_ids(played.group), played.valid
    one_n = jnp.ones(len(action_n))
    both_n, own_n, of_group_n = (
        group_sum(one_n, id_n, valid_n) for id_n in (dense_ids(action_n, group_n), action_n, group_n)
    )
    ratio_n = masked.fill(both_n * valid_n.sum(dtype=jnp.float32) / (own_n * of_group_n), valid_n, 1.0)
    return masked.mean(jnp.log(ratio_n), valid_n)


def _advantage_histogram(adv: Array, live: Array) -> Array:
    size = 2 * ADVANTAGE_SIDE + 1
    place = jnp.clip(jnp.round(adv / ADVANTAGE_STEP), -ADVANTAGE_SIDE, ADVANTAGE_SIDE).astype(jnp.int32)
    return _count(place + ADVANTAGE_SIDE, live, size).astype(jnp.int32)


def _distinct(id_: Array, mask: Array) -> Array:
    """Say how many ids there are under the mask."""
    some = jnp.where(mask, id_, jnp.iinfo(id_.dtype).min).max()  # one of them, in the place of what is masked
    sorted_m = jnp.sort(jnp.where(mask, id_, some).ravel())
    return masked.count(sorted_m[1:] != sorted_m[:-1]) + mask.any().astype(jnp.float32)
