"""A racer's side of the race: lines on its standard input ask for steps, and each is answered with a line of JSON.

    step  ->  {"seconds": 1.23, "tokens": 4096}
    end   ->  {"peak_mib": 1234}                   and the process ends

Between two lines the process sleeps. Only answers are on its standard output: what libraries print goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Never

STEP, END = "step", "end"


class RacerJob(NamedTuple):
    """The job of a racer, as JSON in its only argument."""

    case: str  # one of `workload.CASES`
    shape: dict[str, Any]  # of the model: a config.json of transformers
    cores: int  # for the threads of the peers
    devices: int  # of ours
    folder: str  # that may be written to, and is removed after the race
    model: str = ""  # folder or file of real weights; without one, random weights of `shape`
    exact: bool = False  # ours: the bits of a row depend on no other row
    sizes: Mapping[str, int] = MappingProxyType({})  # of the work on real weights, `real_workload.Sizes`


class Lane:
    """The pipes to the parent, and the clock."""

    def __init__(self):
        self._lines = os.fdopen(os.dup(0))
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        self._start = 0.0

    def wait(self) -> None:
        """Sleep until a step is requested, and start the clock; end the process if the race is over."""
        line = self._lines.readline().strip()
        if line != STEP:
            self._leave(line)
        self._start = time.perf_counter()

    def done(self, tokens: int, **figures: float) -> None:
        """Stop the clock, and answer with the seconds and tokens of this step, and figures of its parts."""
        self._answer({"seconds": time.perf_counter() - self._start, "tokens": tokens, **figures})

    def _answer(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self._answers, flush=True)

    def _leave(self, line: str) -> Never:
        """Exit at once, in whatever loop of whatever library; without a line the parent is gone."""
        if line == END:
            self._answer({"peak_mib": round(peak_bytes() / 2**20)})
        sys.stderr.flush()
        os._exit(0)


def racer_command(python: str, module: str, job: RacerJob) -> list[str]:
    """Command that runs a module of this package with a job, which its `open_lane` reads."""
    return [python, "-m", f"{__package__}.{module}", json.dumps(job._asdict(), default=dict)]


def open_lane() -> tuple[Lane, RacerJob]:
    """Open the lane before any library can print, and read the job."""
    return Lane(), RacerJob(**json.loads(sys.argv[1]))


def peak_bytes() -> int:
    """Sum of the peak memory of this process and its children, each at its own time; 0 if unknown."""
    total, waiting, children = 0, [os.getpid()], _children()
    while waiting:
        process = waiting.pop()
        total += _high_water(process)
        waiting += children.get(process, [])
    return total


def _children() -> dict[int, list[int]]:
    """Children of each process of this machine."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])  # a name may have spaces
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    return children


def _high_water(process: int) -> int:
    """VmHWM of a process, in bytes."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
