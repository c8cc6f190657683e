"""The family: every algorithm is *advantages* x *ratio and clip* x *aggregation* + *KL*.

`advantage`, `aggregation` and `loss` hold the shared parts, `options` what they combine with;
`policy_gradient`, `ppo`, `dpo` and `distillation` hold the constructors.

Modules:

    advantage        Advantages: from outcomes and rewards to one number per trajectory, turn or token
    aggregation      Aggregation: the weight in the loss of each token that the policy chose
    compose          `algorithm` and `compose` bind the parts of an algorithm together; a new member is one call
    distillation     On-policy distillation: a teacher's log-ratio on the policy's own samples
    dpo              DPO on trajectories (Rafailov et al., 2023): `dpo` learns from the best and the worst of each group
    loss             Losses: `token_loss` is a weighted sum over the tokens of a batch
    options          Options that all members of the family share, checked once when an algorithm is built
    policy_gradient  Flow-GRPO and its relatives without a critic: each constructor fills in the parts of one formula
    ppo              PPO (Schulman et al., 2017) over turns
"""

from flowgrpo.algorithms.advantage import (
    anchor_advantage,
    gae,
    group_center,
    group_zscore,
    leave_one_out,
    mixed_groups,
    multi_turn_group_advantage,
    return_to_go,
    turn_index,
)
from flowgrpo.algorithms.aggregation import (
    action_mean,
    constant_length,
    exclude_versions_before,
    flow_weights,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from flowgrpo.algorithms.compose import (
    Traits,
    algorithm,
    compose,
    last_turn_only,
    newest_segment_only,
    outcome_advantage,
)
from flowgrpo.algorithms.distillation import opd, sdpo
from flowgrpo.algorithms.dpo import Pairs, dpo, dpo_pairs
from flowgrpo.algorithms.loss import (
    clip,
    clip_surrogate,
    mirror_surrogate,
    ratio_surrogate,
    sequence_clip_surrogate,
    weighted_logp_surrogate,
)
from flowgrpo.algorithms.options import Correction, Options, Overlong, kl_estimate, overlong_penalty
from flowgrpo.algorithms.policy_gradient import (
    cispo,
    dapo,
    dr_grpo,
    flow_grpo,
    flow_grpo_released,
    gigpo,
    grpo,
    gspo,
    kimi,
    mt_grpo,
    reinforce_pp,
    rloo,
    trloo,
)
from flowgrpo.algorithms.ppo import ppo, token_gae, turn_gae
