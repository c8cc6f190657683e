"""Shard parameters and rows over a mesh of devices, by the axis letters of the parameters and one table of rules.

    mesh = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2"))
    axes = decoder_axes(config)                                  # {"embed": "vd", "q": "ndhe", ...}
    shardings = state_shardings(jax.eval_shape(lambda: state), mesh, axes)
    step = jit_update(make_update(shard_policy(policy, mesh, axes), algorithm, optimizer), shardings)
    state, metrics = step(place_on_devices(state, shardings), batch)  # of `row_sharding`

    data      rows are sharded; parameters are replicated
    fsdp      rows are sharded too, and the model axis d of each parameter (Zhao et al., 2023, arXiv:2304.11277)
    tensor    heads, feed-forward width and vocabulary are sharded (Shoeybi et al., 2019, arXiv:1909.08053)

An axis whose size the number of devices does not divide is replicated; `explain_sharding` shows which are. The
optimizer state of a parameter is sharded as the parameter is, and counters are replicated.
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

from flowgrpo.contracts import Policy, ShardedPolicy
from flowgrpo.generate.sampler import row_axis
from flowgrpo.models.attention import Attend, AttendCache, AttentionKernels, LayerCache, MaskSpec, attend
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.critic import critic_parameters
from flowgrpo.models.decoder import ParamGather, parameters
from flowgrpo.models.trainable import ALL_PARAMS, TrainableSubset, actor_params, cast
from flowgrpo.parallel.row_sharding import (
    DATA,
    FSDP,
    REPLICATED,
    ROW_AXES,
    TENSOR,
    DeviceMesh,
    PmapAxis,
    data_mesh,
    has_model_axes,
    place_on_devices,
    replicate,
    row_devices,
)
from flowgrpo.types import BadInput, Params, PyTree

MESH_AXES = (DATA, FSDP, TENSOR)
RULES = {"v": TENSOR, "h": TENSOR, "k": TENSOR, "f": TENSOR, "d": FSDP}  # axis letter -> mesh axis; n, e, z: none

# Meshes -----------------------------------------------------------------------------------------------


def parse_mesh(text: str, devices: int | None = None) -> dict[str, int]:
    """Sizes of the mesh axes from text such as `data=4,fsdp=2`; axes that it doesn't name have size 1.

    With `devices`, their number, the product of the sizes must be equal to it.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in MESH_AXES:
            raise BadInput(f"mesh {text!r}: {name!r} is no axis; write data=4,fsdp=2,tensor=1 with those you need")
        if name in sizes:
            raise BadInput(f"mesh {text!r}: {name} is given twice; give it once")
        if not (size.isascii() and size.isdigit() and int(size) > 0):
            raise BadInput(f"mesh {text!r}: {name} is {size!r}, but must be a whole number of at least 1")
        sizes[name] = int(size)
    sizes = {name: sizes.get(name, 1) for name in MESH_AXES}
    if devices is not None:
        _check_devices(sizes, devices)
    return sizes


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of these sizes, with the axes data, fsdp and tensor, over `devices` (by default all)."""
    unknown = sorted(set(sizes) - set(MESH_AXES))
    if unknown:
        raise BadInput(f"{unknown[0]!r} is no axis of a mesh; they are {', '.join(MESH_AXES)}")
    sizes = {name: sizes.get(name, 1) for name in MESH_AXES}
    devices = jax.devices() if devices is None else devices
    _check_devices(sizes, len(devices))
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices
    )


def _check_devices(sizes: Mapping[str, int], devices: int) -> None:
    total = math.prod(sizes.values())
    if total != devices:
        shown = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise BadInput(f"mesh {shown} has {total} devices, but there are {devices}: their product must be {devices}")


# One array --------------------------------------------------------------------------------------------


def partition_spec(axes: str, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """The mesh axis that shards each axis of an array, by `RULES`; each mesh axis is used once at most."""
    if len(axes) != len(shape):
        raise BadInput(f"an array of shape {list(shape)} can't have the axes {axes!r}: give one letter for each")
    mesh_axes: list[str | None] = []
    for letter, size in zip(axes, shape, strict=True):
        mesh_axis = RULES.get(letter)
        num_shards = 1 if mesh_axis is None else mesh.shape.get(mesh_axis, 1)
        is_sharded = num_shards > 1 and size % num_shards == 0 and mesh_axis not in mesh_axes
        mesh_axes.append(mesh_axis if is_sharded else None)
    return PartitionSpec(*mesh_axes)


def unsharded_axes(axes: str, shape: Sequence[int], mesh: Mesh) -> str:
    """The axis letters that `RULES` would shard, but whose size does not allow it."""
    spec = partition_spec(axes, shape, mesh)
    has_rule = [letter in RULES and mesh.shape.get(RULES[letter], 1) > 1 for letter in axes]
    return "".join(
        letter for letter, rule, mesh_axis in zip(axes, has_rule, spec, strict=True) if rule and mesh_axis is None
    )


def explain_sharding(abstract_params: PyTree, mesh: Mesh, axes_of: PyTree) -> str:
    """A table of the parameters: axes, shape, what shards them, megabytes on one device, and axes left unsharded."""
    lines = [("parameter", "axes", "shape", "sharded over", "MB a device", "unsharded")]
    total = 0
    if jax.tree.structure(abstract_params) != jax.tree.structure(axes_of):
        raise BadInput(f"the axis letters {jax.tree.structure(axes_of)} are no tree like that of the parameters")
    for (path, x), axes in zip(jax.tree.leaves_with_path(abstract_params), jax.tree.leaves(axes_of), strict=True):
        sharding = NamedSharding(mesh, partition_spec(axes, x.shape, mesh))
        size = math.prod(sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
        over = " ".join(
            f"{letter}:{mesh_axis}" for letter, mesh_axis in zip(axes, sharding.spec, strict=True) if mesh_axis
        )
        shape, unsharded = "x".join(map(str, x.shape)), " ".join(unsharded_axes(axes, x.shape, mesh))
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        lines.append((name, axes, shape, over or "-", f"{size / 1e6:.3f}", unsharded or "-"))
        total += size
    lines.append(("all", "", "", "", f"{total / 1e6:.3f}", ""))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


# Trees of arrays --------------------------------------------------------------------------------------


def decoder_axes(config: DecoderConfig) -> dict[str, str]:
    """Axis letters of every parameter of a decoder; `lora.adapter_axes` has those of an adapter."""
    return {name: parameter.axes for name, parameter in parameters(config).items()}


def critic_axes(config: DecoderConfig) -> dict[str, str]:
    """Axis letters of every parameter of a critic."""
    return {name: parameter.axes for name, parameter in critic_parameters(config).items()}


def state_shardings(
    abstract_state: PyTree, mesh: Mesh, axes_of: PyTree, *, trainable: TrainableSubset = ALL_PARAMS
) -> PyTree:
    """The sharding of every array of a state that contains parameters, such as a `LearnerState` or a `TrainState`.

    An array belongs to a parameter if the parameter's path is a part of its own path. If it has other axes, as in
    factored optimizer states, its first axis of a suitable size is sharded. All other arrays are replicated.
    """
    letters_of = {}
    subset = trainable.split(axes_of)
    for axes in (axes_of, subset, actor_params(subset)):
        letters_of |= {tuple(path): letters for path, letters in jax.tree.leaves_with_path(axes)}
    leaves, structure = jax.tree.flatten_with_path(abstract_state)
    return jax.tree.unflatten(
        structure, [NamedSharding(mesh, _find_spec(letters_of, tuple(path), x, mesh)) for path, x in leaves]
    )


def _find_spec(letters_of: Mapping[tuple, str], path: tuple, x: Any, mesh: Mesh) -> PartitionSpec:
    """Shard an array like the parameter with the longest path that is part of the array's path."""
    for length in range(len(path), 0, -1):
        for start in range(len(path) - length + 1):
            axes = letters_of.get(path[start : start + length])
            if axes is not None:
                return (
                    partition_spec(axes, x.shape, mesh) if len(axes) == len(x.shape) else _shard_any_axis(x.shape, mesh)
                )
    return REPLICATED


