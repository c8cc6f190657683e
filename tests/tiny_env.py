"""A small environment for tests of rollouts and learners: say the number that was shown, three times."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

import flowgrpo as fg
from flowgrpo.envs.env import END, PAD, SPECIAL, absorbing, pad_tokens, split_index

DIGITS, ROUNDS, TURNS = 4, 3, 5
ONE, AGAIN = 2, 6  # the tokens "one" and "again"


class State(struct.PyTreeNode):
    digit: jax.Array
    right: jax.Array  # how often it was said
    turn: jax.Array
    done: jax.Array
    correct: jax.Array
    key: jax.Array


def make_task(key, split):
    """A digit: the first two are for training, the others for validation and for test."""
    return jax.random.randint(key, (), *((0, 2), (2, 3), (3, 4))[split_index(split)])


def reset(key, digit):
    zero, no = jnp.int32(0), jnp.bool_(False)
    return State(digit, zero, zero, no, no, key), fg.Observation(pad_tokens([digit + ONE, AGAIN], 3), jnp.int32(2))


def step(state, tokens, length, *, rounds):
    """The digit and END is a right action; the last ends the episode. A wrong one shows another digit."""
    right = (length == 2) & (tokens[0] == state.digit + ONE) & (tokens[1] == END)
    other = jax.random.randint(jax.random.fold_in(state.key, state.turn), (), 0, DIGITS)
    digit = jnp.where(right, state.digit, other)
    count = jnp.where(right, state.right + 1, state.right)
    done = count == rounds
    following = state.replace(digit=digit, right=count, turn=state.turn + 1, done=done, correct=done)
    said = pad_tokens([jnp.where(done, PAD, digit + ONE), jnp.where(right, PAD, AGAIN)], 2)
    reward = jnp.where(done, 1.0, 0.0)
    said = fg.Observation(said, jnp.where(done, 0, jnp.where(right, 1, 2)))
    return following, fg.Step(said, reward, done, done, jnp.where(right, 0, -1), ~right)


def oracle(state):
    return pad_tokens([state.digit + ONE, END], 3), jnp.int32(2)


def demonstrate(key, state):
    """Right in two of three cases."""
    digit = jnp.where(jax.random.bernoulli(key, 2 / 3), state.digit, jax.random.randint(key, (), 0, DIGITS))
    return oracle(state.replace(digit=digit))


def tiny_env(rounds: int = ROUNDS) -> fg.Env:
    return fg.Env(
        name="tiny",
        vocabulary=(*SPECIAL, "one", "two", "three", "four", "again"),
        tools=("say",),
        sizes=fg.Sizes(prompt=3, observation=2, action=3, turns=TURNS),
        make_task=make_task,
        reset=reset,
        step=absorbing(partial(step, rounds=rounds)),
        anchor=lambda state: state.digit * 8 + state.right,
        oracle=oracle,
        demonstrate=demonstrate,
        answer=lambda digit: (pad_tokens([digit + ONE, END], 3), jnp.int32(2)),
    )
