"""External environments: rolled out, replayed, restored after a kill, and named when they hang.

FLOWGRPO_ENVS names a Python that has gymnasium, textarena and openenv.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from functools import cache
from pathlib import Path

import jax
import pytest
from gateway_cases import tiny_model

import flowgrpo as fg
from flowgrpo.external_envs import EnvProcess
from flowgrpo.rollout.conversation_env import conversation_env
from flowgrpo.rollout.records import from_json, to_json
from flowgrpo.types import Status

HERE = Path(__file__).parent.parent
PYTHON = os.environ.get("FLOWGRPO_ENVS", sys.executable)


class Scripted:
    """An engine whose completions are these words, one after the other in each conversation."""

    def __init__(self, *words: str):
        self.words, self.requests = words, []

    def submit(self, request):
        self.requests.append(request)
        text, stop = tiny_model().tokenizer, tiny_model().tokenizer.stop_ids[0]
        number = sum(
            1 for token, chosen in zip(request.tokens, request.chosen, strict=True) if chosen and token == stop
        )
        ids = [*text.encode(self.words[number % len(self.words)]), stop]
        future = Future()
        future.set_result(fg.contracts.Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop"))
        return future


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def make_env(**settings) -> fg.HostEnv:
    sizes = {"turns": 6, "max_tokens": 80, "context_tokens": 600, "tools": ("add",)}
    return conversation_env(tiny_model().tokenizer, **{**sizes, **settings})


def tasks_of(count: int, **fields) -> list[fg.Task]:
    return [fg.Task(f"seed-{i}", "", (), "env", {"seed": i, **fields}) for i in range(count)]


def play(process, words, tasks=None, env=None, **more):
    tasks = tasks_of(2) if tasks is None else tasks
    keys = jax.random.split(jax.random.key(1), len(tasks))
    engine = Scripted(*words)
    rollout = fg.hosted(env or make_env(), engine.submit, **{"call_tool": process.call_tool, **more})
    return rollout(tasks, keys, list(range(len(tasks)))).trajectories, engine


@pytest.fixture(scope="module")
def counter():
    before = os.getcwd()
    os.chdir(HERE)
    with EnvProcess("trl", "external_env_cases:Counter", timeout=20) as process:
        yield process
    os.chdir(before)


def test_public_methods_are_tools_and_the_reward_comes_at_the_end(counter):
    words = [call("add", amount=2), call("add", amount=1, note="last"), "done"]
    trajectories, engine = play(counter, words)
    text = tiny_model().tokenizer
    assert text.decode(engine.requests[0].tokens) == (
        "<|im_start|>system\nTools: add die hang<|im_end|>\n<|im_start|>user\nCount to 3.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    for trajectory in trajectories:
        assert (trajectory.status, trajectory.outcome, trajectory.correct, trajectory.output) == (
            Status.FINISHED,
            1.0,
            True,
            "done",
        ), trajectory.reason
        assert trajectory.tools == ("add", "add", "")
        assert (
            text.decode(trajectory.turns[2].tokens[~trajectory.turns[2].chosen]).split("\n")[2]
            == "the count is 3: last<|im_end|>"
        )
        assert to_json(fg.replay(make_env(), from_json(to_json(trajectory)))) == to_json(trajectory)


def test_fields_of_a_task_reach_reset_and_a_wrong_count_has_outcome_0(counter):
    trajectories, engine = play(counter, [call("add", amount=2), "done"], tasks_of(1, target=7))
    assert "Count to 7." in tiny_model().tokenizer.decode(engine.requests[0].tokens)
    assert (trajectories[0].outcome, trajectories[0].correct) == (0.0, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("<tool_call>{</tool_call>", "Error: the tool call can't be read"),
        (call("_hidden"), "Error: there is no tool '_hidden'"),
        (call("add"), "Error: TypeError: "),
        (call("add", amount="x"), "Error: TypeError: "),
    ],
)
def test_A4_a_malformed_call_is_an_observation(counter, words, said):
    trajectory = play(counter, [words, "done"], tasks_of(1))[0][0]
    assert trajectory.status == Status.FINISHED, trajectory.reason
    assert trajectory.errors == (True, False)
    assert said in tiny_model().tokenizer.decode(trajectory.turns[1].tokens)


def test_S1_a_killed_process_is_restarted_and_its_episode_restored(counter):
    words, calls = [call("add", amount=1)] * 3 + ["done"], []

    def call_tool(request):
        calls.append(request)
        if len(calls) == 3:
            os.kill(counter._process.pid, signal.SIGKILL)
            counter._process.wait()
        return counter.call_tool(request)

    trajectory = play(counter, words, tasks_of(1), call_tool=call_tool)[0][0]
    assert (trajectory.status, trajectory.outcome) == (Status.FINISHED, 1.0), trajectory.reason


def test_S3_an_episode_that_hangs_times_out_and_delays_no_other(monkeypatch):
    monkeypatch.chdir(HERE)
    with EnvProcess("trl", "external_env_cases:Counter", timeout=5.0) as process:
        process.check()
        process.timeout = 0.5
        trajectories, _ = play(process, [call("hang"), "done"], tasks_of(3))
        for trajectory in trajectories:
            assert (trajectory.status, trajectory.outcome) == (Status.TOOL_FAILURE, None)
            assert trajectory.reason == "trl:external_env_cases:Counter did not answer a call within 0.5 s"
        assert play(process, [call("add", amount=3), "done"], tasks_of(1))[0][0].outcome == 1.0


def test_F5_an_environment_that_ends_its_process_takes_no_part(counter):
    trajectory = play(counter, [call("die"), "done"], tasks_of(1))[0][0]
    assert (trajectory.status, trajectory.outcome) == (Status.TOOL_FAILURE, None)
    assert (
        "trl:external_env_cases:Counter ended twice at the same place: its process ended with status"
        in trajectory.reason
    )


@pytest.mark.parametrize(
    ("kind", "spec", "why"),
    [
        ("trl", "external_env_cases:Broken", "can't be started: RuntimeError: no licence"),
        ("trl", "no_module:X", "can't be started: ModuleNotFoundError: No module named 'no_module'"),
        ("openenv", "ws://127.0.0.1:1/ws", "can't be started: "),
    ],
)
def test_an_environment_that_cannot_start_gives_one_sentence(monkeypatch, kind, spec, why):
    monkeypatch.chdir(HERE)
    with EnvProcess(kind, spec) as process, pytest.raises(fg.BadInput, match=f"the environment {kind}:{spec} {why}"):
        process.check()


def test_unknown_kinds_and_pythons_are_refused():
    with pytest.raises(fg.BadInput, match="of the kind 'chess' are unknown; choose from trl, gymnasium, textarena"):
        EnvProcess("chess", "x")
    with EnvProcess("trl", "x", python="/no/python") as process, pytest.raises(fg.BadInput, match="can't be started"):
        process.check()


def test_the_contract_of_host_environments_holds(counter):
    def act(random, _request):
        text = tiny_model().tokenizer
        words = [call("add", amount=int(random.integers(3))), "done"][int(random.integers(2))]
        return [*text.encode(words), text.stop_ids[0]]

    fg.check_host_env(
        make_env(), tasks_of(2), call_tool=counter.call_tool, act=act, vocabulary=tiny_model().tokenizer.vocab_size
    )


# Those of others ----------------------------------------------------------------------------------------


@cache
def has(module: str) -> bool:
    code = f"import {module}"
    return subprocess.run([PYTHON, "-c", code], check=False, capture_output=True).returncode == 0


needs_gymnasium = pytest.mark.skipif(not has("gymnasium"), reason="an environment of gymnasium: pip install gymnasium")
needs_textarena = pytest.mark.skipif(not has("textarena"), reason="a game of textarena: pip install textarena")
needs_openenv = pytest.mark.skipif(not has("openenv.core"), reason="a server of OpenEnv: pip install openenv-core")


@pytest.mark.oracle
@needs_gymnasium
def test_gymnasium_takes_numbers_and_gives_rewards_by_step():
    with EnvProcess("gymnasium", "FrozenLake-v1", python=PYTHON) as process:
        env = make_env(turns=20)
        trajectories, engine = play(process, ["up", "2", "down 1"], tasks_of(2), env)
        again, _ = play(process, ["up", "2", "down 1"], tasks_of(2), env)
    assert "Error: an action is a number from 0 to 3" in tiny_model().tokenizer.decode(engine.requests[-1].tokens)
    for trajectory, other in zip(trajectories, again, strict=True):
        assert trajectory.status in (Status.FINISHED, Status.TURN_LIMIT), trajectory.reason
        assert trajectory.errors[:3] == (True, False, False)
        assert [len(turn.tokens) for turn in trajectory.turns] == [
            len(turn.tokens) for turn in other.turns
        ]  # by its seed
        assert trajectory.outcome in (0.0, 1.0)


@pytest.mark.oracle
@needs_textarena
def test_textarena_is_played_by_words():
    with EnvProcess("textarena", "GuessTheNumber-v0", python=PYTHON) as process:
        env = make_env(turns=12, context_tokens=40_000)
        trajectories, _ = play(process, [f"[{n}]" for n in (10, 5, 15, 3, 7, 12, 18, 1, 20)], tasks_of(1), env)
    assert trajectories[0].status in (Status.FINISHED, Status.TURN_LIMIT), trajectories[0].reason
    assert len(trajectories[0].turns) > 1


SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Message(Action):
    message: str

class Reply(Observation):
    text: str

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.count = 0
        return Reply(text=f"say something {seed}", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        self.count += 1
        return Reply(text=f"you said {action.message}", done=self.count == 2, reward=float(action.message == "hello"))

    @property
    def state(self):
        return State()

app = create_fastapi_app(Echo, Message, Reply, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""


@pytest.mark.oracle
@needs_openenv
def test_openenv_over_its_websocket(tmp_path):
    import socket
    import time

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    server = subprocess.Popen([PYTHON, str(script), str(port)])
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        with EnvProcess("openenv", f"ws://127.0.0.1:{port}/ws", python=PYTHON, timeout=20) as process:
            trajectories, engine = play(process, ["hello", "what"], tasks_of(3))
            for trajectory in trajectories:
                assert (trajectory.status, trajectory.outcome, len(trajectory.turns)) == (Status.FINISHED, 1.0, 2), (
                    trajectory.reason
                )
            assert any(
                "say something 0" in tiny_model().tokenizer.decode(request.tokens) for request in engine.requests
            )
            os.kill(server.pid, signal.SIGSTOP)  # a server that hangs
            process.timeout = 0.5
            hung, _ = play(process, ["hello"], tasks_of(1))
            assert hung[0].status == Status.TOOL_FAILURE
            assert "did not answer a reset within 0.5 s" in hung[0].reason
    finally:
        server.kill()
        server.wait()
