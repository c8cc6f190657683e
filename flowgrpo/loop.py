"""The single-process loop: the oracle that every other schedule is tested against.

    rollout -> score_trajectories -> advantages, weights, targets -> pack -> update,  again and again

An iteration is three programs with packing on the host between them, or one program that can be scanned over updates
and vmapped over seeds; both give the same numbers (F3). Packed on the host, what contexts begin with alike is computed
once, where policy and critic can (`hidden_tree`). Everything an iteration draws comes from
`fold_in(seed, update)`, so a run that goes on from a saved state goes on exactly as it would have (S1).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from flowgrpo.contracts import Algorithm, Env, Metrics, Policy
from flowgrpo.envs.env import PAD
from flowgrpo.learner.critic import Valuation, explained_variance, make_value_score, without_critic
from flowgrpo.learner.diagnostics import WATCH, signal
from flowgrpo.learner.imitation import demonstrate, imitation_rows, make_supervised
from flowgrpo.learner.scoring import ScoreTrajectories, make_score_trajectories
from flowgrpo.learner.state import LearnerState, init_learner
from flowgrpo.learner.update import Update, make_update
from flowgrpo.models.trainable import WHOLE, Trained, acting, cast
from flowgrpo.parallel.compile_ahead import compile_ahead, jit_quickly, on_host
from flowgrpo.parallel.row_sharding import DeviceMesh, many_updates, over_runs, replicated, stack_trees
from flowgrpo.report.health import make_sampler_warning
from flowgrpo.rollout.compiled import make_rollout, repeat, summarise, tool_mix
from flowgrpo.rollout.exams import draw_tasks
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
        narrowest       fewest rows that a turn's last actions are decoded in; None: as many as its first
        compute_dtype   what parameters are cast to where they are used; None: their own. float16 wants an optimizer
                        `with_loss_scale`

    An update learns from `queries * samples` trajectories.
    """

    queries: int = 32
    samples: int = 8
    oversample: int = 1
    temperature: float = 1.0
    micro_rows: int = 16
    mini_batches: int = 1
    epochs: int = 1
    narrowest: int | None = None
    compute_dtype: Any = None

    def __post_init__(self):
        for name in ("queries", "samples", "oversample", "micro_rows", "mini_batches", "epochs", "narrowest"):
            check_range("Settings", name, getattr(self, name), 1, whole=True, optional=name == "narrowest")
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

    score_trajectories: Callable[[Run, Trajectories], Trajectories]  # scores what advantages read
    credit: Callable[[Trajectories], Credit]
    update: Callable[[Run, Batch], tuple[Run, Metrics]]
    packer: Callable[..., Callable[..., Batch]] = partial(make_packer, False)  # (longest=, trajectories=, turns=)


class RolloutTasks(struct.PyTreeNode):
    """Tasks that are to be played, a trajectory each."""

    tasks: Any
    keys: Array  # n: from which each trajectory follows
    group: Array  # n
    version: Array  # of the parameters that play
    judge_key: Array


Judge = Callable[[Trajectories, Array], Trajectories]  # (trajectories, key) -> the same with another outcome


