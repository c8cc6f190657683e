"""Fixtures and helpers shared by the tests that run experiments as commands."""

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest
from commands import ROOT, run_module, xla_flags

EXPERIMENTS = ROOT / "experiments"


@pytest.fixture(autouse=True, scope="module")
def own_devices(request):
    """Give commands the devices that they ask for, and not the tests' eight; they find the checkout from any folder."""
    assert jax.device_count() == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("XLA_FLAGS", xla_flags(getattr(request.module, "OPTIMIZATION_LEVEL", 0)))
        yield


@pytest.fixture(scope="session")
def command():
    """`run_command`, which runs an experiment and asserts that its status is 0 unless `check=False`."""
    return run_command


def run_command(module: str, *arguments: str, check: bool = True, **more):
    done = run_module(f"experiments.{module}", *arguments, **more)
    assert not check or done.returncode == 0, done.stderr
    return done


def check_refused(done, said: str, status: int = 1) -> None:
    """Assert that a command ended with this status and a sentence that contains `said`, and printed no result."""
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    sentence = done.stderr.strip().splitlines()[-1]
    assert sentence.startswith("experiments.")
    assert said in sentence
    assert "Traceback" not in done.stderr


def with_flags(flags: Sequence[str], *others: str) -> list[str]:
    """A command line in which `others` replace flags of the same names: none may be given twice."""
    names = {flag.partition("=")[0] for flag in others}
    return [flag for flag in flags if flag.partition("=")[0] not in names] + [*others]


def result(folder: Path) -> dict:
    """The result of a finished run."""
    return json.loads((folder / "result.json").read_text())


def last_line(done) -> dict:
    """The JSON that a command prints last."""
    return json.loads(done.stdout.splitlines()[-1])


def metrics(folder: Path, phase: str) -> list[dict]:
    """The metrics of a phase, line by line."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["phase"] == phase]
