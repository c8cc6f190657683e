"""Rewards made of rewards: one for each domain, weighted sums, length, a held-out check; and of functions over many.

    reward = router({"code": code(sandbox), "math": mathematics(sandbox.call), "mine": my_reward})
    future = score_async(reward, tasks, outputs, pool)     # while devices work (R1)
    combine({"answer": (school(), 1.0), "format": (check_format(tag("answer")), 0.1)})
    with_length(reward, free=512, most=1024)
    second_check(reward, check)

`parts` carries every component under its name, and the component's own parts as `name/part`, so that a curve shows
each. Invalid is never 0: a sum is invalid where a component is that it needs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from flowgrpo.contracts import Reward, Scored
from flowgrpo.types import BadInput, Task, check_range, first_line

Components = Mapping[str, tuple[Reward, float]]
CHECK = "second_check"  # the part that a held-out check writes


# Rewards from functions ---------------------------------------------------------------------------------


def batched(score_many: Callable[[Sequence[Task], Sequence[str]], list[Scored]]) -> Reward:
    """Make a reward that judges many at once, and one as many."""
    return Reward(lambda task, output: score_many([task], [output])[0], score_many)


def threaded(score: Callable[[Task, str], Scored], workers: int) -> Reward:
    """Make a reward that judges `workers` outputs at once, each in a thread."""

    def score_many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(score, tasks, outputs))

    return Reward(score, score_many)


def prepared(prepare: Callable[[Task, str], Any], judge: Callable[[list], list[Scored]]) -> Reward:
    """Make a reward that judges together what `prepare` makes of tasks and outputs.

    If `prepare` gives a `Scored`, or raises `BadInput`, there is nothing to judge: an input is invalid alone.
    """

    def score_many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
        made = [tried(prepare, task, output) for task, output in zip(tasks, outputs, strict=True)]
        asked = [one for one in made if not isinstance(one, Scored)]
        scored = iter(judge(asked) if asked else [])
        return [one if isinstance(one, Scored) else next(scored) for one in made]

    return batched(score_many)


def tried(prepare: Callable[[Task, str], Any], task: Task, output: str) -> Any:
    """Call a function with a task and an output; where it raises `BadInput` the score is invalid."""
    try:
        return prepare(task, output)
    except BadInput as error:
        return Scored(None, str(error))


def model_scores(name: str, model: Callable[[list], Any], inputs: list) -> list[Scored]:
    """Score inputs by a model that gives a number for each; invalid where it fails, or a number is not finite."""
    try:
        scores = np.asarray(model(inputs), np.float64).reshape(len(inputs))
    except Exception as error:  # a model can fail in its own way: device, server, memory; all are no score
        return [Scored(None, f"the {name} failed: {first_line(error)}")] * len(inputs)
    return [
        Scored(float(score)) if np.isfinite(score) else Scored(None, f"the {name}'s score is {score}")
        for score in scores
    ]


# Domains ------------------------------------------------------------------------------------------------


def router(rewards: Mapping[str, Reward], *, default: Reward | None = None) -> Reward:
    """Make the reward that has each task judged by the member of its domain, or by `default`.

    A member gets its own tasks only, all in one call if it has `score_many`. One that raises makes only its own scores
    invalid, with the reason.
    """
    if not rewards and default is None:
        raise BadInput("router: there is no reward; give one for a domain or a default")
    members = dict(rewards)

    def score_many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
        if len(tasks) != len(outputs):
            raise BadInput(f"router: there are {len(tasks)} tasks and {len(outputs)} outputs; give one output a task")
        places: dict[str, list[int]] = {}
        for place, task in enumerate(tasks):
            places.setdefault(task.domain, []).append(place)
        found: dict[int, Scored] = {}
        for domain, own in places.items():
            member = members.get(domain, default)
            together = member is not None and member.score_many is not None
            for group in [own] if together else [[place] for place in own]:
                given = [tasks[place] for place in group], [outputs[place] for place in group]
                scored = _guarded(domain, member, *given) if member else [_unknown(members, given[0][0])]
                found.update(zip(group, scored, strict=True))
        return [found[place] for place in range(len(tasks))]

    return batched(score_many)


def score_async(
    reward: Reward, tasks: Sequence[Task], outputs: Sequence[str], pool: Executor
) -> "Future[list[Scored]]":
    """Have a pool of threads judge outputs while the caller goes on; the sequences are copied first."""
    if len(tasks) != len(outputs):
        raise BadInput(f"score_async: there are {len(tasks)} tasks and {len(outputs)} outputs; give one output a task")
    return pool.submit(reward.many, tuple(tasks), tuple(outputs))


def _guarded(domain: str, member: Reward, tasks: list[Task], outputs: list[str]) -> list[Scored]:
    """Score tasks of a domain in one call; all invalid where the member raises or gives a wrong number of scores."""
    try:
        scored = member.many(tasks, outputs)
    except Exception as error:
        said = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
        return [Scored(None, f"the reward of {domain!r} failed: {said}")] * len(tasks)
    if len(scored) != len(tasks):
        said = f"the reward of {domain!r} gave {len(scored)} scores for {len(tasks)} outputs"
        return [Scored(None, said)] * len(tasks)
    return scored


def _unknown(members: Mapping[str, Reward], task: Task) -> Scored:
    known = ", ".join(map(repr, members)) or "none"
    return Scored(None, f"task {task.id!r} is of domain {task.domain!r}, which has no reward; there are {known}")


# Sums ---------------------------------------------------------------------------------------------------


def combine(components: Components, *, optional: Collection[str] = ()) -> Reward:
    """Sum weighted components; an invalid one makes the sum invalid, unless it is optional and adds nothing."""
    for name, (_, weight) in components.items():
        check_range("combine", f"the weight of {name!r}", weight)
        if not name or "/" in name or name == CHECK:
            raise BadInput(f"combine: a component is named {name!r}; a name has letters, no slash, and is not {CHECK}")
    unknown = [name for name in optional if name not in components]
    if not components or unknown or len(set(optional)) == len(components):
        raise BadInput(f"combine: optional is {list(optional)}, but must leave out at least one of {list(components)}")
    weights = {name: weight for name, (_, weight) in components.items()}

    def score_many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
        columns = [reward.many(tasks, outputs) for reward, _ in components.values()]
        rows = zip(*columns, strict=True)
        return [_sum(dict(zip(components, row, strict=True)), weights, optional) for row in rows]

    return batched(score_many)


def _sum(said: Mapping[str, Scored], weights: Mapping[str, float], optional: Collection[str]) -> Scored:
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
    """Give 0 up to a free length, falling evenly to -1 at the most. `measure` counts characters, or tokens."""
    if not 0 <= free < most:
        raise BadInput(f"length: free is {free} and most is {most}, but must be 0 <= free < most")

    def score(_: Task, output: str) -> Scored:
        size = measure(output)
        over = min(max(size - free, 0), most - free) / (most - free)
        return Scored(-over if over else 0.0, f"{size} long, {free} are free" if over else "", {"size": float(size)})

    return Reward(score)


def with_length(
    reward: Reward, *, free: int, most: int, weight: float = 1.0, measure: Callable[[str], int] = len
) -> Reward:
    """Take from a reward what is due for length; `parts` keeps the reward itself as `unshaped`."""
    return combine({"unshaped": (reward, 1.0), "length": (length(free=free, most=most, measure=measure), weight)})


def second_check(reward: Reward, check: Reward) -> Reward:
    """Show in `parts` of a reward what a held-out check says, never in the value: hacking shows as a gap (R3).

    A check that is invalid leaves no part, so that a mean is over valid ones.
    """

    def score_many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
        said, checked = reward.many(tasks, outputs), check.many(tasks, outputs)
        return [
            scored if second.value is None else scored._replace(parts={**scored.parts, CHECK: second.value})
            for scored, second in zip(said, checked, strict=True)
        ]

    return batched(score_many)
