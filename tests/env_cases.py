"""Playing pure environments in tests: each function is compiled once, over `N` examples; turns are a loop in Python."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tiny_env import tiny_env

import flowgrpo as fg
from flowgrpo.envs.env import to_words
from flowgrpo.envs.play import Episode
from flowgrpo.recipes.registry import ENVIRONMENTS
from flowgrpo.training.names import HARD_VARIANTS

N = 1024
EASIER = {name: make for name, make in ENVIRONMENTS.items() if name not in HARD_VARIANTS}
ENVS = {name: make() for name, make in {**EASIER, "tiny": tiny_env}.items()}
PLAYERS = ("oracle", "demonstrations", "random", "garbage")
TRACES: Counter[tuple[int, str]] = Counter()  # by environment and function


@cache
def batched(env: fg.Env) -> fg.Env:
    """Compile each function of an environment over `N` examples, counting its traces."""
    names = ("reset", "step", "anchor", "oracle", "demonstrate")
    jitted = {name: jax.jit(jax.vmap(partial(_counted, env, name))) for name in names}
    make_task = jax.jit(lambda keys, split: jax.vmap(partial(env.make_task, split=split))(keys), static_argnums=1)
    return env._replace(make_task=make_task, **jitted)


def _counted(env: fg.Env, name: str, *given):
    TRACES[id(env), name] += 1
    return getattr(env, name)(*given)


@cache
def keys(seed: int) -> jax.Array:
    """`N` keys."""
    return jax.random.split(jax.random.key(seed), N)


@cache
def tasks_of(env: fg.Env, split: str = "train"):
    """`N` tasks."""
    return batched(env).make_task(keys(5), split)


def to_numpy(tree):
    """Arrays of NumPy, keys as the words that they hold."""

    def leaf(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.map(leaf, tree)


def at(tree, i):
    """Example `i` of them all."""
    return jax.tree.map(lambda leaf: leaf[i], tree)


def repeated(tree):
    """One example, `N` times."""
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (N, *np.shape(leaf))), tree)


def play(env: fg.Env, act: Callable, tasks=None, *, seed: int = 0) -> Episode:
    """Play an episode of each task, where `act(keys, states) -> (tokens, length)`."""
    here, tasks = batched(env), tasks_of(env) if tasks is None else tasks
    state, prompt = here.reset(keys(seed), tasks)
    turns = []
    for t in range(env.sizes.turns):
        action = act(keys(100 * seed + t + 1), state)
        before, (state, now) = state, here.step(state, *action)
        turns.append((*to_numpy((here.anchor(before), *action)), ~np.asarray(before.done), to_numpy(now)))
    turns = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *turns)
    return Episode(*to_numpy((tasks, prompt)), *turns, to_numpy(state))


def player(env: fg.Env, name: str) -> Callable:
    """Make the `act` of one of `PLAYERS`: the oracle, demonstrations, random words, or any integers of any number."""
    rng, slots = np.random.default_rng(0), env.sizes.action

    def random_words(*_):
        return rng.integers(1, len(env.vocabulary), (N, slots), np.int32), rng.integers(1, slots + 1, N, np.int32)

    def garbage(*_):
        return rng.integers(-3, 2 * len(env.vocabulary), (N, slots), np.int32), rng.integers(0, slots + 1, N, np.int32)

    here = batched(env)
    acts = (lambda _, state: here.oracle(state), here.demonstrate, random_words, garbage)
    return dict(zip(PLAYERS, acts, strict=True))[name]


@cache
def played(env: fg.Env, name: str, split: str = "train") -> Episode:
    """The episodes of one of `PLAYERS`."""
    return play(env, player(env, name), tasks_of(env, split))


# In words ---------------------------------------------------------------------------------------------


class Talk(NamedTuple):
    """An episode in words: one more state than there are lines."""

    said: list[str]  # at first, and after each line
    best: list[str]  # by the oracle, in each state
    anchors: list[int]
    steps: list[fg.Step]
    state: object  # the last one


def row(env: fg.Env, line: str) -> tuple[np.ndarray, int]:
    """A line of words in the slots of an action, and their number."""
    tokens = [env.vocabulary.index(word) for word in line.split()]
    return np.array([*tokens, *[0] * env.sizes.action], np.int32)[: env.sizes.action], len(tokens)


def talks(env: fg.Env, task, *dialogues: Sequence[str], end: str = " <end>", seed: int = 0) -> list[Talk]:
    """Play each of these lists of lines, of a task; `end` is added to each line."""
    here = batched(env)
    state, prompt = here.reset(keys(seed), repeated(task))
    found = [Talk([to_words(env, *at(prompt, i))], [], [], [], None) for i in range(len(dialogues))]
    for t in range(max(map(len, dialogues)) + 1):
        best, anchors, now_state = to_numpy((here.oracle(state), here.anchor(state), state))
        actions = [row(env, lines[t] + end) if t < len(lines) else row(env, "") for lines in dialogues]
        tokens, lengths = (np.array([*x, *[x[0]] * (N - len(x))]) for x in zip(*actions, strict=True))
        state, now = here.step(state, tokens, lengths.astype(np.int32))
        now = to_numpy(now)
        for i, lines in enumerate(dialogues):
            if t <= len(lines):
                found[i].best.append(to_words(env, *at(best, i)))
                found[i].anchors.append(int(anchors[i]))
                found[i] = found[i]._replace(state=at(now_state, i))
            if t < len(lines):
                found[i].said.append(to_words(env, *at(now.observation, i)))
                found[i].steps.append(at(now, i))
    return found


def talk(env: fg.Env, task, *lines: str, **settings) -> Talk:
    """Play these lines."""
    return talks(env, task, lines, **settings)[0]
