"""Lines of the report: figures and their bounds in; a table, sentences and JSON out."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from flowgrpo.report.tables import significant

PASS, FAIL, SKIPPED, ERROR, MEASURED = "pass", "FAIL", "skipped", "ERROR", "measured"
NAME_WIDTH = 54  # columns of the name of a figure


class CheckLine(NamedTuple):
    """One figure of a check, its bound, and what to do if it is exceeded."""

    name: str
    status: str
    figure: float | str | None = None
    unit: str = ""
    bound: str = ""
    advice: str = ""  # one sentence: what a failure means and what to do, or why nothing was checked
    guards: bool = False  # guards correctness: if it fails, the device can't be trusted
    check: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it failed or could not be finished."""
        return self.status in (FAIL, ERROR)


def measured(name: str, figure: float | str, unit: str = "", advice: str = "") -> CheckLine:
    """A figure without a bound."""
    return CheckLine(name, MEASURED, _rounded(figure), unit, advice=advice)


def at_most(name: str, figure: float, bound: float, advice: str, *, guards: bool = True) -> CheckLine:
    """A figure with an upper bound; NaN fails."""
    status = PASS if figure <= bound else FAIL
    return CheckLine(name, status, _rounded(figure), "", f"<= {bound:g}", advice, guards)


def between(name: str, figure: float, low: float, high: float, advice: str, *, guards: bool = False) -> CheckLine:
    """A figure with a lower and an upper bound."""
    status = PASS if low <= figure <= high else FAIL
    return CheckLine(name, status, _rounded(figure), "", f"{low:g} to {high:g}", advice, guards)


def expect(name: str, is_true: bool, advice: str, *, guards: bool = True) -> CheckLine:
    """A condition that must be true."""
    return CheckLine(name, PASS if is_true else FAIL, "yes" if is_true else "no", "", "yes", advice, guards)


def skipped(name: str, reason: str) -> CheckLine:
    """A figure that was not checked, and why."""
    return CheckLine(name, SKIPPED, advice=reason)


def _rounded(figure: float | str) -> float | str:
    if isinstance(figure, str) or not math.isfinite(figure):
        return figure if isinstance(figure, str) else str(figure)  # JSON has neither NaN nor infinity
    return significant(float(figure), 4)


def failed(lines: Sequence[CheckLine]) -> bool:
    """Whether a line that guards correctness is bad."""
    return any(line.is_bad and line.guards for line in lines)


def verdict_table(lines: Sequence[CheckLine]) -> str:
    """Table with a line for each figure."""
    rows = [f"{'check':14}{'what':{NAME_WIDTH}}{'':10}{'figure':>12}  {'bound'}"]
    for line in lines:
        figure = "" if line.figure is None else f"{line.figure:,}" if isinstance(line.figure, float) else line.figure
        bound = line.bound or line.unit
        rows.append(f"{line.check:14}{line.name:{NAME_WIDTH}}{line.status:10}{figure:>12}  {bound}".rstrip())
    return "\n".join(rows)


def verdict_lines(lines: Sequence[CheckLine]) -> str:
    """A sentence for each figure that failed or was skipped, and the summary."""
    sentences = []
    for status, words in ((FAIL, "failed"), (ERROR, "could not be finished"), (SKIPPED, "was skipped")):
        matching = [line for line in lines if line.status == status]
        sentences += [f"{line.check}, {line.name}: {words}{_figure_in_words(line)}. {line.advice}" for line in matching]
    return "\n".join([*sentences, summary(lines)])


def _figure_in_words(line: CheckLine) -> str:
    return "" if line.figure is None else f" ({line.figure}; {line.bound or 'no bound'})"


def summary(lines: Sequence[CheckLine]) -> str:
    """One sentence: whether the device can be trusted."""
    guarding = [line for line in lines if line.guards]
    bad = sorted({line.check for line in guarding if line.is_bad})
    if bad:
        return f"Verdict: do not train here yet; of what guards correctness, {', '.join(bad)} failed."
    other_count = sum(line.is_bad for line in lines)
    other_figures = f"; {other_count} other figures are not what they should be" if other_count else ""
    return f"Verdict: all {len(guarding)} figures that guard correctness are within their bounds{other_figures}."


def to_record(line: CheckLine) -> dict[str, Any]:
    """JSON of a line, without empty fields, and without the advice if it passed."""
    shown = line if line.status not in (PASS, MEASURED) else line._replace(advice="")
    return {
        name: value
        for name, value in shown._asdict().items()
        if value is not None and value is not False and value != ""
    }
