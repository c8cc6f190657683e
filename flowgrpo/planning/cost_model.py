"""Lower bounds on what a model needs, by formula, and the operations that a traced program counts.

    memory:  parameters + gradients + optimizer + activations + a chunk of logits
    work:    2 operations per weight and token forward, twice that backward, once more where layers are computed again

Activations are what the backward pass reads of each layer: the inputs of its products and of what bends them. With
`remat` only the input of each layer is kept, and the rest for one layer at a time. An axis that the mesh doesn't divide
evenly stays whole, as in `sharding`. Nothing is compiled here; `dry_run` says what a compiler makes of it.

`count_products` counts operations and bytes of the matrix products of a jaxpr, for all devices together. XLA's own cost
analysis meets the body of a loop once; here a product within a loop counts as often as the loop runs: a scan says how
often, and of a loop that ends on a condition the caller says it, by depth. Products are nearly all operations of a
decoder, and their operands nearly all bytes that no compiler can spare.
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
from flowgrpo.parallel.sharding import spec
from flowgrpo.types import BadInput


class MatmulWork(NamedTuple):
    """Of all matrix products of a program."""

    flops: float = 0.0
    bytes: float = 0.0  # operands read and results written, each once a product
    kernels: float = 0.0  # operations of those within kernels that were written by hand


def count_products(jaxpr: Any, trips: Sequence[int] = (), platform: str = "cpu") -> MatmulWork:
    """The work of a jaxpr; `trips` says how often loops on a condition run: the outermost, those within it, and so on.

    Loops deeper than `trips` tells run once. Of branches by platform that of `platform` counts, and of those of any
    other condition the one with the most work.
    """
    total = MatmulWork()
    for equation in jaxpr.eqns:
        own = _product(equation) if equation.primitive.name == "dot_general" else MatmulWork()
        for times, inner, left in _inside(equation, tuple(trips), platform):
            own = _plus(own, count_products(inner, left, platform), times)
        if equation.primitive.name == "pallas_call":
            own = own._replace(kernels=own.flops)
        total = _plus(total, own)
    return total


def _inside(equation: Any, trips: tuple[int, ...], platform: str) -> Iterator[tuple[float, Any, tuple[int, ...]]]:
    """The programs within an equation: how often each runs, and what is told of the loops in it."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        yield (trips[0] if trips else 1), params["body_jaxpr"].jaxpr, trips[1:]
    elif name == "scan":
        yield params["length"], params["jaxpr"].jaxpr, trips
    elif name == "cond":
        branches = [branch.jaxpr for branch in params["branches"]]
        if named := params.get("branches_platforms"):  # None: any platform that has no branch of its own
            own = [branch for branch, names in zip(branches, named, strict=True) if platform in (names or ())]
            branches = own or [branch for branch, names in zip(branches, named, strict=True) if names is None]
        yield 1, max(branches, key=lambda x: count_products(x, trips, platform)), trips
    else:
        times = 1
        if name == "shard_map":  # each device runs the body on its own share; what other axes divide is whole in it
            times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
        if name == "pallas_call":  # a kernel runs once for each place of its grid
            times = math.prod(params["grid_mapping"].grid)
        for value in params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield times, inner, trips


def _product(equation: Any) -> MatmulWork:
    """Two operations for each pair of numbers that meet."""
    (summed, _), _ = equation.params["dimension_numbers"]
    shapes = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    terms = math.prod(shapes[0].shape[axis] for axis in summed)
    moved = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in shapes)
    return MatmulWork(2.0 * terms * math.prod(shapes[-1].shape), float(moved))


def _plus(a: MatmulWork, b: MatmulWork, times: float = 1) -> MatmulWork:
    return MatmulWork(*(x + times * y for x, y in zip(a, b, strict=True)))


GRADIENT = 4  # bytes: micro-batches add up in float32


@dataclass(frozen=True)
class Workload:
    """How much is learned from in an update, how much is decoded before it, and how both are worked through."""

    rows: int = 256
    length: int = 4096
    micro_rows: int = 1  # of one device
    slots: int = 64  # rows that decode together, on all devices
    prompt: int = 512  # tokens of a prefill
    steps: int = 128  # of a stretch of decoding
    remat: bool = True
    dtype: Any = "bfloat16"  # of the parameters and the cache
    compute_dtype: Any = None  # of the update's products, where it is another
    chunk: int = 1024  # tokens of which all logits are there at once
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
    """Say how many parameters a decoder has."""
    return sum(math.prod(shape_of(parameter, config)) for parameter in parameters(config).values())


def forward_flops(config: DecoderConfig, tokens: int, seen: float) -> float:
    """Operations of so many tokens, each of which attends to `seen` tokens in the mean; a window is not considered."""
    weights = count_parameters(config) - (0 if config.tied else config.v * config.d)
    return tokens * (2.0 * weights + 4.0 * config.num_layers * config.h * config.e * seen)


def ways(mesh: Mapping[str, int], *axes: str) -> int:
    """Over how many devices the named axes of a mesh divide."""
    return math.prod(mesh.get(axis, 1) for axis in axes)


def numbers_on_device(axes: str, shape: Sequence[int], mesh: Mapping[str, int]) -> float:
    """Count the numbers of an array with these axis letters that lie on one device."""
    sizes: Any = AbstractMesh(tuple(mesh.values()), tuple(mesh))  # all that is asked of it is its shape
    return math.prod(shape) / ways(mesh, *(axis for axis in spec(axes, shape, sizes) if axis))


def sharded_parameters(config: DecoderConfig, mesh: Mapping[str, int]) -> float:
    """Parameters that lie on one device."""
    return sum(numbers_on_device(x.axes, shape_of(x, config), mesh) for x in parameters(config).values())


def update_floor(config: DecoderConfig, job: Workload, mesh: Mapping[str, int], *, moved: float) -> dict[str, float]:
    """Bytes on one device that come and go in an update, part by part; `moved` of its parameters are trained there."""
    computed, tensor = jnp.dtype(job.compute_dtype or job.dtype).itemsize, mesh.get("tensor", 1)
    tokens = job.micro_rows * job.length
    layer = layer_numbers(config) / tensor + 4 * config.d
    kept = config.num_layers * config.d + layer if job.remat else config.num_layers * layer
    words = config.v / (tensor if config.v % tensor == 0 else 1)
    return {
        "gradients": (GRADIENT + computed) * moved,  # what was added up so far, and what a micro-batch adds
        "activations": computed * tokens * kept,
        "logits": 2.0 * GRADIENT * min(job.chunk, tokens) * words,  # and their gradient
    }


def layer_numbers(config: DecoderConfig) -> float:
    """Numbers a token that the backward pass reads of one layer, without those of the width of the model."""
    return (config.h * 2 + config.k * 2) * config.e + 3 * config.f


def decode_floor(config: DecoderConfig, job: Workload, mesh: Mapping[str, int]) -> dict[str, float]:
    """Bytes of the keys and values of one device's slots."""
    stored, tensor = jnp.dtype(job.compute_dtype or job.dtype).itemsize, mesh.get("tensor", 1)
    heads = config.k / (tensor if config.k % tensor == 0 else 1)
    slots = -(-job.slots // ways(mesh, "data", "fsdp"))
    return {"cache": 2.0 * stored * config.num_layers * slots * job.length * heads * config.e}


def update_flops(config: DecoderConfig, job: Workload) -> float:
    """Operations of an update of whole rows on all devices, without what is computed a second time."""
    return 3.0 * job.epochs * forward_flops(config, job.rows * job.length, job.length / 2)
