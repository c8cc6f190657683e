"""Find the tool calls in what a model wrote, in the form that its chat template teaches.

    form_of(template)                which form a template has; None where it has no place for tools
    parse_calls(words, form)         (content, calls, whether a call was begun that can't be read)

A call that can't be read stays in the content as it was written: the agent sees it and answers, and it is counted as an
error of the action (A4).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from flowgrpo.data.tokenizer import strict_json
from flowgrpo.gateway.histories import MAX_DEPTH, is_deeper

Form = Literal["tags", "bracket", "object"]
TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
BRACKET = "[TOOL_CALLS]"
PYTHON_TAG = "<|python_tag|>"


class ToolCall(NamedTuple):
    """A call that a model wrote."""

    name: str
    arguments: Mapping[str, Any]


class Parsed(NamedTuple):
    """Words of a model, taken apart."""

    content: str
    calls: tuple[ToolCall, ...]
    broken: bool  # a call was begun that can't be read


def form_of(template: str | None) -> Form | None:
    """Name the form in which a chat template has tools called; None where it has no place for tools.

    tags      <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one after the other (Hermes, Qwen)
    bracket   [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]                         (Mistral)
    object    {"name": ..., "parameters": {...}} and nothing else                           (Llama 3)
    """
    if not template or not re.search(r"\btools\b", template):
        return None
    if BRACKET in template:
        return "bracket"
    return "object" if "parameters" in template and "<tool_call>" not in template else "tags"


def parse_calls(words: str, form: Form) -> Parsed:
    """The content and the calls of what was written; special tokens that a decoder spells out are part of the form."""
    content, written = _apart(words, form)
    calls = [call for text in written for call in _calls_in(text)]
    if None in calls:
        return Parsed(words, (), True)
    return Parsed(content, tuple(call for call in calls if call is not None), False)


def _apart(words: str, form: Form) -> tuple[str, list[str]]:
    """Split words into what is said, and the pieces of text that are calls."""
    if form == "tags":
        return TAGGED.sub("", words).strip() if "<tool_call>" in words else words, TAGGED.findall(words)
    if form == "bracket":
        said, found, written = words.partition(BRACKET)
        return said.strip() if found else words, [written] if found else []
    bare = words.strip().removeprefix(PYTHON_TAG).strip()
    return ("", [bare]) if bare.startswith("{") and '"name"' in bare else (words, [])


def _calls_in(text: str) -> Iterator[ToolCall | None]:
    """The calls that a piece of text holds, of which None can't be read."""
    try:
        found = strict_json(text)
    except (ValueError, RecursionError):
        found = [None]
    for one in found if isinstance(found, list) else [found]:
        yield _call(one)


def _call(found: Any) -> ToolCall | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = strict_json(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict) or is_deeper(arguments, MAX_DEPTH):  # which no request could hand back
        return None
    return ToolCall(found["name"], arguments)


def as_openai(call: ToolCall, identity: str) -> dict[str, Any]:
    """The call as a client of the OpenAI API reads it."""
    written = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": written}}
