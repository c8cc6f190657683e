"""The engine under load and through swaps of weights: nothing is lost, nothing hangs, nothing old is used."""

import threading
import time

import jax
import numpy as np
import pytest
from engine_cases import SETTINGS, bits, make_requests, next_turn
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import BANNED, CONFIG, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.sampler import logprobs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    with Engine(POLICY, tiny_params(), **SETTINGS) as engine:
        yield engine


def compilations(engine) -> list[int]:
    return [program._cache_size() for program in engine.programs]


# Weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_swap", ["recompute", "keep"])
def test_weights_swap_in_flight(at_swap):
    """Every token says which weights chose it, versions only grow, and no request is dropped."""
    with Engine(POLICY, tiny_params(), **{**SETTINGS, "steps": 2, "slot_length": 640}, at_swap=at_swap) as engine:
        # Long enough to be in flight at every swap, however late this thread gets its turn.
        futures = [engine.submit(fg.Request([1, 2, i + 1], jax.random.key(i), 600)) for i in range(8)]
        for version in range(1, 4):
            time.sleep(0.05)
            engine.swap(tiny_params(version), version)
        completions = [future.result(timeout=120) for future in futures]
    assert all(list(c.version) == sorted(c.version) and len(c.tokens) == 600 for c in completions)
    assert {version for c in completions for version in c.version} >= {0, 3}


def test_a_recomputed_cache_holds_nothing_of_the_old_weights():
    """Four requests of one prompt in flight: after the swap each token is scored as the new weights score it."""
    prompt = np.random.default_rng(2).integers(1, CONFIG.v, 40).tolist()
    with Engine(POLICY, tiny_params(), **{**SETTINGS, "steps": 1, "slot_length": 512}) as engine:
        engine.generate(make_requests(8, seed=15))
        futures = [engine.submit(fg.Request(prompt, jax.random.key(i), 400)) for i in range(4)]
        time.sleep(0.05)
        engine.swap(tiny_params(9), 1)
        completions = [future.result(timeout=120) for future in futures]
    tokens = np.zeros((4, 440), np.int32)
    for i, completion in enumerate(completions):
        tokens[i] = [*prompt, *completion.tokens]
    scores = logprobs(POLICY, tiny_params(9), tokens, banned=BANNED)
    new = np.array([c.version for c in completions]) == 1
    assert 0 < new.sum() < new.size
    np.testing.assert_allclose(
        np.asarray(scores.logp)[:, 40:][new], np.array([c.logp for c in completions])[new], atol=2e-5
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


# Load -------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_after_the_first_requests(engine):
    """One compilation of each program, whatever lengths, turns and settings come.

    Programs without a policy are shared between engines, and compiled once for each of their shapes.
    """
    first = make_requests(1, seed=16)[0]
    completion = engine.generate([first])[0]
    engine.generate(make_requests(16, seed=17))
    engine.generate([next_turn(first, completion, 99)])  # evicted by now, so every program has run
    before = compilations(engine)
    engine.generate(make_requests(30, seed=12, temperature=0.3))
    assert compilations(engine) == before
    assert len(before) == 6
    assert [getattr(engine.programs, name)._cache_size() for name in ("prefill", "force", "decode")] == [1, 1, 1]


@settings(max_examples=10)
@given(st.lists(st.tuples(st.sampled_from(["submit", "submit", "cancel", "wait"]), st.integers(0, 99)), max_size=100))
def test_random_submits_and_cancels_lose_nothing(engine, steps):
    """Up to 1,000 random steps: every future is answered or cancelled, and uncancelled ones are whole."""
    pool, futures = make_requests(100, seed=13), []
    for action, number in steps:
        if action == "submit":
            futures.append((number, engine.submit(pool[number])))
        elif action == "cancel" and futures:
            futures[number % len(futures)][1].cancel()
        else:
            time.sleep(0.0005)
    for number, future in futures:
        if not future.cancelled():
            completion = future.result(timeout=60)
            assert completion.finish_reason in ("stop", "length")
            assert len(completion.tokens) <= pool[number].max_tokens


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
