"""How many trajectories are under way at a time, over all rollouts that share an engine."""

import threading
from collections.abc import Callable

from flowgrpo.types import BadInput


class Width:
    """So many places; whoever finds none is woken when one is free, and asks again."""

    def __init__(self, places: int):
        if not places > 0:
            raise BadInput(f"width={places}, but must be greater than 0")
        self._free, self._lock = places, threading.Lock()
        self._waiting: dict[Callable[[], None], None] = {}  # in the order in which they asked

    def take(self, wake: Callable[[], None]) -> bool:
        """Take a place, or be woken once, from another thread, when there may be one."""
        with self._lock:
            if not self._free:
                self._waiting[wake] = None
                return False
            self._free -= 1
            return True

    def give(self) -> None:
        """Give a place back."""
        with self._lock:
            self._free += 1
            waiting, self._waiting = self._waiting, {}
        for wake in waiting:
            wake()
