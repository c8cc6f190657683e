"""Evaluate a policy from several trajectories of each task: success, mean@k, pass@k, tools, repetition.

    compute_metrics(correct_gn, turns_gn, errors_gn, tool_gnt, tools=("add", "sub"), ks=(1, 4))  ->  Evaluation

`correct_gn` is [tasks, samples]. Trajectories without a valid outcome (F5) are excluded and counted; every task has
the same weight, however many of its trajectories are valid.

    pass@k = mean over tasks of 1 - C(n - c, k) / C(n, k)        n valid samples, c of them correct (arXiv:2107.03374)
    Wilson = (p + z²/2m ± z √(p(1 - p)/m + z²/4m²)) / (1 + z²/m)

Samples of one task are correlated, so m in the interval is the effective number of independent samples: p(1 - p) over
the variance of the mean over tasks, clipped between the number of tasks and that of samples.

    repeated_text       fraction of n-grams of `length` tokens that occurred earlier in the same action
    repeated_actions    fraction of second and later actions that occurred earlier in their trajectory

Both rise towards 1 in a policy that collapses. N-grams are not compared between actions, whose form is similar by
design.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowgrpo.types import BadInput, Trajectory, check_shared_axes

Z95 = 1.959963984540054  # of a normal distribution, 95 % lie within this many standard deviations


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one evaluation; None if their input was not given."""

    success: float  # mean@k: mean over tasks of the mean over their samples
    success_low: float
    success_high: float
    tasks: int  # number of tasks with a valid trajectory
    samples: int  # number of valid trajectories
    invalid: int
    pass_at_k: dict[int, float | None] = field(default_factory=dict)  # None if no task has k valid samples
    turns: float | None = None  # mean over trajectories
    tool_errors: float | None = None  # fraction of turns with an error observation
    tools: dict[str, float] | None = None  # fraction of each tool among the calls
    right_tool: float | None = None  # fraction of calls of the right tool, if that is known per call

    def metrics(self) -> dict[str, Any]:
        """By name: `success`, `pass@4`, `turns`, … ; without those that are None."""
        named = {name: value for name, value in vars(self).items() if name != "pass_at_k"}
        named |= {f"pass@{k}": value for k, value in self.pass_at_k.items()}
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
    """All metrics.

    Args:
        correct_gn: whether a sample solved its task.
        turns_gn: number of turns.
        errors_gn: number of turns with an error observation.
        tool_gnt: index of the tool called in each turn; -1 if none was.
        valid_gn: samples that count (F5); by default all.
        tools: names of the tools.
        ks: the k of pass@k.
    """
    optional = {"turns_gn": turns_gn, "errors_gn": errors_gn, "tool_gnt": tool_gnt, "valid_gn": valid_gn}
    check_shared_axes("evaluate", correct_gn=correct_gn, **{name: x for name, x in optional.items() if x is not None})
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
        pass_at_k={k: pass_at_k(correct_gn, k, valid_gn) for k in ks},
        turns=None if turns_gn is None else float(np.asarray(turns_gn)[valid_gn].mean()),
        tool_errors=None if turns_gn is None or errors_gn is None else error_fraction(turns_gn, errors_gn, valid_gn),
        tools=None if tool_gnt is None else _tool_fractions(np.asarray(tool_gnt)[valid_gn], tools),
    )


# Rates ------------------------------------------------------------------------------------------------


def mean_at_k(correct_gn: np.ndarray, valid_gn: np.ndarray | None = None) -> float:
    """Mean over tasks of the fraction of their valid samples that are correct."""
    return float(_rates(correct_gn, valid_gn)[0].mean())


def pass_at_k(correct_gn: np.ndarray, k: int, valid_gn: np.ndarray | None = None) -> float | None:
    """Unbiased probability that one of k samples is correct, over tasks with k valid samples; None without any."""
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
    """(fraction of correct samples, number of samples) of each task with valid samples."""
    correct_gn = np.asarray(correct_gn, bool)
    valid_gn = np.ones(correct_gn.shape, bool) if valid_gn is None else np.asarray(valid_gn, bool)
    count_g = valid_gn.sum(axis=1)
    right_g = (correct_gn & valid_gn).sum(axis=1)[count_g > 0]
    count_g = count_g[count_g > 0]
    return right_g / count_g, count_g


