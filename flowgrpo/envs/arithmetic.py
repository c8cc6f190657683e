"""`arithmetic`: an expression over letters whose values are hidden, worked out with tools in about seven turns.

    ( c + f ) * a          lookup c -> 7      lookup f -> h      lookup h -> 18     lookup a -> 3
                           add 7 18 -> 6      mul 6 3 -> 18      answer 18

A letter has a number or, one time in three, a pointer to another letter, which must be looked up next. Numbers are
tokens, 0 .. base - 1, and all arithmetic is modulo the base. The tools calculate, so a policy has to plan (which letter
is missing, what comes first, which operand is left) and to copy numbers, not to calculate. Tools take any numbers. The
outcome is 1 for the right answer and 0 otherwise; a malformed action costs a turn.

Four templates: `( x o y ) o z`, `x o ( y o z )`, `x o y o z` where * goes before + and -, `( x o y ) o ( z o w )`.
Operators are free and letters distinct; a pointer leads to a letter outside the expression, and at most five lookups
are needed. Splits share no (template, operators, letters); the numbers are drawn for each task.

Demonstrations are well-formed and flawed (`FLAWS`): in two of five tasks they work in the wrong order, and they swap
the operands of an operation, follow a pointer to a wrong letter, or look up a letter for nothing. The operands of the
first operation are looked up first even then, so that an imitator has to read brackets from the start. With few
demonstrations of brackets, an imitator settles on one order of work for all tasks, which no reward changes any more:
`DECEPTIVE` has such probabilities, with a wrong order that is frequent in some templates and rare in others.

Measured over 4096 tasks of each split with the defaults: the oracle solves all of them in 7.4 turns on average (at
most 9); demonstrations solve 37 % in 7.7 turns, all well-formed, and 2 % of them run out of turns. Over 16384 tasks no
number is the answer of more than 5.7 %, the success of a one-turn policy; of arbitrary tokens nearly all are malformed,
and they solve less than 0.1 %.

A plan is a fixed list of tool calls, some of which are needed. The oracle's plan and a flawed demonstration's come from
the same function, with different `Habits`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from flowgrpo.contracts import Env, Observation, Sizes, Step
from flowgrpo.envs.env import END, PAD, SPECIAL, absorbing, draw_task, hash_ints, pad_tokens
from flowgrpo.types import BadInput, check_range, checked

TOOLS = ("lookup", "add", "sub", "mul")
LETTERS = "abcdefgh"  # up to four operands, and one more for each of them to point to
WORDS = (*SPECIAL, *TOOLS, "answer", "error", "(", ")", "+", "-", "*", *LETTERS)
LOOKUP, ADD, SUB, MUL, ANSWER, ERROR, OPEN, CLOSE, PLUS = range(len(SPECIAL), len(SPECIAL) + 9)
LETTER, NUMBER = WORDS.index(LETTERS[0]), len(WORDS)  # tokens of the first letter, and of 0
TEMPLATES = ("( x o y ) o z", "x o ( y o z )", "x o y o z", "( x o y ) o ( z o w )")
NUM_OPERANDS = np.array([3, 3, 3, 4], np.int32)  # by template
BY_PRECEDENCE, STAR = 2, 2  # the template without brackets, and the operator that goes first in it
MAX_LOOKUPS = 5
POINTER_PERIOD = 3  # one operand in three is a pointer
MAX_CALLS = 8  # of the oracle, before it answers
# An order of work: (operator, left, right) for each of up to three operations, where 0 .. 3 are operands and
# 4 .. 6 earlier results. Each order has a wrong one of the same length.
LEFT, RIGHT, PAIRS, CHAIN = range(4)
NO_OPERATION = (0, 0, 0)
ORDERS = np.array(
    [
        [(0, 0, 1), (1, 4, 2), NO_OPERATION],
        [(1, 1, 2), (0, 0, 4), NO_OPERATION],
        [(0, 0, 1), (2, 2, 3), (1, 4, 5)],
        [(0, 0, 1), (1, 4, 2), (2, 5, 3)],
    ],
    np.int32,
)
RIGHT_ORDER = np.array([LEFT, RIGHT, LEFT, PAIRS], np.int32)  # by template; the third depends on its operators
WRONG_ORDER = np.array([RIGHT, LEFT, CHAIN, PAIRS], np.int32)  # by right order
LOOKUP_ORDER = np.array([[0, 1, 2, 3], [1, 2, 0, 3], [0, 1, 2, 3], [0, 1, 2, 3]], np.int32)  # operands, by order


def _layouts() -> np.ndarray:
    """Indices into (padding, brackets, three operators, four operands), by template."""
    rows = np.zeros((len(TEMPLATES), max(len(text.split()) for text in TEMPLATES)), np.int32)
    for row, text in zip(rows, TEMPLATES, strict=True):
        operators = iter((3, 4, 5))
        for index, word in enumerate(text.split()):
            row[index] = next(operators) if word == "o" else {"(": 1, ")": 2}.get(word) or 6 + "xyzw".index(word)
    return rows


LAYOUTS = _layouts()


# Tasks and states -------------------------------------------------------------------------------------


class Expression(struct.PyTreeNode):
    """A task. Operators are 0, 1, 2 for +, -, *; letters count from 0; unused entries are ignored."""

    template: Array
    operators: Array  # 3
    letters: Array  # 4 operands, then the letter that each of them may point to
    is_pointer: Array  # 4: the operand has a pointer
    values: Array  # by letter: the token that a lookup returns
    answer: Array


class ArithmeticState(struct.PyTreeNode):
    """An expression and the calls so far."""

    task: Expression
    calls: Array  # turns x 3: the distinct calls that were answered, in canonical form
    count: Array  # of them
    done: Array
    correct: Array
    key: Array  # of the flaws of a demonstration in this episode


class Habits(NamedTuple):
    """Choices of a plan for a task."""

    order: Array
    swaps: Array  # 3: the operands of the operation are swapped
    strays: Array  # 4: the pointer of the operand is followed to a wrong letter


class CallPlan(NamedTuple):
    """Calls in their order, and the answer after them."""

    calls: Array  # 11 x 3 tokens: tool, first and second argument (PAD for none)
    is_needed: Array  # 11
    answer: Array


@checked
class Flaws(NamedTuple):
    """Probabilities of a demonstration's errors."""

    order: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.4)  # by template: the wrong order in an episode
    swap: float = 1 / 16  # an operation with swapped operands
    stray: float = 2 / 3  # a pointer that is followed to a wrong letter
    idle: float = 1 / 16  # a turn that looks up a random letter

    def check(self) -> None:
        """Raise `BadInput` unless all are probabilities, with one order for each template."""
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
        """An expression of the split, with random numbers and pointers as the values of its letters."""
        draw_key, hide_key = jax.random.split(key)
        task = draw_task(draw_key, split, propose, combination)
        num_operands = jnp.asarray(NUM_OPERANDS)[task.template]
        bits = jax.random.bits(hide_key, (4 + len(LETTERS),))
        is_pointer = (bits[:4] % POINTER_PERIOD == 0) & (jnp.arange(4) < num_operands)
        is_pointer &= jnp.cumsum(is_pointer, dtype=jnp.int32) <= MAX_LOOKUPS - num_operands
        values = (NUMBER + 1 + bits[4:] % (self.base - 1)).astype(jnp.int32)
        operands, targets = task.letters[:4], task.letters[4:]
        values = values.at[operands].set(jnp.where(is_pointer, LETTER + targets, values[operands]))
        task = task.replace(is_pointer=is_pointer, values=values)
        return task.replace(answer=make_plan(task, flawless_habits(task), base=self.base).answer)

    def reset(self, key: Array, task: Expression) -> tuple[ArithmeticState, Observation]:
        """The expression, with no calls yet."""
        false = jnp.zeros((), bool)
        flaw_key = jax.random.fold_in(key, task_hash(task))
        state = ArithmeticState(task, jnp.zeros((self.turns, 3), jnp.int32), jnp.int32(0), false, false, flaw_key)
        return state, Observation(*_write(task))

    def step(self, state: ArithmeticState, tokens: Array, length: Array) -> tuple[ArithmeticState, Step]:
        """`lookup letter`, `add n n`, `sub n n`, `mul n n` return a token; `answer n` ends the episode."""
        head, first, second = tokens[0], tokens[1], tokens[2]
        is_letter = (first >= LETTER) & (first < NUMBER)
        is_number = (tokens[1:3] >= NUMBER) & (tokens[1:3] < NUMBER + self.base)
        is_short, is_long = (length == 3) & (second == END), (length == 4) & (tokens[3] == END)
        is_lookup = (head == LOOKUP) & is_letter & is_short
        is_operation = (head >= ADD) & (head <= MUL) & is_number.all() & is_long
        is_answer = (head == ANSWER) & is_number[0] & is_short
        is_call = is_lookup | is_operation

        value = state.task.values[jnp.where(is_lookup, first - LETTER, 0)]
        operands = jnp.where(is_operation, tokens[1:3] - NUMBER, 0)
        result = NUMBER + compute(jnp.where(is_operation, head - ADD, 0), *operands, base=self.base)
        token = jnp.where(is_lookup, value, jnp.where(is_operation, result, ERROR))

        correct = is_answer & (first - NUMBER == state.task.answer)
        next_state = add_call(state, jnp.stack([head, first, jnp.where(is_operation, second, PAD)]), is_call)
        next_state = next_state.replace(done=is_answer, correct=correct)
        observation = Observation(
            jnp.where(is_answer, PAD, token)[None], jnp.where(is_answer, jnp.int32(0), jnp.int32(1))
        )
        tool = jnp.where(is_call, head - LOOKUP, -1)
        return next_state, Step(
            observation, correct.astype(jnp.float32), is_answer, correct, tool, ~is_call & ~is_answer
        )

    def oracle(self, state: ArithmeticState) -> tuple[Array, Array]:
        """The next action of a shortest plan."""
        return next_action(state, make_plan(state.task, flawless_habits(state.task), base=self.base))

    def demonstrate(self, key: Array, state: ArithmeticState) -> tuple[Array, Array]:
        """The next action of the episode's flawed plan, or an idle lookup."""
        idle_key, letter_key = jax.random.split(key)
        tokens, length = next_action(state, make_plan(state.task, flawed_habits(state, self.flaws), base=self.base))
        is_idle = jax.random.bernoulli(idle_key, self.flaws.idle)
        letter = LETTER + jax.random.randint(letter_key, (), 0, len(LETTERS), jnp.int32)
        return jnp.where(is_idle, pad_tokens([LOOKUP, letter, END], 4), tokens), jnp.where(is_idle, 3, length)


