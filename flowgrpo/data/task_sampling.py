"""Sample tasks by their success rates (`sample_task`), or by a curriculum (`curriculum_task`).

    rates = update_rate(rates, 7, 0.25)                 # a quarter of a group of task 7 was correct
    number = sample_task(rates, seed, index, count)     # number of the task of the run's group `index`

The probability of a task is proportional to its priority, max(1 - success, MIN_PRIORITY), where success is a running
mean over the task's groups. A task that was never seen has priority 1, like one that was never solved; the floor lets
solved tasks come up again, so that forgetting shows. A draw depends on the seed, the index and the rates, and on
nothing else. Draws are independent: a task may come up twice in an update.

    easiest = sort_by_difficulty(tasks, "level")
    task = curriculum_task(easiest, seed, index, num_open_tasks(update, updates, len(easiest)))

A curriculum ignores success: it sorts the tasks once by a number of their own, and opens more of them over the run.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import ceil, isfinite
from typing import Any

from flowgrpo.data.tasks import task_at
from flowgrpo.types import BadInput, Task

MIN_PRIORITY = 0.1  # of a task that is always solved: it comes up a tenth as often as one that never is
DECAY = 0.5  # weight of the old rate when a group is seen, so that an old success is soon forgotten
INITIAL_FRACTION = 0.25  # of the tasks, with which a curriculum starts
COMPLETE_AT = 0.5  # fraction of a run after which a curriculum has opened all tasks

SuccessRates = Mapping[
    int, float
]  # by the number of a task that was seen: its success; a value, never changed in index
NO_RATES: SuccessRates = {}


# By success -------------------------------------------------------------------------------------------------


def update_rate(rates: SuccessRates, number: int, success: float) -> SuccessRates:
    """The rates after a group of a task, of which the fraction `success` was correct."""
    if number < 0:
        raise BadInput(f"the number of the task is {number}, but counts from 0")
    if not 0 <= success <= 1:
        raise BadInput(f"success is {success}, but must be a fraction from 0 to 1")
    if number in rates:
        success = DECAY * rates[number] + (1 - DECAY) * success
    return {**rates, number: float(success)}


def update_rates(rates: SuccessRates, numbers: Sequence[int], success: Mapping[int, float]) -> SuccessRates:
    """The rates after a training update: `numbers` are the tasks of its groups, `success` the fractions by group.

    A group without a fraction, since none of it could be judged, changes nothing.
    """
    for group, number in enumerate(numbers):
        if group in success:
            rates = update_rate(rates, number, success[group])
    return rates


def task_priority(rates: SuccessRates, number: int) -> float:
    """Relative frequency of a task; 1 for one that was never solved."""
    return max(1.0 - rates.get(number, 0.0), MIN_PRIORITY)


def sample_task(rates: SuccessRates, seed: int, index: int, count: int) -> int:
    """Number of the task of a run's group `index`, of `count` tasks, by rejection sampling.

    A uniform proposal is accepted with the task's priority: at most 1 / MIN_PRIORITY proposals on average, however many
    tasks there are, and no sum over tasks.
    """
    if count < 1:
        raise BadInput(f"there are {count} tasks to choose from, but a draw takes at least 1")
    if index < 0:
        raise BadInput(f"the index of the group is {index}, but counts from 0")
    proposal = 0
    while True:
        digest = blake2b(b"priority:%d:%d:%d" % (seed, index, proposal)).digest()
        number, point = (int.from_bytes(half, "little") for half in (digest[:32], digest[32:]))
        if point < task_priority(rates, number % count) * 2**256:
            return number % count
        proposal += 1


def to_json(rates: SuccessRates) -> dict[str, float]:
    """The rates as a JSON object, with the tasks' numbers as text."""
    return {str(number): rates[number] for number in sorted(rates)}


def from_json(value: Mapping[str, float]) -> SuccessRates:
    """The rates from the JSON object of `to_json`."""
    return {int(number): success for number, success in value.items()}


# By difficulty ----------------------------------------------------------------------------------------------


def sort_by_difficulty(tasks: Sequence[Task], field: str) -> tuple[Task, ...]:
    """The tasks from the easiest on, by a number in their metadata; equals stay in their order."""

    def difficulty(task: Task) -> float:
        value: Any = task.metadata.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            return value
        what = f"is {value!r:.60}, which is no number" if field in task.metadata else "is missing"
        raise BadInput(
            f"task {task.id!r}: field {field!r} {what}: give every task a number there, or name the field with its "
            "difficulty"
        )

    return tuple(sorted(tasks, key=difficulty))


def num_open_tasks(update: int, updates: int, count: int) -> int:
    """Number of tasks that are open at an update: a fraction that grows linearly from `INITIAL_FRACTION` to 1."""
    if updates < 1 or update < 0:
        raise BadInput(f"update {update} of {updates} is none: a curriculum takes at least 1, counted from 0")
    progress = min(update / (COMPLETE_AT * updates), 1.0)
    return max(
        ceil((INITIAL_FRACTION + (1 - INITIAL_FRACTION) * progress) * count - 1e-9), min(count, 1)
    )  # rounding opens no task


def curriculum_task(easiest: Sequence[Task], seed: int, index: int, opened: int) -> Task:
    """The task of a run's group `index`, of the `opened` easiest: the stateless order of `tasks.task_at`."""
    open_tasks = easiest[:opened]
    return open_tasks[task_at(open_tasks, seed, index)]
