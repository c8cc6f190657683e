"""State of a cluster as values that never change in place: groups and workers under way, and the replay buffer.

    state, ticket = assign(state, "rollout-0")                         # the worker has one group more
    state = set_groups(state, {7: group._replace(phase="rolling", worker="rollout-0", ticket=ticket)})
    buffer = add_to_buffer(buffer, 7, item, version=3)                 # an item stands for a group's trajectories
    taken, buffer = take_groups(buffer, (5, 7))

`schedule` decides by the state, and a checkpoint holds it without its workers. The number of groups in each phase is
kept up to date, so that an event is cheap even among thousands of groups.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from flowgrpo.types import JSON, BadInput

Phase = Literal["waiting", "rolling", "held", "rolled", "judging", "ready", "training"]
OLD_NAMES = {"begun": "num_started", "tickets": "next_ticket", "began": "start_version"}  # in earlier checkpoints


class Group(NamedTuple):
    """A group that is under way."""

    start_version: int  # of the weights when it was started
    phase: Phase = "waiting"
    worker: str = ""
    ticket: int = -1
    pool: str = ""  # of the reward workers that judge it


class WorkerState(NamedTuple):
    """A worker that has joined."""

    pool: str
    capacity: int  # number of groups that it works on at a time
    busy: int = 0  # number of groups that it works on now


class ClusterState(NamedTuple):
    """Everything that a schedule decides by."""

    version: int = 0
    num_started: int = 0  # groups so far
    next_ticket: int = 0
    duplicates: int = 0  # number of results for old tickets
    groups: Mapping[int, Group] = {}
    workers: Mapping[str, WorkerState] = {}
    idle: Mapping[str, tuple[str, ...]] = {}  # by pool: workers below their capacity; the first gets the next group
    counts: Mapping[str, int] = {}  # number of groups by phase


# Workers ----------------------------------------------------------------------------------------------------


def add_worker(state: ClusterState, name: str, pool: str, capacity: int) -> ClusterState:
    """Add a worker, which gets the next group of its pool."""
    return _put_first(state._replace(workers={**state.workers, name: WorkerState(pool, capacity)}), pool, name)


def remove_worker(state: ClusterState, name: str) -> ClusterState:
    """Remove a worker; its groups wait for another one."""
    previous: dict[Phase, Phase] = {"rolling": "waiting", "judging": "rolled"}
    returned = {
        number: group._replace(phase=previous[group.phase], worker="", ticket=-1)
        for number, group in state.groups.items()
        if group.worker == name
    }
    workers = {other: worker for other, worker in state.workers.items() if other != name}
    idle = {pool: tuple(other for other in names if other != name) for pool, names in state.idle.items()}
    return set_groups(state._replace(workers=workers, idle=idle), returned)


def assign(state: ClusterState, name: str) -> tuple[ClusterState, int]:
    """Give one group more to the first idle worker of its pool, which becomes the last -> (state, new ticket)."""
    worker = state.workers[name]
    idle = state.idle[worker.pool][1:] + ((name,) if worker.busy + 1 < worker.capacity else ())
    workers = {**state.workers, name: worker._replace(busy=worker.busy + 1)}
    state = state._replace(workers=workers, idle={**state.idle, worker.pool: idle}, next_ticket=state.next_ticket + 1)
    return state, state.next_ticket - 1


def unassign(state: ClusterState, name: str) -> ClusterState:
    """Take one group from a worker, if it still exists."""
    if name not in state.workers:
        return state
    worker = state.workers[name]
    state = state._replace(workers={**state.workers, name: worker._replace(busy=worker.busy - 1)})
    return _put_first(state, worker.pool, name) if worker.busy == worker.capacity else state


def _put_first(state: ClusterState, pool: str, name: str) -> ClusterState:
    return state._replace(idle={**state.idle, pool: (name, *state.idle.get(pool, ()))})


# Groups -----------------------------------------------------------------------------------------------------


def set_groups(state: ClusterState, changes: Mapping[int, Group]) -> ClusterState:
    """Add or replace these groups."""
    before = [state.groups[number].phase for number in changes if number in state.groups]
    counts = _recount(state.counts, before, [group.phase for group in changes.values()])
    return state._replace(groups={**state.groups, **changes}, counts=counts)


def remove_groups(state: ClusterState, numbers: Iterable[int]) -> ClusterState:
    """Remove these groups."""
    removed = set(numbers)
    counts = _recount(state.counts, [state.groups[number].phase for number in removed], [])
    return state._replace(groups={n: group for n, group in state.groups.items() if n not in removed}, counts=counts)


def release_held(state: ClusterState) -> ClusterState:
    """Let the held groups continue: they wait for a worker again."""
    if not state.counts.get("held"):
        return state
    held = {n: group._replace(phase="waiting") for n, group in state.groups.items() if group.phase == "held"}
    return set_groups(state, held)


def is_training(state: ClusterState) -> bool:
    """Whether an update is under way."""
    return state.counts.get("training", 0) > 0


def finish_update(state: ClusterState) -> ClusterState:
    """The state after the update that is under way."""
    trained = [number for number, group in state.groups.items() if group.phase == "training"]
    return release_held(remove_groups(state._replace(version=state.version + 1), trained))


def _recount(counts: Mapping[str, int], before: Iterable[str], after: Iterable[str]) -> dict[str, int]:
    updated = dict(counts)
    for phases, difference in ((before, -1), (after, 1)):
        for phase in phases:
            updated[phase] = updated.get(phase, 0) + difference
    return {phase: count for phase, count in updated.items() if count}


# Checkpoints ------------------------------------------------------------------------------------------------


def resume(state: ClusterState, available: Iterable[int] = (), *, next_ticket: int = 0) -> ClusterState:
    """The state for new workers. Groups whose trajectories are `available` continue where they were, all others are
    rolled out from the start. Tickets continue after the `next_ticket` of the state before, if that is later."""
    available = set(available)
    previous: dict[Phase, Phase] = {"rolling": "waiting", "judging": "rolled", "training": "ready"}
    groups = {
        number: group._replace(
            phase=previous.get(group.phase, group.phase) if number in available else "waiting", worker="", ticket=-1
        )
        for number, group in state.groups.items()
    }
    return set_groups(state._replace(workers={}, idle={}, next_ticket=max(next_ticket, state.next_ticket)), groups)


def to_json(state: ClusterState) -> dict[str, JSON]:
    """The state as JSON, without its workers."""
    groups = {str(number): group._asdict() for number, group in state.groups.items()}
    return state._asdict() | {"groups": groups, "workers": {}, "idle": {}}


def from_json(value: Mapping[str, JSON]) -> ClusterState:
    """The state that `to_json` wrote, in this version or an earlier one."""
    groups = {int(number): Group(**_rename(group)) for number, group in value["groups"].items()}
    return ClusterState(**{**_rename(value), "groups": groups, "workers": {}, "idle": {}})


def _rename(value: Mapping[str, JSON]) -> dict[str, JSON]:
    return {OLD_NAMES.get(name, name): field for name, field in value.items()}


class BufferedGroup(NamedTuple):
    """A group in the replay buffer."""

    item: Any
    version: int  # oldest version of the weights that sampled its tokens


Buffer = Mapping[int, BufferedGroup]  # by the number of the group
EMPTY_BUFFER: Buffer = {}


def add_to_buffer(buffer: Buffer, number: int, item: Any, *, version: int) -> Buffer:
    """Add a group, or replace its item; the oldest version stays."""
    if number in buffer:
        version = min(version, buffer[number].version)
    return {**buffer, number: BufferedGroup(item, version)}


def take_groups(buffer: Buffer, numbers: Iterable[int]) -> tuple[list[BufferedGroup], Buffer]:
    """Take groups out -> (the groups in this order, the buffer without them)."""
    numbers = list(numbers)
    missing = [number for number in numbers if number not in buffer]
    if missing:
        raise BadInput(f"the buffer does not hold group {missing[0]}: it has {len(buffer)} others")
    return [buffer[number] for number in numbers], drop_groups(buffer, numbers)


def drop_groups(buffer: Buffer, numbers: Iterable[int]) -> Buffer:
    """The buffer without these groups; those that it does not hold are ignored."""
    dropped = set(numbers)
    return {number: group for number, group in buffer.items() if number not in dropped}
