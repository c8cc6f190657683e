"""Requests and answers of the OpenAI API as values, from and to JSON; pure.

    chat_request(body), text_request(body)   -> Asked, or a Refusal of one sentence
    chat_body(...), chat_chunks(...)         an answer of /v1/chat/completions, whole and streamed
    text_body(...), text_chunks(...)         of /v1/completions

`responses` has those of /v1/responses.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal

from flowgrpo.gateway.histories import MAX_DEPTH, is_deeper, readable_arguments, text_of_content
from flowgrpo.types import BadInput

Spell = Callable[[Sequence[int]], str]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_STOPS = 16
MAX_CHOICES = 64
LARGEST = 2**31 - 1  # of numbers of tokens
FinishReason = Literal["stop", "length", "tool_calls"]


class Refusal(Exception):
    """A request that is not answered: the status of HTTP, a code that programs read, and one sentence."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", field: str | None = None):
        super().__init__(message)
        self.status, self.code, self.field = status, code, field

    def body(self) -> dict[str, Any]:
        """The answer, as clients of the OpenAI API read errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request for completions: of messages, or of a prompt.

    Sampling that is None is the server's own; `ignored` names what was asked for and can't be had.
    """

    model: str | None
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    logprobs: int | None = None  # alternatives for each token; None: no log-probabilities
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def identity(self) -> bytes:
        """A digest of all that an answer depends on."""
        fields = (self.messages, self.tools, self.prompt, self.max_tokens, self.stop, self.n)
        return blake2b(repr(fields).encode(errors="surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A completion: what was said, and the ids behind it, as they were sampled."""

    content: str | None
    finish_reason: FinishReason
    tokens: tuple[int, ...]
    prompt: tuple[int, ...]
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    logprobs: tuple[float, ...] | None = None
    version: tuple[int, ...] = ()
    reused: int = 0  # tokens of the prompt whose cache was found
    scored: Sequence[tuple[float | None, Mapping[int, float]]] | None = None  # of an echoed prompt, by token
    banned: tuple[int, ...] = ()  # ids that sampling leaves out: what is sampled is scored without them
    banned_mass: Sequence[float | None] = ()  # their probability in the place of each token of an echoed prompt

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, which later requests hand back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        return message | ({"tool_calls": [dict(call) for call in self.tool_calls]} if self.tool_calls else {})


# Requests -----------------------------------------------------------------------------------------------


def chat_request(body: Mapping[str, Any]) -> Asked:
    """A request of /v1/chat/completions."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages must be a list of at least one message", field="messages")
    read = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    tools, ignored = chosen_tools(_tools(body.get("tools")), body.get("tool_choice"))
    top = _number(body, "top_logprobs", whole=True, low=0, high=20)
    most = _number(body, "max_completion_tokens", whole=True, low=1, high=LARGEST)
    asked = _common(body, most or _number(body, "max_tokens", whole=True, low=1, high=LARGEST))
    return replace(
        asked,
        messages=read,
        tools=tools,
        logprobs=(top or 0) if _flag(body, "logprobs") else None,
        ignored=asked.ignored + ignored,
    )


def text_request(body: Mapping[str, Any]) -> Asked:
    """A request of /v1/completions: a prompt is a string, or the ids of one."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        if not prompt or not all(type(token) is int and token >= 0 for token in prompt):
            raise Refusal("prompt must be one string, or the ids of one prompt: send several apart", field="prompt")
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple) or not prompt:
        raise Refusal("prompt must be a string of at least one character, or a list of ids", field="prompt")
    # A prompt that is only to be scored asks for no token.
    most = _number(body, "max_tokens", whole=True, low=0, high=LARGEST)
    asked = _common(body, 16 if most is None else most)
    top = _number(body, "logprobs", whole=True, low=0, high=20)
    return replace(asked, prompt=prompt, logprobs=top, echo=_flag(body, "echo"))


def _common(body: Mapping[str, Any], most: int | None) -> Asked:
    """Read what requests of both kinds have."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise Refusal("model must be a string", field="model")
    options = body.get("stream_options")
    usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
    bent = ("presence_penalty", "frequency_penalty", "logit_bias", "min_p", "top_k", "response_format")
    return Asked(
        model=model,
        max_tokens=most,
        stop=_stops(body.get("stop")),
        n=_number(body, "n", whole=True, low=1, high=MAX_CHOICES) or 1,
        seed=_number(body, "seed", whole=True),
        temperature=_number(body, "temperature", low=0.0, high=2.0),
        top_p=_number(body, "top_p", low=0.0, high=1.0),
        stream=_flag(body, "stream"),
        include_usage=usage,
        return_token_ids=_flag(body, "return_token_ids"),
        ignored=tuple(name for name in bent if body.get(name) and body[name] != {"type": "text"}),
    )


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message with its fields checked; content in parts becomes one string."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise Refusal(f"{where} must be an object with a role among {', '.join(ROLES)}", field=where)
    try:
        content = text_of_content(message.get("content"), f"{where}.content")
    except BadInput as error:
        raise Refusal(str(error), field=where) from None
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise Refusal(f"{where}.tool_calls must be a list of calls of functions with a name", field=where)
    if any(is_deeper(readable_arguments(call["function"].get("arguments")), MAX_DEPTH) for call in calls):
        raise Refusal(f"{where}.tool_calls has arguments nested more than {MAX_DEPTH} deep", field=where)
    if content is None and not calls:
        raise Refusal(f"{where} has no content: give it a string", field=where)
    found: dict[str, Any] = {"role": message["role"], "content": content}
    found |= {"tool_calls": [dict(call) for call in calls]} if calls else {}
    return found | {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise Refusal("tools must be a list", field="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refusal(f"tools[{i}] must be a function with a name and a schema of parameters", field="tools")
        if not isinstance(function.get("parameters", {}), Mapping):
            raise Refusal(f"tools[{i}].function.parameters must be a JSON schema of an object", field="tools")
    return tuple(tools)


def chosen_tools(tools: tuple[Mapping[str, Any], ...], choice: Any) -> tuple[tuple[Mapping[str, Any], ...], tuple]:
    """The tools that the model is shown, and what of the choice can't be had: that it must call one."""
    if choice in (None, "auto"):
        return tools, ()
    if choice == "none":
        return (), ()
    if choice == "required":
        return tools, ("tool_choice=required",)
    function = choice.get("function", choice) if isinstance(choice, Mapping) else {}
    named = tuple(tool for tool in tools if tool["function"]["name"] == function.get("name"))
    if not named:
        raise Refusal("tool_choice must be auto, none, required, or name one of the tools", field="tool_choice")
    return named, ("tool_choice of one function",)


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop or ()
    if not isinstance(stops, tuple) or len(stops) > MAX_STOPS or not all(isinstance(x, str) and x for x in stops):
        raise Refusal(f"stop must be a string, or a list of at most {MAX_STOPS}", field="stop")
    return stops


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise Refusal(f"{name} must be true or false", field=name)
    return value


def _number(
    body: Mapping[str, Any], name: str, *, whole: bool = False, low: float = -math.inf, high: float = math.inf
) -> Any:
    value = body.get(name)
    if value is None:
        return None
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        least = f" of at least {low:g}" if low > -math.inf else ""
        most = f" and at most {high:g}" if high < math.inf else ""
        raise Refusal(f"{name} must be a {'whole ' if whole else ''}number{least}{most}", field=name)
    return value


# Answers ------------------------------------------------------------------------------------------------


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Count the tokens of answers to one request."""
    prompt, sampled = len(answers[0].prompt), sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].reused},
    }


def _head(kind: str, identity: str, created: int, model: str) -> dict[str, Any]:
    return {"id": identity, "object": kind, "created": created, "model": model}


def _ids(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The ids behind a choice, with the version of the weights that chose each, where they are asked for."""
    if not asked.return_token_ids:
        return {}
    return {"token_ids": list(answer.tokens), "versions": list(answer.version)}


def _prompt_ids(asked: Asked, answer: Answer) -> dict[str, Any]:
    return {"prompt_token_ids": list(answer.prompt)} if asked.return_token_ids else {}


def chat_body(
    asked: Asked, answers: Sequence[Answer], spell: Spell, *, identity: str, created: int, model: str
) -> dict[str, Any]:
    """The whole answer of /v1/chat/completions."""
    choices = [
        {
            "index": i,
            "message": answer.message,
            "finish_reason": answer.finish_reason,
            "logprobs": _chat_logprobs(asked, answer, spell),
        }
        | _ids(asked, answer)
        for i, answer in enumerate(answers)
    ]
    head = _head("chat.completion", identity, created, model)
    return head | {"choices": choices, "usage": usage_of(answers)} | _prompt_ids(asked, answers[0])


def chat_chunks(
    asked: Asked, answers: Sequence[Answer], spell: Spell, *, identity: str, created: int, model: str
) -> Iterator[dict[str, Any]]:
    """The answer of /v1/chat/completions in pieces."""
    head = _head("chat.completion.chunk", identity, created, model)

    def chunk(i: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        return head | {"choices": [{"index": i, "delta": delta, "finish_reason": finish, "logprobs": None} | more]}

    for i, answer in enumerate(answers):
        yield chunk(i, {"role": "assistant", "content": ""}) | (_prompt_ids(asked, answer) if i == 0 else {})
        if answer.content:
            yield chunk(i, {"content": answer.content}, logprobs=_chat_logprobs(asked, answer, spell))
        for index, call in enumerate(answer.tool_calls):
            yield chunk(i, {"tool_calls": [{"index": index, **call}]})
        yield chunk(i, {}, answer.finish_reason, **_ids(asked, answer))
    if asked.include_usage:
        yield head | {"choices": [], "usage": usage_of(answers)}


def _chat_logprobs(asked: Asked, answer: Answer, spell: Spell) -> dict[str, Any] | None:
    if asked.logprobs is None or answer.logprobs is None:
        return None
    content = []
    for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
        text = spell([token])
        own = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append(own | {"top_logprobs": [own] if asked.logprobs else []})
    return _banned(answer, asked, len(content)) | {"content": content}


def text_body(
    asked: Asked, answers: Sequence[Answer], spell: Spell, *, identity: str, created: int, model: str
) -> dict[str, Any]:
    """The whole answer of /v1/completions."""
    choices = [
        {
            "index": i,
            "text": (spell(answer.prompt) if asked.echo else "") + (answer.content or ""),
            "finish_reason": answer.finish_reason,
            "logprobs": _text_logprobs(asked, answer, spell),
        }
        | _ids(asked, answer)
        for i, answer in enumerate(answers)
    ]
    head = _head("text_completion", identity, created, model)
    return head | {"choices": choices, "usage": usage_of(answers)} | _prompt_ids(asked, answers[0])


def text_chunks(
    asked: Asked, answers: Sequence[Answer], spell: Spell, *, identity: str, created: int, model: str
) -> Iterator[dict[str, Any]]:
    """The answer of /v1/completions in pieces."""
    whole = text_body(asked, answers, spell, identity=identity, created=created, model=model)
    for choice in whole["choices"]:
        yield {**whole, "choices": [choice], "usage": None}
    if asked.include_usage:
        yield {**whole, "choices": []}


def _banned(answer: Answer, asked: Asked, sampled: int) -> dict[str, Any]:
    """What log-probabilities of sampled tokens leave out, which those of other engines don't; empty where nothing is.

    A sampled token is scored among the ids that may be sampled, an echoed one among all, as other engines do. Their
    difference is `-log(1 - banned_mass)` of the token's place.
    """
    if not answer.banned:
        return {}
    echoed = {"banned_mass": [*answer.banned_mass, *[None] * sampled]} if asked.echo and answer.scored else {}
    return {"banned_token_ids": list(answer.banned)} | echoed


def _text_logprobs(asked: Asked, answer: Answer, spell: Spell) -> dict[str, Any] | None:
    if asked.logprobs is None or answer.logprobs is None:
        return None
    own = [(logprob, {token: logprob}) for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)]
    tokens, scored = list(answer.tokens), own
    if asked.echo and answer.scored is not None:
        tokens, scored = [*answer.prompt, *tokens], [*answer.scored, *own]
    texts = [spell([token]) for token in tokens]
    offsets = [0, *accumulate(map(len, texts))][: len(texts)]
    return _banned(answer, asked, len(own)) | {
        "tokens": texts,
        "token_logprobs": [logprob for logprob, _ in scored],
        "top_logprobs": [
            {spell([token]): value for token, value in top.items()} if logprob is not None else None
            for logprob, top in scored
        ],
        "text_offset": offsets,
    }
