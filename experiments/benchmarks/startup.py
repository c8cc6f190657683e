"""Startup times: imports, `--help`, and the first update of the quickstart with its compilation.

    python -m experiments.benchmarks.startup
    python -m experiments.benchmarks.startup --cold=3 --warm=5

Each figure is of a new process, from its start: `import jax` and `import flowgrpo`, alone and with the modules of a
run; the help of a command; and the quickstart to its first update, after 400 steps of imitation. Cold: with an empty
compilation cache; warm: after the same command ran once. Medians and ranges. `compilation` lists the programs that take
longest to compile, as JAX logs it; most are compiled concurrently with the imitation, and add less.

Measured on two cores with AVX-512: `import flowgrpo` 0.02 s, `import jax` 0.48 s, a run's modules 1.3 s in all, help
0.2 s, since flags are read before anything else is imported; the first update after 31 s cold and 17 s warm, of which
imitation takes 10. Three minutes.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Sizes")
_IMPORTS = flags.DEFINE_integer("imports", 5, "Processes that import or print help, of each kind.", lower_bound=1)
_COLD = flags.DEFINE_integer("cold", 3, "Quickstarts with an empty compilation cache.", lower_bound=1)
_WARM = flags.DEFINE_integer("warm", 3, "Quickstarts with a filled compilation cache.", lower_bound=1)
_SHOWN = flags.DEFINE_integer("shown", 10, "Programs in the table of compilation.", lower_bound=0)

app.read_flags(__name__)

from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, significant
from flowgrpo.types import BadInput

from . import measuring

PYTHON = [sys.executable, "-c"]
IMPORTS = {
    "import jax": [*PYTHON, "import jax"],
    "import flowgrpo": [*PYTHON, "import flowgrpo"],
    "import flowgrpo, and a run's parts": [
        *PYTHON,
        "import flowgrpo as fg; fg.recipes.pure.preset; fg.launch.num_cores",
    ],
    "quickstart --help": [sys.executable, "-m", "experiments.quickstart", "--help"],
}
QUICKSTART = [sys.executable, "-m", "experiments.quickstart", "--updates=1"]
REACHED = "train 1/1"
COMPILED = re.compile(r"Finished XLA compilation of (\S+) in ([0-9.e+-]+) sec")


class FirstUpdate(NamedTuple):
    """A quickstart up to its first update."""

    seconds: float
    compiled: list[tuple[str, float]]  # programs and the seconds of their compilation


def _process_seconds(command: Sequence[str]) -> float:
    """Seconds of a process from start to end."""
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BadInput(f"{' '.join(command)} ended with {result.returncode}: {result.stderr[-500:]}")
    return time.perf_counter() - start


def _first_update(cache: Path) -> FirstUpdate:
    """Run the quickstart to the end, and record when it reports its first update."""
    compiled, seconds = [], None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        command = [*QUICKSTART, f"--workdir={folder}/run", f"--compilation_cache={cache}"]
        start = time.perf_counter()
        logs = os.environ | {"JAX_LOG_COMPILES": "1"}
        with subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, env=logs) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if seconds is None and REACHED in line:
                    seconds = time.perf_counter() - start
                compiled += [(name, float(duration)) for name, duration in COMPILED.findall(line)]
    if process.returncode or seconds is None:
        raise BadInput(f"{' '.join(command)} ended with {process.returncode} before its first update")
    return FirstUpdate(seconds, compiled)


def _record(name: str, measure: Callable[[], float], times: int) -> dict[str, float | str]:
    """Row of the table: median and range of `times` measurements."""
    durations = [measure() for _ in range(times)]
    median, lowest, highest = statistics.median(durations), min(durations), max(durations)
    return {"what": name, "seconds": significant(median), "least": significant(lowest), "most": significant(highest)}


def main() -> None:
    """Measure, print the tables and one JSON line."""
    rows = [
        _record(name, lambda command=command: _process_seconds(command), _IMPORTS.value)
        for name, command in with_progress("start", list(IMPORTS.items()))
    ]
    runs: list[FirstUpdate] = []

    def reach(cache: Path) -> float:
        runs.append(_first_update(cache))
        return runs[-1].seconds

    with tempfile.TemporaryDirectory() as base:
        folders = iter(range(_COLD.value))
        rows.append(_record("first update, cold", lambda: reach(Path(base, str(next(folders)))), _COLD.value))
        rows.append(_record("first update, warm", lambda: reach(Path(base, "0")), _WARM.value))
    show_lines(rows)
    longest = sorted(runs[0].compiled, key=lambda pair: -pair[1])[: _SHOWN.value]
    programs = [{"program": name, "compilation": significant(duration)} for name, duration in longest]
    show_lines(programs)
    measuring.print_result("startup", start=rows, compilation=programs, programs=len(runs[0].compiled))


if __name__ == "__main__":
    app.run(main)
