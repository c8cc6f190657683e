"""HTTP server with the OpenAI API, whose requests are answered by a session or by an engine.

    with Gateway(model="planner", decode=text.decode) as gateway:
        gateway.add(session)                 -> base URL for one client: http://127.0.0.1:PORT/s/NAME/v1

A session is all requests of one client on one task; anything with the methods of `GatewaySession` is one. The server
listens on the loopback address, unless clients must send a token; `auth` decides which requests are let in.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from flowgrpo.data.tool_calls import MAX_DEPTH, is_nested_deeper
from flowgrpo.files import pip_install
from flowgrpo.gateway import responses, wire
from flowgrpo.gateway.auth import LOCAL, AccessMiddleware, AccessPolicy, make_protocol
from flowgrpo.gateway.wire import ChatRequest, ChatResponse, Decode, HTTPError
from flowgrpo.types import JSON, BadInput

MAX_BYTES = 8 << 20  # of a request
READ_SECONDS = 30.0  # in which the whole request must have arrived
STOP_SECONDS = 5.0
MAX_TOMBSTONES = 4096  # sessions that have ended and whose clients may still send requests


class GatewaySession(Protocol):
    """Interface of a session: all requests of one client on one task. The methods are called in the server's loop."""

    name: str

    async def complete(self, request: ChatRequest, *, is_retry: bool) -> Sequence[ChatResponse]:
        """Responses to a request; with `is_retry` the client has sent it before. Raises `HTTPError`."""
        ...

    async def post_reward(self, body: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Store the reward that a client posts. Raises `HTTPError`."""
        ...

    def describe(self) -> Mapping[str, JSON]:
        """Progress of the session, as JSON."""
        ...

    async def end(self) -> None:
        """End the session from outside."""
        ...

    def tombstone(self) -> "Tombstone":
        """What remains of the session once it is over."""
        ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the session is over, or now if it is."""
        ...


class Tombstone(NamedTuple):
    """What the server remembers of a session that is over."""

    reason: str
    reward_digest: bytes = b""  # `body_digest` of the reward that ended it
    reward_response: Mapping[str, JSON] | None = None  # the response to that, which a client may request again

    def error(self) -> HTTPError:
        """The response to every other request."""
        return HTTPError(
            f"the session is over{f': {self.reason:.500}' if self.reason else ''}", status=410, code="session_over"
        )


def body_digest(body: Mapping[str, JSON]) -> bytes:
    """Hash of a request's body."""
    return blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).digest()


Complete = Callable[[ChatRequest], Awaitable[Sequence[ChatResponse]]]
OpenSession = Callable[[Mapping[str, JSON]], GatewaySession]
UpdateWeights = Callable[[Mapping[str, JSON]], Awaitable[Mapping[str, JSON]]]


