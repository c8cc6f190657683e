"""Train on a host environment: `HostedWork` has the stages of such a run for a `Session`.

An iteration is the one of `staged`, with a hosted rollout in the place of the compiled one: the engine takes the new
weights, the trajectories of all groups run at once, and while the last of them are judged the reference scores. The
setting `offload` says where models are that a stage does not use: "none" leaves everything on the device, "host" and
"disk" move it there, and destroy the engine's cache after each rollout. An iteration that takes longer than
`watch_seconds` says what it waits for. The tasks of an update follow from its number, and keys from
`fold_in(seed, update)`, so a run goes on exactly as it would have (S1).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo import loop
from flowgrpo.evaluation.metrics import repetition
from flowgrpo.models.trainable import WHOLE
from flowgrpo.recipes import hosted
from flowgrpo.recipes.hosted import (
    ADVANTAGES,
    HostedConfig,
    HostedSetup,
    compile_engines,
    dense,
    do_nothing,
    domains_of,
    in_order,
    kept,
    play_tasks,
    record,
    record_advantages,
    valid,
)
from flowgrpo.report.progress import Progress
from flowgrpo.report.watchdog import StageWatchdog
from flowgrpo.rewards.combine import CHECK
from flowgrpo.rollout.compiled import shuffled_rewards
from flowgrpo.rollout.effects import Journal
from flowgrpo.rollout.hosted import Hosted
from flowgrpo.rollout.records import Played
from flowgrpo.run.checkpoints import Checkpoints
from flowgrpo.run.run_dir import begin_anew, check_own
from flowgrpo.run.session import Step, Tested, TestedWork, Validation, Work, run_session, train_line, validation_of
from flowgrpo.run.time_budget import TimeBudget
from flowgrpo.run.warm_start import WarmStart
from flowgrpo.staged import JudgedRollout, RollOut, RolloutCallbacks, make_staged
from flowgrpo.types import BadInput, Status, Task


def begin_hosted(recipe: str, config: HostedConfig, folder: str | Path, *, resume: bool) -> Path:
    """The folder of a run; one that is another run's is refused before a model to start with is written there."""
    path = Path(folder)
    if resume:
        check_own(path, recipe, config.to_json(), may_differ=config.may_differ())
    return path


def train_hosted(
    open_setup: Callable[..., AbstractContextManager[HostedSetup]],
    make_work: Callable[[HostedSetup, str], Work],
    recipe: str,
    config: HostedConfig,
    folder: str | Path,
    *,
    every: int,
    resume: bool,
    loggers: Sequence[str],
    budget: TimeBudget,
) -> dict[str, Any]:
    """Train in a folder, or go on there; an earlier run is removed when all that the new one needs was found."""
    path = begin_hosted(recipe, config, folder, resume=resume)
    begin = do_nothing if resume else partial(begin_anew, path)
    with open_setup(config, path, begin=begin) as setup:
        work = make_work(compile_engines(setup), recipe)
        return run_session(work, path, every=every, loggers=loggers, budget=budget)


