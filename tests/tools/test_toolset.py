"""The toolset: whatever a tool does, the answer is a `Result`, within its deadline, and bounded."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowgrpo.contracts import Call, Result, Tool
from flowgrpo.rollout.effects import recorded
from flowgrpo.sandbox import SandboxFailure
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import DEEPEST, ToolError, ToolFailure, clean_observation, toolset
from flowgrpo.types import BadInput

MANY = 60.0  # seconds after which a wait is a failure


class Mute(Exception):
    def __str__(self):
        raise SystemExit("even its words")


def simple(call, name="x", pure=False, seconds=None):
    """A tool that takes anything."""
    schema = {"name": name, "description": "Does.", "parameters": {"type": "object"}}
    return Tool(name, schema, call, pure, seconds)


def raising(error):
    def call(*_):
        raise error

    return call


def ask(tools, name="x", **arguments):
    return tools.do(Call("tool", name, arguments))


def do(call, **settings):
    """Make a toolset of one tool, and return its answer to one call."""
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
    assert do(raising(error)) == Result(words, error=True)


@pytest.mark.parametrize("error", [ToolFailure("the line is cut"), SandboxFailure("the line is cut")])
def test_what_the_world_did_is_a_failure_and_no_error(error):
    assert do(raising(error)) == Result("", failure="x: the line is cut")


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
    assert do(lambda _: value) == Result(text)
    assert clean_observation(text) == text


def test_a_result_that_has_no_text_is_an_error():
    class Stubborn:
        __str__ = raising(RuntimeError("no words for this"))

    assert do(lambda _: Stubborn()) == Result("x: RuntimeError: no words for this", error=True)


@pytest.mark.parametrize("value", ["A" * 2500 + "Z" * 2500, b"A" * 10**6 + b"Z" * 10**6], ids=type)
def test_head_and_tail_of_a_huge_observation_are_kept_and_what_is_left_out_is_said(value):
    text = do(lambda _: value, most=1000).text
    head, left_out, tail = re.fullmatch(r"(A+)\n\[(\d+) characters are left out here\]\n(Z+)", text).groups()
    assert min(len(head), len(tail)) > 300
    assert len(text) <= 1000
    assert isinstance(value, bytes) or len(head) + int(left_out) + len(tail) == 5000


def test_long_words_of_an_exception_are_bounded():
    assert len(do(raising(KeyError("y" * 10**7))).text) < 1000
    assert len(do(raising(ToolError("y" * 10**7))).text) <= 4000


# Calls ------------------------------------------------------------------------------------------------


def test_an_unknown_tool_is_an_error_that_lists_the_tools():
    with toolset([simple(str, "one"), simple(str, "two")]) as tools:
        result = ask(tools, "three")
        assert result == Result("There is no tool 'three'. The tools are: one, two.", error=True)
        assert len(ask(tools, "a" * 10**6).text) < 1000
        assert ask(tools, ["one"]).error
        with pytest.raises(BadInput, match="role"):  # a mistake of the program
            tools.do(Call("role", "one", {}))
    with toolset([Tool(f"tool_{number}", {}, str) for number in range(20_000)], most=500) as tools:
        assert len(tools.do(Call("tool", "three", {})).text) <= 500


@pytest.mark.parametrize(
    "arguments", [None, "abc", ["a"]] + [{"a": bad} for bad in ({1}, float("nan"), 10**5000, "\ud800")]
)
def test_arguments_that_are_no_json_are_an_error(arguments):
    seen = []
    with toolset([simple(seen.append)]) as tools:
        result = tools.do(Call("tool", "x", arguments))
    assert result.error
    assert "no JSON" in result.text
    assert not seen


def test_arguments_are_nested_no_deeper_than_others_read():
    with toolset([simple(lambda _: "fine")]) as tools:
        for depth, error in ((DEEPEST, False), (DEEPEST + 1, True), (900, True)):
            nested = json.loads('{"a":' * depth + "1" + "}" * depth)
            assert tools.do(Call("tool", "x", nested)).error == error


def test_arguments_are_checked_before_the_call():
    def double(number: int) -> int:
        """Doubles."""
        return 2 * number

    with toolset([tool(double)]) as tools:
        assert ask(tools, "double", number=4) == Result("8")
        result = ask(tools, "double", number="4")
        assert result == Result('double: argument "number" must be an integer, not "4"', error=True)


def test_a_tool_that_changes_its_arguments_changes_nothing_that_is_recorded():
    def spoil(arguments):
        arguments["list"].append("spoilt")
        arguments.clear()

    with toolset([simple(spoil)]) as tools:
        act, log = recorded(tools.do)
        given = {"list": [1]}
        act(Call("tool", "x", given))
        assert given == {"list": [1]}
        assert log[0].call.arguments == {"list": [1]}


# Deadlines --------------------------------------------------------------------------------------------


def test_tools_that_hang_are_errors_at_their_deadlines_and_starve_no_others():
    """A tool's own deadline goes before that of the set."""
    release = threading.Event()
    hang = [simple(lambda _: release.wait(), name, seconds=own) for name, own in (("x", 0.05), ("y", None))]
    fine = simple(lambda _: "fine", "z", seconds=MANY)
    with toolset([*hang, fine], seconds=0.1, workers=2) as tools:
        for _ in range(3):
            assert ask(tools, "x") == Result("x did not answer within 0.05 s.", error=True)
            assert ask(tools, "y") == Result("y did not answer within 0.1 s.", error=True)
        assert ask(tools, "z") == Result("fine")
    abandoned = [thread for thread in threading.enumerate() if thread.name in ("tool x", "tool y")]
    assert len(abandoned) == 6
    assert all(thread.daemon for thread in abandoned)  # they don't keep the interpreter
    release.set()


