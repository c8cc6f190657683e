"""Several seeds in one program against the same seeds one after another: wall time, and whether they come to the same.

    python -m experiments.benchmarks.seeds
    python -m experiments.benchmarks.seeds --num_seeds=8 --updates=20 --lanes=1,4

Both sides train the baseline of `--study=credit` from the same warm-started planners. `alone` is what a run of one seed
does (`loop.three_programs`, rows dealt over all devices), compiled once and called seed after seed; `alone, one
program` the same as one program. `together` deals the seeds over the devices, with so many vmapped on each (`lanes`).
Seconds are those of all seeds and updates, compilation apart. The first three updates must agree to rounding; after
them near-ties fall differently now and then, so the success of all seeds at the end is compared as a distribution.

Prints a table and one JSON line. Runs on any CPU, offline, in minutes. On two quiet cores, for 16 seeds and 20 updates,
13.9 seconds alone, 16.7 as one program each, 7.6 together with one lane and 9.7 with two; three updates agree to
1.4e-5.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Sizes")
_SEEDS = flags.DEFINE_integer("num_seeds", 16, "Seeds.", lower_bound=2)
_UPDATES = flags.DEFINE_integer("updates", 40, "Updates of each.", lower_bound=4)
_LANES = flags.DEFINE_list("lanes", ["1", "2", "8"], "Seeds that are vmapped on a device: numbers, by commas.")

app.read_flags(__name__)

import jax
import numpy as np

from flowgrpo import launch, loop
from flowgrpo.evaluation.statistics import interval, probability_of_improvement
from flowgrpo.parallel.row_sharding import data_mesh, many_updates, over_runs, stack_trees
from flowgrpo.recipes import pure, study_arms
from flowgrpo.recipes.compare import begin_all, over_seeds, study_config
from flowgrpo.recipes.studies import STUDIES
from flowgrpo.recipes.study_arms import Arm
from flowgrpo.report.progress import Progress, with_progress
from flowgrpo.report.tables import show_lines, significant, timed

from .measuring import print_result, whole_numbers

FIRST = 3  # updates that must agree


class Timed(NamedTuple):
    """One way of training all seeds."""

    compilation: float
    seconds: float
    success: np.ndarray  # [seed, update], of training
    early: Any  # parameters after the first updates, stacked


def _together(step: Callable, runs: Any, updates: int, lanes: int) -> Timed:
    """All seeds in one program; the first updates once more in one of their own, which isn't timed."""

    def program(size: int) -> Any:
        return jax.jit(over_runs(lambda run: many_updates(step, run, updates=size), lanes=lanes, mesh=data_mesh()))

    compilation, compiled = timed(lambda: program(updates).lower(runs).compile())
    seconds, (_, figures) = timed(lambda: compiled(runs))
    early, _ = program(FIRST)(runs)
    return Timed(compilation, seconds, np.asarray(figures["success"]), jax.device_get(early.learner.params))


def _alone(step: Callable, runs: Any, updates: int) -> Timed:
    """One seed after another, by programs that are compiled once."""
    each = [jax.tree.map(lambda x, index=index: x[index], runs) for index in range(len(runs.update))]
    compilation, _ = timed(lambda: step(each[0]))
    success, early = [], []

    def train() -> None:
        for run in each:
            history = [(after, figures["success"]) for after, figures in loop.train_loop(step, run, updates)]
            early.append(history[FIRST - 1][0].learner.params)
            success.append([reached for _, reached in history])

    seconds, _ = timed(train)
    return Timed(compilation, seconds, np.array(success), jax.device_get(stack_trees(early)))


def _agreement(one: Timed, other: Timed) -> dict[str, Any]:
    """Say how near two ways come to each other: early parameters and success, and the seeds' success at the end."""
    apart = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), one.early, other.early)
    ends = [timed.success[:, -5:].mean(axis=1) for timed in (one, other)]
    low, high = interval(probability_of_improvement, *ends)
    return {
        "params_apart": max(jax.tree.leaves(apart)),
        "early_equal": bool((one.success[:, :FIRST] == other.success[:, :FIRST]).all()),
        "ends": [float(end.mean()) for end in ends],
        "beats": probability_of_improvement(*ends),
        "beats_low": low,
        "beats_high": high,
    }


def main() -> None:
    """Time every way, hold each against the first."""
    seeds, updates = _SEEDS.value, _UPDATES.value
    progress = Progress(updates)
    study = STUDIES["credit"]()
    (env, world), *_ = study.worlds.items()
    config = study_config(study, env, {"updates": updates})
    begun = begin_all(config, world, range(seeds), each=partial(over_seeds, lanes=1), progress=progress)
    parts = study_arms.parts_of(Arm(), config, world, updates=1, tasks=1)
    runs = jax.jit(over_runs(parts.begin))(begun)
    spread = pure.open(replace(config, mesh=None), env=parts.setup.env)
    three = loop.three_programs(spread.iteration)
    step = loop.one_program(parts.setup.iteration)
    ways: dict[str, Callable[[], Timed]] = {
        "alone": lambda: _alone(three, runs, updates),
        "alone, one program": lambda: _alone(jax.jit(step), runs, updates),
    }
    for lanes in whole_numbers(_LANES):
        ways[f"together, {lanes} vmapped"] = lambda lanes=lanes: _together(step, runs, updates, lanes)
    done = {name: ways[name]() for name in with_progress("way", list(ways))}
    base = done["alone"]
    rows = [
        {"way": name, "compilation": way.compilation, "seconds": way.seconds, "ratio": way.seconds / base.seconds}
        | _agreement(way, base)
        for name, way in done.items()
    ]
    shown = ("way", "compilation", "seconds", "ratio", "params_apart", "beats", "beats_low", "beats_high")
    show_lines([{n: significant(row[n]) if isinstance(row[n], float) else row[n] for n in shown} for row in rows])
    print_result("seeds", seeds=seeds, updates=updates, devices=jax.device_count(), rows=rows)


if __name__ == "__main__":
    app.run(main, cpu_devices=launch.cores())
