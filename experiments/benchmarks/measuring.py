"""Parts that benchmarks share: list flags, child processes, timing in turn, memory of a process."""

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
LAST_LINES = 20  # of a command's standard error, with its error message


def whole_numbers(flag: flags.FlagHolder) -> list[int]:
    """Values of a list flag as positive integers."""
    if not flag.value or not all(value.isdecimal() and int(value) > 0 for value in flag.value):
        raise BadInput(f"--{flag.name}={','.join(flag.value)} must be a comma-separated list of positive integers")
    return [int(value) for value in flag.value]


def check_known(flag: flags.FlagHolder, known: Collection[str]) -> None:
    """Raise `BadInput` if a list flag has an unknown value."""
    for value in flag.value:
        if value not in known:
            raise BadInput(f"--{flag.name}={','.join(flag.value)} has {value!r}; choose from {', '.join(known)}")


def in_new_process(function: Callable, *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Result of a function in a new process, with this process's environment or only `environment`."""
    settings: dict[str, Any] = {} if environment is None else {"initializer": _enter, "initargs": (dict(environment),)}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), **settings) as pool:
        return pool.submit(function, *arguments).result()


def _enter(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


class ProcessResult(NamedTuple):
    """How a command ended."""

    status: int
    errors: str  # the last lines of its standard error
    gib: float  # peak memory; on Linux at least that of this process when it started the command


def run_watched(command: list[str]) -> ProcessResult:
    """Run a command and show its progress; an exception here terminates it."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                sys.stderr.write(line)
                last.append(line)
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()  # a run then saves a checkpoint
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
    return ProcessResult(process.returncode, "".join(last), used.ru_maxrss / 2**20)


def medians_in_turn(
    functions: Mapping[str, Callable[[], Any]], repeats: int, *, warm: bool = False
) -> dict[str, float]:
    """Median seconds of functions that run in turn, after a round that compiles their programs.

    With `warm`, each function runs twice in its turn and the second run counts: the first gets its memory from the
    system, which can take longer than the function itself.
    """

    def clock(function: Callable[[], Any]) -> float:
        if warm:
            seconds(function)
        return seconds(function)

    return medians({name: clock(function) for name, function in functions.items()} for _ in range(1 + repeats))


def print_result(benchmark: str, **figures: Any) -> None:
    """Print the JSON line that ends a benchmark."""
    print(json.dumps({"benchmark": benchmark, **figures}))


def check_installed(flag: str, *packages: str) -> None:
    """Raise `BadInput` if packages that a flag needs are not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise BadInput(f"{flag} needs {' and '.join(missing)}: python -m pip install '.[oracle]', or leave it out")


def set_passive_threads() -> None:
    """Stop PyTorch's threads from spinning while they wait, which makes it ten times slower on shared cores.

    Must be called before PyTorch is imported, which loading a model may do.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def check_memory_readable() -> None:
    """Raise `BadInput` if the kernel doesn't report the memory of a process."""
    if not (STATUS.exists() and CLEAR.exists()):
        raise BadInput(f"{STATUS} or {CLEAR} is missing, which report memory: run it on Linux")


def reset_peak_memory() -> None:
    """Reset the peak memory of this process to its current memory."""
    CLEAR.write_text("5")


def resident_bytes(field: str) -> int:
    """Resident bytes of this process: VmRSS now, VmHWM at its peak.

    `ru_maxrss` would include the memory of the parent when it started this process.
    """
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])
