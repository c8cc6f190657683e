"""Clients of other projects over the real engine: ids, masks and log-probabilities are those of `fg.hosted` on an
environment with the same messages.

FLOWGRPO_CLIENTS is a Python that has smolagents and langgraph, if they are not installed beside this package;
FLOWGRPO_VERIFIERS is one that has verifiers, whose pins conflict with both.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from gateway.test_agents import Scripted, by_hand, hosting, same_bits
from gateway_cases import keys_of, make_env, tasks_of

import flowgrpo as fg
from flowgrpo.rollout.records import from_json, to_json
from flowgrpo.types import Status

CLIENTS = Path(__file__).parent / "clients"
PYTHON = os.environ.get("FLOWGRPO_CLIENTS", sys.executable)
VERIFIERS = os.environ.get("FLOWGRPO_VERIFIERS", sys.executable)
pytestmark = pytest.mark.oracle


@cache
def has(python: str, *modules: str) -> bool:
    code = f"from importlib.util import find_spec; assert all(map(find_spec, {modules!r}))"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


def client(name: str, *needs: str, python: str = PYTHON) -> object:
    why = f"a client by {' and '.join(needs)}: pip install {' '.join(needs)}"
    words = [python, str(CLIENTS / name.split()[0]), *name.split()[1:]]
    lacking = pytest.mark.skipif(not has(python, *(need.replace("-", "_") for need in needs)), reason=why)
    return pytest.param(words, marks=lacking, id=name)


SAME = [
    client("sync.py", "openai"),
    client("streaming.py", "openai"),
    client("responses.py", "openai"),
    client("agents_sdk.py chats", "agents"),
    client("agents_sdk.py responses", "agents"),
    client("graph.py", "langgraph", "langchain_openai"),
    client("verifiers_env.py", "verifiers", python=VERIFIERS),
    pytest.param(
        ["sh", str(CLIENTS / "shell.sh")],
        marks=pytest.mark.skipif(shutil.which("curl") is None, reason="a client by curl, which is not installed"),
        id="shell.sh",
    ),
]


@pytest.mark.parametrize("words", SAME)
def test_A7_clients_have_the_bits_of_a_hosted_environment(engine, words):
    with hosting(words, engine, retries=0, silent_timeout=60.0) as play:
        got = play(2)
    rollout = fg.hosted(by_hand(["again 0", "again 1"]), engine.submit)
    expected = rollout(tasks_of(2), keys_of(2), [0, 1])
    for trajectory, other in zip(got.trajectories, expected.trajectories, strict=True):
        assert trajectory.status == Status.FINISHED, trajectory.reason
        assert trajectory.output.strip() == other.output.strip()
        assert not any(turn.starts_context for turn in trajectory.turns)
        same_bits(trajectory, other)


@pytest.mark.parametrize("words", [client("agents_sdk.py chats tools", "agents")])
def test_an_agent_that_calls_a_tool_continues_the_sampled_ids(words):
    engine = Scripted('<tool_call>{"name": "add", "arguments": {"x": 2, "y": 3}}</tool_call>', "it is 5")
    with hosting(words, engine, retries=0) as play:
        trajectory = play(1, env=make_env(max_tokens=64, tools=("add",))).trajectories[0]
    assert trajectory.status == Status.FINISHED, trajectory.reason
    assert trajectory.output == "it is 5"
    assert trajectory.tools == ("add", "")
    assert not any(turn.starts_context for turn in trajectory.turns)
    said = json.loads(trajectory.log[1].result.text)["asks"]["messages"]
    assert [(message["role"], message["content"]) for message in said] == [("tool", "5")]


@pytest.mark.parametrize("words", [client("smol.py", "smolagents")])
def test_an_agent_that_writes_code_is_recorded(engine, words):
    """Its model writes noise, which the agent answers with an error, before it requests a last answer."""
    with hosting(words, engine, retries=0) as play:
        trajectory = play(1, env=make_env(context_tokens=255)).trajectories[0]
    assert trajectory.status in (Status.FINISHED, Status.TOKEN_LIMIT, Status.ABORTED, Status.TOOL_FAILURE), (
        trajectory.reason
    )
    assert to_json(from_json(to_json(trajectory))) == to_json(trajectory)


@pytest.mark.parametrize("words", [client("verifiers_env.py", "verifiers", python=VERIFIERS)])
def test_the_reward_of_a_verifiers_environment_is_the_outcome(engine, words):
    with hosting(words, engine, retries=0, silent_timeout=60.0) as play:
        trajectories = play(2).trajectories
    assert [trajectory.outcome for trajectory in trajectories] == [
        pytest.approx(1 / (1 + len(trajectory.output.strip("\n")))) for trajectory in trajectories
    ]
