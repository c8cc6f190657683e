"""`arithmetic`: an expression over letters whose values are hidden, worked out with tools in about seven turns.

    ( c + f ) * a          lookup c -> 7      lookup f -> h      lookup h -> 18     lookup a -> 3
                           add 7 18 -> 6      mul 6 3 -> 18      answer 18

A letter holds a number or, one time in three, points to another letter, which must be looked up in its turn. Numbers
are tokens, 0 .. base - 1, and all arithmetic is modulo the base. The tools do it, so a policy has to plan (which letter
is missing, what comes first, which operand is left) and to copy numbers, not to calculate. Tools compute whatever
numbers they are given. The outcome is 1 for the right answer and 0 otherwise; a malformed action costs a turn.

Four templates: `( x o y ) o z`, `x o ( y o z )`, `x o y o z` where * goes before + and -, `( x o y ) o ( z o w )`.
Operators are free and letters distinct; a pointer leads to a letter outside the expression, and at most five lookups
are needed. Splits share no (template, operators, letters); the numbers are drawn for each task.

Demonstrations are well-formed and flawed (`FLAWS`): in two of five tasks they work in the wrong order, and they swap
the operands of an operation, follow a pointer to a wrong letter, or look up a letter for nothing. What should be worked
out first is looked up first all the same, so that an imitator has to read brackets from the start. Where demonstrations
say little of them, it settles on one order of work for all tasks, which no reward moves any more: `DECEPTIVE` has such
chances, whose wrong order is frequent in some templates and rare in others.

Measured over 4096 tasks of each split with the defaults: the oracle solves all of them in 7.4 turns on average (at
most 9); demonstrations solve 37 % in 7.7 turns, all well-formed, and 2 % of them run out of turns. Over 16384 tasks no
number is the answer of more than 5.7 %, which is what a one-turn policy gains; of arbitrary tokens nearly all are
malformed, and they solve less than 0.1 %.

A plan is a fixed list of tool calls, some of which are wanted. The oracle's plan and a flawed demonstration's come from
the same function, and differ in the `Habits` that it is given.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from flowgrpo.contracts import Env, Observation, Sizes, Step
from flowgrpo.envs.env import END, PAD, SPECIAL, absorbing, draw_task, hashed, pad_tokens
from flowgrpo.types import BadInput, check_range, checked

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
MOST_CALLS = 8  # of the oracle, before it answers
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
SOONEST = np.array([[0, 1, 2, 3], [1, 2, 0, 3], [0, 1, 2, 3], [0, 1, 2, 3]], np.int32)  # operands, by order


def _layouts() -> np.ndarray:
    """For each template, indices into (padding, brackets, three operators, four operands)."""
    rows = np.zeros((len(TEMPLATES), max(len(text.split()) for text in TEMPLATES)), np.int32)
    for row, text in zip(rows, TEMPLATES, strict=True):
        operators = iter((3, 4, 5))
        for place, word in enumerate(text.split()):
            row[place] = next(operators) if word == "o" else {"(": 1, ")": 2}.get(word) or 6 + "xyzw".index(word)
    return rows


LAYOUTS = _layouts()


# Tasks and states -------------------------------------------------------------------------------------


class Expression(struct.PyTreeNode):
    """A task. Operators count from 0 (+, -, *) and letters from 0; what a template doesn't use is 0 or ignored."""

    template: Array
    operators: Array  # 3
    letters: Array  # 4 operands, then where each of them may point
    points: Array  # 4: the operand holds a pointer
    holds: Array  # by letter: the token that a lookup shows
    answer: Array


class ArithmeticState(struct.PyTreeNode):
    """An expression and what has been found out about it."""

    task: Expression
    calls: Array  # turns x 3: the distinct calls that were answered, as `canonical` writes them
    count: Array  # of them
    done: Array
    correct: Array
    key: Array  # of what a demonstration gets wrong in this episode


class Habits(NamedTuple):
    """Choices that a plan depends on, beside the task."""

    order: Array
    swaps: Array  # 3: the operation's operands are swapped
    strays: Array  # 4: the operand's pointer is followed to a wrong letter


