"""How arms of the studies that ship are trained: programs, and advantages of their own."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from flowgrpo import masked
from flowgrpo.algorithms.advantage import (
    anchor_advantage,
    group_center,
    last_turns,
    multi_turn_group_advantage,
    turn_index,
)
from flowgrpo.algorithms.options import Options
from flowgrpo.algorithms.policy_gradient import flow_grpo
from flowgrpo.contracts import Metrics
from flowgrpo.learner.diagnostics import task_information
from flowgrpo.models.decoder import matrices
from flowgrpo.models.quantised import quantise_layers
from flowgrpo.models.trainable import actor_params
from flowgrpo.parallel.row_sharding import scan_updates
from flowgrpo.recipes import pure
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.recipes.study import ArmProgram, iteration_program, unchanged
from flowgrpo.training.pure_env import RolloutTasks, fused_step, make_stages
from flowgrpo.training.stages import TrainState
from flowgrpo.types import Params, Trajectories

# Programs ---------------------------------------------------------------------------------------------


def imitate_teacher(setup: pure.Setup, *, oracle: bool = False, **teacher: Any) -> ArmProgram:
    """Imitate as many trajectories per update as other arms sample, of another planner.

    `teacher` has the settings of the environment whose demonstrations are imitated, or with `oracle` those of its
    oracle.
    """
    env = ENVIRONMENTS[setup.config.environment.env](**teacher)
    if oracle:
        env = env._replace(demonstrate=lambda _key, state: env.oracle(state))
    taught = setup._replace(env=env)

    def step(state: TrainState) -> tuple[TrainState, Metrics]:
        return pure.imitation_step(taught, state.key)(state)

    return ArmProgram(unchanged, step, unchanged)


def distil_teacher(setup: pure.Setup, *, steps: int = 200, oracle: bool = False, **teacher: Any) -> ArmProgram:
    """Learn from a teacher, for `opd`: the arm's start after `steps` updates of `imitate_teacher`."""
    imitation = imitate_teacher(setup, oracle=oracle, **teacher)

    def begin(state: TrainState) -> TrainState:
        taught, _ = scan_updates(imitation.step, state, updates=steps)
        return state.replace(reference=taught.learner.params)

    return ArmProgram(begin, fused_step(setup.stages), unchanged)


def scheduled_bonus(setup: pure.Setup, *, bonus: float, first: int = 0, last: int = 2**31 - 1) -> ArmProgram:
    """An entropy bonus in updates `first` to `last`; `task_information` is measured in every update.

    The bonus is part of the algorithm in all updates, so that entropy is measured over all tokens, signal or not.
    """

    def step(state: TrainState) -> tuple[TrainState, Metrics]:
        is_on = (state.update >= first) & (state.update <= last)
        algorithm = flow_grpo(
            beta=0.0, clip_high=setup.config.learner.clip_high, entropy_bonus=jnp.where(is_on, bonus, 0.0)
        )
        iteration = make_stages(setup.env, setup.policy, algorithm, setup.optimizer, setup.sizes)
        trajectories = iteration.rollout(state)
        update = fused_step(iteration._replace(generate=lambda *_: trajectories, judge=None))
        state, metrics = update(state)
        return state, metrics | {"task_information": task_information(trajectories)}

    return ArmProgram(unchanged, step, unchanged)


class StaleState(struct.PyTreeNode):
    """A train state whose trajectories are sampled with older parameters."""

    current: TrainState
    older: Params  # [lag, ...] the oldest first


def stale_sampler(setup: pure.Setup, *, lag: int) -> ArmProgram:
    """Trajectories are sampled with the parameters of `lag` updates ago."""

    def begin(state: TrainState) -> StaleState:
        older = jax.tree.map(lambda x: jnp.broadcast_to(x, (lag, *x.shape)), state.learner.params)
        return StaleState(state, older)

    def step(stale: StaleState) -> tuple[StaleState, Metrics]:
        learner = stale.current.learner
        oldest = learner.replace(params=jax.tree.map(lambda x: x[0], stale.older))
        trajectories = setup.stages.rollout(stale.current.replace(learner=oldest))
        update = fused_step(setup.stages._replace(generate=lambda *_: trajectories, judge=None))
        state, metrics = update(stale.current)
        older = jax.tree.map(lambda x, new: jnp.concatenate([x[1:], new[None]]), stale.older, learner.params)
        return StaleState(state, older), metrics

    return ArmProgram(begin, step, lambda stale: stale.current)


def quantised_rollouts(setup: pure.Setup, *, kind: str) -> ArmProgram:
    """Trajectories are sampled with quantised layers; the parameters themselves are updated in full precision."""
    iteration, factors = setup.stages, matrices(pure.small_decoder_config(setup.env, setup.config))

    def generate(params: Params, tasks: RolloutTasks) -> Trajectories:
        return iteration.generate(quantise_layers(actor_params(params), factors, kind=kind), tasks)

    return iteration_program(iteration._replace(generate=generate))


def reward_answered_calls(setup: pure.Setup) -> ArmProgram:
    """Train with `answered_call_rewards` instead of one outcome."""

    def generate(*inputs: Any) -> Trajectories:
        return answered_call_rewards(setup.stages.generate(*inputs))

    return iteration_program(setup.stages._replace(generate=generate))


def answered_call_rewards(trajectories: Trajectories) -> Trajectories:
    """Reward each turn with 1 for an answered call, and the last turn with the outcome.

    A heuristic as process rewards are made of: plausible, and not what is wanted.
    """
    turns_nt = jnp.asarray(trajectories.turns)
    answered_nt = (jnp.asarray(trajectories.tool) >= 0) & ~jnp.asarray(trajectories.error) & turns_nt
    outcome_nt = jnp.where(last_turns(turns_nt), jnp.asarray(trajectories.outcome)[:, None], 0.0)
    return trajectories.replace(reward=answered_nt.astype(jnp.float32) + outcome_nt)


# Advantages -------------------------------------------------------------------------------------------


def turn_index_zscore(trajectories: Trajectories, outcome_n, valid_n, _options: Options) -> jax.Array:
    """z-score of the outcome among the group's turns with the same index -> adv_nt."""
    acted_nt = trajectories.acted
    outcome_nt = jnp.broadcast_to(jnp.asarray(outcome_n)[:, None], acted_nt.shape)
    return anchor_advantage(outcome_nt, turn_index(acted_nt), acted_nt, trajectories.group, valid_n)


def penalise_turns(trajectories: Trajectories, outcome_n, valid_n, _options: Options, *, charge: float) -> jax.Array:
    """A planted bias: the broadcast advantage plus `charge` for each turn above the group's mean -> adv_nt."""
    acted_nt, group_n = trajectories.acted, trajectories.group
    adv_nt = multi_turn_group_advantage(outcome_n, acted_nt, group_n, valid_n)
    more_n = group_center(acted_nt.sum(axis=1).astype(jnp.float32), group_n, valid_n)
    return masked.fill(adv_nt + charge * more_n[:, None], acted_nt & valid_n[:, None])


def reward_zscore(trajectories: Trajectories, _outcome_n, valid_n, _options: Options) -> jax.Array:
    """z-score of each turn's own reward among all turns of the group, as if all had the same state -> adv_nt."""
    same_state_nt = jnp.zeros(trajectories.turns.shape, jnp.int32)
    return anchor_advantage(trajectories.reward, same_state_nt, trajectories.acted, trajectories.group, valid_n)
