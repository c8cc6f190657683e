"""Numbers as people write them: `read_plain` parses a text into an exact `Number`.

    "-1,234.5"  "1.234,5"  "3/4"  "1 3/4"  "\\frac{3}{4}"  "6.02 \\times 10^{23}"  "2.5 million"  "45%"  "two thirds"
    "0.1\\overline{6}"

Everything is bounded: text of at most `MAX_CHARACTERS`, `MAX_DIGITS` digits, powers of at most `MAX_BITS` bits. A
larger one (10^10^10) is not read as a number and never computed. `exactly`, `rounded` and `within` compare two numbers.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

MAX_CHARACTERS, MAX_DIGITS, MAX_BITS, MAX_EXPONENT = 160, 100, 4096, 400

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
ONES += " seventeen eighteen nineteen"
SMALL_NUMBERS = {word: value for value, word in enumerate(ONES.split())}
SMALL_NUMBERS |= {
    word: 10 * tens
    for tens, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)
}
SCALES = {"dozen": 12, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
FRACTION_WORDS = {"half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7}
FRACTION_WORDS |= {"eighth": 8, "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1000}
PERCENT_SIGNS = ("percent", "per cent", "pct", "%")


class Number(NamedTuple):
    """A value, and how it was written."""

    value: Fraction
    step: Fraction | None = None  # of the last decimal place; None if there are no decimals
    decimals: int = 0  # number of decimal places
    digits: int = 0  # number of significant digits
    percent: bool = False
    doubtful: bool = False  # its comma could also separate a list

    def scaled(self, factor: Fraction | int) -> "Number":
        """The number times a factor, at the same relative precision."""
        step = None if self.step is None else self.step * abs(factor)
        return self._replace(value=self.value * factor, step=step)


Close = Callable[[Number, Number], bool]  # (gold, answer) -> whether they count as equal


def exactly(gold: Number, answer: Number) -> bool:
    """Whether two numbers are equal as fractions."""
    return gold.value == answer.value


def rounded(gold: Number, answer: Number) -> bool:
    """Whether two numbers are equal, or equal at the written precision of the coarser one.

    That is gold's precision if gold has two decimals or more and the answer is a fraction (0.67 is 2/3), or the answer
    has more decimals and gold at least three digits. It is the answer's, of three decimals or more, if gold is a
    fraction with endless decimals. A percent sign that only one of them has counts as two decimals.
    """
    error = abs(gold.value - answer.value)
    if error == 0:
        return True
    percent_places = 2 * (gold.percent - answer.percent)
    if gold.step is None:
        return (
            answer.decimals + max(-percent_places, 0) >= 3
            and has_endless_decimals(gold.value)
            and 2 * error <= (answer.step or 0)
        )
    is_fraction = answer.step is None and answer.value.denominator > 1
    is_finer = answer.step is not None and answer.step < gold.step and gold.digits >= 3
    return (
        gold.decimals + max(percent_places, 0) >= 2
        and gold.digits >= 2
        and (is_fraction or is_finer)
        and 2 * error <= gold.step
    )


def within(*, relative: float = 0.0, absolute: float = 0.0) -> Close:
    """Make the comparison |answer - gold| <= max(relative |gold|, absolute)."""
    fraction, bound = Fraction(relative), Fraction(absolute)
    return lambda gold, answer: abs(gold.value - answer.value) <= max(fraction * abs(gold.value), bound)


def has_endless_decimals(value: Fraction) -> bool:
    """Whether the decimals of a fraction never end."""
    denominator = value.denominator
    for factor in (2, 5):
        while denominator % factor == 0:
            denominator //= factor
    return denominator != 1


def read_plain(text: str) -> Number | None:
    """Parse a whole plain text (`plain_text`) as a number; None if it is none."""
    text = text.strip()
    if not text or len(text) > MAX_CHARACTERS:
        return None
    lower = text.lower()
    ending = next((ending for ending in PERCENT_SIGNS if lower.endswith(ending)), None)
    if ending is not None:
        number = _signed(text[: -len(ending)].strip())
        return number and number.scaled(Fraction(1, 100))._replace(percent=True)
    return _signed(text)


def _signed(text: str) -> Number | None:
    """Parse a number with or without a sign, in brackets or not."""
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    for sign, factor in (("-", -1), ("+", 1), ("minus ", -1), ("negative ", -1)):
        if text.lower().startswith(sign):
            number = _unsigned(text[len(sign) :].strip())
            return number and number.scaled(factor)
    return _unsigned(text)


def _unsigned(text: str) -> Number | None:
    if "\\frac" in text:
        return _latex_fraction(text)
    if "/" in text:
        return _fraction(text)
    return _decimal_or_power(text) or _with_scale(text) or _in_words(text) or _repeating(text)


def _decimal_or_power(text: str) -> Number | None:
    """Parse a decimal, also in scientific notation, or a power."""
    if "^" in text or "**" in text:
        return _power(text.replace("**", "^"))
    mantissa, mark, exponent = text.replace("E", "e").partition("e")
    number = _decimal(mantissa)
    if number is None or not mark:
        return number
    value = _integer(exponent)
    return None if value is None or abs(value) > MAX_EXPONENT else number.scaled(Fraction(10) ** value)


def _power(text: str) -> Number | None:
    """Parse `a^b` or `c * a^b`, with integers a and b."""
    left, _, exponent = text.partition("^")
    power = _integer(exponent.strip().removeprefix("{").removesuffix("}"))
    for sign in ("*", "x", " "):
        if sign in left:
            coefficient, base = left.rsplit(sign, 1)
            break
    else:
        coefficient, base = "1", left
    factor, number = _decimal(coefficient.strip()), _integer(base.strip())
    if power is None or factor is None or not number or abs(power) > MAX_EXPONENT:
        return None
    if number.bit_length() * abs(power) > MAX_BITS:
        return None
    return factor.scaled(Fraction(number) ** power)


def _latex_fraction(text: str) -> Number | None:
    """Parse `\\frac{a}{b}`, also short (`\\frac34`), also with a whole part before it."""
    whole, _, remainder = text.partition("\\frac")
    numerator, remainder = _argument(remainder)
    denominator, remainder = _argument(remainder)
    if remainder.strip():
        return None
    if whole.strip():
        return _mixed(whole, numerator, denominator)
    return _ratio(numerator, denominator)


def _argument(text: str) -> tuple[str, str]:
    """Split off the first argument of a command -> argument, remainder."""
    text = text.lstrip()
    if not text.startswith("{"):
        return text[:1], text[1:]
    inside, _, remainder = text[1:].partition("}")
    return inside, remainder


def _fraction(text: str) -> Number | None:
    """Parse `a/b`, also with a whole part before it."""
    left, _, denominator = text.partition("/")
    whole, space, numerator = left.strip().rpartition(" ")
    if space and whole:
        mixed = _mixed(whole, numerator, denominator)
        if mixed is not None:
            return mixed
    return _ratio(left, denominator)


def _mixed(whole: str, numerator: str, denominator: str) -> Number | None:
    """Sum of a whole number and a proper fraction; the word `and` may separate them."""
    base, top, bottom = _integer(whole.strip().removesuffix("and").strip()), _integer(numerator), _integer(denominator)
    if base is None or top is None or bottom is None or not 0 < top < bottom or base < 0:
        return None
    return Number(base + Fraction(top, bottom))


def _ratio(numerator: str, denominator: str) -> Number | None:
    is_negative = numerator.strip().startswith("-") != denominator.strip().startswith("-")
    top, bottom = (_decimal_or_power(side.strip().removeprefix("-").strip()) for side in (numerator, denominator))
    if top is None or bottom is None or bottom.value == 0:
        return None
    return Number((-1 if is_negative else 1) * top.value / bottom.value)


def _repeating(text: str) -> Number | None:
    """Parse a decimal whose last digits repeat for ever: `0.1\\overline{6}`, `0.\\bar3`, `0.1(6)`."""
    for opening in ("\\overline", "\\bar", "("):
        prefix, opened, period = text.partition(opening)
        if not opened:
            continue
        if opened == "(":
            digits, closing, remainder = period.partition(")")
        elif period.startswith("{"):
            digits, closing, remainder = period[1:].partition("}")
        else:
            digits, closing, remainder = period.strip(), "}", ""
        number = _decimal(prefix) if "." in prefix else None
        places = len(prefix.partition(".")[2])
        if number is None or not closing or remainder or _integer(digits) is None or digits.startswith(("-", "+")):
            return None
        return Number(number.value + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places))
    return None


def _integer(text: str) -> int | None:
    text = text.strip()
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not digits.isascii() or not digits.isdigit() or len(digits) > MAX_DIGITS:
        return None
    return int(text)


def _decimal(text: str) -> Number | None:
    """Parse digits with a decimal sign and thousands separators of any convention."""
    text = text.strip()
    if not text or len(text) > MAX_DIGITS or not text.isascii() or text.strip("0123456789.,'_ "):
        return None
    points, commas = text.count("."), text.count(",")
    if points and commas:
        sign = "." if text.rfind(".") > text.rfind(",") else ","
        if text.count(sign) > 1:
            return None
        return _assemble(*text.split(sign), separators=",._' ".replace(sign, ""))
    if commas:
        thousands = _assemble(text, "", separators=",")
        if thousands is not None and not text.startswith("0"):
            return thousands._replace(doubtful=commas == 1)
        number = _assemble(*text.split(","), separators="' ") if commas == 1 and text[0] != "," else None
        return number and number._replace(doubtful=True)
    if points > 1:
        return _assemble(text, "", separators=".")
    return _assemble(*(text.split(".") if points else (text, "")), separators="_' ")


def _assemble(whole: str, decimals: str, *, separators: str) -> Number | None:
    """Number of these digits; None if the whole part is grouped other than in threes, or in twos and a final three."""
    groups = [whole]
    for separator in separators:
        if separator in whole:
            groups = whole.split(separator)
            break
    if len(groups) > 1 and not _is_grouped(groups):
        return None
    digits = "".join(groups)
    if not (digits or decimals) or (digits + decimals).strip("0123456789"):
        return None
    value = Fraction(int(digits + decimals or "0"), 10 ** len(decimals))
    step = Fraction(1, 10 ** len(decimals)) if decimals else None
    return Number(value, step, len(decimals), len((digits + decimals).lstrip("0")))


def _is_grouped(groups: list[str]) -> bool:
    first, *inner, last = groups
    in_threes = all(len(group) == 3 for group in (*inner, last)) and 1 <= len(first) <= 3
    in_twos = all(len(group) == 2 for group in inner) and len(last) == 3 and 1 <= len(first) <= 2 and bool(inner)
    return in_threes or in_twos


def _with_scale(text: str) -> Number | None:
    """Parse `2.5 million`."""
    head, _, scale = text.lower().rpartition(" ")
    number = _decimal(head) if scale in SCALES else None
    return number and number.scaled(SCALES[scale])


def _in_words(text: str) -> Number | None:
    """Parse `two hundred and five`, `twenty-one`, `three quarters`, `two and a half`."""
    words = text.lower().replace("-", " ").split()
    if not 1 <= len(words) <= 16 or words[-1] in ("a", "an"):
        return None
    unit, counted = words[-1], words[:-1]
    denominator = FRACTION_WORDS.get(unit) or FRACTION_WORDS.get(unit.removesuffix("s"))
    if denominator is None:
        value = _whole_in_words(words)
        return None if value is None else Number(Fraction(value))
    and_index = len(counted) - 1 - counted[::-1].index("and") if "and" in counted else None
    whole = 0 if and_index is None else _whole_in_words(counted[:and_index])
    numerator = _whole_in_words(counted if and_index is None else counted[and_index + 1 :]) if counted else 1
    if not numerator or whole is None or (numerator == 1) != (unit in FRACTION_WORDS and unit != "halves"):
        return None  # `twenty-fifth` is an ordinal, `twenty fifths` are 4
    return Number(whole + Fraction(numerator, denominator))


def _whole_in_words(words: list[str]) -> int | None:
    """Parse a whole number in words; an article counts as one."""
    total, group, limit = 0, 0, 100  # the next addend must be below `limit`
    for i, word in enumerate(words):
        value = 1 if word in ("a", "an") and i == 0 else SMALL_NUMBERS.get(word)
        if value is not None and value < limit and (value or len(words) == 1):
            group, limit = group + value, 10 if value >= 20 else 0
        elif word == "hundred" and 0 < group < 100:
            group, limit = group * 100, 100
        elif word in SCALES and 0 < group < 1000:
            total, group, limit = total + group * SCALES[word], 0, 100
        elif word != "and" or not 0 < i < len(words) - 1:
            return None
    return total + group if words else None
