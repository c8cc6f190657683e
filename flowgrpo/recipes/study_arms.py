"""One arm of a study: what differs from the others flows in, programs that treat one seed flow out. Pure.

    warm_started(key) -> SeedStart      a planner that has imitated demonstrations; the same for every arm
    _begin(begun) -> state              the arm's own state, before its first update
    _advance(state) -> (state, ArmFigures)  so many updates, and an examination after them

Everything is a function of one seed, to be mapped over all of them (`flowgrpo.parallel.row_sharding`)
and jitted by the caller.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

import flowgrpo as fg
from flowgrpo import loop, masked
from flowgrpo.algorithms.advantage import (
    anchor_advantage,
    group_center,
    last_turns,
    multi_turn_group_advantage,
    turn_index,
)
from flowgrpo.algorithms.options import Options
from flowgrpo.contracts import Metrics
from flowgrpo.learner.critic import with_critic
from flowgrpo.learner.diagnostics import task_information
from flowgrpo.models.decoder import matrices
from flowgrpo.models.quantised import quantise_layers
from flowgrpo.models.trainable import acting
from flowgrpo.parallel.row_sharding import many_updates
from flowgrpo.recipes import pure
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.rollout.exams import make_exam
from flowgrpo.run.config import make_config
from flowgrpo.types import Trajectories

FIGURES = (  # by update
    *("success", "turns", "tool_errors", "entropy", "mixed_groups", "zero_signal_groups"),
    *("clip_high_fraction", "kl_old", "task_information"),
)


class ArmProgram(NamedTuple):
    """How an arm is trained: from a run to its own state, one update of that, and back."""

    begin: Callable[[loop.Run], Any]
    step: Callable[[Any], tuple[Any, Metrics]]
    run: Callable[[Any], loop.Run]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Differences of an arm from its study; what it doesn't say is as in the study."""

    changes: Mapping[str, Any] = field(default_factory=dict)  # of the Config that all arms share
    algorithm: Callable[[], fg.Algorithm] | None = None  # in the place of the one that settings name
    env: Mapping[str, Any] = field(default_factory=dict)  # settings of the environment that it is trained in
    exam: Mapping[str, Any] = field(default_factory=dict)  # and of the one that it is examined in
    program: Callable[[pure.Setup], ArmProgram] | None = None  # on policy by default


class SeedStart(struct.PyTreeNode):
    """A seed before its first update."""

    params: Any
    key: jax.Array


class ArmFigures(struct.PyTreeNode):
    """Figures of an arm after so many updates: of its training, and of an examination."""

    figures: dict[str, Any]  # by update
    success: jax.Array  # on test tasks
    turns: jax.Array


# A seed -----------------------------------------------------------------------------------------------


def warm_started(key: jax.Array, *, setup: pure.Setup) -> SeedStart:
    """A fresh planner that has imitated the environment's demonstrations, for as many steps as settings say."""
    init_key, shown_key, run_key = jax.random.split(key, 3)
    config, optimizer = setup.config, pure.warm_optimizer(setup)
    params, _ = loop.imitate(
        setup.env,
        setup.policy,
        optimizer,
        setup.policy.init(init_key),
        shown_key,
        steps=config.warm_steps,
        rows=config.warm_rows,
    )
    return SeedStart(params, run_key)


def _begin(begun: SeedStart, *, setup: pure.Setup, program: ArmProgram) -> Any:
    """The arm's state before its first update."""
    params = with_critic(setup.critic, jax.random.fold_in(begun.key, 1), begun.params)
    return program.begin(loop.start_run(params, setup.optimizer, begun.key))


def _advance(state: Any, *, program: ArmProgram, exam: Callable, updates: int) -> tuple[Any, ArmFigures]:
    """So many updates, and an examination: always on the same test tasks, which follow from the seed."""
    state, figures = many_updates(program.step, state, updates=updates)
    return state, _seen(state, figures, program, exam)


def _look(state: Any, *, program: ArmProgram, exam: Callable) -> ArmFigures:
    """An examination alone."""
    return _seen(state, {}, program, exam)


