"""Agents that know nothing of training, played over the real engine: ids, masks and log-probabilities are those of
`fg.hosted` on an environment that says the same."""

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
from flowgrpo.contracts import HostEnv, HostStep, Said
from flowgrpo.data.tokenizer import add_messages, start
from flowgrpo.gateway.agent_env import context_figures
from flowgrpo.gateway.agents import AgentHost
from flowgrpo.gateway.server import Gateway
from flowgrpo.rollout.records import from_json, to_json
from flowgrpo.types import Status


@contextmanager
def hosting(agent, engine, **settings):
    """`play(count)` of trajectories by an agent."""
    text = tiny_model().text
    with Gateway(model="tiny", spell=text.decode) as gateway, AgentHost(agent, gateway, **settings) as host:

        def play(count: int, env: HostEnv | None = None, **more):
            settings = {"do": host.do, "width": 16, **more}
            rollout = fg.hosted(env or make_env(), host.submit_to(engine.submit), **settings)
            return rollout(tasks_of(count), keys_of(count), list(range(count)))

        play.host, play.gateway = host, gateway
        yield play
    assert not host._sessions
    assert not gateway._sessions


def same_bits(one, other) -> None:
    """Two trajectories have the same turns, to the bit."""
    assert len(one.turns) == len(other.turns)
    for mine, theirs in zip(one.turns, other.turns, strict=True):
        for name in ("tokens", "chosen", "logp_sampled", "version"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)


def by_hand(told: list[str]) -> HostEnv:
    """An environment that says the query, and then these messages of a user, in one conversation."""
    text = tiny_model().text

    def reset(_key, task, _do):
        talk = start(text, [{"role": "user", "content": task.query}])
        return (talk, 0), Said(talk.tokens)

    def step(state, tokens, _do):
        talk, number = state
        talk = talk.extend(tuple(tokens), chosen=True)
        if number == len(told):
            return (talk, number), HostStep(None, True, output=text.spoken(tokens)[0])
        longer = add_messages(text, talk, [{"role": "user", "content": told[number]}])
        return (longer, number + 1), HostStep(Said(longer.tokens[len(talk.tokens) :]), False)

    return HostEnv("by hand", (), TURNS, MAX_TOKENS, text.stop_ids, reset, step)


def test_A7_an_agents_trajectory_has_the_bits_of_an_environment_that_says_the_same(engine):
    with hosting(talkative, engine) as play:
        got = play(6)
    rollout = fg.hosted(by_hand(["again 0", "again 1"]), engine.submit, width=3)
    expected = rollout(tasks_of(6), keys_of(6), list(range(6)))
    for one, other in zip(got.played, expected.played, strict=True):
        assert one.status == Status.FINISHED, one.reason
        assert one.output == other.output
        assert not any(turn.begins for turn in one.turns)
        same_bits(one, other)


def test_A2_a_trajectory_is_replayed_without_its_agent(engine):
    with hosting(talkative, engine) as play:
        for one in play(2).played:
            again = from_json(to_json(one))
            assert to_json(fg.replay(make_env(), again)) == to_json(one)


async def rewriting(task: fg.Task, url: str) -> str:
    """Goes on, forgets the first exchange, asks a sub-agent, and goes on from the first answer."""
    asked, more = {"role": "user", "content": task.query}, {"role": "user", "content": "again"}
    async with httpx.AsyncClient() as client:
        first = (await ask(client, url, [asked]))["message"]
        second = (await ask(client, url, [asked, first, more]))["message"]
        await ask(client, url, [asked, {"role": "assistant", "content": "so it was"}, second, more])
        helper = [{"role": "system", "content": "you search"}, {"role": "user", "content": "two"}]
        await ask(client, url, helper)
        last = await ask(client, url, [asked, first, {"role": "user", "content": "plus"}])
    return last["message"]["content"]


def test_A7_rewritten_history_and_sub_agents_begin_contexts_and_a_branch_keeps_the_recorded_ids(engine):
    with hosting(rewriting, engine) as play:
        got = play(4)
    for one in got.played:
        assert one.status == Status.FINISHED, one.reason
        assert [turn.begins for turn in one.turns] == [False, False, True, True, True]
        kinds = [json.loads(effect.result.text)["asks"]["kind"] for effect in one.log[:-1]]
        assert kinds == ["first", "append", "rewrite", "branch", "branch"]
        first, branch = one.turns[0], one.turns[4]
        assert branch.tokens[: len(first.tokens)].tolist() == first.tokens.tolist()  # ids, as they were sampled
        assert branch.chosen.sum() == len(branch.tokens) - np.argmax(branch.chosen)
        assert to_json(fg.replay(make_env(), from_json(to_json(one)))) == to_json(one)
        rows = fg.pack([one], np.ones((1, 5)), np.ones((1, 5)), row_length=CONTEXT)
        assert len({*rows.segments[rows.segments > 0].tolist()}) >= 1
        assert rows.chosen.sum() == sum(turn.chosen.sum() for turn in one.turns)
    assert context_figures(got.played) == {"contexts": 4, "rewrites": 1}


