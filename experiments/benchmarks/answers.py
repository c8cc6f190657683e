"""How often the answer matcher agrees with labels by hand, by domain; next to math-verify alone and plain comparison.

    python -m experiments.benchmarks.answers

The pairs of gold answer and output in `tests/rewards/pairs.txt` were labelled by hand. `ours` is the matcher of school
answers or of mathematics, by domain; `math-verify` is its own `parse` and `verify` of the output, with and without
dollar signs around it; `plain` compares stripped strings. Checks that may hang run in a process with a deadline. Prints
a table and one JSON line; `--show` lists each disagreement of ours.
"""

from collections import Counter
from pathlib import Path

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Run")
_PAIRS = flags.DEFINE_string("pairs", None, "File of pairs; by default that of the tests.")
_SHOW = flags.DEFINE_bool("show", False, "List each disagreement of ours.")
_SECONDS = flags.DEFINE_float("seconds", 5.0, "Deadline of a check, in seconds.", lower_bound=0.1)

app.read_flags(__name__)

from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, timed
from flowgrpo.rewards.answers.symbolic import PRELOAD
from flowgrpo.sandbox import Sandbox
from flowgrpo.types import BadInput

from .measuring import print_result
from .pairs import PAIRS, Judge, Pair, matcher, math_verify_alone, plain_comparison, read_pairs


def _agreement(pairs: list[Pair], judge: Judge) -> tuple[Counter[str], list[Pair], float]:
    """Number of pairs by domain on which the judge agrees with the labels, pairs on which it doesn't, and seconds."""
    seconds, values = timed(lambda: [judge(pair) for pair in pairs])
    disagreements = [
        pair for pair, value in zip(pairs, values, strict=True) if value is None or (value > 0) != pair.right
    ]
    return (
        Counter(pair.domain for pair in pairs) - Counter(pair.domain for pair in disagreements),
        disagreements,
        seconds,
    )


def main() -> None:
    """Judge every pair by each judge, print the table and one JSON line."""
    path = Path(_PAIRS.value or PAIRS)
    if not path.is_file():
        raise BadInput(f"--pairs={path} is no file: the format is that of `experiments.benchmarks.pairs`")
    pairs = read_pairs(path)
    with Sandbox(preload=PRELOAD) as sandbox:
        match = matcher(sandbox.call, seconds=_SECONDS.value)
        judges: dict[str, Judge] = {
            "ours": lambda pair: match(pair).value,
            "math-verify": lambda pair: math_verify_alone(sandbox.call, pair, seconds=_SECONDS.value),
            "plain": plain_comparison,
        }
        results = {name: _agreement(pairs, judge) for name, judge in with_progress("judge", judges.items())}
        show_lines(_make_rows(pairs, {name: agreements for name, (agreements, _, _) in results.items()}))
        for pair in results["ours"][1] if _SHOW.value else ():
            print(f"line {pair.line}: label {pair.right}, gold {pair.golds}, output {pair.output!r}: {match(pair)}")
    agreement = {name: round(sum(agreements.values()) / len(pairs), 4) for name, (agreements, _, _) in results.items()}
    seconds = {name: round(duration, 2) for name, (_, _, duration) in results.items()}
    print_result("answers", pairs=len(pairs), agreement=agreement, seconds=seconds)


def _make_rows(pairs: list[Pair], agreements: dict[str, Counter[str]]) -> list[dict]:
    """A row for each domain, and one for all."""
    domains = list(dict.fromkeys(pair.domain for pair in pairs))
    rows = []
    for domain in (*domains, "all"):
        in_domain = [pair for pair in pairs if domain in (pair.domain, "all")]
        counts = {
            name: sum(agreed.values()) if domain == "all" else agreed[domain] for name, agreed in agreements.items()
        }
        percentages = {name: f"{100 * count / len(in_domain):.1f} %" for name, count in counts.items()}
        rows.append(
            {"domain": domain, "pairs": len(in_domain), "right": sum(pair.right for pair in in_domain), **percentages}
        )
    return rows


if __name__ == "__main__":
    app.run(main)
