"""The HTTP server of a gateway: what clients of the OpenAI API send goes to a session, or to an engine.

    with Gateway(model="planner", spell=text.decode) as gateway:
        gateway.add(session)                 -> the base URL of an agent: http://127.0.0.1:PORT/s/NAME/v1

A session is all that one agent asks for on one task; anything with the methods of `AgentSession` is one. The server
listens on the machine's own address, unless a token is set that clients have to send; `doors` says what comes in.
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

from flowgrpo.files import pip_install
from flowgrpo.gateway import responses, wire
from flowgrpo.gateway.doors import Doors, Guard, make_protocol
from flowgrpo.gateway.histories import MAX_DEPTH, is_deeper
from flowgrpo.gateway.wire import Answer, Asked, Refusal, Spell
from flowgrpo.types import BadInput

MAX_BYTES = 8 << 20  # of a request
READ_SECONDS = 30.0  # in which a request has to be there
STOP_SECONDS = 5.0
REMEMBERED = 4096  # sessions that have ended, whose clients may still ask


class AgentSession(Protocol):
    """The requests of one agent on one task, answered; its methods are called in the server's loop."""

    name: str

    async def ask(self, asked: Asked, *, again: bool) -> Sequence[Answer]:
        """Answers to a request; `again` says that the client has sent it before. Raises `Refusal`."""
        ...

    async def reward(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take the reward that an agent gives itself. Raises `Refusal`."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """How far it is, as JSON."""
        ...

    async def end(self) -> None:
        """End it from outside."""
        ...

    def ending(self) -> "Ending":
        """How it ended."""
        ...

    def when_over(self, act: Callable[[], None]) -> None:
        """Call this once the session is over, or now."""
        ...


class Ending(NamedTuple):
    """What is remembered of a session that is over."""

    why: str
    reward: bytes = b""  # a digest of the request that ended it
    record: Mapping[str, Any] | None = None  # the answer to that, which a client may ask for again

    def refusal(self) -> Refusal:
        """The answer to every other request."""
        return Refusal(
            f"the session is over{f': {self.why:.500}' if self.why else ''}", status=410, code="session_over"
        )


def digest_of(body: Mapping[str, Any]) -> bytes:
    """A digest of a request's body."""
    return blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).digest()