def _shard_any_axis(shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Shard the first axis of a suitable size over all devices that shard parameters."""
    mesh_axes = tuple(axis for axis in (FSDP, TENSOR) if mesh.shape.get(axis, 1) > 1)
    num_shards = math.prod(mesh.shape[axis] for axis in mesh_axes)
    fits = [bool(mesh_axes) and size % num_shards == 0 for size in shape]
    return PartitionSpec(*[None] * fits.index(True), mesh_axes) if any(fits) else REPLICATED


def _last_name(path: tuple) -> str:
    return jax.tree_util.keystr(path[-1:], simple=True)


# Policies ---------------------------------------------------------------------------------------------


def shard_policy(policy: Policy, mesh: DeviceMesh, axes: PyTree) -> Policy:
    """The policy on a mesh: each device runs its own rows, over parameters that are gathered layer by layer.

    Results are the same as on one device. A layer is gathered over fsdp when it runs, and again in the backward pass if
    layers are recomputed; its gradient is summed over the devices and scattered in one step. For the embedding, rows of
    hidden states are exchanged and not the table. What tensor shards is left to XLA. `axes` is a tree like that of the
    parameters, with their axis letters.
    """
    policy = policy._replace(mesh=mesh)
    if not (isinstance(mesh, Mesh) and has_model_axes(mesh)):
        return policy
    letters_of = {_last_name(path): letters for path, letters in jax.tree.leaves_with_path(axes)}
    return _PolicySharder(policy, mesh, letters_of).policy_on_mesh()


@dataclass(frozen=True, eq=False)
class _PolicySharder:
    """A policy whose rows are sharded over a mesh, and whose parameters are gathered where they are used."""

    policy: Policy
    mesh: Mesh
    axes: Mapping[str, str]  # axis letters of each parameter, by its name
    dtype: Any = None  # that each device casts its shards to before they are gathered

    def policy_on_mesh(self) -> Policy:
        """The sharded policy."""
        return self.policy._replace(
            hidden=self.hidden,
            unembed=self.unembed,
            # Layers that fsdp shards are gathered when they run, and can't be unstacked before.
            unstack_layers=self.policy.unstack_layers if self.mesh.shape[FSDP] == 1 else None,
            hidden_tree=None if self.policy.hidden_tree is None else self.hidden_tree,
            sharded=ShardedPolicy(self.policy._replace(mesh=None), self.over_rows, self.in_dtype),
        )

    def in_dtype(self, dtype: Any) -> Policy:
        """The policy, computing in another dtype; gradients are summed over devices in the parameters' dtype."""
        return replace(self, dtype=dtype).policy_on_mesh()

    def hidden(self, params, tokens, positions=None, segments=None, cache=None) -> tuple:
        """Hidden states, each device computing those of its own rows."""
        gather = _Gather(self.sharded_axes(params), self.dtype)

        def on_device(params, *rows) -> tuple:
            return self.policy.hidden(
                gather.named(params, "norm"),
                *rows,
                gather=ParamGather(gather.lookup, gather.layer),
                shard_attention=partial(shard_attention, mesh=self.mesh),
            )

        rows = (jnp.asarray(tokens), positions, segments, cache)
        return self.shard_map_rows(on_device, params, rows, (jnp.asarray(tokens), cache))

    def hidden_tree(self, params, tokens, positions, ends) -> Array:
        """Hidden states of trees, each device computing those of its own rows."""
        gather = _Gather(self.sharded_axes(params), self.dtype)

        def on_device(params, *trees) -> Array:
            assert self.policy.hidden_tree is not None
            return self.policy.hidden_tree(
                gather.named(params, "norm"),
                *trees,
                gather=ParamGather(gather.lookup, gather.layer),
                shard_attention=partial(shard_attention, mesh=self.mesh),
            )

        trees = tuple(jnp.asarray(x) for x in (tokens, positions, ends))
        return self.shard_map_rows(on_device, params, trees, trees[0])

    def unembed(self, params, hidden: Array) -> Array:
        """Logits, each device computing those of its own rows."""
        return self.over_rows(lambda unembed, params, rows: unembed(params, rows), params, hidden)

    def over_rows(self, function: Callable, params, rows: Any) -> Any:
        """`function(unembed, params, rows)` on each device's own rows, with the whole unembedding -> [r ...]."""
        gather, name = _Gather(self.sharded_axes(params), self.dtype), "unembed" if "unembed" in self.axes else "embed"

        def on_device(params, rows) -> Any:
            params, rows = _scatter_first(params, rows, name)
            return function(self.policy.unembed, gather.named(params, name), rows)

        return self.shard_map_rows(on_device, params, (rows,), jnp.zeros(1))

    def shard_map_rows(self, function: Callable, params, rows: tuple, like: Any) -> Any:
        """`function(params, *rows)` on each device, with its own rows and its fsdp shards of the parameters.

        The axis of the rows in the results is that of `like`, a leaf of which may stand for a tree.
        """
        count = len(jax.tree.leaves(rows)[0])
        short = -count % row_devices(self.mesh)
        rows = jax.tree.map(partial(_pad_rows, short=short), rows)
        out = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(jax.tree.map_with_path(self.fsdp_spec, params), *jax.tree.map(_row_spec, rows)),
            out_specs=jax.tree.map(_row_spec, like),
            axis_names=set(MESH_AXES if self.mesh.shape[TENSOR] == 1 else ROW_AXES),
            check_vma=False,
        )(params, *rows)
        if short == 0:
            return out
        return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, 0, count, axis=row_axis(x)), out)

    def fsdp_spec(self, path: tuple, x: Any) -> PartitionSpec:
        """How fsdp shards a parameter, or an array of a quantised one, at any path of a tree."""
        if self.mesh.shape[FSDP] == 1:
            return REPLICATED
        specs = [
            partition_spec(self.axes[name], x.shape, self.mesh) for name, _ in _name_and_rest(path) if name in self.axes
        ]
        return PartitionSpec(*(FSDP if axis == FSDP else None for axis in specs[0])) if specs else REPLICATED

    def sharded_axes(self, params: Params) -> dict[tuple[str, str], int]:
        """The axis that fsdp shards, for each parameter (or array of a quantised one) that it does shard."""
        axis_of = {}
        for path, x in jax.tree.leaves_with_path(params):
            spec = tuple(self.fsdp_spec(path, x))
            axis_of |= {key: spec.index(FSDP) for key in _name_and_rest(path) if key[0] in self.axes and FSDP in spec}
        return axis_of