def _seen(state: Any, figures: Metrics, program: ArmProgram, exam: Callable) -> ArmFigures:
    run = program.run(state)
    played = exam(acting(run.learner.params), jax.random.fold_in(run.key, 2**31 - 1))
    turns = masked.mean(played.turns.sum(axis=1).astype(jnp.float32), played.valid)
    own = {name: figures[name] for name in FIGURES if name in figures}
    return ArmFigures(own, masked.mean(played.correct.astype(jnp.float32), played.valid), turns)


class ArmParts(NamedTuple):
    """An arm as functions of one seed."""

    setup: pure.Setup
    begin: Callable[[SeedStart], Any]
    look: Callable[[Any], ArmFigures]
    advance: Callable[[Any], tuple[Any, ArmFigures]]


def parts_of(arm: Arm, config: pure.Config, env: Mapping[str, Any], *, updates: int, tasks: int) -> ArmParts:
    """The functions of an arm, examined every so many updates on so many tasks."""
    make_env = ENVIRONMENTS[config.env]
    algorithm = None if arm.algorithm is None else arm.algorithm()
    own = make_config(pure.Config, asdict(config) | dict(arm.changes))  # which refuses what is no setting
    setup = pure.open(own, env=make_env(**{**env, **arm.env}), algorithm=algorithm)
    program = iteration_program(setup.iteration) if arm.program is None else arm.program(setup)
    world = make_env(**{**env, **arm.exam})
    exam = make_exam(world, setup.policy, "test", tasks=tasks, temperature=config.temperature)
    return ArmParts(
        setup=setup,
        begin=partial(_begin, setup=setup, program=program),
        look=partial(_look, program=program, exam=exam),
        advance=partial(_advance, program=program, exam=exam, updates=updates),
    )


# Programs ---------------------------------------------------------------------------------------------


def iteration_program(iteration: loop.Iteration) -> ArmProgram:
    """Train by an iteration, such as that of the setup as it is."""
    return ArmProgram(_same, loop.one_program(iteration), _same)


def _same(run: loop.Run) -> loop.Run:
    return run


def taught(setup: pure.Setup, *, steps: int = 200, oracle: bool = False, **teacher: Any) -> ArmProgram:
    """Learn from a teacher, for `opd`: the arm's start after so many steps of imitation of a better planner.

    `teacher` has the settings of the environment whose demonstrations it imitates, or whose `oracle`.
    """
    better = imitating(setup, oracle=oracle, **teacher)

    def begin(run: loop.Run) -> loop.Run:
        scholar, _ = many_updates(better.step, run, updates=steps)
        return run.replace(reference=scholar.learner.params)

    return ArmProgram(begin, loop.one_program(setup.iteration), _same)


def with_bonus(setup: pure.Setup, *, bonus: float, first: int = 0, last: int = 2**31 - 1) -> ArmProgram:
    """Pay an entropy bonus in updates `first` to `last`, and watch `task_information` in every update.

    A bonus that may come stands in the algorithm from the start, so that entropy is that of all tokens, signal or not.
    """

    def step(run: loop.Run) -> tuple[loop.Run, Metrics]:
        here = (run.update >= first) & (run.update <= last)
        algorithm = fg.flow_grpo(beta=0.0, clip_high=setup.config.clip_high, entropy_bonus=jnp.where(here, bonus, 0.0))
        iteration = loop.make_iteration(setup.env, setup.policy, algorithm, setup.optimizer, setup.sizes)
        played = iteration.rollout(run)
        run, metrics = loop.one_program(iteration._replace(play=lambda *_: played, judge=None))(run)
        return run, metrics | {"task_information": task_information(played)}

    return ArmProgram(_same, step, _same)


class StaleRun(struct.PyTreeNode):
    """A run whose trajectories come from older parameters."""

    run: loop.Run
    older: Any  # [lag, ...] the oldest first


