"""Two-hop questions: passages that the search finds, and people of each split."""

import pytest

from flowgrpo.recipes.task_sets.task_set import SPLITS
from flowgrpo.recipes.task_sets.two_hop import EXAMPLE_PEOPLE, KINDS, TWO_HOP, WORDINGS, ask, passages, people_of, world
from flowgrpo.tools.search import Corpus, Document, search


@pytest.fixture(scope="module")
def find():
    """Search for a query -> the best passage."""
    documents = [
        Document(passage["title"], passage["text"], "corpus", n, False) for n, passage in enumerate(passages(), 1)
    ]
    tool = search(Corpus(tuple(documents)), top=1)
    return lambda query: tool.call({"query": query})


def test_each_name_finds_its_own_passage(find):
    assert len(passages()) == 237
    for passage in passages():
        assert find(passage["title"]).startswith(f"[1] {passage['title']}: {passage['text']}")
        assert len(passage["text"].split()) <= 25
        assert passage["text"].isascii()


def test_the_steps_of_a_task_lead_to_its_answer(find):
    for task in [*(task for split in SPLITS for task in TWO_HOP.draw(0, split, 0, 72)), *TWO_HOP.examples]:
        (_, person), (_, second) = task.metadata["steps"]
        assert person in task.query
        assert second not in task.query
        assert second in find(person)
        assert task.metadata["final"] in find(second)
        assert task.metadata["final"] not in find(person)
        assert 1 <= len(task.metadata["final"].split()) <= 2


def test_no_split_asks_about_a_person_of_another():
    people = [name for split in SPLITS for name in people_of(split)]
    assert 160 < len(people) == len(set(people))
    assert not set(people) & set(EXAMPLE_PEOPLE)
    assert [len(people_of(split)) / len(people) for split in SPLITS] == pytest.approx([0.6, 0.15, 0.25], abs=0.02)
    assert {task.metadata["steps"][0][1] for task in TWO_HOP.draw(0, "test", 0, 200)} <= set(people_of("test"))


def test_an_answer_occurs_once_in_its_passage():
    for passages_of_kind in world()[1:]:
        for name, fields in passages_of_kind.items():
            text = next(passage["text"] for passage in passages() if passage["title"] == name)
            assert all(text.count(value) == 1 for value in fields.values())


def test_a_question_in_each_wording():
    queries = [ask(("town", "mayor", wording), "Mira Stone").query for wording in WORDINGS]
    assert queries == [
        "Who is the mayor of the town where Mira Stone was born?",
        "Mira Stone was born in a town. Who is its mayor?",
        "Find the mayor of the town where Mira Stone was born.",
        "Think of the town where Mira Stone was born. Who is its mayor?",
    ]
    assert all({kind[0] for kind in KINDS[split]} == {"town", "company", "school"} for split in SPLITS)


def test_examples_have_different_first_hops():
    assert {task.metadata["kind"].split(", ")[0] for task in TWO_HOP.examples} == {"town", "company", "school"}
