"""Start an external agent: a program for each trajectory, a function, or a function in a process of its own.

`make_starter` returns `start(task, base URL)`, a coroutine that returns the agent's answer or raises `AgentFailed`.
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

from flowgrpo.gateway.agent_worker import READY, exception_message, make_task
from flowgrpo.types import JSON, BadInput

ExternalAgent = str | Sequence[str] | Callable[..., Any]
MAX_OUTPUT_BYTES = 1 << 20  # of a program; only the last bytes are kept
EXIT_SECONDS = 1.0  # in which a process that has closed its output may exit by itself
FUNCTION_NAME = re.compile(r"[\w.]+:\w+")  # "MODULE:FUNCTION", in contrast to a command
Start = Callable[[JSON, str], Awaitable[Any]]  # (task, base URL) -> the answer


class AgentFailed(RuntimeError):
    """An external agent's program or process failed."""


def make_starter(agent: ExternalAgent, environ: Mapping[str, str], model: str) -> Start:
    """`start(task, base URL)` of a program or a function."""
    if isinstance(agent, str) and FUNCTION_NAME.fullmatch(agent):
        return AgentProcess(agent, {**environ, "OPENAI_MODEL": model})
    if isinstance(agent, str | list | tuple):
        command = shlex.split(agent) if isinstance(agent, str) else [str(word) for word in agent]
        if not command:
            raise BadInput("the agent's command is empty: give a program with its arguments")
        return partial(run_program, command, {**environ, "OPENAI_MODEL": model})
    if not callable(agent):
        raise BadInput(f"agent={agent!r:.80} must be a command or a function of a task and a base URL")
    return partial(_call_coroutine if inspect.iscoroutinefunction(agent) else _call_in_thread, agent)


async def _call_in_thread(agent: Callable[..., Any], task: JSON, url: str) -> Any:
    """Call a function in a thread of its own. A thread can't be killed, but waiting for it can be cancelled."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    results: list[Any] = []

    def call() -> None:
        try:
            results.append((agent(make_task(task), url), None))
        except BaseException as error:
            results.append((None, error))
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=call, name="flowgrpo-agent", daemon=True).start()
    await done.wait()
    value, error = results[0]
    if error is not None:
        raise error if isinstance(error, Exception) else AgentFailed(exception_message(error))
    return await value if inspect.isawaitable(value) else value


async def _call_coroutine(agent: Callable[..., Awaitable[Any]], task: JSON, url: str) -> Any:
    return await agent(make_task(task), url)


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class AgentProcess:
    """A process that calls an agent's function; it is started when first needed, and again after it has died."""

    def __init__(self, name: str, environ: Mapping[str, str]):
        self.name, self.environ = name, environ
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future] = {}
        self._numbers = count()
        self._readers: set[asyncio.Task] = set()  # one per process, until it has ended

    async def start(self) -> None:
        """Start the process; `BadInput` if the function can't be imported."""
        try:
            async with self._starting:
                await self._start()
        except AgentFailed as error:
            raise BadInput(str(error)) from None

    async def __call__(self, task: JSON, url: str) -> Any:
        """Call the function, and return its value."""
        async with self._starting:
            if self._process is None:
                await self._start()
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"number": number, "task": task, "url": url})
            message = await future
        except asyncio.CancelledError:
            await self._send({"number": number, "stop": True})
            raise
        finally:
            self._waiting.pop(number, None)
        if "failed" in message:
            raise AgentFailed(message["failed"])
        return message["value"]

    async def _start(self) -> None:
        command = [sys.executable, "-c", "from flowgrpo.gateway.agent_worker import main; main()", self.name]
        env = {**os.environ, "OPENAI_API_KEY": "flowgrpo", "JAX_PLATFORMS": "cpu", **self.environ}
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=env, start_new_session=True, limit=MAX_OUTPUT_BYTES
        )
        ready = self._waiting[READY] = asyncio.get_running_loop().create_future()
        reader = asyncio.create_task(self._read(process))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        if "failed" in (message := await ready):
            self._process = None
            raise AgentFailed(message["failed"])

    async def _send(self, line: Mapping[str, JSON]) -> None:
        process = self._process
        with suppress(ConnectionError, RuntimeError):  # it has died, which `_read` handles
            assert process is not None
            assert process.stdin is not None
            process.stdin.write(json.dumps(line).encode() + b"\n")
            await process.stdin.drain()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Resolve calls by the lines of a process; when it ends, the calls that still wait fail."""
        assert process.stdout is not None
        with suppress(ValueError):  # a line is too long: the process is killed
            while line := await process.stdout.readline():
                message = json.loads(line)
                future = self._waiting.get(message["number"])
                if future is not None and not future.done():
                    future.set_result(message)
        orphans: list[asyncio.Future] = []
        if self._process is process:  # else it failed to start, and another one may run already
            self._process, orphans = None, list(self._waiting.values())  # later calls are for the next process
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), EXIT_SECONDS)
        kill_group(process)
        status = await process.wait()
        for future in orphans:
            if not future.done():
                future.set_result({"failed": f"the process of {self.name} ended with status {status}"})

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            kill_group(self._process)
        await asyncio.gather(*self._readers)


async def run_program(command: Sequence[str], environ: Mapping[str, str], task: JSON, url: str) -> str:
    """Run a program to its end -> its output, which is the answer. If this is cancelled, the program is killed with all
    that it started."""
    query = task["query"] if isinstance(task, Mapping) and "query" in task else json.dumps(task)
    command = [word.replace("{query}", query).replace("{base_url}", url) for word in command]
    line = json.dumps(task)
    env = {**os.environ, "OPENAI_API_KEY": "flowgrpo", **environ, "OPENAI_BASE_URL": url, "FLOWGRPO_TASK": line}
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True, limit=MAX_OUTPUT_BYTES
        )
    except OSError as error:
        raise AgentFailed(f"{command[0]!r} can't be started: {error.strerror}") from None
    try:
        output, errors, _ = await asyncio.gather(
            _read(process.stdout), _read(process.stderr), _write(process.stdin, line), return_exceptions=False
        )
        status = await process.wait()
    finally:
        kill_group(process)
        await process.wait()  # so that nothing of it is left, also if this is cancelled
    if status:
        last_line = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise AgentFailed(f"the agent exited with status {status}: {''.join(last_line):.300}")
    return output.decode(errors="replace").strip()


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """Everything that a program writes, or the last `MAX_OUTPUT_BYTES` of it."""
    assert stream is not None
    data = b""
    while part := await stream.read(1 << 16):
        data = (data + part)[-MAX_OUTPUT_BYTES:]
    return data


async def _write(stream: asyncio.StreamWriter | None, line: str) -> None:
    assert stream is not None
    with suppress(ConnectionError, BrokenPipeError):
        stream.write(line.encode() + b"\n")
        await stream.drain()
        stream.close()
