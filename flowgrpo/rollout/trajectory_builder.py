"""Build one trajectory from what its environment says and its policy chooses.

    reset -> heard -> request ... acted -> step -> heard -> request ... until its status is known
                      request ... began, where an action is cut; the next request goes on with it

An `OpenTrajectory` calls nothing by itself: its driver calls the environment (`call_reset`, `call_step`) and the
engine, and passes on the results. So a rollout, a resumed one and a replay go the same way.

`derive` makes all keys of a rollout at once, since a dispatch for each turn would cost more than many a turn: the
environment's randomness comes from `fold_in(key, 0)`, that of turn t from `fold_in(key, 1 + t)`, as in the compiled
rollout.
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

from flowgrpo.contracts import Completion, Do, HostEnv, HostStep, Request, Said
from flowgrpo.rollout.effects import Effect
from flowgrpo.rollout.records import CutAction, Played, Unfinished
from flowgrpo.types import COUNTS, BadInput, Status, Turn


def key_words(keys) -> list[tuple[int, ...]]:
    """The keys [n] of `jax.random.key` as numbers."""
    if not len(keys):
        return []
    keys = jnp.stack(list(keys)) if isinstance(keys, (list, tuple)) else keys
    own = jax.random.key_impl(jax.random.key(0))
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.ndim != 1 or jax.random.key_impl(keys) != own:
        raise BadInput(
            f"keys of a rollout are one axis of typed keys of {own}, as jax.random.split(jax.random.key(0), n)"
        )
    return [tuple(words) for words in np.asarray(jax.random.key_data(keys)).tolist()]


def derive(words: Sequence[tuple[int, ...]], turns: int) -> np.ndarray:
    """For each key the words of the environment's, then those of every turn's: [n, 1 + turns, words]."""
    if not words:
        return np.zeros((0, turns + 1, 0), np.uint32)
    # Padded to a power of two, and not to a small one, so that few sizes are compiled.
    words_nw = np.zeros((max(64, 1 << (len(words) - 1).bit_length()), len(words[0])), np.uint32)
    words_nw[: len(words)] = words
    return np.asarray(_derive(words_nw, turns=turns))[: len(words)]


def key_of(words_w: np.ndarray) -> Array:
    """The key of these words."""
    return jax.random.wrap_key_data(words_w)  # type: ignore[arg-type]


@partial(jax.jit, static_argnames="turns")
def _derive(words_nw: Array, *, turns: int) -> Array:
    fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))
    return jax.random.key_data(fold(jax.random.wrap_key_data(words_nw), jnp.arange(turns + 1)))


class CheckedStep(NamedTuple):
    """Result of a call of the environment, a reset or a step, checked."""

    state: Any
    said: tuple[int, ...]  # nothing where it is done
    message: Said | None  # the same, with how it is to be answered
    anchor: int
    step: HostStep | None  # None for a reset


def call_reset(env: HostEnv, key, task, do: Do) -> CheckedStep:
    """The environment's reset, or an exception where what it gives can't be used."""
    state, said = _pair(env, "reset", "(state, Said(tokens))", Said, env.reset(key, task, do))
    tokens = _ids(env, said)
    if not tokens:
        raise BadInput(f"{env.name} said nothing at its reset: a policy needs at least one token to continue")
    return CheckedStep(state, tokens, said, int(env.anchor(state)), None)


def call_step(env: HostEnv, state, action: Sequence[int], do: Do) -> CheckedStep:
    """Step the environment with an action; raise where what it gives can't be used, as `call_reset` does."""
    state, now = _pair(env, "step", "(state, HostStep(said, done))", HostStep, env.step(state, action, do))
    if now.reward is not None and not math.isfinite(now.reward):
        raise BadInput(f"{env.name} paid {now.reward}: a reward must be finite")
    if not isinstance(now.output, str | None) or now.status not in list(Status):
        raise BadInput(f"{env.name} ended as {now.status!r:.80} with {now.output!r:.80}: give a Status and a string")
    if now.done:
        return CheckedStep(state, (), None, 0, now)
    if now.said is None:
        raise BadInput(f"{env.name} says nothing, but is not done: a step that goes on says something")
    return CheckedStep(state, _ids(env, now.said), now.said, int(env.anchor(state)), now)


def _pair(env: HostEnv, name: str, form: str, kind: type, given: Any) -> tuple:
    """Check that the function `name` gave a state and a value of this kind, and return both; raise otherwise."""
    if isinstance(given, kind) or not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], kind)):
        found = f"({', '.join(type(x).__name__ for x in given)})" if type(given) is tuple else type(given).__name__
        raise BadInput(f"{env.name}: {name} must give {form}, and gave {found}")
    return given


def _ids(env: HostEnv, said: Said) -> tuple[int, ...]:
    try:
        return tuple(map(index, said.tokens))
    except TypeError:
        raise BadInput(f"{env.name} said {said.tokens!r:.80}: tokens are ids; encode words first") from None


def _flags(env: HostEnv, said: Said, size: int) -> list[bool]:
    """Say which tokens of a message the policy sampled before."""
    if said.chosen is None:
        return [False] * size
    if said.appends or len(said.chosen) != size:
        raise BadInput(f"{env.name} said {size} tokens and {len(said.chosen)} flags: give one each, in a new context")
    return list(map(bool, said.chosen))


