"""The recipe of a run on a pure environment: imitation, then reinforcement by iterations that are compiled.

result = train(preset("maze", updates=50), "runs/maze")
setup = open(Config())     its parts: environment, policy, algorithm, optimizer, the stages of an iteration
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import flowgrpo as fg
from flowgrpo import loop
from flowgrpo.envs.env import PAD, in_words, story
from flowgrpo.envs.lookup import World, calls_right_tool
from flowgrpo.envs.play import Play
from flowgrpo.evaluation.metrics import Evaluation
from flowgrpo.learner.critic import Valuation, by_part, copied_trunk, own_network, shared_trunk, with_critic
from flowgrpo.learner.imitation import make_supervised, make_validation
from flowgrpo.learner.state import init_learner, make_optimizer
from flowgrpo.models.config import DecoderConfig, small_config
from flowgrpo.models.critic import HEAD, make_critic
from flowgrpo.models.decoder import make_policy, matrices
from flowgrpo.models.trainable import ActorCritic, acting
from flowgrpo.parallel.compile_ahead import compile_ahead, jit_quickly
from flowgrpo.parallel.sharding import critic_axes, decoder_axes, mesh_of, place_state, settle
from flowgrpo.recipes.hosted import record
from flowgrpo.recipes.pure_config import Config
from flowgrpo.recipes.pure_config import preset as preset
from flowgrpo.recipes.registry import falling_optimizer, make_algorithm, make_env
from flowgrpo.rollout import exams
from flowgrpo.rollout.compiled import shuffled_rewards
from flowgrpo.rollout.records import Played
from flowgrpo.rollout.trajectory_view import records_of
from flowgrpo.run.run_dir import read_run
from flowgrpo.run.session import (
    Step,
    Tested,
    TestedWork,
    Validation,
    before_after_table,
    open_session,
    run_session,
    train_line,
    validation_of,
)
from flowgrpo.run.time_budget import ENDLESS, TimeBudget
from flowgrpo.run.warm_start import WarmStart
from flowgrpo.types import Trajectories

NAME = "pure"
# By the words of an environment: (tokens, length) -> whether the tool is right for what is asked.
RIGHT: dict[tuple[str, ...], Callable] = {World().words: calls_right_tool}


def tasks_of_split(env: fg.Env, split: str, *, count: int, seed: int = 0):
    """Tasks of a split, compiled."""
    return jax.jit(partial(exams.draw_tasks, env, count=count, split=split))(jax.random.key(seed))


def tabulate_plays(env: fg.Env, plays: Play) -> dict[str, float]:
    """Compute the figures of episodes: success, errors and right tools in %, turns and calls in the mean."""
    live, calls = np.asarray(plays.live), np.asarray(plays.live & (plays.step.tool >= 0))
    found = {
        "success": 100 * np.mean(plays.state.correct),
        "turns": live.sum(axis=1).mean(),
        "calls": calls.sum(axis=1).mean(),
        "errors": 100 * np.asarray(plays.step.error)[live].mean(),
    }
    if env.words in RIGHT and calls.any():
        right = np.asarray(jax.vmap(jax.vmap(RIGHT[env.words]))(plays.tokens, plays.length))
        found["right tool"] = 100 * right[calls].mean()
    return {name: float(value) for name, value in found.items()}


def right_tool_share(env: fg.Env, rollout: Trajectories) -> float | None:
    """Of a policy's calls, the share that goes to the right tool; None where no call alone can tell."""
    calls_nt = np.asarray(rollout.tool) >= 0
    if env.words not in RIGHT or not calls_nt.any():
        return None
    right_nt = jax.vmap(jax.vmap(partial(_is_right, env=env)))(jnp.asarray(rollout.tokens), jnp.asarray(rollout.chosen))
    return float(np.asarray(right_nt)[calls_nt].mean())


def _is_right(tokens: Array, chosen: Array, *, env: fg.Env) -> Array:
    """Of one turn, in which the action comes right after what was heard."""
    action = jnp.roll(jnp.where(chosen, tokens, PAD), -jnp.argmax(chosen))[: env.sizes.action]
    return RIGHT[env.words](action, chosen.sum())