class Gateway:
    """An HTTP server in a thread of its own; close it, or use it in a `with` block."""

    def __init__(
        self,
        *,
        model: str,
        decode: Decode,
        complete: Complete | None = None,
        open_session: OpenSession | None = None,
        update_weights: UpdateWeights | None = None,
        access: AccessPolicy = LOCAL,
        port: int = 0,
        max_bytes: int = MAX_BYTES,
    ):
        """Listen at once; `BadInput` if the port is taken or the extra [gateway] is not installed.

        Args:
            model: name of the model, as clients request it.
            decode: token ids -> text, for log-probabilities and echoed prompts.
            complete: answers requests that belong to no session; None: they are refused.
            open_session: makes a session from the body of POST /sessions; None: clients can't open sessions.
            update_weights: handles POST /weights; None: it is refused.
            access: the address to listen on, and which requests are let in.
            port: 0 chooses a free one.
            max_bytes: size limit of a request's body.
        """
        uvicorn = _import_uvicorn()
        self.access, self.model, self.decode, self.max_bytes = access, model, decode, max_bytes
        self._complete, self._open_session, self._update_weights = complete, open_session, update_weights
        self._sessions: dict[str, GatewaySession] = {}
        self._ended: OrderedDict[str, Tombstone] = OrderedDict()  # by name, the newest last
        self._ended_lock = threading.Lock()
        self._socket = _listen(access.host, port)
        self.host, self.port = access.host, self._socket.getsockname()[1]
        config = uvicorn.Config(
            self.app(),
            http=make_protocol(),
            log_config=None,  # which would close the handlers of others
            log_level="error",
            lifespan="off",
            access_log=False,
            timeout_keep_alive=60,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="flowgrpo-gateway", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.002)

    @property
    def url(self) -> str:
        """The base URL of clients without a session."""
        return f"{self._root}/v1"

    @property
    def _root(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def add(self, session: GatewaySession) -> str:
        """Route requests to a session from now on; returns its base URL."""
        self._sessions[session.name] = session
        return f"{self._root}/s/{session.name}/v1"

    def remove(self, session: GatewaySession) -> None:
        """Route no more requests to a session; only its tombstone remains."""
        with self._ended_lock:
            if self._sessions.pop(session.name, None) is not None:
                self._ended[session.name] = session.tombstone()
            while len(self._ended) > MAX_TOMBSTONES:
                self._ended.popitem(last=False)

    def close(self) -> None:
        """Stop listening, and end the requests under way."""
        self._server.should_exit = True
        self._thread.join(STOP_SECONDS)
        self._server.force_exit = True
        self._thread.join()

    def __enter__(self) -> "Gateway":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _run(self) -> None:
        with contextlib.closing(self._socket):
            self._server.run(sockets=[self._socket])

    # Routes -----------------------------------------------------------------------------------------------

    def app(self) -> Any:
        """The ASGI application."""
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.routing import Route

        formats = {
            "chat/completions": (wire.parse_chat_request, wire.chat_body, wire.chat_chunks),
            "completions": (wire.parse_text_request, wire.text_body, wire.text_chunks),
            "responses": (responses.parse_responses_request, responses.responses_body, responses.responses_events),
        }
        routes = [
            Route("/health", self._get_health),
            Route("/sessions", self._post_session, methods=["POST"]),
            Route("/weights", self._post_weights, methods=["POST"]),
        ]
        for prefix in ("", "/s/{session}"):
            routes += [
                Route(f"{prefix}/v1/{path}", self._completion_endpoint(*functions), methods=["POST"])
                for path, functions in formats.items()
            ]
            routes.append(Route(f"{prefix}/v1/models", self._get_models))
            routes.append(Route(f"{prefix}/v1/models/{{model:path}}", self._get_models))
            routes.append(Route(f"{prefix}/reward", self._post_reward, methods=["POST"]))
        routes += [
            Route("/s/{session}", self._get_session),
            Route("/s/{session}", self._delete_session, methods=["DELETE"]),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(AccessMiddleware, policy=self.access)],
            exception_handlers={HTTPError: _error_response, HTTPException: _no_route},
        )

    def _completion_endpoint(self, parse: Callable, to_body: Callable, to_chunks: Callable) -> Callable:
        """The endpoint of one request format: parse, complete, and write the response whole or as a stream."""

        async def endpoint(http_request: Any) -> Any:
            from starlette.responses import JSONResponse, StreamingResponse

            request: ChatRequest = parse(await self._json(http_request))
            if request.model not in (None, self.model):
                known = f"this gateway serves {self.model!r}"
                raise HTTPError(f"model {request.model!r} is unknown: {known}", status=404, code="model_not_found")
            session = self._find_session(http_request)
            if session is not None:
                is_retry = http_request.headers.get("x-stainless-retry-count", "0") != "0"
                pending = session.complete(request, is_retry=is_retry)
            elif self._complete is not None:
                pending = self._complete(request)
            else:
                message = "this gateway answers sessions alone: use the base URL of one"
                raise HTTPError(message, status=404, code="no_session")
            completions = await _cancel_on_disconnect(http_request, pending)
            head = {"response_id": f"gen-{secrets.token_hex(8)}", "created": int(time.time()), "model": self.model}
            if request.stream:
                chunks = to_chunks(request, completions, self.decode, **head)
                return StreamingResponse(
                    _server_sent_events(chunks, done=to_chunks is not responses.responses_events),
                    media_type="text/event-stream",
                )
            return JSONResponse(to_body(request, completions, self.decode, **head))

        return endpoint

    def _find_session(self, http_request: Any) -> GatewaySession | None:
        """The session that the path or the header X-Session-Id names; None if neither names one."""
        name = http_request.path_params.get("session") or http_request.headers.get("x-session-id")
        if name is None:
            return None
        session = self._sessions.get(name)
        if session is None and (tombstone := self._ended.get(name)) is not None:
            raise tombstone.error()
        if session is None:
            raise HTTPError(f"there is no session {name!r:.80}, or it is over", status=404, code="session_not_found")
        return session

    def _require_session(self, http_request: Any) -> GatewaySession:
        session = self._find_session(http_request)
        if session is None:
            raise HTTPError("name a session, by the path /s/NAME or the header X-Session-Id", code="no_session")
        return session

    async def _json(self, http_request: Any) -> Mapping[str, JSON]:
        """The body of a request: a JSON object of at most `max_bytes` that arrives within `READ_SECONDS`."""
        data = bytearray()
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for part in http_request.stream():
                    data += part
                    if len(data) > self.max_bytes:
                        raise HTTPError(
                            f"the request has more than {self.max_bytes} bytes", status=413, code="too_large"
                        )
        except TimeoutError:
            raise HTTPError(f"the request did not come within {READ_SECONDS:g} s", status=408, code="timeout") from None
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise HTTPError(f"the request is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise HTTPError("the request must be a JSON object")
        if is_nested_deeper(body, MAX_DEPTH):
            raise HTTPError(f"the request is nested more than {MAX_DEPTH} deep")
        return body

    async def _get_health(self, http_request: Any) -> Any:
        details = {"model": self.model, "sessions": len(self._sessions), "ended": len(self._ended)}
        is_admin = self.access.is_admin(dict(http_request.scope["headers"]))
        return _json_response({"status": "ok"} | (details if is_admin else {}))

    async def _get_models(self, http_request: Any) -> Any:
        self._find_session(http_request)
        name = http_request.path_params.get("model")
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "flowgrpo"}
        if name not in (None, self.model):
            raise HTTPError(
                f"model {name!r:.80} is unknown: this is {self.model!r}", status=404, code="model_not_found"
            )
        return _json_response({"object": "list", "data": [model]} if name is None else model)

    async def _post_session(self, http_request: Any) -> Any:
        if self._open_session is None:
            raise HTTPError("this gateway begins its sessions itself", status=405, code="no_session")
        session = self._open_session(await self._json(http_request))
        base_url = self.add(session)
        session.add_done_callback(lambda: self.remove(session))
        return _json_response({"session": session.name, "base_url": base_url})

    async def _post_weights(self, http_request: Any) -> Any:
        if self._update_weights is None:
            raise HTTPError("this gateway takes no weights", status=405, code="no_weights")
        return _json_response(await self._update_weights(await self._json(http_request)))

    async def _post_reward(self, http_request: Any) -> Any:
        body = await self._json(http_request)
        tombstone = self._ended.get(http_request.path_params.get("session") or http_request.headers.get("x-session-id"))
        is_retry = tombstone is not None and tombstone.reward_digest == body_digest(body)
        response = tombstone.reward_response if tombstone is not None and is_retry else None
        if response is None:
            response = await self._require_session(http_request).post_reward(body)
        return _json_response(response)

    async def _get_session(self, http_request: Any) -> Any:
        return _json_response(self._require_session(http_request).describe())

    async def _delete_session(self, http_request: Any) -> Any:
        session = self._require_session(http_request)
        await session.end()
        return _json_response(session.describe())


