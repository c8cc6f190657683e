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
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flowgrpo.contracts import Params, Policy
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import critic_parameters
from flowgrpo.models.decoder import parameters
from flowgrpo.models.trainable import WHOLE, Trained, acting
from flowgrpo.parallel.row_sharding import (
    AXIS,
    FSDP,
    SHARED,
    TENSOR,
    DeviceMesh,
    PerDevice,
    data_mesh,
    divides,
    lay,
    place_on_devices,
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
    """How the array at a place of a state is divided: as the parameter with the longest place that is part of it."""
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
    """The policy on a mesh: each layer runs on the rows of its devices, over parameters gathered for it alone.

    Numbers are the same without. But left to itself XLA divides hidden states as the parameters are, by d over
    fsdp, and moves them between devices for every product. `axes` has the letters of all parameters, in their tree.
    """
    policy = policy._replace(mesh=mesh)
    if not (isinstance(mesh, Mesh) and divides(mesh)):
        return policy
    settling = _Settling(policy, mesh, {_last(path): letters for path, letters in jax.tree.leaves_with_path(axes)})
    return policy._replace(hidden=settling.hidden, unembed=settling.unembed, unstack_layers=None, hidden_after=None)


@dataclass(frozen=True, eq=False)
class _Settling:
    """A policy whose rows and parameters are laid out on a mesh where they are used."""

    policy: Policy
    mesh: Mesh
    axes: Mapping[str, str]

    def hidden(self, params, *inputs) -> tuple:
        """Compute hidden states, settled on the mesh."""
        return self.policy.hidden(self.ends(params), *inputs, settle=self.settle)

    def unembed(self, params, hidden: Array) -> Array:
        """Compute logits of hidden states that are laid on the mesh."""
        return self.policy.unembed(self.ends(params), lay(hidden, self.mesh))

    def settle(self, x_rsd: Array, layer: Params) -> tuple[Array, Params]:
        """The rows that enter a layer, and its parameters."""
        return lay(x_rsd, self.mesh), {name: self.gather(name, value) for name, value in layer.items()}

    def ends(self, params: Any) -> Any:
        """Parameters whose first or last matrix is gathered, wherever in the tree that is."""
        ends = {name for name, letters in self.axes.items() if "v" in letters}
        leaves = [(_last(path), x) for path, x in jax.tree.leaves_with_path(params)]
        gathered = [self.gather(name, x) if name in ends else x for name, x in leaves]
        return jax.tree.unflatten(jax.tree.structure(params), gathered)

    def gather(self, name: str, value: Any) -> Any:
        """A parameter whole along its model axis; what is no parameter stays as it is.

        Of one that is quantised, values and scales have the same axes each, and are moved as they are.
        """
        if name not in self.axes:
            return value
        return jax.tree.map(partial(self._gather, self.axes[name].removeprefix("n")), value)

    def _gather(self, letters: str, x: Array) -> Array:
        whole = [None if over == FSDP else over for over in spec(letters, x.shape, self.mesh)]
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*whole)))


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
    """Whatever holds parameters with these axis letters, each array where the mesh has it."""
    if mesh is None or not divides(mesh):
        return share(tree, mesh)
    return place_on_devices(tree, state_shardings(tree, mesh, axes))
