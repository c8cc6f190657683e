"""Symbolic mathematics: whose fault a failure is, what is sent, and that a hanging check is killed."""

import time

import pytest

from flowgrpo.rewards import symbolic, symbolic_child
from flowgrpo.rewards.symbolic import CHILD, MOST, PRELOAD, mathematical, mathematics
from flowgrpo.sandbox import CallFailed, Sandbox, SandboxFailure
from flowgrpo.types import BadInput, Task


def task(*golds):
    return Task("t1", "", golds, "mathematics")


class Scripted:
    """A `call` that answers as it is told, and keeps what it was asked."""

    def __init__(self, readable=True, compare="different"):
        self.said = {f"{CHILD}:readable": readable, f"{CHILD}:compare": compare}
        self.asked = []

    def __call__(self, function, *arguments, seconds):
        self.asked.append((function, arguments, seconds))
        said = self.said[function]
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(preload=PRELOAD) as made:
        yield made


def test_equal_formulas_are_right_and_others_wrong(sandbox):
    reward = mathematics(sandbox.call)
    assert reward.score(task("(x-1)(x+1)"), "\\boxed{x^2 - 1}").parts == {"symbolic": 1.0}
    assert reward.score(task("(x-1)(x+1)"), "\\boxed{x^2 + 1}").value == 0
    assert reward.score(task("\\sqrt{8}"), "$2\\sqrt{2}$").value == 1


def test_a_hanging_check_is_killed_and_scored_as_a_failure(sandbox):
    reward = mathematics(sandbox.call, seconds=0.5)
    start = time.monotonic()
    scored = reward.score(task("x^2"), "10^{10^{10^{10}}}")
    assert scored.value == 0
    assert "took too long" in scored.reason
    assert time.monotonic() - start < 15
    assert reward.score(task("x^2"), "x \\cdot x").value == 1


def test_gold_that_can_not_be_read_is_invalid(sandbox):
    scored = mathematics(sandbox.call).score(task("\\frac{1}{"), "2")
    assert scored.value is None
    assert "gold" in scored.reason


def test_an_answer_that_can_not_be_read_is_wrong(sandbox):
    assert mathematics(sandbox.call).score(task("x^2"), "\\frac{x^2}{").value == 0


def test_the_child_is_warm_before_it_is_forked(sandbox):
    assert sandbox.call(f"{CHILD}:is_warm", seconds=10.0)
    assert not symbolic_child.is_warm()


@pytest.mark.parametrize("error", [TimeoutError("late"), CallFailed("MemoryError", "")])
def test_what_an_answer_causes_is_a_failure_of_the_policy(error):
    scored = mathematics(Scripted(compare=error)).score(task("x^2"), "x^3")
    assert scored.value == 0
    assert scored.reason


@pytest.mark.parametrize("error", [TimeoutError("late"), CallFailed("RecursionError", ""), False])
def test_what_gold_causes_is_invalid(error):
    scored = mathematics(Scripted(readable=error)).score(task("x^2"), "x^3")
    assert scored.value is None
    assert "'t1'" in scored.reason


@pytest.mark.parametrize("where", ["readable", "compare"])
def test_what_the_sandbox_causes_is_invalid(where):
    call = Scripted(**{where: SandboxFailure("lost")})
    scored = mathematics(call).score(task("x^2"), "x^3")
    assert scored.value is None
    assert "lost" in scored.reason


def test_gold_is_read_once():
    call = Scripted()
    reward = mathematics(call)
    for output in ("x^3", "x^4", "x^5"):
        assert reward.score(task("x^2"), output).value == 0
    assert [function for function, _, _ in call.asked].count(f"{CHILD}:readable") == 1


def test_a_gold_that_took_too_long_once_is_read_again():
    call = Scripted(readable=TimeoutError())
    reward = mathematics(call)
    assert reward.score(task("x^2"), "x^3").value is None
    call.said[f"{CHILD}:readable"] = True
    assert reward.score(task("x^2"), "x^3").value == 0


def test_words_and_what_is_too_long_or_too_deep_are_not_sent():
    call = Scripted(compare="same")
    reward = mathematics(call)
    assert reward.score(task("Paris"), "pairs").value == 0
    for output in ("x" * (MOST + 1), "(" * 100 + "x" + ")" * 100, "not x^2", "the square", "\x00\x01"):
        assert reward.score(task("x^2"), output).value == 0, output
    assert not [arguments for function, arguments, _ in call.asked if function.endswith("compare")]


def test_numbers_and_lists_of_numbers_need_no_other_process():
    call = Scripted(compare=AssertionError("asked"))
    assert mathematics(call).score(task("0.5"), "\\frac{1}{2}").value == 1
    assert mathematics(call).score(task("5"), "6").value == 0
    assert mathematics(call).score(task("\\{1, 2\\}"), "\\{2, 1\\}").value == 1
    assert not call.asked


def test_what_looks_like_mathematics():
    for text in ("x^2", "\\frac{\\sqrt{3}}{2}", "2ab", "sin x", "θ + π", "\\begin{pmatrix} 1 \\end{pmatrix}", "(1, 2]"):
        assert mathematical(text), text
    for text in ("Paris", "", "not 4", "東京", "ABC-123", "5 apples", "yes"):
        assert not mathematical(text), text


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(symbolic, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match=r"pip install 'flowgrpo\[math\]'"):
        mathematics(Scripted())


def test_several_answers_are_judged_at_once_in_their_order():
    with Sandbox(workers=2, preload=PRELOAD) as two:
        reward = mathematics(two.call, workers=2)
        outputs = ["x \\cdot x", "x^3", "\\frac{x^3}{x}", "5"]
        assert [scored.value for scored in reward.many([task("x^2")] * 4, outputs)] == [1, 0, 1, 0]
    with pytest.raises(BadInput, match="workers"):
        mathematics(Scripted(), workers=0)
