"""Input of the checks: the device, its host, sizes of the small models; and a description of the environment."""

import subprocess
from contextlib import nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.planning.mesh_search import GIB, PUBLISHED, shape_of_model
from flowgrpo.types import BadInput

from .figures import CheckLine, measured

TINY = "tiny"  # the measured model if no published one fits
MIN_MEMORY = 20 * GIB  # of a device, enough to update the smallest published shape
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "flowgrpo")


Device = Any  # a jax.Device, whose methods type checkers don't know


class CheckSizes(NamedTuple):
    """Sizes of the small models and of the measured programs."""

    d: int
    layers: int
    e: int
    v: int
    rows: int  # of the small batches
    length: int  # of their rows
    product: int  # width of the multiplied matrices
    copied: int  # bytes of the copied array
    slots: int
    context: int  # of a slot
    steps: int
    update_rows: int
    update_length: int
    updates: int  # of the small run


SIZES = {
    "small": CheckSizes(32, 2, 8, 97, 2, 48, 256, 2**20, 4, 64, 4, 2, 64, 1),
    "full": CheckSizes(256, 4, 64, 4096, 4, 256, 8192, 2**30, 64, 1024, 64, 8, 2048, 40),
}


class NumericForm(NamedTuple):
    """A data type and the precision of its matrix products."""

    name: str
    dtype: Any
    precision: str | None  # None is JAX's default

    def products(self):
        """Context in which programs are traced with this precision."""
        return nullcontext() if self.precision is None else jax.default_matmul_precision(self.precision)


EXACT = NumericForm("float32, highest", jnp.float32, "highest")
HALF = NumericForm("bfloat16", jnp.bfloat16, None)
NUMERIC_FORMS = (EXACT, NumericForm("float32, default", jnp.float32, None), HALF)


class Bench(NamedTuple):
    """Input of every check."""

    device: Device
    host: Device | None  # None if JAX has no CPU device
    size: str
    model: str

    @property
    def sizes(self) -> CheckSizes:
        """Sizes of the programs."""
        return SIZES[self.size]

    @property
    def forms(self) -> tuple[NumericForm, ...]:
        """Numeric forms to check; fewer for the small size, which compiles few programs."""
        return NUMERIC_FORMS if self.size == "full" else (EXACT, HALF)

    @property
    def shape(self) -> DecoderConfig:
        """Configuration of the measured model."""
        return small_shape(SIZES["small"]) if self.model == TINY else shape_of_model(self.model)


def make_bench(size: str, model: str | None) -> Bench:
    """Bench of the first device; without `model`, the smallest published shape if it fits."""
    if size not in SIZES:
        raise BadInput(f"--size={size} is unknown; choose from {', '.join(SIZES)}")
    if model not in (None, TINY):
        shape_of_model(model)
    device, host = jax.devices()[0], None
    with suppress(RuntimeError):  # JAX_PLATFORMS may leave the CPU out
        host = jax.devices("cpu")[0]
    has_room = size == "full" and memory_of(device).get("bytes_limit", 0) >= MIN_MEMORY
    return Bench(device, host, size, model or (next(iter(PUBLISHED)) if has_room else TINY))


def memory_of(device: Device) -> dict[str, int]:
    """Memory statistics of the device (bytes in use, peak, limit); empty if it has none."""
    return device.memory_stats() or {}


def small_shape(sizes: CheckSizes) -> DecoderConfig:
    """A decoder with grouped heads and biases, with probabilities as sharp as in training."""
    heads = sizes.d // sizes.e
    return DecoderConfig(
        v=sizes.v,
        d=sizes.d,
        h=heads,
        k=max(1, heads // 2),
        e=sizes.e,
        f=4 * sizes.d,
        windows=(None,) * sizes.layers,
        ropes=(Rope(),) * sizes.layers,
        qkv_bias=True,
        tied=True,
        init_scale=0.05,
    )


def environment(bench: Bench) -> list[CheckLine]:
    """Device, versions and driver."""
    device, stats = bench.device, memory_of(bench.device)
    lines = [
        measured("device", f"{device.platform} {device.device_kind}"),
        measured("devices", float(jax.device_count())),
    ]
    if "bytes_limit" in stats:
        lines.append(measured("memory that JAX may use", stats["bytes_limit"] / GIB, "GiB"))
    lines.append(measured("host", "none: JAX_PLATFORMS leaves it out" if bench.host is None else str(bench.host)))
    lines += [measured(name, _version_of(name)) for name in LIBRARIES]
    runtime = " ".join(str(getattr(device.client, "platform_version", "")).split())
    lines += [measured("runtime", runtime)] + [measured("driver", line) for line in _nvidia_drivers(device.platform)]
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return [*lines, measured("matmul precision", precision or "default"), measured("model of the speeds", bench.model)]


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a checkout
        return "not installed as a package"


def _nvidia_drivers(platform: str) -> list[str]:
    """Cards and drivers as nvidia-smi reports them; empty on other platforms."""
    if platform not in ("gpu", "cuda"):
        return []
    query = "name,driver_version,memory.total,power.limit,clocks.max.sm"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi says nothing ({type(error).__name__})"]
