"""A session of one external agent: it connects the server's event loop with the thread that rolls out its trajectory.

`LiveSession` hands requests to that thread as events and replies back to the server; `SessionEnd` is how the agent
ended.
"""

import asyncio
import math
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from flowgrpo.contracts import Completion
from flowgrpo.gateway.agent_env import response_from_json
from flowgrpo.gateway.histories import Histories
from flowgrpo.gateway.server import Tombstone
from flowgrpo.gateway.wire import ChatRequest, ChatResponse, HTTPError
from flowgrpo.types import JSON

MAX_REMEMBERED = 16  # responses that are remembered for clients that retry


@dataclass(frozen=True)
class SessionEnd:
    """How an external agent ended: its output, a reward that it gives itself, or a failure."""

    output: str | None = None
    reward: float | None = None
    correct: bool | None = None
    failed: str = ""  # why there is no output

    def to_json(self) -> dict[str, JSON]:
        """The `ended` event of the environment."""
        return {"output": self.output, "reward": self.reward, "correct": self.correct, "failed": self.failed}


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for its response."""

    request: ChatRequest | None  # None: it has been answered
    future: "Future[ChatResponse]" = field(default_factory=Future)


class LiveSession:
    """A session of one external agent.

    Coroutines run in the server's event loop and put requests into `events`; the trajectory's thread takes them out by
    `next_event` and answers them by `reply`.
    """

    def __init__(self, task: JSON, *, has_reward: bool = False):
        """If the run `has_reward`, a function of the output, then clients can't post a reward."""
        self.name, self.task, self.has_reward = secrets.token_urlsafe(16), task, has_reward
        self.events: queue.SimpleQueue[PendingRequest | SessionEnd] = queue.SimpleQueue()
        self.current: PendingRequest | None = None  # the request that the trajectory's thread is working on
        self.histories = Histories()
        self.posted_reward: Mapping[str, JSON] | None = None
        self.is_over, self.reason = False, ""
        self.num_answered = 0
        self._has_ended, self._reward_digest = False, b""
        self._lock = threading.Lock()
        self._by_digest: dict[bytes, PendingRequest] = {}  # pending requests, and the newest answered ones
        self._stop: Callable[[], Any] = lambda: None  # ends the agent

    # In the server's event loop ---------------------------------------------------------------------------

    async def complete(self, request: ChatRequest, *, is_retry: bool) -> list[ChatResponse]:
        """Hand a request to the trajectory's thread and wait for the response; a retry gets the same response."""
        if request.n > 1:
            raise HTTPError("n must be 1 within a session, where each answer is a turn", field="n")
        if request.max_tokens == 0:
            message = "max_tokens must be at least 1 within a session, where each answer is a turn"
            raise HTTPError(message, field="max_tokens")
        digest = request.digest
        with self._lock:
            if self.is_over or self._has_ended:
                raise self.tombstone().error()
            pending = self._by_digest.get(digest) if is_retry else None
            if pending is None:
                self._by_digest.pop(digest, None)  # so that the newest are last
                pending = self._by_digest[digest] = PendingRequest(request)
                answered = [key for key, other in self._by_digest.items() if other.future.done()]
                for key in answered[: max(len(answered) - MAX_REMEMBERED, 0)]:
                    del self._by_digest[key]
                self.events.put(pending)
        try:
            # The turn counts even if this client disconnects: it may retry.
            return [await shielded(pending.future)]
        except CancelledError:
            raise self.tombstone().error() from None

    async def post_reward(self, body: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Store the reward that the agent gives itself, once."""
        if self.has_reward:
            message = "this run judges answers itself, so that no reward is posted: end with an answer"
            raise HTTPError(message, code="reward_not_used", field="reward")
        reward, correct = parse_reward(body)
        with self._lock:
            if self.is_over:
                raise self.tombstone().error()
            if self.posted_reward is not None:
                raise HTTPError("the session has its reward: it is given once", status=409, code="reward_given")
            self.posted_reward = {"reward": reward, "correct": correct}
        return {"session": self.name, "reward": reward}

    async def end(self) -> None:
        """End the agent from outside."""
        self._stop()

    def end_with(self, end: SessionEnd, reward_digest: bytes = b"") -> None:
        """End the session from the server's side, once; `reward_digest` is that of the request that ends it."""
        with self._lock:
            if self.is_over or self._has_ended:
                raise self.tombstone().error()
            self._has_ended, self._reward_digest = True, reward_digest
        self.events.put(end)

    def describe(self) -> Mapping[str, JSON]:
        """Progress of the session."""
        return {"session": self.name, "answered": self.num_answered, "over": self.is_over}

    def tombstone(self) -> Tombstone:
        """What remains of the session once it is over."""
        return Tombstone(self.reason)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Nothing: the owner of the agent removes the session from the gateway."""

    # In the trajectory's thread ---------------------------------------------------------------------------

    def next_event(self, timeout: float) -> dict[str, JSON]:
        """Wait for the agent's next request or its end, as the environment's event; a timeout in seconds ends it."""
        try:
            event = self.events.get(timeout=timeout)
            while isinstance(event, PendingRequest) and (request := event.request) is None:  # refused by `close`
                event = self.events.get(timeout=timeout)
        except queue.Empty:
            reason = f"the agent asked for nothing and did not end in {timeout:g} s"
            self.close(reason)
            self._stop()
            return {"ended": SessionEnd(failed=reason).to_json()}
        if isinstance(event, SessionEnd):
            self.close(event.failed)
            if self.posted_reward is not None and not event.failed:
                event = replace(event, **self.posted_reward)
            return {"ended": event.to_json()}
        self.current = event
        return {"asks": self._request_event(request, whole=False)}

    def reply(self, reply: Mapping[str, JSON], completion: Completion | None) -> dict[str, JSON] | None:
        """Answer or refuse the current request; if the reply wants all of its messages, return it again whole."""
        pending = self.current
        assert pending is not None
        request = pending.request
        if request is None:  # refused by `close` meanwhile
            return None
        if reply.get("whole"):
            return {"asks": self._request_event(request, whole=True)}
        self.current = None
        if "refuse" in reply:
            refusal = reply["refuse"]
            _resolve(pending, HTTPError(refusal["message"], code=refusal["code"], field="messages"))
            return None
        response = response_from_json(reply["answer"])
        if request.messages:
            self.histories.add_response(request.messages, request.tools, response.message)
        else:
            self.histories.add_prompt_response()
        self.num_answered += 1
        _resolve(pending, with_logprobs(response, completion))
        return None

    def close(self, reason: str = "") -> None:
        """Refuse pending and later requests, and forget the messages."""
        with self._lock:
            self.is_over, self.reason = True, self.reason or reason
            requests = list(self._by_digest.values())
            self._by_digest.clear()
        error = self.tombstone().error()
        for pending in requests:
            _resolve(pending, error)

    def _request_event(self, request: ChatRequest, *, whole: bool) -> dict[str, JSON]:
        """A request as the environment's event: its new messages, and the response that they continue."""
        event: dict[str, JSON] = {"max_tokens": request.max_tokens, "stop": list(request.stop)}
        if request.prompt is not None:
            return event | {"prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt)}
        if whole:
            event |= {"kind": "rewrite", "after": None, "messages": list(map(dict, request.messages))}
        else:
            match = self.histories.match(request.messages, request.tools)
            event |= {"kind": match.kind, "after": match.after, "messages": list(map(dict, match.new_messages))}
        # Always with the tools: they are rendered at the start of a context, and needed to parse the response.
        return event | {"tools": list(request.tools)}


def parse_reward(body: Mapping[str, JSON]) -> tuple[float, bool | None]:
    """The reward in a body, and whether it says that the task is solved; raises `HTTPError`."""
    reward, correct = body.get("reward"), body.get("correct")
    try:
        number = math.nan if isinstance(reward, bool) or not isinstance(reward, int | float) else float(reward)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise HTTPError("reward must be a finite number", field="reward")
    if correct is not None and not isinstance(correct, bool):
        raise HTTPError("correct must be true or false", field="correct")
    return number, correct


def with_logprobs(response: ChatResponse, completion: Completion | None) -> ChatResponse:
    """Add log-probabilities and versions of the tokens from a completion, if it is the one with these tokens."""
    if completion is None or tuple(completion.tokens) != response.tokens:
        return response
    logprobs = tuple(map(float, completion.logp_sampled))
    versions = tuple(map(int, completion.version))
    return replace(response, logprobs=logprobs, versions=versions, cached_tokens=completion.reused)


def shielded(future: "Future[Any]") -> "asyncio.Future[Any]":
    """Wrap a future so that cancelling the waiter does not cancel it, and an exception nobody awaits is not logged."""
    wrapped = asyncio.wrap_future(future)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
    return asyncio.shield(wrapped)


def _resolve(pending: PendingRequest, result: ChatResponse | HTTPError) -> None:
    """Set the result of a pending request, unless it has one."""
    pending.request = None  # frees its messages, which are long, while the response is still remembered
    if pending.future.done():
        return
    with suppress(Exception):  # resolved by another thread at this moment
        if isinstance(result, HTTPError):
            pending.future.set_exception(result)
        else:
            pending.future.set_result(result)
