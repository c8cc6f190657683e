"""`arithmetic`: episodes in words, what tools answer, how good its players are, and what its splits share."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from playing import action, compiled, garbage, play, turn

import flowgrpo as fg
from flowgrpo.envs import expressions
from flowgrpo.envs.arithmetic import FLAWS, Flaws, arithmetic
from flowgrpo.envs.env import SPLITS, in_words
from flowgrpo.envs.expressions import LETTER, NUMBER, TEMPLATES, Expression, combination, faultless, make_plan

pytestmark = pytest.mark.slow

ENV = compiled(arithmetic())
WITHOUT_FLAWS = Flaws((0.0,) * 4, 0.0, 0.0, 0.0)


@cache
def tasks_of(split: str) -> Expression:
    """2048 tasks."""
    make = jax.jit(jax.vmap(lambda key: ENV.make_task(key, split)))
    return make(jax.random.split(jax.random.key(5), 2048))


def some(tasks, count: int):
    """The first of them."""
    return jax.tree.map(lambda leaf: leaf[:count], tasks)


def task_of(text: str, pointers: str = "", **values: int) -> Expression:
    """The expression in words; "a>e" is a pointer, and letters without a value hold 1."""
    words = text.split()
    letters = [word for word in words if word.isalpha()]
    operators = ["+-*".index(word) for word in words if word in ("+", "-", "*")]
    shape = " ".join(dict.fromkeys("+-*", "o").get(word, word) for word in words)
    for letter, place in zip(letters, "xyzw", strict=False):
        shape = shape.replace(letter, place)
    holds = np.full(8, NUMBER + 1, np.int32)
    for letter, value in values.items():
        holds[ord(letter) - ord("a")] = NUMBER + value
    there, points = {}, np.zeros(4, bool)
    for here, target in (pair.split(">") for pair in pointers.split()):
        holds[ord(here) - ord("a")] = LETTER + ord(target) - ord("a")
        points[letters.index(here)] = True
        there[letters.index(here)] = target
    others = [letter for letter in "abcdefgh" if letter not in letters and letter not in there.values()]
    fourth = letters[3] if len(letters) == 4 else others.pop()
    order = [*letters[:3], fourth, *(there[i] if i in there else others.pop() for i in range(4))]
    task = Expression(
        jnp.int32(TEMPLATES.index(shape)),
        jnp.array(operators + [0] * (3 - len(operators)), jnp.int32),
        jnp.array([ord(letter) - ord("a") for letter in order], jnp.int32),
        jnp.asarray(points),
        jnp.asarray(holds),
        jnp.int32(0),
    )
    return task.replace(answer=make_plan(task, faultless(task), base=19).answer)


def test_a_worked_episode():
    """( c + f ) * a where f points to h: 7 + 18 = 6 and 6 * 3 = 18, modulo 19."""
    state, shown = ENV.reset(jax.random.key(0), task_of("( c + f ) * a", "f>h", c=7, h=18, a=3))
    assert in_words(ENV, *shown) == "( c + f ) * a"
    said = []
    for words in ("lookup c", "lookup f", "lookup h", "lookup a", "add 7 18", "mul 6 3"):
        assert in_words(ENV, *ENV.oracle(state)) == f"{words} <end>"
        state, text, now = turn(ENV, state, words)
        said.append(text)
        assert (float(now.reward), bool(now.done), bool(now.error)) == (0.0, False, False)
        assert ENV.tools[int(now.tool)] == words.split()[0]
    assert said == ["7", "h", "18", "3", "6", "18"]
    state, text, now = turn(ENV, state, "answer 18")
    assert (text, float(now.reward), int(now.tool)) == ("", 1.0, -1)
    assert bool(now.done & now.correct & ~now.error)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("( a - b ) * c", (2 - 5) * 7),
        ("a - ( b * c )", 2 - 5 * 7),
        ("a - b * c", 2 - 5 * 7),
        ("a * b - c", 2 * 5 - 7),
        ("a - b - c", 2 - 5 - 7),
        ("a - b + c", 2 - 5 + 7),
        ("a * b * c", 2 * 5 * 7),
        ("( a - b ) - ( c - d )", (2 - 5) - (7 - 4)),
        ("( a + b ) * ( c - d )", (2 + 5) * (7 - 4)),
    ],
)
def test_the_answer_is_the_value_modulo_the_base(text, value):
    """Brackets first, then * before + and -, then from the left."""
    task = task_of(text, a=2, b=5, c=7, d=4)
    assert int(task.answer) == value % 19
    _, shown = ENV.reset(jax.random.key(0), task)
    assert in_words(ENV, *shown) == text


def test_a_wrong_answer_ends_with_nothing():
    state, _ = ENV.reset(jax.random.key(0), task_of("a + b + c", a=1, b=1, c=1))
    state, _, now = turn(ENV, state, "answer 4")
    assert bool(now.done & ~now.correct & ~now.error)
    assert float(now.reward) == 0.0


@pytest.mark.parametrize(
    "words", ["lookup 3", "add a 3", "add 3", "answer", "answer a", "lookup", "lookup a b", "+ 3 4", "a", "error"]
)
def test_malformed_actions_are_errors_that_cost_a_turn(words):
    state, _ = ENV.reset(jax.random.key(0), task_of("a + b + c"))
    following, text, now = turn(ENV, state, words)
    assert (text, bool(now.error), bool(now.done), int(now.tool)) == ("error", True, False, -1)
    assert int(ENV.anchor(following)) == int(ENV.anchor(state))


def test_an_action_without_its_end_is_malformed():
    """What the policy didn't finish is not a call, however it begins."""
    state, _ = ENV.reset(jax.random.key(0), task_of("a + b + c"))
    tokens, _ = action(ENV, "lookup a")
    for length in (-1, 0, 2, 4, 99):
        assert bool(ENV.step(state, tokens, jnp.int32(length))[1].error)


