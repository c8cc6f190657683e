"""Clusters of real processes, over Ray: the bits of a single process, whatever is killed; replays; bad flags."""

import builtins
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run_module, xla_flags

from flowgrpo.distributed.event_log import read_events
from flowgrpo.distributed.kill_series import _await, run_cluster_soak, soak_cluster
from flowgrpo.distributed.ray_backend import RayBackend
from flowgrpo.types import BadInput

ROOT = Path(__file__).parent.parent.parent
TINY = (
    "--warm_steps=50 --demonstrations=200 --queries=2 --samples=4 --validation_tasks=8 --test_tasks=4 --slots=8 "
    "--checkpoint_every=2"
)
SIZES = (
    "--warm_steps=100 --demonstrations=600 --queries=4 --samples=4 --validation_tasks=24 --test_tasks=24 --slots=16 "
    "--checkpoint_every=2"
)


@pytest.fixture(autouse=True)
def own_devices(monkeypatch):
    """The commands have the devices that they request, and not those of the tests."""
    monkeypatch.setenv("XLA_FLAGS", xla_flags(1))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """Flag of a compilation cache that the runs share."""
    return f"--compilation_cache={tmp_path_factory.mktemp('compiled')}"


def run(module: str, *flags: str) -> subprocess.CompletedProcess:
    return run_module(f"experiments.{module}", *flags)


@pytest.mark.slow
def test_S1_one_kill_of_each_kind_gives_the_bits_of_a_single_process(cache, tmp_path):
    """With one process of each kind every kill hits an update. And S2: the run can be replayed."""
    sizes = [*TINY.split(), "--domains=drawing", "--updates=8", cache]  # whose warm start has some success
    command = [sys.executable, "-m", "experiments.cluster", *sizes, "--rollout_workers=1", "--reward_workers=any=1"]

    def wait_for_update(process: subprocess.Popen, folder: Path) -> None:
        """Wait until the next update starts."""
        _await(process, folder, "train", since=time.time())

    all_kills = soak_cluster(command, tmp_path / "killed", kills=4, rng=random.Random(0), pause=wait_for_update)
    assert sorted(kill.kind for kill in all_kills if kill.recovered) == ["master", "reward", "rollout", "train"]
    assert_equal_to_a_single_process(tmp_path, sizes)
    replay = run("replay", str(tmp_path / "killed"), cache)
    assert replay.returncode == 0, replay.stdout + replay.stderr


def assert_equal_to_a_single_process(base: Path, sizes: list[str]) -> None:
    single = run("agentflow", *sizes, f"--workdir={base / 'single'}")
    assert single.returncode == 0, single.stderr[-2000:]
    sha, alone = (
        json.loads((base / name / "result.json").read_text())["params_sha256"] for name in ("killed", "single")
    )
    assert sha == alone
    metrics = [(base / name / "metrics.jsonl").read_text() for name in ("killed", "single")]
    assert metrics[0] == metrics[1]
    assert any(json.loads(line).get("grad_norm", 0) > 0 for line in metrics[0].splitlines())


@pytest.mark.soak
def test_S1_a_cluster_with_kills_gives_the_bits_of_a_single_process(cache, tmp_path):
    sizes = [*SIZES.split(), "--updates=20", cache]
    shape = ["--rollout_workers=2", "--reward_workers=any=2"]
    command = [sys.executable, "-m", "experiments.cluster", *sizes, *shape]
    figures = run_cluster_soak(command, tmp_path, kills=5, seed=1, longest=4.0)
    assert figures["differences"] == []
    assert figures["kills"] >= 4
    assert {"master", "train", "rollout", "reward"} <= set(figures["by_kind"])
    assert_equal_to_a_single_process(tmp_path, sizes)
    assert len(json.loads((tmp_path / "whole" / "result.json").read_text())["rollout_pids"]) == 2
    replay = run("replay", str(tmp_path / "killed"), cache)
    assert replay.returncode == 0, replay.stdout + replay.stderr


@pytest.mark.soak
def test_S2_an_asynchronous_run_is_replayed_to_the_same_parameters(cache, tmp_path):
    folder = tmp_path / "run"
    shape = ["--schedule=async", "--staleness=2", "--rollout_workers=2"]
    ran = run("cluster", *SIZES.split(), "--updates=5", cache, *shape, f"--workdir={folder}")
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads((folder / "result.json").read_text())
    assert result["staleness"] <= 2
    kinds = [line["event"]["kind"] for line in read_events(folder / "events.jsonl") if line["what"] == "event"]
    assert kinds.count("trained") == 5
    replay = run("replay", str(folder), cache)
    assert replay.returncode == 0, replay.stdout + replay.stderr
    assert json.loads(replay.stdout.splitlines()[-1])["params_sha256"] == result["params_sha256"]
    (folder / "result.json").write_text(json.dumps(result | {"params_sha256": "another"}))
    other = run("replay", str(folder), cache)
    assert other.returncode == 1
    assert "comes to other parameters" in other.stderr


@pytest.mark.soak
def test_two_trainers_equal_one_process_with_two_devices(cache, tmp_path):
    """Also with tasks that are chosen by success: the master does that here, and the run itself there."""
    sizes = [*SIZES.split(), "--updates=3", cache, "--mesh=data=2", "--prompts=hard"]
    one = run("agentflow", *sizes, "--cpu_devices=2", f"--workdir={tmp_path / 'one'}")
    two = run("cluster", *sizes, "--trainer_workers=2", f"--workdir={tmp_path / 'two'}")
    assert (one.returncode, two.returncode) == (0, 0), (one.stderr + two.stderr)[-3000:]
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    assert results[0]["params_sha256"] == results[1]["params_sha256"]
    assert (tmp_path / "one" / "metrics.jsonl").read_text() == (tmp_path / "two" / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--schedule=sync", "--staleness=2"), "--staleness means nothing to --schedule=sync"),
        (("--schedule=partial",), "--schedule=partial needs --segment_tokens"),
        (("--reward_workers=code",), "'code' should be DOMAIN=COUNT"),
        (("--trainer_workers=2", "--mesh=fsdp=2"), "give --mesh=data=2"),
    ],
)
def test_bad_flags_are_one_sentence(tmp_path, flags, says):
    ran = run("cluster", *flags, f"--workdir={tmp_path}")
    assert ran.returncode == 1
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr


def test_without_ray_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "ray":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadInput, match="pip install 'ray"):
        RayBackend()


def test_a_replay_needs_a_clusters_run(tmp_path):
    ran = run("replay", str(tmp_path))
    assert ran.returncode == 1
    assert "holds no run: run.json is missing" in ran.stderr


@pytest.mark.slow
def test_S3_a_stopped_process_is_killed_and_its_calls_are_lost():
    """It can't end by itself."""
    command = [sys.executable, "-m", "tests.distributed.stopped"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split() == ["lost", "ended"]
