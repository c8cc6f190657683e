"""Compare the arms of a study over seeds: `run_study` runs what is missing, `write_study` shows what came of it.

    runs = run_study(study, folder, seeds=range(16))    {(arm, environment, seed): its line in runs.jsonl}

A line has the success on test tasks and the turns at each examination, and figures of training by update. Arm by arm,
all seeds are one program. The results are a table, a picture and a page.
"""

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flowgrpo.evaluation.statistics import interval, iqm, probability_of_improvement
from flowgrpo.files import write_whole
from flowgrpo.parallel.row_sharding import data_mesh, over_runs, stack_trees
from flowgrpo.recipes import pure, study_arms
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.recipes.studies import Study
from flowgrpo.recipes.study_arms import Arm
from flowgrpo.report.metrics import plain_json, read_metrics
from flowgrpo.report.plots import COLOURS, DASHES, MARKERS, over_updates, save
from flowgrpo.report.progress import Progress
from flowgrpo.run.time_budget import ENDLESS, OutOfTime, TimeBudget

RUNS = "runs.jsonl"

Key = tuple[str, str, int]  # arm, environment, seed
Runs = dict[Key, dict[str, Any]]


# Runs -------------------------------------------------------------------------------------------------


def read_runs(folder: Path) -> Runs:
    """Read what was run so far, by arm, environment and seed; empty where there is no file yet."""
    path = folder / RUNS
    lines = list(read_metrics(path)) if path.exists() else []
    return {(line["arm"], line["env"], line["seed"]): line for line in lines}


def run_study(
    study: Study,
    folder: Path,
    *,
    seeds: Sequence[int],
    every: int = 10,
    tasks: int = 256,
    lanes: int | None = None,
    chosen: Mapping[str, Any] = {},
    budget: TimeBudget = ENDLESS,
) -> Runs:
    """Run what is missing of a study, in its folder; `chosen` settings stand in the place of the study's.

    The budget is looked at before each arm, since an arm is what is kept.
    """
    runs, progress = read_runs(folder), Progress(0)
    each = partial(over_seeds, lanes=lanes)
    for env, world in study.worlds.items():
        config = study_config(study, env, chosen)
        missing = {name: [seed for seed in seeds if (name, env, seed) not in runs] for name in study.arms}
        wanted = sorted({seed for own in missing.values() for seed in own})
        if not wanted:
            continue
        begun = begin_all(config, world, wanted, each=each, progress=progress)
        for index, (name, arm) in enumerate(study.arms.items(), 1):
            if not missing[name]:
                continue
            if budget.is_over():
                progress.say(f"the time budget of {budget.words} is over; the same command goes on with the arm {name}")
                raise OutOfTime
            places = np.array([wanted.index(seed) for seed in missing[name]])
            own = jax.tree.map(lambda x, places=places: x[places], begun)
            title = f"{env}, arm {index}/{len(study.arms)}, {name}"
            found = run_arm(
                arm, config, world, own, each=each, every=every, tasks=tasks, tell=partial(progress.show, title)
            )
            runs |= {
                (name, env, seed): plain_json({"arm": name, "env": env, "seed": seed, **line})
                for seed, line in zip(missing[name], found, strict=True)
            }
            write_whole(folder / RUNS, "".join(json.dumps(line) + "\n" for line in runs.values()))
            progress.say(f"{title}: success {np.mean([line['success'][-1] for line in found]):.3f}")
    return runs


def study_config(study: Study, env: str, chosen: Mapping[str, Any]) -> pure.Config:
    """The Config that the arms of a study share in an environment."""
    config = pure.preset(env, **{**study.changes, **chosen})
    return replace(config, mesh="none", decay_updates=max(config.updates, 1))


def over_seeds(function: Callable, *, lanes: int | None) -> Callable:
    """A function of one seed, compiled for all of them, which are dealt over the devices."""
    return jax.jit(over_runs(function, lanes=lanes, mesh=data_mesh()))


def begin_all(
    config: pure.Config, world: Mapping[str, Any], seeds: Sequence[int], *, each: Callable, progress: Progress
) -> study_arms.SeedStart:
    """The planners that all arms start from."""
    progress.say(f"{config.env}: {len(seeds)} planners imitate demonstrations ({config.warm_steps} steps)")
    setup = pure.open(config, env=ENVIRONMENTS[config.env](**world))
    keys = stack_trees([jax.random.key(seed) for seed in seeds])
    return jax.block_until_ready(each(partial(study_arms.warm_started, setup=setup))(keys))


