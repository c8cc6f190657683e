"""What a run writes beside its metrics: figures flow in, lines and a result flow out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import flowgrpo as fg
from flowgrpo.evaluate import Evaluation
from flowgrpo.learner.checkpoint import Checkpoints
from flowgrpo.report.metrics import TIMINGS, read_metrics


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """The file, which is there when it is whole."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(path)


def median_speed(folder: Path) -> float | None:
    """Median tokens a second of the updates."""
    speeds = [line["tokens_per_second"] for line in read_metrics(folder / TIMINGS) if "tokens_per_second" in line]
    return float(np.median(speeds)) if speeds else None


def shown(figures: Evaluation) -> dict[str, Any]:
    """What of an evaluation goes into the metrics."""
    return {name: value for name, value in figures.figures().items() if not name.startswith("pass@")}


def check_finite(figures: Mapping[str, Any], checkpoints: Checkpoints) -> None:
    """Stop where a loss was not a number; the checkpoints before are whole."""
    if figures.get("skipped", 0) > 0:
        raise fg.BadInput(
            f"the loss of update {figures['update']} is not finite: lower --learning_rate; the last good checkpoint is "
            f"that of update {checkpoints.latest()}"
        )
