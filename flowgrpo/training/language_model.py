"""The parts of a run on a host environment, `HostedSetup`, and its rollouts and evaluations.

`roll_out_tasks` rolls out tasks over the setup's engine, `roll_out_split` does so with given parameters on a split, and
`compare_before_after` makes the table of two evaluations by domain. `write_trajectories` writes one JSON object a line.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax

from flowgrpo.contracts import Algorithm, HostEnv, Request, Reward, RewardResult, ToolRunner
from flowgrpo.data.tasks import Tasks, batch_at, split_tasks
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.evaluation.metrics import Evaluation, compute_metrics
from flowgrpo.files import make_folder, write_atomic
from flowgrpo.generate.engine import Engine, EngineSettings
from flowgrpo.generate.remote_engine import RemoteEngine
from flowgrpo.generate.sampler import MAX_TOP_K
from flowgrpo.models.hf import Model
from flowgrpo.parallel.offload import DISK, HostOffloader, placement_table
from flowgrpo.report.progress import Progress
from flowgrpo.rollout.effects import NO_DEADLINES, EffectLog
from flowgrpo.rollout.hosted import ConcurrencyLimit, HostedRollout
from flowgrpo.rollout.judging import is_solved
from flowgrpo.rollout.records import RecordedTrajectory, RolloutResult, abort, to_json, to_trajectories
from flowgrpo.rollout.trajectory_thread import Submit
from flowgrpo.training.curriculum import Draw, HardTaskSampler
from flowgrpo.training.planner import OFFLOAD, Planner
from flowgrpo.training.session import TestReport, before_after_table
from flowgrpo.training.settings import DevicesSection, HostedConfig, LearnerSection, RolloutSection
from flowgrpo.training.stages import IterationSettings
from flowgrpo.training.warm_start import WarmStart
from flowgrpo.types import BadInput, Metrics, Params, Task, Trajectories

ADVANTAGES = ".advantages.jsonl"  # suffix of the file next to an update's trajectories


class HostedSetup(NamedTuple):
    """The parts of a run on a host environment."""

    name: str
    config: HostedConfig
    folder: Path
    model: Model  # the planner's start
    planner: Planner
    env: HostEnv
    eval_env: HostEnv  # the same environment with the turn limit of evaluations
    engine: Engine | RemoteEngine
    offloader: HostOffloader  # may also hold a judge
    call_tool: ToolRunner
    reward: Reward | None  # None: the environment returns rewards
    tasks: Draw
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    sizes: IterationSettings
    warm_start: Callable[["HostedSetup"], WarmStart]  # called with the running setup, which has a journal and progress
    format_trajectory: Callable[[HostEnv, RecordedTrajectory], str]
    is_solved: Callable[[RewardResult], bool] = is_solved  # recorded as `correct`
    journal: EffectLog | None = None  # answers of tools, other roles and rewards
    task_sampler: HardTaskSampler | None = None  # chooses the training tasks instead of `tasks`
    task_metrics: Callable[[int], Metrics] = lambda _update: {}  # about the tasks that may come up in an update
    rollout_metrics: Callable[[Sequence[RecordedTrajectory]], Metrics] = lambda _trajectories: {}  # more, per update
    check_first_rollout: Callable[[Sequence[RecordedTrajectory]], None] = lambda _trajectories: (
        None
    )  # raises if hopeless
    role_engine: Engine | None = None  # of the roles that frozen weights speak
    progress: Progress | None = None
    submit: Submit | None = None  # None: the engine's
    concurrency: int | None = None  # trajectories that run at a time; None: the number of slots


def default_min_decode_batch() -> int | None:
    """Smallest decode batch of an engine: 8 on a CPU, where a step's time grows with its rows; elsewhere all slots."""
    return 8 if jax.default_backend() == "cpu" else None


def make_engine(model: Model, config: HostedConfig, *, max_recorded_top_k: int = 0) -> Engine:
    """An engine whose slots each hold a whole context."""
    settings = EngineSettings(
        slots=config.devices.slots,
        slot_length=config.rollout.context_tokens,
        chunk=config.devices.prefill_chunk,
        steps=config.devices.decode_steps,
        banned=model.banned,
        max_recorded_top_k=max_recorded_top_k,
        min_decode_batch=default_min_decode_batch(),
    )
    return Engine(model.policy, model.params, settings, detokenize=model.tokenizer.decode)


def sizes_of(rollout: RolloutSection, learner: LearnerSection, planner: Planner) -> IterationSettings:
    """Sizes of an iteration."""
    return IterationSettings(
        queries=rollout.queries,
        samples=rollout.samples,
        temperature=rollout.temperature,
        mini_batches=learner.mini_batches,
        micro_rows=learner.micro_rows,
        compute_dtype=planner.compute_dtype,
    )


