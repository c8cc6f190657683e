"""Histograms of a run's tokens over the updates: lines of metrics flow in, a figure flows out, or why there is none.

    ratios(lines, title)        rho of the tokens, to the policy that sampled them
    advantages(lines, title)    the advantages that they were given

Above, a map: how large a share of an update's tokens lies where. Below, the first, middle and last tenth of updates.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowgrpo.report.bins import ADVANTAGE, RATIO, advantage_edges, ratio_place
from flowgrpo.report.metrics import METRICS, Line
from flowgrpo.report.plots import COLOURS, frame, over_updates

WIDTH, HEIGHT = 7.5, 6.0  # inches
COLUMNS = 200  # of the map at most; updates are added up beyond
TICKS = (0.5, 0.9, 0.99, 0.999, 1, 1.001, 1.01, 1.1, 2)  # of ratios


def ratios(lines: Sequence[Line], title: str) -> Any:
    """How far tokens were from the policy that sampled them."""
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
    """How advantages are spread over the tokens that they are given to."""
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