def test_A7_a_branch_has_the_log_probabilities_of_a_context_that_was_gone_on_from(engine):
    """Recorded ids are scored as the engine scored it, and what comes after as one whole context would be."""
    with hosting(rewriting, engine) as play:
        one = play(1).played[0]
    turn, model = one.turns[4], tiny_model()
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


def test_a_program_a_named_function_and_a_function_in_a_thread_are_the_same_agent(engine, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(PROGRAM)

    def in_a_thread(task, url):
        return asyncio.run(talkative(task, url))

    agents = [talkative, f"{sys.executable} {script}", "gateway_cases:talkative", in_a_thread]
    played = []
    for agent in agents:
        environ = {"PYTHONPATH": os.pathsep.join(sys.path)}
        with hosting(agent, engine, environ=environ) as play:
            played.append(play(2).played)
    for others in played[1:]:
        for one, other in zip(played[0], others, strict=True):
            assert other.status == Status.FINISHED, other.reason
            same_bits(one, other)
            assert other.output.strip() == one.output.strip()


# What goes wrong ----------------------------------------------------------------------------------------


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
def test_F5_crashes_and_hangs_are_statuses_that_take_no_part_and_limits_of_the_policy_do(
    engine, agent, status, turns, reason
):
    judge = fg.Reward(lambda _task, _output: fg.Scored(0.25))
    with hosting(agent, engine, silence=1.0 if agent is silent else 20.0, retries=1) as play:
        one = play(1, reward=judge).played[0]
    assert (one.status, len(one.turns)) == (status, turns), one.reason
    assert reason in one.reason
    assert one.outcome == (0.25 if status in (Status.TURN_LIMIT, Status.TOKEN_LIMIT) else None)  # and never 0
    if agent is endless:
        assert one.output == "the best so far"


def test_an_agent_that_fails_before_its_first_request_is_started_again(engine):
    calls = []

    async def shaky(task, url):
        calls.append(task.id)
        if len(calls) < 3:
            raise ConnectionError("not yet")
        return await talkative(task, url)

    with hosting(shaky, engine, retries=2) as play:
        assert play(1).played[0].status == Status.FINISHED
    assert calls == ["task-0"] * 3


def test_an_agent_that_outlives_its_time_is_ended_and_its_children_too(engine, tmp_path):
    child = tmp_path / "child"
    command = f"sh -c 'sleep 60 & echo $! > {child}; wait'"
    began = time.monotonic()
    with hosting(command, engine, seconds=0.5, retries=0) as play:
        one = play(1).played[0]
    assert time.monotonic() - began < 20
    assert "the agent did not end within 0.5 s" in one.reason
    left = Path(f"/proc/{child.read_text().strip()}/stat")
    assert not left.exists() or left.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_S1_an_agent_that_is_gone_is_started_again_and_brought_to_where_it_was(engine):
    """As after a kill of the trainer: effects up to some turn are known, and no agent is at work."""
    with hosting(talkative, engine) as play:
        whole = play(1).played[0]
    for known in (1, 2, 3):
        heard = {repr(effect.call): effect.result for effect in whole.log[:known]}
        with hosting(talkative, engine) as play:
            host = play.host

            def do(call, heard=heard, host=host):
                return heard.pop(repr(call)) if repr(call) in heard else host.do(call)

            again = play(1, do=do).played[0]
        assert again.output == whole.output
        same_bits(again, whole)


def test_S1_an_agent_that_asks_for_something_else_after_a_kill_is_aborted(engine):
    with hosting(talkative, engine) as play:
        whole = play(1).played[0]
    heard = {repr(effect.call): effect.result for effect in whole.log[:2]}

    async def other(task, url):
        return await talkative(fg.Task(task.id, "something else", (), ""), url)

    with hosting(other, engine) as play:
        again = play(1, do=lambda call: heard.pop(repr(call), None) or play.host.do(call)).played[0]
    assert again.status == Status.ABORTED
    assert again.reason == "the agent was started again after a kill, and its request 0 is another than before"


def test_killing_the_process_of_a_named_function_fails_what_it_plays_and_the_next_rollout_begins_another(
    engine, tmp_path
):
    answered = tmp_path / "answered"
    environ = {"PYTHONPATH": os.pathsep.join(sys.path), "ANSWERED": str(answered)}
    with hosting("gateway_cases:slow", engine, environ=environ, retries=0) as play:

        def kill_once_answered() -> None:
            while not answered.exists():
                time.sleep(0.05)
            os.kill(play.host._start._process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_once_answered, daemon=True)
        killer.start()
        one = play(1).played[0]
        killer.join(timeout=60)
        assert one.status == Status.ABORTED
        assert "the process of gateway_cases:slow ended with status -9" in one.reason


# Rewards that agents give -------------------------------------------------------------------------------


async def rewarding(task: fg.Task, url: str) -> None:
    async with httpx.AsyncClient() as client:
        await ask(client, url, [{"role": "user", "content": task.query}])
        where = url.removesuffix("/v1") + "/reward"
        statuses = []
        given = [{"reward": value} for value in ("much", float("inf"), True, 0.5, 1)]
        for body in [{"reward": 0.5, "correct": 1}, *given]:
            response = await client.post(where, content=json.dumps(body))
            statuses.append(response.status_code)
        assert statuses == [400, 400, 400, 400, 200, 409]


async def returning(task: fg.Task, url: str) -> float:
    async with httpx.AsyncClient() as client:
        await ask(client, url, [{"role": "user", "content": task.query}])
    return 1.0


@pytest.mark.parametrize(("agent", "outcome", "correct"), [(rewarding, 0.5, False), (returning, 1.0, True)])
def test_an_agent_gives_its_own_reward_once(engine, agent, outcome, correct):
    with hosting(agent, engine) as play:
        one = play(1).played[0]
    assert (one.status, one.outcome, one.correct, one.output) == (Status.FINISHED, outcome, correct, None), one.reason


# Several requests at once, and requests that come again ---------------------------------------------------


async def parallel(task: fg.Task, url: str) -> str:
    async with httpx.AsyncClient() as client:
        asked = [[{"role": "user", "content": f"{task.query} {i}"}] for i in range(3)]
        found = await asyncio.gather(*(ask(client, url, one) for one in asked))
    return " | ".join(one["message"]["content"] for one in found)


def test_A7_parallel_requests_are_turns_of_their_own_contexts(engine):
    with hosting(parallel, engine) as play:
        one = play(1).played[0]
    assert [turn.begins for turn in one.turns] == [False, True, True]
    said = {tiny_model().text.spoken(turn.tokens[turn.chosen])[0] for turn in one.turns}
    assert said == set(one.output.split(" | "))


async def repeating(task: fg.Task, url: str) -> str:
    """Sends its request again, as the SDK does after a timeout, and then once more as a request of its own."""
    body = {"messages": [{"role": "user", "content": task.query}]}
    async with httpx.AsyncClient() as client:
        counts = [{"x-stainless-retry-count": str(count)} for count in (0, 1)]
        posts = [client.post(f"{url}/chat/completions", json=body, headers=own, timeout=60) for own in counts]
        first = asyncio.create_task(posts[0])
        await asyncio.sleep(0.3)  # the repetition comes later
        one, two = await asyncio.gather(first, posts[1])
        three = await client.post(f"{url}/chat/completions", json=body, headers={"x-stainless-retry-count": "2"})
        other = await client.post(f"{url}/chat/completions", json=body)
    said = [response.json()["choices"][0]["message"]["content"] for response in (one, two, three, other)]
    assert said[0] == said[1] == said[2]
    return said[3]


def test_a_request_that_a_client_repeats_is_one_turn(engine):
    with hosting(repeating, engine) as play:
        one = play(1).played[0]
    assert one.status == Status.FINISHED, one.reason
    assert len(one.turns) == 2


async def impatient(task: fg.Task, url: str) -> str:
    body = {"messages": [{"role": "user", "content": task.query}]}
    async with httpx.AsyncClient(timeout=httpx.Timeout(20, read=0.001)) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"{url}/chat/completions", json=body)
    return await talkative(task, url)


