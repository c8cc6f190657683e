"""Helpers shared by the tests of the engine: requests, conversations, and a way to read ids."""

from collections.abc import Sequence

import jax
import numpy as np
from tiny_models import BANNED, CONFIG

import flowgrpo as fg

STOP = (7,)
# Ids as bytes: halves of "é" and a third of "€" are among them, so that texts end in the middle of a character.
BYTES = [(b"\xc3", b"\xa9", b"\xe2\x82", b"ab", b"c", b"", b"-" + bytes([65 + i % 26]))[i % 7] for i in range(CONFIG.v)]


def detokenize(ids: Sequence[int]) -> str:
    """As tokenizers of bytes do: what is no character reads as U+FFFD."""
    return b"".join(BYTES[i] for i in ids).decode(errors="replace")


SETTINGS = fg.generate.EngineSettings(slots=8, slot_length=128, chunk=16, steps=8, banned=BANNED)


def make_requests(count: int, seed: int = 0, **fields) -> list[fg.contracts.Request]:
    rng = np.random.default_rng(seed)
    return [
        fg.contracts.Request(
            rng.integers(1, CONFIG.v, rng.integers(1, 50)).tolist(),
            jax.random.key(seed * 1000 + i),
            **{"max_tokens": int(rng.integers(1, 40)), "stop_ids": STOP, **fields},
        )
        for i in range(count)
    ]


def next_turn(request: fg.contracts.Request, completion: fg.contracts.Completion, seed: int) -> fg.contracts.Request:
    """The conversation after an observation of 9 tokens."""
    observation = np.random.default_rng(seed).integers(1, CONFIG.v, 9).tolist()
    before = [False] * len(request.tokens) if request.chosen is None else list(request.chosen)
    return fg.contracts.Request(
        [*request.tokens, *completion.tokens, *observation],
        jax.random.key(10_000 + seed),
        12,
        chosen=before + [True] * len(completion.tokens) + [False] * 9,
        stop_ids=STOP,
    )


def fill(engine) -> None:
    """Have every slot hold something else."""
    engine.generate(make_requests(8, seed=70, max_tokens=1))


def as_tuple(completion: fg.contracts.Completion) -> tuple:
    """All of a completion but where its cache was found."""
    columns = [list(x) for x in (completion.tokens, completion.logp_sampled, completion.version)]
    assert len({len(column) for column in columns}) == 1
    return *columns, completion.finish_reason


def bits(completions) -> list:
    return [as_tuple(completion) for completion in completions]


def on_stretch(engine, action) -> None:
    """Call `action(number of the stretch, what it sampled)` after each that samples, in the engine's own thread."""
    decode, number = engine.programs.decode, [0]

    def calling(*arguments):
        rows, sampled = decode(*arguments)
        if sampled.live.any():  # the one that warms up samples nothing
            number[0] += 1
            action(number[0], sampled)
        return rows, sampled

    engine.programs = engine.programs._replace(decode=calling)


def count_live(engine) -> list[int]:
    """Of every later stretch, the tokens that the program samples, whatever the engine makes of them."""
    counts: list[int] = []
    on_stretch(engine, lambda _, sampled: counts.append(int(sampled.live.sum())))
    return counts
