"""A process that calls an external agent's function, for many trajectories at once.

    python -c "from flowgrpo.gateway.agent_worker import main; main()" MODULE:FUNCTION

Lines of JSON on standard input start a call ({"number", "task", "url"}) or cancel one ({"number", "stop"}); lines on
standard output are the results ({"number", "value"} or {"number", "failed"}). What the function prints goes to standard
error. The process ends when its input does.
"""

import asyncio
import inspect
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from flowgrpo.files import import_named
from flowgrpo.types import JSON, BadInput, Task, first_line

READY = -1  # number of the first line of output: the function was imported, or why it was not
THREADS = 256  # for functions that are not coroutines


def make_task(task_json: JSON) -> Task | JSON:
    """The `Task` that an agent's function gets, without answers; other values are passed on as they are."""
    if not isinstance(task_json, Mapping) or "query" not in task_json:
        return task_json
    return Task(task_json["id"], task_json["query"], (), task_json["domain"])


def make_async_call(agent: Callable[..., Any], pool: ThreadPoolExecutor) -> Callable[[JSON, str], Awaitable[Any]]:
    """`call(task, base URL)` as a coroutine function; an ordinary function runs in a thread of `pool`."""

    async def call(task_json: JSON, url: str) -> Any:
        if inspect.iscoroutinefunction(agent):
            return await agent(make_task(task_json), url)
        value = await asyncio.get_running_loop().run_in_executor(pool, agent, make_task(task_json), url)
        return await value if inspect.isawaitable(value) else value

    return call


def exception_message(error: BaseException) -> str:
    """One line about an exception that an agent raised."""
    return f"the agent raised {type(error).__name__}: {first_line(Exception(str(error))):.300}"


async def _serve(call: Callable[[JSON, str], Awaitable[Any]], lines: TextIO, out: TextIO) -> None:
    """Start or cancel a call for each line, and write each result as soon as there is one."""
    running: dict[int, asyncio.Task] = {}
    loop = asyncio.get_running_loop()
    line_queue: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in lines:
            loop.call_soon_threadsafe(line_queue.put_nowait, line)
        loop.call_soon_threadsafe(line_queue.put_nowait, "")

    async def run(number: int, task_json: JSON, url: str) -> None:
        result: dict[str, JSON] = {"number": number}
        try:
            value = await call(task_json, url)
            json.dumps(value)
            result["value"] = value
        except Exception as error:  # raised by the agent's own code
            result["failed"] = exception_message(error)
        finally:
            running.pop(number, None)
        out.write(json.dumps(result) + "\n")
        out.flush()

    threading.Thread(target=read, daemon=True).start()
    while line := await line_queue.get():
        message = json.loads(line)
        if "stop" in message:
            if (task := running.get(message["number"])) is not None:
                task.cancel()
            continue
        running[message["number"]] = asyncio.create_task(run(message["number"], message["task"], message["url"]))


def main() -> None:
    """Serve until the input ends, and then exit at once."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an agent prints must not mix with our lines
    try:
        agent = import_named(sys.argv[1], "agent")
    except BadInput as error:
        print(json.dumps({"number": READY, "failed": str(error)}), file=out, flush=True)
        return
    print(json.dumps({"number": READY, "value": None}), file=out, flush=True)
    asyncio.run(_serve(make_async_call(agent, ThreadPoolExecutor(THREADS)), sys.stdin, out))
    os._exit(0)  # a thread that an agent blocks would keep the process alive
