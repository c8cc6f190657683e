"""The game of 24: `game24` gives 1 for an expression that uses each of a task's numbers once and equals 24.

    [4, 7, 8, 8]    (7 - 8 / 8) * 4    \\left(7 - \\frac{8}{8}\\right) \\times 4 = 24    4(7 - 8/8)

The value alone scores 0, as does an expression of other numbers. An expression is parsed, never run as code, and
evaluated in fractions, so that 8 / (3 - 8 / 3) is exactly 24.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.rewards.answers.extract import FoundAnswer, denies, find_answer, hedges, readings
from flowgrpo.rewards.answers.spelling import plain_text
from flowgrpo.types import BadInput, Task

MAX_CHARACTERS = 400  # characters of an expression
MAX_DIGITS = 12  # of a number in it
MAX_NUMBERS = 20  # of a task
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negative": 3}
BRACKETS = str.maketrans({"[": "(", "]": ")", "{": "(", "}": ")", "\u2217": "*", "$": ""})


def game24(*, target: int = 24) -> Reward:
    """Give 1 for an expression of exactly the task's numbers, each used once, that equals the target; else 0.

    Operators are + - * / and brackets, also in LaTeX; `= 24` may follow. Gold answers are not read.

    Args:
        target: Value of the expression, unless a task has its own as `metadata["target"]`.
    """

    def score(task: Task, output: str) -> RewardResult:
        try:
            numbers, target_value = numbers_of(task), _as_fraction(task, "target", task.metadata.get("target", target))
        except BadInput as error:
            return RewardResult(None, str(error))
        answer = find_answer(output)
        if not answer.text.strip():
            return RewardResult(0.0, "no answer: the output is empty" if not output.strip() else "no answer was found")
        first_problem = ""
        for text in _candidates(answer):
            problem = _problem(text, numbers, target_value)
            if not problem:
                return RewardResult(1.0, f"game24, in the {answer.source}: {text[:60]!r}", {"game24": 1.0})
            first_problem = first_problem or problem
        return RewardResult(0.0, f"in the {answer.source}: {first_problem or 'no expression was found'}")

    return Reward(score)


def numbers_of(task: Task) -> list[Fraction]:
    """Numbers of a task: `metadata["numbers"]`, or else the first list in its query (`[4, 7, 8, 8]`)."""
    listed = task.metadata.get("numbers")
    if listed is None:
        for part in task.query.split("[")[1:]:
            listed = [number.strip() for number in part.partition("]")[0].split(",")]
            if "]" in part and len(listed) > 1 and all(_is_decimal(number) for number in listed):
                break
        else:
            raise BadInput(f'task {task.id!r}: its query lists no numbers; give metadata {{"numbers": [4, 7, 8, 8]}}')
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not 1 <= len(listed) <= MAX_NUMBERS:
        raise BadInput(
            f"task {task.id!r}: its numbers are {listed!r:.60}, but must be a list of 1 to {MAX_NUMBERS} numbers"
        )
    return [_as_fraction(task, "numbers", number) for number in listed]


def _as_fraction(task: Task, field: str, number: object) -> Fraction:
    text = str(number)
    if isinstance(number, bool) or not isinstance(number, Real | str) or not _is_decimal(text.removeprefix("-")):
        raise BadInput(
            f"task {task.id!r}: {field} has {number!r:.60}, but must be numbers of at most {MAX_DIGITS} digits"
        )
    return Fraction(text)


def _is_decimal(text: str) -> bool:
    whole, point, decimals = text.partition(".")
    return (
        (whole + decimals).isascii()
        and whole.isdigit()
        and len(text) <= MAX_DIGITS
        and (decimals.isdigit() or not point)
    )


# Expressions in an answer --------------------------------------------------------------------------------


def _candidates(answer: FoundAnswer) -> list[str]:
    """Expressions that an answer may mean: its readings, and the only expression in a sentence."""
    texts = [_plain(text) for text in readings(answer)]
    sentence = texts[0] if texts else ""
    runs, run = [], ""
    for char in sentence + "\n":
        if char in "0123456789.+-*/()= ":
            run += char
        else:
            runs.append(run.strip(" ."))
            run = ""
    runs = [run for run in runs if any(operator in run.strip("+-*/= ") for operator in "+-*/")]
    is_only = len(runs) == 1 and not hedges(sentence) and not denies(sentence) and "?" not in sentence
    return list(dict.fromkeys([*texts, *(runs if is_only else ())]))


def _plain(text: str) -> str:
    """Rewrite an expression with + - * / and round brackets; what has no such form stays as it is."""
    text = plain_text(text)
    while (start := text.rfind("\\frac")) >= 0:  # the last one has no other inside it
        numerator, remainder = _argument(text[start + len("\\frac") :])
        denominator, remainder = _argument(remainder)
        if not numerator or not denominator:
            break
        text = f"{text[:start]}(({numerator})/({denominator})){remainder}"
    text = text.translate(BRACKETS)
    pieces = [piece.strip() for piece in text.replace("X", "x").split("x")]
    factors = itertools.pairwise(pieces)
    are_factors = all(
        left[-1:] in tuple("0123456789)") and right[:1] in tuple("0123456789(-") for left, right in factors
    )
    return "*".join(pieces) if are_factors and all(pieces) else text


def _argument(text: str) -> tuple[str, str]:
    """Split off the first argument of a LaTeX command -> argument, remainder; the argument is "" if there is none."""
    text = text.lstrip()
    if not text.startswith("{"):
        return (text[0], text[1:]) if text[:1].isdigit() else ("", text)
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[1:i], text[i + 1 :]
    return "", text


def _problem(text: str, numbers: list[Fraction], target: Fraction) -> str:
    """What is wrong with an answer; "" if it is right.

    In `a = b = 24` every side must equal the target, and one of them must use the numbers.
    """
    if len(text) > MAX_CHARACTERS:
        return f"the expression is longer than {MAX_CHARACTERS} characters"
    used_by_side: list[list[Fraction]] = []
    for side in text.split("="):
        try:
            value, used = evaluate(side)
        except (ValueError, ZeroDivisionError) as error:
            return f"{side.strip()[:60]!r} {error}"
        if value != target:
            return f"{side.strip()[:60]!r} comes to {str(value)[:60]}, not {target}"
        used_by_side.append(used)
    if any(Counter(used) == Counter(numbers) for used in used_by_side):
        return ""
    return f"it uses {_join(max(used_by_side, key=len))}, but must use {_join(numbers)}, each once"


def _join(numbers: list[Fraction]) -> str:
    return ", ".join(str(number) for number in numbers[:MAX_NUMBERS])


# Arithmetic ----------------------------------------------------------------------------------------------


def evaluate(text: str) -> tuple[Fraction, list[Fraction]]:
    """Evaluate an expression of numbers, + - * / and brackets -> its value, the numbers it uses.

    Two stacks (Dijkstra's shunting yard), so that nesting needs no recursion. `2(3+4)` is a product. Raises
    `ValueError` if the text is no such expression, `ZeroDivisionError` if it divides by zero.
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

    i, is_after_value = 0, False
    while i < len(text):
        char = text[i]
        if char in "0123456789":
            end = i
            while text[end : end + 1] in tuple("0123456789."):
                end += 1
            if is_after_value or not _is_decimal(text[i:end]):
                raise ValueError("is no expression of + - * / and brackets")
            numbers.append(Fraction(text[i:end]))
            values.append(numbers[-1])
            i, is_after_value = end, True
            continue
        if char == "(":
            if is_after_value:
                push("*")
            operators.append("(")
            is_after_value = False
        elif char == ")" and is_after_value:
            while operators and operators[-1] != "(":
                apply()
            if not operators:
                raise ValueError("closes a bracket that it does not open")
            operators.pop()
        elif char in PRECEDENCE and is_after_value:
            push(char)
            is_after_value = False
        elif char == "-":
            operators.append("negative")
        elif char != " ":
            raise ValueError("is no expression of + - * / and brackets")
        i += 1
    if not is_after_value:
        raise ValueError("is no expression of + - * / and brackets")
    while operators:
        apply()
    return values[0], numbers
