"""The update: layouts and micro-batches change nothing, mini-batches are a plain loop, bad steps are left out."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
from cases import batch_of, everything_on, make_case
from tiny_learner import (
    BIGRAMS,
    OPTIMIZERS,
    PLAIN,
    SCORE,
    SETTINGS,
    assert_close,
    compiled,
    fresh,
    init,
    near,
    rows_of,
    sampled_case,
)

import flowgrpo as fg
from flowgrpo.generate.sampler import decode, prefill, sampling, start_rows
from flowgrpo.learner.state import init_learner
from flowgrpo.learner.update import check_mini_batches, make_score, make_update, score_batch, score_reference
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy

SGD = OPTIMIZERS["sgd"]
SPARSE = 5


# F3: layouts, micro-batches, mini-batches --------------------------------------------------------------


@pytest.mark.slow
def test_F3_layouts_give_the_same_parameters():
    """A decoder, in micro-batches of 5: packed, shuffled, padded, one trajectory or turn per row, split at turns."""
    policy = make_policy(DecoderConfig(v=97, d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),)))
    params = policy.init(jax.random.key(0))
    trajectories = near(make_case(11).trajectories, jax.jit(make_score(policy, **SETTINGS)), params, 0.1)
    algorithm = fg.flow_grpo(beta=0.05, entropy_bonus=0.01)
    update = jax.jit(make_update(policy, algorithm, SGD, micro_rows=5, **SETTINGS))
    packed = rows_of(algorithm, trajectories, rows=48)
    order = np.random.default_rng(0).permutation(48)
    layouts = [rows_of(algorithm, trajectories, layout, rows=48) for layout in ("by_trajectory", "by_turn")]
    expected, metrics = update(init_learner(params, SGD), packed)
    assert float(metrics["clip_low_fraction"] + metrics["clip_high_fraction"]) > 0
    for batch in (jax.tree.map(lambda x_rs: x_rs[order], packed), *layouts):
        state, found = update(init_learner(params, SGD), batch)
        assert_close(state.params, expected.params, params)
        for name, value in metrics.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "name", ["gspo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("flow_grpo", "kimi", "dpo"))]
)
def test_F3_first_passes_and_micro_batches_equal_the_unsplit_gradient(name):
    """Every option on, sequence-level correction among them: micro-batches of 2 and the plain gradient of the loss."""
    algorithm = everything_on(name)
    params, trajectories = sampled_case(12)
    batch = rows_of(algorithm, trajectories, "by_trajectory")
    state, metrics = compiled(name, rescore=False)(fresh(params), batch)
    loss_of = lambda params: algorithm.loss(SCORE(params, batch), batch)[0]  # noqa: E731
    loss, grads = jax.jit(jax.value_and_grad(loss_of))(params)
    assert_close(state.params, jax.tree.map(jnp.subtract, params, grads), params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flow_grpo", "gspo"])
def test_F3_devices_share_the_work(name):
    """Rows dealt over three devices, which do not divide them evenly: the same parameters and figures."""
    algorithm = everything_on(name)
    params, trajectories = sampled_case(12)
    batch = rows_of(algorithm, trajectories, "by_trajectory")
    assert len(batch.tokens) % 3
    mesh = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    (state, metrics), (other, others) = (
        compiled(name, rescore=True, **settings)(fresh(params), batch) for settings in ({}, {"mesh": mesh})
    )
    assert_close(state.params, other.params, params)
    assert set(metrics) == set(others)
    for figure in metrics:
        np.testing.assert_allclose(metrics[figure], others[figure], rtol=1e-4, atol=1e-5, err_msg=figure)


def test_F3_mini_batches_and_epochs_are_a_plain_loop():
    """Two epochs of three blocks of rows, each a step on three times its sum; a fourth is empty and takes none."""
    params, trajectories = sampled_case(13)
    batch = rows_of(PLAIN, trajectories, "by_trajectory")
    state, metrics = compiled("plain", "adam", mini_batches=4, epochs=2)(fresh(params, "adam"), batch)

    @jax.jit
    def step(params, memory, part):
        grads = jax.grad(lambda params: 3 * PLAIN.loss(SCORE(params, part), part)[0])(params)
        with jax.numpy_dtype_promotion("standard"):
            updates, memory = OPTIMIZERS["adam"].update(grads, memory, params)
        return optax.apply_updates(params, updates), memory

    expected, memory = params, OPTIMIZERS["adam"].init(params)
    for start in (0, 4, 8) * 2:
        part = jax.tree.map(lambda x_rs: x_rs[start : start + 4], batch)  # noqa: B023
        expected, memory = step(expected, memory, part)
    assert_close(state.params, expected, params)
    assert (int(state.version), float(metrics["steps"]), int(state.skipped)) == (1, 6.0, 0)


@pytest.mark.slow
def test_F3_mini_batches_average_to_the_gradient_of_the_batch():
    """With a rate too small to move anything, three mini-batches together go three times as far as the whole."""
    params, trajectories = sampled_case(14)
    batch = rows_of(PLAIN, trajectories, "by_trajectory")
    whole = compiled()(fresh(params), batch)[0].params
    update = jax.jit(make_update(BIGRAMS, PLAIN, optax.sgd(1e-3), mini_batches=4, **SETTINGS))
    parts = update(init_learner(params, optax.sgd(1e-3)), batch)[0].params
    scaled = jax.tree.map(lambda a, b: b + (a - b) * 1e3 / 3, parts, params)
    assert_close(scaled, whole, params, 1e-2)


@pytest.mark.slow
def test_a_mini_batch_without_a_row_takes_no_step():
    params, trajectories = sampled_case(3)
    batch = rows_of(PLAIN, trajectories, "by_trajectory")
    few = jax.tree.map(lambda x: x[:2], batch)
    state, metrics = compiled("plain", "adam", mini_batches=4)(fresh(params, "adam"), few)
    assert (float(metrics["skipped"]), float(metrics["steps"])) == (0.0, 2.0)
    assert int(state.skipped) == 0


def test_mini_batches_that_split_a_trajectory_are_named():
    _, trajectories = sampled_case(15)
    check_mini_batches(batch_of(PLAIN, trajectories, "by_trajectory"), 4)
    check_mini_batches(batch_of(PLAIN, trajectories, "by_turn"), 4)
    with pytest.raises(fg.BadInput, match=r"trajectory \d+ has tokens in \d of 4 mini-batches"):
        check_mini_batches(batch_of(PLAIN, trajectories, rows=4), 4)
    with pytest.raises(fg.BadInput, match=r"group -?\d+ has tokens in \d of 4"):
        check_mini_batches(batch_of(PLAIN, trajectories, "by_trajectory"), 4, by="group")


# F6, F8: what must change nothing ---------------------------------------------------------------------


@pytest.mark.usefixtures("nan_allowed")
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_F6_garbage_in_masked_slots_changes_nothing(value):
    params, trajectories = sampled_case(16)
    batch = rows_of(everything_on("gspo"), trajectories)
    own_rs = batch.chosen & (batch.segments > 0)
    names = ("logp_sampled", "logp_old", "logp_ref", "advantage", "weight")
    dirty = batch.replace(**{n: jnp.where(own_rs, getattr(batch, n), value) for n in names})
    clean, found = (compiled("gspo", rescore=False)(fresh(params), x) for x in (batch, dirty))
    chex.assert_trees_all_equal(found, clean)
    assert int(found[0].version) == 1


def test_F8_no_advantage_and_no_kl_leave_the_parameters_unchanged():
    params, trajectories = sampled_case(17)
    batch = rows_of(PLAIN, trajectories)
    state, metrics = compiled()(fresh(params), batch.replace(advantage=jnp.zeros_like(batch.advantage)))
    chex.assert_trees_all_equal(state.params, params)
    assert float(metrics["grad_norm"]) == 0.0
    assert float(metrics["live_tokens"]) > 0


@pytest.mark.slow
def test_F8_leaving_out_rows_without_signal_is_exact():
    """The same step of Adam; with nothing to learn at all its memory fades all the same."""
    params, trajectories = sampled_case(SPARSE, groups=6, size=2)
    batch = rows_of(PLAIN, trajectories, "by_trajectory")
    idle_r = ~(batch.live & (batch.advantage != 0)).any(axis=1)
    assert 4 < idle_r.sum() < 12
    idle = batch.replace(advantage=jnp.zeros_like(batch.advantage))
    results = []
    for skip in (False, True):
        update = compiled("plain", "adam", skip_no_signal=skip)
        results.append(update(update(fresh(params, "adam"), batch)[0], idle))
    assert_close(results[1][0], results[0][0], fresh(params, "adam"), 1e-5)
    assert (int(results[1][0].version), float(results[1][1]["steps"])) == (2, 1.0)


@pytest.mark.usefixtures("nan_allowed")
def test_steps_that_are_not_finite_are_left_out_and_counted():
    """One of three mini-batches is poisoned: the others' steps are taken; all: nothing changes but the count."""
    params, trajectories = sampled_case(18, invalid=0.0)
    batch = rows_of(PLAIN, trajectories, "by_trajectory")
    update, start = compiled("plain", "adam", mini_batches=4, epochs=2), fresh(params, "adam")
    poisoned = batch.replace(advantage=batch.advantage.at[:4].multiply(jnp.nan))
    state, metrics = update(start, poisoned)
    assert (int(state.skipped), int(state.version)) == (2, 1)
    assert (float(metrics["skipped"]), float(metrics["steps"])) == (2.0, 4.0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics)))
    again, metrics = update(state, batch.replace(advantage=jnp.full_like(batch.advantage, jnp.inf)))
    assert (int(again.skipped), int(again.version), float(metrics["steps"])) == (8, 1, 0.0)
    chex.assert_trees_all_equal((again.params, again.optimizer), (state.params, state.optimizer))


