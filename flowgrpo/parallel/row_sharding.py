"""Shard rows, or whole runs, over several devices, each of which runs the same program on its share.

    order:  rows 0 1 2 3 4 5   on two devices   0 2 4 | 1 3 5

Rows are assigned round-robin, so that a batch whose last rows are empty loads all devices alike (`map_rows`,
`sum_rows`). The `mesh` decides how:

    None                    everything runs where its arrays are
    a mesh of `data` alone  each device runs the same program on its own rows (`shard_map`); shared arrays, such as
                            parameters, are replicated
    with fsdp or tensor     a function gets all rows, and `shard_rows` constrains which of them are computed together;
                            a policy on the mesh (`sharding.shard_policy`) shards them itself
    PmapAxis                the caller is inside a `pmap`, and each device picks its own rows

All give the same results to float tolerance (F3). `map_runs` does the same for a stack of runs, such as seeds:

    runs = stack_trees([start(seed) for seed in range(16)])
    runs, metrics = jax.jit(map_runs(partial(scan_updates, step, updates=10), mesh=data_mesh()))(runs)

On each device `lanes` runs are vmapped, one such batch after the other. If one run fills a device, as on a CPU, few
lanes are faster; otherwise all at once are. A run's result depends on neither, up to rounding (E3).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from flowgrpo.types import BadInput

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
ROW_AXES = (DATA, FSDP)  # mesh axes that rows are sharded over if parameters are sharded too
REPLICATED, SHARDED_ROWS = PartitionSpec(), PartitionSpec(DATA)


class PmapAxis(NamedTuple):
    """Stands for a mesh inside a `pmap`: the name of its axis."""

    axis_name: str
    size: int  # number of devices


DeviceMesh = Mesh | PmapAxis | None


def data_mesh() -> Mesh | None:
    """A mesh of all devices along data; None if there is only one."""
    devices = jax.device_count()
    return jax.make_mesh((devices,), (DATA,), axis_types=(AxisType.Auto,)) if devices > 1 else None


def has_model_axes(mesh: DeviceMesh) -> bool:
    """Whether parameters are sharded (by XLA or fsdp), because the mesh has more than its data axis."""
    return isinstance(mesh, Mesh) and mesh.shape.get(DATA, 1) != mesh.size


# Placement -------------------------------------------------------------------------------------


def replicated_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of an array that is replicated over a mesh; None without a mesh, which leaves it open."""
    return None if mesh is None else NamedSharding(mesh, REPLICATED)


def replicate(tree, mesh: Mesh | None):
    """The tree replicated over the mesh, as outputs of a program are; give it to the first call to compile once."""
    return tree if mesh is None else place_on_devices(tree, replicated_sharding(mesh))


def place_on_devices(tree, shardings):
    """Put a tree on devices by a tree of shardings, or by one for all; several processes must give equal trees.

    The result may share memory with the argument.
    """
    if isinstance(shardings, Sharding):
        sharding = shardings
        shardings = jax.tree.map(lambda _: sharding, tree)
    return jax.tree.map(_device_put, tree, shardings)


def _device_put(x, sharding: NamedSharding) -> Array:
    """`jax.device_put`, also for random keys on devices of other processes."""
    is_key = isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if sharding.is_fully_addressable or not is_key:
        return jax.device_put(x, sharding)
    data = jax.device_put(jax.random.key_data(x), sharding)
    wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))
    return jax.jit(wrap, out_shardings=sharding)(data)


def row_devices(mesh: DeviceMesh) -> int:
    """Number of devices that rows are sharded over, if parameters are sharded too; else 1."""
    return mesh.shape.get(DATA, 1) * mesh.shape.get(FSDP, 1) if isinstance(mesh, Mesh) and has_model_axes(mesh) else 1


def shard_rows(rows, mesh: DeviceMesh):
    """Constrain rows to be sharded over the devices, if parameters are sharded; otherwise the rows as they are."""
    if not (isinstance(mesh, Mesh) and has_model_axes(mesh)):
        return rows
    axes = tuple(axis for axis in ROW_AXES if mesh.shape.get(axis, 1) > 1)
    return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec(axes)))


# Functions of rows -------------------------------------------------------------------------------


def map_rows(function: Callable, mesh: DeviceMesh, shared, rows):
    """`function(shared, rows)` of each row independently; results are in the order of the rows."""
    if mesh is None or has_model_axes(mesh):
        return function(shared, rows)
    return shard_map_rows(function, mesh, shared, rows)


