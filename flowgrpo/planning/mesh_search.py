"""Rank meshes, remat and micro-batches for a job on given devices, with memory and time by formula.

Memory is the peak of the programs (`update_bytes`, `decode_bytes`), within 5 % of what compilers report for most of
them (docs/scale.md). Seconds are for ranking only: FLOPs over the rate, or bytes over the bandwidth if that takes
longer, and bytes sent over the links. `shape_of_model` gives the shape of a published model by name, of a folder with a
config.json or of a GGUF file, without weights or network.
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
from flowgrpo.models.attention import BLOCK, MAX_UNROLLED_BLOCKS
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import matrices, parameters, shape_of
from flowgrpo.models.gguf import read_gguf_config
from flowgrpo.models.hf import read_json
from flowgrpo.models.kv_cache import WIDE_BLOCKS
from flowgrpo.models.lora import LoraConfig, adapter_axes, adapter_shapes
from flowgrpo.models.quantised import INT8, NF4
from flowgrpo.planning.cost_model import (
    Workload,
    count_parameters,
    decode_floor,
    forward_flops,
    mesh_size,
    numbers_on_device,
    sharded_parameters,
    update_floor,
)
from flowgrpo.types import BadInput


def _shape(kind: str, width: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> dict:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab}
    return {"model_type": kind, "tie_word_embeddings": False} | sizes | more


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
    """The shape of a published model, of a folder with a config.json, or of a GGUF file."""
    if name in PUBLISHED:
        return families.decoder_config(families.text_model_config(PUBLISHED[name], name), name)
    if (named := find_gguf(name)) is not None:
        return families.decoder_config(
            families.text_model_config(read_gguf_config(read_header(named)), str(named)), str(named)
        )
    file = Path(name).expanduser() / "config.json"
    if not file.is_file():
        names = ", ".join(PUBLISHED)
        raise BadInput(
            f"--model={name} is neither a folder with a config.json nor one of the shapes {names}, nor a GGUF file"
        )
    return families.decoder_config(families.text_model_config(read_json(file), str(file)), str(file))


GIB = 2**30
WIDE = 4  # bytes of float32
QUANTISED = {INT8: 1.0, NF4: 0.5 + 2 / 64}  # bytes per weight, with its part of a scale
MAX_DOUBLINGS = 7  # of the number of devices, when searching how many would do
MAX_TENSOR = 8  # number of devices of common hosts


@dataclass(frozen=True)
class Machine:
    """Memory and peak rates of one device."""

    memory: float  # bytes
    flops: float  # per second
    bandwidth: float  # of its memory, bytes per second
    link: float  # to the other devices, bytes per second
    platform: str = "cuda"  # or tpu, cpu; decides what programs allocate besides their arrays


@dataclass(frozen=True)
class MemorySettings:
    """Settings of a run that decide its memory.

    Args:
        moments: numbers per parameter in the optimizer state.
        moment_bytes: bytes of each.
        reference: whether there is a reference model.
        moved: whether models that a program does not read are offloaded meanwhile.
        decodes: whether the same devices roll out.
        lora: adapter that is trained; None: all parameters are.
        base: how the matrices under an adapter are quantised; None: not.
    """

    moments: float = 2.0
    moment_bytes: float = 4.0
    reference: bool = False
    moved: bool = False
    decodes: bool = True
    lora: LoraConfig | None = None
    base: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A mesh and a workload, with their memory and time by formula."""

    mesh: dict[str, int]
    job: Workload
    update: dict[str, float]  # bytes on one device, by part
    decode: dict[str, float]
    update_seconds: float
    rollout_seconds: float

    @property
    def peak_bytes(self) -> float:
        """Peak bytes of update and rollout."""
        return max(sum(self.update.values()), sum(self.decode.values()))

    @property
    def seconds(self) -> float:
        """Seconds of an iteration: update and rollout."""
        return self.update_seconds + self.rollout_seconds


