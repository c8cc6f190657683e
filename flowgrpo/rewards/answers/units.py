"""Quantities: `read_quantity` reads a number with its unit; `QUANTITY` is the rule that compares two, exactly.

    "1.5 km"  "1500 metres"  "5 ft 3 in"  "1 h 30 min"  "$12.50"  "50 cents"  "20 °C"  "90 km/h"  "12 apples"

Conversions are fractions. A unit that is not in the table is a noun, and nouns must be the same. A missing unit is
forgiven where gold has none, or where the question names the unit of gold.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from flowgrpo.contracts import Scored
from flowgrpo.rewards.answers.extract import denies, hedges
from flowgrpo.rewards.answers.match import Rule, named, same_number, verdict
from flowgrpo.rewards.answers.numbers import PARTS, PERCENT, SCALES, SMALL, Number, read_plain
from flowgrpo.rewards.answers.spelling import bare, peel, plain_text, singular
from flowgrpo.types import Task


class Unit(NamedTuple):
    """`base = value * factor + offset`, in its dimension."""

    dimension: str
    factor: Fraction
    offset: Fraction = Fraction(0)


MOST = 120  # characters of a quantity
NOUN_WORDS = 4
NO_NOUNS = {"bc", "bce", "hundred", "squared", "cubed", "factorial", "plus", "minus", "times", "than", *SCALES}
NO_NOUNS |= {"if", "unless", "mod", "base", *SMALL}
SHORT = {" per ": "/", " / ": "/", "/ ": "/", " squared": "^2", " cubed": "^3", "° ": "°"}
TABLE: dict[str, list[tuple[str, str]]] = {  # dimension: factor and spellings; a spelling may stand in two dimensions
    "length": [
        ("1/1000000000", "nm nanometer nanometre"),
        ("1/1000000", "µm um micrometer micrometre micron"),
        ("1/1000", "mm millimeter millimetre"),
        ("1/100", "cm cms centimeter centimetre"),
        ("1/10", "dm decimeter decimetre"),
        ("1", "m meter metre"),
        ("1000", "km kms kilometer kilometre"),
        ("254/10000", 'in inch inches "'),
        ("3048/10000", "ft foot feet '"),
        ("9144/10000", "yd yard"),
        ("1609344/1000", "mi mile"),
    ],
    "mass": [
        ("1/1000000", "mg milligram milligramme"),
        ("1/1000", "g gram gramme"),
        ("1", "kg kgs kilogram kilogramme kilo"),
        ("1000", "t tonne metric-ton"),
        ("45359237/100000000", "lb lbs pound"),
        ("45359237/1600000000", "oz ounce"),
    ],
    "volume": [
        ("1/1000000", "ml milliliter millilitre cm^3 cc cubic-centimeter cubic-centimetre"),
        ("1/100000", "cl centiliter centilitre"),
        ("1/10000", "dl deciliter decilitre"),
        ("1/1000", "l liter litre dm^3 cubic-decimeter cubic-decimetre"),
        ("1", "m^3 cubic-meter cubic-metre"),
        ("3785411784/1000000000000", "gal gallon"),
        ("16387064/1000000000000", "in^3 cubic-inch cubic-inches"),
        ("28316846592/1000000000000", "ft^3 cubic-foot cubic-feet"),
    ],
    "area": [
        ("1/1000000", "mm^2 square-millimeter square-millimetre sq-mm"),
        ("1/10000", "cm^2 square-centimeter square-centimetre sq-cm"),
        ("1", "m^2 square-meter square-metre sq-m"),
        ("10000", "ha hectare"),
        ("1000000", "km^2 square-kilometer square-kilometre sq-km"),
        ("64516/100000000", "in^2 square-inch square-inches sq-in"),
        ("9290304/100000000", "ft^2 square-foot square-feet sq-ft"),
    ],
    "time": [
        ("1/1000", "ms millisecond"),
        ("1", "s sec second"),
        ("60", "min minute mins"),
        ("3600", "h hr hour hrs"),
        ("86400", "d day"),
        ("604800", "week wk"),
    ],
    "months": [("1", "month"), ("12", "year yr")],
    "speed": [
        ("1", "m/s mps meter/second metre/second"),
        ("1000/3600", "km/h kmh kph kmph kilometer/hour kilometre/hour"),
        ("1609344/3600000", "mph mi/h mile/hour"),
        ("1/100", "cm/s"),
        ("1000", "km/s kilometer/second kilometre/second"),
    ],
    "acceleration": [("1", "m/s^2 meter/second^2 metre/second^2 meter/second/second metre/second/second")],
    "density": [("1", "kg/m^3"), ("1000", "g/cm^3 g/ml kg/l")],
    "angle": [("1", "° deg degree")],
    "force": [("1", "N newton"), ("1000", "kN kilonewton")],
    "energy": [
        ("1", "J joule N*m"),
        ("1000", "kJ kilojoule"),
        ("1000000", "MJ megajoule"),
        ("4184/1000", "cal calorie"),
        ("4184", "kcal kilocalorie"),
        ("3600000", "kWh kilowatt-hour"),
    ],
    "power": [("1/1000", "mW milliwatt"), ("1", "W watt"), ("1000", "kW kilowatt"), ("1000000", "MW megawatt")],
    "pressure": [("1", "Pa pascal N/m^2"), ("1000", "kPa kilopascal"), ("100000", "bar"), ("101325", "atm atmosphere")],
    "frequency": [("1", "Hz hertz"), ("1000", "kHz kilohertz"), ("1000000", "MHz megahertz")],
    "current": [("1/1000", "mA milliampere milliamp"), ("1", "A ampere amp")],
    "voltage": [("1/1000", "mV millivolt"), ("1", "V volt"), ("1000", "kV kilovolt")],
    "resistance": [("1", "Ω ohm"), ("1000", "kΩ kilohm kiloohm")],
    "dollars": [("1", "$ usd us$ dollar us-dollar"), ("1/100", "¢ c cent")],
    "euros": [("1", "€ eur euro"), ("1/100", "cent eurocent")],
    "sterling": [("1", "£ gbp pound quid"), ("1/100", "p pence penny")],
    "rupees": [("1", "₹ inr rs rupee")],
    "yen": [("1", "¥ jpy yen")],
}
TEMPERATURES = {
    "°C C celsius degree-celsius degree-centigrade": Unit("temperature", Fraction(1), Fraction(27315, 100)),
    "°F F fahrenheit degree-fahrenheit": Unit("temperature", Fraction(5, 9), Fraction(45967, 180)),
    "K kelvin °K": Unit("temperature", Fraction(1)),
}
ANY_UNIT = {f"{kind}unit{s}" for kind in ("", "square ", "cubic ", "sq ", "sq. ") for s in ("", "s")}
UNIT_WRAPPERS = ("\\text{", "\\mathrm{", "\\mbox{", "\\textrm{")
MONEY = ("dollars", "euros", "sterling", "rupees", "yen")
CURRENCIES = ("us$", "$", "€", "£", "₹", "¥", "usd", "eur", "gbp", "inr", "rs.")


def _spellings() -> dict[str, tuple[Unit, ...]]:
    """List every spelling with what it can mean; words of three letters and more also in the plural."""
    found: dict[str, tuple[Unit, ...]] = {}
    rows = [(names, Unit(dimension, Fraction(factor))) for dimension, row in TABLE.items() for factor, names in row]
    for names, unit in rows + list(TEMPERATURES.items()):
        for name in names.split():
            plural = (name + "s",) if len(name) > 2 and name.isascii() and name[-1].isalpha() else ()
            for spelling in (name, *plural):
                found[spelling] = (*found.get(spelling, ()), unit)
    return found


SPELLINGS = _spellings()
LOWER = {spelling.lower(): units for spelling, units in reversed(SPELLINGS.items())}


# Quantities ---------------------------------------------------------------------------------------------
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
    for spelled, short in SHORT.items():
        text = text.replace(spelled, short)
    if text.startswith("degrees "):
        text = text.replace("degrees ", "degree-", 1)
    numerator, slash, rest = text.partition("/")
    parts = [_one(part.strip()) for part in (numerator, *rest.split("/"))] if slash else [text.replace(" ", "-")]
    worded = f"{'square' if text[-1:] == '2' else 'cubic'}-{text[:-2]}" if text.endswith(("^2", "^3")) else ""
    for name in ("/".join(parts), text[:-1] if text[-1:] in ("2", "3") else "", worded):
        powered = f"{name}^{text[-1]}" if name == text[:-1] and name else name
        if powered and (powered in SPELLINGS or powered.lower() in LOWER):
            return SPELLINGS.get(powered) or LOWER[powered.lower()]
    return ()


def _one(part: str) -> str:
    """Put a part of a compound unit into the singular: `kilometres` of `kilometres per hour`."""
    return part[:-1] if len(part) > 3 and part.endswith("s") else part


def split_unit(text: str) -> tuple[str, str]:
    """Split a formula from its unit: `60\\pi \\text{ cm}^2` -> (`60\\pi`, `cm^2`); no unit where it has none.

    In `\\text{}` any unit or noun is one, elsewhere only a unit of two letters or more: a single one is a variable.
    """
    text = peel(text[:MOST])
    at, wrapper = max((text.rfind(wrapper), wrapper) for wrapper in UNIT_WRAPPERS)
    inside, _, power = text[at + len(wrapper) :].partition("}") if at > 0 else ("", "", "")
    power = power.replace("²", "^2").replace("³", "^3").strip("$ {}").replace("{", "")
    unit = plain_text(inside) + power
    if at > 0 and power in ("", "^2", "^3") and (units_of(unit) or (_is_noun(unit.split()) and not hedges(unit))):
        return peel(text[:at]), unit
    plain = plain_text(text)
    percent = next((sign for sign in PERCENT if plain.endswith(sign) and len(plain) > len(sign)), "")
    if percent:
        return peel(plain[: -len(percent)]), "%"
    if plain.startswith(CURRENCIES) and plain.count("$") < 2:
        sign = next(sign for sign in CURRENCIES if plain.startswith(sign))
        return peel(plain[len(sign) :]), sign
    for at in _borders(plain):
        unit = plain[at:]
        signed = unit[1:2].isalpha() if unit[0].isalpha() else plain.count("$") < 2 or unit[0] != "$"
        angle = any(name in plain for name in ("sin", "cos", "tan"))  # of which the unit belongs to the argument
        if signed and not angle and (units_of(unit) or unit.lower() in ANY_UNIT):
            return peel(plain[:at]), unit
    return text, ""


def same_unit(unit: str, other: str) -> bool:
    """Say whether two spellings mean one unit, or the same noun; "units" are of any kind."""
    if unit.lower() in ANY_UNIT or other.lower() in ANY_UNIT:
        return "%" not in (unit, other)
    units, others = units_of(unit), units_of(other)
    if units and others:
        degrees = {"angle", "temperature"} == {kind.dimension for kind in (*units, *others)}
        return bool(set(units) & set(others)) or degrees
    return not units and not others and bare(unit) == bare(other)


def read_quantity(text: str) -> Quantity | None:
    """Read the quantity that a whole plain text is; a number alone is one without a unit."""
    if not text or len(text) > MOST:
        return None
    for words in (" of a ", " of an ", " of the "):
        text = text.replace(words, " ")
    return _money(text) or _one_quantity(text) or _compound(text)


def _money(text: str) -> Quantity | None:
    """Read `$5`, `-$5`, `US$ 5`, `USD 5`."""
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
    """Read a number, then a unit or a noun or nothing."""
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
    """Read `12 apples`: a number, and a few words that are no unit."""
    if denies(text) or hedges(text):
        return None
    for at in _borders(text):
        noun, number = text[at:], read_plain(text[:at].strip())
        words = noun.replace("-", " ").split()
        if number is not None and len(words) <= NOUN_WORDS and _is_noun(words):
            return Quantity(number, noun=bare(noun), spelling=noun)
    return None


def _is_noun(words: list[str]) -> bool:
    """Say whether words count something; what makes another number of it, as `squared` does, is none."""
    lower = [word.lower() for word in words]
    nouns = (word.isalpha() and word not in NO_NOUNS and singular(word) not in PARTS for word in lower)
    return all(nouns) and all(len(word) > 1 or word == "a" for word in lower)


def _compound(text: str) -> Quantity | None:
    """Read `5 ft 3 in`, `1 hour and 30 minutes`: from large to small, of one dimension."""
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
    """Cut a text before each digit that follows a unit."""
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
    (gold_name, gold), (name, answer) = named(plain_text(gold)), named(plain_text(answer))
    wanted, given = read_quantity(gold), read_quantity(answer)
    if wanted is None or given is None or (name != gold_name and name and gold_name):
        return None
    if wanted.number.doubtful and given.number.doubtful and not wanted.units:
        return None
    if not wanted.units or not given.units:
        return _without_unit(task, wanted, given)
    return verdict(any(_converted(task, wanted, one, given, other) for one in wanted.units for other in given.units))


def _without_unit(task: Task, wanted: Quantity, given: Quantity) -> Scored | None:
    """Compare two amounts of which one has no unit of the table."""
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
    """Say whether the question names the unit of gold, so that an answer need not."""
    marks = "".join(mark if mark.isalnum() or mark in "/^°$€£¥₹%" else " " for mark in query[: MOST * 20]).split()
    spelled = {unit for word in marks for unit in units_of(word.rstrip("."))} | {
        unit for mark in CURRENCIES if mark in query for unit in units_of(mark)
    }
    return bool(spelled & set(wanted.units))


def _converted(task: Task, wanted: Quantity, one: Unit, given: Quantity, other: Unit) -> bool:
    """Say whether two amounts are equal in the unit of the answer; one unit of money is not rounded."""
    if one.dimension != other.dimension:
        return False
    if one.dimension in MONEY:
        return wanted.number.value * one.factor == given.number.value * other.factor
    if one == other:
        return same_number(task, wanted.number, given.number)
    target = (wanted.number.value * one.factor + one.offset - other.offset) / other.factor
    number = given.number
    off = abs(target - number.value)
    return off == 0 or (number.decimals >= 2 and number.digits >= 3 and 2 * off <= (number.step or 0))


QUANTITY = Rule("quantity", same_quantity)
