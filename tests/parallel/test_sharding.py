"""Sharding: parsing of meshes, sharding by one table of rules, states sharded like their parameters."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
from family_cases import everything_on, make_case
from jax.sharding import PartitionSpec
from tiny_learner import (
    BIGRAMS,
    DIAGNOSTICS,
    OPTIMIZERS,
    PLAIN,
    SETTINGS,
    assert_close,
    fresh,
    init,
    near,
    rows_of,
    sampled_case,
)
from tree_cases import Context, build_trees

import flowgrpo as fg
from flowgrpo.learner.adam8bit import scale_by_adam_8bit
from flowgrpo.learner.state import adamw, init_learner, scale_by_adafactor
from flowgrpo.learner.update import UpdateSettings, make_score, make_update
from flowgrpo.models.attention import AttentionKernels, attend, attend_cache, visible
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.lora import LoraConfig, LoraParams, adapter_axes, lora_policy
from flowgrpo.models.trainable import ADAPTER
from flowgrpo.parallel import sharding
from flowgrpo.parallel.row_sharding import PmapAxis, place_on_devices
from flowgrpo.training.checkpoints import Checkpoints
from flowgrpo.training.stages import init_train_state

AXES = {"embed": "vd", "mix": "df", "unembed": "dv"}  # of the policy of pairs of words


def mesh_of(text: str):
    return sharding.make_mesh(sharding.parse_mesh(text))


# Meshes and rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no axis"),
        ("data=4,model=2", "'model' is no axis; write data=4,fsdp=2,tensor=1"),
        ("data=4,data=2", "data is given twice"),
        ("data=many", "data is 'many', but must be a whole number of at least 1"),
        ("data=-8", "data is '-8'"),
        ("fsdp=0", "fsdp is '0'"),
        ("tensor", "tensor is ''"),
        ("data=3,fsdp=2", "data=3,fsdp=2,tensor=1 has 6 devices, but there are 8"),
    ],
)
def test_an_impossible_mesh_raises_one_sentence(text, message):
    with pytest.raises(fg.BadInput, match=message):
        sharding.parse_mesh(text, 8)


def test_axes_that_are_not_named_have_one_device():
    assert sharding.parse_mesh(" tensor = 4 , data=2", 8) == {"data": 2, "fsdp": 1, "tensor": 4}
    assert dict(mesh_of("fsdp=8").shape) == {"data": 1, "fsdp": 8, "tensor": 1}
    with pytest.raises(fg.BadInput, match="has 4 devices, but there are 8"):
        sharding.make_mesh({"data": 4})
    with pytest.raises(fg.BadInput, match="'rows' is no axis of a mesh"):
        sharding.make_mesh({"rows": 8})


def test_rules_shard_axes_whose_size_fits_and_replicate_others():
    mesh = mesh_of("data=1,fsdp=2,tensor=4")
    assert sharding.partition_spec("ndhe", (3, 32, 4, 8), mesh) == PartitionSpec(None, "fsdp", "tensor", None)
    assert sharding.partition_spec("ndke", (3, 32, 2, 8), mesh) == PartitionSpec(None, "fsdp", None, None)
    assert sharding.unsharded_axes("ndke", (3, 32, 2, 8), mesh) == "k"
    assert sharding.partition_spec("vd", (97, 31), mesh) == PartitionSpec(None, None)
    assert sharding.unsharded_axes("vd", (97, 31), mesh) == "vd"
    assert sharding.unsharded_axes("vd", (97, 31), mesh_of("data=8")) == ""
    with pytest.raises(fg.BadInput, match=r"shape \[3, 32\] can't have the axes 'd'"):
        sharding.partition_spec("d", (3, 32), mesh)


def test_explain_sharding_lists_every_parameter():
    mesh, axes = mesh_of("data=1,fsdp=2,tensor=4"), sharding.decoder_axes(tiny_models.CONFIG)
    params = jax.eval_shape(tiny_models.tiny_params)
    table = sharding.explain_sharding(params, mesh, axes).splitlines()
    assert len(table) == len(params) + 2
    (k,) = [line.split() for line in table if line.startswith("k ")]
    assert k == ["k", "ndke", "3x32x2x8", "d:fsdp", "0.003", "k"]
    local_bytes = sum(
        np.prod(s.shard_shape(x.shape)) * 4 for x, s in pairs(params, sharding.state_shardings(params, mesh, axes))
    )
    assert table[-1].split() == ["all", f"{local_bytes / 1e6:.3f}"]
    with pytest.raises(fg.BadInput, match="no tree like that of the parameters"):
        sharding.explain_sharding(params, mesh, {"embed": "vd"})


def pairs(tree, other):
    return zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)


# State ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [None, scale_by_adam_8bit()])
def test_optimizer_state_is_sharded_like_its_parameter(base):
    mesh, axes = mesh_of("fsdp=2,tensor=4"), sharding.decoder_axes(tiny_models.CONFIG)
    optimizer = adamw(0.1, base=base)
    state = jax.eval_shape(lambda: init_learner(tiny_models.tiny_params(), optimizer))
    shardings = sharding.state_shardings(state, mesh, axes)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    assert shardings.version.spec == shardings.skipped.spec == PartitionSpec()
    by_shape = {x.shape: s.spec for x, s in pairs(state.params, shardings.params)}
    memory = [(x, s.spec) for x, s in pairs(state.optimizer, shardings.optimizer)]
    assert all(spec == PartitionSpec() for x, spec in memory if not x.shape)
    alike = [(by_shape[x.shape], spec) for x, spec in memory if x.shape in by_shape]
    assert len(alike) >= len(state.params) // 2
    assert all(tuple(a) == tuple(b) for a, b in alike)


def test_factored_optimizer_state_is_sharded_along_a_suitable_axis():
    optimizer = adamw(0.1, base=scale_by_adafactor(min_axis=8))
    state = jax.eval_shape(lambda: init_learner(tiny_models.tiny_params(), optimizer))
    shardings = sharding.state_shardings(state, mesh_of("fsdp=2,tensor=4"), sharding.decoder_axes(tiny_models.CONFIG))
    factored, spec_of = state.optimizer[1][0][0], shardings.optimizer[1][0][0]
    assert factored.v_row["gate"].shape == (3, 32)
    assert spec_of.v_row["gate"].spec == PartitionSpec(None, ("fsdp", "tensor"))
    assert spec_of.v_col["embed"].spec == spec_of.count.spec == PartitionSpec()


def test_adapter_optimizer_state_and_reference_are_sharded_at_any_path():
    mesh, lora = mesh_of("fsdp=2,tensor=4"), LoraConfig(rank=4)
    policy = lora_policy(tiny_models.CONFIG, lora)
    optimizer = adamw(0.1)
    run = jax.eval_shape(
        lambda: init_train_state(policy.init(jax.random.key(0)), optimizer, jax.random.key(1), trainable=ADAPTER)
    )
    axes = LoraParams(sharding.decoder_axes(tiny_models.CONFIG), adapter_axes(lora))
    shardings = sharding.state_shardings(run, mesh, axes, trainable=ADAPTER)
    expected = PartitionSpec(None, None, "tensor", None)
    assert shardings.learner.params.base["q"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert shardings.learner.params.adapter["q_b"].spec == shardings.reference["q_b"].spec == expected
    specs = [s.spec for x, s in pairs(run.learner.optimizer, shardings.learner.optimizer) if x.shape == (3, 4, 4, 8)]
    assert specs.count(expected) >= 2
    assert shardings.key.spec == shardings.update.spec == PartitionSpec()


def test_a_checkpoint_restores_on_another_mesh(tmp_path):
    """Saved under fsdp=8, restored with other axes sharded: the same bits, with the template's shardings."""
    params = init(jax.random.key(0))
    state = init_learner(params, OPTIMIZERS["adam"])
    memory = jax.tree.map(lambda x: np.asarray(x) + np.asarray(1, x.dtype), state.optimizer)
    state = jax.device_get(state.replace(optimizer=memory))
    saved_shardings, new_shardings = (
        sharding.state_shardings(state, mesh_of(text), AXES) for text in ("fsdp=8", "data=2,tensor=4")
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, place_on_devices(state, saved_shardings))
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, new_shardings)
    for template in (abstract, place_on_devices(jax.tree.map(np.zeros_like, state), new_shardings)):
        restored = checkpoints.restore(3, template)
        for value, (expected, spec_of) in zip(jax.tree.leaves(restored), pairs(state, new_shardings), strict=True):
            np.testing.assert_array_equal(value, expected)
            assert value.sharding == spec_of
        assert restored.params["mix"].addressable_shards[0].data.shape == (8, 2)


