"""Parts of a run on a host environment, for training and examinations: `HostedConfig`, `HostedSetup`, `play_tasks`.

`play_tasks` rolls out tasks over the setup's engine, `examine` does so with given parameters, and
`compare_before_after` makes the table of two of them by domain. `record` writes trajectories, a line of JSON each.
"""

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
from flowgrpo import loop
from flowgrpo.contracts import Do, HostEnv, Request, Reward, Scored
from flowgrpo.data.tasks import Tasks, batch_at, split_tasks
from flowgrpo.data.tokenizer import Text
from flowgrpo.evaluation.metrics import Evaluation, compute_metrics
from flowgrpo.files import make_folder, write_whole
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.remote_engine import RemoteEngine
from flowgrpo.generate.sampler import MAX_KEPT
from flowgrpo.models.hf import Model
from flowgrpo.parallel.offload import DISK, Residency, places
from flowgrpo.recipes.hosted_config import HostedConfig
from flowgrpo.recipes.planner import OFFLOAD, Planner
from flowgrpo.recipes.task_choice import Draw, Hard
from flowgrpo.report.progress import Progress
from flowgrpo.rollout.effects import NOTHING, Journal
from flowgrpo.rollout.hosted import Hosted, hosted
from flowgrpo.rollout.hosted_run import Width
from flowgrpo.rollout.judging import is_solved
from flowgrpo.rollout.records import Played, aborted, rollout_of, to_json
from flowgrpo.rollout.trajectory_thread import Submit
from flowgrpo.run.session import Tested, before_after_table
from flowgrpo.run.warm_start import WarmStart
from flowgrpo.types import BadInput, Task, Trajectories

ADVANTAGES = ".advantages.jsonl"  # beside the trajectories of an update


class HostedSetup(NamedTuple):
    """The parts of a run on a host environment."""

    name: str
    config: HostedConfig
    folder: Path
    model: Model  # that the planner starts as
    planner: Planner
    env: HostEnv
    exam_env: HostEnv  # the same with the turns that are allowed when it is examined
    engine: Engine | RemoteEngine
    residency: Residency  # which may hold a judge
    do: Do
    reward: Reward | None  # None: the environment pays
    tasks: Draw
    algorithm: fg.Algorithm
    optimizer: optax.GradientTransformation
    sizes: loop.Settings
    warm_start: Callable[["HostedSetup"], WarmStart]  # of the setup as it runs, with its journal and progress
    story: Callable[[HostEnv, Played], str]  # a trajectory as text, with what it was played in
    solved: Callable[[Scored], bool] = is_solved  # by what a reward said, which `correct` records
    journal: Journal | None = None  # of what the world answers
    prompts: Hard | None = None  # what chooses the tasks of training, where `tasks` does not
    share: Callable[[int], dict[str, float]] = lambda _update: {}  # figures of the tasks that may come up in an update
    seen: Callable[[Sequence[Played]], dict[str, float]] = lambda _played: {}  # more figures of an update's rollout
    check_first: Callable[[Sequence[Played]], None] = lambda _played: None  # raises where a first rollout is hopeless
    spoken: Engine | None = None  # of the roles that frozen weights speak
    progress: Progress | None = None  # that shows how far rollouts are
    submit: Submit | None = None  # that of the engine, or what stands before it
    width: int | None = None  # trajectories at a time; None: as many as keep their caches


def narrowest_rows() -> int | None:
    """Say in how few rows engines decode: in 8 on a CPU, where a step takes as long as its rows; else in all."""
    return 8 if jax.default_backend() == "cpu" else None


def make_engine(model: Model, config: HostedConfig, *, kept: int = 0) -> Engine:
    """An engine whose slots hold a whole context."""
    return Engine(
        model.policy,
        model.params,
        slots=config.slots,
        slot_length=config.context_tokens,
        chunk=config.chunk,
        steps=config.steps,
        banned=model.banned,
        kept=kept,
        narrowest=narrowest_rows(),
        text_of=model.text.decode,
    )


def do_nothing() -> None:
    """Begin without removing anything."""


def sizes_of(config: HostedConfig, planner: Planner) -> loop.Settings:
    """The sizes of an iteration."""
    return loop.Settings(
        queries=config.queries,
        samples=config.samples,
        temperature=config.temperature,
        mini_batches=config.mini_batches,
        micro_rows=config.micro_rows,
        compute_dtype=planner.compute_dtype,
    )


