"""The folder of a run: what it was started with, checked before it resumes, and one process at a time.

    with run_folder("runs/lookup", "pure", {"seed": 0, "learning_rate": 3e-4}) as folder:
        ...

A run resumes bit for bit only under the same settings, software and hardware (S1), so `run.json` and the metadata of
every checkpoint store them all, and another run is refused, with the differences. The lock is the operating system's:
it ends with its process.
"""

import fcntl
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import jax

from flowgrpo import launch
from flowgrpo.files import make_folder, read_json, write_atomic
from flowgrpo.renamed import REMOVED, SETTINGS, current_names
from flowgrpo.training.config import flat_settings
from flowgrpo.training.run_files import (
    BEFORE,
    CHECKPOINTS,
    EXAMPLES,
    MADE,
    NOTE,
    OVERWRITTEN,
    RUN,
    START,
    find_made,
    remove_made,
)
from flowgrpo.types import JSON, BadInput

LOCK = ".lock"
SHOWN = 8  # differences at most in a message


@contextmanager
def run_folder(
    folder: str | os.PathLike,
    recipe: str,
    settings: Mapping[str, JSON],
    *,
    objects: Mapping[str, str] = {},
    may_change: Sequence[str] = (),
    extra_files: Sequence[str] = (),
    lock_timeout: float = 0.0,
) -> Iterator[Path]:
    """The folder, made for this run or checked to be its own, and locked while the block runs.

    The folder may hold other files, but none that the run would overwrite.

    Args:
        objects: names of objects that replace what settings name, by what they replace.
        may_change: settings that may change when a run resumes, such as its number of updates.
        extra_files: names of files that the run writes, besides those of `run_files`.
        lock_timeout: seconds to wait for another process that may be ending.
    """
    path = make_folder(folder)
    check_free(path, extra_files)
    with _locked(path, lock_timeout):
        check_run(path, recipe, settings, objects=objects, may_change=may_change)
        yield path


@contextmanager
def _locked(path: Path, lock_timeout: float = 0.0) -> Iterator[None]:
    """Lock the folder while the block runs."""
    deadline = time.monotonic() + lock_timeout
    try:
        lock = (path / LOCK).open("w")
    except OSError as error:
        raise BadInput(f"{path} can't be written ({error.strerror}): choose another folder") from None
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    words = f"another process works in {path}: wait for its end, or choose another folder"
                    raise BadInput(words) from None
            time.sleep(0.1)
        yield


def delete_run(folder: str | os.PathLike, *, extra_files: Sequence[str] = ()) -> None:
    """Delete the files that a run makes, by their names, and those named `extra_files`; all other files stay.

    A folder that holds no run, or in which another process works, stays as it is.
    """
    path = Path(folder)
    if not path.exists() or not any(path.iterdir()):
        return
    if not any((path / mark).exists() for mark in (RUN, LOCK, EXAMPLES, f"{START}/{NOTE}", f".{START}")):
        raise BadInput(f"{path} holds no run that could be started again: choose another folder, or empty it yourself")
    with _locked(path):
        if not (path / RUN).exists():  # killed before its start, so files with the names of metrics aren't its own
            remove_made(path, BEFORE)
            return
        remove_made(path, (*MADE, *extra_files))
        (path / RUN).unlink()  # last, so that a deletion that is killed can be called again


def check_free(folder: Path, extra_files: Sequence[str] = ()) -> None:
    """Raise `BadInput` if the first run in a folder would overwrite files that are not a run's."""
    if (folder / RUN).exists() or any(find_made(folder, CHECKPOINTS)):
        return
    foreign = next(find_made(folder, (*OVERWRITTEN, *extra_files)), None)
    if foreign is not None:
        raise BadInput(
            f"{folder} holds {foreign.relative_to(folder)} and no {RUN}, and a run there would overwrite it: choose "
            "another folder, or move it away"
        )


def check_same_run(
    folder: Path,
    recipe: str,
    settings: Mapping[str, JSON],
    *,
    objects: Mapping[str, str] = {},
    may_change: Sequence[str] = (),
) -> None:
    """Raise `BadInput` if the folder holds another run, or files in the way; nothing is written."""
    check_free(folder)
    if (folder / RUN).exists():
        check_same(folder, read_run(folder), identity(recipe, settings, objects), may_change=may_change)


