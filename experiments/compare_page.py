"""Results of a comparison: a table, a picture and a page made from its runs."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.studies import Study
from flowgrpo.files import write_whole
from flowgrpo.report.metrics import plain
from flowgrpo.report.plots import COLOURS, DASHES, MARKERS, over_updates, save
from flowgrpo.statistics import interval, iqm, probability_of_improvement

Runs = Mapping[tuple[str, str, int], Mapping[str, Any]]


def tabulate(study: Study, runs: Runs, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each arm: the interquartile mean of its success with its interval, and how often it beats the
    baseline."""
    base_se = scores(runs, study.baseline, study.worlds, seeds)
    rows = []
    for name in study.arms:
        own_se = scores(runs, name, study.worlds, seeds)
        low, high = interval(iqm, own_se)
        row = {"arm": name, "iqm": iqm(own_se), "low": low, "high": high, "seeds": len(seeds)}
        row |= {"start": iqm(scores(runs, name, study.worlds, seeds, at=0))}
        row |= {"turns": float(np.mean([runs[name, env, seed]["turns"][-1] for env in study.worlds for seed in seeds]))}
        if name != study.baseline:
            beats = interval(probability_of_improvement, own_se, base_se)
            row |= {"beats_baseline": probability_of_improvement(own_se, base_se)}
            row |= dict(zip(("beats_low", "beats_high"), beats, strict=True))
        rows.append(row)
    return rows


def scores(runs: Runs, arm: str, worlds: Sequence[str] | Mapping, seeds: Sequence[int], at: int = -1) -> np.ndarray:
    """Success on test tasks as [seeds, environments], at the last examination or another."""
    return np.array([[runs[arm, env, seed]["success"][at] for env in worlds] for seed in seeds])


def table(rows: Sequence[Mapping[str, Any]], study: Study) -> str:
    """The table in Markdown, which reads well in a terminal, too."""
    cells = [_head(study), *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(_aligned(line, widths)) + " |" for line in cells]
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


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(line)]


# Files ------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    study: Study,
    rows: Sequence[Mapping[str, Any]],
    runs: Runs,
    seeds: Sequence[int],
    *,
    expected: str,
    name: str,
) -> None:
    """Everything that a reader looks at; each file is there when it is whole."""
    figure = draw(study, rows, runs, seeds)
    for suffix in ("png", "svg"):
        save(figure, folder / f"curves.{suffix}")
    write_whole(folder / "table.jsonl", "".join(json.dumps(plain(row)) + "\n" for row in rows))
    write_whole(folder / "table.md", table(rows, study) + "\n")
    text = page(study, rows, (folder / "curves.svg").read_text(), expected=expected, name=name)
    write_whole(folder / "index.html", text)


def draw(study: Study, rows: Sequence[Mapping[str, Any]], runs: Runs, seeds: Sequence[int]) -> Any:
    """Interquartile means with their intervals, and over the updates."""
    from matplotlib.figure import Figure  # here, because it is heavy

    figure = Figure(figsize=(10.5, max(3.4, 0.42 * len(rows) + 1.4)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    for index, row in enumerate(rows):
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        left.plot([row["low"], row["high"]], [index, index], color=style["color"], linewidth=6, alpha=0.35)
        left.plot([row["iqm"]], [index], **style, markersize=7)
        at, mean, low, high = curve(runs, row["arm"], study.worlds, seeds)
        right.plot(at, mean, **style, linestyle=DASHES[index % len(DASHES)], markersize=4, label=row["arm"])
        right.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
    left.axvline(np.mean([row["start"] for row in rows]), color="#888888", linewidth=1, linestyle=":")
    left.set_yticks(range(len(rows)), [row["arm"] for row in rows])
    left.invert_yaxis()
    left.set_xlabel("success on test tasks (IQM, 95 %); dotted: warm start")
    over_updates(right)
    right.set_ylabel("success on test tasks (IQM)")
    right.set_ylim(-0.02, 1.02)
    left.set_xlim(-0.02, 1.02)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=8)
    return figure


def curve(runs: Runs, arm: str, worlds: Mapping, seeds: Sequence[int]) -> tuple[list[int], list, list, list]:
    """Updates, the interquartile mean at each, and its interval."""
    at = runs[arm, next(iter(worlds)), seeds[0]]["updates"]
    seen = [scores(runs, arm, worlds, seeds, at=index) for index in range(len(at))]
    bands = [interval(iqm, one, resamples=400) for one in seen]
    return at, [iqm(one) for one in seen], [low for low, _ in bands], [high for _, high in bands]


STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2.5rem auto;padding:0 1rem}
body{color:#1a1a1a;background:#fff}
table{border-collapse:collapse;margin:1.2rem 0}th,td{padding:.3rem .9rem;border-bottom:1px solid #ddd;text-align:right}
th:first-child,td:first-child{text-align:left}
pre{background:#f5f5f5;padding:.8rem;overflow:auto}
svg{max-width:100%;height:auto}"""


def page(study: Study, rows: Sequence[Mapping[str, Any]], picture: str, *, expected: str, name: str) -> str:
    """One HTML file that needs nothing beside it."""
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in _head(study))]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(study.question)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(study.question)}</h1>"
        f"<table>{body}</table>{picture[picture.index('<svg') :]}"
        f"<h2>Expected</h2><p>{html.escape(expected)}</p>"
        "<p>Success on test tasks after the last update. IQM: the mean of the middle half of the runs; intervals: "
        "percentile bootstrap, runs drawn anew within each environment; beats: the chance that a run scores higher "
        "than one of the baseline, a tie counting half.</p>"
        f"<pre>python -m experiments.compare --study={html.escape(name)}</pre></html>\n"
    )
