"""Send the metrics of a run to loggers, besides its files: TensorBoard, Weights & Biases, trackio.

    openers = open_sinks(["tensorboard", "wandb"], config=settings, log=progress.log)
    with MetricsWriter(folder, position, sinks=openers) as metrics:  ...

Names are flattened (`tools/calculator`, `kl_by_turn/0`), with timings under `timings/`. A phase is a run of its own in
TensorBoard and a prefix elsewhere (`train/success`); the step is the update.

A resumed run sends nothing twice: TensorBoard purges the steps after the checkpoint; for the others `loggers.json`
stores the run's id and the last update of each phase that was sent. A sink that fails is reported in one sentence, and
the run continues without it.
"""

import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowgrpo.errors import BadInput
from flowgrpo.files import pip_install, read_json, write_atomic
from flowgrpo.report.metrics import EDGES, Line, Opener, Sink
from flowgrpo.report.tensorboard import EventFile, Histogram

TENSORBOARD, SENT = "tensorboard", "loggers.json"
PACKAGED = ("wandb", "trackio")  # each needs the package of its name, which is an extra of ours
PROJECT = "flowgrpo"  # unless WANDB_PROJECT or TRACKIO_PROJECT names another
INIT_SECONDS, FINISH_SECONDS = 30, 60  # timeouts of Weights & Biases


def check_sinks(names: Sequence[str]) -> tuple[str, ...]:
    """The names, once each; `BadInput` if one is unknown, or its package is missing."""
    for name in names:
        if name not in (TENSORBOARD, *PACKAGED):
            raise BadInput(f"--loggers={name} is unknown; choose from {', '.join((TENSORBOARD, *PACKAGED))}, or none")
        spec = find_spec(name) if name in PACKAGED else None
        if name in PACKAGED and (spec is None or spec.origin is None):  # a mere folder of that name has no origin
            raise BadInput(f"--loggers={name} needs the package {name}: {pip_install(name)}")
    return tuple(dict.fromkeys(names))


def open_sinks(names: Sequence[str], *, config: Mapping[str, Any], log: Callable[[str], None]) -> list[Opener]:
    """Openers of these sinks for `MetricsWriter`; `config` has the settings of the run, `log` prints a sentence."""
    openers: dict[str, Opener] = {
        TENSORBOARD: tensorboard,
        "wandb": lambda folder, _: wandb(folder, config),
        "trackio": lambda folder, _: trackio(folder, config),
    }
    return [partial(open_guarded, name=name, opener=openers[name], log=log) for name in check_sinks(names)]


def open_guarded(
    folder: Path, kept_lines: Sequence[Line], *, name: str, opener: Opener, log: Callable[[str], None]
) -> Sink:
    """A sink that never raises: its first error is logged in one sentence, and disables it."""
    enabled: list[Sink] = []

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # loggers may raise anything
            enabled.clear()
            words = " ".join(str(error).split()) or type(error).__name__
            log(f"warning: {name} failed ({words}); the run continues without it, and metrics.jsonl has all metrics")
            return None

    opened = attempt(lambda: opener(folder, kept_lines))
    enabled += [] if opened is None else [opened]
    return Sink(
        write=lambda line, timings: [attempt(partial(sink.write, line, timings)) for sink in enabled],
        close=lambda: [attempt(sink.close) for sink in enabled],
    )


# The sinks ----------------------------------------------------------------------------------------------


def tensorboard(folder: Path, kept_lines: Sequence[Line]) -> Sink:
    """Event files under `tensorboard/PHASE`; updates in earlier files that are not in `kept_lines` are purged."""
    parent, files = Path(folder) / TENSORBOARD, {}
    last = {_slug(line["phase"]): line["update"] for line in kept_lines}

    def file(phase: str) -> EventFile:
        if phase not in files:
            purge = last.get(phase, -1) + 1 if (parent / phase).exists() else None
            files[phase] = EventFile(parent / phase, purge_step=purge)
        return files[phase]

    def write(line: Line, timings: Line) -> None:
        file(_slug(line["phase"])).write(line["update"], _with_timings(line, timings), histograms(line))

    def close() -> None:
        for event_file in files.values():
            event_file.close()

    for path in parent.glob("*"):  # a phase without new updates is purged, too
        file(path.name)
    return Sink(write, close)


