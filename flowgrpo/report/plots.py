"""The curves of a run, from its `metrics.jsonl`: success, calls to the right tool, and which tools were called.

    curves("runs/lookup")  ->  runs/lookup/curves.png

Colours are Okabe and Ito's, which people with any kind of colour vision can tell apart; lines differ in their dashes
and markers too. `report.figures` draws all other pictures.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.errors import BadInput
from flowgrpo.files import write_whole
from flowgrpo.report.metrics import METRICS, read_metrics

CURVES = "curves.png"
PHASES = ("train", "validation")  # blue and orange, in every picture
SHARES = {"success rate": "success", "share of calls\nto the right tool": "right_tool"}
WIDTH, HEIGHT = 7.5, 2.6  # inches of a panel
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
DASHES = ["-", "--", ":", "-."]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
MARKED = 15  # points at most of which each has its marker

Curve = tuple[list[float], list[float]]  # updates, values


def curves(folder: str | os.PathLike, path: str | os.PathLike | None = None, *, title: str | None = None) -> Path:
    """Draw the curves of the run in this folder, beside its metrics by default; where they are."""
    lines = list(read_metrics(Path(folder) / METRICS))
    if all(line.get("success") is None for line in lines):
        raise BadInput(f"{Path(folder) / METRICS} has no line with a success rate yet: let the run go on")
    target = Path(path) if path is not None else Path(folder) / CURVES
    save(make_figure(lines, title=title if title is not None else Path(folder).name), target)
    return target


def make_figure(lines: Sequence[Mapping[str, Any]], *, title: str = "") -> Any:
    """Draw success by phase, and of the tool calls the share to the right tool, where it is known, and to each one."""
    met = {line["phase"]: None for line in lines if line.get("success") is not None and "phase" in line}
    phases = [*(phase for phase in PHASES if phase in met), *(phase for phase in met if phase not in PHASES)]
    mixes = {phase: tool_mix_curves(lines, phase) for phase in phases}
    busiest = max(mixes, key=lambda phase: len(mixes[phase]) and max(len(x) for x, _ in mixes[phase].values()))
    known = {label: name for label, name in SHARES.items() if any(curve(lines, phase, name)[0] for phase in phases)}
    figure, axes = panels(title, len(known) + bool(mixes[busiest]))
    for axis, (label, name) in zip(axes, known.items(), strict=False):
        for i, phase in enumerate(phases):
            points = curve(lines, phase, name)
            if points[0]:
                draw_line(axis, i, phase, *points)
            if name == "success":
                band(axis, i, lines, phase)
        frame(axis, label, share=True)
    for i, (tool, points) in enumerate(mixes[busiest].items()):
        draw_line(axes[-1], i, tool, *points)
    if mixes[busiest]:
        frame(axes[-1], f"share of tool calls\n({busiest})", share=True)
    return figure


def panels(title: str, count: int) -> tuple[Any, list[Any]]:
    """A figure of so many panels over the updates."""
    from matplotlib.figure import Figure  # here, because it is heavy

    figure = Figure(figsize=(WIDTH, HEIGHT * count + 0.5), layout="constrained")
    axes = list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])
    figure.suptitle(title, fontsize="medium")
    over_updates(axes[-1])
    figure.align_ylabels(axes)
    return figure, axes


def over_updates(axis: Any) -> None:
    """Label the axis of updates, with ticks at whole ones."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("update")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def save(figure: Any, path: Path) -> None:
    """Write a figure whole, in the format of the file's name, to the same bytes whenever it is the same figure."""
    from matplotlib import rc_context

    kind = path.suffix.lstrip(".")
    # In an SVG, ids come from the content, and letters stay text.
    settings: dict[Any, Any] = {"svg.hashsalt": "flowgrpo", "svg.fonttype": "none"}
    metadata = {"Date": None} if kind == "svg" else None
    with rc_context(settings):
        write_whole(path, lambda beside: figure.savefig(beside, dpi=150, format=kind, metadata=metadata))


def curve(lines: Sequence[Mapping[str, Any]], phase: str, name: str) -> Curve:
    """The updates of a phase that have a figure, and the figure."""
    rows = [line for line in lines if line.get("phase") == phase and line.get(name) is not None]
    return [line["update"] for line in rows], [line[name] for line in rows]


def tool_mix_curves(lines: Sequence[Mapping[str, Any]], phase: str) -> dict[str, Curve]:
    """The share of each tool over the updates of a phase, tools in the order of their names in the file."""
    rows = [line for line in lines if line.get("phase") == phase and line.get("tools")]
    tools = {tool: None for line in rows for tool in line["tools"]}
    return {
        tool: ([line["update"] for line in rows], [line["tools"].get(tool, 0.0) for line in rows]) for tool in tools
    }


# Parts of figures ---------------------------------------------------------------------------------------


def line_style(index: int) -> dict[str, str]:
    """Colour, dashes and marker of a line; where a colour comes again, dashes and marker are others, for 32 lines."""
    shifted = index + index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[shifted % len(DASHES)],
        "marker": MARKERS[shifted % len(MARKERS)],
    }


def draw_line(axis: Any, index: int, label: str, x: list[float], y: list[float]) -> None:
    """A line that differs from those of other indices in colour, or in dashes and marker (`line_style`)."""
    style: dict[str, Any] = line_style(index)
    axis.plot(x, y, label=label, markevery=max(1, len(x) // MARKED), ms=4, **style)


def band(axis: Any, index: int, lines: Sequence[Mapping[str, Any]], phase: str) -> None:
    """The interval around the success rate, where the metrics give one."""
    rows = [line for line in lines if line.get("phase") == phase and line.get("success_low") is not None]
    x = [line["update"] for line in rows]
    low, high = ([line[name] for line in rows] for name in ("success_low", "success_high"))
    if rows:
        axis.fill_between(x, low, high, color=COLOURS[index % len(COLOURS)], alpha=0.2, linewidth=0)


def frame(axis: Any, label: str, *, share: bool = False) -> None:
    """Label an axis, with a legend beside it; a share begins at 0, and ends at the tenth above all that is drawn."""
    if share:
        top = min(math.ceil(10 * axis.dataLim.ymax - 1e-6) / 10, 1.0) if axis.dataLim.ymax > 0 else 1.0
        axis.set_ylim(-0.02 * top, 1.02 * top)  # so that a line at the edge is whole
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
