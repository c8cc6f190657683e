"""`Sandbox`: run programs and calls from any thread, each within its deadline."""

import json
import os
import signal
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from flowgrpo.sandbox.child import OUT_OF_MEMORY
from flowgrpo.sandbox.limits import CallFailed, Isolation, Limits, RunResult, SandboxFailure
from flowgrpo.sandbox.worker import RequestEnd, Worker
from flowgrpo.types import BadInput

RESULT_BYTES = 16 << 20  # of the value that a call returns, as JSON
DEFAULT = Limits()
MAIN = "__main__.py"  # file name of the program in its scratch folder


class Sandbox:
    """Runs untrusted code. Thread-safe; at most `workers` requests run at once, and further callers wait.

    Processes start when they are needed. `preload` has the names of modules for `call`, which are imported once; `run`
    never sees them: its workers are bare interpreters.
    """

    def __init__(
        self, *, workers: int = 1, limits: Limits = DEFAULT, preload: Sequence[str] = (), unsafe: bool = False
    ):
        if workers < 1:
            raise BadInput(f"Sandbox: workers is {workers}, but must be at least 1")
        if isinstance(preload, str):
            raise BadInput(f"Sandbox: preload is the text {preload!r}, but must be a sequence of module names")
        self.limits, self.preload, self.unsafe = limits, tuple(preload), unsafe
        self._slots = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, ...], list[Worker]] = {(): [], self.preload: []}
        self._isolation: Isolation | None = None
        self._is_closed = False
        self._close_workers = weakref.finalize(
            self, _close_all, self._idle
        )  # a forgotten sandbox leaves no process behind

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Close all workers; a busy one closes after its request."""
        with self._lock:
            self._is_closed = True
        self._close_workers()

    @property
    def isolation(self) -> Isolation:
        """The isolation of this host; the first access starts a worker to find out."""
        if self._isolation is None:
            with self._slots:
                self._put((), self._take(()))
        assert self._isolation is not None
        return self._isolation

    def run(
        self, program: str, *, stdin: str = "", files: Mapping[str, str | bytes] = {}, limits: Limits | None = None
    ) -> RunResult:
        """Run Python source as `__main__` to its end, with `files` (relative path: content) in its folder."""
        limits = limits or self.limits
        if not (self.unsafe or self.isolation.active):
            raise BadInput(
                f"Sandbox.run: {self.isolation}; a program could do all that this user can. Use a host with user "
                "namespaces, or pass unsafe=True to run it all the same"
            )
        source = _bytes(program)
        request = {"program": source, "files": {**_check_files(files), MAIN: source}}
        return _run_result(self._exchange((), request, limits, _bytes(stdin)))

    def call(self, function: str, *arguments: Any, seconds: float = 5.0) -> Any:
        """Call `function` ("module:name" of a preloaded module) in a process that is killed at the deadline.

        Arguments and result are JSON. Raises `TimeoutError` at the deadline, and `CallFailed` if it raised or died.
        """
        module, _, name = function.partition(":")
        if not name or module not in self.preload:
            known = ", ".join(self.preload) or "none"
            raise BadInput(f"Sandbox.call: {function!r} is not module:name of a preloaded module (preload: {known})")
        try:
            text = json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"Sandbox.call: the arguments of {function} can't be written as JSON: {error}") from error
        limits = Limits(seconds, self.limits.memory, self.limits.processes, self.limits.file_bytes, RESULT_BYTES)
        answer = self._exchange(self.preload, {"function": function, "arguments": text, "files": {}}, limits, b"")
        return _call_result(function, answer, seconds)

    # Workers ------------------------------------------------------------------------------------------

    def _exchange(self, kind: tuple[str, ...], request: Mapping[str, Any], limits: Limits, stdin: bytes) -> RequestEnd:
        """Have a worker carry out the request. If a worker is lost, only its own request fails."""
        with self._slots:
            worker = self._take(kind)
            try:
                answer = worker.exchange(request, limits=limits, stdin=stdin)
            finally:
                self._put(kind, worker)
            if answer.how == "lost":
                self._try_another(kind)
                return answer._replace(how="ended", status=signal.SIGKILL)  # by which everything of it ended
        return answer

    def _try_another(self, kind: tuple[str, ...]) -> None:
        """Start a worker in place of one that was lost; `SandboxFailure` if an empty program fails there, too.

        A new worker that works shows that the request was to blame; one that does not, that the host is.
        """
        try:
            self._put(kind, self._start(kind))
        except SandboxFailure as error:
            raise SandboxFailure(
                f"the worker process of the sandbox ended while it carried out this request, and no other runs: {error}"
            ) from error

    def _take(self, kind: tuple[str, ...]) -> Worker:
        """An idle worker, or a new one."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise BadInput("Sandbox: it is closed; make another")
                idle = self._idle[kind]
                worker = idle.pop() if idle else None
            if worker is None:
                return self._start(kind)
            if worker.is_alive():
                return worker
            worker.close()

    def _put(self, kind: tuple[str, ...], worker: Worker) -> None:
        with self._lock:
            if not (self._is_closed or worker.lost):
                self._idle[kind].append(worker)
                return
        worker.close()

    def _start(self, kind: tuple[str, ...]) -> Worker:
        """Start a worker; the first one decides whether there is isolation."""
        if self._isolation is None or self._isolation.active:
            try:
                worker = Worker(isolate=True, preload=kind)
                _try_out(worker)
            except SandboxFailure as error:
                if self._isolation is not None:
                    raise  # it worked before: a failure, and no reason to continue without isolation
                self._isolation = Isolation(active=False, reason=str(error))
            else:
                self._isolation = _describe(worker)
                return worker
        worker = Worker(isolate=False, preload=kind)
        _try_out(worker)
        return worker


