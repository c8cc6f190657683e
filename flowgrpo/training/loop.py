"""The training loop in one process: the reference that every other schedule is tested against.

    for update in range(updates):
        trajectories = rollout(state)                   fresh tasks, and the keys of this update
        scored = score_trajectories(state, trajectories)      only what the advantages read
        advantages = compute_advantages(scored)         with weights, and targets of a critic
        batch = pack(scored, advantages)
        state, metrics = update(state, batch)

`make_iteration` binds these stages to an environment, a policy, an algorithm and an optimizer. There are two ways to
run them, with the same numbers (F3), and `train_loop` is the loop over either:

    fused_step(iteration)   one pure function: jit it, scan it over updates, vmap it over seeds (`train_many`)
    split_step(iteration)   a compiled program per stage, with packing on the host between them

Packed on the host, prefixes that contexts share are computed once, if policy and critic can do that (`hidden_tree`).
All randomness of an iteration comes from `fold_in(key, update)`, so a run that resumes from a saved state continues
exactly as it would have (S1).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import Array
from jax.sharding import Mesh

from flowgrpo.batching.layouts import rows_by_trajectory
from flowgrpo.batching.packing import account
from flowgrpo.batching.prefix_tree import count_tokens, make_packer
from flowgrpo.contracts import Algorithm, Env, Policy
from flowgrpo.envs.env import PAD
from flowgrpo.learner.critic import ValueModel, explained_variance, make_value_score, without_critic
from flowgrpo.learner.diagnostics import DiagnosticsSettings, signal
from flowgrpo.learner.imitation import demonstrate, imitation_rows, make_supervised
from flowgrpo.learner.scoring import make_score_trajectories
from flowgrpo.learner.state import LearnerState, init_learner
from flowgrpo.learner.update import UpdateSettings, make_update
from flowgrpo.models.trainable import ALL_PARAMS, TrainableSubset, actor_params, cast
from flowgrpo.parallel.compile_ahead import compile_ahead, host_shapes, jit_quickly
from flowgrpo.parallel.row_sharding import DeviceMesh, map_runs, replicated_sharding, scan_updates, stack_trees
from flowgrpo.report.health import make_sampler_warning
from flowgrpo.rollout.compiled import make_rollout, repeat, tool_counts, trajectory_metrics
from flowgrpo.rollout.exams import draw_tasks
from flowgrpo.types import BadInput, Batch, Metrics, Params, PyTree, Trajectories, check_range


@dataclass(frozen=True)
class Settings:
    """Sizes of an iteration; an update learns from `queries * samples` trajectories.

    Args:
        queries: tasks per update.
        samples: trajectories per task, the group size.
        oversample: rolls out this many times `queries`; the update takes `queries` groups, those with a signal first.
        temperature: of sampling, and of scoring what was sampled.
        micro_rows: rows that are scored together; fewer take less memory and give the same numbers.
        mini_batches: parts of the batch, each with a gradient step of its own.
        epochs: passes over the batch.
        min_decode_batch: fewest rows in which the last actions of a turn are decoded; None: as many as its first.
        compute_dtype: dtype to which parameters are cast where they are used; None: their own. float16 needs an
            optimizer `with_loss_scale`.
    """

    queries: int = 32
    samples: int = 8
    oversample: int = 1
    temperature: float = 1.0
    micro_rows: int = 16
    mini_batches: int = 1
    epochs: int = 1
    min_decode_batch: int | None = None
    compute_dtype: Any = None

    def __post_init__(self):
        for name in ("queries", "samples", "oversample", "micro_rows", "mini_batches", "epochs", "min_decode_batch"):
            check_range("Settings", name, getattr(self, name), 1, whole=True, optional=name == "min_decode_batch")
        check_range("Settings", "temperature", self.temperature, 0.0, exclusive=True)


class TrainState(struct.PyTreeNode):
    """Everything that changes from update to update, and that a checkpoint stores under these names."""

    learner: LearnerState
    reference: Params  # trainable part of the KL reference; `trainable.merge(learner.params, reference)` is all of it
    key: Array  # of the run; only folded, never consumed
    update: Array  # number of updates done, from which tasks and keys follow


def init_train_state(
    params: Params, optimizer, key: Array, *, reference: Params = None, trainable: TrainableSubset = ALL_PARAMS
) -> TrainState:
    """The state before the first update; the reference is a copy of the initial policy by default."""
    if reference is None:
        reference = jax.tree.map(jnp.copy, without_critic(trainable.split(params)))
    return TrainState(init_learner(params, optimizer, trainable), reference, key, jnp.int32(0))


class Advantages(NamedTuple):
    """What an algorithm computes from the trajectories of an update."""

    adv: Array
    weights: Array
    target: Array | None = None  # of the critic, if the algorithm has one


class UpdateStages(NamedTuple):
    """The stages of an iteration after its rollout; pure functions, to be jitted by the caller."""

    score_trajectories: Callable[[TrainState, Trajectories], Trajectories]  # adds what the advantages read
    compute_advantages: Callable[[Trajectories], Advantages]
    update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    packer: Callable[..., Callable[..., Batch]] = partial(make_packer, False)


class RolloutTasks(struct.PyTreeNode):
    """The inputs of a rollout, one entry per trajectory."""

    tasks: PyTree
    keys: Array  # n: all randomness of a trajectory follows from its key
    group: Array  # n
    version: Array  # of the parameters that sample
    judge_key: Array


Judge = Callable[[Trajectories, Array], Trajectories]  # (trajectories, key) -> the same with other outcomes


class Iteration(NamedTuple):
    """The stages of one update, bound to what they train; pure functions, to be jitted by the caller."""

    env: Env
    algorithm: Algorithm
    settings: Settings
    mesh: DeviceMesh
    draw: Callable[[TrainState], RolloutTasks]
    generate: Callable[[Params, RolloutTasks], Trajectories]
    judge: Judge | None  # None: the outcome is the environment's
    score_trajectories: Callable[[TrainState, Trajectories], Trajectories]
    compute_advantages: Callable[[Trajectories], Advantages]
    update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    packer: Callable[..., Callable[..., Batch]]  # makes the packing on the host, as in `UpdateStages`
    to_rows: Callable[..., Batch]  # (trajectories, *advantages) -> one trajectory per row, inside a program

    def rollout(self, state: TrainState) -> Trajectories:
        """Draw tasks, sample trajectories, and judge them."""
        tasks = self.draw(state)
        trajectories = self.generate(state.learner.params, tasks)
        return trajectories if self.judge is None else self.judge(trajectories, tasks.judge_key)


def make_iteration(
    env: Env,
    policy: Policy,
    algorithm: Algorithm,
    optimizer,
    settings: Settings,
    *,
    judge: Judge | None = None,
    critic: ValueModel | None = None,
    trainable: TrainableSubset = ALL_PARAMS,
) -> Iteration:
    """Make the stages of an iteration on a pure environment.

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
        task_key, sample_key, judge_key = jax.random.split(jax.random.fold_in(state.key, state.update), 3)
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

    return Iteration(env, algorithm, settings, policy.mesh, draw, generate, judge, to_rows=to_rows, **stages._asdict())