def run_arm(
    arm: Arm,
    config: pure.Config,
    world: Mapping[str, Any],
    begun: study_arms.SeedStart,
    *,
    each: Callable,
    every: int,
    tasks: int,
    tell: Callable[..., None],
) -> list[dict[str, Any]]:
    """One arm with all its seeds: for each of them its curve on test tasks, and its figures by update."""
    updates = config.updates
    steps = [min(every, updates - done) for done in range(0, updates, every)]
    parts = {size: study_arms.parts_of(arm, config, world, updates=size, tasks=tasks) for size in dict.fromkeys(steps)}
    advance = {size: each(one.advance) for size, one in parts.items()}
    first = parts[steps[0]]
    state = each(first.begin)(begun)
    seen = [jax.device_get(each(first.look)(state))]
    tell(0, _mean(seen[0]), total=updates)
    for index, size in enumerate(steps):
        state, now = advance[size](state)
        seen.append(jax.device_get(now))
        tell(sum(steps[: index + 1]), _mean(seen[-1]), total=updates)
    at = np.cumsum([0, *steps]).tolist()
    return [_line_of(seed, at, seen) for seed in range(len(seen[0].success))]


def _mean(seen: study_arms.ArmFigures) -> dict[str, float]:
    return {"success": float(np.mean(seen.success)), "turns": float(np.mean(seen.turns))}


def _line_of(index: int, at: list[int], seen: Sequence[study_arms.ArmFigures]) -> dict[str, Any]:
    """One seed's own line."""
    names = seen[-1].figures
    by_update = {name: np.concatenate([one.figures[name][index] for one in seen[1:]]) for name in names}
    tests = {"success": [one.success[index] for one in seen], "turns": [one.turns[index] for one in seen]}
    return {"updates": at, **tests, "train": by_update}


RunResults = Mapping[tuple[str, str, int], Mapping[str, Any]]


def tabulate_study(study: Study, runs: RunResults, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each arm: the interquartile mean of its success with its interval, and how often it beats the
    baseline."""
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
    """Success on test tasks as [seeds, environments], at the last examination or another."""
    return np.array([[runs[arm, env, seed]["success"][at] for env in worlds] for seed in seeds])


def table(rows: Sequence[Mapping[str, Any]], study: Study) -> str:
    """The table in Markdown, which reads well in a terminal, too."""
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
    expected: str,
    name: str,
) -> None:
    """Everything that a reader looks at; each file is there when it is whole."""
    figure = _draw(study, rows, runs, seeds)
    for suffix in ("png", "svg"):
        save(figure, folder / f"curves.{suffix}")
    write_whole(folder / "table.jsonl", "".join(json.dumps(plain_json(row)) + "\n" for row in rows))
    write_whole(folder / "table.md", table(rows, study) + "\n")
    text = _page(study, rows, (folder / "curves.svg").read_text(), expected=expected, name=name)
    write_whole(folder / "index.html", text)


def _draw(study: Study, rows: Sequence[Mapping[str, Any]], runs: RunResults, seeds: Sequence[int]) -> Any:
    """Interquartile means with their intervals, and over the updates."""
    from matplotlib.figure import Figure  # here, because it is heavy

    figure = Figure(figsize=(10.5, max(3.4, 0.42 * len(rows) + 1.4)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    for index, row in enumerate(rows):
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        left.plot([row["low"], row["high"]], [index, index], color=style["color"], linewidth=6, alpha=0.35)
        left.plot([row["iqm"]], [index], **style, markersize=7)
        at, mean, low, high = _curve(runs, row["arm"], study.worlds, seeds)
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


def _curve(runs: RunResults, arm: str, worlds: Mapping, seeds: Sequence[int]) -> tuple[list[int], list, list, list]:
    """Updates, the interquartile mean at each, and its interval."""
    at = runs[arm, next(iter(worlds)), seeds[0]]["updates"]
    seen = [_scores(runs, arm, worlds, seeds, at=index) for index in range(len(at))]
    bands = [interval(iqm, one, resamples=400) for one in seen]
    return at, [iqm(one) for one in seen], [low for low, _ in bands], [high for _, high in bands]


STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2.5rem auto;padding:0 1rem}
body{color:#1a1a1a;background:#fff}
table{border-collapse:collapse;margin:1.2rem 0}th,td{padding:.3rem .9rem;border-bottom:1px solid #ddd;text-align:right}
th:first-child,td:first-child{text-align:left}
pre{background:#f5f5f5;padding:.8rem;overflow:auto}
svg{max-width:100%;height:auto}"""


def _page(study: Study, rows: Sequence[Mapping[str, Any]], picture: str, *, expected: str, name: str) -> str:
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
        "percentile bootstrap, with replacement within each environment; beats: the chance that a run scores higher "
        "than one of the baseline, a tie counting half.</p>"
        f"<pre>python -m experiments.compare --study={html.escape(name)}</pre></html>\n"
    )
