"""A set of tools behind one function, `Toolset.do`, which answers a `Call` with a `Result` whatever the tool does.

    with toolset([calculator(), search(corpus)]) as tools:
        tools.do(Call("tool", "calculator", {"expression": "6 * 7"}))        # Result("42")

    Call -> is there such a tool, do the arguments fit -> kept? -> a thread, up to its deadline -> clean bounded text

A mistake of the caller, and what a tool raises, is `Result(error=True)` with a sentence. `ToolFailure`, and whatever
says that the world failed rather than the call, is `Result(failure=...)`. A tool gets a copy of the arguments, so it
can't change what is recorded. Its time begins when it starts: waiting for one of the `workers` places doesn't count,
and comes to an end, since every holder of a place has a deadline. A tool that doesn't return keeps its thread, which
holds no place and does not keep the interpreter alive. `observation` makes the bounded, clean text that a policy is
shown of whatever a tool returned.
"""

import contextlib
import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from hashlib import sha256
from typing import Any, NamedTuple

from flowgrpo.contracts import Call, Result, Tool
from flowgrpo.sandbox import SandboxFailure
from flowgrpo.tools.schema import check_arguments, check_name
from flowgrpo.types import BadInput, check_range

ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")  # colours, cursors, titles
UNCLEAN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and surrogates without a pair
LEAST = 200  # characters of an observation, so that what is left out can be said
LOOKED_AT = 4096  # bytes, to tell text from other data
LONGEST_SENTENCE = 500
DEEPEST = 64  # objects and lists within each other in arguments: JSON of others ends at a few hundred


# Observations -------------------------------------------------------------------------------------------


