"""A client of OpenAI-compatible servers, behind which frozen roles and judges live.

`remote` connects to a model: its `generate` answers `TextRequest`s in their order, and its `submit` gives a future of
one. All requests run on one event loop in a thread of its own, at most `concurrency` of them at once. A deadline holds
whatever the server, the network or the queue is doing. What goes wrong on the way is a completion with finish_reason
"error" or "timeout" and one sentence; only a request that is wrong in itself raises, and then nothing has been sent.
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
from typing import Any

import httpx

from flowgrpo.generate.openai_wire import (
    RemoteFailure,
    TextCompletion,
    TextRequest,
    address_of,
    completion_of,
    encode_request,
    failure_message,
    retry_after,
)
from flowgrpo.types import BadInput, check_range

LONGEST_BACKOFF = 30.0  # seconds between two attempts, unless the server asks for more
GRACE = 5.0  # seconds that `close` waits for its thread, whose requests are already cancelled


@dataclass(eq=False)
class _Job:
    """One request under way."""

    request: TextRequest
    path: str
    body: bytes
    begun: float  # when it was submitted, by the clock of the loop
    stage: str = "it was still queued"

    @property
    def ends_at(self) -> float | None:
        """Say when its deadline is; None where it has none."""
        return None if self.request.deadline is None else self.begun + self.request.deadline


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
    """A model on the server at `url`, whose path is /v1 where it names none.

    `timeout` bounds one attempt, in seconds; a connection error, 429 or 5xx is tried again up to `retries` times,
    after `backoff`, then twice that, and so on, with jitter, or after what the server asks for. An answer of more
    than `max_bytes` is refused. `context` says whom to trust in TLS, if not the system's authorities. No
    environment variable is read and no proxy is used.
    """
    address = address_of(url)
    if not isinstance(model, str) or not model:
        raise BadInput(f"model={model!r} must be the name of a model on the server")
    if api_key is not None and not (isinstance(api_key, str) and re.fullmatch("[!-~]+", api_key)):
        raise BadInput("api_key must be printable ASCII without spaces; None sends no key")
    for name, value in (("timeout", timeout), ("backoff", backoff)):
        check_range("remote", name, value, 0.0, exclusive=True)
    for name, value, least in (("retries", retries, 0), ("concurrency", concurrency, 1), ("max_bytes", max_bytes, 1)):
        check_range("remote", name, value, least, whole=True)
    base = f"{address.scheme}://{address.netloc}{address.path.rstrip('/') or '/v1'}"
    trusted = (context or ssl.create_default_context()) if address.scheme == "https" else False
    return Remote(base, model, api_key, timeout, retries, concurrency, backoff, max_bytes, trusted)


def first_token(completion: TextCompletion) -> dict[str, float]:
    """Log-probabilities of the alternatives at the first token; raise `RemoteFailure` where there are none."""
    if completion.error is not None:
        raise RemoteFailure(completion.error, completion.finish_reason)
    if not completion.logprobs or not completion.logprobs[0].top:
        raise RemoteFailure("the answer holds no first token with alternatives: ask for top_logprobs")
    return dict(completion.logprobs[0].top)


@dataclass(eq=False)
class Remote:
    """A server and a model on it. All methods may be called from any thread; `close` ends what is under way.

    Its event loop, that loop's thread and its connections begin with the first request.
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
        self._gone = TextCompletion("", "cancelled", error=f"{self.url}: closed before it answered")
        self._jitter = random.Random()  # its own: nobody's seeded stream moves

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def generate(self, requests: Sequence[TextRequest]) -> list[TextCompletion]:
        """The completions of `requests`, in their order. `BadInput` if one can't be sent; then none is."""
        encoded = []
        for i, request in enumerate(requests):
            try:
                encoded.append(encode_request(request, self.model))
            except BadInput as error:
                raise BadInput(f"request {i}: {error}") from None
        futures = [self._start(request, *sent) for request, sent in zip(requests, encoded, strict=True)]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def submit(self, request: TextRequest) -> "Future[TextCompletion]":
        """The future of one completion. Cancelling it takes it from the queue, or cuts its connection."""
        return self._start(request, *encode_request(request, self.model))

    def first_token_logprobs(
        self, messages: Sequence[Mapping[str, Any]], top: int, *, deadline: float | None = None
    ) -> dict[str, float]:
        """Log-probabilities of the `top` likeliest first tokens of an answer, at temperature 1."""
        if top < 1:
            raise BadInput(f"top={top!r} must be at least 1")
        request = TextRequest(messages, max_tokens=1, deadline=deadline, top_logprobs=top)
        return first_token(self.submit(request).result())

    def close(self) -> None:
        """End what is under way as "cancelled", and the thread with it. Later requests are "cancelled" too."""
        with self._lock:
            closed, self._closed = self._closed, True
        if self._loop is not None and self._thread is not None:
            if not closed:
                self._loop.call_soon_threadsafe(self._loop.stop)
            if self._thread is not threading.current_thread():  # a future's callback may close
                self._thread.join(GRACE)

    def _start(self, request: TextRequest, path: str, body: bytes) -> "Future[TextCompletion]":
        with self._lock:
            if not self._closed:
                if self._loop is None:
                    self._open()
                assert self._loop is not None
                job = _Job(request, path, body, self._loop.time())
                return asyncio.run_coroutine_threadsafe(self._run(job), self._loop)
        future: Future[TextCompletion] = Future()
        future.set_result(self._gone)
        return future

    def _open(self) -> None:
        """Start the loop in its thread. A client does nothing before its first request."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        limits = httpx.Limits(max_connections=self.concurrency)
        # Deadlines are kept by the loop, over all that an attempt does.
        self._client = httpx.AsyncClient(
            headers=headers, verify=self.context, timeout=None, limits=limits, trust_env=False
        )
        self._free = asyncio.Semaphore(self.concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(self._loop,), daemon=True, name="remote_loop")
        self._thread.start()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until `close` stops it; then end what is left."""
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(self._end())
        finally:
            loop.close()

    async def _end(self) -> None:
        """Cancel what is under way and close the connections."""
        await asyncio.sleep(0)  # what has just come begins, so that it can say that it was cancelled
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.aclose()
        await asyncio.sleep(0)  # for the transports, which close in the next round

    # In the loop ------------------------------------------------------------------------------------------

    async def _run(self, job: _Job) -> TextCompletion:
        """Answer within the deadline of the request, with its time in the queue and all attempts."""
        try:
            async with asyncio.timeout_at(job.ends_at):
                async with self._free:
                    return await self._answer(job)
        except TimeoutError:
            message = f"no answer within the deadline of {job.request.deadline:g} s: {job.stage}"
            return self._failed(job, RemoteFailure(message, "timeout"))
        except asyncio.CancelledError:
            if self._closed:
                return self._gone
            raise

    async def _answer(self, job: _Job) -> TextCompletion:
        """Try, wait and try again; the sentence of the last failure is the answer when that doesn't help."""
        attempts, last = self.retries + 1, ""
        for attempt in range(1, attempts + 1):
            job.stage = f"attempt {attempt} was under way{last}"
            try:
                return await self._attempt(job)
            except RemoteFailure as failure:
                outcome = failure
            except Exception as error:  # nothing that a server sends may go unanswered
                outcome = RemoteFailure(f"{type(error).__name__}: {error}")
            if outcome.wait is None or attempt == attempts:
                break
            left = self.timeout if job.ends_at is None else job.ends_at - asyncio.get_running_loop().time()
            if outcome.wait > left:
                outcome = RemoteFailure(f"{outcome}; the server asks to wait {outcome.wait:g} s, which is too long")
                break
            last = f" after {outcome}"
            job.stage = f"it was waiting to try again{last}"
            backoff = min(self.backoff * 2.0 ** (attempt - 1), LONGEST_BACKOFF)
            await asyncio.sleep(max(outcome.wait, backoff * self._jitter.uniform(0.5, 1.0)))
        tries = f" (attempt {attempt} of {attempts})" if attempts > 1 else ""
        return self._failed(job, RemoteFailure(f"{outcome}{tries}", outcome.reason))

    def _failed(self, job: _Job, failure: RemoteFailure) -> TextCompletion:
        """The completion that says what went wrong, where, and nothing of the key."""
        sentence = " ".join(f"{self.url}{job.path}: {failure}".split())
        if (key := self.api_key) is not None:
            sentence = sentence.replace(key, "***").replace(json.dumps(key)[1:-1], "***")
        return TextCompletion("", failure.reason, error=sentence[:500])

    async def _attempt(self, job: _Job) -> TextCompletion:
        """One request and its answer, within `timeout`; what may pass with time is a `RemoteFailure` with a wait."""
        try:
            async with asyncio.timeout(self.timeout):
                response, body = await self._post(job)
        except TimeoutError:
            raise RemoteFailure(f"no answer within {self.timeout:g} s", "timeout", 0.0) from None
        except httpx.TransportError as error:
            cause = _cause(error)
            wait = None if isinstance(cause, ssl.SSLCertVerificationError) else 0.0
            raise RemoteFailure(f"{type(cause).__name__}: {cause}", wait=wait) from None
        if response.status_code != 200:
            again = response.status_code == 429 or response.status_code >= 500
            wait = retry_after(response.headers.get("Retry-After", "")) if again else None
            raise RemoteFailure(
                f"HTTP {response.status_code} {response.reason_phrase}: {failure_message(body)}", wait=wait
            )
        return completion_of(body, job.request)

    async def _post(self, job: _Job) -> tuple[httpx.Response, bytes]:
        """Send the request and read the answer, of at most `max_bytes`."""
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


def _cause(error: BaseException) -> BaseException:
    """The error of the system or of TLS at the bottom of one of the client's; that itself where there is none."""
    found, inner = error, error
    while (inner := inner.__cause__ or inner.__context__) is not None:
        found = inner if isinstance(inner, OSError) else found
    return found
