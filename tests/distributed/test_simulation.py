"""Clusters in virtual time: worked numbers, bounds, and an order of the schedules."""

import numpy as np
import pytest

from flowgrpo.distributed import schedule
from flowgrpo.distributed.simulation import Costs, simulate


def costs(length=lambda _: np.array([10]), **more) -> Costs:
    settings = {"token_seconds": 1.0, "judge_seconds": lambda _: 2.0, "train_seconds": 5.0, **more}
    return Costs(lengths=length, **settings)


def uneven(rng: np.random.Generator) -> np.ndarray:
    return np.maximum(rng.lognormal(4.0, 1.0, 4), 1).astype(int)


def test_a_synchronous_run_of_one_worker_by_hand():
    result = simulate(schedule.synchronous(2, 3), costs(), workers=1)
    # Two groups of 10 s one after another, the last one's reward, the update.
    assert result.seconds == pytest.approx(3 * (10 + 10 + 2 + 5))
    assert result.rollout_utilization == pytest.approx(20 / 27)
    assert result.training == pytest.approx(5 / 27)
    assert (result.staleness, result.max_staleness, result.reused) == (0, 0, 0)


def test_one_step_off_hides_the_update():
    result = simulate(schedule.one_step_off(2, 6), costs(), workers=2, judges=2)
    # After the first both roll out all the time: 10 s an iteration, and 7 s after the last.
    assert result.seconds == pytest.approx(6 * 10 + 2 + 5)
    assert result.iteration_seconds == pytest.approx(10)


def test_partial_rollouts_are_cut_at_the_budget():
    plan = schedule.partial_rollouts(1, 2, budget=6, staleness=3, spare=0)
    result = simulate(plan, costs(), workers=1)
    assert result.seconds == pytest.approx(2 * (6 + 4 + 2 + 5))
    assert result.reused == pytest.approx(0.6)


def test_a_budget_bounds_an_iteration_at_the_price_of_staleness():
    uneven_costs = costs(uneven)
    sync = simulate(schedule.synchronous(16, 20), uneven_costs, workers=16)
    partial = simulate(schedule.partial_rollouts(16, 20, budget=150, staleness=6, spare=16), uneven_costs, workers=16)
    free = simulate(schedule.asynchronous(16, 20, staleness=4), uneven_costs, workers=16)
    assert sync.iteration_seconds > sync.longest_seconds
    assert partial.iteration_seconds < 0.75 * sync.iteration_seconds
    assert free.seconds < sync.seconds
    assert 0 < free.max_staleness <= 4
    assert 0 < partial.max_staleness <= 6
    assert 0 < partial.reused < 1


def test_a_slow_master_delays_all_workers():
    fast = simulate(schedule.synchronous(64, 3), costs(), workers=64, judges=64)
    slow = simulate(schedule.synchronous(64, 3), costs(master_seconds=0.5), workers=64, judges=64)
    assert slow.seconds > 1.5 * fast.seconds
    assert slow.master > 0.5


def test_the_same_seed_gives_the_same_run():
    plan = schedule.asynchronous(8, 6)
    first, second = (simulate(plan, costs(uneven), workers=8, seed=3) for _ in range(2))
    assert first == second
    assert first != simulate(plan, costs(uneven), workers=8, seed=4)
