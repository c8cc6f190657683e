"""Rank the ways to run a job on some devices, with memory and time by formula.

Memory is what the programs hold when they hold most (`update_bytes`, `decode_bytes`), within 5 % of what compilers make
of most of them (docs/scale.md). Seconds serve to rank only: operations over the rate, or bytes over the bandwidth where
that takes longer, and what is sent over the links. `shape_of_model` gives the shape of a
published model by its name, of a folder with a config.json or of a GGUF file, without weights or network.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from flowgrpo.data.gguf_file import read_header
from flowgrpo.data.named_models import find_gguf
from flowgrpo.models import families
from flowgrpo.models.attention import BLOCK, UNROLLED
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import matrices, parameters, shape_of
from flowgrpo.models.gguf import read_source
from flowgrpo.models.hf import read_json
from flowgrpo.models.kv_cache import WIDE_BLOCKS
from flowgrpo.models.lora import LoraConfig, adapter_axes, adapter_shapes
from flowgrpo.models.quantised import INT8, NF4
from flowgrpo.planning.cost_model import (
    Workload,
    count_parameters,
    decode_floor,
    forward_flops,
    numbers_on_device,
    sharded_parameters,
    update_floor,
    ways,
)
from flowgrpo.types import BadInput


def _shape(kind: str, width: int, layers: int, heads: int, kv_heads: int, ffn: int, words: int, **rest: Any) -> dict:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": words}
    return {"model_type": kind, "tie_word_embeddings": False} | sizes | rest


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_QWEN2: dict[str, Any] = {"rope_theta": 1e6, "max_position_embeddings": 32_768}
_LLAMA3: dict[str, Any] = {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072}
PUBLISHED: Mapping[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _shape("qwen2", 896, 24, 14, 2, 4864, 151_936, **_TIED, **_QWEN2),
    "qwen2.5-1.5b": _shape("qwen2", 1536, 28, 12, 2, 8960, 151_936, **_TIED, **_QWEN2),
    "qwen2.5-3b": _shape("qwen2", 2048, 36, 16, 2, 11_008, 151_936, **_TIED, **_QWEN2),
    "qwen2.5-7b": _shape("qwen2", 3584, 28, 28, 4, 18_944, 152_064, **_QWEN2),
    "qwen2.5-14b": _shape("qwen2", 5120, 48, 40, 8, 13_824, 152_064, **_QWEN2),
    "qwen2.5-32b": _shape("qwen2", 5120, 64, 40, 8, 27_648, 152_064, **_QWEN2),
    "qwen2.5-72b": _shape("qwen2", 8192, 80, 64, 8, 29_568, 152_064, **_QWEN2),
    "qwen3-8b": _shape("qwen3", 4096, 36, 32, 8, 12_288, 151_936, head_dim=128, rope_theta=1e6),
    "llama-3.2-1b": _shape("llama", 2048, 16, 32, 8, 8192, 128_256, **_TIED, **_LLAMA3),
    "llama-3.1-8b": _shape("llama", 4096, 32, 32, 8, 14_336, 128_256, **_LLAMA3),
}


def shape_of_model(name: str) -> DecoderConfig:
    """The shape of a published model, of a folder's config.json, or of a GGUF file."""
    if name in PUBLISHED:
        return families.decoder_config(families.text_source(PUBLISHED[name], name), name)
    if (named := find_gguf(name)) is not None:
        return families.decoder_config(families.text_source(read_source(read_header(named)), str(named)), str(named))
    file = Path(name).expanduser() / "config.json"
    if not file.is_file():
        known = ", ".join(PUBLISHED)
        raise BadInput(
            f"--model={name} is neither a folder with a config.json nor one of the shapes {known}, nor a GGUF file"
        )
    return families.decoder_config(families.text_source(read_json(file), str(file)), str(file))


GIB = 2**30
WIDE = 4  # bytes of float32
QUANTISED = {INT8: 1.0, NF4: 0.5 + 2 / 64}  # bytes of a number, with its part of a scale
MOST_DOUBLINGS = 7  # of the number of devices, in looking for how many would do
MOST_TENSOR = 8  # devices that one host commonly has


