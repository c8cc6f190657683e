"""The checks by name, run one after another: whatever one of them raises, the others are made.

lines = run_checks(open_bench("full", None), CHECKS, seconds=540, said=print)
"""

import time
from collections.abc import Callable, Collection, Mapping

from flowgrpo.recipes.device_checks.attentions import check_packing
from flowgrpo.recipes.device_checks.bench import Bench, environment
from flowgrpo.recipes.device_checks.figures import ERROR, CheckLine, skipped, tell
from flowgrpo.recipes.device_checks.sampling import check_logits, check_ratio, check_widths
from flowgrpo.recipes.device_checks.small_runs import check_quickstart
from flowgrpo.recipes.device_checks.speeds import check_decode, check_rates, check_training
from flowgrpo.recipes.device_checks.updates import check_determinism, check_update
from flowgrpo.types import BadInput, first_line

Check = Callable[[Bench], list[CheckLine]]
# What guards correctness comes first, and what needs most memory last, so that each peak is above those before it.
CHECKS: Mapping[str, Check] = {
    "environment": environment,
    "logits": check_logits,
    "ratio": check_ratio,
    "widths": check_widths,
    "packing": check_packing,
    "update": check_update,
    "determinism": check_determinism,
    "rates": check_rates,
    "decode": check_decode,
    "training": check_training,
    "quickstart": check_quickstart,
}
GUARDING = ("logits", "ratio", "widths", "packing", "update", "quickstart")


def check_chosen(names: Collection[str]) -> None:
    """Refuse a name that is no check."""
    for name in names:
        if name not in CHECKS:
            raise BadInput(f"--checks has {name!r}, which is no check; choose from {', '.join(CHECKS)}")


def run_checks(
    bench: Bench,
    checks: Mapping[str, Check],
    *,
    seconds: float,
    said: Callable[[str], None],
    kept: Callable[[list[CheckLine]], None] = lambda _: None,
) -> list[CheckLine]:
    """Run these checks; none begins after so many seconds. `kept` is given all lines so far after each."""
    lines, start = [], time.monotonic()
    for number, (name, check) in enumerate(checks.items(), start=1):
        said(f"{number}/{len(checks)} {name} …")
        begun = time.monotonic()
        if begun - start > seconds:
            found = [skipped(name, f"{seconds:g} seconds were over: give more by --stop_after, or --checks={name}.")]
        else:
            found = [*_run_one(bench, name, check), tell("seconds", time.monotonic() - begun, "s")]
        lines += [line._replace(check=name) for line in found]
        said(f"{number}/{len(checks)} {name}: {_counts(found)}, {time.monotonic() - begun:.1f} s")
        kept(lines)
    return lines


def _run_one(bench: Bench, name: str, check: Check) -> list[CheckLine]:
    """The lines of a check, or the one that says what it raised."""
    try:
        return check(bench)
    except Exception as error:  # of any kind: a driver, a compiler or memory may fail in ways of their own
        advice = f"{first_line(error)[:400]}. Run --checks={name} alone; where it fails again, report it."
        return [CheckLine("the whole check", ERROR, type(error).__name__, advice=advice, guards=name in GUARDING)]


def _counts(lines: list[CheckLine]) -> str:
    """Count the lines by how they came out."""
    states = [line.status for line in lines]
    return ", ".join(f"{states.count(status)} {status}" for status in dict.fromkeys(states))