def make_update_stages(
    policy: Policy,
    algorithm: Algorithm,
    optimizer,
    settings: Settings,
    *,
    banned: tuple[int, ...],
    critic: ValueModel | None = None,
    trainable: TrainableSubset = ALL_PARAMS,
    slots: int | None = None,
) -> UpdateStages:
    """Make the stages after a rollout: scoring, advantages and update.

    Args:
        banned: tokens that the policy cannot sample.
        critic: value function, of algorithms with targets.
        trainable: subset of the parameters that the optimizer changes.
        slots: number of tokens of the longest trajectory; None: as many as the arrays hold.
    """
    if algorithm.targets is not None and critic is None:
        raise BadInput(f"{algorithm.name} needs a critic: pass one as critic=, such as critic.separate_network(...)")
    if algorithm.minibatch_unit == "group" and settings.mini_batches > 1:
        raise BadInput(f"{algorithm.name} needs its groups whole, and packing parts them: set mini_batches to 1")
    if "F4" in algorithm.laws and settings.samples == 1:
        raise BadInput(
            f"{algorithm.name} learns nothing from groups of one: Settings.samples is 1, set it to 2 or more"
        )
    critic = None if algorithm.targets is None else critic
    update_settings = UpdateSettings(
        temperature=settings.temperature,
        banned=banned,
        micro_rows=settings.micro_rows,
        mini_batches=settings.mini_batches,
        epochs=settings.epochs,
        compute_dtype=settings.compute_dtype,
        diagnostics=DiagnosticsSettings(warns=False),  # `train_loop` warns, and a run does in warnings.jsonl
    )

    # What is scored before the advantages is scored once, for them and for the loss.
    scored_fields = algorithm.needs & {"logp_ref", "value"} if algorithm.needs_for_advantages else frozenset()
    scorer = None
    if scored_fields:
        scorer = make_score_trajectories(
            policy,
            needs=scored_fields,
            critic=critic,
            settings=update_settings,
            micro_rows=settings.micro_rows,
            slots=slots,
            hindsight=algorithm.hindsight,
        )
    value_score = None
    if critic is not None:
        value_score = make_value_score(policy, critic, temperature=settings.temperature, banned=banned)
    make_learner = partial(make_update, policy, algorithm, optimizer, score=value_score, trainable=trainable)
    learn_rows = make_learner(update_settings)
    learn_trees = make_learner(replace(update_settings, micro_rows=1))  # a tree is as long as a micro-batch

    def score_trajectories(state: TrainState, trajectories: Trajectories) -> Trajectories:
        if scorer is None:
            return trajectories
        params = state.learner.params
        return scorer(params, trainable.merge(params, state.reference), trajectories)

    def compute_advantages(trajectories: Trajectories) -> Advantages:
        adv = algorithm.advantages(trajectories)
        if settings.oversample > 1:  # keep at most `queries` groups, those with a signal first
            signal_n = (adv != 0).reshape(len(adv), -1).any(axis=1).reshape(-1, settings.samples).any(axis=1)
            rank_g = jnp.argsort(jnp.argsort(~signal_n, stable=True))
            taken_n = jnp.repeat(rank_g < settings.queries, settings.samples)
            # A trajectory without turns takes no part in statistics or loss.
            trajectories = trajectories.replace(turns=trajectories.turns & taken_n[:, None])
            adv = algorithm.advantages(trajectories)
        target = None if algorithm.targets is None else algorithm.targets(trajectories)
        return Advantages(adv, algorithm.weights(trajectories), target)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        params, reference, interval = state.learner.params, state.reference, algorithm.reference_every
        learn = learn_rows if batch.tree is None else learn_trees
        learner, metrics = learn(state.learner, batch, trainable.merge(params, reference))
        if interval is not None:
            is_due = (state.update + 1) % interval == 0
            current = without_critic(trainable.split(learner.params))
            reference = jax.tree.map(lambda x, old: jnp.where(is_due, x, old), current, reference)
        state = state.replace(learner=learner, reference=reference, update=state.update + 1)
        return state, metrics | explained_variance(batch)

    packer = partial(
        make_packer, shares_prefixes(policy, critic), micro_rows=settings.micro_rows, ranks=settings.mini_batches
    )
    return UpdateStages(score_trajectories, compute_advantages, update, packer)


