"""The single-process loop: the oracle that every other schedule is tested against.

    rollout -> advantages, weights -> pack -> update,  again and again

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
from jax.sharding import Mesh

from flowgrpo import masked
from flowgrpo.contracts import Algorithm, Env, Metrics, Policy
from flowgrpo.envs.env import PAD
from flowgrpo.layouts import filled, rows_by_trajectory
from flowgrpo.learner.state import LearnerState, init_learner
from flowgrpo.learner.update import make_update
from flowgrpo.packing import account, pack
from flowgrpo.rollout.compiled import Rollout, make_rollout, repeat
from flowgrpo.types import BadInput, Batch, Trajectories


@dataclass(frozen=True)
class Settings:
    """How much is rolled out in an iteration, and how it is learned from."""

    queries: int = 32
    samples: int = 8  # trajectories of each query: the group
    oversample: int = 1  # times as many queries are rolled out; an update takes groups with a signal first
    temperature: float = 1.0
    micro_rows: int = 16  # rows that are scored together
    mini_batches: int = 1
    epochs: int = 1
    block: int | None = None  # trajectories that roll out together

    def __post_init__(self):
        for name in ("queries", "samples", "oversample", "micro_rows", "mini_batches", "epochs"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}, but must be at least 1")


class Run(struct.PyTreeNode):
    """All that changes from update to update: what a checkpoint holds."""

    learner: LearnerState
    reference: Any  # the frozen parameters of the KL term
    key: Array  # of the whole run; never consumed, only folded
    update: Array  # how many were made; the cursor of tasks and keys


def start_run(params, optimizer, key: Array, *, reference=None) -> Run:
    """The run before its first update; the reference is a copy of its start, unless another is given."""
    reference = jax.tree.map(jnp.copy, params) if reference is None else reference
    return Run(init_learner(params, optimizer), reference, key, jnp.int32(0))


class Iteration(NamedTuple):
    """The stages of one update, bound to environment, policy and algorithm; pure, to be jitted by the caller."""

    rollout: Callable[[Run], Rollout]  # judged
    credit: "Credit"
    update: "Update"
    lay_out: Callable[[Trajectories, Array, Array], Batch]  # rows, in a way that compiles


Judge = Callable[[Trajectories, Array], Trajectories]  # (trajectories, key) -> the same with another outcome


def make_iteration(
    env: Env,
    policy: Policy,
    algorithm: Algorithm,
    optimizer,
    settings: Settings,
    *,
    judge: Judge | None = None,
    mesh: Mesh | None = None,
) -> Iteration:
    """The stages of an iteration; without a `judge` the outcome is what the environment paid.

    Over a `mesh` trajectories are rolled out and learned from on all its devices, each of which takes its share.
    """
    rollout = make_rollout(env, policy, temperature=settings.temperature, block=settings.block, mesh=mesh)
    credit, update = make_learning(policy, algorithm, optimizer, settings, banned=(PAD,), mesh=mesh)
    return Iteration(
        rollout=partial(_roll_out, env=env, rollout=rollout, judge=judge, settings=settings),
        credit=credit,
        update=update,
        lay_out=partial(_lay_out, slots=longest(env)),
    )


Credit = Callable[[Trajectories], tuple[Array, Array]]  # -> advantages, weights
Update = Callable[["Run", Batch], tuple["Run", Metrics]]


def make_learning(
    policy: Policy,
    algorithm: Algorithm,
    optimizer,
    settings: Settings,
    *,
    banned: tuple[int, ...],
    mesh: Mesh | None = None,
) -> tuple[Credit, Update]:
    """What an iteration does after its rollout, wherever that came from; both pure, to be jitted by the caller."""
    if algorithm.targets is not None:
        raise BadInput(f"{algorithm.name} needs a critic, which this loop does not train: choose another algorithm")
    learn = make_update(
        policy,
        algorithm,
        optimizer,
        temperature=settings.temperature,
        banned=banned,
        micro_rows=settings.micro_rows,
        mini_batches=settings.mini_batches,
        epochs=settings.epochs,
        mesh=mesh,
    )
    credit = partial(_credit, algorithm=algorithm, settings=settings)
    return credit, partial(_update, learn=learn, every=algorithm.reference_every)


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
    played = rollout(run.learner.params, tasks, keys, group_n, run.learner.version)
    return played if judge is None else played.replace(trajectories=judge(played.trajectories, judge_key))


def shuffled_rewards(trajectories: Trajectories, key: Array, *, samples: int) -> Trajectories:
    """A control: outcomes permuted within each group, so that they say nothing of who earned them."""
    order_gs = jax.vmap(lambda key: jax.random.permutation(key, samples))(
        jax.random.split(key, len(trajectories.group) // samples)
    )
    order_n = (order_gs + jnp.arange(len(order_gs))[:, None] * samples).ravel()
    return trajectories.replace(outcome=trajectories.outcome[order_n], correct=trajectories.correct[order_n])


def make_exam(
    env: Env,
    policy: Policy,
    split: str,
    *,
    tasks: int,
    samples: int = 1,
    temperature: float = 1.0,
    mesh: Mesh | None = None,
):
    """`exam(params, key) -> Rollout` on fresh tasks of a split, to be jitted by the caller."""
    rollout = make_rollout(env, policy, temperature=temperature, mesh=mesh)
    return partial(_examine, env=env, rollout=rollout, split=split, tasks=tasks, samples=samples)


def _examine(params, key: Array, *, env: Env, rollout, split: str, tasks: int, samples: int) -> Rollout:
    task_key, sample_key = jax.random.split(key)
    questions, group_n = repeat(draw_tasks(env, task_key, tasks, split), samples)
    return rollout(params, questions, jax.random.split(sample_key, len(group_n)), group_n)


def draw_tasks(env: Env, key: Array, count: int, split: str) -> Any:
    """So many fresh tasks of a split."""
    return jax.vmap(partial(env.make_task, split=split))(jax.random.split(key, count))


def _credit(trajectories: Trajectories, *, algorithm: Algorithm, settings: Settings) -> tuple[Array, Array]:
    """Advantages and weights, of at most `queries` groups: those with a signal first."""
    adv = algorithm.advantages(trajectories)
    if settings.oversample > 1:
        signal_n = (adv != 0).reshape(len(adv), -1).any(axis=1).reshape(-1, settings.samples).any(axis=1)
        rank_g = jnp.argsort(jnp.argsort(~signal_n, stable=True))
        taken_n = jnp.repeat(rank_g < settings.queries, settings.samples)
        # A trajectory of no turns takes no part in statistics or loss.
        trajectories = trajectories.replace(turns=trajectories.turns & taken_n[:, None])
        adv = algorithm.advantages(trajectories)
    return adv, algorithm.weights(trajectories)


def _update(run: Run, batch: Batch, *, learn, every: int | None) -> tuple[Run, Metrics]:
    learner, metrics = learn(run.learner, batch, run.reference)
    reference = run.reference
    if every is not None:
        fresh = (run.update + 1) % every == 0
        reference = jax.tree.map(partial(jnp.where, fresh), learner.params, reference)
    return run.replace(learner=learner, reference=reference, update=run.update + 1), metrics


def _lay_out(trajectories: Trajectories, adv: Array, weights: Array, *, slots: int) -> Batch:
    """One trajectory a row, without slots that no trajectory can fill."""
    return jax.tree.map(lambda x_rs: x_rs[:, :slots], rows_by_trajectory(trajectories, adv, weights))


def summarise(rollout: Rollout, *, samples: int) -> Metrics:
    """What a batch of trajectories was like; of those that are valid, but for the tokens."""
    trajectories = rollout.trajectories
    valid_n = trajectories.valid
    turns_nt = jnp.asarray(trajectories.turns) & valid_n[:, None]
    count = jnp.maximum(turns_nt.sum(), 1)
    right_gs, valid_gs = (jnp.asarray(x).reshape(-1, samples) for x in (trajectories.correct, valid_n))
    mixed_g = (right_gs & valid_gs).any(axis=1) & (~right_gs & valid_gs).any(axis=1)
    return {
        "success": masked.mean(right_gs.astype(jnp.float32), valid_gs),
        "outcome": masked.mean(jnp.asarray(trajectories.outcome), valid_n),
        "invalid": (~valid_n).sum(),
        "turns": masked.mean(turns_nt.sum(axis=1).astype(jnp.float32), valid_n),
        "tool_errors": (rollout.error & turns_nt).sum() / count,
        "mixed_groups": mixed_g.mean(),
        "tokens": jnp.where(jnp.asarray(trajectories.turns), filled(trajectories)[0], 0).sum(),
        "chosen_tokens": trajectories.actions.sum(),
    }


def tool_mix(rollout: Rollout, tools: int) -> Array:
    """How often each tool was called."""
    return (rollout.tool[:, :, None] == jnp.arange(tools)[None, None, :]).sum(axis=(0, 1))


# Put together -----------------------------------------------------------------------------------------


def one_program(iteration: Iteration, env: Env, settings: Settings) -> Callable[[Run], tuple[Run, Metrics]]:
    """A whole iteration as one pure function: jit it, scan it over updates, vmap it over seeds."""
    return partial(_one_program, iteration=iteration, env=env, settings=settings)


def _one_program(run: Run, *, iteration: Iteration, env: Env, settings: Settings) -> tuple[Run, Metrics]:
    rollout = iteration.rollout(run)
    batch = iteration.lay_out(rollout.trajectories, *iteration.credit(rollout.trajectories))
    run, metrics = iteration.update(run, batch)
    summary = summarise(rollout, samples=settings.samples)
    return run, metrics | summary | {"tool_calls": tool_mix(rollout, len(env.tools))}


def three_programs(
    iteration: Iteration, env: Env, algorithm: Algorithm, settings: Settings, *, row_length: int | None = None
) -> Callable[[Run], tuple[Run, Metrics]]:
    """The same with packing on the host: `step(run)`; each program is compiled once."""
    learn = make_learn(
        iteration.credit,
        iteration.update,
        algorithm,
        tools=len(env.tools),
        samples=settings.samples,
        row_length=row_length or longest(env),
        rows=settings.queries * settings.samples,
    )
    return partial(_three_programs, rollout=jax.jit(iteration.rollout), learn=learn)


def _three_programs(run: Run, *, rollout, learn) -> tuple[Run, Metrics]:
    return learn(run, rollout(run))


def make_learn(
    credit: Credit, update: Update, algorithm: Algorithm, *, tools: int, samples: int, row_length: int, rows: int
) -> Callable[[Run, Rollout], tuple[Run, Metrics]]:
    """`learn(run, rollout)`: credit, packing on the host into at most so many rows, update, figures of all."""
    describe = jax.jit(partial(_describe, tools=tools, samples=samples))
    sizes = {"row_length": row_length, "rows": rows}
    parts = {"credit": jax.jit(credit), "update": jax.jit(update), "describe": describe}
    return partial(_learn, algorithm=algorithm, sizes=sizes, **parts)


def _describe(rollout: Rollout, *, tools: int, samples: int) -> Metrics:
    return summarise(rollout, samples=samples) | {"tool_calls": tool_mix(rollout, tools)}


def _learn(run: Run, rollout: Rollout, *, credit, update, describe, algorithm, sizes) -> tuple[Run, Metrics]:
    adv, weights = (np.asarray(x) for x in credit(rollout.trajectories))
    trajectories = jax.device_get(rollout.trajectories)
    batch = pack(trajectories, adv, weights, **sizes, skip_no_signal=algorithm.skips)
    run, metrics = update(run, batch)
    ledger = account(trajectories, weights, batch, adv=adv if algorithm.skips else None)
    fates = {f"tokens_{fate.name.lower()}": count for fate, count in ledger.fates.items()}
    return run, metrics | describe(rollout) | fates


def train(step: Callable[[Run], tuple[Run, Metrics]], run: Run, updates: int) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Run after run until `updates` are done, with the numbers of each on the host."""
    while int(run.update) < updates:
        run, metrics = step(run)
        yield run, {"update": int(run.update)} | to_host(metrics)


def to_host(metrics: Metrics) -> dict[str, Any]:
    """Numbers and lists of numbers."""
    return {name: np.asarray(value).tolist() for name, value in jax.device_get(metrics).items()}


def train_many(
    step: Callable[[Run], tuple[Run, Metrics]], runs: Sequence[Run], updates: int
) -> tuple[Run, dict[str, np.ndarray]]:
    """So many updates of several runs at once, seeds for instance: `step` is that of `one_program`, not yet jitted.

    Gives the runs stacked into one, and every figure as [run, update]. It is one program: vmapped over the runs,
    scanned over the updates.
    """
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *runs)
    after, metrics = jax.jit(jax.vmap(partial(_many, step=step, updates=updates)))(stacked)
    return after, {name: np.asarray(value) for name, value in jax.device_get(metrics).items()}


def _many(run: Run, *, step, updates: int) -> tuple[Run, Metrics]:
    return jax.lax.scan(lambda run, _: step(run), run, length=updates)
