"""Requests and responses of an OpenAI-compatible server as values, to and from bytes; pure.

`encode_request` gives path and body of a request, `parse_completion` reads a response, and everything that is wrong
with one is a `RemoteFailure` of one sentence.
"""

import email.utils
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

import numpy as np

from flowgrpo.types import JSON, BadInput

FinishReason = Literal["stop", "length", "timeout", "error", "cancelled"]
FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}  # the server's -> ours


class TextRequest(NamedTuple):
    """Request to a remote model: to answer `messages`, or to continue `prompt`."""

    messages: Sequence[Mapping[str, JSON]] | None = None
    prompt: str | None = None
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    seed: int | None = None
    deadline: float | None = None  # seconds from submission, with queueing and every retry
    top_logprobs: int = 0  # alternatives to report for each token; 0: no log-probabilities
    tokens: Sequence[int] | None = None  # a prompt as ids; the completion then has ids and log-probabilities
    stop_ids: Sequence[int] = ()  # tokens that end the completion, and are part of it
    banned: Sequence[int] = ()  # tokens that are never sampled


class TokenLogprob(NamedTuple):
    """One generated token, its log-probability, and the alternatives in its place."""

    token: str
    logprob: float
    top: Mapping[str, float]


class TextCompletion(NamedTuple):
    """Completion of a remote model; `error` is one sentence if `finish_reason` isn't stop or length."""

    text: str
    finish_reason: FinishReason
    logprobs: Sequence[TokenLogprob] | None = None
    error: str | None = None
    tokens: Sequence[int] | None = None  # the sampled ids, if the prompt was of ids
    logp_sampled: Sequence[float] | None = None  # of these


class RemoteFailure(RuntimeError):
    """A failed request; `wait` is the minimum time in seconds to the next attempt, None to give up."""

    def __init__(self, message: str, reason: FinishReason = "error", wait: float | None = None):
        super().__init__(message)
        self.reason: FinishReason = reason
        self.wait = wait


def parse_server_url(url: str) -> SplitResult:
    """The parts of a server's URL, or `BadInput`."""
    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url or "@" in url:
        raise BadInput("url must be printable ASCII without spaces or credentials, like http://host:8000/v1")
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise BadInput(f"url={url!r} is no address: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise BadInput(f"url={url!r} must begin with http:// or https://")
    if not host or port == 0:
        raise BadInput(f"url={url!r} must name a host, and a port above 0 if any, like http://host:8000/v1")
    if parts.query or parts.fragment:
        raise BadInput(f"url={url!r} must end with its path: leave out what follows ? or #")
    return parts


def encode_request(request: TextRequest, model: str) -> tuple[str, bytes]:
    """Path and body of a request, or `BadInput`."""
    if not isinstance(request, TextRequest):
        raise BadInput(f"a remote model takes a TextRequest, not {type(request).__name__}")
    prompts = [x for x in (request.messages, request.prompt, request.tokens) if x is not None]
    if len(prompts) != 1 or isinstance(request.messages, str):
        raise BadInput("a TextRequest takes a list of messages, a prompt, or the tokens of one: give one of them")
    settings = request._replace(messages=None, prompt=None, tokens=None)
    numbers = (
        settings.max_tokens,
        settings.temperature,
        settings.top_p,
        settings.top_logprobs,
        settings.deadline or 0.0,
    )
    if not all(isinstance(number, (int, float)) and not math.isnan(number) for number in numbers):
        raise BadInput(f"max_tokens, temperature, top_p, top_logprobs and deadline must be numbers in {settings}")
    if settings.max_tokens < 1 or settings.temperature < 0 or not 0 < settings.top_p <= 1 or settings.top_logprobs < 0:
        raise BadInput(f"max_tokens, temperature, top_p or top_logprobs is out of range in {settings}")
    chat = request.messages is not None
    body: dict[str, JSON] = {"model": model}
    body |= {"messages": list(request.messages)} if request.messages is not None else {"prompt": request.prompt}
    body |= {name: getattr(request, name) for name in ("max_tokens", "temperature", "top_p")}
    if request.tokens is not None:
        ids = {"prompt": [int(token) for token in request.tokens], "stop_token_ids": list(map(int, request.stop_ids))}
        body |= ids | {"return_token_ids": True, "logprobs": 1}
    if request.banned:
        body["logit_bias"] = {str(int(token)): -100 for token in request.banned}  # the least that servers take
    if request.stop:
        body["stop"] = [request.stop] if isinstance(request.stop, str) else list(request.stop)
    if request.seed is not None:
        body["seed"] = request.seed
    if request.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs} if chat else {"logprobs": request.top_logprobs}
    try:
        return "/chat/completions" if chat else "/completions", json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"the request can't be written as JSON: {error}") from None


