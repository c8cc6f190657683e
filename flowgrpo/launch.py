"""Setup before JAX's backend starts: XLA flags, compilation cache, several processes; and profiles of a run.

    configure(deterministic=True, cpu_devices=num_cores())
    join("10.0.0.1:9000", num_processes=2, process_id=0)
    with profile("runs/profile"):
        ...

Importing JAX doesn't start its backend; the first array or device does. After that XLA reads no flags, so `configure`
then raises. Flags that the user set in `XLA_FLAGS` are kept. Scripts that use names of `fg` need not call it:
`configure_by_default` does.
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
from threading import Event, Lock, Thread
from typing import Any

from flowgrpo.errors import BadInput
from flowgrpo.files import make_folder, write_atomic

# These versions fuse reductions on the CPU wrongly under large vmaps (jax issue 39103). The fusions DOT, ELTWISE and
# REDUCE all absorb a following reduction: all three are wrong. INDIVIDUAL_DOT, which absorbs nothing, is right, but
# sums a row in an order that depends on the other rows (F7). XLA aborts on an unknown flag, so only these versions get
# it.
FLAWED_JAXLIB = ("0.10.2",)
NO_FLAWED_FUSION = "--xla_cpu_experimental_ynn_fusion_type="
DEVICES = Path("/dev")
DAY = 86400  # seconds
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"  # for the products of a CPU device
USER = "user"  # the compilation cache in a folder of the user
CACHE_LIMIT = 1 << 30  # maximum bytes of the user's cache when a process starts
_EXACT = Event()  # set by `round_rows_equally`
_CONFIGURED: dict[str, object] = {}  # arguments of the last `configure` in this process
BY_DEFAULT = "FLOWGRPO_CONFIGURE"  # environment variable: 0 leaves XLA and the cache as they are
_DEFAULT_TAKEN = Event()  # `configure_by_default` was called
_DEFAULT_LOCK = Lock()
DETERMINISTIC = ("--xla_gpu_deterministic_ops=true",)  # the CPU is deterministic without a flag


def configure(
    *,
    compilation_cache: str | os.PathLike | None = USER,
    deterministic: bool = False,
    cpu_devices: int = 1,
    exact: bool = False,
) -> None:
    """Set what XLA reads when it starts, and the persistent compilation cache.

    Calling it again with the same settings does nothing.

    Args:
        compilation_cache: folder of compiled programs; by default one of the user (`user_cache_folder`), unless JAX is
            configured with another; None: no cache.
        deterministic: whether GPU operations are deterministic.
        cpu_devices: number of CPU devices, which run concurrently with one thread each; a single device uses all
            threads for each product. Programs of many small operations are up to twice as fast when their rows are
            sharded over the devices.
        exact: whether every row of a product is rounded equally, whatever the other rows are (`round_rows_equally`).
    """
    settings: dict[str, object] = {
        "compilation_cache": compilation_cache,
        "deterministic": deterministic,
        "cpu_devices": cpu_devices,
        "exact": exact,
    }
    if _backend_started():
        if settings == _CONFIGURED:
            return
        raise BadInput(
            "JAX's backend has started and reads no more settings: call launch.configure before the first "
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
        round_rows_equally()
    _set_compilation_cache(compilation_cache)
    write_cache_atomically()
    _CONFIGURED.update(settings)


def configure_by_default() -> None:
    """`configure()` for a process that didn't call it, once; called when the first name of `fg` that needs JAX is used.

    A `configure(...)` before it wins, as does one after it until the backend starts. Nothing is set under
    FLOWGRPO_CONFIGURE=0. If the user has started the backend already, only the compilation cache can be set, and a
    flawed jaxlib without its flag is warned of.
    """
    if _DEFAULT_TAKEN.is_set():
        return
    with _DEFAULT_LOCK:
        if _DEFAULT_TAKEN.is_set() or _CONFIGURED or os.environ.get(BY_DEFAULT) == "0":
            _DEFAULT_TAKEN.set()
            return
        if not _backend_started():
            configure()
        else:
            _set_compilation_cache(USER)
            write_cache_atomically()
            _warn_of_flawed_fusion()
        _DEFAULT_TAKEN.set()


def _warn_of_flawed_fusion() -> None:
    """Warn if sums on a CPU may be wrong, since the backend started without the flag."""
    import jax

    is_flawed = version("jaxlib") in FLAWED_JAXLIB and jax.default_backend() == "cpu"
    if is_flawed and NO_FLAWED_FUSION.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        warnings.warn(
            f"JAX's backend started before flowgrpo configured it, so sums in a large vmap may be wrong with jaxlib "
            f"{version('jaxlib')} on a CPU: use a name of flowgrpo before the first array, or set "
            f"XLA_FLAGS={NO_FLAWED_FUSION}",
            stacklevel=4,
        )


def round_rows_equally() -> None:
    """Round every row of a product equally in programs traced from now on (F7 and E3, to the bit).

    Without it the bits of a token may depend on its slot and on the number of rows, and sampling and scoring differ by
    up to 1e-4.
    """
    _EXACT.set()


def is_exact() -> bool:
    """Whether every row of a product is rounded equally; read while tracing (`models.products`)."""
    return _EXACT.is_set()


def trim_memory() -> None:
    """Return freed memory to the system; glibc keeps what is below its newest allocation.

    After a rollout of 64 slots of a model of 135 M parameters that is 2 GB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if platform.system() == "Linux" else None
    if trim is not None:
        trim(0)


