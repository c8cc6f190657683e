"""The loop: split or fused, the same numbers; fresh tasks in each update; groups with a signal first; controls."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_env import tiny_env

import flowgrpo as fg
from flowgrpo.learner.critic import copied_trunk, partition_optimizer, separate_network, shared_trunk, with_critic
from flowgrpo.learner.state import adamw
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.critic import make_critic
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.trainable import actor_params
from flowgrpo.rollout.compiled import shuffled_rewards, trajectory_metrics
from flowgrpo.rollout.exams import make_evaluation_rollout
from flowgrpo.training.iteration import Rollout, train_loop
from flowgrpo.training.pure_env import fused_step, make_stages, split_step, train_many
from flowgrpo.training.session import train_line
from flowgrpo.training.stages import IterationSettings, TrainState, init_train_state

pytestmark = pytest.mark.slow

ENV = tiny_env(rounds=1)  # a random policy solves some
CONFIG = DecoderConfig(
    v=len(ENV.vocabulary), d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),), init_scale=0.3
)
POLICY = make_policy(CONFIG)
ALGORITHM = fg.flow_grpo(beta=0.05)
OPTIMIZER = adamw(0.01)
SIZES = IterationSettings(queries=4, samples=4, micro_rows=8)
PPO = fg.ppo(beta=0.05)  # with KL in the reward
CRITICS = {
    "own": separate_network(POLICY, make_critic(CONFIG), init=copied_trunk(CONFIG)),
    "shared": shared_trunk(POLICY, CONFIG),
}
BOTH = partition_optimizer(OPTIMIZER, adamw(0.03))


@cache
def stages_of(algorithm=ALGORITHM, sizes=SIZES):
    return make_stages(ENV, POLICY, algorithm, OPTIMIZER, sizes)


@cache
def fused(algorithm=ALGORITHM, sizes=SIZES):
    return jax.jit(fused_step(stages_of(algorithm, sizes)))


def start(seed: int = 0) -> TrainState:
    return init_train_state(POLICY.init(jax.random.key(seed)), OPTIMIZER, jax.random.key(100 + seed))


def assert_close(one, two, **tolerance):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


@pytest.fixture(scope="module")
def fused_updates():
    """Three updates by one program, which is traced once: states and their metrics."""
    states = list(train_loop(fused(), start(), 3))
    assert fused()._cache_size() == 1
    return states


@pytest.mark.parametrize("policy", [POLICY, POLICY._replace(hidden_tree=None)], ids=["trees", "rows"])
def test_F10_split_step_equals_fused_step(fused_updates, policy):
    """Whether or not shared prefixes are computed once."""
    step = split_step(make_stages(ENV, policy, ALGORITHM, OPTIMIZER, SIZES))
    for (state, metrics), (other_state, other_metrics) in zip(fused_updates, train_loop(step, start(), 3), strict=True):
        assert_close(state.learner.params, other_state.learner.params, atol=2e-5)
        for name in ("success", "turns", "tokens", "tool_calls", "tool_errors", "mixed_groups", "zero_signal_groups"):
            assert metrics[name] == other_metrics[name], name
        assert metrics["loss"] == pytest.approx(other_metrics["loss"], abs=1e-5)
        assert (other_metrics["computed_tokens"] < other_metrics["context_tokens"]) == (policy is POLICY)


def test_F7_ratios_are_one_in_the_first_gradient_step(fused_updates):
    assert all(metrics["log_ratio_max"] < 5e-5 for _, metrics in fused_updates)


def test_updates_are_numbered_and_draw_fresh_tasks(fused_updates):
    assert [metrics["update"] for _, metrics in fused_updates] == [1, 2, 3]
    play = jax.jit(stages_of().rollout)
    first, again, second = play(start()), play(start()), play(start().replace(update=jnp.int32(1)))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (np.asarray(first.tokens) != np.asarray(second.tokens)).any()


def test_training_resumes_from_a_saved_state_bit_for_bit(fused_updates):
    (state, _), (expected, _) = fused_updates[0], fused_updates[2]
    *_, (other, _) = train_loop(fused(), state, 3)
    for x, y in zip(jax.tree.leaves(other.learner.params), jax.tree.leaves(expected.learner.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_vmapped_seeds_learn_as_they_do_alone(fused_updates):
    after, metrics = train_many(fused_step(stages_of()), [start(0), start(1)], 3)
    assert_close(jax.tree.map(lambda x: x[0], after.learner.params), fused_updates[2][0].learner.params, atol=1e-4)
    *_, (alone, _) = train_loop(fused(), start(1), 3)
    assert_close(jax.tree.map(lambda x: x[1], after.learner.params), alone.learner.params, atol=1e-4)
    assert metrics["success"].shape == (2, 3)


def test_oversampling_keeps_groups_with_a_signal():
    sizes = IterationSettings(queries=2, samples=4, oversample=4, micro_rows=8)
    stages = stages_of(ALGORITHM, sizes)
    trajectories = jax.jit(stages.rollout)(start())
    assert len(trajectories.group) == 32
    adv, weights, _ = stages.update.compute_advantages(trajectories)
    whole = np.asarray(ALGORITHM.advantages(trajectories)).reshape(8, -1)
    taken_g = np.asarray(weights).reshape(8, -1).any(axis=1)
    signal_g = (whole != 0).any(axis=1)
    assert taken_g.sum() == 2
    assert signal_g[taken_g].sum() == min(2, signal_g.sum()) > 0
    np.testing.assert_allclose(np.asarray(weights).sum(), 1.0, atol=1e-6)
    np.testing.assert_allclose(np.asarray(adv).reshape(8, -1)[taken_g], whole[taken_g], atol=1e-6)


def test_reference_is_replaced_every_reference_every_updates():
    algorithm = fg.flow_grpo(beta=0.05, reference_every=2)
    states = [state for state, _ in train_loop(fused(algorithm), start(), 3)]
    assert_close(states[0].reference, start().reference, atol=0)
    assert_close(states[1].reference, states[1].learner.params, atol=0)
    assert_close(states[2].reference, states[1].learner.params, atol=0)


def test_shuffled_rewards_stay_in_their_group():
    trajectories = jax.jit(stages_of().rollout)(start())
    outcome_n = jnp.arange(16.0)
    shuffled = shuffled_rewards(trajectories.replace(outcome=outcome_n), jax.random.key(0), samples=4)
    order = np.asarray(shuffled.outcome).reshape(4, 4)
    np.testing.assert_array_equal(np.sort(order, axis=1), np.asarray(outcome_n).reshape(4, 4))
    assert (order != np.asarray(outcome_n).reshape(4, 4)).any()
    np.testing.assert_array_equal(shuffled.tokens, trajectories.tokens)


def test_evaluation_is_determined_by_its_key():
    exam = jax.jit(make_evaluation_rollout(ENV, POLICY, "test", tasks=6, samples=2))
    params = POLICY.init(jax.random.key(0))
    one, two, other = (exam(params, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.tokens, two.tokens)
    assert (np.asarray(one.tokens) != np.asarray(other.tokens)).any()
    np.testing.assert_array_equal(one.group, np.repeat(np.arange(6), 2))


@pytest.mark.parametrize("name", ["queries", "samples", "oversample", "micro_rows"])
def test_settings_are_checked(name):
    with pytest.raises(fg.BadInput, match=f"{name} is 0"):
        IterationSettings(**{name: 0})


def test_algorithm_with_targets_needs_a_critic():
    with pytest.raises(fg.BadInput, match="ppo needs a critic"):
        make_stages(ENV, POLICY, fg.ppo(), OPTIMIZER, SIZES)


def test_gigpo_needs_an_anchor():
    env = ENV._replace(anchor=fg.Env._field_defaults["anchor"])
    with pytest.raises(fg.BadInput, match="tiny has no anchor"):
        make_stages(env, POLICY, fg.algorithms.gigpo(), OPTIMIZER, SIZES)


def test_self_distillation_needs_hindsight():
    with pytest.raises(fg.BadInput, match=r"tiny has none: give it Env\.hindsight"):
        make_stages(ENV, POLICY, fg.algorithms.sdpo(), OPTIMIZER, SIZES)


def test_dpo_refuses_mini_batches_that_split_groups():
    with pytest.raises(fg.BadInput, match=r"dpo .* set mini_batches to 1"):
        make_stages(ENV, POLICY, fg.dpo(), OPTIMIZER, IterationSettings(mini_batches=2))


# With a critic ------------------------------------------------------------------------------------------


def start_both(kind: str, seed: int = 0) -> TrainState:
    params = with_critic(CRITICS[kind], jax.random.key(seed), POLICY.init(jax.random.key(seed)))
    return init_train_state(params, BOTH, jax.random.key(100 + seed))


@cache
def with_values(kind: str, algorithm=PPO, sizes=SIZES):
    return make_stages(ENV, POLICY, algorithm, BOTH, sizes, critic=CRITICS[kind])


@pytest.fixture(scope="module")
def ppo_fused_updates():
    """Three updates of PPO by one program."""
    return list(train_loop(jax.jit(fused_step(with_values("own"))), start_both("own"), 3))


def test_ppo_split_step_equals_fused_step(ppo_fused_updates):
    step = split_step(with_values("own"))
    for (state, metrics), (other_state, other_metrics) in zip(
        ppo_fused_updates, train_loop(step, start_both("own"), 3), strict=True
    ):
        assert_close(state.learner.params, other_state.learner.params, atol=2e-5)
        assert metrics["success"] == other_metrics["success"]
        for name in ("loss", "value_loss", "explained_variance", "target"):
            assert metrics[name] == pytest.approx(other_metrics[name], abs=1e-4), name


def test_ppo_trains_actor_and_critic_with_a_reference_without_critic(ppo_fused_updates):
    first, last = start_both("own"), ppo_fused_updates[2][0]
    for one, two in zip(first.learner.params, last.learner.params, strict=True):
        assert max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True)) > 1e-3
    assert last.reference.critic is None
    assert_close(last.reference.policy, actor_params(first.learner.params), atol=0)
    assert all(metrics["log_ratio_max"] < 5e-5 for _, metrics in ppo_fused_updates)  # F7


def test_kl_in_reward_is_zero_on_the_reference_and_not_elsewhere():
    """The advantages of trajectories scored under another reference differ; under the policy itself nothing is paid."""
    stages, state = stages_of(fg.algorithms.rloo(beta=0.05, kl_in="reward")), start()
    rollout = jax.jit(stages.rollout)(state)
    own = stages.update.score_trajectories(state, rollout)
    actions = np.asarray(rollout.action_mask)
    np.testing.assert_allclose(np.asarray(own.logp_ref)[actions], np.asarray(rollout.logp_sampled)[actions], atol=5e-5)
    other = state.replace(reference=POLICY.init(jax.random.key(9)))
    far = stages.update.score_trajectories(other, rollout)
    assert (
        np.abs(
            np.asarray(stages.update.compute_advantages(far).adv)
            - np.asarray(stages.update.compute_advantages(own).adv)
        ).max()
        > 0.01
    )


def test_critic_on_a_shared_trunk_learns_values():
    """With returns as targets (lam = 1): every value starts at zero, and their mean comes to that of the returns."""
    algorithm = fg.ppo(beta=0.0, lam=1.0)
    step = split_step(with_values("shared", algorithm))
    history = [metrics for _, metrics in train_loop(step, start_both("shared"), 12)]
    assert history[0]["value"] == pytest.approx(0.0, abs=1e-6)
    value, target = (np.mean([metrics[name] for metrics in history[6:]]) for name in ("value", "target"))
    assert value == pytest.approx(target, rel=0.3)
    assert target > 0.1


def test_ppo_takes_mini_batches_and_epochs():
    sizes = IterationSettings(queries=4, samples=4, micro_rows=8, mini_batches=2, epochs=2)
    step = split_step(with_values("own", PPO, sizes))
    _, metrics = next(train_loop(step, start_both("own"), 1))
    assert metrics["steps"] == 4


# Nothing to learn from ------------------------------------------------------------------------------------


def test_F8_groups_without_signal_are_skipped_by_both_steps():
    """With no KL: the same parameters and metrics, and their tokens are not computed.

    If there is no other group, the line says what was rolled out, and has no means over tokens.
    """
    algorithm = fg.flow_grpo(beta=0.0)
    stages = stages_of(algorithm)
    iteration = split_step(stages)

    def train_step(state, trajectories):
        """The stages after a rollout."""
        rollout = Rollout(trajectories)
        return iteration.update(state, rollout, iteration.advantages(rollout))

    rollout, left_out = jax.jit(stages.rollout), 0
    whole, parts = fused(algorithm), lambda state: train_step(state, rollout(state))
    for (state, metrics), (other_state, other_metrics) in zip(
        train_loop(whole, start(), 3), train_loop(parts, start(), 3), strict=True
    ):
        assert_close(state.learner.params, other_state.learner.params, atol=2e-5)
        assert metrics["live_tokens"] == other_metrics["live_tokens"]
        assert metrics["loss"] == pytest.approx(other_metrics["loss"], abs=1e-5)
        left_out += metrics["chosen_tokens"] - metrics["live_tokens"]
    assert left_out > 0
    trajectories = rollout(start())
    silent = trajectories.replace(outcome=jnp.zeros(16))
    ((_, metrics),) = train_loop(lambda state: train_step(state, silent), start(), 1)
    line = train_line(metrics, ENV.tools)
    assert metrics["live_tokens"] == line["live_tokens"] == 0
    of_update = {"loss", "grad_norm", "steps", "skipped", "live_tokens", "live_tokens_by_turn", "ratio_histogram"}
    of_rollout = trajectory_metrics(trajectories, samples=4)
    signals = {name for name in metrics if name.startswith(("advantage_", "zero_signal", "tokens_"))}
    signals |= {"context_tokens", "computed_tokens", "rows", "fill_rate", "timings"}
    assert set(line) == {"phase", "update", "tools"} | set(of_rollout) | of_update | signals
    assert {"entropy", "kl_old", "ratio_p99", "entropy_by_turn"} <= set(metrics) - set(line)


def test_F3_several_devices_equal_one(fused_updates):
    """Rollout and update sharded over four devices: the same trajectories, the same parameters (F3)."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    sharded = make_stages(ENV, POLICY._replace(mesh=mesh), ALGORITHM, OPTIMIZER, SIZES)
    step = split_step(sharded)
    for (state, metrics), (other_state, other_metrics) in zip(fused_updates, train_loop(step, start(), 3), strict=True):
        assert_close(state.learner.params, other_state.learner.params, atol=2e-5)
        for name in ("success", "turns", "tokens", "tool_errors"):
            assert metrics[name] == other_metrics[name], name
