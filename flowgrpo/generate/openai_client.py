"""A client of OpenAI-compatible servers, for frozen roles and judges.

`remote` connects to a model: its `generate` completes `TextRequest`s in their order, and its `submit` returns a future
of one completion. All requests run on one event loop in a thread of its own, at most `concurrency` of them at once. A
deadline holds whatever the server, the network or the queue is doing. What goes wrong on the way is a completion with
finish_reason "error" or "timeout" and one sentence; only a request that is itself invalid raises, before anything is
sent.
"""

import asyncio
import json
import random
import re
import ssl
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import httpx

from flowgrpo.generate.openai_wire import (
    RemoteFailure,
    TextCompletion,
    TextRequest,
    encode_request,
    failure_message,
    parse_completion,
    parse_server_url,
    retry_after,
)
from flowgrpo.types import JSON, BadInput, check_range

MAX_BACKOFF = 30.0  # seconds between two attempts, unless the server asks for more
CLOSE_SECONDS = 5.0  # that `close` waits for its thread, whose requests are already cancelled


@dataclass(eq=False)
class _Job:
    """A request in flight."""

    request: TextRequest
    path: str
    body: bytes
    submitted_at: float  # by the clock of the loop
    stage: str = "it was still queued"  # for error messages

    @property
    def ends_at(self) -> float | None:
        """Time of its deadline, if it has one."""
        return None if self.request.deadline is None else self.submitted_at + self.request.deadline


def remote(
    url: str,
    model: str,
    *,
    api_key: str | None = None,
    timeout: float = 60.0,
    retries: int = 3,
    concurrency: int = 8,
    backoff: float = 0.5,
    max_bytes: int = 32 << 20,
    context: ssl.SSLContext | None = None,
) -> "Remote":
    """Connect to a model on an OpenAI-compatible server. No environment variable is read and no proxy is used.

    Args:
        url: address of the server; without a path, /v1 is added.
        model: its name on the server.
        api_key: sent as a bearer token; None sends none.
        timeout: seconds of one attempt.
        retries: attempts after the first, if there was a connection error, 429 or 5xx.
        concurrency: requests in flight at most; others wait in a queue.
        backoff: seconds before the first retry, doubled for each later one, with jitter; a server may ask for more.
        max_bytes: size of a response; a larger one is an error.
        context: whom to trust in TLS, if not the system's authorities.
    """
    address = parse_server_url(url)
    if not isinstance(model, str) or not model:
        raise BadInput(f"model={model!r} must be the name of a model on the server")
    if api_key is not None and not (isinstance(api_key, str) and re.fullmatch("[!-~]+", api_key)):
        raise BadInput("api_key must be printable ASCII without spaces; None sends no key")
    for name, value in (("timeout", timeout), ("backoff", backoff)):
        check_range("remote", name, value, 0.0, exclusive=True)
    for name, value, least in (("retries", retries, 0), ("concurrency", concurrency, 1), ("max_bytes", max_bytes, 1)):
        check_range("remote", name, value, least, whole=True)
    base = f"{address.scheme}://{address.netloc}{address.path.rstrip('/') or '/v1'}"
    tls = (context or ssl.create_default_context()) if address.scheme == "https" else False
    return Remote(base, model, api_key, timeout, retries, concurrency, backoff, max_bytes, tls)


def first_token_logprobs(completion: TextCompletion) -> dict[str, float]:
    """Log-probabilities of the alternatives at the first token; raises `RemoteFailure` if there are none."""
    if completion.error is not None:
        raise RemoteFailure(completion.error, completion.finish_reason)
    if not completion.logprobs or not completion.logprobs[0].top:
        raise RemoteFailure("the answer has no first token with alternatives: ask for top_logprobs")
    return dict(completion.logprobs[0].top)


