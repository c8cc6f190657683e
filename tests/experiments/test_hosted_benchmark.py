"""The benchmark of hosted rollouts runs, and prints a table and one JSON line; its figures are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parent.parent.parent
COMMAND = [
    sys.executable,
    "-m",
    "experiments.benchmarks.hosted",
    "--tokens=3",
    "--prompt=9",
    "--slots=4",
    "--repeats=1",
]


@pytest.mark.parametrize("appends", [True, False])
def test_hosted_benchmark_runs(appends):
    command = [*COMMAND, "--trajectories=2,5", "--latency=0,0.1", f"--appends={appends}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["benchmark"], result["appends"], result["slots"]) == ("hosted", appends, 4)
    assert [(row["trajectories"], row["latency"]) for row in result["rows"]] == [(2, 0), (5, 0), (2, 0.1), (5, 0.1)]
    for row in result["rows"]:
        assert row["rollout_seconds"] >= row["tool_seconds"] == pytest.approx(3 * row["latency"])
        assert min(row["decoding_seconds"], row["over_larger"], row["tokens_per_second"]) > 0


@pytest.mark.parametrize("flag", ["--latency=soon", "--latency=-1", "--trajectories=0"])
def test_flags_that_are_no_numbers_are_refused_in_one_sentence(flag):
    done = subprocess.run([*COMMAND, flag], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (1, 1)
