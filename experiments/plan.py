"""Plan how to run a model on devices: mesh, micro-batch size and rematerialisation.

    python -m experiments.plan --model=qwen2.5-7b --devices=8 --memory=80GiB
    python -m experiments.plan --model=FOLDER --devices=64 --queries=64 --samples=16 --length=8192 --compile_top=2
    python -m experiments.plan --model=qwen2.5-7b --devices=512 --mesh=data=8,fsdp=64 --rows=1024
    python -m experiments.plan --model=qwen2.5-1.5b --target=v5e-8,h100-1 --rows=64 --slots=64

Every mesh, with and without remat and at all sizes of micro-batches, is ranked by formula (see `candidates`); then the
programs of the best few are compiled without weights (see `planning.dry_run`): for virtual devices, or with `--target`
by the compiler of that machine, which need not be present (`pip install '.[aot]'`). The compiler's numbers decide: peak
memory, whether it fits, bytes moved and sent, and so a lower bound on the time of an update and of a decode step. With
`--mesh` only that mesh is considered; with `--decode_mesh` the same devices decode on another, and the cost of bringing
the parameters there is shown (`reshard`). `--model` is a folder with a config.json, or the name of a published shape.
Plans that do not fit are listed with their largest buffers. Seconds by formula are only used to rank.
"""

import json
import math
from dataclasses import asdict, replace
from typing import Any

from absl import flags

from flowgrpo import launch
from flowgrpo.training.names import BASE_DTYPES, WHOLE_BASE

from .cli import app
from .cli.help import flag_heading