@dataclass(frozen=True)
class Machine:
    """Memory of one device, and the most that it computes, reads and sends a second."""

    memory: float  # bytes
    flops: float  # a second
    bandwidth: float  # bytes a second of its memory
    link: float  # bytes a second to the others
    platform: str = "cuda"  # or tpu, cpu: what programs hold beside their arrays


@dataclass(frozen=True)
class MemorySettings:
    """Memory settings of a run: what it keeps beside its parameters, what is moved away, and where it decodes."""

    moments: float = 2.0  # numbers that the optimizer remembers of a parameter
    moment_bytes: float = 4.0
    reference: bool = False
    moved: bool = False  # what a program does not read is moved off the device meanwhile
    decodes: bool = True  # on the same devices
    lora: LoraConfig | None = None  # an adapter is trained, and all else is frozen
    base: str | None = None  # how the matrices under an adapter are quantised


@dataclass(frozen=True)
class Candidate:
    """One way, and what is expected of it."""

    mesh: dict[str, int]
    job: Workload
    update: dict[str, float]  # bytes of one device, part by part
    decode: dict[str, float]
    update_seconds: float
    rollout_seconds: float

    @property
    def needed(self) -> float:
        """Bytes of the fuller of both stages."""
        return max(sum(self.update.values()), sum(self.decode.values()))

    @property
    def seconds(self) -> float:
        """Seconds of an iteration, as far as they are counted."""
        return self.update_seconds + self.rollout_seconds


