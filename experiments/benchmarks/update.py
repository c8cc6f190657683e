"""The whole update against the machine's ceilings: speed, memory, how both grow, and PyTorch on the same work.

    python -m experiments.benchmarks.update
    python -m experiments.benchmarks.update --parts=speed --models=medium --lengths=96,384
    python -m experiments.benchmarks.update --parts=speed --cpu_devices=2
    python -m experiments.benchmarks.update --parts=torch                      (needs the extra [oracle])

All features are on: clip, entropy and the other metrics of an update, gradient norm and its clip, an AdamW step.
`speed`: fraction of the matrix-product rate by model and row length; plain, with layers in a loop, with recomputed
layers (`remat`), with a scored reference and a KL term (`kl`), and of `logprobs` alone (`scores`) and with its backward
pass (`gradient`). Counted operations are those of a forward pass, times three for a gradient, times four with a
reference, without recomputation. `memory`: what the compiler plans for an update, against parameters, gradients,
optimizer and activations by formula, and against the measured growth of a new process (Linux). `growth`: seconds by
rows, by row length, and by the turns of a trajectory whose contexts append or are rendered afresh. `vocabulary`:
temporary bytes of the compiled gradient of `logprobs`, against the formula that makes all [row, token, vocabulary]
logits at once. `torch`: the same rows in PyTorch, in turn with ours, as in TRL: transformers' model, clipped surrogate
and entropy in micro-batches with accumulated gradients, clip of the norm, AdamW.

The rate is that of the fastest of many matrix products that run in turn with the updates, one on every device. `share`
is by wall time; `work` is by the processor time of all threads, which ignores the time when only one of them works, and
is stable on a busy machine. With `--cpu_devices=2` rows are sharded over devices of one thread each. Medians of several
runs.

Measured on two shared cores: `scores` at 0.5 (small) to 0.64 (medium), `gradient` at 0.34 to 0.51; a small model uses
1.07 times the planned memory, and the vocabulary, blockwise attention included, 1/37 of the plain formula.
"""

import ctypes
import gc
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from absl import flags

from ..cli import app
from ..cli.help import flag_heading
from .shapes import LEARNERS

PARTS = ("speed", "memory", "growth", "vocabulary", "torch")
FORMS = ("plain", "looped", "remat", "kl", "scores", "gradient")

flag_heading("Run")
_PARTS = flags.DEFINE_list("parts", list(PARTS[:-1]), f"Any of {', '.join(PARTS)}.")
_MODELS = flags.DEFINE_list("models", list(LEARNERS), "Models of `speed`, `memory` and `torch`.")
_FORMS = flags.DEFINE_list("forms", list(FORMS), "Forms in `speed`; of them plain and remat in `memory`.")
flag_heading("Sizes")
_ROWS = flags.DEFINE_integer("rows", 64, "Rows of a batch.", lower_bound=1)
_LENGTHS = flags.DEFINE_list("lengths", ["96"], "Tokens of a row, one batch each.")
_MICRO = flags.DEFINE_integer("micro_rows", 16, "Rows per forward pass.", lower_bound=1)
_GROWTH = flags.DEFINE_enum("growth_model", "small", list(LEARNERS), "Model of `growth`.")
_TURNS = flags.DEFINE_list("turns", ["1", "2", "4", "8"], "Turns of a trajectory in `growth`.")
_TURN = flags.DEFINE_integer("turn_tokens", 24, "Tokens that a turn adds in `growth`.", lower_bound=2)
_VOCABULARY = flags.DEFINE_integer("vocabulary", 151_936, "Vocabulary of `vocabulary`.", lower_bound=2)
_MEMORY_ROWS = flags.DEFINE_integer("memory_rows", 8, "Rows of `vocabulary`.", lower_bound=1)
_MEMORY_LENGTH = flags.DEFINE_integer("memory_length", 1024, "Tokens of a row of `vocabulary`.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Number of runs; their median is reported.", lower_bound=1)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.algorithms.policy_gradient import flow_grpo
from flowgrpo.batching.layouts import full_batch
from flowgrpo.contracts import Params, Policy
from flowgrpo.envs.env import PAD
from flowgrpo.generate.sampler import logprobs
from flowgrpo.learner.state import adamw, init_learner
from flowgrpo.learner.update import UpdateSettings, make_update
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.parallel.row_sharding import SHARDED_ROWS, data_mesh, replicate
from flowgrpo.planning.cost_model import Workload, count_parameters, forward_flops
from flowgrpo.planning.dry_run import abstract_batch, abstract_state, dry_update, local_bytes, make_case
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import medians, show_columns, show_lines, significant, timed
from flowgrpo.types import BadInput, Batch

