"""The engine: what a request gets depends on its key alone, and nothing is lost whatever happens around it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest
from engine_cases import SETTINGS, as_tuple, bits, count_live, detokenize, fill, make_requests, next_turn
from tiny_models import BANNED, CONFIG, POLICY, tiny_params

import flowgrpo as fg
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.sampler import draw_margin, logprobs
from flowgrpo.models.decoder import make_policy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    with Engine(POLICY, tiny_params(), SETTINGS, detokenize=detokenize) as engine:
        yield engine


# E3 ---------------------------------------------------------------------------------------------------


def test_E3_bits_depend_on_neither_batch_order_nor_threads(engine):
    requests = make_requests(40)
    together = engine.generate(requests)
    order = np.random.default_rng(0).permutation(40)
    assert bits(engine.generate([requests[i] for i in order])) == bits([together[i] for i in order])
    assert bits([engine.generate([request])[0] for request in requests[:6]]) == bits(together[:6])
    with ThreadPoolExecutor(6) as pool:
        assert bits(pool.map(lambda request: engine.submit(request).result(), requests)) == bits(together)
    for request, completion in zip(requests, together, strict=True):
        assert [token == 7 for token in completion.tokens[:-1]] == [False] * (len(completion.tokens) - 1)
        stopped = completion.tokens[-1] == 7
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.tokens) == request.max_tokens
    assert {completion.finish_reason for completion in together} == {"stop", "length"}


def test_E3_cached_evicted_and_released_prefixes_give_equal_bits(engine):
    """Three turns: right after each other, with other work in every slot between them, with a release in between.
    The first turn ends with a stop string: nothing of what was decoded past it is in the cache."""
    requests = make_requests(3, seed=22, max_tokens=39, stop=("é", "ab", "€"), stop_ids=())
    cached, evicted, released = [], [], []
    for results, between in ((cached, lambda: None), (evicted, lambda: fill(engine)), (released, engine.release)):
        fill(engine)
        for i, first in enumerate(requests):
            request = first
            for turn in range(3):
                completion = engine.generate([request])[0]
                results.append(completion)
                between()
                request = next_turn(request, completion, 10 * i + turn)
    assert bits(cached) == bits(evicted) == bits(released)
    assert [completion.finish_reason for completion in cached[::3]] == ["stop"] * 3
    assert [completion.reused > 0 for completion in cached] == [False, True, True] * 3
    assert not any(completion.reused for completion in evicted + released)


def test_members_of_a_group_share_the_prefill(engine):
    """Eight requests of one prompt: the same bits as without sharing, and the prompt is computed once."""
    prompt = np.random.default_rng(9).integers(1, CONFIG.v, 40).tolist()
    group = [fg.contracts.Request(prompt, jax.random.key(i), 10) for i in range(8)]
    fill(engine)
    together = engine.generate(group)
    assert [completion.reused for completion in together] == [0] + [39] * 7
    fill(engine)
    assert as_tuple(engine.generate([group[3]])[0]) == as_tuple(together[3])


def test_E3_between_widths_only_near_ties_differ(engine):
    """Log-probabilities within 1e-5, and tokens equal up to the first near-tie."""
    requests = make_requests(16, seed=4)
    with Engine(POLICY, tiny_params(), replace(SETTINGS, slots=1), detokenize=detokenize) as narrow:
        pairs = zip(engine.generate(requests), narrow.generate(requests), strict=True)
    for request, (one, two) in zip(requests, pairs, strict=True):
        same = min(len(one.tokens), len(two.tokens))
        parted = next((j for j in range(same) if one.tokens[j] != two.tokens[j]), same)
        np.testing.assert_allclose(one.logp_sampled[:parted], two.logp_sampled[:parted], atol=1e-5)
        if parted < same:
            tokens = np.array([*request.tokens, *one.tokens[: parted + 1]])
            assert draw_margin(POLICY, tiny_params(), tokens, request.key, parted, banned=BANNED) < 1e-4


def test_E3_a_smaller_decode_batch_gives_equal_bits(engine):
    """Ask kernels that round every row alike, which tests do; then the width is nothing that bits depend on."""
    requests, rows = make_requests(12, seed=8), []
    with Engine(POLICY, tiny_params(), replace(SETTINGS, min_decode_batch=2), detokenize=detokenize) as narrow:
        decode = narrow.programs.decode

        def recorded(params, all_rows, index, going, *rest):
            rows.append(len(going))
            return decode(params, all_rows, index, going, *rest)

        narrow.programs = narrow.programs._replace(decode=recorded)
        together = narrow.generate(requests)
        assert set(rows) == {8, 2}
        rows.clear()
        alone = [narrow.generate([request])[0] for request in requests]
        assert set(rows) == {2}
    assert bits(together) == bits(alone) == bits(engine.generate(requests))


def test_E3_and_F7_hold_with_one_cache_a_layer(engine):
    """Draw equal bits in any company; and to rounding those that scoring and stacked layers give."""
    requests = make_requests(12, seed=6, temperature=0.7)
    policy = make_policy(CONFIG, unroll=True)
    with Engine(policy, tiny_params(), SETTINGS, detokenize=detokenize) as unrolled:
        together = unrolled.generate(requests)
        assert [as_tuple(completion) for completion in together] == [
            as_tuple(unrolled.generate([request])[0]) for request in requests
        ]
        assert bits(reversed(together)) == bits(unrolled.generate(requests[::-1]))
    check_scores(policy, requests, together, atol=2e-5)  # layers one by one round otherwise: 1.2e-5 with AVX-512
    for completion, other in zip(together, engine.generate(requests), strict=True):
        assert list(completion.tokens) == list(other.tokens)
        np.testing.assert_allclose(completion.logp_sampled, other.logp_sampled, atol=1e-5)


def test_F7_scoring_gives_what_the_engine_sampled(engine):
    """In first turns, and in second ones that go on from the cache."""
    firsts = [request._replace(temperature=0.7) for request in make_requests(4, seed=5)]
    seconds = [next_turn(*turn, i) for i, turn in enumerate(zip(firsts, engine.generate(firsts), strict=True))]
    requests = [*firsts, *(request._replace(temperature=0.7) for request in seconds)]
    check_scores(POLICY, requests, engine.generate(requests))


def check_scores(policy, requests, completions, *, atol=1e-5):
    """`logprobs` gives every sampled token what it was sampled with."""
    tokens, segments = np.zeros((2, len(requests), 128), np.int32)
    for i, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        both = [*request.tokens, *completion.tokens]
        tokens[i, : len(both)], segments[i, : len(both)] = both, 1
    scores = logprobs(policy, tiny_params(), tokens, None, segments, temperature=0.7, banned=BANNED)
    for request, completion, logp in zip(requests, completions, np.asarray(scores.logp), strict=True):
        own = slice(len(request.tokens), len(request.tokens) + len(completion.tokens))
        np.testing.assert_allclose(logp[own], completion.logp_sampled, atol=atol)


# How requests end -------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_and_keeps_its_tokens(engine):
    completion = engine.generate([fg.contracts.Request([1, 2, 3], jax.random.key(0), 120, deadline=0.0)])[0]
    assert completion.finish_reason == "timeout"
    assert len(completion.tokens) < 120


def test_a_stop_string_ends_where_its_last_token_is():
    """Up to that token the bits are those without the string; what was decoded past it is accounted for (A5, A6)."""
    requests = make_requests(40, seed=21, max_tokens=39)
    with Engine(POLICY, tiny_params(), SETTINGS, detokenize=detokenize) as engine:
        free = engine.generate(requests)
        stops, ends = [], []
        for completion in free:  # a stop string out of the middle, and the token that completes it
            text, size = detokenize(completion.tokens), len(completion.tokens)
            stops.append(max(text[len(text) // 3 :][:9].split("\ufffd"), key=len) or "nowhere")
            ends.append(next((n for n in range(1, size + 1) if stops[-1] in detokenize(completion.tokens[:n])), size))
        counts = count_live(engine)
        asked = [request._replace(stop=(stop, "@@")) for request, stop in zip(requests, stops, strict=True)]
        stopped = engine.generate(asked)
        lost = engine.lost.check()
    for completion, one, stop, end in zip(free, stopped, stops, ends, strict=True):
        assert as_tuple(one)[:3] == tuple(column[:end] for column in as_tuple(completion)[:3])
        assert (one.finish_reason == "stop") == (stop in detokenize(one.tokens) or one.tokens[-1] == 7)
    assert lost.fates == {fg.types.Fate.DROPPED_AFTER_STOP: sum(counts) - sum(ends)}
    assert lost.generated > 0
    assert any("é" in stop for stop in stops)


def test_a_failing_detokenizer_ends_its_own_request_only():
    def read(ids):
        raise KeyError(ids[0])

    with Engine(POLICY, tiny_params(), SETTINGS, detokenize=read) as engine:
        plain, reading = (
            engine.submit(fg.contracts.Request([1, 2], jax.random.key(0), 20, stop=stop)) for stop in ((), ("a",))
        )
        with pytest.raises(KeyError):
            reading.result(timeout=600)
        assert len(plain.result(timeout=600).tokens) == 20
        assert engine.lost.check().generated > 0
