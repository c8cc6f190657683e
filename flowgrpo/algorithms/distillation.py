"""On-policy distillation: a teacher's log-ratio on the policy's own samples, one number per token; no reward needed.

    A_i,j = log pi_teacher(a_j | context) - log pi_old(a_j | context)

The teacher is the reference of the run; with `sdpo` it also reads, in hindsight, what would have helped. In expectation
over the policy's samples, a step follows the gradient of KL(pi_theta || pi_teacher) of each token's distribution, in
the contexts that the policy itself reaches.
"""

from functools import partial
from typing import Unpack

import jax.numpy as jnp
from jax import Array

from flowgrpo import masked
from flowgrpo.algorithms.advantage import group_zscore, mixed_groups, multi_turn_group_advantage
from flowgrpo.algorithms.aggregation import flow_weights
from flowgrpo.algorithms.compose import Traits, compose
from flowgrpo.algorithms.loss import ratio_surrogate, required
from flowgrpo.algorithms.options import OptionKeywords, Options, read_options
from flowgrpo.contracts import Algorithm
from flowgrpo.types import Trajectories, check_range

KL_OPTIONS = ("beta", "kl", "kl_in", "kl_weighted")  # whose reference would be the teacher


def opd(*, outcome=0.0, dead_only: bool = False, eps=1e-6, **options: Unpack[OptionKeywords]) -> Algorithm:
    """On-policy distillation (Agarwal et al., 2024; Lu, 2025): the reverse KL to a teacher, token by token, unclipped.

    `outcome` is the weight of Flow-GRPO's advantage, added to the teacher's. With `dead_only` the teacher's part is
    used only in groups of equal outcomes, which have no other signal. Tokens are weighted as in Flow-GRPO.
    """
    settings = read_options("opd", options, rejects=(*KL_OPTIONS, "reference_every"))
    return _distil("opd", outcome, dead_only, eps, settings)


def sdpo(*, outcome=0.0, dead_only: bool = False, eps=1e-6, **options: Unpack[OptionKeywords]) -> Algorithm:
    """Self-distillation (Hübotter et al., 2026, SDPO): as `opd`, taught by the policy itself in hindsight.

    The teacher is the reference: the initial policy, or with `reference_every=1` the policy of the update. It reads
    `Trajectories.hint` before the first turn, which the environment writes (`Env.hindsight`). The paper takes the KL
    over the whole vocabulary, this implementation on the sampled token.
    """
    settings = read_options("sdpo", options, rejects=KL_OPTIONS)
    return _distil("sdpo", outcome, dead_only, eps, settings)._replace(hindsight=True)


def _distil(name: str, outcome, dead_only: bool, eps, settings: Options) -> Algorithm:
    check_range(name, "outcome", outcome, 0.0)

    def advantage(trajectories: Trajectories, outcome_n: Array, valid_n: Array, options: Options) -> Array:
        """The teacher's log-ratio of each token plus the group's z-score of the outcome -> adv_ntl."""
        chosen_ntl = trajectories.action_mask & valid_n[:, None, None]
        teacher_ntl = required(trajectories.logp_ref, name, "Trajectories.logp_ref", "the teacher's advantage")
        logp_ntl = trajectories.logp_sampled if trajectories.logp_old is None else trajectories.logp_old
        log_ratio_ntl = masked.fill(teacher_ntl, chosen_ntl) - masked.fill(logp_ntl, chosen_ntl)
        if dead_only:
            mixed_n = mixed_groups(outcome_n, trajectories.group, valid_n)
            log_ratio_ntl = jnp.where(mixed_n[:, None, None], 0.0, log_ratio_ntl)
        zscore_nt = multi_turn_group_advantage(
            outcome_n, trajectories.acted, trajectories.group, valid_n, normalize=partial(group_zscore, eps=eps)
        )
        return masked.fill(log_ratio_ntl + outcome * zscore_nt[:, :, None], chosen_ntl)

    algorithm = compose(
        name,
        advantage=advantage,
        weights=flow_weights,
        surrogate=partial(ratio_surrogate, dual_clip=settings.dual_clip),
        options=settings,
        traits=Traits(needs="logp_ref"),
    )
    return algorithm._replace(needs_for_advantages=frozenset(("logp_ref",)))
