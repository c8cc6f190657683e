"""Play episodes of pure environments without a policy: by the oracle, by demonstrations, by random tokens.

    episodes = play_episodes(env, PLAYERS["oracle"], tasks);   print(transcript(env, episodes, 0))

Everything but `transcript` is pure; tasks have one entry an episode.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.contracts import Env, Observation, Step
from flowgrpo.envs.env import END, to_words
from flowgrpo.types import PyTree

Act = Callable[[Env, Array, PyTree], tuple]  # (env, key, state) -> (tokens, length)


class Episode(NamedTuple):
    """An episode: its task and prompt, and the action and the result of every turn t."""

    task: PyTree
    prompt: Observation
    anchor: Array  # t; of the state before the turn
    tokens: Array  # t l
    length: Array  # t
    live: Array  # t; the episode was not over before the turn
    step: Step  # t
    state: PyTree  # at the end


def play_episode(key: Array, task: PyTree, env: Env, act: Act) -> Episode:
    """One episode, of as many turns as the environment has at most."""
    key_reset, key_act = jax.random.split(key)
    state, prompt = env.reset(key_reset, task)
    keys_t = jax.random.split(key_act, env.sizes.turns)

    def turn(state, key: Array):
        tokens, length = act(env, key, state)
        next_state, step = env.step(state, tokens, length)
        return next_state, (env.anchor(state), tokens, length, ~state.done, step)

    last, (anchor_t, tokens_tl, length_t, live_t, step_t) = jax.lax.scan(turn, state, keys_t)
    return Episode(task, prompt, anchor_t, tokens_tl, length_t, live_t, step_t, last)


def play_episodes(env: Env, act: Act, tasks: PyTree, *, seed: int = 0) -> Episode:
    """An episode of each task, compiled."""
    count = len(jax.tree.leaves(tasks)[0])
    run = jax.jit(jax.vmap(lambda key, task: play_episode(key, task, env, act)))
    return run(jax.random.split(jax.random.key(seed), count), tasks)


def play_random(env: Env, key: Array, state: PyTree) -> tuple:  # noqa: ARG001
    """Random tokens of the vocabulary, up to the first END."""
    tokens = jax.random.randint(key, (env.sizes.action,), 1, len(env.vocabulary))
    ends = jnp.append(tokens, END) == END
    return tokens, jnp.minimum(jnp.argmax(ends) + 1, env.sizes.action)


PLAYERS: dict[str, Act] = {
    "oracle": lambda env, _, state: env.oracle(state),
    "demonstrations": lambda env, key, state: env.demonstrate(key, state),
    "random": play_random,
}


def transcript(env: Env, episodes: Episode, index: int) -> str:
    """An episode in words, a line a turn."""
    columns = (episodes.prompt, episodes.tokens, episodes.length, episodes.step, episodes.live)
    prompt, tokens, length, step, live = jax.tree.map(lambda leaf: leaf[index], columns)
    observation = step.observation
    lines = [to_words(env, prompt.tokens, prompt.length)]
    for t in range(int(live.sum())):
        action = to_words(env, tokens[t], length[t])
        lines.append(f"    {action:32} {to_words(env, observation.tokens[t], observation.length[t])}".rstrip())
    return "\n".join([*lines, f"    reward {float(step.reward.sum()):g}"])
