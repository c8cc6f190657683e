"""The parent's side of the race: processes that make steps in turn, each asleep while another works.

    racers = [Racer(name, command, env=env, folder=folder, log=path, timeout=600) for name, command in ...]
    tracks = run_race(racers, warm_up=2, rounds=10)
    records = summarize(tracks, "flowgrpo", warm_up=2, episodes=64)

A process that ends, or that doesn't answer in time, leaves the race with a reason, and the others continue.
Interpreters and environment variables of racers are here, too, for the benchmarks that start them.
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
MAX_SHOWN = 300  # characters of the last line that a process printed
GRACE = 10.0  # seconds for a process to exit


def read_interpreters(flag: str, pairs: Sequence[str], systems: Collection[str]) -> dict[str, str]:
    """Interpreter of each system, from a flag of NAME=PATH; by default this one."""
    pythons = dict.fromkeys(systems, sys.executable)
    for pair in pairs:
        name, _, path = pair.partition("=")
        if name not in pythons or not path:
            raise BadInput(f"--{flag}={pair} must be NAME=PATH with one of {', '.join(pythons)}")
        if not (Path(path).is_file() and os.access(path, os.X_OK)):
            raise BadInput(f"--{flag}={pair}: {path} is not an executable file")
        pythons[name] = str(Path(path).absolute())  # not resolved: a virtual environment is found by its link
    return pythons


def racer_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment of every racer: with this folder on its path, offline, with idle threads that sleep.

    `variables` are the user's: `launch.configure` adds variables for this process only.
    """
    paths = [str(ROOT), *filter(None, [variables.get("PYTHONPATH")])]
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    chosen = {"OMP_WAIT_POLICY": "PASSIVE", "TRL_EXPERIMENTAL_SILENCE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    chosen["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # large arrays in huge pages, for all systems
    return {**chosen, **variables, **fixed}


def missing_packages(python: str, packages: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Packages that an interpreter lacks; none is imported."""
    result = subprocess.run(
        [python, "-c", FIND, *packages], env=environment, capture_output=True, text=True, check=False
    )
    return result.stdout.split() if result.returncode == 0 else [*packages]


class Racer:
    """A process in its own session, so that it is killed with all of its children."""

    def __init__(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], folder: Path, log: Path, timeout: float
    ):
        self.name, self._command, self._env, self._folder = name, command, env, folder
        self._log, self._timeout = log, timeout
        self._process: subprocess.Popen | None = None
        self._read = b""  # of an incomplete line

    def __enter__(self) -> "Racer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process, which sets itself up and then reads the first line."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, cwd=self._folder, stderr=log, start_new_session=True, **pipes
            )

    def ask(self, line: str) -> dict[str, float]:
        """Send a line and wait for the answer; raises `BadInput` if none comes."""
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
        """Read a line; raises `EOFError` if the process closed the pipe, `TimeoutError` if it is too slow."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + self._timeout
        while b"\n" not in self._read:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([pipe], [], [], remaining)[0]:
                raise TimeoutError
            if not (received := os.read(pipe, 4096)):
                raise EOFError
            self._read += received
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _ended(self) -> str:
        """Sentence that the process has ended, with its status and its last output."""
        assert self._process is not None
        try:
            status = f"with status {self._process.wait(GRACE)}"
        except subprocess.TimeoutExpired:
            status = "its answers"
        return f"{self.name} ended {status}{self._last_words()}"

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"; its last output: {lines[-1][:MAX_SHOWN]}" if lines else ", and printed nothing"

    def kill(self) -> None:
        """Kill the process and all of its children."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):  # all have ended; macOS raises the latter
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a line that was not read
                pipe.close()
        self._process = None


@dataclass
class Track:
    """Figures of one racer."""

    setup: float = 0.0  # seconds from the start of the process to the end of its first step
    seconds: list[float] = field(default_factory=list)  # of each step, including the first
    tokens: list[int] = field(default_factory=list)  # of each step
    peak_mib: float = 0.0
    failed: str = ""  # why it left the race


def run_race(
    racers: Sequence[Racer], *, warm_up: int, rounds: int, on_round: Callable[[int], None] = lambda _: None
) -> dict[str, Track]:
    """Let racers make `warm_up + rounds` steps in turn, and end them.

    `on_round` gets the number of finished rounds.
    """
    tracks = {racer.name: Track() for racer in racers}

    def attempt(action: Callable[[Racer, Track], None]) -> None:
        for racer in racers:
            track = tracks[racer.name]
            try:
                if not track.failed:
                    action(racer, track)
            except BadInput as error:
                track.failed = str(error)
                racer.kill()

    with ExitStack() as stack:
        for racer in racers:
            stack.enter_context(racer)
        attempt(_start_racer)
        on_round(1)
        for round_number in range(2, 1 + warm_up + rounds):
            attempt(_step)
            on_round(round_number)
        attempt(_end)
    return tracks


def _start_racer(racer: Racer, track: Track) -> None:
    """Start a process and make its first step, while earlier ones sleep."""
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
    """Records of the racers that finished: medians and ranges of seconds, and of their ratios to ours by round.

    Throughput is in episodes per second if a step has `episodes`, else in tokens per second.
    """
    finished = {name: track for name, track in tracks.items() if not track.failed}
    base = finished[ours].seconds[warm_up:] if ours in finished else None
    records = []
    for name, track in finished.items():
        seconds, tokens = track.seconds[warm_up:], statistics.mean(track.tokens[warm_up:])
        unit, amount = ("episodes", episodes) if episodes else ("tokens", tokens)
        ratios = (
            [their_seconds / our_seconds for their_seconds, our_seconds in zip(seconds, base, strict=True)]
            if base
            else []
        )
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
    """Median, minimum and maximum of values, or None if there are none."""
    figures = (statistics.median(values), min(values), max(values)) if values else (None, None, None)
    rounded = [None if value is None else significant(value) for value in figures]
    return dict(zip((name, f"{name}_min", f"{name}_max"), rounded, strict=True))
