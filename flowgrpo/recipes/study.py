"""A study, and one arm of it: its differences from the other arms in, functions of one seed out. Pure.

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
from flowgrpo.contracts import Algorithm, Env, Metrics
from flowgrpo.learner.critic import with_critic
from flowgrpo.models.trainable import actor_params
from flowgrpo.parallel.row_sharding import scan_updates
from flowgrpo.recipes import pure
from flowgrpo.recipes.recipe import Objects
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.rollout.exams import make_evaluation_rollout
from flowgrpo.training.config import make_config
from flowgrpo.training.pure_env import PureStages, fused_step, imitate
from flowgrpo.training.stages import TrainState, init_train_state
from flowgrpo.types import BadInput, Params

SMALL: dict[str, Any] = {  # a planner and iterations that 16 seeds finish in minutes
    "model_dim": 64,
    "layers": 2,
    "queries": 16,
    "samples": 8,
    "updates": 80,
    "warm_steps": 300,
    "warm_rows": 32,
    "clip_high": 0.28,
    "decay_to": 0.2,
}
World = Env | Mapping[str, Any]  # an environment, or settings of the one of that name
WORLD: dict[str, World] = {"lookup_hard": {}}
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


class Study(NamedTuple):
    """A question, and the arms that are compared with a baseline."""

    question: str
    baseline: str  # name of the arm that the others are compared with
    arms: Mapping[str, Arm]
    changes: Mapping[str, Any] = SMALL  # of an environment's preset
    worlds: Mapping[str, World] = WORLD  # environments by name


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


def make_world(config: pure.Config, world: World, changes: Mapping[str, Any] = {}) -> Env:
    """The environment of a study, with an arm's changes of its settings."""
    if not isinstance(world, Env):
        return ENVIRONMENTS[config.environment.env](**{**world, **changes})
    if changes:
        raise BadInput(f"an arm changes {', '.join(changes)} of {world.name}: give the study settings of it")
    return world


def build_arm(arm: Arm, config: pure.Config, world: World, *, updates: int, tasks: int) -> ArmParts:
    """The functions of an arm.

    Args:
        arm: its differences from the study.
        config: of the study.
        world: the study's environment, or its settings.
        updates: number of updates of one `advance`.
        tasks: number of test tasks of an evaluation; they follow from the seed, and are always the same.
    """
    algorithm = None if arm.algorithm is None else arm.algorithm()
    changed = make_config(pure.Config, config.settings() | dict(arm.changes))  # raises for an unknown setting
    setup = pure.build(changed, objects=Objects(env=make_world(config, world, arm.env), algorithm=algorithm))
    program = iteration_program(setup.stages) if arm.program is None else arm.program(setup)
    rollout = make_evaluation_rollout(
        make_world(config, world, arm.eval_env),
        setup.policy,
        "test",
        tasks=tasks,
        temperature=config.rollout.temperature,
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


def iteration_program(iteration: PureStages) -> ArmProgram:
    """Train by an iteration."""
    return ArmProgram(unchanged, fused_step(iteration), unchanged)


def unchanged(state: TrainState) -> TrainState:
    """The state, as it is: of a program whose own state is a train state."""
    return state
