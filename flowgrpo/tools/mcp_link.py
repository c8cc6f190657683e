"""The edge to MCP servers: what runs in the thread of the event loop, over the official SDK, and what it says in words.

Stdio or Http -> keep (a task that holds a connection) -> Connection -> list_tools, call_tool within a deadline
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from flowgrpo.tools.observe import sentence
from flowgrpo.tools.toolset import ToolFailure

if TYPE_CHECKING:
    from mcp import Client

MOMENT = 1.0  # seconds in which a server that is there says what tools it has
GRACE = 5.0  # seconds that a connection may take to end
MOST_PAGES = 100  # of a listing of tools


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
    """Open connection to a server, kept by a task of the event loop: its client, and the event that ends it."""

    client: "Client"
    end: Any  # anyio.Event


async def keep(server: Stdio | Http, log: IO[bytes], seconds: float, *, task_status: Any) -> None:
    """Hold a connection, which is made within `seconds`, until its end is asked for, and then for `GRACE` at most."""
    import anyio
    from mcp import Client

    end = anyio.Event()
    with anyio.CancelScope(deadline=anyio.current_time() + seconds) as scope:
        async with contextlib.AsyncExitStack() as stack:
            transport = await _transport(server, log, stack)
            client = await stack.enter_async_context(Client(transport, cache=None))
            scope.deadline = math.inf
            task_status.started(Connection(client, end))
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


async def bounded(question: Callable, client: "Client", seconds: float) -> Any:
    import anyio

    with anyio.fail_after(seconds):
        return await question(client)


async def list_tools(client: "Client") -> list[Any]:
    """All pages of what the server lists."""
    found, cursor = [], None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise ToolFailure(f"its list of tools has more than {MOST_PAGES} pages")


async def call_tool(name: str, arguments: dict[str, Any], client: "Client") -> Any:
    return await client.call_tool(name, arguments)


# Words --------------------------------------------------------------------------------------------------


def where(server: Stdio | Http) -> str:
    return f"the MCP server {server.url if isinstance(server, Http) else server.command}"


def leaf(error: BaseException) -> BaseException:
    """The first cause in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def words_of(error: BaseException) -> str:
    said = sentence(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def text_of(block: Any) -> str:
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
