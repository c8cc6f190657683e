"""Common parts of pure environments: special tokens, padding, absorbing states, splits by a hash.

An environment is an `Env` (see `contracts`): pytrees and pure functions of one example, so that a whole rollout
compiles, and vmaps over trajectories, seeds and settings.

`draw_task` draws a task of a split: its *combination*, a short row of integers (such as template, operators and
letters), is hashed, and the hash alone decides its split, 8 : 1 : 1. So no combination is in two splits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.contracts import Env, Observation, Step
from flowgrpo.types import BadInput, PyTree, Trajectories

PAD, END = 0, 1
SPECIAL = ("<pad>", "<end>")  # the first words of every environment
SPLITS = ("train", "validation", "test")
SPLIT_STARTS = (0, 8, 9, 10)  # of ten hash values, train has eight


# Tokens and states ------------------------------------------------------------------------------------


def pad_tokens(tokens: Sequence[Array | int], size: int) -> Array:
    """The tokens at the start of `size` slots, and padding after them."""
    if len(tokens) > size:
        raise BadInput(f"{len(tokens)} tokens do not fit {size} slots: raise the size in fg.Sizes, or give fewer")
    row = jnp.stack([jnp.asarray(token, jnp.int32) for token in tokens])
    return jnp.pad(row, (0, size - len(row)))


def absorbing(step: Callable[..., tuple[Any, Step]]) -> Callable[..., tuple[Any, Step]]:
    """`step` for states with a field `done`: a finished state stays the same, with no observation and no reward."""

    def absorb(state, tokens: Array, length: Array) -> tuple[Any, Step]:
        next_state, result = step(state, tokens, length)
        empty = Step(
            observation=Observation(
                jnp.zeros_like(result.observation.tokens), jnp.zeros_like(result.observation.length)
            ),
            reward=jnp.zeros_like(result.reward),
            done=jnp.ones_like(result.done),
            correct=state.correct,
            tool=jnp.full_like(result.tool, -1),
            error=jnp.zeros_like(result.error),
        )
        return select(state.done, state, next_state), select(state.done, empty, result)

    return absorb


def select(condition: Array, if_true: PyTree, if_false: PyTree) -> PyTree:
    """`jnp.where` of two pytrees."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def to_words(env: Env, tokens, length=None) -> str:
    """The tokens as a line of words, without padding."""
    ids = [int(token) for token in (tokens if length is None else tokens[: int(length)])]
    return " ".join(env.vocabulary[token] for token in ids if token != PAD)


def format_trajectory(env: Env, trajectories: Trajectories, n: int) -> str:
    """Trajectory n in words: a line `observation > action` for each turn, then how it ended."""
    chosen_tl, tokens_tl = np.asarray(trajectories.action_mask[n]), np.asarray(trajectories.tokens[n])
    lines = []
    for t in np.flatnonzero(np.asarray(trajectories.turns[n])):
        observation, action = (np.where(mask_l, tokens_tl[t], PAD) for mask_l in (~chosen_tl[t], chosen_tl[t]))
        lines.append(f"{to_words(env, observation):30} > {to_words(env, action)}")
    return "\n".join([*lines, "solved" if bool(trajectories.correct[n]) else "not solved"])


# Splits -----------------------------------------------------------------------------------------------


def split_index(split: str) -> int:
    """Index of a split in `SPLITS`; raises `BadInput` for an unknown one."""
    if split not in SPLITS:
        raise BadInput(f"split {split!r} is unknown; choose from {', '.join(SPLITS)}")
    return SPLITS.index(split)


def hash_ints(numbers: Array) -> Array:
    """Hash of a row of int32 (murmur3), as int32."""
    mixed = jnp.uint32(len(numbers))
    for number in numbers.astype(jnp.uint32):
        part = number * jnp.uint32(0xCC9E2D51)
        part = (part << 15 | part >> 17) * jnp.uint32(0x1B873593)
        mixed = mixed ^ part
        mixed = (mixed << 13 | mixed >> 19) * 5 + jnp.uint32(0xE6546B64)
    mixed = (mixed ^ mixed >> 16) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> 13) * jnp.uint32(0xC2B2AE35)
    return jax.lax.bitcast_convert_type(mixed ^ mixed >> 16, jnp.int32)


def in_split(combination: Array, split: str) -> Array:
    """Whether this combination belongs to this split."""
    index = split_index(split)
    value = hash_ints(combination) % 10
    return (value >= SPLIT_STARTS[index]) & (value < SPLIT_STARTS[index + 1])


def draw_task(key: Array, split: str, propose: Callable[[Array], Any], combination: Callable[[Any], Array]) -> Any:
    """The first of `propose(fold_in(key, 0))`, `propose(fold_in(key, 1))`, ... whose combination is in the split."""

    def next_proposal(carry):
        number, _, _ = carry
        proposal = propose(jax.random.fold_in(key, number))
        return number + 1, proposal, in_split(combination(proposal), split)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(propose, key))
    start = (jnp.uint32(0), zeros, jnp.zeros((), bool))
    return jax.lax.while_loop(lambda carry: ~carry[2], next_proposal, start)[1]
