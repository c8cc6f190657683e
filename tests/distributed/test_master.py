"""The master over workers in threads: the same bits whatever happens, no group lost or trained on twice."""

import itertools
import json
import os
import random
import re
import threading
import time
from dataclasses import replace

import hosted_cases
import numpy as np
import pytest
from cluster_cases import ThreadBackend, ToyRun, task

from flowgrpo.data import task_sampling
from flowgrpo.distributed import cluster_state, schedule
from flowgrpo.distributed.event_log import read_events
from flowgrpo.distributed.messages import RolloutSlice
from flowgrpo.distributed.ray_backend import WorkerLost
from flowgrpo.distributed.schedule import REWARD, TRAIN
from flowgrpo.rollout.hosted import hosted
from flowgrpo.training.time_budget import OutOfTime, time_budget
from flowgrpo.types import BadInput, Status

SYNC = schedule.synchronous(3, 6)
PARTIAL = schedule.partial_rollouts(3, 6, budget=3, staleness=3, spare=3)


def run_undisturbed(folder, plan=SYNC, **settings):
    toy = ToyRun(**settings)
    return toy, toy.master(ThreadBackend(), plan, folder).run()


def run_until_killed(update: int, toy: ToyRun, plan, folder) -> None:
    """Run a master that is killed when it sends the batch of this update, counted from 0."""
    trains = iter(range(update))

    def before(_worker, method, _calls):
        if method == "train" and next(trains, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toy.master(ThreadBackend(before), plan, folder).run()


def trained_tasks(toy: ToyRun) -> list[str]:
    """Task of each trajectory, in the order in which they were trained on."""
    slices = [part for _, slices in sorted(toy.batches.items()) for part in slices]
    return [trajectory.task.id for part in slices for trajectory in part.trajectories]


def faults(seed: int, probability: float):
    """`before` of a backend in which calls of all kinds are lost at random."""
    rng, lock = random.Random(seed), threading.Lock()

    def before(worker: str, method: str, calls: int) -> None:
        with lock:
            if method != "describe" and rng.random() < probability:
                raise WorkerLost(f"{worker} was killed before {method}, the {calls}th call")

    return before


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_workers": 1, "worker_capacity": 1},
        {"rollout_workers": 3, "worker_capacity": 4},
        {"trainer_workers": 3, "every": 4},
    ],
)
def test_a_synchronous_run_is_the_same_on_any_number_of_workers(tmp_path, settings):
    _, one = run_undisturbed(tmp_path / "one")
    toy = ToyRun()
    other = toy.master(ThreadBackend(), SYNC, tmp_path / "other", **settings).run()
    assert other["sha"] == one["sha"]
    assert other["staleness"] == 0
    assert [len(slices) for _, slices in sorted(toy.batches.items())] == [3] * 6


def test_trainers_are_called_once_all_have_answered_the_last_call(tmp_path):
    """Else one of them would train while it still saves."""
    _, one = run_undisturbed(tmp_path / "one")
    toy = ToyRun()
    toy.delays = [0.0, 0.1, 0.3, 0.0, 0.2] * 6
    assert toy.master(ThreadBackend(), SYNC, tmp_path / "three", trainer_workers=3).run()["sha"] == one["sha"]
    assert not toy.delays


@pytest.mark.parametrize("seed", range(3))
def test_S1_lost_calls_change_nothing(tmp_path, seed):
    _, whole = run_undisturbed(tmp_path / "whole")
    toy, lines = ToyRun(), []
    master = toy.master(ThreadBackend(faults(seed, 0.06)), SYNC, tmp_path / "faulty", notify=lines.append)
    result = master.run()
    assert result["sha"] == whole["sha"]
    assert result["lost"]
    assert len(lines) == len(result["lost"])
    assert trained_tasks(toy) == [str(n) for n in range(18) for _ in range(2)]


def test_S1_results_during_a_restart_of_the_trainer_are_ignored(tmp_path):
    """An idle trainer is lost while its next update waits for the last rewards: they must not start that update."""
    awaited, gone, again, refused = (threading.Event() for _ in range(4))
    trained = []

    def before(worker, method, _calls):
        trained.extend([method] * (method == "train"))
        if len(trained) == 3 and method == "judge" and not gone.is_set():  # of the fourth update, without examination
            awaited.set()
            assert again.wait(30)
        if (worker, method) == ("train-0", "heartbeat") and awaited.is_set() and not gone.is_set():
            gone.set()
            raise WorkerLost("killed while it had nothing to do")
        if gone.is_set() and method == "describe":
            again.set()
        if gone.is_set() and method == "start":
            assert refused.wait(30)

    toy = ToyRun()
    master = toy.master(ThreadBackend(before), SYNC, tmp_path / "run")
    master.on_iteration = lambda master: refused.set() if master.state.duplicates else None
    result = master.run()
    assert result["lost"] == ["train-0"]
    assert result["sha"] == run_undisturbed(tmp_path / "whole")[1]["sha"]


