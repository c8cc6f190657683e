"""The parts of a run on a host environment, and its rollouts: what training and examinations of it share."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import flowgrpo as fg
from experiments.planner_setup import OFFLOAD, Planner
from experiments.prompts import Draw, Hard
from flowgrpo import loop
from flowgrpo.contracts import Do, HostEnv, Request, Reward, Scored
from flowgrpo.files import make_folder, write_whole
from flowgrpo.generate.engine import Engine
from flowgrpo.learner.residency import DISK, Residency, places
from flowgrpo.models.hf import Model
from flowgrpo.report.progress import Progress
from flowgrpo.rollout.compiled import Rollout
from flowgrpo.rollout.deadlines import NOTHING
from flowgrpo.rollout.hosted import Hosted, hosted
from flowgrpo.rollout.journal import Journal
from flowgrpo.rollout.judging import is_solved
from flowgrpo.rollout.records import Played, aborted, rollout_of, to_json
from flowgrpo.rollout.width import Width
from flowgrpo.tasks import Tasks, batch_at, split_tasks
from flowgrpo.types import BadInput, Task

ADVANTAGES = ".advantages.jsonl"  # beside the trajectories of an update


class HostedSetup(NamedTuple):
    """The parts of a run on a host environment."""

    name: str
    settings: Mapping[str, Any]
    folder: Path
    model: Model  # that the planner starts as
    planner: Planner
    env: HostEnv
    exam_env: HostEnv  # the same with the turns that are allowed when it is examined
    engine: Engine
    residency: Residency  # which may hold a judge
    do: Do
    reward: Reward
    tasks: Draw
    algorithm: fg.Algorithm
    optimizer: optax.GradientTransformation
    sizes: loop.Settings
    warm_start: Callable[[Callable[[int, float], None]], Any]
    story: Callable[[HostEnv, Played], str]  # a trajectory as text, with what it was played in
    solved: Callable[[Scored], bool] = is_solved  # by what a reward said, which `correct` records
    journal: Journal | None = None  # of what the world answers
    prompts: Hard | None = None  # what chooses the tasks of training, where `tasks` does not
    spoken: Engine | None = None  # of the roles that frozen weights speak
    progress: Progress | None = None  # that shows how far rollouts are


def make_engine(model: Model, settings: Mapping[str, Any], *, kept: int = 0) -> Engine:
    """An engine whose slots hold a whole context."""
    sizes = {"slots": settings["slots"], "slot_length": settings["context_tokens"], "chunk": settings["chunk"]}
    return Engine(model.policy, model.params, **sizes, steps=settings["steps"], banned=model.banned, kept=kept)


def compile_engines(setup: HostedSetup) -> HostedSetup:
    """Have the engines compile all their programs, which then takes time from no deadline, and show how far it is.

    Returns the setup with the progress in which its rollouts go on.
    """
    progress = Progress(setup.settings["updates"])
    engines = [engine for engine in (setup.engine, setup.spoken) if engine is not None]
    for done, engine in enumerate(engines):
        progress.step("compile", done, len(engines))
        engine.generate([Request([setup.model.text.pad_id], jax.random.key(0), max_tokens=1)])
    progress.step("compile", len(engines), len(engines))
    return setup._replace(progress=progress)


def draw_from(read: Tasks, seed: int) -> Draw:
    """`tasks(split, first, count)` of a task file, which must have some for every split."""
    parts = split_tasks(read)
    for name, part in parts.items():
        if not len(part):
            raise BadInput(f"{read.source} has no task for {name}: give more than {len(read)}")
    return lambda split, first, count: batch_at(parts[split], seed, first, count)[0]


def make_residency(settings: Mapping[str, Any], folder: Path) -> Residency:
    """Make the residency that places models which a stage doesn't use; on the disk, they go into the run's folder."""
    if settings["offload"] not in OFFLOAD:
        raise BadInput(f"--offload={settings['offload']} is unknown; choose from {', '.join(OFFLOAD)}")
    elsewhere = OFFLOAD[settings["offload"]]
    return Residency(places(elsewhere), folder=make_folder(folder / "offload") if elsewhere == DISK else None)


# Rollouts --------------------------------------------------------------------------------------------


def kept(setup: HostedSetup, name: str, update: int | None = None) -> AbstractContextManager[None]:
    """A rollout whose answers are kept, where there is a journal."""
    return nullcontext() if setup.journal is None else setup.journal.at(name, update)


def dense(setup: HostedSetup, played: Hosted) -> Rollout:
    """The trajectories as arrays, in order."""
    return rollout_of(in_order(played).played, setup.env.tools, turns=setup.env.turns)


def play(
    setup: HostedSetup,
    env: HostEnv,
    tasks: Sequence[Task],
    key: jax.Array,
    *,
    samples: int,
    stage: str = "rollout",
    **callbacks,
) -> Hosted:
    """So many trajectories of each task, all at once, in the order of tasks and samples; callbacks as in `hosted`."""
    rollout = make_rollout(setup, env, do=setup.do, reward=setup.reward, journal=setup.journal)
    every = [task for task in tasks for _ in range(samples)]
    groups = np.repeat(np.arange(len(tasks)), samples)
    if setup.progress is not None:
        show, done = partial(setup.progress.step, stage, total=len(every)), count()
        show(next(done))
        callbacks["on_done"] = lambda _: show(next(done))
    return in_order(rollout(every, jax.random.split(key, len(every)), groups, **callbacks))


def width_of(setup: HostedSetup) -> int:
    """Trajectories at a time: fewer than slots, so that a conversation that waits for a tool keeps its cache."""
    return max(setup.settings["slots"] * 3 // 4, 2)


def make_rollout(
    setup: HostedSetup,
    env: HostEnv,
    *,
    do: Do,
    reward: Reward | None,
    width: Width | None = None,
    journal: Journal | None = None,
) -> Callable[..., Hosted]:
    """`hosted` over the setup's engine; rollouts that run at once share a `width`, the journal has their deadlines."""
    settings = setup.settings
    return hosted(
        env,
        setup.engine.submit,
        do=do,
        reward=reward,
        solved=setup.solved,
        temperature=settings["temperature"],
        width=width or width_of(setup),
        deadline=settings["group_seconds"],
        turn_deadline=settings["turn_seconds"],
        fired=NOTHING if journal is None else journal.deadlines(),
    )


