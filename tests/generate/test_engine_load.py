"""The engine through swaps of weights and releases of its caches: nothing is lost, nothing old is used."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from compilations import counted_compilations
from engine_cases import SETTINGS, as_tuple, bits, detokenize, make_requests, next_turn, on_stretch
from tiny_models import BANNED, CONFIG, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.sampler import logprobs

pytestmark = pytest.mark.slow

PARAMS = [tiny_params(seed) for seed in range(3)]
PROMPT = np.random.default_rng(2).integers(1, CONFIG.v, 40).tolist()


@pytest.fixture(scope="module")
def engine():
    with Engine(POLICY, PARAMS[0], SETTINGS, detokenize=detokenize) as engine:
        yield engine


# Weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_weight_update", ["recompute", "keep"])
def test_weights_are_updated_in_flight(on_weight_update):
    """Every token says which weights chose it, no request is dropped, and where the caches are computed again, what
    comes is scored as the new weights score it."""
    with Engine(
        POLICY, PARAMS[0], replace(SETTINGS, on_weight_update=on_weight_update), detokenize=detokenize
    ) as engine:
        actions = {3: partial(engine.update_weights, PARAMS[1], 1), 6: partial(engine.update_weights, PARAMS[2], 2)}
        on_stretch(engine, lambda number, _: actions.get(number, str)())
        completions = engine.generate([fg.contracts.Request(PROMPT, jax.random.key(i), 60) for i in range(4)])
    assert [list(c.version) for c in completions] == [[0] * 24 + [1] * 24 + [2] * 12] * 4
    tokens, logp = (
        np.array([[*PROMPT, *c.tokens] for c in completions]),
        np.array([c.logp_sampled for c in completions]),
    )
    for version, (begin, end) in enumerate([(0, 24), (24, 48), (48, 60)]):
        scores = np.asarray(logprobs(POLICY, PARAMS[version], tokens, banned=BANNED).logp)[:, 40 + begin : 40 + end]
        assert np.allclose(scores, logp[:, begin:end], atol=1e-5) == (on_weight_update == "recompute" or version == 0)


def test_a_cache_kept_through_an_update_is_not_reused():
    """With `keep` a request goes on with what older weights left; nobody else, and no later turn, begins with it."""
    request, other = (fg.contracts.Request(PROMPT, jax.random.key(i), 30) for i in range(2))
    in_flight = []
    with Engine(POLICY, PARAMS[0], replace(SETTINGS, on_weight_update="keep"), detokenize=detokenize) as engine:

        def update(number, _):
            if number == 2:
                engine.update_weights(PARAMS[1], 1)
                in_flight.append(engine.submit(other))

        on_stretch(engine, update)
        first = engine.generate([request])[0]
        beside = in_flight[0].result(timeout=600)
        turn = next_turn(request, first, 1)
        after = engine.generate([turn, other])
        again = engine.generate([turn])
    with Engine(POLICY, PARAMS[1], SETTINGS, version=1, detokenize=detokenize) as fresh:
        expected = bits([*fresh.generate([turn]), *fresh.generate([other])])
    assert set(first.version) == {0, 1}
    assert bits(after) == bits([*again, beside]) == expected
    # What the present weights alone computed is found: the prompt of the request that came with the update, and the
    # first token that it fed; the turn, once it was computed.
    assert [c.reused for c in (beside, *after, *again)] == [0, 40, 39, 78]


# Releases ---------------------------------------------------------------------------------------------


def test_release_returns_the_freed_bytes(engine):
    shape = POLICY.make_cache(SETTINGS.slots, SETTINGS.slot_length).keys.shape

    def held() -> int:
        return sum(x.nbytes for x in jax.live_arrays() if x.shape == shape)

    engine.generate(make_requests(2))
    before = held()
    assert engine.release() >= before > 0 == held()
    assert engine.release() == 0


def test_E3_requests_continue_through_releases_to_equal_bits(engine):
    requests = [fg.contracts.Request([1, 2, 3], jax.random.key(i), 60) for i in range(10)]
    expected = bits(engine.generate(requests))
    futures, freed = [engine.submit(request) for request in requests], []
    while len(freed) < 5 and not all(future.done() for future in futures):
        freed.append(engine.release())
    assert bits(future.result() for future in futures) == expected
    assert any(freed)
    assert engine.lost.generated == 0


def test_new_weights_reach_a_released_engine(engine):
    request = make_requests(1, seed=5)[0]
    before = engine.generate([request])[0]
    engine.release()
    engine.update_weights(PARAMS[1], 7)
    assert set(engine.generate([request])[0].version) == {7}
    engine.update_weights(PARAMS[0], 0)
    assert as_tuple(engine.generate([request])[0]) == as_tuple(before)


# Compilation ------------------------------------------------------------------------------------------


def test_nothing_is_compiled_after_the_first_request():
    """At most twelve programs in all, small ones included, whatever lengths, turns and settings come."""
    sizes = replace(SETTINGS, slots=5, slot_length=120)  # of no other test, so that nothing is compiled before
    first, requests = make_requests(1, seed=16)[0], make_requests(30, seed=12, temperature=0.3)
    with counted_compilations() as compiled:
        with Engine(POLICY, PARAMS[0], sizes, detokenize=detokenize) as engine:
            later = next_turn(first, engine.generate([first])[0], 99)
            assert 6 <= compiled.total() <= 12
            compiled.clear()
            engine.generate(requests)
            engine.update_weights(PARAMS[1], 1)
            engine.generate([later, *requests])
        with Engine(
            POLICY, PARAMS[0], sizes, detokenize=detokenize
        ) as engine:  # made again, as after each stage, it finds its programs
            engine.generate(requests)
        assert not compiled