def test_S1_rollout_workers_are_replaced_with_the_trainers_and_reward_workers_are_not(tmp_path):
    """Else two would roll out the same group, and write into the same effect log."""
    lost = []

    def before(worker, method, calls):
        if method == "train" and calls > 40 and not lost:
            lost.append(worker)
            raise WorkerLost("killed")

    toy, backend = ToyRun(), ThreadBackend(before)
    result = toy.master(backend, SYNC, tmp_path / "run").run()
    assert result["lost"] == ["train-0"]
    assert {name: backend.started.count(name) for name in backend.jobs} == {
        "train-0": 2,
        "rollout-0": 2,
        "rollout-1": 2,
        "reward-any-0": 1,
        "reward-any-1": 1,
    }
    assert result["sha"] == run_undisturbed(tmp_path / "whole")[1]["sha"]


def test_S1_a_time_budget_stops_a_run_that_then_resumes(tmp_path):
    """Each session is within its budget at the first check, and over it at the second."""
    _, whole = run_undisturbed(tmp_path / "whole")
    toy, lines, saved, result = ToyRun(), [], [], None
    while result is None:
        budget = time_budget("1s", started=0.0, clock=itertools.count().__next__)
        try:
            result = toy.master(ThreadBackend(), SYNC, tmp_path / "run", notify=lines.append, time_budget=budget).run()
        except OutOfTime:
            saved.append((toy.saved["update"], toy.saved["is_evaluated"]))
    assert saved == [(1, False), (2, True), (4, False), (5, False), (6, True)]
    assert lines[0] == "the time budget of 1s is over: saved at update 1; the same command resumes from there"
    assert (result["sha"], len(lines)) == (whole["sha"], len(saved))


def test_S1_a_checkpoint_has_everything_that_was_rolled_out(tmp_path):
    """Also groups that await their reward, and the first slices of those that are under way."""
    toy, met = ToyRun(before_reward=lambda _: time.sleep(0.05)), set()

    def before(_worker, method, _calls):
        if method == "train" and toy.saved is not None and toy.saved["memory"]:
            memory = toy.saved["memory"]
            groups = json.loads(memory["schedule"])["groups"]
            rolled = {number for number, group in groups.items() if group["phase"] in ("rolled", "judging", "ready")}
            assert rolled <= set(memory["buffer"]) <= set(groups)
            met.update(groups[number]["phase"] for number in memory["buffer"])

    toy.master(
        ThreadBackend(before), schedule.asynchronous(3, 12, staleness=3), tmp_path / "async", worker_capacity=3
    ).run()
    toy.saved = None
    toy.master(ThreadBackend(before), PARTIAL, tmp_path / "partial").run()
    assert met >= {"judging", "ready", "waiting"}


def test_S1_tasks_chosen_by_success_are_the_same_after_faults(tmp_path):
    """There are only four tasks, so that the success of one decides what the next update draws."""

    def choose(known, group):
        return task_sampling.sample_task(known, 0, group, 4)

    def drawn(toy):
        return trained_tasks(toy)[:: toy.samples]

    whole, unlike = ToyRun(), ToyRun()
    result = whole.master(ThreadBackend(), SYNC, tmp_path / "whole", choose_task=choose).run()
    unlike.master(ThreadBackend(), SYNC, tmp_path / "unlike", choose_task=lambda _, group: choose({}, group)).run()
    assert drawn(whole)[:3] == drawn(unlike)[:3]  # nothing is known yet
    assert drawn(whole) != drawn(unlike)
    for seed in range(3):
        toy = ToyRun()
        faulty = toy.master(ThreadBackend(faults(seed, 0.06)), SYNC, tmp_path / str(seed), choose_task=choose).run()
        assert faulty["lost"]
        assert faulty["sha"] == result["sha"]
        assert drawn(toy) == drawn(whole)


