"""Judge groups of trajectories while others still play, whatever the reward does.

A reward judges a group at once (`Reward.many`), in a thread of its own. Where that raises, each member is judged for
itself, so that one which can't be judged costs no other its verdict (F5). Trajectories of pure environments have no
text: there a reward looks at the dense trajectories of a group (`Verdict`), and `judge_groups` judges several groups
side by side.
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from flowgrpo.contracts import Reward, Scored
from flowgrpo.types import Status, Task, Trajectories

Verdict = Callable[[Trajectories], Sequence[Scored]]  # the trajectories of a group, in NumPy -> one of each


def is_solved(scored: Scored) -> bool:
    """A task is solved where its reward is full."""
    return scored.value is not None and scored.value >= 1 - 1e-6


def judge_outputs(reward: Reward, tasks: Sequence[Task], outputs: Sequence[str]) -> list[Scored]:
    """A verdict for each output: what the reward said, or no value and the reason."""
    try:
        verdicts = list(reward.many(tasks, outputs))
        if len(verdicts) == len(tasks):
            return verdicts
        why = _miscounted(len(verdicts), len(tasks))
    except BaseException:
        return [_alone(reward, task, output) for task, output in zip(tasks, outputs, strict=True)]
    return [Scored(None, why) for _ in tasks]


def judge_and_post(group: object, reward: Reward, tasks, outputs, post: Callable) -> None:
    """The thread of a group's verdicts."""
    try:
        post("judged", (group, judge_outputs(reward, tasks, outputs)))
    except BaseException as error:
        post("failed", error)


def _alone(reward: Reward, task: Task, output: str) -> Scored:
    try:
        return reward.many([task], [output])[0]
    except BaseException as error:
        return Scored(None, _raised(error))


def _miscounted(verdicts: int, outputs: int) -> str:
    return f"the reward gave {verdicts} verdicts for {outputs} outputs"


def _raised(error: BaseException) -> str:
    return f"the reward raised {' '.join(traceback.format_exception_only(error)).strip():.500}"


def _checked(verdict: Scored) -> Scored:
    """Return a `Scored`, and for anything else an invalid one that says so."""
    if not isinstance(verdict, Scored):
        return Scored(None, f"the reward gave {verdict!r:.200}, which is no Scored")
    return verdict


# Groups of dense trajectories -----------------------------------------------------------------------------


def judge_groups(
    verdict: Verdict,
    trajectories: Trajectories,
    *,
    judges: int = 2,
    deadline: float = 600.0,
    on_start: Callable[[Callable[[], list[str]]], None] | None = None,
) -> list[Scored]:
    """A verdict for each trajectory, in NumPy and in order; at most `judges` groups at a time, in daemon threads.

    A group whose verdicts are not there within `deadline` seconds has none, and its thread is left behind. `on_start`
    is given a function that says which groups are awaited.
    """
    own = {int(group): np.flatnonzero(trajectories.group == group) for group in np.unique(trajectories.group)}
    waiting, since, found = list(reversed(own)), {}, [Scored(None, "it was not judged")] * len(trajectories.group)
    events: queue.SimpleQueue = queue.SimpleQueue()
    if on_start is not None:
        on_start(partial(_pending, since, waiting))
    while waiting or since:
        while waiting and len(since) < judges:
            group = waiting.pop()
            since[group] = time.monotonic()
            part = jax.tree.map(lambda x_n: x_n[own[group]], trajectories)  # noqa: B023
            arguments = (group, verdict, part, events.put)
            threading.Thread(target=_judge_group, args=arguments, name=f"flowgrpo-judge-{group}", daemon=True).start()
        try:
            done = [events.get(timeout=max(min(since.values()) + deadline - time.monotonic(), 0.0))]
        except queue.Empty:
            late = [group for group, began in since.items() if time.monotonic() >= began + deadline]
            done = [(group, f"the reward did not return within {deadline:g} s") for group in late]
        for group, said in done:
            if since.pop(group, None) is not None:  # or else its deadline has passed
                for index, n in enumerate(own[group]):
                    found[n] = Scored(None, said) if isinstance(said, str) else said[index]
    return found


def with_rewards(
    trajectories: Trajectories, scored: Sequence[Scored], solved: Callable[[Scored], bool]
) -> Trajectories:
    """The trajectories with what was said of them; what could not be judged takes no part (F5)."""
    value_n = np.array([np.nan if one.value is None else one.value for one in scored], np.float32)
    lacks_n = np.isnan(value_n)
    paid_nt = np.where(trajectories.turns, np.where(lacks_n, 0.0, value_n)[:, None], np.float32(0))
    return trajectories.replace(
        outcome=value_n,
        reward=paid_nt,
        correct=np.array([one.value is not None and bool(solved(one)) for one in scored]),
        status=np.where(lacks_n, np.int32(Status.VERIFIER_FAILURE), trajectories.status),
        by_turn=np.zeros(len(value_n), bool),
    )


def _judge_group(group: int, verdict: Verdict, part: Trajectories, put: Callable[[Any], None]) -> None:
    """The thread of a group: posts its verdicts, or why there are none."""
    count = len(part.group)
    try:
        said = list(verdict(part))
        put((group, [_checked(one) for one in said] if len(said) == count else _miscounted(len(said), count)))
    except BaseException as error:
        put((group, _raised(error)))


def _pending(since: dict[int, float], waiting: list[int]) -> list[str]:
    now = time.monotonic()
    words = [f"the reward of group {group} for {now - began:.0f} s" for group, began in since.copy().items()]
    return words + ([f"{len(waiting)} groups that are not judged yet"] if waiting else [])
