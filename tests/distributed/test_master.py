"""The master over workers in threads: the same bits whatever happens, nothing lost or doubled, nobody waited for."""

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
from cluster_cases import ThreadBackend, Work, task

from flowgrpo.data import task_sampling
from flowgrpo.distributed import cluster_state, schedule
from flowgrpo.distributed.event_log import read_events
from flowgrpo.distributed.messages import Stretch
from flowgrpo.distributed.ray_backend import Lost
from flowgrpo.distributed.schedule import REWARD, TRAIN
from flowgrpo.rollout.hosted import hosted
from flowgrpo.run.time_budget import OutOfTime, time_budget
from flowgrpo.types import BadInput, Status

SYNC = schedule.synchronous(3, 6)
PARTIAL = schedule.partial_rollouts(3, 6, budget=3, staleness=3, spare=3)


def undisturbed(folder, plan=SYNC, **settings):
    work = Work(**settings)
    return work, work.master(ThreadBackend(), plan, folder).run()


def killed_at(update: int, work: Work, plan, folder) -> None:
    """A run whose master is killed when it sends the batch of this update, counted from 0."""
    trains = iter(range(update))

    def before(_worker, method, _calls):
        if method == "train" and next(trains, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.master(ThreadBackend(before), plan, folder).run()


def faults(seed: int, share: float):
    """`before` of a backend in which calls of all kinds are lost at random."""
    chance, lock = random.Random(seed), threading.Lock()

    def before(worker: str, method: str, calls: int) -> None:
        with lock:
            if method != "about" and chance.random() < share:
                raise Lost(f"{worker} was killed before {method}, the {calls}th call")

    return before


@pytest.mark.parametrize("shape", [{"rollout": 1, "room": 1}, {"rollout": 3, "room": 4}, {"trainers": 3, "every": 4}])
def test_a_synchronous_run_is_the_same_whoever_plays_and_judges(tmp_path, shape):
    _, one = undisturbed(tmp_path / "one")
    work = Work()
    other = work.master(ThreadBackend(), SYNC, tmp_path / "other", **shape).run()
    assert other["sha"] == one["sha"]
    assert other["staleness"] == 0
    assert [len(stretches) for _, stretches in sorted(work.batches.items())] == [3] * 6


def test_no_trainer_gets_a_call_before_all_have_answered_the_last(tmp_path):
    """Or else one of them would learn while it still saves, and go on from where it was before."""
    _, one = undisturbed(tmp_path / "one")
    work = Work()
    work.slow = [0.0, 0.1, 0.3, 0.0, 0.2] * 6
    assert work.master(ThreadBackend(), SYNC, tmp_path / "three", trainers=3).run()["sha"] == one["sha"]
    assert not work.slow


@pytest.mark.parametrize("seed", range(3))
def test_S1_calls_that_are_lost_change_nothing(tmp_path, seed):
    _, whole = undisturbed(tmp_path / "whole")
    work, told = Work(), []
    master = work.master(ThreadBackend(faults(seed, 0.06)), SYNC, tmp_path / "faulty", tell=told.append)
    result = master.run()
    assert result["sha"] == whole["sha"]
    assert result["lost"]
    assert len(told) == len(result["lost"])
    learned = [one.task.id for _, stretches in sorted(work.batches.items()) for s in stretches for one in s.played]
    assert learned == [str(n) for n in range(18) for _ in range(2)]


def test_S1_what_is_answered_while_the_trainer_starts_again_is_not_believed(tmp_path):
    """An idle trainer is lost while the last verdicts of its next update are awaited: they must not lead to one."""
    awaited, gone, again, refused = (threading.Event() for _ in range(4))
    trained = []

    def before(worker, method, _calls):
        trained.extend([method] * (method == "train"))
        if len(trained) == 3 and method == "judge" and not gone.is_set():  # of the fourth update, without examination
            awaited.set()
            assert again.wait(30)
        if (worker, method) == ("train-0", "heartbeat") and awaited.is_set() and not gone.is_set():
            gone.set()
            raise Lost("killed while it had nothing to do")
        if gone.is_set() and method == "about":
            again.set()
        if gone.is_set() and method == "begin":
            assert refused.wait(30)

    work = Work()
    master = work.master(ThreadBackend(before), SYNC, tmp_path / "run")
    master.on_turn = lambda master: refused.set() if master.state.duplicates else None
    result = master.run()
    assert result["lost"] == ["train-0"]
    assert result["sha"] == undisturbed(tmp_path / "whole")[1]["sha"]


def test_S1_who_plays_is_replaced_with_the_trainers_and_who_judges_is_not(tmp_path):
    """Or else two would play the same group, and write what it hears into the same journal."""
    lost = []

    def before(worker, method, calls):
        if method == "train" and calls > 40 and not lost:
            lost.append(worker)
            raise Lost("killed")

    work, backend = Work(), ThreadBackend(before)
    result = work.master(backend, SYNC, tmp_path / "run").run()
    assert result["lost"] == ["train-0"]
    assert {name: backend.started.count(name) for name in backend.jobs} == {
        "train-0": 2,
        "rollout-0": 2,
        "rollout-1": 2,
        "reward-any-0": 1,
        "reward-any-1": 1,
    }
    assert result["sha"] == undisturbed(tmp_path / "whole")[1]["sha"]


def test_S1_a_time_budget_ends_it_after_an_update_or_an_examination_and_it_goes_on(tmp_path):
    """Each session looks at its clock once, and is late when it looks again."""
    _, whole = undisturbed(tmp_path / "whole")
    work, told, saved, result = Work(), [], [], None
    while result is None:
        budget = time_budget("1s", began=0.0, clock=itertools.count().__next__)
        try:
            result = work.master(ThreadBackend(), SYNC, tmp_path / "run", tell=told.append, budget=budget).run()
        except OutOfTime:
            saved.append((work.saved["update"], work.saved["seen"]))
    assert saved == [(1, False), (2, True), (4, False), (5, False), (6, True)]
    assert told[0] == "the time budget of 1s is over: saved at update 1; the same command goes on from there"
    assert (result["sha"], len(told)) == (whole["sha"], len(saved))


def test_S1_a_checkpoint_holds_all_that_was_rolled_out(tmp_path):
    """A checkpoint also holds groups that await their verdict, and the first parts of those that are under way."""
    work, met = Work(hangs=lambda _: time.sleep(0.05)), set()

    def before(_worker, method, _calls):
        if method == "train" and work.saved is not None and work.saved["memory"]:
            memory = work.saved["memory"]
            groups = json.loads(memory["schedule"])["groups"]
            rolled = {number for number, group in groups.items() if group["phase"] in ("rolled", "judging", "ready")}
            assert rolled <= set(memory["buffer"]) <= set(groups)
            met.update(groups[number]["phase"] for number in memory["buffer"])

    work.master(ThreadBackend(before), schedule.asynchronous(3, 12, staleness=3), tmp_path / "async", room=3).run()
    work.saved = None
    work.master(ThreadBackend(before), PARTIAL, tmp_path / "partial").run()
    assert met >= {"judging", "ready", "waiting"}


def test_S1_tasks_that_are_chosen_by_what_is_known_are_the_same_after_faults(tmp_path):
    """Four tasks only: what an update shows of one decides what the next one draws."""

    def choose(known, group):
        return task_sampling.chosen(known, 0, group, 4)

    def drawn(work):
        return [one.task.id for _, found in sorted(work.batches.items()) for s in found for one in s.played[:1]]

    whole, unlike = Work(), Work()
    result = whole.master(ThreadBackend(), SYNC, tmp_path / "whole", choose=choose).run()
    unlike.master(ThreadBackend(), SYNC, tmp_path / "unlike", choose=lambda _, group: choose({}, group)).run()
    assert drawn(whole)[:3] == drawn(unlike)[:3]  # nothing is known yet
    assert drawn(whole) != drawn(unlike)
    for seed in range(3):
        work = Work()
        faulty = work.master(ThreadBackend(faults(seed, 0.06)), SYNC, tmp_path / str(seed), choose=choose).run()
        assert faulty["lost"]
        assert faulty["sha"] == result["sha"]
        assert drawn(work) == drawn(whole)


@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.parametrize("plan", [SYNC, PARTIAL], ids=lambda plan: plan.name)
def test_S1_a_master_that_is_killed_goes_on_from_the_checkpoint_with_its_buffer(tmp_path, at, plan):
    work = Work()
    killed_at(at, work, plan, tmp_path)
    result = work.master(ThreadBackend(), plan, tmp_path).run()
    learned = [one.task.id for _, stretches in work.batches.items() for s in stretches for one in s.played]
    assert sorted(set(learned), key=int) == [str(n) for n in range(18)]
    assert len(learned) == 36
    if plan is SYNC:
        assert result["sha"] == undisturbed(tmp_path / "whole")[1]["sha"]
    resumed = [event for event in read_events(tmp_path / "events.jsonl") if event["what"] == "resumed"]
    assert [event["update"] for event in resumed] == [0, at // 2 * 2]


def test_S1_the_result_tells_of_all_masters_and_not_of_the_last_alone(tmp_path):
    """Rollout pids and the staleness of updates are kept up to the checkpoint from which the last master went on."""
    work = Work()
    killed_at(3, work, SYNC, tmp_path)
    assert work.saved is not None
    memory = work.saved["memory"]
    assert json.loads(memory["seen"]) == {"rollout_pids": [os.getpid()], "staleness": 0}
    work.saved["memory"] = memory | {"seen": json.dumps({"rollout_pids": [1], "staleness": 7})}
    result = work.master(ThreadBackend(), SYNC, tmp_path).run()
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
def test_every_schedule_learns_from_each_group_once_within_its_staleness(tmp_path, plan, seed):
    work = Work()
    master = work.master(ThreadBackend(faults(seed, 0.03 * (seed > 0))), plan, tmp_path)
    result = master.run()
    learned = [(update, {one.task.id for one in s.played}) for update, found in work.batches.items() for s in found]
    names = [name for _, (name,) in learned]
    assert len(names) == len(set(names)) == 24
    assert result["staleness"] <= plan.staleness
    assert result["update"] == 8


def test_partial_rollouts_carry_tokens_over(tmp_path):
    plan = schedule.partial_rollouts(2, 6, budget=3, staleness=4, spare=2)
    work, reused = Work(), []
    master = work.master(ThreadBackend(), plan, tmp_path)
    take_slip = master._on_play
    master._on_play = lambda doing, slip: (reused.append(slip.reused), take_slip(doing, slip))
    master.run()
    assert sum(reused) > 0
    turns = [turn for found in work.batches.values() for s in found for one in s.played for turn in one.turns]
    spoke = [set(np.asarray(turn.version).ravel().tolist()) for turn in turns]
    assert {len(versions) for versions in spoke} == {1, 2}  # actions too are of several versions, token by token


@pytest.mark.slow
def test_R2_a_reward_that_hangs_is_ended_named_and_has_no_verdict_in_the_end(tmp_path):
    released, told = threading.Event(), []

    def hangs(number: int) -> None:
        if number == 4:
            released.wait(30)

    work = Work(hangs=hangs)
    master = work.master(ThreadBackend(), schedule.synchronous(3, 2), tmp_path, judge_seconds=1.5, tell=told.append)
    try:
        result = master.run()
    finally:
        released.set()
    assert result["update"] == 2
    refused = [one for s in work.batches[1] for one in s.played if one.outcome is None]
    assert {one.task.id for one in refused} == {"4"}
    assert all("did not return within 1.5 s" in one.reason for one in refused)
    assert [sentence.partition(" ")[0][:10] for sentence in told] == ["reward-any"] * len(told)
    assert any("the reward of task" in sentence for sentence in told)
    # Two examinations ask for the same, in one of two shares; then two tests, of four tasks.
    assert sum("has judged group 4 for" in sentence for sentence in told) == 2
    assert sum("of validation for" in sentence for sentence in told) == 2


def test_S3_a_worker_that_goes_silent_is_named_and_replaced(tmp_path):
    released, told, hung = threading.Event(), [], []

    def before(worker, method, calls):
        if worker == "rollout-1" and (hung or calls > 20):
            hung.append(method)
            if backend.started.count("rollout-1") < 2:
                released.wait(30)

    work = Work()
    backend = ThreadBackend(before)
    master = work.master(backend, SYNC, tmp_path, silent_seconds=1.5, tell=told.append)
    try:
        result = master.run()
    finally:
        released.set()
    assert result["sha"] == undisturbed(tmp_path / "whole")[1]["sha"]
    assert result["lost"] == ["rollout-1"]
    assert told[0].startswith("rollout-1 (process ")
    assert "has been silent for" in told[0]


def test_a_worker_that_never_starts_ends_the_run_with_a_sentence(tmp_path):
    def before(worker, _method, _calls):
        if worker.startswith(REWARD):
            raise Lost("no room")

    with pytest.raises(BadInput, match=r"reward-any-. has ended 3 times while it started: has ended .no room"):
        Work().master(ThreadBackend(before), SYNC, tmp_path).run()


def test_what_takes_long_is_named_but_not_ended(tmp_path):
    named = threading.Event()

    def before(_worker, method, _calls):
        assert method != "train" or named.wait(30)

    def tell(sentence):
        if sentence.startswith(f"{TRAIN}-0 (process 1): train"):
            named.set()

    master = Work().master(ThreadBackend(before), SYNC, tmp_path, watch_seconds=0.5, tell=tell)
    assert master.run()["lost"] == []


def test_S2_the_events_give_the_same_updates_again(tmp_path):
    plan = schedule.asynchronous(3, 8, staleness=2)
    Work().master(ThreadBackend(), plan, tmp_path).run()
    state, again, there = cluster_state.ClusterState(), [], []
    for line in read_events(tmp_path / "events.jsonl"):
        if line["what"] == "event":
            state, commands = schedule.advance(plan, state, schedule.Event(**line["event"]))
            again += [list(command.groups) for command in commands if command.kind == "train"]
        elif line["what"] == "train":
            there.append(line["groups"])
    assert again == there
    assert len(there) == 8


def test_an_event_log_ends_what_a_killed_process_left(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"what": "event", "event": {}}\n{"what": "ev')
    Work().master(ThreadBackend(), schedule.synchronous(3, 1), tmp_path, every=1).run()
    assert [line["what"] for line in read_events(path)][:2] == ["event", "started"]
    path.write_text("nonsense\n{}\n")
    with pytest.raises(BadInput, match=r"events.jsonl:1 is no event"):
        list(read_events(path))


class WithTools(Work):
    """Groups of training are hosted rollouts over an engine, whose tool hangs for one trajectory."""

    def __init__(self, engine: hosted_cases.Engine, stuck: str):
        super().__init__()
        env, do = hosted_cases.make_env(), hosted_cases.Do({stuck: hosted_cases.hang})
        self.rollout = hosted(env, engine.submit, do=do, turn_deadline=4.0)

    def play(self, held, order, begun, on_start):
        if order.kind != "train":
            return super().play(held, order, begun, on_start)
        (group,) = order.numbers
        tasks, keys, _ = hosted_cases.tasks_of(group + 1, self.samples)
        own = slice(group * self.samples, (group + 1) * self.samples)
        found = self.rollout(tasks[own], keys[own], [group] * self.samples, on_start=on_start)
        # The judge of these tests reads numbers.
        return Stretch(tuple(replace(one, task=task(group), output="7") for one in found.played))


@pytest.mark.slow
def test_S3_a_tool_that_hangs_is_named_and_the_run_goes_on(tmp_path):
    told: list[str] = []
    with hosted_cases.Engine() as engine:
        work = WithTools(engine, stuck="4/1")
        plan = schedule.synchronous(3, 2)
        result = work.master(ThreadBackend(), plan, tmp_path, watch_seconds=1.5, tell=told.append).run()
    assert (result["update"], result["lost"]) == (2, [])
    named = r"rollout-. \(process \d+\): play group 4 for . s, at trajectory 4\.1 \(tool 'echo'\)"
    assert any(re.match(named, sentence) for sentence in told), told
    played = [one for stretch in work.batches[1] for one in stretch.played]
    assert len(played) == 3 * work.samples
    late = [(one.group, one.sample) for one in played if one.status == Status.TIMEOUT]
    assert late == [(4, 1)]
