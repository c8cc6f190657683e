"""Deadlines on work of this thread that a busy machine and a full heap do not pass."""

import gc
import time
from contextlib import contextmanager


@contextmanager
def deadline(seconds, *case):
    """Assert that what stands within takes this thread less than `seconds` of a processor.

    Other threads do not count, nor do collections of what other tests left, which take half a second each.
    """
    gc.disable()
    try:
        start = time.thread_time()
        yield
        assert time.thread_time() - start < seconds, case
    finally:
        gc.enable()
