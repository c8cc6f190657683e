"""Plots of a run from its metrics and timings: `draw_plots` writes a picture of each kind.

    paths, left_out = draw_plots("runs/agentflow-0", formats=("png", "svg"))

    learning               success by phase, with the reward and its held-out check
    policy                 entropy, KL and clip fractions
    ratios, advantages     histograms over the updates, and early, halfway and late in the run
    turns                  turns and chosen tokens per trajectory, and the tokens learned from by turn
    tools                  fraction of calls by tool, and of turns with an error
    speed, stages          tokens per second; seconds of each stage of an update, and a timeline

A picture without data is left out, with the reason. An update that learned from no token has no ratios, no entropy and
no KL, so lines skip it. Training is blue and validation orange.
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
    curve,
    draw_interval,
    draw_line,
    format_axis,
    label_updates,
    make_panels,
    save_figure,
    tool_mix_curves,
)

WIDTH, HEIGHT = 7.5, 6.0  # inches
COLUMNS = 200  # of the map at most; more updates are summed in blocks
TICKS = (0.5, 0.9, 0.99, 0.999, 1, 1.001, 1.01, 1.1, 2)  # of ratios
STAGES = ("rollout", "inference", "rewards", "advantages", "pack", "train")
HATCHED = {"rollout": "", "inference": "//", "rewards": "..", "advantages": "xx", "pack": "\\\\", "train": "--"}
OTHER = "other"  # the part of an update between its stages
SHOWN = 5  # updates of the timeline
CUT = 3.0  # bars are cut at this many times the median
FORMATS = ("png", "svg")
HATCHES = ["", "//", "\\\\", "..", "xx", "--", "||", "oo"]
ROUNDING = 1e-9
SMOOTHED = 40  # number of updates from which a line is a moving mean, over the values themselves


class RunLines(NamedTuple):
    """The metrics and timings of a run, and its title."""

    lines: Sequence[Line]
    timings: Sequence[Line]
    title: str


Picture = Callable[[RunLines], Any]  # -> a matplotlib figure, or the reason why there is none


def draw_plots(
    folder: str | os.PathLike, out: str | os.PathLike | None = None, *, formats: Sequence[str] = FORMATS[:1]
) -> tuple[list[Path], dict[str, str]]:
    """Draw all plots of a run, by default into its `plots/` -> the paths, and why others are left out."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise BadInput(f"--format={','.join(formats)} is unknown; choose from {', '.join(FORMATS)}")
    if not Path(folder).is_dir():
        raise BadInput(f"{folder} is no folder: give that of one run")
    source, target = Path(folder), Path(folder) / "plots" if out is None else Path(out)
    timings = list(read_metrics(source / TIMINGS)) if (source / TIMINGS).exists() else []
    run = RunLines(list(read_metrics(source / METRICS)), timings, source.resolve().name)
    paths, left_out = [], {}
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{target} can't be made ({error.strerror}): choose another --out") from None
    for name, picture in PICTURES.items():
        for path in (target / f"{name}.{suffix}" for suffix in formats):
            figure = picture(run)  # drawn again for each format, since saving one moves its parts a little
            if isinstance(figure, str):
                left_out[name] = figure
                break
            save_figure(figure, path)
            paths.append(path)
    return paths, left_out


# Lines ------------------------------------------------------------------------------------------------


def learning(run: RunLines) -> Any:
    """Success by phase with its interval; below, the reward if it is another number, and its held-out check."""
    lines = run.lines
    phases = {phase: curve(lines, phase, "success") for phase in PHASES}
    if not any(points[0] for points in phases.values()):
        return f"{METRICS} has no success rate yet"
    rewards = {name: curve(lines, "train", name) for name in ("outcome", "second_check")}
    shown = {name: points for name, points in rewards.items() if points[0]}
    if shown.get("outcome") == phases["train"]:
        shown = {}
    figure, axes = make_panels(run.title, 1 + bool(shown))
    for i, (phase, points) in enumerate(phases.items()):
        draw_smoothed(axes[0], i, phase, points)
        draw_interval(axes[0], i, lines, phase)
    format_axis(axes[0], "success rate", is_fraction=True)
    labels = {"outcome": "reward", "second_check": "held-out check"}
    for i, (name, points) in enumerate(shown.items()):
        draw_smoothed(axes[1], i, labels[name], points)
    if shown:
        format_axis(axes[1], "mean over trajectories")
    return figure


