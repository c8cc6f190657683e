"""Attention by a kernel against the plain formula: how far apart, and how long they take, forward and backward.

    python -m experiments.benchmarks.attention                     # the kernel of what is there, 4,096 tokens
    python -m experiments.benchmarks.attention --head=128 --heads=28 --window=1024

Rows are packed with random segments, with padding behind them. Prints a line of JSON for each way: milliseconds of the
result, and of the result with its gradients, in bfloat16; and how far these are from the plain formula in float32, as a
share of the largest number. A kernel is right where it is no more than twice as far as the plain formula, since both
round to bfloat16. On a CPU there is no kernel, and only the plain formula is timed.
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
_REPEATS = flags.DEFINE_integer("repeats", 10, "Repetitions, of which the fastest counts.", lower_bound=1)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flowgrpo.models.attention import Attend, Sight, attend
from flowgrpo.models.attention_kernels import best
from flowgrpo.models.config import DecoderConfig, Rope

SHAPE = DecoderConfig(v=2, d=2, h=14, k=2, e=64, f=2, windows=(None,), ropes=(Rope(),))


def packed_rows(config: DecoderConfig, rows: int, tokens: int, segments: int) -> tuple[tuple[Array, ...], Sight]:
    """Queries, keys and values in float32, and who sees whom in rows of random segments with padding behind them."""
    rng = np.random.default_rng(0)
    given = tuple(
        jnp.asarray(rng.normal(size=(rows, heads, tokens, config.e)), jnp.float32)
        for heads in (config.h, config.k, config.k)
    )
    ends = np.sort(rng.integers(1, tokens + 1, (rows, segments)), axis=1)
    place = np.arange(tokens)
    segment = 1 + (place[None, :, None] >= ends[:, None]).sum(axis=-1)
    starts = np.concatenate([np.zeros((rows, 1), int), ends], axis=1)
    position = place[None] - np.take_along_axis(starts, segment - 1, axis=1)
    segment = np.where(segment > segments, 0, segment)
    position, segment = (jnp.asarray(x, jnp.int32) for x in (position, segment))
    window = config.windows[0]
    window = jnp.int32(np.iinfo(np.int32).max if window is None else window)
    return given, Sight(position, position, segment, segment, window)


def attention_lines(
    config: DecoderConfig, way: Attend, *, rows: int, tokens: int, segments: int, repeats: int
) -> list[dict]:
    """A line for the plain formula, and one for another way: milliseconds, and distances from float32."""
    given, sight = packed_rows(config, rows, tokens, segments)
    half = tuple(x.astype(jnp.bfloat16) for x in given)
    with jax.default_matmul_precision("highest"):
        exact = _with_gradients(attend, config)(*(x.astype(jnp.float32) for x in half), sight)
    lines = []
    for name, each in {"plain": attend, way.__name__: way}.items() if way is not attend else [("plain", attend)]:
        forward, both = jax.jit(partial(_result, each, config)), _with_gradients(each, config)
        apart = [_distance(x, y) for x, y in zip(both(*half, sight), exact, strict=True)]
        took = {"forward_ms": _milliseconds(forward, (*half, sight), repeats)}
        took["both_ms"] = _milliseconds(both, (*half, sight), repeats)
        lines.append({"way": name} | took | dict(zip(("out", "d_q", "d_k", "d_v"), apart, strict=True)))
    return lines


def _result(way: Attend, config: DecoderConfig, q: Array, k: Array, v: Array, sight: Sight) -> Array:
    return way(q, k, v, sight, config)


def _with_gradients(way: Attend, config: DecoderConfig) -> Callable[..., tuple]:
    """The result of a way and its gradients, compiled."""

    def run(q: Array, k: Array, v: Array, sight: Sight) -> tuple:
        out, back = jax.vjp(lambda q, k, v: way(q, k, v, sight, config), q, k, v)
        return out, *back(jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape).astype(q.dtype))

    return jax.jit(run)


def _distance(x: Array, y: Array) -> float:
    return float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max())


def _milliseconds(function: Callable, given: tuple, repeats: int) -> float:
    """The fastest of some repetitions, after one that compiles."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(function(*given))
        times.append(time.perf_counter() - start)
    return 1000 * min(times[1:])


def main() -> None:
    """Compare the kernel of the platform with the plain formula."""
    sizes = {"h": _HEADS.value, "k": _K_HEADS.value, "e": _HEAD.value, "windows": (_WINDOW.value,)}
    way = best(jax.default_backend())
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