def compile_engines(setup: HostedSetup) -> HostedSetup:
    """Have the engines compile all their programs, which then takes time from no deadline, and show how far it is.

    Returns the setup with the progress in which its rollouts go on.
    """
    progress = Progress(setup.config.updates)
    engines = [engine for engine in (setup.engine, setup.spoken) if engine is not None]
    for done, engine in enumerate(engines):
        progress.step("compile", done, len(engines))
        support = engine.kept or MAX_KEPT  # an engine that cuts it refuses requests of full support
        engine.generate([Request([setup.model.text.pad_id], jax.random.key(0), max_tokens=1, top_k=support)])
    progress.step("compile", len(engines), len(engines))
    return setup._replace(progress=progress)


def draw_from(read: Tasks, seed: int) -> Draw:
    """`tasks(split, first, count)` of a task file, which must have some for every split."""
    parts = split_tasks(read)
    for name, part in parts.items():
        if not len(part):
            raise BadInput(f"{read.source} has no task for {name}: give more than {len(read)}")
    return lambda split, first, count: batch_at(parts[split], seed, first, count)[0]


def make_residency(config: HostedConfig, folder: Path) -> Residency:
    """Make the residency that places models which a stage doesn't use; on the disk, they go into the run's folder."""
    elsewhere = OFFLOAD[config.offload]
    return Residency(places(elsewhere), folder=make_folder(folder / "offload") if elsewhere == DISK else None)


def plain_story(text: Text, _env: HostEnv, played: Played) -> str:
    """A trajectory as text to read: what the model was told and what it said, context by context."""
    lines = [played.task.query]
    for number, turn in enumerate(played.turns):
        said = text.decode(turn.tokens[~turn.chosen])
        head = "context, begun anew" if turn.begins else "context" if not number else "told"
        lines += [f"[{number}] {head}", said.rstrip(), f"[{number}] said", text.decode(turn.tokens[turn.chosen])]
    end = f": {played.reason}" if played.reason else ""
    return "\n".join([*lines, f"answer    {played.output}", f"ended     {played.status.name}{end}"])


# Rollouts --------------------------------------------------------------------------------------------


def kept(setup: HostedSetup, name: str, update: int | None = None) -> AbstractContextManager[None]:
    """A rollout whose answers are kept, where there is a journal."""
    return nullcontext() if setup.journal is None else setup.journal.at(name, update)


def dense(setup: HostedSetup, played: Hosted) -> Trajectories:
    """The trajectories as arrays, in order."""
    return rollout_of(in_order(played).played, setup.env.tools, turns=setup.env.turns)


