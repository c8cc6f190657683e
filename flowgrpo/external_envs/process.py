"""The process that external environments run in, as the effect of kind "env".

    with EnvProcess("gymnasium", "Taxi-v3", python="/path/of/another/python") as process: ... process.call_tool

The Python may be another one than this, with packages that conflict with ours. A call that is not answered in time ends
its trajectory as TOOL_FAILURE, which takes no part in training (F5, S3); so does an exception of the environment.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path

from flowgrpo.contracts import Call, Result
from flowgrpo.external_envs import worker
from flowgrpo.types import JSON, BadInput, check_range

WORKER = Path(worker.__file__)


class EnvProcess:
    """One process for all episodes, which is restarted after it has died; close it, or use it in a `with` block."""

    def __init__(self, kind: str, spec: str, *, python: str = sys.executable, timeout: float = 60.0):
        """Start nothing yet; the first call does. `kind` and `spec` are those of `worker`.

        Args:
            kind: trl, gymnasium, textarena or openenv.
            spec: the environment, see `worker`.
            python: interpreter of the process.
            timeout: seconds until a call without an answer fails.
        """
        if kind not in worker.ADAPTERS:
            raise BadInput(f"environments of the kind {kind!r} are unknown; choose from {', '.join(worker.ADAPTERS)}")
        check_range("EnvProcess", "timeout", timeout, 0, exclusive=True)
        self.kind, self.spec, self.python, self.timeout = kind, spec, python, timeout
        self._lock, self._numbers = threading.Lock(), count()
        self._process: subprocess.Popen | None = None
        self._pending: dict[int, Future] = {}  # by the number of the call
        self._is_closed = False

    def call_tool(self, call: Call) -> Result:
        """Run an effect of kind "env": a call of an episode's environment, or all its calls again."""
        arguments, episode = call.arguments, "-".join(map(str, call.seed))
        answer: Mapping[str, JSON] = {}
        for env_call in arguments.get("again", [arguments]):
            answer = self._request(episode, env_call["ask"], env_call.get("with", {}))
            if "failed" in answer:
                return Result("", failure=answer["failed"])
            if "gone" in answer and "again" in arguments:
                reason = f"{self.kind}:{self.spec} ended twice at the same place: {answer.get('why', '')}"
                return Result("", failure=reason)
        if answer.get("done") or arguments.get("ask") == "end":
            self._send({"number": next(self._numbers), "episode": episode, "ask": "close"})
        return Result(json.dumps({name: value for name, value in answer.items() if name != "number"}))

    def check(self) -> tuple[str, ...]:
        """Names of the environment's tools; `BadInput` if it can't be reset."""
        answer = self._request("check", "reset", {"seed": 0, "task": {}})
        if reason := answer.get("failed") or answer.get("why"):
            raise BadInput(f"the environment {self.kind}:{self.spec} can't be started: {reason}")
        self._send({"number": next(self._numbers), "episode": "check", "ask": "close"})
        return tuple(tool["function"]["name"] for tool in answer.get("tools") or ())

    def close(self) -> None:
        """Kill the process and all that it started."""
        with self._lock:
            self._is_closed, process = True, self._process
        if process is not None:
            _kill(process)
            self._reader.join()

    def __enter__(self) -> "EnvProcess":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _request(self, episode: str, method: str, arguments: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Send a call and wait for its answer."""
        number, future = next(self._numbers), Future()
        self._pending[number] = future
        try:
            if not self._send({"number": number, "episode": episode, "ask": method, "with": dict(arguments)}):
                return {"failed": f"the process of {self.kind}:{self.spec} can't be started"}
            return future.result(self.timeout)
        except TimeoutError:
            return {"failed": f"{self.kind}:{self.spec} did not answer a {method} within {self.timeout:g} s"}
        finally:
            self._pending.pop(number, None)

    def _send(self, line: Mapping[str, JSON]) -> bool:
        """Write a line to the process, which is started if it does not run; whether that succeeded."""
        with self._lock:
            if self._is_closed:
                return False
            for _ in range(2):
                if self._process is None:
                    self._start()
                process = self._process
                assert process is not None
                assert process.stdin is not None
                try:
                    process.stdin.write(json.dumps(line).encode() + b"\n")
                    process.stdin.flush()
                    return True
                except (OSError, ValueError):  # it has died, and its pipe may be closed
                    self._process = None
        return False

    def _start(self) -> None:
        command, pipe = [self.python, str(WORKER), self.kind, self.spec], subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        except OSError as error:
            raise BadInput(f"the Python {self.python!r} can't be started: {error.strerror}") from None
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="flowgrpo-env", daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen) -> None:
        """Resolve calls by the lines of a process; when it ends, the calls that still wait are answered "gone"."""
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            future = self._pending.get(answer["number"])
            if future is not None and not future.done():
                future.set_result(answer)
        with self._lock:
            if self._process is process:
                self._process = None
            orphans = list(self._pending.values())
        _kill(process)
        status = process.wait()
        process.stdout.close()
        with suppress(OSError):  # of lines that were never sent
            assert process.stdin is not None
            process.stdin.close()
        for future in orphans:
            if not future.done():
                future.set_result({"gone": True, "why": f"its process ended with status {status}"})


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
