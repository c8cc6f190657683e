"""Keep each model where a table has it in each stage (device, host or disk), and measure the memory of stages.

    with Residency(places(HOST)) as residency:
        residency.hold("optimizer", state.optimizer)     # a version, wherever its arrays lie
        residency.enter("train")                         # what is not used leaves the device, what is used comes
        step(residency["optimizer"])

        model        rollout    inference  train         places(HOST); elsewhere is pinned host memory,
        policy       device     device     device        with places(DISK) files that are mapped into memory
        optimizer    elsewhere  elsewhere  device
        reference    elsewhere  device     elsewhere
        critic       elsewhere  device     device
        judge        device     device     elsewhere

All that is held belongs to the `Residency` and stays the same to the bit: buffers on the device are deleted as soon as
their copy is under way. Copies off the device stay while the version lasts, so a frozen model is written once and only
dropped afterwards. Moves are dispatched and not waited for: they overlap with what the caller does next, where the
hardware allows it. Under an adapter the base is the policy's own, so that reference and frozen roles are small.

A `MemoryMeter` keeps the most memory of each stage. Where a device counts its own (`memory_stats`: GPU and TPU), a
thread looks every few milliseconds, and the device's own peak counts where it rose in the stage. Elsewhere the bytes
of live arrays are summed at the beginning and the end of a stage, without what a program needs while it runs.
"""

import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from flowgrpo.types import BadInput

Place = str
DEVICE, HOST, DISK = PLACES = ("device", "host", "disk")
STAGES = ("rollout", "inference", "train")
Table = Mapping[str, Mapping[str, Place]]  # model -> stage -> place

PINNED = "pinned_host"  # the kind of memory that a device reaches by itself
USED = {  # the stages in which a model is read
    "policy": ("rollout", "inference", "train"),
    "optimizer": ("train",),
    "reference": ("inference",),
    "critic": ("inference", "train"),
    "judge": ("rollout", "inference"),  # groups are judged while others generate, and while the reference scores
}
ALIGNED = 4096  # bytes: where each array begins in a file


def places(elsewhere: Place) -> Table:
    """Each model on the device in the stages that read it, and `elsewhere` in the others."""
    return {name: {stage: DEVICE if stage in used else elsewhere for stage in STAGES} for name, used in USED.items()}


class Move(NamedTuple):
    """One model moved from one place to another."""

    model: str
    source: Place
    target: Place
    bytes: int
    seconds: float  # from its dispatch until all was there


@dataclass(eq=False)
class Version:
    """One version of a model: equal copies at one or more places."""

    copies: dict[Place, Any]
    place: Place  # where it is in the present stage
    shardings: list[Any]  # of its leaves, on the device
    writing: "Future[Any] | None" = None  # to the disk
    reading: "Future[list] | None" = None  # from the disk, ahead of its use
    moving: dict[Place, Future] = field(default_factory=dict)  # where copies are on their way to


