"""Tools in prompts, and the tool calls in a model's text.

    tool_call_format(template)               the format that a chat template teaches; None if it has no place for tools
    parse_tool_calls(text, call_format)      (content, calls, whether a malformed call was found)
    split_call('look("x")', {"look"})        ("look", "x"): a call as code writes it, for templates that teach none

    describe_tool(schema)                    'search(query: string, k?: integer) - "what it does"'
    to_arguments(schema, "12 + 7")           {"expression": "12 + 7"}: the text of such a call as arguments
    to_command({"expression": "12 + 7"})     "12 + 7": arguments as memory has them

A malformed call stays in the content as it was written: the agent sees it and may respond, and it is counted as an
error of the action (A4).
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from flowgrpo.data.tokenizer import clean, strict_json, to_json_line
from flowgrpo.types import JSON

Schema = Mapping[str, JSON]
ToolCallFormat = Literal["tags", "bracket", "object"]
MAX_DEPTH = 64  # nesting allowed in a request, and in the arguments of a tool call
TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
BRACKET = "[TOOL_CALLS]"
PYTHON_TAG = "<|python_tag|>"
CALL = re.compile(r"\s*([\w./-]+)\s*\((.*)\)\s*", re.DOTALL)
OPENED_CALL = re.compile(r"([\w./-]+)\(")  # that may not be closed
CALL_START = re.compile(r"(?<![\w./-])([\w./-]+)\s*\(")  # within a text
PLAIN = re.compile(r"[\w.-]+")  # names that are written without quotes


class ToolCall(NamedTuple):
    """A tool call that a model wrote."""

    name: str
    arguments: Mapping[str, JSON]


class ParsedText(NamedTuple):
    """A model's text, split into content and tool calls."""

    content: str
    calls: tuple[ToolCall, ...]
    is_malformed: bool  # a call was started that can't be parsed


class Malformed(NamedTuple):
    """Replaces the value of a text that could not be parsed, with the reason."""

    reason: str


# Calls in the format of a chat template -----------------------------------------------------------------


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


def is_nested_deeper(value: JSON, depth: int) -> bool:
    """Whether objects and lists are nested in a value more than `depth` levels deep."""
    level = [value]
    for _ in range(depth + 1):
        level = [
            item
            for container in level
            if isinstance(container, Mapping | list | tuple)
            for item in (container.values() if isinstance(container, Mapping) else container)
        ]
        if not level:
            return False
    return any(isinstance(item, Mapping | list | tuple) for item in level)


# Calls as code writes them ------------------------------------------------------------------------------


def write_call(schema: Schema, context: str) -> str:
    """A call, `name(context)`; a context that would be parsed as another is in double quotes."""
    is_plain = context == _unquoted(context.strip()) and not _further_calls(context)
    return f"{schema['name']}({context if is_plain else to_json_line(context)})"


def split_call(text: str, names: Collection[str]) -> tuple[str, str] | Malformed:
    """(name, context) of a text that is one `name(context)`; a context in double quotes is the text between them.

    `names` are those of the tools, case-folded: of these a text has one call only.
    """
    match = CALL.fullmatch(strip_thoughts(text))
    if match is None:
        return Malformed("the action is not one call, name(text)")
    written = match[2].strip()
    context = _unquoted(written)
    if context is written and any(name.casefold() in names for name in _further_calls(written)):
        return Malformed("the action has more than one call: write one, name(text)")
    return match[1], context


def parse_code_call(text: str, schemas: Sequence[Schema]) -> tuple[ToolCall, ...] | Malformed:
    """The call of one of these tools that a text is; none if it is no call of a tool."""
    by_name = {schema["name"].casefold(): schema for schema in schemas}
    action = strip_thoughts(text).strip()
    match = CALL.fullmatch(action) or OPENED_CALL.match(action)
    schema = None if match is None else by_name.get(match[1].casefold())
    if schema is None:
        return ()
    call = split_call(text, by_name)
    arguments = call if isinstance(call, Malformed) else to_arguments(schema, call[1])
    return arguments if isinstance(arguments, Malformed) else (ToolCall(schema["name"], arguments),)


