"""The update: layouts and micro-batches change nothing, mini-batches are a plain loop, bad steps are left out."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
from family_cases import batch_of, everything_on, make_case
from tiny_learner import (
    BIGRAMS,
    DIAGNOSTICS,
    OPTIMIZERS,
    PLAIN,
    SCORE,
    SETTINGS,
    assert_close,
    assert_figures,
    compiled,
    fresh,
    init,
    near,
    rows_of,
    sampled_case,
    unsplit,
)

import flowgrpo as fg
from flowgrpo.batching.prefix_tree import count_tokens
from flowgrpo.generate.sampler import decode, make_sampling, prefill, start_rows
from flowgrpo.learner.update import check_mini_batches, in_dtype, make_score, make_update, score_reference, split_rows
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.trainable import cast

GSPO, DPO, KIMI = map(everything_on, ("gspo", "dpo", "kimi"))
REFERENCE = init(jax.random.key(99))
THREE = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
SPARSE = {"seed": 5, "groups": 6, "size": 2}  # half of its groups have no signal


# F3: layouts, micro-batches, mini-batches --------------------------------------------------------------


def check_unsplit(algorithm, batch, diagnostics=DIAGNOSTICS, mesh=None, **settings):
    """Compare one step, which scores pi_old and the reference itself, with the gradient over all rows at once."""
    params, _ = sampled_case(12)
    update = compiled(
        algorithm, policy=BIGRAMS._replace(mesh=mesh), skip_no_signal=True, diagnostics=diagnostics, **settings
    )
    state, metrics = update(fresh(params), batch.replace(logp_ref=None), REFERENCE)
    whole = batch.replace(logp_ref=SCORE(REFERENCE, batch).logp)
    if "logp_old" in algorithm.needs:
        whole = whole.replace(logp_old=SCORE(params, batch).logp)
    grads, figures = unsplit(algorithm, diagnostics=diagnostics)(params, whole)
    assert_close(state.params, jax.tree.map(jnp.subtract, params, grads), params)
    on_edges = ("ratio_histogram",)  # of on-policy tokens, whose log-ratio is 0 but for rounding
    assert_figures(*({name: x for name, x in each.items() if name not in on_edges} for each in (metrics, figures)))
    assert update._cache_size() <= 2, "one for plain rows and one for trees"


@pytest.mark.parametrize("layout", ["packed", "by_trajectory", "trees", "shuffled"])
def test_F3_layouts_in_micro_batches_have_the_unsplit_gradient(layout):
    """Step and figures of gspo with every option on, two rows at a time; idle rows stay, as KL and entropy act."""
    _, trajectories = sampled_case(12)
    batch = rows_of(GSPO, trajectories, "packed" if layout == "shuffled" else layout)
    batch = batch.replace(advantage=jnp.where(batch.trajectory % 3 == 0, 0.0, batch.advantage))
    if layout == "shuffled":
        order = np.random.default_rng(0).permutation(len(batch.tokens))
        batch = jax.tree.map(lambda x_rs: x_rs[order], batch)
    check_unsplit(GSPO, batch)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        pytest.param(DPO, {"diagnostics": None}, id="dpo"),
        pytest.param(KIMI, {"diagnostics": None}, id="kimi", marks=pytest.mark.slow),
        pytest.param(GSPO, {"mesh": THREE}, id="gspo-devices", marks=pytest.mark.slow),
        pytest.param(DPO, {"mesh": THREE, "micro_rows": 16}, id="dpo-devices", marks=pytest.mark.slow),
    ],
)
def test_F3_sequences_over_rows_and_devices_have_the_unsplit_gradient(algorithm, settings):
    """The sides of a pair lie in different micro-batches and on different devices, which rows do not divide evenly."""
    check_unsplit(algorithm, rows_of(algorithm, sampled_case(12)[1], "by_trajectory"), **settings)


def begun_alike(trajectories: fg.Trajectories) -> fg.Trajectories:
    """The trajectories with contexts that begin alike within a group; in one that appends they have three words."""
    slot_l, group_n = np.arange(trajectories.tokens.shape[2]), trajectories.group
    chosen_ntl = trajectories.chosen & (slot_l >= 3)
    said_ntl = slot_l + np.abs(group_n)[:, None, None] % 80
    tokens_ntl = np.where(np.cumsum(chosen_ntl, axis=2) == 0, said_ntl, trajectories.tokens).astype(np.int32)
    begins_nt = trajectories.starts_context & (group_n != group_n.min())[:, None]
    return trajectories.replace(tokens=tokens_ntl, chosen=chosen_ntl, starts_context=begins_nt)


@pytest.mark.slow
def test_F10_F3_layouts_give_a_decoder_the_same_parameters():
    """In micro-batches of 5: packed, shuffled, padded, one trajectory or turn per row, and in trees."""
    policy = make_policy(DecoderConfig(v=97, d=16, h=2, k=1, e=8, f=16, windows=(None,), ropes=(Rope(),)))
    params = policy.init(jax.random.key(0))
    trajectories = near(begun_alike(make_case(11).trajectories), jax.jit(make_score(policy, **SETTINGS)), params, 0.1)
    algorithm = fg.flow_grpo(beta=0.05, entropy_bonus=0.01)
    update = compiled(algorithm, policy=policy, micro_rows=5)
    packed = rows_of(algorithm, trajectories, rows=48)
    order = np.random.default_rng(0).permutation(48)
    layouts = [rows_of(algorithm, trajectories, layout, rows=48) for layout in ("by_trajectory", "by_turn", "trees")]
    laid_out, computed = count_tokens(layouts[-1])
    assert computed < 0.9 * laid_out
    expected, metrics = update(fresh(params), packed)
    assert float(metrics["clip_low_fraction"] + metrics["clip_high_fraction"]) > 0
    for batch in (jax.tree.map(lambda x_rs: x_rs[order], packed), *layouts):
        state, found = update(fresh(params), batch)
        assert_close(state.params, expected.params, params)
        for name, value in metrics.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


# Steps ------------------------------------------------------------------------------------------------

STEPS = compiled(PLAIN, "adam", mini_batches=4, epochs=2, skip_no_signal=True, diagnostics=None)


@jax.jit
def plain_step(params, memory, part):
    """Take a step on three times the sum over a block of rows."""
    loss, grads = jax.value_and_grad(lambda params: 3 * PLAIN.loss(SCORE(params, part), part)[0])(params)
    with jax.numpy_dtype_promotion("standard"):
        updates, memory = OPTIMIZERS["adam"].update(grads, memory, params)
    return optax.apply_updates(params, updates), memory, loss, optax.tree.norm(grads)


def test_F3_F8_mini_batches_and_epochs_equal_a_plain_loop():
    """Two epochs of three blocks of rows; an empty fourth takes no step; leaving out idle rows is exact."""
    params, trajectories = sampled_case(**SPARSE)
    batch = rows_of(PLAIN, trajectories, "by_trajectory")
    batch = batch.replace(segments=batch.segments.at[9:].set(0))  # one row is left of the third block
    idle_r = ~(batch.loss_mask & (batch.advantage != 0)).any(axis=1)
    assert 4 < idle_r.sum() < 12
    state, metrics = STEPS(fresh(params, "adam"), batch)
    expected, memory, figures = params, OPTIMIZERS["adam"].init(params), []
    for start in (0, 4, 8) * 2:
        part = jax.tree.map(lambda x_rs: x_rs[start : start + 4], batch)  # noqa: B023
        expected, memory, *row = plain_step(expected, memory, part)
        figures.append(row)
    assert_close(state.params, expected, params)
    assert (int(state.version), float(metrics["steps"]), int(state.skipped)) == (1, 6.0, 0)
    np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], np.mean(figures, axis=0), rtol=1e-4)
    seen_rs = (batch.loss_mask & ~idle_r[:, None]).at[4:].set(False)  # those of the first step
    far_rs = jnp.abs(SCORE(params, batch).logp - batch.logp_sampled)[seen_rs]
    np.testing.assert_allclose(metrics["log_ratio_max"], far_rs.max(), rtol=1e-4)


def test_F3_fewer_rows_than_mini_batches_are_a_mini_batch_each():
    params, trajectories = sampled_case(18, invalid=0.0)
    batch = jax.tree.map(lambda x_rs: x_rs[:2], rows_of(PLAIN, trajectories, "by_trajectory"))
    many, two = (compiled(PLAIN, "adam", mini_batches=count, diagnostics=None) for count in (5, 2))
    (state, metrics), (expected, figures) = many(fresh(params, "adam"), batch), two(fresh(params, "adam"), batch)
    assert_close(state.params, expected.params, params, 1e-6)
    assert (float(metrics["steps"]), int(state.version)) == (float(figures["steps"]), 1) == (2.0, 1)


@pytest.mark.usefixtures("nan_allowed")
def test_nonfinite_steps_are_skipped_and_counted():
    """One of three mini-batches is poisoned: the others' steps are taken. All gradients overflow: none is."""
    params, trajectories = sampled_case(18, invalid=0.0)
    batch, start = rows_of(PLAIN, trajectories, "by_trajectory"), fresh(params, "adam")
    state, metrics = STEPS(start, batch.replace(advantage=batch.advantage.at[:4].multiply(jnp.nan)))
    assert (int(state.skipped), int(state.version)) == (2, 1)
    assert (float(metrics["skipped"]), float(metrics["steps"])) == (2.0, 4.0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics)))
    again, metrics = STEPS(state, batch.replace(advantage=jnp.full_like(batch.advantage, 1e25)))
    assert (int(again.skipped), int(again.version), float(metrics["steps"])) == (8, 1, 0.0)
    chex.assert_trees_all_equal((again.params, again.optimizer), (state.params, state.optimizer))


