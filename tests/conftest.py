"""Strictness for every test: rank promotion, implicit dtypes, NaN and warnings raise; 8 CPU devices."""

import os
from pathlib import Path

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Two cores carry the eight devices, so a collective may wait long for its turn.
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        # jaxlib 0.10.2 fuses reductions on the CPU in a way that is wrong under large vmaps (a norm's gradient
        # over 64 and more batched cotangents); without these fusions the numbers are right.
        "--xla_cpu_experimental_ynn_fusion_type=",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_nans", True)
jax.config.update("jax_cpu_enable_async_dispatch", False)  # as launch.configure does for several devices

settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("quick")


MAPPINGS = Path("/proc/self/maps")
MANY = 8_000  # Linux aborts a process at 65,530 mappings of memory, of which a compiled program takes several


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Forget what was compiled for a module where a process holds many programs."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_text().count("\n") > MANY:
        jax.clear_caches()


@pytest.fixture
def nan_allowed():
    """For tests that put NaN into slots on purpose and assert what comes out."""
    with jax.debug_nans(False):
        yield
