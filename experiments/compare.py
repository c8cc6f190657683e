"""Algorithms x environments x seeds, in one command: who learns the task, with what confidence.

    python -m experiments.compare --study=credit
    python -m experiments.compare --study=clip --num_seeds=32 --workdir=runs/clip
    python -m experiments.compare --study=credit --arms=broadcast,GiGPO --updates=200

A study is a question with a few arms (`experiments/studies.py`). All arms start from the same warm-started planners,
seed by seed, and are examined on the same test tasks; each arm is one program over all of its seeds, dealt over the
devices that are here. The score is the success on test tasks after the last update: its interquartile mean over the
seeds, with a 95 % interval of a stratified bootstrap, and how often a run beats one of the baseline (rliable's method).

The work directory holds `runs.jsonl` (a line for each arm, environment and seed, with its curve), `table.jsonl`,
`table.md`, `curves.png`, `curves.svg` and `index.html`, the summary to look at. The same command goes on where it was
stopped: finished arms are kept, and with a larger --num_seeds only the new seeds are run.

Runs on any CPU, offline. Expected of `--study=credit` with its 16 seeds: the table in the README.
"""

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

import flowgrpo as fg
from experiments import arms, common, compare_page, setups
from experiments.arms import Arm
from experiments.studies import STUDIES, Study
from flowgrpo import launch
from flowgrpo.learner.folder import begin_anew, run_folder
from flowgrpo.many import over_runs, stack
from flowgrpo.report.metrics import plain, read_metrics
from flowgrpo.report.progress import Progress
from flowgrpo.spread import data_mesh

_STUDY = flags.DEFINE_enum("study", "credit", list(STUDIES), "What is compared.")
_SEEDS = flags.DEFINE_integer("num_seeds", 16, "Seeds of every arm.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "The first of them.", lower_bound=0)
_ARMS = flags.DEFINE_list("arms", None, "Some of the study's arms, by commas; all by default.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results lie; runs/compare-STUDY by default.")
_RESUME = flags.DEFINE_bool("resume", True, "Go on with what is in the work directory; --noresume begins anew.")
_UPDATES = flags.DEFINE_integer("updates", None, "Updates of every run, in the place of the study's.", lower_bound=1)
_WARM = flags.DEFINE_integer(
    "warm_steps", None, "Steps of imitation before, in the place of the study's.", lower_bound=1
)
_EVERY = flags.DEFINE_integer("examine_every", 10, "Updates between two examinations.", lower_bound=1)
_TASKS = flags.DEFINE_integer("test_tasks", 256, "Test tasks of an examination.", lower_bound=1)
_LANES = flags.DEFINE_integer(
    "lanes", None, "Seeds that are vmapped on a device: 1 on a CPU, all of them elsewhere, by default.", lower_bound=1
)
RUNS = "runs.jsonl"

Key = tuple[str, str, int]  # arm, environment, seed
Runs = dict[Key, dict[str, Any]]


# Runs -------------------------------------------------------------------------------------------------


def read_runs(folder: Path) -> Runs:
    """What was run so far, by arm, environment and seed."""
    path = folder / RUNS
    lines = list(read_metrics(path)) if path.exists() else []
    return {(line["arm"], line["env"], line["seed"]): line for line in lines}


def write_runs(folder: Path, runs: Runs) -> None:
    """All of them, whole or as before."""
    beside = folder / f".{RUNS}"
    try:
        beside.write_text("".join(json.dumps(plain(line)) + "\n" for line in runs.values()))
        beside.replace(folder / RUNS)
    except OSError as error:
        raise fg.BadInput(f"{folder / RUNS} can't be written ({error.strerror}): make room, and go on") from None


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
                (name, env, seed): {"arm": name, "env": env, "seed": seed, **line}
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
    parts = arms.parts_of(Arm(), settings, world, updates=1, tasks=1)
    keys = stack([jax.random.key(seed) for seed in seeds])
    return jax.block_until_ready(each(partial(arms.start, setup=parts.setup))(keys))


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


# The command ------------------------------------------------------------------------------------------


def chosen_arms(study: Study, names: Sequence[str] | None) -> Study:
    """The study with some of its arms only, and always its baseline."""
    if not names:
        return study
    unknown = [name for name in names if name not in study.arms]
    if unknown:
        raise fg.BadInput(f"--arms: {unknown[0]!r} is no arm of this study; they are {', '.join(study.arms)}")
    return study._replace(arms={name: arm for name, arm in study.arms.items() if name in (*names, study.baseline)})


def main() -> None:
    """Run what is missing, make the table and the page."""
    began = time.monotonic()
    study = chosen_arms(STUDIES[_STUDY.value](), _ARMS.value)
    folder = Path(_WORKDIR.value or f"runs/compare-{_STUDY.value}")
    chosen = {"updates": _UPDATES.value, "warm_steps": _WARM.value}
    lanes = _LANES.value or (1 if jax.default_backend() == "cpu" else None)
    own = {"every": _EVERY.value, "tasks": _TASKS.value, "lanes": lanes}
    identity = {"study": _STUDY.value, "chosen": chosen, **own, "settings": dict(study.settings)}
    if not _RESUME.value:
        begin_anew(folder)
    seeds = range(_SEED.value, _SEED.value + _SEEDS.value)
    with run_folder(folder, identity):
        runs = compare(study, folder, seeds=seeds, chosen=chosen, **own)
        rows = compare_page.tabulate(study, runs, seeds)
        expected = inspect.getdoc(STUDIES[_STUDY.value]) or ""
        compare_page.write(folder, study, rows, runs, seeds, expected=expected, name=_STUDY.value)
    print(f"{study.question}  {(time.monotonic() - began) / 60:.1f} minutes\n\n{compare_page.table(rows, study)}")
    print(f"\nwritten to {folder}: table.jsonl, table.md, curves.png, curves.svg, {RUNS}; open {folder / 'index.html'}")
    print(json.dumps(plain(rows)))


if __name__ == "__main__":
    common.run(main, cpu_devices=launch.cores())
