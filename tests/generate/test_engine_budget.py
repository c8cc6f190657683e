"""Completions in parts: wherever one is cut, what comes in the end is what one request gets (E3), counted once (A6)."""

import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
from engine_cases import SETTINGS, as_tuple, bits, count_live, detokenize, fill, make_requests, next_turn, on_stretch
from tiny_models import POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.engine import Engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    with Engine(POLICY, tiny_params(), SETTINGS, detokenize=detokenize) as engine:
        yield engine


def go_on(engine, request: fg.contracts.Request, budget: int, between=lambda: None) -> list[fg.contracts.Completion]:
    """All parts of a completion of which each samples at most `budget` tokens; the last one is whole."""
    parts = []
    while not parts or parts[-1].finish_reason == "budget":
        partial = parts[-1] if parts else None
        parts += engine.generate([request._replace(budget=budget, partial=partial)])
        new = len(parts[-1].tokens) - (len(partial.tokens) if partial else 0)
        assert 1 <= new <= budget
        assert new == budget or parts[-1].finish_reason != "budget"
        between()
    return parts


def test_E3_a_completion_in_parts_has_equal_bits(engine):
    request = make_requests(1, seed=1, max_tokens=20, stop_ids=())[0]
    expected = as_tuple(engine.generate([request])[0])
    for cut in range(1, 20):
        first = engine.generate([request._replace(budget=cut)])[0]
        assert as_tuple(first)[:4] == (*(column[:cut] for column in expected[:3]), "budget")
        assert as_tuple(engine.generate([request._replace(partial=first)])[0]) == expected


@pytest.mark.parametrize("budget", [1, 4])
def test_E3_parts_have_equal_bits_with_or_without_their_caches(engine, budget):
    """A first turn, and a second one, where the conversation already holds tokens that were sampled."""
    first = make_requests(1, seed=2, max_tokens=9)[0]
    for request in (first, next_turn(first, engine.generate([first])[0], 0)):
        in_parts = go_on(engine, request, budget)
        evicted = go_on(engine, request, budget, lambda: fill(engine))
        assert as_tuple(in_parts[-1]) == as_tuple(evicted[-1]) == as_tuple(engine.generate([request])[0])
        assert {part.reused for part in evicted[1:]} == {0}
        sizes = [len(request.tokens) + len(part.tokens) - 1 for part in in_parts[:-1]]
        assert [part.reused for part in in_parts[1:]] == sizes


def test_E3_parts_of_many_completions_decode_together_with_whole_ones(engine):
    requests = make_requests(24, seed=3, max_tokens=30)
    expected = bits(engine.generate(requests))
    parts = engine.generate([request._replace(budget=5 + i % 3) for i, request in enumerate(requests)])
    assert {part.finish_reason for part in parts} >= {"budget", "stop"}
    going = [
        request._replace(partial=part) if part.finish_reason == "budget" else request
        for request, part in zip(requests, parts, strict=True)
    ]
    order = np.random.default_rng(0).permutation(24)
    assert bits(engine.generate([going[i] for i in order])) == [expected[i] for i in order]


def test_an_engine_that_cuts_the_support_resumes_too():
    """Greedy by top-k 1, and sets of at most 5."""
    requests = make_requests(3, seed=4, top_k=5, top_p=0.9, max_tokens=12, stop_ids=())
    with Engine(POLICY, tiny_params(), replace(SETTINGS, max_recorded_top_k=8), detokenize=detokenize) as engine:
        expected = engine.generate(requests)
        assert bits(go_on(engine, request, 5)[-1] for request in requests) == bits(expected)
        greedy, again = engine.generate(
            [requests[0]._replace(top_k=1, key=key) for key in jax.random.split(requests[0].key)]
        )
    assert greedy.tokens == again.tokens
    np.testing.assert_allclose(greedy.logp_sampled, 0.0, atol=1e-6)


def test_E3_a_mixed_engine_equals_engines_of_either_kind(engine):
    """To the bit within itself, whatever decodes beside a request; full support records no set, and none is cut."""
    full = make_requests(5, seed=5)
    ways = ({"top_k": 1}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.2}, {"top_p": 0.5})
    cut = [request._replace(**ways[i % 4]) for i, request in enumerate(make_requests(5, seed=6))]
    with Engine(
        POLICY, tiny_params(), replace(SETTINGS, max_recorded_top_k=64, mixed=True), detokenize=detokenize
    ) as mixed:
        alone = bits(mixed.generate(full)), bits(mixed.generate(cut))
        fill(mixed)
        together = bits(mixed.generate([x for pair in zip(full, cut, strict=True) for x in pair]))
    assert (together[::2], together[1::2]) == alone
    with Engine(POLICY, tiny_params(), replace(SETTINGS, max_recorded_top_k=64), detokenize=detokenize) as cutting:
        expected = bits(engine.generate(full)), bits(cutting.generate(cut))
    for completion, other in zip((*alone[0], *alone[1]), (*expected[0], *expected[1]), strict=True):
        assert completion[0] == other[0]
        np.testing.assert_allclose(completion[1], other[1], atol=1e-5)


def test_a_stop_at_the_cut_ends_the_completion(engine):
    """A completion that could not go on anyway has the finish reason "stop" or "length", and not "budget"."""
    requests = make_requests(40, seed=6)
    pairs = zip(requests, engine.generate(requests), strict=True)
    request, expected = next(pair for pair in pairs if pair[1].finish_reason == "stop" and len(pair[1].tokens) > 2)
    size = len(expected.tokens)
    assert as_tuple(engine.generate([request._replace(budget=size)])[0]) == as_tuple(expected)
    assert [part.finish_reason for part in go_on(engine, request, size - 1)] == ["budget", "stop"]
    request = request._replace(stop_ids=(), max_tokens=6)
    assert [part.finish_reason for part in go_on(engine, request, 6)] == ["length"]
    assert [part.finish_reason for part in go_on(engine, request, 3)] == ["budget", "length"]
    assert [part.finish_reason for part in go_on(engine, request, 100)] == ["length"]


def test_a_stop_string_is_found_across_the_cut(engine):
    """The completion ends with the same token wherever the cut is; what a part decoded past that is left out (A5)."""
    request = make_requests(1, seed=21, max_tokens=39, stop_ids=())[0]
    text = detokenize(engine.generate([request])[0].tokens)
    request = request._replace(stop=(max(text[len(text) // 3 :][:9].split("\ufffd"), key=len),))
    expected = engine.generate([request])[0]
    assert len(request.stop[0]) > 2
    assert expected.finish_reason == "stop"
    for budget in range(1, len(expected.tokens) + 1):
        assert as_tuple(go_on(engine, request, budget)[-1]) == as_tuple(expected)


def test_A6_a_partial_completion_is_not_counted_again():
    """A request that goes on and is cancelled loses what it sampled itself, and nothing of what came before."""
    request = fg.contracts.Request([1, 2, 3], jax.random.key(0), 100)
    sampling, cancelled = threading.Event(), threading.Event()
    with Engine(POLICY, tiny_params(), SETTINGS, detokenize=detokenize) as engine:
        partial = engine.generate([request._replace(budget=30)])[0]
        counts = count_live(engine)
        on_stretch(engine, lambda *_: sampling.set() or cancelled.wait(600))
        future = engine.submit(request._replace(partial=partial))
        assert sampling.wait(600)
        assert future.cancel()
        cancelled.set()
        engine.generate([request._replace(max_tokens=1)])  # the slot is free
        lost = engine.lost.check()
    assert lost.fates == {fg.types.Fate.DROPPED_CANCELLED: sum(counts) - 1}
    assert 0 < lost.generated < 30
