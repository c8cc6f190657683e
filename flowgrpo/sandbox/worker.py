"""One zygote as the pool sees it: start it, give it a request, read what comes within bounds, end it."""

import contextlib
import marshal
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo.sandbox import cgroups, channel
from flowgrpo.sandbox.isolation import FIRST_USER, FLAGS
from flowgrpo.sandbox.limits import Limits, SandboxFailure
from flowgrpo.types import BadInput

START_SECONDS = 120.0  # a preloaded module may be a large one
GRACE = 1.0  # seconds past a deadline after which the zygote itself is taken to be stuck, and ended
_OWN_PROCESSES = 3  # of a worker, that the kernel counts with those of a run
_SLACK = 16 << 20  # page tables and other memory of the kernel that a control group counts
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}  # else each thread takes 64 MB and more of the bounded address space

# The zygote finds this package by its folder, without `flowgrpo/__init__.py`, which imports JAX.
_BOOT = """
import sys, types
for name, path in (("flowgrpo", sys.argv[1]), ("flowgrpo.sandbox", sys.argv[1] + "/sandbox")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from flowgrpo.sandbox.zygote import main
main(int(sys.argv[2]))
"""


class RequestEnd(NamedTuple):
    """How a request ended ("ended", "timeout", "output", "lost"), the wait status, what was written, the time.

    It is "lost" where the zygote ended while it carried the request out.
    """

    how: str
    status: int
    outputs: tuple[bytes, bytes]
    seconds: float
    out_of_memory: bool = False


