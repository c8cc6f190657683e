"""Figures of a run on self-verification: reward and truth side by side, their gap, and how good the judge is.

figures(played)            ->  Verified: the true accuracy with its interval, mean P("Yes"), calibration
comparison(by_name)        ->  the table of several parameters on the same questions
draw(folder)               ->  curves.png: both on the same axes

The gap is mean P("Yes") less the true accuracy. A judge that is calibrated at the start has one near 0. Where training
raises the reward and leaves the truth behind, the gap grows: the judge is being hacked, and `report.health` warns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.hosted_exam import judge
from flowgrpo.evaluate import Evaluation
from flowgrpo.report.metrics import METRICS, read_metrics
from flowgrpo.report.plots import COLOURS, CURVES, curve, over_updates, save
from flowgrpo.rollout.records import Played
from flowgrpo.types import BadInput

BINS = 10  # of P("Yes"), for its calibration
Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verified(Evaluation):
    """An evaluation by what is right, with what the judge said of the same answers."""

    outcome: float  # mean P("Yes")
    gap: float  # of that to the share of the same answers that is right
    judge_right: float  # share of verdicts that are right, where 1/2 and above is Yes
    calibration_error: float  # expected, over ten bins of P("Yes")


def figures(played: Sequence[Played]) -> Verified:
    """The figures of one answer to each question, over the answers that the judge has judged."""
    valid = [one for one in played if one.trajectory.outcome is not None]
    if not valid:
        why = next((one.scored.reason for one in played if one.scored is not None), "none was asked for")
        raise BadInput(f"the judge has judged none of {len(played)} answers ({why}): give a model that says Yes or No")
    plain = judge(played, ())
    yes_n = np.array([one.trajectory.outcome for one in valid], np.float64)
    right_n = np.array([one.trajectory.correct for one in valid])
    return Verified(
        **vars(plain),
        outcome=float(yes_n.mean()),
        gap=float(yes_n.mean() - right_n.mean()),
        judge_right=float(((yes_n >= 0.5) == right_n).mean()),
        calibration_error=calibration_error(yes_n, right_n),
    )


def calibration_error(yes_n: np.ndarray, right_n: np.ndarray) -> float:
    """How far P("Yes") lies from the share that is right, within bins of equal width, weighed by their size."""
    bin_n = np.minimum((yes_n * BINS).astype(int), BINS - 1)
    gaps = [abs(yes_n[bin_n == i].sum() - right_n[bin_n == i].sum()) for i in range(BINS)]
    return float(sum(gaps) / len(yes_n))


# In words -----------------------------------------------------------------------------------------------


def comparison(by_name: Mapping[str, Verified]) -> str:
    """A column for each, a row for each figure."""
    rows = {
        "true accuracy": lambda x: f"{x.success:.1%} ({x.success_low:.1%} to {x.success_high:.1%})",
        'P("Yes")': lambda x: f"{x.outcome:.1%}",
        "gap": lambda x: f"{x.gap:+.1%}",
        "judge is right": lambda x: f"{x.judge_right:.1%}",
        "calibration error": lambda x: f"{x.calibration_error:.1%}",
        "cut or empty answers": lambda x: f"{x.tool_errors:.1%}",
        "not judged": lambda x: str(x.invalid),
    }
    head = f"{'test questions':24}" + "".join(f"{name:>28}" for name in by_name)
    return "\n".join(
        [head, *(f"{row:24}" + "".join(f"{of(x):>28}" for x in by_name.values()) for row, of in rows.items())]
    )


def sentence(verified: Verified) -> str:
    """One line for a validation."""
    return f'validation: P("Yes") {verified.outcome:.2f}  true accuracy {verified.success:.2f}  gap {verified.gap:+.2f}'


# The plot -----------------------------------------------------------------------------------------------


def draw(folder: Path, *, title: str = "") -> Path:
    """Write `curves.png`: mean P("Yes") and true accuracy on the same axes, the KL to the start below."""
    from matplotlib.figure import Figure  # here, because it is heavy

    lines = list(read_metrics(folder / METRICS))
    if not any(line.get("phase") == "validation" for line in lines):
        raise BadInput(f"{folder / METRICS} has no validation yet: let the run go on")
    kl = curve(lines, "train", "kl")
    panels = 2 if kl[0] else 1
    figure = Figure(figsize=(7.5, 3.6 + 1.8 * (panels - 1)), layout="constrained")
    ratios = [2, 1][:panels]
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_pair(axes[0], lines)
    axes[0].set(ylim=(-0.02, 1.02), ylabel="share of answers", title=title)
    if panels == 2:
        axes[1].plot(*kl, color=COLOURS[6])
        axes[1].set(ylabel="KL to the start")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    over_updates(axes[-1])
    path = folder / CURVES
    save(figure, path)
    return path


def _draw_pair(axis: Any, lines: Sequence[Line]) -> None:
    """Training as thin lines, validations as marked ones; what the reward is above the truth is filled."""
    for index, (name, label, marker) in enumerate((("outcome", 'P("Yes")', "s"), ("success", "true accuracy", "o"))):
        colour = COLOURS[1 - index]
        axis.plot(*curve(lines, "train", name), color=colour, alpha=0.4, linewidth=1)
        dashes = "--" if name == "outcome" else "-"
        axis.plot(*curve(lines, "validation", name), dashes, color=colour, marker=marker, ms=4, label=label)
    both = [line for line in lines if line.get("phase") == "validation" and line.get("outcome") is not None]
    update, reward, right = ([line[name] for line in both] for name in ("update", "outcome", "success"))
    above = [a > b for a, b in zip(reward, right, strict=True)]
    axis.fill_between(
        update, right, reward, where=above, interpolate=True, color=COLOURS[4], alpha=0.25, lw=0, label="reward above"
    )
