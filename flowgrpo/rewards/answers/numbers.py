"""Numbers as people write them: `read_plain` reads a text as an exact `Number`.

    "-1,234.5"  "1.234,5"  "3/4"  "1 3/4"  "\\frac{3}{4}"  "6.02 \\times 10^{23}"  "2.5 million"  "45%"  "two thirds"
    "0.1\\overline{6}"

Everything is bounded: text of at most `MOST` characters, `DIGITS` digits, powers of at most `BITS` bits. What is beyond
(10^10^10) is no number here and is never computed. `exactly`, `rounded` and `within` say when two numbers are the same.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

MOST, DIGITS, BITS, EXPONENT = 160, 100, 4096, 400

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
ONES += " seventeen eighteen nineteen"
SMALL = {word: value for value, word in enumerate(ONES.split())}
SMALL |= {
    word: 10 * tens
    for tens, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)
}
SCALES = {"dozen": 12, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
PARTS = {"half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7}
PARTS |= {"eighth": 8, "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1000}
PERCENT = ("percent", "per cent", "pct", "%")


class Number(NamedTuple):
    """A value, and how it was written."""

    value: Fraction
    step: Fraction | None = None  # of the last decimal place; None where there are no decimals
    decimals: int = 0  # places after the point
    digits: int = 0  # significant ones
    percent: bool = False
    doubtful: bool = False  # its comma could also part a list

    def scaled(self, factor: Fraction | int) -> "Number":
        """Multiply by a factor, as if it had been written so."""
        step = None if self.step is None else self.step * abs(factor)
        return self._replace(value=self.value * factor, step=step)


Close = Callable[[Number, Number], bool]  # (gold, answer) -> whether they are the same


def exactly(gold: Number, answer: Number) -> bool:
    """Say whether two numbers are equal as fractions."""
    return gold.value == answer.value


def rounded(gold: Number, answer: Number) -> bool:
    """Say whether two numbers are equal, or the same at the written precision of the coarser of the two.

    That is gold's where it has two decimals or more and the answer is a fraction (0.67 is 2/3), or has more of them and
    gold at least three digits. It is the answer's, of three decimals or more, where gold is a fraction that never ends.
    A sign of percent that only one of them has stands for two decimals.
    """
    off = abs(gold.value - answer.value)
    if off == 0:
        return True
    signs = 2 * (gold.percent - answer.percent)
    if gold.step is None:
        return answer.decimals + max(-signs, 0) >= 3 and endless(gold.value) and 2 * off <= (answer.step or 0)
    fraction = answer.step is None and answer.value.denominator > 1
    finer = answer.step is not None and answer.step < gold.step and gold.digits >= 3
    return gold.decimals + max(signs, 0) >= 2 and gold.digits >= 2 and (fraction or finer) and 2 * off <= gold.step


def within(*, relative: float = 0.0, absolute: float = 0.0) -> Close:
    """Make the comparison of numbers at most so far from gold, as a share of it or absolutely."""
    share, most = Fraction(relative), Fraction(absolute)
    return lambda gold, answer: abs(gold.value - answer.value) <= max(share * abs(gold.value), most)


def endless(value: Fraction) -> bool:
    """Say whether the decimals of a fraction never end."""
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest != 1


def read_plain(text: str) -> Number | None:
    """Read the number that a whole `plain` text is; None where it is none."""
    text = text.strip()
    if not text or len(text) > MOST:
        return None
    lower = text.lower()
    ending = next((ending for ending in PERCENT if lower.endswith(ending)), None)
    if ending is not None:
        number = _signed(text[: -len(ending)].strip())
        return number and number.scaled(Fraction(1, 100))._replace(percent=True)
    return _signed(text)


def _signed(text: str) -> Number | None:
    """Read a number with or without a sign, in brackets or not."""
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
    return _simple(text) or _large(text) or _in_words(text) or _repeating(text)


def _simple(text: str) -> Number | None:
    """Read a decimal, or one in scientific notation, or a power."""
    if "^" in text or "**" in text:
        return _power(text.replace("**", "^"))
    mantissa, mark, exponent = text.replace("E", "e").partition("e")
    number = _decimal(mantissa)
    if number is None or not mark:
        return number
    value = _integer(exponent)
    return None if value is None or abs(value) > EXPONENT else number.scaled(Fraction(10) ** value)


def _power(text: str) -> Number | None:
    """Read `a^b`, or `c * a^b`; a and b are whole."""
    left, _, exponent = text.partition("^")
    raised = _integer(exponent.strip().removeprefix("{").removesuffix("}"))
    for sign in ("*", "x", " "):
        if sign in left:
            coefficient, base = left.rsplit(sign, 1)
            break
    else:
        coefficient, base = "1", left
    factor, number = _decimal(coefficient.strip()), _integer(base.strip())
    if raised is None or factor is None or not number or abs(raised) > EXPONENT:
        return None
    if number.bit_length() * abs(raised) > BITS:
        return None
    return factor.scaled(Fraction(number) ** raised)


def _latex_fraction(text: str) -> Number | None:
    """Read `\\frac{a}{b}`, also short (`\\frac34`), also with a whole part before it."""
    whole, _, rest = text.partition("\\frac")
    above, rest = _argument(rest)
    below, rest = _argument(rest)
    if rest.strip():
        return None
    if whole.strip():
        return _mixed(whole, above, below)
    return _ratio(above, below)


def _argument(text: str) -> tuple[str, str]:
    """Split off the first argument of a command -> the argument, what follows it."""
    text = text.lstrip()
    if not text.startswith("{"):
        return text[:1], text[1:]
    inside, _, rest = text[1:].partition("}")
    return inside, rest


def _fraction(text: str) -> Number | None:
    """Read `a/b`, also with a whole part before it."""
    left, _, below = text.partition("/")
    whole, space, above = left.strip().rpartition(" ")
    if space and whole:
        mixed = _mixed(whole, above, below)
        if mixed is not None:
            return mixed
    return _ratio(left, below)


def _mixed(whole: str, above: str, below: str) -> Number | None:
    """Make a number of a whole one and a proper fraction; the word `and` may stand between them."""
    base, top, bottom = _integer(whole.strip().removesuffix("and").strip()), _integer(above), _integer(below)
    if base is None or top is None or bottom is None or not 0 < top < bottom or base < 0:
        return None
    return Number(base + Fraction(top, bottom))


def _ratio(above: str, below: str) -> Number | None:
    negative = above.strip().startswith("-") != below.strip().startswith("-")
    top, bottom = (_simple(side.strip().removeprefix("-").strip()) for side in (above, below))
    if top is None or bottom is None or bottom.value == 0:
        return None
    return Number((-1 if negative else 1) * top.value / bottom.value)


def _repeating(text: str) -> Number | None:
    """Read a decimal whose last digits repeat for ever: `0.1\\overline{6}`, `0.\\bar3`, `0.1(6)`."""
    for mark in ("\\overline", "\\bar", "("):
        fixed, sign, period = text.partition(mark)
        if not sign:
            continue
        if sign == "(":
            digits, closing, rest = period.partition(")")
        elif period.startswith("{"):
            digits, closing, rest = period[1:].partition("}")
        else:
            digits, closing, rest = period.strip(), "}", ""
        number = _decimal(fixed) if "." in fixed else None
        places = len(fixed.partition(".")[2])
        if number is None or not closing or rest or _integer(digits) is None or digits.startswith(("-", "+")):
            return None
        return Number(number.value + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places))
    return None


def _integer(text: str) -> int | None:
    text = text.strip()
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not digits.isascii() or not digits.isdigit() or len(digits) > DIGITS:
        return None
    return int(text)


def _decimal(text: str) -> Number | None:
    """Read digits with a decimal sign and separators of thousands, as any custom has them."""
    text = text.strip()
    if not text or len(text) > DIGITS or not text.isascii() or text.strip("0123456789.,'_ "):
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
    """Make a number of its digits; None where the whole part is grouped, and not in threes (or twos and a three)."""
    groups = [whole]
    for separator in separators:
        if separator in whole:
            groups = whole.split(separator)
            break
    if len(groups) > 1 and not _grouped(groups):
        return None
    digits = "".join(groups)
    if not (digits or decimals) or (digits + decimals).strip("0123456789"):
        return None
    value = Fraction(int(digits + decimals or "0"), 10 ** len(decimals))
    step = Fraction(1, 10 ** len(decimals)) if decimals else None
    return Number(value, step, len(decimals), len((digits + decimals).lstrip("0")))


def _grouped(groups: list[str]) -> bool:
    first, *inner, last = groups
    threes = all(len(group) == 3 for group in (*inner, last)) and 1 <= len(first) <= 3
    twos = all(len(group) == 2 for group in inner) and len(last) == 3 and 1 <= len(first) <= 2 and bool(inner)
    return threes or twos


def _large(text: str) -> Number | None:
    """Read `2.5 million`."""
    head, _, scale = text.lower().rpartition(" ")
    number = _decimal(head) if scale in SCALES else None
    return number and number.scaled(SCALES[scale])


def _in_words(text: str) -> Number | None:
    """Read `two hundred and five`, `twenty-one`, `three quarters`, `two and a half`."""
    found = text.lower().replace("-", " ").split()
    if not 1 <= len(found) <= 16 or found[-1] in ("a", "an"):
        return None
    last, before = found[-1], found[:-1]
    part = PARTS.get(last) or PARTS.get(last.removesuffix("s"))
    if part is None:
        value = _whole(found)
        return None if value is None else Number(Fraction(value))
    joint = len(before) - 1 - before[::-1].index("and") if "and" in before else None
    whole = 0 if joint is None else _whole(before[:joint])
    above = _whole(before if joint is None else before[joint + 1 :]) if before else 1
    if not above or whole is None or (above == 1) != (last in PARTS and last != "halves"):
        return None  # `twenty-fifth` is a rank, `twenty fifths` are four
    return Number(whole + Fraction(above, part))


def _whole(found: list[str]) -> int | None:
    """Read a whole number in words; the article counts as one."""
    total, group, room = 0, 0, 100  # `room`: what is added next must be less
    for place, word in enumerate(found):
        value = 1 if word in ("a", "an") and place == 0 else SMALL.get(word)
        if value is not None and value < room and (value or len(found) == 1):
            group, room = group + value, 10 if value >= 20 else 0
        elif word == "hundred" and 0 < group < 100:
            group, room = group * 100, 100
        elif word in SCALES and 0 < group < 1000:
            total, group, room = total + group * SCALES[word], 0, 100
        elif word != "and" or not 0 < place < len(found) - 1:
            return None
    return total + group if found else None
