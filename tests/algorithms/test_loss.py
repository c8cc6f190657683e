"""Losses: worked numbers for every surrogate, and what the options add."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowgrpo as fg
from flowgrpo.algorithms import cispo, dpo_pairs, kl_estimate
from flowgrpo.algorithms.options import read_options

LN = np.log


def tiny(size: int, advantage, *, weight=None, turn=0, trajectory=0, group=0, mismatch=0.0, logp_ref=-1.0) -> fg.Batch:
    """One row of chosen tokens with log pi_old = -1 each; `mismatch` is log pi_old - log mu."""
    ints = {"tokens": 1, "segments": 1, "positions": np.arange(size), "slot": np.arange(size)}
    ints |= {"trajectory": trajectory, "turn": turn, "group": group}
    numbers = {"advantage": advantage, "weight": 1 / size if weight is None else weight, "logp_ref": logp_ref}
    numbers |= {"logp_old": -1.0, "logp_sampled": -1.0 - np.asarray(mismatch)}
    rows = {name: np.broadcast_to(np.int32(x), (1, size)) for name, x in ints.items()}
    rows |= {name: np.broadcast_to(np.float32(x), (1, size)) for name, x in numbers.items()}
    return fg.Batch(**rows, chosen=np.ones((1, size), bool))


def evaluated(algorithm, ratios, advantage, *, entropy=None, **fields):
    """(loss, d loss / d log pi per token, metrics) at the given ratios."""
    entropy_rs = None if entropy is None else jnp.asarray([entropy], jnp.float32)

    def loss(logp_rs, batch):
        return algorithm.loss(fg.contracts.Scores(logp_rs, entropy_rs), batch)

    run, logp_rs = jax.jit(jax.value_and_grad(loss, has_aux=True)), jnp.asarray(-1.0 + LN([ratios]), jnp.float32)
    (value, metrics), slope_rs = run(logp_rs, tiny(len(ratios), advantage, **fields))
    return float(value), np.asarray(slope_rs)[0], {name: float(x) for name, x in metrics.items()}


TURNS = {"turn": [0, 0, 1], "mismatch": LN([4.0, 2.0, 0.5]), "weight": 1.0}  # pi_old / mu is 4, 2 and 1/2
ONCE, PAIR = [1, 1, 1], {"trajectory": [0, 0, 1], "weight": 1.0}
SLOPE = 0.5 / (1 + 8**0.5)
kimi, gspo = fg.algorithms.kimi(tau=0.5), fg.algorithms.gspo(clip_low=0.9, clip_high=9.0)
bonus = fg.flow_grpo(beta=0.0, entropy_bonus=0.1)


def corrected(*settings, beta=0.0, **more) -> fg.Algorithm:
    return fg.flow_grpo(beta=beta, correction=fg.algorithms.Correction(*settings, **more))


# What it shows: member, ratios, advantages, more fields of the batch; loss, slopes.
WORKED = {
    # A = 2: 1.5 clips to 1.2, 0.5 stays; A = -2: 0.5 clips to 0.8, 1.5 stays. Clipped tokens have no slope.
    "clip": (fg.flow_grpo(beta=0.0), [1.5, 0.5, 0.5, 1.5], [2, 2, -2, -2], {}, 0.3, [0, -0.25, 0, 0.75]),
    # dapo's 0.2 / 0.28: a ratio of 1.25 is inside above, 0.75 is outside below.
    "clip higher": (fg.algorithms.dapo(), [1.25, 0.75], [1, -1], {}, -0.225, [-0.625, 0]),
    # A = -1, ratio 5, bound 3: the loss is 3 and flat; at ratio 2 it is 2 with its slope.
    "dual clip": (fg.algorithms.flow_grpo_released(beta=0.0), [5, 2], [-1, -1], {}, 2.5, [0, 1]),
    "no clip": (fg.algorithms.rloo(), [3.0, 0.1], [1, -2], {}, -1.4, [-1.5, 0.1]),
    "no clip, dual clip": (fg.algorithms.rloo(dual_clip=2.0), [3.0, 1.0], [-1, -1], {}, 1.5, [0, 0.5]),
    # cispo: the ratio, cut at 5, is a weight; even a clipped token keeps its slope -min(rho, 5) A w.
    "weighted log pi": (cispo(), [8, 0.5], [1, 2], {}, -(5 * (LN(8) - 1) + LN(0.5) - 1) / 2, [-2.5, -0.5]),
    # gspo: two tokens of one turn at ratios 4 and 1 share exp(mean log) = 2; the other turn has its own.
    "sequence ratio": (gspo, [4, 1, 3], ONCE, {"turn": [0, 0, 1], "weight": 0.5}, -3.5, [-1, -1, -1.5]),
    # kimi: A sum log pi - tau/2 (sum log rho)^2 with sum log rho = log 6 gives the slope -(A - tau log 6).
    "mirror descent": (kimi, [2, 3], [1, 1], {"weight": 1}, 2 - LN(6) + LN(6) ** 2 / 4, [LN(6) / 2 - 1] * 2),
    # k3 at ratio 2 and log pi_ref = log pi_old: d = -log 2, so 1/2 + log 2 - 1, and its slope is 1 - 1/2.
    "KL": (fg.grpo(beta=0.5), [2], [0], {}, 0.5 * (LN(2) - 0.5), [0.25]),
    # Weighted by the ratio: 2 k3, and 2 (k3 + 1 - 1/2) in the slope.
    "weighted KL": (fg.grpo(beta=0.5, kl_weighted=True), [2], [0], {}, LN(2) - 0.5, [LN(2)]),
    "entropy bonus": (bonus, [1, 1], [0, 0], {"entropy": [2.0, 1.0]}, -0.15, [0, 0]),
    # A correction scales the surrogate, not the KL term, and has no gradient of its own.
    "token correction": (corrected(2.0), ONCE, ONCE, TURNS, -4.5, [-2, -2, -0.5]),
    "token mask": (corrected(2.0, mask=True), ONCE, ONCE, TURNS, -2.5, [0, -2, -0.5]),
    "sequence correction": (corrected(3.0, "sequence"), ONCE, ONCE, TURNS, -6.5, [-3, -3, -0.5]),
    "wide sequence correction": (corrected(9.0, "sequence"), ONCE, ONCE, TURNS, -16.5, [-8, -8, -0.5]),  # 4 * 2
    "token mask on both sides": (corrected(2.0, mask=True, low=0.75), ONCE, ONCE, TURNS, -2.0, [0, -2, 0]),
    "token correction on both sides": (corrected(2.0, low=0.75), ONCE, ONCE, TURNS, -4.75, [-2, -2, -0.75]),
    "sequence mask": (corrected(3.0, "sequence", mask=True), ONCE, ONCE, TURNS, -0.5, [0, 0, -0.5]),
    "correction and KL": (corrected(2.0, beta=0.5), [2] * 3, [0] * 3, TURNS, 1.5 * (LN(2) - 0.5), [0.25] * 3),
    # dpo: the winner gained log 4 over the reference in two tokens, the loser lost log 2: -log sigma(0.5 log 8).
    "preference": (fg.dpo(beta=0.5), [2, 2, 0.5], [1, 1, -1], PAIR, LN(1 + 8**-0.5), SLOPE * np.array([-1, -1, 1])),
    "preference, entropy bonus": (
        fg.dpo(beta=0.5, entropy_bonus=0.1), [2, 2, 0.5], [1, 1, -1], PAIR | {"entropy": [2.0, 1.0, 1.0]},
        LN(1 + 8**-0.5) - 0.4, SLOPE * np.array([-1, -1, 1]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKED)
def test_worked_losses_and_slopes(name):
    algorithm, ratios, advantage, fields, loss, slopes = WORKED[name]
    found, found_slopes, _ = evaluated(algorithm, ratios, advantage, **fields)
    assert found == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(found_slopes, slopes, rtol=1e-5, atol=1e-6)


def test_kl_kinds_by_hand_and_without_bias():
    """d = log 2: k1 = -log 2, k2 = (log 2)^2 / 2, k3 = 2 - log 2 - 1; k1 and k3 average to KL exactly."""
    logits = np.random.default_rng(0).normal(size=(2, 9))
    logp, logp_ref = (logits - LN(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    divergence = (np.exp(logp) * (logp - logp_ref)).sum()
    for kind, value in {"k1": -LN(2), "k2": LN(2) ** 2 / 2, "k3": 1 - LN(2)}.items():
        assert float(kl_estimate(np.float32(-2), np.float32(-2 + LN(2)), kind)) == pytest.approx(value, rel=1e-5)
        assert float(kl_estimate(np.float32(-2), np.float32(-2), kind)) == 0.0
        mean = float((np.exp(logp) * kl_estimate(logp, logp_ref, kind)).sum())
        assert kind == "k2" or mean == pytest.approx(divergence, rel=1e-5)
    assert kl_estimate(logp, logp_ref)[0] == kl_estimate(logp, logp_ref, "k3")[0]


def test_overlong_penalty_by_hand():
    """Limit 20, buffer 10: nothing up to 10 tokens, half at 15, all from 20 on."""
    penalty_n = fg.algorithms.overlong_penalty(np.array([1, 10, 15, 20, 50]), fg.algorithms.Overlong(20, 10))
    np.testing.assert_allclose(penalty_n, [0, 0, -0.5, -1, -1])


def test_metrics_are_weighted_sums():
    algorithm = fg.flow_grpo(beta=0.1, correction=fg.algorithms.Correction(2.0))
    fields = {"weight": [0.5, 0.25, 0.25], "mismatch": LN([4.0, 2.0, 0.5]), "entropy": [2.0, 1.0, 3.0]}
    *_, found = evaluated(algorithm, [1.5, 0.5, 1.0], [1, -1, 1], **fields)
    assert found == pytest.approx(
        {
            "weight": 1.0,
            "ratio": 0.75 + 0.125 + 0.25,
            "clip_high_fraction": 0.5,
            "clip_low_fraction": 0.25,
            "entropy": 2.0,
            "advantage": 0.5,
            "surrogate": 0.6 - 0.2 + 0.25,
            "kl": 0.5 * (1 / 1.5 + LN(1.5) - 1) + 0.25 * (2 - LN(2) - 1),
            "correction": 1.625,
        },
        rel=1e-5,
    )
    *_, pulled_back = evaluated(fg.flow_grpo(beta=0.0, clip_low=0.6), [1.5, 0.5, 1.5, 0.3], [-1, -1, 0, 0])
    assert pulled_back["clip_high_fraction"] == pulled_back["clip_low_fraction"] == 0


def test_metrics_of_pairs_are_means_over_pairs():
    """Four pairs, of margins log 8 / 4, -log 2 / 4, 0 and log 2 / 4: two of them are right."""
    pairs = {"group": [0, 0, 0, 1, 1, 2, 2, 3, 3], "weight": 0.25}
    ratios, sides = [2, 2, 0.5, 0.5, 1, 1, 1, 2, 1], [1, 1, -1, 1, -1, 1, -1, 1, -1]
    *_, found = evaluated(fg.dpo(beta=0.25), ratios, sides, **pairs)
    assert found == pytest.approx({"margin": LN(8) / 16, "accuracy": 0.5, "weight": 1.0}, rel=1e-5)


# Pairs and critics ------------------------------------------------------------------------------------


def test_dpo_pairs_best_and_worst_of_each_group():
    """Ties go to the first; a constant group and a group with one valid member give no pair."""
    turn = fg.Turn([1, 2], [False, True], [0.0, -1.0])
    outcomes = [(1, 0.0), (1, 1.0), (1, 1.0), (2, 0.5), (2, 0.5), (3, 1.0), (3, None), (1, 0.0)]
    ends = {True: fg.types.Status.ABORTED, False: fg.types.Status.FINISHED}
    trajectories = fg.collate([fg.Trajectory([turn], r, g, status=ends[r is None]) for g, r in outcomes])
    pairs, sides, weights = jax.jit(lambda x: (dpo_pairs(x), *(part(x) for part in fg.dpo()[1:3])))(trajectories)
    used = np.asarray(pairs.valid)
    assert (np.asarray(pairs.best)[used].tolist(), np.asarray(pairs.worst)[used].tolist()) == ([1], [0])
    np.testing.assert_allclose(sides[:, 0], [-1, 1, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(weights[:, 0, 1], [1, 1, 0, 0, 0, 0, 0, 0])


def test_ppo_value_loss_takes_the_larger_square():
    """Value moved from 0 to 1 past the clip of 0.2: for a target of 3 the near one is worse, (0.2 - 3)^2."""
    batch = tiny(1, [0]).replace(value_old=np.zeros((1, 1), np.float32), target=np.full((1, 1), 3.0, np.float32))
    scores = fg.contracts.Scores(jnp.full((1, 1), -1.0), value=jnp.ones((1, 1)))
    loss, metrics = fg.ppo(value_coefficient=0.25).loss(scores, batch)
    assert [float(metrics[name]) for name in ("value_loss", "value", "target")] == pytest.approx([0.5 * 2.8**2, 1, 3])
    assert float(loss) == pytest.approx(0.125 * 2.8**2, rel=1e-5)


# What is refused --------------------------------------------------------------------------------------

REFUSED = {
    "grpo has no option bta; it takes beta, kl,": lambda: fg.grpo(bta=1.0),
    "grpo: kl is 'k4', but must be one of k1, k2, k3": lambda: fg.grpo(kl="k4"),
    "kl='k1' in the loss has zero expected on-policy gradient": lambda: fg.grpo(kl="k1"),
    "kl_in is 'bonus', but must be one of loss, reward": lambda: fg.grpo(kl_in="bonus"),
    "there is none; set beta and kl_in": lambda: fg.algorithms.dapo(kl_weighted=True),
    "there is none; set beta": lambda: fg.grpo(kl_in="reward", kl_weighted=True),
    "clip_low is 1.5, but a ratio is never below 0": lambda: fg.grpo(clip_low=1.5),
    "low is 3.0, but must be at least 0 and at most 2": lambda: fg.algorithms.Correction(low=3.0),
    "level is 'row', but must be one of token": lambda: fg.algorithms.Correction(level="row"),
    "overlong is (9, 3), but must be a fg.algorithms.Overlong": lambda: fg.algorithms.dapo(overlong=(9, 3)),
    "cispo can't honour dual_clip": lambda: cispo(dual_clip=3.0),
    "kimi can't honour beta": lambda: fg.algorithms.kimi(beta=jnp.float32(0.0)),
    "dpo can't honour correction": lambda: fg.dpo(correction=fg.algorithms.Correction()),
    "kind is 'k9', but must be one of k1, k2, k3": lambda: kl_estimate(jnp.zeros(1), jnp.zeros(1), "k9"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_options_are_named(words):
    with pytest.raises(fg.BadInput, match=f"^.*{re.escape(words)}.*$"):
        REFUSED[words]()


def test_settings_at_their_bounds_are_accepted():
    fg.grpo(
        clip_low=1.0,
        clip_high=0.0,
        beta=0.0,
        entropy_bonus=0.0,
        reference_every=1,
        overlong=fg.algorithms.Overlong(1, 1),
    )
    fg.algorithms.kimi(beta=0.0, dual_clip=None)
    fg.algorithms.dr_grpo(max_tokens=1)
    options = read_options("grpo", {"kl_in": "reward", "beta": 0.1})
    assert (options.kl_kind, options.kl_in_reward, options.kl_in_loss) == ("k1", True, False)
    assert read_options("grpo", {"kl": "k2"}).kl_kind == "k2"


BARE = fg.collate([fg.Trajectory([fg.Turn([1, 2], [False, True], [0.0, -1.0])], 1.0, 0)])
LACKING = [
    ("Batch.logp_ref is missing, and beta > 0", fg.grpo(beta=0.1).loss),
    ("Batch.logp_ref is missing, and its margin", fg.dpo().loss),
    ("Scores.entropy", fg.grpo(beta=0.0, entropy_bonus=0.1).loss),
    ("Scores.value", fg.ppo(beta=0.0).loss),
    ("Trajectories.logp_ref", lambda *_: fg.algorithms.rloo(beta=0.1, kl_in="reward").advantages(BARE)),
    ("Trajectories.value", lambda *_: fg.ppo(beta=0.0).advantages(BARE)),
    ("Trajectories.last_value", lambda *_: fg.ppo(beta=0.0).advantages(BARE.replace(value=BARE.logp_sampled))),
    ("Trajectories.outcome has 3", lambda *_: fg.grpo().advantages(BARE.replace(outcome=np.ones(3)))),
]


@pytest.mark.parametrize(("field", "call"), LACKING, ids=[field for field, _ in LACKING])
def test_fields_that_a_setting_needs_are_named(field, call):
    with pytest.raises(fg.BadInput, match=field):
        call(fg.contracts.Scores(jnp.full((1, 1), -1.0)), tiny(1, [1]).replace(logp_ref=None))
