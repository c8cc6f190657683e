"""The toolset: whatever a tool does, the answer is a `Result`, within its deadline, and bounded."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowgrpo.contracts import Call, Result, Tool
from flowgrpo.rollout.effects import record_effects
from flowgrpo.sandbox import SandboxFailure
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import MAX_DEPTH, ToolError, ToolFailure, clean_observation, toolset
from flowgrpo.types import BadInput

MANY = 60.0  # seconds after which a wait is a failure


class Mute(Exception):
    def __str__(self):
        raise SystemExit("even its words")


def simple(call, name="x", pure=False, timeout=None):
    """A tool that takes anything."""
    schema = {"name": name, "description": "Does.", "parameters": {"type": "object"}}
    return Tool(name, schema, call, pure, timeout)


def raising(error):
    def call(*_):
        raise error

    return call


def ask(tools, name="x", **arguments):
    return tools.call_tool(Call("tool", name, arguments))


def result_of(call, **settings):
    """The result of a call, in a toolset of this tool alone."""
    with toolset([simple(call)], **settings) as tools:
        return ask(tools)


# Answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ToolError("Say it again."), "Say it again."),
        (ToolError(""), "x refused the call."),
        (ValueError("seven is too many"), "x: seven is too many"),
        (KeyError("a"), "x: KeyError: 'a'"),
        (ZeroDivisionError(), "x: ZeroDivisionError"),
        (SystemExit(3), "x: SystemExit: 3"),
        (KeyboardInterrupt(), "x: KeyboardInterrupt"),
        (Mute(), "x: Mute"),
    ],
)
def test_whatever_a_tool_raises_is_an_error_with_a_sentence(error, words):
    assert result_of(raising(error)) == Result(words, error=True)


@pytest.mark.parametrize("error", [ToolFailure("the line is cut"), SandboxFailure("the line is cut")])
def test_failures_of_the_world_are_no_errors(error):
    assert result_of(raising(error)) == Result("", failure="x: the line is cut")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "(no result)"),
        ("", ""),
        (True, "true"),
        ([1, "é", None], '[1, "é", null]'),
        ({"a": {"b": 1.5}}, '{"a": {"b": 1.5}}'),
        ({1}, "{1}"),
        ([{1}], "[{1}]"),
        (b"caf\xc3\xa9", "café"),
        (b"\x89PNG\r\n\x1a\n\0\0", "(10 bytes of binary data)"),
        (bytes(range(128, 256)) * 100, "(12800 bytes of binary data)"),
        (bytearray(b"abc"), "abc"),
        ("a\r\nb\rc\x00\x1b[31mred\x1b[0m\x07\ud800\tz", "a\nb\nc\ufffdred\ufffd\ufffd\tz"),
        ("\x1b]0;title\x07x", "x"),
        ("Ünïcödé\n\ttext — 中文 🙂",) * 2,
    ],
)
def test_results_of_any_type_become_clean_text(value, text):
    assert result_of(lambda _: value) == Result(text)
    assert clean_observation(text) == text


def test_a_result_that_has_no_text_is_an_error():
    class Stubborn:
        __str__ = raising(RuntimeError("no words for this"))

    assert result_of(lambda _: Stubborn()) == Result("x: RuntimeError: no words for this", error=True)


@pytest.mark.parametrize("value", ["A" * 2500 + "Z" * 2500, b"A" * 10**6 + b"Z" * 10**6], ids=type)
def test_huge_observations_are_cut_in_the_middle(value):
    text = result_of(lambda _: value, max_chars=1000).text
    head, left_out, tail = re.fullmatch(r"(A+)\n\[(\d+) characters are left out here\]\n(Z+)", text).groups()
    assert min(len(head), len(tail)) > 300
    assert len(text) <= 1000
    assert isinstance(value, bytes) or len(head) + int(left_out) + len(tail) == 5000


def test_messages_of_exceptions_are_bounded():
    assert len(result_of(raising(KeyError("y" * 10**7))).text) < 1000
    assert len(result_of(raising(ToolError("y" * 10**7))).text) <= 4000


# Calls ------------------------------------------------------------------------------------------------


def test_an_unknown_tool_is_an_error_that_lists_the_tools():
    with toolset([simple(str, "one"), simple(str, "two")]) as tools:
        result = ask(tools, "three")
        assert result == Result("There is no tool 'three'. The tools are: one, two.", error=True)
        assert len(ask(tools, "a" * 10**6).text) < 1000
        assert ask(tools, ["one"]).error
        with pytest.raises(BadInput, match="role"):  # a mistake of the program
            tools.call_tool(Call("role", "one", {}))
    with toolset([Tool(f"tool_{number}", {}, str) for number in range(20_000)], max_chars=500) as tools:
        assert len(tools.call_tool(Call("tool", "three", {})).text) <= 500


@pytest.mark.parametrize(
    "arguments", [None, "abc", ["a"]] + [{"a": bad} for bad in ({1}, float("nan"), 10**5000, "\ud800")]
)
def test_arguments_that_are_no_json_are_an_error(arguments):
    calls = []
    with toolset([simple(calls.append)]) as tools:
        result = tools.call_tool(Call("tool", "x", arguments))
    assert result.error
    assert "no JSON" in result.text
    assert not calls


def test_the_depth_of_arguments_is_bounded():
    with toolset([simple(lambda _: "fine")]) as tools:
        for depth, error in ((MAX_DEPTH, False), (MAX_DEPTH + 1, True), (900, True)):
            nested = json.loads('{"a":' * depth + "1" + "}" * depth)
            assert tools.call_tool(Call("tool", "x", nested)).error == error


def test_arguments_are_checked_before_the_call():
    def double(number: int) -> int:
        """Doubles."""
        return 2 * number

    with toolset([tool(double)]) as tools:
        assert ask(tools, "double", number=4) == Result("8")
        result = ask(tools, "double", number="4")
        assert result == Result('double: argument "number" must be an integer, not "4"', error=True)


def test_a_tool_cannot_change_recorded_arguments():
    def spoil(arguments):
        arguments["list"].append("spoilt")
        arguments.clear()

    with toolset([simple(spoil)]) as tools:
        call_tool, log = record_effects(tools.call_tool)
        arguments = {"list": [1]}
        call_tool(Call("tool", "x", arguments))
        assert arguments == {"list": [1]}
        assert log[0].call.arguments == {"list": [1]}


# Deadlines --------------------------------------------------------------------------------------------


def test_hanging_tools_time_out_and_starve_no_others():
    """A tool's own deadline goes before that of the set."""
    release = threading.Event()
    hang = [simple(lambda _: release.wait(), name, timeout=timeout) for name, timeout in (("x", 0.05), ("y", None))]
    fine = simple(lambda _: "fine", "z", timeout=MANY)
    with toolset([*hang, fine], timeout=0.1, concurrency=2) as tools:
        for _ in range(3):
            assert ask(tools, "x") == Result("x did not answer within 0.05 s.", error=True)
            assert ask(tools, "y") == Result("y did not answer within 0.1 s.", error=True)
        assert ask(tools, "z") == Result("fine")
    abandoned = [thread for thread in threading.enumerate() if thread.name in ("tool x", "tool y")]
    assert len(abandoned) == 6
    assert all(thread.daemon for thread in abandoned)  # they don't keep the interpreter
    release.set()


