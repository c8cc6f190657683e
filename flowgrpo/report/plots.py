"""The curves of a run, from its `metrics.jsonl`: success over the updates, and which tools were called.

    curves("runs/lookup")  ->  runs/lookup/curves.png

Colours are Okabe and Ito's, which people with any kind of colour vision can tell apart; lines differ in their dashes
and markers too. The other pictures of a run are those of `report.pictures`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.files import write_whole
from flowgrpo.report.metrics import METRICS, read_metrics
from flowgrpo.types import BadInput

CURVES = "curves.png"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
DASHES = ["-", "--", ":", "-."]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
MARKED = 15  # points at most of which each has its marker

Curve = tuple[list[float], list[float]]  # updates, values


def curves(folder: str | os.PathLike, path: str | os.PathLike | None = None, *, title: str | None = None) -> Path:
    """Draw the curves of the run in this folder, beside its metrics by default; where they are."""
    lines = list(read_metrics(Path(folder) / METRICS))
    if not any("success" in line for line in lines):
        raise BadInput(f"{Path(folder) / METRICS} has no line with a success rate yet: let the run go on")
    target = Path(path) if path is not None else Path(folder) / CURVES
    draw(lines, target, title=title if title is not None else Path(folder).name)
    return target


def draw(lines: Sequence[Mapping[str, Any]], path: Path, *, title: str = "") -> None:
    """Write a PNG of these metrics: success by phase, and the share of each tool where tools were called."""
    from matplotlib.figure import Figure  # here, because it is heavy

    phases = {line["phase"]: None for line in lines if "success" in line and "phase" in line}
    mixes = {phase: tool_mix(lines, phase) for phase in phases}
    busiest = max(mixes, key=lambda phase: len(mixes[phase]) and max(len(x) for x, _ in mixes[phase].values()))
    panels = 2 if mixes[busiest] else 1
    figure = Figure(figsize=(7.5, 3.2 * panels + 0.4), layout="constrained")
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    for i, phase in enumerate(phases):
        mark(axes[0], i, phase, *curve(lines, phase, "success"))
        band(axes[0], i, lines, phase)
    frame(axes[0], "success rate", title, share=True)
    if panels == 2:
        for i, (tool, points) in enumerate(mixes[busiest].items()):
            mark(axes[1], i, tool, *points)
        frame(axes[1], f"share of tool calls ({busiest})", share=True)
    axes[-1].set_xlabel("update")
    save(figure, path)


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


def tool_mix(lines: Sequence[Mapping[str, Any]], phase: str) -> dict[str, Curve]:
    """The share of each tool over the updates of a phase, tools in the order of their names in the file."""
    rows = [line for line in lines if line.get("phase") == phase and line.get("tools")]
    tools = {tool: None for line in rows for tool in line["tools"]}
    return {
        tool: ([line["update"] for line in rows], [line["tools"].get(tool, 0.0) for line in rows]) for tool in tools
    }


# Parts of figures ---------------------------------------------------------------------------------------


def mark(axis: Any, index: int, label: str, x: list[float], y: list[float]) -> None:
    """A line that differs from those of other indices in colour, dashes and markers."""
    style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}
    axis.plot(
        x, y, label=label, marker=MARKERS[index % len(MARKERS)], markevery=max(1, len(x) // MARKED), ms=4, **style
    )


def band(axis: Any, index: int, lines: Sequence[Mapping[str, Any]], phase: str) -> None:
    """The interval around the success rate, where the metrics give one."""
    rows = [line for line in lines if line.get("phase") == phase and line.get("success_low") is not None]
    x = [line["update"] for line in rows]
    low, high = ([line[name] for line in rows] for name in ("success_low", "success_high"))
    if rows:
        axis.fill_between(x, low, high, color=COLOURS[index % len(COLOURS)], alpha=0.2, linewidth=0)


def frame(axis: Any, label: str, title: str = "", *, share: bool = False) -> None:
    """Label an axis, with a legend beside it; a share goes from 0 to 1."""
    if share:
        axis.set_ylim(-0.02, 1.02)
    axis.set_ylabel(label)
    axis.set_title(title)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
