"""Python as a tool: what is printed or worth something is seen, and whatever a program does is at most an error."""

import re
import sys

import pytest

from flowgrpo.contracts import Call, Result
from flowgrpo.sandbox import Limits, Sandbox
from flowgrpo.tools.python import python, strip_fences
from flowgrpo.tools.toolset import toolset

BOUNDS = Limits(seconds=60, memory=256 << 20)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, unsafe=True) as box:
        yield box


@pytest.fixture(scope="module")
def run(sandbox):
    """`run(code)` is what an agent gets."""
    with toolset([python(sandbox, limits=BOUNDS)]) as tools:
        yield lambda code: tools.call_tool(Call("tool", "python", {"code": code}))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("x = 6 * 7\nx", "42"),
        ("print('a', end='')\n2", "a"),
        ("'text'", "'text'"),
        ("None", "(nothing was printed; use print() to see a result)"),
        ("x = 1", "(nothing was printed; use print() to see a result)"),
        ("if __name__ == '__main__':\n    print('main')", "main"),
        ("```python\nprint(1)\n```", "1"),
        ("print('é 🙂')", "é 🙂"),
        ("import sys; print('a'); sys.exit(0)", "a"),
        ("print('\\x1b[31mred\\x00')", "red\ufffd"),
        ("import os; os.write(1, bytes([255, 254]))", "\ufffd\ufffd"),
    ],
)
def test_the_observation_is_the_output_or_the_last_value(run, code, text):
    assert run(code) == Result(text)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "print('before')\ndef f():\n    return 1 / 0\nf()",
            "^before\nTraceback.*line 3, in f.*ZeroDivisionError",
        ),
        ("x = (", "line 1.*SyntaxError"),
        ("\0", "null bytes"),
        ("'\ud800'", "surrogates not allowed"),
        ("def f():\n    f()\nf()", "RecursionError"),
        ("open('/etc/passwd')", "Error"),
        ("import sys; sys.exit('why')", "why"),
        ("import os; os._exit(4)", "exit code 4"),
        ("import os; os.kill(0, 9)", "killed by a signal"),
        ("x = [0] * 10 ** 10", "more than 256 MB of memory"),
        ("(" * 100_000, "more than|SyntaxError|MemoryError|nested"),
        ("x = 1\n" * 100_000, "may have 100000"),
        ("```python\n```", "There is no code"),
        ("import sys\nsys.stdout.close()\n5", ""),
        ("class A:\n    def __repr__(self):\n        raise ValueError('mute')\nA()", "ValueError: mute"),
        ("for _ in range(1024):\n    print('x' * (1 << 20))", "^xxx.*bytes and was stopped.$"),
    ],
)
def test_a_failing_program_is_an_error_with_its_last_lines(run, code, words):
    result = run(code)
    assert result.error
    assert not result.failure
    assert re.search(words, result.text, re.DOTALL)
    assert len(result.text) <= 4000


def test_an_endless_program_is_stopped_and_its_output_kept(sandbox):
    with toolset([python(sandbox, limits=Limits(seconds=2))]) as tools:
        result = tools.call_tool(Call("tool", "python", {"code": "print('so far', flush=True)\nwhile True: pass"}))
    assert result == Result("so far\nThe code ran for more than 2 s and was stopped.", error=True)


def test_a_traceback_tells_nothing_of_the_machine(run):
    text = run("import json\njson.loads('{')").text
    assert "code.py" in text
    assert "JSONDecodeError" in text
    assert sys.base_prefix not in text
    assert "run_cell" not in text


def test_nothing_is_kept_between_calls(run):
    run("import builtins\nbuiltins.left = 1\nopen('left', 'w').write('x')")
    assert "NameError" in run("left").text
    assert run("import os\nos.path.exists('left')") == Result("False")


def test_a_sandbox_that_can_not_be_used_is_a_failure():
    with Sandbox(unsafe=True) as box:
        tool = python(box)
    with toolset([tool]) as tools:
        result = tools.call_tool(Call("tool", "python", {"code": "1"}))
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
def test_fences_around_the_code_are_stripped(code, inside):
    assert strip_fences(code) == inside
