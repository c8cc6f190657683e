"""The matcher in its parts: numbers, where a final answer stands, which rule decides, what is invalid."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.rewards.answer import EXACT, NUMERIC, TEXT, Rule, answer, match_answers
from flowgrpo.rewards.final import LOOK, find_answer
from flowgrpo.rewards.numbers import Number, exactly, read_number, rounded, within
from flowgrpo.rewards.spelling import bare, plain
from flowgrpo.types import Task


def task(*golds, query=""):
    return Task("t", query, golds, "test")


NUMBERS = {
    "42": 42,
    "-7": -7,
    "−7": -7,  # noqa: RUF001
    "1,234,567.5": Fraction("1234567.5"),
    "1.234.567,5": Fraction("1234567.5"),
    "1 234 567": 1234567,
    "12,34,567": 1234567,
    "1'234": 1234,
    ".5": Fraction(1, 2),
    "3/4": Fraction(3, 4),
    "-1 1/2": Fraction(-3, 2),
    "1½": Fraction(3, 2),
    r"\dfrac{3}{4}": Fraction(3, 4),
    r"2\frac13": Fraction(7, 3),
    r"6.02 \times 10^{23}": Fraction("6.02") * 10**23,
    "1.5e-3": Fraction("0.0015"),
    "10³": 1000,
    "45%": Fraction(45, 100),
    "2.5 million": 2500000,
    "twenty-one": 21,
    "two hundred and five": 205,
    "one million two hundred thousand": 1200000,
    "three quarters": Fraction(3, 4),
    "two and a half": Fraction(5, 2),
    "(5)": 5,
}
NO_NUMBERS = (
    "",
    "abc",
    "1/0",
    "1.2.3",
    "1,23,4",
    "--5",
    "3 4",
    "10^10^10",
    "9^9999",
    "1e999999",
    "twenty-fifth",
    "and",
    "1//2",
)
NO_NUMBERS += (
    "9" * 500,
    "\\frac{1}{",
    "\\frac",
    "^",
    "e5",
    "%",
    "-",
    "\x00",
    "seven eight",
    "hundred",
    "a",
    "an",
    "½½",
    "inf",
    "nan",
)


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_is_read_exactly(text):
    number = read_number(text)
    assert number is not None
    assert number.value == NUMBERS[text]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_number_is_none(text):
    assert read_number(text) is None


@given(st.integers(-(10**12), 10**12))
def test_a_whole_number_is_the_same_in_every_spelling(value):
    for spelled in (f"{value}", f"{value:,}", f"{value:_}", f"${value}$", f"\\boxed{{{value}}}"[7:-1], f"{value}.0"):
        assert read_number(spelled).value == value
    assert read_number(f"{value:,}".replace(",", " ")).value == value


@given(st.fractions(max_denominator=1000, min_value=-1000, max_value=1000))
def test_a_fraction_is_the_same_in_every_spelling(value):
    above, below = value.numerator, value.denominator
    for spelled in (f"{above}/{below}", f"\\frac{{{above}}}{{{below}}}", f"${above}/{below}$", f" {above} / {below} "):
        assert read_number(spelled).value == value


def test_rounding_is_forgiven_where_it_shows():
    def same(gold, given_answer):
        return rounded(read_number(gold), read_number(given_answer))

    assert same("3.14", "3.14159")
    assert not same("3.14", "3.1461")
    assert not same("3.14", "3.1")
    assert same("1/3", "0.333")
    assert not same("1/3", "0.33")
    assert not same("0.125", "0.13")
    assert not same("5", "4.9999")
    assert not same("12.5", "12.54")


def test_tolerance_is_the_larger_of_relative_and_absolute():
    one, near = Number(Fraction(100)), Number(Fraction(101))
    assert within(relative=0.01)(one, near)
    assert not within(relative=0.005)(one, near)
    assert within(relative=0.005, absolute=1.0)(one, near)
    assert not exactly(one, near)


FINAL = {
    "<answer>5</answer>": ("5", "tag"),
    "a <answer>5</answer> b <ANSWER> 6 </ANSWER>": ("6", "tag"),
    "<answer>so \\boxed{7}</answer>": ("7", "tag"),
    "x \\boxed{1} y\n\\boxed{\\frac{1}{2}} z": ("\\frac{1}{2}", "box"),
    "\\boxed{3} or \\boxed{4}": ("3, 4", "box"),
    "\\boxed{\\boxed{3}}": ("\\boxed{3}", "box"),
    "\\boxed{ unbalanced \\boxed{3}": ("3", "box"),
    "work\n#### 18": ("18", "marker"),
    "Answer: 5\nthanks": ("5", "marker"),
    "The answer is **5**.": ("5**.", "marker"),
    "The answer:\n5": ("5", "marker"),
    "first\nlast\n\n": ("last", "last line"),
    "<think>Answer: 4</think>\nthe end": ("the end", "last line"),
    "the answering machine is on": ("the answering machine is on", "last line"),
    "": ("", "last line"),
}


@pytest.mark.parametrize("output", FINAL)
def test_the_final_answer_is_found(output):
    assert find_answer(output) == FINAL[output]


def test_only_the_end_of_an_output_is_looked_at():
    assert find_answer("<answer>5</answer>" + " " * LOOK + "6").text == "6"


def test_an_answer_is_found_through_what_unicode_does_to_case():
    assert find_answer("İİİİ <answer>5</answer>").text == "5"


def test_the_rule_that_decided_is_named():
    scored = answer().score(task("0.5"), "I get 1/2 in the end.\nAnswer: 1/2")
    assert scored.value == 1
    assert scored.parts == {"numeric": 1.0}
    assert "numeric" in scored.reason
    assert "marker" in scored.reason
    wrong = answer().score(task("0.5"), "2")
    assert wrong.value == 0
    assert "numeric" in wrong.reason


def test_one_of_several_gold_answers_is_enough():
    reward = answer()
    assert reward.score(task("USA", "United States"), "the united states").value == 1
    assert reward.score(task("USA", "United States"), "Canada").value == 0


def test_a_task_without_gold_is_invalid_and_an_output_without_answer_is_wrong():
    reward = answer()
    assert reward.score(task(), "5").value is None
    assert reward.score(task(" "), "5").value is None
    assert reward.score(task("5"), "").value == 0
    assert reward.score(task("5"), " \n ").reason == "no answer: the output is empty"
    assert reward.score(task("5"), "<think>5").value == 0


def test_a_rule_of_ones_own_is_a_function():
    from flowgrpo.contracts import Scored

    backwards = Rule("backwards", lambda _, gold, given_answer: Scored(float(gold[::-1] == given_answer)))
    reward = match_answers([EXACT, backwards])
    assert reward.score(task("abc"), "cba").parts == {"backwards": 1.0}
    assert reward.score(task("abc"), "abc").parts == {"exact": 1.0}
    assert reward.score(task("abc"), "abd").value == 0


def test_a_gold_that_a_rule_can_not_read_is_invalid_unless_another_matches():
    from flowgrpo.contracts import Scored

    broken = Rule("broken", lambda _, gold, __: Scored(None, "unreadable") if gold == "?" else None)
    reward = match_answers([broken, NUMERIC, TEXT])
    assert reward.score(task("?", "5"), "5").value == 1
    assert reward.score(task("?", "5"), "6").value is None
    assert reward.score(task("5"), "6").value == 0


def test_a_variable_is_compared_where_both_name_one():
    reward = answer()
    assert reward.score(task("x = 5"), "x=5").value == 1
    assert reward.score(task("x = 5"), "5").value == 1
    assert reward.score(task("5"), "x = 5").value == 1
    assert reward.score(task("x = 5"), "y = 5").value == 0


def test_typography_is_taken_off():
    assert plain(r"$\text{Caf\'es}$".replace("\\'e", "é")) == "Cafés"
    assert plain("**5\u00a0km**.") == "5 km"
    assert plain(r"\left( 1,\! 2 \right)") == "( 1, 2 )"
    assert plain("10⁻⁵") == "10^-5"
    assert bare(plain("The Cafés!")) == bare("cafe")
    assert bare("glass") == "glass"
    assert bare("The") == "the"


@given(st.text())
def test_plain_text_is_plain_already(text):
    once = plain(text)
    assert bare(once) == bare(plain(once)) or "\\" in text or "$" in text or "{" in text
    assert "\n" not in once
