"""How to run a model on some devices: which mesh, how many rows at a time, and what is computed again.

    python -m experiments.plan --model=qwen2.5-7b --devices=8 --memory=80GiB
    python -m experiments.plan --model=FOLDER --devices=64 --queries=64 --samples=16 --length=8192 --compile_top=2
    python -m experiments.plan --model=qwen2.5-7b --devices=512 --mesh=data=8,fsdp=64 --rows=1024

Every mesh, with and without remat and at all sizes of micro-batches, is ranked by formula (see `candidates`); then the
very programs of the best few are compiled for virtual devices, without weights (see `learner.dry_run`). With `--mesh`
that one alone is looked at. `--model` is a folder with a config.json, or the name of a published shape. What does not
fit is listed with what takes most of the memory. Seconds by formula only rank; their rates are flags.
"""

import json
from dataclasses import asdict
from typing import Any

import jax
from absl import flags

from experiments.cli import app
from experiments.cli.help import flag_heading
from flowgrpo import launch
from flowgrpo.contracts import Algorithm
from flowgrpo.learner.loss_scale import optimizer_for
from flowgrpo.learner.state import make_optimizer
from flowgrpo.models.config import DecoderConfig
from flowgrpo.parallel.sharding import make_mesh, parse_mesh
from flowgrpo.planning.cost_model import Workload, count_parameters
from flowgrpo.planning.dry_run import dry_run, make_case
from flowgrpo.planning.mesh_search import GIB, Candidate, Machine, MemorySettings, candidates, meshes, shape_of_model
from flowgrpo.recipes.dry_runs import parse_memory, program_rows
from flowgrpo.recipes.registry import ALGORITHMS
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines
from flowgrpo.types import BadInput