from . import measuring
from .ceilings import shape_called
from .racers.torch_generate import random_torch_model

RATE, CLIP = 1e-4, 0.2  # learning rate, and clip of the ratio in PyTorch
SIZE, TIMES = 1024, 16  # width of the reference product, and its runs per round


class TimedProgram(NamedTuple):
    """A program to be timed, and its counted operations."""

    run: Callable[[], Any]
    flops: float


def _total(params: Params, policy: Policy, tokens: jax.Array) -> jax.Array:
    """Sum of all log-probabilities, by `logprobs`."""
    return jnp.sum(jnp.asarray(logprobs(policy, params, tokens).logp))


def _make_work(config: DecoderConfig, batch: Batch, form: str = "plain") -> TimedProgram:
    """One form of the update on a batch, or of its scores; the state isn't updated, so every run does the same."""
    mesh, policy = data_mesh(), make_policy(config, unroll=form != "looped", remat=form == "remat")
    mean_context = float(np.mean(np.asarray(batch.positions) + 1))  # of a token in full rows
    forward = forward_flops(config, batch.tokens.size, mean_context)
    params, batch = replicate(jax.jit(make_policy(config).init)(jax.random.key(0)), mesh), replicate(batch, mesh)
    if form == "scores":
        score = jax.jit(logprobs, static_argnums=0)
        return TimedProgram(lambda: score(policy, params, batch.tokens), forward)
    if form == "gradient":
        value_and_grad = jax.jit(jax.value_and_grad(_total), static_argnums=1)
        return TimedProgram(lambda: value_and_grad(params, policy, batch.tokens), 3 * forward)
    kl, optimizer = form == "kl", adamw(RATE)
    settings = UpdateSettings(banned=(PAD,), micro_rows=_MICRO.value)
    update = jax.jit(make_update(policy._replace(mesh=mesh), flow_grpo(beta=0.04 if kl else 0.0), optimizer, settings))
    state = replicate(init_learner(params, optimizer), mesh)
    return TimedProgram(lambda: update(state, batch, state.params if kl else None), (4 if kl else 3) * forward)


def _product() -> TimedProgram:
    """The reference program: one matrix product on every device."""
    mesh, shape = data_mesh(), (jax.device_count(), SIZE, SIZE)
    a, b = (jax.random.normal(jax.random.key(seed), shape) for seed in range(2))

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return (a[0] @ b[0])[None]

    program = (
        multiply if mesh is None else jax.shard_map(multiply, mesh=mesh, in_specs=SHARDED_ROWS, out_specs=SHARDED_ROWS)
    )
    return TimedProgram(partial(jax.jit(program), a, b), 2.0 * SIZE**3 * len(a))


def _in_turn(programs: Mapping[str, TimedProgram]) -> tuple[dict[str, dict[str, Any]], float]:
    """Run programs and the product in turn -> median seconds and fractions of the product's rate, that rate.

    The rate is that of the fastest product of all rounds, because a ceiling is an undisturbed run.
    """
    product, rows, products = _product(), [], []
    for _ in range(1 + _REPEATS.value):
        rows.append({name: _clocks(program.run) for name, program in programs.items()})
        products += [_clocks(product.run) for _ in range(TIMES)]
    clock, processor = (
        medians({name: duration[side] for name, duration in row.items()} for row in rows) for side in range(2)
    )
    rates = [product.flops / min(duration) for duration in zip(*products, strict=True)]
    lines = {}
    for name, program in programs.items():
        fraction, by_processor = (
            significant(program.flops / duration[name] / rate)
            for duration, rate in zip((clock, processor), rates, strict=True)
        )
        lines[name] = {"s": round(clock[name], 4), "share": fraction, "work": by_processor}
    return lines, rates[0]