def test_an_empty_batch_takes_no_step():
    params, trajectories = sampled_case(18)
    batch = rows_of(PLAIN, trajectories)
    state, metrics = compiled()(fresh(params), batch.replace(weight=jnp.zeros_like(batch.weight)))
    chex.assert_trees_all_equal(state, fresh(params))
    assert not any(np.asarray(x).any() for x in metrics.values())


# Other policies that are scored -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_kl_term_pulls_towards_the_reference():
    """With no advantages, towards the parameters that are passed, or what they were scored to before."""
    algorithm, optimizer = fg.grpo(beta=1.0), optax.sgd(0.5)
    params, trajectories = sampled_case(19)
    reference = init(jax.random.key(99))
    batch = rows_of(algorithm, trajectories.replace(logp_ref=None))
    batch = batch.replace(advantage=jnp.zeros_like(batch.advantage))
    update = jax.jit(make_update(BIGRAMS, algorithm, optimizer, **SETTINGS))
    states, kl = [init_learner(params, optimizer)], []
    for _ in range(5):
        state, metrics = update(states[-1], batch, reference)
        states.append(state)
        kl.append(float(metrics["kl"]))
    assert kl == sorted(kl, reverse=True)
    assert kl[-1] < 0.7 * kl[0]
    scored = score_reference(SCORE, reference, batch, micro_rows=5)
    assert_close(update(states[0], scored)[0].params, states[1].params, params)
    with pytest.raises(fg.BadInput, match=r"grpo needs Batch.logp_ref: score the batch first, or pass ref_params"):
        update(states[0], batch)


