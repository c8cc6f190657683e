"""The update: layouts and micro-batches change nothing, mini-batches are a plain loop, bad steps are left out."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
from cases import batch_of, everything_on
from tiny_learner import BANNED, BIGRAMS, TEMPERATURE, assert_close, grow, sampled_case, sgd

import flowgrpo as fg
from flowgrpo.generate.sampler import decode, prefill, sampling, start_rows
from flowgrpo.learner.state import init_learner, make_optimizer
from flowgrpo.learner.update import check_mini_batches, make_score, make_update, score_batch, score_reference
from flowgrpo.models.decoder import make_policy

SETTINGS = {"temperature": TEMPERATURE, "banned": BANNED}


def run(algorithm, params, batch, optimizer=None, policy=BIGRAMS, **settings):
    """One compiled update from fresh state -> (state, metrics)."""
    optimizer = sgd() if optimizer is None else optimizer
    update = jax.jit(make_update(policy, algorithm, optimizer, **{**SETTINGS, **settings}))
    return update(init_learner(params, optimizer), batch)


# F3: layouts, micro-batches, mini-batches --------------------------------------------------------------


def test_F3_layouts_and_micro_batches_give_the_same_parameters():
    """A decoder: packed, shuffled, padded, one trajectory or turn per row, in micro-batches of 16, 5 and 1."""
    config = replace(tiny_models.CONFIG, d=16, f=16, windows=(None,), ropes=tiny_models.CONFIG.ropes[:1])
    policy = make_policy(config)
    params, trajectories = sampled_case(11, policy)
    algorithm = fg.flow_grpo(beta=0.05, entropy_bonus=0.01)
    optimizer = sgd()
    packed = batch_of(algorithm, trajectories)
    order = np.random.default_rng(0).permutation(len(packed.tokens))
    shuffled = jax.tree.map(lambda x_rs: x_rs[order], packed)
    by_trajectory = grow(batch_of(algorithm, trajectories, "by_trajectory"), 16)
    updates = {
        size: jax.jit(make_update(policy, algorithm, optimizer, micro_rows=size, **SETTINGS)) for size in (16, 5)
    }
    expected, metrics = updates[16](init_learner(params, optimizer), packed)
    assert float(metrics["clip_low_fraction"] + metrics["clip_high_fraction"]) > 0
    for size, batch in [(16, shuffled), (16, by_trajectory), (5, packed), (5, shuffled), (5, by_trajectory)]:
        state, found = updates[size](init_learner(params, optimizer), batch)
        assert_close(state.params, expected.params, params)
        for name, value in metrics.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["flow_grpo", "gspo", "kimi", "dpo", "reinforce_pp"])
def test_F3_first_passes_and_micro_batches_equal_the_unsplit_gradient(name):
    """Every option on, sequence-level correction among them: micro-batches of 4 and the plain gradient of the loss."""
    algorithm = everything_on(name)
    params, trajectories = sampled_case(12)
    batch = batch_of(algorithm, trajectories, "by_turn")
    state, metrics = run(algorithm, params, batch, micro_rows=4, rescore=False)

    def plain(params):
        scores = make_score(BIGRAMS, **SETTINGS)(params, batch)
        return algorithm.loss(scores, batch)[0]

    loss, grads = jax.jit(jax.value_and_grad(plain))(params)
    assert_close(state.params, jax.tree.map(jnp.subtract, params, grads), params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-4)


def test_F3_mini_batches_and_epochs_are_a_plain_loop():
    """Two epochs of three blocks of rows, each a step of Adam on three times its sum."""
    algorithm, optimizer = fg.flow_grpo(beta=0.05), make_optimizer(learning_rate=0.01, clip_norm=0.5)
    params, trajectories = sampled_case(13)
    batch = jax.tree.map(jnp.asarray, batch_of(algorithm, trajectories, "by_trajectory"))
    state, metrics = run(algorithm, params, batch, optimizer, micro_rows=3, mini_batches=3, epochs=2)

    @jax.jit
    def step(params, memory, part):
        def loss(params):
            return 3 * algorithm.loss(make_score(BIGRAMS, **SETTINGS)(params, part), part)[0]

        updates, memory = optimizer.update(jax.grad(loss)(params), memory, params)
        return optax.apply_updates(params, updates), memory

    expected, memory = params, optimizer.init(params)
    for start in (0, 4, 8) * 2:
        part = jax.tree.map(lambda x_rs: x_rs[start : start + 4], batch)  # noqa: B023
        expected, memory = step(expected, memory, part)
    assert_close(state.params, expected, params)
    assert (int(state.version), float(metrics["steps"]), int(state.skipped)) == (1, 6.0, 0)


def test_F3_mini_batches_average_to_the_gradient_of_the_batch():
    """With a rate too small to move anything, four mini-batches step together as far as four times the whole."""
    algorithm = fg.flow_grpo(beta=0.0)
    params, trajectories = sampled_case(14)
    batch = batch_of(algorithm, trajectories, "by_trajectory")
    whole, _ = run(algorithm, params, batch, sgd(1e-4))
    parts, _ = run(algorithm, params, batch, sgd(1e-4 / 4), mini_batches=4)
    assert_close(parts.params, whole.params, params, 2e-2)
    alone, metrics = run(algorithm, params, grow(batch, 48), sgd(1e-4), mini_batches=4)
    assert_close(alone.params, whole.params, params)
    assert float(metrics["steps"]) == 1.0  # three of the four are empty


def test_mini_batches_that_split_a_trajectory_are_named():
    algorithm = fg.flow_grpo()
    _, trajectories = sampled_case(15)
    check_mini_batches(batch_of(algorithm, trajectories, "by_trajectory"), 4)
    check_mini_batches(batch_of(algorithm, trajectories, "by_turn"), 4)
    with pytest.raises(fg.BadInput, match=r"trajectory \d+ has tokens in \d of 4 mini-batches"):
        check_mini_batches(batch_of(algorithm, trajectories, rows=4), 4)
    with pytest.raises(fg.BadInput, match=r"group -?\d+ has tokens in \d of 4"):
        check_mini_batches(batch_of(algorithm, trajectories, "by_trajectory"), 4, by="group")
    with pytest.raises(fg.BadInput, match="16 rows can't be dealt to 3 mini-batches"):
        check_mini_batches(batch_of(algorithm, trajectories), 3)


# F6, F8: what must change nothing ---------------------------------------------------------------------


@pytest.mark.usefixtures("nan_allowed")
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_F6_garbage_in_masked_slots_changes_nothing(value):
    algorithm = everything_on("gspo")
    params, trajectories = sampled_case(16)
    batch = batch_of(algorithm, trajectories)
    own_rs = batch.chosen & (batch.segments > 0)
    names = ("logp_sampled", "logp_old", "logp_ref", "advantage", "weight")
    dirty = batch.replace(**{n: np.where(own_rs, getattr(batch, n), np.float32(value)) for n in names})
    update = jax.jit(make_update(BIGRAMS, algorithm, sgd(), micro_rows=4, **SETTINGS))
    (clean, metrics), (found, dirty_metrics) = (update(init_learner(params, sgd()), x) for x in (batch, dirty))
    chex.assert_trees_all_equal(found, clean)
    chex.assert_trees_all_equal(dirty_metrics, metrics)
    assert int(found.version) == 1


def test_F8_no_advantage_and_no_kl_leave_the_parameters_unchanged():
    algorithm = fg.flow_grpo(beta=0.0)
    params, trajectories = sampled_case(17)
    batch = batch_of(algorithm, trajectories)
    state, metrics = run(algorithm, params, batch.replace(advantage=np.zeros_like(batch.advantage)))
    chex.assert_trees_all_equal(state.params, params)
    assert float(metrics["grad_norm"]) == 0.0


def test_F8_leaving_out_rows_without_signal_is_exact():
    """The same step of Adam; with nothing to learn at all its memory fades all the same."""
    algorithm, optimizer = fg.flow_grpo(beta=0.0), make_optimizer(learning_rate=0.01)
    params, trajectories = sampled_case(21, groups=8, size=2)
    batch = batch_of(algorithm, trajectories, "by_trajectory")
    idle_r = ~(batch.live & (batch.advantage != 0)).any(axis=1)
    assert 4 < idle_r.sum() < len(idle_r)
    idle = batch.replace(advantage=jnp.zeros_like(batch.advantage))
    for skip in (False, True):
        update = make_update(BIGRAMS, algorithm, optimizer, micro_rows=2, skip_no_signal=skip, **SETTINGS)
        found, _ = jax.jit(update)(init_learner(params, optimizer), batch)
        found, metrics = jax.jit(update)(found, idle)
        if not skip:
            expected = found
    assert_close(found, expected, init_learner(params, optimizer), 1e-5)
    assert (int(found.version), float(metrics["steps"])) == (2, 1.0)


@pytest.mark.usefixtures("nan_allowed")
def test_steps_that_are_not_finite_are_left_out_and_counted():
    """One of two mini-batches is poisoned: the other's step is taken; both: nothing changes but the count."""
    algorithm, optimizer = fg.flow_grpo(beta=0.0), make_optimizer(learning_rate=0.01)
    params, trajectories = sampled_case(18, invalid=0.0)
    batch = jax.tree.map(jnp.asarray, batch_of(algorithm, trajectories, "by_trajectory"))
    update = jax.jit(make_update(BIGRAMS, algorithm, optimizer, mini_batches=2, micro_rows=4, **SETTINGS))
    start = init_learner(params, optimizer)
    half_r = jnp.arange(len(batch.tokens)) < 6
    first = jnp.where(half_r[:, None] & batch.chosen, jnp.nan, batch.advantage)
    state, metrics = update(start, batch.replace(advantage=first))
    assert (int(state.skipped), int(state.version)) == (1, 1)
    assert (float(metrics["skipped"]), float(metrics["steps"])) == (1.0, 1.0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics)))
    alone = batch.replace(weight=jnp.where(half_r[:, None], 0.0, batch.weight))
    chex.assert_trees_all_close(state.params, update(start, alone)[0].params, rtol=1e-6)
    state, metrics = update(state, batch.replace(advantage=jnp.full_like(first, jnp.inf)))
    assert (int(state.skipped), int(state.version), float(metrics["steps"])) == (3, 1, 0.0)


