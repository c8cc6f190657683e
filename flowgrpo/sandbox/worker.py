"""One zygote as the pool sees it: start it, send it a request, read the output within bounds, end it."""

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

START_SECONDS = 120.0  # timeout of a start; a preloaded module may be large
GRACE_SECONDS = 1.0  # after a deadline, until the zygote itself is considered stuck and is ended
_OWN_PROCESSES = 3  # of a worker, which the kernel counts with those of a run
_SLACK = 16 << 20  # page tables and other memory of the kernel that a control group counts
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}  # else each thread takes 64 MB and more of the bounded address space

# The zygote imports this package by its folder, without `flowgrpo/__init__.py`, which imports JAX.
_BOOT = """
import sys, types
for name, path in (("flowgrpo", sys.argv[1]), ("flowgrpo.sandbox", sys.argv[1] + "/sandbox")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from flowgrpo.sandbox.zygote import main
main(int(sys.argv[2]))
"""


class RequestEnd(NamedTuple):
    """How a request ended ("ended", "timeout", "output", "lost"), the wait status, the outputs, the time.

    It is "lost" if the zygote ended while it carried out the request.
    """

    how: str
    status: int
    outputs: tuple[bytes, bytes]
    seconds: float
    out_of_memory: bool = False


class Worker:
    """A zygote and its channel. One request at a time; it is `lost` once it can't be used any more."""

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
            self._configure(preload)
        except BaseException:
            self.close()
            raise

    @property
    def memory_bound(self) -> str:
        """Description of the control group that bounds the memory of a run as a whole; "" if there is none."""
        return f"a control group (version {self._group.version})" if self._group else ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_own_user(self) -> bool:
        """Whether the worker runs as a user of its own."""
        return int(Path(f"/proc/{self.pid}/status").read_text().partition("Uid:")[2].split()[0]) >= FIRST_USER

    def is_alive(self) -> bool:
        """Whether the zygote still waits for requests."""
        if self.lost:
            return False
        poll = select.poll()  # unlike select, it knows descriptors of any number
        poll.register(self._control, select.POLLIN)
        return not poll.poll(0)

    def exchange(self, request: Mapping[str, Any], *, limits: Limits, stdin: bytes = b"") -> RequestEnd:
        """Carry out one request; `SandboxFailure` if it can't be started."""
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
            start = time.monotonic()
            try:
                self._submit(request, stdin, limits, streams)
                reply = self._follow(streams, start + limits.seconds + GRACE_SECONDS)
                out_of_memory = self._group is not None and self._group.kills() > kills
            except BaseException:  # an interrupt: the run must not continue
                self.lost = True
                raise
            finally:
                if self.lost:
                    self.close()
            streams.read()
        if reply["how"] == "failed":
            raise SandboxFailure(f"the sandbox could not set up a run: {reply['text']}")
        how = "output" if streams.is_flooded and reply["how"] != "lost" else reply["how"]
        seconds = reply.get("seconds", time.monotonic() - start)
        return RequestEnd(how, reply.get("status", 0), streams.outputs(), seconds, out_of_memory)

    def close(self) -> None:
        """Kill the zygote and everything below it."""
        self.lost = True
        self._control.close()  # at which the zygote exits
        for stop in (self._continue, self._process.terminate, self._process.kill):
            stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
                break
        if self._group:
            self._group.remove()
            self._group = None

    def _continue(self) -> None:
        """Continue starter and zygote if somebody has stopped them: a stopped process can't exit by itself."""
        if self._process.poll() is None:  # else the id may belong to another group
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for an empty group
                os.killpg(self.pid, signal.SIGCONT)

    # Starting -----------------------------------------------------------------------------------------

    def _configure(self, preload: Sequence[str]) -> None:
        """Send the settings, and receive whether the zygote has started."""
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
        """Bound the memory of the whole run -> number of processes that this bound has killed so far."""
        if self._group is None:
            return 0
        if self._memory != limits.memory + limits.file_bytes:
            self._memory = limits.memory + limits.file_bytes
            self._group.set_limit(self._base + self._memory + _SLACK)
        return self._group.kills()

    # One request --------------------------------------------------------------------------------------

    def _submit(self, request: Mapping[str, Any], stdin: bytes, limits: Limits, streams: "Streams") -> None:
        """Send the request, with the files that it reads and writes."""
        bounds = {
            "address_space": self._address_space + int(limits.memory) if self._address_space else None,
            "cpu_seconds": math.ceil(limits.seconds) + 1,
            "file_bytes": int(limits.file_bytes),
            "processes": int(limits.processes) + _OWN_PROCESSES if self.isolate else None,
        }
        inputs = [_sealed(marshal.dumps({**request, **bounds})), _sealed(stdin)]
        try:
            files = [*inputs, *streams.writers]
            channel.send(self._control, {"do": "run", "seconds": float(limits.seconds)}, files)
        except channel.Closed as error:
            raise SandboxFailure("the worker process of the sandbox ended before it took this request") from error
        finally:
            streams.close_writers()
            for descriptor in inputs:
                os.close(descriptor)

    def _follow(self, streams: "Streams", deadline: float) -> dict[str, Any]:
        """Read both streams until the zygote reports how the run ended; have it killed if the output is too long."""
        kill_sent = False
        with contextlib.suppress(channel.Closed):
            while not self.lost:
                left = deadline - time.monotonic()
                ready = streams.wait(self._control, max(0.0, left))
                if streams.is_flooded and not kill_sent:
                    channel.send(self._control, {"do": "kill"})
                    kill_sent = True
                if ready:
                    return channel.receive(self._control)[0]
                if left <= 0:  # the zygote has missed its deadline: it is lost
                    self.lost = True
                    return {"how": "timeout"}
        self.lost = True
        return {"how": "lost"}


