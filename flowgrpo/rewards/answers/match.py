"""The answer matcher: `match_answers` makes a reward of rules, `answer` the plain one.

    output -> find_answer -> readings x gold answers x rules -> Scored

A rule is a function `(task, gold, answer)` that says right or wrong, or None where it has nothing to say about this
gold; the first that speaks decides. One gold answer that matches is enough. A task without a gold answer, or with one
that a rule can't read, is invalid unless another one matches. `school.py` has the rules of schools, `symbolic.py` those
of mathematics.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.answers.extract import LOOK, find_answer, readings
from flowgrpo.rewards.answers.numbers import Close, Number, read_plain, rounded
from flowgrpo.rewards.answers.spelling import bare, plain_text
from flowgrpo.types import Task


class Rule(NamedTuple):
    """One way in which an answer can be the gold answer. `judge` returns None where it has nothing to say.

    `choose`, where there is one, leaves out readings of an answer, of which the first is all of it.
    """

    name: str
    judge: Callable[[Task, str, str], Scored | None]
    choose: Callable[[Sequence[str]], Sequence[str]] | None = None


RIGHT, WRONG = Scored(1.0), Scored(0.0)


def verdict(same: bool) -> Scored:
    """Say right or wrong."""
    return RIGHT if same else WRONG


def match_answers(rules: Sequence[Rule]) -> Reward:
    """Give 1 where the final answer of an output is one of the gold answers by one of the rules, else 0.

    `reason`, and for a right answer `parts`, names the rule that decided.
    """

    def score(task: Task, output: str) -> Scored:
        golds = [gold for gold in task.answers if gold.strip()]
        if not golds:
            return Scored(None, f"task {task.id!r} has no gold answer: give it one")
        if any(len(output) <= len(gold) + LOOK and output.strip() == gold.strip() for gold in golds):
            return Scored(1.0, "exact: the whole output", {"exact": 1.0})
        found = find_answer(output)
        if not found.text.strip():
            return Scored(0.0, "no answer: the output is empty" if not output.strip() else "no answer was found")
        invalid, said = None, ""
        for gold in golds:
            name, scored = judge_by_rules(rules, task, gold, readings(found) or (found.text,))
            if scored.value is None:
                invalid = scored
            elif scored.value > 0:
                return Scored(scored.value, f"{name}, in the {found.where}: {_shown(found.text)}", {name: scored.value})
            else:
                said = said or f"{name}: {scored.reason}".strip(": ")
        return invalid or Scored(0.0, f"not the gold answer, in the {found.where}: {_shown(found.text)} ({said})")

    return Reward(score)


def judge_by_rules(rules: Sequence[Rule], task: Task, gold: str, answers: Sequence[str]) -> tuple[str, Scored]:
    """Ask rules in turn -> the name of the one that decided, and the best that it said of the readings of an answer."""
    decided = ("no rule", Scored(0.0))
    for rule in rules:
        for answer in rule.choose(answers) if rule.choose else answers:
            scored = rule.judge(task, gold, answer)
            if scored is None:
                continue
            if scored.value is None or scored.value > 0:
                return rule.name, scored
            decided = (rule.name, scored)
        if decided[0] == rule.name:
            break
    return decided


def _shown(text: str) -> str:
    """Quote a short piece of a text, on one line."""
    text = " ".join(text[:200].split())
    return repr(text if len(text) <= 60 else text[:57] + "...")


# Rules that need nothing but the text -------------------------------------------------------------------


def exact(task: Task, gold: str, answer: str) -> Scored | None:  # noqa: ARG001
    """Say right where the two are spelled alike, typography aside; None of others."""
    return RIGHT if plain_text(gold) == plain_text(answer) else None


def same_text(task: Task, gold: str, answer: str) -> Scored | None:  # noqa: ARG001
    """Compare words without case, accents, articles, plurals and punctuation; None where gold has no words."""
    gold_words = bare(plain_text(gold))
    return verdict(gold_words == bare(plain_text(answer))) if gold_words else None


def numeric(task: Task, gold: str, answer: str, *, close: Close = rounded) -> Scored | None:
    """Compare two numbers; None where one of them is none, or where a comma may part a list."""
    (gold_name, gold), (name, answer) = named(plain_text(gold)), named(plain_text(answer))
    wanted, given = read_plain(gold), read_plain(answer.removeprefix("$"))
    if wanted is None or given is None or (name != gold_name and name and gold_name):
        return None
    same = same_number(task, wanted, given, close=close)
    return None if not same and (wanted.doubtful or given.doubtful) else verdict(same)


def same_number(task: Task, gold: Number, answer: Number, *, close: Close = rounded) -> bool:
    """Say if two numbers are close; if the question asks for percent, one sign of it may be missing or too much."""
    if close(gold, answer):
        return True
    asked = any(word in task.query.lower() for word in ("percent", "per cent", "%"))
    if gold.percent == answer.percent or not asked:
        return False
    return close(*(number.scaled(100) if number.percent else number for number in (gold, answer)))


def named(text: str) -> tuple[str, str]:
    """Read an assignment (`x = 5`) in a plain text -> the variable and the value; no variable where there is none."""
    name, sign, value = text.partition("=")
    name = name.strip()
    if not sign or not name.isalpha() or len(name) > 1 or "=" in value:
        return "", text
    return name, value.strip()


def numeric_rule(close: Close = rounded) -> Rule:
    """Make the rule of two numbers that are the same by `close`."""
    return Rule("numeric", lambda task, gold, answer: numeric(task, gold, answer, close=close))


EXACT, NUMERIC, TEXT = Rule("exact", exact), numeric_rule(), Rule("text", same_text)


def answer(*, close: Close = rounded) -> Reward:
    """Make the plain matcher: exact, numeric by `close`, or the same words."""
    return match_answers((EXACT, numeric_rule(close), TEXT))
