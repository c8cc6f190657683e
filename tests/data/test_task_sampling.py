"""Priorities: what fails comes up more often, what is solved still does, and a draw follows from what it is given."""

import json
from collections import Counter
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.data import task_sampling
from flowgrpo.data.task_sampling import (
    EMPTY,
    FIRST,
    by_difficulty,
    chosen,
    eased,
    open_at,
    priority,
    seen,
    update_known,
)
from flowgrpo.types import BadInput, Task

shares = st.floats(0, 1)
knowns = st.dictionaries(st.integers(0, 30), shares, max_size=20)


# By success -------------------------------------------------------------------------------------------------


def test_success_is_a_running_mean_that_forgets_by_half_and_what_was_not_judged_changes_nothing():
    known = {3: 1.0}
    assert seen(EMPTY, 3, 1.0) == known
    assert seen(seen(known, 3, 0.0), 3, 0.25) == {3: 0.375}
    assert (known, EMPTY) == ({3: 1.0}, {}), "nothing is changed in place"
    assert update_known({1: 1.0}, [4, 1, 4, 2], {0: 0.5, 1: 0.0, 2: 1.0}) == {1: 0.5, 4: 0.75}


def test_the_priority_of_a_task_is_what_is_left_to_solve_but_never_nothing():
    known = {0: 0.0, 1: 0.25, 2: 0.95, 3: 1.0}
    assert [priority(known, number) for number in range(5)] == [1.0, 0.75, 0.1, 0.1, 1.0]


@given(knowns, st.integers(0, 2**70), st.integers(0, 10**12), st.integers(1, 40))
def test_a_draw_is_one_of_the_tasks_and_the_same_whenever_it_is_made_and_json_keeps_what_is_known(
    known, seed, place, count
):
    number = chosen(known, seed, place, count)
    assert 0 <= number < count
    assert chosen(dict(reversed(known.items())), seed, place, count) == number
    assert task_sampling.from_json(json.loads(json.dumps(task_sampling.to_json(known)))) == known


@given(st.lists(shares, min_size=2, max_size=6), st.integers(0, 9))
def test_tasks_come_up_in_proportion_to_their_priority(success, seed):
    known = dict(enumerate(success[1:]))  # the last one was never seen
    count, places = len(success), 2000
    found = Counter(chosen(known, seed, place, count) for place in range(places))
    whole = sum(priority(known, number) for number in range(count))
    for number in range(count):
        share = priority(known, number) / whole
        error = sqrt(share * (1 - share) / places)
        assert abs(found[number] / places - share) < 5 * error


def test_draws_differ_between_seeds_and_places_and_are_the_same_on_every_machine():
    known = {number: number / 10 for number in range(10)}
    orders = [[chosen(known, seed, place, 10) for place in range(8)] for seed in range(20)]
    assert len({tuple(order) for order in orders}) == 20
    assert orders[0] == [3, 0, 5, 3, 6, 7, 1, 0]


# By difficulty ----------------------------------------------------------------------------------------------


def tasks(*levels) -> list[Task]:
    return [Task(f"t{i}", "?", ("1",), "math", {"level": level}) for i, level in enumerate(levels)]


def test_tasks_are_ordered_by_their_number_and_equals_stay_as_they_are():
    assert [task.id for task in by_difficulty(tasks(3, 1, 2.5, 1), "level")] == ["t1", "t3", "t2", "t0"]


def test_a_quarter_is_open_at_first_and_all_from_the_middle_on():
    assert [open_at(update, 8, 100) for update in range(9)] == [25, 44, 63, 82, 100, 100, 100, 100, 100]
    assert open_at(0, 8, 1) == 1


@given(st.integers(1, 60), st.integers(1, 50))
def test_what_is_open_grows_from_the_first_share_to_all(count, updates):
    opened = [open_at(update, updates, count) for update in range(updates + 1)]
    assert opened == sorted(opened)
    assert 1 <= opened[0] <= FIRST * count + 1
    assert opened[-1] == count


@given(st.integers(1, 40), st.integers(0, 2**64), st.integers(0, 10**9))
def test_what_is_open_comes_up_once_an_epoch_and_nothing_else_does(opened, seed, epoch):
    easiest = tasks(*range(50))
    found = [eased(easiest, seed, epoch * opened + place, opened) for place in range(opened)]
    assert sorted(int(task.id[1:]) for task in found) == list(range(opened))


# What is refused --------------------------------------------------------------------------------------------

NO_NUMBER = "which is no number: give every task a number there"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: seen(EMPTY, -1, 0.5), "the number of the task is -1"),
        (lambda: seen(EMPTY, 0, 1.5), r"success is 1\.5"),
        (lambda: seen(EMPTY, 0, float("nan")), "success is nan"),
        (lambda: chosen(EMPTY, 0, 0, 0), "there are 0 tasks"),
        (lambda: chosen(EMPTY, 0, -1, 3), "the place of the group is -1"),
        (lambda: open_at(0, 0, 3), "update 0 of 0 is none"),
        (lambda: by_difficulty(tasks(1, "hard"), "level"), f"task 't1': field 'level' is 'hard', {NO_NUMBER}"),
        (lambda: by_difficulty(tasks(1, True), "level"), "task 't1': field 'level' is True, which is no number"),
        (lambda: by_difficulty(tasks(1, float("nan")), "level"), "task 't1': field 'level' is nan"),
        (lambda: by_difficulty(tasks(1), "grade"), "task 't0': field 'grade' is missing: .* name the field"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(BadInput, match=words):
        call()
