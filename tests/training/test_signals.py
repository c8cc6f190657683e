"""Signals: one raises where nothing is torn apart, or else at the end of a block; the next one ends the process."""

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from flowgrpo.training.signals import STOPPING, Terminated, defer_signals, signal_of, stop_on_signals

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def as_before():
    """No test leaves another handler behind."""
    before = [signal.getsignal(number) for number in STOPPING]
    yield
    assert [signal.getsignal(number) for number in STOPPING] == before


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_signals_raise_their_exception(number, kind):
    with pytest.raises(kind) as caught, stop_on_signals(*STOPPING):
        signal.raise_signal(number)
    assert signal_of(caught.value) == number
    assert type(caught.value) is kind


def stopped_in(block, number: int) -> tuple[type[BaseException], list[str]]:
    """A signal in such a block -> what was raised in the end, and what was done before."""
    done: list[str] = []
    try:
        with stop_on_signals(*STOPPING):
            with block:
                signal.raise_signal(number)
                done.append("the rest of the block")
            done.append("what follows")
    except KeyboardInterrupt as stop:
        return type(stop), done
    raise AssertionError("nothing was raised")


@contextmanager
def held_twice():
    with defer_signals(), defer_signals():
        yield


REST = ["the rest of the block"]


@pytest.mark.parametrize(
    ("block", "number", "came"),
    [
        (defer_signals, signal.SIGTERM, (Terminated, REST)),
        (defer_signals, signal.SIGINT, (KeyboardInterrupt, REST)),
        (partial(defer_signals, unless=lambda: True), signal.SIGTERM, (Terminated, [])),
        (partial(defer_signals, unless=lambda: False), signal.SIGTERM, (Terminated, REST)),
        (held_twice, signal.SIGTERM, (Terminated, REST)),
    ],
)
def test_deferred_signal_is_raised_at_the_end_or_at_once(block, number, came):
    assert stopped_in(block(), number) == came


def test_error_in_the_block_precedes_the_signal():
    def fail() -> None:
        with stop_on_signals(*STOPPING), defer_signals():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()


def test_threads_are_not_interrupted():
    handlers = []

    def work():
        with stop_on_signals(*STOPPING), defer_signals():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]


TWICE = """
import signal, sys
from flowgrpo.training import signals
from flowgrpo.training.signals import STOPPING, defer_signals, stop_on_signals
signals.BURST = float("{burst}")
with stop_on_signals(*STOPPING):
    try:
        with defer_signals(unless=lambda: {unless}):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        print("saving", flush=True)
        signal.raise_signal(signal.{second})
        print("saved", flush=True)
"""


def signalled(**given) -> subprocess.CompletedProcess:
    program = TWICE.format(**given)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(("unless", "second", "printed"), [(True, "SIGINT", "saving\n"), (False, "SIGINT", "")])
def test_second_signal_ends_the_process(unless, second, printed):
    done = signalled(unless=unless, second=second, burst=0)
    assert (done.stdout, done.stderr) == (printed, "\nsignalled again: ended at once, and nothing more is saved\n")
    assert done.returncode == -(signal.Signals[second] if printed else signal.SIGTERM)


@pytest.mark.parametrize("unless", [True, False])
def test_burst_of_signals_counts_as_one(unless):
    done = signalled(unless=unless, second="SIGTERM", burst="inf")
    assert (done.stdout, done.stderr, done.returncode) == ("saving\nsaved\n", "", 0)