class CallPlan(NamedTuple):
    """Calls in the order in which they are to be made, and the answer after them."""

    calls: Array  # 11 x 3 tokens: tool, first and second argument (PAD where there is none)
    wanted: Array  # 11
    answer: Array


@checked
class Flaws(NamedTuple):
    """How often a demonstration goes wrong."""

    order: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.4)  # by template: an episode's order is wrong
    swap: float = 1 / 16  # an operation with its operands swapped
    stray: float = 2 / 3  # a pointer that is followed to a wrong letter
    idle: float = 1 / 16  # a turn that looks up any letter

    def check(self) -> None:
        """Raise `BadInput` for what is no probability, or no four of them."""
        if not isinstance(self.order, tuple | list) or len(self.order) != len(LAYOUTS):
            raise BadInput(f"Flaws: order is {self.order!r}, but must be {len(LAYOUTS)} numbers, one a template")
        for name, value in zip((*["order"] * len(LAYOUTS), *self._fields[1:]), (*self.order, *self[1:]), strict=True):
            check_range("Flaws", name, value, 0.0, 1.0)


FLAWS = Flaws()
DECEPTIVE = Flaws(order=(0.45, 0.1, 0.85, 0.6), swap=1 / 4)


# The environment --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ArithmeticRules:
    """The settings of an environment, and the functions that depend on them."""

    base: int
    turns: int
    flaws: Flaws

    def make_task(self, key: Array, split: str) -> Expression:
        """An expression of the split, with fresh numbers and pointers behind its letters."""
        draw_key, hide_key = jax.random.split(key)
        task = draw_task(draw_key, split, propose, combination)
        operands = jnp.asarray(OPERANDS)[task.template]
        bits = jax.random.bits(hide_key, (4 + len(LETTERS),))
        points = (bits[:4] % POINTER == 0) & (jnp.arange(4) < operands)
        points &= jnp.cumsum(points, dtype=jnp.int32) <= MOST_LOOKUPS - operands
        holds = (NUMBER + 1 + bits[4:] % (self.base - 1)).astype(jnp.int32)
        here, there = task.letters[:4], task.letters[4:]
        holds = holds.at[here].set(jnp.where(points, LETTER + there, holds[here]))
        task = task.replace(points=points, holds=holds)
        return task.replace(answer=make_plan(task, faultless(task), base=self.base).answer)

    def reset(self, key: Array, task: Expression) -> tuple[ArithmeticState, Observation]:
        """Nothing has been looked up; the expression is shown."""
        no = jnp.zeros((), bool)
        own_key = jax.random.fold_in(key, task_number(task))
        state = ArithmeticState(task, jnp.zeros((self.turns, 3), jnp.int32), jnp.int32(0), no, no, own_key)
        return state, Observation(*_write(task))

    def step(self, state: ArithmeticState, tokens: Array, length: Array) -> tuple[ArithmeticState, Step]:
        """`lookup letter`, `add n n`, `sub n n`, `mul n n` show a token; `answer n` ends the episode."""
        head, first, second = tokens[0], tokens[1], tokens[2]
        letter = (first >= LETTER) & (first < NUMBER)
        numbers = (tokens[1:3] >= NUMBER) & (tokens[1:3] < NUMBER + self.base)
        short, long = (length == 3) & (second == END), (length == 4) & (tokens[3] == END)
        looks_up = (head == LOOKUP) & letter & short
        computes = (head >= ADD) & (head <= MUL) & numbers.all() & long
        answers = (head == ANSWER) & numbers[0] & short
        called = looks_up | computes

        held = state.task.holds[jnp.where(looks_up, first - LETTER, 0)]
        operands = jnp.where(computes, tokens[1:3] - NUMBER, 0)
        result = NUMBER + compute(jnp.where(computes, head - ADD, 0), *operands, base=self.base)
        said = jnp.where(looks_up, held, jnp.where(computes, result, ERROR))

        right = answers & (first - NUMBER == state.task.answer)
        following = remember(state, jnp.stack([head, first, jnp.where(computes, second, PAD)]), called)
        following = following.replace(done=answers, correct=right)
        observation = Observation(jnp.where(answers, PAD, said)[None], jnp.where(answers, jnp.int32(0), jnp.int32(1)))
        tool = jnp.where(called, head - LOOKUP, -1)
        return following, Step(observation, right.astype(jnp.float32), answers, right, tool, ~called & ~answers)

    def oracle(self, state: ArithmeticState) -> tuple[Array, Array]:
        """The next action of a shortest way to the answer."""
        return next_action(state, make_plan(state.task, faultless(state.task), base=self.base))

    def demonstrate(self, key: Array, state: ArithmeticState) -> tuple[Array, Array]:
        """The next action of this episode's flawed plan, or an idle lookup."""
        idle_key, letter_key = jax.random.split(key)
        tokens, length = next_action(state, make_plan(state.task, flawed(state, self.flaws), base=self.base))
        idle = jax.random.bernoulli(idle_key, self.flaws.idle)
        letter = LETTER + jax.random.randint(letter_key, (), 0, len(LETTERS), jnp.int32)
        return jnp.where(idle, pad_tokens([LOOKUP, letter, END], 4), tokens), jnp.where(idle, 3, length)


