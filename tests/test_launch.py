"""What is set before the backend starts: XLA's flags, the compilation cache, profiles; and when it is too late."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from flowgrpo import launch
from flowgrpo.types import BadInput

ROOT = Path(__file__).parent.parent


def run(program: str, **environment: str) -> str:
    """What a Python program prints, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=clean | environment, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_flags_are_added_and_never_override():
    assert launch.add_flags("", ["--a=1", "--b="]) == "--a=1 --b="
    assert launch.add_flags("--c  --a=2", ["--a=1", "--b="]) == "--c --a=2 --b="
    assert launch.add_flags("--ab=3", ["--a=1"]) == "--ab=3 --a=1"  # a name that begins alike is another name


def test_flags_are_set_after_jax_is_imported_and_are_read():
    """The users' own flag, with JAX imported first: three devices, and the flawed fusions off."""
    program = """
import os, jax
from flowgrpo import launch
launch.configure()
print(len(jax.devices()), os.environ["XLA_FLAGS"])"""
    printed = run(program, XLA_FLAGS="--xla_force_host_platform_device_count=3", JAX_PLATFORMS="cpu").split()
    assert printed == ["3", "--xla_force_host_platform_device_count=3", launch.NO_FLAWED_FUSION]


def test_an_unknown_version_is_given_no_flag_that_it_may_not_know(monkeypatch):
    monkeypatch.setattr(launch, "_backend_started", lambda: False)
    monkeypatch.setattr(launch, "version", lambda _: "0.99.0")
    monkeypatch.setenv("XLA_FLAGS", "")
    launch.configure()
    assert os.environ["XLA_FLAGS"] == ""
    launch.configure(deterministic=True)
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=true"


@pytest.mark.parametrize("value", ["false", "0"])
def test_deterministic_does_not_promise_what_the_users_flags_contradict(monkeypatch, value):
    monkeypatch.setattr(launch, "_backend_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_deterministic_ops={value}")
    with pytest.raises(BadInput, match=f"XLA_FLAGS has --xla_gpu_deterministic_ops={value}, which contradicts"):
        launch.configure(deterministic=True)
    launch.configure()


def test_it_is_said_when_it_is_too_late(monkeypatch):
    monkeypatch.setattr(launch, "_CONFIGURED", {})
    jax.devices()
    with pytest.raises(BadInput, match=r"backend has started.*call launch\.configure before"):
        launch.configure()


def test_the_same_settings_once_more_are_no_news(monkeypatch):
    monkeypatch.setattr(launch, "_CONFIGURED", {})
    monkeypatch.setenv("XLA_FLAGS", "")
    with monkeypatch.context() as before:
        before.setattr(launch, "_backend_started", lambda: False)
        launch.configure()
    jax.devices()
    launch.configure()
    with pytest.raises(BadInput, match="backend has started"):
        launch.configure(deterministic=True)


@pytest.mark.slow
def test_programs_are_kept_and_found_again(tmp_path):
    """Every program of the first process is found by the second, whose results are the same."""
    program = f"""
import jax
from flowgrpo import launch
launch.configure(compilation_cache={str(tmp_path / "cache")!r}, deterministic=True)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
print(jax.jit(lambda x: x @ x)(jax.numpy.ones((3, 3))).sum(), len(hits) > 0)"""
    assert run(program, JAX_PLATFORMS="cpu") == "27.0 False"
    assert list((tmp_path / "cache").iterdir())
    assert run(program, JAX_PLATFORMS="cpu") == "27.0 True"


def test_a_profile_is_written_where_it_is_asked_for(tmp_path):
    with launch.profile(None):
        pass
    with launch.profile(tmp_path / "trace"):
        jax.numpy.ones(3).block_until_ready()
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


def test_cpu_devices_work_side_by_side_with_a_thread_each():
    program = """
import os
from flowgrpo import launch
launch.configure(cpu_devices=3)
import jax
print(jax.device_count(), "--xla_cpu_multi_thread_eigen=false" in os.environ["XLA_FLAGS"])"""
    assert run(program) == "3 True"


MANY_PROGRAMS = """
from flowgrpo import launch
launch.configure(cpu_devices=2)
import jax, jax.numpy as jnp
from flowgrpo import spread
mesh = spread.data_mesh()

def add_up(shared, rows, wanted_r):
    rows = jax.lax.fori_loop(0, 50, lambda _, x: jnp.tanh(x @ shared), rows)
    return (rows * wanted_r[:, None]).sum(0), jnp.zeros(())

draw = jax.jit(lambda key: jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ x), jax.random.normal(key, (64, 64))))
step = jax.jit(lambda shared, rows: shared + 1e-9 * spread.sum_rows(add_up, mesh, shared, rows, jnp.full(64, True))[0])
shared = spread.share(jnp.eye(64), mesh)
for index in range(600):
    shared = step(shared, draw(jax.random.fold_in(jax.random.key(0), index)))
print(jnp.isfinite(shared).all())
"""


@pytest.mark.slow
def test_many_programs_under_way_do_not_wait_for_each_other():
    """Far more than the 32 a device takes ahead: dispatched without waiting, they stand still."""
    assert run(MANY_PROGRAMS, JAX_PLATFORMS="cpu") == "True"


# Several processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("here", 2, 0), r"coordinator 'here' is no address: give HOST:PORT of process 0"),
        (("here:", 2, 0), "'here:' is no address"),
        (("here:99999", 2, 0), "'here:99999' is no address"),
        (("here:9000", 2, 2), "process 2 of 2 can't be: they are numbered from 0"),
        (("here:9000", 0, 0), "process 0 of 0 can't be"),
    ],
)
def test_processes_that_can_not_meet_are_refused(monkeypatch, given, said):
    monkeypatch.setattr(launch, "_backend_started", lambda: False)
    with pytest.raises(BadInput, match=said):
        launch.join(*given)


def test_a_port_that_is_taken_is_one_sentence(monkeypatch):
    monkeypatch.setattr(launch, "_backend_started", lambda: False)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=rf"port {port} can't be used \(Address already in use\): choose a free one"):
            launch.join(f"127.0.0.1:{port}", 2, 0)


def test_processes_join_before_the_backend_starts():
    jax.devices()
    with pytest.raises(BadInput, match=r"call launch\.join before the first array"):
        launch.join("127.0.0.1:9000", 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_finds_nobody_ends_with_one_sentence(number):
    """As process 0 whose companion never starts, and as the companion of a process 0 that never starts."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    program = f"""
import sys
from flowgrpo import launch
launch.configure()
try:
    launch.join("127.0.0.1:{port}", 2, {number}, seconds=1)
except launch.BadInput as error:
    sys.exit(str(error).replace("{port}", "PORT"))"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)
    assert done.returncode == 1
    assert f"process {number} of 2 did not meet the others at 127.0.0.1:PORT within 1 s: start them all" in done.stderr
