"""Benchmarks run, and print a table and one JSON line; their figures are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_packing_benchmark_runs():
    command = [sys.executable, "-m", "experiments.benchmarks.packing", "--sizes=200,400", "--repeats=1", "--ranks=2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["trajectories"] for row in result["rows"]] == [200, 400]
    assert all(0.9 < row["fill"] <= 1.0 and row["seconds"] > 0 for row in result["rows"])
