"""The warm start: what was played out against a plain loop, and imitation that falls to its validation minimum."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_env import DIGITS, ROUNDS, tiny_env
from tiny_learner import BIGRAMS, OPTIMIZERS, SCORE, SETTINGS, assert_close

import flowgrpo as fg
from flowgrpo.learner.imitation import (
    act_by_oracle,
    demonstrate,
    imitation_rows,
    make_supervised,
    make_validation,
)
from flowgrpo.learner.state import init_learner

pytestmark = pytest.mark.slow

NUM = 24


def clumsy(key, state):
    """Any digit: right in a quarter of all cases, so that some episodes end and some do not."""
    return tiny_env().oracle(state.replace(digit=jax.random.randint(key, (), 0, DIGITS)))


ENV = tiny_env()._replace(demonstrate=clumsy)
ADAM = OPTIMIZERS["adam"]
PARAMS = BIGRAMS.init(jax.random.key(1))


@jax.jit
def played(keys, act_keys):
    tasks = jax.vmap(lambda key: ENV.make_task(key, "train"))(keys)
    return demonstrate(ENV, tasks, act_keys), demonstrate(ENV, tasks, act_keys, act=act_by_oracle(ENV)), tasks


@pytest.fixture(scope="module")
def shown():
    return played(jax.random.split(jax.random.key(0), NUM), jax.random.split(jax.random.key(7), NUM))


@pytest.fixture(scope="module")
def step():
    return jax.jit(make_supervised(BIGRAMS, ADAM, micro_rows=8, **SETTINGS))


@pytest.fixture(scope="module")
def validate():
    return jax.jit(make_validation(BIGRAMS, micro_rows=8, **SETTINGS))


def by_hand(task, key):
    """One episode, turn by turn: lists of tokens and of who chose them; what was paid; whether it ended."""
    state, seen = ENV.reset(jax.random.fold_in(key, 0), task)
    turns, reward, done, correct = [], [], False, False
    for turn in range(ENV.sizes.turns):
        action, length = ENV.demonstrate(jax.random.fold_in(key, 1 + turn), state)
        context, chosen = seen.tokens[: int(seen.length)].tolist(), action[: int(length)].tolist()
        turns.append((context + chosen, [False] * len(context) + [True] * len(chosen), int(ENV.anchor(state))))
        state, now = ENV.step(state, action, length)
        seen, done, correct = now.observation, bool(now.done), bool(now.correct)
        reward.append(float(now.reward))
        if done:
            break
    return turns, reward, done, correct


def test_demonstrations_equal_a_plain_loop(shown):
    """Tokens, masks, turns, rewards, status of every trajectory; what is not filled holds nothing."""
    found, _, tasks = jax.tree.map(np.asarray, shown)
    for i, key in enumerate(jax.random.split(jax.random.key(7), NUM)[:8]):
        turns, reward, done, correct = by_hand(jnp.asarray(tasks[i]), key)
        assert found.turns[i].tolist() == [t < len(turns) for t in range(ENV.sizes.turns)]
        for t, (tokens, chosen, anchor) in enumerate(turns):
            assert found.length[i, t] == len(tokens)
            assert found.tokens[i, t, : len(tokens)].tolist() == tokens
            assert found.chosen[i, t, : len(tokens)].tolist() == chosen
            assert found.anchor[i, t] == anchor
        assert found.reward[i].tolist() == [sum(reward)] * len(turns) + [0.0] * (ENV.sizes.turns - len(turns))
        assert found.outcome[i] == sum(reward)
        assert found.correct[i] == correct
        assert found.status[i] == (fg.types.Status.FINISHED if done else fg.types.Status.TURN_LIMIT)
    filled_ntl = np.arange(found.tokens.shape[2]) < found.length[:, :, None]
    assert not found.tokens[~filled_ntl].any()
    assert not found.chosen[~filled_ntl].any()
    assert set(found.status.tolist()) == {fg.types.Status.FINISHED, fg.types.Status.TURN_LIMIT}


def test_rewards_by_turn_stay_at_their_turn():
    paying = ENV._replace(by_turn=True)
    found = jax.jit(lambda keys: demonstrate(paying, jnp.zeros(3, jnp.int32), keys, act=act_by_oracle(paying)))(
        jax.random.split(jax.random.key(0), 3)
    )
    np.testing.assert_array_equal(found.reward, [[float(t == ROUNDS - 1) for t in range(ENV.sizes.turns)]] * 3)
    assert np.asarray(found.by_turn).all()


def test_the_oracle_is_always_right(shown):
    best = shown[1]
    assert np.asarray(best.correct).all()
    assert (np.asarray(best.status) == fg.types.Status.FINISHED).all()
    np.testing.assert_array_equal(best.turns.sum(axis=1), ROUNDS)
    np.testing.assert_array_equal(best.outcome, 1.0)
    assert len(set(np.asarray(best.group).tolist())) == NUM


def test_a_seed_gives_the_same_alone_and_vmapped(shown):
    keys = jax.random.split(jax.random.key(7), NUM)
    alone = demonstrate(ENV, shown[2][5:6], keys[5:6])
    expected = jax.tree.map(lambda x: x[5:6], shown[0]).replace(group=jnp.zeros(1, jnp.int32))
    chex.assert_trees_all_equal(alone, expected)


def test_the_loss_is_the_mean_over_chosen_tokens_and_falls(shown, step, validate):
    """By hand at the start; then imitating the oracle, which the bigrams can nearly do: only one token is unsure."""
    batch = imitation_rows(shown[1])
    logp_rs = np.asarray(SCORE(PARAMS, batch).logp)
    expected = -logp_rs[np.asarray(batch.chosen)].mean()
    state = init_learner(PARAMS, ADAM)
    np.testing.assert_allclose(validate(PARAMS, batch), expected, rtol=1e-5)
    losses = []
    for _ in range(150):
        state, loss = step(state, batch)
        losses.append(float(loss))
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    assert losses[-1] < 0.3 * losses[0]
    assert int(state.version) == 150


def test_F3_rows_in_any_order_and_micro_batches_of_any_size(shown, step):
    batch = imitation_rows(shown[0])
    start = init_learner(PARAMS, ADAM)
    expected, loss = step(start, batch)
    shuffled = jax.tree.map(lambda x_rs: x_rs[::-1], batch)
    other = jax.jit(make_supervised(BIGRAMS, ADAM, micro_rows=5, **SETTINGS))
    found, other_loss = other(start, shuffled)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
    assert_close(found.params, expected.params, PARAMS, 1e-3)


def test_trajectories_of_weight_zero_are_not_imitated(shown, step):
    """Demonstrations that failed may be left out by their weight, or by their status."""
    batch = imitation_rows(shown[0])
    right_r = np.asarray(shown[0].correct)
    assert 0 < right_r.sum() < NUM
    start = init_learner(PARAMS, ADAM)
    light = batch.replace(weight=jnp.where(right_r[:, None], batch.weight, 0.0))
    failed = shown[0].replace(status=jnp.where(right_r, shown[0].status, int(fg.types.Status.ABORTED)))
    (found, loss), (expected, other_loss) = (step(start, x) for x in (light, imitation_rows(failed)))
    assert_close(found.params, expected.params, PARAMS, 1e-5)
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
