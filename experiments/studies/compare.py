"""Run the arms of a study over seeds: `run_study` runs what is missing; `study_pages` reports the results.

    runs = run_study(study, folder, seeds=range(16))    {(arm, environment, seed): its line in runs.jsonl}

A line has the success on test tasks and the turns at each evaluation, and metrics of training by update. All seeds of
an arm are one program.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flowgrpo.files import make_folder, write_atomic
from flowgrpo.parallel.row_sharding import data_mesh, map_runs, stack_trees
from flowgrpo.recipes import pure
from flowgrpo.recipes.recipe import Objects
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.report.health import all_warnings
from flowgrpo.report.metrics import plain_json, read_metrics
from flowgrpo.report.progress import Progress
from flowgrpo.training.time_budget import UNLIMITED, OutOfTime, TimeBudget

from . import study_arms
from .studies import Study
from .study_arms import Arm

RUNS = "runs.jsonl"

Key = tuple[str, str, int]  # arm, environment, seed
Runs = dict[Key, dict[str, Any]]
MapSeeds = Callable[[Callable], Callable]  # a function of one seed -> the compiled function of all seeds


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
    for env, env_settings in study.worlds.items():
        config = study_config(study, env, chosen)
        missing = {name: [seed for seed in seeds if (name, env, seed) not in runs] for name in study.arms}
        all_missing = sorted({seed for arm_seeds in missing.values() for seed in arm_seeds})
        if not all_missing:
            continue
        starts = warm_start_seeds(config, env_settings, all_missing, map_seeds=map_seeds, progress=progress)
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
                env_settings,
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
    config = pure.preset(env, **{**study.changes, **chosen})
    return config.replace(mesh="none", decay_updates=max(config.run.updates, 1))


def map_over_seeds(function: Callable, *, lanes: int | None) -> Callable:
    """A function of one seed, compiled for all seeds, which are sharded over the devices."""
    return jax.jit(map_runs(function, lanes=lanes, mesh=data_mesh()))


def warm_start_seeds(
    config: pure.Config,
    env_settings: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    map_seeds: MapSeeds,
    progress: Progress,
) -> study_arms.SeedStart:
    """The planners from which all arms start, one for each seed."""
    progress.log(
        f"{config.environment.env}: {len(seeds)} planners imitate demonstrations ({config.warm_start.warm_steps} steps)"
    )
    setup = pure.build(config, objects=Objects(env=ENVIRONMENTS[config.environment.env](**env_settings)))
    keys = stack_trees([jax.random.key(seed) for seed in seeds])
    return jax.block_until_ready(map_seeds(partial(study_arms.warm_start_seed, setup=setup))(keys))


def run_arm(
    arm: Arm,
    config: pure.Config,
    env_settings: Mapping[str, Any],
    starts: study_arms.SeedStart,
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
        env_settings: of the study's environment.
        starts: a planner for each seed.
        map_seeds: compiles a function of one seed for all of them.
        every: updates between evaluations.
        tasks: number of test tasks of an evaluation.
        show: called with the update and metrics after each evaluation.
        until: number of updates after which to stop, as the whole run would be there; None: all.
    """
    updates = config.run.updates if until is None else min(until, config.run.updates)
    sizes = [min(every, updates - done) for done in range(0, updates, every)]  # updates before each evaluation
    parts = {
        size: study_arms.build_arm(arm, config, env_settings, updates=size, tasks=tasks)
        for size in dict.fromkeys(sizes)
    }
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
    config, env_settings, progress = study_config(study, env, {}), study.worlds[env], Progress(0)
    map_seeds = partial(map_over_seeds, lanes=1)
    starts = warm_start_seeds(config, env_settings, [seed], map_seeds=map_seeds, progress=progress)
    (line,) = run_arm(
        study.arms[arm],
        config,
        env_settings,
        starts,
        map_seeds=map_seeds,
        every=every,
        tasks=tasks,
        show=partial(progress.show, f"{env}, {arm}, seed {seed}"),
        until=until,
    )
    return plain_json(line["success"])


def _mean(evaluation: study_arms.ArmMetrics) -> dict[str, float]:
    return {"success": float(np.mean(evaluation.success)), "turns": float(np.mean(evaluation.turns))}


def first_warnings(by_update: Mapping[str, np.ndarray]) -> dict[str, int]:
    """The update of the first warning of each kind that `report.health` would have given."""
    names, count = list(by_update), len(next(iter(by_update.values()), ()))
    lines = ({"update": i + 1} | {name: float(by_update[name][i]) for name in names} for i in range(count))
    first: dict[str, int] = {}
    for warning in all_warnings(lines):
        first.setdefault(warning["warning"], warning["update"])
    return first
