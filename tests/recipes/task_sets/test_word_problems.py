"""Word problems: the calculator's answers, the numbers in them, and their words."""

import re
from collections import Counter

import pytest

from flowgrpo.recipes.task_sets.task_set import SPLITS
from flowgrpo.recipes.task_sets.word_problems import (
    EXAMPLE_PEOPLE,
    KINDS,
    ONE_STEP,
    PEOPLE,
    SENTENCES,
    STORIES,
    STRUCTURES,
    WORD_PROBLEMS,
    write_problem,
)
from flowgrpo.tools.calculator import calculator


@pytest.fixture(scope="module")
def tasks():
    return [task for split in SPLITS for task in WORD_PROBLEMS.draw(0, split, 0, 320)] + list(WORD_PROBLEMS.examples)


def test_the_last_call_of_the_calculator_gives_the_answer(tasks):
    compute = calculator().call
    for task in tasks:
        results = [compute({"expression": expression}) for _, expression in task.metadata["steps"]]
        assert results[-1] == task.metadata["final"]
        assert all(result.isdigit() and int(result) > 0 for result in results)
        if len(results) == 2:
            assert results[0] in task.metadata["steps"][1][1].split()


def test_the_numbers_of_a_query_are_those_of_its_steps(tasks):
    for task in tasks:
        numbers = re.findall(r"\d+", task.query)
        assert all(2 <= len(number) <= 3 for number in numbers)
        used = re.findall(r"\d+", " ".join(expression for _, expression in task.metadata["steps"]))
        assert set(numbers) <= set(used)


def test_half_of_the_tasks_have_one_step_and_kinds_are_balanced():
    for split in SPLITS:
        size = len(KINDS[0][split])
        assert size == len(KINDS[1][split])
        tasks = WORD_PROBLEMS.draw(0, split, 0, 4 * size)
        assert Counter(len(task.metadata["steps"]) for task in tasks) == {1: 2 * size, 2: 2 * size}
        assert set(Counter(task.metadata["kind"] for task in tasks).values()) == {2}


def test_examples_cover_the_four_operations_and_end_with_two_steps():
    steps = [task.metadata["steps"] for task in WORD_PROBLEMS.examples]
    assert {step[0][1].split()[1] for step in steps if len(step) == 1} == {*"+-*/"}
    assert [len(step) for step in steps] == [1, 1, 2, 1, 1, 2]
    names = {name for name, _ in EXAMPLE_PEOPLE}
    assert not names & {name for name, _ in PEOPLE}
    assert all(names & set(re.findall(r"\w+", task.query)) for task in WORD_PROBLEMS.examples)


def test_every_kind_can_be_written():
    numbers = [36, 24, 12]
    for structure in STRUCTURES:
        count = 2 if structure in ONE_STEP or structure == "a + a * b" else 3
        for story in STORIES:
            for wording in SENTENCES:
                query = write_problem((structure, story, wording), numbers[:count], PEOPLE[:2]).query
                assert re.fullmatch(r"([A-Z][A-Za-z0-9 ,]+\. )+How many [A-Za-z ]+\?", query), query
                assert story in query
                assert re.findall(r"\d+", query) == [str(number) for number in numbers[:count]]


def test_a_problem_of_two_steps_in_words():
    problem = write_problem(("(a - b) * c", "books", "place"), [40, 12, 15], PEOPLE[:2])
    assert problem.query == (
        "There are 40 shelves of books in the library. Anna takes 12 shelves away. Each shelf has 15 books. "
        "How many books are in the library now?"
    )
    assert problem.steps == [("calculator", "40 - 12"), ("calculator", "28 * 15")]
    assert problem.final == "420"
