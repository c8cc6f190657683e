"""Rows over devices: each is computed once, on any mesh, and results are in the order of the rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo.parallel import row_sharding

MESH = jax.make_mesh((4,), (row_sharding.DATA,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
AXES = (row_sharding.DATA, row_sharding.FSDP, row_sharding.TENSOR)
AUTO = (jax.sharding.AxisType.Auto,) * 3
DATA_ONLY = jax.make_mesh((4, 1, 1), AXES, axis_types=AUTO, devices=jax.devices()[:4])  # only its data axis has a size
SHARDING_MODELS = jax.make_mesh((2, 2, 2), AXES, axis_types=AUTO)
PMAPPED = row_sharding.PmapAxis("data", 3)


def run_on_mesh(function, mesh, *arguments):
    """Call `function(mesh, ...)`, compiled in the way that the mesh is meant for."""
    if mesh is not PMAPPED:
        return jax.jit(partial(function, mesh))(*arguments)
    mapped = jax.pmap(
        lambda _, arguments: function(mesh, *arguments), "data", in_axes=(0, None), devices=jax.devices()[:3]
    )
    copies = mapped(jnp.arange(3), arguments)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x[0], x[2]), copies)
    return jax.tree.map(lambda x: x[1], copies)


@pytest.mark.parametrize("count", [1, 4, 7, 12])
def test_every_row_is_assigned_to_one_device_once(count):
    row_i, real_i = map(np.asarray, row_sharding.assign_rows(count, 4))
    assert len(row_i) % 4 == 0
    assert sorted(row_i[real_i]) == list(range(count))
    sizes = real_i.reshape(4, -1).sum(axis=1)
    assert sizes.max() - sizes.min() <= 1


def scale(factor, rows):
    return {"scaled": rows["x"] * factor, "key": jax.vmap(jax.random.uniform)(rows["key"])}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4, 7, 12])
def test_rows_come_back_in_their_order(count):
    rows = {"x": jnp.arange(2.0 * count).reshape(count, 2), "key": jax.random.split(jax.random.key(0), count)}
    plain, *others = (
        run_on_mesh(partial(row_sharding.map_rows, scale), mesh, jnp.float32(3.0), rows)
        for mesh in (None, MESH, DATA_ONLY, SHARDING_MODELS, PMAPPED)
    )
    for actual in others:
        for name in plain:
            np.testing.assert_array_equal(plain[name], actual[name])


def total(shared, rows, wanted_r):
    wanted_rows = jnp.where(wanted_r, rows, 0.0)
    return {"sum": shared * wanted_rows.sum()}, jnp.where(wanted_r, rows, -jnp.inf).max()


@pytest.mark.parametrize("count", [1, 4, 7])
def test_sums_count_each_wanted_row_once(count):
    rows, wanted_r = jnp.arange(1.0, count + 1), jnp.arange(count) != 2
    expected = np.where(np.arange(count) != 2, np.arange(1.0, count + 1), 0.0)
    for mesh in (None, MESH, DATA_ONLY, SHARDING_MODELS, PMAPPED):
        sums, largest = run_on_mesh(partial(row_sharding.sum_rows, total), mesh, jnp.float32(2.0), rows, wanted_r)
        assert float(sums["sum"]) == 2.0 * expected.sum()
        assert float(largest) == expected.max()


def test_replicate_puts_arrays_on_every_device():
    assert len(row_sharding.replicate({"x": jnp.ones(3)}, MESH)["x"].sharding.device_set) == 4
    tree = {"x": jnp.ones(3)}
    assert row_sharding.replicate(tree, None) is tree


def test_a_tree_is_placed_by_a_tree_of_shardings():
    over = jax.sharding.NamedSharding(SHARDING_MODELS, jax.sharding.PartitionSpec("fsdp"))
    everywhere = jax.sharding.NamedSharding(SHARDING_MODELS, row_sharding.REPLICATED)
    placed = row_sharding.place_on_devices(
        {"x": np.arange(4.0), "key": jax.random.key(1)}, {"x": over, "key": everywhere}
    )
    assert placed["x"].sharding == over
    assert placed["key"].sharding == everywhere
    assert jax.random.key_data(placed["key"]).tolist() == jax.random.key_data(jax.random.key(1)).tolist()


def test_shard_rows_constrains_only_on_meshes_with_model_axes():
    assert [row_sharding.row_devices(mesh) for mesh in (None, MESH, DATA_ONLY, PMAPPED, SHARDING_MODELS)] == [
        1,
        1,
        1,
        1,
        4,
    ]
    assert [row_sharding.has_model_axes(mesh) for mesh in (None, MESH, DATA_ONLY, PMAPPED, SHARDING_MODELS)] == [
        False
    ] * 4 + [True]
    rows = {"x": jnp.arange(6.0)}
    assert all(row_sharding.shard_rows(rows, mesh) is rows for mesh in (None, MESH, DATA_ONLY, PMAPPED))
    constrained = jax.jit(lambda x: row_sharding.shard_rows(x, SHARDING_MODELS))(jnp.arange(8.0))
    assert {shard.data.shape for shard in constrained.addressable_shards} == {(2,)}


def test_the_mesh_holds_all_devices():
    mesh = row_sharding.data_mesh()
    assert mesh is not None
    assert mesh.size == jax.device_count()
