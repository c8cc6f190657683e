"""Priorities: what fails comes up more often, what is solved still does, and a draw follows from what it is given."""

import json
from collections import Counter
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.data import task_sampling
from flowgrpo.data.task_sampling import (
    INITIAL_FRACTION,
    NO_RATES,
    curriculum_task,
    num_open_tasks,
    sample_task,
    sort_by_difficulty,
    task_priority,
    update_rate,
    update_rates,
)
from flowgrpo.types import BadInput, Task

fractions = st.floats(0, 1)
rate_maps = st.dictionaries(st.integers(0, 30), fractions, max_size=20)


# By success -------------------------------------------------------------------------------------------------


def test_success_rate_is_a_running_mean_over_judged_groups():
    rates = {3: 1.0}
    assert update_rate(NO_RATES, 3, 1.0) == rates
    assert update_rate(update_rate(rates, 3, 0.0), 3, 0.25) == {3: 0.375}
    assert (rates, NO_RATES) == ({3: 1.0}, {}), "nothing is changed in place"
    assert update_rates({1: 1.0}, [4, 1, 4, 2], {0: 0.5, 1: 0.0, 2: 1.0}) == {1: 0.5, 4: 0.75}


def test_priority_is_the_failure_rate_with_a_floor():
    rates = {0: 0.0, 1: 0.25, 2: 0.95, 3: 1.0}
    assert [task_priority(rates, number) for number in range(5)] == [1.0, 0.75, 0.1, 0.1, 1.0]


@given(rate_maps, st.integers(0, 2**70), st.integers(0, 10**12), st.integers(1, 40))
def test_a_draw_is_reproducible_and_rates_survive_json(rates, seed, index, count):
    number = sample_task(rates, seed, index, count)
    assert 0 <= number < count
    assert sample_task(dict(reversed(rates.items())), seed, index, count) == number
    assert task_sampling.from_json(json.loads(json.dumps(task_sampling.to_json(rates)))) == rates


@given(st.lists(fractions, min_size=2, max_size=6), st.integers(0, 9))
def test_tasks_come_up_in_proportion_to_their_priority(success, seed):
    rates = dict(enumerate(success[1:]))  # the last one was never seen
    count, places = len(success), 2000
    counts = Counter(sample_task(rates, seed, index, count) for index in range(places))
    total = sum(task_priority(rates, number) for number in range(count))
    for number in range(count):
        probability = task_priority(rates, number) / total
        error = sqrt(probability * (1 - probability) / places)
        assert abs(counts[number] / places - probability) < 5 * error


def test_draws_depend_on_seed_and_index_alone():
    rates = {number: number / 10 for number in range(10)}
    orders = [[sample_task(rates, seed, index, 10) for index in range(8)] for seed in range(20)]
    assert len({tuple(order) for order in orders}) == 20
    assert orders[0] == [3, 0, 5, 3, 6, 7, 1, 0]


# By difficulty ----------------------------------------------------------------------------------------------


def tasks(*levels) -> list[Task]:
    return [Task(f"t{i}", "?", ("1",), "math", {"level": level}) for i, level in enumerate(levels)]


def test_sorting_by_difficulty_is_stable():
    assert [task.id for task in sort_by_difficulty(tasks(3, 1, 2.5, 1), "level")] == ["t1", "t3", "t2", "t0"]


def test_a_curriculum_opens_a_quarter_first_and_all_from_half():
    assert [num_open_tasks(update, 8, 100) for update in range(9)] == [25, 44, 63, 82, 100, 100, 100, 100, 100]
    assert num_open_tasks(0, 8, 1) == 1


@given(st.integers(1, 60), st.integers(1, 50))
def test_the_number_of_open_tasks_grows_to_all(count, updates):
    opened = [num_open_tasks(update, updates, count) for update in range(updates + 1)]
    assert opened == sorted(opened)
    assert 1 <= opened[0] <= INITIAL_FRACTION * count + 1
    assert opened[-1] == count


@given(st.integers(1, 40), st.integers(0, 2**64), st.integers(0, 10**9))
def test_open_tasks_come_up_once_an_epoch(opened, seed, epoch):
    easiest = tasks(*range(50))
    drawn = [curriculum_task(easiest, seed, epoch * opened + index, opened) for index in range(opened)]
    assert sorted(int(task.id[1:]) for task in drawn) == list(range(opened))


# What is refused --------------------------------------------------------------------------------------------

NO_NUMBER = "which is no number: give every task a number there"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: update_rate(NO_RATES, -1, 0.5), "the number of the task is -1"),
        (lambda: update_rate(NO_RATES, 0, 1.5), r"success is 1\.5"),
        (lambda: update_rate(NO_RATES, 0, float("nan")), "success is nan"),
        (lambda: sample_task(NO_RATES, 0, 0, 0), "there are 0 tasks"),
        (lambda: sample_task(NO_RATES, 0, -1, 3), "the index of the group is -1"),
        (lambda: num_open_tasks(0, 0, 3), "update 0 of 0 is none"),
        (lambda: sort_by_difficulty(tasks(1, "hard"), "level"), f"task 't1': field 'level' is 'hard', {NO_NUMBER}"),
        (lambda: sort_by_difficulty(tasks(1, True), "level"), "task 't1': field 'level' is True, which is no number"),
        (lambda: sort_by_difficulty(tasks(1, float("nan")), "level"), "task 't1': field 'level' is nan"),
        (lambda: sort_by_difficulty(tasks(1), "grade"), "task 't0': field 'grade' is missing: .* name the field"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(BadInput, match=words):
        call()
