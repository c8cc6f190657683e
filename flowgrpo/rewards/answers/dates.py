"""Dates and times of day: `read_date` and `read_time` parse a text; `DATE` and `TIME` are the rules that compare.

    "July 4, 1776"  "4th of July 1776"  "Thursday, 4 Jul 1776"  "1776-07-04"  "7/4/1776"  "July 1776"
    "3:30 pm"  "15:30"  "half past three"  "noon"

A date of numbers such as 7/4/1776 may be read month first or day first; it matches if one of its readings does.
"""

from typing import NamedTuple

from flowgrpo.contracts import RewardResult
from flowgrpo.rewards.answers.match import Rule, right_if
from flowgrpo.rewards.answers.spelling import plain_text
from flowgrpo.types import Task

ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh"]
ORDINALS += ["twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth"]
ORDINALS += ["twentieth", *(f"twenty-{rank}" for rank in ORDINALS[:9]), "thirtieth", "thirty-first"]
MONTHS = ["january", "february", "march", "april", "may", "june"]
MONTHS += ["july", "august", "september", "october", "november", "december"]
WEEKDAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
DAYS_IN_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
MAX_CHARACTERS = 60  # of a date
HOURS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


class Date(NamedTuple):
    """A date; the year or the day is None if unknown."""

    year: int | None
    month: int
    day: int | None


def read_date(text: str) -> frozenset[Date]:
    """Parse a whole plain text as a date -> every date that it may mean; empty if it is none."""
    if len(text) > MAX_CHARACTERS:
        return frozenset()
    numbers = _from_numbers(text.lower().replace(" ", ""))
    if numbers:
        return numbers
    words = text.lower().replace("-", " ").replace(",", " ").replace(" of ", " ").replace(".", " ").split()
    plain_words = " ".join(word for word in words if word not in WEEKDAYS and word not in ("the", "on", "in"))
    return _from_words(plain_words.replace("twenty ", "twenty-").replace("thirty ", "thirty-").split())


def _from_words(words: list[str]) -> frozenset[Date]:
    """Parse a month by its name, with a day, a year or both, in any order."""
    months = [_month(word) for word in words]
    if sum(month is not None for month in months) != 1 or not 2 <= len(words) <= 3:
        return frozenset()
    month = next(month for month in months if month is not None)
    numbers = [_day_or_year(word) for word, is_month in zip(words, months, strict=True) if is_month is None]
    days = [number for number in numbers if number is not None and 1 <= number <= 31]
    years = [number for number in numbers if number is not None and number > 31]
    if None in numbers or len(days) > 1 or len(years) > 1 or len(days) + len(years) != len(numbers):
        return frozenset()
    return _dates_if_valid(years[0] if years else None, month, days[0] if days else None)


def _from_numbers(text: str) -> frozenset[Date]:
    """Parse `1776-07-04`, `7/4/1776`, `4.7.1776`."""
    for sign in ("-", "/", "."):
        parts = text.split(sign)
        if len(parts) == 3 and all(part.isascii() and part.isdigit() and len(part) <= 4 for part in parts):
            first, second, third = map(int, parts)
            if len(parts[0]) == 4:
                return _dates_if_valid(first, second, third)
            if len(parts[2]) != 4:
                return frozenset()
            day_first = _dates_if_valid(third, second, first)
            return day_first if sign == "." else day_first | _dates_if_valid(third, first, second)
    return frozenset()


def _month(word: str) -> int | None:
    """Number of a month by its name or its first three letters (`sept` too)."""
    if len(word) < 3:
        return None
    numbers = [
        number for number, name in enumerate(MONTHS, 1) if name == word or (name.startswith(word) and len(word) <= 4)
    ]
    return numbers[0] if len(numbers) == 1 else None


def _day_or_year(word: str) -> int | None:
    """Parse `4`, `4th`, `fourth`, `1776`."""
    if word in ORDINALS:
        return ORDINALS.index(word) + 1
    digits = word[:-2] if word[-2:] in ("st", "nd", "rd", "th") else word
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 4 else None


def _dates_if_valid(year: int | None, month: int, day: int | None) -> frozenset[Date]:
    if not 1 <= month <= 12 or (day is not None and not 1 <= day <= DAYS_IN_MONTH[month - 1]):
        return frozenset()
    return frozenset({Date(year, month, day)})


def read_time(text: str) -> tuple[int, bool] | None:
    """Parse a time of day -> minutes since midnight, and whether it is known to be am or pm."""
    lower = text.lower().replace("o'clock", "").replace("a.m", "am").replace("p.m", "pm").replace(".", ":").strip(" :")
    if lower in ("noon", "midday", "midnight", "12 noon", "12 midnight"):
        return (0 if "midnight" in lower else 720), True
    half = next((half for half in ("am", "pm") if lower.endswith(half)), "")
    is_spoken = " past " in lower or " to " in lower
    clock = _spoken_time(lower) if is_spoken else _clock(lower.removesuffix(half).strip(), bool(half))
    if clock is None or not half:
        return None if clock is None else (clock, clock >= 780)
    if clock >= 780 or clock < 60:
        return None
    return clock % 720 + 720 * (half == "pm"), True


def _clock(text: str, needs_no_minutes: bool) -> int | None:
    """Parse `3:30`; also `3` if `needs_no_minutes`, since am or pm follows."""
    hours, colon, minutes = text.partition(":")
    if not (hours.isascii() and hours.isdigit() and len(hours) <= 2 and int(hours) < 24):
        return None
    if not colon:
        return int(hours) * 60 if needs_no_minutes else None
    if not (minutes.isascii() and minutes.isdigit() and len(minutes) == 2 and int(minutes) < 60):
        return None
    return int(hours) * 60 + int(minutes)


def _spoken_time(text: str) -> int | None:
    """Parse `half past three`, `quarter to four`."""
    words = [word for word in text.split() if word != "a"]
    shifts = {("half", "past"): 30, ("quarter", "past"): 15, ("quarter", "to"): -15}
    shift = shifts.get((words[0], words[1])) if len(words) == 3 else None
    if shift is None:
        return None
    hours = [hour for hour, name in enumerate(HOURS, 1) if words[2] in (name, str(hour))]
    return hours[0] * 60 + shift if hours else None


def same_date(task: Task, gold: str, answer: str) -> RewardResult | None:  # noqa: ARG001
    """Compare dates by any of their readings; None if gold is no date."""
    gold_dates = read_date(plain_text(gold))
    if not gold_dates:
        return None
    text = plain_text(answer)
    answer_dates = read_date(text) or read_date(text.rpartition(" on ")[2])
    return right_if(bool(gold_dates & answer_dates))


def same_time(task: Task, gold: str, answer: str) -> RewardResult | None:
    """Compare times of day; gold is one if it says so itself (`3:30 pm`) or if the question asks for the time."""
    gold_time = read_time(plain_text(gold))
    if gold_time is None or not (gold_time[1] or "time" in task.query.lower() or not plain_text(gold)[-1].isdigit()):
        return None
    answer_time = read_time(plain_text(answer))
    if answer_time is None:
        return None
    if gold_time[1] and answer_time[1]:
        return right_if(gold_time[0] == answer_time[0])
    return right_if(gold_time[0] % 720 == answer_time[0] % 720 and not (gold_time[1] and ":" not in answer))


DATE = Rule("date", same_date)
TIME = Rule("time", same_time)
