"""Deadlines that fired: where each stopped its trajectory, so that a rollout which begins again stops there too (S1).

A deadline goes by a clock, and so would what becomes of a trajectory whose process is killed and started again. So what
fired is noted, as what tools answer is: `journal` keeps both.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Late(NamedTuple):
    """A trajectory that a deadline stopped, and where."""

    turns: int  # that it had
    phase: str  # of its member
    effects: int  # that had returned; -1 where the environment itself did not, and nothing that it had asked for
    of_group: bool  # the deadline, or else of its turn
    reason: str  # why it ended there; "" where it was given back
    dropped: int  # tokens that came too late to become a turn


class Fired(NamedTuple):
    """Deadlines that fired in an earlier attempt, and how to note another one; `what` is of JSON's own kinds."""

    find: Callable[[Sequence[Any]], Any]  # what -> that which was noted, or None
    note: Callable[[Sequence[Any], Any], None]


def _find_nothing(_: Sequence[Any]) -> None:
    """Nothing has fired."""


def _note_nothing(_: Sequence[Any], __: Any) -> None:
    """Nobody goes on from here."""


NOTHING = Fired(_find_nothing, _note_nothing)


def late_of(fired: Fired, key: Sequence[int]) -> Late | None:
    """Look up where a deadline stopped the trajectory of this key; None where none did."""
    found = fired.find(["late", *key])
    return None if found is None else Late(*found)


def note_late(fired: Fired, key: Sequence[int], late: Late) -> None:
    """Keep where a deadline stopped the trajectory of this key."""
    fired.note(["late", *key], list(late))


def unjudged(fired: Fired, keys: Sequence[Sequence[int]]) -> str | None:
    """Why the trajectories of these keys had no verdict, if that was so."""
    return fired.find(["unjudged", *keys])


def note_unjudged(fired: Fired, keys: Sequence[Sequence[int]], why: str) -> None:
    """Keep that their verdicts came too late."""
    fired.note(["unjudged", *keys], why)
