"""Tools from functions: a typed signature and a docstring flow in, a `Tool` with its JSON Schema flows out.

    def weather(city: str, days: int = 1) -> str:
        \"""The weather of the next days.

        city: where, as in "Zurich"
        days: how many, at most 7
        \"""

    tool(weather).schema == {"name": "weather", "description": "The weather of the next days.", "parameters": {...}}

`check_arguments` (of `arguments.py`) holds what a model wrote against such a schema, and against those of MCP servers.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Union

from flowgrpo.contracts import Tool
from flowgrpo.tools.arguments import check_arguments, fault
from flowgrpo.types import BadInput, check_range

__all__ = ["check_arguments", "check_name", "tool"]

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}")
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def tool(
    function: Callable[..., Any], *, name: str | None = None, pure: bool = False, seconds: float | None = None
) -> Tool:
    """A `Tool` of a function; `pure` where equal arguments give equal results, `seconds` is a deadline of its own.

    Keywords that a `functools.partial` holds are no arguments of the tool.
    """
    bound = function.keywords if isinstance(function, partial) else {}
    inner = function.func if isinstance(function, partial) else function
    title = name or getattr(inner, "__name__", "")
    check_name(title)
    if inspect.iscoroutinefunction(inner):
        raise BadInput(f"tool {title!r}: the function is a coroutine; give one that returns its result")
    check_range(f"tool {title!r}", "seconds", seconds, 0.0, exclusive=True, optional=True)
    given = [item for item in inspect.signature(function).parameters.values() if item.name not in bound]
    description, lines = _docstring(title, inner, [item.name for item in given])
    try:
        hints = typing.get_type_hints(inner)
    except NameError as error:
        raise BadInput(f"tool {title!r}: an annotation can't be read ({error}); import what it names") from error
    properties = {item.name: _property(title, item, hints, lines) for item in given}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [item.name for item in given if item.default is item.empty],
        "additionalProperties": False,
    }
    schema = {"name": title, "description": description, "parameters": parameters}
    return Tool(title, schema, partial(_call, function), pure, seconds)


def check_name(name: str) -> None:
    """Raise `BadInput` for a name that can't be written in a call."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadInput(f"tool {name!r}: a name is letters, digits, _, -, . and /, at most 128 of them; pass name=")


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    return function(**arguments)


# Signature and docstring --------------------------------------------------------------------------------


def _docstring(name: str, function: Callable[..., Any], arguments: list[str]) -> tuple[str, dict[str, str]]:
    """The description, and what the lines `argument: text` say of each argument."""
    text = inspect.getdoc(function)
    if not text or not text.strip():
        raise BadInput(f"tool {name!r}: the function has no docstring; write one that tells a model what it does")
    description: list[str] = []
    lines: dict[str, str] = {}
    current, depth = "", 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        head, colon, rest = line.strip().partition(":")
        if colon and head in arguments:
            current, depth, lines[head] = head, indent, rest.strip()
        elif current and line.strip() and indent > depth:
            lines[current] = f"{lines[current]} {line.strip()}".strip()
        elif head not in ("Args", "Arguments") or rest:
            current = ""
            description.append(line.strip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(description)).strip(), lines


def _property(name: str, item: inspect.Parameter, hints: Mapping[str, Any], lines: Mapping[str, str]) -> dict[str, Any]:
    """The schema of one argument."""
    place = f"tool {name!r}: argument {item.name!r}"
    if item.kind not in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY):
        raise BadInput(f"{place} is {item.kind.description}; give it a name of its own")
    if item.name not in hints:
        raise BadInput(f"{place} has no type; annotate it")
    schema = _schema_of(place, hints[item.name])
    if item.name in lines:
        schema = {**schema, "description": lines[item.name]}
    if item.default is not item.empty:
        wrong = _plain_fault(item.default) or fault(schema, item.default, "the default", schema)
        if wrong:
            raise BadInput(f"{place}: {wrong}; mend its annotation or its default")
        schema = {**schema, "default": item.default}
    return schema


def _plain_fault(value: Any) -> str:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"the default can't be written as JSON ({error})"
    return ""


def _schema_of(place: str, hint: Any) -> dict[str, Any]:
    """The JSON Schema of a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if hint is list or origin is list:
        return {"type": "array", "items": _schema_of(place, inner[0])} if inner else {"type": "array"}
    if hint is dict or (origin is dict and inner[0] is str):
        return {"type": "object", "additionalProperties": _schema_of(place, inner[1])} if inner else {"type": "object"}
    if origin is Literal and all(type(value) in PLAIN for value in inner):
        kinds = {PLAIN[type(value)] for value in inner}
        return {**({"type": kinds.pop()} if len(kinds) == 1 else {}), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(place, option) for option in inner]}
    shown = hint.__name__ if isinstance(hint, type) else str(hint)
    raise BadInput(
        f"{place} has the type {shown}, which has no JSON; use str, int, float, bool, list[...], dict[str, ...], "
        "Literal or Optional"
    )
