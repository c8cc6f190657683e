"""Strictness for every test: rank promotion, implicit dtypes, NaN and warnings raise; 8 CPU devices.

Compiled programs are kept in pytest's cache folder, so that workers, the processes that tests start and the next run
share them. The summary names the ten tests that took most processor time, which other work beside changes little.
"""

import os
import resource
import signal
from pathlib import Path

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Tests compile much and compute little: these two halve a compilation. CI's oracles run with what users have.
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    # Two cores carry the eight devices, so a collective may wait long for its turn.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    # jaxlib 0.10.2 fuses reductions on the CPU in a way that is wrong under large vmaps (a norm's gradient
    # over 64 and more batched cotangents); without these fusions the numbers are right.
    "--xla_cpu_experimental_ynn_fusion_type=",
)
GIVEN = os.environ.get("XLA_FLAGS", "")
NAMED = {flag.partition("=")[0] for flag in GIVEN.split()}
os.environ["XLA_FLAGS"] = " ".join([GIVEN, *(flag for flag in FLAGS if flag.partition("=")[0] not in NAMED)])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import commands
import jax
import pytest
from hypothesis import settings

from flowgrpo import launch

launch.round_rows_equally()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_nans", True)
jax.config.update("jax_cpu_enable_async_dispatch", False)  # as launch.configure does for several devices

settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("quick")


# Workers ----------------------------------------------------------------------------------------------

MOST_WORKERS = 8


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Take a worker for each core, unless `-n` says how many or xdist is left out.

    Under --cov `-n` has to be there: pytest-cov reads it before this is called.
    """
    if getattr(config.option, "cov_source", None):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = getattr(config.option, "numprocesses", 0)  # None where nothing was chosen
    if chosen is None and cores > 1 and not hasattr(config, "workerinput") and not config.option.collectonly:
        config.option.numprocesses, config.option.dist = min(cores, MOST_WORKERS), "worksteal"


# Compiled programs ------------------------------------------------------------------------------------

MAPPINGS = Path("/proc/self/maps")
# One process may read what another is just writing; JAX then warns, and compiles.
HALF_WRITTEN = "ignore:Error reading persistent compilation cache entry"
MANY = 8_000  # Linux aborts a process at 65,530 mappings of memory, of which a compiled program takes several


def pytest_configure(config):
    """Keep compiled programs where the other workers, the processes that tests start and the next run find them."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        if not hasattr(config, "cache"):  # under -p no:cacheprovider
            return
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.cache.mkdir("compiled"))
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        os.environ.setdefault("PYTHONWARNINGS", HALF_WRITTEN)
    config.addinivalue_line("filterwarnings", HALF_WRITTEN)
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    launch.write_cache_atomically()


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


# Processor time ---------------------------------------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption("--costs", metavar="FILE", help="append 'processor seconds, test' of every test to this file")


def _spent() -> float:
    """Sum the processor seconds of this process and of the children that it has waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return commands.SPENT[0] + sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


_SPENT = [_spent()]  # when the last phase of a test ended


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    now = _spent()
    report.user_properties = [("cost", now - _SPENT[0])]
    _SPENT[0] = now
    return report


def pytest_terminal_summary(terminalreporter, config):
    """Name the dearest tests."""
    if hasattr(config, "workerinput"):  # the controller has the reports of all
        return
    costs: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, cost in getattr(report, "user_properties", ()):
                if name == "cost":
                    costs[report.nodeid] = costs.get(report.nodeid, 0.0) + cost
    dearest = sorted(costs.items(), key=lambda item: -item[1])
    if len(dearest) > 10:
        terminalreporter.section("processor seconds", sep="=")
        terminalreporter.line(f"{sum(costs.values()):8.1f}  in all, of {len(costs)} tests")
        for test, cost in dearest[:10]:
            terminalreporter.line(f"{cost:8.1f}  {test}")
    if config.getoption("costs"):
        with Path(config.getoption("costs")).open("a") as file:
            file.writelines(f"{cost:.3f}\t{test}\n" for test, cost in dearest)
