"""Rates of products and copies; decode, prefill and update of a published shape against them, and their memory.

    ideal milliseconds of a decode step = (bytes of the parameters + filled bytes of the cache) / measured bandwidth
    MFU of an update                    = operations by formula / seconds / measured rate of bfloat16 products

The peak of a program is what the device says that it held at most, against what was there before plus what the compiler
says that the program takes beside its arguments.
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
from flowgrpo.generate.sampler import Rows, decode, prefill, sampling, start_rows
from flowgrpo.learner.state import init_learner, make_optimizer
from flowgrpo.learner.update import make_update
from flowgrpo.models.attention_kernels import best
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import make_policy
from flowgrpo.planning.cost_model import count_parameters, forward_flops
from flowgrpo.planning.mesh_search import GIB
from flowgrpo.recipes.device_checks.attentions import AttentionCase, attentions
from flowgrpo.recipes.device_checks.bench import HALF, Bench, memory_of
from flowgrpo.recipes.device_checks.figures import ERROR, CheckLine, between, skipped, tell
from flowgrpo.report.tables import seconds, timed
from flowgrpo.types import first_line

NUMBERS = {"bfloat16": jnp.bfloat16, "float32, default": jnp.float32, "float32, highest": jnp.float32}
HELD = 20  # bytes of a parameter that is updated: float32 masters, two moments, two gradients
MOST_ON_CPU = 1024
NEAR = (0.9, 1.1)  # of the compiler's memory


class MeasuredRates(NamedTuple):
    """Highest measured rates of the device."""

    flops: dict[str, float]  # a second, by kind of product
    bandwidth: float  # bytes a second, read and written


@cache
def measure_rates(bench: Bench) -> MeasuredRates:
    """Products of square matrices, and one large array scaled in place; the best of several runs."""
    size, flops = product_size(bench), {}
    for name, dtype in NUMBERS.items():
        a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in range(2))
        with jax.default_matmul_precision("highest" if "highest" in name else "default"):
            product = jax.jit(jnp.matmul)
            flops[name] = 2 * size**3 / min(seconds(partial(product, a, b)) for _ in range(5))
    scale, took, x = jax.jit(lambda x: x * 0.5, donate_argnums=0), [], jnp.ones(bench.sizes.copied // 4, jnp.float32)
    for _ in range(6):
        clock, x = timed(partial(scale, x))
        took.append(clock)
    return MeasuredRates(flops, 2 * bench.sizes.copied / min(took))


def product_size(bench: Bench) -> int:
    """The width of the matrices; smaller on a CPU, which would take minutes."""
    return min(bench.sizes.product, MOST_ON_CPU) if bench.device.platform == "cpu" else bench.sizes.product


def check_rates(bench: Bench) -> list[CheckLine]:
    """Report the ceilings of this machine."""
    rates = measure_rates(bench)
    lines = [tell(f"product of {product_size(bench)}, {name}", x / 1e12, "TFLOP/s") for name, x in rates.flops.items()]
    return [*lines, tell("memory, read and written", rates.bandwidth / 1e9, "GB/s")]


class TimedRun(NamedTuple):
    """One program, compiled and run: seconds of compiling and of its fastest run, and its memory."""

    compiling: float
    running: float
    memory: CheckLine


def _measure(bench: Bench, name: str, program: Any, make: Callable[[], tuple], runs: int = 3) -> TimedRun:
    """Compile a program ahead and run it, each time on arguments made anew, some of which are donated."""
    arguments = make()
    compiling, compiled = timed(lambda: program.lower(*arguments).compile())
    before = memory_of(bench.device)
    took = [seconds(partial(compiled, *arguments))]
    line = _hold_peak(name, before, memory_of(bench.device), compiled.memory_analysis())
    del arguments
    took += [seconds(partial(compiled, *make())) for _ in range(runs - 1)]
    return TimedRun(compiling, min(took), line)


def _hold_peak(name: str, before: dict[str, int], after: dict[str, int], analysis: Any) -> CheckLine:
    """Hold the peak of a program against the compiler's account of it."""
    what = f"peak of {name}, measured / planned"
    if "peak_bytes_in_use" not in after or analysis is None:
        return skipped(what, "The device or the compiler keeps no account of memory, as CPUs do not.")
    beside = analysis.output_size_in_bytes - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    planned, peak = before["bytes_in_use"] + beside, after["peak_bytes_in_use"]
    words = f"planned {planned / GIB:.3f} GiB, of which {analysis.temp_size_in_bytes / GIB:.3f} are temporary"
    if peak <= before["peak_bytes_in_use"]:
        return skipped(what, f"More was held before ({peak / GIB:.3f} GiB; {words}): check this program alone.")
    advice = f"The plan of memory is off ({words}, measured {peak / GIB:.3f}): leave more room than plan says."
    return between(what, peak / planned, *NEAR, advice)


# Decoding ---------------------------------------------------------------------------------------------


def _half_policy(bench: Bench) -> Policy:
    """The policy of the speeds in bfloat16, with the attention of the platform."""
    return make_policy(bench.shape, dtype=jnp.bfloat16, attend=best(bench.device.platform))


def _half_params(config: DecoderConfig) -> Params:
    return jax.jit(make_policy(config, dtype=jnp.bfloat16).init)(jax.random.key(0))


