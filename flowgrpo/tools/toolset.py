"""A set of tools behind one function: a `Call` flows in, a `Result` flows out, whatever the tool does.

    with toolset([calculator(), search(corpus)]) as tools:
        tools.do(Call("tool", "calculator", {"expression": "6 * 7"}))        # Result("42")

    Call -> is there such a tool, do the arguments fit -> kept? -> a thread, up to its deadline -> clean bounded text

What the caller did wrong, and what a tool raises, is `Result(error=True)` with a sentence. `ToolFailure`, and whatever
says that the world failed rather than the call, is `Result(failure=...)`. A tool gets a copy of the arguments, so it
can't change what is recorded. Its time begins when it starts: waiting for one of the `workers` places doesn't count,
and comes to an end, since every holder of a place has a deadline. A tool that doesn't return keeps its thread, which
holds no place and does not keep the interpreter alive; `abandoned` counts such calls.
"""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from hashlib import sha256
from typing import Any, NamedTuple

from flowgrpo.contracts import Call, Result, Tool
from flowgrpo.sandbox import SandboxFailure
from flowgrpo.tools.arguments import check_arguments
from flowgrpo.tools.observe import LEAST, observation, sentence
from flowgrpo.tools.schema import check_name
from flowgrpo.types import BadInput, check_range


class ToolFailure(RuntimeError):
    """The world failed, through no fault of the call: no observation follows from it (F5)."""


class ToolError(ValueError):
    """The call can't be answered as it was made; the message is what the caller observes."""


class Counts(NamedTuple):
    """Numbers of calls of a tool, by what became of them, and the seconds in the tool."""

    calls: int = 0
    errors: int = 0
    failures: int = 0
    cached: int = 0  # answered from what was kept, or by an equal call under way
    seconds: float = 0.0  # in the tool


class _Outcome(NamedTuple):
    """The result of one call, and whether an equal call may be given it."""

    result: Result
    keeps: bool
    seconds: float


class Toolset:
    """Tools that are called by name, from any thread; `toolset` makes it."""

    def __init__(self, tools: Sequence[Tool], seconds: float, most: int, workers: int, kept: int):
        self.tools = tuple(tools)
        self.schemas = tuple(tool.schema for tool in tools)
        self._by_name = {tool.name: tool for tool in tools}
        self._seconds, self._most, self._keep_at_most = seconds, most, kept
        self._places = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()  # guards all below
        self._counts = {tool.name: Counts() for tool in tools}
        self._kept: OrderedDict[str, Future[Result]] = OrderedDict()
        self._abandoned = self._unknown = 0
        self._closed = False

    def __enter__(self) -> "Toolset":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Later calls fail; those under way end by their deadlines. What the tools hold belongs to who made them."""
        with self._lock:
            self._closed = True
            self._kept.clear()

    @property
    def counts(self) -> Mapping[str, Counts]:
        """Numbers of calls up to now, by tool, each by what became of them."""
        with self._lock:
            return dict(self._counts)

    @property
    def unknown(self) -> int:
        """Calls of tools that aren't there."""
        with self._lock:
            return self._unknown

    @property
    def abandoned(self) -> int:
        """Calls that had not returned at their deadline."""
        with self._lock:
            return self._abandoned

    def do(self, call: Call) -> Result:
        """The answer to a call of kind "tool"; takes no longer than the tool's deadline and the wait for a place."""
        if call.kind != "tool":
            raise BadInput(f"a toolset was asked for the {call.kind} {call.name!r}; give it calls of kind 'tool' only")
        tool = self._by_name.get(call.name) if isinstance(call.name, str) else None
        if tool is None:
            with self._lock:
                self._unknown += 1
            there = ", ".join(self._by_name) or "none"
            shown = observation(call.name, LEAST)
            return Result(f"There is no tool {shown!r}. The tools are: {there}.", error=True)
        cached, (result, _, seconds) = self._answer(tool, call.arguments)
        self._count(tool.name, result, cached, seconds)
        return result

    def _answer(self, tool: Tool, given: Mapping[str, Any]) -> tuple[bool, _Outcome]:
        """Whether the result was kept, and the outcome."""
        try:
            if not isinstance(given, Mapping):
                raise TypeError("they must be an object")
            text = json.dumps(dict(given), allow_nan=False, sort_keys=True)
            arguments = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            why = sentence(error) or type(error).__name__
            return False, _Outcome(Result(f"{tool.name}: the arguments are no JSON ({why})", error=True), False, 0.0)
        if wrong := check_arguments(tool.schema, arguments):
            return False, _Outcome(Result(observation(wrong, self._most), error=True), False, 0.0)
        if not tool.pure:
            return False, self._run(tool, arguments)
        return self._once(tool, arguments, sha256(f"{tool.name}\n{text}".encode()).hexdigest())

    def _once(self, tool: Tool, arguments: dict[str, Any], key: str) -> tuple[bool, _Outcome]:
        """The result that is kept, or comes of an equal call under way, or of this one."""
        with self._lock:
            mine = (future := self._kept.get(key)) is None
            if future is None:
                future = self._kept[key] = Future()
            self._kept.move_to_end(key)
            while len(self._kept) > self._keep_at_most:
                self._kept.popitem(last=False)
        if not mine:
            return True, _Outcome(future.result(), True, 0.0)
        outcome = _Outcome(Result("", failure=f"{tool.name}: the call was interrupted"), False, 0.0)
        try:
            outcome = self._run(tool, arguments)
        finally:
            future.set_result(outcome.result)
            if not outcome.keeps:
                with self._lock:
                    if self._kept.get(key) is future:
                        del self._kept[key]
        return False, outcome

    def _run(self, tool: Tool, arguments: dict[str, Any]) -> _Outcome:
        """Call the tool in a thread of its own, up to its deadline."""
        seconds = self._seconds if tool.seconds is None else tool.seconds
        future: Future[tuple[Result, bool]] = Future()
        with self._places:
            if self._closed:
                return _Outcome(Result("", failure=f"{tool.name}: the toolset is closed"), False, 0.0)
            began = time.monotonic()
            try:
                threading.Thread(
                    target=_carry_out, args=(tool, arguments, self._most, future), daemon=True, name=f"tool {tool.name}"
                ).start()
            except RuntimeError as error:
                return _Outcome(Result("", failure=f"{tool.name}: no thread could be started ({error})"), False, 0.0)
            try:
                result, keeps = future.result(min(seconds, threading.TIMEOUT_MAX))
            except TimeoutError:
                with self._lock:
                    self._abandoned += 1
                late = Result(f"{tool.name} did not answer within {seconds:g} s.", error=True)
                return _Outcome(late, False, time.monotonic() - began)
        return _Outcome(result, keeps, time.monotonic() - began)

    def _count(self, name: str, result: Result, cached: bool, seconds: float) -> None:
        with self._lock:
            was = self._counts[name]
            self._counts[name] = Counts(
                was.calls + 1,
                was.errors + result.error,
                was.failures + bool(result.failure),
                was.cached + cached,
                was.seconds + seconds,
            )


