"""Deal rows, or whole runs, over several devices, each of which does the same with its share.

    order:  rows 0 1 2 3 4 5   on two devices   0 2 4 | 1 3 5

Rows are dealt like cards, so that a batch whose last rows are empty loads all devices alike (`map_rows`, `sum_rows`).
The `mesh` decides how:

    None                    everything runs where it is
    a mesh of `data` alone  each device runs the same program on its own rows (`shard_map`); what is shared, such as
                            parameters, lies on every device
    with fsdp or tensor     a function meets all rows, and says with `lay` which of them stand side by side; a policy
                            that is settled on the mesh (`sharding.settle`) deals them itself
    PerDevice               the caller is inside a `pmap`, and each device picks its own rows

All give the same to float tolerance (F3). `over_runs` treats a stack of runs, such as seeds, in the same way:

    runs = stack_trees([start(seed) for seed in range(16)])
    after, figures = jax.jit(over_runs(partial(many_updates, step, updates=10), mesh=data_mesh()))(runs)

On each device `lanes` runs are vmapped, one such batch after the other. Where one run fills a device, as on a CPU, few
lanes are faster; where it doesn't, all at once are. A run's result depends on neither, but for rounding (E3).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from flowgrpo.types import BadInput

AXIS, FSDP, TENSOR = "data", "fsdp", "tensor"
ROWS = (AXIS, FSDP)  # over which rows are dealt where XLA divides a program
SHARED, DEALT = PartitionSpec(), PartitionSpec(AXIS)


class PerDevice(NamedTuple):
    """In the place of a mesh inside a `pmap`: its axis, and how many devices that has."""

    axis_name: str
    size: int


DeviceMesh = Mesh | PerDevice | None


def data_mesh() -> Mesh | None:
    """All devices side by side, or `None` where there is only one."""
    devices = jax.device_count()
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,)) if devices > 1 else None


def divides(mesh: DeviceMesh) -> bool:
    """Say whether XLA divides the program, because the mesh has more than its data axis."""
    return isinstance(mesh, Mesh) and mesh.shape.get(AXIS, 1) != mesh.size


# Where things lie -------------------------------------------------------------------------------------


def replicated(mesh: Mesh | None) -> NamedSharding | None:
    """Everything on each device of a mesh; None, which leaves it open, without one."""
    return None if mesh is None else NamedSharding(mesh, SHARED)


def share(tree, mesh: Mesh | None):
    """The tree on every device of the mesh: what a program gives back lies there, and what it is given first should."""
    return tree if mesh is None else place_on_devices(tree, replicated(mesh))


def place_on_devices(tree, shardings):
    """Lay a tree out by a tree of shardings, or by one for all; where there are other processes, all give the same.

    The tree that was given may go on lying in the same memory.
    """
    if isinstance(shardings, Sharding):
        one = shardings
        shardings = jax.tree.map(lambda _: one, tree)
    return jax.tree.map(_put, tree, shardings)


def _put(x, sharding: NamedSharding) -> Array:
    """`jax.device_put`, for keys on other processes' devices too."""
    is_key = isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if sharding.is_fully_addressable or not is_key:
        return jax.device_put(x, sharding)
    data = jax.device_put(jax.random.key_data(x), sharding)
    wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))
    return jax.jit(wrap, out_shardings=sharding)(data)


def row_devices(mesh: DeviceMesh) -> int:
    """Count the devices over which rows are dealt in a program that XLA divides; 1 in any other."""
    return mesh.shape.get(AXIS, 1) * mesh.shape.get(FSDP, 1) if isinstance(mesh, Mesh) and divides(mesh) else 1


def lay(rows, mesh: DeviceMesh):
    """Rows dealt over the devices, where XLA divides the program; elsewhere they stay as they are."""
    if not (isinstance(mesh, Mesh) and divides(mesh)):
        return rows
    over = tuple(axis for axis in ROWS if mesh.shape.get(axis, 1) > 1)
    return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec(over)))


# What is done with rows -------------------------------------------------------------------------------


def map_rows(function: Callable, mesh: DeviceMesh, shared, rows):
    """`function(shared, rows)`, which treats every row for itself; its results stand in the order of the rows."""
    if mesh is None or divides(mesh):
        return function(shared, rows)
    return map_own_rows(function, mesh, shared, rows)


