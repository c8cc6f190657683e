"""What a task set is, and how its kinds are dealt to splits: `TaskSet`, `deal_kinds`, `make_draw`.

A kind of tasks is a tuple of parts, such as ("add", "stickers", "own"). `deal_kinds` gives every kind to one split, so
that no kind of the test split is in the training split, though each part of it is. A split takes its kinds in turn;
numbers and names are drawn by a generator that is seeded with (seed, split, index).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from flowgrpo.types import BadInput, Task

SPLITS = ("train", "validation", "test")
Kind = tuple[str, ...]
Draw = Callable[[int, str, int, int], list[Task]]
T = TypeVar("T")


class TaskSet(NamedTuple):
    """Tasks that are made here without a file, with what an agent needs for them.

    Each task has `metadata["kind"]`; `metadata["steps"]`, the list of [tool, context] that a perfect agent calls one
    after the other; and `metadata["final"]`, its answer.
    """

    name: str
    draw: Draw  # (seed, split, first, count) -> tasks; depends on its arguments alone, and never ends
    examples: tuple[Task, ...]  # worked, for a prompt: of kinds of the training split, and no task of any split
    tools: tuple[str, ...]  # names of the tools that its steps call
    instructions: str  # short, since they stand in every context
    passages: Callable[[], Sequence[Mapping[str, str]]] | None = None  # {"title", "text"}: the corpus of search


class Solved(NamedTuple):
    """A query with the calls that solve it, and its answer."""

    query: str
    steps: Sequence[tuple[str, str]]  # (tool, context)
    final: str


def sort_by_hash(name: str, kinds: Sequence[Kind]) -> list[Kind]:
    """Sort kinds by a hash of their text, which is the same in every process and version."""
    return sorted(kinds, key=lambda kind: hashlib.sha256(repr((name, *kind)).encode()).digest())


def deal_kinds(name: str, kinds: Sequence[Kind]) -> dict[str, list[Kind]]:
    """Deal kinds to splits in the order of a hash: 20% to test (3 at least), 10% to validation, others to train.

    A kind stays in train where it is the last one there with one of its parts.
    """
    order = sort_by_hash(name, kinds)
    parts = Counter(part for kind in order for part in enumerate(kind))  # (position, part), in train
    sizes = {"test": max(3, round(0.2 * len(order))), "validation": max(1, round(0.1 * len(order)))}
    splits: dict[str, list[Kind]] = {split: [] for split in SPLITS}
    for kind in order:
        split = next((split for split, size in sizes.items() if len(splits[split]) < size), "train")
        if split != "train" and min(parts[part] for part in enumerate(kind)) == 1:
            split = "train"
        if split != "train":
            parts.subtract(enumerate(kind))
        splits[split].append(kind)
    return splits


def make_draw(
    name: str,
    domain: str,
    groups: Sequence[Mapping[str, Sequence[Kind]]],
    solve: Callable[[np.random.Generator, Kind, str], Solved],
) -> Draw:
    """Make the `draw` of a task set from groups of dealt kinds, and from what solves a task of a kind and split.

    Tasks take the groups in turn, and the kinds of a group in turn.
    """

    def draw(seed: int, split: str, first: int, count: int) -> list[Task]:
        if split not in SPLITS:
            raise BadInput(f"{name}: split is {split!r}, but must be one of {', '.join(SPLITS)}")
        if min(seed, first, count) < 0:
            raise BadInput(f"{name}: seed is {seed}, first {first} and count {count}, but each must be at least 0")
        tasks = []
        for index in range(first, first + count):
            turn, group = divmod(index, len(groups))
            kinds = groups[group][split]
            kind = kinds[turn % len(kinds)]
            random = np.random.default_rng([seed, SPLITS.index(split), index])
            tasks.append(make_task(f"{name}-{split}-{index}-{seed}", domain, kind, solve(random, kind, split)))
        return tasks

    return draw


def make_task(identity: str, domain: str, kind: Kind, solved: Solved) -> Task:
    """Make the task of a solved query."""
    steps = [list(step) for step in solved.steps]
    metadata = {"kind": ", ".join(kind), "steps": steps, "final": solved.final}
    return Task(identity, solved.query, (solved.final,), domain, metadata)


def pick(random: np.random.Generator, options: Sequence[T]) -> T:
    """Draw one of the options."""
    return options[int(random.integers(len(options)))]


def pick_some(random: np.random.Generator, options: Sequence[T], count: int) -> list[T]:
    """Draw different options, in a random order."""
    return [options[int(i)] for i in random.choice(len(options), count, replace=False)]
