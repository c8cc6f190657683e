"""How a conversation enters the cache: tokens and who chose them flow in, pieces of fixed shape flow out.

Equal bits need equal shapes (E3). A token that was given is computed in a prefill of at most `chunk`
tokens, padded to one of a few widths; one that was sampled, and the given one before the first of them, in a
decode step. So where the pieces of a conversation begin and end, and their widths, follow from its tokens
alone, and a cache that was evicted is computed again just as it was.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Tokens [start, end) of a conversation, computed together or one by one."""

    start: int
    end: int
    stepwise: bool  # in decode steps, one token each


def cut(chosen: Sequence[bool], *, chunk: int) -> list[Piece]:
    """The pieces of all tokens but the last, which the next decode step feeds."""
    pieces: list[Piece] = []
    last = len(chosen) - 1
    start = 0
    while start < last:
        # A token is fed in a decode step where the token after it was sampled.
        stepwise = bool(chosen[start + 1])
        end = start + 1
        while end < last and bool(chosen[end + 1]) == stepwise and (stepwise or end - start < chunk):
            end += 1
        pieces.append(Piece(start, end, stepwise))
        start = end
    return pieces


def shared(own: list[Piece], other: list[Piece], common: int) -> int:
    """How many tokens a cache made of `other` pieces holds for `own`, where the first `common` tokens agree."""
    held = 0
    for mine, theirs in zip(own, other, strict=False):
        if mine.start != theirs.start or mine.stepwise != theirs.stepwise:
            break
        end = min(mine.end, theirs.end, common)
        if mine.stepwise or (mine.end == theirs.end and end == mine.end):
            held = end
        if end != mine.end or mine.end != theirs.end:
            break
    return held


def rest(pieces: list[Piece], held: int, *, chunk: int) -> list[Piece]:
    """Split what is still to be computed after the first `held` tokens into pieces of at most `chunk` tokens."""
    left = []
    for piece in pieces:
        for start in range(max(piece.start, held), piece.end, chunk):
            left.append(Piece(start, min(start + chunk, piece.end), piece.stepwise))
    return left


def widths(chunk: int) -> list[int]:
    """The sizes that pieces are padded to, each to the first that holds it: none, a quarter, a half, the whole."""
    return [0, -(-chunk // 4), -(-chunk // 2), chunk]
