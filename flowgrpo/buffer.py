"""The replay buffer: groups that wait to be learned from, and stretches that wait to go on. A value, never changed.

    buffer = add(buffer, 7, item, version=3)
    kept, buffer = take(buffer, (5, 7));   items, oldest = [one.item for one in kept], min(one.version for one in kept)

An item is whatever stands for a group's trajectories: records, arrays, or a reference to where they lie.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flowgrpo.types import BadInput


class Kept(NamedTuple):
    """A group in the buffer."""

    item: Any
    version: int  # of the oldest weights that spoke


Buffer = Mapping[int, Kept]  # by the number of the group
EMPTY: Buffer = {}


def add(buffer: Buffer, number: int, item: Any, *, version: int) -> Buffer:
    """The buffer with a group, in the place of what it held of it; the oldest version stays."""
    if number in buffer:
        version = min(version, buffer[number].version)
    return {**buffer, number: Kept(item, version)}


def take(buffer: Buffer, numbers: Iterable[int]) -> tuple[list[Kept], Buffer]:
    """Take these groups out: give what is kept of them, in this order, and the buffer without them."""
    numbers = list(numbers)
    missing = [number for number in numbers if number not in buffer]
    if missing:
        raise BadInput(f"the buffer does not hold group {missing[0]}: it has {len(buffer)} others")
    return [buffer[number] for number in numbers], drop(buffer, numbers)


def drop(buffer: Buffer, numbers: Iterable[int]) -> Buffer:
    """The buffer without these groups, whether it had them or not."""
    gone = set(numbers)
    return {number: kept for number, kept in buffer.items() if number not in gone}
