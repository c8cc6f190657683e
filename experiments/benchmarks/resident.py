"""How much memory a process holds during an update, against what the compiler said before.

    python -m experiments.benchmarks.resident --model=medium

The update is compiled from shapes alone; then its state is made and it runs. What is measured is by how much the
process grew at its largest, by the kernel's own count (Linux). Each measurement is a process of its own, because memory
that was held once is given back late. Measured: a small model holds 1.07 times what was expected.
"""

import ctypes
import gc
import json
from pathlib import Path

import jax
from absl import flags

import flowgrpo as fg
from experiments import common
from experiments.benchmarks.rows import SHAPES, full_batch, shape_called
from experiments.headings import heading
from flowgrpo.learner.dry_run import abstract_batch, abstract_state, dry_update, local_bytes, make_case
from flowgrpo.learner.floor import Job
from flowgrpo.learner.optimizers import make_optimizer
from flowgrpo.learner.state import init_learner
from flowgrpo.learner.update import make_update
from flowgrpo.types import BadInput

heading("What is run")
_MODEL = flags.DEFINE_enum("model", "medium", list(SHAPES), "Which shape.")
heading("Sizes")
_ROWS = flags.DEFINE_integer("rows", 64, "Rows of the batch.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 96, "Tokens of each.", lower_bound=2)
_MICRO = flags.DEFINE_integer("micro_rows", 16, "Rows that are scored together.", lower_bound=1)
heading("Devices and memory")
_REMAT = flags.DEFINE_bool("remat", False, "Compute layers again in the backward pass.")

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 2**20


def resident(field: str) -> int:
    """VmRSS, what the process holds, or VmHWM, the most that it held; bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise BadInput(f"{STATUS} does not say {field}: measure on Linux")


def forget_peak() -> None:
    """Give back what is free, and let the most that was held be what is held now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text("5")


def main() -> None:
    """Compile, run twice, print one JSON line."""
    if not CLEAR.exists():
        raise BadInput(f"{CLEAR} is not there: resident memory is measured on Linux")
    config = shape_called(_MODEL.value)
    job = Job(
        rows=_ROWS.value,
        length=_LENGTH.value,
        micro_rows=_MICRO.value,
        prompt=1,
        remat=_REMAT.value,
        dtype="float32",
    )
    case = make_case(config, job, fg.flow_grpo(beta=0.0), make_optimizer(learning_rate=1e-4))
    program = dry_update(case)
    update = make_update(case.policy, case.algorithm, case.optimizer, micro_rows=job.micro_rows, chunk=job.chunk)
    work = jax.jit(update, donate_argnums=0).lower(abstract_state(case), abstract_batch(case)).compile()
    start = jax.jit(lambda key: init_learner(case.policy.init(key), case.optimizer)).lower(jax.random.key(0)).compile()
    batch = jax.device_put(full_batch(config, job.rows, job.length))
    forget_peak()
    before = resident("VmRSS")
    state = jax.block_until_ready(start(jax.random.key(0)))
    forget_peak()
    for _ in range(2):
        state, _ = jax.block_until_ready(work(state, batch))
    held = resident("VmHWM") - before
    expected = program.peak - local_bytes(abstract_batch(case))  # which was there before
    figures = {"expected_mib": expected / MIB, "held_mib": held / MIB, "floor_mib": sum(program.floor.values()) / MIB}
    parts = {f"{name}_mib": round(size / MIB, 1) for name, size in program.floor.items()}
    result = {name: round(value, 1) for name, value in figures.items()} | parts
    print(json.dumps({"benchmark": "resident", "model": _MODEL.value, **result, "over": round(held / expected, 3)}))


if __name__ == "__main__":
    common.run(main)
