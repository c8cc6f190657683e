"""For tests of the learner: a policy that compiles in no time, and batches that it might have sampled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import make_case

import flowgrpo as fg
from flowgrpo.learner.micro import pad_rows
from flowgrpo.learner.update import make_score

WORDS, WIDTH, BANNED, TEMPERATURE = 50, 8, (0,), 0.8


def init(key):
    embed, mix, unembed = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(embed, (WORDS, WIDTH)),
        "mix": jax.random.normal(mix, (WIDTH, WIDTH)) / 2,
        "unembed": jax.random.normal(unembed, (WIDTH, WORDS)) / 2,
    }


def hidden(params, tokens, positions=None, _segments=None, cache=None):
    """What follows a token depends on that token, and on where it stands."""
    place = jnp.zeros_like(tokens) if positions is None else jnp.asarray(positions)
    x = params["embed"][tokens] + 0.1 * jnp.sin(place)[:, :, None]
    return jnp.tanh(x @ params["mix"]), cache


BIGRAMS = fg.Policy(init, hidden, lambda params, x: x @ params["unembed"])


def near(trajectories: fg.Trajectories, policy, params, drift: float, seed: int = 0) -> fg.Trajectories:
    """The trajectories with log-probabilities as if the policy had sampled them some `drift` ago."""
    ones = jnp.ones(trajectories.tokens.shape, jnp.float32)
    batch = fg.rows_by_trajectory(trajectories, ones, ones)
    score = make_score(policy, temperature=TEMPERATURE, banned=BANNED)
    logp_ntl = np.asarray(fg.unpack(score(params, batch).logp, batch, ones.shape))
    rng = np.random.default_rng(seed)
    moved = [logp_ntl + drift * rng.normal(size=ones.shape).astype(np.float32) for _ in range(2)]
    return trajectories.replace(logp_sampled=moved[0], logp_old=moved[0], logp_ref=moved[1])


def sampled_case(seed: int, policy=BIGRAMS, *, drift=0.1, **settings):
    """(params, trajectories) with ratios near 1."""
    params = policy.init(jax.random.key(seed))
    return params, near(make_case(seed, **settings).trajectories, policy, params, drift, seed)


def grow(batch: fg.Batch, rows: int) -> fg.Batch:
    """The batch with empty rows, up to `rows`."""
    return pad_rows(jax.tree.map(jnp.asarray, batch), rows)


def sgd(rate: float = 1.0) -> optax.GradientTransformation:
    """Steps that show the gradient as it is."""
    return optax.sgd(rate)


def assert_close(found, expected, start, tolerance=1e-4):
    """Equal parameters, relative to how far the largest moved from `start`."""
    moved = max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (expected, start)), strict=True))
    assert moved > 0
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * moved)
