"""Text from any OpenAI-compatible server: `TextRequest`s flow in, `TextCompletion`s flow out, in the same order.

    submit -> queue -> one of `concurrency` workers, each with a kept-alive connection -> future

Frozen roles and judges live behind such servers. A clock thread watches every request: at its deadline, the future
gets its answer and the socket is shut down, whatever the server, the network or the queue is doing. What goes
wrong on the way is a completion with finish_reason "error" or "timeout" and one sentence; only a request that is
wrong in itself raises, and then nothing has been sent.
"""

import contextlib
import http.client
import json
import math
import queue
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from flowgrpo.generate.wire import (
    RemoteFailure,
    TextCompletion,
    TextRequest,
    address_of,
    completion_of,
    encode,
    read_body,
    retry_after,
    words_of,
)
from flowgrpo.types import BadInput, check_range

LONGEST_BACKOFF = 30.0  # seconds between two attempts, unless the server asks for more
GRACE = 5.0  # seconds that `close` waits for its threads, whose sockets are already shut down


class Remote(NamedTuple):
    """A server and a model on it. All functions may be called from any thread; `close` ends what is under way."""

    url: str
    model: str
    generate: Callable[[Sequence[TextRequest]], list[TextCompletion]]
    submit: Callable[[TextRequest], "Future[TextCompletion]"]  # cancelling the future ends the request at any moment
    first_token_logprobs: Callable[..., dict[str, float]]  # (messages, top, deadline=None); raises RemoteFailure
    close: Callable[[], None]

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_) -> None:
        self.close()


@dataclass(frozen=True)
class _Settings:
    address: SplitResult
    base: str  # the address with its path, without a trailing slash
    model: str
    api_key: str | None = field(repr=False)
    timeout: float
    retries: int
    concurrency: int
    backoff: float
    max_bytes: int
    context: ssl.SSLContext | None


@dataclass(eq=False)
class _Job:
    """One request under way. What changes does so under the pool's lock, or belongs to the worker that has it."""

    request: TextRequest
    path: str
    body: bytes
    expires: float
    future: "Future[TextCompletion]" = field(default_factory=Future)
    stage: str = "it was still queued"
    cut_at: float = math.inf  # when the attempt ends
    cut: bool = False  # the clock ended the attempt
    sock: socket.socket | None = None  # to shut down
    stopped: threading.Event = field(default_factory=threading.Event)


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
) -> Remote:
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
    if address.scheme == "https":
        context = context or ssl.create_default_context()
    settings = _Settings(address, base, model, api_key, timeout, retries, concurrency, backoff, max_bytes, context)
    pool = _Pool(settings)
    return Remote(base, model, pool.generate, pool.submit, pool.first_token_logprobs, pool.close)


def first_token(completion: TextCompletion) -> dict[str, float]:
    """Log-probabilities of the alternatives at the first token; raise `RemoteFailure` where there are none."""
    if completion.error is not None:
        raise RemoteFailure(completion.error, completion.finish_reason)
    if not completion.logprobs or not completion.logprobs[0].top:
        raise RemoteFailure("the answer holds no first token with alternatives: ask for top_logprobs")
    return dict(completion.logprobs[0].top)


