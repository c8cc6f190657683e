"""How much memory the arrays of a process hold, stage by stage: samples flow in, the most of each stage flows out.

Where a device counts its own memory (`memory_stats`: GPU and TPU), a thread looks every few milliseconds, and what the
device itself saw as its peak counts where it rose in the stage. Elsewhere the bytes of live arrays are summed by the
kind of their memory, at the beginning and the end of a stage, without what a program needs while it runs.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from flowgrpo.learner.residency import PINNED

COUNTED, SUMMED = "memory_stats", "live arrays at the ends of stages"


class Gauge:
    """The most bytes that the fullest device held in each stage."""

    def __init__(self, every: float = 0.01):
        self.source = COUNTED if _stats() else SUMMED
        self.peaks: dict[str, int] = {}
        self._every = every

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure what happens in the block; stages may overlap."""
        peak, over = _peak(), threading.Event()
        self._look(name)
        if self.source == COUNTED:
            threading.Thread(target=self._watch, args=(name, over), name="flowgrpo-gauge", daemon=True).start()
        try:
            yield
        finally:
            over.set()
            self._look(name)
            if (after := _peak()) > peak:
                self._take(name, after)

    def take(self) -> dict[str, int]:
        """The peaks since this was asked last."""
        found, self.peaks = self.peaks, {}
        return found

    def _watch(self, name: str, over: threading.Event) -> None:
        while not over.wait(self._every):
            self._look(name)

    def _look(self, name: str) -> None:
        held = _stats()
        self._take(name, max(one["bytes_in_use"] for one in held) if held else live_bytes()["device"])

    def _take(self, name: str, size: int) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0), size)


def live_bytes() -> dict[str, int]:
    """Bytes of all live arrays: on the fullest device of this process, and in the pinned memory of its host."""
    on_device: dict[Any, int] = dict.fromkeys(jax.local_devices(), 0)
    pinned, seen = 0, set()
    for array in jax.live_arrays():
        try:
            parts = _parts(array)
        except RuntimeError:  # another thread deleted or donated it just now
            continue
        for device, pointer, size in parts:
            if (device, pointer) in seen:  # two arrays may share a buffer
                continue
            seen.add((device, pointer))
            if array.sharding.memory_kind == PINNED:
                pinned += size
            else:
                on_device[device] += size
    return {"device": max(on_device.values()), "pinned": pinned}


def _parts(array: jax.Array) -> list[tuple[Any, int, int]]:
    """Device, buffer and bytes of each part that this process has."""
    if array.is_fully_addressable:
        return [(part.device, part.data.unsafe_buffer_pointer(), part.data.nbytes) for part in array.addressable_shards]
    size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return [(device, id(array), size) for device in array.sharding.addressable_devices]


def _stats() -> list[dict[str, int]]:
    """Collect the memory statistics of each local device; empty where one gives none."""
    found = [device.memory_stats() for device in jax.local_devices()]
    return [one for one in found if one] if all(found) else []


def _peak() -> int:
    return max((one.get("peak_bytes_in_use", 0) for one in _stats()), default=0)
