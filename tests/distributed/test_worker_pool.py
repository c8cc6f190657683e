"""Heartbeats of workers: processor time, and GPU utilization by the driver's tool; the status table."""

import os
import time
from types import SimpleNamespace

import pytest
from cluster_cases import ThreadBackend, ToyRun

from flowgrpo.distributed import schedule, table, worker_pool
from flowgrpo.distributed.worker_pool import Heartbeat, WorkerStatus, measure_gpu_utilization, take_heartbeat


def put_tool(folder, monkeypatch, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_cpu_utilization_is_between_two_heartbeats():
    first, deadline = take_heartbeat(["a call"]), time.process_time() + 0.05
    while time.process_time() < deadline:
        pass
    second = take_heartbeat()
    assert first.activities == ("a call",)
    assert second.cpu_seconds >= first.cpu_seconds + 0.05
    status = WorkerStatus()
    status.add_heartbeat(Heartbeat((), 10.0, None), 100.0)
    assert status.cpu_utilization is None
    status.add_heartbeat(Heartbeat((), 13.0, None), 102.0)
    assert status.cpu_utilization == 1.5
    status.add_heartbeat(Heartbeat((), 1.0, None), 104.0)  # another process has taken its place
    assert status.cpu_utilization == 1.5


def test_gpu_utilization_is_the_mean_of_the_given_gpus(tmp_path, monkeypatch):
    put_tool(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; echo 40; echo 90')
    assert measure_gpu_utilization("2,3") == pytest.approx(0.65)
    assert (tmp_path / "asked").read_text().split()[-1] == "--id=2,3"
    assert measure_gpu_utilization("") is None


def test_the_driver_is_not_asked_at_every_heartbeat(tmp_path, monkeypatch):
    put_tool(tmp_path, monkeypatch, f"echo asked >> {tmp_path}/asked; echo 50")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    now = [1000.0]
    monkeypatch.setattr(worker_pool, "time", SimpleNamespace(monotonic=lambda: now[0], process_time=time.process_time))
    utilization = []
    for now[0] in (1000.0, 1001.0, 1009.0, 1011.0):
        utilization.append(take_heartbeat().gpu_utilization)
    assert utilization == [0.5] * 4
    assert (tmp_path / "asked").read_text().splitlines() == ["asked"] * 2


@pytest.mark.parametrize("script", ["echo '[N/A]'", "echo no driver; exit 9", "true"])
def test_gpu_utilization_is_none_if_the_driver_does_not_say(tmp_path, monkeypatch, script):
    put_tool(tmp_path, monkeypatch, script)
    assert measure_gpu_utilization("0") is None


def test_the_table_shows_queues_staleness_and_the_work_of_each_worker(tmp_path, capsys):
    toy = ToyRun()
    toy.delays = [0.0, 1.5, 1.5]
    master = toy.master(ThreadBackend(), schedule.asynchronous(3, 6), tmp_path)
    master.on_iteration = table.StatusTable(0.2)
    master.run()
    output = capsys.readouterr().err
    assert "of 6 (async): " in output
    assert "last update: success 0.500, groups without a signal 25%" in output
    worker = next(line.split() for line in output.splitlines() if line.split()[:1] == ["rollout-0"])
    assert worker[1] == str(os.getpid())
    assert "train-0" in output
    assert table.status_lines(master, 65.0)[0].endswith("; 1:05 left")
