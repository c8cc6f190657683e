"""Symbolic mathematics: `mathematics` is the matcher with math-verify, in a process that is killed at its deadline.

    gold, answer -> looks like mathematics? -> call(compare, gold, answer) -> right, wrong, or invalid

`call(function, *arguments, seconds=...)` is `Sandbox.call`: a function of a preloaded module over hostile arguments, in
a forked child. Its sandbox is made with `preload=PRELOAD`. Gold is read first, and once: where it can't be read, the
reward is invalid. After that, whatever hangs, crashes or can't be read is the answer's doing, and wrong. Text in words
is not sent: to math-verify, `Paris` is a product of five symbols, and equal to `pairs`.

All checks of one score share one deadline: after the first that passes it no other is begun. math-verify drops units,
subscripts and brackets, so rules before it decide where those differ (`90^\\circ` and `90\\%`, `4343_6` and `4343_7`,
`(1, 2)` and `[1, 2]`), and it gets what is left. A missing unit is forgiven.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from flowgrpo.contracts import Reward, Scored
from flowgrpo.files import pip_install
from flowgrpo.rewards.answers.intervals import same_intervals
from flowgrpo.rewards.answers.match import (
    EXACT,
    RIGHT,
    TEXT,
    WRONG,
    Rule,
    judge_by_rules,
    match_answers,
    numeric_rule,
    verdict,
)
from flowgrpo.rewards.answers.numbers import SMALL, Close, read_plain, rounded
from flowgrpo.rewards.answers.school import CHOICE, ELEMENTS, list_rule, named_letters, options_of
from flowgrpo.rewards.answers.spelling import labelled, peel, plain_text
from flowgrpo.rewards.answers.units import CURRENCIES, QUANTITY, same_unit, split_unit
from flowgrpo.rewards.combine import threaded
from flowgrpo.sandbox import CallFailed, SandboxFailure
from flowgrpo.types import BadInput, Task

CHILD = "flowgrpo.rewards.answers.symbolic_child"
PRELOAD = (CHILD,)  # what the sandbox is to preload
MOST = 400  # characters that are sent
NESTED = 40  # brackets within brackets

NAMES = """sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh log ln exp sqrt pi inf oo
max min gcd lcm mod det abs and or infinity choose matrix pmatrix bmatrix vmatrix array cases aligned"""
FUNCTIONS = frozenset(NAMES.split())
WORDS = {"not", "the", "is", "are", "yes", "no", "of", "to", "it", "in", "on", "at", "km", "cm", "mm", "kg", "maybe"}

ANGLE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s?(?:\^\s?\{?\\circ\}?|°|\\degree)")
TRIGONOMETRY = ("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc")
REPEATING = re.compile(r"\d{1,20}\.\d{0,20}\\(?:overline|bar)\s?(?:\{\d{1,20}\}|\d)")

Call = Callable[..., Any]


def mathematical(text: str) -> bool:
    """Say whether a text may be a formula: short, not deeply nested, one sentence, and not made of words."""
    if len(text) > MOST or _depth(text) > NESTED or ". " in text.strip():
        return False
    text = plain_text(text)
    letters = "".join(mark if mark.isalpha() or mark == "\\" else " " for mark in text.replace("\\", " \\")).split()
    spelled = [word for word in letters if not word.startswith("\\") and word.lower() not in FUNCTIONS]
    foreign = any(mark.isalpha() and not (mark.isascii() or "Ͱ" <= mark <= "Ͽ") for mark in text)
    # Letters in a row that are no product of variables.
    words = any(word.lower() in WORDS or len(word) > (3 if word.islower() else 2) for word in spelled)
    return bool(text) and not foreign and not words


def _depth(text: str) -> int:
    """Count how deep brackets are nested, at most."""
    depth = most = 0
    for mark in text:
        depth += (mark in "([{") - (mark in ")]}")
        most = max(most, depth)
    return most


class Deadline:
    """Seconds that the checks of one score may take together, and whether one of them took too long."""

    def __init__(self, seconds: float):
        self.seconds, self.passed = seconds, False


def symbolic_rule(call: Call, *, seconds: float = 5.0) -> Rule:
    """Make the rule that asks math-verify; None where gold or answer is made of words.

    Gold is read first, so that what fails after that is the answer.
    """
    rule = _symbolic_rules(call, seconds)
    return Rule("symbolic", lambda task, gold, answer: rule(Deadline(seconds)).judge(task, gold, answer))


def _symbolic_rules(call: Call, seconds: float) -> Callable[[Deadline], Rule]:
    """Make a function from the deadline of a score to its rule; which golds can be read is remembered for all."""
    if find_spec("math_verify") is None:
        raise BadInput(f"symbolic mathematics needs math-verify: {pip_install('math')}")
    readable = lru_cache(maxsize=65536)(lambda gold: call(f"{CHILD}:readable", gold, seconds=seconds))

    def judge(deadline: Deadline, gold: str, answer: str, task: Task) -> Scored | None:
        if not mathematical(gold):
            return None
        late = Scored(0.0, "checking the answer took too long")
        if deadline.passed:
            return late
        try:
            trouble = _trouble(readable, _formula(gold), deadline)
            if trouble:
                return Scored(None, f"task {task.id!r}: fix its gold answer {gold[:60]!r}: {trouble}")
            if not mathematical(answer):
                return None
            outcome, took = call(f"{CHILD}:compare", _formula(gold), _formula(answer), seconds=deadline.seconds)
        except TimeoutError:
            deadline.passed = True
            return late
        except CallFailed as error:
            return Scored(0.0, f"checking the answer failed ({_short(error)})")
        except SandboxFailure as error:
            return Scored(None, f"the check could not run: {error}")
        deadline.seconds -= took
        deadline.passed = deadline.seconds <= 0
        return (
            Scored(0.0, "the answer can't be read as mathematics")
            if outcome == "unreadable"
            else verdict(outcome == "same")
        )

    def rule(deadline: Deadline) -> Rule:
        return Rule("symbolic", lambda task, gold, answer: judge(deadline, gold, answer, task))

    return rule


def _formula(text: str) -> str:
    """Write what math-verify reads: without signs around it, repeating decimals as fractions, sines of radians."""
    text = REPEATING.sub(_fraction, peel(text))
    return ANGLE.sub(r"\\frac{\1\\pi}{180}", text) if any(name in text for name in TRIGONOMETRY) else text


def _fraction(decimal: re.Match[str]) -> str:
    number = read_plain(decimal[0])
    return decimal[0] if number is None else f"\\frac{{{number.value.numerator}}}{{{number.value.denominator}}}"


def _trouble(readable: Callable[[str], bool], gold: str, deadline: Deadline) -> str:
    """Say why gold can't be read; "" where it can."""
    try:
        return "" if readable(gold) else "it can't be read as mathematics"
    except (CallFailed, TimeoutError) as error:
        deadline.passed = isinstance(error, TimeoutError)
        return f"reading it failed ({_short(error)})"


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0][:80]