def test_an_empty_batch_takes_no_step():
    params, trajectories = sampled_case(18)
    batch = batch_of(fg.flow_grpo(beta=0.0), trajectories)
    state, metrics = run(fg.flow_grpo(beta=0.0), params, batch.replace(weight=np.zeros_like(batch.weight)))
    chex.assert_trees_all_equal(state, init_learner(params, sgd()))
    assert {float(x) for x in metrics.values()} == {0.0}


# Other policies that are scored -----------------------------------------------------------------------


def test_the_kl_term_pulls_towards_the_reference():
    algorithm, optimizer = fg.grpo(beta=1.0), sgd(0.5)
    params, trajectories = sampled_case(19)
    reference = BIGRAMS.init(jax.random.key(99))
    batch = batch_of(algorithm, trajectories.replace(logp_ref=None))
    batch = batch.replace(advantage=np.zeros_like(batch.advantage))
    update = jax.jit(make_update(BIGRAMS, algorithm, optimizer, **SETTINGS))
    state, kl = init_learner(params, optimizer), []
    for _ in range(5):
        state, metrics = update(state, batch, reference)
        kl.append(float(metrics["kl"]))
    assert kl == sorted(kl, reverse=True)
    assert kl[-1] < 0.7 * kl[0]
    with pytest.raises(fg.BadInput, match=r"grpo needs Batch.logp_ref: score the batch first, or pass ref_params"):
        update(state, batch)


