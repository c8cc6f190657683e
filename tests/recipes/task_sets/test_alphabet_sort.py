"""Names to sort: the order of the answer, and the reward of their domain."""

from itertools import pairwise

from flowgrpo.recipes.registry import DOMAINS, RewardContext
from flowgrpo.recipes.task_sets.alphabet_sort import ALPHABET_SORT, COUNTS, FIRST_NAMES, LAST_NAMES
from flowgrpo.recipes.task_sets.task_set import SPLITS


def test_the_answer_has_the_names_of_the_query_in_order():
    for task in [task for split in SPLITS for task in ALPHABET_SORT.draw(1, split, 0, 48)]:
        count, key, _ = task.metadata["kind"].split(", ")
        names, answer = task.query.split(": ")[1].split(", "), task.answers[0].split(", ")
        assert sorted(names) == sorted(answer)
        assert len(set(names)) == COUNTS[count]
        keys = [name.split()[-1 if key == "by last name" else 0] for name in answer]
        assert all(first < second for first, second in pairwise(keys))
        assert {len(name.split()) for name in names} == {1 if key == "first names" else 2}


def test_examples_have_names_of_no_task():
    names = {name.split()[0] for task in ALPHABET_SORT.examples for name in task.answers[0].split(", ")}
    assert not names & {*FIRST_NAMES, *LAST_NAMES}


def test_the_sorted_list_scores_1_and_the_unsorted_one_less():
    reward = DOMAINS["alphabet_sort"].make(RewardContext(sandbox=None))  # no sandbox judges a list
    for task in ALPHABET_SORT.draw(2, "train", 0, 48):
        unsorted = task.query.split(": ")[1]
        assert reward.score(task, task.answers[0]).value == 1.0
        assert reward.score(task, f"The sorted names:\n{task.answers[0].lower()}.").value == 1.0
        assert unsorted == task.answers[0] or reward.score(task, unsorted).value < 0.9