def shares_prefixes(policy: Policy, critic: ValueModel | None = None) -> bool:
    """Whether rows that are packed on the host are trees, which policy and critic must both be able to read."""
    return policy.hidden_tree is not None and (critic is None or critic.reads_trees)


def max_trajectory_tokens(env: Env) -> int:
    """Number of tokens of the longest possible trajectory."""
    sizes = env.sizes
    return sizes.prompt + (sizes.turns - 1) * sizes.observation + sizes.turns * sizes.action


def rollout_params(params: Params, compute_dtype: Any) -> Params:
    """The actor's parameters in the dtype in which the update scores them, for rollouts to sample from (F7)."""
    return actor_params(params) if compute_dtype is None else cast(actor_params(params), compute_dtype)


# Imitation before the loop ----------------------------------------------------------------------------


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


# An iteration as a step -------------------------------------------------------------------------------


def fused_step(iteration: Iteration) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """A whole iteration as one pure function: jit it, scan it over updates, vmap it over seeds."""
    tools, samples = len(iteration.env.tools), iteration.settings.samples

    def step(state: TrainState) -> tuple[TrainState, Metrics]:
        trajectories = iteration.rollout(state)
        scored = iteration.score_trajectories(state, trajectories)
        advantages = iteration.compute_advantages(scored)
        state, metrics = iteration.update(state, iteration.to_rows(scored, *advantages))
        return state, metrics | rollout_metrics(trajectories, advantages, tools=tools, samples=samples)

    return step


