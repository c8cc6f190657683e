"""Check the contract of host environments: `check_host_env` raises for the first broken rule, or returns trajectories.

    trajectories = check_host_env(env, tasks, vocabulary=32, call_tool=tools.call_tool)

Random actions are rolled out in threads, as in training. Rules: reset and step don't raise, give the same results for
the same state, action and effects, don't extend contexts in some trajectories only, and can be replayed from their
record (A2). Effects of one task may differ from call to call; they are recorded.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from flowgrpo.contracts import Completion, HostEnv, Request, ToolRunner
from flowgrpo.rollout.effects import no_effects, record_effects, replay_effects
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.rollout.replay import replay
from flowgrpo.rollout.trajectory_builder import call_reset, call_step
from flowgrpo.types import BadInput, Status

Act = Callable[[np.random.Generator, Request], Sequence[int]]  # a random action for a request


def check_host_env(
    env: HostEnv,
    tasks: Sequence[Any],
    *,
    vocabulary: int,
    call_tool: ToolRunner = no_effects,
    act: Act | None = None,
    samples: int = 4,
    seed: int = 0,
) -> list[RecordedTrajectory]:
    """Raise `BadInput` if the contract is broken; returns `samples` trajectories of each task.

    Args:
        env: the environment.
        tasks: at least one.
        vocabulary: number of token ids.
        call_tool: runs the environment's effects.
        act: gives the actions; by default random tokens below `vocabulary`. Give one that gets somewhere, so that
            calls of tools and the ends of episodes are checked too.
        samples: trajectories of each task.
        seed: of keys and actions.
    """
    if not tasks or not env.stop_ids or min(env.max_turns, env.max_tokens, samples, vocabulary) < 1:
        raise BadInput(
            f"{env.name}: give a task, and an environment with stop_ids, max_turns and max_tokens of at least 1"
        )
    if max(env.stop_ids) >= vocabulary:
        raise BadInput(f"{env.name}: stop_ids are {env.stop_ids}, but no token reaches vocabulary={vocabulary}")
    tasks = [task for task in tasks for _ in range(samples)]
    keys = jax.random.split(jax.random.key(seed), len(tasks))
    policy = _RandomPolicy(act or _make_random_act(vocabulary, env))
    groups = [index // samples for index in range(len(tasks))]
    trajectories = hosted(env, policy.submit, call_tool=call_tool)(tasks, keys, groups).trajectories
    if max(policy.sizes, default=0) > env.max_tokens:
        raise BadInput(
            f"{env.name}: act gave {max(policy.sizes)} tokens, but an action has at most max_tokens={env.max_tokens}"
        )
    for trajectory in trajectories:
        if trajectory.status == Status.ABORTED:
            raise BadInput(f"{env.name}: task {trajectory.task!r:.80}: {trajectory.reason}")
        replay(env, trajectory)
    for tool in sorted({tool for trajectory in trajectories for tool in trajectory.tools} - {"", *env.tools}):
        raise BadInput(f"{env.name}: step called the tool {tool!r}, but tools are {env.tools}: name it there")
    last_tokens = {int(turn.tokens[-1]) for trajectory in trajectories for turn in trajectory.turns}
    if not last_tokens & set(env.stop_ids):
        raise BadInput(
            f"{env.name}: no action ended with one of stop_ids={env.stop_ids}: let act give it, or name what ends one"
        )
    _check_steps_repeat(env, tasks[0], keys[0], policy, call_tool)
    return list(trajectories)


def _check_steps_repeat(env: HostEnv, task, key, policy: "_RandomPolicy", call_tool: ToolRunner) -> None:
    """States are values: two steps from one state, with the same effects, give the same result."""
    last = call_reset(env, key, task, call_tool)
    for _ in range(env.max_turns):
        request = Request(last.tokens, key, max_tokens=env.max_tokens, stop_ids=env.stop_ids)
        action = list(policy.submit(request).result().tokens)
        recording, log = record_effects(call_tool)
        first = call_step(env, last.state, action, recording)
        second = call_step(env, last.state, action, replay_effects(log))
        if (first.tokens, first.anchor, first.step) != (second.tokens, second.anchor, second.step):
            raise BadInput(
                f"{env.name}: two steps from one state differ: make the state immutable, and draw from its key"
            )
        if first.step is not None and first.step.done:
            return
        last = first


class _RandomPolicy:
    """An engine without a model, whose actions depend on the request alone."""

    def __init__(self, act: Act):
        self.act = act
        self.sizes: list[int] = []  # of all actions

    def submit(self, request: Request) -> Future:
        """A future that has its completion already."""
        words = np.asarray(jax.random.key_data(request.key)).tolist()
        action = list(self.act(np.random.default_rng([*words, len(request.tokens)]), request))
        self.sizes.append(len(action))
        tokens = action[: request.max_tokens]
        is_stopped = bool(tokens) and tokens[-1] in request.stop_ids
        reason = "stop" if is_stopped else "length"
        future: Future = Future()
        future.set_result(Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), reason))
        return future


def _make_random_act(vocabulary: int, env: HostEnv) -> Act:
    """Actions of up to `max_tokens` tokens, half of which end with a stop token."""

    def act(random: np.random.Generator, _: Request) -> list[int]:
        tokens = random.integers(0, vocabulary, random.integers(1, env.max_tokens + 1)).tolist()
        return [*tokens[:-1], env.stop_ids[0]] if random.random() < 0.5 else tokens

    return act
