"""Whether a model fits into free memory, checked before it is read, and which smaller form would."""

import os
from math import prod
from pathlib import Path

import jax
import numpy as np

from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import matrices, parameters, shape_of
from flowgrpo.models.quantised import INT8, NF4
from flowgrpo.types import BadInput

BYTES = {INT8: 1.0, NF4: 0.5 + 4 / 64}  # per entry of a quantised matrix, with its part of a scale
CGROUP = Path("/sys/fs/cgroup")


def parameter_bytes(config: DecoderConfig, dtype: np.dtype, quantised: str | None = None) -> int:
    """Bytes of all parameters, with the matrices of the layers quantised as `quantised`, if it is not None."""
    quantised_names = matrices(config) if quantised else {}
    total = 0.0
    for name, parameter in parameters(config).items():
        bytes_per_entry = BYTES[quantised] if quantised and name in quantised_names else dtype.itemsize
        total += prod(shape_of(parameter, config)) * bytes_per_entry
    return int(total)


def free_bytes() -> int | None:
    """Free memory on the default device, or of the host if that is a CPU; None if unknown."""
    device = jax.config.jax_default_device or jax.local_devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    if getattr(device, "platform", "cpu") == "cpu":
        return host_free_bytes()
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else limit - stats.get("bytes_in_use", 0)


def host_free_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int | None:
    """Memory that the system reports as available, and at most what the container's limit leaves; None if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None
    try:
        limit, used = int((cgroup / "memory.max").read_text()), int((cgroup / "memory.current").read_text())
        cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(cached.get("inactive_file", 0)))
    except (OSError, ValueError):  # no limit
        return free


def check_room(path: Path, config: DecoderConfig, dtype: np.dtype, quantised: str | None = None) -> None:
    """Raise `BadInput` if the parameters take more memory than is free; it names a form that would fit."""
    needed, free = parameter_bytes(config, dtype, quantised), free_bytes()
    if free is None or needed <= free:
        return
    smaller = []
    if dtype.itemsize > 2:
        smaller.append(("dtype bfloat16", parameter_bytes(config, np.dtype(jax.numpy.bfloat16), quantised)))
    if quantised is None:
        bfloat16 = np.dtype(jax.numpy.bfloat16)
        smaller += [
            (f"bfloat16 with its layers quantised to {kind}", parameter_bytes(config, bfloat16, kind)) for kind in BYTES
        ]

    def gigabytes(size: float) -> str:
        return f"{size / 1e9:.3g} GB"

    fits = next((f"{form} ({gigabytes(size)})" for form, size in smaller if size <= free), None)
    fix = f"load it in {fits}" if fits else f"take a model of at most {free / 2e9:.2g} billion parameters, in bfloat16"
    form = f"in {dtype.name}" + (f" and {quantised}" if quantised else "")
    raise BadInput(
        f"{path}: its parameters take {gigabytes(needed)} {form}, and {gigabytes(free)} of memory are free: {fix}"
    )