def split_step(iteration: Iteration) -> "SplitStep":
    """A whole iteration as `step(state)`, with packing on the host between programs that are each compiled once."""
    return SplitStep(iteration)


class SplitStep:
    """An iteration in a program per stage, as `step(state) -> (state, metrics)`.

    The program `generate` can roll out other tasks too, if they are placed on devices by `jit_tasks`.
    """

    def __init__(self, iteration: Iteration):
        settings, mesh = iteration.settings, iteration.mesh
        self.trajectories = settings.queries * settings.oversample * settings.samples
        self._mesh = mesh if isinstance(mesh, Mesh) else None
        self._draw = self.jit_tasks(iteration.draw)
        self.generate = jax.jit(iteration.generate)
        self._judge = None if iteration.judge is None else jax.jit(iteration.judge)
        self.train_step = make_train_step(
            UpdateStages(
                iteration.score_trajectories, iteration.compute_advantages, iteration.update, iteration.packer
            ),
            iteration.algorithm,
            tools=len(iteration.env.tools),
            samples=settings.samples,
            max_trajectory_tokens=max_trajectory_tokens(iteration.env),
            trajectories=settings.queries * settings.samples,
        )

    def __call__(self, state: TrainState) -> tuple[TrainState, Metrics]:
        tasks = self._draw(state)
        trajectories = self.generate(state.learner.params, tasks)
        if self._judge is not None:
            trajectories = self._judge(trajectories, tasks.judge_key)
        return self.train_step(state, trajectories)

    def jit_tasks(self, draw: Callable[..., PyTree]) -> Any:
        """Jit a function that draws tasks so that its results are placed like the tasks of an iteration."""
        return jit_quickly(draw, out_shardings=replicated_sharding(self._mesh))

    def compile(self, state: TrainState) -> None:
        """Compile all programs for states like this one; may run in a thread beside other work."""
        tasks = compile_ahead(self._draw, state)
        trajectories = compile_ahead(self.generate, state.learner.params, tasks)
        if self._judge is not None:
            trajectories = compile_ahead(self._judge, trajectories, tasks.judge_key)
        self.train_step.compile(state, trajectories)


def make_train_step(
    stages: UpdateStages,
    algorithm: Algorithm,
    *,
    tools: int,
    samples: int,
    max_trajectory_tokens: int,
    trajectories: int,
    turns: int = 1,
) -> "TrainStep":
    """The stages after a rollout as `train_step(state, trajectories) -> (state, metrics)`, each jitted.

    Args:
        tools: number of tools of the environment, for metrics.
        samples: trajectories per group.
        max_trajectory_tokens: tokens of the longest trajectory, or of the longest context if none is extended.
        trajectories: number of trajectories that are learned from, at most.
        turns: number of contexts per trajectory, at most; 1 if contexts are extended from turn to turn.
    """
    jitted = UpdateStages(
        jax.jit(stages.score_trajectories), jax.jit(stages.compute_advantages), jax.jit(stages.update), stages.packer
    )
    metrics_of = jax.jit(partial(rollout_metrics, tools=tools, samples=samples))
    packing = stages.packer(max_trajectory_tokens=max_trajectory_tokens, trajectories=trajectories, turns=turns)
    return TrainStep(jitted, algorithm, metrics_of, packing)


