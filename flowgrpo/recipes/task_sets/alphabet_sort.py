"""Names to sort, in one turn without a tool: after alphabet-sort of verifiers and prime-rl.

    Sort these names alphabetically by last name: Ivan Price, Carla Dunn, Hanna Gray
        Carla Dunn, Hanna Gray, Ivan Price

The published environment is a conversation of one to three turns: the first gives names of authors to sort, each later
one gives more, to be merged into the list and marked as new. Here a task has one query with three to six names. The
reward is like the published one: the similarity of the answer to the sorted list, to the fourth power, in domain
"alphabet_sort". A kind is the number of names, the sort key, and a wording.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np

from flowgrpo.recipes.task_sets.task_set import (
    Kind,
    SolvedQuery,
    TaskSet,
    make_draw,
    make_task,
    pick_distinct,
    split_kinds,
)

NAME = "alphabet_sort"

# fmt: off
FIRST_NAMES = (
    "Alice", "Bob", "Carla", "Daniel", "Eva", "Frank", "Grace", "Hanna", "Ivan", "James", "Karl", "Laura", "Mark",
    "Nora", "Oliver", "Paula", "Quinn", "Robert", "Susan", "Thomas", "Ursula", "Victor", "Wendy", "Xavier", "Yara",
    "Zoe", "Amy", "Brian", "Chloe", "Diana", "Eric", "Fiona", "George", "Helen", "Irene", "Jason", "Kevin", "Linda",
    "Martin", "Nancy",
)
LAST_NAMES = (
    "Adams", "Baker", "Clark", "Dunn", "Evans", "Fox", "Gray", "Hill", "Irwin", "Jones", "King", "Lewis", "Moore",
    "Nash", "Owens", "Price", "Quick", "Reed", "Smith", "Turner", "Upton", "Vance", "White", "Young", "Allen", "Brown",
    "Cook", "Davis", "Ellis", "Ford", "Green", "Harris", "Jackson", "Kelly", "Lopez", "Miller", "Nelson", "Parker",
    "Russell", "Taylor",
)
# fmt: on
COUNTS = {"three": 3, "four": 4, "five": 5, "six": 6}
KEYS = {"first names": "", "by first name": " by first name", "by last name": " by last name"}
WORDINGS = {
    "sort": "Sort these names alphabetically{key}: {names}",
    "order": "Put these names in alphabetical order{key}: {names}",
}

KINDS = split_kinds(NAME, [*product(COUNTS, KEYS, WORDINGS)])


def sort_names(kind: Kind, names: Sequence[str]) -> SolvedQuery:
    """Ask to sort names as a kind says. Their last word is the last name."""
    _, key, wording = kind
    query = WORDINGS[wording].format(key=KEYS[key], names=", ".join(names))
    in_order = sorted(names, key=lambda name: name.split()[-1 if key == "by last name" else 0])
    return SolvedQuery(query, [], ", ".join(in_order))


def _solve(random: np.random.Generator, kind: Kind, split: str) -> SolvedQuery:  # noqa: ARG001
    count, key, _ = kind
    names = pick_distinct(random, FIRST_NAMES, COUNTS[count])
    if key != "first names":
        last_names = pick_distinct(random, LAST_NAMES, COUNTS[count])
        names = [f"{first} {last}" for first, last in zip(names, last_names, strict=True)]
    return sort_names(kind, names)


draw = make_draw(NAME, "alphabet_sort", [KINDS], _solve)

EXAMPLES = tuple(  # with names that are in no task
    make_task(f"{NAME}-example-{i}", "alphabet_sort", kind, sort_names(kind, names))
    for i, (kind, names) in enumerate(
        [
            (("three", "first names", "sort"), ["Tina", "Albert", "Monica"]),
            (("four", "by last name", "order"), ["Tina Webb", "Albert Young", "Monica Bishop", "Dennis Hart"]),
        ]
    )
)

ALPHABET_SORT = TaskSet(
    name=NAME,
    draw=draw,
    examples=EXAMPLES,
    tools=(),
    instructions="Answer with the sorted names, separated by commas.",
)
