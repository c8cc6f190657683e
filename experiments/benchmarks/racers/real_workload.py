"""Work of `benchmarks.real`, which all systems share; needs only the standard library.

    decode    `rows` fresh prompts of `prompt` tokens are prefilled; then decode steps of all rows, and of one row
    update    forward, backward and one step of AdamW over `update_rows` rows of `update_length` tokens
    step      a whole GRPO step: `queries` prompts of `shared` common tokens and `own` different ones, `samples`
              answers of exactly `answer` tokens each, a reward of 1 for half of them, one step of AdamW

A decode step is timed as the difference between answers of two lengths, so that prefill and start-up cancel.
"""

import random
from typing import NamedTuple

FIRST = 10  # lowest id of random tokens: those below are special
SHORT = 16  # tokens of the shorter answers
RATE, CLIP = 1e-5, 1.0  # of AdamW, and the largest norm of its gradient


class Sizes(NamedTuple):
    """Sizes of the work, in tokens and rows."""

    rows: int = 32
    prompt: int = 128
    steps: int = 32  # decode steps between the shorter and the longer answers
    update_rows: int = 8
    update_length: int = 384
    queries: int = 8
    samples: int = 8
    shared: int = 200
    own: int = 50
    answer: int = 60

    @property
    def long(self) -> int:
        """Tokens of the longer answers."""
        return SHORT + self.steps

    @property
    def context(self) -> int:
        """Tokens of a trajectory of the GRPO step."""
        return self.shared + self.own + self.answer

    @property
    def laid_out(self) -> int:
        """Tokens of a GRPO step's trajectories, without sharing."""
        return self.queries * self.samples * self.context

    @property
    def distinct(self) -> int:
        """Tokens of a GRPO step's trajectories, with shared prefixes counted once."""
        return self.shared + self.queries * (self.own + self.samples * self.answer)


def random_ids(vocabulary: int, rows: int, length: int, seed: int) -> list[list[int]]:
    """Random prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(FIRST, vocabulary) for _ in range(length)] for _ in range(rows)]


def step_prompts(vocabulary: int, sizes: Sizes, seed: int) -> list[list[int]]:
    """Prompts of a GRPO step: a common prefix, then different tokens."""
    (beginning,) = random_ids(vocabulary, 1, sizes.shared, 0)
    return [beginning + suffix for suffix in random_ids(vocabulary, sizes.queries, sizes.own, 1 + seed)]
