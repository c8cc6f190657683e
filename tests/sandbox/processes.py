"""Helpers that read from `/proc` which processes are below a worker, and in which state."""

import time
from pathlib import Path


def stat(pid):
    """State and parent of a process; none of both where it is gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "gone", 0
    return state, int(parent)


def family(pid):
    """The processes below `pid`, and their states."""
    every = {int(entry.name): stat(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    below = {pid}
    while more := {own for own, (_, parent) in every.items() if parent in below} - below:
        below |= more
    return {own: every[own][0] for own in below - {pid}}


def zygote(pid):
    """The process that serves: the child of the one that was started."""
    (serving,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(serving)


def ended(pid):
    """Say whether a process is gone, or has nobody yet who buries it."""
    return stat(pid)[0] in ("gone", "Z")


def wait_until(happened, seconds=60.0):
    """Wait for what is to happen soon, and on a busy machine later."""
    last = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < last, "it never happened"
        time.sleep(0.005)
