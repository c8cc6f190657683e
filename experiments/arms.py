"""One arm of a study: what differs from the others flows in, programs that treat one seed flow out. Pure.

    start(key) -> Begun                 a planner that has imitated demonstrations; the same for every arm
    begin(begun) -> state               the arm's own state, before its first update
    advance(state) -> (state, Seen)     so many updates, and an examination after them

Everything is a function of one seed, to be mapped over all of them (`flowgrpo.many`) and jitted by the caller.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

import flowgrpo as fg
from experiments import setups
from experiments.members import ENVIRONMENTS
from flowgrpo import loop, masked
from flowgrpo.algorithms.advantage import anchor_advantage, last_turns
from flowgrpo.algorithms.options import Options
from flowgrpo.contracts import Metrics
from flowgrpo.envs.env import PAD
from flowgrpo.learner.critic import acting, with_critic
from flowgrpo.learner.state import init_learner
from flowgrpo.learner.warmstart import make_supervised
from flowgrpo.many import many_updates
from flowgrpo.rollout.compiled import Rollout
from flowgrpo.rollout.exam import make_exam
from flowgrpo.types import Trajectories

FIGURES = ("success", "turns", "tool_errors", "entropy", "mixed_groups", "clip_high_fraction", "kl_old")  # by update


class Program(NamedTuple):
    """How an arm is trained: from a run to its own state, one update of that, and back."""

    begin: Callable[[loop.Run], Any]
    step: Callable[[Any], tuple[Any, Metrics]]
    run: Callable[[Any], loop.Run]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Differences of an arm from its study; what it doesn't say is as in the study."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # in the place of the preset's
    algorithm: Callable[[], fg.Algorithm] | None = None  # in the place of the one that settings name
    env: Mapping[str, Any] = field(default_factory=dict)  # settings of the environment that it is trained in
    exam: Mapping[str, Any] = field(default_factory=dict)  # and of the one that it is examined in
    program: Callable[[setups.Setup], Program] | None = None  # on policy by default


class Begun(struct.PyTreeNode):
    """A seed before its first update."""

    params: Any
    key: jax.Array


class Seen(struct.PyTreeNode):
    """Figures of an arm after so many updates: of its training, and of an examination."""

    figures: dict[str, Any]  # by update
    success: jax.Array  # on test tasks
    turns: jax.Array


# A seed -----------------------------------------------------------------------------------------------


def start(key: jax.Array, *, setup: setups.Setup) -> Begun:
    """A fresh planner that has imitated the environment's demonstrations, for as many steps as settings say."""
    init_key, shown_key, run_key = jax.random.split(key, 3)
    settings, optimizer = setup.settings, setups.warm_optimizer(setup)
    step = make_supervised(setup.policy, optimizer, banned=(PAD,))

    def imitate(state, index):
        rows = setups.demonstration_rows(
            setup, jax.random.fold_in(shown_key, index), rows=settings["warm_rows"], split="train"
        )
        return step(state, rows)

    learner = init_learner(setup.policy.init(init_key), optimizer)
    learner, _ = jax.lax.scan(imitate, learner, jnp.arange(settings["warm_steps"]))
    return Begun(learner.params, run_key)


def begin(begun: Begun, *, setup: setups.Setup, program: Program) -> Any:
    """The arm's state before its first update."""
    params = with_critic(setup.critic, jax.random.fold_in(begun.key, 1), begun.params)
    return program.begin(loop.start_run(params, setup.optimizer, begun.key))


def advance(state: Any, *, program: Program, exam: Callable, updates: int) -> tuple[Any, Seen]:
    """So many updates, and an examination: always on the same test tasks, which follow from the seed."""
    state, figures = many_updates(program.step, state, updates=updates)
    return state, _seen(state, figures, program, exam)


def look(state: Any, *, program: Program, exam: Callable) -> Seen:
    """An examination alone."""
    return _seen(state, {}, program, exam)


def _seen(state: Any, figures: Metrics, program: Program, exam: Callable) -> Seen:
    run = program.run(state)
    played = exam(acting(run.learner.params), jax.random.fold_in(run.key, 2**31 - 1)).trajectories
    turns = masked.mean(played.turns.sum(axis=1).astype(jnp.float32), played.valid)
    own = {name: figures[name] for name in FIGURES if name in figures}
    return Seen(own, masked.mean(played.correct.astype(jnp.float32), played.valid), turns)


class Parts(NamedTuple):
    """An arm as functions of one seed."""

    setup: setups.Setup
    begin: Callable[[Begun], Any]
    look: Callable[[Any], Seen]
    advance: Callable[[Any], tuple[Any, Seen]]


