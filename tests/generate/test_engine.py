"""The engine: what a request gets depends on its key alone, and nothing is lost whatever happens around it."""

import threading
import time

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import BANNED, CONFIG, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.sampler import logprobs

pytestmark = pytest.mark.slow

STOP = (7,)
SETTINGS = {"slots": 8, "slot_length": 128, "chunk": 16, "steps": 8, "banned": BANNED}


def make_requests(count: int, seed: int = 0, **fields) -> list[fg.Request]:
    rng = np.random.default_rng(seed)
    return [
        fg.Request(
            rng.integers(1, CONFIG.v, rng.integers(1, 50)).tolist(),
            jax.random.key(seed * 1000 + i),
            int(rng.integers(1, 40)),
            **{"stop_ids": STOP, **fields},
        )
        for i in range(count)
    ]


def next_turn(request: fg.Request, completion: fg.Completion, seed: int) -> fg.Request:
    """The conversation after an observation of 9 tokens."""
    seen = np.random.default_rng(seed).integers(1, CONFIG.v, 9).tolist()
    before = [False] * len(request.tokens) if request.chosen is None else list(request.chosen)
    return fg.Request(
        [*request.tokens, *completion.tokens, *seen],
        jax.random.key(10_000 + seed),
        12,
        chosen=before + [True] * len(completion.tokens) + [False] * 9,
        stop_ids=STOP,
    )


def bits(completions) -> list:
    return [(list(c.tokens), list(c.logp)) for c in completions]


@pytest.fixture(scope="module")
def engine():
    with Engine(POLICY, tiny_params(), **SETTINGS) as engine:
        yield engine


def compilations(engine) -> list[int]:
    return [program._cache_size() for program in engine.programs]


# E3 ---------------------------------------------------------------------------------------------------


def test_E3_alone_together_and_in_any_order_give_the_same_bits(engine):
    requests = make_requests(64)
    together = engine.generate(requests)
    order = np.random.default_rng(0).permutation(64)
    shuffled = engine.generate([requests[i] for i in order])
    assert bits(shuffled) == bits([together[i] for i in order])
    assert bits([engine.generate([request])[0] for request in requests[:12]]) == bits(together[:12])


def test_E3_a_found_prefix_and_an_evicted_one_give_the_same_bits(engine):
    """Three turns: once right after each other, once with other work in between that takes every slot."""
    requests = make_requests(6, seed=3)
    found, evicted = [], []
    for results, noise in ((found, False), (evicted, True)):
        for i, first in enumerate(requests):
            request = first
            for turn in range(3):
                if noise:
                    engine.generate(make_requests(10, seed=50 + i))
                completion = engine.generate([request])[0]
                results.append(completion)
                request = next_turn(request, completion, 10 * i + turn)
    assert bits(found) == bits(evicted)
    assert sum(c.reused for c in found) > 0 == sum(c.reused for c in evicted)


def test_members_of_a_group_share_the_prefill(engine):
    """Eight requests of one prompt: the same bits as without sharing, and the prompt is computed once."""
    prompt = np.random.default_rng(9).integers(1, CONFIG.v, 40).tolist()
    group = [fg.Request(prompt, jax.random.key(i), 10) for i in range(8)]
    engine.generate(make_requests(16, seed=8))
    together = engine.generate(group)
    assert [c.reused for c in together] == [0] + [39] * 7
    engine.generate(make_requests(16, seed=8))
    assert bits([engine.generate([group[3]])[0]]) == bits([together[3]])


def test_E3_between_widths_only_near_ties_differ():
    """Log-probabilities within 1e-5, and tokens equal up to the first near-tie."""
    requests = make_requests(16, seed=4)
    results = []
    for slots in (1, 3, 16):
        with Engine(POLICY, tiny_params(), **{**SETTINGS, "slots": slots}) as narrow:
            results.append(narrow.generate(requests))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            same = min(len(one.tokens), len(two.tokens))
            parted = next((j for j in range(same) if one.tokens[j] != two.tokens[j]), same)
            np.testing.assert_allclose(one.logp[:parted], two.logp[:parted], atol=1e-5)
            assert parted == same or min(one.margin[parted], two.margin[parted]) < 1e-4


