"""Atomic writes of files and folders, JSON files, imports by MODULE:NAME, and the pip command of a missing extra."""

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

JSON = Any  # as in flowgrpo.types, which imports JAX

AT_CWD, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def make_folder(folder: str | os.PathLike) -> Path:
    """Create the folder if it is missing; raise `BadInput` if it is not writable."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{path} can't be made ({error.strerror}): choose another folder") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise BadInput(f"{path} can't be written: change its permissions, or choose another folder")
    return path


def is_file(path: Path) -> bool:
    """Whether the file exists; False for impossible names, such as one of 5,000 characters."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def parse_json(text: str | bytes, **options: Any) -> JSON:
    """`json.loads`, which also raises `ValueError` for JSON that is nested too deeply for Python."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """The JSON object in a file; the `BadInput` of an unreadable one ends with `fix`."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise ValueError("it is no file")
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"{path} can't be read ({reason}): {fix}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path} can't be read (it holds a {type(value).__name__}, not a JSON object): {fix}")
    return value


def write_atomic(path: Path, content: str | Callable[[Path], Any]) -> None:
    """Write a text, or let `content(path)` write the file, to a temporary file that then replaces `path` atomically.

    Several processes and threads may do this at the same time.
    """
    temporary = path.with_name(f".{path.name}-{uuid4().hex[:8]}")
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise BadInput(
            f"{path} could not be written ({error.strerror or error}): make room, or choose another place"
        ) from None
    finally:
        with suppress(OSError):  # it has been moved, or could not be created
            temporary.unlink()


def replace_folder(folder: str | os.PathLike, fill: Callable[[Path], Any], *, names: Sequence[str], kind: str) -> None:
    """Let `fill(path)` write into a temporary folder that then replaces `folder` atomically.

    An existing folder is replaced only if it is empty or has only files of these `names` (patterns), as a `kind` has
    (for messages: "a model"). A process that is killed leaves the old folder or the new one.
    """
    target = Path(folder).resolve()
    if target.exists():
        if not target.is_dir():
            raise BadInput(f"can't write {kind} to {folder}: it is a file; name a folder")
        for item in sorted(target.iterdir()):
            if not item.is_file() or not any(fnmatch(item.name, pattern) for pattern in names):
                raise BadInput(
                    f"{folder} holds {item.name}, which is no part of {kind}: name a new folder, or an empty one"
                )
    make_folder(target.parent)
    temporary = target.with_name(f".{target.name}-{uuid4().hex[:8]}")
    try:
        temporary.mkdir()
        fill(temporary)
        if target.exists():
            _exchange(temporary, target)
        else:
            temporary.rename(target)
    except OSError as error:
        raise BadInput(
            f"{folder} could not be written ({error.strerror or error}): make room, or choose another place"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _exchange(first: Path, second: Path) -> None:
    """Exchange two folders atomically; by three renames if the system can't."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is not None and not renameat2(AT_CWD, os.fsencode(first), AT_CWD, os.fsencode(second), EXCHANGE):
        return
    temporary = first.with_name(f"{first.name}-old")
    second.rename(temporary)
    first.rename(second)
    temporary.rename(first)


def import_named(name: str, kind: str) -> Any:
    """Import `MODULE:NAME`; the module may be in the current folder. `kind` is used in error messages ("reward")."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise BadInput(f"{kind} {name!r} names a module and nothing in it: write MODULE:NAME")
    if not module or module.startswith("."):
        raise BadInput(f"{kind} {name!r} has no name of a module before the colon: write MODULE:NAME")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module of the user's, which may raise anything
        raise BadInput(
            f"{kind} {name!r} can't be imported: {describe_error(error)} "
            "(MODULE:NAME; its module lies in the current folder, or where Python looks)"
        ) from None


def describe_error(error: BaseException) -> str:
    """One line about an exception of a user's code, with the line that raised it."""
    message = " ".join(str(error).split())
    if isinstance(error, ImportError | BadInput):
        return message
    own_folder = str(Path(__file__).parent)
    frames = [
        frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith((own_folder, "<frozen"))
    ]
    frames = [frame for frame in frames if Path(frame.filename).parent.name != "importlib"]
    if isinstance(error, AttributeError) and not frames:  # of a name that a module lacks
        return message
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message:.300}{place}"


def pip_install(extra: str) -> str:
    """The command that installs the packages of an extra: `pip install 'math-verify>=0.9'` for "math".

    It names the packages themselves, so it works in a checkout and with a wheel, and looks up no index for flowgrpo.
    """
    try:
        requirements = metadata.requires("flowgrpo") or []
    except metadata.PackageNotFoundError:  # sources on PYTHONPATH, not installed
        requirements = []
    name = re.compile(rf"extra == ['\"]{extra.replace('_', '[-_]')}['\"]")  # metadata write - for _
    packages = [line.partition(";")[0].strip() for line in requirements if name.search(line)]
    return f"pip install {shlex.join(packages)}" if packages else f"pip install '.[{extra}]' where the sources are"
