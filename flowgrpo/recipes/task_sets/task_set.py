"""`TaskSet`, and how its kinds of tasks are split: `split_kinds`, `make_draw`.

A kind of tasks is a tuple of parts, such as ("add", "stickers", "own"). `split_kinds` assigns every kind to one split,
so that no kind of the test split is in the training split, though each of its parts is. A split uses its kinds in turn;
numbers and names are drawn by a generator seeded with (seed, split, index).
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
    """Generated tasks, with the tools and the prompt of an agent that solves them.

    Each task has `metadata["kind"]`; `metadata["steps"]`, the list of [tool, context] that a perfect agent calls in
    turn; and `metadata["final"]`, its answer.
    """

    name: str
    draw: Draw  # (seed, split, first, count) -> tasks; a function of its arguments, for any `first`
    examples: tuple[Task, ...]  # worked examples for a prompt: of kinds of the training split, but in no split
    tools: tuple[str, ...]  # names of the tools that its steps call
    instructions: str  # short, since they are in every context
    passages: Callable[[], Sequence[Mapping[str, str]]] | None = None  # {"title", "text"}: the corpus of search


class SolvedQuery(NamedTuple):
    """A query, the tool calls that solve it, and its answer."""

    query: str
    steps: Sequence[tuple[str, str]]  # (tool, context)
    final: str


def sort_by_hash(name: str, kinds: Sequence[Kind]) -> list[Kind]:
    """Kinds in the order of a hash of their text, the same in every process and version."""
    return sorted(kinds, key=lambda kind: hashlib.sha256(repr((name, *kind)).encode()).digest())


def split_kinds(name: str, kinds: Sequence[Kind]) -> dict[str, list[Kind]]:
    """Split kinds in the order of a hash: 20% test (at least 3), 10% validation, the others train.

    A kind stays in train if it is the last one there with one of its parts.
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
    solve: Callable[[np.random.Generator, Kind, str], SolvedQuery],
) -> Draw:
    """Make the `draw` of a task set.

    Args:
        name: Name of the task set.
        domain: Domain of its tasks, which selects their reward.
        groups: Groups of split kinds; tasks use the groups in turn, and the kinds of a group in turn.
        solve: Generates a task of a kind and split, with its solution.
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


def make_task(identity: str, domain: str, kind: Kind, solved: SolvedQuery) -> Task:
    """Task of a solved query."""
    steps = [list(step) for step in solved.steps]
    metadata = {"kind": ", ".join(kind), "steps": steps, "final": solved.final}
    return Task(identity, solved.query, (solved.final,), domain, metadata)


def pick(random: np.random.Generator, options: Sequence[T]) -> T:
    """Draw one of the options uniformly."""
    return options[int(random.integers(len(options)))]


def pick_distinct(random: np.random.Generator, options: Sequence[T], count: int) -> list[T]:
    """Draw `count` different options, in random order."""
    return [options[int(i)] for i in random.choice(len(options), count, replace=False)]
