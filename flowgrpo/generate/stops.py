"""Find where a stop string ends a completion: how many of its sampled ids stay, given a way to read them.

A completion ends with the first token at which the text of its sampled tokens contains a stop string. Text is read
only to find that token (A5): the ids stay as they were sampled, and the prompt's text takes no part.
"""

from collections.abc import Callable, Sequence

from flowgrpo.types import BadInput

TextOf = Callable[[Sequence[int]], str]
INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no character yet
SLACK = 8  # characters that may read differently where the ids before them are left out


def stops_of(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings of a request, of which one may stand alone; or `BadInput`."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text and INCOMPLETE not in text for text in stops):
        raise BadInput(f"stop={stop!r} must hold strings of at least one character, none of them U+FFFD")
    return stops


def find_stop(tokens: Sequence[int], seen: int, stops: Sequence[str], text_of: TextOf) -> int | None:
    """How many tokens stay: those up to the first at which a stop string is complete, None where there is none.

    The first `seen` tokens hold none. A character that is cut may read as U+FFFD until its last byte comes, which is
    why no stop string holds one; other than that, text only grows as tokens come. So a text without a stop string has
    none in any of its beginnings, and what is found does not depend on how many tokens came at once (E3).
    """
    # As much text before the new tokens as a stop string that began there can need.
    needed = max(map(len, stops)) + SLACK
    start = max(seen - needed, 0)
    while start and len(text_of(tokens[start:seen])) < needed:
        start = max(2 * start - seen, 0)

    def holds(end: int) -> bool:
        text = text_of(tokens[start:end])
        return any(stop in text for stop in stops)

    if not holds(len(tokens)):
        return None
    return next(end for end in range(seen + 1, len(tokens) + 1) if holds(end))
