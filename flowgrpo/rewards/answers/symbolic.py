"""Symbolic mathematics: `mathematics` is the matcher with math-verify, in a process that is killed at its deadline.

    gold, answer -> looks like mathematics? -> call(compare, gold, answer) -> right, wrong, or invalid

`call(function, *arguments, seconds=...)` is `Sandbox.call`: it calls a function of a preloaded module with hostile
arguments in a forked child. Its sandbox is made with `preload=PRELOAD`. Gold is parsed first, and once: if that fails,
the reward is invalid. After that, an answer that hangs, crashes or can't be parsed is wrong. Text in words is not sent:
to math-verify, `Paris` is a product of five symbols, and equal to `pairs`.

All checks of one score share one deadline: after the first that exceeds it, no other check starts. math-verify drops
units, subscripts and brackets, so earlier rules decide if those differ (`90^\\circ` and `90\\%`, `4343_6` and `4343_7`,
`(1, 2)` and `[1, 2]`); math-verify decides the others. A missing unit is forgiven.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from flowgrpo.contracts import Reward, RewardResult
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
    right_if,
)
from flowgrpo.rewards.answers.numbers import SMALL_NUMBERS, Close, read_plain, rounded
from flowgrpo.rewards.answers.school import CHOICE, ELEMENTS, list_rule, named_letters, options_of
from flowgrpo.rewards.answers.spelling import peel, plain_text, split_label
from flowgrpo.rewards.answers.units import CURRENCIES, QUANTITY, same_unit, split_unit
from flowgrpo.rewards.combine import threaded
from flowgrpo.sandbox import CallFailed, SandboxFailure
from flowgrpo.types import BadInput, Task

CHILD = "flowgrpo.rewards.answers.symbolic_child"
PRELOAD = (CHILD,)  # for `Sandbox(preload=...)`
MAX_CHARACTERS = 400  # of a formula that is sent
MAX_NESTING = 40  # of brackets

FUNCTION_NAMES = """sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh log ln exp sqrt pi inf oo
max min gcd lcm mod det abs and or infinity choose matrix pmatrix bmatrix vmatrix array cases aligned"""
FUNCTIONS = frozenset(FUNCTION_NAMES.split())
COMMON_WORDS = {
    "not",
    "the",
    "is",
    "are",
    "yes",
    "no",
    "of",
    "to",
    "it",
    "in",
    "on",
    "at",
    "km",
    "cm",
    "mm",
    "kg",
    "maybe",
}

ANGLE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s?(?:\^\s?\{?\\circ\}?|°|\\degree)")
TRIGONOMETRY = ("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc")
REPEATING = re.compile(r"\d{1,20}\.\d{0,20}\\(?:overline|bar)\s?(?:\{\d{1,20}\}|\d)")

Call = Callable[..., Any]


def mathematical(text: str) -> bool:
    """Whether a text may be a formula: short, not deeply nested, one sentence, and not made of words."""
    if len(text) > MAX_CHARACTERS or _depth(text) > MAX_NESTING or ". " in text.strip():
        return False
    text = plain_text(text)
    letters = "".join(char if char.isalpha() or char == "\\" else " " for char in text.replace("\\", " \\")).split()
    unknown = [word for word in letters if not word.startswith("\\") and word.lower() not in FUNCTIONS]
    is_foreign = any(char.isalpha() and not (char.isascii() or "Ͱ" <= char <= "Ͽ") for char in text)
    # letters in a row that are no product of variables
    has_words = any(word.lower() in COMMON_WORDS or len(word) > (3 if word.islower() else 2) for word in unknown)
    return bool(text) and not is_foreign and not has_words


def _depth(text: str) -> int:
    """Depth of nested brackets."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


class Deadline:
    """Seconds left for the checks of one score, and whether they have run out."""

    def __init__(self, seconds: float):
        self.seconds, self.passed = seconds, False


