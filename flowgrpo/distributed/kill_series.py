"""Kill the processes of a cluster at random moments, each kind in turn, the master included (S1, S4).

One run is done once undisturbed and once not; then metrics, parameters and the trajectories of every update are
compared bit for bit. A killed master is started again by the same command; the master replaces all others.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo.distributed.event_log import read_events
from flowgrpo.report.metrics import METRICS
from flowgrpo.run.kill_series import check_ended, folders, result_of, started
from flowgrpo.types import BadInput

MASTER = "master"
POLL = 0.05  # seconds
PATIENCE = 600.0  # seconds that a run is given to go on


class Victim(NamedTuple):
    """Process that was killed, and the seconds until it was replaced and until the run went on."""

    kind: str
    name: str
    seconds: float | None  # until a process in its place was there; None where the run had ended before
    recovered: float | None  # until the next update was under way again


def run_cluster_soak(
    command: Sequence[str], base: Path, *, kills: int, seed: int, longest: float = 25.0
) -> dict[str, Any]:
    """Run undisturbed, then kill, then compare -> the figures of it."""
    began = time.monotonic()
    whole, killed = folders(base, "whole", "killed")
    with started([*command, f"--workdir={whole}"], log := whole.with_suffix(".log")) as process:
        process.wait()
    check_ended(process, log, (0,))
    chance = random.Random(seed)
    met = soak_cluster(
        command, killed, kills=kills, chance=chance, rest=lambda *_: time.sleep(chance.uniform(1, longest))
    )
    rows = [one for one in met if one.seconds is not None]
    return {
        "kills": len(rows),
        "by_kind": {kind: sum(one.kind == kind for one in rows) for kind in sorted({one.kind for one in rows})},
        "replaced_seconds": _spread([one.seconds for one in rows if one.seconds is not None]),
        "recovered_seconds": _spread([one.recovered for one in rows if one.recovered is not None]),
        "resumed_at": result_of(killed)["resumed_at"],
        "params_sha256": result_of(killed)["params_sha256"],
        "differences": _differences(whole, killed),
        "minutes": round((time.monotonic() - began) / 60, 2),
    }


def _differences(whole: Path, killed: Path) -> list[str]:
    """List what differs between two runs: metrics, parameters, or the trajectories of an update."""
    found = [] if (whole / METRICS).read_bytes() == (killed / METRICS).read_bytes() else [METRICS]
    if result_of(whole)["params_sha256"] != result_of(killed)["params_sha256"]:
        found.append("params_sha256")
    batches = [
        {path.name: _learned_trajectories(path) for path in sorted((run / "batches").iterdir())}
        for run in (whole, killed)
    ]
    found += [
        f"batches/{name}" for name in {**batches[0], **batches[1]} if batches[0].get(name) != batches[1].get(name)
    ]
    return found


def _learned_trajectories(path: Path) -> list[dict[str, Any]]:
    """The trajectories of an update, without what a clock had a part in."""
    return [
        {name: value for name, value in json.loads(line).items() if name not in ("seconds", "log")}
        for line in path.read_text().splitlines()
    ]


def soak_cluster(
    command: Sequence[str],
    folder: Path,
    *,
    kills: int,
    chance: random.Random,
    rest: Callable[[subprocess.Popen, Path], None],
) -> list[Victim]:
    """Kill processes of a run until it has ended, so many at most, with a rest before each of them."""
    met: list[Victim] = []
    log = folder.with_suffix(".log")
    process: subprocess.Popen | None = None
    try:
        for number in range(kills):
            if process is None or process.poll() is not None:
                process = _start(command, folder, log)
                _await(process, folder, "started", since=time.time())
            rest(process, folder)
            if process.poll() is not None:
                check_ended(process, log, (0,))
                break
            pids = _pids(folder) | {MASTER: process.pid}
            kind = sorted({_kind(name) for name in pids})[number % len({_kind(name) for name in pids})]
            name = chance.choice(sorted(name for name in pids if _kind(name) == kind))
            victim, process = _kill(kind, name, pids[name], process, command, folder, log)
            met.append(victim)
            print(f"{number + 1:3}/{kills}  {_in_words(victim)}", flush=True)
        if process is not None:
            process.wait()
            check_ended(process, log, (0,))
    finally:
        if process is not None:
            process.kill()
    return met


def _kill(
    kind: str, name: str, pid: int, process: subprocess.Popen, command: Sequence[str], folder: Path, log: Path
) -> tuple[Victim, subprocess.Popen]:
    """SIGKILL to one of them; who stands in its place, and when."""
    at = time.time()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if kind == MASTER:
        process.wait()
        process = _start(command, folder, log)
        there = _await(process, folder, "resumed", since=at)
    else:
        there = _await(process, folder, "started", since=at, worker=name)
    again = there and _await(process, folder, "roll", since=there)
    return Victim(kind, name, there and there - at, again and again - at), process


def _start(command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen:
    with log.open("a") as out:
        return subprocess.Popen([*command, f"--workdir={folder}"], stdout=out, stderr=out)


def _await(
    process: subprocess.Popen, folder: Path, what: str, *, since: float, worker: str | None = None
) -> float | None:
    """Wait for a line of this kind, and say when it was written; None where the run ended before."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        over = process.poll() is not None
        for line in _lines(folder):
            if line["what"] == what and line["at"] > since and worker in (None, line.get("worker")):
                return line["at"]
        if over:
            return None
        time.sleep(POLL)
    raise BadInput(f"{folder}: nothing came after {what!r} was awaited for {PATIENCE:g} s")


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    return list(read_events(path)) if path.exists() else []


def _pids(folder: Path) -> dict[str, int]:
    """Every worker's process, by its name."""
    return {line["worker"]: line["pid"] for line in _lines(folder) if line["what"] == "started"}


def _kind(name: str) -> str:
    return name.partition("-")[0]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": round(ordered[len(ordered) // 2], 1), "most": round(ordered[-1], 1)} if ordered else {}


def _in_words(victim: Victim) -> str:
    """A line for a kill."""
    if victim.seconds is None:
        return f"{victim.name:16} the run had ended"
    went = "" if victim.recovered is None else f", rollouts went on after {victim.recovered:.1f} s"
    return f"{victim.name:16} replaced after {victim.seconds:.1f} s{went}"
