"""Tables of what the programs of a run take of a device; no weight is ever made.

rows = hosted_rows(config, shape_of_model("models/planner"), algorithm, optimizer, parse_memory("80GiB"))
"""

import re
from collections.abc import Sequence
from typing import Any

import optax

from flowgrpo.contracts import Algorithm
from flowgrpo.models.config import DecoderConfig
from flowgrpo.parallel.sharding import mesh_of
from flowgrpo.planning.cost_model import Workload
from flowgrpo.planning.dry_run import ProgramCost, dry_run, make_case
from flowgrpo.planning.mesh_search import GIB
from flowgrpo.recipes.agent_config import Config
from flowgrpo.recipes.planner import base_kind, has_masters, lora_of
from flowgrpo.report.tables import significant
from flowgrpo.types import BadInput

IN_GIB = ("arguments", "outputs", "reused", "temporary", "peak", "beside")  # of a program
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
        slots=config.slots,
        prompt=config.context_tokens - config.max_tokens,
        steps=config.steps,
        remat=config.remat,
        dtype="float32" if masters else config.dtype,
        compute_dtype=config.dtype if masters else None,
    )


def hosted_rows(
    config: Config,
    decoder: DecoderConfig,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    memory: float | None,
) -> list[dict[str, Any]]:
    """One line for each program of a hosted run with a model of this shape; its engine decodes on one device."""
    mesh = None if config.mesh is None else mesh_of(config.mesh)
    job, lora = hosted_job(config), lora_of(config)
    quantised = base_kind(config)
    case = make_case(decoder, job, algorithm, optimizer, mesh=mesh, lora=lora, quantised=quantised, gathers=True)
    return program_rows(dry_run(case), memory, offload=config.offload != "none")


def program_rows(programs: Sequence[ProgramCost], memory: float | None, *, offload: bool) -> list[dict[str, Any]]:
    """One line a program, in GiB and in 10^12 operations of one device; `fits` where the memory of one is known."""
    rows = []
    for program in programs:
        sizes = {name: getattr(program, name) / GIB for name in IN_GIB} | {"floor": sum(program.floor.values()) / GIB}
        whole = program.peak + (0 if offload else program.beside)
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
            | {"fits": None if memory is None else whole <= memory}
            | {name: significant(amount) for name, amount in work.items()}
            | {"compile_s": round(program.seconds, 1)}
        )
    return rows