def test_F8_zero_gradients_are_steps_and_empty_mini_batches_are_not():
    params, trajectories = sampled_case(17)
    batch, start = rows_of(PLAIN, trajectories, "by_trajectory"), fresh(params, "adam")
    state, metrics = STEPS(start, batch.replace(advantage=jnp.zeros_like(batch.advantage)))
    chex.assert_trees_all_equal(state.params, params)
    assert (float(metrics["grad_norm"]), float(metrics["steps"]), int(state.version)) == (0.0, 6.0, 1)
    assert float(metrics["live_tokens"]) > 0
    state, metrics = STEPS(start, batch.replace(weight=jnp.zeros_like(batch.weight)))
    chex.assert_trees_all_equal(state, start)
    assert not any(np.asarray(x).any() for x in metrics.values())


@pytest.mark.usefixtures("nan_allowed")
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_F6_garbage_in_masked_slots_changes_nothing(value):
    params, trajectories = sampled_case(16)
    batch = rows_of(GSPO, trajectories).replace(logp_ref=None)
    own_rs = batch.chosen & (batch.segments > 0)
    names = ("logp_sampled", "logp_old", "advantage", "weight")
    dirty = batch.replace(**{n: jnp.where(own_rs, getattr(batch, n), value) for n in names})
    update = compiled(GSPO, skip_no_signal=True, diagnostics=DIAGNOSTICS)
    clean, found = (update(fresh(params), x, REFERENCE) for x in (batch, dirty))
    chex.assert_trees_all_equal(found, clean)
    assert int(found[0].version) == 1


