"""Call the reward for groups of trajectories while others are still rolled out, whatever the reward does.

A reward scores a group at once (`Reward.score_all`), in a thread of its own. If that raises, each trajectory is scored
on its own, so that one which can't be scored costs no other its reward (F5). Trajectories of pure environments have no
text: there a `GroupReward` scores the padded trajectories of a group, and `judge_groups` scores several groups at a
time.
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import jax
import numpy as np

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.types import Status, Task, Trajectories

GroupReward = Callable[[Trajectories], Sequence[RewardResult]]  # a group in NumPy -> a result for each trajectory


def is_solved(result: RewardResult) -> bool:
    """Whether the reward is full, so that the task counts as solved."""
    return result.value is not None and result.value >= 1 - 1e-6


def judge_outputs(reward: Reward, tasks: Sequence[Task], outputs: Sequence[str]) -> list[RewardResult]:
    """The reward's result for each output, or no value and the reason."""
    try:
        results = list(reward.score_all(tasks, outputs))
        if len(results) == len(tasks):
            return results
        reason = _wrong_count(len(results), len(tasks))
    except BaseException:
        return [_judge_output(reward, task, output) for task, output in zip(tasks, outputs, strict=True)]
    return [RewardResult(None, reason) for _ in tasks]


def _judge_output(reward: Reward, task: Task, output: str) -> RewardResult:
    try:
        return reward.score_all([task], [output])[0]
    except BaseException as error:
        return RewardResult(None, _describe_error(error))


def _wrong_count(results: int, outputs: int) -> str:
    return f"the reward gave {results} results for {outputs} outputs"


def _describe_error(error: BaseException) -> str:
    return f"the reward raised {' '.join(traceback.format_exception_only(error)).strip():.500}"


# Groups of padded trajectories ----------------------------------------------------------------------------


def judge_groups(
    reward: GroupReward,
    trajectories: Trajectories,
    *,
    judges: int = 2,
    deadline: float = 600.0,
    on_start: Callable[[Callable[[], list[str]]], None] | None = None,
) -> list[RewardResult]:
    """A reward result for each trajectory, in order, with groups judged in daemon threads.

    Args:
        reward: scores the trajectories of a group.
        trajectories: in NumPy.
        judges: number of groups judged at a time.
        deadline: seconds for a group; after that its trajectories have no value, and its thread is left behind.
        on_start: called with a function that lists the groups under way, for a watchdog.
    """
    rows = {int(group): np.flatnonzero(trajectories.group == group) for group in np.unique(trajectories.group)}
    waiting = list(reversed(rows))
    started: dict[int, float] = {}  # groups under way
    results = [RewardResult(None, "it was not judged")] * len(trajectories.group)
    done: queue.SimpleQueue = queue.SimpleQueue()  # (group, its results or the reason that there are none)

    def judge_group(group: int, part: Trajectories) -> None:
        count = len(part.group)
        try:
            group_results = [
                result
                if isinstance(result, RewardResult)
                else RewardResult(None, f"the reward gave {result!r:.200}, which is no RewardResult")
                for result in reward(part)
            ]
            is_right_count = len(group_results) == count
            done.put((group, group_results if is_right_count else _wrong_count(len(group_results), count)))
        except BaseException as error:
            done.put((group, _describe_error(error)))

    def pending() -> list[str]:
        now = time.monotonic()
        words = [f"the reward of group {group} for {now - start:.0f} s" for group, start in started.copy().items()]
        return words + ([f"{len(waiting)} groups that are not judged yet"] if waiting else [])

    if on_start is not None:
        on_start(pending)
    while waiting or started:
        while waiting and len(started) < judges:
            group = waiting.pop()
            started[group] = time.monotonic()
            part = jax.tree.map(lambda x_n: x_n[rows[group]], trajectories)  # noqa: B023
            name = f"flowgrpo-judge-{group}"
            threading.Thread(target=judge_group, args=(group, part), name=name, daemon=True).start()
        try:
            events = [done.get(timeout=max(min(started.values()) + deadline - time.monotonic(), 0.0))]
        except queue.Empty:
            late = [group for group, start in started.items() if time.monotonic() >= start + deadline]
            events = [(group, f"the reward did not return within {deadline:g} s") for group in late]
        for group, results_or_reason in events:
            if started.pop(group, None) is None:
                continue  # its deadline has passed
            for index, n in enumerate(rows[group]):
                if isinstance(results_or_reason, str):
                    results[n] = RewardResult(None, results_or_reason)
                else:
                    results[n] = results_or_reason[index]
    return results


def with_reward_results(
    trajectories: Trajectories, results: Sequence[RewardResult], is_solved: Callable[[RewardResult], bool]
) -> Trajectories:
    """The trajectories with their outcomes from a reward; those without a value don't count (F5)."""
    outcome_n = np.array([np.nan if result.value is None else result.value for result in results], np.float32)
    is_missing_n = np.isnan(outcome_n)
    reward_nt = np.where(trajectories.turns, np.where(is_missing_n, 0.0, outcome_n)[:, None], np.float32(0))
    return trajectories.replace(
        outcome=outcome_n,
        reward=reward_nt,
        correct=np.array([result.value is not None and bool(is_solved(result)) for result in results]),
        status=np.where(is_missing_n, np.int32(Status.VERIFIER_FAILURE), trajectories.status),
        by_turn=np.zeros(len(outcome_n), bool),
    )
