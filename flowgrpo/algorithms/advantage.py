"""Advantages: from outcomes and rewards to one number per trajectory, turn or token.

The heart is one line of Flow-GRPO (Li et al., 2025, "In-the-Flow Agentic System Optimization"):

    A_i^t = (R_i - mean_k R_k) / (std_k R_k + eps)        the same for every turn t of trajectory i

with statistics over the *trajectories* of a group, once each (F1), an unbiased deviation, zero for a
group that is constant or has one valid member (F4), and invalid trajectories excluded before anything
is normalised (F5). A NaN outcome that is declared valid makes its whole group NaN: it is not hidden.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo import masked
from flowgrpo.types import AnyArray, Trajectories, check_range, check_shared_axes

Normalize = Callable[[AnyArray, AnyArray, AnyArray], Array]  # (outcome_n, group_n, valid_n) -> adv_n


# Groups -----------------------------------------------------------------------------------------------


def dense_ids(*keys_m: AnyArray) -> Array:
    """Ids in [0, m): equal exactly where all keys are equal. Keys may be any integers."""
    keys = [_int32_key(key_m) for key_m in keys_m]
    order_m = jnp.lexsort(keys)
    changed = [key[order_m][1:] != key[order_m][:-1] for key in keys]
    step_m = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.any(jnp.stack(changed), axis=0).astype(jnp.int32)])
    return jnp.zeros_like(order_m, jnp.int32).at[order_m].set(jnp.cumsum(step_m))


def _int32_key(key_m) -> Array:
    """A key as int32; host integers that need more bits (hashes) are numbered first."""
    if isinstance(key_m, jax.Array):
        return key_m
    host_m = np.asarray(key_m)
    return jnp.asarray(np.unique(host_m, return_inverse=True)[1].astype(np.int32))


def group_sum(x_m: AnyArray, id_m: AnyArray, mask_m: AnyArray) -> Array:
    """Sum over the unmasked entries with the same id, returned for each of them. Ids are in [0, m)."""
    size = len(id_m)
    return jax.ops.segment_sum(masked.fill(x_m, mask_m), id_m, num_segments=size)[id_m]


class GroupStatistics(NamedTuple):
    """Statistics of a group, for each of its members."""

    count: Array  # valid members
    mean: Array
    varies: Array  # two valid members differ, decided by max > min (F4)


def _statistics(x_n: AnyArray, id_n: AnyArray, valid_n: AnyArray) -> GroupStatistics:
    size = len(id_n)
    count_n = group_sum(jnp.ones(size), id_n, valid_n)
    mean_n = group_sum(x_n, id_n, valid_n) / jnp.maximum(count_n, 1.0)
    largest_n = jax.ops.segment_max(masked.fill(x_n, valid_n, -jnp.inf), id_n, num_segments=size)[id_n]
    smallest_n = jax.ops.segment_min(masked.fill(x_n, valid_n, jnp.inf), id_n, num_segments=size)[id_n]
    return GroupStatistics(count_n, mean_n, ~(largest_n <= smallest_n))


def group_zscore(outcome_n: AnyArray, group_n: AnyArray, valid_n: AnyArray, *, eps: float = 1e-6) -> Array:
    """`(R_i - mean) / (std + eps)` over the valid trajectories of a group, std unbiased -> adv_n."""
    check_shared_axes("group_zscore", outcome_n=outcome_n, group_n=group_n, valid_n=valid_n)
    check_range("group_zscore", "eps", eps, 0.0)
    id_n, valid_n = dense_ids(group_n), jnp.asarray(valid_n, bool)
    statistics = _statistics(outcome_n, id_n, valid_n)
    live_n = valid_n & statistics.varies
    deviation_n = masked.fill(outcome_n, live_n) - masked.fill(statistics.mean, live_n)
    squares_n = group_sum(deviation_n**2, id_n, live_n)
    variance_n = squares_n / jnp.maximum(statistics.count - 1.0, 1.0)
    std_n = jnp.sqrt(masked.fill(variance_n, live_n, 1.0))
    return masked.fill(deviation_n / (std_n + eps), live_n)


def group_center(outcome_n: AnyArray, group_n: AnyArray, valid_n: AnyArray) -> Array:
    """`R_i - mean` over the valid trajectories of a group -> adv_n."""
    check_shared_axes("group_center", outcome_n=outcome_n, group_n=group_n, valid_n=valid_n)
    valid_n = jnp.asarray(valid_n, bool)
    statistics = _statistics(outcome_n, dense_ids(group_n), valid_n)
    return masked.fill(masked.fill(outcome_n, valid_n) - statistics.mean, valid_n & statistics.varies)


def leave_one_out(outcome_n: AnyArray, group_n: AnyArray, valid_n: AnyArray) -> Array:
    """`R_i - mean of the others` in the group (Ahmadian et al., 2024) -> adv_n."""
    check_shared_axes("leave_one_out", outcome_n=outcome_n, group_n=group_n, valid_n=valid_n)
    valid_n = jnp.asarray(valid_n, bool)
    statistics = _statistics(outcome_n, dense_ids(group_n), valid_n)
    centred_n = masked.fill(outcome_n, valid_n) - statistics.mean
    scale_n = statistics.count / jnp.maximum(statistics.count - 1.0, 1.0)
    return masked.fill(centred_n * scale_n, valid_n & statistics.varies)


def mixed_groups(correct_n: AnyArray, group_n: AnyArray, valid_n: AnyArray) -> Array:
    """Trajectories of groups with 0 < correct < G among the valid ones (DAPO's dynamic sampling) -> bool_n."""
    check_shared_axes("mixed_groups", correct_n=correct_n, group_n=group_n, valid_n=valid_n)
    valid_n = jnp.asarray(valid_n, bool)
    return valid_n & _statistics(jnp.asarray(correct_n), dense_ids(group_n), valid_n).varies


# Over turns -------------------------------------------------------------------------------------------


def multi_turn_group_advantage(
    outcome_n: AnyArray,
    turns_nt: AnyArray,
    group_n: AnyArray,
    valid_n: AnyArray,
    *,
    normalize: Normalize = group_zscore,
) -> Array:
    """The outcome of a trajectory, normalised over its group, for each of its turns -> adv_nt.

    A trajectory without a turn takes no part. `normalize` sees each trajectory once, however many
    turns it took.
    """
    check_shared_axes(
        "multi_turn_group_advantage", outcome_n=outcome_n, turns_nt=turns_nt, group_n=group_n, valid_n=valid_n
    )
    turns_nt, valid_n = jnp.asarray(turns_nt, bool), jnp.asarray(valid_n, bool)
    member_n = valid_n & turns_nt.any(axis=1)
    adv_n = normalize(outcome_n, group_n, member_n)
    return masked.fill(adv_n[:, None], turns_nt & member_n[:, None])


def row_group_advantage(
    outcome_n: AnyArray,
    turns_nt: AnyArray,
    group_n: AnyArray,
    valid_n: AnyArray,
    *,
    normalize: Normalize = group_zscore,
) -> Array:
    """As AgentFlow's released code: every turn is a row of its own, and statistics run over rows -> adv_nt.

    Long trajectories count as often as they have turns, so the mean is biased towards them (F9).
    """
    check_shared_axes("row_group_advantage", outcome_n=outcome_n, turns_nt=turns_nt, group_n=group_n, valid_n=valid_n)
    turns_nt, valid_n = jnp.asarray(turns_nt, bool), jnp.asarray(valid_n, bool)
    rows = [jnp.broadcast_to(jnp.asarray(x_n)[:, None], turns_nt.shape).reshape(-1) for x_n in (outcome_n, valid_n)]
    group_m = jnp.broadcast_to(dense_ids(group_n)[:, None], turns_nt.shape).reshape(-1)
    adv_m = normalize(rows[0], group_m, rows[1] & turns_nt.reshape(-1))
    return adv_m.reshape(turns_nt.shape)


def turn_rewards(trajectories: Trajectories, outcome_n: AnyArray) -> Array:
    """Reward of each turn, so that the turns of a trajectory sum to its outcome -> reward_nt.

    Rewards that the environment gave by turn are kept; the rest of the outcome (all of it, if there is an
    outcome only) is the last turn's.
    """
    acted_nt = trajectories.acted
    reward_nt = jnp.zeros(acted_nt.shape, jnp.float32)
    if trajectories.by_turn is not None:
        reward_nt = masked.fill(trajectories.reward, acted_nt & jnp.asarray(trajectories.by_turn)[:, None])
    rest_n = jnp.asarray(outcome_n) - reward_nt.sum(axis=1)
    return reward_nt + masked.fill(rest_n[:, None], last_turns(acted_nt))


def last_turns(turns_nt: AnyArray) -> Array:
    """Whether a turn is the last one marked in its trajectory -> last_nt."""
    turns_nt = jnp.asarray(turns_nt)
    return turns_nt & (jnp.cumsum(turns_nt, axis=1) == turns_nt.sum(axis=1, keepdims=True))


def return_to_go(reward_nt: AnyArray, turns_nt: AnyArray, *, gamma: float) -> Array:
    """`G_t = r_t + gamma G_{t+1}` over the turns that exist -> return_nt."""

    def step(later_n, turn):
        reward_n, exists_n = turn
        now_n = jnp.where(exists_n, masked.fill(reward_n, exists_n) + gamma * later_n, later_n)
        return now_n, now_n

    turns_nt = jnp.asarray(turns_nt, bool)
    start_n = jnp.zeros(turns_nt.shape[0], jnp.float32)
    _, return_tn = jax.lax.scan(step, start_n, (jnp.asarray(reward_nt).T, turns_nt.T), reverse=True)
    return masked.fill(return_tn.T, turns_nt)


def anchor_advantage(
    return_nt: AnyArray,
    anchor_nt: AnyArray,
    turns_nt: AnyArray,
    group_n: AnyArray,
    valid_n: AnyArray,
    *,
    normalize: Normalize = group_zscore,
) -> Array:
    """The return-to-go normalised over turns of one group with equal anchors; by z-score in GiGPO -> adv_nt.

    An anchor is the state before the turn; with `turn_index` it is the turn's place.
    """
    member_m = (jnp.asarray(turns_nt, bool) & jnp.asarray(valid_n, bool)[:, None]).reshape(-1)
    shape = jnp.shape(anchor_nt)
    group_m = jnp.broadcast_to(dense_ids(group_n)[:, None], shape).reshape(-1)
    # Host integers stay on the host, so that wide ids are not cut.
    anchor_m = (anchor_nt if isinstance(anchor_nt, jax.Array) else np.asarray(anchor_nt)).reshape(-1)
    state_m = dense_ids(group_m, dense_ids(anchor_m))
    return normalize(jnp.asarray(return_nt).reshape(-1), state_m, member_m).reshape(shape)


def turn_index(turns_nt: AnyArray) -> Array:
    """Index of each existing turn in its trajectory, from 1 -> index_nt."""
    return jnp.cumsum(jnp.asarray(turns_nt, bool), axis=1, dtype=jnp.int32)


# Over time --------------------------------------------------------------------------------------------


def gae(
    reward_t: AnyArray,
    value_t: AnyArray,
    done_t: AnyArray,
    *,
    gamma: float,
    lam: float,
    last_value: AnyArray | float = 0.0,
    mask_t: AnyArray | None = None,
) -> tuple[Array, Array]:
    """Generalised advantage estimation (Schulman et al., 2016) over one stream -> (adv_t, return_t).

        delta_t = r_t + gamma (1 - done_t) V_{t+1} - V_t
        A_t     = delta_t + gamma lam (1 - done_t) A_{t+1},    return_t = A_t + V_t

    `last_value` is V after the last step. Steps outside `mask_t` are skipped, as if they were not there.
    """
    check_shared_axes("gae", reward_t=reward_t, value_t=value_t, done_t=done_t)

    def step(later, now):
        later_adv, later_value = later
        reward, value, done, exists = now
        onward = gamma * (1.0 - done)
        adv = reward + onward * later_value - value + onward * lam * later_adv
        carried = (jnp.where(exists, adv, later_adv), jnp.where(exists, value, later_value))
        return carried, jnp.where(exists, adv, 0.0)

    mask_t = jnp.ones(jnp.shape(reward_t), bool) if mask_t is None else jnp.asarray(mask_t, bool)
    stream = (masked.fill(reward_t, mask_t), masked.fill(value_t, mask_t), masked.fill(done_t, mask_t), mask_t)
    last = (jnp.float32(0.0), jnp.asarray(last_value).astype(jnp.float32))
    _, adv_t = jax.lax.scan(step, last, stream, reverse=True)
    return adv_t, jnp.where(mask_t, adv_t + stream[1], 0.0)