VALIDATION_ROWS = 256
ASKED_EVERY, PATIENCE = 50, 10  # steps of the warm start between two validations; how many may bring nothing


class Setup(NamedTuple):
    """The parts of a run."""

    config: Config
    env: fg.Env
    policy: fg.Policy
    algorithm: fg.Algorithm
    optimizer: optax.GradientTransformation
    sizes: loop.Settings
    iteration: loop.Iteration
    place: Callable[[Any], Any]  # what holds parameters -> the same on the mesh
    critic: Valuation | None = None


def open(config: Config, *, env: fg.Env | None = None, algorithm: fg.Algorithm | None = None) -> Setup:
    """Make the parts that a Config describes, or take those that are given in their place."""
    env = make_env(config.env) if env is None else env
    decoder = decoder_shape(env, config)
    policy = make_policy(decoder, unroll=True)
    algorithm = _algorithm(config, env) if algorithm is None else algorithm
    steps = config.decay_updates * config.mini_batches * config.epochs
    own = {"matrices": matrices(decoder)} if config.optimizer == "muon" else {}
    optimizer = falling_optimizer(config.learning_rate, steps, config.decay, **own)
    critic = None
    if algorithm.targets is not None:  # a critic starts from what the policy knows
        if config.critic == "shared":
            critic = shared_trunk(policy, decoder)
        else:
            critic = own_network(policy, make_critic(decoder), init=copied_trunk(decoder))
        optimizer = by_part(optimizer, falling_optimizer(config.critic_rate, steps, config.decay))
    sizes = loop.Settings(
        queries=config.queries,
        samples=config.samples,
        oversample=config.oversample,
        temperature=config.temperature,
        mini_batches=config.mini_batches,
        epochs=config.epochs,
    )
    judge = partial(shuffled_rewards, samples=sizes.samples) if config.control == "shuffled_rewards" else None
    mesh = mesh_of(config.mesh)
    axes: Any = decoder_axes(decoder)  # the letters of all parameters
    policy = settle(policy, mesh, axes)
    if critic is not None:
        axes = ActorCritic(axes, critic_axes(decoder) if config.critic == "own" else {HEAD: "d"})
    place = partial(place_state, mesh=mesh, axes=axes)
    iteration = loop.make_iteration(env, policy, algorithm, optimizer, sizes, judge=judge, critic=critic)
    return Setup(config, env, policy, algorithm, optimizer, sizes, iteration, place, critic)


def teacher_params(config: Config) -> Any:
    """Read the best planner of the run that teaches; one of another environment or shape is refused."""
    folder = Path(str(config.teacher))
    there = read_run(folder)
    if there["recipe"] != NAME:
        raise fg.BadInput(f"--teacher={folder} is a run of {there['recipe']}: give one of the quickstart")
    teacher = Config.from_json(there["settings"])
    for name in ("env", "d", "layers", "head"):
        own, other = getattr(config, name), getattr(teacher, name)
        if own != other:
            raise fg.BadInput(f"--teacher={folder} has {name} {other}, but this run {own}: they must be the same")
    return acting(open_session(PureWork(open(teacher)), folder).best_params()[1])


def decoder_shape(env: fg.Env, config: Config) -> DecoderConfig:
    """A small decoder over the words of an environment."""
    return small_config(len(env.words), d=config.d, layers=config.layers, head=config.head)


def _algorithm(config: Config, env: fg.Env) -> fg.Algorithm:
    if (config.algorithm == "opd") != (config.teacher is not None):
        raise fg.BadInput("--algorithm=opd and --teacher=RUN go together: give both, or neither")
    algorithm = make_algorithm(
        config.algorithm,
        beta=config.beta,
        clip_high=config.clip_high,
        entropy_bonus=config.entropy_bonus,
        gamma=config.gamma,
        lam=config.lam,
        max_tokens=env.sizes.turns * env.sizes.action,
    )
    return fg.algorithms.last_turn_only(algorithm) if config.control == "last_turn" else algorithm


