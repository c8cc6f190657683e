"""Figures that an update reports: by hand, by turn against filtered tokens, and the same before and after packing."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import batch_of, everything_on, make_case, scores_of
from tiny_learner import BIGRAMS, OPTIMIZERS, PLAIN, SETTINGS, fresh, near, rows_of, sampled_case

import flowgrpo as fg
from flowgrpo.learner.diagnostics import (
    BY_TURN,
    DiagnosticsSettings,
    batch_signal,
    metrics_of_sums,
    observe,
    signal,
    task_information,
)
from flowgrpo.learner.update import UpdateSettings, make_score, make_update
from flowgrpo.report.metrics import advantage_edges, ratio_edges

TURNS = 3  # of the four that the cases have, so that the last stands for two


@partial(jax.jit, static_argnums=0)
def figures(algorithm, scores, batch):
    """Return the figures of one step, without an update around it."""
    return metrics_of_sums(
        observe(DiagnosticsSettings(TURNS), algorithm, scores, batch, algorithm.loss(scores, batch)[1])
    )


@pytest.fixture(scope="module")
def case():
    """Return (algorithm, batch, scores, plain numbers of its live tokens)."""
    case, algorithm = make_case(40), fg.flow_grpo(beta=0.05, clip_low=0.1, clip_high=0.1)
    batch = batch_of(algorithm, case.trajectories)
    scores, live_rs = scores_of(case, batch), np.asarray(batch.loss_mask)
    plain = {name: getattr(batch, name) for name in ("weight", "turn", "logp_old", "logp_ref", "advantage")}
    plain |= {"logp": scores.logp, "entropy": scores.entropy}
    return algorithm, batch, scores, {name: np.asarray(x, np.float64)[live_rs] for name, x in plain.items()}


@pytest.fixture(scope="module")
def found(case):
    algorithm, batch, scores, _ = case
    return figures(algorithm, scores, batch)


def test_histograms_and_quantiles_are_over_tokens_with_loss(case, found):
    _, batch, _, flat = case
    log_ratio = flat["logp"] - flat["logp_old"]
    counted, _ = np.histogram(np.exp(log_ratio), [0.0, *ratio_edges()[1:-1], np.inf])
    assert abs(np.asarray(found["ratio_histogram"]) - counted).sum() <= 2  # one may lie at an edge, within rounding
    counted, _ = np.histogram(flat["advantage"], [-np.inf, *advantage_edges()[1:-1], np.inf])
    np.testing.assert_array_equal(batch_signal(batch)["advantage_histogram"], counted)
    for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        expected = np.quantile(log_ratio, share, method="inverted_cdf")
        np.testing.assert_allclose(np.log(found[f"ratio_{name}"]), expected, rtol=0.06, atol=1e-4)


def test_means_by_turn_are_means_over_the_tokens_of_a_turn(case, found):
    """The last of the turns that are told apart stands for all later ones, too."""
    _, _, _, flat = case
    ratio, d = np.exp(flat["logp"] - flat["logp_old"]), flat["logp_ref"] - flat["logp"]
    own = {
        "entropy": flat["entropy"],
        "kl": np.expm1(d) - d,
        "kl_old": ratio - 1 - np.log(ratio),
        "clip_high_fraction": (ratio > 1.1) & (flat["advantage"] > 0),
        "clip_low_fraction": (ratio < 0.9) & (flat["advantage"] < 0),
    }
    assert flat["turn"].max() == TURNS
    for turn in range(TURNS):
        mine = np.minimum(flat["turn"], TURNS - 1) == turn
        assert float(found["live_tokens_by_turn"][turn]) == mine.sum()
        for name, value in own.items():
            expected = np.average(value[mine], weights=flat["weight"][mine])
            np.testing.assert_allclose(found[f"{name}_by_turn"][turn], expected, rtol=1e-4, atol=1e-6)
    for name in own:
        expected = np.average(own[name], weights=flat["weight"])
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6)
    assert float(found["clip_high_fraction"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "formula"),
    [(PLAIN, lambda d: np.expm1(d) - d), (fg.flow_grpo(beta=0.05, kl="k2"), lambda d: d**2 / 2)],
    ids=["no term", "k2"],
)
def test_kl_to_the_reference_is_reported_without_a_kl_loss(algorithm, formula, case):
    """PPO pays it in the reward; an algorithm's own estimate keeps its name."""
    _, batch, scores, flat = case
    expected = np.average(formula(flat["logp_ref"] - flat["logp"]), weights=flat["weight"])
    np.testing.assert_allclose(figures(algorithm, scores, batch)["kl"], expected, rtol=1e-4)


# Advantages ---------------------------------------------------------------------------------------------


def turn_of():
    return fg.Turn(np.array([5, 6, 7]), np.array([False, True, True]), np.zeros(3, np.float32))


