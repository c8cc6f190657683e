"""Learn from a teacher's word on what the policy itself sampled: one number per token, and no need of a reward.

    A_i,j = log pi_teacher(a_j | its context) - log pi_old(same)

The teacher is the reference of the run, which with `sdpo` is told in hindsight what would have helped. In expectation
over what the policy samples, a step follows the gradient of KL(pi_theta || pi_teacher) of each token's distribution, in
the contexts that the policy itself comes to.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array

from flowgrpo import masked
from flowgrpo.algorithms import aggregation as weights
from flowgrpo.algorithms.advantage import group_zscore, mixed_groups, multi_turn_group_advantage
from flowgrpo.algorithms.compose import compose
from flowgrpo.algorithms.loss import ratio_surrogate, required
from flowgrpo.algorithms.options import Options, read_options
from flowgrpo.contracts import Algorithm
from flowgrpo.types import Trajectories, check_range

KL_OPTIONS = ("beta", "kl", "kl_in", "kl_weighted")  # whose reference would be the teacher


def opd(*, outcome=0.0, dead_only: bool = False, eps=1e-6, **options) -> Algorithm:
    """On-policy distillation (Agarwal et al., 2024; Lu, 2025): the reverse KL to a teacher, token by token, unclipped.

    `outcome` is the weight of Flow-GRPO's advantage beside the teacher's. With `dead_only` the teacher speaks in groups
    of equal outcomes alone, from which nothing else can be learned. The weight of a token is that of Flow-GRPO.
    """
    settings = read_options("opd", options, rejects=(*KL_OPTIONS, "reference_every"))
    return _distil("opd", outcome, dead_only, eps, settings)


def sdpo(*, outcome=0.0, dead_only: bool = False, eps=1e-6, **options) -> Algorithm:
    """Self-distillation (Hübotter et al., 2026, SDPO): as `opd`, taught by the policy itself in hindsight.

    The teacher is the reference, which is what the policy began as, or with `reference_every=1` the policy of the
    update. It reads `Trajectories.hint` before the first turn; the environment says what is in it (`Env.hindsight`).
    The paper takes the KL over all tokens of the vocabulary, and this the sampled one.
    """
    settings = read_options("sdpo", options, rejects=KL_OPTIONS)
    return _distil("sdpo", outcome, dead_only, eps, settings)._replace(hindsight=True)


def _distil(name: str, outcome, dead_only: bool, eps, settings: Options) -> Algorithm:
    check_range(name, "outcome", outcome, 0.0)

    def advantage(trajectories: Trajectories, outcome_n: Array, valid_n: Array, options: Options) -> Array:
        """Add the teacher's log-ratio of each token to the group's z-score of the outcome."""
        chosen_ntl = trajectories.actions & valid_n[:, None, None]
        said_ntl = required(trajectories.logp_ref, name, "Trajectories.logp_ref", "the teacher's advantage")
        logp_ntl = trajectories.logp_sampled if trajectories.logp_old is None else trajectories.logp_old
        taught_ntl = masked.fill(said_ntl, chosen_ntl) - masked.fill(logp_ntl, chosen_ntl)
        if dead_only:
            alive_n = mixed_groups(outcome_n, trajectories.group, valid_n)
            taught_ntl = jnp.where(alive_n[:, None, None], 0.0, taught_ntl)
        given = (outcome_n, trajectories.acted, trajectories.group, valid_n)
        credit_nt = multi_turn_group_advantage(*given, normalize=partial(group_zscore, eps=eps))
        return masked.fill(taught_ntl + outcome * credit_nt[:, :, None], chosen_ntl)

    algorithm = compose(
        name,
        advantage=advantage,
        weigh=weights.flow_weights,
        surrogate=partial(ratio_surrogate, dual_clip=settings.dual_clip),
        options=settings,
        needs="logp_ref",
    )
    return algorithm._replace(before=frozenset(("logp_ref",)))