def retry_after(header: str) -> float:
    """Seconds that a server asks to wait, as a number or a date; 0 if it asks for nothing."""
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(email.utils.parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError, OverflowError):
        return 0.0


def failure_message(body: bytes) -> str:
    """The error message in the body of a failed request's response."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
    for name in ("error", "message"):
        message = message.get(name, message) if isinstance(message, dict) else message
    return message if isinstance(message, str) else json.dumps(message)


def parse_completion(body: bytes, request: TextRequest) -> TextCompletion:
    """The first choice of a response; `RemoteFailure` if anything that was asked for is missing."""
    try:
        response = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RemoteFailure(f"the answer is not JSON: {error}") from None
    if isinstance(response, dict) and response.get("error"):
        raise RemoteFailure(f"HTTP 200, but an error: {failure_message(body)}")
    chat = request.messages is not None
    path = ("message", "content") if chat else ("text",)
    text = get_path(response, "choices", 0, *path, kind=str)
    reason = get_path(response, "choices", 0, "finish_reason", kind=str)
    if reason not in FINISH_REASONS:
        raise RemoteFailure(f"the answer ended for the reason {reason!r}, not stop or length")
    if request.tokens is not None:
        return TextCompletion(text, FINISH_REASONS[reason])._replace(**_sampled(response, request, reason))
    if not request.top_logprobs:
        return TextCompletion(text, FINISH_REASONS[reason])
    read = _chat_logprobs if chat else _prompt_logprobs
    return TextCompletion(text, FINISH_REASONS[reason], tuple(read(response)))


def _sampled(response: JSON, request: TextRequest, reason: str) -> dict[str, JSON]:
    """The sampled ids with their log-probabilities; `RemoteFailure` if they can't be those."""
    tokens = get_path(response, "choices", 0, "token_ids", kind=list)
    logp = get_path(response, "choices", 0, "logprobs", "token_logprobs", kind=list)
    if not tokens or len(tokens) != len(logp):
        raise RemoteFailure(f"the answer has {len(tokens)} ids and {len(logp)} log-probabilities")
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise RemoteFailure("token_ids of the answer are no ids")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) and value <= 1e-6 for value in logp):
        raise RemoteFailure("token_logprobs of the answer are no log-probabilities")
    if banned := set(tokens) & set(request.banned):
        raise RemoteFailure(f"the answer has the id {min(banned)}, which is never to be sampled")
    if len(tokens) > request.max_tokens:
        raise RemoteFailure(f"the answer has {len(tokens)} tokens, where {request.max_tokens} were asked for")
    if reason == "stop" and not request.stop and request.stop_ids and tokens[-1] not in request.stop_ids:
        raise RemoteFailure("the answer ends without its stop token, which has to be among the ids")
    return {"tokens": tuple(tokens), "logp_sampled": tuple(map(float, logp))}


def _chat_logprobs(response: JSON) -> Iterator[TokenLogprob]:
    for entry in get_path(response, "choices", 0, "logprobs", "content", kind=list):
        top: dict[str, float] = {}
        for alternative in get_path(entry, "top_logprobs", kind=list):
            token = get_path(alternative, "token", kind=str)
            logprob = get_path(alternative, "logprob", kind=float)
            # Tokens of different bytes may print the same: their probabilities add.
            top[token] = float(np.logaddexp(top[token], logprob)) if token in top else logprob
        yield TokenLogprob(get_path(entry, "token", kind=str), get_path(entry, "logprob", kind=float), top)


def _prompt_logprobs(response: JSON) -> Iterator[TokenLogprob]:
    table = get_path(response, "choices", 0, "logprobs", kind=dict)
    for i in range(len(get_path(table, "tokens", kind=list))):
        top = get_path(table, "top_logprobs", i, kind=dict)
        top = {token: get_path(top, token, kind=float) for token in top}
        yield TokenLogprob(
            get_path(table, "tokens", i, kind=str), get_path(table, "token_logprobs", i, kind=float), top
        )


def get_path(value: JSON, *path: str | int, kind: type) -> JSON:
    """The value at `path`, which must exist and be of that kind; a whole number is a float too, NaN is none."""
    name = ".".join(map(str, path))
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise RemoteFailure(f"the answer has no {name}") from None
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value):
        return float(value)
    if kind is float or not isinstance(value, kind):
        raise RemoteFailure(f"{name} of the answer is {json.dumps(value)[:40]}, where a {kind.__name__} is needed")
    return value
