"""Code judged by tests: honest code passes, cheats score 0, and bad tests are invalid."""

import math
import tracemalloc
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rewards.cheats import ATTACKS, CHEATS
from rewards.honest import SOLUTIONS
from timing import deadline

from flowgrpo.contracts import RewardResult
from flowgrpo.rewards.code.blocks import find_code
from flowgrpo.rewards.code.child import agree, decode_value, encode_value
from flowgrpo.rewards.code.reward import code, same_output
from flowgrpo.rewards.code.runner import CodeSettings, describe, run_steps
from flowgrpo.rewards.code.split_tests import split_sources
from flowgrpo.sandbox import Limits, RunResult, Sandbox, SandboxFailure
from flowgrpo.types import BadInput, Task


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, unsafe=True) as box:
        yield box


@pytest.fixture(scope="module")
def judge(sandbox):
    """`judge(tests, output)` is the result of the reward."""

    def score(tests, output, seconds=60.0, **metadata):
        return code(sandbox, limits=Limits(seconds=seconds)).score(task(tests, **metadata), output)

    return score


def task(tests, **metadata) -> Task:
    return Task("t", "Add two numbers.", (), "code", {"tests": tests, **metadata})


def fenced(source: str) -> str:
    return f"Here it is.\n```python\n{source}\n```\nDone."


ADD = "def f(a, b):\n    return a + b"
STACK = "class Stack(list):\n    def push(self, item): self.append(item)"

HONEST = {
    "stdin and stdout": ([{"stdin": "2 3\n", "stdout": "5"}, {"stdout": "5\n", "stdin": "1 4"}],
                         "a, b = map(int, input().split())\nprint(a + b)"),
    "calls": ([{"call": "f(2, 3)", "equals": 5}, {"function": "f", "arguments": [[1], [2]], "equals": [1, 2]},
               {"function": "f", "arguments": [1], "keywords": {"b": 0.5}, "equals": 1.5},
               {"call": "print(f(1, 1))", "equals": None}], ADD),
    "a tuple where JSON has a list": ({"call": "f(2)", "equals": [2, [3, None]]}, "def f(x): return x, (3, None)"),
    "asserts": ("from solution import f\nassert f(2, 3) == 5\nassert f([1], []) == [1], 'words'\nassert not f(0, 0)\n"
                "assert f(1, 1) is not None\ngot = f(1, 2) * 10\nassert got == 30", ADD + "\nprint('x' * 100_000)"),
    "imports": ("import math\nfrom collections import Counter\nassert math.isclose(f(.1, .2), .3)\n"
                "assert Counter(f('ab', 'a')) == {'a': 2, 'b': 1}", ADD),
    "names": ("x = [1, 2]\ny, want = x + [3], [1, 2, 3, 4]\nassert f(y, [4]) == want\nassert f(x, x) == x * 2", ADD),
    "an object": ("s = Stack()\ns.push(1)\ns.push((2, 3))\nassert s.pop() == (2, 3)\nassert len(s) == 1", STACK),
    "converters": ("assert list(f(3)) == [0, 1, 2]\nassert sorted(f(2)) == [0, 1]",
                   "def f(n): return iter(range(n))"),
    "comprehensions": ("assert [f(i, i) for i in range(3)] == [0, 2, 4]\n"
                       "assert all(isinstance(x, int) for x in f([1], [2]))", ADD),
    "a loop": ("cases = [((1, 2), 3), ((0, 0), 0)]\nfor args, want in cases:\n    assert f(*args) == want\n"
               "for i in range(3):\n    assert f(i, i) == 2 * i", ADD),
    "functions": ("def test_a():\n    x = 1\n    assert f(x, 1) == 2\n"
                  "def test_b():\n    x = 5\n    assert f(x, 1) == 6\n"
                  "def test_c():\n    assert f(*map(lambda x: x * 2, [1, 2])) == 6\n"
                  "if __name__ == '__main__':\n    test_a()", ADD),
    "names that the code has, too": ("result = f(1, 2)\nmemo = [1]\nassert result == 3\nassert f(memo, [2]) == [1, 2]",
                                     "result, memo = 0, {}\ndef f(a, b):\n    memo[1] = result\n    return a + b"),
    "a helper": ("def close(a, b):\n    assert abs(a - b) < 1e-6\ndef double(x):\n    return 2 * x\n"
                 "close(f(.1, .2), .3)\nassert f(3, 3) == double(3)", ADD),
    "check": ("METADATA = {}\ndef check(candidate):\n    assert candidate(1, 2) == 3\ncheck(f)", ADD),
    "changed in place": ("x = [3, 1]\norder(x)\nassert x == [1, 3]", "def order(x): x.sort()"),
    "changed and measured": ("x = [1, 1, 2]\nn = unique(x)\nassert x[:n] == [1, 2]",
                             "def unique(x):\n    x[:] = sorted(set(x))\n    return len(x)"),
    "an exception": ("import pytest\nwith pytest.raises(ValueError):\n    f(-1)\nassert f(1) == 1",
                     "def f(x):\n    if x < 0:\n        raise ValueError\n    return x"),
    "a dataclass of its own": ("assert total([1, 2]) == 3", "from dataclasses import dataclass\n@dataclass\nclass P:\n"
                               "    x: 'int'\ndef total(xs): return sum(P(x).x for x in xs)"),
    "exact types": ("assert f(0) == {1: (2, b'3', {4}), 'n': None}\nassert f(0)[1][2] == {4}\n"
                    "assert type(f(0)) == dict",
                    "def f(x): return {1: (2, b'3', {4}), 'n': None}"),
    "predicates": ("assert is_even(2)\nassert not is_even(3)\nassert is_even(4) is True and word(1).startswith('w')",
                   "def is_even(x): return x % 2 == 0\ndef word(x): return 'w' * x"),
}  # fmt: skip
HONEST |= SOLUTIONS


