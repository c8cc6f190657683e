"""The answer matcher: `match_answers` makes a reward from rules, `answer` the plain one.

    output -> find_answer -> readings x gold answers x rules -> RewardResult

A rule is a function `(task, gold, answer)` that returns right or wrong, or None if it doesn't apply to this gold
answer; the first rule that applies decides. One matching gold answer is enough. A task without a gold answer, or with
one that a rule can't read, is invalid unless another gold answer matches. `school.py` has the rules of school answers,
`symbolic.py` those of mathematics.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.rewards.answers.extract import MAX_TAIL, find_answer, readings
from flowgrpo.rewards.answers.numbers import Close, Number, read_plain, rounded
from flowgrpo.rewards.answers.spelling import bare, plain_text
from flowgrpo.types import Task


class Rule(NamedTuple):
    """One way in which an answer can equal the gold answer."""

    name: str
    judge: Callable[
        [Task, str, str], RewardResult | None
    ]  # (task, gold, answer) -> result; None if the rule doesn't apply
    choose: Callable[[Sequence[str]], Sequence[str]] | None = (
        None  # readings of an answer (the first is all of it) to try
    )


RIGHT, WRONG = RewardResult(1.0), RewardResult(0.0)


def right_if(is_same: bool) -> RewardResult:
    """`RIGHT` or `WRONG`."""
    return RIGHT if is_same else WRONG


def match_answers(rules: Sequence[Rule]) -> Reward:
    """Give 1 if the final answer of an output equals one of the gold answers by one of the rules, else 0.

    `reason`, and for a right answer `parts`, names the rule that decided.
    """

    def score(task: Task, output: str) -> RewardResult:
        golds = [gold for gold in task.answers if gold.strip()]
        if not golds:
            return RewardResult(None, f"task {task.id!r} has no gold answer: give it one")
        if any(len(output) <= len(gold) + MAX_TAIL and output.strip() == gold.strip() for gold in golds):
            return RewardResult(1.0, "exact: the whole output", {"exact": 1.0})
        found_answer = find_answer(output)
        if not found_answer.text.strip():
            return RewardResult(0.0, "no answer: the output is empty" if not output.strip() else "no answer was found")
        invalid, mismatch = None, ""
        for gold in golds:
            name, result = judge_by_rules(rules, task, gold, readings(found_answer) or (found_answer.text,))
            if result.value is None:
                invalid = result
            elif result.value > 0:
                return RewardResult(
                    result.value,
                    f"{name}, in the {found_answer.source}: {_quoted(found_answer.text)}",
                    {name: result.value},
                )
            else:
                mismatch = mismatch or f"{name}: {result.reason}".strip(": ")
        return invalid or RewardResult(
            0.0, f"not the gold answer, in the {found_answer.source}: {_quoted(found_answer.text)} ({mismatch})"
        )

    return Reward(score)


def judge_by_rules(rules: Sequence[Rule], task: Task, gold: str, answers: Sequence[str]) -> tuple[str, RewardResult]:
    """Apply rules in turn -> name of the rule that decided, its best result over the readings of an answer."""
    decision = ("no rule", RewardResult(0.0))
    for rule in rules:
        for answer in rule.choose(answers) if rule.choose else answers:
            result = rule.judge(task, gold, answer)
            if result is None:
                continue
            if result.value is None or result.value > 0:
                return rule.name, result
            decision = (rule.name, result)
        if decision[0] == rule.name:
            break
    return decision


def _quoted(text: str) -> str:
    """Quote the beginning of a text, on one line."""
    text = " ".join(text[:200].split())
    return repr(text if len(text) <= 60 else text[:57] + "...")


# Rules that need only the text -------------------------------------------------------------------


def exact(task: Task, gold: str, answer: str) -> RewardResult | None:  # noqa: ARG001
    """Right if the two are spelled alike, typography aside; None otherwise."""
    return RIGHT if plain_text(gold) == plain_text(answer) else None


def same_text(task: Task, gold: str, answer: str) -> RewardResult | None:  # noqa: ARG001
    """Compare words without case, accents, articles, plurals and punctuation; None if gold has no words."""
    gold_words = bare(plain_text(gold))
    return right_if(gold_words == bare(plain_text(answer))) if gold_words else None


def numeric(task: Task, gold: str, answer: str, *, close: Close = rounded) -> RewardResult | None:
    """Compare two numbers; None if one of them is none, or if they differ and a comma may separate a list."""
    (gold_name, gold), (name, answer) = split_name(plain_text(gold)), split_name(plain_text(answer))
    gold_number, answer_number = read_plain(gold), read_plain(answer.removeprefix("$"))
    if gold_number is None or answer_number is None or (name != gold_name and name and gold_name):
        return None
    is_same = same_number(task, gold_number, answer_number, close=close)
    return None if not is_same and (gold_number.doubtful or answer_number.doubtful) else right_if(is_same)


def same_number(task: Task, gold: Number, answer: Number, *, close: Close = rounded) -> bool:
    """Whether two numbers are close; if the question asks for percent, one of them may lack the sign."""
    if close(gold, answer):
        return True
    asks_percent = any(word in task.query.lower() for word in ("percent", "per cent", "%"))
    if gold.percent == answer.percent or not asks_percent:
        return False
    return close(*(number.scaled(100) if number.percent else number for number in (gold, answer)))


def split_name(text: str) -> tuple[str, str]:
    """Split an assignment (`x = 5`) in a plain text -> variable, value; the variable is "" if there is none."""
    name, sign, value = text.partition("=")
    name = name.strip()
    if not sign or not name.isalpha() or len(name) > 1 or "=" in value:
        return "", text
    return name, value.strip()


def numeric_rule(close: Close = rounded) -> Rule:
    """Make the rule that compares two numbers by `close`."""
    return Rule("numeric", lambda task, gold, answer: numeric(task, gold, answer, close=close))


EXACT, NUMERIC, TEXT = Rule("exact", exact), numeric_rule(), Rule("text", same_text)


def answer(*, close: Close = rounded) -> Reward:
    """The plain matcher: exact text, numbers by `close`, or the same words."""
    return match_answers((EXACT, numeric_rule(close), TEXT))