def list_meshes(config: DecoderConfig, devices: int) -> Iterator[dict[str, int]]:
    """All meshes of these devices that divide the model and its heads evenly."""
    for tensor in _divisors(devices):
        if tensor > MAX_TENSOR or config.h % tensor or config.k % tensor or config.f % tensor:
            continue
        for fsdp in _divisors(devices // tensor):
            if config.d % fsdp == 0:
                yield {"data": devices // tensor // fsdp, "fsdp": fsdp, "tensor": tensor}


def rank_candidates(
    config: DecoderConfig, job: Workload, run: MemorySettings, machine: Machine, layouts: list[dict[str, int]]
) -> list[Candidate]:
    """Every mesh, with and without remat, at all sizes of micro-batches: those that fit first, the fastest first."""
    candidates = []
    for mesh in layouts:
        shards = mesh_size(mesh, "data", "fsdp")
        slots = max(shards, job.slots - job.slots % shards)
        for remat in (False, True):
            for micro_rows in _powers(max(1, job.rows // job.mini_batches // shards)):
                variant = replace(job, remat=remat, micro_rows=micro_rows, slots=slots)
                candidates.append(estimate(config, variant, run, machine, mesh))
    return sorted(
        candidates,
        key=lambda x: (x.peak_bytes > machine.memory, x.seconds if x.peak_bytes <= machine.memory else x.peak_bytes),
    )


def estimate(
    config: DecoderConfig, job: Workload, run: MemorySettings, machine: Machine, mesh: dict[str, int]
) -> Candidate:
    """Memory and seconds of one candidate."""
    stored, trained = _weight_bytes(config, job.dtype, run, mesh), _trained_numbers(config, run, mesh)
    params = {"parameters": stored + (WIDE * trained if run.lora else 0.0)}
    optimizer = {"optimizer": trained * run.moments * run.moment_bytes}
    reference = {"reference": stored} if run.reference and not run.moved and run.lora is None else {}
    update = params | optimizer | reference | update_bytes(config, job, run, mesh, machine.platform)
    decode = decode_bytes(config, job, run, mesh, machine.platform) | reference
    # The sampler has a copy of the parameters if the update computes in another dtype.
    decode |= params if job.compute_dtype and not run.moved else {}
    decode |= {} if run.moved else optimizer
    update_seconds = _update_seconds(config, job, run, machine, mesh)
    if not run.decodes:
        return Candidate(mesh, job, update, {}, update_seconds, 0.0)
    return Candidate(mesh, job, update, decode, update_seconds, _rollout_seconds(config, job, machine, mesh))


def suggest_remedies(
    config: DecoderConfig, job: Workload, run: MemorySettings, machine: Machine, devices: int
) -> list[str]:
    """What would make a job fit that fits on no mesh of these devices, by formula: the least of each kind."""
    remedies, layouts = [], list(list_meshes(config, devices))
    smallest = rank_candidates(config, replace(job, slots=1), run, machine, layouts)[0]
    if smallest.peak_bytes <= machine.memory:
        remedies.append(f"micro_rows={smallest.job.micro_rows}, remat={smallest.job.remat}, fewer slots")
    for more in (devices * 2**power for power in range(1, MAX_DOUBLINGS)):
        larger = list(list_meshes(config, more))
        if larger and rank_candidates(config, job, run, machine, larger)[0].peak_bytes <= machine.memory:
            remedies.append(f"{more} devices")
            break
    small = replace(job, slots=1, dtype=job.compute_dtype or job.dtype, compute_dtype=None)
    adapters = rank_candidates(config, small, replace(run, lora=LoraConfig(), base=INT8), machine, layouts)
    frozen = min(x.peak_bytes for x in adapters)
    if frozen <= machine.memory:
        remedies.append(f"an adapter (LoRA) over an int8 base ({frozen / GIB:.1f} GiB)")
    return remedies or ["a smaller model: nothing else tried would fit"]


def _trained_numbers(config: DecoderConfig, run: MemorySettings, mesh: dict[str, int]) -> float:
    """Number of trained parameters on one device."""
    if run.lora is None:
        return sharded_parameters(config, mesh)
    axes = adapter_axes(run.lora)
    return sum(numbers_on_device(axes[name], shape, mesh) for name, shape in adapter_shapes(config, run.lora).items())


def _weight_bytes(config: DecoderConfig, dtype: Any, run: MemorySettings, mesh: dict[str, int]) -> float:
    """Bytes on one device of all parameters but those of an adapter."""
    size, declared = float(jnp.dtype(dtype).itemsize), parameters(config)
    each = dict.fromkeys(declared, size)
    if run.base is not None:
        each |= dict.fromkeys(matrices(config), QUANTISED[run.base])
    return sum(numbers_on_device(x.axes, shape_of(x, config), mesh) * each[name] for name, x in declared.items())


def update_bytes(
    config: DecoderConfig, job: Workload, run: MemorySettings, mesh: dict[str, int], platform: str
) -> dict[str, float]:
    """Bytes of an update on one device besides its state, by part, at its peak: at the logits, or in a layer.

    At the logits the unembedding is gathered, and so is its gradient, in float32. In a layer, its parameters are
    gathered, those of the next layer are being gathered, and it has a gradient. The gradient of a micro-batch exists
    besides the sum so far, which GPUs store twice; frozen parameters have none.
    """
    size, tensor, is_gathered = _compute_bytes(job), mesh["tensor"], mesh["fsdp"] > 1
    count, tokens, trains_all = _trained_numbers(config, run, mesh), job.micro_rows * job.length, run.lora is None
    floor = update_floor(config, job, mesh, moved=0.0)
    several = job.rows > job.micro_rows * job.mini_batches * mesh_size(mesh, "data", "fsdp")
    parts = {"activations": size * tokens * config.num_layers * config.d if job.remat else floor["activations"]}
    parts["gradients"] = WIDE * count * (2 if several and platform != "tpu" else 1)
    copied = size * count if job.compute_dtype and not is_gathered and trains_all else 0.0
    parts["computed"] = copied  # all parameters in the compute dtype
    unembedding = config.v * config.d / tensor
    logits = {"logits": floor["logits"], "unembedding": size * unembedding * is_gathered}
    logits["unembedding"] += WIDE * unembedding * trains_all
    layer = _layer_parameters(config) / tensor
    layers = {"layer": floor["activations"] - parts["activations"], "attention": attention_bytes(config, job, mesh)}
    layers["gathered"] = layer * (2 * size + WIDE * trains_all) * is_gathered
    layers["gradient"] = WIDE * count + copied
    return parts | max(logits, layers, key=lambda peak: sum(peak.values()))


def decode_bytes(
    config: DecoderConfig, job: Workload, run: MemorySettings, mesh: dict[str, int], platform: str
) -> dict[str, float]:
    """Bytes of a rollout on one device, by part: weights and cache, and either prompts or weights laid out again.

    The peak of a prefill is at the logits of a block of the cache, if no kernel attends to it, or in the feed-forward
    part. On a GPU the weights of each layer, and the unembedding if it is tied, are laid out for decoding once more,
    unless they are gathered.
    """
    size, tensor, is_gathered = _compute_bytes(job), mesh["tensor"], mesh["fsdp"] > 1
    weights = _weight_bytes(config, job.compute_dtype or job.dtype, run, mesh)
    weights += WIDE * _trained_numbers(config, run, mesh) if run.lora else 0.0
    parts = {"weights": weights} | decode_floor(config, job, mesh)
    prompts = -(-job.slots // mesh_size(mesh, "data", "fsdp")) * job.prompt
    logits = 0.0 if platform != "tpu" and size < WIDE else WIDE * config.h / tensor * min(job.length, WIDE_BLOCKS[0])
    among_prompts = prompts * max(logits, size * 2 * (config.f / tensor + config.d))
    laid_out = size * (_layer_parameters(config) * config.num_layers + config.v * config.d * config.tied) / tensor
    laid_out = laid_out if platform != "tpu" and not is_gathered and run.lora is None else 0.0
    gathered = {"gathered": size * (_layer_parameters(config) + config.v * config.d) / tensor} if is_gathered else {}
    return parts | gathered | ({"laid": laid_out} if laid_out > among_prompts else {"prompts": among_prompts})


def _compute_bytes(job: Workload) -> int:
    return jnp.dtype(job.compute_dtype or job.dtype).itemsize


def _layer_parameters(config: DecoderConfig) -> float:
    """Number of parameters of one layer."""
    ends = config.v * config.d * (1 if config.tied else 2)
    return (count_parameters(config) - ends) / config.num_layers


def attention_bytes(config: DecoderConfig, job: Workload, mesh: dict[str, int]) -> float:
    """Bytes of probabilities, logits and gradients of the attention blocks in memory at once; 0 for 16-bit kernels."""
    if _compute_bytes(job) < WIDE:
        return 0.0
    tokens, blocks = job.micro_rows * job.length, -(-job.length // BLOCK)
    once = 1 if blocks > MAX_UNROLLED_BLOCKS else blocks
    return 4.0 * WIDE * tokens * config.h / mesh["tensor"] * once * BLOCK


def _update_seconds(
    config: DecoderConfig, job: Workload, run: MemorySettings, machine: Machine, mesh: dict[str, int]
) -> float:
    tokens, shards = job.rows * job.length, mesh_size(mesh, "data", "fsdp")
    forward = forward_flops(config, tokens, job.length / 2) / (shards * mesh["tensor"])
    passes = job.epochs * (3 + job.remat) + run.reference
    trips = job.epochs * math.ceil(job.rows / (job.micro_rows * shards))
    size = jnp.dtype(job.compute_dtype or job.dtype).itemsize
    count = count_parameters(config) / mesh["tensor"]
    read = trips * (3 + job.remat) * count * size
    sent = 0.0
    if mesh["fsdp"] > 1:  # parameters are gathered twice per micro-batch, gradients are scattered once
        sent += trips * count * (2 * size + WIDE)
    if mesh["data"] > 1:  # once per micro-batch if XLA shards the program, else once
        sent += (trips if mesh["fsdp"] * mesh["tensor"] > 1 else 1) * 2 * WIDE * count / mesh["fsdp"]
    if mesh["tensor"] > 1:  # hidden states are summed twice per layer and pass
        sent += passes * 2 * 2 * config.num_layers * tokens / shards * config.d * size
    return max(passes * forward / machine.flops, read / machine.bandwidth) + sent / machine.link


def _rollout_seconds(config: DecoderConfig, job: Workload, machine: Machine, mesh: dict[str, int]) -> float:
    """Seconds of decoding all rows: each step reads the parameters and half of a full cache."""
    stored, shards = jnp.dtype(job.compute_dtype or job.dtype).itemsize, mesh_size(mesh, "data", "fsdp")
    weights = stored * count_parameters(config) / mesh["tensor"]
    cache = sum(decode_floor(config, job, mesh).values()) / 2
    sent = weights if mesh["fsdp"] > 1 else 0.0
    steps = (job.length - job.prompt) * job.rows / job.slots
    flops = forward_flops(config, job.slots, job.length / 2) / (shards * mesh["tensor"])
    return steps * (max((weights + cache) / machine.bandwidth, flops / machine.flops) + sent / machine.link)


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _powers(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length())]