def check_run(
    folder: Path,
    recipe: str,
    settings: Mapping[str, JSON],
    *,
    objects: Mapping[str, str] = {},
    may_change: Sequence[str] = (),
) -> None:
    """Write `run.json`; raise `BadInput` if there is one of another run."""
    path, current = folder / RUN, identity(recipe, settings, objects)
    if path.exists():
        saved = read_run(folder)
        check_same(folder, saved, current, may_change=may_change)
        if saved == current | {"settings": flat_settings(current["settings"])}:
            return
    write_atomic(path, json.dumps(current, indent=1) + "\n")


def identity(recipe: str, settings: Mapping[str, JSON], objects: Mapping[str, str] = {}) -> dict[str, JSON]:
    """What the bits of a run depend on: recipe, settings, names of objects, machine; every number must be finite."""
    for name, value in flat_settings(settings).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"{name} is {value}: give a finite number")
    named = {"objects": dict(objects)} if objects else {}
    parts = {"recipe": recipe, "settings": dict(settings), **named, "machine": machine()}
    return json.loads(json.dumps(parts, default=str))


def check_same(path: Path, saved: dict[str, JSON], current: dict[str, JSON], *, may_change: Sequence[str] = ()) -> None:
    """Raise `BadInput` if the identity saved at `path`, as `check_identity` returns it, is not the current one."""
    if saved.get("recipe") != current["recipe"]:
        raise BadInput(
            f"{path} holds a run of {saved.get('recipe')}, not of {current['recipe']}: choose another folder"
        )
    here = current | {"settings": flat_settings(current["settings"])}
    by_part = (
        list_differences(saved.get(part, {}), here.get(part, {}), may_change)
        for part in ("objects", "settings", "machine")
    )
    differences = list(dict.fromkeys(words for part in by_part for words in part))  # both may name the devices
    if differences:
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise BadInput(
            f"{path} holds another run: {'; '.join(differences[:SHOWN])}{more}. Choose another folder, or the "
            "settings that it was started with"
        )


def list_differences(
    saved: Mapping[str, JSON], current: Mapping[str, JSON], may_change: Sequence[str] = ()
) -> list[str]:
    """The differences between two mappings, but for `may_change`, in words: `seed: there 0, here 1`."""
    missing = object()

    def show(settings: Mapping[str, JSON], name: str) -> str:
        return json.dumps(settings[name]) if name in settings else "nothing"

    return [
        f"{name}: there {show(saved, name)}, here {show(current, name)}"
        for name in {**saved, **current}
        if name not in may_change and saved.get(name, missing) != current.get(name, missing)
    ]


def machine() -> dict[str, JSON]:
    """The software and hardware that the bits of a run depend on; starts JAX's backend."""
    import flowgrpo

    device = jax.devices()[0]
    kind = (
        device.device_kind
        if device.platform != "cpu"
        else f"{platform.machine()} {launch.cpu_info().get('model name', platform.processor())}"
    )
    return {
        "flowgrpo": flowgrpo.__version__,
        **{package: version(package) for package in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "device_kind": kind.strip(),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "xla_flags": " ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),
        "exact": launch.is_exact(),
    }


def read_run(folder: str | os.PathLike) -> dict[str, JSON]:
    """The `recipe`, `settings` (by name) and `machine` with which a run was last started, from `run.json`."""
    path = Path(folder) / RUN
    if not path.exists():
        raise BadInput(f"{folder} holds no run: {RUN} is missing; give the folder of one")
    return check_identity(read_json(path, "restore it, or choose another folder"), path)


def check_identity(identity: JSON, path: Path) -> dict[str, JSON]:
    """The identity that was read at `path`, settings by their current names; `BadInput` if it is none.

    Settings may be stored by section, or all in one, as earlier versions did.
    """
    record = identity if isinstance(identity, dict) else {}
    for name in ("settings", "machine"):
        if not isinstance(record.get(name), dict):
            raise BadInput(
                f"{path} is no record of a run, since it has no {name!r}: restore it, or choose another folder"
            )
    if not isinstance(record.get("recipe"), str):
        raise BadInput(f"{path} names no recipe, so it was written by an earlier version: choose another folder")
    objects = record.get("objects")
    settings = current_names(flat_settings(record["settings"]), SETTINGS)
    removed = REMOVED.get(record["recipe"], ())
    return {
        "recipe": record["recipe"],
        "settings": {name: value for name, value in settings.items() if name not in removed},
        **({"objects": objects} if isinstance(objects, dict) else {}),
        "machine": record["machine"],
    }