class _Gather(NamedTuple):
    """Gathers parameters for a device that has a shard of each."""

    axis: Mapping[tuple[str, str], int]  # sharded axis by (name, rest of the path), counted with the layer axis if any
    dtype: Any  # to compute in; None: that of the parameters

    def named(self, params: Params, name: str) -> Params:
        """The parameters, with those of this name gathered, wherever they are in the tree."""
        leaves, tree = jax.tree.flatten_with_path(params)
        gathered = [self.whole((name, ""), x) if _last_name(path) == name else x for path, x in leaves]
        return jax.tree.unflatten(tree, gathered)

    def layer(self, layer: Params) -> Params:
        """The parameters of one layer, gathered; arrays that are no parameters stay as they are."""
        leaves, tree = jax.tree.flatten_with_path(layer)
        gathered = [self.whole(_name_and_rest(path)[-1], x, axes_removed=1) for path, x in leaves]
        return jax.tree.unflatten(tree, gathered)

    def whole(self, key: tuple[str, str], x: Array, axes_removed: int = 0) -> Array:
        """A parameter gathered, from a shard without its first `axes_removed` axes."""
        if key not in self.axis:
            return self.cast(x)
        axis = self.axis[key] - axes_removed
        if not jnp.issubdtype(x.dtype, jnp.floating):  # of a quantised parameter, which has no gradient
            return jax.lax.all_gather(x, FSDP, axis=axis, tiled=True)
        return _gather(x, axis, self.cast(x).dtype)

    def cast(self, x: Array) -> Array:
        """An array in the compute dtype."""
        return x if self.dtype is None else cast(x, self.dtype)

    def lookup(self, table: Array, tokens_rs: Array) -> Array:
        """Embeddings of this device's tokens, from a table whose columns are sharded -> [r s d]."""
        table = self.cast(table)
        if ("embed", "") not in self.axis:
            return table[tokens_rs]
        columns = table[jax.lax.all_gather(tokens_rs, FSDP, tiled=True)]
        return jax.lax.all_to_all(columns, FSDP, split_axis=0, concat_axis=2, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: Array, axis: int, dtype: Any) -> Array:
    """All devices' shards as one array of this dtype; its gradient is summed over them in the shard's own dtype."""
    return jax.lax.all_gather(x.astype(dtype), FSDP, axis=axis, tiled=True)


