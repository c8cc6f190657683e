"""Lay parameters and rows out on a mesh of devices, by the letters of their axes and one table of rules.

    mesh = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2"))
    axes = decoder_axes(config)                                  # {"embed": "vd", "q": "ndhe", ...}
    where = state_shardings(jax.eval_shape(lambda: state), mesh, axes)
    step = jit_update(make_update(settle(policy, mesh, axes), algorithm, optimizer), where)
    state, metrics = step(place_on_devices(state, where), batch)  # of `row_sharding`

    data      rows are dealt, parameters are whole on every device
    fsdp      rows are dealt as well, and each parameter's model axis d (Zhao et al., 2023, arXiv:2304.11277)
    tensor    heads, feed-forward width and vocabulary are divided (Shoeybi et al., 2019, arXiv:1909.08053)

An axis that the devices do not divide evenly stays whole on each of them; `explain` shows which do. What an optimizer
remembers of a parameter lies where the parameter does, and counters lie everywhere.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flowgrpo.contracts import Params, Policy, Settled
from flowgrpo.generate.sampler import row_axis
from flowgrpo.models.attention import Attend, AttendSlots, Kernels, Sight, Slots, attend
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import critic_parameters
from flowgrpo.models.decoder import Settle, parameters
from flowgrpo.models.trainable import WHOLE, Trained, acting, cast
from flowgrpo.parallel.row_sharding import (
    AXIS,
    FSDP,
    ROWS,
    SHARED,
    TENSOR,
    DeviceMesh,
    PerDevice,
    data_mesh,
    divides,
    place_on_devices,
    row_devices,
    share,
)
from flowgrpo.types import BadInput

AXES = (AXIS, FSDP, TENSOR)
RULES = {"v": TENSOR, "h": TENSOR, "k": TENSOR, "f": TENSOR, "d": FSDP}  # n, e and z are never divided

# Meshes -----------------------------------------------------------------------------------------------


def parse_mesh(text: str, devices: int | None = None) -> dict[str, int]:
    """`"data=4,fsdp=2"` as the size of every axis, 1 where it is not named; their product must be `devices`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES:
            raise BadInput(f"mesh {text!r}: {name!r} is no axis; write data=4,fsdp=2,tensor=1 with those you need")
        if name in sizes:
            raise BadInput(f"mesh {text!r}: {name} is given twice; give it once")
        if not (size.isascii() and size.isdigit() and int(size) > 0):
            raise BadInput(f"mesh {text!r}: {name} is {size!r}, but must be a whole number of at least 1")
        sizes[name] = int(size)
    sizes = {name: sizes.get(name, 1) for name in AXES}
    if devices is not None:
        _check_devices(sizes, devices)
    return sizes


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of these sizes over the given devices, by default all; its axes are data, fsdp and tensor."""
    unknown = sorted(set(sizes) - set(AXES))
    if unknown:
        raise BadInput(f"{unknown[0]!r} is no axis of a mesh; they are {', '.join(AXES)}")
    sizes = {name: sizes.get(name, 1) for name in AXES}
    devices = jax.devices() if devices is None else devices
    _check_devices(sizes, len(devices))
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def _check_devices(sizes: Mapping[str, int], devices: int) -> None:
    total = math.prod(sizes.values())
    if total != devices:
        shown = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise BadInput(f"mesh {shown} has {total} devices, but there are {devices}: their product must be {devices}")


# One array --------------------------------------------------------------------------------------------


def spec(axes: str, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Over which axis of the mesh each axis of an array is divided, by the rules."""
    if len(axes) != len(shape):
        raise BadInput(f"an array of shape {list(shape)} can't have the axes {axes!r}: give one letter for each")
    taken: list[str | None] = []
    for letter, size in zip(axes, shape, strict=True):
        over = RULES.get(letter)
        ways = 1 if over is None else mesh.shape.get(over, 1)
        taken.append(over if ways > 1 and size % ways == 0 and over not in taken else None)
    return PartitionSpec(*taken)


def kept_whole(axes: str, shape: Sequence[int], mesh: Mesh) -> str:
    """The letters that the rules would divide, but whose size does not allow it."""
    divided = spec(axes, shape, mesh)
    ruled = [letter in RULES and mesh.shape.get(RULES[letter], 1) > 1 for letter in axes]
    return "".join(letter for letter, rule, over in zip(axes, ruled, divided, strict=True) if rule and over is None)


