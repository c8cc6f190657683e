"""Helpers for tests of hosted rollouts: an engine without a model, a host environment with a tool, and token sums.

The engine answers with tokens that follow from key and context alone, in a thread and by futures that can be cancelled,
as the real one does, at once or in parts; it can be made to wait, to fail and to close.
"""

import json
import threading
import time
from collections import Counter
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

import flowgrpo as fg
from flowgrpo.contracts import Call, EngineClosed, HostEnv, HostObservation, HostStep, Result
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import RecordedTrajectory, RolloutResult, to_json
from flowgrpo.types import COUNTS, BadInput, Fate, Ledger, Status

STOP, MOST, TURNS = 2, 6, 4  # the token that ends an action, tokens of an action, actions


class Engine:
    """Answers one request after the other, but none while it is held, as it is after its first `answers`."""

    def __init__(self, answers: int = -1, longest: int = 1000):
        self.answers, self.longest = answers, longest
        self.lost, self.asked, self.failure = Ledger(), Counter(), None  # asked: whole actions, by their keys
        self.version = 5
        self.delivered = 0  # tokens
        self.requests: list = []
        self._wake, self._queue, self._closed, self._held = threading.Condition(), [], False, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request):
        if len(request.tokens) + request.max_tokens > self.longest:
            raise BadInput(f"{len(request.tokens)} tokens must fit a slot of {self.longest}: shorten the request")
        with self._wake:
            if self._closed:
                raise EngineClosed("the engine is closed: submit before closing it")
            future = Future()
            self._queue.append((request, future))
            self.requests.append(request)
            self._wake.notify()
        return future

    def hold(self, held: bool = True) -> None:
        with self._wake:
            self._held = held
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._closed and (self._held or not self._queue):
                    self._wake.wait()
                if self._closed:
                    break
                request, future = self._queue.pop(0)
            self._answer(request, future, "")
            self.answers -= 1
            if self.answers == 0:
                self.hold()
        for request, future in self._queue:
            self._answer(request, future, "cancelled")

    def _answer(self, request, future, reason: str) -> None:
        whole, begun = sampled(request), request.partial or fg.contracts.Completion([], [], [], "")
        before = len(begun.tokens)
        assert [list(begun.tokens), list(begun.logp_sampled)] == [column[:before] for column in whole]
        assert before < len(whole[0])  # or else it was asked to go on with what has ended
        end = before if reason else len(whole[0]) if request.budget is None else before + request.budget
        tokens, logp = (column[:end] for column in whole)
        new = len(tokens) - before
        if not future.set_running_or_notify_cancel():
            self.lost += Ledger(new, {Fate.DROPPED_CANCELLED: new})
        elif self.failure is not None:
            future.set_exception(self.failure)
        else:
            self.delivered += new
            if len(tokens) == len(whole[0]):
                self.asked[tuple(np.asarray(jax.random.key_data(request.key)).tolist())] += 1
                reason = reason or ("stop" if tokens[-1] == STOP else "length")
            versions = [*begun.version, *[self.version] * new]
            future.set_result(fg.contracts.Completion(tokens, logp, versions, reason or "budget"))


def sampled(request) -> tuple[list[int], list[float]]:
    """Tokens between 2 and 9 and their log-probabilities, by key and context."""
    seed = [*np.asarray(jax.random.key_data(request.key)).tolist(), *request.tokens]
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, MOST + 1))
    tokens = rng.integers(3, 10, size).tolist()
    if size < MOST:
        tokens[-1] = STOP
    return tokens, rng.normal(size=size).astype(np.float32).tolist()


class State(NamedTuple):
    """Of the environment: all actions so far."""

    task: fg.Task
    actions: tuple[tuple[int, ...], ...] = ()


def make_env(*, extends_context: bool = True, name: str = "toy") -> HostEnv:
    """Each action goes to the tool `echo`, which may take its time; one that begins with 3, 7, 11 ... is an answer."""
    return HostEnv(
        name=name,
        tools=("echo",),
        max_turns=TURNS,
        max_tokens=MOST,
        stop_ids=(STOP,),
        reset=partial(_reset, extends_context=extends_context),
        step=partial(_step, extends_context=extends_context),
        anchor=lambda state: len(state.actions),
    )


