"""Who may send what to a gateway: `Guard` looks at a request's head, `make_protocol` at connections without a request.

A server that listens on its own machine is within reach of every page that a browser there shows, so that a request
must name the server (`Host`, against names that were bound to its address), must not come from a page of others
(`Origin`), and has its body in JSON, which no page may send to another origin unasked. Tokens are of two kinds: that of
clients, and that of whoever may swap weights and see how the server is.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from flowgrpo.gateway.wire import Refusal
from flowgrpo.types import BadInput

LOOPBACK = ("127.0.0.1", "::1", "localhost")
HEAD_SECONDS = 10.0  # in which a connection has to send the head of a request
SEND_SECONDS = 60.0  # in which a client has to read what fills its buffers
MAX_CONNECTIONS = 4096  # of which idle ones make room for others
SPARE_FILES = 64  # descriptors that are left to everything else
ADMIN_PATHS = ("/weights",)
JSON_TYPE, FORM_TYPE = b"application/json", b"application/x-www-form-urlencoded"
OF_BROWSERS = (b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode")


@dataclass(frozen=True)
class Doors:
    """What a gateway asks of requests.

    host          the address that it listens on
    token         of clients; None: anybody on this machine
    admin_token   of whoever may use `ADMIN_PATHS`, and all else; None: anybody on this machine, where `token` is None
                  too, and else nobody
    origins       origins of pages that may send requests, such as http://localhost:3000
    hosts         more names by which clients may call a server that listens on this machine alone
    """

    host: str
    token: str | None = None
    admin_token: str | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("token", "admin_token"):
            value = getattr(self, name)
            if value is not None and not (value and value.isascii() and value.isprintable() and " " not in value):
                raise BadInput(
                    f"the gateway's {name} is {'empty' if not value.strip() else 'no word of ASCII'}: set "
                    "one that clients can send as their key, or leave it out"
                )
        if self.host not in LOOPBACK and self.token is None:
            raise BadInput(f"host={self.host} can be reached from other machines: set a token, or listen on 127.0.0.1")
        for origin in self.origins:
            parts = urlsplit(origin)
            if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query:
                raise BadInput(f"origin {origin!r:.80} must be a scheme and a host, such as http://localhost:3000")

    def is_admin(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request may do and see everything."""
        if self.admin_token is None:
            return self.token is None
        return _is_token(headers, self.admin_token)

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise `Refusal` where a request may not come in."""
        name = _host_of(headers.get(b"host", b""))
        if self.host in LOOPBACK and name not in (*LOOPBACK, *self.hosts):
            raise Refusal(f"Host {name!r:.80} is not this server: call it at {self.host}", status=403, code="host")
        origin = headers.get(b"origin")
        if origin is not None and not self._is_ours(origin, headers.get(b"host", b"")):
            message = f"pages of {origin.decode(errors='replace')!r:.80} may not use this server: allow their origin"
            raise Refusal(message, status=403, code="origin")
        if self.token is not None and not _is_token(headers, self.token) and not self.is_admin(headers):
            message = "send the gateway's token as Authorization: Bearer TOKEN"
            raise Refusal(message, status=401, code="no_token")
        if path in ADMIN_PATHS and not self.is_admin(headers):
            raise Refusal("this needs the gateway's admin token, not that of clients", status=403, code="no_admin")
        kind = headers.get(b"content-type", JSON_TYPE).split(b";")[0].strip().lower()
        # What curl and urllib say of any body, and no browser says without its own headers.
        is_careless = kind == FORM_TYPE and path not in ADMIN_PATHS and not any(name in headers for name in OF_BROWSERS)
        if method == "POST" and kind != JSON_TYPE and not is_careless:
            raise Refusal(
                f"send JSON, with Content-Type: application/json, and not {kind.decode(errors='replace')!r:.80}",
                status=415,
                code="content_type",
            )

    def _is_ours(self, origin: bytes, host: bytes) -> bool:
        """Whether a page's origin is allowed, or this server itself."""
        text = origin.decode(errors="replace")
        return text in self.origins or (bool(host) and text in (f"http://{host.decode(errors='replace')}",))


