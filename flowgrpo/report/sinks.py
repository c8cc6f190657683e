"""Send the lines of a run to loggers beside its files: TensorBoard, Weights & Biases, trackio.

    openers = open_sinks(["tensorboard", "wandb"], config=settings, say=progress.say)
    with Metrics(folder, position, sinks=openers) as metrics:  ...

Names are flattened (`tools/calculator`, `kl_by_turn/0`), and timings stand under `timings/`. A phase is a run of its
own in TensorBoard and a prefix elsewhere (`train/success`); the step is the update.

A resumed run sends nothing twice: TensorBoard is told to forget what came after the checkpoint; for the others
`loggers.json` remembers the run's id and the last update of each phase that was sent. A sink that fails says so in one
sentence, and the run goes on without it.
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
from flowgrpo.files import pip_install, read_json, write_whole
from flowgrpo.report.metrics import EDGES, Line, Opener, Sink
from flowgrpo.report.tensorboard import EventFile, Histogram

TENSORBOARD, SENT = "tensorboard", "loggers.json"
PACKAGED = ("wandb", "trackio")  # each needs the package, and is an extra, of its name
PROJECT = "flowgrpo"  # unless WANDB_PROJECT or TRACKIO_PROJECT names another
INIT_SECONDS, FINISH_SECONDS = 30, 60  # in which Weights & Biases has to answer


def check_sinks(names: Sequence[str]) -> tuple[str, ...]:
    """The names, once each; `BadInput` where one is unknown, or its package is missing."""
    for name in names:
        if name not in (TENSORBOARD, *PACKAGED):
            raise BadInput(f"--loggers={name} is unknown; choose from {', '.join((TENSORBOARD, *PACKAGED))}, or none")
        spec = find_spec(name) if name in PACKAGED else None
        if name in PACKAGED and (spec is None or spec.origin is None):  # a mere folder of that name has no origin
            raise BadInput(f"--loggers={name} needs the package {name}: {pip_install(name)}")
    return tuple(dict.fromkeys(names))


def open_sinks(names: Sequence[str], *, config: Mapping[str, Any], say: Callable[[str], None]) -> list[Opener]:
    """Make openers of the sinks for `Metrics`; `config` is what a run was started with, `say` prints a sentence."""
    openers: dict[str, Opener] = {
        TENSORBOARD: tensorboard,
        "wandb": lambda folder, _: wandb(folder, config),
        "trackio": lambda folder, _: trackio(folder, config),
    }
    return [partial(guarded, name=name, opener=openers[name], say=say) for name in check_sinks(names)]


def guarded(folder: Path, kept: Sequence[Line], *, name: str, opener: Opener, say: Callable[[str], None]) -> Sink:
    """A sink that never raises: what goes wrong in it is one sentence, and the end of it."""
    alive: list[Sink] = []

    def attempt(what: Callable[[], Any]) -> Any:
        try:
            return what()
        except Exception as error:  # a logger may raise whatever it likes
            alive.clear()
            words = " ".join(str(error).split()) or type(error).__name__
            say(f"warning: {name} failed ({words}); the run goes on without it, and metrics.jsonl has every figure")
            return None

    opened = attempt(lambda: opener(folder, kept))
    alive += [] if opened is None else [opened]
    return Sink(
        write=lambda line, timings: [attempt(lambda one=one: one.write(line, timings)) for one in alive],
        close=lambda: [attempt(one.close) for one in alive],
    )


# The sinks ----------------------------------------------------------------------------------------------


def tensorboard(folder: Path, kept: Sequence[Line]) -> Sink:
    """Event files under `tensorboard/PHASE`; what lies there of updates that are not in `kept` is purged."""
    place, files = Path(folder) / TENSORBOARD, {}
    last = {_slug(line["phase"]): line["update"] for line in kept}

    def file(phase: str) -> EventFile:
        if phase not in files:
            purge = last.get(phase, -1) + 1 if (place / phase).exists() else None
            files[phase] = EventFile(place / phase, purge_step=purge)
        return files[phase]

    def write(line: Line, timings: Line) -> None:
        file(_slug(line["phase"])).write(line["update"], _with_timings(line, timings), histograms(line))

    def close() -> None:
        for one in files.values():
            one.close()

    for there in place.glob("*"):  # a phase that is not written to again is purged, too
        file(there.name)
    return Sink(write, close)


def wandb(folder: Path, config: Mapping[str, Any]) -> Sink:
    """A run of Weights & Biases, which the environment configures (`WANDB_MODE=offline`, `WANDB_PROJECT`, ...)."""
    package, sent = import_module("wandb"), Sent(folder, "wandb")
    run = package.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=Path(folder).name,
        dir=str(folder),
        id=sent.id,
        resume="allow",
        config=dict(config),
        settings=package.Settings(console="off", silent=True, init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS),
    )
    known: set[str] = set()

    def log(phase: str, update: int, figures: Mapping[str, float], shown: Mapping[str, Histogram]) -> None:
        if phase not in known:  # each phase counts its own updates
            run.define_metric(f"{phase}/*", step_metric=f"{phase}/update")
            known.add(phase)
        drawn = {
            name: package.Histogram(np_histogram=(list(counts), list(edges))) for name, (edges, counts) in shown.items()
        }
        run.log({f"{phase}/update": update, **figures, **drawn})

    return Sink(sent.sending(log), run.finish)


def trackio(folder: Path, config: Mapping[str, Any]) -> Sink:
    """A run of trackio, which keeps it where the environment says (`TRACKIO_DIR`, `TRACKIO_PROJECT`)."""
    package, sent = import_module("trackio"), Sent(folder, "trackio")
    with redirect_stdout(sys.stderr):  # results alone are on stdout
        run = package.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{Path(folder).name}-{sent.id[:8]}",
            config=dict(config),
            resume="allow",
            embed=False,
        )

    def log(phase: str, update: int, figures: Mapping[str, float], shown: Mapping[str, Histogram]) -> None:
        del phase, shown
        run.log(dict(figures), step=update)

    def close() -> None:
        with redirect_stdout(sys.stderr):
            run.finish()

    return Sink(sent.sending(log), close)


class Sent:
    """Record of a remote run in `loggers.json`: its id, and the last update of each phase that it has."""

    def __init__(self, folder: Path, name: str):
        self._path, self._name = Path(folder) / SENT, name
        there = self._read().get(name, {})
        self.id: str = there.get("id") or uuid.uuid4().hex
        self.last: dict[str, int] = dict(there.get("last", {}))

    def remember(self, phase: str, update: int) -> None:
        """Note that this was sent."""
        self.last[phase] = update
        every = self._read() | {self._name: {"id": self.id, "last": self.last}}
        write_whole(self._path, json.dumps(every) + "\n")

    def sending(self, log: Callable) -> Callable[[Line, Line], None]:
        """Make a function that logs a line with its timings under its phase, unless it was sent before."""

        def send(line: Line, timings: Line) -> None:
            phase, update = _slug(line["phase"]), line["update"]
            if update <= self.last.get(phase, -1):
                return
            shown = {f"{phase}/{name}": histogram for name, histogram in histograms(line).items()}
            figures = {f"{phase}/{name}": value for name, value in _with_timings(line, timings).items()}
            log(phase, update, figures, shown)
            self.remember(phase, update)

        return send

    def _read(self) -> dict[str, Any]:
        return read_json(self._path, "remove it, to log under a new id") if self._path.exists() else {}


def _slug(phase: str) -> str:
    """The phase as part of a path."""
    return phase.replace(" ", "_")


# Names and figures --------------------------------------------------------------------------------------


def scalars(line: Line) -> dict[str, float]:
    """The finite numbers of a line by flat names; histograms, words, and where the line stands are left out."""
    rest = {name: value for name, value in line.items() if name not in ("phase", "update", *EDGES)}
    return dict(_flat(rest, ""))


def _with_timings(line: Line, timings: Line) -> dict[str, float]:
    return scalars(line) | {f"timings/{name}": value for name, value in scalars(timings).items()}


def _flat(value: Any, name: str) -> list[tuple[str, float]]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return [pair for key, one in value.items() for pair in _flat(one, f"{name}/{key}" if name else str(key))]
    return [(name, float(value))] if isinstance(value, int | float) and math.isfinite(value) else []


def histograms(line: Line) -> dict[str, Histogram]:
    """The histograms of a line that count anything, from the first bin that does to the last, with their edges."""
    return {name: _trimmed(edges(), line[name]) for name, edges in EDGES.items() if any(line.get(name) or ())}


def _trimmed(edges: Sequence[float], counts: Sequence[float]) -> Histogram:
    some = [place for place, count in enumerate(counts) if count]
    first, last = some[0], some[-1] + 1
    return edges[first : last + 1], counts[first:last]
