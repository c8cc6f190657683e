"""`arithmetic`: episodes in words, what tools answer, and what its tasks and demonstrations are like."""

import jax
import numpy as np
import pytest
from env_cases import ENVS, at, play, played, player, repeated, talk, talks, tasks_of, to_numpy

from flowgrpo.envs.arithmetic import (
    DECEPTIVE,
    LETTER,
    MAX_LOOKUPS,
    NUM_OPERANDS,
    NUMBER,
    TEMPLATES,
    Expression,
    Flaws,
    arithmetic,
    flawless_habits,
    make_plan,
)
from flowgrpo.envs.env import to_words

ENV = ENVS["arithmetic"]
WITHOUT_FLAWS = Flaws((0.0,) * 4, 0.0, 0.0, 0.0)
ANSWER = jax.jit(lambda task: make_plan(task, flawless_habits(task), base=19).answer)


def task_of(text: str, pointers: str = "", **values: int) -> Expression:
    """The expression in words; "a>e" is a pointer, and letters without a value hold 1."""
    words = text.split()
    letters = [word for word in words if word.isalpha()]
    operators = ["+-*".index(word) for word in words if word in ("+", "-", "*")]
    shape = " ".join(dict.fromkeys("+-*", "o").get(word, word) for word in words)
    for letter, place in zip(letters, "xyzw", strict=False):
        shape = shape.replace(letter, place)
    letter_values = np.full(8, NUMBER + 1, np.int32)
    for letter, value in values.items():
        letter_values[ord(letter) - ord("a")] = NUMBER + value
    targets, is_pointer = {}, np.zeros(4, bool)
    for operand, target in (pair.split(">") for pair in pointers.split()):
        letter_values[ord(operand) - ord("a")] = LETTER + ord(target) - ord("a")
        is_pointer[letters.index(operand)] = True
        targets[letters.index(operand)] = target
    others = [letter for letter in "abcdefgh" if letter not in letters and letter not in targets.values()]
    fourth = letters[3] if len(letters) == 4 else others.pop()
    order = [*letters[:3], fourth, *(targets[i] if i in targets else others.pop() for i in range(4))]
    task = Expression(
        np.int32(TEMPLATES.index(shape)),
        np.array(operators + [0] * (3 - len(operators)), np.int32),
        np.array([ord(letter) - ord("a") for letter in order], np.int32),
        is_pointer,
        letter_values,
        np.int32(0),
    )
    return task.replace(answer=np.asarray(ANSWER(task)))


SUM = task_of("a + b + c", a=2, b=3, c=4)


def test_a_worked_episode():
    """( c + f ) * a where f points to h: 7 + 18 = 6 and 6 * 3 = 18, modulo 19; these are the oracle's calls."""
    lines = ["lookup c", "lookup f", "lookup h", "lookup a", "add 7 18", "mul 6 3", "answer 18"]
    found = talk(ENV, task_of("( c + f ) * a", "f>h", c=7, h=18, a=3), *lines)
    assert found.said == ["( c + f ) * a", "7", "h", "18", "3", "6", "18", ""]
    assert found.best[:-1] == [f"{line} <end>" for line in lines]
    assert [ENV.tools[now.tool] for now in found.steps[:-1]] == [line.split()[0] for line in lines[:-1]]
    assert [(float(now.reward), bool(now.done)) for now in found.steps] == [(0.0, False)] * 6 + [(1.0, True)]
    assert (int(found.steps[-1].tool), bool(found.steps[-1].correct)) == (-1, True)
    assert not any(now.error for now in found.steps)


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
    found = talk(ENV, task_of(text, a=2, b=5, c=7, d=4), f"answer {value % 19}")
    assert found.said == [text, ""]
    assert found.steps[0].correct


def test_the_oracle_looks_up_first_what_it_works_out_first():
    """Brackets, or * before + and -; of what is worked from the left, the left."""
    expected = {"a - ( b * c )": "bca", "a - b * c": "bca", "a * b - c": "abc", "( a - b ) * c": "abc"}
    for text, letters in expected.items():
        task = task_of(text, a=2, b=5, c=7)
        found = talk(ENV, task, *(f"lookup {letter}" for letter in letters))
        assert found.best[:3] == [f"lookup {letter} <end>" for letter in letters]