def stale_sampler(setup: pure.Setup, *, lag: int) -> ArmProgram:
    """Trajectories are sampled by the parameters of `lag` updates ago."""

    def start(run: loop.Run) -> StaleRun:
        older = jax.tree.map(lambda x: jnp.broadcast_to(x, (lag, *x.shape)), run.learner.params)
        return StaleRun(run, older)

    def step(late: StaleRun) -> tuple[StaleRun, Metrics]:
        now = late.run.learner
        oldest = now.replace(params=jax.tree.map(lambda x: x[0], late.older))
        played = setup.iteration.rollout(late.run.replace(learner=oldest))
        one = loop.one_program(setup.iteration._replace(play=lambda *_: played, judge=None))
        run, metrics = one(late.run)
        older = jax.tree.map(lambda x, new: jnp.concatenate([x[1:], new[None]]), late.older, now.params)
        return StaleRun(run, older), metrics

    return ArmProgram(start, step, lambda late: late.run)


def quantised_rollouts(setup: pure.Setup, *, kind: str) -> ArmProgram:
    """Trajectories are sampled by the parameters with their layers quantised, and learned from by those as they are."""
    iteration, factors = setup.iteration, matrices(pure.decoder_shape(setup.env, setup.config))

    def play(params: Any, drawn: loop.RolloutTasks) -> Trajectories:
        return iteration.play(quantise_layers(acting(params), factors, kind=kind), drawn)

    return iteration_program(iteration._replace(play=play))


def paid_by_turn(setup: pure.Setup) -> ArmProgram:
    """Every turn is paid 1 for a call that was answered, and the last one the outcome, instead of sharing one outcome.

    The kind of heuristic that process rewards are made of: plausible, and not what is wanted.
    """
    play = setup.iteration.play
    return iteration_program(setup.iteration._replace(play=lambda *given: _with_pay(play(*given))))


def _with_pay(played: Trajectories) -> Trajectories:
    turns_nt = jnp.asarray(played.turns)
    called_nt = (jnp.asarray(played.tool) >= 0) & ~jnp.asarray(played.error) & turns_nt
    at_last_nt = jnp.where(last_turns(turns_nt), jnp.asarray(played.outcome)[:, None], 0.0)
    pay_nt = called_nt.astype(jnp.float32) + at_last_nt
    return played.replace(reward=pay_nt)


def by_place(trajectories: Trajectories, outcome_n, valid_n, _options: Options) -> jax.Array:
    """Take the z-score of the outcome among the turns of the group in the same place -> adv_nt."""
    acted_nt = trajectories.acted
    outcome_nt = jnp.broadcast_to(jnp.asarray(outcome_n)[:, None], acted_nt.shape)
    return anchor_advantage(outcome_nt, turn_index(acted_nt), acted_nt, trajectories.group, valid_n)


def charged_by_turn(trajectories: Trajectories, outcome_n, valid_n, _options: Options, *, charge: float) -> jax.Array:
    """Plant a bias: move the broadcast advantage for each turn more than the group's mean -> adv_nt."""
    acted_nt, group_n = trajectories.acted, trajectories.group
    adv_nt = multi_turn_group_advantage(outcome_n, acted_nt, group_n, valid_n)
    more_n = group_center(acted_nt.sum(axis=1).astype(jnp.float32), group_n, valid_n)
    return masked.fill(adv_nt + charge * more_n[:, None], acted_nt & valid_n[:, None])


def by_turn_zscore(trajectories: Trajectories, _outcome_n, valid_n, _options: Options) -> jax.Array:
    """The z-score of each turn's own pay among all turns of the group, as if all began in the same state -> adv_nt."""
    anywhere_nt = jnp.zeros(trajectories.turns.shape, jnp.int32)
    return anchor_advantage(trajectories.reward, anywhere_nt, trajectories.acted, trajectories.group, valid_n)


def imitating(setup: pure.Setup, *, oracle: bool = False, **teacher: Any) -> ArmProgram:
    """As many trajectories an update as the others sample, of another planner, which are imitated.

    `teacher` has the settings of the environment whose demonstrations they are, or whose `oracle`.
    """
    env = ENVIRONMENTS[setup.config.env](**teacher)
    if oracle:
        env = env._replace(demonstrate=lambda _key, state: env.oracle(state))
    shown = setup._replace(env=env)

    def step(run: loop.Run) -> tuple[loop.Run, Metrics]:
        return pure.imitation_step(shown, run.key)(run)

    return ArmProgram(_same, step, _same)
