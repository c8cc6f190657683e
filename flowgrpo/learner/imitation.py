"""Supervised warm start from demonstrations.

    loss = - mean over chosen tokens of  log pi(token)

`demonstrate` plays a pure environment with its own demonstrator; `imitation_rows` lays out the trajectories in rows;
`make_supervised` takes optimizer steps on them in micro-batches, as an update does, and `make_validation` computes the
loss on others.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike

from flowgrpo import masked
from flowgrpo.algorithms.aggregation import token_mean
from flowgrpo.algorithms.loss import weighted_sums
from flowgrpo.batching.collate import collate
from flowgrpo.batching.layouts import rows_by_trajectory
from flowgrpo.batching.packing import pack
from flowgrpo.batching.prefix_tree import pack_tree
from flowgrpo.contracts import Algorithm, Env, Observation, Policy, Scores
from flowgrpo.learner.state import LearnerState
from flowgrpo.learner.update import UpdateSettings, make_score, make_update, score_batch
from flowgrpo.models.trainable import ALL_PARAMS, TrainableSubset
from flowgrpo.types import BadInput, Batch, Metrics, Params, PyTree, Status, Trajectories, Trajectory

Step = Callable[[LearnerState, Batch], tuple[LearnerState, Array]]
Act = Callable[[Array, PyTree], tuple[Array, Array]]  # (key, state) -> (tokens, length)


# Demonstrations ---------------------------------------------------------------------------------------


def demonstrate(env: Env, tasks, keys: Array, *, act: Act | None = None) -> Trajectories:
    """One trajectory for each task and key, each a group of its own; jits.

    Keys are used as in a rollout: `fold_in(key, 0)` for the environment, `fold_in(key, 1 + t)` for turn t. `act`
    replaces the environment's `demonstrate`; `act_by_oracle(env)` gives the best actions.
    """
    act = env.demonstrate if act is None else act
    fields, correct_n, done_n = jax.vmap(lambda task, key: _play(env, act, task, key))(tasks, keys)
    num, outcome_n = len(keys), fields["reward"].sum(axis=1)
    if not env.by_turn:  # every turn carries the outcome
        fields["reward"] = jnp.where(fields["turns"], outcome_n[:, None], 0.0)
    return Trajectories(
        logp_sampled=jnp.zeros(fields["tokens"].shape, jnp.float32),
        version=jnp.zeros(fields["tokens"].shape, jnp.int32),
        outcome=outcome_n,
        correct=correct_n,
        status=jnp.where(done_n, int(Status.FINISHED), int(Status.TURN_LIMIT)),
        group=jnp.arange(num),
        by_turn=jnp.full(num, env.by_turn),
        **fields,
    )


def act_by_oracle(env: Env) -> Act:
    """The environment's best action, for any key."""
    return lambda _, state: env.oracle(state)


def _play(env: Env, act: Act, task, key: Array) -> tuple[dict, Array, Array]:
    """One episode of at most `sizes.turns` turns -> (fields by turn, correct, done)."""
    state, first = env.reset(jax.random.fold_in(key, 0), task)
    slots = max(env.sizes.prompt, env.sizes.observation)
    start = (state, _pad_observation(first, slots), jnp.bool_(False), jnp.bool_(False))

    def take_turn(carry, turn: Array):
        state, observation, done, _ = carry
        tokens, length = act(jax.random.fold_in(key, 1 + turn), state)
        new_state, step = env.step(state, tokens, length)
        tokens_l, chosen_l, filled = write_turn(observation, tokens, length)
        fields = {
            "tokens": jnp.where(done, 0, tokens_l),
            "chosen": chosen_l & ~done,
            "turns": ~done,
            "reward": jnp.where(done, 0.0, step.reward.astype(jnp.float32)),
            "anchor": env.anchor(state),
            "length": jnp.where(done, 0, filled),
        }
        return (new_state, _pad_observation(step.observation, slots), step.done, step.correct), fields

    (_, _, done, correct), fields = jax.lax.scan(take_turn, start, jnp.arange(env.sizes.turns))
    return fields, correct, done


