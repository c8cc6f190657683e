"""What the tests of experiments as commands share."""

from functools import partial
from pathlib import Path

import jax
import pytest
from commands import run_module


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


def run_command(module: str, *arguments: str, cache: Path, check: bool = True, timeout: float = 500):
    done = run_module(f"experiments.{module}", f"--compilation_cache={cache}", *arguments, timeout=timeout)
    assert not check or done.returncode == 0, done.stderr
    return done
