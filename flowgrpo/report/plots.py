"""The learning curves of a run, from its `metrics.jsonl`: success, calls to the right tool, calls by tool.

    draw_curves("runs/lookup")  ->  runs/lookup/curves.png

Colours are those of Okabe and Ito, which are distinct for any colour vision; lines also differ in dashes and markers.
`report.figures` draws all other plots.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.errors import BadInput
from flowgrpo.files import write_atomic
from flowgrpo.report.metrics import METRICS, read_metrics

CURVES = "curves.png"
PHASES = ("train", "validation")  # blue and orange, in every plot
RATES = {"success rate": "success", "fraction of calls\nto the right tool": "right_tool"}  # label -> metric
WIDTH, HEIGHT = 7.5, 2.6  # inches of a panel
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
DASHES = ["-", "--", ":", "-."]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
MARKED = 15  # lines of more points have a marker at some of them only

Curve = tuple[list[float], list[float]]  # updates, values


def draw_curves(folder: str | os.PathLike, path: str | os.PathLike | None = None, *, title: str | None = None) -> Path:
    """Draw the learning curves of a run, by default into its folder -> the path."""
    lines = list(read_metrics(Path(folder) / METRICS))
    if all(line.get("success") is None for line in lines):
        raise BadInput(f"{Path(folder) / METRICS} has no line with a success rate yet: continue the run")
    target = Path(path) if path is not None else Path(folder) / CURVES
    save_figure(make_figure(lines, title=title if title is not None else Path(folder).name), target)
    return target


def make_figure(lines: Sequence[Mapping[str, Any]], *, title: str = "") -> Any:
    """Success by phase; the fraction of tool calls to the right tool, if it is known, and to each tool."""
    recorded = {line["phase"]: None for line in lines if line.get("success") is not None and "phase" in line}
    phases = [*(phase for phase in PHASES if phase in recorded), *(phase for phase in recorded if phase not in PHASES)]
    mixes = {phase: tool_mix_curves(lines, phase) for phase in phases}
    busiest = max(mixes, key=lambda phase: len(mixes[phase]) and max(len(x) for x, _ in mixes[phase].values()))
    rates = {label: name for label, name in RATES.items() if any(curve(lines, phase, name)[0] for phase in phases)}
    figure, axes = make_panels(title, len(rates) + bool(mixes[busiest]))
    for axis, (label, name) in zip(axes, rates.items(), strict=False):
        for i, phase in enumerate(phases):
            points = curve(lines, phase, name)
            if points[0]:
                draw_line(axis, i, phase, *points)
            if name == "success":
                draw_interval(axis, i, lines, phase)
        format_axis(axis, label, is_fraction=True)
    for i, (tool, points) in enumerate(mixes[busiest].items()):
        draw_line(axes[-1], i, tool, *points)
    if mixes[busiest]:
        format_axis(axes[-1], f"fraction of tool calls\n({busiest})", is_fraction=True)
    return figure


def make_panels(title: str, count: int) -> tuple[Any, list[Any]]:
    """A figure with `count` panels over the updates."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(WIDTH, HEIGHT * count + 0.5), layout="constrained")
    axes = list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])
    figure.suptitle(title, fontsize="medium")
    label_updates(axes[-1])
    figure.align_ylabels(axes)
    return figure, axes


def label_updates(axis: Any) -> None:
    """Label the axis of updates, with integer ticks."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("update")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure atomically, in the format of the file name; equal figures give equal bytes."""
    from matplotlib import rc_context

    kind = path.suffix.lstrip(".")
    # In an SVG, ids are hashes of the content, and text stays text.
    settings: dict[Any, Any] = {"svg.hashsalt": "flowgrpo", "svg.fonttype": "none"}
    metadata = {"Date": None} if kind == "svg" else None
    with rc_context(settings):
        write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=150, format=kind, metadata=metadata))


def curve(lines: Sequence[Mapping[str, Any]], phase: str, name: str) -> Curve:
    """The updates of a phase that have a metric, and its values."""
    rows = [line for line in lines if line.get("phase") == phase and line.get(name) is not None]
    return [line["update"] for line in rows], [line[name] for line in rows]


def tool_mix_curves(lines: Sequence[Mapping[str, Any]], phase: str) -> dict[str, Curve]:
    """The fraction of calls to each tool over the updates of a phase, tools in the order of the file."""
    rows = [line for line in lines if line.get("phase") == phase and line.get("tools")]
    tools = {tool: None for line in rows for tool in line["tools"]}
    return {
        tool: ([line["update"] for line in rows], [line["tools"].get(tool, 0.0) for line in rows]) for tool in tools
    }


# Parts of figures ---------------------------------------------------------------------------------------


def line_style(index: int) -> dict[str, str]:
    """Colour, dashes and marker of a line, distinct for 32 lines."""
    shifted = index + index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[shifted % len(DASHES)],
        "marker": MARKERS[shifted % len(MARKERS)],
    }


def draw_line(axis: Any, index: int, label: str, x: list[float], y: list[float]) -> None:
    """Draw a line in the style of its index (`line_style`)."""
    style: dict[str, Any] = line_style(index)
    axis.plot(x, y, label=label, markevery=max(1, len(x) // MARKED), ms=4, **style)


def draw_interval(axis: Any, index: int, lines: Sequence[Mapping[str, Any]], phase: str) -> None:
    """Draw the confidence interval of the success rate, if the metrics have one."""
    rows = [line for line in lines if line.get("phase") == phase and line.get("success_low") is not None]
    x = [line["update"] for line in rows]
    low, high = ([line[name] for line in rows] for name in ("success_low", "success_high"))
    if rows:
        axis.fill_between(x, low, high, color=COLOURS[index % len(COLOURS)], alpha=0.2, linewidth=0)


def format_axis(axis: Any, label: str, *, is_fraction: bool = False) -> None:
    """Label an axis and add a legend; a fraction starts at 0, and ends at the tenth above all that is drawn."""
    if is_fraction:
        top = min(math.ceil(10 * axis.dataLim.ymax - 1e-6) / 10, 1.0) if axis.dataLim.ymax > 0 else 1.0
        axis.set_ylim(-0.02 * top, 1.02 * top)  # so that a line at the edge is whole
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
