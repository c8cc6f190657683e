"""Requests and responses of the OpenAI API as values, and their JSON; pure functions.

    parse_chat_request(body), parse_text_request(body)   -> ChatRequest; raise HTTPError, one sentence
    chat_body(...), chat_chunks(...)                     JSON of a response of /v1/chat/completions, whole and streamed
    text_body(...), text_chunks(...)                     JSON of a response of /v1/completions, whole and streamed

`responses` has the same functions for /v1/responses.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Literal

from flowgrpo.data.tool_calls import MAX_DEPTH, is_nested_deeper
from flowgrpo.gateway.histories import content_to_text, parse_arguments
from flowgrpo.types import JSON, BadInput

Decode = Callable[[Sequence[int]], str]  # token ids -> text
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_STOPS = 16
MAX_CHOICES = 64
MAX_INT32 = 2**31 - 1  # largest token count and weights version that a request may give
FinishReason = Literal["stop", "length", "tool_calls"]


class HTTPError(Exception):
    """An error response: HTTP status, a machine-readable code, the offending field, and a message of one sentence."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", field: str | None = None):
        super().__init__(message)
        self.status, self.code, self.field = status, code, field

    def body(self) -> dict[str, JSON]:
        """JSON body of the error, in the form of the OpenAI API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request for completions, of chat `messages` or of a text `prompt`.

    A sampling setting that is None is left to the server. `ignored` has the names of options that were requested and
    are not supported.
    """

    model: str | None
    messages: tuple[Mapping[str, JSON], ...] = ()
    tools: tuple[Mapping[str, JSON], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    logprobs: int | None = None  # number of alternatives per token; None: no log-probabilities
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def digest(self) -> bytes:
        """Hash of everything that the response depends on, by which a retry is recognised."""
        fields = (self.messages, self.tools, self.prompt, self.max_tokens, self.stop, self.n)
        return blake2b(repr(fields).encode(errors="surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True)
class ChatResponse:
    """One completion: the text, the tool calls, and the token ids as they were sampled."""

    content: str | None
    finish_reason: FinishReason
    tokens: tuple[int, ...]
    prompt: tuple[int, ...]
    tool_calls: tuple[Mapping[str, JSON], ...] = ()
    logprobs: tuple[float, ...] | None = None
    versions: tuple[int, ...] = ()
    cached_tokens: int = 0  # number of prompt tokens that were in the KV cache
    # For an echoed prompt, per token: (log-probability, log-probabilities of alternatives by id).
    prompt_scores: Sequence[tuple[float | None, Mapping[int, float]]] | None = None
    banned_ids: tuple[int, ...] = ()  # ids that are never sampled; `logprobs` are normalised without them
    banned_mass: Sequence[float | None] = ()  # probability of the banned ids at each position of an echoed prompt

    @property
    def message(self) -> dict[str, JSON]:
        """The response as an assistant message, which later requests send back."""
        message: dict[str, JSON] = {"role": "assistant", "content": self.content}
        return message | ({"tool_calls": [dict(call) for call in self.tool_calls]} if self.tool_calls else {})


# Requests -----------------------------------------------------------------------------------------------


def parse_chat_request(body: Mapping[str, JSON]) -> ChatRequest:
    """Parse the body of a request of /v1/chat/completions."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HTTPError("messages must be a list of at least one message", field="messages")
    parsed_messages = tuple(_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    tools, ignored = select_tools(_parse_tools(body.get("tools")), body.get("tool_choice"))
    top_logprobs = _parse_number(body, "top_logprobs", whole=True, low=0, high=20)
    max_tokens = _parse_number(body, "max_completion_tokens", whole=True, low=1, high=MAX_INT32)
    request = _shared_options(body, max_tokens or _parse_number(body, "max_tokens", whole=True, low=1, high=MAX_INT32))
    return replace(
        request,
        messages=parsed_messages,
        tools=tools,
        logprobs=(top_logprobs or 0) if _parse_flag(body, "logprobs") else None,
        ignored=request.ignored + ignored,
    )


def parse_text_request(body: Mapping[str, JSON]) -> ChatRequest:
    """Parse the body of a request of /v1/completions, whose prompt is a string or a list of token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        if not prompt or not all(type(token) is int and token >= 0 for token in prompt):
            raise HTTPError("prompt must be one string, or the ids of one prompt: send several apart", field="prompt")
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple) or not prompt:
        raise HTTPError("prompt must be a string of at least one character, or a list of ids", field="prompt")
    # max_tokens=0 scores a prompt without sampling.
    max_tokens = _parse_number(body, "max_tokens", whole=True, low=0, high=MAX_INT32)
    request = _shared_options(body, 16 if max_tokens is None else max_tokens)
    logprobs = _parse_number(body, "logprobs", whole=True, low=0, high=20)
    return replace(request, prompt=prompt, logprobs=logprobs, echo=_parse_flag(body, "echo"))


def _shared_options(body: Mapping[str, JSON], max_tokens: int | None) -> ChatRequest:
    """Parse the fields that chat and text requests share."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise HTTPError("model must be a string", field="model")
    options = body.get("stream_options")
    usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
    unsupported = ("presence_penalty", "frequency_penalty", "logit_bias", "min_p", "top_k", "response_format")
    return ChatRequest(
        model=model,
        max_tokens=max_tokens,
        stop=_parse_stop(body.get("stop")),
        n=_parse_number(body, "n", whole=True, low=1, high=MAX_CHOICES) or 1,
        seed=_parse_number(body, "seed", whole=True),
        temperature=_parse_number(body, "temperature", low=0.0, high=2.0),
        top_p=_parse_number(body, "top_p", low=0.0, high=1.0),
        stream=_parse_flag(body, "stream"),
        include_usage=usage,
        return_token_ids=_parse_flag(body, "return_token_ids"),
        ignored=tuple(name for name in unsupported if body.get(name) and body[name] != {"type": "text"}),
    )


def _parse_message(message: JSON, place: str) -> dict[str, JSON]:
    """Check a message and join content that comes in parts; `place` is used in error messages."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise HTTPError(f"{place} must be an object with a role among {', '.join(ROLES)}", field=place)
    try:
        content = content_to_text(message.get("content"), f"{place}.content")
    except BadInput as error:
        raise HTTPError(str(error), field=place) from None
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(_is_tool_call(call) for call in calls):
        raise HTTPError(f"{place}.tool_calls must be a list of calls of functions with a name", field=place)
    if any(is_nested_deeper(parse_arguments(call["function"].get("arguments")), MAX_DEPTH) for call in calls):
        raise HTTPError(f"{place}.tool_calls has arguments nested more than {MAX_DEPTH} deep", field=place)
    if content is None and not calls:
        raise HTTPError(f"{place} has no content: give it a string", field=place)
    parsed: dict[str, JSON] = {"role": message["role"], "content": content}
    parsed |= {"tool_calls": [dict(call) for call in calls]} if calls else {}
    return parsed | {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}


def _is_tool_call(call: JSON) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _parse_tools(tools: JSON) -> tuple[Mapping[str, JSON], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise HTTPError("tools must be a list", field="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise HTTPError(f"tools[{i}] must be a function with a name and a schema of parameters", field="tools")
        if not isinstance(function.get("parameters", {}), Mapping):
            raise HTTPError(f"tools[{i}].function.parameters must be a JSON schema of an object", field="tools")
    return tuple(tools)


def select_tools(tools: tuple[Mapping[str, JSON], ...], choice: JSON) -> tuple[tuple[Mapping[str, JSON], ...], tuple]:
    """Apply `tool_choice` -> (tools that the model is shown, ignored options: it is never forced to call)."""
    if choice in (None, "auto"):
        return tools, ()
    if choice == "none":
        return (), ()
    if choice == "required":
        return tools, ("tool_choice=required",)
    function = choice.get("function", choice) if isinstance(choice, Mapping) else {}
    selected = tuple(tool for tool in tools if tool["function"]["name"] == function.get("name"))
    if not selected:
        raise HTTPError("tool_choice must be auto, none, required, or name one of the tools", field="tool_choice")
    return selected, ("tool_choice of one function",)


def _parse_stop(stop: JSON) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop or ()
    if not isinstance(stops, tuple) or len(stops) > MAX_STOPS or not all(isinstance(x, str) and x for x in stops):
        raise HTTPError(f"stop must be a string, or a list of at most {MAX_STOPS}", field="stop")
    return stops


def _parse_flag(body: Mapping[str, JSON], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise HTTPError(f"{name} must be true or false", field=name)
    return value


def _parse_number(
    body: Mapping[str, JSON], name: str, *, whole: bool = False, low: float = -math.inf, high: float = math.inf
) -> JSON:
    value = body.get(name)
    if value is None:
        return None
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        least = f" of at least {low:g}" if low > -math.inf else ""
        most = f" and at most {high:g}" if high < math.inf else ""
        raise HTTPError(f"{name} must be a {'whole ' if whole else ''}number{least}{most}", field=name)
    return value


# Responses ----------------------------------------------------------------------------------------------


def token_usage(responses: Sequence[ChatResponse]) -> dict[str, JSON]:
    """The `usage` object of the responses to one request."""
    prompt, sampled = len(responses[0].prompt), sum(len(response.tokens) for response in responses)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": responses[0].cached_tokens},
    }


def _head(kind: str, response_id: str, created: int, model: str) -> dict[str, JSON]:
    return {"id": response_id, "object": kind, "created": created, "model": model}


def _token_ids(request: ChatRequest, response: ChatResponse) -> dict[str, JSON]:
    """Token ids of a choice and the weights version of each, if the request has `return_token_ids`."""
    if not request.return_token_ids:
        return {}
    return {"token_ids": list(response.tokens), "versions": list(response.versions)}


def _prompt_token_ids(request: ChatRequest, response: ChatResponse) -> dict[str, JSON]:
    return {"prompt_token_ids": list(response.prompt)} if request.return_token_ids else {}


def chat_body(
    request: ChatRequest,
    responses: Sequence[ChatResponse],
    decode: Decode,
    *,
    response_id: str,
    created: int,
    model: str,
) -> dict[str, JSON]:
    """JSON of the whole response of /v1/chat/completions."""
    choices = [
        {
            "index": i,
            "message": response.message,
            "finish_reason": response.finish_reason,
            "logprobs": _chat_logprobs(request, response, decode),
        }
        | _token_ids(request, response)
        for i, response in enumerate(responses)
    ]
    head = _head("chat.completion", response_id, created, model)
    return head | {"choices": choices, "usage": token_usage(responses)} | _prompt_token_ids(request, responses[0])


def chat_chunks(
    request: ChatRequest,
    responses: Sequence[ChatResponse],
    decode: Decode,
    *,
    response_id: str,
    created: int,
    model: str,
) -> Iterator[dict[str, JSON]]:
    """JSON chunks of the streamed response of /v1/chat/completions."""
    head = _head("chat.completion.chunk", response_id, created, model)

    def chunk(i: int, delta: dict[str, JSON], finish: str | None = None, **more: JSON) -> dict[str, JSON]:
        return head | {"choices": [{"index": i, "delta": delta, "finish_reason": finish, "logprobs": None} | more]}

    for i, response in enumerate(responses):
        yield chunk(i, {"role": "assistant", "content": ""}) | (_prompt_token_ids(request, response) if i == 0 else {})
        if response.content:
            yield chunk(i, {"content": response.content}, logprobs=_chat_logprobs(request, response, decode))
        for index, call in enumerate(response.tool_calls):
            yield chunk(i, {"tool_calls": [{"index": index, **call}]})
        yield chunk(i, {}, response.finish_reason, **_token_ids(request, response))
    if request.include_usage:
        yield head | {"choices": [], "usage": token_usage(responses)}


def _chat_logprobs(request: ChatRequest, response: ChatResponse, decode: Decode) -> dict[str, JSON] | None:
    if request.logprobs is None or response.logprobs is None:
        return None
    content = []
    for token, logprob in zip(response.tokens, response.logprobs, strict=True):
        text = decode([token])
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append(entry | {"top_logprobs": [entry] if request.logprobs else []})
    return _banned_tokens(response, request, len(content)) | {"content": content}


def text_body(
    request: ChatRequest,
    responses: Sequence[ChatResponse],
    decode: Decode,
    *,
    response_id: str,
    created: int,
    model: str,
) -> dict[str, JSON]:
    """JSON of the whole response of /v1/completions."""
    choices = [
        {
            "index": i,
            "text": (decode(response.prompt) if request.echo else "") + (response.content or ""),
            "finish_reason": response.finish_reason,
            "logprobs": _text_logprobs(request, response, decode),
        }
        | _token_ids(request, response)
        for i, response in enumerate(responses)
    ]
    head = _head("text_completion", response_id, created, model)
    return head | {"choices": choices, "usage": token_usage(responses)} | _prompt_token_ids(request, responses[0])


def text_chunks(
    request: ChatRequest,
    responses: Sequence[ChatResponse],
    decode: Decode,
    *,
    response_id: str,
    created: int,
    model: str,
) -> Iterator[dict[str, JSON]]:
    """JSON chunks of the streamed response of /v1/completions."""
    whole = text_body(request, responses, decode, response_id=response_id, created=created, model=model)
    for choice in whole["choices"]:
        yield {**whole, "choices": [choice], "usage": None}
    if request.include_usage:
        yield {**whole, "choices": []}


def _banned_tokens(response: ChatResponse, request: ChatRequest, num_sampled: int) -> dict[str, JSON]:
    """Fields on ids that are never sampled, which other engines don't have; empty if there are none.

    Log-probabilities of sampled tokens are normalised over the ids that may be sampled, those of echoed tokens over
    all ids, as in other engines. They differ by `-log(1 - banned_mass)` at the token's position.
    """
    if not response.banned_ids:
        return {}
    fields: dict[str, JSON] = {"banned_token_ids": list(response.banned_ids)}
    if request.echo and response.prompt_scores:
        fields["banned_mass"] = [*response.banned_mass, *[None] * num_sampled]
    return fields


def _text_logprobs(request: ChatRequest, response: ChatResponse, decode: Decode) -> dict[str, JSON] | None:
    if request.logprobs is None or response.logprobs is None:
        return None
    sampled_scores = [
        (logprob, {token: logprob}) for token, logprob in zip(response.tokens, response.logprobs, strict=True)
    ]
    tokens, scores = list(response.tokens), sampled_scores
    if request.echo and response.prompt_scores is not None:
        tokens, scores = [*response.prompt, *tokens], [*response.prompt_scores, *sampled_scores]
    texts = [decode([token]) for token in tokens]
    offsets = [0, *accumulate(map(len, texts))][: len(texts)]
    return _banned_tokens(response, request, len(sampled_scores)) | {
        "tokens": texts,
        "token_logprobs": [logprob for logprob, _ in scores],
        "top_logprobs": [
            {decode([token]): value for token, value in alternatives.items()} if logprob is not None else None
            for logprob, alternatives in scores
        ],
        "text_offset": offsets,
    }
