"""An engine on a server: ids in, ids and log-probabilities out, over an OpenAI-compatible API.

    with RemoteEngine(remote(url, "planner"), send_weights=to_gateway(url, save)) as engine: hosted(env, engine.submit)

It has the methods of `Engine` and can replace it. Weights are sent by version: written to a folder, and loaded by the
server. What another engine samples is not, to the last bit, what the trainer computes: train with a `Correction`, and
have the server return the log-probabilities of the distribution that it sampled from (vLLM: --logprobs-mode
processed_logprobs). A token carries the version of the weights under which its request started.
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
from flowgrpo.generate.admission import RecomputeStats
from flowgrpo.generate.openai_client import Remote
from flowgrpo.generate.openai_wire import TextCompletion, TextRequest, failure_message
from flowgrpo.generate.prefill import PrefillStats
from flowgrpo.types import JSON, BadInput, Ledger, Params

SaveModel = Callable[[Params, Path], Any]  # (params, folder): writes a model folder
SendWeights = Callable[[Params, int], None]  # (params, version)
LOAD_SECONDS = 600.0  # in which a server has to load weights
SEEDS = 1 << 31  # seeds that every server takes


class RemoteEngine:
    """Requests to a server; close it, or use it in a `with` block."""

    max_recorded_top_k = 0

    def __init__(
        self,
        server: Remote,
        *,
        send_weights: SendWeights,
        banned: Sequence[int] = (),
        timeout: float = 600.0,
        version: int = 0,
    ):
        """An engine on `server`.

        Args:
            server: the client.
            send_weights: gives the server other weights, e.g. `to_vllm`.
            banned: ids that are never sampled, such as the padding token.
            timeout: seconds for a request without a deadline of its own, with every retry.
            version: of the weights that the server has now.
        """
        self._server, self._send_weights, self.timeout = server, send_weights, timeout
        self._version, self._params, self.banned = version, None, tuple(banned)
        # A server reports neither what it decodes for nobody, nor what it computes again, nor prefilled tokens.
        self.lost, self.recomputed, self.prefilled = Ledger(), RecomputeStats(), PrefillStats()

    def submit(self, request: Request) -> Future:
        """A future of the request's `Completion`; it raises `RequestFailed` if the server gives none."""
        if request.partial is not None or request.budget is not None:
            raise BadInput("an engine on a server can't cut actions: leave out budgets, or sample in this process")
        text_request = TextRequest(
            tokens=tuple(request.tokens),
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            stop=request.stop,
            stop_ids=request.stop_ids,
            banned=self.banned,
            seed=int(np.asarray(jax.random.key_data(request.key)).astype(np.uint64).sum() % SEEDS),
            deadline=self.timeout if request.deadline is None else request.deadline,
        )
        future: Future[Completion] = Future()
        self._server.submit(text_request).add_done_callback(partial(_resolve, future, self._version))
        return future

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests."""
        return [future.result() for future in [self.submit(request) for request in requests]]

    def update_weights(self, params: Params, version: int) -> None:
        """Send these weights, unless the server has them; returns when it has loaded them."""
        if self._params is params:
            return
        self._send_weights(params, version)
        self._params, self._version = params, version

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


def _resolve(future: Future, version: int, response: "Future[TextCompletion]") -> None:
    """Resolve the future of a request with the server's response."""
    if future.cancelled() or not future.set_running_or_notify_cancel():
        return
    completion = response.result() if response.exception() is None else None
    if completion is None:
        future.set_exception(RequestFailed(str(response.exception())))
    elif completion.error is not None or completion.tokens is None or completion.logp_sampled is None:
        future.set_exception(RequestFailed(completion.error or "the server gave no ids"))
    else:
        versions = [version] * len(completion.tokens)
        future.set_result(Completion(completion.tokens, completion.logp_sampled, versions, completion.finish_reason))


# Sending weights ----------------------------------------------------------------------------------------


def to_gateway(url: str, save: SaveModel, folder: Path) -> SendWeights:
    """Send weights to `experiments.gateway`: a folder for each version, of which the last stays."""

    def send_weights(params: Params, version: int) -> None:
        path = folder / f"version-{version}"
        save(params, path)
        _post(f"{_root(url)}/weights", {"folder": str(path.resolve()), "version": version})
        for old in folder.glob("version-*"):
            if old != path:
                shutil.rmtree(old, ignore_errors=True)

    return send_weights


def to_vllm(url: str, save: SaveModel, folder: Path) -> SendWeights:
    """Send weights to vLLM (VLLM_SERVER_DEV_MODE=1), which serves this very folder and reads it again."""

    def send_weights(params: Params, _version: int) -> None:
        save(params, folder)
        _post(f"{_root(url)}/collective_rpc", {"method": "reload_weights"})
        _post(f"{_root(url)}/reset_prefix_cache", {})

    return send_weights


def to_sglang(url: str, save: SaveModel, folder: Path) -> SendWeights:
    """Send weights to SGLang, which gets the path of the folder."""

    def send_weights(params: Params, _version: int) -> None:
        save(params, folder)
        _post(f"{_root(url)}/update_weights_from_disk", {"model_path": str(folder.resolve())})

    return send_weights


WEIGHT_SENDERS: dict[str, Callable[[str, SaveModel, Path], SendWeights]] = {
    "gateway": to_gateway,
    "vllm": to_vllm,
    "sglang": to_sglang,
}


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _post(url: str, body: JSON) -> None:
    """POST to the server; raises `BadInput` that says why it did not load the weights."""
    why = ""
    with suppress(httpx.TransportError):
        response = httpx.post(url, json=body, timeout=LOAD_SECONDS, trust_env=False)
        if response.status_code == 200:
            return
        why = f": HTTP {response.status_code}, {failure_message(response.content)[:300]}"
    raise BadInput(f"{url} did not take the weights{why}; see that the server runs, and that it can read the folder")