@dataclass(eq=False)
class OpenTrajectory:
    """A trajectory on its way; `status` is None until it has ended."""

    env: HostEnv
    task: Any
    key: tuple[int, ...]
    group: int
    sample: int
    log: list[Effect] = field(default_factory=list)  # grows while the environment is called
    lens: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    errors: list[bool] = field(default_factory=list)
    paid: list[float | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # the context of the next action
    chosen: list[bool] = field(default_factory=list)
    following: CheckedStep | None = None
    begun: Completion | None = None  # of the next action, what was sampled of it before
    appends: bool = True
    output: str | None = None
    correct: bool = False
    status: Status | None = None
    reason: str = ""

    @property
    def state(self) -> Any:
        """The environment's state after its last call."""
        assert self.following is not None
        return self.following.state

    @property
    def message(self) -> Said:
        """The environment's last message, which waits for an action."""
        assert self.following is not None
        assert self.following.message is not None
        return self.following.message

    def heard(self, following: CheckedStep) -> None:
        """Add the result of a reset or a step, with all effects not yet counted; end the course where it has ended."""
        step, first = following.step, self.following is None
        self.lens.append(len(self.log) - sum(self.lens))
        if step is not None:
            self.tools.append(step.tool)
            self.errors.append(step.error)
            self.paid.append(None if step.reward is None else float(step.reward))
            self.correct, self.output = step.correct, step.output
        self.following = following
        failure = next(
            (effect.result.failure for effect in self.log[sum(self.lens[:-1]) :] if effect.result.failure), ""
        )
        if failure:
            self.end(Status.TOOL_FAILURE, failure)
        elif step is not None and step.done:
            self.end(Status(step.status), step.reason)
        else:
            self._told(following.said, self.message, first)

    def _told(self, said: tuple[int, ...], message: Said, first: bool) -> None:
        if first:
            self.appends = bool(message.appends)
        elif message.appends and not self.appends:
            raise BadInput(
                f"{self.env.name} appends to its context in some turns, but not in the first: say there that it appends"
            )
        if len(self.turns) >= self.env.turns:
            self.end(Status.TURN_LIMIT, f"all {self.env.turns} turns were used")
            return
        kept = len(self.tokens) if message.appends else 0
        self.tokens = self.tokens[:kept] + list(said)
        self.chosen = self.chosen[:kept] + _flags(self.env, message, len(said))

    def request(self, key, temperature: float, budget: int | None) -> Request:
        """Make the engine's next request: for an action, or for the rest of one, of at most `budget` more tokens."""
        limit = self.env.max_tokens if self.message.max_tokens is None else self.message.max_tokens
        return Request(
            tokens=tuple(self.tokens),
            key=key,
            max_tokens=min(limit, self.env.max_tokens),
            temperature=temperature,
            stop_ids=self.env.stop_ids,
            stop=self.message.stop,
            chosen=tuple(self.chosen) if self.appends or any(self.chosen) else None,
            begun=self.begun,
            budget=budget,
        )

    def began(self, sampled: Completion) -> None:
        """The policy's action was cut: this much of it is there."""
        self.begun = sampled

    def acted(self, turn: Turn) -> list[int]:
        """Add the policy's whole action, a turn after what was said last; returns its tokens."""
        begins = bool(self.turns) and self.appends and not self.message.appends
        self.turns.append(replace(turn, begins=begins))
        self.begun = None
        action = turn.tokens[turn.chosen].tolist()
        self.tokens = self.tokens + action
        self.chosen = self.chosen + [True] * len(action)
        return action

    def end(self, status: Status, reason: str = "") -> None:
        """It has ended here."""
        self.status, self.reason = status, reason

    def cut(self, status: Status, reason: str, tool: str = "") -> None:
        """It has ended in a call of the environment that gave nothing; an action's turn is there, as an error."""
        self.log = list(self.log)  # a thread that was left behind may hold the other
        if len(self.tools) < len(self.turns):
            self.tools.append(tool)
            self.errors.append(True)
            self.paid.append(None)
        self.end(status, reason)

    def unfinished(self, seconds: float) -> Unfinished:
        """All of it that can be resumed."""
        begun = None
        if self.begun is not None:
            assert self.following is not None
            begun = CutAction(self.following.said, self.following.anchor, self.begun)
        return Unfinished(**self._record(), turns=tuple(self.turns), seconds=seconds, begun=begun)

    def played(self, *, by_turn: bool, seconds: float | None) -> Played:
        """The trajectory, whose outcome is the sum of what was paid; `with_verdict` has what a reward says of it."""
        assert self.status is not None
        counts = bool(self.turns) and COUNTS[self.status]
        rewards = [reward or 0.0 if by_turn else None for reward in self.paid]
        turns = tuple(replace(turn, reward=paid) for turn, paid in zip(self.turns, rewards, strict=True))
        return Played(
            **self._record(),
            turns=turns,
            outcome=float(sum(reward or 0.0 for reward in self.paid)) if counts else None,
            correct=self.correct,
            status=self.status,
            appends=self.appends,
            output=self.output,
            reason=self.reason,
            seconds=seconds,
        )

    def _record(self) -> dict[str, Any]:
        columns = {name: tuple(getattr(self, name)) for name in ("tools", "errors", "log", "lens")}
        return {"task": self.task, "key": self.key, "group": self.group, "sample": self.sample} | columns
