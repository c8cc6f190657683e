"""What an update says of itself: figures by hand, by turn as by filter, and the same however rows are visited."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import batch_of, everything_on, make_case, scores_of
from tiny_learner import BIGRAMS, OPTIMIZERS, PLAIN, SETTINGS, compiled, fresh, rows_of, sampled_case

import flowgrpo as fg
from flowgrpo.learner.update import make_update
from flowgrpo.learner.watch import BY_TURN, Watch, batch_signal, observe, report, signal
from flowgrpo.report.bins import advantage_edges, ratio_edges


@partial(jax.jit, static_argnums=(0, 3))
def figures(algorithm, scores, batch, turns=8):
    """The figures of one step, without an update around it."""
    return report(observe(Watch(turns), algorithm, scores, batch, algorithm.loss(scores, batch)[1]))


@pytest.fixture(scope="module")
def seen():
    """Plain numbers of a case beside its figures: (case, batch, live tokens, figures)."""
    case, algorithm = make_case(40), fg.flow_grpo(beta=0.05, clip_low=0.1, clip_high=0.1)
    batch = batch_of(algorithm, case.trajectories)
    scores = scores_of(case, batch)
    flat = {name: np.asarray(getattr(batch, name))[np.asarray(batch.live)] for name in ("weight", "turn", "logp_old")}
    live_rs = np.asarray(batch.live)
    flat |= {"logp": np.asarray(scores.logp)[live_rs], "entropy": np.asarray(scores.entropy)[live_rs]}
    flat |= {"advantage": np.asarray(batch.advantage)[live_rs]}
    flat = {name: np.asarray(value, np.float64) for name, value in flat.items()}
    return case, batch, flat, figures(algorithm, scores, batch)


def test_histograms_count_every_live_token_once(seen):
    _, batch, flat, found = seen
    ratio = np.exp(flat["logp"] - flat["logp_old"])
    counted, _ = np.histogram(ratio, [0.0, *ratio_edges()[1:-1], np.inf])
    assert abs(np.asarray(found["ratio_histogram"]) - counted).sum() <= 2  # one may lie at an edge, within rounding
    counted, _ = np.histogram(flat["advantage"], [-np.inf, *advantage_edges()[1:-1], np.inf])
    np.testing.assert_array_equal(batch_signal(batch)["advantage_histogram"], counted)


def test_quantiles_are_those_of_the_ratios(seen):
    _, _, flat, found = seen
    log_ratio = flat["logp"] - flat["logp_old"]
    for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        expected = np.quantile(log_ratio, share, method="inverted_cdf")
        np.testing.assert_allclose(np.log(found[f"ratio_{name}"]), expected, rtol=0.06, atol=1e-4)


def test_means_by_turn_are_means_over_the_tokens_of_a_turn(seen):
    _, _, flat, found = seen
    ratio = np.exp(flat["logp"] - flat["logp_old"])
    own = {
        "entropy": flat["entropy"],
        "kl_old": ratio - 1 - np.log(ratio),
        "clip_high_fraction": (ratio > 1.1) & (flat["advantage"] > 0),
        "clip_low_fraction": (ratio < 0.9) & (flat["advantage"] < 0),
    }
    assert flat["turn"].max() == 3
    for turn in range(8):
        mine = flat["turn"] == turn
        assert float(found["live_tokens_by_turn"][turn]) == mine.sum()
        for name, value in own.items():
            expected = np.average(value[mine], weights=flat["weight"][mine]) if mine.any() else 0.0
            np.testing.assert_allclose(found[f"{name}_by_turn"][turn], expected, rtol=1e-4, atol=1e-6)
    for name in own:
        expected = np.average(own[name], weights=flat["weight"])
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6)
    assert float(found["clip_high_fraction"]) > 0


def test_later_turns_are_counted_with_the_last():
    case = make_case(40)
    batch = batch_of(PLAIN, case.trajectories)
    all_of_it, two = (figures(PLAIN, scores_of(case, batch), batch, turns) for turns in (4, 2))
    assert two["live_tokens_by_turn"].tolist() == [
        float(all_of_it["live_tokens_by_turn"][0]),
        float(all_of_it["live_tokens_by_turn"][1:].sum()),
    ]


@pytest.mark.slow
def test_kl_to_the_reference_is_told_where_the_loss_has_no_such_term():
    """PPO pays it in the reward; an algorithm's own estimate keeps its name."""
    case = make_case(41)
    batch = batch_of(PLAIN, case.trajectories)
    scores = scores_of(case, batch)
    assert "kl" not in PLAIN.loss(scores, batch)[1]
    with_term = fg.flow_grpo(beta=0.05)
    np.testing.assert_allclose(figures(PLAIN, scores, batch)["kl"], figures(with_term, scores, batch)["kl"], rtol=1e-5)
    other = fg.flow_grpo(beta=0.05, kl="k2")
    metrics = other.loss(scores, batch)[1]
    np.testing.assert_allclose(figures(other, scores, batch)["kl"], metrics["kl"] / metrics["weight"], rtol=1e-5)


