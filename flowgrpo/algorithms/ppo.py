"""PPO (Schulman et al., 2017) over turns: `ppo`, with `token_gae` or `turn_gae` from a critic's values.

Time runs over chosen tokens, or over turns: tool output and padding are skipped, as if they were not
there. A turn's reward falls on its last chosen token; the KL penalty, by default, on every token. A truncated
trajectory (turn limit, token limit) is bootstrapped with the critic's `last_value`; one that ended is not.
"""

from collections.abc import Callable
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo import masked
from flowgrpo.algorithms.advantage import gae, turn_rewards
from flowgrpo.algorithms.aggregation import token_mean
from flowgrpo.algorithms.compose import Traits, bind, compose
from flowgrpo.algorithms.loss import clip_surrogate, required, weighted_sums
from flowgrpo.algorithms.options import PPOKeywords, check_clip, read_options, reward_kl
from flowgrpo.contracts import Algorithm, Metrics, Scores
from flowgrpo.types import Batch, Trajectories, check_range

# (trajectories, reward_nt, kl_ntl, chosen_ntl, gamma=, lam=) -> (adv_ntl, return_ntl)
Estimator = Callable[..., tuple[Array, Array]]


def token_gae(trajectories, reward_nt, kl_ntl, chosen_ntl, *, gamma, lam) -> tuple[Array, Array]:
    """GAE from chosen token to chosen token -> (adv_ntl, return_ntl)."""
    slots = jnp.arange(chosen_ntl.shape[2])[None, None, :]
    last_nt = jnp.max(jnp.where(chosen_ntl, slots, -1), axis=2)
    reward_ntl = jnp.where(slots == last_nt[:, :, None], reward_nt[:, :, None], 0.0) - kl_ntl
    stream = [x.reshape(len(x), -1) for x in (reward_ntl, _value(trajectories, chosen_ntl), chosen_ntl)]
    results = _streams(trajectories, *stream, gamma=gamma, lam=lam)
    adv_ntl, return_ntl = (x.reshape(chosen_ntl.shape) for x in results)
    return adv_ntl, return_ntl


def turn_gae(trajectories, reward_nt, kl_ntl, chosen_ntl, *, gamma, lam) -> tuple[Array, Array]:
    """GAE from turn to turn, the value of a turn being that before its first chosen token -> the same shapes."""
    first_nt = jnp.argmax(chosen_ntl, axis=2)
    value_ntl = _value(trajectories, chosen_ntl)
    value_nt = jnp.take_along_axis(value_ntl, first_nt[:, :, None], axis=2)[:, :, 0]
    results = _streams(
        trajectories, reward_nt - kl_ntl.sum(axis=2), value_nt, chosen_ntl.any(axis=2), gamma=gamma, lam=lam
    )
    adv_ntl, return_ntl = (masked.fill(x_nt[:, :, None], chosen_ntl) for x_nt in results)
    return adv_ntl, return_ntl


def _value(trajectories: Trajectories, chosen_ntl: Array) -> Array:
    value_ntl = required(trajectories.value, "ppo", "Trajectories.value", "GAE")
    return masked.fill(value_ntl, chosen_ntl)


def _streams(trajectories: Trajectories, reward_nm, value_nm, mask_nm, *, gamma, lam) -> tuple[Array, Array]:
    """GAE over each trajectory's stream; the last step is terminal unless the trajectory was cut."""
    last_value_n = required(trajectories.last_value, "ppo", "Trajectories.last_value", "a cut trajectory")
    last_value_n = masked.fill(last_value_n, trajectories.bootstraps & mask_nm.any(axis=1))
    done_nm = jnp.zeros(mask_nm.shape, jnp.float32)

    def run(reward_m, value_m, done_m, last_value, mask_m) -> tuple[Array, Array]:
        return gae(reward_m, value_m, done_m, gamma=gamma, lam=lam, last_value=last_value, mask_t=mask_m)

    return jax.vmap(run)(reward_nm, value_nm, done_nm, last_value_n, mask_nm)


