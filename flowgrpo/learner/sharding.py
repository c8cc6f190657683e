"""How parameters lie on a mesh of devices: axis letters and one table of rules flow in, named shardings flow out.

    mesh = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2"))
    axes = decoder_axes(config)                                  # {"embed": "vd", "q": "ndhe", ...}
    where = state_shardings(jax.eval_shape(start), mesh, axes)   # a state of shardings
    step = jit_update(make_update(..., mesh=mesh), where)
    state, metrics = step(place(state, where), batch)

    data      rows are dealt, parameters are whole on every device
    fsdp      rows are dealt as well, and each parameter's model axis d (Zhao et al., 2023, arXiv:2304.11277)
    tensor    heads, feed-forward width and vocabulary are divided (Shoeybi et al., 2019, arXiv:1909.08053)

An axis that the devices do not divide evenly stays whole on each of them; `explain` shows which do. What an optimizer
remembers of a parameter lies where the parameter does, and counters lie everywhere.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flowgrpo.learner.trained import WHOLE, Trained
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import critic_parameters
from flowgrpo.models.decoder import parameters
from flowgrpo.spread import AXIS, FSDP, SHARED, TENSOR
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


def param_shardings(abstract_params: Any, mesh: Mesh, axes_of: Any) -> Any:
    """The sharding of every parameter; `axes_of` is a tree like theirs with axis letters in the place of arrays."""
    leaves, structure = jax.tree.flatten(abstract_params)
    letters = _letters(abstract_params, axes_of)
    placed = [NamedSharding(mesh, spec(axes, x.shape, mesh)) for x, axes in zip(leaves, letters, strict=True)]
    return jax.tree.unflatten(structure, placed)


def state_shardings(abstract_state: Any, mesh: Mesh, axes_of: Any, *, trained: Trained = WHOLE) -> Any:
    """The sharding of everything in a state that holds such parameters somewhere, such as a LearnerState or a Run.

    An array belongs to the parameter whose place in the tree its own place ends with; where its shape is another, as
    of factored or 8-bit memory, the first axis that can be is divided. What belongs to none lies on every device.
    """
    known = {}
    for axes in (axes_of, trained.take(axes_of)):
        known |= {tuple(path): letters for path, letters in jax.tree.leaves_with_path(axes)}
    leaves, structure = jax.tree.flatten_with_path(abstract_state)
    return jax.tree.unflatten(
        structure, [NamedSharding(mesh, _find(known, tuple(path), x, mesh)) for path, x in leaves]
    )


def _find(known: Mapping[tuple, str], path: tuple, x: Any, mesh: Mesh) -> PartitionSpec:
    """How the array at a place of a state is divided."""
    for start in range(len(path)):
        axes = known.get(path[start:])
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


# Programs ---------------------------------------------------------------------------------------------


def jit_update(update: Callable, shardings: Any, *, donate: bool = False) -> Callable:
    """`update(state, ...) -> (state, metrics)` compiled so that the state lies as it did, and figures lie everywhere.

    With `donate` the state that is given is used up.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    after = (shardings, NamedSharding(mesh, SHARED))
    return jax.jit(update, out_shardings=after, donate_argnums=(0,) if donate else ())
