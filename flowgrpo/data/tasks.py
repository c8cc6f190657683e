"""A stateless order of tasks: (seed, cursor) gives the next batch and cursor. `split_tasks` splits by a hash of the id.

    tasks = read_tasks("train.jsonl")                      # task_files.py
    parts = split_tasks(tasks, {"train": 0.9, "test": 0.1})
    batch, cursor = batch_at(parts["train"], seed, cursor, 32)

The order is an endless stream of permutations, one for each epoch, that depends on the seed and the number of tasks
and on nothing else: place `index` of the stream is in epoch `index // n`, so the data cursor is one integer. A
permutation is a Feistel network over pairs of digits, with cycle walking (Black and Rogaway, 2002): any place of any
epoch takes the same few hashes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isclose, isqrt

from flowgrpo.types import BadInput, Task, check_range

ROUNDS = 16  # of the Feistel network: enough for all permutations of few tasks to be equally frequent
DEFAULT_SPLITS = {"train": 0.8, "validation": 0.1, "test": 0.1}


@dataclass(frozen=True)
class Tasks:
    """An immutable sequence of tasks with unique ids."""

    items: tuple[Task, ...]
    source: str = "tasks"  # for messages
    left_out: tuple[str, ...] = ()  # a sentence for each bad record that was left out

    def __post_init__(self):
        ids = set()
        for task in self.items:
            if task.id in ids:
                raise BadInput(
                    f"{self.source}: the id {task.id!r} is there twice; give every task an id of its own (tasks "
                    "without one have the same if all their fields are equal)"
                )
            ids.add(task.id)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Task:
        return self.items[number]

    def __iter__(self) -> Iterator[Task]:
        return iter(self.items)


# Order ------------------------------------------------------------------------------------------------


def task_at(tasks: Tasks | Sequence[Task], seed: int, index: int) -> int:
    """Number of the task at a place of the endless stream of permutations."""
    if not len(tasks):
        name = tasks.source if isinstance(tasks, Tasks) else "the list of tasks"
        raise BadInput(f"{name} holds no task to choose from; give it a larger fraction or more tasks")
    check_range("task_at", "the data cursor", index, 0, whole=True)
    epoch, place = divmod(index, len(tasks))
    return permute(place, len(tasks), f"{seed}:{epoch}".encode())


def batch_at(tasks: Tasks | Sequence[Task], seed: int, cursor: int, size: int) -> tuple[list[Task], int]:
    """`size` tasks from a cursor on, across the ends of epochs, and the next cursor."""
    check_range("batch_at", "size", size, 1, whole=True)
    return [tasks[task_at(tasks, seed, cursor + i)] for i in range(size)], cursor + size


def permute(place: int, count: int, key: bytes) -> int:
    """Image of `place` under the permutation of `count` numbers that the key chooses."""
    width = isqrt(count - 1) + 1
    height = -(-count // width)
    while True:  # the orbit of a number below count comes back below count
        # A Feistel network permutes width * height numbers: each digit is shifted by a hash of the other, in turn.
        left, right = divmod(place, width)
        for turn in range(0, ROUNDS, 2):
            left = (left + _hash(b"%s:%d:%d" % (key, turn, right))) % height
            right = (right + _hash(b"%s:%d:%d" % (key, turn + 1, left))) % width
        place = left * width + right
        if place < count:
            return place


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


# Splits -----------------------------------------------------------------------------------------------


def split_of(identity: str, fractions: Mapping[str, float] = DEFAULT_SPLITS) -> str:
    """The split of a task with this id, whichever file it is read from."""
    point, cumulative = _hash(b"split:" + identity.encode()) / 2**64, 0.0
    for name, fraction in fractions.items():
        cumulative += fraction
        if point < cumulative:
            return name
    return [name for name, fraction in fractions.items() if fraction > 0][
        -1
    ]  # rounding: the fractions sum to a little below 1


def split_tasks(tasks: Tasks, fractions: Mapping[str, float] = DEFAULT_SPLITS) -> dict[str, Tasks]:
    """The tasks of each split, in their order; `fractions` are the probabilities of the splits."""
    for name, fraction in fractions.items():
        check_range("split_tasks", f"the fraction {name!r}", fraction, 0.0, 1.0)
    if not isclose(sum(fractions.values()), 1.0, abs_tol=1e-9):
        raise BadInput(f"split_tasks: the fractions {dict(fractions)} must sum to 1")
    parts: dict[str, list[Task]] = {name: [] for name in fractions}
    for task in tasks:
        parts[split_of(task.id, fractions)].append(task)
    return {name: Tasks(tuple(items), f"{tasks.source} ({name})") for name, items in parts.items()}
