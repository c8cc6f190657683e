"""A pure environment as a host environment, so that whatever plays those plays these too (E2)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from flowgrpo.contracts import Do, Env, HostEnv, HostStep, Observation, Said
from flowgrpo.envs.env import END, PAD
from flowgrpo.types import BadInput


class Standing(NamedTuple):
    """A state and its anchor."""

    state: Any  # as the pure environment has it
    anchor: int


def as_host(env: Env) -> HostEnv:
    """Wrap a pure environment to be played action by action on the host; its task is a pytree of one task.

    Every step pays what the pure one pays: roll it out with `by_turn=env.by_turn`.
    """
    return HostEnv(
        name=env.name,
        tools=env.tools,
        turns=env.sizes.turns,
        max_tokens=env.sizes.action,
        stop_ids=(END,),
        reset=partial(_reset, jax.jit(partial(_pure_reset, env))),
        step=partial(_step, jax.jit(partial(_pure_step, env)), env),
        anchor=lambda standing: standing.anchor,
    )


def unstack(tasks) -> list:
    """The tasks of a stacked pytree, one by one, in NumPy."""
    tasks = jax.device_get(tasks)
    return [jax.tree.map(lambda x, n=n: x[n], tasks) for n in range(len(jax.tree.leaves(tasks)[0]))]


def _pure_reset(env: Env, key: Array, task):
    state, said = env.reset(key, task)
    return state, (said, env.anchor(state))


def _pure_step(env: Env, state, tokens: Array, length: Array):
    state, now = env.step(state, tokens, length)
    return state, (now, env.anchor(state))


def _reset(reset, key: Array, task, _: Do) -> tuple[Standing, Said]:
    state, shown = reset(key, task)
    said, anchor = jax.device_get(shown)
    return Standing(state, int(anchor)), _said(said)


def _step(step, env: Env, standing: Standing, tokens, _: Do) -> tuple[Standing, HostStep]:
    action = np.full(env.sizes.action, PAD, np.int32)
    if len(tokens) > len(action):
        raise BadInput(f"an action of {len(tokens)} tokens, but {env.name} takes {len(action)}")
    action[: len(tokens)] = tokens
    state, shown = step(standing.state, action, np.int32(len(tokens)))
    now, anchor = jax.device_get(shown)
    return Standing(state, int(anchor)), HostStep(
        said=None if now.done else _said(now.observation),
        done=bool(now.done),
        reward=float(now.reward),
        correct=bool(now.correct),
        tool=env.tools[int(now.tool)] if now.tool >= 0 else "",
        error=bool(now.error),
    )


def _said(said: Observation) -> Said:
    return Said(np.asarray(said.tokens)[: int(said.length)].tolist())
