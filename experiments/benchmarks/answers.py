"""How often the answer matcher agrees with a teacher, by domain; beside math-verify alone and plain comparison.

    python -m experiments.benchmarks.answers

The pairs of gold answer and output in `tests/rewards/pairs.txt` were judged by hand. `ours` is the matcher of schools
or of mathematics, by domain; `math-verify` is its own `parse` and `verify` over the output, as it is and between dollar
signs; `plain` compares stripped strings. What may hang runs in a process that is killed. Prints a table and one JSON
line; `--show` lists each disagreement of ours.
"""

from collections import Counter
from pathlib import Path

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("What is run")
_PAIRS = flags.DEFINE_string("pairs", None, "File of pairs; that of the tests by default.")
_SHOW = flags.DEFINE_bool("show", False, "List each disagreement of ours.")
_SECONDS = flags.DEFINE_float("seconds", 5.0, "Deadline of a check.", lower_bound=0.1)

app.read_flags(__name__)

from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, timed
from flowgrpo.rewards.answers.symbolic import PRELOAD
from flowgrpo.sandbox import Sandbox
from flowgrpo.types import BadInput

from .measuring import print_result
from .pairs import PAIRS, Judge, Pair, matcher, math_verify_alone, plain_comparison, read_pairs


def _agreement(pairs: list[Pair], judge: Judge) -> tuple[Counter[str], list[Pair], float]:
    """By domain, how many pairs the judge decides as the teacher does; those where it doesn't; seconds."""
    took, values = timed(lambda: [judge(pair) for pair in pairs])
    others = [x for x, value in zip(pairs, values, strict=True) if value is None or (value > 0) != x.right]
    return Counter(pair.domain for pair in pairs) - Counter(pair.domain for pair in others), others, took


def main() -> None:
    """Judge every pair by each of the three, print the table and one JSON line."""
    path = Path(_PAIRS.value or PAIRS)
    if not path.is_file():
        raise BadInput(f"--pairs={path} is no file: `experiments.benchmarks.pairs` says what one holds")
    pairs = read_pairs(path)
    with Sandbox(preload=PRELOAD) as sandbox:
        match = matcher(sandbox.call, seconds=_SECONDS.value)
        judges: dict[str, Judge] = {
            "ours": lambda pair: match(pair).value,
            "math-verify": lambda pair: math_verify_alone(sandbox.call, pair, seconds=_SECONDS.value),
            "plain": plain_comparison,
        }
        said = {name: _agreement(pairs, judge) for name, judge in with_progress("judge", judges.items())}
        show_lines(_make_rows(pairs, {name: agreed for name, (agreed, _, _) in said.items()}))
        for pair in said["ours"][1] if _SHOW.value else ():
            print(f"line {pair.line}: teacher {pair.right}, gold {pair.golds}, output {pair.output!r}: {match(pair)}")
    share = {name: round(sum(agreed.values()) / len(pairs), 4) for name, (agreed, _, _) in said.items()}
    seconds = {name: round(taken, 2) for name, (_, _, taken) in said.items()}
    print_result("answers", pairs=len(pairs), agreement=share, seconds=seconds)


def _make_rows(pairs: list[Pair], said: dict[str, Counter[str]]) -> list[dict]:
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
    app.run(main)
