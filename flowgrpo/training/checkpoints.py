"""Checkpoints of a run: one tree in a folder, written by Orbax, from which a killed run resumes bit for bit (S1).

    checkpoints = Checkpoints("runs/lookup", keep=2, best="success")
    checkpoints.save(12, tree, {"success": 0.54})
    step = checkpoints.latest()
    tree = checkpoints.restore(step, template)

    runs/lookup/checkpoints/00000012/
        arrays/             by Orbax, under the names of the leaves
        checkpoint.json     the metadata; path and kind of every leaf; dtype, shape and checksum, or value

A checkpoint is written to a temporary folder and renamed when it is complete, so a process may be killed, or a disk may
fill up, at any moment. Incomplete ones are never read, and are deleted by the next process that writes. The checksums
find damage that Orbax does not.

A full disk is detected before anything is written, and reported as such.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flowgrpo.files import make_folder, parse_json
from flowgrpo.training.tree_io import Leaf, from_leaves, to_leaves
from flowgrpo.types import JSON, BadInput, Params, PyTree

ARRAYS, CONTENT = "arrays", "checkpoint.json"
UNFINISHED = ".unfinished-"  # prefix of a checkpoint that is being written or deleted
REPLACED = ".replaced-"  # prefix of a checkpoint whose successor of the same step is being written; valid until then
# Exceptions of reading a checkpoint that is not what was saved, including one that is nested deeply.
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
PART = 1 << 28  # bytes of arrays that are written at a time
OVERHEAD = 4096  # bytes of disk per array and per file, besides the numbers
MIN_FILES = 8  # files of every checkpoint
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk


# The disk ---------------------------------------------------------------------------------------------


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means that the disk is full."""
    return isinstance(error, OSError) and error.errno in FULL


def check_disk_space(folder: Path, size: int, files: int = 0) -> None:
    """Raise `OSError` if the disk of a folder has no room for `size` bytes in this number of files."""
    disk, reason = os.statvfs(folder), os.strerror(errno.ENOSPC)
    free = disk.f_bavail * disk.f_frsize
    if free < size:
        raise OSError(errno.ENOSPC, f"{reason}: it takes {size / 1e6:.1f} MB, and {free / 1e6:.1f} MB are left")
    if disk.f_files and disk.f_favail < files:  # some file systems don't count files
        raise OSError(errno.ENOSPC, f"{reason}: it takes {files} files, and the disk can hold {disk.f_favail} more")


