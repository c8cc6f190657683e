"""Tables of what the programs of a run take of a device; no weight is ever made.

programs = hosted_programs(config, shape_of_model("models/planner"), algorithm, optimizer, parse_target("v5e-8"))
rows = show_programs(programs, parse_memory("15GiB"), offload=True, target=parse_target("v5e-8"))
"""

import re
from collections.abc import Sequence
from typing import Any

import optax

from flowgrpo.contracts import Algorithm
from flowgrpo.models.config import DecoderConfig
from flowgrpo.parallel.sharding import make_mesh, mesh_of, parse_mesh
from flowgrpo.planning.compiled_program import collectives, largest, moved_bytes, sent_bytes
from flowgrpo.planning.cost_model import Workload
from flowgrpo.planning.dry_run import dry_run, make_case
from flowgrpo.planning.mesh_search import GIB
from flowgrpo.planning.program_cost import ProgramCost
from flowgrpo.planning.roofline import bound, ideal_seconds
from flowgrpo.planning.targets import Chip, Target, target_devices
from flowgrpo.recipes.agent_config import Config
from flowgrpo.recipes.planner import base_kind, has_masters, lora_of
from flowgrpo.report.tables import show_lines, significant
from flowgrpo.types import BadInput

IN_GIB = ("arguments", "outputs", "reused", "temporary", "peak", "beside")  # of a program
SHOWN = 3  # instructions that are told of a program
UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}


def parse_memory(text: str, flag: str = "--memory") -> float:
    """`80GiB` in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", text)
    if found is None or float(found[1]) == 0:
        raise BadInput(f"{flag}={text} must be a number above 0 with its unit: 80GiB, 24GB, 512MiB")
    return float(found[1]) * UNITS[found[2]]


def hosted_job(config: Config) -> Workload:
    """The update and the decoding of a hosted run, at the largest that they can be."""
    turns = 1 if config.rendering == "append" else config.turns
    masters = has_masters(config)
    return Workload(
        rows=config.queries * config.samples * turns,
        length=config.context_tokens,
        micro_rows=config.micro_rows,
        mini_batches=config.mini_batches,
        slots=config.slots,
        prompt=config.context_tokens - config.max_tokens,
        steps=config.steps,
        remat=config.remat,
        dtype="float32" if masters else config.dtype,
        compute_dtype=config.dtype if masters else None,
    )


def hosted_programs(
    config: Config,
    decoder: DecoderConfig,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    target: Target | None = None,
) -> list[ProgramCost]:
    """Compile the programs of a hosted run with a model of this shape; its engine decodes on one device."""
    mesh = None if config.mesh is None else mesh_of(config.mesh)
    if config.mesh is not None and target is not None:
        mesh = make_mesh(parse_mesh(config.mesh, target.count), target_devices(target))
    job, lora = hosted_job(config), lora_of(config)
    settings: dict[str, Any] = {"mesh": mesh, "lora": lora, "quantised": base_kind(config), "target": target}
    return dry_run(make_case(decoder, job, algorithm, optimizer, gathers=True, **settings))


def show_programs(
    programs: Sequence[ProgramCost], memory: float | None, *, offload: bool, target: Target | None = None
) -> list[dict[str, Any]]:
    """Print tables of programs, and return a record of each: memory, and for a target time and what wastes most."""
    rows = program_rows(programs, memory, offload=offload)
    show_lines(rows)
    if target is None or target.chip.platform == "cpu":
        return rows
    print(f"{target.name}: at most so fast, by operations, bytes moved and bytes sent; GB and ms of one device")
    timed = [time_row(program, target.chip) for program in programs]
    show_lines(timed)
    told = [waste(program) for program in programs]
    for program, record in zip(programs, told, strict=True):
        moves = "; ".join(f"{size:g} GB {name}" for name, size in record["largest"][:SHOWN])
        print(f"{program.name} moves most by: {moves or 'nothing, since its compiler refused it'}")
    return [row | times | record for row, times, record in zip(rows, timed, told, strict=True)]


def program_rows(programs: Sequence[ProgramCost], memory: float | None, *, offload: bool) -> list[dict[str, Any]]:
    """One line a program, in GiB and in 10^12 operations of one device; `fits` where the memory of one is known."""
    rows = []
    for program in programs:
        sizes = {name: getattr(program, name) / GIB for name in IN_GIB} | {"floor": sum(program.floor.values()) / GIB}
        whole = program.peak + (0 if offload else program.beside)
        lacks = max(program.lacks, 0.0 if memory is None else whole - memory, 0.0)
        work = {
            "tflop": program.flops / 1e12,
            "tflop_useful": program.useful / 1e12,
            "tflop_loops_once": program.flops_once / 1e12,
            "gb_products": program.bytes / 1e9,
            "gb_loops_once": program.bytes_once / 1e9,
        }
        rows.append(
            {"program": program.name}
            | {name: significant(size) for name, size in sizes.items()}
            | {"fits": None if memory is None else lacks == 0, "lacks": significant(lacks / GIB)}
            | {name: significant(amount) for name, amount in work.items()}
            | {"compile_s": round(program.seconds, 1)}
        )
    return rows


def time_row(program: ProgramCost, chip: Chip) -> dict[str, Any]:
    """Bounds of a program's time on a chip; of decoding also a step beside one that reads what it must and no more."""
    limit, steps = bound(program, chip), program.instructions
    row: dict[str, Any] = {"program": program.name}
    if limit is None:
        return row | dict.fromkeys(TIMES)
    row |= {"moved_gb": significant(moved_bytes(steps) / 1e9), "sent_gb": significant(sent_bytes(steps) / 1e9)}
    row |= {"collectives": round(sum(collectives(steps).values()))}
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


def waste(program: ProgramCost) -> dict[str, Any]:
    """Parts of a program's memory by formula in GiB, its collectives, and what moves the most GB."""
    most = [[name, significant(size / 1e9)] for name, size in largest(program.instructions)]
    counts = {kind: round(times) for kind, times in collectives(program.instructions).items()}
    parts = {part: significant(size / GIB) for part, size in program.floor.items()}
    return {"parts": parts, "collectives_by_kind": counts, "largest": most}
