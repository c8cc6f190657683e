"""Evaluate a policy from several trajectories of each task: success, mean@k, pass@k, tools, repetition.

    compute_metrics(correct_gn, turns_gn, errors_gn, tool_gnt, tools=("add", "sub"), ks=(1, 4))  ->  Evaluation

`correct_gn` is [tasks, samples], a group's trajectories in a row. Trajectories without a valid outcome (F5) are left
out of everything and counted; every task has the same weight, however many of its trajectories are valid.

    pass@k = mean over tasks of 1 - C(n - c, k) / C(n, k)        n valid samples, c of them correct (arXiv:2107.03374)
    Wilson = (p + z²/2m ± z √(p(1 - p)/m + z²/4m²)) / (1 + z²/m)

Samples of one task resemble each other, so in the interval m is not their number but how many independent ones would
know the rate as well: p(1 - p) over the variance of the mean over tasks, between the tasks and the samples.

    repeated_text       of the runs of `length` tokens within an action, those that stood in the same action before
    repeated_actions    of the actions that follow another one, those that came before in their trajectory

Both rise towards 1 in a policy that collapses. Runs are not compared between actions, whose form is alike by design.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowgrpo.types import BadInput, Trajectory, check_shared_axes

Z95 = 1.959963984540054  # of a normal distribution, 95 % lie within this many standard deviations


@dataclass(frozen=True)
class Evaluation:
    """The figures of one evaluation; None where nothing was given to count it from."""

    success: float  # mean@k: the mean over tasks of the mean over their samples
    success_low: float
    success_high: float
    tasks: int  # with at least one valid trajectory
    samples: int  # valid trajectories
    invalid: int
    passed: dict[int, float | None] = field(default_factory=dict)  # pass@k; None where no task has k valid samples
    turns: float | None = None  # mean over trajectories
    tool_errors: float | None = None  # share of the turns that ended in an error observation
    tools: dict[str, float] | None = None  # share of each tool among the calls
    right_tool: float | None = None  # share of the calls that went to the right tool, where a call alone can tell

    def figures(self) -> dict[str, Any]:
        """Name the figures as metrics do: `success`, `pass@4`, `turns`, … ; those that are None are left out."""
        named = {name: value for name, value in vars(self).items() if name != "passed"}
        named |= {f"pass@{k}": value for k, value in self.passed.items()}
        return {name: value for name, value in named.items() if value is not None}


def compute_metrics(
    correct_gn: np.ndarray,
    turns_gn: np.ndarray | None = None,
    errors_gn: np.ndarray | None = None,
    tool_gnt: np.ndarray | None = None,
    *,
    valid_gn: np.ndarray | None = None,
    tools: Sequence[str] = (),
    ks: Sequence[int] = (1,),
) -> Evaluation:
    """All figures. `errors_gn` counts turns that ended in an error; `tool_gnt` is -1 where no tool was called."""
    given = {"turns_gn": turns_gn, "errors_gn": errors_gn, "tool_gnt": tool_gnt, "valid_gn": valid_gn}
    check_shared_axes("evaluate", correct_gn=correct_gn, **{name: x for name, x in given.items() if x is not None})
    correct_gn = np.asarray(correct_gn, bool)
    valid_gn = np.ones(correct_gn.shape, bool) if valid_gn is None else np.asarray(valid_gn, bool)
    if not valid_gn.any():
        raise BadInput("evaluate: no trajectory has a valid outcome, so there is nothing to count")
    low, high = success_interval(correct_gn, valid_gn)
    return Evaluation(
        success=mean_at_k(correct_gn, valid_gn),
        success_low=low,
        success_high=high,
        tasks=int(valid_gn.any(axis=1).sum()),
        samples=int(valid_gn.sum()),
        invalid=int((~valid_gn).sum()),
        passed={k: pass_at_k(correct_gn, k, valid_gn) for k in ks},
        turns=None if turns_gn is None else float(np.asarray(turns_gn)[valid_gn].mean()),
        tool_errors=None if turns_gn is None or errors_gn is None else error_share(turns_gn, errors_gn, valid_gn),
        tools=None if tool_gnt is None else _tool_mix(np.asarray(tool_gnt)[valid_gn], tools),
    )


# Rates ------------------------------------------------------------------------------------------------


def mean_at_k(correct_gn: np.ndarray, valid_gn: np.ndarray | None = None) -> float:
    """The mean over tasks of the share of their valid samples that are correct."""
    return float(_rates(correct_gn, valid_gn)[0].mean())


def pass_at_k(correct_gn: np.ndarray, k: int, valid_gn: np.ndarray | None = None) -> float | None:
    """The chance that one of k samples of a task is correct, unbiased, over tasks with k valid samples; or None."""
    if k < 1:
        raise BadInput(f"pass_at_k: k={k} must be at least 1")
    rate_g, count_g = _rates(correct_gn, valid_gn)
    rate_g, count_g = rate_g[count_g >= k], count_g[count_g >= k]
    if not count_g.size:
        return None
    wrong_g = count_g - np.rint(rate_g * count_g)
    i_k = np.arange(k)  # C(n - c, k) / C(n, k) as a product of k ratios; it is 0 from the first that is not positive
    ratio_gk = np.maximum(wrong_g[:, None] - i_k, 0) / (count_g[:, None] - i_k)
    return float((1 - ratio_gk.prod(axis=1)).mean())


def _rates(correct_gn: np.ndarray, valid_gn: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Of each task with valid samples: the share of them that is correct, and their number."""
    correct_gn = np.asarray(correct_gn, bool)
    valid_gn = np.ones(correct_gn.shape, bool) if valid_gn is None else np.asarray(valid_gn, bool)
    count_g = valid_gn.sum(axis=1)
    right_g = (correct_gn & valid_gn).sum(axis=1)[count_g > 0]
    count_g = count_g[count_g > 0]
    return right_g / count_g, count_g


