"""The verifiers of reasoning-gym, in a child process."""

from unittest.mock import Mock

import pytest

from flowgrpo.data.task_files import read_tasks
from flowgrpo.rewards import reasoning_gym_child
from flowgrpo.rewards.reasoning_gym import PRELOAD, reasoning
from flowgrpo.sandbox import CallFailed, Sandbox, SandboxFailure
from flowgrpo.types import Task

TASK = Task("t", "?", (), "reasoning_gym", {"reasoning_gym": {"name": "chain_sum", "options": {"seed": 1}, "index": 0}})


def call_in_process(function, *arguments, seconds):  # noqa: ARG001
    """`Sandbox.call` without a process."""
    return getattr(reasoning_gym_child, function.split(":")[1])(*arguments)


@pytest.mark.oracle
def test_the_verifier_knows_its_own_answers_and_runs_in_the_sandbox():
    names = ("countdown", "maze", "game_of_life", "sudoku", "rubiks_cube", "simple_integration")
    with Sandbox(preload=PRELOAD, unsafe=True) as sandbox:
        for call, name in [(call_in_process, "chain_sum"), *((sandbox.call, name) for name in names)]:
            reward = reasoning(call, seconds=60.0)
            for task in read_tasks(f"reasoning_gym:{name}?size=2&seed=5"):
                if task.answers:
                    assert reward.score(task, f"<answer>{task.answers[0]}</answer>").value == 1.0
                assert reward.score(task, "<answer>no idea</answer>").value < 0.5
                assert reward.score(task, "").value == 0.0


def test_a_failure_that_the_answer_caused_is_0_and_any_other_is_invalid():
    for error, value in (
        (TimeoutError("late"), 0.0),
        (CallFailed("ProcessDied", "killed"), 0.0),
        (CallFailed("ImportError", "no reasoning_gym"), None),
        (SandboxFailure("lost"), None),
    ):
        scored = reasoning(Mock(side_effect=error)).score(TASK, "The answer is 3")
        assert scored.value == value
        assert scored.reason
    assert reasoning(call_in_process).score(Task("t", "?", ("1",), "math"), "1").value is None  # a task of another kind
