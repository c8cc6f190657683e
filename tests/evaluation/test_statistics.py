"""Interquartile means, intervals, probability of improvement: worked numbers, plain loops, identities, bad input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flowgrpo.evaluation.statistics import interval, iqm, probability_of_improvement
from flowgrpo.types import BadInput

SCORES = arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 3)), elements=st.floats(0, 1, width=32))


def test_iqm_is_the_mean_of_the_middle_half():
    assert iqm(np.array([0.0, 1.0, 2.0, 9.0])) == 1.5
    assert iqm(np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 100.0]])) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert iqm(np.array([1.0, 2.0, 6.0])) == 3.0  # of three, none can be left out
    assert iqm(np.full((7, 3), 0.25)) == 0.25


@given(SCORES, st.integers(0, 9))
def test_probability_of_improvement_equals_a_plain_loop(scores, seed):
    other = np.random.default_rng(seed).choice(scores.ravel(), size=(5, scores.shape[1]))
    wins = [(a > b) + 0.5 * (a == b) for e in range(scores.shape[1]) for a in scores[:, e] for b in other[:, e]]
    assert probability_of_improvement(scores, other) == pytest.approx(np.mean(wins))
    assert probability_of_improvement(other, scores) == pytest.approx(1 - np.mean(wins))


def test_intervals_are_reproducible_and_shrink_with_more_runs():
    draw = np.random.default_rng(0)
    few, many = draw.normal(0.5, 0.1, 8), draw.normal(0.5, 0.1, 128)
    assert interval(iqm, few) == interval(iqm, few)
    (low, high), (lower, higher) = interval(iqm, few), interval(iqm, many)
    assert low < iqm(few) < high
    assert higher - lower < (high - low) / 2
    assert interval(iqm, np.full(6, 0.7)) == (0.7, 0.7)


def test_intervals_have_their_nominal_coverage():
    draw = np.random.default_rng(1)
    bounds = [interval(iqm, draw.normal(0.5, 0.1, 16), resamples=200) for _ in range(100)]
    assert 0.86 <= np.mean([low <= 0.5 <= high for low, high in bounds]) <= 0.99


def test_bootstrap_resamples_within_an_environment():
    apart = np.stack([np.zeros(6), np.ones(6)], axis=1)  # no draw can mix the two
    assert interval(iqm, apart) == (0.5, 0.5)
    assert interval(probability_of_improvement, apart, apart) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: iqm(np.array([])), "must be finite numbers"),
        (lambda: iqm(np.array([0.5, np.nan])), "must be finite numbers"),
        (lambda: interval(iqm, np.ones(3), level=1.0), "level=1.0"),
        (lambda: probability_of_improvement(np.ones((2, 1)), np.ones((2, 2))), "1 environments against 2"),
    ],
)
def test_bad_scores_are_named(call, says):
    with pytest.raises(BadInput, match=says):
        call()
