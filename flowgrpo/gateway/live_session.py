"""One agent at work, between the server's loop, which has its requests, and the thread that plays its trajectory.

`LiveSession` passes requests on as events, and replies back; `Ended` says how an agent ended.
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
from flowgrpo.gateway.agent_env import answer_from_json
from flowgrpo.gateway.histories import Histories
from flowgrpo.gateway.server import Ending
from flowgrpo.gateway.wire import Answer, Asked, Refusal

REMEMBERED = 16  # answers that are kept for clients that send a request again


@dataclass(frozen=True)
class Ended:
    """How an agent ended."""

    output: str | None = None
    reward: float | None = None
    correct: bool | None = None
    failed: str = ""  # why there is no answer

    def as_json(self) -> dict[str, Any]:
        """As the environment reads it."""
        return {"output": self.output, "reward": self.reward, "correct": self.correct, "failed": self.failed}


@dataclass(eq=False)
class Pending:
    """A request that waits for its answer."""

    asked: Asked | None  # None: it is answered
    future: "Future[Answer]" = field(default_factory=Future)


class LiveSession:
    """An agent at work, between the server's loop, which has its requests, and the thread that plays its trajectory."""

    def __init__(self, task: Any, *, judged: bool = False):
        """Where it is `judged`, its reward comes of its output, and none can be posted."""
        self.name, self.task, self.judged = secrets.token_urlsafe(16), task, judged
        self.events: queue.SimpleQueue[Pending | Ended] = queue.SimpleQueue()
        self.current: Pending | None = None  # what the trajectory's thread is to answer
        self.histories = Histories()
        self.rewarded: Mapping[str, Any] | None = None
        self.over, self.why = False, ""  # it is over, and why
        self.answered = 0
        self._ended, self._posted = False, b""
        self._lock = threading.Lock()
        self._by_identity: dict[bytes, Pending] = {}  # what waits, and the newest of what is answered
        self._stop: Callable[[], Any] = lambda: None  # ends the agent

    # In the server's loop ---------------------------------------------------------------------------------

    async def ask(self, asked: Asked, *, again: bool) -> list[Answer]:
        """Pass a request on, and wait for its answer; one that a client repeats is answered once."""
        if asked.n > 1:
            raise Refusal("n must be 1 within a session, where each answer is a turn", field="n")
        if asked.max_tokens == 0:
            message = "max_tokens must be at least 1 within a session, where each answer is a turn"
            raise Refusal(message, field="max_tokens")
        identity = asked.identity
        with self._lock:
            if self.over or self._ended:
                raise self.ending().refusal()
            pending = self._by_identity.get(identity) if again else None
            if pending is None:
                self._by_identity.pop(identity, None)  # so that the newest are last
                pending = self._by_identity[identity] = Pending(asked)
                self._forget_answers()
                self.events.put(pending)
        try:
            # The turn is counted, whether this client is still there or comes again.
            return [await outcome_of(pending.future)]
        except CancelledError:
            raise self.ending().refusal() from None

    async def reward(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take the reward that the agent gives itself, once."""
        if self.judged:
            message = "this run judges answers itself, so that no reward is posted: end with an answer"
            raise Refusal(message, code="reward_not_used", field="reward")
        reward, correct = read_reward(given)
        with self._lock:
            if self.over:
                raise self.ending().refusal()
            if self.rewarded is not None:
                raise Refusal("the session has its reward: it is given once", status=409, code="reward_given")
            self.rewarded = {"reward": reward, "correct": correct}
        return {"session": self.name, "reward": reward}

    async def end(self) -> None:
        """End the agent from outside."""
        self._stop()

    def end_with(self, ended: Ended, posted: bytes = b"") -> None:
        """End the session from the server's side, once; `posted` is a digest of the request that does so."""
        with self._lock:
            if self.over or self._ended:
                raise self.ending().refusal()
            self._ended, self._posted = True, posted
        self.events.put(ended)

    def describe(self) -> Mapping[str, Any]:
        """How far it is."""
        return {"session": self.name, "answered": self.answered, "over": self.over}

    def ending(self) -> Ending:
        """How it ended."""
        return Ending(self.why)

    def when_over(self, act: Callable[[], None]) -> None:
        """Whoever runs the agent takes the session from the gateway."""

    def _forget_answers(self) -> None:
        """Drop what was answered long ago; whatever waits stays."""
        answered = [name for name, pending in self._by_identity.items() if pending.future.done()]
        for name in answered[: max(len(answered) - REMEMBERED, 0)]:
            del self._by_identity[name]

    # In the trajectory's thread -----------------------------------------------------------------------------

    def next_event(self, seconds: float) -> dict[str, Any]:
        """Wait for what the agent does next, as the environment hears it."""
        try:
            event = self.events.get(timeout=seconds)
            while isinstance(event, Pending) and (asked := event.asked) is None:  # refused, as the session was closed
                event = self.events.get(timeout=seconds)
        except queue.Empty:
            why = f"the agent asked for nothing and did not end in {seconds:g} s"
            self.close(why)
            self._stop()
            return {"ended": Ended(failed=why).as_json()}
        if isinstance(event, Ended):
            self.close(event.failed)
            return {"ended": self._with_reward(event).as_json()}
        self.current = event
        return {"asks": self._asks(asked, whole=False)}

    def reply(self, reply: Mapping[str, Any], completion: Completion | None) -> dict[str, Any] | None:
        """Answer the request, or refuse it. Returns the same request where all of it is wanted; else None."""
        pending = self.current
        assert pending is not None
        asked = pending.asked
        if asked is None:  # refused since, as the session was closed
            return None
        if reply.get("whole"):
            return {"asks": self._asks(asked, whole=True)}
        self.current = None
        if "refuse" in reply:
            refused = reply["refuse"]
            _settle(pending, Refusal(refused["message"], code=refused["code"], field="messages"))
            return None
        answer = answer_from_json(reply["answer"])
        if asked.messages:
            self.histories.answered(asked.messages, asked.tools, answer.message)
        else:
            self.histories.answered_prompt()
        self.answered += 1
        _settle(pending, with_scores(answer, completion))
        return None

    def close(self, why: str = "") -> None:
        """Refuse whatever comes, or still waits, and forget the rest."""
        with self._lock:
            self.over, self.why = True, self.why or why
            waiting = list(self._by_identity.values())
            self._by_identity.clear()
        refusal = self.ending().refusal()
        for pending in waiting:
            _settle(pending, refusal)

    def _with_reward(self, ended: Ended) -> Ended:
        return ended if self.rewarded is None or ended.failed else replace(ended, **self.rewarded)

    def _asks(self, asked: Asked, *, whole: bool) -> dict[str, Any]:
        """A request as the environment hears it: what is new in it, and where it goes on from."""
        how: dict[str, Any] = {"max_tokens": asked.max_tokens, "stop": list(asked.stop)}
        if asked.prompt is not None:
            return how | {"prompt": asked.prompt if isinstance(asked.prompt, str) else list(asked.prompt)}
        place = self.histories.place(asked.messages, asked.tools)
        if whole:
            return how | {
                "kind": "rewrite",
                "after": None,
                "messages": list(map(dict, asked.messages)),
                "tools": list(asked.tools),
            }
        found = how | {"kind": place.kind, "after": place.after, "messages": list(map(dict, place.new))}
        # Tools are in what a context begins with, and answers are read by them.
        return found | {"tools": list(asked.tools)}


def read_reward(given: Mapping[str, Any]) -> tuple[float, bool | None]:
    """The reward of a body, and whether it says that the task is solved; raises `Refusal`."""
    reward, correct = given.get("reward"), given.get("correct")
    try:
        number = math.nan if isinstance(reward, bool) or not isinstance(reward, int | float) else float(reward)
    except OverflowError:  # of an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise Refusal("reward must be a finite number", field="reward")
    if correct is not None and not isinstance(correct, bool):
        raise Refusal("correct must be true or false", field="correct")
    return number, correct


def with_scores(answer: Answer, completion: Completion | None) -> Answer:
    """The answer with the log-probabilities and versions of its tokens, where this completion is where they come
    from."""
    if completion is None or tuple(completion.tokens) != answer.tokens:
        return answer
    scores = tuple(map(float, completion.logp_sampled))
    return replace(answer, logprobs=scores, version=tuple(map(int, completion.version)), reused=completion.reused)


def outcome_of(future: "Future[Any]") -> "asyncio.Future[Any]":
    """Wrap a future that goes on when nobody waits for it any more, be it to an error that nobody hears."""
    wrapped = asyncio.wrap_future(future)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
    return asyncio.shield(wrapped)


def _settle(pending: Pending, outcome: Answer | Refusal) -> None:
    """Answer a request that is not answered yet."""
    pending.asked = None  # its messages are long, and answers are kept for a while
    if pending.future.done():
        return
    with suppress(Exception):  # answered by another thread in this moment
        if isinstance(outcome, Refusal):
            pending.future.set_exception(outcome)
        else:
            pending.future.set_result(outcome)