def affirming(rule: Rule) -> Rule:
    """Make the rule that speaks only where it says right; where it says wrong, others may still be asked."""

    def judge(task: Task, gold: str, answer: str) -> Scored | None:
        scored = rule.judge(task, gold, answer)
        return scored if scored is not None and scored.value else None

    return Rule(rule.name, judge)


def _factorial(task: Task, gold: str, answer: str) -> Scored | None:  # noqa: ARG001
    """Say right where gold is the number that `5!` stands for; else None, as it may be an exclamation."""
    number, digits = read_plain(plain_text(gold)), plain_text(answer).removesuffix("!")
    if number is None or digits == plain_text(answer) or not digits.isdecimal() or len(digits) > 2:
        return None
    return RIGHT if number.value == math.factorial(int(digits)) else None


def _counted(task: Task, gold: str, answer: str) -> Scored | None:
    """Say right where gold is a number, and the answer that many of something or money; else None."""
    noun = plain_text(answer).rpartition(" ")[2]
    counts = plain_text(answer).startswith(CURRENCIES) or (len(noun) > 2 and noun.isalpha() and noun not in FUNCTIONS)
    formula = mathematical(answer) and not counts
    return None if formula or read_plain(plain_text(gold)) is None else affirming(QUANTITY).judge(task, gold, answer)


# Rules for what math-verify leaves out --------------------------------------------------------------------


def read_based(text: str) -> tuple[str, int] | None:
    """Read a number with its base (`4343_6`, `4343_{\\text{six}}`, `4343 base 6`) -> digits, base; else None."""
    digits, sign, base = plain_text(text).replace(" (base ", "_").replace(" base ", "_").rpartition("_")
    base = base.strip("{()} ").removeprefix("base").strip()
    digits = digits.strip("() $").lstrip("0") or "0"
    value = SMALL.get(base.lower()) or (int(base) if base.isascii() and base.isdecimal() and len(base) < 3 else 0)
    known = digits.isascii() and (digits.isdecimal() or (digits.isalnum() and digits.isupper() and value > 10))
    return (digits, value) if sign and known and 2 <= value <= 36 else None


