"""Run an agent's function in a process of its own, for many trajectories at once.

    python -c "from flowgrpo.gateway.agent_worker import main; main()" MODULE:FUNCTION

Lines of JSON on standard input begin a call ({"number", "task", "url"}) or give one up ({"number", "stop"}); lines on
standard output say what came of each. What the function prints goes to standard error. The process ends with its input.
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
from flowgrpo.types import BadInput, Task, first_line

READY = -1  # the number of what is said first: that calls can come, or why not
THREADS = 256  # in which functions that are no coroutines are called


def task_told(told: Any) -> Any:
    """Make the task that an agent's function is given, without its answers."""
    if not isinstance(told, Mapping) or "query" not in told:
        return told
    return Task(told["id"], told["query"], (), told["domain"])


def call_agent(agent: Callable[..., Any], pool: ThreadPoolExecutor) -> Callable[[Any, str], Awaitable[Any]]:
    """`call(task, base URL)`, a coroutine, whatever kind of function it is; one that is none is called in a thread."""

    async def call(told: Any, url: str) -> Any:
        if inspect.iscoroutinefunction(agent):
            return await agent(task_told(told), url)
        value = await asyncio.get_running_loop().run_in_executor(pool, agent, task_told(told), url)
        return await value if inspect.isawaitable(value) else value

    return call


def failure_of(error: BaseException) -> str:
    """Say in one line what an agent raised."""
    return f"the agent raised {type(error).__name__}: {first_line(Exception(str(error))):.300}"


async def _serve(call: Callable[[Any, str], Awaitable[Any]], lines: TextIO, out: TextIO) -> None:
    """Answer every line with what its call came to, as they come."""
    running: dict[int, asyncio.Task] = {}
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in lines:
            loop.call_soon_threadsafe(asked.put_nowait, line)
        loop.call_soon_threadsafe(asked.put_nowait, "")

    async def run(number: int, told: Any, url: str) -> None:
        said: dict[str, Any] = {"number": number}
        try:
            value = await call(told, url)
            json.dumps(value)
            said["value"] = value
        except Exception as error:  # of somebody else's code
            said["failed"] = failure_of(error)
        finally:
            running.pop(number, None)
        out.write(json.dumps(said) + "\n")
        out.flush()

    threading.Thread(target=read, daemon=True).start()
    while line := await asked.get():
        given = json.loads(line)
        if "stop" in given:
            if (task := running.get(given["number"])) is not None:
                task.cancel()
            continue
        running[given["number"]] = asyncio.create_task(run(given["number"], given["task"], given["url"]))


def main() -> None:
    """Serve until the input ends, and then leave at once."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an agent prints is no answer of ours
    try:
        agent = import_named(sys.argv[1], "agent")
    except BadInput as error:
        print(json.dumps({"number": READY, "failed": str(error)}), file=out, flush=True)
        return
    print(json.dumps({"number": READY, "value": None}), file=out, flush=True)
    asyncio.run(_serve(call_agent(agent, ThreadPoolExecutor(THREADS)), sys.stdin, out))
    os._exit(0)  # threads of agents may hang
