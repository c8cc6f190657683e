"""The process that environments of somebody else's live in, as the effect of kind "env".

    with EnvProcess("gymnasium", "Taxi-v3", python="/path/of/another/python") as process: ... process.do

The Python may be another than this one, with packages that would fight with ours. What does not answer in its time is
named, and ends its trajectory as TOOL_FAILURE, which takes no part (F5, S3); so does what the environment raises.
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
from typing import Any

from flowgrpo.contracts import Call, Result
from flowgrpo.external_envs import worker
from flowgrpo.types import BadInput, check_range

WORKER = Path(worker.__file__)


class EnvProcess:
    """One process for all episodes, started again when it has died; close it, or use it in a `with` block."""

    def __init__(self, kind: str, spec: str, *, python: str = sys.executable, seconds: float = 60.0):
        """`kind` and `spec` are those of `worker`; an answer has so many `seconds`."""
        if kind not in worker.MAKERS:
            raise BadInput(f"environments of the kind {kind!r} are unknown; choose from {', '.join(worker.MAKERS)}")
        check_range("EnvProcess", "seconds", seconds, 0, exclusive=True)
        self.kind, self.spec, self.python, self.seconds = kind, spec, python, seconds
        self._lock, self._numbers = threading.Lock(), count()
        self._process: subprocess.Popen | None = None
        self._waiting: dict[int, Future] = {}
        self._closed = False

    def do(self, call: Call) -> Result:
        """The effect: what the environment of a trajectory says."""
        given, episode = call.arguments, "-".join(map(str, call.seed))
        said: Mapping[str, Any] = {}
        for one in given.get("again", [given]):
            said = self._ask(episode, one["ask"], one.get("with", {}))
            if "failed" in said:
                return Result("", failure=said["failed"])
            if "gone" in said and "again" in given:
                return Result(
                    "", failure=f"{self.kind}:{self.spec} ended twice at the same place: {said.get('why', '')}"
                )
        if said.get("done") or given.get("ask") == "end":
            self._send({"number": next(self._numbers), "episode": episode, "ask": "close"})
        return Result(json.dumps({name: value for name, value in said.items() if name != "number"}))

    def check(self) -> tuple[str, ...]:
        """The names of the environment's tools; `BadInput` where it can't be begun."""
        said = self._ask("check", "reset", {"seed": 0, "task": {}})
        if why := said.get("failed") or said.get("why"):
            raise BadInput(f"the environment {self.kind}:{self.spec} can't be begun: {why}")
        self._send({"number": next(self._numbers), "episode": "check", "ask": "close"})
        return tuple(tool["function"]["name"] for tool in said.get("tools") or ())

    def close(self) -> None:
        """End the process and all that it started."""
        with self._lock:
            self._closed, process = True, self._process
        if process is not None:
            _kill(process)
            self._reader.join()

    def __enter__(self) -> "EnvProcess":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _ask(self, episode: str, ask: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        number, answer = next(self._numbers), Future()
        self._waiting[number] = answer
        try:
            if not self._send({"number": number, "episode": episode, "ask": ask, "with": dict(given)}):
                return {"failed": f"the process of {self.kind}:{self.spec} can't be started"}
            return answer.result(self.seconds)
        except TimeoutError:
            return {"failed": f"{self.kind}:{self.spec} did not answer a {ask} within {self.seconds:g} s"}
        finally:
            self._waiting.pop(number, None)

    def _send(self, line: Mapping[str, Any]) -> bool:
        """Pass a line on, to another process where the last one has died."""
        with self._lock:
            if self._closed:
                return False
            for _ in range(2):
                if self._process is None:
                    self._begin()
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

    def _begin(self) -> None:
        words, pipe = [self.python, str(WORKER), self.kind, self.spec], subprocess.PIPE
        try:
            self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, start_new_session=True)
        except OSError as error:
            raise BadInput(f"the Python {self.python!r} can't be started: {error.strerror}") from None
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="flowgrpo-env", daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen) -> None:
        """Pass answers on; where the process ends, nobody who waits for it waits on."""
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            answer = self._waiting.get(said["number"])
            if answer is not None and not answer.done():
                answer.set_result(said)
        with self._lock:
            if self._process is process:
                self._process = None
            left = list(self._waiting.values())
        _kill(process)
        status = process.wait()
        process.stdout.close()
        with suppress(OSError):  # of what was never sent
            assert process.stdin is not None
            process.stdin.close()
        for answer in left:
            if not answer.done():
                answer.set_result({"gone": True, "why": f"its process ended with status {status}"})


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
