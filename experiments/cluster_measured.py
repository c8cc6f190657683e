"""Measurements of a cluster's run, read from its log of events, and the costs of a simulation drawn from them."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.cluster_plan import plan_of
from flowgrpo.distributed.event_log import read_events
from flowgrpo.learner.folder import read_run
from flowgrpo.schedule import Plan
from flowgrpo.simulation import Costs
from flowgrpo.types import BadInput


class Measured(NamedTuple):
    """A run of a cluster, by the clock."""

    plan: Plan
    workers: int
    room: int
    judges: int
    stretches: list[tuple[int, float]]  # tokens of the longest trajectory, seconds
    lengths: list[np.ndarray]  # tokens of the trajectories of a group
    judging: list[float]  # seconds of a group
    training: list[float]  # seconds of an update
    iteration_seconds: float  # median


def measured_run(folder: Path) -> Measured:
    """Read off the log of a run that was not disturbed; its first update, which compiles, is left out."""
    settings = read_run(folder)["settings"]
    if "schedule" not in settings:
        raise BadInput(f"{folder} is no cluster's run")
    lines = list(read_events(folder / "events.jsonl"))
    trains = [line["at"] for line in lines if line["what"] == "train"]
    dones = [line for line in lines if line["what"] == "trained"]
    if len(trains) < 3 or not dones:
        raise BadInput(f"{folder} has made {len(trains)} updates: give one of at least 3")
    late = [line for line in lines if line["at"] > trains[0]]
    joined = [line["event"] for line in lines if line["what"] == "event" and line["event"]["kind"] == "joined"]
    rolled = [line for line in late if line["what"] == "rolled"]
    return Measured(
        plan=plan_of(settings),
        workers=len({event["worker"] for event in joined if event["pool"] == "rollout"}),
        room=max(event.get("room", 1) for event in joined),
        judges=len({event["worker"] for event in joined if event["pool"] != "rollout"}),
        stretches=[(max(line["lengths"]), line["seconds"]) for line in rolled],
        lengths=[np.array(line["lengths"]) for line in rolled if line["whole"]],
        judging=[line["seconds"] for line in late if line["what"] == "judged"],
        training=[line["seconds"] for line in dones[1:]],
        iteration_seconds=float(np.median(iterations(lines))),
    )


def iterations(lines: list[dict[str, Any]]) -> list[float]:
    """Seconds from update to update, where nothing was examined or saved in between; the first one is left out."""
    found, last, starts = [], None, 0
    for line in lines:
        if line["what"] == "train":
            starts += 1
            found += [line["at"] - last] if last is not None and starts > 2 else []
            last = line["at"]
        elif line["what"] in ("saved", "resumed", "lost"):
            last = None
    if not found:
        raise BadInput("every update of this run was examined: give a run whose checkpoints are further apart")
    return found


def costs_of(run: Measured) -> Costs:
    """The costs of a simulation, drawn from what was measured; seconds of a stretch by a line through its tokens."""
    tokens, seconds = np.array(run.stretches).T
    slope = max(float(np.polyfit(tokens, seconds, 1)[0]), 0.0) if len(set(tokens)) > 1 else 0.0
    return Costs(
        lengths=lambda random: run.lengths[int(random.integers(len(run.lengths)))],
        token_seconds=slope,
        overhead_seconds=max(float(np.mean(seconds) - slope * np.mean(tokens)), 0.0),
        judge_seconds=lambda random: run.judging[int(random.integers(len(run.judging)))] if run.judging else 0.0,
        train_seconds=float(np.median(run.training)),
    )