class Iteration(NamedTuple):
    """The stages of one update, and what they are bound to; pure, to be jitted by the caller."""

    env: Env
    algorithm: Algorithm
    settings: Settings
    mesh: DeviceMesh
    draw: Callable[[Run], RolloutTasks]
    play: Callable[[Any, RolloutTasks], Trajectories]  # (params, what was drawn)
    judge: Judge | None  # without one the outcome is what the environment paid
    score_trajectories: Callable[[Run, Trajectories], Trajectories]
    credit: Callable[[Trajectories], Credit]
    update: Callable[[Run, Batch], tuple[Run, Metrics]]
    packer: Callable[..., Callable[..., Batch]]  # of packing on the host, as `Learning` has it
    lay_out: Callable[..., Batch]  # (trajectories, *credit) -> rows, in a way that compiles

    def rollout(self, run: Run) -> Trajectories:
        """Draw tasks, play them, and judge what came of it."""
        drawn = self.draw(run)
        played = self.play(run.learner.params, drawn)
        return played if self.judge is None else self.judge(played, drawn.judge_key)


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
) -> Iteration:
    """Make the stages of an iteration; without a `judge` the outcome is what the environment paid.

    With a policy on a mesh, each of its devices rolls out and learns from its share of the trajectories.
    """
    if algorithm.name == "gigpo" and env.anchor is Env._field_defaults["anchor"]:
        raise BadInput(f"gigpo compares turns of equal states, but {env.name} has no anchor: give it one")
    sampling: dict[str, Any] = {"temperature": settings.temperature, "narrowest": settings.narrowest}
    rollout = make_rollout(env, policy, hints=algorithm.hindsight, **sampling)
    slots = longest(env)
    rest = {"banned": (PAD,), "critic": critic, "trained": trained, "slots": slots}
    learning = make_learning(policy, algorithm, optimizer, settings, **rest)

    def draw(run: Run) -> RolloutTasks:
        task_key, sample_key, judge_key = jax.random.split(jax.random.fold_in(run.key, run.update), 3)
        queries = settings.queries * settings.oversample
        tasks, group_n = repeat(draw_tasks(env, task_key, queries, "train"), settings.samples)
        return RolloutTasks(tasks, jax.random.split(sample_key, len(group_n)), group_n, run.learner.version, judge_key)

    def play(params: Any, drawn: RolloutTasks) -> Trajectories:
        params = sampled(params, settings.compute_dtype)
        return rollout(params, drawn.tasks, drawn.keys, drawn.group, drawn.version)

    lay_out = partial(_lay_out, slots=slots, skips=algorithm.skips)
    bound = (env, algorithm, settings, policy.mesh, draw, play, judge)
    return Iteration(*bound, lay_out=lay_out, **learning._asdict())


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
    sizes: dict[str, Any] = {"micro_rows": settings.micro_rows, "compute_dtype": settings.compute_dtype}
    # What has to be scored before the advantages is scored once, for them and for the loss.
    needs = algorithm.needs & {"logp_ref", "value"} if algorithm.before else frozenset()
    learn = partial(
        make_update,
        policy,
        algorithm,
        optimizer,
        mini_batches=settings.mini_batches,
        epochs=settings.epochs,
        score=None if critic is None else make_value_score(policy, critic, **scoring),
        trained=trained,
        watch=WATCH._replace(warns=False),  # `train_loop` warns, and a run does in warnings.jsonl
        compute_dtype=settings.compute_dtype,
        **scoring,
    )
    score_trajectories = (
        make_score_trajectories(
            policy, critic=critic, needs=needs, slots=slots, hindsight=algorithm.hindsight, **scoring, **sizes
        )
        if needs
        else None
    )
    updates = {"learn": learn(micro_rows=settings.micro_rows), "learn_trees": learn(micro_rows=1)}
    stages = _Stages(algorithm, settings, trained, score_trajectories, **updates)
    rows = {"micro_rows": settings.micro_rows, "ranks": settings.mini_batches}
    packer = partial(make_packer, shares_prefixes(policy, critic), **rows)
    return Learning(stages.score_trajectories, stages.credit, stages.update, packer)


def shares_prefixes(policy: Policy, critic: Valuation | None = None) -> bool:
    """Whether rows that are packed on the host are trees: where the policy reads them, and so does a critic."""
    return policy.hidden_tree is not None and (critic is None or critic.reads_trees)


def longest(env: Env) -> int:
    """Tokens of the longest possible trajectory."""
    sizes = env.sizes
    return sizes.prompt + (sizes.turns - 1) * sizes.observation + sizes.turns * sizes.action


# Before the loop --------------------------------------------------------------------------------------


def demonstration_rows(env: Env, key: Array, *, rows: int, split: str = "train") -> Batch:
    """Play fresh demonstrations, and lay them out for imitation, one a row; pure."""
    task_key, play_key = jax.random.split(key)
    played = demonstrate(env, draw_tasks(env, task_key, rows, split), jax.random.split(play_key, rows))
    return jax.tree.map(lambda x_rs: x_rs[:, : longest(env)], imitation_rows(played))


def imitate(
    env: Env, policy: Policy, optimizer: optax.GradientTransformation, params: Any, key: Array, *, steps: int, rows=64
) -> tuple[Any, Array]:
    """Imitate the environment's own demonstrations -> parameters, and the loss of every step; jits, and vmaps.

    A policy that solves nothing has no signal to learn from, so imitation comes first.
    """
    step = make_supervised(policy, optimizer, banned=(PAD,))

    def one(state: LearnerState, index: Array) -> tuple[LearnerState, Array]:
        return step(state, demonstration_rows(env, jax.random.fold_in(key, index), rows=rows))

    learner, losses = jax.lax.scan(one, init_learner(params, optimizer), jnp.arange(steps))
    return learner.params, losses


# The stages -------------------------------------------------------------------------------------------


def sampled(params: Any, compute_dtype: Any) -> Any:
    """The parameters that rollouts sample from: those of the policy, as the update scores with them (F7)."""
    return acting(params) if compute_dtype is None else cast(acting(params), compute_dtype)