def test_a_client_that_leaves_in_the_middle_costs_its_session_nothing_but_a_turn(engine):
    with hosting(impatient, engine) as play:
        one = play(1).played[0]
    assert one.status == Status.FINISHED, one.reason
    assert len(one.turns) in (3, 4)


async def of_all_kinds(task: fg.Task, url: str) -> str:
    kinds = [talkative, crashing, rewriting, impatient, parallel]
    return await kinds[int(task.id.removeprefix("task-")) % len(kinds)](task, url)


def test_A6_every_token_that_was_sampled_is_in_a_turn_or_in_the_ledger(engine):
    """Of agents that end well, crash after an answer, rewrite, leave before an answer, and ask for two at a time."""
    sampled: list[int] = []

    class Counted:
        def submit(self, request):
            future = engine.submit(request)
            future.add_done_callback(lambda done: sampled.append(0 if done.cancelled() else len(done.result().tokens)))
            return future

    with hosting(of_all_kinds, Counted()) as play:
        got = play(15)
    assert {one.status for one in got.played} == {Status.FINISHED, Status.ABORTED}
    in_turns = sum(int(turn.chosen.sum()) for one in got.played for turn in one.turns)
    assert in_turns + got.ledger.check().generated == sum(sampled) > 100


# What an answer holds -----------------------------------------------------------------------------------