def test_no_more_than_workers_calls_run_at_once():
    lock, together, now, most = threading.Lock(), threading.Barrier(3), [0], [0]

    def count(_):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        together.wait(MANY)
        with lock:
            now[0] -= 1

    with toolset([simple(count)], seconds=MANY, workers=3) as tools, ThreadPoolExecutor(12) as pool:
        assert not any(pool.map(lambda _: ask(tools).error, range(12)))
    assert most[0] == 3


def test_a_closed_set_fails_and_calls_nothing():
    tools = toolset([simple(raising(AssertionError))])
    tools.close()
    assert ask(tools) == Result("", failure="x: the toolset is closed")


# Pure tools -------------------------------------------------------------------------------------------


def test_equal_calls_of_a_pure_tool_run_once():
    seen = []
    say = simple(lambda arguments: seen.append(0) or str(arguments), pure=True)
    with toolset([say, simple(say.call, "y", pure=True)]) as tools:
        first = ask(tools, a=1, b=[2])
        assert tools.do(Call("tool", "x", {"b": [2], "a": 1}, seed=(3,))) == first
        assert len(seen) == 1
        assert ask(tools, "y", a=1, b=[2]) == first
        assert [ask(tools, a=a).text for a in (1, 1.0, True, "1")] == [str({"a": a}) for a in (1, 1.0, True, "1")]
        assert len(seen) == 6


def test_concurrent_equal_calls_of_a_pure_tool_run_once():
    release, asking, seen = threading.Event(), threading.Barrier(9), []
    wait = simple(lambda _: seen.append(0) or (release.wait(MANY) and "done"), pure=True)
    with toolset([wait], seconds=MANY) as tools, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(lambda: asking.wait(MANY) + 1 and ask(tools)) for _ in range(8)]
        asking.wait(MANY)
        release.set()
        assert [one.result(MANY) for one in asked] == [Result("done")] * 8
        assert len(seen) == 1


@pytest.mark.parametrize(
    ("error", "calls"), [(ToolError("no"), 1), (ValueError("no"), 1), (ToolFailure("no"), 3), (OSError("no"), 3)]
)
def test_refusals_of_a_pure_tool_are_kept_and_failures_are_not(error, calls):
    seen = []
    with toolset([simple(lambda _: seen.append(0) or raising(error)(), pure=True)]) as tools:
        assert len({ask(tools) for _ in range(3)}) == 1
    assert len(seen) == calls


def test_a_late_answer_of_a_pure_tool_is_not_kept():
    release = threading.Event()
    with toolset([simple(lambda _: release.wait() and "done", pure=True)], seconds=0.1) as tools:
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


def test_what_is_kept_is_bounded_and_the_oldest_goes_first():
    seen = []
    with toolset([simple(lambda arguments: seen.append(arguments["a"]), pure=True)], kept=2) as tools:
        for a in (1, 2, 1, 3, 1, 2):
            ask(tools, a=a)
    assert seen == [1, 2, 3, 2]


# Settings ---------------------------------------------------------------------------------------------


def test_what_is_not_pure_is_always_called():
    answers = iter([lambda _: "fine", raising(ToolError("no")), raising(ToolFailure("cut"))])
    with toolset([simple(lambda arguments: next(answers)(arguments))]) as tools:
        assert [ask(tools)[:2] for _ in range(3)] == [("fine", False), ("no", True), ("", False)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tools": [simple(str), simple(str)]}, "2 tools are named 'x'"),
        ({"tools": [simple(str, "a b")]}, "'a b'"),
        ({"seconds": 0}, "seconds is 0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"most": 10}, "most is 10"),
        ({"workers": 0}, "workers is 0"),
        ({"kept": 0}, "kept is 0"),
    ],
)
def test_settings_that_make_no_set_are_refused(settings, words):
    with pytest.raises(BadInput, match=words):
        toolset(**{"tools": [simple(str)], **settings})
