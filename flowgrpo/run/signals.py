"""Ctrl-C and SIGTERM: what runs ends at once, but never between two halves of what belongs together.

    with listening(signal.SIGTERM):      it raises Terminated, as Ctrl-C raises KeyboardInterrupt
        with held():                     what comes in the block is raised at its end
        with held(unless=is_whole):      ... or where it comes, if that says so then

The second of them ends the process at once, and says so. What comes within `BURST` seconds of the first is the first
again: `timeout` and others signal the process and its group, which is the process twice.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)
BURST = 0.5  # seconds
BY_SIGNAL = 128  # and its number: the status of what a signal ended, as shells have it


class Terminated(KeyboardInterrupt):
    """SIGTERM came. What Ctrl-C ends in order ends likewise."""


def number_of(stop: KeyboardInterrupt) -> signal.Signals:
    """The signal that raised this."""
    return signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT


@contextmanager
def listening(*numbers: signal.Signals) -> Iterator[None]:
    """The first of these signals raises; a second one, until the block ends, ends the process."""
    before = _handle(dict.fromkeys(numbers, partial(_raise, numbers)))
    try:
        yield
    finally:
        _handle(before)


@contextmanager
def held(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A signal that comes in the block is delivered at its end, or at once where `unless()` is true when it comes."""
    came: list[tuple[int, float]] = []  # the first signal, and when
    before: dict[signal.Signals, Any] = {}
    own = partial(_note, before, came, unless)
    before |= _handle(dict.fromkeys(STOPPING, own))
    try:
        yield
    finally:  # what ends the process from the first signal on does so after the block, too
        _handle({number: handler for number, handler in before.items() if signal.getsignal(number) is own})
    if came:
        signal.raise_signal(came[0][0])


def _raise(numbers: tuple[signal.Signals, ...], number: int, _frame: FrameType | None) -> None:
    _handle(dict.fromkeys(numbers, partial(_again, time.monotonic())))
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _again(first: float, number: int, _frame: FrameType | None) -> None:
    """End the process, unless this is the signal of the time `first` once more."""
    if time.monotonic() - first < BURST:
        return
    os.write(2, b"\nsignalled again: ended at once, and nothing more is saved\n")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _note(before: dict, came: list, unless: Callable[[], bool], number: int, frame: FrameType | None) -> None:
    if came:
        _again(came[0][1], number, frame)
    elif before and unless():
        _handle(before)
        signal.raise_signal(number)
    else:
        came.append((number, time.monotonic()))


def _handle(handlers: dict[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Set what happens at these signals -> what happened before; in a thread, which none reaches, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) or signal.SIG_DFL for number, handler in handlers.items()}
