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

Demonstrations are well-formed and flawed (`FLAWS`): for half of the tasks they work in the wrong order, and they swap
the operands of an operation, follow a pointer to a wrong letter, or look up a letter for nothing. How often the
order is wrong differs by template. A coin for each task would teach an imitator that brackets mean nothing, and a
policy that does not read them settles on one order for all tasks, which no reward moves any more.

Measured over 4096 tasks of each split with the defaults: the oracle solves all of them in 7.4 turns on average (at
most 9); demonstrations solve 30 % in 7.7 turns, all well-formed, and 2 % of them run out of turns. Over 16384 tasks no
number is the answer of more than 5.7 %, which is what a one-turn policy gains; of arbitrary tokens nearly all are
malformed, and they solve less than 0.1 %.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from flowgrpo.contracts import Env, Observation, Sizes, Step
from flowgrpo.envs.deal import hashed
from flowgrpo.envs.env import END, PAD, absorbing, fill
from flowgrpo.envs.expressions import (
    ADD,
    ANSWER,
    ERROR,
    LAYOUTS,
    LETTER,
    LETTERS,
    LOOKUP,
    MUL,
    NUMBER,
    TOOLS,
    WORDS,
    Expression,
    Habits,
    Plan,
    combination,
    compute,
    faultless,
    make_plan,
    make_task,
    own_order,
    write,
    wrong_order,
)
from flowgrpo.types import BadInput, check_range, checked

MOST_CALLS = 8  # of the oracle, before it answers


@checked
class Flaws(NamedTuple):
    """How often a demonstration goes wrong."""

    order: tuple[float, float, float, float] = (0.45, 0.1, 0.85, 0.6)  # by template: an episode's order is wrong
    swap: float = 1 / 4  # an operation with its operands swapped
    stray: float = 2 / 3  # a pointer that is followed to a wrong letter
    idle: float = 1 / 16  # a turn that looks up any letter

    def check(self) -> None:
        """Raise `BadInput` for what is no probability, or no four of them."""
        if not isinstance(self.order, tuple | list) or len(self.order) != len(LAYOUTS):
            raise BadInput(f"Flaws: order is {self.order!r}, but must be {len(LAYOUTS)} numbers, one a template")
        for name, value in zip((*["order"] * len(LAYOUTS), *self._fields[1:]), (*self.order, *self[1:]), strict=True):
            check_range("Flaws", name, value, 0.0, 1.0)


FLAWS = Flaws()


class State(struct.PyTreeNode):
    """An expression and what has been found out about it."""

    task: Expression
    calls: Array  # turns x 3: the distinct calls that were answered, as `canonical` writes them
    count: Array  # of them
    done: Array
    correct: Array
    key: Array  # of what a demonstration gets wrong in this episode


def arithmetic(*, base: int = 19, turns: int = 10, flaws: Flaws = FLAWS) -> Env:
    """The environment; with a prime base answers are nearly uniform, so that guessing gains 1 / base."""
    check_range("arithmetic", "base", base, 2, whole=True)
    check_range("arithmetic", "turns", turns, MOST_CALLS + 1, whole=True)
    return Env(
        name="arithmetic",
        words=(*WORDS, *(str(number) for number in range(base))),
        tools=TOOLS,
        sizes=Sizes(prompt=LAYOUTS.shape[1], observation=1, action=4, turns=turns),
        make_task=partial(make_task, base=base),
        reset=partial(reset, turns=turns),
        step=absorbing(partial(step, base=base)),
        anchor=anchor,
        oracle=partial(oracle, base=base),
        demonstrate=partial(demonstrate, base=base, flaws=flaws),
        answer=answer,
    )


def reset(key: Array, task: Expression, *, turns: int) -> tuple[State, Observation]:
    """Nothing has been looked up; the expression is shown."""
    no = jnp.zeros((), bool)
    own_key = jax.random.fold_in(key, task_number(task))
    state = State(task, jnp.zeros((turns, 3), jnp.int32), jnp.int32(0), no, no, own_key)
    return state, Observation(*write(task))


