"""Intervals and their unions, written with brackets or as inequalities: `read_intervals`, `same_intervals`.

    "[-2, 7)"   "-2 \\le x < 7"   "x \\in [-2, 7)"   "(-\\infty, 2) \\cup (3, \\infty)"   "x < 2 \\text{ or } x > 3"

Ends are compared by the caller's rules. Two numbers in brackets, `(1, 2)`, may also be a point: of two such texts only
brackets are compared here.
"""

from collections.abc import Sequence
from typing import NamedTuple

from flowgrpo.contracts import RewardResult
from flowgrpo.rewards.answers.match import RIGHT, WRONG, Rule, judge_by_rules
from flowgrpo.rewards.answers.school import brackets_differ, split_list
from flowgrpo.rewards.answers.spelling import plain_text
from flowgrpo.types import Task

MAX_CHARACTERS = 200  # characters
SPELLINGS = {  # replaced in this order: some are prefixes of others
    "\\infty": "∞", "\\leqslant": "≤", "\\leq": "≤", "\\le": "≤", "<=": "≤", "\\geqslant": "≥", "\\geq": "≥",
    "\\ge": "≥", ">=": "≥", "\\lt": "<", "\\gt": ">", "\\cup": " or ", "\u222a": " or ", "\\lor": " or ",
    "\\vee": " or ", "\\land": " and ", "\\wedge": " and ", "\\in": " ∈ ", "+∞": "∞", "$": "",
}  # fmt: skip
REALS = ("r", "\\mathbb{r}", "all real numbers", "all reals", "the real numbers")
MIRRORED_SIGNS = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}


class Interval(NamedTuple):
    """All numbers between two ends, which are kept as texts."""

    low: str
    high: str
    has_low: bool
    has_high: bool


class Intervals(NamedTuple):
    """A union of intervals, and the variable that it bounds ("" if none is named)."""

    pieces: tuple[Interval, ...]
    variable: str = ""
    alone: bool = False  # one pair of brackets without a variable, which may also be a point


def read_intervals(text: str) -> Intervals | None:
    """Parse a whole text as a union of intervals; None if it is none."""
    if len(text) > MAX_CHARACTERS:
        return None
    text = plain_text(text)
    for spelling, sign in SPELLINGS.items():
        text = text.replace(spelling, sign)
    if text.lower() in REALS:
        return Intervals((Interval("-∞", "∞", has_low=False, has_high=False),))
    pieces, variables = [], set[str]()
    for part in text.split(" or "):
        piece, variable = _read_piece(" ".join(part.split())) or (None, "")
        if piece is None:
            return None
        pieces.append(piece)
        variables |= {variable} - {""}
    if len(variables) > 1:
        return None
    return Intervals(tuple(pieces), "".join(variables), len(pieces) == 1 and not variables)


def _read_piece(text: str) -> tuple[Interval, str] | None:
    """Parse one interval -> the interval, its variable ("" if none is named)."""
    if " and " in text:  # of two half-lines
        first, _, second = text.partition(" and ")
        left, right = _read_piece(first), _read_piece(second)
        if left is None or right is None or left[1] != right[1]:
            return None
        low, high = (left[0], right[0]) if left[0].high == "∞" else (right[0], left[0])
        if low.high != "∞" or high.low != "-∞":
            return None
        return Interval(low.low, high.high, low.has_low, high.has_high), left[1]
    variable, element, brackets = text.partition(" ∈ ")
    if element:
        piece = _bracketed(brackets)
        return (piece, variable) if piece and _is_variable(variable) else None
    piece = _bracketed(text)
    return (piece, "") if piece else _inequality(text)


def _bracketed(text: str) -> Interval | None:
    kind, parts = split_list(text)
    if kind not in ("()", "[]", "(]", "[)") or len(parts) != 2 or not all(parts):
        return None
    low, high = parts
    return Interval(low, high, kind[0] == "[" and low != "-∞", kind[1] == "]" and high != "∞")


def _inequality(text: str) -> tuple[Interval, str] | None:
    """Parse `x < 2`, `2 > x`, `-2 ≤ x < 7`, `7 > x ≥ -2`."""
    signs = [char for char in text if char in MIRRORED_SIGNS]
    for sign in MIRRORED_SIGNS:
        text = text.replace(sign, "<")
    terms = [term.strip() for term in text.split("<")]
    if len(signs) == 1 and _is_variable(terms[1]):
        terms, signs = terms[::-1], [MIRRORED_SIGNS[signs[0]]]
    if len(signs) == 1 and _is_variable(terms[0]) and terms[1] and not _is_variable(terms[1]):
        variable, end = terms
        if signs[0] in "<≤":
            return Interval("-∞", end, has_low=False, has_high=signs[0] == "≤"), variable
        return Interval(end, "∞", has_low=signs[0] == "≥", has_high=False), variable
    if len(signs) != 2 or not _is_variable(terms[1]) or not all(terms):
        return None
    if set(signs) <= {">", "≥"}:
        terms, signs = terms[::-1], [MIRRORED_SIGNS[sign] for sign in signs[::-1]]
    if not set(signs) <= {"<", "≤"}:
        return None
    return Interval(terms[0], terms[2], signs[0] == "≤", signs[1] == "≤"), terms[1]


def _is_variable(text: str) -> bool:
    """Whether a text is a letter, Latin or Greek."""
    name = text.removeprefix("\\")
    return name.isalpha() and (len(text) == 1 or (text != name and name not in ("pi", "infty")))


def same_intervals(task: Task, gold: str, answer: str, *, rules: Sequence[Rule]) -> RewardResult | None:
    """Compare two unions of equally many intervals in any order, their ends by `rules`; None if one is no union.

    Two pairs in brackets are wrong if the brackets mean different things; if they don't, other rules decide.
    """
    (gold_brackets, gold_parts), (answer_brackets, answer_parts) = (
        split_list(plain_text(gold)),
        split_list(plain_text(answer)),
    )
    are_bracketed = len(gold_brackets) == len(answer_brackets) == 2 and len(gold_parts) == len(answer_parts) > 1
    if are_bracketed and brackets_differ(gold_brackets, answer_brackets, len(gold_parts)):
        return WRONG
    gold_union, answer_union = read_intervals(gold), read_intervals(answer)
    if (gold_union and _is_pair(answer)) or (answer_union and _is_pair(gold)):
        return WRONG
    if gold_union is None or answer_union is None or (gold_union.alone and answer_union.alone):
        return None
    if gold_union.variable and answer_union.variable and gold_union.variable != answer_union.variable:
        return WRONG
    if len(gold_union.pieces) != len(answer_union.pieces):
        return None
    unmatched = list(answer_union.pieces)
    for piece in gold_union.pieces:
        for candidate in unmatched:
            result = _same_interval(task, piece, candidate, rules)
            if result.value is None:
                return result
            if result.value:
                unmatched.remove(candidate)
                break
        else:
            return WRONG
    return RIGHT


def _is_pair(text: str) -> bool:
    """Whether a text is two numbers, `\\pm 5`, which math-verify takes for an interval."""
    return plain_text(text).startswith(("\\pm", "\u00b1"))


def _same_interval(task: Task, gold: Interval, answer: Interval, rules: Sequence[Rule]) -> RewardResult:
    if (gold.has_low, gold.has_high) != (answer.has_low, answer.has_high):
        return WRONG
    for gold_end, answer_end in ((gold.low, answer.low), (gold.high, answer.high)):
        if gold_end != answer_end:
            result = WRONG if "∞" in gold_end + answer_end else judge_by_rules(rules, task, gold_end, (answer_end,))[1]
            if not result.value:
                return result
    return RIGHT
