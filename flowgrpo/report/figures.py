"""Draw the figures of a run from its metrics and timings: `draw_all` writes a picture of each kind.

    written, left_out = draw_all("runs/agentflow-0", formats=("png", "svg"))

    learning               success by phase, with the reward and its held-out check
    policy                 entropy, KL and clip fractions
    ratios, advantages     histograms over the updates, and early, halfway and late in the run
    turns                  turns and chosen tokens of a trajectory, and which turns were learned from
    tools                  which tools were called, and how many calls failed
    speed, stages          tokens per second; what each stage of an update took, and when it ran

A picture without figures is left out, with the reason. Updates in which no token was learned from have no ratios, no
entropy and no KL, so lines pass over them. Training is blue and validation orange.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.errors import BadInput
from flowgrpo.report.metrics import (
    ADVANTAGE,
    METRICS,
    RATIO,
    TIMINGS,
    Line,
    advantage_edges,
    ratio_place,
    read_metrics,
    without_empty_means,
)
from flowgrpo.report.plots import (
    COLOURS,
    PHASES,
    Curve,
    band,
    curve,
    draw_line,
    frame,
    over_updates,
    panels,
    save,
    tool_mix_curves,
)

WIDTH, HEIGHT = 7.5, 6.0  # inches
COLUMNS = 200  # of the map at most; updates are added up beyond
TICKS = (0.5, 0.9, 0.99, 0.999, 1, 1.001, 1.01, 1.1, 2)  # of ratios
STAGES = ("rollout", "inference", "rewards", "credit", "pack", "train")
HATCHED = {"rollout": "", "inference": "//", "rewards": "..", "credit": "xx", "pack": "\\\\", "train": "--", "rest": ""}
SHOWN = 5  # updates of the timeline
CUT = 3.0  # times the median, at which a bar may be cut
FORMATS = ("png", "svg")
HATCHES = ["", "//", "\\\\", "..", "xx", "--", "||", "oo"]
ROUNDING = 1e-9
SMOOTHED = 40  # updates from which a line is drawn as a moving mean, over the figures themselves


class RunLines(NamedTuple):
    """Metrics and timings that a run wrote, with its title."""

    lines: Sequence[Line]
    timings: Sequence[Line]
    title: str


Picture = Callable[[RunLines], Any]  # a figure of matplotlib's, or why there is none


def draw_all(
    folder: str | os.PathLike, out: str | os.PathLike | None = None, *, formats: Sequence[str] = FORMATS[:1]
) -> tuple[list[Path], dict[str, str]]:
    """Draw what there are figures for, into `plots/` of the run by default: the files, and why others are left out."""
    unknown = [one for one in formats if one not in FORMATS]
    if unknown or not formats:
        raise BadInput(f"--format={','.join(formats)} is unknown; choose from {', '.join(FORMATS)}")
    if not Path(folder).is_dir():
        raise BadInput(f"{folder} is no folder: give that of one run")
    source, target = Path(folder), Path(folder) / "plots" if out is None else Path(out)
    timings = list(read_metrics(source / TIMINGS)) if (source / TIMINGS).exists() else []
    told = RunLines(list(read_metrics(source / METRICS)), timings, source.resolve().name)
    written, left_out = [], {}
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{target} can't be made ({error.strerror}): choose another --out") from None
    for name, picture in PICTURES.items():
        for path in (target / f"{name}.{kind}" for kind in formats):
            figure = picture(told)  # drawn again, since drawing one moves its parts a little
            if isinstance(figure, str):
                left_out[name] = figure
                break
            save(figure, path)
            written.append(path)
    return written, left_out


# Lines ------------------------------------------------------------------------------------------------


def learning(told: RunLines) -> Any:
    """Success by phase with its interval; below it the reward, where it is another figure, and its held-out check."""
    lines = told.lines
    phases = {phase: curve(lines, phase, "success") for phase in PHASES}
    if not any(points[0] for points in phases.values()):
        return f"{METRICS} has no success rate yet"
    rewards = {name: curve(lines, "train", name) for name in ("outcome", "second_check")}
    shown = {name: points for name, points in rewards.items() if points[0]}
    if shown.get("outcome") == phases["train"]:
        shown = {}
    figure, axes = panels(told.title, 1 + bool(shown))
    for i, (phase, points) in enumerate(phases.items()):
        smooth(axes[0], i, phase, points)
        band(axes[0], i, lines, phase)
    frame(axes[0], "success rate", share=True)
    labels = {"outcome": "reward", "second_check": "held-out check"}
    for i, (name, points) in enumerate(shown.items()):
        smooth(axes[1], i, labels[name], points)
    if shown:
        frame(axes[1], "mean over trajectories")
    return figure


def policy(told: RunLines) -> Any:
    """Entropy, KL and clip fractions of the tokens that were learned from."""
    lines = _learned(told.lines)
    groups = {
        "entropy (nats a token)": {"entropy": "entropy"},
        "KL (nats a token)": {"kl": "to the reference", "kl_old": "to the sampler"},
        "share of clipped tokens": {"clip_low_fraction": "below", "clip_high_fraction": "above"},
    }
    found: dict[str, dict[str, Curve]] = {}  # of those that are more than rounding somewhere
    for label, names in groups.items():
        curves = {own: curve(lines, "train", name) for name, own in names.items()}
        curves = {own: points for own, points in curves.items() if max(points[1], default=0.0) > ROUNDING}
        found |= {label: curves} if curves else {}
    if not found:
        return f"{METRICS} has neither entropy nor KL"
    figure, axes = panels(told.title, len(found))
    for axis, (label, curves) in zip(axes, found.items(), strict=True):
        for i, (name, points) in enumerate(curves.items()):
            smooth(axis, i, name, points)
        frame(axis, label)
        axis.set_ylim(bottom=0)
    return figure


def _turns(told: RunLines) -> Any:
    """Say how long trajectories are, in turns and tokens, and how much of what was learned each turn is."""
    lines = told.lines
    lengths = {phase: curve(lines, phase, "turns") for phase in PHASES}
    if not any(points[0] for points in lengths.values()):
        return f"{METRICS} has no turns"
    tokens, mix = curve(lines, "train", "chosen_per_trajectory"), turn_mix(lines)
    figure, axes = panels(told.title, 1 + bool(tokens[0]) + bool(mix))
    for i, (phase, points) in enumerate(lengths.items()):
        smooth(axes[0], i, phase, points)
    frame(axes[0], "turns of a trajectory")
    if tokens[0]:
        smooth(axes[1], 0, "train", tokens)
        frame(axes[1], "chosen tokens\nof a trajectory")
    if mix:
        _stack(axes[-1], mix)
        frame(axes[-1], "share of the tokens\nlearned from", share=True)
    return figure


def tools(told: RunLines) -> Any:
    """The mix of tools in training and in validations; below, the turns that ended in an error."""
    mixes = {phase: tool_mix_curves(told.lines, phase) for phase in PHASES}
    mixes = {phase: mix for phase, mix in mixes.items() if mix and len(next(iter(mix.values()))[0]) > 1}
    errors = {phase: curve(told.lines, phase, "tool_errors") for phase in PHASES}
    if not mixes:
        return f"{METRICS} has no shares of tools of more than one update"
    figure, axes = panels(told.title, len(mixes) + 1)
    for axis, (phase, mix) in zip(axes, mixes.items(), strict=False):
        _stack(axis, mix)
        frame(axis, f"share of calls\n({phase})", share=True)
    for i, (phase, points) in enumerate(errors.items()):
        smooth(axes[-1], i, phase, points)
    frame(axes[-1], "share of turns that\nended in an error")
    axes[-1].set_ylim(bottom=0)
    return figure


def turn_mix(lines: Sequence[Line]) -> dict[str, Curve]:
    """The share of each turn among the tokens that were learned from; the last stands for all later ones, too."""
    rows = [line for line in _learned(lines) if sum(line.get("live_tokens_by_turn") or ())]
    if len(rows) < 2:
        return {}
    counts_ut = np.array([line["live_tokens_by_turn"] for line in rows], float)
    used = int(np.flatnonzero(counts_ut.sum(axis=0))[-1]) + 1
    shares_ut, x = counts_ut / counts_ut.sum(axis=1, keepdims=True), [line["update"] for line in rows]
    full = counts_ut.shape[1]
    names = [f"turn {t + 1}" + (" on" if t + 1 == full else "") for t in range(used)]
    return {name: (x, shares_ut[:, t].tolist()) for t, name in enumerate(names)}


def _learned(lines: Sequence[Line]) -> list[Line]:
    """The updates of training; means over no tokens are left out."""
    return [without_empty_means(line) for line in lines if line.get("phase") == "train"]


# Histograms -------------------------------------------------------------------------------------------


def ratios(lines: Sequence[Line], title: str) -> Any:
    """Say how far tokens were from the policy that sampled them."""
    updates, counts_ub = histogram(lines, RATIO)
    if not len(updates):
        return f"{METRICS} has no {RATIO}"
    middle = counts_ub.shape[1] // 2
    if counts_ub[:, middle - 1 : middle + 1].sum() == counts_ub.sum():
        return "every ratio was 1: updates took one step each on what their own weights had sampled"
    places = np.arange(counts_ub.shape[1] + 1) - middle
    figure = spread(title, updates, counts_ub, places, "ratio to the sampler")
    ticks = {ratio: ratio_place(ratio) for ratio in TICKS}
    low, high = figure.axes[0].get_ylim()
    ticks = {f"{ratio:g}": place for ratio, place in ticks.items() if low <= place <= high}
    figure.axes[0].set_yticks(list(ticks.values()), list(ticks))
    figure.axes[1].set_xticks(list(ticks.values()), list(ticks))
    return figure


def advantages(lines: Sequence[Line], title: str) -> Any:
    """Say how advantages are spread over the tokens that they are given to."""
    updates, counts_ub = histogram(lines, ADVANTAGE)
    if not len(updates):
        return f"{METRICS} has no {ADVANTAGE}"
    return spread(title, updates, counts_ub, np.array(advantage_edges()), "advantage (outermost: and beyond)")


def histogram(lines: Sequence[Line], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The updates whose histogram counts anything, and the counts."""
    rows = [line for line in lines if line.get("phase") == "train" and any(line.get(name) or ())]
    return np.array([line["update"] for line in rows]), np.array([line[name] for line in rows], float)


