"""Symbolic mathematics: `mathematics` is the matcher with math-verify, in a process that is killed at its deadline.

    gold, answer -> looks like mathematics? -> call(compare, gold, answer) -> right, wrong, or invalid

`call(function, *arguments, seconds=...)` is `Sandbox.call`: a function of a preloaded module over hostile arguments, in
a forked child. Its sandbox is made with `preload=PRELOAD`. Gold is read first, and once: where it can't be read, the
reward is invalid. After that, whatever hangs, crashes or can't be read is the answer's doing, and wrong. Text in words
is not sent: to math-verify, `Paris` is a product of five symbols, and equal to `pairs`.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from flowgrpo.contracts import Reward, Scored
from flowgrpo.files import pip_install
from flowgrpo.rewards.answers.match import EXACT, TEXT, Rule, match_answers, numeric_rule, verdict
from flowgrpo.rewards.answers.numbers import Close, read_plain, rounded
from flowgrpo.rewards.answers.school import CHOICE, ELEMENTS, list_rule
from flowgrpo.rewards.answers.spelling import peel, plain_text
from flowgrpo.rewards.answers.units import CURRENCIES, QUANTITY
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


def symbolic_rule(call: Call, *, seconds: float = 5.0) -> Rule:
    """Make the rule that asks math-verify; None where gold or answer is made of words.

    Gold is read first, so that what fails after that is the answer.
    """
    if find_spec("math_verify") is None:
        raise BadInput(f"symbolic mathematics needs math-verify: {pip_install('math')}")
    readable = lru_cache(maxsize=65536)(lambda gold: call(f"{CHILD}:readable", gold, seconds=seconds))

    def judge(task: Task, gold: str, answer: str) -> Scored | None:
        if not mathematical(gold):
            return None
        try:
            trouble = _trouble(readable, gold)
            if trouble:
                return Scored(None, f"task {task.id!r}: fix its gold answer {gold[:60]!r}: {trouble}")
            if not mathematical(answer):
                return None
            said = call(f"{CHILD}:compare", peel(gold), peel(answer), seconds=seconds)
        except TimeoutError:
            return Scored(0.0, "checking the answer took too long")
        except CallFailed as error:
            return Scored(0.0, f"checking the answer failed ({_short(error)})")
        except SandboxFailure as error:
            return Scored(None, f"the check could not run: {error}")
        return (
            Scored(0.0, "the answer can't be read as mathematics") if said == "unreadable" else verdict(said == "same")
        )

    return Rule("symbolic", judge)


def _trouble(readable: Callable[[str], bool], gold: str) -> str:
    """Say why gold can't be read; "" where it can."""
    try:
        return "" if readable(peel(gold)) else "it can't be read as mathematics"
    except (CallFailed, TimeoutError) as error:
        return f"reading it failed ({_short(error)})"


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0][:80]


def affirming(rule: Rule) -> Rule:
    """Make the rule that speaks only where it says right; where it says wrong, others may still be asked."""

    def judge(task: Task, gold: str, answer: str) -> Scored | None:
        scored = rule.judge(task, gold, answer)
        return scored if scored is not None and scored.value else None

    return Rule(rule.name, judge)


def _counted(task: Task, gold: str, answer: str) -> Scored | None:
    """Say right where gold is a number, and the answer that many of something or money; else None."""
    formula = mathematical(answer) and not plain_text(answer).startswith(CURRENCIES)
    return None if formula or read_plain(plain_text(gold)) is None else affirming(QUANTITY).judge(task, gold, answer)


def mathematics(call: Call, *, seconds: float = 5.0, close: Close = rounded, workers: int = 1) -> Reward:
    """Give 1 where the final answer of an output is a gold answer by the rules of mathematics, else 0.

    Rules are asked in this order: exact, choice, numeric, lists of those, numbers of things, symbolic, text.
    `score_many` judges `workers` answers at once, which pays with a sandbox of as many workers.
    """
    if workers < 1:
        raise BadInput(f"mathematics: workers is {workers}, but must be at least 1")
    parts = affirming(list_rule([rule for rule in ELEMENTS if rule is not TEXT]))
    symbolic = symbolic_rule(call, seconds=seconds)
    reward = match_answers((EXACT, CHOICE, numeric_rule(close), parts, Rule("counted", _counted), symbolic, TEXT))
    return reward if workers == 1 else threaded(reward.score, workers)
