"""Domains to their rewards: tasks and outputs of any domains flow in, one `Scored` each flows out, in their order.

    reward = router({"code": code(sandbox), "math": mathematics(sandbox.call), "mine": my_reward})
    future = score_async(reward, tasks, outputs, pool)     # while devices work (R1)

A member sees its own tasks only, all at once. One that raises makes only its own scores invalid, with the reason.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial

from flowgrpo.contracts import Reward, Scored
from flowgrpo.types import BadInput, Task


def router(rewards: Mapping[str, Reward], *, default: Reward | None = None) -> Reward:
    """The reward that has each task judged by the member of its domain, or by `default`."""
    if not rewards and default is None:
        raise BadInput("router: there is no reward; give one for a domain or a default")
    members = dict(rewards)
    return Reward(partial(_score, members, default), partial(_score_many, members, default))


def score_async(
    reward: Reward, tasks: Sequence[Task], outputs: Sequence[str], pool: Executor
) -> "Future[list[Scored]]":
    """Have a pool of threads judge outputs while the caller goes on; the sequences are copied first."""
    if len(tasks) != len(outputs):
        raise BadInput(f"score_async: there are {len(tasks)} tasks and {len(outputs)} outputs; give one output a task")
    return pool.submit(reward.many, tuple(tasks), tuple(outputs))


def _score(members: Mapping[str, Reward], default: Reward | None, task: Task, output: str) -> Scored:
    member = members.get(task.domain, default)
    if member is None:
        return _unknown(members, task)
    try:
        return Reward(member.score).many([task], [output])[0]
    except Exception as error:
        return _failed(task.domain, error)


def _score_many(
    members: Mapping[str, Reward], default: Reward | None, tasks: Sequence[Task], outputs: Sequence[str]
) -> list[Scored]:
    """Each member gets its tasks in one call; a member without `score_many` is guarded task by task."""
    if len(tasks) != len(outputs):
        raise BadInput(f"router: there are {len(tasks)} tasks and {len(outputs)} outputs; give one output a task")
    places: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        places.setdefault(task.domain, []).append(place)
    found: dict[int, Scored] = {}
    for domain, own in places.items():
        member = members.get(domain, default)
        if member is None or member.score_many is None:
            scored = [_score(members, default, tasks[place], outputs[place]) for place in own]
        else:
            scored = _together(domain, member, [tasks[place] for place in own], [outputs[place] for place in own])
        found.update(zip(own, scored, strict=True))
    return [found[place] for place in range(len(tasks))]


def _together(domain: str, member: Reward, tasks: list[Task], outputs: list[str]) -> list[Scored]:
    """Score all tasks of a member in one call; all invalid where it raises or gives a wrong number of scores."""
    try:
        scored = member.many(tasks, outputs)
    except Exception as error:
        return [_failed(domain, error)] * len(tasks)
    if len(scored) != len(tasks):
        said = f"the reward of {domain!r} gave {len(scored)} scores for {len(tasks)} outputs"
        return [Scored(None, said)] * len(tasks)
    return scored


def _unknown(members: Mapping[str, Reward], task: Task) -> Scored:
    known = ", ".join(map(repr, members)) or "none"
    return Scored(None, f"task {task.id!r} is of domain {task.domain!r}, which has no reward; there are {known}")


def _failed(domain: str, error: Exception) -> Scored:
    """Invalid, with the sentence of bad input, or the type and the words of another exception."""
    said = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
    return Scored(None, f"the reward of {domain!r} failed: {said}")
