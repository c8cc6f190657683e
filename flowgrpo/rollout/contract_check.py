"""Check the contract of host environments: raise where a rule is broken, or return what was played.

    played = check_host_env(env, tasks, vocabulary=32, do=tools.do)

Random actions are played in threads, as a rollout plays them. What may not be: a reset or step that raises, that gives
other results for the same state, action and effects, that mixes contexts that append with others, or that can't be
replayed from its record (A2). Effects of one task may differ from call to call; they are recorded.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from flowgrpo.contracts import Completion, Do, HostEnv, Request
from flowgrpo.rollout.effects import no_effects, recorded, replayed
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import Played
from flowgrpo.rollout.replay import replay
from flowgrpo.rollout.trajectory_builder import call_reset, call_step
from flowgrpo.types import BadInput, Status

Act = Callable[[np.random.Generator, Request], Sequence[int]]  # what a random policy says to a request


def check_host_env(
    env: HostEnv,
    tasks: Sequence[Any],
    *,
    vocabulary: int,
    do: Do = no_effects,
    act: Act | None = None,
    samples: int = 4,
    seed: int = 0,
) -> list[Played]:
    """Raise `BadInput` where the contract is broken; else the trajectories, `samples` of each task.

    Actions are random tokens below `vocabulary`, or what `act(generator, request)` says: give one that gets somewhere,
    so that the calls of tools and the ends are met too.
    """
    if not tasks or not env.stop_ids or min(env.turns, env.max_tokens, samples, vocabulary) < 1:
        raise BadInput(f"{env.name}: give a task, and an environment with stop_ids, turns and max_tokens of at least 1")
    if max(env.stop_ids) >= vocabulary:
        raise BadInput(f"{env.name}: stop_ids are {env.stop_ids}, but no token reaches vocabulary={vocabulary}")
    tasks = [task for task in tasks for _ in range(samples)]
    keys = jax.random.split(jax.random.key(seed), len(tasks))
    policy = _Random(act or _any_tokens(vocabulary, env))
    groups = [index // samples for index in range(len(tasks))]
    played = hosted(env, policy.submit, do=do)(tasks, keys, groups).played
    if max(policy.sizes, default=0) > env.max_tokens:
        raise BadInput(
            f"{env.name}: act said {max(policy.sizes)} tokens, but an action has at most max_tokens={env.max_tokens}"
        )
    for one in played:
        if one.status == Status.ABORTED:
            raise BadInput(f"{env.name}: task {one.task!r:.80}: {one.reason}")
        replay(env, one)
    _check_records(env, played)
    _check_values(env, tasks[0], keys[0], policy, do)
    return list(played)


def _check_records(env: HostEnv, played: Sequence[Played]) -> None:
    """Calls are of tools that the environment names, and actions end with the tokens that it names."""
    for tool in sorted({tool for one in played for tool in one.tools} - {"", *env.tools}):
        raise BadInput(f"{env.name}: step called the tool {tool!r}, but tools are {env.tools}: name it there")
    last = {int(turn.tokens[-1]) for one in played for turn in one.turns}
    if not last & set(env.stop_ids):
        raise BadInput(
            f"{env.name}: no action ended with one of stop_ids={env.stop_ids}: let act say it, or name what ends one"
        )


def _check_values(env: HostEnv, task, key, policy: "_Random", do: Do) -> None:
    """States are values: two steps from one state, with the same effects, give the same."""
    following = call_reset(env, key, task, do)
    for _ in range(env.turns):
        request = Request(following.said, key, max_tokens=env.max_tokens, stop_ids=env.stop_ids)
        action = list(policy.submit(request).result().tokens)
        noted, log = recorded(do)
        first = call_step(env, following.state, action, noted)
        again = call_step(env, following.state, action, replayed(log))
        if (first.said, first.anchor, first.step) != (again.said, again.anchor, again.step):
            raise BadInput(
                f"{env.name}: two steps from one state differ: make the state immutable, and draw from its key"
            )
        if first.step is not None and first.step.done:
            return
        following = first


class _Random:
    """An engine without a model: what it says follows from the request."""

    def __init__(self, act: Act):
        self.act = act
        self.sizes: list[int] = []  # of all that `act` said

    def submit(self, request: Request) -> Future:
        """A future that has its completion already."""
        words = np.asarray(jax.random.key_data(request.key)).tolist()
        said = list(self.act(np.random.default_rng([*words, len(request.tokens)]), request))
        self.sizes.append(len(said))
        tokens = said[: request.max_tokens]
        ended = bool(tokens) and tokens[-1] in request.stop_ids
        future: Future = Future()
        future.set_result(Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop" if ended else "length"))
        return future


def _any_tokens(vocabulary: int, env: HostEnv) -> Act:
    """Up to `max_tokens` tokens; half of the actions end with a stop token."""

    def act(random: np.random.Generator, _: Request) -> list[int]:
        tokens = random.integers(0, vocabulary, random.integers(1, env.max_tokens + 1)).tolist()
        return [*tokens[:-1], env.stop_ids[0]] if random.random() < 0.5 else tokens

    return act
