"""Schedules that answer each event of a run with commands to workers. Pure; a master only carries them out.

    state, commands = advance(plan, state, Event("joined", worker="rollout-0", pool=ROLLOUT, room=2))

A *group* is all trajectories of one query, and is numbered in the order in which groups begin. It is rolled out,
judged, and learned from in one update; the update of version v makes version v + 1 of the weights.

    synchronous         groups begin when the version that they are learned from is there
    one_step_off        one version earlier, so that rollouts go on while the trainer works
    asynchronous        any groups that are ready are learned from, at most `staleness` versions after they began
    partial_rollouts    a stretch ends after `budget` tokens of a trajectory; its rest goes on in a later version

**Staleness never passes its bound.** A group that begins at version v is due at update v + staleness. Groups begin only
while all that are under way fit into the updates before the last of them is due, `queries` to each; and an update takes
groups only if all that it leaves still fit. So (Hall's condition for deadlines) every group is learned from in time,
and nothing has to be thrown away for being late: the schedule waits for what is due instead.

A worker that is lost gives its groups back; what it answers later has an old ticket and is counted as a duplicate.
"""

from typing import Literal, NamedTuple

from flowgrpo.distributed.cluster_state import (
    ClusterState,
    Group,
    changed,
    freed,
    is_training,
    joined,
    released,
    removed,
    taken,
    trained,
    without,
)
from flowgrpo.types import check_range

# Pools of workers; there may be a pool of rewards for each domain.
ROLLOUT, REWARD, TRAIN = "rollout", "reward", "train"
Kind = Literal["joined", "lost", "rolled", "cut", "judged", "trained"]


class Plan(NamedTuple):
    """Settings and limits of a schedule; its constructors are below."""

    name: str
    queries: int  # groups that an update learns from
    updates: int
    staleness: int = 0  # versions, at most, from a group's beginning to its update
    in_order: bool = True  # an update takes the groups that began for it
    spare: int = 0  # groups beyond those: dropped when enough are ready; or, where there is a budget, going on later
    budget: int | None = None  # tokens of a trajectory in one stretch


class Event(NamedTuple):
    """Something that happened."""

    kind: Kind
    worker: str = ""
    group: int = -1
    ticket: int = -1  # of the command that this answers
    pool: str = ""  # of the worker that joined; or of those who judge the group that was rolled out, if any do
    room: int = 1  # groups that the worker takes at a time


class Command(NamedTuple):
    """Something for a worker to do; `train` has its groups, the others one."""

    kind: Literal["roll", "judge", "train", "drop"]
    groups: tuple[int, ...]
    worker: str = ""
    ticket: int = -1
    version: int = -1  # of the weights
    budget: int | None = None


# Schedules --------------------------------------------------------------------------------------------------


def synchronous(queries: int, updates: int, *, spare: int = 0) -> Plan:
    """All groups of an update are rolled out with the weights that it changes."""
    return _checked(Plan("sync", queries, updates, spare=spare))


def one_step_off(queries: int, updates: int, *, spare: int = 0) -> Plan:
    """The groups of an update are rolled out while the one before it is made."""
    return _checked(Plan("one_step_off", queries, updates, staleness=1, spare=spare))


def asynchronous(queries: int, updates: int, *, staleness: int = 2) -> Plan:
    """Rollouts never wait, unless a group would be learned from more than `staleness` versions after it began."""
    return _checked(Plan("async", queries, updates, staleness=staleness, in_order=False))


def partial_rollouts(queries: int, updates: int, *, budget: int, staleness: int = 4, spare: int = 0) -> Plan:
    """Nothing is rolled out during an update; what has not ended after `budget` tokens goes on afterwards.

    So that enough groups end in a stretch, `spare` more than an update takes are under way.
    """
    return _checked(Plan("partial", queries, updates, staleness, in_order=False, spare=spare, budget=budget))


def _checked(plan: Plan) -> Plan:
    for name, least in (("queries", 1), ("updates", 0), ("staleness", 0), ("spare", 0), ("budget", 1)):
        check_range("Plan", name, getattr(plan, name), least, whole=True, optional=True)
    return plan


# What happens -----------------------------------------------------------------------------------------------


def advance(plan: Plan, state: ClusterState, event: Event) -> tuple[ClusterState, list[Command]]:
    """The state after an event, and what is to be done now."""
    state = _heard(state, event)
    commands: list[Command] = []
    for step in (_train, _judge, _roll):
        state, more = step(plan, state)
        commands += more
    return state, commands


def is_over(plan: Plan, state: ClusterState) -> bool:
    """Say whether all updates are made."""
    return state.version >= plan.updates


def due(plan: Plan, group: Group) -> int:
    """The last version that may be changed by what this group shows."""
    return group.began + plan.staleness


def _heard(state: ClusterState, event: Event) -> ClusterState:
    """Apply to the state what an event changes by itself, before any command follows from it."""
    if event.kind == "joined":
        return joined(state, event.worker, event.pool, event.room)
    if event.kind == "lost":
        return without(state, event.worker)
    if event.kind == "trained":
        return trained(state)
    group = state.groups.get(event.group)
    if group is None or group.ticket != event.ticket:
        return state._replace(duplicates=state.duplicates + 1)
    state = freed(state, group.worker)
    if event.kind == "cut":
        after = group._replace(phase="held")
    elif event.kind == "rolled":
        after = group._replace(phase="rolled" if event.pool else "ready", pool=event.pool)
    else:
        after = group._replace(phase="ready")
    return changed(state, {event.group: after._replace(worker="", ticket=-1)})