async def asking_for_all(task: fg.Task, url: str) -> str:
    messages = [{"role": "user", "content": task.query}]
    async with httpx.AsyncClient() as client:
        choice = await ask(client, url, messages, return_token_ids=True, logprobs=True, max_tokens=4)
        whole = await ask(client, url, [*messages, choice["message"], messages[0]], max_tokens=3, stop=["a", "e"])
    choice["second"] = whole
    return json.dumps(choice)


def test_an_answer_has_the_ids_and_log_probabilities_that_were_sampled(engine):
    with hosting(asking_for_all, engine) as play:
        one = play(1).played[0]
    choice, turn, text = json.loads(one.output), one.turns[0], tiny_model().text
    assert choice["token_ids"] == turn.tokens[turn.chosen].tolist()
    assert choice["versions"] == [0] * len(choice["token_ids"])
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_array_equal(np.float32(logprobs), turn.logp_sampled[turn.chosen])
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        text.decode([t]) for t in choice["token_ids"]
    ]
    assert 1 <= turn.chosen.sum() <= 4
    assert 1 <= one.turns[1].chosen.sum() <= 3
    assert not set("ae") & set(choice["second"]["message"]["content"])


class Scripted:
    """An engine that says what it is told to."""

    def __init__(self, *words: str):
        self.words, self.requests = list(words), []

    def submit(self, request):
        from concurrent.futures import Future

        self.requests.append(request)
        text = tiny_model().text
        ids = [*text.encode(self.words.pop(0)), text.stop_ids[0]]
        future = Future()
        future.set_result(fg.Completion(ids, [-1.0] * len(ids), [3] * len(ids), "stop"))
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


def test_tools_are_shown_by_the_template_and_calls_are_read_and_gone_on_from():
    written = 'So.<tool_call>{"name": "add", "arguments": {"x": 2}}</tool_call>'
    engine = Scripted(written, "<tool_call>{4}")
    with hosting(calling, engine) as play:
        one = play(1, env=make_env(max_tokens=64, tools=("add",))).played[0]
    assert one.status == Status.FINISHED, one.reason
    assert one.output == "<tool_call>{4}"
    assert one.errors == (False, True)  # a call that can't be read is an error of the action (A4)
    assert one.tools == ("add", "")
    assert not any(turn.begins for turn in one.turns)
    text = tiny_model().text
    assert text.decode(engine.requests[0].tokens).startswith("<|im_start|>system\nTools: add")
    assert text.decode(engine.requests[1].tokens).endswith("<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n")
    assert list(engine.requests[1].tokens[: len(one.turns[0].tokens)]) == one.turns[0].tokens.tolist()


async def continuing_ids(task: fg.Task, url: str) -> str:
    """Sends ids, and goes on from the ids that it was given."""
    text = tiny_model().text
    ids = text.encode(task.query)
    async with httpx.AsyncClient() as client:
        for _ in range(2):
            body = {"prompt": ids, "max_tokens": 5, "return_token_ids": True, "logprobs": 0}
            response = await client.post(f"{url}/completions", json=body, timeout=60)
            choice = response.json()["choices"][0]
            assert response.json()["prompt_token_ids"] == ids
            ids = [*ids, *choice["token_ids"], *text.encode(" two")]
    return choice["text"]


def test_A7_ids_that_go_on_from_recorded_ids_append(engine):
    with hosting(continuing_ids, engine) as play:
        one = play(1).played[0]
    assert one.status == Status.FINISHED, one.reason
    assert [turn.begins for turn in one.turns] == [False, False]
    assert one.turns[1].tokens[~one.turns[1].chosen].tolist() == tiny_model().text.encode(" two")


def test_E3_many_agents_at_once_have_the_bits_that_each_has_alone(engine):
    with hosting(talkative, engine) as play:
        many = play(24).played
        few = play(24, width=2).played
    for one, other in zip(many, few, strict=True):
        same_bits(one, other)


def test_the_contract_of_host_environments_holds(engine):
    with hosting(talkative, engine) as play:
        fg.check_host_env(make_env(), tasks_of(3), do=play.host.do, vocabulary=tiny_model().text.vocab_size)
