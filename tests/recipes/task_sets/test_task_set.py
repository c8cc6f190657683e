"""Laws of all task sets: kinds of a split, what tasks depend on, and steps that lead to answers."""

from itertools import product

import pytest
from gguf_models import packaged

from flowgrpo.data.tokenizer import load_tokenizer
from flowgrpo.recipes.agent_config import preset
from flowgrpo.recipes.registry import DOMAINS
from flowgrpo.recipes.task_sets import TASK_SETS
from flowgrpo.recipes.task_sets.task_set import SPLITS, split_kinds
from flowgrpo.types import BadInput

every_set = pytest.mark.parametrize("task_set", TASK_SETS.values(), ids=TASK_SETS)
MANY = 320  # tasks that have every kind of a split


def kinds_of(task_set, split):
    """Kinds of the tasks of a split, as tuples of parts."""
    return {tuple(task.metadata["kind"].split(", ")) for task in task_set.draw(0, split, 0, MANY)}


@every_set
def test_no_kind_of_the_test_is_in_training_but_each_of_its_parts_is(task_set):
    train, validation, test = (kinds_of(task_set, split) for split in SPLITS)
    assert len(train | validation | test) == len(train) + len(validation) + len(test)
    assert len(test) >= 3
    parts = {part for kind in train for part in enumerate(kind)}
    assert parts >= {part for kind in test | validation for part in enumerate(kind)}


@every_set
def test_tasks_depend_on_seed_split_and_index_alone(task_set):
    for split in SPLITS:
        tasks = task_set.draw(3, split, 0, 8)
        assert tasks[4:] == task_set.draw(3, split, 4, 4)
        assert [task.query for task in tasks] != [task.query for task in task_set.draw(4, split, 0, 8)]
    assert task_set.draw(3, "test", 10**9, 1)[0].id.endswith("-test-1000000000-3")


@every_set
def test_a_task_has_a_domain_an_answer_and_steps_with_tools_of_its_set(task_set):
    tasks = [task for split in SPLITS for task in task_set.draw(0, split, 0, 40)] + list(task_set.examples)
    assert len({task.id for task in tasks}) == len(tasks)
    for task in tasks:
        assert task.domain in DOMAINS
        assert task.answers == (task.metadata["final"],)
        assert {tool for tool, _ in task.metadata["steps"]} == set(task_set.tools)
        texts = [task.query, task.metadata["final"], *(context for _, context in task.metadata["steps"])]
        assert all(text and text.isascii() and text.isprintable() for text in texts)
    assert task_set.instructions.isascii()


@pytest.mark.oracle
@every_set
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_an_answer_fits_into_an_action(task_set, name):
    packaged(name)
    text, max_tokens = load_tokenizer(name), preset(model=name, tasks=task_set.name).rollout.max_tokens
    answers = [task.answers[0] for split in SPLITS for task in task_set.draw(0, split, 0, MANY)]
    assert max(len(text.encode(f"answer({answer})")) for answer in answers) < max_tokens  # which ends by a token more


@every_set
def test_examples_have_kinds_of_training_and_are_no_tasks(task_set):
    assert 2 <= len(task_set.examples) <= 6
    assert {tuple(task.metadata["kind"].split(", ")) for task in task_set.examples} <= kinds_of(task_set, "train")
    queries = {task.query for split in SPLITS for task in task_set.draw(0, split, 0, MANY)}
    assert not queries & {task.query for task in task_set.examples}


@every_set
def test_bad_arguments_of_draw_are_refused(task_set):
    with pytest.raises(BadInput, match="split is 'dev', but must be one of train, validation, test"):
        task_set.draw(0, "dev", 0, 1)
    with pytest.raises(BadInput, match="seed is 0, first -1 and count 2, but each must be at least 0"):
        task_set.draw(0, "train", -1, 2)


def test_each_set_is_listed_by_name_and_has_a_corpus_if_it_searches():
    assert list(TASK_SETS) == ["word_problems", "two_hop", "reverse_text", "alphabet_sort"]
    for name, task_set in TASK_SETS.items():
        assert name == task_set.name
        assert ("search" in task_set.tools) == (task_set.passages is not None)


def test_a_kind_stays_in_training_if_it_is_the_last_with_a_part():
    kinds = [*product("ab", "xyz"), ("c", "x")]
    splits = split_kinds("letters", kinds)
    assert sorted(kind for kinds_of_split in splits.values() for kind in kinds_of_split) == sorted(kinds)
    assert ("c", "x") in splits["train"]
    assert {len(splits["validation"]), len(splits["test"])} <= {1, 3}
    assert splits == split_kinds("letters", kinds[::-1])