class Worker:
    """A zygote and its channel. One request at a time; `lost` once it can't be used any more."""

    def __init__(self, *, isolate: bool, preload: Sequence[str]):
        self.isolate, self.lost = isolate, False
        self._group = cgroups.make_control_group() if isolate else None
        self._control, other = socket.socketpair()
        try:
            self._process = _spawn(other)
        except OSError as error:
            self._control.close()
            raise SandboxFailure(f"the sandbox can't start {_python()}: {error}") from error
        finally:
            other.close()
        try:
            self._begin(preload)
        except BaseException:
            self.close()
            raise

    @property
    def memory_bound(self) -> str:
        """Control group that bounds the memory of a run as a whole, in words; empty where there is none."""
        return f"a control group (version {self._group.version})" if self._group else ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def own_user(self) -> bool:
        """Say whether the worker is a user that no other worker is."""
        return int(Path(f"/proc/{self.pid}/status").read_text().partition("Uid:")[2].split()[0]) >= FIRST_USER

    def alive(self) -> bool:
        """Say whether the zygote still waits for requests."""
        if self.lost:
            return False
        poll = select.poll()  # unlike select, it knows descriptors of any number
        poll.register(self._control, select.POLLIN)
        return not poll.poll(0)

    def exchange(self, request: Mapping[str, Any], *, limits: Limits, stdin: bytes = b"") -> RequestEnd:
        """Carry out one request; `SandboxFailure` where it can't begin."""
        try:
            return self._exchange(request, limits, stdin)
        except OSError as error:
            raise SandboxFailure(f"the sandbox could not set up a run: {error}") from error

    def _exchange(self, request: Mapping[str, Any], limits: Limits, stdin: bytes) -> RequestEnd:
        kills = self._set_memory(limits)
        with contextlib.ExitStack() as stack:
            if not self.isolate:
                folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
                request = {**request, "scratch": folder}
            streams = stack.enter_context(Streams(limits.output_bytes))
            began = time.monotonic()
            try:
                self._submit(request, stdin, limits, streams)
                reply = self._follow(streams, began + limits.seconds + GRACE)
                struck = self._group is not None and self._group.kills() > kills
            except BaseException:  # an interrupt: what runs must not go on
                self.lost = True
                raise
            finally:
                if self.lost:
                    self.close()
            streams.read()
        if reply["how"] == "failed":
            raise SandboxFailure(f"the sandbox could not set up a run: {reply['text']}")
        how = "output" if streams.flooded and reply["how"] != "lost" else reply["how"]
        seconds = reply.get("seconds", time.monotonic() - began)
        return RequestEnd(how, reply.get("status", 0), streams.texts(), seconds, struck)

    def close(self) -> None:
        """End the zygote and everything below it."""
        self.lost = True
        self._control.close()  # the zygote ends itself at this
        for end in (self._continue, self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
                break
        if self._group:
            self._group.remove()
            self._group = None

    def _continue(self) -> None:
        """Have starter and zygote go on where somebody has stopped them: what is stopped can't end itself."""
        if self._process.poll() is None:  # else the number of the group may be another's
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of an empty group
                os.killpg(self.pid, signal.SIGCONT)

    # Starting -----------------------------------------------------------------------------------------

    def _begin(self, preload: Sequence[str]) -> None:
        """Send the settings, and hear what came of them."""
        path = [os.path.abspath(entry) for entry in sys.path if os.path.isdir(entry or ".")] if preload else []
        settings = {
            "isolate": self.isolate,
            "cgroup": str(self._group.path) if self._group else "",
            "preload": list(preload),
            "path": path,
            "environment": {"PATH": os.path.dirname(_python()), "LANG": "C.UTF-8", **ONE_ARENA},
        }
        self._control.settimeout(START_SECONDS)
        try:
            channel.send(self._control, settings)
            reply, _ = channel.receive(self._control)
        except channel.Closed as error:
            raise SandboxFailure(f"the zygote of the sandbox did not start: {error}") from error
        self._control.settimeout(None)
        if reply.get("module"):
            raise BadInput(
                f"Sandbox: preload {reply['module']!r} can't be imported: {reply['error']}; install or fix it"
            )
        if "error" in reply:
            raise SandboxFailure(reply["error"])
        self._address_space = reply["address_space"]
        self._base = self._group.used() if self._group else 0
        self._memory = 0

    def _set_memory(self, limits: Limits) -> int:
        """Bound the memory of the whole run; return how often that bound has struck so far."""
        if self._group is None:
            return 0
        if self._memory != limits.memory + limits.file_bytes:
            self._memory = limits.memory + limits.file_bytes
            self._group.set_limit(self._base + self._memory + _SLACK)
        return self._group.kills()

    # One request --------------------------------------------------------------------------------------

    def _submit(self, request: Mapping[str, Any], stdin: bytes, limits: Limits, streams: "Streams") -> None:
        """Send the request, with the files that it is to read and write."""
        bounds = {
            "address_space": self._address_space + int(limits.memory) if self._address_space else None,
            "cpu_seconds": math.ceil(limits.seconds) + 1,
            "file_bytes": int(limits.file_bytes),
            "processes": int(limits.processes) + _OWN_PROCESSES if self.isolate else None,
        }
        given = [_sealed(marshal.dumps({**request, **bounds})), _sealed(stdin)]
        try:
            files = [*given, *streams.writers]
            channel.send(self._control, {"do": "run", "seconds": float(limits.seconds)}, files)
        except channel.Closed as error:
            raise SandboxFailure("the worker process of the sandbox ended before it took this request") from error
        finally:
            streams.close_writers()
            for descriptor in given:
                os.close(descriptor)

    def _follow(self, streams: "Streams", last: float) -> dict[str, Any]:
        """Read both streams until the zygote says how the run ended; have it killed where they flood."""
        told = False
        with contextlib.suppress(channel.Closed):
            while not self.lost:
                left = last - time.monotonic()
                ready = streams.wait(self._control, max(0.0, left))
                if streams.flooded and not told:
                    channel.send(self._control, {"do": "kill"})
                    told = True
                if ready:
                    return channel.receive(self._control)[0]
                if left <= 0:  # the zygote does not keep its deadline: the run is over, and so is the zygote
                    self.lost = True
                    return {"how": "timeout"}
        self.lost = True
        return {"how": "lost"}


class Streams:
    """Two pipes, for stdout and stderr, read without ever blocking, and kept up to a bound."""

    def __init__(self, bound: int):
        self._bound, self.flooded = bound, False
        pairs = [os.pipe(), os.pipe()]
        self.writers = [writer for _, writer in pairs]
        self._kept = {reader: bytearray() for reader, _ in pairs}
        self._open = set(self._kept)
        for reader in self._kept:
            os.set_blocking(reader, False)

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_) -> None:
        self.close_writers()
        for reader in self._kept:
            os.close(reader)

    def close_writers(self) -> None:
        """Leave writing to the run."""
        while self.writers:
            os.close(self.writers.pop())

    def wait(self, control: socket.socket, seconds: float) -> bool:
        """Read what comes until something is heard from `control` (True), or the time is over, or a stream moves."""
        poll = select.poll()
        for number in [*self._open, control.fileno()]:
            poll.register(number, select.POLLIN)
        ready = {number for number, _ in poll.poll(seconds * 1000)}
        for reader in ready & self._open:
            self._take(reader)
        return control.fileno() in ready

    def read(self) -> None:
        """Read what is left in the pipes."""
        for reader in list(self._open):
            while reader in self._open and self._take(reader):
                pass

    def texts(self) -> tuple[bytes, bytes]:
        """Return the bytes that were kept of stdout and of stderr."""
        stdout, stderr = self._kept.values()
        return bytes(stdout), bytes(stderr)

    def _take(self, reader: int) -> bool:
        """Read once; keep what the bound allows. False where there is nothing."""
        try:
            data = os.read(reader, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._open.discard(reader)
        room = self._bound - sum(len(kept) for kept in self._kept.values())
        self._kept[reader] += data[:room]
        self.flooded |= len(data) > room
        return bool(data)


# Starting and giving -----------------------------------------------------------------------------------


def _python() -> str:
    """The interpreter without its virtual environment."""
    return getattr(sys, "_base_executable", "") or sys.executable


def _spawn(channel_end: socket.socket) -> subprocess.Popen:
    """Start the zygote with nothing of this process but one end of the channel."""
    number = channel_end.fileno()
    package = Path(__file__).resolve().parent.parent
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return subprocess.Popen(
        [_python(), *FLAGS, "-c", _BOOT, str(package), str(number)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**kept, "LANG": "C.UTF-8", **ONE_ARENA, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        pass_fds=[number],
        cwd="/",
        # Ctrl-C is for the process that holds the pool. A group of its own in the same session is hung up, and goes on
        # to end by that, where it is stopped when the process of the pool is killed.
        process_group=0,
    )


def _sealed(data: bytes) -> int:
    """A descriptor from which `data` can be read, and nothing be written to."""
    if hasattr(os, "memfd_create"):
        import fcntl

        descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return os.open(file.name, os.O_RDONLY)
