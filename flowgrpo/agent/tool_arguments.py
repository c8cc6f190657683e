"""Tools as prompts describe them, and the arguments of a call as they are parsed and remembered.

describe_tool(schema)                    -> 'search(query: string, k?: integer) - "what it does"'
to_arguments(schema, "12 + 7")           -> {"expression": "12 + 7"}: a planner's context as arguments
to_command({"expression": "12 + 7"})     -> "12 + 7": arguments as memory has them
"""

import json
import re
from collections.abc import Mapping

from flowgrpo.agent.state import ANSWER, Malformed
from flowgrpo.data.tokenizer import clean, strict_json, to_json_line
from flowgrpo.types import JSON

Schema = Mapping[str, JSON]
PLAIN = re.compile(r"[\w.-]+")  # names that are written without quotes
ANSWER_SCHEMA: Schema = {
    "name": ANSWER,
    "description": "Give the answer and end.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


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