# Programs ---------------------------------------------------------------------------------------------


def make(policy=BIGRAMS):
    return make_update(policy, PLAIN, OPTIMIZERS["adam"], UpdateSettings(micro_rows=2, diagnostics=None, **SETTINGS))


@pytest.mark.slow
def test_F3_a_sharded_policy_learns_the_same():
    """Rows, model and vocabulary sharded over eight devices, rows unevenly; the state keeps its shardings."""
    params, trajectories = sampled_case(12)
    batch = rows_of(PLAIN, trajectories, "by_trajectory", rows=13)
    mesh = mesh_of("data=2,fsdp=2,tensor=2")
    shardings = sharding.state_shardings(fresh(params, "adam"), mesh, AXES)
    assert shardings.params["mix"].spec == PartitionSpec("fsdp", "tensor")
    update, plain = sharding.jit_update(make(BIGRAMS._replace(mesh=mesh)), shardings, donate=True), jax.jit(make())
    state, other = place_on_devices(fresh(params, "adam"), shardings), fresh(params, "adam")
    for _ in range(3):
        state, metrics = update(state, batch)
        other, others = plain(other, batch)
    assert_close(jax.device_get(state.params), other.params, params)
    for figure in metrics:
        np.testing.assert_allclose(metrics[figure], others[figure], rtol=1e-3, atol=1e-5, err_msg=figure)
    for value, expected in pairs(state, shardings):
        assert value.sharding.is_equivalent_to(expected, value.ndim)