@dataclass(eq=False)
class Remote:
    """A model on a server. All methods may be called from any thread; `close` ends requests in flight.

    Its event loop, that loop's thread and its connections start with the first request.
    """

    url: str  # the address with its path, without a trailing slash
    model: str
    api_key: str | None = field(repr=False)
    timeout: float
    retries: int
    concurrency: int
    backoff: float
    max_bytes: int
    context: ssl.SSLContext | bool

    def __post_init__(self):
        self._lock = threading.Lock()  # guards the two below
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._cancelled = TextCompletion("", "cancelled", error=f"{self.url}: closed before it answered")
        self._jitter = random.Random()  # its own: nobody's seeded stream moves

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def generate(self, requests: Sequence[TextRequest]) -> list[TextCompletion]:
        """Completions in the order of the requests. Raises `BadInput` if one can't be sent; then none is."""
        encoded = []
        for i, request in enumerate(requests):
            try:
                encoded.append(encode_request(request, self.model))
            except BadInput as error:
                raise BadInput(f"request {i}: {error}") from None
        futures = [self._start(request, *parts) for request, parts in zip(requests, encoded, strict=True)]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def submit(self, request: TextRequest) -> "Future[TextCompletion]":
        """A future of the completion. Cancelling it takes it from the queue, or cuts its connection."""
        return self._start(request, *encode_request(request, self.model))

    def first_token_logprobs(
        self, messages: Sequence[Mapping[str, JSON]], top: int, *, deadline: float | None = None
    ) -> dict[str, float]:
        """Log-probabilities of the `top` likeliest first tokens of a completion, at temperature 1."""
        if top < 1:
            raise BadInput(f"top={top!r} must be at least 1")
        request = TextRequest(messages, max_tokens=1, deadline=deadline, top_logprobs=top)
        return first_token_logprobs(self.submit(request).result())

    def close(self) -> None:
        """End requests in flight as "cancelled", and the thread. Later requests are "cancelled" too."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if self._loop is not None and self._thread is not None:
            if not was_closed:
                self._loop.call_soon_threadsafe(self._loop.stop)
            if self._thread is not threading.current_thread():  # a future's callback may close
                self._thread.join(CLOSE_SECONDS)

    def _start(self, request: TextRequest, path: str, body: bytes) -> "Future[TextCompletion]":
        with self._lock:
            if not self._closed:
                if self._loop is None:
                    self._start_loop()
                assert self._loop is not None
                job = _Job(request, path, body, self._loop.time())
                return asyncio.run_coroutine_threadsafe(self._run(job), self._loop)
        future: Future[TextCompletion] = Future()
        future.set_result(self._cancelled)
        return future

    def _start_loop(self) -> None:
        """Start the event loop in its thread."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        limits = httpx.Limits(max_connections=self.concurrency)
        # Timeouts are the loop's, over all that an attempt does.
        self._client = httpx.AsyncClient(
            headers=headers, verify=self.context, timeout=None, limits=limits, trust_env=False
        )
        self._semaphore = asyncio.Semaphore(self.concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(self._loop,), daemon=True, name="remote_loop")
        self._thread.start()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until `close` stops it; then cancel what is in flight and close the connections."""

        async def shut_down() -> None:
            await asyncio.sleep(0)  # a request that has just come starts, so that it can report its cancellation
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()
            await asyncio.sleep(0)  # for the transports, which close in the next round

        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(shut_down())
        finally:
            loop.close()

    # In the loop ------------------------------------------------------------------------------------------

    async def _run(self, job: _Job) -> TextCompletion:
        """Complete a request within its deadline, which covers the queue and all attempts."""
        try:
            async with asyncio.timeout_at(job.ends_at):
                async with self._semaphore:
                    return await self._attempt_all(job)
        except TimeoutError:
            message = f"no answer within the deadline of {job.request.deadline:g} s: {job.stage}"
            return self._failed(job, RemoteFailure(message, "timeout"))
        except asyncio.CancelledError:
            if self._closed:
                return self._cancelled
            raise

    async def _attempt_all(self, job: _Job) -> TextCompletion:
        """Try up to `retries` + 1 times; the completion reports the last failure if none succeeds."""
        attempts, history = self.retries + 1, ""
        for attempt in range(1, attempts + 1):
            job.stage = f"attempt {attempt} was under way{history}"
            try:
                return await self._attempt(job)
            except RemoteFailure as error:
                failure = error
            except Exception as error:  # whatever a server sends, the request is resolved
                failure = RemoteFailure(f"{type(error).__name__}: {error}")
            if failure.wait is None or attempt == attempts:
                break
            left = self.timeout if job.ends_at is None else job.ends_at - asyncio.get_running_loop().time()
            if failure.wait > left:
                failure = RemoteFailure(f"{failure}; the server asks to wait {failure.wait:g} s, which is too long")
                break
            history = f" after {failure}"
            job.stage = f"it was waiting to try again{history}"
            backoff = min(self.backoff * 2.0 ** (attempt - 1), MAX_BACKOFF)
            await asyncio.sleep(max(failure.wait, backoff * self._jitter.uniform(0.5, 1.0)))
        count = f" (attempt {attempt} of {attempts})" if attempts > 1 else ""
        return self._failed(job, RemoteFailure(f"{failure}{count}", failure.reason))

    def _failed(self, job: _Job, failure: RemoteFailure) -> TextCompletion:
        """A completion that reports a failure, without the API key."""
        sentence = " ".join(f"{self.url}{job.path}: {failure}".split())
        if (key := self.api_key) is not None:
            sentence = sentence.replace(key, "***").replace(json.dumps(key)[1:-1], "***")
        return TextCompletion("", failure.reason, error=sentence[:500])

    async def _attempt(self, job: _Job) -> TextCompletion:
        """Send the request and parse the response, within `timeout`; a failure with `wait` may be retried."""
        try:
            async with asyncio.timeout(self.timeout):
                response, body = await self._post(job)
        except TimeoutError:
            raise RemoteFailure(f"no answer within {self.timeout:g} s", "timeout", 0.0) from None
        except httpx.TransportError as error:
            # The error of the system or of TLS at the bottom of the chain, if there is one.
            cause: BaseException = error
            inner: BaseException | None = error
            while (inner := inner.__cause__ or inner.__context__) is not None:
                cause = inner if isinstance(inner, OSError) else cause
            wait = None if isinstance(cause, ssl.SSLCertVerificationError) else 0.0
            raise RemoteFailure(f"{type(cause).__name__}: {cause}", wait=wait) from None
        if response.status_code != 200:
            is_transient = response.status_code == 429 or response.status_code >= 500
            wait = retry_after(response.headers.get("Retry-After", "")) if is_transient else None
            raise RemoteFailure(
                f"HTTP {response.status_code} {response.reason_phrase}: {failure_message(body)}", wait=wait
            )
        return parse_completion(body, job.request)

    async def _post(self, job: _Job) -> tuple[httpx.Response, bytes]:
        """Send the request and read the response, of at most `max_bytes`."""
        request = self._client.build_request("POST", self.url + job.path, content=job.body)
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            response = await self._client.send(request, stream=True)  # the server may have left an idle connection
        body = bytearray()
        try:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > self.max_bytes:
                    raise RemoteFailure(f"the answer is larger than max_bytes={self.max_bytes}")
        finally:
            await response.aclose()
        return response, bytes(body)
