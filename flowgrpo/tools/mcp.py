"""MCP servers as toolsets: `mcp_tools` starts or connects to a server, and its `tools` are those that it lists.

    with mcp_tools(Stdio(sys.executable, ["server.py"])) as server, toolset(server.tools) as tools:
        tools.call_tool(Call("tool", "weather", {"city": "Zurich"}))

    a call in any thread -> the one thread with the event loop -> the official SDK -> server

An error that the server reports about a call is an observation. A server that is down, dies, is slower than `timeout`
or violates MCP (no JSON, JSON that is too deep, the response to another request), is a `ToolFailure`; the next call
starts it, or connects to it, again. What a server lists is bounded before it gets into a prompt.
"""

import contextlib
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from flowgrpo.contracts import Tool
from flowgrpo.files import pip_install
from flowgrpo.tools.schema import check_name
from flowgrpo.tools.toolset import ToolError, ToolFailure, clean_observation, error_sentence, format_observation
from flowgrpo.types import JSON, BadInput

if TYPE_CHECKING:
    from mcp import Client

__all__ = ["Http", "McpTools", "Stdio", "mcp_tools"]

PROBE_SECONDS = 1.0  # in which a server that is alive lists its tools
CLOSE_SECONDS = 5.0  # that a connection may take to close
MAX_PAGES = 100  # of a listing of tools
MAX_TOOLS = 1000  # of a server: a planner's prompt lists them all
MAX_DESCRIPTION = 4000  # characters; a longer one is cut in the middle
MAX_SCHEMA = 1 << 17  # characters of the JSON of a tool's parameters
INVALID_PARAMS, CONNECTION_CLOSED, REQUEST_TIMEOUT = -32602, -32000, -32001  # codes of JSON-RPC and of the SDK
MAX_SHOWN = 80  # characters of a request id that a server made up
LOG_TAIL, LOG_LIMIT = 300, 1 << 20  # bytes of a server's stderr: quoted by a failure, and stored


# Connections --------------------------------------------------------------------------------------------


class Stdio(NamedTuple):
    """A server that is started as a process, over its stdin and stdout. It inherits only the SDK's few variables."""

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = {}
    folder: str | None = None


class Http(NamedTuple):
    """A server at an address (streamable HTTP). No environment variable is read and no proxy is used."""

    url: str
    headers: Mapping[str, str] = {}


class Connection(NamedTuple):
    """An open connection to a server, held by a task of the event loop, with the event that ends it."""

    client: "Client"
    unexpected: "UnexpectedMessages"
    end: Any  # anyio.Event


class UnexpectedMessages:
    """A transport that notes messages of a server for which no request waits: the SDK drops them silently.

    `last_at` is the time of the last one, and `last` describes it.
    """

    def __init__(self, transport: Any):
        self.last_at, self.last = -math.inf, ""
        self._transport = transport
        self._pending: set[str] = set()  # ids of requests without a response

    async def __aenter__(self) -> tuple[Any, Any]:
        incoming, outgoing = await self._transport.__aenter__()
        return _ObservedStream(incoming, self._received), _ObservedStream(outgoing, self._sent)

    async def __aexit__(self, *error: Any) -> Any:
        return await self._transport.__aexit__(*error)

    def _sent(self, item: Any) -> None:
        if hasattr(item.message, "method") and hasattr(item.message, "id"):
            self._pending.add(str(item.message.id))

    def _received(self, item: Any) -> None:
        if isinstance(item, Exception):
            self._note(f"what is no message ({_describe_error(item)})")
        elif not hasattr(item.message, "method"):  # a response
            request_id = str(item.message.id)
            if request_id not in self._pending:
                self._note(f"an answer to the request {request_id[:MAX_SHOWN]!r}, which nobody made")
            self._pending.discard(request_id)

    def _note(self, description: str) -> None:
        self.last_at, self.last = time.monotonic(), description


class _ObservedStream:
    """A stream of a transport; `on_item` is called with each item that passes."""

    def __init__(self, stream: Any, on_item: Callable[[Any], None]):
        self._stream, self._on_item = stream, on_item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> "_ObservedStream":
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)

    def __aiter__(self) -> "_ObservedStream":
        return self

    async def __anext__(self) -> Any:
        item = await self._stream.__anext__()
        self._on_item(item)
        return item

    async def send(self, item: Any) -> None:
        self._on_item(item)
        await self._stream.send(item)