def compile_engines(setup: HostedSetup) -> HostedSetup:
    """Compile all programs of the engines before any deadline runs -> the setup with a progress display."""
    progress = Progress(setup.config.run.updates)
    engines = [engine for engine in (setup.engine, setup.role_engine) if engine is not None]
    for done, engine in enumerate(engines):
        progress.step("compile", done, len(engines))
        support = engine.max_recorded_top_k or MAX_TOP_K  # an engine with a limit refuses requests of full support
        engine.generate([Request([setup.model.tokenizer.pad_id], jax.random.key(0), max_tokens=1, top_k=support)])
    progress.step("compile", len(engines), len(engines))
    return setup._replace(progress=progress)


def draw_from(tasks: Tasks, seed: int) -> Draw:
    """`draw(split, first, count)` of a task file, which must have tasks for every split."""
    splits = split_tasks(tasks)
    for name, split in splits.items():
        if not len(split):
            raise BadInput(f"{tasks.source} has no task for {name}: give more than {len(tasks)}")
    return lambda split, first, count: batch_at(splits[split], seed, first, count)[0]


def make_offloader(devices: DevicesSection, folder: Path) -> HostOffloader:
    """The offloader of models that a stage does not use; on disk they are in the run's folder."""
    place = OFFLOAD[devices.offload]
    return HostOffloader(placement_table(place), folder=make_folder(folder / "offload") if place == DISK else None)


def format_conversation(tokenizer: ChatTokenizer, _env: HostEnv, trajectory: RecordedTrajectory) -> str:
    """A trajectory as text: observations and actions, context by context."""
    lines = [trajectory.task.query]
    for number, turn in enumerate(trajectory.turns):
        observation = tokenizer.decode(turn.tokens[~turn.chosen])
        action = tokenizer.decode(turn.tokens[turn.chosen])
        kind = "new context" if turn.starts_context else "context" if not number else "observation"
        lines += [f"[{number}] {kind}", observation.rstrip(), f"[{number}] action", action]
    reason = f": {trajectory.reason}" if trajectory.reason else ""
    return "\n".join([*lines, f"answer    {trajectory.output}", f"ended     {trajectory.status.name}{reason}"])


# Rollouts --------------------------------------------------------------------------------------------


def record_effects(setup: HostedSetup, name: str, update: int | None = None) -> AbstractContextManager[None]:
    """Record what tools and rewards answer during a rollout, or replay it after a kill; nothing without a journal."""
    return nullcontext() if setup.journal is None else setup.journal.recording(name, update)


def to_arrays(setup: HostedSetup, result: RolloutResult) -> Trajectories:
    """The trajectories of a rollout as arrays, in the order of groups and samples."""
    return to_trajectories(finalize_rollout(result).trajectories, setup.env.tools, turns=setup.env.max_turns)


def roll_out_tasks(
    setup: HostedSetup,
    env: HostEnv,
    tasks: Sequence[Task],
    key: jax.Array,
    *,
    samples: int,
    stage: str = "rollout",
    on_all_sampled: Callable[[RolloutResult], None] | None = None,
    on_start: Callable[[Callable[[], list[str]]], None] | None = None,
) -> RolloutResult:
    """Roll out `samples` trajectories of each task, all at once, in the order of tasks and samples.

    Args:
        key: split into one key for each trajectory.
        stage: name of the rollout in the progress display.
        on_all_sampled: called once, when all turns are sampled; rewards may be missing.
        on_start: called with a function that lists what the rollout waits for.
    """
    rollout = make_hosted_rollout(setup, env, call_tool=setup.call_tool, reward=setup.reward, journal=setup.journal)
    repeated = [task for task in tasks for _ in range(samples)]
    groups = [group for group in range(len(tasks)) for _ in range(samples)]
    on_trajectory: Callable[[RecordedTrajectory], None] | None = None
    if setup.progress is not None:
        show, done = partial(setup.progress.step, stage, total=len(repeated)), count()
        show(next(done))
        on_trajectory = lambda _: show(next(done))  # noqa: E731
    result = rollout(
        repeated,
        jax.random.split(key, len(repeated)),
        groups,
        on_start=on_start,
        on_trajectory=on_trajectory,
        on_all_sampled=on_all_sampled,
    )
    return finalize_rollout(result)


def concurrency_of(setup: HostedSetup) -> int:
    """Trajectories that run at a time: at most the slots, so that one that waits for a tool keeps its cache."""
    return setup.concurrency or setup.config.devices.slots


