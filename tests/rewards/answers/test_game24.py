"""The game of 24: numbers that an expression uses, its value, its spellings, and what is invalid."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.rewards.answers.game24 import evaluate, game24
from flowgrpo.types import Task

QUERY = "Using the numbers [8, 3, 8, 3], make 24. Example: for [1, 2, 3, 4], one solution is (1+2+3)×4."  # noqa: RUF001
TASK = Task("t", QUERY, ("8/(3-8/3)",), "game24")
RIGHT = r"""8/(3-8/3)|(8) / (3 - 8/3) = 24|24 = 8/(3-8/3)|\frac{8}{3-\frac{8}{3}}|$\dfrac{8}{3 - \dfrac83} = 24$
[8/(3-8/3)]|8 ÷ (3 − 8 ÷ 3)|\left(8\right) \div \left(3 - 8 \div 3\right)|\boxed{8/(3-8/3)}|<answer>8/(3-8/3)</answer>
-8/(8/3-3)|The answer is **8 / (3 - 8 / 3)**.|**Answer: 8/(3-8/3) = 24**|`8/(3-8/3)`|We can write 8/(3-8/3) = 24.
8.0/(3-8/3)|Step 1: 8/3 = 8/3⏎Answer: 8/(3 - 8/3)|The numbers 8, 3, 8 and 3 give 8/(3-8/3).|{8/(3-8/3)}"""  # noqa: RUF001
WRONG = r"""24|48/2|8*3|\boxed{24}|8*3+8-8|8*3*8/8*3/3|(1+2+3)×4|8/(3-3)+8-8|8/(3-8/3)+0|8/(3-8/3) = 25|83|8**3
8!/3|8 8 3 3|(8/(3-8/3)|8/(3-8/3))|8/(3-8/3) or 3*8|8/(3-8/3), 8*3|It is not 8/(3-8/3).|8/(3-8/3)*x/x|eval("8*3")
()|-|8 +|×8|8(3)8/3|8/(3-8/3)=24 and 3*8=24|Is it 8/(3-8/3)?|1e3|8/(3-8/3)=a|\frac{8}{3-\frac{8}{3}|\frac{}{8}
8/(3-8/3)8|3*8=24=8/3*3*3"""  # noqa: RUF001


def test_an_expression_that_uses_each_number_once_and_equals_24_is_right():
    reward = game24()
    for value, outputs in ((1.0, RIGHT), (0.0, WRONG)):
        for output in outputs.replace("\n", "|").split("|"):
            scored = reward.score(TASK, output.replace("⏎", "\n"))
            assert scored.value == value, (output, scored)
    assert "it uses 8, 3, but must use 8, 3, 8, 3" in reward.score(TASK, "8*3").reason
    assert "divides by zero" in reward.score(TASK, "8/(3-3)").reason
    assert reward.score(TASK, " ").reason == "no answer: the output is empty"


def test_numbers_and_target_come_from_the_task():
    def value(output, query="", **metadata):
        return game24().score(Task("t", query, (), "game24", metadata), output).value

    assert value("1.5 * 16", numbers=[1.5, "16"]) == value("2 x 3", numbers=(2, 3), target=6) == 1
    assert value("(5) - -2", numbers=[5, 2], target=7) == value("2(7 + 5)", query="Use [2, 7, 5].", numbers=None) == 1
    assert value("2 + 3", numbers=[2, 3]) == 0
    assert game24(target=5).score(Task("t", "[2, 3]", (), "game24"), "2+3").value == 1
    for metadata in ({}, {"numbers": "1234"}, {"numbers": []}, {"numbers": [1, None]}, {"numbers": [10**20, 1]}):
        assert value("2+3", query="Make [24] of it, [a, b].", **metadata) is None
    assert value("2+3", numbers=[2, 3], target=True) is None


@st.composite
def expressions(draw, depth=3):
    """An expression, its value (None if it divides by zero) and its numbers; all but numbers are in brackets."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.integers(1, 13))
        return str(number), Fraction(number), [Fraction(number)]
    (left, a, left_numbers), (right, b, right_numbers) = (
        draw(expressions(depth=depth - 1)),
        draw(expressions(depth=depth - 1)),
    )
    operator = draw(st.sampled_from("+-*/"))
    spaces = draw(st.sampled_from(["", " "]))
    numbers = left_numbers + right_numbers
    if a is None or b is None or (operator == "/" and b == 0):
        return f"({left}){operator}({right})", None, numbers
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / (b or 1)}[operator]
    return f"({left}){spaces}{operator}{spaces}({right})", value, numbers


@given(expressions())
def test_an_expression_is_computed_exactly(expression):
    text, value, numbers = expression
    if value is None:
        with pytest.raises(ZeroDivisionError):
            evaluate(text)
        return
    assert evaluate(text) == (value, numbers)
    integers = [int(number) for number in numbers]
    for listed, right in ((integers, value == 24), ([*integers[:-1], 99], False)):
        assert game24().score(Task("t", "", (), "game24", {"numbers": listed}), text).value == right
    assert Counter(numbers) == Counter(evaluate(f"-({text})")[1])


def test_precedence_is_the_usual_one():
    texts = {
        "2+3*4": 14,
        "2*3+4": 10,
        "10-4-3": 3,
        "16/4/2": 2,
        "16/4*2": 8,
        "-2*3": -6,
        "2*-3": -6,
        "-(1+2)": -3,
        "2-3*4/6": 0,
    }
    assert {text: evaluate(text)[0] for text in texts} == texts
    for text in ("", "1 2", "1..2", ".5", "1" * 13, "2^3", "2*", "*2", "+2", "((2)", "2)", "a"):
        with pytest.raises(ValueError, match=r"is no expression|closes a bracket"):
            evaluate(text)
    assert evaluate("(" * 9000 + "2" + ")" * 9000)[0] == 2
