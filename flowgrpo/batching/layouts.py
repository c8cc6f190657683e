"""Plain layouts of dense trajectories that compile: one row per trajectory, or per turn.

They need more memory than `pack` and give the same loss (F3). `place` and `unpack` convert per-token values
between the trajectories' [n, t, l] and a batch's [r, s].
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo import masked
from flowgrpo.types import AnyArray, Batch, Trajectories, check_axes


def rows_by_trajectory(trajectories: Trajectories, adv, weights, target=None) -> Batch:
    """One trajectory per row of t * l tokens, without gaps between turns; jits. `target` is the critic's."""
    num, num_turns, slots = jnp.shape(trajectories.tokens)
    turn_rts = jnp.broadcast_to(jnp.arange(num_turns)[:, None], (num, num_turns, slots))
    own_rt = jnp.ones((num, num_turns), bool)
    return _plain(trajectories, (adv, weights, target), jnp.arange(num), turn_rts, own_rt)


def rows_by_turn(trajectories: Trajectories, adv, weights, target=None) -> Batch:
    """One turn per row, after the earlier turns of its context; jits."""
    num, num_turns, slots = jnp.shape(trajectories.tokens)
    trajectory_r = jnp.repeat(jnp.arange(num), num_turns)
    turn_rts = jnp.broadcast_to(jnp.arange(num_turns)[:, None], (num * num_turns, num_turns, slots))
    own_rt = jnp.tile(jnp.eye(num_turns, dtype=bool), (num, 1))
    return _plain(trajectories, (adv, weights, target), trajectory_r, turn_rts, own_rt)


def _plain(trajectories: Trajectories, credit: tuple, trajectory_r, turn_rts, own_rt) -> Batch:
    """Rows with turns of one trajectory each; `own_rt` marks the turns that are trained in a row.

    `credit` is (advantage, weight, target or None).
    """
    check_axes(trajectories)
    length_nt, begins_nt = resolve_lengths(trajectories)
    num_rows, num_turns, slots = turn_rts.shape
    context_rt = jnp.cumsum(begins_nt, axis=1)[trajectory_r]  # numbered from 1 within a trajectory
    later_rt = jnp.cumsum(own_rt[:, ::-1], axis=1)[:, ::-1] > 0  # an own turn is here or later
    own_contexts_rt = (own_rt[:, None, :] & (context_rt[:, :, None] == context_rt[:, None, :])).any(axis=2)
    shown_rt = own_rt | (later_rt & own_contexts_rt)
    slot_rts = jnp.broadcast_to(jnp.arange(slots), turn_rts.shape)
    exists_rts = (slot_rts < length_nt[trajectory_r][:, :, None]) & shown_rt[:, :, None]
    exists_rs = exists_rts.reshape(num_rows, -1)
    order_rs = jnp.argsort(~exists_rs, axis=1, stable=True)  # existing tokens first
    turn_rs, slot_rs, exists_rs = (
        jnp.take_along_axis(x.reshape(num_rows, -1), order_rs, axis=1) for x in (turn_rts, slot_rts, exists_rs)
    )
    segment_rs = jnp.take_along_axis(context_rt, turn_rs, axis=1)
    place_rs = jnp.broadcast_to(jnp.arange(num_turns * slots), segment_rs.shape)
    first_rs = jnp.diff(segment_rs, axis=1, prepend=0) != 0  # of its context
    position_rs = place_rs - jax.lax.cummax(jnp.where(first_rs, place_rs, 0), axis=1)
    index = (
        jnp.where(exists_rs, trajectory_r[:, None], -1),
        jnp.where(exists_rs, turn_rs, -1),
        jnp.where(exists_rs, slot_rs, -1),
    )
    trained_rs = exists_rs & jnp.take_along_axis(own_rt, turn_rs, axis=1)
    return _gather(
        trajectories, credit, index, trained_rs, *(jnp.where(exists_rs, x, 0) for x in (segment_rs, position_rs))
    )


