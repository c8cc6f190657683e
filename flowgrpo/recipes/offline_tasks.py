"""Generated tasks of four domains that need real tools: unlimited, and split by combination.

    mathematics   "Add 31 to 58, then multiply by 7."                    calculator, then the answer
    code          "Write f(x) that returns x times the number of         python, then a function, which is tested
                  letters in 'walnut'."
    search        "In which country was Mira Stone born?"                search, search again, then the answer
    drawing       "Draw a red square with sides of 10 pixels, …"         drawing commands

A task has the solution of a perfect planner: `metadata["steps"]`, pairs of tool and context, and `metadata["final"]`,
its answer; and in `metadata["misread"]` the steps and the answer of a planner that misreads the query as another about
the same objects. Only demonstrations read them. Every combination (wording and operators, kind of value and operator,
question and entity, shape to draw) is assigned to one split in the order of a hash, so that no test task has a
combination of training, though training has each of its parts.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from flowgrpo.rewards.vision.drawing import PlacedShape, make_drawings, shapes_of
from flowgrpo.training.names import OFFLINE_DOMAINS as DOMAINS
from flowgrpo.types import BadInput, Task

SPLITS = {
    "train": range(8),
    "validation": range(8, 9),
    "test": range(9, 10),
}  # index modulo 10, in the order of a hash
SolvedTask = tuple[str, str, Sequence[tuple[str, str]], str, Mapping[str, Any]]  # query, answer, steps, final, metadata
Combination = tuple[Any, ...]

# The world of the corpus --------------------------------------------------------------------------------

# fmt: off
FIRST = [
    "Mira", "Olin", "Tessa", "Bram", "Ida", "Joren", "Lena", "Pavel", "Runa", "Silas", "Vera", "Aron", "Dora", "Emil",
    "Greta", "Hugo", "Karin", "Niko", "Petra", "Ulf",
]
# fmt: on
LAST = ["Stone", "Vale", "Marsh", "Finch", "Holt", "Thorne", "Wilder", "Crane", "Ash", "Brook"]
# fmt: off
TOWNS = [
    "Halden", "Orsk", "Brenn", "Talvik", "Moss", "Sarna", "Vido", "Kelm", "Runde", "Alta", "Dorn", "Evje", "Grim",
    "Hovin", "Isfjord", "Kolby", "Lund", "Narvik", "Odda", "Pelle",
]
# fmt: on
LANDS = ["Norland", "Estvar", "Moravia", "Calden", "Iskara", "Tervia", "Ostmark", "Veldania"]
TRADES = ["painter", "baker", "pilot", "doctor", "weaver", "judge", "tailor", "singer"]
WARES = ["glass", "cheese", "boats", "bells", "lace", "honey", "knives", "paper"]


@cache
def world() -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]], dict[str, str]]:
    """People with trade and town, towns with land and ware, lands with their capital."""
    random = np.random.default_rng(7)
    people = {f"{a} {b}": (_pick(random, TRADES), _pick(random, TOWNS)) for a, b in product(FIRST, LAST)}
    towns = {town: (LANDS[i % len(LANDS)], _pick(random, WARES)) for i, town in enumerate(TOWNS)}
    lands = {land: next(town for town in TOWNS if towns[town][0] == land) for land in LANDS}
    return people, towns, lands


def passages() -> list[dict[str, str]]:
    """The corpus: one passage about each person, town and land."""
    people, towns, lands = world()
    pairs = [(name, f"By trade a {trade}, born in {town}.") for name, (trade, town) in people.items()]
    pairs += [(town, f"{town} lies in {land} and is known for {ware}.") for town, (land, ware) in towns.items()]
    pairs += [(land, f"The capital of {land} is {town}.") for land, town in lands.items()]
    return [{"title": title, "text": text} for title, text in pairs]


# Mathematics --------------------------------------------------------------------------------------------

SIGNS = ("+", "-", "*")
FIRST_WORDS = {"+": "Add {a} to {b}", "-": "Take {b} from {a}", "*": "Multiply {a} by {b}"}
NOUNS = {"+": "the sum of {a} and {b}", "-": "the difference of {a} and {b}", "*": "the product of {a} and {b}"}
THEN_WORDS = {"+": "add {c}", "-": "subtract {c}", "*": "multiply by {c}"}
STYLES: Mapping[str, Callable[[str, str], str]] = {
    "signs": lambda one, two: f"What is ({{a}} {one} {{b}}) {two} {{c}}?",
    "then": lambda one, two: f"{FIRST_WORDS[one]}, then {THEN_WORDS[two]}.",
    "and": lambda one, two: f"Start with {NOUNS[one]} and {THEN_WORDS[two]}.",
    "result": lambda one, two: f"What is the result if you {THEN_WORDS[two]} after you take {NOUNS[one]}?",
    "first": lambda one, two: f"First take {NOUNS[one]}, second {THEN_WORDS[two]}. What comes out?",
    "work": lambda one, two: f"Work out ({{a}} {one} {{b}}) {two} {{c}}.",
    "let": lambda one, two: f"Let y be {NOUNS[one]}. Now {THEN_WORDS[two]}.",
    "once": lambda one, two: f"Once you have {NOUNS[one]}, {THEN_WORDS[two]}.",
    "steps": lambda one, two: f"{FIRST_WORDS[one]}. After that, {THEN_WORDS[two]}.",
    "get": lambda one, two: f"What do you get from {NOUNS[one]} when you {THEN_WORDS[two]}?",
    "give": lambda one, two: f"{FIRST_WORDS[one]} and {THEN_WORDS[two]}. Give the result.",
    "find": lambda one, two: f"Find x: it is {NOUNS[one]}, and then you {THEN_WORDS[two]}.",
}


def _misread_signs(random: np.random.Generator, combination: Combination) -> Combination:
    """Misread one of the two operations."""
    index = 1 + int(random.integers(2))
    other = _pick(random, [sign for sign in SIGNS if sign != combination[index]])
    return *combination[:index], other, *combination[index + 1 :]


def _mathematics(random: np.random.Generator, combination: Combination) -> SolvedTask:
    style, first, second = combination
    a, b, c = (int(x) for x in random.integers(11, 100, 3))
    expression = f"({a} {first} {b}) {second} {c}"
    values = {"+": a + b, "-": a - b, "*": a * b}
    value = {"+": values[first] + c, "-": values[first] - c, "*": values[first] * c}[second]
    query = STYLES[style](first, second).format(a=a, b=b, c=c)
    return query, str(value), [("calculator", expression)], str(value), {}


# Code ---------------------------------------------------------------------------------------------------

# fmt: off
WORDS = [
    "walnut", "pepper", "banana", "garden", "letter", "window", "bottle", "candle", "button", "hammer", "summer",
    "yellow",
]
# fmt: on
VALUES: Mapping[str, tuple[str, str]] = {  # description of a value, and the expression that computes it
    "letters": ("the number of letters in '{word}'", "len('{word}')"),
    "count": ("how often '{letter}' is in '{word}'", "'{word}'.count('{letter}')"),
    "digits": ("the sum of the digits of {number}", "sum(map(int, '{number}'))"),
    "largest": ("the largest of {numbers}", "max({numbers})"),
    "total": ("the sum of {numbers}", "sum({numbers})"),
    "reverse": ("{number} read backwards", "int('{number}'[::-1])"),
}
CONFUSED_VALUES = {
    "letters": "count",
    "digits": "reverse",
    "largest": "total",
}  # both ways
CONFUSED_VALUES |= {other: one for one, other in CONFUSED_VALUES.items()}
OPERATIONS = {"plus": "+", "minus": "-", "times": "*"}
REQUESTS = {
    "write": "Write f(x) that returns x {operation} {asked}.",
    "define": "Define a function f of x: x {operation} {asked}.",
}


def _misread_value(random: np.random.Generator, combination: Combination) -> Combination:  # noqa: ARG001
    """Misread the requested value as another about the same objects."""
    style, kind, operation = combination
    return style, CONFUSED_VALUES[kind], operation


def _code(random: np.random.Generator, combination: Combination) -> SolvedTask:
    style, kind, operation = combination
    word = _pick(random, WORDS)
    fields = {
        "word": word,
        "letter": _pick(random, word),
        "number": "".join(str(x) for x in random.integers(1, 10, 4)),
        "numbers": str([int(x) for x in random.integers(11, 100, 4)]),
    }
    description, expression = (text.format(**fields) for text in VALUES[kind])
    # safe: one of the expressions above, filled with values drawn above
    value = eval(expression, {"__builtins__": {"len": len, "sum": sum, "map": map, "int": int, "max": max}})
    final = f"def f(x): return x {OPERATIONS[operation]} {value}"
    results = {x: {"plus": x + value, "minus": x - value, "times": x * value}[operation] for x in (0, 3, 10)}
    tests = [{"call": f"f({x})", "equals": result} for x, result in results.items()]
    query = REQUESTS[style].format(operation=operation, asked=description)
    return query, final, [("python", f"print({expression})")], final, {"tests": tests, "entry_point": "f"}


# Questions ----------------------------------------------------------------------------------------------

QUESTIONS_OF_PEOPLE = ("trade", "town", "land", "ware")


def _misread_question(random: np.random.Generator, combination: Combination) -> Combination:
    """Misread the question as another about the same person; about a town there is only one question."""
    kind, name = combination
    return (
        kind if kind == "capital" else _pick(random, [other for other in QUESTIONS_OF_PEOPLE if other != kind])
    ), name


def _search(random: np.random.Generator, combination: Combination) -> SolvedTask:  # noqa: ARG001
    kind, name = combination
    people, towns, lands = world()
    if kind == "capital":
        land = towns[name][0]
        steps, answer = [("search", name), ("search", land)], lands[land]
        return f"What is the capital of the land where {name} lies?", answer, steps, answer, {}
    trade, town = people[name]
    questions = {
        "trade": (f"What is the trade of {name}?", trade, []),
        "town": (f"In which town was {name} born?", town, []),
        "land": (f"In which land was {name} born?", towns[town][0], [("search", town)]),
        "ware": (f"For what is the town known where {name} was born?", towns[town][1], [("search", town)]),
    }
    query, answer, further_steps = questions[kind]
    return query, answer, [("search", name), *further_steps], answer, {}


# Drawing ------------------------------------------------------------------------------------------------


def _drawing(seed: int, index: int, split: str) -> Task:
    task = make_drawings(seed * 1_000_003 + index, 1, split, max_shapes=1)[0]
    commands = task.metadata["commands"]
    shape = next(shape for shape in _shapes(split) if shape.command == commands and shape.words in task.query)
    final = str(task.metadata["commands"])
    return replace(
        task,
        id=f"drawing-{split}-{seed}-{index}",
        query=f"Draw {shape.words}.",
        domain="drawing",
        metadata={**task.metadata, "steps": [], "final": final, "misread": ([], final)},
    )


@cache
def _shapes(split: str) -> list[PlacedShape]:
    return shapes_of(split)


# All domains --------------------------------------------------------------------------------------------

MAKERS: Mapping[str, Callable[[np.random.Generator, Combination], SolvedTask]] = {
    "mathematics": _mathematics,
    "code": _code,
    "search": _search,
}
MISREAD: Mapping[str, Callable[[np.random.Generator, Combination], Combination]] = {
    "mathematics": _misread_signs,
    "code": _misread_value,
    "search": _misread_question,
}


@cache
def combinations(domain: str, split: str) -> list[Combination]:
    """Combinations of a domain that belong to a split, in a fixed order."""
    people, towns, _ = world()
    pool = {
        "mathematics": product(STYLES, SIGNS, SIGNS),
        "code": product(REQUESTS, VALUES, OPERATIONS),
        "search": [*product(QUESTIONS_OF_PEOPLE, people), *product(("capital",), towns)],
    }[domain]
    # by a hash that is the same in every process and version
    ordered = sorted(pool, key=lambda combination: hashlib.sha256(repr((domain, *combination)).encode()).digest())
    return [combination for i, combination in enumerate(ordered) if i % 10 in SPLITS[split]]


def make_tasks(seed: int, start: int, count: int, split: str, domains: Sequence[str] = DOMAINS) -> list[Task]:
    """Tasks `start` to `start + count` of a split, domains in turn; each depends on seed, index and split alone."""
    if split not in SPLITS:
        raise BadInput(f"split is {split!r}, but must be one of {', '.join(SPLITS)}")
    unknown = [name for name in domains if name not in DOMAINS]
    if unknown or not domains:
        raise BadInput(f"domain {''.join(unknown[:1])!r} has no offline tasks; choose from {', '.join(DOMAINS)}")
    return [_task(seed, index, split, domains[index % len(domains)]) for index in range(start, start + count)]


def _task(seed: int, index: int, split: str, domain: str) -> Task:
    if domain == "drawing":
        return _drawing(seed, index, split)
    random = np.random.default_rng([seed, index, list(SPLITS).index(split), DOMAINS.index(domain)])
    pool = combinations(domain, split)
    combination = pool[int(random.integers(len(pool)))]
    same_random = deepcopy(random)  # so that the misread query is about the same objects
    query, answer, steps, final, extra = MAKERS[domain](random, combination)
    _, _, misread_steps, misread_final, _ = MAKERS[domain](same_random, MISREAD[domain](random, combination))
    metadata = {**extra, "steps": list(steps), "final": final, "misread": (list(misread_steps), misread_final)}
    return Task(f"{domain}-{split}-{seed}-{index}", query, (answer,), domain, metadata)


def _pick(random: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(random.integers(len(options)))]
