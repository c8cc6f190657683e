"""Uploads to a stand-in for the hub: what arrives, and one sentence for each way in which it may fail."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from flowgrpo.publish.hub import check_push, push_folder
from flowgrpo.types import BadInput


class StandIn(ThreadingHTTPServer):
    """Takes repositories and commits, as much of the hub as an upload of small files needs."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.status = 200
        self.asked: dict[str, dict] = {}
        self.files: dict[str, bytes] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers["Authorization"] != "Bearer hf_mine":
            self.send(401, {"error": "who is that?"})
        elif self.server.status != 200:
            self.send(self.server.status, {"error": "no"})
        elif self.path == "/api/repos/create":
            self.server.asked["create"] = json.loads(body)
            self.send(200, {"url": f"{self.server.endpoint}/me/planner"})
        elif "/preupload/" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self.send(200, {"files": files})
        elif "/commit/" in self.path:
            self.take([json.loads(line) for line in body.splitlines()])
            self.send(200, {"commitUrl": f"{self.server.endpoint}/me/planner/commit/1", "commitOid": "1"})
        else:  # the card is looked at
            self.send(200, {"errors": [], "warnings": []})

    def do_GET(self) -> None:
        self.send(404, {"error": "nothing is there yet"})

    def take(self, lines: list[dict]) -> None:
        self.server.asked["commit"] = lines[0]["value"]
        given = [line["value"] for line in lines[1:] if line["key"] == "file"]
        self.server.files = {one["path"]: base64.b64decode(one["content"]) for one in given}

    def send(self, status: int, answer: dict) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "README.md").write_text("---\nlicense: mit\n---\n# A planner\n")
    return tmp_path / "model"


def push(server: StandIn, folder: Path, token: str = "hf_mine") -> str:
    api = HfApi(endpoint=server.endpoint, token=token)
    return push_folder(folder, "me/planner", private=True, message="Update 3", api=api)


def test_a_folder_arrives_as_it_is_in_a_repository_of_its_own(hub, folder):
    assert push(hub, folder) == f"{hub.endpoint}/me/planner"
    created = hub.asked["create"]
    assert (created["name"], created["organization"]) == ("planner", "me")
    assert created.get("private") or created.get("visibility") == "private"
    assert hub.asked["commit"]["summary"] == "Update 3"
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("status", "token", "said"),
    [
        (200, "hf_other", "the hub does not know the token: set HF_TOKEN to a token that may write"),
        (403, "hf_mine", "the token may not write there: take one that may, or a repository of your own"),
        (400, "hf_mine", "the hub refuses the folder"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(hub, folder, status, token, said):
    hub.status = status
    with pytest.raises(BadInput, match=f"--push_to_hub=me/planner: {said}.*model is written, and the same command"):
        push(hub, folder, token)


def test_a_hub_that_can_not_be_reached_is_one_sentence(folder, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    with pytest.raises(BadInput, match=r"the hub can't be reached \(.*\): go online; .*model is written"):
        push_folder(folder, "me/planner", private=False, message="Update 3")


def test_a_push_without_name_or_token_is_refused_first(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(BadInput, match="--push_to_hub=planner must be USER/NAME"):
        check_push("planner")
    with pytest.raises(BadInput, match="--push_to_hub=me/planner needs a token, and there is none here: set HF_TOKEN"):
        check_push("me/planner")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_mine")
    check_push("me/planner")
