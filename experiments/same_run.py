"""Whether two finished runs are the same, bit for bit: two folders flow in, what differs flows out (S1).

    differences(one, two)  ->  {} or {"checkpoint": "run/learner/params/embed", ...}

What clocks have a part in may differ: timings, and of a result its speed and where it was resumed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.session import RESULT
from flowgrpo.learner.checkpoint import Checkpoints
from flowgrpo.learner.leaves import take
from flowgrpo.report.metrics import METRICS

CLOCKS = ("minutes", "tokens_per_second", "resumed_at")  # of a result: what may differ


def differences(one: Path, two: Path) -> dict[str, str]:
    """Find what differs between two finished runs: by part, the first place."""
    parts = {
        "metrics": _in_lines(one / METRICS, two / METRICS),
        "result": _in_result(result_of(one), result_of(two)),
        "checkpoint": _in_leaves(one, two),
        "trajectories": _in_trajectories(one / "trajectories", two / "trajectories"),
    }
    return {name: words for name, words in parts.items() if words}


def _in_lines(one: Path, two: Path) -> str:
    lines = [path.read_bytes().split(b"\n") for path in (one, two)]
    if lines[0] == lines[1]:
        return ""
    number = next((i for i, pair in enumerate(zip(*lines, strict=False)) if pair[0] != pair[1]), min(map(len, lines)))
    return f"{one.name}:{number + 1}"


def result_of(folder: Path) -> dict[str, Any]:
    """Load the result of a finished run."""
    return json.loads((folder / RESULT).read_text())


def _in_result(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    names = [name for name in {**one, **two} if name not in CLOCKS]
    return next((name for name in names if one.get(name) != two.get(name)), "")


def _in_leaves(one: Path, two: Path) -> str:
    """The first leaf of the last checkpoint that differs: parameters, optimizer, keys, counters, reference, start."""
    steps = [Checkpoints(folder, best="validation") for folder in (one, two)]
    if steps[0].latest() != steps[1].latest() or steps[0].best() != steps[1].best():
        return "its update"
    last = steps[0].latest()
    assert last is not None
    for part in ("run", "start"):
        leaves = [{leaf.name: leaf for leaf in take(each.part(last, part))} for each in steps]
        for name in {**leaves[0], **leaves[1]}:
            pair = [leaf.get(name) for leaf in leaves]
            if None in pair or _bits(pair[0]) != _bits(pair[1]):
                return f"{part}/{name}"
    return ""


def _bits(leaf) -> tuple:
    value = np.asarray(leaf.value)
    return leaf.kind, str(value.dtype), value.shape, value.tobytes()


def _in_trajectories(one: Path, two: Path) -> str:
    """The first trajectory that differs in anything but its seconds, with all that its tools said."""
    names = sorted({path.name for folder in (one, two) if folder.exists() for path in folder.iterdir()})
    for name in names:
        paths = [folder / name for folder in (one, two)]
        if not all(path.exists() for path in paths):
            return f"{name}: missing in one"
        told = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
        if len(told[0]) != len(told[1]):
            return f"{name}: {len(told[0])} and {len(told[1])} lines"
        for number, pair in enumerate(zip(*told, strict=True), 1):
            if pair[0] | {"seconds": 0} != pair[1] | {"seconds": 0}:
                return f"{name}:{number}"
    return ""
