"""Check the contract of pure environments (E1): `check_env` raises for the first broken rule, or returns success rates.

    metrics = check_env(my_env())        {"oracle": 1.0, "demonstrations": 0.31, "random": 0.0, "turns": 2.0}

It plays episodes by the oracle, by demonstrations, by random tokens and by garbage, on tasks of every split. It can't
tell whether splits share tasks: what makes two tasks the same is known to the environment alone.
"""

import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.contracts import Env
from flowgrpo.envs.env import END, PAD, SPECIAL, SPLITS, to_words
from flowgrpo.envs.play import PLAYERS, Act, Episode, play_episode
from flowgrpo.types import BadInput

DTYPES = {"reward": "float32", "done": "bool", "correct": "bool", "tool": "int32", "error": "bool"}
FUNCTIONS = ("make_task", "reset", "step", "oracle", "demonstrate", "anchor")
TRACER_ERRORS = {  # what a function of Python values does with an array, and what to do instead
    jax.errors.TracerBoolConversionError: "decides on an array with a Python if: use jnp.where",
    jax.errors.TracerIntegerConversionError: "indexes a Python value with an array: make an array of that value",
    jax.errors.TracerArrayConversionError: "gives an array to NumPy: use jax.numpy",
}
DEMONSTRATED_SUCCESS = (0.05, 0.9)  # of demonstrations, so that a warm start leaves something to learn


def check_env(env: Env, *, episodes: int = 64, seed: int = 0) -> dict[str, float]:
    """Raise `BadInput` if the contract is broken; returns the success rate of each player, and the oracle's mean turns.

    Warns if demonstrations solve so many or so few tasks that nothing is left, or given, to learn.
    """
    _check_words(env)
    keys = jax.random.split(jax.random.key(seed), episodes)
    for split in SPLITS:
        _traced(env, "make_task", keys[0], split=split)
    tasks = {split: jax.jit(jax.vmap(lambda key, split=split: env.make_task(key, split)))(keys) for split in SPLITS}
    train, held_out = tasks[SPLITS[0]], SPLITS[1:]
    _check_shapes(env, _first(train), keys[0])

    def play_as(player, key: Array, task) -> Episode:
        """An episode by the player of this index, which is data so that one program serves all."""

        def act(env: Env, key: Array, state) -> tuple:
            actions = [act(env, key, state) for act in ALL_PLAYERS.values()]
            return jax.tree.map(lambda *choices: jnp.stack(choices)[player], *actions)

        return play_episode(key, task, env, act)

    run = jax.jit(jax.vmap(play_as, in_axes=(None, 0, 0)))
    episodes_by = {name: _to_numpy(run(index, keys, train)) for index, name in enumerate(ALL_PLAYERS)}
    for name, batch in episodes_by.items():
        _check_episodes(env, batch, name)
    repeated = _to_numpy(run(RANDOM, keys, train))
    _must(env, _equal(episodes_by["random"], repeated), "the same keys gave other episodes")
    alone = _to_numpy(jax.jit(play_as)(RANDOM, *_first((keys, train))))
    _must(env, _equal(_first(episodes_by["random"]), alone), "an episode alone differs from the same one in a vmap")
    oracle = {SPLITS[0]: episodes_by["oracle"]}
    oracle |= {split: _to_numpy(run(ORACLE, keys, tasks[split])) for split in held_out}
    for split, batch in oracle.items():
        _check_oracle(env, batch, split)
        _check_answer(env, batch)
    success = {name: float(batch.state.correct.mean()) for name, batch in episodes_by.items()}
    _must(env, success.pop("garbage") == 0, "an action of arbitrary integers solved a task: only words may count")
    low, high = DEMONSTRATED_SUCCESS
    if not low <= success["demonstrations"] <= high:
        warnings.warn(
            f"{env.name}: demonstrations solve {success['demonstrations']:.0%}, but training needs groups with both "
            f"outcomes: make them solve {low:.0%} to {high:.0%}",
            stacklevel=2,
        )
    return success | {"turns": float(episodes_by["oracle"].live.sum(axis=1).mean())}


