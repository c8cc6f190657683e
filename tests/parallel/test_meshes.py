"""F3 over devices: two updates on fixed batches end at the same parameters, by one device, by many, by two processes.

The work is that of `experiments.benchmarks.meshes`, which prints the measured distances.
"""

import json
import os
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import commands
import jax
import pytest

from experiments.benchmarks import meshes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
SECONDS = 420  # for two processes that compile on a loaded machine
BOUND = 1e-4


@cache
def fixed():
    """(parameters before, batches, what one device makes of them)."""
    before = jax.device_get(meshes.start_state().params)
    batches = meshes.fixed_batches(before, 2)
    return before, batches, meshes.on_one(batches)


def distance(actual: meshes.Result) -> float:
    before, _, expected = fixed()
    return meshes.relative_distance(actual[0], expected[0], before)


@pytest.mark.parametrize("sizes", ["data=2,fsdp=2,tensor=2"])
def test_F3_a_mesh_of_eight_devices_is_the_same(sizes):
    """And a device holds less of the state if parameters are sharded."""
    actual = meshes.on_mesh(fixed()[1], sizes)
    assert 0 < distance(actual) <= BOUND
    assert actual[2] / fixed()[2][2] < 0.4


def test_F3_two_processes_of_four_devices_are_the_same():
    """Rows over both, and parameters too; each process compares with one device of its own."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    flags = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2", "--cpu_devices=4"]
    flags += ["--updates=2", "--mesh=data:2/fsdp:2/tensor:2"]
    for printed in run_together([[*flags, f"--process_id={number}"] for number in range(2)]):
        (line,) = [line for line in printed.splitlines() if line.startswith("{")]
        actual = json.loads(line)
        assert (actual["devices"], actual["updates"]) == (8, 2)
        assert [row["mesh"] for row in actual["rows"]] == ["one device", "data=2,fsdp=2,tensor=2"]
        assert all(0 < row["apart"] <= BOUND for row in actual["rows"][1:])


def run_together(started: list[list[str]]) -> list[str]:
    """Run a process for each list of flags, and return what each prints; all are killed when the time is over."""
    clean = os.environ | {"XLA_FLAGS": commands.xla_flags()}
    module = [sys.executable, "-m", "experiments.benchmarks.meshes"]
    settings = {"cwd": ROOT, "env": clean, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen([*module, *command], **settings) for command in started]
    end, printed = time.monotonic() + SECONDS, []
    for process in running:
        try:
            printed.append(process.communicate(timeout=max(end - time.monotonic(), 1))[0])
        except subprocess.TimeoutExpired:
            for other in running:
                other.kill()
            output = "\n".join(other.communicate()[0] or "" for other in running)
            pytest.fail(f"not finished after {SECONDS} s:\n{output[-4000:]}")
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(printed)[-4000:]
    return printed
