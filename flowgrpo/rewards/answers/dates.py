"""Dates and times of day: `read_date` and `read_time` read what a text may mean; `DATE` and `TIME` are their rules.

    "July 4, 1776"  "4th of July 1776"  "Thursday, 4 Jul 1776"  "1776-07-04"  "7/4/1776"  "July 1776"
    "3:30 pm"  "15:30"  "half past three"  "noon"

A date of numbers such as 7/4/1776 may be read month first or day first; it matches where one of its readings does.
"""

from typing import NamedTuple

from flowgrpo.contracts import Scored
from flowgrpo.rewards.answers.match import Rule, verdict
from flowgrpo.rewards.answers.spelling import plain_text
from flowgrpo.types import Task

RANKS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh"]
RANKS += ["twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth"]
RANKS += ["twentieth", *(f"twenty-{rank}" for rank in RANKS[:9]), "thirtieth", "thirty-first"]
MONTHS = ["january", "february", "march", "april", "may", "june"]
MONTHS += ["july", "august", "september", "october", "november", "december"]
WEEKDAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
MOST = 60  # characters of a date
HOURS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


class Date(NamedTuple):
    """A date as far as it is known; None stands for an unknown year or day."""

    year: int | None
    month: int
    day: int | None


def read_date(text: str) -> frozenset[Date]:
    """Read a whole plain text as a date -> every date that it may mean; empty where it is none."""
    if len(text) > MOST:
        return frozenset()
    numbers = _of_numbers(text.lower().replace(" ", ""))
    if numbers:
        return numbers
    words = text.lower().replace("-", " ").replace(",", " ").replace(" of ", " ").replace(".", " ").split()
    plain_words = " ".join(word for word in words if word not in WEEKDAYS and word not in ("the", "on", "in"))
    return _of_words(plain_words.replace("twenty ", "twenty-").replace("thirty ", "thirty-").split())


def _of_words(words: list[str]) -> frozenset[Date]:
    """Read a month by its name, with a day, a year or both, in any order."""
    months = [_month(word) for word in words]
    if sum(month is not None for month in months) != 1 or not 2 <= len(words) <= 3:
        return frozenset()
    month = next(month for month in months if month is not None)
    numbers = [_ranked(word) for word, is_month in zip(words, months, strict=True) if is_month is None]
    days = [number for number in numbers if number is not None and 1 <= number <= 31]
    years = [number for number in numbers if number is not None and number > 31]
    if None in numbers or len(days) > 1 or len(years) > 1 or len(days) + len(years) != len(numbers):
        return frozenset()
    return _valid(years[0] if years else None, month, days[0] if days else None)


def _of_numbers(text: str) -> frozenset[Date]:
    """Read `1776-07-04`, `7/4/1776`, `4.7.1776`."""
    for sign in ("-", "/", "."):
        parts = text.split(sign)
        if len(parts) == 3 and all(part.isascii() and part.isdigit() and len(part) <= 4 for part in parts):
            first, second, third = map(int, parts)
            if len(parts[0]) == 4:
                return _valid(first, second, third)
            if len(parts[2]) != 4:
                return frozenset()
            day_first = _valid(third, second, first)
            return day_first if sign == "." else day_first | _valid(third, first, second)
    return frozenset()


def _month(word: str) -> int | None:
    """Find the number of a month by its name or its first three letters (`sept` too)."""
    if len(word) < 3:
        return None
    found = [at for at, name in enumerate(MONTHS, 1) if name == word or (name.startswith(word) and len(word) <= 4)]
    return found[0] if len(found) == 1 else None


def _ranked(word: str) -> int | None:
    """Read `4`, `4th`, `fourth`, `1776`."""
    if word in RANKS:
        return RANKS.index(word) + 1
    digits = word[:-2] if word[-2:] in ("st", "nd", "rd", "th") else word
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 4 else None


def _valid(year: int | None, month: int, day: int | None) -> frozenset[Date]:
    if not 1 <= month <= 12 or (day is not None and not 1 <= day <= DAYS[month - 1]):
        return frozenset()
    return frozenset({Date(year, month, day)})


def read_time(text: str) -> tuple[int, bool] | None:
    """Read a time of day -> minutes since midnight, and whether the half of the day is known."""
    lower = text.lower().replace("o'clock", "").replace("a.m", "am").replace("p.m", "pm").replace(".", ":").strip(" :")
    if lower in ("noon", "midday", "midnight", "12 noon", "12 midnight"):
        return (0 if "midnight" in lower else 720), True
    half = next((half for half in ("am", "pm") if lower.endswith(half)), "")
    told = " past " in lower or " to " in lower
    clock = _past(lower) if told else _clock(lower.removesuffix(half).strip(), bool(half))
    if clock is None or not half:
        return None if clock is None else (clock, clock >= 780)
    if clock >= 780 or clock < 60:
        return None
    return clock % 720 + 720 * (half == "pm"), True


def _clock(text: str, alone: bool) -> int | None:
    """Read `3:30`; `3` where the half of the day follows."""
    hours, colon, minutes = text.partition(":")
    if not (hours.isascii() and hours.isdigit() and len(hours) <= 2 and int(hours) < 24):
        return None
    if not colon:
        return int(hours) * 60 if alone else None
    if not (minutes.isascii() and minutes.isdigit() and len(minutes) == 2 and int(minutes) < 60):
        return None
    return int(hours) * 60 + int(minutes)


def _past(text: str) -> int | None:
    """Read `half past three`, `quarter to four`."""
    words = [word for word in text.split() if word != "a"]
    shifts = {("half", "past"): 30, ("quarter", "past"): 15, ("quarter", "to"): -15}
    shift = shifts.get((words[0], words[1])) if len(words) == 3 else None
    if shift is None:
        return None
    hours = [hour for hour, name in enumerate(HOURS, 1) if words[2] in (name, str(hour))]
    return hours[0] * 60 + shift if hours else None


def same_date(task: Task, gold: str, answer: str) -> Scored | None:  # noqa: ARG001
    """Compare dates by any of their readings; None where gold is no date."""
    wanted = read_date(plain_text(gold))
    if not wanted:
        return None
    text = plain_text(answer)
    given = read_date(text) or read_date(text.rpartition(" on ")[2])
    return verdict(bool(wanted & given))


def same_time(task: Task, gold: str, answer: str) -> Scored | None:
    """Compare times of day; gold is one where it says so itself (`3:30 pm`) or where the question asks for the time."""
    wanted = read_time(plain_text(gold))
    if wanted is None or not (wanted[1] or "time" in task.query.lower() or not plain_text(gold)[-1].isdigit()):
        return None
    given = read_time(plain_text(answer))
    if given is None:
        return None
    if wanted[1] and given[1]:
        return verdict(wanted[0] == given[0])
    return verdict(wanted[0] % 720 == given[0] % 720 and not (wanted[1] and ":" not in answer))


DATE = Rule("date", same_date)
TIME = Rule("time", same_time)
