"""An environment of text by its name, and what can't be one."""

import flowgrpo as fg

DIRECTORY = {f"Ann {n}": f"{n} Elm" for n in range(60)}


def look(person: str) -> str:
    """The address of a person."""
    return DIRECTORY[person]


class Parcel(fg.TextEnv):
    """A parcel is to be delivered; pays short actions, so that rewards differ."""

    tools, max_turns, max_tokens = [look], 3, 6

    def reset(self, task):
        return f"Deliver a parcel to {task['person']}."

    def step(self, action):
        return fg.Done(1 / (1 + len(action))) if len(action) % 2 else "Nobody is there."


class Plain:
    """Isn't derived from `fg.TextEnv`."""

    def step(self, action):
        return action