def _symbolic_rules(call: Call, seconds: float) -> Callable[[Deadline], Rule]:
    """Make a function from the deadline of a score to the rule that asks math-verify.

    The rule is None if gold or answer is made of words. Gold is parsed first, so that a later failure is the answer's;
    whether a gold answer parses is cached for all scores.
    """
    if find_spec("math_verify") is None:
        raise BadInput(f"symbolic mathematics needs math-verify: {pip_install('math')}")
    readable = lru_cache(maxsize=65536)(lambda gold: call(f"{CHILD}:readable", gold, seconds=seconds))

    def judge(deadline: Deadline, gold: str, answer: str, task: Task) -> RewardResult | None:
        if not mathematical(gold):
            return None
        too_late = RewardResult(0.0, "checking the answer took too long")
        if deadline.passed:
            return too_late
        try:
            problem = _gold_problem(readable, _formula(gold), deadline)
            if problem:
                return RewardResult(None, f"task {task.id!r}: fix its gold answer {gold[:60]!r}: {problem}")
            if not mathematical(answer):
                return None
            outcome, seconds_taken = call(
                f"{CHILD}:compare", _formula(gold), _formula(answer), seconds=deadline.seconds
            )
        except TimeoutError:
            deadline.passed = True
            return too_late
        except CallFailed as error:
            return RewardResult(0.0, f"checking the answer failed ({_first_line(error)})")
        except SandboxFailure as error:
            return RewardResult(None, f"the check could not run: {error}")
        deadline.seconds -= seconds_taken
        deadline.passed = deadline.seconds <= 0
        return (
            RewardResult(0.0, "the answer can't be read as mathematics")
            if outcome == "unreadable"
            else right_if(outcome == "same")
        )

    def rule(deadline: Deadline) -> Rule:
        return Rule("symbolic", lambda task, gold, answer: judge(deadline, gold, answer, task))

    return rule


def _formula(text: str) -> str:
    """Rewrite a formula for math-verify: no signs around it, repeating decimals as fractions, angles in radians."""
    text = REPEATING.sub(_fraction, peel(text))
    return ANGLE.sub(r"\\frac{\1\\pi}{180}", text) if any(name in text for name in TRIGONOMETRY) else text


def _fraction(decimal: re.Match[str]) -> str:
    number = read_plain(decimal[0])
    return decimal[0] if number is None else f"\\frac{{{number.value.numerator}}}{{{number.value.denominator}}}"


def _gold_problem(readable: Callable[[str], bool], gold: str, deadline: Deadline) -> str:
    """Why gold can't be parsed; "" if it can."""
    try:
        return "" if readable(gold) else "it can't be read as mathematics"
    except (CallFailed, TimeoutError) as error:
        deadline.passed = isinstance(error, TimeoutError)
        return f"reading it failed ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:80]


def only_if_right(rule: Rule) -> Rule:
    """Make the rule that returns None instead of wrong, so that later rules are still tried."""

    def judge(task: Task, gold: str, answer: str) -> RewardResult | None:
        result = rule.judge(task, gold, answer)
        return result if result is not None and result.value else None

    return Rule(rule.name, judge)


def _factorial(task: Task, gold: str, answer: str) -> RewardResult | None:  # noqa: ARG001
    """Right if gold is the value of the factorial `5!`; else None, since it may be an exclamation."""
    number, argument = read_plain(plain_text(gold)), plain_text(answer).removesuffix("!")
    if number is None or argument == plain_text(answer) or not argument.isdecimal() or len(argument) > 2:
        return None
    return RIGHT if number.value == math.factorial(int(argument)) else None


def _counted(task: Task, gold: str, answer: str) -> RewardResult | None:
    """Right if gold is a number and the answer that number of things or that amount of money; else None."""
    noun = plain_text(answer).rpartition(" ")[2]
    is_amount = plain_text(answer).startswith(CURRENCIES) or (
        len(noun) > 2 and noun.isalpha() and noun not in FUNCTIONS
    )
    is_formula = mathematical(answer) and not is_amount
    return (
        None
        if is_formula or read_plain(plain_text(gold)) is None
        else only_if_right(QUANTITY).judge(task, gold, answer)
    )


# Rules for what math-verify drops --------------------------------------------------------------------


def read_based(text: str) -> tuple[str, int] | None:
    """Parse a number with its base (`4343_6`, `4343_{\\text{six}}`, `4343 base 6`) -> digits, base; else None."""
    digits, separator, base = plain_text(text).replace(" (base ", "_").replace(" base ", "_").rpartition("_")
    base = base.strip("{()} ").removeprefix("base").strip()
    digits = digits.strip("() $").lstrip("0") or "0"
    value = SMALL_NUMBERS.get(base.lower()) or (
        int(base) if base.isascii() and base.isdecimal() and len(base) < 3 else 0
    )
    is_number = digits.isascii() and (digits.isdecimal() or (digits.isalnum() and digits.isupper() and value > 10))
    return (digits, value) if separator and is_number and 2 <= value <= 36 else None


