"""Estimates from the scores of a few runs of each arm, with their intervals (rliable's method).

    iqm(scores_se)                                  the mean of the middle half of all runs
    interval(iqm, scores_se)                        between which it lies, by resampling the runs of each environment
    probability_of_improvement(one_se, other_se)    how often a run of one arm beats one of the other

Scores are [seeds, environments], success rates for instance. A mean is at the mercy of one seed that failed, a median
throws most of what was measured away; the interquartile mean does neither (Agarwal et al., 2021, "Deep Reinforcement
Learning at the Edge of the Statistical Precipice"). Resamples are drawn from a seed, so a table is the same when it is
made again.
"""

from collections.abc import Callable

import numpy as np

from flowgrpo.types import BadInput

Statistic = Callable[..., float]  # of one [seeds, environments] or several -> a number


def iqm(scores_se: np.ndarray) -> float:
    """The interquartile mean over all runs: a quarter of them, rounded down, is left out at either end."""
    ordered = np.sort(_scores("iqm", scores_se), axis=None)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def probability_of_improvement(one_se: np.ndarray, other_se: np.ndarray) -> float:
    """The chance that a run of `one` scores higher than a run of `other`, a tie counting half; a mean over
    environments."""
    one_se, other_se = (_scores("probability_of_improvement", x) for x in (one_se, other_se))
    if one_se.shape[1] != other_se.shape[1]:
        raise BadInput(
            f"probability_of_improvement: {one_se.shape[1]} environments against {other_se.shape[1]}: give the same"
        )
    difference = one_se[:, None, :] - other_se[None, :, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def interval(
    statistic: Statistic, *scores: np.ndarray, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """A percentile bootstrap of `statistic(*scores)`: runs are drawn with replacement in each environment."""
    if not 0 < level < 1 or resamples < 1:
        raise BadInput(f"interval: level={level} must lie between 0 and 1, and resamples={resamples} be at least 1")
    given = [_scores("interval", one_se) for one_se in scores]
    draw = np.random.default_rng(seed)
    values = []
    for _ in range(resamples):
        drawn = [np.take_along_axis(x, draw.integers(len(x), size=x.shape), axis=0) for x in given]
        values.append(statistic(*drawn))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _scores(name: str, scores: np.ndarray) -> np.ndarray:
    """As [seeds, environments]; one number a seed is one environment."""
    scores = np.asarray(scores, np.float64)
    scores = scores[:, None] if scores.ndim == 1 else scores
    if scores.ndim != 2 or not scores.size or not np.isfinite(scores).all():
        raise BadInput(f"{name}: scores of shape {scores.shape} must be finite numbers, [seeds, environments]")
    return scores
