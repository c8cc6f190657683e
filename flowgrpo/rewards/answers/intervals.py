"""Intervals and their unions, as brackets and as inequalities write them; `same_intervals` compares the two.

    "[-2, 7)"   "-2 \\le x < 7"   "x \\in [-2, 7)"   "(-\\infty, 2) \\cup (3, \\infty)"   "x < 2 \\text{ or } x > 3"

Ends are compared by rules that the caller gives. Brackets alone, `(1, 2)`, may also be a point: two that are written so
are only told apart by their brackets here.
"""

from collections.abc import Sequence
from typing import NamedTuple

from flowgrpo.contracts import Scored
from flowgrpo.rewards.answers.match import RIGHT, WRONG, Rule, judge_by_rules
from flowgrpo.rewards.answers.school import other_brackets, split_list
from flowgrpo.rewards.answers.spelling import plain_text
from flowgrpo.types import Task

MOST = 200  # characters
SPELLINGS = {  # in this order: some begin as others do
    "\\infty": "∞", "\\leqslant": "≤", "\\leq": "≤", "\\le": "≤", "<=": "≤", "\\geqslant": "≥", "\\geq": "≥",
    "\\ge": "≥", ">=": "≥", "\\lt": "<", "\\gt": ">", "\\cup": " or ", "\u222a": " or ", "\\lor": " or ",
    "\\vee": " or ", "\\land": " and ", "\\wedge": " and ", "\\in": " ∈ ", "+∞": "∞", "$": "",
}  # fmt: skip
REALS = ("r", "\\mathbb{r}", "all real numbers", "all reals", "the real numbers")
MIRRORED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}


class Interval(NamedTuple):
    """All numbers between two ends, which are texts."""

    low: str
    high: str
    has_low: bool
    has_high: bool


class Intervals(NamedTuple):
    """A union of intervals, the variable that lies in it ("" where none is named), and whether it is one bracket."""

    pieces: tuple[Interval, ...]
    variable: str = ""
    alone: bool = False


def read_intervals(text: str) -> Intervals | None:
    """Read a whole text as a union of intervals; None where it is none."""
    if len(text) > MOST:
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
    """Read one interval -> it and its variable, "" where none is named."""
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
        piece = _in_brackets(brackets)
        return (piece, variable) if piece and _is_variable(variable) else None
    piece = _in_brackets(text)
    return (piece, "") if piece else _inequality(text)


def _in_brackets(text: str) -> Interval | None:
    kind, parts = split_list(text)
    if kind not in ("()", "[]", "(]", "[)") or len(parts) != 2 or not all(parts):
        return None
    low, high = parts
    return Interval(low, high, kind[0] == "[" and low != "-∞", kind[1] == "]" and high != "∞")


def _inequality(text: str) -> tuple[Interval, str] | None:
    """Read `x < 2`, `2 > x`, `-2 ≤ x < 7`, `7 > x ≥ -2`."""
    signs = [mark for mark in text if mark in MIRRORED]
    for sign in MIRRORED:
        text = text.replace(sign, "<")
    terms = [term.strip() for term in text.split("<")]
    if len(signs) == 1 and _is_variable(terms[1]):
        terms, signs = terms[::-1], [MIRRORED[signs[0]]]
    if len(signs) == 1 and _is_variable(terms[0]) and terms[1] and not _is_variable(terms[1]):
        variable, end = terms
        if signs[0] in "<≤":
            return Interval("-∞", end, has_low=False, has_high=signs[0] == "≤"), variable
        return Interval(end, "∞", has_low=signs[0] == "≥", has_high=False), variable
    if len(signs) != 2 or not _is_variable(terms[1]) or not all(terms):
        return None
    if set(signs) <= {">", "≥"}:
        terms, signs = terms[::-1], [MIRRORED[sign] for sign in signs[::-1]]
    if not set(signs) <= {"<", "≤"}:
        return None
    return Interval(terms[0], terms[2], signs[0] == "≤", signs[1] == "≤"), terms[1]


def _is_variable(text: str) -> bool:
    """Say whether a text is a letter, Latin or Greek."""
    name = text.removeprefix("\\")
    return name.isalpha() and (len(text) == 1 or (text != name and name not in ("pi", "infty")))


def same_intervals(task: Task, gold: str, answer: str, *, rules: Sequence[Rule]) -> Scored | None:
    """Compare two unions of as many intervals, in any order, their ends by rules; None where one of them is none.

    Of two pairs in brackets the brackets alone decide, and only where they differ.
    """
    (kind, parts), (other, others) = split_list(plain_text(gold)), split_list(plain_text(answer))
    in_brackets = len(kind) == len(other) == 2 and len(parts) == len(others) > 1
    if in_brackets and other_brackets(kind, other, len(parts)):
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
    left = list(answer_union.pieces)
    for piece in gold_union.pieces:
        for other in left:
            same = _same_interval(task, piece, other, rules)
            if same.value is None:
                return same
            if same.value:
                left.remove(other)
                break
        else:
            return WRONG
    return RIGHT


def _is_pair(text: str) -> bool:
    """Say whether a text is two numbers, `\\pm 5`, which math-verify takes for an interval."""
    return plain_text(text).startswith(("\\pm", "\u00b1"))


def _same_interval(task: Task, gold: Interval, answer: Interval, rules: Sequence[Rule]) -> Scored:
    if (gold.has_low, gold.has_high) != (answer.has_low, answer.has_high):
        return WRONG
    for end, other in ((gold.low, answer.low), (gold.high, answer.high)):
        if end != other:
            scored = WRONG if "∞" in end + other else judge_by_rules(rules, task, end, (other,))[1]
            if not scored.value:
                return scored
    return RIGHT
