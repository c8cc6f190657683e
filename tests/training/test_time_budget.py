"""Time budgets: their words, and when they are over."""

import pytest

from flowgrpo.training.time_budget import UNLIMITED, OutOfTime, time_budget
from flowgrpo.types import BadInput


@pytest.mark.parametrize(
    ("words", "seconds"), [("8h50m", 31800), ("90s", 90), ("45m", 2700), ("1h30m20s", 5420), ("2h", 7200), ("0h7s", 7)]
)
def test_budgets_are_hours_minutes_and_seconds(words, seconds):
    assert time_budget(words).seconds == seconds


@pytest.mark.parametrize("words", ["", "0s", "8:50", "9", "1.5h", "-1h", "50m8h", "8h 50m", "8h50"])
def test_other_texts_are_refused_in_one_sentence(words):
    with pytest.raises(BadInput, match=f"^--stop_after={words} is no length of time: write .* such as 8h50m or 90s$"):
        time_budget(words, source="--stop_after")


def test_budget_is_over_when_its_time_has_passed():
    now = [10.0]
    budget, earlier = (time_budget("5s", started=began, clock=lambda: now[0]) for began in (None, 4.0))
    budget.check()
    with pytest.raises(OutOfTime, match=r"^the time budget of 5s is over$"):
        earlier.check()
    now[0] = 14.9
    assert not budget.is_over()
    now[0] = 15.0
    assert budget.is_over()
    assert not UNLIMITED.is_over()
