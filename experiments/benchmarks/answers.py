"""How often the answer matcher agrees with a teacher, by domain; beside math-verify alone and plain comparison.

    python -m experiments.benchmarks.answers

The pairs of gold answer and output in `tests/rewards/pairs.txt` were judged by hand. `ours` is the matcher of schools
or of mathematics, by domain; `math-verify` is its own `parse` and `verify` over the output, as it is and between dollar
signs; `plain` compares stripped strings. What may hang runs in a process that is killed. Prints a table and one JSON
line; `--show` lists each disagreement of ours.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from absl import flags

from experiments import common
from experiments.benchmarks.measured import show_lines
from flowgrpo.contracts import Scored
from flowgrpo.rewards.school import school
from flowgrpo.rewards.symbolic import CHILD, PRELOAD, mathematics
from flowgrpo.sandbox import CallFailed, Sandbox
from flowgrpo.types import BadInput, Task

PAIRS = Path(__file__).parents[2] / "tests" / "rewards" / "pairs.txt"
MATHEMATICS = ("exact", "numeric", "symbolic")  # domains of the matcher of mathematics; schools have the others

_PAIRS = flags.DEFINE_string("pairs", str(PAIRS), "File of pairs.")
_SHOW = flags.DEFINE_bool("show", False, "List each disagreement of ours.")
_SECONDS = flags.DEFINE_float("seconds", 5.0, "Deadline of a check.", lower_bound=0.1)


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
    """What this project's matchers say of a pair, by its domain."""
    of_mathematics, of_schools = mathematics(call, seconds=seconds), school()
    return lambda pair: (of_mathematics if pair.domain in MATHEMATICS else of_schools).score(pair.task, pair.output)


def math_verify_alone(call: Callable, pair: Pair, *, seconds: float = 5.0) -> float:
    """What math-verify says without help; what it doesn't answer in time is wrong."""
    try:
        return float(any(call(f"{CHILD}:verify_alone", gold, pair.output, seconds=seconds) for gold in pair.golds))
    except (CallFailed, TimeoutError):
        return 0.0


def plain_comparison(pair: Pair) -> float:
    """Whether the output is a gold answer, letter by letter."""
    return float(pair.output.strip() in pair.golds)


def agreement(pairs: list[Pair], judge: Judge) -> tuple[dict[str, int], list[Pair], float]:
    """By domain, how many pairs the judge decides as the teacher does; those where it doesn't; seconds."""
    start = time.perf_counter()
    agreed: dict[str, int] = {}
    others = []
    for pair in pairs:
        value = judge(pair)
        same = value is not None and (value > 0) == pair.right
        agreed[pair.domain] = agreed.get(pair.domain, 0) + same
        others += [] if same else [pair]
    return agreed, others, time.perf_counter() - start


def main() -> None:
    """Judge every pair by each of the three, print the table and one JSON line."""
    pairs = read_pairs(Path(_PAIRS.value))
    with Sandbox(preload=PRELOAD) as sandbox:
        match = matcher(sandbox.call, seconds=_SECONDS.value)
        judges: dict[str, Judge] = {
            "ours": lambda pair: match(pair).value,
            "math-verify": lambda pair: math_verify_alone(sandbox.call, pair, seconds=_SECONDS.value),
            "plain": plain_comparison,
        }
        said = {name: agreement(pairs, judge) for name, judge in judges.items()}
        show_lines(make_rows(pairs, {name: agreed for name, (agreed, _, _) in said.items()}))
        for pair in said["ours"][1] if _SHOW.value else ():
            print(f"line {pair.line}: teacher {pair.right}, gold {pair.golds}, output {pair.output!r}: {match(pair)}")
    share = {name: round(sum(agreed.values()) / len(pairs), 4) for name, (agreed, _, _) in said.items()}
    seconds = {name: round(taken, 2) for name, (_, _, taken) in said.items()}
    print(json.dumps({"benchmark": "answers", "pairs": len(pairs), "agreement": share, "seconds": seconds}))


def make_rows(pairs: list[Pair], said: dict[str, dict[str, int]]) -> list[dict]:
    """One row for each domain, and one for all."""
    domains = list(dict.fromkeys(pair.domain for pair in pairs))
    rows = []
    for domain in (*domains, "all"):
        inside = [pair for pair in pairs if domain in (pair.domain, "all")]
        counts = {name: sum(agreed.values()) if domain == "all" else agreed[domain] for name, agreed in said.items()}
        shares = {name: f"{100 * count / len(inside):.1f} %" for name, count in counts.items()}
        rows.append({"domain": domain, "pairs": len(inside), "right": sum(pair.right for pair in inside), **shares})
    return rows


if __name__ == "__main__":
    common.run(main)
