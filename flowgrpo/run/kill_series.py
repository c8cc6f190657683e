"""Kill runs at random moments of a timeline, and compare what came of it, bit for bit (S1): `run_soak`, `differences`.

    differences(one, two)     {} or {"checkpoint": "run/learner/params/embed", ...}

All that clocks have a part in may differ: timings, and of a result its speed and where it was resumed.
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
from flowgrpo.run.checkpoints import UNFINISHED, Checkpoints
from flowgrpo.run.session import RESULT
from flowgrpo.run.signals import BY_SIGNAL
from flowgrpo.run.tree_io import take_leaves
from flowgrpo.types import BadInput

CLOCKS = ("minutes", "tokens_per_second", "resumed_at")  # of a result: what may differ


def differences(one: Path, two: Path) -> dict[str, str]:
    """Find what differs between two finished runs: by part, the first place."""
    parts = {
        "metrics": _in_lines(one / METRICS, two / METRICS),
        "result": _in_result(result_of(one), result_of(two)),
        "checkpoint": _in_leaves(one, two),
        "trajectories": _in_trajectories(one / "trajectories", two / "trajectories"),
    }
    return {name: words for name, words in parts.items() if words}


def _in_lines(one: Path, two: Path) -> str:
    lines = [path.read_bytes().split(b"\n") for path in (one, two)]
    if lines[0] == lines[1]:
        return ""
    number = next((i for i, pair in enumerate(zip(*lines, strict=False)) if pair[0] != pair[1]), min(map(len, lines)))
    return f"{one.name}:{number + 1}"


def result_of(folder: Path) -> dict[str, Any]:
    """Load the result of a finished run."""
    return json.loads((folder / RESULT).read_text())


def _in_result(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    names = [name for name in {**one, **two} if name not in CLOCKS]
    return next((name for name in names if one.get(name) != two.get(name)), "")


def _in_leaves(one: Path, two: Path) -> str:
    """The first leaf of the last checkpoint that differs: parameters, optimizer, keys, counters, reference, start."""
    steps = [Checkpoints(folder, best="validation") for folder in (one, two)]
    if steps[0].latest() != steps[1].latest() or steps[0].best() != steps[1].best():
        return "its update"
    last = steps[0].latest()
    assert last is not None
    for part in ("run", "start"):
        leaves = [{leaf.name: leaf for leaf in take_leaves(each.part(last, part))} for each in steps]
        for name in {**leaves[0], **leaves[1]}:
            pair = [leaf.get(name) for leaf in leaves]
            if None in pair or _bits(pair[0]) != _bits(pair[1]):
                return f"{part}/{name}"
    return ""


def _bits(leaf) -> tuple:
    value = np.asarray(leaf.value)
    return leaf.kind, str(value.dtype), value.shape, value.tobytes()


def _in_trajectories(one: Path, two: Path) -> str:
    """The first trajectory that differs in anything but its seconds, with all that its tools said."""
    names = sorted({path.name for folder in (one, two) if folder.exists() for path in folder.iterdir()})
    for name in names:
        paths = [folder / name for folder in (one, two)]
        if not all(path.exists() for path in paths):
            return f"{name}: missing in one"
        told = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
        if len(told[0]) != len(told[1]):
            return f"{name}: {len(told[0])} and {len(told[1])} lines"
        for number, pair in enumerate(zip(*told, strict=True), 1):
            if pair[0] | {"seconds": 0} != pair[1] | {"seconds": 0}:
                return f"{name}:{number}"
    return ""


# What is going on between two lines of the metrics, by the second; the order in which moments are drawn.
KINDS = ("update", "write", "warm start", "examination", "update", "test", "update", "start")
NAMES = {"train": "update", "validation": "examination", "warm start": "warm start"}
POLL = 0.005  # seconds
WRITING = 0.2  # seconds within which a signal comes once a checkpoint is being written
TRIES = 4  # at a moment that the run may pass before the signal comes
ENDED = {"KILL": (-signal.SIGKILL,), "TERM": (BY_SIGNAL + signal.SIGTERM, -signal.SIGTERM)}
ENDED["INT"] = (BY_SIGNAL + signal.SIGINT, -signal.SIGINT, 1)


class Timeline(NamedTuple):
    """Times at which an undisturbed run wrote each line, in seconds from its start, and what was going on before it."""

    seconds: list[float]  # of each line, and of the end
    kinds: list[str]

    def gap(self, lines: int) -> float:
        """Say how long the run takes from so many lines to the next, or to its end."""
        return self.seconds[lines] - (self.seconds[lines - 1] if lines else 0.0)


class Moment(NamedTuple):
    """Moment of a signal: once there are so many lines, after this share of the time to the next."""

    lines: int
    share: float
    kind: str


class Kill(NamedTuple):
    """Outcome of one signal: its moment, whether it landed, and the run's checkpoints before and after it."""

    moment: Moment
    landed: bool  # before the run had ended
    said: int | None  # the update from which this process went on; None where it didn't come to that
    began: int | None  # the newest checkpoint when it was started
    saved: int | None  # and when it had ended
    torn: bool  # a checkpoint was being written


