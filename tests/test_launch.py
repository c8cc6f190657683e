"""Settings from before the backend starts: XLA's flags, the compilation cache, profiles; and when it is too late."""

import os
import platform
import socket
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import run_module
from jax._src import hardware_utils
from jax._src.lru_cache import LRUCache

from flowgrpo import launch
from flowgrpo.types import BadInput

STARTED = launch._backend_started


@pytest.fixture
def early(monkeypatch):
    """As if no backend had started; it has, with the tests' own flags."""
    jax.devices()
    monkeypatch.setattr(launch, "_backend_started", lambda: False)
    monkeypatch.setattr(launch, "_CONFIGURED", {})
    monkeypatch.setenv("XLA_FLAGS", "")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(program, XLA_FLAGS)` runs a Python program in a process of its own, in which JAX is imported already."""

    def start(program: str, flags: str = ""):
        monkeypatch.setenv("XLA_FLAGS", flags)
        (tmp_path / "program.py").write_text(program)
        return run_module("program", cwd=tmp_path)

    return start


def test_flags_are_added_and_never_override():
    assert launch.add_flags("", ["--a=1", "--b="]) == "--a=1 --b="
    assert launch.add_flags("--c  --a=2", ["--a=1", "--b="]) == "--c --a=2 --b="
    assert launch.add_flags("--ab=3", ["--a=1"]) == "--ab=3 --a=1"  # a name that begins alike is another name


def test_flags_are_set_after_jax_is_imported_and_are_read(run):
    """The users' own flag, with JAX imported first: three devices, and the flawed fusions off."""
    own = "--xla_force_host_platform_device_count=3"
    program = "import os, jax; from flowgrpo import launch; launch.configure(); "
    done = run(program + "print(len(jax.devices()), os.environ['XLA_FLAGS'])", own)
    assert done.stdout.split() == ["3", own, launch.NO_FLAWED_FUSION], done.stderr


@pytest.mark.parametrize("kinds", [None, "", "INDIVIDUAL_DOT", "DOT", "ELTWISE", "REDUCE"])
def test_fusions_that_absorb_a_reduction_are_wrong_and_off(kinds):
    """Sum squares of 32,769 vmapped products (jax issue 39103): right as configured, and with products fused alone."""
    rows = 32_769
    wanted_r = np.arange(rows, dtype=np.float32) ** 2
    x_r3 = jnp.stack([jnp.sqrt(wanted_r), jnp.zeros(rows), jnp.zeros(rows)], axis=1)
    norms = jax.jit(jax.vmap(lambda x: jnp.sum((jnp.eye(3) @ x) ** 2)))
    name = launch.NO_FLAWED_FUSION.strip("-=")
    options = None if kinds is None else {name: f"LIBRARY_FUSION_TYPE_{kinds}" if kinds else ""}
    right = np.array_equal(norms.lower(x_r3).compile(options)(x_r3), wanted_r)
    assert right == (kinds in (None, "", "INDIVIDUAL_DOT") or version("jaxlib") not in launch.FLAWED_JAXLIB)


@pytest.mark.usefixtures("early")
def test_unknown_jaxlib_versions_get_no_flags(monkeypatch):
    monkeypatch.setattr(launch, "version", lambda _: "0.99.0")
    launch.configure()
    assert os.environ["XLA_FLAGS"] == ""
    launch.configure(deterministic=True)
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=true"
    for value in ("false", "0"):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_deterministic_ops={value}")
        with pytest.raises(BadInput, match=f"XLA_FLAGS has --xla_gpu_deterministic_ops={value}, which contradicts"):
            launch.configure(deterministic=True)
        launch.configure()


@pytest.mark.usefixtures("early")
def test_late_configuration_raises_unless_unchanged(monkeypatch):
    launch.configure()
    jax.devices()
    monkeypatch.setattr(launch, "_backend_started", STARTED)
    launch.configure()
    with pytest.raises(BadInput, match=r"backend has started.*call launch\.configure before"):
        launch.configure(deterministic=True)
    with pytest.raises(BadInput, match=r"call launch\.join before the first array"):
        launch.join("127.0.0.1:9000", 2, 0)


BY_DEFAULT = """
import os, sys
import flowgrpo as fg
from flowgrpo import launch
from flowgrpo.envs import lookup
import jax
jax.config.update("jax_compilation_cache_dir", None)
jax.config.update("jax_platforms", "cpu")

def settings():
    folder = jax.config.jax_compilation_cache_dir
    return os.environ["XLA_FLAGS"], folder and folder == str(launch.user_cache_folder())

print(settings())
fg.lookup
print(settings())
fg.launch.configure(cpu_devices=2)
from flowgrpo import flow_grpo
print(len(jax.devices()), settings())
"""


def test_the_first_name_of_the_package_configures_jax(run, tmp_path, monkeypatch):
    """Not an import from a folder; and `configure` with other settings may follow until the backend starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run(BY_DEFAULT)
    flag = launch.NO_FLAWED_FUSION
    assert done.stdout.splitlines() == [
        "('', None)",
        f"('{flag}', True)",
        f"2 ('{flag} {launch.ONE_THREAD}', True)",
    ], done.stderr


@pytest.fixture
def first(early, monkeypatch):  # noqa: ARG001
    """As if no name of the package had been used, in an environment without settings."""
    monkeypatch.setattr(launch, "_DEFAULT_TAKEN", Event())
    monkeypatch.delenv(launch.BY_DEFAULT, raising=False)
    folders = []
    monkeypatch.setattr(launch, "_set_compilation_cache", folders.append)
    return folders


def test_default_configuration_is_once_and_leaves_what_was_chosen(first, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{launch.NO_FLAWED_FUSION}DOT")
    for _ in range(2):
        launch.configure_by_default()
    assert (os.environ["XLA_FLAGS"], first) == (f"{launch.NO_FLAWED_FUSION}DOT", [launch.USER])


@pytest.mark.parametrize("how", ["environment", "configure"])
def test_default_configuration_does_nothing_if_refused_or_done(first, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv(launch.BY_DEFAULT, "0")
    else:
        launch.configure(compilation_cache=None)
    flags = os.environ["XLA_FLAGS"]
    launch.configure_by_default()
    assert (os.environ["XLA_FLAGS"], first) == (flags, [] if how == "environment" else [None])


@pytest.mark.parametrize(
    ("flags", "jaxlib", "warns"),
    [("", "flawed", True), (f"--a {launch.NO_FLAWED_FUSION}DOT", "flawed", False), ("", "0.99.0", False)],
)
def test_a_started_backend_gets_a_cache_and_a_warning_if_its_jaxlib_is_flawed(
    first, monkeypatch, recwarn, flags, jaxlib, warns
):
    monkeypatch.setattr(launch, "_backend_started", STARTED)
    monkeypatch.setattr(launch, "version", lambda _: launch.FLAWED_JAXLIB[0] if jaxlib == "flawed" else jaxlib)
    monkeypatch.setenv("XLA_FLAGS", flags)
    for _ in range(2):
        launch.configure_by_default()
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == warns
    assert all(f"set XLA_FLAGS={launch.NO_FLAWED_FUSION}" in message for message in messages)
    assert (os.environ["XLA_FLAGS"], first) == (flags, [launch.USER])


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("exact", [True, False])
def test_exactness_is_opt_in(monkeypatch, exact):
    monkeypatch.setattr(launch, "_EXACT", Event())
    launch.configure(exact=exact)
    assert launch.is_exact() == exact


def test_profiles_are_written_to_the_folder(tmp_path):
    with launch.profile(None):
        pass
    with launch.profile(tmp_path / "trace"):
        jax.numpy.ones(3).block_until_ready()
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


@pytest.mark.usefixtures("early")
def test_programs_are_cached_for_the_user_unless_jax_is_configured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = jax.config.jax_compilation_cache_dir
    try:
        for given, kept in ((None, str(launch.user_cache_folder())), ("told", "told")):
            jax.config.update("jax_compilation_cache_dir", given)
            launch.configure()
            assert jax.config.jax_compilation_cache_dir == kept
        launch.configure(compilation_cache=None)
        assert jax.config.jax_compilation_cache_dir is None
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.warns(UserWarning, match="compiled programs are not kept: .*file"):
            launch.configure()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", told)


def test_different_processors_have_different_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = []
    for flags in ("fpu avx2", "fpu avx2 avx512f", "fpu avx2"):
        monkeypatch.setattr(launch, "cpu_info", lambda flags=flags: {"flags": flags})
        folders.append(launch.user_cache_folder())
    assert folders[0] == folders[2] != folders[1]
    assert all(folder.is_relative_to(tmp_path / "flowgrpo") for folder in folders)


def test_a_large_cache_drops_the_least_recently_used(tmp_path):
    for age, name in enumerate(["newest", "newer", "older", "oldest"]):
        path = tmp_path / "kind" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (10**9 - age, 10**9 - age))
    for limit, left in ((400, 4), (250, 2), (199, 1)):
        launch.limit_cache(tmp_path, limit)
        names = {path.name for path in (tmp_path / "kind").iterdir()}
        assert names == set(["newest", "newer", "older", "oldest"][:left])


SEVERAL_DEVICES = """
import os
from pathlib import Path
from threading import Event
from flowgrpo import launch
launch.configure(cpu_devices=2, compilation_cache="cache", deterministic=True)
import jax, jax.numpy as jnp
from flowgrpo.parallel import row_sharding
mesh = row_sharding.data_mesh()

def add_up(shared, rows, wanted_r):
    rows = jax.lax.fori_loop(0, 50, lambda _, x: jnp.tanh(x @ shared), rows)
    return (rows * wanted_r[:, None]).sum(0), jnp.zeros(())

draw = jax.jit(lambda key: jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ x), jax.random.normal(key, (64, 64))))
added = lambda shared, rows: row_sharding.sum_rows(add_up, mesh, shared, rows, jnp.full(64, True))[0]
step = jax.jit(lambda shared, rows: shared + 1e-9 * added(shared, rows))
shared = row_sharding.replicate(jnp.eye(64), mesh)
for index in range(100):
    shared = step(shared, draw(jax.random.fold_in(jax.random.key(0), index)))
print(jax.device_count(), launch.ONE_THREAD in os.environ["XLA_FLAGS"], jnp.isfinite(shared).all())
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
jax.clear_caches()
draw(jax.random.key(0))
print(any(Path("cache").iterdir()), len(hits) > 0)
"""


def test_cpu_devices_run_concurrently_and_programs_are_cached(run):
    """Far more programs than the 32 that a device takes ahead: dispatched without waiting, they stand still."""
    done = run(SEVERAL_DEVICES)
    assert done.stdout.split() == ["2", "True", "True", "True", "True"], done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("here", 2, 0), r"coordinator 'here' is no address: give HOST:PORT of process 0"),
        (("here:", 2, 0), "'here:' is no address"),
        (("here:99999", 2, 0), "'here:99999' is no address"),
        (("here:9000", 2, 2), "process 2 of 2 can't be: they are numbered from 0"),
        (("here:9000", 0, 0), "process 0 of 0 can't be"),
        (("127.0.0.1:{taken}", 2, 0), r"port \d+ can't be used \(Address already in use\): choose a free one"),
    ],
)
@pytest.mark.usefixtures("early")
def test_impossible_process_settings_are_refused(given, said):
    with socket.create_server(("", 0)) as taken, pytest.raises(BadInput, match=said):
        launch.join(given[0].format(taken=taken.getsockname()[1]), *given[1:])


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_without_the_others_times_out(run, number):
    """As process 0 whose companion never starts, and as the companion of a process 0 that never starts."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    done = run(f"""
import sys
from flowgrpo import launch
launch.configure()
try:
    launch.join("127.0.0.1:{port}", 2, {number}, timeout=1)
except launch.BadInput as error:
    sys.exit(str(error))""")
    assert done.returncode == 1
    assert f"process {number} of 2 did not meet the others at 127.0.0.1:{port} within 1 s: start them" in done.stderr


class Killed(BaseException):
    pass


def test_cache_entries_are_atomic_even_if_killed(tmp_path, monkeypatch):
    """JAX's own cache would keep the half of it for ever, and is as it was where it removes what is not used."""
    launch.write_cache_atomically()
    cache, write = LRUCache(str(tmp_path), max_size=-1), Path.write_bytes

    def torn(path: Path, data: bytes) -> None:
        write(path, data[:3])
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", torn)
        with pytest.raises(Killed):
            cache.put("program", b"compiled")
    assert cache.get("program") is None
    for value in (b"compiled", b"again"):
        cache.put("program", value)
        assert cache.get("program") == b"compiled"
    limited = LRUCache(str(tmp_path / "limited"), max_size=10)
    for number in range(3):
        limited.put(f"{number}", b"12345")
    assert [limited.get(f"{number}") for number in range(3)] == [None, b"12345", b"12345"]


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize(
    ("file", "attached"), [(None, False), ("accel0", True), ("vfio/0", True), ("vfio/vfio", False)]
)
def test_libtpu_alone_is_no_tpu(monkeypatch, tmp_path, file, attached):
    """With the library alone XLA's flags are those of a CPU; with a TPU they may be unknown to it."""
    if file is not None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(launch, "DEVICES", tmp_path)
    monkeypatch.setattr(launch, "find_spec", lambda _: object())
    monkeypatch.setattr(hardware_utils, "num_available_tpu_chips_and_device_id", lambda: (0, None))
    monkeypatch.setattr(launch, "version", lambda _: launch.FLAWED_JAXLIB[0])
    with jax_platforms(None):
        launch.configure()
    assert (os.environ["XLA_FLAGS"] == "") == attached
    monkeypatch.setattr(hardware_utils, "num_available_tpu_chips_and_device_id", lambda: (1, None))
    with jax_platforms(None):
        assert launch._on_tpu()
    with jax_platforms("cpu"):
        assert not launch._on_tpu()


@contextmanager
def jax_platforms(names: str | None):
    """As if JAX had been told of these platforms, or of none; its backends have started."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", names)
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep nothing")
def test_freed_memory_is_returned_to_the_system():
    blocks = [bytearray(100_000) for _ in range(2000)]  # each below what glibc maps on its own
    last = blocks.pop()  # so that nothing free lies at the end of the heap
    del blocks
    kept = resident_bytes()
    launch.trim_memory()
    assert resident_bytes() < kept - 150e6
    assert len(last) == 100_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