def test_groups_without_signal_are_counted():
    """Of four groups one wins always, one has no valid member, and of one a single member is valid."""
    outcomes = {0: (1.0, 0.0), 1: (1.0, 1.0), 2: (None, None), 3: (0.0, None)}
    status = {True: fg.types.Status.VERIFIER_FAILURE, False: fg.types.Status.FINISHED}
    records = [
        fg.Trajectory([turn_of()], x, group, status=status[x is None]) for group, pair in outcomes.items() for x in pair
    ]
    trajectories = fg.collate(records)
    adv_nt, weights = PLAIN.advantages(trajectories), PLAIN.weights(trajectories)
    found = jax.jit(signal)(trajectories, adv_nt, weights)
    np.testing.assert_allclose(found["zero_signal_groups"], 2 / 3, rtol=1e-6)
    high = float(np.asarray(adv_nt).max())
    np.testing.assert_allclose([found["advantage_max"], found["advantage_min"]], [high, -high], rtol=1e-6)
    np.testing.assert_allclose(found["advantage_std"], high * np.sqrt(4 / 10), rtol=1e-5)
    by_token = jax.jit(signal)(trajectories, np.broadcast_to(np.asarray(adv_nt)[:, :, None], weights.shape), weights)
    packed = [
        jax.jit(batch_signal)(fg.pack(trajectories, adv_nt, weights, row_length=8, rows=4, skip_no_signal=skip))
        for skip in (False, True)
    ]
    for name, value in found.items():
        np.testing.assert_allclose(by_token[name], value, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(packed[0][name], value, rtol=1e-6, err_msg=name)
    assert float(packed[1]["zero_signal_groups"]) == 0.0


def test_task_information_equals_that_of_counts():
    """Each of two tasks has an action of its own: log 2; all do the same, or groups mix both alike: 0."""
    group_n = np.repeat([0, 1], 4)

    def information(first_n):
        turns = [fg.Turn([9, word], [False, True], [0.0, -1.0]) for word in first_n]
        played = fg.collate([fg.Trajectory([turn], 1.0, int(g)) for turn, g in zip(turns, group_n, strict=True)])
        return float(task_information(played))

    assert information([5, 5, 5, 5, 6, 6, 6, 6]) == pytest.approx(np.log(2), abs=1e-6)
    assert information([5] * 8) == pytest.approx(0.0, abs=1e-6)
    assert information([5, 5, 6, 6] * 2) == pytest.approx(0.0, abs=1e-6)


# In an update -------------------------------------------------------------------------------------------


def test_an_update_reports_diagnostics_only_if_set():
    params, trajectories = sampled_case(43)
    batch = rows_of(PLAIN, trajectories)
    told, few = (
        jax.eval_shape(
            make_update(BIGRAMS, PLAIN, OPTIMIZERS["sgd"], UpdateSettings(diagnostics=diagnostics, **SETTINGS)),
            fresh(params),
            batch,
        )[1]
        for diagnostics in (DiagnosticsSettings(), None)
    )
    named = {f"ratio_{name}" for name in ("p01", "p50", "p99")} | {"kl_old", "kl", "zero_signal_groups"}
    named |= {f"advantage_{name}" for name in ("std", "min", "max")} | {"live_tokens_by_turn"}
    named |= {"ratio_histogram", "advantage_histogram", "sampler_kl"}
    named |= {f"{name}_by_turn" for name in BY_TURN}
    assert set(told) - set(few) == named
    assert {x.shape for x in few.values()} == {()}
    assert {x.shape for name, x in told.items() if name.endswith("_by_turn")} == {(8,)}


def warned_of(update, params, batch) -> list[str]:
    """Call an update twice, and return what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            update(fresh(params), batch)
        jax.effects_barrier()
    return [str(one.message) for one in caught]


def test_a_sampler_that_disagrees_warns_once():
    """At another temperature than the learner's, and by these weights: what older weights sampled says nothing."""
    params, trajectories = sampled_case(44)

    @partial(jax.jit, static_argnums=3)
    def score_at(temperature, params, batch, dtype):
        own = SETTINGS | {"temperature": temperature, "compute_dtype": dtype}
        return make_score(BIGRAMS, **own)(params, batch)

    def batch_at(temperature, version=0, dtype=None):
        sampled = near(trajectories, partial(score_at, temperature, dtype=dtype), params, drift=0.0)
        return rows_of(PLAIN, sampled.replace(version=np.full_like(trajectories.version, version)))

    same, other = batch_at(SETTINGS["temperature"]), batch_at(0.5)
    settings = UpdateSettings(micro_rows=2, diagnostics=DiagnosticsSettings(turns=1), **SETTINGS)
    update = jax.jit(make_update(BIGRAMS, PLAIN, OPTIMIZERS["sgd"], settings))
    assert float(update(fresh(params), same)[1]["sampler_kl"]) < 1e-9
    rounded = batch_at(SETTINGS["temperature"], dtype="bfloat16")
    for quiet in (same, rounded, batch_at(0.5, version=-1), other.replace(weight=other.weight * 0)):
        assert warned_of(update, params, quiet) == []
    (sentence,) = warned_of(update, params, other)
    live_rs = np.asarray(other.loss_mask)
    log_ratio = np.asarray(same.logp_sampled - other.logp_sampled, np.float64)[live_rs]
    assert f"KL {np.mean(np.expm1(log_ratio) - log_ratio):.4f} per token, above 0.002: give both the same" in sentence
    assert warned_of(update, params, batch_at(0.4)) == []  # it was said
    corrected = fg.flow_grpo(beta=0.0, correction=fg.algorithms.Correction(cap=2.0))
    for algorithm, warns in ((PLAIN, True), (corrected, False)):
        program = jax.make_jaxpr(make_update(BIGRAMS, algorithm, OPTIMIZERS["sgd"], settings))(fresh(params), other)
        assert ("debug_callback" in str(program)) == warns


@pytest.mark.usefixtures("nan_allowed")
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_F6_garbage_in_masked_slots_reaches_no_metric(value):
    case, algorithm = make_case(45), everything_on("gspo")
    batch = jax.tree.map(jnp.asarray, batch_of(algorithm, case.trajectories))
    scores = scores_of(case, batch)
    batch = algorithm.sequence_sums(batch, scores.logp)
    dirty = {n: jnp.where(batch.loss_mask, getattr(batch, n), value) for n in ("logp_sampled", "logp_old", "logp_ref")}
    masked_scores = fg.contracts.Scores(*(jnp.where(batch.loss_mask, x, value) for x in scores))
    clean, found = figures(algorithm, scores, batch), figures(algorithm, masked_scores, batch.replace(**dirty))
    for name, expected in clean.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
