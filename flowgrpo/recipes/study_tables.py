"""Results of a study: a table with confidence intervals, a plot, and a page.

    rows = tabulate_study(study, runs, seeds)              a row for each arm
    write_study(folder, study, rows, runs, seeds, ...)     table, plot and page

The method is that of rliable (Agarwal et al., 2021; `evaluation.statistics`): interquartile means over runs,
bootstrapped intervals, and the probability that a run of one arm scores higher than one of another.
"""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo.evaluation.statistics import interval, iqm, probability_of_improvement
from flowgrpo.files import write_atomic
from flowgrpo.recipes.study import Study
from flowgrpo.report.metrics import plain_json
from flowgrpo.report.plots import label_updates, line_style, save_figure

RunResults = Mapping[tuple[str, str, int], Mapping[str, Any]]
MAX_BANDS = 12  # maximum number of arms whose intervals are drawn over the updates, too
WRITTEN = ("table.jsonl", "table.md", "index.html")  # files in the folder of a study, besides its plots


def tabulate_study(study: Study, runs: RunResults, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each arm: interquartile mean of success, its interval, and the probability of beating the baseline."""
    base_se = _scores(runs, study.baseline, study.worlds, seeds)
    rows = []
    for name in study.arms:
        own_se = _scores(runs, name, study.worlds, seeds)
        low, high = interval(iqm, own_se)
        row = {"arm": name, "iqm": iqm(own_se), "low": low, "high": high, "seeds": len(seeds)}
        row |= {"start": iqm(_scores(runs, name, study.worlds, seeds, at=0))}
        row |= {"turns": float(np.mean([runs[name, env, seed]["turns"][-1] for env in study.worlds for seed in seeds]))}
        if name != study.baseline:
            beats = interval(probability_of_improvement, own_se, base_se)
            row |= {"beats_baseline": probability_of_improvement(own_se, base_se)}
            row |= dict(zip(("beats_low", "beats_high"), beats, strict=True))
        rows.append(row)
    return rows


def _scores(
    runs: RunResults, arm: str, worlds: Sequence[str] | Mapping, seeds: Sequence[int], at: int = -1
) -> np.ndarray:
    """Success on test tasks as [seeds, environments], at the last evaluation or another."""
    return np.array([[runs[arm, env, seed]["success"][at] for env in worlds] for seed in seeds])


def table(rows: Sequence[Mapping[str, Any]], study: Study) -> str:
    """The table in aligned Markdown, for pages and terminals."""
    cells = [_head(study), *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    aligned = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells]
    lines = ["| " + " | ".join(line) + " |" for line in aligned]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _head(study: Study) -> tuple[str, ...]:
    return ("arm", "success (IQM)", "95 % interval", f"beats {study.baseline}", "warm start", "turns", "seeds")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    beats = (
        ""
        if "beats_baseline" not in row
        else (f"{row['beats_baseline']:.2f} ({row['beats_low']:.2f} to {row['beats_high']:.2f})")
    )
    numbers = (f"{row['iqm']:.1%}", f"{row['low']:.1%} to {row['high']:.1%}", beats, f"{row['start']:.1%}")
    return (row["arm"], *numbers, f"{row['turns']:.2f}", str(row["seeds"]))


# Files ------------------------------------------------------------------------------------------------


def write_study(
    folder: Path,
    study: Study,
    rows: Sequence[Mapping[str, Any]],
    runs: RunResults,
    seeds: Sequence[int],
    *,
    expected: str = "",
    command: str = "",
) -> None:
    """Write table, plots and page, each whole or not at all.

    Args:
        folder: of the study.
        study: its question and arms.
        rows: of `tabulate_study`.
        runs: by arm, environment and seed.
        seeds: of the runs.
        expected: the result that was expected before the runs; "" leaves the section out.
        command: that runs the study again; "" leaves it out.
    """
    figure = draw_study(study, rows, runs, seeds)
    for suffix in ("png", "svg"):
        save_figure(figure, folder / f"curves.{suffix}")
    write_atomic(folder / "table.jsonl", "".join(json.dumps(plain_json(row)) + "\n" for row in rows))
    write_atomic(folder / "table.md", table(rows, study) + "\n")
    text = _page(study, rows, (folder / "curves.svg").read_text(), expected=expected, command=command)
    write_atomic(folder / "index.html", text)


def draw_study(study: Study, rows: Sequence[Mapping[str, Any]], runs: RunResults, seeds: Sequence[int]) -> Any:
    """Draw interquartile means with their intervals, after training and over the updates."""
    from matplotlib.figure import Figure  # imported late, since it is slow

    figure = Figure(figsize=(10.5, max(3.4, 0.42 * len(rows) + 1.4)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    for index, row in enumerate(rows):
        style: dict[str, Any] = line_style(index)
        left.plot([row["low"], row["high"]], [index, index], color=style["color"], linewidth=6, alpha=0.35)
        left.plot([row["iqm"]], [index], **style | {"linestyle": "-"}, markersize=7)
        at, mean, low, high = _curve(runs, row["arm"], study.worlds, seeds)
        right.plot(at, mean, **style, markersize=4, label=row["arm"])
        if len(rows) <= MAX_BANDS:
            right.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
    left.axvline(np.mean([row["start"] for row in rows]), color="#888888", linewidth=1, linestyle=":")
    left.set_yticks(range(len(rows)), [row["arm"] for row in rows])
    left.invert_yaxis()
    left.set_xlabel("success on test tasks (IQM, 95 %); dotted: warm start")
    label_updates(right)
    right.set_ylabel("success on test tasks (IQM)")
    right.set_ylim(-0.02, 1.02)
    left.set_xlim(-0.02, 1.02)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=8)
    return figure


def _curve(runs: RunResults, arm: str, worlds: Mapping, seeds: Sequence[int]) -> tuple[list[int], list, list, list]:
    """Updates, the interquartile mean at each, and its interval's bounds."""
    at = runs[arm, next(iter(worlds)), seeds[0]]["updates"]
    scores = [_scores(runs, arm, worlds, seeds, at=index) for index in range(len(at))]
    bands = [interval(iqm, score_se, resamples=400) for score_se in scores]
    return at, [iqm(score_se) for score_se in scores], [low for low, _ in bands], [high for _, high in bands]


STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2.5rem auto;padding:0 1rem}
body{color:#1a1a1a;background:#fff}
table{border-collapse:collapse;margin:1.2rem 0}th,td{padding:.3rem .9rem;border-bottom:1px solid #ddd;text-align:right}
th:first-child,td:first-child{text-align:left}
pre{background:#f5f5f5;padding:.8rem;overflow:auto}
svg{max-width:100%;height:auto}"""


def _page(study: Study, rows: Sequence[Mapping[str, Any]], picture: str, *, expected: str, command: str) -> str:
    """The page as one self-contained HTML file."""
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in _head(study))]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    thought = f"<h2>Expected</h2><p>{html.escape(expected)}</p>" if expected.strip() else ""
    again = f"<pre>{html.escape(command)}</pre>" if command else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(study.question)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(study.question)}</h1>"
        f"<table>{body}</table>{picture[picture.index('<svg') :]}"
        f"{thought}"
        "<p>Success on test tasks after the last update. IQM: the mean of the middle half of the runs; intervals: "
        "percentile bootstrap, with replacement within each environment; beats: the chance that a run scores higher "
        "than one of the baseline, a tie counting half.</p>"
        f"{again}</html>\n"
    )
