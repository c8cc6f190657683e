"""Compiled rollouts: the record is what the environment got; keys alone decide (E3); scoring agrees (F7)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_env import TURNS, tiny_env

import flowgrpo as fg
from flowgrpo.envs.env import END, PAD
from flowgrpo.generate.sampler import logprobs
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.parallel.row_sharding import place_on_devices
from flowgrpo.parallel.sharding import decoder_axes, make_mesh, shard_policy, state_shardings
from flowgrpo.rollout.compiled import TurnRecord, _to_trajectories, make_rollout, repeat

ENV = tiny_env(rounds=1)  # a random policy solves some
CONFIG = DecoderConfig(
    v=len(ENV.vocabulary), d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),), init_scale=0.5
)
POLICY, AXES = make_policy(CONFIG), decoder_axes(CONFIG)
QUERIES, SAMPLES, TEMPERATURE = 6, 4, 1.3
STEP, RESET, ANCHOR = jax.jit(ENV.step), jax.jit(ENV.reset), jax.jit(ENV.anchor)
TRACES = []


@jax.jit
def run(*work):
    """The one program that most tests share."""
    TRACES.append(work)
    return make_rollout(ENV, POLICY, temperature=TEMPERATURE)(*work)


@pytest.fixture(scope="module")
def work():
    """Parameters, tasks, keys, groups and the version of the weights."""
    tasks, group_n = repeat(jnp.arange(QUERIES) % 2, SAMPLES)
    return POLICY.init(jax.random.key(3)), tasks, jax.random.split(jax.random.key(1), QUERIES * SAMPLES), group_n, 3


@pytest.fixture(scope="module")
def rollout(work):
    return jax.device_get(run(*work))


def replay(i, work, rollout):
    """Trajectory `i`, step by step in Python: its actions fed to the environment -> turns, reward, done."""
    _, tasks, keys, *_ = work
    trajectories = rollout
    state, said = RESET(jax.random.fold_in(keys[i], 0), tasks[i])
    total, done, turns = 0.0, False, 0
    while turns < TURNS and not done:
        length, heard = int(trajectories.length[i, turns]), int(said.length)
        tokens, slots = trajectories.tokens[i, turns], np.arange(trajectories.tokens.shape[2])
        np.testing.assert_array_equal(tokens[:heard], said.tokens[:heard])
        np.testing.assert_array_equal(trajectories.chosen[i, turns], (slots >= heard) & (slots < length))
        assert not tokens[length:].any()
        action = np.zeros(ENV.sizes.action, np.int32)
        action[: length - heard] = tokens[heard:length]
        assert PAD not in tokens[:length]
        assert END not in action[: length - heard - 1]
        assert length - heard == ENV.sizes.action or tokens[length - 1] == END
        assert int(trajectories.anchor[i, turns]) == int(ANCHOR(state))
        state, now = STEP(state, jnp.asarray(action), jnp.int32(length - heard))
        assert bool(rollout.error[i, turns]) == bool(now.error)
        assert int(rollout.tool[i, turns]) == int(now.tool)
        total, done, said, turns = total + float(now.reward), bool(now.done), now.observation, turns + 1
    return turns, total, done


def test_the_record_is_what_the_environment_got(work, rollout):
    """Turn by turn; and the outcome is shown at every turn."""
    trajectories = rollout
    for i in range(QUERIES * SAMPLES):
        turns, total, done = replay(i, work, rollout)
        np.testing.assert_array_equal(trajectories.turns[i], np.arange(TURNS) < turns)
        assert float(trajectories.outcome[i]) == total
        assert fg.types.Status(int(trajectories.status[i])) == (
            fg.types.Status.FINISHED if done else fg.types.Status.TURN_LIMIT
        )
        assert bool(trajectories.correct[i]) == done
    unreached_nt = ~trajectories.turns
    for field in (trajectories.length, trajectories.chosen, trajectories.logp_sampled, rollout.error):
        assert not field[unreached_nt].any()
    assert (rollout.tool[unreached_nt] == -1).all()
    assert {True, False} == set(trajectories.correct.tolist())  # both kinds were met
    shown_nt = np.where(trajectories.turns, trajectories.outcome[:, None], 0)
    np.testing.assert_array_equal(trajectories.reward, shown_nt)
    assert not trajectories.by_turn.any()
    assert (trajectories.version == 3).all()
    assert (trajectories.logp_sampled < 0)[trajectories.chosen].all()
    np.testing.assert_array_equal(trajectories.group, np.arange(QUERIES * SAMPLES) // SAMPLES)


def test_F7_scoring_gives_what_was_sampled(work, rollout):
    trajectories = rollout
    nothing_nt = np.zeros(trajectories.turns.shape, np.float32)
    batch = fg.pack(trajectories, nothing_nt, np.ones_like(nothing_nt), row_length=64)
    score = jax.jit(lambda *row: logprobs(POLICY, work[0], *row, temperature=TEMPERATURE, banned=(PAD,)))
    scores = score(batch.tokens, batch.positions, batch.segments)
    assert batch.chosen.sum() > 200
    np.testing.assert_allclose(np.where(batch.chosen, scores.logp - batch.logp_sampled, 0), 0, atol=1e-5)


def test_E3_a_trajectory_depends_on_its_key_alone(work, rollout):
    """In another order the same bits; other keys give other trajectories; nothing is traced twice."""
    params, tasks, keys, group_n, version = work
    order = np.random.default_rng(0).permutation(len(group_n))
    shuffled = run(params, tasks[order], keys[order], group_n[order], version)
    for one, two in zip(jax.tree.leaves(shuffled), jax.tree.leaves(rollout), strict=True):
        np.testing.assert_array_equal(one, two[order])
    other = run(params, tasks, jax.random.split(jax.random.key(4), len(group_n)), group_n, 5)
    assert (other.tokens != rollout.tokens).any(axis=(1, 2)).mean() > 0.9
    assert len(TRACES) == 1


@pytest.mark.slow
def test_E3_smaller_decode_batches_give_the_same_trajectories(work, rollout):
    """Tokens are equal, and log-probabilities within rounding."""
    found = jax.jit(make_rollout(ENV, POLICY, temperature=TEMPERATURE, min_decode_batch=2))(*work)
    for name in ("tokens", "chosen", "length", "turns", "reward", "status"):
        np.testing.assert_array_equal(getattr(found, name), getattr(rollout, name))
    np.testing.assert_allclose(found.logp_sampled, rollout.logp_sampled, atol=1e-5)


def test_rewards_by_turn_are_recorded_by_turn():
    """Of one trajectory of two turns: what lies in a turn that does not exist counts nowhere."""
    row = np.ones((1, 3, 2), np.int32)
    exists, paid = np.array([[True, True, False]]), np.array([[0.5, 1.0, 9.0]], np.float32)
    record = TurnRecord(row, row > 0, row, row[..., 0], exists, paid, row[..., 0], row[..., 0], row[..., 0] > 0)
    env = ENV._replace(by_turn=True)
    rollout = _to_trajectories(env, record, np.array([True]), np.array([False]), np.array([7]), 0)
    trajectories = rollout
    np.testing.assert_array_equal(trajectories.reward, [[0.5, 1.0, 0.0]])
    assert (float(trajectories.outcome[0]), bool(trajectories.by_turn[0])) == (1.5, True)
    np.testing.assert_array_equal(rollout.tool, [[1, 1, -1]])
    np.testing.assert_array_equal(rollout.error, exists)


def test_arguments_that_can_not_be_rolled_out_are_refused(work):
    with pytest.raises(fg.BadInput, match="temperature is 0"):
        make_rollout(ENV, POLICY, temperature=0)
    with pytest.raises(fg.BadInput, match="min_decode_batch is 0"):
        make_rollout(ENV, POLICY, min_decode_batch=0)
    with pytest.raises(fg.BadInput, match="has no make_cache"):
        make_rollout(ENV, POLICY._replace(make_cache=None))
    env = ENV._replace(vocabulary=(*ENV.vocabulary, "more"))
    said = (
        f"chooses among {len(ENV.vocabulary)} tokens, but tiny has {len(env.vocabulary)} words: give it a vocabulary of"
    )
    with pytest.raises(fg.BadInput, match=said):
        jax.eval_shape(make_rollout(env, POLICY), *work)


@pytest.mark.slow
def test_the_rollout_ends_with_its_last_trajectory(work):
    env = tiny_env(rounds=0)  # over as soon as something wrong is said, unless the first action was right
    params, *rows, version = work
    rollout = jax.jit(make_rollout(env, POLICY))(params, *(row[:SAMPLES] for row in rows), version)
    reached_nt = np.asarray(rollout.turns)
    assert reached_nt[:, 0].all()
    assert not reached_nt[:, -1].any()


def over_four() -> jax.sharding.Mesh:
    """A mesh over which 24 trajectories are dealt and brought back."""
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])


def over_eight() -> jax.sharding.Mesh:
    """A mesh over which heads and feed-forward width are divided, too."""
    return make_mesh({"data": 2, "fsdp": 2, "tensor": 2})


@pytest.mark.slow
@pytest.mark.parametrize("mesh_of", [over_four, over_eight])
def test_over_several_devices_the_trajectories_are_the_same(work, rollout, mesh_of):
    """E3, between widths."""
    mesh, (params, *rest) = mesh_of(), work
    params, policy = place_on_devices(params, state_shardings(params, mesh, AXES)), shard_policy(POLICY, mesh, AXES)
    other = jax.jit(make_rollout(ENV, policy, temperature=TEMPERATURE))(params, *rest)
    for name in ("tokens", "chosen", "turns", "outcome", "group", "length"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(other, name))
    np.testing.assert_allclose(rollout.logp_sampled, other.logp_sampled, atol=1e-5)
