"""Stop strings: found at the first token that completes one, however many tokens come at once."""

import pytest
from engine_cases import BYTES, text_of
from hypothesis import example, given
from hypothesis import strategies as st

from flowgrpo.generate.stops import find_stop, stops_of
from flowgrpo.types import BadInput

TOKENS = st.lists(st.integers(0, len(BYTES) - 1), min_size=1, max_size=80)


def find_in_pieces(tokens, sizes, stops, read=text_of):
    """As the engine does: tokens come a few at a time, and are searched as they come."""
    seen = 0
    for size in [*sizes, len(tokens)]:
        end = min(seen + size, len(tokens))
        found = find_stop(tokens[:end], seen, stops, read) if end > seen else None
        if found is not None:
            return found
        seen = end
    return None


def naive(tokens, stops, read=text_of):
    """The first beginning of the tokens whose whole text has a stop string."""
    ends = range(1, len(tokens) + 1)
    return next((end for end in ends if any(stop in read(tokens[:end]) for stop in stops)), None)


@given(
    TOKENS, st.lists(st.integers(1, 9), max_size=30), st.lists(st.text("abcéA-€", min_size=1), min_size=1, max_size=3)
)
def test_a_drawn_stop_is_found_where_every_beginning_is_read(tokens, sizes, stops):
    assert find_in_pieces(tokens, sizes, stops) == naive(tokens, stops)


@given(TOKENS, st.lists(st.integers(1, 9), max_size=30), st.integers(0, 200), st.integers(1, 12))
@example([3] * 5 + [5] * 60 + [4], [1] * 66, 9, 2)  # sixty tokens without a text between two halves of a stop
def test_a_stop_out_of_the_text_is_found_where_every_beginning_is_read(tokens, sizes, start, size):
    """Drawn from the text, so that it is met, over several tokens and with characters of several bytes."""
    whole = text_of(tokens)
    stop = whole[start % max(len(whole), 1) :][:size].replace("\ufffd", "")
    if stop:
        assert find_in_pieces(tokens, sizes, [stop]) == naive(tokens, [stop])


def test_a_character_of_two_tokens_counts_when_its_last_byte_is_there():
    first, second = BYTES.index(b"\xc3"), BYTES.index(b"\xa9")
    assert find_stop([first, first, second], 0, ["é"], text_of) == 3
    assert find_stop([first, first], 0, ["é"], text_of) is None


def test_a_reader_that_drops_a_leading_space_changes_nothing():
    """As SentencePiece does: a text that begins later must not lose the stop string's own space."""
    words = [" a", " bc", " d"]

    def read(ids):
        return "".join(words[i] for i in ids).removeprefix(" ")

    tokens = [0] * 40 + [1, 2]
    for sizes in ([1] * 50, [7] * 9):
        assert find_in_pieces(tokens, sizes, [" bc d"], read) == 42


def test_long_texts_are_not_read_again_and_again():
    read = []

    def counting(ids):
        read.append(len(ids))
        return text_of(ids)

    tokens = [3] * 4000
    assert find_in_pieces(tokens, [16] * 250, ["the end"], counting) is None
    assert sum(read) < 20 * len(tokens)


def test_a_string_alone_is_one_stop_and_bad_ones_get_one_sentence():
    assert stops_of("ab") == ("ab",)
    assert stops_of(["ab", "c"]) == ("ab", "c")
    for bad in ("", ("a", ""), (1,), ("\ufffd",)):
        with pytest.raises(BadInput, match="must hold strings of at least one character"):
            stops_of(bad)
