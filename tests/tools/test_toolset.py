"""The toolset: whatever a tool does, the answer is a `Result`, within its deadline, and bounded."""

import subprocess
import sys
import threading
import time

import pytest

from flowgrpo.contracts import Call, Result, Tool
from flowgrpo.effects import recorded
from flowgrpo.sandbox import SandboxFailure
from flowgrpo.tools.observe import clean
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import Counts, ToolError, ToolFailure, toolset
from flowgrpo.types import BadInput

SLACK = 0.5


class Interrupt(KeyboardInterrupt):
    pass


class Mute(Exception):
    def __str__(self):
        raise SystemExit("even its words")


class Stubborn:
    def __str__(self):
        raise RuntimeError("no words for this")


def simple(call, name="x", pure=False, seconds=None):
    """A tool that takes anything."""
    schema = {"name": name, "description": "Does.", "parameters": {"type": "object"}}
    return Tool(name, schema, call, pure, seconds)


def raising(error):
    def call(_):
        raise error

    return call


def do(call, arguments=None, **settings):
    """What a toolset answers to one call of one tool."""
    with toolset([simple(call)], **settings) as tools:
        return tools.do(Call("tool", "x", arguments or {}))


def test_a_call_is_answered():
    assert do(lambda arguments: f"{arguments['a']}!", {"a": 3}) == Result("3!")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ToolError("Say it again."), "Say it again."),
        (ValueError("seven is too many"), "x: seven is too many"),
        (KeyError("a"), "x: KeyError: 'a'"),
        (ZeroDivisionError(), "x: ZeroDivisionError"),
        (SystemExit(3), "x: SystemExit: 3"),
        (Interrupt("stop"), "x: Interrupt: stop"),
        (KeyboardInterrupt(), "x: KeyboardInterrupt"),
        (GeneratorExit(), "x: GeneratorExit"),
        (RecursionError("deep"), "x: RecursionError: deep"),
        (Mute(), "x: Mute"),
        (ToolError(""), "x refused the call."),
    ],
)
def test_whatever_a_tool_raises_is_an_error_with_a_sentence(error, words):
    assert do(raising(error)) == Result(words, error=True)


@pytest.mark.parametrize("error", [ToolFailure("the line is cut"), SandboxFailure("the line is cut")])
def test_what_the_world_did_is_a_failure_and_no_error(error):
    assert do(raising(error)) == Result("", failure="x: the line is cut")


def test_long_words_of_an_exception_are_bounded():
    result = do(raising(KeyError("y" * 10**7)))
    assert result.error
    assert len(result.text) < 1000
    assert len(do(raising(ToolError("y" * 10**7))).text) <= 4000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "(no result)"),
        ("", ""),
        (42, "42"),
        (True, "true"),
        ([1, "é", None], '[1, "é", null]'),
        ({"a": {"b": 1.5}}, '{"a": {"b": 1.5}}'),
        (
            {
                1,
            },
            "{1}",
        ),
        ([{1}], "[{1}]"),
        (b"caf\xc3\xa9", "café"),
        (b"\x89PNG\r\n\x1a\n\0\0", "(10 bytes of binary data)"),
        (bytes(range(128, 256)) * 100, "(12800 bytes of binary data)"),
        (bytearray(b"abc"), "abc"),
        ("a\r\nb\rc\x00\x1b[31mred\x1b[0m\x07\ud800\tz", "a\nb\nc\ufffdred\ufffd\ufffd\tz"),
        ("\x1b]0;title\x07x", "x"),
    ],
)
def test_results_of_any_type_become_clean_text(value, text):
    assert do(lambda _: value) == Result(text)


def test_a_result_that_has_no_text_is_an_error():
    assert do(lambda _: Stubborn()) == Result("x: RuntimeError: no words for this", error=True)


@pytest.mark.parametrize("make", [lambda: "a" * 10**6 + "z" * 10**6, lambda: b"a" * 10**6 + b"z" * 10**6])
def test_head_and_tail_of_a_huge_observation_are_kept_and_what_is_left_out_is_said(make):
    text = do(lambda _: make(), most=1000).text
    assert len(text) <= 1000
    assert text.startswith("a" * 300)
    assert text.endswith("z" * 300)
    assert "are left out here]" in text


def test_the_characters_left_out_are_counted():
    text = do(lambda _: "b" * 5000, most=1000).text
    left_out = int(text.split("[")[1].split()[0])
    assert text.count("b") + left_out == 5000


def test_a_quarter_of_a_gigabyte_is_bounded_at_once():
    huge = "a" * (1 << 28)
    began = time.monotonic()
    assert len(do(lambda _: huge).text) <= 4000
    assert time.monotonic() - began < 2.0


