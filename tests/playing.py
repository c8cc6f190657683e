"""Playing pure environments in tests: whole episodes at once, and single turns in words."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flowgrpo as fg
from flowgrpo.envs.env import END, fill, in_words


class Played(NamedTuple):
    """Of n episodes: what came out, and n x turns of what happened while they ran."""

    correct: np.ndarray
    outcome: np.ndarray
    turns: np.ndarray
    reward: np.ndarray
    tool: np.ndarray
    error: np.ndarray


def compiled(env: fg.Env) -> fg.Env:
    """The environment with each function jitted, so that single turns are quick."""
    parts = ("reset", "step", "anchor", "oracle", "demonstrate")
    jitted = {part: jax.jit(getattr(env, part)) for part in parts}
    return env._replace(make_task=jax.jit(env.make_task, static_argnums=1), **jitted)


def play(env: fg.Env, policy, tasks, *, seed=0) -> Played:
    """An episode of each of n tasks under a policy `(key, state) -> (tokens, length)`."""
    keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(tasks)[0]))
    return Played(*map(np.asarray, jax.jit(jax.vmap(partial(_episode, env, policy)))(keys, tasks)))


def _episode(env, policy, key, task):
    reset_key, policy_key = jax.random.split(key)
    state, _ = env.reset(reset_key, task)

    def turn(state, number):
        following, now = env.step(state, *policy(jax.random.fold_in(policy_key, number), state))
        return following, (now.reward, now.tool, now.error, ~state.done)

    state, (reward, tool, error, alive) = jax.lax.scan(turn, state, jnp.arange(env.sizes.turns))
    return state.correct, reward.sum(), alive.sum(), reward, tool, error


def action(env: fg.Env, words: str):
    """Words and END as an action."""
    tokens = [*map(env.words.index, words.split()), END]
    return fill(tokens, env.sizes.action), jnp.int32(len(tokens))


def turn(env: fg.Env, state, words: str):
    """`(state, what the environment said, step)` after these words."""
    state, now = env.step(state, *action(env, words))
    return state, in_words(env, *now.observation), now


def garbage(env: fg.Env):
    """A policy of arbitrary tokens, lengths too: most of it is malformed."""
    vocabulary, slots = len(env.words), env.sizes.action

    def policy(key, _):
        token_key, length_key = jax.random.split(key)
        tokens = jax.random.randint(token_key, (slots,), -2, vocabulary + 3, jnp.int32)
        return tokens, jax.random.randint(length_key, (), -1, slots + 3, jnp.int32)

    return policy
