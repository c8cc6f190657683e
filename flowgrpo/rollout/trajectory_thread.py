"""Play one trajectory in a thread of its own, which calls the environment and the engine one after the other.

    queued -> reset -> ready <-> step -> ended, or held where a stretch has a budget and it is used up: after a step, or
                                                in the middle of an action

The thread owns the `Member`'s course while it calls the environment or waits for the engine; every change is made under
the lock, unless the member was stopped meanwhile. From then on the course belongs to the thread that stopped it, and
this one, which may hang in a call that nothing can end, changes nothing any more.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from flowgrpo.contracts import Call, Completion, Conversation, Do, EngineClosed, Request, RequestFailed, Result
from flowgrpo.rollout.effects import DeadlineStop, recorded
from flowgrpo.rollout.records import Unfinished, acted
from flowgrpo.rollout.replay import retrace
from flowgrpo.rollout.trajectory_builder import OpenTrajectory, call_reset, call_step, key_of
from flowgrpo.types import BadInput, Status, Turn

Submit = Callable[[Request], "Future[Completion]"]
Phase = Literal["queued", "resumed", "reset", "ready", "step", "held", "ended"]


class Overdue(BaseException):
    """The member has come to where a deadline stopped it, before its process was killed."""


class Stopped(BaseException):
    """The member was stopped: what its thread does is no longer wanted."""


@dataclass(eq=False)
class Member:
    """A trajectory of a rollout."""

    index: int
    course: OpenTrajectory
    keys: np.ndarray  # words of the reset's key, then of each turn's
    given: Unfinished | None = None  # what it is resumed from
    late: DeadlineStop | None = None  # where a deadline stopped it, in an earlier attempt
    lock: Any = field(default_factory=threading.Lock)
    phase: Phase = "queued"
    since: float = 0.0  # when the phase began
    stopped: bool = False
    call: Call | None = None  # the effect that is awaited
    future: "Future[Completion] | None" = None
    started: float | None = None
    seconds: float = 0.0
    said: int = 0  # tokens that the policy chose in this rollout
    conversation: Conversation = field(default_factory=Conversation)  # for the engine, until it is left

    @property
    def begun(self) -> Sequence[int]:
        """Of the action that the engine is asked for, the tokens that an earlier rollout got."""
        return () if self.course.begun is None else self.course.begun.tokens

    def advance(self, phase: Phase, change: Callable[..., Any] = lambda: None, *arguments) -> Any:
        """Go on to a phase with a change of the course, which may end it; returns what the change does."""
        with self.lock:
            if self.stopped:
                raise Stopped
            result = change(*arguments)
            self._enter(phase)
            return result

    def stop(self, since: float | None = None) -> Phase | None:
        """Take the course from the thread; returns the phase in which it was stopped.

        None where it has ended or is held, or is no longer in the phase that began at `since`.
        """
        with self.lock:
            if self.phase in ("ended", "held") or self.stopped or (since is not None and self.since != since):
                return None
            self.stopped = True
            if self.started is not None:
                self.seconds += time.monotonic() - self.started
            return self.phase

    def check_late(self, effects: int) -> None:
        """Raise where a deadline stopped it before, after so many effects; -1 where the environment is called."""
        late = self.late
        if late is None or (late.turns, late.phase) != (len(self.course.turns), self.phase):
            return
        if effects >= late.effects:
            raise Overdue

    def _enter(self, phase: Phase) -> None:
        self.since, self.future = time.monotonic(), None
        self.phase = phase if self.course.status is None else "ended"
        if self.phase in ("ended", "held"):
            self.seconds += self.since - (self.started or self.since)


def play_member(
    member: Member, submit: Submit, do: Do, temperature: float, budget: int | None, repeats: int | None, post: Callable
) -> None:
    """The thread of a member: posts that it ended or is held, or what failed; nothing where it was stopped."""
    try:
        do, member.course.log = recorded(partial(_watched, member, do))
        _begin(member, do)
        while member.phase not in ("ended", "held"):
            left = None if budget is None else budget - member.said
            if left == 0:
                member.advance("held")
                break
            completion = _ask(member, submit, temperature, left)
            if completion is not None:
                _check(member, completion, left)
                if completion.finish_reason == "budget":
                    member.advance("held", member.course.began, completion)
                    break
                action = _take_in(member, completion)
                if repeats is not None and _is_repeated(member.course.turns, repeats):
                    why = f"the last {repeats} actions are the same"
                    member.advance("ended", member.course.cut, Status.REPETITION, why)
                    break
                _call(member, "step", call_step, member.course.env, member.course.state, action, do)
    except Stopped:
        return
    except Overdue:
        post("late", member)
    except BaseException as error:
        if not member.stopped:
            post("failed", error)
    else:
        post("ended", member)


def _begin(member: Member, do: Do) -> None:
    """The reset, or all that a member which is resumed has behind it."""
    course = member.course
    if member.given is None or not (member.given.lens or member.given.turns or member.given.begun):
        member.advance("reset")
        _call(member, "reset", call_reset, course.env, key_of(member.keys[0]), course.task, do)
        return
    member.advance("resumed")
    behind = OpenTrajectory(course.env, course.task, course.key, course.group, course.sample, log=course.log)
    retrace(behind, key_of(member.keys[0]), member.given.turns, member.given.log, member.given.lens)
    if behind.status is not None or len(behind.turns) != len(member.given.turns):
        raise BadInput(f"an unfinished trajectory has ended in {course.env.name}: resume it with what gave it back")
    if member.given.begun is not None:
        if behind.following is None or member.given.begun.said != behind.following.said:
            raise BadInput(f"{course.env.name} says other tokens before the action that was begun than the record has")
        behind.began(member.given.begun.sampled)

    def take() -> None:
        member.course = behind

    member.advance("ready", take)


def _call(member: Member, name: str, function: Callable, *arguments) -> None:
    """A call of the environment; whatever it raises ends this trajectory and no other."""
    try:
        member.check_late(-1)
        following = function(*arguments)
    except (Stopped, Overdue):
        raise
    except BaseException as error:
        said = " ".join(traceback.format_exception_only(error)).strip()
        member.advance("ended", member.course.cut, Status.ABORTED, f"{name} raised {said:.500}", tool_of(member.call))
        return
    member.advance("ready", member.course.heard, following)


def _watched(member: Member, do: Do, call: Call) -> Result:
    """An effect that says what it is while it is awaited."""
    if member.stopped:
        raise Stopped
    member.call = call
    member.check_late(len(member.course.log))
    result = do(call)
    if member.stopped:
        raise Stopped
    member.call = None
    return result


def tool_of(call: Call | None) -> str:
    """The tool that is called; "" where none is."""
    return call.name if call is not None and call.kind == "tool" else ""


def _ask(member: Member, submit: Submit, temperature: float, budget: int | None) -> Completion | None:
    """Ask the engine for the policy's action and wait for it; None where the context has grown too long to ask."""
    course = member.course
    member.check_late(len(course.log))
    request = course.request(key_of(member.keys[1 + len(course.turns)]), temperature, budget)
    if course.appends:
        request = request._replace(conversation=member.conversation)
    with member.lock:
        if member.stopped:
            raise Stopped
        try:
            future = member.future = submit(request)
        except EngineClosed:
            raise
        except BadInput as error:
            if course.begun is not None:  # its context was not too long when it began
                raise
            course.end(Status.TOKEN_LIMIT, str(error))
            member._enter("ended")
            return None
    try:
        return future.result()
    except RequestFailed as error:
        member.advance("ended", course.end, Status.TOOL_FAILURE, f"the engine: {error}")
        return None
    except CancelledError:
        if member.stopped:
            raise Stopped from None
        raise BadInput("a request was cancelled by somebody else: leave the futures of a rollout to it") from None


