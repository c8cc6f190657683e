"""K-12 answers: the matcher with the rules of a school, in the order in which they are asked.

    exact, choice, truth, time, date, ratio, numeric, quantity, list, text

What gold is decides which rule speaks: a letter is a choice, `5 km` a quantity, `1, 2, 3` a list, and what is nothing
else is text. Each rule is a function of its own, so that `match_answers` takes any of them, and others beside them.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.answer import EXACT, TEXT, Rule, equal, match_answers, numeric, verdict
from flowgrpo.rewards.choice import CHOICE
from flowgrpo.rewards.dates import DATE, TIME
from flowgrpo.rewards.final import DENIALS
from flowgrpo.rewards.numbers import Close, read_plain, rounded
from flowgrpo.rewards.spelling import bare, plain, words
from flowgrpo.rewards.units import QUANTITY
from flowgrpo.types import Task

TRUE, FALSE = {"true", "yes", "correct", "right", "t", "y"}, {"false", "no", "incorrect", "wrong", "untrue", "f", "n"}
ORDERED = ("in order", "ascending", "descending", "least to greatest", "greatest to least", "sequence", "ordered pair")
ORDERED += ("smallest to largest", "largest to smallest", "next", "chronological", "coordinates")
PARTS = 20  # of a list; longer ones are compared word by word
OPENED, CLOSED = "([{", ")]}"


def read_truth(text: str) -> bool | None:
    """Whether a plain text says yes or no; None where it says neither, or both."""
    found = words(text)
    if not found:
        return None
    first, rest = found[0].strip(".:"), found[1:]
    if first in DENIALS and first not in FALSE and rest and rest[0] in TRUE | FALSE:
        return rest[0] in FALSE
    if (first not in TRUE | FALSE) or (len(first) == 1 and rest):
        return None
    opposite = FALSE if first in TRUE else TRUE
    torn = len(rest) > 1 and rest[0] in ("and", "or", "but") and rest[1] in opposite
    goes_on = (
        bool(rest) and text[len(first) : len(first) + 1] not in ",.;:!" and rest[0] not in ("because", "since", "it")
    )
    return None if torn or goes_on else first in TRUE


def truth(task: Task, gold: str, answer: str) -> Scored | None:  # noqa: ARG001
    """Compare answers of yes or no, true or false; None where one is neither, or gold has more than one word."""
    wanted, given = read_truth(plain(gold)), read_truth(plain(answer))
    if wanted is None or len(words(plain(gold))) > 1 or given is None:
        return None
    return verdict(wanted == given)


def read_ratio(text: str) -> tuple[Fraction, ...] | None:
    """The terms of `3:4` or `3 to 4`, the first made one; None where the text is no ratio."""
    terms = text.replace(" to ", ":").split(":")
    numbers = [read_plain(term) for term in terms]
    if not 2 <= len(terms) <= 6 or any(number is None or number.value <= 0 for number in numbers):
        return None
    values = [number.value for number in numbers if number is not None]
    return tuple(value / values[0] for value in values)


def ratio(task: Task, gold: str, answer: str) -> Scored | None:  # noqa: ARG001
    """Proportional terms; a fraction stands for a ratio of two. Says nothing where gold is no ratio."""
    wanted, given = read_ratio(plain(gold)), read_ratio(plain(answer))
    if wanted is None:
        return None
    fraction = read_plain(plain(answer)) if given is None else None
    if fraction is not None and fraction.value > 0:
        given = (Fraction(1), 1 / fraction.value)
    return None if given is None else verdict(wanted == given)


def split_list(text: str) -> tuple[str, list[str]]:
    """The brackets around a plain text (`()`), and its parts at the top level; one part where it is no list."""
    kind = ""
    if len(text) > 2 and text[0] in OPENED and text[-1] in CLOSED and _one_pair(text):
        kind, text = text[0] + text[-1], text[1:-1]
    for sign in ("<", ">", "→", "->", ";"):
        if sign in text:
            return kind or (sign if sign != ";" else ""), _cut(text, sign)
    text = text.replace(", and ", ", ").replace(" and ", ", ").replace(" & ", ", ")
    return kind, _cut(text, ", " if ", " in text else ",")


def _one_pair(text: str) -> bool:
    """Whether the bracket that opens the text is closed by its last character."""
    depth = 0
    for at, mark in enumerate(text):
        depth += (mark in OPENED) - (mark in CLOSED)
        if depth == 0:
            return at == len(text) - 1
    return False


def _cut(text: str, sign: str) -> list[str]:
    """The text cut at a sign, but not within brackets."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        depth += (text[at] in OPENED) - (text[at] in CLOSED)
        if depth <= 0 and text.startswith(sign, at):
            parts.append(text[start:at].strip())
            start = at + len(sign)
            at = start
            continue
        at += 1
    return [*parts, text[start:].strip()]