@pytest.mark.slow
def test_pi_old_is_scored_anew_where_it_is_needed():
    """The ratio of the first step is 1 whatever the batch says."""
    params, trajectories = sampled_case(20, drift=0.5)
    update = jax.jit(make_update(BIGRAMS, fg.gspo(), SGD, micro_rows=2, **SETTINGS))
    metrics = update(fresh(params), rows_of(fg.gspo(), trajectories))[1]
    np.testing.assert_allclose(metrics["ratio"], 1.0, rtol=1e-5)
    assert float(metrics["log_ratio_max"]) > 0.5


@pytest.mark.slow
def test_a_critic_is_scored_by_a_function_that_is_passed():
    algorithm = fg.ppo(beta=0.0)
    params, trajectories = sampled_case(22)
    params |= {"value": jnp.zeros(8)}
    plain = make_score(BIGRAMS, **SETTINGS)

    def score(params, batch):
        return plain(params, batch)._replace(value=BIGRAMS.hidden(params, batch.tokens)[0] @ params["value"])

    update = jax.jit(make_update(BIGRAMS, algorithm, SGD, score=score))
    state, metrics = update(fresh(params), rows_of(algorithm, trajectories))
    assert np.asarray(state.params["value"]).all()
    assert float(metrics["value_loss"]) > 0
    with pytest.raises(fg.BadInput, match="ppo needs a critic's values"):
        make_update(BIGRAMS, algorithm, SGD)