def _filled_rows(policy: Any, slots: int, context: int) -> Rows:
    """Slots that are filled to a half, and go on from there; what is in them does not change the speed."""
    assert policy.make_cache is not None
    cache, half = policy.make_cache(slots, context), context // 2
    place = jnp.broadcast_to(jnp.arange(cache.positions.shape[1]), cache.positions.shape)
    next_r = jnp.full(slots, half, jnp.int32)
    cache = cache.replace(positions=place, segments=(place < half).astype(jnp.int32), next=next_r)
    keys, tokens = jax.random.split(jax.random.key(1), slots), jnp.ones(slots, jnp.int32)
    return start_rows(cache, tokens, keys, jnp.full(slots, context))


def check_decode(bench: Bench) -> list[CheckLine]:
    """Measure a decode step of slots that are filled to a half, in bfloat16, and a prefill of that length."""
    config, sizes, rates = bench.shape, bench.sizes, measure_rates(bench)
    policy, params = _half_policy(bench), _half_params(config)
    begin = jax.jit(partial(_filled_rows, policy, sizes.slots, sizes.context))
    settings, no_stops = sampling(sizes.slots), jnp.full((sizes.slots, 1), -1)
    work = jax.jit(partial(decode, policy, steps=sizes.steps), donate_argnums=1)
    found = _measure(bench, "decode", work, lambda: (params, begin(), settings, no_stops))
    step = found.running / sizes.steps
    ideal = half_step_bytes(config, sizes.slots, sizes.context / 2 + sizes.steps / 2) / rates.bandwidth
    return [
        tell(f"{bench.model}, {sizes.slots} slots, a step", 1e3 * step, "ms"),
        tell("ideal step by bytes", 1e3 * ideal, "ms"),
        tell("step over ideal", step / ideal, "times"),
        tell("decode", sizes.slots / step, "tokens/s"),
        tell("decode, compiling", found.compiling, "s"),
        found.memory,
        *_check_prefill(bench, params),
    ]


def half_step_bytes(config: DecoderConfig, slots: int, seen: float) -> float:
    """Bytes that a decode step in bfloat16 must read: all weights, and the filled part of the cache."""
    weights = count_parameters(config) - (0 if config.tied else config.v * config.d)
    return 2.0 * (weights + 2.0 * config.num_layers * config.k * config.e * seen * slots)


def _check_prefill(bench: Bench, params: Params) -> list[CheckLine]:
    config, sizes, length = bench.shape, bench.sizes, bench.sizes.context // 2
    policy = _half_policy(bench)
    assert policy.make_cache is not None
    empty = jax.jit(partial(policy.make_cache, sizes.slots, sizes.context))
    tokens, real = np.ones((sizes.slots, length), np.int32), np.ones((sizes.slots, length), bool)
    work = jax.jit(partial(prefill, policy), donate_argnums=1)
    found = _measure(bench, "prefill", work, lambda: (params, empty(), tokens, real))
    unembedded = 2.0 * tokens.size * config.v * config.d  # which a prefill does not do
    flops = forward_flops(config, tokens.size, length / 2) - unembedded
    return [
        tell("prefill", tokens.size / found.running, "tokens/s"),
        tell("prefill, MFU", flops / found.running / measure_rates(bench).flops["bfloat16"]),
        tell("prefill, compiling", found.compiling, "s"),
        found.memory,
    ]


# Updating ---------------------------------------------------------------------------------------------


def check_training(bench: Bench) -> list[CheckLine]:
    """Measure an update that computes in bfloat16 with float32 masters and remat, by each attention."""
    config, limit = bench.shape, memory_of(bench.device).get("bytes_limit")
    if limit is not None and HELD * count_parameters(config) > limit:
        why = f"Masters, moments and gradients of {bench.model} take more than this device has: --model=a smaller one."
        return [skipped("update", why)]
    lines = []
    for name, case in attentions(bench.device.platform).items():
        if case.form is HALF:
            try:
                lines += _measure_update(bench, config, name, case)
            except Exception as error:  # one that needs too much memory leaves the others to be measured
                advice = f"{first_line(error)[:300]}."
                lines.append(CheckLine(f"update, {name}", ERROR, type(error).__name__, advice=advice))
    return lines


def _measure_update(bench: Bench, config: DecoderConfig, name: str, case: AttentionCase) -> list[CheckLine]:
    sizes, rates, optimizer = bench.sizes, measure_rates(bench), make_optimizer(learning_rate=1e-6)
    policy = make_policy(config, remat=True, attend=case.attend)
    batch = jax.device_put(full_batch(config.v, sizes.update_rows, sizes.update_length), bench.device)
    micro_rows = max(1, sizes.update_rows // 4)
    update = make_update(policy, flow_grpo(beta=0.0), optimizer, micro_rows=micro_rows, compute_dtype=jnp.bfloat16)
    begin = jax.jit(lambda key: init_learner(policy.init(key), optimizer))
    found = _measure(bench, f"update, {name}", jax.jit(update, donate_argnums=0), lambda: (begin(_key()), batch))
    tokens = sizes.update_rows * sizes.update_length
    flops = 3.0 * forward_flops(config, tokens, sizes.update_length / 2)
    return [
        tell(f"update, {name}", tokens / found.running, "tokens/s"),
        tell(f"update, {name}: seconds", found.running, "s"),
        tell(f"update, {name}: MFU", flops / found.running / rates.flops["bfloat16"]),
        tell(f"update, {name}: compiling", found.compiling, "s"),
        found.memory,
    ]


def _key() -> jax.Array:
    return jax.random.key(0)
