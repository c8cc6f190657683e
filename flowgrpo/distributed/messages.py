"""Messages between the master and its workers: jobs for the workers, slices of rolled-out trajectories in return.

The master sees only a `SliceSummary` of each slice, and passes the slice itself on by reference.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from flowgrpo.rollout.records import (
    PartialTrajectory,
    RecordedTrajectory,
    from_json,
    partial_from_json,
    partial_to_json,
    to_json,
)
from flowgrpo.types import JSON, Turn


class RolloutJob(NamedTuple):
    """What a worker is to roll out: groups of an update, or tasks of an evaluation."""

    kind: str  # "train", or the name of an evaluation, such as "validation"
    indices: tuple[int, ...]  # of the groups, or of the tasks
    min_loads: int  # the worker waits until it has loaded weights this many times
    budget: int | None = None  # tokens of a trajectory in this slice; None: up to its end
    task: int | None = None  # index of the group's task, if it does not follow from the group's own index


class RolloutSlice(NamedTuple):
    """Result of a job: the trajectories that have ended, and those that a later job can resume."""

    trajectories: tuple[RecordedTrajectory, ...] = ()
    unfinished: tuple[PartialTrajectory, ...] = ()


class SliceSummary(NamedTuple):
    """What the master needs to know of a slice. The names of the fields are those of the event log."""

    pid: int
    whole: bool  # no trajectory is unfinished
    pool: str  # of the reward workers that are to judge it; "" if none need
    oldest: int  # oldest version of the weights that sampled a token, in this slice or an earlier one
    reused: int  # number of tokens from earlier slices
    lengths: tuple[int, ...]  # by trajectory: number of tokens sampled in this slice
    seconds: float


def versions(rollout_slice: RolloutSlice) -> set[int]:
    """Versions of the weights that sampled its tokens."""
    model_versions: set[int] = set()
    for _, turns in _turns(rollout_slice):
        for turn in turns:
            if not isinstance(turn.version, int):
                model_versions.update(turn.version[turn.chosen].tolist())
            elif turn.chosen.any():
                model_versions.add(turn.version)
    return model_versions


def lengths(rollout_slice: RolloutSlice) -> dict[tuple[int, int], int]:
    """Number of sampled tokens of each trajectory, by (group, sample)."""
    return {key: sum(int(turn.chosen.sum()) for turn in turns) for key, turns in _turns(rollout_slice)}


def _turns(rollout_slice: RolloutSlice) -> list[tuple[tuple[int, int], Sequence[Turn]]]:
    """((group, sample), turns) of each trajectory, with the action that was cut as a turn."""
    turns = [((item.group, item.sample), item.turns) for item in rollout_slice.trajectories]
    return turns + [((item.group, item.sample), item.all_turns) for item in rollout_slice.unfinished]


def pack_slice(rollout_slice: RolloutSlice) -> str:
    """The slice as text, for a checkpoint."""
    unfinished = [partial_to_json(item) for item in rollout_slice.unfinished]
    return json.dumps({"played": [to_json(item) for item in rollout_slice.trajectories], "unfinished": unfinished})


def unpack_slice(text: str) -> RolloutSlice:
    """The slice that `pack_slice` wrote."""
    value: dict[str, JSON] = json.loads(text)
    trajectories = tuple(from_json(line) for line in value["played"])
    return RolloutSlice(trajectories, tuple(partial_from_json(line) for line in value["unfinished"]))