def _clocks(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall seconds and processor seconds (all threads) of one run."""
    start = time.process_time()
    duration, _ = timed(run)
    return duration, time.process_time() - start


def _in_columns(lines: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{name}_{what}": value for name, line in lines.items() for what, value in line.items()}


def _measure_speed(name: str, length: int) -> dict[str, Any]:
    """Seconds of each form, and its fraction of the matrix-product rate."""
    config = shape_called(name)
    batch = full_batch(config.v, _ROWS.value, length)
    lines, rate = _in_turn({form: _make_work(config, batch, form) for form in _FORMS.value})
    sizes = {"model": name, "params": count_parameters(config), "rows": _ROWS.value, "length": length}
    return sizes | {"gflops": round(rate / 1e9, 1)} | _in_columns(lines)


def hold_update(name: str, rows: int, length: int, micro_rows: int, remat: bool) -> dict[str, Any]:
    """Compile an update from shapes alone, then run it -> planned MiB, measured MiB, and MiB of the parts.

    Must run in a new process, because memory is returned to the system late.
    """
    config = shape_called(name)
    job = Workload(rows=rows, length=length, micro_rows=micro_rows, prompt=1, remat=remat, dtype="float32")
    case = make_case(config, job, flow_grpo(beta=0.0), adamw(RATE))
    program = dry_update(case)
    update = make_update(
        case.policy, case.algorithm, case.optimizer, UpdateSettings(micro_rows=job.micro_rows, chunk=job.chunk)
    )
    update_program = jax.jit(update, donate_argnums=0).lower(abstract_state(case), abstract_batch(case)).compile()
    start = jax.jit(lambda key: init_learner(case.policy.init(key), case.optimizer)).lower(jax.random.key(0)).compile()
    batch = jax.device_put(full_batch(config.v, rows, length))
    _settle()
    before = measuring.resident_bytes("VmRSS")
    state = jax.block_until_ready(start(jax.random.key(0)))
    _settle()
    for _ in range(2):
        state, _ = jax.block_until_ready(update_program(state, batch))
    measured = measuring.resident_bytes("VmHWM") - before
    expected = program.peak - local_bytes(abstract_batch(case))  # which is in memory before
    figures = {"expected": expected, "held": measured, "floor": sum(program.floor.values()), **program.floor}
    sizes = {f"{part}_mib": round(size / 2**20, 1) for part, size in figures.items()}
    return sizes | {"over": round(measured / expected, 3), "over_floor": round(expected / figures["floor"], 2)}


def _settle() -> None:
    """Return free memory to the system, and reset the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    measuring.reset_peak_memory()


def _measure_memory(name: str, length: int) -> list[dict[str, Any]]:
    """Memory of an update, plain and with recomputed layers."""
    sizes = (name, _ROWS.value, length, _MICRO.value)
    forms = [form for form in ("plain", "remat") if form in _FORMS.value]
    figures = {form: measuring.in_new_process(hold_update, *sizes, form == "remat") for form in forms}
    return [{"model": name, "length": length, "form": form} | line for form, line in figures.items()]


def _measure_growth() -> list[dict[str, Any]]:
    """Seconds of an update as one size varies."""
    config, length, rows = shape_called(_GROWTH.value), measuring.whole_numbers(_LENGTHS)[0], _ROWS.value
    sizes = [("rows", rows * times // 2, length, 1) for times in (1, 2, 4)]
    sizes += [("length", rows, length * times // 2, 1) for times in (1, 2, 4)]
    for turns in measuring.whole_numbers(_TURNS):
        sizes.append((f"{turns} turns, appended", rows, turns * _TURN.value, 1))
        # afresh, turn t is its own context with all earlier turns; here all contexts have the mean length
        sizes.append((f"{turns} turns, afresh", rows, turns * (turns + 1) // 2 * _TURN.value, turns))
    programs = {str(size): _make_work(config, full_batch(config.v, *size[1:3], segments=size[3])) for size in sizes}
    lines, records = _in_turn(programs)[0], []
    for name, count, tokens, segments in sizes:
        line = lines[str((name, count, tokens, segments))]
        speed = round(count * tokens / line["s"])
        records.append({"what": name, "rows": count, "length": tokens, "tokens_per_second": speed} | line)
    return records


def _plain_total(params: Params, policy: Policy, tokens: jax.Array) -> jax.Array:
    """Sum of all log-probabilities by the plain formula, which makes all logits at once."""
    logits, _ = policy.apply(params, tokens)
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)[:, :-1]
    return jnp.sum(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))


def _measure_vocabulary() -> dict[str, Any]:
    """Temporary bytes of both gradients, for a model so narrow that the vocabulary dominates; nothing is run."""
    config = DecoderConfig(v=_VOCABULARY.value, d=32, h=1, k=1, e=32, f=32, windows=(None,), ropes=(Rope(),), tied=True)
    policy = make_policy(config)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((_MEMORY_ROWS.value, _MEMORY_LENGTH.value), jnp.int32)
    sizes = []
    for loss in (_total, _plain_total):
        analysis = jax.jit(jax.grad(loss), static_argnums=1).lower(params, policy, tokens).compile().memory_analysis()
        if analysis is None:
            raise BadInput(f"the backend {jax.default_backend()} does not say how much memory a program takes: use cpu")
        sizes.append(analysis.temp_size_in_bytes)
    ours, plain = sizes
    shape = {"vocabulary": _VOCABULARY.value, "rows": _MEMORY_ROWS.value, "length": _MEMORY_LENGTH.value}
    figures = {"temporary_mib": round(ours / 2**20, 1), "plain_mib": round(plain / 2**20, 1)}
    return shape | figures | {"over_plain": round(ours / plain, 4)}


def _torch_step(source: Mapping[str, Any], batch: Batch) -> Callable[[], float]:
    """Make the function that updates on the batch in PyTorch and returns the loss."""
    import torch

    model = random_torch_model(source, os.cpu_count() or 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    rows = [torch.from_numpy(getattr(batch, name)) for name in ("tokens", "logp_old", "advantage", "weight")]

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in zip(*(x.split(_MICRO.value) for x in rows), strict=True):
            loss = _surrogate(model, *part)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def _surrogate(model: Any, tokens: Any, logp_old: Any, advantage: Any, weight: Any) -> Any:
    """Clipped surrogate of a micro-batch; the entropy is computed as a metric only."""
    import torch

    logps = torch.log_softmax(model(input_ids=tokens.long()).logits[:, :-1], dim=-1)
    with torch.no_grad():
        (logps.exp() * logps).sum(-1).mean()
    logp = logps.gather(-1, tokens[:, 1:].long().unsqueeze(-1)).squeeze(-1)
    ratio, gain = torch.exp(logp - logp_old[:, 1:]), advantage[:, 1:]
    clipped = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    return -(clipped * weight[:, 1:]).sum()


def _measure_torch(name: str, length: int) -> dict[str, Any]:
    """Our update and PyTorch's on the same rows, in turn."""
    config, source = shape_called(name), LEARNERS[name]
    assert source is not None
    batch = full_batch(config.v, _ROWS.value, length)
    ours = _make_work(config, batch)
    lines, _ = _in_turn({"ours": ours, "torch": TimedProgram(_torch_step(source, batch), ours.flops)})
    ratio = significant(lines["ours"]["share"] / lines["torch"]["share"])
    return {"model": name, "length": length, **_in_columns(lines), "torch_over_ours": ratio}


def _check_flags() -> None:
    """Raise `BadInput` for unknown names and bad numbers before anything takes time."""
    for flag, known in ((_PARTS, PARTS), (_MODELS, LEARNERS), (_FORMS, FORMS)):
        measuring.check_known(flag, known)
    measuring.whole_numbers(_TURNS)
    if 1 in measuring.whole_numbers(_LENGTHS):
        raise BadInput("--lengths has a 1: a row needs a sampled token after another one")
    if "torch" in _PARTS.value:
        measuring.check_installed("--parts=torch", "torch")
    if "memory" in _PARTS.value:
        measuring.check_memory_readable()


def _measure(part: str) -> list[dict[str, Any]]:
    """Rows of one part."""
    sizes = [(name, length) for name in _MODELS.value for length in measuring.whole_numbers(_LENGTHS)]
    match part:
        case "speed":
            return [_measure_speed(*size) for size in sizes]
        case "memory":
            return [line for size in sizes for line in _measure_memory(*size)]
        case "growth":
            return _measure_growth()
        case "vocabulary":
            return [_measure_vocabulary()]
        case _:
            return [_measure_torch(*size) for size in sizes if LEARNERS[size[0]] is not None]


def main() -> None:
    """Measure, print the tables and one JSON line."""
    measuring.set_passive_threads()
    _check_flags()
    result: dict[str, list[dict[str, Any]]] = {}
    for part in with_progress("part", [part for part in PARTS if part in _PARTS.value]):
        result[part] = _measure(part)
        show = show_columns if part in ("speed", "torch") else show_lines
        show(result[part])
    measuring.print_result("update", **result)


if __name__ == "__main__":
    app.run(main)
