"""Symbolic mathematics: who caused a failure, what is sent, and that a hanging check is killed."""

import pytest

from flowgrpo.rewards.answers import symbolic, symbolic_child
from flowgrpo.rewards.answers.symbolic import CHILD, MAX_CHARACTERS, PRELOAD, mathematical, mathematics
from flowgrpo.sandbox import CallFailed, Sandbox, SandboxFailure
from flowgrpo.types import BadInput, Task


def task(*golds):
    return Task("t1", "", golds, "mathematics")


class FakeCall:
    """A `call` with fixed results, which records the functions that were called."""

    def __init__(self, readable=True, compare="different"):
        result = (compare, 0.0) if isinstance(compare, str) else compare
        self.results = {f"{CHILD}:readable": readable, f"{CHILD}:compare": result}
        self.calls = []

    def __call__(self, function, *_, seconds):  # noqa: ARG002
        self.calls.append(function.removeprefix(f"{CHILD}:"))
        result = self.results[function]
        if isinstance(result, Exception):
            raise result
        return result


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, preload=PRELOAD) as pool:
        yield pool


def test_formulas_are_judged_in_the_sandbox_concurrently_and_in_order(sandbox):
    assert sandbox.call(f"{CHILD}:is_warm", seconds=60.0)
    assert not symbolic_child.is_warm()  # here
    reward = mathematics(sandbox.call, seconds=60.0, workers=2)
    golds = ["(x-1)(x+1)", "(x-1)(x+1)", "\\sqrt{8}", "x^2", "x^2", "x^2", "x^2", "\\frac{1}{"]
    outputs = ["\\boxed{x^2 - 1}", "\\boxed{x^2 + 1}", "$2\\sqrt{2}$", "x \\cdot x", "x^3", "5", "\\frac{x^2}{", "2"]
    results = reward.score_all([task(gold) for gold in golds], outputs)
    assert [result.value for result in results] == [1, 0, 1, 1, 0, 0, 0, None]
    assert results[0].parts == {"symbolic": 1.0}
    assert "gold" in results[-1].reason


def test_R2_a_hanging_check_is_killed_and_scored_as_a_failure(sandbox):
    def call(function, *arguments, seconds):
        return sandbox.call(function, *arguments, seconds=seconds if function.endswith("compare") else 60.0)

    scored = mathematics(call, seconds=0.3).score(task("\\sqrt{8}"), "10^{10^{10^{10}}}")
    assert scored.value == 0
    assert "took too long" in scored.reason
    assert mathematics(sandbox.call, seconds=60.0).score(task("x^2"), "x \\cdot x").value == 1


@pytest.mark.parametrize(
    ("function", "result", "value", "words"),
    [
        ("compare", TimeoutError("late"), 0.0, "took too long"),
        ("compare", CallFailed("MemoryError", ""), 0.0, "failed (MemoryError"),
        ("compare", SandboxFailure("lost"), None, "lost"),
        ("readable", TimeoutError("late"), None, "'t1'"),
        ("readable", SandboxFailure("lost"), None, "lost"),
        ("readable", False, None, "'t1'"),
    ],
)
def test_F5_a_failure_that_the_answer_causes_is_0_and_others_are_invalid(function, result, value, words):
    call = FakeCall(**{function: result})
    reward = mathematics(call)
    scored = reward.score(task("x^2"), "x^3")
    assert scored.value == value
    assert words in scored.reason
    call.results |= FakeCall().results
    assert reward.score(task("x^2"), "x^3").value == (None if result is False else 0)  # a failure is not cached


def test_checks_of_one_score_share_a_deadline():
    golds, output = ("x^2", "\\sqrt{8}", "(2, \\sqrt{5}]"), "So it is $x^3$, and $y = 2 < x \\le 5$"

    def call_seconds(compare):
        call, seconds_of_calls = FakeCall(compare=compare), []

        def timed(function, *formulas, seconds):
            seconds_of_calls.extend([seconds] * function.endswith("compare"))
            return call(function, *formulas, seconds=seconds)

        assert mathematics(timed, seconds=5.0).score(task(*golds), output).value == 0
        return seconds_of_calls

    assert call_seconds(TimeoutError("late")) == [5.0]
    assert call_seconds(("different", 3.0)) == [5.0, 2.0]
    assert len(call_seconds(("different", 0.0))) > 2
    call = FakeCall(readable=TimeoutError("late"))
    assert mathematics(call).score(task(*golds), output).value is None
    assert call.calls == ["readable"]


def test_gold_is_parsed_once():
    call = FakeCall()
    assert [result.value for result in mathematics(call).score_all([task("x^2")] * 3, ["x^3", "x^4", "x^5"])] == [
        0,
        0,
        0,
    ]
    assert sorted(call.calls) == ["compare"] * 3 + ["readable"]


def test_only_short_formulas_are_sent_to_the_sandbox():
    call = FakeCall(compare="same")
    reward = mathematics(call)
    assert reward.score(task("Paris"), "pairs").value == 0
    for output in (
        "x^2+" + "1" * (MAX_CHARACTERS - 3),
        "(" * 100 + "x" + ")" * 100,
        "not x^2",
        "the square",
        "\x00\x01",
    ):
        assert reward.score(task("x^2"), output).value == 0, output
    assert "compare" not in call.calls
    assert reward.score(task("x^2"), "x^2+" + "1" * (MAX_CHARACTERS - 4)).value == 1
    for gold, output, value in (("0.5", "\\frac{1}{2}", 1), ("5", "6", 0), ("\\{1, 2\\}", "\\{2, 1\\}", 1)):
        call = FakeCall()
        assert mathematics(call).score(task(gold), output).value == value
        assert not call.calls


def test_formulas_are_told_from_words():
    for text in ("x^2", "\\frac{\\sqrt{3}}{2}", "2ab", "sin x", "θ + π", "\\begin{pmatrix} 1 \\end{pmatrix}", "(1, 2]"):
        assert mathematical(text), text
    for text in ("Paris", "", "not 4", "東京", "ABC-123", "5 apples", "yes"):
        assert not mathematical(text), text


def test_bad_workers_and_a_missing_package_are_refused(monkeypatch):
    with pytest.raises(BadInput, match="workers"):
        mathematics(FakeCall(), workers=0)
    monkeypatch.setattr(symbolic, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match=r"pip install 'math-verify"):
        mathematics(FakeCall())
