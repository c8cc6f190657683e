"""Flow-GRPO and its relatives without a critic: each constructor fills in the parts of one formula.

    advantage of an outcome  x  ratio and clip  x  aggregation  +  KL

Every constructor takes the options of `Options` as keywords, besides its own settings.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array

from flowgrpo import masked
from flowgrpo.algorithms import aggregation
from flowgrpo.algorithms import loss as losses
from flowgrpo.algorithms.advantage import (
    Normalize,
    anchor_advantage,
    group_center,
    group_zscore,
    last_turns,
    leave_one_out,
    return_to_go,
    row_group_advantage,
    turn_index,
    turn_rewards,
)
from flowgrpo.algorithms.compose import Advantage, Traits, compose, outcome_advantage
from flowgrpo.algorithms.options import (
    DapoKeywords,
    OptionKeywords,
    OptionKeywordsButBeta,
    Options,
    ReleasedKeywords,
    check_clip,
    read_options,
    reward_kl,
)
from flowgrpo.contracts import Algorithm
from flowgrpo.types import Trajectories, check_range

# Advantages -------------------------------------------------------------------------------------------


def _turn_rewards_less_kl(trajectories: Trajectories, outcome_n: Array, options: Options) -> Array:
    """The reward of each turn, less its KL if KL is in the reward -> reward_nt."""
    return turn_rewards(trajectories, outcome_n) - reward_kl(trajectories, options).sum(axis=2)


# Members ----------------------------------------------------------------------------------------------


def flow_grpo(
    *, clip_low=0.2, clip_high=0.2, beta=0.001, eps=1e-6, **options: Unpack[OptionKeywordsButBeta]
) -> Algorithm:
    """Flow-GRPO as its paper writes it (Li et al., 2025): trajectory statistics, trajectory-turn-token mean.

    `options` are those of `fg.algorithms.Options`, whose docstring says what each does.
    """
    return _clipped(
        "flow_grpo",
        (clip_low, clip_high),
        {"beta": beta, **options},
        advantage=outcome_advantage(group_zscore, eps=eps),
        weights=aggregation.flow_weights,
        traits=Traits(laws="F1 F2 F4 F8"),
    )


def flow_grpo_released(
    *, clip_low=0.2, clip_high=0.3, beta=0.001, dual_clip=3.0, eps=1e-6, **options: Unpack[ReleasedKeywords]
) -> Algorithm:
    """The algorithm of AgentFlow's released code (F9): z-scores over turn rows, token mean, dual clip.

    A group whose rows are all equal, or that has one row, is 0 here; in the released code it keeps rounding noise or R.
    """
    return _clipped(
        "flow_grpo_released",
        (clip_low, clip_high),
        {"beta": beta, "dual_clip": dual_clip, **options},
        advantage=outcome_advantage(group_zscore, over=row_group_advantage, eps=eps),
        weights=aggregation.token_mean,
        traits=Traits(laws="F4 F8"),
    )


def grpo(*, clip_low=0.2, clip_high=0.2, beta=0.04, eps=1e-6, **options: Unpack[OptionKeywordsButBeta]) -> Algorithm:
    """GRPO (Shao et al., 2024, DeepSeekMath): group z-score, mean over each trajectory's tokens."""
    return _clipped(
        "grpo",
        (clip_low, clip_high),
        {"beta": beta, **options},
        advantage=outcome_advantage(group_zscore, eps=eps),
        weights=aggregation.sequence_mean,
        traits=Traits(laws="F1 F4 F8"),
    )


def dr_grpo(*, max_tokens: int, clip_low=0.2, clip_high=0.2, **options: Unpack[OptionKeywords]) -> Algorithm:
    """Dr. GRPO (Liu et al., 2025): no deviation, no length mean; divides by trajectories x `max_tokens`."""
    check_range("dr_grpo", "max_tokens", max_tokens, 1, whole=True)
    return _clipped(
        "dr_grpo",
        (clip_low, clip_high),
        options,
        advantage=outcome_advantage(group_center),
        weights=partial(aggregation.constant_length, max_tokens=max_tokens),
        traits=Traits(laws="F1 F4"),
    )


def dapo(
    *, clip_low=0.2, clip_high=0.28, dynamic_sampling=True, eps=1e-6, **options: Unpack[DapoKeywords]
) -> Algorithm:
    """DAPO (Yu et al., 2025): clip-higher, token mean, only groups of mixed correctness.

    Set `overlong` for its soft length punishment.
    """
    return _clipped(
        "dapo",
        (clip_low, clip_high),
        {"dynamic_sampling": dynamic_sampling, **options},
        advantage=outcome_advantage(group_zscore, eps=eps),
        weights=aggregation.token_mean,
        traits=Traits(laws="F1 F4 F8"),
    )


