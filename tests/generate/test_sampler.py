"""Sampling and scoring: the distribution drawn from, F7, M4, and the cache of a turn that goes on."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import BANNED, CONFIG, POLICY, tiny_params

from flowgrpo.generate.sampler import (
    cool,
    decode,
    draw,
    kept_set,
    logprobs,
    prefill,
    sampling,
    start_rows,
)

ROWS, PROMPT, STEPS = 8, 6, 40
NO_STOP = jnp.full((ROWS, 1), -1, jnp.int32)


SCORE = jax.jit(partial(logprobs, POLICY, temperature=0.7, banned=BANNED, chunk=64))


@partial(jax.jit, static_argnames="width")
def run(params, prompt_rs, key_r, *, width=0, stop_ids=NO_STOP, budget=STEPS):
    """Prefill all but the last token of the prompts, then decode."""
    cache = POLICY.make_cache(ROWS, PROMPT + STEPS + 8)
    cache = prefill(POLICY, params, cache, prompt_rs[:, :-1], jnp.ones((ROWS, PROMPT - 1), bool))
    rows = start_rows(cache, prompt_rs[:, -1], key_r, jnp.full(ROWS, budget, jnp.int32))
    settings = sampling(ROWS, temperature=0.7, top_k=20, top_p=0.9)
    return decode(POLICY, params, rows, settings, stop_ids, steps=STEPS, banned=BANNED, width=width)


@pytest.fixture(scope="module")
def start():
    prompt_rs = jax.random.randint(jax.random.key(1), (ROWS, PROMPT), 1, CONFIG.v)
    return tiny_params(), prompt_rs, jax.random.split(jax.random.key(2), ROWS)


@pytest.mark.parametrize("width", [0, 20])
def test_F7_scoring_gives_what_was_sampled(start, width):
    """Full support, and top-k 20 with top-p 0.9 over the recorded sets: the same numbers within rounding."""
    params, prompt_rs, key_r = start
    _, sampled = run(params, prompt_rs, key_r, width=width)
    tokens_rs = jnp.concatenate([prompt_rs, sampled.token.T], axis=1)
    kept = None
    if width:
        given = jnp.full((ROWS, PROMPT, width), -1, jnp.int32)
        kept = jnp.concatenate([given, jnp.swapaxes(sampled.kept, 0, 1)], axis=1)
    scores = SCORE(params, tokens_rs, kept=kept)
    assert sampled.live.all()
    np.testing.assert_allclose(scores.logp[:, PROMPT:], sampled.logp.T, atol=1e-5)
    np.testing.assert_allclose(scores.entropy[:, PROMPT:], sampled.entropy.T, atol=1e-5)


def test_the_padding_token_is_never_sampled(start):
    """Token 0 is banned, though its logit is by far the largest."""
    params, prompt_rs, key_r = start
    tempted = params | {"embed": params["embed"].at[0].set(50.0 * params["norm"])}
    _, sampled = run(tempted, prompt_rs, key_r)
    assert not (np.asarray(sampled.token) == 0).any()


def test_draw_follows_the_distribution():
    """The share of uniform numbers that draw a token is its probability."""
    logits_v = jax.random.normal(jax.random.key(0), (13,))
    uniform_r = jnp.asarray((np.arange(20_000, dtype=np.float32) + 0.5) / 20_000)
    logits_rv = jnp.broadcast_to(logits_v, (20_000, 13))
    drawn = draw(logits_rv, uniform_r, sampling(20_000, temperature=0.5), banned=(3,), width=0)
    expected_v = jax.nn.softmax((logits_v / 0.5).at[3].set(-jnp.inf))
    share_v = np.bincount(np.asarray(drawn.token), minlength=13) / 20_000
    np.testing.assert_allclose(share_v, expected_v, atol=2e-4)
    np.testing.assert_allclose(drawn.logp, jnp.log(expected_v)[drawn.token], atol=1e-5)
    assert (np.asarray(drawn.margin) >= -1e-6).all()


def test_kept_sets_by_hand():
    """Probabilities .5 .25 .15 .1: top-k 3; top-p .6 keeps two; min-p .4 keeps two; the first always stays."""
    cooled_rv = jnp.log(jnp.array([[0.15, 0.5, 0.1, 0.25]] * 4))
    settings = sampling(4)._replace(
        top_k=jnp.array([3, 4, 4, 4]), top_p=jnp.array([1.0, 0.6, 1.0, 0.0]), min_p=jnp.array([0.0, 0.0, 0.4, 0.0])
    )
    expected = [[1, 3, 0, -1], [1, 3, -1, -1], [1, 3, -1, -1], [1, -1, -1, -1]]
    np.testing.assert_array_equal(kept_set(cooled_rv, settings, 4), expected)
    drawn = draw(cooled_rv, jnp.array([0.99] * 4), settings, banned=(), width=4)
    np.testing.assert_array_equal(drawn.token, [0, 3, 3, 1])
    np.testing.assert_allclose(jnp.exp(drawn.logp), [0.15 / 0.9, 1 / 3, 1 / 3, 1.0], rtol=1e-5)


def test_rows_end_by_stop_token_and_by_budget(start):
    params, prompt_rs, key_r = start
    _, free = run(params, prompt_rs, key_r)
    stop = int(free.token[5, 0])
    stop_ids = NO_STOP.at[0, 0].set(stop)
    _, stopped = run(params, prompt_rs, key_r, stop_ids=stop_ids, budget=20)
    first = int(np.argmax(np.asarray(free.token[:, 0]) == stop))
    assert int(stopped.live[:, 0].sum()) == first + 1
    assert int(stopped.token[first, 0]) == stop
    np.testing.assert_array_equal(stopped.live[:, 1:].sum(axis=0), np.full(ROWS - 1, 20))
    np.testing.assert_array_equal(stopped.token[:20, 1:], free.token[:20, 1:])


@pytest.mark.slow
def test_a_turn_goes_on_from_its_cache(start):
    """Appending to the cache gives what scoring the whole conversation gives: nothing is computed again."""
    params, prompt_rs, key_r = start
    rows, first = run(params, prompt_rs, key_r, budget=10)
    seen_rs = jax.random.randint(jax.random.key(5), (ROWS, 4), 1, CONFIG.v)
    given_rs = jnp.concatenate([rows.token[:, None], seen_rs], axis=1)
    cache = prefill(POLICY, params, rows.cache, given_rs[:, :-1], jnp.ones((ROWS, 4), bool))
    rows = start_rows(cache, given_rs[:, -1], key_r, jnp.full(ROWS, 8, jnp.int32))
    _, second = decode(POLICY, params, rows, sampling(ROWS, temperature=0.7), NO_STOP, steps=8, banned=BANNED)
    tokens_rs = jnp.concatenate([prompt_rs, first.token[:10].T, seen_rs, second.token.T], axis=1)
    scores = SCORE(params, tokens_rs)
    np.testing.assert_allclose(scores.logp[:, -8:], second.logp.T, atol=1e-5)


@pytest.mark.slow
def test_logprobs_in_packed_rows_equal_those_of_separate_rows():
    params = tiny_params()
    tokens_rs = jax.random.randint(jax.random.key(3), (2, 9), 1, CONFIG.v)
    packed = jnp.concatenate([tokens_rs[0], tokens_rs[1], jnp.zeros(3, jnp.int32)])[None]
    segments = jnp.array([[1] * 9 + [2] * 9 + [0] * 3])
    positions = jnp.array([[*range(9), *range(9), 0, 0, 0]])
    found = logprobs(POLICY, params, packed, positions, segments, chunk=5)
    apart = logprobs(POLICY, params, tokens_rs)
    np.testing.assert_allclose(found.logp[0, :18].reshape(2, 9), apart.logp, atol=1e-5)
    np.testing.assert_allclose(found.entropy[0, :18].reshape(2, 9), apart.entropy, atol=1e-5)
    assert not np.asarray(found.logp[0, 18:]).any()
    assert not np.asarray(found.logp)[0, [0, 9]].any()


@pytest.mark.parametrize("chunk", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_chunks_change_neither_scores_nor_gradient(chunk):
    """Against the plain formula with the whole [r, s, v]."""
    params, tokens_rs = tiny_params(), jax.random.randint(jax.random.key(4), (2, 11), 1, CONFIG.v)

    def plain(params):
        logits = POLICY.apply(params, tokens_rs)[0][:, :-1]
        logp = jax.nn.log_softmax(cool(logits, jnp.full((2, 10), 0.7), BANNED))
        return jnp.take_along_axis(logp, tokens_rs[:, 1:, None], axis=-1).sum()

    def chunked(params):
        return logprobs(POLICY, params, tokens_rs, temperature=0.7, banned=BANNED, chunk=chunk).logp.sum()

    (expected, slopes), (found, own) = (jax.jit(jax.value_and_grad(f))(params) for f in (plain, chunked))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for name, slope in slopes.items():
        np.testing.assert_allclose(own[name], slope, atol=1e-4 * float(jnp.abs(slope).max()) + 1e-7, err_msg=name)


@pytest.mark.slow
def test_M4_the_vocabulary_is_never_met_as_a_whole():
    """Temporary memory of scores and gradient, from the compiler, against the plain formula: at most 1/8."""
    policy, vocabulary = tiny_wide_policy(), 32_768
    params = jax.eval_shape(policy.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((4, 512), jnp.int32)

    def plain(params, tokens):
        logp = jax.nn.log_softmax(policy.apply(params, tokens)[0][:, :-1])
        return jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).sum()

    def chunked(params, tokens):
        return logprobs(policy, params, tokens, chunk=64).logp.sum()

    sizes = [
        jax.jit(jax.grad(f)).lower(params, tokens).compile().memory_analysis().temp_size_in_bytes
        for f in (chunked, plain)
    ]
    assert sizes[1] > 4 * 511 * vocabulary * 4
    assert sizes[0] <= sizes[1] / 8


def tiny_wide_policy():
    from dataclasses import replace

    from flowgrpo.models.decoder import make_policy

    return make_policy(replace(CONFIG, v=32_768, d=16, windows=(None,), ropes=CONFIG.ropes[:1]))