class HostedWork(TestedWork):
    """Rollouts over one engine, judged while others still generate; examinations on tasks that training never meets.

    Answers of tools, other roles and rewards are kept until a checkpoint covers them, so that a run which is killed in
    a rollout hears the same again.
    """

    def __init__(self, setup: HostedSetup, recipe: str):
        journal = Journal(setup.folder / "journal", _covered(setup.folder))
        progress = setup.progress or Progress(setup.config.updates)
        verdicts = None if setup.reward is None else journal.verdicts(setup.reward)
        effects = {"do": journal.effects(setup.do), "reward": verdicts}
        self.setup = setup._replace(**effects, journal=journal, progress=progress)
        self.trained, self.memory = setup.planner.trained, setup.prompts
        self.moves_models = setup.config.offload != "none"
        super().__init__(
            recipe,
            setup.config,
            updates=setup.config.updates,
            name=setup.name,
            algorithm=setup.algorithm.name,
            optimizer=setup.optimizer,
            key=run_key(setup),
            progress=progress,
        )

    def place(self, tree: Any) -> Any:
        return self.setup.planner.place(tree)

    def initial(self) -> Any:
        return jax.tree.map(jnp.copy, self.setup.planner.params)

    def frozen(self) -> Any:
        return self.setup.planner.params

    def warm_start(self) -> WarmStart:
        return self.setup.warm_start(self.setup)

    def make_step(self) -> Step:
        # The base of an adapter is the start's, too, and the rest of such a run is small.
        return make_hosted_step(self.setup, self.roll_out, donates=self.trained is WHOLE)

    def line(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        return train_line(figures, tools=self.setup.env.tools)

    def examine(self, params: Any) -> Validation:
        return validation_of(hosted.validate(self.setup, exam_key(self.setup, "validation"), params))

    def test(self, params: Sequence[Any], versions: Sequence[int]) -> Tested:
        return hosted.test(self.setup, exam_key(self.setup, "test"), params, versions)

    def roll_out(self, run: loop.Run, told: RolloutCallbacks) -> JudgedRollout:
        """The trajectories of all groups at once, recorded; the engine's losses are a matter of clocks."""
        setup, update, lost = self.setup, int(run.update), self.setup.engine.lost
        recomputed, prefilled = self.setup.engine.recomputed.tokens, self.setup.engine.prefilled
        setup.engine.swap(setup.planner.serve(run.learner.params), int(run.learner.version))
        tasks = training_tasks(setup, update)

        def on_played(so_far: Hosted) -> None:
            told.played(dense(setup, so_far))

        callbacks = {"on_played": on_played, "on_start": told.ask}
        if setup.journal is not None:
            setup.journal.forget(_covered(setup.folder))
        with kept(setup, "train", update + 1):
            key = _keys(run.key, update)[0]
            played = play_tasks(setup, setup.env, tasks, key, samples=setup.sizes.samples, **callbacks)
        if setup.progress is not None:
            setup.progress.step("learn", 0, 1)
        now = setup.engine.lost.fates
        more = {f"engine_{fate.name.lower()}": size - lost.fates.get(fate, 0) for fate, size in now.items()}
        more["engine_recomputed"] = setup.engine.recomputed.tokens - recomputed
        more["prompt_tokens"] = setup.engine.prefilled.prompt_tokens - prefilled.prompt_tokens
        more["prefilled_tokens"] = setup.engine.prefilled.computed - prefilled.computed
        return learned_from(setup, run, played, {"judging_seconds": played.seconds["judging"], **more})


def run_key(setup: HostedSetup) -> jax.Array:
    """The key that updates are made from."""
    return jax.random.split(jax.random.key(setup.config.seed), 3)[0]


def exam_key(setup: HostedSetup, split: str) -> jax.Array:
    """The key of the examinations on a split."""
    return jax.random.split(jax.random.key(setup.config.seed), 3)[("run", "validation", "test").index(split)]


# Training -----------------------------------------------------------------------------------------------


def make_hosted_step(setup: HostedSetup, roll_out: RollOut, *, donates: bool = False) -> Step:
    """`step(run) -> (run, metrics)`: one iteration, whose trajectories come from `roll_out`.

    With `donates` the update writes over the parameters and the optimizer's memory of the run that it is given.
    """
    sizes, config, planner = setup.sizes, setup.config, setup.planner
    return make_staged(
        planner.policy,
        setup.algorithm,
        setup.optimizer,
        sizes,
        roll_out,
        banned=setup.model.banned,
        tools=len(setup.env.tools),
        longest=config.context_tokens,
        trajectories=sizes.queries * sizes.oversample * sizes.samples,
        turns=1 if config.rendering == "append" else setup.env.turns,
        residency=setup.residency,
        donates=donates,
        release=setup.engine.release,  # new weights find nothing in it anyway
        watch=StageWatchdog(config.watch_seconds),
        trained=planner.trained,
    )


def training_tasks(setup: HostedSetup, update: int) -> list[Task]:
    """The tasks of an update, one a group."""
    if setup.prompts is not None:
        return setup.prompts.tasks(update)
    count = setup.sizes.queries * setup.sizes.oversample
    return setup.tasks("train", update * count, count)


def learned_from(setup: HostedSetup, run: loop.Run, played: Hosted, timings: Mapping[str, Any] = {}) -> JudgedRollout:
    """Make the rollout of an update: trajectories as arrays, with figures by domain; record the first groups."""
    played, update = in_order(played), int(run.update)  # as the rollout's arrays have them
    check_prompts_fit(setup.config, update, played.played)
    if update == 0:
        setup.check_first(played.played)
    rollout, judged = dense(setup, played), valid(played.played)
    if setup.config.control == "shuffled_rewards":
        judge_key = _keys(run.key, update)[1]
        shuffled = shuffled_rewards(rollout, judge_key, samples=setup.sizes.samples)
        rollout = jax.device_get(shuffled)
    first = [n for n, one in enumerate(played.played) if one.group < setup.config.recorded]
    recorded, path = [played.played[n] for n in first], setup.folder / "trajectories" / f"{update + 1:06d}.jsonl"
    record(path, recorded)
    fates = {f"tokens_{fate.name.lower()}": size for fate, size in played.ledger.fates.items()}
    right = {name: [one.correct for one in own] for name, own in domains_of(judged).items()}
    solved = {f"success_{name}": float(np.mean(own)) for name, own in right.items()}
    drawn = setup.share(update) if setup.prompts is None else setup.prompts.learn(update, played.played)
    seen = repetition(judged) | held_out(judged) | setup.seen(judged)

    def credited(credit: loop.Credit) -> None:
        record_advantages(path.with_suffix(ADVANTAGES), recorded, np.asarray(credit.adv)[np.array(first, int)])

    return JudgedRollout(rollout, {**solved, **seen, **fates, **drawn}, timings, credited)


def check_prompts_fit(config: HostedConfig, update: int, played: Sequence[Played]) -> None:
    """Raise `BadInput` where no prompt of an update left room for an action: there is nothing to learn from."""
    if played and all(one.status == Status.TOKEN_LIMIT and not one.turns for one in played):
        raise BadInput(
            f"--context_tokens={config.context_tokens} holds none of the prompts of update {update + 1} with an action "
            f"of --max_tokens={config.max_tokens}: raise it, or lower --max_tokens"
        )


def held_out(played: Sequence[Played]) -> dict[str, float]:
    """Average a held-out check, and the gap of the reward above it, over trajectories that have both; {} for none."""
    checked = [one for one in played if one.scored is not None and CHECK in one.scored.parts]
    if not checked:
        return {}
    check_n = np.array([one.scored.parts[CHECK] for one in checked if one.scored])
    reward_n = np.array([one.outcome for one in checked])
    return {CHECK: float(check_n.mean()), "gap": float((reward_n - check_n).mean())}


def _keys(key: jax.Array, update: int) -> jax.Array:
    """Of an update: the key that its trajectories sample from, and that of a control."""
    return jax.random.split(jax.random.fold_in(key, update))


def keys_of_group(key: jax.Array, update: int, index: int, *, groups: int, samples: int) -> jax.Array:
    """The keys of one group of an update, as a rollout of all of them gives it."""
    every = jax.random.split(_keys(key, update)[0], groups * samples)
    return every[index * samples : (index + 1) * samples]


def _covered(folder: Path) -> int:
    """The update whose checkpoint a run in this folder would go on from."""
    return Checkpoints(folder).latest() or 0
