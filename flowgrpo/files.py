"""Files and folders that are there when they are whole, whatever interrupts their writer; code that a name names; the
command that installs what is missing."""

import ctypes
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from importlib import import_module, metadata
from pathlib import Path
from traceback import extract_tb
from typing import Any
from uuid import uuid4

from flowgrpo.errors import BadInput

AT_CWD, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def make_folder(folder: str | os.PathLike) -> Path:
    """The folder, made where it is missing; `BadInput` where nothing can be written in it."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{path} can't be made ({error.strerror}): choose another folder") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise BadInput(f"{path} can't be written: change its permissions, or choose another folder")
    return path


def is_file(path: Path) -> bool:
    """Whether there is such a file; a name that no file can have, as one of 5,000 characters, is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON as `json.loads` does; `ValueError` where it is nested deeper than Python can follow, too."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """Load a file that holds one JSON object; `BadInput` says why it can't be read, and ends with the fix."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no file")
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"{path} can't be read ({reason}): {fix}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path} can't be read (it holds a {type(value).__name__}, not a JSON object): {fix}")
    return value


def write_whole(path: Path, content: str | Callable[[Path], Any]) -> None:
    """Write a text, or let `content` write a file beside this one, and only then put it in its place.

    Until then the place holds what it held. Several processes and threads may do this at the same time.
    """
    beside = path.with_name(f".{path.name}-{uuid4().hex[:8]}")
    try:
        if callable(content):
            content(beside)
        else:
            beside.write_text(content, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise BadInput(
            f"{path} could not be written ({error.strerror or error}): make room, or choose another place"
        ) from None
    finally:
        with suppress(OSError):  # it is in its place, or can't have been made
            beside.unlink()


def replace_folder(folder: str | os.PathLike, fill: Callable[[Path], Any], *, names: Sequence[str], what: str) -> None:
    """Let `fill` write into a new folder beside this one, and only then put it in its place.

    A folder that is there is replaced whole, in one step, if it is empty or holds files of these names (patterns)
    alone, as `what` does; any other is refused. A process that is killed leaves the old one or the new one.
    """
    place = Path(folder).resolve()
    _check_replaceable(folder, place, names, what)
    make_folder(place.parent)
    beside = place.with_name(f".{place.name}-{uuid4().hex[:8]}")
    try:
        beside.mkdir()
        fill(beside)
        if place.exists():
            _exchange(beside, place)
        else:
            beside.rename(place)
    except OSError as error:
        raise BadInput(
            f"{folder} could not be written ({error.strerror or error}): make room, or choose another place"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _check_replaceable(folder: str | os.PathLike, place: Path, names: Sequence[str], what: str) -> None:
    if not place.exists():
        return
    if not place.is_dir():
        raise BadInput(f"can't write {what} to {folder}: it is a file; name a folder")
    others = (item for item in place.iterdir() if not item.is_file() or not any(fnmatch(item.name, n) for n in names))
    if strange := sorted(item.name for item in others):
        raise BadInput(f"{folder} holds {strange[0]}, which is no part of {what}: name a new folder, or an empty one")


def _exchange(one: Path, other: Path) -> None:
    """Exchange two folders in one step; by three renames where the system has no such step."""
    at_once = getattr(ctypes.CDLL(None), "renameat2", None)
    if at_once is not None and not at_once(AT_CWD, os.fsencode(one), AT_CWD, os.fsencode(other), EXCHANGE):
        return
    aside = one.with_name(f"{one.name}-old")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def import_named(name: str, what: str) -> Any:
    """Import what `MODULE:NAME` names; the module may lie in the current folder. `what` it is, a message says."""
    module, _, own = name.partition(":")
    if not own:
        raise BadInput(f"{what} {name!r} names a module and nothing in it: write MODULE:NAME")
    if not module or module.startswith("."):
        raise BadInput(f"{what} {name!r} has no name of a module before the colon: write MODULE:NAME")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(import_module(module), own)
    except (Exception, SystemExit) as error:  # a module of the user's, which may raise anything
        where = "its module lies in the current folder, or where Python looks"
        raise BadInput(f"{what} {name!r} can't be imported: {failure(error)} (MODULE:NAME; {where})") from None


def failure(error: BaseException) -> str:
    """What a user's code raised, in one line, with the place in it."""
    words = " ".join(str(error).split())
    if isinstance(error, ImportError | AttributeError | BadInput):
        return words
    ours = str(Path(__file__).parent)
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith((ours, "<frozen"))]
    frames = [frame for frame in frames if Path(frame.filename).parent.name != "importlib"]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {words:.300}{place}"


def pip_install(extra: str) -> str:
    """The command that installs the packages of an extra: `pip install 'math-verify>=0.9'` for "math".

    It names the packages themselves, so it works in a checkout and beside a wheel, and asks no index for this package.
    """
    try:
        wanted = metadata.requires("flowgrpo") or []
    except metadata.PackageNotFoundError:  # the sources alone, by PYTHONPATH
        wanted = []
    name = re.compile(rf"extra == ['\"]{extra.replace('_', '[-_]')}['\"]")  # metadata write - for _
    packages = [line.partition(";")[0].strip() for line in wanted if name.search(line)]
    return f"pip install {shlex.join(packages)}" if packages else f"pip install '.[{extra}]' where the sources are"
