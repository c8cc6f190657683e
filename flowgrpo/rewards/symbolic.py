"""Symbolic mathematics through math-verify, in a process that is killed at its deadline.

    gold, answer -> looks like mathematics? -> call(compare, gold, answer) -> right, wrong, or invalid

`call(function, *arguments, seconds=...)` is `Sandbox.call`: a function of a preloaded module over hostile arguments, in
a forked child. Its sandbox is made with `preload=PRELOAD`. Gold is read first, and once: where it can't be read, the
reward is invalid. After that, whatever hangs, crashes or can't be read is the answer's doing, and wrong. Text in words
is not sent: to math-verify, `Paris` is a product of five symbols, and equal to `pairs`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.answer import EXACT, TEXT, Rule, match_answers, numeric, verdict
from flowgrpo.rewards.choice import CHOICE
from flowgrpo.rewards.numbers import Close, read_plain, rounded
from flowgrpo.rewards.school import ELEMENTS, same_list
from flowgrpo.rewards.spelling import peel, plain
from flowgrpo.rewards.unit_table import CURRENCIES
from flowgrpo.rewards.units import QUANTITY
from flowgrpo.sandbox import CallFailed, SandboxFailure
from flowgrpo.types import BadInput, Task

CHILD = "flowgrpo.rewards.symbolic_child"
PRELOAD = (CHILD,)  # what the sandbox is to preload
MOST = 400  # characters that are sent
NESTED = 40  # brackets within brackets

NAMES = """sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh log ln exp sqrt pi inf oo
max min gcd lcm mod det abs and or infinity choose matrix pmatrix bmatrix vmatrix array cases aligned"""
FUNCTIONS = frozenset(NAMES.split())
WORDS = {"not", "the", "is", "are", "yes", "no", "of", "to", "it", "in", "on", "at", "km", "cm", "mm", "kg", "maybe"}

Call = Callable[..., Any]


def mathematical(text: str) -> bool:
    """Whether a text may be a formula: short, not deeply nested, one sentence, and not made of words."""
    if len(text) > MOST or _depth(text) > NESTED or ". " in text.strip():
        return False
    text = plain(text)
    letters = "".join(mark if mark.isalpha() or mark == "\\" else " " for mark in text.replace("\\", " \\")).split()
    spelled = [word for word in letters if not word.startswith("\\") and word.lower() not in FUNCTIONS]
    foreign = any(mark.isalpha() and not (mark.isascii() or "Ͱ" <= mark <= "Ͽ") for mark in text)
    return bool(text) and not foreign and not any(_is_word(word) for word in spelled)


def _is_word(letters: str) -> bool:
    """Whether letters in a row are no product of variables."""
    return letters.lower() in WORDS or len(letters) > (3 if letters.islower() else 2)


def _depth(text: str) -> int:
    """How deep brackets and powers are nested, at most."""
    depth = most = 0
    for mark in text:
        depth += (mark in "([{") - (mark in ")]}")
        most = max(most, depth)
    return most


def symbolic_rule(call: Call, *, seconds: float = 5.0) -> Rule:
    """The rule that asks math-verify; it says nothing where gold or answer is made of words."""
    if find_spec("math_verify") is None:
        raise BadInput("symbolic mathematics needs math-verify: pip install 'flowgrpo[math]'")
    readable = lru_cache(maxsize=65536)(partial(call, f"{CHILD}:readable", seconds=seconds))
    return Rule("symbolic", partial(_symbolic, partial(call, f"{CHILD}:compare", seconds=seconds), readable))


def _symbolic(
    compare: Callable[[str, str], str], readable: Callable[[str], bool], task: Task, gold: str, answer: str
) -> Scored | None:
    """Judge one gold and one answer by math-verify; gold is read first, so that what fails then is the answer."""
    if not mathematical(gold):
        return None
    try:
        trouble = "" if readable(peel(gold)) else "it can't be read as mathematics"
    except (CallFailed, TimeoutError) as error:
        trouble = f"reading it failed ({_short(error)})"
    except SandboxFailure as error:
        return Scored(None, f"the check could not run: {error}")
    if trouble:
        return Scored(None, f"task {task.id!r}: mend its gold answer {gold[:60]!r}: {trouble}")
    if not mathematical(answer):
        return None
    try:
        said = compare(peel(gold), peel(answer))
    except TimeoutError:
        return Scored(0.0, "checking the answer took too long")
    except CallFailed as error:
        return Scored(0.0, f"checking the answer failed ({_short(error)})")
    except SandboxFailure as error:
        return Scored(None, f"the check could not run: {error}")
    return Scored(0.0, "the answer can't be read as mathematics") if said == "unreadable" else verdict(said == "same")


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0][:80]


def affirming(rule: Rule) -> Rule:
    """The rule where it says right; where it says wrong, others may still be asked."""
    return Rule(rule.name, partial(_affirm, rule))


def _affirm(rule: Rule, task: Task, gold: str, answer: str) -> Scored | None:
    scored = rule.judge(task, gold, answer)
    return scored if scored is not None and scored.value else None


def counted(task: Task, gold: str, answer: str) -> Scored | None:
    """Right where gold is a number, and the answer that many of something or money; else there is nothing to say."""
    formula = mathematical(answer) and not plain(answer).startswith(CURRENCIES)
    return None if formula or read_plain(plain(gold)) is None else _affirm(QUANTITY, task, gold, answer)


def mathematics_rules(call: Call, *, seconds: float = 5.0, close: Close = rounded) -> tuple[Rule, ...]:
    """Exact, choice, numeric, lists of those, numbers of things, symbolic, text."""
    number = Rule("numeric", partial(numeric, close=close))
    elements: Sequence[Rule] = tuple(rule for rule in ELEMENTS if rule is not TEXT)
    parts = affirming(Rule("list", partial(same_list, rules=elements)))
    return (EXACT, CHOICE, number, parts, Rule("counted", counted), symbolic_rule(call, seconds=seconds), TEXT)


def mathematics(call: Call, *, seconds: float = 5.0, close: Close = rounded, workers: int = 1) -> Reward:
    """1 where the final answer of an output is a gold answer by the rules of mathematics, else 0.

    `score_many` judges `workers` answers at once, which pays with a sandbox of as many workers.
    """
    if workers < 1:
        raise BadInput(f"mathematics: workers is {workers}, but must be at least 1")
    reward = match_answers(mathematics_rules(call, seconds=seconds, close=close))
    return reward if workers == 1 else reward._replace(score_many=partial(_score_many, reward.score, workers))


def _score_many(score: Callable, workers: int, tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(score, tasks, outputs))
