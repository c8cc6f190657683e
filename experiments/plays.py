"""Episodes of pure environments without a policy: what the oracle, the demonstrations and random tokens come to."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import flowgrpo as fg
from flowgrpo.envs.env import END, PAD, in_words
from flowgrpo.envs.lookup import is_right
from flowgrpo.rollout import exam
from flowgrpo.rollout.compiled import Rollout

RIGHT: dict[str, Callable] = {"lookup": is_right}  # (tokens, length) -> whether the tool is right for what is asked

Act = Callable[[fg.Env, Array, Any], tuple]  # (env, key, state) -> (tokens, length)


class Play(NamedTuple):
    """An episode: what was asked, and for every turn t what was done and what came of it."""

    task: Any
    prompt: fg.Observation
    anchor: Array  # t; of the state before the turn
    tokens: Array  # t l
    length: Array  # t
    live: Array  # t; the episode was not over before the turn
    step: fg.Step  # t
    state: Any  # at the end


def play(key: Array, task, env: fg.Env, act: Act) -> Play:
    """One episode of as many turns as the environment ever has."""
    key_reset, key_act = jax.random.split(key)
    state, prompt = env.reset(key_reset, task)
    keys_t = jax.random.split(key_act, env.sizes.turns)
    last, (anchor_t, tokens_tl, length_t, live_t, step_t) = jax.lax.scan(
        partial(play_turn, env=env, act=act), state, keys_t
    )
    return Play(task, prompt, anchor_t, tokens_tl, length_t, live_t, step_t, last)


def play_turn(state, key: Array, env: fg.Env, act: Act) -> tuple:
    """The next state, and what `Play` holds of a turn."""
    tokens, length = act(env, key, state)
    following, now = env.step(state, tokens, length)
    return following, (env.anchor(state), tokens, length, ~state.done, now)


def draw_tasks(env: fg.Env, split: str, *, count: int, seed: int = 0):
    """Tasks of a split, compiled."""
    return jax.jit(partial(exam.draw_tasks, env, count=count, split=split))(jax.random.key(seed))


def play_many(env: fg.Env, act: Act, tasks, *, seed: int = 0) -> Play:
    """An episode of each task, compiled."""
    count = len(jax.tree.leaves(tasks)[0])
    return jax.jit(jax.vmap(partial(play, env=env, act=act)))(jax.random.split(jax.random.key(seed), count), tasks)


def play_oracle(env: fg.Env, key: Array, state) -> tuple:  # noqa: ARG001
    """The best action."""
    return env.oracle(state)


def play_demonstration(env: fg.Env, key: Array, state) -> tuple:
    """What a warm start imitates."""
    return env.demonstrate(key, state)


def play_random(env: fg.Env, key: Array, state) -> tuple:  # noqa: ARG001
    """Any tokens of the vocabulary, up to the first END."""
    tokens = jax.random.randint(key, (env.sizes.action,), 1, len(env.words))
    ends = jnp.append(tokens, END) == END
    return tokens, jnp.minimum(jnp.argmax(ends) + 1, env.sizes.action)


PLAYERS: dict[str, Act] = {"oracle": play_oracle, "demonstrations": play_demonstration, "random": play_random}


def tabulate(env: fg.Env, plays: Play) -> dict[str, float]:
    """What the episodes come to; shares in %."""
    live, calls = np.asarray(plays.live), np.asarray(plays.live & (plays.step.tool >= 0))
    found = {
        "success": 100 * np.mean(plays.state.correct),
        "turns": live.sum(axis=1).mean(),
        "calls": calls.sum(axis=1).mean(),
        "errors": 100 * np.asarray(plays.step.error)[live].mean(),
    }
    if env.name in RIGHT and calls.any():
        right = np.asarray(jax.vmap(jax.vmap(RIGHT[env.name]))(plays.tokens, plays.length))
        found["right tool"] = 100 * right[calls].mean()
    return {name: float(value) for name, value in found.items()}


def right_tool_share(env: fg.Env, rollout: Rollout) -> float | None:
    """Of a policy's calls, the share that goes to the right tool; None where no call alone can tell."""
    calls_nt = np.asarray(rollout.tool >= 0)
    if env.name not in RIGHT or not calls_nt.any():
        return None
    trajectories = rollout.trajectories
    right_nt = jax.vmap(jax.vmap(partial(_is_right, env=env)))(
        jnp.asarray(trajectories.tokens), jnp.asarray(trajectories.chosen)
    )
    return float(np.asarray(right_nt)[calls_nt].mean())


def _is_right(tokens: Array, chosen: Array, *, env: fg.Env) -> Array:
    """Of one turn, in which the action comes right after what was heard."""
    action = jnp.roll(jnp.where(chosen, tokens, PAD), -jnp.argmax(chosen))[: env.sizes.action]
    return RIGHT[env.name](action, chosen.sum())


def transcript(env: fg.Env, plays: Play, episode: int) -> str:
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
