"""Batches for the tests: random ragged records, and the arrays that a learner would add to them."""

from dataclasses import fields, replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flowgrpo as fg
from flowgrpo.batching import pack_tree, place

INVALID = (fg.types.Status.TOOL_FAILURE, fg.types.Status.VERIFIER_FAILURE, fg.types.Status.ABORTED)
COUNTING = tuple(status for status in fg.types.Status if status not in INVALID)


def make_turn(rng, context: int, action: int, **more) -> fg.Turn:
    """A turn of `context` given tokens and `action` chosen ones, with a given token among the latter."""
    size = context + action
    chosen = np.arange(size) >= context
    if action > 2:
        chosen[context + 1] = False  # the environment may write into the middle of an action
    logp = np.where(chosen, -rng.uniform(0.1, 2.0, size), 0.0).astype(np.float32)
    return fg.Turn(rng.integers(1, 50, size).astype(np.int32), chosen, logp, **more)


def random_records(
    seed: int, *, groups=3, size=4, turns=4, length=6, invalid=0.15, by_turn=False
) -> list[fg.Trajectory]:
    """Ragged records with unequal turns and lengths, some of them invalid, with groups in mixed order."""
    rng, records = np.random.default_rng(seed), []
    for group in np.repeat(rng.choice(1000, groups, replace=False) - 500, size):
        lost, steps = rng.random() < invalid, []
        outcome = None if lost else float(rng.choice([0.0, 1.0, 1.0, 0.25]))
        for _ in range(rng.integers(1, turns + 1)):
            sizes = rng.integers(1, length), rng.integers(1, length)
            fields = {"version": int(rng.integers(3)), "anchor": int(rng.integers(2))}
            steps.append(make_turn(rng, *map(int, sizes), **fields, reward=float(rng.normal()) if by_turn else None))
        status = fg.types.Status(rng.choice(INVALID if lost else COUNTING))
        correct = outcome is not None and outcome >= 0.5
        records.append(fg.Trajectory(steps, outcome, int(group), correct, status, bool(rng.random() < 0.5)))
    for record in records[::3]:  # of the contexts that append, some have turns that begin another one
        record.turns[-1] = replace(record.turns[-1], starts_context=True)
    return [records[i] for i in rng.permutation(len(records))]


def score(trajectories: fg.Trajectories, seed: int = 0, drift: float = 0.3) -> fg.Trajectories:
    """The trajectories with everything that a learner may score: logp_old, logp_ref, value, last_value."""
    rng = np.random.default_rng(seed)
    shape = trajectories.tokens.shape
    near = [trajectories.logp_sampled + drift * rng.normal(size=shape).astype(np.float32) for _ in range(2)]
    values = {"value": rng.normal(size=shape), "last_value": rng.normal(size=shape[0])}
    values = {name: x.astype(np.float32) for name, x in values.items()}
    return trajectories.replace(logp_old=near[0], logp_ref=near[1], **values)


class Case(NamedTuple):
    """A scored batch of trajectories, and what the current policy says of its tokens."""

    trajectories: fg.Trajectories
    logp: np.ndarray  # n t l
    entropy: np.ndarray
    value: np.ndarray


def make_case(seed: int = 0, drift: float = 0.3, *, turns=4, length=6, **settings) -> Case:
    """A case whose shape depends on the settings alone, so that compiled code is shared between tests."""
    records = random_records(seed, turns=turns, length=length, **settings)
    trajectories = score(fg.collate(records, turns=turns, length=2 * length), seed, drift)
    rng = np.random.default_rng(seed + 1)
    shape = trajectories.tokens.shape
    moved = trajectories.logp_old + drift * rng.normal(size=shape)
    fields = moved, rng.uniform(0, 2, shape), rng.normal(size=shape)
    return Case(trajectories, *(x_ntl.astype(np.float32) for x_ntl in fields))


@cache
def members() -> dict[str, fg.Algorithm]:
    """Every member of the family by a name, with settings that make all of its parts act."""
    return {
        "flow_grpo": fg.flow_grpo(beta=0.05),
        "flow_grpo_released": fg.algorithms.flow_grpo_released(beta=0.05),
        "grpo": fg.grpo(),
        "dr_grpo": fg.algorithms.dr_grpo(max_tokens=20),
        "dapo": fg.algorithms.dapo(overlong=fg.algorithms.Overlong(20, 10)),
        "gspo": fg.algorithms.gspo(clip_low=0.1, clip_high=0.1),
        "cispo": fg.algorithms.cispo(clip_high=0.2),
        "rloo": fg.algorithms.rloo(beta=0.05, kl_in="reward"),
        "reinforce_pp": fg.algorithms.reinforce_pp(beta=0.05, kl_in="reward"),
        "reinforce_pp_baseline": fg.algorithms.reinforce_pp(baseline=fg.algorithms.group_center, beta=0.05, kl="k2"),
        "gigpo": fg.algorithms.gigpo(),
        "mt_grpo": fg.algorithms.mt_grpo(lam=0.5),
        "trloo": fg.algorithms.trloo(gamma=0.9),
        "kimi": fg.algorithms.kimi(tau=0.5),
        "ppo": fg.ppo(),
        "ppo_turns": fg.ppo(estimator=fg.algorithms.turn_gae, gamma=0.9),
        "dpo": fg.dpo(),
        "opd": fg.algorithms.opd(outcome=0.5),
        "opd_dead_only": fg.algorithms.opd(outcome=0.5, dead_only=True),
    }


