"""Lower bounds on the memory and work of a model, by formula, and the matrix products of a traced program.

    memory:  parameters + gradients + optimizer + activations + a chunk of logits
    work:    2 FLOPs per weight and token forward, twice that backward, once more if layers are recomputed (remat)

Activations are what the backward pass reads of each layer: the inputs of its products and non-linearities. With `remat`
only the input of each layer is stored, and the other activations for one layer at a time. An axis that the mesh doesn't
divide evenly is not sharded, as in `sharding`. Nothing is compiled here; `dry_run` compiles.

`count_products` counts FLOPs and bytes of the matrix products of a jaxpr, for all devices together. XLA's own cost
analysis counts the body of a loop once; here a product within a loop counts as often as the loop runs: a scan has its
length, and for a loop that ends on a condition the caller gives the number, by depth. Products are nearly all FLOPs of
a decoder, and their operands nearly all bytes that no compiler can avoid.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import parameters, shape_of
from flowgrpo.parallel.sharding import partition_spec as partition_spec
from flowgrpo.types import BadInput


class MatmulWork(NamedTuple):
    """FLOPs and bytes of the matrix products of a program."""

    flops: float = 0.0
    bytes: float = 0.0  # of operands and results, once per product
    kernels: float = 0.0  # FLOPs of products within hand-written kernels


def count_products(jaxpr: Any, trips: Sequence[int] = (), platform: str = "cpu") -> MatmulWork:
    """The work of a jaxpr.

    Args:
        trips: number of iterations of loops on a condition: the outermost, those within it, and so on; deeper ones run
            once.
        platform: whose branch counts, of branches by platform; of other branches the one with the most work counts.
    """
    total = MatmulWork()
    for equation in jaxpr.eqns:
        work = _product(equation) if equation.primitive.name == "dot_general" else MatmulWork()
        for times, inner, inner_trips in _inner_jaxprs(equation, tuple(trips), platform):
            work = _add(work, count_products(inner, inner_trips, platform), times)
        if equation.primitive.name == "pallas_call":
            work = work._replace(kernels=work.flops)
        total = _add(total, work)
    return total


def _inner_jaxprs(equation: Any, trips: tuple[int, ...], platform: str) -> Iterator[tuple[float, Any, tuple[int, ...]]]:
    """The jaxprs within an equation: how often each runs, and the trips of the loops in it."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        yield (trips[0] if trips else 1), params["body_jaxpr"].jaxpr, trips[1:]
    elif name == "scan":
        yield params["length"], params["jaxpr"].jaxpr, trips
    elif name == "cond":
        branches = [branch.jaxpr for branch in params["branches"]]
        if platforms := params.get("branches_platforms"):  # None: any platform that has no branch of its own
            matching = [branch for branch, names in zip(branches, platforms, strict=True) if platform in (names or ())]
            branches = matching or [branch for branch, names in zip(branches, platforms, strict=True) if names is None]
        yield 1, max(branches, key=lambda x: count_products(x, trips, platform)), trips
    else:
        times = 1
        if name == "shard_map":  # each device runs the body on its shard; other axes are whole in it
            times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
        if name == "pallas_call":  # a kernel runs once for each point of its grid
            times = math.prod(params["grid_mapping"].grid)
        for value in params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield times, inner, trips


def _product(equation: Any) -> MatmulWork:
    """Two FLOPs for each pair of numbers that is multiplied."""
    (summed, _), _ = equation.params["dimension_numbers"]
    shapes = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    terms = math.prod(shapes[0].shape[axis] for axis in summed)
    moved = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in shapes)
    return MatmulWork(2.0 * terms * math.prod(shapes[-1].shape), float(moved))


def _add(a: MatmulWork, b: MatmulWork, times: float = 1) -> MatmulWork:
    return MatmulWork(*(x + times * y for x, y in zip(a, b, strict=True)))


GRADIENT = 4  # bytes: gradients of micro-batches are summed in float32


