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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from flowgrpo.contracts import Tool
from flowgrpo.tools.observe import clean, sentence
from flowgrpo.tools.schema import check_name
from flowgrpo.tools.toolset import ToolError, ToolFailure
from flowgrpo.types import BadInput

if TYPE_CHECKING:
    from mcp import Client

GRACE = 5.0  # seconds beyond its deadline until a call counts as hanging in the SDK itself
MOST_PAGES = 100  # of a listing of tools
INVALID_PARAMS, CONNECTION_CLOSED, REQUEST_TIMEOUT = -32602, -32000, -32001  # codes of JSON-RPC and of the SDK
LOG_TAIL = 300  # bytes of what a server wrote to stderr that a failure quotes


class Stdio(NamedTuple):
    """A server that is started, and spoken to over its stdin and stdout. Of our environment it gets the SDK's few."""

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = {}
    folder: str | None = None


class Http(NamedTuple):
    """A server at an address (streamable HTTP). No environment variable is read and no proxy is used."""

    url: str
    headers: Mapping[str, str] = {}


class _Connection(NamedTuple):
    """What a task of the event loop keeps open."""

    client: "Client"
    end: Any  # anyio.Event


class McpTools:
    """The tools of one server, with its connection; `mcp_tools` makes it. Calls may come from many threads at once."""

    def __init__(self, server: Stdio | Http, seconds: float, prefix: str, portal_context: Any):
        self._server, self._seconds = server, seconds
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  what a started server writes to stderr
        self._lock = threading.Lock()  # guards all below
        self._connection: _Connection | None = None
        self._answered = -math.inf  # when the server last answered anything
        self._closed = False
        self._portal_context = portal_context
        self._portal = portal_context.__enter__()
        try:
            self.tools: list[Tool] = [self._tool(prefix, listed) for listed in self._ask(_list_tools)]
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
        return Tool(name, schema, partial(self._call, listed.name), seconds=self._seconds + 2 * GRACE)

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's answer; raises `ToolError` for an error that the server reports."""
        result = self._ask(partial(_call_tool, name, dict(arguments)))
        text = "\n".join(_text_of(block) for block in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text or f"{name} reported an error without words.")
        return text

    # The connection -----------------------------------------------------------------------------------

    def _ask(self, question: Callable) -> Any:
        """What the server answers, within the deadline."""
        began = time.monotonic()
        until, connection = began + self._seconds, None
        try:
            connection = self._connected(until)
            left = max(until - time.monotonic(), 0.0)
            future = self._portal.start_task_soon(_bounded, question, connection.client, left)
            try:
                answer = future.result(left + GRACE)
            finally:
                future.cancel()
        except ToolFailure:
            raise
        except Exception as error:
            raise self._failure(_leaf(error), connection, began) from error
        self._answered = time.monotonic()
        return answer

    def _connected(self, until: float) -> "_Connection":
        """The connection that stands, or a new one."""
        if not self._lock.acquire(timeout=max(until - time.monotonic(), 0.0)):
            raise TimeoutError
        try:
            if self._closed:
                raise ToolFailure(f"{_where(self._server)} was closed here")
            connection = self._connection
            if connection is None:
                self._log.truncate(0)
                left = max(until - time.monotonic(), 0.0)
                _, connection = self._portal.start_task(partial(_keep, self._server, self._log, left))
                self._connection = connection
            return connection
        finally:
            self._lock.release()

    def _failure(self, cause: BaseException, connection: "_Connection | None", began: float) -> Exception:
        """What went wrong, in words. A connection that broke, or on which nothing is heard, is given up."""
        code = getattr(cause, "code", None)
        if code == INVALID_PARAMS:
            return ToolError(sentence(cause) or "The server refused the arguments.")
        late = isinstance(cause, TimeoutError) or code == REQUEST_TIMEOUT
        broken = code in (None, CONNECTION_CLOSED) and not late
        words = f"did not answer within {self._seconds:g} s" if late else f"failed: {_words(cause)}"
        failure = ToolFailure(f"{_where(self._server)} {words}{self._last_words()}")
        with self._lock:
            if self._connection is connection and (broken or (late and self._answered < began)):
                self._disconnect()
        return failure

    def _disconnect(self) -> None:
        """Have the connection end, without waiting for it. The lock is held."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended, and the connection with it
                self._portal.start_task_soon(connection.end.set)

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


# In the thread of the event loop ------------------------------------------------------------------------


async def _keep(server: Stdio | Http, log: IO[bytes], seconds: float, *, task_status: Any) -> None:
    """Hold a connection, which is made within `seconds`, until its end is asked for, and then for `GRACE` at most."""
    import anyio
    from mcp import Client

    end = anyio.Event()
    with anyio.CancelScope(deadline=anyio.current_time() + seconds) as scope:
        async with contextlib.AsyncExitStack() as stack:
            transport = await _transport(server, log, stack)
            client = await stack.enter_async_context(Client(transport, read_timeout_seconds=seconds, cache=None))
            scope.deadline = math.inf
            task_status.started(_Connection(client, end))
            try:
                await end.wait()
            finally:
                scope.deadline = anyio.current_time() + GRACE
    if scope.cancelled_caught:
        raise TimeoutError


async def _transport(server: Stdio | Http, log: Any, stack: contextlib.AsyncExitStack) -> Any:
    """The SDK's way to a server."""
    if isinstance(server, Stdio):
        from mcp.client.stdio import StdioServerParameters, stdio_client

        started = StdioServerParameters(
            command=server.command, args=list(server.args), env=dict(server.env), cwd=server.folder
        )
        return stdio_client(started, errlog=log)
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    timeout = httpx2.Timeout(GRACE, read=None)  # how long an answer may take is bounded call by call
    http = httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout, trust_env=False)
    return streamable_http_client(server.url, http_client=await stack.enter_async_context(http))


async def _bounded(question: Callable, client: "Client", seconds: float) -> Any:
    import anyio

    with anyio.fail_after(seconds):
        return await question(client)


async def _list_tools(client: "Client") -> list[Any]:
    """All pages of what the server lists."""
    found, cursor = [], None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise ToolFailure(f"its list of tools has more than {MOST_PAGES} pages")


async def _call_tool(name: str, arguments: dict[str, Any], client: "Client") -> Any:
    return await client.call_tool(name, arguments)


# Words --------------------------------------------------------------------------------------------------


def _where(server: Stdio | Http) -> str:
    return f"the MCP server {server.url if isinstance(server, Http) else server.command}"


def _leaf(error: BaseException) -> BaseException:
    """The first cause in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _words(error: BaseException) -> str:
    said = sentence(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _text_of(block: Any) -> str:
    """A block of content as text; what isn't text is described."""
    if block.type == "text":
        return block.text
    if block.type in ("image", "audio"):
        return f"({block.type}, {block.mime_type}, {len(block.data)} characters of base64; it can't be shown)"
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return text if text is not None else f"(binary resource {block.resource.uri}; it can't be shown)"
    if block.type == "resource_link":
        return f"(resource {block.name}: {block.uri})"
    return f"({block.type}; it can't be shown)"