def cpu_info() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty if there is no such file."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def join(coordinator: str, num_processes: int, process_id: int, *, timeout: float = 60.0) -> None:
    """Join several processes whose devices are used as one set; each of them calls this, after `configure`.

    From then on every process runs the same programs in the same order, and JAX ends them all if one is lost.

    Args:
        coordinator: the HOST:PORT at which process 0 listens.
        num_processes: number of processes.
        process_id: number of this one, from 0.
        timeout: seconds after which `BadInput` is raised if not all have joined.
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

    def initialize() -> None:
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            # After its own timeout JAX ends the process without a helpful message; so that one is never the first.
            jax.distributed.initialize(
                coordinator, num_processes, process_id, initialization_timeout=int(timeout) + DAY
            )
        except (RuntimeError, ValueError) as error:
            failed.append(error)

    thread = Thread(target=initialize, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive() or failed:
        reason = f" ({str(failed[0])[:200]})" if failed else ""
        raise BadInput(
            f"process {process_id} of {num_processes} did not meet the others at {coordinator} within {timeout:g} s"
            f"{reason}: start them all, each with its number and the address at which process 0 can be reached"
        )


def _check_port(coordinator: str, port: int) -> None:
    """Raise `BadInput` for a port in use, on which JAX's service would end the process."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        raise BadInput(
            f"coordinator {coordinator}: port {port} can't be used ({os.strerror(error.errno or 0)}): choose a free one"
        ) from None


def num_cores(limit: int = 8) -> int:
    """Number of processor cores that this process may use, at most `limit`."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, limit)


def add_flags(value: str, flags: list[str]) -> str:
    """The value of `XLA_FLAGS` with these flags added, except those that it already has."""
    names = {flag.partition("=")[0] for flag in value.split()}
    return " ".join([*value.split(), *(flag for flag in flags if flag.partition("=")[0] not in names)])


@contextmanager
def profile(folder: str | os.PathLike | None) -> Iterator[None]:
    """Trace what runs in the block, for XProf or Perfetto (`*.trace.json.gz`); nothing if `folder` is None."""
    if folder is None:
        yield
        return
    import jax

    with jax.profiler.trace(make_folder(folder)):
        yield


def _check_deterministic(user_flags: str) -> None:
    """Raise `BadInput` if the user's own flags contradict deterministic runs."""
    names = {flag.partition("=")[0] for flag in DETERMINISTIC}
    for flag in user_flags.split():
        name, _, value = flag.partition("=")
        if name in names and value.lower() in ("false", "0"):
            raise BadInput(f"XLA_FLAGS has {flag}, which contradicts deterministic runs: leave out one of them")


def _set_cpu_devices(count: int) -> None:
    """Set the number of CPU devices, with synchronous dispatch: 32 programs in flight would hold all threads."""
    import jax

    jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def user_cache_folder() -> Path:
    """The folder below `$XDG_CACHE_HOME` or `~/.cache` with the compiled programs for processors like this one."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # A program runs only on processors with all instructions of the one that it was compiled for.
    kind = " ".join([platform.machine(), version("jaxlib"), cpu_info().get("flags", platform.processor())])
    return Path(base) / "flowgrpo" / "programs" / hashlib.sha256(kind.encode()).hexdigest()[:12]


def limit_cache(folder: Path, limit: int) -> None:
    """Remove the least recently used files of a folder until the others have at most `limit` bytes."""
    files = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another process may remove it
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    excess = sum(size for _, size, _ in files) - limit
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size


def _set_compilation_cache(folder: str | os.PathLike | None) -> None:
    """Cache every compiled program in this folder, however small and quick to compile."""
    import jax

    if folder == USER:
        if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
            return
        try:
            folder = make_folder(user_cache_folder())
        except BadInput as error:
            warnings.warn(f"compiled programs are not kept: {error}", stacklevel=3)
            return
        limit_cache(folder.parent, CACHE_LIMIT)
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(make_folder(folder)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def write_cache_atomically() -> None:
    """Make JAX's compilation cache write its entries atomically.

    JAX writes an entry in place and never again, so a process killed meanwhile would leave a torn entry, with a warning
    and a compilation in every later run.
    """
    from jax._src.lru_cache import LRUCache  # no public setting does it

    if not isinstance(vars(LRUCache)["put"], partialmethod):
        LRUCache.put = partialmethod(_put_atomically, LRUCache.put)  # type: ignore[method-assign]


def _put_atomically(cache: Any, put: Callable[[Any, str, bytes], None], key: str, value: bytes) -> None:
    """Add an entry to a cache in a local folder; a remote one, or one with a limit, uses JAX's own `put`."""
    if cache.eviction_enabled or "://" in str(cache.path):
        put(cache, key, value)
    elif not (entry := Path(cache.path) / f"{key}-cache").exists():
        write_atomic(entry, lambda path: path.write_bytes(value))


def _backend_started() -> bool:
    from jax._src import xla_bridge  # the public functions would start the backend

    return xla_bridge.backends_are_initialized()


def _on_tpu() -> bool:
    """Whether a TPU may be used: its library parses `XLA_FLAGS` too, and may know other flags than jaxlib.

    An installed library is not enough: it is also a compiler, which `planning.targets` uses on any machine.
    """
    import jax

    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    return "tpu" in platforms if platforms else find_spec("libtpu") is not None and _tpu_attached()


def _tpu_attached() -> bool:
    """Whether this machine has a TPU, as a device on its bus or as a device file of a container."""
    from jax._src.hardware_utils import num_available_tpu_chips_and_device_id  # there is no public function

    chips, _ = num_available_tpu_chips_and_device_id()
    return chips > 0 or any(DEVICES.glob("accel[0-9]*")) or any((DEVICES / "vfio").glob("[0-9]*"))
