"""School answers: choices, units, dates, lists, yes and no; a gold answer is itself in every spelling.

Single examples are in pairs.txt.
"""

from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.rewards.answers.dates import Date, read_date, read_time
from flowgrpo.rewards.answers.school import (
    named_letters,
    options_of,
    read_ratio,
    read_truth,
    same_choice,
    school,
    split_label,
    split_list,
)
from flowgrpo.rewards.answers.units import UNIT_TABLE, read_quantity, units_of
from flowgrpo.types import BadInput, Task

REWARD = school()


def task(query="", **metadata):
    return Task("t", query, ("A",), "school", metadata)


def value(gold, output, **metadata):
    return REWARD.score(Task("t", "", (gold,), "school", metadata), output).value


LETTER = "{}|({})|{})|{}.|[{}]|**{}**|option {}|Option ({})|The answer is {}.|Answer: {}|\\boxed{{{}}}|It's {}."
LETTER += "|<answer>{}</answer>|The correct option is ({}).|$\\text{{({})}}$"
TWO = ("{} or {}", "{} and {}", "{}, {}", "either {} or {}", "{}/{}", "{} {}", "{}. Actually {}.", "{}. red; {}. blue")
TWO += ("{}. red (or {}. blue)", "{}) red, {}) blue", "{}. No, {}.", "{}. red. {}. blue.", "{}. red ({})")


@given(st.permutations("ABCDEFGHIJ"), st.sampled_from(LETTER.split("|")), st.booleans(), st.sampled_from(TWO))
def test_a_letter_is_itself_in_every_spelling_and_neither_another_nor_one_of_two(letters, spelling, lower, two):
    gold, other, *_ = letters
    cased = str.lower if lower and "It's" not in spelling else str.upper
    assert value(gold, spelling.format(cased(gold))) == 1
    assert value(gold, spelling.format(cased(other))) == 0
    assert value(gold, two.format(gold, other)) == value(other, two.format(gold, other)) == 0


def test_options_come_from_metadata_or_the_question_and_mean_their_letters():
    query = "What? (A) the core (B) the mantle\n(C) water"
    assert options_of(task(query)) == {"A": "the core", "B": "the mantle", "C": "water"}
    assert options_of(task(options=["x", "y"])) == {"A": "x", "B": "y"}
    assert options_of(task(choices={"a)": "x"})) == {"A": "x"}
    assert options_of(task("A. Smith wrote it.")) == {}
    with pytest.raises(BadInput, match="options must be"):
        options_of(task(options=5))
    assert options_of(task("What?\nA. x\nB. y\n\nChoose one.")) == {"A": "x", "B": "y"}
    right = [("B", "Photosynthesis."), ("photosynthesis", "B"), ("photosynthesis", "**B. Photosynthesis**")]
    wrong = [("B", "B. respiration"), ("B", "respiration"), ("photosynthesis", "A. photosynthesis")]
    texts = ["respiration", "photosynthesis"]
    for labels in ("{0}", "{1}. {0}", "{1}) {0}", "({1}) {0}", "{1}: {0}", "({2}) {0}"):
        options = [labels.format(text, letter, letter.lower()) for text, letter in zip(texts, "AB", strict=True)]
        for pairs, score in ((right, 1), (wrong, 0)):
            for gold, output in pairs:
                for listed_options in (options, dict(zip("AB", options, strict=True))):
                    assert value(gold, output, options=listed_options) == score, (options, gold, output)
    assert options_of(task(options=["A. Smith", "C. Jones"])) == {"A": "A. Smith", "B": "C. Jones"}
    numbers = ["A. 0.9", "B. 0.7"]
    assert value("0.9", "A. 0.9", options=numbers) == value("B", "0.7", options=numbers) == 1
    for output in ("A. 0.7", "A. 0.8", "B. 0.9", "A. 0.9; B. 0.7", "A. 0.9 (or B)"):
        assert value("0.9", output, options=numbers) == value("0.7", output, options=numbers) == 0, output
    assert value("↑", "B", options=["A. ↓", "B. ↑"]) == 1
    assert value("↑", "A", options=["A. ↓", "B. ↑"]) == value("↑", "A. ↑", options=["A. ↓", "B. ↑"]) == 0


def test_letters_are_told_from_articles_and_pronouns():
    letters = {"A plant grows": None, "I think so": None, "A is right": {"A"}, "I pick option a": {"A"}, "not B": set()}
    letters["B, not A"] = {"B"}
    assert {text: named_letters(text) for text in letters} == letters
    assert split_label("b. photosynthesis") == ("B", "photosynthesis")
    assert split_label("bring it") == ("", "bring it")
    assert same_choice(task(), "42", "B") is None


def test_every_spelling_of_a_unit_is_of_its_dimension():
    spellings = [
        (dimension, spelling)
        for dimension, rows in UNIT_TABLE.items()
        for _, names in rows
        for spelling in names.split()
    ]
    assert len(spellings) > 150
    for dimension, spelling in spellings:
        assert dimension in {unit.dimension for unit in units_of(spelling.replace("-", " "))}, spelling


