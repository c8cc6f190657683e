"""Setup before JAX's backend starts: XLA's flags, the compilation cache, other processes; and profiles of a run.

    configure(deterministic=True, cpu_devices=cores())
    join("10.0.0.1:9000", num_processes=2, process_id=0)
    with profile("runs/profile"):
        ...

Importing JAX starts nothing; the first array or device does. From then on XLA reads no flags any more, so `configure`
refuses to come too late. What the user wrote in `XLA_FLAGS` stays as it is.
"""

import ctypes
import hashlib
import os
import platform
import socket
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partialmethod
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

from flowgrpo.errors import BadInput
from flowgrpo.files import make_folder, write_whole

# These versions fuse reductions on the CPU in a way that is wrong under large vmaps (jax issue 39103). A kind of fusion
# says what one begins with, and DOT, ELTWISE and REDUCE all take up a reduction that follows: all three are wrong. The
# one that takes up nothing, INDIVIDUAL_DOT, is right, but sums a row in an order that depends on the others (F7).
# XLA ends the process over a flag that it doesn't know, so only these versions are given this one.
FLAWED_JAXLIB = ("0.10.2",)
NO_FLAWED_FUSION = "--xla_cpu_experimental_ynn_fusion_type="
DEVICES = Path("/dev")
DAY = 86400  # seconds
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"  # for the products of a CPU device
USER = "user"  # the compilation cache in a folder of the user's own
CACHE_LIMIT = 1 << 30  # bytes that it holds at most when a process begins
_EXACT = Event()  # set in the mode of `round_rows_alike`
_CONFIGURED: dict[str, object] = {}  # what `configure` was called with in this process
DETERMINISTIC = ("--xla_gpu_deterministic_ops=true",)  # the CPU is deterministic as it is


def configure(
    *,
    compilation_cache: str | os.PathLike | None = USER,
    deterministic: bool = False,
    cpu_devices: int = 1,
    exact: bool = False,
) -> None:
    """Set what XLA reads when it starts, and keep compiled programs from process to process.

    They are kept in the folder of `compilation_cache`: by default in one of the user's own (`user_cache`), unless JAX
    was told of another; nowhere with None. Several `cpu_devices` work side by side with a thread each, where one device
    would take all threads for every product: programs of many small operations are up to twice as fast, once their rows
    are dealt over the devices. With `exact` every row of a product is rounded alike, whatever stands beside it
    (`round_rows_alike`). Called again with the same settings it does nothing.
    """
    chosen: dict[str, object] = {"compilation_cache": compilation_cache, "deterministic": deterministic}
    chosen |= {"cpu_devices": cpu_devices, "exact": exact}
    if _backend_started():
        if chosen == _CONFIGURED:
            return
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
    if exact:
        round_rows_alike()
    _keep_compiled(compilation_cache)
    write_programs_whole()
    _CONFIGURED.update(chosen)


def round_rows_alike() -> None:
    """Round every row of a product alike in programs that are traced from now on (F7 and E3, to the bit).

    Without it the bits of a token may depend on its slot and on how many rows there are, and sampling and scoring
    differ by up to 1e-4.
    """
    _EXACT.set()


def is_exact() -> bool:
    """Whether every row of a product is rounded alike; read where a program is traced (`models.products`)."""
    return _EXACT.is_set()


def return_memory() -> None:
    """Give memory that was freed back to the system, of which glibc keeps what lies below its newest allocation.

    After a rollout of 64 slots of a model of 135 M parameters that is 2 GB, which its update then needs no more of.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if platform.system() == "Linux" else None
    if trim is not None:
        trim(0)


def processor() -> dict[str, str]:
    """Read what the system tells of the first processor; empty where it tells nothing."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def join(coordinator: str, num_processes: int, process_id: int, *, seconds: float = 60.0) -> None:
    """Become one of several processes whose devices are used as one set; all of them call this, after `configure`.

    `coordinator` is the HOST:PORT at which process 0 listens. From here on every process runs the same programs in the
    same order, and JAX ends them all where one is lost. What has not come together after so many seconds is refused.
    """
    if _backend_started():
        raise BadInput("JAX's backend has started without the other processes: call launch.join before the first array")
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise BadInput(f"coordinator {coordinator!r} is no address: give HOST:PORT of process 0")
    if not 0 <= process_id < num_processes:
        raise BadInput(f"process {process_id} of {num_processes} can't be: they are numbered from 0")
    if process_id == 0:
        _check_port(coordinator, int(port))
    failed: list[Exception] = []
    # JAX ends the process where its own time is over, and says nothing that helps; so it is never over before ours.
    given = (coordinator, num_processes, process_id, int(seconds) + DAY)
    work = Thread(target=_initialize, args=(*given, failed), daemon=True)
    work.start()
    work.join(seconds)
    if work.is_alive() or failed:
        why = f" ({str(failed[0])[:200]})" if failed else ""
        raise BadInput(
            f"process {process_id} of {num_processes} did not meet the others at {coordinator} within {seconds:g} s"
            f"{why}: start them all, each with its number and the address at which process 0 can be reached"
        )


