"""Start an agent: a program for each trajectory, a function, or a function in a process of its own.

`make_starter` gives `start(task, base URL)`, a coroutine that returns the agent's answer or raises `AgentFailed`.
"""

import asyncio
import inspect
import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from flowgrpo.gateway.agent_worker import READY, failure_of, task_told
from flowgrpo.types import BadInput

Agent = str | Sequence[str] | Callable[..., Any]
MAX_OUTPUT = 1 << 20  # bytes that a program writes
ENDING = 1.0  # seconds that a process which says no more is given to end by itself
FUNCTION = re.compile(r"[\w.]+:\w+")  # what names one, and is no command
Start = Callable[[Any, str], Awaitable[Any]]


class AgentFailed(RuntimeError):
    """An agent's program that ended badly."""


def make_starter(agent: Agent, environ: Mapping[str, str], model: str) -> Start:
    """`start(task, base URL)` of a program or a function."""
    if isinstance(agent, str) and FUNCTION.fullmatch(agent):
        return AgentProcess(agent, {**environ, "OPENAI_MODEL": model})
    if isinstance(agent, str | list | tuple):
        words = shlex.split(agent) if isinstance(agent, str) else [str(word) for word in agent]
        if not words:
            raise BadInput("the agent's command is empty: give a program with its arguments")
        return partial(run_program, words, {**environ, "OPENAI_MODEL": model})
    if not callable(agent):
        raise BadInput(f"agent={agent!r:.80} must be a command or a function of a task and a base URL")
    return partial(_coroutine if inspect.iscoroutinefunction(agent) else _function, agent)


async def _function(agent: Callable[..., Any], told: Any, url: str) -> Any:
    """Call a function in a thread of its own, which nothing can end; whoever waits for it goes on all the same."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append((agent(task_told(told), url), None))
        except BaseException as error:
            outcome.append((None, error))
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=call, name="flowgrpo-agent", daemon=True).start()
    await done.wait()
    value, error = outcome[0]
    if error is not None:
        raise error if isinstance(error, Exception) else AgentFailed(failure_of(error))
    return await value if inspect.isawaitable(value) else value


async def _coroutine(agent: Callable[..., Awaitable[Any]], told: Any, url: str) -> Any:
    return await agent(task_told(told), url)


def kill_group(process: asyncio.subprocess.Process) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class AgentProcess:
    """A process that calls an agent's function, started when it is first needed, and again when it has died."""

    def __init__(self, name: str, environ: Mapping[str, str]):
        self.name, self.environ = name, environ
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future] = {}
        self._numbers = count()
        self._readings: set[asyncio.Task] = set()  # one for each process, until it has ended

    async def begin(self) -> None:
        """Start the process; `BadInput` where there is no such function."""
        try:
            async with self._starting:
                await self._begin()
        except AgentFailed as error:
            raise BadInput(str(error)) from None

    async def __call__(self, told: Any, url: str) -> Any:
        """Call the function, and return its value."""
        async with self._starting:
            if self._process is None:
                await self._begin()
        return await self._call(told, url)

    async def _call(self, told: Any, url: str) -> Any:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"number": number, "task": told, "url": url})
            said = await answer
        except asyncio.CancelledError:
            await self._send({"number": number, "stop": True})
            raise
        finally:
            self._waiting.pop(number, None)
        if "failed" in said:
            raise AgentFailed(said["failed"])
        return said["value"]

    async def _begin(self) -> None:
        words = [sys.executable, "-c", "from flowgrpo.gateway.agent_worker import main; main()", self.name]
        env = {**os.environ, "OPENAI_API_KEY": "flowgrpo", "JAX_PLATFORMS": "cpu", **self.environ}
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, env=env, start_new_session=True, limit=MAX_OUTPUT
        )
        ready = self._waiting[READY] = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(self._read(process))
        self._readings.add(reading)
        reading.add_done_callback(self._readings.discard)
        if "failed" in (said := await ready):
            self._process = None
            raise AgentFailed(said["failed"])

    async def _send(self, line: Mapping[str, Any]) -> None:
        process = self._process
        with suppress(ConnectionError, RuntimeError):  # it has died, which `_read` says
            assert process is not None
            assert process.stdin is not None
            process.stdin.write(json.dumps(line).encode() + b"\n")
            await process.stdin.drain()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Pass answers on; where the process ends, nobody who waits for it waits on."""
        assert process.stdout is not None
        with suppress(ValueError):  # a line that is too long: the process is ended
            while line := await process.stdout.readline():
                said = json.loads(line)
                answer = self._waiting.get(said["number"])
                if answer is not None and not answer.done():
                    answer.set_result(said)
        left: list[asyncio.Future] = []
        if self._process is process:  # one that said it can't start has been given up, and another may have begun
            self._process, left = None, list(self._waiting.values())  # what comes later is for the next process
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), ENDING)
        kill_group(process)
        status = await process.wait()
        for answer in left:
            if not answer.done():
                answer.set_result({"failed": f"the process of {self.name} ended with status {status}"})

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            kill_group(self._process)
        await asyncio.gather(*self._readings)


async def run_program(words: Sequence[str], environ: Mapping[str, str], told: Any, url: str) -> str:
    """Run a program to its end; what it writes is its answer. It is killed, with all that it started, where it is not
    waited for any more."""
    query = told["query"] if isinstance(told, Mapping) and "query" in told else json.dumps(told)
    filled = [word.replace("{query}", query).replace("{base_url}", url) for word in words]
    line = json.dumps(told)
    env = {**os.environ, "OPENAI_API_KEY": "flowgrpo", **environ, "OPENAI_BASE_URL": url, "FLOWGRPO_TASK": line}
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *filled, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True, limit=MAX_OUTPUT
        )
    except OSError as error:
        raise AgentFailed(f"{filled[0]!r} can't be started: {error.strerror}") from None
    try:
        said, complaint, _ = await asyncio.gather(
            _read(process.stdout), _read(process.stderr), _write(process.stdin, line), return_exceptions=False
        )
        status = await process.wait()
    finally:
        kill_group(process)
        await process.wait()  # so that nothing of it is left, also where this is cancelled
    if status:
        last = complaint.decode(errors="replace").strip().splitlines()[-1:]
        raise AgentFailed(f"the agent exited with status {status}: {''.join(last):.300}")
    return said.decode(errors="replace").strip()


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """All that a program writes; the last part of it where that is too much."""
    assert stream is not None
    found = b""
    while part := await stream.read(1 << 16):
        found = (found + part)[-MAX_OUTPUT:]
    return found


async def _write(stream: asyncio.StreamWriter | None, line: str) -> None:
    assert stream is not None
    with suppress(ConnectionError, BrokenPipeError):
        stream.write(line.encode() + b"\n")
        await stream.drain()
        stream.close()
