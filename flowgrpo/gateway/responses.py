"""Requests and responses of /v1/responses, the subset that agents need; pure functions.

    parse_responses_request(body) -> ChatRequest
    responses_body(request, responses, ...), responses_events(request, responses, ...)     JSON, whole and streamed

The server stores no response: a client sends the whole input each time, as with `store` false.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from flowgrpo.gateway.wire import ChatRequest, ChatResponse, Decode, HTTPError, parse_chat_request, token_usage
from flowgrpo.types import JSON

COPIED_FIELDS = ("model", "stream", "temperature", "top_p", "seed", "stop", "return_token_ids")
SKIPPED_ITEMS = ("reasoning", "item_reference")


def parse_responses_request(body: Mapping[str, JSON]) -> ChatRequest:
    """Parse the body of a request of /v1/responses, by translating it to one of /v1/chat/completions."""
    if body.get("previous_response_id") is not None:
        raise HTTPError("no response is kept here: send the whole input", field="previous_response_id")
    input_value = body.get("input")
    items = [{"role": "user", "content": input_value}] if isinstance(input_value, str) else input_value
    if not isinstance(items, list) or not items:
        raise HTTPError("input must be a string, or a list of at least one item", field="input")
    messages: list[dict[str, JSON]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for i, item in enumerate(items):
        _append_item(messages, item, f"input[{i}]")
    choice = body.get("tool_choice")
    request = parse_chat_request(
        {name: body[name] for name in COPIED_FIELDS if name in body}
        | {"messages": messages, "tools": _chat_tools(body.get("tools"))}
        | ({"tool_choice": choice} if choice is not None else {})
        | {"max_tokens": body.get("max_output_tokens")}
    )
    return replace(request, include_usage=True)


def _append_item(messages: list[dict[str, JSON]], item: JSON, place: str) -> None:
    """Append an input item to the messages; consecutive function calls become one assistant message."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        assert isinstance(item, Mapping)
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind not in SKIPPED_ITEMS:
        raise HTTPError(f"{place} is of the type {kind!r}, which is none that this model reads", field=place)


def _chat_tools(tools: JSON) -> list[dict[str, JSON]] | None:
    """Tools in the form of /v1/chat/completions."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise HTTPError("tools must be a list of functions", field="tools")
    if other := next((tool for tool in tools if tool.get("type") != "function"), None):
        raise HTTPError(f"a tool of the type {other.get('type')!r} can't be had here: give functions", field="tools")
    names = ("name", "description", "parameters")
    return [{"type": "function", "function": {x: tool[x] for x in names if tool.get(x) is not None}} for tool in tools]


def responses_body(
    request: ChatRequest,
    responses: Sequence[ChatResponse],
    decode: Decode,
    *,
    response_id: str,
    created: int,
    model: str,
) -> dict[str, JSON]:
    """JSON of the whole response."""
    response, usage = responses[0], token_usage(responses)
    # If the agent sets no limit, a response that our own limit truncated is reported as completed: the agent would take
    # an incomplete one for a failure, and a policy that writes too much would escape its reward.
    is_truncated = response.finish_reason == "length" and request.max_tokens is not None
    head = _head(response_id, created, model, "incomplete" if is_truncated else "completed")
    return head | {
        "output": _items(request, response, response_id),
        "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _head(response_id: str, created: int, model: str, status: str) -> dict[str, JSON]:
    return {
        "id": f"resp_{response_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
        "usage": None,
    }


def _items(request: ChatRequest, response: ChatResponse, response_id: str) -> list[dict[str, JSON]]:
    """Output items: the message, if there is one, and each function call."""
    items: list[dict[str, JSON]] = []
    if response.content is not None:
        text = {"type": "output_text", "text": response.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
        items.append({"id": f"msg_{response_id}"} | message)
    for i, call in enumerate(response.tool_calls):
        items.append(
            {
                "id": f"fc_{response_id}_{i}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    if request.return_token_ids and items:
        items[0] |= {"token_ids": list(response.tokens), "prompt_token_ids": list(response.prompt)}
    return items


def responses_events(
    request: ChatRequest,
    responses: Sequence[ChatResponse],
    decode: Decode,
    *,
    response_id: str,
    created: int,
    model: str,
) -> Iterator[dict[str, JSON]]:
    """Events of the streamed response."""
    whole = responses_body(request, responses, decode, response_id=response_id, created=created, model=model)
    in_progress = _head(response_id, created, model, "in_progress")
    sequence_numbers = count()

    def event(kind: str, **fields: JSON) -> dict[str, JSON]:
        return {"type": f"response.{kind}", "sequence_number": next(sequence_numbers), **fields}

    yield event("created", response=in_progress)
    yield event("in_progress", response=in_progress)
    for i, item in enumerate(whole["output"]):
        position: dict[str, JSON] = {"output_index": i, "item_id": item["id"]}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield event("output_item.added", output_index=i, item={**item, "status": "in_progress", **empty})
        if item["type"] == "message":
            part, position = item["content"][0], position | {"content_index": 0}
            yield event("content_part.added", **position, part={**part, "text": ""})
            yield event("output_text.delta", **position, delta=part["text"], logprobs=[])
            yield event("output_text.done", **position, text=part["text"], logprobs=[])
            yield event("content_part.done", **position, part=part)
        else:
            yield event("function_call_arguments.delta", **position, delta=item["arguments"])
            yield event("function_call_arguments.done", **position, arguments=item["arguments"], name=item["name"])
        yield event("output_item.done", output_index=i, item=item)
    yield event("completed" if whole["status"] == "completed" else "incomplete", response=whole)