class Streams:
    """Two pipes, for stdout and stderr, that are read without blocking; their output is stored up to a bound."""

    def __init__(self, bound: int):
        self._bound, self.is_flooded = bound, False
        pairs = [os.pipe(), os.pipe()]
        self.writers = [writer for _, writer in pairs]
        self._data = {reader: bytearray() for reader, _ in pairs}
        self._open = set(self._data)
        for reader in self._data:
            os.set_blocking(reader, False)

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_) -> None:
        self.close_writers()
        for reader in self._data:
            os.close(reader)

    def close_writers(self) -> None:
        """Close our copies of the write ends."""
        while self.writers:
            os.close(self.writers.pop())

    def wait(self, control: socket.socket, seconds: float) -> bool:
        """Read the streams until a stream or `control` is readable, or the time is over -> whether `control` is."""
        poll = select.poll()
        for number in [*self._open, control.fileno()]:
            poll.register(number, select.POLLIN)
        ready = {number for number, _ in poll.poll(seconds * 1000)}
        for reader in ready & self._open:
            self._take(reader)
        return control.fileno() in ready

    def read(self) -> None:
        """Read everything that is left in the pipes."""
        for reader in list(self._open):
            while reader in self._open and self._take(reader):
                pass

    def outputs(self) -> tuple[bytes, bytes]:
        """The stored bytes of stdout and of stderr."""
        stdout, stderr = self._data.values()
        return bytes(stdout), bytes(stderr)

    def _take(self, reader: int) -> bool:
        """Read once, and store what the bound allows -> whether there was anything."""
        try:
            data = os.read(reader, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._open.discard(reader)
        remaining = self._bound - sum(len(data) for data in self._data.values())
        self._data[reader] += data[:remaining]
        self.is_flooded |= len(data) > remaining
        return bool(data)


# Start and input files ----------------------------------------------------------------------------------


def _python() -> str:
    """The interpreter, without its virtual environment."""
    return getattr(sys, "_base_executable", "") or sys.executable


def _spawn(channel_end: socket.socket) -> subprocess.Popen:
    """Start the zygote; of this process it gets only one end of the channel."""
    number = channel_end.fileno()
    package = Path(__file__).resolve().parent.parent
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return subprocess.Popen(
        [_python(), *FLAGS, "-c", _BOOT, str(package), str(number)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, "LANG": "C.UTF-8", **ONE_ARENA, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        pass_fds=[number],
        cwd="/",
        # Ctrl-C is for the process of the pool only. A group of its own in the same session, if it is stopped when the
        # process of the pool is killed, gets SIGHUP and ends by that.
        process_group=0,
    )


def _sealed(data: bytes) -> int:
    """A read-only descriptor with this data."""
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
