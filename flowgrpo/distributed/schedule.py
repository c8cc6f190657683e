"""Schedules that answer each event of a run with commands to workers. Pure; a master only carries them out.

    state, commands = advance(plan, state, Event("joined", worker="rollout-0", pool=ROLLOUT, capacity=2))

A *group* is all trajectories of one query; groups are numbered in the order in which they start. A group is rolled out,
judged, and trained on in one update; the update of version v makes version v + 1 of the weights.

    synchronous         groups start when the version that trains on them is there
    one_step_off        groups start one version earlier, so that rollouts continue while the trainer works
    asynchronous        an update trains on any groups that are ready, at most `staleness` versions after they started
    partial_rollouts    a slice ends after `budget` tokens of a trajectory; the trajectory is resumed in a later version

**Staleness never exceeds its bound.** A group that starts at version v is due at update v + staleness. Groups start
only while all that are under way fit into the updates before the last of them is due, `queries` to each; and an update
takes groups only if all that it leaves still fit. So (Hall's condition for deadlines) every group is trained on in
time, and none has to be dropped for being late: the schedule waits for what is due instead.

A worker that is lost gives its groups back; a result that it sends later has an old ticket and counts as a duplicate.
"""

from typing import Literal, NamedTuple

from flowgrpo.distributed.cluster_state import (
    ClusterState,
    Group,
    add_worker,
    assign,
    finish_update,
    is_training,
    release_held,
    remove_groups,
    remove_worker,
    set_groups,
    unassign,
)
from flowgrpo.types import check_range

# Pools of workers; each domain may have a pool of reward workers of its own.
ROLLOUT, REWARD, TRAIN = "rollout", "reward", "train"
Kind = Literal["joined", "lost", "rolled", "cut", "judged", "trained"]


class Plan(NamedTuple):
    """Settings and limits of a schedule; its constructors are below."""

    name: str
    queries: int  # number of groups that an update trains on
    updates: int
    staleness: int = 0  # maximal number of versions from a group's start to its update
    in_order: bool = True  # an update takes the groups that were started for it
    spare: int = 0  # further groups: dropped when enough are ready, or resumed later if there is a budget
    budget: int | None = None  # tokens of a trajectory in one slice


class Event(NamedTuple):
    """Something that happened in the cluster. The names of the fields are those of the event log."""

    kind: Kind
    worker: str = ""
    group: int = -1
    ticket: int = -1  # of the command that this answers
    pool: str = ""  # of the worker that joined; or of the reward workers that are to judge the group, if any
    capacity: int = 1  # number of groups that the worker takes at a time


class Command(NamedTuple):
    """A command to a worker, or to all trainers; `train` has several groups, the others have one."""

    kind: Literal["roll", "judge", "train", "drop"]
    groups: tuple[int, ...]
    worker: str = ""
    ticket: int = -1
    version: int = -1  # of the weights
    budget: int | None = None


# Schedules --------------------------------------------------------------------------------------------------


def synchronous(queries: int, updates: int, *, spare: int = 0) -> Plan:
    """Roll out all groups of an update with the weights that it changes."""
    return _checked(Plan("sync", queries, updates, spare=spare))


def one_step_off(queries: int, updates: int, *, spare: int = 0) -> Plan:
    """Roll out the groups of an update during the previous one."""
    return _checked(Plan("one_step_off", queries, updates, staleness=1, spare=spare))


def asynchronous(queries: int, updates: int, *, staleness: int = 2) -> Plan:
    """Never let rollouts wait, unless a group would be trained on more than `staleness` versions after its start."""
    return _checked(Plan("async", queries, updates, staleness=staleness, in_order=False))


def partial_rollouts(queries: int, updates: int, *, budget: int, staleness: int = 4, spare: int = 0) -> Plan:
    """Cut trajectories after `budget` tokens and resume them after the update, during which nothing is rolled out.

    So that enough groups end in a slice, `spare` more than an update takes are under way.
    """
    return _checked(Plan("partial", queries, updates, staleness, in_order=False, spare=spare, budget=budget))


def _checked(plan: Plan) -> Plan:
    for name, least in (("queries", 1), ("updates", 0), ("staleness", 0), ("spare", 0), ("budget", 1)):
        check_range("Plan", name, getattr(plan, name), least, whole=True, optional=True)
    return plan


# Events -----------------------------------------------------------------------------------------------------


def advance(plan: Plan, state: ClusterState, event: Event) -> tuple[ClusterState, list[Command]]:
    """The state after an event, and the commands that follow from it."""
    state = _apply_event(state, event)
    commands: list[Command] = []
    for step in (_train, _judge, _roll):
        state, more = step(plan, state)
        commands += more
    return state, commands


def is_over(plan: Plan, state: ClusterState) -> bool:
    """Whether all updates have been made."""
    return state.version >= plan.updates


def due_version(plan: Plan, group: Group) -> int:
    """The last version whose update may train on this group."""
    return group.start_version + plan.staleness


def _apply_event(state: ClusterState, event: Event) -> ClusterState:
    """The state after an event, before any command."""
    if event.kind == "joined":
        return add_worker(state, event.worker, event.pool, event.capacity)
    if event.kind == "lost":
        return remove_worker(state, event.worker)
    if event.kind == "trained":
        return finish_update(state)
    group = state.groups.get(event.group)
    if group is None or group.ticket != event.ticket:
        return state._replace(duplicates=state.duplicates + 1)
    state = unassign(state, group.worker)
    if event.kind == "cut":
        after = group._replace(phase="held")
    elif event.kind == "rolled":
        after = group._replace(phase="rolled" if event.pool else "ready", pool=event.pool)
    else:
        after = group._replace(phase="ready")
    return set_groups(state, {event.group: after._replace(worker="", ticket=-1)})


