"""Offload models to the host or the disk in the stages that don't use them, and measure the memory of stages.

    with HostOffloader(placement_table(HOST)) as offloader:
        offloader.put("optimizer", state.optimizer)      # a version, wherever its arrays are
        offloader.enter("train")                         # unused models leave the device, used ones come to it
        step(offloader["optimizer"])

        model        rollout    inference  train         placement_table(HOST); elsewhere is pinned host memory,
        policy       device     device     device        with placement_table(DISK) memory-mapped files
        optimizer    elsewhere  elsewhere  device
        reference    elsewhere  device     elsewhere
        critic       elsewhere  device     device
        judge        device     device     elsewhere

The offloader owns the models, and never changes a bit of them: buffers on the device are deleted as soon as their copy
has started. Copies off the device are kept as long as the version, so a frozen model is written once and only dropped
afterwards. Moves are dispatched asynchronously: they overlap with what the caller does next, if the hardware allows it.
With an adapter the base belongs to the policy, so reference and frozen roles are small.

A `MemoryMeter` records the peak memory of each stage. If the devices count their memory (`memory_stats`: GPU and TPU),
a thread samples it every few milliseconds, and the device's own peak counts if it rose in the stage. Otherwise the
bytes of live arrays are summed at the start and the end of a stage, without a program's temporary buffers.
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

from flowgrpo.types import BadInput, PyTree

Place = str
DEVICE, HOST, DISK = PLACES = ("device", "host", "disk")
STAGES = ("rollout", "inference", "train")
Table = Mapping[str, Mapping[str, Place]]  # model -> stage -> place

PINNED = "pinned_host"  # JAX's name of host memory that a device can access directly
USED = {  # the stages in which a model is read
    "policy": ("rollout", "inference", "train"),
    "optimizer": ("train",),
    "reference": ("inference",),
    "critic": ("inference", "train"),
    "judge": ("rollout", "inference"),  # groups are judged while others generate, and while the reference scores
}
ALIGNED = 4096  # bytes; every array starts at a multiple of them in a file


def placement_table(elsewhere: Place) -> Table:
    """Each model on the device in the stages that read it, and `elsewhere` in the others."""
    return {name: {stage: DEVICE if stage in used else elsewhere for stage in STAGES} for name, used in USED.items()}


class Move(NamedTuple):
    """A model that was moved from one place to another."""

    model: str
    source: Place
    target: Place
    bytes: int
    seconds: float  # from its dispatch until it was complete


@dataclass(eq=False)
class ModelVersion:
    """One version of a model: equal copies at one or more places."""

    copies: dict[Place, PyTree]
    place: Place  # in the current stage
    shardings: list[Any]  # of its leaves, on the device
    writing: "Future[PyTree] | None" = None  # to the disk
    reading: "Future[list] | None" = None  # from the disk, ahead of its use
    moving: dict[Place, Future] = field(default_factory=dict)  # target -> a copy in flight


class HostOffloader:
    """The models of a run, each where the table puts it in the current stage; close it, or use it in a `with` block."""

    def __init__(self, table: Table, *, folder: str | os.PathLike | None = None):
        """`folder` takes the files; they are unlinked at once, so nothing is left of a process that was killed."""
        for name, row in table.items():
            if set(row) != set(STAGES) or not set(row.values()) <= set(PLACES):
                raise BadInput(f"the places of {name!r} are {dict(row)}: give each of {STAGES} one of {PLACES}")
            if DISK in row.values() and folder is None:
                raise BadInput(f"the places of {name!r} name the disk: pass the folder= that takes its files")
        self.table, self._folder = table, folder
        self._versions: dict[str, ModelVersion] = {}
        self._moves: list[Move] = []
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="flowgrpo-offloader")

    def __enter__(self) -> "HostOffloader":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Wait for moves in flight, and drop all models."""
        self._pool.shutdown()
        self._versions.clear()

    def put(self, name: str, tree: PyTree) -> None:
        """Take ownership of a model; does nothing if a copy of it, at any place, consists of the same arrays."""
        if name not in self.table:
            raise BadInput(f"the table of places has no model {name!r}: add its row; it has {', '.join(self.table)}")
        previous = self._versions.get(name)
        if previous is not None and any(_is_same(copy, tree) for copy in previous.copies.values()):
            return
        place = place_of(tree)
        leaves = jax.tree.leaves(tree)
        if DISK in self.table[name].values() and any(
            isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves
        ):
            raise BadInput(
                f"parts of the {name} are in other processes, so it can't go to the disk: offload to the host"
            )
        if place != DISK:
            shardings = [_in_default_memory(leaf.sharding) for leaf in leaves]
        elif previous is not None and len(previous.shardings) == len(leaves):
            shardings = previous.shardings
        else:
            raise BadInput(f"the {name} is on the disk, and its sharding is not known: put it on a device first")
        self._versions[name] = ModelVersion({place: tree}, place, shardings)

    def __getitem__(self, name: str) -> PyTree:
        """The model at its place in the current stage; its arrays may still be in flight."""
        version = self._versions[name]
        if version.place == DISK:
            _finish_writing(version)
        return version.copies[version.place]

    def enter(self, stage: str) -> None:
        """Move every model to its place in this stage; those that leave the device go first."""
        targets = {name: self.table[name][stage] for name in self._versions}
        for name in sorted(targets, key=lambda name: targets[name] == DEVICE):
            self._move(name, targets[name])

    def prefetch(self, stage: str) -> None:
        """Start reading from the disk what this stage needs on the device; takes no device memory."""
        for name, version in self._versions.items():
            if self.table[name][stage] == DEVICE and not {DEVICE, HOST} & set(version.copies) and not version.reading:
                version.reading = self._pool.submit(self._read, name, _finish_writing(version))

    def wait(self) -> None:
        """Wait until all moves are complete: needed before buffers are donated, and before moves are summed up."""
        for version in self._versions.values():
            for move in version.moving.values():
                move.result()
            version.moving.clear()
            if version.writing is not None:
                _finish_writing(version)

    def pop_moves(self) -> list[Move]:
        """The moves that were completed since the last call."""
        moves, self._moves = self._moves, []
        return moves

    # Moves --------------------------------------------------------------------------------------------

    def _move(self, name: str, place: Place) -> None:
        version = self._versions[name]
        if place not in version.copies and not (place == DISK and version.writing):
            if place == DISK:
                self._copy(name, version, HOST)
                leaves, treedef = jax.tree.flatten(version.copies[HOST])
                version.writing = self._pool.submit(self._write, name, leaves, treedef)
            else:
                self._copy(name, version, place)
        if place != DEVICE and DEVICE in version.copies:
            self._delete_on_device(name)
        if place == DISK and DISK in version.copies:
            version.copies.pop(HOST, None)
        version.place = place

    def _copy(self, name: str, version: ModelVersion, place: Place) -> None:
        """Start a copy to the device or to pinned memory, from the nearest place that has one."""
        if place in version.copies:
            return
        source: Place = next((near for near in (HOST, DEVICE) if near in version.copies), DISK)
        tree = _finish_writing(version) if source == DISK else version.copies[source]
        leaves, treedef = jax.tree.flatten(tree)
        if source == DISK:
            reading, version.reading = version.reading or self._pool.submit(self._read, name, tree), None
            leaves, source = reading.result(), HOST
        start = time.monotonic()
        copies = jax.device_put(leaves, [x if place == DEVICE else pinned(x) for x in version.shardings])
        version.copies[place] = jax.tree.unflatten(treedef, copies)

        def wait_for_copies() -> None:
            jax.block_until_ready(copies)
            self._record(name, source, place, copies, start)

        version.moving[place] = self._pool.submit(wait_for_copies)

    def _record(self, name: str, source: Place, target: Place, leaves: Sequence[Any], start: float) -> None:
        if leaves:
            size = sum(leaf.nbytes for leaf in leaves)
            self._moves.append(Move(name, source, target, size, time.monotonic() - start))

    def _delete_on_device(self, name: str) -> None:
        """Delete a model's buffers on the device, except those that another model shares."""
        others = [
            other.copies[DEVICE] for key, other in self._versions.items() if key != name and DEVICE in other.copies
        ]
        shared = {id(leaf) for leaf in jax.tree.leaves(others)}
        version = self._versions[name]
        if (arrival := version.moving.pop(DEVICE, None)) is not None:
            arrival.result()
        for leaf in jax.tree.leaves(version.copies.pop(DEVICE)):
            if id(leaf) not in shared and not leaf.is_deleted():
                leaf.delete()

    # Files --------------------------------------------------------------------------------------------

    def _write(self, name: str, leaves: list, treedef: Any) -> Any:
        """Write the arrays to a new file -> the tree of memory-mapped arrays; the file lasts as long as they do."""
        start_time = time.monotonic()
        arrays = [np.asarray(leaf) for leaf in leaves]
        starts = np.cumsum([0, *(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]).tolist()
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                for start, array in zip(starts, arrays, strict=False):
                    file.seek(start)
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                file.truncate(starts[-1])
                file.flush()
                views = [
                    np.memmap(file, array.dtype, "r", start, array.shape)
                    if array.nbytes
                    else np.zeros(array.shape, array.dtype).view(np.memmap)
                    for start, array in zip(starts, arrays, strict=False)
                ]
        except OSError as error:
            raise BadInput(
                f"{self._folder} can't take the {starts[-1] / 1e9:.1f} GB of the {name} ({error.strerror}): free some "
                "space, choose another folder, or offload to the host"
            ) from None
        self._record(name, HOST, DISK, arrays, start_time)
        return jax.tree.unflatten(treedef, views)

    def _read(self, name: str, tree: Any) -> list[np.ndarray]:
        start = time.monotonic()
        arrays = [np.array(view) for view in jax.tree.leaves(tree)]
        self._record(name, DISK, HOST, arrays, start)
        return arrays


# Places -----------------------------------------------------------------------------------------------


def pinned(sharding: Any) -> Any:
    """The same sharding in pinned host memory."""
    kinds = [memory.kind for memory in next(iter(sharding.addressable_devices)).addressable_memories()]
    if PINNED not in kinds:
        raise BadInput(f"this device has no {PINNED} memory (it has {', '.join(kinds)}): offload nothing here")
    return sharding.with_memory_kind(PINNED)


def place_of(tree: PyTree) -> Place:
    """The place of all arrays of a tree; raises `BadInput` if they are at several."""
    places = {_place_of_leaf(leaf) for leaf in jax.tree.leaves(tree)}
    if len(places) > 1:
        raise BadInput(f"a model is in {' and '.join(sorted(places))} at once: bring its arrays to one place")
    return places.pop() if places else DEVICE


def _place_of_leaf(leaf: Any) -> Place:
    if isinstance(leaf, np.memmap):
        return DISK
    if isinstance(leaf, jax.Array):
        return HOST if leaf.sharding.memory_kind == PINNED else DEVICE
    raise BadInput(f"a model holds a {type(leaf).__name__}, which is no array of JAX: put it on a device first")


def _in_default_memory(sharding: Any) -> Any:
    """The same sharding in the devices' default memory."""
    kind = next(iter(sharding.addressable_devices)).default_memory().kind
    return sharding if sharding.memory_kind == kind else sharding.with_memory_kind(kind)


def _is_same(tree: PyTree, other: PyTree) -> bool:
    """Whether two trees consist of the same array objects."""
    leaves, other_leaves = jax.tree.leaves(tree), jax.tree.leaves(other)
    return len(leaves) == len(other_leaves) and all(a is b for a, b in zip(leaves, other_leaves, strict=True))


def _finish_writing(version: ModelVersion) -> PyTree:
    """Wait for the copy on the disk, and return it; the host's is dropped if the disk is the model's place."""
    if version.writing is not None:
        version.copies[DISK], version.writing = version.writing.result(), None
        if version.place == DISK:
            version.copies.pop(HOST, None)
    return version.copies[DISK]


# Memory -----------------------------------------------------------------------------------------------

COUNTED, SUMMED = "memory_stats", "live arrays at the ends of stages"


class MemoryMeter:
    """Peak memory of each stage, in bytes on the fullest device."""

    def __init__(self, interval: float = 0.01):
        """`interval` is the time between two samples, in seconds."""
        self.source = COUNTED if _memory_stats() else SUMMED
        self.peaks: dict[str, int] = {}
        self._interval = interval

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the block as a stage; stages may overlap."""
        peak_before, is_over = _device_peak(), threading.Event()
        self._sample(name)
        if self.source == COUNTED:
            watch = threading.Thread(
                target=self._watch, args=(name, is_over), name="flowgrpo-memory-meter", daemon=True
            )
            watch.start()
        try:
            yield
        finally:
            is_over.set()
            self._sample(name)
            if (peak := _device_peak()) > peak_before:
                self._record(name, peak)

    def pop_peaks(self) -> dict[str, int]:
        """The peaks since the last call."""
        peaks, self.peaks = self.peaks, {}
        return peaks

    def _watch(self, name: str, is_over: threading.Event) -> None:
        while not is_over.wait(self._interval):
            self._sample(name)

    def _sample(self, name: str) -> None:
        stats = _memory_stats()
        self._record(name, max(device["bytes_in_use"] for device in stats) if stats else live_bytes()["device"])

    def _record(self, name: str, size: int) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0), size)


def live_bytes() -> dict[str, int]:
    """Bytes of all live arrays: on the fullest device of this process, and in the pinned memory of its host."""
    on_device: dict[Any, int] = dict.fromkeys(jax.local_devices(), 0)
    pinned, counted = 0, set()
    for array in jax.live_arrays():
        try:
            buffers = _buffers(array)
        except RuntimeError:  # another thread deleted or donated it just now
            continue
        for device, pointer, size in buffers:
            if (device, pointer) in counted:  # two arrays may share a buffer
                continue
            counted.add((device, pointer))
            if array.sharding.memory_kind == PINNED:
                pinned += size
            else:
                on_device[device] += size
    return {"device": max(on_device.values()), "pinned": pinned}


def _buffers(array: jax.Array) -> list[tuple[Any, int, int]]:
    """Device, address and bytes of each of an array's buffers in this process."""
    if array.is_fully_addressable:
        return [(x.device, x.data.unsafe_buffer_pointer(), x.data.nbytes) for x in array.addressable_shards]
    size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return [(device, id(array), size) for device in array.sharding.addressable_devices]


def _memory_stats() -> list[dict[str, int]]:
    """Memory statistics of each local device; empty if a device has none."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return [device for device in stats if device] if all(stats) else []


def _device_peak() -> int:
    return max((device.get("peak_bytes_in_use", 0) for device in _memory_stats()), default=0)