def arithmetic(*, base: int = 19, turns: int = 10, flaws: Flaws = FLAWS) -> Env:
    """The environment; with a prime base answers are nearly uniform, so that guessing gains 1 / base."""
    check_range("arithmetic", "base", base, 2, whole=True)
    check_range("arithmetic", "turns", turns, MOST_CALLS + 1, whole=True)
    rules = ArithmeticRules(base, turns, flaws)
    return Env(
        name="arithmetic",
        words=(*WORDS, *(str(number) for number in range(base))),
        tools=TOOLS,
        sizes=Sizes(prompt=LAYOUTS.shape[1], observation=1, action=4, turns=turns),
        make_task=rules.make_task,
        reset=rules.reset,
        step=absorbing(rules.step),
        anchor=_anchor,
        oracle=rules.oracle,
        demonstrate=rules.demonstrate,
        answer=_answer,
    )


def remember(state: ArithmeticState, call: Array, answered: Array) -> ArithmeticState:
    """A call that was answered for the first time is written down."""
    new = answered & ~known(state.calls, call)
    row = jnp.where(new, canonical(call), state.calls[state.count])
    return state.replace(calls=state.calls.at[state.count].set(row), count=state.count + new.astype(jnp.int32))


def canonical(call: Array) -> Array:
    """Calls that ask for the same thing are equal: + and * don't mind the order."""
    ordered = (call[0] == ADD) | (call[0] == MUL)
    return jnp.concatenate([call[:1], jnp.where(ordered, jnp.sort(call[1:]), call[1:])])


def known(calls: Array, call: Array) -> Array:
    """Say whether a call is among those that a state holds."""
    return (calls == canonical(call)[None]).all(axis=1).any()


def _anchor(state: ArithmeticState) -> Array:
    """Equal where the same has been found out of the same task, in whatever order and with whatever errors between."""
    made = jnp.arange(len(state.calls)) < state.count
    return task_number(state.task) + jnp.sum(jnp.where(made, jax.vmap(hashed)(state.calls), 0), dtype=jnp.int32)


def next_action(state: ArithmeticState, plan: CallPlan) -> tuple[Array, Array]:
    """The first call of the plan that is still to be made, or the answer."""
    missing = plan.wanted & ~jax.vmap(lambda call: known(state.calls, call))(plan.calls)
    tool, first, second = plan.calls[jnp.argmax(missing)]
    call = jnp.where(tool == LOOKUP, pad_tokens([tool, first, END], 4), pad_tokens([tool, first, second, END], 4))
    tokens = jnp.where(missing.any(), call, pad_tokens([ANSWER, NUMBER + plan.answer, END], 4))
    return tokens, jnp.sum(tokens != PAD, dtype=jnp.int32)


def _answer(task: Expression) -> tuple[Array, Array]:
    """The action that ends a task rightly."""
    return pad_tokens([ANSWER, NUMBER + task.answer, END], 4), jnp.int32(3)


