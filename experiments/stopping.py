"""Ctrl-C and SIGTERM: what runs ends at once, but never between two halves of what belongs together.

    with listening(signal.SIGTERM):      it raises Terminated, as Ctrl-C raises KeyboardInterrupt
        with held():                     what comes in the block is raised at its end
        with held(unless=is_whole):      ... or where it comes, if that says so then

The second of them ends the process wherever it is.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM came. What Ctrl-C ends in order ends likewise."""


def number_of(stop: KeyboardInterrupt) -> signal.Signals:
    """The signal that raised this."""
    return signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT


@contextmanager
def listening(*numbers: signal.Signals) -> Iterator[None]:
    """The first of these signals raises; from then on, until the block ends, they end the process."""
    before = _handle(dict.fromkeys(numbers, partial(_raise, numbers)))
    try:
        yield
    finally:
        _handle(before)


@contextmanager
def held(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A signal that comes in the block is delivered at its end, or at once where `unless()` is true when it comes."""
    came: list[int] = []
    before: dict[signal.Signals, Any] = {}
    own = partial(_note, before, came, unless)
    before |= _handle(dict.fromkeys(STOPPING, own))
    try:
        yield
    finally:  # what ends the process from the first signal on does so after the block, too
        _handle({number: handler for number, handler in before.items() if signal.getsignal(number) is own})
    if came:
        signal.raise_signal(came[0])


def _raise(numbers: tuple[signal.Signals, ...], number: int, _frame: FrameType | None) -> None:
    _handle(dict.fromkeys(numbers, signal.SIG_DFL))
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _note(before: dict, came: list[int], unless: Callable[[], bool], number: int, _frame: FrameType | None) -> None:
    if came:
        _handle(dict.fromkeys(before, signal.SIG_DFL))
    elif before and unless():
        _handle(before)
    else:
        came.append(number)
        return
    signal.raise_signal(number)


def _handle(handlers: dict[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Set what happens at these signals -> what happened before; in a thread, which none reaches, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) or signal.SIG_DFL for number, handler in handlers.items()}
