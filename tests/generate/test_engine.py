"""The engine: what a request gets depends on its key alone, and nothing is lost whatever happens around it."""

import threading

import jax
import numpy as np
import pytest
from engine_cases import SETTINGS, bits, count_live, make_requests, next_turn, text_of
from tiny_models import BANNED, CONFIG, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.sampler import logprobs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    with Engine(POLICY, tiny_params(), **SETTINGS) as engine:
        yield engine


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
        np.testing.assert_allclose(scores.logp[0, len(request.tokens) : len(whole)], completion.logp, atol=1e-5)


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


# Stop strings -----------------------------------------------------------------------------------------


def cut_text(completion: fg.Completion) -> tuple[str, int]:
    """A stop string out of the middle of what was sampled, and how many tokens stay where it ends them."""
    text = text_of(completion.tokens)
    stop = max(text[len(text) // 3 :][:9].split("\ufffd"), key=len) or "nowhere"
    ends = range(1, len(completion.tokens) + 1)
    return stop, next((end for end in ends if stop in text_of(completion.tokens[:end])), len(completion.tokens))


def test_a_stop_string_ends_where_its_last_token_is():
    """The same bits as without it, up to that token; what was decoded past it is accounted for (A5, A6)."""
    requests = make_requests(40, seed=21, max_tokens=39)
    with Engine(POLICY, tiny_params(), **SETTINGS, text_of=text_of) as engine:
        whole = engine.generate(requests)
        stops, ends = zip(*map(cut_text, whole), strict=True)
        counts = []
        count_live(engine, counts)
        asked = [request._replace(stop=(stop, "@@")) for request, stop in zip(requests, stops, strict=True)]
        stopped = engine.generate(asked)
        engine.lost.check()
    assert bits(stopped) == [(tokens[:end], logp[:end]) for (tokens, logp), end in zip(bits(whole), ends, strict=True)]
    past = sum(counts) - sum(ends)
    assert engine.lost.fates == {fg.Fate.DROPPED_AFTER_STOP: past}
    assert past > 0
    ends_of = [text_of(completion.tokens[-1:]) for completion in stopped]
    several = [
        stop in text_of(c.tokens) and stop not in end for stop, c, end in zip(stops, stopped, ends_of, strict=True)
    ]
    assert sum(several) > 10
    assert any("é" in stop for stop in stops)
    for completion, stop in zip(stopped, stops, strict=True):
        assert (completion.finish_reason == "stop") == (
            stop in text_of(completion.tokens) or completion.tokens[-1] == 7
        )
        assert len(completion.tokens) == len(completion.logp) == len(completion.version) == len(completion.margin)


def test_E3_the_turn_after_a_stop_string_reuses_what_stayed():
    """Nothing of what was decoded past it is in the next turn's cache: the same bits as from an evicted one."""
    found, evicted, dropped = [], [], []
    with Engine(POLICY, tiny_params(), **SETTINGS, text_of=text_of) as engine:
        requests = make_requests(8, seed=22, max_tokens=39, stop=("é", "ab", "€"), stop_ids=())
        for results, noise in ((found, False), (evicted, True)):
            for i, request in enumerate(requests):
                first = engine.generate([request])[0]
                dropped.append(engine.lost.generated)
                if noise:
                    engine.generate(make_requests(10, seed=60 + i))
                results += engine.generate([next_turn(request, first, 30 + i)])
    assert bits(found) == bits(evicted)
    assert min(c.reused for c in found) > 0 == sum(c.reused for c in evicted)
    assert dropped[7] > 0


def test_a_reader_that_fails_ends_its_own_request_only():
    def read(ids):
        raise KeyError(ids[0])

    with Engine(POLICY, tiny_params(), **SETTINGS, text_of=read) as engine:
        plain, reading = (engine.submit(fg.Request([1, 2], jax.random.key(0), 20, stop=stop)) for stop in ((), ("a",)))
        with pytest.raises(KeyError):
            reading.result(timeout=60)
        assert len(plain.result(timeout=60).tokens) == 20
        assert engine.lost.check().generated > 0


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
        ({"stop": ("a", "")}, "must hold strings of at least one character"),
        ({"stop": ("a",)}, "needs an engine that can read ids: make it with text_of"),
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