def _close_all(idle: Mapping[tuple[str, ...], list[Worker]]) -> None:
    for workers in idle.values():
        while workers:
            workers.pop().close()


def _try_out(worker: Worker) -> None:
    """Run an empty program, through every step of a run; close the worker if one fails."""
    try:
        answer = worker.exchange({"program": b"", "files": {}}, limits=Limits())
        if (answer.how, answer.status) != ("ended", 0):
            raise SandboxFailure(f"an empty program ended as {answer.how}, wait status {answer.status}")
    except BaseException:
        worker.close()
        raise


def _describe(worker: Worker) -> Isolation:
    nobody = "user 65534 (nobody)" if os.geteuid() == 0 else f"user {os.geteuid()} of the host, called 65534 inside,"
    user = "a user of its own for each worker, called 65534 inside," if worker.has_own_user else nobody
    return Isolation(active=True, user=user, memory=worker.memory_bound)


# Input and output -------------------------------------------------------------------------------------


def _bytes(content: str | bytes) -> bytes:
    """As UTF-8. A model's text may have surrogates, which then are an error of its program and not one of ours."""
    return content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")


def _check_files(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    folders = {str(folder) for name in files for folder in PurePosixPath(name).parents} - {"."}
    for name in files:
        parts = PurePosixPath(name).parts
        if name in folders:
            raise BadInput(f"Sandbox.run: files has {name!r} as a file and as a folder; rename one")
        if not parts or name.startswith("/") or ".." in parts or "\0" in name or name.endswith("/") or name == MAIN:
            raise BadInput(f"Sandbox.run: files has the name {name!r}, but must have relative paths inside the folder")
    return {name: _bytes(content) for name, content in files.items()}


def _run_result(answer: RequestEnd) -> RunResult:
    """The result of a program that ended so."""
    stdout, stderr = (data.decode("utf-8", "replace") for data in answer.outputs)
    if answer.how != "ended":
        return RunResult(answer.how, None, stdout, stderr, answer.seconds)
    code = os.waitstatus_to_exitcode(answer.status)
    if code == -OUT_OF_MEMORY or (code == -9 and answer.out_of_memory):
        return RunResult("memory", None, stdout, stderr, answer.seconds)
    return RunResult("exited" if code >= 0 else "signal", code, stdout, stderr, answer.seconds)


def _call_result(function: str, answer: RequestEnd, seconds: float) -> Any:
    """The value that a call returned; raises `TimeoutError` or `CallFailed` if it did not return."""
    if answer.how == "timeout":
        raise TimeoutError(f"{function} did not return within {seconds:g} s")
    if answer.how == "output":
        raise CallFailed("OverflowError", f"{function} returned more than {RESULT_BYTES >> 20} MB of JSON")
    try:
        result = json.loads(answer.outputs[0])
    except (ValueError, RecursionError) as error:
        code = os.waitstatus_to_exitcode(answer.status)
        kind = "MemoryError" if answer.out_of_memory else "ProcessDied"
        raise CallFailed(kind, f"the process of {function} ended with code {code}, without a result") from error
    if "error" in result:
        raise CallFailed(*result["error"])
    return result["value"]
