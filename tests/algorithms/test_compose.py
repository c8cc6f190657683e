"""An algorithm from an advantage function: the numbers of the members made of the same parts, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import batch_of, loss_and_slopes, make_case, metrics_of

import flowgrpo as fg


def assert_equal_algorithms(mine: fg.Algorithm, theirs: fg.Algorithm) -> None:
    """Equal advantages, weights, loss, gradient and metrics, to the bit."""
    case = make_case(5)
    np.testing.assert_array_equal(mine.advantages(case.trajectories), theirs.advantages(case.trajectories))
    batch = batch_of(theirs, case.trajectories)
    for found, expected in zip(loss_and_slopes(mine, case, batch), loss_and_slopes(theirs, case, batch), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert metrics_of(mine, case, batch) == metrics_of(theirs, case, batch)


def test_an_advantage_function_with_the_parts_of_a_member_is_that_member():
    def flow_grpo(outcome_n, group_n, valid_n, eps=1e-6):
        return fg.group_zscore(outcome_n, group_n, valid_n, eps=eps)

    @fg.algorithm(surrogate=fg.clip(0.2, 0.28), weights=fg.algorithms.token_mean, beta=0.01, dual_clip=3.0)
    def dapo(outcome_n, group_n, valid_n):
        return fg.group_zscore(outcome_n, group_n, valid_n)

    assert (dapo.name, dapo.needs) == ("dapo", {"logp_ref"})
    assert_equal_algorithms(fg.algorithm(flow_grpo), fg.flow_grpo(beta=0.0))
    assert_equal_algorithms(dapo, fg.algorithms.dapo(beta=0.01, dual_clip=3.0, dynamic_sampling=False))


def test_an_advantage_of_trajectories_sees_what_the_options_made_of_them():
    """Outcomes less the penalty on length, and as valid only who takes part under dynamic sampling."""
    options = {"dynamic_sampling": True, "overlong": fg.algorithms.Overlong(20, 10), "correction": None}

    @fg.algorithm(**options)
    def mine(trajectories):
        adv_n = fg.group_zscore(trajectories.outcome, trajectories.group, trajectories.valid)
        return jnp.where(trajectories.turns, adv_n[:, None], 0.0)

    assert_equal_algorithms(mine, fg.flow_grpo(beta=0.0, **options))


def test_an_advantage_of_tokens_is_masked():
    @fg.algorithm
    def everywhere(trajectories):
        return jnp.ones(trajectories.tokens.shape)

    trajectories = make_case(3).trajectories
    expected_ntl = trajectories.action_mask & trajectories.valid[:, None, None]
    assert not trajectories.valid.all()
    np.testing.assert_array_equal(everywhere.advantages(trajectories), expected_ntl.astype(np.float32))


def test_rows_are_skipped_only_where_a_zero_advantage_has_no_gradient():
    def centred(outcome_n, group_n, valid_n):
        return fg.group_center(outcome_n, group_n, valid_n)

    mirror = fg.algorithm(surrogate=lambda tokens: fg.algorithms.mirror_surrogate(tokens, tau=1.0))
    assert fg.algorithm(centred).skips_zero_advantage
    assert not fg.algorithm(beta=0.1)(centred).skips_zero_advantage
    assert not mirror(centred).skips_zero_advantage


def test_what_is_no_algorithm_is_refused_in_one_sentence():
    def two(outcome_n, group_n):
        return outcome_n - group_n

    def scalar(outcome_n, group_n, valid_n):
        return fg.group_center(outcome_n, group_n, valid_n).sum()

    def plain(tokens):
        return tokens.logp * tokens.advantage, tokens.logp

    with pytest.raises(
        fg.BadInput, match=r"two\(outcome_n, group_n\) is no advantage function: it must be \(outcome_n"
    ):
        fg.algorithm(two)
    with pytest.raises(fg.BadInput, match=r"'flow_grpo' is no function: decorate a function \(outcome_n"):
        fg.algorithm("flow_grpo")  # type: ignore[call-overload]
    with pytest.raises(fg.BadInput, match=r"scalar returns an advantage of shape \(\), but it must be \(12,\)"):
        fg.algorithm(scalar).advantages(make_case(3).trajectories)
    with pytest.raises(fg.BadInput, match="scalar can't honour dual_clip"):
        fg.algorithm(surrogate=plain, dual_clip=3.0)(scalar)
    with pytest.raises(fg.BadInput, match=r"clip: clip_low is 1\.5"):
        fg.clip(1.5)
    with pytest.raises(fg.BadInput, match="bta"):
        fg.algorithm(bta=0.1)(scalar)  # type: ignore[call-overload]