def test_scoring_visits_only_rows_with_an_action():
    params, trajectories = sampled_case(27)
    batch = rows_of(PLAIN, trajectories)
    found = score_batch(SCORE, params, batch, micro_rows=1)
    acted_r = np.asarray((batch.chosen & (batch.segments > 0)).any(axis=1))
    assert not acted_r.all()
    np.testing.assert_allclose(found[acted_r], SCORE(params, batch).logp[acted_r], rtol=1e-5, atol=1e-6)
    assert not np.asarray(found)[~acted_r].any()


# F7, metrics, compilation -----------------------------------------------------------------------------


@pytest.mark.slow
def test_F7_the_ratio_is_one_right_after_sampling():
    """Sampled at temperature 0.7 without the padding token, and updated: the largest log-ratio is rounding."""
    policy, params, banned = tiny_models.POLICY, tiny_models.tiny_params(), tiny_models.BANNED
    prompt_rs = jax.random.randint(jax.random.key(1), (8, 6), 1, tiny_models.CONFIG.v)
    cache = prefill(policy, params, policy.make_cache(8, 40), prompt_rs[:, :-1], jnp.ones((8, 5), bool))
    rows = start_rows(cache, prompt_rs[:, -1], jax.random.split(jax.random.key(2), 8), jnp.full(8, 20))
    never = jnp.full((8, 1), -1, jnp.int32)
    _, sampled = decode(policy, params, rows, sampling(8, temperature=0.7), never, steps=20, banned=banned)
    chosen = np.arange(26) >= 6
    turns = [
        fg.Turn(np.concatenate([prompt_rs[i], sampled.token[:, i]]), chosen, np.pad(sampled.logp[:, i], (6, 0)))
        for i in range(8)
    ]
    records = [fg.Trajectory([turn], outcome=float(i % 2), group=i // 4) for i, turn in enumerate(turns)]
    batch = batch_of(PLAIN, fg.collate(records), row_length=64, rows=4)
    ratios = {}
    for temperature in (0.7, 1.0):
        update = make_update(policy, PLAIN, SGD, temperature=temperature, banned=banned)
        ratios[temperature] = float(jax.jit(update)(fresh(params), batch)[1]["log_ratio_max"])
    assert ratios[0.7] < 2e-5
    assert ratios[1.0] > 0.1


def test_metrics_are_means_over_the_weights():
    params, trajectories = sampled_case(23)
    batch = rows_of(PLAIN, trajectories)
    metrics = compiled()(fresh(params), batch)[1]
    scores, live_rs = SCORE(params, batch), np.asarray(batch.live)
    weight_rs = batch.weight / batch.weight.sum()
    np.testing.assert_allclose(metrics["entropy"], (scores.entropy * weight_rs).sum(), rtol=1e-4)
    log_ratio_rs = np.abs(scores.logp - batch.logp_sampled)[live_rs]
    np.testing.assert_allclose(metrics["log_ratio_max"], log_ratio_rs.max(), rtol=1e-4)
    assert float(metrics["live_tokens"]) == live_rs.sum()
    assert {x.shape for name, x in metrics.items() if not name.endswith(("_by_turn", "_histogram"))} == {()}


@pytest.mark.slow
def test_seeds_can_be_vmapped_and_nothing_is_traced_twice():
    """Three seeds in one program, with batches of unequal fill, are three single runs."""
    cases = [sampled_case(seed) for seed in (24, 25, 26)]
    states = [fresh(params, "adam") for params, _ in cases]
    batches = [rows_of(PLAIN, trajectories) for _, trajectories in cases]
    update = make_update(BIGRAMS, PLAIN, OPTIMIZERS["adam"], micro_rows=1, **SETTINGS)
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
            make_update(BIGRAMS, PLAIN, SGD, **{setting: 0})