@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.parametrize("plan", [SYNC, PARTIAL], ids=lambda plan: plan.name)
def test_S1_a_killed_master_resumes_from_the_checkpoint_with_its_buffer(tmp_path, at, plan):
    toy = ToyRun()
    run_until_killed(at, toy, plan, tmp_path)
    result = toy.master(ThreadBackend(), plan, tmp_path).run()
    learned = trained_tasks(toy)
    assert sorted(set(learned), key=int) == [str(n) for n in range(18)]
    assert len(learned) == 36
    if plan is SYNC:
        assert result["sha"] == run_undisturbed(tmp_path / "whole")[1]["sha"]
    resumed = [event for event in read_events(tmp_path / "events.jsonl") if event["what"] == "resumed"]
    assert [event["update"] for event in resumed] == [0, at // 2 * 2]


def test_S1_the_result_covers_all_masters_of_a_run(tmp_path):
    """Rollout pids and staleness are saved in the checkpoint from which the last master resumes."""
    toy = ToyRun()
    run_until_killed(3, toy, SYNC, tmp_path)
    assert toy.saved is not None
    memory = toy.saved["memory"]
    assert json.loads(memory["seen"]) == {"rollout_pids": [os.getpid()], "staleness": 0}
    toy.saved["memory"] = memory | {"seen": json.dumps({"rollout_pids": [1], "staleness": 7})}
    result = toy.master(ThreadBackend(), SYNC, tmp_path).run()
    assert (result["rollout_pids"], result["staleness"]) == ([1, os.getpid()], 7)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "plan",
    [
        schedule.one_step_off(3, 8),
        schedule.asynchronous(3, 8, staleness=2),
        schedule.partial_rollouts(3, 8, budget=3, staleness=3, spare=3),
        schedule.synchronous(3, 8, spare=2),
    ],
    ids=lambda plan: plan.name + str(plan.spare),
)
def test_every_schedule_trains_on_each_group_once_within_its_staleness(tmp_path, plan, seed):
    toy = ToyRun()
    master = toy.master(ThreadBackend(faults(seed, 0.03 * (seed > 0))), plan, tmp_path)
    result = master.run()
    batches = [rollout_slice for slices in toy.batches.values() for rollout_slice in slices]
    groups = [{trajectory.task.id for trajectory in rollout_slice.trajectories} for rollout_slice in batches]
    names = [name for (name,) in groups]
    assert len(names) == len(set(names)) == 24
    assert result["staleness"] <= plan.staleness
    assert result["update"] == 8


