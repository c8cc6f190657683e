"""Attention by a kernel against the plain formula: error and time, forward and backward.

    python -m experiments.benchmarks.attention                     # the platform's kernel, 4,096 tokens
    python -m experiments.benchmarks.attention --head=128 --heads=28 --window=1024

Rows are packed with random segments and padded at the end. Prints a JSON line for each attention: milliseconds of the
result, and of the result with its gradients, in bfloat16; and their distance from the plain formula in float32,
relative to the largest number. A kernel is right if its distance is at most twice that of the plain formula in
bfloat16. On a CPU there is no kernel, and only the plain formula is timed.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Sizes")
_ROWS = flags.DEFINE_integer("rows", 4, "Rows.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("row_tokens", 4096, "Tokens of a row.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 14, "Heads of queries.", lower_bound=1)
_K_HEADS = flags.DEFINE_integer("k_heads", 2, "Heads of keys.", lower_bound=1)
_HEAD = flags.DEFINE_integer("head", 64, "Dimensions of a head.", lower_bound=1)
_WINDOW = flags.DEFINE_integer("window", None, "Tokens that a query looks back; all by default.", lower_bound=1)
_SEGMENTS = flags.DEFINE_integer("segments", 6, "Segments of a row.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 10, "Number of repetitions; the fastest is reported.", lower_bound=1)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.models.attention import Attend, MaskSpec, attend
from flowgrpo.models.attention_kernels import best_kernel
from flowgrpo.models.config import DecoderConfig, Rope

SHAPE = DecoderConfig(v=2, d=2, h=14, k=2, e=64, f=2, windows=(None,), ropes=(Rope(),))


def packed_rows(config: DecoderConfig, rows: int, tokens: int, segments: int) -> tuple[tuple[Array, ...], MaskSpec]:
    """Queries, keys and values in float32, and the mask of rows of random segments, padded at the end."""
    rng = np.random.default_rng(0)
    arrays = tuple(
        jnp.asarray(rng.normal(size=(rows, heads, tokens, config.e)), jnp.float32)
        for heads in (config.h, config.k, config.k)
    )
    ends = np.sort(rng.integers(1, tokens + 1, (rows, segments)), axis=1)
    index = np.arange(tokens)
    segment = 1 + (index[None, :, None] >= ends[:, None]).sum(axis=-1)
    starts = np.concatenate([np.zeros((rows, 1), int), ends], axis=1)
    position = index[None] - np.take_along_axis(starts, segment - 1, axis=1)
    segment = np.where(segment > segments, 0, segment)
    position, segment = (jnp.asarray(x, jnp.int32) for x in (position, segment))
    window = config.windows[0]
    window = jnp.int32(np.iinfo(np.int32).max if window is None else window)
    return arrays, MaskSpec(position, position, segment, segment, window)


def attention_lines(
    config: DecoderConfig, kernel: Attend, *, rows: int, tokens: int, segments: int, repeats: int
) -> list[dict]:
    """A line for the plain formula and one for a kernel: milliseconds, and distances from float32."""
    arrays, mask = packed_rows(config, rows, tokens, segments)
    half = tuple(x.astype(jnp.bfloat16) for x in arrays)
    with jax.default_matmul_precision("highest"):
        exact = _with_gradients(attend, config)(*(x.astype(jnp.float32) for x in half), mask)
    lines = []
    for name, attention in (
        {"plain": attend, kernel.__name__: kernel}.items() if kernel is not attend else [("plain", attend)]
    ):
        forward, with_gradients = jax.jit(partial(_result, attention, config)), _with_gradients(attention, config)
        distances = [_distance(x, y) for x, y in zip(with_gradients(*half, mask), exact, strict=True)]
        durations = {"forward_ms": _milliseconds(forward, (*half, mask), repeats)}
        durations["both_ms"] = _milliseconds(with_gradients, (*half, mask), repeats)
        lines.append({"way": name} | durations | dict(zip(("out", "d_q", "d_k", "d_v"), distances, strict=True)))
    return lines


def _result(way: Attend, config: DecoderConfig, q: Array, k: Array, v: Array, mask: MaskSpec) -> Array:
    return way(q, k, v, mask, config)


def _with_gradients(way: Attend, config: DecoderConfig) -> Callable[..., tuple]:
    """Result of an attention and its gradients, compiled."""

    def run(q: Array, k: Array, v: Array, mask: MaskSpec) -> tuple:
        out, back = jax.vjp(lambda q, k, v: way(q, k, v, mask, config), q, k, v)
        return out, *back(jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape).astype(q.dtype))

    return jax.jit(run)


def _distance(x: Array, y: Array) -> float:
    return float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max())


def _milliseconds(function: Callable, arguments: tuple, repeats: int) -> float:
    """Fastest of several repetitions, after one that compiles."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return 1000 * min(times[1:])


def main() -> None:
    """Compare the kernel of the platform with the plain formula."""
    sizes = {"h": _HEADS.value, "k": _K_HEADS.value, "e": _HEAD.value, "windows": (_WINDOW.value,)}
    way = best_kernel(jax.default_backend())
    for line in attention_lines(
        replace(SHAPE, **sizes),
        way,
        rows=_ROWS.value,
        tokens=_TOKENS.value,
        segments=_SEGMENTS.value,
        repeats=_REPEATS.value,
    ):
        print(json.dumps(line | {"device": jax.devices()[0].device_kind}))


if __name__ == "__main__":
    app.run(main)
