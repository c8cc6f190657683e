"""Names of all files that a run writes in its folder, so that no other file there is ever deleted or overwritten.

A run may be in a folder with other files, such as `--workdir=.` of a project: only files with the names below are its
own. The target of a link is never its own; a link with one of these names is deleted as a link.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from flowgrpo.models.hf import FILES as MODEL_FILES
from flowgrpo.report.health import WARNINGS
from flowgrpo.report.metrics import METRICS, TIMINGS
from flowgrpo.report.plots import CURVES
from flowgrpo.report.sinks import SENT, TENSORBOARD
from flowgrpo.types import BadInput

RUN = "run.json"  # written when a run starts
START, NOTE = "start", "made_with.json"  # folder of the model that a run made to start from, and its settings
RESULT = "result.json"
EXAMPLES = "worked_examples.json"  # of a planner's prompt, with the answers of the tools when the run started

# Patterns below the folder of the run; one that ends in a slash is a folder of Orbax, and is deleted whole.
_STEP = "[0-9]" * 8
_FILES = (METRICS, TIMINGS, WARNINGS, RESULT, SENT, CURVES, "curves.svg", "trajectories.html")
OVERWRITTEN = (  # by a new run
    *_FILES,
    *(f".{name}-{'[0-9a-f]' * 8}" for name in (*_FILES, RUN)),  # temporary files of a killed process
    *(
        "trajectories/[0-9]*.jsonl",
        "trajectories/test-*.jsonl",
        "trajectories/warm_start.jsonl",
        "journal/[0-9]*-*.jsonl",
        "batches/[0-9]*.jsonl",
    ),
)
CHECKPOINTS = tuple(
    f"checkpoints/{begin}{_STEP}/{part}"
    for begin in ("", ".unfinished-", ".replaced-")
    for part in ("checkpoint.json", "arrays/", "arrays.orbax-checkpoint-tmp*/")
)
BEFORE = (  # made before there is a run.json
    *(f"warm_start/{pattern}" for pattern in CHECKPOINTS),
    EXAMPLES,
    *(f"{place}/{name}" for place in (START, f".{START}", f".{START}-whole") for name in (*MODEL_FILES, NOTE)),
)
MADE = (*OVERWRITTEN, *CHECKPOINTS, *BEFORE, "events.jsonl", f"{TENSORBOARD}/*/events.out.tfevents.*.flowgrpo")
EMPTY = ("journal", "offload", "warm_start/checkpoints", "warm_start")  # folders that may be empty


def find_made(folder: Path, patterns: Sequence[str] = MADE) -> Iterator[Path]:
    """Paths in a folder that match the patterns; links are not followed."""
    for pattern in patterns:
        if pattern.startswith(f"{START}/") and not (folder / START / NOTE).exists():
            continue  # a model that no run made
        yield from _match(folder, pattern.split("/"))


def _match(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    for path in sorted(folder.glob(names[0])):
        is_folder = path.is_dir()
        if len(names) == 1 or names[1:] == [""]:
            if path.is_symlink() or is_folder == (len(names) == 2):
                yield path
        elif is_folder and path.is_symlink():
            yield from [path] * any(True for _ in _match(path, names[1:]))
        elif is_folder:
            yield from _match(path, names[1:])


def remove_made(folder: Path, patterns: Sequence[str] = MADE) -> None:
    """Delete the files that a run made, and the folders that this leaves empty."""
    parents = {folder / name for name in EMPTY}
    for path in list(find_made(folder, patterns)):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise BadInput(f"{path} can't be removed ({error.strerror}): remove it, or choose another folder") from None
        parents |= set(path.parents) - {folder, *folder.parents}
    for parent in sorted(parents, key=lambda parent: len(parent.parts), reverse=True):
        with suppress(OSError):  # it is not empty, does not exist, or is a link
            parent.rmdir()
