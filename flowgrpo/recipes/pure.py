"""The recipe of a run on a pure environment: imitation, then RL by compiled iterations.

result = RECIPE.train(preset("maze", updates=50), "runs/maze")
setup = build(Config())     the parts: environment, policy, algorithm, optimizer, the stages of an iteration
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from flowgrpo.algorithms.compose import last_turn_only
from flowgrpo.contracts import Algorithm, Env, Policy
from flowgrpo.envs.env import PAD, format_trajectory, to_words
from flowgrpo.envs.lookup import World, calls_right_tool
from flowgrpo.envs.play import Episode
from flowgrpo.evaluation.metrics import Evaluation
from flowgrpo.learner.critic import (
    ValueModel,
    copied_trunk,
    partition_optimizer,
    separate_network,
    shared_trunk,
    with_critic,
)
from flowgrpo.learner.imitation import make_supervised, make_validation
from flowgrpo.learner.state import adamw, init_learner
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import HEAD, make_critic
from flowgrpo.models.decoder import make_policy, matrices
from flowgrpo.models.hf import Model
from flowgrpo.models.trainable import ActorCritic, actor_params
from flowgrpo.parallel.compile_ahead import compile_ahead, jit_quickly
from flowgrpo.parallel.sharding import critic_axes, decoder_axes, place_state, resolve_mesh, shard_policy
from flowgrpo.recipes.pure_config import Config
from flowgrpo.recipes.pure_config import preset as preset
from flowgrpo.recipes.recipe import NO_OBJECTS, Objects, Recipe, plain_build
from flowgrpo.recipes.registry import decayed_adamw, make_algorithm, make_env
from flowgrpo.recipes.word_planner import WORDS, word_model
from flowgrpo.recipes.word_planner import small_decoder_config as small_decoder_config
from flowgrpo.rollout import exams
from flowgrpo.rollout.compiled import make_rollout, repeat, shuffled_rewards
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.rollout.trajectory_view import to_records
from flowgrpo.training.iteration import Iteration, Rollout, RolloutCallbacks
from flowgrpo.training.language_model import write_trajectories
from flowgrpo.training.pure_env import (
    CompiledRollout,
    PureStages,
    RolloutTasks,
    demonstration_rows,
    make_stages,
    split_step,
)
from flowgrpo.training.run_dir import read_run
from flowgrpo.training.session import (
    RolloutTrainable,
    Step,
    TestReport,
    Validation,
    before_after_table,
    open_session,
    train_line,
    validation_of,
)
from flowgrpo.training.stages import IterationSettings, TrainState
from flowgrpo.training.warm_start import WarmStart
from flowgrpo.types import BadInput, Metrics, Params, PyTree, Task, Trajectories

NAME = "pure"
# By the vocabulary of an environment: (tokens, length) -> whether an action calls the right tool for its question.
IS_RIGHT_TOOL: dict[tuple[str, ...], Callable] = {World().vocabulary: calls_right_tool}
VALIDATION_ROWS = 256
VALIDATION_TASKS = 256
VALIDATE_EVERY, PATIENCE = 50, 10  # steps between validations of the warm start; validations without progress
RECORDED_TRAJECTORIES = 200  # test trajectories that are written
MAX_BLOCKS, MAX_UNUSED = 16, 4  # of an evaluation by an iteration's program: blocks, and size of one over the tasks


class Setup(NamedTuple):
    """The parts of a run."""

    config: Config
    env: Env
    decoder: DecoderConfig
    policy: Policy
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    sizes: IterationSettings
    stages: PureStages
    to_mesh: Callable[[PyTree], PyTree]  # places a tree of parameters on the mesh
    critic: ValueModel | None = None


def build(config: Config, *, objects: Objects = NO_OBJECTS) -> Setup:
    """The parts that a Config describes; an environment, algorithm, optimizer or DecoderConfig replaces its own."""
    objects.check(NAME, "env", "model", "algorithm", "optimizer")
    env = make_env(config.environment.env) if objects.env is None else objects.env
    if not isinstance(env, Env):
        raise BadInput(f"the environment {env!r:.80} is no fg.Env, which the recipe {NAME} compiles: give one")
    decoder = small_decoder_config(env, config) if objects.model is None else objects.model
    if not isinstance(decoder, DecoderConfig):
        raise BadInput(
            f"the recipe {NAME} trains a small model of its environment's words: give its shape, a DecoderConfig, "
            f"instead of a {type(decoder).__name__}"
        )
    if decoder.v != len(env.vocabulary):
        raise BadInput(
            f"the model has {decoder.v} words and the environment {env.name} {len(env.vocabulary)}: give a "
            f"DecoderConfig with v={len(env.vocabulary)}"
        )
    policy = make_policy(decoder, unroll=True)
    algorithm = objects.algorithm
    if algorithm is None:
        if (config.learner.algorithm == "opd") != (config.learner.teacher is not None):
            raise BadInput("--algorithm=opd and --teacher=RUN go together: give both, or neither")
        algorithm = make_algorithm(
            config.learner.algorithm,
            beta=config.learner.beta,
            clip_high=config.learner.clip_high,
            entropy_bonus=config.learner.entropy_bonus,
            gamma=config.learner.gamma,
            lam=config.learner.lam,
            max_tokens=env.sizes.turns * env.sizes.action,
        )
        if config.run.control == "last_turn":
            algorithm = last_turn_only(algorithm)

    steps = config.learner.decay_updates * config.learner.mini_batches * config.learner.epochs
    muon_matrices = matrices(decoder) if config.learner.optimizer == "muon" else None
    optimizer = objects.optimizer
    if optimizer is None:
        optimizer = decayed_adamw(config.learner.learning_rate, steps, config.learner.decay_to, matrices=muon_matrices)
    critic = None
    if algorithm.targets is not None:  # a critic starts with the policy's trunk
        if config.learner.critic == "shared":
            critic = shared_trunk(policy, decoder)
        else:
            critic = separate_network(policy, make_critic(decoder), init=copied_trunk(decoder))
        optimizer = partition_optimizer(
            optimizer, decayed_adamw(config.learner.critic_rate, steps, config.learner.decay_to)
        )

    sizes = IterationSettings(
        queries=config.rollout.queries,
        samples=config.rollout.samples,
        oversample=config.rollout.oversample,
        temperature=config.rollout.temperature,
        mini_batches=config.learner.mini_batches,
        epochs=config.learner.epochs,
    )
    judge = partial(shuffled_rewards, samples=sizes.samples) if config.run.control == "shuffled_rewards" else None
    mesh = resolve_mesh(config.devices.mesh)
    axes: Any = decoder_axes(decoder)  # axis letters of all parameters
    policy = shard_policy(policy, mesh, axes)
    if critic is not None:
        axes = ActorCritic(axes, critic_axes(decoder) if config.learner.critic == "own" else {HEAD: "d"})
    to_mesh = partial(place_state, mesh=mesh, axes=axes)
    stages = make_stages(env, policy, algorithm, optimizer, sizes, judge=judge, critic=critic)
    return Setup(config, env, decoder, policy, algorithm, optimizer, sizes, stages, to_mesh, critic)


def teacher_params(config: Config) -> Params:
    """The best planner of the teacher's run, which must have the same environment and shape."""
    folder = Path(str(config.learner.teacher))
    run = read_run(folder)
    if run["recipe"] != NAME:
        raise BadInput(f"--teacher={folder} is a run of {run['recipe']}: give one of the quickstart")
    teacher = Config.from_json(run["settings"])
    for name in ("env", "model_dim", "layers", "head_dim"):
        own, other = config.settings()[name], teacher.settings()[name]
        if own != other:
            raise BadInput(f"--teacher={folder} has {name} {other}, but this run {own}: they must be the same")
    return actor_params(open_session(PureTrainable(build(teacher)), folder).best_params()[1])


