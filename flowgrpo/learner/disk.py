"""A disk that is full: found before anything is written, told from other errors, and said in a few words."""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # how a system says that there is no room


def is_full(error: BaseException) -> bool:
    """Whether this says that there is no room to write."""
    return isinstance(error, OSError) and error.errno in FULL


def check_room(folder: Path, size: int) -> None:
    """Raise where so many bytes can't be written in a folder, before half of them are."""
    free = shutil.disk_usage(folder).free
    if free < size:
        said = f"{os.strerror(errno.ENOSPC)}: it takes {size / 1e6:.1f} MB, and {free / 1e6:.1f} MB are left"
        raise OSError(errno.ENOSPC, said)


def reason(error: Exception) -> str:
    """Summarise an error in a few words, also where Orbax reports a full disk by a long ValueError."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next((name for name in map(os.strerror, FULL) if name in str(error)), str(error)[:200])


@contextmanager
def unlogged() -> Iterator[None]:
    """Without what Orbax logs, traceback by traceback, of errors that it raises as well."""
    log = logging.getLogger("absl")
    log.addFilter(_is_of_others)
    try:
        yield
    finally:
        log.removeFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname or record.levelno < logging.ERROR
