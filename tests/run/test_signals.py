"""Signals: one raises where nothing is torn apart, or else at the end of a block; the next one ends the process."""

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from flowgrpo.run.signals import STOPPING, Terminated, held, listening, number_of

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def as_before():
    """No test leaves another handler behind."""
    before = [signal.getsignal(number) for number in STOPPING]
    yield
    assert [signal.getsignal(number) for number in STOPPING] == before


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_raises_what_tells_its_number(number, kind):
    with pytest.raises(kind) as caught, listening(*STOPPING):
        signal.raise_signal(number)
    assert number_of(caught.value) == number
    assert type(caught.value) is kind


def stopped_in(block, number: int) -> tuple[type[BaseException], list[str]]:
    """A signal in such a block -> what was raised in the end, and what was done before."""
    done: list[str] = []
    try:
        with listening(*STOPPING):
            with block:
                signal.raise_signal(number)
                done.append("the rest of the block")
            done.append("what follows")
    except KeyboardInterrupt as stop:
        return type(stop), done
    raise AssertionError("nothing was raised")


@contextmanager
def held_twice():
    with held(), held():
        yield


REST = ["the rest of the block"]


@pytest.mark.parametrize(
    ("block", "number", "came"),
    [
        (held, signal.SIGTERM, (Terminated, REST)),
        (held, signal.SIGINT, (KeyboardInterrupt, REST)),
        (partial(held, unless=lambda: True), signal.SIGTERM, (Terminated, [])),
        (partial(held, unless=lambda: False), signal.SIGTERM, (Terminated, REST)),
        (held_twice, signal.SIGTERM, (Terminated, REST)),
    ],
)
def test_a_signal_comes_at_the_end_of_the_outermost_block_or_at_once_where_nothing_is_torn(block, number, came):
    assert stopped_in(block(), number) == came


def test_what_is_wrong_in_the_block_comes_before_the_signal():
    def fail() -> None:
        with listening(*STOPPING), held():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()


def test_a_thread_which_no_signal_reaches_goes_on():
    seen = []

    def work():
        with listening(*STOPPING), held():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


TWICE = """
import signal, sys
from flowgrpo.run import signals
from flowgrpo.run.signals import STOPPING, held, listening
signals.BURST = float("{burst}")
with listening(*STOPPING):
    try:
        with held(unless=lambda: {unless}):
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


@pytest.mark.parametrize(("unless", "second", "said"), [(True, "SIGINT", "saving\n"), (False, "SIGINT", "")])
def test_the_second_signal_ends_the_process_wherever_it_is_and_says_so(unless, second, said):
    done = signalled(unless=unless, second=second, burst=0)
    assert (done.stdout, done.stderr) == (said, "\nsignalled again: ended at once, and nothing more is saved\n")
    assert done.returncode == -(signal.Signals[second] if said else signal.SIGTERM)


@pytest.mark.parametrize("unless", [True, False])
def test_a_signal_that_comes_twice_at_once_as_timeout_sends_it_is_one(unless):
    done = signalled(unless=unless, second="SIGTERM", burst="inf")
    assert (done.stdout, done.stderr, done.returncode) == ("saving\nsaved\n", "", 0)
