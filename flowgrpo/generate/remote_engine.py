"""An engine elsewhere: ids in, ids and log-probabilities out, over an OpenAI-compatible server.

    with RemoteEngine(remote(url, "planner"), hand_over=to_gateway(url, save)) as engine: hosted(env, engine.submit)

It has the methods of `Engine`, and stands in its place. Weights are handed over by version: written to a folder, and
loaded by the server. What another engine samples is not, to the last bit, what the trainer computes: train with a
`Correction`, and have the server give the log-probabilities of what it drew from (vLLM: --logprobs-mode
processed_logprobs). A token carries the version of the weights that its request began under.
"""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np

from flowgrpo.contracts import Completion, Request, RequestFailed
from flowgrpo.generate.admission import Recomputed
from flowgrpo.generate.openai_client import Remote
from flowgrpo.generate.openai_wire import TextCompletion, TextRequest, failure_message
from flowgrpo.generate.prefill import Prefilled
from flowgrpo.types import BadInput, Ledger

Save = Callable[[Any, Path], Any]  # (params, folder): writes a model folder
HandOver = Callable[[Any, int], None]  # (params, version)
LOADING = 600.0  # seconds in which a server has to load weights
SEEDS = 1 << 31  # seeds that every server takes


class RemoteEngine:
    """Requests to a server; close it, or use it in a `with` block."""

    kept = 0

    def __init__(
        self,
        server: Remote,
        *,
        hand_over: HandOver,
        banned: Sequence[int] = (),
        seconds: float = 600.0,
        version: int = 0,
    ):
        """`banned` ids are never sampled (the padding token); a request has so many `seconds`, with every retry."""
        self._server, self._hand_over, self.seconds = server, hand_over, seconds
        self._version, self._held, self.banned = version, None, tuple(banned)
        self.lost = Ledger()  # what a server decodes for nobody is not told
        self.recomputed = Recomputed()  # nor what it computes again
        self.prefilled = Prefilled()  # nor of prompts at all

    def submit(self, request: Request) -> Future:
        """A future of the request's `Completion`; it raises `RequestFailed` where the server gives none."""
        if request.begun is not None or request.budget is not None:
            raise BadInput("an engine elsewhere can't cut actions: leave out budgets, or sample here")
        asked = TextRequest(
            tokens=tuple(request.tokens),
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            stop=request.stop,
            stop_ids=request.stop_ids,
            banned=self.banned,
            seed=int(np.asarray(jax.random.key_data(request.key)).astype(np.uint64).sum() % SEEDS),
            deadline=self.seconds if request.deadline is None else request.deadline,
        )
        answer: Future[Completion] = Future()
        self._server.submit(asked).add_done_callback(partial(_pass_on, answer, self._version))
        return answer

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests."""
        return [future.result() for future in [self.submit(request) for request in requests]]

    def swap(self, params: Any, version: int) -> None:
        """Hand these weights over, unless the server has them; returns when it has loaded them."""
        if self._held is params:
            return
        self._hand_over(params, version)
        self._held, self._version = params, version

    def release(self) -> int:
        """Free nothing: the server's memory is its own."""
        return 0

    def close(self) -> None:
        """Leave the server."""
        self._server.close()

    def __enter__(self) -> "RemoteEngine":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _pass_on(answer: Future, version: int, done: "Future[TextCompletion]") -> None:
    """Give what came of a request to whoever waits for it."""
    if answer.cancelled() or not answer.set_running_or_notify_cancel():
        return
    said = done.result() if done.exception() is None else None
    if said is None:
        answer.set_exception(RequestFailed(str(done.exception())))
    elif said.error is not None or said.tokens is None or said.logp_sampled is None:
        answer.set_exception(RequestFailed(said.error or "the server gave no ids"))
    else:
        versions = [version] * len(said.tokens)
        answer.set_result(Completion(said.tokens, said.logp_sampled, versions, said.finish_reason))


# Handing weights over -----------------------------------------------------------------------------------


def to_gateway(url: str, save: Save, folder: Path) -> HandOver:
    """To `experiments.gateway`: a folder for each version, of which the last is kept."""

    def hand_over(params: Any, version: int) -> None:
        path = folder / f"version-{version}"
        save(params, path)
        _post(f"{_root(url)}/weights", {"folder": str(path.resolve()), "version": version})
        for old in folder.glob("version-*"):
            if old != path:
                shutil.rmtree(old, ignore_errors=True)

    return hand_over


def to_vllm(url: str, save: Save, folder: Path) -> HandOver:
    """To vLLM (VLLM_SERVER_DEV_MODE=1), which serves this very folder and reads it again."""

    def hand_over(params: Any, _version: int) -> None:
        save(params, folder)
        _post(f"{_root(url)}/collective_rpc", {"method": "reload_weights"})
        _post(f"{_root(url)}/reset_prefix_cache", {})

    return hand_over


def to_sglang(url: str, save: Save, folder: Path) -> HandOver:
    """To SGLang, which is told of the folder."""

    def hand_over(params: Any, _version: int) -> None:
        save(params, folder)
        _post(f"{_root(url)}/update_weights_from_disk", {"model_path": str(folder.resolve())})

    return hand_over


UPDATES: dict[str, Callable[[str, Save, Path], HandOver]] = {
    "gateway": to_gateway,
    "vllm": to_vllm,
    "sglang": to_sglang,
}


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _post(url: str, body: dict[str, Any]) -> None:
    """Tell the server something, or raise `BadInput` that says why it did not take it."""
    why = ""
    with suppress(httpx.TransportError):
        response = httpx.post(url, json=body, timeout=LOADING, trust_env=False)
        if response.status_code == 200:
            return
        why = f": HTTP {response.status_code}, {failure_message(response.content)[:300]}"
    raise BadInput(f"{url} did not take the weights{why}; see that the server runs, and that it can read the folder")
