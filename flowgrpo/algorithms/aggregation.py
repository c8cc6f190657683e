"""Aggregation: the weight in the loss of each token that the policy chose.

An update is a sum of `weight * loss` over tokens, so the layout of the batch can't change it (F3).
Flow-GRPO weights trajectory, then turn, then token (F2), after a mean over queries:

    w_ij^t = 1/Q * 1/G * 1/T_i * 1/|a_i^t|

Q counts queries with a valid trajectory, G the valid trajectories of the query, T_i the turns with a
chosen token. Every function here has the signature `(chosen_ntl, turns_nt, group_n, valid_n) -> w_ntl`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo import masked
from flowgrpo.algorithms.advantage import dense_ids, group_sum
from flowgrpo.types import AnyArray, check_shared_axes

Aggregation = Callable[[AnyArray, AnyArray, AnyArray, AnyArray], Array]


def flow_weights(chosen_ntl: AnyArray, turns_nt: AnyArray, group_n: AnyArray, valid_n: AnyArray) -> Array:
    """Mean over queries, then trajectories, then turns, then tokens; sums to 1 -> w_ntl."""
    count_nt = _counts(chosen_ntl, turns_nt, group_n, valid_n)
    num_turns_n = masked.count(count_nt > 0, axis=1)
    share_n = _trajectory_share(num_turns_n > 0, group_n)
    return _per_token(_over(_over(share_n, num_turns_n)[:, None], count_nt), chosen_ntl, count_nt)


def sequence_mean(chosen_ntl: AnyArray, turns_nt: AnyArray, group_n: AnyArray, valid_n: AnyArray) -> Array:
    """Mean over queries, then trajectories, then all chosen tokens of the trajectory; sums to 1 -> w_ntl."""
    count_nt = _counts(chosen_ntl, turns_nt, group_n, valid_n)
    count_n = count_nt.sum(axis=1)
    share_n = _over(_trajectory_share(count_n > 0, group_n), count_n)
    return _per_token(share_n[:, None], chosen_ntl, count_nt)


def sequence_sum(chosen_ntl: AnyArray, turns_nt: AnyArray, group_n: AnyArray, valid_n: AnyArray) -> Array:
    """Mean over queries, then trajectories, of the sum over chosen tokens -> w_ntl."""
    count_nt = _counts(chosen_ntl, turns_nt, group_n, valid_n)
    share_n = _trajectory_share(count_nt.sum(axis=1) > 0, group_n)
    return _per_token(share_n[:, None], chosen_ntl, count_nt)


def action_mean(chosen_ntl: AnyArray, turns_nt: AnyArray, group_n: AnyArray, valid_n: AnyArray) -> Array:
    """Mean over queries, then all actions (turns) of the query, then tokens; sums to 1 -> w_ntl."""
    count_nt = _counts(chosen_ntl, turns_nt, group_n, valid_n)
    num_turns_n = masked.count(count_nt > 0, axis=1)
    member_n, id_n = num_turns_n > 0, dense_ids(group_n)
    share_n = _over(_query_share(member_n, id_n), group_sum(num_turns_n, id_n, member_n))
    return _per_token(_over(share_n[:, None], count_nt), chosen_ntl, count_nt)


def token_mean(chosen_ntl: AnyArray, turns_nt: AnyArray, group_n: AnyArray, valid_n: AnyArray) -> Array:
    """Mean over all chosen tokens of valid trajectories; sums to 1 -> w_ntl."""
    count_nt = _counts(chosen_ntl, turns_nt, group_n, valid_n)
    return _per_token(_over(jnp.ones_like(count_nt), count_nt.sum()), chosen_ntl, count_nt)


def constant_length(
    chosen_ntl: AnyArray, turns_nt: AnyArray, group_n: AnyArray, valid_n: AnyArray, *, max_tokens: int
) -> Array:
    """Sum over chosen tokens, divided by valid trajectories x `max_tokens` (Dr. GRPO) -> w_ntl."""
    count_nt = _counts(chosen_ntl, turns_nt, group_n, valid_n)
    num_trajectories = masked.count(count_nt.sum(axis=1) > 0)
    return _per_token(_over(jnp.ones_like(count_nt), num_trajectories * max_tokens), chosen_ntl, count_nt)


def exclude_versions_before(weight_ntl: AnyArray, version_ntl: AnyArray, oldest: AnyArray | int) -> Array:
    """Weight 0 for tokens of versions before `oldest`; the other weights, and so the denominators, are kept (F2)."""
    return masked.fill(weight_ntl, jnp.asarray(version_ntl) >= oldest)


def _counts(chosen_ntl, turns_nt, group_n, valid_n) -> Array:
    """Chosen tokens per turn of valid trajectories -> count_nt."""
    check_shared_axes("weights", chosen_ntl=chosen_ntl, turns_nt=turns_nt, group_n=group_n, valid_n=valid_n)
    exists_nt = jnp.asarray(turns_nt, bool) & jnp.asarray(valid_n, bool)[:, None]
    return masked.fill(masked.count(jnp.asarray(chosen_ntl, bool), axis=2), exists_nt)


def _query_share(member_n, id_n) -> Array:
    """1/Q for each member: every query with a member has an equal share -> share_n."""
    present_g = jax.ops.segment_max(member_n.astype(jnp.int32), id_n, num_segments=len(id_n)) > 0
    return _over(member_n.astype(jnp.float32), masked.count(present_g))


def _trajectory_share(member_n, group_n) -> Array:
    """1/(Q G) for each member: every trajectory of a query has an equal share of it -> share_n."""
    id_n = dense_ids(group_n)
    return _over(_query_share(member_n, id_n), group_sum(jnp.ones(len(id_n)), id_n, member_n))


def _over(share, count) -> Array:
    """`share / count`; for a count of 0 the share itself, which is 0 or has no token."""
    return share / jnp.maximum(count, 1.0)


def _per_token(weight_nt, chosen_ntl, count_nt) -> Array:
    """The weight of a turn's tokens, at the tokens that the policy chose."""
    return masked.fill(weight_nt[:, :, None], jnp.asarray(chosen_ntl, bool) & (count_nt > 0)[:, :, None])
