"""How often the answer matcher agrees with a teacher, by domain; beside math-verify alone and plain comparison.

    python -m experiments.benchmarks.answers

The pairs of gold answer and output in `tests/rewards/pairs.txt` were judged by hand. `ours` is the matcher of schools
or of mathematics, by domain; `math-verify` is its own `parse` and `verify` over the output, as it is and between dollar
signs; `plain` compares stripped strings. What may hang runs in a process that is killed. Prints a table and one JSON
line; `--show` lists each disagreement of ours.
"""

import json
import time
from pathlib import Path

from absl import flags

from experiments import common
from experiments.benchmarks.measured import show_lines
from experiments.headings import heading
from experiments.pairs import PAIRS, Judge, Pair, matcher, math_verify_alone, plain_comparison, read_pairs
from flowgrpo.report.progress import counted
from flowgrpo.rewards.symbolic import PRELOAD
from flowgrpo.sandbox import Sandbox
from flowgrpo.types import BadInput

heading("What is run")
_PAIRS = flags.DEFINE_string("pairs", str(PAIRS), "File of pairs.")
_SHOW = flags.DEFINE_bool("show", False, "List each disagreement of ours.")
_SECONDS = flags.DEFINE_float("seconds", 5.0, "Deadline of a check.", lower_bound=0.1)


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
    if not Path(_PAIRS.value).is_file():
        raise BadInput(f"--pairs={_PAIRS.value} is no file: experiments/pairs.py says what one holds")
    pairs = read_pairs(Path(_PAIRS.value))
    with Sandbox(preload=PRELOAD) as sandbox:
        match = matcher(sandbox.call, seconds=_SECONDS.value)
        judges: dict[str, Judge] = {
            "ours": lambda pair: match(pair).value,
            "math-verify": lambda pair: math_verify_alone(sandbox.call, pair, seconds=_SECONDS.value),
            "plain": plain_comparison,
        }
        said = {name: agreement(pairs, judge) for name, judge in counted("judge", judges.items())}
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