def in_order(played: Hosted) -> Hosted:
    """All trajectories by task and sample; what was given back unfinished takes part in nothing."""
    late = [aborted(one, "its group's deadline passed while it waited for the engine") for one in played.unfinished]
    every = sorted([*played.played, *late], key=lambda one: (one.group, one.sample))
    return played._replace(played=tuple(every), unfinished=())


def record(path: Path, played: Sequence[Played]) -> None:
    """Write trajectories, a line each."""
    if played:
        make_folder(path.parent)
        write_whole(path, "".join(to_json(one) + "\n" for one in played))


def record_advantages(path: Path, played: Sequence[Played], advantages: np.ndarray) -> None:
    """Write what each of these trajectories got, a line each: by turn, or by token of a turn, as the algorithm has it.

    `advantages` has a row for each of them; whoever takes no part in the update (F5) has null.
    """
    if not played:
        return
    make_folder(path.parent)
    lines = zip(played, np.asarray(advantages, np.float64), strict=True)
    write_whole(path, "".join(json.dumps(_advantages_of(one, own)) + "\n" for one, own in lines))


def _advantages_of(one: Played, own: np.ndarray) -> dict[str, Any]:
    """The line of a trajectory, whose turns are the first rows of `own`."""
    turns = one.trajectory.turns if valid([one]) else ()
    given = [
        row.tolist() if own.ndim == 1 else row[: len(turn.tokens)].tolist()
        for row, turn in zip(own, turns, strict=False)
    ]
    return {"group": one.group, "sample": one.sample, "advantage": given or None}


def domains_of(played: Sequence[Played]) -> dict[str, list[Played]]:
    """Trajectories by the domain of their task, in the order of the names."""
    names = sorted({one.task.domain for one in played})
    return {name: [one for one in played if one.task.domain == name] for name in names}


def valid(played: Sequence[Played]) -> list[Played]:
    """Those that have an outcome."""
    return [one for one in played if one.trajectory.outcome is not None]
