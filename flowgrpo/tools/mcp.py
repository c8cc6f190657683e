"""Every MCP server is a toolset: a server's command or address flows in, its tools flow out.

    with mcp_tools(Stdio(sys.executable, ["server.py"])) as server, toolset(server.tools) as tools:
        tools.do(Call("tool", "weather", {"city": "Zurich"}))

    a call in any thread -> the one thread with the event loop -> the official SDK -> server

An error that the server reports about a call is an observation. A server that is down, dies, is slower than `seconds`
or answers what is no MCP, is a `ToolFailure`; the next call starts it, or connects to it, anew. The tools are those
that it listed at the start.
"""

import contextlib
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any

from flowgrpo.contracts import Tool
from flowgrpo.tools.mcp_link import (
    GRACE,
    MOMENT,
    Connection,
    Http,
    Stdio,
    bounded,
    call_tool,
    keep,
    leaf,
    list_tools,
    text_of,
    where,
    words_of,
)
from flowgrpo.tools.observe import clean, sentence
from flowgrpo.tools.schema import check_name
from flowgrpo.tools.toolset import ToolError, ToolFailure
from flowgrpo.types import BadInput

__all__ = ["Http", "McpTools", "Stdio", "mcp_tools"]

INVALID_PARAMS, CONNECTION_CLOSED, REQUEST_TIMEOUT = -32602, -32000, -32001  # codes of JSON-RPC and of the SDK
LOG_TAIL, LOG_MOST = 300, 1 << 20  # bytes of what a server wrote to stderr: quoted by a failure, and kept