@pytest.mark.parametrize("count", [0, 1, 3, 5, 7])
def test_micro_batches_cover_the_wanted_rows(count):
    wanted_r = jnp.asarray(np.random.default_rng(0).permutation(7) < count)
    rows = split_rows(wanted_r, 3)
    assert (int(rows.count), len(rows.row_i), int(rows.num_wanted)) == (-(-count // 3), 9, count)
    assert rows.row_i[:count].tolist() == np.flatnonzero(wanted_r).tolist()
    assert split_rows(wanted_r, 10).size == 7


# Scores -----------------------------------------------------------------------------------------------


def test_trees_need_a_policy_that_reads_them():
    params, trajectories = sampled_case(16)
    with pytest.raises(fg.BadInput, match="hidden_tree"):
        make_score(BIGRAMS._replace(hidden_tree=None))(params, rows_of(PLAIN, trajectories, "trees"))


def test_scoring_visits_only_rows_with_an_action():
    params, trajectories = sampled_case(27)
    batch = rows_of(PLAIN, trajectories)
    batch = batch.replace(chosen=batch.chosen | (batch.segments == 0))  # where nothing stands, nothing was chosen
    found = score_reference(SCORE, params, batch, micro_rows=3).logp_ref
    acted_r = np.asarray((batch.chosen & (batch.segments > 0)).any(axis=1))
    assert not acted_r.all()
    np.testing.assert_allclose(found[acted_r], SCORE(params, batch).logp[acted_r], rtol=1e-5, atol=1e-6)
    assert not np.asarray(found)[~acted_r].any()


def test_parameters_are_cast_to_the_compute_dtype_for_scoring():
    def score(params, _batch):
        return params

    params = {"float": np.ones(2, np.float32), "whole": np.ones(2, np.int32)}
    found = in_dtype(score, jnp.bfloat16)(params, None)
    assert {name: x.dtype for name, x in found.items()} == {"float": jnp.bfloat16, "whole": np.int32}
    assert in_dtype(score, None) is score


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("bfloat16", 0.04)])
def test_F7_the_ratio_is_one_right_after_sampling(dtype, bound):
    """Sampled at temperature 0.7 without the padding token, and updated: the largest log-ratio is rounding."""
    params, banned = tiny_models.tiny_params(), tiny_models.BANNED
    policy, sampler = make_policy(tiny_models.CONFIG, dtype=dtype), cast(params, dtype)
    prompt_rs = jax.random.randint(jax.random.key(1), (8, 6), 1, tiny_models.CONFIG.v)

    @jax.jit
    def sample():
        cache = prefill(policy, sampler, policy.make_cache(8, 40), prompt_rs[:, :-1], jnp.ones((8, 5), bool))
        rows = start_rows(cache, prompt_rs[:, -1], jax.random.split(jax.random.key(2), 8), jnp.full(8, 20))
        never = jnp.full((8, 1), -1, jnp.int32)
        return decode(policy, sampler, rows, make_sampling(8, temperature=0.7), never, steps=20, banned=banned)[1]

    sampled = jax.device_get(sample())
    chosen = np.arange(26) >= 6
    turns = [
        fg.Turn(np.concatenate([prompt_rs[i], sampled.token[:, i]]), chosen, np.pad(sampled.logp_sampled[:, i], (6, 0)))
        for i in range(8)
    ]
    records = [fg.Trajectory([turn], outcome=float(i % 2), group=i // 4) for i, turn in enumerate(turns)]
    batch = batch_of(PLAIN, fg.collate(records), row_length=64, rows=4)

    @jax.jit
    def far(temperature):
        settings = {"temperature": temperature, "banned": banned, "compute_dtype": dtype, "diagnostics": DIAGNOSTICS}
        update = make_update(policy, PLAIN, OPTIMIZERS["sgd"], fg.learner.UpdateSettings(**settings))
        return update(fresh(params), batch)[1]["log_ratio_max"]

    assert float(far(0.7)) < bound
    assert float(far(1.0)) > 0.1


# What is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "mini_batches", "by"),
    [("packed", 4, "trajectory"), ("packed", 2, "trajectory"), ("by_trajectory", 4, "group")],
)
def test_mini_batches_that_split_a_trajectory_are_named(layout, mini_batches, by):
    """The first that has tokens in two of them, by a loop over the rows, and the most that any has."""
    batch, found = batch_of(PLAIN, sampled_case(15)[1], layout, **({"rows": 4} if layout == "packed" else {})), {}
    id_rs = np.asarray(getattr(batch, by))
    least_rs = id_rs == id_rs[batch.chosen].min()
    least_rs[least_rs.any(axis=1).argmax()] = False  # one keeps its tokens of a row alone
    batch = batch.replace(chosen=batch.chosen & ~least_rs)
    for row, own_s in enumerate(batch.chosen & (batch.segments > 0)):
        for name in id_rs[row][own_s].tolist():
            found.setdefault(name, set()).add(row // (len(batch.tokens) // mini_batches))
    first = min(name for name, blocks in found.items() if len(blocks) > 1)
    said = f"{by} {first} has tokens in {max(map(len, found.values()))} of {mini_batches} mini-batches"
    with pytest.raises(fg.BadInput, match=said):
        check_mini_batches(batch, mini_batches, by=by)


@pytest.mark.parametrize("layout", ["by_trajectory", "by_turn"])
def test_mini_batches_of_plain_layouts_split_no_trajectory(layout):
    check_mini_batches(batch_of(PLAIN, sampled_case(15)[1], layout), 4)


def test_missing_inputs_of_an_update_are_named():
    with pytest.raises(fg.BadInput, match="ppo needs a critic's values"):
        make_update(BIGRAMS, fg.ppo(beta=0.0), OPTIMIZERS["sgd"])
    params, trajectories = sampled_case(12)
    batch = rows_of(DPO, trajectories).replace(logp_ref=None)
    with pytest.raises(fg.BadInput, match=r"dpo needs Batch.logp_ref: score the batch first, or pass ref_params"):
        jax.eval_shape(
            make_update(BIGRAMS, DPO, OPTIMIZERS["sgd"], fg.learner.UpdateSettings(**SETTINGS)), fresh(params), batch
        )
