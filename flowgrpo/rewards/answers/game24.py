"""The game of 24: `game24` pays an expression that uses each of a task's numbers once and comes to 24.

    [4, 7, 8, 8]    (7 - 8 / 8) * 4    \\left(7 - \\frac{8}{8}\\right) \\times 4 = 24    4(7 - 8/8)

The value alone pays nothing, nor does an expression of other numbers. An expression is parsed, never run as code, and
computed in fractions, so that 8 / (3 - 8 / 3) is exactly 24.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.answers.extract import Found, denies, find_answer, hedges, readings
from flowgrpo.rewards.answers.spelling import plain_text
from flowgrpo.types import BadInput, Task

MOST = 400  # characters of an expression
DIGITS = 12  # of a number in it
NUMBERS = 20  # of a task
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negative": 3}
BRACKETS = str.maketrans({"[": "(", "]": ")", "{": "(", "}": ")", "\u2217": "*", "$": ""})


def game24(*, target: int = 24) -> Reward:
    """Give 1 for an expression of exactly the task's numbers, each used once, that comes to the target; else 0.

    Operators are + - * / and brackets, also as LaTeX writes them; `= 24` may follow. Gold answers are not looked at.

    Args:
        target: what the expression comes to, unless a task has its own as `metadata["target"]`.
    """

    def score(task: Task, output: str) -> Scored:
        try:
            numbers, goal = numbers_of(task), _as_fraction(task, "target", task.metadata.get("target", target))
        except BadInput as error:
            return Scored(None, str(error))
        answer = find_answer(output)
        if not answer.text.strip():
            return Scored(0.0, "no answer: the output is empty" if not output.strip() else "no answer was found")
        trouble = ""
        for text in _candidates(answer):
            problem = _problem(text, numbers, goal)
            if not problem:
                return Scored(1.0, f"game24, in the {answer.where}: {text[:60]!r}", {"game24": 1.0})
            trouble = trouble or problem
        return Scored(0.0, f"in the {answer.where}: {trouble or 'no expression was found'}")

    return Reward(score)


def numbers_of(task: Task) -> list[Fraction]:
    """Find the numbers of a task: `metadata["numbers"]`, or else the first list in its query (`[4, 7, 8, 8]`)."""
    listed = task.metadata.get("numbers")
    if listed is None:
        for part in task.query.split("[")[1:]:
            listed = [number.strip() for number in part.partition("]")[0].split(",")]
            if "]" in part and len(listed) > 1 and all(_is_decimal(number) for number in listed):
                break
        else:
            raise BadInput(f'task {task.id!r}: its query lists no numbers; give metadata {{"numbers": [4, 7, 8, 8]}}')
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not 1 <= len(listed) <= NUMBERS:
        raise BadInput(
            f"task {task.id!r}: its numbers are {listed!r:.60}, but must be a list of 1 to {NUMBERS} numbers"
        )
    return [_as_fraction(task, "numbers", number) for number in listed]


def _as_fraction(task: Task, field: str, number: object) -> Fraction:
    text = str(number)
    if isinstance(number, bool) or not isinstance(number, Real | str) or not _is_decimal(text.removeprefix("-")):
        raise BadInput(f"task {task.id!r}: {field} has {number!r:.60}, but must be numbers of at most {DIGITS} digits")
    return Fraction(text)


def _is_decimal(text: str) -> bool:
    whole, point, decimals = text.partition(".")
    return (
        (whole + decimals).isascii() and whole.isdigit() and len(text) <= DIGITS and (decimals.isdigit() or not point)
    )


# What an answer says -------------------------------------------------------------------------------------


def _candidates(answer: Found) -> list[str]:
    """List the expressions that an answer may mean: its readings, and the only expression in a sentence."""
    texts = [_plain(text) for text in readings(answer)]
    sentence = texts[0] if texts else ""
    runs, run = [], ""
    for mark in sentence + "\n":
        if mark in "0123456789.+-*/()= ":
            run += mark
        else:
            runs.append(run.strip(" ."))
            run = ""
    runs = [run for run in runs if any(sign in run.strip("+-*/= ") for sign in "+-*/")]
    alone = len(runs) == 1 and not hedges(sentence) and not denies(sentence) and "?" not in sentence
    return list(dict.fromkeys([*texts, *(runs if alone else ())]))


def _plain(text: str) -> str:
    """Write an expression with + - * / and round brackets alone; what has no such form stays."""
    text = plain_text(text)
    while (at := text.rfind("\\frac")) >= 0:  # the last one has no other inside
        above, rest = _argument(text[at + len("\\frac") :])
        below, rest = _argument(rest)
        if not above or not below:
            break
        text = f"{text[:at]}(({above})/({below})){rest}"
    text = text.translate(BRACKETS)
    pieces = [piece.strip() for piece in text.replace("X", "x").split("x")]
    factors = itertools.pairwise(pieces)
    times = all(left[-1:] in tuple("0123456789)") and right[:1] in tuple("0123456789(-") for left, right in factors)
    return "*".join(pieces) if times and all(pieces) else text


def _argument(text: str) -> tuple[str, str]:
    """Split off the first argument of a LaTeX command -> the argument, what follows; ("", ...) where there is none."""
    text = text.lstrip()
    if not text.startswith("{"):
        return (text[0], text[1:]) if text[:1].isdigit() else ("", text)
    depth = 0
    for at, mark in enumerate(text):
        depth += (mark == "{") - (mark == "}")
        if depth == 0:
            return text[1:at], text[at + 1 :]
    return "", text


def _problem(text: str, numbers: list[Fraction], target: Fraction) -> str:
    """Say what is wrong with an answer; "" where it is right.

    Of `a = b = 24` every side must come to the target, and one of them must use the numbers.
    """
    if len(text) > MOST:
        return f"the expression is longer than {MOST} characters"
    uses: list[list[Fraction]] = []
    for side in text.split("="):
        try:
            value, used = evaluate(side)
        except (ValueError, ZeroDivisionError) as error:
            return f"{side.strip()[:60]!r} {error}"
        if value != target:
            return f"{side.strip()[:60]!r} comes to {str(value)[:60]}, not {target}"
        uses.append(used)
    if any(Counter(used) == Counter(numbers) for used in uses):
        return ""
    return f"it uses {_listed(max(uses, key=len))}, but must use {_listed(numbers)}, each once"


def _listed(numbers: list[Fraction]) -> str:
    return ", ".join(str(number) for number in numbers[:NUMBERS])


# Arithmetic ----------------------------------------------------------------------------------------------


def evaluate(text: str) -> tuple[Fraction, list[Fraction]]:
    """Compute a text of numbers, + - * / and brackets -> its value, the numbers it uses.

    Two stacks (Dijkstra's shunting yard), so that nesting needs no recursion. `2(3+4)` is a product. Raises
    `ValueError` where the text is no such expression, `ZeroDivisionError` where it divides by zero.
    """
    values: list[Fraction] = []
    operators: list[str] = []
    numbers: list[Fraction] = []

    def apply() -> None:
        operator = operators.pop()
        if operator not in PRECEDENCE or len(values) < (1 if operator == "negative" else 2):
            raise ValueError("is no expression of + - * / and brackets")
        right = values.pop()
        if operator == "negative":
            values.append(-right)
        elif operator == "/" and right == 0:
            raise ZeroDivisionError("divides by zero")
        else:
            left = values.pop()
            results = {"+": left + right, "-": left - right, "*": left * right}
            values.append(left / right if operator == "/" else results[operator])

    def push(operator: str) -> None:
        while operators and operators[-1] != "(" and PRECEDENCE[operators[-1]] >= PRECEDENCE[operator]:
            apply()
        operators.append(operator)

    at, after_value = 0, False
    while at < len(text):
        mark = text[at]
        if mark in "0123456789":
            end = at
            while text[end : end + 1] in tuple("0123456789."):
                end += 1
            if after_value or not _is_decimal(text[at:end]):
                raise ValueError("is no expression of + - * / and brackets")
            numbers.append(Fraction(text[at:end]))
            values.append(numbers[-1])
            at, after_value = end, True
            continue
        if mark == "(":
            if after_value:
                push("*")
            operators.append("(")
            after_value = False
        elif mark == ")" and after_value:
            while operators and operators[-1] != "(":
                apply()
            if not operators:
                raise ValueError("closes a bracket that it does not open")
            operators.pop()
        elif mark in PRECEDENCE and after_value:
            push(mark)
            after_value = False
        elif mark == "-":
            operators.append("negative")
        elif mark != " ":
            raise ValueError("is no expression of + - * / and brackets")
        at += 1
    if not after_value:
        raise ValueError("is no expression of + - * / and brackets")
    while operators:
        apply()
    return values[0], numbers
