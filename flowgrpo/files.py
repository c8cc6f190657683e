"""Files that are there when they are whole, whatever interrupts their writer; folders."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowgrpo.types import BadInput


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


def write_whole(path: Path, content: str | Callable[[Path], Any]) -> None:
    """Write a text, or let `content` write a file beside this one, and only then put it in its place.

    Until then the place holds what it held. Several processes may do this at the same time.
    """
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        if callable(content):
            content(beside)
        else:
            beside.write_text(content, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise BadInput(f"{path} could not be written ({error.strerror}): make room, or choose another place") from None
    finally:
        with suppress(OSError):  # it is in its place, or can't have been made
            beside.unlink()
