"""Rows over devices: each is treated once, wherever it lies, and results stand where the rows stood."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowgrpo import spread

MESH = jax.make_mesh((4,), (spread.AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])


@pytest.mark.parametrize("count", [1, 4, 7, 12])
def test_every_row_lies_in_one_hand_once(count):
    dealt_i, real_i = map(np.asarray, spread.deal(count, 4))
    assert len(dealt_i) % 4 == 0
    assert sorted(dealt_i[real_i]) == list(range(count))
    sizes = real_i.reshape(4, -1).sum(axis=1)
    assert sizes.max() - sizes.min() <= 1


def scale(factor, rows):
    return {"scaled": rows["x"] * factor, "key": jax.vmap(jax.random.uniform)(rows["key"])}


@pytest.mark.parametrize("count", [1, 4, 7, 12])
def test_rows_come_back_in_their_order(count):
    rows = {"x": jnp.arange(2.0 * count).reshape(count, 2), "key": jax.random.split(jax.random.key(0), count)}
    plain, dealt = (jax.jit(partial(spread.map_rows, scale, mesh))(jnp.float32(3.0), rows) for mesh in (None, MESH))
    for name in plain:
        np.testing.assert_array_equal(plain[name], dealt[name])


def total(shared, rows, wanted_r):
    kept = jnp.where(wanted_r, rows, 0.0)
    return {"sum": shared * kept.sum()}, jnp.where(wanted_r, rows, -jnp.inf).max()


@pytest.mark.parametrize("count", [1, 4, 7])
def test_sums_count_each_wanted_row_once(count):
    rows, wanted_r = jnp.arange(1.0, count + 1), jnp.arange(count) != 2
    expected = np.where(np.arange(count) != 2, np.arange(1.0, count + 1), 0.0)
    for mesh in (None, MESH):
        sums, largest = jax.jit(partial(spread.sum_rows, total, mesh))(jnp.float32(2.0), rows, wanted_r)
        assert float(sums["sum"]) == 2.0 * expected.sum()
        assert float(largest) == expected.max()


def test_what_is_shared_lies_on_every_device():
    assert len(spread.share({"x": jnp.ones(3)}, MESH)["x"].sharding.device_set) == 4
    tree = {"x": jnp.ones(3)}
    assert spread.share(tree, None) is tree


def test_the_mesh_holds_all_devices():
    mesh = spread.data_mesh()
    assert mesh is not None
    assert mesh.size == jax.device_count()
