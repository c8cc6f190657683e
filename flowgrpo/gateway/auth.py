"""Access control of a gateway: `AccessMiddleware` checks request heads, `make_protocol` limits idle connections.

A server on the loopback address can be reached by every web page that is open in a browser on the same machine.
Therefore a request must name the server (`Host`, against DNS rebinding), must not come from a foreign page (`Origin`),
and must have a JSON body, which a page can't send to another origin without a preflight request. There are two tokens:
one for clients, and one for administrators, who may update weights and read the server's status.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from flowgrpo.gateway.wire import HTTPError
from flowgrpo.types import BadInput

LOOPBACK = ("127.0.0.1", "::1", "localhost")
HEAD_SECONDS = 10.0  # timeout of a connection that sends no complete request head
SEND_SECONDS = 60.0  # timeout of a write to a client that does not read
MAX_CONNECTIONS = 4096  # beyond which the connection that has been idle longest is closed
SPARE_FILES = 64  # file descriptors that are reserved for everything else
ADMIN_PATHS = ("/weights",)
JSON_TYPE, FORM_TYPE = b"application/json", b"application/x-www-form-urlencoded"
BROWSER_HEADERS = (b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode")


@dataclass(frozen=True)
class AccessPolicy:
    """The address that a gateway listens on, and the requests that it accepts.

    Args:
        host: address to listen on; one that other machines can reach needs a `token`.
        token: what clients send as their API key; None: every process on this machine is a client.
        admin_token: allows `ADMIN_PATHS` and everything else; None: if `token` is None too, every client is an
            administrator, else nobody is.
        origins: origins of web pages that may send requests, such as http://localhost:3000.
        hosts: further host names by which clients may address a server on the loopback address.
    """

    host: str = "127.0.0.1"
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
        """Whether a request has the rights of an administrator."""
        if self.admin_token is None:
            return self.token is None
        return _is_token(headers, self.admin_token)

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise `HTTPError` unless a request is allowed."""
        host_name = _host_name(headers.get(b"host", b""))
        if self.host in LOOPBACK and host_name not in (*LOOPBACK, *self.hosts):
            raise HTTPError(
                f"Host {host_name!r:.80} is not this server: call it at {self.host}", status=403, code="host"
            )
        origin = headers.get(b"origin")
        if origin is not None and not self._is_allowed_origin(origin, headers.get(b"host", b"")):
            message = f"pages of {origin.decode(errors='replace')!r:.80} may not use this server: allow their origin"
            raise HTTPError(message, status=403, code="origin")
        if self.token is not None and not _is_token(headers, self.token) and not self.is_admin(headers):
            message = "send the gateway's token as Authorization: Bearer TOKEN"
            raise HTTPError(message, status=401, code="no_token")
        if path in ADMIN_PATHS and not self.is_admin(headers):
            raise HTTPError("this needs the gateway's admin token, not that of clients", status=403, code="no_admin")
        content_type = headers.get(b"content-type", JSON_TYPE).split(b";")[0].strip().lower()
        # curl and urllib label every body as a form; a browser that does so also sends one of its own headers.
        is_from_browser = any(name in headers for name in BROWSER_HEADERS)
        is_curl = content_type == FORM_TYPE and path not in ADMIN_PATHS and not is_from_browser
        if method == "POST" and content_type != JSON_TYPE and not is_curl:
            sent = content_type.decode(errors="replace")
            message = f"send JSON, with Content-Type: application/json, and not {sent!r:.80}"
            raise HTTPError(message, status=415, code="content_type")

    def _is_allowed_origin(self, origin: bytes, host: bytes) -> bool:
        """Whether a page's origin is in `origins`, or is this server itself."""
        origin_text = origin.decode(errors="replace")
        return origin_text in self.origins or (
            bool(host) and origin_text in (f"http://{host.decode(errors='replace')}",)
        )


LOCAL = AccessPolicy()  # every process on this machine, and nobody else