def test_the_reference_may_be_scored_before():
    algorithm = fg.grpo(beta=1.0)
    params, trajectories = sampled_case(19)
    reference = BIGRAMS.init(jax.random.key(99))
    batch = batch_of(algorithm, trajectories.replace(logp_ref=None))
    score = make_score(BIGRAMS, **SETTINGS)
    scored = score_reference(score, reference, batch, micro_rows=5)
    own_rs = batch.chosen & (batch.segments > 0)
    np.testing.assert_allclose(scored.logp_ref[own_rs], score(reference, batch).logp[own_rs], rtol=1e-5)
    update = jax.jit(make_update(BIGRAMS, algorithm, sgd(), **SETTINGS))
    found, expected = (update(init_learner(params, sgd()), *x)[0] for x in ((scored,), (batch, reference)))
    assert_close(found.params, expected.params, params)


def test_pi_old_is_scored_anew_where_it_is_needed():
    """The ratio of the first step is 1 whatever the batch says; with `rescore=False` it is believed."""
    algorithm = fg.gspo()
    params, trajectories = sampled_case(20, drift=0.5)
    batch = batch_of(algorithm, trajectories)
    metrics = run(algorithm, params, batch)[1]
    np.testing.assert_allclose(metrics["ratio"], 1.0, rtol=1e-5)
    assert float(metrics["log_ratio_max"]) > 0.5
    assert abs(float(run(algorithm, params, batch, rescore=False)[1]["ratio"]) - 1.0) > 1e-3


def test_a_critic_is_scored_by_a_function_that_is_passed():
    algorithm = fg.ppo(beta=0.0)
    params, trajectories = sampled_case(22)
    params |= {"value": jnp.zeros(8)}
    plain = make_score(BIGRAMS, **SETTINGS)

    def score(params, batch):
        return plain(params, batch)._replace(value=BIGRAMS.hidden(params, batch.tokens)[0] @ params["value"])

    state, metrics = run(algorithm, params, batch_of(algorithm, trajectories), score=score)
    assert np.asarray(state.params["value"]).all()
    assert float(metrics["value_loss"]) > 0
    with pytest.raises(fg.BadInput, match="ppo needs a critic's values"):
        make_update(BIGRAMS, algorithm, sgd())


