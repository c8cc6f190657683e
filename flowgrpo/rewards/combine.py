"""Rewards composed of rewards: a router by domain, weighted sums, a length penalty, a held-out check.

    reward = router({"code": code(sandbox), "math": mathematics(sandbox.call), "mine": my_reward})
    future = score_async(reward, tasks, outputs, pool)     # while devices work (R1)
    combine({"answer": (school(), 1.0), "format": (check_format(tag("answer")), 0.1)})
    with_length(reward, free_length=512, max_length=1024)
    second_check(reward, check)

`parts` has every component under its name, and the component's own parts as `name/part`, so that each can be plotted.
Invalid is never 0: a sum is invalid if one of its required components is.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.types import BadInput, Task, check_range, first_line

Components = Mapping[str, tuple[Reward, float]]
SECOND_CHECK = "second_check"  # name of the part with the value of a held-out check


# Rewards from functions ---------------------------------------------------------------------------------


def batch_reward(score_many: Callable[[Sequence[Task], Sequence[str]], list[RewardResult]]) -> Reward:
    """Make a reward of a function over many outputs; a single output is a batch of one."""
    return Reward(lambda task, output: score_many([task], [output])[0], score_many)


def threaded(score: Callable[[Task, str], RewardResult], workers: int) -> Reward:
    """Make a reward that judges `workers` outputs concurrently, each in a thread."""

    def score_many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[RewardResult]:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(score, tasks, outputs))

    return Reward(score, score_many)


def prepared_reward(prepare: Callable[[Task, str], Any], judge: Callable[[list], list[RewardResult]]) -> Reward:
    """Make a reward that judges in one call the inputs that `prepare` makes of tasks and outputs.

    If `prepare` returns a `RewardResult`, that is the result; if it raises `BadInput`, the result is invalid. Neither
    affects the other inputs.
    """

    def score_many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[RewardResult]:
        inputs = [invalid_if_bad_input(prepare, task, output) for task, output in zip(tasks, outputs, strict=True)]
        judged = [input_ for input_ in inputs if not isinstance(input_, RewardResult)]
        results = iter(judge(judged) if judged else [])
        return [input_ if isinstance(input_, RewardResult) else next(results) for input_ in inputs]

    return batch_reward(score_many)


def invalid_if_bad_input(function: Callable[[Task, str], Any], task: Task, output: str) -> Any:
    """Call a function with a task and an output; if it raises `BadInput`, return an invalid result with the reason."""
    try:
        return function(task, output)
    except BadInput as error:
        return RewardResult(None, str(error))


def model_scores(name: str, model: Callable[[list], Any], inputs: list) -> list[RewardResult]:
    """Score inputs by a model that returns a number for each; invalid if it fails or the number is not finite."""
    try:
        scores = np.asarray(model(inputs), np.float64).reshape(len(inputs))
    except Exception as error:  # a model can fail in its own way: device, server, memory; all mean no score
        return [RewardResult(None, f"the {name} failed: {first_line(error)}")] * len(inputs)
    return [
        RewardResult(float(score)) if np.isfinite(score) else RewardResult(None, f"the {name}'s score is {score}")
        for score in scores
    ]


# Domains ------------------------------------------------------------------------------------------------


def router(rewards: Mapping[str, Reward], *, default: Reward | None = None) -> Reward:
    """Make the reward that sends each task to the reward of its domain, or to `default`.

    A reward gets the tasks of its domain only, all in one call if it has `score_many`. If it raises, or returns a wrong
    number of results, only its own results are invalid, with the reason.
    """
    if not rewards and default is None:
        raise BadInput("router: there is no reward; give one for a domain or a default")
    rewards = dict(rewards)

    def score_domain(domain: str, tasks: list[Task], outputs: list[str]) -> list[RewardResult]:
        reward = rewards.get(domain, default)
        if reward is None:
            known = ", ".join(map(repr, rewards)) or "none"
            unknown = f"is of domain {domain!r}, which has no reward; there are {known}"
            return [RewardResult(None, f"task {task.id!r} {unknown}") for task in tasks]
        try:
            results = reward.score_all(tasks, outputs)
        except Exception as error:
            reason = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
            return [RewardResult(None, f"the reward of {domain!r} failed: {reason}")] * len(tasks)
        if len(results) != len(tasks):
            reason = f"the reward of {domain!r} gave {len(results)} scores for {len(tasks)} outputs"
            return [RewardResult(None, reason)] * len(tasks)
        return results

    def score_many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[RewardResult]:
        if len(tasks) != len(outputs):
            raise BadInput(f"router: there are {len(tasks)} tasks and {len(outputs)} outputs; give one output a task")
        indices_of: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            indices_of.setdefault(task.domain, []).append(index)
        results: dict[int, RewardResult] = {}
        for domain, indices in indices_of.items():
            reward = rewards.get(domain, default)
            in_one_call = reward is not None and reward.score_many is not None
            for group in [indices] if in_one_call else [[index] for index in indices]:
                scored = score_domain(domain, [tasks[index] for index in group], [outputs[index] for index in group])
                results.update(zip(group, scored, strict=True))
        return [results[index] for index in range(len(tasks))]

    return batch_reward(score_many)


def score_async(
    reward: Reward, tasks: Sequence[Task], outputs: Sequence[str], pool: Executor
) -> "Future[list[RewardResult]]":
    """Judge outputs in a thread of the pool, without blocking the caller; the sequences are copied first."""
    if len(tasks) != len(outputs):
        raise BadInput(f"score_async: there are {len(tasks)} tasks and {len(outputs)} outputs; give one output a task")
    return pool.submit(reward.score_all, tuple(tasks), tuple(outputs))


# Sums ---------------------------------------------------------------------------------------------------


def combine(components: Components, *, optional: Collection[str] = ()) -> Reward:
    """Weighted sum of components; invalid if a component is, unless that one is `optional`: then it adds 0."""
    for name, (_, weight) in components.items():
        check_range("combine", f"the weight of {name!r}", weight)
        if not name or "/" in name or name == SECOND_CHECK:
            raise BadInput(
                f"combine: a component is named {name!r}; a name has letters, no slash, and is not {SECOND_CHECK}"
            )
    unknown = [name for name in optional if name not in components]
    if not components or unknown or len(set(optional)) == len(components):
        raise BadInput(f"combine: optional is {list(optional)}, but must leave out at least one of {list(components)}")
    weights = {name: weight for name, (_, weight) in components.items()}

    def score_many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[RewardResult]:
        columns = [reward.score_all(tasks, outputs) for reward, _ in components.values()]
        return [weighted_sum(row) for row in zip(*columns, strict=True)]

    def weighted_sum(results: Sequence[RewardResult]) -> RewardResult:
        parts: dict[str, float] = {}
        total, is_valid, reasons = 0.0, True, []
        for name, result in zip(components, results, strict=True):
            parts |= {f"{name}/{part}": value for part, value in result.parts.items()}
            reasons += [f"{name}: {result.reason}"] if result.reason else []
            if result.value is None:
                is_valid &= name in optional
            else:
                parts[name] = result.value
                total += weights[name] * result.value
        return RewardResult(total if is_valid else None, "; ".join(reasons), parts)

    return batch_reward(score_many)


def length(*, free_length: int, max_length: int, measure: Callable[[str], int] = len) -> Reward:
    """Give 0 up to `free_length`, then fall linearly to -1 at `max_length`. `measure` counts characters, or tokens."""
    if not 0 <= free_length < max_length:
        found = f"free_length is {free_length} and max_length is {max_length}"
        raise BadInput(f"length: {found}, but must be 0 <= free_length < max_length")

    def score(_: Task, output: str) -> RewardResult:
        size = measure(output)
        excess = min(max(size - free_length, 0), max_length - free_length) / (max_length - free_length)
        reason = f"{size} long, {free_length} are free" if excess else ""
        return RewardResult(-excess if excess else 0.0, reason, {"size": float(size)})

    return Reward(score)


def with_length(
    reward: Reward, *, free_length: int, max_length: int, weight: float = 1.0, measure: Callable[[str], int] = len
) -> Reward:
    """Add `weight` times the penalty of `length` to a reward; `parts["unshaped"]` is the reward itself."""
    penalty = length(free_length=free_length, max_length=max_length, measure=measure)
    return combine({"unshaped": (reward, 1.0), "length": (penalty, weight)})


def second_check(reward: Reward, check: Reward) -> Reward:
    """Add the value of a held-out check to `parts`, never to the value: reward hacking shows as a gap (R3).

    An invalid check adds no part, so that means are over valid checks.
    """

    def score_many(tasks: Sequence[Task], outputs: Sequence[str]) -> list[RewardResult]:
        results, checks = reward.score_all(tasks, outputs), check.score_all(tasks, outputs)
        return [
            result if second.value is None else result._replace(parts={**result.parts, SECOND_CHECK: second.value})
            for result, second in zip(results, checks, strict=True)
        ]

    return batch_reward(score_many)
