"""Checkpoints, folder and metrics together: a run that is killed again and again ends as an undisturbed one (S1)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent

RUN = """
import sys

import jax
import jax.numpy as jnp
import optax

from flowgrpo import launch
from flowgrpo.learner.checkpoint import Checkpoints, params_sha256
from flowgrpo.learner.folder import run_folder
from flowgrpo.report.metrics import Metrics

launch.configure(compilation_cache=sys.argv[2])
optimizer = optax.adamw(1e-2)


@jax.jit
def update(params, opt_state, key, step):
    x = jax.random.normal(jax.random.fold_in(key, step), (16, 32))
    loss, grads = jax.value_and_grad(lambda params: jnp.mean((jnp.tanh(x @ params["w"]) - x[:, :8]) ** 2))(params)
    changes, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, changes), opt_state, loss


params = {"w": jax.random.normal(jax.random.key(0), (32, 8))}
tree = {"params": params, "opt_state": optimizer.init(params), "key": jax.random.key(1), "step": 0, "metrics": {}}
with run_folder(sys.argv[1], {"seed": 0}) as folder, Checkpoints(folder, background=True) as checkpoints:
    latest = checkpoints.latest()
    if latest is not None:
        tree = checkpoints.restore(latest, tree | {"metrics": ...})
    with Metrics(folder, tree["metrics"]) as metrics:
        for step in range(tree["step"], 60):
            tree["params"], tree["opt_state"], loss = update(tree["params"], tree["opt_state"], tree["key"], step)
            metrics.write({"phase": "train", "update": step, "loss": loss}, {"from": latest})
            print(step, flush=True)
            if step % 3 == 2:
                checkpoints.save(step + 1, tree | {"step": step + 1, "metrics": metrics.position})
print(params_sha256(tree["params"]))
"""


def start(folder: Path, cache: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", RUN, str(folder), str(cache)]
    environment = os.environ | {"PYTHONPATH": "."}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def test_s1_a_run_killed_again_and_again_ends_as_an_undisturbed_one(tmp_path):
    """SIGKILL some updates after each start: while one is computed, written, or saved in the background."""
    whole, killed, cache = tmp_path / "whole", tmp_path / "killed", tmp_path / "cache"
    with start(whole, cache) as run:
        expected = run.communicate(timeout=300)[0].splitlines()[-1]
    for updates in (2, 5, 8, 7, 9):
        with start(killed, cache) as run:
            assert run.stdout is not None
            seen = [run.stdout.readline() for _ in range(updates)]
            run.send_signal(signal.SIGKILL)
        assert all(line.strip().isdigit() for line in seen)
    with start(killed, cache) as run:
        assert run.communicate(timeout=300)[0].splitlines()[-1] == expected
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert len((killed / "timings.jsonl").read_text().splitlines()) == 60
    starts = {json.loads(line)["from"] for line in (killed / "timings.jsonl").read_text().splitlines()}
    assert len(starts) >= 3  # it went on from several checkpoints
