"""Tools as an agent's prompts show them, and the arguments of a call as they are read and remembered.

describe_tool(schema) -> 'search(query: string, k?: integer) - "what it does"'
arguments_of(schema, "12 + 7") -> {"expression": "12 + 7"}: a planner's context as arguments
command_of({"expression": "12 + 7"}) -> "12 + 7": arguments as memory has them
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from flowgrpo.agent.state import ANSWER, Malformed
from flowgrpo.data.tokenizer import as_json, clean, strict_json

Schema = Mapping[str, Any]
PLAIN = re.compile(r"[\w.-]+")  # names that stand as they are
ANSWER_SCHEMA: Schema = {
    "name": ANSWER,
    "description": "Give the answer and end.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


# Tools as they are shown ------------------------------------------------------------------------------


def signature(schema: Schema) -> str:
    """`search(query, k?)`: a tool in a few tokens."""
    return f"{schema['name']}({', '.join(name + mark for name, mark, _ in _parameters(schema))})"


def describe_tool(schema: Schema) -> str:
    """`search(query: string, k?: integer) - "what it does"`: a tool in a line."""
    written = [name + mark + (f": {kind}" if kind else "") for name, mark, kind in _parameters(schema)]
    words = " ".join(str(schema.get("description", "")).split())
    return f"{schema['name']}({', '.join(written)})" + (f" - {as_json(words)}" if words else "")


def _parameters(schema: Schema) -> list[tuple[str, str, str]]:
    """(name, "?" where it may be left out, type) of each parameter; what is no plain word is JSON."""
    kinds, required = parameters_of(schema)
    return [(_word(name), "" if name in required else "?", "|".join(map(_word, kind))) for name, kind in kinds.items()]


def _word(name: str) -> str:
    return name if PLAIN.fullmatch(name) else as_json(name)


def parameters_of(schema: Mapping[str, Any]) -> tuple[dict[str, list[str]], list[str]]:
    """The types of each parameter of a tool, and the names of those that it requires."""
    parameters = schema.get("parameters") or {}
    kinds = {}
    for name, what in (parameters.get("properties") or {}).items():
        kind = what.get("type", []) if isinstance(what, Mapping) else []  # JSON Schema also knows `true`
        kinds[name] = [kind] if isinstance(kind, str) else list(kind)
    return kinds, list(parameters.get("required") or ())


# Arguments ------------------------------------------------------------------------------------------


def arguments_of(schema: Mapping[str, Any], context: str) -> dict[str, Any] | Malformed:
    """The planner's context as arguments of a tool: a JSON object, or plain text where the tool takes one text."""
    if (found := read_object(context)) is not None:
        return found
    kinds, required = parameters_of(schema)
    if not context.strip() and not required:
        return {}
    names = required or list(kinds)
    if len(names) == 1 and "string" in kinds.get(names[0], ()):
        return {names[0]: context} if context.strip() else Malformed(f"the context is empty; {names[0]} is needed")
    return Malformed(f"the context must be a JSON object of {', '.join(kinds) or 'no arguments':.1000}")


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is, or None."""
    try:
        found = strict_json(text)
        return _cleaned(found, allow_nan=False) if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return None


def _cleaned(arguments: dict[str, Any], *, allow_nan: bool = True) -> dict[str, Any]:
    """Copy arguments with valid Unicode only."""
    return json.loads(clean(json.dumps(arguments, ensure_ascii=False, allow_nan=allow_nan)))


def command_of(arguments: Mapping[str, Any]) -> str | dict[str, Any]:
    """Arguments as they are remembered: the one text that is given, or a copy of them all."""
    given = _cleaned(dict(arguments))
    (value, *more) = given.values() or [None]
    return value if isinstance(value, str) and not more else given
