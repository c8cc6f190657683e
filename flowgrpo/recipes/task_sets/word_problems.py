"""Word problems for an agent with a calculator: everyday stories of one or two operations.

    Anna has 213 stickers. She buys 148 more stickers.            calculator   213 + 148
    How many stickers does Anna have now?                         361

    There are 25 boxes of pens in the shop. Omar brings 17        calculator   25 + 17
    more boxes. Each box has 36 pens. How many pens are in        calculator   42 * 36
    the shop now?                                                 1512

A kind is a structure of operations, a story, and a wording ("own": somebody owns the items, "place": they are at a
place). Tasks with one step and with two steps alternate. All numbers are positive integers.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

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

NAME = "word_problems"
Numbers = Sequence[int]


# Stories ------------------------------------------------------------------------------------------------


class Story(NamedTuple):
    """Nouns and verbs of a story; the fields are the placeholders of `SENTENCES`."""

    items: str
    pack: str
    packs: str
    gets: str  # the owner gains items
    loses: str  # the owner loses items; {n} is the number and the noun
    friends: str
    place: str
    brings: str  # somebody adds items to the place
    takes: str  # somebody removes items from the place
    bags: str  # containers for all items
    bag: str
    elsewhere: str


# fmt: off
STORIES = {story.items: story for story in (
    Story("stickers", "pack", "packs", "buys", "gives {n} away", "friends",
          "in the drawer", "puts in", "takes out", "envelopes", "envelope", "on the desk"),
    Story("pens", "box", "boxes", "buys", "gives {n} away", "pupils",
          "in the shop", "brings", "sells", "cups", "cup", "in the school"),
    Story("apples", "crate", "crates", "picks", "sells {n}", "neighbors",
          "in the barn", "brings", "takes away", "bags", "bag", "in the kitchen"),
    Story("coins", "jar", "jars", "finds", "spends {n}", "children",
          "in the chest", "adds", "takes out", "purses", "purse", "in the bank"),
    Story("books", "shelf", "shelves", "buys", "sells {n}", "schools",
          "in the library", "brings", "borrows", "boxes", "box", "in the museum"),
    Story("eggs", "tray", "trays", "buys", "uses {n}", "bakers",
          "in the cold room", "brings", "takes out", "baskets", "basket", "on the farm"),
    Story("cards", "deck", "decks", "wins", "loses {n}", "players",
          "on the table", "adds", "removes", "piles", "pile", "in the cabinet"),
    Story("cookies", "tin", "tins", "bakes", "eats {n}", "guests",
          "in the bakery", "brings", "sells", "bags", "bag", "in the cafe"),
    Story("tickets", "roll", "rolls", "prints", "sells {n}", "clubs",
          "in the office", "brings", "takes away", "folders", "folder", "at the gate"),
    Story("beads", "string", "strings", "buys", "uses {n}", "girls",
          "in the workshop", "brings", "takes away", "bowls", "bowl", "in the store"),
    Story("photos", "album", "albums", "prints", "gives {n} away", "relatives",
          "in the studio", "brings", "takes away", "folders", "folder", "in the hall"),
    Story("bricks", "stack", "stacks", "buys", "uses {n}", "workers",
          "in the yard", "brings", "takes away", "carts", "cart", "at the harbor"),
    Story("bottles", "case", "cases", "fills", "sells {n}", "hotels",
          "in the cellar", "brings", "takes out", "racks", "rack", "in the garage"),
    Story("tulips", "bunch", "bunches", "picks", "sells {n}", "visitors",
          "in the market", "brings", "takes away", "vases", "vase", "in the garden"),
    Story("shells", "bucket", "buckets", "finds", "loses {n}", "classmates",
          "on the boat", "brings", "takes away", "boxes", "box", "on the beach"),
)}
PEOPLE = [
    *((name, "She") for name in ("Anna", "Maria", "Emma", "Sara", "Nina", "Julia", "Clara", "Rosa", "Lisa", "Ella")),
    *((name, "He") for name in ("Omar", "Peter", "David", "Paul", "Jack", "Leo", "Adam", "Max", "Sam", "Henry")),
]
EXAMPLE_PEOPLE = [("Lucy", "She"), ("Tom", "He"), ("Kate", "She"), ("Bill", "He")]  # in no task
# fmt: on

# Sentences of each wording; {a} is the number in the sentence.
SENTENCES = {
    "own": {
        "have": "{name} has {a} {items}.",
        "gain": "{He} {gets} {a} more {items}.",
        "lose": "{He} {loses}.",
        "now": "How many {items} does {name} have now?",
        "packs": "{name} has {a} {packs} of {items}.",
        "gain packs": "{He} gets {a} more {packs}.",
        "lose packs": "{He} gives {a} {packs} away.",
        "size": "Each {pack} has {a} {items}.",
        "all": "How many {items} does {name} have in all?",
        "share left": "{He} shares the {items} that are left equally among {a} {friends}.",
        "share": "{He} shares all the {items} equally among {a} {friends}.",
        "each": "How many {items} does each of the {friends} get?",
        "times": "{other} has {a} times as many {items} as {name}.",
        "other": "How many {items} does {other} have?",
        "together": "How many {items} do {name} and {other} have together?",
    },
    "place": {
        "have": "There are {a} {items} {place}.",
        "gain": "{name} {brings} {a} more {items}.",
        "lose": "{name} {takes} {a} {items}.",
        "now": "How many {items} are {place} now?",
        "packs": "There are {a} {packs} of {items} {place}.",
        "gain packs": "{name} brings {a} more {packs}.",
        "lose packs": "{name} takes {a} {packs} away.",
        "size": "Each {pack} has {a} {items}.",
        "all": "How many {items} are {place} in all?",
        "share left": "{name} puts the {items} that are left into {a} {bags}, the same number into each.",
        "share": "{name} puts all the {items} into {a} {bags}, the same number into each.",
        "each": "How many {items} are in each {bag}?",
        "times": "There are {a} times as many {items} {elsewhere} as {place}.",
        "other": "How many {items} are {elsewhere}?",
        "together": "How many {items} are there in both places together?",
    },
}


# Structures ---------------------------------------------------------------------------------------------


class Structure(NamedTuple):
    """Structure of a problem."""

    sentences: Sequence[str]  # keys of `SENTENCES`; each sentence with a number uses the next one
    expressions: Sequence[str]  # {r} is the result of the previous expression
    numbers: Callable[[np.random.Generator], Numbers]  # draws the numbers


def _between(random: np.random.Generator, *ranges: tuple[int, int]) -> list[int]:
    """Draw a number from each range, ends included."""
    return [int(random.integers(low, high + 1)) for low, high in ranges]


def _difference(random: np.random.Generator, low: int, high: int) -> list[int]:
    """Draw a minuend between `low` and `high`, and a subtrahend that leaves at least a tenth of it."""
    minuend = int(random.integers(low, high + 1))
    return [minuend, int(random.integers(low // 2, minuend - minuend // 10 + 1))]


def _quotient(random: np.random.Generator) -> list[int]:
    """Draw a multiple of a divisor, and the divisor."""
    quotient, divisor = _between(random, (12, 60), (11, 16))
    return [quotient * divisor, divisor]


def _divided_product(random: np.random.Generator) -> list[int]:
    """Draw two factors, and a divisor of their product."""
    divisor, times, size = _between(random, (11, 16), (2, 5), (12, 40))
    return [divisor * times, size, divisor]


def _divided_sum(random: np.random.Generator) -> list[int]:
    """Draw two terms, and a divisor of their sum."""
    total, divisor = _quotient(random)
    first = int(random.integers(total // 3, total - total // 5))
    return [first, total - first, divisor]


def _divided_difference(random: np.random.Generator) -> list[int]:
    """Draw two numbers, and a divisor of their difference."""
    difference, divisor = _quotient(random)
    (subtrahend,) = _between(random, (25, min(250, 999 - difference)))
    return [difference + subtrahend, subtrahend, divisor]


def _product_less(random: np.random.Generator) -> list[int]:
    """Draw two factors, and a number below their product."""
    times, size = _between(random, (12, 45), (12, 45))
    return [times, size, int(random.integers(25, min(999, times * size * 3 // 4)))]


def _sum_less(random: np.random.Generator) -> list[int]:
    """Draw two terms, and a number below their sum."""
    first, second = _between(random, (105, 480), (105, 480))
    return [first, second, int(random.integers(35, first + second - 20))]


ONE_STEP = {
    "a + b": Structure(("have", "gain", "now"), ("{a} + {b}",), lambda r: _between(r, (105, 890), (105, 890))),
    "a - b": Structure(("have", "lose", "now"), ("{a} - {b}",), lambda r: _difference(r, 150, 980)),
    "a * b": Structure(("packs", "size", "all"), ("{a} * {b}",), lambda r: _between(r, (12, 68), (12, 68))),
    "a / b": Structure(("have", "share", "each"), ("{a} / {b}",), _quotient),
    "times": Structure(("have", "times", "other"), ("{a} * {b}",), lambda r: _between(r, (23, 98), (11, 25))),
}
TWO_STEPS = {
    "(a + b) * c": Structure(
        ("packs", "gain packs", "size", "now"),
        ("{a} + {b}", "{r} * {c}"),
        lambda r: _between(r, (12, 48), (12, 48), (12, 36)),
    ),
    "(a - b) * c": Structure(
        ("packs", "lose packs", "size", "now"),
        ("{a} - {b}", "{r} * {c}"),
        lambda r: [*_difference(r, 24, 90), *_between(r, (12, 36))],
    ),
    "a * b + c": Structure(
        ("packs", "size", "gain", "now"),
        ("{a} * {b}", "{r} + {c}"),
        lambda r: _between(r, (12, 45), (12, 45), (25, 480)),
    ),
    "a * b - c": Structure(("packs", "size", "lose", "now"), ("{a} * {b}", "{r} - {c}"), _product_less),
    "a + b - c": Structure(("have", "gain", "lose", "now"), ("{a} + {b}", "{r} - {c}"), _sum_less),
    "a - b + c": Structure(
        ("have", "lose", "gain", "now"),
        ("{a} - {b}", "{r} + {c}"),
        lambda r: [*_difference(r, 150, 980), *_between(r, (105, 480))],
    ),
    "a * b / c": Structure(("packs", "size", "share", "each"), ("{a} * {b}", "{r} / {c}"), _divided_product),
    "(a + b) / c": Structure(("have", "gain", "share", "each"), ("{a} + {b}", "{r} / {c}"), _divided_sum),
    "(a - b) / c": Structure(("have", "lose", "share left", "each"), ("{a} - {b}", "{r} / {c}"), _divided_difference),
    "a + a * b": Structure(
        ("have", "times", "together"), ("{a} * {b}", "{a} + {r}"), lambda r: _between(r, (23, 98), (11, 25))
    ),
}
STRUCTURES = ONE_STEP | TWO_STEPS


# Tasks --------------------------------------------------------------------------------------------------


def write_problem(kind: Kind, numbers: Numbers, people: Sequence[tuple[str, str]]) -> SolvedQuery:
    """Write the problem of a kind with these numbers, about the first of two people (the second for comparisons)."""
    structure, story, wording = STRUCTURES[kind[0]], STORIES[kind[1]], SENTENCES[kind[2]]
    (name, pronoun), (other, _) = people
    words = {**story._asdict(), "name": name, "He": pronoun, "other": other}
    unused_numbers, sentences = list(numbers), []
    for part in structure.sentences:
        words["loses"] = story.loses.format(n=f"{{a}} {story.items}")
        # formatted twice, since a story's own words may have a number, too
        template = wording[part].format(**words, a="{a}")
        sentences.append(template.format(a=unused_numbers.pop(0)) if "{a}" in template else template)
    values = dict(zip("abc", numbers, strict=False))
    steps = []
    for expression in structure.expressions:
        formula = expression.format(**values)
        left, operator, right = formula.split()
        values["r"] = _compute(int(left), operator, int(right))
        steps.append(("calculator", formula))
    return SolvedQuery(" ".join(sentences), steps, str(values["r"]))


def _compute(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]


def _solve(random: np.random.Generator, kind: Kind, split: str) -> SolvedQuery:  # noqa: ARG001
    return write_problem(kind, STRUCTURES[kind[0]].numbers(random), pick_distinct(random, PEOPLE, 2))


WORDINGS = tuple(SENTENCES)
# A kind with two steps has one of the wordings, so that there are as many as with one step.
KINDS = (
    split_kinds(NAME, [*product(ONE_STEP, STORIES, WORDINGS)]),
    split_kinds(
        NAME,
        [
            (structure, story, WORDINGS[(i + j) % 2])
            for (i, structure), (j, story) in product(enumerate(TWO_STEPS), enumerate(STORIES))
        ],
    ),
)
draw = make_draw(NAME, "answer", KINDS, _solve)

EXAMPLES = tuple(
    make_task(f"{NAME}-example-{i}", "answer", kind, write_problem(kind, numbers, EXAMPLE_PEOPLE[i % 2 * 2 :][:2]))
    for i, (kind, numbers) in enumerate(
        [
            (("a + b", "cards", "own"), (268, 457)),
            (("a * b", "pens", "own"), (34, 27)),
            (("(a + b) * c", "apples", "own"), (23, 18, 16)),
            (("a - b", "tickets", "own"), (531, 174)),
            (("a / b", "eggs", "own"), (364, 14)),
            (("a * b - c", "coins", "own"), (24, 31, 165)),
        ]
    )
)

WORD_PROBLEMS = TaskSet(
    name=NAME,
    draw=draw,
    examples=EXAMPLES,
    tools=("calculator",),
    instructions="Use the calculator for each step. Then give the answer as a number.",
)
