"""The effect log: a repeated rollout gets the kept results, calls the rest, and is otherwise the same (S1)."""

import importlib
import json
import threading
from concurrent.futures import Future
from itertools import count

import numpy as np
import pytest
from hosted_cases import Engine, answer, hang, make_env, run, tasks_of, value, values

from flowgrpo.contracts import Call, Result, Reward, RewardResult
from flowgrpo.rollout.effects import EffectLog
from flowgrpo.rollout.hosted import hosted
from flowgrpo.types import BadInput, Task


def call(seed: int, name: str = "dice") -> Call:
    return Call("tool", name, {"sides": 6, "deep": {"b": [1, 2.5], "a": None}}, (seed, 0, 3))


class World:
    """Tool and reward results that differ at each call."""

    def __init__(self):
        self.numbers, self.asked = count(), []

    def call_tool(self, call: Call) -> Result:
        self.asked.append(call)
        number = next(self.numbers)
        return Result(f"{number} ünï", error=number % 2 == 1, failure="gone" if number == 2 else "")

    def score_all(self, tasks, outputs) -> list[RewardResult]:
        self.asked.append((tasks, outputs))
        return [RewardResult(next(self.numbers) + 0.1, "why", {"part": np.float32(0.5)}) for _ in tasks]

    @property
    def reward(self) -> Reward:
        return Reward(lambda task, output: self.score_all([task], [output])[0], self.score_all)


def test_S1_a_repeated_rollout_gets_kept_results_and_calls_the_rest(tmp_path):
    world, first = World(), EffectLog(tmp_path)
    with first.recording("train", 3):
        heard = [first.wrap_tools(world.call_tool)(call(seed)) for seed in range(4)]
    again = EffectLog(tmp_path)  # as another process has it
    with again.recording("train", 3):
        call_tool = again.wrap_tools(world.call_tool)
        assert [call_tool(call(seed)) for seed in (2, 0, 3, 1)] == [heard[seed] for seed in (2, 0, 3, 1)]
        assert len(world.asked) == 4
        assert call_tool(call(9)).text == "4 ünï"
        assert call_tool(call(0)).text == "5 ünï"  # the same again is another call
    with EffectLog(tmp_path).recording("train", 3):
        pass


def test_a_rollout_without_rewards_is_repeated(tmp_path):
    world, effect_log = World(), EffectLog(tmp_path)
    call_tool = effect_log.wrap_tools(world.call_tool)

    def evaluate() -> None:
        with effect_log.recording("validation", 2):
            call_tool(call(1))
            raise BadInput("the server is down")

    with pytest.raises(BadInput, match="the server is down"):
        evaluate()
    with effect_log.recording("validation", 2):
        assert call_tool(call(1)).text == "1 ünï"


def test_equal_calls_are_answered_in_their_order(tmp_path):
    world, effect_log = World(), EffectLog(tmp_path)
    for _ in range(2):
        with effect_log.recording("train", 1):
            assert [effect_log.wrap_tools(world.call_tool)(call(7)).text for _ in range(3)] == [
                "0 ünï",
                "1 ünï",
                "2 ünï",
            ]


def test_another_update_and_another_evaluation_have_files_of_their_own(tmp_path):
    world, effect_log = World(), EffectLog(tmp_path)
    texts = []
    for update, name in ((1, "train"), (None, "validation"), (2, "train"), (1, "train")):
        with effect_log.recording(name, update):
            texts.append(effect_log.wrap_tools(world.call_tool)(call(7)).text)
    assert texts == ["0 ünï", "1 ünï", "2 ünï", "0 ünï"]
    with EffectLog(tmp_path, 1).recording("validation"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("000001-train.jsonl", "000001-validation.jsonl", "000002-train.jsonl")
    ]


def test_reward_results_of_a_group_are_kept_all_or_none(tmp_path):
    world, effect_log = World(), EffectLog(tmp_path)
    tasks = [Task(str(i), "?", ("1",), "x") for i in range(3)]
    verdicts = []
    for outputs in (["a", "b", "c"], ["a", "b", "c"], ["a", "b", "d"]):
        with effect_log.recording("train", 1):
            verdicts.append(effect_log.wrap_reward(world.reward).score_all(tasks, outputs))
    assert verdicts[0] == verdicts[1] != verdicts[2]
    assert verdicts[1][2] == RewardResult(2.1, "why", {"part": 0.5})
    assert len(world.asked) == 2
    with effect_log.recording("train", 1):
        effect_log.wrap_reward(world.reward).score(tasks[0], "a")
    assert len(world.asked) == 3


