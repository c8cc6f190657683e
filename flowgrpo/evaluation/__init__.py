"""Metrics of a policy, and estimates over several runs.

Modules:

    metrics     Evaluate a policy from several trajectories of each task: success, mean@k, pass@k, tools, repetition
    statistics  Estimates from the scores of a few runs of each arm, with their intervals (rliable's method)
"""

from flowgrpo.evaluation.metrics import (
    Evaluation,
    compute_metrics,
    mean_at_k,
    pass_at_k,
    repetition,
    success_interval,
    wilson,
)
from flowgrpo.evaluation.statistics import interval, iqm, probability_of_improvement