def step(state: State, tokens: Array, length: Array, *, base: int) -> tuple[State, Step]:
    """`lookup letter`, `add n n`, `sub n n`, `mul n n` show a token; `answer n` ends the episode."""
    head, first, second = tokens[0], tokens[1], tokens[2]
    letter = (first >= LETTER) & (first < NUMBER)
    numbers = (tokens[1:3] >= NUMBER) & (tokens[1:3] < NUMBER + base)
    short, long = (length == 3) & (second == END), (length == 4) & (tokens[3] == END)
    looks_up = (head == LOOKUP) & letter & short
    computes = (head >= ADD) & (head <= MUL) & numbers.all() & long
    answers = (head == ANSWER) & numbers[0] & short
    called = looks_up | computes

    held = state.task.holds[jnp.where(looks_up, first - LETTER, 0)]
    operands = jnp.where(computes, tokens[1:3] - NUMBER, 0)
    result = NUMBER + compute(jnp.where(computes, head - ADD, 0), *operands, base=base)
    said = jnp.where(looks_up, held, jnp.where(computes, result, ERROR))

    right = answers & (first - NUMBER == state.task.answer)
    following = remember(state, jnp.stack([head, first, jnp.where(computes, second, PAD)]), called)
    following = following.replace(done=answers, correct=right)
    observation = Observation(jnp.where(answers, PAD, said)[None], jnp.where(answers, jnp.int32(0), jnp.int32(1)))
    tool = jnp.where(called, head - LOOKUP, -1)
    return following, Step(observation, right.astype(jnp.float32), answers, right, tool, ~called & ~answers)


def remember(state: State, call: Array, answered: Array) -> State:
    """A call that was answered for the first time is written down."""
    new = answered & ~known(state.calls, call)
    row = jnp.where(new, canonical(call), state.calls[state.count])
    return state.replace(calls=state.calls.at[state.count].set(row), count=state.count + new.astype(jnp.int32))


def canonical(call: Array) -> Array:
    """Calls that ask for the same thing are equal: + and * don't mind the order."""
    ordered = (call[0] == ADD) | (call[0] == MUL)
    return jnp.concatenate([call[:1], jnp.where(ordered, jnp.sort(call[1:]), call[1:])])


def known(calls: Array, call: Array) -> Array:
    """Whether a call is among those that a state holds."""
    return (calls == canonical(call)[None]).all(axis=1).any()


def task_number(task: Expression) -> Array:
    """A number of the task and what is hidden in it."""
    return hashed(jnp.concatenate([combination(task), task.holds]))


def anchor(state: State) -> Array:
    """Equal where the same has been found out of the same task, in whatever order and with whatever errors between."""
    made = jnp.arange(len(state.calls)) < state.count
    return task_number(state.task) + jnp.sum(jnp.where(made, jax.vmap(hashed)(state.calls), 0), dtype=jnp.int32)


def next_action(state: State, plan: Plan) -> tuple[Array, Array]:
    """The first call of the plan that is still to be made, or the answer."""
    missing = plan.wanted & ~jax.vmap(partial(known, state.calls))(plan.calls)
    tool, first, second = plan.calls[jnp.argmax(missing)]
    call = jnp.where(tool == LOOKUP, fill([tool, first, END], 4), fill([tool, first, second, END], 4))
    tokens = jnp.where(missing.any(), call, fill([ANSWER, NUMBER + plan.answer, END], 4))
    return tokens, jnp.sum(tokens != PAD, dtype=jnp.int32)


def answer(task: Expression) -> tuple[Array, Array]:
    """The action that ends a task rightly."""
    return fill([ANSWER, NUMBER + task.answer, END], 4), jnp.int32(3)


def oracle(state: State, *, base: int) -> tuple[Array, Array]:
    """The next action of a shortest way to the answer."""
    return next_action(state, make_plan(state.task, faultless(state.task), base=base))


def demonstrate(key: Array, state: State, *, base: int, flaws: Flaws = FLAWS) -> tuple[Array, Array]:
    """The next action of this episode's flawed plan, or an idle lookup."""
    idle_key, letter_key = jax.random.split(key)
    tokens, length = next_action(state, make_plan(state.task, flawed(state, flaws), base=base))
    idle = jax.random.bernoulli(idle_key, flaws.idle)
    letter = LETTER + jax.random.randint(letter_key, (), 0, len(LETTERS), jnp.int32)
    return jnp.where(idle, fill([LOOKUP, letter, END], 4), tokens), jnp.where(idle, 3, length)


def flawed(state: State, flaws: Flaws) -> Habits:
    """The habits of a demonstration; they stay the same for an episode, so that its errors are consistent."""
    order_key, swap_key, stray_key = jax.random.split(state.key, 3)
    wrong = jax.random.bernoulli(order_key, jnp.asarray(flaws.order)[state.task.template])
    return Habits(
        order=jnp.where(wrong, wrong_order(state.task), own_order(state.task)),
        swaps=jax.random.bernoulli(swap_key, flaws.swap, (3,)),
        strays=jax.random.bernoulli(stray_key, flaws.stray, (4,)),
    )