class Residency:
    """The models of a run, each where the table has it in the present stage; close it, or use it in a `with` block."""

    def __init__(self, table: Table, *, folder: str | os.PathLike | None = None):
        """`folder` takes the files, which have no name there, so that nothing is left of a process that was killed."""
        _check(table, folder)
        self.table, self._folder = table, folder
        self._versions: dict[str, Version] = {}
        self._moves: list[Move] = []
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="flowgrpo-residency")

    def __enter__(self) -> "Residency":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is under way, and let everything go."""
        self._pool.shutdown()
        self._versions.clear()

    def hold(self, name: str, tree: Any) -> None:
        """Take over a model; what is held already, at whatever place, stays as it is."""
        if name not in self.table:
            raise BadInput(f"the table of places has no model {name!r}: add its row; it has {', '.join(self.table)}")
        before = self._versions.get(name)
        if before is None or not any(_same(copy, tree) for copy in before.copies.values()):
            place = place_of(tree)
            if DISK in self.table[name].values():
                _check_whole(name, tree)
            self._versions[name] = Version({place: tree}, place, _on_device(name, tree, before))

    def __getitem__(self, name: str) -> Any:
        """The model where it is in the present stage; its arrays may still be on their way."""
        version = self._versions[name]
        if version.place == DISK:
            _settle(version)
        return version.copies[version.place]

    def enter(self, stage: str) -> None:
        """Send every model to its place in this stage: first what leaves the device, then what comes to it."""
        going = {name: self.table[name][stage] for name in self._versions}
        for name in sorted(going, key=lambda name: going[name] == DEVICE):
            self._send(name, going[name])

    def ahead(self, stage: str) -> None:
        """Begin to read what this stage will want from the disk; no device memory is taken."""
        for name, version in self._versions.items():
            if self.table[name][stage] == DEVICE and not {DEVICE, HOST} & set(version.copies) and not version.reading:
                version.reading = self._pool.submit(self._read, name, _settle(version))

    def wait(self) -> None:
        """Until all moves are done: before buffers are donated, and before moves are summed up."""
        for version in self._versions.values():
            for move in version.moving.values():
                move.result()
            version.moving.clear()
            if version.writing is not None:
                _settle(version)

    def moves(self) -> list[Move]:
        """The moves that were finished since this was asked last."""
        found, self._moves = self._moves, []
        return found

    # Moves --------------------------------------------------------------------------------------------

    def _send(self, name: str, place: Place) -> None:
        version = self._versions[name]
        if place not in version.copies and not (place == DISK and version.writing):
            if place == DISK:
                self._put(name, version, HOST)
                leaves, treedef = jax.tree.flatten(version.copies[HOST])
                version.writing = self._pool.submit(self._write, name, leaves, treedef)
            else:
                self._put(name, version, place)
        if place != DEVICE and DEVICE in version.copies:
            self._destroy(name)
        if place == DISK and DISK in version.copies:
            version.copies.pop(HOST, None)
        version.place = place

    def _put(self, name: str, version: Version, place: Place) -> None:
        """A copy on the device or in pinned memory, from wherever there is one."""
        if place in version.copies:
            return
        source: Place = next((near for near in (HOST, DEVICE) if near in version.copies), DISK)
        tree = _settle(version) if source == DISK else version.copies[source]
        leaves, treedef = jax.tree.flatten(tree)
        if source == DISK:
            reading, version.reading = version.reading or self._pool.submit(self._read, name, tree), None
            leaves, source = reading.result(), HOST
        began = time.monotonic()
        there = [sharding if place == DEVICE else pinned(sharding) for sharding in version.shardings]
        copies = jax.device_put(leaves, there)
        version.copies[place] = jax.tree.unflatten(treedef, copies)
        version.moving[place] = self._pool.submit(self._arrived, name, source, place, copies, began)

    def _arrived(self, name: str, source: Place, place: Place, copies: list, began: float) -> None:
        jax.block_until_ready(copies)
        self._note(name, source, place, copies, began)

    def _note(self, name: str, source: Place, target: Place, leaves: Sequence[Any], began: float) -> None:
        if leaves:
            size = sum(leaf.nbytes for leaf in leaves)
            self._moves.append(Move(name, source, target, size, time.monotonic() - began))

    def _destroy(self, name: str) -> None:
        """Delete a model's buffers on the device, those excepted that another model has there too."""
        others = [
            other.copies[DEVICE] for key, other in self._versions.items() if key != name and DEVICE in other.copies
        ]
        kept = {id(leaf) for leaf in jax.tree.leaves(others)}
        version = self._versions[name]
        if (coming := version.moving.pop(DEVICE, None)) is not None:
            coming.result()
        for leaf in jax.tree.leaves(version.copies.pop(DEVICE)):
            if id(leaf) not in kept and not leaf.is_deleted():
                leaf.delete()

    # Files --------------------------------------------------------------------------------------------

    def _write(self, name: str, leaves: list, treedef: Any) -> Any:
        """The tree of arrays that a new file holds, mapped into memory."""
        began = time.monotonic()
        arrays = [np.asarray(leaf) for leaf in leaves]
        starts = np.cumsum([0, *(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]).tolist()
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                for start, array in zip(starts, arrays, strict=False):
                    file.seek(start)
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                file.truncate(starts[-1])
                file.flush()
                views = [_map(file, array, start) for start, array in zip(starts, arrays, strict=False)]
        except OSError as error:
            raise BadInput(
                f"{self._folder} can't take the {starts[-1] / 1e9:.1f} GB of the {name} ({error.strerror}): free some "
                "space, choose another folder, or offload to the host"
            ) from None
        self._note(name, HOST, DISK, arrays, began)
        return jax.tree.unflatten(treedef, views)

    def _read(self, name: str, tree: Any) -> list[np.ndarray]:
        began = time.monotonic()
        arrays = [np.array(view) for view in jax.tree.leaves(tree)]
        self._note(name, DISK, HOST, arrays, began)
        return arrays


# Parts ------------------------------------------------------------------------------------------------


def _check(table: Table, folder: str | os.PathLike | None) -> None:
    """Raise `BadInput` for a table with holes, unknown places, or a disk that is nowhere."""
    for name, row in table.items():
        if set(row) != set(STAGES) or not set(row.values()) <= set(PLACES):
            raise BadInput(f"the places of {name!r} are {dict(row)}: give each of {STAGES} one of {PLACES}")
        if DISK in row.values() and folder is None:
            raise BadInput(f"the places of {name!r} name the disk: pass the folder= that takes its files")


def _check_whole(name: str, tree: Any) -> None:
    if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
        raise BadInput(f"parts of the {name} lie in other processes, so it can't go to the disk: offload to the host")


def pinned(sharding: Any) -> Any:
    """Convert a sharding to one that divides an array alike in pinned host memory."""
    kinds = [memory.kind for memory in next(iter(sharding.addressable_devices)).addressable_memories()]
    if PINNED not in kinds:
        raise BadInput(f"this device has no {PINNED} memory (it has {', '.join(kinds)}): offload nothing here")
    return sharding.with_memory_kind(PINNED)


def place_of(tree: Any) -> Place:
    """Find the one place where all arrays of a tree are; raise `BadInput` where there are several."""
    found = {_place(leaf) for leaf in jax.tree.leaves(tree)}
    if len(found) > 1:
        raise BadInput(f"a model lies in {' and '.join(sorted(found))} at once: bring its arrays to one place")
    return found.pop() if found else DEVICE


def _place(leaf: Any) -> Place:
    if isinstance(leaf, np.memmap):
        return DISK
    if isinstance(leaf, jax.Array):
        return HOST if leaf.sharding.memory_kind == PINNED else DEVICE
    raise BadInput(f"a model holds a {type(leaf).__name__}, which is no array of JAX: put it on a device first")


def _on_device(name: str, tree: Any, before: Version | None) -> list[Any]:
    """Say how the leaves of a tree lie on the device, or would."""
    leaves = jax.tree.leaves(tree)
    if place_of(tree) == DISK:
        if before is None or len(before.shardings) != len(leaves):
            raise BadInput(
                f"the {name} lies on the disk, and where it belongs is not known: bring it to a device first"
            )
        return before.shardings
    return [_default(leaf.sharding) for leaf in leaves]


def _default(sharding: Any) -> Any:
    kind = next(iter(sharding.addressable_devices)).default_memory().kind
    return sharding if sharding.memory_kind == kind else sharding.with_memory_kind(kind)


def _same(one: Any, other: Any) -> bool:
    """Say whether two trees hold the very same arrays."""
    leaves = [jax.tree.leaves(tree) for tree in (one, other)]
    return len(leaves[0]) == len(leaves[1]) and all(a is b for a, b in zip(*leaves, strict=True))


def _settle(version: Version) -> Any:
    """The copy on the disk, once it is written; from then on the host needs none."""
    if version.writing is not None:
        version.copies[DISK], version.writing = version.writing.result(), None
        if version.place == DISK:
            version.copies.pop(HOST, None)
    return version.copies[DISK]


def _map(file: Any, array: np.ndarray, start: int) -> np.memmap:
    """A part of a file as an array that can't be changed; the file lasts as long as its arrays."""
    size = array.nbytes
    if not size:
        return np.zeros(array.shape, array.dtype).view(np.memmap)
    return np.memmap(file, array.dtype, "r", start, array.shape)


COUNTED, SUMMED = "memory_stats", "live arrays at the ends of stages"


class MemoryMeter:
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
            threading.Thread(target=self._watch, args=(name, over), name="flowgrpo-memory-meter", daemon=True).start()
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
