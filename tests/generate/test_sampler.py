"""Sampling and scoring, of a recurrent toy that compiles fast, against loops in NumPy: the draw, F7, M4, kept sets."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.contracts import Policy
from flowgrpo.generate import sampler
from flowgrpo.generate.sampler import (
    decode,
    draw_margin,
    draw_token,
    feed,
    logprobs,
    make_sampling,
    prefill,
    recorded_support,
    start_rows,
)

V, D, ROWS, PROMPT, STEPS = 600, 8, 4, 5, 12
BANNED, WARM = (1, 3), 0.7
NO_STOP = jnp.full((ROWS, 2), -1, jnp.int32)


def hidden(params, tokens, _positions, segments, cache):
    """Half of the state that was, and the token's own; what is no part of a segment leaves it as it is."""

    def step(state_rd, now):
        token_r, real_r = now
        state_rd = jnp.where(real_r[:, None] > 0, 0.5 * state_rd + jnp.asarray(params["embed"])[token_r], state_rd)
        return state_rd, jnp.where(real_r[:, None] > 0, state_rd, 0.0)

    start_rd = jnp.zeros((len(tokens), D)) if cache is None else cache
    cache, states = jax.lax.scan(step, start_rd, (tokens.T, segments.T))
    return jnp.swapaxes(states, 0, 1), cache


TOY = Policy(None, hidden, lambda params, states: states @ params["out"])
RANDOM = np.random.default_rng(0)
PARAMS = {"embed": RANDOM.normal(size=(V, D)).astype("f"), "out": RANDOM.normal(size=(D, V)).astype("f")}
PARAMS["out"][:, 0] *= 2  # that the first token is often the likeliest
PROMPT_RS = RANDOM.integers(1, V, (ROWS, PROMPT)).astype("i")
KEY_R = jax.random.split(jax.random.key(2), ROWS)


def naive_draw(logits_v, uniform, width=512):
    """Token, log-probability and margin, where the vocabulary is met column by column, `width` columns."""
    p_v = np.exp(logits_v - np.max(logits_v))
    p_v /= p_v.sum()
    order = np.array([i for column in range(width) for i in range(column, len(p_v), width)])
    ends = np.cumsum(p_v[order])
    place = np.argmax(ends > uniform)
    token = order[place]
    margin = min(ends[place] - uniform, uniform - ends[place] + p_v[token])
    return token, np.log(p_v[token]), margin


def cooled(logits_v, banned=BANNED):
    logits_v = np.array(logits_v, float) / WARM
    logits_v[list(banned)] = -np.inf
    return logits_v


def naive_states(tokens):
    state_d, states = np.zeros(D), []
    for token in tokens:
        state_d = 0.5 * state_d + PARAMS["embed"][token]
        states.append(state_d)
    return np.array(states)


def naive_row(row, count):
    """The draws of a row's first `count` tokens after its prompt."""
    tokens, draws = list(PROMPT_RS[row]), []
    for i in range(count):
        uniform = float(jax.random.uniform(jax.random.fold_in(KEY_R[row], i)))
        draws.append(naive_draw(cooled(naive_states(tokens)[-1] @ PARAMS["out"]), uniform))
        tokens.append(draws[-1][0])
    return draws


# One token --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "banned"), [(13, (3,)), (1100, (3, 1024))])
def test_a_draw_inverts_the_cumulated_distribution_in_a_fixed_order(size, banned):
    """The last number lies past all edges, as rounding may have it: its column's last entry that is possible."""
    logits_v = RANDOM.normal(0, 2, size).astype("f")
    uniform_r = np.append((np.arange(500) + 0.5) / 500, 1.0).astype("f")
    drawing = jax.jit(partial(draw_token, banned=banned, width=0))
    drawn = drawing(np.tile(logits_v, (501, 1)), uniform_r, make_sampling(501, temperature=WARM), np.ones(501, bool))
    expected = [naive_draw(cooled(logits_v, banned), u, min(512, size)) for u in uniform_r[:-1]]
    for actual, column in zip((drawn.token, drawn.logp_sampled), zip(*expected, strict=True), strict=False):
        np.testing.assert_allclose(actual[:-1], column, atol=2e-5)
    assert int(drawn.token[-1]) == (512 if size > 512 else 0)
    assert drawn.support is None