def same_based(task: Task, gold: str, answer: str) -> Scored | None:  # noqa: ARG001
    """Compare digits and base; None where one of the two has no base."""
    gold_number, answer_number = read_based(gold), read_based(answer)
    return None if gold_number is None or answer_number is None else verdict(gold_number == answer_number)


def with_units(task: Task, gold: str, answer: str, *, rules: Sequence[Rule]) -> Scored | None:
    """Compare formulas by rules, where one has a unit; another unit is wrong, unless it is of the same quantity."""
    (gold_formula, unit), (answer_formula, other) = split_unit(gold), split_unit(answer)
    if unit and other and not same_unit(unit, other):
        return affirming(QUANTITY).judge(task, gold, answer) or WRONG
    if unit == other == "" or (unit != other and "%" in (unit, other)):
        return None
    return _by_rules(rules, task, gold_formula, answer_formula)


def behind_letters(task: Task, gold: str, answer: str, *, rules: Sequence[Rule]) -> Scored | None:
    """Compare what stands behind a letter of gold, answer or both, as in `\\textbf{(C)}\\ 12`.

    None where the answer is a letter alone, or only the answer has one and the task's options say what it means.
    """
    (letter, gold_text), (other, answer_text) = _split_letter(gold), _split_letter(answer)
    if (
        not gold_text
        or not answer_text
        or not (letter or other)
        or (not other and named_letters(answer_text) is not None)
    ):
        return None
    if letter:
        return WRONG if other and other != letter else _by_rules(rules, task, gold_text, answer_text)
    scored = None if options_of(task) else _by_rules(rules, task, gold_text, answer_text)
    return scored if scored and scored.value else None


def whole_where_labelled(answers: Sequence[str]) -> Sequence[str]:
    """Read the whole answer alone where it begins with a letter: the text of another option is no gold answer."""
    return answers[:1] if _split_letter(answers[0])[0] else answers


def _split_letter(text: str) -> tuple[str, str]:
    """Split `(C) 12` -> letter, the rest; `A = 12` and `A - 12` are formulas and have no letter."""
    text = plain_text(text)
    letter, rest = labelled(text)
    return (letter, rest) if not rest or text.lstrip("([*")[1:2] in tuple(")].:") else ("", text)


def _by_rules(rules: Sequence[Rule], task: Task, gold: str, answer: str) -> Scored | None:
    name, scored = judge_by_rules(rules, task, gold, (answer,))
    return None if name == "no rule" else scored


def mathematics(call: Call, *, seconds: float = 5.0, close: Close = rounded, workers: int = 1) -> Reward:
    """Give 1 where the final answer of an output is a gold answer by the rules of mathematics, else 0.

    Rules are asked in this order: exact, what stands behind a letter, choice, factorials, numbers, bases, intervals,
    lists, numbers of things, formulas with units, symbolic, text. `seconds` bounds the symbolic checks of a score.
    `score_many` judges `workers` answers at once, which pays with a sandbox of as many workers.
    """
    if workers < 1:
        raise BadInput(f"mathematics: workers is {workers}, but must be at least 1")
    numeric, parts = numeric_rule(close), affirming(list_rule([rule for rule in ELEMENTS if rule is not TEXT]))
    counted, based, factorial = Rule("counted", _counted), Rule("base", same_based), Rule("factorial", _factorial)
    symbolic_rules = _symbolic_rules(call, seconds)

    def using(name: str, judge: Callable[..., Scored | None], *rules: Rule) -> Rule:
        return Rule(name, lambda task, gold, answer: judge(task, gold, answer, rules=rules))

    def score(task: Task, output: str) -> Scored:
        symbolic = symbolic_rules(Deadline(seconds))
        intervals = using("interval", same_intervals, EXACT, numeric, symbolic)
        units = using("unit", with_units, EXACT, numeric, based, intervals, parts, symbolic)
        formulas = (factorial, numeric, based, intervals, parts, counted, units, symbolic)
        option = using("option", behind_letters, EXACT, *formulas)._replace(choose=whole_where_labelled)
        return match_answers((EXACT, option, CHOICE, *formulas, TEXT)).score(task, output)

    return Reward(score) if workers == 1 else threaded(score, workers)
