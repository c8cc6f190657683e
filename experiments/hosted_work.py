"""The stages of a run on a host environment, for a `Session`: tasks and tools flow in, trained parameters flow out.

    with ... as setup:  one_run(hosted_work(setup), folder, every=10)

An iteration is the one of `staged`, with a hosted rollout in the place of the compiled one: the engine takes the new
weights, the trajectories of all groups run at once, and while the last of them are judged the reference scores. The
setting `offload` says where models are that a stage does not use: "none" leaves everything on the device, "host" and
"disk" move it there, and destroy the engine's cache after each rollout. An iteration that takes longer than
`watch_seconds` says what it waits for. The tasks of an update follow from its number, and keys from
`fold_in(seed, update)`, so a run goes on exactly as it would have (S1).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flowgrpo as fg
from experiments.planner_setup import OFFLOAD, Planner
from experiments.prompts import Draw, Hard, open_share
from experiments.session import Tested, Work
from experiments.session_files import report, train_line
from flowgrpo import loop
from flowgrpo.contracts import Do, HostEnv, Reward, Scored
from flowgrpo.evaluate import Evaluation, evaluate
from flowgrpo.generate.engine import Engine
from flowgrpo.launch import make_folder
from flowgrpo.learner.checkpoint import Checkpoints
from flowgrpo.learner.residency import DISK, Residency, places
from flowgrpo.models.hf import Model
from flowgrpo.packing import pack
from flowgrpo.rollout.compiled import Rollout
from flowgrpo.rollout.deadlines import NOTHING
from flowgrpo.rollout.exam import shuffled_rewards
from flowgrpo.rollout.hosted import Hosted, hosted
from flowgrpo.rollout.journal import Journal
from flowgrpo.rollout.judging import is_solved
from flowgrpo.rollout.records import Played, aborted, rollout_of, to_json
from flowgrpo.rollout.width import Width
from flowgrpo.staged import Rolled, RollOut, Step, Told, make_staged
from flowgrpo.stuck import Watch
from flowgrpo.tasks import Tasks, batch_at, split_tasks
from flowgrpo.types import BadInput, Task


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
    story: Callable[[Played], str]  # a trajectory as text
    solved: Callable[[Scored], bool] = is_solved  # by what a reward said, which `correct` records
    journal: Journal | None = None  # of what the world answers
    prompts: Hard | None = None  # what chooses the tasks of training, where `tasks` does not


def hosted_work(setup: HostedSetup) -> Work:
    """Rollouts over one engine, judged while others still generate; examinations on tasks that training never meets.

    What tools, other roles and rewards answered is kept until a checkpoint covers it, so that a run which is killed in
    a rollout hears the same again.
    """
    settings, journal = setup.settings, Journal(setup.folder / "journal", _covered(setup.folder))
    setup = setup._replace(do=journal.effects(setup.do), reward=journal.verdicts(setup.reward), journal=journal)
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
        examine=partial(_examine, setup, exam_key(setup, "validation")),
        test=partial(_test, setup, exam_key(setup, "test")),
        trained=setup.planner.trained,
        frozen=lambda: setup.planner.params,
        memory=setup.prompts,
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


# Parts that such runs share -----------------------------------------------------------------------------


def make_engine(model: Model, settings: Mapping[str, Any], *, kept: int = 0) -> Engine:
    """An engine whose slots hold a whole context."""
    sizes = {"slots": settings["slots"], "slot_length": settings["context_tokens"], "chunk": settings["chunk"]}
    return Engine(model.policy, model.params, **sizes, steps=settings["steps"], banned=model.banned, kept=kept)


def draw_from(read: Tasks, seed: int) -> Draw:
    """`tasks(split, first, count)` of a task file, which must have some for every split."""
    parts = split_tasks(read)
    for name, part in parts.items():
        if not len(part):
            raise BadInput(f"{read.source} has no task for {name}: give more than {len(read)}")
    return lambda split, first, count: batch_at(parts[split], seed, first, count)[0]


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


def make_residency(settings: Mapping[str, Any], folder: Path) -> Residency:
    """Where models are that a stage doesn't use; what goes to the disk goes into the run's folder."""
    if settings["offload"] not in OFFLOAD:
        raise BadInput(f"--offload={settings['offload']} is unknown; choose from {', '.join(OFFLOAD)}")
    elsewhere = OFFLOAD[settings["offload"]]
    return Residency(places(elsewhere), folder=make_folder(folder / "offload") if elsewhere == DISK else None)


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
    with _kept(setup, "train", update + 1):
        played = play(setup, setup.env, tasks, _keys(run.key, update)[0], samples=sizes.samples, **callbacks)
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
    """What an update is made from: trajectories as arrays, with figures by domain; the first are recorded."""
    rollout, update = dense(setup, played), int(run.update)
    if setup.settings["control"] == "shuffled_rewards":
        judge_key = _keys(run.key, update)[1]
        shuffled = shuffled_rewards(rollout.trajectories, judge_key, samples=setup.sizes.samples)
        rollout = rollout.replace(trajectories=jax.device_get(shuffled))
    first = [one for one in played.played if one.group < setup.settings["recorded"]]
    record(setup.folder / "trajectories" / f"{update + 1:06d}.jsonl", first)
    fates = {f"tokens_{fate.name.lower()}": size for fate, size in played.ledger.fates.items()}
    solved = {f"success_{name}": _solved(own) for name, own in domains_of(_valid(played.played)).items()}
    drawn = open_share(setup.settings, update) if setup.prompts is None else setup.prompts.learn(update, played.played)
    return Rolled(rollout, {**solved, **fates, **drawn}, timings)


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


def _kept(setup: HostedSetup, name: str, update: int | None = None) -> AbstractContextManager[None]:
    """A rollout whose answers are kept, where there is a journal."""
    return nullcontext() if setup.journal is None else setup.journal.at(name, update)


def dense(setup: HostedSetup, played: Hosted) -> Rollout:
    """The trajectories as arrays, in order."""
    return rollout_of(in_order(played).played, setup.env.tools, turns=setup.env.turns)


def play(
    setup: HostedSetup, env: HostEnv, tasks: Sequence[Task], key: jax.Array, *, samples: int, **callbacks
) -> Hosted:
    """So many trajectories of each task, all at once, in the order of tasks and samples; callbacks as in `hosted`."""
    rollout = make_rollout(setup, env, do=setup.do, reward=setup.reward, journal=setup.journal)
    every = [task for task in tasks for _ in range(samples)]
    groups = np.repeat(np.arange(len(tasks)), samples)
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
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(to_json(one) + "\n" for one in played))


def domains_of(played: Sequence[Played]) -> dict[str, list[Played]]:
    """Trajectories by the domain of their task, in the order of the names."""
    names = sorted({one.task.domain for one in played})
    return {name: [one for one in played if one.task.domain == name] for name in names}


def _valid(played: Sequence[Played]) -> list[Played]:
    """Those that have an outcome."""
    return [one for one in played if one.trajectory.outcome is not None]


def _solved(played: list[Played]) -> float:
    return float(np.mean([one.trajectory.correct for one in played]))


# Examination --------------------------------------------------------------------------------------------


def examine(
    setup: HostedSetup, params, key: jax.Array, split: str, *, tasks: int, samples: int = 1, first: int = 0
) -> Hosted:
    """What these parameters do on so many tasks of a split, from the `first` on."""
    setup.engine.swap(setup.planner.serve(params), 0)
    return play(setup, setup.exam_env, setup.tasks(split, first, tasks), key, samples=samples)


def judge(played: Sequence[Played], tools: Sequence[str], *, samples: int = 1, ks: Sequence[int] = (1,)) -> Evaluation:
    """The figures of so many trajectories a task."""
    turns = max(len(one.tools) for one in played)
    number = {name: index for index, name in enumerate(tools)}
    calls = [[number.get(tool, -1) for tool in one.tools] + [-1] * (turns - len(one.tools)) for one in played]
    columns = (
        [one.trajectory.correct for one in played],
        [len(one.errors) for one in played],
        [sum(one.errors) for one in played],
        calls,
        [one.trajectory.outcome is not None for one in played],
    )
    correct, turned, errors, tool, valid = (np.array(x).reshape(-1, samples, *np.shape(x)[1:]) for x in columns)
    return evaluate(correct, turned, errors, tool, valid_gn=valid, tools=tools, ks=ks)


def _examine(setup: HostedSetup, key: jax.Array, params) -> Evaluation:
    with _kept(setup, "validation"):
        played = examine(setup, params, key, "validation", tasks=setup.settings["validation_tasks"]).played
        return judge(played, setup.env.tools)


def _test(setup: HostedSetup, key: jax.Array, params: Sequence[Any]) -> Tested:
    tasks = setup.settings["test_tasks"]
    played = []
    for when, one in zip(("before", "after"), params, strict=True):
        with _kept(setup, f"test-{when}"):
            played.append(examine(setup, one, key, "test", tasks=tasks).played)
            judge(played[-1], setup.env.tools)  # which raises where nothing could be judged
        record(setup.folder / "trajectories" / f"test-{when}.jsonl", played[-1])
    return compare_before_after(setup, played)


def compare_before_after(
    setup: HostedSetup, played: Sequence[Sequence[Played]], *, samples: int = 1, ks: Sequence[int] = (1,)
) -> Tested:
    """The table before / after, by domain, and one task that was failed before and solved after."""
    tools = setup.env.tools
    before, after = figures = [judge(own, tools, samples=samples, ks=ks) for own in played]
    parts = [domains_of(own) for own in played]
    judged = [name for name in parts[0] if all(_valid(part[name]) for part in parts)]
    by = {name: [judge(part[name], tools, samples=samples) for part in parts] for name in judged}
    more = {
        f"{field}_{when}": {name: getattr(both[i], source) for name, both in by.items()}
        for i, when in enumerate(("before", "after"))
        for field, source in (("success_by_domain", "success"), ("tool_error_by_domain", "tool_errors"))
    }
    missing = [f"{name}: nothing could be judged" for name in parts[0] if name not in judged]
    words = [report(before, after), "", domain_table(by), *missing, "", *_stories(setup, played)]
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
    before, after = ([one.trajectory.correct for one in own] for own in played)
    index = int(np.argmax(~np.array(before) & np.array(after)))
    return [f"{when}:\n{setup.story(own[index])}" for when, own in zip(("before", "after"), played, strict=True)]


# Imitation ----------------------------------------------------------------------------------------------


def imitation_rows(records: Sequence[fg.Trajectory], *, row_length: int) -> fg.Batch:
    """Demonstrations packed into rows; every chosen token is to be imitated."""
    if not records:
        raise BadInput("there is no demonstration to imitate")
    trajectories = fg.collate(records)
    weights = fg.token_mean(trajectories.actions, trajectories.turns, trajectories.group, trajectories.valid)
    return pack(records, np.zeros(trajectories.turns.shape, np.float32), np.asarray(weights), row_length=row_length)