def test_an_unknown_tool_is_an_error_that_lists_the_tools():
    with toolset([simple(str, "one"), simple(str, "two")]) as tools:
        result = tools.do(Call("tool", "three", {}))
        assert result.error
        assert "'three'" in result.text
        assert "one, two" in result.text
        assert tools.do(Call("tool", "a" * 10**6, {})).error
        assert len(tools.do(Call("tool", "a" * 10**6, {})).text) < 1000
        assert tools.do(Call("tool", ["one"], {})).error  # type: ignore
        assert tools.unknown == 4


@pytest.mark.parametrize(
    "arguments",
    [None, "abc", ["a"], {"a": {1}}, {"a": b"x"}, {"a": float("nan")}, {"a": float("inf")}, {"a": 10**5000}],
)
def test_arguments_that_are_no_json_are_an_error(arguments):
    seen = []
    with toolset([simple(seen.append)]) as tools:
        result = tools.do(Call("tool", "x", arguments))
    assert result.error
    assert "no JSON" in result.text
    assert not seen


def test_deep_arguments_are_an_error():
    deep = []
    for _ in range(10**5):
        deep = [deep]
    with toolset([simple(lambda _: "")]) as tools:
        assert tools.do(Call("tool", "x", {"a": deep})).error


def test_arguments_are_checked_before_the_call():
    def double(number: int) -> int:
        """Doubles."""
        return 2 * number

    with toolset([tool(double)]) as tools:
        assert tools.do(Call("tool", "double", {"number": 4})) == Result("8")
        result = tools.do(Call("tool", "double", {"number": "4"}))
        assert result == Result('double: argument "number" must be an integer, not "4"', error=True)


def test_a_tool_that_changes_its_arguments_changes_nothing_that_is_recorded():
    def spoil(arguments):
        arguments["list"].append("spoilt")
        arguments.clear()
        return "done"

    with toolset([simple(spoil)]) as tools:
        act, log = recorded(tools.do)
        given = {"list": [1]}
        act(Call("tool", "x", given))
        assert given == {"list": [1]}
        assert log[0].call.arguments == {"list": [1]}


def test_calls_of_another_kind_are_a_mistake_of_the_program():
    with toolset([simple(str)]) as tools, pytest.raises(BadInput, match="role"):
        tools.do(Call("role", "x", {}))


# Deadlines --------------------------------------------------------------------------------------------


def test_a_tool_that_hangs_is_an_error_at_its_deadline():
    release = threading.Event()
    with toolset([simple(lambda _: release.wait())], seconds=0.1) as tools:
        began = time.monotonic()
        result = tools.do(Call("tool", "x", {}))
        assert time.monotonic() - began < 0.1 + SLACK
        assert result == Result("x did not answer within 0.1 s.", error=True)
        assert tools.abandoned == 1
        release.set()


def test_a_tools_own_deadline_goes_before_that_of_the_set():
    release = threading.Event()
    slow = simple(lambda _: release.wait(0.3) or "done", seconds=5.0)
    quick = simple(lambda _: release.wait(), "y", seconds=0.05)
    with toolset([slow, quick], seconds=0.1) as tools:
        assert tools.do(Call("tool", "x", {})) == Result("done")
        assert tools.do(Call("tool", "y", {})).error
        release.set()


def test_hanging_calls_do_not_starve_later_ones():
    release = threading.Event()
    with toolset([simple(lambda _: release.wait()), simple(lambda _: "fine", "y")], seconds=0.05, workers=2) as tools:
        for _ in range(6):
            assert tools.do(Call("tool", "x", {})).error
        assert tools.do(Call("tool", "y", {})) == Result("fine")
        assert tools.abandoned == 6
        release.set()


def test_waiting_for_a_place_is_not_the_tools_time():
    with toolset([simple(lambda _: time.sleep(0.15) or "slept")], seconds=0.4, workers=1) as tools:
        assert together(4, lambda: tools.do(Call("tool", "x", {}))) == [Result("slept")] * 4


def test_no_more_than_workers_calls_run_at_once():
    lock, now, most = threading.Lock(), [0], [0]

    def count(_):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return ""

    with toolset([simple(count)], workers=3) as tools:
        together(12, lambda: tools.do(Call("tool", "x", {})))
    assert 1 < most[0] <= 3


