"""Simulate a schedule on 1 to 10,000 workers in virtual time, with the functions of the real master.

    python -m experiments.simulate
    python -m experiments.simulate --workers=10,100 --schedules=sync,partial --sigma=1.2
    python -m experiments.simulate --run=runs/cluster-0          (lengths and seconds measured by a run)

An update has `--groups_per_worker` groups for each worker, so that the load of a worker is equal at every size. The
number of tokens of a trajectory is lognormal, or measured by --run. The table has, by schedule and size: the
utilisation of rollout workers, seconds of an iteration over those of its longest trajectory, the staleness of groups,
the fraction of tokens carried over by partial rollouts, and the load of the master. With --run, the run's own plan and
workers are simulated too, and compared with the measured time.
"""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from absl import flags

from .cli import app
from .cli.help import flag_heading

flag_heading("Run")
_SCHEDULES = flags.DEFINE_list("schedules", ["sync", "one_step_off", "async", "partial"], "Schedules to simulate.")
_WORKERS = flags.DEFINE_list("workers", ["1", "10", "100", "1000"], "Numbers of rollout workers.")
_RUN = flags.DEFINE_string("run", None, "Work directory of a cluster's run, for measured lengths and seconds.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the lengths.")
flag_heading("Sizes")
_PER_WORKER = flags.DEFINE_integer("groups_per_worker", 1, "Groups per update and worker.", lower_bound=1)
_ROOM = flags.DEFINE_integer("room", 1, "Number of groups that a worker rolls out concurrently.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Number of trajectories per group.", lower_bound=1)
_UPDATES = flags.DEFINE_integer("updates", 12, "Number of updates.", lower_bound=2)
_STALENESS = flags.DEFINE_integer("staleness", 2, "Maximum staleness of async; twice that for partial.", lower_bound=0)
_MEDIAN = flags.DEFINE_float("median_tokens", 1000.0, "Median tokens of a trajectory.", lower_bound=1.0)
_SIGMA = flags.DEFINE_float("sigma", 1.0, "Sigma of the lognormal lengths.", lower_bound=0.0)
_BUDGET = flags.DEFINE_float(
    "budget", 2.0, "Token budget of a rollout slice for partial, in median lengths.", lower_bound=0.1
)
flag_heading("Costs")
_TOKEN = flags.DEFINE_float("token_seconds", 0.02, "Seconds per token of a trajectory.", lower_bound=0.0)
_TRAIN = flags.DEFINE_float("train_seconds", 20.0, "Seconds per update.", lower_bound=0.0)
_JUDGE = flags.DEFINE_float("judge_seconds", 2.0, "Mean seconds to judge a group.", lower_bound=0.0)
_MASTER = flags.DEFINE_float("master_seconds", 0.0005, "Seconds per event of the master.", lower_bound=0.0)

app.read_flags(__name__)

import numpy as np

from flowgrpo.distributed import schedule
from flowgrpo.distributed.simulation import Costs, SimulationResult, simulate
from flowgrpo.recipes.cluster import costs_of, measure_run
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, significant
from flowgrpo.types import BadInput


def _make_plan(name: str, queries: int) -> schedule.Plan:
    """The plan of a schedule."""
    updates, staleness = _UPDATES.value, _STALENESS.value
    if name == "partial":
        budget = max(int(_BUDGET.value * _MEDIAN.value), 1)
        return schedule.partial_rollouts(queries, updates, budget=budget, staleness=2 * staleness, spare=queries)
    plans = {
        "sync": schedule.synchronous,
        "one_step_off": schedule.one_step_off,
        "async": partial(schedule.asynchronous, staleness=staleness),
    }
    if name not in plans:
        raise BadInput(f"--schedules: {name!r} is none of {', '.join([*plans, 'partial'])}")
    return plans[name](queries, updates)


def _costs() -> Costs:
    """The costs of a simulation, from the flags."""

    def lengths(random: np.random.Generator) -> np.ndarray:
        return np.maximum(random.lognormal(np.log(_MEDIAN.value), _SIGMA.value, _SAMPLES.value), 1).astype(int)

    return Costs(
        lengths=lengths,
        token_seconds=_TOKEN.value,
        judge_seconds=lambda random: float(random.exponential(_JUDGE.value)),
        train_seconds=_TRAIN.value,
        master_seconds=_MASTER.value,
    )


def _row(name: str, workers: int, result: SimulationResult) -> dict[str, Any]:
    """One row of the table."""
    over_longest = result.iteration_seconds / result.longest_seconds if result.longest_seconds else float("nan")
    fractions = {name: round(getattr(result, name), 3) for name in ("training", "reused", "master")}
    return {
        "schedule": name,
        "workers": workers,
        "used": round(result.rollout_utilization, 3),
        "iteration_s": significant(result.iteration_seconds),
        "over_longest": round(over_longest, 2),
        "staleness": round(result.staleness, 2),
        "stalest": result.max_staleness,
        **fractions,
        "events": result.events,
    }


def main() -> None:
    """Simulate all schedules and sizes; compare with a run."""
    run = None if _RUN.value is None else measure_run(Path(_RUN.value))
    costs = _costs() if run is None else costs_of(run)
    for name in _SCHEDULES.value:
        _make_plan(name, 1)  # which raises for what is none, before anything is simulated
    sizes = [int(size) for size in _WORKERS.value if size.isascii() and size.isdigit() and int(size)]
    if len(sizes) < len(_WORKERS.value):
        raise BadInput(f"--workers={','.join(_WORKERS.value)}: give whole numbers above 0")
    rows = []
    for name, workers in with_progress("simulate", list(product(_SCHEDULES.value, sizes))):
        plan = _make_plan(name, workers * _PER_WORKER.value)
        judges = max(workers // 8, 1)
        result = simulate(plan, costs, workers=workers, capacity=_ROOM.value, judges=judges, seed=_SEED.value)
        rows.append(_row(name, workers, result))
    show_lines(rows)
    compared = None
    if run is not None:
        result = simulate(
            run.plan, costs, workers=run.workers, capacity=run.capacity, judges=run.judges, seed=_SEED.value
        )
        measured, simulated = run.iteration_seconds, result.iteration_seconds
        compared = {"measured_s": significant(measured), "simulated_s": significant(simulated)}
        compared["over_measured"] = round(simulated / measured, 3)
        print(f"\nan iteration of {_RUN.value}: {compared}")
    print(json.dumps({"simulation": rows, "run": compared}))


if __name__ == "__main__":
    app.run(main)