def make_hosted_rollout(
    setup: HostedSetup,
    env: HostEnv,
    *,
    call_tool: ToolRunner,
    reward: Reward | None,
    concurrency: ConcurrencyLimit | None = None,
    journal: EffectLog | None = None,
) -> HostedRollout:
    """A rollout over the setup's engine; rollouts that run at the same time share a `concurrency` limit."""
    config = setup.config
    return HostedRollout(
        env,
        setup.submit or setup.engine.submit,
        call_tool=call_tool,
        reward=reward,
        is_solved=setup.is_solved,
        temperature=config.rollout.temperature,
        concurrency=concurrency or concurrency_of(setup),
        deadline=config.rollout.group_seconds,
        turn_deadline=config.rollout.turn_seconds,
        expired_deadlines=NO_DEADLINES if journal is None else journal.expired_deadlines(),
    )


def finalize_rollout(result: RolloutResult) -> RolloutResult:
    """All trajectories in the order of groups and samples; unfinished ones are aborted, and so have no outcome."""
    late = [
        abort(trajectory, "its group's deadline passed while it waited for the engine")
        for trajectory in result.unfinished
    ]
    ordered = sorted([*result.trajectories, *late], key=lambda trajectory: (trajectory.group, trajectory.sample))
    return result._replace(trajectories=tuple(ordered), unfinished=())


def write_trajectories(path: Path, trajectories: Sequence[RecordedTrajectory]) -> None:
    """Write trajectories, one JSON object a line."""
    if trajectories:
        make_folder(path.parent)
        write_atomic(path, "".join(to_json(trajectory) + "\n" for trajectory in trajectories))


def write_advantages(path: Path, trajectories: Sequence[RecordedTrajectory], advantages: np.ndarray) -> None:
    """Write the advantages of trajectories, one JSON object a line: by turn, or by token of a turn.

    `advantages` has one row for each trajectory; one that takes no part in the update (F5) is written as null.
    """
    if not trajectories:
        return
    make_folder(path.parent)
    lines = []
    for trajectory, rows in zip(trajectories, np.asarray(advantages, np.float64), strict=True):
        turns = trajectory.turns if trajectory.outcome is not None else ()  # the first entries of `rows`
        by_turn = [
            row.tolist() if rows.ndim == 1 else row[: len(turn.tokens)].tolist()
            for row, turn in zip(rows, turns, strict=False)
        ]
        line = {"group": trajectory.group, "sample": trajectory.sample, "advantage": by_turn or None}
        lines.append(json.dumps(line) + "\n")
    write_atomic(path, "".join(lines))


def group_by_domain(trajectories: Sequence[RecordedTrajectory]) -> dict[str, list[RecordedTrajectory]]:
    """Trajectories by the domain of their task, sorted by name."""
    names = sorted({trajectory.task.domain for trajectory in trajectories})
    return {name: [trajectory for trajectory in trajectories if trajectory.task.domain == name] for name in names}


def with_outcome(trajectories: Sequence[RecordedTrajectory]) -> list[RecordedTrajectory]:
    """The trajectories that have an outcome; others take no part in updates and statistics (F5)."""
    return [trajectory for trajectory in trajectories if trajectory.outcome is not None]


# Evaluation -------------------------------------------------------------------------------------------


def roll_out_split(
    setup: HostedSetup,
    params: Params,
    key: jax.Array,
    split: str,
    *,
    tasks: int,
    samples: int = 1,
    first: int = 0,
    version: int = 0,
) -> RolloutResult:
    """Roll out `tasks` tasks of a split, from number `first` on, `samples` times each, with these parameters.

    `version` is the version that their tokens record.
    """
    setup.engine.update_weights(setup.planner.to_engine(params), version)
    return roll_out_tasks(setup, setup.eval_env, setup.tasks(split, first, tasks), key, samples=samples, stage=split)


def check_outcomes(trajectories: Sequence[RecordedTrajectory]) -> None:
    """Raise `BadInput`, with the reason of the first one, if none of the trajectories has an outcome."""
    if not with_outcome(trajectories):
        first = trajectories[0]
        reason = first.reason or (first.reward_result and first.reward_result.reason) or "no reason was given"
        raise BadInput(f"none of {len(trajectories)} trajectories came to an outcome; the first one: {reason}")