@dataclass(frozen=True)
class Workload:
    """Sizes of an update and of the rollout before it, for all devices unless noted.

    Args:
        rows: rows of a batch.
        length: tokens per row.
        micro_rows: rows per micro-batch of one device.
        slots: rows that are decoded together.
        prompt: tokens of a prefill.
        steps: steps per call of decoding.
        remat: whether the backward pass recomputes layers.
        dtype: of the parameters and the cache.
        compute_dtype: of the products of the update; None: `dtype`.
        chunk: tokens whose logits are in memory at once.
        mini_batches: gradient steps per epoch.
        epochs: passes over the batch.
    """

    rows: int = 256
    length: int = 4096
    micro_rows: int = 1
    slots: int = 64
    prompt: int = 512
    steps: int = 128
    remat: bool = True
    dtype: Any = "bfloat16"
    compute_dtype: Any = None
    chunk: int = 1024
    mini_batches: int = 1
    epochs: int = 1

    def __post_init__(self):
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is int and value < 1:
                raise BadInput(f"{item.name} is {value}, but must be at least 1")
        if self.prompt >= self.length:
            raise BadInput(f"the prompt has {self.prompt} tokens and a row {self.length}: leave room for an answer")


def count_parameters(config: DecoderConfig) -> int:
    """Number of parameters of a decoder."""
    return sum(math.prod(shape_of(parameter, config)) for parameter in parameters(config).values())


def forward_flops(config: DecoderConfig, tokens: int, context_tokens: float) -> float:
    """FLOPs of a forward pass of `tokens` that attend to `context_tokens` on average; windows are ignored."""
    weights = count_parameters(config) - (0 if config.tied else config.v * config.d)
    return tokens * (2.0 * weights + 4.0 * config.num_layers * config.h * config.e * context_tokens)


def mesh_size(mesh: Mapping[str, int], *axes: str) -> int:
    """Number of devices along these axes of a mesh."""
    return math.prod(mesh.get(axis, 1) for axis in axes)


def numbers_on_device(axes: str, shape: Sequence[int], mesh: Mapping[str, int]) -> float:
    """Number of elements on one device of an array with these axis letters."""
    sizes: Any = AbstractMesh(tuple(mesh.values()), tuple(mesh))  # only its shape is read
    return math.prod(shape) / mesh_size(mesh, *(axis for axis in partition_spec(axes, shape, sizes) if axis))


def sharded_parameters(config: DecoderConfig, mesh: Mapping[str, int]) -> float:
    """Number of parameters on one device."""
    return sum(numbers_on_device(x.axes, shape_of(x, config), mesh) for x in parameters(config).values())


def update_floor(config: DecoderConfig, job: Workload, mesh: Mapping[str, int], *, moved: float) -> dict[str, float]:
    """Bytes of temporary memory of an update on one device, by part; `moved` of its parameters are trained."""
    computed, tensor = jnp.dtype(job.compute_dtype or job.dtype).itemsize, mesh.get("tensor", 1)
    tokens = job.micro_rows * job.length
    layer = layer_numbers(config) / tensor + 4 * config.d
    stored = config.num_layers * config.d + layer if job.remat else config.num_layers * layer
    vocabulary = config.v / (tensor if config.v % tensor == 0 else 1)
    return {
        "gradients": (GRADIENT + computed) * moved,  # the sum so far, and that of a micro-batch
        "activations": computed * tokens * stored,
        "logits": 2.0 * GRADIENT * min(job.chunk, tokens) * vocabulary,  # and their gradient
    }


def layer_numbers(config: DecoderConfig) -> float:
    """Activations per token that the backward pass reads of one layer, except those of model width."""
    return (config.h * 2 + config.k * 2) * config.e + 3 * config.f


def decode_floor(config: DecoderConfig, job: Workload, mesh: Mapping[str, int]) -> dict[str, float]:
    """Bytes of the KV cache of one device."""
    stored, tensor = jnp.dtype(job.compute_dtype or job.dtype).itemsize, mesh.get("tensor", 1)
    heads = config.k / (tensor if config.k % tensor == 0 else 1)
    slots = -(-job.slots // mesh_size(mesh, "data", "fsdp"))
    return {"cache": 2.0 * stored * config.num_layers * slots * job.length * heads * config.e}


def update_flops(config: DecoderConfig, job: Workload) -> float:
    """FLOPs of an update of full rows on all devices, without recomputation."""
    return 3.0 * job.epochs * forward_flops(config, job.rows * job.length, job.length / 2)
