"""How far a run is, in one line: rewritten in a terminal, printed line by line elsewhere.

train   12/150  1:23 left  success 0.54  turns 3.2  tool errors 0.08  KL 0.0123  entropy 1.31  3,380 tok/s

In a terminal that is too narrow for all figures, those that don't fit are left out, the last ones first.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
QUIET = 30.0  # seconds between two lines of a stage where there is no terminal
GAP = "  "  # between two parts of a line

FORMS = {  # what is shown where it is there, and how
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
COMPUTED = "computed {:,.0f} of {:,.0f} context tokens"  # of an update whose contexts begin alike


class Progress:
    """The line of a run of `total` updates, on stderr by default, so that results alone are on stdout."""

    def __init__(self, total: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._total, self._stream, self._clock = total, stream or sys.stderr, clock
        self._phase, self._begun = "", {}
        self._printed_at = -math.inf
        self._parts: list[str] = []  # of the last line of `show`, the most important first
        self._live = self._stream.isatty()
        self._open = False  # the line on the terminal can still be rewritten

    def show(self, phase: str, update: int, figures: Mapping[str, Any], *, total: int | None = None) -> None:
        """Say that this update of a phase is done; `figures` may hold the names of `FORMS` and others."""
        self._parts = [*self._begin(phase, update, self._total if total is None else total), *format_figures(figures)]
        self._print(self._parts, new=phase != self._phase)
        self._phase = phase

    def step(self, stage: str, done: int, total: int) -> None:
        """Say how many parts of a stage are done, which may come again; on a terminal before the line that is there.

        Elsewhere a stage has a line where it first begins, and later ones are `QUIET` seconds from any line.
        """
        is_new = stage not in self._begun
        if done == 0:
            self._begun.pop(stage, None)
        parts = self._begin(stage, done, total)
        if self._live and self._parts:
            self._print([*parts, f"|  {self._parts[0]}", *self._parts[1:]], new=False)
        elif self._live or is_new or self._clock() - self._printed_at >= QUIET:
            self._print(parts, new=False)

    def _begin(self, phase: str, update: int, total: int) -> list[str]:
        """The first parts of a line: how much is done, and the time left."""
        left = self.left(phase, update, total)
        count = f"{phase} {update:>{len(str(total))}}/{total}"
        return [count] if left is None else [count, f"{clock_time(left)} left"]

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.end()
        print(text, file=self._stream, flush=True)

    def end(self) -> None:
        """Leave the line as it is."""
        if self._open:
            print(file=self._stream, flush=True)
        self._open = False

    def left(self, phase: str, update: int, total: int) -> float | None:
        """Seconds that the rest of a phase takes, by what it took since its first line here; None before that."""
        begun, first = self._begun.setdefault(phase, (self._clock(), update))
        return (self._clock() - begun) / (update - first) * (total - update) if update > first else None

    def _print(self, parts: Sequence[str], new: bool) -> None:
        self._printed_at = self._clock()
        if not self._live:
            print(GAP.join(parts), file=self._stream, flush=True)
            return
        if new:
            self.end()
        line = fit(parts, self._columns() - 1)
        print(f"\r\x1b[2K{line}", end="", file=self._stream, flush=True)
        self._open = True

    def _columns(self) -> int:
        """Width of the terminal; that of the stream, where results on stdout go elsewhere."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:  # a stream that only says that it is one
            size = os.terminal_size((80, 24))
        return shutil.get_terminal_size(size).columns


def with_progress(phase: str, cases: Collection[T], *, stream: TextIO | None = None) -> Iterator[T]:
    """Each of the cases, with a line before the first and behind each: how many are done, and the time left.

    The lines stay, since between them the cases may print what they found.
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
    """As many of the parts, from the first on, as a line of this width holds; the first one is cut where it must be."""
    line = parts[0][:width]
    for part in parts[1:]:
        if len(line) + len(GAP) + len(part) > width:
            break
        line += GAP + part
    return line


def format_figures(figures: Mapping[str, Any]) -> list[str]:
    """The figures that are there and are numbers, in words."""
    found = {name: float(figures[name]) for name in FORMS if figures.get(name) is not None}
    shown = [FORMS[name].format(value) for name, value in found.items() if math.isfinite(value)]
    computed, laid_out = figures.get("computed_tokens"), figures.get("context_tokens")
    is_shared = computed is not None and laid_out is not None and computed < laid_out
    return [*shown, COMPUTED.format(computed, laid_out)] if is_shared else shown


def clock_time(seconds: float) -> str:
    """`1:23`, or `2:03:04` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
