"""Stop strings: found at the first token that completes one, however many tokens come at once."""

import pytest
from engine_cases import BYTES, detokenize
from hypothesis import example, given
from hypothesis import strategies as st

from flowgrpo.generate.requests import find_stop, stops_of
from flowgrpo.types import BadInput

TOKENS = st.lists(st.integers(0, len(BYTES) - 1), min_size=1, max_size=80)


def find_in_pieces(tokens, sizes, stops, read=detokenize):
    """As tokens come, a few at a time."""
    searched = 0
    for size in [*sizes, len(tokens)]:
        end = min(searched + size, len(tokens))
        stop = find_stop(tokens[:end], searched, stops, read) if end > searched else None
        if stop is not None:
            return stop
        searched = end
    return None


def naive(tokens, stops):
    """The first beginning of the tokens whose whole text has a stop string."""
    ends = range(1, len(tokens) + 1)
    return next((end for end in ends if any(stop in detokenize(tokens[:end]) for stop in stops)), None)


@given(TOKENS, st.lists(st.integers(1, 9), max_size=30), st.integers(0, 200), st.integers(1, 12))
@example([3] * 5 + [5] * 60 + [4], [1] * 66, 9, 2)  # sixty tokens without a text between two halves of a stop
def test_stops_are_found_as_in_the_naive_search(tokens, sizes, start, size):
    """Over several tokens, and with characters of several bytes."""
    text = detokenize(tokens)
    stops = [stop for stop in (text[start % max(len(text), 1) :][:size].replace("\ufffd", ""), "A-") if stop]
    assert find_in_pieces(tokens, sizes, stops) == naive(tokens, stops)


def test_a_reader_that_drops_a_leading_space_changes_nothing():
    """As SentencePiece does: a text that begins later must not lose the stop string's own space."""

    def read(ids):
        return "".join([" a", " bc", " d"][i] for i in ids).removeprefix(" ")

    for sizes in ([1] * 50, [7] * 9):
        assert find_in_pieces([0] * 40 + [1, 2], sizes, [" bc d"], read) == 42


def test_long_texts_are_read_once():
    read = []

    def counting(ids):
        read.append(len(ids))
        return detokenize(ids)

    assert find_in_pieces([3] * 4000, [16] * 250, ["the end"], counting) is None
    assert sum(read) < 20 * 4000


def test_stop_strings_are_checked():
    assert stops_of("ab") == ("ab",)
    assert stops_of(["ab", "c"]) == ("ab", "c")
    for bad in ("", ("a", ""), (1,), ("\ufffd",)):
        with pytest.raises(BadInput, match="must hold strings of at least one character"):
            stops_of(bad)
