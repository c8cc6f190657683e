"""Rows of arrays over several devices: each device takes its share of them, and all do the same with it.

    order:  rows 0 1 2 3 4 5   on two devices   0 2 4 | 1 3 5

Rows are dealt like cards, so that a batch whose last rows are empty loads all devices alike. What is shared, such as
parameters, lies on every device. With `mesh=None` everything runs where it is, and is the same to float tolerance (F3).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "data"
SHARED, DEALT = PartitionSpec(), PartitionSpec(AXIS)


def data_mesh() -> Mesh | None:
    """All devices side by side, or `None` where there is only one."""
    devices = jax.device_count()
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,)) if devices > 1 else None


def share(tree, mesh: Mesh | None):
    """The tree on every device of the mesh: what a program gives back lies there, and what it is given first should."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, SHARED))


def map_rows(function: Callable, mesh: Mesh | None, shared, rows):
    """`function(shared, rows)`, which treats every row for itself; its results stand in the order of the rows."""
    if mesh is None:
        return function(shared, rows)
    count = len(jax.tree.leaves(rows)[0])
    dealt_i, _ = deal(count, mesh.size)
    spread = jax.shard_map(function, mesh=mesh, in_specs=(SHARED, DEALT), out_specs=DEALT, check_vma=False)
    out = spread(shared, _take(rows, dealt_i))
    each = len(dealt_i) // mesh.size
    row_r = jnp.arange(count)
    return _take(out, row_r % mesh.size * each + row_r // mesh.size)


def sum_rows(function: Callable, mesh: Mesh | None, shared, rows, wanted_r: Array) -> tuple:
    """`function(shared, rows, wanted_r)` -> (what adds up over rows, what the largest is kept of)."""
    if mesh is None:
        return function(shared, rows, wanted_r)
    dealt_i, real_i = deal(len(wanted_r), mesh.size)

    def own(shared, rows, wanted_r):
        sums, largest = function(shared, rows, wanted_r)
        return jax.lax.psum(sums, AXIS), jax.lax.pmax(largest, AXIS)

    spread = jax.shard_map(own, mesh=mesh, in_specs=(SHARED, DEALT, DEALT), out_specs=SHARED, check_vma=False)
    return spread(shared, _take(rows, dealt_i), wanted_r[dealt_i] & real_i)


def deal(count: int, hands: int) -> tuple[Array, Array]:
    """Which row lies at each place, hand after hand, and whether it is more than a repeat that fills a hand up."""
    place_i = jnp.arange(-(-count // hands) * hands).reshape(-1, hands).T.ravel()
    return place_i % count, place_i < count


def _take(rows, index_i: Array):
    return jax.tree.map(lambda x: jnp.asarray(x)[index_i], rows)
