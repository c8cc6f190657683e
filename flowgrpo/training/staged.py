"""The staged iteration: that of `loop` on one set of devices, with the memory given to one stage after the other.

    rollout  ->  inference: reference, critic  ->  advantages  ->  pack  ->  train
       groups are judged on the host, while others are sampled and while the reference scores (R1)

Between stages the sampler's cache is destroyed and models are moved as the table of `parallel.offload` has it; the
moves for the next stage run while this one ends. It is another schedule of the same functions: the parameters are
those of `loop`, bit for bit if the programs are the same, and to float tolerance if the reference is scored before
packing instead of after it. The state that a step returns has its models where the rollout needs them.

`make_staged_step` makes the step; its rollout is `compiled_rollout` or `hosted_rollout`.
"""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from flowgrpo.contracts import Algorithm, Policy, RewardResult
from flowgrpo.learner.critic import ValueModel, without_critic
from flowgrpo.learner.scoring import make_score_trajectories, make_score_trees
from flowgrpo.learner.state import LearnerState
from flowgrpo.learner.update import ScoreSettings
from flowgrpo.models.trainable import ALL_PARAMS, ActorCritic, TrainableSubset, actor_params
from flowgrpo.parallel.offload import DEVICE, HostOffloader, MemoryMeter, Move, live_bytes
from flowgrpo.parallel.row_sharding import REPLICATED
from flowgrpo.report.watchdog import Pending, StageWatchdog
from flowgrpo.rollout import judging
from flowgrpo.rollout.judging import GroupReward, judge_groups, with_reward_results
from flowgrpo.rollout.records import RolloutResult
from flowgrpo.training import loop
from flowgrpo.types import BadInput, Batch, Metrics, Trajectories, map_axis


class RolloutCallbacks(NamedTuple):
    """What a rollout calls while it runs; both return at once."""

    on_all_sampled: Callable[[Trajectories], None]  # once, when all turns are there; outcomes may be missing
    on_start: Callable[[Pending], None]  # with a function that lists what the rollout waits for


class JudgedRollout(NamedTuple):
    """Trajectories with their outcomes, and metrics and timings of the rollout."""

    trajectories: Trajectories
    metrics: Mapping[str, Any] = {}
    timings: Mapping[str, Any] = {}
    on_advantages: Callable[[loop.Advantages], None] | None = None  # called before the update


