"""The single-process loop: the oracle that every other schedule is tested against.

    rollout -> appraise -> advantages, weights, targets -> pack -> update,  again and again

An iteration is three programs with packing on the host between them, or one program that can be scanned over updates
and vmapped over seeds; both give the same numbers (F3). Everything an iteration draws comes from
`fold_in(seed, update)`, so a run that goes on from a saved state goes on exactly as it would have (S1).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from flowgrpo.contracts import Algorithm, Env, Metrics, Policy
from flowgrpo.envs.env import PAD
from flowgrpo.layouts import rows_by_trajectory
from flowgrpo.learner.appraise import Appraise, make_appraise
from flowgrpo.learner.critic import Valuation, acting, explained_variance, make_value_score, without_critic
from flowgrpo.learner.state import LearnerState, init_learner
from flowgrpo.learner.trained import WHOLE, Trained
from flowgrpo.learner.update import cast, make_update
from flowgrpo.learner.watch import signal
from flowgrpo.many import many_updates, over_runs, stack
from flowgrpo.packing import account, pack
from flowgrpo.rollout.compiled import Rollout, make_rollout, repeat
from flowgrpo.rollout.exam import draw_tasks, summarise, tool_mix
from flowgrpo.spread import Spread
from flowgrpo.types import BadInput, Batch, Trajectories, check_range


@dataclass(frozen=True)
class Settings:
    """How much is rolled out in an iteration, and how it is learned from.

        queries         tasks of an update
        samples         trajectories of each query: the group
        oversample      times as many queries are rolled out; an update takes groups with a signal first
        temperature     of sampling, and of scoring what was sampled
        micro_rows      rows that are scored together: less memory with fewer, the same numbers
        mini_batches    parts of the batch, each with an optimizer step of its own
        epochs          times that the batch is gone through
        block           trajectories that roll out together; None: all
        compute_dtype   what parameters are cast to where they are used; None: their own

    An update learns from `queries * samples` trajectories.
    """

    queries: int = 32
    samples: int = 8
    oversample: int = 1
    temperature: float = 1.0
    micro_rows: int = 16
    mini_batches: int = 1
    epochs: int = 1
    block: int | None = None
    compute_dtype: Any = None

    def __post_init__(self):
        for name in ("queries", "samples", "oversample", "micro_rows", "mini_batches", "epochs", "block"):
            check_range("Settings", name, getattr(self, name), 1, whole=True, optional=name == "block")
        check_range("Settings", "temperature", self.temperature, 0.0, exclusive=True)


class Run(struct.PyTreeNode):
    """All that changes from update to update: what a checkpoint holds."""

    learner: LearnerState
    reference: Any  # the frozen part of the KL term: `trained.put(learner.params, reference)` is the whole reference
    key: Array  # of the whole run; never consumed, only folded
    update: Array  # how many were made; the cursor of tasks and keys


def start_run(params, optimizer, key: Array, *, reference=None, trained: Trained = WHOLE) -> Run:
    """The run before its first update; the reference is a copy of its start, unless another part is given."""
    if reference is None:
        reference = jax.tree.map(jnp.copy, without_critic(trained.take(params)))
    return Run(init_learner(params, optimizer, trained), reference, key, jnp.int32(0))


class Credit(NamedTuple):
    """Advantages, weights and targets that an algorithm computes from trajectories."""

    adv: Array
    weights: Array
    target: Array | None = None  # where there is a critic


class Learning(NamedTuple):
    """Stages of an iteration after its rollout, wherever that came from; pure, to be jitted by the caller."""

    appraise: Callable[[Run, Trajectories], Trajectories]  # scores what advantages read
    credit: Callable[[Trajectories], Credit]
    update: Callable[[Run, Batch], tuple[Run, Metrics]]


class Iteration(NamedTuple):
    """The stages of one update, bound to environment, policy and algorithm; pure, to be jitted by the caller."""

    rollout: Callable[[Run], Rollout]  # judged
    appraise: Callable[[Run, Trajectories], Trajectories]
    credit: Callable[[Trajectories], Credit]
    update: Callable[[Run, Batch], tuple[Run, Metrics]]
    lay_out: Callable[..., Batch]  # (trajectories, *credit) -> rows, in a way that compiles


Judge = Callable[[Trajectories, Array], Trajectories]  # (trajectories, key) -> the same with another outcome


def make_iteration(
    env: Env,
    policy: Policy,
    algorithm: Algorithm,
    optimizer,
    settings: Settings,
    *,
    judge: Judge | None = None,
    critic: Valuation | None = None,
    trained: Trained = WHOLE,
    mesh: Spread = None,
) -> Iteration:
    """The stages of an iteration; without a `judge` the outcome is what the environment paid.

    Over a `mesh` trajectories are rolled out and learned from on all its devices, each of which takes its share.
    """
    if algorithm.name == "gigpo" and env.anchor is Env._field_defaults["anchor"]:
        raise BadInput(f"gigpo compares turns of equal states, but {env.name} has no anchor: give it one")
    rollout = make_rollout(env, policy, temperature=settings.temperature, block=settings.block, mesh=mesh)
    slots = longest(env)
    rest = {"banned": (PAD,), "critic": critic, "trained": trained, "slots": slots, "mesh": mesh}
    learning = make_learning(policy, algorithm, optimizer, settings, **rest)
    return Iteration(
        rollout=partial(_roll_out, env=env, rollout=rollout, judge=judge, settings=settings),
        lay_out=partial(_lay_out, slots=slots, skips=algorithm.skips),
        **learning._asdict(),
    )


def make_learning(
    policy: Policy,
    algorithm: Algorithm,
    optimizer,
    settings: Settings,
    *,
    banned: tuple[int, ...],
    critic: Valuation | None = None,
    trained: Trained = WHOLE,
    slots: int | None = None,
    mesh: Spread = None,
) -> Learning:
    """The stages after the rollout, of trajectories of at most so many `slots`; targets need a `critic`."""
    if algorithm.targets is not None and critic is None:
        raise BadInput(f"{algorithm.name} needs a critic: pass one as critic=, such as critic.own_network(...)")
    if algorithm.whole == "group" and settings.mini_batches > 1:
        raise BadInput(f"{algorithm.name} needs its groups whole, and packing parts them: set mini_batches to 1")
    if "F4" in algorithm.keeps and settings.samples == 1:
        raise BadInput(
            f"{algorithm.name} learns nothing from groups of one: Settings.samples is 1, set it to 2 or more"
        )
    critic = None if algorithm.targets is None else critic
    scoring: dict[str, Any] = {"temperature": settings.temperature, "banned": banned}
    sizes: dict[str, Any] = {"micro_rows": settings.micro_rows, "compute_dtype": settings.compute_dtype, "mesh": mesh}
    # What has to be scored before the advantages is scored once, for them and for the loss.
    needs = algorithm.needs & {"logp_ref", "value"} if algorithm.before else frozenset()
    learn = make_update(
        policy,
        algorithm,
        optimizer,
        mini_batches=settings.mini_batches,
        epochs=settings.epochs,
        score=None if critic is None else make_value_score(policy, critic, **scoring),
        trained=trained,
        **scoring,
        **sizes,
    )
    appraise = make_appraise(policy, critic=critic, needs=needs, slots=slots, **scoring, **sizes) if needs else None
    return Learning(
        appraise=partial(_appraise, appraise=appraise, trained=trained),
        credit=partial(_credit, algorithm=algorithm, settings=settings),
        update=partial(_update, learn=learn, every=algorithm.reference_every, trained=trained),
    )


def longest(env: Env) -> int:
    """Tokens of the longest possible trajectory."""
    sizes = env.sizes
    return sizes.prompt + (sizes.turns - 1) * sizes.observation + sizes.turns * sizes.action


# The stages -------------------------------------------------------------------------------------------


def _roll_out(run: Run, *, env: Env, rollout, judge: Judge | None, settings: Settings) -> Rollout:
    task_key, sample_key, judge_key = jax.random.split(jax.random.fold_in(run.key, run.update), 3)
    queries = settings.queries * settings.oversample
    tasks, group_n = repeat(draw_tasks(env, task_key, queries, "train"), settings.samples)
    keys = jax.random.split(sample_key, len(group_n))
    played = rollout(sampled(run.learner.params, settings.compute_dtype), tasks, keys, group_n, run.learner.version)
    return played if judge is None else played.replace(trajectories=judge(played.trajectories, judge_key))


def sampled(params: Any, compute_dtype: Any) -> Any:
    """The parameters that rollouts sample from: those of the policy, as the update scores with them (F7)."""
    return acting(params) if compute_dtype is None else cast(acting(params), compute_dtype)


def _appraise(run: Run, trajectories: Trajectories, *, appraise: Appraise | None, trained: Trained) -> Trajectories:
    if appraise is None:
        return trajectories
    params = run.learner.params
    return appraise(params, trained.put(params, run.reference), trajectories)


def _credit(trajectories: Trajectories, *, algorithm: Algorithm, settings: Settings) -> Credit:
    """Advantages, weights and targets, of at most `queries` groups: those with a signal first."""
    adv = algorithm.advantages(trajectories)
    if settings.oversample > 1:
        signal_n = (adv != 0).reshape(len(adv), -1).any(axis=1).reshape(-1, settings.samples).any(axis=1)
        rank_g = jnp.argsort(jnp.argsort(~signal_n, stable=True))
        taken_n = jnp.repeat(rank_g < settings.queries, settings.samples)
        # A trajectory of no turns takes no part in statistics or loss.
        trajectories = trajectories.replace(turns=trajectories.turns & taken_n[:, None])
        adv = algorithm.advantages(trajectories)
    target = None if algorithm.targets is None else algorithm.targets(trajectories)
    return Credit(adv, algorithm.weights(trajectories), target)


def _update(run: Run, batch: Batch, *, learn, every: int | None, trained: Trained) -> tuple[Run, Metrics]:
    learner, metrics = learn(run.learner, batch, trained.put(run.learner.params, run.reference))
    reference = run.reference
    if every is not None:
        fresh = (run.update + 1) % every == 0
        now = without_critic(trained.take(learner.params))
        reference = jax.tree.map(partial(jnp.where, fresh), now, reference)
    run = run.replace(learner=learner, reference=reference, update=run.update + 1)
    return run, metrics | explained_variance(batch)


def _lay_out(trajectories: Trajectories, adv, weights, target=None, *, slots: int, skips: bool) -> Batch:
    """One trajectory a row, without slots that no trajectory can fill.

    Where a zero advantage gives a zero gradient, such trajectories weigh nothing, as `pack` leaves them out.
    """
    if skips:
        signal_n = (adv != 0).reshape(len(adv), -1).any(axis=1)
        weights = jnp.where(signal_n.reshape(-1, *(1,) * (weights.ndim - 1)), weights, 0.0)
    return jax.tree.map(lambda x_rs: x_rs[:, :slots], rows_by_trajectory(trajectories, adv, weights, target))


# Put together -----------------------------------------------------------------------------------------


def one_program(iteration: Iteration, env: Env, settings: Settings) -> Callable[[Run], tuple[Run, Metrics]]:
    """A whole iteration as one pure function: jit it, scan it over updates, vmap it over seeds."""
    return partial(_one_program, iteration=iteration, env=env, settings=settings)


def _one_program(run: Run, *, iteration: Iteration, env: Env, settings: Settings) -> tuple[Run, Metrics]:
    rollout = iteration.rollout(run)
    trajectories = iteration.appraise(run, rollout.trajectories)
    credit = iteration.credit(trajectories)
    run, metrics = iteration.update(run, iteration.lay_out(trajectories, *credit))
    return run, metrics | _describe(rollout, credit, tools=len(env.tools), samples=settings.samples)


def three_programs(
    iteration: Iteration, env: Env, algorithm: Algorithm, settings: Settings, *, row_length: int | None = None
) -> Callable[[Run], tuple[Run, Metrics]]:
    """Build `step(run)`: a whole iteration, with packing on the host between programs that are each compiled once."""
    learn = make_learn(
        Learning(iteration.appraise, iteration.credit, iteration.update),
        algorithm,
        tools=len(env.tools),
        samples=settings.samples,
        row_length=row_length or longest(env),
        rows=settings.queries * settings.samples,
        ranks=settings.mini_batches,
    )
    return partial(_three_programs, rollout=jax.jit(iteration.rollout), learn=learn)


def _three_programs(run: Run, *, rollout, learn) -> tuple[Run, Metrics]:
    return learn(run, rollout(run))


def make_learn(
    learning: Learning, algorithm: Algorithm, *, tools: int, samples: int, row_length: int, rows: int, ranks: int = 1
) -> Callable[[Run, Rollout], tuple[Run, Metrics]]:
    """`learn(run, rollout)`: appraisal, credit, packing on the host into at most so many rows, update, figures of all.

    `ranks` is the number of mini-batches, over which `pack` deals the trajectories.
    """
    describe = jax.jit(partial(_describe, tools=tools, samples=samples))
    sizes = {"row_length": row_length, "rows": rows + -rows % ranks, "ranks": ranks}
    stages = Learning(*(jax.jit(stage) for stage in learning))
    return partial(_learn, stages=stages, describe=describe, algorithm=algorithm, sizes=sizes)


def _describe(rollout: Rollout, credit: Credit, *, tools: int, samples: int) -> Metrics:
    """Figures of all that was rolled out, so that its advantages are those before packing left any out."""
    figures = summarise(rollout, samples=samples) | {"tool_calls": tool_mix(rollout, tools)}
    return figures | signal(rollout.trajectories, credit.adv, credit.weights)


def _learn(run: Run, rollout: Rollout, *, stages: Learning, describe, algorithm, sizes) -> tuple[Run, Metrics]:
    played = stages.appraise(run, rollout.trajectories) if algorithm.before else rollout.trajectories
    credit = jax.device_get(stages.credit(played))
    trajectories = jax.device_get(played)
    batch = pack(trajectories, *credit[:2], **sizes, target=credit.target, skip_no_signal=algorithm.skips)
    run, metrics = stages.update(run, batch)
    ledger = account(trajectories, credit.weights, batch, adv=credit.adv if algorithm.skips else None)
    fates = {f"tokens_{fate.name.lower()}": count for fate, count in ledger.fates.items()}
    return run, metrics | describe(rollout, credit) | fates


def train(step: Callable[[Run], tuple[Run, Metrics]], run: Run, updates: int) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Run after run until `updates` are done, with the numbers of each on the host."""
    while int(run.update) < updates:
        run, metrics = step(run)
        yield run, {"update": int(run.update)} | to_host(metrics)


def to_host(metrics: Metrics) -> dict[str, Any]:
    """Numbers and lists of numbers."""
    return {name: np.asarray(value).tolist() for name, value in jax.device_get(metrics).items()}


def train_many(
    step: Callable[[Run], tuple[Run, Metrics]],
    runs: Sequence[Run],
    updates: int,
    *,
    lanes: int | None = None,
    mesh: Spread = None,
) -> tuple[Run, dict[str, np.ndarray]]:
    """So many updates of several runs at once, seeds for instance: `step` is that of `one_program`, not yet jitted.

    Gives the runs stacked into one, and every figure as [run, update]. It is one program, scanned over the updates;
    `many.over_runs` says what lanes and a mesh are.
    """
    whole = over_runs(partial(many_updates, step, updates=updates), lanes=lanes, mesh=mesh)
    after, metrics = jax.jit(whole)(stack(runs))
    return after, {name: np.asarray(value) for name, value in jax.device_get(metrics).items()}
