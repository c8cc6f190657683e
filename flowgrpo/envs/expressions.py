"""Expressions over letters, the tasks of `arithmetic`: how they are drawn, and in which order they are worked out.

A plan is a fixed list of tool calls, some of which are wanted. The oracle's plan and a flawed demonstration's come from
the same function, and differ in the `Habits` that it is given.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from flowgrpo.envs.deal import draw
from flowgrpo.envs.env import PAD, SPECIAL

TOOLS = ("lookup", "add", "sub", "mul")
LETTERS = "abcdefgh"  # up to four are operands, and each of the other four may be where one of these points
WORDS = (*SPECIAL, *TOOLS, "answer", "error", "(", ")", "+", "-", "*", *LETTERS)
LOOKUP, ADD, SUB, MUL, ANSWER, ERROR, OPEN, CLOSE, PLUS = range(len(SPECIAL), len(SPECIAL) + 9)
LETTER, NUMBER = WORDS.index(LETTERS[0]), len(WORDS)  # tokens of the first letter, and of 0

TEMPLATES = ("( x o y ) o z", "x o ( y o z )", "x o y o z", "( x o y ) o ( z o w )")
OPERANDS = np.array([3, 3, 3, 4], np.int32)  # by template
BY_PRECEDENCE, STAR = 2, 2  # the template without brackets, and the operator that goes first in it
MOST_LOOKUPS = 5
POINTER = 3  # one operand in so many is a pointer

# An order of work: (operator, left, right) for each of up to three operations, where 0 .. 3 are operands and
# 4 .. 6 earlier results. To each order there is a wrong one of the same length.
LEFT, RIGHT, PAIRS, CHAIN = range(4)
NONE = (0, 0, 0)
ORDERS = np.array(
    [
        [(0, 0, 1), (1, 4, 2), NONE],
        [(1, 1, 2), (0, 0, 4), NONE],
        [(0, 0, 1), (2, 2, 3), (1, 4, 5)],
        [(0, 0, 1), (1, 4, 2), (2, 5, 3)],
    ],
    np.int32,
)
OWN = np.array([LEFT, RIGHT, LEFT, PAIRS], np.int32)  # by template; the third one's depends on its operators
WRONG = np.array([RIGHT, LEFT, CHAIN, PAIRS], np.int32)  # by order


class Expression(struct.PyTreeNode):
    """A task. Operators count from 0 (+, -, *) and letters from 0; what a template doesn't use is 0 or ignored."""

    template: Array
    operators: Array  # 3
    letters: Array  # 4 operands, then where each of them may point
    points: Array  # 4: the operand holds a pointer
    holds: Array  # by letter: the token that a lookup shows
    answer: Array


class Habits(NamedTuple):
    """Choices that a plan depends on, beside the task."""

    order: Array
    swaps: Array  # 3: the operation's operands are swapped
    strays: Array  # 4: the operand's pointer is followed to a wrong letter


class Plan(NamedTuple):
    """Calls in the order in which they are to be made, and the answer after them."""

    calls: Array  # 11 x 3 tokens: tool, first and second argument (PAD where there is none)
    wanted: Array  # 11
    answer: Array


def _layouts() -> np.ndarray:
    """For each template, indices into (padding, brackets, three operators, four operands)."""
    rows = np.zeros((len(TEMPLATES), max(len(text.split()) for text in TEMPLATES)), np.int32)
    for row, text in zip(rows, TEMPLATES, strict=True):
        operators = iter((3, 4, 5))
        for place, word in enumerate(text.split()):
            row[place] = next(operators) if word == "o" else {"(": 1, ")": 2}.get(word) or 6 + "xyzw".index(word)
    return rows


LAYOUTS = _layouts()


def write(task: Expression) -> tuple[Array, Array]:
    """`(tokens, length)` of the expression."""
    brackets = jnp.array([PAD, OPEN, CLOSE], jnp.int32)
    parts = jnp.concatenate([brackets, PLUS + task.operators, LETTER + task.letters[:4]])
    tokens = parts[jnp.asarray(LAYOUTS)[task.template]]
    return tokens, jnp.sum(tokens != PAD, dtype=jnp.int32)


