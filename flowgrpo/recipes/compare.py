"""Run the arms of a study over seeds: `run_study` runs what is missing; `study_pages` shows what came of it.

    runs = run_study(study, folder, seeds=range(16))    {(arm, environment, seed): its line in runs.jsonl}

A line has the success on test tasks and the turns at each examination, and figures of training by update. Arm by arm,
all seeds are one program.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flowgrpo.files import make_folder, write_whole
from flowgrpo.parallel.row_sharding import data_mesh, over_runs, stack_trees
from flowgrpo.recipes import pure, study_arms
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.recipes.studies import Study
from flowgrpo.recipes.study_arms import Arm
from flowgrpo.report.health import warnings_of
from flowgrpo.report.metrics import plain_json, read_metrics
from flowgrpo.report.progress import Progress
from flowgrpo.run.time_budget import ENDLESS, OutOfTime, TimeBudget

RUNS = "runs.jsonl"

Key = tuple[str, str, int]  # arm, environment, seed
Runs = dict[Key, dict[str, Any]]


# Runs -------------------------------------------------------------------------------------------------


def read_runs(folder: Path) -> Runs:
    """Read what was run so far, by arm, environment and seed; empty where there is no file yet."""
    path = folder / RUNS
    lines = list(read_metrics(path)) if path.exists() else []
    return {(line["arm"], line["env"], line["seed"]): line for line in lines}


def write_runs(folder: Path, runs: Runs) -> None:
    """Write the file of runs whole."""
    write_whole(folder / RUNS, "".join(json.dumps(line) + "\n" for line in runs.values()))


def lanes_here() -> int | None:
    """Seeds vmapped on a device by default: one on a CPU, whose cache holds one run; elsewhere None, for all."""
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
    budget: TimeBudget = ENDLESS,
) -> Runs:
    """Run what is missing of a study, in its folder; `chosen` settings stand in the place of the study's.

    The folder is made, and has to take the file of runs, before the first arm is trained. `lanes` seeds are vmapped on
    a device, by default as many as are fast there (`lanes_here`). The budget is looked at before each arm, since an arm
    is what is kept.
    """
    folder = make_folder(folder)
    runs, progress = read_runs(folder), Progress(0)
    write_runs(folder, runs)
    each = partial(over_seeds, lanes=lanes_here() if lanes is None else lanes)
    for env, world in study.worlds.items():
        config = study_config(study, env, chosen)
        missing = {name: [seed for seed in seeds if (name, env, seed) not in runs] for name in study.arms}
        wanted = sorted({seed for own in missing.values() for seed in own})
        if not wanted:
            continue
        begun = begin_all(config, world, wanted, each=each, progress=progress)
        for index, (name, arm) in enumerate(study.arms.items(), 1):
            if not missing[name]:
                continue
            if budget.is_over():
                progress.say(f"the time budget of {budget.words} is over; the same command goes on with the arm {name}")
                raise OutOfTime
            places = np.array([wanted.index(seed) for seed in missing[name]])
            own = jax.tree.map(lambda x, places=places: x[places], begun)
            title = f"{env}, arm {index}/{len(study.arms)}, {name}"
            found = run_arm(
                arm, config, world, own, each=each, every=every, tasks=tasks, tell=partial(progress.show, title)
            )
            runs |= {
                (name, env, seed): plain_json({"arm": name, "env": env, "seed": seed, **line})
                for seed, line in zip(missing[name], found, strict=True)
            }
            write_runs(folder, runs)
            progress.say(f"{title}: success {np.mean([line['success'][-1] for line in found]):.3f}")
    return runs


def study_config(study: Study, env: str, chosen: Mapping[str, Any]) -> pure.Config:
    """The Config that the arms of a study share in an environment."""
    config = pure.preset(env, **{**study.changes, **chosen})
    return replace(config, mesh="none", decay_updates=max(config.updates, 1))


def over_seeds(function: Callable, *, lanes: int | None) -> Callable:
    """A function of one seed, compiled for all of them, which are dealt over the devices."""
    return jax.jit(over_runs(function, lanes=lanes, mesh=data_mesh()))


def begin_all(
    config: pure.Config, world: Mapping[str, Any], seeds: Sequence[int], *, each: Callable, progress: Progress
) -> study_arms.SeedStart:
    """The planners that all arms start from."""
    progress.say(f"{config.env}: {len(seeds)} planners imitate demonstrations ({config.warm_steps} steps)")
    setup = pure.open(config, env=ENVIRONMENTS[config.env](**world))
    keys = stack_trees([jax.random.key(seed) for seed in seeds])
    return jax.block_until_ready(each(partial(study_arms.warm_started, setup=setup))(keys))


def run_arm(
    arm: Arm,
    config: pure.Config,
    world: Mapping[str, Any],
    begun: study_arms.SeedStart,
    *,
    each: Callable,
    every: int,
    tasks: int,
    tell: Callable[..., None],
    until: int | None = None,
) -> list[dict[str, Any]]:
    """One arm with all its seeds: for each of them its curve on test tasks, and its figures by update.

    With `until` it ends after so many updates, as it would have come there.
    """
    updates = config.updates if until is None else min(until, config.updates)
    steps = [min(every, updates - done) for done in range(0, updates, every)]
    parts = {size: study_arms.parts_of(arm, config, world, updates=size, tasks=tasks) for size in dict.fromkeys(steps)}
    advance = {size: each(one.advance) for size, one in parts.items()}
    first = parts[steps[0]]
    state = each(first.begin)(begun)
    seen = [jax.device_get(each(first.look)(state))]
    tell(0, _mean(seen[0]), total=updates)
    for index, size in enumerate(steps):
        state, now = advance[size](state)
        seen.append(jax.device_get(now))
        tell(sum(steps[: index + 1]), _mean(seen[-1]), total=updates)
    at = np.cumsum([0, *steps]).tolist()
    return [_line_of(seed, at, seen) for seed in range(len(seen[0].success))]


def run_again(
    study: Study, arm: str, env: str, seed: int, *, every: int = 10, tasks: int = 256, until: int | None = None
) -> list[float]:
    """Run one seed of an arm again, alone -> its success at each examination."""
    config, world, progress = study_config(study, env, {}), study.worlds[env], Progress(0)
    each = partial(over_seeds, lanes=1)
    begun = begin_all(config, world, [seed], each=each, progress=progress)
    tell = partial(progress.show, f"{env}, {arm}, seed {seed}")
    sizes: dict[str, Any] = {"every": every, "tasks": tasks, "until": until}
    return plain_json(run_arm(study.arms[arm], config, world, begun, each=each, tell=tell, **sizes)[0]["success"])


def _mean(seen: study_arms.ArmFigures) -> dict[str, float]:
    return {"success": float(np.mean(seen.success)), "turns": float(np.mean(seen.turns))}


def _line_of(index: int, at: list[int], seen: Sequence[study_arms.ArmFigures]) -> dict[str, Any]:
    """One seed's own line."""
    names = seen[-1].figures
    by_update = {name: np.concatenate([one.figures[name][index] for one in seen[1:]]) for name in names}
    tests = {"success": [one.success[index] for one in seen], "turns": [one.turns[index] for one in seen]}
    return {"updates": at, **tests, "train": by_update, "warnings": first_warnings(by_update)}


def first_warnings(by_update: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Say at which update a run would first have been warned of what (`report.health`)."""
    names, count = list(by_update), len(next(iter(by_update.values()), ()))
    lines = ({"update": i + 1} | {name: float(by_update[name][i]) for name in names} for i in range(count))
    first: dict[str, int] = {}
    for warning in warnings_of(lines):
        first.setdefault(warning["warning"], warning["update"])
    return first
