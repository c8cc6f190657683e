"""One arm of a study: its differences from the other arms in, functions of one seed out. Pure.

    warm_start_seed(key) -> SeedStart           a planner that has imitated demonstrations; the same for every arm
    build_arm(arm, config, ...) -> ArmParts     begin(start) -> state;  advance(state) -> (state, ArmMetrics)

Everything is a function of one seed, to be mapped over all seeds (`flowgrpo.parallel.row_sharding`) and jitted by the
caller.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
from flowgrpo.contracts import Algorithm, Metrics
from flowgrpo.learner.critic import with_critic
from flowgrpo.learner.diagnostics import task_information
from flowgrpo.models.decoder import matrices
from flowgrpo.models.quantised import quantise_layers
from flowgrpo.models.trainable import actor_params
from flowgrpo.parallel.row_sharding import scan_updates
from flowgrpo.recipes import pure
from flowgrpo.recipes.recipe import Objects
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.rollout.exams import make_evaluation_rollout
from flowgrpo.training.config import make_config
from flowgrpo.training.pure_env import PureStages, RolloutTasks, fused_step, imitate, make_stages
from flowgrpo.training.stages import TrainState, init_train_state
from flowgrpo.types import Params, Trajectories

METRICS = (  # by update
    *("success", "turns", "tool_errors", "entropy", "mixed_groups", "zero_signal_groups"),
    *("clip_high_fraction", "kl_old", "task_information"),
)


class ArmProgram(NamedTuple):
    """How an arm is trained: from a train state to a state of its own, by updates of that, and back."""

    begin: Callable[[TrainState], Any]
    step: Callable[[Any], tuple[Any, Metrics]]
    train_state: Callable[[Any], TrainState]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Differences of an arm from its study.

    Args:
        changes: of the Config that all arms share.
        algorithm: replaces the one that the settings name.
        env: settings of the training environment.
        eval_env: settings of the environment of evaluations.
        program: how the arm is trained; by default on policy.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    algorithm: Callable[[], Algorithm] | None = None
    env: Mapping[str, Any] = field(default_factory=dict)
    eval_env: Mapping[str, Any] = field(default_factory=dict)
    program: Callable[[pure.Setup], ArmProgram] | None = None


class SeedStart(struct.PyTreeNode):
    """A seed before its first update."""

    params: Params
    key: jax.Array


class ArmMetrics(struct.PyTreeNode):
    """Metrics of an arm since its last evaluation, and of an evaluation after it."""

    metrics: dict[str, Any]  # by update
    success: jax.Array  # on test tasks
    turns: jax.Array


class ArmParts(NamedTuple):
    """An arm as functions of one seed."""

    setup: pure.Setup
    begin: Callable[[SeedStart], Any]
    evaluate: Callable[[Any], ArmMetrics]
    advance: Callable[[Any], tuple[Any, ArmMetrics]]


# A seed -----------------------------------------------------------------------------------------------


def warm_start_seed(key: jax.Array, *, setup: pure.Setup) -> SeedStart:
    """A new planner that has imitated the environment's demonstrations, for the Config's `warm_steps`."""
    init_key, demonstration_key, run_key = jax.random.split(key, 3)
    config, optimizer = setup.config, pure.warm_optimizer(setup)
    params, _ = imitate(
        setup.env,
        setup.policy,
        optimizer,
        setup.policy.init(init_key),
        demonstration_key,
        steps=config.warm_start.warm_steps,
        rows=config.warm_start.warm_rows,
    )
    return SeedStart(params, run_key)


def build_arm(arm: Arm, config: pure.Config, env: Mapping[str, Any], *, updates: int, tasks: int) -> ArmParts:
    """The functions of an arm.

    Args:
        arm: its differences from the study.
        config: of the study.
        env: settings of the study's environment.
        updates: number of updates of one `advance`.
        tasks: number of test tasks of an evaluation; they follow from the seed, and are always the same.
    """
    make_env = ENVIRONMENTS[config.environment.env]
    algorithm = None if arm.algorithm is None else arm.algorithm()
    changed = make_config(pure.Config, config.settings() | dict(arm.changes))  # raises for an unknown setting
    setup = pure.build(changed, objects=Objects(env=make_env(**{**env, **arm.env}), algorithm=algorithm))
    program = iteration_program(setup.stages) if arm.program is None else arm.program(setup)
    rollout = make_evaluation_rollout(
        make_env(**{**env, **arm.eval_env}), setup.policy, "test", tasks=tasks, temperature=config.rollout.temperature
    )

    def begin(start: SeedStart) -> Any:
        """The arm's state before its first update."""
        params = with_critic(setup.critic, jax.random.fold_in(start.key, 1), start.params)
        return program.begin(init_train_state(params, setup.optimizer, start.key))

    def measure(state: Any, metrics: Metrics) -> ArmMetrics:
        train_state = program.train_state(state)
        key = jax.random.fold_in(train_state.key, 2**31 - 1)
        trajectories = rollout(actor_params(train_state.learner.params), key)
        turns = masked.mean(trajectories.turns.sum(axis=1).astype(jnp.float32), trajectories.valid)
        chosen = {name: metrics[name] for name in METRICS if name in metrics}
        success = masked.mean(trajectories.correct.astype(jnp.float32), trajectories.valid)
        return ArmMetrics(chosen, success, turns)

    def evaluate(state: Any) -> ArmMetrics:
        return measure(state, {})

    def advance(state: Any) -> tuple[Any, ArmMetrics]:
        """Some updates, and an evaluation after them."""
        state, metrics = scan_updates(program.step, state, updates=updates)
        return state, measure(state, metrics)

    return ArmParts(setup, begin, evaluate, advance)


# Programs ---------------------------------------------------------------------------------------------


def iteration_program(iteration: PureStages) -> ArmProgram:
    """Train by an iteration."""
    return ArmProgram(_unchanged, fused_step(iteration), _unchanged)


def _unchanged(state: TrainState) -> TrainState:
    return state


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

    return ArmProgram(_unchanged, step, _unchanged)


def distil_teacher(setup: pure.Setup, *, steps: int = 200, oracle: bool = False, **teacher: Any) -> ArmProgram:
    """Learn from a teacher, for `opd`: the arm's start after `steps` updates of `imitate_teacher`."""
    imitation = imitate_teacher(setup, oracle=oracle, **teacher)

    def begin(state: TrainState) -> TrainState:
        taught, _ = scan_updates(imitation.step, state, updates=steps)
        return state.replace(reference=taught.learner.params)

    return ArmProgram(begin, fused_step(setup.stages), _unchanged)


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

    return ArmProgram(_unchanged, step, _unchanged)


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
