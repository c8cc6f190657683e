"""Symbolic mathematics: whose fault a failure is, what is sent, and that a hanging check is killed."""

import pytest

from flowgrpo.rewards.answers import symbolic, symbolic_child
from flowgrpo.rewards.answers.symbolic import CHILD, MOST, PRELOAD, mathematical, mathematics
from flowgrpo.sandbox import CallFailed, Sandbox, SandboxFailure
from flowgrpo.types import BadInput, Task


def task(*golds):
    return Task("t1", "", golds, "mathematics")


class Scripted:
    """A `call` that answers as it is told, and keeps what it was asked."""

    def __init__(self, readable=True, compare="different"):
        compared = (compare, 0.0) if isinstance(compare, str) else compare
        self.said = {f"{CHILD}:readable": readable, f"{CHILD}:compare": compared}
        self.asked = []

    def __call__(self, function, *_, seconds):  # noqa: ARG002
        self.asked.append(function.removeprefix(f"{CHILD}:"))
        said = self.said[function]
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, preload=PRELOAD) as made:
        yield made


def test_formulas_are_judged_in_the_sandbox_several_at_once_and_in_their_order(sandbox):
    assert sandbox.call(f"{CHILD}:is_warm", seconds=60.0)
    assert not symbolic_child.is_warm()  # here
    reward = mathematics(sandbox.call, seconds=60.0, workers=2)
    golds = ["(x-1)(x+1)", "(x-1)(x+1)", "\\sqrt{8}", "x^2", "x^2", "x^2", "x^2", "\\frac{1}{"]
    outputs = ["\\boxed{x^2 - 1}", "\\boxed{x^2 + 1}", "$2\\sqrt{2}$", "x \\cdot x", "x^3", "5", "\\frac{x^2}{", "2"]
    scored = reward.many([task(gold) for gold in golds], outputs)
    assert [one.value for one in scored] == [1, 0, 1, 1, 0, 0, 0, None]
    assert scored[0].parts == {"symbolic": 1.0}
    assert "gold" in scored[-1].reason


def test_R2_a_hanging_check_is_killed_and_scored_as_a_failure(sandbox):
    def call(function, *given, seconds):
        return sandbox.call(function, *given, seconds=seconds if function.endswith("compare") else 60.0)

    scored = mathematics(call, seconds=0.3).score(task("\\sqrt{8}"), "10^{10^{10^{10}}}")
    assert scored.value == 0
    assert "took too long" in scored.reason
    assert mathematics(sandbox.call, seconds=60.0).score(task("x^2"), "x \\cdot x").value == 1


@pytest.mark.parametrize(
    ("where", "said", "value", "words"),
    [
        ("compare", TimeoutError("late"), 0.0, "took too long"),
        ("compare", CallFailed("MemoryError", ""), 0.0, "failed (MemoryError"),
        ("compare", SandboxFailure("lost"), None, "lost"),
        ("readable", TimeoutError("late"), None, "'t1'"),
        ("readable", SandboxFailure("lost"), None, "lost"),
        ("readable", False, None, "'t1'"),
    ],
)
def test_F5_what_an_answer_causes_is_its_failure_and_all_else_is_invalid(where, said, value, words):
    call = Scripted(**{where: said})
    reward = mathematics(call)
    scored = reward.score(task("x^2"), "x^3")
    assert scored.value == value
    assert words in scored.reason
    call.said |= Scripted().said
    assert reward.score(task("x^2"), "x^3").value == (None if said is False else 0)  # what failed is tried again


def test_checks_of_one_score_share_a_deadline():
    golds, output = ("x^2", "\\sqrt{8}", "(2, \\sqrt{5}]"), "So it is $x^3$, and $y = 2 < x \\le 5$"

    def seconds_given(compare):
        call, given = Scripted(compare=compare), []

        def timed(function, *formulas, seconds):
            given.extend([seconds] * function.endswith("compare"))
            return call(function, *formulas, seconds=seconds)

        assert mathematics(timed, seconds=5.0).score(task(*golds), output).value == 0
        return given

    assert seconds_given(TimeoutError("late")) == [5.0]
    assert seconds_given(("different", 3.0)) == [5.0, 2.0]
    assert len(seconds_given(("different", 0.0))) > 2
    call = Scripted(readable=TimeoutError("late"))
    assert mathematics(call).score(task(*golds), output).value is None
    assert call.asked == ["readable"]


def test_gold_is_read_once():
    call = Scripted()
    assert [one.value for one in mathematics(call).many([task("x^2")] * 3, ["x^3", "x^4", "x^5"])] == [0, 0, 0]
    assert sorted(call.asked) == ["compare"] * 3 + ["readable"]


def test_words_and_what_is_too_long_or_too_deep_are_not_sent_and_numbers_need_no_other_process():
    call = Scripted(compare="same")
    reward = mathematics(call)
    assert reward.score(task("Paris"), "pairs").value == 0
    for output in ("x^2+" + "1" * (MOST - 3), "(" * 100 + "x" + ")" * 100, "not x^2", "the square", "\x00\x01"):
        assert reward.score(task("x^2"), output).value == 0, output
    assert "compare" not in call.asked
    assert reward.score(task("x^2"), "x^2+" + "1" * (MOST - 4)).value == 1
    for gold, output, value in (("0.5", "\\frac{1}{2}", 1), ("5", "6", 0), ("\\{1, 2\\}", "\\{2, 1\\}", 1)):
        call = Scripted()
        assert mathematics(call).score(task(gold), output).value == value
        assert not call.asked


def test_what_looks_like_mathematics():
    for text in ("x^2", "\\frac{\\sqrt{3}}{2}", "2ab", "sin x", "θ + π", "\\begin{pmatrix} 1 \\end{pmatrix}", "(1, 2]"):
        assert mathematical(text), text
    for text in ("Paris", "", "not 4", "東京", "ABC-123", "5 apples", "yes"):
        assert not mathematical(text), text


def test_what_can_not_be_made_is_refused(monkeypatch):
    with pytest.raises(BadInput, match="workers"):
        mathematics(Scripted(), workers=0)
    monkeypatch.setattr(symbolic, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match=r"pip install 'math-verify"):
        mathematics(Scripted())
