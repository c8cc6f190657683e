"""Texts to reverse, in one turn without a tool: prime-rl's first example, on texts of common words.

    Reverse the text character-by-character. Text: green table      elbat neerg

The published environment (`reverse-text` of verifiers and prime-rl) has sentences and paragraphs; here a text has one
to four words of a theme, so that a model of 135 M parameters can learn to reverse it. The reward is the same: the
similarity of the answer to the reversed text, in domain "reverse_text". A kind is the number of words and their theme.
"""

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

NAME = "reverse_text"

# fmt: off
THEMES = {
    "animals": (
        "cat", "dog", "horse", "sheep", "tiger", "rabbit", "eagle", "fish", "snake", "mouse", "bear", "lion", "duck",
        "goat", "frog", "whale", "monkey", "camel", "wolf", "zebra",
    ),
    "food": (
        "bread", "milk", "cheese", "butter", "sugar", "lemon", "rice", "soup", "salad", "honey", "apple", "onion",
        "pasta", "cake", "salt", "pepper", "tea", "coffee", "meat", "corn",
    ),
    "home": (
        "table", "chair", "window", "door", "lamp", "kitchen", "garden", "bed", "mirror", "carpet", "clock", "roof",
        "wall", "shelf", "sofa", "stairs", "floor", "oven", "blanket", "pillow",
    ),
    "nature": (
        "river", "mountain", "forest", "ocean", "flower", "stone", "cloud", "rain", "snow", "wind", "valley", "island",
        "beach", "desert", "lake", "storm", "star", "moon", "grass", "tree",
    ),
    "city": (
        "street", "bridge", "market", "school", "train", "station", "museum", "park", "tower", "bus", "church", "hotel",
        "office", "bank", "theater", "harbor", "road", "square", "shop", "car",
    ),
    "looks": (
        "red", "green", "blue", "yellow", "black", "white", "brown", "orange", "purple", "pink", "gray", "round",
        "long", "short", "small", "large", "thin", "wide", "deep", "flat",
    ),
}
# fmt: on
COUNTS = {"one word": 1, "two words": 2, "three words": 3, "four words": 4}

KINDS = split_kinds(NAME, [*product(COUNTS, THEMES)])


def reverse(text: str) -> SolvedQuery:
    """Ask to reverse a text."""
    return SolvedQuery(f"Reverse the text character-by-character. Text: {text}", [], text[::-1])


def _solve(random: np.random.Generator, kind: Kind, split: str) -> SolvedQuery:  # noqa: ARG001
    return reverse(" ".join(pick_distinct(random, THEMES[kind[1]], COUNTS[kind[0]])))


draw = make_draw(NAME, "reverse_text", [KINDS], _solve)

EXAMPLES = tuple(  # with words that are in no theme
    make_task(f"{NAME}-example-{i}", "reverse_text", kind, reverse(text))
    for i, (kind, text) in enumerate(
        [(("one word", "animals"), "otter"), (("two words", "home"), "attic ladder")],
    )
)

REVERSE_TEXT = TaskSet(
    name=NAME,
    draw=draw,
    examples=EXAMPLES,
    tools=(),
    instructions="Answer with the reversed text alone.",
)