def flawed(state: ArithmeticState, flaws: Flaws) -> Habits:
    """The habits of a demonstration; they stay the same for an episode, so that its errors are consistent."""
    order_key, swap_key, stray_key = jax.random.split(state.key, 3)
    wrong = jax.random.bernoulli(order_key, jnp.asarray(flaws.order)[state.task.template])
    own = own_order(state.task)
    return Habits(
        order=jnp.where(wrong, jnp.asarray(WRONG)[own], own),
        swaps=jax.random.bernoulli(swap_key, flaws.swap, (3,)),
        strays=jax.random.bernoulli(stray_key, flaws.stray, (4,)),
    )


# Expressions ------------------------------------------------------------------------------------------


def _write(task: Expression) -> tuple[Array, Array]:
    """`(tokens, length)` of the expression."""
    brackets = jnp.array([PAD, OPEN, CLOSE], jnp.int32)
    parts = jnp.concatenate([brackets, PLUS + task.operators, LETTER + task.letters[:4]])
    tokens = parts[jnp.asarray(LAYOUTS)[task.template]]
    return tokens, jnp.sum(tokens != PAD, dtype=jnp.int32)


def combination(task: Expression) -> Array:
    """Collect the numbers that decide the split, and that no two splits share: template, operators, operand letters."""
    letters = jnp.where(jnp.arange(4) < jnp.asarray(OPERANDS)[task.template], task.letters[:4], -1)
    return jnp.concatenate([task.template[None], task.operators, letters])


def task_number(task: Expression) -> Array:
    """A number of the task and what is hidden in it."""
    return hashed(jnp.concatenate([combination(task), task.holds]))


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


def compute(operator: Array, left: Array, right: Array, *, base: int) -> Array:
    """+, - or * modulo the base."""
    return jnp.stack([left + right, left - right, left * right])[operator] % base


# Plans ------------------------------------------------------------------------------------------------


def own_order(task: Expression) -> Array:
    """The right order of work: as the brackets say, or * before + and -."""
    first, second = task.operators[0], task.operators[1]
    later = (task.template == BY_PRECEDENCE) & (first != STAR) & (second == STAR)
    return jnp.where(later, RIGHT, jnp.asarray(OWN)[task.template])


def faultless(task: Expression) -> Habits:
    """The habits that solve the task."""
    return Habits(own_order(task), jnp.zeros(3, bool), jnp.zeros(4, bool))


def make_plan(task: Expression, habits: Habits, *, base: int) -> CallPlan:
    """Every operand is looked up, and what it points to; then the operations; then the answer.

    Operands that are worked out first are looked up first, whatever the order of work is by these habits.
    """
    operands = jnp.asarray(OPERANDS)[task.template]
    here, there = task.letters[:4], task.letters[4:]
    there = jnp.where(habits.strays, jnp.roll(there, 1), there)
    soonest = jnp.asarray(SOONEST)[own_order(task)]
    lookups = LETTER + jnp.stack([here, there], axis=1)[soonest].reshape(8)
    calls = [jnp.stack([jnp.full(8, LOOKUP, jnp.int32), lookups, jnp.full(8, PAD, jnp.int32)], axis=1)]
    values = list(task.holds[jnp.where(task.points, there, here)] - NUMBER)
    order = jnp.asarray(ORDERS)[habits.order]
    for swap, (operator, left, right) in zip(habits.swaps, order, strict=True):
        known = jnp.stack(values)
        left, right = known[jnp.where(swap, right, left)], known[jnp.where(swap, left, right)]
        operator = task.operators[operator]
        calls.append(jnp.stack([ADD + operator, NUMBER + left, NUMBER + right])[None])
        values.append(compute(operator, left, right, base=base))
    looked_up = jnp.stack([jnp.arange(4) < operands, task.points], axis=1)
    wanted = jnp.concatenate([looked_up[soonest].reshape(8), jnp.arange(1, 4) < operands])
    return CallPlan(jnp.concatenate(calls), wanted, jnp.stack(values)[2 + operands])
