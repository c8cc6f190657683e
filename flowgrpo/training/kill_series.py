"""Kill runs at random moments, and compare them with an undisturbed run, bit for bit (S1): `run_soak`, `differences`.

    differences(first, second)     {} or {"checkpoint": "run/learner/params/embed", ...}

Whatever clocks have a part in may differ: timings, and of a result its speed and where it was resumed.
"""

import json
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.files import make_folder
from flowgrpo.report.metrics import METRICS, read_metrics
from flowgrpo.report.progress import with_progress
from flowgrpo.training.checkpoints import UNFINISHED, Checkpoints
from flowgrpo.training.session import RESULT
from flowgrpo.training.signals import BY_SIGNAL
from flowgrpo.training.tree_io import Leaf, to_leaves
from flowgrpo.types import BadInput

CLOCKS = ("minutes", "tokens_per_second", "resumed_at")  # entries of a result that may differ


# Differences ------------------------------------------------------------------------------------------


def differences(first: Path, second: Path) -> dict[str, str]:
    """The differences of two finished runs: the first place in each of metrics, result, checkpoint, trajectories."""
    places = {
        "metrics": _first_different_line(first / METRICS, second / METRICS),
        "result": _first_different_entry(result_of(first), result_of(second)),
        "checkpoint": _first_different_leaf(first, second),
        "trajectories": _first_different_trajectory(first / "trajectories", second / "trajectories"),
    }
    return {part: place for part, place in places.items() if place}


def result_of(folder: Path) -> dict[str, Any]:
    """The result of a finished run."""
    return json.loads((folder / RESULT).read_text())


def _first_different_line(first: Path, second: Path) -> str:
    lines = [path.read_bytes().split(b"\n") for path in (first, second)]
    if lines[0] == lines[1]:
        return ""
    number = next((i for i, pair in enumerate(zip(*lines, strict=False)) if pair[0] != pair[1]), min(map(len, lines)))
    return f"{first.name}:{number + 1}"


def _first_different_entry(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    names = [name for name in {**first, **second} if name not in CLOCKS]
    return next((name for name in names if first.get(name) != second.get(name)), "")


def _first_different_leaf(first: Path, second: Path) -> str:
    """Of the last checkpoint: parameters, optimizer, keys, counters, reference, start."""

    def bits(leaf: Leaf) -> tuple:
        value = np.asarray(leaf.value)
        return leaf.kind, str(value.dtype), value.shape, value.tobytes()

    both = [Checkpoints(folder, best="validation") for folder in (first, second)]
    if both[0].latest() != both[1].latest() or both[0].best() != both[1].best():
        return "its update"
    last = both[0].latest()
    assert last is not None
    for part in ("run", "start"):
        leaves = [{leaf.name: leaf for leaf in to_leaves(checkpoints.restore_part(last, part))} for checkpoints in both]
        for name in {**leaves[0], **leaves[1]}:
            pair = [by_name.get(name) for by_name in leaves]
            if pair[0] is None or pair[1] is None or bits(pair[0]) != bits(pair[1]):
                return f"{part}/{name}"
    return ""


def _first_different_trajectory(first: Path, second: Path) -> str:
    """The first trajectory that differs in anything but its seconds, including the answers of its tools."""
    names = sorted({path.name for folder in (first, second) if folder.exists() for path in folder.iterdir()})
    for name in names:
        paths = [folder / name for folder in (first, second)]
        if not all(path.exists() for path in paths):
            return f"{name}: missing in one"
        records = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
        if len(records[0]) != len(records[1]):
            return f"{name}: {len(records[0])} and {len(records[1])} lines"
        for number, pair in enumerate(zip(*records, strict=True), 1):
            if pair[0] | {"seconds": 0} != pair[1] | {"seconds": 0}:
                return f"{name}:{number}"
    return ""


# The timeline of a run ----------------------------------------------------------------------------------

# What a run does between two lines of the metrics, in the order in which moments are drawn.
KINDS = ("update", "write", "warm start", "validation", "update", "test", "update", "start")
NAMES = {"train": "update", "validation": "validation", "warm start": "warm start"}
POLL = 0.005  # seconds
WRITING = 0.2  # seconds within which a signal comes once a checkpoint is being written
TRIES = 4  # at a moment that the run may pass before the signal comes
ENDED = {"KILL": (-signal.SIGKILL,), "TERM": (BY_SIGNAL + signal.SIGTERM, -signal.SIGTERM)}
ENDED["INT"] = (BY_SIGNAL + signal.SIGINT, -signal.SIGINT, 1)


class Timeline(NamedTuple):
    """Times at which an undisturbed run wrote each line, and what it did before it."""

    seconds: list[float]  # since the start, of each line and of the end
    kinds: list[str]

    def gap(self, lines: int) -> float:
        """Seconds between line number `lines` and the next, or the end."""
        return self.seconds[lines] - (self.seconds[lines - 1] if lines else 0.0)


class Moment(NamedTuple):
    """Moment of a signal: when `lines` lines are written, after this fraction of the time to the next."""

    lines: int
    fraction: float
    kind: str


class Kill(NamedTuple):
    """Outcome of one signal."""

    moment: Moment
    landed: bool  # before the run had ended
    resumed_from: int | None  # the update that this process resumed from; None if it didn't get there
    checkpoint_before: int | None  # newest checkpoint at the start of the process
    checkpoint_after: int | None  # and at its end
    during_write: bool  # a checkpoint was being written


# Processes ----------------------------------------------------------------------------------------------


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen]:
    """The command as a process, which is killed at the end of the block."""
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.kill()


