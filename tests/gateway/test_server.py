"""The server of a gateway: every request is answered, and sessions of external agents are recorded."""

import asyncio
import gc
import json
import random
import socket
import threading
import time
import weakref
from dataclasses import replace

import httpx
import jax
import numpy as np
import pytest
from gateway_cases import CONTEXT, MAX_TOKENS, TURNS, make_env, post, tasks_of, tiny_folder, tiny_model

import flowgrpo as fg
from flowgrpo.data.tokenizer import start_conversation
from flowgrpo.gateway import auth, live_session
from flowgrpo.gateway import server as server_module
from flowgrpo.gateway.auth import AccessPolicy
from flowgrpo.gateway.server import Gateway
from flowgrpo.gateway.serving import ModelServer, ServerSettings
from flowgrpo.gateway.wire import ChatResponse
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.types import Fate, Status

ASK = {"messages": [{"role": "user", "content": "what is two"}]}


@pytest.fixture(scope="module")
def served(engine):
    model = tiny_model()
    settings = ServerSettings(turns=TURNS, max_tokens=MAX_TOKENS, context_tokens=CONTEXT, max_sessions=4)
    return ModelServer(engine, model.tokenizer, model.policy, model.params, settings)


@pytest.fixture
def url(served):
    how = {
        "complete": served.complete,
        "open_session": served.open_session,
        "update_weights": served.update_weights,
        "max_bytes": 1 << 16,
    }
    with Gateway(model="tiny", decode=tiny_model().tokenizer.decode, **how) as gateway:
        yield gateway.url.removesuffix("/v1")
    served.engine.update_weights(tiny_model().params, 0)
    served.params = tiny_model().params


@pytest.fixture
def played(served):
    found: list[RecordedTrajectory] = []
    served.on_session_end = found.append
    yield found
    served.on_session_end = lambda _trajectory: None


# Requests without a session ---------------------------------------------------------------------------------


def test_a_chat_completion_is_that_of_the_engine_under_the_seed(url, engine):
    status, body = post(
        f"{url}/v1/chat/completions", ASK | {"seed": 3, "n": 2, "return_token_ids": True, "logprobs": True}
    )
    assert status == 200
    text = tiny_model().tokenizer
    prompt = list(start_conversation(text, ASK["messages"]).tokens)
    keys = [jax.random.fold_in(jax.random.key(3), i) for i in range(2)]
    requests = [fg.contracts.Request(prompt, key, MAX_TOKENS, stop_ids=text.stop_ids) for key in keys]
    for choice, completion in zip(body["choices"], engine.generate(requests), strict=True):
        assert choice["token_ids"] == list(completion.tokens)
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        np.testing.assert_array_equal(np.float32(logprobs), np.float32(completion.logp_sampled))
        words, whole = text.decode_action(completion.tokens)
        assert choice["message"] == {"role": "assistant", "content": words}
        assert choice["finish_reason"] == ("stop" if whole else "length")
    assert body["prompt_token_ids"] == prompt
    sampled = sum(len(choice["token_ids"]) for choice in body["choices"])
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + sampled


def test_temperature_0_is_greedy(url):
    said = [post(f"{url}/v1/chat/completions", ASK | {"temperature": 0})[1]["choices"][0]["message"] for _ in range(2)]
    assert said[0] == said[1]


def test_an_echoed_prompt_is_scored(url):
    text, model = tiny_model().tokenizer, tiny_model()
    ids = text.encode("what is two plus two")
    asks = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
    status, body = post(f"{url}/v1/completions", asks)
    assert status == 200
    choice = body["choices"][0]
    expected = fg.generate.logprobs(model.policy, model.params, np.array([ids])).logp[0]
    assert choice["logprobs"]["token_logprobs"][0] is None
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], np.asarray(expected)[1:], atol=1e-5)
    assert choice["text"] == text.decode(ids)
    likeliest = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:]]
    assert np.all(np.array(likeliest) >= np.array(choice["logprobs"]["token_logprobs"][1:]))
    assert choice["logprobs"]["text_offset"][:2] == [0, len(text.decode(ids[:1]))]
    # Normalised without the ids that are never sampled, they are higher by the mass of those.
    sampled = fg.generate.logprobs(model.policy, model.params, np.array([ids]), banned=model.banned).logp[0]
    assert choice["logprobs"]["banned_token_ids"] == list(model.banned)
    mass = np.array(choice["logprobs"]["banned_mass"][1:])
    assert mass.max() > 1e-4
    np.testing.assert_allclose(np.asarray(expected)[1:] - np.log1p(-mass), np.asarray(sampled)[1:], atol=1e-5)


