"""The parent's side of the race: processes that take turns, each asleep while another makes a step.

    racers = [Racer(name, command, env=env, folder=folder, log=path, timeout=600) for name, command in ...]
    tracks = run_race(racers, warm_up=2, rounds=10)
    records = summarize(tracks, "flowgrpo", warm_up=2, episodes=64)

A process that ends, or that doesn't answer in time, leaves the race with a sentence, and the others go on. What
interpreters and variables racers have is here, too, for the benchmarks that start them.
"""

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo.report.tables import significant
from flowgrpo.types import BadInput

from .protocol import END, STEP

ROOT = Path(__file__).parents[3]
FIND = "import sys, importlib.util as u; print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
SHOWN = 300  # characters of what a process printed last
GRACE = 10.0  # seconds in which a process ends that was told to


def read_interpreters(flag: str, pairs: Sequence[str], systems: Collection[str]) -> dict[str, str]:
    """The interpreter of each system, from a flag of NAME=PATH; this one where none is named."""
    pythons = dict.fromkeys(systems, sys.executable)
    for pair in pairs:
        name, _, path = pair.partition("=")
        if name not in pythons or not path:
            raise BadInput(f"--{flag}={pair} must be NAME=PATH with one of {', '.join(pythons)}")
        if not (Path(path).is_file() and os.access(path, os.X_OK)):
            raise BadInput(f"--{flag}={pair}: {path} is no program that can be run")
        pythons[name] = str(Path(path).absolute())  # not resolved: a virtual environment is found by its link
    return pythons


def racer_environment(before: Mapping[str, str]) -> dict[str, str]:
    """Variables of every racer: it finds this folder, asks no hub, and its idle threads sleep.

    `before` are the user's: `launch.configure` adds to them what suits this process, and not those of others.
    """
    paths = [str(ROOT), *filter(None, [before.get("PYTHONPATH")])]
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    chosen = {"OMP_WAIT_POLICY": "PASSIVE", "TRL_EXPERIMENTAL_SILENCE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    chosen["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # large arrays in huge pages, for all alike
    return {**chosen, **before, **fixed}


def missing_packages(python: str, packages: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Packages that an interpreter doesn't have; none is imported."""
    done = subprocess.run([python, "-c", FIND, *packages], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else [*packages]


class Racer:
    """A process in a session of its own, so that it is killed with all that it has started."""

    def __init__(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], folder: Path, log: Path, timeout: float
    ):
        self.name, self._command, self._env, self._folder = name, command, env, folder
        self._log, self._timeout = log, timeout
        self._process: subprocess.Popen | None = None
        self._read = b""  # of a line that is not whole

    def __enter__(self) -> "Racer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process, which first sets itself up and then reads the first line."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, cwd=self._folder, stderr=log, start_new_session=True, **pipes
            )

    def ask(self, line: str) -> dict[str, float]:
        """Say a line and wait for the answer; `BadInput` where none comes."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
            return json.loads(self._answer())
        except (BrokenPipeError, EOFError):
            raise BadInput(self._ended()) from None
        except TimeoutError:
            raise BadInput(f"{self.name} did not answer in {self._timeout:g} s{self._last_words()}") from None

    def _answer(self) -> bytes:
        """Read a line; `EOFError` where the process has closed its end, `TimeoutError` where it is too slow."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + self._timeout
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError
            if not (more := os.read(pipe, 4096)):
                raise EOFError
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _ended(self) -> str:
        """Say that the process has ended, with which status, and what it printed last."""
        assert self._process is not None
        try:
            status = f"with status {self._process.wait(GRACE)}"
        except subprocess.TimeoutExpired:
            status = "its answers"
        return f"{self.name} ended {status}{self._last_words()}"

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"; the last that it printed: {lines[-1][:SHOWN]}" if lines else ", and printed nothing"

    def kill(self) -> None:
        """End the process and all that it has started, whatever they do."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):  # all have ended; macOS says the latter
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a line that nobody has read
                pipe.close()
        self._process = None


@dataclass
class Track:
    """Figures of one racer."""

    setup: float = 0.0  # seconds from the start of the process to the end of its first step
    seconds: list[float] = field(default_factory=list)  # of each step, the first of them included
    tokens: list[int] = field(default_factory=list)  # of each step
    peak_mib: float = 0.0
    failed: str = ""  # why it has left the race


def run_race(
    racers: Sequence[Racer], *, warm_up: int, rounds: int, tell: Callable[[int], None] = lambda _: None
) -> dict[str, Track]:
    """Let racers take turns, and say how many of the `warm_up + rounds` rounds are done; all have ended afterwards."""
    tracks = {racer.name: Track() for racer in racers}

    def attempt(work: Callable[[Racer, Track], None]) -> None:
        for racer in racers:
            track = tracks[racer.name]
            try:
                if not track.failed:
                    work(racer, track)
            except BadInput as error:
                track.failed = str(error)
                racer.kill()

    with ExitStack() as stack:
        for racer in racers:
            stack.enter_context(racer)
        attempt(_begin)
        tell(1)
        for done in range(2, 1 + warm_up + rounds):
            attempt(_step)
            tell(done)
        attempt(_end)
    return tracks


def _begin(racer: Racer, track: Track) -> None:
    """Start a process and make its first step, while those before it sleep."""
    start = time.perf_counter()
    racer.start()
    _step(racer, track)
    track.setup = time.perf_counter() - start


def _step(racer: Racer, track: Track) -> None:
    answer = racer.ask(STEP)
    track.seconds.append(answer["seconds"])
    track.tokens.append(int(answer["tokens"]))


def _end(racer: Racer, track: Track) -> None:
    track.peak_mib = racer.ask(END)["peak_mib"]
    racer.kill()


def summarize(tracks: Mapping[str, Track], ours: str, *, warm_up: int, episodes: int) -> list[dict[str, Any]]:
    """Record, of each racer that finished, medians and ranges of its seconds, and of their ratios over ours by round.

    Episodes are counted by the second where a step has them, elsewhere tokens.
    """
    finished = {name: track for name, track in tracks.items() if not track.failed}
    base = finished[ours].seconds[warm_up:] if ours in finished else None
    records = []
    for name, track in finished.items():
        seconds, tokens = track.seconds[warm_up:], statistics.mean(track.tokens[warm_up:])
        unit, amount = ("episodes", episodes) if episodes else ("tokens", tokens)
        ratios = [theirs / own for theirs, own in zip(seconds, base, strict=True)] if base else []
        records.append(
            {
                "system": name,
                **_spread("seconds", seconds),
                **_spread("over_ours", ratios),
                f"{unit}_per_second": significant(amount / statistics.median(seconds), 4),
                "tokens": round(tokens),
                "first_step_seconds": significant(track.seconds[0]),
                "setup_seconds": significant(track.setup),
                "peak_mib": track.peak_mib,
            }
        )
    return records


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """The median, the least and the most of some values, or nothing where there are none."""
    found = (statistics.median(values), min(values), max(values)) if values else (None, None, None)
    rounded = [None if value is None else significant(value) for value in found]
    return dict(zip((name, f"{name}_min", f"{name}_max"), rounded, strict=True))
