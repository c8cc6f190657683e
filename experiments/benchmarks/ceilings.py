"""Measure the most that this machine can do, of which other benchmarks report their share, and count a model's work.

    python -m experiments.benchmarks.ceilings

Ceilings are the float32 matrix-product rate (the best of several sizes and runs) and the memory bandwidth (reading and
writing one large array in place, both counted), each through jit, on the default device. Best of several runs, because
a ceiling is what nothing disturbed. Expected on two quiet cores with AVX2: 180 GFLOP/s and 36 GB/s, in seconds.

Work counts what a model of known parameters must do: every weight multiplied once for a token, and each token
attending to those before it.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import common
from experiments.benchmarks.measured import seconds
from flowgrpo.contracts import Params
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.hf import Model, init_model, load_model

SIZES = (256, 1024, 2048)
COPIED = 2**29  # bytes; more than most caches hold

_QWEN2 = {"model_type": "qwen2", "vocab_size": 512, "tie_word_embeddings": True, "rope_theta": 1e6}
SHAPES: dict[str, dict[str, Any]] = {  # config.json of the models that speed is measured on
    "small": _QWEN2  # 4.07 M parameters
    | {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"intermediate_size": 1024},
    "medium": _QWEN2  # 20.7 M parameters
    | {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"intermediate_size": 1792},
}

# Every feature on; the tests decode with it too.
TINY = DecoderConfig(
    v=97,
    d=32,
    h=4,
    k=2,
    e=8,
    f=48,
    windows=(None, 9, None),
    ropes=(Rope(), Rope(theta=500.0), Rope(kind="linear", factor=2.0)),
    qkv_bias=True,
    qk_norm=True,
    sandwich_norms=True,
    logit_softcap=30.0,
    init_scale=0.3,
)


# The machine ------------------------------------------------------------------------------------------


class Ceilings(NamedTuple):
    """Highest measured rates of the machine, in arithmetic and in memory traffic."""

    flops: float  # floating-point operations a second, in a float32 matrix product
    bandwidth: float  # bytes a second, read and written


def measure(sizes: tuple[int, ...] = SIZES, copied: int = COPIED) -> Ceilings:
    """Both ceilings of the default device."""
    return Ceilings(max(matmul_rate(size) for size in sizes), copy_rate(copied))


def matmul_rate(size: int, repeats: int = 9) -> float:
    """FLOP/s of the product of two square float32 matrices, best of several."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size)) for seed in range(2))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / best_seconds(lambda: product(a, b), repeats)


def copy_rate(size: int, repeats: int = 7) -> float:
    """Bytes a second, read and written, of scaling an array of `size` bytes in place, best of several.

    In place, because the first touch of new pages takes longer than the copy.
    """
    held = [jnp.ones(size // 4, jnp.float32)]
    scale = jax.jit(lambda x: x * 0.5, donate_argnums=0)

    def step() -> jax.Array:
        held[0] = scale(held[0])
        return held[0]

    return 2 * size / best_seconds(step, repeats)


def best_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of several runs, after one that compiles."""
    jax.block_until_ready(work())
    return min(seconds(work) for _ in range(repeats))


# The work ---------------------------------------------------------------------------------------------


def open_model(name: str) -> Model:
    """A random model of one of `SHAPES`, or the checkpoint of a folder or hub id."""
    return init_model(SHAPES[name], jax.random.key(0)) if name in SHAPES else load_model(name, text=False)


def count(params: Params) -> int:
    """How many parameters there are, by arrays or by abstract shapes."""
    return sum(value.size for value in params.values())


def forward_flops(params: Params, config: DecoderConfig, tokens: int, seen: float) -> float:
    """Operations of `tokens` tokens of which each attends to `seen` tokens in the mean; a window is not considered.

    Two for each weight, looked-up embeddings excepted, and two for each product of attention.
    """
    weights = count(params) - (0 if config.tied else params["embed"].size)
    return tokens * (2.0 * weights + 4.0 * config.num_layers * config.h * config.e * seen)


def step_bytes(params: Params, config: DecoderConfig, rows: int, seen: float) -> float:
    """Bytes that a decode step must read: all weights, and the keys and values of `seen` tokens a row."""
    dtype = params["embed"].dtype
    weights = count(params) - (0 if config.tied else params["embed"].size)
    return dtype.itemsize * (weights + 2.0 * config.num_layers * config.k * config.e * seen * rows)


def main() -> None:
    """Measure, print the table and one JSON line."""
    device = jax.devices()[0]
    rates = {size: matmul_rate(size) for size in SIZES}
    bandwidth = copy_rate(COPIED)
    for size, rate in rates.items():
        print(f"matrix product {size:5d}{rate / 1e9:10.1f} GFLOP/s")
    print(f"memory{bandwidth / 1e9:24.1f} GB/s read and written")
    gflops = {str(size): round(rate / 1e9, 1) for size, rate in rates.items()}
    result = {"benchmark": "ceilings", "device": device.device_kind, "gflops": gflops}
    print(json.dumps(result | {"gbytes": round(bandwidth / 1e9, 1)}))


if __name__ == "__main__":
    common.run(main)