def events(url: str, body) -> list[str]:
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def test_streams_have_the_content_of_whole_responses(url):
    asks = ASK | {"seed": 5}
    whole = post(f"{url}/v1/chat/completions", asks)[1]
    *chunks, last = events(f"{url}/v1/chat/completions", asks | {"stream_options": {"include_usage": True}})
    assert last == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert said == whole["choices"][0]["message"]["content"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):  # not those whose cache was found
        assert chunks[-1]["usage"][name] == whole["usage"][name]
    asks = {"prompt": "what is", "seed": 5, "max_tokens": 5}
    whole = post(f"{url}/v1/completions", asks)[1]
    first, last = events(f"{url}/v1/completions", asks)
    assert json.loads(first)["choices"] == whole["choices"]


def test_responses_have_the_content_of_chat_completions(url):
    chat = post(f"{url}/v1/chat/completions", ASK | {"seed": 4, "max_tokens": 6})[1]["choices"][0]
    asks = {"input": "what is two", "seed": 4, "max_output_tokens": 6}
    body = post(f"{url}/v1/responses", asks)[1]
    assert body["output"][0]["content"][0]["text"] == chat["message"]["content"]
    assert body["status"] == ("completed" if chat["finish_reason"] == "stop" else "incomplete")
    kinds = [json.loads(event)["type"] for event in events(f"{url}/v1/responses", asks)]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{body['status']}"
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ]
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]
    assert post(f"{url}/v1/responses", {"input": items, "tools": tools, "instructions": "so"})[0] == 200


def test_models_and_health(url):
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{url}/v1/models/tiny").json()["id"] == "tiny"
    assert httpx.get(f"{url}/v1/models/large").status_code == 404
    assert httpx.get(f"{url}/health").json()["status"] == "ok"


# Bad input ----------------------------------------------------------------------------------------------


def deep_call(depth: int) -> dict:
    """An assistant message whose call has arguments of this depth."""
    function = {"name": "f", "arguments": '{"a": ' * depth + "1" + "}" * depth}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


LONG = {"messages": [{"role": "user", "content": "two " * CONTEXT}]}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat/completions", "{", 400, "the request is not JSON"),
        ("chat/completions", "[" * 100_000, 413, "more than 65536 bytes"),
        ("chat/completions", "[" * 60_000, 400, "the request is not JSON"),
        ("chat/completions", "[]", 400, "must be a JSON object"),
        ("chat/completions", {}, 400, "messages must be a list of at least one message"),
        ("chat/completions", ASK | {"model": "gpt-9"}, 404, "model 'gpt-9' is unknown: this gateway serves 'tiny'"),
        ("chat/completions", {"messages": ["x"]}, 400, "messages[0] must be an object with a role among"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0] has no content"),
        ("chat/completions", {"messages": [{"role": "user", "content": IMAGE}]}, 400, "reads text alone"),
        ("chat/completions", LONG, 400, f"which must be less than {CONTEXT}"),
        ("chat/completions", ASK | {"n": 0}, 400, "n must be a whole number of at least 1"),
        ("chat/completions", ASK | {"n": 1000}, 400, "and at most 64"),
        ("chat/completions", ASK | {"max_tokens": "x"}, 400, "max_tokens must be a whole number"),
        ("chat/completions", ASK | {"temperature": 9}, 400, "temperature must be a number of at least 0 and at most 2"),
        ("chat/completions", ASK | {"stop": [""]}, 400, "stop must be a string"),
        ("chat/completions", ASK | {"stream": "yes"}, 400, "stream must be true or false"),
        ("chat/completions", ASK | {"tools": {}}, 400, "tools must be a list"),
        ("chat/completions", ASK | {"tools": [{}]}, 400, "tools[0] must be a function with a name"),
        (
            "chat/completions",
            ASK | {"tools": [], "tool_choice": {"function": {"name": "f"}}},
            400,
            "tool_choice must be",
        ),
        ("completions", {"prompt": ""}, 400, "prompt must be a string of at least one character"),
        ("completions", {"prompt": ["a", "b"]}, 400, "send several apart"),
        ("completions", {"prompt": [10**9]}, 400, "prompt must hold ids below"),
        ("completions", {"prompt": list(range(9)) * 40}, 400, f"must be less than {CONTEXT}"),
        ("chat/completions", {"messages": [ASK["messages"][0]] * CONTEXT}, 400, f"has {CONTEXT} messages"),
        ("chat/completions", {"messages": [deep_call(500)]}, 400, "nested more than 64 deep"),
        ("chat/completions", ASK | {"metadata": json.loads("[" * 99 + "]" * 99)}, 400, "nested more than 64 deep"),
        ("chat/completions", ASK | {"max_tokens": int("9" * 999)}, 400, "max_tokens must be a whole number"),
        ("chat/completions", ASK | {"max_tokens": 0}, 400, "max_tokens must be a whole number of at least 1"),
        ("../sessions", {"seed": 10**30}, 400, "seed must be a whole number"),
        ("../weights", {"folder": "x" * 5000, "version": 1}, 400, "no model can be loaded"),
        ("../weights", {"folder": "a\0b", "version": 1}, 400, "no model can be loaded"),
        ("../weights", {"folder": "x", "version": 10**30}, 400, "version must be a whole number"),
        ("../nowhere", {}, 404, "POST /nowhere can't be had here"),
        ("../health", {}, 405, "POST /health can't be had here"),
        ("responses", {"input": []}, 400, "input must be a string"),
        ("responses", {"input": "x", "previous_response_id": "r"}, 400, "no response is kept here"),
        ("responses", {"input": [{"type": "image"}]}, 400, "input[0] is of the type 'image'"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, 400, "can't be had here: give functions"),
    ],
)
def test_bad_requests_get_one_sentence(url, path, body, status, message):
    actual, answer = post(f"{url}/v1/{path}", body)
    assert actual == status, answer
    assert message in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert post(f"{url}/v1/chat/completions", ASK)[0] == 200  # and the next one is answered


