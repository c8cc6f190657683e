"""Build one trajectory from the results of its environment and the completions of its policy.

    call_reset -> add_observation -> request ... add_action -> call_step -> add_observation ...   until it has a status
                                     request ... begin_action, if the token budget is used up within an action

A `TrajectoryBuilder` calls nothing itself: its driver calls the environment (`call_reset`, `call_step`) and the engine,
and adds the results. So a rollout, a resumed rollout and a replay build trajectories in the same way.

`derive_keys` derives all keys of a rollout at once, since a dispatch for each turn would cost more than many a turn:
the environment's key is `fold_in(key, 0)`, that of turn t is `fold_in(key, 1 + t)`, as in the compiled rollout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import index
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.contracts import Completion, HostEnv, HostObservation, HostStep, Request, RewardResult, ToolRunner
from flowgrpo.rollout.effects import Effect
from flowgrpo.rollout.records import PartialAction, PartialTrajectory, RecordedTrajectory
from flowgrpo.types import COUNTS, BadInput, Status, Turn

# Keys -------------------------------------------------------------------------------------------------


def key_words(keys) -> list[tuple[int, ...]]:
    """Integers of the typed JAX keys [n]."""
    if not len(keys):
        return []
    keys = jnp.stack(list(keys)) if isinstance(keys, (list, tuple)) else keys
    impl = jax.random.key_impl(jax.random.key(0))
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.ndim != 1 or jax.random.key_impl(keys) != impl:
        raise BadInput(
            f"keys of a rollout are one axis of typed keys of {impl}, as jax.random.split(jax.random.key(0), n)"
        )
    return [tuple(words) for words in np.asarray(jax.random.key_data(keys)).tolist()]


def derive_keys(words: Sequence[tuple[int, ...]], turns: int) -> np.ndarray:
    """Integers of the environment's key and of each turn's, for each trajectory key: [n, 1 + turns, words]."""
    if not words:
        return np.zeros((0, turns + 1, 0), np.uint32)
    # Padded to a power of two of at least 64, so that few sizes are compiled.
    words_nw = np.zeros((max(64, 1 << (len(words) - 1).bit_length()), len(words[0])), np.uint32)
    words_nw[: len(words)] = words
    return np.asarray(_fold_in(words_nw, turns=turns))[: len(words)]


@partial(jax.jit, static_argnames="turns")
def _fold_in(words_nw: Array, *, turns: int) -> Array:
    fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))
    return jax.random.key_data(fold(jax.random.wrap_key_data(words_nw), jnp.arange(turns + 1)))


def to_key(words_w: np.ndarray) -> Array:
    """The typed key of these integers."""
    return jax.random.wrap_key_data(words_w)  # type: ignore[arg-type]


# Calls of the environment -----------------------------------------------------------------------------


class CheckedStep(NamedTuple):
    """Checked result of a reset or a step."""

    state: Any
    tokens: tuple[int, ...]  # of the observation; empty if the episode is done
    observation: HostObservation | None  # None if the episode is done
    anchor: int
    step: HostStep | None  # None for a reset


def call_reset(env: HostEnv, key, task, call_tool: ToolRunner) -> CheckedStep:
    """Reset the environment; raises `BadInput` if its result breaks the contract."""
    form = "(state, HostObservation(tokens))"
    state, observation = _check_pair(env, "reset", form, HostObservation, env.reset(key, task, call_tool))
    tokens = _token_ids(env, observation)
    if not tokens:
        raise BadInput(
            f"{env.name} returned no observation at its reset: a policy needs at least one token to continue"
        )
    return CheckedStep(state, tokens, observation, int(env.anchor(state)), None)


def call_step(env: HostEnv, state, action: Sequence[int], call_tool: ToolRunner) -> CheckedStep:
    """Step the environment with an action; raises `BadInput` if its result breaks the contract."""
    form = "(state, HostStep(observation, done))"
    state, step = _check_pair(env, "step", form, HostStep, env.step(state, action, call_tool))
    if step.reward is not None and not math.isfinite(step.reward):
        raise BadInput(f"{env.name} gave the reward {step.reward}: a reward must be finite")
    if not isinstance(step.output, str | None) or step.status not in list(Status):
        raise BadInput(f"{env.name} ended as {step.status!r:.80} with {step.output!r:.80}: give a Status and a string")
    if step.done:
        return CheckedStep(state, (), None, 0, step)
    if step.observation is None:
        raise BadInput(f"{env.name} gave no observation, but is not done: give one with every step before the last")
    return CheckedStep(state, _token_ids(env, step.observation), step.observation, int(env.anchor(state)), step)


def _check_pair(env: HostEnv, name: str, form: str, kind: type, result: Any) -> tuple:
    """Return `result`, or raise `BadInput` unless it is a pair of a state and a value of this kind."""
    # A NamedTuple of two fields is a pair, too.
    if isinstance(result, kind) or not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], kind)):
        types = f"({', '.join(type(x).__name__ for x in result)})" if type(result) is tuple else type(result).__name__
        raise BadInput(f"{env.name}: {name} must return {form}, and returned {types}")
    return result


def _token_ids(env: HostEnv, observation: HostObservation) -> tuple[int, ...]:
    try:
        return tuple(map(index, observation.tokens))
    except TypeError:
        raise BadInput(f"{env.name} observed {observation.tokens!r:.80}: tokens are ids; encode words first") from None


# The trajectory ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class TrajectoryBuilder:
    """A trajectory under way; `status` is None until it has ended."""

    env: HostEnv
    task: Any
    key: tuple[int, ...]
    group: int
    sample: int
    log: list[Effect] = field(default_factory=list)  # grows while the environment is called
    effect_counts: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    errors: list[bool] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # context of the next action
    chosen: list[bool] = field(default_factory=list)
    last_step: CheckedStep | None = None
    partial: Completion | None = None  # of the next action, the part that was sampled before
    extends_context: bool = True
    output: str | None = None
    correct: bool = False
    is_judged: bool = False
    status: Status | None = None
    reason: str = ""

    @property
    def state(self) -> Any:
        """The environment's state after its last call."""
        assert self.last_step is not None
        return self.last_step.state

    @property
    def observation(self) -> HostObservation:
        """The observation that awaits an action."""
        assert self.last_step is not None
        assert self.last_step.observation is not None
        return self.last_step.observation

    def add_observation(self, checked: CheckedStep) -> None:
        """Add the result of a reset or a step, with its effects, and end the trajectory if the episode is done."""
        step, is_reset = checked.step, self.last_step is None
        effects = self.log[sum(self.effect_counts) :]
        self.effect_counts.append(len(effects))
        if step is not None:
            self.tools.append(step.tool)
            self.errors.append(step.error)
            self.rewards.append(None if step.reward is None else float(step.reward))
            self.correct, self.output, self.is_judged = step.correct, step.output, step.is_judged
        self.last_step = checked
        failure = next((effect.result.failure for effect in effects if effect.result.failure), "")
        if failure:
            self.end(Status.TOOL_FAILURE, failure)
            return
        if step is not None and step.done:
            self.end(Status(step.status), step.reason)
            return
        observation = self.observation
        if is_reset:
            self.extends_context = bool(observation.extends_context)
        elif observation.extends_context and not self.extends_context:
            raise BadInput(
                f"{self.env.name} extends its context in some turns, but not in the first: set extends_context there"
            )
        if len(self.turns) >= self.env.max_turns:
            self.end(Status.TURN_LIMIT, f"all {self.env.max_turns} turns were used")
            return
        size = len(checked.tokens)
        if observation.chosen is None:
            chosen = [False] * size
        elif observation.extends_context or len(observation.chosen) != size:
            raise BadInput(
                f"{self.env.name} observed {size} tokens with {len(observation.chosen)} chosen flags: give one flag a "
                "token, and only where a context starts"
            )
        else:
            chosen = list(map(bool, observation.chosen))
        start = len(self.tokens) if observation.extends_context else 0
        self.tokens = self.tokens[:start] + list(checked.tokens)
        self.chosen = self.chosen[:start] + chosen

    def request(self, key, temperature: float, budget: int | None) -> Request:
        """The engine's next request: for an action, or for the rest of one, of at most `budget` more tokens."""
        observation = self.observation
        limit = self.env.max_tokens if observation.max_tokens is None else observation.max_tokens
        return Request(
            tokens=tuple(self.tokens),
            key=key,
            max_tokens=min(limit, self.env.max_tokens),
            temperature=temperature,
            stop_ids=self.env.stop_ids,
            stop=observation.stop,
            chosen=tuple(self.chosen) if self.extends_context or any(self.chosen) else None,
            partial=self.partial,
            budget=budget,
        )

    def begin_action(self, partial: Completion) -> None:
        """Keep the part of an action that was sampled when the budget was used up."""
        self.partial = partial

    def add_action(self, turn: Turn) -> list[int]:
        """Add a turn with the policy's complete action; returns the action's tokens."""
        starts_context = bool(self.turns) and self.extends_context and not self.observation.extends_context
        self.turns.append(replace(turn, starts_context=starts_context))
        self.partial = None
        action = turn.tokens[turn.chosen].tolist()
        self.tokens = self.tokens + action
        self.chosen = self.chosen + [True] * len(action)
        return action

    def end(self, status: Status, reason: str = "") -> None:
        """End the trajectory."""
        self.status, self.reason = status, reason

    def end_in_call(self, status: Status, reason: str, tool: str = "") -> None:
        """End the trajectory in a call of the environment that did not return; a turn without a step is an error."""
        self.log = list(self.log)  # a thread that was left behind may still add to the other list
        if len(self.tools) < len(self.turns):
            self.tools.append(tool)
            self.errors.append(True)
            self.rewards.append(None)
        self.end(status, reason)

    def to_partial(self, seconds: float) -> PartialTrajectory:
        """All that a later rollout needs to resume the trajectory."""
        action = None
        if self.partial is not None:
            assert self.last_step is not None
            action = PartialAction(self.last_step.tokens, self.last_step.anchor, self.partial)
        return PartialTrajectory(
            **self._common_fields(), turns=tuple(self.turns), seconds=seconds, partial_action=action
        )

    def finish(self, *, by_turn: bool, seconds: float | None) -> RecordedTrajectory:
        """The trajectory with the sum of the environment's rewards as its outcome."""
        assert self.status is not None
        counts = bool(self.turns) and COUNTS[self.status]
        rewards = [reward or 0.0 if by_turn else None for reward in self.rewards]
        outcome = float(sum(reward or 0.0 for reward in self.rewards)) if counts else None
        return RecordedTrajectory(
            **self._common_fields(),
            turns=tuple(replace(turn, reward=reward) for turn, reward in zip(self.turns, rewards, strict=True)),
            outcome=outcome,
            correct=self.correct,
            status=self.status,
            extends_context=self.extends_context,
            output=self.output,
            reward_result=RewardResult(outcome) if self.is_judged and counts else None,
            reason=self.reason,
            seconds=seconds,
        )

    def _common_fields(self) -> dict[str, Any]:
        """The fields that partial and recorded trajectories share."""
        columns = {name: tuple(getattr(self, name)) for name in ("tools", "errors", "log", "effect_counts")}
        return {"task": self.task, "key": self.key, "group": self.group, "sample": self.sample} | columns
