"""Peak rates of this machine, to which other benchmarks relate their results.

    python -m experiments.benchmarks.ceilings

Ceilings are the float32 matrix-product rate (the best of several sizes and runs) and the memory bandwidth (reading and
writing one large array in place, both counted), each through jit, on the default device. Best of several runs, because
a ceiling is an undisturbed run. Expected on two quiet cores with AVX2: 180 GFLOP/s and 36 GB/s, in seconds.

The measured models are here, too: `open_model` and `shape_called` by name.
"""

from functools import partial
from typing import Any, NamedTuple

from ..cli import app

app.read_flags(__name__)

import jax
import jax.numpy as jnp

from flowgrpo.contracts import Params
from flowgrpo.envs.arithmetic import arithmetic
from flowgrpo.models import families
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model, init_model, load_model
from flowgrpo.planning.cost_model import count_parameters
from flowgrpo.recipes import pure
from flowgrpo.report.tables import seconds, timed

from .measuring import print_result
from .shapes import LEARNERS, SHAPES

SIZES = (256, 1024, 2048)
COPIED = 2**29  # bytes; more than most caches hold

# Every feature on; tests decode with it, too.
_SIZES: dict[str, Any] = {"v": 97, "d": 32, "h": 4, "k": 2, "e": 8, "f": 48, "logit_softcap": 30.0, "init_scale": 0.3}
_ROPES = (Rope(), Rope(theta=500.0), Rope(kind="linear", factor=2.0))
_NORMS: dict[str, Any] = {"qkv_bias": True, "qk_norm": True, "sandwich_norms": True}
TINY = DecoderConfig(**_SIZES, **_NORMS, windows=(None, 9, None), ropes=_ROPES)


class Ceilings(NamedTuple):
    """Highest measured rates of the machine, in arithmetic and in memory traffic."""

    flops: float  # floating-point operations a second, in a float32 matrix product
    bandwidth: float  # bytes a second, read and written


def measure_ceilings() -> Ceilings:
    """Both ceilings of the default device."""
    return Ceilings(max(_matmul_rate(size) for size in SIZES), _copy_rate())


def _matmul_rate(size: int) -> float:
    """FLOP/s of the product of two square float32 matrices, best of several."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size)) for seed in range(2))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / min(seconds(partial(product, a, b)) for _ in range(10))


def _copy_rate() -> float:
    """Bytes per second, read and written, of scaling an array of `COPIED` bytes in place, best of several.

    In place, because the first touch of new pages takes longer than the copy.
    """
    x, durations = jnp.ones(COPIED // 4, jnp.float32), []
    scale = jax.jit(lambda x: x * 0.5, donate_argnums=0)
    for _ in range(8):
        duration, x = timed(partial(scale, x))
        durations.append(duration)
    return 2 * COPIED / min(durations)


def open_model(name: str) -> Model:
    """A random model of one of `SHAPES`, whose few layers are unrolled, or the checkpoint of a folder or hub id."""
    if name not in SHAPES:
        return load_model(name, tokenizer=False)
    model = init_model(SHAPES[name], jax.random.key(0))
    return model._replace(policy=make_policy(model.config, unroll=True))


def shape_called(name: str) -> DecoderConfig:
    """The shape of one of `LEARNERS`."""
    source = LEARNERS[name]
    if source is None:
        return pure.small_decoder_config(arithmetic(), pure.preset("arithmetic", model_dim=108, layers=3, head_dim=16))
    return families.decoder_config(families.text_model_config(source))


def step_bytes(params: Params, config: DecoderConfig, rows: int, context: float) -> float:
    """Bytes that a decode step must read: all weights, and the keys and values of `context` tokens per row."""
    weights = count_parameters(config) - (0 if config.tied else params["embed"].size)
    return params["embed"].dtype.itemsize * (weights + 2.0 * config.num_layers * config.k * config.e * context * rows)


def main() -> None:
    """Measure, print the table and one JSON line."""
    rates = {size: _matmul_rate(size) / 1e9 for size in SIZES}
    bandwidth = _copy_rate() / 1e9
    for size, rate in rates.items():
        print(f"matrix product {size:5d}{rate:10.1f} GFLOP/s")
    print(f"memory{bandwidth:24.1f} GB/s read and written")
    gflops = {str(size): round(rate, 1) for size, rate in rates.items()}
    device = jax.devices()[0].device_kind
    print_result("ceilings", device=device, gflops=gflops, gbytes=round(bandwidth, 1))


if __name__ == "__main__":
    app.run(main)
