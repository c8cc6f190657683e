"""Result, lines of metrics and table of a run, made from its figures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import flowgrpo as fg
from flowgrpo.evaluate import Evaluation
from flowgrpo.files import write_whole
from flowgrpo.learner.checkpoint import Checkpoints
from flowgrpo.report.metrics import TIMINGS, read_metrics, without_empty_means


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """A result as JSON, whole."""
    write_whole(path, json.dumps(result, indent=1) + "\n")


def median_speed(folder: Path) -> float | None:
    """Median tokens a second of the updates."""
    speeds = [line["tokens_per_second"] for line in read_metrics(folder / TIMINGS) if "tokens_per_second" in line]
    return float(np.median(speeds)) if speeds else None


def shown(figures: Evaluation) -> dict[str, Any]:
    """Select the figures of an evaluation that go into the metrics: all but `pass@k`."""
    return {name: value for name, value in figures.figures().items() if not name.startswith("pass@")}


def check_finite(figures: Mapping[str, Any], checkpoints: Checkpoints) -> None:
    """Stop where a loss was not a number; the checkpoints before are whole."""
    if figures.get("skipped", 0) > 0:
        raise fg.BadInput(
            f"the loss of update {figures['update']} is not finite: lower --learning_rate; the last good checkpoint is "
            f"that of update {checkpoints.latest()}"
        )


def train_line(figures: Mapping[str, Any], tools: Sequence[str]) -> dict[str, Any]:
    """An update's figures as a line of metrics: shares of the tools by name, and no mean over no tokens."""
    calls = np.asarray(figures.get("tool_calls", []), float)
    rest = {name: value for name, value in without_empty_means(figures).items() if name != "tool_calls"}
    shares = calls / max(calls.sum(), 1.0)
    return {"phase": "train"} | rest | {"tools": dict(zip(tools, shares.tolist(), strict=False))}


def report(before: Evaluation, after: Evaluation) -> str:
    """The table before / after."""
    right = (before.right_tool, after.right_tool)
    rows = [
        ("success", [f"{x.success:.1%} ({x.success_low:.1%} to {x.success_high:.1%})" for x in (before, after)]),
        ("tool errors", [f"{x.tool_errors:.1%}" for x in (before, after)]),
        ("turns", [f"{x.turns:.2f}" for x in (before, after)]),
        *(
            (f"calls of {name}", [f"{(x.tools or {}).get(name, 0):.1%}" for x in (before, after)])
            for name in after.tools or {}
        ),
        *([] if None in right else [("right tool of calls", [f"{share:.1%}" for share in right])]),
    ]
    head = f"{'test tasks':24}{'warm start':>28}{'trained':>28}"
    return "\n".join([head, *(f"{name:24}{one:>28}{two:>28}" for name, (one, two) in rows)])