def _gather_forward(x: Array, axis: int, dtype: Any) -> tuple[Array, Array]:
    return _gather(x, axis, dtype), jnp.zeros((), x.dtype)


def _gather_backward(axis: int, _dtype: Any, like: Array, d_out: Array) -> tuple[Array]:
    return (jax.lax.psum_scatter(d_out.astype(like.dtype), FSDP, scatter_dimension=axis, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def _scatter_first(params: Params, rows: Any, name: str) -> tuple:
    """Make the backward pass scatter the gradients of the parameters of this name before it continues with the rows.

    Otherwise XLA keeps the whole gradient of the unembedding until that of the layers is done. Returns both arguments.
    """
    leaves, tree = jax.tree.flatten_with_path((params, rows))
    waits = [
        (path[0].idx == 1 or _last_name(path) == name) and jnp.issubdtype(x.dtype, jnp.inexact) for path, x in leaves
    ]
    joined = iter(_join_gradients([x for (_, x), wait in zip(leaves, waits, strict=True) if wait]))
    return jax.tree.unflatten(tree, [next(joined) if wait else x for (_, x), wait in zip(leaves, waits, strict=True)])


@jax.custom_vjp
def _join_gradients(arrays: list[Array]) -> list[Array]:
    """The arrays; none of their gradients is used before all have been computed."""
    return arrays


_join_gradients.defvjp(lambda arrays: (arrays, None), lambda _, d_arrays: (jax.lax.optimization_barrier(d_arrays),))


def _name_and_rest(path: tuple) -> list[tuple[str, str]]:
    """Each name in a path with the rest of the path behind it, the innermost first."""
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return [(names[at], "/".join(names[at + 1 :])) for at in reversed(range(len(names)))]


def _row_spec(x: Any) -> PartitionSpec:
    return PartitionSpec(*[None] * row_axis(x), ROW_AXES)


def _pad_rows(x: Array, short: int) -> Any:
    """Append `short` rows of zeros."""
    pad = [(0, short if axis == row_axis(x) else 0) for axis in range(jnp.ndim(x))]
    return x if short == 0 else jnp.pad(x, pad)


def shard_attention(attend_fn: Attend, mesh: Mesh) -> Attend:
    """A kernel that each device runs on its own heads, if tensor shards them; XLA can't partition a kernel."""
    num_shards = mesh.shape.get(TENSOR, 1)
    if attend_fn is attend or num_shards == 1:
        return attend_fn
    rows = partial(_attend_sharded, attend_fn=attend_fn, num_shards=num_shards)
    if not isinstance(attend_fn, AttentionKernels):
        return rows
    return AttentionKernels(
        rows,
        partial(_attend_cache_sharded, attend_fn=attend_fn.cached, num_shards=num_shards),
        supports=lambda q, k: k.shape[2] % num_shards == 0 and attend_fn.supports(q, k),
    )


def _attend_sharded(
    q: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig, *, attend_fn: Attend, num_shards: int
) -> Array:
    """Attention of each device's heads; heads that can't be sharded evenly are left to the plain formula."""
    if config.k % num_shards:
        return attend(q, k, v, mask, config)
    arrays, shard_config, heads = _mask_arrays(mask), _shard_heads(config, num_shards), PartitionSpec(None, TENSOR)

    def on_device(q: Array, k: Array, v: Array, arrays: dict[str, Array]) -> Array:
        return attend_fn(q, k, v, MaskSpec(**arrays), shard_config)

    specs = (heads, heads, heads, dict.fromkeys(arrays, REPLICATED))
    sharded = jax.shard_map(on_device, in_specs=specs, out_specs=heads, axis_names={TENSOR}, check_vma=False)
    return sharded(q, k, v, arrays)


def _attend_cache_sharded(
    q: Array, cache: LayerCache, mask: MaskSpec, config: DecoderConfig, *, attend_fn: AttendCache, num_shards: int
) -> Array:
    """Attention of each device's heads to its shard of a cache."""
    arrays, shard_config, heads = _mask_arrays(mask), _shard_heads(config, num_shards), PartitionSpec(None, TENSOR)
    layers = PartitionSpec(None, None, TENSOR)

    def on_device(q: Array, k: Array, v: Array, index: Array, filled: Array, arrays: dict[str, Array]) -> Array:
        return attend_fn(q, LayerCache(k, v, index, filled), MaskSpec(**arrays), shard_config)

    specs = (heads, layers, layers, REPLICATED, REPLICATED, dict.fromkeys(arrays, REPLICATED))
    sharded = jax.shard_map(on_device, in_specs=specs, out_specs=heads, axis_names={TENSOR}, check_vma=False)
    return sharded(q, cache.k, cache.v, jnp.asarray(cache.index, jnp.int32), cache.filled, arrays)


def _mask_arrays(mask: MaskSpec) -> dict[str, Array]:
    arrays = {name: x for name, x in mask._asdict().items() if x is not None}
    return arrays | {"window": jnp.asarray(mask.window, jnp.int32)}


def _shard_heads(config: DecoderConfig, num_shards: int) -> DecoderConfig:
    """The shape of one device's heads."""
    return replace(config, h=config.h // num_shards, k=config.k // num_shards)


# Programs ---------------------------------------------------------------------------------------------


def jit_update(update: Callable, shardings: PyTree, *, donate: bool = False) -> Callable:
    """`update(state, ...) -> (state, metrics)`, compiled so that the state keeps its sharding; metrics are replicated.

    `donate` gives the memory of the input state to the output.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    out_shardings = (shardings, NamedSharding(mesh, REPLICATED))
    return jax.jit(update, out_shardings=out_shardings, donate_argnums=(0,) if donate else ())


def pmap_update(make: Callable[[Policy], Callable], policy: Policy, devices: Sequence[Any] | None = None) -> Callable:
    """Compile `update(states, batch, ref_params=None) -> (states, metrics)` by `jax.pmap`; see also `jit_update`.

    `make(policy)` makes an update, as `make_update` does. `states` is the state repeated along a first axis of devices
    (`repeat_tree`); `jax.tree.map(lambda x: x[0], states)` is one of them.
    """
    devices = jax.devices() if devices is None else devices
    update = make(policy._replace(mesh=PmapAxis(DATA, len(devices))))
    mapped = jax.pmap(update, DATA, in_axes=(0, None, None), out_axes=(0, None), devices=devices)
    return lambda states, batch, ref_params=None: mapped(states, batch, ref_params)


def repeat_tree(tree: PyTree, count: int) -> PyTree:
    """The tree `count` times, along a new first axis."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (count, *x.shape)), tree)


def resolve_mesh(text: str | None) -> Mesh | None:
    """The mesh that a setting describes: `data=2,fsdp=4`; None: all devices along data; "none": no mesh."""
    if text == "none":
        return None
    return data_mesh() if text is None else make_mesh(parse_mesh(text, jax.device_count()))


def place_state(tree: PyTree, mesh: Mesh | None, axes: PyTree) -> PyTree:
    """Put a tree that contains parameters with these axis letters on the devices, sharded as `state_shardings` says."""
    if mesh is None or not has_model_axes(mesh):
        return replicate(tree, mesh)
    return place_on_devices(tree, state_shardings(tree, mesh, axes))
