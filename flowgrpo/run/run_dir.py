"""The folder of a run: what it was started with, checked before it goes on, and one process at a time.

    with run_folder("runs/lookup", "pure", {"seed": 0, "learning_rate": 3e-4}) as folder:
        ...

A run goes on to the same bits only under the same settings, software and hardware (S1), so `run.json` and the note of
every checkpoint hold them all, and another run is refused, with what differs. The lock is the operating system's: it
ends with its process.
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
from typing import Any

import jax

from flowgrpo import launch
from flowgrpo.files import make_folder, read_json, write_whole
from flowgrpo.run.run_files import (
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
from flowgrpo.types import BadInput

LOCK = ".lock"
SHOWN = 8  # differences at most in a message


@contextmanager
def run_folder(
    folder: str | os.PathLike,
    recipe: str,
    settings: Mapping[str, Any],
    *,
    may_differ: Sequence[str] = (),
    also: Sequence[str] = (),
    patience: float = 0.0,
) -> Iterator[Path]:
    """The folder, made for this run, or found to be its own; nobody else's while the block runs.

    Files of others may lie there, but none that the run would overwrite; `also` are the names of files that it writes
    beside those of `run_files`.

    `may_differ` names settings that may change when a run goes on, such as its number of updates. `patience` is how
    many seconds another process, which may be ending, has to leave the folder.
    """
    path = make_folder(folder)
    check_free(path, also)
    with _alone(path, patience):
        check_run(path, recipe, settings, may_differ=may_differ)
        yield path


@contextmanager
def _alone(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Nobody else works in the folder while the block runs."""
    until = time.monotonic() + patience
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
                if time.monotonic() >= until:
                    words = f"another process works in {path}: wait for its end, or choose another folder"
                    raise BadInput(words) from None
            time.sleep(0.1)
        yield


def begin_anew(folder: str | os.PathLike, *, also: Sequence[str] = ()) -> None:
    """Remove an earlier run, by the names of what a run makes (`also`: further ones); files of others stay.

    A folder that holds no run, or in which somebody works, stays as it is.
    """
    path = Path(folder)
    if not path.exists() or not any(path.iterdir()):
        return
    if not any((path / mark).exists() for mark in (RUN, LOCK, EXAMPLES, f"{START}/{NOTE}", f".{START}")):
        raise BadInput(f"{path} holds no run that could be begun again: choose another folder, or empty it yourself")
    with _alone(path):
        if not (path / RUN).exists():  # killed before it began, so that what has the name of metrics isn't its own
            remove_made(path, BEFORE)
            return
        remove_made(path, (*MADE, *also))
        (path / RUN).unlink()  # last, so that what is killed before can be called again


def check_free(folder: Path, also: Sequence[str] = ()) -> None:
    """Raise `BadInput` where a first run in a folder would overwrite files of others."""
    if (folder / RUN).exists() or any(find_made(folder, CHECKPOINTS)):
        return
    foreign = next(find_made(folder, (*OVERWRITTEN, *also)), None)
    if foreign is not None:
        raise BadInput(
            f"{folder} holds {foreign.relative_to(folder)} and no {RUN}, and a run there would overwrite it: choose "
            "another folder, or move it away"
        )


def check_own(folder: Path, recipe: str, settings: Mapping[str, Any], *, may_differ: Sequence[str] = ()) -> None:
    """Raise `BadInput` where the folder holds another run or files in its way, before anything is written there."""
    check_free(folder)
    if (folder / RUN).exists():
        check_same(folder, read_run(folder), identity(recipe, settings), may_differ=may_differ)


def check_run(folder: Path, recipe: str, settings: Mapping[str, Any], *, may_differ: Sequence[str] = ()) -> None:
    """Write `run.json` where there is none; otherwise raise `BadInput` where it tells of another run."""
    path, here = folder / RUN, identity(recipe, settings)
    if path.exists():
        there = read_run(folder)
        check_same(folder, there, here, may_differ=may_differ)
        if there == here:
            return
    write_whole(path, json.dumps(here, indent=1) + "\n")


def identity(recipe: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what a run's bits depend on, as JSON holds it: recipe, settings, machine; every number is finite."""
    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"{name} is {value}: give a finite number")
    return json.loads(json.dumps({"recipe": recipe, "settings": dict(settings), "machine": machine()}, default=str))


def check_same(
    path: Path, there: Mapping[str, Any], here: Mapping[str, Any], *, may_differ: Sequence[str] = ()
) -> None:
    """Raise `BadInput` where two identities differ; `there` is that of what lies at `path`."""
    if there.get("recipe") != here["recipe"]:
        raise BadInput(f"{path} holds a run of {there.get('recipe')}, not of {here['recipe']}: choose another folder")
    chosen, found = (differing(there.get(part, {}), here[part], may_differ) for part in ("settings", "machine"))
    differences = list(dict.fromkeys([*chosen, *found]))  # both may know of the devices
    if differences:
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise BadInput(
            f"{path} holds another run: {'; '.join(differences[:SHOWN])}{more}. Choose another folder, or the "
            "settings that it was started with"
        )


def differing(there: Mapping[str, Any], here: Mapping[str, Any], may_differ: Sequence[str] = ()) -> list[str]:
    """List in words the differences between two mappings, but for `may_differ`: `seed: there 0, here 1`."""
    nothing = object()
    return [
        f"{name}: there {_shown(there, name)}, here {_shown(here, name)}"
        for name in {**there, **here}
        if name not in may_differ and there.get(name, nothing) != here.get(name, nothing)
    ]


def machine() -> dict[str, Any]:
    """The software and hardware that the bits of a run depend on; starts JAX's backend."""
    import flowgrpo

    device = jax.devices()[0]
    kind = (
        device.device_kind
        if device.platform != "cpu"
        else f"{platform.machine()} {launch.processor().get('model name', platform.processor())}"
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


def read_run(folder: str | os.PathLike) -> dict[str, Any]:
    """Load from `run.json` the `recipe` and `settings` that a run was last started with, and the `machine`."""
    path = Path(folder) / RUN
    if not path.exists():
        raise BadInput(f"{folder} holds no run: {RUN} is missing; give the folder of one")
    return check_identity(read_json(path, "restore it, or choose another folder"), path)


def check_identity(there: Any, path: Path) -> dict[str, Any]:
    """The recipe, settings and machine that a file tells of; `BadInput` where it is no record of a run."""
    parts = {name: there.get(name) if isinstance(there, dict) else None for name in ("settings", "machine")}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise BadInput(
                f"{path} is no record of a run, since it has no {name!r}: restore it, or choose another folder"
            )
    if not isinstance(there.get("recipe"), str):
        raise BadInput(f"{path} names no recipe, so it was written by an earlier version: choose another folder")
    return {"recipe": there["recipe"], **parts}


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "nothing"
