"""Lower bounds on what a model needs, by formula from its shape and a mesh: bytes of one device, operations of all.

    memory:  parameters + gradients + optimizer + activations + a chunk of logits
    work:    2 operations a weight and token forward, twice that backward, once more where layers are computed again

Activations are what the backward pass reads of each layer: the inputs of its products and of what bends them. With
`remat` only the input of each layer is kept, and the rest for one layer at a time. An axis that the mesh doesn't divide
evenly stays whole, as in `sharding`. Nothing is compiled here; `dry_run` says what a compiler makes of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from flowgrpo.learner.sharding import spec
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import parameters, shape_of
from flowgrpo.types import BadInput

GRADIENT = 4  # bytes: micro-batches add up in float32


@dataclass(frozen=True)
class Job:
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
    """How many parameters a decoder has."""
    return sum(math.prod(shape_of(parameter, config)) for parameter in parameters(config).values())


def forward_flops(config: DecoderConfig, tokens: int, seen: float) -> float:
    """Operations of so many tokens, each of which attends to `seen` tokens in the mean; a window is not considered."""
    weights = count_parameters(config) - (0 if config.tied else config.v * config.d)
    return tokens * (2.0 * weights + 4.0 * config.num_layers * config.h * config.e * seen)


def ways(mesh: Mapping[str, int], *axes: str) -> int:
    """Over how many devices the named axes of a mesh divide."""
    return math.prod(mesh.get(axis, 1) for axis in axes)


def sharded_parameters(config: DecoderConfig, mesh: Mapping[str, int]) -> float:
    """Parameters that lie on one device."""
    sizes: Any = AbstractMesh(tuple(mesh.values()), tuple(mesh))  # all that is asked of it is its shape
    total = 0.0
    for parameter in parameters(config).values():
        shape = shape_of(parameter, config)
        over = [axis for axis in spec(parameter.axes, shape, sizes) if axis]
        total += math.prod(shape) / ways(mesh, *over)
    return total


def update_floor(config: DecoderConfig, job: Job, mesh: Mapping[str, int], *, moved: float) -> dict[str, float]:
    """Bytes on one device that come and go in an update, part by part; `moved` of its parameters are trained there."""
    computed, tensor = jnp.dtype(job.compute_dtype or job.dtype).itemsize, mesh.get("tensor", 1)
    tokens = job.micro_rows * job.length
    layer = _layer_numbers(config) / tensor + 4 * config.d
    kept = config.num_layers * config.d + layer if job.remat else config.num_layers * layer
    words = config.v / (tensor if config.v % tensor == 0 else 1)
    return {
        "gradients": (GRADIENT + computed) * moved,  # what was added up so far, and what a micro-batch adds
        "activations": computed * tokens * kept,
        "logits": 2.0 * GRADIENT * min(job.chunk, tokens) * words,  # and their gradient
    }


def _layer_numbers(config: DecoderConfig) -> float:
    """Numbers a token that the backward pass reads of one layer, without those of the width of the model."""
    return (config.h * 2 + config.k * 2) * config.e + 3 * config.f


def decode_floor(config: DecoderConfig, job: Job, mesh: Mapping[str, int]) -> dict[str, float]:
    """Bytes of the keys and values of one device's slots."""
    stored, tensor = jnp.dtype(job.compute_dtype or job.dtype).itemsize, mesh.get("tensor", 1)
    heads = config.k / (tensor if config.k % tensor == 0 else 1)
    slots = -(-job.slots // ways(mesh, "data", "fsdp"))
    return {"cache": 2.0 * stored * config.num_layers * slots * job.length * heads * config.e}


def update_flops(config: DecoderConfig, job: Job) -> float:
    """Operations of an update of whole rows on all devices, without what is computed a second time."""
    return 3.0 * job.epochs * forward_flops(config, job.rows * job.length, job.length / 2)
