"""Losses: worked numbers for every surrogate, and what the options add."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowgrpo as fg

LN = np.log


def tiny(ratios, advantage, *, weight=None, turn=None, trajectory=None, mismatch=0.0, logp_ref=-1.0) -> fg.Batch:
    """One row of chosen tokens with log pi_old = -1 each; `mismatch` is log pi_old - log mu."""
    size = len(ratios)

    def row(x, dtype=np.float32):
        return np.broadcast_to(np.asarray(x, dtype), (1, size))

    return fg.Batch(
        tokens=row(1, np.int32),
        positions=row(np.arange(size), np.int32),
        segments=row(1, np.int32),
        trajectory=row(0 if trajectory is None else trajectory, np.int32),
        turn=row(0 if turn is None else turn, np.int32),
        slot=row(np.arange(size), np.int32),
        group=row(0, np.int32),
        chosen=row(True, bool),
        logp_sampled=row(-1.0 - np.asarray(mismatch)),
        logp_old=row(-1.0),
        logp_ref=row(logp_ref),
        advantage=row(advantage),
        weight=row(1 / size if weight is None else weight),
    )


def value_and_slopes(algorithm, ratios, advantage, *, entropy=None, **fields):
    """(loss, d loss / d log pi per token) at the given ratios."""
    batch = tiny(ratios, advantage, **fields)
    logp_rs = jnp.asarray(-1.0 + LN(np.array([ratios], np.float32)))
    entropy_rs = None if entropy is None else jnp.asarray([entropy], jnp.float32)
    loss, slope_rs = jax.value_and_grad(lambda x_rs: algorithm.loss(fg.Scores(x_rs, entropy_rs), batch)[0])(logp_rs)
    return float(loss), np.asarray(slope_rs)[0]


def test_clipped_surrogate_by_hand():
    """A = 2: 1.5 clips to 1.2, 0.5 stays; A = -2: 0.5 clips to 0.8, 1.5 stays. Clipped tokens have no slope."""
    algorithm = fg.flow_grpo(beta=0.0)
    loss, slope = value_and_slopes(algorithm, [1.5, 0.5, 0.5, 1.5], [2, 2, -2, -2])
    assert loss == pytest.approx(-(2.4 + 1.0 - 1.6 - 3.0) / 4)
    np.testing.assert_allclose(slope, [0, -0.25, 0, 0.75], atol=1e-6)


def test_clip_higher_is_asymmetric():
    """dapo's 0.2 / 0.28: a ratio of 1.25 is inside above, 0.75 is outside below."""
    _, slope = value_and_slopes(fg.dapo(), [1.25, 0.75], [1, -1])
    np.testing.assert_allclose(slope, [-0.625, 0.0], atol=1e-6)


def test_dual_clip_by_hand():
    """A = -1, ratio 5, bound 3: the loss is 3 and flat; at ratio 2 it is 2 with its slope."""
    algorithm = fg.flow_grpo_released(beta=0.0)
    loss, slope = value_and_slopes(algorithm, [5.0, 2.0], [-1, -1])
    assert loss == pytest.approx((3 + 2) / 2)
    np.testing.assert_allclose(slope, [0, 1.0], atol=1e-6)


def test_unclipped_ratio_by_hand():
    loss, slope = value_and_slopes(fg.rloo(), [3.0, 0.1], [1, -2])
    assert loss == pytest.approx(-(3.0 - 0.2) / 2)
    np.testing.assert_allclose(slope, [-1.5, 0.1], atol=1e-6)


def test_weighted_logp_by_hand():
    """cispo: the ratio, cut at 5, is a weight; even a clipped token keeps its slope -min(rho, 5) A w."""
    loss, slope = value_and_slopes(fg.cispo(), [8.0, 0.5], [1, 2])
    assert loss == pytest.approx(-(5 * (LN(8) - 1) + 0.5 * 2 * (LN(0.5) - 1)) / 2, rel=1e-6)
    np.testing.assert_allclose(slope, [-2.5, -0.5], atol=1e-6)


def test_sequence_ratio_by_hand():
    """gspo: two tokens of one turn at ratios 4 and 1 share exp(mean log) = 2; the other turn has its own."""
    algorithm = fg.gspo(clip_low=0.9, clip_high=9.0)
    loss, slope = value_and_slopes(algorithm, [4.0, 1.0, 3.0], [1, 1, 1], turn=[0, 0, 1], weight=[0.25, 0.25, 0.5])
    assert loss == pytest.approx(-(0.5 * 2 + 0.5 * 3))
    np.testing.assert_allclose(slope, [-0.5, -0.5, -1.5], atol=1e-6)