@pytest.mark.parametrize("name", HONEST)
def test_honest_code_passes(judge, name):
    tests, source = HONEST[name]
    scored = judge(tests, fenced(source))
    assert scored.value == 1.0, scored


def test_an_entry_point_may_have_the_name_of_a_builtin(judge):
    for tests in ("def check(candidate):\n    assert candidate(2, 3) == 5", "assert sum(2, 3) == 5"):
        assert judge(tests, "def sum(a, b): return a + b", entry_point="sum").value == 1.0


def test_the_value_is_the_fraction_of_tests_passed_or_all_or_nothing(sandbox, judge):
    tests = ["assert f(1, 2) == 3", "assert f(2, 2) == 5", {"call": "f(0, 1)", "equals": 1}, {"stdout": "x"}]
    scored = judge(tests, ADD)
    assert scored.value == 0.5
    assert scored.parts == {"passed": 2.0, "tests": 4.0}
    assert scored.reason.startswith("2 of 4 tests passed; test 1 printed something else: ''")
    strict = code(sandbox, value_of=lambda passed, tests: float(passed == tests))
    assert [strict.score(task(tests[:size]), ADD).value for size in (1, 2)] == [1.0, 0.0]


DOOMED = {
    "import signal, time\n    signal.pthread_sigmask(0, {2, 15})\n    if x == 2: time.sleep(600)": "ran out of time",
    "import os\n    if x == 2: os._exit(0)": "ended the process",
    "if x == 2: raise KeyError(x)": "KeyError",
    "if x == 2: return f(x)": "RecursionError",
    "if x == 2: return [0] * 10**12": "MemoryError",
}


@pytest.mark.parametrize("line", DOOMED, ids=DOOMED.values())
def test_R2_F5_a_call_that_fails_fails_only_its_own_test(judge, line):
    source, seconds = f"def f(x):\n    {line}\n    return x", 2.0 if "sleep" in line else 60.0
    scored = judge("assert f(1) == 1\nassert f(2) == 2\nassert f(3) == 3", source, seconds)
    assert scored.value == pytest.approx(2 / 3)
    assert scored.reason == f"2 of 3 tests passed; line 2: f(2) == 2: {DOOMED[line]}"


def test_R2_a_program_that_hangs_on_one_input_fails_only_that_test(judge):
    tests = [{"stdin": str(number), "stdout": str(number)} for number in range(3)]
    scored = judge(tests, "import time\nx = int(input())\nif x == 1: time.sleep(600)\nprint(x)", 2.0)
    assert (scored.value, scored.reason) == (pytest.approx(2 / 3), "2 of 3 tests passed; test 2 ran out of time")


@pytest.mark.parametrize("value", ["10 ** 10", "'x' * 10", "float('nan')", "10 ** 4500"])
def test_R2_a_value_that_makes_the_check_hang_fails_it(judge, value):
    assert judge("want = 3\nassert 10 ** (10 ** f(1)) == want", f"def f(x): return {value}", 2.0).value == 0.0


