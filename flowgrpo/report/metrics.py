"""Write the figures of a run as it goes: `metrics.jsonl`, equal for equal runs, and `timings.jsonl`, from clocks.

    with Metrics(folder, position) as metrics:      # the position of the checkpoint that the run goes on from
        metrics.write({"phase": "train", "update": 12, "success": 0.54}, {"seconds": 0.21})
        checkpoints.save(12, {..., "metrics": metrics.position})

Each line is one JSON object. A resumed run first cuts both files back to its checkpoint, so that `metrics.jsonl` of an
interrupted run equals that of an undisturbed one byte for byte (S1); a checksum tells whether what is kept is what was
written. Only deterministic figures belong there. `sinks` are given the same lines.

Histograms (`ratio_histogram`, `advantage_histogram`) count live tokens in fixed bins, so those of updates, devices and
runs can be added and compared. Bins of rho are even in asinh(log rho / 1e-4), with 1 as an edge; those of advantages
are a quarter wide, the middle one around 0. The outermost hold all that lies beyond.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.errors import BadInput
from flowgrpo.files import parse_json

NEAR = 1e-4  # a log-ratio up to which bins are of about even width
RATIO_SIDE, RATIO_STEP = 16, 0.8  # bins on either side of rho = 1, and their width in asinh(log rho / NEAR)
ADVANTAGE_SIDE, ADVANTAGE_STEP = 16, 0.25  # bins on either side of the middle one, and their width

RATIO, ADVANTAGE = "ratio_histogram", "advantage_histogram"


def ratio_edges() -> list[float]:
    """The edges of the bins of rho, in order: one more than there are bins."""
    every = range(-RATIO_SIDE, RATIO_SIDE + 1)
    return [math.exp(math.sinh(place * RATIO_STEP) * NEAR) for place in every]


def ratio_place(ratio: float) -> float:
    """Convert a ratio to its place on the axis of bins: in bins from rho = 1 on, negative below it."""
    return math.asinh(math.log(ratio) / NEAR) / RATIO_STEP


def advantage_edges() -> list[float]:
    """The edges of the bins of advantages, in order; the outermost bins are drawn as wide as the others."""
    return [(place - 0.5) * ADVANTAGE_STEP for place in range(-ADVANTAGE_SIDE, ADVANTAGE_SIDE + 2)]


EDGES = {RATIO: ratio_edges, ADVANTAGE: advantage_edges}  # of each histogram that metrics may hold


METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
Position = Mapping[str, Mapping[str, int]]  # bytes of each file, and their crc32; part of a checkpoint
BEGINNING = {"bytes": 0, "crc32": 0}
Line = Mapping[str, Any]
OF_TOKENS = {  # figures of the tokens that an update learned from
    *("entropy", "kl", "kl_old", "surrogate", "ratio", "advantage", "correction", "clip_low_fraction"),
    *("clip_high_fraction", "ratio_p01", "ratio_p50", "ratio_p99", "log_ratio_max", "sampler_kl", "margin", "accuracy"),
    *("value_loss", "value", "target", "explained_variance"),
}


class Sink(NamedTuple):
    """Destination beside the files that is given the lines of a run."""

    write: Callable[[Line, Line], Any]  # a line of metrics as it is in the file, and what was timed
    close: Callable[[], Any]


Opener = Callable[[Path, Sequence[Line]], Sink]  # the folder, and the lines that a run which goes on has kept


class Metrics:
    """The two files of a run, open for appending after `position`; without one they begin empty."""

    def __init__(self, folder: str | os.PathLike, position: Position | None = None, *, sinks: Sequence[Opener] = ()):
        position = position or dict.fromkeys((METRICS, TIMINGS), BEGINNING)
        if set(position) != {METRICS, TIMINGS} or not all(_is_position(at) for at in position.values()):
            raise BadInput(
                f"the checkpoint of {folder} has no checksums of its metrics, as older ones: begin a new run"
            )
        self._at = {name: dict(at) for name, at in position.items()}
        self._files: dict[str, FileIO] = {}
        self._sinks: list[Sink] = []
        try:
            for name, at in self._at.items():
                self._files[name] = _open(Path(folder) / name, at)
        except BadInput:
            self.close()
            raise
        for name, file in self._files.items():  # only now, when both are found to be right
            file.truncate(self._at[name]["bytes"])
            file.seek(self._at[name]["bytes"])
        kept = list(read_metrics(Path(folder) / METRICS)) if sinks else []
        self._sinks = [opener(Path(folder), kept) for opener in sinks]

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> Position:
        """End of each file now, and a checksum of it: what a checkpoint must hold to go on from here."""
        return {name: dict(at) for name, at in self._at.items()}

    def write(self, metrics: Mapping[str, Any], timings: Mapping[str, Any] | None = None) -> None:
        """Append one line of each; timings carry the phase and the update of the metrics."""
        line, timed = plain_json(metrics), plain_json(timings or {})
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
        data, at = (json.dumps(line, allow_nan=False) + "\n").encode(), self._at[name]
        try:
            while data:  # unbuffered, so that a killed process loses no line; it may take less than all
                size = self._files[name].write(data)
                at |= {"bytes": at["bytes"] + size, "crc32": zlib.crc32(data[:size], at["crc32"])}
                data = data[size:]
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
            yield dict(parse_json(line))
        except (ValueError, TypeError):
            raise BadInput(f"{path}:{number} is not a JSON object: remove the line") from None


def check_saved(folder: str | os.PathLike) -> None:
    """Raise `BadInput` where there are metrics of updates; for a run without a checkpoint, which would cut them off."""
    path = Path(folder) / METRICS
    updates = [line["update"] for line in read_metrics(path) if line.get("phase") == "train"] if path.exists() else []
    if updates:
        raise BadInput(
            f"{path} tells of {updates[-1]} updates, and there is no checkpoint of any: restore the folder checkpoints "
            "beside it, or begin a new run"
        )


def without_empty_means(line: Line) -> Line:
    """The line without means over tokens, where no token was learned from."""
    if line.get("live_tokens") != 0:
        return line
    return {name: value for name, value in line.items() if name.removesuffix("_by_turn") not in OF_TOKENS}


def plain_json(value: Any) -> Any:
    """A figure as JSON has it: arrays as lists, float32 in its shortest form, and null where there is no number."""
    if isinstance(value, Mapping):
        return {str(name): plain_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    array = np.asarray(value)
    if array.ndim:
        return [plain_json(inner) for inner in array]
    number = array.item()
    if isinstance(number, float) and array.dtype.itemsize <= 4:
        number = float(str(array.astype(np.float32)[()]))
    return number if not isinstance(number, float) or math.isfinite(number) else None


def _is_position(at: Any) -> bool:
    return isinstance(at, Mapping) and all(type(at.get(name)) is int and at[name] >= 0 for name in BEGINNING)


def _open(path: Path, at: Mapping[str, int]) -> FileIO:
    """The file, for appending without a buffer; `BadInput` where it does not begin with what was written until `at`."""
    try:
        path.touch()
        file = path.open("r+b", buffering=0)
    except OSError as error:
        raise BadInput(f"{path} can't be written ({error.strerror}): choose another folder") from None
    kept, size = file.read(at["bytes"]), at["bytes"]
    if len(kept) == size and zlib.crc32(kept) == at["crc32"]:
        return file
    file.close()
    wrong = f"has {len(kept)} bytes, and had {size}" if len(kept) < size else f"has other first {size} bytes than"
    raise BadInput(f"{path} {wrong} at the checkpoint: restore it, or begin a new run")