def test_an_abandoned_thread_does_not_keep_the_interpreter():
    program = """
import threading
from flowgrpo.contracts import Call, Tool
from flowgrpo.tools.toolset import toolset
hang = Tool("x", {"name": "x", "parameters": {}}, lambda _: threading.Event().wait())
print(toolset([hang], seconds=0.1).do(Call("tool", "x", {})).text)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "x did not answer within 0.1 s.\n"


def test_a_closed_set_fails_and_calls_nothing():
    seen = []
    tools = toolset([simple(seen.append)])
    with tools:
        tools.do(Call("tool", "x", {}))
    assert tools.do(Call("tool", "x", {})) == Result("", failure="x: the toolset is closed")
    assert len(seen) == 1


# Pure tools -------------------------------------------------------------------------------------------


class Counted:
    """A tool's function that counts its calls."""

    def __init__(self, answer):
        self.calls, self._answer, self._lock = 0, answer, threading.Lock()

    def __call__(self, arguments):
        with self._lock:
            self.calls += 1
        return self._answer(arguments)


def test_equal_calls_of_a_pure_tool_run_once():
    counted = Counted(lambda arguments: str(arguments))
    with toolset([simple(counted, pure=True)]) as tools:
        first = tools.do(Call("tool", "x", {"a": 1, "b": [2]}))
        assert tools.do(Call("tool", "x", {"b": [2], "a": 1}, seed=(3,))) == first
        assert counted.calls == 1
        assert [tools.do(Call("tool", "x", {"a": value})).text for value in (1, 1.0, True, "1")] == [
            "{'a': 1}",
            "{'a': 1.0}",
            "{'a': True}",
            "{'a': '1'}",
        ]
        assert counted.calls == 5
        assert tools.counts["x"][:4] == (6, 0, 0, 1)


def test_a_tool_that_is_not_pure_is_always_called():
    counted = Counted(lambda _: "same")
    with toolset([simple(counted)]) as tools:
        for _ in range(3):
            tools.do(Call("tool", "x", {}))
    assert counted.calls == 3


def test_two_pure_tools_do_not_share_what_is_kept():
    with toolset([simple(lambda _: "one", "x", True), simple(lambda _: "two", "y", True)]) as tools:
        assert [tools.do(Call("tool", name, {})).text for name in "xyxy"] == ["one", "two", "one", "two"]


def test_concurrent_equal_calls_of_a_pure_tool_run_once():
    counted = Counted(lambda _: time.sleep(0.1) or "done")
    with toolset([simple(counted, pure=True)]) as tools:
        assert together(16, lambda: tools.do(Call("tool", "x", {}))) == [Result("done")] * 16
        assert counted.calls == 1
        assert tools.counts["x"].cached == 15


@pytest.mark.parametrize(
    ("error", "calls"), [(ToolError("no"), 1), (ValueError("no"), 1), (ToolFailure("no"), 3), (OSError("no"), 3)]
)
def test_refusals_of_a_pure_tool_are_kept_and_failures_are_not(error, calls):
    counted = Counted(raising(error))
    with toolset([simple(counted, pure=True)]) as tools:
        assert len({tools.do(Call("tool", "x", {})) for _ in range(3)}) == 1
    assert counted.calls == calls


def test_a_late_answer_of_a_pure_tool_is_not_kept():
    naps = iter([0.3, 0.0])
    counted = Counted(lambda _: time.sleep(next(naps)) or "done")
    with toolset([simple(counted, pure=True)], seconds=0.1) as tools:
        assert tools.do(Call("tool", "x", {})).error
        assert tools.do(Call("tool", "x", {})) == Result("done")


def test_a_call_that_is_interrupted_leaves_nothing_behind(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with toolset([simple(lambda _: "done", pure=True)]) as tools:
        with monkeypatch.context() as patch:
            patch.setattr(tools, "_run", interrupt)
            with pytest.raises(KeyboardInterrupt):
                tools.do(Call("tool", "x", {}))
        assert tools.do(Call("tool", "x", {})) == Result("done")


def test_what_is_kept_is_bounded_and_the_oldest_goes_first():
    counted = Counted(lambda arguments: str(arguments["a"]))
    with toolset([simple(counted, pure=True)], kept=2) as tools:
        for a in (1, 2, 1, 3, 1, 2):
            assert tools.do(Call("tool", "x", {"a": a})).text == str(a)
    assert counted.calls == 4  # 2 was the oldest when 3 came


def test_counts_say_what_became_of_the_calls():
    answers = iter(["fine", ToolError("no"), ToolFailure("cut")])

    def call(_):
        time.sleep(0.02)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with toolset([simple(call), simple(str, "y")]) as tools:
        for _ in range(3):
            tools.do(Call("tool", "x", {}))
        counts = tools.counts
    assert counts["x"][:4] == (3, 1, 1, 0)
    assert 0.06 <= counts["x"].seconds < 2.0
    assert counts["y"] == Counts()


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


def test_clean_text_stays_as_it_is():
    text = "Ünïcödé\n\ttext — 中文 🙂"
    assert clean(text) == text


def together(count, function):
    """What `count` threads get that call at once."""
    results, barrier = [], threading.Barrier(count)

    def run():
        barrier.wait()
        results.append(function())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