def _reset(key, task, call_tool, *, extends_context):
    heard = call_tool(
        Call("role", "analyst", {"query": task.query}, tuple(np.asarray(jax.random.key_data(key)).tolist()))
    )
    return State(task), HostObservation([11, *map(int, heard.text.split())], extends_context)


def _step(state, tokens, call_tool, *, extends_context):
    state = state._replace(actions=(*state.actions, tuple(tokens)))
    if tokens[0] % 4 == 3:
        return state, HostStep(None, True, output=f"{state.task.query}: {sum(tokens)}", correct=tokens[0] % 8 == 3)
    heard = call_tool(
        Call("tool", "echo", {"query": state.task.query, "tokens": list(tokens), "turn": len(state.actions)})
    )
    if heard.failure:
        return state, HostStep(None, True, status=Status.TOOL_FAILURE, tool="echo")
    said = [12, *map(int, heard.text.split())]
    context = [11, *(token for action in state.actions for token in action), *said]
    return state, HostStep(
        HostObservation(said if extends_context else context, extends_context), False, tool="echo", error=heard.error
    )


def answer(call: Call) -> Result:
    """Answer as the tool and as the role, with a number that follows from the call."""
    number = sum(map(ord, json.dumps(dict(call.arguments)))) + sum(call.seed)
    return Result(f"{20 + number % 7}", error=number % 5 == 0)


class FakeTools:
    """Effects that are counted, and that do something else for calls of the queries in `instead`."""

    def __init__(self, instead=None, seconds: float = 0.0):
        self.instead, self.seconds, self.calls = instead or {}, seconds, Counter()

    def __call__(self, call: Call) -> Result:
        self.calls[json.dumps([call.name, dict(call.arguments)])] += 1
        time.sleep(self.seconds)
        if call.name == "echo" and call.arguments["query"] in self.instead:
            return self.instead[call.arguments["query"]](call)
        return answer(call)


def tasks_of(groups: int, samples: int, seed: int = 0):
    """(tasks, keys, groups) of a rollout; every query is `g/s`, so that a test can mean one member."""
    tasks = [fg.Task(f"{g}/{s}", f"{g}/{s}", ("1",), "toy") for g in range(groups) for s in range(samples)]
    return tasks, jax.random.split(jax.random.key(seed), len(tasks)), [g for g in range(groups) for _ in range(samples)]


def run(engine: Engine, work, call_tool=answer, *, env: HostEnv | None = None, more=None, **settings) -> RolloutResult:
    """A rollout whose tokens are held to law A6."""
    before = (engine.delivered, engine.lost.generated)
    given = sum(tokens_in(one.all_turns) for one in (more or {}).get("unfinished", ()))
    got = hosted(env or make_env(), engine.submit, call_tool=call_tool, **settings)(*work, **(more or {}))
    check_sums(engine, got, before, given)
    return got


def check_sums(engine: Engine, got: RolloutResult, before=(0, 0), given: int = 0) -> None:
    """generated = in trajectories + given back + dropped, by what the engine says that it generated (A6)."""
    delivered = engine.delivered - before[0] + given
    held = sum(tokens_in(one.turns) for one in got.trajectories) + sum(
        tokens_in(one.all_turns) for one in got.unfinished
    )
    assert delivered == held + got.ledger.check().generated
    kept = [one for one in got.trajectories if one.turns]
    if kept:
        counts_n = np.array([COUNTS[one.status] and one.outcome is not None for one in kept], np.float32)
        weights = np.repeat(counts_n[:, None], max(len(one.turns) for one in kept), axis=1)
        batch = fg.pack(kept, weights, weights, row_length=256)
        ledger = fg.batching.account(kept, weights, batch) + got.ledger + engine.lost
        given_back = sum(tokens_in(one.all_turns) for one in got.unfinished)
        assert ledger.check().generated == delivered + engine.lost.generated - given_back


def tokens_in(turns) -> int:
    return sum(int(np.sum(turn.chosen)) for turn in turns)


def value(played: RecordedTrajectory) -> dict:
    """All of a record but its seconds."""
    return {name: x for name, x in json.loads(to_json(played)).items() if name != "seconds"}


def values(got: RolloutResult) -> list[dict]:
    return [value(one) for one in got.trajectories]


def hang(_: Call) -> Result:
    """Returns long after every test."""
    time.sleep(600)
    raise AssertionError("nothing waits this long")
