"""Deal tasks without state: (seed, cursor) gives the next batch and cursor; `split_tasks` splits by a hash of the id.

    tasks = read_tasks("train.jsonl")                      # task_files.py
    parts = split_tasks(tasks, {"train": 0.9, "test": 0.1})
    batch, cursor = batch_at(parts["train"], seed, cursor, 32)

The order is an endless stream of permutations, one for each epoch, that depends on the seed and the number of tasks
and on nothing else: place `index` of the stream lies in epoch `index // n`, so the data cursor is one integer. A
permutation is a Feistel network over pairs of digits, with cycle walking (Black and Rogaway, 2002): any place of any
epoch takes the same few hashes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isclose, isqrt

from flowgrpo.types import BadInput, Task, check_range

ROUNDS = 16  # of the Feistel network: enough that over few tasks, too, all permutations come up equally often
SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}


@dataclass(frozen=True)
class Tasks:
    """An immutable sequence of tasks, no two of one id."""

    items: tuple[Task, ...]
    source: str = "tasks"  # where they come from, for messages
    left_out: tuple[str, ...] = ()  # what was left out of it, a sentence each

    def __post_init__(self):
        seen = set()
        for task in self.items:
            if task.id in seen:
                raise BadInput(f"{self.source}: the id {task.id!r} is there twice; give every task an id of its own")
            seen.add(task.id)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Task:
        return self.items[number]

    def __iter__(self) -> Iterator[Task]:
        return iter(self.items)


# Order ------------------------------------------------------------------------------------------------


def task_at(tasks: Tasks | Sequence[Task], seed: int, index: int) -> int:
    """The number of the task at a place of the endless stream of permutations."""
    if not len(tasks):
        raise BadInput(f"{_name(tasks)} holds no task, so no order goes over it; give it a larger share or more tasks")
    check_range("task_at", "the data cursor", index, 0, whole=True)
    epoch, place = divmod(index, len(tasks))
    return permuted(place, len(tasks), f"{seed}:{epoch}".encode())


def batch_at(tasks: Tasks | Sequence[Task], seed: int, cursor: int, size: int) -> tuple[list[Task], int]:
    """The `size` tasks from a cursor on, over the ends of epochs, and the cursor after them."""
    check_range("batch_at", "size", size, 1, whole=True)
    return [tasks[task_at(tasks, seed, cursor + place)] for place in range(size)], cursor + size


def permuted(place: int, count: int, key: bytes) -> int:
    """Map `place` by a permutation of `count` numbers, which the key chooses."""
    wide = isqrt(count - 1) + 1
    high = -(-count // wide)  # rows of `wide` numbers that hold them all
    while True:  # the orbit of a number below count comes back below count
        place = _feistel(place, wide, high, key)
        if place < count:
            return place


def _feistel(place: int, wide: int, high: int, key: bytes) -> int:
    """A permutation of wide * high numbers: each digit is shifted by a hash of the other, in turn."""
    left, right = divmod(place, wide)
    for turn in range(0, ROUNDS, 2):
        left = (left + _hash(b"%s:%d:%d" % (key, turn, right))) % high
        right = (right + _hash(b"%s:%d:%d" % (key, turn + 1, left))) % wide
    return left * wide + right


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


# Splits -----------------------------------------------------------------------------------------------


def split_of(identity: str, shares: Mapping[str, float] = SHARES) -> str:
    """The split to which a task of this id belongs, wherever it is read from."""
    point, reached = _hash(b"split:" + identity.encode()) / 2**64, 0.0
    for name, share in shares.items():
        reached += share
        if point < reached:
            return name
    return [name for name, share in shares.items() if share > 0][-1]  # rounding: the shares sum to a little below 1


def split_tasks(tasks: Tasks, shares: Mapping[str, float] = SHARES) -> dict[str, Tasks]:
    """The tasks of each split, in their order; a share says how much of all ids a split takes, about."""
    for name, share in shares.items():
        check_range("split_tasks", f"the share {name!r}", share, 0.0, 1.0)
    if not isclose(sum(shares.values()), 1.0, abs_tol=1e-9):
        raise BadInput(f"split_tasks: the shares {dict(shares)} must sum to 1")
    dealt: dict[str, list[Task]] = {name: [] for name in shares}
    for task in tasks:
        dealt[split_of(task.id, shares)].append(task)
    return {name: Tasks(tuple(items), f"{tasks.source} ({name})") for name, items in dealt.items()}


def _name(tasks: Tasks | Sequence[Task]) -> str:
    return tasks.source if isinstance(tasks, Tasks) else "the list of tasks"