# Advantages ---------------------------------------------------------------------------------------------


def turn_of():
    return fg.Turn(np.array([5, 6, 7]), np.array([False, True, True]), np.zeros(3, np.float32))


@pytest.mark.slow
def test_groups_without_signal_are_counted_before_and_after_packing():
    """Of four groups one wins always, one has no valid member, and of one a single member is valid."""
    outcomes = {0: (1.0, 0.0), 1: (1.0, 1.0), 2: (None, None), 3: (0.0, None)}
    status = {True: fg.Status.VERIFIER_FAILURE, False: fg.Status.FINISHED}
    records = [
        fg.Trajectory([turn_of()], x, group, status=status[x is None]) for group, pair in outcomes.items() for x in pair
    ]
    trajectories = fg.collate(records)
    adv, weights = PLAIN.advantages(trajectories), PLAIN.weights(trajectories)
    found = signal(trajectories, adv, weights)
    np.testing.assert_allclose(found["zero_signal_groups"], 2 / 3, rtol=1e-6)
    high = float(np.asarray(adv).max())
    np.testing.assert_allclose([found["advantage_max"], found["advantage_min"]], [high, -high], rtol=1e-6)
    np.testing.assert_allclose(found["advantage_std"], high * np.sqrt(4 / 10), rtol=1e-5)
    rows = {"row_length": 8, "rows": 4}
    whole, taken = (fg.pack(trajectories, adv, weights, **rows, skip_no_signal=skip) for skip in (False, True))
    for name, value in batch_signal(whole).items():
        np.testing.assert_allclose(value, found[name], rtol=1e-6, err_msg=name)
    assert float(batch_signal(taken)["zero_signal_groups"]) == 0.0


def test_advantages_of_turns_and_of_tokens_spread_alike():
    trajectories = make_case(42).trajectories
    adv_nt, weights = PLAIN.advantages(trajectories), PLAIN.weights(trajectories)
    adv_ntl = jnp.broadcast_to(adv_nt[:, :, None], weights.shape)
    for one, two in zip(*(signal(trajectories, adv, weights).values() for adv in (adv_nt, adv_ntl)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)


# In an update -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_update_says_all_of_it_and_nothing_where_nobody_watches():
    params, trajectories = sampled_case(43)
    batch = rows_of(PLAIN, trajectories)
    silent = jax.jit(make_update(BIGRAMS, PLAIN, OPTIMIZERS["sgd"], micro_rows=2, watch=None, **SETTINGS))
    (state, metrics), (other, few) = compiled()(fresh(params), batch), silent(fresh(params), batch)
    named = {f"ratio_{name}" for name in ("p01", "p50", "p99")} | {"kl_old", "kl", "zero_signal_groups"}
    named |= {f"advantage_{name}" for name in ("std", "min", "max")} | {"live_tokens_by_turn"}
    named |= {"ratio_histogram", "advantage_histogram"}
    named |= {f"{name}_by_turn" for name in BY_TURN}
    assert set(metrics) - set(few) == named
    for name, value in few.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(state.params["mix"], other.params["mix"])
    for name in ("live_tokens_by_turn", "ratio_histogram", "advantage_histogram"):
        np.testing.assert_allclose(metrics[name].sum(), metrics["live_tokens"], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flow_grpo", "gspo", "dpo"])
def test_F3_figures_add_up_over_micro_batches_and_devices(name):
    """All rows at once, two at a time, and dealt over three devices."""
    algorithm = everything_on(name)
    params, trajectories = sampled_case(44)
    batch = rows_of(algorithm, trajectories, "by_trajectory")
    mesh = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    ways = ({"micro_rows": 16}, {"micro_rows": 2}, {"micro_rows": 2, "mesh": mesh})
    whole, *parts = (compiled(name, rescore=False, **way)(fresh(params), batch)[1] for way in ways)
    for part in parts:
        assert set(part) == set(whole)
        for figure, value in whole.items():
            np.testing.assert_allclose(part[figure], value, rtol=1e-4, atol=1e-5, err_msg=figure)


@pytest.mark.usefixtures("nan_allowed")
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_F6_garbage_in_masked_slots_reaches_no_figure(value):
    case, algorithm = make_case(45), everything_on("gspo")
    batch = jax.tree.map(jnp.asarray, batch_of(algorithm, case.trajectories))
    scores = scores_of(case, batch)
    batch = algorithm.sums(batch, scores.logp)
    dirty = {n: jnp.where(batch.live, getattr(batch, n), value) for n in ("logp_sampled", "logp_old", "logp_ref")}
    masked_scores = fg.Scores(*(jnp.where(batch.live, x, value) for x in scores))
    clean, found = figures(algorithm, scores, batch), figures(algorithm, masked_scores, batch.replace(**dirty))
    for name, expected in clean.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
