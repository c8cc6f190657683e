"""A control group that bounds the memory of a worker and everything below it, if this process may make one.

Version 1 and 2 of the interface. A worker joins before it gives up its rights; the pool changes the limit before a run
with other limits, and removes the group when the worker has ended.
"""

import contextlib
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

_numbers = itertools.count()


@dataclass(frozen=True)
class ControlGroup:
    """A folder of the control group file system, and the names of its files."""

    path: Path
    version: int

    def set_limit(self, size: int) -> None:
        """Bound the memory; none of it can be swapped out (`forbid_swap`)."""
        (self.path / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")).write_text(str(size))

    def forbid_swap(self) -> None:
        """Keep the group out of swap, which its limit doesn't count, so that a program could grow there."""
        name = "memory.swap.max" if self.version == 2 else "memory.swappiness"
        if (self.path / name).exists():  # else the kernel has no swap
            (self.path / name).write_text("0")

    def used(self) -> int:
        return int((self.path / ("memory.current" if self.version == 2 else "memory.usage_in_bytes")).read_text())

    def kills(self) -> int:
        """Number of processes of this group that the kernel killed because its memory ran out."""
        text = (self.path / ("memory.events" if self.version == 2 else "memory.oom_control")).read_text()
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))

    def remove(self) -> None:
        """Remove the group; if one of its processes takes long to end, the next sandbox does it."""
        for _ in range(20):
            with contextlib.suppress(OSError):
                self.path.rmdir()
                break
            time.sleep(0.005)


def make_control_group() -> ControlGroup | None:
    """A new group below the one of this process, or None if that is not allowed."""
    for version, parent in _parents():
        _sweep(parent)
        path = parent / f"flowgrpo-{os.getpid()}-{next(_numbers)}"
        group = ControlGroup(path, version)
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            group.set_limit(1 << 40)
            group.forbid_swap()
            group.kills()
            return group
        except (OSError, ValueError):
            group.remove()
    return None


def _sweep(parent: Path) -> None:
    """Remove groups that killed processes have left. The kernel refuses to remove a group that is in use."""
    for path in parent.glob("flowgrpo-*-*"):
        owner = path.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                path.rmdir()


def _parents() -> list[tuple[int, Path]]:
    """Control groups of this process in hierarchies that count memory, as (version, folder)."""
    groups = []
    with contextlib.suppress(OSError):  # no /proc: not Linux
        memberships = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        for _, controllers, path in memberships:
            for _, folder, kind, options, *_ in mounts:
                if kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                    groups.append((1, Path(folder + path)))
                if kind == "cgroup2" and not controllers:
                    groups.append((2, Path(folder + path)))
    return groups