def test_anchors_are_what_has_been_found_out():
    """The order of calls, repeats, errors and the order of factors don't matter; what was asked does."""
    task = task_of("a + b + c", a=2, b=3, c=4)

    def after(*turns, task=task):
        state, _ = ENV.reset(jax.random.key(len(turns)), task)
        for words in turns:
            state, *_ = turn(ENV, state, words)
        return int(ENV.anchor(state))

    assert after("lookup a", "lookup b", "add 2 3") == after("lookup b", "a", "add 3 2", "lookup a", "lookup a")
    assert after("sub 2 3") != after("sub 3 2")
    assert len({after(), after("lookup a"), after("lookup b"), after("lookup a", "lookup b")}) == 4
    assert after() != after(task=task_of("a + b + c", a=2, b=3, c=5))


def test_the_oracle_recovers_from_any_calls():
    """After useless and partly useful calls it still makes only those that are missing."""
    state, _ = ENV.reset(jax.random.key(0), task_of("a * b - c", "c>g", a=2, b=5, g=7))
    for words in ("lookup g", "mul 9 9", "lookup b", "mul 5 2", "lookup e"):
        state, *_ = turn(ENV, state, words)
    made = []
    while not state.done:
        tokens, length = ENV.oracle(state)
        made.append(in_words(ENV, tokens, length))
        state, _ = ENV.step(state, tokens, length)
    assert made == ["lookup a <end>", "lookup c <end>", "sub 10 7 <end>", "answer 3 <end>"]
    assert bool(state.correct)


def test_the_oracle_solves_every_task_in_about_seven_turns():
    """Of every split; six to nine turns, or five in the rare case that two of the calls are the same one."""
    tasks = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *map(tasks_of, SPLITS))
    played = play(ENV, lambda _, state: ENV.oracle(state), tasks)
    assert played.correct.all()
    np.testing.assert_array_equal(played.outcome, 1.0)
    assert not played.error.any()
    assert (played.turns >= 6).mean() > 0.99
    assert played.turns.max() == 9
    assert 7.0 < played.turns.mean() < 7.8


