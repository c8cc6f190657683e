"""The loop: three programs or one, the same numbers; fresh tasks by update; groups with a signal first; controls."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_env import tiny_env

import flowgrpo as fg
from flowgrpo import loop
from flowgrpo.learner.state import make_optimizer
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy

pytestmark = pytest.mark.slow

ENV = tiny_env(rounds=1)  # a random policy solves some
POLICY = make_policy(
    DecoderConfig(v=len(ENV.words), d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),), init_scale=0.3)
)
ALGORITHM = fg.flow_grpo(beta=0.05)
OPTIMIZER = make_optimizer(learning_rate=0.01)
SIZES = loop.Settings(queries=4, samples=4, micro_rows=8)


@cache
def iteration(algorithm=ALGORITHM, sizes=SIZES):
    return loop.make_iteration(ENV, POLICY, algorithm, OPTIMIZER, sizes)


@cache
def one_program(algorithm=ALGORITHM, sizes=SIZES):
    return jax.jit(loop.one_program(iteration(algorithm, sizes), ENV, sizes))


def start(seed: int = 0) -> loop.Run:
    return loop.start_run(POLICY.init(jax.random.key(seed)), OPTIMIZER, jax.random.key(100 + seed))


def assert_close(one, two, **tolerance):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


@pytest.fixture(scope="module")
def by_one():
    """Three updates by one program: runs and their figures."""
    return list(loop.train(one_program(), start(), 3))


def test_three_programs_do_what_one_does(by_one):
    step = loop.three_programs(iteration(), ENV, ALGORITHM, SIZES)
    for (run, figures), (other, others) in zip(by_one, loop.train(step, start(), 3), strict=True):
        assert_close(run.learner.params, other.learner.params, atol=2e-5)
        for name in ("success", "turns", "tokens", "tool_calls", "tool_errors", "mixed_groups"):
            assert figures[name] == others[name], name
        assert figures["loss"] == pytest.approx(others["loss"], abs=1e-5)


def test_F7_nothing_has_moved_before_the_first_step(by_one):
    assert all(figures["log_ratio_max"] < 5e-5 for _, figures in by_one)


def test_updates_are_numbered_and_each_has_tasks_of_its_own(by_one):
    assert [figures["update"] for _, figures in by_one] == [1, 2, 3]
    play = jax.jit(iteration().rollout)
    first, again, second = play(start()), play(start()), play(start().replace(update=jnp.int32(1)))
    np.testing.assert_array_equal(first.trajectories.tokens, again.trajectories.tokens)
    assert (np.asarray(first.trajectories.tokens) != np.asarray(second.trajectories.tokens)).any()


def test_training_goes_on_where_it_stood(by_one):
    (run, _), (expected, _) = by_one[0], by_one[2]
    *_, (other, _) = loop.train(one_program(), run, 3)
    for x, y in zip(jax.tree.leaves(other.learner.params), jax.tree.leaves(expected.learner.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_seeds_that_are_vmapped_learn_what_they_learn_alone(by_one):
    after, figures = loop.train_many(loop.one_program(iteration(), ENV, SIZES), [start(0), start(1)], 3)
    assert_close(jax.tree.map(lambda x: x[0], after.learner.params), by_one[2][0].learner.params, atol=1e-4)
    *_, (alone, _) = loop.train(one_program(), start(1), 3)
    assert_close(jax.tree.map(lambda x: x[1], after.learner.params), alone.learner.params, atol=1e-4)
    assert figures["success"].shape == (2, 3)


def test_over_sampling_takes_the_groups_that_say_something():
    sizes = loop.Settings(queries=2, samples=4, oversample=4, micro_rows=8)
    stages = iteration(ALGORITHM, sizes)
    trajectories = stages.rollout(start()).trajectories
    assert len(trajectories.group) == 32
    adv, weights = stages.credit(trajectories)
    whole = np.asarray(ALGORITHM.advantages(trajectories)).reshape(8, -1)
    taken_g = np.asarray(weights).reshape(8, -1).any(axis=1)
    signal_g = (whole != 0).any(axis=1)
    assert taken_g.sum() == 2
    assert signal_g[taken_g].sum() == min(2, signal_g.sum()) > 0
    np.testing.assert_allclose(np.asarray(weights).sum(), 1.0, atol=1e-6)
    np.testing.assert_allclose(np.asarray(adv).reshape(8, -1)[taken_g], whole[taken_g], atol=1e-6)


def test_the_reference_is_refreshed_when_the_algorithm_says_so():
    algorithm = fg.flow_grpo(beta=0.05, reference_every=2)
    runs = [run for run, _ in loop.train(one_program(algorithm), start(), 3)]
    assert_close(runs[0].reference, start().reference, atol=0)
    assert_close(runs[1].reference, runs[1].learner.params, atol=0)
    assert_close(runs[2].reference, runs[1].learner.params, atol=0)


def test_shuffled_rewards_stay_in_their_group():
    trajectories = iteration().rollout(start()).trajectories
    outcome_n = jnp.arange(16.0)
    shuffled = loop.shuffled_rewards(trajectories.replace(outcome=outcome_n), jax.random.key(0), samples=4)
    order = np.asarray(shuffled.outcome).reshape(4, 4)
    np.testing.assert_array_equal(np.sort(order, axis=1), np.asarray(outcome_n).reshape(4, 4))
    assert (order != np.asarray(outcome_n).reshape(4, 4)).any()
    np.testing.assert_array_equal(shuffled.tokens, trajectories.tokens)


def test_an_exam_is_the_same_for_the_same_key():
    exam = jax.jit(loop.make_exam(ENV, POLICY, "test", tasks=6, samples=2))
    params = POLICY.init(jax.random.key(0))
    one, two, other = (exam(params, jax.random.key(seed)).trajectories for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.tokens, two.tokens)
    assert (np.asarray(one.tokens) != np.asarray(other.tokens)).any()
    np.testing.assert_array_equal(one.group, np.repeat(np.arange(6), 2))


@pytest.mark.parametrize("name", ["queries", "samples", "oversample", "micro_rows"])
def test_sizes_are_checked(name):
    with pytest.raises(fg.BadInput, match=f"{name} is 0"):
        loop.Settings(**{name: 0})


def test_a_critic_is_refused():
    with pytest.raises(fg.BadInput, match="ppo needs a critic"):
        loop.make_iteration(ENV, POLICY, fg.ppo(), OPTIMIZER, SIZES)


def test_no_retracing():
    step, traces = loop.one_program(iteration(), ENV, SIZES), []

    @jax.jit
    def counted(run):
        traces.append(run)
        return step(run)

    assert len(list(loop.train(counted, start(), 3))) == 3
    assert len(traces) == 1


def test_several_devices_do_what_one_does(by_one):
    """Rollout and update dealt over four devices: the same trajectories, the same parameters (F3)."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    dealt = loop.make_iteration(ENV, POLICY, ALGORITHM, OPTIMIZER, SIZES, mesh=mesh)
    step = loop.three_programs(dealt, ENV, ALGORITHM, SIZES)
    for (run, figures), (other, others) in zip(by_one, loop.train(step, start(), 3), strict=True):
        assert_close(run.learner.params, other.learner.params, atol=2e-5)
        for name in ("success", "turns", "tokens", "tool_errors"):
            assert figures[name] == others[name], name