def _further_calls(context: str) -> list[str]:
    """The names that are called in a context after a parenthesis that closes none of its own."""
    depth = 0
    for index, letter in enumerate(context):
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return [match[1] for match in CALL_START.finditer(context, index)]
    return []


def _unquoted(context: str) -> str:
    """The value of a context that is a JSON string; other contexts unchanged."""
    if not (len(context) > 1 and context[0] == context[-1] == '"'):
        return context
    try:
        value = strict_json(context)
    except ValueError:
        return context
    return value if isinstance(value, str) else context


def strip_thoughts(text: str) -> str:
    """The text after the thoughts; "" if the thoughts have no end."""
    _, end, after = text.rpartition("</think>")
    return "" if "<think>" in after else after if end else text


# Descriptions of tools --------------------------------------------------------------------------------


def signature(schema: Schema) -> str:
    """`search(query, k?)`: a tool in a few tokens."""
    return f"{schema['name']}({', '.join(name + mark for name, mark, _ in _written_parameters(schema))})"


def describe_tool(schema: Schema) -> str:
    """`search(query: string, k?: integer) - "what it does"`: a tool in a line."""
    parameters = [name + mark + (f": {kind}" if kind else "") for name, mark, kind in _written_parameters(schema)]
    description = " ".join(str(schema.get("description", "")).split())
    return f"{schema['name']}({', '.join(parameters)})" + (f" - {to_json_line(description)}" if description else "")


def _written_parameters(schema: Schema) -> list[tuple[str, str, str]]:
    """(name, "?" if it is optional, type) of each parameter; a name that is no plain word is written as JSON."""

    def write(name: str) -> str:
        return name if PLAIN.fullmatch(name) else to_json_line(name)

    kinds, required = parameters_of(schema)
    return [(write(name), "" if name in required else "?", "|".join(map(write, kind))) for name, kind in kinds.items()]


def parameters_of(schema: Schema) -> tuple[dict[str, list[str]], list[str]]:
    """The types of each parameter of a tool, and the names of the required ones."""
    parameters = schema.get("parameters") or {}
    kinds = {}
    for name, definition in (parameters.get("properties") or {}).items():
        kind = definition.get("type", []) if isinstance(definition, Mapping) else []  # JSON Schema also has `true`
        kinds[name] = [kind] if isinstance(kind, str) else list(kind)
    return kinds, list(parameters.get("required") or ())


# Arguments --------------------------------------------------------------------------------------------


def to_arguments(schema: Schema, context: str) -> dict[str, JSON] | Malformed:
    """The planner's context as arguments of a tool: a JSON object, or plain text if the tool takes one text."""
    if (arguments := parse_object(context)) is not None:
        return arguments
    kinds, required = parameters_of(schema)
    if not context.strip() and not required:
        return {}
    names = required or list(kinds)
    if len(names) == 1 and "string" in kinds.get(names[0], ()):
        return {names[0]: context} if context.strip() else Malformed(f"the context is empty; {names[0]} is needed")
    return Malformed(f"the context must be a JSON object of {', '.join(kinds) or 'no arguments':.1000}")


def parse_object(text: str) -> dict[str, JSON] | None:
    """The JSON object that `text` is, or None."""
    try:
        value = strict_json(text)
        return _clean_copy(value, allow_nan=False) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def _clean_copy(arguments: dict[str, JSON], *, allow_nan: bool = True) -> dict[str, JSON]:
    """A copy of arguments with valid Unicode only."""
    return json.loads(clean(json.dumps(arguments, ensure_ascii=False, allow_nan=allow_nan)))


def to_command(arguments: Schema) -> str | dict[str, JSON]:
    """Arguments as they are remembered: the text if there is one only, or a copy of all."""
    copy = _clean_copy(dict(arguments))
    (value, *others) = copy.values() or [None]
    return value if isinstance(value, str) and not others else copy
