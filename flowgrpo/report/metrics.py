"""Write the figures of a run as it goes: `metrics.jsonl`, equal for equal runs, and `timings.jsonl`, from clocks.

    with Metrics(folder, position) as metrics:      # the position of the checkpoint that the run goes on from
        metrics.write({"phase": "train", "update": 12, "success": 0.54}, {"seconds": 0.21})
        checkpoints.save(12, {..., "metrics": metrics.position})

Each line is one JSON object. A run that goes on first cuts both files back to where the checkpoint left them, so that
`metrics.jsonl` of an interrupted run equals that of an undisturbed one byte for byte (S1); a line that a killed process
left half-written goes with the rest. Only deterministic figures belong there; whatever a clock had a part in is
a timing. `sinks` are given the same lines (`report.sinks`, `report.health`).

Names, in files, on the console and in plots: `phase`, `update`, `success` (with `success_low`, `success_high`),
`turns`, `tool_errors`, `kl`, `entropy`, and `tools`, a mapping from each tool to its share of the calls.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.types import BadInput

METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
Position = Mapping[str, int]  # bytes of each file; part of a checkpoint
Line = Mapping[str, Any]
OF_TOKENS = {  # figures of the tokens that an update learned from
    *("entropy", "kl", "kl_old", "surrogate", "ratio", "advantage", "correction", "clip_low_fraction"),
    *("clip_high_fraction", "ratio_p01", "ratio_p50", "ratio_p99", "log_ratio_max", "margin", "accuracy"),
    *("value_loss", "value", "target", "explained_variance"),
}


class Sink(NamedTuple):
    """Destination beside the files that is given the lines of a run."""

    write: Callable[[Line, Line], Any]  # a line of metrics as it is in the file, and what was timed
    close: Callable[[], Any]


Opener = Callable[[Path, Sequence[Line]], Sink]  # the folder, and the lines that a run which goes on has kept


class Metrics:
    """The two files of a run, open for appending after `position`; without one they begin anew."""

    def __init__(self, folder: str | os.PathLike, position: Position | None = None, *, sinks: Sequence[Opener] = ()):
        start = {METRICS: 0, TIMINGS: 0, **(position or {})}
        self._files: dict[str, FileIO] = {}
        self._sinks: list[Sink] = []
        try:
            for name in (METRICS, TIMINGS):
                self._files[name] = _open(Path(folder) / name, start[name])
        except BadInput:
            self.close()
            raise
        for name, file in self._files.items():  # only now, when both are found to be right
            file.truncate(start[name])
            file.seek(start[name])
        kept = list(read_metrics(Path(folder) / METRICS)) if sinks else []
        self._sinks = [opener(Path(folder), kept) for opener in sinks]

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> dict[str, int]:
        """End of each file now, in bytes: what a checkpoint must hold to go on from here."""
        return {name: file.tell() for name, file in self._files.items()}

    def write(self, metrics: Mapping[str, Any], timings: Mapping[str, Any] | None = None) -> None:
        """Append one line of each; timings carry the phase and the update of the metrics."""
        line, timed = plain(metrics), plain(timings or {})
        self._append(METRICS, line)
        if timed:
            same = {name: line[name] for name in ("phase", "update") if name in line}
            self._append(TIMINGS, {**same, **timed})
        for sink in self._sinks:
            sink.write(line, timed)

    def close(self) -> None:
        """Close both files, and the sinks."""
        for sink in self._sinks:
            sink.close()
        for file in self._files.values():
            file.close()

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            while data:  # unbuffered, so that a killed process loses no line; it may take less than all
                data = data[self._files[name].write(data) :]
        except OSError as error:
            raise BadInput(f"{self._files[name].name} could not be written ({error.strerror})") from None


def read_metrics(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The lines of such a file; a last line that is half-written is left out."""
    try:
        lines = Path(path).read_text(errors="replace").split("\n")
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror})") from None
    for number, line in enumerate(lines[:-1], 1):
        try:
            yield dict(json.loads(line))
        except (ValueError, TypeError):
            raise BadInput(f"{path}:{number} is not a JSON object: remove the line") from None


def without_empty_means(line: Line) -> Line:
    """The line without means over tokens, where no token was learned from."""
    if line.get("live_tokens") != 0:
        return line
    return {name: value for name, value in line.items() if name.removesuffix("_by_turn") not in OF_TOKENS}


def plain(value: Any) -> Any:
    """A figure as JSON has it: arrays as lists, float32 in its shortest form, and null where there is no number."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    array = np.asarray(value)
    if array.ndim:
        return [plain(inner) for inner in array]
    number = array.item()
    if isinstance(number, float) and array.dtype.itemsize <= 4:
        number = float(str(array.astype(np.float32)[()]))
    return number if not isinstance(number, float) or math.isfinite(number) else None


def _open(path: Path, start: int) -> FileIO:
    """The file, for appending without a buffer; `BadInput` where no line ends at byte `start`."""
    try:
        path.touch()
        file = path.open("r+b", buffering=0)
    except OSError as error:
        raise BadInput(f"{path} can't be written ({error.strerror}): choose another folder") from None
    size = file.seek(0, os.SEEK_END)
    file.seek(max(start - 1, 0))
    if size >= start and (start == 0 or file.read(1) == b"\n"):
        return file
    file.close()
    if size < start:
        raise BadInput(f"{path} has {size} bytes, and had {start} at the checkpoint: restore it, or begin a new run")
    raise BadInput(f"{path} has no line that ends at byte {start}, where the checkpoint left it: restore it")
