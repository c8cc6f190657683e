"""Groups are judged while others still play: tasks and outputs flow in, verdicts flow out, whatever the reward does.

A reward judges a group at once (`Reward.many`), in a thread of its own. Where that raises, each member is judged for
itself, so that one which can't be judged costs no other its verdict (F5).
"""

import math
import traceback
from collections.abc import Callable, Sequence

from flowgrpo.contracts import Reward, Scored
from flowgrpo.types import Task


def is_solved(scored: Scored) -> bool:
    """A task is solved where its reward is full."""
    return scored.value is not None and scored.value >= 1 - 1e-6


def judge(reward: Reward, tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
    """A verdict for each output: what the reward said, or no value and the reason."""
    try:
        verdicts = list(reward.many(tasks, outputs))
        if len(verdicts) == len(tasks):
            return [_checked(verdict) for verdict in verdicts]
        why = f"the reward gave {len(verdicts)} verdicts for {len(tasks)} outputs"
    except BaseException:
        return [_alone(reward, task, output) for task, output in zip(tasks, outputs, strict=True)]
    return [Scored(None, why) for _ in tasks]


def judge_and_post(group: object, reward: Reward, tasks, outputs, post: Callable) -> None:
    """The thread of a group's verdicts."""
    try:
        post("judged", (group, judge(reward, tasks, outputs)))
    except BaseException as error:
        post("failed", error)


def _alone(reward: Reward, task: Task, output: str) -> Scored:
    try:
        return _checked(reward.many([task], [output])[0])
    except BaseException as error:
        return Scored(None, f"the reward raised {' '.join(traceback.format_exception_only(error)).strip():.500}")


def _checked(verdict: Scored) -> Scored:
    """A value that is no finite number is none."""
    if not isinstance(verdict, Scored):
        return Scored(None, f"the reward gave {verdict!r:.200}, which is no Scored")
    if verdict.value is not None and not math.isfinite(verdict.value):
        return Scored(None, f"the reward gave {verdict.value}, which is no finite number", verdict.parts)
    return verdict
