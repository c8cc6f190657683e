"""Evaluation: worked numbers, plain loops, and identities between its figures."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flowgrpo.evaluation.metrics import (
    compute_metrics,
    effective_samples,
    mean_at_k,
    pass_at_k,
    success_interval,
    wilson,
)
from flowgrpo.types import BadInput

SHAPES = array_shapes(min_dims=2, max_dims=2, max_side=6)
WRONG = np.zeros((2, 3), bool)
PAIRS = SHAPES.flatmap(lambda shape: st.tuples(arrays(bool, shape), arrays(bool, shape)))


def naive_pass_at_k(correct: list[list[bool]], valid: list[list[bool]], k: int) -> float | None:
    """Every choice of k valid samples, one by one."""
    rows = [itertools.compress(row, keep) for row, keep in zip(correct, valid, strict=True)]
    tasks = [[any(choice) for choice in itertools.combinations(row, k)] for row in rows]
    shares = [sum(choices) / len(choices) for choices in tasks if choices]
    return sum(shares) / len(shares) if shares else None


@given(PAIRS, st.integers(1, 6))
def test_pass_at_k_is_the_fraction_of_all_subsets(pair, k):
    correct_gn, valid_gn = pair
    expected = naive_pass_at_k(correct_gn.tolist(), valid_gn.tolist(), k)
    got = pass_at_k(correct_gn, k, valid_gn)
    assert got is None if expected is None else got == pytest.approx(expected, abs=1e-12)


def test_worked_numbers():
    """2 of 4 right, and none of 4: pass@2 is 1 - C(2,2)/C(4,2) = 5/6, and 0."""
    correct_gn = np.array([[1, 1, 0, 0], [0, 0, 0, 0]], bool)
    assert mean_at_k(correct_gn) == 0.25
    assert [pass_at_k(correct_gn, k) for k in (1, 2, 3)] == pytest.approx([0.25, 5 / 12, 0.5])
    assert pass_at_k(correct_gn, 5) is None
    large_gn = np.arange(5000)[None] < 3  # whose binomials overflow
    expected = 1 - math.comb(4997, 1000) / math.comb(5000, 1000)
    assert pass_at_k(large_gn, 1000) == pytest.approx(expected, rel=1e-9)
    # From tables: 8 of 10, and 0 of 10.
    assert wilson(0.8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)


@given(SHAPES.flatmap(lambda shape: arrays(bool, shape)))
def test_pass_at_1_is_mean_at_k_and_pass_at_k_grows(correct_gn):
    passed = [pass_at_k(correct_gn, k) for k in range(1, correct_gn.shape[1] + 1)]
    assert (passed[0], passed[-1]) == pytest.approx((mean_at_k(correct_gn), correct_gn.any(axis=1).mean()), abs=1e-12)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(passed))


@given(st.integers(0, 40), st.integers(1, 40))
def test_wilson_inverts_the_score_test(right, count):
    """At each end q, |p - q| is z standard errors under q; and the interval mirrors."""
    right = min(right, count)
    rate = right / count
    low, high = wilson(rate, count)
    assert 0 <= low <= rate <= high <= 1
    for end in {low, high} - {0.0, 1.0}:
        assert abs(rate - end) / math.sqrt(end * (1 - end) / count) == pytest.approx(1.959963985, rel=1e-6)
    assert wilson(1 - rate, count) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_the_interval_uses_the_effective_number_of_samples():
    one_gn = np.array([[True]] * 30 + [[False]] * 70)
    assert success_interval(one_gn) == wilson(0.3, 100)
    assert success_interval(np.repeat(one_gn, 8, axis=1)) == pytest.approx(wilson(0.3, 100))  # copies
    rng = np.random.default_rng(0)
    mixed_gn = rng.random((400, 8)) < 0.3  # all tasks alike: every sample counts
    assert effective_samples(mixed_gn.mean(axis=1), np.full(400, 8)) > 0.8 * 3200


def test_the_interval_covers_the_truth_if_tasks_differ():
    """Tasks of Beta(1, 1) difficulty, 40 of 8 samples: 95 % or so, and less where all samples are counted."""
    rng = np.random.default_rng(1)
    drawn = [rng.random((40, 8)) < rng.random((40, 1)) for _ in range(400)]
    ours = [success_interval(correct_gn) for correct_gn in drawn]
    naive = [wilson(correct_gn.mean(), correct_gn.size) for correct_gn in drawn]
    covered, too_few = (np.mean([low <= 0.5 <= high for low, high in bounds]) for bounds in (ours, naive))
    assert 0.92 <= covered <= 0.98
    assert too_few < 0.85
    for correct_gn, (low, high) in zip(drawn, ours, strict=True):
        assert 0 <= low <= mean_at_k(correct_gn) <= high <= 1


def test_F5_invalid_trajectories_are_excluded_and_counted():
    correct_gn = np.array([[1, 0], [1, 1], [0, 0]], bool)
    valid_gn = np.array([[1, 1], [1, 0], [0, 0]], bool)
    turns_gn = np.array([[2, 4], [3, 100], [100, 100]])
    errors_gn = np.array([[0, 3], [0, 50], [100, 1]])
    tool_gnt = np.full((3, 2, 3), 2)
    tool_gnt[0, 0], tool_gnt[0, 1], tool_gnt[1, 0] = (0, 1, -1), (0, 0, -1), (-1, -1, -1)
    settings = {"valid_gn": valid_gn, "tools": ("add", "sub", "mul"), "ks": (1, 2, 3)}
    found = compute_metrics(correct_gn, turns_gn, errors_gn, tool_gnt, **settings)
    assert (found.success, found.tasks, found.samples, found.invalid) == (0.75, 2, 3, 3)
    assert found.pass_at_k == {1: 0.75, 2: 1.0, 3: None}
    assert (found.turns, found.tool_errors) == (3.0, 3 / 9)
    assert found.tools == {"add": 0.75, "sub": 0.25, "mul": 0.0}
    names = "success success_low success_high tasks samples invalid turns tool_errors tools pass@1 pass@2"
    assert list(found.metrics()) == names.split()


def test_metrics_without_input_are_none():
    figures = compute_metrics(np.ones((2, 1), bool)).metrics()
    assert list(figures) == ["success", "success_low", "success_high", "tasks", "samples", "invalid", "pass@1"]
    zeros = np.zeros((1, 1))
    nothing = compute_metrics(np.ones((1, 1), bool), zeros, zeros, np.full((1, 1, 1), -1), tools=("add",))
    assert (nothing.tool_errors, nothing.tools) == (0.0, {"add": 0.0})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (partial(compute_metrics, WRONG, valid_gn=WRONG), "no trajectory has a valid outcome"),
        (partial(compute_metrics, WRONG, turns_gn=np.zeros((2, 2))), "turns_gn has 2 on axis n, but correct_gn has 3"),
        (partial(compute_metrics, WRONG, ~WRONG * 1, ~WRONG * 2), "errors_gn counts 12 turns, but turns_gn only 6"),
        (
            partial(compute_metrics, WRONG, tool_gnt=np.ones((2, 3, 1), int), tools=("add",)),
            "tool 1 was called, but tools",
        ),
        (partial(compute_metrics, WRONG, ks=(0,)), "k=0 must be at least 1"),
        (partial(wilson, 1.5, 3), r"rate=1.5 of count=3"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(BadInput, match=words):
        call()
