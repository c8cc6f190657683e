"""MCP servers as toolsets: `mcp_tools` starts or connects to a server, and its `tools` are those that it lists then.

    with mcp_tools(Stdio(sys.executable, ["server.py"])) as server, toolset(server.tools) as tools:
        tools.do(Call("tool", "weather", {"city": "Zurich"}))

    a call in any thread -> the one thread with the event loop -> the official SDK -> server

An error that the server reports about a call is an observation. A server that is down, dies, is slower than `seconds`
or answers what is no MCP (no JSON, JSON that is too deep, the answer to another question), is a `ToolFailure`; the next
call starts it, or connects to it, again. What a server lists is bounded before it stands in a prompt.
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
from flowgrpo.tools.toolset import ToolError, ToolFailure, clean_observation, error_sentence, observation
from flowgrpo.types import BadInput

if TYPE_CHECKING:
    from mcp import Client

__all__ = ["Http", "McpTools", "Stdio", "mcp_tools"]

MOMENT = 1.0  # seconds in which a server that is there says what tools it has
GRACE = 5.0  # seconds that a connection may take to end
MOST_PAGES = 100  # of a listing of tools
MOST_TOOLS = 1000  # of a server: a planner's prompt names each
LONGEST_DESCRIPTION = 4000  # characters; of a longer one head and tail are shown
LONGEST_SCHEMA = 1 << 17  # characters of the JSON of a tool's parameters
INVALID_PARAMS, CONNECTION_CLOSED, REQUEST_TIMEOUT = -32602, -32000, -32001  # codes of JSON-RPC and of the SDK
SHOWN = 80  # characters of what a server sent in the place of a number
LOG_TAIL, LOG_MOST = 300, 1 << 20  # bytes of what a server wrote to stderr: quoted by a failure, and kept


# Connections --------------------------------------------------------------------------------------------


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


class Connection(NamedTuple):
    """Open connection to a server, kept by a task of the event loop, with the event that ends it."""

    client: "Client"
    strays: "Strays"
    end: Any  # anyio.Event


class Strays:
    """A transport that notes what a server sends and no request waits for: the SDK drops it, and the request waits on.

    `when` the last one came, and in words `what` it was.
    """

    def __init__(self, transport: Any):
        self.when, self.what = -math.inf, ""
        self._transport = transport
        self._asked: set[str] = set()  # numbers of requests without an answer

    async def __aenter__(self) -> tuple[Any, Any]:
        incoming, outgoing = await self._transport.__aenter__()
        return _Watched(incoming, self._received), _Watched(outgoing, self._sent)

    async def __aexit__(self, *error: Any) -> Any:
        return await self._transport.__aexit__(*error)

    def _sent(self, item: Any) -> None:
        if hasattr(item.message, "method") and hasattr(item.message, "id"):
            self._asked.add(str(item.message.id))

    def _received(self, item: Any) -> None:
        if isinstance(item, Exception):
            self._note(f"what is no message ({_words_of(item)})")
        elif not hasattr(item.message, "method"):  # an answer
            number = str(item.message.id)
            if number not in self._asked:
                self._note(f"an answer to the request {number[:SHOWN]!r}, which nobody made")
            self._asked.discard(number)

    def _note(self, what: str) -> None:
        self.when, self.what = time.monotonic(), what


class _Watched:
    """A stream of a transport whose items are shown to `look` as they pass."""

    def __init__(self, stream: Any, look: Callable[[Any], None]):
        self._stream, self._look = stream, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> "_Watched":
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)

    def __aiter__(self) -> "_Watched":
        return self

    async def __anext__(self) -> Any:
        item = await self._stream.__anext__()
        self._look(item)
        return item

    async def send(self, item: Any) -> None:
        self._look(item)
        await self._stream.send(item)


async def keep(server: Stdio | Http, log: IO[bytes], seconds: float, *, task_status: Any) -> None:
    """Hold a connection, which is made within `seconds`, until its end is asked for, and then for `GRACE` at most."""
    import anyio
    from mcp import Client

    end = anyio.Event()
    with anyio.CancelScope(deadline=anyio.current_time() + seconds) as scope:
        async with contextlib.AsyncExitStack() as stack:
            strays = Strays(await _transport(server, log, stack))
            client = await stack.enter_async_context(Client(strays, cache=None))
            scope.deadline = math.inf
            task_status.started(Connection(client, strays, end))
            try:
                await end.wait()
            finally:
                scope.deadline = anyio.current_time() + GRACE
    if scope.cancelled_caught:
        raise TimeoutError


async def _transport(server: Stdio | Http, log: Any, stack: contextlib.AsyncExitStack) -> Any:
    """Open the SDK's way to a server."""
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


async def bounded(question: Callable, client: "Client", seconds: float) -> Any:
    """Put a question to a server, and wait for the answer for `seconds`."""
    import anyio

    with anyio.fail_after(seconds):
        return await question(client)