def test_at_most_concurrency_calls_run_at_once():
    lock, together, now, most = threading.Lock(), threading.Barrier(3), [0], [0]

    def count(_):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        together.wait(MANY)
        with lock:
            now[0] -= 1

    with toolset([simple(count)], timeout=MANY, concurrency=3) as tools, ThreadPoolExecutor(12) as pool:
        assert not any(pool.map(lambda _: ask(tools).error, range(12)))
    assert most[0] == 3


def test_a_closed_set_fails_and_calls_nothing():
    tools = toolset([simple(raising(AssertionError))])
    tools.close()
    assert ask(tools) == Result("", failure="x: the toolset is closed")


# Pure tools -------------------------------------------------------------------------------------------


def test_equal_calls_of_a_pure_tool_run_once():
    calls = []
    say = simple(lambda arguments: calls.append(0) or str(arguments), pure=True)
    with toolset([say, simple(say.call, "y", pure=True)]) as tools:
        first = ask(tools, a=1, b=[2])
        assert tools.call_tool(Call("tool", "x", {"b": [2], "a": 1}, seed=(3,))) == first
        assert len(calls) == 1
        assert ask(tools, "y", a=1, b=[2]) == first
        assert [ask(tools, a=a).text for a in (1, 1.0, True, "1")] == [str({"a": a}) for a in (1, 1.0, True, "1")]
        assert len(calls) == 6


def test_concurrent_equal_calls_of_a_pure_tool_run_once():
    release, asking, calls = threading.Event(), threading.Barrier(9), []
    wait = simple(lambda _: calls.append(0) or (release.wait(MANY) and "done"), pure=True)
    with toolset([wait], timeout=MANY) as tools, ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(lambda: asking.wait(MANY) + 1 and ask(tools)) for _ in range(8)]
        asking.wait(MANY)
        release.set()
        assert [future.result(MANY) for future in futures] == [Result("done")] * 8
        assert len(calls) == 1


@pytest.mark.parametrize(
    ("error", "calls"), [(ToolError("no"), 1), (ValueError("no"), 1), (ToolFailure("no"), 3), (OSError("no"), 3)]
)
def test_errors_of_pure_tools_are_cached_and_failures_not(error, calls):
    made = []
    with toolset([simple(lambda _: made.append(0) or raising(error)(), pure=True)]) as tools:
        assert len({ask(tools) for _ in range(3)}) == 1
    assert len(made) == calls


def test_a_late_result_of_a_pure_tool_is_not_cached():
    release = threading.Event()
    with toolset([simple(lambda _: release.wait() and "done", pure=True)], timeout=0.1) as tools:
        assert ask(tools).error
        release.set()
        assert any(ask(tools) == Result("done") for _ in range(1000))


def test_a_call_that_is_interrupted_leaves_nothing_behind(monkeypatch):
    with toolset([simple(lambda _: "done", pure=True)]) as tools:
        with monkeypatch.context() as patch:
            patch.setattr(tools, "_run", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                ask(tools)
        assert ask(tools) == Result("done")


def test_the_cache_is_bounded_and_evicts_the_oldest():
    calls = []
    with toolset([simple(lambda arguments: calls.append(arguments["a"]), pure=True)], cache_size=2) as tools:
        for a in (1, 2, 1, 3, 1, 2):
            ask(tools, a=a)
    assert calls == [1, 2, 3, 2]


# Settings ---------------------------------------------------------------------------------------------


def test_impure_tools_are_always_called():
    answers = iter([lambda _: "fine", raising(ToolError("no")), raising(ToolFailure("cut"))])
    with toolset([simple(lambda arguments: next(answers)(arguments))]) as tools:
        assert [ask(tools)[:2] for _ in range(3)] == [("fine", False), ("no", True), ("", False)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tools": [simple(str), simple(str)]}, "2 tools are named 'x'"),
        ({"tools": [simple(str, "a b")]}, "'a b'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"max_chars": 10}, "max_chars is 10"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"cache_size": 0}, "cache_size is 0"),
    ],
)
def test_invalid_settings_are_refused(settings, words):
    with pytest.raises(BadInput, match=words):
        toolset(**{"tools": [simple(str)], **settings})
