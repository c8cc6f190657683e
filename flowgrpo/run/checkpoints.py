"""The whole run as one tree in a folder, by Orbax, so that a run that was killed goes on bit for bit (S1).

    checkpoints = Checkpoints("runs/lookup", keep=2, best="success")
    checkpoints.save(12, tree, {"success": 0.54})
    step = checkpoints.latest()
    tree = checkpoints.restore(step, template)

    runs/lookup/checkpoints/00000012/
        arrays/             by Orbax; the names are those of the leaves
        checkpoint.json     the note; every leaf's place and kind; dtype, shape and checksum, or value

A checkpoint is written beside its place and moved there when it is whole, so that a process may be killed, and a disk
may be full, at any moment. What such a one left unfinished is never read, and is removed by the next that writes. The
checksums find damage that Orbax would not.

A disk that is full: found before anything is written, told from other errors, and said in a few words.
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
from flowgrpo.run.tree_io import Leaf, give_leaves, take_leaves
from flowgrpo.types import BadInput

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # how a system says that there is no room


def is_full(error: BaseException) -> bool:
    """Say whether this says that there is no room to write."""
    return isinstance(error, OSError) and error.errno in FULL


def check_room(folder: Path, size: int, files: int = 0) -> None:
    """Raise where so many bytes, or files, can't be written in a folder, before half of them are."""
    disk, reason = os.statvfs(folder), os.strerror(errno.ENOSPC)
    free = disk.f_bavail * disk.f_frsize
    if free < size:
        raise OSError(errno.ENOSPC, f"{reason}: it takes {size / 1e6:.1f} MB, and {free / 1e6:.1f} MB are left")
    if disk.f_files and disk.f_favail < files:  # some file systems don't count files
        raise OSError(errno.ENOSPC, f"{reason}: it takes {files} files, and the disk can hold {disk.f_favail} more")


