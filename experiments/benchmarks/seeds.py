"""Several seeds in one program against the same seeds one after another: wall time, and whether the results agree.

    python -m experiments.benchmarks.seeds
    python -m experiments.benchmarks.seeds --num_seeds=8 --updates=20 --lanes=1,4

All train the baseline of `--study=credit` from the same warm-started planners. `alone` is a run of one seed
(`pure_env.split_step`, rows sharded over all devices), compiled once and called for one seed after another; `alone, one
program` the same as one program. `together` shards the seeds over the devices, `lanes` of them vmapped on each. Seconds
are those of all seeds and updates, without compilation. The first three updates must agree up to rounding; after them
near-ties are sometimes decided differently, so the success rates of all seeds at the end are compared as distributions.

Prints a table and one JSON line. Runs on any CPU, offline, in minutes. On two quiet cores, for 16 seeds and 20 updates,
13.9 seconds alone, 16.7 as one program each, 7.6 together with one lane and 9.7 with two; three updates agree to
1.4e-5.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Sizes")
_SEEDS = flags.DEFINE_integer("num_seeds", 16, "Seeds.", lower_bound=2)
_UPDATES = flags.DEFINE_integer("updates", 40, "Updates of each seed.", lower_bound=4)
_LANES = flags.DEFINE_list(
    "lanes", ["1", "2", "8"], "Numbers of seeds that are vmapped on a device, separated by commas."
)

app.read_flags(__name__)

import jax
import numpy as np

from flowgrpo import launch
from flowgrpo.evaluation.statistics import interval, probability_of_improvement
from flowgrpo.parallel.row_sharding import data_mesh, map_runs, scan_updates, stack_trees
from flowgrpo.recipes import pure
from flowgrpo.recipes.compare import map_over_seeds, study_config, warm_start_seeds
from flowgrpo.recipes.recipe import Objects
from flowgrpo.recipes.study import Arm, build_arm
from flowgrpo.report.progress import Progress, with_progress
from flowgrpo.report.tables import show_lines, significant, timed
from flowgrpo.training.iteration import train_loop
from flowgrpo.training.pure_env import fused_step, split_step

from ..studies.studies import STUDIES
from .measuring import print_result, whole_numbers

FIRST = 3  # updates that must agree


class Timed(NamedTuple):
    """Result of one way of training all seeds."""

    compilation: float  # seconds
    seconds: float
    success: np.ndarray  # [seed, update], success rate in training
    early: Any  # parameters after the first updates, stacked


def _together(step: Callable, runs: Any, updates: int, lanes: int) -> Timed:
    """All seeds in one program; the first updates again in a separate program, which isn't timed."""

    def program(size: int) -> Any:
        return jax.jit(map_runs(lambda run: scan_updates(step, run, updates=size), lanes=lanes, mesh=data_mesh()))

    compilation, compiled = timed(lambda: program(updates).lower(runs).compile())
    seconds, (_, figures) = timed(lambda: compiled(runs))
    early, _ = program(FIRST)(runs)
    return Timed(compilation, seconds, np.asarray(figures["success"]), jax.device_get(early.learner.params))


def _alone(step: Callable, runs: Any, updates: int) -> Timed:
    """One seed after another, by programs that are compiled once."""
    initial = [jax.tree.map(lambda x, index=index: x[index], runs) for index in range(len(runs.update))]
    compilation, _ = timed(lambda: step(initial[0]))
    success, early = [], []

    def train() -> None:
        for run in initial:
            history = [(state, figures["success"]) for state, figures in train_loop(step, run, updates)]
            early.append(history[FIRST - 1][0].learner.params)
            success.append([success_rate for _, success_rate in history])

    seconds, _ = timed(train)
    return Timed(compilation, seconds, np.array(success), jax.device_get(stack_trees(early)))


def _agreement(first: Timed, second: Timed) -> dict[str, Any]:
    """Agreement of two ways: early parameters and success rates, and the distribution of success rates at the end."""
    distances = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), first.early, second.early)
    ends = [timed.success[:, -5:].mean(axis=1) for timed in (first, second)]
    low, high = interval(probability_of_improvement, *ends)
    return {
        "params_apart": max(jax.tree.leaves(distances)),
        "early_equal": bool((first.success[:, :FIRST] == second.success[:, :FIRST]).all()),
        "ends": [float(end.mean()) for end in ends],
        "beats": probability_of_improvement(*ends),
        "beats_low": low,
        "beats_high": high,
    }


def main() -> None:
    """Time every way, and compare each with the first."""
    seeds, updates = _SEEDS.value, _UPDATES.value
    progress = Progress(updates)
    study = STUDIES["credit"]()
    (env, world), *_ = study.worlds.items()
    config = study_config(study, env, {"updates": updates})
    planners = warm_start_seeds(
        config, world, range(seeds), map_seeds=partial(map_over_seeds, lanes=1), progress=progress
    )
    parts = build_arm(Arm(), config, world, updates=1, tasks=1)
    runs = jax.jit(map_runs(parts.begin))(planners)
    setup = pure.build(config.replace(mesh=None), objects=Objects(env=parts.setup.env))
    iteration = split_step(setup.stages)
    step = fused_step(parts.setup.stages)
    methods: dict[str, Callable[[], Timed]] = {
        "alone": lambda: _alone(iteration, runs, updates),
        "alone, one program": lambda: _alone(jax.jit(step), runs, updates),
    }
    for lanes in whole_numbers(_LANES):
        methods[f"together, {lanes} vmapped"] = lambda lanes=lanes: _together(step, runs, updates, lanes)
    results = {name: methods[name]() for name in with_progress("way", list(methods))}
    base = results["alone"]
    rows = [
        {
            "way": name,
            "compilation": result.compilation,
            "seconds": result.seconds,
            "ratio": result.seconds / base.seconds,
        }
        | _agreement(result, base)
        for name, result in results.items()
    ]
    shown = ("way", "compilation", "seconds", "ratio", "params_apart", "beats", "beats_low", "beats_high")
    show_lines([{n: significant(row[n]) if isinstance(row[n], float) else row[n] for n in shown} for row in rows])
    print_result("seeds", seeds=seeds, updates=updates, devices=jax.device_count(), rows=rows)


if __name__ == "__main__":
    app.run(main, cpu_devices=launch.num_cores())