def same_list(task: Task, gold: str, answer: str, *, rules: Sequence[Rule]) -> Scored | None:
    """Compare two lists part by part, each by the given rules.

    Order counts where gold is a pair `(1, 2)`, where either is a chain `1 < 2`, or where the question asks for it. None
    where gold is no list or a part can't be judged; wrong where brackets differ in what they may mean, as `(1, 2)` and
    `[1, 2]` do.
    """
    spelled = plain(gold)
    kind, wanted = split_list(spelled)
    given_kind, given = split_list(plain(answer).replace(" or ", ", ") if " or " in spelled else plain(answer))
    wanted = [part for whole in wanted for part in whole.split(" or ")]
    if len(wanted) < 2 or not all(wanted):
        return None
    chains = [sign for sign in (kind, given_kind) if sign in ("<", ">", "→", "->")]
    intervals = {kind, given_kind} & {"()", "(]", "[)"} and kind and given_kind and kind != given_kind
    if len(wanted) != len(given) or intervals or len(set(chains)) > 1:
        return verdict(False)
    in_order = bool(chains) or kind == "()" or _asks_for_order(task)
    if len(wanted) > PARTS:
        sides = [[bare(part) for part in side] for side in (wanted, given)]
        return verdict(sides[0] == sides[1] if in_order else Counter(sides[0]) == Counter(sides[1]))
    return _matched(partial(equal, rules, task), wanted, given, in_order)


def _asks_for_order(task: Task) -> bool:
    declared = task.metadata.get("ordered")
    return bool(declared) if declared is not None else any(phrase in task.query.lower() for phrase in ORDERED)


def _matched(same, wanted: list[str], given: list[str], in_order: bool) -> Scored | None:
    """Every part of gold has one of the answer. Says nothing where a part could not be judged."""
    left = list(range(len(given)))
    unknown = False
    for place, part in enumerate(wanted):
        for other in [place] if in_order else left:
            said = same(part, given[other])
            unknown |= said is None
            if said:
                left = [rest for rest in left if rest != other]
                break
        else:
            return None if unknown else verdict(False)
    return verdict(True)


TRUTH, RATIO = Rule("truth", truth), Rule("ratio", ratio)
ELEMENTS = (EXACT, TRUTH, DATE, RATIO, Rule("numeric", numeric), QUANTITY, TEXT)


def school_rules(*, close: Close = rounded) -> tuple[Rule, ...]:
    """The rules of a school; `close` says when two numbers are the same."""
    number = Rule("numeric", partial(numeric, close=close))
    parts = Rule("list", partial(same_list, rules=ELEMENTS))
    return (EXACT, CHOICE, TRUTH, TIME, DATE, RATIO, number, QUANTITY, parts, TEXT)


def school(*, close: Close = rounded) -> Reward:
    """1 where the final answer of an output is a gold answer by the rules of a school, else 0."""
    return match_answers(school_rules(close=close))