def policy(run: RunLines) -> Any:
    """Entropy, KL and clip fractions of the tokens that were learned from."""
    lines = _train_lines(run.lines)
    groups = {
        "entropy (nats per token)": {"entropy": "entropy"},
        "KL (nats per token)": {"kl": "to the reference", "kl_old": "to the sampler"},
        "fraction of clipped tokens": {"clip_low_fraction": "below", "clip_high_fraction": "above"},
    }
    panels: dict[str, dict[str, Curve]] = {}  # of curves that are more than rounding somewhere
    for label, names in groups.items():
        curves = {legend: curve(lines, "train", name) for name, legend in names.items()}
        curves = {legend: points for legend, points in curves.items() if max(points[1], default=0.0) > ROUNDING}
        panels |= {label: curves} if curves else {}
    if not panels:
        return f"{METRICS} has neither entropy nor KL"
    figure, axes = make_panels(run.title, len(panels))
    for axis, (label, curves) in zip(axes, panels.items(), strict=True):
        for i, (legend, points) in enumerate(curves.items()):
            draw_smoothed(axis, i, legend, points)
        format_axis(axis, label)
        axis.set_ylim(bottom=0)
    return figure


def turns(run: RunLines) -> Any:
    """Length of trajectories in turns and tokens, and the tokens learned from by turn."""
    lines = run.lines
    lengths = {phase: curve(lines, phase, "turns") for phase in PHASES}
    if not any(points[0] for points in lengths.values()):
        return f"{METRICS} has no turns"
    tokens, mix = curve(lines, "train", "chosen_per_trajectory"), turn_mix(lines)
    figure, axes = make_panels(run.title, 1 + bool(tokens[0]) + bool(mix))
    for i, (phase, points) in enumerate(lengths.items()):
        draw_smoothed(axes[0], i, phase, points)
    format_axis(axes[0], "turns per trajectory")
    if tokens[0]:
        draw_smoothed(axes[1], 0, "train", tokens)
        format_axis(axes[1], "chosen tokens\nper trajectory")
    if mix:
        draw_stacked(axes[-1], mix)
        format_axis(axes[-1], "fraction of the tokens\nlearned from", is_fraction=True)
    return figure


def tools(run: RunLines) -> Any:
    """Fraction of calls by tool in training and validation; below, the fraction of turns with an error."""
    mixes = {phase: tool_mix_curves(run.lines, phase) for phase in PHASES}
    mixes = {phase: mix for phase, mix in mixes.items() if mix and len(next(iter(mix.values()))[0]) > 1}
    errors = {phase: curve(run.lines, phase, "tool_errors") for phase in PHASES}
    if not mixes:
        return f"{METRICS} has no fractions of tools of more than one update"
    figure, axes = make_panels(run.title, len(mixes) + 1)
    for axis, (phase, mix) in zip(axes, mixes.items(), strict=False):
        draw_stacked(axis, mix)
        format_axis(axis, f"fraction of calls\n({phase})", is_fraction=True)
    for i, (phase, points) in enumerate(errors.items()):
        draw_smoothed(axes[-1], i, phase, points)
    format_axis(axes[-1], "fraction of turns\nwith an error")
    axes[-1].set_ylim(bottom=0)
    return figure


def turn_mix(lines: Sequence[Line]) -> dict[str, Curve]:
    """Fraction of the tokens learned from by turn; the last one stands for all later turns, too."""
    rows = [line for line in _train_lines(lines) if sum(line.get("live_tokens_by_turn") or ())]
    if len(rows) < 2:
        return {}
    counts_ut = np.array([line["live_tokens_by_turn"] for line in rows], float)
    used = int(np.flatnonzero(counts_ut.sum(axis=0))[-1]) + 1
    fractions_ut, x = counts_ut / counts_ut.sum(axis=1, keepdims=True), [line["update"] for line in rows]
    count = counts_ut.shape[1]
    names = [f"turn {t + 1}" + (" on" if t + 1 == count else "") for t in range(used)]
    return {name: (x, fractions_ut[:, t].tolist()) for t, name in enumerate(names)}


def _train_lines(lines: Sequence[Line]) -> list[Line]:
    """The lines of training updates, without means over no tokens."""
    return [without_empty_means(line) for line in lines if line.get("phase") == "train"]


# Histograms -------------------------------------------------------------------------------------------


def ratios(run: RunLines) -> Any:
    """Ratio of each token's probability to the one it was sampled with."""
    updates, counts_ub = histogram(run.lines, RATIO)
    if not len(updates):
        return f"{METRICS} has no {RATIO}"
    middle = counts_ub.shape[1] // 2
    if counts_ub[:, middle - 1 : middle + 1].sum() == counts_ub.sum():
        return "every ratio was 1: updates took one step each on what their own weights had sampled"
    edges = np.arange(counts_ub.shape[1] + 1) - middle
    figure = draw_histograms(run.title, updates, counts_ub, edges, "ratio to the sampler")
    places = {ratio: ratio_place(ratio) for ratio in TICKS}
    low, high = figure.axes[0].get_ylim()
    ticks = {f"{ratio:g}": place for ratio, place in places.items() if low <= place <= high}
    figure.axes[0].set_yticks(list(ticks.values()), list(ticks))
    figure.axes[1].set_xticks(list(ticks.values()), list(ticks))
    return figure