def ppo(
    *,
    estimator: Estimator = token_gae,
    gamma=1.0,
    lam=0.95,
    clip_low=0.2,
    clip_high=0.2,
    value_clip=0.2,
    value_coefficient=0.5,
    beta=0.001,
    kl_in="reward",
    **options: Unpack[PPOKeywords],
) -> Algorithm:
    """PPO with whitened GAE advantages and a clipped value loss; KL in the reward.

    Args:
        estimator: `token_gae` (GAE over tokens) or `turn_gae` (over turns).
        gamma: discount; 1, as episodes are short.
        lam: GAE's lambda.
        clip_low: lower width of the ratio's clip.
        clip_high: upper width.
        value_clip: width of the value's clip around its old value; None: no clip.
        value_coefficient: weight of the value loss.
        beta: strength of the KL term.
        kl_in: "reward" or "loss".
        options: the other fields of `Options`.
    """
    settings = read_options("ppo", {"beta": beta, "kl_in": kl_in, **options})
    check_clip("ppo", clip_low, clip_high)
    check_range("ppo", "value_clip", value_clip, 0.0, exclusive=True, optional=True)
    check_range("ppo", "value_coefficient", value_coefficient, 0.0)
    check_range("ppo", "gamma", gamma, 0.0, 1.0)
    check_range("ppo", "lam", lam, 0.0, 1.0)

    def estimates(trajectories, outcome_n, valid_n, options) -> tuple[Array, Array]:
        """The advantages, whitened over the chosen tokens, and the critic's targets -> (adv_ntl, return_ntl)."""
        chosen_ntl = trajectories.action_mask & valid_n[:, None, None]
        kl_ntl = masked.fill(reward_kl(trajectories, options), chosen_ntl)
        reward_nt = turn_rewards(trajectories, outcome_n)
        adv_ntl, return_ntl = estimator(trajectories, reward_nt, kl_ntl, chosen_ntl, gamma=gamma, lam=lam)
        return masked.whiten(adv_ntl, chosen_ntl), return_ntl

    actor = compose(
        "ppo",
        advantage=lambda *inputs: estimates(*inputs)[0],
        weights=token_mean,
        surrogate=partial(clip_surrogate, clip_low=clip_low, clip_high=clip_high, dual_clip=settings.dual_clip),
        options=settings,
        clip=(clip_low, clip_high),
        traits=Traits(needs="value", skips_zero_advantage=False),
    )
    loss = partial(actor_critic_loss, policy_loss=actor.loss, value_clip=value_clip, coefficient=value_coefficient)
    targets = bind(lambda *inputs: estimates(*inputs)[1], settings)
    return actor._replace(loss=loss, targets=targets, needs_for_advantages=actor.needs_for_advantages | {"value"})


def actor_critic_loss(scores: Scores, batch: Batch, *, policy_loss, value_clip, coefficient) -> tuple[Array, Metrics]:
    """The clipped policy loss plus `coefficient` times the clipped value loss, half the larger square."""
    loss, metrics = policy_loss(scores, batch)
    live_rs, weight_rs = batch.loss_mask, masked.fill(batch.weight, batch.loss_mask)
    value_rs = masked.fill(required(scores.value, "ppo", "Scores.value", "the value loss"), live_rs)
    old_rs = masked.fill(required(batch.value_old, "ppo", "Batch.value_old", "the value clip"), live_rs)
    target_rs = masked.fill(required(batch.target, "ppo", "Batch.target", "the value loss"), live_rs)
    near_rs = old_rs + jnp.clip(value_rs - old_rs, -value_clip, value_clip)
    square_rs = 0.5 * jnp.maximum((value_rs - target_rs) ** 2, (near_rs - target_rs) ** 2)
    values = {"value_loss": square_rs, "value": value_rs, "target": target_rs}
    metrics |= weighted_sums(values, weight_rs, live_rs)
    return loss + coefficient * masked.sum(weight_rs * square_rs, live_rs), metrics
