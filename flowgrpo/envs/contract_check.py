"""Check the contract of pure environments (E1): `check_env` raises the first rule that is broken, or returns figures.

    figures = check_env(my_env())        {"oracle": 1.0, "demonstrations": 0.31, "random": 0.0, "turns": 2.0}

It plays episodes by the oracle, by demonstrations, by random tokens and by garbage, on tasks of every split, and raises
`BadInput` with the rule that the first failure breaks. Splits that share tasks it can't see: what makes two tasks the
same is known to the environment alone.
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
from flowgrpo.envs.env import END, PAD, SPECIAL, SPLITS, in_words
from flowgrpo.envs.play import PLAYERS, Act, Play, play_episode
from flowgrpo.types import BadInput

KINDS = {"reward": "float32", "done": "bool", "correct": "bool", "tool": "int32", "error": "bool"}
FUNCTIONS = ("make_task", "reset", "step", "oracle", "demonstrate", "anchor")
UNTRACEABLE = {  # what a function of Python values does with an array, and what to do instead
    jax.errors.TracerBoolConversionError: "decides on an array with a Python if: use jnp.where",
    jax.errors.TracerIntegerConversionError: "indexes a Python value with an array: make an array of that value",
    jax.errors.TracerArrayConversionError: "gives an array to NumPy: use jax.numpy",
}
IMITABLE = (0.05, 0.9)  # what demonstrations should solve, so that a warm start leaves something to learn


def check_env(env: Env, *, episodes: int = 64, seed: int = 0) -> dict[str, float]:
    """Raise `BadInput` where the contract is broken; else what share of episodes each player solves, and the turns of
    the oracle. Warn where demonstrations solve so many or so few that nothing is left, or given, to learn.
    """
    _check_words(env)
    keys = jax.random.split(jax.random.key(seed), episodes)
    for split in SPLITS:
        _traced(env, "make_task", keys[0], split=split)
    tasks = {split: jax.jit(jax.vmap(lambda key, split=split: env.make_task(key, split)))(keys) for split in SPLITS}
    train, held_out = tasks[SPLITS[0]], SPLITS[1:]
    _check_shapes(env, _first(train), keys[0])

    def play_as(player, key: Array, task) -> Play:
        return _play_as(player, key, task, env)

    run = jax.jit(jax.vmap(play_as, in_axes=(None, 0, 0)))
    played = {name: _to_numpy(run(number, keys, train)) for number, name in enumerate(EVERYBODY)}
    for name, plays in played.items():
        _check_play(env, plays, name)
    _must(env, _same(played["random"], _to_numpy(run(RANDOM, keys, train))), "the same keys gave other episodes")
    alone = _to_numpy(jax.jit(play_as)(RANDOM, *_first((keys, train))))
    _must(env, _same(_first(played["random"]), alone), "an episode alone differs from the same one in a vmap")
    oracle = {SPLITS[0]: played["oracle"]} | {split: _to_numpy(run(ORACLE, keys, tasks[split])) for split in held_out}
    for split, plays in oracle.items():
        _check_oracle(env, plays, split)
        _check_answer(env, plays)
    solved = {name: float(plays.state.correct.mean()) for name, plays in played.items()}
    _must(env, solved.pop("garbage") == 0, "an action of arbitrary integers solved a task: only words may count")
    if not IMITABLE[0] <= solved["demonstrations"] <= IMITABLE[1]:
        warnings.warn(
            f"{env.name}: demonstrations solve {solved['demonstrations']:.0%}, but training needs groups with both "
            f"outcomes: make them solve {IMITABLE[0]:.0%} to {IMITABLE[1]:.0%}",
            stacklevel=2,
        )
    return solved | {"turns": float(played["oracle"].live.sum(axis=1).mean())}


def _play_as(player, key: Array, task, env: Env) -> Play:
    """An episode by the player of this number, which is data so that one program serves all."""

    def act(env: Env, key: Array, state) -> tuple:
        actions = [act(env, key, state) for act in EVERYBODY.values()]
        return jax.tree.map(lambda *choices: jnp.stack(choices)[player], *actions)

    return play_episode(key, task, env, act)


def play_garbage(env: Env, key: Array, state) -> tuple:  # noqa: ARG001
    """Any integers of any number, most of them no words."""
    size_key, token_key = jax.random.split(key)
    tokens = jax.random.randint(token_key, (env.sizes.action,), -3, 4 * len(env.words))
    return tokens, jax.random.randint(size_key, (), 0, env.sizes.action + 1)


EVERYBODY: dict[str, Act] = {**PLAYERS, "garbage": play_garbage}
ORACLE, RANDOM = (list(EVERYBODY).index(name) for name in ("oracle", "random"))


def _must(env: Env, holds: Any, rule: str) -> None:
    if not bool(holds):
        raise BadInput(f"{env.name}: {rule}")


def _check_words(env: Env) -> None:
    for name in FUNCTIONS:
        given = getattr(env, name)
        _must(env, callable(given), f"{name} is {given!r:.80}, but must be a function; only anchor may be left out")
    words = env.words
    _must(env, words[: len(SPECIAL)] == SPECIAL, f"words begin with {words[:2]}, but must begin with {SPECIAL}")
    _must(env, len(set(words)) == len(words), "a word is there twice")


def _check_shapes(env: Env, task, key: Array) -> None:
    """Rows of int32 in the slots that `sizes` states, scalars of the dtypes of a `Step`."""
    state, prompt = _traced(env, "reset", key, task)
    _must(env, hasattr(state, "done") and hasattr(state, "correct"), "a state needs the fields done and correct")
    action = _traced(env, "oracle", state)
    after, now = _traced(env, "step", state, *action)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, after)
    _must(env, jax.tree.all(same), "step gives a state of other shapes or dtypes than it is given")
    rows = {
        "the prompt": (prompt, env.sizes.prompt),
        "an observation": (now.observation, env.sizes.observation),
        "an action of the oracle": (action, env.sizes.action),
        "a demonstrated action": (_traced(env, "demonstrate", key, state), env.sizes.action),
    }
    for name, ((tokens, length), size) in rows.items():
        found = f"{tokens.dtype}{list(tokens.shape)} and {length.dtype}{list(length.shape)}"
        right = f"int32[{size}] and int32[]"
        _must(env, found == right, f"{name} is {found}, but by sizes it must be {right}")
    scalars = {f"Step.{name}": (getattr(now, name), kind) for name, kind in KINDS.items()}
    scalars["the anchor"] = (_traced(env, "anchor", state), "int32")
    for name, (leaf, kind) in scalars.items():
        _must(
            env, (str(leaf.dtype), leaf.shape) == (kind, ()), f"{name} is {leaf.dtype}{list(leaf.shape)}, not {kind}[]"
        )


def _traced(env: Env, name: str, *given, **settings):
    """The shapes that one of the functions gives; `BadInput` with its line where it can't be traced."""
    try:
        return jax.eval_shape(lambda *given: getattr(env, name)(*given, **settings), *given)
    except tuple(UNTRACEABLE) as error:
        of_jax = jax.__file__.removesuffix("__init__.py")
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(of_jax)]
        line = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}"
        raise BadInput(f"{env.name}: {name} {UNTRACEABLE[type(error)]} ({line})") from None


