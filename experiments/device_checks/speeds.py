"""Rates of products and copies; speed and memory of decode, prefill and update of a published shape.

    ideal milliseconds of a decode step = (bytes of the parameters + filled bytes of the cache) / measured bandwidth
    MFU of an update                    = operations by formula / seconds / measured rate of bfloat16 products

The peak memory of a program, as the device reports it, is compared with the memory in use before plus what the compiler
plans to allocate besides its arguments.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.algorithms.policy_gradient import flow_grpo
from flowgrpo.batching.layouts import full_batch
from flowgrpo.contracts import Params, Policy
from flowgrpo.generate.sampler import DecodeState, decode, make_sampling, prefill, start_rows
from flowgrpo.learner.state import adamw, init_learner
from flowgrpo.learner.update import UpdateSettings, make_update
from flowgrpo.models.attention_kernels import best_kernel
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import make_policy
from flowgrpo.planning.cost_model import count_parameters, forward_flops
from flowgrpo.planning.mesh_search import GIB
from flowgrpo.report.tables import seconds, timed
from flowgrpo.types import first_line

from .attentions import AttentionCase, attentions
from .bench import HALF, Bench, memory_of
from .figures import ERROR, CheckLine, between, measured, skipped

PRODUCT_DTYPES = {"bfloat16": jnp.bfloat16, "float32, default": jnp.float32, "float32, highest": jnp.float32}
BYTES_PER_PARAMETER = 20  # of an update: float32 masters, two moments, two gradients
MAX_CPU_WIDTH = 1024
PEAK_BOUNDS = (0.9, 1.1)  # measured peak / planned peak


class MeasuredRates(NamedTuple):
    """Highest measured rates of the device."""

    flops: dict[str, float]  # operations per second, by kind of product
    bandwidth: float  # bytes per second, read and written


@cache
def measure_rates(bench: Bench) -> MeasuredRates:
    """Rates of square matrix products and of scaling one large array in place; the best of several runs."""
    size, flops = product_size(bench), {}
    for name, dtype in PRODUCT_DTYPES.items():
        a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in range(2))
        with jax.default_matmul_precision("highest" if "highest" in name else "default"):
            product = jax.jit(jnp.matmul)
            flops[name] = 2 * size**3 / min(seconds(partial(product, a, b)) for _ in range(5))
    scale, durations, x = (
        jax.jit(lambda x: x * 0.5, donate_argnums=0),
        [],
        jnp.ones(bench.sizes.copied // 4, jnp.float32),
    )
    for _ in range(6):
        duration, x = timed(partial(scale, x))
        durations.append(duration)
    return MeasuredRates(flops, 2 * bench.sizes.copied / min(durations))


def product_size(bench: Bench) -> int:
    """Width of the matrices; smaller on a CPU, which would take minutes."""
    return min(bench.sizes.product, MAX_CPU_WIDTH) if bench.device.platform == "cpu" else bench.sizes.product


def check_rates(bench: Bench) -> list[CheckLine]:
    """Report the peak rates of this machine."""
    rates = measure_rates(bench)
    lines = [
        measured(f"product of {product_size(bench)}, {name}", x / 1e12, "TFLOP/s") for name, x in rates.flops.items()
    ]
    return [*lines, measured("memory, read and written", rates.bandwidth / 1e9, "GB/s")]


class TimedRun(NamedTuple):
    """Time and memory of one program."""

    compiling: float  # seconds
    running: float  # seconds of the fastest run
    memory: CheckLine


def _measure(bench: Bench, name: str, program: Any, make: Callable[[], tuple], runs: int = 3) -> TimedRun:
    """Compile a program and run it `runs` times, each time on new arguments, since some are donated."""
    arguments = make()
    compiling, compiled = timed(lambda: program.lower(*arguments).compile())
    before = memory_of(bench.device)
    durations = [seconds(partial(compiled, *arguments))]
    line = _check_peak(name, before, memory_of(bench.device), compiled.memory_analysis())
    del arguments
    durations += [seconds(partial(compiled, *make())) for _ in range(runs - 1)]
    return TimedRun(compiling, min(durations), line)


def _check_peak(name: str, before: dict[str, int], after: dict[str, int], analysis: Any) -> CheckLine:
    """Compare the peak memory of a program with the compiler's plan."""
    name_of_figure = f"peak of {name}, measured / planned"
    if "peak_bytes_in_use" not in after or analysis is None:
        return skipped(name_of_figure, "The device or the compiler reports no memory, as on CPUs.")
    allocated = analysis.output_size_in_bytes - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    planned, peak = before["bytes_in_use"] + allocated, after["peak_bytes_in_use"]
    plan = f"planned {planned / GIB:.3f} GiB, of which {analysis.temp_size_in_bytes / GIB:.3f} are temporary"
    if peak <= before["peak_bytes_in_use"]:
        return skipped(
            name_of_figure, f"An earlier peak was higher ({peak / GIB:.3f} GiB; {plan}): check this program alone."
        )
    advice = f"The plan of memory is off ({plan}, measured {peak / GIB:.3f}): leave more room than plan says."
    return between(name_of_figure, peak / planned, *PEAK_BOUNDS, advice)


# Decoding ---------------------------------------------------------------------------------------------


def _half_policy(bench: Bench) -> Policy:
    """The measured policy in bfloat16, with the attention of the platform."""
    return make_policy(bench.shape, dtype=jnp.bfloat16, attend=best_kernel(bench.device.platform))


def _half_params(config: DecoderConfig) -> Params:
    return jax.jit(make_policy(config, dtype=jnp.bfloat16).init)(jax.random.key(0))


