"""School answers: choices, units, dates, lists, yes and no; a gold answer is itself in every spelling."""

from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.rewards.choice import choice, labelled, named_letters, options_of
from flowgrpo.rewards.dates import Date, read_date, read_time
from flowgrpo.rewards.school import read_ratio, read_truth, school, split_list
from flowgrpo.rewards.unit_table import TABLE
from flowgrpo.rewards.units import read_quantity, units_of
from flowgrpo.types import BadInput, Task

REWARD = school()


def value(gold, output, query="", **metadata):
    return REWARD.score(Task("t", query, (gold,), "school", metadata), output).value


LETTER = ("{}", "({})", "{})", "{}.", "[{}]", "**{}**", "option {}", "Option ({})", "The answer is {}.", "Answer: {}")
LETTER += ("\\boxed{{{}}}", "<answer>{}</answer>", "The correct option is ({}).", "It's {}.", "$\\text{{({})}}$")


@given(st.sampled_from("ABCDEFGHIJ"), st.sampled_from("ABCDEFGHIJ"), st.sampled_from(LETTER), st.booleans())
def test_a_letter_is_itself_in_every_spelling_and_no_other(gold, other, spelling, lower):
    lower = lower and "It's" not in spelling
    assert value(gold, spelling.format(gold.lower() if lower else gold)) == 1
    assert value(gold, spelling.format(other.lower() if lower else other)) == (gold == other)


@given(
    st.permutations("ABCD"), st.sampled_from(["{} or {}", "{} and {}", "{}, {}", "either {} or {}", "{}/{}", "{} {}"])
)
def test_two_letters_are_not_one(letters, spelling):
    assert value(letters[0], spelling.format(*letters)) == 0
    assert value(letters[1], spelling.format(*letters)) == 0


def test_options_are_read_from_metadata_or_the_question():
    assert options_of(Task("t", "", ("A",), "d", {"options": ["x", "y"]})) == {"A": "x", "B": "y"}
    assert options_of(Task("t", "", ("A",), "d", {"choices": {"a)": "x"}})) == {"A": "x"}
    query = "What? (A) the core (B) the mantle\n(C) water"
    assert options_of(Task("t", query, ("A",), "d")) == {"A": "the core", "B": "the mantle", "C": "water"}
    assert options_of(Task("t", "A. Smith wrote it.", ("A",), "d")) == {}
    with pytest.raises(BadInput, match="options must be"):
        options_of(Task("t", "", ("A",), "d", {"options": 5}))


def test_the_text_of_an_option_stands_for_its_letter():
    options = ["respiration", "photosynthesis"]
    assert value("B", "Photosynthesis.", options=options) == 1
    assert value("photosynthesis", "B", options=options) == 1
    assert value("B", "B. respiration", options=options) == 0
    assert value("B", "respiration", options=options) == 0


def test_letters_are_told_from_articles_and_pronouns():
    assert named_letters("A plant grows") is None
    assert named_letters("I think so") is None
    assert named_letters("A is right") == {"A"}
    assert named_letters("I pick option a") == {"A"}
    assert named_letters("not B") == set()
    assert named_letters("B, not A") == {"B"}
    assert labelled("b. photosynthesis") == ("B", "photosynthesis")
    assert labelled("bring it") == ("", "bring it")
    assert choice(Task("t", "", ("42",), "d"), "42", "B") is None


SPELLED = [
    (dimension, spelling) for dimension, rows in TABLE.items() for _, names in rows for spelling in names.split()
]


@pytest.mark.parametrize(("dimension", "spelling"), SPELLED)
def test_every_spelling_of_a_unit_is_of_its_dimension(dimension, spelling):
    assert dimension in {unit.dimension for unit in units_of(spelling.replace("-", " "))}


@given(
    st.integers(1, 500),
    st.sampled_from(["km", "kg", "L", "h", "m", "g", "ml", "min", "cm", "s", "m^2", "km/h", "°C", "N"]),
)
def test_a_quantity_is_itself_in_every_spelling_and_no_other(number, unit):
    gold = f"{number} {unit}"
    for spelled in (gold, f"{number}{unit}", f"{number}.0 {unit}", f"${number}\\text{{ {unit}}}$", f"It is {gold}."):
        assert value(gold, spelled) == 1, spelled
    for spelled in (
        f"{number + 1} {unit}",
        f"-{gold}",
        f"{number} furlongs",
        f"not {gold}",
        f"{gold} or {number + 1} {unit}",
    ):
        assert value(gold, spelled) == 0, spelled


@given(st.integers(1, 99999))
def test_units_convert_exactly(number):
    assert value(f"{number} m", f"{number / 1000:.5f} km") == 1
    assert value(f"{number} g", f"{number * 1000} mg") == 1
    assert value(f"{number} cm^2", f"{number * 100} mm²") == 1
    assert value(f"{number} min", f"{number // 60} h {number % 60} min") == 1
    assert value(f"{number} m", f"{number} km") == 0


