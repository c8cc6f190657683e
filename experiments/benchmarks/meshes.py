"""Updates on fixed batches over every kind of mesh: distance of the parameters (F3), and memory of a device.

    python -m experiments.benchmarks.meshes

    apart = |theta - theta'| / |theta' - theta_0|      theta' by one device, both after 5 steps of AdamW

A small decoder with biases, norms and grouped heads; batches of packed random trajectories, with a KL term and ratios
beyond the clip bounds, in eight micro-batches on one device, or in one with `whole`. For several processes, start one
command each:

    python -m experiments.benchmarks.meshes --coordinator=HOST:PORT --num_processes=2 --process_id=0 --cpu_devices=4

Expected on CPUs, in float32: every line below 1e-4, and most below 1e-5.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from absl import flags

from flowgrpo import launch

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Run")
_MESHES = flags.DEFINE_list(
    "mesh", None, "Any of whole, pmap, or a mesh such as data:4/tensor:2; by default one of each kind."
)
flag_heading("Sizes")
_UPDATES = flags.DEFINE_integer("updates", 5, "Number of updates, each on another batch.", lower_bound=1)
flag_heading("Devices and memory")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, with several processes.")
_PROCESSES = flags.DEFINE_integer("num_processes", 1, "Number of processes.", lower_bound=1)
_PROCESS = flags.DEFINE_integer("process_id", 0, "Index of this process.", lower_bound=0)

app.read_flags(__name__)

import jax
import numpy as np
import optax

from flowgrpo.algorithms.policy_gradient import flow_grpo
from flowgrpo.batching.collate import collate
from flowgrpo.batching.packing import pack
from flowgrpo.learner.diagnostics import DiagnosticsSettings
from flowgrpo.learner.state import LearnerState, adamw, init_learner
from flowgrpo.learner.update import UpdateSettings, make_score, make_update
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.parallel import sharding
from flowgrpo.parallel.row_sharding import place_on_devices, replicate
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, significant, timed
from flowgrpo.types import Batch, Trajectory, Turn

from .measuring import print_result

SIZES: dict[str, Any] = {"v": 128, "d": 64, "h": 4, "k": 2, "e": 16, "f": 128, "init_scale": 0.1}
CONFIG = DecoderConfig(**SIZES, windows=(None, 12), ropes=(Rope(),) * 2, qkv_bias=True, qk_norm=True)
POLICY, AXES = make_policy(CONFIG), sharding.decoder_axes(CONFIG)
ALGORITHM, OPTIMIZER = flow_grpo(beta=0.05), adamw(1e-3)
ROWS, MICRO_ROWS = 32, 4
# Batches hold what no policy sampled: no warning about the sampler.
SETTINGS = UpdateSettings(micro_rows=MICRO_ROWS, diagnostics=DiagnosticsSettings(warns=False))
WAYS = ("whole", "pmap", "data=8", "fsdp=8", "data=2,tensor=4", "data=2,fsdp=2,tensor=2")
Result = tuple[Any, float, int]  # parameters, seconds per update, bytes of state on a device


def start_state() -> LearnerState:
    """State before the first update."""
    return init_learner(POLICY.init(jax.random.key(0)), OPTIMIZER)


def fixed_batches(params, count: int) -> list[Batch]:
    """Packed trajectories of random tokens, with log-probabilities near those of the parameters; on the host."""
    score, rng = jax.jit(make_score(POLICY)), np.random.default_rng(0)
    return [_with_logp(_packed(rng), score, params, rng) for _ in range(count)]


def _packed(rng: np.random.Generator) -> Batch:
    records = [
        Trajectory([_turn(rng) for _ in range(rng.integers(1, 4))], float(rng.integers(2)), index // 4)
        for index in range(96)
    ]
    trajectories = collate(records)
    adv, weights = (np.asarray(part(trajectories)) for part in (ALGORITHM.advantages, ALGORITHM.weights))
    return pack(trajectories, adv, weights, row_length=64, rows=ROWS)


def _turn(rng: np.random.Generator) -> Turn:
    size = int(rng.integers(4, 16))
    chosen = np.arange(size) >= rng.integers(1, size - 1)
    return Turn(rng.integers(1, CONFIG.v, size).astype(np.int32), chosen, np.zeros(size, np.float32))


def _with_logp(batch: Batch, score, params, rng: np.random.Generator) -> Batch:
    logp_rs = np.asarray(score(params, batch).logp)
    near, reference = (logp_rs + rng.normal(0, 0.15, logp_rs.shape).astype(np.float32) for _ in range(2))
    return batch.replace(logp_sampled=near, logp_ref=reference)


def on_one(batches: Sequence[Batch], *, micro_rows: int = MICRO_ROWS) -> Result:
    """Updates on one device of this process."""
    update = jax.jit(make_update(POLICY, ALGORITHM, OPTIMIZER, replace(SETTINGS, micro_rows=micro_rows)))
    state, seconds = _run(update, start_state(), batches)
    return jax.device_get(state.params), seconds, _held(state)


def _by_pmap(batches: Sequence[Batch]) -> Result:
    """Updates by `jax.pmap` over all devices."""
    make = partial(make_update, algorithm=ALGORITHM, optimizer=OPTIMIZER, settings=SETTINGS)
    update = sharding.pmap_update(make, POLICY)
    states, seconds = _run(update, sharding.repeat_tree(start_state(), jax.device_count()), batches)
    return jax.tree.map(lambda x: np.asarray(x[0]), states.params), seconds, _held(states)


def on_mesh(batches: Sequence[Batch], sizes: str) -> Result:
    """Updates by `jax.jit` over a mesh of all devices of all processes."""
    mesh = sharding.make_mesh(sharding.parse_mesh(sizes))
    policy, state = sharding.shard_policy(POLICY, mesh, AXES), start_state()
    shardings = sharding.state_shardings(state, mesh, AXES)
    update = sharding.jit_update(make_update(policy, ALGORITHM, OPTIMIZER, SETTINGS), shardings)
    state, seconds = _run(update, place_on_devices(state, shardings), batches)
    return jax.tree.map(np.asarray, replicate(state.params, mesh)), seconds, _held(state)


def _run_as(way: str, batches: Sequence[Batch]) -> Result:
    """Updates by one of `WAYS` or another mesh."""
    if way == "whole":
        return on_one(batches, micro_rows=ROWS)
    return _by_pmap(batches) if way == "pmap" else on_mesh(batches, way)


def _run(update: Callable, state, batches: Sequence[Batch]) -> tuple[Any, float]:
    """Final state, and seconds of the fastest update."""
    times = []
    for batch in batches:
        duration, (state, _) = timed(lambda state=state, batch=batch: update(state, batch))
        times.append(duration)
    return state, min(times)


def _held(state) -> int:
    """Bytes of a state on the first device of this process."""
    first = jax.local_devices()[0]
    shards = [shard for x in jax.tree.leaves(state) for shard in x.addressable_shards if shard.device == first]
    return sum(shard.data.nbytes for shard in shards)


def relative_distance(params, expected, start) -> float:
    """Distance of parameters from the expected ones, relative to the distance of these from the start."""
    distance, moved = (optax.tree.norm(jax.tree.map(np.subtract, expected, other)) for other in (params, start))
    return float(distance / moved)


def main() -> None:
    """Run every way, print the table and one JSON line."""
    if _COORDINATOR.value is not None:
        launch.join(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    start_params = jax.device_get(start_state().params)
    batches = fixed_batches(start_params, _UPDATES.value)
    expected, seconds, state_bytes = on_one(batches)
    rows = [_line("one device", 0.0, seconds, state_bytes)]
    for name in with_progress("mesh", _MESHES.value or WAYS):
        name = name.replace("/", ",").replace(":", "=")
        params, seconds, state_bytes = _run_as(name, batches)
        rows.append(_line(name, relative_distance(params, expected, start_params), seconds, state_bytes))
    show_lines(rows)
    print_result("meshes", devices=jax.device_count(), updates=_UPDATES.value, rows=rows)


def _line(name: str, distance: float, seconds: float, state_bytes: int) -> dict[str, Any]:
    return {
        "mesh": name,
        "apart": significant(distance),
        "seconds": round(seconds, 4),
        "state_kb": round(state_bytes / 1e3),
    }


if __name__ == "__main__":
    app.run(main, cpu_devices=8)
