"""Rewards made of rewards: sums of components, length, and a second check beside the training reward.

    combine({"answer": (school(), 1.0), "format": (check_format(tag("answer")), 0.1)})
    with_length(reward, free=512, most=1024)
    second_check(reward, check)

`parts` carries every component under its name, and the component's own parts as `name/part`, so that a curve shows
each. Invalid is never 0: a sum is invalid where a component is that it needs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from flowgrpo.contracts import Reward, Scored
from flowgrpo.types import BadInput, Task, check_range

Components = Mapping[str, tuple[Reward, float]]
CHECK = "second_check"  # the part that a held-out check writes


def _reward(score_many: Callable[[Sequence[Task], Sequence[str]], list[Scored]]) -> Reward:
    """A reward that judges many at once, and one as many."""
    return Reward(lambda task, output: score_many([task], [output])[0], score_many)


def combine(components: Components, *, optional: Collection[str] = ()) -> Reward:
    """The weighted sum of components; an invalid one makes the sum invalid, unless it is optional and adds nothing."""
    for name, (_, weight) in components.items():
        check_range("combine", f"the weight of {name!r}", weight)
        if not name or "/" in name or name == CHECK:
            raise BadInput(f"combine: a component is named {name!r}; a name has letters, no slash, and is not {CHECK}")
    unknown = [name for name in optional if name not in components]
    if not components or unknown or len(set(optional)) == len(components):
        raise BadInput(f"combine: optional is {list(optional)}, but must leave out at least one of {list(components)}")
    return _reward(partial(_combine_many, components, frozenset(optional)))


def _combine_many(
    components: Components, optional: frozenset[str], tasks: Sequence[Task], outputs: Sequence[str]
) -> list[Scored]:
    """Score all outputs by each component, and add up the weighted scores of each output."""
    columns = {name: reward.many(tasks, outputs) for name, (reward, _) in components.items()}
    weights = {name: weight for name, (_, weight) in components.items()}
    rows = ({name: column[place] for name, column in columns.items()} for place in range(len(outputs)))
    return [_sum(row, weights, optional) for row in rows]


def _sum(said: Mapping[str, Scored], weights: Mapping[str, float], optional: frozenset[str]) -> Scored:
    parts: dict[str, float] = {}
    total, missing, reasons = 0.0, [], []
    for name, scored in said.items():
        parts |= {f"{name}/{part}": value for part, value in scored.parts.items()}
        reasons += [f"{name}: {scored.reason}"] if scored.reason else []
        if scored.value is None:
            missing += [] if name in optional else [name]
        else:
            parts[name] = scored.value
            total += weights[name] * scored.value
    return Scored(None if missing else total, "; ".join(reasons), parts)


def length(*, free: int, most: int, measure: Callable[[str], int] = len) -> Reward:
    """0 up to a free length, falling evenly to -1 at the most and beyond. `measure` counts characters, or tokens."""
    if not 0 <= free < most:
        raise BadInput(f"length: free is {free} and most is {most}, but must be 0 <= free < most")
    return Reward(partial(_score_length, free, most, measure))


def _score_length(free: int, most: int, measure: Callable[[str], int], _: Task, output: str) -> Scored:
    size = measure(output)
    over = min(max(size - free, 0), most - free) / (most - free)
    return Scored(-over if over else 0.0, f"{size} long, {free} are free" if over else "", {"size": float(size)})


def with_length(
    reward: Reward, *, free: int, most: int, weight: float = 1.0, measure: Callable[[str], int] = len
) -> Reward:
    """The reward, less what is due for length; `parts` keeps the reward itself as `unshaped`."""
    return combine({"unshaped": (reward, 1.0), "length": (length(free=free, most=most, measure=measure), weight)})


def second_check(reward: Reward, check: Reward) -> Reward:
    """The reward, with what a held-out check says in `parts`, never in the value: hacking shows as a gap (R3)."""
    return _reward(partial(_check_many, reward, check))


def _check_many(reward: Reward, check: Reward, tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
    """The verdicts of the reward. A check that is invalid leaves no part, so that a mean is over valid ones."""
    said, checked = reward.many(tasks, outputs), check.many(tasks, outputs)
    return [
        scored if second.value is None else scored._replace(parts={**scored.parts, CHECK: second.value})
        for scored, second in zip(said, checked, strict=True)
    ]
