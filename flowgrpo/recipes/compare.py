"""Compare algorithms over seeds, which all start from the same planners.

    result = compare({"mine": mine, "flow_grpo": fg.flow_grpo()}, env=fg.lookup(), seeds=range(4), folder="runs/mine")
    print(result)                                       a table with intervals
    runs = run_study(study, folder, seeds=range(16))    {(arm, environment, seed): its line in runs.jsonl}

A line has the success on test tasks and the turns at each evaluation, and metrics of training by update. All seeds of
an arm are one program.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from flowgrpo.contracts import Algorithm, Env
from flowgrpo.files import make_folder, write_atomic
from flowgrpo.parallel.row_sharding import data_mesh, map_runs, stack_trees
from flowgrpo.recipes import pure
from flowgrpo.recipes.recipe import Objects
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.recipes.study import (
    SMALL,
    Arm,
    ArmMetrics,
    SeedStart,
    Study,
    World,
    build_arm,
    make_world,
    warm_start_seed,
)
from flowgrpo.recipes.study_tables import WRITTEN, table, tabulate_study, write_study
from flowgrpo.report.health import all_warnings
from flowgrpo.report.metrics import plain_json, read_metrics
from flowgrpo.report.progress import Progress
from flowgrpo.training.run_dir import run_folder
from flowgrpo.training.time_budget import UNLIMITED, OutOfTime, TimeBudget
from flowgrpo.types import BadInput

RUNS = "runs.jsonl"

Key = tuple[str, str, int]  # arm, environment, seed
Runs = dict[Key, dict[str, Any]]
MapSeeds = Callable[[Callable], Callable]  # a function of one seed -> the compiled function of all seeds


# Algorithms over seeds ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArmResult:
    """Success of an arm on test tasks after its last update.

    Args:
        success: of each seed, in the order of the seeds.
        iqm: interquartile mean over the seeds; the plain mean of fewer than four is nearly the same.
        interval: its 95 % interval, by bootstrap.
        beats_first: probability that a run scores higher than one of the first arm, a tie counting half; None for it.
    """

    success: np.ndarray
    iqm: float
    interval: tuple[float, float]
    beats_first: float | None


@dataclass(frozen=True)
class Comparison:
    """Results of `compare`; printed, it is their table."""

    study: Study
    seeds: tuple[int, ...]
    arms: Mapping[str, ArmResult]
    runs: Runs  # with the curve of each run
    rows: Sequence[Mapping[str, Any]]  # of the table
    folder: Path | None

    def __str__(self) -> str:
        return table(self.rows, self.study)


def compare(
    algorithms: Mapping[str, Algorithm | str],
    *,
    env: Env | str = "lookup",
    seeds: Iterable[int] = range(4),
    updates: int = 80,
    folder: str | Path | None = None,
    every: int = 10,
    tasks: int = 256,
    changes: Mapping[str, Any] = {},
) -> Comparison:
    """Train small planners by each of several algorithms, from the same starts, on the same test tasks.

    For each seed a planner imitates the environment's demonstrations once, and every algorithm continues from there. An
    algorithm whose name, in `algorithms`, has runs in the folder is not run again: after a change of its code, give it
    another name or take another folder.

    Args:
        algorithms: by a name; each an `fg.Algorithm`, or the name of one. The first is what others are compared with.
        env: a pure environment with demonstrations, or the name of one.
        seeds: of the runs.
        updates: of each run.
        folder: of runs.jsonl, table, plot and page (index.html), which resumes, and takes more seeds and algorithms;
            None: nothing is written.
        every: updates between evaluations.
        tasks: number of test tasks of an evaluation.
        changes: settings of `recipes.pure` that all runs share, such as {"queries": 32}.
    """
    if isinstance(seeds, int):
        raise BadInput(f"compare: seeds={seeds} is a number; give the seeds themselves, such as range({seeds})")
    study = _study_of(algorithms, env, {**SMALL, **changes, "updates": updates})
    seeds = tuple(seeds)
    if not seeds:
        raise BadInput("compare: seeds are empty; give at least one, such as range(4)")
    (world,) = study.worlds
    identity = {"env": world, "changes": dict(study.changes), "every": every, "tasks": tasks}
    with ExitStack() as stack:
        if folder is None:
            path = Path(stack.enter_context(TemporaryDirectory()))
        else:
            path = stack.enter_context(run_folder(folder, "compare", identity, extra_files=(RUNS, *WRITTEN)))
        runs = run_study(study, path, seeds=seeds, every=every, tasks=tasks)
        rows = tabulate_study(study, runs, seeds)
        if folder is not None:
            write_study(path, study, rows, runs, seeds)
    arms = {
        row["arm"]: ArmResult(
            np.array([runs[row["arm"], world, seed]["success"][-1] for seed in seeds]),
            row["iqm"],
            (row["low"], row["high"]),
            row.get("beats_baseline"),
        )
        for row in rows
    }
    return Comparison(study, seeds, arms, runs, rows, None if folder is None else path)


def _study_of(algorithms: Mapping[str, Algorithm | str], env: Env | str, changes: Mapping[str, Any]) -> Study:
    """The study of these algorithms; raises `BadInput` for what is none, or has no demonstrations to start from."""
    if not isinstance(algorithms, Mapping):
        raise BadInput(f"compare: algorithms={algorithms!r:.60}; give them by name, such as {{'grpo': 'grpo'}}")
    if not algorithms:
        raise BadInput("compare: there is no algorithm; give some by name, such as {'mine': mine}")
    arms = {}
    for name, algorithm in algorithms.items():
        if isinstance(algorithm, str):
            arms[name] = Arm(changes={"algorithm": algorithm})
        elif isinstance(algorithm, Algorithm):
            arms[name] = Arm(algorithm=partial(_same, algorithm))
        else:
            form = "give an fg.Algorithm, such as fg.flow_grpo(), or a function under @fg.algorithm"
            raise BadInput(f"compare: {name!r} is {algorithm!r:.60}; {form}")
    if isinstance(env, str):
        if env not in ENVIRONMENTS:
            raise BadInput(f"compare: environment {env!r} is unknown; choose from {', '.join(ENVIRONMENTS)}")
        world: dict[str, World] = {env: {}}
    elif isinstance(env, Env):
        world = {env.name: env}
    else:
        raise BadInput(f"compare: env is {env!r:.60}; give an fg.Env, such as fg.lookup(), or the name of one")
    return Study("Which algorithm learns more?", next(iter(arms)), arms, changes, world)


def _same(algorithm: Algorithm) -> Algorithm:
    return algorithm


# Studies ------------------------------------------------------------------------------------------------


def read_runs(folder: Path) -> Runs:
    """The runs in a folder so far, by arm, environment and seed; {} if there is no file yet."""
    path = folder / RUNS
    lines = list(read_metrics(path)) if path.exists() else []
    return {(line["arm"], line["env"], line["seed"]): line for line in lines}


def write_runs(folder: Path, runs: Runs) -> None:
    """Write the file of runs, whole or not at all."""
    write_atomic(folder / RUNS, "".join(json.dumps(line) + "\n" for line in runs.values()))


def default_lanes() -> int | None:
    """Seeds vmapped on a device: one on a CPU, whose cache fits one run; elsewhere None, for all."""
    return 1 if jax.default_backend() == "cpu" else None


def run_study(
    study: Study,
    folder: Path,
    *,
    seeds: Sequence[int],
    every: int = 10,
    tasks: int = 256,
    lanes: int | None = None,
    chosen: Mapping[str, Any] = {},
    budget: TimeBudget = UNLIMITED,
) -> Runs:
    """Run what is missing of a study in its folder, which must be writable before the first arm is trained.

    Args:
        study: its arms and environments.
        folder: of runs.jsonl, which is written after each arm.
        seeds: of the runs.
        every: updates between evaluations.
        tasks: number of test tasks of an evaluation.
        lanes: seeds vmapped on a device; None: `default_lanes`.
        chosen: settings that replace those of the study.
        budget: checked before each arm, since an arm is what is saved.
    """
    folder = make_folder(folder)
    runs, progress = read_runs(folder), Progress(0)
    write_runs(folder, runs)
    map_seeds = partial(map_over_seeds, lanes=default_lanes() if lanes is None else lanes)
    for env, world in study.worlds.items():
        config = study_config(study, env, chosen)
        missing = {name: [seed for seed in seeds if (name, env, seed) not in runs] for name in study.arms}
        all_missing = sorted({seed for arm_seeds in missing.values() for seed in arm_seeds})
        if not all_missing:
            continue
        starts = warm_start_seeds(config, world, all_missing, map_seeds=map_seeds, progress=progress)
        for number, (name, arm) in enumerate(study.arms.items(), 1):
            if not missing[name]:
                continue
            if budget.is_over():
                progress.log(f"the time budget of {budget.text} is over; the same command resumes with the arm {name}")
                raise OutOfTime
            positions = np.array([all_missing.index(seed) for seed in missing[name]])
            arm_starts = jax.tree.map(lambda x, positions=positions: x[positions], starts)
            title = f"{env}, arm {number}/{len(study.arms)}, {name}"
            lines = run_arm(
                arm,
                config,
                world,
                arm_starts,
                map_seeds=map_seeds,
                every=every,
                tasks=tasks,
                show=partial(progress.show, title),
            )
            runs |= {
                (name, env, seed): plain_json({"arm": name, "env": env, "seed": seed, **line})
                for seed, line in zip(missing[name], lines, strict=True)
            }
            write_runs(folder, runs)
            progress.log(f"{title}: success {np.mean([line['success'][-1] for line in lines]):.3f}")
    return runs


def study_config(study: Study, env: str, chosen: Mapping[str, Any]) -> pure.Config:
    """The Config that the arms of a study share in an environment."""
    # An environment of one's own has the settings of one that is imported.
    preset_of = env if env in ENVIRONMENTS else f"own:{env}"
    config = pure.preset(preset_of, **{**study.changes, **chosen})
    return config.replace(mesh="none", decay_updates=max(config.run.updates, 1))


def map_over_seeds(function: Callable, *, lanes: int | None) -> Callable:
    """A function of one seed, compiled for all seeds, which are sharded over the devices."""
    return jax.jit(map_runs(function, lanes=lanes, mesh=data_mesh()))


def warm_start_seeds(
    config: pure.Config,
    world: World,
    seeds: Sequence[int],
    *,
    map_seeds: MapSeeds,
    progress: Progress,
) -> SeedStart:
    """The planners from which all arms start, one for each seed."""
    name, steps = config.environment.env, config.warm_start.warm_steps
    progress.log(f"{name}: {len(seeds)} planners imitate demonstrations ({steps} steps)")
    setup = pure.build(config, objects=Objects(env=make_world(config, world)))
    keys = stack_trees([jax.random.key(seed) for seed in seeds])
    return jax.block_until_ready(map_seeds(partial(warm_start_seed, setup=setup))(keys))


def run_arm(
    arm: Arm,
    config: pure.Config,
    world: World,
    starts: SeedStart,
    *,
    map_seeds: MapSeeds,
    every: int,
    tasks: int,
    show: Callable[..., None],
    until: int | None = None,
) -> list[dict[str, Any]]:
    """Run an arm with all its seeds -> for each seed its evaluations, and its metrics by update.

    Args:
        arm: its differences from the study.
        config: of the study.
        world: the study's environment, or its settings.
        starts: a planner for each seed.
        map_seeds: compiles a function of one seed for all of them.
        every: updates between evaluations.
        tasks: number of test tasks of an evaluation.
        show: called with the update and metrics after each evaluation.
        until: number of updates after which to stop, as the whole run would be there; None: all.
    """
    updates = config.run.updates if until is None else min(until, config.run.updates)
    sizes = [min(every, updates - done) for done in range(0, updates, every)]  # updates before each evaluation
    parts = {size: build_arm(arm, config, world, updates=size, tasks=tasks) for size in dict.fromkeys(sizes)}
    advance = {size: map_seeds(size_parts.advance) for size, size_parts in parts.items()}
    first = parts[sizes[0]]
    state = map_seeds(first.begin)(starts)
    evaluations = [jax.device_get(map_seeds(first.evaluate)(state))]
    show(0, _mean(evaluations[0]), total=updates)
    for index, size in enumerate(sizes):
        state, metrics = advance[size](state)
        evaluations.append(jax.device_get(metrics))
        show(sum(sizes[: index + 1]), _mean(evaluations[-1]), total=updates)
    at = np.cumsum([0, *sizes]).tolist()
    lines = []
    for seed in range(len(evaluations[0].success)):
        by_update = {
            name: np.concatenate([evaluation.metrics[name][seed] for evaluation in evaluations[1:]])
            for name in evaluations[-1].metrics
        }
        lines.append(
            {
                "updates": at,
                "success": [evaluation.success[seed] for evaluation in evaluations],
                "turns": [evaluation.turns[seed] for evaluation in evaluations],
                "train": by_update,
                "warnings": first_warnings(by_update),
            }
        )
    return lines


def rerun_seed(
    study: Study, arm: str, env: str, seed: int, *, every: int = 10, tasks: int = 256, until: int | None = None
) -> list[float]:
    """Run one seed of an arm again, alone -> its success at each evaluation."""
    config, world, progress = study_config(study, env, {}), study.worlds[env], Progress(0)
    map_seeds = partial(map_over_seeds, lanes=1)
    starts = warm_start_seeds(config, world, [seed], map_seeds=map_seeds, progress=progress)
    (line,) = run_arm(
        study.arms[arm],
        config,
        world,
        starts,
        map_seeds=map_seeds,
        every=every,
        tasks=tasks,
        show=partial(progress.show, f"{env}, {arm}, seed {seed}"),
        until=until,
    )
    return plain_json(line["success"])


def _mean(evaluation: ArmMetrics) -> dict[str, float]:
    return {"success": float(np.mean(evaluation.success)), "turns": float(np.mean(evaluation.turns))}


def first_warnings(by_update: Mapping[str, np.ndarray]) -> dict[str, int]:
    """The update of the first warning of each kind that `report.health` would have given."""
    names, count = list(by_update), len(next(iter(by_update.values()), ()))
    lines = ({"update": i + 1} | {name: float(by_update[name][i]) for name in names} for i in range(count))
    first: dict[str, int] = {}
    for warning in all_warnings(lines):
        first.setdefault(warning["warning"], warning["update"])
    return first