def seed_keys(seed: int) -> dict[str, jax.Array]:
    """A random key for each purpose of a run."""
    names = ("start", "demonstrations", "run", "validation", "test")
    return dict(zip(names, jax.random.split(jax.random.key(seed), len(names)), strict=True))


# Imitation --------------------------------------------------------------------------------------------


def warm_optimizer(setup: Setup) -> optax.GradientTransformation:
    """The optimizer of the imitation before RL."""
    return adamw(
        learning_rate=setup.config.warm_start.warm_rate,
        warmup_steps=20,
        decay_steps=setup.config.warm_start.warm_steps,
        matrices=matrices(setup.decoder),
    )


def planner_imitation(setup: Setup, keys: Mapping[str, jax.Array]) -> WarmStart:
    """The imitation before RL. The demonstrations of a step follow from its number, so it can be resumed."""
    config, key = setup.config, keys["demonstrations"]
    draw = jit_quickly(partial(demonstration_rows, setup.env, rows=config.warm_start.warm_rows))
    validation_rows = jit_quickly(partial(demonstration_rows, setup.env, rows=VALIDATION_ROWS, split="validation"))(key)
    loss = jax.jit(make_validation(setup.policy, banned=(PAD,)))
    optimizer = warm_optimizer(setup)
    params = jax.jit(setup.policy.init)(keys["start"])
    return WarmStart(
        state=setup.to_mesh(init_learner(params, optimizer)),
        step=jax.jit(make_supervised(setup.policy, optimizer, banned=(PAD,))),
        batches=lambda first: (
            draw(jax.random.fold_in(key, step)) for step in range(first + 1, config.warm_start.warm_steps + 1)
        ),
        validate=lambda params: loss(params, validation_rows),
        steps=config.warm_start.warm_steps,
        every=VALIDATE_EVERY,
        patience=PATIENCE,
    )


