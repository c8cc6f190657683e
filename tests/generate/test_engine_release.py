"""A released engine holds no cache, refuses nothing, and gives the same bits as one that was never released."""

import threading

import jax
import numpy as np
import pytest
from engine_cases import SETTINGS, bits, make_requests, next_turn
from tiny_models import POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.engine import Engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    with Engine(POLICY, tiny_params(), **SETTINGS) as engine:
        yield engine


def cache_bytes() -> int:
    """Of all live arrays that have the shape of this engine's keys and values."""
    assert POLICY.make_cache is not None
    shape = POLICY.make_cache(SETTINGS["slots"], SETTINGS["slot_length"]).keys.shape
    return sum(x.nbytes for x in jax.live_arrays() if x.shape == shape)


def test_the_bytes_that_a_release_frees_are_shown_and_gone(engine):
    engine.generate(make_requests(2))
    held = cache_bytes()
    freed = engine.release()
    assert freed >= held > 0
    assert cache_bytes() == 0
    assert engine.release() == 0


def test_E3_a_released_engine_gives_the_same_bits(engine):
    """Conversations of three turns, with and without a release between the turns."""
    requests = make_requests(6, seed=3)
    kept, released = [], []
    for results, release in ((kept, lambda: 0), (released, engine.release)):
        engine.release()
        for i, first in enumerate(requests):
            request = first
            for turn in range(3):
                completion = engine.generate([request])[0]
                results.append(completion)
                release()
                request = next_turn(request, completion, 10 * i + turn)
    assert bits(kept) == bits(released)
    assert sum(c.reused for c in kept) > 0 == sum(c.reused for c in released)


def test_what_decodes_during_a_release_goes_on_to_the_same_bits(engine):
    requests = [fg.Request([1, 2, 3], jax.random.key(i), 100) for i in range(12)]
    whole = engine.generate(requests)
    futures, freed = [engine.submit(request) for request in requests], []
    while not all(future.done() for future in futures):
        freed.append(engine.release())
    assert bits([future.result() for future in futures]) == bits(whole)
    assert sum(size > 0 for size in freed) > 1
    assert engine.lost.generated == 0


def test_new_weights_reach_a_released_engine(engine):
    other = jax.tree.map(lambda x: x * np.float32(0.5), tiny_params())
    request = make_requests(1, seed=5)
    before = engine.generate(request)
    engine.release()
    engine.swap(other, 7)
    assert set(engine.generate(request)[0].version) == {7}
    engine.release()
    engine.swap(tiny_params(), 0)
    assert bits(engine.generate(request)) == bits(before)


def test_a_release_from_a_callback_is_refused_and_a_closed_engine_has_nothing_to_free():
    said, told = [], threading.Event()

    def call(_):
        try:
            engine.release()
        except fg.BadInput as error:
            said.append(str(error))
        told.set()

    with Engine(POLICY, tiny_params(), **SETTINGS) as engine:
        future = engine.submit(make_requests(1)[0])
        future.add_done_callback(call)
        assert told.wait(120)
    assert "would wait for itself" in said[0] or future.done()
    assert engine.release() == 0
