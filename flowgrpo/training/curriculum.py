"""Which tasks a hosted run trains on: `make_task_sampler`, by the setting --prompts.

    uniform      a stream of permutations, without state
    hard         with a probability proportional to 1 - success rate, as far as it is known
    curriculum   the easiest first, by a number in the metadata of each task, without state

A run with `hard` stores the success rates of its tasks in its checkpoints. The rules are in
`flowgrpo.data.task_sampling`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flowgrpo.data import task_sampling
from flowgrpo.data.task_sampling import SuccessRates
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.training.settings import ChosenTasksSection
from flowgrpo.types import BadInput, Task

Draw = Callable[[str, int, int], list[Task]]  # (split, first, count) -> tasks


def make_task_sampler(
    settings: ChosenTasksSection, draw: Draw, train: Callable[[], Sequence[Task]], *, groups: int, seed: int
) -> tuple[Draw, "HardTaskSampler | None"]:
    """The draw of a run, and the sampler that replaces it in training for --prompts=hard.

    Args:
        draw: the uniform one.
        train: returns all training tasks.
        groups: number of groups of an update.
    """
    if settings.prompts == "uniform":
        return draw, None
    tasks = tuple(train())
    if settings.prompts == "hard":
        return draw, HardTaskSampler(tasks, seed, groups=groups)
    assert settings.difficulty is not None  # checked by the Config
    easiest = task_sampling.sort_by_difficulty(tasks, settings.difficulty)

    def draw_curriculum(split: str, first: int, count: int) -> list[Task]:
        """In training, a task of those that are open in the update of its group; in other splits `draw`."""
        if split != "train":
            return draw(split, first, count)
        updates = settings.curriculum_updates or 1
        return [
            task_sampling.curriculum_task(
                easiest, seed, group, task_sampling.num_open_tasks(group // groups, updates, len(easiest))
            )
            for group in range(first, first + count)
        ]

    return draw_curriculum, None


def curriculum_metrics(settings: ChosenTasksSection, update: int) -> dict[str, float]:
    """Fraction of the tasks that may come up in an update of a curriculum; {} without one."""
    if settings.prompts != "curriculum":
        return {}
    count = 10_000  # tasks, to read the fraction from
    return {"tasks_open": task_sampling.num_open_tasks(update, settings.curriculum_updates or 1, count) / count}


def success_by_group(trajectories: Sequence[RecordedTrajectory]) -> dict[int, float]:
    """Success rate of each group, over its trajectories with an outcome; a group without one is left out (F5)."""
    correct: dict[int, list[bool]] = {}
    for trajectory in trajectories:
        if trajectory.outcome is not None:
            correct.setdefault(trajectory.group, []).append(bool(trajectory.correct))
    return {group: sum(values) / len(values) for group, values in sorted(correct.items())}


class HardTaskSampler:
    """Training tasks with their success rates, from which harder ones are drawn more often.

    It keeps the rates before the last update too: an update that is interrupted leaves no trace (S1).
    """

    def __init__(self, tasks: Sequence[Task], seed: int, *, groups: int):
        if not tasks:
            raise BadInput("there is no task to train on: give a file that has some")
        self.pool, self._seed, self._groups = tasks, seed, groups
        self._number = {task.id: number for number, task in enumerate(tasks)}
        self._rates: dict[int, SuccessRates] = {0: task_sampling.NO_RATES}  # update -> rates before it

    def task_numbers(self, update: int) -> list[int]:
        """The number in the pool of each group's task."""
        groups = range(update * self._groups, (update + 1) * self._groups)
        return [task_sampling.sample_task(self._rates[update], self._seed, group, len(self.pool)) for group in groups]

    def tasks(self, update: int) -> list[Task]:
        """The tasks of an update, one for each group."""
        return [self.pool[number] for number in self.task_numbers(update)]

    def record_results(self, update: int, trajectories: Sequence[RecordedTrajectory]) -> dict[str, float]:
        """Update the success rates by an update's trajectories -> metrics of its tasks and of the pool."""
        rates = self._rates[update]
        by_group = {trajectory.group: self._number[trajectory.task.id] for trajectory in trajectories}
        numbers = [by_group[group] for group in range(len(by_group))]
        after = task_sampling.update_rates(rates, numbers, success_by_group(trajectories))
        self._rates = {update: rates, update + 1: after}
        priorities = [task_sampling.task_priority(rates, number) for number in numbers]
        return {"prompt_priority": float(np.mean(priorities)), "tasks_seen": len(after) / len(self.pool)}

    def rates(self, update: int) -> SuccessRates:
        """Success rates before an update."""
        return self._rates[update]

    def changed_rates(self, update: int) -> SuccessRates:
        """The success rates that an update has changed, after it."""
        before, after = self._rates[update], self._rates[update + 1]
        return {number: success for number, success in after.items() if before.get(number) != success}

    def to_checkpoint(self, update: int) -> dict[str, Any]:
        """What a checkpoint before this update stores."""
        return {"tasks": len(self.pool), "known": json.dumps(task_sampling.to_json(self._rates[update]))}

    def restore(self, update: int, saved: Mapping[str, Any]) -> None:
        """Restore the success rates from a checkpoint."""
        if saved["tasks"] != len(self.pool):
            raise BadInput(
                f"the checkpoint of update {update} knows of {saved['tasks']} tasks of training, but there are "
                f"{len(self.pool)}: give the tasks that the run was started with"
            )
        self._rates = {update: task_sampling.from_json(json.loads(saved["known"]))}