def test_unknown_sessions_and_rewards_without_one_are_refused(url):
    assert post(f"{url}/s/nobody/v1/chat/completions", ASK)[0] == 404
    assert post(f"{url}/v1/chat/completions", ASK, headers={"x-session-id": "nobody"})[0] == 404
    assert post(f"{url}/s/nobody/reward", {"reward": 1})[0] == 404
    assert post(f"{url}/reward", {"reward": 1})[0] == 400


def test_a_token_is_required_if_other_machines_can_reach_the_server():
    with pytest.raises(fg.BadInput, match=r"host=0\.0\.0\.0 can be reached from other machines: set a token"):
        Gateway(model="tiny", decode=str, access=AccessPolicy("0.0.0.0"))
    with Gateway(model="tiny", decode=str, access=AccessPolicy(token="secret")) as gateway:
        assert httpx.get(f"{gateway.url}/models").status_code == 401
        assert httpx.get(f"{gateway.url}/models", headers={"authorization": "Bearer secre"}).status_code == 401
        assert httpx.get(f"{gateway.url}/models", headers={"authorization": "Bearer secret"}).status_code == 200
        with pytest.raises(fg.BadInput, match="can't be listened on"):
            Gateway(model="tiny", decode=str, port=gateway.port)


def test_an_incomplete_request_times_out(url, monkeypatch):
    monkeypatch.setattr(server_module, "READ_SECONDS", 0.2)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as slow:
        slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in slow.recv(1000)


