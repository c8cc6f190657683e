"""One update in three calls, `Iteration`: rollout, advantages, update. Each stage is a compiled program.

    iteration = Iteration(roll_out, stages, shape)
    rollout = iteration.rollout(state)                 trajectories with their outcomes
    advantages = iteration.advantages(rollout)
    state, metrics = iteration.update(state, rollout, advantages)      packs on the host, and takes the gradient steps

`iteration(state)` is the three in a row, and `train_loop` repeats that. The rollout is compiled, of a pure environment
(`pure_env.CompiledRollout`), or hosted, over an engine (`hosted_training`): a function of the state and of callbacks.

`Staging` schedules the same functions on one set of devices, with the memory given to one stage after the other:

    rollout  ->  inference: reference, critic  ->  advantages  ->  pack  ->  train
       groups are judged on the host, while others are sampled and while the reference scores (R1)

Between stages the sampler's cache is destroyed, and models are moved as the table of `parallel.offload` has it; the
moves for the next stage run while this one ends. The parameters are the same, bit for bit if the programs are the same,
and to float tolerance if the reference is scored before packing instead of after it. The state that an update returns
has its models where the rollout needs them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.batching.packing import account
from flowgrpo.batching.prefix_tree import count_tokens
from flowgrpo.contracts import Algorithm, RewardResult
from flowgrpo.learner.critic import without_critic
from flowgrpo.learner.diagnostics import signal
from flowgrpo.learner.state import LearnerState
from flowgrpo.models.trainable import ActorCritic, actor_params
from flowgrpo.parallel.compile_ahead import compile_ahead, host_shapes
from flowgrpo.parallel.offload import DEVICE, HostOffloader, MemoryMeter, Move, live_bytes
from flowgrpo.report.health import make_sampler_warning
from flowgrpo.report.watchdog import Pending, StageWatchdog
from flowgrpo.rollout import judging
from flowgrpo.rollout.compiled import tool_counts, trajectory_metrics
from flowgrpo.rollout.judging import GroupReward, judge_groups, with_reward_results
from flowgrpo.rollout.records import RecordedTrajectory, RolloutResult
from flowgrpo.training.stages import Advantages, TrainState, UpdateStages
from flowgrpo.types import BadInput, Batch, Metrics, Trajectories

SCORED = ("logp_ref", "value", "last_value")  # fields of trajectories that reference and critic fill


class RolloutCallbacks(NamedTuple):
    """What a rollout calls while it runs; both return at once."""

    on_all_sampled: Callable[[Trajectories], None]  # once, when all turns are there; outcomes may be missing
    on_start: Callable[[Pending], None]  # with a function that lists what the rollout waits for


class RolloutShape(NamedTuple):
    """Static sizes of a rollout, for packing and metrics."""

    tools: int  # number of tools of the environment
    samples: int  # trajectories per group
    trajectories: int  # number of trajectories that are learned from, at most
    max_trajectory_tokens: int  # of the longest trajectory, or of the longest context if none is extended
    turns: int = 1  # contexts per trajectory, at most; 1 if contexts are extended from turn to turn


class Rollout(NamedTuple):
    """Trajectories with their outcomes, and what comes with them."""

    trajectories: Trajectories
    records: Sequence[RecordedTrajectory] = ()  # the same as text, of host environments
    metrics: Mapping[str, Any] = {}
    timings: Mapping[str, Any] = {}
    on_advantages: Callable[[Advantages], None] | None = None  # called before the update
    scores: Mapping[str, Any] = {}  # fields of the trajectories that reference and critic have scored
    shape: RolloutShape | None = None  # None: that of the iteration

    @property
    def scored(self) -> Trajectories:
        """The trajectories with their scores, from which advantages are computed."""
        return self.trajectories.replace(**self.scores) if self.scores else self.trajectories

    @property
    def success(self) -> float:
        """Fraction of the valid trajectories that solve their task; NaN if there is none."""
        valid_n = np.asarray(self.trajectories.valid)
        return float(np.asarray(self.trajectories.correct)[valid_n].mean()) if valid_n.any() else float("nan")


RollOut = Callable[[TrainState, RolloutCallbacks], Rollout]
Step = Callable[[TrainState], tuple[TrainState, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Staging:
    """How an iteration uses its devices. By default all models stay on them.

    Args:
        offloader: knows where each model is in each stage, and moves it; None: nothing is moved.
        release: frees the sampler's memory when all trajectories are sampled -> number of bytes.
        scores_ahead: whether reference and critic score in a stage of their own (`stages.make_scorer`), while the last
            groups are judged. Otherwise what advantages read is scored before them, and the rest within the update.
        donates: whether the update overwrites parameters and optimizer state of the state it is given. It does so
            anyway if the offloader moves any model.
        watch_seconds: an iteration that takes longer reports what it waits for; None: never.
    """

    offloader: HostOffloader | None = None
    release: Callable[[], int] | None = None
    scores_ahead: bool = False
    donates: bool = False
    watch_seconds: float | None = None

    @property
    def moves(self) -> bool:
        """Whether any model is elsewhere than on the device in some stage."""
        table = {} if self.offloader is None else self.offloader.table
        return any(place != DEVICE for row in table.values() for place in row.values())


ON_DEVICE = Staging()  # nothing is moved


class Iteration:
    """One update as three calls, or as `iteration(state) -> (state, metrics)`; the metrics hold `timings`."""

    def __init__(self, roll_out: RollOut, stages: UpdateStages, shape: RolloutShape, staging: Staging = ON_DEVICE):
        """Jit the stages.

        Args:
            roll_out: samples and judges trajectories.
            stages: of the update.
            shape: sizes of the rollout.
            staging: how the devices are used.
        """
        if staging.moves and not staging.scores_ahead:
            raise BadInput("an offloader that moves the reference needs Staging(scores_ahead=True)")
        self.roll_out, self.stages, self.shape, self.staging = roll_out, stages, shape, staging
        self.algorithm, self.trainable = stages.algorithm, stages.trainable
        self.watch, self.memory_meter = StageWatchdog(staging.watch_seconds), MemoryMeter()
        self._compute_advantages: Any = jax.jit(stages.compute_advantages)
        self._score_trajectories: Any = jax.jit(stages.score_trajectories)
        self._train: Any = jax.jit(self._take_steps, donate_argnums=0 if staging.donates or staging.moves else ())
        self._metrics_of = cache(_jit_rollout_metrics)
        self._packing = cache(self._make_packing)
        self._scorer = stages.make_scorer(self._pack_for_scoring) if staging.scores_ahead else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="flowgrpo-inference")
        self._open, self._freed_bytes = ExitStack(), 0  # of the iteration under way

    def __call__(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Run all stages, each with its models on the device."""
        try:
            rollout = self.rollout(state)
            advantages = self.advantages(rollout)
            return self.update(state, rollout, advantages)
        finally:
            self._open.close()

    # Rollout ----------------------------------------------------------------------------------------------

    def rollout(self, state: TrainState, roll_out: RollOut | None = None) -> Rollout:
        """Roll out by the given function, by default the iteration's own.

        Once all is sampled, reference and critic score in a thread, while the last groups are judged in this one.
        """
        self._open.close()  # of an iteration that ended after its rollout
        inference: list[Future] = []
        overlaps = self._scorer is not None or self.staging.release is not None
        with ExitStack() as iteration, ExitStack() as judging_rewards, ExitStack() as sampling:
            iteration.enter_context(self.watch.iteration(int(state.update) + 1))
            state = self._bind_to_devices(state)
            if self.staging.offloader is not None:
                _put_models(self.staging.offloader, state)
                self.staging.offloader.enter("rollout")
            state = self._with_models(state)

            def on_all_sampled(trajectories: Trajectories) -> None:
                sampling.close()
                judging_rewards.enter_context(self.watch.stage("rewards"))
                if overlaps:
                    inference.append(self._pool.submit(self._infer, state, trajectories))
                else:
                    inference.append(Future())
                    inference[0].set_result(self._infer(state, trajectories))

            sampling.enter_context(self._stage("rollout"))
            callbacks = RolloutCallbacks(on_all_sampled, self.watch.add_pending)
            rollout = (self.roll_out if roll_out is None else roll_out)(state, callbacks)
            judging_rewards.close()
            if not inference:
                raise BadInput(
                    "the rollout ended without a call of callbacks.on_all_sampled(trajectories): call it when all "
                    "turns are there"
                )
            scores, self._freed_bytes = inference[0].result()
            if self.staging.offloader is not None:
                self.staging.offloader.enter("train")
            self._open = iteration.pop_all()  # until the update has ended
        return rollout._replace(scores=scores)

    def _infer(self, state: TrainState, trajectories: Trajectories) -> tuple[Mapping[str, Any], int]:
        """Free the sampler's memory and score by reference and critic -> the scored fields, and the bytes freed."""
        staging = self.staging
        with self._stage("inference"):
            freed_bytes = 0 if staging.release is None else staging.release()
            if staging.offloader is not None:
                staging.offloader.enter("inference")
                staging.offloader.prefetch("train")
            return self.score(self._with_models(state), trajectories), freed_bytes

    def score(self, state: TrainState, trajectories: Trajectories) -> Mapping[str, Any]:
        """The fields of the trajectories that have to be scored before their advantages."""
        if self._scorer is not None:
            params = state.learner.params
            reference = self.trainable.merge(params, state.reference)
            return jax.device_get(self._scorer(params, reference, trajectories))
        if not self.algorithm.needs_for_advantages:
            return {}
        scored = self._score_trajectories(state, trajectories)
        return {name: x for name in SCORED if (x := getattr(scored, name)) is not None}

    # Advantages and update --------------------------------------------------------------------------------

    def advantages(self, rollout: Rollout) -> Advantages:
        """The advantages of the algorithm, with weights, and targets of a critic; on the host."""
        with self._stage("advantages"):
            return jax.device_get(self._compute_advantages(rollout.scored))

    def update(self, state: TrainState, rollout: Rollout, advantages: Advantages) -> tuple[TrainState, dict[str, Any]]:
        """Pack the trajectories, take the gradient steps, and hand the new models to the offloader."""
        shape = self.shape if rollout.shape is None else rollout.shape
        with self._stage("pack"):
            trajectories: Trajectories = jax.device_get(rollout.scored)
            batch = self.pack(trajectories, advantages, shape)
        if rollout.on_advantages is not None:
            rollout.on_advantages(advantages)
        with self._stage("train"):
            state, metrics = self._update_models(self._bind_to_devices(self._with_models(state)), batch)
        if self.staging.offloader is not None:
            self.staging.offloader.enter("rollout")
        metrics |= self._metrics_of(shape.tools, shape.samples)(rollout.trajectories, advantages)
        metrics |= count_token_fates(trajectories, advantages, batch, self.algorithm)
        metrics |= row_metrics(batch) | token_counts(batch)
        state = self._with_models(state)
        self._open.close()
        return state, {**metrics, **rollout.metrics, "timings": {**self._timings(), **rollout.timings}}

    def pack(self, trajectories: Trajectories, advantages: Advantages, shape: RolloutShape | None = None) -> Batch:
        """Pack the trajectories that have a signal into rows, on the host."""
        return self._packing(self.shape if shape is None else shape)(
            trajectories,
            advantages.adv,
            advantages.weights,
            target=advantages.target,
            skip_no_signal=self.algorithm.skips_zero_advantage,
        )

    def _make_packing(self, shape: RolloutShape, ranks: int | None = None) -> Callable[..., Batch]:
        return self.stages.packer(
            max_trajectory_tokens=shape.max_trajectory_tokens,
            trajectories=shape.trajectories,
            turns=shape.turns,
            **({} if ranks is None else {"ranks": ranks}),
        )

    def _pack_for_scoring(self, trajectories: Trajectories, *columns: Any) -> Batch:
        """Pack all trajectories in one rank, of which there may be more than are learned from."""
        shape = self.shape._replace(trajectories=max(self.shape.trajectories, len(trajectories.group)))
        return self._packing(shape, 1)(trajectories, *columns)

    def _update_models(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take the gradient steps, and replace the reference if that is due."""
        learner, reference, interval = state.learner, state.reference, self.algorithm.reference_every
        if self.staging.offloader is not None:
            self.staging.offloader.wait()  # for copies of what the update overwrites
        # What is scored ahead of the batch is in it, and the reference may be off the device.
        others = state.replace(learner=None, reference=None if self.staging.scores_ahead else reference)
        learner, update, metrics = jax.block_until_ready(self._train(learner, others, batch))
        if interval is not None and int(update) % interval == 0:
            reference = jax.tree.map(jnp.copy, without_critic(self.trainable.split(learner.params)))
        state = state.replace(learner=learner, reference=reference, update=update)
        if self.staging.offloader is not None:
            _put_models(self.staging.offloader, state)
        return state, metrics

    def _take_steps(self, learner: LearnerState, others: TrainState, batch: Batch) -> tuple:
        """The update of a learner -> (learner, number of updates, metrics); to be jitted."""
        reference = others.reference
        if reference is None:
            reference = without_critic(self.trainable.split(learner.params))
        state, metrics = self.stages.update(others.replace(learner=learner, reference=reference), batch)
        return state.learner, state.update, metrics

    # Stages -----------------------------------------------------------------------------------------------

    def compile(self, state: TrainState) -> None:
        """Compile all programs for states like this one; may run in a thread beside other work.

        The rollout must be a `pure_env.CompiledRollout`, which knows the shapes of its trajectories.
        """
        trajectories = scored = self.roll_out.compile(state)  # type: ignore[attr-defined]
        if self.algorithm.needs_for_advantages:
            scored = compile_ahead(self._score_trajectories, state, trajectories)
        advantages = host_shapes(compile_ahead(self._compute_advantages, scored))
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (host_shapes(scored), advantages))
        compile_ahead(self._train, state.learner, state.replace(learner=None), self.pack(*zeros))
        compile_ahead(self._metrics_of(self.shape.tools, self.shape.samples), trajectories, advantages)

    def _stage(self, name: str) -> ExitStack:
        """A context in which a stage is timed, and its memory measured if models are moved."""
        with ExitStack() as stack:
            if self.staging.offloader is not None:
                stack.enter_context(self.memory_meter.stage(name))
            stack.enter_context(self.watch.stage(name))
            return stack.pop_all()

    def _timings(self) -> dict[str, Any]:
        """Seconds of the stages; and if there is an offloader, bytes that were moved, and peaks of memory."""
        seconds = {f"{name}_seconds": seconds for name, seconds in self.watch.seconds.items()}
        if self.staging.offloader is None:
            return seconds
        return {
            **seconds,
            "freed_bytes": self._freed_bytes,
            "moves": summarise_moves(self.staging.offloader.pop_moves()),
            "device_bytes": self.memory_meter.pop_peaks(),
            "device_bytes_by": self.memory_meter.source,
            "pinned_bytes": live_bytes()["pinned"],
        }

    def _bind_to_devices(self, state: TrainState) -> TrainState:
        """The state bound to its devices, as models are that were moved; otherwise programs compile twice."""
        return jax.tree.map(_bind_to_device, state) if self.staging.moves else state

    def _with_models(self, state: TrainState) -> TrainState:
        """The state with its models where the offloader has them now."""
        offloader = self.staging.offloader
        if offloader is None:
            return state
        params = offloader["policy"]
        if isinstance(state.learner.params, ActorCritic):
            params = ActorCritic(params, offloader["critic"])
        learner = state.learner.replace(params=params, optimizer=offloader["optimizer"])
        return state.replace(learner=learner, reference=offloader["reference"])


def _jit_rollout_metrics(tools: int, samples: int) -> Any:
    return jax.jit(partial(rollout_metrics, tools=tools, samples=samples))


def _bind_to_device(x: Any) -> Any:
    return jax.device_put(x, x.sharding) if isinstance(x, jax.Array) and not x.committed else x


def _put_models(offloader: HostOffloader, state: TrainState) -> None:
    """Hand every model of the state to the offloader, by its name."""
    params = state.learner.params
    models = {"policy": actor_params(params), "optimizer": state.learner.optimizer, "reference": state.reference}
    if isinstance(params, ActorCritic):
        models["critic"] = params.critic
    for name, tree in models.items():
        offloader.put(name, tree)


# Rollouts -----------------------------------------------------------


def compiled_rollout(
    rollout: Callable[[TrainState], Trajectories],
    reward: GroupReward | None = None,
    *,
    is_solved: Callable[[RewardResult], bool] = judging.is_solved,
    judges: int = 2,
    deadline: float = 600.0,
) -> RollOut:
    """A compiled rollout, such as `PureStages.rollout`, whose groups a reward on the host may judge.

    Args:
        reward: judges a group on the host; None: the outcome is the environment's.
        is_solved: whether a result counts as success.
        judges: number of groups judged at a time.
        deadline: seconds for a group.
    """
    rollout = jax.jit(rollout)

    def run(state: TrainState, callbacks: RolloutCallbacks) -> Rollout:
        sampled: Trajectories = jax.block_until_ready(rollout(state))
        callbacks.on_all_sampled(sampled)
        if reward is None:
            return Rollout(sampled)
        trajectories = jax.device_get(sampled)
        results = judge_groups(reward, trajectories, judges=judges, deadline=deadline, on_start=callbacks.on_start)
        return Rollout(with_reward_results(trajectories, results, is_solved))

    return run


def hosted_rollout(
    roll_out: Callable[..., RolloutResult], to_arrays: Callable[[RolloutResult], Trajectories]
) -> RollOut:
    """The rollout of a host environment, for an `Iteration`.

    Args:
        roll_out: `roll_out(state, on_all_sampled=..., on_start=...)`, with the callbacks of `hosted`.
        to_arrays: collates the trajectories, in the same way whether or not they are judged.
    """

    def run(state: TrainState, callbacks: RolloutCallbacks) -> Rollout:
        result = roll_out(
            state,
            on_all_sampled=lambda so_far: callbacks.on_all_sampled(to_arrays(so_far)),
            on_start=callbacks.on_start,
        )
        return Rollout(to_arrays(result), result.trajectories, timings={"judging_seconds": result.seconds["judging"]})

    return run


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


def row_metrics(batch: Batch) -> dict[str, Any]:
    """Number of rows with any token, and the fraction of their slots that is filled."""
    filled_rs = np.asarray(batch.segments if batch.tree is None else batch.tree.ends) > 0
    used_r = filled_rs.any(axis=1)
    return {"fill_rate": float(filled_rs[used_r].mean()) if used_r.any() else 0.0, "rows": int(used_r.sum())}


def summarise_moves(moves: Collection[Move]) -> dict[str, dict[str, float]]:
    """Bytes, seconds and bytes per second of the moves between each pair of places."""
    totals: dict[str, dict[str, float]] = {}
    for move in moves:
        total = totals.setdefault(f"{move.source} to {move.target}", {"bytes": 0, "seconds": 0.0})
        total["bytes"] += move.bytes
        total["seconds"] += move.seconds
    return {
        name: total | {"bytes_per_second": total["bytes"] / max(total["seconds"], 1e-9)}
        for name, total in totals.items()
    }


# The loop ---------------------------------------------------------------------------------------------


def to_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics on the host, as plain numbers and lists."""
    return {name: np.asarray(value).tolist() for name, value in jax.device_get(dict(metrics)).items()}


def train_loop(
    step: Step, state: TrainState, updates: int, *, warns: bool = True
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    """Run updates up to number `updates`, and yield the state after each, with its metrics as plain numbers.

    It warns if the sampler's probabilities are not the learner's, unless the caller reads that metric itself.
    """
    warn = make_sampler_warning()
    for update in range(int(state.update) + 1, updates + 1):
        state, metrics = step(state)
        numbers = to_numbers(metrics)
        if warns and "correction" not in numbers:
            warn(numbers.get("sampler_kl", 0.0))
        yield state, {"update": update} | numbers
