"""The engine under load and through swaps of weights: nothing is lost, nothing hangs, nothing old is used."""

import threading
from functools import partial

import jax
import numpy as np
import pytest
from engine_cases import SETTINGS, bits, make_requests, next_turn
from tiny_models import BANNED, CONFIG, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.sampler import logprobs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    with Engine(POLICY, tiny_params(), **SETTINGS) as engine:
        yield engine


@pytest.fixture
def compiled():
    """The seconds of every compilation from here on."""
    seconds = []

    def note(event: str, duration_secs: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(note)


def call_at(engine, number: int, action) -> None:
    """Call `action` in the engine's own thread, after its stretch of that number."""
    decode, calls = engine.programs.decode, []

    def calling(*arguments):
        result = decode(*arguments)
        calls.append(None)
        if len(calls) == number:
            action()
        return result

    engine.programs = engine.programs._replace(decode=calling)


# Weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_swap", ["recompute", "keep"])
def test_weights_swap_in_flight(at_swap):
    """Every token says which weights chose it, versions only grow, and no request is dropped."""
    requests = [fg.Request([1, 2, i + 1], jax.random.key(i), 100) for i in range(8)]
    with Engine(POLICY, tiny_params(), **{**SETTINGS, "steps": 2}, at_swap=at_swap) as engine:
        engine.generate(make_requests(8, seed=15))
        for version in range(1, 4):
            call_at(engine, 10 * version, partial(engine.swap, tiny_params(version), version))
        completions = engine.generate(requests)
    assert all(list(c.version) == [0] * 20 + [1] * 20 + [2] * 20 + [3] * 40 for c in completions)


def test_a_recomputed_cache_holds_nothing_of_the_old_weights():
    """Four requests of one prompt in flight: after the swap each token is scored as the new weights score it."""
    prompt = np.random.default_rng(2).integers(1, CONFIG.v, 40).tolist()
    with Engine(POLICY, tiny_params(), **{**SETTINGS, "steps": 1}) as engine:
        engine.generate(make_requests(8, seed=15))
        call_at(engine, 30, partial(engine.swap, tiny_params(9), 1))
        completions = engine.generate([fg.Request(prompt, jax.random.key(i), 80) for i in range(4)])
    tokens = np.zeros((4, 120), np.int32)
    for i, completion in enumerate(completions):
        tokens[i] = [*prompt, *completion.tokens]
    scores = logprobs(POLICY, tiny_params(9), tokens, banned=BANNED)
    new = np.array([c.version for c in completions]) == 1
    assert new.sum() == 4 * 50
    np.testing.assert_allclose(
        np.asarray(scores.logp)[:, 40:][new], np.array([c.logp for c in completions])[new], atol=1e-5
    )


def test_after_a_swap_nothing_old_is_used():
    requests = make_requests(6, seed=11)
    with Engine(POLICY, tiny_params(5), **SETTINGS) as fresh:
        expected = bits(fresh.generate(requests))
    with Engine(POLICY, tiny_params(0), **SETTINGS) as engine:
        engine.generate(requests)
        engine.swap(tiny_params(5), 1)
        completions = engine.generate(requests)
    assert bits(completions) == expected
    assert {version for c in completions for version in c.version} == {1}


def test_a_cache_that_was_kept_through_a_swap_is_not_found_again():
    """With `keep` a request goes on with what older weights left; nobody else, and no later turn, begins with it."""
    prompt = np.random.default_rng(18).integers(1, CONFIG.v, 40).tolist()
    request, other = (fg.Request(prompt, jax.random.key(i), 30) for i in range(2))
    with Engine(POLICY, tiny_params(0), **{**SETTINGS, "steps": 1}, at_swap="keep") as engine:
        in_flight = []

        def swap():
            engine.swap(tiny_params(5), 1)
            in_flight.append(engine.submit(other))

        call_at(engine, 12, swap)
        first = engine.generate([request])[0]
        beside = in_flight[0].result(timeout=60)
        after = engine.generate([next_turn(request, first, 1), other])
        again = engine.generate([next_turn(request, first, 1)])
    assert set(first.version) == {0, 1}
    with Engine(POLICY, tiny_params(5), **{**SETTINGS, "steps": 1}) as fresh:
        turn = fresh.generate([next_turn(request, first, 1)])
        assert bits([*turn, *fresh.generate([other])]) == bits(after)
    assert bits(turn) == bits(again)
    assert bits(after[1:]) == bits([beside])
    # What the present weights alone computed is found: the prompt of the request that came with the swap, and the first
    # token that it fed; the turn, once it was computed.
    assert [c.reused for c in (beside, *after, *again)] == [0, 40, 39, 78]


# Load -------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_after_the_first_request(compiled):
    """At most twelve programs in all, small ones included, whatever lengths, turns and settings come."""
    sizes = {**SETTINGS, "slots": 5, "slot_length": 120}  # of no other test, so that nothing is compiled before
    first, requests = make_requests(1, seed=16)[0], make_requests(30, seed=12, temperature=0.3)
    params = [tiny_params(seed) for seed in (0, 1)]
    compiled.clear()
    with Engine(POLICY, params[0], **sizes) as engine:
        later = next_turn(first, engine.generate([first])[0], 99)
        assert 6 <= len(compiled) <= 12
        compiled.clear()
        engine.generate(requests)
        engine.swap(params[1], 1)
        engine.generate([later, *requests, *requests])
    with Engine(POLICY, params[0], **sizes) as engine:  # made again, as after each stage, it finds its programs
        engine.generate(requests)
    assert not compiled


def test_many_threads_submit_at_once(engine):
    requests, results = make_requests(48, seed=14), {}

    def work(part):
        for i in range(part, 48, 6):
            results[i] = engine.submit(requests[i]).result(timeout=60)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bits([results[i] for i in range(48)]) == bits(engine.generate(requests))
