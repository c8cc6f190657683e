"""Compiled rollouts: what is recorded is what the environment saw; keys alone decide (E3); scoring agrees (F7)."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_env import TURNS, tiny_env

import flowgrpo as fg
from flowgrpo.envs.env import END, PAD
from flowgrpo.generate.sampler import logprobs
from flowgrpo.learner.sharding import decoder_axes, make_mesh, param_shardings, settled
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.rollout.compiled import make_rollout, repeat
from flowgrpo.spread import place

ENV = tiny_env(rounds=1)  # a random policy solves some
CONFIG = DecoderConfig(v=len(ENV.words), d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),), init_scale=0.5)
POLICY, AXES = make_policy(CONFIG), decoder_axes(CONFIG)
QUERIES, SAMPLES = 6, 4


STEP, RESET, ANCHOR = jax.jit(ENV.step), jax.jit(ENV.reset), jax.jit(ENV.anchor)


@cache
def run(block=None, temperature=1.0):
    return jax.jit(make_rollout(ENV, POLICY, temperature=temperature, block=block))


@pytest.fixture(scope="module")
def work():
    """Parameters, tasks, keys and groups."""
    tasks = jax.vmap(lambda key: ENV.make_task(key, "train"))(jax.random.split(jax.random.key(1), QUERIES))
    tasks, group_n = repeat(tasks, SAMPLES)
    return POLICY.init(jax.random.key(2)), tasks, jax.random.split(jax.random.key(3), QUERIES * SAMPLES), group_n


@pytest.fixture(scope="module")
def rollout(work):
    return run()(*work)


def test_groups_hold_the_samples_of_one_task(work):
    _, tasks, _, group_n = work
    np.testing.assert_array_equal(group_n, np.arange(QUERIES * SAMPLES) // SAMPLES)
    assert all(len(set(np.asarray(tasks)[group_n == g].tolist())) == 1 for g in range(QUERIES))


def replay(i, work, rollout):
    """Trajectory `i`, step by step in Python: its actions fed to the environment -> turns, reward, done."""
    _, tasks, keys, _ = work
    trajectories = rollout.trajectories
    state, said = RESET(jax.random.fold_in(keys[i], 0), tasks[i])
    total, done, turns = 0.0, False, 0
    while turns < TURNS and not done:
        length, heard = int(trajectories.length[i, turns]), int(said.length)
        tokens = np.asarray(trajectories.tokens[i, turns])
        np.testing.assert_array_equal(tokens[:heard], said.tokens[:heard])
        np.testing.assert_array_equal(
            trajectories.chosen[i, turns], (np.arange(len(tokens)) >= heard) & (np.arange(len(tokens)) < length)
        )
        action = np.zeros(ENV.sizes.action, np.int32)
        action[: length - heard] = tokens[heard:length]
        assert PAD not in tokens[:length]
        assert END not in action[: length - heard - 1]
        assert int(trajectories.anchor[i, turns]) == int(ANCHOR(state))
        state, now = STEP(state, jnp.asarray(action), jnp.int32(length - heard))
        assert bool(rollout.error[i, turns]) == bool(now.error)
        assert int(rollout.tool[i, turns]) == int(now.tool)
        total, done, said, turns = total + float(now.reward), bool(now.done), now.observation, turns + 1
    return turns, total, done


def test_what_is_recorded_is_what_the_environment_saw(work, rollout):
    trajectories = rollout.trajectories
    for i in range(len(trajectories.group)):
        turns, total, done = replay(i, work, rollout)
        np.testing.assert_array_equal(trajectories.turns[i], np.arange(TURNS) < turns)
        assert float(trajectories.outcome[i]) == total
        assert fg.Status(int(trajectories.status[i])) == (fg.Status.FINISHED if done else fg.Status.TURN_LIMIT)
        assert bool(trajectories.correct[i]) == done
        assert not trajectories.length[i, turns:].any()
        assert not trajectories.chosen[i, turns:].any()
    assert {True, False} == set(np.asarray(trajectories.correct).tolist())  # both kinds were met


@pytest.mark.slow
def test_a_turn_that_nobody_reached_called_nothing(work):
    env = tiny_env(rounds=0)  # over as soon as something wrong is said
    rollout = jax.jit(make_rollout(env, POLICY))(*work)
    reached_nt = np.asarray(rollout.trajectories.turns)
    assert reached_nt[:, 0].all()
    assert not reached_nt[:, -1].any()
    assert (np.asarray(rollout.tool)[~reached_nt] == -1).all()
    assert not np.asarray(rollout.error)[~reached_nt].any()


def test_the_outcome_is_shown_at_every_turn(rollout):
    trajectories = rollout.trajectories
    expected = np.where(trajectories.turns, np.asarray(trajectories.outcome)[:, None], 0)
    np.testing.assert_array_equal(trajectories.reward, expected)
    assert not trajectories.by_turn.any()


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_F7_scoring_gives_what_was_sampled(work, temperature):
    params = work[0]
    trajectories = run(None, temperature)(*work).trajectories
    nothing_nt = np.zeros(trajectories.turns.shape, np.float32)
    batch = fg.pack(trajectories, nothing_nt, np.ones_like(nothing_nt), row_length=64)
    score = jax.jit(lambda *row: logprobs(POLICY, params, *row, temperature=temperature, banned=(PAD,)))
    scores = score(batch.tokens, batch.positions, batch.segments)
    assert batch.chosen.sum() > 200
    np.testing.assert_allclose(np.where(batch.chosen, scores.logp - batch.logp_sampled, 0), 0, atol=1e-5)


def test_E3_a_trajectory_depends_on_its_key_alone(work, rollout):
    """In another order, and in blocks: the same tokens, in the same width the same bits."""
    params, tasks, keys, group_n = work
    order = np.random.default_rng(0).permutation(len(group_n))
    shuffled = run()(params, tasks[order], keys[order], group_n[order])
    for one, two in zip(jax.tree.leaves(shuffled), jax.tree.leaves(rollout), strict=True):
        np.testing.assert_array_equal(one, np.asarray(two)[order])
    blocks = run(SAMPLES)(*work)
    np.testing.assert_array_equal(blocks.trajectories.tokens, rollout.trajectories.tokens)
    np.testing.assert_allclose(blocks.trajectories.logp_sampled, rollout.trajectories.logp_sampled, atol=1e-5)


def test_an_uneven_block_and_a_bad_temperature_are_refused(work):
    with pytest.raises(fg.BadInput, match="no whole number of blocks of 5"):
        run(5)(*work)
    with pytest.raises(fg.BadInput, match="temperature is 0"):
        make_rollout(ENV, POLICY, temperature=0)


def test_a_policy_of_another_vocabulary_is_refused(work):
    env = ENV._replace(words=(*ENV.words, "more"))
    said = f"chooses among {len(ENV.words)} tokens, but tiny has {len(env.words)} words: give it a vocabulary of"
    with pytest.raises(fg.BadInput, match=said):
        jax.eval_shape(make_rollout(env, POLICY), *work)


@pytest.mark.slow
def test_no_retracing(work):
    rollout, traces = make_rollout(ENV, POLICY), []

    @jax.jit
    def program(params, tasks, keys, group_n, version):
        traces.append(version)
        return rollout(params, tasks, keys, group_n, version)

    for seed in range(3):
        params, tasks, _, group_n = work
        program(params, tasks, jax.random.split(jax.random.key(seed), len(group_n)), group_n, seed)
    assert len(traces) == 1


def over_four() -> jax.sharding.Mesh:
    """A mesh over which 24 trajectories are dealt and brought back."""
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])


def over_eight() -> jax.sharding.Mesh:
    """A mesh over which heads and feed-forward width are divided, too."""
    return make_mesh({"data": 2, "fsdp": 2, "tensor": 2})


@pytest.mark.slow
@pytest.mark.parametrize("mesh_of", [over_four, pytest.param(over_eight, marks=pytest.mark.slow)])
def test_over_several_devices_the_trajectories_are_the_same(work, rollout, mesh_of):
    """E3, between widths."""
    mesh, (params, *rest) = mesh_of(), work
    params, policy = place(params, param_shardings(params, mesh, AXES)), settled(POLICY, mesh, AXES)
    other = jax.jit(make_rollout(ENV, policy, mesh=mesh))(params, *rest)
    for name in ("tokens", "chosen", "turns", "outcome", "group", "length"):
        np.testing.assert_array_equal(getattr(rollout.trajectories, name), getattr(other.trajectories, name))
    np.testing.assert_allclose(rollout.trajectories.logp_sampled, other.trajectories.logp_sampled, atol=1e-5)