def evaluate_trajectories(
    trajectories: Sequence[RecordedTrajectory], tools: Sequence[str], *, samples: int = 1, ks: Sequence[int] = (1,)
) -> Evaluation:
    """Metrics of `samples` trajectories a task; raises `BadInput` if none of them has an outcome."""
    check_outcomes(trajectories)
    max_turns = max(len(trajectory.tools) for trajectory in trajectories)
    number = {name: index for index, name in enumerate(tools)}
    calls = [
        [number.get(tool, -1) for tool in trajectory.tools] + [-1] * (max_turns - len(trajectory.tools))
        for trajectory in trajectories
    ]
    columns = (
        [trajectory.correct for trajectory in trajectories],
        [len(trajectory.errors) for trajectory in trajectories],
        [sum(trajectory.errors) for trajectory in trajectories],
        calls,
        [trajectory.outcome is not None for trajectory in trajectories],
    )
    correct, turns, errors, tool, valid = (np.array(x).reshape(-1, samples, *np.shape(x)[1:]) for x in columns)
    return compute_metrics(correct, turns, errors, tool, valid_gn=valid, tools=tools, ks=ks)


def validate(setup: HostedSetup, key: jax.Array, params: Params) -> Evaluation:
    """Evaluate parameters on the validation tasks."""
    with record_effects(setup, "validation"):
        result = roll_out_split(setup, params, key, "validation", tasks=setup.config.evaluation.validation_tasks)
        return evaluate_trajectories(result.trajectories, setup.env.tools)


def test(setup: HostedSetup, key: jax.Array, params: Sequence[Params], versions: Sequence[int]) -> TestReport:
    """Compare two sets of parameters, before and after training, on the test tasks; their trajectories are written."""
    rollouts = []
    for when, weights, version in zip(("before", "after"), params, versions, strict=True):
        with record_effects(setup, f"test-{when}"):
            result = roll_out_split(
                setup, weights, key, "test", tasks=setup.config.evaluation.test_tasks, version=version
            )
            evaluate_trajectories(result.trajectories, setup.env.tools)  # raises if none has an outcome
        write_trajectories(setup.folder / "trajectories" / f"test-{when}.jsonl", result.trajectories)
        rollouts.append(result.trajectories)
    return compare_before_after(setup, rollouts)


def compare_before_after(
    setup: HostedSetup, rollouts: Sequence[Sequence[RecordedTrajectory]], *, samples: int = 1, ks: Sequence[int] = (1,)
) -> TestReport:
    """The table before / after training, by domain, and one task that failed before and is solved after."""
    tools = setup.env.tools
    before, after = evaluations = [
        evaluate_trajectories(rollout, tools, samples=samples, ks=ks) for rollout in rollouts
    ]
    domains = [group_by_domain(rollout) for rollout in rollouts]
    judged = [name for name in domains[0] if all(with_outcome(domain[name]) for domain in domains)]
    by_domain = {
        name: [evaluate_trajectories(part[name], tools, samples=samples) for part in domains] for name in judged
    }
    results = {
        f"{field}_{when}": {name: getattr(pair[i], source) for name, pair in by_domain.items()}
        for i, when in enumerate(("before", "after"))
        for field, source in (("success_by_domain", "success"), ("tool_error_by_domain", "tool_errors"))
    }
    unjudged = [f"{name}: nothing could be judged" for name in domains[0] if name not in judged]
    correct = [np.array([trajectory.correct for trajectory in rollout]) for rollout in rollouts]
    learned = int(np.argmax(~correct[0] & correct[1]))
    examples = [
        f"{when}:\n{setup.format_trajectory(setup.eval_env, rollout[learned])}"
        for when, rollout in zip(("before", "after"), rollouts, strict=True)
    ]
    text = [before_after_table(before, after), "", domain_table(by_domain), *unjudged, "", *examples]
    return TestReport(evaluations, "\n".join(text), results)


def domain_table(by_domain: Mapping[str, Sequence[Evaluation]]) -> str:
    """Success, tool errors, turns and tools of each domain, before -> after."""
    lines = [f"{'domain':16}{'success':>18}{'tool errors':>18}{'turns':>16}   calls"]
    for name, (before, after) in by_domain.items():
        calls = ", ".join(
            f"{tool} {before.tools[tool]:.0%} -> {fraction:.0%}"
            for tool, fraction in (after.tools or {}).items()
            if before.tools and max(fraction, before.tools[tool]) > 0
        )
        success, errors = (
            f"{a:.1%} -> {b:.1%}" for a, b in ((before.success, after.success), (before.tool_errors, after.tool_errors))
        )
        turns = f"{before.turns:.2f} -> {after.turns:.2f}"
        lines.append(f"{name:16}{success:>18}{errors:>18}{turns:>16}   {calls}")
    return "\n".join(lines)
