"""Reports of workers that are asked for their state: current work, and how busy the processor and the GPUs are."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

PATIENCE = 5.0  # seconds that the driver's own tool may take
FRESH = 10.0  # seconds in which it is asked once, since each time a process is started


class Pulse(NamedTuple):
    """How a worker is."""

    words: tuple[str, ...]  # what it is at, the longest first
    cpu: float  # seconds of processor time so far
    gpu: float | None  # share of the time in which its GPUs were busy; None where it was given none, or nobody can say


def take_pulse(words: Sequence[str] = ()) -> Pulse:
    """That of this process."""
    share = _recent_share(os.environ.get("CUDA_VISIBLE_DEVICES", ""), time.monotonic() // FRESH)
    return Pulse(tuple(words), time.process_time(), share)


@lru_cache(maxsize=1)
def _recent_share(devices: str, _period: float) -> float | None:
    """Measure `gpu_share` once in a period of `FRESH` seconds; later calls in it get the cached value."""
    return gpu_share(devices)


def gpu_share(devices: str) -> float | None:
    """How busy these GPUs are, in the mean, as NVIDIA's driver says."""
    tool = shutil.which("nvidia-smi")
    if not devices or tool is None:
        return None
    command = [tool, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--id={devices}"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout.split()
        return sum(map(float, said)) / len(said) / 100
    except (OSError, subprocess.SubprocessError, ValueError, ZeroDivisionError):
        return None  # "[N/A]", and drivers that are not there: a figure for people, which may be missing
