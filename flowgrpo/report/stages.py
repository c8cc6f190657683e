"""Draw how a run spent its time, from its `timings.jsonl`: tokens a second, and the stages of each update.

    rollout   ->   rewards (what is still awaited)      ->   credit   ->   pack   ->   train
                   inference: reference, critic

Rewards that are still awaited when the last trajectory has ended are awaited while the reference scores (R1). So in the
bars the longer of the two counts, and in the timeline they lie above each other.
"""

from collections.abc import Sequence
from typing import Any

from flowgrpo.report.metrics import TIMINGS, Line
from flowgrpo.report.plots import COLOURS, frame, over_updates

STAGES = ("rollout", "inference", "rewards", "credit", "pack", "train")
HATCHED = {"rollout": "", "inference": "//", "rewards": "..", "credit": "xx", "pack": "\\\\", "train": "--", "rest": ""}
SHOWN = 5  # updates of the timeline
CUT = 3.0  # times the median, at which a bar may be cut


def speed(timings: Sequence[Line], title: str = "") -> Any:
    """Seconds of an update, and tokens a second."""
    from matplotlib.figure import Figure  # here, because it is heavy

    rows = [line for line in timings if line.get("phase") == "train" and "tokens_per_second" in line]
    if not rows:
        return f"{TIMINGS} has no tokens a second"
    x = [line["update"] for line in rows]
    labels = {"seconds": "seconds of an update", "tokens_per_second": "tokens a second"}
    labels = {name: label for name, label in labels.items() if all(name in line for line in rows)}
    figure = Figure(figsize=(7.5, 2.4 * len(labels) + 0.5), layout="constrained")
    axes = figure.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0]
    for i, (axis, (name, label)) in enumerate(zip(axes, labels.items(), strict=True)):
        y = [line[name] for line in rows]
        axis.plot(x, y, color=COLOURS[i], marker="o", ms=3, linewidth=1)
        frame(axis, label)
        axis.set_ylim(0, _limit(y) if name == "seconds" else max(y) * 1.05)
    figure.suptitle(title, fontsize="medium")
    over_updates(axes[-1])
    return figure


def stages(timings: Sequence[Line], title: str = "") -> Any:
    """The seconds of each update by stage, and a timeline of the last ones."""
    from matplotlib.figure import Figure

    rows = [line for line in timings if line.get("phase") == "train" and "rollout_seconds" in line]
    if not rows:
        return f"{TIMINGS} has no stages: they are timed where an update is made of several, as in agentflow"
    figure = Figure(figsize=(7.5, 6.4), layout="constrained")
    bars, line = figure.subplots(2, 1, height_ratios=[3, 2])
    _bars(bars, rows)
    bars.set_title(title, fontsize="medium")
    _timeline(line, rows[-SHOWN:])
    return figure


def _bars(axis: Any, rows: Sequence[Line]) -> None:
    x = [line["update"] for line in rows]
    parts = [_parts(line) for line in rows]
    totals, below = [sum(part.values()) for part in parts], [0.0] * len(rows)
    for name in (*STAGES, "rest"):
        heights = [part.get(name, 0.0) for part in parts]
        if any(heights):
            style: dict[str, Any] = {"hatch": HATCHED[name], "edgecolor": "white", "linewidth": 0.3}
            axis.bar(x, heights, bottom=below, label=_label(name), color=_colour(name), width=0.85, **style)
        below = [low + high for low, high in zip(below, heights, strict=True)]
    limit = _limit(totals)
    for update, total in zip(x, totals, strict=True):
        if total > limit:
            axis.text(update, limit, f"{total:.1f} s", va="bottom", ha="center", fontsize=7)
    frame(axis, "seconds of an update")
    axis.set_ylim(0, limit)
    over_updates(axis)


def _timeline(axis: Any, rows: Sequence[Line]) -> None:
    """When each stage ran, second by second from the first of these updates on."""
    names = [name for name in STAGES if any(line.get(f"{name}_seconds") for line in rows)]
    now = 0.0
    for line in rows:
        for name, (start, length) in _spans(line).items():
            place = names.index(name) if name in names else None
            if place is not None:
                axis.barh(place, length, left=now + start, color=_colour(name), hatch=HATCHED[name], edgecolor="white")
        axis.axvline(now, color="#999999", linewidth=0.8, linestyle=":")
        axis.text(now, -0.75, f" {line['update']}", fontsize=8, va="bottom", color="#555555")
        now += max(line.get("seconds", 0.0), sum(_parts(line).values()))
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel=f"seconds, of updates {rows[0]['update']} to {rows[-1]['update']}", xlim=(0, now))
    axis.set_ylim(len(names) - 0.4, -0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.3)


def _spans(line: Line) -> dict[str, tuple[float, float]]:
    """Compute when each stage begins in its update, and how long it takes; seconds."""
    seconds = {name: line.get(f"{name}_seconds", 0.0) for name in STAGES}
    judged = seconds["rollout"] + max(seconds["inference"], seconds["rewards"])
    starts = {"rollout": 0.0, "inference": seconds["rollout"], "rewards": seconds["rollout"], "credit": judged}
    starts["pack"] = judged + seconds["credit"]
    starts["train"] = starts["pack"] + seconds["pack"]
    return {name: (starts[name], seconds[name]) for name in STAGES}


def _parts(line: Line) -> dict[str, float]:
    """The seconds of an update, each counted once: of rewards, what they were awaited longer than inference took."""
    seconds = {name: line.get(f"{name}_seconds", 0.0) for name in STAGES}
    seconds["rewards"] = max(seconds["rewards"] - seconds["inference"], 0.0)
    return seconds | {"rest": max(line.get("seconds", 0.0) - sum(seconds.values()), 0.0)}


def _label(name: str) -> str:
    return {"rewards": "rewards, awaited\nlonger", "rest": "what is between"}.get(name, name)


def _colour(name: str) -> str:
    return "#bbbbbb" if name == "rest" else COLOURS[STAGES.index(name)]


def _limit(values: Sequence[float]) -> float:
    """Choose the end of an axis of seconds: the first updates, which compile, and other rare ones reach beyond it."""
    ordered = sorted(values)
    middle, high = ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10]
    return min(1.08 * ordered[-1], max(CUT * middle, 1.5 * high)) if len(values) > 3 else 1.08 * ordered[-1]