def _import_uvicorn() -> Any:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise BadInput(f"the gateway needs {error.name}: {pip_install('gateway')}") from None
    return uvicorn


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise BadInput(f"{host}:{port} can't be listened on ({error.strerror}): choose another port") from None
    listening.listen(1024)
    return listening


def _json_response(value: Mapping[str, JSON]) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(dict(value))


async def _error_response(_http_request: Any, error: Exception) -> Any:
    from starlette.responses import JSONResponse

    assert isinstance(error, HTTPError)
    return JSONResponse(error.body(), status_code=error.status)


async def _no_route(http_request: Any, exception: Exception) -> Any:
    """The response to an unknown path or method, as the OpenAI API writes errors."""
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    assert isinstance(exception, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(exception.status_code, "http_error")
    message = f"{http_request.method} {http_request.url.path:.80} can't be had here ({exception.detail})"
    error = HTTPError(message, status=exception.status_code, code=code)
    return JSONResponse(error.body(), status_code=error.status, headers=exception.headers)


async def _cancel_on_disconnect(
    http_request: Any, pending: Awaitable[Sequence[ChatResponse]]
) -> Sequence[ChatResponse]:
    """Wait for `pending`, and cancel it if the client disconnects."""
    task = asyncio.ensure_future(pending)
    disconnect = asyncio.ensure_future(http_request.receive())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise HTTPError("the client has left", status=499, code="client_gone")
        return task.result()
    finally:
        disconnect.cancel()
        if not task.done():
            task.cancel()


async def _server_sent_events(chunks: Iterable[Mapping[str, JSON]], *, done: bool) -> AsyncIterator[bytes]:
    """Chunks as server-sent events; those of /v1/responses have names, the others end with [DONE]."""
    for chunk in chunks:
        name = f"event: {chunk['type']}\n" if "type" in chunk else ""
        yield f"{name}data: {json.dumps(chunk)}\n\n".encode()
    if done:
        yield b"data: [DONE]\n\n"