def _check_port(coordinator: str, port: int) -> None:
    """Refuse a port that is taken, on which JAX's service would end the process."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        raise BadInput(
            f"coordinator {coordinator}: port {port} can't be used ({os.strerror(error.errno or 0)}): choose a free one"
        ) from None


def _initialize(coordinator: str, num_processes: int, process_id: int, seconds: int, failed: list[Exception]) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, initialization_timeout=seconds)
    except (RuntimeError, ValueError) as error:
        failed.append(error)


def cores(most: int = 8) -> int:
    """Say how many processor cores this process may use, and no more than `most`."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, most)


def add_flags(given: str, flags: list[str]) -> str:
    """The value of `XLA_FLAGS` with these flags added, those excepted whose names it has already."""
    names = {flag.partition("=")[0] for flag in given.split()}
    return " ".join([*given.split(), *(flag for flag in flags if flag.partition("=")[0] not in names)])


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


def user_cache() -> Path:
    """The folder below `$XDG_CACHE_HOME` or `~/.cache` where programs for processors like this one are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # A program runs on processors alone that have all instructions of the one that it was compiled for.
    kind = " ".join([platform.machine(), version("jaxlib"), processor().get("flags", platform.processor())])
    return Path(base) / "flowgrpo" / "programs" / hashlib.sha256(kind.encode()).hexdigest()[:12]


def limit_cache(folder: Path, limit: int) -> None:
    """Remove the files of a folder that were not used for longest until the others hold no more bytes than this."""
    files = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another process may be at it
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    excess = sum(size for _, size, _ in files) - limit
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size


def _keep_compiled(folder: str | os.PathLike | None) -> None:
    """Keep every compiled program in this folder, however small and quickly made."""
    import jax

    if folder == USER:
        if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
            return
        try:
            folder = make_folder(user_cache())
        except BadInput as error:
            warnings.warn(f"compiled programs are not kept: {error}", stacklevel=3)
            return
        limit_cache(folder.parent, CACHE_LIMIT)
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(make_folder(folder)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def write_programs_whole() -> None:
    """Let a compiled program appear in JAX's cache when it is whole.

    JAX writes it in its place and never again, so that of a process which is killed meanwhile a torn entry would stay,
    with a warning and a compilation in every run.
    """
    from jax._src.lru_cache import LRUCache  # no public setting does it

    if not isinstance(vars(LRUCache)["put"], partialmethod):
        LRUCache.put = partialmethod(_put_whole, LRUCache.put)  # type: ignore[method-assign]


def _put_whole(cache: Any, put: Callable[[Any, str, bytes], None], key: str, value: bytes) -> None:
    """Add an entry to a cache in a folder of this machine; to one elsewhere, or with a limit, JAX's own `put` does."""
    if cache.eviction_enabled or "://" in str(cache.path):
        put(cache, key, value)
    elif not (entry := Path(cache.path) / f"{key}-cache").exists():
        write_whole(entry, lambda beside: beside.write_bytes(value))


def _backend_started() -> bool:
    from jax._src import xla_bridge  # no public function says it without starting one

    return xla_bridge.backends_are_initialized()


def _on_tpu() -> bool:
    """Say whether a TPU may run this: its library parses `XLA_FLAGS` too, and may know other flags than jaxlib.

    The library alone says nothing: it is a compiler, too, which `planning.targets` uses on any machine.
    """
    import jax

    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    return "tpu" in platforms if platforms else find_spec("libtpu") is not None and _tpu_attached()


def _tpu_attached() -> bool:
    """Say whether this machine has a TPU: as a device on its bus, or as a file that a container was given."""
    from jax._src.hardware_utils import num_available_tpu_chips_and_device_id  # no public function says it

    chips, _ = num_available_tpu_chips_and_device_id()
    return chips > 0 or any(DEVICES.glob("accel[0-9]*")) or any((DEVICES / "vfio").glob("[0-9]*"))
