"""Keep what is under way in a cluster as values that never change in place: groups and workers, and the replay buffer.

    state, ticket = taken(state, "rollout-0")                          # it has a group more; the command's ticket
    state = changed(state, {7: group._replace(phase="rolling", worker="rollout-0", ticket=ticket)})
    buffer = add(buffer, 7, item, version=3)                           # an item stands for a group's trajectories
    kept, buffer = take_groups(buffer, (5, 7))

`schedule` decides by the state, and a checkpoint holds it without its workers. How many groups are in which phase is
counted along, so that an event costs little where there are thousands.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from flowgrpo.types import BadInput

Phase = Literal["waiting", "rolling", "held", "rolled", "judging", "ready", "training"]


class Group(NamedTuple):
    """A group that is under way."""

    began: int  # the version that it began with
    phase: Phase = "waiting"
    worker: str = ""
    ticket: int = -1
    pool: str = ""  # of those who judge it


class WorkerState(NamedTuple):
    """A worker that is there."""

    pool: str
    room: int
    busy: int = 0


class ClusterState(NamedTuple):
    """All that a schedule knows."""

    version: int = 0
    begun: int = 0  # groups so far
    tickets: int = 0
    duplicates: int = 0  # answers to old tickets
    groups: Mapping[int, Group] = {}
    workers: Mapping[str, WorkerState] = {}
    idle: Mapping[str, tuple[str, ...]] = {}  # by pool: workers that have room, who is to be asked first
    counts: Mapping[str, int] = {}  # groups by phase


# Workers ----------------------------------------------------------------------------------------------------


def joined(state: ClusterState, name: str, pool: str, room: int) -> ClusterState:
    """The state with one worker more."""
    return _asked_first(state._replace(workers={**state.workers, name: WorkerState(pool, room)}), pool, name)


def without(state: ClusterState, name: str) -> ClusterState:
    """The worker is gone, and what it was doing is to be done by another."""
    again: dict[Phase, Phase] = {"rolling": "waiting", "judging": "rolled"}
    given = {
        number: group._replace(phase=again[group.phase], worker="", ticket=-1)
        for number, group in state.groups.items()
        if group.worker == name
    }
    workers = {other: one for other, one in state.workers.items() if other != name}
    idle = {pool: tuple(other for other in names if other != name) for pool, names in state.idle.items()}
    return changed(state._replace(workers=workers, idle=idle), given)


def taken(state: ClusterState, name: str) -> tuple[ClusterState, int]:
    """The worker, who is to be asked first, has one group more, and is asked last from now on; and a new ticket."""
    one = state.workers[name]
    rest = state.idle[one.pool][1:] + ((name,) if one.busy + 1 < one.room else ())
    workers = {**state.workers, name: one._replace(busy=one.busy + 1)}
    state = state._replace(workers=workers, idle={**state.idle, one.pool: rest}, tickets=state.tickets + 1)
    return state, state.tickets - 1


def freed(state: ClusterState, name: str) -> ClusterState:
    """The worker has one group less, if it is still there."""
    if name not in state.workers:
        return state
    one = state.workers[name]
    state = state._replace(workers={**state.workers, name: one._replace(busy=one.busy - 1)})
    return _asked_first(state, one.pool, name) if one.busy == one.room else state


def _asked_first(state: ClusterState, pool: str, name: str) -> ClusterState:
    return state._replace(idle={**state.idle, pool: (name, *state.idle.get(pool, ()))})


# Groups -----------------------------------------------------------------------------------------------------


def changed(state: ClusterState, changes: Mapping[int, Group]) -> ClusterState:
    """The state with these groups as they are now."""
    before = [state.groups[number].phase for number in changes if number in state.groups]
    counts = _counted(state.counts, before, [group.phase for group in changes.values()])
    return state._replace(groups={**state.groups, **changes}, counts=counts)


def removed(state: ClusterState, numbers: Iterable[int]) -> ClusterState:
    """The state without these groups."""
    gone = set(numbers)
    counts = _counted(state.counts, [state.groups[number].phase for number in gone], [])
    return state._replace(groups={n: group for n, group in state.groups.items() if n not in gone}, counts=counts)


def released(state: ClusterState) -> ClusterState:
    """Let the groups that are held go on: they wait for a worker again."""
    if not state.counts.get("held"):
        return state
    held = {n: group._replace(phase="waiting") for n, group in state.groups.items() if group.phase == "held"}
    return changed(state, held)


def is_training(state: ClusterState) -> bool:
    """Say whether an update is being made."""
    return state.counts.get("training", 0) > 0


def trained(state: ClusterState) -> ClusterState:
    """The state after the update that is being made."""
    learned = [number for number, group in state.groups.items() if group.phase == "training"]
    return released(removed(state._replace(version=state.version + 1), learned))


def _counted(counts: Mapping[str, int], before: Iterable[str], after: Iterable[str]) -> dict[str, int]:
    found = dict(counts)
    for phases, by in ((before, -1), (after, 1)):
        for phase in phases:
            found[phase] = found.get(phase, 0) + by
    return {phase: count for phase, count in found.items() if count}


# Checkpoints ------------------------------------------------------------------------------------------------


def resumed(state: ClusterState, kept: Iterable[int] = (), *, tickets: int = 0) -> ClusterState:
    """The state for new workers: groups that are `kept`, whose trajectories are at hand, are where they were, and all
    others are rolled out from their beginning. Tickets go on after those that were given since."""
    kept = set(kept)
    again: dict[Phase, Phase] = {"rolling": "waiting", "judging": "rolled", "training": "ready"}
    groups = {
        number: group._replace(
            phase=again.get(group.phase, group.phase) if number in kept else "waiting", worker="", ticket=-1
        )
        for number, group in state.groups.items()
    }
    return changed(state._replace(workers={}, idle={}, tickets=max(tickets, state.tickets)), groups)


def to_json(state: ClusterState) -> dict:
    """The state as JSON holds it."""
    groups = {str(number): group._asdict() for number, group in state.groups.items()}
    return state._asdict() | {"groups": groups, "workers": {}, "idle": {}}


def from_json(value: Mapping) -> ClusterState:
    """The state that `to_json` wrote; its workers are gone."""
    groups = {int(number): Group(**group) for number, group in value["groups"].items()}
    return ClusterState(**{**value, "groups": groups, "workers": {}, "idle": {}})


class BufferedGroup(NamedTuple):
    """A group in the buffer."""

    item: Any
    version: int  # of the oldest weights that spoke


Buffer = Mapping[int, BufferedGroup]  # by the number of the group
EMPTY: Buffer = {}


def add(buffer: Buffer, number: int, item: Any, *, version: int) -> Buffer:
    """The buffer with a group, in the place of what it held of it; the oldest version stays."""
    if number in buffer:
        version = min(version, buffer[number].version)
    return {**buffer, number: BufferedGroup(item, version)}


def take_groups(buffer: Buffer, numbers: Iterable[int]) -> tuple[list[BufferedGroup], Buffer]:
    """Take these groups out: give what is kept of them, in this order, and the buffer without them."""
    numbers = list(numbers)
    missing = [number for number in numbers if number not in buffer]
    if missing:
        raise BadInput(f"the buffer does not hold group {missing[0]}: it has {len(buffer)} others")
    return [buffer[number] for number in numbers], drop(buffer, numbers)


def drop(buffer: Buffer, numbers: Iterable[int]) -> Buffer:
    """The buffer without these groups, whether it had them or not."""
    gone = set(numbers)
    return {number: kept for number, kept in buffer.items() if number not in gone}
