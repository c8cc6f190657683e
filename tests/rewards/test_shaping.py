"""Composed rewards: sums keep their parts, invalid is never 0, a second check never changes the value (R3)."""

import pytest

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.rewards.answers.match import answer
from flowgrpo.rewards.combine import SECOND_CHECK, combine, length, second_check, with_length
from flowgrpo.rewards.format import check_format, tag
from flowgrpo.types import BadInput, Task

TASK = Task("t", "", ("5",), "d")


def fixed(value, reason="", **parts):
    return Reward(lambda *_: RewardResult(value, reason, parts))


def test_a_sum_carries_every_component():
    reward = combine({"answer": (answer(), 1.0), "format": (check_format(tag("answer")), 0.1)})
    scored = reward.score(TASK, "<answer>5</answer>")
    assert scored.value == pytest.approx(1.1)
    assert scored.parts == {"answer": 1.0, "answer/exact": 1.0, "format": 1.0, "format/answer": 1.0}
    assert reward.score(TASK, "5").value == 1.0
    assert reward.score(TASK, "<answer>6</answer>").value == pytest.approx(0.1)


def test_F5_an_invalid_component_makes_the_sum_invalid_unless_it_is_optional():
    reward = combine({"a": (fixed(1.0), 1.0), "b": (fixed(None, "judge lost"), 0.1)})
    assert reward.score(TASK, "5") == RewardResult(None, "b: judge lost", {"a": 1.0})
    reward = combine({"a": (fixed(1.0), 2.0), "b": (fixed(None, "judge lost"), 5.0)}, optional=["b"])
    assert reward.score(TASK, "5") == RewardResult(2.0, "b: judge lost", {"a": 1.0})


def test_components_that_judge_many_at_once_still_do():
    calls = []

    def score_many(tasks, outputs):
        calls.append(len(tasks))
        return [RewardResult(float(len(output))) for output in outputs]

    batched = Reward(fixed(None).score, score_many)
    reward = second_check(with_length(combine({"a": (batched, 1.0)}), free_length=100, max_length=200), fixed(0.0))
    assert [scored.value for scored in reward.score_all([TASK] * 3, ["a", "bb", "ccc"])] == [1.0, 2.0, 3.0]
    assert calls == [3]


def test_length_falls_linearly_and_is_a_part_next_to_the_unshaped_reward():
    reward = length(free_length=10, max_length=20)
    assert [reward.score(TASK, "x" * size).value for size in (0, 10, 15, 20, 1000)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert (
        length(free_length=1, max_length=2, measure=lambda text: len(text.split())).score(TASK, "two words").value == -1
    )
    scored = with_length(fixed(1.0, "", exact=1.0), free_length=10, max_length=20, weight=0.5).score(TASK, "x" * 15)
    assert scored.value == pytest.approx(0.75)
    assert scored.parts == {"unshaped": 1.0, "unshaped/exact": 1.0, "length": -0.5, "length/size": 15.0}
    assert with_length(fixed(None), free_length=1, max_length=2).score(TASK, "xxx").value is None


def test_R3_a_second_check_shows_a_hacked_reward_and_never_changes_it():
    reward = second_check(Reward(lambda _, output: RewardResult(float("5" in output), "", {"contains": 1.0})), answer())
    assert reward.score(TASK, "1 2 3 4 5 6 7 8 9") == RewardResult(1.0, "", {"contains": 1.0, SECOND_CHECK: 0.0})
    assert reward.score(TASK, "5") == RewardResult(1.0, "", {"contains": 1.0, SECOND_CHECK: 1.0})
    assert second_check(fixed(1.0), fixed(None, "lost")).score(TASK, "5") == RewardResult(1.0)  # invalid: no part
    assert second_check(fixed(None, "lost"), fixed(1.0)).score(TASK, "5") == RewardResult(
        None, "lost", {SECOND_CHECK: 1.0}
    )


def test_senseless_combinations_are_refused():
    component = {"a": (fixed(1.0), 1.0)}
    for parts, optional, words in (
        ({"a": (fixed(1.0), float("nan"))}, [], "finite"),
        ({"a/b": (fixed(1.0), 1.0)}, [], "named 'a/b'"),
        (component, ["a"], "at least one"),
        (component, ["b"], "optional"),
        ({}, [], "at least one"),
    ):
        with pytest.raises(BadInput, match=words):
            combine(parts, optional=optional)
    with pytest.raises(BadInput, match="free_length is 5"):
        length(free_length=5, max_length=5)
