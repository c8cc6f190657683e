"""Metrics of a run: `metrics.jsonl`, which is equal for equal runs, and `timings.jsonl`, from clocks.

    with MetricsWriter(folder, position) as metrics:      # position: of the checkpoint that the run resumes from
        metrics.write({"phase": "train", "update": 12, "success": 0.54}, {"seconds": 0.21})
        checkpoints.save(12, {..., "metrics": metrics.position})

Each line is one JSON object. A resumed run first cuts both files back to its checkpoint, so that `metrics.jsonl` of an
interrupted run equals that of an undisturbed one byte for byte (S1); a checksum verifies the lines that are kept. Only
deterministic numbers belong there. Sinks get the same lines.

Histograms (`ratio_histogram`, `advantage_histogram`) count the tokens learned from in fixed bins, so those of updates,
devices and runs can be added and compared. Bins of the ratio rho are even in asinh(log rho / 1e-4), with 1 as an edge;
bins of advantages have width 1/4, the middle one around 0. The outermost bins include everything beyond.
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
from flowgrpo.renamed import METRICS as METRIC_NAMES
from flowgrpo.renamed import current_names

NEAR = 1e-4  # log-ratio up to which bins have about even width
RATIO_SIDE, RATIO_STEP = 16, 0.8  # bins on either side of rho = 1, and their width in asinh(log rho / NEAR)
ADVANTAGE_SIDE, ADVANTAGE_STEP = 16, 0.25  # bins on either side of the middle one, and their width

RATIO, ADVANTAGE = "ratio_histogram", "advantage_histogram"


def ratio_edges() -> list[float]:
    """The edges of the bins of rho, in order: one more than there are bins."""
    places = range(-RATIO_SIDE, RATIO_SIDE + 1)
    return [math.exp(math.sinh(place * RATIO_STEP) * NEAR) for place in places]


def ratio_place(ratio: float) -> float:
    """Place of a ratio on the axis of bins: number of bins above rho = 1, negative below."""
    return math.asinh(math.log(ratio) / NEAR) / RATIO_STEP


def advantage_edges() -> list[float]:
    """The edges of the bins of advantages, in order; the outermost bins are drawn as wide as the others."""
    return [(place - 0.5) * ADVANTAGE_STEP for place in range(-ADVANTAGE_SIDE, ADVANTAGE_SIDE + 2)]


EDGES = {RATIO: ratio_edges, ADVANTAGE: advantage_edges}  # of each histogram that metrics may have


METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
Position = Mapping[str, Mapping[str, int]]  # bytes of each file, and their crc32; part of a checkpoint
START = {"bytes": 0, "crc32": 0}
Line = Mapping[str, Any]
OF_TOKENS = {  # means over the tokens that an update learned from
    *("entropy", "kl", "kl_old", "surrogate", "ratio", "advantage", "correction", "clip_low_fraction"),
    *("clip_high_fraction", "ratio_p01", "ratio_p50", "ratio_p99", "log_ratio_max", "sampler_kl", "margin", "accuracy"),
    *("value_loss", "value", "target", "explained_variance"),
}


class Sink(NamedTuple):
    """A further destination of the lines of a run."""

    write: Callable[[Line, Line], Any]  # (metrics as in the file, timings)
    close: Callable[[], Any]


Opener = Callable[[Path, Sequence[Line]], Sink]  # (folder, the lines that a resumed run has kept)


class MetricsWriter:
    """Appends to the two files of a run, from `position` on; without one the files start empty."""

    def __init__(self, folder: str | os.PathLike, position: Position | None = None, *, sinks: Sequence[Opener] = ()):
        position = position or dict.fromkeys((METRICS, TIMINGS), START)
        if set(position) != {METRICS, TIMINGS} or not all(_is_file_position(at) for at in position.values()):
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
        for name, file in self._files.items():  # only now that both are verified
            file.truncate(self._at[name]["bytes"])
            file.seek(self._at[name]["bytes"])
        kept_lines = list(read_metrics(Path(folder) / METRICS)) if sinks else []
        self._sinks = [opener(Path(folder), kept_lines) for opener in sinks]

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> Position:
        """Current end of each file, and its checksum; a checkpoint stores it to resume from here."""
        return {name: dict(at) for name, at in self._at.items()}

    def write(self, metrics: Mapping[str, Any], timings: Mapping[str, Any] | None = None) -> None:
        """Append a line to each file; timings get the phase and the update of the metrics."""
        line, timings_line = plain_json(metrics), plain_json(timings or {})
        self._append(METRICS, line)
        if timings_line:
            when = {name: line[name] for name in ("phase", "update") if name in line}
            self._append(TIMINGS, {**when, **timings_line})
        for sink in self._sinks:
            sink.write(line, timings_line)

    def close(self) -> None:
        """Close both files, and the sinks."""
        for sink in self._sinks:
            sink.close()
        for file in self._files.values():
            file.close()

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        data, at = (json.dumps(line, allow_nan=False) + "\n").encode(), self._at[name]
        try:
            while data:  # unbuffered, so that a killed process loses no line; a write may be partial
                size = self._files[name].write(data)
                at |= {"bytes": at["bytes"] + size, "crc32": zlib.crc32(data[:size], at["crc32"])}
                data = data[size:]
        except OSError as error:
            raise BadInput(f"{self._files[name].name} could not be written ({error.strerror})") from None


def read_metrics(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The lines of a metrics or timings file, under current names; an incomplete last line is left out."""
    try:
        lines = Path(path).read_text(errors="replace").split("\n")
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror})") from None
    for number, line in enumerate(lines[:-1], 1):
        try:
            yield current_names(dict(parse_json(line)), METRIC_NAMES)
        except (ValueError, TypeError):
            raise BadInput(f"{path}:{number} is not a JSON object: remove the line") from None


def check_no_unsaved_updates(folder: str | os.PathLike) -> None:
    """Raise `BadInput` if there are metrics of updates, which a run without a checkpoint would cut off."""
    path = Path(folder) / METRICS
    updates = [line["update"] for line in read_metrics(path) if line.get("phase") == "train"] if path.exists() else []
    if updates:
        raise BadInput(
            f"{path} has {updates[-1]} updates, and there is no checkpoint of any: restore the folder checkpoints "
            "beside it, or begin a new run"
        )


def without_empty_means(line: Line) -> Line:
    """The line, without means over tokens if no token was learned from."""
    if line.get("live_tokens") != 0:
        return line
    return {name: value for name, value in line.items() if name.removesuffix("_by_turn") not in OF_TOKENS}


def plain_json(value: Any) -> Any:
    """A value for JSON: arrays as lists, float32 in its shortest form, null for NaN and infinities."""
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


def _is_file_position(at: Any) -> bool:
    return isinstance(at, Mapping) and all(type(at.get(name)) is int and at[name] >= 0 for name in START)


def _open(path: Path, at: Mapping[str, int]) -> FileIO:
    """Open a file unbuffered; `BadInput` if its start up to `at` is not what was written."""
    try:
        path.touch()
        file = path.open("r+b", buffering=0)
    except OSError as error:
        raise BadInput(f"{path} can't be written ({error.strerror}): choose another folder") from None
    content, size = file.read(at["bytes"]), at["bytes"]
    if len(content) == size and zlib.crc32(content) == at["crc32"]:
        return file
    file.close()
    wrong = f"has {len(content)} bytes, and had {size}" if len(content) < size else f"has other first {size} bytes than"
    raise BadInput(f"{path} {wrong} at the checkpoint: restore it, or begin a new run")