def map_own_rows(function: Callable, mesh: Mesh | PerDevice, shared, rows):
    """Do as `map_rows`, by a program of each device for its own rows, on any mesh.

    Shared arrays are gathered once, but for what tensor divides, which is left to XLA.
    """
    count = len(jax.tree.leaves(rows)[0])
    hands = mesh.size if not divides(mesh) else row_devices(mesh)
    dealt_i, _ = deal(count, hands)
    each = len(dealt_i) // hands
    if isinstance(mesh, PerDevice):
        out = function(shared, _take(rows, _own(dealt_i, mesh)))
        out = jax.lax.all_gather(out, mesh.axis_name, tiled=True)
    else:
        over = PartitionSpec(ROWS) if divides(mesh) else DEALT
        names = {name for name in mesh.axis_names if name != TENSOR or mesh.shape[name] == 1}
        where = {"in_specs": (SHARED, over), "out_specs": over, "axis_names": names}
        out = jax.shard_map(function, mesh=mesh, check_vma=False, **where)(shared, _take(rows, dealt_i))
    row_r = jnp.arange(count)
    return _take(out, row_r % hands * each + row_r // hands)


def sum_rows(function: Callable, mesh: DeviceMesh, shared, rows, wanted_r: Array) -> tuple:
    """`function(shared, rows, wanted_r)` -> (what adds up over rows, what the largest is kept of)."""
    if mesh is None or divides(mesh):
        return function(shared, rows, wanted_r)
    dealt_i, real_i = deal(len(wanted_r), mesh.size)
    if isinstance(mesh, PerDevice):
        own_i, real_i = _own(dealt_i, mesh), _own(real_i, mesh)
        return _total(shared, _take(rows, own_i), wanted_r[own_i] & real_i, function=function, axis=mesh.axis_name)
    total = partial(_total, function=function, axis=AXIS)
    spread = jax.shard_map(total, mesh=mesh, in_specs=(SHARED, DEALT, DEALT), out_specs=SHARED, check_vma=False)
    return spread(shared, _take(rows, dealt_i), wanted_r[dealt_i] & real_i)


def _total(shared, rows, wanted_r: Array, *, function: Callable, axis: str) -> tuple:
    """Apply `function` to this device's own rows; over all devices, add up its sums and keep the largest."""
    sums, largest = function(shared, rows, wanted_r)
    return jax.lax.psum(sums, axis), jax.lax.pmax(largest, axis)


def deal(count: int, hands: int) -> tuple[Array, Array]:
    """Say which row lies at each place, hand after hand, and whether it is more than a repeat that fills a hand up."""
    place_i = jnp.arange(-(-count // hands) * hands).reshape(-1, hands).T.ravel()
    return place_i % count, place_i < count


def _own(dealt_i: Array, mesh: PerDevice) -> Array:
    """This device's hand."""
    return dealt_i.reshape(mesh.size, -1)[jax.lax.axis_index(mesh.axis_name)]


def _take(rows, index_i: Array):
    return jax.tree.map(lambda x: jnp.asarray(x)[index_i], rows)


def stack_trees(runs: Sequence[Any]) -> Any:
    """Trees of the same shape as one, every array with a first axis more."""
    if not runs:
        raise BadInput("stack: there is no run to stack")
    return jax.tree.map(lambda *x: jnp.stack(x), *runs)


def over_runs(function: Callable, *, lanes: int | None = None, mesh: DeviceMesh = None) -> Callable:
    """`function` of one run as a function of a stack of them; `lanes` are vmapped on a device, all by default."""
    if lanes is not None and lanes < 1:
        raise BadInput(f"over_runs: lanes is {lanes}, but must be at least 1")

    def in_lanes(_shared: tuple, runs: Any) -> Any:
        if lanes == 1:
            return jax.lax.map(function, runs)
        if lanes is None or lanes >= len(jax.tree.leaves(runs)[0]):
            return jax.vmap(function)(runs)
        return jax.lax.map(function, runs, batch_size=lanes)

    return lambda runs: map_rows(in_lanes, mesh, (), runs)


def many_updates(step: Callable, run: Any, *, updates: int) -> tuple[Any, Any]:
    """So many times `step(run) -> (run, figures)` as one scan; the figures of all, by update."""
    return jax.lax.scan(lambda run, _: step(run), run, length=updates)