@pytest.mark.parametrize("test", [{"stdin": "1", "stdout": "0"}, "assert f(1) == 0"], ids=["stdin", "calls"])
def test_max_failed_runs_bounds_what_a_hanging_program_costs(sandbox, test, monkeypatch):
    runs, run = [], sandbox.run
    monkeypatch.setattr(sandbox, "run", lambda *args, **kwargs: runs.append(run(*args, **kwargs)) or runs[-1])
    reward = code(sandbox, max_failed_runs=2, limits=Limits(seconds=1.0))
    scored = reward.score(task([test] * 50), "import time\ndef f(x): time.sleep(600)\nif __name__ == '__main__': f(1)")
    assert scored.value == 0.0
    assert scored.parts["tests"] == 50.0
    assert [result.ending for result in runs].count("timeout") == 2


CALLS = """
import math
want = 2005
assert f(1000, 5) == 1005
assert math.isclose(f(2000, 5), want)
assert f([3], [1, 2]) == [3] + [1, 2] and abs(f(0, 1) - 1) < 1e-9
assert f('a', 'b').endswith('b')
assert isinstance(f(5, 5), int) and f(5, 5) in (10,)
"""
BY_WAY = (
    [{"stdin": "1000 5\n", "stdout": "1005\n"}, {"stdin": "2000 5\n", "stdout": "2005\n"}],
    [{"call": "f(1000, 5)", "equals": 1005}, {"call": "f(2000, 5)", "equals": 2005}, CALLS],
)


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_scored_as_failures(judge, name):
    for tests in BY_WAY:
        scored = judge(tests, fenced(CHEATS[name].strip()), 2.0)
        assert scored.value == 0.0, scored


# Tests, and programs whose values leave the tests' own lines too few resources.
GREEDY = {
    "memory": ("assert f(1) == 1\nassert f(2) == 2\nx = sum(list(range(2 * 10 ** 6)))\nassert f(4) == 4",
               "from collections import deque\ndef f(x): return [deque() for _ in range(60_000)]"),
    "recursion": ("import sys\nimport json\nn = f(1) + 1\nsys.setrecursionlimit(n)\n"
                  "x = json.dumps([[[[[[[[1]]]]]]]], indent=1)\nassert f(2) == len(x)", "def f(x): return 20"),
    "a context": ("import decimal\nn = f(1) - 1\ndecimal.getcontext().Emax = n\n"
                  "x = decimal.Decimal(10) * 10\nassert f(100) == x", "def f(x): return 1"),
    "an alarm": ("import signal\nn = f(1) * 1\nsignal.setitimer(signal.ITIMER_REAL, n)\n"
                 "x = sum(range(10 ** 7))\nassert f(x) == x", "def f(x): return 1e-3"),
}  # fmt: skip


@pytest.mark.parametrize("name", GREEDY)
def test_values_that_starve_the_tests_score_0(sandbox, name):
    tests, source = GREEDY[name]
    reward = code(sandbox, limits=Limits(seconds=20.0, memory=(100 if name == "memory" else 512) << 20))
    scored = reward.score(task(tests), source)
    assert scored.value == 0.0, scored
    assert reward.score(task(f"{tests}\n1 / 0"), source).value is None, "a line that fails by itself"


@pytest.mark.parametrize("alone", [True, False])
def test_who_is_at_fault_if_the_tests_hang(alone):
    def run(program, stdin="", **_):
        if "def f" in program:
            return RunResult("exited", 0, "-1 = null\n0 = 1\n1 = 1\n", "", 0.0)
        both = "setup 1\ncheck 0\npassed 0\nsetup 3\n"
        return (
            RunResult("timeout", None, both, "", 1.0)
            if stdin or not alone
            else RunResult("exited", 0, "end 0\n", "", 0.0)
        )

    tests = "x = 1\nassert f(1) == 1\ny = 2\nassert f(2) == 1"
    scored = code(SimpleNamespace(run=run)).score(task(tests), "def f(x): return 1")  # type: ignore[arg-type]
    assert scored.value == (0.5 if alone else None), scored


@pytest.mark.parametrize("name", ATTACKS)
def test_expected_values_are_computed_out_of_the_candidates_reach(judge, name):
    tests, program = ATTACKS[name]
    scored = judge(tests, program, 2.0)
    assert scored.value is not None, scored
    assert scored.value < 1.0, scored