Ask = Callable[[Asked], Awaitable[Sequence[Answer]]]
Begin = Callable[[Mapping[str, Any]], AgentSession]
Swap = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class Gateway:
    """A server in a thread of its own; close it, or use it in a `with` block."""

    def __init__(
        self,
        *,
        model: str,
        spell: Spell,
        ask: Ask | None = None,
        begin: Begin | None = None,
        swap: Swap | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        admin_token: str | None = None,
        origins: Sequence[str] = (),
        hosts: Sequence[str] = (),
        max_bytes: int = MAX_BYTES,
    ):
        """`ask` answers requests of no session, `begin` begins a session for whoever posts one, and `swap` takes other
        weights; None: that can't be had. `Doors` says what tokens, origins and hosts are."""
        uvicorn = _uvicorn()
        self.doors = Doors(host, token, admin_token, tuple(origins), tuple(hosts))
        self.model, self.spell, self.max_bytes = model, spell, max_bytes
        self._ask, self._begin, self._swap = ask, begin, swap
        self._sessions: dict[str, AgentSession] = {}
        self._ended: OrderedDict[str, Ending] = OrderedDict()  # the newest, by name
        self._ending = threading.Lock()
        self._socket = _listen(host, port)
        self.host, self.port = host, self._socket.getsockname()[1]
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
        """The base URL of clients that have no session."""
        return f"{self._root}/v1"

    @property
    def _root(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def add(self, session: AgentSession) -> str:
        """Answer requests to a session from now on; returns its base URL."""
        self._sessions[session.name] = session
        return f"{self._root}/s/{session.name}/v1"

    def remove(self, session: AgentSession) -> None:
        """Answer no more requests to a session; what is left of it is how it ended."""
        with self._ending:
            if self._sessions.pop(session.name, None) is not None:
                self._ended[session.name] = session.ending()
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def close(self) -> None:
        """Stop listening, and end what is under way."""
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

        calls = {
            "chat/completions": (wire.chat_request, wire.chat_body, wire.chat_chunks),
            "completions": (wire.text_request, wire.text_body, wire.text_chunks),
            "responses": (responses.request_of, responses.body_of, responses.events_of),
        }
        routes = [
            Route("/health", self._health),
            Route("/sessions", self._open, methods=["POST"]),
            Route("/weights", self._weights, methods=["POST"]),
        ]
        for prefix in ("", "/s/{session}"):
            routes += [
                Route(f"{prefix}/v1/{path}", self._completions(*functions), methods=["POST"])
                for path, functions in calls.items()
            ]
            routes.append(Route(f"{prefix}/v1/models", self._models))
            routes.append(Route(f"{prefix}/v1/models/{{model:path}}", self._models))
            routes.append(Route(f"{prefix}/reward", self._reward, methods=["POST"]))
        routes += [Route("/s/{session}", self._describe), Route("/s/{session}", self._end, methods=["DELETE"])]
        return Starlette(
            routes=routes,
            middleware=[Middleware(Guard, doors=self.doors)],
            exception_handlers={Refusal: _refused, HTTPException: _no_route},
        )

    def _completions(self, read: Callable, whole: Callable, chunks: Callable) -> Callable:
        """The endpoint of one kind of request."""

        async def endpoint(request: Any) -> Any:
            from starlette.responses import JSONResponse, StreamingResponse

            body = await self._json(request)
            asked: Asked = read(body)
            if asked.model not in (None, self.model):
                known = f"this gateway serves {self.model!r}"
                raise Refusal(f"model {asked.model!r} is unknown: {known}", status=404, code="model_not_found")
            answers = await _unless_gone(request, self._answers(request, asked))
            head = {"identity": f"gen-{secrets.token_hex(8)}", "created": int(time.time()), "model": self.model}
            if asked.stream:
                return StreamingResponse(
                    _events(chunks(asked, answers, self.spell, **head), done=chunks is not responses.events_of),
                    media_type="text/event-stream",
                )
            return JSONResponse(whole(asked, answers, self.spell, **head))

        return endpoint

    def _answers(self, request: Any, asked: Asked) -> Awaitable[Sequence[Answer]]:
        session = self._session(request)
        if session is not None:
            return session.ask(asked, again=request.headers.get("x-stainless-retry-count", "0") != "0")
        if self._ask is None:
            raise Refusal("this gateway answers sessions alone: use the base URL of one", status=404, code="no_session")
        return self._ask(asked)

    def _session(self, request: Any) -> AgentSession | None:
        """The session that a path or a header names."""
        name = request.path_params.get("session") or request.headers.get("x-session-id")
        if name is None:
            return None
        session = self._sessions.get(name)
        if session is None and (ending := self._ended.get(name)) is not None:
            raise ending.refusal()
        if session is None:
            raise Refusal(f"there is no session {name!r:.80}, or it is over", status=404, code="session_not_found")
        return session

    def _named(self, request: Any) -> AgentSession:
        session = self._session(request)
        if session is None:
            raise Refusal("name a session, by the path /s/NAME or the header X-Session-Id", code="no_session")
        return session

    async def _json(self, request: Any) -> Mapping[str, Any]:
        """The body of a request, which must be an object, of at most `max_bytes`, and come in time."""
        data = bytearray()
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for part in request.stream():
                    data += part
                    if len(data) > self.max_bytes:
                        raise Refusal(f"the request has more than {self.max_bytes} bytes", status=413, code="too_large")
        except TimeoutError:
            raise Refusal(f"the request did not come within {READ_SECONDS:g} s", status=408, code="timeout") from None
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Refusal(f"the request is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refusal("the request must be a JSON object")
        if is_deeper(body, MAX_DEPTH):
            raise Refusal(f"the request is nested more than {MAX_DEPTH} deep")
        return body

    async def _health(self, request: Any) -> Any:
        more = {"model": self.model, "sessions": len(self._sessions), "ended": len(self._ended)}
        is_admin = self.doors.is_admin(dict(request.scope["headers"]))
        return _json_response({"status": "ok"} | (more if is_admin else {}))

    async def _models(self, request: Any) -> Any:
        self._session(request)
        named = request.path_params.get("model")
        own = {"id": self.model, "object": "model", "created": 0, "owned_by": "flowgrpo"}
        if named not in (None, self.model):
            raise Refusal(f"model {named!r:.80} is unknown: this is {self.model!r}", status=404, code="model_not_found")
        return _json_response({"object": "list", "data": [own]} if named is None else own)

    async def _open(self, request: Any) -> Any:
        if self._begin is None:
            raise Refusal("this gateway begins its sessions itself", status=405, code="no_session")
        session = self._begin(await self._json(request))
        base_url = self.add(session)
        session.when_over(lambda: self.remove(session))
        return _json_response({"session": session.name, "base_url": base_url})

    async def _weights(self, request: Any) -> Any:
        if self._swap is None:
            raise Refusal("this gateway takes no weights", status=405, code="no_weights")
        return _json_response(await self._swap(await self._json(request)))

    async def _reward(self, request: Any) -> Any:
        body = await self._json(request)
        ending = self._ended.get(request.path_params.get("session") or request.headers.get("x-session-id"))
        if (
            ending is not None and ending.record is not None and ending.reward == digest_of(body)
        ):  # a client that tries again
            return _json_response(ending.record)
        return _json_response(await self._named(request).reward(body))

    async def _describe(self, request: Any) -> Any:
        return _json_response(self._named(request).describe())

    async def _end(self, request: Any) -> Any:
        session = self._named(request)
        await session.end()
        return _json_response(session.describe())


def _uvicorn() -> Any:
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


def _json_response(value: Mapping[str, Any]) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(dict(value))


async def _refused(_request: Any, refusal: Exception) -> Any:
    from starlette.responses import JSONResponse

    assert isinstance(refusal, Refusal)
    return JSONResponse(refusal.body(), status_code=refusal.status)


async def _no_route(request: Any, error: Exception) -> Any:
    """What a path or a method comes to that is none of ours."""
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path:.80} can't be had here ({error.detail})"
    refusal = Refusal(message, status=error.status_code, code=code)
    return JSONResponse(refusal.body(), status_code=refusal.status, headers=error.headers)


async def _unless_gone(request: Any, answers: Awaitable[Sequence[Answer]]) -> Sequence[Answer]:
    """The answers; what nobody waits for any more is cancelled."""
    task = asyncio.ensure_future(answers)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise Refusal("the client has left", status=499, code="client_gone")
        return task.result()
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()


async def _events(chunks: Iterable[Mapping[str, Any]], *, done: bool) -> AsyncIterator[bytes]:
    """Chunks as server-sent events; those of /v1/responses have names."""
    for chunk in chunks:
        name = f"event: {chunk['type']}\n" if "type" in chunk else ""
        yield f"{name}data: {json.dumps(chunk)}\n\n".encode()
    if done:
        yield b"data: [DONE]\n\n"