@cache
def everything_on(name: str) -> fg.Algorithm:
    """The member with every option that it honours."""
    with_kl = {"beta": 0.05, "kl_in": "loss", "kl_weighted": True}
    settings = {
        "dual_clip": 3.0,
        "correction": fg.algorithms.Correction(1.5, "sequence"),
        "entropy_bonus": 0.02,
        "dynamic_sampling": True,
        "overlong": fg.algorithms.Overlong(20, 10),
        "reference_every": 10,
    }
    refused = {"kimi": {*with_kl, "dual_clip"}, "cispo": {"dual_clip"}, "dpo": {*with_kl, "dual_clip", "correction"}}
    refused |= {"opd": {*with_kl, "reference_every"}}
    honoured = {key: x for key, x in (with_kl | settings).items() if key not in refused.get(name, ())}
    return getattr(fg.algorithms, name)(**honoured, **({"max_tokens": 20} if name == "dr_grpo" else {}))


PLAIN = {"by_trajectory": jax.jit(fg.batching.rows_by_trajectory), "by_turn": jax.jit(fg.batching.rows_by_turn)}


@cache
def signal(algorithm: fg.Algorithm):
    """Compile a member's advantages, weights and targets, once for all tests."""
    return jax.jit(
        lambda x: (algorithm.advantages(x), algorithm.weights(x), algorithm.targets and algorithm.targets(x))
    )


def batch_of(algorithm: fg.Algorithm, trajectories: fg.Trajectories, layout="packed", **settings) -> fg.Batch:
    """Lay the trajectories out for this member: packed, in trees, or a row for each trajectory or turn."""
    adv, weights, target = signal(algorithm)(trajectories)
    if layout in ("packed", "trees"):
        packing = fg.pack if layout == "packed" else pack_tree
        batch = packing(jax.device_get(trajectories), adv, weights, **{"row_length": 48, "rows": 16, **settings})
    else:
        batch = PLAIN[layout](trajectories, adv, weights)
    return batch if target is None else batch.replace(target=place(target, batch))


def assert_same_batch(batch: fg.Batch, expected: fg.Batch):
    for item in fields(fg.Batch):
        left, right = getattr(batch, item.name), getattr(expected, item.name)
        assert (left is None) == (right is None), item.name
        if left is not None:
            assert left.dtype == right.dtype, item.name
            np.testing.assert_array_equal(left, right, err_msg=item.name)


def scores_of(case: Case, batch: fg.Batch, logp_ntl=None) -> fg.contracts.Scores:
    """Lay out what the current policy says as the batch is."""
    logp_ntl = jnp.asarray(case.logp) if logp_ntl is None else logp_ntl
    return fg.contracts.Scores(place(logp_ntl, batch), place(case.entropy, batch), place(case.value, batch))


ROWS = LENGTH = 48  # of every layout, so that a member's loss is compiled once


def padded(batch: fg.Batch) -> fg.Batch:
    """The batch with empty rows and slots up to the common shape."""
    rows, length = batch.tokens.shape
    return jax.tree.map(lambda x_rs: np.pad(np.asarray(x_rs), ((0, ROWS - rows), (0, LENGTH - length))), batch)


@cache
def loss_program(algorithm: fg.Algorithm):
    """Compile a member's loss, metrics and d loss / d log pi in the trajectories' own layout, once for all tests."""

    @jax.jit
    def run(case: Case, batch: fg.Batch):
        def loss(logp_ntl):
            return algorithm.loss(scores_of(case, batch, logp_ntl), batch)

        (value, metrics), slope_ntl = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(case.logp))
        return value, slope_ntl, metrics

    return run


def loss_and_slopes(algorithm: fg.Algorithm, case: Case, batch: fg.Batch):
    """(loss, d loss / d log pi as n t l) of a batch in any layout."""
    value, slope_ntl, _ = loss_program(algorithm)(case, padded(batch))
    return float(value), np.asarray(slope_ntl)


def metrics_of(algorithm: fg.Algorithm, case: Case, batch: fg.Batch) -> dict[str, float]:
    """Compute the metrics that the loss of a batch reports, by name."""
    return {name: float(value) for name, value in loss_program(algorithm)(case, padded(batch))[2].items()}
