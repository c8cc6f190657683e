"""The runs of a study: what is missing of them is run, arm by arm, with all seeds at once; each has a line in a file.

    compare(study, folder, seeds=range(16))  ->  {(arm, environment, seed): its line in runs.jsonl}

A line has the success on test tasks and the turns at each examination, and figures of training by update.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import arms, setups
from experiments.arms import Arm
from experiments.members import ENVIRONMENTS
from experiments.studies import Study
from flowgrpo.files import write_whole
from flowgrpo.many import over_runs, stack
from flowgrpo.report.metrics import plain, read_metrics
from flowgrpo.report.progress import Progress
from flowgrpo.spread import data_mesh

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
    """All of them, whole or as before."""
    write_whole(folder / RUNS, "".join(json.dumps(line) + "\n" for line in runs.values()))


def compare(
    study: Study,
    folder: Path,
    *,
    seeds: Sequence[int],
    every: int = 10,
    tasks: int = 256,
    lanes: int | None = None,
    chosen: Mapping[str, Any] = {},
) -> Runs:
    """Run what is missing of a study, in its folder; `chosen` settings stand in the place of the study's."""
    runs, progress = read_runs(folder), Progress(0)
    each = partial(over_seeds, lanes=lanes)
    for env, world in study.worlds.items():
        settings = settings_of(study, env, chosen)
        missing = {name: [seed for seed in seeds if (name, env, seed) not in runs] for name in study.arms}
        wanted = sorted({seed for own in missing.values() for seed in own})
        if not wanted:
            continue
        begun = begin_all(settings, world, wanted, each=each, progress=progress)
        for index, (name, arm) in enumerate(study.arms.items(), 1):
            if not missing[name]:
                continue
            own = _of(begun, [wanted.index(seed) for seed in missing[name]])
            title = f"{env}, arm {index}/{len(study.arms)}, {name}"
            found = run_arm(
                arm, settings, world, own, each=each, every=every, tasks=tasks, tell=partial(progress.show, title)
            )
            runs |= {
                (name, env, seed): plain({"arm": name, "env": env, "seed": seed, **line})
                for seed, line in zip(missing[name], found, strict=True)
            }
            write_runs(folder, runs)
            progress.say(f"{title}: success {np.mean([line['success'][-1] for line in found]):.3f}")
    return runs


def _of(begun: arms.Begun, places: Sequence[int]) -> arms.Begun:
    return jax.tree.map(lambda x: x[np.array(places)], begun)


def settings_of(study: Study, env: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """All settings that the arms of a study share in an environment."""
    settings = setups.settings_of(env, **{**study.settings, **chosen})
    return settings | {"mesh": "none", "decay_updates": settings["updates"]}


def over_seeds(function: Callable, *, lanes: int | None) -> Callable:
    """A function of one seed, compiled for all of them, which are dealt over the devices."""
    return jax.jit(over_runs(function, lanes=lanes, mesh=data_mesh()))


def begin_all(
    settings: Mapping[str, Any], world: Mapping[str, Any], seeds: Sequence[int], *, each: Callable, progress: Progress
) -> arms.Begun:
    """The planners that all arms start from."""
    progress.say(f"{settings['env']}: {len(seeds)} planners imitate demonstrations ({settings['warm_steps']} steps)")
    setup = setups.build(dict(settings), env=ENVIRONMENTS[settings["env"]](**world))
    keys = stack([jax.random.key(seed) for seed in seeds])
    return jax.block_until_ready(each(partial(arms.start, setup=setup))(keys))


def run_arm(
    arm: Arm,
    settings: Mapping[str, Any],
    world: Mapping[str, Any],
    begun: arms.Begun,
    *,
    each: Callable,
    every: int,
    tasks: int,
    tell: Callable[..., None],
) -> list[dict[str, Any]]:
    """One arm with all its seeds: for each of them its curve on test tasks, and its figures by update."""
    updates = settings["updates"]
    steps = [min(every, updates - done) for done in range(0, updates, every)]
    parts = {size: arms.parts_of(arm, settings, world, updates=size, tasks=tasks) for size in dict.fromkeys(steps)}
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


def _mean(seen: arms.Seen) -> dict[str, float]:
    return {"success": float(np.mean(seen.success)), "turns": float(np.mean(seen.turns))}


def _line_of(index: int, at: list[int], seen: Sequence[arms.Seen]) -> dict[str, Any]:
    """One seed's own line."""
    names = seen[-1].figures
    by_update = {name: np.concatenate([one.figures[name][index] for one in seen[1:]]) for name in names}
    tests = {"success": [one.success[index] for one in seen], "turns": [one.turns[index] for one in seen]}
    return {"updates": at, **tests, "train": by_update}