def test_recorded_supports_by_hand():
    """Top-k 3; top-p .6 keeps two; min-p .5 keeps two; the first always stays, alone where it has all of top-p."""
    cooled_rv = jnp.log(jnp.array([[0.15, 0.5, 0.1, 0.25]] * 4 + [[1e-12, 1.0, 1e-12, 1e-12]])) + 2.0
    settings = make_sampling(5)._replace(
        top_k=jnp.array([3, 4, 4, 4, 4]),
        top_p=jnp.array([1.0, 0.6, 1.0, 0.0, 1.0]),
        min_p=jnp.array([0.0, 0.0, 0.5, 0.0, 0.0]),
    )
    expected = [[1, 3, 0, -1], [1, 3, -1, -1], [1, 3, -1, -1], [1, -1, -1, -1], [1, -1, -1, -1]]
    np.testing.assert_array_equal(recorded_support(cooled_rv, settings, 4), expected)
    drawn = draw_token(cooled_rv, jnp.array([0.99] * 5), settings, jnp.ones(5, bool), banned=(), width=4)
    np.testing.assert_array_equal(drawn.token, [0, 3, 3, 1, 1])
    np.testing.assert_allclose(jnp.exp(drawn.logp_sampled), [0.15 / 0.9, 1 / 3, 1 / 3, 1.0, 1.0], rtol=1e-5)
    assert [float(x[0]) for x in make_sampling(1)] == [1.0, 64, 1.0, 0.0]  # what cuts nothing


def test_banned_tokens_are_in_no_recorded_support():
    cooled_rv = np.random.default_rng(0).normal(size=(100, 7)).astype(np.float32)
    cooled_rv[:, 3] = -np.inf
    found_rk = np.sort(recorded_support(jnp.array(cooled_rv), make_sampling(100), 7), axis=1)
    np.testing.assert_array_equal(found_rk, [[-1, 0, 1, 2, 4, 5, 6]] * 100)


# Many tokens ------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("width", "min_decode_batch"))
def run(budget_r, stop_ids, settings, *, width=0, min_decode_batch=None, **leave):
    """Prefill all but the last token of the prompts, then decode."""
    cache = prefill(TOY, PARAMS, jnp.zeros((ROWS, D)), PROMPT_RS[:, :-1], jnp.ones((ROWS, PROMPT - 1), bool))
    rows = start_rows(cache, PROMPT_RS[:, -1], KEY_R, budget_r)
    sizes = {"steps": STEPS, "width": width, "min_decode_batch": min_decode_batch}
    return decode(TOY, PARAMS, rows, settings, stop_ids, banned=BANNED, **sizes, **leave)


FREE = make_sampling(ROWS, temperature=WARM)


@pytest.fixture(scope="module")
def draws():
    """Of each row: token, log-probability and margin, step by step."""
    return [naive_row(row, STEPS) for row in range(ROWS)]


def test_E3_draw_margin_is_the_distance_to_another_token(draws):
    for row, count in ((0, 0), (1, 4), (3, STEPS - 1)):
        tokens = np.array([*PROMPT_RS[row], *(one[0] for one in draws[row][: count + 1])])
        actual = draw_margin(TOY, PARAMS, tokens, KEY_R[row], count, temperature=WARM, banned=BANNED)
        np.testing.assert_allclose(actual, draws[row][count][2], atol=2e-5)


@pytest.mark.parametrize("how", [{}, {"leave": True}, {"min_decode_batch": 1}])
def test_rows_draw_by_their_keys_and_end_independently(draws, how):
    """With `leave` all stop with the third row, whose budget is spent first; narrowed, two go on, and then one."""
    leave = "leave" in how
    stop_ids = NO_STOP.at[1, 1].set(draws[1][6][0])
    budget_r = jnp.array([0, STEPS, 3, STEPS + 9], jnp.int32)
    rows, sampled = run(budget_r, stop_ids, FREE, **how)
    live_r = [0, 3, 3, 3] if leave else [0, 7, 3, STEPS]
    for row, size in enumerate(live_r):
        assert sampled.live[:, row].tolist() == [True] * size + [False] * (STEPS - size)
        for actual, column in zip((sampled.token, sampled.logp_sampled), zip(*draws[row], strict=True), strict=False):
            np.testing.assert_allclose(actual[:size, row], column[:size], atol=2e-4)
        expected = [*PROMPT_RS[row], *[one[0] for one in draws[row][:size]]]
        assert int(rows.token[row]) == expected[-1]
        np.testing.assert_allclose(rows.cache[row], naive_states(expected[:-1])[-1], atol=1e-5)
    assert rows.count.tolist() == live_r
    assert rows.budget.tolist() == (budget_r - jnp.array(live_r)).tolist()
    assert rows.active.tolist() == [False, leave, False, True]


def test_feeding_tokens_draws_what_decoding_would(draws):
    """Two at once, the last of them padding in one row; a row that has ended stays as it is."""
    cache = prefill(TOY, PARAMS, jnp.zeros((ROWS, D)), PROMPT_RS[:, :3], jnp.ones((ROWS, 3), bool))
    cache = cache.at[2].set(naive_states(PROMPT_RS[2, :4])[-1])
    tokens_rs = jnp.array(PROMPT_RS[:, 3:]).at[2].set(jnp.array([PROMPT_RS[2, 4], 9]))
    rows = start_rows(cache, jnp.zeros(ROWS, jnp.int32), KEY_R, jnp.array([STEPS, 0, STEPS, 1]))
    real_rs = jnp.array([[True, True]] * 2 + [[True, False], [True, True]])
    rows, first = jax.jit(partial(feed, TOY, PARAMS, banned=BANNED))(rows, tokens_rs, real_rs, FREE, NO_STOP)
    assert first.live.tolist() == [True, False, True, True]
    np.testing.assert_array_equal(rows.token, [draws[0][0][0], 0, draws[2][0][0], draws[3][0][0]])
    np.testing.assert_allclose(rows.cache[1], cache[1])
    assert rows.active.tolist() == [True, False, True, False]
    assert rows.count.tolist() == [1, 0, 1, 1]