def explain(abstract_params: Any, mesh: Mesh, axes_of: Any) -> str:
    """A table for people: each parameter's axes, what divides them, its bytes on one device, and what stays whole."""
    lines = [("parameter", "axes", "shape", "divided over", "MB a device", "stays whole")]
    total = 0
    leaves, letters = jax.tree.leaves_with_path(abstract_params), _letters(abstract_params, axes_of)
    for (path, x), axes in zip(leaves, letters, strict=True):
        sharding = NamedSharding(mesh, spec(axes, x.shape, mesh))
        size = math.prod(sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
        over = " ".join(f"{letter}:{name}" for letter, name in zip(axes, sharding.spec, strict=True) if name)
        shape, whole = "x".join(map(str, x.shape)), " ".join(kept_whole(axes, x.shape, mesh))
        lines.append((_name(path), axes, shape, over or "-", f"{size / 1e6:.3f}", whole or "-"))
        total += size
    lines.append(("all", "", "", "", f"{total / 1e6:.3f}", ""))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


# Trees of arrays --------------------------------------------------------------------------------------


def decoder_axes(config: DecoderConfig) -> dict[str, str]:
    """The axis letters of every parameter of a decoder; `lora.adapter_axes` has those of an adapter."""
    return {name: parameter.axes for name, parameter in parameters(config).items()}


def critic_axes(config: DecoderConfig) -> dict[str, str]:
    """The axis letters of every parameter of a critic."""
    return {name: parameter.axes for name, parameter in critic_parameters(config).items()}


def state_shardings(abstract_state: Any, mesh: Mesh, axes_of: Any, *, trained: Trained = WHOLE) -> Any:
    """The sharding of everything in a state that holds such parameters somewhere, such as a LearnerState or a Run.

    An array belongs to the parameter whose place in the tree is part of its own. Where it has other axes, as in
    factored memory, the first that can be is divided. What belongs to no parameter lies on every device.
    """
    known = {}
    part = trained.take(axes_of)
    for axes in (axes_of, part, acting(part)):
        known |= {tuple(path): letters for path, letters in jax.tree.leaves_with_path(axes)}
    leaves, structure = jax.tree.flatten_with_path(abstract_state)
    return jax.tree.unflatten(
        structure, [NamedSharding(mesh, _find(known, tuple(path), x, mesh)) for path, x in leaves]
    )


def _find(known: Mapping[tuple, str], path: tuple, x: Any, mesh: Mesh) -> PartitionSpec:
    """Divide the array at a place of a state: as the parameter with the longest place that is part of it."""
    for length in range(len(path), 0, -1):
        for start in range(len(path) - length + 1):
            axes = known.get(path[start : start + length])
            if axes is not None:
                return spec(axes, x.shape, mesh) if len(axes) == len(x.shape) else _any_axis(x.shape, mesh)
    return SHARED


def _any_axis(shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """The first axis that can be is divided over all devices that divide parameters."""
    over = tuple(axis for axis in (FSDP, TENSOR) if mesh.shape.get(axis, 1) > 1)
    ways = math.prod(mesh.shape[axis] for axis in over)
    fits = [bool(over) and size % ways == 0 for size in shape]
    return PartitionSpec(*[None] * fits.index(True), over) if any(fits) else SHARED


def _letters(abstract_params: Any, axes_of: Any) -> list[str]:
    """The axis letters of every leaf, in order."""
    if jax.tree.structure(abstract_params) != jax.tree.structure(axes_of):
        raise BadInput(f"the axis letters {jax.tree.structure(axes_of)} are no tree like that of the parameters")
    return jax.tree.leaves(axes_of)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _last(path: tuple) -> str:
    return jax.tree_util.keystr(path[-1:], simple=True)


# Policies ---------------------------------------------------------------------------------------------


def settle(policy: Policy, mesh: DeviceMesh, axes: Any) -> Policy:
    """Lay a policy out on a mesh: each device runs its own rows, over parameters that are gathered layer by layer.

    Numbers are the same without. A layer is gathered over fsdp where it runs, and again in the backward pass where
    layers are computed again; its gradient is summed over the devices and divided in one step. Of the embedding, rows
    of hidden states are exchanged and not the table. What tensor divides is left to XLA. `axes` has the letters of all
    parameters, in their tree.
    """
    policy = policy._replace(mesh=mesh)
    if not (isinstance(mesh, Mesh) and divides(mesh)):
        return policy
    return _Settling(
        policy, mesh, {_last(path): letters for path, letters in jax.tree.leaves_with_path(axes)}
    ).settled()


@dataclass(frozen=True, eq=False)
class _Settling:
    """A policy whose rows are dealt over a mesh, and whose parameters are gathered where they are used."""

    policy: Policy
    mesh: Mesh
    axes: Mapping[str, str]
    dtype: Any = None  # that each device casts its parameters to before they are gathered

    def settled(self) -> Policy:
        """The policy."""
        # A layer that fsdp divides is gathered where it runs, and not laid out before.
        laid = self.policy.unstack_layers if self.mesh.shape[FSDP] == 1 else None
        return self.policy._replace(
            hidden=self.hidden,
            unembed=self.unembed,
            unstack_layers=laid,
            hidden_tree=None if self.policy.hidden_tree is None else self.hidden_tree,
            settled=Settled(self.policy._replace(mesh=None), self.over_rows, self.in_dtype),
        )

    def in_dtype(self, dtype: Any) -> Policy:
        """The policy, computing in another type of number; gradients are summed over devices in the parameters'."""
        return replace(self, dtype=dtype).settled()

    def hidden(self, params, tokens, positions=None, segments=None, cache=None) -> tuple:
        """Compute hidden states, on each device those of its own rows."""
        gather = _Gather(self.divided(params), self.dtype)

        def own(params, *rows) -> tuple:
            settle, spread = Settle(gather.lookup, gather.layer), partial(divide_attention, mesh=self.mesh)
            return self.policy.hidden(gather.named(params, "norm"), *rows, settle=settle, spread=spread)

        return self.dealt(own, params, (jnp.asarray(tokens), positions, segments, cache), (jnp.asarray(tokens), cache))

    def hidden_tree(self, params, tokens, positions, ends) -> Array:
        """Compute hidden states of trees, on each device those of its own rows."""
        gather = _Gather(self.divided(params), self.dtype)

        def own(params, *trees) -> Array:
            assert self.policy.hidden_tree is not None
            settle, spread = Settle(gather.lookup, gather.layer), partial(divide_attention, mesh=self.mesh)
            return self.policy.hidden_tree(gather.named(params, "norm"), *trees, settle=settle, spread=spread)

        trees = tuple(jnp.asarray(x) for x in (tokens, positions, ends))
        return self.dealt(own, params, trees, trees[0])

    def unembed(self, params, hidden: Array) -> Array:
        """Compute logits, on each device those of its own rows."""
        return self.over_rows(lambda unembed, params, rows: unembed(params, rows), params, hidden)

    def over_rows(self, function: Callable, params, rows: Any) -> Any:
        """`function(unembed, params, rows)` on each device's own rows -> [r ...]; there the unembedding is whole."""
        gather, end = _Gather(self.divided(params), self.dtype), "unembed" if "unembed" in self.axes else "embed"

        def own(params, rows) -> Any:
            params, rows = _scatter_first(params, rows, end)
            return function(self.policy.unembed, gather.named(params, end), rows)

        return self.dealt(own, params, (rows,), jnp.zeros(1))

    def dealt(self, function: Callable, params, rows: tuple, like: Any) -> Any:
        """`function(params, *rows)` for each device's own rows, over the parameters as fsdp divides them.

        The axis of the rows in the results is that of `like`, a leaf of which may stand for a tree.
        """
        count = len(jax.tree.leaves(rows)[0])
        short = -count % row_devices(self.mesh)
        rows = jax.tree.map(partial(_lengthen, short=short), rows)
        out = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(jax.tree.map_with_path(self.spec, params), *jax.tree.map(_dealt_axis, rows)),
            out_specs=jax.tree.map(_dealt_axis, like),
            axis_names=set(AXES if self.mesh.shape[TENSOR] == 1 else ROWS),
            check_vma=False,
        )(params, *rows)
        return out if short == 0 else jax.tree.map(partial(_shorten, count=count), out)

    def spec(self, path: tuple, x: Any) -> PartitionSpec:
        """Say how fsdp divides a parameter, or a part of one that is quantised, wherever it is in a tree."""
        if self.mesh.shape[FSDP] == 1:
            return SHARED
        over = [spec(self.axes[name], x.shape, self.mesh) for name, _ in _places(path) if name in self.axes]
        return PartitionSpec(*(FSDP if axis == FSDP else None for axis in over[0])) if over else SHARED

    def divided(self, params: Any) -> dict[tuple[str, str], int]:
        """The axis that fsdp divides of each parameter, or part of one, that it does."""
        found = {}
        for path, x in jax.tree.leaves_with_path(params):
            over = tuple(self.spec(path, x))
            found |= {place: over.index(FSDP) for place in _places(path) if place[0] in self.axes and FSDP in over}
        return found


class _Gather(NamedTuple):
    """The parameters of other devices, for a device that has its share of each."""

    axis: Mapping[tuple[str, str], int]  # that is divided, by name and part; behind that of the layers, where one is
    dtype: Any  # that is computed in; None leaves them as they are

    def named(self, params: Any, name: str) -> Any:
        """Parameters of which those of this name are whole, wherever in the tree they are."""
        leaves, tree = jax.tree.flatten_with_path(params)
        whole = [self.whole((name, ""), x) if _last(path) == name else x for path, x in leaves]
        return jax.tree.unflatten(tree, whole)

    def layer(self, layer: Params) -> Params:
        """The parameters of one layer, whole; what is no parameter stays as it is."""
        leaves, tree = jax.tree.flatten_with_path(layer)
        return jax.tree.unflatten(tree, [self.whole(_places(path)[-1], x, before=1) for path, x in leaves])

    def whole(self, place: tuple[str, str], x: Array, before: int = 0) -> Array:
        """A parameter, or what is left of it without so many axes before its own, whole."""
        if place not in self.axis:
            return self.computed(x)
        axis = self.axis[place] - before
        if not jnp.issubdtype(x.dtype, jnp.floating):  # of a quantised one, which has no gradient
            return jax.lax.all_gather(x, FSDP, axis=axis, tiled=True)
        return _gather(x, axis, self.computed(x).dtype)

    def computed(self, x: Array) -> Array:
        """A number in the type that is computed in."""
        return x if self.dtype is None else cast(x, self.dtype)

    def lookup(self, table: Array, tokens_rs: Array) -> Array:
        """This device's tokens in a table of which each device has some columns -> [r s d]."""
        table = self.computed(table)
        if ("embed", "") not in self.axis:
            return table[tokens_rs]
        found = table[jax.lax.all_gather(tokens_rs, FSDP, tiled=True)]
        return jax.lax.all_to_all(found, FSDP, split_axis=0, concat_axis=2, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: Array, axis: int, dtype: Any) -> Array:
    """All devices' shares as one array of this type; its gradient is summed over them in the type of the share."""
    return jax.lax.all_gather(x.astype(dtype), FSDP, axis=axis, tiled=True)


def _gather_forward(x: Array, axis: int, dtype: Any) -> tuple[Array, Array]:
    return _gather(x, axis, dtype), jnp.zeros((), x.dtype)


def _gather_backward(axis: int, _dtype: Any, like: Array, d_out: Array) -> tuple[Array]:
    return (jax.lax.psum_scatter(d_out.astype(like.dtype), FSDP, scatter_dimension=axis, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def _scatter_first(params: Any, rows: Any, name: str) -> tuple:
    """Let the backward pass go on to the rows once the gradients of the parameters of this name are divided.

    Otherwise XLA keeps the whole gradient of the unembedding until that of the layers is done. Returns both.
    """
    leaves, tree = jax.tree.flatten_with_path((params, rows))
    waits = [(path[0].idx == 1 or _last(path) == name) and jnp.issubdtype(x.dtype, jnp.inexact) for path, x in leaves]
    found = iter(_together([x for (_, x), wait in zip(leaves, waits, strict=True) if wait]))
    return jax.tree.unflatten(tree, [next(found) if wait else x for (_, x), wait in zip(leaves, waits, strict=True)])


@jax.custom_vjp
def _together(arrays: list[Array]) -> list[Array]:
    """Return the arrays, of whose gradients none goes on before all are there."""
    return arrays


_together.defvjp(lambda arrays: (arrays, None), lambda _, d_arrays: (jax.lax.optimization_barrier(d_arrays),))


def _places(path: tuple) -> list[tuple[str, str]]:
    """Each name in a path with the rest of the path behind it, the innermost first."""
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return [(names[at], "/".join(names[at + 1 :])) for at in reversed(range(len(names)))]


def _dealt_axis(x: Any) -> PartitionSpec:
    return PartitionSpec(*[None] * row_axis(x), ROWS)


def _lengthen(x: Array, short: int) -> Any:
    """Rows with so many more, of zeros."""
    pad = [(0, short if axis == row_axis(x) else 0) for axis in range(jnp.ndim(x))]
    return x if short == 0 else jnp.pad(x, pad)


def _shorten(x: Array, count: int) -> Array:
    return jax.lax.slice_in_dim(x, 0, count, axis=row_axis(x))


def divide_attention(way: Attend, mesh: Mesh) -> Attend:
    """A kernel as one that each device runs on its own heads, where tensor divides them; XLA can't divide a kernel."""
    ways = mesh.shape.get(TENSOR, 1)
    if way is attend or ways == 1:
        return way
    rows = partial(_attend_divided, way=way, ways=ways)
    if not isinstance(way, Kernels):
        return rows
    return Kernels(
        rows,
        partial(_attend_slots_divided, way=way.slots, ways=ways),
        takes=lambda q, k: k.shape[2] % ways == 0 and way.takes(q, k),
    )


def _attend_divided(
    q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig, *, way: Attend, ways: int
) -> Array:
    """Attention of each device's heads; those that the devices don't share evenly are left to the plain formula."""
    if config.k % ways:
        return attend(q, k, v, sight, config)
    every, own, heads = _as_arrays(sight), _share(config, ways), PartitionSpec(None, TENSOR)

    def on_device(q: Array, k: Array, v: Array, every: dict[str, Array]) -> Array:
        return way(q, k, v, Sight(**every), own)

    where = (heads, heads, heads, dict.fromkeys(every, SHARED))
    spread = jax.shard_map(on_device, in_specs=where, out_specs=heads, axis_names={TENSOR}, check_vma=False)
    return spread(q, k, v, every)


def _attend_slots_divided(
    q: Array, slots: Slots, sight: Sight, config: DecoderConfig, *, way: AttendSlots, ways: int
) -> Array:
    """Attention of each device's heads to its own part of a cache."""
    every, own, heads = _as_arrays(sight), _share(config, ways), PartitionSpec(None, TENSOR)
    layers = PartitionSpec(None, None, TENSOR)

    def on_device(q: Array, k: Array, v: Array, index: Array, filled: Array, every: dict[str, Array]) -> Array:
        return way(q, Slots(k, v, index, filled), Sight(**every), own)

    where = (heads, layers, layers, SHARED, SHARED, dict.fromkeys(every, SHARED))
    spread = jax.shard_map(on_device, in_specs=where, out_specs=heads, axis_names={TENSOR}, check_vma=False)
    return spread(q, slots.k, slots.v, jnp.asarray(slots.index, jnp.int32), slots.filled, every)


def _as_arrays(sight: Sight) -> dict[str, Array]:
    every = {name: x for name, x in sight._asdict().items() if x is not None}
    return every | {"window": jnp.asarray(sight.window, jnp.int32)}


def _share(config: DecoderConfig, ways: int) -> DecoderConfig:
    """The shape of one device's heads."""
    return replace(config, h=config.h // ways, k=config.k // ways)


# Programs ---------------------------------------------------------------------------------------------


def jit_update(update: Callable, shardings: Any, *, donate: bool = False) -> Callable:
    """`update(state, ...) -> (state, metrics)` compiled so that the state lies as it did, and figures lie everywhere.

    With `donate` the state that is given is used up.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    after = (shardings, NamedSharding(mesh, SHARED))
    return jax.jit(update, out_shardings=after, donate_argnums=(0,) if donate else ())


def pmap_update(make: Callable[[Policy], Callable], policy: Policy, devices: Sequence[Any] | None = None) -> Callable:
    """Compile `update(states, batch, ref_params=None) -> (states, metrics)` by `jax.pmap`; see also `jit_update`.

    `make(policy)` makes an update, as `make_update` does. `states` holds the state of every device along a first axis
    (`repeat_tree`; `jax.tree.map(lambda x: x[0], states)` is one of them).
    """
    devices = jax.devices() if devices is None else devices
    update = make(policy._replace(mesh=PerDevice(AXIS, len(devices))))
    mapped = jax.pmap(update, AXIS, in_axes=(0, None, None), out_axes=(0, None), devices=devices)
    return lambda states, batch, ref_params=None: mapped(states, batch, ref_params)


def repeat_tree(tree: Any, count: int) -> Any:
    """The tree `count` times, along a new first axis."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (count, *x.shape)), tree)


def mesh_of(text: str | None) -> Mesh | None:
    """All devices side by side, or as `data=2,fsdp=4` says; `none` leaves everything where it is."""
    if text == "none":
        return None
    return data_mesh() if text is None else make_mesh(parse_mesh(text, jax.device_count()))


def place_state(tree: Any, mesh: Mesh | None, axes: Any) -> Any:
    """Place whatever holds parameters with these axis letters, each array where the mesh has it."""
    if mesh is None or not divides(mesh):
        return share(tree, mesh)
    return place_on_devices(tree, state_shardings(tree, mesh, axes))