def test_demonstrations_are_well_formed_and_mostly_fail():
    """About 30 % of them succeed: enough to learn the form from, and to improve on."""
    played = play(ENV, ENV.demonstrate, tasks_of("train"))
    assert not played.error.any()
    assert 0.25 < played.correct.mean() < 0.35
    assert played.turns.min() >= 6
    for tool in range(len(ENV.tools)):
        assert (played.tool == tool).any()


def test_demonstrations_work_in_the_right_order_at_most_half_of_the_time():
    wrong = np.asarray(FLAWS.order)[np.asarray(tasks_of("train").template)]
    assert np.mean(FLAWS.order) >= 0.5
    assert wrong.mean() == pytest.approx(0.5, abs=0.02)


def test_a_demonstration_without_flaws_is_the_oracle():
    env = arithmetic(flaws=WITHOUT_FLAWS)
    assert play(env, env.demonstrate, some(tasks_of("train"), 128)).correct.all()


def test_the_wrong_order_is_a_whole_consistent_plan():
    """`a - b * c` worked from the left: the demonstration subtracts, multiplies, and answers what came out."""
    env = compiled(arithmetic(flaws=WITHOUT_FLAWS._replace(order=(1.0,) * 4)))
    state, _ = env.reset(jax.random.key(0), task_of("a - b * c", a=9, b=5, c=7))
    made = []
    while not state.done:
        tokens, length = env.demonstrate(jax.random.key(1), state)
        made.append(in_words(env, tokens, length).removesuffix(" <end>"))
        state, _ = env.step(state, tokens, length)
    assert made == ["lookup a", "lookup b", "lookup c", "sub 9 5", "mul 4 7", "answer 9"]
    assert not state.correct


def test_guessing_gains_nearly_nothing():
    """One-turn policies are at chance, whatever number they name; arbitrary tokens gain nothing at all."""
    answers = np.asarray(tasks_of("train").answer)
    for number in range(19):
        assert 0.02 < (answers == number).mean() < 0.09
    guess = play(ENV, lambda *_: action(ENV, "answer 7"), tasks_of("train"))
    np.testing.assert_array_equal(guess.correct, answers == 7)
    assert (guess.turns == 1).all()
    lost = play(ENV, garbage(ENV), tasks_of("train"))
    assert lost.correct.mean() < 0.01
    assert np.isfinite(lost.reward).all()


def test_splits_share_no_combination_and_training_has_every_part():
    """Of (template, operators, letters); all templates, operators in their places and letters occur in training."""
    rows = {split: np.asarray(jax.vmap(combination)(tasks_of(split))) for split in SPLITS}
    seen = {split: {tuple(row) for row in rows[split]} for split in SPLITS}
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    for place in range(rows["train"].shape[1]):
        assert set(rows["train"][:, place]) >= set(rows["validation"][:, place]) | set(rows["test"][:, place])
    assert set(rows["train"][:, 0]) == set(range(4))
    assert {tuple(row) for row in rows["train"][:, 1:3]} == {(i, j) for i in range(3) for j in range(3)}


def test_pointers_lead_out_of_the_expression_to_a_number():
    tasks = tasks_of("train")
    operands = expressions.OPERANDS[np.asarray(tasks.template)]
    points = np.asarray(tasks.points)
    assert (points.sum(axis=1) + operands <= expressions.MOST_LOOKUPS).all()
    assert 0.2 < points[:, 0].mean() < 0.45
    holds, letters = np.asarray(tasks.holds), np.asarray(tasks.letters)
    there = np.take_along_axis(holds, letters[:, 4:], axis=1)
    here = np.take_along_axis(holds, letters[:, :4], axis=1)
    assert (there >= NUMBER).all()
    np.testing.assert_array_equal(here[points], LETTER + letters[:, 4:][points])
    assert (here[~points] >= NUMBER).all()


def test_settings_are_checked():
    with pytest.raises(fg.BadInput, match="base"):
        arithmetic(base=1)
    with pytest.raises(fg.BadInput, match="turns > 8"):
        arithmetic(turns=8)
    with pytest.raises(fg.BadInput, match="choose from train"):
        ENV.make_task(jax.random.key(0), "dev")
