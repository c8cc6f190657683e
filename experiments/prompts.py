"""Which tasks a hosted run trains on: settings and tasks flow in, the draw of every update flows out.

    uniform      a stream of permutations, without state
    hard         with a probability proportional to 1 - success, as far as it is known
    curriculum   the easiest first, by a number in the metadata of every task, without state

A run that is `hard` carries what it knows of its tasks in its checkpoints. The rule itself is in `flowgrpo.priorities`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from flowgrpo import priorities
from flowgrpo.priorities import Known
from flowgrpo.rollout.records import Played
from flowgrpo.types import BadInput, Task

PROMPTS = ("uniform", "hard", "curriculum")
Draw = Callable[[str, int, int], list[Task]]  # (split, first, count) -> tasks


def prompt_settings(
    prompts: str, *, updates: int, difficulty: str | None = None, curriculum_updates: int | None = None
) -> dict[str, Any]:
    """The settings of a choice; none where it is uniform, so that older runs have the same and go on."""
    if prompts not in PROMPTS:
        raise BadInput(f"--prompts={prompts} is unknown; choose from {', '.join(PROMPTS)}")
    if prompts == "curriculum":
        if not difficulty:
            raise BadInput(
                "--prompts=curriculum needs --difficulty: a field of the tasks' metadata that holds a number"
            )
        length = curriculum_updates or max(updates, 1)
        return {"prompts": prompts, "difficulty": difficulty, "curriculum_updates": length}
    for name, value in (("difficulty", difficulty), ("curriculum_updates", curriculum_updates)):
        if value is not None:
            raise BadInput(f"--{name}={value} needs --prompts=curriculum: nothing else reads it")
    return {} if prompts == "uniform" else {"prompts": prompts}


def choose(
    settings: Mapping[str, Any], draw: Draw, train: Callable[[], Sequence[Task]], *, groups: int
) -> tuple[Draw, "Hard | None"]:
    """The draw of a run whose updates take so many groups, and what stands in its place in training.

    `draw` is the uniform one, `train` gives all tasks of training, numbered as they come.
    """
    kind = settings.get("prompts", "uniform")  # which is not among the settings where it is uniform
    if kind == "uniform":
        return draw, None
    tasks = tuple(train())
    if kind == "hard":
        return draw, Hard(tasks, settings["seed"], groups=groups)
    easiest = priorities.by_difficulty(tasks, settings["difficulty"])
    return partial(_eased, draw=draw, easiest=easiest, settings=settings, groups=groups), None


# By difficulty --------------------------------------------------------------------------------------------------


def _eased(
    split: str, first: int, count: int, *, draw: Draw, easiest: Sequence[Task], settings: Mapping[str, Any], groups: int
) -> list[Task]:
    """The tasks from a place on, in training of those that are open in the update that the place belongs to."""
    if split != "train":
        return draw(split, first, count)
    opened = partial(priorities.open_at, updates=settings["curriculum_updates"], count=len(easiest))
    places = range(first, first + count)
    return [priorities.eased(easiest, settings["seed"], place, opened(place // groups)) for place in places]


def open_share(settings: Mapping[str, Any], update: int) -> dict[str, float]:
    """The share of the tasks that may come up in an update, where there is a curriculum."""
    if settings.get("prompts") != "curriculum":
        return {}
    many = 10_000  # tasks, to read the share from
    return {"tasks_open": priorities.open_at(update, settings["curriculum_updates"], many) / many}


# By success -----------------------------------------------------------------------------------------------------


def success_by_group(played: Sequence[Played]) -> dict[int, float]:
    """Of each group the share that is right of those that have an outcome; a group without one is left out (F5)."""
    right: dict[int, list[bool]] = {}
    for one in played:
        if one.trajectory.outcome is not None:
            right.setdefault(one.group, []).append(bool(one.trajectory.correct))
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
        self._known: dict[int, Known] = {0: priorities.EMPTY}  # by the update that begins with it

    def numbers(self, update: int) -> list[int]:
        """Which task each group of an update has."""
        places = range(update * self._groups, (update + 1) * self._groups)
        return [priorities.chosen(self._known[update], self._seed, place, len(self.pool)) for place in places]

    def tasks(self, update: int) -> list[Task]:
        """The tasks of an update, one a group."""
        return [self.pool[number] for number in self.numbers(update)]

    def learn(self, update: int, played: Sequence[Played]) -> dict[str, float]:
        """Know what an update's trajectories show; figures of what was drawn, and of all that is known now."""
        known, drawn = self._known[update], {one.group: self._number[one.task.id] for one in played}
        numbers = [drawn[group] for group in range(len(drawn))]
        after = priorities.learned(known, numbers, success_by_group(played))
        self._known = {update: known, update + 1: after}
        rank = [priorities.priority(known, number) for number in numbers]
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
        return {"tasks": len(self.pool), "known": json.dumps(priorities.to_json(self._known[update]))}

    def restore(self, update: int, memory: Mapping[str, Any]) -> None:
        """Know what a checkpoint held."""
        if memory["tasks"] != len(self.pool):
            raise BadInput(
                f"the checkpoint of update {update} knows of {memory['tasks']} tasks of training, but there are "
                f"{len(self.pool)}: give the tasks that the run was started with"
            )
        self._known = {update: priorities.from_json(json.loads(memory["known"]))}
