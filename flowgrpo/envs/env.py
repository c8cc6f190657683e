"""Common parts of pure environments: the two special tokens, finished states that absorb, tokens in fixed slots.

An environment is an `Env` (see `contracts`): pytrees and pure functions of one example, so that a whole rollout
compiles, and vmaps over trajectories, seeds and settings.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.contracts import Env, Observation, Step
from flowgrpo.types import BadInput, Trajectories

PAD, END = 0, 1
SPECIAL = ("<pad>", "<end>")  # the first words of every environment
SPLITS = ("train", "validation", "test")


def split_index(split: str) -> int:
    """The number of a split, or `BadInput` that lists them."""
    if split not in SPLITS:
        raise BadInput(f"split {split!r} is unknown; choose from {', '.join(SPLITS)}")
    return SPLITS.index(split)


def fill(tokens: Sequence[Array | int], size: int) -> Array:
    """These tokens at the start of `size` slots, padding after them."""
    if len(tokens) > size:
        raise BadInput(f"{len(tokens)} tokens do not fit {size} slots: raise what fg.Sizes says, or say less")
    row = jnp.stack([jnp.asarray(token, jnp.int32) for token in tokens])
    return jnp.pad(row, (0, size - len(row)))


def absorbing(step: Callable[..., tuple[Any, Step]]) -> Callable[..., tuple[Any, Step]]:
    """`step` for states with a field `done`: one that is finished stays as it is, says nothing and pays nothing."""
    return partial(_absorb, step=step)


def _absorb(state, tokens: Array, length: Array, *, step) -> tuple[Any, Step]:
    following, now = step(state, tokens, length)
    quiet = Step(
        observation=Observation(jnp.zeros_like(now.observation.tokens), jnp.zeros_like(now.observation.length)),
        reward=jnp.zeros_like(now.reward),
        done=jnp.ones_like(now.done),
        correct=state.correct,
        tool=jnp.full_like(now.tool, -1),
        error=jnp.zeros_like(now.error),
    )
    pick = partial(jnp.where, state.done)
    return jax.tree.map(pick, state, following), jax.tree.map(pick, quiet, now)


def in_words(env: Env, tokens, length=None) -> str:
    """Tokens as a line of words; without padding."""
    ids = [int(token) for token in (tokens if length is None else tokens[: int(length)])]
    return " ".join(env.words[token] for token in ids if token != PAD)


def story(env: Env, trajectories: Trajectories, n: int) -> str:
    """Trajectory n in words, a line a turn: what was said, and after the arrow what was chosen; then how it ended."""
    chosen_tl, tokens_tl = np.asarray(trajectories.actions[n]), np.asarray(trajectories.tokens[n])
    lines = []
    for t in np.flatnonzero(np.asarray(trajectories.turns[n])):
        said, chose = (np.where(mask_l, tokens_tl[t], PAD) for mask_l in (~chosen_tl[t], chosen_tl[t]))
        lines.append(f"{in_words(env, said):30} > {in_words(env, chose)}")
    return "\n".join([*lines, "solved" if bool(trajectories.correct[n]) else "not solved"])
