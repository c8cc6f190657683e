"""Pure environments: the stages of an update whose rollout is compiled, too.

    stages = make_stages(env, policy, algorithm, optimizer, settings)
    step = fused_step(stages)      one pure function: jit it, scan it over updates, vmap it over seeds (`train_many`)
    step = split_step(stages)      an `Iteration`: a compiled program per stage, with packing on the host

Both are called as `step(state) -> (state, metrics)`, with the same numbers (F3). All randomness of an update comes from
`fold_in(key, update)`, so a run that resumes from a saved state continues exactly as it would have (S1). `imitate` is
the warm start on the demonstrations of an environment.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import Array
from jax.sharding import Mesh

from flowgrpo.batching.layouts import rows_by_trajectory
from flowgrpo.contracts import Algorithm, Env, Policy
from flowgrpo.envs.env import PAD
from flowgrpo.learner.critic import ValueModel, without_critic
from flowgrpo.learner.imitation import demonstrate, imitation_rows, make_supervised
from flowgrpo.learner.state import LearnerState, init_learner
from flowgrpo.models.trainable import ALL_PARAMS, TrainableSubset
from flowgrpo.parallel.compile_ahead import compile_ahead, jit_quickly
from flowgrpo.parallel.row_sharding import DeviceMesh, map_runs, replicated_sharding, scan_updates, stack_trees
from flowgrpo.rollout.compiled import make_rollout, repeat
from flowgrpo.rollout.exams import draw_tasks
from flowgrpo.training.iteration import (
    ON_DEVICE,
    Iteration,
    Rollout,
    RolloutCallbacks,
    RolloutShape,
    Staging,
    rollout_metrics,
)
from flowgrpo.training.stages import IterationSettings, TrainState, UpdateStages, make_update_stages, rollout_params
from flowgrpo.types import BadInput, Batch, Metrics, Params, PyTree, Trajectories

Judge = Callable[[Trajectories, Array], Trajectories]  # (trajectories, key) -> the same with other outcomes


class RolloutTasks(struct.PyTreeNode):
    """The inputs of a rollout, one entry per trajectory."""

    tasks: PyTree
    keys: Array  # n: all randomness of a trajectory follows from its key
    group: Array  # n
    version: Array  # of the parameters that sample
    judge_key: Array


class PureStages(NamedTuple):
    """The stages of one update on a pure environment; pure functions, to be jitted by the caller."""

    env: Env
    settings: IterationSettings
    mesh: DeviceMesh
    draw: Callable[[TrainState], RolloutTasks]
    generate: Callable[[Params, RolloutTasks], Trajectories]
    judge: Judge | None  # None: the outcome is the environment's
    update: UpdateStages
    to_rows: Callable[..., Batch]  # (trajectories, *advantages) -> one trajectory per row, inside a program

    def rollout(self, state: TrainState) -> Trajectories:
        """Draw tasks, sample trajectories, and judge them."""
        tasks = self.draw(state)
        trajectories = self.generate(state.learner.params, tasks)
        return trajectories if self.judge is None else self.judge(trajectories, tasks.judge_key)


def make_stages(
    env: Env,
    policy: Policy,
    algorithm: Algorithm,
    optimizer,
    settings: IterationSettings,
    *,
    judge: Judge | None = None,
    critic: ValueModel | None = None,
    trainable: TrainableSubset = ALL_PARAMS,
) -> PureStages:
    """Make the stages of an update on a pure environment.

    If the policy is on a mesh, every device rolls out and learns from its shard of the trajectories.

    Args:
        judge: replaces the outcomes of the environment, as controls do.
        critic: value function, of algorithms with targets.
        trainable: subset of the parameters that the optimizer changes.
    """
    if algorithm.name == "gigpo" and env.anchor is Env._field_defaults["anchor"]:
        raise BadInput(f"gigpo compares turns of equal states, but {env.name} has no anchor: give it one")
    rollout = make_rollout(
        env,
        policy,
        hints=algorithm.hindsight,
        temperature=settings.temperature,
        min_decode_batch=settings.min_decode_batch,
    )
    slots = max_trajectory_tokens(env)
    stages = make_update_stages(
        policy, algorithm, optimizer, settings, banned=(PAD,), critic=critic, trainable=trainable, slots=slots
    )

    def draw(state: TrainState) -> RolloutTasks:
        task_key, sample_key, judge_key = update_keys(state)
        queries = settings.queries * settings.oversample
        tasks, group_n = repeat(draw_tasks(env, task_key, queries, "train"), settings.samples)
        keys_n = jax.random.split(sample_key, len(group_n))
        return RolloutTasks(tasks, keys_n, group_n, state.learner.version, judge_key)

    def generate(params: Params, tasks: RolloutTasks) -> Trajectories:
        params = rollout_params(params, settings.compute_dtype)
        return rollout(params, tasks.tasks, tasks.keys, tasks.group, tasks.version)

    def to_rows(trajectories: Trajectories, adv, weights, target=None) -> Batch:
        if algorithm.skips_zero_advantage:  # what has no gradient weighs nothing, as `pack` leaves it out
            signal_n = (adv != 0).reshape(len(adv), -1).any(axis=1)
            weights = jnp.where(signal_n.reshape(-1, *(1,) * (weights.ndim - 1)), weights, 0.0)
        rows = rows_by_trajectory(trajectories, adv, weights, target)
        return jax.tree.map(lambda x_rs: x_rs[:, :slots], rows)  # no trajectory fills the slots after these

    return PureStages(env, settings, policy.mesh, draw, generate, judge, stages, to_rows)


def update_keys(state: TrainState) -> Array:
    """Three keys of an update: of its tasks, its samples, and its judge."""
    return jax.random.split(jax.random.fold_in(state.key, state.update), 3)


def max_trajectory_tokens(env: Env) -> int:
    """Number of tokens of the longest possible trajectory."""
    sizes = env.sizes
    return sizes.prompt + (sizes.turns - 1) * sizes.observation + sizes.turns * sizes.action


# As a step ----------------------------------------------------------------------------------------------


def fused_step(stages: PureStages) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """A whole update as one pure function: jit it, scan it over updates, vmap it over seeds."""
    tools, samples = len(stages.env.tools), stages.settings.samples

    def step(state: TrainState) -> tuple[TrainState, Metrics]:
        trajectories = stages.rollout(state)
        scored = stages.update.score_trajectories(state, trajectories)
        advantages = stages.update.compute_advantages(scored)
        state, metrics = stages.update.update(state, stages.to_rows(scored, *advantages))
        if (interval := stages.update.algorithm.reference_every) is not None:
            is_due = state.update % interval == 0
            current = without_critic(stages.update.trainable.split(state.learner.params))
            reference = jax.tree.map(lambda x, old: jnp.where(is_due, x, old), current, state.reference)
            state = state.replace(reference=reference)
        return state, metrics | rollout_metrics(trajectories, advantages, tools=tools, samples=samples)

    return step


def split_step(
    stages: PureStages, roll_out: "CompiledRollout | None" = None, staging: Staging = ON_DEVICE
) -> Iteration:
    """A whole update in a compiled program per stage, with packing on the host.

    Args:
        stages: of the update.
        roll_out: the jitted rollout of these stages, if there is one already.
        staging: how the devices are used.
    """
    roll_out = CompiledRollout(stages) if roll_out is None else roll_out
    return Iteration(roll_out, stages.update, roll_out.shape, staging)


def rollout_shape(stages: PureStages) -> RolloutShape:
    """Sizes of the rollout of an update."""
    settings = stages.settings
    return RolloutShape(
        tools=len(stages.env.tools),
        samples=settings.samples,
        max_trajectory_tokens=max_trajectory_tokens(stages.env),
        trajectories=settings.queries * settings.samples,
    )


class CompiledRollout:
    """The rollout of a pure environment, in a program per part, for an `Iteration`.

    The program `generate` can roll out other tasks too, if they are placed on devices by `jit_tasks`.
    """

    def __init__(self, stages: PureStages):
        self.stages, self.shape = stages, rollout_shape(stages)
        settings, mesh = stages.settings, stages.mesh
        self.trajectories = settings.queries * settings.oversample * settings.samples
        self._mesh = mesh if isinstance(mesh, Mesh) else None
        self._draw = self.jit_tasks(stages.draw)
        self._draw_given = cache(
            lambda count, samples: self.jit_tasks(partial(self._draw_tasks, count=count, samples=samples))
        )
        self.generate: Any = jax.jit(stages.generate)
        self._judge: Any = None if stages.judge is None else jax.jit(stages.judge)

    def __call__(
        self,
        state: TrainState,
        callbacks: RolloutCallbacks,
        tasks: PyTree | int | None = None,
        samples: int | None = None,
    ) -> Rollout:
        """Roll out the tasks of the update; or so many fresh ones, or these, `samples` times each."""
        shape = None
        if tasks is None and samples is None:
            drawn = self._draw(state)
        else:
            settings, shape = self.stages.settings, self.shape
            samples = samples or settings.samples
            count = tasks if isinstance(tasks, int) else settings.queries if tasks is None else None
            drawn = self._draw_given(count, samples)(state, tasks if count is None else ())
            shape = shape._replace(samples=samples, trajectories=len(drawn.group))
        trajectories = self.generate(state.learner.params, drawn)
        if self._judge is not None:
            trajectories = self._judge(trajectories, drawn.judge_key)
        callbacks.on_all_sampled(trajectories)
        return Rollout(trajectories, shape=shape)

    def _draw_tasks(self, state: TrainState, tasks: PyTree, *, count: int | None, samples: int) -> RolloutTasks:
        """The inputs of a rollout of these tasks, or of `count` fresh ones."""
        task_key, sample_key, judge_key = update_keys(state)
        if count is not None:
            tasks = draw_tasks(self.stages.env, task_key, count, "train")
        repeated, group_n = repeat(tasks, samples)
        keys_n = jax.random.split(sample_key, len(group_n))
        return RolloutTasks(repeated, keys_n, group_n, state.learner.version, judge_key)

    def jit_tasks(self, draw: Callable[..., PyTree]) -> Any:
        """Jit a function that draws tasks so that its results are placed like the tasks of an update."""
        return jit_quickly(draw, out_shardings=replicated_sharding(self._mesh))

    def compile(self, state: TrainState) -> Trajectories:
        """Compile all programs for states like this one -> the shapes of the trajectories."""
        tasks = compile_ahead(self._draw, state)
        trajectories = compile_ahead(self.generate, state.learner.params, tasks)
        if self._judge is not None:
            trajectories = compile_ahead(self._judge, trajectories, tasks.judge_key)
        return trajectories


def train_many(
    step: Callable[[TrainState], tuple[TrainState, Metrics]],
    states: Sequence[TrainState],
    updates: int,
    *,
    lanes: int | None = None,
    mesh: DeviceMesh = None,
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Train several states at once, such as those of several seeds; `step` is a `fused_step`, not yet jitted.

    Returns the states, stacked into one, and every metric as [state, update]. It is one program, scanned over the
    updates; `row_sharding.map_runs` explains lanes and mesh.
    """
    train = map_runs(lambda state: scan_updates(step, state, updates=updates), lanes=lanes, mesh=mesh)
    after, metrics = jax.jit(train)(stack_trees(states))
    return after, {name: np.asarray(value) for name, value in jax.device_get(metrics).items()}


# Imitation before the updates ---------------------------------------------------------------------------


def demonstration_rows(env: Env, key: Array, *, rows: int, split: str = "train") -> Batch:
    """Fresh demonstrations of the environment as a batch for imitation, one per row; pure."""
    task_key, play_key = jax.random.split(key)
    demonstrations = demonstrate(env, draw_tasks(env, task_key, rows, split), jax.random.split(play_key, rows))
    return jax.tree.map(lambda x_rs: x_rs[:, : max_trajectory_tokens(env)], imitation_rows(demonstrations))


def imitate(
    env: Env,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    params: Params,
    key: Array,
    *,
    steps: int,
    rows=64,
) -> tuple[Params, Array]:
    """Imitate the environment's demonstrations -> parameters, and the loss of every step; can be jitted and vmapped.

    A policy that solves nothing has no signal to learn from, so imitation comes first.
    """
    step = make_supervised(policy, optimizer, banned=(PAD,))

    def imitation_step(state: LearnerState, index: Array) -> tuple[LearnerState, Array]:
        return step(state, demonstration_rows(env, jax.random.fold_in(key, index), rows=rows))

    learner, losses = jax.lax.scan(imitation_step, init_learner(params, optimizer), jnp.arange(steps))
    return learner.params, losses
