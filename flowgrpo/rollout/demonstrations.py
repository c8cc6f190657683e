"""Record demonstrations on a host environment, in exact tokens: what an expert does is played with the real tools.

    records = demonstrate(env, tasks, expert, text=model.text, do=tools.do)      fg.demonstrate
    batch = packed_imitation(records, row_length=1024)                           learner/imitation.py

An expert is a function from a task to its actions, one after the other. Those of another model are what it said in
trajectories of its own (`spoken_actions`), which in the tokens of the model that imitates them may be others.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from flowgrpo.contracts import Do, HostEnv, HostStep, Said
from flowgrpo.data.tokenizer import Text
from flowgrpo.rollout.effects import replayed
from flowgrpo.rollout.records import Played
from flowgrpo.rollout.trajectory_builder import derive, key_of
from flowgrpo.types import BadInput, Status, Task, Trajectory, Turn

Action = str | Sequence[int]  # words, or the ids of an action with its stop token
Expert = Callable[[Task], Iterable[Action]]


def demonstrate(
    env: HostEnv, tasks: Sequence[Task], expert: Expert, *, text: Text, do: Do, workers: int = 8
) -> list[Trajectory]:
    """One trajectory a task, of the actions of an expert; each depends on its task and its place alone.

    Args:
        env: where it is played.
        tasks: a demonstration is made of each.
        expert: task -> its actions, one after the other: words without a stop token, or ids with one.
        text: the tokenizer of the model that is to imitate them.
        do: what runs the tools.
        workers: trajectories at a time.
    """
    if not tasks:
        raise BadInput("there is no task to demonstrate on: give at least one")

    def played(number: int, task: Task) -> Trajectory:
        return play_actions(env, text, do, task, expert(task), group=number)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(played, range(len(tasks)), tasks))


def imitate_played(env: HostEnv, text: Text, played: Played, actions: Iterable[Action], *, group: int) -> Trajectory:
    """The demonstration that repeats a recorded trajectory, its tools' answers from the record, in an environment.

    That may say other words than the one it was recorded in, such as a prompt without the examples of that.
    """
    key = key_of(derive([played.key], env.turns)[0, 0])
    return play_actions(env, text, replayed(played.log), played.task, actions, group=group, key=key)


def play_actions(
    env: HostEnv, text: Text, do: Do, task: Task, actions: Iterable[Action], *, group: int = 0, key: Any = None
) -> Trajectory:
    """The trajectory of these actions, up to the environment's limit; its key follows from its group by default."""
    state, said = env.reset(jax.random.key(group) if key is None else key, task, do)
    turns: list[Turn] = []
    step: HostStep | None = None
    for action in actions:
        sampled = [*text.encode(action), text.stop_ids[0]] if isinstance(action, str) else list(action)
        if said.max_tokens is not None and len(sampled) > said.max_tokens and turns:
            break
        turns.append(_turn(said, sampled))
        state, step = env.step(state, sampled, do)
        if step.done or len(turns) == env.turns:
            break
        assert step.said is not None
        said = step.said
    status = step.status if step is not None else Status.ABORTED
    return Trajectory(turns, 1.0, group, status=status, appends=said.appends)


def spoken_actions(trajectory: Any, text: Text, into: Text) -> list[Action]:
    """The words of a trajectory's actions, by the tokenizer that they were sampled with.

    One that was cut, and has no stop token, is given in ids of the tokenizer `into` that is to say it: without one.
    """
    spoken = [text.spoken(turn.tokens[turn.chosen]) for turn in trajectory.turns]
    return [words if whole else into.encode(words) for words, whole in spoken]


def _turn(said: Said, sampled: Sequence[int]) -> Turn:
    size = len(said.tokens)
    tokens = np.array([*said.tokens, *sampled], np.int32)
    return Turn(tokens, np.arange(len(tokens)) >= size, np.zeros(len(tokens), np.float32))