def test_mirror_descent_by_hand():
    """kimi: A sum log pi - tau/2 (sum log rho)^2 with sum log rho = log 6 gives the slope -(A - tau log 6)."""
    loss, slope = value_and_slopes(fg.kimi(tau=0.5), [2.0, 3.0], [1, 1], weight=1.0)
    assert loss == pytest.approx(-((LN(6) - 2) - 0.25 * LN(6) ** 2), rel=1e-5)
    np.testing.assert_allclose(slope, [-(1 - 0.5 * LN(6))] * 2, rtol=1e-5)


def test_kl_kinds_by_hand():
    """d = log pi_ref - log pi = log 2: k1 = -log 2, k2 = (log 2)^2 / 2, k3 = 2 - log 2 - 1."""
    logp, logp_ref = jnp.float32(-2.0), jnp.float32(-2.0 + LN(2))
    expected = {"k1": -LN(2), "k2": LN(2) ** 2 / 2, "k3": 1 - LN(2)}
    for kind, value in expected.items():
        assert float(fg.kl_estimate(logp, logp_ref, kind)) == pytest.approx(value, rel=1e-5)
    assert float(fg.kl_estimate(logp, logp)) == 0.0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_are_unbiased(kind):
    """Over the policy's own distribution k1 and k3 average to KL exactly."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 9))
    logp, logp_ref = logits - LN(np.exp(logits).sum(1, keepdims=True))
    expected = (np.exp(logp) * (logp - logp_ref)).sum()
    estimate = fg.kl_estimate(jnp.asarray(logp, jnp.float32), jnp.asarray(logp_ref, jnp.float32), kind)
    assert float((np.exp(logp) * estimate).sum()) == pytest.approx(expected, rel=1e-5)


def test_kl_in_the_loss_and_weighted_by_the_ratio():
    """At ratio 2 with log pi_ref = log pi: no penalty. At log pi_ref = log pi_old: d = -log 2."""
    k3 = 0.5 + LN(2) - 1
    assert value_and_slopes(fg.grpo(beta=0.5), [2.0], [0], logp_ref=-1.0)[0] == pytest.approx(0.5 * k3, rel=1e-5)
    weighted = fg.grpo(beta=0.5, kl_weighted=True)
    assert value_and_slopes(weighted, [2.0], [0], logp_ref=-1.0)[0] == pytest.approx(k3, rel=1e-5)
    assert value_and_slopes(fg.grpo(beta=0.5), [2.0], [0], logp_ref=-1 + LN(2))[0] == pytest.approx(0.0, abs=1e-6)


def test_entropy_bonus_is_paid():
    algorithm = fg.flow_grpo(beta=0.0, entropy_bonus=0.1)
    assert value_and_slopes(algorithm, [1.0, 1.0], [0, 0], entropy=[2.0, 1.0])[0] == pytest.approx(-0.15)


@pytest.mark.parametrize(
    ("correction", "factors"),
    [
        (fg.Correction(2.0), [2, 2, 0.5]),  # pi_old / mu = 4 capped at 2, 2, 1/2
        (fg.Correction(2.0, mask=True), [0, 2, 0.5]),
        (fg.Correction(3.0, "sequence"), [3, 3, 0.5]),  # 4 * 2 = 8 over the first turn
        (fg.Correction(9.0, "sequence"), [8, 8, 0.5]),
        (fg.Correction(3.0, "sequence", mask=True), [0, 0, 0.5]),
    ],
)
def test_importance_correction_by_hand(correction, factors):
    """It scales the surrogate, not the KL term, and has no gradient of its own."""
    algorithm = fg.flow_grpo(beta=0.0, correction=correction)
    fields = {"turn": [0, 0, 1], "mismatch": LN([4.0, 2.0, 0.5]), "weight": 1.0}
    loss, slope = value_and_slopes(algorithm, [1.0] * 3, [1, 1, 1], **fields)
    assert loss == pytest.approx(-np.sum(factors), rel=1e-5)
    np.testing.assert_allclose(slope, -np.array(factors), rtol=1e-5)
    with_kl = fg.flow_grpo(beta=0.5, correction=correction)
    excess = value_and_slopes(with_kl, [1.0] * 3, [1, 1, 1], logp_ref=-2.0, **fields)[0] - loss
    assert excess == pytest.approx(0.5 * 3 * (np.exp(-1) + 1 - 1), rel=1e-4)


def test_overlong_penalty_by_hand():
    """Limit 20, buffer 10: nothing up to 10 tokens, half at 15, all from 20 on."""
    penalty_n = fg.overlong_penalty(np.array([1, 10, 15, 20, 50]), fg.Overlong(20, 10))
    np.testing.assert_allclose(penalty_n, [0, 0, -0.5, -1, -1])


def test_metrics_are_weighted_sums():
    algorithm = fg.flow_grpo(beta=0.1)
    batch = tiny([1.5, 0.5, 1.0], [1, -1, 1], weight=[0.5, 0.25, 0.25], logp_ref=-1.0)
    logp_rs = jnp.asarray(-1.0 + LN(np.array([[1.5, 0.5, 1.0]], np.float32)))
    _, metrics = algorithm.loss(fg.Scores(logp_rs, jnp.full((1, 3), 2.0)), batch)
    expected = {
        "weight": 1.0,
        "ratio": 0.75 + 0.125 + 0.25,
        "clip_high_fraction": 0.5,
        "clip_low_fraction": 0.25,
        "entropy": 2.0,
        "advantage": 0.5,
        "surrogate": 0.6 - 0.2 + 0.25,
    }
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5), name
    assert float(metrics["kl"]) > 0


# DPO --------------------------------------------------------------------------------------------------


def test_dpo_pairs_best_and_worst_of_each_group():
    """Ties go to the first; a constant group and a group with one valid member give no pair."""
    turn = fg.Turn([1, 2], [False, True], [0.0, -1.0])
    outcomes = [(1, 0.0), (1, 1.0), (1, 1.0), (2, 0.5), (2, 0.5), (3, 1.0), (3, None), (1, 0.0)]
    records = [
        fg.Trajectory([turn], r, g, status=fg.Status.ABORTED if r is None else fg.Status.FINISHED) for g, r in outcomes
    ]
    trajectories = fg.collate(records)
    pairs = fg.dpo_pairs(trajectories)
    used = np.asarray(pairs.valid)
    assert list(zip(np.asarray(pairs.best)[used], np.asarray(pairs.worst)[used], strict=True)) == [(1, 0)]
    np.testing.assert_allclose(fg.dpo().advantages(trajectories)[:, 0], [-1, 1, 0, 0, 0, 0, 0, 0])


def test_dpo_by_hand():
    """The winner gained log 4 over the reference in two tokens, the loser lost log 2: -log sigma(0.5 log 8)."""
    batch = tiny([1, 1, 1], [1, 1, -1], trajectory=[0, 0, 1], weight=1.0, logp_ref=-1.0)
    logp_rs = jnp.asarray([[-1 + LN(2), -1 + LN(2), -1 - LN(2)]], jnp.float32)
    algorithm = fg.dpo(beta=0.5)
    loss, slope_rs = jax.value_and_grad(lambda x_rs: algorithm.loss(fg.Scores(x_rs), batch)[0])(logp_rs)
    margin = 0.5 * LN(8)
    assert float(loss) == pytest.approx(LN(1 + np.exp(-margin)), rel=1e-5)
    slope = 0.5 / (1 + np.exp(margin))
    np.testing.assert_allclose(slope_rs[0], [-slope, -slope, slope], rtol=1e-5)


# PPO --------------------------------------------------------------------------------------------------


def test_ppo_value_loss_takes_the_larger_square():
    """Value moved from 0 to 1 past the clip of 0.2: for a target of 3 the near one is worse, (0.2 - 3)^2."""
    batch = tiny([1.0], [0]).replace(value_old=np.zeros((1, 1), np.float32), target=np.full((1, 1), 3.0, np.float32))
    scores = fg.Scores(jnp.full((1, 1), -1.0), value=jnp.ones((1, 1)))
    loss, metrics = fg.ppo(value_coefficient=0.5).loss(scores, batch)
    assert float(metrics["value_loss"]) == pytest.approx(0.5 * 2.8**2, rel=1e-5)
    assert float(loss) == pytest.approx(0.25 * 2.8**2, rel=1e-5)


@pytest.mark.parametrize(("status", "bootstrapped"), [(fg.Status.TURN_LIMIT, True), (fg.Status.FINISHED, False)])
def test_ppo_a_cut_trajectory_bootstraps_and_a_finished_one_does_not(status, bootstrapped):
    turn = fg.Turn([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0])
    records = [fg.Trajectory([turn], 1.0, 0, status=status)]
    trajectories = fg.collate(records).replace(
        value=np.zeros((1, 1, 3), np.float32), last_value=np.full(1, 5.0, np.float32)
    )
    target_ntl = fg.ppo(beta=0.0, gamma=1.0, lam=1.0).targets(trajectories)
    expected = 1.0 + 5.0 * bootstrapped
    np.testing.assert_allclose(target_ntl, [[[0, expected, expected]]])


# What is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: fg.grpo(bta=1.0), "grpo has no option bta; it takes beta, kl,"),
        (lambda: fg.grpo(kl="k4"), "grpo: kl is 'k4', but must be one of k1, k2, k3"),
        (lambda: fg.grpo(kl="k1"), "kl='k1' in the loss has zero expected on-policy gradient"),
        (lambda: fg.grpo(kl_in="bonus"), "kl_in is 'bonus', but must be one of loss, reward"),
        (lambda: fg.dapo(kl_weighted=True), "there is none; set beta"),
        (lambda: fg.grpo(kl_in="reward", kl_weighted=True), "there is none; set beta"),
        (lambda: fg.grpo(beta=-0.1), "beta is -0.1, but must be at least 0"),
        (lambda: fg.grpo(dual_clip=1.0), "dual_clip is 1.0, but must be greater than 1"),
        (lambda: fg.grpo(clip_low=1.5), "clip_low is 1.5, but a ratio is never below 0"),
        (lambda: fg.grpo(clip_high=-0.1), "clip_high is -0.1, but must be at least 0"),
        (lambda: fg.grpo(entropy_bonus=-1), "entropy_bonus is -1, but must be at least 0"),
        (lambda: fg.grpo(reference_every=0), "reference_every is 0, but must be at least 1"),
        (lambda: fg.grpo(correction=fg.Correction(level="row")), "correction.level is 'row', but must be one of token"),
        (lambda: fg.grpo(correction=fg.Correction(cap=0.0)), "correction.cap is 0.0, but must be greater than 0"),
        (lambda: fg.dapo(overlong=fg.Overlong(10, 20)), "overlong needs 0 < buffer <= max_tokens"),
        (lambda: fg.dr_grpo(max_tokens=0), "max_tokens is 0, but must be at least 1"),
        (lambda: fg.cispo(dual_clip=3.0), "cispo can't honour dual_clip"),
        (lambda: fg.kimi(beta=0.1), "kimi can't honour beta"),
        (lambda: fg.kimi(tau=-1.0), "tau is -1.0, but must be at least 0"),
        (lambda: fg.dpo(correction=fg.Correction()), "dpo can't honour correction"),
        (lambda: fg.dpo(beta=0.0), "beta is 0.0, but must be greater than 0"),
        (lambda: fg.ppo(value_clip=0.0), "value_clip is 0.0, but must be greater than 0"),
        (lambda: fg.kl_estimate(jnp.zeros(1), jnp.zeros(1), "k9"), "kind is 'k9', but must be one of k1, k2, k3"),
    ],
)
def test_bad_options_get_one_clear_sentence(build, words):
    with pytest.raises(fg.BadInput) as caught:
        build()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "field"),
    [
        (fg.grpo(beta=0.1), "Batch.logp_ref"),
        (fg.dpo(), "Batch.logp_ref"),
        (fg.grpo(beta=0.0, entropy_bonus=0.1), "Scores.entropy"),
        (fg.ppo(beta=0.0), "Scores.value"),
    ],
)
def test_what_a_setting_calls_for_and_was_not_given_is_named(algorithm, field):
    batch = tiny([1.0], [1]).replace(logp_ref=None)
    with pytest.raises(fg.BadInput, match=field):
        algorithm.loss(fg.Scores(jnp.full((1, 1), -1.0)), batch)


def test_kl_in_the_reward_and_gae_name_what_the_trajectories_lack():
    turn = fg.Turn([1, 2], [False, True], [0.0, -1.0])
    trajectories = fg.collate([fg.Trajectory([turn], 1.0, 0)])
    with pytest.raises(fg.BadInput, match=r"Trajectories.logp_ref"):
        fg.rloo(beta=0.1, kl_in="reward").advantages(trajectories)
    with pytest.raises(fg.BadInput, match=r"Trajectories.value"):
        fg.ppo(beta=0.0).advantages(trajectories)
    with pytest.raises(fg.BadInput, match=r"Trajectories.last_value"):
        fg.ppo(beta=0.0).advantages(trajectories.replace(value=trajectories.logp_sampled))