def test_a_client_that_never_reads_is_dropped(monkeypatch):
    monkeypatch.setattr(auth, "SEND_SECONDS", 0.3)
    size = 1 << 17

    async def long_response(_request):
        tokens = tuple(range(size))
        return [
            ChatResponse(content="x" * size, finish_reason="stop", tokens=tokens, prompt=(1,), logprobs=(0.0,) * size)
        ]

    with Gateway(model="tiny", decode=lambda ids: "x" * len(ids), complete=long_response) as gateway:
        body = json.dumps(ASK | {"stream": True, "logprobs": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        gateway._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # full at once
        with socket.create_connection((gateway.host, gateway.port), timeout=20) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            client.sendall(head + body)
            assert client.recv(12) == b"HTTP/1.1 200"
            assert httpx.get(f"{gateway.url}/models").status_code == 200
            time.sleep(2)
            received = b""
            while part := client.recv(1 << 20):
                received = received[-100:] + part
        assert b"[DONE]" not in received


def test_a_client_that_disconnects_frees_its_slot(url, served):
    lost = served.engine.lost.fates.get(Fate.DROPPED_CANCELLED, 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=ASK | {"n": 64}, timeout=0.05)
    for _ in range(200):
        if served.engine.lost.fates.get(Fate.DROPPED_CANCELLED, 0) > lost:
            break
        time.sleep(0.02)
    assert served.engine.lost.fates.get(Fate.DROPPED_CANCELLED, 0) > lost


def test_A3_a_thousand_mutated_requests_crash_nothing_and_leak_nothing(url, served, played):
    """A session has a secret, which appears in no response to others; and the session continues."""
    secret = "zxqvzxqv"
    session = post(f"{url}/sessions", {"task": secret})[1]
    messages = [{"role": "user", "content": secret}]
    assert post(f"{session['base_url']}/chat/completions", {"messages": messages})[0] == 200
    rng = random.Random(0)
    bodies = [ASK, {"prompt": "what is", "max_tokens": 2}, {"input": "what", "max_output_tokens": 2}]
    bodies += [ASK | {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}]
    paths = [f"/v1/{path}" for path in ("chat/completions", "completions", "responses")]
    paths += ["/sessions", "/reward", "/s/x/reward", "/weights"]
    odd = [None, -1, 1e99, "", [], {}, True, "\ud83d", "\x00" * 9, [[]], {"role": 1}]
    odd.append([{"role": "tool", "content": None}])
    seen = set()
    with httpx.Client(timeout=60) as client:
        for _ in range(1000):
            body = json.loads(json.dumps(rng.choice(bodies) | {"max_tokens": 1}))
            for _ in range(rng.randint(0, 3)):
                body[rng.choice([*body, "n", "stop", "seed", "logprobs", "stream", "task", "folder"])] = rng.choice(odd)
            data = json.dumps(body).encode()
            if rng.random() < 0.3:
                at = rng.randrange(len(data))
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + rng.randint(0, 3) :]
            response = client.post(url + rng.choice(paths), content=data)
            seen.add(response.status_code)
            assert secret not in response.text
            assert response.status_code < 500, (data, response.text)
    assert {200, 400, 404} <= seen
    assert post(f"{url}/s/{session['session']}/reward", {"reward": 1.0})[1]["status"] == "FINISHED"
    assert [one.task.query for one in played if one.turns] == [secret]
    for name in list(served.sessions):
        assert httpx.delete(f"{url}/s/{name}").status_code == 200


# Sessions of external agents ---------------------------------------------------------------------------


def talk(base_url: str, query: str, times: int = 3) -> str:
    messages = [{"role": "user", "content": query}]
    for number in range(times):
        status, body = post(f"{base_url}/chat/completions", {"messages": messages})
        assert status == 200, body
        messages += [body["choices"][0]["message"], {"role": "user", "content": f"again {number}"}]
    return messages[-2]["content"]


def test_A7_a_session_has_the_bits_of_a_hosted_rollout(url, engine, played):
    from gateway.test_agents import by_hand, same_bits

    task = tasks_of(1)[0]
    session = post(f"{url}/sessions", {"task": task.query, "seed": 11})[1]
    said = talk(session["base_url"], task.query)
    status, record = post(f"{url}/s/{session['session']}/reward", {"output": said, "reward": 0.5})
    assert status == 200
    assert (record["status"], record["turns"], record["contexts"], record["outcome"]) == ("FINISHED", 3, 1, 0.5)
    expected = fg.hosted(by_hand(["again 0", "again 1"]), engine.submit)([task], jax.random.key(11)[None], [0])
    same_bits(played[0], expected.trajectories[0])
    for address in (f"{session['base_url']}/chat/completions", f"{url}/s/{session['session']}/reward"):
        code, answer = post(address, ASK if "chat" in address else {"reward": 1})
        assert (code, answer["error"]["code"]) == (410, "session_over")
    again = post(f"{url}/s/{session['session']}/reward", {"output": said, "reward": 0.5})
    assert again == (200, record)  # whose answer was lost on its way


def test_sessions_by_header_and_their_description(url, played):
    session = post(f"{url}/sessions", {})[1]
    headers = {"x-session-id": session["session"]}
    assert post(f"{url}/v1/chat/completions", ASK, headers=headers)[0] == 200
    assert httpx.get(f"{url}/s/{session['session']}").json() == {
        "session": session["session"],
        "answered": 1,
        "over": False,
    }
    assert post(f"{url}/v1/chat/completions", ASK | {"n": 2}, headers=headers)[0] == 400
    assert httpx.delete(f"{url}/s/{session['session']}").status_code == 200
    assert (played[0].status, played[0].outcome) == (Status.ABORTED, None)
    assert played[0].reason == "the session was ended by its client"


def test_a_reward_function_scores_the_output_of_a_session(url, served):
    served.reward = fg.rewards.answer()
    try:
        for output, outcome in (("4", 1.0), ("5", 0.0)):
            body = {"task": {"query": "what is two plus two", "answers": ["4"], "domain": "answer"}}
            session = post(f"{url}/sessions", body)[1]
            talk(session["base_url"], "what is two plus two", 1)
            address = f"{url}/s/{session['session']}/reward"
            for unused in ({"reward": 1.0}, {"output": output, "reward": 1.0}, {"output": output, "correct": True}, {}):
                assert post(address, unused)[0] == 400
            assert post(address, {"output": output})[1]["outcome"] == outcome
    finally:
        served.reward = None


def test_A7_a_silent_session_is_aborted_and_never_a_reward_of_0(url, served, played, monkeypatch):
    monkeypatch.setattr(served, "settings", replace(served.settings, silent_seconds=0.3))
    session = post(f"{url}/sessions", {})[1]
    assert post(f"{session['base_url']}/chat/completions", ASK)[0] == 200
    for _ in range(300):
        if played:
            break
        time.sleep(0.02)
    assert (played[0].status, played[0].outcome, len(played[0].turns)) == (Status.ABORTED, None, 1)
    why = "asked for nothing and did not end in 0.3 s"
    assert why in played[0].reason
    status, answer = post(f"{session['base_url']}/chat/completions", ASK)
    assert (status, why in answer["error"]["message"]) == (410, True)


def test_the_number_of_sessions_is_limited(url, served):
    names = []
    while (answer := post(f"{url}/sessions", {}))[0] == 200:
        names.append(answer[1]["session"])
    assert answer[0] == 429
    assert len(served.sessions) == 4
    for name in names:
        httpx.delete(f"{url}/s/{name}")
    assert not served.sessions


def test_weights_are_updated_during_requests_and_tokens_have_versions(url, tmp_path):
    folder = tmp_path / "other"
    model = tiny_model()
    other = jax.tree.map(lambda x: x * 1.01, model.params)
    fg.models.save_model(folder, model._replace(params=other))
    statuses, versions = [], []

    def ask(number: int) -> None:
        status, body = post(f"{url}/v1/chat/completions", ASK | {"seed": number, "return_token_ids": True})
        statuses.append(status)
        versions.append(body["choices"][0]["versions"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads[:12]:
        thread.start()
    assert post(f"{url}/weights", {"folder": str(folder), "version": 7}) == (200, {"version": 7})
    for thread in threads[12:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200}
    assert {version for one in versions for version in one} <= {0, 7}
    assert versions[-1][-1] == 7
    for body in ({}, {"folder": str(folder)}, {"folder": "/nowhere", "version": 8}):
        assert post(f"{url}/weights", body)[0] == 400
    assert tiny_folder().exists()


def test_a_gateway_without_callables_answers_only_sessions():
    with Gateway(model="tiny", decode=str) as gateway:
        status, body = post(f"{gateway.url}/chat/completions", ASK)
        assert (status, body["error"]["code"]) == (404, "no_session")
        assert post(f"{gateway.url.removesuffix('/v1')}/sessions", {})[0] == 405
        assert post(f"{gateway.url.removesuffix('/v1')}/weights", {})[0] == 405


@pytest.mark.parametrize("end", ["reward", "delete", "silence", "failure"])
def test_a_session_that_ended_leaves_no_text(served, end, monkeypatch, caplog):
    """However it ended; only a few tombstones are remembered."""
    monkeypatch.setattr(server_module, "MAX_TOMBSTONES", 2)
    silent_seconds = 0.2 if end == "silence" else 600.0
    monkeypatch.setattr(served, "settings", replace(served.settings, silent_seconds=silent_seconds))
    if end == "failure":
        monkeypatch.setattr(served, "on_session_end", lambda _trajectory: 1 / 0)
    opened = []

    def open_session(body):
        session = served.open_session(body)
        opened.append(weakref.ref(session))
        return session

    with Gateway(model="tiny", decode=str, open_session=open_session) as gateway:
        root = gateway.url.removesuffix("/v1")
        for number in range(3):
            session = post(f"{root}/sessions", {})[1]
            address = f"{root}/s/{session['session']}"
            assert post(f"{address}/v1/chat/completions", ASK)[0] == 200
            if end == "delete":
                httpx.delete(address)
            elif end != "silence":
                assert post(f"{address}/reward", {"reward": number})[0] == (500 if end == "failure" else 200)
            for _ in range(300):
                if not gateway._sessions:
                    break
                time.sleep(0.02)
            status, answer = post(f"{address}/v1/chat/completions", ASK)
            words = {"delete": "ended by its client", "silence": "asked for nothing", "failure": "division by zero"}
            assert status == 410
            assert words.get(end, "") in answer["error"]["message"]
        assert httpx.get(f"{root}/health").json()["sessions"] == 0
        assert len(gateway._ended) == 2
        gc.collect()
        assert [session() for session in opened] == [None] * 3
    assert ("is over" in caplog.text) == (end == "failure")


def test_a_long_session_remembers_few_responses_and_no_requests(url, served, monkeypatch):
    monkeypatch.setattr(live_session, "MAX_REMEMBERED", 2)
    session = post(f"{url}/sessions", {})[1]
    live = served.sessions[session["session"]]
    for number in range(TURNS):
        assert post(f"{session['base_url']}/completions", {"prompt": f"what {number}", "max_tokens": 1})[0] == 200
    assert len(live._by_digest) == 3
    assert all(pending.request is None for pending in live._by_digest.values())
    assert httpx.delete(f"{url}/s/{session['session']}").status_code == 200


def test_max_tokens_0_samples_nothing(url):
    status, body = post(f"{url}/v1/completions", {"prompt": "what", "max_tokens": 0, "n": 2})
    assert (status, body["usage"]["completion_tokens"], len(body["choices"])) == (200, 0, 2)
    session = post(f"{url}/sessions", {})[1]
    status, body = post(f"{session['base_url']}/completions", {"prompt": "what", "max_tokens": 0})
    assert (status, body["error"]["param"]) == (400, "max_tokens")
    assert httpx.get(f"{url}/s/{session['session']}").json()["answered"] == 0
    status, body = post(f"{url}/s/{session['session']}/reward", {"output": "4"})  # and nobody judges
    assert (status, body["error"]["param"]) == (400, "reward")
    assert post(f"{url}/s/{session['session']}/reward", {"reward": int("9" * 400)})[0] == 400
    assert httpx.delete(f"{url}/s/{session['session']}").status_code == 200


def test_sizes_without_room_for_a_response_are_refused(engine):
    model = tiny_model()
    settings = ServerSettings(max_tokens=12, context_tokens=12)
    with pytest.raises(fg.BadInput, match="context_tokens=12 must be greater than max_tokens=12"):
        ModelServer(engine, model.tokenizer, model.policy, model.params, settings)


def test_an_internal_error_is_one_line_of_the_log(caplog):
    async def fail(_request):
        raise ValueError("secret")

    with Gateway(model="tiny", decode=str, complete=fail) as gateway:
        status, body = post(f"{gateway.url}/chat/completions", ASK)
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert len(caplog.records) == 1
        assert "ValueError at test_server.py" in caplog.text
        assert "secret" not in caplog.text
        with socket.create_connection((gateway.host, gateway.port), timeout=20) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.1)
        assert httpx.get(f"{gateway.url}/models").status_code == 200
        assert len(caplog.records) == 1  # who leaves in the middle of a body is none


def test_parallel_requests_of_a_session_are_answered_in_turn(url):
    session = post(f"{url}/sessions", {"seed": 1})[1]

    async def both() -> list[int]:
        async with httpx.AsyncClient(timeout=60) as client:
            bodies = [{"messages": [{"role": "user", "content": word}]} for word in ("two", "plus")]
            posts = [client.post(f"{session['base_url']}/chat/completions", json=body) for body in bodies]
            return [response.status_code for response in await asyncio.gather(*posts)]

    assert asyncio.run(both()) == [200, 200]
    record = post(f"{url}/s/{session['session']}/reward", {"reward": 1.0})[1]
    assert (record["turns"], record["contexts"]) == (2, 2)
    assert make_env().max_turns == TURNS
