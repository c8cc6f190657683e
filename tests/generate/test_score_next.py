"""`score_next` against the plain formula over the whole vocabulary and its gradient by autodiff: F6, F7, M4."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.contracts import Policy
from flowgrpo.generate.sampler import score_next

V, D, R, S, WARM, BANNED, CAP = 500, 6, 3, 10, 0.7, (1, 3), 4.0
RANDOM = np.random.default_rng(0)
TABLE_VD = RANDOM.normal(size=(V, D)).astype("f")
STATES_RSD = RANDOM.normal(size=(R, S, D)).astype("f")
TOKENS_RS = RANDOM.integers(4, V, (R, S)).astype("i")
REAL_RS = RANDOM.random((R, S)) < 0.4
UPS = RANDOM.normal(size=(2, R, S)).astype("f")  # what the loss multiplies log-probabilities and entropies with


def unembed(params, states):
    """Tied, with a soft cap."""
    return CAP * jnp.tanh(states @ params["embed"].T / CAP)


POLICY = Policy(None, None, unembed)


def recorded_sets():
    """Up to five ids with the token among them; one token of six has no set."""
    support = RANDOM.integers(4, V, (R, S, 5)).astype("i")
    support[..., 0] = TOKENS_RS
    support[..., 4] = -1
    support[RANDOM.random((R, S)) < 1 / 6] = -1
    return jnp.asarray(support)


def naive_scores(params, states, tokens, real, support):
    """Log-probabilities and entropies from all logits at once."""
    logits = (unembed(params, states) / WARM).at[..., jnp.array(BANNED)].set(-jnp.inf)
    token_rs1 = tokens[..., None]
    if support is None:
        logp = jax.nn.log_softmax(logits)
        possible = jnp.isfinite(logp)
        finite = jnp.where(possible, logp, 0.0)
        chosen_rs, scored_rs = jnp.take_along_axis(logp, token_rs1, axis=-1)[..., 0], real
        entropy_rs = -jnp.where(possible, jnp.exp(finite) * finite, 0.0).sum(axis=-1)
    else:
        scored_rs = real & (support[..., 0] >= 0)
        among = jnp.where(support >= 0, jnp.take_along_axis(logits, jnp.maximum(support, 0), axis=-1), -1e9)
        among = jnp.where(scored_rs[..., None], among, 0.0)
        logp = jax.nn.log_softmax(among)
        chosen_rs = jnp.take_along_axis(logits, token_rs1, axis=-1)[..., 0] - jax.nn.logsumexp(among, axis=-1)
        entropy_rs = -(jnp.exp(logp) * logp).sum(axis=-1)
    return jnp.stack([jnp.where(scored_rs, x, 0.0) for x in (chosen_rs, entropy_rs)])


def scores_in_chunks(params, states, tokens, real, support, chunk=4):
    settings = {"temperature": WARM, "banned": BANNED, "support": support, "chunk": chunk}
    return jnp.stack(score_next(POLICY, params, states, tokens, real, **settings)[:2])


@pytest.mark.parametrize("use_kept", [False, True], ids=["full", "kept"])
@pytest.mark.parametrize("parts", [(1.0, 0.0), (1.0, 1.0)], ids=["logp", "entropy"])
def test_F7_scores_and_gradients_equal_autodiff_over_all_logits(use_kept, parts):
    """Soft cap, temperature, banned ids; of weights that a loss reads elsewhere too, and with none for the others."""
    support = recorded_sets() if use_kept else None
    ups = UPS * np.array(parts, "f")[:, None, None]
    params = {"embed": TABLE_VD, "other": np.ones(3, "f")}

    def loss(score, params, states):
        scores = score(params, states, TOKENS_RS, REAL_RS, support)
        return (ups * scores)[: 1 + int(parts[1])].sum() + params["embed"][0].sum(), scores

    actual, expected = (
        jax.jit(jax.value_and_grad(partial(loss, score), argnums=(0, 1), has_aux=True))(params, STATES_RSD)
        for score in (scores_in_chunks, naive_scores)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), actual, expected)
    assert not np.asarray(actual[1][0]["other"]).any()
    assert not np.asarray(actual[1][1])[~REAL_RS].any()


@pytest.mark.parametrize("real", [np.zeros((R, S), bool), np.ones((R, S), bool)], ids=["none", "all"])
def test_the_number_of_real_tokens_is_data(real):
    actual = jax.jit(scores_in_chunks, static_argnames="chunk")({"embed": TABLE_VD}, STATES_RSD, TOKENS_RS, real, None)
    np.testing.assert_allclose(actual, naive_scores({"embed": TABLE_VD}, STATES_RSD, TOKENS_RS, real, None), atol=2e-5)


def test_F6_values_of_padding_change_nothing():
    """NaN in its hidden state and an id that doesn't exist reach neither scores nor gradient."""
    states, tokens = STATES_RSD.copy(), TOKENS_RS.copy()
    states[~REAL_RS], tokens[~REAL_RS] = np.nan, -7

    def loss(params, states, tokens):
        return (UPS * scores_in_chunks(params, states, tokens, REAL_RS, None)).sum()

    clean, garbage = (
        jax.jit(jax.value_and_grad(loss))({"embed": TABLE_VD}, *pair)
        for pair in ((STATES_RSD, TOKENS_RS), (states, tokens))
    )
    jax.tree.map(np.testing.assert_array_equal, clean, garbage)


def test_logits_are_computed_for_chunks_with_a_real_token_alone():
    """A callback counts them, in a forward and a backward pass: 5 real tokens are two chunks of 4."""
    shapes = []

    def counted(params, states):
        jax.debug.callback(lambda: shapes.append(1))
        return unembed(params, states)

    real = np.zeros(R * S, bool)
    real[[0, 7, 8, 15, 29]] = True
    policy = POLICY._replace(unembed=counted)

    def loss(params):
        return score_next(policy, params, STATES_RSD, TOKENS_RS, real.reshape(R, S), chunk=4).logp.sum()

    slope = jax.jit(jax.grad(loss))({"embed": TABLE_VD})["embed"]
    jax.block_until_ready(slope)
    jax.effects_barrier()
    assert len(shapes) == 4


def test_a_frozen_unembedding_has_no_gradient_and_costs_none():
    """The gradient of the states alone holds no array over the vocabulary but a chunk's logits."""
    params = {"embed": jax.ShapeDtypeStruct((2**15, D), "f")}
    states, tokens = jax.ShapeDtypeStruct((4, 64, D), "f"), jax.ShapeDtypeStruct((4, 64), "i")

    def loss(states, params, tokens):
        return score_next(POLICY, params, states, tokens, tokens > 0, chunk=8).logp.sum()

    sizes = [
        jax.jit(jax.grad(loss, argnums)).lower(states, params, tokens).compile().memory_analysis().temp_size_in_bytes
        for argnums in (0, (0, 1))
    ]
    assert sizes[0] <= 4 * 8 * 2**15 * 4
    assert sizes[0] < sizes[1]
