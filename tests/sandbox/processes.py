"""Helpers that read the processes below a worker, and their states, from `/proc`."""

import time
from pathlib import Path


def stat(pid):
    """State and parent of a process; ("gone", 0) if it does not exist."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "gone", 0
    return state, int(parent)


def family(pid):
    """States of the processes below `pid`."""
    processes = {int(entry.name): stat(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    below = {pid}
    while more := {child for child, (_, parent) in processes.items() if parent in below} - below:
        below |= more
    return {child: processes[child][0] for child in below - {pid}}


def zygote(pid):
    """The zygote: the child of the process that was started."""
    (serving,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(serving)


def ended(pid):
    """Whether a process is gone, or waits to be reaped."""
    return stat(pid)[0] in ("gone", "Z")


def wait_until(condition, seconds=60.0):
    """Wait until a condition holds, which may take a while on a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.005)
