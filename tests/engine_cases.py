"""What the tests of the engine share: requests, conversations, and a way to read ids."""

from collections.abc import Sequence

import jax
import numpy as np
from tiny_models import BANNED, CONFIG

import flowgrpo as fg

STOP = (7,)
SETTINGS = {"slots": 8, "slot_length": 128, "chunk": 16, "steps": 8, "banned": BANNED}
# Ids as bytes: halves of "é" and a third of "€" are among them, so that texts end in the middle of a character.
BYTES = [(b"\xc3", b"\xa9", b"\xe2\x82", b"ab", b"c", b"", b"-" + bytes([65 + i % 26]))[i % 7] for i in range(CONFIG.v)]


def make_requests(count: int, seed: int = 0, **fields) -> list[fg.Request]:
    rng = np.random.default_rng(seed)
    return [
        fg.Request(
            rng.integers(1, CONFIG.v, rng.integers(1, 50)).tolist(),
            jax.random.key(seed * 1000 + i),
            **{"max_tokens": int(rng.integers(1, 40)), "stop_ids": STOP, **fields},
        )
        for i in range(count)
    ]


def next_turn(request: fg.Request, completion: fg.Completion, seed: int) -> fg.Request:
    """The conversation after an observation of 9 tokens."""
    seen = np.random.default_rng(seed).integers(1, CONFIG.v, 9).tolist()
    before = [False] * len(request.tokens) if request.chosen is None else list(request.chosen)
    return fg.Request(
        [*request.tokens, *completion.tokens, *seen],
        jax.random.key(10_000 + seed),
        12,
        chosen=before + [True] * len(completion.tokens) + [False] * 9,
        stop_ids=STOP,
    )


def text_of(ids: Sequence[int]) -> str:
    """As tokenizers of bytes do: what is no character reads as U+FFFD."""
    return b"".join(BYTES[i] for i in ids).decode(errors="replace")


def bits(completions) -> list:
    return [(list(c.tokens), list(c.logp)) for c in completions]


def count_live(engine, counts: list[int]) -> None:
    """Note every token that the engine's program samples, whatever the engine makes of it."""
    decode = engine.programs.decode

    def counting(*arguments, **settings):
        rows, sampled = decode(*arguments, **settings)
        counts.append(int(sampled.live.sum()))
        return rows, sampled

    engine.programs = engine.programs._replace(decode=counting)
