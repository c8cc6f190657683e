"""Overhead of a cluster: one worker of each kind against a single process, on the same cores.

    python -m experiments.benchmarks.cluster
    python -m experiments.benchmarks.cluster --queries=4 --samples=4 --updates=3 --repeats=1

Both make the same updates in sequence, and must end with the same parameters. An iteration lasts from update to update,
without the first, which compiles; `over_single` is the cluster's median over that of the single process. The overhead
is the communication of its processes: trajectories to the trainer, weights back.

Measured on two cores, with --queries=32 --samples=32: 22.7 and 25.4 s per iteration, 1.12; the defaults are a quarter
of that, and were measured on a busy machine only.
"""

import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Sizes")
_QUERIES = flags.DEFINE_integer("queries", 16, "Queries of an update.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 16, "Trajectories of a query.", lower_bound=2)
_UPDATES = flags.DEFINE_integer("updates", 6, "Updates of each run; the first one compiles.", lower_bound=3)
_REPEATS = flags.DEFINE_integer("repeats", 1, "Runs of each kind, alternating.", lower_bound=1)
_WARM = flags.DEFINE_integer("warm_steps", 250, "Steps of the warm start.", lower_bound=1)
_DEMONSTRATIONS = flags.DEFINE_integer("demonstrations", 600, "Demonstrations of the warm start.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 32, "Slots of the engine.", lower_bound=2)

app.read_flags(__name__)

from flowgrpo.distributed.event_log import read_events
from flowgrpo.recipes.cluster import update_intervals
from flowgrpo.report.metrics import TIMINGS, read_metrics
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines
from flowgrpo.training.kill_series import result_of
from flowgrpo.types import BadInput

from .measuring import print_result

KINDS = {
    "single": ("agentflow",),
    "cluster": ("cluster", "--rollout_workers=1", "--reward_workers=any=1", "--trainer_workers=1"),
}


def _run(kind: str, folder: Path, cache: Path) -> list[float]:
    """Seconds of the iterations of one run."""
    name, *shape = KINDS[kind]
    sizes = [f"--{flag.name}={flag.value}" for flag in (_QUERIES, _SAMPLES, _SLOTS, _UPDATES, _WARM, _DEMONSTRATIONS)]
    paths = [f"--workdir={folder}", f"--compilation_cache={cache}"]
    command = [sys.executable, "-m", "flowgrpo", name, *shape, *sizes, *paths, "--test_tasks=8"]
    command += [f"--checkpoint_every={_UPDATES.value}"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BadInput(f"{' '.join(command)} ended with {result.returncode}: {result.stderr[-1000:]}")
    if kind == "cluster":
        return update_intervals(list(read_events(folder / "events.jsonl")))
    return [line["seconds"] for line in read_metrics(folder / TIMINGS) if line["phase"] == "train"][1:]


def main() -> None:
    """Run both kinds, print the table and one JSON line."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    hashes = set()
    with tempfile.TemporaryDirectory() as scratch:
        for repeat, kind in with_progress("run", list(product(range(_REPEATS.value), KINDS))):
            folder = Path(scratch) / f"{kind}-{repeat}"
            seconds[kind] += _run(kind, folder, Path(scratch) / "compiled")
            hashes.add(result_of(folder)["params_sha256"])
    if len(hashes) != 1:
        raise AssertionError(f"the runs ended with different parameters: {sorted(hashes)}")
    median = {kind: statistics.median(durations) for kind, durations in seconds.items()}
    rows = [
        {
            "process": kind,
            "iterations": len(durations),
            "median_s": round(median[kind], 2),
            "most_s": round(max(durations), 2),
        }
        for kind, durations in seconds.items()
    ]
    show_lines(rows)
    ratio = round(median["cluster"] / median["single"], 3)
    print_result("cluster", over_single=ratio, rows=rows)


if __name__ == "__main__":
    app.run(main, exact=True)
