"""How much trajectories repeat themselves: token ids flow in, two shares flow out.

    repeated_text       of the runs of `length` tokens within an action, those that stood in the same action before
    repeated_actions    of the actions that follow another one, those that came before in their trajectory

A policy that collapses says the same words again and again, or takes the same action until its turns are used up; both
rise towards 1. Runs are not compared between actions, whose form is often the same by design.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from flowgrpo.types import Trajectory

LENGTH = 4  # tokens of a run


def repetition(trajectories: Iterable[Trajectory], *, length: int = LENGTH) -> dict[str, float]:
    """Both shares over all trajectories; 0 where there is no run, or no second action."""
    runs = seen = actions = again = 0
    for one in trajectories:
        said = [tuple(np.asarray(turn.tokens)[np.asarray(turn.chosen, bool)].tolist()) for turn in one.turns]
        said = [action for action in said if action]
        for action in said:
            count, distinct = _runs(action, length)
            runs, seen = runs + count, seen + count - distinct
        actions, again = actions + max(len(said) - 1, 0), again + len(said) - len(set(said))
    return {"repeated_text": seen / max(runs, 1), "repeated_actions": again / max(actions, 1)}


def _runs(action: Sequence[int], length: int) -> tuple[int, int]:
    """How many runs of so many tokens an action has, and how many different ones."""
    every = [tuple(action[start : start + length]) for start in range(len(action) - length + 1)]
    return len(every), len(set(every))
