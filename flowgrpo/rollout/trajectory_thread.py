"""Run one trajectory in a thread of its own, which calls the environment and the engine one after the other.

    queued -> reset -> ready <-> step -> ended         or held, if a token budget is used up: after a step, or within an
                                                       action

`run_trajectory` is the loop. The thread owns the `TrajectoryWorker`'s builder while it calls the environment or waits
for the engine; every change is made under the lock, unless the worker was stopped meanwhile. From then on the builder
belongs to the thread that stopped it, and this one, which may hang in a call that nothing can end, changes nothing.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from flowgrpo.contracts import Call, Completion, Conversation, EngineClosed, Request, RequestFailed, Result, ToolRunner
from flowgrpo.rollout.effects import DeadlineStop, record_effects
from flowgrpo.rollout.records import PartialTrajectory, to_turn
from flowgrpo.rollout.replay import retrace
from flowgrpo.rollout.trajectory_builder import TrajectoryBuilder, call_reset, call_step, to_key
from flowgrpo.types import BadInput, Status

Submit = Callable[[Request], "Future[Completion]"]
Phase = Literal["queued", "resumed", "reset", "ready", "step", "held", "ended"]


class DeadlineExceeded(BaseException):
    """The worker has reached the point at which a deadline stopped it in an earlier attempt."""


class Cancelled(BaseException):
    """The worker was stopped: the result of its thread is no longer wanted."""


@dataclass(eq=False)
class TrajectoryWorker:
    """A trajectory of a rollout, with the phase that it is in."""

    index: int
    builder: TrajectoryBuilder
    keys: np.ndarray  # integers of the reset's key, then of each turn's
    resumed: PartialTrajectory | None = None  # the trajectory that this one continues
    earlier_stop: DeadlineStop | None = None  # where a deadline stopped it in an earlier attempt
    lock: Any = field(default_factory=threading.Lock)
    phase: Phase = "queued"
    phase_start: float = 0.0
    is_stopped: bool = False
    call: Call | None = None  # the effect that it waits for
    future: "Future[Completion] | None" = None  # the completion that it waits for
    started: float | None = None
    seconds: float = 0.0
    num_sampled: int = 0  # tokens of this rollout
    conversation: Conversation = field(default_factory=Conversation)  # for the engine, until the worker is released

    @property
    def partial_tokens(self) -> Sequence[int]:
        """Tokens of the current action that an earlier rollout sampled."""
        return () if self.builder.partial is None else self.builder.partial.tokens

    @property
    def pending_tool(self) -> str:
        """Name of the tool that it waits for; "" for none."""
        return self.call.name if self.call is not None and self.call.kind == "tool" else ""

    def advance(self, phase: Phase, change: Callable[..., Any] = lambda: None, *arguments) -> Any:
        """Enter a phase after `change(*arguments)`, which may end the trajectory; returns the result of `change`."""
        with self.lock:
            if self.is_stopped:
                raise Cancelled
            result = change(*arguments)
            self.enter(phase)
            return result

    def enter(self, phase: Phase) -> None:
        """Enter a phase, or "ended" if the trajectory has a status; only under the lock."""
        self.phase_start, self.future = time.monotonic(), None
        self.phase = phase if self.builder.status is None else "ended"
        if self.phase in ("ended", "held"):
            self.seconds += self.phase_start - (self.started or self.phase_start)

    def stop(self, phase_start: float | None = None) -> Phase | None:
        """Take the builder from the thread; returns the phase in which it was stopped.

        None, and no effect, if it has ended, is held, was stopped before, or has left the phase that began at
        `phase_start`.
        """
        with self.lock:
            is_over = self.phase in ("ended", "held") or self.is_stopped
            if is_over or (phase_start is not None and self.phase_start != phase_start):
                return None
            self.is_stopped = True
            if self.started is not None:
                self.seconds += time.monotonic() - self.started
            return self.phase

    def check_earlier_stop(self, num_effects: int) -> None:
        """Raise at the point of an earlier attempt's deadline: phase, turn, and effects (-1: in the environment)."""
        stop = self.earlier_stop
        if stop is None or (stop.turns, stop.phase) != (len(self.builder.turns), self.phase):
            return
        if num_effects >= stop.effects:
            raise DeadlineExceeded


