"""What `/proc` says of the processes below a worker."""

import time
from pathlib import Path


def family(pid):
    """The processes below `pid`, as pid: (parent, state)."""
    every = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it ended in the meantime
            every[int(entry.name)] = (int(parent), state)
    below = {pid}
    while more := {own for own, (parent, _) in every.items() if parent in below} - below:
        below |= more
    return {own: every[own] for own in below - {pid} if own in every}


def zygote(pid):
    """The process that serves: the child of the one that was started."""
    (serving,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(serving)


def ended(pid):
    """Whether a process is gone, or has nobody yet who buries it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(happened, seconds=60.0):
    """Wait for what is to happen soon, and on a busy machine later."""
    last = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < last, "it never happened"
        time.sleep(0.005)