def seed_keys(seed: int) -> dict[str, jax.Array]:
    """A key for each purpose of a run."""
    names = ("start", "demonstrations", "run", "validation", "test")
    return dict(zip(names, jax.random.split(jax.random.key(seed), len(names)), strict=True))


# Imitation --------------------------------------------------------------------------------------------


def warm_optimizer(setup: Setup) -> optax.GradientTransformation:
    """The optimizer of the imitation that comes before reinforcement."""
    return make_optimizer(
        learning_rate=setup.config.warm_rate,
        warmup_steps=20,
        decay_steps=setup.config.warm_steps,
        matrices=matrices(decoder_shape(setup.env, setup.config)),
    )


def planner_imitation(setup: Setup, keys: Mapping[str, jax.Array]) -> WarmStart:
    """The imitation before reinforcement, whose demonstrations follow from the key of each step."""
    config, key = setup.config, keys["demonstrations"]
    draw = jit_quickly(partial(loop.demonstration_rows, setup.env, rows=config.warm_rows))
    held = jit_quickly(partial(loop.demonstration_rows, setup.env, rows=VALIDATION_ROWS, split="validation"))(key)
    loss = jax.jit(make_validation(setup.policy, banned=(PAD,)))
    optimizer = warm_optimizer(setup)
    params = jax.jit(setup.policy.init)(keys["start"])
    return WarmStart(
        state=setup.place(init_learner(params, optimizer)),
        step=jax.jit(make_supervised(setup.policy, optimizer, banned=(PAD,))),
        batches=lambda first: (draw(jax.random.fold_in(key, step)) for step in range(first + 1, config.warm_steps + 1)),
        validate=lambda params: loss(params, held),
        steps=config.warm_steps,
        every=ASKED_EVERY,
        patience=PATIENCE,
    )


def imitation_step(setup: Setup, key: jax.Array) -> Callable[[loop.Run], tuple[loop.Run, dict]]:
    """A control: as many trajectories an update, imitated."""
    rows = setup.sizes.queries * setup.sizes.samples
    micro_rows = setup.sizes.micro_rows
    step = make_supervised(setup.policy, setup.optimizer, banned=(PAD,), micro_rows=micro_rows)

    def imitate(run: loop.Run) -> tuple[loop.Run, dict]:
        own = jax.random.fold_in(jax.random.fold_in(key, 1), run.update)
        batch = loop.demonstration_rows(setup.env, own, rows=rows)
        learner, loss = step(run.learner, batch)
        tokens = (batch.segments > 0).sum()
        return run.replace(learner=learner, update=run.update + 1), {"loss": loss, "tokens": tokens}

    return jax.jit(imitate)


VALIDATION_TASKS = 256
RECORDED = 200  # test trajectories that are written
MOST_BLOCKS, MOST_FILL = 16, 4  # of an examination by an iteration's program: blocks, and how often its tasks fill one