def test_F7_scoring_gives_what_the_engine_sampled(engine):
    requests = make_requests(8, seed=5, temperature=0.7)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        tokens = np.zeros((1, 128), np.int32)
        whole = [*request.tokens, *completion.tokens]
        tokens[0, : len(whole)] = whole
        segments = (np.arange(128) < len(whole)).astype(np.int32)[None]
        scores = logprobs(POLICY, tiny_params(), tokens, None, segments, temperature=0.7, banned=BANNED)
        np.testing.assert_allclose(scores.logp[0, len(request.tokens) : len(whole)], completion.logp, atol=2e-5)


# How requests end -------------------------------------------------------------------------------------


def test_requests_end_by_stop_token_or_length(engine):
    requests = make_requests(40, seed=6)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        assert len(completion.tokens) == len(completion.logp) == len(completion.version) == len(completion.margin)
        if completion.finish_reason == "stop":
            assert completion.tokens[-1] == 7
            assert 7 not in completion.tokens[:-1]
        else:
            assert completion.finish_reason == "length"
            assert len(completion.tokens) == request.max_tokens


def test_a_deadline_ends_a_request_and_keeps_its_tokens(engine):
    slow = fg.Request([1, 2, 3], jax.random.key(0), 120, deadline=0.0)
    completion = engine.generate([slow])[0]
    assert completion.finish_reason == "timeout"
    assert len(completion.tokens) < 120


def test_a_cancelled_request_is_counted_and_frees_its_slot():
    with Engine(POLICY, tiny_params(), **{**SETTINGS, "slots": 1, "steps": 1}) as engine:
        engine.generate(make_requests(2))
        futures = [engine.submit(fg.Request([1, 2, 3], jax.random.key(i), 100)) for i in range(3)]
        assert futures[2].cancel()
        assert futures[0].result(timeout=60).finish_reason == "length"
        assert futures[1].result(timeout=60).finish_reason == "length"
        assert engine.lost.generated == 0


def test_close_answers_everything():
    engine = Engine(POLICY, tiny_params(), **SETTINGS)
    futures = [engine.submit(request) for request in make_requests(40, seed=7)]
    engine.close()
    assert {future.result(timeout=10).finish_reason for future in futures} <= {"cancelled", "stop", "length"}
    with pytest.raises(fg.BadInput, match="the engine is closed"):
        engine.submit(make_requests(1)[0])


def test_a_failure_reaches_every_caller():
    """A broken policy raises in the engine's thread; nobody waits for ever."""
    broken = POLICY._replace(unembed=lambda params, states: states @ params["nowhere"])
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        engine = Engine(broken, tiny_params(), **SETTINGS)
        futures = [engine.submit(request) for request in make_requests(3)]
        for future in futures:
            with pytest.raises(KeyError, match="nowhere"):
                future.result(timeout=60)
        engine.close()
    finally:
        threading.excepthook = hook


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


# What is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": []}, "needs at least one token"),
        ({"max_tokens": 200}, "must fit a slot of 128"),
        ({"max_tokens": 0}, "must fit a slot of 128"),
        ({"chosen": [True]}, "the request has 3 tokens, but `chosen` has 1"),
        ({"temperature": 0.0}, "temperature is 0.0, but must be greater than 0"),
        ({"stop_ids": tuple(range(20))}, "20 stop ids, but at most 8"),
        ({"top_k": 5}, "cut the support: make the engine with kept"),
    ],
)
def test_bad_requests_get_one_sentence(engine, fields, words):
    request = fg.Request([1, 2, 3], jax.random.key(0), 5)._replace(**fields)
    with pytest.raises(fg.BadInput, match=words):
        engine.submit(request)


def test_kept_sets_are_recorded():
    """Greedy by top-k 1, and sets of at most 5."""
    with Engine(POLICY, tiny_params(), **SETTINGS, kept=8) as engine:
        requests = [
            fg.Request([3, 4, 5], jax.random.key(i), 6, top_k=k, top_p=0.9) for i, k in ((0, 1), (1, 1), (2, 5))
        ]
        greedy, again, five = engine.generate(requests)
    assert greedy.tokens == again.tokens
    np.testing.assert_allclose(greedy.logp, 0.0, atol=1e-6)
    sizes = (np.asarray(five.kept) >= 0).sum(axis=1)
    assert five.kept.shape == (6, 8)
    assert (sizes >= 1).all()
    assert (sizes <= 5).all()