def test_partial_rollouts_carry_tokens_over(tmp_path):
    plan = schedule.partial_rollouts(2, 6, budget=3, staleness=4, spare=2)
    toy, reused = ToyRun(), []
    master = toy.master(ThreadBackend(), plan, tmp_path)
    on_roll_out = master._on_roll_out
    master._on_roll_out = lambda call, summary: (reused.append(summary.reused), on_roll_out(call, summary))
    master.run()
    assert sum(reused) > 0
    trajectories = [item for slices in toy.batches.values() for part in slices for item in part.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    spoke = [set(np.asarray(turn.version).ravel().tolist()) for turn in turns]
    assert {len(versions) for versions in spoke} == {1, 2}  # actions too are of several versions, token by token


@pytest.mark.slow
def test_R2_a_reward_that_hangs_is_named_killed_and_finally_invalid(tmp_path):
    released, lines = threading.Event(), []

    def hang(task: int) -> None:
        if task == 4:
            released.wait(30)

    toy = ToyRun(before_reward=hang)
    master = toy.master(ThreadBackend(), schedule.synchronous(3, 2), tmp_path, judge_seconds=1.5, notify=lines.append)
    try:
        result = master.run()
    finally:
        released.set()
    assert result["update"] == 2
    invalid = [item for part in toy.batches[1] for item in part.trajectories if item.outcome is None]
    assert {item.task.id for item in invalid} == {"4"}
    assert all("did not return within 1.5 s" in item.reason for item in invalid)
    assert [line.partition(" ")[0][:10] for line in lines] == ["reward-any"] * len(lines)
    assert any("the reward of task" in line for line in lines)
    # The validations have the same task in one of two shards; so have the two tests.
    assert sum("has judged group 4 for" in line for line in lines) == 2
    assert sum("of validation for" in line for line in lines) == 2


def test_S3_a_silent_worker_is_named_and_replaced(tmp_path):
    released, lines, hung = threading.Event(), [], []

    def before(worker, method, calls):
        if worker == "rollout-1" and (hung or calls > 20):
            hung.append(method)
            if backend.started.count("rollout-1") < 2:
                released.wait(30)

    toy = ToyRun()
    backend = ThreadBackend(before)
    master = toy.master(backend, SYNC, tmp_path, silent_seconds=1.5, notify=lines.append)
    try:
        result = master.run()
    finally:
        released.set()
    assert result["sha"] == run_undisturbed(tmp_path / "whole")[1]["sha"]
    assert result["lost"] == ["rollout-1"]
    assert lines[0].startswith("rollout-1 (process ")
    assert "has been silent for" in lines[0]


def test_a_worker_that_never_starts_ends_the_run(tmp_path):
    def before(worker, _method, _calls):
        if worker.startswith(REWARD):
            raise WorkerLost("no room")

    with pytest.raises(BadInput, match=r"reward-any-. has ended 3 times while it started: has ended .no room"):
        ToyRun().master(ThreadBackend(before), SYNC, tmp_path).run()


def test_a_slow_call_is_reported_and_not_ended(tmp_path):
    named = threading.Event()

    def before(_worker, method, _calls):
        assert method != "train" or named.wait(30)

    def notify(sentence):
        if sentence.startswith(f"{TRAIN}-0 (process 1): train"):
            named.set()

    master = ToyRun().master(ThreadBackend(before), SYNC, tmp_path, watch_seconds=0.5, notify=notify)
    assert master.run()["lost"] == []


def test_S2_replayed_events_give_the_same_updates(tmp_path):
    plan = schedule.asynchronous(3, 8, staleness=2)
    ToyRun().master(ThreadBackend(), plan, tmp_path).run()
    state, again, there = cluster_state.ClusterState(), [], []
    for line in read_events(tmp_path / "events.jsonl"):
        if line["what"] == "event":
            state, commands = schedule.advance(plan, state, schedule.Event(**line["event"]))
            again += [list(command.groups) for command in commands if command.kind == "train"]
        elif line["what"] == "train":
            there.append(line["groups"])
    assert again == there
    assert len(there) == 8


def test_an_event_log_terminates_an_incomplete_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"what": "event", "event": {}}\n{"what": "ev')
    ToyRun().master(ThreadBackend(), schedule.synchronous(3, 1), tmp_path, every=1).run()
    assert [line["what"] for line in read_events(path)][:2] == ["event", "started"]
    path.write_text("nonsense\n{}\n")
    with pytest.raises(BadInput, match=r"events.jsonl:1 is no event"):
        list(read_events(path))


def test_S2_event_logs_of_earlier_versions_are_read(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"what": "event", "event": {"kind": "joined", "worker": "a", "pool": "rollout", "room": 9}}\n')
    (line,) = read_events(path)
    assert schedule.Event(**line["event"]) == schedule.Event("joined", "a", pool="rollout", capacity=9)


class ToyRunWithTools(ToyRun):
    """Training groups are hosted rollouts over an engine, with a tool that hangs for one trajectory."""

    def __init__(self, engine: hosted_cases.Engine, stuck: str):
        super().__init__()
        env, call_tool = hosted_cases.make_env(), hosted_cases.FakeTools({stuck: hosted_cases.hang})
        self.rollout = hosted(env, engine.submit, call_tool=call_tool, turn_deadline=4.0)

    def roll_out(self, weights, job, previous, on_start):
        if job.kind != "train":
            return super().roll_out(weights, job, previous, on_start)
        (group,) = job.indices
        tasks, keys, _ = hosted_cases.tasks_of(group + 1, self.samples)
        own = slice(group * self.samples, (group + 1) * self.samples)
        result = self.rollout(tasks[own], keys[own], [group] * self.samples, on_start=on_start)
        # The judge of these tests reads numbers.
        return RolloutSlice(tuple(replace(item, task=task(group), output="7") for item in result.trajectories))


@pytest.mark.slow
def test_S3_a_tool_that_hangs_is_named_and_the_run_continues(tmp_path):
    lines: list[str] = []
    with hosted_cases.Engine() as engine:
        toy = ToyRunWithTools(engine, stuck="4/1")
        plan = schedule.synchronous(3, 2)
        result = toy.master(ThreadBackend(), plan, tmp_path, watch_seconds=1.5, notify=lines.append).run()
    assert (result["update"], result["lost"]) == (2, [])
    named = r"rollout-. \(process \d+\): roll_out group 4 for . s, at trajectory 4\.1 \(tool 'echo'\)"
    assert any(re.match(named, line) for line in lines), lines
    trajectories = [item for part in toy.batches[1] for item in part.trajectories]
    assert len(trajectories) == 3 * toy.samples
    late = [(item.group, item.sample) for item in trajectories if item.status == Status.TIMEOUT]
    assert late == [(4, 1)]
