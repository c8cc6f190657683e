"""Cost of a cluster where it gains nothing: one worker of each kind against a single process, on the same cores.

    python -m experiments.benchmarks.cluster
    python -m experiments.benchmarks.cluster --queries=4 --samples=4 --updates=3 --repeats=1

Both make the same updates, one after the other, and must come to the same parameters. An iteration is from update to
update, without the first, which compiles; `over_single` is the cluster's median over that of the single process. The
cluster's own share is what its processes tell each other: trajectories to the trainer, weights back.

Measured on two cores, with --queries=32 --samples=32: 22.7 and 25.4 s an iteration, 1.12; the defaults are a quarter of
that, and were measured beside other work only.
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
_REPEATS = flags.DEFINE_integer("repeats", 1, "Runs of each, which alternate.", lower_bound=1)
_WARM = flags.DEFINE_integer("warm_steps", 250, "Steps of the warm start.", lower_bound=1)
_DEMONSTRATIONS = flags.DEFINE_integer("demonstrations", 600, "That it is made from.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 32, "Slots of the engine.", lower_bound=2)

app.read_flags(__name__)

from flowgrpo.distributed.event_log import read_events
from flowgrpo.recipes.cluster import iterations
from flowgrpo.report.metrics import TIMINGS, read_metrics
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines
from flowgrpo.run.kill_series import result_of
from flowgrpo.types import BadInput

from .measuring import print_result

KINDS = {
    "single": ("agentflow",),
    "cluster": ("cluster", "--rollout_workers=1", "--reward_workers=any=1", "--trainer_workers=1"),
}


def _run(kind: str, folder: Path, cache: Path) -> list[float]:
    """One run -> the seconds of its iterations."""
    name, *shape = KINDS[kind]
    sizes = [f"--{one.name}={one.value}" for one in (_QUERIES, _SAMPLES, _SLOTS, _UPDATES, _WARM, _DEMONSTRATIONS)]
    where = [f"--workdir={folder}", f"--compilation_cache={cache}"]
    command = [sys.executable, "-m", "flowgrpo", name, *shape, *sizes, *where, "--test_tasks=8"]
    command += [f"--checkpoint_every={_UPDATES.value}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BadInput(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1000:]}")
    if kind == "cluster":
        return iterations(list(read_events(folder / "events.jsonl")))
    return [line["seconds"] for line in read_metrics(folder / TIMINGS) if line["phase"] == "train"][1:]


def main() -> None:
    """Run both, and compare."""
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    shas = set()
    with tempfile.TemporaryDirectory() as scratch:
        for repeat, kind in with_progress("run", list(product(range(_REPEATS.value), KINDS))):
            folder = Path(scratch) / f"{kind}-{repeat}"
            took[kind] += _run(kind, folder, Path(scratch) / "compiled")
            shas.add(result_of(folder)["params_sha256"])
    if len(shas) != 1:
        raise AssertionError(f"the runs came to different parameters: {sorted(shas)}")
    median = {kind: statistics.median(found) for kind, found in took.items()}
    rows = [
        {"process": kind, "iterations": len(found), "median_s": round(median[kind], 2), "most_s": round(max(found), 2)}
        for kind, found in took.items()
    ]
    show_lines(rows)
    over = round(median["cluster"] / median["single"], 3)
    print_result("cluster", over_single=over, rows=rows)


if __name__ == "__main__":
    app.run(main, exact=True)
