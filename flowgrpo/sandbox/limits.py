"""Limits, result and isolation of a run: the values that the sandbox takes and returns."""

from dataclasses import dataclass, fields
from typing import NamedTuple

from flowgrpo.types import check_range


@dataclass(frozen=True)
class Limits:
    """Resources that one run may use. Memory comes on top of what a bare interpreter uses, and is bounded for each
    process of a run, or for all of them together if `Isolation.memory` says so."""

    seconds: float = 5.0  # wall clock; each process may also use that much CPU, and a second or two more
    memory: int = 512 << 20
    processes: int = 32  # threads count, too
    file_bytes: int = 16 << 20  # of each file, and of the scratch folder besides the files it was given
    output_bytes: int = 64 << 10  # of stdout and stderr together

    def __post_init__(self):
        for item in fields(self):
            check_range("Limits", item.name, getattr(self, item.name), 0.0, exclusive=True)


class RunResult(NamedTuple):
    """How a program ended, and what it wrote. `code` is negative if a signal ended it, and None if the sandbox did.

    A program whose whole worker went down with it has ended by signal 9.
    """

    ending: str  # "exited", "timeout", "memory", "output" or "signal"
    code: int | None
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class Isolation:
    """Measures that separate a program from the host; `str` describes them."""

    active: bool  # whether everything that `str` lists holds; else only deadlines and the limits of a process do
    user: str = ""  # whose rights a program has outside; inside it has none
    memory: str = ""  # what bounds the memory of all processes of a run together; "" if only each is bounded
    reason: str = ""  # why the isolation is not active

    def __str__(self) -> str:
        if not self.active:
            return f"no isolation: {self.reason}"
        bound = f"for a run as a whole by {self.memory}" if self.memory else "for each process, but not for their sum"
        return (
            "isolated by namespaces (user, mount, pid, network, ipc, uts), a private read-only root with the "
            f"interpreter alone, {self.user} without capabilities, and a system call filter; memory is bounded {bound}"
        )


class SandboxFailure(RuntimeError):
    """The sandbox itself failed, through no fault of what it ran: no reward follows from it (F5).

    A worker that is lost with a run is no such failure as long as a new worker can run an empty program.
    """


class CallFailed(Exception):
    """A called function raised, or its process died: `(name of the type, message)`."""

    def __init__(self, kind: str, message: str):
        super().__init__(kind, message)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"