@contextmanager
def silence_orbax() -> Iterator[None]:
    """Suppress the tracebacks that Orbax logs of errors which it raises as well.

    Reads and writes of a checkpoint may end after another one of it has failed. Orbax closes its event loop at the
    first failure, and TensorStore then hands the results of the others to a closed loop, in threads of its own and
    after Orbax has raised: one traceback per array, which is suppressed for the rest of the process.
    """
    logging.getLogger("asyncio").addFilter(_is_no_late_result)  # added once, however often this is called
    if sys.unraisablehook is not _print_unraisable:
        _PREVIOUS_HOOK[:] = [sys.unraisablehook]
        sys.unraisablehook = _print_unraisable
    log = logging.getLogger("absl")

    def is_of_others(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or record.levelno < logging.ERROR

    log.addFilter(is_of_others)
    try:
        yield
    finally:
        log.removeFilter(is_of_others)


_PREVIOUS_HOOK: list[Callable[[Any], Any]] = []


def _print_unraisable(failure: Any) -> None:
    if isinstance(failure.exc_value, RuntimeError) and str(failure.exc_value) == "Event loop is closed":
        frames = traceback.extract_tb(failure.exc_traceback)
        if failure.object is None and any(frame.name == "call_soon_threadsafe" for frame in frames):
            return
    _PREVIOUS_HOOK[0](failure)


def _is_no_late_result(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not ("never retrieved" in record.getMessage() and "tensorstore_spec=" in str(error))


# Checkpoints ------------------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: of the run.
        keep: number of newest checkpoints that are kept.
        best: name of a number in the metadata; the checkpoint with the highest is kept, too.
        background: `save` returns when everything is copied; the next `save`, `wait`, or the end of a `with` block
            waits until it is written, and raises its errors. Reading waits, too, and raises none of them.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 2, best: str | None = None, background: bool = False):
        if keep < 1:
            raise BadInput(f"keep={keep} must be at least 1")
        self.folder = Path(folder) / "checkpoints"
        self._keep, self._best = keep, best
        self._writer = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, oldest first."""
        self._wait_for_writer()
        return self._list_steps()

    def latest(self) -> int | None:
        """The newest step; None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the highest `best`, the newest if several have it; None if there is none.

        `BadInput` if the metadata of one can't be read, since that may be the best.
        """
        self._wait_for_writer()
        best, unreadable = self._find_best()
        for step, error in unreadable.items():
            raise BadInput(f"the best checkpoint is unknown: {self._damaged(step, CONTENT, error)}") from error
        return best

    def save(self, step: int, tree: PyTree, metadata: Mapping[str, JSON] | None = None) -> None:
        """Write a checkpoint, which replaces one of the same step."""
        self.wait()
        leaves = to_leaves(tree, copy=self._writer is not None)
        plain = json.loads(json.dumps(dict(metadata or {})))  # a copy, too
        if self._writer is None:
            self._write(step, leaves, plain)
        else:
            self._pending = self._writer.submit(self._write, step, leaves, plain)

    def wait(self) -> None:
        """Wait until everything is written; raises errors of writing."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def metadata(self, step: int) -> dict[str, JSON]:
        """The metadata of a checkpoint."""
        self._wait_for_writer()
        return self._read_content(step)["note"]

    def restore(self, step: int, template: PyTree) -> PyTree:
        """The tree of a checkpoint; `template` gives structure, types, shapes and shardings.

        A `...` in the template accepts anything, and gives it as dicts, lists and leaves.
        """
        return self._fit(step, self._read(step, ""), template)

    def restore_part(self, step: int, place: str, template: PyTree = ...) -> PyTree:
        """Restore one place in the tree, such as `run/learner/params`, as `restore` does; nothing else is read."""
        leaves = [leaf._replace(path=leaf.path[place.count("/") + 1 :]) for leaf in self._read(step, place)]
        if not leaves:
            raise BadInput(f"{self._path(step)} holds nothing at {place}: it was saved by a run of another kind")
        return self._fit(step, leaves, template)

    # Reading ------------------------------------------------------------------------------------------

    def _wait_for_writer(self) -> None:
        """Wait for the checkpoint that is being written; `wait` raises its errors."""
        wait_for([] if self._pending is None else [self._pending])

    def _list_steps(self) -> list[int]:
        """The steps of all checkpoints; copies of them under other names are ignored."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadInput(f"{self.folder} can't be read ({error.strerror}): restore it, or its permissions") from None
        steps = {step_of(name.removeprefix(REPLACED)) for name in names if _exists(self.folder / name / CONTENT)}
        return sorted(step for step in steps if step is not None)

    def _find_best(self) -> tuple[int | None, dict[int, Exception]]:
        """The best of those whose metadata can be read, and the errors of the others."""
        ranked: list[tuple[float, int]] = []
        unreadable: dict[int, Exception] = {}
        for step in self._list_steps() if self._best else []:
            try:
                score = self._load(step)["note"].get(str(self._best))
                ranked += [(score, step)] if isinstance(score, int | float) and score == score else []
            except FileNotFoundError:  # deleted by the process that writes here
                continue
            except DAMAGE as error:
                unreadable[step] = error
        return max(ranked)[1] if ranked else None, unreadable

    def _read(self, step: int, place: str) -> list[Leaf]:
        """The leaves at and below a place of the tree; all of them for the place ""."""
        self._wait_for_writer()
        content = self._read_content(step)
        try:
            return self._read_leaves(step, content, place)
        except DAMAGE as error:
            raise self._damaged(step, ARRAYS, error) from error

    def _read_leaves(self, step: int, content: Mapping[str, JSON], place: str) -> list[Leaf]:
        records = enumerate(content["leaves"])
        records = [(i, record) for i, record in records if f"{record['name']}/".startswith(place and f"{place}/")]
        wanted = {_key(i, record) for i, record in records if _is_stored(record)}
        stored = iter([_key(i, record) for i, record in enumerate(content["leaves"]) if _is_stored(record)])
        sizes, arrays = content.get("parts", [len(content["leaves"])]), {}
        for number, size in enumerate(sizes):
            keys = [key for key in islice(stored, size) if key in wanted]
            if keys:
                arrays |= _restore_arrays(_part_path(self._path(step) / ARRAYS, number, len(sizes)), keys)
        return [_to_leaf(record, arrays.get(_key(i, record))) for i, record in records]

    def _fit(self, step: int, leaves: list[Leaf], template: PyTree) -> PyTree:
        try:
            return from_leaves(leaves, template)
        except BadInput as error:
            raise BadInput(f"{self._path(step)} does not fit: {error}") from None
        except DAMAGE as error:
            raise self._damaged(step, CONTENT, error) from error

    def _path(self, step: int) -> Path:
        path, replaced = (self.folder / f"{prefix}{step:08d}" for prefix in ("", REPLACED))
        return replaced if replaced.exists() and not path.exists() else path

    def _load(self, step: int) -> dict[str, JSON]:
        """The `checkpoint.json` of a checkpoint, with its checksum verified."""
        content = parse_json((self._path(step) / CONTENT).read_bytes())
        if content.pop("crc32") != _checksum(content) or not isinstance(content["note"], dict):
            raise ValueError("it is not what was saved")
        if content["step"] != step:
            raise ValueError(f"it is of step {content['step']}: name its folder {content['step']:08d}")
        return content

    def _read_content(self, step: int) -> dict[str, JSON]:
        """As `_load`, with errors in one sentence."""
        try:
            return self._load(step)
        except FileNotFoundError:
            steps = self._list_steps()
            available = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
            raise BadInput(f"{self.folder} has no checkpoint of step {step}: {available}") from None
        except DAMAGE as error:
            raise self._damaged(step, CONTENT, error) from error

    def _damaged(self, step: int, part: str, error: Exception) -> BadInput:
        """An error that says what to do; a checkpoint that it names to resume from has been read completely."""
        others = [other for other in self._list_steps() if other != step]
        intact = next((other for other in reversed(others) if self._is_intact(other)), None)
        remedy = "no other is whole: restore it from a copy, or begin a new run"
        if intact is not None:
            newer = [self._path(other).name for other in others if other > intact]
            remedy = f"remove {' and '.join(['that folder', *newer])} to resume from step {intact}"
        return BadInput(f"{self._path(step)} is damaged ({part}: {' '.join(str(error).split())[:200]}): {remedy}")

    def _is_intact(self, step: int) -> bool:
        """Whether all of a checkpoint is what was saved."""
        try:
            self._read_leaves(step, self._load(step), "")
        except DAMAGE:
            return False
        return True

    # Writing ------------------------------------------------------------------------------------------

    def _write(self, step: int, leaves: list[Leaf], metadata: Mapping[str, JSON]) -> None:
        """Write a checkpoint to a temporary folder, rename it, and delete those that are not kept."""
        make_folder(self.folder)
        temporary = self.folder / f"{UNFINISHED}{step:08d}"
        try:
            self._clean_up()
            temporary.mkdir()
            self._write_files(temporary, step, leaves, metadata)
            replaced = self._move_aside(step, REPLACED)
            temporary.rename(self.folder / f"{step:08d}")
            shutil.rmtree(replaced, ignore_errors=True)
        except (OSError, ValueError) as error:
            shutil.rmtree(temporary, ignore_errors=True)  # it may be what filled the disk
            reason = error.strerror if isinstance(error, OSError) else None
            if not reason:  # Orbax reports a full disk by a long ValueError
                reason = next((words for words in map(os.strerror, FULL) if words in str(error)), str(error)[:200])
            last = max(self._list_steps(), default=None)
            fallback = f"the one of step {last} is whole" if last is not None else "there is no earlier one"
            raise BadInput(f"{self._path(step)} could not be written ({reason}): {fallback}") from error

        best, unreadable = self._find_best()  # a damaged one may be the best
        for old in set(self._list_steps()[: -self._keep]) - {best, *unreadable}:
            shutil.rmtree(self._move_aside(old, UNFINISHED), ignore_errors=True)

    def _write_files(self, folder: Path, step: int, leaves: list[Leaf], metadata: Mapping[str, JSON]) -> None:
        records = [_to_record(leaf) for leaf in leaves]
        pairs = enumerate(zip(records, leaves, strict=True))
        arrays = {_key(i, record): leaf.value for i, (record, leaf) in pairs if _is_stored(record)}
        parts = _split(arrays)
        content = {"step": step, "note": metadata, "leaves": records}
        content |= {"parts": [len(part) for part in parts]} if len(parts) > 1 else {}
        text = json.dumps(content | {"crc32": _checksum(content)})
        sizes, files = [array.nbytes for array in arrays.values()], MIN_FILES * max(len(parts), 1)
        check_disk_space(folder, sum(sizes) + OVERHEAD * (len(sizes) + files) + len(text), files)
        with silence_orbax():
            for number, part in enumerate(parts):
                path = _part_path(folder.absolute() / ARRAYS, number, len(parts))
                make_folder(path.parent)
                _orbax().save(path, part)
        (folder / CONTENT).write_text(text)

    def _clean_up(self) -> None:
        """Delete what a killed process left, and put back a checkpoint that it had not replaced yet."""

        def find(prefix: str) -> list[Path]:
            paths = self.folder.glob(f"{prefix}*")
            return [path for path in paths if step_of(path.name.removeprefix(prefix)) is not None]

        for replaced in find(REPLACED):
            path = self.folder / replaced.name.removeprefix(REPLACED)
            if not path.exists():
                replaced.rename(path)
        for leftover in (*find(UNFINISHED), *find(REPLACED)):
            shutil.rmtree(leftover, ignore_errors=True)

    def _move_aside(self, step: int, prefix: str) -> Path:
        """Rename a checkpoint, if there is one, to a name with this prefix."""
        aside, path = self.folder / f"{prefix}{step:08d}", self.folder / f"{step:08d}"
        if path.exists():
            path.rename(aside)
        return aside


def params_sha256(params: Params) -> str:
    """A hash of a tree of arrays: of the paths, dtypes, shapes and bytes of its leaves, sorted by path."""
    digest = hashlib.sha256()
    for leaf in sorted(to_leaves(params), key=lambda leaf: leaf.name):
        value = np.asarray(leaf.value)
        digest.update(f"{leaf.name}:{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


# Between leaves and files -----------------------------------------------------------------------------


def step_of(name: str) -> int | None:
    """The step of the checkpoint whose folder has this name; None if it is no such name."""
    return int(name) if re.fullmatch("[0-9]{8,}", name) and f"{int(name):08d}" == name else None


def _exists(path: Path) -> bool:
    """Whether a file exists; one that can't be accessed counts, so that reading it raises why."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _checksum(content: Mapping[str, JSON]) -> int:
    """Checksum of the content of `checkpoint.json`."""
    return zlib.crc32(json.dumps(content).encode())


def _to_record(leaf: Leaf) -> dict[str, JSON]:
    """A leaf as in `checkpoint.json`: an array without its numbers."""
    record: dict[str, JSON] = {"name": leaf.name, "path": leaf.path, "kind": leaf.kind}
    if not isinstance(leaf.value, np.ndarray):
        return record | {"value": leaf.value}
    checksum = zlib.crc32(np.ascontiguousarray(leaf.value).reshape(-1).view(np.uint8).data)
    return record | {"dtype": str(leaf.value.dtype), "shape": leaf.value.shape, "crc32": checksum}


def _to_leaf(record: Mapping[str, JSON], array: np.ndarray | None) -> Leaf:
    """The leaf of a record; ValueError if its array is not the one that was saved."""
    path = tuple((kind, key) for kind, key in record["path"])
    if "dtype" not in record:
        return Leaf(path, record["kind"], record["value"])
    if array is None and not _is_stored(record):
        array = np.zeros(record["shape"], jax.numpy.dtype(record["dtype"]))
    leaf = Leaf(path, record["kind"], array)
    if array is None or json.loads(json.dumps(_to_record(leaf))) != record:
        raise ValueError(f"{record['name']} is not what was saved")
    return leaf


def _is_stored(record: Mapping[str, JSON]) -> bool:
    """Whether a leaf is an array that Orbax stores; it stores none without elements."""
    return "dtype" in record and 0 not in record["shape"]


def _split(arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The arrays in parts of about `PART` bytes: Orbax takes twice what it writes, besides the arrays themselves."""
    parts, size = [], PART
    for name, array in arrays.items():
        if size + array.nbytes > PART:
            parts, size = [*parts, {}], 0
        parts[-1][name] = array
        size += array.nbytes
    return parts


def _part_path(path: Path, number: int, count: int) -> Path:
    """Path of one of `count` parts; a single one has no subfolder."""
    return path / f"{number:03d}" if count > 1 else path


def _key(index: int, record: Mapping[str, JSON]) -> str:
    """Name under which Orbax stores an array: unique and readable."""
    return f"{index:05d}.{record['name'].replace('/', '.')}"


def _restore_arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """These arrays of a checkpoint, by their names there, on the host."""
    import orbax.checkpoint as ocp

    wanted = ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), partial_restore=True)
    with silence_orbax():
        return _orbax().restore(path.absolute(), args=wanted)


def _orbax() -> Any:
    """Orbax for one flat dict of NumPy arrays."""
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
