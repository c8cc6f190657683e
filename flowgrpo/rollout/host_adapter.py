"""A pure environment as a host environment, so that whatever plays those plays these too (E2)."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from flowgrpo.contracts import Do, Env, HostEnv, HostStep, Observation, Said
from flowgrpo.envs.env import END, PAD
from flowgrpo.types import BadInput


class AnchoredState(NamedTuple):
    """A state and its anchor."""

    state: Any  # as the pure environment has it
    anchor: int


def as_host(env: Env) -> HostEnv:
    """Wrap a pure environment to be played action by action on the host; its task is a pytree of one task.

    Every step pays what the pure one pays: roll it out with `by_turn=env.by_turn`.
    """
    adapter = _Adapter(env)
    return HostEnv(
        name=env.name,
        tools=env.tools,
        turns=env.sizes.turns,
        max_tokens=env.sizes.action,
        stop_ids=(END,),
        reset=adapter.reset,
        step=adapter.step,
        anchor=lambda standing: standing.anchor,
    )


def unstack(tasks) -> list:
    """The tasks of a stacked pytree, one by one, in NumPy."""
    tasks = jax.device_get(tasks)
    return [jax.tree.map(lambda x, n=n: x[n], tasks) for n in range(len(jax.tree.leaves(tasks)[0]))]


class _Adapter:
    """A pure environment whose reset and step are compiled."""

    def __init__(self, env: Env):
        self.env = env
        self._reset, self._step = jax.jit(self._pure_reset), jax.jit(self._pure_step)

    def reset(self, key: Array, task, _: Do) -> tuple[AnchoredState, Said]:
        """Begin an episode."""
        state, shown = self._reset(key, task)
        said, anchor = jax.device_get(shown)
        return AnchoredState(state, int(anchor)), _said(said)

    def step(self, standing: AnchoredState, tokens, _: Do) -> tuple[AnchoredState, HostStep]:
        """Take an action."""
        env, action = self.env, np.full(self.env.sizes.action, PAD, np.int32)
        if len(tokens) > len(action):
            raise BadInput(f"an action of {len(tokens)} tokens, but {env.name} takes {len(action)}")
        action[: len(tokens)] = tokens
        state, shown = self._step(standing.state, action, np.int32(len(tokens)))
        now, anchor = jax.device_get(shown)
        return AnchoredState(state, int(anchor)), HostStep(
            said=None if now.done else _said(now.observation),
            done=bool(now.done),
            reward=float(now.reward),
            correct=bool(now.correct),
            tool=env.tools[int(now.tool)] if now.tool >= 0 else "",
            error=bool(now.error),
        )

    def _pure_reset(self, key: Array, task):
        state, said = self.env.reset(key, task)
        return state, (said, self.env.anchor(state))

    def _pure_step(self, state, tokens: Array, length: Array):
        state, now = self.env.step(state, tokens, length)
        return state, (now, self.env.anchor(state))


def _said(said: Observation) -> Said:
    return Said(np.asarray(said.tokens)[: int(said.length)].tolist())
