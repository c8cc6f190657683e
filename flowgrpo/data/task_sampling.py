"""Choose tasks by what was seen of them, or by a curriculum: `chosen` and `eased` give the number of the next one.

    known = seen(known, 7, 0.25)                    # a quarter of a group of task 7 was right
    number = chosen(known, seed, place, count)      # the task of the group at a place of the run

The probability of a task is proportional to its priority, max(1 - success, FLOOR), where success is a running mean over
the task's groups. A task that was never seen has priority 1, as one that was never solved; the floor lets solved tasks
come up again, so that what is forgotten shows. A draw depends on the seed, the place and what is known, and on
nothing else. Draws are independent, so that a task may come up twice in an update.

    easiest = by_difficulty(tasks, "level")
    task = eased(easiest, seed, place, open_at(update, updates, len(easiest)))

A curriculum knows nothing of success: it orders the tasks once by a number of their own, and opens them bit by bit.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import ceil, isfinite
from typing import Any

from flowgrpo.data.tasks import task_at
from flowgrpo.types import BadInput, Task

FLOOR = 0.1  # priority of a task that is always solved: it comes up a tenth as often as one that never is
DECAY = 0.5  # share of what was known that stays where a group is seen, so that an old success is soon forgotten
FIRST = 0.25  # share of the tasks that a curriculum begins with
WHOLE_AT = 0.5  # share of a run after which a curriculum has opened all

Known = Mapping[int, float]  # by the number of a task that was seen: its success; a value, never changed in place
EMPTY: Known = {}


# By success -------------------------------------------------------------------------------------------------


def seen(known: Known, number: int, success: float) -> Known:
    """Update what is known of a task after a group of it, of which the share `success` was right."""
    if number < 0:
        raise BadInput(f"the number of the task is {number}, but counts from 0")
    if not 0 <= success <= 1:
        raise BadInput(f"success is {success}, but must be a share from 0 to 1")
    if number in known:
        success = DECAY * known[number] + (1 - DECAY) * success
    return {**known, number: float(success)}


def update_known(known: Known, numbers: Sequence[int], success: Mapping[int, float]) -> Known:
    """Update what is known after a training update: the tasks of its groups, and by group the share that was right.

    A group that has no share, since nothing of it could be judged, changes nothing.
    """
    for group, number in enumerate(numbers):
        if group in success:
            known = seen(known, number, success[group])
    return known


def priority(known: Known, number: int) -> float:
    """Say how often a task comes up, as a share of how often one does that was never solved."""
    return max(1.0 - known.get(number, 0.0), FLOOR)


def chosen(known: Known, seed: int, place: int, count: int) -> int:
    """The number of the task at a place of the run, of so many.

    Tasks are proposed with equal probability and taken with theirs, which takes 1 / FLOOR proposals at most on average
    however many tasks there are, and sums nothing.
    """
    if count < 1:
        raise BadInput(f"there are {count} tasks to choose from, but a draw takes at least 1")
    if place < 0:
        raise BadInput(f"the place of the group is {place}, but counts from 0")
    proposal = 0
    while True:
        digest = blake2b(b"priority:%d:%d:%d" % (seed, place, proposal)).digest()
        number, point = (int.from_bytes(half, "little") for half in (digest[:32], digest[32:]))
        if point < priority(known, number % count) * 2**256:
            return number % count
        proposal += 1


def to_json(known: Known) -> dict[str, float]:
    """Convert what is known to a JSON object, with the tasks' numbers as text."""
    return {str(number): known[number] for number in sorted(known)}


def from_json(value: Mapping[str, float]) -> Known:
    """Read what is known from the JSON object that `to_json` wrote."""
    return {int(number): success for number, success in value.items()}


# By difficulty ----------------------------------------------------------------------------------------------


def by_difficulty(tasks: Sequence[Task], field: str) -> tuple[Task, ...]:
    """The tasks from the easiest on, by a number in their metadata; equals stay in their order."""
    return tuple(sorted(tasks, key=lambda task: _difficulty(task, field)))


def _difficulty(task: Task, field: str) -> float:
    """The number, or a `BadInput` that names task and field."""
    value: Any = task.metadata.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        return value
    what = f"is {value!r:.60}, which is no number" if field in task.metadata else "is missing"
    raise BadInput(
        f"task {task.id!r}: field {field!r} {what}: give every task a number there, or name the field that holds its "
        "difficulty"
    )


def open_at(update: int, updates: int, count: int) -> int:
    """Say how many tasks may be drawn in an update of so many: a share that grows linearly from `FIRST` to all."""
    if updates < 1 or update < 0:
        raise BadInput(f"update {update} of {updates} is none: a curriculum takes at least 1, counted from 0")
    grown = min(update / (WHOLE_AT * updates), 1.0)
    return max(ceil((FIRST + (1 - FIRST) * grown) * count - 1e-9), min(count, 1))  # rounding opens no task


def eased(easiest: Sequence[Task], seed: int, place: int, opened: int) -> Task:
    """The task at a place of the run, of the first so many: an order without state, as `tasks.task_at` gives it."""
    allowed = easiest[:opened]
    return allowed[task_at(allowed, seed, place)]
