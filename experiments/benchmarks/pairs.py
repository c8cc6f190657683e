"""Pairs of gold answer and output, labelled by hand, and three judges. Tests use this module, too: it has no flags.

A line of the file is `right ¦ gold ‖ another gold ¦ output ¦ question`, below a line `# domain`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flowgrpo.contracts import RewardResult
from flowgrpo.rewards.answers.school import school
from flowgrpo.rewards.answers.symbolic import CHILD, mathematics
from flowgrpo.sandbox import CallFailed
from flowgrpo.types import BadInput, Task

PAIRS = Path(__file__).parents[2] / "tests" / "rewards" / "pairs.txt"
MATHEMATICS = ("exact", "numeric", "symbolic")  # domains of the matcher of mathematics; the others are school answers


class Pair(NamedTuple):
    """Gold answers, an output, and its label."""

    line: int
    domain: str
    golds: tuple[str, ...]
    output: str
    query: str
    right: bool

    @property
    def task(self) -> Task:
        return Task(f"line {self.line}", self.query, self.golds, self.domain)


Judge = Callable[[Pair], float | None]


def read_pairs(path: Path = PAIRS) -> list[Pair]:
    """All pairs, in the order of the file."""
    pairs, domain = [], ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("# "):
            domain = line[2:].strip()
        elif domain and line.strip():
            pairs.append(_read_pair(path, number, domain, line))
    return pairs


def _read_pair(path: Path, number: int, domain: str, line: str) -> Pair:
    fields = [field.strip() for field in line.split("¦")]
    if len(fields) not in (3, 4) or fields[0] not in ("right", "wrong"):
        raise BadInput(f"{path}:{number}: must be `right|wrong ¦ gold ¦ output ¦ question`, the question is optional")
    verdict, gold, output, *query = fields
    golds = tuple(answer.strip() for answer in gold.split("‖"))
    return Pair(number, domain, golds, output.replace("⏎", "\n"), "".join(query), verdict == "right")


def matcher(call: Callable, *, seconds: float = 5.0) -> Callable[[Pair], RewardResult]:
    """Make the function that scores a pair by this project's matcher for its domain."""
    mathematics_reward, school_reward = mathematics(call, seconds=seconds), school()
    return lambda pair: (mathematics_reward if pair.domain in MATHEMATICS else school_reward).score(
        pair.task, pair.output
    )


def math_verify_alone(call: Callable, pair: Pair, *, seconds: float = 5.0) -> float:
    """Score a pair by math-verify alone; a timeout or a failure is wrong."""
    try:
        return float(any(call(f"{CHILD}:verify_alone", gold, pair.output, seconds=seconds) for gold in pair.golds))
    except (CallFailed, TimeoutError):
        return 0.0


def plain_comparison(pair: Pair) -> float:
    """1 if the output is a gold answer, character by character, else 0."""
    return float(pair.output.strip() in pair.golds)
