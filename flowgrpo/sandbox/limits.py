"""Limits, outcome and isolation of a run: the values that the sandbox takes and gives."""

from dataclasses import dataclass, fields
from typing import NamedTuple

from flowgrpo.types import check_range


@dataclass(frozen=True)
class Limits:
    """Resources that one run may use. Memory is beyond what a bare interpreter takes, and counts for each process of a
    run; for all of them together where `Isolation.memory` says so."""

    seconds: float = 5.0  # wall clock; each process may also use that much CPU, and a second or two more
    memory: int = 512 << 20
    processes: int = 32  # threads count, too
    file_bytes: int = 16 << 20  # in the scratch folder altogether, beside the files it was given; and in each file
    output_bytes: int = 64 << 10  # of stdout and stderr together

    def __post_init__(self):
        for item in fields(self):
            check_range("Limits", item.name, getattr(self, item.name), 0.0, exclusive=True)


class Ran(NamedTuple):
    """How a program ended, and what it wrote. `code` is negative where a signal ended it, None where we did.

    A program with which its whole worker went down has ended by signal 9.
    """

    ended: str  # "exited", "timeout", "memory", "output" or "signal"
    code: int | None
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class Isolation:
    """Measures that keep a program from the host; `str` describes them in words."""

    active: bool  # everything that `str` lists; else nothing but deadlines and the limits of a process
    user: str = ""  # whose rights a program has outside, which is none inside
    memory: str = ""  # what bounds the memory of all processes of a run together; "" where only each is bounded
    reason: str = ""  # why nothing is active

    def __str__(self) -> str:
        if not self.active:
            return f"no isolation: {self.reason}"
        bound = f"for a run as a whole by {self.memory}" if self.memory else "for each process, but not for their sum"
        return (
            "isolated by namespaces (user, mount, pid, network, ipc, uts), a private read-only root with the "
            f"interpreter alone, {self.user} without capabilities, and a system call filter; memory is bounded {bound}"
        )


class SandboxFailure(RuntimeError):
    """The sandbox itself failed, through no fault of what it ran: no verdict follows from it (F5).

    A worker that is lost with a run is none as long as an empty program comes through a new one.
    """


class CallFailed(Exception):
    """A called function raised, or its process died: `(name of the type, message)`."""

    def __init__(self, kind: str, message: str):
        super().__init__(kind, message)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"