_DTYPES = ["float32", "bfloat16", "float16"]
flag_heading("What is run")
_MODEL = flags.DEFINE_string("model", "qwen2.5-7b", "Folder with a config.json, or the name of a published shape.")
_ALGORITHM = flags.DEFINE_string("algorithm", "flow_grpo", "Member of the family.")
_BETA = flags.DEFINE_float("beta", 0.001, "Weight of the KL term; 0 needs no reference.", lower_bound=0.0)
_PROGRAMS = flags.DEFINE_list("programs", None, "Which programs to compile; by default all.")
_TOP = flags.DEFINE_integer("compile_top", 1, "How many of the best are compiled.", lower_bound=0)
_SHOWN = flags.DEFINE_integer("shown", 8, "Lines of each table.", lower_bound=1)
_ROLLOUT = flags.DEFINE_bool("rollout", True, "The same devices decode; --norollout plans the update alone.")
flag_heading("Sizes")
_QUERIES = flags.DEFINE_integer("queries", 32, "Queries of an update.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Trajectories of a query.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", None, "Packed rows of an update; by default one a trajectory.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 4096, "Tokens of a row, and of a slot that decodes.", lower_bound=2)
_PROMPT = flags.DEFINE_integer("prompt", 512, "Tokens of a prompt.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 128, "Tokens of a stretch of decoding.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 256, "Trajectories that decode together, on all devices.", lower_bound=1)
flag_heading("Costs")
_TFLOPS = flags.DEFINE_float("tflops", 300.0, "10^12 operations a second of a device; ranks only.", lower_bound=1e-3)
_BANDWIDTH = flags.DEFINE_float("bandwidth", 2000.0, "GB a second of its memory; ranks only.", lower_bound=1e-3)
_LINK = flags.DEFINE_float("link", 100.0, "GB a second between devices; ranks only.", lower_bound=1e-3)
flag_heading("Devices and memory")
_COUNT = flags.DEFINE_integer("devices", 8, "How many devices there are.", lower_bound=1, upper_bound=512)
_MEMORY = flags.DEFINE_string("memory", "80GiB", "Memory of each: a number with GiB, GB, MiB or MB.")
_MESH = flags.DEFINE_string("mesh", None, "The only mesh to look at, as data=2,fsdp=4,tensor=1.")
_MICRO = flags.DEFINE_integer("micro_rows", None, "The only size of micro-batches to look at.", lower_bound=1)
_REMAT = flags.DEFINE_bool("remat", None, "Only with, or only without, computing layers again.")
_CHUNK = flags.DEFINE_integer("chunk", 1024, "Tokens of which all logits are there at once.", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", _DTYPES, "What parameters are held in.")
_COMPUTE = flags.DEFINE_enum("compute_dtype", "bfloat16", _DTYPES, "What the update computes in.")
_OFFLOAD = flags.DEFINE_bool("offload", True, "Models that a stage does not read are moved off the device.")


def _job_of() -> Workload:
    """The job that the flags describe."""
    return Workload(
        rows=_ROWS.value or _QUERIES.value * _SAMPLES.value,
        length=_LENGTH.value,
        slots=_SLOTS.value,
        prompt=_PROMPT.value,
        steps=_STEPS.value,
        dtype=_DTYPE.value,
        compute_dtype=None if _COMPUTE.value == _DTYPE.value else _COMPUTE.value,
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
    """Why a candidate does not fit."""
    stages = {"update": candidate.update, "decode": candidate.decode}
    name, parts = max(stages.items(), key=lambda x: sum(x[1].values()))
    most = sorted(parts.items(), key=lambda x: -x[1])[:3]
    told = ", ".join(f"{part} {size / GIB:.1f}" for part, size in most)
    return f"{name} lacks {(sum(parts.values()) - memory) / GIB:.1f} GiB: {told}"


def _compile_one(config: DecoderConfig, candidate: Candidate, memory: float) -> dict[str, Any]:
    """The programs of a candidate, compiled, with their table."""
    mesh = make_mesh(candidate.mesh) if _COUNT.value > 1 else None
    optimizer = optimizer_for(_COMPUTE.value, make_optimizer(learning_rate=1e-6))
    case = make_case(config, candidate.job, _algorithm_of(), optimizer, mesh=mesh)
    learning = ["update", *(["reference"] if "logp_ref" in case.algorithm.needs else [])]
    programs = _PROGRAMS.value or (None if _ROLLOUT.value else learning)
    rows = program_rows(dry_run(case, programs), memory, offload=_OFFLOAD.value)
    line = _row_of(candidate)
    print(f"compiled for {line['mesh']}, micro_rows {line['micro_rows']}, remat {line['remat']}: GiB of one device")
    show_lines(rows)
    return line | {"programs": rows, "fits": all(row["fits"] for row in rows)}


def main() -> None:
    """Rank, compile the best few, print the tables and one JSON line."""
    jax.config.update("jax_platforms", "cpu")  # whatever there is: devices are virtual
    launch.configure(cpu_devices=_COUNT.value)  # before JAX starts, which nothing before this line does
    memory, config, job = parse_memory(_MEMORY.value), shape_of_model(_MODEL.value), _job_of()
    machine = Machine(memory, _TFLOPS.value * 1e12, _BANDWIDTH.value * 1e9, _LINK.value * 1e9)
    run = MemorySettings(reference="logp_ref" in _algorithm_of().needs, moved=_OFFLOAD.value, decodes=_ROLLOUT.value)
    given = None if _MESH.value is None else parse_mesh(_MESH.value, _COUNT.value)
    layouts = list(meshes(config, _COUNT.value)) if given is None else [given]
    every, micro, remat = candidates(config, job, run, machine, layouts), _MICRO.value, _REMAT.value
    found = [x for x in every if micro in (None, x.job.micro_rows) and remat in (None, x.job.remat)]
    if not found:
        raise BadInput(f"--micro_rows={micro} suits no mesh: {_COUNT.value} devices share the rows of a batch")
    fitting = [x for x in found if x.needed <= memory]
    print(f"{_MODEL.value}: {count_parameters(config):,} parameters; {job.rows} rows of {job.length} tokens an update")
    print(f"{len(fitting)} of {len(found)} ways fit {_MEMORY.value} by formula; the fastest:")
    show_lines([_row_of(x) for x in fitting[: _SHOWN.value]])
    others = [_row_of(x) | {"why_not": _reason(x, memory)} for x in found if x.needed > memory]
    if others:
        print("the nearest of those that do not fit:")
        show_lines(others[: _SHOWN.value])
    # A single mesh is compiled even where it does not fit, to show by how much.
    chosen = (fitting or (found if given else []))[: _TOP.value]
    compiled = [_compile_one(config, x, memory) for x in with_progress("compile", chosen)]
    result = {"plan": _MODEL.value, "parameters": count_parameters(config), "devices": _COUNT.value, "memory": memory}
    result |= {"job": asdict(job), "fitting": [_row_of(x) for x in fitting[: _SHOWN.value]]}
    print(json.dumps(result | {"not_fitting": others[: _SHOWN.value], "compiled": compiled}))


if __name__ == "__main__":
    app.run(main)
