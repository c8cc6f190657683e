"""Figures of episodes of pure environments: what the oracle, the demonstrations, random tokens or a policy come to."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import flowgrpo as fg
from flowgrpo.envs.env import PAD
from flowgrpo.envs.lookup import World, is_right
from flowgrpo.envs.play import Play
from flowgrpo.rollout import exam
from flowgrpo.rollout.compiled import Rollout

# By the words of an environment: (tokens, length) -> whether the tool is right for what is asked.
RIGHT: dict[tuple[str, ...], Callable] = {World().words: is_right}


def draw_tasks(env: fg.Env, split: str, *, count: int, seed: int = 0):
    """Tasks of a split, compiled."""
    return jax.jit(partial(exam.draw_tasks, env, count=count, split=split))(jax.random.key(seed))


def tabulate(env: fg.Env, plays: Play) -> dict[str, float]:
    """Compute the figures of episodes: success, errors and right tools in %, turns and calls in the mean."""
    live, calls = np.asarray(plays.live), np.asarray(plays.live & (plays.step.tool >= 0))
    found = {
        "success": 100 * np.mean(plays.state.correct),
        "turns": live.sum(axis=1).mean(),
        "calls": calls.sum(axis=1).mean(),
        "errors": 100 * np.asarray(plays.step.error)[live].mean(),
    }
    if env.words in RIGHT and calls.any():
        right = np.asarray(jax.vmap(jax.vmap(RIGHT[env.words]))(plays.tokens, plays.length))
        found["right tool"] = 100 * right[calls].mean()
    return {name: float(value) for name, value in found.items()}


def right_tool_share(env: fg.Env, rollout: Rollout) -> float | None:
    """Of a policy's calls, the share that goes to the right tool; None where no call alone can tell."""
    calls_nt = np.asarray(rollout.tool >= 0)
    if env.words not in RIGHT or not calls_nt.any():
        return None
    trajectories = rollout.trajectories
    right_nt = jax.vmap(jax.vmap(partial(_is_right, env=env)))(
        jnp.asarray(trajectories.tokens), jnp.asarray(trajectories.chosen)
    )
    return float(np.asarray(right_nt)[calls_nt].mean())


def _is_right(tokens: Array, chosen: Array, *, env: fg.Env) -> Array:
    """Of one turn, in which the action comes right after what was heard."""
    action = jnp.roll(jnp.where(chosen, tokens, PAD), -jnp.argmax(chosen))[: env.sizes.action]
    return RIGHT[env.words](action, chosen.sum())