# What is to be done -----------------------------------------------------------------------------------------


def _train(plan: Plan, state: ClusterState) -> tuple[ClusterState, list[Command]]:
    """Begin an update, if one is not being made and its groups are there."""
    if is_training(state) or is_over(plan, state) or state.counts.get("ready", 0) < plan.queries:
        return state, []
    batch = (_batch_in_order if plan.in_order else _batch_by_deadline)(plan, state)
    if not batch:
        return state, []
    taken = {number: state.groups[number]._replace(phase="training") for number in batch}
    commands = [Command("train", batch, version=state.version)]
    state = changed(state, taken)
    if plan.spare and plan.in_order:
        state, dropped = _drop(plan, state)
        commands += dropped
    return state, commands


def _batch_in_order(plan: Plan, state: ClusterState) -> tuple[int, ...]:
    """The first groups that are ready of those that began for this update."""
    own = _births(plan, state.version)
    ready = [n for n in own if n in state.groups and state.groups[n].phase == "ready"]
    return tuple(ready[: plan.queries]) if len(ready) >= plan.queries else ()


def _births(plan: Plan, version: int) -> range:
    """The groups that begin for an update."""
    each = plan.queries + plan.spare
    return range(version * each, (version + 1) * each)


def _batch_by_deadline(plan: Plan, state: ClusterState) -> tuple[int, ...]:
    """The ready groups that are due first, if all that are left can still be learned from in time."""
    if plan.budget is not None and state.counts.get("rolling"):
        return ()
    by_deadline = sorted(state.groups, key=lambda number: (due(plan, state.groups[number]), number))
    batch = [number for number in by_deadline if state.groups[number].phase == "ready"][: plan.queries]
    taken = set(batch)
    left = [due(plan, state.groups[number]) for number in by_deadline if number not in taken]
    in_time = all(last >= state.version + 1 + i // plan.queries for i, last in enumerate(left))
    return tuple(batch) if in_time else ()


def _drop(plan: Plan, state: ClusterState) -> tuple[ClusterState, list[Command]]:
    """Of this update's groups those that are not needed, whether they have begun or not."""
    own = [number for number in _births(plan, state.version) if number in state.groups]
    spare = [number for number in own if state.groups[number].phase != "training"]
    commands = []
    for number in spare:
        group = state.groups[number]
        commands.append(Command("drop", (number,), group.worker, group.ticket))
        state = freed(state, group.worker)
    begun = max(state.begun, _births(plan, state.version).stop)
    return removed(state._replace(begun=begun), spare), commands


def _judge(plan: Plan, state: ClusterState) -> tuple[ClusterState, list[Command]]:
    """Give what was rolled out to those who judge it."""
    del plan
    commands = []
    if not state.counts.get("rolled") or not any(names for pool, names in state.idle.items() if pool != ROLLOUT):
        return state, commands
    for number in [number for number, group in state.groups.items() if group.phase == "rolled"]:
        group = state.groups[number]
        worker = next(iter(state.idle.get(group.pool, ())), "")
        if worker:
            state, ticket = taken(state, worker)
            state = changed(state, {number: group._replace(phase="judging", worker=worker, ticket=ticket)})
            commands.append(Command("judge", (number,), worker, ticket))
    return state, commands


def _roll(plan: Plan, state: ClusterState) -> tuple[ClusterState, list[Command]]:
    """Give groups to workers that have room: first those that wait, then new ones."""
    commands = []
    if not state.idle.get(ROLLOUT) or (plan.budget is not None and is_training(state)):
        return state, commands
    if _is_stuck(plan, state):
        state = released(state)
    waits = bool(state.counts.get("waiting"))
    waiting = sorted(n for n, group in state.groups.items() if group.phase == "waiting") if waits else []
    while state.idle[ROLLOUT]:
        worker = state.idle[ROLLOUT][0]
        if waiting:
            number = waiting.pop(0)
            group = state.groups[number]
        elif _may_begin(plan, state):
            number, group = state.begun, Group(state.version)
            state = state._replace(begun=number + 1)
        else:
            break
        state, ticket = taken(state, worker)
        budget = None if plan.budget is None or due(plan, group) <= state.version else plan.budget
        state = changed(state, {number: group._replace(phase="rolling", worker=worker, ticket=ticket)})
        commands.append(Command("roll", (number,), worker, ticket, state.version, budget))
    return state, commands


def _is_stuck(plan: Plan, state: ClusterState) -> bool:
    """Say whether nothing happens any more unless what is held goes on."""
    phases = {phase for phase, count in state.counts.items() if count}
    return "held" in phases and phases <= {"held", "ready"} and not _may_begin(plan, state)


def _may_begin(plan: Plan, state: ClusterState) -> bool:
    """Say whether one more group fits into the updates until it would be due."""
    training = state.counts.get("training", 0)
    each = plan.queries + plan.spare if plan.in_order else plan.queries
    coming = state.version + bool(training)  # the update that can take it first
    room = (state.version + plan.staleness + 1 - coming) * each
    if plan.budget is not None:
        room = min(room, plan.queries + plan.spare)
    # In order, a group belongs to the update of its number, also where a run goes on with fewer groups than were begun.
    last = min(plan.updates, state.version + plan.staleness + 1) if plan.in_order else plan.updates
    return len(state.groups) - training < room and state.begun < last * each
