"""Unmodified external agents over the real engine: ids, masks and log-probabilities are those of `fg.hosted` on an
environment with the same messages."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from gateway_cases import CONTEXT, MAX_TOKENS, TURNS, ask, keys_of, make_env, talkative, tasks_of, tiny_model

import flowgrpo as fg
from flowgrpo.contracts import HostEnv, HostObservation, HostStep
from flowgrpo.data.tokenizer import add_messages, start_conversation
from flowgrpo.gateway.agent_env import context_metrics
from flowgrpo.gateway.agents import AgentHost
from flowgrpo.gateway.server import Gateway
from flowgrpo.rollout.records import from_json, to_json
from flowgrpo.types import Status


@contextmanager
def hosting(agent, engine, **settings):
    """`play(count)` rolls out trajectories of an agent."""
    text = tiny_model().tokenizer
    with Gateway(model="tiny", decode=text.decode) as gateway, AgentHost(agent, gateway, **settings) as host:

        def play(count: int, env: HostEnv | None = None, **more):
            settings = {"call_tool": host.call_tool, "concurrency": 16, **more}
            rollout = fg.hosted(env or make_env(), host.submit_to(engine.submit), **settings)
            return rollout(tasks_of(count), keys_of(count), list(range(count)))

        play.host, play.gateway = host, gateway
        yield play
    assert not host._sessions
    assert not gateway._sessions


def same_bits(trajectory, expected) -> None:
    """Check that two trajectories have the same turns, to the bit."""
    assert len(trajectory.turns) == len(expected.turns)
    for turn, expected_turn in zip(trajectory.turns, expected.turns, strict=True):
        for name in ("tokens", "chosen", "logp_sampled", "version"):
            np.testing.assert_array_equal(getattr(turn, name), getattr(expected_turn, name), err_msg=name)


def by_hand(replies: list[str]) -> HostEnv:
    """An environment whose observations are the query, and then these user messages, in one conversation."""
    text = tiny_model().tokenizer

    def reset(_key, task, _do):
        talk = start_conversation(text, [{"role": "user", "content": task.query}])
        return (talk, 0), HostObservation(talk.tokens)

    def step(state, tokens, _do):
        talk, number = state
        talk = talk.extend(tuple(tokens), chosen=True)
        if number == len(replies):
            return (talk, number), HostStep(None, True, output=text.decode_action(tokens)[0])
        longer = add_messages(text, talk, [{"role": "user", "content": replies[number]}])
        return (longer, number + 1), HostStep(HostObservation(longer.tokens[len(talk.tokens) :]), False)

    return HostEnv("by hand", (), TURNS, MAX_TOKENS, text.stop_ids, reset, step)


def test_A7_an_agents_trajectory_has_the_bits_of_a_hosted_environment(engine):
    with hosting(talkative, engine) as play:
        got = play(6)
    rollout = fg.hosted(by_hand(["again 0", "again 1"]), engine.submit, concurrency=3)
    expected = rollout(tasks_of(6), keys_of(6), list(range(6)))
    for trajectory, other in zip(got.trajectories, expected.trajectories, strict=True):
        assert trajectory.status == Status.FINISHED, trajectory.reason
        assert trajectory.output == other.output
        assert not any(turn.starts_context for turn in trajectory.turns)
        same_bits(trajectory, other)


def test_A2_a_trajectory_is_replayed_without_its_agent(engine):
    with hosting(talkative, engine) as play:
        for trajectory in play(2).trajectories:
            again = from_json(to_json(trajectory))
            assert to_json(fg.replay(make_env(), again)) == to_json(trajectory)


async def rewriting(task: fg.Task, url: str) -> str:
    """Continues, rewrites the first exchange, asks a sub-agent, and continues the first response."""
    asked, more = {"role": "user", "content": task.query}, {"role": "user", "content": "again"}
    async with httpx.AsyncClient() as client:
        first = (await ask(client, url, [asked]))["message"]
        second = (await ask(client, url, [asked, first, more]))["message"]
        await ask(client, url, [asked, {"role": "assistant", "content": "so it was"}, second, more])
        helper = [{"role": "system", "content": "you search"}, {"role": "user", "content": "two"}]
        await ask(client, url, helper)
        last = await ask(client, url, [asked, first, {"role": "user", "content": "plus"}])
    return last["message"]["content"]


def test_A7_rewrites_and_sub_agents_start_contexts_and_branches_keep_ids(engine):
    with hosting(rewriting, engine) as play:
        got = play(4)
    for trajectory in got.trajectories:
        assert trajectory.status == Status.FINISHED, trajectory.reason
        assert [turn.starts_context for turn in trajectory.turns] == [False, False, True, True, True]
        kinds = [json.loads(effect.result.text)["asks"]["kind"] for effect in trajectory.log[:-1]]
        assert kinds == ["first", "append", "rewrite", "branch", "branch"]
        first, branch = trajectory.turns[0], trajectory.turns[4]
        assert branch.tokens[: len(first.tokens)].tolist() == first.tokens.tolist()  # ids, as they were sampled
        assert branch.chosen.sum() == len(branch.tokens) - np.argmax(branch.chosen)
        assert to_json(fg.replay(make_env(), from_json(to_json(trajectory)))) == to_json(trajectory)
        rows = fg.pack([trajectory], np.ones((1, 5)), np.ones((1, 5)), row_length=CONTEXT)
        assert len({*rows.segments[rows.segments > 0].tolist()}) >= 1
        assert rows.chosen.sum() == sum(turn.chosen.sum() for turn in trajectory.turns)
    assert context_metrics(got.trajectories) == {"contexts": 4, "rewrites": 1}


def test_A7_a_branch_has_the_log_probabilities_of_a_continued_context(engine):
    """Recorded ids keep the engine's scores, and later ids are scored as in one whole context."""
    with hosting(rewriting, engine) as play:
        trajectory = play(1).trajectories[0]
    turn, model = trajectory.turns[4], tiny_model()
    scores = fg.generate.logprobs(model.policy, model.params, turn.tokens[None], banned=model.banned).logp[0]
    np.testing.assert_allclose(np.asarray(scores)[turn.chosen], turn.logp_sampled[turn.chosen], atol=1e-5)


PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
assert task == json.loads(os.environ["FLOWGRPO_TASK"]) and "answers" not in task
def ask(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [{"role": "user", "content": task["query"]}]
for number in range(3):
    messages += [ask(messages), {"role": "user", "content": f"again {number}"}]
print(messages[-2]["content"])
"""


def test_a_program_a_named_function_and_a_thread_give_the_same_bits(engine, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(PROGRAM)

    def in_a_thread(task, url):
        return asyncio.run(talkative(task, url))

    agents = [talkative, f"{sys.executable} {script}", "gateway_cases:talkative", in_a_thread]
    played = []
    for agent in agents:
        environ = {"PYTHONPATH": os.pathsep.join(sys.path)}
        with hosting(agent, engine, environ=environ) as play:
            played.append(play(2).trajectories)
    for others in played[1:]:
        for trajectory, other in zip(played[0], others, strict=True):
            assert other.status == Status.FINISHED, other.reason
            same_bits(trajectory, other)
            assert other.output.strip() == trajectory.output.strip()


# Failures -----------------------------------------------------------------------------------------------


async def crashing(task: fg.Task, url: str) -> str:
    async with httpx.AsyncClient() as client:
        await ask(client, url, [{"role": "user", "content": task.query}])
    raise ValueError("I can't go on")


async def silent(task: fg.Task, url: str) -> str:
    async with httpx.AsyncClient() as client:
        await ask(client, url, [{"role": "user", "content": task.query}])
    await asyncio.sleep(60)
    return "never"


async def mute(_task: fg.Task, _url: str) -> str:
    return "an answer without a request"


async def endless(task: fg.Task, url: str) -> str:
    messages = [{"role": "user", "content": task.query}]
    async with httpx.AsyncClient() as client:
        while True:
            response = await client.post(f"{url}/chat/completions", json={"messages": messages})
            if response.status_code != 200:
                assert response.json()["error"]["code"] == "turn_limit"
                return "the best so far"
            messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "a"}]


async def stubborn(task: fg.Task, url: str) -> str:
    async with httpx.AsyncClient() as client:
        await ask(client, url, [{"role": "user", "content": task.query}])
        while True:
            await client.post(f"{url}/chat/completions", json={"messages": [{"role": "user", "content": "x" * 2000}]})


async def nothing(task: fg.Task, url: str) -> float:
    async with httpx.AsyncClient() as client:
        await ask(client, url, [{"role": "user", "content": task.query}])
    return float("nan")


@pytest.mark.parametrize(
    ("agent", "status", "turns", "reason"),
    [
        (crashing, Status.ABORTED, 1, "the agent raised ValueError: I can't go on"),
        (silent, Status.ABORTED, 1, "the agent asked for nothing and did not end in 1 s"),
        (mute, Status.TOOL_FAILURE, 0, "the agent ended without a request"),
        (endless, Status.TURN_LIMIT, TURNS, "the agent ended when it could ask for no more"),
        (stubborn, Status.TOKEN_LIMIT, 1, "the request has "),
        (nothing, Status.ABORTED, 1, "the agent returned nan: a reward must be finite"),
        ("no_such_program", Status.TOOL_FAILURE, 0, "the agent ended without a request: 'no_such_program' can't be"),
        ("sh -c 'echo broken >&2; exit 3'", Status.TOOL_FAILURE, 0, "the agent exited with status 3: broken"),
        ("no_module:agent", Status.TOOL_FAILURE, 0, "agent 'no_module:agent' can't be imported: No module"),
    ],
)
def test_F5_crashes_and_hangs_are_masked_and_limits_count(engine, agent, status, turns, reason):
    judge = fg.Reward(lambda _task, _output: fg.RewardResult(0.25))
    with hosting(agent, engine, silent_timeout=1.0 if agent is silent else 20.0, retries=1) as play:
        trajectory = play(1, reward=judge).trajectories[0]
    assert (trajectory.status, len(trajectory.turns)) == (status, turns), trajectory.reason
    assert reason in trajectory.reason
    assert trajectory.outcome == (0.25 if status in (Status.TURN_LIMIT, Status.TOKEN_LIMIT) else None)  # and never 0
    if agent is endless:
        assert trajectory.output == "the best so far"


def test_an_agent_that_fails_before_its_first_request_is_started_again(engine):
    calls = []

    async def shaky(task, url):
        calls.append(task.id)
        if len(calls) < 3:
            raise ConnectionError("not yet")
        return await talkative(task, url)

    with hosting(shaky, engine, retries=2) as play:
        assert play(1).trajectories[0].status == Status.FINISHED
    assert calls == ["task-0"] * 3


def test_an_agent_beyond_its_timeout_is_killed_with_its_children(engine, tmp_path):
    child = tmp_path / "child"
    command = f"sh -c 'sleep 60 & echo $! > {child}; wait'"
    started_at = time.monotonic()
    with hosting(command, engine, timeout=0.5, retries=0) as play:
        trajectory = play(1).trajectories[0]
    assert time.monotonic() - started_at < 20
    assert "the agent did not end within 0.5 s" in trajectory.reason
    stat = Path(f"/proc/{child.read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_S1_an_agent_that_is_gone_is_restarted_and_restored(engine):
    """As after a kill of the trainer: effects up to some turn are known, and no agent is running."""
    with hosting(talkative, engine) as play:
        whole = play(1).trajectories[0]
    for known in (1, 2, 3):
        heard = {repr(effect.call): effect.result for effect in whole.log[:known]}
        with hosting(talkative, engine) as play:
            host = play.host

            def call_tool(call, heard=heard, host=host):
                return heard.pop(repr(call)) if repr(call) in heard else host.call_tool(call)

            again = play(1, call_tool=call_tool).trajectories[0]
        assert again.output == whole.output
        same_bits(again, whole)


def test_S1_an_agent_with_another_request_after_a_kill_is_aborted(engine):
    with hosting(talkative, engine) as play:
        whole = play(1).trajectories[0]
    heard = {repr(effect.call): effect.result for effect in whole.log[:2]}

    async def other(task, url):
        return await talkative(fg.Task(task.id, "something else", (), ""), url)

    with hosting(other, engine) as play:
        again = play(1, call_tool=lambda call: heard.pop(repr(call), None) or play.host.call_tool(call)).trajectories[0]
    assert again.status == Status.ABORTED
    assert again.reason == "the agent was started again after a kill, and its request 0 is another than before"


def test_killing_the_process_of_a_named_function_fails_its_trajectories(engine, tmp_path):
    answered = tmp_path / "answered"
    environ = {"PYTHONPATH": os.pathsep.join(sys.path), "ANSWERED": str(answered)}
    with hosting("gateway_cases:slow", engine, environ=environ, retries=0) as play:

        def kill_once_answered() -> None:
            while not answered.exists():
                time.sleep(0.05)
            os.kill(play.host._start._process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_once_answered, daemon=True)
        killer.start()
        trajectory = play(1).trajectories[0]
        killer.join(timeout=60)
        assert trajectory.status == Status.ABORTED
        assert "the process of gateway_cases:slow ended with status -9" in trajectory.reason


# Rewards from agents ------------------------------------------------------------------------------------


async def rewarding(task: fg.Task, url: str) -> None:
    async with httpx.AsyncClient() as client:
        await ask(client, url, [{"role": "user", "content": task.query}])
        reward_url = url.removesuffix("/v1") + "/reward"
        statuses = []
        rewards = [{"reward": value} for value in ("much", float("inf"), True, 0.5, 1)]
        for body in [{"reward": 0.5, "correct": 1}, *rewards]:
            response = await client.post(reward_url, content=json.dumps(body))
            statuses.append(response.status_code)
        assert statuses == [400, 400, 400, 400, 200, 409]


async def returning(task: fg.Task, url: str) -> float:
    async with httpx.AsyncClient() as client:
        await ask(client, url, [{"role": "user", "content": task.query}])
    return 1.0


@pytest.mark.parametrize(("agent", "outcome", "correct"), [(rewarding, 0.5, False), (returning, 1.0, True)])
def test_an_agent_gives_its_own_reward_once(engine, agent, outcome, correct):
    with hosting(agent, engine) as play:
        trajectory = play(1).trajectories[0]
    assert (trajectory.status, trajectory.output) == (Status.FINISHED, None), trajectory.reason
    assert (trajectory.outcome, trajectory.correct) == (outcome, correct)


# Parallel and repeated requests ------------------------------------------------------------------------------


async def parallel(task: fg.Task, url: str) -> str:
    async with httpx.AsyncClient() as client:
        conversations = [[{"role": "user", "content": f"{task.query} {i}"}] for i in range(3)]
        choices = await asyncio.gather(*(ask(client, url, messages) for messages in conversations))
    return " | ".join(choice["message"]["content"] for choice in choices)


def test_A7_parallel_requests_are_turns_of_their_own_contexts(engine):
    with hosting(parallel, engine) as play:
        trajectory = play(1).trajectories[0]
    assert [turn.starts_context for turn in trajectory.turns] == [False, True, True]
    said = {tiny_model().tokenizer.decode_action(turn.tokens[turn.chosen])[0] for turn in trajectory.turns}
    assert said == set(trajectory.output.split(" | "))


async def repeating(task: fg.Task, url: str) -> str:
    """Retries its request, as the SDK does after a timeout, and then sends it once more as a new request."""
    body = {"messages": [{"role": "user", "content": task.query}]}
    async with httpx.AsyncClient() as client:
        counts = [{"x-stainless-retry-count": str(count)} for count in (0, 1)]
        posts = [client.post(f"{url}/chat/completions", json=body, headers=own, timeout=60) for own in counts]
        first = asyncio.create_task(posts[0])
        await asyncio.sleep(0.3)  # the repetition comes later
        original, retry = await asyncio.gather(first, posts[1])
        late_retry = await client.post(f"{url}/chat/completions", json=body, headers={"x-stainless-retry-count": "2"})
        other = await client.post(f"{url}/chat/completions", json=body)
    said = [response.json()["choices"][0]["message"]["content"] for response in (original, retry, late_retry, other)]
    assert said[0] == said[1] == said[2]
    return said[3]


def test_a_retried_request_is_one_turn(engine):
    with hosting(repeating, engine) as play:
        trajectory = play(1).trajectories[0]
    assert trajectory.status == Status.FINISHED, trajectory.reason
    assert len(trajectory.turns) == 2


async def impatient(task: fg.Task, url: str) -> str:
    body = {"messages": [{"role": "user", "content": task.query}]}
    async with httpx.AsyncClient(timeout=httpx.Timeout(20, read=0.001)) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"{url}/chat/completions", json=body)
    return await talkative(task, url)


def test_a_client_that_disconnects_costs_its_session_at_most_a_turn(engine):
    with hosting(impatient, engine) as play:
        trajectory = play(1).trajectories[0]
    assert trajectory.status == Status.FINISHED, trajectory.reason
    assert len(trajectory.turns) in (3, 4)


async def of_all_kinds(task: fg.Task, url: str) -> str:
    kinds = [talkative, crashing, rewriting, impatient, parallel]
    return await kinds[int(task.id.removeprefix("task-")) % len(kinds)](task, url)


def test_A6_every_sampled_token_is_in_a_turn_or_in_the_ledger(engine):
    """With agents that finish, crash after a response, rewrite, disconnect, and send requests in parallel."""
    sampled: list[int] = []

    class Counted:
        def submit(self, request):
            future = engine.submit(request)
            future.add_done_callback(lambda done: sampled.append(0 if done.cancelled() else len(done.result().tokens)))
            return future

    with hosting(of_all_kinds, Counted()) as play:
        got = play(15)
    assert {trajectory.status for trajectory in got.trajectories} == {Status.FINISHED, Status.ABORTED}
    in_turns = sum(int(turn.chosen.sum()) for trajectory in got.trajectories for turn in trajectory.turns)
    assert in_turns + got.ledger.check().generated == sum(sampled) > 100


# Contents of responses -------------------------------------------------------------------------------------


async def asking_for_all(task: fg.Task, url: str) -> str:
    messages = [{"role": "user", "content": task.query}]
    async with httpx.AsyncClient() as client:
        choice = await ask(client, url, messages, return_token_ids=True, logprobs=True, max_tokens=4)
        whole = await ask(client, url, [*messages, choice["message"], messages[0]], max_tokens=3, stop=["a", "e"])
    choice["second"] = whole
    return json.dumps(choice)


def test_a_response_has_the_sampled_ids_and_log_probabilities(engine):
    with hosting(asking_for_all, engine) as play:
        trajectory = play(1).trajectories[0]
    choice, turn, text = json.loads(trajectory.output), trajectory.turns[0], tiny_model().tokenizer
    assert choice["token_ids"] == turn.tokens[turn.chosen].tolist()
    assert choice["versions"] == [0] * len(choice["token_ids"])
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_array_equal(np.float32(logprobs), turn.logp_sampled[turn.chosen])
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        text.decode([t]) for t in choice["token_ids"]
    ]
    assert 1 <= turn.chosen.sum() <= 4
    assert 1 <= trajectory.turns[1].chosen.sum() <= 3
    assert not set("ae") & set(choice["second"]["message"]["content"])


class Scripted:
    """An engine with given completions."""

    def __init__(self, *words: str):
        self.words, self.requests = list(words), []

    def submit(self, request):
        from concurrent.futures import Future

        self.requests.append(request)
        text = tiny_model().tokenizer
        ids = [*text.encode(self.words.pop(0)), text.stop_ids[0]]
        future = Future()
        future.set_result(fg.contracts.Completion(ids, [-1.0] * len(ids), [3] * len(ids), "stop"))
        return future


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


async def calling(task: fg.Task, url: str) -> str:
    messages = [{"role": "user", "content": task.query}]
    async with httpx.AsyncClient() as client:
        choice = await ask(client, url, messages, tools=TOOLS)
        assert choice["finish_reason"] == "tool_calls"
        call = choice["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"x": 2}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        last = await ask(client, url, [*messages, choice["message"], result], tools=TOOLS)
    return last["message"]["content"]


def test_tools_are_in_the_prompt_and_calls_are_parsed_and_continued():
    written = 'So.<tool_call>{"name": "add", "arguments": {"x": 2}}</tool_call>'
    engine = Scripted(written, "<tool_call>{4}")
    with hosting(calling, engine) as play:
        trajectory = play(1, env=make_env(max_tokens=64, tools=("add",))).trajectories[0]
    assert trajectory.status == Status.FINISHED, trajectory.reason
    assert trajectory.output == "<tool_call>{4}"
    assert trajectory.errors == (False, True)  # a call that can't be read is an error of the action (A4)
    assert trajectory.tools == ("add", "")
    assert not any(turn.starts_context for turn in trajectory.turns)
    text = tiny_model().tokenizer
    assert text.decode(engine.requests[0].tokens).startswith("<|im_start|>system\nTools: add")
    assert text.decode(engine.requests[1].tokens).endswith("<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n")
    assert list(engine.requests[1].tokens[: len(trajectory.turns[0].tokens)]) == trajectory.turns[0].tokens.tolist()


async def continuing_ids(task: fg.Task, url: str) -> str:
    """Sends ids, and continues the ids that it received."""
    text = tiny_model().tokenizer
    ids = text.encode(task.query)
    async with httpx.AsyncClient() as client:
        for _ in range(2):
            body = {"prompt": ids, "max_tokens": 5, "return_token_ids": True, "logprobs": 0}
            response = await client.post(f"{url}/completions", json=body, timeout=60)
            choice = response.json()["choices"][0]
            assert response.json()["prompt_token_ids"] == ids
            ids = [*ids, *choice["token_ids"], *text.encode(" two")]
    return choice["text"]


def test_A7_ids_that_continue_recorded_ids_append(engine):
    with hosting(continuing_ids, engine) as play:
        trajectory = play(1).trajectories[0]
    assert trajectory.status == Status.FINISHED, trajectory.reason
    assert [turn.starts_context for turn in trajectory.turns] == [False, False]
    assert trajectory.turns[1].tokens[~trajectory.turns[1].chosen].tolist() == tiny_model().tokenizer.encode(" two")


def test_E3_many_concurrent_agents_have_the_bits_of_each_alone(engine):
    with hosting(talkative, engine) as play:
        many = play(24).trajectories
        few = play(24, concurrency=2).trajectories
    for trajectory, other in zip(many, few, strict=True):
        same_bits(trajectory, other)


def test_the_contract_of_host_environments_holds(engine):
    with hosting(talkative, engine) as play:
        fg.check_host_env(
            make_env(), tasks_of(3), call_tool=play.host.call_tool, vocabulary=tiny_model().tokenizer.vocab_size
        )
