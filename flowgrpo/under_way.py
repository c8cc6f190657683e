"""Groups and workers under way in a cluster, as a value that is never changed in place.

    state, ticket = taken(state, "rollout-0")                          # it has a group more; the command's ticket
    state = changed(state, {7: group._replace(phase="rolling", worker="rollout-0", ticket=ticket)})

`schedule` decides by this value, and a checkpoint holds it without its workers. How many groups are in which phase is
counted along, so that an event costs little where there are thousands.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

Phase = Literal["waiting", "rolling", "held", "rolled", "judging", "ready", "training"]


class Group(NamedTuple):
    """A group that is under way."""

    began: int  # the version that it began with
    phase: Phase = "waiting"
    worker: str = ""
    ticket: int = -1
    pool: str = ""  # of those who judge it


class Worker(NamedTuple):
    """A worker that is there."""

    pool: str
    room: int
    busy: int = 0


class State(NamedTuple):
    """All that a schedule knows."""

    version: int = 0
    begun: int = 0  # groups so far
    tickets: int = 0
    duplicates: int = 0  # answers to old tickets
    groups: Mapping[int, Group] = {}
    workers: Mapping[str, Worker] = {}
    idle: Mapping[str, tuple[str, ...]] = {}  # by pool: workers that have room, who is to be asked first
    counts: Mapping[str, int] = {}  # groups by phase


# Workers ----------------------------------------------------------------------------------------------------


def joined(state: State, name: str, pool: str, room: int) -> State:
    """The state with one worker more."""
    return _asked_first(state._replace(workers={**state.workers, name: Worker(pool, room)}), pool, name)


def without(state: State, name: str) -> State:
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


def taken(state: State, name: str) -> tuple[State, int]:
    """The worker, who is to be asked first, has one group more, and is asked last from now on; and a new ticket."""
    one = state.workers[name]
    rest = state.idle[one.pool][1:] + ((name,) if one.busy + 1 < one.room else ())
    workers = {**state.workers, name: one._replace(busy=one.busy + 1)}
    state = state._replace(workers=workers, idle={**state.idle, one.pool: rest}, tickets=state.tickets + 1)
    return state, state.tickets - 1


def freed(state: State, name: str) -> State:
    """The worker has one group less, if it is still there."""
    if name not in state.workers:
        return state
    one = state.workers[name]
    state = state._replace(workers={**state.workers, name: one._replace(busy=one.busy - 1)})
    return _asked_first(state, one.pool, name) if one.busy == one.room else state


def _asked_first(state: State, pool: str, name: str) -> State:
    return state._replace(idle={**state.idle, pool: (name, *state.idle.get(pool, ()))})


# Groups -----------------------------------------------------------------------------------------------------


def changed(state: State, changes: Mapping[int, Group]) -> State:
    """The state with these groups as they are now."""
    before = [state.groups[number].phase for number in changes if number in state.groups]
    counts = _counted(state.counts, before, [group.phase for group in changes.values()])
    return state._replace(groups={**state.groups, **changes}, counts=counts)


def removed(state: State, numbers: Iterable[int]) -> State:
    """The state without these groups."""
    gone = set(numbers)
    counts = _counted(state.counts, [state.groups[number].phase for number in gone], [])
    return state._replace(groups={n: group for n, group in state.groups.items() if n not in gone}, counts=counts)


def released(state: State) -> State:
    """Let the groups that are held go on: they wait for a worker again."""
    if not state.counts.get("held"):
        return state
    held = {n: group._replace(phase="waiting") for n, group in state.groups.items() if group.phase == "held"}
    return changed(state, held)


def is_training(state: State) -> bool:
    """Whether an update is being made."""
    return state.counts.get("training", 0) > 0


def trained(state: State) -> State:
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


def resumed(state: State, kept: Iterable[int] = (), *, tickets: int = 0) -> State:
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


def to_json(state: State) -> dict:
    """The state as JSON holds it."""
    groups = {str(number): group._asdict() for number, group in state.groups.items()}
    return state._asdict() | {"groups": groups, "workers": {}, "idle": {}}


def from_json(value: Mapping) -> State:
    """The state that `to_json` wrote; its workers are gone."""
    groups = {int(number): Group(**group) for number, group in value["groups"].items()}
    return State(**{**value, "groups": groups, "workers": {}, "idle": {}})
