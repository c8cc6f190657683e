"""Code by its tests: honest code gets its share, no cheat gets anything, and bad tests are nobody's failure."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rewards.cheats import CHEATS

from flowgrpo.contracts import Scored
from flowgrpo.rewards.asserts import split
from flowgrpo.rewards.calls import Settings, run_steps
from flowgrpo.rewards.code import all_passed, code, find_code, same_output
from flowgrpo.rewards.plain import decode, encode
from flowgrpo.sandbox import Limits, Ran, Sandbox, SandboxFailure
from flowgrpo.types import BadInput, Task


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, unsafe=True) as box:
        yield box


@pytest.fixture(scope="module")
def judge(sandbox):
    """`judge(tests, output)` is what the reward says."""

    def score(tests, output, seconds=60.0, **more):
        return code(sandbox, limits=Limits(seconds=seconds)).score(task(tests, **more), output)

    return score


def task(tests, **more) -> Task:
    return Task("t", "Add two numbers.", (), "code", {"tests": tests, **more})


def fenced(source: str) -> str:
    return f"Here it is.\n```python\n{source}\n```\nDone."


# Honest code ------------------------------------------------------------------------------------------


ADD = "def f(a, b):\n    return a + b"
STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
"""

HONEST = {
    "stdin and stdout": ([{"stdin": "2 3\n", "stdout": "5"}, {"stdout": "5\n", "stdin": "1 4"}],
                         "a, b = map(int, input().split())\nprint(a + b)"),
    "no input": ({"stdout": "7\n"}, "print(7)  "),
    "floats within the tolerance": ({"stdout": "0.3333333 1e9\n"}, "print(1 / 3, 1e9 + 1)"),
    "calls": ([{"call": "f(2, 3)", "equals": 5}, {"function": "f", "arguments": [[1], [2]], "equals": [1, 2]},
               {"function": "f", "arguments": [1], "keywords": {"b": 0.5}, "equals": 1.5}], ADD),
    "a tuple where JSON has a list": ({"call": "f(2)", "equals": [2, [3, None]]}, "def f(x): return x, (3, None)"),
    "no value": ({"call": "f()", "equals": None}, "def f(): print('hello')"),
    "asserts": ("assert f(2, 3) == 5\nassert f([1], []) == [1], 'words'\nassert not f(0, 0)\n"
                "assert f(1, 1) is not None", ADD),
    "a list of asserts": (["assert f(2, 3) == 5", "assert f(1, 2) in (3, 4)"], ADD),
    "imports": ("import math\nfrom collections import Counter\nassert math.isclose(f(.1, .2), .3)\n"
                "assert Counter(f('ab', 'a')) == {'a': 2, 'b': 1}", ADD),
    "names": ("x = [1, 2]\ny, want = x + [3], [1, 2, 3, 4]\nassert f(y, [4]) == want\nassert f(x, x) == x * 2", ADD),
    "mixed values": ("got = f(1, 2) * 10\nassert got == 30\nassert abs(f(1, 2) - 3.1) < 0.2", ADD),
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
    "left as it was": ("x = [3, 1]\nassert f(x, [2]) == [3, 1, 2]\nassert x == [3, 1]", ADD),
    "changed and measured": ("x = [1, 1, 2]\nn = unique(x)\nassert x[:n] == [1, 2]",
                             "def unique(x):\n    x[:] = sorted(set(x))\n    return len(x)"),
    "an exception": ("import pytest\nwith pytest.raises(ValueError):\n    f(-1)\nassert f(1) == 1",
                     "def f(x):\n    if x < 0:\n        raise ValueError\n    return x"),
    "its import": ("from solution import f\nassert f(1, 2) == 3", ADD),
    "a dataclass of its own": ("assert total([1, 2]) == 3", "from dataclasses import dataclass\n@dataclass\nclass P:\n"
                               "    x: 'int'\ndef total(xs): return sum(P(x).x for x in xs)"),
    "printing much": ("assert f(1, 2) == 3", ADD + "\nprint('x' * 100_000)"),
    "exact types": ("assert f(0) == {1: (2, b'3', {4}), 'n': None}\nassert f(0)[1][2] == {4}\n"
                    "assert type(f(0)) == dict",
                    "def f(x): return {1: (2, b'3', {4}), 'n': None}"),
    "large and strange numbers": ("assert f(5) == 10 ** 5000\nassert g() != g()", "def f(x): return 10 ** 5000\n"
                                  "def g(): return float('nan')"),
    "predicates": ("assert is_even(2)\nassert not is_even(3)\nassert is_even(4) is True and word(1).startswith('w')",
                   "def is_even(x): return x % 2 == 0\ndef word(x): return 'w' * x"),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_code_passes(judge, name):
    tests, source = HONEST[name]
    scored = judge(tests, fenced(source))
    assert scored.value == 1.0, scored


def test_an_entry_point_may_be_named_like_a_builtin_and_is_handed_to_check(judge):
    tests = "def check(candidate):\n    assert candidate(2, 3) == 5"
    assert judge(tests, "def sum(a, b): return a + b", entry_point="sum").value == 1.0
    assert judge("assert sum(2, 3) == 5", "def sum(a, b): return a + b", entry_point="sum").value == 1.0


# Credit -----------------------------------------------------------------------------------------------


def test_credit_is_the_share_of_tests_passed_or_all_or_nothing(sandbox, judge):
    tests = ["assert f(1, 2) == 3", "assert f(2, 2) == 5", {"call": "f(0, 1)", "equals": 1}, {"stdout": "x"}]
    scored = judge(tests, ADD)
    assert scored.value == 0.5
    assert scored.parts == {"passed": 2.0, "tests": 4.0}
    assert scored.reason.startswith("2 of 4 tests passed; test 1 printed something else: ''")
    strict = code(sandbox, credit=all_passed)
    assert [strict.score(task(tests[:size]), ADD).value for size in (1, 2)] == [1.0, 0.0]


DOOMED = {
    "hangs": ("while x == 2: pass", "ran out of time"),
    "hangs and ignores signals": (
        "import signal\n    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n    while x == 2: pass",
        "ran out of time",
    ),
    "exits": ("import os\n    if x == 2: os._exit(0)", "ended the process"),
    "raises": ("if x == 2: raise KeyError(x)", "KeyError"),
    "recurses": ("if x == 2: return f(x)", "RecursionError"),
    "fills its memory": ("if x == 2: return [0] * 10**12", "MemoryError"),
}


@pytest.mark.parametrize("name", DOOMED)
def test_R2_F5_a_call_that_goes_wrong_fails_its_own_test_only_and_is_scored(judge, name):
    line, words = DOOMED[name]
    source = f"def f(x):\n    {line}\n    return x"
    scored = judge("assert f(1) == 1\nassert f(2) == 2\nassert f(3) == 3", source, 1.0)
    assert scored.value == pytest.approx(2 / 3)
    assert scored.reason == f"2 of 3 tests passed; line 2: f(2) == 2: {words}"


def test_R2_a_program_that_hangs_on_one_input_fails_that_test_only(judge):
    tests = [{"stdin": str(number), "stdout": str(number)} for number in range(3)]
    scored = judge(tests, "x = int(input())\nwhile x == 1: pass\nprint(x)", 1.0)
    assert (scored.value, scored.reason) == (pytest.approx(2 / 3), "2 of 3 tests passed; test 2 ran out of time")


@pytest.mark.parametrize("value", ["10 ** 10", "'x' * 10", "float('nan')", "[[]] * 5", "10 ** 4500"])
def test_R2_a_value_that_makes_the_check_hang_or_die_fails_it_and_is_never_invalid(judge, value):
    assert judge("want = 3\nassert 10 ** (10 ** f(1)) == want", f"def f(x): return {value}", 0.3).value == 0.0


@pytest.mark.parametrize("test", [{"stdin": "1", "stdout": "0"}, "assert f(1) == 0"], ids=["stdin", "calls"])
def test_patience_bounds_what_a_hanging_program_costs(sandbox, test, monkeypatch):
    ran, run = [], sandbox.run
    monkeypatch.setattr(sandbox, "run", lambda *given, **more: ran.append(run(*given, **more)) or ran[-1])
    reward = code(sandbox, patience=2, limits=Limits(seconds=0.1))
    scored = reward.score(task([test] * 50), "def f(x):\n    while True: pass\nif __name__ == '__main__': f(1)")
    assert scored.value == 0.0
    assert scored.parts["tests"] == 50.0
    assert [one.ended for one in ran].count("timeout") == 2


# Cheats -----------------------------------------------------------------------------------------------

BY_WAY = {
    "stdin": [{"stdin": "1000 5\n", "stdout": "1005\n"}, {"stdin": "2000 5\n", "stdout": "2005\n"}],
    "calls": [
        {"call": "f(1000, 5)", "equals": 1005},
        {"call": "f(2000, 5)", "equals": 2005},
        "import math\nwant = 2005\nassert f(1000, 5) == 1005\nassert math.isclose(f(2000, 5), want)",
        "assert f([3], [1, 2]) == [3] + [1, 2] and abs(f(0, 1) - 1) < 1e-9\nassert f('a', 'b').endswith('b')",
        "assert isinstance(f(5, 5), int) and f(5, 5) in (10,)",
    ],
}


@pytest.mark.parametrize("way", BY_WAY)
@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_scored_as_failures(judge, name, way):
    scored = judge(BY_WAY[way], fenced(CHEATS[name].strip()), 1.0)
    assert scored.value == 0.0, scored


def test_the_tests_that_the_cheats_face_can_be_passed(judge):
    honest = ADD + "\nif __name__ == '__main__':\n    print(f(*map(int, input().split())))"
    assert [judge(tests, honest).value for tests in BY_WAY.values()] == [1.0] * len(BY_WAY)


def test_what_the_candidates_run_is_given_holds_no_expected_value():
    """The programs of the candidate's runs, word by word: arguments yes, expectations no."""
    seen = []

    class Spy:
        def run(self, program, *, stdin="", files=None, limits=None):  # noqa: ARG002
            seen.append(program)
            return Ran("exited", 0, "", "", 0.0)

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
"""
    reward = code(Spy())  # type: ignore[arg-type]
    reward.score(task(secret), "def f(x): return x")
    reward.score(task([{"call": "f(41414)", "equals": 777007}]), "def f(x): return x")
    reward.score(task([{"stdin": "41414", "stdout": "777008"}]), "def f(x): return x")
    candidates = [program for program in seen if "def f(x): return x" in program]
    assert len(candidates) >= 3
    assert not [program for program in candidates if "7770" in program]
    assert any("41414" in program and "51515" in program and "31337" in program for program in candidates)


# Bad tests and failures that are nobody's -------------------------------------------------------------

BAD_TESTS = [
    ("while f(1): pass", "line 1 of the tests holds `while`"),
    ("x = 1\nassert all(f(i) == i for i in [1])", "line 2 of the tests calls the candidate inside a comprehension"),
    ("assert f is not None", "uses f itself"),
    ("assert isinstance(f(1), Point)", "uses Point itself"),
    ("assert math.isclose(f(1), 1)", "uses math without importing it"),
    ("assert same(f(1), 1)", "has the candidate judge its own value"),
    ("assert f(1).equals(3)", "has the candidate judge its own value"),
    ("r = f(1)\nassert r.equals(3)", "has the candidate judge its own value"),
    ("import pytest\nwith pytest.raises(ValueError, match='x'):\n    f(1)", "is a `with` other than"),
    ("@parametrize('x', [1])\ndef test_f(x):\n    assert f(x)", "decorates test_f"),
    ("def test_f(tmp):\n    assert f(tmp)", "defines test_f, which nothing calls"),
    ("import numpy", "imports numpy"),
    ("from math import *\nassert f(1) == 1", "in a way that can't be split"),
    ("assert f(", "can't be parsed"),
    ("assert 1 == 1", "hold no assert about the candidate"),
    ("class T: pass", "holds `classdef`"),
    ("def check(candidate):\n    assert candidate(1) == 1", "defines check, which nothing calls"),
    ("def help():\n    return f(1)\nassert help() == 1", "a helper that uses the candidate"),
    ("y = f(1) + 1\nassert f(y) == 1", "hands the candidate what was computed from its own values"),
    ("1 / 0\nassert f(1) == 1", "line 1 of its tests fails by itself"),
    ("x = [lambda: 0][0]\nassert f(x) == 1", "hand the candidate `x`, which"),
    ("for i in f(3):\n    assert i", "loops over something other than"),
    (None, "it has no tests"),
    ([], "its list of tests is empty"),
    ([3], "test 1 must be"),
    ([{"stdin": "x"}], "test 1 must be"),
    ([{"call": "f(1)"}], "has no `equals`"),
    ([{"call": "f(", "equals": 1}], "can't be parsed"),
    ([{"stdin": 3, "stdout": "3"}], "stdin of test 1 must be a text"),
]


@pytest.mark.parametrize(("tests", "words"), BAD_TESTS)
def test_tests_that_cant_be_split_or_used_are_invalid_and_say_where(judge, tests, words):
    scored = judge(tests, "def f(x): return x")
    assert scored.value is None
    assert words in scored.reason


def test_F5_a_sandbox_that_fails_makes_a_reward_invalid_and_never_0():

    class Lost:
        def run(self, *_, **__):
            raise SandboxFailure("it was lost")

    scored = code(Lost()).score(task("assert f(1) == 1"), ADD)  # type: ignore[arg-type]
    assert scored == Scored(None, "the sandbox failed: it was lost")


MALFORMED = {"empty": "", "blank": "  \n", "empty block": "```python\n```", "2 MB": "x" * (1 << 21), "words": "é" * 9,
             "surrogate": "\ud800", "NUL": "\0", "nested": "(" * 5000}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_answers_are_failures(judge, name):
    assert [judge(tests, MALFORMED[name], 1.0).value for tests in BY_WAY.values()] == [0.0] * len(BY_WAY)


# Parts ------------------------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
) | st.sets(st.integers() | st.text()) | st.integers(10**300, 10**400)  # fmt: skip


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value):
    again = decode(encode(value))
    assert type(again) is type(value)
    assert again == value if isinstance(value, set) else repr(again) == repr(value)
    assert encode(value).isascii()


NO_VALUES = ["", "1.5", "NaN", '{"a": 1}', '{"float": "x", "int": "1"}', "[" * 100_000, '{"set": [[]]}']
NO_VALUES += ['{"dict": [[1]]}', '{"int": 1}', '{"bytes": "zz"}', "9" * 5000]


def test_what_is_no_encoded_value_is_refused():
    for text in NO_VALUES:
        with pytest.raises((ValueError, TypeError, KeyError, RecursionError)):
            decode(text)


@given(st.binary(max_size=200) | st.from_regex(rb"(-?[0-9]{1,3} [=!] [\[\]{}\"a-z0-9:, ]{0,20}\n){0,4}"))
def test_whatever_the_candidates_run_writes_nothing_raises(written):
    """Records are claims of a hostile process: any bytes give verdicts, and none passes by itself."""
    ran = Ran("exited", 0, written.decode("utf-8", "replace"), "", 0.0)
    box = SimpleNamespace(run=lambda *_, **__: ran)
    plan = split(["assert f(1) == 2\nassert f(2) == 3"])
    records = run_steps("", plan, [], Settings(box, 0.0, Limits(), 3))  # type: ignore[arg-type]
    assert set(records.values) | set(records.raised) <= {0, 1}


# What is compared ------------------------------------------------------------------------------------


CODE_OF = {
    "x = 1": "x = 1",
    "a\n```python\nx = 1\n```\nb\n```\nnot this\n```": "x = 1\n",
    "```py\nx = 1\n```\n```Python\nx = 2\n```": "x = 2\n",
    "```\nx = 1\n```": "x = 1\n",
    "```python\nx = 1\ny = 2": "x = 1\ny = 2",
    "```python\ns = '''\n```js\n'''\n```": "s = '''\n```js\n'''\n",
}


def test_the_last_block_of_python_is_the_code():
    assert {output: find_code(output) for output in CODE_OF} == CODE_OF


SAME = [("1 2\n", "1  2"), ("1", "1.0"), ("0.1000001", "0.1"), ("nan", "nan"), ("", ""), ("1e400", "1e400")]
DIFFERENT = [("1\n2", "1 2"), ("1.0", "1"), ("0.11", "0.1"), ("inf", "1e999"), ("٣", "3")]


def test_outputs_are_compared_word_by_word():
    for pairs, same in ((SAME, True), (DIFFERENT, False)):
        for found, expected in pairs:
            assert same_output(found, expected, 1e-6) == same, (found, expected)


def test_many_answers_are_judged_in_their_order(sandbox):
    reward = code(sandbox, workers=2)
    outputs = [f"def f(x): return {number}" for number in range(6)]
    scored = reward.many([task(f"assert f(0) == {number % 2}") for number in range(6)], outputs)
    assert [one.value for one in scored] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_settings_that_mean_nothing_are_refused(sandbox):
    for settings in ({"tolerance": -1.0}, {"tolerance": float("nan")}, {"patience": 0}, {"workers": 0}):
        with pytest.raises(BadInput, match="code: "):
            code(sandbox, **settings)