Rollout = Callable[[loop.TrainState, RolloutCallbacks], JudgedRollout]
Step = Callable[[loop.TrainState], tuple[loop.TrainState, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class StagedSettings:
    """Sizes of a staged iteration, and what it may use up.

    Args:
        iteration: sizes of the update.
        banned: tokens that the policy cannot sample.
        tools: number of tools of the environment, for metrics.
        trajectories: number of trajectories of an update, at most.
        turns: number of contexts per trajectory, at most; 1 if contexts are extended from turn to turn.
        max_trajectory_tokens: tokens of the longest trajectory, or of the longest context if none is extended.
        trainable: subset of the parameters that the optimizer changes.
        donates: whether the update overwrites parameters and optimizer state of the state it is given. It does so
            anyway if the offloader moves any model.
        watch_seconds: an iteration that takes longer reports what it waits for; None: never.
    """

    iteration: loop.Settings
    banned: tuple[int, ...]
    tools: int
    trajectories: int
    max_trajectory_tokens: int
    turns: int = 1
    trainable: TrainableSubset = ALL_PARAMS
    donates: bool = False
    watch_seconds: float | None = None


def make_staged_step(
    policy: Policy,
    algorithm: Algorithm,
    optimizer,
    rollout: Rollout,
    offloader: HostOffloader,
    settings: StagedSettings,
    *,
    critic: ValueModel | None = None,
    release: Callable[[], int] = lambda: 0,
) -> "StagedStep":
    """A staged iteration as `step(state) -> (state, metrics)` for `loop.train_loop`; its metrics hold `timings`.

    Args:
        offloader: knows where each model is in each stage, and moves it.
        critic: value function, of algorithms with targets.
        release: frees the sampler's memory when all trajectories are sampled -> number of bytes.
    """
    trainable, sizes = settings.trainable, settings.iteration
    stages = loop.make_update_stages(
        policy,
        algorithm._replace(reference_every=None),  # `StagedStep` replaces it, as it may be on the host or the disk
        optimizer,
        sizes,
        banned=settings.banned,
        critic=critic,
        trainable=trainable,
        slots=settings.max_trajectory_tokens,
    )
    moves = any(place != DEVICE for row in offloader.table.values() for place in row.values())

    def train(learner: LearnerState, bare_state: loop.TrainState, batch: Batch) -> tuple:
        # Everything that the loss needs is in the batch, so the reference is not read.
        part = without_critic(trainable.split(learner.params))
        after, metrics = stages.update(bare_state.replace(learner=learner, reference=part), batch)
        return after.learner, after.update, metrics

    pack = partial(
        stages.packer,
        max_trajectory_tokens=settings.max_trajectory_tokens,
        trajectories=settings.trajectories,
        turns=settings.turns,
    )
    return StagedStep(
        rollout=rollout,
        release=release,
        score_trajectories=_make_scorer(policy, algorithm, critic, settings, pack(ranks=1)),
        compute_advantages=jax.jit(stages.compute_advantages),
        train=jax.jit(train, donate_argnums=0 if moves or settings.donates else ()),
        metrics_of=jax.jit(partial(loop.rollout_metrics, tools=settings.tools, samples=sizes.samples)),
        algorithm=algorithm,
        trainable=trainable,
        packing=pack(),
        offloader=offloader,
        moves=moves,
        watch=StageWatchdog(settings.watch_seconds),
        memory_meter=MemoryMeter(),
        pool=ThreadPoolExecutor(1, thread_name_prefix="flowgrpo-inference"),
    )


@dataclass(frozen=True, eq=False)
class StagedStep:
    """A staged iteration, as `step(state) -> (state, metrics)`."""

    rollout: Rollout
    release: Callable[[], int]  # frees the sampler's memory -> number of bytes
    score_trajectories: Callable[..., dict] | None  # (params, reference, trajectories) -> the fields that it scored
    compute_advantages: Callable[[Trajectories], loop.Advantages]
    train: Callable[..., tuple]  # (learner, state without models, batch) -> (learner, update, metrics)
    metrics_of: Callable[[Trajectories, loop.Advantages], Metrics]
    algorithm: Algorithm
    trainable: TrainableSubset
    packing: Callable[..., Batch]  # (trajectories, adv, weights, target=..., skip_no_signal=...)
    offloader: HostOffloader
    moves: bool  # whether the table has a model elsewhere than on the device
    watch: StageWatchdog
    memory_meter: MemoryMeter
    pool: ThreadPoolExecutor  # of the inference stage

    def __call__(self, state: loop.TrainState) -> tuple[loop.TrainState, dict[str, Any]]:
        """Run all stages, each with its models on the device."""
        offloader, watch, scored_parts = self.offloader, self.watch, []
        with watch.iteration(int(state.update) + 1), ExitStack() as iteration:
            if self.moves:  # what comes back is bound to its device; the rest must be too, or programs compile twice
                state = jax.tree.map(_bind_to_device, state)
            _put_models(offloader, state)
            offloader.enter("rollout")
            state = _with_models(offloader, state)

            # Rollout. Once all is sampled, the reference scores in a thread, while the last groups are judged here.
            sampling, judging_rewards = (iteration.enter_context(ExitStack()) for _ in range(2))

            def on_all_sampled(trajectories: Trajectories) -> None:
                sampling.close()
                judging_rewards.enter_context(watch.stage("rewards"))
                scored_parts.append(self.pool.submit(self.infer, state, trajectories))

            sampling.enter_context(self.stage("rollout"))
            rollout = self.rollout(state, RolloutCallbacks(on_all_sampled, watch.add_pending))
            judging_rewards.close()
            if not scored_parts:
                raise BadInput(
                    "the rollout ended without a call of callbacks.on_all_sampled(trajectories): call it when all "
                    "turns are there"
                )
            scored, freed_bytes = scored_parts[0].result()
            offloader.enter("train")

            with self.stage("advantages"):
                trajectories = jax.device_get(rollout.trajectories).replace(**scored)
                advantages = jax.device_get(self.compute_advantages(trajectories))
            with self.stage("pack"):
                batch = self.packing(
                    trajectories,
                    advantages.adv,
                    advantages.weights,
                    target=advantages.target,
                    skip_no_signal=self.algorithm.skips_zero_advantage,
                )
            if rollout.on_advantages is not None:
                rollout.on_advantages(advantages)
            with self.stage("train"):
                state, metrics = self.update(_with_models(offloader, state), batch)

            offloader.enter("rollout")
            metrics |= self.metrics_of(rollout.trajectories, advantages)
            metrics |= loop.count_token_fates(trajectories, advantages, batch, self.algorithm)
            metrics |= row_metrics(batch) | loop.token_counts(batch)
            state = _with_models(offloader, state)
        timings = {
            **{f"{name}_seconds": seconds for name, seconds in watch.seconds.items()},
            "freed_bytes": freed_bytes,
            "moves": summarise_moves(offloader.pop_moves()),
            "device_bytes": self.memory_meter.pop_peaks(),
            "device_bytes_by": self.memory_meter.source,
            "pinned_bytes": live_bytes()["pinned"],
        }
        return state, {**metrics, **rollout.metrics, "timings": {**timings, **rollout.timings}}

    def infer(self, state: loop.TrainState, trajectories: Trajectories) -> tuple[dict, int]:
        """Free the sampler's memory and score by reference and critic -> the scored fields, and the bytes freed."""
        with self.stage("inference"):
            freed_bytes = self.release()
            self.offloader.enter("inference")
            self.offloader.prefetch("train")
            if self.score_trajectories is None:
                return {}, freed_bytes
            state = _with_models(self.offloader, state)
            reference = self.trainable.merge(state.learner.params, state.reference)
            return jax.device_get(self.score_trajectories(state.learner.params, reference, trajectories)), freed_bytes

    def update(self, state: loop.TrainState, batch: Batch) -> tuple[loop.TrainState, Metrics]:
        """Update on a batch, and hand the new models to the offloader."""
        learner, reference, interval = state.learner, state.reference, self.algorithm.reference_every
        self.offloader.wait()  # for copies of what the update overwrites
        bare_state = state.replace(learner=None, reference=None)
        learner, update, metrics = jax.block_until_ready(self.train(learner, bare_state, batch))
        if interval is not None and int(update) % interval == 0:
            reference = jax.tree.map(jnp.copy, without_critic(self.trainable.split(learner.params)))
        state = state.replace(learner=learner, reference=reference, update=update)
        _put_models(self.offloader, state)
        return state, metrics

    def stage(self, name: str) -> ExitStack:
        """A context in which a stage is timed, and its memory measured."""
        with ExitStack() as stack:
            stack.enter_context(self.memory_meter.stage(name))
            stack.enter_context(self.watch.stage(name))
            return stack.pop_all()


# Rollouts ---------------------------------------------------------------------------------------------------


def compiled_rollout(
    rollout: Callable[[loop.TrainState], Trajectories],
    reward: GroupReward | None = None,
    *,
    is_solved: Callable[[RewardResult], bool] = judging.is_solved,
    judges: int = 2,
    deadline: float = 600.0,
) -> Rollout:
    """The rollout of a pure environment, `make_iteration(...).rollout`, for `make_staged_step`.

    Args:
        reward: judges a group on the host; None: the outcome is the environment's.
        is_solved: whether a result counts as success.
        judges: number of groups judged at a time.
        deadline: seconds for a group.
    """
    rollout = jax.jit(rollout)

    def run(state: loop.TrainState, callbacks: RolloutCallbacks) -> JudgedRollout:
        sampled: Trajectories = jax.block_until_ready(rollout(state))
        callbacks.on_all_sampled(sampled)
        if reward is None:
            return JudgedRollout(sampled)
        trajectories = jax.device_get(sampled)
        results = judge_groups(reward, trajectories, judges=judges, deadline=deadline, on_start=callbacks.on_start)
        return JudgedRollout(with_reward_results(trajectories, results, is_solved))

    return run


def hosted_rollout(
    roll_out: Callable[..., RolloutResult], to_arrays: Callable[[RolloutResult], Trajectories]
) -> Rollout:
    """The rollout of a host environment, for `make_staged_step`.

    Args:
        roll_out: `roll_out(state, on_all_sampled=..., on_start=...)`, with the callbacks of `hosted`.
        to_arrays: collates the trajectories, in the same way whether or not they are judged.
    """

    def run(state: loop.TrainState, callbacks: RolloutCallbacks) -> JudgedRollout:
        result = roll_out(
            state,
            on_all_sampled=lambda so_far: callbacks.on_all_sampled(to_arrays(so_far)),
            on_start=callbacks.on_start,
        )
        return JudgedRollout(to_arrays(result), timings={"judging_seconds": result.seconds["judging"]})

    return run


# Scoring by reference and critic ----------------------------------------------------------------------------


def _make_scorer(
    policy: Policy, algorithm: Algorithm, critic: ValueModel | None, settings: StagedSettings, packing
) -> Callable[..., dict] | None:
    """Scoring by reference and critic before packing, as far as the algorithm needs it; None if it needs neither.

    The reference alone is scored on what `packing` makes, if that shares the prefixes of contexts.
    """
    needs = algorithm.needs & {"logp_ref", "value"}
    if not needs:
        return None
    sizes = settings.iteration
    scoring: dict[str, Any] = {
        "temperature": sizes.temperature,
        "banned": settings.banned,
        "compute_dtype": sizes.compute_dtype,
    }
    if loop.shares_prefixes(policy) and needs == {"logp_ref"}:
        score_trees = make_score_trees(policy, packing, **scoring)
        return lambda _params, reference, trajectories: {"logp_ref": score_trees(actor_params(reference), trajectories)}
    score_trajectories = make_score_trajectories(
        policy,
        needs=needs,
        critic=critic,
        settings=ScoreSettings(**scoring),
        micro_rows=sizes.micro_rows,
        slots=settings.max_trajectory_tokens,
    )
    # If there are several processes, each of them reads all results.
    mesh = policy.mesh
    replicated = NamedSharding(mesh, REPLICATED) if isinstance(mesh, Mesh) and mesh.is_multi_process else None
    score = jax.jit(
        partial(_score_fields, score_trajectories=score_trajectories),
        static_argnames="by_turn",
        out_shardings=replicated,
    )
    return lambda params, reference, trajectories: score(
        params, reference, trajectories, by_turn=has_fresh_contexts(trajectories)
    )


def _score_fields(params, reference, trajectories: Trajectories, *, score_trajectories, by_turn: bool) -> dict:
    """Score trajectories by reference and critic -> the fields that were scored.

    With `by_turn`, every turn is a row of its own: each of its contexts is rendered afresh, and none extends another.
    """
    turns_nt = jnp.asarray(trajectories.turns)
    scored = score_trajectories(params, reference, split_turns(trajectories) if by_turn else trajectories)
    scores = {"logp_ref": scored.logp_ref, "value": scored.value}
    fields = {name: x.reshape(trajectories.tokens.shape) for name, x in scores.items() if x is not None}
    if scored.last_value is None:
        return fields
    last_value_n = scored.last_value
    if by_turn:
        last_n = jnp.max(jnp.where(turns_nt, jnp.arange(turns_nt.shape[1])[None, :], 0), axis=1)
        last_value_n = jnp.take_along_axis(last_value_n.reshape(turns_nt.shape), last_n[:, None], axis=1)[:, 0]
    return fields | {"last_value": last_value_n}


def has_fresh_contexts(trajectories: Trajectories) -> bool:
    """Whether every turn of the valid trajectories has a context of its own, rendered afresh."""
    if trajectories.starts_context is None:
        return False
    extends_nt = np.asarray(trajectories.turns) & ~np.asarray(trajectories.starts_context)
    return not np.any(extends_nt[:, 1:].any(axis=1) & np.asarray(trajectories.valid))


def split_turns(trajectories: Trajectories) -> Trajectories:
    """Every turn as a trajectory of its own, all turns of the first before those of the second."""
    count, turns = trajectories.turns.shape
    split = map_axis(trajectories, "t", lambda x, _: jnp.asarray(x).reshape(count * turns, 1, *x.shape[2:]))
    return map_axis(
        split, "n", lambda x, _: x if len(x) == count * turns else jnp.repeat(jnp.asarray(x), turns, axis=0)
    )


# Models and their places ------------------------------------------------------------------------------------


def _bind_to_device(x: Any) -> Any:
    return jax.device_put(x, x.sharding) if isinstance(x, jax.Array) and not x.committed else x


def _put_models(offloader: HostOffloader, state: loop.TrainState) -> None:
    """Hand every model of the state to the offloader, by its name."""
    params = state.learner.params
    models = {"policy": actor_params(params), "optimizer": state.learner.optimizer, "reference": state.reference}
    if isinstance(params, ActorCritic):
        models["critic"] = params.critic
    for name, tree in models.items():
        offloader.put(name, tree)


def _with_models(offloader: HostOffloader, state: loop.TrainState) -> loop.TrainState:
    """The state with its models where they are now."""
    params = offloader["policy"]
    if isinstance(state.learner.params, ActorCritic):
        params = ActorCritic(params, offloader["critic"])
    learner = state.learner.replace(params=params, optimizer=offloader["optimizer"])
    return state.replace(learner=learner, reference=offloader["reference"])


# Metrics ----------------------------------------------------------------------------------------------------


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
