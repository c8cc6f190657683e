"""Word problems for an agent with a calculator: everyday stories of one or two operations.

    Anna has 213 stickers. She buys 148 more stickers.            calculator   213 + 148
    How many stickers does Anna have now?                         361

    There are 25 boxes of pens in the shop. Omar brings 17        calculator   25 + 17
    more boxes. Each box has 36 pens. How many pens are in        calculator   42 * 36
    the shop now?                                                 1512

A kind is a structure of operations, a story and a wording: what somebody owns, or what is at a place. Tasks have one
step and two steps in turn. All numbers are positive integers.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from flowgrpo.recipes.task_sets.task_set import Kind, Solved, TaskSet, deal_kinds, make_draw, make_task, pick_some

NAME = "word_problems"
Numbers = Sequence[int]


# Stories ------------------------------------------------------------------------------------------------


class Story(NamedTuple):
    """Nouns and verbs of a story."""

    items: str
    pack: str
    packs: str
    gets: str  # what the owner does to have more, and to have less
    loses: str  # {n} stands where the number and the noun do
    friends: str
    place: str
    brings: str  # what somebody does so that more is at the place, and less
    takes: str
    bags: str  # what all of it can be put into
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

# The sentences of a wording; {a} is a number that the sentence brings in.
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
    """Sentences of a problem, its expressions, and the numbers in it.

    Each sentence takes the next number where it has one. In an expression, {r} is the result of the one before.
    """

    sentences: Sequence[str]
    expressions: Sequence[str]
    numbers: Callable[[np.random.Generator], Numbers]


def _between(random: np.random.Generator, *ranges: tuple[int, int]) -> list[int]:
    """Draw a number of each range, both ends of which belong to it."""
    return [int(random.integers(low, high + 1)) for low, high in ranges]


def _difference(random: np.random.Generator, low: int, high: int) -> list[int]:
    """Draw a number between `low` and `high`, and one to take from it, which leaves at least a tenth."""
    whole = int(random.integers(low, high + 1))
    return [whole, int(random.integers(low // 2, whole - whole // 10 + 1))]


def _quotient(random: np.random.Generator) -> list[int]:
    """Draw a number that a second one divides."""
    quotient, divisor = _between(random, (12, 60), (11, 16))
    return [quotient * divisor, divisor]


def _divided_product(random: np.random.Generator) -> list[int]:
    """Draw two numbers whose product a third one divides."""
    divisor, times, size = _between(random, (11, 16), (2, 5), (12, 40))
    return [divisor * times, size, divisor]


def _divided_sum(random: np.random.Generator) -> list[int]:
    """Draw two numbers whose sum a third one divides."""
    whole, divisor = _quotient(random)
    first = int(random.integers(whole // 3, whole - whole // 5))
    return [first, whole - first, divisor]


def _divided_difference(random: np.random.Generator) -> list[int]:
    """Draw two numbers whose difference a third one divides."""
    whole, divisor = _quotient(random)
    (taken,) = _between(random, (25, min(250, 999 - whole)))
    return [whole + taken, taken, divisor]


def _product_less(random: np.random.Generator) -> list[int]:
    """Draw two factors, and a number that is less than their product."""
    times, size = _between(random, (12, 45), (12, 45))
    return [times, size, int(random.integers(25, min(999, times * size * 3 // 4)))]


def _sum_less(random: np.random.Generator) -> list[int]:
    """Draw two terms, and a number that is less than their sum."""
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


def write_problem(kind: Kind, numbers: Numbers, people: Sequence[tuple[str, str]]) -> Solved:
    """Write the problem of a kind with these numbers, about the first of two people, the second for comparison."""
    structure, story, wording = STRUCTURES[kind[0]], STORIES[kind[1]], SENTENCES[kind[2]]
    (name, pronoun), (other, _) = people
    words = {**story._asdict(), "name": name, "He": pronoun, "other": other}
    unused, sentences = list(numbers), []
    for part in structure.sentences:
        words["loses"] = story.loses.format(n=f"{{a}} {story.items}")
        # Twice, since the words of a story bring in a number, too.
        template = wording[part].format(**words, a="{a}")
        sentences.append(template.format(a=unused.pop(0)) if "{a}" in template else template)
    values = dict(zip("abc", numbers, strict=False))
    steps = []
    for expression in structure.expressions:
        written = expression.format(**values)
        left, operator, right = written.split()
        values["r"] = _compute(int(left), operator, int(right))
        steps.append(("calculator", written))
    return Solved(" ".join(sentences), steps, str(values["r"]))


def _compute(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]


def _solve(random: np.random.Generator, kind: Kind, split: str) -> Solved:  # noqa: ARG001
    return write_problem(kind, STRUCTURES[kind[0]].numbers(random), pick_some(random, PEOPLE, 2))


WORDINGS = tuple(SENTENCES)
# A kind of two steps has one of the wordings, so that there are as many as of one step.
KINDS = (
    deal_kinds(NAME, [*product(ONE_STEP, STORIES, WORDINGS)]),
    deal_kinds(
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
