"""For tests of the learner: a policy that compiles in no time, batches that it might have sampled, shared programs."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from family_cases import batch_of, make_case

import flowgrpo as fg
from flowgrpo.learner.diagnostics import DiagnosticsSettings, batch_signal, metrics_of_sums, observe, sampler_sums
from flowgrpo.learner.state import LearnerState, adamw, init_learner
from flowgrpo.learner.update import UpdateSettings, make_score, make_update
from flowgrpo.models.trainable import ALL_PARAMS, TrainableSubset

WORDS, WIDTH, BANNED, TEMPERATURE, ROWS = 50, 8, (0,), 0.8, 16
SETTINGS = {"temperature": TEMPERATURE, "banned": BANNED}


def init(key):
    embed, mix, unembed = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(embed, (WORDS, WIDTH)),
        "mix": jax.random.normal(mix, (WIDTH, WIDTH)) / 2,
        "unembed": jax.random.normal(unembed, (WIDTH, WORDS)) / 2,
    }


def hidden(params, tokens, positions=None, _segments=None, cache=None):
    """Compute the hidden state at each token, which depends on that token and its position alone."""
    place = jnp.zeros_like(tokens) if positions is None else jnp.asarray(positions)
    shift = 0.1 * jnp.sin(place.astype(jnp.float32))[:, :, None]
    x = params["embed"][tokens] + shift.astype(params["embed"].dtype)
    return jnp.tanh(x @ params["mix"]), cache


def hidden_tree(params, tokens, positions, _ends):
    """The same of the tokens of trees, whose ends don't matter either."""
    return hidden(params, tokens, positions)[0]


BIGRAMS = fg.contracts.Policy(init, hidden, lambda params, x: x @ params["unembed"], hidden_tree=hidden_tree)
SCORE = jax.jit(make_score(BIGRAMS, **SETTINGS))
OPTIMIZERS = {"sgd": optax.sgd(1.0), "adam": adamw(0.01, clip_norm=0.5)}
PLAIN = fg.flow_grpo(beta=0.0)
DIAGNOSTICS = DiagnosticsSettings(warns=False)  # no policy has sampled the cases


@cache
def compiled(
    algorithm: fg.Algorithm = PLAIN,
    optimizer: str = "sgd",
    policy: fg.contracts.Policy = BIGRAMS,
    *,
    score=None,
    trainable: TrainableSubset = ALL_PARAMS,
    **settings,
):
    """Compile an update, once for all tests."""
    settings = UpdateSettings(**{"micro_rows": 2, "diagnostics": DIAGNOSTICS, **SETTINGS, **settings})
    return jax.jit(make_update(policy, algorithm, OPTIMIZERS[optimizer], settings, score=score, trainable=trainable))


@cache
def unsplit(
    algorithm: fg.Algorithm,
    score=SCORE,
    trainable: TrainableSubset = ALL_PARAMS,
    diagnostics: DiagnosticsSettings | None = DIAGNOSTICS,
):
    """Compile (params, batch) -> (gradient, figures) of the plain loss over all rows at once."""

    def loss(part, params, batch):
        scores = score(trainable.merge(params, part), batch)
        value, metrics = algorithm.loss(scores, batch)
        far_rs = jnp.where(batch.loss_mask, jnp.abs(scores.logp - batch.logp_sampled), 0.0)
        seen = {"means": metrics} if diagnostics is None else observe(diagnostics, algorithm, scores, batch, metrics)
        sampler = {"kl": 0.0, "tokens": 0.0} if diagnostics is None else sampler_sums(scores, batch, jnp.int32(0))
        return value, (seen, far_rs.max(), sampler)

    @jax.jit
    def run(params, batch):
        slope = jax.value_and_grad(loss, has_aux=True)
        (value, (sums, far, sampler)), grads = slope(trainable.split(params), params, batch)
        figures = {"loss": value, "grad_norm": optax.tree.norm(grads), "log_ratio_max": far}
        figures |= {"live_tokens": batch.loss_mask.sum(), "steps": 1, "skipped": 0}
        if diagnostics is not None:
            figures |= batch_signal(batch) | {"sampler_kl": sampler["kl"] / jnp.maximum(sampler["tokens"], 1.0)}
        return grads, metrics_of_sums(sums) | figures

    return run


def assert_figures(actual, expected):
    """Compare the metrics of an update with those of all rows at once."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def fresh(params, optimizer: str = "sgd", trainable: TrainableSubset = ALL_PARAMS) -> LearnerState:
    """Return the state before the first update."""
    return init_learner(params, OPTIMIZERS[optimizer], trainable)


def near(trajectories: fg.Trajectories, score, params, drift: float, seed: int = 0) -> fg.Trajectories:
    """The trajectories with log-probabilities as if the policy had sampled them some `drift` ago."""
    ones = np.ones(trajectories.tokens.shape, np.float32)
    batch = fg.batching.rows_by_trajectory(trajectories, ones, ones)
    logp_ntl = np.asarray(fg.batching.unpack(score(params, batch).logp, batch, ones.shape))
    rng = np.random.default_rng(seed)
    moved = [logp_ntl + drift * rng.normal(size=ones.shape).astype(np.float32) for _ in range(2)]
    return trajectories.replace(logp_sampled=moved[0], logp_old=moved[0], logp_ref=moved[1])


def sampled_case(seed: int, *, drift=0.1, **settings):
    """(params, trajectories) with ratios near 1."""
    params = init(jax.random.key(seed))
    return params, near(make_case(seed, **settings).trajectories, SCORE, params, drift, seed)


def rows_of(algorithm, trajectories, layout="packed", rows=ROWS) -> fg.Batch:
    """The trajectories as a batch on a device, with empty rows at its end up to `rows`."""
    batch = batch_of(algorithm, trajectories, layout)
    return jax.tree.map(lambda x_rs: jnp.asarray(np.pad(x_rs, ((0, rows - len(x_rs)), (0, 0)))), batch)


def assert_close(actual, expected, start, tolerance=1e-4):
    """Equal parameters, relative to how far the largest moved from `start`."""
    moved = max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (expected, start)), strict=True))
    assert moved > 0
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * moved)
