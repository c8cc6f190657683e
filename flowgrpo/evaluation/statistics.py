"""Estimates from the scores of a few runs of each arm, with confidence intervals (rliable's method).

    iqm(scores_se)                                  interquartile mean of all runs
    interval(iqm, scores_se)                        bootstrap interval, resampling the runs of each environment
    probability_of_improvement(first_se, second_se) how often a run of one arm beats one of the other

Scores are [seeds, environments], success rates for instance. A mean is sensitive to one failed seed, and a median
ignores most of the data; the interquartile mean does neither (Agarwal et al., 2021, "Deep Reinforcement Learning at the
Edge of the Statistical Precipice"). Resampling is seeded, so that tables are reproducible.
"""

from collections.abc import Callable

import numpy as np

from flowgrpo.types import BadInput

Statistic = Callable[..., float]  # of one [seeds, environments] or several -> a number


def iqm(scores_se: np.ndarray) -> float:
    """Interquartile mean over all runs: a quarter of them, rounded down, is left out at either end."""
    ordered = np.sort(_scores("iqm", scores_se), axis=None)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def probability_of_improvement(first_se: np.ndarray, second_se: np.ndarray) -> float:
    """Probability that a run of the first arm scores higher than one of the second, a tie counting half; mean over
    environments."""
    first_se, second_se = (_scores("probability_of_improvement", x) for x in (first_se, second_se))
    if first_se.shape[1] != second_se.shape[1]:
        raise BadInput(
            f"probability_of_improvement: {first_se.shape[1]} environments against {second_se.shape[1]}: give the same"
        )
    difference = first_se[:, None, :] - second_se[None, :, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def interval(
    statistic: Statistic, *scores: np.ndarray, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap of `statistic(*scores)`; runs are drawn with replacement in each environment."""
    if not 0 < level < 1 or resamples < 1:
        raise BadInput(f"interval: level={level} must lie between 0 and 1, and resamples={resamples} be at least 1")
    arms = [_scores("interval", scores_se) for scores_se in scores]
    generator = np.random.default_rng(seed)
    values = []
    for _ in range(resamples):
        resampled = [np.take_along_axis(x, generator.integers(len(x), size=x.shape), axis=0) for x in arms]
        values.append(statistic(*resampled))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _scores(name: str, scores: np.ndarray) -> np.ndarray:
    """As float64 [seeds, environments]; a vector is one environment."""
    scores = np.asarray(scores, np.float64)
    scores = scores[:, None] if scores.ndim == 1 else scores
    if scores.ndim != 2 or not scores.size or not np.isfinite(scores).all():
        raise BadInput(f"{name}: scores of shape {scores.shape} must be finite numbers, [seeds, environments]")
    return scores
