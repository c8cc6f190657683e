"""Model input of rewards: text as data, made short, never as control tokens; ragged lists in fixed shapes.

    guard(text)                     -> a Text that breaks up every control token that data spells
    shorten(text, string, budget)   -> at most `budget` tokens of it, quoted; a line of ours stands for its middle
    in_fixed_shapes(function)       -> the same over lists of ids, padded to a fixed width and one of a few lengths

An answer may be 10 MB long, binary, or aimed at its judge. It is cut before it is tokenised, so the work is bounded by
the budget and not by the answer.
"""

from collections.abc import Callable, Sequence

import numpy as np

from flowgrpo.text import BREAK, Text, clean, quote
from flowgrpo.types import BadInput

LEFT_OUT = "[... the middle is left out here ...]"
LONGEST_TOKEN = 16  # characters that one token of a budget stands for, before anything is tokenised
LEAST_BUDGET = 64  # tokens; room for the mark of what is left out
LENGTHS = (128, 256, 512, 1024, 2048, 4096)

TokenLists = Sequence[Sequence[int]]


# Text as data -----------------------------------------------------------------------------------------


def control_ids(text: Text) -> frozenset[int]:
    """The ids of all added tokens, which templates write and data must not."""
    return frozenset(text.tokenizer.get_added_vocab().values())


def mark(text: Text, string: str) -> str:
    """`string` with `BREAK` inside each control token that it spells; `text` is guarded."""
    return text.special.sub(lambda match: match[0][0] + BREAK + match[0][1:], clean(string))


def encode_marked(text: Text, string: str) -> list[int]:
    """The ids of a string that is marked, or rendered from marked ones: what lies beside a `BREAK` is encoded apart."""
    return [i for piece in string.split(BREAK) for i in text.encode(piece)]


def shorten(text: Text, string: str, budget: int, *, shape: Callable[[str], str] = quote) -> str:
    """`shape(string)` in at most `budget` tokens; where it has more, `shape` of both ends, with `LEFT_OUT` between."""
    half = budget * LONGEST_TOKEN // 2
    if len(string) <= 2 * half and len(_ids(text, whole := shape(clean(string)))) <= budget:
        return whole
    start = min(half, len(string) // 2)
    head, tail = (_ids(text, end) for end in (string[:start], string[max(start, len(string) - half) :]))
    keep = budget
    while True:  # shaping adds tokens, and so may encoding what was decoded
        ends = head[: (keep + 1) // 2], tail[max(len(tail) - keep // 2, 0) :]
        short = f"\n{LEFT_OUT}\n".join(shape(text.decode(end)) for end in ends)
        size = len(_ids(text, short))
        if size <= budget or keep == 0:
            return short
        keep = min(keep - 1, keep * budget // size)


def _ids(text: Text, string: str) -> list[int]:
    return encode_marked(text, mark(text, string))


def first_line(error: Exception) -> str:
    """Shorten an error to the first line of its message, else the name of its type, for a reason of one sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# Fixed shapes -----------------------------------------------------------------------------------------


def in_fixed_shapes(
    function: Callable[[np.ndarray, np.ndarray], Sequence | np.ndarray],
    *,
    rows: int = 8,
    lengths: Sequence[int] = LENGTHS,
    pad_id: int = 0,
) -> Callable[[TokenLists], np.ndarray]:
    """A function of token lists from one of (tokens_rs, length_r), which is compiled once a length.

    Lists are padded after their end, to the first of `lengths` that holds them; rows that are missing have length 0.
    What a list gives does not depend on its neighbours, since it is always computed in the same shape.
    """
    sizes = sorted(lengths)
    if rows < 1 or not sizes or sizes[0] < 1:
        raise BadInput(f"rows={rows} and lengths={tuple(lengths)} must hold numbers of at least 1")

    def run(lists: TokenLists) -> np.ndarray:
        return _run(function, lists, rows, sizes, pad_id)

    return run


def _run(function, lists: TokenLists, rows: int, sizes: Sequence[int], pad_id: int) -> np.ndarray:
    """The results of all lists, in their order; lists of one padded length go together."""
    if not lists or not all(lists):
        raise BadInput("a model is given at least one list of tokens, and no empty one")
    longest = max(map(len, lists))
    if longest > sizes[-1]:
        raise BadInput(f"a list has {longest} tokens, but the model reads at most {sizes[-1]}: give more in lengths=")
    held = np.searchsorted(sizes, [len(one) for one in lists])
    out: list = [None] * len(lists)
    for size in np.unique(held):
        members = np.flatnonzero(held == size)
        for first in range(0, len(members), rows):
            group = members[first : first + rows]
            tokens_rs = np.full((rows, sizes[size]), pad_id, np.int32)
            length_r = np.zeros(rows, np.int32)
            for row, member in enumerate(group):
                length_r[row] = len(lists[member])
                tokens_rs[row, : length_r[row]] = lists[member]
            for member, value in zip(group, np.asarray(function(tokens_rs, length_r)), strict=False):
                out[member] = value
    return np.stack(out)
