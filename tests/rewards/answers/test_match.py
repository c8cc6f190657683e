"""The matcher in its parts: numbers, the final answer of an output, which rule decides, what is invalid."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.contracts import RewardResult
from flowgrpo.rewards.answers.extract import MAX_PARSED, MAX_TAIL, FoundAnswer, denies, find_answer, hedges, readings
from flowgrpo.rewards.answers.match import (
    EXACT,
    NUMERIC,
    RIGHT,
    TEXT,
    WRONG,
    Rule,
    answer,
    judge_by_rules,
    match_answers,
    numeric,
    split_name,
)
from flowgrpo.rewards.answers.numbers import Number, exactly, read_plain, rounded, within
from flowgrpo.rewards.answers.school import school
from flowgrpo.rewards.answers.spelling import bare, drop_emphasis, plain_text
from flowgrpo.rewards.answers.symbolic import mathematics
from flowgrpo.types import Task


def call_all_different(function, *_, seconds):  # noqa: ARG001
    """`Sandbox.call` without a process: every formula parses, and none equals another."""
    return True if function.endswith("readable") else ("different", 0.0)


def task(*golds, query=""):
    return Task("t", query, golds, "test")


NUMBERS = {
    "42": 42, "-7": -7, "−7": -7, "+7": 7, "minus 7": -7, "negative 7": -7, "(5)": 5, "(-5)": -5, "1. ": 1,  # noqa: RUF001
    "1,234,567.5": "1234567.5", "1.234.567,5": "1234567.5", "1 234 567": 1234567, "12,34,567": 1234567,
    "1'234": 1234, "1,234": 1234, "1.234": "1.234", "12,5": "12.5", ".5": "1/2", "5.": 5, "007": 7,
    "3/4": "3/4", "-3/4": "-3/4", "3/-4": "-3/4", "-3/-4": "3/4", "1.5/3": "1/2", "0/5": 0,
    "-1 1/2": "-3/2", "1½": "3/2", "2 and 1/2": "5/2", "0 1/2": "1/2", "1 3/2": None, "1 2/2": None, "1 0/2": None,
    r"\dfrac{3}{4}": "3/4", r"2\frac13": "7/3", r"\frac{1}{2} 5": None, r"\frac{1}{0}": None, r"-1\frac12": "-3/2",
    r"6.02 \times 10^{23}": 602 * 10**21, "1.5e-3": "0.0015", "2E3": 2000, "10³": 1000, "2^-1": "1/2", "2**3": 8,
    "3x10^2": 300, "-2^2": -4, "0^2": None, "1e400": 10**400, "1e401": None, "1e-401": None, "2^401": None,
    "45%": "9/20", "45 percent": "9/20", "45 per cent": "9/20", "45pct": "9/20", "-5%": "-1/20", "%": None,
    "2.5 million": 2500000, "3 dozen": 36, "million 2": None,
    "zero": 0, "twenty-one": 21, "two hundred and five": 205, "one million two hundred thousand": 1200000,
    "a hundred": 100, "nine thousand nine hundred ninety nine": 9999, "three quarters": "3/4", "a half": "1/2",
    "half": "1/2", "one third": "1/3", "two and a half": "5/2", "twenty fifths": 4, "two halves": 1,
    "twenty-fifth": None, "two half": None, "one halves": None, "two zero": None, "five and": None, "ten five": None,
    "twenty ten": None, "hundred": None, "hundred hundred": None, "thousand": None, "two thousand thousand": None,
    "one hundred hundred": None, "a": None, "an": None, "and": None, "seven eight": None, "two a": None,
    "2 billion": 2 * 10**9, "1 trillion": 10**12, "one fourth": "1/4", "two sevenths": "2/7", "one sixth": "1/6",
    "one eighth": "1/8", "one ninth": "1/9", "one tenth": "1/10", "two hundredths": "1/50", "one thousandth": "1/1000",
    "": None, "abc": None, "1/0": None, "1.2.3": None, "1,23,4": None, "1234,567": "1234.567", "0,123": "0.123",
    "--5": None, "3 4": None, "10^10^10": None, "9^9999": None, "1e999999": None, "1//2": None, "½½": None, "inf": None,
    "nan": None, r"\frac{1}{": None, r"\frac": None, "^": None, "e5": None, "-": None, "\x00": None, "(57": None,
    "12,34,56": None, "123,45,678": None, "1_000": 1000, "1,,000": None, ",5": None, "1,2,3": None, "1,234.5.6": None,
    "1.5,234": None, "٣": None, "5,": 5, ".": None, "9" * 100: 10**100 - 1, "9" * 101: None, "0" * 100 + "/1": 0,
    "1e" + "0" * 100: 1, "1e" + "0" * 101: None, "1" * 80 + "e" + "0" * 79: "1" * 80, "1" * 80 + "e" + "0" * 80: None,
    "2^400": 2**400, "4^-2": "1/16", "1023^400": 1023**400, "2047^373": None, "1*2*3^2": None, "1,23,456": 123456,
    "twenty and one": 21, "one hundred and two thousand and three": 102003, "one " * 17: None,
}  # fmt: skip


def read(text) -> Number | None:
    return read_plain(plain_text(text))


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_is_read_exactly_or_not_at_all(text):
    number, expected = read(text), NUMBERS[text]
    assert (number and number.value) == (None if expected is None else Fraction(expected))


def test_a_number_knows_how_it_was_written():
    half = Fraction(1, 2)
    assert read("0.50") == Number(half, Fraction(1, 100), 2, 2)
    assert read("-12.5%") == Number(Fraction(-1, 8), Fraction(1, 1000), 1, 3, percent=True)
    assert read("1.5 thousand") == Number(Fraction(1500), Fraction(100), 1, 2)
    assert read("1/2") == read("a half") == Number(half, None, 0, 0)
    assert [read(text).doubtful for text in ("1,234", "12,5", "1,234,567", "1.5", "1,234.5")] == [
        True, True, False, False, False
    ]  # fmt: skip


@given(st.integers(-(10**12), 10**12), st.fractions(max_denominator=1000, min_value=-1000, max_value=1000))
def test_a_number_is_the_same_in_every_spelling(whole, value):
    for spelling in (
        f"{whole}",
        f"{whole:,}",
        f"{whole:_}",
        f"{whole:,}".replace(",", " "),
        f"${whole}$",
        f"{whole}.0",
    ):
        assert read(spelling).value == whole
    numerator, denominator = value.numerator, value.denominator
    for spelling in (
        f"{numerator}/{denominator}",
        f"\\frac{{{numerator}}}{{{denominator}}}",
        f"${numerator}/{denominator}$",
        f" {numerator} / {denominator} ",
    ):
        assert read(spelling).value == value


ROUNDED = "3.14 3.14159|3.14 3.145|3.14 157/50|3.14 22/7|1/3 0.333|0.67 2/3|66.7% 2/3|2/3 66.7%|3.00e8 2.998e8"
NOT_ROUNDED = "3.14 3.1451|3.14 3.1|3.14 3|0.14 0.141|12.5 12.54|5 4.9999|1/3 0.3335|1/3 0.33|1/8 0.13|0.125 0.13"
NOT_ROUNDED += "|0.67 0.671|0.7 2/3|67% 2/3|2/3 67%|12.5% 12.54%|0.01 1/99|66.7% 0.67"


def test_rounding_is_forgiven_at_the_written_precision():
    for pairs, is_same in ((ROUNDED, True), (NOT_ROUNDED, False)):
        for pair in pairs.split("|"):
            assert rounded(*map(read, pair.split())) == is_same, pair


def test_tolerance_is_the_larger_of_relative_and_absolute():
    gold, neighbour = Number(Fraction(100)), Number(Fraction(101))
    assert within(relative=0.01)(gold, neighbour)
    assert not within(relative=0.005)(gold, neighbour)
    assert within(relative=0.005, absolute=1.0)(gold, neighbour)
    assert within(relative=0.01)(Number(Fraction(-100)), Number(Fraction(-101)))
    assert not exactly(gold, neighbour)
    assert exactly(gold, gold)


FINAL_ANSWERS = {
    "tag": {
        "<answer>5</answer>": "5", "a <answer>5</answer> b <ANSWER> 6 </ANSWER>": "6",
        "<answer>so \\boxed{7}</answer>": "7", "İİİİ <answer>5</answer>": "5",  # which in lower case are longer
    },
    "box": {
        "x \\boxed{1} y\n\\boxed{\\frac{1}{2}} z": "\\frac{1}{2}", "\\boxed{3} or \\boxed{4}": "3, 4",
        "\\boxed{3}\\boxed{4}": "3, 4", "\\boxed{\\boxed{3}}": "\\boxed{3}", "\\fbox{2} \\boxed{3}": "2, 3",
        "\\boxed{\\boxed{1} \\boxed{2}}": "\\boxed{1} \\boxed{2}", "\\boxed{1} \\boxed{2\n3}": "1, 2\n3",
        "\\boxed{ unbalanced \\boxed{3}": "3", "\\boxed{\\}} }": "\\}",
    },
    "marker": {
        "work\n#### 18": "18", "####5": "5", "####\nAnswer: 7": "Answer: 7", "Answer: 7\n####": "7",
        "Answer: 5\nthanks": "5", "Answer: 5\nThe result is 6": "6", "Answer: 5. The answer is": "5. The answer is",
        "answers: 5": "5", "The answer is **5**.": "5.", "**Answer** : * 5": "5", "The answer:\n5": "5",
        "answer" + " " * 38 + ": 5": "5", "$\\text{Answer: }5$.": "5", "| Answer | **5** |": "5",
        "| answer: | 5 | 6 |": "5 | 6",
    },
    "last line": {
        "5</answer>": "5</answer>", "The answer isn't known": "The answer isn't known", "": "",
        "first\nlast\n\n": "last", "# *the* `end`": "the end",
        "answer" + " " * 40 + ": 5": "answer" + " " * 40 + ": 5", "<think>Answer: 4</think>\nthe end": "the end",
        "the answering machine is on": "the answering machine is on", "<answer>5</answer>" + " " * MAX_TAIL + "6": "6",
    },
}  # fmt: skip


@pytest.mark.parametrize("source", FINAL_ANSWERS)
def test_the_final_answer_is_found(source):
    answers = {output: find_answer(output) for output in FINAL_ANSWERS[source]}
    assert answers == {output: (text, source) for output, text in FINAL_ANSWERS[source].items()}


EMPHASIS = {  # None where nothing changes
    "The answer is **18**.": "The answer is 18.", "18**": "18", "**Answer: $18": "Answer: $18", "***a***": "a",
    "__a__ _b_ *c*": "a b c", "_Answer:_ 18": "Answer: 18", "`a`": "a", "<b>a</b>": "a", "is **-7**": "is -7",
    "**(1+1)*12*1**": "(1+1)*12*1", "**5** (five)": "5 (five)", "2**3": None, "2 ** 3": None, "(x+1)**2": None,
    "2*3": None, "2 *3* 4": None, "snake_case": None, "x_1 + x_2": None, "$a^*$ and $b^*$": None, "*a\nb*": None,
    "$_nC_r$": None, "* a": None, "5 *": None, "_": None, "": None,
}  # fmt: skip
IN_BOLD = {
    1.0: r"""The answer is **18**. ¦ The answer is: **18** ¦ Final Answer: **\$18** ¦ **Answer:** 18 ¦ **Answer: $18**
        __Answer: 18__ ¦ The answer is _18_. ¦ > **Answer: 18** ¦ - **Answer:** `18` ¦ * Answer: **18** ¦ ### Answer: 18
        ### Final Answer ⏎ **18** ¦ | **Answer** | **18** | ¦ <answer>The answer is **18**.</answer> ¦ **Answer: 18
        **Answer: \boxed{18}** ¦ \boxed{**18**} ¦ **The answer is \(18\)**. ¦ \textbf{Answer: 18} ¦ It is ***18***""",
    0.0: """The answer is **17**. ¦ **Answer: $81** ¦ The answer is **18** or **19**. ¦ The answer is not **18**.
        **1****8**0 ¦ The answer is **18**2. ¦ Answer: **17** (not 18) ¦ Answer: 17 (18) ¦ *1*8*0*
        It is not 18, it is **17**.""",
}


def test_emphasis_is_removed_and_operators_stay():
    assert {text: drop_emphasis(text) for text in EMPHASIS} == {text: plain or text for text, plain in EMPHASIS.items()}


@pytest.mark.parametrize("domain", ["answer", "k12", "math"])
def test_no_rule_sees_the_emphasis_around_an_answer(domain):
    reward = {"answer": answer(), "k12": school(), "math": mathematics(call_all_different)}[domain]
    for value, outputs in IN_BOLD.items():
        for output in outputs.replace("\n", "¦").split("¦"):
            assert reward.score(task("18"), output.strip().replace(" ⏎ ", "\n")).value == value, output
    if domain != "answer":
        for output in ("The final answer is **18 dollars**.", "**Answer: 18 (dollars)**"):
            assert reward.score(task("18"), output).value == 1, output


READINGS = {
    "5": ("5",),
    "so the sum is 3 + 4 = 7": ("so the sum is 3 + 4 = 7", "3 + 4 = 7", "the sum is 3 + 4 = 7", "7"),
    "x = 5": ("x = 5",),
    "x = 5 = 5": ("x = 5 = 5", "5"),
    "it is about 5": ("it is about 5", "about 5", "5"),
    "B, not A": ("B, not A", "B"),
    "the cost of $5$ apples": ("the cost of $5$ apples", "5"),
    "not $5$": ("not $5$",),
    "it is 5 or 6": ("it is 5 or 6",),
    "": (),
    "5 is it": ("5 is it", "it"),
    "it is not 5, it's 6": ("it is not 5, it's 6", "it is not 5, it is 6", "6"),
    "not 5 but 6": ("not 5 but 6", "6"),
    "5 (apples)": ("5 (apples)", "5 apples"),
    "0.5 (1/2)": ("0.5 (1/2)", "0.5"),
    "5 (six)": ("5 (six)",),
    "it is 5!": ("it is 5!", "5!", "5"),
    "5!": ("5!",),
    "is " * 133 + "x": ("is " * 133 + "x",),
    "a" * MAX_PARSED: ("a" * MAX_PARSED,),
    "a" * (MAX_PARSED + 1): (),
    "or " * 133 + "a": ("or " * 133 + "a",),
}


def test_a_sentence_is_read_whole_and_after_its_last_link():
    assert {text: readings(FoundAnswer(text, "last line")) for text in READINGS} == READINGS


def test_hedges_and_denials_are_words():
    assert hedges("Maybe 5")
    assert not hedges("orange")
    assert denies("it isn’t 5")  # noqa: RUF001
    assert not denies("a knot")


def test_the_deciding_rule_is_named_and_a_long_answer_is_shortened():
    scored = answer().score(task("0.5"), "I get 1/2 in the end.\nAnswer: 1/2")
    assert scored == RewardResult(1.0, "numeric, in the marker: '1/2'", {"numeric": 1.0})
    assert answer().score(task("0.5"), "2") == RewardResult(0.0, "not the gold answer, in the last line: '2' (numeric)")
    assert answer().score(task("a"), "a\n") == RewardResult(1.0, "exact: the whole output", {"exact": 1.0})
    for size, quoted in ((60, "b" * 60), (61, "b" * 57 + "...")):
        assert f": {quoted!r} (" in answer().score(task("a"), "b" * size).reason


def test_one_matching_gold_is_enough_and_a_task_without_gold_is_invalid():
    reward, long = answer(), "Answer: 5 or\nAnswer: 6"
    assert reward.score(task("USA", "United States"), "the united states").value == 1
    assert reward.score(task("USA", "United States"), "Canada").value == 0
    assert reward.score(task(), "5").value is reward.score(task(" "), "5").value is None
    assert reward.score(task("5"), " \n ") == RewardResult(0.0, "no answer: the output is empty")
    assert reward.score(task("5"), "<think>4</think>") == RewardResult(0.0, "no answer was found")
    assert reward.score(task("5"), "<think>5").value == 0
    spaced = [long + " " * MAX_TAIL, long + " " * (MAX_TAIL + 1)]  # the whole output, unless it is much longer
    assert [reward.score(task(long), output).value for output in spaced] == [1, 0]


def test_a_custom_rule_is_a_function_and_the_first_that_applies_decides():
    backwards = Rule("backwards", lambda _, gold, text: RewardResult(float(gold[::-1] == text), "read back"))
    reward = match_answers([EXACT, backwards, TEXT])
    assert reward.score(task("abc"), "cba").parts == {"backwards": 1.0}
    assert reward.score(task("abc"), "abc.").parts == {"exact": 1.0}
    assert reward.score(task("abc"), "ABC").reason.endswith("(backwards: read back)")
    for answers in (("it is 7", "7"), ("8", "it is 7")):  # the best over all readings
        assert judge_by_rules([TEXT], task(), "it is 7", answers) == ("text", RIGHT)
    wrong = match_answers([EXACT]).score(task("abc"), "abd")
    assert wrong == RewardResult(0.0, "not the gold answer, in the last line: 'abd' (no rule)")


def test_an_unreadable_gold_is_invalid_unless_another_matches():
    broken = Rule("broken", lambda _, gold, __: RewardResult(None, "unreadable") if gold == "?" else None)
    reward = match_answers([broken, NUMERIC, TEXT])
    assert reward.score(task("?", "5"), "5").value == 1
    assert reward.score(task("?", "5"), "the sum is 5").value == 1
    assert reward.score(task("?", "5"), "6") == RewardResult(None, "unreadable")
    assert reward.score(task("5"), "6").value == 0


def test_a_number_with_a_doubtful_comma_is_never_wrong():
    assert numeric(task(), "1,234", "1234") == numeric(task(), "1234", "1,234") == RIGHT
    assert numeric(task(), "1,234", "5") is numeric(task(), "5", "1,234") is numeric(task(), "5", "x") is None
    assert numeric(task(), "5", "6") == WRONG


def test_variables_are_compared_if_both_name_one():
    assert [split_name(text) for text in ("x = 5", "xy = 5", "x = y = 5", "5", "1 = 5")] == [
        ("x", "5"), ("", "xy = 5"), ("", "x = y = 5"), ("", "5"), ("", "1 = 5")
    ]  # fmt: skip
    for gold, output, value in (("x = 5", "x=5", 1), ("x = 5", "5", 1), ("5", "x = 5", 1), ("x = 5", "y = 5", 0)):
        assert answer().score(task(gold), output).value == value


def test_a_percent_sign_may_be_missing_if_the_question_asks_for_percent():
    for gold, output in (("45%", "45"), ("45", "45%")):
        assert answer().score(task(gold, query="What PERCENT is it?"), output).value == 1
        assert answer().score(task(gold, query="What is it?"), output).value == 0
    assert answer().score(task("45%", query="What percent?"), "0.45%").value == 0


def test_typography_is_removed():
    texts = {
        "$\\text{Cafés}$": "Cafés",
        "**5\u00a0km**.": "5 km",
        r"\left( 1,\! 2 \right)": "( 1, 2 )",
        "10⁻⁵": "10^-5",
    }
    assert {text: plain_text(text) for text in texts} == texts
    assert [bare(plain_text("The Cafés!")), bare("glass"), bare("The")] == [bare("cafe"), "glass", "the"]


@given(st.text())
def test_plain_text_is_plain_already(text):
    plain = plain_text(text)
    assert bare(plain) == bare(plain_text(plain)) or "\\" in text or "$" in text or "{" in text
    assert "\n" not in plain
