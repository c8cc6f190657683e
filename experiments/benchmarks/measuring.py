"""Parts that benchmarks share beside their tables: list flags, peers to compare with, memory of a process."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from flowgrpo.report.tables import medians, seconds
from flowgrpo.types import BadInput

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
LAST_LINES = 20  # of what a command said before it failed: its error is among them


def whole_numbers(flag: flags.FlagHolder) -> list[int]:
    """Read a list flag as positive integers."""
    if not flag.value or not all(value.isdecimal() and int(value) > 0 for value in flag.value):
        raise BadInput(f"--{flag.name}={','.join(flag.value)} must be a comma-separated list of positive integers")
    return [int(value) for value in flag.value]


def check_known(flag: flags.FlagHolder, known: Collection[str]) -> None:
    """Refuse a list flag that has a value which is not among those known."""
    for value in flag.value:
        if value not in known:
            raise BadInput(f"--{flag.name}={','.join(flag.value)} has {value!r}; choose from {', '.join(known)}")


def apart(function: Callable, *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """The result of a function in a new process, with this one's variables or those of `environment` alone."""
    settings: dict[str, Any] = {} if environment is None else {"initializer": _enter, "initargs": (dict(environment),)}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), **settings) as pool:
        return pool.submit(function, *arguments).result()


def _enter(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    errors: str  # the last lines of its standard error
    gib: float  # that it held at most; Linux gives no less than this process held when it started it


def watch(command: list[str]) -> Ended:
    """Run a command and show what it says of its progress; what ends this process ends it, too."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                sys.stderr.write(line)
                last.append(line)
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()  # a run is saved, then
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(process.returncode, "".join(last), used.ru_maxrss / 2**20)


def medians_in_turn(works: Mapping[str, Callable[[], Any]], repeats: int, *, warm: bool = False) -> dict[str, float]:
    """Median seconds of works that run in turn, after a round in which programs are compiled.

    A `warm` work is run twice in its turn and the second counts: the first has its memory given anew by the system,
    which takes longer than many works do.
    """

    def clock(work: Callable[[], Any]) -> float:
        if warm:
            seconds(work)
        return seconds(work)

    return medians({name: clock(work) for name, work in works.items()} for _ in range(1 + repeats))


def print_result(benchmark: str, **figures: Any) -> None:
    """Print the JSON line that ends a benchmark."""
    print(json.dumps({"benchmark": benchmark, **figures}))


def check_installed(flag: str, *packages: str) -> None:
    """Refuse a flag whose comparison needs packages that are not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise BadInput(f"{flag} needs {' and '.join(missing)}: python -m pip install '.[oracle]', or leave it out")


def let_threads_sleep() -> None:
    """Keep PyTorch's threads from spinning while they wait, which on shared cores makes it ten times slower.

    It must be called before anything imports PyTorch, as opening a model may.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def check_memory_is_told() -> None:
    """Refuse a system whose kernel doesn't say how much memory a process holds."""
    if not (STATUS.exists() and CLEAR.exists()):
        raise BadInput(f"{STATUS} or {CLEAR} is missing, which tell memory: run it on Linux")


def forget_peak() -> None:
    """Let the most memory that this process held be what it holds now."""
    CLEAR.write_text("5")


def resident(field: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most.

    `ru_maxrss` would count what the parent held when it started this process, too.
    """
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])