def shard_map_rows(function: Callable, mesh: Mesh | PmapAxis, shared, rows):
    """As `map_rows`, with a program on each device for its own rows, on any mesh.

    Shared arrays are gathered once, except for what tensor shards, which is left to XLA.
    """
    count = len(jax.tree.leaves(rows)[0])
    devices = mesh.size if not has_model_axes(mesh) else row_devices(mesh)
    row_i, _ = assign_rows(count, devices)
    rows_per_device = len(row_i) // devices
    if isinstance(mesh, PmapAxis):
        out = function(shared, _take(rows, _local(row_i, mesh)))
        out = jax.lax.all_gather(out, mesh.axis_name, tiled=True)
    else:
        row_spec = PartitionSpec(ROW_AXES) if has_model_axes(mesh) else SHARDED_ROWS
        run = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(REPLICATED, row_spec),
            out_specs=row_spec,
            axis_names={name for name in mesh.axis_names if name != TENSOR or mesh.shape[name] == 1},
            check_vma=False,
        )
        out = run(shared, _take(rows, row_i))
    row_r = jnp.arange(count)
    return _take(out, row_r % devices * rows_per_device + row_r // devices)


def sum_rows(function: Callable, mesh: DeviceMesh, shared, rows, wanted_r: Array) -> tuple:
    """`function(shared, rows, wanted_r) -> (sums, maxima)`, both reduced over the devices' rows."""
    if mesh is None or has_model_axes(mesh):
        return function(shared, rows, wanted_r)

    def reduce_rows(shared, rows, wanted_r: Array, *, axis: str) -> tuple:
        sums, maxima = function(shared, rows, wanted_r)
        return jax.lax.psum(sums, axis), jax.lax.pmax(maxima, axis)

    row_i, real_i = assign_rows(len(wanted_r), mesh.size)
    if isinstance(mesh, PmapAxis):
        row_i, real_i = _local(row_i, mesh), _local(real_i, mesh)
        return reduce_rows(shared, _take(rows, row_i), wanted_r[row_i] & real_i, axis=mesh.axis_name)
    run = jax.shard_map(
        partial(reduce_rows, axis=DATA),
        mesh=mesh,
        in_specs=(REPLICATED, SHARDED_ROWS, SHARDED_ROWS),
        out_specs=REPLICATED,
        check_vma=False,
    )
    return run(shared, _take(rows, row_i), wanted_r[row_i] & real_i)


def assign_rows(count: int, devices: int) -> tuple[Array, Array]:
    """Which row is at each place, device after device, and whether it is real or a repeat that fills a device up."""
    place_i = jnp.arange(-(-count // devices) * devices).reshape(-1, devices).T.ravel()
    return place_i % count, place_i < count


def _local(x_i: Array, mesh: PmapAxis) -> Array:
    """This device's part of what `assign_rows` gives."""
    return x_i.reshape(mesh.size, -1)[jax.lax.axis_index(mesh.axis_name)]


def _take(rows, index_i: Array):
    return jax.tree.map(lambda x: jnp.asarray(x)[index_i], rows)


def stack_trees(runs: Sequence[Any]) -> Any:
    """Stack trees of the same structure: every array gets a new first axis."""
    if not runs:
        raise BadInput("stack: there is no run to stack")
    return jax.tree.map(lambda *x: jnp.stack(x), *runs)


def map_runs(function: Callable, *, lanes: int | None = None, mesh: DeviceMesh = None) -> Callable:
    """Turn a function of one run into one of a stack of runs; `lanes` are vmapped on a device, by default all."""
    if lanes is not None and lanes < 1:
        raise BadInput(f"map_runs: lanes is {lanes}, but must be at least 1")

    def in_lanes(_shared: tuple, runs: Any) -> Any:
        if lanes == 1:
            return jax.lax.map(function, runs)
        if lanes is None or lanes >= len(jax.tree.leaves(runs)[0]):
            return jax.vmap(function)(runs)
        return jax.lax.map(function, runs, batch_size=lanes)

    return lambda runs: map_rows(in_lanes, mesh, (), runs)


def scan_updates(step: Callable, run: Any, *, updates: int) -> tuple[Any, Any]:
    """`updates` times `step(run) -> (run, metrics)` as one scan; metrics are stacked by update."""
    return jax.lax.scan(lambda run, _: step(run), run, length=updates)