def _check(member: Member, completion: Completion, left: int | None) -> None:
    """Refuse what no rollout can go on with."""
    if member.stopped:
        raise Stopped
    if completion.finish_reason not in ("stop", "length") and (left is None or completion.finish_reason != "budget"):
        raise BadInput(
            f"the engine ended a request as {completion.finish_reason!r}: keep it open until the rollout is over, and "
            "leave deadlines to the rollout"
        )
    before = list(member.begun)
    if list(completion.tokens[: len(before)]) != before:
        raise BadInput("the engine did not go on with the action that was begun: resume it with one that can")
    new = len(completion.tokens) - len(before)
    if new < 1:
        raise BadInput("the engine answered without a token: an action has at least one")
    if left is not None and new > left:
        raise BadInput(f"the engine sampled {new} tokens where {left} were left: a budget needs one that cuts actions")


def _take_in(member: Member, completion: Completion) -> list[int]:
    """The action, with which the step begins."""
    following = member.course.following
    assert following is not None
    turn = acted(following.said, completion, following.anchor)
    member.said += len(completion.tokens) - len(member.begun)
    return member.advance("step", member.course.acted, turn)


def _is_repeated(turns: Sequence[Turn], times: int) -> bool:
    """Say whether the last so many turns have the same action."""
    actions = [turn.tokens[turn.chosen].tolist() for turn in turns[-times:]]
    return len(actions) == times and all(action == actions[0] for action in actions)