def observation(value: Any, most: int) -> str:
    """Show a tool's result in text of at most `most` characters: head and tail, and how much is left out."""
    text = as_text(value, most)
    if len(text) <= most:
        return clean_observation(text)
    room = most - len(f"\n[{len(text)} characters are left out here]\n")
    head, tail = clean_observation(text[: room - room // 2]), clean_observation(text[len(text) - room // 2 :])
    return f"{head}\n[{len(text) - room} characters are left out here]\n{tail}"


def as_text(value: Any, most: int) -> str:
    """Write a result as text: JSON where it is no text, words where it is binary."""
    if value is None:
        return "(no result)"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _decode(bytes(value), most)
    if isinstance(value, (bool, int, float, list, tuple, dict)):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)
    return str(value)


def clean_observation(text: str) -> str:
    """Drop escape sequences from a text; other control characters and lone surrogates are replaced by U+FFFD."""
    plain = ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return UNCLEAN.sub("\ufffd", plain)


def error_sentence(error: BaseException, most: int = LONGEST_SENTENCE) -> str:
    """Get the message of an exception as clean text of at most `most` characters; "" where it has none, or raises."""
    try:
        return observation(str(error).strip(), most)
    except BaseException:  # its own words raise, and may raise anything
        return ""


def _decode(data: bytes, most: int) -> str:
    """Decode bytes that begin like text; of others, say how many there are."""
    head = data[:LOOKED_AT]
    broken = head.decode("utf-8", "replace").count("\ufffd")
    if b"\0" in head or broken > len(head) // 100 + 1:
        return f"({len(data)} bytes of binary data)"
    if len(data) <= 8 * most:
        return data.decode("utf-8", "replace")
    ends = data[: 4 * most], data[-4 * most :]
    left_out = len(data) - 8 * most
    return f"\n[{left_out} bytes are left out here]\n".join(part.decode("utf-8", "replace") for part in ends)


def is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than `most` deep."""
    level = [value]
    for _ in range(most):
        level = [item for part in level for item in (part.values() if isinstance(part, dict) else part)]
        level = [item for item in level if isinstance(item, (dict, list))]
    return bool(level)


# Calls --------------------------------------------------------------------------------------------------


class ToolFailure(RuntimeError):
    """The world failed, through no fault of the call: no observation follows from it (F5)."""


class ToolError(ValueError):
    """The call can't be answered as it was made; the message is what the caller observes."""


class _Outcome(NamedTuple):
    """The result of one call, and whether an equal call may be given it."""

    result: Result
    keeps: bool = False


class Toolset:
    """Tools that are called by name, from any thread; `toolset` makes it."""

    def __init__(self, tools: Sequence[Tool], seconds: float, most: int, workers: int, kept: int):
        self.tools = tuple(tools)
        self.schemas = tuple(tool.schema for tool in tools)
        self._by_name = {tool.name: tool for tool in tools}
        self._seconds, self._most, self._keep_at_most = seconds, most, kept
        self._places = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()  # guards all below
        self._kept: OrderedDict[str, Future[Result]] = OrderedDict()
        self._closed = False

    def __enter__(self) -> "Toolset":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Have later calls fail; those under way end by their deadlines. What tools hold is closed by who made them."""
        with self._lock:
            self._closed = True
            self._kept.clear()

    def do(self, call: Call) -> Result:
        """Answer a call of kind "tool"; that takes no longer than the tool's deadline and the wait for a place."""
        if call.kind != "tool":
            raise BadInput(f"a toolset was asked for the {call.kind} {call.name!r}; give it calls of kind 'tool' only")
        tool = self._by_name.get(call.name) if isinstance(call.name, str) else None
        if tool is None:
            there = ", ".join(self._by_name) or "none"
            shown = observation(call.name, LEAST)
            return Result(observation(f"There is no tool {shown!r}. The tools are: {there}.", self._most), error=True)
        try:
            if not isinstance(call.arguments, Mapping):
                raise TypeError("they must be an object")
            text = json.dumps(dict(call.arguments), allow_nan=False, sort_keys=True, ensure_ascii=False)
            key = sha256(f"{tool.name}\n{text}".encode()).hexdigest()  # refuses surrogates without a pair
            arguments = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            why = error_sentence(error) or type(error).__name__
            return Result(f"{tool.name}: the arguments are no JSON ({why})", error=True)
        if is_deeper(arguments, DEEPEST):
            return Result(f"{tool.name}: the arguments are nested more than {DEEPEST} deep", error=True)
        if wrong := check_arguments(tool.schema, arguments):
            return Result(observation(wrong, self._most), error=True)
        if not tool.pure:
            return self._run(tool, arguments).result
        return self._once(tool, arguments, key)

    def _once(self, tool: Tool, arguments: dict[str, Any], key: str) -> Result:
        """Get the result that is kept, or comes of an equal call under way, or of this one."""
        with self._lock:
            mine = (future := self._kept.get(key)) is None
            if future is None:
                future = self._kept[key] = Future()
            self._kept.move_to_end(key)
            while len(self._kept) > self._keep_at_most:
                self._kept.popitem(last=False)
        if not mine:
            return future.result()
        outcome = _Outcome(Result("", failure=f"{tool.name}: the call was interrupted"))
        try:
            outcome = self._run(tool, arguments)
        finally:
            future.set_result(outcome.result)
            if not outcome.keeps:
                with self._lock:
                    if self._kept.get(key) is future:
                        del self._kept[key]
        return outcome.result

    def _run(self, tool: Tool, arguments: dict[str, Any]) -> _Outcome:
        """Call the tool in a thread of its own, up to its deadline."""
        seconds = self._seconds if tool.seconds is None else tool.seconds
        future: Future[_Outcome] = Future()
        with self._places:
            if self._closed:
                return _Outcome(Result("", failure=f"{tool.name}: the toolset is closed"))
            try:
                threading.Thread(
                    target=_carry_out, args=(tool, arguments, self._most, future), daemon=True, name=f"tool {tool.name}"
                ).start()
            except RuntimeError as error:
                return _Outcome(Result("", failure=f"{tool.name}: no thread could be started ({error})"))
            try:
                return future.result(min(seconds, threading.TIMEOUT_MAX))
            except TimeoutError:
                return _Outcome(Result(f"{tool.name} did not answer within {seconds:g} s.", error=True))


def toolset(
    tools: Sequence[Tool], *, seconds: float = 10.0, most: int = 4000, workers: int = 32, kept: int = 4096
) -> Toolset:
    """Put tools behind one `do`.

    `seconds` is the deadline of tools without their own, `most` bounds the characters of an observation, `workers`
    calls run at once, and the last `kept` results of pure tools are given again to equal calls.
    """
    for name, times in Counter(tool.name for tool in tools).items():
        check_name(name)
        if times > 1:
            raise BadInput(f"toolset: {times} tools are named {name!r}; rename all but one (name=, prefix=)")
    check_range("toolset", "seconds", seconds, 0.0, exclusive=True)
    for setting, value, least in (("most", most, LEAST), ("workers", workers, 1), ("kept", kept, 1)):
        check_range("toolset", setting, value, least, whole=True)
    return Toolset(tools, seconds, most, workers, kept)


def _carry_out(tool: Tool, arguments: dict[str, Any], most: int, future: "Future[_Outcome]") -> None:
    """Settle the future, whatever the tool does; nothing that it raises leaves its thread."""
    outcome = _Outcome(Result("", failure=f"{tool.name}: its thread ended without an answer"))
    try:
        outcome = _called(tool, arguments, most)
    finally:
        future.set_result(outcome)


def _called(tool: Tool, arguments: Mapping[str, Any], most: int) -> _Outcome:
    """Call a tool -> its result or its error as a result, and whether an equal call may be given it."""
    try:
        return _Outcome(Result(observation(tool.call(arguments), most)), True)
    except (ToolFailure, SandboxFailure) as error:
        return _Outcome(Result("", failure=f"{tool.name}: {error_sentence(error) or type(error).__name__}"))
    except ToolError as error:
        return _Outcome(Result(error_sentence(error, most) or f"{tool.name} refused the call.", error=True), True)
    except BaseException as error:  # the tool's own thread: an exit or an interrupt raised in it is an error like any
        said = error_sentence(error)
        words = said if said and isinstance(error, ValueError) else f"{type(error).__name__}{said and ': '}{said}"
        return _Outcome(Result(f"{tool.name}: {words}", error=True), isinstance(error, ValueError))
