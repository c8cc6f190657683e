"""A remote engine: what a server samples is recorded, and a failure costs one trajectory."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import jax
import numpy as np
import pytest
from gateway.test_agents import by_hand
from gateway_cases import CONTEXT, MAX_TOKENS, TURNS, keys_of, make_engine, tasks_of, tiny_folder, tiny_model

import flowgrpo as fg
from flowgrpo.contracts import RequestFailed
from flowgrpo.gateway.server import Gateway
from flowgrpo.gateway.serving import ModelServer, ServerSettings
from flowgrpo.generate.remote_engine import WEIGHT_SENDERS, RemoteEngine, to_gateway
from flowgrpo.types import Status


def save(params, folder) -> None:
    fg.models.save_model(folder, tiny_model()._replace(params=params))


@pytest.fixture(scope="module")
def server():
    """A gateway over the same weights."""
    model = tiny_model()
    with make_engine() as engine:
        served = ModelServer(
            engine,
            model.tokenizer,
            model.policy,
            model.params,
            ServerSettings(max_tokens=MAX_TOKENS, context_tokens=CONTEXT),
        )
        with Gateway(
            model="tiny", decode=model.tokenizer.decode, complete=served.complete, update_weights=served.update_weights
        ) as gateway:
            yield gateway


@pytest.fixture
def remote_engine(server, tmp_path):
    send_weights = to_gateway(server.url, save, tmp_path)
    with RemoteEngine(
        fg.generate.remote(server.url, "tiny", concurrency=8), send_weights=send_weights, timeout=30
    ) as engine:
        yield engine


def play(engine, count: int = 4, **more):
    rollout = fg.hosted(by_hand(["again 0", "again 1"]), engine.submit, **more)
    return rollout(tasks_of(count), keys_of(count), list(range(count))).trajectories


def test_trajectories_have_the_ids_and_log_probabilities_of_the_server(remote_engine):
    trajectories, model = play(remote_engine), tiny_model()
    assert [len(trajectory.turns) for trajectory in trajectories] == [3] * 4
    for trajectory in trajectories:
        tokens = np.concatenate([turn.tokens for turn in trajectory.turns])
        chosen = np.concatenate([turn.chosen for turn in trajectory.turns])
        sampled = np.concatenate([turn.logp_sampled for turn in trajectory.turns])
        scores = fg.generate.logprobs(model.policy, model.params, tokens[None], banned=model.banned).logp[0]
        np.testing.assert_allclose(np.asarray(scores)[chosen], sampled[chosen], atol=1e-5)
    again = play(remote_engine)
    assert [trajectory.output for trajectory in again] == [
        trajectory.output for trajectory in trajectories
    ]  # by the seeds of their keys


def test_weights_are_sent_by_version_and_tokens_carry_it(remote_engine, tmp_path):
    other = jax.tree.map(lambda x: x * 1.5, tiny_model().params)
    remote_engine.update_weights(other, 4)
    trajectory = play(remote_engine, 1)[0]
    assert {int(version) for turn in trajectory.turns for version in np.atleast_1d(turn.version)} == {4}
    scores = fg.generate.logprobs(
        tiny_model().policy, other, trajectory.turns[0].tokens[None], banned=tiny_model().banned
    )
    turn = trajectory.turns[0]
    np.testing.assert_allclose(np.asarray(scores.logp[0])[turn.chosen], turn.logp_sampled[turn.chosen], atol=1e-5)
    remote_engine.update_weights(tiny_model().params, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["version-5"]
    assert remote_engine.release() == 0


def test_budgets_are_refused_by_a_remote_engine(remote_engine):
    with pytest.raises(fg.BadInput, match="can't cut actions"):
        remote_engine.submit(fg.contracts.Request([1], jax.random.key(0), 3, budget=2))


GOOD = {"token_ids": [5, 2], "logprobs": {"token_logprobs": [-1.0, -0.5]}, "text": "x", "finish_reason": "stop"}


class Misbehaving(BaseHTTPRequestHandler):
    """Answers as it is told to."""

    choice: dict = GOOD
    status, delay = 200, 0.0
    asked: list = []  # noqa: RUF012

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, json.loads(body)))
        time.sleep(self.delay)
        data = json.dumps({"choices": [self.choice]} if self.status == 200 else {"error": {"message": "out of memory"}})
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def misbehaving():
    handler = type("Handler", (Misbehaving,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield handler, f"http://127.0.0.1:{listening.server_port}/v1"
        listening.shutdown()


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        (GOOD | {"token_ids": None}, "token_ids of the answer is null"),
        ({x: y for x, y in GOOD.items() if x != "token_ids"}, "the answer has no choices.0.token_ids"),
        (GOOD | {"token_ids": [5]}, "the answer has 1 ids and 2 log-probabilities"),
        (GOOD | {"token_ids": []}, "the answer has 0 ids"),
        (GOOD | {"token_ids": ["a", 2]}, "are no ids"),
        (GOOD | {"token_ids": [5, 6]}, "ends without its stop token"),
        (GOOD | {"logprobs": {"token_logprobs": [-1.0, None]}}, "are no log-probabilities"),
        (GOOD | {"logprobs": {"token_logprobs": [-1.0, 3.0]}}, "are no log-probabilities"),
        (GOOD | {"logprobs": None}, "the answer has no choices.0.logprobs.token_logprobs"),
        (GOOD | {"token_ids": [5] * 99, "logprobs": {"token_logprobs": [-1.0] * 99}}, "where 12 were asked for"),
        (GOOD | {"token_ids": [0, 2]}, "the answer has the id 0, which is never to be sampled"),
        (GOOD | {"finish_reason": "abort"}, "ended for the reason 'abort'"),
    ],
)
def test_F5_an_impossible_response_costs_one_trajectory(misbehaving, choice, why):
    handler, url = misbehaving
    handler.choice = choice
    with RemoteEngine(fg.generate.remote(url, "m", retries=0), send_weights=lambda *_: None, banned=(0,)) as engine:
        trajectory = play(engine, 1)[0]
        assert (trajectory.status, trajectory.outcome) == (Status.TOOL_FAILURE, None)
        assert why in trajectory.reason
        handler.choice = GOOD
        assert play(engine, 1)[0].status == Status.FINISHED


def test_S3_a_server_that_fails_or_hangs_is_named(misbehaving):
    handler, url = misbehaving
    handler.status = 500
    with RemoteEngine(fg.generate.remote(url, "m", retries=0), send_weights=lambda *_: None, timeout=0.5) as engine:
        assert "HTTP 500 Internal Server Error: out of memory" in play(engine, 1)[0].reason
        handler.status, handler.delay = 200, 2.0
        assert "no answer within the deadline of 0.5 s" in play(engine, 1)[0].reason
        with pytest.raises(RequestFailed):
            engine.generate([fg.contracts.Request([1], jax.random.key(0), 2)])


@pytest.mark.parametrize("kind", ["vllm", "sglang", "gateway"])
def test_weight_senders_of_servers(misbehaving, tmp_path, kind):
    handler, url = misbehaving
    send_weights = WEIGHT_SENDERS[kind](url, save, tmp_path / "served")
    send_weights(tiny_model().params, 3)
    requests = {
        "vllm": [("/collective_rpc", {"method": "reload_weights"}), ("/reset_prefix_cache", {})],
        "sglang": [("/update_weights_from_disk", {"model_path": str(tmp_path / "served")})],
        "gateway": [("/weights", {"folder": str(tmp_path / "served" / "version-3"), "version": 3})],
    }
    assert handler.asked == requests[kind]
    folder = tmp_path / "served" / ("version-3" if kind == "gateway" else "")
    assert fg.load_model(folder).config == tiny_model().config
    handler.status = 500
    with pytest.raises(fg.BadInput, match="did not take the weights: HTTP 500, out of memory; see that"):
        send_weights(tiny_model().params, 4)


def test_a_run_is_sampled_by_a_server(server, tmp_path):
    """The outcome of a run whose trajectories come from elsewhere: it learns under a correction."""
    lines = [{"id": f"t{i}", "query": f"what is {i}", "answers": ["4"], "domain": "answer"} for i in range(40)]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = {"queries": 2, "samples": 2, "validation_tasks": 2, "test_tasks": 2, "slots": 8, "updates": 1}
    sizes |= {"max_tokens": MAX_TOKENS, "context_tokens": CONTEXT, "turns": TURNS, "mini_batches": 1}
    from gateway_cases import talkative

    result = fg.recipes.own_agent.train_agent(
        talkative,
        tasks,
        lambda _task, output: fg.RewardResult(float(len(output) % 2)),
        model=tiny_folder(),
        folder=tmp_path / "run",
        dtype="float32",
        remat=False,
        sampling_server=f"{server.url}#tiny",
        correction=2.0,
        **sizes,
    )
    assert result["updates"] == 1
    trained = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(abs(line["correction"] - 1) < 1e-3 for line in trained if line["phase"] == "train")
    assert httpx.get(f"{server.url.removesuffix('/v1')}/health").json()["status"] == "ok"


@pytest.mark.parametrize("more", [{"sampling_server": "here"}, {"sampling_server": "http://x#m", "lora_rank": 4}])
def test_sampled_by_needs_a_model_and_whole_weights(more):
    from flowgrpo.recipes.own_agent import preset

    with pytest.raises(fg.BadInput, match="--sampling_server"):
        preset("a/model", tasks="x.jsonl", **more)