UNITS = "km kg L h m g ml min cm s m^2 km/h °C N"


@given(st.integers(1, 500), st.sampled_from(UNITS.split()))
def test_a_quantity_is_itself_in_every_spelling_and_no_other(number, unit):
    gold = f"{number} {unit}"
    for spelling in (gold, f"{number}{unit}", f"{number}.0 {unit}", f"${number}\\text{{ {unit}}}$", f"It is {gold}."):
        assert value(gold, spelling) == 1, spelling
    larger = f"{number + 1} {unit}"
    for spelling in (larger, f"-{gold}", f"{number} furlongs", f"not {gold}", f"{gold} or {larger}"):
        assert value(gold, spelling) == 0, spelling


@given(st.integers(1, 99999))
def test_units_convert_exactly(number):
    for unit, output, right in (
        ("m", f"{number / 1000:.5f} km", 1),
        ("g", f"{number * 1000} mg", 1),
        ("cm^2", f"{number * 100} mm²", 1),
        ("min", f"{number // 60} h {number % 60} min", 1),
        ("m", f"{number} km", 0),
    ):
        assert value(f"{number} {unit}", output) == right
    for text in ("", "km", "5 km 3", "not 5 apples", "5 km or 6 km", "5 very many big green apples", "5 1"):
        assert read_quantity(text) is None, text


@given(st.dates(min_value=date(1000, 1, 1)))
def test_a_date_is_itself_in_every_spelling(day):
    gold, name = f"{day:%B} {day.day}, {day.year}", f"{day:%A}, the {day.day}th of {day:%b} {day.year}"
    for spelling in (
        gold,
        f"{day.day} {day:%B} {day.year}",
        day.isoformat(),
        f"{day.month}/{day.day}/{day.year}",
        name,
    ):
        assert value(gold, spelling) == 1, spelling
    assert value(gold, f"{day:%B} {day.day}, {day.year - 1}") == 0
    assert value(gold, f"{day:%B} {day.day % 28 + 1}, {day.year}") == (day.day == day.day % 28 + 1)


def test_dates_and_times_are_read_or_are_none():
    dates = {"Feb 29": {Date(None, 2, 29)}, "07/04/1776": {Date(1776, 7, 4), Date(1776, 4, 7)}}
    dates |= dict.fromkeys(("", "July", "July 45, 1776", "13/13/2000", "1/2/3", "July July 4", "may be"), frozenset())
    dates |= dict.fromkeys(("4 5 July 1776", "2000-13-01"), frozenset())
    assert {text: read_date(text) for text in dates} == dates
    times = {"3:30 pm": (930, True), "15:30": (930, True), "3:30": (210, False), "12 am": (0, True)}
    times |= {"noon": (720, True), "quarter to four": (225, False)}
    times |= dict.fromkeys(("", "25:00", "3:61", "3", "13 pm", "0:30 pm", "half past", "abc"))
    assert {text: read_time(text) for text in times} == times


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6), st.randoms())
def test_a_list_is_itself_in_every_spelling_and_order_counts_if_asked(numbers, random):
    shuffled = random.sample(numbers, len(numbers))
    gold, other = (", ".join(map(str, items)) for items in (numbers, shuffled))
    for spelling in (gold, other.replace(",", ";"), f"[{other}]"):
        assert value(gold, spelling) == 1, spelling
    assert value(f"({gold})", f"({other})") == value(gold, other, ordered=True) == (shuffled == numbers)
    assert value(gold, f"{gold}, 99") == 0
    assert value(gold, ", ".join(map(str, [numbers[0] + 1, *numbers[1:]]))) == 0


def test_lists_split_at_the_top_level_and_long_ones_compare_as_texts():
    parts = {"(1, 2), (3, 4)": ("", ["(1, 2)", "(3, 4)"]), "{a, b}": ("{}", ["a", "b"]), "3 < 5": ("<", ["3", "5"])}
    parts |= {"1,234 and 5": ("", ["1,234", "5"]), "alone": ("", ["alone"])}
    assert {text: split_list(text) for text in parts} == parts
    up, down, other = (", ".join(map(str, numbers)) for numbers in (range(100), range(99, -1, -1), range(1, 101)))
    assert (value(up, down), value(up, other)) == (1, 0)


def test_yes_no_and_ratios_are_read_or_are_none():
    truths = dict.fromkeys(("Yes", "True", "Yes, it is", "t"), True)
    truths |= dict.fromkeys(("no.", "not true", "No, never"), False)
    truths |= dict.fromkeys(("", "maybe", "yes and no", "true or false", "Y axis", "no one", "none"))
    assert {text: read_truth(text) for text in truths} == truths
    assert read_ratio("6:8") == read_ratio("3 to 4")
    assert read_ratio("0:4") is read_ratio("3") is None
