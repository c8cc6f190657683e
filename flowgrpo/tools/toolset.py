"""A set of tools behind one function, `Toolset.call_tool`: a `Call` gets a `Result` whatever the tool does.

    with toolset([calculator(), search(corpus)]) as tools:
        tools.call_tool(Call("tool", "calculator", {"expression": "6 * 7"}))        # Result("42")

    Call -> is there such a tool, do the arguments fit -> cached? -> a thread, up to its timeout -> clean bounded text

A mistake of the caller, and what a tool raises, is `Result(error=True)` with a sentence. `ToolFailure`, and whatever
else means that the world failed rather than the call, is `Result(failure=...)`. A tool gets a copy of the arguments, so
it can't change what is recorded. Its timeout starts when it runs: waiting for one of the `concurrency` slots doesn't
count, and ends, since every call that has a slot has a timeout. A tool that doesn't return keeps its thread, which has
no slot and does not keep the interpreter alive. `format_observation` makes the bounded, clean text that a policy
observes of whatever a tool returned.
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
from flowgrpo.types import JSON, BadInput, check_range

ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")  # colours, cursors, titles
UNCLEAN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and surrogates without a pair
MIN_CHARS = 200  # of an observation, so that it can say what is left out
SNIFFED_BYTES = 4096  # that tell text from other data
MAX_SENTENCE = 500  # characters
MAX_DEPTH = 64  # objects and lists within each other in arguments: JSON libraries end at a few hundred


# Observations -------------------------------------------------------------------------------------------


def format_observation(value: Any, max_chars: int) -> str:
    """A tool's result as text of at most `max_chars` characters: head and tail, and how much is left out."""
    text = to_text(value, max_chars)
    if len(text) <= max_chars:
        return clean_observation(text)
    room = max_chars - len(f"\n[{len(text)} characters are left out here]\n")
    head, tail = clean_observation(text[: room - room // 2]), clean_observation(text[len(text) - room // 2 :])
    return f"{head}\n[{len(text) - room} characters are left out here]\n{tail}"


def to_text(value: Any, max_chars: int) -> str:
    """A result as text: JSON if it is a number, list or dict, decoded if it is bytes of text."""
    if value is None:
        return "(no result)"
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        head = data[:SNIFFED_BYTES]
        broken = head.decode("utf-8", "replace").count("\ufffd")
        if b"\0" in head or broken > len(head) // 100 + 1:
            return f"({len(data)} bytes of binary data)"
        if len(data) <= 8 * max_chars:
            return data.decode("utf-8", "replace")
        ends = data[: 4 * max_chars], data[-4 * max_chars :]
        left_out = len(data) - 8 * max_chars
        return f"\n[{left_out} bytes are left out here]\n".join(part.decode("utf-8", "replace") for part in ends)
    if isinstance(value, (bool, int, float, list, tuple, dict)):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)
    return str(value)


def clean_observation(text: str) -> str:
    """Text without escape sequences; other control characters and lone surrogates are replaced by U+FFFD."""
    plain = ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return UNCLEAN.sub("\ufffd", plain)


def error_sentence(error: BaseException, max_chars: int = MAX_SENTENCE) -> str:
    """The message of an exception as clean text of at most `max_chars` characters; "" if it has none, or raises."""
    try:
        return format_observation(str(error).strip(), max_chars)
    except BaseException:  # its __str__ is foreign code, and may raise anything
        return ""


def is_deeper(value: JSON, max_depth: int) -> bool:
    """Whether lists and objects are nested more than `max_depth` deep."""
    level = [value]
    for _ in range(max_depth):
        level = [item for part in level for item in (part.values() if isinstance(part, dict) else part)]
        level = [item for item in level if isinstance(item, (dict, list))]
    return bool(level)


# Calls --------------------------------------------------------------------------------------------------


class ToolFailure(RuntimeError):
    """The world failed, through no fault of the call: no observation follows from it (F5)."""


class ToolError(ValueError):
    """The call can't be answered as it was made; the message is the observation."""


class _Outcome(NamedTuple):
    """The result of a call, and whether an equal call may get it from the cache."""

    result: Result
    is_cacheable: bool = False


class Toolset:
    """Tools that are called by name, from any thread; `toolset` makes it."""

    def __init__(self, tools: Sequence[Tool], timeout: float, max_chars: int, concurrency: int, cache_size: int):
        self.tools = tuple(tools)
        self.schemas = tuple(tool.schema for tool in tools)
        self._by_name = {tool.name: tool for tool in tools}
        self._timeout, self._max_chars, self._cache_size = timeout, max_chars, cache_size
        self._semaphore = threading.BoundedSemaphore(concurrency)
        self._lock = threading.Lock()  # guards all below
        self._cache: OrderedDict[str, Future[Result]] = OrderedDict()
        self._closed = False

    def __enter__(self) -> "Toolset":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Fail later calls; those in flight end by their timeouts. Resources of tools are closed by their owners."""
        with self._lock:
            self._closed = True
            self._cache.clear()

    def call_tool(self, call: Call) -> Result:
        """Answer a call of kind "tool", within the tool's timeout and the wait for a concurrency slot."""
        if call.kind != "tool":
            raise BadInput(f"a toolset was asked for the {call.kind} {call.name!r}; give it calls of kind 'tool' only")
        tool = self._by_name.get(call.name) if isinstance(call.name, str) else None
        if tool is None:
            names = ", ".join(self._by_name) or "none"
            name = format_observation(call.name, MIN_CHARS)
            message = f"There is no tool {name!r}. The tools are: {names}."
            return Result(format_observation(message, self._max_chars), error=True)
        try:
            if not isinstance(call.arguments, Mapping):
                raise TypeError("they must be an object")
            text = json.dumps(dict(call.arguments), allow_nan=False, sort_keys=True, ensure_ascii=False)
            key = sha256(f"{tool.name}\n{text}".encode()).hexdigest()  # refuses surrogates without a pair
            arguments = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            why = error_sentence(error) or type(error).__name__
            return Result(f"{tool.name}: the arguments are no JSON ({why})", error=True)
        if is_deeper(arguments, MAX_DEPTH):
            return Result(f"{tool.name}: the arguments are nested more than {MAX_DEPTH} deep", error=True)
        if fault := check_arguments(tool.schema, arguments):
            return Result(format_observation(fault, self._max_chars), error=True)
        if not tool.pure:
            return self._run(tool, arguments).result
        return self._run_cached(tool, arguments, key)

    def _run_cached(self, tool: Tool, arguments: JSON, key: str) -> Result:
        """The result of an equal call, finished or in flight, or else of this one."""
        with self._lock:
            is_new = (future := self._cache.get(key)) is None
            if future is None:
                future = self._cache[key] = Future()
            self._cache.move_to_end(key)
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        if not is_new:
            return future.result()
        outcome = _Outcome(Result("", failure=f"{tool.name}: the call was interrupted"))
        try:
            outcome = self._run(tool, arguments)
        finally:
            future.set_result(outcome.result)
            if not outcome.is_cacheable:
                with self._lock:
                    if self._cache.get(key) is future:
                        del self._cache[key]
        return outcome.result

    def _run(self, tool: Tool, arguments: JSON) -> _Outcome:
        """Call the tool in a thread of its own, up to its timeout."""
        timeout = self._timeout if tool.timeout is None else tool.timeout
        future: Future[_Outcome] = Future()

        def resolve() -> None:
            """Resolve the future, whatever the tool does; nothing that it raises leaves its thread."""
            outcome = _Outcome(Result("", failure=f"{tool.name}: its thread ended without an answer"))
            try:
                outcome = _call(tool, arguments, self._max_chars)
            finally:
                future.set_result(outcome)

        with self._semaphore:
            if self._closed:
                return _Outcome(Result("", failure=f"{tool.name}: the toolset is closed"))
            try:
                threading.Thread(target=resolve, daemon=True, name=f"tool {tool.name}").start()
            except RuntimeError as error:
                return _Outcome(Result("", failure=f"{tool.name}: no thread could be started ({error})"))
            try:
                return future.result(min(timeout, threading.TIMEOUT_MAX))
            except TimeoutError:
                return _Outcome(Result(f"{tool.name} did not answer within {timeout:g} s.", error=True))


def toolset(
    tools: Sequence[Tool],
    *,
    timeout: float = 10.0,
    max_chars: int = 4000,
    concurrency: int = 32,
    cache_size: int = 4096,
) -> Toolset:
    """Put tools behind one `call_tool`.

    Args:
        tools: of different names.
        timeout: seconds of a call, for tools without a timeout of their own.
        max_chars: characters of an observation.
        concurrency: calls that run at once; others wait.
        cache_size: results of pure tools that are remembered and returned to equal calls.
    """
    for name, count in Counter(tool.name for tool in tools).items():
        check_name(name)
        if count > 1:
            raise BadInput(f"toolset: {count} tools are named {name!r}; rename all but one (name=, prefix=)")
    check_range("toolset", "timeout", timeout, 0.0, exclusive=True)
    check_range("toolset", "max_chars", max_chars, MIN_CHARS, whole=True)
    check_range("toolset", "concurrency", concurrency, 1, whole=True)
    check_range("toolset", "cache_size", cache_size, 1, whole=True)
    return Toolset(tools, timeout, max_chars, concurrency, cache_size)


def _call(tool: Tool, arguments: Mapping[str, JSON], max_chars: int) -> _Outcome:
    """Call a tool: its result, or its error as a result."""
    try:
        return _Outcome(Result(format_observation(tool.call(arguments), max_chars)), True)
    except (ToolFailure, SandboxFailure) as error:
        return _Outcome(Result("", failure=f"{tool.name}: {error_sentence(error) or type(error).__name__}"))
    except ToolError as error:
        text = error_sentence(error, max_chars) or f"{tool.name} refused the call."
        return _Outcome(Result(text, error=True), True)
    except BaseException as error:  # the tool's own thread: an exit or an interrupt raised in it is an error like any
        message = error_sentence(error)
        if not (message and isinstance(error, ValueError)):
            message = f"{type(error).__name__}{message and ': '}{message}"
        return _Outcome(Result(f"{tool.name}: {message}", error=True), isinstance(error, ValueError))