@pytest.mark.slow
def test_F3_rounding_to_bfloat16_is_that_of_one_device():
    """Over several micro-batches and eight devices; gradients are summed in float32."""
    params, policy = tiny_models.tiny_params(), tiny_models.POLICY
    trajectories = near(make_case(12).trajectories, jax.jit(make_score(policy, **SETTINGS)), params, 0.1)
    batch, mesh = rows_of(PLAIN, trajectories, "by_trajectory"), mesh_of("data=2,fsdp=4")
    axes = sharding.decoder_axes(tiny_models.CONFIG)
    shardings = sharding.state_shardings(fresh(params), mesh, axes)
    settings = {"micro_rows": 1, "diagnostics": None, **SETTINGS}

    def updated(policy, compute_dtype, jit=jax.jit):
        update = make_update(policy, PLAIN, OPTIMIZERS["sgd"], UpdateSettings(compute_dtype=compute_dtype, **settings))
        return jax.device_get(jit(update)(fresh(params), batch)[0].params)

    on_mesh = sharding.shard_policy(policy, mesh, axes)
    exact, whole = updated(policy, None), updated(policy, "bfloat16")
    divided = updated(on_mesh, "bfloat16", partial(sharding.jit_update, shardings=shardings))
    moved, whole_apart, divided_apart = (
        optax.tree.norm(jax.tree.map(np.subtract, x, exact)) for x in (params, whole, divided)
    )
    assert 0 < whole_apart < 0.1 * moved
    assert 0 < divided_apart < 1.1 * whole_apart


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gspo", "dpo"])
def test_F3_first_passes_over_sequences_are_sharded_too(name):
    """Every option on and pi_old scored again: over a divided mesh, and inside a pmap of three devices."""
    algorithm = everything_on(name)
    params, trajectories = sampled_case(12)
    batch = rows_of(algorithm, trajectories, "by_trajectory")
    settings = UpdateSettings(micro_rows=2, rescore=True, diagnostics=DIAGNOSTICS, **SETTINGS)
    make = partial(make_update, algorithm=algorithm, optimizer=OPTIMIZERS["sgd"], settings=settings)
    expected, figures = jax.jit(make(BIGRAMS))(fresh(params), batch)
    mesh = mesh_of("data=2,fsdp=2,tensor=2")
    shardings = sharding.state_shardings(fresh(params), mesh, AXES)
    state, metrics = sharding.jit_update(make(BIGRAMS._replace(mesh=mesh)), shardings)(
        place_on_devices(fresh(params), shardings), batch
    )
    states, others = sharding.pmap_update(make, BIGRAMS, jax.devices()[:3])(
        sharding.repeat_tree(fresh(params), 3), batch
    )
    assert_close(jax.device_get(state.params), expected.params, params)
    assert_close(jax.tree.map(lambda x: np.asarray(x[2]), states.params), expected.params, params)
    for actual in (metrics, others):
        for figure in figures:
            one, other = (around_one(figure, np.asarray(of[figure])) for of in (actual, figures))
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5, err_msg=figure)


def around_one(figure: str, value: np.ndarray) -> np.ndarray:
    """Count the ratios on both sides of 1 together: scored again they are 1 up to rounding, an edge of bins."""
    if figure != "ratio_histogram":
        return value
    middle = len(value) // 2
    return np.concatenate([value[: middle - 1], [value[middle - 1] + value[middle]], value[middle + 1 :]])