# Processes ----------------------------------------------------------------------------------------------


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen]:
    """The experiment as a process, which doesn't outlive the block."""
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.kill()


def count_lines(path: Path) -> int:
    """Count the whole lines of a file that may not be there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def undisturbed(command: Sequence[str], folder: Path) -> Timeline:
    """Run to the end, and note when each line of the metrics appeared."""
    log, seconds, began = folder.with_suffix(".log"), [], time.monotonic()
    with started([*command, f"--workdir={folder}"], log) as process:
        while process.poll() is None:
            lines = count_lines(folder / METRICS)
            seconds += [time.monotonic() - began] * (lines - len(seconds))
            time.sleep(POLL)
    check_ended(process, log, (0,))
    lines = [NAMES[line["phase"]] for line in read_metrics(folder / METRICS)]
    end = time.monotonic() - began
    return Timeline([*seconds, *[end] * (len(lines) + 1 - len(seconds))], ["start", *lines[1:], "test"])


def check_ended(process: subprocess.Popen, log: Path, allowed: Sequence[int]) -> None:
    """Raise where a process ended in another way than it should."""
    if process.returncode not in allowed:
        words = " / ".join(log.read_text().strip().splitlines()[-3:])
        raise BadInput(f"the run ended with status {process.returncode} ({log}): {words}")


# Moments ------------------------------------------------------------------------------------------------


def draw_moments(timeline: Timeline, kills: int, seed: int) -> list[Moment]:
    """So many moments of all kinds that the run has, in their order."""
    random, moments = np.random.default_rng(seed), []
    # A checkpoint is written after an examination, while the run goes on.
    gaps = {kind: [i for i, name in enumerate(timeline.kinds) if name == kind] for kind in KINDS}
    gaps["write"] = [i + 1 for i in gaps["examination"]]
    kinds = [kind for kind in KINDS if gaps[kind]]
    for index in range(kills):
        kind = kinds[index % len(kinds)]
        moments.append(Moment(int(random.choice(gaps[kind])), float(random.random()), kind))
    return sorted(moments)


def kill_at(moment: Moment, command: Sequence[str], folder: Path, timeline: Timeline, name: str) -> Kill:
    """Start the run, and send the signal at this moment."""
    log, file = folder.with_suffix(".log"), folder / METRICS
    before = file.stat().st_mtime_ns if file.exists() else None
    began, opened = Checkpoints(folder).latest(), None
    with started([*command, f"--workdir={folder}"], log) as process:
        while process.poll() is None:
            # Until the run has opened the file, it holds lines that will be cut off.
            if opened is None and file.exists() and file.stat().st_mtime_ns != before:
                opened = count_lines(file)
            if moment.lines == 0 or (opened is not None and count_lines(file) >= moment.lines):
                break
            time.sleep(POLL)
        _wait(moment, process, folder, timeline, first=opened is None or opened >= moment.lines)
        process.send_signal(getattr(signal, f"SIG{name}"))
        process.wait()
    torn = any(folder.glob(f"checkpoints/{UNFINISHED}*"))
    check_ended(process, log, (0, *ENDED[name]))
    said = re.search(r"going on at update (\d+)", log.read_text())
    saved = Checkpoints(folder).latest()
    return Kill(moment, process.returncode != 0, int(said[1]) if said else None, began, saved, torn)


def _wait(moment: Moment, process: subprocess.Popen, folder: Path, timeline: Timeline, *, first: bool) -> None:
    """From the line on: a share of the time to the next, or until a checkpoint is being written."""
    until = time.monotonic() + timeline.gap(moment.lines) * (1 if moment.kind == "write" else moment.share)
    if first and moment.kind == "update":  # it has to load its programs before
        until += moment.share * timeline.gap(timeline.kinds.index("update"))
    while process.poll() is None and time.monotonic() < until:
        if moment.kind == "write" and any(folder.glob(f"checkpoints/{UNFINISHED}*")):
            time.sleep(moment.share * WRITING)
            return
        time.sleep(POLL / 3)


def _soak(command: Sequence[str], folder: Path, moments: Sequence[Moment], timeline: Timeline, name: str) -> list[Kill]:
    """Kill a run at all these moments, and let it end."""
    kills = []
    for number, moment in enumerate(moments, 1):
        for _ in range(TRIES):
            kill = kill_at(moment, command, folder, timeline, name)
            kills.append(kill)
            if kill.landed:
                break
            moment = moment._replace(share=moment.share / 2)
        print(f"{number:3}/{len(moments)}  {_in_words(kills[-1])}", flush=True)
    undisturbed(command, folder)
    return kills


def _in_words(kill: Kill) -> str:
    """A line for a kill."""
    share = "    " if kill.moment.kind == "write" else f"{kill.moment.share:4.0%}"
    where = f"{kill.moment.kind:12} {share} after line {kill.moment.lines:<3}"
    said = "nothing yet" if kill.said is None else f"update {kill.said}"
    torn = ", torn: a checkpoint was being written" if kill.torn else ""
    return f"{where} went on from {said}, saved {kill.saved}{torn}" if kill.landed else f"{where} had ended before"


# What came of it ------------------------------------------------------------------------------------------


def wrong_starts(kills: Sequence[Kill]) -> list[str]:
    """List the starts at which a run did not go on from the newest checkpoint, a sentence each."""
    return [
        f"a run went on from update {kill.said}, and the newest checkpoint was of {kill.began}"
        for kill in kills
        if kill.said is not None and kill.said != kill.began
    ]


def _report(kills: Sequence[Kill]) -> str:
    """Say how many signals came in what."""
    landed = Counter(kill.moment.kind for kill in kills if kill.landed)
    torn = Counter(kill.moment.kind for kill in kills if kill.torn)
    rows = [f"{kind:14}{landed[kind]:7}{torn[kind]:20}" for kind in dict.fromkeys(KINDS) if landed[kind]]
    head = f"{'in':14}{'kills':>7}{'writing a checkpoint':>20}"
    return "\n".join([head, *rows, f"{'all':14}{landed.total():7}{torn.total():20}"])


def folders(base: Path, *names: str) -> list[Path]:
    """The folders of a soak's runs, of which none may be there yet."""
    paths = [base / name for name in names]
    if any(path.exists() for path in paths):
        raise BadInput(f"{base} holds an earlier soak: remove it, or choose another --workdir")
    make_folder(base)
    return paths


def run_soak(command: Sequence[str], base: Path, *, kills: int, seed: int, name: str) -> dict[str, Any]:
    """Run twice, kill the third, compare -> the figures of it."""
    began = time.monotonic()
    whole, again, killed = folders(base, "whole", "again", "killed")
    _, timeline = (undisturbed(command, folder) for folder in with_progress("undisturbed run", (whole, again)))
    same = differences(whole, again)
    if same:
        raise BadInput(f"two undisturbed runs differ in {same}: what differs between them is no matter of kills")
    met = _soak(command, killed, draw_moments(timeline, kills, seed), timeline, name)
    print(f"\n{_report(met)}\n")
    return {
        "signal": name,
        "kills": sum(kill.landed for kill in met),
        "missed": sum(not kill.landed for kill in met),
        "writing": sum(kill.torn for kill in met),
        "went_on_from": [kill.said for kill in met if kill.said is not None],
        "resumed_at": result_of(killed)["resumed_at"],
        "params_sha256": result_of(killed)["params_sha256"],
        "differences": differences(whole, killed),
        "wrong_starts": wrong_starts(met),
        "minutes": round((time.monotonic() - began) / 60, 2),
    }