def _check_oracle(env: Env, plays: Play, split: str) -> None:
    solved, unended = plays.state.correct.mean(), 1 - plays.step.done[:, -1].mean()
    more = f", or needs more than turns={env.sizes.turns}: {unended:.0%} of its episodes ended at the turn limit"
    rule = f"the oracle solves {solved:.0%} of the tasks of {split}: it must know the best action"
    _must(env, solved >= 0.99, rule + (more if unended else ""))


def _check_answer(env: Env, plays: Play) -> None:
    """Check that the oracle ends the tasks that it solves with the answer that is given for them."""
    if env.answer is None:
        return
    answers = zip(*_to_numpy(jax.jit(jax.vmap(env.answer))(plays.task)), strict=True)
    for n, (answer, last) in enumerate(zip(answers, plays.live.sum(axis=1) - 1, strict=True)):
        ended = in_words(env, plays.tokens[n, last], plays.length[n, last])
        given = in_words(env, *answer)
        rule = f"answer is {given!r} where the oracle ends a task by {ended!r}: it must be that action"
        _must(env, given == ended or not plays.state.correct[n], rule)


def _check_play(env: Env, plays: Play, player: str) -> None:
    """Check the rules that bind every episode, whoever plays it, and those that bind only some players."""
    step, live, over = plays.step, plays.live, ~plays.live
    ends = live & step.done
    right = (step.correct & ends).any(axis=1)
    rules: dict[str, Callable[[], Any]] = {
        "an observation has other words than those of the environment, or no padding after its length": lambda: (
            _is_row(env, *plays.prompt) and _is_row(env, *step.observation)
        ),
        "an episode that goes on says nothing": lambda: (
            (plays.prompt.length > 0).all() and (step.observation.length > 0)[live & ~step.done].all()
        ),
        "an episode that is over still speaks: its last observation must have length 0": lambda: (
            not step.observation.length[ends].any()
        ),
        "a reward is not finite": lambda: np.isfinite(step.reward).all(),
        "a tool's number is none of tools": lambda: ((step.tool >= -1) & (step.tool < len(env.tools))).all(),
        "correct is true before the end": lambda: not step.correct[~step.done].any(),
        "a reward is paid before the end, but by_turn is not set": lambda: (
            env.by_turn or not step.reward[live & ~ends].any()
        ),
        "a malformed action is correct or is paid": lambda: (
            not (step.error & live & (step.correct | (step.reward > 0))).any()
        ),
        "a finished state does not absorb (wrap step in envs.env.absorbing)": lambda: (
            step.done[over].all()
            and (step.tool[over] == -1).all()
            and not any(field[over].any() for field in (step.reward, step.error, *step.observation))
        ),
        "Step.correct is true where state.correct is not": lambda: not (right & ~plays.state.correct).any(),
        "state.correct is true where Step.correct is not": lambda: not (plays.state.correct & ~right).any(),
        f"the oracle or a demonstration says what is none of the {len(env.words)} words, or has no padding after its "
        "length": lambda: player in ("random", "garbage") or _is_row(env, *_spoken(plays)),
        "the oracle or a demonstration does not end with <end> at its length": lambda: (
            player in ("random", "garbage") or _ends(plays)
        ),
        "the oracle makes errors": lambda: player != "oracle" or not step.error[live].any(),
        "garbage is no error": lambda: player != "garbage" or step.error[live & _malformed(env, plays)].all(),
    }
    for rule, holds in rules.items():
        _must(env, holds(), f"{rule} (episodes by {player})")