def test_tests_that_cheats_fail_can_be_passed(judge):
    for answer in ("", "  \n", "```python\n```", "x" * (1 << 21), "é" * 9, "\ud800", "\0", "(" * 5000):
        assert [judge(tests, answer).value for tests in BY_WAY] == [0.0] * 2, answer[:9]
    honest = ADD + "\nif __name__ == '__main__':\n    print(f(*map(int, input().split())))"
    assert [judge(tests, honest).value for tests in BY_WAY] == [1.0] * 2


def test_the_candidates_run_gets_no_expected_value():
    calls = []

    def run(program, stdin="", **_):
        calls.append((program, stdin))
        return RunResult("exited", 0, "", "", 0.0)

    secret = """
data = {'in': 31337, 'out': 777001}
assert f(31337) == data['out']
x, y = 41414, 777002
assert f(x) == y
for a, b in [(51515, 777003)]:
    assert f(a) == b
    assert b == f(a), 777004
want = f(1) + 777005
assert want > 777006
u = [61616]
assert f(u) == sorted(u) + [777009]
assert u[::-1] == [777010] and u == [777011]
r = f(u)
assert r == sorted(r) and len(r) == 777012
"""
    reward = code(SimpleNamespace(run=run))  # type: ignore[arg-type]
    reward.score(task(secret), "def f(x): return x")
    reward.score(task([{"call": "f(41414)", "equals": 777007}]), "def f(x): return x")
    reward.score(task([{"stdin": "41414", "stdout": "777008"}]), "def f(x): return x")
    candidates = [(program, stdin) for program, stdin in calls if "def f(x): return x" in program]
    assert len(candidates) >= 3
    for expected in ("7770", "sorted(u)", "u[::-1]"):
        assert not [run for run in candidates if expected in "".join(run)], expected
    steps = ("41414", "51515", "31337", "61616")
    assert any(all(value in stdin for value in steps) for _, stdin in candidates)
    assert not [program for program, _ in candidates for value in steps if value in program]


BAD_TESTS = {
    "while f(1): pass": "line 1 of the tests holds `while`",
    "x = 1\nassert all(f(i) == i for i in [1])": "line 2 of the tests calls the candidate inside a comprehension",
    "assert isinstance(f(1), Point)": "uses Point itself",
    "assert math.isclose(f(1), 1)": "uses math without importing it",
    "assert same(f(1), 1)": "has the candidate judge its own value",
    "assert f(1).equals(3)": "has the candidate judge its own value",
    "r = f(1)\nassert r.equals(3)": "has the candidate judge its own value",
    "import pytest\nwith pytest.raises(ValueError, match='x'):\n    f(1)": "is a `with` other than",
    "@parametrize('x', [1])\ndef test_f(x):\n    assert f(x)": "decorates test_f",
    "def test_f(tmp):\n    assert f(tmp)": "defines test_f, which nothing calls",
    "import numpy": "imports numpy",
    "from math import *\nassert f(1) == 1": "in a way that can't be split",
    "assert f(": "can't be parsed",
    "assert 1 == 1": "hold no assert about the candidate",
    "def check(candidate):\n    assert candidate(1) == 1": "defines check, which nothing calls",
    "def help():\n    return f(1)\nassert help() == 1": "a helper that uses the candidate",
    "y = f(1) + 1\nassert f(y) == 1": "passes the candidate a value computed from its own values",
    "1 / 0\nassert f(1) == 1": "line 1 of its tests fails by itself",
    "x = [lambda: 0][0]\nassert f(x) == 1": "pass the candidate `x`, which",
    "for i in f(3):\n    assert i": "loops over something other than",
    "x = [1]\nassert f(x) is x": "compares by `is`",
    "x = [1]\nassert f(x) is not x": "compares by `is`",
    "assert f(1) is 1": "compares by `is`",
    "def same(a, b):\n    return a is b\nassert same(f(1), 1)": "compares by `is`",
    "same = lambda a, b: a is b\nassert same(f(1), 1)": "compares by `is`",
    "x = [1]\nassert all(a is b for a, b in zip(f(x), x))": "compares by `is`",
    "x = [1]\nfor y in [x]:\n    f(x)\n    assert x is y": "loops over something other than",
    "x = [1]\nbefore = id(x)\nf(x)\nassert id(x) == before": "uses id()",
    "import operator\nassert operator.is_not(f(1), 1)": "uses operator.is_not",
    "from operator import is_\nassert is_(f(1), 1)": "uses is_",
    "assert Point(1, 2) == Point(1, 2)": "leaves it to the class Point",
    "p = Point(1, 2)\nassert p.move(1) == Point(2, 2)": "leaves it to the class Point",
    "assert f(1) == Color.RED": "leaves it to the class Color",
    "assert (V(1) + V(2)).x == 3": "leaves it to the class V",
    "v = V(1)\nw = v * 2\nassert w.x == 2 and v.x == 1": "as if it were plain data",
    "s = Bag()\ns.put(1)\nassert s == [1]": "as if it were plain data",
    "import pytest\npytest.skip()\nassert f(1)": "uses pytest.skip",  # a task's tests, which would judge nothing
}
BAD_CASES = [
    ([], "its list of tests is empty"),
    ([3], "test 1 must be"),
    ({"call": "f(1)"}, "no `equals`"),
    ({"call": "f(", "equals": 1}, "can't be parsed"),
    (None, "it has no tests"),
]
BAD_CASES.append(({"stdin": 3, "stdout": "3"}, "stdin of test 1 must be a text"))


