"""Python as a tool: what is printed or worth something is seen, and whatever a program does is at most an error."""

import sys
import time

import pytest

from flowgrpo.contracts import Call, Result
from flowgrpo.sandbox import Limits, Sandbox
from flowgrpo.tools.python import python, take_off_fences
from flowgrpo.tools.toolset import toolset

SECONDS = 1.0


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, unsafe=True) as box:
        yield box


@pytest.fixture(scope="module")
def run(sandbox):
    """`run(code)` is what an agent gets."""
    with toolset([python(sandbox, limits=Limits(seconds=SECONDS, memory=256 << 20))]) as tools:
        yield lambda code: tools.do(Call("tool", "python", {"code": code}))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("x = 6 * 7\nx", "42"),
        ("print(1)\n2", "1"),
        ("print('a', end='')\n2", "a"),
        ("'text'", "'text'"),
        ("None", "(nothing was printed; use print() to see a result)"),
        ("x = 1", "(nothing was printed; use print() to see a result)"),
        ("import math; math.gcd(12, 18)", "6"),
        ("from __future__ import annotations\nx: int = 3\nx", "3"),
        ("def f(n):\n    return n * f(n - 1) if n else 1\n\nf(20)", "2432902008176640000"),
        ("if __name__ == '__main__':\n    print('main')", "main"),
        ("```python\nprint(1)\n```", "1"),
        ("\n```\n2 + 2\n```\n", "4"),
        ("```py\n2 + 3", "5"),
        ("print('é 🙂')", "é 🙂"),
        ("import sys; print('a'); sys.exit(0)", "a"),
        ("print('\\x1b[31mred\\x00')", "red\ufffd"),
        ("import os; os.write(1, bytes([255, 254]))", "\ufffd\ufffd"),
    ],
)
def test_what_is_printed_or_else_the_last_value_is_the_observation(run, code, text):
    assert run(code) == Result(text)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "print('before')\ndef f():\n    return 1 / 0\nf()",
            ["before\nTraceback", "line 3, in f", "ZeroDivisionError"],
        ),
        ("x = (", ["line 1", "SyntaxError"]),
        ("\0", ["null bytes"]),
        ("'\ud800'", ["surrogates not allowed"]),
        ("def f():\n    f()\nf()", ["RecursionError"]),
        ("raise KeyboardInterrupt", ["KeyboardInterrupt"]),
        ("input()", ["EOFError"]),
        ("open('/etc/passwd')", ["Error"]),
        ("import numpy", ["ModuleNotFoundError"]),
        ("import sys; sys.exit('why')", ["why"]),
        ("import sys; sys.exit(3)", ["exit code 3"]),
        ("import os; os._exit(4)", ["exit code 4"]),
        ("import os; os.kill(os.getpid(), 11)", ["killed by a signal"]),
        ("print('so far', flush=True)\nwhile True: pass", ["so far", "more than 1 s"]),
        ("x = [0] * 10 ** 10", ["more than 256 MB of memory"]),
        ("(" * 100_000, ["more than", "SyntaxError", "MemoryError", "nested"]),
        ("x = 1\n" * 100_000, ["may have 100000"]),
        ("   ", ["There is no code"]),
        ("```python\n```", ["There is no code"]),
        ("import sys\nsys.stdout.close()\n5", [""]),
        ("class A:\n    def __repr__(self):\n        raise ValueError('mute')\nA()", ["ValueError: mute"]),
    ],
)
def test_a_program_that_ends_badly_is_an_error_with_its_last_words(run, code, words):
    result = run(code)
    assert result.error
    assert not result.failure
    assert any(word in result.text for word in words) if len(words) > 3 else all(word in result.text for word in words)


def test_a_traceback_tells_nothing_of_the_machine(run):
    text = run("import json\njson.loads('{')").text
    assert "code.py" in text
    assert "JSONDecodeError" in text
    assert sys.base_prefix not in text
    assert "carry_out" not in text


def test_a_program_that_prints_a_gigabyte_is_stopped_and_bounded(run):
    began = time.monotonic()
    result = run("for _ in range(1024):\n    print('x' * (1 << 20))")
    assert time.monotonic() - began < SECONDS + 2.0
    assert result.error
    assert len(result.text) <= 4000
    assert result.text.startswith("xxx")
    assert result.text.endswith("bytes and was stopped.")


def test_nothing_is_kept_between_calls(run):
    run("import builtins\nbuiltins.left = 1\nopen('left', 'w').write('x')")
    assert "NameError" in run("left").text
    assert run("import os\nos.path.exists('left')") == Result("False")


def test_a_pure_tool_runs_equal_programs_once(sandbox):
    code = "import os\nos.urandom(8).hex()"
    with toolset([python(sandbox, pure=True)]) as tools:
        first = tools.do(Call("tool", "python", {"code": code}))
        assert tools.do(Call("tool", "python", {"code": code})) == first
    with toolset([python(sandbox)]) as tools:
        assert tools.do(Call("tool", "python", {"code": code})) != first


def test_a_sandbox_that_can_not_be_used_is_a_failure():
    with Sandbox(unsafe=True) as box:
        tool = python(box)
    with toolset([tool]) as tools:
        result = tools.do(Call("tool", "python", {"code": "1"}))
    assert "closed" in result.failure
    assert not result.error


@pytest.mark.parametrize(
    ("code", "inside"),
    [
        ("x", "x"),
        ("```\nx\n```", "x"),
        ("```python\nx\ny\n```  \n", "x\ny"),
        ("```python\nx", "x"),
        ("```\n" + " " * 200_000 + "x", " " * 200_000 + "x"),  # at once: nothing can stop what holds the interpreter
        ("```python\nx = '''\n```\n'''\n```", "x = '''\n```\n'''"),
        ("x = '```'", "x = '```'"),
        ("words\n```\nx\n```", "words\n```\nx\n```"),
    ],
    ids=lambda code: repr(code[:16]),
)
def test_fences_around_the_code_are_taken_off(code, inside):
    assert take_off_fences(code) == inside