def _gather(trajectories: Trajectories, credit: tuple, index, trained_rs, segment_rs, position_rs) -> Batch:
    """The batch whose token at [r, s] is that of the trajectories at `index`."""
    adv, weights, target = credit
    exists_rs = segment_rs > 0
    chosen_rs = trained_rs & jnp.asarray(trajectories.chosen)[index]
    fields = token_fields(trajectories, lambda x_ntl: masked.fill(jnp.asarray(x_ntl)[index], exists_rs))
    if target is not None:
        fields["target"] = masked.fill(jnp.asarray(target)[index[: jnp.ndim(target)]], chosen_rs)
    return Batch(
        tokens=jnp.where(exists_rs, jnp.asarray(trajectories.tokens)[index], 0),
        positions=position_rs,
        segments=segment_rs,
        trajectory=index[0],
        turn=index[1],
        slot=index[2],
        group=jnp.where(exists_rs, jnp.asarray(trajectories.group)[index[0]], -1),
        chosen=chosen_rs,
        advantage=masked.fill(jnp.asarray(adv)[index[: jnp.ndim(adv)]], chosen_rs),
        weight=masked.fill(jnp.asarray(weights)[index[: jnp.ndim(weights)]], chosen_rs),
        version=jnp.where(exists_rs, jnp.asarray(trajectories.version)[index], 0),
        **fields,
    )


def place(x_ntl: AnyArray, batch: Batch) -> Array:
    """Per-token values of the trajectories in the layout of the batch; 0 on padding -> x_rs."""
    value_rs = jnp.asarray(x_ntl)[batch.trajectory, batch.turn, batch.slot]
    return jnp.where(jnp.asarray(batch.segments) > 0, value_rs, 0)


def unpack(x_rs: AnyArray, batch: Batch, shape: tuple[int, ...]) -> Array:
    """Per-token values of the chosen tokens, back in the trajectories' [n, t, l]; 0 elsewhere -> x_ntl."""
    own_rs = jnp.asarray(batch.chosen) & (jnp.asarray(batch.segments) > 0)
    outside = shape[0]  # an index past the end, which `mode="drop"` leaves out
    trajectory_rs = jnp.where(own_rs, batch.trajectory, outside)
    return jnp.zeros(shape, jnp.asarray(x_rs).dtype).at[trajectory_rs, batch.turn, batch.slot].set(x_rs, mode="drop")


def resolve_lengths(trajectories: Trajectories) -> tuple[Array, Array]:
    """`length` and `starts_context` with their defaults resolved: (length_nt, begins_nt)."""
    slots = trajectories.chosen.shape[2]
    ends_nt = jnp.max(jnp.where(trajectories.action_mask, jnp.arange(1, slots + 1)[None, None, :], 0), axis=2)
    length_nt = ends_nt if trajectories.length is None else trajectories.length
    length_nt = jnp.where(jnp.asarray(trajectories.turns), length_nt, 0)
    first_nt = jnp.broadcast_to(jnp.arange(length_nt.shape[1]) == 0, length_nt.shape)
    return length_nt, first_nt if trajectories.starts_context is None else first_nt | jnp.asarray(
        trajectories.starts_context
    )


def token_fields(trajectories: Trajectories, lay: Callable[[AnyArray], AnyArray]) -> dict[str, Any]:
    """The log-probabilities and values of the trajectories, laid out by `lay`, under their names in a batch.

    `logp_old` is `logp_sampled` unless it was scored.
    """
    fields = {
        "logp_sampled": trajectories.logp_sampled,
        "logp_old": trajectories.logp_old,
        "logp_ref": trajectories.logp_ref,
        "value_old": trajectories.value,
    }
    laid = {name: lay(x_ntl) for name, x_ntl in fields.items() if x_ntl is not None}
    return {"logp_old": laid["logp_sampled"]} | laid


def full_batch(vocabulary: int, rows: int, length: int, *, segments: int = 1, samples: int = 8) -> Batch:
    """Rows of random tokens, for benchmarks: advantages of both signs; all but a segment's first token are chosen.

    The segments of a row have equal lengths, except for the last, which has the remainder; `samples` rows are a group.
    """
    row_rs, slot_rs = np.indices((rows, length), np.int32)
    segment_length = length // segments
    segment_rs = np.minimum(slot_rs // segment_length, segments - 1)
    position_rs = slot_rs - segment_rs * segment_length
    chosen_rs = position_rs > 0
    logp_rs = np.where(chosen_rs, -np.log(vocabulary), 0.0).astype(np.float32)
    return Batch(
        tokens=np.random.default_rng(0).integers(1, vocabulary, (rows, length), np.int32),
        positions=position_rs,
        segments=segment_rs + 1,
        trajectory=row_rs,
        turn=segment_rs,
        slot=position_rs,
        group=row_rs // samples,
        chosen=chosen_rs,
        logp_sampled=logp_rs,
        logp_old=logp_rs,
        advantage=np.where((row_rs + segment_rs) % 2, 1.0, -0.7).astype(np.float32),
        weight=(chosen_rs / chosen_rs.sum()).astype(np.float32),
    )