def test_a_malformed_action_costs_a_turn_and_a_wrong_answer_ends():
    lines = ["lookup 3", "add a 3", "add 3", "answer", "answer a", "lookup", "lookup a b", "+ 3 4", "a", "error"]
    bad = talks(ENV, SUM, *([f"{line} <end>"] for line in lines), ["lookup a"], ["lookup a a"], [""], end="")
    for found in bad:
        (now,) = found.steps
        assert (found.said[1], bool(now.error), bool(now.done), int(now.tool)) == ("error", True, False, -1)
        assert found.anchors[1] == found.anchors[0]
    (now,) = talk(ENV, SUM, "answer 4").steps
    assert (bool(now.done), bool(now.correct), bool(now.error), float(now.reward)) == (True, False, False, 0.0)


def test_anchors_are_the_set_of_calls():
    """The order of calls, repeats, errors and the order of factors don't matter; what was asked does."""
    talk_of = ["lookup a", "lookup b", "add 2 3"], ["lookup b", "a", "add 3 2", "lookup a", "lookup a"], ["sub 2 3"]
    one, same, minus, swapped = (found.anchors for found in talks(ENV, SUM, *talk_of, ["sub 3 2"]))
    assert one[-1] == same[-1]
    assert len({*one, same[1], minus[-1], swapped[-1]}) == len(one) + 3
    assert one[0] not in talk(ENV, task_of("a + b + c", a=2, b=3, c=5)).anchors


def test_the_oracle_recovers_from_any_calls():
    """After useless and partly useful calls it still makes only those that are missing."""
    task, lines = task_of("a * b - c", "c>g", a=2, b=5, g=7), ["lookup g", "mul 9 9", "lookup b", "mul 5 2", "lookup e"]
    made = ["lookup a", "lookup c", "sub 10 7", "answer 3"]
    found = talk(ENV, task, *lines, *made)
    assert found.best[5:9] == [f"{line} <end>" for line in made]
    assert found.state.correct


def test_the_oracle_needs_about_seven_turns():
    """Six to nine, or five in the rare case that two of the calls are the same one."""
    turns = played(ENV, "oracle").live.sum(axis=1)
    assert (turns >= 6).mean() > 0.99
    assert turns.max() == 9
    assert 7.0 < turns.mean() < 7.8
    assert (played(ENV, "demonstrations").live.sum(axis=1) >= 6).all()
    assert set(played(ENV, "demonstrations").step.tool.ravel().tolist()) == {-1, 0, 1, 2, 3}


@pytest.mark.slow
def test_flawless_demonstrations_are_the_oracle_and_wrong_orders_are_consistent():
    """`a - b * c` worked from the left: the demonstration subtracts, multiplies, and answers what came out.

    It looks up first what should be worked out first.
    """
    flawless = arithmetic(flaws=WITHOUT_FLAWS)
    assert play(flawless, player(flawless, "demonstrations")).state.correct.all()
    wrong = arithmetic(flaws=WITHOUT_FLAWS._replace(order=(1.0,) * 4))
    plays = at(play(wrong, player(wrong, "demonstrations"), repeated(task_of("a - b * c", a=9, b=5, c=7))), 0)
    made = [to_words(wrong, *action) for action in zip(plays.tokens, plays.length, strict=True)][: plays.live.sum()]
    lines = ["lookup b", "lookup c", "lookup a", "sub 9 5", "mul 4 7", "answer 9"]
    assert (made, bool(plays.state.correct)) == ([f"{line} <end>" for line in lines], False)


def test_tasks_are_evenly_distributed():
    """No answer is frequent, all templates and operators occur; deceptive demonstrations go wrong in half of them."""
    tasks = to_numpy(tasks_of(ENV))
    shares = np.bincount(tasks.answer, minlength=19) / len(tasks.answer)
    assert 0.02 < shares.min() < shares.max() < 0.09
    assert set(tasks.template.tolist()) == set(range(4))
    assert len(np.unique(tasks.operators[:, :2], axis=0)) == 9
    assert np.asarray(DECEPTIVE.order)[tasks.template].mean() == pytest.approx(0.5, abs=0.02)


def test_pointers_lead_out_of_the_expression_to_a_number():
    tasks = to_numpy(tasks_of(ENV))
    assert (tasks.is_pointer.sum(axis=1) + NUM_OPERANDS[tasks.template] <= MAX_LOOKUPS).all()
    assert 0.2 < tasks.is_pointer[:, 0].mean() < 0.45
    targets = np.take_along_axis(tasks.values, tasks.letters[:, 4:], axis=1)
    operands = np.take_along_axis(tasks.values, tasks.letters[:, :4], axis=1)
    assert (targets >= NUMBER).all()
    np.testing.assert_array_equal(operands[tasks.is_pointer], LETTER + tasks.letters[:, 4:][tasks.is_pointer])
    assert (operands[~tasks.is_pointer] >= NUMBER).all()
