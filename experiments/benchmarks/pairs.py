"""Pairs of gold answer and output that a teacher judged, and three ways of judging them. No flags: tests use it too.

A line of the file is `right ¦ gold ‖ another gold ¦ output ¦ question`, and stands below a line `# domain`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flowgrpo.contracts import Scored
from flowgrpo.rewards.answers.school import school
from flowgrpo.rewards.answers.symbolic import CHILD, mathematics
from flowgrpo.sandbox import CallFailed
from flowgrpo.types import BadInput, Task

PAIRS = Path(__file__).parents[2] / "tests" / "rewards" / "pairs.txt"
MATHEMATICS = ("exact", "numeric", "symbolic")  # domains of the matcher of mathematics; schools have the others


class Pair(NamedTuple):
    """Gold answers, an output, and what a teacher says of it."""

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
    """Every pair, in the order of the file."""
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
        raise BadInput(f"{path}:{number}: must be `right|wrong ¦ gold ¦ output ¦ question`, the last may be left out")
    verdict, gold, output, *query = fields
    golds = tuple(one.strip() for one in gold.split("‖"))
    return Pair(number, domain, golds, output.replace("⏎", "\n"), "".join(query), verdict == "right")


def matcher(call: Callable, *, seconds: float = 5.0) -> Callable[[Pair], Scored]:
    """Make a function that scores a pair with this project's matcher for its domain."""
    of_mathematics, of_schools = mathematics(call, seconds=seconds), school()
    return lambda pair: (of_mathematics if pair.domain in MATHEMATICS else of_schools).score(pair.task, pair.output)


def math_verify_alone(call: Callable, pair: Pair, *, seconds: float = 5.0) -> float:
    """Score a pair by math-verify without help; what it doesn't answer in time, or fails on, is wrong."""
    try:
        return float(any(call(f"{CHILD}:verify_alone", gold, pair.output, seconds=seconds) for gold in pair.golds))
    except (CallFailed, TimeoutError):
        return 0.0


def plain_comparison(pair: Pair) -> float:
    """Say whether the output is a gold answer, letter by letter."""
    return float(pair.output.strip() in pair.golds)
