"""Completions in parts: wherever one is cut, what comes in the end is what one request gets (E3), counted once (A6)."""

import threading

import jax
import numpy as np
import pytest
from engine_cases import SETTINGS, bits, count_live, make_requests, next_turn, text_of
from tiny_models import BANNED, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.sampler import logprobs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    with Engine(POLICY, tiny_params(), **SETTINGS, text_of=text_of) as engine:
        yield engine


def go_on(engine, request: fg.Request, budget: int, between=lambda: None) -> list[fg.Completion]:
    """All parts of a completion of which each samples at most `budget` tokens; the last one is whole."""
    parts = []
    while not parts or parts[-1].finish_reason == "budget":
        begun = parts[-1] if parts else None
        parts += engine.generate([request._replace(budget=budget, begun=begun)])
        new = len(parts[-1].tokens) - (len(begun.tokens) if begun else 0)
        assert 1 <= new <= budget
        assert new == budget or parts[-1].finish_reason != "budget"
        between()
    return parts


def whole(completion: fg.Completion) -> tuple:
    """All of a completion but where its cache was found."""
    kept = None if completion.kept is None else np.asarray(completion.kept).tolist()
    columns = (completion.tokens, completion.logp, completion.version, completion.margin)
    return *map(list, columns), completion.finish_reason, kept


# E3 ---------------------------------------------------------------------------------------------------


def test_E3_a_completion_that_is_cut_anywhere_and_goes_on_has_the_same_bits(engine):
    request = make_requests(1, seed=1, max_tokens=20, stop_ids=())[0]
    expected = engine.generate([request])[0]
    assert len(expected.tokens) == 20
    for cut in range(1, 20):
        first = engine.generate([request._replace(budget=cut)])[0]
        assert whole(first)[:4] == tuple(column[:cut] for column in whole(expected)[:4])
        assert first.finish_reason == "budget"
        assert whole(engine.generate([request._replace(begun=first)])[0]) == whole(expected)


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_E3_parts_have_the_same_bits_whether_their_caches_are_found_or_evicted(engine, budget):
    """First turns, and second ones, where the conversation already holds tokens that were sampled."""
    for seed, first in enumerate(make_requests(4, seed=2)):
        for request in (first, next_turn(first, engine.generate([first])[0], seed)):
            expected = whole(engine.generate([request])[0])
            found = go_on(engine, request, budget)
            evicted = go_on(engine, request, budget, lambda: engine.generate(make_requests(10, seed=70)))
            assert whole(found[-1]) == whole(evicted[-1]) == expected
            assert {part.reused for part in evicted[1:]} <= {0}
            sizes = [len(request.tokens) + len(part.tokens) - 1 for part in found[:-1]]
            assert [part.reused for part in found[1:]] == sizes


def test_E3_parts_of_many_completions_decode_together_with_whole_ones(engine):
    requests = make_requests(24, seed=3, max_tokens=30)
    expected = [whole(completion) for completion in engine.generate(requests)]
    parts = engine.generate([request._replace(budget=5 + i % 3) for i, request in enumerate(requests)])
    assert {part.finish_reason for part in parts} >= {"budget", "stop"}
    going = [
        request._replace(begun=part) if part.finish_reason == "budget" else request
        for request, part in zip(requests, parts, strict=True)
    ]
    order = np.random.default_rng(0).permutation(24)
    got = engine.generate([going[i] for i in order])
    assert [whole(completion) for completion in got] == [expected[i] for i in order]


def test_kept_sets_of_all_parts_are_recorded():
    requests = make_requests(4, seed=4, top_k=5, top_p=0.9, max_tokens=12, stop_ids=())
    with Engine(POLICY, tiny_params(), **SETTINGS, kept=8) as engine:
        expected = engine.generate(requests)
        assert [whole(go_on(engine, request, 5)[-1]) for request in requests] == [whole(one) for one in expected]


def test_weights_that_are_swapped_between_parts_choose_the_rest():
    """Each token says which weights chose it, and is scored as those score it."""
    request = make_requests(1, seed=5, max_tokens=20, stop_ids=())[0]
    with Engine(POLICY, tiny_params(), **SETTINGS) as engine:
        first = engine.generate([request._replace(budget=8)])[0]
        engine.swap(tiny_params(1), 1)
        got = engine.generate([request._replace(begun=first)])[0]
    assert bits([got])[0][0][:8] == list(first.tokens)
    assert list(got.logp[:8]) == list(first.logp)
    assert list(got.version) == [0] * 8 + [1] * 12
    tokens = np.array([[*request.tokens, *got.tokens]], np.int32)
    for version in (0, 1):
        scores = logprobs(POLICY, tiny_params(version), tokens, banned=BANNED).logp[0, len(request.tokens) :]
        own = np.array(got.version) == version
        np.testing.assert_allclose(np.asarray(scores)[own], np.array(got.logp)[own], atol=1e-5)