class PureWork(TestedWork):
    """Warm start by imitation, iterations in three programs, examinations on fresh tasks.

    The first test trajectories are written to the `folder`, where one is given.
    """

    def __init__(self, setup: Setup, folder: Path | None = None):
        self.setup, self._folder, self._keys = setup, folder, seed_keys(setup.config.seed)
        self._step = loop.three_programs(setup.iteration)
        counts = {"validation": VALIDATION_TASKS, "test": setup.config.test_tasks}
        self._exams = {split: _Exam(setup, self._step, split, count) for split, count in counts.items()}
        if setup.config.teacher is not None and folder is not None:  # to look at a run, its checkpoint has enough
            self.teacher = teacher_params(setup.config)
        super().__init__(
            NAME,
            setup.config,
            updates=setup.config.updates,
            name=setup.env.name,
            algorithm=setup.algorithm.name,
            optimizer=setup.optimizer,
            key=self._keys["run"],
        )

    def place(self, tree: Any) -> Any:
        return self.setup.place(tree)

    def initial(self) -> Any:
        return self.setup.policy.init(self._keys["start"])

    def warm_start(self) -> WarmStart:
        return planner_imitation(self.setup, self._keys)

    def compile_ahead(self, run: loop.Run) -> None:
        """Compile an iteration and the examinations."""
        if self.setup.config.control != "supervised":
            self._step.compile(run)
        for split, exam in self._exams.items():
            exam.compile(run.learner.params, self._keys[split])

    def begin(self, params: Any) -> Any:
        return with_critic(self.setup.critic, self._keys["start"], params)

    def make_step(self) -> Step:
        """An iteration, or as much imitation again where that is the control."""
        if self.setup.config.control == "supervised":
            return imitation_step(self.setup, self._keys["demonstrations"])
        return self._step

    def line(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        return train_line(figures, tools=self.setup.env.tools)

    def examine(self, params: Any) -> Validation:
        played = self._exams["validation"](params, self._keys["validation"])
        return validation_of(_rollout_metrics(played, self.setup.env))

    def test(self, params: Sequence[Any], versions: Sequence[int]) -> Tested:
        """The table, with one task that was failed before and solved after."""
        env, exam, key = self.setup.env, self._exams["test"], self._keys["test"]
        rollouts = [exam(one, key, version) for one, version in zip(params, versions, strict=True)]
        if self._folder is not None:
            gold = None if env.answer is None else exam.answers(key)
            for when, rollout in zip(("before", "after"), rollouts, strict=True):
                record(self._folder / "trajectories" / f"test-{when}.jsonl", first_records(rollout, env, gold))
        before, after = figures = [_rollout_metrics(rollout, env) for rollout in rollouts]
        words = "\n".join([before_after_table(before, after), "", *stories(rollouts, env)])
        return Tested(figures, words, {"right_tool_before": before.right_tool, "right_tool_after": after.right_tool})


def _make_exam(setup: Setup, split: str, tasks: int, samples: int = 1):
    """`exam(params, key, version=0) -> Trajectories`, to be jitted; of an actor and its critic, the actor plays."""
    sizes = {"tasks": tasks, "samples": samples, "temperature": setup.config.temperature}
    exam = exams.make_exam(setup.env, setup.policy, split, **sizes)
    return lambda params, key, version=0: exam(acting(params), key, version)


class _Exam:
    """An examination on fresh tasks of a split, by the program that plays an iteration, so many tasks at a time.

    One that takes far more or far fewer tasks than an iteration has a program of its own.
    """

    def __init__(self, setup: Setup, step: loop.ThreePrograms, split: str, tasks: int):
        self._env, self._split, self._tasks = setup.env, split, tasks
        self._width, self._play = step.trajectories, step.play
        shared = tasks <= MOST_BLOCKS * self._width and self._width <= MOST_FILL * tasks
        self._alone = None if shared else jax.jit(_make_exam(setup, split, tasks))
        self._blocks = -(-tasks // self._width)
        self._draw = step.placed(self._drawn)
        self._pick = step.placed(lambda drawn, index: jax.tree.map(lambda x: x[index], drawn))

    def __call__(self, params: Any, key: jax.Array, version: int = 0) -> Trajectories:
        """Play it with parameters of this version, and bring what was played to the host."""
        if self._alone is not None:
            return jax.device_get(self._alone(params, key, version))
        drawn = self._draw(key, version)
        played = [jax.device_get(self._play(params, self._pick(drawn, index))) for index in range(self._blocks)]
        return jax.tree.map(lambda *x: np.concatenate(x)[: self._tasks], *played)

    def answers(self, key: jax.Array) -> Any:
        """The gold answers of the tasks, of an environment that has some."""
        assert self._env.answer is not None
        answer = jax.vmap(self._env.answer)
        return jit_quickly(lambda key: answer(exams.examined(self._env, key, self._tasks, self._split)))(key)

    def compile(self, params: Any, key: jax.Array) -> None:
        """Compile all programs."""
        if self._alone is not None:
            compile_ahead(self._alone, params, key, 0)
        else:
            drawn = compile_ahead(self._draw, key, 0)
            compile_ahead(self._play, params, compile_ahead(self._pick, drawn, 0))

    def _drawn(self, key: jax.Array, version: int) -> loop.RolloutTasks:
        """The trajectories of an examination, in blocks; the last is filled up with the first."""
        tasks, keys, _ = exams.exam_trajectories(self._env, key, self._tasks, self._split)
        index_bw = (jnp.arange(self._blocks * self._width) % self._tasks).reshape(self._blocks, self._width)
        tasks, keys = jax.tree.map(lambda x: x[index_bw], (tasks, keys))
        unused = jax.random.split(key, self._blocks)
        return loop.RolloutTasks(tasks, keys, index_bw, jnp.full(self._blocks, version, jnp.int32), unused)


# What was played ----------------------------------------------------------------------------------------


def _rollout_metrics(rollout: Trajectories, env: fg.Env, *, samples: int = 1, ks: Sequence[int] = (1,)) -> Evaluation:
    """The figures of so many trajectories a task."""
    figures = exams.evaluate_rollout(rollout, env, samples=samples, ks=ks)
    return replace(figures, right_tool=right_tool_share(env, jax.device_get(rollout)))


def first_records(rollout: Trajectories, env: fg.Env, gold: tuple[Any, Any] | None) -> list[Played]:
    """The first trajectories; a task is asked by what its environment says first, and is judged there.

    `gold` has the answers, (tokens_nl, length_n), where there are some.
    """
    few = jax.tree.map(lambda x: x[:RECORDED], jax.device_get(rollout))
    asked = (np.where(chosen, PAD, tokens) for tokens, chosen in zip(few.tokens[:, 0], few.chosen[:, 0], strict=True))
    answers = [] if gold is None else [(in_words(env, *one),) for one in zip(*jax.device_get(gold), strict=True)]
    tasks = [
        fg.Task(f"{env.name}-{n}", in_words(env, tokens), answers[n] if answers else (), env.name)
        for n, tokens in enumerate(asked)
    ]
    return records_of(few, tasks, env.tools)


def stories(rollouts: Sequence[Trajectories], env: fg.Env) -> list[str]:
    """One task that was failed before and solved after, if there is one, in words."""
    right = [np.asarray(rollout.correct) for rollout in rollouts]
    index = int(np.argmax(~right[0] & right[1]))
    names = ("before", "after")
    told = [indent(story(env, rollout, index), " " * 4) for rollout in rollouts]
    return [f"{name}:\n{words}" for name, words in zip(names, told, strict=True)]


# The recipe ---------------------------------------------------------------------------------------------


def train(
    config: Config,
    folder: str | Path,
    *,
    every: int = 10,
    resume: bool = True,
    loggers: Sequence[str] = (),
    budget: TimeBudget = ENDLESS,
) -> dict[str, Any]:
    """Train in a folder, or go on there -> the result; a validation and a checkpoint come `every` so many updates."""
    path = Path(folder)
    return run_session(PureWork(open(config), path), path, every=every, resume=resume, loggers=loggers, budget=budget)


def evaluate(
    config: Config, folder: Path, *, seed: int = 1000, tasks: int = 1000, samples: int = 1
) -> tuple[int | None, Tested]:
    """Test a run's start and its best planner on fresh tasks -> (the update of the best, figures)."""
    setup = open(config)
    session = open_session(PureWork(setup), folder)
    best, final = session.best_params()
    session.progress.say(f"playing {tasks} test tasks with the start, and with update {best}")
    play, key = jax.jit(_make_exam(setup, "test", tasks, samples)), jax.random.key(seed)
    rollouts = [play(one, key) for one in (session.start, final)]
    before, after = (_rollout_metrics(one, setup.env, samples=samples, ks=sorted({1, samples})) for one in rollouts)
    return best, Tested([before, after], before_after_table(before, after), {})