def gspo(*, clip_low=3e-4, clip_high=4e-4, eps=1e-6, **options: Unpack[OptionKeywords]) -> Algorithm:
    """GSPO (Zheng et al., 2025): one ratio for each turn's action, the exponential of its mean log-ratio."""
    return _clipped(
        "gspo",
        (clip_low, clip_high),
        options,
        advantage=outcome_advantage(group_zscore, eps=eps),
        weights=aggregation.action_mean,
        surrogate=losses.sequence_clip_surrogate,
        sequence=("trajectory", "turn"),
        traits=Traits(laws="F1 F4 F8", needs="logp_old"),
    )


def cispo(*, clip_low=1.0, clip_high=4.0, eps=1e-6, **options: Unpack[OptionKeywords]) -> Algorithm:
    """CISPO (MiniMax-M1, 2025): the clipped ratio is a weight without gradient on A log pi.

    No token is silenced. The default bounds the ratio by 5 from above and not from below.
    """
    check_clip("cispo", clip_low, clip_high)
    return compose(
        "cispo",
        advantage=outcome_advantage(group_zscore, eps=eps),
        weights=aggregation.token_mean,
        surrogate=partial(losses.weighted_logp_surrogate, clip_low=clip_low, clip_high=clip_high),
        options=read_options("cispo", options, rejects=("dual_clip",)),
        clip=(clip_low, clip_high),
        traits=Traits(laws="F1 F4 F8"),
    )


def rloo(**options: Unpack[OptionKeywords]) -> Algorithm:
    """RLOO (Ahmadian et al., 2024): leave-one-out baseline, unclipped ratio, log-probabilities summed."""
    settings = read_options("rloo", options)
    return compose(
        "rloo",
        advantage=outcome_advantage(leave_one_out),
        weights=aggregation.sequence_sum,
        surrogate=partial(losses.ratio_surrogate, dual_clip=settings.dual_clip),
        options=settings,
        traits=Traits(laws="F1 F4"),
    )


def reinforce_pp(
    *, clip_low=0.2, clip_high=0.2, gamma=1.0, baseline: Normalize | None = None, **options: Unpack[OptionKeywords]
) -> Algorithm:
    """REINFORCE++ (Hu, 2025): returns whitened over all tokens of the batch.

    `baseline=group_center` is its variant that first subtracts the group's mean.
    """
    check_range("reinforce_pp", "gamma", gamma, 0.0, 1.0)

    def advantage(trajectories, outcome_n, valid_n, options) -> Array:
        """The return of each token, less the group baseline, whitened over all tokens."""
        acted_nt = trajectories.acted & valid_n[:, None]
        chosen_ntl = trajectories.action_mask & valid_n[:, None, None]
        return_nt = return_to_go(turn_rewards(trajectories, outcome_n), acted_nt, gamma=gamma)
        if baseline is not None:
            return_nt += (baseline(outcome_n, trajectories.group, valid_n) - outcome_n)[:, None]
        kl_ntl = reward_kl(trajectories, options)
        kl_nm = kl_ntl.reshape(len(outcome_n), -1)
        later_ntl = jnp.flip(jnp.cumsum(jnp.flip(kl_nm, 1), axis=1), 1).reshape(kl_ntl.shape)
        return masked.whiten(return_nt[:, :, None] - later_ntl, chosen_ntl)

    return _clipped(
        "reinforce_pp",
        (clip_low, clip_high),
        options,
        advantage=advantage,
        weights=aggregation.token_mean,
    )


def gigpo(
    *, omega=1.0, gamma=0.95, clip_low=0.2, clip_high=0.2, beta=0.01, eps=1e-6, **options: Unpack[OptionKeywordsButBeta]
) -> Algorithm:
    """GiGPO (Feng et al., 2025): the outcome's z-score plus `omega` times a z-score by state.

    The second is that of the discounted return-to-go among turns of the group with equal anchors.
    """
    check_range("gigpo", "omega", omega, 0.0)
    check_range("gigpo", "gamma", gamma, 0.0, 1.0)
    by_outcome = outcome_advantage(group_zscore, eps=eps)

    def advantage(trajectories, outcome_n, valid_n, options) -> Array:
        episode = by_outcome(trajectories, outcome_n, valid_n, options)
        acted_nt = trajectories.acted
        reward_nt = _turn_rewards_less_kl(trajectories, outcome_n, options)
        return_nt = return_to_go(reward_nt, acted_nt, gamma=gamma)
        return episode + omega * anchor_advantage(return_nt, trajectories.anchor, acted_nt, trajectories.group, valid_n)

    return _clipped(
        "gigpo",
        (clip_low, clip_high),
        {"beta": beta, **options},
        advantage=advantage,
        weights=aggregation.token_mean,
    )


