"""Lines of a verdict: a figure and its bound flow in, a table, sentences and one JSON flow out."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from flowgrpo.report.tables import significant

PASS, FAIL, SKIPPED, ERROR, MEASURED = "pass", "FAIL", "skipped", "ERROR", "measured"
WIDTH = 54  # columns of what is measured


class CheckLine(NamedTuple):
    """One figure of a check: what it may be, and what follows where it is not."""

    name: str
    status: str
    figure: float | str | None = None
    unit: str = ""
    bound: str = ""
    advice: str = ""  # a sentence: what a failure means and what to do, or why nothing was checked
    guards: bool = False  # correctness: where it fails, the device can't be trusted
    check: str = ""

    @property
    def is_bad(self) -> bool:
        """Say whether it failed or could not be finished."""
        return self.status in (FAIL, ERROR)


def tell(name: str, figure: float | str, unit: str = "", advice: str = "") -> CheckLine:
    """Report a figure that has no bound."""
    return CheckLine(name, MEASURED, _short(figure), unit, advice=advice)


def at_most(name: str, figure: float, bound: float, advice: str, *, guards: bool = True) -> CheckLine:
    """Hold a figure against the most that it may be; one that is no number fails."""
    status = PASS if figure <= bound else FAIL
    return CheckLine(name, status, _short(figure), "", f"<= {bound:g}", advice, guards)


def between(name: str, figure: float, low: float, high: float, advice: str, *, guards: bool = False) -> CheckLine:
    """Hold a figure against the least and the most that it may be."""
    status = PASS if low <= figure <= high else FAIL
    return CheckLine(name, status, _short(figure), "", f"{low:g} to {high:g}", advice, guards)


def holds(name: str, is_true: bool, advice: str, *, guards: bool = True) -> CheckLine:
    """Report whether something is so."""
    return CheckLine(name, PASS if is_true else FAIL, "yes" if is_true else "no", "", "yes", advice, guards)


def skipped(name: str, why: str) -> CheckLine:
    """Report what was not checked, and why."""
    return CheckLine(name, SKIPPED, advice=why)


def _short(figure: float | str) -> float | str:
    if isinstance(figure, str) or not math.isfinite(figure):
        return figure if isinstance(figure, str) else str(figure)  # JSON has neither NaN nor infinity
    return significant(float(figure), 4)


def failed(lines: Sequence[CheckLine]) -> bool:
    """Say whether a line that guards correctness is bad."""
    return any(line.is_bad and line.guards for line in lines)


def verdict_table(lines: Sequence[CheckLine]) -> str:
    """A line for each figure."""
    rows = [f"{'check':14}{'what':{WIDTH}}{'':10}{'figure':>12}  {'bound'}"]
    for line in lines:
        shown = "" if line.figure is None else f"{line.figure:,}" if isinstance(line.figure, float) else line.figure
        bound = line.bound or line.unit
        rows.append(f"{line.check:14}{line.name:{WIDTH}}{line.status:10}{shown:>12}  {bound}".rstrip())
    return "\n".join(rows)


def verdict_words(lines: Sequence[CheckLine]) -> str:
    """A sentence for what failed and for what was skipped, and one for the whole."""
    told = []
    for status, words in ((FAIL, "failed"), (ERROR, "could not be finished"), (SKIPPED, "was skipped")):
        own = [line for line in lines if line.status == status]
        told += [f"{line.check}, {line.name}: {words}{_figure(line)}. {line.advice}" for line in own]
    return "\n".join([*told, summary(lines)])


def _figure(line: CheckLine) -> str:
    return "" if line.figure is None else f" ({line.figure}; {line.bound or 'no bound'})"


def summary(lines: Sequence[CheckLine]) -> str:
    """Say in one sentence whether the device can be trusted."""
    guarding = [line for line in lines if line.guards]
    bad = sorted({line.check for line in guarding if line.is_bad})
    if bad:
        return f"Verdict: do not train here yet; of what guards correctness, {', '.join(bad)} failed."
    others = sum(line.is_bad for line in lines)
    rest = f"; {others} other figures are not what they should be" if others else ""
    return f"Verdict: all {len(guarding)} figures that guard correctness are within their bounds{rest}."


def to_record(line: CheckLine) -> dict[str, Any]:
    """A line as JSON has it: what is there, and the sentence only where it is of use."""
    told = line if line.status not in (PASS, MEASURED) else line._replace(advice="")
    return {name: x for name, x in told._asdict().items() if x is not None and x is not False and x != ""}
