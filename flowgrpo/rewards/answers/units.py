"""Quantities: `read_quantity` reads a number with its unit; `QUANTITY` is the rule that compares two, exactly.

    "1.5 km"  "1500 metres"  "5 ft 3 in"  "1 h 30 min"  "$12.50"  "50 cents"  "20 °C"  "90 km/h"  "12 apples"

Conversions are exact fractions. A unit that is not in the table is a noun, and nouns must be equal. A missing unit is
forgiven if gold has none, or if the question names the unit of gold.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from flowgrpo.contracts import RewardResult
from flowgrpo.rewards.answers.extract import denies, hedges
from flowgrpo.rewards.answers.match import Rule, right_if, same_number, split_name
from flowgrpo.rewards.answers.numbers import FRACTION_WORDS, PERCENT_SIGNS, SCALES, SMALL_NUMBERS, Number, read_plain
from flowgrpo.rewards.answers.spelling import bare, peel, plain_text, singular
from flowgrpo.types import Task


class Unit(NamedTuple):
    """`base = value * factor + offset`, in its dimension."""

    dimension: str
    factor: Fraction
    offset: Fraction = Fraction(0)


MAX_CHARACTERS = 120  # of a quantity
MAX_NOUN_WORDS = 4
NOT_NOUNS = {"bc", "bce", "hundred", "squared", "cubed", "factorial", "plus", "minus", "times", "than", *SCALES}
NOT_NOUNS |= {"if", "unless", "mod", "base", *SMALL_NUMBERS}
REWRITES = {" per ": "/", " / ": "/", "/ ": "/", " squared": "^2", " cubed": "^3", "° ": "°"}
# dimension -> factors and spellings; a spelling may occur in two dimensions
UNIT_TABLE: dict[str, list[tuple[str, str]]] = {
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
    """Every spelling -> the units that it can mean; words of three letters or more also in the plural."""
    units_by_spelling: dict[str, tuple[Unit, ...]] = {}
    rows = [
        (names, Unit(dimension, Fraction(factor))) for dimension, row in UNIT_TABLE.items() for factor, names in row
    ]
    for names, unit in rows + list(TEMPERATURES.items()):
        for name in names.split():
            plural = (name + "s",) if len(name) > 2 and name.isascii() and name[-1].isalpha() else ()
            for spelling in (name, *plural):
                units_by_spelling[spelling] = (*units_by_spelling.get(spelling, ()), unit)
    return units_by_spelling


SPELLINGS = _spellings()
LOWERCASE_SPELLINGS = {spelling.lower(): units for spelling, units in reversed(SPELLINGS.items())}


# Quantities ---------------------------------------------------------------------------------------------
class Quantity(NamedTuple):
    """A number with a unit or a noun."""

    number: Number
    units: tuple[Unit, ...] = ()  # all that the spelling can mean
    noun: str = ""  # if the spelling is no unit
    spelling: str = ""


def units_of(text: str) -> tuple[Unit, ...]:
    """Units that a spelling can mean; empty if it is not in the table."""
    text = text.strip().rstrip(".")
    text = text.replace("**", "^").replace("^{2}", "^2").replace("^{3}", "^3").replace(" ^", "^")
    for words, short in REWRITES.items():
        text = text.replace(words, short)
    if text.startswith("degrees "):
        text = text.replace("degrees ", "degree-", 1)
    numerator, slash, denominators = text.partition("/")
    parts = [text.replace(" ", "-")]
    if slash:
        parts = [_singular_part(part.strip()) for part in (numerator, *denominators.split("/"))]
    spelled_out = f"{'square' if text[-1:] == '2' else 'cubic'}-{text[:-2]}" if text.endswith(("^2", "^3")) else ""
    for name in ("/".join(parts), text[:-1] if text[-1:] in ("2", "3") else "", spelled_out):
        powered = f"{name}^{text[-1]}" if name == text[:-1] and name else name
        if powered and (powered in SPELLINGS or powered.lower() in LOWERCASE_SPELLINGS):
            return SPELLINGS.get(powered) or LOWERCASE_SPELLINGS[powered.lower()]
    return ()


def _singular_part(part: str) -> str:
    """Singular of a part of a compound unit: `kilometres` of `kilometres per hour`."""
    return part[:-1] if len(part) > 3 and part.endswith("s") else part


def split_unit(text: str) -> tuple[str, str]:
    """Split a formula from its unit: `60\\pi \\text{ cm}^2` -> (`60\\pi`, `cm^2`); the unit is "" if it has none.

    In `\\text{}` any unit or noun counts, elsewhere only a unit of two letters or more: a single letter is a variable.
    """
    text = peel(text[:MAX_CHARACTERS])
    start, wrapper = max((text.rfind(wrapper), wrapper) for wrapper in UNIT_WRAPPERS)
    inside, _, power = text[start + len(wrapper) :].partition("}") if start > 0 else ("", "", "")
    power = power.replace("²", "^2").replace("³", "^3").strip("$ {}").replace("{", "")
    unit = plain_text(inside) + power
    if start > 0 and power in ("", "^2", "^3") and (units_of(unit) or (_is_noun(unit.split()) and not hedges(unit))):
        return peel(text[:start]), unit
    plain = plain_text(text)
    percent = next((sign for sign in PERCENT_SIGNS if plain.endswith(sign) and len(plain) > len(sign)), "")
    if percent:
        return peel(plain[: -len(percent)]), "%"
    if plain.startswith(CURRENCIES) and plain.count("$") < 2:
        sign = next(sign for sign in CURRENCIES if plain.startswith(sign))
        return peel(plain[len(sign) :]), sign
    for start in _unit_starts(plain):
        unit = plain[start:]
        is_unit = unit[1:2].isalpha() if unit[0].isalpha() else plain.count("$") < 2 or unit[0] != "$"
        is_trigonometric = any(name in plain for name in ("sin", "cos", "tan"))  # whose argument has the unit
        if is_unit and not is_trigonometric and (units_of(unit) or unit.lower() in ANY_UNIT):
            return peel(plain[:start]), unit
    return text, ""


def same_unit(unit: str, other: str) -> bool:
    """Whether two spellings mean the same unit or noun; "units" match any."""
    if unit.lower() in ANY_UNIT or other.lower() in ANY_UNIT:
        return "%" not in (unit, other)
    units, others = units_of(unit), units_of(other)
    if units and others:
        are_degrees = {"angle", "temperature"} == {kind.dimension for kind in (*units, *others)}
        return bool(set(units) & set(others)) or are_degrees
    return not units and not others and bare(unit) == bare(other)


def read_quantity(text: str) -> Quantity | None:
    """Parse a whole plain text as a quantity; a number alone is one without a unit."""
    if not text or len(text) > MAX_CHARACTERS:
        return None
    for words in (" of a ", " of an ", " of the "):
        text = text.replace(words, " ")
    return _money_amount(text) or _single(text) or _compound(text)


def _money_amount(text: str) -> Quantity | None:
    """Parse `$5`, `-$5`, `US$ 5`, `USD 5`."""
    is_negative = text.startswith("-")
    amount = text[is_negative:].strip()
    for sign in CURRENCIES:
        if amount.lower().startswith(sign):
            number_text = amount[len(sign) :].strip()
            for ending in (" " + sign, " dollars", " euros", " pounds"):  # `$5 dollars`
                number_text = number_text.removesuffix(ending)
            number = read_plain(number_text)
            return number and Quantity(
                number.scaled(-1 if is_negative else 1), units_of(sign.rstrip(".")), spelling=sign
            )
    return None


def _single(text: str) -> Quantity | None:
    """Parse a number, then a unit, a noun or nothing."""
    number = read_plain(text)
    if number is not None:
        return Quantity(number)
    for start in _unit_starts(text):
        units = units_of(text[start:])
        number = read_plain(text[:start].strip().removesuffix("-")) if units else None
        if number is not None:
            return Quantity(number, units, spelling=text[start:].strip())
    return _counted_noun(text)


def _unit_starts(text: str) -> Iterator[int]:
    """Yield each index at which a unit may begin."""
    for i in range(1, len(text)):
        previous, char = text[i - 1], text[i]
        is_start = char.isalpha() or char in "°$€£¥₹¢\"'"
        if is_start and not previous.isalpha() and previous not in "°/^\\{":
            yield i


def _counted_noun(text: str) -> Quantity | None:
    """Parse `12 apples`: a number, and a few words that are no unit."""
    if denies(text) or hedges(text):
        return None
    for start in _unit_starts(text):
        noun, number = text[start:], read_plain(text[:start].strip())
        words = noun.replace("-", " ").split()
        if number is not None and len(words) <= MAX_NOUN_WORDS and _is_noun(words):
            return Quantity(number, noun=bare(noun), spelling=noun)
    return None


def _is_noun(words: list[str]) -> bool:
    """Whether words are a noun that is counted; words that change the number, such as `squared`, are not."""
    lower = [word.lower() for word in words]
    nouns = (word.isalpha() and word not in NOT_NOUNS and singular(word) not in FRACTION_WORDS for word in lower)
    return all(nouns) and all(len(word) > 1 or word == "a" for word in lower)


def _compound(text: str) -> Quantity | None:
    """Parse `5 ft 3 in`, `1 hour and 30 minutes`: units of one dimension, from large to small."""
    pieces = _pieces(text.replace(" and ", " ").replace(",", " ").replace("'", "' ").removeprefix("-"))
    if not 2 <= len(pieces) <= 4:
        return None
    quantities = [_single(piece) for piece in pieces]
    if any(quantity is None or not quantity.units for quantity in quantities):
        return None
    units = [quantity.units[0] for quantity in quantities if quantity is not None]
    is_descending = all(big.factor > small.factor for big, small in itertools.pairwise(units))
    if not is_descending or len({unit.dimension for unit in units}) > 1 or units[0].offset:
        return None
    total = sum(
        (quantity.number.value * quantity.units[0].factor for quantity in quantities if quantity is not None),
        Fraction(0),
    )
    sign = -1 if text.startswith("-") else 1
    return Quantity(Number(sign * total), (Unit(units[0].dimension, Fraction(1)),), spelling=text)


def _pieces(text: str) -> list[str]:
    """Split a text before each digit that follows a unit."""
    starts = [0]
    is_after_unit = False
    for i, char in enumerate(text):
        if char.isdigit() and is_after_unit and text[i - 1] in " '":
            starts.append(i)
            is_after_unit = False
        is_after_unit |= char.isalpha() or char in "'\""
    return [text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def same_quantity(task: Task, gold: str, answer: str) -> RewardResult | None:
    """Compare two quantities of one dimension; None if one of the two is no quantity."""
    (gold_name, gold), (answer_name, answer) = split_name(plain_text(gold)), split_name(plain_text(answer))
    gold_quantity, answer_quantity = read_quantity(gold), read_quantity(answer)
    if gold_quantity is None or answer_quantity is None or (answer_name != gold_name and answer_name and gold_name):
        return None
    if gold_quantity.number.doubtful and answer_quantity.number.doubtful and not gold_quantity.units:
        return None
    if not gold_quantity.units or not answer_quantity.units:
        return _compare_without_unit(task, gold_quantity, answer_quantity)
    return right_if(
        any(
            _is_equal_in(task, gold_quantity, gold_unit, answer_quantity, answer_unit)
            for gold_unit in gold_quantity.units
            for answer_unit in answer_quantity.units
        )
    )


def _compare_without_unit(task: Task, gold: Quantity, answer: Quantity) -> RewardResult | None:
    """Compare two quantities of which one has no unit of the table."""
    is_same = same_number(task, gold.number, answer.number)
    if gold.number.percent and answer.units:
        return right_if(False)
    if gold.units or gold.noun:
        if answer.noun:
            return right_if(is_same and answer.noun == gold.noun)
        if answer.units:
            return right_if(False)
        if gold.units and not _query_names_unit(task.query, gold):
            return RewardResult(0.0, f"the unit is missing: {gold.spelling}")
    return right_if(is_same)


def _query_names_unit(query: str, gold: Quantity) -> bool:
    """Whether the question names the unit of gold, so that an answer need not."""
    words = "".join(
        char if char.isalnum() or char in "/^°$€£¥₹%" else " " for char in query[: MAX_CHARACTERS * 20]
    ).split()
    units = {unit for word in words for unit in units_of(word.rstrip("."))} | {
        unit for char in CURRENCIES if char in query for unit in units_of(char)
    }
    return bool(units & set(gold.units))


def _is_equal_in(task: Task, gold: Quantity, gold_unit: Unit, answer: Quantity, answer_unit: Unit) -> bool:
    """Whether two quantities are equal in the unit of the answer; money is never rounded."""
    if gold_unit.dimension != answer_unit.dimension:
        return False
    if gold_unit.dimension in MONEY:
        return gold.number.value * gold_unit.factor == answer.number.value * answer_unit.factor
    if gold_unit == answer_unit:
        return same_number(task, gold.number, answer.number)
    target = (gold.number.value * gold_unit.factor + gold_unit.offset - answer_unit.offset) / answer_unit.factor
    number = answer.number
    error = abs(target - number.value)
    return error == 0 or (number.decimals >= 2 and number.digits >= 3 and 2 * error <= (number.step or 0))


QUANTITY = Rule("quantity", same_quantity)
