"""Environments of text: a class with `reset` and `step`, strings in and strings out, with tools that are functions.

    def look(word: str) -> str:
        \"""Look a word up in the directory.\"""

    class Parcel(TextEnv):
        tools, max_turns = [look], 4

        def reset(self, task):
            return f"Deliver a parcel to {task['person']}."

        def step(self, action):
            return Done(reward=float(action.strip() == self.task["address"]))

    fg.train(Parcel, tasks="train.jsonl", model="...")

What the class returns are messages of a conversation with the model. Rendering them by the model's chat template, tool
calls, exact ids (A5), masks, records and replay are the framework's (`rollout.text_env`, `rollout.conversation_env`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.types import JSON, BadInput, Task, check_range

RewardFunction = Callable[[Task, str], RewardResult]


@dataclass(frozen=True)
class Done:
    """The end of an episode, which `step` returns.

    Args:
        reward: the outcome, a finite number. None: the reward function of the run judges `output`.
        output: for that reward function, and for records; None: the last action.
        correct: whether the task is solved; None, or if a reward function judges: whether the reward is full.
        message: why it ended, for people who read the trajectory.
    """

    reward: float | None = None
    output: str | None = None
    correct: bool | None = None
    message: str = ""

    def __post_init__(self):
        if self.reward is not None:
            try:
                reward = float(self.reward)
            except (TypeError, ValueError):
                reward = math.nan
            if not math.isfinite(reward):
                raise BadInput(f"Done: reward is {self.reward!r:.80}, but must be a finite number")
            object.__setattr__(self, "reward", reward)
        if not isinstance(self.output, str | None) or not isinstance(self.message, str):
            raise BadInput(f"Done: output={self.output!r:.80} and message={self.message!r:.80} must be strings")
        if self.correct is not None:
            object.__setattr__(self, "correct", bool(self.correct))


class TextEnv(ABC):
    """Base class of environments of text; one instance plays one episode.

    Write `step`, and `reset` unless the first observation is the task's query. Class attributes:

        tools         functions with types and a docstring, or `Tool`s. A function of the class itself, whose first
                      parameter is `self`, is called with the instance.
        max_turns     maximal number of actions
        max_tokens    maximal length of an action; None: that of the run
        instructions  text before the first observation
        reward        judges the output where `Done` has no reward: a `Reward`, or a function (task, output) ->
                      `RewardResult`; None: the one of the run

    Attributes of an instance, from before its `reset` on:

        task          the fields of the task: those of its line in the file, and id, query, answers and domain
        rng           a NumPy generator that depends on the task and its seed alone, so that the trajectories of a group
                      start alike, and an episode can be played again (A2)

    An action that calls tools is answered by their results, and `step` is not called. An exception of a tool is an
    observation; one of `reset` or `step` is a failure of the infrastructure, and the trajectory takes no part in
    training (F5): `step` should answer whatever a model may write, by an observation or a reward. An episode must
    depend on nothing but its task, `rng` and actions: after a restart it is restored by repeating its calls (S1).
    """

    tools: ClassVar[Sequence[Any]] = ()
    max_turns: ClassVar[int] = 8
    max_tokens: ClassVar[int | None] = None
    instructions: ClassVar[str] = ""
    reward: ClassVar[Reward | RewardFunction | None] = None

    task: Mapping[str, JSON]
    rng: np.random.Generator

    def reset(self, task: Mapping[str, JSON]) -> str:
        """The first observation; by default the task's query."""
        return task["query"]

    @abstractmethod
    def step(self, action: str) -> "str | Done":
        """The next observation after an action without tool calls, or the end."""


class SingleTurn(TextEnv):
    """The task's query, and one action, which the reward judges; `single_turn` fills in the rest."""

    max_turns = 1

    def step(self, action: str) -> Done:  # noqa: ARG002
        """The action is the output."""
        return Done()


def single_turn(
    reward: Reward | RewardFunction | None = None, *, instructions: str = "", max_tokens: int | None = None
) -> type[TextEnv]:
    """An environment whose observation is the task's query, and whose only action is the output that is judged.

    Args:
        reward: a `Reward`, or a function (task, output) -> `RewardResult`; None: the one of the run.
        instructions: text before the query.
        max_tokens: of the action; None: that of the run.
    """
    check_range("single_turn", "max_tokens", max_tokens, 1, whole=True, optional=True)
    fields = {"reward": reward, "instructions": instructions, "max_tokens": max_tokens}
    return type("SingleTurn", (SingleTurn,), {**fields, "__doc__": SingleTurn.__doc__, "__module__": __name__})


def to_reward(reward: Reward | RewardFunction | None, owner: str = "reward") -> Reward | None:
    """A reward function as a `Reward`."""
    if reward is None or isinstance(reward, Reward):
        return reward
    if not callable(reward):
        raise BadInput(
            f"{owner} is {reward!r:.80}: give an fg.Reward, or a function (task, output) that returns fg.RewardResult"
        )
    return Reward(reward)
