"""Ctrl-C and SIGTERM: they end the process soon, but never between two halves of what belongs together.

    with stop_on_signals(signal.SIGTERM):            SIGTERM raises Terminated, as Ctrl-C raises KeyboardInterrupt
        with defer_signals():                        a signal in the block is raised at its end
        with defer_signals(unless=is_intact):        ... or at once, if is_intact() is true by then

A second signal ends the process at once, and prints so. Signals within `BURST` seconds of the first count as the first:
`timeout` and others signal the process and its group, so that the process gets two.
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
BY_SIGNAL = 128  # plus the number of a signal is the exit status of what it ended, in shells


class Terminated(KeyboardInterrupt):
    """SIGTERM was received. Whatever handles Ctrl-C handles this too."""


def signal_of(stop: KeyboardInterrupt) -> signal.Signals:
    """The signal that raised this."""
    return signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT


@contextmanager
def stop_on_signals(*numbers: signal.Signals) -> Iterator[None]:
    """The first of these signals in the block raises; a second one ends the process."""
    previous = _set_handlers(dict.fromkeys(numbers, partial(_raise, numbers)))
    try:
        yield
    finally:
        _set_handlers(previous)


@contextmanager
def defer_signals(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A signal in the block is delivered at its end, or at once if `unless()` is true when it comes."""
    received: list[tuple[int, float]] = []  # the first signal, and its time
    previous: dict[signal.Signals, Any] = {}
    handler = partial(_record, previous, received, unless)
    previous |= _set_handlers(dict.fromkeys(STOPPING, handler))
    try:
        yield
    finally:  # a handler that the first signal has set ends the process after the block, too
        _set_handlers({number: old for number, old in previous.items() if signal.getsignal(number) is handler})
    if received:
        signal.raise_signal(received[0][0])


def _raise(numbers: tuple[signal.Signals, ...], number: int, _frame: FrameType | None) -> None:
    _set_handlers(dict.fromkeys(numbers, partial(_end_process, time.monotonic())))
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _end_process(first_time: float, number: int, _frame: FrameType | None) -> None:
    """End the process, unless this signal belongs to the burst that began at `first_time`."""
    if time.monotonic() - first_time < BURST:
        return
    os.write(2, b"\nsignalled again: ended at once, and nothing more is saved\n")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _record(previous: dict, received: list, unless: Callable[[], bool], number: int, frame: FrameType | None) -> None:
    if received:
        _end_process(received[0][1], number, frame)
    elif previous and unless():
        _set_handlers(previous)
        signal.raise_signal(number)
    else:
        received.append((number, time.monotonic()))


def _set_handlers(handlers: dict[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Set the handlers of these signals -> the previous ones; nothing in a thread, which receives no signals."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) or signal.SIG_DFL for number, handler in handlers.items()}