def play_tasks(
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
    rollout = make_hosted_rollout(setup, env, do=setup.do, reward=setup.reward, journal=setup.journal)
    every = [task for task in tasks for _ in range(samples)]
    groups = np.repeat(np.arange(len(tasks)), samples)
    if setup.progress is not None:
        show, done = partial(setup.progress.step, stage, total=len(every)), count()
        show(next(done))
        callbacks["on_done"] = lambda _: show(next(done))
    return in_order(rollout(every, jax.random.split(key, len(every)), groups, **callbacks))


def width_of(setup: HostedSetup) -> int:
    """Trajectories at a time: no more than slots, so that a conversation that waits for a tool keeps its cache."""
    return setup.width or setup.config.slots


def make_hosted_rollout(
    setup: HostedSetup,
    env: HostEnv,
    *,
    do: Do,
    reward: Reward | None,
    width: Width | None = None,
    journal: Journal | None = None,
) -> Callable[..., Hosted]:
    """`hosted` over the setup's engine; rollouts that run at once share a `width`, the journal has their deadlines."""
    config = setup.config
    return hosted(
        env,
        setup.submit or setup.engine.submit,
        do=do,
        reward=reward,
        solved=setup.solved,
        temperature=config.temperature,
        width=width or width_of(setup),
        deadline=config.group_seconds,
        turn_deadline=config.turn_seconds,
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
    lines = []
    for one, own in zip(played, np.asarray(advantages, np.float64), strict=True):
        turns = one.turns if one.outcome is not None else ()  # the first rows of `own`
        given = [
            row.tolist() if own.ndim == 1 else row[: len(turn.tokens)].tolist()
            for row, turn in zip(own, turns, strict=False)
        ]
        lines.append(json.dumps({"group": one.group, "sample": one.sample, "advantage": given or None}) + "\n")
    write_whole(path, "".join(lines))


def domains_of(played: Sequence[Played]) -> dict[str, list[Played]]:
    """Trajectories by the domain of their task, in the order of the names."""
    names = sorted({one.task.domain for one in played})
    return {name: [one for one in played if one.task.domain == name] for name in names}


def valid(played: Sequence[Played]) -> list[Played]:
    """Those that have an outcome."""
    return [one for one in played if one.outcome is not None]


def examine(
    setup: HostedSetup,
    params,
    key: jax.Array,
    split: str,
    *,
    tasks: int,
    samples: int = 1,
    first: int = 0,
    version: int = 0,
) -> Hosted:
    """Play so many tasks of a split with parameters of a version, from the `first` on, `samples` times each."""
    setup.engine.swap(setup.planner.serve(params), version)
    return play_tasks(setup, setup.exam_env, setup.tasks(split, first, tasks), key, samples=samples, stage=split)


def played_metrics(
    played: Sequence[Played], tools: Sequence[str], *, samples: int = 1, ks: Sequence[int] = (1,)
) -> Evaluation:
    """The figures of so many trajectories a task; raises where none of them could be judged."""
    if not valid(played):
        why = played[0].reason or (played[0].scored and played[0].scored.reason) or "no reason was given"
        raise BadInput(f"none of {len(played)} trajectories came to an outcome; the first one: {why}")
    turns = max(len(one.tools) for one in played)
    number = {name: index for index, name in enumerate(tools)}
    calls = [[number.get(tool, -1) for tool in one.tools] + [-1] * (turns - len(one.tools)) for one in played]
    columns = (
        [one.correct for one in played],
        [len(one.errors) for one in played],
        [sum(one.errors) for one in played],
        calls,
        [one.outcome is not None for one in played],
    )
    correct, turned, errors, tool, judged = (np.array(x).reshape(-1, samples, *np.shape(x)[1:]) for x in columns)
    return compute_metrics(correct, turned, errors, tool, valid_gn=judged, tools=tools, ks=ks)


def validate(setup: HostedSetup, key: jax.Array, params) -> Evaluation:
    with kept(setup, "validation"):
        played = examine(setup, params, key, "validation", tasks=setup.config.validation_tasks).played
        return played_metrics(played, setup.env.tools)


def test(setup: HostedSetup, key: jax.Array, params: Sequence[Any], versions: Sequence[int]) -> Tested:
    tasks = setup.config.test_tasks
    played = []
    for when, one, version in zip(("before", "after"), params, versions, strict=True):
        with kept(setup, f"test-{when}"):
            played.append(examine(setup, one, key, "test", tasks=tasks, version=version).played)
            played_metrics(played[-1], setup.env.tools)  # which raises where nothing could be judged
        record(setup.folder / "trajectories" / f"test-{when}.jsonl", played[-1])
    return compare_before_after(setup, played)


def compare_before_after(
    setup: HostedSetup, played: Sequence[Sequence[Played]], *, samples: int = 1, ks: Sequence[int] = (1,)
) -> Tested:
    """The table before / after, by domain, and one task that was failed before and solved after."""
    tools = setup.env.tools
    before, after = figures = [played_metrics(own, tools, samples=samples, ks=ks) for own in played]
    parts = [domains_of(own) for own in played]
    judged = [name for name in parts[0] if all(valid(part[name]) for part in parts)]
    by = {name: [played_metrics(part[name], tools, samples=samples) for part in parts] for name in judged}
    more = {
        f"{field}_{when}": {name: getattr(both[i], source) for name, both in by.items()}
        for i, when in enumerate(("before", "after"))
        for field, source in (("success_by_domain", "success"), ("tool_error_by_domain", "tool_errors"))
    }
    missing = [f"{name}: nothing could be judged" for name in parts[0] if name not in judged]
    words = [before_after_table(before, after), "", domain_table(by), *missing, "", *_stories(setup, played)]
    return Tested(figures, "\n".join(words), more)


def domain_table(by: Mapping[str, Sequence[Evaluation]]) -> str:
    """Success, tool errors, turns and tools of each domain, before -> after."""
    lines = [f"{'domain':16}{'success':>18}{'tool errors':>18}{'turns':>16}   calls"]
    for name, (one, two) in by.items():
        mix = ", ".join(
            f"{tool} {one.tools[tool]:.0%} -> {share:.0%}"
            for tool, share in (two.tools or {}).items()
            if one.tools and max(share, one.tools[tool]) > 0
        )
        success, errors = (
            f"{a:.1%} -> {b:.1%}" for a, b in ((one.success, two.success), (one.tool_errors, two.tool_errors))
        )
        lines.append(f"{name:16}{success:>18}{errors:>18}{f'{one.turns:.2f} -> {two.turns:.2f}':>16}   {mix}")
    return "\n".join(lines)


def _stories(setup: HostedSetup, played: Sequence[Sequence[Played]]) -> list[str]:
    before, after = ([one.correct for one in own] for own in played)
    index = int(np.argmax(~np.array(before) & np.array(after)))
    return [
        f"{when}:\n{setup.story(setup.exam_env, own[index])}"
        for when, own in zip(("before", "after"), played, strict=True)
    ]