async def list_tools(client: "Client") -> list[Any]:
    """List the tools of a server, all pages of them."""
    found, cursor = [], None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        if len(found) > MOST_TOOLS:
            raise ToolFailure(f"lists {len(found)} tools or more, but may list {MOST_TOOLS}")
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise ToolFailure(f"lists tools on more than {MOST_PAGES} pages")


# Words --------------------------------------------------------------------------------------------------


def where(server: Stdio | Http) -> str:
    """Name a server, as errors do."""
    return f"the MCP server {server.url if isinstance(server, Http) else server.command}"


def leaf(error: BaseException) -> BaseException:
    """Find the first cause in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _words_of(error: BaseException) -> str:
    """Format an error as its type and what it says."""
    said = error_sentence(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def text_of(block: Any) -> str:
    """Write a block of content as text; what isn't text is described."""
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
        """Make a tool as the server describes it."""
        name = f"{prefix}{listed.name}"
        check_name(name)
        size = len(json.dumps(listed.input_schema))
        if size > LONGEST_SCHEMA:
            why = f"describes the parameters of {name} in {size} characters of JSON, but may take {LONGEST_SCHEMA}"
            raise ToolFailure(f"{where(self._server)} {why}")
        description = observation((listed.description or listed.title or listed.name).strip(), LONGEST_DESCRIPTION)
        schema = {"name": name, "description": description, "parameters": listed.input_schema}
        seconds = self._seconds + 2 * GRACE + 2 * MOMENT
        return Tool(name, schema, lambda arguments: self._call(listed.name, arguments), seconds=seconds)

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Get the text of a tool's answer; raise `ToolError` for an error that the server reports."""
        result = self._ask(lambda client: client.call_tool(name, dict(arguments)))
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
        except ToolFailure as failure:
            raise ToolFailure(f"{where(self._server)} {failure}") from failure
        except Exception as error:
            raise self._failure(leaf(error), connection, began) from error
        self._answered = time.monotonic()
        return answer

    def _connected(self, until: float) -> Connection:
        """Get the connection that stands, or a new one."""
        if not self._lock.acquire(timeout=max(until - time.monotonic(), 0.0)):
            raise TimeoutError
        try:
            if self._closed:
                raise ToolFailure("was closed here")
            connection = self._connection
            self._bound_log(LOG_MOST if connection else 0)
            if connection is None:
                left = max(until - time.monotonic(), 0.0)
                _, connection = self._portal.start_task(keep, self._server, self._log, left)
                self._connection = connection
            return connection
        finally:
            self._lock.release()

    def _failure(self, cause: BaseException, connection: Connection | None, began: float) -> Exception:
        """Make the exception that says what went wrong; end a connection that broke, or on which nothing is heard."""
        code = getattr(cause, "code", None)
        if code == INVALID_PARAMS:
            return ToolError(error_sentence(cause) or "The server refused the arguments.")
        late = isinstance(cause, TimeoutError) or code == REQUEST_TIMEOUT
        broken = code in (None, CONNECTION_CLOSED) and not late
        words = f"did not answer within {self._seconds:g} s" if late else f"failed: {_words_of(cause)}"
        answers = late and self._answers(connection)
        strays = connection.strays if connection is not None and late else None
        strayed = f", but sent {strays.what}" if strays and strays.when >= began else ""
        # A server that still answers was kept busy by its caller: nobody escapes a loss by slow calls (F5).
        kind = ToolError if answers and not strayed else ToolFailure
        failure = kind(f"{where(self._server)} {words}{strayed}{self._last_words()}")
        if self._lock.acquire(timeout=GRACE):  # somebody may be connecting, and has a deadline of his own
            try:
                if self._connection is connection and (broken or (late and self._answered < began)):
                    self._disconnect()
            finally:
                self._lock.release()
        return failure

    def _answers(self, connection: Connection | None) -> bool:
        """Say whether the server has answered anything at all in a moment."""
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
        """Empty the log where it is longer. The server shares its position with us. The lock is held."""
        if os.fstat(self._log.fileno()).st_size > most:
            os.ftruncate(self._log.fileno(), 0)
            os.lseek(self._log.fileno(), 0, os.SEEK_SET)

    def _last_words(self) -> str:
        """Quote the end of what a started server wrote to stderr."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_TAIL, max(size - LOG_TAIL, 0)).decode("utf-8", "replace")
        words = " ".join(clean_observation(tail.replace("\0", "")).split())
        return f" (its last words: {words})" if words else ""


def mcp_tools(server: Stdio | Http | str, *, seconds: float = 30.0, prefix: str = "") -> McpTools:
    """Make the tools of a server, each with `prefix` before its name.

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
        raise BadInput(f"mcp_tools needs the package mcp: {pip_install('mcp')}") from error
    try:
        return McpTools(server, seconds, prefix, start_blocking_portal(name="mcp"))
    except ToolFailure as failure:
        if isinstance(failure.__cause__, (FileNotFoundError, NotADirectoryError, PermissionError)):
            raise BadInput(f"mcp_tools: {failure}; fix the command") from failure
        raise