def run_trajectory(
    worker: TrajectoryWorker,
    submit: Submit,
    call_tool: ToolRunner,
    temperature: float,
    budget: int | None,
    repetition_limit: int | None,
    post: Callable[[str, Any], None],
) -> None:
    """The worker's thread: reset, then ask the policy and step the environment until the trajectory ends or is held.

    Posts ("ended", worker) at the end or when it is held, ("late", worker) at the point of an earlier deadline,
    ("failed", error) for an error, and nothing if it was stopped.
    """

    def call_watched(call: Call) -> Result:
        """Run an effect, which `worker.call` names while it is awaited."""
        if worker.is_stopped:
            raise Cancelled
        worker.call = call
        worker.check_earlier_stop(len(worker.builder.log))
        result = call_tool(call)
        if worker.is_stopped:
            raise Cancelled
        worker.call = None
        return result

    try:
        call_env, worker.builder.log = record_effects(call_watched)
        _reset_or_resume(worker, call_env)
        while worker.phase not in ("ended", "held"):
            remaining = None if budget is None else budget - worker.num_sampled
            if remaining == 0:
                worker.advance("held")
                break
            completion = _ask_policy(worker, submit, temperature, remaining)
            if completion is None:
                continue  # the trajectory has ended
            _check_completion(worker, completion, remaining)
            builder = worker.builder
            if completion.finish_reason == "budget":
                worker.advance("held", builder.begin_action, completion)
                break
            assert builder.last_step is not None
            turn = to_turn(builder.last_step.tokens, completion, builder.last_step.anchor)
            worker.num_sampled += len(completion.tokens) - len(worker.partial_tokens)
            action = worker.advance("step", builder.add_action, turn)
            if repetition_limit is not None and len(builder.turns) >= repetition_limit:
                actions = [turn.tokens[turn.chosen].tolist() for turn in builder.turns[-repetition_limit:]]
                if all(other == action for other in actions):
                    reason = f"the last {repetition_limit} actions are the same"
                    worker.advance("ended", builder.end_in_call, Status.REPETITION, reason)
                    break
            _call_env(worker, "step", call_step, builder.env, builder.state, action, call_env)
    except Cancelled:
        return
    except DeadlineExceeded:
        post("late", worker)
    except BaseException as error:
        if not worker.is_stopped:
            post("failed", error)
    else:
        post("ended", worker)


def _reset_or_resume(worker: TrajectoryWorker, call_env: ToolRunner) -> None:
    """Reset the environment, or retrace the turns of the trajectory that is resumed."""
    builder, resumed, reset_key = worker.builder, worker.resumed, to_key(worker.keys[0])
    if resumed is None or not (resumed.effect_counts or resumed.turns or resumed.partial_action):
        worker.advance("reset")
        _call_env(worker, "reset", call_reset, builder.env, reset_key, builder.task, call_env)
        return
    worker.advance("resumed")
    retraced = TrajectoryBuilder(builder.env, builder.task, builder.key, builder.group, builder.sample, log=builder.log)
    retrace(retraced, reset_key, resumed.turns, resumed.log, resumed.effect_counts)
    if retraced.status is not None or len(retraced.turns) != len(resumed.turns):
        raise BadInput(f"an unfinished trajectory has ended in {builder.env.name}: resume it with what gave it back")
    if resumed.partial_action is not None:
        if retraced.last_step is None or resumed.partial_action.context != retraced.last_step.tokens:
            raise BadInput(f"{builder.env.name} observed other tokens before the partial action than the record has")
        retraced.begin_action(resumed.partial_action.completion)
    worker.advance("ready", setattr, worker, "builder", retraced)


def _call_env(worker: TrajectoryWorker, name: str, function: Callable, *arguments) -> None:
    """Reset or step the environment and add the result; whatever it raises ends this trajectory and no other."""
    try:
        worker.check_earlier_stop(-1)
        checked = function(*arguments)
    except (Cancelled, DeadlineExceeded):
        raise
    except BaseException as error:
        message = " ".join(traceback.format_exception_only(error)).strip()
        reason = f"{name} raised {message:.500}"
        worker.advance("ended", worker.builder.end_in_call, Status.ABORTED, reason, worker.pending_tool)
        return
    worker.advance("ready", worker.builder.add_observation, checked)


def _ask_policy(worker: TrajectoryWorker, submit: Submit, temperature: float, budget: int | None) -> Completion | None:
    """Request the policy's action and wait for it; None if the context is too long or the engine failed (F5)."""
    builder = worker.builder
    worker.check_earlier_stop(len(builder.log))
    request = builder.request(to_key(worker.keys[1 + len(builder.turns)]), temperature, budget)
    if builder.extends_context:
        request = request._replace(conversation=worker.conversation)
    with worker.lock:
        if worker.is_stopped:
            raise Cancelled
        try:
            future = worker.future = submit(request)
        except EngineClosed:
            raise
        except BadInput as error:
            if builder.partial is not None:  # its context was not too long for the first part of the action
                raise
            builder.end(Status.TOKEN_LIMIT, str(error))
            worker.enter("ended")
            return None
    try:
        return future.result()
    except RequestFailed as error:
        worker.advance("ended", builder.end, Status.TOOL_FAILURE, f"the engine: {error}")
        return None
    except CancelledError:
        if worker.is_stopped:
            raise Cancelled from None
        raise BadInput("a request was cancelled by somebody else: leave the futures of a rollout to it") from None


def _check_completion(worker: TrajectoryWorker, completion: Completion, remaining: int | None) -> None:
    """Raise `BadInput` for a completion that breaks the contract of engines."""
    if worker.is_stopped:
        raise Cancelled
    reason = completion.finish_reason
    if reason not in ("stop", "length") and (remaining is None or reason != "budget"):
        raise BadInput(
            f"the engine ended a request as {reason!r}: keep it open until the rollout is over, and leave deadlines to "
            "the rollout"
        )
    before = list(worker.partial_tokens)
    if list(completion.tokens[: len(before)]) != before:
        raise BadInput("the engine did not continue the partial action: resume it with one that can")
    num_new = len(completion.tokens) - len(before)
    if num_new < 1:
        raise BadInput("the engine returned no token: an action has at least one")
    if remaining is not None and num_new > remaining:
        raise BadInput(
            f"the engine sampled {num_new} tokens where {remaining} were left: a budget needs one that cuts actions"
        )
