"""Bench of the checks: the device, the host beside it, sizes of the small models, and the environment in words."""

import subprocess
from contextlib import nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.planning.mesh_search import GIB, PUBLISHED, shape_of_model
from flowgrpo.recipes.device_checks.figures import CheckLine, tell
from flowgrpo.types import BadInput

TINY = "tiny"  # the model of the speeds where no published one fits
ROOM = 20 * GIB  # of a device on which the smallest published shape is updated with ease
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "flowgrpo")


Device = Any  # a jax.Device, which type checkers do not know as one


class CheckSizes(NamedTuple):
    """Sizes of the small models and of the programs whose speed is measured."""

    d: int
    layers: int
    e: int
    v: int
    rows: int  # of the small batches
    length: int  # of their rows
    product: int  # width of the matrices that are multiplied
    copied: int  # bytes
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


class Form(NamedTuple):
    """A type of number, and how its products are made."""

    name: str
    dtype: Any
    precision: str | None  # None is JAX's default

    def products(self):
        """A context in which programs are traced so."""
        return nullcontext() if self.precision is None else jax.default_matmul_precision(self.precision)


EXACT = Form("float32, highest", jnp.float32, "highest")
HALF = Form("bfloat16", jnp.bfloat16, None)
FORMS = (EXACT, Form("float32, default", jnp.float32, None), HALF)


class Bench(NamedTuple):
    """Everything that a check is given."""

    device: Device
    host: Device | None  # None where JAX was told of no CPU
    size: str
    model: str

    @property
    def sizes(self) -> CheckSizes:
        """The numbers of this size."""
        return SIZES[self.size]

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms that are looked at: the small size compiles few programs."""
        return FORMS if self.size == "full" else (EXACT, HALF)

    @property
    def shape(self) -> DecoderConfig:
        """The shape whose speed is measured."""
        return small_shape(SIZES["small"]) if self.model == TINY else shape_of_model(self.model)


def open_bench(size: str, model: str | None) -> Bench:
    """The bench of the first device; without a `model` the smallest published shape, where there is room for it."""
    if size not in SIZES:
        raise BadInput(f"--size={size} is unknown; choose from {', '.join(SIZES)}")
    if model not in (None, TINY):
        shape_of_model(model)
    device, host = jax.devices()[0], None
    with suppress(RuntimeError):  # JAX_PLATFORMS may leave the CPU out
        host = jax.devices("cpu")[0]
    roomy = size == "full" and memory_of(device).get("bytes_limit", 0) >= ROOM
    return Bench(device, host, size, model or (next(iter(PUBLISHED)) if roomy else TINY))


def memory_of(device: Device) -> dict[str, int]:
    """Bytes in use, at most and in all, as the device has them; empty where it keeps no account."""
    return device.memory_stats() or {}


def small_shape(sizes: CheckSizes) -> DecoderConfig:
    """A decoder with grouped heads and biases, as sure of its tokens as one in training."""
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
    """Name the device, the versions and the driver."""
    device, stats = bench.device, memory_of(bench.device)
    lines = [tell("device", f"{device.platform} {device.device_kind}"), tell("devices", float(jax.device_count()))]
    if "bytes_limit" in stats:
        lines.append(tell("memory that JAX may use", stats["bytes_limit"] / GIB, "GiB"))
    lines.append(tell("host", "none: JAX_PLATFORMS leaves it out" if bench.host is None else str(bench.host)))
    lines += [tell(name, _version(name)) for name in LIBRARIES]
    runtime = " ".join(str(getattr(device.client, "platform_version", "")).split())
    lines += [tell("runtime", runtime)] + [tell("driver", line) for line in _drivers(device.platform)]
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return [*lines, tell("matmul precision", precision or "default"), tell("model of the speeds", bench.model)]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a checkout
        return "not installed as a package"


def _drivers(platform: str) -> list[str]:
    """Read what NVIDIA's tool says of its cards, where there are some."""
    if platform not in ("gpu", "cuda"):
        return []
    asked = "name,driver_version,memory.total,power.limit,clocks.max.sm"
    try:
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi says nothing ({type(error).__name__})"]
