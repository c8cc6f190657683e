"""What the tests of experiments as commands share."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def own_devices():
    """Commands have the devices that they ask for, as everywhere, and not those of the tests, which have begun."""
    assert jax.device_count() == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS")
        yield


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs an experiment; what one has compiled, the next finds."""
    return partial(run_command, cache=tmp_path_factory.mktemp("compiled"))


def run_command(
    module: str, *arguments: str, cache: Path, check: bool = True, timeout: float = 500
) -> subprocess.CompletedProcess:
    program = [sys.executable, "-m", f"experiments.{module}", f"--compilation_cache={cache}", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=timeout)
    assert not check or done.returncode == 0, done.stderr
    return done