def wandb(folder: Path, config: Mapping[str, Any]) -> Sink:
    """A run of Weights & Biases, configured by its environment variables (`WANDB_MODE`, `WANDB_PROJECT`, ...)."""
    package, sent = import_module("wandb"), SentUpdates(folder, "wandb")
    run = package.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=Path(folder).name,
        dir=str(folder),
        id=sent.id,
        resume="allow",
        config=dict(config),
        settings=package.Settings(console="off", silent=True, init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS),
    )
    defined: set[str] = set()

    def log(phase: str, update: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        if phase not in defined:  # each phase counts its own updates
            run.define_metric(f"{phase}/*", step_metric=f"{phase}/update")
            defined.add(phase)
        drawn = {
            name: package.Histogram(np_histogram=(list(counts), list(edges)))
            for name, (edges, counts) in histograms.items()
        }
        run.log({f"{phase}/update": update, **scalars, **drawn})

    return Sink(sent.make_write(log), run.finish)


def trackio(folder: Path, config: Mapping[str, Any]) -> Sink:
    """A run of trackio, configured by its environment variables (`TRACKIO_DIR`, `TRACKIO_PROJECT`)."""
    package, sent = import_module("trackio"), SentUpdates(folder, "trackio")
    with redirect_stdout(sys.stderr):  # stdout has the results alone
        run = package.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{Path(folder).name}-{sent.id[:8]}",
            config=dict(config),
            resume="allow",
            embed=False,
        )

    def log(phase: str, update: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        del phase, histograms
        run.log(dict(scalars), step=update)

    def close() -> None:
        with redirect_stdout(sys.stderr):
            run.finish()

    return Sink(sent.make_write(log), close)


class SentUpdates:
    """The entry of a remote run in `loggers.json`: its id, and the last update of each phase that was sent."""

    def __init__(self, folder: Path, name: str):
        self._path, self._name = Path(folder) / SENT, name
        entry = self._read().get(name, {})
        self.id: str = entry.get("id") or uuid.uuid4().hex
        self.last: dict[str, int] = dict(entry.get("last", {}))

    def make_write(self, log: Callable) -> Callable[[Line, Line], None]:
        """The `write` of a sink: `log(phase, update, scalars, histograms)` for lines that were not sent before."""

        def write(line: Line, timings: Line) -> None:
            phase, update = _slug(line["phase"]), line["update"]
            if update <= self.last.get(phase, -1):
                return
            values = {f"{phase}/{name}": value for name, value in _with_timings(line, timings).items()}
            log(phase, update, values, {f"{phase}/{name}": counts for name, counts in histograms(line).items()})
            self.last[phase] = update
            entries = self._read() | {self._name: {"id": self.id, "last": self.last}}
            write_atomic(self._path, json.dumps(entries) + "\n")

        return write

    def _read(self) -> dict[str, Any]:
        return read_json(self._path, "remove it, to log under a new id") if self._path.exists() else {}


def _slug(phase: str) -> str:
    """The phase as part of a path."""
    return phase.replace(" ", "_")


# Names and values --------------------------------------------------------------------------------------


def scalars(line: Line) -> dict[str, float]:
    """The finite numbers of a line by flat names, without phase, update, histograms and text."""
    values = {name: value for name, value in line.items() if name not in ("phase", "update", *EDGES)}
    return dict(_flatten(values, ""))


def _with_timings(line: Line, timings: Line) -> dict[str, float]:
    return scalars(line) | {f"timings/{name}": value for name, value in scalars(timings).items()}


def _flatten(value: Any, name: str) -> list[tuple[str, float]]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        names = {key: f"{name}/{key}" if name else str(key) for key in value}
        return [pair for key, inner in value.items() for pair in _flatten(inner, names[key])]
    return [(name, float(value))] if isinstance(value, int | float) and math.isfinite(value) else []


def histograms(line: Line) -> dict[str, Histogram]:
    """The histograms of a line that are not empty, as (edges, counts) from the first bin with counts to the last."""
    trimmed = {}
    for name, edges in EDGES.items():
        counts = line.get(name) or ()
        used = [place for place, count in enumerate(counts) if count]
        if used:
            first, last = used[0], used[-1] + 1
            trimmed[name] = edges()[first : last + 1], counts[first:last]
    return trimmed