def test_unsplittable_tests_are_invalid_and_name_the_line(judge):
    for tests, words in (*BAD_TESTS.items(), *BAD_CASES):
        scored = judge(tests, "def f(x): return x")
        assert scored.value is None, tests
        assert words in scored.reason


def test_F5_a_failed_sandbox_makes_a_reward_invalid(sandbox, monkeypatch):
    def fail(*_, **__):
        raise SandboxFailure("it was lost")

    monkeypatch.setattr(sandbox, "run", fail)
    scored = code(sandbox).score(task("assert f(1) == 1"), ADD)
    assert scored == RewardResult(None, "the sandbox failed: it was lost")
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: RunResult("exited", 1, '-3 ! ["no process"]\n', "", 0.0))
    scored = code(sandbox).score(task("assert f(1) == 1"), ADD)
    assert scored.value is None
    assert "no process" in scored.reason


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
) | st.dictionaries(st.text(), st.integers(), max_size=3).flatmap(
    lambda items: st.sampled_from([Counter(items), OrderedDict(items), deque(items)])
) | st.sets(st.integers() | st.text()) | st.integers(10**300, 10**400)  # fmt: skip


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value):
    again = decode_value(encode_value(value))
    assert type(again) is type(value)
    assert again == value if isinstance(value, set) else repr(again) == repr(value)
    assert encode_value(value).isascii()


def test_what_is_no_encoded_value_is_refused():
    for text in ("", "1.5", "NaN", '{"a": 1}', '{"float": "x", "int": "1"}', "[" * 100_000, '{"set": [[]]}',
                 '{"dict": [[1]]}', '{"int": 1}', '{"bytes": "zz"}', "9" * 5000):  # fmt: skip
        with pytest.raises((ValueError, TypeError, KeyError, RecursionError)):
            decode_value(text)


@given(st.binary(max_size=200) | st.from_regex(rb"(-{0,2}[0-9]{1,3} [=!] [\[\]{}\"a-z0-9:, ]{0,20}\n){0,4}"))
def test_whatever_the_candidates_run_writes_nothing_raises(written):
    assume(b"-3 " not in written)  # which the candidate can't write: no process could be made for it
    ran = RunResult("exited", 0, written.decode("utf-8", "replace"), "", 0.0)
    box = SimpleNamespace(run=lambda *_, **__: ran)
    plan = split_sources(["assert f(1) == 2\nassert f(2) == 3"])
    records = run_steps("", plan, [], CodeSettings(box, 0.0, Limits(), 3))  # type: ignore[arg-type]
    assert set(records.values) | set(records.raised) <= {0, 1}


