"""Progress of a run in one line: rewritten in a terminal, a bar in a notebook, printed line by line elsewhere.

train   12/150  1:23 left  success 0.54  turns 3.2  tool errors 0.08  KL 0.0123  entropy 1.31  3,380 tok/s

In a terminal that is too narrow, the metrics that don't fit are left out, the last ones first.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from flowgrpo.report.notebook import LiveBar, kernel_display

T = TypeVar("T")
QUIET = 30.0  # seconds between two lines of a stage without a terminal
GAP = "  "  # between two parts of a line

FORMATS = {  # of the metrics that are shown
    "success": "success {:.2f}",
    "nll": "loss {:.3f}",
    "preferred": "preferred {:.2f}",
    "turns": "turns {:.1f}",
    "tool_errors": "tool errors {:.2f}",
    "kl": "KL {:.4f}",
    "entropy": "entropy {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "rollout_seconds": "rollout {:.1f} s",
    "inference_seconds": "inference {:.1f} s",
    "train_seconds": "update {:.1f} s",
}
COMPUTED = "computed {:,.0f} of {:,.0f} context tokens"  # of an update whose contexts share prefixes


class Progress:
    """The progress line of a run of `total` updates; on stderr by default, so that stdout has the results alone.

    In a Jupyter kernel it is one bar, and lines that stay are printed below it.
    """

    def __init__(self, total: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        display = kernel_display() if stream is None else None
        self._bar = None if display is None else LiveBar(display, clock=clock)
        by_default = sys.stderr if self._bar is None else sys.stdout  # a notebook shows stderr as an error
        self._total, self._stream, self._clock = total, stream or by_default, clock
        self._phase, self._starts = "", {}  # (time, update) of the first line of each phase
        self._printed_at = -math.inf
        self._parts: list[str] = []  # of the last line of `show`, the most important first
        self._live = self._bar is not None or self._stream.isatty()
        self._done = (0, total)  # of the phase, for the bar
        self._can_rewrite = False  # the line on the terminal

    def show(self, phase: str, update: int, metrics: Mapping[str, Any], *, total: int | None = None) -> None:
        """Show that this update of a phase is done, with those of the metrics that are in `FORMATS`."""
        total = self._total if total is None else total
        self._parts, self._done = [*self._count(phase, update, total), *format_metrics(metrics)], (update, total)
        self._print(self._parts, new=phase != self._phase)
        self._phase = phase

    def step(self, stage: str, done: int, total: int) -> None:
        """Show how many parts of a stage are done; a stage may be repeated.

        On a terminal this is put before the current line. Elsewhere a stage has a line when it first starts, and
        further ones at least `QUIET` seconds after any line.
        """
        is_new = stage not in self._starts
        if done == 0:
            self._starts.pop(stage, None)
        parts = self._count(stage, done, total)
        if self._live and self._parts:
            self._print([*parts, f"|  {self._parts[0]}", *self._parts[1:]], new=False)
        elif self._live or is_new or self._clock() - self._printed_at >= QUIET:
            self._print(parts, new=False)

    def _count(self, phase: str, update: int, total: int) -> list[str]:
        """The first parts of a line: how much is done, and the time left."""
        seconds = self.seconds_left(phase, update, total)
        count = f"{phase} {update:>{len(str(total))}}/{total}"
        return [count] if seconds is None else [count, f"{clock_time(seconds)} left"]

    def log(self, text: str) -> None:
        """Print a line that stays."""
        self.end()
        print(text, file=self._stream, flush=True)

    def end(self) -> None:
        """End the current line."""
        if self._bar is not None:
            self._bar.flush()
        if self._can_rewrite:
            print(file=self._stream, flush=True)
        self._can_rewrite = False

    def seconds_left(self, phase: str, update: int, total: int) -> float | None:
        """Seconds until the end of a phase, extrapolated from its first line here; None before there is a second."""
        start, first = self._starts.setdefault(phase, (self._clock(), update))
        return (self._clock() - start) / (update - first) * (total - update) if update > first else None

    def _print(self, parts: Sequence[str], new: bool) -> None:
        self._printed_at = self._clock()
        if self._bar is not None:
            self._bar.draw(*self._done, GAP.join(parts))
            return
        if not self._live:
            print(GAP.join(parts), file=self._stream, flush=True)
            return
        if new:
            self.end()
        line = fit(parts, self._columns() - 1)
        print(f"\r\x1b[2K{line}", end="", file=self._stream, flush=True)
        self._can_rewrite = True

    def _columns(self) -> int:
        """Width of the terminal of the stream, as stdout may be redirected."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:  # a stream that is no real terminal
            size = os.terminal_size((80, 24))
        return shutil.get_terminal_size(size).columns


def with_progress(phase: str, cases: Collection[T], *, stream: TextIO | None = None) -> Iterator[T]:
    """Iterate over the cases, with a progress line before the first and after each.

    The lines stay, since the cases may print results between them.
    """
    progress = Progress(len(cases), stream=stream)
    if cases:
        progress.show(phase, 0, {})
    for number, case in enumerate(cases, 1):
        progress.end()
        yield case
        progress.show(phase, number, {})
    progress.end()


def fit(parts: Sequence[str], width: int) -> str:
    """The first parts that fit into a line of this width; the first one is cut if necessary."""
    line = parts[0][:width]
    for part in parts[1:]:
        if len(line) + len(GAP) + len(part) > width:
            break
        line += GAP + part
    return line


def format_metrics(metrics: Mapping[str, Any]) -> list[str]:
    """The metrics of `FORMATS` that are finite numbers, formatted."""
    values = {name: float(metrics[name]) for name in FORMATS if metrics.get(name) is not None}
    parts = [FORMATS[name].format(value) for name, value in values.items() if math.isfinite(value)]
    computed, in_contexts = metrics.get("computed_tokens"), metrics.get("context_tokens")
    has_shared = computed is not None and in_contexts is not None and computed < in_contexts
    return [*parts, COMPUTED.format(computed, in_contexts)] if has_shared else parts


def clock_time(seconds: float) -> str:
    """`1:23`, or `2:03:04` from an hour on."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
