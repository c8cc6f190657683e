"""What must be set before JAX's backend starts: XLA's flags and the compilation cache; and profiles of a run.

    configure(compilation_cache="runs/cache", deterministic=True, cpu_devices=cores())
    with profile("runs/profile"):
        ...

Importing JAX starts nothing; the first array or device does. From then on XLA reads no flags any more, so `configure`
refuses to come too late. What the user wrote in `XLA_FLAGS` stays as it is.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from flowgrpo.types import BadInput

# These versions fuse reductions on the CPU in a way that is wrong under large vmaps: a norm's gradient over 64 and more
# batched cotangents. XLA ends the process over a flag that it doesn't know, so only they are given this one.
FLAWED_JAXLIB = ("0.10.2",)
NO_FLAWED_FUSION = "--xla_cpu_experimental_ynn_fusion_type="
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"  # for the products of a CPU device
DETERMINISTIC = ("--xla_gpu_deterministic_ops=true",)  # the CPU is deterministic as it is


def configure(
    *, compilation_cache: str | os.PathLike | None = None, deterministic: bool = False, cpu_devices: int = 1
) -> None:
    """Set what XLA reads when it starts, and keep compiled programs in a folder where one is given.

    Several `cpu_devices` work side by side with a thread each, where one device would take all threads for every
    product: programs of many small operations are up to twice as fast, once their rows are dealt over the devices.
    """
    if _backend_started():
        raise BadInput(
            "JAX's backend has started, and reads no settings any more: call launch.configure before the first "
            "array, device or compilation"
        )
    flags = [NO_FLAWED_FUSION] if version("jaxlib") in FLAWED_JAXLIB and not _on_tpu() else []
    if deterministic:
        _check_deterministic(os.environ.get("XLA_FLAGS", ""))
        flags += [] if _on_tpu() else DETERMINISTIC
    if cpu_devices > 1:
        _set_cpu_devices(cpu_devices)
        flags += [ONE_THREAD]
    os.environ["XLA_FLAGS"] = add_flags(os.environ.get("XLA_FLAGS", ""), flags)
    if compilation_cache is not None:
        _keep_compiled(make_folder(compilation_cache))


def cores(most: int = 8) -> int:
    """How many processor cores this process may use, and no more than `most`."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, most)


def add_flags(given: str, flags: list[str]) -> str:
    """The value of `XLA_FLAGS` with these flags added, those excepted whose names it has already."""
    names = {flag.partition("=")[0] for flag in given.split()}
    return " ".join([*given.split(), *(flag for flag in flags if flag.partition("=")[0] not in names)])


def make_folder(folder: str | os.PathLike) -> Path:
    """The folder, made where it is missing; `BadInput` where nothing can be written in it."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{path} can't be made ({error.strerror}): choose another folder") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise BadInput(f"{path} can't be written: change its permissions, or choose another folder")
    return path


@contextmanager
def profile(folder: str | os.PathLike | None) -> Iterator[None]:
    """Trace what runs in the block, for XProf or Perfetto (`*.trace.json.gz`); nothing where there is no folder."""
    if folder is None:
        yield
        return
    import jax

    with jax.profiler.trace(make_folder(folder)):
        yield


def _check_deterministic(given: str) -> None:
    """Refuse to promise what the user's own flags contradict."""
    names = {flag.partition("=")[0] for flag in DETERMINISTIC}
    for flag in given.split():
        name, _, value = flag.partition("=")
        if name in names and value.lower() in ("false", "0"):
            raise BadInput(f"XLA_FLAGS has {flag}, which contradicts deterministic runs: leave out one of them")


def _set_cpu_devices(count: int) -> None:
    """Dispatch waits for each program: with 32 under way it would hold the very threads that these need to end."""
    import jax

    jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _keep_compiled(folder: Path) -> None:
    """Keep every compiled program, however small and quickly made."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _backend_started() -> bool:
    from jax._src import xla_bridge  # no public function says it without starting one

    return xla_bridge.backends_are_initialized()


def _on_tpu() -> bool:
    """Whether a TPU may run this: its library parses `XLA_FLAGS` too, and may know other flags than jaxlib."""
    import jax

    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    return "tpu" in platforms if platforms else find_spec("libtpu") is not None