async def run_connection(server: Stdio | Http, log: IO[bytes], timeout: float, *, task_status: Any) -> None:
    """Connect within `timeout`, hold the connection until its `end` is set, and close it within `CLOSE_SECONDS`."""
    import anyio
    from mcp import Client

    end = anyio.Event()
    with anyio.CancelScope(deadline=anyio.current_time() + timeout) as scope:
        async with contextlib.AsyncExitStack() as stack:
            transport = UnexpectedMessages(await _open_transport(server, log, stack))
            client = await stack.enter_async_context(Client(transport, cache=None))
            scope.deadline = math.inf
            task_status.started(Connection(client, transport, end))
            try:
                await end.wait()
            finally:
                scope.deadline = anyio.current_time() + CLOSE_SECONDS
    if scope.cancelled_caught:
        raise TimeoutError


async def _open_transport(server: Stdio | Http, log: Any, stack: contextlib.AsyncExitStack) -> Any:
    """The SDK's transport to a server."""
    if isinstance(server, Stdio):
        from mcp.client.stdio import StdioServerParameters, stdio_client

        parameters = StdioServerParameters(
            command=server.command, args=list(server.args), env=dict(server.env), cwd=server.folder
        )
        return stdio_client(parameters, errlog=log)
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    timeout = httpx2.Timeout(CLOSE_SECONDS, read=None)  # each call bounds the wait for its response
    http = httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout, trust_env=False)
    return streamable_http_client(server.url, http_client=await stack.enter_async_context(http))


async def ask_within(question: Callable, client: "Client", timeout: float) -> Any:
    """The response of a server to `question(client)`, within `timeout` seconds."""
    import anyio

    with anyio.fail_after(timeout):
        return await question(client)


async def list_tools(client: "Client") -> list[Any]:
    """All tools that a server lists, page by page."""
    tools, cursor = [], None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if len(tools) > MAX_TOOLS:
            raise ToolFailure(f"lists {len(tools)} tools or more, but may list {MAX_TOOLS}")
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise ToolFailure(f"lists tools on more than {MAX_PAGES} pages")


# Texts --------------------------------------------------------------------------------------------------


def server_name(server: Stdio | Http) -> str:
    """Name of a server in errors."""
    return f"the MCP server {server.url if isinstance(server, Http) else server.command}"