_DTYPES = ["float32", "bfloat16", "float16"]
flag_heading("Run")
_MODEL = flags.DEFINE_string("model", "qwen2.5-7b", "Folder with a config.json, or the name of a published shape.")
_ALGORITHM = flags.DEFINE_string("algorithm", "flow_grpo", "Member of the family.")
_BETA = flags.DEFINE_float("beta", 0.001, "Weight of the KL term; 0 needs no reference.", lower_bound=0.0)
_LORA = flags.DEFINE_integer("lora_rank", 0, "Rank of a LoRA adapter; 0: train all parameters.", lower_bound=0)
_BASE = flags.DEFINE_enum("base", WHOLE_BASE, BASE_DTYPES, "Type of the frozen weights under an adapter.")
_PROGRAMS = flags.DEFINE_list("programs", None, "Programs to compile; by default all.")
_TOP = flags.DEFINE_integer("compile_top", 1, "Number of the best plans to compile.", lower_bound=0)
_SHOWN = flags.DEFINE_integer("shown", 8, "Number of lines of each table.", lower_bound=1)
_ROLLOUT = flags.DEFINE_bool("rollout", True, "Plan decoding on the same devices, too; --norollout: the update only.")
flag_heading("Sizes")
_QUERIES = flags.DEFINE_integer("queries", 32, "Number of queries per update.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Number of trajectories per query.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", None, "Packed rows per update; by default one per trajectory.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 4096, "Tokens of a row, and of a decoding slot.", lower_bound=2)
_PROMPT = flags.DEFINE_integer("prompt", 512, "Tokens of a prompt.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 128, "Tokens per decode program.", lower_bound=1)
_SLOTS = flags.DEFINE_integer(
    "slots", 256, "Number of trajectories that decode together, on all devices.", lower_bound=1
)
flag_heading("Costs")
_TFLOPS = flags.DEFINE_float("tflops", 300.0, "Peak TFLOP/s of a device; for ranking only.", lower_bound=1e-3)
_BANDWIDTH = flags.DEFINE_float(
    "bandwidth", 2000.0, "Memory bandwidth of a device in GB/s; for ranking only.", lower_bound=1e-3
)
_LINK = flags.DEFINE_float("link", 100.0, "Bandwidth between devices in GB/s; for ranking only.", lower_bound=1e-3)
flag_heading("Devices and memory")
_TARGET = flags.DEFINE_list(
    "target", None, "Machines to compile for, by commas, such as v5e-8 or h100-1; their figures take the flags' place."
)
_COUNT = flags.DEFINE_integer("devices", 8, "Number of devices.", lower_bound=1, upper_bound=512)
_MEMORY = flags.DEFINE_string("memory", "80GiB", "Memory of a device: a number with GiB, GB, MiB or MB.")
_MESH = flags.DEFINE_string("mesh", None, "The only mesh to consider, such as data=2,fsdp=4,tensor=1.")
_DECODE_MESH = flags.DEFINE_string(
    "decode_mesh", None, "Mesh for decoding on the same devices; by default that of the update."
)
_MICRO = flags.DEFINE_integer("micro_rows", None, "The only micro-batch size to consider.", lower_bound=1)
_REMAT = flags.DEFINE_bool("remat", None, "Only with, or only without, rematerialisation.")
_CHUNK = flags.DEFINE_integer("chunk", 1024, "Number of tokens whose logits are in memory at once.", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", _DTYPES, "Type of the parameters; a frozen base is in --compute_dtype.")
_COMPUTE = flags.DEFINE_enum("compute_dtype", "bfloat16", [*_DTYPES, "float16"], "Compute type of the update.")
_OFFLOAD = flags.DEFINE_bool("offload", True, "Move models that a stage does not read off the device.")

app.read_flags(__name__)

import jax

from flowgrpo.contracts import Algorithm
from flowgrpo.learner.loss_scale import optimizer_for
from flowgrpo.learner.state import adamw
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.lora import LoraConfig
from flowgrpo.parallel.sharding import make_mesh, parse_mesh
from flowgrpo.planning.cost_model import Workload, count_parameters
from flowgrpo.planning.dry_run import dry_run, make_case
from flowgrpo.planning.mesh_search import (
    GIB,
    Candidate,
    Machine,
    MemorySettings,
    list_meshes,
    rank_candidates,
    shape_of_model,
    suggest_remedies,
)
from flowgrpo.planning.targets import Target, check_dtype, parse_target, target_devices
from flowgrpo.recipes.dry_runs import parse_memory, show_programs
from flowgrpo.recipes.registry import ALGORITHMS
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines
from flowgrpo.types import BadInput


def _job_of() -> Workload:
    """The job that the flags describe."""
    held = _COMPUTE.value if _LORA.value and not _DTYPE.present else _DTYPE.value  # what is frozen needs no masters
    return Workload(
        rows=_ROWS.value or _QUERIES.value * _SAMPLES.value,
        length=_LENGTH.value,
        slots=_SLOTS.value,
        prompt=_PROMPT.value,
        steps=_STEPS.value,
        dtype=held,
        compute_dtype=None if _COMPUTE.value == held else _COMPUTE.value,
        chunk=_CHUNK.value,
    )


def _algorithm_of() -> Algorithm:
    """The member of the family, with the KL term where it is asked for."""
    if _ALGORITHM.value not in ALGORITHMS:
        raise BadInput(f"--algorithm={_ALGORITHM.value} is unknown; choose from {', '.join(ALGORITHMS)}")
    if _ALGORITHM.value in ("ppo", "dpo", "kimi", "dr_grpo"):
        raise BadInput(f"--algorithm={_ALGORITHM.value} can't be planned here; choose one without a critic or pairs")
    return ALGORITHMS[_ALGORITHM.value](beta=_BETA.value)


def _row_of(candidate: Candidate) -> dict[str, Any]:
    """One line of the table by formula."""
    shown = ",".join(f"{axis}={size}" for axis, size in candidate.mesh.items() if size > 1) or "one device"
    return {
        "mesh": shown,
        "micro_rows": candidate.job.micro_rows,
        "remat": candidate.job.remat,
        "slots": candidate.job.slots,
        "update_gib": round(sum(candidate.update.values()) / GIB, 1),
        "decode_gib": round(sum(candidate.decode.values()) / GIB, 1),
        "update_s": round(candidate.update_seconds, 2),
        "rollout_s": round(candidate.rollout_seconds, 2),
    }


def _reason(candidate: Candidate, memory: float) -> str:
    """Say why a candidate does not fit."""
    stages = {"update": candidate.update, "decode": candidate.decode}
    name, parts = max(stages.items(), key=lambda x: sum(x[1].values()))
    most = sorted(parts.items(), key=lambda x: -x[1])[:3]
    told = ", ".join(f"{part} {size / GIB:.1f}" for part, size in most)
    return f"{name} lacks {(sum(parts.values()) - memory) / GIB:.1f} GiB: {told}"


def _machine_of(target: Target | None) -> Machine:
    """Figures of a device: those of the target's chip, where no flag says another."""
    flagged = (parse_memory(_MEMORY.value), _TFLOPS.value * 1e12, _BANDWIDTH.value * 1e9, _LINK.value * 1e9)
    if target is None or target.chip.platform == "cpu":
        return Machine(*flagged)
    chip = (target.chip.memory, target.chip.flops, target.chip.bandwidth, target.chip.link)
    given = (_MEMORY.present, _TFLOPS.present, _BANDWIDTH.present, _LINK.present)
    figures = (flag if there else own for flag, there, own in zip(flagged, given, chip, strict=True))
    return Machine(*figures, platform=target.chip.platform)


def _memory_of() -> MemorySettings:
    """Read the memory settings of the run from the flags."""
    if not _LORA.value and _BASE.value != WHOLE_BASE:
        raise BadInput(f"--base={_BASE.value} freezes the weights: give --lora_rank=16 too, for an adapter beside them")
    lora = LoraConfig(_LORA.value) if _LORA.value else None
    base = None if _BASE.value == WHOLE_BASE else _BASE.value
    return MemorySettings(moved=_OFFLOAD.value, decodes=_ROLLOUT.value, lora=lora, base=base)


def _targets() -> list[Target | None]:
    """The machines that are asked for; None: virtual devices, as many as --devices says."""
    if _TARGET.value is None:
        return [None]
    if _COUNT.present:
        raise BadInput(f"--devices={_COUNT.value} beside --target: a target says how many devices it has; leave it out")
    return [parse_target(text) for text in _TARGET.value]


def _compile_one(
    config: DecoderConfig,
    algorithm: Algorithm,
    run: MemorySettings,
    candidate: Candidate,
    machine: Machine,
    target: Target | None,
) -> dict[str, Any]:
    """The programs of a candidate, compiled, with their tables."""
    devices = None if target is None else target_devices(target)
    count = math.prod(candidate.mesh.values())
    mesh = make_mesh(candidate.mesh, devices) if count > 1 else None
    optimizer = optimizer_for(_COMPUTE.value, adamw(1e-6))
    decoding = None
    if _DECODE_MESH.value is not None:
        decoding = make_mesh(parse_mesh(_DECODE_MESH.value, count), devices)
    settings: dict[str, Any] = {"mesh": mesh, "target": target, "decode_mesh": decoding}
    settings |= {"lora": run.lora, "quantised": run.base}
    case = make_case(config, candidate.job, algorithm, optimizer, **settings)
    learning = ["update", *(["reference"] if "logp_ref" in case.algorithm.needs else [])]
    programs = _PROGRAMS.value or (None if _ROLLOUT.value else learning)
    line = _row_of(candidate)
    print(f"compiled for {line['mesh']}, micro_rows {line['micro_rows']}, remat {line['remat']}: GiB of one device")
    rows = show_programs(dry_run(case, programs), machine.memory, offload=_OFFLOAD.value, target=target)
    return line | {"programs": rows, "fits": all(row["fits"] for row in rows)}


def _found(
    config: DecoderConfig, job: Workload, run: MemorySettings, machine: Machine, count: int, layouts: list
) -> list[Candidate]:
    """The ways that the flags leave."""
    every, micro, remat = rank_candidates(config, job, run, machine, layouts), _MICRO.value, _REMAT.value
    found = [x for x in every if micro in (None, x.job.micro_rows) and remat in (None, x.job.remat)]
    if not found:
        raise BadInput(f"--micro_rows={micro} suits no mesh: {count} devices share the rows of a batch")
    return found


def plan(
    config: DecoderConfig, job: Workload, algorithm: Algorithm, machine: Machine, target: Target | None
) -> dict[str, Any]:
    """Rank the ways to use one machine, compile the best few, and print the tables."""
    count = _COUNT.value if target is None else target.count
    run = replace(_memory_of(), reference="logp_ref" in algorithm.needs)
    given = None if _MESH.value is None else parse_mesh(_MESH.value, count)
    layouts = list(list_meshes(config, count)) if given is None else [given]
    found = _found(config, job, run, machine, count, layouts)
    fitting = [x for x in found if x.peak_bytes <= machine.memory]
    there = f"{machine.memory / GIB:g} GiB" + ("" if target is None else f" of each device of {target.name}")
    print(f"{len(fitting)} of {len(found)} ways fit {there} by formula; the fastest:")
    show_lines([_row_of(x) for x in fitting[: _SHOWN.value]])
    others = [_row_of(x) | {"why_not": _reason(x, machine.memory)} for x in found if x.peak_bytes > machine.memory]
    if others:
        print("the nearest of those that do not fit:")
        show_lines(others[: _SHOWN.value])
    # What the formula refuses is compiled for a target, whose compiler decides, and where no other mesh is asked for.
    chosen = (fitting or (found if given or target else []))[: _TOP.value]
    compiled = [_compile_one(config, algorithm, run, x, machine, target) for x in with_progress("compile", chosen)]
    result: dict[str, Any] = {"target": None if target is None else target.name, "devices": count}
    result |= {"memory": machine.memory, "fitting": [_row_of(x) for x in fitting[: _SHOWN.value]]}
    if not (any(x["fits"] for x in compiled) if compiled else fitting):
        result["would_fit"] = suggest_remedies(config, job, run, machine, count)
        print(f"nothing that was tried fits; by formula these would: {'; '.join(result['would_fit'])}")
    return result | {"not_fitting": others[: _SHOWN.value], "compiled": compiled}


def main() -> None:
    """Plan each machine, print the tables and one JSON line of each."""
    jax.config.update("jax_platforms", "cpu")  # whatever there is: devices are virtual
    targets = _targets()
    virtual = [1 if target.chip.platform != "cpu" else target.count for target in targets if target is not None]
    launch.configure(cpu_devices=max(virtual, default=_COUNT.value))  # before JAX starts, which nothing has done yet
    config, job = shape_of_model(_MODEL.value), _job_of()
    algorithm, machines = _algorithm_of(), [_machine_of(target) for target in targets]
    for target in targets:  # what can't be compiled for is told before hours of compiling for others
        if target is not None:
            check_dtype(target, job.compute_dtype or job.dtype)
            target_devices(target)
    print(f"{_MODEL.value}: {count_parameters(config):,} parameters; {job.rows} rows of {job.length} tokens an update")
    about = {"plan": _MODEL.value, "parameters": count_parameters(config), "job": asdict(job)}
    for target, machine in zip(targets, machines, strict=True):
        print(json.dumps(about | plan(config, job, algorithm, machine, target)))


if __name__ == "__main__":
    app.run(main)
