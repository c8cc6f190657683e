"""The staged system: the iteration of `loop` on one set of devices, where every stage has the memory to itself.

    rollout   ->  inference: reference, critic  ->  credit  ->  pack  ->  train
       groups are judged on the host, while others generate and while the reference scores (R1)

Between stages the sampler's cache is destroyed and models go where the table of `parallel.offload` has them; the next
stage's moves are under way while this one ends. It is another schedule of the same functions: a run goes through the
same parameters as in `loop`, to the bit where the programs are the same, and to float tolerance where the reference was
scored before packing instead of after it. The run that a step returns has its models at their places of the rollout.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from flowgrpo import loop
from flowgrpo.contracts import Algorithm, Metrics, Policy, Scored
from flowgrpo.learner.critic import Valuation, without_critic
from flowgrpo.learner.scoring import make_score_trajectories, make_score_trees
from flowgrpo.learner.state import LearnerState
from flowgrpo.models.trainable import WHOLE, ActorCritic, Trained, acting
from flowgrpo.parallel.offload import DEVICE, MemoryMeter, Move, Residency, live_bytes
from flowgrpo.parallel.row_sharding import SHARED
from flowgrpo.report.watchdog import Pending, StageWatchdog
from flowgrpo.rollout.judging import Verdict, is_solved, judge_groups, with_rewards
from flowgrpo.rollout.records import Hosted
from flowgrpo.types import BadInput, Batch, Trajectories, map_axis


class RolloutCallbacks(NamedTuple):
    """Callbacks by which a rollout reports how far it is; both return at once."""

    played: Callable[[Trajectories], None]  # all turns are there; outcomes need not be
    ask: Callable[[Pending], None]  # a function that says what is awaited


class JudgedRollout(NamedTuple):
    """A rollout that is judged, with figures and timings of its own."""

    trajectories: Trajectories
    metrics: Mapping[str, Any] = {}
    timings: Mapping[str, Any] = {}
    credited: Callable[[loop.Credit], None] | None = None  # hears what its trajectories got, before the update


RollOut = Callable[[loop.Run, RolloutCallbacks], JudgedRollout]
Step = Callable[[loop.Run], tuple[loop.Run, dict[str, Any]]]


def make_staged(
    policy: Policy,
    algorithm: Algorithm,
    optimizer,
    settings: loop.Settings,
    roll_out: RollOut,
    *,
    banned: tuple[int, ...],
    tools: int,
    longest: int,
    trajectories: int,
    residency: Residency,
    turns: int = 1,
    critic: Valuation | None = None,
    trained: Trained = WHOLE,
    donates: bool = False,
    release: Callable[[], int] = lambda: 0,
    watch: StageWatchdog | None = None,
) -> Step:
    """`step(run) -> (run, metrics)`, as `loop.train_loop` wants it; the figures hold `timings`, which come from clocks.

    There are so many `trajectories` at most, of up to `turns` contexts; the `longest` context has so many tokens.
    `release` destroys what the sampler holds, once all have played. Where models move at all, and with `donates`, the
    run that a step is given is used up: its buffers are deleted where they were, and overwritten by the update.
    """
    kinds: dict[str, Any] = {"critic": critic, "trained": trained, "slots": longest, "banned": banned}
    # The reference is replaced here, where it may lie on the host or the disk.
    learning = loop.make_learning(policy, algorithm._replace(reference_every=None), optimizer, settings, **kinds)
    moves = any(place != DEVICE for row in residency.table.values() for place in row.values())

    def train(learner: LearnerState, rest: loop.Run, batch: Batch) -> tuple:
        # The batch has all that it needs scored, so that no reference is read.
        part = without_critic(trained.take(learner.params))
        after, metrics = learning.update(rest.replace(learner=learner, reference=part), batch)
        return after.learner, after.update, metrics

    packer = partial(learning.packer, longest=longest, trajectories=trajectories, turns=turns)
    return _Staged(
        roll_out=roll_out,
        release=release,
        score_trajectories=_trajectory_scorer(policy, algorithm, settings, critic, banned, longest, packer(ranks=1)),
        credit=jax.jit(learning.credit),
        train=jax.jit(train, donate_argnums=0 if moves or donates else ()),
        describe=jax.jit(partial(loop.rollout_metrics, tools=tools, samples=settings.samples)),
        algorithm=algorithm,
        trained=trained,
        packing=packer(),
        residency=residency,
        moves=moves,
        watch=watch or StageWatchdog(),
        memory_meter=MemoryMeter(),
        pool=ThreadPoolExecutor(1, thread_name_prefix="flowgrpo-inference"),
    )


def compiled_rollout(
    rollout: Callable[[loop.Run], Trajectories],
    verdict: Verdict | None = None,
    *,
    solved: Callable[[Scored], bool] = is_solved,
    judges: int = 2,
    deadline: float = 600.0,
) -> RollOut:
    """That of a pure environment, `make_iteration(...).rollout`; a `verdict` on the host judges it group by group."""
    rollout = jax.jit(rollout)

    def roll_out(run: loop.Run, told: RolloutCallbacks) -> JudgedRollout:
        played: Trajectories = jax.block_until_ready(rollout(run))
        told.played(played)
        if verdict is None:
            return JudgedRollout(played)
        trajectories = jax.device_get(played)
        scored = judge_groups(verdict, trajectories, judges=judges, deadline=deadline, on_start=told.ask)
        return JudgedRollout(with_rewards(trajectories, scored, solved))

    return roll_out


def hosted_rollout(play: Callable[..., Hosted], dense: Callable[[Hosted], Trajectories]) -> RollOut:
    """That of a host environment: `play(run, on_played=..., on_start=...)` as `hosted` has it, `dense` its arrays.

    `dense` must lay out the same trajectories in the same way, whether or not they are judged.
    """

    def roll_out(run: loop.Run, told: RolloutCallbacks) -> JudgedRollout:
        played = play(run, on_played=lambda so_far: told.played(dense(so_far)), on_start=told.ask)
        return JudgedRollout(dense(played), timings={"judging_seconds": played.seconds["judging"]})

    return roll_out


# One iteration ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Staged:
    """The step: functions, settings and resources that its stages share."""

    roll_out: RollOut
    release: Callable[[], int]  # the sampler's memory -> bytes that were freed
    score_trajectories: Callable[..., dict] | None  # (params, reference, trajectories) -> what it scored
    credit: Callable[[Trajectories], loop.Credit]
    train: Callable[..., tuple]  # (learner, rest of the run, batch) -> (learner, update, metrics)
    describe: Callable[[Trajectories, loop.Credit], Metrics]
    algorithm: Algorithm
    trained: Trained
    packing: Callable[..., Batch]  # (trajectories, adv, weights, target=..., skip_no_signal=...)
    residency: Residency
    moves: bool  # the table has a model elsewhere than on the device
    watch: StageWatchdog
    memory_meter: MemoryMeter
    pool: ThreadPoolExecutor

    def __call__(self, run: loop.Run) -> tuple[loop.Run, dict[str, Any]]:
        """All stages, each with its models where they are used."""
        residency, watch, number = self.residency, self.watch, int(run.update) + 1
        with watch.iteration(number), ExitStack() as open_stages:
            # What was away is bound to its device; what was not has to be too, or programs compile twice.
            if self.moves:
                run = jax.tree.map(_bound, run)
            _hold(residency, run)
            residency.enter("rollout")
            rolled, scored, freed = self.play(_found(residency, run), open_stages)
            residency.enter("train")
            trajectories, batch, credit = self.pack(rolled.trajectories, scored)
            if rolled.credited is not None:
                rolled.credited(credit)
            with self.stage("train"):
                run, metrics = self.learn(_found(residency, run), batch)
            residency.enter("rollout")
            fates = loop.count_fates(trajectories, credit, batch, self.algorithm)
            metrics |= self.describe(rolled.trajectories, credit) | fates | _fill(batch) | loop.token_counts(batch)
            run = _found(residency, run)
        timings = {
            **{f"{name}_seconds": seconds for name, seconds in watch.seconds.items()},
            "freed_bytes": freed,
            "moves": summed(residency.moves()),
            "device_bytes": self.memory_meter.take(),
            "device_bytes_by": self.memory_meter.source,
            "pinned_bytes": live_bytes()["pinned"],
        }
        return run, {**metrics, **rolled.metrics, "timings": {**timings, **rolled.timings}}

    def stage(self, name: str) -> ExitStack:
        """A stage that is timed and measured."""
        with ExitStack() as stack:
            stack.enter_context(self.memory_meter.stage(name))
            stack.enter_context(self.watch.stage(name))
            return stack.pop_all()

    def play(self, run: loop.Run, open_stages: ExitStack) -> tuple[JudgedRollout, dict, int]:
        """The rollout, judged; what was scored meanwhile; and the bytes that the sampler gave back."""
        rollout_stage, rewards_stage = (open_stages.enter_context(ExitStack()) for _ in range(2))
        scoring: list[Future] = []

        def played(trajectories: Trajectories) -> None:
            rollout_stage.close()
            rewards_stage.enter_context(self.watch.stage("rewards"))
            scoring.append(self.pool.submit(self.infer, run, trajectories))

        rollout_stage.enter_context(self.stage("rollout"))
        rolled = self.roll_out(run, RolloutCallbacks(played, self.watch.ask))
        rewards_stage.close()
        if not scoring:
            raise BadInput("the rollout did not say that all have played: let it call told.played(trajectories)")
        scored, freed = scoring[0].result()
        return rolled, scored, freed

    def infer(self, run: loop.Run, trajectories: Trajectories) -> tuple[dict, int]:
        """The inference stage, in a thread beside that in which verdicts are awaited."""
        with self.stage("inference"):
            freed = self.release()
            self.residency.enter("inference")
            self.residency.ahead("train")
            if self.score_trajectories is None:
                return {}, freed
            run = _found(self.residency, run)
            reference = self.trained.put(run.learner.params, run.reference)
            return jax.device_get(self.score_trajectories(run.learner.params, reference, trajectories)), freed

    def pack(self, trajectories: Trajectories, scored: dict) -> tuple[Trajectories, Batch, loop.Credit]:
        """Credit, and rows on the host."""
        with self.stage("credit"):
            trajectories = jax.device_get(trajectories).replace(**scored)
            credit = jax.device_get(self.credit(trajectories))
        with self.stage("pack"):
            skips = self.algorithm.skips
            batch = self.packing(trajectories, *credit[:2], target=credit.target, skip_no_signal=skips)
        return trajectories, batch, credit

    def learn(self, run: loop.Run, batch: Batch) -> tuple[loop.Run, Metrics]:
        """The run after its update; the residency holds what became of its models."""
        learner = run.learner
        self.residency.wait()  # for what the update overwrites
        bare = run.replace(learner=None, reference=None)
        learner, update, metrics = jax.block_until_ready(self.train(learner, bare, batch))
        every, reference = self.algorithm.reference_every, run.reference
        if every is not None and int(update) % every == 0:
            reference = jax.tree.map(jnp.copy, without_critic(self.trained.take(learner.params)))
        run = run.replace(learner=learner, reference=reference, update=update)
        _hold(self.residency, run)
        return run, metrics


def is_fresh(trajectories: Trajectories) -> bool:
    """Say whether no context has a second turn; what takes no part in statistics and loss is not asked."""
    if trajectories.begins is None:
        return False
    appends_nt = np.asarray(trajectories.turns) & ~np.asarray(trajectories.begins)
    return not np.any(appends_nt[:, 1:].any(axis=1) & np.asarray(trajectories.valid))


# Pure parts -------------------------------------------------------------------------------------------------


def _trajectory_scorer(
    policy: Policy, algorithm: Algorithm, settings: loop.Settings, critic, banned, longest: int, packing
) -> Callable[..., dict] | None:
    """Build the scoring by reference and critic that the algorithm needs before packing; None if it needs neither.

    The reference alone is scored on what `packing` makes, where that shares what contexts begin with.
    """
    needs = algorithm.needs & {"logp_ref", "value"}
    if not needs:
        return None
    scoring: dict[str, Any] = {"temperature": settings.temperature, "banned": banned}
    scoring |= {"compute_dtype": settings.compute_dtype}
    if loop.shares_prefixes(policy) and needs == {"logp_ref"}:
        score_trees = make_score_trees(policy, packing, **scoring)
        return lambda _params, reference, trajectories: {"logp_ref": score_trees(acting(reference), trajectories)}
    sizes: dict[str, Any] = {"micro_rows": settings.micro_rows, "slots": longest}
    score_trajectories = make_score_trajectories(policy, critic=critic, needs=needs, **scoring, **sizes)
    # Every process reads all of it, where there are several.
    mesh = policy.mesh
    everywhere = NamedSharding(mesh, SHARED) if isinstance(mesh, Mesh) and mesh.is_multi_process else None
    score = jax.jit(
        partial(_score_trajectories, score_trajectories=score_trajectories),
        static_argnames="apart",
        out_shardings=everywhere,
    )
    return lambda params, reference, played: score(params, reference, played, apart=is_fresh(played))


def _score_trajectories(params, reference, trajectories: Trajectories, *, score_trajectories, apart: bool) -> dict:
    """Score trajectories under reference and critic, and collect the fields that were scored.

    With `apart`, contexts that are all rendered afresh are rows of their own, and not parts of longer ones.
    """
    turns_nt = jnp.asarray(trajectories.turns)
    found = score_trajectories(params, reference, turn_by_turn(trajectories) if apart else trajectories)
    scored = {"logp_ref": found.logp_ref, "value": found.value}
    laid = {name: x.reshape(trajectories.tokens.shape) for name, x in scored.items() if x is not None}
    if found.last_value is None:
        return laid
    last_value_n = found.last_value
    if apart:
        last_n = jnp.max(jnp.where(turns_nt, jnp.arange(turns_nt.shape[1])[None, :], 0), axis=1)
        last_value_n = jnp.take_along_axis(last_value_n.reshape(turns_nt.shape), last_n[:, None], axis=1)[:, 0]
    return laid | {"last_value": last_value_n}


def turn_by_turn(trajectories: Trajectories) -> Trajectories:
    """Every turn as a trajectory of its own, all turns of the first before those of the second."""
    count, turns = trajectories.turns.shape
    apart = map_axis(trajectories, "t", lambda x, _: jnp.asarray(x).reshape(count * turns, 1, *x.shape[2:]))
    return map_axis(
        apart, "n", lambda x, _: x if len(x) == count * turns else jnp.repeat(jnp.asarray(x), turns, axis=0)
    )


# The models of a run ----------------------------------------------------------------------------------------


def _hold(residency: Residency, run: loop.Run) -> None:
    """Give every model of the run to the residency, by its name."""
    params = run.learner.params
    models = {"policy": acting(params), "optimizer": run.learner.optimizer, "reference": run.reference}
    if isinstance(params, ActorCritic):
        models["critic"] = params.critic
    for name, tree in models.items():
        residency.hold(name, tree)


def _bound(x: Any) -> Any:
    return jax.device_put(x, x.sharding) if isinstance(x, jax.Array) and not x.committed else x


def _found(residency: Residency, run: loop.Run) -> loop.Run:
    """The run with its models where they are now."""
    params = residency["policy"]
    if isinstance(run.learner.params, ActorCritic):
        params = ActorCritic(params, residency["critic"])
    learner = run.learner.replace(params=params, optimizer=residency["optimizer"])
    return run.replace(learner=learner, reference=residency["reference"])


# Figures ----------------------------------------------------------------------------------------------------


def _fill(batch: Batch) -> dict[str, Any]:
    """Count the rows that hold any tokens, and measure how full those rows are."""
    filled_rs = np.asarray(batch.segments if batch.tree is None else batch.tree.ends) > 0
    used_r = filled_rs.any(axis=1)
    return {"fill_rate": float(filled_rs[used_r].mean()) if used_r.any() else 0.0, "rows": int(used_r.sum())}


def summed(moves: list[Move]) -> dict[str, dict[str, float]]:
    """Bytes, seconds and bytes a second of the moves between each two places."""
    found: dict[str, dict[str, float]] = {}
    for move in moves:
        entry = found.setdefault(f"{move.source} to {move.target}", {"bytes": 0, "seconds": 0.0})
        entry["bytes"] += move.bytes
        entry["seconds"] += move.seconds
    return {name: one | {"bytes_per_second": one["bytes"] / max(one["seconds"], 1e-9)} for name, one in found.items()}