# Intervals --------------------------------------------------------------------------------------------


def wilson(rate: float, count: float, z: float = Z95) -> tuple[float, float]:
    """The interval of Wilson's score test around a rate that `count` independent samples gave."""
    if not count > 0 or not 0 <= rate <= 1:
        raise BadInput(f"wilson: rate={rate} of count={count} must be a share of at least some samples")
    centre, spread = rate + z**2 / (2 * count), z * np.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2))
    low, high = (centre - spread) / (1 + z**2 / count), (centre + spread) / (1 + z**2 / count)
    return float(max(low, 0.0)) if rate > 0 else 0.0, float(min(high, 1.0)) if rate < 1 else 1.0


def success_interval(correct_gn: np.ndarray, valid_gn: np.ndarray | None = None) -> tuple[float, float]:
    """Wilson's interval for the success rate, by as many samples as are worth independent ones."""
    rate_g, count_g = _rates(correct_gn, valid_gn)
    return wilson(float(rate_g.mean()), independent_samples(rate_g, count_g))


def independent_samples(rate_g: np.ndarray, count_g: np.ndarray) -> float:
    """Say how many independent samples would know the mean rate as well: from the tasks to all samples."""
    tasks, samples = len(rate_g), float(count_g.sum())
    if tasks == samples:
        return samples
    rate = rate_g.mean()
    variance = rate_g.var(ddof=1) / tasks if tasks > 1 else 0.0
    if not 0 < rate < 1 or variance == 0:
        return float(tasks)  # nothing is known of how tasks differ, so no sample counts beyond its task's first
    return float(np.clip(rate * (1 - rate) / variance, tasks, samples))


# Turns and tools --------------------------------------------------------------------------------------


def error_share(turns_gn: np.ndarray, errors_gn: np.ndarray, valid_gn: np.ndarray) -> float:
    """The share of all turns that ended in an error observation."""
    turns, errors = (int(np.asarray(x)[valid_gn].sum()) for x in (turns_gn, errors_gn))
    if errors > turns:
        raise BadInput(f"evaluate: errors_gn counts {errors} turns, but turns_gn only {turns}")
    return errors / turns if turns else 0.0


def _tool_mix(tool_nt: np.ndarray, tools: Sequence[str]) -> dict[str, float]:
    """The share of each tool among all calls, by name; all 0 where no tool was called."""
    called = tool_nt[tool_nt >= 0]
    if called.size and called.max() >= len(tools):
        raise BadInput(f"evaluate: tool {called.max()} was called, but tools names only {len(tools)}")
    counts = np.bincount(called.astype(np.int64), minlength=len(tools))
    return {name: float(count / max(called.size, 1)) for name, count in zip(tools, counts, strict=True)}


LENGTH = 4  # tokens of a run


def repetition(trajectories: Iterable[Trajectory], *, length: int = LENGTH) -> dict[str, float]:
    """Both shares over all trajectories; 0 where there is no run, or no second action."""
    runs = seen = actions = again = 0
    for one in trajectories:
        said = [tuple(np.asarray(turn.tokens)[np.asarray(turn.chosen, bool)].tolist()) for turn in one.turns]
        said = [action for action in said if action]
        for action in said:
            every = [tuple(action[start : start + length]) for start in range(len(action) - length + 1)]
            runs, seen = runs + len(every), seen + len(every) - len(set(every))
        actions, again = actions + max(len(said) - 1, 0), again + len(said) - len(set(said))
    return {"repeated_text": seen / max(runs, 1), "repeated_actions": again / max(actions, 1)}
