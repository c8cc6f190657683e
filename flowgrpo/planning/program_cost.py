"""Compile one program for a machine, and measure its cost on one device: memory, FLOPs, instructions.

    cost = measure_program("update", jit(update), arguments, mesh, target=parse_target("v5e-8"), ...)
    cost.peak, cost.lacks, moved_bytes(cost.instructions)

FLOPs are those of the traced program (`count_products`), because XLA's analysis counts each loop once; both are given.
For a target the compiled program itself is parsed, too (`compiled_program`).
"""

import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from flowgrpo.planning.compiled_program import ExecutedStep, program_steps
from flowgrpo.planning.cost_model import count_products
from flowgrpo.planning.targets import Target, compile_options, lowering_platforms, target_devices
from flowgrpo.types import BadInput

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # of the compiler's messages
_USED = re.compile(r"[Uu]sed ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_REQUIRED = re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)")


class ProgramCost(NamedTuple):
    """Cost of one compiled program on one device."""

    name: str
    arguments: int
    outputs: int
    reused: int  # bytes of outputs in the memory of donated arguments
    temporary: int
    peak: int  # bytes that the program needs
    resident_bytes: int  # that the run keeps on the device meanwhile, unless they are offloaded
    flops: float  # of matrix products, with loops as often as they run
    bytes: float  # that these products read and write
    flops_once: float  # of all operations, as XLA counts them: each loop once
    bytes_once: float
    useful_flops: float  # by formula, without recomputation
    floor: Mapping[str, float]  # bytes by formula, by part
    seconds: float  # of compiling
    kernels: float = 0.0  # FLOPs within hand-written kernels, a part of `flops`
    steps: int = 1  # tokens per row of a call of decoding
    lacks: float = 0.0  # bytes beyond the memory of the target
    instructions: tuple[ExecutedStep, ...] = ()  # of a program that the compiler of its target accepted


class ProgramEstimate(NamedTuple):
    """What formulas say about a program, before it is compiled."""

    trips: tuple[int, ...]  # iterations of loops on a condition, by depth
    useful_flops: float  # on all devices
    floor: Mapping[str, float]  # bytes on one device, by part
    resident_bytes: int = 0  # bytes that the run keeps on the device besides
    steps: int = 1  # tokens per row of a call of decoding


def measure_program(
    name: str, work: Any, arguments: tuple, mesh: Mesh | None, estimate: ProgramEstimate, *, target: Target | None
) -> ProgramCost:
    """Trace, lower and compile `work` for these arguments -> its cost on one device.

    Args:
        work: a jitted function.
        mesh: on which it runs; None: on one device.
        estimate: what formulas say about it.
        target: the machine to compile for; None: virtual CPU devices.
    """
    start, devices = time.perf_counter(), 1 if mesh is None else mesh.size
    traced = work.trace(*(_on_target(arguments, target) if mesh is None else arguments))
    counted = count_products(traced.jaxpr.jaxpr, estimate.trips, "cpu" if target is None else target.chip.platform)
    memory = _compile(traced, target, estimate.trips)
    return ProgramCost(
        name=name,
        **memory,
        resident_bytes=estimate.resident_bytes,
        flops=counted.flops / devices,
        bytes=counted.bytes / devices,
        useful_flops=estimate.useful_flops / devices,
        floor=estimate.floor,
        seconds=time.perf_counter() - start,
        kernels=counted.kernels / devices,
        steps=estimate.steps,
    )


def _on_target(arguments: tuple, target: Target | None) -> tuple:
    """The arguments on one device of the target, so that the program is compiled for it."""
    if target is None:
        return arguments
    sharding = SingleDeviceSharding(target_devices(target)[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)


def _compile(traced: Any, target: Target | None, trips: tuple[int, ...]) -> dict[str, Any]:
    """The fields of a cost that come from the compiler."""
    if target is None or target.chip.platform == "cpu":
        return _read_analysis(traced.lower().compile(), None, trips)
    lowered = traced.lower(lowering_platforms=lowering_platforms(target))
    try:
        compiled = lowered.compile(compile_options(target.chip.platform))
    except jax.errors.JaxRuntimeError as error:
        used, limit = parse_exhausted(str(error))
        nothing = dict.fromkeys(("arguments", "outputs", "reused", "temporary"), 0)
        return nothing | {"flops_once": 0.0, "bytes_once": 0.0, "peak": int(used), "lacks": used - limit}
    return _read_analysis(compiled, target, trips)


def parse_exhausted(message: str) -> tuple[float, float]:
    """Bytes that a program needs and bytes available, from the error of a compiler; other errors are raised."""
    match = _USED.search(message) or _REQUIRED.search(message)
    if "RESOURCE_EXHAUSTED" not in message or match is None:
        raise BadInput(f"the compiler refuses the program: {message[:500]}")
    return float(match[1]) * UNITS[match[2]], float(match[3]) * UNITS[match[4]]


def _read_analysis(compiled: Any, target: Target | None, trips: tuple[int, ...]) -> dict[str, Any]:
    """Memory and XLA's own counts, and for a target the instructions."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    if memory is None:
        raise BadInput(f"the backend {jax.default_backend()} does not say how much memory a program takes: use cpu")
    fields = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "reused": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }
    peak = fields["arguments"] + fields["outputs"] - fields["reused"] + fields["temporary"]
    fields |= {"flops_once": cost.get("flops", 0.0), "bytes_once": cost.get("bytes accessed", 0.0)}
    if target is None:
        return fields | {"peak": peak}
    # The buffers of a GPU are one block from the first instruction to the last; TPUs report the peak.
    peak = memory.peak_memory_in_bytes if target.chip.platform == "tpu" else peak
    lacks = max(0.0, peak - target.chip.memory)
    return fields | {"peak": peak, "lacks": lacks, "instructions": tuple(program_steps(compiled.as_text(), trips))}