def imitation_step(setup: Setup, key: jax.Array) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """A control experiment: imitate as many trajectories per update as RL would sample."""
    rows = setup.sizes.queries * setup.sizes.samples
    step = make_supervised(setup.policy, setup.optimizer, banned=(PAD,), micro_rows=setup.sizes.micro_rows)

    def imitate(state: TrainState) -> tuple[TrainState, Metrics]:
        update_key = jax.random.fold_in(jax.random.fold_in(key, 1), state.update)
        batch = demonstration_rows(setup.env, update_key, rows=rows)
        learner, loss = step(state.learner, batch)
        tokens = (batch.segments > 0).sum()
        return state.replace(learner=learner, update=state.update + 1), {"loss": loss, "tokens": tokens}

    return jax.jit(imitate)


# Training ---------------------------------------------------------------------------------------------


class PureTrainable(RolloutTrainable):
    """Warm start by imitation, iterations with one program per stage, evaluations on fresh tasks.

    The first test trajectories are written to `folder`, if there is one.
    """

    def __init__(self, setup: Setup, folder: Path | None = None):
        self.setup, self._folder, self._keys = setup, folder, seed_keys(setup.config.run.seed)
        self._roll_out = roll_out = CompiledRollout(setup.stages)
        self.iteration: Iteration = split_step(setup.stages, roll_out)
        # Programs of evaluations that a caller asks for.
        self._fresh_rollout = cache(
            lambda tasks, samples: jax.jit(_make_evaluation_rollout(setup, "validation", tasks, samples))
        )
        temperature = setup.config.rollout.temperature
        self._given_rollout = jax.jit(make_rollout(setup.env, setup.policy, temperature=temperature))
        counts = {"validation": VALIDATION_TASKS, "test": setup.config.evaluation.test_tasks}
        self._evaluations = {split: _Evaluation(setup, roll_out, split, count) for split, count in counts.items()}
        if setup.config.learner.teacher is not None and folder is not None:  # a run that is only read has saved it
            self.teacher_params = teacher_params(setup.config)
        super().__init__(
            NAME,
            setup.config,
            updates=setup.config.run.updates,
            name=setup.env.name,
            algorithm=setup.algorithm.name,
            optimizer=setup.optimizer,
            key=self._keys["run"],
        )

    def place(self, tree: PyTree) -> PyTree:
        return self.setup.to_mesh(tree)

    def init_params(self) -> Params:
        return self.setup.policy.init(self._keys["start"])

    def warm_start(self) -> WarmStart:
        return planner_imitation(self.setup, self._keys)

    def compile_ahead(self, state: TrainState) -> None:
        """Compile an iteration and the evaluations."""
        if self.setup.config.run.control != "supervised":
            self.iteration.compile(state)
        for split, evaluation in self._evaluations.items():
            evaluation.compile(state.learner.params, self._keys[split])

    def prepare_params(self, params: Params) -> Params:
        return with_critic(self.setup.critic, self._keys["start"], params)

    def make_step(self) -> Step:
        """An iteration; or a step of imitation, if that is the control."""
        if self.setup.config.run.control == "supervised":
            return imitation_step(self.setup, self._keys["demonstrations"])
        return self.iteration

    def roll_out(
        self, state: TrainState, callbacks: RolloutCallbacks, tasks: Any = None, samples: Any = None
    ) -> Rollout:
        return self._roll_out(state, callbacks, tasks, samples)

    def evaluate(self, params: Params, tasks: PyTree | int | None = None, samples: int = 1) -> Evaluation:
        """Evaluate parameters on the validation's tasks, on so many fresh ones, or on these."""
        env, key = self.setup.env, self._keys["validation"]
        if tasks is None and samples == 1:
            return _evaluate_rollout(self._evaluations["validation"](params, key), env)
        if isinstance(tasks, int | None):
            count = VALIDATION_TASKS if tasks is None else tasks
            trajectories = self._fresh_rollout(count, samples)(params, key)
        else:
            repeated, group_n = repeat(tasks, samples)
            keys_n = jax.random.split(key, len(group_n))
            trajectories = self._given_rollout(actor_params(params), repeated, keys_n, group_n)
        return _evaluate_rollout(trajectories, env, samples=samples, ks=sorted({1, samples}))

    def to_model(self, params: Params) -> Model:
        setup = self.setup
        objects = Objects(env=setup.env, model=setup.decoder)
        return word_model(setup.config, objects)._replace(params=actor_params(params))

    def metrics_line(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return train_line(metrics, tools=self.setup.env.tools)

    def validate(self, params: Params) -> Validation:
        rollout = self._evaluations["validation"](params, self._keys["validation"])
        return validation_of(_evaluate_rollout(rollout, self.setup.env))

    def test(self, params: Sequence[Params], versions: Sequence[int]) -> TestReport:
        """The table before / after training, and one task that failed before and is solved after."""
        env, evaluation, key = self.setup.env, self._evaluations["test"], self._keys["test"]
        rollouts = [evaluation(weights, key, version) for weights, version in zip(params, versions, strict=True)]
        if self._folder is not None:
            gold = None if env.answer is None else evaluation.answers(key)
            for when, rollout in zip(("before", "after"), rollouts, strict=True):
                path = self._folder / "trajectories" / f"test-{when}.jsonl"
                write_trajectories(path, first_records(rollout, env, gold))
        before, after = evaluations = [_evaluate_rollout(rollout, env) for rollout in rollouts]
        text = "\n".join([before_after_table(before, after), "", *format_examples(rollouts, env)])
        results = {"right_tool_before": before.right_tool, "right_tool_after": after.right_tool}
        return TestReport(evaluations, text, results)


def _make_evaluation_rollout(setup: Setup, split: str, tasks: int, samples: int = 1):
    """`rollout(params, key, version=0) -> Trajectories`, to be jitted; of an actor and its critic, the actor acts."""
    temperature = setup.config.rollout.temperature
    rollout = exams.make_evaluation_rollout(
        setup.env, setup.policy, split, tasks=tasks, samples=samples, temperature=temperature
    )
    return lambda params, key, version=0: rollout(actor_params(params), key, version)


class _Evaluation:
    """Rollouts of fresh tasks of a split, block by block, by the program that an iteration compiles anyway.

    An evaluation of far more or far fewer tasks than an iteration has is compiled as a program of its own.
    """

    def __init__(self, setup: Setup, roll_out: CompiledRollout, split: str, tasks: int):
        self._env, self._split, self._tasks = setup.env, split, tasks
        self._block_size, self._generate = roll_out.trajectories, roll_out.generate
        shares = tasks <= MAX_BLOCKS * self._block_size and self._block_size <= MAX_UNUSED * tasks
        self._own_program = None if shares else jax.jit(_make_evaluation_rollout(setup, split, tasks))
        self._num_blocks = -(-tasks // self._block_size)
        self._draw = roll_out.jit_tasks(self._draw_blocks)
        self._pick = roll_out.jit_tasks(lambda blocks, index: jax.tree.map(lambda x: x[index], blocks))

    def __call__(self, params: Params, key: jax.Array, version: int = 0) -> Trajectories:
        """The trajectories, on the host, with parameters of this version."""
        if self._own_program is not None:
            return jax.device_get(self._own_program(params, key, version))
        blocks = self._draw(key, version)
        rollouts = [
            jax.device_get(self._generate(params, self._pick(blocks, index))) for index in range(self._num_blocks)
        ]
        return jax.tree.map(lambda *x: np.concatenate(x)[: self._tasks], *rollouts)

    def answers(self, key: jax.Array) -> Any:
        """The gold answers of the tasks, as (tokens, length)."""
        assert self._env.answer is not None
        answer = jax.vmap(self._env.answer)
        return jit_quickly(lambda key: answer(exams.evaluation_tasks(self._env, key, self._tasks, self._split)))(key)

    def compile(self, params: Params, key: jax.Array) -> None:
        """Compile all programs."""
        if self._own_program is not None:
            compile_ahead(self._own_program, params, key, 0)
        else:
            blocks = compile_ahead(self._draw, key, 0)
            compile_ahead(self._generate, params, compile_ahead(self._pick, blocks, 0))

    def _draw_blocks(self, key: jax.Array, version: int) -> RolloutTasks:
        """The tasks and keys in blocks; the last block is filled up with the first tasks."""
        tasks, keys, _ = exams.evaluation_inputs(self._env, key, self._tasks, self._split)
        index_bw = (jnp.arange(self._num_blocks * self._block_size) % self._tasks).reshape(
            self._num_blocks, self._block_size
        )
        tasks, keys = jax.tree.map(lambda x: x[index_bw], (tasks, keys))
        unused = jax.random.split(key, self._num_blocks)
        return RolloutTasks(tasks, keys, index_bw, jnp.full(self._num_blocks, version, jnp.int32), unused)


# Metrics and records ------------------------------------------------------------------------------------


def draw_split(env: Env, split: str, *, count: int, seed: int = 0) -> PyTree:
    """Draw `count` tasks of a split, by a compiled program."""
    return jax.jit(partial(exams.draw_tasks, env, count=count, split=split))(jax.random.key(seed))


def episode_metrics(env: Env, episodes: Episode) -> dict[str, float]:
    """Means over episodes: success, errors and right tools in %, turns and calls per episode."""
    live, calls = np.asarray(episodes.live), np.asarray(episodes.live & (episodes.step.tool >= 0))
    metrics = {
        "success": 100 * np.mean(episodes.state.correct),
        "turns": live.sum(axis=1).mean(),
        "calls": calls.sum(axis=1).mean(),
        "errors": 100 * np.asarray(episodes.step.error)[live].mean(),
    }
    if env.vocabulary in IS_RIGHT_TOOL and calls.any():
        right = np.asarray(jax.vmap(jax.vmap(IS_RIGHT_TOOL[env.vocabulary]))(episodes.tokens, episodes.length))
        metrics["right tool"] = 100 * right[calls].mean()
    return {name: float(value) for name, value in metrics.items()}


def right_tool_fraction(env: Env, rollout: Trajectories) -> float | None:
    """Fraction of a policy's calls that go to the right tool; None if a call alone cannot tell."""
    calls_nt = np.asarray(rollout.tool) >= 0
    if env.vocabulary not in IS_RIGHT_TOOL or not calls_nt.any():
        return None

    def is_right(tokens_l: Array, chosen_l: Array) -> Array:
        """Of one turn, whose action comes right after its observation."""
        action = jnp.roll(jnp.where(chosen_l, tokens_l, PAD), -jnp.argmax(chosen_l))[: env.sizes.action]
        return IS_RIGHT_TOOL[env.vocabulary](action, chosen_l.sum())

    right_nt = jax.vmap(jax.vmap(is_right))(jnp.asarray(rollout.tokens), jnp.asarray(rollout.chosen))
    return float(np.asarray(right_nt)[calls_nt].mean())


def _evaluate_rollout(rollout: Trajectories, env: Env, *, samples: int = 1, ks: Sequence[int] = (1,)) -> Evaluation:
    """Metrics of `samples` trajectories a task, with the fraction of calls to the right tool."""
    evaluation = exams.evaluate_rollout(rollout, env, samples=samples, ks=ks)
    return replace(evaluation, right_tool=right_tool_fraction(env, jax.device_get(rollout)))


def first_records(rollout: Trajectories, env: Env, gold: tuple[Any, Any] | None) -> list[RecordedTrajectory]:
    """The first trajectories as records; a task's query is the environment's first observation.

    `gold` has the answers as (tokens_nl, length_n), if the environment has some.
    """
    first = jax.tree.map(lambda x: x[:RECORDED_TRAJECTORIES], jax.device_get(rollout))
    queries = (
        np.where(chosen, PAD, tokens) for tokens, chosen in zip(first.tokens[:, 0], first.chosen[:, 0], strict=True)
    )
    answers = [] if gold is None else [(to_words(env, *answer),) for answer in zip(*jax.device_get(gold), strict=True)]
    tasks = [
        Task(f"{env.name}-{n}", to_words(env, tokens), answers[n] if answers else (), env.name)
        for n, tokens in enumerate(queries)
    ]
    return to_records(first, tasks, env.tools)


def format_examples(rollouts: Sequence[Trajectories], env: Env) -> list[str]:
    """One task that failed before and is solved after, if there is one, as text."""
    correct = [np.asarray(rollout.correct) for rollout in rollouts]
    index = int(np.argmax(~correct[0] & correct[1]))
    texts = [indent(format_trajectory(env, rollout, index), " " * 4) for rollout in rollouts]
    return [f"{when}:\n{text}" for when, text in zip(("before", "after"), texts, strict=True)]


# The recipe ---------------------------------------------------------------------------------------------


def evaluate_params(
    setup: Setup, params: Sequence[Params], *, seed: int = 1000, tasks: int = 1000, samples: int = 1
) -> TestReport:
    """Test the start and the best parameters on the same fresh tasks, `samples` times each."""
    rollout, key = jax.jit(_make_evaluation_rollout(setup, "test", tasks, samples)), jax.random.key(seed)
    rollouts = [rollout(weights, key) for weights in params]
    before, after = (
        _evaluate_rollout(trajectories, setup.env, samples=samples, ks=sorted({1, samples}))
        for trajectories in rollouts
    )
    return TestReport([before, after], before_after_table(before, after), {})


RECIPE = Recipe(
    name=NAME,
    command="quickstart",
    Config=Config,
    preset=preset,
    build=plain_build(build),
    make_trainable=PureTrainable,
    test=evaluate_params,
    planner=WORDS,
    exact=False,
    all_devices=True,
)