# How parts end ----------------------------------------------------------------------------------------


def test_a_stop_id_or_the_last_token_at_the_cut_is_the_end(engine):
    """What could not go on has not ended for its budget."""
    requests = make_requests(40, seed=6)
    pairs = zip(requests, engine.generate(requests), strict=True)
    request, expected = next(pair for pair in pairs if pair[1].finish_reason == "stop" and len(pair[1].tokens) > 2)
    size = len(expected.tokens)
    assert whole(engine.generate([request._replace(budget=size)])[0]) == whole(expected)
    part = engine.generate([request._replace(budget=size - 1)])[0]
    assert part.finish_reason == "budget"
    assert whole(engine.generate([request._replace(begun=part, budget=1)])[0]) == whole(expected)
    request = request._replace(stop_ids=(), max_tokens=6)
    assert [part.finish_reason for part in go_on(engine, request, 6)] == ["length"]
    assert [part.finish_reason for part in go_on(engine, request, 3)] == ["budget", "length"]
    assert [part.finish_reason for part in go_on(engine, request, 100)] == ["length"]


def test_a_stop_string_is_found_across_the_cut(engine):
    """Wherever the cut is, it ends with the same token; what was decoded past it in a part is none of it (A5)."""
    request = make_requests(1, seed=21, max_tokens=39, stop_ids=())[0]
    text = text_of(engine.generate([request])[0].tokens)
    stop = max(text[len(text) // 3 :][:9].split("\ufffd"), key=len)
    request = request._replace(stop=(stop,))
    expected = engine.generate([request])[0]
    assert len(stop) > 2
    assert expected.finish_reason == "stop"
    for budget in range(1, len(expected.tokens) + 1):
        assert whole(go_on(engine, request, budget)[-1]) == whole(expected)


# A6 ---------------------------------------------------------------------------------------------------


def test_A6_what_was_begun_is_not_counted_again():
    """A request that goes on and is cancelled loses what it sampled itself, and nothing of what came before."""
    request = fg.Request([1, 2, 3], jax.random.key(0), 100)
    sampling, cancelled = threading.Event(), threading.Event()
    with Engine(POLICY, tiny_params(), **{**SETTINGS, "steps": 1}) as engine:
        begun = engine.generate([request._replace(budget=30)])[0]
        counts: list[int] = []
        count_live(engine, counts)
        decode = engine.programs.decode

        def waiting(*arguments):
            result = decode(*arguments)
            sampling.set()
            assert cancelled.wait(60)
            return result

        engine.programs = engine.programs._replace(decode=waiting)
        future = engine.submit(request._replace(begun=begun))
        assert sampling.wait(60)
        assert future.cancel()
        cancelled.set()
        engine.generate([request._replace(max_tokens=1)])
        lost = engine.lost.check()
    assert lost.fates == {fg.Fate.DROPPED_CANCELLED: sum(counts) - 1}
    assert 0 < lost.generated < 30


# What is refused --------------------------------------------------------------------------------------

BEGUN = fg.Completion([4, 5], [-0.5, -0.25], [0, 0], "budget", [1.0, 1.0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"budget": 0}, "budget=0, but a request samples at least one token"),
        ({"begun": BEGUN._replace(finish_reason="stop")}, "has ended as 'stop'"),
        ({"begun": BEGUN._replace(finish_reason="length")}, "has ended as 'length'"),
        ({"begun": fg.Completion([], [], [], "budget")}, "has 0 tokens, but must have at least one"),
        ({"begun": BEGUN, "max_tokens": 2}, "has 2 tokens, but must have at least one and less than max_tokens=2"),
        ({"begun": BEGUN._replace(logp=[-0.5])}, "2 tokens, 1 log-probabilities, 2 versions and 2 margins"),
        ({"begun": BEGUN._replace(margin=())}, "2 versions and 0 margins: give it as an engine gave it"),
        ({"begun": BEGUN._replace(kept=np.zeros((2, 8)))}, "must come from an engine with kept=0"),
    ],
)
def test_bad_requests_get_one_sentence(engine, fields, words):
    request = fg.Request([1, 2, 3], jax.random.key(0), 5)._replace(**fields)
    with pytest.raises(fg.BadInput, match=words):
        engine.submit(request)
