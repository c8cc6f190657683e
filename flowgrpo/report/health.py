"""Whether a run is collapsing: its lines of metrics flow in, sentences flow out, each with a figure, a limit, a mend.

    findings(lines)       ->  what is wrong at the end of these lines
    warnings_of(lines)    ->  all that a run with these lines was told, in order
    Metrics(folder, sinks=[partial(watch_health, say=print)])    tells a run as it goes, and keeps `warnings.jsonl`

    entropy            the policy hardly explores, or explores half as much as a window ago, and gains nothing by it
    repeated_text, repeated_actions     actions repeat themselves; `rollout.repetition` says how that is counted
    ratio, clip_fraction    updates go far from the policy that sampled
    zero_signal_groups      nearly all groups have equal rewards, while success is not near 1
    zero_signal_groups_rise, tool_errors_rise   they rise, and success doesn't
    chosen_per_trajectory   trajectories grow or shrink, and success doesn't rise
    success            validations fall by more than chance
    training_success   so does training success, where there are no two validations
    gap                the training reward rises above what a held-out check says (R3)

All figures but those of validations are means over a window of updates; those of tokens skip updates in which no token
was learned from. `Limits` has the limits. A warning comes when something begins, and again when it has become twice as
bad. All of it is a function of `metrics.jsonl`, so a run that goes on says and writes what an undisturbed one does.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.report.checks import Finding, History, Limits, examine, take
from flowgrpo.report.metrics import Line, Sink

WARNINGS = "warnings.jsonl"
WORSE = 2.0  # times as bad as when it was told last, from which it is told again


def findings(lines: Iterable[Line], limits: Limits | None = None) -> list[Finding]:
    """List what is wrong at the end of these lines of metrics; without `limits`, by the default ones."""
    history: History = {}
    for line in lines:
        take(history, line)
    return examine(history, limits or Limits())


def warnings_of(lines: Iterable[Line], limits: Limits | None = None) -> list[dict[str, Any]]:
    """All that a run with these lines is told, in order, as lines of `warnings.jsonl`."""
    watcher = Watcher(limits or Limits())
    return [warning for line in lines for warning in watcher.look(line)]


class Watcher:
    """Figures of a run so far, with the severity at which each check last warned of it."""

    def __init__(self, limits: Limits):
        self._limits, self._history, self._told = limits, {}, {}

    def look(self, line: Line) -> list[dict[str, Any]]:
        """Take in a line, and list the warnings due: what begins, and what is `WORSE` times as bad as last told."""
        if not take(self._history, line):
            return []
        found = examine(self._history, self._limits)
        news = [one for one in found if one.severity >= WORSE * self._told.get(one.name, 0.0)]
        self._told |= {one.name: max(one.severity, 1e-9) for one in news}
        return [{"phase": line.get("phase", "train"), "update": line["update"], **_shown(one)} for one in news]


def watch_health(
    folder: Path, kept: Sequence[Line], *, say: Callable[[str], None], limits: Limits | None = None
) -> Sink:
    """Tell a run as it goes, and write `warnings.jsonl` anew from the lines that it has kept."""
    watcher, path = Watcher(limits or Limits()), Path(folder) / WARNINGS
    before = [warning for line in kept for warning in watcher.look(line)]
    path.write_text("".join(json.dumps(one) + "\n" for one in before))

    def write(line: Line, _timings: Line) -> None:
        for one in watcher.look(line):
            with path.open("a") as file:
                file.write(json.dumps(one) + "\n")
            say(f"warning: {one['phase']} {one['update']}: {one['words']}")

    return Sink(write, lambda: None)


def summary(told: Sequence[Mapping[str, Any]]) -> str | None:
    """One line for the end of a run: how often it was warned of what; None where it wasn't."""
    if not told:
        return None
    first: dict[str, int] = {}
    for one in told:
        first.setdefault(one["warning"], one["update"])
    places = ", ".join(f"{name} (from update {update} on)" for name, update in first.items())
    return f"{len(told)} {'warning' if len(told) == 1 else 'warnings'}: {places}; see {WARNINGS}"


def _shown(one: Finding) -> dict[str, Any]:
    rounded = {"figure": round(one.figure, 6), "limit": round(one.limit, 6)}
    return {"warning": one.name, **rounded, "words": one.words}
