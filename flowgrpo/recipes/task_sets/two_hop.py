"""Two-hop questions for an agent that searches a small synthetic corpus.

    Which river flows through the town where Mira Stone was born?
        search   Mira Stone    Mira Stone was born in Glenwood, works for Comet Company and studied at ...
        search   Glenwood      Glenwood lies in Estonga on the river Brae. It is known for lace. Its mayor is ...
        answer   Brae

A person leads to a town, a company or a school, and that to the answer. A kind is the first relation, the second one
and a wording. People are split, too: no training task asks about a person of the test split.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from flowgrpo.recipes.task_sets.task_set import (
    SPLITS,
    Kind,
    SolvedQuery,
    TaskSet,
    make_draw,
    make_task,
    pick,
    sort_by_hash,
    split_kinds,
)

NAME = "two_hop"

# The world ----------------------------------------------------------------------------------------------

# fmt: off
FIRST_NAMES = (
    "Mira", "Oscar", "Tessa", "Bruno", "Ida", "Jonas", "Lena", "Pavel", "Ruth", "Simon", "Vera", "Aron", "Dora",
    "Emil", "Greta", "Hanna", "Karl", "Nora",
)
LAST_NAMES = ("Stone", "Marsh", "Finch", "Holt", "Thorne", "Wilder", "Crane", "Ash", "Brook", "Reed")
# Mayors, founders and heads: no question is about them.
OFFICE_FIRST_NAMES = ("Ada", "Hugo", "Karin", "Niko", "Petra", "Ralph", "Wanda", "Felix", "Olga", "Victor")
OFFICE_LAST_NAMES = ("Frost", "Lake", "Snow", "Parker", "Bell", "Carter")
TOWNS = (
    "Redhill", "Oakford", "Millbrook", "Westport", "Ashby", "Fairview", "Kingsley", "Northgate", "Elmwood", "Stanton",
    "Brightwater", "Larkfield", "Holloway", "Crestview", "Dunmore", "Easton", "Glenwood", "Harwick", "Ironbridge",
    "Kirkby", "Lindale", "Maplewood", "Newhaven", "Rosedale", "Silverton",
)
LANDS = ("Norland", "Estonga", "Morania", "Calden", "Iskara", "Tervia")
RIVERS = ("Tarn", "Orsa", "Welk", "Dove", "Lune", "Sable", "Nida", "Brae")
WARES = ("glass", "cheese", "bells", "lace", "honey", "knives", "paper", "salt", "wine", "carpets")
COMPANIES = (
    "Corvex Works", "Dalton Group", "Apex Company", "Bluebird Works", "Sunrise Group", "Falcon Company", "Titan Works",
    "Harbor Group", "Clover Company", "Nova Works", "Pioneer Group", "Summit Company", "Orchid Works", "Granite Group",
    "Comet Company", "Anchor Works", "Lotus Group", "Eagle Company", "Prairie Works", "Cobalt Group",
)
PRODUCTS = ("lamps", "boots", "engines", "chairs", "clocks", "radios", "ropes", "tents", "pianos", "shirts")
SCHOOLS = (
    "Vale College", "Thames Academy", "Lincoln School", "Trinity Hall", "Maxwell Institute", "Newton College",
    "Cedar Academy", "Beacon School", "Wesley Hall", "Darwin Institute", "Hudson College", "Regent Academy",
)
# fmt: on
PassageFields = Mapping[str, str]


class World(NamedTuple):
    """Everything in the corpus: name -> fields of its passage."""

    people: Mapping[str, PassageFields]
    town: Mapping[str, PassageFields]
    company: Mapping[str, PassageFields]
    school: Mapping[str, PassageFields]


TEXTS = (  # templates of the passages, in the order of the fields of `World`
    "{name} was born in {town}, works for {company} and studied at {school}.",
    "{name} lies in {land} on the river {river}. It is known for {ware}. Its mayor is {mayor}.",
    "{name} makes {product} in {place}. It was founded by {founder}.",
    "{name} is a school in {place}. Its head is {head}.",
)


@cache
def world() -> World:
    """The world, the same in every process."""
    random = np.random.default_rng(11)
    offices = [f"{first} {last}" for first, last in product(OFFICE_FIRST_NAMES, OFFICE_LAST_NAMES)]
    officials = iter([offices[int(i)] for i in random.permutation(len(offices))])
    town = {
        name: {"land": pick(random, LANDS), "river": pick(random, RIVERS), "ware": ware, "mayor": next(officials)}
        for name, ware in zip(TOWNS, _balanced(random, WARES, len(TOWNS)), strict=True)
    }
    company = {
        name: {"product": product_name, "place": pick(random, TOWNS), "founder": next(officials)}
        for name, product_name in zip(COMPANIES, _balanced(random, PRODUCTS, len(COMPANIES)), strict=True)
    }
    school = {name: {"place": pick(random, TOWNS), "head": next(officials)} for name in SCHOOLS}
    names = [f"{first} {last}" for first, last in product(FIRST_NAMES, LAST_NAMES)]
    columns = [_balanced(random, options, len(names)) for options in (TOWNS, COMPANIES, SCHOOLS)]
    people = {
        name: {"town": home, "company": company_name, "school": school_name}
        for name, home, company_name, school_name in zip(names, *columns, strict=True)
    }
    return World(people, town, company, school)


def _balanced(random: np.random.Generator, options: Sequence[str], count: int) -> list[str]:
    """`count` options in random order, each as often as the others (or once more)."""
    return [options[int(i) % len(options)] for i in random.permutation(count)]


def passages() -> list[dict[str, str]]:
    """The corpus: a passage about each person, town, company and school."""
    return [
        {"title": name, "text": text.format(name=name, **fields)}
        for text, passages_of_kind in zip(TEXTS, world(), strict=True)
        for name, fields in passages_of_kind.items()
    ]


# Questions ----------------------------------------------------------------------------------------------

FIRST_HOPS = {  # a noun phrase for what a person leads to, and a sentence
    "town": ("the town where {name} was born", "{name} was born in a town."),
    "company": ("the company where {name} works", "{name} works for a company."),
    "school": ("the school where {name} studied", "{name} studied at a school."),
}
SECOND_HOPS = {  # a question about {it}, a question that follows a sentence, and a request
    ("town", "land"): ("In which land is {it}?", "In which land is it?", "Find the land of {it}."),
    ("town", "river"): (
        "Which river flows through {it}?",
        "Which river flows through it?",
        "Find the river of {it}.",
    ),
    ("town", "ware"): ("What is {it} known for?", "What is it known for?", "Find what {it} is known for."),
    ("town", "mayor"): ("Who is the mayor of {it}?", "Who is its mayor?", "Find the mayor of {it}."),
    ("company", "product"): ("What does {it} make?", "What does it make?", "Find the product of {it}."),
    ("company", "place"): ("In which town is {it}?", "In which town is it?", "Find the town of {it}."),
    ("company", "founder"): ("Who founded {it}?", "Who founded it?", "Find the founder of {it}."),
    ("school", "place"): ("In which town is {it}?", "In which town is it?", "Find the town of {it}."),
    ("school", "head"): ("Who is the head of {it}?", "Who is its head?", "Find the head of {it}."),
}
WORDINGS = ("question", "sentence", "request", "thought")
EXAMPLE_PEOPLE = ("Ruth Finch", "Emil Brook", "Tessa Crane")  # of no split

# Split separately for each first hop, so that every hop is in each split.
_KINDS_OF_HOP = [
    split_kinds(NAME, [(*hops, wording) for hops, wording in product(SECOND_HOPS, WORDINGS) if hops[0] == first])
    for first in FIRST_HOPS
]
KINDS = {split: sort_by_hash(NAME, [kind for splits in _KINDS_OF_HOP for kind in splits[split]]) for split in SPLITS}


@cache
def people_of(split: str) -> list[str]:
    """People that the questions of a split are about; the answer is never in their own passage."""
    kinds = [(name,) for name in world().people if name not in EXAMPLE_PEOPLE and not _answer_is_birthplace(name)]
    order = [name for (name,) in sort_by_hash(NAME, kinds)]
    tests, validations = len(order) // 4, len(order) // 7  # larger fractions than of kinds, so that few tasks repeat
    ends = {"test": (0, tests), "validation": (tests, tests + validations), "train": (tests + validations, len(order))}
    first, end = ends[split]
    return order[first:end]


def _answer_is_birthplace(name: str) -> bool:
    """Whether the company or the school of a person is in their town of birth."""
    person = world().people[name]
    places = world().company[person["company"]]["place"], world().school[person["school"]]["place"]
    return person["town"] in places


def ask(kind: Kind, name: str) -> SolvedQuery:
    """Ask the question of a kind about a person."""
    first, second, wording = kind
    person = world().people[name]
    entities: Mapping[str, PassageFields] = getattr(world(), first)
    noun, sentence = (text.format(name=name) for text in FIRST_HOPS[first])
    question, following, request = SECOND_HOPS[first, second]
    query = {
        "question": question.format(it=noun),
        "sentence": f"{sentence} {following}",
        "request": request.format(it=noun),
        "thought": f"Think of {noun}. {following}",
    }[wording]
    return SolvedQuery(query, [("search", name), ("search", person[first])], entities[person[first]][second])


def _solve(random: np.random.Generator, kind: Kind, split: str) -> SolvedQuery:
    return ask(kind, pick(random, people_of(split)))


draw = make_draw(NAME, "answer", [KINDS], _solve)

EXAMPLES = tuple(
    make_task(f"{NAME}-example-{i}", "answer", kind, ask(kind, name))
    for i, (kind, name) in enumerate(
        zip(
            [("town", "river", "question"), ("company", "product", "request"), ("school", "head", "sentence")],
            EXAMPLE_PEOPLE,
            strict=True,
        )
    )
)

TWO_HOP = TaskSet(
    name=NAME,
    draw=draw,
    examples=EXAMPLES,
    tools=("search",),
    instructions="Search the name. Then search the town, company or school that it gives. Answer in one or two words.",
    passages=passages,
)
