"""Kill the processes of a cluster at random moments, each kind in turn, the master included (S1, S4).

The same run is made twice, once undisturbed and once with kills; then metrics, parameters and the trajectories of every
update are compared bit for bit. A killed master is started again by the same command; the master replaces all others.
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
from typing import NamedTuple

from flowgrpo.distributed.event_log import read_events
from flowgrpo.report.metrics import METRICS
from flowgrpo.training.kill_series import check_ended, folders, result_of, started
from flowgrpo.types import JSON, BadInput

MASTER = "master"
POLL_SECONDS = 0.05
TIMEOUT_SECONDS = 600.0  # until a run without the awaited event is given up


class Kill(NamedTuple):
    """A process that was killed, and the seconds until it was replaced and until the run continued."""

    kind: str
    name: str
    seconds: float | None  # until a process in its place had started; None if the run had ended before
    recovered: float | None  # until a rollout was under way again


def run_cluster_soak(
    command: Sequence[str], base: Path, *, kills: int, seed: int, longest: float = 25.0
) -> dict[str, JSON]:
    """Run undisturbed, then with kills, and compare -> the figures of the comparison.

    Args:
        command: of the run, without --workdir.
        base: folder for both runs.
        kills: maximal number of kills.
        seed: of the moments and of the processes that are killed.
        longest: longest pause between two kills, in seconds.
    """
    start = time.monotonic()
    whole, killed = folders(base, "whole", "killed")
    with started([*command, f"--workdir={whole}"], log := whole.with_suffix(".log")) as process:
        process.wait()
    check_ended(process, log, (0,))
    rng = random.Random(seed)
    all_kills = soak_cluster(
        command, killed, kills=kills, rng=rng, pause=lambda *_: time.sleep(rng.uniform(1, longest))
    )
    counted = [kill for kill in all_kills if kill.seconds is not None]
    kinds = sorted({kill.kind for kill in counted})
    return {
        "kills": len(counted),
        "by_kind": {kind: sum(kill.kind == kind for kill in counted) for kind in kinds},
        "replaced_seconds": _median_and_max([kill.seconds for kill in counted if kill.seconds is not None]),
        "recovered_seconds": _median_and_max([kill.recovered for kill in counted if kill.recovered is not None]),
        "resumed_at": result_of(killed)["resumed_at"],
        "params_sha256": result_of(killed)["params_sha256"],
        "differences": _differences(whole, killed),
        "minutes": round((time.monotonic() - start) / 60, 2),
    }


def _differences(whole: Path, killed: Path) -> list[str]:
    """What differs between two runs: metrics, parameters, or the trajectories of an update."""

    def trajectories(path: Path) -> list[dict[str, JSON]]:
        """The trajectories of an update, without fields that depend on clocks."""
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return [{name: value for name, value in record.items() if name not in ("seconds", "log")} for record in records]

    different = [] if (whole / METRICS).read_bytes() == (killed / METRICS).read_bytes() else [METRICS]
    if result_of(whole)["params_sha256"] != result_of(killed)["params_sha256"]:
        different.append("params_sha256")
    batches = [
        {path.name: trajectories(path) for path in sorted((run / "batches").iterdir())} for run in (whole, killed)
    ]
    names = {**batches[0], **batches[1]}
    return different + [f"batches/{name}" for name in names if batches[0].get(name) != batches[1].get(name)]


def soak_cluster(
    command: Sequence[str],
    folder: Path,
    *,
    kills: int,
    rng: random.Random,
    pause: Callable[[subprocess.Popen, Path], None],
) -> list[Kill]:
    """Run to the end and kill up to `kills` processes meanwhile, each after a `pause(process, folder)`."""
    done: list[Kill] = []
    log = folder.with_suffix(".log")
    process: subprocess.Popen | None = None
    try:
        for number in range(kills):
            if process is None or process.poll() is not None:
                process = _start(command, folder, log)
                _await(process, folder, "started", since=time.time())
            pause(process, folder)
            if process.poll() is not None:
                check_ended(process, log, (0,))
                break
            events = [event for event in _events(folder) if event["what"] == "started"]
            pids = {event["worker"]: event["pid"] for event in events} | {MASTER: process.pid}
            kinds = sorted({_kind(name) for name in pids})
            kind = kinds[number % len(kinds)]
            name = rng.choice(sorted(name for name in pids if _kind(name) == kind))
            kill, process = _kill(kind, name, pids[name], process, command, folder, log)
            done.append(kill)
            print(f"{number + 1:3}/{kills}  {_to_line(kill)}", flush=True)
        if process is not None:
            process.wait()
            check_ended(process, log, (0,))
    finally:
        if process is not None:
            process.kill()
    return done


def _kill(
    kind: str, name: str, pid: int, process: subprocess.Popen, command: Sequence[str], folder: Path, log: Path
) -> tuple[Kill, subprocess.Popen]:
    """Send SIGKILL to a process, and wait until the run has recovered -> (the kill, the master's process)."""
    killed_at = time.time()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if kind == MASTER:
        process.wait()
        process = _start(command, folder, log)
        replaced_at = _await(process, folder, "resumed", since=killed_at)
    else:
        replaced_at = _await(process, folder, "started", since=killed_at, worker=name)
    recovered_at = replaced_at and _await(process, folder, "roll", since=replaced_at)
    return Kill(kind, name, replaced_at and replaced_at - killed_at, recovered_at and recovered_at - killed_at), process


def _start(command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen:
    with log.open("a") as out:
        return subprocess.Popen([*command, f"--workdir={folder}"], stdout=out, stderr=out)


def _await(
    process: subprocess.Popen, folder: Path, what: str, *, since: float, worker: str | None = None
) -> float | None:
    """Wait for an event of this kind -> when it was logged; None if the run has ended without one."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None
        for event in _events(folder):
            if event["what"] == what and event["at"] > since and worker in (None, event.get("worker")):
                return event["at"]
        if has_ended:
            return None
        time.sleep(POLL_SECONDS)
    raise BadInput(f"{folder}: nothing came after {what!r} was awaited for {TIMEOUT_SECONDS:g} s")


def _events(folder: Path) -> list[dict[str, JSON]]:
    path = folder / "events.jsonl"
    return list(read_events(path)) if path.exists() else []


def _kind(name: str) -> str:
    return name.partition("-")[0]


def _median_and_max(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": round(ordered[len(ordered) // 2], 1), "most": round(ordered[-1], 1)} if ordered else {}


def _to_line(kill: Kill) -> str:
    """A line about a kill."""
    if kill.seconds is None:
        return f"{kill.name:16} the run had ended"
    recovered = "" if kill.recovered is None else f", rollouts continued after {kill.recovered:.1f} s"
    return f"{kill.name:16} replaced after {kill.seconds:.1f} s{recovered}"
