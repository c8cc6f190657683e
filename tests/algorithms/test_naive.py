"""Every member against plain Python loops: its loss, and its gradient by finite differences of the loops."""

import naive
import numpy as np
import pytest
from family_cases import batch_of, loss_and_slopes, make_case, members

MEMBERS = members()


@pytest.mark.parametrize("name", MEMBERS)
def test_F5_loss_and_gradient_equal_naive_loops_without_invalid_trajectories(name):
    algorithm, loop, step = MEMBERS[name], getattr(naive, name), 1e-4
    for seed in range(4):
        case = make_case(seed, by_turn=seed > 1, invalid=0.3)
        loss, gradient_ntl = loss_and_slopes(algorithm, case, batch_of(algorithm, case.trajectories))
        trajectories, expected_ntl = naive.ragged(case), np.zeros(case.logp.shape)
        assert loss == pytest.approx(loop(trajectories), rel=2e-5, abs=2e-6), f"seed {seed}"
    for i, member in enumerate(trajectories):
        for _, turn, t, j in naive.tokens([member]):
            at, values = turn["logp"][j], []
            for turn["logp"][j] in (at + step, at - step):
                values.append(loop(trajectories))
            turn["logp"][j] = at
            expected_ntl[i, t, turn["slots"][j]] = (values[0] - values[1]) / (2 * step)
    scale = np.abs(expected_ntl).max()
    assert scale > 0
    np.testing.assert_allclose(gradient_ntl, expected_ntl, atol=1e-4 * scale, rtol=1e-3)