class _Pool:
    """The threads of one `Remote`: workers that talk to the server, and a clock that ends what takes too long."""

    def __init__(self, settings: _Settings):
        self._settings = settings
        self._lock = threading.Condition()  # guards all below, and what changes in jobs; no callback runs under it
        self._jobs: set[_Job] = set()  # whose future is open
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._wake = math.inf  # when the clock looks next
        self._closed = False
        self._gone = TextCompletion("", "cancelled", error=f"{settings.base}: closed before it answered")
        self._jitter = random.Random()  # its own: nobody's seeded stream moves

    def generate(self, requests: Sequence[TextRequest]) -> list[TextCompletion]:
        """The completions of `requests`, in their order. `BadInput` if one can't be sent; then none is."""
        jobs = []
        for i, request in enumerate(requests):
            try:
                jobs.append(self._job(request))
            except BadInput as error:
                raise BadInput(f"request {i}: {error}") from None
        try:
            return [future.result() for future in [self._start(job) for job in jobs]]
        finally:
            for job in jobs:
                job.future.cancel()

    def submit(self, request: TextRequest) -> "Future[TextCompletion]":
        """The future of one completion. Cancelling it takes it from the queue, or cuts its connection."""
        return self._start(self._job(request))

    def first_token_logprobs(
        self, messages: Sequence[Mapping[str, Any]], top: int, *, deadline: float | None = None
    ) -> dict[str, float]:
        """Log-probabilities of the `top` likeliest first tokens of an answer, at temperature 1."""
        if top < 1:
            raise BadInput(f"top={top!r} must be at least 1")
        request = TextRequest(messages, max_tokens=1, deadline=deadline, top_logprobs=top)
        return first_token(self.submit(request).result())

    def close(self) -> None:
        """End what is under way as "cancelled", and the threads with it. Later requests are "cancelled" too."""
        with self._lock:
            self._closed = True
            jobs, threads = list(self._jobs), self._threads
            self._threads = []
            self._lock.notify_all()
        for job in jobs:
            _settle(job, self._gone)
        for _ in threads:
            self._queue.put(None)
        until = time.monotonic() + GRACE
        for thread in threads:
            if thread is not threading.current_thread():  # a future's callback may close
                thread.join(max(until - time.monotonic(), 0.0))

    def _job(self, request: TextRequest) -> _Job:
        path, body = encode(request, self._settings.model)
        left = math.inf if request.deadline is None else request.deadline
        return _Job(request, path, body, time.monotonic() + left)

    def _start(self, job: _Job) -> "Future[TextCompletion]":
        job.future.add_done_callback(lambda _: self._forget(job))
        with self._lock:
            closed = self._closed
            if not closed:
                self._jobs.add(job)
                self._queue.put(job)
                self._hurry(job.expires)
                self._hire()
        if closed:
            _settle(job, self._gone)
        return job.future

    def _hire(self) -> None:
        """Start the clock with the first request, and workers until there are as many as may be."""
        targets = [self._watch, self._work] if not self._threads else [self._work]
        if len(self._threads) <= self._settings.concurrency:
            for target in targets:
                self._threads.append(threading.Thread(target=target, daemon=True, name=f"remote{target.__name__}"))
                self._threads[-1].start()

    def _forget(self, job: _Job) -> None:
        """Called once, when the future has its answer or is cancelled: let go of all that waits for it."""
        if job.future.cancelled():
            job.future.set_running_or_notify_cancel()  # wakes `concurrent.futures.wait`
        with self._lock:
            self._jobs.discard(job)
            job.stopped.set()
            _shut_down(job.sock)

    # The clock ------------------------------------------------------------------------------------------

    def _hurry(self, moment: float) -> None:
        """Have the clock look at `moment`, if it would sleep longer. The lock is held."""
        if moment < self._wake:
            self._wake = moment
            self._lock.notify_all()

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                late = [job for job in self._jobs if job.expires <= now]
                for job in self._jobs:
                    if job.cut_at <= now:
                        job.cut, job.cut_at = True, math.inf
                        _shut_down(job.sock)
                if not late:
                    self._wake = min((min(job.expires, job.cut_at) for job in self._jobs), default=math.inf)
                    self._lock.wait(None if self._wake == math.inf else min(self._wake - now, threading.TIMEOUT_MAX))
            for job in late:
                message = f"no answer within the deadline of {job.request.deadline:g} s: {job.stage}"
                _settle(job, self._failed(job, RemoteFailure(message, "timeout")))

    # The workers ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        connection = http.client.HTTPConnection(self._settings.address.netloc)
        try:
            while (job := self._queue.get()) is not None:
                if not job.future.done():
                    _settle(job, self._answer(job, connection))
        finally:
            connection.close()

    def _answer(self, job: _Job, connection: http.client.HTTPConnection) -> TextCompletion:
        """Try, wait and try again; the sentence of the last failure is the answer when that doesn't help."""
        attempts, last = self._settings.retries + 1, ""
        for attempt in range(1, attempts + 1):
            job.stage = f"attempt {attempt} was under way{last}"
            try:
                return self._attempt(job, connection)
            except RemoteFailure as failure:
                outcome = failure
            except Exception as error:  # nothing that a server sends may end a worker
                outcome = RemoteFailure(f"{type(error).__name__}: {error}")
            if outcome.wait is None or attempt == attempts:
                break
            left = self._settings.timeout if job.request.deadline is None else job.expires - time.monotonic()
            if outcome.wait > left:
                outcome = RemoteFailure(f"{outcome}; the server asks to wait {outcome.wait:g} s, which is too long")
                break
            last = f" after {outcome}"
            job.stage = f"it was waiting to try again{last}"
            backoff = min(self._settings.backoff * 2.0 ** (attempt - 1), LONGEST_BACKOFF)
            if job.stopped.wait(max(outcome.wait, backoff * self._jitter.uniform(0.5, 1.0))):
                break
        tries = f" (attempt {attempt} of {attempts})" if attempts > 1 else ""
        return self._failed(job, RemoteFailure(f"{outcome}{tries}", outcome.reason))

    def _failed(self, job: _Job, failure: RemoteFailure) -> TextCompletion:
        """The completion that says what went wrong, where, and nothing of the key."""
        sentence = " ".join(f"{self._settings.base}{job.path}: {failure}".split())
        if (key := self._settings.api_key) is not None:
            sentence = sentence.replace(key, "***").replace(json.dumps(key)[1:-1], "***")
        return TextCompletion("", failure.reason, error=sentence[:500])

    def _attempt(self, job: _Job, connection: http.client.HTTPConnection) -> TextCompletion:
        """One request and its answer, within `timeout`; whatever goes wrong is a `RemoteFailure`."""
        with self._lock:
            job.cut, job.cut_at = False, time.monotonic() + self._settings.timeout
            self._hurry(job.cut_at)
        try:
            with self._post(job, connection) as response:
                body = read_body(response, self._settings.max_bytes)
                self._hold(job, None)  # raises where it was cut: an end that we made is not the server's
        except Exception as error:
            self._release(job)
            connection.close()
            raise self._failure(job, error) from None
        finally:
            self._release(job)
        if response.status != 200:
            again = response.status == 429 or response.status >= 500
            wait = retry_after(response.headers.get("Retry-After", "")) if again else None
            raise RemoteFailure(f"HTTP {response.status} {response.reason}: {words_of(body)}", wait=wait)
        return completion_of(body, job.request)

    def _failure(self, job: _Job, error: Exception) -> RemoteFailure:
        """Turn an attempt's error into a `RemoteFailure`: retry after a lost connection or a timeout, not otherwise."""
        if isinstance(error, RemoteFailure):
            return error
        if job.cut or isinstance(error, TimeoutError):
            return RemoteFailure(f"no answer within {self._settings.timeout:g} s", "timeout", 0.0)
        lost = isinstance(error, (OSError, http.client.HTTPException))
        final = not lost or isinstance(error, ssl.SSLCertVerificationError)
        return RemoteFailure(f"{type(error).__name__}: {error}", wait=None if final else 0.0)

    def _post(self, job: _Job, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        """Send the request, on the connection that is open if there is one and it still stands."""
        if connection.sock is not None:
            with contextlib.suppress(ConnectionError):  # the server may have closed it while it was idle
                self._hold(job, connection.sock)
                return self._send(job, connection)
            connection.close()
        self._open(job, connection)
        return self._send(job, connection)

    def _send(self, job: _Job, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        settings = self._settings
        headers = {"Host": settings.address.netloc, "Content-Type": "application/json", "Accept": "application/json"}
        if settings.api_key:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        target = urlsplit(settings.base + job.path).path
        connection.request("POST", target, job.body, headers)
        return connection.getresponse()

    def _open(self, job: _Job, connection: http.client.HTTPConnection) -> None:
        """Connect, and greet in TLS where the scheme is https."""
        self._hold(job, None)  # nothing is opened for a job that has ended
        address, context = self._settings.address, self._settings.context
        port = address.port or (443 if context else 80)
        connection.sock = socket.create_connection((address.hostname, port), timeout=self._settings.timeout)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context:
            connection.sock = context.wrap_socket(
                connection.sock, server_hostname=address.hostname, do_handshake_on_connect=False
            )
            self._hold(job, connection.sock)
            connection.sock.do_handshake()
        self._hold(job, connection.sock)

    def _hold(self, job: _Job, sock: socket.socket | None) -> None:
        """Make `sock` what is shut down when the job ends; raise `TimeoutError` where it has ended already."""
        with self._lock:
            job.sock, left = sock, job.cut_at - time.monotonic()
            if job.cut or job.stopped.is_set() or left <= 0:
                raise TimeoutError
        if sock is not None:
            sock.settimeout(left)

    def _release(self, job: _Job) -> None:
        with self._lock:
            job.sock, job.cut_at = None, math.inf


# What is sent -----------------------------------------------------------------------------------------


def _settle(job: _Job, completion: TextCompletion) -> None:
    """Answer the future, unless it was answered or cancelled first. No lock is held: callbacks run here."""
    with contextlib.suppress(InvalidStateError):
        job.future.set_result(completion)


def _shut_down(sock: socket.socket | None) -> None:
    """Wake whoever waits on the socket, in TLS too; its owner closes it."""
    if sock is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