@dataclass(frozen=True, eq=False)
class _Stages:
    """The functions of a `Learning`, and all that they are bound to."""

    algorithm: Algorithm
    settings: Settings
    trained: Trained
    scoring: ScoreTrajectories | None
    learn: Update
    learn_trees: Update  # one at a time, as each is as long as a micro-batch

    def score_trajectories(self, run: Run, trajectories: Trajectories) -> Trajectories:
        """Score what advantages read, where anything has to be scored."""
        if self.scoring is None:
            return trajectories
        params = run.learner.params
        return self.scoring(params, self.trained.put(params, run.reference), trajectories)

    def credit(self, trajectories: Trajectories) -> Credit:
        """Advantages, weights and targets, of at most `queries` groups: those with a signal first."""
        algorithm, settings = self.algorithm, self.settings
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

    def update(self, run: Run, batch: Batch) -> tuple[Run, Metrics]:
        """Change the run by an update on a batch."""
        params, reference, every = run.learner.params, run.reference, self.algorithm.reference_every
        learn = self.learn if batch.tree is None else self.learn_trees
        learner, metrics = learn(run.learner, batch, self.trained.put(params, reference))
        if every is not None:
            fresh = (run.update + 1) % every == 0
            now = without_critic(self.trained.take(learner.params))
            reference = jax.tree.map(lambda x, old: jnp.where(fresh, x, old), now, reference)
        run = run.replace(learner=learner, reference=reference, update=run.update + 1)
        return run, metrics | explained_variance(batch)


def _lay_out(trajectories: Trajectories, adv, weights, target=None, *, slots: int, skips: bool) -> Batch:
    """Lay one trajectory into each row, without slots that no trajectory can fill.

    Trajectories without an advantage weigh nothing where that gives no gradient, as `pack` leaves them out.
    """
    if skips:
        signal_n = (adv != 0).reshape(len(adv), -1).any(axis=1)
        weights = jnp.where(signal_n.reshape(-1, *(1,) * (weights.ndim - 1)), weights, 0.0)
    return jax.tree.map(lambda x_rs: x_rs[:, :slots], rows_by_trajectory(trajectories, adv, weights, target))


# Put together -----------------------------------------------------------------------------------------


def one_program(iteration: Iteration) -> Callable[[Run], tuple[Run, Metrics]]:
    """A whole iteration as one pure function: jit it, scan it over updates, vmap it over seeds."""
    tools, samples = len(iteration.env.tools), iteration.settings.samples

    def step(run: Run) -> tuple[Run, Metrics]:
        played = iteration.rollout(run)
        trajectories = iteration.score_trajectories(run, played)
        credit = iteration.credit(trajectories)
        run, metrics = iteration.update(run, iteration.lay_out(trajectories, *credit))
        return run, metrics | rollout_metrics(played, credit, tools=tools, samples=samples)

    return step


def three_programs(iteration: Iteration) -> "ThreePrograms":
    """Build `step(run)`: a whole iteration, with packing on the host between programs that are each compiled once."""
    return ThreePrograms(iteration)


class ThreePrograms:
    """An iteration in programs of its own stages, as `step(run) -> (run, metrics)`.

    The rollout's program is `play`, which plays other tasks as well, where they are `placed` like an iteration's own.
    """

    def __init__(self, iteration: Iteration):
        settings, mesh = iteration.settings, iteration.mesh
        self.trajectories = settings.queries * settings.oversample * settings.samples
        self._mesh = mesh if isinstance(mesh, Mesh) else None
        self._draw = self.placed(iteration.draw)
        self.play = jax.jit(iteration.play)
        self._judge = None if iteration.judge is None else jax.jit(iteration.judge)
        self.learn = make_learn(
            Learning(iteration.score_trajectories, iteration.credit, iteration.update, iteration.packer),
            iteration.algorithm,
            tools=len(iteration.env.tools),
            samples=settings.samples,
            longest=longest(iteration.env),
            trajectories=settings.queries * settings.samples,
        )

    def __call__(self, run: Run) -> tuple[Run, Metrics]:
        drawn = self._draw(run)
        played = self.play(run.learner.params, drawn)
        return self.learn(run, played if self._judge is None else self._judge(played, drawn.judge_key))

    def placed(self, draw: Callable[..., Any]) -> Any:
        """Jit what draws tasks so that they lie as an iteration's do."""
        return jit_quickly(draw, out_shardings=replicated(self._mesh))

    def compile(self, run: Run) -> None:
        """Compile all programs for a run like this, which may be done in a thread while something else runs."""
        drawn = compile_ahead(self._draw, run)
        played = compile_ahead(self.play, run.learner.params, drawn)
        judged = played if self._judge is None else compile_ahead(self._judge, played, drawn.judge_key)
        self.learn.compile(run, judged)


