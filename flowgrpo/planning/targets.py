"""Target machines and their compilers: a table of chips with their specifications, and devices to compile for.

    target = parse_target("v5e-8")                  # 8 devices of a chip in the table
    mesh = make_mesh({"fsdp": 8}, target_devices(target))
    cost = dry_run(make_case(config, job, algorithm, optimizer, mesh=mesh, target=target))

The number of a target counts JAX's devices. A TPU v5e, v5p and v6e has one device a chip, so that `v5p-8` are eight
chips, which Google sells as v5p-16, by their cores. The compiler knows a v4 by its cores alone: here a device of `v4-8`
is one of the two cores of a chip, with half of its memory and rates. `cpu-8` are virtual devices of this machine.

Specifications are as published, for one direction of the links and without sparsity; memory is what a program may
use: on TPUs as the compiler refuses more, on GPUs 95 % (XLA_PYTHON_CLIENT_MEM_FRACTION=0.95; JAX takes 75 by default).
"""

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from flowgrpo.files import pip_install
from flowgrpo.types import BadInput

GIB = 2**30
EXTRA = "aot"  # the extra with the compilers
GPU_SHARE = 0.95  # fraction of the memory that programs may use


class GpuSpec(NamedTuple):
    """Properties of a GPU that its compiler needs."""

    name: str
    capability: tuple[int, int]
    cores: int
    lanes: int  # of float32 in a core
    threads: int  # per core, at most
    shared: int  # bytes of shared memory of a core
    shared_block: int  # bytes of it that a block may use
    cache: int  # bytes of the L2 cache
    clock: float  # GHz
    memory: int  # bytes, as the driver reports


class Chip(NamedTuple):
    """Specifications of one device."""

    platform: str  # of JAX: tpu, cuda, cpu
    memory: float  # bytes that a program may use; 0: unknown
    flops: float  # FLOPs per second of products of `half`
    bandwidth: float  # of its memory, bytes per second
    link: float  # bytes per second from other devices, over all links
    clock: float = 0.0  # GHz of the cycles that the compiler estimates; 0: it estimates none
    half: str = "bfloat16"  # its 16-bit type of products
    gpu: GpuSpec | None = None


class Target(NamedTuple):
    """A machine of `count` devices of a chip."""

    name: str
    chip: Chip
    count: int

    @property
    def kind(self) -> str:
        """Name of the chip in the table."""
        return self.name.rpartition("-")[0]


def _gpu(flops: float, bandwidth: float, link: float, shape: GpuSpec, half: str = "bfloat16") -> Chip:
    return Chip("cuda", GPU_SHARE * shape.memory, flops, bandwidth, link, half=half, gpu=shape)