class McpTools:
    """The tools of one server, with its connection; `mcp_tools` makes it. Calls may come from many threads at once."""

    def __init__(self, server: Stdio | Http, seconds: float, prefix: str, portal_context: Any):
        self._server, self._seconds = server, seconds
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  what a started server writes to stderr
        self._lock = threading.Lock()  # guards all below
        self._connection: Connection | None = None
        self._answered = -math.inf  # when the server last answered anything
        self._closed = False
        self._portal_context = portal_context
        self._portal = portal_context.__enter__()
        try:
            self.tools: list[Tool] = [self._tool(prefix, listed) for listed in self._ask(list_tools)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "McpTools":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Fail what is under way, end the server if it was started here, and the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._disconnect()
            self._portal_context.__exit__(None, None, None)
            self._log.close()

    def _tool(self, prefix: str, listed: Any) -> Tool:
        """A tool as the server describes it."""
        name = f"{prefix}{listed.name}"
        check_name(name)
        description = (listed.description or listed.title or listed.name).strip()
        schema = {"name": name, "description": description, "parameters": listed.input_schema}
        return Tool(name, schema, partial(self._call, listed.name), seconds=self._seconds + 2 * GRACE + 2 * MOMENT)

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's answer; raises `ToolError` for an error that the server reports."""
        result = self._ask(partial(call_tool, name, dict(arguments)))
        text = "\n".join(text_of(block) for block in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text or f"{name} reported an error without words.")
        return text

    # The connection -----------------------------------------------------------------------------------

    def _ask(self, question: Callable) -> Any:
        """Put a question, a coroutine function of the client, and wait for the answer until the deadline."""
        began = time.monotonic()
        until, connection = began + self._seconds, None
        try:
            connection = self._connected(until)
            left = max(until - time.monotonic(), 0.0)
            future = self._portal.start_task_soon(bounded, question, connection.client, left)
            try:
                answer = future.result(left + GRACE)
            finally:
                future.cancel()
        except ToolFailure:
            raise
        except Exception as error:
            raise self._failure(leaf(error), connection, began) from error
        self._answered = time.monotonic()
        return answer

    def _connected(self, until: float) -> "Connection":
        """The connection that stands, or a new one."""
        if not self._lock.acquire(timeout=max(until - time.monotonic(), 0.0)):
            raise TimeoutError
        try:
            if self._closed:
                raise ToolFailure(f"{where(self._server)} was closed here")
            connection = self._connection
            self._bound_log(LOG_MOST if connection else 0)
            if connection is None:
                left = max(until - time.monotonic(), 0.0)
                _, connection = self._portal.start_task(partial(keep, self._server, self._log, left))
                self._connection = connection
            return connection
        finally:
            self._lock.release()

    def _failure(self, cause: BaseException, connection: "Connection | None", began: float) -> Exception:
        """Make the exception that says what went wrong; end a connection that broke, or on which nothing is heard."""
        code = getattr(cause, "code", None)
        if code == INVALID_PARAMS:
            return ToolError(sentence(cause) or "The server refused the arguments.")
        late = isinstance(cause, TimeoutError) or code == REQUEST_TIMEOUT
        broken = code in (None, CONNECTION_CLOSED) and not late
        words = f"did not answer within {self._seconds:g} s" if late else f"failed: {words_of(cause)}"
        # A server that still answers was kept busy by its caller: nobody escapes a loss by slow calls (F5).
        kind = ToolError if late and self._answers(connection) else ToolFailure
        failure = kind(f"{where(self._server)} {words}{self._last_words()}")
        if self._lock.acquire(timeout=GRACE):  # somebody may be connecting, and has a deadline of his own
            try:
                if self._connection is connection and (broken or (late and self._answered < began)):
                    self._disconnect()
            finally:
                self._lock.release()
        return failure

    def _answers(self, connection: "Connection | None") -> bool:
        """Whether the server has answered anything at all in a moment."""
        if connection is None or self._closed:
            return False
        try:
            future = self._portal.start_task_soon(bounded, list_tools, connection.client, MOMENT)
            future.result(2 * MOMENT)
        except Exception:  # whatever the client raises where the server is gone
            return False
        self._answered = time.monotonic()
        return True

    def _disconnect(self) -> None:
        """Have the connection end, without waiting for it. The lock is held."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended, and the connection with it
                self._portal.start_task_soon(connection.end.set)

    def _bound_log(self, most: int) -> None:
        """Begin the log anew where it is longer. The server shares its position with us. The lock is held."""
        if os.fstat(self._log.fileno()).st_size > most:
            os.ftruncate(self._log.fileno(), 0)
            os.lseek(self._log.fileno(), 0, os.SEEK_SET)

    def _last_words(self) -> str:
        """The end of what a started server wrote to stderr."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_TAIL, max(size - LOG_TAIL, 0)).decode("utf-8", "replace")
        words = " ".join(clean(tail.replace("\0", "")).split())
        return f" (its last words: {words})" if words else ""


def mcp_tools(server: Stdio | Http | str, *, seconds: float = 30.0, prefix: str = "") -> McpTools:
    """The tools of a server, each with `prefix` before its name.

    `server` is a command or an address; a text is an address. `seconds` bounds each call, with connecting where that is
    needed. `BadInput` where the server can't be started, `ToolFailure` where it can't be spoken to.
    """
    if isinstance(server, str):
        server = Http(server)
    if isinstance(server, Http) and not server.url.startswith(("http://", "https://")):
        raise BadInput(f"mcp_tools: the address {server.url!r} must begin with http:// or https://")
    if isinstance(server, Http) and "@" in server.url:
        raise BadInput("mcp_tools: an address must hold no credentials; give them as Http(url, headers={...})")
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise BadInput(f"mcp_tools: seconds is {seconds}, but must be positive")
    try:
        import mcp  # noqa: F401
        from anyio.from_thread import start_blocking_portal
    except ImportError as error:
        raise BadInput("mcp_tools needs the package mcp: pip install 'flowgrpo[mcp]'") from error
    try:
        return McpTools(server, seconds, prefix, start_blocking_portal(name="mcp"))
    except ToolFailure as failure:
        if isinstance(failure.__cause__, (FileNotFoundError, NotADirectoryError, PermissionError)):
            raise BadInput(f"mcp_tools: {failure}; mend the command") from failure
        raise