# Scoring ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0, 20])
def test_F7_scoring_gives_what_was_sampled(width):
    """Full support, and top-k 20 with top-p 0.9 over the recorded sets: the same numbers within rounding."""
    settings = make_sampling(ROWS, temperature=WARM, top_k=20, top_p=0.9)
    _, sampled = run(jnp.full(ROWS, STEPS, jnp.int32), NO_STOP, settings, width=width)
    tokens_rs = jnp.concatenate([PROMPT_RS, sampled.token.T], axis=1)
    support = None
    if width:
        given = jnp.full((ROWS, PROMPT, width), -1, jnp.int32)
        support = jnp.concatenate([given, jnp.swapaxes(sampled.support, 0, 1)], axis=1)
    scores = jax.jit(partial(logprobs, TOY, temperature=WARM, banned=BANNED, chunk=64))(
        PARAMS, tokens_rs, support=support
    )
    assert sampled.live.all()
    np.testing.assert_allclose(scores.logp[:, PROMPT:], sampled.logp_sampled.T, atol=2e-5)
    assert not width or 0.1 < float(scores.entropy[:, PROMPT:].mean()) < np.log(width)
    assert bool((scores.logp[:, 1:PROMPT] == 0).all()) == bool(width)


def whole(params, tokens, segments):
    """Log-probabilities and entropies of all tokens but the first, over the whole vocabulary at once."""
    logits = TOY.apply(params, tokens, None, segments)[0][:, :-1] / WARM
    logp = jax.nn.log_softmax(logits.at[..., jnp.array(BANNED)].set(-jnp.inf))
    own_rs = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
    return own_rs, -(jnp.exp(logp) * jnp.maximum(logp, -1e9)).sum(axis=-1)


def chunked(params, tokens, segments, chunk):
    scores = logprobs(TOY, params, tokens, None, segments, temperature=WARM, banned=BANNED, chunk=chunk)
    return scores.logp[:, 1:], scores.entropy[:, 1:]


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunked_scores_and_gradients_equal_the_whole_vocabulary(chunk):
    """The size of chunks changes nothing; the first token of a segment and padding score 0."""
    tokens = jnp.array(RANDOM.integers(4, V, (2, 11)).astype("i"))
    segments = jnp.array([[1] * 5 + [2] * 4 + [0] * 2, [1] * 11])
    scored_rs = jnp.array([[1, 1, 1, 1, 0, 1, 1, 1, 0, 0], [1] * 10])

    def total(score, params):
        scores = jnp.stack(score(params, tokens, segments))
        return jnp.where(scored_rs, scores, 0.0).sum(), scores

    results = [
        jax.jit(jax.value_and_grad(partial(total, score), has_aux=True))(PARAMS)
        for score in (partial(chunked, chunk=chunk), whole)
    ]
    ((_, actual), own), ((_, expected), slopes) = results
    np.testing.assert_allclose(actual, np.where(scored_rs, expected, 0.0), atol=2e-5)
    for name, slope in slopes.items():
        np.testing.assert_allclose(own[name], slope, atol=1e-5 * float(jnp.abs(slope).max()), err_msg=name)


def test_M4_the_vocabulary_is_never_met_as_a_whole():
    """Temporary memory of scores and gradient, from the compiler, against the plain formula: at most 1/8."""
    params = {name: jax.ShapeDtypeStruct(shape, "f") for name, shape in (("embed", (2**15, D)), ("out", (D, 2**15)))}
    tokens = jax.ShapeDtypeStruct((4, 512), "i")
    small, large = (
        jax.jit(jax.grad(lambda *given, f=f: f(*given)[0].sum()))
        .lower(params, tokens, tokens)
        .compile()
        .memory_analysis()
        for f in (partial(chunked, chunk=64), whole)
    )
    assert large.temp_size_in_bytes > 4 * 511 * 2**15 * 4
    assert small.temp_size_in_bytes <= large.temp_size_in_bytes / 8


@pytest.mark.parametrize(("v", "expected"), [(64, 1024), (49_152, 341), (262_144, 256)])
def test_M4_chunks_are_bounded_by_their_logits(v, expected):
    def unembed(params, states):
        return states @ params

    params, states = jax.ShapeDtypeStruct((8, v), jnp.float32), jax.ShapeDtypeStruct((1, 5, 8), jnp.float32)
    assert sampler._bounded_chunk(unembed, params, states, 1024) == expected