def count_lines(path: Path) -> int:
    """Number of complete lines of a file; 0 if it doesn't exist."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def undisturbed(command: Sequence[str], folder: Path) -> Timeline:
    """Run the command to its end -> the times at which the lines of the metrics appeared."""
    log, seconds, start = folder.with_suffix(".log"), [], time.monotonic()
    with started([*command, f"--workdir={folder}"], log) as process:
        while process.poll() is None:
            lines = count_lines(folder / METRICS)
            seconds += [time.monotonic() - start] * (lines - len(seconds))
            time.sleep(POLL)
    check_ended(process, log, (0,))
    kinds = [NAMES[line["phase"]] for line in read_metrics(folder / METRICS)]
    end = time.monotonic() - start
    return Timeline([*seconds, *[end] * (len(kinds) + 1 - len(seconds))], ["start", *kinds[1:], "test"])


def check_ended(process: subprocess.Popen, log: Path, allowed: Sequence[int]) -> None:
    """Raise `BadInput` if a process ended with another status than those allowed."""
    if process.returncode not in allowed:
        words = " / ".join(log.read_text().strip().splitlines()[-3:])
        raise BadInput(f"the run ended with status {process.returncode} ({log}): {words}")


# Moments ------------------------------------------------------------------------------------------------


def draw_moments(timeline: Timeline, kills: int, seed: int) -> list[Moment]:
    """Draw `kills` moments, of all kinds that the run has in turn -> sorted by time."""
    random, moments = np.random.default_rng(seed), []
    # A checkpoint is written after a validation, while the run continues.
    gaps = {kind: [i for i, name in enumerate(timeline.kinds) if name == kind] for kind in KINDS}
    gaps["write"] = [i + 1 for i in gaps["validation"]]
    kinds = [kind for kind in KINDS if gaps[kind]]
    for index in range(kills):
        kind = kinds[index % len(kinds)]
        moments.append(Moment(int(random.choice(gaps[kind])), float(random.random()), kind))
    return sorted(moments)


def kill_at(moment: Moment, command: Sequence[str], folder: Path, timeline: Timeline, name: str) -> Kill:
    """Start the run, and send the signal at this moment."""
    log, file = folder.with_suffix(".log"), folder / METRICS
    modified = file.stat().st_mtime_ns if file.exists() else None
    checkpoint_before, lines_at_open = Checkpoints(folder).latest(), None
    with started([*command, f"--workdir={folder}"], log) as process:
        while process.poll() is None:
            # Until the run has opened the file, it holds lines that will be cut off.
            if lines_at_open is None and file.exists() and file.stat().st_mtime_ns != modified:
                lines_at_open = count_lines(file)
            if moment.lines == 0 or (lines_at_open is not None and count_lines(file) >= moment.lines):
                break
            time.sleep(POLL)

        # Wait a fraction of the time to the next line, or until a checkpoint is being written.
        until = time.monotonic() + timeline.gap(moment.lines) * (1 if moment.kind == "write" else moment.fraction)
        is_first = lines_at_open is None or lines_at_open >= moment.lines
        if is_first and moment.kind == "update":  # the process has to load its programs before
            until += moment.fraction * timeline.gap(timeline.kinds.index("update"))
        while process.poll() is None and time.monotonic() < until:
            if moment.kind == "write" and any(folder.glob(f"checkpoints/{UNFINISHED}*")):
                time.sleep(moment.fraction * WRITING)
                break
            time.sleep(POLL / 3)
        process.send_signal(getattr(signal, f"SIG{name}"))
        process.wait()
    during_write = any(folder.glob(f"checkpoints/{UNFINISHED}*"))
    check_ended(process, log, (0, *ENDED[name]))
    resumed = re.search(r"resuming at update (\d+)", log.read_text())
    return Kill(
        moment,
        process.returncode != 0,
        int(resumed[1]) if resumed else None,
        checkpoint_before,
        Checkpoints(folder).latest(),
        during_write,
    )


def describe_kill(kill: Kill) -> str:
    """A line for a kill."""
    fraction = "    " if kill.moment.kind == "write" else f"{kill.moment.fraction:4.0%}"
    moment = f"{kill.moment.kind:12} {fraction} after line {kill.moment.lines:<3}"
    if not kill.landed:
        return f"{moment} had ended before"
    origin = "nothing yet" if kill.resumed_from is None else f"update {kill.resumed_from}"
    writing = ", while a checkpoint was being written" if kill.during_write else ""
    return f"{moment} resumed from {origin}, saved {kill.checkpoint_after}{writing}"


def wrong_starts(kills: Sequence[Kill]) -> list[str]:
    """The starts at which a run did not resume from its newest checkpoint, a sentence each."""
    return [
        f"a run resumed from update {kill.resumed_from}, and the newest checkpoint was of {kill.checkpoint_before}"
        for kill in kills
        if kill.resumed_from is not None and kill.resumed_from != kill.checkpoint_before
    ]


def kill_table(kills: Sequence[Kill]) -> str:
    """Table of the number of signals by what the run was doing."""
    landed = Counter(kill.moment.kind for kill in kills if kill.landed)
    writing = Counter(kill.moment.kind for kill in kills if kill.during_write)
    rows = [f"{kind:14}{landed[kind]:7}{writing[kind]:20}" for kind in dict.fromkeys(KINDS) if landed[kind]]
    head = f"{'in':14}{'kills':>7}{'writing a checkpoint':>20}"
    return "\n".join([head, *rows, f"{'all':14}{landed.total():7}{writing.total():20}"])


# The soak -----------------------------------------------------------------------------------------------


def folders(base: Path, *names: str) -> list[Path]:
    """The folders of the runs of a soak, none of which may exist yet."""
    paths = [base / name for name in names]
    if any(path.exists() for path in paths):
        raise BadInput(f"{base} holds an earlier soak: remove it, or choose another --workdir")
    make_folder(base)
    return paths


def run_soak(command: Sequence[str], base: Path, *, kills: int, seed: int, name: str) -> dict[str, Any]:
    """Run a command twice undisturbed and once with `kills` signals, and compare -> figures for JSON."""
    start = time.monotonic()
    first, second, killed = folders(base, "whole", "again", "killed")
    _, timeline = (undisturbed(command, folder) for folder in with_progress("undisturbed run", (first, second)))
    noise = differences(first, second)
    if noise:
        raise BadInput(f"two undisturbed runs differ in {noise}: this is not caused by kills")
    outcomes, moments = [], draw_moments(timeline, kills, seed)
    for number, moment in enumerate(moments, 1):
        for _ in range(TRIES):
            outcomes.append(kill_at(moment, command, killed, timeline, name))
            if outcomes[-1].landed:
                break
            moment = moment._replace(fraction=moment.fraction / 2)
        print(f"{number:3}/{len(moments)}  {describe_kill(outcomes[-1])}", flush=True)
    undisturbed(command, killed)
    print(f"\n{kill_table(outcomes)}\n")
    return {
        "signal": name,
        "kills": sum(kill.landed for kill in outcomes),
        "missed": sum(not kill.landed for kill in outcomes),
        "writing": sum(kill.during_write for kill in outcomes),
        "resumed_from": [kill.resumed_from for kill in outcomes if kill.resumed_from is not None],
        "resumed_at": result_of(killed)["resumed_at"],
        "params_sha256": result_of(killed)["params_sha256"],
        "differences": differences(first, killed),
        "wrong_starts": wrong_starts(outcomes),
        "minutes": round((time.monotonic() - start) / 60, 2),
    }
