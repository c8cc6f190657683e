"""Examinations: parameters and a key flow in, what they do on fresh tasks of a split flows out; figures; a control.

Everything is pure, to be jitted by the caller.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo import masked
from flowgrpo.contracts import Env, Metrics, Policy
from flowgrpo.layouts import filled
from flowgrpo.rollout.compiled import Rollout, make_rollout, repeat
from flowgrpo.spread import Spread
from flowgrpo.types import Trajectories


def make_exam(
    env: Env,
    policy: Policy,
    split: str,
    *,
    tasks: int,
    samples: int = 1,
    temperature: float = 1.0,
    mesh: Spread = None,
):
    """`exam(params, key) -> Rollout` on fresh tasks of a split."""
    rollout = make_rollout(env, policy, temperature=temperature, mesh=mesh)
    return partial(_examine, env=env, rollout=rollout, split=split, tasks=tasks, samples=samples)


def _examine(params, key: Array, *, env: Env, rollout, split: str, tasks: int, samples: int) -> Rollout:
    questions, group_n = repeat(examined(env, key, tasks, split), samples)
    return rollout(params, questions, jax.random.split(jax.random.split(key)[1], len(group_n)), group_n)


def examined(env: Env, key: Array, count: int, split: str) -> Any:
    """Draw the tasks of an examination with this key; beside it in one program, they are drawn once."""
    return draw_tasks(env, jax.random.split(key)[0], count, split)


def draw_tasks(env: Env, key: Array, count: int, split: str) -> Any:
    """So many fresh tasks of a split."""
    return jax.vmap(partial(env.make_task, split=split))(jax.random.split(key, count))


def shuffled_rewards(trajectories: Trajectories, key: Array, *, samples: int) -> Trajectories:
    """A control: outcomes permuted within each group, so that they say nothing of who earned them."""
    order_gs = jax.vmap(lambda key: jax.random.permutation(key, samples))(
        jax.random.split(key, len(trajectories.group) // samples)
    )
    order_n = (order_gs + jnp.arange(len(order_gs))[:, None] * samples).ravel()
    return trajectories.replace(outcome=trajectories.outcome[order_n], correct=trajectories.correct[order_n])


def summarise(rollout: Rollout, *, samples: int) -> Metrics:
    """Compute figures of a batch of trajectories: of those that are valid, but `tokens` and `chosen_tokens` of all."""
    trajectories = rollout.trajectories
    valid_n = trajectories.valid
    turns_nt = jnp.asarray(trajectories.turns) & valid_n[:, None]
    count = jnp.maximum(turns_nt.sum(), 1)
    right_gs, valid_gs = (jnp.asarray(x).reshape(-1, samples) for x in (trajectories.correct, valid_n))
    mixed_g = (right_gs & valid_gs).any(axis=1) & (~right_gs & valid_gs).any(axis=1)
    return {
        "success": masked.mean(right_gs.astype(jnp.float32), valid_gs),
        "outcome": masked.mean(jnp.asarray(trajectories.outcome), valid_n),
        "invalid": (~valid_n).sum(),
        "turns": masked.mean(turns_nt.sum(axis=1).astype(jnp.float32), valid_n),
        "tool_errors": (rollout.error & turns_nt).sum() / count,
        "mixed_groups": mixed_g.mean(),
        "tokens": jnp.where(jnp.asarray(trajectories.turns), filled(trajectories)[0], 0).sum(),
        "chosen_tokens": trajectories.actions.sum(),
        "chosen_per_trajectory": masked.mean(trajectories.actions.sum(axis=(1, 2)).astype(jnp.float32), valid_n),
    }


def tool_mix(rollout: Rollout, tools: int) -> Array:
    """How often each tool was called."""
    return (rollout.tool[:, :, None] == jnp.arange(tools)[None, None, :]).sum(axis=(0, 1))