def make_learn(
    learning: Learning,
    algorithm: Algorithm,
    *,
    tools: int,
    samples: int,
    longest: int,
    trajectories: int,
    turns: int = 1,
) -> "Learn":
    """`learn(run, played)`: scoring, credit, packing on the host, update, figures of all.

    At most so many `trajectories` are learned from, each of up to `turns` contexts, the `longest` of so many tokens.
    """
    figures_of = jax.jit(partial(rollout_metrics, tools=tools, samples=samples))
    packing = learning.packer(longest=longest, trajectories=trajectories, turns=turns)
    return Learn(learning._replace(**_jitted(learning)), algorithm, figures_of, packing)


def _jitted(learning: Learning) -> dict[str, Any]:
    return {name: jax.jit(getattr(learning, name)) for name in ("score_trajectories", "credit", "update")}


@dataclass(frozen=True, eq=False)
class Learn:
    """The stages of an iteration after its rollout, as `learn(run, played) -> (run, metrics)`."""

    stages: Any  # a Learning, whose stages are jitted
    algorithm: Algorithm
    figures_of: Any
    packing: Callable[..., Batch]  # (trajectories, adv, weights, target=..., skip_no_signal=...)

    def __call__(self, run: Run, played: Trajectories) -> tuple[Run, Metrics]:
        scored = self.stages.score_trajectories(run, played) if self.algorithm.before else played
        credit = jax.device_get(self.stages.credit(scored))
        trajectories = jax.device_get(scored)
        batch = self.pack(trajectories, credit)
        run, metrics = self.stages.update(run, batch)
        fates = count_fates(trajectories, credit, batch, self.algorithm)
        return run, metrics | self.figures_of(played, credit) | fates | token_counts(batch)

    def pack(self, trajectories: Trajectories, credit: Credit) -> Batch:
        """Pack what has a signal into rows, on the host."""
        rest = {"target": credit.target, "skip_no_signal": self.algorithm.skips}
        return self.packing(trajectories, *credit[:2], **rest)

    def compile(self, run: Run, played: Trajectories) -> None:
        """Compile all programs for a run and trajectories of these shapes."""
        scored = compile_ahead(self.stages.score_trajectories, run, played) if self.algorithm.before else played
        credit = on_host(compile_ahead(self.stages.credit, scored))
        blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (on_host(scored), credit))
        compile_ahead(self.stages.update, run, self.pack(*blank))
        compile_ahead(self.figures_of, played, credit)


def count_fates(trajectories: Trajectories, credit: Credit, batch: Batch, algorithm: Algorithm) -> dict[str, int]:
    """Count the tokens of all trajectories by what became of them (A6)."""
    ledger = account(trajectories, credit.weights, batch, adv=credit.adv if algorithm.skips else None)
    return {f"tokens_{fate.name.lower()}": count for fate, count in ledger.fates.items()}


def token_counts(batch: Batch) -> dict[str, int]:
    """Tokens of all contexts of a batch, each counted alone, and those that are computed."""
    return dict(zip(("context_tokens", "computed_tokens"), count_tokens(batch), strict=True))


def rollout_metrics(trajectories: Trajectories, credit: Credit, *, tools: int, samples: int) -> Metrics:
    """Figures of all that was rolled out, so that its advantages are those before packing left any out."""
    figures = summarise(trajectories, samples=samples) | {"tool_calls": tool_mix(trajectories, tools)}
    return figures | signal(trajectories, credit.adv, credit.weights)


def train_loop(
    step: Callable[[Run], tuple[Run, Metrics]], run: Run, updates: int, *, warns: bool = True
) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Run after run until `updates` are done, with the numbers of each on the host.

    A sampler that disagrees with the learner is warned of, unless the caller looks at the figures itself.
    """
    warn = make_sampler_warning()
    while int(run.update) < updates:
        run, metrics = step(run)
        figures = {name: np.asarray(value).tolist() for name, value in jax.device_get(metrics).items()}
        if warns and "correction" not in figures:
            warn(figures.get("sampler_kl", 0.0))
        yield run, {"update": int(run.update)} | figures


def train_many(
    step: Callable[[Run], tuple[Run, Metrics]],
    runs: Sequence[Run],
    updates: int,
    *,
    lanes: int | None = None,
    mesh: DeviceMesh = None,
) -> tuple[Run, dict[str, np.ndarray]]:
    """So many updates of several runs at once, seeds for instance: `step` is that of `one_program`, not yet jitted.

    Gives the runs stacked into one, and every figure as [run, update]. It is one program, scanned over the updates;
    `many.over_runs` says what lanes and a mesh are.
    """
    whole = over_runs(lambda run: many_updates(step, run, updates=updates), lanes=lanes, mesh=mesh)
    after, metrics = jax.jit(whole)(stack_trees(runs))
    return after, {name: np.asarray(value) for name, value in jax.device_get(metrics).items()}
