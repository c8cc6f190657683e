"""The checks by name, run one after another; an exception in one doesn't stop the others.

lines = run_checks(make_bench("full", None), CHECKS, seconds=540, on_line=print)
"""

import time
from collections.abc import Callable, Collection, Mapping

from flowgrpo.types import BadInput, first_line

from .attentions import check_packing
from .bench import Bench, environment
from .figures import ERROR, CheckLine, measured, skipped
from .sampling import check_logits, check_ratio, check_widths
from .small_runs import check_quickstart
from .speeds import check_decode, check_rates, check_training
from .updates import check_determinism, check_update

Check = Callable[[Bench], list[CheckLine]]
# Checks that guard correctness come first; those with the largest memory last, so that each peak exceeds earlier ones.
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
    """Raise `BadInput` for a name that is no check."""
    for name in names:
        if name not in CHECKS:
            raise BadInput(f"--checks has {name!r}, which is no check; choose from {', '.join(CHECKS)}")


def run_checks(
    bench: Bench,
    checks: Mapping[str, Check],
    *,
    seconds: float,
    on_line: Callable[[str], None],
    on_lines: Callable[[list[CheckLine]], None] = lambda _: None,
) -> list[CheckLine]:
    """Run checks, none of which starts after `seconds`.

    `on_line` gets progress as text; `on_lines` gets all lines so far after each check.
    """
    lines, start = [], time.monotonic()
    for number, (name, check) in enumerate(checks.items(), start=1):
        on_line(f"{number}/{len(checks)} {name} …")
        check_start = time.monotonic()
        if check_start - start > seconds:
            new_lines = [
                skipped(name, f"{seconds:g} seconds were over: give more by --stop_after, or --checks={name}.")
            ]
        else:
            new_lines = [*_run_one(bench, name, check), measured("seconds", time.monotonic() - check_start, "s")]
        lines += [line._replace(check=name) for line in new_lines]
        on_line(f"{number}/{len(checks)} {name}: {_count_by_status(new_lines)}, {time.monotonic() - check_start:.1f} s")
        on_lines(lines)
    return lines


def _run_one(bench: Bench, name: str, check: Check) -> list[CheckLine]:
    """Lines of a check, or one line with its exception."""
    try:
        return check(bench)
    except Exception as error:  # drivers, compilers and memory have errors of their own
        advice = f"{first_line(error)[:400]}. Run --checks={name} alone; if it fails again, report it."
        return [CheckLine("the whole check", ERROR, type(error).__name__, advice=advice, guards=name in GUARDING)]


def _count_by_status(lines: list[CheckLine]) -> str:
    """Number of lines of each status, as text."""
    states = [line.status for line in lines]
    return ", ".join(f"{states.count(status)} {status}" for status in dict.fromkeys(states))