def _filled_rows(policy: Any, slots: int, context: int) -> DecodeState:
    """Half-filled slots, ready to decode; their content doesn't change the speed."""
    assert policy.make_cache is not None
    cache, half = policy.make_cache(slots, context), context // 2
    position = jnp.broadcast_to(jnp.arange(cache.positions.shape[1]), cache.positions.shape)
    next_r = jnp.full(slots, half, jnp.int32)
    cache = cache.replace(positions=position, segments=(position < half).astype(jnp.int32), next=next_r)
    keys, tokens = jax.random.split(jax.random.key(1), slots), jnp.ones(slots, jnp.int32)
    return start_rows(cache, tokens, keys, jnp.full(slots, context))


def check_decode(bench: Bench) -> list[CheckLine]:
    """Measure a decode step of half-filled slots in bfloat16, and a prefill of that length."""
    config, sizes, rates = bench.shape, bench.sizes, measure_rates(bench)
    policy, params = _half_policy(bench), _half_params(config)
    make_state = jax.jit(partial(_filled_rows, policy, sizes.slots, sizes.context))
    settings, no_stops = make_sampling(sizes.slots), jnp.full((sizes.slots, 1), -1)
    program = jax.jit(partial(decode, policy, steps=sizes.steps), donate_argnums=1)
    run = _measure(bench, "decode", program, lambda: (params, make_state(), settings, no_stops))
    step = run.running / sizes.steps
    ideal = half_step_bytes(config, sizes.slots, sizes.context / 2 + sizes.steps / 2) / rates.bandwidth
    return [
        measured(f"{bench.model}, {sizes.slots} slots, a step", 1e3 * step, "ms"),
        measured("ideal step by bytes", 1e3 * ideal, "ms"),
        measured("step over ideal", step / ideal, "times"),
        measured("decode", sizes.slots / step, "tokens/s"),
        measured("decode, compiling", run.compiling, "s"),
        run.memory,
        *_check_prefill(bench, params),
    ]


def half_step_bytes(config: DecoderConfig, slots: int, context: float) -> float:
    """Bytes that a decode step in bfloat16 must read: all weights, and `context` tokens of the cache per slot."""
    weights = count_parameters(config) - (0 if config.tied else config.v * config.d)
    return 2.0 * (weights + 2.0 * config.num_layers * config.k * config.e * context * slots)


def _check_prefill(bench: Bench, params: Params) -> list[CheckLine]:
    config, sizes, length = bench.shape, bench.sizes, bench.sizes.context // 2
    policy = _half_policy(bench)
    assert policy.make_cache is not None
    make_cache = jax.jit(partial(policy.make_cache, sizes.slots, sizes.context))
    tokens, real = np.ones((sizes.slots, length), np.int32), np.ones((sizes.slots, length), bool)
    program = jax.jit(partial(prefill, policy), donate_argnums=1)
    run = _measure(bench, "prefill", program, lambda: (params, make_cache(), tokens, real))
    unembedded = 2.0 * tokens.size * config.v * config.d  # prefill computes no logits
    flops = forward_flops(config, tokens.size, length / 2) - unembedded
    return [
        measured("prefill", tokens.size / run.running, "tokens/s"),
        measured("prefill, MFU", flops / run.running / measure_rates(bench).flops["bfloat16"]),
        measured("prefill, compiling", run.compiling, "s"),
        run.memory,
    ]


# Updating ---------------------------------------------------------------------------------------------


def check_training(bench: Bench) -> list[CheckLine]:
    """Measure an update in bfloat16 with float32 masters and remat, for each attention."""
    config, limit = bench.shape, memory_of(bench.device).get("bytes_limit")
    if limit is not None and BYTES_PER_PARAMETER * count_parameters(config) > limit:
        advice = (
            f"Masters, moments and gradients of {bench.model} take more than this device has: --model=a smaller one."
        )
        return [skipped("update", advice)]
    lines = []
    for name, case in attentions(bench.device.platform).items():
        if case.form is HALF:
            try:
                lines += _measure_update(bench, config, name, case)
            except Exception as error:  # an attention that needs too much memory doesn't stop the others
                advice = f"{first_line(error)[:300]}."
                lines.append(CheckLine(f"update, {name}", ERROR, type(error).__name__, advice=advice))
    return lines


def _measure_update(bench: Bench, config: DecoderConfig, name: str, case: AttentionCase) -> list[CheckLine]:
    sizes, rates, optimizer = bench.sizes, measure_rates(bench), adamw(1e-6)
    policy = make_policy(config, remat=True, attend=case.attend)
    batch = jax.device_put(full_batch(config.v, sizes.update_rows, sizes.update_length), bench.device)
    micro_rows = max(1, sizes.update_rows // 4)
    update = make_update(
        policy, flow_grpo(beta=0.0), optimizer, UpdateSettings(micro_rows=micro_rows, compute_dtype=jnp.bfloat16)
    )
    make_state = jax.jit(lambda key: init_learner(policy.init(key), optimizer))
    run = _measure(bench, f"update, {name}", jax.jit(update, donate_argnums=0), lambda: (make_state(_key()), batch))
    tokens = sizes.update_rows * sizes.update_length
    flops = 3.0 * forward_flops(config, tokens, sizes.update_length / 2)
    return [
        measured(f"update, {name}", tokens / run.running, "tokens/s"),
        measured(f"update, {name}: seconds", run.running, "s"),
        measured(f"update, {name}: MFU", flops / run.running / rates.flops["bfloat16"]),
        measured(f"update, {name}: compiling", run.compiling, "s"),
        run.memory,
    ]


def _key() -> jax.Array:
    return jax.random.key(0)
