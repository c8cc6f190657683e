"""Dry runs: tables of the memory and time that the programs of a run need on a device, without making any weights.

programs = hosted_programs(config, shape_of_model("models/planner"), algorithm, optimizer, parse_target("v5e-8"))
rows = show_programs(programs, parse_memory("15GiB"), offload=True, target=parse_target("v5e-8"))
"""

import re
from collections.abc import Sequence
from typing import Any

import optax

from flowgrpo.contracts import Algorithm
from flowgrpo.models.config import DecoderConfig
from flowgrpo.parallel.sharding import make_mesh, parse_mesh, resolve_mesh
from flowgrpo.planning.compiled_program import count_collectives, largest_transfers, moved_bytes, sent_bytes
from flowgrpo.planning.cost_model import Workload
from flowgrpo.planning.dry_run import dry_run, make_case
from flowgrpo.planning.mesh_search import GIB
from flowgrpo.planning.program_cost import ProgramCost
from flowgrpo.planning.roofline import ideal_seconds, roofline_bound
from flowgrpo.planning.targets import Chip, Target, target_devices
from flowgrpo.recipes.agent_config import Config
from flowgrpo.report.tables import show_lines, significant
from flowgrpo.training.planner import frozen_base_dtype, has_master_weights, lora_of
from flowgrpo.types import BadInput

IN_GIB = ("arguments", "outputs", "reused", "temporary", "peak")  # of a program
SHOWN = 3  # number of a program's instructions in the table
UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}


def parse_memory(text: str, flag: str = "--memory") -> float:
    """`80GiB` in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", text)
    if match is None or float(match[1]) == 0:
        raise BadInput(f"{flag}={text} must be a number above 0 with its unit: 80GiB, 24GB, 512MiB")
    return float(match[1]) * UNITS[match[2]]


def hosted_workload(config: Config) -> Workload:
    """The largest possible update and decoding of a hosted run."""
    turns = 1 if config.rollout.rendering == "append" else config.rollout.turns
    masters = has_master_weights(config.model)
    return Workload(
        rows=config.rollout.queries * config.rollout.samples * turns,
        length=config.rollout.context_tokens,
        micro_rows=config.learner.micro_rows,
        mini_batches=config.learner.mini_batches,
        slots=config.devices.slots,
        prompt=config.rollout.context_tokens - config.rollout.max_tokens,
        steps=config.devices.decode_steps,
        remat=config.model.remat,
        dtype="float32" if masters else config.model.dtype,
        compute_dtype=config.model.dtype if masters else None,
    )


def hosted_programs(
    config: Config,
    decoder: DecoderConfig,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    target: Target | None = None,
) -> list[ProgramCost]:
    """Compile the programs of a hosted run with a model of this shape; its engine decodes on one device."""
    mesh = None if config.devices.mesh is None else resolve_mesh(config.devices.mesh)
    if config.devices.mesh is not None and target is not None:
        mesh = make_mesh(parse_mesh(config.devices.mesh, target.count), target_devices(target))
    case = make_case(
        decoder,
        hosted_workload(config),
        algorithm,
        optimizer,
        gathers=True,
        mesh=mesh,
        lora=lora_of(config.model),
        quantised=frozen_base_dtype(config.model),
        target=target,
    )
    return dry_run(case)


def show_programs(
    programs: Sequence[ProgramCost], memory: float | None, *, offload: bool, target: Target | None = None
) -> list[dict[str, Any]]:
    """Print tables of programs -> a record of each: memory; for a target also time and a breakdown.

    Args:
        programs: compiled programs.
        memory: of a device, in bytes; None: unknown.
        offload: whether models that a program does not use are off the device.
        target: the devices for which programs were compiled.
    """
    rows = memory_rows(programs, memory, offload=offload)
    show_lines(rows)
    if target is None or target.chip.platform == "cpu":
        return rows
    print(f"{target.name}: lower bounds of time by operations, bytes moved and bytes sent; GB and ms of one device")
    timed = [time_row(program, target.chip) for program in programs]
    show_lines(timed)
    breakdowns = [program_breakdown(program) for program in programs]
    for program, breakdown in zip(programs, breakdowns, strict=True):
        moves = "; ".join(f"{size:g} GB {name}" for name, size in breakdown["largest"][:SHOWN])
        print(f"{program.name} moves most by: {moves or 'nothing, since its compiler refused it'}")
    return [row | times | breakdown for row, times, breakdown in zip(rows, timed, breakdowns, strict=True)]


def memory_rows(programs: Sequence[ProgramCost], memory: float | None, *, offload: bool) -> list[dict[str, Any]]:
    """A row for each program, in GiB and 10^12 operations of one device; `fits` is None if its memory is unknown."""
    rows = []
    for program in programs:
        sizes = {name: getattr(program, name) / GIB for name in IN_GIB}
        sizes |= {"beside": program.resident_bytes / GIB, "floor": sum(program.floor.values()) / GIB}
        needed = program.peak + (0 if offload else program.resident_bytes)
        missing = max(program.lacks, 0.0 if memory is None else needed - memory, 0.0)
        work = {
            "tflop": program.flops / 1e12,
            "tflop_useful": program.useful_flops / 1e12,
            "tflop_loops_once": program.flops_once / 1e12,
            "gb_products": program.bytes / 1e9,
            "gb_loops_once": program.bytes_once / 1e9,
        }
        rows.append(
            {"program": program.name}
            | {name: significant(size) for name, size in sizes.items()}
            | {"fits": None if memory is None else missing == 0, "lacks": significant(missing / GIB)}
            | {name: significant(amount) for name, amount in work.items()}
            | {"compile_s": round(program.seconds, 1)}
        )
    return rows


def time_row(program: ProgramCost, chip: Chip) -> dict[str, Any]:
    """Lower bounds of a program's time on a chip; for decoding also a step's, over that of an ideal one."""
    limit, steps = roofline_bound(program, chip), program.instructions
    row: dict[str, Any] = {"program": program.name}
    if limit is None:
        return row | dict.fromkeys(TIMES)
    row |= {"moved_gb": significant(moved_bytes(steps) / 1e9), "sent_gb": significant(sent_bytes(steps) / 1e9)}
    row |= {"collectives": round(sum(count_collectives(steps).values()))}
    row |= {"bound_ms": significant(1e3 * limit.seconds)}
    row |= {"estimated_ms": significant(1e3 * limit.estimated) if limit.estimated else None}
    row |= {"mfu": significant(limit.utilisation), "step_ms": None, "ideal_ms": None, "over_ideal": None}
    if "cache" in program.floor and program.steps > 1:
        ideal = ideal_seconds(program, chip)
        step = max(limit.seconds, limit.estimated) / program.steps
        row |= {"step_ms": significant(1e3 * step), "ideal_ms": significant(1e3 * ideal)}
        row |= {"over_ideal": significant(limit.memory / program.steps / ideal)}
    return row


TIMES = ("moved_gb", "sent_gb", "collectives", "bound_ms", "estimated_ms", "mfu", "step_ms", "ideal_ms", "over_ideal")


def program_breakdown(program: ProgramCost) -> dict[str, Any]:
    """Parts of a program's memory by formula in GiB, its collectives, and the instructions that move the most GB."""
    most = [[name, significant(size / 1e9)] for name, size in largest_transfers(program.instructions)]
    counts = {kind: round(times) for kind, times in count_collectives(program.instructions).items()}
    parts = {part: significant(size / GIB) for part, size in program.floor.items()}
    return {"parts": parts, "collectives_by_kind": counts, "largest": most}