# F7, metrics, compilation -----------------------------------------------------------------------------


@pytest.mark.slow
def test_F7_the_ratio_is_one_right_after_sampling():
    """Sampled at temperature 0.7 without the padding token, and updated: the largest log-ratio is rounding."""
    policy, params = tiny_models.POLICY, tiny_models.tiny_params()
    prompt_rs = jax.random.randint(jax.random.key(1), (8, 6), 1, tiny_models.CONFIG.v)
    cache = prefill(policy, params, policy.make_cache(8, 40), prompt_rs[:, :-1], jnp.ones((8, 5), bool))
    rows = start_rows(cache, prompt_rs[:, -1], jax.random.split(jax.random.key(2), 8), jnp.full(8, 20))
    never = jnp.full((8, 1), -1, jnp.int32)
    _, sampled = decode(policy, params, rows, sampling(8, temperature=0.7), never, steps=20, banned=BANNED)
    chosen = np.arange(26) >= 6
    turns = [
        fg.Turn(np.concatenate([prompt_rs[i], sampled.token[:, i]]), chosen, np.pad(sampled.logp[:, i], (6, 0)))
        for i in range(8)
    ]
    records = [fg.Trajectory([turn], outcome=float(i % 2), group=i // 4) for i, turn in enumerate(turns)]
    batch = batch_of(fg.flow_grpo(beta=0.0), fg.collate(records), row_length=64, rows=4)
    ratios = {}
    for temperature in (0.7, 1.0):
        update = make_update(policy, fg.flow_grpo(beta=0.0), sgd(), temperature=temperature, banned=BANNED)
        metrics = jax.jit(update)(init_learner(params, sgd()), batch)[1]
        ratios[temperature] = float(metrics["log_ratio_max"])
    assert ratios[0.7] < 2e-5
    assert ratios[1.0] > 0.1


def test_metrics_are_means_over_the_weights():
    algorithm = fg.flow_grpo(beta=0.05)
    params, trajectories = sampled_case(23)
    batch = batch_of(algorithm, trajectories)
    metrics = run(algorithm, params, batch, micro_rows=3)[1]
    scores = make_score(BIGRAMS, **SETTINGS)(params, batch)
    weight_rs = batch.weight / batch.weight.sum()
    np.testing.assert_allclose(metrics["entropy"], (scores.entropy * weight_rs).sum(), rtol=1e-4)
    largest = np.abs(scores.logp - batch.logp_sampled)[np.asarray(batch.live)].max()
    np.testing.assert_allclose(metrics["log_ratio_max"], largest, rtol=1e-4)
    assert float(metrics["live_tokens"]) == np.asarray(batch.live).sum()
    assert {x.shape for x in metrics.values()} == {()}


def test_seeds_can_be_vmapped_and_nothing_is_traced_twice():
    """Three seeds in one program, with batches of unequal fill, are three single runs."""
    algorithm, optimizer = fg.flow_grpo(beta=0.0), make_optimizer(learning_rate=0.01)
    cases = [sampled_case(seed) for seed in (24, 25, 26)]
    states = [init_learner(params, optimizer) for params, _ in cases]
    batches = [jax.tree.map(jnp.asarray, batch_of(algorithm, trajectories)) for _, trajectories in cases]
    update = make_update(BIGRAMS, algorithm, optimizer, micro_rows=4, **SETTINGS)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def single(state, batch):
        return update(state, batch)

    expected = [single(state, batch) for state, batch in zip(states, batches, strict=True)]
    stack = [jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (states, batches, expected)]
    chex.assert_trees_all_close(jax.jit(jax.vmap(update))(stack[0], stack[1]), stack[2], rtol=2e-4, atol=1e-6)


def test_bad_settings_are_named():
    for setting in ("micro_rows", "epochs", "mini_batches"):
        with pytest.raises(fg.BadInput, match=f"{setting} is 0, but must be at least 1"):
            make_update(BIGRAMS, fg.flow_grpo(), sgd(), **{setting: 0})


def test_scoring_visits_only_rows_with_an_action():
    params, trajectories = sampled_case(27)
    batch = batch_of(fg.flow_grpo(), trajectories)
    score = make_score(BIGRAMS, **SETTINGS)
    found = score_batch(score, params, batch, micro_rows=1)
    acted_r = (batch.chosen & (batch.segments > 0)).any(axis=1)
    assert not acted_r.all()
    np.testing.assert_allclose(found[acted_r], score(params, batch).logp[acted_r], rtol=1e-5, atol=1e-6)
    assert not np.asarray(found)[~acted_r].any()