def _host_of(host: bytes) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host.decode('ascii')}").hostname or ""
    except ValueError:
        return ""


def _is_token(headers: Mapping[bytes, bytes], token: str) -> bool:
    scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(sent.strip(), token.encode())


class _Unread(Exception):
    """A client does not read its response."""


class Guard:
    """ASGI middleware: refuses what `doors` does, leaves a client that reads nothing, and answers errors in JSON."""

    def __init__(self, app: Any, doors: Doors):
        self.app, self.doors = app, doors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse

        assert scope["type"] == "http"  # uvicorn is told to serve nothing else
        headers, begun = dict(scope["headers"]), False
        origin = headers.get(b"origin", b"").decode(errors="replace")

        async def send_in_time(message: Any) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start" and origin in self.doors.origins:
                allowed = [(b"access-control-allow-origin", headers[b"origin"]), (b"vary", b"Origin")]
                message = {**message, "headers": [*message["headers"], *allowed]}
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send(message)
            except TimeoutError:
                raise _Unread from None

        async def respond(refusal: Refusal) -> None:
            await JSONResponse(refusal.body(), status_code=refusal.status)(scope, receive, send_in_time)

        with contextlib.suppress(_Unread, ClientDisconnect):  # the response stays incomplete, the connection is closed
            try:
                preflight = self._preflight(scope["method"], headers)
                if preflight is not None:
                    await preflight(scope, receive, send_in_time)
                    return
                self.doors.check(scope["method"], scope["path"], headers)
                await self.app(scope, receive, send_in_time)
            except Refusal as refusal:
                await respond(refusal)
            except (_Unread, ClientDisconnect):
                raise
            except Exception as error:  # a bug of ours: one line of the log, without what the client sent
                what = f"{scope['method']} {scope['path']:.80}"
                logging.getLogger(__name__).error(f"{what} raised {type(error).__name__} at {_place(error)}")
                if not begun:
                    await respond(Refusal("the server failed at this request", status=500, code="internal_error"))

    def _preflight(self, method: str, headers: Mapping[bytes, bytes]) -> Any:
        """The answer to a browser that asks whether an allowed page may send a request; None for anything else."""
        from starlette.responses import Response

        if method != "OPTIONS" or headers.get(b"origin", b"").decode(errors="replace") not in self.doors.origins:
            return None
        asked = headers.get(b"access-control-request-headers", b"").decode("latin-1")
        allowed = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": "600"}
        return Response(status_code=204, headers=allowed | {"access-control-allow-headers": asked})


def _place(error: BaseException) -> str:
    """The file and line in which an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "no place"
    return f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"


def max_connections() -> int:
    """As many connections as descriptors allow."""
    try:
        import resource
    except ImportError:  # of a system without such limits
        return MAX_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(min(MAX_CONNECTIONS, files - SPARE_FILES), 8)


def make_protocol(most: int | None = None) -> type:
    """uvicorn's protocol of a connection, which closes one that sends no request in time.

    At `most` connections the one that has been idle longest is closed for each that comes.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    limit = max_connections() if most is None else most
    idle: dict[Any, None] = {}  # connections without a request, the longest first
    every: set[Any] = set()

    class Protocol(base):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(every) >= limit:
                for other in list(idle)[:1]:
                    other._leave()
            every.add(self)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            every.discard(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            # A byte of a later request ends uvicorn's wait for one, and nothing there waits for its other bytes.
            if not self._is_busy():
                self._await_head()
            super().data_received(data)
            if self._is_busy():
                self._stop_waiting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing() and not self._is_busy():
                idle[self] = None

        def _is_busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _await_head(self) -> None:
            idle.setdefault(self)
            if self._head_timer is None:
                self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._leave)

        def _stop_waiting(self) -> None:
            idle.pop(self, None)
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _leave(self) -> None:
            self._stop_waiting()
            self.transport.close()

    return Protocol
