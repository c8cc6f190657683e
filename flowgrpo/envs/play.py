"""Play episodes of pure environments without a policy: by the oracle, by demonstrations, by random tokens.

    plays = play_many(env, PLAYERS["oracle"], tasks);   print(transcript(env, plays, 0))

Everything but `transcript` is pure; tasks have one entry an episode.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.contracts import Env, Observation, Step
from flowgrpo.envs.env import END, in_words

Act = Callable[[Env, Array, Any], tuple]  # (env, key, state) -> (tokens, length)


class Play(NamedTuple):
    """An episode: what was asked, and for every turn t what was done and what came of it."""

    task: Any
    prompt: Observation
    anchor: Array  # t; of the state before the turn
    tokens: Array  # t l
    length: Array  # t
    live: Array  # t; the episode was not over before the turn
    step: Step  # t
    state: Any  # at the end


def play_episode(key: Array, task, env: Env, act: Act) -> Play:
    """One episode of as many turns as the environment ever has."""
    key_reset, key_act = jax.random.split(key)
    state, prompt = env.reset(key_reset, task)
    keys_t = jax.random.split(key_act, env.sizes.turns)
    last, (anchor_t, tokens_tl, length_t, live_t, step_t) = jax.lax.scan(
        lambda state, key: play_turn(state, key, env, act), state, keys_t
    )
    return Play(task, prompt, anchor_t, tokens_tl, length_t, live_t, step_t, last)


def play_turn(state, key: Array, env: Env, act: Act) -> tuple:
    """The next state, and what `Play` holds of a turn."""
    tokens, length = act(env, key, state)
    following, now = env.step(state, tokens, length)
    return following, (env.anchor(state), tokens, length, ~state.done, now)


def play_many(env: Env, act: Act, tasks, *, seed: int = 0) -> Play:
    """An episode of each task, compiled."""
    count = len(jax.tree.leaves(tasks)[0])
    run = jax.jit(jax.vmap(lambda key, task: play_episode(key, task, env, act)))
    return run(jax.random.split(jax.random.key(seed), count), tasks)


def play_random(env: Env, key: Array, state) -> tuple:  # noqa: ARG001
    """Any tokens of the vocabulary, up to the first END."""
    tokens = jax.random.randint(key, (env.sizes.action,), 1, len(env.words))
    ends = jnp.append(tokens, END) == END
    return tokens, jnp.minimum(jnp.argmax(ends) + 1, env.sizes.action)


PLAYERS: dict[str, Act] = {
    "oracle": lambda env, _, state: env.oracle(state),
    "demonstrations": lambda env, key, state: env.demonstrate(key, state),
    "random": play_random,
}


def transcript(env: Env, plays: Play, episode: int) -> str:
    """An episode in words, a line a turn."""
    one = jax.tree.map(lambda leaf: leaf[episode], (plays.prompt, plays.tokens, plays.length, plays.step, plays.live))
    prompt, tokens, length, step, live = one
    said = step.observation
    lines = [in_words(env, prompt.tokens, prompt.length)]
    for t in range(int(live.sum())):
        lines.append(
            f"    {in_words(env, tokens[t], length[t]):32} {in_words(env, said.tokens[t], said.length[t])}".rstrip()
        )
    return "\n".join([*lines, f"    reward {float(step.reward.sum()):g}"])