# TPUs: cloud.google.com/tpu/docs, system architecture (v4 halved, for one core); memory is what the compiler allows.
# GPUs: data sheets of NVIDIA's H100 SXM5, H200, A100 SXM4 80 GB, L4 and T4; dense rates, NVLink or PCIe one way.
CHIPS: Mapping[str, Chip] = {
    "v4": Chip("tpu", 15.25 * GIB, 137.5e12, 614e9, 150e9, clock=1.05),
    "v5e": Chip("tpu", 15.75 * GIB, 197e12, 819e9, 200e9, clock=1.5),
    "v5p": Chip("tpu", 95.74 * GIB, 459e12, 2765e9, 600e9, clock=1.75),
    "v6e": Chip("tpu", 31.25 * GIB, 918e12, 1640e9, 448e9, clock=1.75),
    "h100": _gpu(
        989e12,
        3350e9,
        450e9,
        GpuSpec("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 233_472, 232_448, 50 << 20, 1.98, 84_942_979_072),
    ),
    "h200": _gpu(
        989e12,
        4800e9,
        450e9,
        GpuSpec("NVIDIA H200", (9, 0), 132, 128, 2048, 233_472, 232_448, 60 << 20, 1.98, 150_100_000_000),
    ),
    "a100": _gpu(
        312e12,
        2039e9,
        300e9,
        GpuSpec("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 167_936, 166_912, 40 << 20, 1.41, 85_100_068_864),
    ),
    "l4": _gpu(
        121e12,
        300e9,
        32e9,
        GpuSpec("NVIDIA L4", (8, 9), 58, 128, 1536, 102_400, 101_376, 48 << 20, 2.04, 23_800_000_000),
    ),
    "t4": _gpu(
        65e12,
        320e9,
        16e9,
        GpuSpec("Tesla T4", (7, 5), 40, 64, 1024, 65_536, 65_536, 4 << 20, 1.59, 15_640_000_000),
        half="float16",
    ),
    "cpu": Chip("cpu", 0.0, 0.0, 0.0, 0.0),
}

# The compiler needs at least two chips in each direction: the first devices of these topologies are used.
_FLAT = {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_DEEP = {1: "2x2x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
_CORES = {1: "2x2x1", **{2 * chips: name for chips, name in _DEEP.items() if chips > 1}}
TOPOLOGIES: Mapping[str, Mapping[int, str]] = {"v4": _CORES, "v5e": _FLAT, "v5p": _DEEP, "v6e": _FLAT}
HOST = 8  # GPUs of one host; more must be whole hosts
MAX_DEVICES = 512


def parse_target(text: str, flag: str = "--target") -> Target:
    """Parse a chip and a number of devices, such as `v5e-8`; `v5e` is one device."""
    match = re.fullmatch(r"([a-z][a-z0-9]*)(?:-(\d+))?", text)
    if match is None:
        raise BadInput(f"{flag}={text} must be a chip and how many, as v5e-8; chips are {', '.join(CHIPS)}")
    kind, count = match[1], int(match[2] or 1)
    if kind not in CHIPS:
        raise BadInput(f"{flag}={text}: there are no figures of the chip {kind!r}; choose from {', '.join(CHIPS)}")
    counts = TOPOLOGIES.get(kind)
    if counts is not None and count not in counts:
        raise BadInput(f"{flag}={text}: {kind} comes in {', '.join(map(str, counts))} devices; choose one of them")
    if not 1 <= count <= MAX_DEVICES or (CHIPS[kind].gpu and count > HOST and count % HOST):
        raise BadInput(f"{flag}={text}: take 1 to {HOST} devices, or a multiple of {HOST} up to {MAX_DEVICES}")
    return Target(f"{kind}-{count}", CHIPS[kind], count)


def target_devices(target: Target) -> list[Any]:
    """Devices of the target, for compiling and not for running; `BadInput` without its compiler."""
    platform = target.chip.platform
    if platform == "cpu":
        if len(devices := jax.devices("cpu")) < target.count:
            raise BadInput(f"{target.name} has more devices than the {len(devices)} here: give --cpu_devices")
        return devices[: target.count]
    if (missing := missing_compiler(platform)) is not None:
        raise BadInput(f"--target={target.name} needs {missing}: {pip_install(EXTRA)}")
    set_environment()
    try:
        return list(_topology(target).devices)[: target.count]
    except Exception as error:  # whatever a plugin raises over a machine that it does not know
        raise BadInput(
            f"--target={target.name}: its compiler refuses the topology ({str(error)[:200]}): take another number of "
            "devices, or the versions of requirements.lock"
        ) from error


def _topology(target: Target) -> Any:
    """The topology of the machine, from its compiler."""
    if target.chip.gpu is None:
        name = f"{target.kind}:{TOPOLOGIES[target.kind][target.count]}"
        return topologies.get_topology_desc(platform="tpu", topology_name=name)
    hosts, each = max(1, target.count // HOST), min(target.count, HOST)
    shape = f"1x{hosts}x{each}"
    return topologies.get_topology_desc(
        target.kind, platform="cuda", topology=shape, target_config=gpu_description(target.chip)
    )


# Packages with the compilers: the module to import -> the name of the package.
COMPILERS: Mapping[str, Mapping[str, str]] = {
    "tpu": {"libtpu": "libtpu"},
    "cuda": {"jax_plugins.xla_cuda13": "jax-cuda13-plugin and jax-cuda13-pjrt", "nvidia.cu13.bin": "nvidia-cuda-nvcc"},
}

# Keep the compiler of TPUs from querying network and driver for the machine.
TPU_ENVIRONMENT: Mapping[str, str] = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # while other processes compile
}


def missing_compiler(platform: str) -> str | None:
    """The first package that is missing to compile for a platform; None if all are installed."""
    for module, package in COMPILERS.get(platform, {}).items():
        try:
            spec = find_spec(module)
        except ModuleNotFoundError:  # its parent is missing
            spec = None
        if spec is None:
            return package
    return None


def compile_options(platform: str) -> dict[str, Any]:
    """Options of a compiler without a device: kernels of a GPU are not autotuned, which would have to run them.

    Programs are fully optimised, whatever XLA_FLAGS says for those of this machine.
    """
    return {"xla_backend_optimization_level": 3} | ({"xla_gpu_autotune_level": 0} if platform == "cuda" else {})


def lowering_platforms(target: Target) -> tuple[str]:
    """The platform to lower programs for."""
    return (target.chip.platform,)


def set_environment() -> None:
    """Set `TPU_ENVIRONMENT`, except variables that the user has set."""
    for name, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_dtype(target: Target, dtype: Any) -> None:
    """Raise `BadInput` for a 16-bit type of which the chip has no products."""
    if jax.numpy.dtype(dtype).itemsize == 2 and str(jax.numpy.dtype(dtype)) != target.chip.half:
        raise BadInput(f"{target.kind} has no products of {jax.numpy.dtype(dtype)}: compute in {target.chip.half}")


def gpu_description(chip: Chip) -> str:
    """The GPU as a `GpuTargetConfigProto` in text form, for its compiler."""
    shape = chip.gpu
    assert shape is not None
    major, minor = shape.capability
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  name: "{shape.name}" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {major}.{minor}"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  core_count: {shape.cores} fpus_per_core: {shape.lanes} clock_rate_ghz: {shape.clock}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {shape.threads}
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {shape.shared}
  shared_memory_per_block_optin: {shape.shared_block}
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_memory_size: {shape.memory} memory_bandwidth: {chip.bandwidth:.0f} l2_cache_size: {shape.cache}
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{shape.name}"
"""
