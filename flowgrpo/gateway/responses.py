"""Requests and answers of /v1/responses, as far as agents need them; pure.

    request_of(body) -> Asked;   body_of(asked, answers, ...), events_of(asked, answers, ...)

The server keeps no response: a client sends the whole input each time, as it does with `store` false.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowgrpo.gateway.wire import Answer, Asked, Refusal, Spell, chat_request, usage_of

COPIED = ("model", "stream", "temperature", "top_p", "seed", "stop", "return_token_ids")
SKIPPED = ("reasoning", "item_reference")


def request_of(body: Mapping[str, Any]) -> Asked:
    """A request of /v1/responses as that for a chat."""
    if body.get("previous_response_id") is not None:
        raise Refusal("no response is kept here: send the whole input", field="previous_response_id")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise Refusal("input must be a string, or a list of at least one item", field="input")
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for i, item in enumerate(items):
        _take(messages, item, f"input[{i}]")
    choice = body.get("tool_choice")
    asked = chat_request(
        {name: body[name] for name in COPIED if name in body}
        | {"messages": messages, "tools": _tools(body.get("tools"))}
        | ({"tool_choice": choice} if choice is not None else {})
        | {"max_tokens": body.get("max_output_tokens")}
    )
    return replace(asked, include_usage=True)


def _take(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Add an item of the input to the messages; calls of one answer are one message."""
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
    elif kind not in SKIPPED:
        raise Refusal(f"{where} is of the type {kind!r}, which is none that this model reads", field=where)


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as a chat has them."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Refusal("tools must be a list of functions", field="tools")
    if other := next((tool for tool in tools if tool.get("type") != "function"), None):
        raise Refusal(f"a tool of the type {other.get('type')!r} can't be had here: give functions", field="tools")
    names = ("name", "description", "parameters")
    return [{"type": "function", "function": {x: tool[x] for x in names if tool.get(x) is not None}} for tool in tools]


def body_of(
    asked: Asked, answers: Sequence[Answer], spell: Spell, *, identity: str, created: int, model: str
) -> dict[str, Any]:
    """The whole answer."""
    answer, usage = answers[0], usage_of(answers)
    # Where an agent sets no limit, an answer that is cut at ours is whole for it: it would take another for a failure,
    # and a policy that says too much would get away without a verdict.
    cut = answer.finish_reason == "length" and asked.max_tokens is not None
    head = _head(identity, created, model, "incomplete" if cut else "completed")
    return head | {
        "output": _items(asked, answer, identity),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _head(identity: str, created: int, model: str, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{identity}",
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


def _items(asked: Asked, answer: Answer, identity: str) -> list[dict[str, Any]]:
    """List what was said and called, an item each."""
    items: list[dict[str, Any]] = []
    if answer.content is not None:
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
        items.append({"id": f"msg_{identity}"} | message)
    for i, call in enumerate(answer.tool_calls):
        items.append(
            {
                "id": f"fc_{identity}_{i}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    if asked.return_token_ids and items:
        items[0] |= {"token_ids": list(answer.tokens), "prompt_token_ids": list(answer.prompt)}
    return items


def events_of(
    asked: Asked, answers: Sequence[Answer], spell: Spell, *, identity: str, created: int, model: str
) -> Iterator[dict[str, Any]]:
    """The answer as events."""
    whole = body_of(asked, answers, spell, identity=identity, created=created, model=model)
    begun = _head(identity, created, model, "in_progress")
    number = iter(range(1_000_000))

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(number), **fields}

    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for i, item in enumerate(whole["output"]):
        place: dict[str, Any] = {"output_index": i, "item_id": item["id"]}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield event("output_item.added", output_index=i, item={**item, "status": "in_progress", **empty})
        if item["type"] == "message":
            part, place = item["content"][0], place | {"content_index": 0}
            yield event("content_part.added", **place, part={**part, "text": ""})
            yield event("output_text.delta", **place, delta=part["text"], logprobs=[])
            yield event("output_text.done", **place, text=part["text"], logprobs=[])
            yield event("content_part.done", **place, part=part)
        else:
            yield event("function_call_arguments.delta", **place, delta=item["arguments"])
            yield event("function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"])
        yield event("output_item.done", output_index=i, item=item)
    yield event("completed" if whole["status"] == "completed" else "incomplete", response=whole)
