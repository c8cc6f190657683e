"""All that a run's figures can be drawn as: lines of metrics and timings flow in, a picture each flows out.

    written, left_out = draw_all("runs/agentflow-0", formats=("png", "svg"))

    learning      success by phase, with the reward and its held-out check
    policy        entropy, KL and clip fractions
    ratios, advantages     histograms over the updates, and early, halfway and late in the run
    turns         turns and chosen tokens of a trajectory, and which turns were learned from
    tools         which tools were called, and how many calls failed
    speed, stages     tokens a second; what each stage of an update took, and when it ran

What a run has no figures for is left out, with the reason. Updates in which no token was learned from have no ratios,
no entropy and no KL, so lines pass over them. Training is blue and validation orange, everywhere.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.report.histograms import advantages, ratios
from flowgrpo.report.metrics import METRICS, TIMINGS, Line, read_metrics, without_empty_means
from flowgrpo.report.plots import COLOURS, PHASES, Curve, band, curve, frame, mark, panels, save, tool_mix
from flowgrpo.report.stages import speed, stages
from flowgrpo.types import BadInput

FORMATS = ("png", "svg")
HATCHES = ["", "//", "\\\\", "..", "xx", "--", "||", "oo"]
ROUNDING = 1e-9
SMOOTHED = 40  # updates from which a line is drawn as a moving mean, over the figures themselves


class Told(NamedTuple):
    """Metrics and timings that a run wrote, with its title."""

    lines: Sequence[Line]
    timings: Sequence[Line]
    title: str


Picture = Callable[[Told], Any]  # a figure of matplotlib's, or why there is none


def draw_all(
    folder: str | os.PathLike, out: str | os.PathLike | None = None, *, formats: Sequence[str] = FORMATS[:1]
) -> tuple[list[Path], dict[str, str]]:
    """Draw what there are figures for, into `plots/` of the run by default: the files, and why others are left out."""
    unknown = [one for one in formats if one not in FORMATS]
    if unknown or not formats:
        raise BadInput(f"--format={','.join(formats)} is unknown; choose from {', '.join(FORMATS)}")
    source, target = Path(folder), Path(folder) / "plots" if out is None else Path(out)
    timings = list(read_metrics(source / TIMINGS)) if (source / TIMINGS).exists() else []
    told = Told(list(read_metrics(source / METRICS)), timings, source.resolve().name)
    written, left_out = [], {}
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{target} can't be made ({error.strerror}): choose another --out") from None
    for name, picture in PICTURES.items():
        for path in (target / f"{name}.{kind}" for kind in formats):
            figure = picture(told)  # anew, since drawing one moves its parts a little
            if isinstance(figure, str):
                left_out[name] = figure
                break
            save(figure, path)
            written.append(path)
    return written, left_out


# Lines --------------------------------------------------------------------------------------------------


def learning(told: Told) -> Any:
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


def policy(told: Told) -> Any:
    """Entropy, KL and clip fractions of the tokens that were learned from."""
    lines = learned(told.lines)
    groups = {
        "entropy (nats a token)": {"entropy": "entropy"},
        "KL (nats a token)": {"kl": "to the reference", "kl_old": "to the sampler"},
        "share of clipped tokens": {"clip_low_fraction": "below", "clip_high_fraction": "above"},
    }
    found = {label: _curves(lines, names) for label, names in groups.items()}
    found = {label: curves for label, curves in found.items() if curves}
    if not found:
        return f"{METRICS} has neither entropy nor KL"
    figure, axes = panels(told.title, len(found))
    for axis, (label, curves) in zip(axes, found.items(), strict=True):
        for i, (name, points) in enumerate(curves.items()):
            smooth(axis, i, name, points)
        frame(axis, label)
        axis.set_ylim(bottom=0)
    return figure


def turns(told: Told) -> Any:
    """How long trajectories are, in turns and tokens, and how much of what was learned each turn is."""
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
        stack(axes[-1], mix)
        frame(axes[-1], "share of the tokens\nlearned from", share=True)
    return figure


def tools(told: Told) -> Any:
    """The mix of tools in training and in validations; below, the turns that ended in an error."""
    mixes = {phase: tool_mix(told.lines, phase) for phase in PHASES}
    mixes = {phase: mix for phase, mix in mixes.items() if mix and len(next(iter(mix.values()))[0]) > 1}
    errors = {phase: curve(told.lines, phase, "tool_errors") for phase in PHASES}
    if not mixes:
        return f"{METRICS} has no shares of tools of more than one update"
    figure, axes = panels(told.title, len(mixes) + 1)
    for axis, (phase, mix) in zip(axes, mixes.items(), strict=False):
        stack(axis, mix)
        frame(axis, f"share of calls\n({phase})", share=True)
    for i, (phase, points) in enumerate(errors.items()):
        smooth(axes[-1], i, phase, points)
    frame(axes[-1], "share of turns that\nended in an error")
    axes[-1].set_ylim(bottom=0)
    return figure


# Parts --------------------------------------------------------------------------------------------------


def smooth(axis: Any, index: int, label: str, points: Curve) -> None:
    """A line; where it has many points their moving mean, with the points themselves as a faint line."""
    x, y = points
    if len(x) < SMOOTHED:
        if x:
            mark(axis, index, label, x, y)
        return
    size = len(x) // 20
    axis.plot(x, y, color=COLOURS[index], alpha=0.3, linewidth=0.8)
    means = np.convolve(y, np.ones(size) / size, mode="valid").tolist()
    half = size // 2
    mark(axis, index, f"{label}\n(mean of {size})", x[half : half + len(means)], means)


def stack(axis: Any, mix: Mapping[str, Curve]) -> None:
    """Shares on top of each other, told apart by colour and hatching."""
    x = next(iter(mix.values()))[0]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(mix))]
    areas = axis.stackplot(x, [y for _, y in mix.values()], labels=list(mix), colors=colours, alpha=0.75)
    for i, area in enumerate(areas):
        area.set(hatch=HATCHES[i % len(HATCHES)], edgecolor="white", linewidth=0.6)
    axis.margins(x=0)


def turn_mix(lines: Sequence[Line]) -> dict[str, Curve]:
    """The share of each turn among the tokens that were learned from; the last stands for all later ones, too."""
    rows = [line for line in learned(lines) if sum(line.get("live_tokens_by_turn") or ())]
    if len(rows) < 2:
        return {}
    counts_ut = np.array([line["live_tokens_by_turn"] for line in rows], float)
    used = int(np.flatnonzero(counts_ut.sum(axis=0))[-1]) + 1
    shares_ut, x = counts_ut / counts_ut.sum(axis=1, keepdims=True), [line["update"] for line in rows]
    full = counts_ut.shape[1]
    names = [f"turn {t + 1}" + (" on" if t + 1 == full else "") for t in range(used)]
    return {name: (x, shares_ut[:, t].tolist()) for t, name in enumerate(names)}


def learned(lines: Sequence[Line]) -> list[Line]:
    """The updates of training; means over no tokens are left out."""
    return [without_empty_means(line) for line in lines if line.get("phase") == "train"]


def _curves(lines: Sequence[Line], names: Mapping[str, str]) -> dict[str, Curve]:
    """By their labels, those that are there and are more than rounding somewhere."""
    found = {label: curve(lines, "train", name) for name, label in names.items()}
    return {label: points for label, points in found.items() if max(points[1], default=0.0) > ROUNDING}


PICTURES: dict[str, Picture] = {
    "learning": learning,
    "policy": policy,
    "ratios": lambda told: ratios(told.lines, told.title),
    "advantages": lambda told: advantages(told.lines, told.title),
    "turns": turns,
    "tools": tools,
    "speed": lambda told: speed(told.timings, told.title),
    "stages": lambda told: stages(told.timings, told.title),
}
