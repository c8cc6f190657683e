"""DPO on trajectories (Rafailov et al., 2023): `dpo` learns from the best and the worst of each group.

    loss = mean over pairs of  - log sigma( beta * (D_best - D_worst) )
    D    = sum over chosen tokens of  log pi - log pi_ref

In a batch the advantage of a token is the side of its trajectory, +1 or -1, and pairs are found by
`group`; a batch of preferences from a file needs no more than that.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from flowgrpo import masked
from flowgrpo.algorithms import loss as losses
from flowgrpo.algorithms.advantage import dense_ids
from flowgrpo.algorithms.compose import bind, needs_of
from flowgrpo.algorithms.options import OptionKeywordsButBeta, Options, check_options, is_off, read_options
from flowgrpo.contracts import Algorithm, Metrics, Scores
from flowgrpo.types import AnyArray, Batch, Trajectories, check_range


class Pairs(NamedTuple):
    """Indices of the best and the worst trajectory, one slot for each possible group; `valid` says which are used."""

    best: Array
    worst: Array
    valid: Array


def dpo_pairs(trajectories: Trajectories) -> Pairs:
    """For each group whose valid outcomes differ, its best and its worst trajectory (the first, if tied)."""
    return _pairs(masked.fill(trajectories.outcome, trajectories.valid), trajectories.group, trajectories.valid)


def _pairs(outcome_n: AnyArray, group_n: AnyArray, valid_n: AnyArray) -> Pairs:
    id_n, size = dense_ids(group_n), len(outcome_n)
    best_g = _first_where_largest(outcome_n, id_n, valid_n)
    worst_g = _first_where_largest(-outcome_n, id_n, valid_n)
    exists_g = best_g < size  # then so does the worst
    best_g, worst_g = jnp.where(exists_g, best_g, 0), jnp.where(exists_g, worst_g, 0)
    return Pairs(best_g, worst_g, exists_g & (outcome_n[best_g] > outcome_n[worst_g]))


def _first_where_largest(x_n: AnyArray, id_n: AnyArray, valid_n: AnyArray) -> Array:
    """The first index at which `x` is largest, by id; n if an id has no valid member -> index_g."""
    size = len(x_n)
    largest_g = jax.ops.segment_max(masked.fill(x_n, valid_n, -jnp.inf), id_n, num_segments=size)
    is_largest_n = valid_n & (x_n == largest_g[id_n])
    index_n = jnp.where(is_largest_n, jnp.arange(size), size)
    return jnp.minimum(jax.ops.segment_min(index_n, id_n, num_segments=size), size)


def dpo(*, beta=0.1, **options: Unpack[OptionKeywordsButBeta]) -> Algorithm:
    """DPO on pairs of each group's best and worst trajectory; chosen tokens only. `beta` is its KL strength."""
    rejects = ("beta", "kl", "kl_in", "kl_weighted", "dual_clip", "correction")
    settings = read_options("dpo", options, rejects=rejects)
    check_range("dpo", "beta", beta, 0.0, exclusive=True)
    check_options("dpo", settings)
    sides = bind(_sides, settings)
    return Algorithm(
        name="dpo",
        advantages=sides,
        weights=partial(_weights, sides=sides),
        loss=partial(preference_loss, beta=beta, options=settings),
        sequence_sums=margins,
        laws=frozenset({"F4"}),
        needs=needs_of(settings) | {"logp_ref"},
        minibatch_unit="group",
        skips_zero_advantage=is_off(settings.entropy_bonus),
        reference_every=settings.reference_every,
    )


def _sides(trajectories: Trajectories, outcome_n: AnyArray, valid_n: AnyArray, options: Options) -> Array:
    """+1 for the best of its group, -1 for the worst, 0 outside of pairs -> side_nt."""
    pairs = _pairs(outcome_n, trajectories.group, valid_n)
    used_g = pairs.valid.astype(jnp.float32)
    side_n = jnp.zeros(len(outcome_n), jnp.float32).at[pairs.best].add(used_g).at[pairs.worst].add(-used_g)
    return masked.fill(side_n[:, None], trajectories.acted)


def _weights(trajectories: Trajectories, *, sides: Callable[[Trajectories], Array]) -> Array:
    """1 over the number of pairs, at the chosen tokens of both sides -> w_ntl."""
    side_nt = sides(trajectories)
    num_pairs = masked.count((side_nt > 0).any(axis=1))
    paired_ntl = (side_nt != 0)[:, :, None] & trajectories.action_mask
    return masked.fill(1.0 / jnp.maximum(num_pairs, 1.0), paired_ntl)


def margins(batch: Batch, logp_rs: AnyArray) -> Batch:
    """The batch with D_best - D_worst of each token's pair, and the pair's number of tokens."""
    live_rs = batch.loss_mask
    logp_ref_rs = losses.required(batch.logp_ref, "dpo", "Batch.logp_ref", "its margin")
    margin_rs = masked.fill(batch.advantage, live_rs) * (
        masked.fill(logp_rs, live_rs) - masked.fill(logp_ref_rs, live_rs)
    )
    total_rs, count_rs = losses.sequence_totals(stop_gradient(margin_rs), batch.replace(chosen=live_rs), "group")
    return batch.replace(sequence_sum=total_rs, sequence_count=count_rs)


def preference_loss(scores: Scores, batch: Batch, *, beta, options: Options) -> tuple[Array, Metrics]:
    """The pair's loss, distributed over its tokens; each token's gradient is that of its log-probability."""
    batch = margins(batch, scores.logp) if batch.sequence_sum is None else batch
    tokens = losses.read_tokens(scores, batch)
    margin_rs = stop_gradient(beta * tokens.sequence_sum)
    slope_rs = -beta * jax.nn.sigmoid(-margin_rs) * tokens.advantage
    per_token_rs = 1.0 / jnp.maximum(tokens.sequence_count, 1.0)
    loss_rs = -jax.nn.log_sigmoid(margin_rs) * per_token_rs + slope_rs * (tokens.logp - stop_gradient(tokens.logp))
    extra_rs, metrics = losses.regularisers("dpo", scores, batch, tokens, options)
    weight_rs = masked.fill(batch.weight, tokens.loss_mask)
    metrics |= {
        "margin": margin_rs * per_token_rs,
        "accuracy": jnp.where(margin_rs > 0, per_token_rs, 0.0),
        "weight": per_token_rs,
    }
    return masked.sum(weight_rs * (loss_rs + extra_rs), tokens.loss_mask), losses.weighted_sums(
        metrics, weight_rs, tokens.loss_mask
    )
