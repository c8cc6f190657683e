"""Simulate a schedule on 1 to 10,000 workers, in virtual time, through the very functions that a master runs.

    python -m experiments.simulate
    python -m experiments.simulate --workers=10,100 --schedules=sync,partial --sigma=1.2
    python -m experiments.simulate --run=runs/cluster-0          (lengths and seconds as a run of yours measured them)

An update learns from as many groups as there is room (`--groups_per_worker` of each worker), so that the work of a
worker is the same at every size. Trajectories are lognormal in their number of tokens, unless a run says otherwise. The
table has, by schedule and size: the share of the workers' time that was used, seconds of an iteration over those of its
longest trajectory, how stale groups were, the share of tokens that partial rollouts carried over, and how busy the
master was. With --run, the same plan on the run's own workers is simulated too, and compared with the clock.
"""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from absl import flags

from .cli import app
from .cli.help import flag_heading

flag_heading("What is run")
_SCHEDULES = flags.DEFINE_list("schedules", ["sync", "one_step_off", "async", "partial"], "Which ones.")
_WORKERS = flags.DEFINE_list("workers", ["1", "10", "100", "1000"], "Numbers of rollout workers.")
_RUN = flags.DEFINE_string("run", None, "Work directory of a cluster's run whose lengths and seconds are taken.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the lengths.")
flag_heading("Sizes")
_PER_WORKER = flags.DEFINE_integer("groups_per_worker", 1, "Groups of an update for each worker.", lower_bound=1)
_ROOM = flags.DEFINE_integer("room", 1, "Groups that a worker plays at a time.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Trajectories of a group.", lower_bound=1)
_UPDATES = flags.DEFINE_integer("updates", 12, "Updates of a run.", lower_bound=2)
_STALENESS = flags.DEFINE_integer("staleness", 2, "Of async; twice as much for partial.", lower_bound=0)
_MEDIAN = flags.DEFINE_float("median_tokens", 1000.0, "Of a trajectory.", lower_bound=1.0)
_SIGMA = flags.DEFINE_float("sigma", 1.0, "Of the lognormal lengths.", lower_bound=0.0)
_BUDGET = flags.DEFINE_float("budget", 2.0, "Of a stretch, in median lengths, for partial.", lower_bound=0.1)
flag_heading("Costs")
_TOKEN = flags.DEFINE_float("token_seconds", 0.02, "Of a token of a trajectory.", lower_bound=0.0)
_TRAIN = flags.DEFINE_float("train_seconds", 20.0, "Of an update.", lower_bound=0.0)
_JUDGE = flags.DEFINE_float("judge_seconds", 2.0, "Of a group, in the mean.", lower_bound=0.0)
_MASTER = flags.DEFINE_float("master_seconds", 0.0005, "Of an event, in the master.", lower_bound=0.0)

app.read_flags(__name__)

import numpy as np

from flowgrpo.distributed import schedule
from flowgrpo.distributed.simulation import Costs, Figures, simulate
from flowgrpo.recipes.cluster import costs_of, measured_run
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, significant
from flowgrpo.types import BadInput


def _plan_called(name: str, queries: int) -> schedule.Plan:
    """The schedule of that name."""
    updates, staleness = _UPDATES.value, _STALENESS.value
    if name == "partial":
        budget = max(int(_BUDGET.value * _MEDIAN.value), 1)
        return schedule.partial_rollouts(queries, updates, budget=budget, staleness=2 * staleness, spare=queries)
    makes = {
        "sync": schedule.synchronous,
        "one_step_off": schedule.one_step_off,
        "async": partial(schedule.asynchronous, staleness=staleness),
    }
    if name not in makes:
        raise BadInput(f"--schedules: {name!r} is none of {', '.join([*makes, 'partial'])}")
    return makes[name](queries, updates)


def _costs() -> Costs:
    """Make the costs of a simulation from the flags."""

    def lengths(random: np.random.Generator) -> np.ndarray:
        return np.maximum(random.lognormal(np.log(_MEDIAN.value), _SIGMA.value, _SAMPLES.value), 1).astype(int)

    return Costs(
        lengths=lengths,
        token_seconds=_TOKEN.value,
        judge_seconds=lambda random: float(random.exponential(_JUDGE.value)),
        train_seconds=_TRAIN.value,
        master_seconds=_MASTER.value,
    )


def _row(name: str, workers: int, found: Figures) -> dict[str, Any]:
    """A line of the table."""
    over = found.iteration_seconds / found.longest_seconds if found.longest_seconds else float("nan")
    shares = {name: round(getattr(found, name), 3) for name in ("training", "reused", "master")}
    return {
        "schedule": name,
        "workers": workers,
        "used": round(found.utilisation, 3),
        "iteration_s": significant(found.iteration_seconds),
        "over_longest": round(over, 2),
        "staleness": round(found.staleness, 2),
        "stalest": found.stalest,
        **shares,
        "events": found.events,
    }


def main() -> None:
    """Simulate, and compare."""
    run = None if _RUN.value is None else measured_run(Path(_RUN.value))
    given = _costs() if run is None else costs_of(run)
    for name in _SCHEDULES.value:
        _plan_called(name, 1)  # which raises for what is none, before anything is simulated
    sizes = [int(size) for size in _WORKERS.value if size.isascii() and size.isdigit() and int(size)]
    if len(sizes) < len(_WORKERS.value):
        raise BadInput(f"--workers={','.join(_WORKERS.value)}: give whole numbers above 0")
    rows = []
    for name, workers in with_progress("simulate", list(product(_SCHEDULES.value, sizes))):
        plan = _plan_called(name, workers * _PER_WORKER.value)
        judges = max(workers // 8, 1)
        found = simulate(plan, given, workers=workers, room=_ROOM.value, judges=judges, seed=_SEED.value)
        rows.append(_row(name, workers, found))
    show_lines(rows)
    compared = None
    if run is not None:
        found = simulate(run.plan, given, workers=run.workers, room=run.room, judges=run.judges, seed=_SEED.value)
        measured, simulated = run.iteration_seconds, found.iteration_seconds
        compared = {"measured_s": significant(measured), "simulated_s": significant(simulated)}
        compared["over_measured"] = round(simulated / measured, 3)
        print(f"\nan iteration of {_RUN.value}: {compared}")
    print(json.dumps({"simulation": rows, "run": compared}))


if __name__ == "__main__":
    app.run(main)
