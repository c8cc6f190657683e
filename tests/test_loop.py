"""The loop: three programs or one, the same numbers; fresh tasks by update; groups with a signal first; controls."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_env import tiny_env

import flowgrpo as fg
from flowgrpo import loop
from flowgrpo.learner.critic import by_part, copied_trunk, own_network, shared_trunk, with_critic
from flowgrpo.learner.state import make_optimizer
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.critic import make_critic
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.trainable import acting
from flowgrpo.rollout.compiled import shuffled_rewards, summarise
from flowgrpo.rollout.exams import make_exam
from flowgrpo.run.session import train_line

pytestmark = pytest.mark.slow

ENV = tiny_env(rounds=1)  # a random policy solves some
CONFIG = DecoderConfig(v=len(ENV.words), d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),), init_scale=0.3)
POLICY = make_policy(CONFIG)
ALGORITHM = fg.flow_grpo(beta=0.05)
OPTIMIZER = make_optimizer(learning_rate=0.01)
SIZES = loop.Settings(queries=4, samples=4, micro_rows=8)
PPO = fg.ppo(beta=0.05)  # with KL in the reward
CRITICS = {
    "own": own_network(POLICY, make_critic(CONFIG), init=copied_trunk(CONFIG)),
    "shared": shared_trunk(POLICY, CONFIG),
}
BOTH = by_part(OPTIMIZER, make_optimizer(learning_rate=0.03))


@cache
def iteration(algorithm=ALGORITHM, sizes=SIZES):
    return loop.make_iteration(ENV, POLICY, algorithm, OPTIMIZER, sizes)


@cache
def one_program(algorithm=ALGORITHM, sizes=SIZES):
    return jax.jit(loop.one_program(iteration(algorithm, sizes)))


def start(seed: int = 0) -> loop.Run:
    return loop.start_run(POLICY.init(jax.random.key(seed)), OPTIMIZER, jax.random.key(100 + seed))


def assert_close(one, two, **tolerance):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


@pytest.fixture(scope="module")
def by_one():
    """Three updates by one program, which is traced once: runs and their figures."""
    runs = list(loop.train_loop(one_program(), start(), 3))
    assert one_program()._cache_size() == 1
    return runs


@pytest.mark.parametrize("policy", [POLICY, POLICY._replace(hidden_tree=None)], ids=["trees", "rows"])
def test_F10_three_programs_do_what_one_does(by_one, policy):
    """Whether what contexts begin with alike is computed once or not."""
    step = loop.three_programs(loop.make_iteration(ENV, policy, ALGORITHM, OPTIMIZER, SIZES))
    for (run, figures), (other, others) in zip(by_one, loop.train_loop(step, start(), 3), strict=True):
        assert_close(run.learner.params, other.learner.params, atol=2e-5)
        for name in ("success", "turns", "tokens", "tool_calls", "tool_errors", "mixed_groups", "zero_signal_groups"):
            assert figures[name] == others[name], name
        assert figures["loss"] == pytest.approx(others["loss"], abs=1e-5)
        assert (others["computed_tokens"] < others["context_tokens"]) == (policy is POLICY)


def test_F7_nothing_has_moved_before_the_first_step(by_one):
    assert all(figures["log_ratio_max"] < 5e-5 for _, figures in by_one)


def test_updates_are_numbered_and_each_has_tasks_of_its_own(by_one):
    assert [figures["update"] for _, figures in by_one] == [1, 2, 3]
    play = jax.jit(iteration().rollout)
    first, again, second = play(start()), play(start()), play(start().replace(update=jnp.int32(1)))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (np.asarray(first.tokens) != np.asarray(second.tokens)).any()


def test_training_goes_on_where_it_stood(by_one):
    (run, _), (expected, _) = by_one[0], by_one[2]
    *_, (other, _) = loop.train_loop(one_program(), run, 3)
    for x, y in zip(jax.tree.leaves(other.learner.params), jax.tree.leaves(expected.learner.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_seeds_that_are_vmapped_learn_what_they_learn_alone(by_one):
    after, figures = loop.train_many(loop.one_program(iteration()), [start(0), start(1)], 3)
    assert_close(jax.tree.map(lambda x: x[0], after.learner.params), by_one[2][0].learner.params, atol=1e-4)
    *_, (alone, _) = loop.train_loop(one_program(), start(1), 3)
    assert_close(jax.tree.map(lambda x: x[1], after.learner.params), alone.learner.params, atol=1e-4)
    assert figures["success"].shape == (2, 3)


def test_over_sampling_takes_the_groups_that_say_something():
    sizes = loop.Settings(queries=2, samples=4, oversample=4, micro_rows=8)
    stages = iteration(ALGORITHM, sizes)
    trajectories = jax.jit(stages.rollout)(start())
    assert len(trajectories.group) == 32
    adv, weights, _ = stages.credit(trajectories)
    whole = np.asarray(ALGORITHM.advantages(trajectories)).reshape(8, -1)
    taken_g = np.asarray(weights).reshape(8, -1).any(axis=1)
    signal_g = (whole != 0).any(axis=1)
    assert taken_g.sum() == 2
    assert signal_g[taken_g].sum() == min(2, signal_g.sum()) > 0
    np.testing.assert_allclose(np.asarray(weights).sum(), 1.0, atol=1e-6)
    np.testing.assert_allclose(np.asarray(adv).reshape(8, -1)[taken_g], whole[taken_g], atol=1e-6)


def test_the_reference_is_refreshed_when_the_algorithm_says_so():
    algorithm = fg.flow_grpo(beta=0.05, reference_every=2)
    runs = [run for run, _ in loop.train_loop(one_program(algorithm), start(), 3)]
    assert_close(runs[0].reference, start().reference, atol=0)
    assert_close(runs[1].reference, runs[1].learner.params, atol=0)
    assert_close(runs[2].reference, runs[1].learner.params, atol=0)


def test_shuffled_rewards_stay_in_their_group():
    trajectories = jax.jit(iteration().rollout)(start())
    outcome_n = jnp.arange(16.0)
    shuffled = shuffled_rewards(trajectories.replace(outcome=outcome_n), jax.random.key(0), samples=4)
    order = np.asarray(shuffled.outcome).reshape(4, 4)
    np.testing.assert_array_equal(np.sort(order, axis=1), np.asarray(outcome_n).reshape(4, 4))
    assert (order != np.asarray(outcome_n).reshape(4, 4)).any()
    np.testing.assert_array_equal(shuffled.tokens, trajectories.tokens)


def test_an_exam_is_the_same_for_the_same_key():
    exam = jax.jit(make_exam(ENV, POLICY, "test", tasks=6, samples=2))
    params = POLICY.init(jax.random.key(0))
    one, two, other = (exam(params, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.tokens, two.tokens)
    assert (np.asarray(one.tokens) != np.asarray(other.tokens)).any()
    np.testing.assert_array_equal(one.group, np.repeat(np.arange(6), 2))


@pytest.mark.parametrize("name", ["queries", "samples", "oversample", "micro_rows"])
def test_sizes_are_checked(name):
    with pytest.raises(fg.BadInput, match=f"{name} is 0"):
        loop.Settings(**{name: 0})


def test_an_algorithm_with_targets_needs_a_critic():
    with pytest.raises(fg.BadInput, match="ppo needs a critic: pass one as critic="):
        loop.make_iteration(ENV, POLICY, fg.ppo(), OPTIMIZER, SIZES)


def test_gigpo_needs_an_anchor():
    env = ENV._replace(anchor=fg.Env._field_defaults["anchor"])
    with pytest.raises(fg.BadInput, match="gigpo compares turns of equal states, but tiny has no anchor"):
        loop.make_iteration(env, POLICY, fg.algorithms.gigpo(), OPTIMIZER, SIZES)


def test_self_distillation_needs_hindsight():
    with pytest.raises(fg.BadInput, match=r"hints are told in hindsight, and tiny has none: give it Env\.hindsight"):
        loop.make_iteration(ENV, POLICY, fg.algorithms.sdpo(), OPTIMIZER, SIZES)


def test_pairs_are_not_parted_by_mini_batches():
    with pytest.raises(fg.BadInput, match="dpo needs its groups whole, and packing parts them: set mini_batches to 1"):
        loop.make_iteration(ENV, POLICY, fg.dpo(), OPTIMIZER, loop.Settings(mini_batches=2))


# With a critic ------------------------------------------------------------------------------------------


def start_both(kind: str, seed: int = 0) -> loop.Run:
    params = with_critic(CRITICS[kind], jax.random.key(seed), POLICY.init(jax.random.key(seed)))
    return loop.start_run(params, BOTH, jax.random.key(100 + seed))


@cache
def with_values(kind: str, algorithm=PPO, sizes=SIZES):
    return loop.make_iteration(ENV, POLICY, algorithm, BOTH, sizes, critic=CRITICS[kind])


@pytest.fixture(scope="module")
def ppo_by_one():
    """Three updates of PPO by one program."""
    return list(loop.train_loop(jax.jit(loop.one_program(with_values("own"))), start_both("own"), 3))


def test_ppo_is_the_same_in_three_programs_and_in_one(ppo_by_one):
    step = loop.three_programs(with_values("own"))
    for (run, figures), (other, others) in zip(ppo_by_one, loop.train_loop(step, start_both("own"), 3), strict=True):
        assert_close(run.learner.params, other.learner.params, atol=2e-5)
        assert figures["success"] == others["success"]
        for name in ("loss", "value_loss", "explained_variance", "target"):
            assert figures[name] == pytest.approx(others[name], abs=1e-4), name


def test_ppo_moves_actor_and_critic_and_keeps_a_reference_without_values(ppo_by_one):
    first, last = start_both("own"), ppo_by_one[2][0]
    for one, two in zip(first.learner.params, last.learner.params, strict=True):
        assert max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True)) > 1e-3
    assert last.reference.critic is None
    assert_close(last.reference.policy, acting(first.learner.params), atol=0)
    assert all(figures["log_ratio_max"] < 5e-5 for _, figures in ppo_by_one)  # F7


def test_the_price_of_kl_is_paid_once_the_policy_has_left_its_reference():
    """The advantages of trajectories scored under another reference differ; under the policy itself nothing is paid."""
    stages, run = iteration(fg.algorithms.rloo(beta=0.05, kl_in="reward")), start()
    played = jax.jit(stages.rollout)(run)
    own = stages.score_trajectories(run, played)
    actions = np.asarray(played.actions)
    np.testing.assert_allclose(np.asarray(own.logp_ref)[actions], np.asarray(played.logp_sampled)[actions], atol=5e-5)
    other = run.replace(reference=POLICY.init(jax.random.key(9)))
    far = stages.score_trajectories(other, played)
    assert np.abs(np.asarray(stages.credit(far).adv) - np.asarray(stages.credit(own).adv)).max() > 0.01


def test_a_shared_trunk_learns_values_too():
    """With returns as targets (lam = 1): every value starts at zero, and their mean comes to that of the returns."""
    algorithm = fg.ppo(beta=0.0, lam=1.0)
    step = loop.three_programs(with_values("shared", algorithm))
    seen = [figures for _, figures in loop.train_loop(step, start_both("shared"), 12)]
    assert seen[0]["value"] == pytest.approx(0.0, abs=1e-6)
    value, target = (np.mean([figures[name] for figures in seen[6:]]) for name in ("value", "target"))
    assert value == pytest.approx(target, rel=0.3)
    assert target > 0.1


def test_mini_batches_of_ppo_hold_whole_trajectories():
    sizes = loop.Settings(queries=4, samples=4, micro_rows=8, mini_batches=2, epochs=2)
    step = loop.three_programs(with_values("own", PPO, sizes))
    _, figures = next(loop.train_loop(step, start_both("own"), 1))
    assert figures["steps"] == 4


# Nothing to learn from ------------------------------------------------------------------------------------


def test_F8_groups_without_a_signal_are_left_out_of_one_program_as_of_three():
    """With no KL: the same parameters and figures, and no token of theirs is visited.

    If there is no other group, the line says what was rolled out, and has no means over tokens.
    """
    algorithm = fg.flow_grpo(beta=0.0)
    stages = iteration(algorithm)
    learning = loop.Learning(stages.score_trajectories, stages.credit, stages.update, stages.packer)
    sizes = {"samples": 4, "trajectories": 16, "longest": loop.longest(ENV)}
    learn = loop.make_learn(learning, algorithm, tools=len(ENV.tools), **sizes)
    rollout, left_out = jax.jit(stages.rollout), 0
    whole, parts = one_program(algorithm), lambda run: learn(run, rollout(run))
    for (run, figures), (other, others) in zip(
        loop.train_loop(whole, start(), 3), loop.train_loop(parts, start(), 3), strict=True
    ):
        assert_close(run.learner.params, other.learner.params, atol=2e-5)
        assert figures["live_tokens"] == others["live_tokens"]
        assert figures["loss"] == pytest.approx(others["loss"], abs=1e-5)
        left_out += figures["chosen_tokens"] - figures["live_tokens"]
    assert left_out > 0
    played = rollout(start())
    silent = played.replace(outcome=jnp.zeros(16))
    ((_, figures),) = loop.train_loop(lambda run: learn(run, silent), start(), 1)
    line = train_line(figures, ENV.tools)
    assert figures["live_tokens"] == line["live_tokens"] == 0
    kept = {"loss", "grad_norm", "steps", "skipped", "live_tokens", "live_tokens_by_turn", "ratio_histogram"}
    of_rollout = summarise(played, samples=4)
    signals = {name for name in figures if name.startswith(("advantage_", "zero_signal", "tokens_"))}
    signals |= {"context_tokens", "computed_tokens"}
    assert set(line) == {"phase", "update", "tools"} | set(of_rollout) | kept | signals
    assert {"entropy", "kl_old", "ratio_p99", "entropy_by_turn"} <= set(figures) - set(line)


def test_several_devices_do_what_one_does(by_one):
    """Rollout and update dealt over four devices: the same trajectories, the same parameters (F3)."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    dealt = loop.make_iteration(ENV, POLICY._replace(mesh=mesh), ALGORITHM, OPTIMIZER, SIZES)
    step = loop.three_programs(dealt)
    for (run, figures), (other, others) in zip(by_one, loop.train_loop(step, start(), 3), strict=True):
        assert_close(run.learner.params, other.learner.params, atol=2e-5)
        for name in ("success", "turns", "tokens", "tool_errors"):
            assert figures[name] == others[name], name