def test_a_line_cut_by_a_kill_is_dropped(tmp_path):
    world, effect_log = World(), EffectLog(tmp_path)
    with effect_log.recording("train", 1):
        for seed in range(3):
            effect_log.wrap_tools(world.call_tool)(call(seed))
    path = tmp_path / "000001-train.jsonl"
    whole = path.read_bytes()
    for cut in (1, 5, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        with effect_log.recording("train", 1):
            texts = [effect_log.wrap_tools(world.call_tool)(call(seed)).text for seed in range(3)]
        assert texts[:2] == ["0 ünï", "1 ünï"]
        assert texts[2] != "2 ünï"
        assert len(path.read_bytes().splitlines()) == 3
        assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_files_that_a_checkpoint_covers_are_deleted(tmp_path):
    effect_log = EffectLog(tmp_path)
    for update in (1, 2, 3):
        for name in ("train", "validation"):
            with effect_log.recording(name, update):
                pass
    effect_log.delete_before(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003-train.jsonl", "000003-validation.jsonl"]
    EffectLog(tmp_path / "nowhere").delete_before(9)


def test_late_results_and_results_outside_of_a_rollout_are_not_kept(tmp_path):
    world, effect_log = World(), EffectLog(tmp_path)
    asked, may, done = (threading.Event() for _ in range(3))

    def slow(call: Call) -> Result:
        asked.set()
        may.wait(10)
        return world.call_tool(call)

    def late() -> None:
        effect_log.wrap_tools(slow)(call(1))
        done.set()

    with effect_log.recording("train", 1):
        thread = threading.Thread(target=late)
        thread.start()
        assert asked.wait(10)
        effect_log.wrap_tools(world.call_tool)(call(0))
    with effect_log.recording("train", 2):
        may.set()
        assert done.wait(10)
    thread.join()
    effect_log.wrap_tools(world.call_tool)(call(5))
    sizes = [len((tmp_path / f"00000{update}-train.jsonl").read_text().splitlines()) for update in (1, 2)]
    assert sizes == [1, 0]


def test_unreadable_and_unwritable_files_are_refused_in_one_sentence(tmp_path):
    """Also an answer of which a letter was changed, and a line that is nested deeper than Python can follow."""
    world, path = World(), tmp_path / "000001-train.jsonl"
    effect_log = EffectLog(tmp_path)
    with effect_log.recording("train", 1):
        effect_log.wrap_tools(world.call_tool)(call(0))
    for text in ("[1]\n", "[" * 100_000 + "\n", path.read_text().replace("0 ", "8 ")):
        path.write_text(text)
        with (
            pytest.raises(BadInput, match=r"000001-train.jsonl:1 can't be read .* to ask again"),
            EffectLog(tmp_path).recording("train", 1),
        ):
            pass
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="can't be written"), EffectLog(tmp_path / "file").recording("train", 1):
        pass
    (tmp_path / "000001²-train.jsonl").touch()  # somebody else's
    EffectLog(tmp_path).delete_before(9)
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["000001²-train.jsonl"]


class Fickle:
    """Tools and a reward whose answers are never the same twice."""

    def __init__(self, seed: int, *, until: threading.Event | None = None):
        self.random, self.asked, self.lock, self.until = np.random.default_rng(seed), 0, threading.Lock(), until

    def call_tool(self, call: Call) -> Result:
        if self.until is not None and call.arguments["query"] >= "4":
            self.until.wait(60)
        with self.lock:
            self.asked += 1
            return Result(f"{self.random.integers(20, 90)}")

    @property
    def reward(self) -> Reward:
        return Reward(lambda *_: RewardResult(float(self.random.random())))


def rollout(effect_log: EffectLog, world: Fickle, work, **more) -> list[dict]:
    """The trajectories of a rollout whose answers are kept."""
    with Engine() as engine, effect_log.recording("train", 1):
        effects = {"call_tool": effect_log.wrap_tools(world.call_tool), "reward": effect_log.wrap_reward(world.reward)}
        played = run(engine, work, **effects, more=more)
    return values(played)


def test_S1_an_interrupted_rollout_is_the_same_when_repeated(tmp_path):
    """Its tools and its reward answer differently each time; what they had answered decides."""
    work, ended = tasks_of(6, 2), []

    def stop(played) -> None:
        ended.append(value(played))
        if len(ended) == 5:
            raise KeyboardInterrupt

    late = threading.Event()  # the last groups do not get far before the rollout is stopped
    first, second, third = Fickle(1, until=late), Fickle(2), Fickle(3)
    with pytest.raises(KeyboardInterrupt):
        rollout(EffectLog(tmp_path), first, work, on_trajectory=stop)
    late.set()
    kept = len((tmp_path / "000001-train.jsonl").read_text().splitlines())
    again = rollout(EffectLog(tmp_path), second, work)
    assert first.asked > 0 < second.asked
    assert [one for one in ended if one not in again] == []  # with their tools' answers, and their verdicts
    assert rollout(EffectLog(tmp_path), third, work) == again
    assert third.asked == 0
    assert len((tmp_path / "000001-train.jsonl").read_text().splitlines()) > kept
    assert rollout(EffectLog(tmp_path / "other"), Fickle(4), work) != again


# Deadlines --------------------------------------------------------------------------------------------------


def attempt(folder, engine, work, call_tool, *, env=None, **deadlines):
    """One attempt at the rollout of an update: what each trajectory became, those given back, and the tokens lost."""
    effect_log = EffectLog(folder)
    more = {"expired_deadlines": effect_log.expired_deadlines(), "concurrency": 5, **deadlines}
    with effect_log.recording("train", 1):
        got = hosted(env or make_env(), engine.submit, call_tool=effect_log.wrap_tools(call_tool), **more)(*work)
    back = [(one.group, one.sample, len(one.turns), one.effect_counts) for one in got.unfinished]
    return values(got), back, got.ledger


@pytest.mark.parametrize("kind", ["tool", "role"])
def test_S1_a_call_past_its_deadline_is_stopped_again(tmp_path, kind):
    """Its tool would answer now; the reasons, statuses and turns are those of the first attempt."""
    work = tasks_of(4, 4)
    with Engine() as engine:
        whole = values(run(engine, work))
        stuck = {one["task"]["Task"]["query"] for one in whole if "echo" in one["tools"]}
        stuck = set(sorted(stuck)[:3])

        def late(call):
            return hang(call) if call.kind == kind and call.arguments["query"] in stuck else answer(call)

        first = attempt(tmp_path, engine, work, late, turn_deadline=0.5)
        again = attempt(tmp_path, engine, work, answer, turn_deadline=60.0)
        fresh_context = attempt(tmp_path / "fresh", engine, work, answer, turn_deadline=60.0)
    status = "TIMEOUT" if kind == "tool" else "TOOL_FAILURE"
    assert {one["task"]["Task"]["query"] for one in first[0] if one["status"] == status} >= stuck
    assert again == first
    assert fresh_context[0] == whole


class Stalling(Engine):
    """Leaves what is asked after a first turn without an answer; time passes with each request that it leaves."""

    def __init__(self):
        super().__init__()
        self.left = []

    def submit(self, request):
        if len(request.tokens) <= 2:
            return super().submit(request)
        self.left.append(request)
        return Future()

    def monotonic(self) -> float:
        return float(len(self.left))


@pytest.mark.parametrize("width", [1, 5])
def test_S1_trajectories_that_a_group_deadline_returned_are_returned_again(tmp_path, monkeypatch, width):
    """Those that waited for the engine; and, where they go one by one, those of the group that had not started."""
    work = tasks_of(3, 4)
    with Stalling() as slow, Engine() as engine:
        monkeypatch.setattr(importlib.import_module("flowgrpo.rollout.hosted"), "time", slow)
        first = attempt(tmp_path, slow, work, answer, concurrency=width, deadline=0.1)
        monkeypatch.undo()
        again = attempt(tmp_path, engine, work, answer, concurrency=width, deadline=60.0)
    turns = [count for _, _, count, _ in first[1]]
    assert turns.count(1) >= 1
    assert width > 1 or turns.count(0) >= 1
    assert again == first


def test_S1_a_reward_past_its_deadline_is_missing_again(tmp_path):
    work, ended = tasks_of(2, 2), threading.Event()

    def judge(seconds: float) -> Reward:
        def score_all(tasks, outputs):
            if tasks[0].query.startswith("1/"):
                ended.wait(seconds)
            return [RewardResult(0.5)] * len(outputs)

        return Reward(lambda task, output: score_all([task], [output])[0], score_all)

    with Engine() as engine:
        first = attempt(tmp_path, engine, work, answer, reward=judge(20.0), judge_deadline=0.5)
        again = attempt(tmp_path, engine, work, answer, reward=judge(0.0), judge_deadline=60.0)
    ended.set()
    late = [one for one in first[0] if one["status"] == "VERIFIER_FAILURE"]
    assert {one["group"] for one in late} == {1}
    assert again == first
