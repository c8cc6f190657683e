"""Compile one program for a machine, and account for what it takes of a device there.

    cost = measure_program("update", jit(update), arguments, mesh, target=parse_target("v5e-8"), ...)
    cost.peak, cost.lacks, moved_bytes(cost.instructions)

Operations are those of the traced program (`count_products`), because XLA's analysis meets each loop once; both are
given. For a target the compiled program itself is read, too (`compiled_program`).
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
    """Cost of one compiled program on one device: bytes, operations, and the seconds that compiling took."""

    name: str
    arguments: int
    outputs: int
    reused: int  # outputs that lie where arguments lay
    temporary: int
    peak: int  # bytes that the program needs
    beside: int  # what the run keeps on the device meanwhile, unless it is moved away
    flops: float  # of matrix products, loops as often as they run
    bytes: float  # that these products read and write
    flops_once: float  # as XLA counts all operations, each loop once
    bytes_once: float
    useful: float  # operations that the formula asks for
    floor: Mapping[str, float]  # bytes by formula, part by part
    seconds: float  # of compiling
    kernels: float = 0.0  # operations within hand-written kernels, which are a part of `flops`
    steps: int = 1  # tokens of each row in a stretch of decoding
    lacks: float = 0.0  # bytes beyond the memory of the target, for which its compiler refused the program
    instructions: tuple[ExecutedStep, ...] = ()  # of a program that the compiler of its target accepted


def measure_program(
    name: str,
    work: Any,
    arguments: tuple,
    mesh: Mesh | None,
    *,
    target: Target | None,
    trips: tuple[int, ...],
    useful: float,
    floor: Mapping[str, float],
    beside: int,
    steps: int = 1,
) -> ProgramCost:
    """Trace, lower and compile `work` for these arguments; `useful` and what is counted are of all devices."""
    start, devices = time.perf_counter(), 1 if mesh is None else mesh.size
    traced = work.trace(*(_on_target(arguments, target) if mesh is None else arguments))
    counted = count_products(traced.jaxpr.jaxpr, trips, "cpu" if target is None else target.chip.platform)
    memory = _compile(traced, target, trips)
    return ProgramCost(
        name=name,
        **memory,
        beside=beside,
        flops=counted.flops / devices,
        bytes=counted.bytes / devices,
        useful=useful / devices,
        floor=floor,
        seconds=time.perf_counter() - start,
        kernels=counted.kernels / devices,
        steps=steps,
    )


def _on_target(arguments: tuple, target: Target | None) -> tuple:
    """Arguments on one device of the target, for which the program is compiled then."""
    if target is None:
        return arguments
    there = SingleDeviceSharding(target_devices(target)[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arguments)


def _compile(traced: Any, target: Target | None, trips: tuple[int, ...]) -> dict[str, Any]:
    """The fields of a cost that a compiler tells."""
    if target is None or target.chip.platform == "cpu":
        return _account(traced.lower().compile(), None, trips)
    lowered = traced.lower(lowering_platforms=lowering_platforms(target))
    try:
        compiled = lowered.compile(compile_options(target.chip.platform))
    except jax.errors.JaxRuntimeError as error:
        used, limit = parse_exhausted(str(error))
        nothing = dict.fromkeys(("arguments", "outputs", "reused", "temporary"), 0)
        return nothing | {"flops_once": 0.0, "bytes_once": 0.0, "peak": int(used), "lacks": used - limit}
    return _account(compiled, target, trips)


def parse_exhausted(message: str) -> tuple[float, float]:
    """Bytes that a program needs and that there are, from a compiler's refusal; raise what says anything else."""
    found = _USED.search(message) or _REQUIRED.search(message)
    if "RESOURCE_EXHAUSTED" not in message or found is None:
        raise BadInput(f"the compiler refuses the program: {message[:500]}")
    return float(found[1]) * UNITS[found[2]], float(found[3]) * UNITS[found[4]]


def _account(compiled: Any, target: Target | None, trips: tuple[int, ...]) -> dict[str, Any]:
    """Memory, XLA's own counts, and for a target what the program moves and sends."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    if memory is None:
        raise BadInput(f"the backend {jax.default_backend()} does not say how much memory a program takes: use cpu")
    told = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "reused": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }
    peak = told["arguments"] + told["outputs"] - told["reused"] + told["temporary"]
    told |= {"flops_once": cost.get("flops", 0.0), "bytes_once": cost.get("bytes accessed", 0.0)}
    if target is None:
        return told | {"peak": peak}
    # A GPU's buffers are one block from the first instruction to the last; TPUs say what is there at the fullest.
    peak = memory.peak_memory_in_bytes if target.chip.platform == "tpu" else peak
    lacks = max(0.0, peak - target.chip.memory)
    return told | {"peak": peak, "lacks": lacks, "instructions": tuple(program_steps(compiled.as_text(), trips))}