@pytest.mark.slow
def test_F3_a_pmapped_update_is_the_same_on_every_device():
    params, trajectories = sampled_case(12)
    batch = rows_of(PLAIN, trajectories, "by_trajectory", rows=13)
    update = sharding.pmap_update(make, BIGRAMS, jax.devices()[:3])
    states, metrics = update(sharding.repeat_tree(fresh(params, "adam"), 3), batch)
    other, others = jax.jit(make())(fresh(params, "adam"), batch)
    for device in range(3):
        assert_close(jax.tree.map(lambda x: np.asarray(x[device]), states.params), other.params, params)  # noqa: B023
    np.testing.assert_allclose(metrics["loss"], others["loss"], rtol=1e-4)


def test_shard_policy_does_nothing_without_model_axes():
    axes = sharding.decoder_axes(tiny_models.CONFIG)
    for mesh in (None, PmapAxis("data", 8), mesh_of("data=8")):
        assert sharding.shard_policy(tiny_models.POLICY, mesh, axes) == tiny_models.POLICY._replace(mesh=mesh)
    assert sharding.shard_policy(tiny_models.POLICY, mesh_of("fsdp=8"), axes).hidden is not tiny_models.POLICY.hidden


@pytest.mark.parametrize("rows", [4, 3])
def test_F3_a_kernel_runs_on_its_devices_rows_and_heads(rows):
    """Heads over tensor, rows over the other axes, padded if they can't be sharded evenly."""
    calls = []

    def attend_fn(q, k, v, mask, config):
        calls.append((len(q), q.shape[1], k.shape[1]))
        return attend(q, k, v, mask, config)

    config, mesh = tiny_models.CONFIG, mesh_of("data=2,fsdp=2,tensor=2")
    assert (config.h, config.k) == (4, 2)
    params = tiny_models.POLICY.init(jax.random.key(0))
    tokens = jnp.arange(rows * 6).reshape(rows, 6) % config.v
    on_mesh = sharding.shard_policy(make_policy(config, attend=attend_fn), mesh, sharding.decoder_axes(config))
    actual = jax.jit(lambda *arguments: on_mesh.hidden(*arguments)[0])(params, tokens)
    expected = jax.jit(lambda *arguments: tiny_models.POLICY.hidden(*arguments)[0])(params, tokens)
    assert list(dict.fromkeys(calls)) == [(1, 2, 1)]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 3])
def test_F3_F10_trees_are_sharded_with_their_rows(rows):
    """States and gradient are those of one device."""
    trees = build_trees([[Context((1, 2, 3, n), (2,)), Context((1, 2, 5), (2,))] for n in range(rows)], 8, 4).tree[:3]
    params, mesh = tiny_models.tiny_params(), mesh_of("data=2,fsdp=2,tensor=2")
    on_mesh = sharding.shard_policy(tiny_models.POLICY, mesh, sharding.decoder_axes(tiny_models.CONFIG))

    def run(policy, params):
        states = policy.hidden_tree(params, *trees)
        return (states * jnp.cos(jnp.arange(states.size, dtype=jnp.float32)).reshape(states.shape)).sum(), states

    (_, actual), slopes = jax.jit(jax.value_and_grad(partial(run, on_mesh), has_aux=True))(params)
    (_, expected), others = jax.jit(jax.value_and_grad(partial(run, tiny_models.POLICY), has_aux=True))(params)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert_close(slopes, others, jax.tree.map(jnp.zeros_like, others))


@pytest.mark.parametrize(("heads", "kernel"), [(2, [(1, 2, 1)]), (1, [])])
def test_F3_cache_kernel_runs_on_its_devices_rows_and_heads(heads, kernel):
    """Keys' heads that tensor does not divide go by the plain formula."""
    calls = []

    def attend_cached(q, slots, mask, config):
        calls.append((len(q), q.shape[1], slots.k.shape[2]))
        return attend_cache(q, lambda _: (slots.k[slots.index], slots.v[slots.index], visible(*mask)), 1, config)

    attend_fn = AttentionKernels(attend, attend_cached, supports=lambda q, _: q.shape[2] == 1)
    config, mesh = replace(tiny_models.CONFIG, k=heads), mesh_of("data=2,fsdp=2,tensor=2")
    policy = make_policy(config)
    assert policy.make_cache is not None
    params, tokens = policy.init(jax.random.key(0)), jnp.arange(4)[:, None] % config.v
    on_mesh = sharding.shard_policy(make_policy(config, attend=attend_fn), mesh, sharding.decoder_axes(config))
    actual, expected = (
        jax.jit(lambda *arguments, any_policy=any_policy: any_policy.hidden(*arguments)[0])(
            params, tokens, None, None, policy.make_cache(4, 8)
        )
        for any_policy in (on_mesh, policy)
    )
    assert list(dict.fromkeys(calls)) == kernel
    np.testing.assert_allclose(actual, expected, atol=1e-5)