def toolset(
    tools: Sequence[Tool], *, seconds: float = 10.0, most: int = 4000, workers: int = 32, kept: int = 4096
) -> Toolset:
    """The tools behind one `do`.

    `seconds` is the deadline of tools without their own, `most` bounds the characters of an observation, `workers`
    calls run at once, and the last `kept` results of pure tools are given again to equal calls.
    """
    names = [tool.name for tool in tools]
    for name in names:
        check_name(name)
        if names.count(name) > 1:
            raise BadInput(
                f"toolset: {names.count(name)} tools are named {name!r}; rename all but one (name=, prefix=)"
            )
    check_range("toolset", "seconds", seconds, 0.0, exclusive=True)
    for setting, value, least in (("most", most, LEAST), ("workers", workers, 1), ("kept", kept, 1)):
        check_range("toolset", setting, value, least, whole=True)
    return Toolset(tools, seconds, most, workers, kept)


def _carry_out(tool: Tool, arguments: dict[str, Any], most: int, future: "Future[tuple[Result, bool]]") -> None:
    """Settle the future, whatever the tool does; nothing that it raises leaves its thread."""
    answer = Result("", failure=f"{tool.name}: its thread ended without an answer"), False
    try:
        answer = _called(tool.call, tool.name, arguments, most)
    finally:
        future.set_result(answer)


def _called(
    call: Callable[[Mapping[str, Any]], Any], name: str, arguments: Mapping[str, Any], most: int
) -> tuple[Result, bool]:
    """The result of a tool, and whether an equal call may be given it."""
    try:
        return Result(observation(call(arguments), most)), True
    except (ToolFailure, SandboxFailure) as error:
        return Result("", failure=f"{name}: {sentence(error) or type(error).__name__}"), False
    except ToolError as error:
        return Result(sentence(error, most) or f"{name} refused the call.", error=True), True
    except BaseException as error:  # the tool's own thread: an exit or an interrupt raised in it is an error like any
        said = sentence(error)
        words = said if said and isinstance(error, ValueError) else f"{type(error).__name__}{said and ': '}{said}"
        return Result(f"{name}: {words}", error=True), isinstance(error, ValueError)