# Intervals --------------------------------------------------------------------------------------------


def wilson(rate: float, count: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a rate measured from `count` independent samples."""
    if not count > 0 or not 0 <= rate <= 1:
        raise BadInput(f"wilson: rate={rate} of count={count} must be a fraction of at least some samples")
    centre, spread = rate + z**2 / (2 * count), z * np.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2))
    low, high = (centre - spread) / (1 + z**2 / count), (centre + spread) / (1 + z**2 / count)
    return float(max(low, 0.0)) if rate > 0 else 0.0, float(min(high, 1.0)) if rate < 1 else 1.0


def success_interval(correct_gn: np.ndarray, valid_gn: np.ndarray | None = None) -> tuple[float, float]:
    """Wilson's interval of the success rate, from the effective number of samples."""
    rate_g, count_g = _rates(correct_gn, valid_gn)
    return wilson(float(rate_g.mean()), effective_samples(rate_g, count_g))


def effective_samples(rate_g: np.ndarray, count_g: np.ndarray) -> float:
    """Effective number of independent samples for the mean rate: between that of tasks and that of samples."""
    tasks, samples = len(rate_g), float(count_g.sum())
    if tasks == samples:
        return samples
    rate = rate_g.mean()
    variance = rate_g.var(ddof=1) / tasks if tasks > 1 else 0.0
    if not 0 < rate < 1 or variance == 0:
        return float(tasks)  # the variance between tasks is unknown, so only one sample per task counts
    return float(np.clip(rate * (1 - rate) / variance, tasks, samples))


# Turns and tools --------------------------------------------------------------------------------------


def error_fraction(turns_gn: np.ndarray, errors_gn: np.ndarray, valid_gn: np.ndarray) -> float:
    """Fraction of turns with an error observation."""
    turns, errors = (int(np.asarray(x)[valid_gn].sum()) for x in (turns_gn, errors_gn))
    if errors > turns:
        raise BadInput(f"evaluate: errors_gn counts {errors} turns, but turns_gn only {turns}")
    return errors / turns if turns else 0.0


def _tool_fractions(tool_nt: np.ndarray, tools: Sequence[str]) -> dict[str, float]:
    """Fraction of each tool among all calls, by name; all 0 if no tool was called."""
    called = tool_nt[tool_nt >= 0]
    if called.size and called.max() >= len(tools):
        raise BadInput(f"evaluate: tool {called.max()} was called, but tools names only {len(tools)}")
    counts = np.bincount(called.astype(np.int64), minlength=len(tools))
    return {name: float(count / max(called.size, 1)) for name, count in zip(tools, counts, strict=True)}


NGRAM = 4  # tokens


def repetition(trajectories: Iterable[Trajectory], *, length: int = NGRAM) -> dict[str, float]:
    """`repeated_text` and `repeated_actions` over all trajectories; 0 without n-grams, or without second actions."""
    num_ngrams = repeated_ngrams = later_actions = repeated_actions = 0
    for trajectory in trajectories:
        actions = [tuple(np.asarray(turn.tokens)[np.asarray(turn.chosen, bool)].tolist()) for turn in trajectory.turns]
        actions = [action for action in actions if action]
        for action in actions:
            ngrams = [action[start : start + length] for start in range(len(action) - length + 1)]
            num_ngrams += len(ngrams)
            repeated_ngrams += len(ngrams) - len(set(ngrams))
        later_actions += max(len(actions) - 1, 0)
        repeated_actions += len(actions) - len(set(actions))
    return {
        "repeated_text": repeated_ngrams / max(num_ngrams, 1),
        "repeated_actions": repeated_actions / max(later_actions, 1),
    }
