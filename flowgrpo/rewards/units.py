"""Quantities: a number with its unit flows in, and flows out in the base unit of its dimension, exactly.

    "1.5 km"  "1500 metres"  "5 ft 3 in"  "1 h 30 min"  "$12.50"  "50 cents"  "20 °C"  "90 km/h"  "12 apples"

Conversions are fractions. A unit that is not in the table is a noun, and nouns must be the same. A missing unit is
forgiven where gold has none, or where the question names the unit of gold.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from flowgrpo.contracts import Scored
from flowgrpo.rewards.answer import Rule, named, same_number, verdict
from flowgrpo.rewards.final import denies, hedges
from flowgrpo.rewards.numbers import PARTS, SCALES, Number, read_plain
from flowgrpo.rewards.spelling import bare, plain, singular
from flowgrpo.rewards.unit_table import CURRENCIES, LOWER, MONEY, SPELLINGS, Unit
from flowgrpo.types import Task

MOST = 120  # characters of a quantity
NOUN_WORDS = 4
NO_NOUNS = {
    "bc",
    "bce",
    "hundred",
    "squared",
    "cubed",
    "factorial",
    "plus",
    "minus",
    "times",
    "than",
    "if",
    "unless",
    *SCALES,
}


class Quantity(NamedTuple):
    """A number as it was written; its units, of which a spelling may have several; or else its noun."""

    number: Number
    units: tuple[Unit, ...] = ()
    noun: str = ""
    spelling: str = ""


def units_of(text: str) -> tuple[Unit, ...]:
    """Look up the units that a spelling can mean; empty where it is in no table."""
    text = text.strip().rstrip(".")
    text = text.replace("**", "^").replace("^{2}", "^2").replace("^{3}", "^3").replace(" ^", "^")
    for spelled, short in (
        (" per ", "/"),
        (" / ", "/"),
        ("/ ", "/"),
        (" squared", "^2"),
        (" cubed", "^3"),
        ("° ", "°"),
    ):
        text = text.replace(spelled, short)
    if text.startswith("degrees "):
        text = text.replace("degrees ", "degree-", 1)
    numerator, slash, rest = text.partition("/")
    parts = [_one(part) for part in (numerator, *rest.split("/"))] if slash else [text.replace(" ", "-")]
    for name in ("/".join(parts), text[:-1] if text[-1:] in ("2", "3") else ""):
        powered = f"{name}^{text[-1]}" if name == text[:-1] and name else name
        if powered and (powered in SPELLINGS or powered.lower() in LOWER):
            return SPELLINGS.get(powered) or LOWER[powered.lower()]
    return ()


def _one(part: str) -> str:
    """A part of a compound unit in the singular: `kilometres` of `kilometres per hour`."""
    part = part.strip()
    return part[:-1] if len(part) > 3 and part.endswith("s") else part


def read_quantity(text: str) -> Quantity | None:
    """The quantity that a whole plain text is; a number alone is one without a unit."""
    if not text or len(text) > MOST:
        return None
    for words in (" of a ", " of an ", " of the "):
        text = text.replace(words, " ")
    return _money(text) or _one_quantity(text) or _compound(text)


def _money(text: str) -> Quantity | None:
    """`$5`, `-$5`, `US$ 5`, `USD 5`."""
    negative = text.startswith("-")
    amount = text[negative:].strip()
    for sign in CURRENCIES:
        if amount.lower().startswith(sign):
            after = amount[len(sign) :].strip()
            for ending in (" " + sign, " dollars", " euros", " pounds"):  # `$5 dollars`
                after = after.removesuffix(ending)
            number = read_plain(after)
            return number and Quantity(number.scaled(-1 if negative else 1), units_of(sign.rstrip(".")), spelling=sign)
    return None


def _one_quantity(text: str) -> Quantity | None:
    """A number, then a unit or a noun or nothing."""
    number = read_plain(text)
    if number is not None:
        return Quantity(number)
    for at in _borders(text):
        units = units_of(text[at:])
        number = read_plain(text[:at].strip().removesuffix("-")) if units else None
        if number is not None:
            return Quantity(number, units, spelling=text[at:].strip())
    return _with_noun(text)


def _borders(text: str) -> Iterator[int]:
    """Yield each index of the text at which a unit may begin."""
    for at in range(1, len(text)):
        before, mark = text[at - 1], text[at]
        begins = mark.isalpha() or mark in "°$€£¥₹¢\"'"
        if begins and not before.isalpha() and before not in "°/^\\{":
            yield at


def _with_noun(text: str) -> Quantity | None:
    """`12 apples`: a number, and a few words that are no unit."""
    if denies(text) or hedges(text):
        return None
    for at in _borders(text):
        noun, number = text[at:], read_plain(text[:at].strip())
        words = noun.replace("-", " ").split()
        if number is not None and len(words) <= NOUN_WORDS and _is_noun(words):
            return Quantity(number, noun=bare(noun), spelling=noun)
    return None


def _is_noun(words: list[str]) -> bool:
    """Words that count something; what makes another number of it, as `squared` does, is none."""
    lower = [word.lower() for word in words]
    nouns = (word.isalpha() and word not in NO_NOUNS and singular(word) not in PARTS for word in lower)
    return all(nouns) and all(len(word) > 1 or word == "a" for word in lower)


def _compound(text: str) -> Quantity | None:
    """`5 ft 3 in`, `1 hour and 30 minutes`: from large to small, of one dimension."""
    pieces = _pieces(text.replace(" and ", " ").replace(",", " ").replace("'", "' ").removeprefix("-"))
    if not 2 <= len(pieces) <= 4:
        return None
    quantities = [_one_quantity(piece) for piece in pieces]
    if any(one is None or not one.units for one in quantities):
        return None
    units = [one.units[0] for one in quantities if one is not None]
    falling = all(big.factor > small.factor for big, small in itertools.pairwise(units))
    if not falling or len({unit.dimension for unit in units}) > 1 or units[0].offset:
        return None
    total = sum((one.number.value * one.units[0].factor for one in quantities if one is not None), Fraction(0))
    sign = -1 if text.startswith("-") else 1
    return Quantity(Number(sign * total), (Unit(units[0].dimension, Fraction(1)),), spelling=text)


def _pieces(text: str) -> list[str]:
    """A text cut before each digit that follows a unit."""
    starts = [0]
    seen = False
    for at, mark in enumerate(text):
        if mark.isdigit() and seen and text[at - 1] in " '":
            starts.append(at)
            seen = False
        seen |= mark.isalpha() or mark in "'\""
    return [text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def same_quantity(task: Task, gold: str, answer: str) -> Scored | None:
    """Compare two amounts in units of one dimension; None where one of the two is no quantity."""
    (gold_name, gold), (name, answer) = named(plain(gold)), named(plain(answer))
    wanted, given = read_quantity(gold), read_quantity(answer)
    if wanted is None or given is None or (name != gold_name and name and gold_name):
        return None
    if wanted.number.doubtful and given.number.doubtful and not wanted.units:
        return None
    if not wanted.units or not given.units:
        return _without_unit(task, wanted, given)
    return verdict(any(_converted(task, wanted, one, given, other) for one in wanted.units for other in given.units))


def _without_unit(task: Task, wanted: Quantity, given: Quantity) -> Scored | None:
    """One of the two has no unit of the table."""
    same = same_number(task, wanted.number, given.number)
    if wanted.number.percent and given.units:
        return verdict(False)
    if wanted.units or wanted.noun:
        if given.noun:
            return verdict(same and given.noun == wanted.noun)
        if given.units:
            return verdict(False)
        if wanted.units and not _asked(task.query, wanted):
            return Scored(0.0, f"the unit is missing: {wanted.spelling}")
    return verdict(same)


def _asked(query: str, wanted: Quantity) -> bool:
    """Whether the question names the unit of gold, so that an answer need not."""
    marks = "".join(mark if mark.isalnum() or mark in "/^°$€£¥₹%" else " " for mark in query[: MOST * 20]).split()
    spelled = {unit for word in marks for unit in units_of(word.rstrip("."))} | {
        unit for mark in CURRENCIES if mark in query for unit in units_of(mark)
    }
    return bool(spelled & set(wanted.units))


def _converted(task: Task, wanted: Quantity, one: Unit, given: Quantity, other: Unit) -> bool:
    """Equal in the unit of the answer; one unit of money is not rounded."""
    if one.dimension != other.dimension:
        return False
    if one.dimension in MONEY:
        return wanted.number.value * one.factor == given.number.value * other.factor
    if one == other:
        return same_number(task, wanted.number, given.number)
    target = (wanted.number.value * one.factor + one.offset - other.offset) / other.factor
    number = given.number
    off = abs(target - number.value)
    return off == 0 or (
        number.step is not None and number.decimals >= 2 and number.digits >= 3 and 2 * off <= number.step
    )


QUANTITY = Rule("quantity", same_quantity)
