"""A pure environment as a host environment, so that the hosted rollout gives the same trajectories (E2)."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from flowgrpo.contracts import Env, HostEnv, HostObservation, HostStep, Observation, ToolRunner
from flowgrpo.envs.env import END, PAD
from flowgrpo.types import BadInput


class AnchoredState(NamedTuple):
    """A state and its anchor."""

    state: Any  # of the pure environment
    anchor: int


def as_host(env: Env) -> HostEnv:
    """Wrap a pure environment for hosted rollouts; its task is a pytree of one task.

    Every step has the reward of the pure one: roll it out with `by_turn=env.by_turn`.
    """
    adapter = _Adapter(env)
    return HostEnv(
        name=env.name,
        tools=env.tools,
        max_turns=env.sizes.turns,
        max_tokens=env.sizes.action,
        stop_ids=(END,),
        reset=adapter.reset,
        step=adapter.step,
        anchor=lambda anchored: anchored.anchor,
    )


def unstack(tasks) -> list:
    """The tasks of a stacked pytree as a list of pytrees in NumPy."""
    tasks = jax.device_get(tasks)
    return [jax.tree.map(lambda x, n=n: x[n], tasks) for n in range(len(jax.tree.leaves(tasks)[0]))]


class _Adapter:
    """A pure environment with compiled reset and step."""

    def __init__(self, env: Env):
        self.env = env
        self._reset, self._step = jax.jit(self._pure_reset), jax.jit(self._pure_step)

    def reset(self, key: Array, task, _: ToolRunner) -> tuple[AnchoredState, HostObservation]:
        """Start an episode."""
        state, shown = self._reset(key, task)
        observation, anchor = jax.device_get(shown)
        return AnchoredState(state, int(anchor)), _to_host(observation)

    def step(self, anchored: AnchoredState, tokens, _: ToolRunner) -> tuple[AnchoredState, HostStep]:
        """Take an action."""
        env, action = self.env, np.full(self.env.sizes.action, PAD, np.int32)
        if len(tokens) > len(action):
            raise BadInput(f"an action of {len(tokens)} tokens, but {env.name} takes {len(action)}")
        action[: len(tokens)] = tokens
        state, shown = self._step(anchored.state, action, np.int32(len(tokens)))
        step, anchor = jax.device_get(shown)
        return AnchoredState(state, int(anchor)), HostStep(
            observation=None if step.done else _to_host(step.observation),
            done=bool(step.done),
            reward=float(step.reward),
            correct=bool(step.correct),
            tool=env.tools[int(step.tool)] if step.tool >= 0 else "",
            error=bool(step.error),
        )

    def _pure_reset(self, key: Array, task):
        state, observation = self.env.reset(key, task)
        return state, (observation, self.env.anchor(state))

    def _pure_step(self, state, tokens: Array, length: Array):
        state, step = self.env.step(state, tokens, length)
        return state, (step, self.env.anchor(state))


def _to_host(observation: Observation) -> HostObservation:
    return HostObservation(np.asarray(observation.tokens)[: int(observation.length)].tolist())
