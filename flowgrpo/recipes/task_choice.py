"""Choose the tasks that a hosted run trains on: settings and tasks flow in, the draw of every update flows out.

    uniform      a stream of permutations, without state
    hard         with a probability proportional to 1 - success, as far as it is known
    curriculum   the easiest first, by a number in the metadata of every task, without state

A run that is `hard` carries what it knows of its tasks in its checkpoints. The rule itself is in
`flowgrpo.data.task_sampling`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from flowgrpo.data import task_sampling
from flowgrpo.data.task_sampling import Known
from flowgrpo.recipes.hosted_config import ChoiceConfig
from flowgrpo.rollout.records import Played
from flowgrpo.types import BadInput, Task

Draw = Callable[[str, int, int], list[Task]]  # (split, first, count) -> tasks


def choose(
    config: ChoiceConfig, draw: Draw, train: Callable[[], Sequence[Task]], *, groups: int
) -> tuple[Draw, "Hard | None"]:
    """The draw of a run whose updates take so many groups, and what stands in its place in training.

    `draw` is the uniform one, `train` gives all tasks of training, numbered as they come.
    """
    if config.prompts == "uniform":
        return draw, None
    tasks = tuple(train())
    if config.prompts == "hard":
        return draw, Hard(tasks, config.seed, groups=groups)
    assert config.difficulty is not None  # as the Config demands
    easiest = task_sampling.by_difficulty(tasks, config.difficulty)
    return partial(_eased, draw=draw, easiest=easiest, config=config, groups=groups), None


# By difficulty --------------------------------------------------------------------------------------------------


def _eased(
    split: str, first: int, count: int, *, draw: Draw, easiest: Sequence[Task], config: ChoiceConfig, groups: int
) -> list[Task]:
    """The tasks from a place on, in training of those that are open in the update that the place belongs to."""
    if split != "train":
        return draw(split, first, count)
    opened = partial(task_sampling.open_at, updates=config.curriculum_updates or 1, count=len(easiest))
    places = range(first, first + count)
    return [task_sampling.eased(easiest, config.seed, place, opened(place // groups)) for place in places]


def open_share(config: ChoiceConfig, update: int) -> dict[str, float]:
    """The share of the tasks that may come up in an update, where there is a curriculum."""
    if config.prompts != "curriculum":
        return {}
    many = 10_000  # tasks, to read the share from
    return {"tasks_open": task_sampling.open_at(update, config.curriculum_updates or 1, many) / many}


# By success -----------------------------------------------------------------------------------------------------


def success_by_group(played: Sequence[Played]) -> dict[int, float]:
    """Of each group the share that is right of those that have an outcome; a group without one is left out (F5)."""
    right: dict[int, list[bool]] = {}
    for one in played:
        if one.outcome is not None:
            right.setdefault(one.group, []).append(bool(one.correct))
    return {group: sum(own) / len(own) for group, own in sorted(right.items())}


class Hard:
    """The tasks of training by what is known of them, in the process that trains.

    It keeps what is known before the last update, too: an update that is interrupted has left no trace (S1).
    """

    def __init__(self, tasks: Sequence[Task], seed: int, *, groups: int):
        if not tasks:
            raise BadInput("there is no task to train on: give a file that has some")
        self.pool, self._seed, self._groups = tasks, seed, groups
        self._number = {task.id: number for number, task in enumerate(tasks)}
        self._known: dict[int, Known] = {0: task_sampling.EMPTY}  # by the update that begins with it

    def numbers(self, update: int) -> list[int]:
        """Say which task each group of an update has."""
        places = range(update * self._groups, (update + 1) * self._groups)
        return [task_sampling.chosen(self._known[update], self._seed, place, len(self.pool)) for place in places]

    def tasks(self, update: int) -> list[Task]:
        """The tasks of an update, one a group."""
        return [self.pool[number] for number in self.numbers(update)]

    def learn(self, update: int, played: Sequence[Played]) -> dict[str, float]:
        """Know what an update's trajectories show; figures of what was drawn, and of all that is known now."""
        known, drawn = self._known[update], {one.group: self._number[one.task.id] for one in played}
        numbers = [drawn[group] for group in range(len(drawn))]
        after = task_sampling.update_known(known, numbers, success_by_group(played))
        self._known = {update: known, update + 1: after}
        rank = [task_sampling.priority(known, number) for number in numbers]
        return {"prompt_priority": float(np.mean(rank)), "tasks_seen": len(after) / len(self.pool)}

    def known(self, update: int) -> Known:
        """Look up the success of the tasks as it is known where an update begins."""
        return self._known[update]

    def shown(self, update: int) -> Known:
        """Select the known successes of tasks that an update has changed, as they are after it."""
        before, after = self._known[update], self._known[update + 1]
        return {number: success for number, success in after.items() if before.get(number) != success}

    def saved(self, update: int) -> dict[str, Any]:
        """Pack what a checkpoint of this update is to hold."""
        return {"tasks": len(self.pool), "known": json.dumps(task_sampling.to_json(self._known[update]))}

    def restore(self, update: int, memory: Mapping[str, Any]) -> None:
        """Know what a checkpoint held."""
        if memory["tasks"] != len(self.pool):
            raise BadInput(
                f"the checkpoint of update {update} knows of {memory['tasks']} tasks of training, but there are "
                f"{len(self.pool)}: give the tasks that the run was started with"
            )
        self._known = {update: task_sampling.from_json(json.loads(memory["known"]))}