def spread(title: str, updates: np.ndarray, counts_ub: np.ndarray, edges: np.ndarray, label: str) -> Any:
    """Histograms over the updates as a map of shares, and three of them, of a tenth of the updates each, as lines."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    inside = np.flatnonzero(counts_ub.sum(axis=0))
    first, last = max(inside[0] - 1, 0), min(inside[-1] + 2, counts_ub.shape[1])
    counts_ub, edges = counts_ub[:, first:last], edges[first : last + 1]
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=[3, 2])
    starts, blocks_cb = _blocks(updates, counts_ub)
    shares_cb = blocks_cb / blocks_cb.sum(axis=1, keepdims=True)
    shown = np.ma.masked_equal(shares_cb.T, 0)
    mesh = axes[0].pcolormesh(starts, edges, shown, cmap="cividis", norm=LogNorm(1e-4, 1), rasterized=True)
    figure.colorbar(mesh, ax=axes[0], label="share of the tokens")
    axes[0].set(ylabel=label, title=title)
    over_updates(axes[0])
    for i, (name, part) in enumerate(_thirds(updates)):
        share_b = counts_ub[part].sum(axis=0) / counts_ub[part].sum()
        axes[1].stairs(share_b, edges, label=name, color=COLOURS[i], linewidth=1.8, linestyle=["-", "--", ":"][i])
    frame(axes[1], "share of the tokens")
    axes[1].legend(loc="upper right", frameon=False, fontsize="small")
    axes[1].set_xlabel(label)
    axes[1].set_yscale("symlog", linthresh=1e-2)
    axes[1].set_ylim(0, 1.05)
    axes[1].set_yticks([0, 0.01, 0.1, 1], ["0", "1 %", "10 %", "100 %"])
    return figure


def _blocks(updates: np.ndarray, counts_ub: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add updates up in `COLUMNS` blocks at most: where each begins, and the last ends, and the counts of each."""
    size = -(-len(updates) // COLUMNS)
    at = np.arange(0, len(updates), size)
    return np.append(updates[at] - 0.5, updates[-1] + 0.5), np.add.reduceat(counts_ub, at, axis=0)


def _thirds(updates: np.ndarray) -> list[tuple[str, slice]]:
    """A tenth of the updates at the beginning, in the middle and at the end, with their names."""
    size, count = max(len(updates) // 10, 1), len(updates)
    starts = sorted({0, (count - size) // 2, count - size})
    parts = [slice(start, start + size) for start in starts]
    names = [(updates[part][0], updates[part][-1]) for part in parts]
    return [
        (f"update {a}" if a == b else f"updates {a} to {b}", part) for (a, b), part in zip(names, parts, strict=True)
    ]


# Time -------------------------------------------------------------------------------------------------


def speed(timings: Sequence[Line], title: str = "") -> Any:
    """Seconds of an update, and tokens a second."""
    rows = [line for line in timings if line.get("phase") == "train" and "tokens_per_second" in line]
    if not rows:
        return f"{TIMINGS} has no tokens a second"
    labels = {"seconds": "seconds of an update", "tokens_per_second": "tokens a second"}
    labels = {name: label for name, label in labels.items() if all(name in line for line in rows)}
    figure, axes = panels(title, len(labels))
    for i, (axis, (name, label)) in enumerate(zip(axes, labels.items(), strict=True)):
        x, y = curve(rows, "train", name)
        axis.plot(x, y, color=COLOURS[i], marker="o", ms=3, linewidth=1)
        frame(axis, label)
        axis.set_ylim(0, _limit(y) if name == "seconds" else max(y) * 1.05)
    return figure


def stages(timings: Sequence[Line], title: str = "") -> Any:
    """The seconds of each update by stage, and a timeline of the last ones.

    Rewards that are late are awaited while the reference scores (R1): in the bars the longer of the two counts, and in
    the timeline they lie above each other.
    """
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
        label = {"rewards": "rewards, awaited\nlonger", "rest": "what is between"}.get(name, name)
        if any(heights):
            style: dict[str, Any] = {"hatch": HATCHED[name], "edgecolor": "white", "linewidth": 0.3}
            axis.bar(x, heights, bottom=below, label=label, color=_colour(name), width=0.85, **style)
        below = [low + high for low, high in zip(below, heights, strict=True)]
    limit = _limit(totals)
    for update, total in zip(x, totals, strict=True):
        if total > limit:
            axis.text(update, limit, f"{total:.1f} s", va="bottom", ha="center", fontsize=7)
    frame(axis, "seconds of an update")
    axis.set_ylim(0, limit)
    over_updates(axis)


def _timeline(axis: Any, rows: Sequence[Line]) -> None:
    """Show when each stage ran, second by second from the first of these updates on."""
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


def _colour(name: str) -> str:
    return "#bbbbbb" if name == "rest" else COLOURS[STAGES.index(name)]


def _limit(values: Sequence[float]) -> float:
    """Choose the end of an axis of seconds: the first updates, which compile, and other rare ones reach beyond it."""
    ordered = sorted(values)
    middle, high = ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10]
    return min(1.08 * ordered[-1], max(CUT * middle, 1.5 * high)) if len(values) > 3 else 1.08 * ordered[-1]


# Parts of pictures ------------------------------------------------------------------------------------


def smooth(axis: Any, index: int, label: str, points: Curve) -> None:
    """A line; where it has many points their moving mean, with the points themselves as a faint line."""
    x, y = points
    if len(x) < SMOOTHED:
        if x:
            draw_line(axis, index, label, x, y)
        return
    size = len(x) // 20
    axis.plot(x, y, color=COLOURS[index], alpha=0.3, linewidth=0.8)
    means = np.convolve(y, np.ones(size) / size, mode="valid").tolist()
    half = size // 2
    draw_line(axis, index, f"{label}\n(mean of {size})", x[half : half + len(means)], means)


def _stack(axis: Any, mix: Mapping[str, Curve]) -> None:
    """Shares on top of each other, told apart by colour and hatching."""
    x = next(iter(mix.values()))[0]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(mix))]
    areas = axis.stackplot(x, [y for _, y in mix.values()], labels=list(mix), colors=colours, alpha=0.75)
    for i, area in enumerate(areas):
        shifted = i + i // len(COLOURS)  # another hatching where a colour comes again
        area.set(hatch=HATCHES[shifted % len(HATCHES)], edgecolor="white", linewidth=0.6)
    axis.margins(x=0)


PICTURES: dict[str, Picture] = {
    "learning": learning,
    "policy": policy,
    "ratios": lambda told: ratios(told.lines, told.title),
    "advantages": lambda told: advantages(told.lines, told.title),
    "turns": _turns,
    "tools": tools,
    "speed": lambda told: speed(told.timings, told.title),
    "stages": lambda told: stages(told.timings, told.title),
}
