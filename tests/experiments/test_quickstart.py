"""The quickstart as a command: it goes on where it was stopped to the same bits, and says what it can't do."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import setups
from experiments.pure_work import pure_work
from experiments.session import Session
from flowgrpo import launch, loop
from flowgrpo.report.metrics import Metrics
from flowgrpo.types import BadInput

pytestmark = pytest.mark.slow

SMALL = ("--warm_steps=50", "--queries=4", "--samples=4", "--test_tasks=16", "--checkpoint_every=2")


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory) -> Path:
    """Four updates in one go."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    command("quickstart", f"--workdir={folder}", "--updates=4", *SMALL)
    return folder


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_it_writes_what_it_says(whole):
    found = result(whole)
    assert {"success_before", "success_after", "tool_error_before", "tool_error_after", "turns_before"} <= set(found)
    assert found["updates"] == 4
    assert found["resumed_at"] == []
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    phases = [json.loads(line)["phase"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert phases.count("train") == 4
    assert phases.count("validation") == 3
    assert "seconds" not in (whole / "metrics.jsonl").read_text()


def test_S1_a_run_that_was_stopped_ends_as_one_that_was_not(command, whole, tmp_path):
    folder = tmp_path / "parts"
    command("quickstart", f"--workdir={folder}", "--updates=2", *SMALL)
    command("quickstart", f"--workdir={folder}", "--updates=4", *SMALL)
    assert result(folder)["resumed_at"] == [2]
    assert result(folder)["params_sha256"] == result(whole)["params_sha256"]
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_finished_run_that_is_called_again_was_not_continued(command, whole):
    before = result(whole)
    command("quickstart", f"--workdir={whole}", "--updates=4", *SMALL)
    assert result(whole)["resumed_at"] == []
    assert result(whole)["params_sha256"] == before["params_sha256"]
    assert result(whole)["best_update"] == before["best_update"]


def test_saving_without_a_validation_keeps_the_note_of_one(tmp_path):
    setup = setups.build(setups.settings_of("lookup", updates=1))
    session = Session(pure_work(setup), tmp_path)
    session.begin(setup.policy.init(jax.random.key(0)))
    session.save(0.5)
    session.save(None)
    assert session.checkpoints.best() == 0
    assert session.checkpoints.note(0) == {"validation": 0.5}


@pytest.mark.parametrize(
    ("other", "difference"),
    [("--seed=5", "seed: there 0, here 5"), ("--cpu_devices=3", f"devices: there {launch.cores()}, here 3")],
)
def test_another_run_is_refused_with_what_differs(command, whole, other, difference):
    refused = command("quickstart", f"--workdir={whole}", "--updates=4", other, *SMALL, check=False)
    assert refused.returncode == 1
    assert "holds another run" in refused.stderr
    assert difference in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_finished_run_can_be_evaluated_again(command, whole):
    line = command("evaluate", f"--workdir={whole}", "--num_tasks=8", "--samples=2").stdout.splitlines()[-1]
    found = json.loads(line)
    assert 0 <= found["success_before"] <= found["pass@2_before"] <= 1
    assert found["tasks"] == 8


def test_a_folder_without_a_run_is_refused(command, tmp_path):
    refused = command("evaluate", f"--workdir={tmp_path}", check=False)
    assert refused.returncode == 1
    assert "holds no run" in refused.stderr


def test_an_unknown_environment_is_refused(command):
    refused = command("quickstart", "--env=chess", check=False)
    assert refused.returncode == 1
    assert "lookup" in refused.stderr


@pytest.mark.parametrize("env", list(setups.PRESETS))
def test_every_preset_builds(env):
    setup = setups.build(setups.settings_of(env))
    assert setup.env.name == env
    assert setup.algorithm.name == "flow_grpo"


def interrupt(folder: Path, cache: Path, sign: int, *, phase: str, lines: int) -> tuple[int, str]:
    """Start the run of `whole`, and send it a signal once so many lines of a phase are written -> (status, said)."""
    module = [sys.executable, "-m", "experiments.quickstart", f"--compilation_cache={cache}", f"--workdir={folder}"]
    metrics, until = folder / "metrics.jsonl", time.monotonic() + 300
    with subprocess.Popen([*module, "--updates=4", *SMALL], stderr=subprocess.PIPE, text=True) as run:
        while not metrics.exists() or metrics.read_text().count(f'"phase": "{phase}"') < lines:
            assert run.poll() is None, "it ended before it was interrupted"
            assert time.monotonic() < until
            time.sleep(0.02)
        run.send_signal(sign)
        _, said = run.communicate(timeout=300)
    return run.returncode, said


def test_S1_killed_in_the_warm_start_and_later_or_stopped_by_ctrl_c_it_ends_as_if_nothing_had_been(
    command, whole, tmp_path
):
    folder, cache = tmp_path / "again", Path(command.keywords["cache"])
    for phase, lines in (("warm start", 1), ("train", 1), ("train", 3)):
        assert interrupt(folder, cache, signal.SIGKILL, phase=phase, lines=lines)[0] == -signal.SIGKILL
        if phase == "warm start":
            status, said = interrupt(folder, cache, signal.SIGINT, phase="train", lines=1)
            assert status == 130
            assert "the same command goes on from there" in said
            assert "Traceback" not in said
    command("quickstart", f"--workdir={folder}", "--updates=4", *SMALL)
    found = result(folder)
    assert found["resumed_at"]
    assert found["params_sha256"] == result(whole)["params_sha256"]
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_loss_that_is_no_number_stops_it_with_the_last_good_checkpoint(tmp_path):
    """The first step breaks the parameters; the second update sees it, and says which checkpoint is whole."""
    setup = setups.build(setups.settings_of("lookup", updates=4, queries=2, samples=2))
    broken = optax.scale(jnp.nan)

    def paid(trajectories, _key):
        return trajectories.replace(outcome=jnp.arange(4.0))

    parts = (setup.env, setup.policy, setup.algorithm, broken, setup.sizes)
    iteration = loop.make_iteration(*parts, judge=paid, mesh=setup.mesh)
    session = Session(pure_work(setup._replace(iteration=iteration, optimizer=broken)), tmp_path)
    session.begin(setup.policy.init(jax.random.key(0)))
    session.save(0.5)
    said = r"update 2 is not finite: lower --learning_rate; the last good checkpoint is that of update 0"
    with jax.debug_nans(False), Metrics(tmp_path, None) as metrics, pytest.raises(BadInput, match=said):
        session.train(metrics, every=10)
    assert np.isfinite(jax.tree.leaves(session.best_params()[1])[0]).all()


def test_a_folder_that_cannot_be_made_is_refused(command, tmp_path):
    (tmp_path / "file").write_text("")
    refused = command("quickstart", f"--workdir={tmp_path}/file/run", "--updates=4", *SMALL, check=False)
    assert refused.returncode == 1
    assert "can't be made" in refused.stderr
    assert "Traceback" not in refused.stderr
