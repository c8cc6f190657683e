"""The stages of a run on a host environment, for a `Session`: tasks and tools flow in, trained parameters flow out.

    with ... as setup:  one_run(hosted_work(setup), folder, every=10)

An iteration is the one of `staged`, with a hosted rollout in the place of the compiled one: the engine takes the new
weights, the trajectories of all groups run at once, and while the last of them are judged the reference scores. The
setting `offload` says where models are that a stage does not use: "none" leaves everything on the device, "host" and
"disk" move it there, and destroy the engine's cache after each rollout. An iteration that takes longer than
`watch_seconds` says what it waits for. The tasks of an update follow from its number, and keys from
`fold_in(seed, update)`, so a run goes on exactly as it would have (S1).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import hosted_exam
from experiments.hosted_setup import (
    ADVANTAGES,
    HostedSetup,
    dense,
    domains_of,
    in_order,
    kept,
    play,
    record,
    record_advantages,
    valid,
)
from experiments.prompts import open_share
from experiments.session import Work
from experiments.session_files import train_line
from flowgrpo import loop
from flowgrpo.learner.checkpoint import Checkpoints
from flowgrpo.report.progress import Progress
from flowgrpo.rewards.shaping import CHECK
from flowgrpo.rollout.exam import shuffled_rewards
from flowgrpo.rollout.hosted import Hosted
from flowgrpo.rollout.journal import Journal
from flowgrpo.rollout.records import Played
from flowgrpo.rollout.repetition import repetition
from flowgrpo.staged import Rolled, RollOut, Step, Told, make_staged
from flowgrpo.stuck import Watch
from flowgrpo.types import Task


def hosted_work(setup: HostedSetup) -> Work:
    """Rollouts over one engine, judged while others still generate; examinations on tasks that training never meets.

    What tools, other roles and rewards answered is kept until a checkpoint covers it, so that a run which is killed in
    a rollout hears the same again.
    """
    settings, journal = setup.settings, Journal(setup.folder / "journal", _covered(setup.folder))
    progress = setup.progress or Progress(settings["updates"])
    effects = {"do": journal.effects(setup.do), "reward": journal.verdicts(setup.reward)}
    setup = setup._replace(**effects, journal=journal, progress=progress)
    return Work(
        name=setup.name,
        algorithm=setup.algorithm.name,
        settings=settings,
        optimizer=setup.optimizer,
        key=run_key(setup),
        place=setup.planner.place,
        blank=lambda: jax.tree.map(jnp.zeros_like, setup.planner.params),
        warm_start=setup.warm_start,
        make_step=partial(make_step, setup),
        line=partial(train_line, tools=setup.env.tools),
        examine=partial(hosted_exam.validate, setup, exam_key(setup, "validation")),
        test=partial(hosted_exam.test, setup, exam_key(setup, "test")),
        trained=setup.planner.trained,
        frozen=lambda: setup.planner.params,
        memory=setup.prompts,
        progress=progress,
    )


def run_key(setup: HostedSetup) -> jax.Array:
    """The key that updates are made from."""
    return _split_seed(setup)["run"]


def exam_key(setup: HostedSetup, split: str) -> jax.Array:
    """The key of the examinations on a split."""
    return _split_seed(setup)[split]


def _split_seed(setup: HostedSetup) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(setup.settings["seed"]), 3)
    return dict(zip(("run", "validation", "test"), keys, strict=True))


# Training -----------------------------------------------------------------------------------------------


def make_step(setup: HostedSetup, roll_out: RollOut | None = None) -> Step:
    """`step(run) -> (run, metrics)`: one iteration; trajectories come from `roll_out`, where one is given."""
    sizes, settings, planner = setup.sizes, setup.settings, setup.planner
    appends, moves = settings["rendering"] == "append", settings["offload"] != "none"
    trajectories = sizes.queries * sizes.oversample * sizes.samples
    return make_staged(
        planner.policy,
        setup.algorithm,
        setup.optimizer,
        sizes,
        roll_out or partial(_roll_out, setup=setup),
        banned=setup.model.banned,
        tools=len(setup.env.tools),
        row_length=settings["context_tokens"],
        rows=trajectories if appends else trajectories * setup.env.turns,
        slots=settings["context_tokens"],
        residency=setup.residency,
        release=setup.engine.release if moves else lambda: 0,
        watch=Watch(settings["watch_seconds"]),
        trained=planner.trained,
        mesh=planner.mesh,
    )


def _roll_out(run: loop.Run, told: Told, *, setup: HostedSetup) -> Rolled:
    """The trajectories of all groups at once, recorded; the engine's losses are a matter of clocks."""
    sizes, update, lost = setup.sizes, int(run.update), setup.engine.lost
    setup.engine.swap(setup.planner.serve(run.learner.params), int(run.learner.version))
    tasks = training_tasks(setup, update)

    def on_played(so_far: Hosted) -> None:
        told.played(dense(setup, so_far).trajectories)

    callbacks = {"on_played": on_played, "on_start": told.ask}
    if setup.journal is not None:
        setup.journal.forget(_covered(setup.folder))
    with kept(setup, "train", update + 1):
        played = play(setup, setup.env, tasks, _keys(run.key, update)[0], samples=sizes.samples, **callbacks)
    if setup.progress is not None:
        setup.progress.step("learn", 0, 1)
    more = {
        f"engine_{fate.name.lower()}": size - lost.fates.get(fate, 0) for fate, size in setup.engine.lost.fates.items()
    }
    return learned_from(setup, run, played, {"judging_seconds": played.seconds["judging"], **more})