def _is_row(env: Env, tokens, length) -> bool:
    tokens, length = np.asarray(tokens), np.asarray(length)
    used = np.arange(tokens.shape[-1]) < length[..., None]
    known = (tokens > PAD) & (tokens < len(env.words))
    return bool(
        (length >= 0).all() and (length <= tokens.shape[-1]).all() and np.where(used, known, tokens == PAD).all()
    )


def _spoken(plays: Play) -> tuple[np.ndarray, np.ndarray]:
    """The actions of turns that took place."""
    return (np.where(plays.live[..., None], plays.tokens, PAD), np.where(plays.live, plays.length, 0))


def _ends(plays: Play) -> bool:
    last = np.arange(plays.tokens.shape[-1]) == plays.length[..., None] - 1
    return bool(((plays.tokens == END) == last).all())


def _malformed(env: Env, plays: Play) -> np.ndarray:
    """Actions that hold what is no word, or don't end with END."""
    tokens, length = np.asarray(plays.tokens), np.asarray(plays.length)[..., None]
    used = np.arange(tokens.shape[-1]) < length
    known = (tokens > PAD) & (tokens < len(env.words))
    last = np.take_along_axis(tokens, np.maximum(length - 1, 0), axis=-1)[..., 0]
    return (used & ~known).any(axis=-1) | (length[..., 0] == 0) | (last != END)


def _same(one, other) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), one, other))


def _first(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _to_numpy(tree):
    is_key = partial(jnp.issubdtype, arg2=jax.dtypes.prng_key)
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf), tree)