# Commands ---------------------------------------------------------------------------------------------------


def _train(plan: Plan, state: ClusterState) -> tuple[ClusterState, list[Command]]:
    """Start an update, if none is under way and its groups are ready."""
    if is_training(state) or is_over(plan, state) or state.counts.get("ready", 0) < plan.queries:
        return state, []
    batch = (_batch_in_order if plan.in_order else _batch_by_deadline)(plan, state)
    if not batch:
        return state, []
    in_training = {number: state.groups[number]._replace(phase="training") for number in batch}
    commands = [Command("train", batch, version=state.version)]
    state = set_groups(state, in_training)
    if plan.spare and plan.in_order:
        state, dropped = _drop(plan, state)
        commands += dropped
    return state, commands


def _batch_in_order(plan: Plan, state: ClusterState) -> tuple[int, ...]:
    """The first ready groups of those that were started for this update."""
    numbers = _groups_of_update(plan, state.version)
    ready = [n for n in numbers if n in state.groups and state.groups[n].phase == "ready"]
    return tuple(ready[: plan.queries]) if len(ready) >= plan.queries else ()


def _groups_of_update(plan: Plan, version: int) -> range:
    """Numbers of the groups that are started for an update."""
    count = plan.queries + plan.spare
    return range(version * count, (version + 1) * count)


def _batch_by_deadline(plan: Plan, state: ClusterState) -> tuple[int, ...]:
    """The ready groups that are due first, if all others can still be trained on in time."""
    if plan.budget is not None and state.counts.get("rolling"):
        return ()
    by_deadline = sorted(state.groups, key=lambda number: (due_version(plan, state.groups[number]), number))
    batch = [number for number in by_deadline if state.groups[number].phase == "ready"][: plan.queries]
    in_batch = set(batch)
    deadlines = [due_version(plan, state.groups[number]) for number in by_deadline if number not in in_batch]
    in_time = all(deadline >= state.version + 1 + i // plan.queries for i, deadline in enumerate(deadlines))
    return tuple(batch) if in_time else ()


def _drop(plan: Plan, state: ClusterState) -> tuple[ClusterState, list[Command]]:
    """Drop the groups of this update that it does not need, and skip those that have not started."""
    numbers = [number for number in _groups_of_update(plan, state.version) if number in state.groups]
    spare = [number for number in numbers if state.groups[number].phase != "training"]
    commands = []
    for number in spare:
        group = state.groups[number]
        commands.append(Command("drop", (number,), group.worker, group.ticket))
        state = unassign(state, group.worker)
    num_started = max(state.num_started, _groups_of_update(plan, state.version).stop)
    return remove_groups(state._replace(num_started=num_started), spare), commands


def _judge(plan: Plan, state: ClusterState) -> tuple[ClusterState, list[Command]]:
    """Assign groups that were rolled out to reward workers."""
    del plan
    commands = []
    if not state.counts.get("rolled") or not any(names for pool, names in state.idle.items() if pool != ROLLOUT):
        return state, commands
    for number in [number for number, group in state.groups.items() if group.phase == "rolled"]:
        group = state.groups[number]
        worker = next(iter(state.idle.get(group.pool, ())), "")
        if worker:
            state, ticket = assign(state, worker)
            state = set_groups(state, {number: group._replace(phase="judging", worker=worker, ticket=ticket)})
            commands.append(Command("judge", (number,), worker, ticket))
    return state, commands


def _roll(plan: Plan, state: ClusterState) -> tuple[ClusterState, list[Command]]:
    """Assign groups to rollout workers below their capacity: first the waiting ones, then new ones."""
    commands = []
    if not state.idle.get(ROLLOUT) or (plan.budget is not None and is_training(state)):
        return state, commands
    if _is_stuck(plan, state):
        state = release_held(state)
    waiting: list[int] = []
    if state.counts.get("waiting"):
        waiting = sorted(n for n, group in state.groups.items() if group.phase == "waiting")
    while state.idle[ROLLOUT]:
        worker = state.idle[ROLLOUT][0]
        if waiting:
            number = waiting.pop(0)
            group = state.groups[number]
        elif _may_start(plan, state):
            number, group = state.num_started, Group(state.version)
            state = state._replace(num_started=number + 1)
        else:
            break
        state, ticket = assign(state, worker)
        budget = None if plan.budget is None or due_version(plan, group) <= state.version else plan.budget
        state = set_groups(state, {number: group._replace(phase="rolling", worker=worker, ticket=ticket)})
        commands.append(Command("roll", (number,), worker, ticket, state.version, budget))
    return state, commands


def _is_stuck(plan: Plan, state: ClusterState) -> bool:
    """Whether nothing can happen any more unless the held groups continue."""
    phases = {phase for phase, count in state.counts.items() if count}
    return "held" in phases and phases <= {"held", "ready"} and not _may_start(plan, state)


def _may_start(plan: Plan, state: ClusterState) -> bool:
    """Whether one more group fits into the updates until it would be due."""
    num_training = state.counts.get("training", 0)
    per_update = plan.queries + plan.spare if plan.in_order else plan.queries
    first_update = state.version + bool(num_training)  # that can take it
    limit = (state.version + plan.staleness + 1 - first_update) * per_update
    if plan.budget is not None:
        limit = min(limit, plan.queries + plan.spare)
    # In order, a group belongs to the update of its number, even if a resumed run has fewer groups than were started.
    last_update = min(plan.updates, state.version + plan.staleness + 1) if plan.in_order else plan.updates
    return len(state.groups) - num_training < limit and state.num_started < last_update * per_update
