"""Common parts of pure environments: special tokens, tokens in slots, states that absorb, splits by a hash.

An environment is an `Env` (see `contracts`): pytrees and pure functions of one example, so that a whole rollout
compiles, and vmaps over trajectories, seeds and settings.

`draw_task` makes a task of a split: its *combination*, a short row of integers (say template, operators and letters),
is hashed, and the hash alone says which split it belongs to, 8 : 1 : 1. So no combination is in two splits.
"""

from collections.abc import Callable, Sequence
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
STARTS = (0, 8, 9, 10)  # of ten hands, train is dealt eight


# Tokens and states ------------------------------------------------------------------------------------


def pad_tokens(tokens: Sequence[Array | int], size: int) -> Array:
    """These tokens at the start of `size` slots, padding after them."""
    if len(tokens) > size:
        raise BadInput(f"{len(tokens)} tokens do not fit {size} slots: raise what fg.Sizes says, or say less")
    row = jnp.stack([jnp.asarray(token, jnp.int32) for token in tokens])
    return jnp.pad(row, (0, size - len(row)))


def absorbing(step: Callable[..., tuple[Any, Step]]) -> Callable[..., tuple[Any, Step]]:
    """`step` for states with a field `done`: one that is finished stays as it is, says nothing and pays nothing."""

    def absorb(state, tokens: Array, length: Array) -> tuple[Any, Step]:
        following, now = step(state, tokens, length)
        quiet = Step(
            observation=Observation(jnp.zeros_like(now.observation.tokens), jnp.zeros_like(now.observation.length)),
            reward=jnp.zeros_like(now.reward),
            done=jnp.ones_like(now.done),
            correct=state.correct,
            tool=jnp.full_like(now.tool, -1),
            error=jnp.zeros_like(now.error),
        )
        return select(state.done, state, following), select(state.done, quiet, now)

    return absorb


def select(first: Array, one: Any, other: Any) -> Any:
    """The one tree where `first` is true, else the other."""
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)


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


# Splits -----------------------------------------------------------------------------------------------


def split_index(split: str) -> int:
    """The number of a split, or `BadInput` that lists them."""
    if split not in SPLITS:
        raise BadInput(f"split {split!r} is unknown; choose from {', '.join(SPLITS)}")
    return SPLITS.index(split)


def hashed(numbers: Array) -> Array:
    """A row of int32 in 32 well mixed bits (murmur3), as int32."""
    mixed = jnp.uint32(len(numbers))
    for number in numbers.astype(jnp.uint32):
        part = number * jnp.uint32(0xCC9E2D51)
        part = (part << 15 | part >> 17) * jnp.uint32(0x1B873593)
        mixed = mixed ^ part
        mixed = (mixed << 13 | mixed >> 19) * 5 + jnp.uint32(0xE6546B64)
    mixed = (mixed ^ mixed >> 16) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> 13) * jnp.uint32(0xC2B2AE35)
    return jax.lax.bitcast_convert_type(mixed ^ mixed >> 16, jnp.int32)


def dealt(combination: Array, split: str) -> Array:
    """Say whether the hash deals this combination to this split."""
    index = split_index(split)
    hand = hashed(combination) % 10
    return (hand >= STARTS[index]) & (hand < STARTS[index + 1])


def draw_task(key: Array, split: str, propose: Callable[[Array], Any], combination: Callable[[Any], Array]) -> Any:
    """The first thing that `propose` makes of this key's numbered keys and the hash deals to the split."""

    def another(tried):
        tries, _, _ = tried
        proposal = propose(jax.random.fold_in(key, tries))
        return tries + 1, proposal, dealt(combination(proposal), split)

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(propose, key))
    start = (jnp.uint32(0), nothing, jnp.zeros((), bool))
    return jax.lax.while_loop(lambda tried: ~tried[2], another, start)[1]
