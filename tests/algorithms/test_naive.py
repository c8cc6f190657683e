"""Every member against plain Python loops: its loss, and its gradient by finite differences of the loops."""

import naive
import numpy as np
import pytest
from cases import batch_of, loss_and_slopes, make_case, members

MEMBERS = members()
STEP = 1e-4


@pytest.mark.parametrize("name", MEMBERS)
def test_F5_the_loss_equals_naive_loops_that_drop_what_is_invalid_first(name):
    algorithm = MEMBERS[name]
    for seed, by_turn in ((0, False), (1, False), (2, True), (3, True)):
        case = make_case(seed, by_turn=by_turn, invalid=0.3)
        found, _ = loss_and_slopes(algorithm, case, batch_of(algorithm, case.trajectories))
        expected = getattr(naive, name)(naive.ragged(case))
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-6), f"seed {seed}"


@pytest.mark.parametrize("name", MEMBERS)
def test_the_gradient_equals_finite_differences_of_naive_loops(name):
    algorithm, case = MEMBERS[name], make_case(7)
    _, gradient_ntl = loss_and_slopes(algorithm, case, batch_of(algorithm, case.trajectories))
    trajectories, expected_ntl = naive.ragged(case), np.zeros(case.logp.shape)
    for i, member in enumerate(trajectories):
        for _, turn, t, j in naive.tokens([member]):
            at, values = turn["logp"][j], []
            for turn["logp"][j] in (at + STEP, at - STEP):
                values.append(getattr(naive, name)(trajectories))
            turn["logp"][j] = at
            expected_ntl[i, t, turn["slots"][j]] = (values[0] - values[1]) / (2 * STEP)
    scale = np.abs(expected_ntl).max()
    assert scale > 0
    np.testing.assert_allclose(gradient_ntl, expected_ntl, atol=1e-4 * scale, rtol=1e-3)