def _host_name(host: bytes) -> str:
    """The host name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host.decode('ascii')}").hostname or ""
    except ValueError:
        return ""


def _is_token(headers: Mapping[bytes, bytes], token: str) -> bool:
    scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(sent.strip(), token.encode())


class _SendTimeout(Exception):
    """The client does not read its response."""


class AccessMiddleware:
    """ASGI middleware that applies an `AccessPolicy`, drops clients that don't read, and turns exceptions into JSON."""

    def __init__(self, app: Any, policy: AccessPolicy):
        self.app, self.policy = app, policy

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse

        assert scope["type"] == "http"  # uvicorn is configured to serve nothing else
        headers, has_started = dict(scope["headers"]), False
        origin = headers.get(b"origin", b"").decode(errors="replace")

        async def send_with_timeout(message: Any) -> None:
            nonlocal has_started
            has_started = True
            if message["type"] == "http.response.start" and origin in self.policy.origins:
                allowed = [(b"access-control-allow-origin", headers[b"origin"]), (b"vary", b"Origin")]
                message = {**message, "headers": [*message["headers"], *allowed]}
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send(message)
            except TimeoutError:
                raise _SendTimeout from None

        async def send_error(error: HTTPError) -> None:
            await JSONResponse(error.body(), status_code=error.status)(scope, receive, send_with_timeout)

        with contextlib.suppress(
            _SendTimeout, ClientDisconnect
        ):  # the response stays incomplete, the connection is closed
            try:
                preflight = self._preflight(scope["method"], headers)
                if preflight is not None:
                    await preflight(scope, receive, send_with_timeout)
                    return
                self.policy.check(scope["method"], scope["path"], headers)
                await self.app(scope, receive, send_with_timeout)
            except HTTPError as error:
                await send_error(error)
            except (_SendTimeout, ClientDisconnect):
                raise
            except Exception as error:  # our own bug: log one line, without any content of the request
                endpoint = f"{scope['method']} {scope['path']:.80}"
                logging.getLogger(__name__).error(f"{endpoint} raised {type(error).__name__} at {_raised_at(error)}")
                if not has_started:
                    await send_error(HTTPError("the server failed at this request", status=500, code="internal_error"))

    def _preflight(self, method: str, headers: Mapping[bytes, bytes]) -> Any:
        """The response to a CORS preflight request from an allowed origin; None for any other request."""
        from starlette.responses import Response

        if method != "OPTIONS" or headers.get(b"origin", b"").decode(errors="replace") not in self.policy.origins:
            return None
        requested_headers = headers.get(b"access-control-request-headers", b"").decode("latin-1")
        allowed = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": "600"}
        return Response(status_code=204, headers=allowed | {"access-control-allow-headers": requested_headers})


def _raised_at(error: BaseException) -> str:
    """File and line where an exception was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "no place"
    return f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"


def max_connections() -> int:
    """Limit of connections: `MAX_CONNECTIONS`, or fewer if the process may not open that many files."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return MAX_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(min(MAX_CONNECTIONS, files - SPARE_FILES), 8)


def make_protocol(limit: int | None = None) -> type:
    """uvicorn's HTTP protocol with two more rules: a connection that sends no request head within `HEAD_SECONDS` is
    closed, and at `limit` connections each new one closes the one that has been idle longest."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    limit = max_connections() if limit is None else limit
    idle: dict[Any, None] = {}  # connections without a request, the longest idle first
    connections: set[Any] = set()

    class Protocol(base):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(connections) >= limit:
                for other in list(idle)[:1]:
                    other._disconnect()
            connections.add(self)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            connections.discard(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            # The first byte of a later request ends uvicorn's keep-alive timeout, and uvicorn has none for the others.
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
                self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._disconnect)

        def _stop_waiting(self) -> None:
            idle.pop(self, None)
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _disconnect(self) -> None:
            self._stop_waiting()
            self.transport.close()

    return Protocol