def mt_grpo(
    *, lam=1.0, clip_low=0.2, clip_high=0.2, beta=0.04, eps=1e-6, **options: Unpack[OptionKeywordsButBeta]
) -> Algorithm:
    """MT-GRPO (Zeng et al., 2025), for any number of turns: z-scores of turn rewards, by the turn's index.

        A_i^t = sum of z_l(r_i^l) over l = t .. T-1  +  lam z(r_i^T),    A_i^T = z(r_i^T)

    with z_l over the trajectories of the group whose l-th turn is not their last, and r_i^T the reward of the last
    turn: the outcome, if there is no other reward. How many means are subtracted depends on when a trajectory stops, so
    if the policy decides that, its gradient is biased: each further turn is charged the mean reward of turns at its
    index. `trloo` is not biased.
    """
    check_range("mt_grpo", "lam", lam, 0.0)
    zscore = partial(group_zscore, eps=eps)

    def advantage(trajectories, outcome_n, valid_n, options) -> Array:
        acted_nt, group_n = trajectories.acted & valid_n[:, None], trajectories.group
        last_nt = last_turns(acted_nt)
        reward_nt = _turn_rewards_less_kl(trajectories, outcome_n, options)
        step_nt = anchor_advantage(
            reward_nt, turn_index(acted_nt), acted_nt & ~last_nt, group_n, valid_n, normalize=zscore
        )
        final_n = zscore(masked.fill(reward_nt, last_nt).sum(axis=1), group_n, valid_n)
        final_nt = jnp.where(last_nt, 1.0, lam) * final_n[:, None]
        return masked.fill(return_to_go(step_nt, acted_nt, gamma=1.0) + final_nt, acted_nt)

    return _clipped(
        "mt_grpo",
        (clip_low, clip_high),
        {"beta": beta, **options},
        advantage=advantage,
        weights=aggregation.token_mean,
    )


def trloo(*, gamma=1.0, clip_low=0.2, clip_high=0.2, **options: Unpack[OptionKeywords]) -> Algorithm:
    """TRLOO (Liu et al., 2026, Dr. Kernel): each turn's return, less the mean of the others' at the same turn.

        A_i^t = G_i^t - mean of G_j^t over the other trajectories j of the group that have a turn t

    with G^t = r^t + gamma G^{t+1}. The baseline does not depend on the trajectory's own actions, whenever it stops. If
    no other trajectory of the group has a t-th turn, the advantage is 0.
    """
    check_range("trloo", "gamma", gamma, 0.0, 1.0)

    def advantage(trajectories, outcome_n, valid_n, options) -> Array:
        acted_nt = trajectories.acted
        reward_nt = _turn_rewards_less_kl(trajectories, outcome_n, options)
        return_nt = return_to_go(reward_nt, acted_nt, gamma=gamma)
        index_nt = turn_index(acted_nt)
        return anchor_advantage(return_nt, index_nt, acted_nt, trajectories.group, valid_n, normalize=leave_one_out)

    return _clipped(
        "trloo",
        (clip_low, clip_high),
        options,
        advantage=advantage,
        weights=aggregation.token_mean,
    )


def kimi(*, tau=0.1, **options: Unpack[OptionKeywords]) -> Algorithm:
    """The mirror descent of Kimi k1.5 (2025): (R - mean) sum log pi - tau/2 (sum log rho)^2 by trajectory.

    rho is taken against the iteration's start, which is the pi_old of its batch.
    """
    check_range("kimi", "tau", tau, 0.0)
    return compose(
        "kimi",
        advantage=outcome_advantage(group_center),
        weights=aggregation.sequence_sum,
        surrogate=partial(losses.mirror_surrogate, tau=tau),
        options=read_options("kimi", options, rejects=("dual_clip", "beta")),
        sequence=("trajectory",),
        traits=Traits(laws="F1 F4", needs="logp_old", skips_zero_advantage=False),
    )


def _clipped(
    name: str,
    clip: tuple,
    options: Mapping[str, Any],
    *,
    advantage: Advantage,
    weights: aggregation.Aggregation,
    surrogate: Callable[..., tuple[Array, Array]] = losses.clip_surrogate,
    sequence: tuple[str, ...] = (),
    traits: Traits = Traits(),  # noqa: B008
) -> Algorithm:
    """A member whose ratio is clipped to `1 - low .. 1 + high`: that of a token, unless `surrogate` is another."""
    low, high = clip
    check_clip(name, low, high)
    settings = read_options(name, options)
    return compose(
        name,
        advantage=advantage,
        weights=weights,
        surrogate=partial(surrogate, clip_low=low, clip_high=high, dual_clip=settings.dual_clip),
        options=settings,
        sequence=sequence,
        clip=clip,
        traits=traits,
    )