def parts_of(arm: Arm, settings: Mapping[str, Any], env: Mapping[str, Any], *, updates: int, tasks: int) -> Parts:
    """The functions of an arm, examined every so many updates on so many tasks."""
    make_env = ENVIRONMENTS[settings["env"]]
    algorithm = None if arm.algorithm is None else arm.algorithm()
    setup = setups.build({**settings, **arm.settings}, env=make_env(**{**env, **arm.env}), algorithm=algorithm)
    program = on_policy(setup) if arm.program is None else arm.program(setup)
    world = make_env(**{**env, **arm.exam})
    exam = make_exam(world, setup.policy, "test", tasks=tasks, temperature=settings["temperature"])
    return Parts(
        setup=setup,
        begin=partial(begin, setup=setup, program=program),
        look=partial(look, program=program, exam=exam),
        advance=partial(advance, program=program, exam=exam, updates=updates),
    )


# Programs ---------------------------------------------------------------------------------------------


def on_policy(setup: setups.Setup) -> Program:
    """The iteration as it is."""
    return _program(setup, setup.iteration)


def _program(setup: setups.Setup, iteration: loop.Iteration) -> Program:
    return Program(_same, loop.one_program(iteration, setup.env, setup.sizes), _same)


def _same(run: loop.Run) -> loop.Run:
    return run


class Late(struct.PyTreeNode):
    """A run whose trajectories come from older parameters."""

    run: loop.Run
    older: Any  # [lag, ...] the oldest first


def stale(lag: int) -> Callable[[setups.Setup], Program]:
    """Trajectories are sampled by the parameters of `lag` updates ago."""
    return partial(_stale, lag=lag)


def _stale(setup: setups.Setup, *, lag: int) -> Program:
    def start(run: loop.Run) -> Late:
        older = jax.tree.map(lambda x: jnp.broadcast_to(x, (lag, *x.shape)), run.learner.params)
        return Late(run, older)

    def step(late: Late) -> tuple[Late, Metrics]:
        now = late.run.learner
        oldest = now.replace(params=jax.tree.map(lambda x: x[0], late.older))
        played = setup.iteration.rollout(late.run.replace(learner=oldest))
        one = loop.one_program(setup.iteration._replace(rollout=lambda _: played), setup.env, setup.sizes)
        run, metrics = one(late.run)
        older = jax.tree.map(lambda x, new: jnp.concatenate([x[1:], new[None]]), late.older, now.params)
        return Late(run, older), metrics

    return Program(start, step, lambda late: late.run)


def paid_by_turn(setup: setups.Setup) -> Program:
    """Every turn is paid 1 for a call that was answered, and the last one the outcome, instead of sharing one outcome.

    The kind of heuristic that process rewards are made of: plausible, and not what is wanted.
    """
    return _program(setup, setup.iteration._replace(rollout=lambda run: _with_pay(setup.iteration.rollout(run))))


def _with_pay(played: Rollout) -> Rollout:
    trajectories = played.trajectories
    turns_nt = jnp.asarray(trajectories.turns)
    called_nt = (jnp.asarray(played.tool) >= 0) & ~jnp.asarray(played.error) & turns_nt
    at_last_nt = jnp.where(last_turns(turns_nt), jnp.asarray(trajectories.outcome)[:, None], 0.0)
    pay_nt = called_nt.astype(jnp.float32) + at_last_nt
    return played.replace(trajectories=trajectories.replace(reward=pay_nt))


def by_turn_zscore(trajectories: Trajectories, _outcome_n, valid_n, _options: Options) -> jax.Array:
    """The z-score of each turn's own pay among all turns of the group, as if all began in the same state -> adv_nt."""
    anywhere_nt = jnp.zeros(trajectories.turns.shape, jnp.int32)
    return anchor_advantage(trajectories.reward, anywhere_nt, trajectories.acted, trajectories.group, valid_n)


def imitating(*, oracle: bool = False, **teacher: Any) -> Callable[[setups.Setup], Program]:
    """As many trajectories an update as the others sample, of another planner, which are imitated.

    `teacher` has the settings of the environment whose demonstrations they are, or whose `oracle`.
    """
    return partial(_imitating, oracle=oracle, teacher=teacher)


def _imitating(setup: setups.Setup, *, oracle: bool, teacher: Mapping[str, Any]) -> Program:
    env = ENVIRONMENTS[setup.settings["env"]](**teacher)
    if oracle:
        env = env._replace(demonstrate=lambda _key, state: env.oracle(state))
    shown = setup._replace(env=env)

    def step(run: loop.Run) -> tuple[loop.Run, Metrics]:
        return setups.imitation_step(shown, run.key)(run)

    return Program(_same, step, _same)