def first_cause(error: BaseException) -> BaseException:
    """The first exception in nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _describe_error(error: BaseException) -> str:
    """An error as its type and message."""
    message = error_sentence(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def block_text(block: Any) -> str:
    """A block of content as text; an image or the like is described."""
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


# Calls --------------------------------------------------------------------------------------------------


class McpTools:
    """The tools of one server, with its connection; `mcp_tools` makes it. Calls may come from many threads at once."""

    def __init__(self, server: Stdio | Http, timeout: float, prefix: str, portal_context: Any):
        self._server, self._timeout = server, timeout
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  stderr of a server that is started here
        self._lock = threading.Lock()  # guards all below
        self._connection: Connection | None = None
        self._last_response = -math.inf  # time of the server's last response to anything
        self._closed = False
        self._portal_context = portal_context
        self._portal = portal_context.__enter__()
        try:
            self.tools: list[Tool] = [self._make_tool(prefix, listed) for listed in self._ask(list_tools)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "McpTools":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Fail calls in flight, and stop the server if it was started here, and the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._disconnect()
            self._portal_context.__exit__(None, None, None)
            self._log.close()

    def _make_tool(self, prefix: str, listed: Any) -> Tool:
        """A tool as the server describes it."""
        name = f"{prefix}{listed.name}"
        check_name(name)
        size = len(json.dumps(listed.input_schema))
        if size > MAX_SCHEMA:
            why = f"describes the parameters of {name} in {size} characters of JSON, but may take {MAX_SCHEMA}"
            raise ToolFailure(f"{server_name(self._server)} {why}")
        description = format_observation((listed.description or listed.title or listed.name).strip(), MAX_DESCRIPTION)
        schema = {"name": name, "description": description, "parameters": listed.input_schema}
        timeout = self._timeout + 2 * CLOSE_SECONDS + 2 * PROBE_SECONDS
        return Tool(name, schema, lambda arguments: self._call(listed.name, arguments), timeout=timeout)

    def _call(self, name: str, arguments: Mapping[str, JSON]) -> str:
        """Text of a tool's response; raises `ToolError` for an error that the server reports."""
        result = self._ask(lambda client: client.call_tool(name, dict(arguments)))
        text = "\n".join(block_text(block) for block in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text or f"{name} reported an error without words.")
        return text

    # The connection -----------------------------------------------------------------------------------

    def _ask(self, question: Callable) -> Any:
        """The response to `question`, a coroutine function of the client, within the timeout."""
        start = time.monotonic()
        deadline, connection = start + self._timeout, None
        try:
            connection = self._connect(deadline)
            left = max(deadline - time.monotonic(), 0.0)
            future = self._portal.start_task_soon(ask_within, question, connection.client, left)
            try:
                response = future.result(left + CLOSE_SECONDS)
            finally:
                future.cancel()
        except ToolFailure as failure:
            raise ToolFailure(f"{server_name(self._server)} {failure}") from failure
        except Exception as error:
            raise self._to_failure(first_cause(error), connection, start) from error
        self._last_response = time.monotonic()
        return response

    def _connect(self, deadline: float) -> Connection:
        """The open connection, or a new one."""
        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise TimeoutError
        try:
            if self._closed:
                raise ToolFailure("was closed here")
            connection = self._connection
            # The log is emptied if it is too long, or before a new connection. The server shares its position with us.
            if os.fstat(self._log.fileno()).st_size > (LOG_LIMIT if connection else 0):
                os.ftruncate(self._log.fileno(), 0)
                os.lseek(self._log.fileno(), 0, os.SEEK_SET)
            if connection is None:
                left = max(deadline - time.monotonic(), 0.0)
                _, connection = self._portal.start_task(run_connection, self._server, self._log, left)
                self._connection = connection
            return connection
        finally:
            self._lock.release()

    def _to_failure(self, cause: BaseException, connection: Connection | None, start: float) -> Exception:
        """The exception to raise for `cause`; ends a connection that broke, or on which nothing has come since."""
        code = getattr(cause, "code", None)
        if code == INVALID_PARAMS:
            return ToolError(error_sentence(cause) or "The server refused the arguments.")
        is_late = isinstance(cause, TimeoutError) or code == REQUEST_TIMEOUT
        is_broken = code in (None, CONNECTION_CLOSED) and not is_late
        message = f"did not answer within {self._timeout:g} s" if is_late else f"failed: {_describe_error(cause)}"
        is_alive = is_late and self._is_alive(connection)
        unexpected = connection.unexpected if connection is not None and is_late else None
        but_sent = f", but sent {unexpected.last}" if unexpected and unexpected.last_at >= start else ""
        # A server that is still alive was kept busy by its caller: nobody escapes a loss by slow calls (F5).
        kind = ToolError if is_alive and not but_sent else ToolFailure
        failure = kind(f"{server_name(self._server)} {message}{but_sent}{self._stderr_tail()}")
        if self._lock.acquire(timeout=CLOSE_SECONDS):  # another thread may be connecting, and has its own deadline
            try:
                if self._connection is connection and (is_broken or (is_late and self._last_response < start)):
                    self._disconnect()
            finally:
                self._lock.release()
        return failure

    def _is_alive(self, connection: Connection | None) -> bool:
        """Whether the server lists its tools within `PROBE_SECONDS`."""
        if connection is None or self._closed:
            return False
        try:
            future = self._portal.start_task_soon(ask_within, list_tools, connection.client, PROBE_SECONDS)
            future.result(2 * PROBE_SECONDS)
        except Exception:  # whatever the client raises when the server is gone
            return False
        self._last_response = time.monotonic()
        return True

    def _disconnect(self) -> None:
        """Let the connection end, without waiting for it. The caller holds the lock."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended, and the connection with it
                self._portal.start_task_soon(connection.end.set)

    def _stderr_tail(self) -> str:
        """Quotation of the end of a started server's stderr."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_TAIL, max(size - LOG_TAIL, 0)).decode("utf-8", "replace")
        words = " ".join(clean_observation(tail.replace("\0", "")).split())
        return f" (its last words: {words})" if words else ""


def mcp_tools(server: Stdio | Http | str, *, timeout: float = 30.0, prefix: str = "") -> McpTools:
    """The tools of an MCP server. Raises `BadInput` if it can't be started, `ToolFailure` if it doesn't speak MCP.

    Args:
        server: a command (`Stdio`) or an address (`Http`, or its URL).
        timeout: seconds of a call, with connecting if that is needed.
        prefix: put before the name of each tool.
    """
    if isinstance(server, str):
        server = Http(server)
    if isinstance(server, Http) and not server.url.startswith(("http://", "https://")):
        raise BadInput(f"mcp_tools: the address {server.url!r} must begin with http:// or https://")
    if isinstance(server, Http) and "@" in server.url:
        raise BadInput("mcp_tools: an address must hold no credentials; give them as Http(url, headers={...})")
    if not 0 < timeout < threading.TIMEOUT_MAX:
        raise BadInput(f"mcp_tools: timeout is {timeout}, but must be positive")
    try:
        import mcp  # noqa: F401
        from anyio.from_thread import start_blocking_portal
    except ImportError as error:
        raise BadInput(f"mcp_tools needs the package mcp: {pip_install('mcp')}") from error
    try:
        return McpTools(server, timeout, prefix, start_blocking_portal(name="mcp"))
    except ToolFailure as failure:
        if isinstance(failure.__cause__, (FileNotFoundError, NotADirectoryError, PermissionError)):
            raise BadInput(f"mcp_tools: {failure}; fix the command") from failure
        raise
