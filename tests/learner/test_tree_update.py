"""F10 in an update: rows with trees move the parameters, and give the figures, of rows that hold each context whole."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import everything_on
from tiny_learner import DIAGNOSTICS, OPTIMIZERS, SETTINGS, assert_close, assert_figures, fresh
from tiny_models import random_params
from tree_cases import Context, build_trees, plain_rows

import flowgrpo as fg
from flowgrpo.learner.critic import make_value_score, separate_network, shared_trunk
from flowgrpo.learner.update import make_update
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.critic import make_critic
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.trainable import ActorCritic

CONFIG = DecoderConfig(v=50, d=16, h=2, k=1, e=8, f=16, windows=(None, 6), ropes=(Rope(),) * 2)
POLICY = make_policy(CONFIG)
CRITIC = make_critic(CONFIG)
LENGTH, NODES, SLOTS = 14, 40, 30
THREE = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])


def conversations(seed: int = 0) -> list[list[Context]]:
    """Three rows of a group each: two trajectories of two contexts, which begin alike; the last row has one less."""
    rng = np.random.default_rng(seed)
    instructions, rows = tuple(rng.integers(1, 50, 3).tolist()), []
    for _ in range(3):
        question = tuple(rng.integers(1, 50, 2).tolist())
        rows.append([])
        for _ in range(2):
            turns = [tuple(rng.integers(1, 50, 3).tolist()) for _ in range(3)]
            first, second = instructions + question + turns[0], instructions + question + turns[1] + turns[2]
            rows[-1] += [Context(first, (5, 6, 7)), Context(second, (8, 9, 10))]
    return [*rows[:2], rows[2][:3]]


@cache
def batches() -> tuple[fg.Batch, fg.Batch]:
    """The same tokens, with the same numbers, in trees and in rows of a context each."""
    forest, rng = conversations(), np.random.default_rng(1)
    trees = build_trees(forest, NODES, SLOTS)
    contexts = [context for row in forest for context in row]
    tokens_cs, segments_cs = plain_rows(contexts, LENGTH)
    names = ("logp_sampled", "logp_old", "logp_ref", "advantage", "weight", "value_old", "target")
    both: list[dict[str, np.ndarray]] = []
    for shape in (trees.tokens.shape, tokens_cs.shape):
        both.append({name: np.full(shape, -1, np.int32) for name in ("trajectory", "turn", "slot", "group")})
        both[-1] |= {name: np.zeros(shape, np.float32) for name in names} | {"chosen": np.zeros(shape, bool)}
    for r, entries in enumerate(trees.entries):
        for slot, (context, position) in enumerate(entries):
            trajectory = context // 2
            values = {"trajectory": trajectory, "turn": context % 2, "slot": position, "group": trajectory // 2}
            values |= {name: float(rng.normal()) - 3.0 * name.startswith("logp") for name in names}
            values |= {"chosen": True, "weight": abs(values["weight"])}
            values |= {"advantage": float(np.cos(trajectory))}
            for fields, at in zip(both, ((r, slot), (context, position)), strict=True):
                for name, value in values.items():
                    fields[name][at] = value
    positions_cs = np.tile(np.arange(LENGTH, dtype=np.int32), (len(contexts), 1))
    plain = fg.Batch(tokens_cs, positions_cs, segments_cs, **both[1])
    tree = dict(zip(("tree_tokens", "tree_positions", "tree_ends", "predecessor"), trees.tree, strict=True))
    return fg.Batch(trees.tokens, trees.positions, trees.segments, **both[0], **tree), plain


def moved(algorithm, batch: fg.Batch, params, **settings):
    policy, score = POLICY._replace(mesh=settings.pop("mesh", None)), settings.pop("score", None)
    settings = fg.learner.UpdateSettings(**{"micro_rows": 1, "diagnostics": DIAGNOSTICS, **SETTINGS, **settings})
    update = jax.jit(make_update(policy, algorithm, OPTIMIZERS["sgd"], settings, score=score))
    state, metrics = update(fresh(params), jax.tree.map(jnp.asarray, batch))
    return state.params, metrics


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("flow_grpo", {}, marks=pytest.mark.slow),
        pytest.param("gspo", {}, marks=pytest.mark.slow),
        pytest.param("kimi", {"micro_rows": 2}, marks=pytest.mark.slow),
        pytest.param("flow_grpo", {"mini_batches": 2, "epochs": 2}, marks=pytest.mark.slow),
        pytest.param("flow_grpo", {"mesh": THREE}, marks=pytest.mark.slow),
    ],
)
def test_F10_updates_on_trees_equal_those_on_rows(name, settings):
    """First passes over sequences, mini-batches and devices included; log-probabilities of before are scored, too."""
    by_tree, plain = batches()
    params, algorithm = random_params(CONFIG), everything_on(name)
    if "mini_batches" in settings:  # the first two groups, so that each layout has one in each mini-batch
        by_tree, plain = (
            jax.tree.map(lambda x, rows=rows: x[:rows], batch) for rows, batch in ((2, by_tree), (8, plain))
        )
    found, metrics = moved(algorithm, by_tree, params, **settings)
    expected, figures = moved(algorithm, plain, params, **settings)
    assert_close(found, expected, params)
    assert_figures(metrics, figures)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "shared"])
def test_F10_critic_values_on_trees_equal_those_on_rows(kind):
    """Of a trunk of its own and of the policy's: the value before each token."""
    valuation = separate_network(POLICY, CRITIC) if kind == "own" else shared_trunk(POLICY, CONFIG)
    score = make_value_score(POLICY, valuation, **SETTINGS)
    policy = random_params(CONFIG)
    head = {"value": jnp.cos(jnp.arange(CONFIG.d, dtype=jnp.float32))}
    params = ActorCritic(policy, random_params(CONFIG, seed=2) | head if kind == "own" else head)
    by_tree, plain = batches()
    (found, metrics), (expected, figures) = (moved(fg.ppo(), batch, params, score=score) for batch in (by_tree, plain))
    assert float(metrics["value_loss"]) > 0
    assert_figures(metrics, figures)
    for part in ("policy", "critic"):
        assert_close(*(getattr(x, part) for x in (found, expected, params)))