def meshes(config: DecoderConfig, devices: int) -> Iterator[dict[str, int]]:
    """All ways to lay out the devices that divide model and heads evenly."""
    for tensor in _divisors(devices):
        if tensor > MOST_TENSOR or config.h % tensor or config.k % tensor or config.f % tensor:
            continue
        for fsdp in _divisors(devices // tensor):
            if config.d % fsdp == 0:
                yield {"data": devices // tensor // fsdp, "fsdp": fsdp, "tensor": tensor}


def candidates(
    config: DecoderConfig, job: Workload, run: MemorySettings, machine: Machine, layouts: list[dict[str, int]]
) -> list[Candidate]:
    """Every mesh, with and without remat, at all sizes of micro-batches: those that fit first, the fastest first."""
    found = []
    for mesh in layouts:
        hands = ways(mesh, "data", "fsdp")
        slots = max(hands, job.slots - job.slots % hands)
        for remat in (False, True):
            for micro_rows in _powers(max(1, job.rows // job.mini_batches // hands)):
                own = replace(job, remat=remat, micro_rows=micro_rows, slots=slots)
                found.append(expect(config, own, run, machine, mesh))
    return sorted(
        found, key=lambda x: (x.needed > machine.memory, x.seconds if x.needed <= machine.memory else x.needed)
    )


def expect(
    config: DecoderConfig, job: Workload, run: MemorySettings, machine: Machine, mesh: dict[str, int]
) -> Candidate:
    """Memory and seconds of one candidate."""
    stored, trained = _weight_bytes(config, job.dtype, run, mesh), _trained_numbers(config, run, mesh)
    held = {"parameters": stored + (WIDE * trained if run.lora else 0.0)}
    optimizer = {"optimizer": trained * run.moments * run.moment_bytes}
    reference = {"reference": stored} if run.reference and not run.moved and run.lora is None else {}
    update = held | optimizer | reference | update_bytes(config, job, run, mesh, machine.platform)
    decode = decode_bytes(config, job, run, mesh, machine.platform) | reference
    # What is sampled from is a copy where the update computes in another type.
    decode |= held if job.compute_dtype and not run.moved else {}
    decode |= {} if run.moved else optimizer
    update_seconds = _update_seconds(config, job, run, machine, mesh)
    if not run.decodes:
        return Candidate(mesh, job, update, {}, update_seconds, 0.0)
    return Candidate(mesh, job, update, decode, update_seconds, _rollout_seconds(config, job, machine, mesh))


def remedies(config: DecoderConfig, job: Workload, run: MemorySettings, machine: Machine, devices: int) -> list[str]:
    """Say what would make a job fit that fits on no mesh of so many devices, by formula: the least of each kind."""
    told, layouts = [], list(meshes(config, devices))
    least = candidates(config, replace(job, slots=1), run, machine, layouts)[0]
    if least.needed <= machine.memory:
        told.append(f"micro_rows={least.job.micro_rows}, remat={least.job.remat}, fewer slots")
    for more in (devices * 2**power for power in range(1, MOST_DOUBLINGS)):
        larger = list(meshes(config, more))
        if larger and candidates(config, job, run, machine, larger)[0].needed <= machine.memory:
            told.append(f"{more} devices")
            break
    small = replace(job, slots=1, dtype=job.compute_dtype or job.dtype, compute_dtype=None)
    adapters = candidates(config, small, replace(run, lora=LoraConfig(), base=INT8), machine, layouts)
    frozen = min(x.needed for x in adapters)
    if frozen <= machine.memory:
        told.append(f"an adapter (LoRA) over an int8 base ({frozen / GIB:.1f} GiB)")
    return told or ["a smaller model: nothing else tried would fit"]


def _trained_numbers(config: DecoderConfig, run: MemorySettings, mesh: dict[str, int]) -> float:
    """Count the numbers on one device that are trained."""
    if run.lora is None:
        return sharded_parameters(config, mesh)
    axes = adapter_axes(run.lora)
    return sum(numbers_on_device(axes[name], shape, mesh) for name, shape in adapter_shapes(config, run.lora).items())


def _weight_bytes(config: DecoderConfig, dtype: Any, run: MemorySettings, mesh: dict[str, int]) -> float:
    """Count the bytes on one device of all parameters but an adapter's."""
    size, declared = float(jnp.dtype(dtype).itemsize), parameters(config)
    each = dict.fromkeys(declared, size)
    if run.base is not None:
        each |= dict.fromkeys(matrices(config), QUANTISED[run.base])
    return sum(numbers_on_device(x.axes, shape_of(x, config), mesh) * each[name] for name, x in declared.items())


def update_bytes(
    config: DecoderConfig, job: Workload, run: MemorySettings, mesh: dict[str, int], platform: str
) -> dict[str, float]:
    """Count bytes on one device beside its state, by part, where an update holds most: among logits, or in a layer.

    Among logits the unembedding is whole, and so is its gradient, in float32. In a layer, its parameters are whole,
    those of the next on the way, and its gradient; and the gradient of a micro-batch stands beside what was added up,
    which GPUs hold twice. What is frozen has no gradient.
    """
    size, tensor, divided = _computed_size(job), mesh["tensor"], mesh["fsdp"] > 1
    held, tokens, trained = _trained_numbers(config, run, mesh), job.micro_rows * job.length, run.lora is None
    floor = update_floor(config, job, mesh, moved=0.0)
    several = job.rows > job.micro_rows * job.mini_batches * ways(mesh, "data", "fsdp")
    both = {"activations": size * tokens * config.num_layers * config.d if job.remat else floor["activations"]}
    both["gradients"] = WIDE * held * (2 if several and platform != "tpu" else 1)
    copied = size * held if job.compute_dtype and not divided and trained else 0.0
    both["computed"] = copied  # all parameters in the type that is computed in
    unembedding = config.v * config.d / tensor
    logits = {"logits": floor["logits"], "unembedding": size * unembedding * divided}
    logits["unembedding"] += WIDE * unembedding * trained
    layer = _layer_parameters(config) / tensor
    layers = {"layer": floor["activations"] - both["activations"], "attention": attention_bytes(config, job, mesh)}
    layers["gathered"] = layer * (2 * size + WIDE * trained) * divided
    layers["gradient"] = WIDE * held + copied
    return both | max(logits, layers, key=lambda parts: sum(parts.values()))


def decode_bytes(
    config: DecoderConfig, job: Workload, run: MemorySettings, mesh: dict[str, int], platform: str
) -> dict[str, float]:
    """Count bytes of a rollout on one device, by part: weights and cache, and beside them prompts or laid out weights.

    A prefill holds most among the logits of a block of the cache, where no kernel attends to it, or in the feed-forward
    part. On a GPU each layer's weights, and the unembedding if it is tied, are laid out for decoding once more, unless
    they are gathered.
    """
    size, tensor, divided = _computed_size(job), mesh["tensor"], mesh["fsdp"] > 1
    weights = _weight_bytes(config, job.compute_dtype or job.dtype, run, mesh)
    weights += WIDE * _trained_numbers(config, run, mesh) if run.lora else 0.0
    parts = {"weights": weights} | decode_floor(config, job, mesh)
    prompts = -(-job.slots // ways(mesh, "data", "fsdp")) * job.prompt
    logits = 0.0 if platform != "tpu" and size < WIDE else WIDE * config.h / tensor * min(job.length, WIDE_BLOCKS[0])
    among_prompts = prompts * max(logits, size * 2 * (config.f / tensor + config.d))
    laid = size * (_layer_parameters(config) * config.num_layers + config.v * config.d * config.tied) / tensor
    laid = laid if platform != "tpu" and not divided and run.lora is None else 0.0
    gathered = {"gathered": size * (_layer_parameters(config) + config.v * config.d) / tensor} if divided else {}
    return parts | gathered | ({"laid": laid} if laid > among_prompts else {"prompts": among_prompts})


def _computed_size(job: Workload) -> int:
    return jnp.dtype(job.compute_dtype or job.dtype).itemsize


def _layer_parameters(config: DecoderConfig) -> float:
    """Count the parameters of one layer."""
    ends = config.v * config.d * (1 if config.tied else 2)
    return (count_parameters(config) - ends) / config.num_layers


def attention_bytes(config: DecoderConfig, job: Workload, mesh: dict[str, int]) -> float:
    """Count shares, logits and gradients of the blocks that are worked on at once; kernels for 16 bits hold none."""
    if _computed_size(job) < WIDE:
        return 0.0
    tokens, blocks = job.micro_rows * job.length, -(-job.length // BLOCK)
    once = 1 if blocks > UNROLLED else blocks
    return 4.0 * WIDE * tokens * config.h / mesh["tensor"] * once * BLOCK


def _update_seconds(
    config: DecoderConfig, job: Workload, run: MemorySettings, machine: Machine, mesh: dict[str, int]
) -> float:
    tokens, hands = job.rows * job.length, ways(mesh, "data", "fsdp")
    forward = forward_flops(config, tokens, job.length / 2) / (hands * mesh["tensor"])
    passes = job.epochs * (3 + job.remat) + run.reference
    trips = job.epochs * math.ceil(job.rows / (job.micro_rows * hands))
    size = jnp.dtype(job.compute_dtype or job.dtype).itemsize
    held = count_parameters(config) / mesh["tensor"]
    read = trips * (3 + job.remat) * held * size
    sent = 0.0
    if mesh["fsdp"] > 1:  # parameters are gathered twice a micro-batch, gradients are scattered once
        sent += trips * held * (2 * size + WIDE)
    if mesh["data"] > 1:  # every micro-batch where XLA divides the program, once otherwise
        sent += (trips if mesh["fsdp"] * mesh["tensor"] > 1 else 1) * 2 * WIDE * held / mesh["fsdp"]
    if mesh["tensor"] > 1:  # hidden states are summed twice a layer and pass
        sent += passes * 2 * 2 * config.num_layers * tokens / hands * config.d * size
    return max(passes * forward / machine.flops, read / machine.bandwidth) + sent / machine.link


def _rollout_seconds(config: DecoderConfig, job: Workload, machine: Machine, mesh: dict[str, int]) -> float:
    """Decoding all rows: each step reads the parameters and half of a full cache."""
    stored, hands = jnp.dtype(job.compute_dtype or job.dtype).itemsize, ways(mesh, "data", "fsdp")
    weights = stored * count_parameters(config) / mesh["tensor"]
    cache = sum(decode_floor(config, job, mesh).values()) / 2
    sent = weights if mesh["fsdp"] > 1 else 0.0
    steps = (job.length - job.prompt) * job.rows / job.slots
    flops = forward_flops(config, job.slots, job.length / 2) / (hands * mesh["tensor"])
    return steps * (max((weights + cache) / machine.bandwidth, flops / machine.flops) + sent / machine.link)


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]