def play_garbage(env: Env, key: Array, state) -> tuple:  # noqa: ARG001
    """Arbitrary integers of arbitrary number, most of which are no words."""
    size_key, token_key = jax.random.split(key)
    tokens = jax.random.randint(token_key, (env.sizes.action,), -3, 4 * len(env.vocabulary))
    return tokens, jax.random.randint(size_key, (), 0, env.sizes.action + 1)


ALL_PLAYERS: dict[str, Act] = {**PLAYERS, "garbage": play_garbage}
ORACLE, RANDOM = (list(ALL_PLAYERS).index(name) for name in ("oracle", "random"))


def _must(env: Env, holds: Any, rule: str) -> None:
    if not bool(holds):
        raise BadInput(f"{env.name}: {rule}")


def _check_words(env: Env) -> None:
    for name in FUNCTIONS:
        function = getattr(env, name)
        _must(env, callable(function), f"{name} is {function!r:.80}, but must be a function; only anchor is optional")
    words = env.vocabulary
    _must(env, words[: len(SPECIAL)] == SPECIAL, f"words begin with {words[:2]}, but must begin with {SPECIAL}")
    _must(env, len(set(words)) == len(words), "a word is there twice")


def _check_shapes(env: Env, task, key: Array) -> None:
    """Check that tokens are rows of int32 of the sizes in `sizes`, and scalars of the dtypes of a `Step`."""
    state, prompt = _traced(env, "reset", key, task)
    _must(env, hasattr(state, "done") and hasattr(state, "correct"), "a state needs the fields done and correct")
    action = _traced(env, "oracle", state)
    next_state, step = _traced(env, "step", state, *action)
    is_same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, next_state)
    _must(env, jax.tree.all(is_same), "step returns a state of other shapes or dtypes than its argument")
    rows = {
        "the prompt": (prompt, env.sizes.prompt),
        "an observation": (step.observation, env.sizes.observation),
        "an action of the oracle": (action, env.sizes.action),
        "a demonstrated action": (_traced(env, "demonstrate", key, state), env.sizes.action),
    }
    for name, ((tokens, length), size) in rows.items():
        actual = f"{tokens.dtype}{list(tokens.shape)} and {length.dtype}{list(length.shape)}"
        expected = f"int32[{size}] and int32[]"
        _must(env, actual == expected, f"{name} is {actual}, but by sizes it must be {expected}")
    scalars = {f"Step.{name}": (getattr(step, name), dtype) for name, dtype in DTYPES.items()}
    scalars["the anchor"] = (_traced(env, "anchor", state), "int32")
    for name, (leaf, dtype) in scalars.items():
        is_right = (str(leaf.dtype), leaf.shape) == (dtype, ())
        _must(env, is_right, f"{name} is {leaf.dtype}{list(leaf.shape)}, not {dtype}[]")


def _traced(env: Env, name: str, *arguments, **settings):
    """Shapes of the result of one of the functions; raises `BadInput` with its line if it can't be traced."""
    try:
        return jax.eval_shape(lambda *arguments: getattr(env, name)(*arguments, **settings), *arguments)
    except tuple(TRACER_ERRORS) as error:
        jax_folder = jax.__file__.removesuffix("__init__.py")
        frames = traceback.extract_tb(error.__traceback__)
        frame = [frame for frame in frames if not frame.filename.startswith(jax_folder)][-1]
        line = f"{frame.filename}:{frame.lineno}: {frame.line}"
        raise BadInput(f"{env.name}: {name} {TRACER_ERRORS[type(error)]} ({line})") from None


def _check_oracle(env: Env, episodes: Episode, split: str) -> None:
    solved, unended = episodes.state.correct.mean(), 1 - episodes.step.done[:, -1].mean()
    more = f", or needs more than turns={env.sizes.turns}: {unended:.0%} of its episodes ended at the turn limit"
    rule = f"the oracle solves {solved:.0%} of the tasks of {split}: it must know the best action"
    _must(env, solved >= 0.99, rule + (more if unended else ""))


def _check_answer(env: Env, episodes: Episode) -> None:
    """Check that the oracle ends the tasks that it solves with the action of `Env.answer`."""
    if env.answer is None:
        return
    answers = zip(*_to_numpy(jax.jit(jax.vmap(env.answer))(episodes.task)), strict=True)
    for n, (answer, last) in enumerate(zip(answers, episodes.live.sum(axis=1) - 1, strict=True)):
        action = to_words(env, episodes.tokens[n, last], episodes.length[n, last])
        words = to_words(env, *answer)
        rule = f"answer is {words!r} where the oracle ends a task by {action!r}: it must be that action"
        _must(env, words == action or not episodes.state.correct[n], rule)


