"""Table of what the programs of a run take of a device, computed from settings; no weight is ever made."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import optax

from experiments.benchmarks.measured import significant
from experiments.candidates import GIB
from experiments.devices import mesh_of
from experiments.lora_setup import lora_of
from experiments.planner_setup import has_masters
from flowgrpo.contracts import Algorithm
from flowgrpo.learner.dry_run import Program, dry_run, make_case
from flowgrpo.learner.floor import Job
from flowgrpo.models.config import DecoderConfig
from flowgrpo.types import BadInput

UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}


def parse_memory(text: str, flag: str = "--memory") -> float:
    """`80GiB` in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", text)
    if found is None or float(found[1]) == 0:
        raise BadInput(f"{flag}={text} must be a number above 0 with its unit: 80GiB, 24GB, 512MiB")
    return float(found[1]) * UNITS[found[2]]


def hosted_job(settings: Mapping[str, Any]) -> Job:
    """The update and the decoding of a hosted run, at the largest that they can be."""
    turns = 1 if settings["rendering"] == "append" else settings["turns"]
    masters = has_masters(settings)
    return Job(
        rows=settings["queries"] * settings["samples"] * turns,
        length=settings["context_tokens"],
        micro_rows=settings["micro_rows"],
        slots=settings["slots"],
        prompt=settings["context_tokens"] - settings["max_tokens"],
        steps=settings["steps"],
        remat=settings["remat"],
        dtype="float32" if masters else settings["dtype"],
        compute_dtype=settings["dtype"] if masters else None,
    )


def hosted_rows(
    settings: Mapping[str, Any],
    config: DecoderConfig,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    memory: float | None,
) -> list[dict[str, Any]]:
    """One line for each program of a hosted run with a model of this shape; its engine decodes on one device."""
    mesh = None if settings["mesh"] is None else mesh_of(settings["mesh"])
    job, lora = hosted_job(settings), lora_of(settings)
    case = make_case(config, job, algorithm, optimizer, mesh=mesh, lora=lora, gathers=True)
    return program_rows(dry_run(case), memory, offload=settings["offload"] != "none")


def program_rows(programs: Sequence[Program], memory: float | None, *, offload: bool) -> list[dict[str, Any]]:
    """One line a program, in GiB and in 10^12 operations of one device; `fits` where the memory of one is known."""
    rows = []
    for program in programs:
        whole = program.peak + (0 if offload else program.beside)
        rows.append(
            {
                "program": program.name,
                "arguments": significant(program.arguments / GIB),
                "outputs": significant(program.outputs / GIB),
                "reused": significant(program.reused / GIB),
                "temporary": significant(program.temporary / GIB),
                "peak": significant(program.peak / GIB),
                "beside": significant(program.beside / GIB),
                "floor": significant(sum(program.floor.values()) / GIB),
                "fits": None if memory is None else whole <= memory,
                "tflop": significant(program.flops / 1e12),
                "tflop_useful": significant(program.useful / 1e12),
                "tflop_loops_once": significant(program.flops_once / 1e12),
                "gb_products": significant(program.bytes / 1e9),
                "gb_loops_once": significant(program.bytes_once / 1e9),
                "compile_s": round(program.seconds, 1),
            }
        )
    return rows
