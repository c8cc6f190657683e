"""Parse the tool calls in a model's text, in the format that its chat template teaches.

    tool_call_format(template)               the format of a template; None if it has no place for tools
    parse_tool_calls(text, call_format)      (content, calls, whether a malformed call was found)

A malformed call stays in the content as it was written: the agent sees it and may respond, and it is counted as an
error of the action (A4).
"""

import json
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from flowgrpo.data.tokenizer import strict_json
from flowgrpo.gateway.histories import MAX_DEPTH, is_nested_deeper
from flowgrpo.types import JSON

ToolCallFormat = Literal["tags", "bracket", "object"]
TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
BRACKET = "[TOOL_CALLS]"
PYTHON_TAG = "<|python_tag|>"


class ToolCall(NamedTuple):
    """A tool call that a model wrote."""

    name: str
    arguments: Mapping[str, JSON]


class ParsedText(NamedTuple):
    """A model's text, split into content and tool calls."""

    content: str
    calls: tuple[ToolCall, ...]
    is_malformed: bool  # a call was started that can't be parsed


def tool_call_format(template: str | None) -> ToolCallFormat | None:
    """The format in which a chat template writes tool calls; None if it has no place for tools.

    tags      <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one after the other (Hermes, Qwen)
    bracket   [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]                         (Mistral)
    object    {"name": ..., "parameters": {...}} and nothing else                           (Llama 3)
    """
    if not template or not re.search(r"\btools\b", template):
        return None
    if BRACKET in template:
        return "bracket"
    return "object" if "parameters" in template and "<tool_call>" not in template else "tags"


def parse_tool_calls(text: str, call_format: ToolCallFormat) -> ParsedText:
    """Split a model's text into content and tool calls; `text` has the special tokens spelled out."""
    if call_format == "tags":
        content = TAGGED.sub("", text).strip() if "<tool_call>" in text else text
        blocks = TAGGED.findall(text)
    elif call_format == "bracket":
        before, separator, after = text.partition(BRACKET)
        content, blocks = (before.strip(), [after]) if separator else (text, [])
    else:
        bare = text.strip().removeprefix(PYTHON_TAG).strip()
        content, blocks = ("", [bare]) if bare.startswith("{") and '"name"' in bare else (text, [])
    calls = []
    for block in blocks:
        try:
            value = strict_json(block)
        except (ValueError, RecursionError):
            return ParsedText(text, (), True)
        for item in value if isinstance(value, list) else [value]:
            call = _to_tool_call(item)
            if call is None:
                return ParsedText(text, (), True)
            calls.append(call)
    return ParsedText(content, tuple(calls), False)


def _to_tool_call(value: JSON) -> ToolCall | None:
    """The tool call that a JSON value describes; None if it is malformed."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = strict_json(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict) or is_nested_deeper(arguments, MAX_DEPTH):  # no request could send it back
        return None
    return ToolCall(value["name"], arguments)


def to_openai(call: ToolCall, call_id: str) -> dict[str, JSON]:
    """The call in the form of the OpenAI API."""
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