def write_turn(observation: Observation, action: Array, length: Array) -> tuple[Array, Array, Array]:
    """A turn's slots: the observation, the action right after it, padding -> (tokens_l, chosen_l, filled slots)."""
    slot_l = jnp.arange(len(observation.tokens) + len(action))
    end = observation.length + length
    chosen_l = (slot_l >= observation.length) & (slot_l < end)
    action_l = action[jnp.clip(slot_l - observation.length, 0, len(action) - 1)]
    observation_l = jnp.pad(observation.tokens, (0, len(action)))
    return jnp.where(chosen_l, action_l, jnp.where(slot_l < observation.length, observation_l, 0)), chosen_l, end


def _pad_observation(observation: Observation, slots: int) -> Observation:
    return Observation(
        jnp.pad(observation.tokens, (0, slots - len(observation.tokens))), jnp.asarray(observation.length, jnp.int32)
    )


def imitation_rows(trajectories: Trajectories) -> Batch:
    """One trajectory per row; every chosen token of a valid trajectory is imitated."""
    return rows_by_trajectory(trajectories, _no_advantage(trajectories), _token_weights(trajectories))


def packed_imitation(
    records: Sequence[Trajectory], *, row_length: int, rows: int | None = None, use_trees: bool = False
) -> Batch:
    """Demonstrations of any lengths, packed into rows on the host; every chosen token is imitated.

    With `use_trees` rows are prefix trees, if the policy reads them (`Policy.hidden_tree`).
    """
    if not records:
        raise BadInput("there is no demonstration to imitate")
    trajectories = collate(records)
    adv_nt = np.zeros(trajectories.turns.shape, np.float32)
    packing = pack_tree if use_trees else pack
    return packing(trajectories, adv_nt, np.asarray(_token_weights(trajectories)), row_length=row_length, rows=rows)


def _no_advantage(trajectories: Trajectories) -> Array:
    return jnp.zeros(trajectories.turns.shape, jnp.float32)


def _token_weights(trajectories: Trajectories) -> Array:
    return token_mean(trajectories.action_mask, trajectories.turns, trajectories.group, trajectories.valid)


# Imitation --------------------------------------------------------------------------------------------


def make_supervised(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float | Array = 1.0,
    banned: tuple[int, ...] = (),
    micro_rows: int = 16,
    chunk: int = 1024,
    compute_dtype: DTypeLike | None = None,
    trainable: TrainableSubset = ALL_PARAMS,
) -> Step:
    """`step(state, batch) -> (state, loss)`: one optimizer step on the mean over the batch's tokens with loss.

    The settings are those of `UpdateSettings` and `make_update`.
    """
    settings = UpdateSettings(
        temperature=temperature,
        banned=banned,
        micro_rows=micro_rows,
        chunk=chunk,
        compute_dtype=compute_dtype,
        diagnostics=None,
    )
    update = make_update(policy, IMITATION, optimizer, settings, trainable=trainable)

    def step(state: LearnerState, batch: Batch) -> tuple[LearnerState, Array]:
        weight = 1.0 / jnp.maximum(masked.count(batch.loss_mask), 1.0)
        state, metrics = update(state, batch.replace(weight=masked.fill(weight, batch.loss_mask)))
        return state, metrics["loss"]

    return step


def _imitation_loss(scores: Scores, batch: Batch) -> tuple[Array, Metrics]:
    live_rs = batch.loss_mask
    loss_rs, weight_rs = -masked.fill(scores.logp, live_rs), masked.fill(batch.weight, live_rs)
    metrics = weighted_sums({"weight": jnp.ones_like(loss_rs)}, weight_rs, live_rs)
    return masked.sum(weight_rs * loss_rs, live_rs), metrics


IMITATION = Algorithm("imitation", advantages=_no_advantage, weights=_token_weights, loss=_imitation_loss)


def make_validation(
    policy: Policy,
    *,
    temperature: float | Array = 1.0,
    banned: tuple[int, ...] = (),
    micro_rows: int = 16,
    chunk: int = 1024,
) -> Callable[[Params, Batch], Array]:
    """`loss(params, batch)`: the mean over tokens with loss, without a step."""
    score = make_score(policy, temperature=temperature, banned=banned, chunk=chunk)

    def loss(params, batch: Batch) -> Array:
        return -masked.mean(score_batch(score, params, batch, micro_rows=micro_rows, mesh=policy.mesh), batch.loss_mask)

    return loss