def test_a_missing_unit_is_forgiven_where_the_question_names_it():
    assert value("5 km", "5") == 0
    assert value("5 km", "5", "How many km is it?") == 1
    assert value("5 km", "5", "How many kilometers is it?") == 1
    assert value("5 km", "5", "How many metres is it?") == 0
    assert value("5", "5 km") == 1


def test_a_temperature_converts_only_where_gold_is_one():
    assert value("20 °C", "68 °F") == 1
    assert value("20", "68 °F") == 0
    assert value("68", "68 °F") == 1


def test_money_is_never_rounded():
    assert value("$12.50", "$12.5") == 1
    assert value("$12.50", "$12.504") == 0
    assert value("12.50 €", "$12.50") == 0


def test_a_quantity_that_is_none():
    for text in ("", "km", "5 km 3", "not 5 apples", "5 km or 6 km", "5 very many big green apples", "5 1"):
        assert read_quantity(text) is None, text


@given(st.dates(min_value=date(1000, 1, 1)))
def test_a_date_is_itself_in_every_spelling(day):
    gold = f"{day:%B} {day.day}, {day.year}"
    for spelled in (gold, f"{day.day} {day:%B} {day.year}", day.isoformat(), f"{day.month}/{day.day}/{day.year}"):
        assert value(gold, spelled) == 1, spelled
    assert value(gold, f"{day:%A}, the {day.day}th of {day:%b} {day.year}") == 1
    assert value(gold, f"{day:%B} {day.day}, {day.year - 1}") == 0
    assert value(gold, f"{day:%B} {day.day % 28 + 1}, {day.year}") == (day.day == day.day % 28 + 1)


def test_what_is_no_date_is_none():
    for text in (
        "",
        "July",
        "July 45, 1776",
        "13/13/2000",
        "1/2/3",
        "July July 4",
        "4 5 July 1776",
        "2000-13-01",
        "may be",
    ):
        assert read_date(text) == frozenset(), text
    assert read_date("Feb 29") == {Date(None, 2, 29)}
    assert read_date("07/04/1776") == {Date(1776, 7, 4), Date(1776, 4, 7)}


def test_times_of_day():
    assert read_time("3:30 pm") == (930, True)
    assert read_time("15:30") == (930, True)
    assert read_time("3:30") == (210, False)
    assert read_time("12 am") == (0, True)
    assert read_time("noon") == (720, True)
    assert read_time("quarter to four") == (225, False)
    for text in ("", "25:00", "3:61", "3", "13 pm", "0:30 pm", "half past", "abc"):
        assert read_time(text) is None, text
    assert value("15:30", "1:2") == 1  # a ratio, unless the question asks for the time
    assert value("15:30", "3:30 pm", "What time is it?") == 1


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6), st.randoms())
def test_a_list_is_itself_in_every_spelling_and_order_counts_where_asked(numbers, random):
    gold = ", ".join(map(str, numbers))
    shuffled = random.sample(numbers, len(numbers))
    for spelled in (gold, "; ".join(map(str, shuffled)), f"[{', '.join(map(str, shuffled))}]"):
        assert value(gold, spelled) == 1, spelled
    pair = f"({gold})"
    assert value(pair, f"({', '.join(map(str, shuffled))})") == (shuffled == numbers)
    assert value(gold, ", ".join(map(str, shuffled)), ordered=True) == (shuffled == numbers)
    assert value(gold, f"{gold}, 99") == 0
    assert value(gold, ", ".join(map(str, [numbers[0] + 1, *numbers[1:]]))) == 0


def test_long_lists_are_compared_word_by_word():
    gold = ", ".join(map(str, range(100)))
    assert value(gold, ", ".join(map(str, reversed(range(100))))) == 1
    assert value(gold, ", ".join(map(str, range(1, 101)))) == 0


def test_lists_split_at_the_top_level():
    assert split_list("(1, 2), (3, 4)") == ("", ["(1, 2)", "(3, 4)"])
    assert split_list("{a, b}") == ("{}", ["a", "b"])
    assert split_list("1,234 and 5") == ("", ["1,234", "5"])
    assert split_list("3 < 5") == ("<", ["3", "5"])
    assert split_list("alone") == ("", ["alone"])


def test_yes_and_no():
    said = {
        "Yes": True,
        "no.": False,
        "True": True,
        "not true": False,
        "Yes, it is": True,
        "t": True,
        "No, never": False,
    }
    assert {text: read_truth(text) for text in said} == said
    for text in ("", "maybe", "yes and no", "true or false", "Y axis", "no one", "none"):
        assert read_truth(text) is None, text


def test_ratios_are_proportional():
    assert read_ratio("6:8") == read_ratio("3 to 4")
    assert read_ratio("0:4") is None
    assert read_ratio("3") is None
    assert value("3:4", "4:3") == 0