def arithmetic(*, base: int = 19, turns: int = 10, flaws: Flaws = FLAWS) -> Env:
    """The environment.

    Args:
        base: of all numbers; with a prime one answers are nearly uniform, so that guessing succeeds in 1 of `base`.
        turns: more than the oracle's calls.
        flaws: probabilities of a demonstration's errors.
    """
    check_range("arithmetic", "base", base, 2, whole=True)
    check_range("arithmetic", "turns", turns, MAX_CALLS + 1, whole=True)
    rules = ArithmeticRules(base, turns, flaws)
    return Env(
        name="arithmetic",
        vocabulary=(*WORDS, *(str(number) for number in range(base))),
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


def add_call(state: ArithmeticState, call: Array, is_answered: Array) -> ArithmeticState:
    """The state with a call that was answered for the first time."""
    is_new = is_answered & ~has_call(state.calls, call)
    row = jnp.where(is_new, canonical(call), state.calls[state.count])
    return state.replace(calls=state.calls.at[state.count].set(row), count=state.count + is_new.astype(jnp.int32))


def canonical(call: Array) -> Array:
    """The call with sorted operands, if their order doesn't matter (+ and *)."""
    is_commutative = (call[0] == ADD) | (call[0] == MUL)
    return jnp.concatenate([call[:1], jnp.where(is_commutative, jnp.sort(call[1:]), call[1:])])


def has_call(calls: Array, call: Array) -> Array:
    """Whether a call is among those of a state."""
    return (calls == canonical(call)[None]).all(axis=1).any()


def _anchor(state: ArithmeticState) -> Array:
    """Equal for equal task and set of calls; their order and errors between them don't matter."""
    exists = jnp.arange(len(state.calls)) < state.count
    return task_hash(state.task) + jnp.sum(jnp.where(exists, jax.vmap(hash_ints)(state.calls), 0), dtype=jnp.int32)


def next_action(state: ArithmeticState, plan: CallPlan) -> tuple[Array, Array]:
    """The first call of the plan that was not made yet, or the answer."""
    is_missing = plan.is_needed & ~jax.vmap(lambda call: has_call(state.calls, call))(plan.calls)
    tool, first, second = plan.calls[jnp.argmax(is_missing)]
    call = jnp.where(tool == LOOKUP, pad_tokens([tool, first, END], 4), pad_tokens([tool, first, second, END], 4))
    tokens = jnp.where(is_missing.any(), call, pad_tokens([ANSWER, NUMBER + plan.answer, END], 4))
    return tokens, jnp.sum(tokens != PAD, dtype=jnp.int32)


def _answer(task: Expression) -> tuple[Array, Array]:
    """The action that ends a task rightly."""
    return pad_tokens([ANSWER, NUMBER + task.answer, END], 4), jnp.int32(3)


def flawed_habits(state: ArithmeticState, flaws: Flaws) -> Habits:
    """Habits of a demonstration, the same for all turns of an episode, so that its errors are consistent."""
    order_key, swap_key, stray_key = jax.random.split(state.key, 3)
    is_wrong = jax.random.bernoulli(order_key, jnp.asarray(flaws.order)[state.task.template])
    right = right_order(state.task)
    return Habits(
        order=jnp.where(is_wrong, jnp.asarray(WRONG_ORDER)[right], right),
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
    """The integers that decide the split: template, operators and letters of the operands."""
    letters = jnp.where(jnp.arange(4) < jnp.asarray(NUM_OPERANDS)[task.template], task.letters[:4], -1)
    return jnp.concatenate([task.template[None], task.operators, letters])


def task_hash(task: Expression) -> Array:
    """Hash of the task with its hidden values."""
    return hash_ints(jnp.concatenate([combination(task), task.values]))


def propose(key: Array) -> Expression:
    """A random expression, without values."""
    bits = jax.random.bits(key, (4 + len(LETTERS),))
    template = (bits[0] % len(TEMPLATES)).astype(jnp.int32)
    is_used = jnp.arange(1, 4) < jnp.asarray(NUM_OPERANDS)[template]
    operators = jnp.where(is_used, (bits[1:4] % 3).astype(jnp.int32), 0)
    letters = jnp.argsort(bits[4:]).astype(jnp.int32)
    return Expression(
        template, operators, letters, jnp.zeros(4, bool), jnp.zeros(len(LETTERS), jnp.int32), jnp.int32(0)
    )


def compute(operator: Array, left: Array, right: Array, *, base: int) -> Array:
    """+, - or * modulo the base."""
    return jnp.stack([left + right, left - right, left * right])[operator] % base


# Plans ------------------------------------------------------------------------------------------------


def right_order(task: Expression) -> Array:
    """The order of work by the brackets, or with * before + and -."""
    first, second = task.operators[0], task.operators[1]
    is_second_first = (task.template == BY_PRECEDENCE) & (first != STAR) & (second == STAR)
    return jnp.where(is_second_first, RIGHT, jnp.asarray(RIGHT_ORDER)[task.template])


def flawless_habits(task: Expression) -> Habits:
    """The habits that solve the task."""
    return Habits(right_order(task), jnp.zeros(3, bool), jnp.zeros(4, bool))


def make_plan(task: Expression, habits: Habits, *, base: int) -> CallPlan:
    """Look up every operand and what it points to; then the operations; then the answer.

    Operands are looked up in the right order of work, even if these habits have another order.
    """
    num_operands = jnp.asarray(NUM_OPERANDS)[task.template]
    operands, targets = task.letters[:4], task.letters[4:]
    targets = jnp.where(habits.strays, jnp.roll(targets, 1), targets)
    lookup_order = jnp.asarray(LOOKUP_ORDER)[right_order(task)]
    lookups = LETTER + jnp.stack([operands, targets], axis=1)[lookup_order].reshape(8)
    calls = [jnp.stack([jnp.full(8, LOOKUP, jnp.int32), lookups, jnp.full(8, PAD, jnp.int32)], axis=1)]
    values = list(task.values[jnp.where(task.is_pointer, targets, operands)] - NUMBER)
    order = jnp.asarray(ORDERS)[habits.order]
    for swap, (operator, left, right) in zip(habits.swaps, order, strict=True):
        all_values = jnp.stack(values)
        left, right = all_values[jnp.where(swap, right, left)], all_values[jnp.where(swap, left, right)]
        operator = task.operators[operator]
        calls.append(jnp.stack([ADD + operator, NUMBER + left, NUMBER + right])[None])
        values.append(compute(operator, left, right, base=base))
    is_lookup = jnp.stack([jnp.arange(4) < num_operands, task.is_pointer], axis=1)
    is_needed = jnp.concatenate([is_lookup[lookup_order].reshape(8), jnp.arange(1, 4) < num_operands])
    return CallPlan(jnp.concatenate(calls), is_needed, jnp.stack(values)[2 + num_operands])
