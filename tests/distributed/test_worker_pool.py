"""How a worker is: its processor time, and the share of its GPUs, by the driver's tool; what the master shows."""

import os
import time
from types import SimpleNamespace

import pytest
from cluster_cases import ThreadBackend, Work

from flowgrpo.distributed import schedule, table, worker_pool
from flowgrpo.distributed.worker_pool import Heartbeat, WorkerStatus, gpu_share, take_heartbeat


def put_tool(folder, monkeypatch, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_processor_time_grows_and_its_share_is_between_two_heartbeats():
    first, until = take_heartbeat(["a call"]), time.process_time() + 0.05
    while time.process_time() < until:
        pass
    second = take_heartbeat()
    assert first.words == ("a call",)
    assert second.cpu >= first.cpu + 0.05
    seen = WorkerStatus()
    seen.take(Heartbeat((), 10.0, None), 100.0)
    assert seen.cpu is None
    seen.take(Heartbeat((), 13.0, None), 102.0)
    assert seen.cpu == 1.5
    seen.take(Heartbeat((), 1.0, None), 104.0)  # another process stands in its place
    assert seen.cpu == 1.5


def test_the_share_of_gpus_is_the_mean_of_those_that_were_given(tmp_path, monkeypatch):
    put_tool(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; echo 40; echo 90')
    assert gpu_share("2,3") == pytest.approx(0.65)
    assert (tmp_path / "asked").read_text().split()[-1] == "--id=2,3"
    assert gpu_share("") is None


def test_the_driver_is_asked_once_in_a_while_and_not_at_every_heartbeat(tmp_path, monkeypatch):
    put_tool(tmp_path, monkeypatch, f"echo asked >> {tmp_path}/asked; echo 50")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    now = [1000.0]
    monkeypatch.setattr(worker_pool, "time", SimpleNamespace(monotonic=lambda: now[0], process_time=time.process_time))
    shares = []
    for now[0] in (1000.0, 1001.0, 1009.0, 1011.0):
        shares.append(take_heartbeat().gpu)
    assert shares == [0.5] * 4
    assert (tmp_path / "asked").read_text().splitlines() == ["asked"] * 2


@pytest.mark.parametrize("script", ["echo '[N/A]'", "echo no driver; exit 9", "true"])
def test_where_the_tool_says_nothing_there_is_no_share(tmp_path, monkeypatch, script):
    put_tool(tmp_path, monkeypatch, script)
    assert gpu_share("0") is None


def test_the_table_tells_queues_staleness_and_what_everybody_does(tmp_path, capsys):
    work = Work()
    work.slow = [0.0, 1.5, 1.5]
    master = work.master(ThreadBackend(), schedule.asynchronous(3, 6), tmp_path)
    master.on_turn = table.StatusTable(0.2)
    master.run()
    said = capsys.readouterr().err
    assert "of 6 (async): " in said
    assert "last update: success 0.500, groups without a signal 25%" in said
    worker = next(line.split() for line in said.splitlines() if line.split()[:1] == ["rollout-0"])
    assert worker[1] == str(os.getpid())
    assert "train-0" in said
    assert table.status_lines(master, 65.0)[0].endswith("; 1:05 left")
