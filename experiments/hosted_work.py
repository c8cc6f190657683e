"""The stages of a run on a host environment, for a `Session`: tasks and tools flow in, trained parameters flow out.

    with ... as setup:  one_run(hosted_work(setup), folder, every=10)

An iteration is the one of `loop`, with a hosted rollout in the place of the compiled one: the engine takes the new
weights, the trajectories of all groups run at once, and what follows the rollout is the same function. The tasks of an
update follow from its number, and keys from `fold_in(seed, update)`, so a run goes on exactly as it would have (S1).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flowgrpo as fg
from experiments.session import Tested, Work, report, train_line
from flowgrpo import loop
from flowgrpo.contracts import Do, HostEnv, Reward, Scored
from flowgrpo.evaluate import Evaluation, evaluate
from flowgrpo.generate.engine import Engine
from flowgrpo.models.hf import Model
from flowgrpo.packing import pack
from flowgrpo.rollout.hosted import Hosted, hosted
from flowgrpo.rollout.judging import is_solved
from flowgrpo.rollout.records import Played, aborted, rollout_of, to_json
from flowgrpo.tasks import Tasks, batch_at, split_tasks
from flowgrpo.types import BadInput, Task

Draw = Callable[[str, int, int], list[Task]]  # (split, first, count) -> tasks


class HostedSetup(NamedTuple):
    """The parts of a run on a host environment."""

    name: str
    settings: Mapping[str, Any]
    folder: Path
    model: Model
    env: HostEnv
    exam_env: HostEnv  # the same with the turns that are allowed when it is examined
    engine: Engine
    do: Do
    reward: Reward
    tasks: Draw
    algorithm: fg.Algorithm
    optimizer: optax.GradientTransformation
    sizes: loop.Settings
    warm_start: Callable[[Callable[[int, float], None]], Any]
    story: Callable[[Played], str]  # a trajectory as text
    solved: Callable[[Scored], bool] = is_solved  # by what a reward said, which `correct` records


def hosted_work(setup: HostedSetup) -> Work:
    """Rollouts over one engine, judged while others still generate; examinations on tasks that training never meets."""
    settings = setup.settings
    keys = dict(zip(("run", "validation", "test"), jax.random.split(jax.random.key(settings["seed"]), 3), strict=True))
    return Work(
        name=setup.name,
        algorithm=setup.algorithm.name,
        settings=settings,
        optimizer=setup.optimizer,
        key=keys["run"],
        mesh=None,
        blank=lambda: jax.tree.map(jnp.zeros_like, setup.model.params),
        warm_start=setup.warm_start,
        make_step=partial(make_step, setup),
        line=partial(train_line, tools=setup.env.tools),
        examine=partial(_examine, setup, keys["validation"]),
        test=partial(_test, setup, keys["test"]),
    )


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


def make_step(setup: HostedSetup) -> Callable[[loop.Run], tuple[loop.Run, dict[str, Any]]]:
    """`step(run) -> (run, metrics)`: one iteration."""
    sizes, appends = setup.sizes, setup.settings["rendering"] == "append"
    trajectories = sizes.queries * sizes.oversample * sizes.samples
    credit, update = loop.make_learning(
        setup.model.policy, setup.algorithm, setup.optimizer, sizes, banned=setup.model.banned
    )
    learn = loop.make_learn(
        credit,
        update,
        setup.algorithm,
        tools=len(setup.env.tools),
        samples=sizes.samples,
        row_length=setup.settings["context_tokens"],
        rows=trajectories if appends else trajectories * setup.env.turns,
    )
    return partial(_step, setup=setup, learn=learn)


def _step(run: loop.Run, *, setup: HostedSetup, learn) -> tuple[loop.Run, dict[str, Any]]:
    sizes, update = setup.sizes, int(run.update)
    count = sizes.queries * sizes.oversample
    sample_key, judge_key = jax.random.split(jax.random.fold_in(run.key, run.update))
    setup.engine.swap(run.learner.params, int(run.learner.version))
    tasks = setup.tasks("train", update * count, count)
    played = play(setup, setup.env, tasks, sample_key, samples=sizes.samples)
    rollout = rollout_of(played.played, setup.env.tools, turns=setup.env.turns)
    if setup.settings["control"] == "shuffled_rewards":
        shuffled = loop.shuffled_rewards(rollout.trajectories, judge_key, samples=sizes.samples)
        rollout = rollout.replace(trajectories=jax.device_get(shuffled))
    run, metrics = learn(run, rollout)
    first = [one for one in played.played if one.group < setup.settings["recorded"]]
    record(setup.folder / "trajectories" / f"{update + 1:06d}.jsonl", first)
    lost = {f"tokens_{fate.name.lower()}": size for fate, size in played.ledger.fates.items()}
    solved = {f"success_{name}": _solved(own) for name, own in domains_of(played.played).items()}
    return run, {**metrics, **solved, **lost}


def play(setup: HostedSetup, env: HostEnv, tasks: Sequence[Task], key: jax.Array, *, samples: int) -> Hosted:
    """So many trajectories of each task, all at once, in the order of tasks and samples."""
    settings = setup.settings
    rollout = hosted(
        env,
        setup.engine.submit,
        do=setup.do,
        reward=setup.reward,
        solved=setup.solved,
        temperature=settings["temperature"],
        # Fewer than there are slots, so that a conversation that waits for a tool keeps its cache.
        width=max(settings["slots"] * 3 // 4, 2),
        deadline=settings["group_seconds"],
        turn_deadline=settings["turn_seconds"],
    )
    every = [task for task in tasks for _ in range(samples)]
    played = rollout(every, jax.random.split(key, len(every)), np.repeat(np.arange(len(tasks)), samples))
    late = [aborted(one, "its group's deadline passed while it waited for the engine") for one in played.unfinished]
    in_order = sorted([*played.played, *late], key=lambda one: (one.group, one.sample))
    return played._replace(played=tuple(in_order), unfinished=())


def record(path: Path, played: Sequence[Played]) -> None:
    """Write trajectories, a line each."""
    if played:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(to_json(one) + "\n" for one in played))


def domains_of(played: Sequence[Played]) -> dict[str, list[Played]]:
    """Trajectories by the domain of their task, in the order of the names."""
    names = sorted({one.task.domain for one in played})
    return {name: [one for one in played if one.task.domain == name] for name in names}


def _solved(played: list[Played]) -> float:
    return float(np.mean([one.trajectory.correct for one in played]))


# Examination --------------------------------------------------------------------------------------------


def examine(
    setup: HostedSetup, params, key: jax.Array, split: str, *, tasks: int, samples: int = 1, first: int = 0
) -> Hosted:
    """What these parameters do on so many tasks of a split, from the `first` on."""
    setup.engine.swap(params, 0)
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
    played = examine(setup, params, key, "validation", tasks=setup.settings["validation_tasks"]).played
    return judge(played, setup.env.tools)


def _test(setup: HostedSetup, key: jax.Array, params: Sequence[Any]) -> Tested:
    tasks = setup.settings["test_tasks"]
    played = [examine(setup, one, key, "test", tasks=tasks).played for one in params]
    for when, own in zip(("before", "after"), played, strict=True):
        record(setup.folder / "trajectories" / f"test-{when}.jsonl", own)
    return compare_before_after(setup, played)


def compare_before_after(
    setup: HostedSetup, played: Sequence[Sequence[Played]], *, samples: int = 1, ks: Sequence[int] = (1,)
) -> Tested:
    """The table before / after, by domain, and one task that was failed before and solved after."""
    tools = setup.env.tools
    before, after = figures = [judge(own, tools, samples=samples, ks=ks) for own in played]
    parts = [domains_of(own) for own in played]
    by = {name: [judge(part[name], tools, samples=samples) for part in parts] for name in parts[0]}
    more = {
        f"{field}_{when}": {name: getattr(both[i], source) for name, both in by.items()}
        for i, when in enumerate(("before", "after"))
        for field, source in (("success_by_domain", "success"), ("tool_error_by_domain", "tool_errors"))
    }
    words = [report(before, after), "", domain_table(by), "", *_stories(setup, played)]
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
