"""The whole update against what the machine can do: speed, memory, how both grow, and PyTorch on the same work.

    python -m experiments.benchmarks.update
    python -m experiments.benchmarks.update --parts=speed --models=medium --lengths=96,384
    python -m experiments.benchmarks.update --parts=speed --cpu_devices=2
    python -m experiments.benchmarks.update --parts=torch                      (needs the extra [oracle])

All features are on: clip, entropy and the other figures that an update tells, the norm of the gradient and its clip, an
AdamW step. `speed`: the share of the matrix-product rate by model and row length; plain, with layers in a loop, with
layers computed again (`remat`), and with a reference that is scored first and a KL term (`kl`). Three times the work
of a forward pass is counted, four times with a reference, and what is computed again is not. `memory`: what the
compiler says that an update needs, against parameters, gradients, optimizer and activations by formula, and against
what a process was seen to hold (see `resident`). `growth`: seconds by rows, by row length, and by the turns of a
trajectory whose contexts append or are rendered afresh. `torch`: the same rows by PyTorch (see `torch_update`), in turn
with ours.

The rate is that of a matrix product that runs in turn with the updates, one on every device, so that other work on the
machine slows both. `share` is by the clock; `work` is the same by the processor time of all threads, which leaves out
what is lost where only one of them works, and is steady on a busy machine. With `--cpu_devices=2` rows are dealt over
devices of one thread each. Medians of several runs.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

import flowgrpo as fg
from experiments import common
from experiments.benchmarks import torch_update
from experiments.benchmarks.measured import medians, show_columns, show_lines, significant, timed
from experiments.benchmarks.rows import PROTOTYPE, SHAPES, full_batch, shape_called
from experiments.headings import heading
from flowgrpo.envs.env import PAD
from flowgrpo.learner.floor import count_parameters, forward_flops
from flowgrpo.learner.optimizers import make_optimizer
from flowgrpo.learner.state import init_learner
from flowgrpo.learner.update import make_update
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import make_policy
from flowgrpo.report.progress import counted
from flowgrpo.spread import DEALT, data_mesh, share
from flowgrpo.types import BadInput, Batch

PARTS = ("speed", "memory", "growth", "torch")
FORMS: dict[str, dict[str, bool]] = {  # of the update
    "plain": {},
    "looped": {"unroll": False},
    "remat": {"remat": True},
    "kl": {"kl": True},
}

heading("What is run")
_PARTS = flags.DEFINE_list("parts", list(PARTS[:-1]), f"Any of {', '.join(PARTS)}.")
_MODELS = flags.DEFINE_list("models", list(SHAPES), "Models of `speed`, `memory` and `torch`.")
_FORMS = flags.DEFINE_list("forms", list(FORMS), "Forms of the update in `speed`.")
heading("Sizes")
_ROWS = flags.DEFINE_integer("rows", 64, "Rows of a batch.", lower_bound=1)
_LENGTHS = flags.DEFINE_list("lengths", ["96"], "Tokens of a row, one batch each.")
_MICRO = flags.DEFINE_integer("micro_rows", 16, "Rows that are scored together.", lower_bound=1)
_GROWTH = flags.DEFINE_string("growth_model", "small", "Model of `growth`.")
_TURNS = flags.DEFINE_list("turns", ["1", "2", "4", "8"], "Turns of a trajectory in `growth`.")
_TURN = flags.DEFINE_integer("turn_tokens", 24, "Tokens that a turn adds in `growth`.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of which the median counts.", lower_bound=1)

RATE = 1e-4  # of learning
SIZE, TIMES = 1024, 16  # of the matrices whose product is the measure, and how often it is taken in a run


class Took(NamedTuple):
    """Seconds of one run."""

    clock: float
    processor: float  # of all threads


class Work(NamedTuple):
    """A program to be timed, and the operations that it is counted for."""

    run: Callable[[], Any]
    flops: float


# Updates ----------------------------------------------------------------------------------------------


def make_work(
    config: DecoderConfig, params: Any, batch: Batch, *, unroll: bool = True, remat: bool = False, kl: bool = False
) -> Work:
    """One form of the update on a batch; it keeps its state, so that each run does the same."""
    policy, optimizer = make_policy(config, unroll=unroll, remat=remat), make_optimizer(learning_rate=RATE)
    algorithm = fg.flow_grpo(beta=0.04 if kl else 0.0)
    mesh, settings = data_mesh(), {"banned": (PAD,), "micro_rows": _MICRO.value}
    update = jax.jit(make_update(policy, algorithm, optimizer, mesh=mesh, **settings))
    state, batch = share(init_learner(params, optimizer), mesh), share(batch, mesh)
    forward = forward_flops(config, batch.tokens.size, mean_seen(batch))
    return Work(partial(update, state, batch, state.params if kl else None), (4 if kl else 3) * forward)


def mean_seen(batch: Batch) -> float:
    """How many tokens a token of full rows attends to in the mean."""
    return float(np.mean(np.asarray(batch.positions) + 1))


def product() -> Work:
    """Make the work that everything is measured by: a product on every device, taken `TIMES` times in a run."""
    mesh, each = data_mesh(), (jax.device_count(), SIZE, SIZE)
    a, b = (jax.random.normal(jax.random.key(seed), each) for seed in range(2))
    multiply: Callable[..., jax.Array] = _multiply
    if mesh is not None:
        multiply = jax.shard_map(_multiply, mesh=mesh, in_specs=DEALT, out_specs=DEALT)
    return Work(partial(_repeat, jax.jit(multiply), a, b), TIMES * 2.0 * SIZE**3 * len(a))


def _repeat(multiply: Callable[..., jax.Array], a: jax.Array, b: jax.Array) -> list[jax.Array]:
    return [multiply(a, b) for _ in range(TIMES)]


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a[0] @ b[0])[None]


def in_turn(works: dict[str, Work]) -> dict[str, Took]:
    """Median seconds of each, by the clock and of the processor; they run one after the other again and again."""
    rows = [{name: clocks(work.run) for name, work in works.items()} for _ in range(1 + _REPEATS.value)]
    clock, processor = (medians({name: took[side] for name, took in row.items()} for row in rows) for side in range(2))
    return {name: Took(clock[name], processor[name]) for name in works}


def clocks(run: Callable[[], Any]) -> Took:
    """Seconds of one run."""
    before = time.process_time()
    took, _ = timed(run)
    return Took(took, time.process_time() - before)


def shares(works: dict[str, Work], took: dict[str, Took]) -> dict[str, dict[str, Any]]:
    """Of each work the seconds and its shares of the rate of the product, which is among the works."""
    product, own = took["product"], works["product"].flops
    lines = {}
    for name, work in works.items():
        asked = work.flops / own
        by_clock, by_processor = (asked * a / b for a, b in zip(product, took[name], strict=True))
        shares = {"share": significant(by_clock), "work": significant(by_processor)}
        lines[name] = {"s": round(took[name].clock, 4)} | shares
    return lines


def start_params(config: DecoderConfig) -> Any:
    """Random parameters."""
    return jax.jit(make_policy(config).init)(jax.random.key(0))


# Speed ------------------------------------------------------------------------------------------------


def measure_speed(name: str, length: int) -> dict[str, Any]:
    """Seconds of each form, and its share of the matrix-product rate."""
    config = shape_called(name)
    params, batch = start_params(config), full_batch(config, _ROWS.value, length)
    works = {form: make_work(config, params, batch, **FORMS[form]) for form in _FORMS.value} | {"product": product()}
    took = in_turn(works)
    result: dict[str, Any] = {"model": name, "params": count_parameters(config), "rows": _ROWS.value, "length": length}
    result["gflops"] = round(works["product"].flops / took["product"].clock / 1e9, 1)
    for form, line in shares(works, took).items():
        result |= {f"{form}_{what}": value for what, value in line.items()} if form in FORMS else {}
    return result


# Memory -----------------------------------------------------------------------------------------------


def measure_memory(name: str, length: int) -> dict[str, Any]:
    """Measure the memory that an update in a process of its own was expected to hold, and held; MiB."""
    flags_of = [f"--model={name}", f"--rows={_ROWS.value}", f"--length={length}", f"--micro_rows={_MICRO.value}"]
    command = [sys.executable, "-m", "experiments.benchmarks.resident", *flags_of]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadInput(f"memory of {name} can't be measured: {done.stderr.strip().splitlines()[-1]}")
    result = json.loads(done.stdout.splitlines()[-1])
    expected = result["expected_mib"]
    result = {"model": name, "length": length} | {k: v for k, v in result.items() if k not in ("benchmark", "model")}
    return result | {"over_floor": round(expected / result["floor_mib"], 2)}


# Growth -----------------------------------------------------------------------------------------------


def measure_growth() -> list[dict[str, Any]]:
    """Seconds of an update where one size differs, and against the first of its kind."""
    config, length = shape_called(_GROWTH.value), int(_LENGTHS.value[0])
    params, rows = start_params(config), _ROWS.value
    sizes = [("rows", rows * times // 2, length, 1) for times in (1, 2, 4)]
    sizes += [("length", rows, length * times // 2, 1) for times in (1, 2, 4)]
    for turns in map(int, _TURNS.value):
        whole = turns * _TURN.value
        sizes.append((f"{turns} turns, appended", rows, whole, 1))
        # Afresh, turn t is a context of its own with all before it; here they are alike, and as long in the mean.
        sizes.append((f"{turns} turns, afresh", rows, turns * (turns + 1) // 2 * _TURN.value, turns))
    works = {str(size): make_work(config, params, full_batch(config, *size[1:3], segments=size[3])) for size in sizes}
    works["product"] = product()
    lines, found = shares(works, in_turn(works)), []
    for what, count, tokens, segments in sizes:
        line = lines[str((what, count, tokens, segments))]
        speed = round(count * tokens / line["s"])
        found.append({"what": what, "rows": count, "length": tokens, "tokens_per_second": speed} | line)
    return found


# PyTorch ----------------------------------------------------------------------------------------------


def measure_torch(name: str, length: int) -> dict[str, Any]:
    """Both updates of the same rows, in turn."""
    config, source = shape_called(name), SHAPES[name]
    assert source is not None
    batch = full_batch(config, _ROWS.value, length)
    ours = make_work(config, start_params(config), batch)
    theirs = torch_update.make_step(source, batch, micro_rows=_MICRO.value, rate=RATE)
    works = {"ours": ours, "torch": Work(theirs, ours.flops), "product": product()}
    took = in_turn(works)
    result: dict[str, Any] = {"model": name, "length": length}
    for side, line in shares(works, took).items():
        result |= {f"{side}_{what}": value for what, value in line.items()} if side != "product" else {}
    return result | {"torch_over_ours": significant(took["torch"].clock / took["ours"].clock)}


# The command ------------------------------------------------------------------------------------------


def check_flags() -> None:
    """Refuse what is unknown, and lists that aren't numbers, before anything takes time."""
    for flag, known in ((_PARTS, PARTS), (_MODELS, SHAPES), (_FORMS, FORMS)):
        for value in flag.value:
            if value not in known:
                raise BadInput(f"--{flag.name}={','.join(flag.value)} has {value!r}; choose from {', '.join(known)}")
    if _GROWTH.value not in SHAPES:
        raise BadInput(f"--growth_model={_GROWTH.value} is unknown; choose from {', '.join(SHAPES)}")
    for flag in (_LENGTHS, _TURNS):
        if not flag.value or not all(value.isdecimal() and int(value) > 1 - (flag is _TURNS) for value in flag.value):
            raise BadInput(f"--{flag.name}={','.join(flag.value)} must be a comma-separated list of positive integers")
    if "torch" in _PARTS.value:
        torch_update.check_installed()


def measure(part: str) -> list[dict[str, Any]]:
    """The records of one part."""
    sizes = [(name, int(length)) for name in _MODELS.value for length in _LENGTHS.value]
    match part:
        case "speed":
            return [measure_speed(*size) for size in sizes]
        case "memory":
            return [measure_memory(*size) for size in sizes]
        case "growth":
            return measure_growth()
        case _:
            return [measure_torch(*size) for size in sizes if size[0] != PROTOTYPE]


def main() -> None:
    """Measure, print the tables and one JSON line."""
    # PyTorch's threads spin while they wait, which slows shared cores down. It must be said before it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    check_flags()
    result: dict[str, Any] = {"benchmark": "update"}
    for part in counted("part", [part for part in PARTS if part in _PARTS.value]):
        result[part] = measure(part)
        show = show_columns if part in ("speed", "torch") else show_lines
        show(result[part])
    print(json.dumps(result))


if __name__ == "__main__":
    common.run(main)
