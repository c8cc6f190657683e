"""Repetition: shares by hand."""

import pytest

from flowgrpo.evaluation.metrics import repetition
from flowgrpo.types import Trajectory, Turn


def spoken(*actions):
    """A trajectory of these actions, each after one token of context that doesn't count."""
    turns = [Turn([9, *action], [False] + [True] * len(action), [0.0] * (len(action) + 1)) for action in actions]
    return Trajectory(turns, outcome=1.0, group=0)


def test_repeated_ngrams_of_an_action_are_counted():
    once, again = [1, 2, 3, 4, 5], [1, 2, 3, 4, 1, 2, 3, 4]
    assert repetition([spoken(once)])["repeated_text"] == 0.0
    assert repetition([spoken(again)])["repeated_text"] == 1 / 5
    assert repetition([spoken([7] * 13)])["repeated_text"] == 9 / 10
    assert repetition([spoken(once, again), spoken(once)])["repeated_text"] == 1 / 9
    assert repetition([spoken([1, 2, 1, 2])], length=2)["repeated_text"] == pytest.approx(1 / 3)


def test_repeated_actions_of_a_trajectory_are_counted():
    assert repetition([spoken([1], [2], [1], [1])])["repeated_actions"] == 2 / 3
    assert repetition([spoken([1], [2]), spoken([1], [2])])["repeated_actions"] == 0.0


def test_repetition_without_ngrams_is_zero():
    assert repetition([]) == repetition([spoken([1], []), spoken()]) == {"repeated_text": 0.0, "repeated_actions": 0.0}