def _reason(error: Exception) -> str:
    """Summarise an error in a few words, also where Orbax reports a full disk by a long ValueError."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next((name for name in map(os.strerror, FULL) if name in str(error)), str(error)[:200])


@contextmanager
def unlogged() -> Iterator[None]:
    """Without what Orbax prints, traceback by traceback, of errors that it raises as well."""
    _drop_late_results()
    log = logging.getLogger("absl")

    def is_of_others(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or record.levelno < logging.ERROR

    log.addFilter(is_of_others)
    try:
        yield
    finally:
        log.removeFilter(is_of_others)


def _drop_late_results() -> None:
    """Print nothing of reads and writes that end after another of the same checkpoint has failed.

    Orbax closes its event loop at the first failure, and TensorStore then hands the results of the others to a closed
    loop, in threads of its own and after Orbax has raised: one traceback an array, to nobody.
    """
    logging.getLogger("asyncio").addFilter(_is_asked_for)  # added once, however often this is called
    if sys.unraisablehook is not _print_unraisable:
        _HOOKS[:] = [sys.unraisablehook]
        sys.unraisablehook = _print_unraisable


_HOOKS: list[Callable[[Any], Any]] = []  # what was there before


def _print_unraisable(failure: Any) -> None:
    if isinstance(failure.exc_value, RuntimeError) and str(failure.exc_value) == "Event loop is closed":
        frames = traceback.extract_tb(failure.exc_traceback)
        if failure.object is None and any(frame.name == "call_soon_threadsafe" for frame in frames):
            return
    _HOOKS[0](failure)


def _is_asked_for(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not ("never retrieved" in record.getMessage() and "tensorstore_spec=" in str(error))


ARRAYS, CONTENT = "arrays", "checkpoint.json"
UNFINISHED = ".unfinished-"  # begins the name of what is being written or removed
REPLACED = (
    ".replaced-"  # begins the name of one of the same step as that which comes next; it counts until that is there
)
# What reading a checkpoint raises that isn't what was saved; what is nested deep, too.
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
PART = 1 << 28  # bytes of arrays that are written at a time
ROOM = 4096  # bytes that an array takes beside its numbers; as many are there for each of
AT_LEAST = 8  # files that every checkpoint has


class Checkpoints:
    """The checkpoints of one run.

    The newest `keep` are kept, and the one whose note has the highest number under the name `best`. With `background`,
    `save` returns when all is copied; the next `save`, `wait`, or the end of a `with` block waits until it is written
    and raises what went wrong. Reading waits, too, and raises nothing of that.
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
        """The steps of all whole checkpoints, oldest first."""
        self._settle()
        return self._steps()

    def latest(self) -> int | None:
        """The newest step; None where there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the highest number under the name `best`, the newest of equals; None where there is none.

        `BadInput` where a note can't be read, since that may be the one.
        """
        self._settle()
        best, unread = self._find_best()
        for step, error in unread.items():
            raise BadInput(f"which checkpoint is best can't be told: {self._damaged(step, CONTENT, error)}") from error
        return best

    def save(self, step: int, tree: Any, note: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint, replacing one of the same step; the note is what JSON can hold."""
        self.wait()
        leaves = take_leaves(tree, copy=self._writer is not None)
        plain = json.loads(json.dumps(dict(note or {})))  # a copy, too
        if self._writer is None:
            self._write(step, leaves, plain)
        else:
            self._pending = self._writer.submit(self._write, step, leaves, plain)

    def wait(self) -> None:
        """Return when everything is written; raises what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def note(self, step: int) -> dict[str, Any]:
        """Read the note that was saved with a checkpoint."""
        self._settle()
        return self._content(step)["note"]

    def restore(self, step: int, template: Any) -> Any:
        """Read the tree of a checkpoint; `template` gives structure, types, shapes and shardings.

        In the place of a `...` of the template, whatever is there comes back, as dicts, lists and leaves.
        """
        return self._fit(step, self._read(step, ""), template)

    def part(self, step: int, place: str, template: Any = ...) -> Any:
        """Restore one place in the tree, such as `run/learner/params`, as `restore` does; nothing else is read."""
        leaves = [leaf._replace(path=leaf.path[place.count("/") + 1 :]) for leaf in self._read(step, place)]
        if not leaves:
            raise BadInput(f"{self._path(step)} holds nothing at {place}: it was saved by a run of another kind")
        return self._fit(step, leaves, template)

    def _settle(self) -> None:
        """Wait for what is being written; how that ended is for `wait` to say."""
        wait_for([] if self._pending is None else [self._pending])

    def _steps(self) -> list[int]:
        """List the steps of all checkpoints; copies of them under other names are left alone."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadInput(f"{self.folder} can't be read ({error.strerror}): restore it, or its permissions") from None
        steps = {step_of(name.removeprefix(REPLACED)) for name in names if _is_there(self.folder / name / CONTENT)}
        return sorted(step for step in steps if step is not None)

    def _find_best(self) -> tuple[int | None, dict[int, Exception]]:
        """The best of those whose notes can be read, and what is wrong with the others."""
        ranked: list[tuple[float, int]] = []
        unread: dict[int, Exception] = {}
        for step in self._steps() if self._best else []:
            try:
                score = self._load(step)["note"].get(str(self._best))
                ranked += [(score, step)] if isinstance(score, int | float) and score == score else []
            except FileNotFoundError:  # removed by the process that writes here
                continue
            except DAMAGE as error:
                unread[step] = error
        return max(ranked)[1] if ranked else None, unread

    def _read(self, step: int, place: str) -> list[Leaf]:
        """The leaves at and below a place of the tree; all of them at ""."""
        self._settle()
        content = self._content(step)
        try:
            return self._leaves(step, content, place)
        except DAMAGE as error:
            raise self._damaged(step, ARRAYS, error) from error

    def _leaves(self, step: int, content: Mapping[str, Any], place: str) -> list[Leaf]:
        records = enumerate(content["leaves"])
        records = [(i, record) for i, record in records if f"{record['name']}/".startswith(place and f"{place}/")]
        names = {_key(i, record) for i, record in records if _is_stored(record)}
        stored = iter([_key(i, record) for i, record in enumerate(content["leaves"]) if _is_stored(record)])
        sizes, arrays = content.get("parts", [len(content["leaves"])]), {}
        for number, size in enumerate(sizes):
            held = [name for name in islice(stored, size) if name in names]
            if held:
                arrays |= _restore_arrays(_part(self._path(step) / ARRAYS, number, len(sizes)), held)
        return [_leaf(record, arrays.get(_key(i, record))) for i, record in records]

    def _fit(self, step: int, leaves: list[Leaf], template: Any) -> Any:
        try:
            return give_leaves(leaves, template)
        except BadInput as error:
            raise BadInput(f"{self._path(step)} does not fit: {error}") from None
        except DAMAGE as error:
            raise self._damaged(step, CONTENT, error) from error

    def _path(self, step: int) -> Path:
        place, replaced = (self.folder / f"{begin}{step:08d}" for begin in ("", REPLACED))
        return replaced if replaced.exists() and not place.exists() else place

    def _load(self, step: int) -> dict[str, Any]:
        """Load a checkpoint's `checkpoint.json` and verify its checksum."""
        content = parse_json((self._path(step) / CONTENT).read_bytes())
        if content.pop("crc32") != _checksum(content) or not isinstance(content["note"], dict):
            raise ValueError("it is not what was saved")
        if content["step"] != step:
            raise ValueError(f"it is of step {content['step']}: name its folder {content['step']:08d}")
        return content

    def _content(self, step: int) -> dict[str, Any]:
        """Load it as `_load` does, with one sentence for what is wrong."""
        try:
            return self._load(step)
        except FileNotFoundError:
            there = f"there are {', '.join(map(str, self._steps()))}" if self._steps() else "there is none"
            raise BadInput(f"{self.folder} has no checkpoint of step {step}: {there}") from None
        except DAMAGE as error:
            raise self._damaged(step, CONTENT, error) from error

    def _damaged(self, step: int, part: str, error: Exception) -> BadInput:
        """Say what to do; the checkpoint that is named to go on from is read whole before."""
        others = [other for other in self._steps() if other != step]
        whole = next((other for other in reversed(others) if self._is_whole(other)), None)
        remedy = "no other is whole: restore it from a copy, or begin a new run"
        if whole is not None:
            newer = [self._path(other).name for other in others if other > whole]
            remedy = f"remove {' and '.join(['that folder', *newer])} to go on from step {whole}"
        return BadInput(f"{self._path(step)} is damaged ({part}: {' '.join(str(error).split())[:200]}): {remedy}")

    def _is_whole(self, step: int) -> bool:
        """Say whether all of a checkpoint is what was saved."""
        try:
            self._leaves(step, self._load(step), "")
        except DAMAGE:
            return False
        return True

    def _write(self, step: int, leaves: list[Leaf], note: Mapping[str, Any]) -> None:
        """Write all beside its place, move it there, and remove what is no longer kept."""
        make_folder(self.folder)
        beside = self.folder / f"{UNFINISHED}{step:08d}"
        try:
            self._clear()
            beside.mkdir()
            self._fill(beside, step, leaves, note)
            replaced = self._set_aside(step, REPLACED)
            beside.rename(self.folder / f"{step:08d}")
            shutil.rmtree(replaced, ignore_errors=True)
        except (OSError, ValueError) as error:
            shutil.rmtree(beside, ignore_errors=True)  # it may be what filled the disk
            last = max(self._steps(), default=None)
            kept = f"the one of step {last} is whole" if last is not None else "there is no earlier one"
            raise BadInput(f"{self._path(step)} could not be written ({_reason(error)}): {kept}") from error
        self._prune()

    def _fill(self, folder: Path, step: int, leaves: list[Leaf], note: Mapping[str, Any]) -> None:
        """The files of a checkpoint."""
        records = [_record(leaf) for leaf in leaves]
        pairs = enumerate(zip(records, leaves, strict=True))
        arrays = {_key(i, record): leaf.value for i, (record, leaf) in pairs if _is_stored(record)}
        parts = _parts(arrays)
        content = {"step": step, "note": note, "leaves": records}
        content |= {"parts": [len(part) for part in parts]} if len(parts) > 1 else {}
        text = json.dumps(content | {"crc32": _checksum(content)})
        sizes, files = [array.nbytes for array in arrays.values()], AT_LEAST * max(len(parts), 1)
        check_room(folder, sum(sizes) + ROOM * (len(sizes) + files) + len(text), files)
        with unlogged():
            for number, part in enumerate(parts):
                place = _part(folder.absolute() / ARRAYS, number, len(parts))
                make_folder(place.parent)
                _orbax().save(place, part)
        (folder / CONTENT).write_text(text)

    def _clear(self) -> None:
        """Remove what a killed process left, and put back what it had not yet replaced."""
        for replaced in self._named(REPLACED):
            place = self.folder / replaced.name.removeprefix(REPLACED)
            if not place.exists():
                replaced.rename(place)
        for rest in (*self._named(UNFINISHED), *self._named(REPLACED)):
            shutil.rmtree(rest, ignore_errors=True)

    def _named(self, begin: str) -> list[Path]:
        """List what has the name of a checkpoint after this beginning."""
        return [path for path in self.folder.glob(f"{begin}*") if step_of(path.name.removeprefix(begin)) is not None]

    def _prune(self) -> None:
        """Remove what is neither among the newest nor the best, nor damaged and so perhaps the best."""
        best, unread = self._find_best()
        for step in set(self._steps()[: -self._keep]) - {best, *unread}:
            shutil.rmtree(self._set_aside(step, UNFINISHED), ignore_errors=True)

    def _set_aside(self, step: int, begin: str) -> Path:
        """Give a checkpoint, if there is one, a name that begins so."""
        aside, place = self.folder / f"{begin}{step:08d}", self.folder / f"{step:08d}"
        if place.exists():
            place.rename(aside)
        return aside


def params_sha256(params: Any) -> str:
    """A hash of a tree of arrays: of the places, dtypes, shapes and bytes of its leaves, sorted by place."""
    digest = hashlib.sha256()
    for leaf in sorted(take_leaves(params), key=lambda leaf: leaf.name):
        value = np.asarray(leaf.value)
        digest.update(f"{leaf.name}:{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


# Between leaves and files -----------------------------------------------------------------------------


def step_of(name: str) -> int | None:
    """The step of the checkpoint whose folder has this name; None where it is no such name."""
    return int(name) if re.fullmatch("[0-9]{8,}", name) and f"{int(name):08d}" == name else None


def _is_there(path: Path) -> bool:
    """Whether a file is there; one that can't be looked at counts, so that reading it says why."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _checksum(content: Mapping[str, Any]) -> int:
    """Of all that `checkpoint.json` says, as JSON writes it."""
    return zlib.crc32(json.dumps(content).encode())


def _record(leaf: Leaf) -> dict[str, Any]:
    """A leaf for `checkpoint.json`; an array without its numbers."""
    record: dict[str, Any] = {"name": leaf.name, "path": leaf.path, "kind": leaf.kind}
    if not isinstance(leaf.value, np.ndarray):
        return record | {"value": leaf.value}
    checksum = zlib.crc32(np.ascontiguousarray(leaf.value).reshape(-1).view(np.uint8).data)
    return record | {"dtype": str(leaf.value.dtype), "shape": leaf.value.shape, "crc32": checksum}


def _is_stored(record: Mapping[str, Any]) -> bool:
    """Say whether it is an array that Orbax keeps; it keeps none without elements."""
    return "dtype" in record and 0 not in record["shape"]


def _parts(arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The arrays in parts of about `PART`: Orbax holds twice what it writes beside the arrays themselves."""
    parts, size = [], PART
    for name, array in arrays.items():
        if size + array.nbytes > PART:
            parts, size = [*parts, {}], 0
        parts[-1][name] = array
        size += array.nbytes
    return parts


def _part(path: Path, number: int, count: int) -> Path:
    """The place of one of so many parts; a single one has no folder of its own."""
    return path / f"{number:03d}" if count > 1 else path


def _key(index: int, record: Mapping[str, Any]) -> str:
    """Under which name Orbax keeps an array: unique, and to be read by people."""
    return f"{index:05d}.{record['name'].replace('/', '.')}"


def _leaf(record: Mapping[str, Any], array: np.ndarray | None) -> Leaf:
    """The leaf of a record; ValueError where its array is not the one that was saved."""
    path = tuple((kind, key) for kind, key in record["path"])
    if "dtype" not in record:
        return Leaf(path, record["kind"], record["value"])
    if array is None and not _is_stored(record):
        array = np.zeros(record["shape"], jax.numpy.dtype(record["dtype"]))
    leaf = Leaf(path, record["kind"], array)
    if array is None or json.loads(json.dumps(_record(leaf))) != record:
        raise ValueError(f"{record['name']} is not what was saved")
    return leaf


def _restore_arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """These arrays of a checkpoint, by their names there, on the host."""
    import orbax.checkpoint as ocp

    wanted = ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), partial_restore=True)
    with unlogged():
        return _orbax().restore(path.absolute(), args=wanted)


def _orbax() -> Any:
    """Orbax for one flat dict of NumPy arrays."""
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