def advantages(run: RunLines) -> Any:
    """Advantages of the tokens that were learned from."""
    updates, counts_ub = histogram(run.lines, ADVANTAGE)
    if not len(updates):
        return f"{METRICS} has no {ADVANTAGE}"
    edges = np.array(advantage_edges())
    return draw_histograms(run.title, updates, counts_ub, edges, "advantage (outermost: and beyond)")


def histogram(lines: Sequence[Line], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The updates whose histogram is not empty, and the counts."""
    rows = [line for line in lines if line.get("phase") == "train" and any(line.get(name) or ())]
    return np.array([line["update"] for line in rows]), np.array([line[name] for line in rows], float)


def draw_histograms(title: str, updates: np.ndarray, counts_ub: np.ndarray, edges: np.ndarray, label: str) -> Any:
    """Histograms over the updates as a map; below, three of them as lines, each of a tenth of the updates."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    used = np.flatnonzero(counts_ub.sum(axis=0))
    first, last = max(used[0] - 1, 0), min(used[-1] + 2, counts_ub.shape[1])
    counts_ub, edges = counts_ub[:, first:last], edges[first : last + 1]
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=[3, 2])

    # Updates are summed in blocks, `COLUMNS` at most.
    at = np.arange(0, len(updates), -(-len(updates) // COLUMNS))
    starts, blocks_cb = np.append(updates[at] - 0.5, updates[-1] + 0.5), np.add.reduceat(counts_ub, at, axis=0)
    fractions_cb = blocks_cb / blocks_cb.sum(axis=1, keepdims=True)
    shown = np.ma.masked_equal(fractions_cb.T, 0)
    mesh = axes[0].pcolormesh(starts, edges, shown, cmap="cividis", norm=LogNorm(1e-4, 1), rasterized=True)
    figure.colorbar(mesh, ax=axes[0], label="fraction of the tokens")
    axes[0].set(ylabel=label, title=title)
    label_updates(axes[0])

    size, count = max(len(updates) // 10, 1), len(updates)
    for i, start in enumerate(sorted({0, (count - size) // 2, count - size})):
        part = slice(start, start + size)
        low, high = updates[part][0], updates[part][-1]
        name = f"update {low}" if low == high else f"updates {low} to {high}"
        fraction_b = counts_ub[part].sum(axis=0) / counts_ub[part].sum()
        axes[1].stairs(fraction_b, edges, label=name, color=COLOURS[i], linewidth=1.8, linestyle=["-", "--", ":"][i])
    format_axis(axes[1], "fraction of the tokens")
    axes[1].legend(loc="upper right", frameon=False, fontsize="small")
    axes[1].set_xlabel(label)
    axes[1].set_yscale("symlog", linthresh=1e-2)
    axes[1].set_ylim(0, 1.05)
    axes[1].set_yticks([0, 0.01, 0.1, 1], ["0", "1 %", "10 %", "100 %"])
    return figure


# Time -------------------------------------------------------------------------------------------------


def speed(run: RunLines) -> Any:
    """Seconds per update, and tokens per second."""
    rows = [line for line in run.timings if line.get("phase") == "train" and "tokens_per_second" in line]
    if not rows:
        return f"{TIMINGS} has no tokens per second"
    labels = {"seconds": "seconds per update", "tokens_per_second": "tokens per second"}
    labels = {name: label for name, label in labels.items() if all(name in line for line in rows)}
    figure, axes = make_panels(run.title, len(labels))
    for i, (axis, (name, label)) in enumerate(zip(axes, labels.items(), strict=True)):
        x, y = curve(rows, "train", name)
        axis.plot(x, y, color=COLOURS[i], marker="o", ms=3, linewidth=1)
        format_axis(axis, label)
        axis.set_ylim(0, seconds_limit(y) if name == "seconds" else max(y) * 1.05)
    return figure


def stages(run: RunLines) -> Any:
    """Seconds of each update by stage, and a timeline of the last updates.

    Late rewards are awaited while the reference scores (R1): in the bars the longer of the two counts, and in the
    timeline they are above each other.
    """
    from matplotlib.figure import Figure

    rows = [line for line in run.timings if line.get("phase") == "train" and "rollout_seconds" in line]
    if not rows:
        return f"{TIMINGS} has no stages: they are timed where an update is made of several, as in agentflow"
    figure = Figure(figsize=(7.5, 6.4), layout="constrained")
    bars, timeline = figure.subplots(2, 1, height_ratios=[3, 2])
    draw_stage_bars(bars, rows)
    bars.set_title(run.title, fontsize="medium")
    draw_stage_timeline(timeline, rows[-SHOWN:])
    return figure


def draw_stage_bars(axis: Any, rows: Sequence[Line]) -> None:
    """Seconds of each update, with a part per stage."""
    x = [line["update"] for line in rows]
    parts = [stage_parts(line) for line in rows]
    totals, below = [sum(part.values()) for part in parts], [0.0] * len(rows)
    for name in (*STAGES, OTHER):
        heights = [part.get(name, 0.0) for part in parts]
        label = {"rewards": "rewards, awaited\nlonger", OTHER: "between stages"}.get(name, name)
        if any(heights):
            style: dict[str, Any] = {"hatch": HATCHED.get(name, ""), "edgecolor": "white", "linewidth": 0.3}
            axis.bar(x, heights, bottom=below, label=label, color=stage_colour(name), width=0.85, **style)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    limit = seconds_limit(totals)
    for update, total in zip(x, totals, strict=True):
        if total > limit:
            axis.text(update, limit, f"{total:.1f} s", va="bottom", ha="center", fontsize=7)
    format_axis(axis, "seconds per update")
    axis.set_ylim(0, limit)
    label_updates(axis)


def draw_stage_timeline(axis: Any, rows: Sequence[Line]) -> None:
    """When each stage ran, in seconds since the start of the first of these updates."""
    names = [name for name in STAGES if any(line.get(f"{name}_seconds") for line in rows)]
    now = 0.0
    for line in rows:
        for name, (start, length) in stage_spans(line).items():
            if name in names:
                style = {"color": stage_colour(name), "hatch": HATCHED[name], "edgecolor": "white"}
                axis.barh(names.index(name), length, left=now + start, **style)
        axis.axvline(now, color="#999999", linewidth=0.8, linestyle=":")
        axis.text(now, -0.75, f" {line['update']}", fontsize=8, va="bottom", color="#555555")
        now += max(line.get("seconds", 0.0), sum(stage_parts(line).values()))
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel=f"seconds, of updates {rows[0]['update']} to {rows[-1]['update']}", xlim=(0, now))
    axis.set_ylim(len(names) - 0.4, -0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.3)


def stage_spans(line: Line) -> dict[str, tuple[float, float]]:
    """Start of each stage in its update, and its length, in seconds."""
    seconds = {name: line.get(f"{name}_seconds", 0.0) for name in STAGES}
    judged = seconds["rollout"] + max(seconds["inference"], seconds["rewards"])
    starts = {"rollout": 0.0, "inference": seconds["rollout"], "rewards": seconds["rollout"], "advantages": judged}
    starts["pack"] = judged + seconds["advantages"]
    starts["train"] = starts["pack"] + seconds["pack"]
    return {name: (starts[name], seconds[name]) for name in STAGES}


def stage_parts(line: Line) -> dict[str, float]:
    """Seconds of an update by stage; of rewards, those after the end of the inference that runs beside them."""
    seconds = {name: line.get(f"{name}_seconds", 0.0) for name in STAGES}
    seconds["rewards"] = max(seconds["rewards"] - seconds["inference"], 0.0)
    return seconds | {OTHER: max(line.get("seconds", 0.0) - sum(seconds.values()), 0.0)}


def stage_colour(name: str) -> str:
    """Colour of a stage."""
    return "#bbbbbb" if name == OTHER else COLOURS[STAGES.index(name)]


def seconds_limit(values: Sequence[float]) -> float:
    """End of an axis of seconds, beyond which only the first updates reach, which compile, and other rare ones."""
    ordered = sorted(values)
    median, high = ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10]
    return min(1.08 * ordered[-1], max(CUT * median, 1.5 * high)) if len(values) > 3 else 1.08 * ordered[-1]


# Parts of pictures ------------------------------------------------------------------------------------


def draw_smoothed(axis: Any, index: int, label: str, points: Curve) -> None:
    """Draw a line; if it has many points, their moving mean over a faint line of the points."""
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


def draw_stacked(axis: Any, mix: Mapping[str, Curve]) -> None:
    """Draw fractions on top of each other, distinct in colour and hatching."""
    x = next(iter(mix.values()))[0]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(mix))]
    areas = axis.stackplot(x, [y for _, y in mix.values()], labels=list(mix), colors=colours, alpha=0.75)
    for i, area in enumerate(areas):
        shifted = i + i // len(COLOURS)  # another hatching when a colour is used again
        area.set(hatch=HATCHES[shifted % len(HATCHES)], edgecolor="white", linewidth=0.6)
    axis.margins(x=0)


PICTURES: dict[str, Picture] = {
    "learning": learning,
    "policy": policy,
    "ratios": ratios,
    "advantages": advantages,
    "turns": turns,
    "tools": tools,
    "speed": speed,
    "stages": stages,
}
