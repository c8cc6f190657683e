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

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments import arms, common, setups
from experiments.arms import Arm
from experiments.compare_runs import begin_all, over_seeds, settings_of
from experiments.headings import heading
from experiments.studies import STUDIES
from flowgrpo import launch, loop
from flowgrpo.many import many_updates, over_runs, stack
from flowgrpo.report.progress import Progress
from flowgrpo.spread import data_mesh
from flowgrpo.statistics import interval, probability_of_improvement

heading("Sizes")
_SEEDS = flags.DEFINE_integer("num_seeds", 16, "Seeds.", lower_bound=2)
_UPDATES = flags.DEFINE_integer("updates", 40, "Updates of each.", lower_bound=4)
_LANES = flags.DEFINE_list("lanes", ["1", "2", "8"], "Seeds that are vmapped on a device: numbers, by commas.")
FIRST = 3  # updates that must agree


class Timed(NamedTuple):
    """One way of training all seeds."""

    compilation: float
    seconds: float
    success: np.ndarray  # [seed, update], of training
    early: Any  # parameters after the first updates, stacked


def together(step: Callable, runs: Any, updates: int, lanes: int) -> Timed:
    """All seeds in one program; the first updates once more in one of their own, which isn't timed."""
    first, whole = (
        jax.jit(over_runs(partial(many_updates, step, updates=size), lanes=lanes, mesh=data_mesh()))
        for size in (FIRST, updates)
    )
    began = time.monotonic()
    compiled = whole.lower(runs).compile()
    compilation, began = time.monotonic() - began, time.monotonic()
    _, figures = jax.block_until_ready(compiled(runs))
    seconds = time.monotonic() - began
    early, _ = first(runs)
    return Timed(compilation, seconds, np.asarray(figures["success"]), jax.device_get(early.learner.params))


def alone(step: Callable, runs: Any, updates: int) -> Timed:
    """One seed after another, by programs that are compiled once."""
    each = [jax.tree.map(lambda x, index=index: x[index], runs) for index in range(len(runs.update))]
    began = time.monotonic()
    jax.block_until_ready(step(each[0]))
    compilation, began = time.monotonic() - began, time.monotonic()
    success, early = [], []
    for run in each:
        seen = []
        for after, figures in loop.train(step, run, updates):
            seen.append(figures["success"])
            if len(seen) == FIRST:
                early.append(after.learner.params)
        success.append(seen)
    seconds = time.monotonic() - began
    return Timed(compilation, seconds, np.array(success), jax.device_get(stack(early)))


def agreement(one: Timed, other: Timed) -> dict[str, Any]:
    """How near two ways come to each other: early parameters and success, and the seeds' success at the end."""
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
    settings = settings_of(study, env, {"updates": updates})
    begun = begin_all(settings, world, range(seeds), each=partial(over_seeds, lanes=1), progress=progress)
    parts = arms.parts_of(Arm(), settings, world, updates=1, tasks=1)
    runs = jax.jit(over_runs(parts.begin))(begun)
    spread = setups.build(settings | {"mesh": None}, env=parts.setup.env)
    step = loop.one_program(parts.setup.iteration, parts.setup.env, parts.setup.sizes)
    ways: dict[str, Callable[[], Timed]] = {
        "alone": lambda: alone(
            loop.three_programs(spread.iteration, spread.env, spread.algorithm, spread.sizes), runs, updates
        ),
        "alone, one program": lambda: alone(jax.jit(step), runs, updates),
    }
    ways |= {f"together, {lanes} vmapped": partial(together, step, runs, updates, int(lanes)) for lanes in _LANES.value}
    done: dict[str, Timed] = {}
    for name, run in ways.items():
        progress.say(f"{seeds} seeds, {updates} updates: {name}")
        done[name] = run()
    base = done["alone"]
    print(f"{'':24}{'compile':>10}{'seconds':>10}{'ratio':>8}{'apart':>10}{'beats alone':>22}")
    rows = []
    for name, timed in done.items():
        row = {"way": name, "compilation": timed.compilation, "seconds": timed.seconds}
        row |= {"ratio": timed.seconds / base.seconds} | agreement(timed, base)
        rows.append(row)
        beats = f"{row['beats']:.2f} ({row['beats_low']:.2f} to {row['beats_high']:.2f})"
        cells = f"{timed.compilation:>9.1f}s{timed.seconds:>9.1f}s{row['ratio']:>8.2f}{row['params_apart']:>10.1e}"
        print(f"{name:24}{cells}{beats:>22}")
    print(json.dumps({"seeds": seeds, "updates": updates, "devices": jax.device_count(), "rows": rows}))


if __name__ == "__main__":
    common.run(main, cpu_devices=launch.cores())
