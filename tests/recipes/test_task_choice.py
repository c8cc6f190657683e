"""Choose the tasks that a hosted run trains on: what is known is learned, and goes on (S1)."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tiny_hosted import ENV, POLICY, make_setup, tasks

import flowgrpo as fg
from flowgrpo.envs.env import PAD
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.requests import EngineSettings
from flowgrpo.recipes import agent_config
from flowgrpo.recipes.agent import POOL, task_source_of
from flowgrpo.training.checkpoints import Checkpoints, params_sha256
from flowgrpo.training.curriculum import (
    HardTaskSampler,
    curriculum_metrics,
    make_task_sampler,
    success_by_group,
)
from flowgrpo.training.hosted_training import HostedTrainable
from flowgrpo.training.pure_env import max_trajectory_tokens
from flowgrpo.training.session import run_session
from flowgrpo.training.settings import ChosenTasksSection
from flowgrpo.types import BadInput


def played(*groups: tuple, of: Sequence[int] = range(100)) -> list[Any]:
    """Trajectories by group, of these tasks: True and False are right and wrong, None has no outcome."""
    return [
        SimpleNamespace(
            task=SimpleNamespace(id=str(of[group])),
            group=group,
            outcome=None if right is None else 0.0,
            correct=bool(right),
        )
        for group, own in enumerate(groups)
        for right in own
    ]


# Settings ---------------------------------------------------------------------------------------------------


def test_a_curriculum_is_as_long_as_the_run_by_default():
    assert curriculum(9).curriculum_updates == 9
    assert curriculum(9, curriculum_updates=4).curriculum_updates == 4
    assert agent_config.preset(updates=9).tasks.curriculum_updates is None


def curriculum(updates: int, **more: Any) -> ChosenTasksSection:
    return agent_config.preset(prompts="curriculum", difficulty="level", updates=updates, **more).tasks


@pytest.mark.parametrize(
    ("prompts", "more", "words"),
    [
        ("random", {}, "--prompts=random is unknown; choose from uniform, hard, curriculum"),
        ("curriculum", {}, "--prompts=curriculum needs --difficulty"),
        ("hard", {"difficulty": "level"}, "--difficulty=level needs --prompts=curriculum"),
        ("uniform", {"curriculum_updates": 3}, "--curriculum_updates=3 needs --prompts=curriculum"),
    ],
)
def test_what_does_not_go_together_is_refused(prompts, more, words):
    with pytest.raises(BadInput, match=words):
        agent_config.preset(prompts=prompts, updates=9, **more)


def test_uniform_prompts_use_the_given_draw_and_no_tasks_are_refused():
    never = lambda: pytest.fail("nobody needs all tasks")  # noqa: E731
    assert make_task_sampler(ChosenTasksSection(), tasks, never, groups=4, seed=0) == (tasks, None)
    with pytest.raises(BadInput, match="there is no task to train on"):
        make_task_sampler(ChosenTasksSection(prompts="hard"), tasks, list, groups=4, seed=0)


def test_the_offline_world_numbers_the_first_of_its_tasks():
    source = task_source_of(agent_config.preset())
    numbered = source.train()
    assert len(numbered) == POOL
    assert [task.id for task in numbered[:6]] == [task.id for task in source.draw("train", 0, 6)]
    with pytest.raises(BadInput, match="field 'level' is missing"):
        make_task_sampler(curriculum(2), source.draw, source.train, groups=4, seed=0)


def test_a_task_file_numbers_its_part_for_training(tmp_path):
    path = tmp_path / "tasks.jsonl"
    task = {"domain": "mathematics", "query": "What is 2 + 2?", "answers": ["4"]}
    path.write_text("".join(json.dumps(task | {"id": f"sum-{number}"}) + "\n" for number in range(60)))
    source = task_source_of(agent_config.preset("a/model", tasks=str(path)))
    numbered = source.train()
    drawn = source.draw("train", 0, len(numbered))
    assert sorted(task.id for task in drawn) == sorted(task.id for task in numbered)


# By difficulty ----------------------------------------------------------------------------------------------


def graded(_split: str, first: int, count: int) -> list[fg.Task]:
    return [fg.Task(f"{i}", "?", ("1",), "toy", {"level": -i}) for i in range(first, first + count)]


def test_a_curriculum_opens_the_easiest_first_in_training_only():
    chosen = curriculum(8)
    draw, hard = make_task_sampler(chosen, graded, lambda: graded("train", 0, 8), groups=4, seed=5)
    assert hard is None
    assert draw("validation", 3, 4) == graded("validation", 3, 4)
    updates = [{int(task.id) for task in draw("train", update * 4, 4)} for update in range(8)]
    assert updates[0] == {6, 7}
    assert all(min(found) >= least for found, least in zip(updates, (6, 4, 3, 1, 0, 0, 0, 0), strict=True))
    assert updates[6] | updates[7] == set(range(8))
    assert draw("train", 0, 32)[5:23] == draw("train", 5, 18)
    assert [curriculum_metrics(chosen, update)["tasks_open"] for update in (0, 2, 4, 7)] == [0.25, 0.625, 1.0, 1.0]
    for prompts in ("uniform", "hard"):
        assert curriculum_metrics(ChosenTasksSection(prompts=prompts), 0) == {}


# By success -------------------------------------------------------------------------------------------------


def test_F5_success_rates_ignore_trajectories_without_an_outcome():
    given = played((True, False, None), (None, None), (False, False), (True,))
    assert success_by_group(given) == {0: 0.5, 2: 0.0, 3: 1.0}


def test_what_is_learned_moves_the_next_draw_and_no_earlier_one():
    hard = HardTaskSampler(tasks("train", 0, 8), 0, groups=4)
    first = hard.task_numbers(0)
    assert [task.id for task in hard.tasks(0)] == [str(number) for number in first]
    figures = hard.record_results(0, played(*[(True, True)] * 4, of=first))
    assert figures == {"prompt_priority": 1.0, "tasks_seen": len(set(first)) / 8}
    assert hard.task_numbers(0) == first
    known = json.loads(hard.to_checkpoint(1)["known"])
    assert known == {str(number): 1.0 for number in sorted(set(first))}
    assert json.loads(hard.to_checkpoint(0)["known"]) == {}
    assert hard.rates(0) == {}
    assert hard.changed_rates(0) == hard.rates(1) == dict.fromkeys(first, 1.0)


def test_tasks_that_are_solved_come_up_seldom():
    hard = HardTaskSampler(tasks("train", 0, 8), 0, groups=800)
    hard.restore(1, {"tasks": 8, "known": json.dumps(dict.fromkeys("0123", 1.0))})
    solved = sum(number < 4 for number in hard.task_numbers(1))
    assert abs(solved - 800 / 11) < 40


def test_success_rates_are_restored_and_other_tasks_refused():
    hard, other = (HardTaskSampler(tasks("train", 0, 8), 0, groups=4) for _ in range(2))
    hard.record_results(0, played((True, False), (True, True), (None,), (False,), of=hard.task_numbers(0)))
    other.restore(1, hard.to_checkpoint(1))
    assert other.task_numbers(1) == hard.task_numbers(1)
    assert other.to_checkpoint(1) == hard.to_checkpoint(1)
    with pytest.raises(BadInput, match="knows of 8 tasks of training, but there are 9: give the tasks"):
        HardTaskSampler(tasks("train", 0, 9), 0, groups=4).restore(1, hard.to_checkpoint(1))


# A run ------------------------------------------------------------------------------------------------------

RUN = {"seed": 0, "updates": 5, "validation_tasks": 4, "test_tasks": 4}


def run_in(folder: Path) -> dict[str, Any]:
    """A run of five updates, or the rest of it, with a checkpoint after every second one."""
    params = POLICY.init(jax.random.key(0))
    sizes = EngineSettings(slots=8, slot_length=max_trajectory_tokens(ENV) + 8, chunk=8, steps=4, banned=(PAD,))
    with Engine(POLICY, params, sizes) as engine:
        setup = make_setup(folder, engine, params, **RUN)
        draw, hard = make_task_sampler(
            ChosenTasksSection(prompts="hard"),
            setup.tasks,
            lambda: tasks("train", 0, 12),
            groups=setup.sizes.queries,
            seed=0,
        )
        return run_session(HostedTrainable(setup._replace(tasks=draw, task_sampler=hard), "toy"), folder, every=2)


def final(folder: Path) -> tuple:
    """Read what must be equal in equal runs: the last checkpoint's update, state and memory, and the metrics."""
    checkpoints = Checkpoints(folder)
    last = checkpoints.latest()
    assert last is not None
    state = params_sha256(checkpoints.restore_part(last, "run"))
    return last, state, checkpoints.restore_part(last, "memory"), (folder / "metrics.jsonl").read_bytes()


def die() -> None:
    raise RuntimeError("killed")


def ask() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple:
    """Run without interruption, and return what `final` reads of it."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_in(folder)
    return final(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "end", "caught", "goes_on"),
    [("tasks", die, RuntimeError, 2), ("record_results", ask, KeyboardInterrupt, 3)],
    ids=["killed before a rollout", "stopped when all of an update was learned but its weights"],
)
def test_S1_a_run_with_hard_prompts_resumes_exactly(whole, tmp_path, monkeypatch, method, end, caught, goes_on):
    trained = [line for line in map(json.loads, whole[-1].splitlines()) if line["phase"] == "train"]
    assert trained[0]["prompt_priority"] == 1.0 > trained[-1]["prompt_priority"]
    assert 0 < trained[0]["tasks_seen"] < trained[-1]["tasks_seen"] <= 1
    own = getattr(HardTaskSampler, method)

    def ended(hard, update, *given):
        found = own(hard, update, *given)
        if update == 3:
            end()
        return found

    monkeypatch.setattr(HardTaskSampler, method, ended)
    with pytest.raises(caught):
        run_in(tmp_path)
    monkeypatch.undo()
    assert run_in(tmp_path)["resumed_at"] == [goes_on]
    assert final(tmp_path) == whole
