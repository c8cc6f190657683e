"""Environments of somebody else's: played, replayed, brought back after a kill, and named when they hang.

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
from flowgrpo.external_envs import EnvProcess, external_env
from flowgrpo.rollout.records import from_json, to_json
from flowgrpo.types import Status

HERE = Path(__file__).parent.parent
PYTHON = os.environ.get("FLOWGRPO_ENVS", sys.executable)


class Scripted:
    """An engine that says these words, one after the other in each conversation."""

    def __init__(self, *words: str):
        self.words, self.requests = words, []

    def submit(self, request):
        self.requests.append(request)
        text, stop = tiny_model().text, tiny_model().text.stop_ids[0]
        number = sum(1 for token, own in zip(request.tokens, request.chosen, strict=True) if own and token == stop)
        ids = [*text.encode(self.words[number % len(self.words)]), stop]
        future = Future()
        future.set_result(fg.Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop"))
        return future


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def env_of(**settings) -> fg.HostEnv:
    sizes = {"turns": 6, "max_tokens": 80, "context_tokens": 600, "tools": ("add",)}
    return external_env(tiny_model().text, **{**sizes, **settings})


def tasks_of(count: int, **fields) -> list[fg.Task]:
    return [fg.Task(f"seed-{i}", "", (), "env", {"seed": i, **fields}) for i in range(count)]


def play(process, words, tasks=None, env=None, **more):
    tasks = tasks_of(2) if tasks is None else tasks
    keys = jax.random.split(jax.random.key(1), len(tasks))
    engine = Scripted(*words)
    rollout = fg.hosted(env or env_of(), engine.submit, **{"do": process.do, **more})
    return rollout(tasks, keys, list(range(len(tasks)))).played, engine


@pytest.fixture(scope="module")
def counter():
    before = os.getcwd()
    os.chdir(HERE)
    with EnvProcess("trl", "external_env_cases:Counter", seconds=20) as process:
        yield process
    os.chdir(before)


def test_public_methods_are_tools_and_the_environment_pays_at_the_end(counter):
    words = [call("add", amount=2), call("add", amount=1, note="last"), "done"]
    played, engine = play(counter, words)
    text = tiny_model().text
    assert text.decode(engine.requests[0].tokens) == (
        "<|im_start|>system\nTools: add die hang<|im_end|>\n<|im_start|>user\nCount to 3.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    for one in played:
        assert (one.status, one.outcome, one.correct, one.output) == (Status.FINISHED, 1.0, True, "done"), one.reason
        assert one.tools == ("add", "add", "")
        assert text.decode(one.turns[2].tokens[~one.turns[2].chosen]).split("\n")[2] == "the count is 3: last<|im_end|>"
        assert to_json(fg.replay(env_of(), from_json(to_json(one)))) == to_json(one)


def test_the_fields_of_a_task_reach_reset_and_a_wrong_count_is_paid_nothing(counter):
    played, engine = play(counter, [call("add", amount=2), "done"], tasks_of(1, target=7))
    assert "Count to 7." in tiny_model().text.decode(engine.requests[0].tokens)
    assert (played[0].outcome, played[0].correct) == (0.0, False)


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
    one = play(counter, [words, "done"], tasks_of(1))[0][0]
    assert one.status == Status.FINISHED, one.reason
    assert one.errors == (True, False)
    assert said in tiny_model().text.decode(one.turns[1].tokens)


def test_S1_a_process_that_was_killed_is_started_again_and_brought_to_where_it_was(counter):
    words, told = [call("add", amount=1)] * 3 + ["done"], []

    def do(request):
        told.append(request)
        if len(told) == 3:
            os.kill(counter._process.pid, signal.SIGKILL)
            counter._process.wait()
        return counter.do(request)

    one = play(counter, words, tasks_of(1), do=do)[0][0]
    assert (one.status, one.outcome) == (Status.FINISHED, 1.0), one.reason


def test_S3_what_hangs_is_named_within_its_deadline_and_keeps_no_other_waiting(monkeypatch):
    monkeypatch.chdir(HERE)
    with EnvProcess("trl", "external_env_cases:Counter", seconds=5.0) as process:
        process.check()
        process.seconds = 0.5
        played, _ = play(process, [call("hang"), "done"], tasks_of(3))
        for one in played:
            assert (one.status, one.outcome) == (Status.TOOL_FAILURE, None)
            assert one.reason == "trl:external_env_cases:Counter did not answer a call within 0.5 s"
        assert play(process, [call("add", amount=3), "done"], tasks_of(1))[0][0].outcome == 1.0


def test_F5_an_environment_that_ends_its_process_takes_no_part(counter):
    one = play(counter, [call("die"), "done"], tasks_of(1))[0][0]
    assert (one.status, one.outcome) == (Status.TOOL_FAILURE, None)
    assert "trl:external_env_cases:Counter ended twice at the same place: its process ended with status" in one.reason


@pytest.mark.parametrize(
    ("kind", "spec", "why"),
    [
        ("trl", "external_env_cases:Broken", "can't be begun: RuntimeError: no licence"),
        ("trl", "no_module:X", "can't be begun: ModuleNotFoundError: No module named 'no_module'"),
        ("openenv", "ws://127.0.0.1:1/ws", "can't be begun: "),
    ],
)
def test_what_cannot_be_begun_is_one_sentence(monkeypatch, kind, spec, why):
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
        text = tiny_model().text
        words = [call("add", amount=int(random.integers(3))), "done"][int(random.integers(2))]
        return [*text.encode(words), text.stop_ids[0]]

    fg.check_host_env(env_of(), tasks_of(2), do=counter.do, act=act, vocabulary=tiny_model().text.vocab_size)


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
def test_gymnasium_is_stepped_by_numbers_and_pays_by_steps():
    with EnvProcess("gymnasium", "FrozenLake-v1", python=PYTHON) as process:
        env = env_of(turns=20)
        played, engine = play(process, ["up", "2", "down 1"], tasks_of(2), env)
        again, _ = play(process, ["up", "2", "down 1"], tasks_of(2), env)
    assert "Error: an action is a number from 0 to 3" in tiny_model().text.decode(engine.requests[-1].tokens)
    for one, other in zip(played, again, strict=True):
        assert one.status in (Status.FINISHED, Status.TURN_LIMIT), one.reason
        assert one.errors[:3] == (True, False, False)
        assert [len(turn.tokens) for turn in one.turns] == [len(turn.tokens) for turn in other.turns]  # by its seed
        assert one.outcome in (0.0, 1.0)


@pytest.mark.oracle
@needs_textarena
def test_textarena_is_played_by_words():
    with EnvProcess("textarena", "GuessTheNumber-v0", python=PYTHON) as process:
        env = env_of(turns=12, context_tokens=40_000)
        played, _ = play(process, [f"[{n}]" for n in (10, 5, 15, 3, 7, 12, 18, 1, 20)], tasks_of(1), env)
    assert played[0].status in (Status.FINISHED, Status.TURN_LIMIT), played[0].reason
    assert len(played[0].turns) > 1


SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Said(Action):
    message: str

class Heard(Observation):
    text: str

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.count = 0
        return Heard(text=f"say something {seed}", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        self.count += 1
        return Heard(text=f"you said {action.message}", done=self.count == 2, reward=float(action.message == "hello"))

    @property
    def state(self):
        return State()

app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""


@pytest.mark.oracle
@needs_openenv
def test_openenv_is_spoken_to_by_its_socket(tmp_path):
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
        with EnvProcess("openenv", f"ws://127.0.0.1:{port}/ws", python=PYTHON, seconds=20) as process:
            played, engine = play(process, ["hello", "what"], tasks_of(3))
            for one in played:
                assert (one.status, one.outcome, len(one.turns)) == (Status.FINISHED, 1.0, 2), one.reason
            assert any("say something 0" in tiny_model().text.decode(one.tokens) for one in engine.requests)
            os.kill(server.pid, signal.SIGSTOP)  # a server that hangs
            process.seconds = 0.5
            hung, _ = play(process, ["hello"], tasks_of(1))
            assert hung[0].status == Status.TOOL_FAILURE
            assert "did not answer a reset within 0.5 s" in hung[0].reason
    finally:
        server.kill()
        server.wait()