def combination(task: Expression) -> Array:
    """Collect the numbers that decide the split, and that no two splits share: template, operators, operand letters."""
    letters = jnp.where(jnp.arange(4) < jnp.asarray(OPERANDS)[task.template], task.letters[:4], -1)
    return jnp.concatenate([task.template[None], task.operators, letters])


def propose(key: Array) -> Expression:
    """Any expression; nothing is behind its letters yet."""
    bits = jax.random.bits(key, (4 + len(LETTERS),))
    template = (bits[0] % len(TEMPLATES)).astype(jnp.int32)
    used = jnp.arange(1, 4) < jnp.asarray(OPERANDS)[template]
    operators = jnp.where(used, (bits[1:4] % 3).astype(jnp.int32), 0)
    letters = jnp.argsort(bits[4:]).astype(jnp.int32)
    return Expression(
        template, operators, letters, jnp.zeros(4, bool), jnp.zeros(len(LETTERS), jnp.int32), jnp.int32(0)
    )


def make_task(key: Array, split: str, *, base: int) -> Expression:
    """An expression of the split, with fresh numbers and pointers behind its letters."""
    draw_key, hide_key = jax.random.split(key)
    task = draw(draw_key, split, propose, combination)
    operands = jnp.asarray(OPERANDS)[task.template]
    bits = jax.random.bits(hide_key, (4 + len(LETTERS),))
    points = (bits[:4] % POINTER == 0) & (jnp.arange(4) < operands)
    points &= jnp.cumsum(points, dtype=jnp.int32) <= MOST_LOOKUPS - operands
    holds = (NUMBER + 1 + bits[4:] % (base - 1)).astype(jnp.int32)
    here, there = task.letters[:4], task.letters[4:]
    holds = holds.at[here].set(jnp.where(points, LETTER + there, holds[here]))
    task = task.replace(points=points, holds=holds)
    return task.replace(answer=make_plan(task, faultless(task), base=base).answer)


def compute(operator: Array, left: Array, right: Array, *, base: int) -> Array:
    """+, - or * modulo the base."""
    return jnp.stack([left + right, left - right, left * right])[operator] % base


def own_order(task: Expression) -> Array:
    """The right order of work: as the brackets say, or * before + and -."""
    first, second = task.operators[0], task.operators[1]
    later = (task.template == BY_PRECEDENCE) & (first != STAR) & (second == STAR)
    return jnp.where(later, RIGHT, jnp.asarray(OWN)[task.template])


def wrong_order(task: Expression) -> Array:
    """As if the brackets stood elsewhere."""
    return jnp.asarray(WRONG)[own_order(task)]


def faultless(task: Expression) -> Habits:
    """The habits that solve the task."""
    return Habits(own_order(task), jnp.zeros(3, bool), jnp.zeros(4, bool))


def make_plan(task: Expression, habits: Habits, *, base: int) -> Plan:
    """Every operand is looked up, and what it points to; then the operations; then the answer."""
    operands = jnp.asarray(OPERANDS)[task.template]
    here, there = task.letters[:4], task.letters[4:]
    there = jnp.where(habits.strays, jnp.roll(there, 1), there)
    lookups = LETTER + jnp.stack([here, there], axis=1).reshape(8)
    calls = [jnp.stack([jnp.full(8, LOOKUP, jnp.int32), lookups, jnp.full(8, PAD, jnp.int32)], axis=1)]
    values = list(task.holds[jnp.where(task.points, there, here)] - NUMBER)
    order = jnp.asarray(ORDERS)[habits.order]
    for swap, (operator, left, right) in zip(habits.swaps, order, strict=True):
        known = jnp.stack(values)
        left, right = known[jnp.where(swap, right, left)], known[jnp.where(swap, left, right)]
        operator = task.operators[operator]
        calls.append(jnp.stack([ADD + operator, NUMBER + left, NUMBER + right])[None])
        values.append(compute(operator, left, right, base=base))
    looked_up = jnp.stack([jnp.arange(4) < operands, task.points], axis=1).reshape(8)
    wanted = jnp.concatenate([looked_up, jnp.arange(1, 4) < operands])
    return Plan(jnp.concatenate(calls), wanted, jnp.stack(values)[2 + operands])