def _check_episodes(env: Env, episodes: Episode, player: str) -> None:
    """Check the rules for all episodes, and those for some players only."""
    step, live, over = episodes.step, episodes.live, ~episodes.live
    ends = live & step.done
    correct = (step.correct & ends).any(axis=1)
    rules: dict[str, Callable[[], Any]] = {
        "an observation has other words than those of the environment, or no padding after its length": lambda: (
            _is_row(env, *episodes.prompt) and _is_row(env, *step.observation)
        ),
        "an episode that is not over has an empty observation": lambda: (
            (episodes.prompt.length > 0).all() and (step.observation.length > 0)[live & ~step.done].all()
        ),
        "an episode that is over has an observation: the last one must have length 0": lambda: (
            not step.observation.length[ends].any()
        ),
        "a reward is not finite": lambda: np.isfinite(step.reward).all(),
        "a tool's number is none of tools": lambda: ((step.tool >= -1) & (step.tool < len(env.tools))).all(),
        "correct is true before the end": lambda: not step.correct[~step.done].any(),
        "there is a reward before the end, but by_turn is not set": lambda: (
            env.by_turn or not step.reward[live & ~ends].any()
        ),
        "a malformed action is correct or has a reward": lambda: (
            not (step.error & live & (step.correct | (step.reward > 0))).any()
        ),
        "a finished state does not absorb (wrap step in envs.env.absorbing)": lambda: (
            step.done[over].all()
            and (step.tool[over] == -1).all()
            and not any(field[over].any() for field in (step.reward, step.error, *step.observation))
        ),
        "Step.correct is true where state.correct is not": lambda: not (correct & ~episodes.state.correct).any(),
        "state.correct is true where Step.correct is not": lambda: not (episodes.state.correct & ~correct).any(),
        f"an action of the oracle or a demonstration has a token that is none of the {len(env.vocabulary)} words, or "
        "no padding after its length": lambda: player in ("random", "garbage") or _is_row(env, *_actions(episodes)),
        "the oracle or a demonstration does not end with <end> at its length": lambda: (
            player in ("random", "garbage") or _end_at_length(episodes)
        ),
        "the oracle makes errors": lambda: player != "oracle" or not step.error[live].any(),
        "garbage is no error": lambda: player != "garbage" or step.error[live & _malformed(env, episodes)].all(),
    }
    for rule, holds in rules.items():
        _must(env, holds(), f"{rule} (episodes by {player})")


def _is_row(env: Env, tokens, length) -> bool:
    tokens, length = np.asarray(tokens), np.asarray(length)
    is_used = np.arange(tokens.shape[-1]) < length[..., None]
    is_word = (tokens > PAD) & (tokens < len(env.vocabulary))
    return bool(
        (length >= 0).all() and (length <= tokens.shape[-1]).all() and np.where(is_used, is_word, tokens == PAD).all()
    )


def _actions(episodes: Episode) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and lengths of the actions of turns that took place."""
    return np.where(episodes.live[..., None], episodes.tokens, PAD), np.where(episodes.live, episodes.length, 0)


def _end_at_length(episodes: Episode) -> bool:
    is_last = np.arange(episodes.tokens.shape[-1]) == episodes.length[..., None] - 1
    return bool(((episodes.tokens == END) == is_last).all())


def _malformed(env: Env, episodes: Episode) -> np.ndarray:
    """Actions with a token that is no word, or without END at the end."""
    tokens, length = np.asarray(episodes.tokens), np.asarray(episodes.length)[..., None]
    is_used = np.arange(tokens.shape[-1]) < length
    is_word = (tokens > PAD) & (tokens < len(env.vocabulary))
    last = np.take_along_axis(tokens, np.maximum(length - 1, 0), axis=-1)[..., 0]
    return (is_used & ~is_word).any(axis=-1) | (length[..., 0] == 0) | (last != END)


def _equal(tree, other) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, tree, other))


def _first(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _to_numpy(tree):
    is_key = partial(jnp.issubdtype, arg2=jax.dtypes.prng_key)
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf), tree)