def same_based(task: Task, gold: str, answer: str) -> RewardResult | None:  # noqa: ARG001
    """Compare digits and base; None if one of the two has no base."""
    gold_number, answer_number = read_based(gold), read_based(answer)
    return None if gold_number is None or answer_number is None else right_if(gold_number == answer_number)


def with_units(task: Task, gold: str, answer: str, *, rules: Sequence[Rule]) -> RewardResult | None:
    """Compare formulas of which one has a unit by `rules`; another unit is wrong, unless the quantities are equal."""
    (gold_formula, gold_unit), (answer_formula, answer_unit) = split_unit(gold), split_unit(answer)
    if gold_unit and answer_unit and not same_unit(gold_unit, answer_unit):
        return only_if_right(QUANTITY).judge(task, gold, answer) or WRONG
    if gold_unit == answer_unit == "" or (gold_unit != answer_unit and "%" in (gold_unit, answer_unit)):
        return None
    return _by_rules(rules, task, gold_formula, answer_formula)


def behind_letters(task: Task, gold: str, answer: str, *, rules: Sequence[Rule]) -> RewardResult | None:
    """Compare the text after a letter label of gold, answer or both, as in `\\textbf{(C)}\\ 12`.

    None if the answer is only a letter, or if only the answer has a letter and the task's options define it.
    """
    (gold_letter, gold_text), (answer_letter, answer_text) = _split_letter(gold), _split_letter(answer)
    if (
        not gold_text
        or not answer_text
        or not (gold_letter or answer_letter)
        or (not answer_letter and named_letters(answer_text) is not None)
    ):
        return None
    if gold_letter:
        return (
            WRONG if answer_letter and answer_letter != gold_letter else _by_rules(rules, task, gold_text, answer_text)
        )
    result = None if options_of(task) else _by_rules(rules, task, gold_text, answer_text)
    return result if result and result.value else None


def whole_if_labelled(answers: Sequence[str]) -> Sequence[str]:
    """Only the whole answer if it begins with a letter: the text of another option is no gold answer."""
    return answers[:1] if _split_letter(answers[0])[0] else answers


def _split_letter(text: str) -> tuple[str, str]:
    """Split `(C) 12` -> letter, content; `A = 12` and `A - 12` are formulas and have no letter."""
    text = plain_text(text)
    letter, content = split_label(text)
    return (letter, content) if not content or text.lstrip("([*")[1:2] in tuple(")].:") else ("", text)


def _by_rules(rules: Sequence[Rule], task: Task, gold: str, answer: str) -> RewardResult | None:
    name, result = judge_by_rules(rules, task, gold, (answer,))
    return None if name == "no rule" else result


def mathematics(call: Call, *, seconds: float = 5.0, close: Close = rounded, workers: int = 1) -> Reward:
    """Give 1 if the final answer of an output equals a gold answer by the rules of mathematics, else 0.

    Rules are tried in this order: exact, text after a letter, choice, factorials, numbers, bases, intervals, lists,
    numbers of things, formulas with units, symbolic, text.

    Args:
        call: `Sandbox.call` of a sandbox made with `preload=PRELOAD`.
        seconds: Time of all symbolic checks of one score together.
        close: Whether two numbers count as equal: (gold, answer) -> bool.
        workers: Answers that `score_many` judges concurrently; useful with a sandbox of as many workers.
    """
    if workers < 1:
        raise BadInput(f"mathematics: workers is {workers}, but must be at least 1")
    numeric, parts = numeric_rule(close), only_if_right(list_rule([rule for rule in ELEMENTS if rule is not TEXT]))
    counted, based, factorial = Rule("counted", _counted), Rule("base", same_based), Rule("factorial", _factorial)
    symbolic_rules = _symbolic_rules(call, seconds)

    def using(name: str, judge: Callable[..., RewardResult | None], *rules: Rule) -> Rule:
        return Rule(name, lambda task, gold, answer: judge(task, gold, answer, rules=rules))

    def score(task: Task, output: str) -> RewardResult:
        symbolic = symbolic_rules(Deadline(seconds))
        intervals = using("interval", same_intervals, EXACT, numeric, symbolic)
        units = using("unit", with_units, EXACT, numeric, based, intervals, parts, symbolic)
        formulas = (factorial, numeric, based, intervals, parts, counted, units, symbolic)
        option = using("option", behind_letters, EXACT, *formulas)._replace(choose=whole_if_labelled)
        return match_answers((EXACT, option, CHOICE, *formulas, TEXT)).score(task, output)

    return Reward(score) if workers == 1 else threaded(score, workers)
