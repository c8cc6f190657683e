"""Record demonstrations on a host environment, in exact tokens: an expert's actions are run with the real tools.

    records = demonstrate(env, tasks, expert, tokenizer=model.tokenizer, call_tool=tools.call_tool)
    batch = packed_imitation(records, row_length=1024)                                          learner/imitation.py

An expert is a function from a task to its actions, one after the other. To imitate another model, take the texts of
the actions of its trajectories (`action_texts`), whose tokens may differ in the tokenizer of the model that imitates.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from flowgrpo.contracts import HostEnv, HostStep, ToolRunner
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.rollout.effects import replay_effects
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.rollout.trajectory_builder import derive_keys, to_key
from flowgrpo.types import BadInput, Status, Task, Trajectory, Turn

Action = str | Sequence[int]  # text without a stop token, or the ids of an action with its stop token
Expert = Callable[[Task], Iterable[Action]]


def demonstrate(
    env: HostEnv,
    tasks: Sequence[Task],
    expert: Expert,
    *,
    tokenizer: ChatTokenizer,
    call_tool: ToolRunner,
    concurrency: int = 8,
) -> list[Trajectory]:
    """One trajectory of an expert's actions for each task; it depends on the task and its index alone.

    Args:
        env: the environment.
        tasks: the tasks to demonstrate.
        expert: task -> its actions, one after the other: text without a stop token, or ids with one.
        tokenizer: that of the model that is to imitate them.
        call_tool: runs the tools.
        concurrency: number of trajectories at a time.
    """
    if not tasks:
        raise BadInput("there is no task to demonstrate on: give at least one")

    def run(number: int, task: Task) -> Trajectory:
        return play_actions(env, tokenizer, call_tool, task, expert(task), group=number)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(run, range(len(tasks)), tasks))


def imitate_recorded(
    env: HostEnv, tokenizer: ChatTokenizer, recorded: RecordedTrajectory, actions: Iterable[Action], *, group: int
) -> Trajectory:
    """A demonstration of these actions in `env`, with the tools' results from a recorded trajectory.

    The observations of `env` may differ from those of the environment that it was recorded in, such as a prompt without
    examples.
    """
    key = to_key(derive_keys([recorded.key], env.max_turns)[0, 0])
    call_tool = replay_effects(recorded.log)
    return play_actions(env, tokenizer, call_tool, recorded.task, actions, group=group, key=key)


def play_actions(
    env: HostEnv,
    tokenizer: ChatTokenizer,
    call_tool: ToolRunner,
    task: Task,
    actions: Iterable[Action],
    *,
    group: int = 0,
    key: Any = None,
) -> Trajectory:
    """The trajectory of these actions, up to the environment's limits; its key follows from its group by default."""
    state, observation = env.reset(jax.random.key(group) if key is None else key, task, call_tool)
    turns: list[Turn] = []
    step: HostStep | None = None
    for action in actions:
        ids = [*tokenizer.encode(action), tokenizer.stop_ids[0]] if isinstance(action, str) else list(action)
        if observation.max_tokens is not None and len(ids) > observation.max_tokens and turns:
            break
        tokens = np.array([*observation.tokens, *ids], np.int32)
        is_chosen = np.arange(len(tokens)) >= len(observation.tokens)
        turns.append(Turn(tokens, is_chosen, np.zeros(len(tokens), np.float32)))
        state, step = env.step(state, ids, call_tool)
        if step.done or len(turns) == env.max_turns:
            break
        assert step.observation is not None
        observation = step.observation
    status = step.status if step is not None else Status.ABORTED
    return Trajectory(turns, 1.0, group, status=status, extends_context=observation.extends_context)


def action_texts(trajectory: Any, tokenizer: ChatTokenizer, into: ChatTokenizer) -> list[Action]:
    """The texts of a trajectory's actions, read with the tokenizer that they were sampled with.

    An action that was cut, and so has no stop token, is returned as ids of the tokenizer `into`, without one.
    """
    decoded = [tokenizer.decode_action(turn.tokens[turn.chosen]) for turn in trajectory.turns]
    return [text if is_complete else into.encode(text) for text, is_complete in decoded]
