"""Names of all that a run writes in its folder, so that nothing else there is ever removed or overwritten.

A folder that is full of other things may hold a run, such as `--workdir=.` of a project: files have the names below or
are somebody else's. What a link leads to is somebody else's, too; a link with one of these names is removed as a link.
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

RUN = "run.json"  # there from the start of a run on
START, NOTE = "start", "made_with.json"  # the model that a run made to begin with, and the settings that it depends on
RESULT = "result.json"
EXAMPLES = "worked_examples.json"  # of a planner's prompt, as the tools answered when the run began

# Patterns, from the folder of the run on; what ends in a slash is a folder of Orbax and is removed whole.
_STEP = "[0-9]" * 8
_FILES = (METRICS, TIMINGS, WARNINGS, RESULT, SENT, CURVES, "curves.svg", "trajectories.html")
OVERWRITTEN = (  # by a new run
    *_FILES,
    *(f".{name}-{'[0-9a-f]' * 8}" for name in (*_FILES, RUN)),  # what a killed process had not put into its place
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
EMPTY = ("journal", "offload", "warm_start/checkpoints", "warm_start")  # folders that are empty now and then


def find_made(folder: Path, patterns: Sequence[str] = MADE) -> Iterator[Path]:
    """What lies in a folder under the names that a run gives, and no link's target."""
    for pattern in patterns:
        if pattern.startswith(f"{START}/") and not (folder / START / NOTE).exists():
            continue  # a model of somebody else's
        yield from _match(folder, pattern.split("/"))


def _match(place: Path, names: Sequence[str]) -> Iterator[Path]:
    for path in sorted(place.glob(names[0])):
        is_folder = path.is_dir()
        if len(names) == 1 or names[1:] == [""]:
            if path.is_symlink() or is_folder == (len(names) == 2):
                yield path
        elif is_folder and path.is_symlink():
            yield from [path] * any(True for _ in _match(path, names[1:]))
        elif is_folder:
            yield from _match(path, names[1:])


def remove_made(folder: Path, patterns: Sequence[str] = MADE) -> None:
    """Remove what a run made, and the folders that this leaves empty; all else stays."""
    places = {folder / place for place in EMPTY}
    for path in list(find_made(folder, patterns)):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise BadInput(f"{path} can't be removed ({error.strerror}): remove it, or choose another folder") from None
        places |= set(path.parents) - {folder, *folder.parents}
    for place in sorted(places, key=lambda place: len(place.parts), reverse=True):
        with suppress(OSError):  # it is not empty, not there, or a link
            place.rmdir()