CODE_OF = {
    ("x = 1", ""): "x = 1",
    ("a\n```python\nx = 1\n```\nb\n```\nnot this\n```", ""): "x = 1\n",
    ("```py\nx = 1\n```\n```Python\nx = 2\n```", ""): "x = 2\n",
    ("```\nx = 1\n```", "f"): "x = 1\n",
    ("```python\nx = 1\ny = 2", ""): "x = 1\ny = 2",
    ("```python\ns = '''\n```js\n'''\n```", ""): "s = '''\n```js\n'''\n",
    ("```py\ndef f(): 0\n```\n```py\ndef f(): 1\n```\n```py\nprint(f())\n```", "f"): "def f(): 1\n",
    ("```py\ndef g(): 0\n```\n```py\ndef f(): g()\n```\n```py\n>>> f()\n```", "f"):
        "def g(): 0\n\ndef f(): g()\n",
    ("```py\ndef f(): 0\n```\n```py\ndef g(): 0\n```\n```py\nx = f(), g()\n```", "f g"):
        "def f(): 0\n\ndef g(): 0\n",
    ("```py\nclass A: f = f\n```\n```py\nA().f()\n```", "A"): "class A: f = f\n",
    ("```py\n1 +\n```\n```py\n2 +\n```", "f"): "2 +\n",
    ("```py\ndef f(): print(input())\nf()\n```\n```py\nf()\n```", ""): "def f(): print(input())\nf()\n",
    ("```py\ndef f(): print(input())\n```\n```py\nf()\n```", ""): "def f(): print(input())\n\nf()\n",
    ("```py\ndef f(): 0\nprint(f())\n```\n```py\nf()\n```", ""): "def f(): 0\nprint(f())\n",
}  # fmt: skip


def test_the_block_that_the_tests_call_is_the_code(sandbox):
    settings = CodeSettings(sandbox, 0.0, Limits(), 1)
    for (output, names), source in CODE_OF.items():
        assert find_code(output, names.split, lambda sources: describe(sources, settings)) == source, output


def test_outputs_are_compared_word_by_word():
    same = [("1 2\n", "1  2"), ("1", "1.0"), ("0.10000001", "0.1"), ("nan", "nan"), ("", ""), ("1e400", "1e400"),
            ("4.2000000001e-9", "0.0042e-6"), ("-1e-9 1", "0.0 1.000"), ("1 \r\n2\n\n", "1\n2")]  # fmt: skip
    different = [("1\n2", "1 2"), ("1.0", "1"), ("0.11", "0.1"), ("inf", "1e999"), ("٣", "3"), ("0", "4.2e-9"),
                 ("4.3e-9", "4.2e-9"), ("1e998", "1e999"), ("1\n2", "1"), ("1", "1\n2"),
                 ("1 2", "1"), ("\n1", "1")]  # fmt: skip
    results = {pair: same_output(*pair, 1e-6) for pair in same + different}
    assert results == dict.fromkeys(same, True) | dict.fromkeys(different, False)


def test_a_float_in_equals_is_met_within_the_relative_tolerance():
    same = [(4.2000000001e-9, 4.2e-9), (1e-9, 0.0), (-1e-9, 0), (3, 3.0), ((1, 0.3), [1.0, 0.1 + 0.2])]
    different = [(0.0, 4.2e-9), (0, 4.2e-9), (math.inf, 1e300), (True, 1.0), (math.nan, 0.0), (2e-6, 0.0)]
    assert [agree(*pair, 1e-6) for pair in same + different] == [True] * len(same) + [False] * len(different)


def test_R2_a_flood_of_output_costs_the_host_bounded_time_and_memory():
    with deadline(1.0):  # a pattern that tries each split of the digits takes 12 s for each of three
        for word in ("1" * 30_000 + "x", "+." + "1" * 30_000 + "e", "1e" + "1" * 30_000 + "x", "." * 30_000):
            assert not same_output(word, "5", 1e-6)
            assert not same_output(word, "5.5", 1e-6)
    plan = split_sources(["assert f(1) == 2"])
    for flood in ("1\n" * 400_000, "0 !\n" * 200_000, "1 " * 400_000, '0 ! ["' + "E" * 800_000 + '"]\n'):
        box = SimpleNamespace(run=lambda *_, text=flood, **__: RunResult("exited", 0, text, "", 0.0))
        tracemalloc.start()
        try:
            assert not same_output(flood, "1\n2", 1e-6)
            run_steps("", plan, [], CodeSettings(box, 0.0, Limits(), 1))  # type: ignore[arg-type]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 3 * len(flood), flood[:9]


def test_answers_are_judged_in_order_and_senseless_settings_refused(sandbox):
    tasks = [task(f"assert f(0) == {number % 2}") for number in range(4)]
    scored = code(sandbox, workers=2).score_all(tasks, [f"def f(x): return {number}" for number in range(4)])
    assert [result.value for result in scored] == [1.0, 1.0, 0.0, 0.0]
    for settings in ({"tolerance": -1.0}, {"tolerance": float("nan")}, {"max_failed_runs": 0}, {"workers": 0}):
        with pytest.raises(BadInput, match="code: "):
            code(sandbox, **settings)