def training_tasks(setup: HostedSetup, update: int) -> list[Task]:
    """The tasks of an update, one a group."""
    if setup.prompts is not None:
        return setup.prompts.tasks(update)
    count = setup.sizes.queries * setup.sizes.oversample
    return setup.tasks("train", update * count, count)


def learned_from(setup: HostedSetup, run: loop.Run, played: Hosted, timings: Mapping[str, Any] = {}) -> Rolled:
    """Make the rollout of an update: trajectories as arrays, with figures by domain; record the first groups."""
    played, update = in_order(played), int(run.update)  # as the rollout's arrays have them
    rollout, judged = dense(setup, played), valid(played.played)
    if setup.settings["control"] == "shuffled_rewards":
        judge_key = _keys(run.key, update)[1]
        shuffled = shuffled_rewards(rollout.trajectories, judge_key, samples=setup.sizes.samples)
        rollout = rollout.replace(trajectories=jax.device_get(shuffled))
    first = [n for n, one in enumerate(played.played) if one.group < setup.settings["recorded"]]
    recorded, path = [played.played[n] for n in first], setup.folder / "trajectories" / f"{update + 1:06d}.jsonl"
    record(path, recorded)
    fates = {f"tokens_{fate.name.lower()}": size for fate, size in played.ledger.fates.items()}
    solved = {f"success_{name}": _solved(own) for name, own in domains_of(judged).items()}
    drawn = open_share(setup.settings, update) if setup.prompts is None else setup.prompts.learn(update, played.played)
    seen = repetition(one.trajectory for one in judged) | held_out(judged)
    credited = partial(_record_credit, path.with_suffix(ADVANTAGES), recorded, first)
    return Rolled(rollout, {**solved, **seen, **fates, **drawn}, timings, credited)


def _record_credit(path: Path, played: Sequence[Played], rows: Sequence[int], credit: loop.Credit) -> None:
    """Write what these trajectories got, which are those rows of the update's."""
    record_advantages(path, played, np.asarray(credit.adv)[np.array(rows, int)])


def held_out(played: Sequence[Played]) -> dict[str, float]:
    """Average a held-out check, and the gap of the reward above it, over trajectories that have both; {} for none."""
    checked = [one for one in played if one.scored is not None and CHECK in one.scored.parts]
    if not checked:
        return {}
    check_n = np.array([one.scored.parts[CHECK] for one in checked if one.scored])
    reward_n = np.array([one.trajectory.outcome for one in checked])
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


def _solved(played: list[Played]) -> float:
    return float(np.mean([one.trajectory.correct for one in played]))