@dataclass(frozen=True, eq=False)
class TrainStep:
    """The stages after a rollout, as `train_step(state, trajectories) -> (state, metrics)`."""

    stages: Any  # an UpdateStages of jitted functions, which have `eval_shape`
    algorithm: Algorithm
    metrics_of: Any  # (trajectories, advantages) -> metrics; jitted
    packing: Callable[..., Batch]  # (trajectories, adv, weights, target=..., skip_no_signal=...)

    def __call__(self, state: TrainState, trajectories: Trajectories) -> tuple[TrainState, Metrics]:
        scored = trajectories
        if self.algorithm.needs_for_advantages:
            scored = self.stages.score_trajectories(state, trajectories)
        advantages = jax.device_get(self.stages.compute_advantages(scored))
        scored = jax.device_get(scored)
        batch = self.pack(scored, advantages)
        state, metrics = self.stages.update(state, batch)
        fates = count_token_fates(scored, advantages, batch, self.algorithm)
        return state, metrics | self.metrics_of(trajectories, advantages) | fates | token_counts(batch)

    def pack(self, trajectories: Trajectories, advantages: Advantages) -> Batch:
        """Pack the trajectories that have a signal into rows, on the host."""
        return self.packing(
            trajectories,
            advantages.adv,
            advantages.weights,
            target=advantages.target,
            skip_no_signal=self.algorithm.skips_zero_advantage,
        )

    def compile(self, state: TrainState, trajectories: Trajectories) -> None:
        """Compile all programs for a state and trajectories of these shapes."""
        scored = trajectories
        if self.algorithm.needs_for_advantages:
            scored = compile_ahead(self.stages.score_trajectories, state, trajectories)
        advantages = host_shapes(compile_ahead(self.stages.compute_advantages, scored))
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (host_shapes(scored), advantages))
        compile_ahead(self.stages.update, state, self.pack(*zeros))
        compile_ahead(self.metrics_of, trajectories, advantages)


# Metrics ----------------------------------------------------------------------------------------------


def count_token_fates(
    trajectories: Trajectories, advantages: Advantages, batch: Batch, algorithm: Algorithm
) -> dict[str, int]:
    """Number of tokens of all trajectories, by what became of them (A6)."""
    adv = advantages.adv if algorithm.skips_zero_advantage else None
    ledger = account(trajectories, advantages.weights, batch, adv=adv)
    return {f"tokens_{fate.name.lower()}": count for fate, count in ledger.fates.items()}


def token_counts(batch: Batch) -> dict[str, int]:
    """Number of tokens of all contexts of a batch, each counted alone, and of those that are computed."""
    return dict(zip(("context_tokens", "computed_tokens"), count_tokens(batch), strict=True))


def rollout_metrics(trajectories: Trajectories, advantages: Advantages, *, tools: int, samples: int) -> Metrics:
    """Metrics of the whole rollout, with the advantages of all trajectories, before packing leaves any out."""
    metrics = trajectory_metrics(trajectories, samples=samples) | {"tool_calls": tool_counts(trajectories, tools)}
    return metrics | signal(trajectories, advantages.adv, advantages.weights)


# The loop ---------------------------------------------------------------------------------------------


def train_loop(
    step: Callable[[TrainState], tuple[TrainState, Metrics]], state: TrainState, updates: int, *, warns: bool = True
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    """Run updates up to number `updates`, and yield the state after each, with its metrics as plain numbers.

    It warns if the sampler's probabilities are not the learner's, unless the caller reads that metric itself.
    """
    warn = make_sampler_warning()
    for update in range(int(state.update) + 1, updates + 1):
        state, metrics = step(state)
        numbers = {name: np.asarray(value).tolist() for name, value in jax.device_get(metrics).items()}
        if warns and "correction" not in numbers:
            warn(numbers.get("sampler_kl", 0.0))
        yield state, {"update": update} | numbers


def train_many(
    step: Callable[[TrainState], tuple[TrainState, Metrics]],
    states: Sequence[TrainState],
    updates: int,
    *,
    lanes: int | None = None,
    mesh: DeviceMesh = None,
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Train several states at once, such as those of several seeds; `step` is that of `fused_step`, not yet jitted.

    Returns the states, stacked into one, and every metric as [state, update]. It is one program, scanned over the
    updates; `row_sharding.map_runs` explains lanes and mesh.
    """
    train = map_runs(lambda state: scan_updates(step, state, updates=updates), lanes=lanes, mesh=mesh)
    after, metrics = jax.jit(train)(stack_trees(states))
    return after, {name: np.asarray(value) for name, value in jax.device_get(metrics).items()}
