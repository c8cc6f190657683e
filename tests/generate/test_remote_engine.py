"""An engine elsewhere: what a server samples is what is recorded, and what it does wrong costs one trajectory."""

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
from flowgrpo.gateway.serving import Served
from flowgrpo.generate.remote_engine import UPDATES, RemoteEngine, to_gateway
from flowgrpo.types import Status


def save(params, folder) -> None:
    fg.save_model(folder, tiny_model()._replace(params=params))


@pytest.fixture(scope="module")
def server():
    """A gateway over the same weights."""
    model = tiny_model()
    with make_engine() as engine:
        served = Served(engine, model.text, model.policy, model.params, max_tokens=MAX_TOKENS, context_tokens=CONTEXT)
        with Gateway(model="tiny", spell=model.text.decode, ask=served.ask, swap=served.swap) as gateway:
            yield gateway


@pytest.fixture
def elsewhere(server, tmp_path):
    hand_over = to_gateway(server.url, save, tmp_path)
    with RemoteEngine(fg.remote(server.url, "tiny", concurrency=8), hand_over=hand_over, seconds=30) as engine:
        yield engine


def play(engine, count: int = 4, **more):
    rollout = fg.hosted(by_hand(["again 0", "again 1"]), engine.submit, **more)
    return rollout(tasks_of(count), keys_of(count), list(range(count))).played


def test_trajectories_have_the_ids_that_the_server_sampled_and_their_log_probabilities(elsewhere):
    played, model = play(elsewhere), tiny_model()
    assert [len(one.turns) for one in played] == [3] * 4
    for one in played:
        tokens = np.concatenate([turn.tokens for turn in one.turns])
        chosen = np.concatenate([turn.chosen for turn in one.turns])
        sampled = np.concatenate([turn.logp_sampled for turn in one.turns])
        scores = fg.generate.logprobs(model.policy, model.params, tokens[None], banned=model.banned).logp[0]
        np.testing.assert_allclose(np.asarray(scores)[chosen], sampled[chosen], atol=1e-5)
    again = play(elsewhere)
    assert [one.output for one in again] == [one.output for one in played]  # by the seeds of their keys


def test_weights_are_handed_over_by_version_and_tokens_say_which_they_began_under(elsewhere, tmp_path):
    other = jax.tree.map(lambda x: x * 1.5, tiny_model().params)
    elsewhere.swap(other, 4)
    one = play(elsewhere, 1)[0]
    assert {int(version) for turn in one.turns for version in np.atleast_1d(turn.version)} == {4}
    scores = fg.generate.logprobs(tiny_model().policy, other, one.turns[0].tokens[None], banned=tiny_model().banned)
    turn = one.turns[0]
    np.testing.assert_allclose(np.asarray(scores.logp[0])[turn.chosen], turn.logp_sampled[turn.chosen], atol=1e-5)
    elsewhere.swap(tiny_model().params, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["version-5"]
    assert elsewhere.release() == 0


def test_what_an_engine_elsewhere_cannot_do_is_refused(elsewhere):
    with pytest.raises(fg.BadInput, match="can't cut actions"):
        elsewhere.submit(fg.Request([1], jax.random.key(0), 3, budget=2))


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
def test_F5_an_answer_that_cannot_be_right_costs_its_trajectory_and_no_other(misbehaving, choice, why):
    handler, url = misbehaving
    handler.choice = choice
    with RemoteEngine(fg.remote(url, "m", retries=0), hand_over=lambda *_: None, banned=(0,)) as engine:
        one = play(engine, 1)[0]
        assert (one.status, one.outcome) == (Status.TOOL_FAILURE, None)
        assert why in one.reason
        handler.choice = GOOD
        assert play(engine, 1)[0].status == Status.FINISHED


def test_S3_a_server_that_fails_or_hangs_is_named(misbehaving):
    handler, url = misbehaving
    handler.status = 500
    with RemoteEngine(fg.remote(url, "m", retries=0), hand_over=lambda *_: None, seconds=0.5) as engine:
        assert "HTTP 500 Internal Server Error: out of memory" in play(engine, 1)[0].reason
        handler.status, handler.delay = 200, 2.0
        assert "no answer within the deadline of 0.5 s" in play(engine, 1)[0].reason
        with pytest.raises(RequestFailed):
            engine.generate([fg.Request([1], jax.random.key(0), 2)])


@pytest.mark.parametrize("kind", ["vllm", "sglang", "gateway"])
def test_how_servers_are_told_of_weights(misbehaving, tmp_path, kind):
    handler, url = misbehaving
    hand_over = UPDATES[kind](url, save, tmp_path / "served")
    hand_over(tiny_model().params, 3)
    told = {
        "vllm": [("/collective_rpc", {"method": "reload_weights"}), ("/reset_prefix_cache", {})],
        "sglang": [("/update_weights_from_disk", {"model_path": str(tmp_path / "served")})],
        "gateway": [("/weights", {"folder": str(tmp_path / "served" / "version-3"), "version": 3})],
    }
    assert handler.asked == told[kind]
    found = tmp_path / "served" / ("version-3" if kind == "gateway" else "")
    assert fg.load_model(found).config == tiny_model().config
    handler.status = 500
    with pytest.raises(fg.BadInput, match="did not take the weights: HTTP 500, out of memory; see that"):
        hand_over(tiny_model().params, 4)


def test_a_run_is_sampled_by_a_server(server, tmp_path):
    """The outcome of a run whose trajectories come from elsewhere: it learns under a correction."""
    lines = [{"id": f"t{i}", "query": f"what is {i}", "answers": ["4"], "domain": "answer"} for i in range(40)]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = {"queries": 2, "samples": 2, "validation_tasks": 2, "test_tasks": 2, "slots": 8, "updates": 1}
    sizes |= {"max_tokens": MAX_TOKENS, "context_tokens": CONTEXT, "turns": TURNS, "mini_batches": 1}
    from gateway_cases import talkative

    result = fg.train_agent(
        talkative,
        tasks,
        lambda _task, output: fg.Scored(float(len(output) % 2)),
        model=tiny_folder(),
        folder=tmp_path / "run",
        dtype="float32",
        remat=False,
        sampled_by=f"{server.url}#tiny",
        correction=2.0,
        **sizes,
    )
    assert result["updates"] == 1
    trained = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(abs(line["correction"] - 1) < 1e-3 for line in trained if line["phase"] == "train")
    assert httpx.get(f"{server.url.removesuffix('/v1')}/health").json()["status"] == "ok"


@pytest.mark.parametrize("more", [{"sampled_by": "here"}, {"sampled_by": "http://x#m", "lora_rank": 4}])
def test_a_server_that_samples_is_named_with_its_model_and_takes_whole_weights(more):
    from flowgrpo.recipes.own_agent import preset

    with pytest.raises(fg.BadInput, match="--sampled_by"):
        preset("a/model", tasks="x.jsonl", **more)
