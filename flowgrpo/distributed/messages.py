"""Messages between master and workers: orders to the workers, stretches of trajectories back from them.

The master sees a `StretchSummary` of each stretch, and passes the stretch itself on by reference.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from flowgrpo.rollout.records import Played, Unfinished, from_json, to_json, unfinished_from_json, unfinished_to_json


class Order(NamedTuple):
    """Groups of one kind that a worker is to roll out."""

    kind: str  # "train", or the name of an examination, such as "validation"
    numbers: tuple[int, ...]  # of the groups
    loaded: int  # at least so many times weights must have come
    budget: int | None = None  # tokens of a trajectory
    task: int | None = None  # the number of the group's task, where it does not follow from the group's own


class Stretch(NamedTuple):
    """The trajectories of an order, so far."""

    played: tuple[Played, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()  # that go on


class StretchSummary(NamedTuple):
    """Summary of a stretch, as much as the master needs to know of it."""

    pid: int
    whole: bool
    pool: str  # of those who judge it; "" where nobody need
    oldest: int  # version of the weights that spoke, in this stretch or an earlier one
    reused: int  # tokens of earlier stretches
    lengths: tuple[int, ...]  # tokens of each trajectory that the policy chose in this stretch
    seconds: float


def versions(stretch: Stretch) -> set[int]:
    """The weights that spoke in it."""
    turns = [turn for one in stretch.played for turn in one.turns]
    turns += [turn for one in stretch.unfinished for turn in one.spoken]
    return {version for turn in turns for version in _of(turn)}


def _of(turn) -> Sequence[int]:
    """The versions that chose the tokens of a turn."""
    version = turn.version
    return [version] * bool(turn.chosen.any()) if isinstance(version, int) else version[turn.chosen].tolist()


def lengths(stretch: Stretch) -> dict[tuple[int, int], int]:
    """The tokens that the policy chose, by group and sample."""
    every = [(one, one.turns) for one in stretch.played] + [(one, one.spoken) for one in stretch.unfinished]
    return {(one.group, one.sample): sum(int(turn.chosen.sum()) for turn in turns) for one, turns in every}


def pack_stretch(stretch: Stretch) -> str:
    """The stretch as text, for a checkpoint."""
    held = [unfinished_to_json(one) for one in stretch.unfinished]
    return json.dumps({"played": [to_json(one) for one in stretch.played], "unfinished": held})


def unpack_stretch(text: str) -> Stretch:
    """The stretch that `pack_stretch` wrote."""
    value: dict[str, Any] = json.loads(text)
    played = tuple(from_json(line) for line in value["played"])
    return Stretch(played, tuple(unfinished_from_json(line) for line in value["unfinished"]))
