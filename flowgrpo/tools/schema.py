"""Tools from typed functions, and validation of arguments against a tool's JSON Schema.

    def weather(city: str, days: int = 1) -> str:
        \"""The weather of the next days.

        city: where, as in "Zurich"
        days: how many, at most 7
        \"""

    tool(weather).schema == {"name": "weather", "description": "The weather of the next days.", "parameters": {...}}
    check_arguments(tool(weather).schema, {"city": 3}) == 'weather: argument "city" must be a string, not 3'

`tool` makes a `Tool` from a typed function with a docstring. `check_arguments` is for such schemas and those of MCP
servers: of JSON Schema it knows types, enum, const, bounds, properties, items, anyOf, oneOf, allOf and local $ref;
anything else passes. Patterns are not tried, and hostile schemas take no long time.
"""

import inspect
import json
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, Union

from flowgrpo.contracts import Tool
from flowgrpo.types import JSON, BadInput, check_range

__all__ = ["check_arguments", "check_name", "tool"]

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}")
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
TYPE_NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
Comparison = Callable[[Any, Any], bool]
# (type of the value, keyword, comparison with its bound, message).
BOUNDS: tuple[tuple[str, str, Comparison, str], ...] = (
    ("number", "minimum", operator.ge, "be at least {}"),
    ("number", "maximum", operator.le, "be at most {}"),
    ("number", "exclusiveMinimum", operator.gt, "be more than {}"),
    ("number", "exclusiveMaximum", operator.lt, "be less than {}"),
    ("string", "minLength", operator.ge, "have at least {} characters"),
    ("string", "maxLength", operator.le, "have at most {} characters"),
    ("array", "minItems", operator.ge, "have at least {} items"),
    ("array", "maxItems", operator.le, "have at most {} items"),
)
MAX_DEPTH = 64  # of schemas within schemas
MAX_SHOWN = 80  # characters of a value in a message


# Tools --------------------------------------------------------------------------------------------------


def tool(
    function: Callable[..., Any], *, name: str | None = None, pure: bool = False, timeout: float | None = None
) -> Tool:
    """Make a `Tool` from a typed function, whose docstring tells a model what it does.

    Args:
        function: keywords that a `functools.partial` binds are no arguments of the tool.
        name: of the tool; None: that of the function.
        pure: whether equal arguments give equal results, so that they may be cached.
        timeout: seconds of a call; None: that of the toolset.
    """
    bound = function.keywords if isinstance(function, partial) else {}
    inner = function.func if isinstance(function, partial) else function
    title = name or getattr(inner, "__name__", "")
    check_name(title)
    if inspect.iscoroutinefunction(inner):
        raise BadInput(f"tool {title!r}: the function is a coroutine; give one that returns its result")
    check_range(f"tool {title!r}", "timeout", timeout, 0.0, exclusive=True, optional=True)
    arguments = [item for item in inspect.signature(function).parameters.values() if item.name not in bound]
    description, texts = _parse_docstring(title, inner, [item.name for item in arguments])
    try:
        hints = typing.get_type_hints(inner)
    except NameError as error:
        raise BadInput(f"tool {title!r}: an annotation can't be read ({error}); import what it names") from error
    parameters = {
        "type": "object",
        "properties": {item.name: _argument_schema(title, item, hints, texts) for item in arguments},
        "required": [item.name for item in arguments if item.default is item.empty],
        "additionalProperties": False,
    }
    schema = {"name": title, "description": description, "parameters": parameters}
    return Tool(title, schema, lambda arguments: function(**arguments), pure, timeout)


def check_name(name: str) -> None:
    """Raise `BadInput` for a name that no call could contain."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadInput(f"tool {name!r:.200}: a name is letters, digits, _, -, . and /, at most 128 of them; pass name=")


# Signature and docstring --------------------------------------------------------------------------------


def _parse_docstring(name: str, function: Callable[..., Any], arguments: list[str]) -> tuple[str, dict[str, str]]:
    """(description, text of each argument) of a docstring with lines `argument: text`."""
    text = inspect.getdoc(function)
    if not text or not text.strip():
        raise BadInput(f"tool {name!r}: the function has no docstring; write one that tells a model what it does")
    description: list[str] = []
    texts: dict[str, str] = {}
    current, depth = "", 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        head, colon, tail = line.strip().partition(":")
        if colon and head in arguments:
            current, depth, texts[head] = head, indent, tail.strip()
        elif current and line.strip() and indent > depth:
            texts[current] = f"{texts[current]} {line.strip()}".strip()
        elif head not in ("Args", "Arguments") or tail:
            current = ""
            description.append(line.strip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(description)).strip(), texts


def _argument_schema(
    name: str, item: inspect.Parameter, hints: Mapping[str, Any], texts: Mapping[str, str]
) -> dict[str, JSON]:
    """The JSON Schema of an argument."""
    place = f"tool {name!r}: argument {item.name!r}"
    if item.kind not in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY):
        raise BadInput(f"{place} is {item.kind.description}; give it a name of its own")
    if item.name not in hints:
        raise BadInput(f"{place} has no type; annotate it")
    schema = _schema_of(place, hints[item.name])
    if item.name in texts:
        schema = {**schema, "description": texts[item.name]}
    if item.default is not item.empty:
        try:
            json.dumps(item.default, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadInput(f"{place}: its default can't be written as JSON ({error}); give one that can") from error
        if fault := _Check(schema).fault(schema, item.default, "the default"):
            raise BadInput(f"{place}: {fault}; fix its annotation or its default")
        schema = {**schema, "default": item.default}
    return schema


def _schema_of(place: str, hint: Any) -> dict[str, JSON]:
    """The JSON Schema of a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if hint is list or origin is list:
        return {"type": "array", "items": _schema_of(place, inner[0])} if inner else {"type": "array"}
    if hint is dict or (origin is dict and inner[0] is str):
        return {"type": "object", "additionalProperties": _schema_of(place, inner[1])} if inner else {"type": "object"}
    if origin is Literal and all(type(value) in JSON_TYPES for value in inner):
        kinds = {JSON_TYPES[type(value)] for value in inner}
        return {**({"type": kinds.pop()} if len(kinds) == 1 else {}), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(place, option) for option in inner]}
    type_name = hint.__name__ if isinstance(hint, type) else str(hint)
    raise BadInput(
        f"{place} has the type {type_name}, which has no JSON; use str, int, float, bool, list[...], dict[str, ...], "
        "Literal or Optional"
    )


# Arguments ----------------------------------------------------------------------------------------------


def check_arguments(schema: Mapping[str, JSON], arguments: JSON) -> str:
    """One sentence about what is wrong with the arguments of a call, or "". `schema` is that of a tool.

    JSON types are strict: neither true nor 3.0 is an integer. At the top, arguments that a schema doesn't name are
    unknown unless it has `additionalProperties`.
    """
    name, parameters = schema.get("name", "the tool"), _mapping(schema.get("parameters"))
    if not isinstance(arguments, Mapping):
        return f"{name} takes its arguments as an object, not {_shown(arguments)}"
    is_open = not _mapping(parameters.get("properties")) or "additionalProperties" in parameters
    is_open = is_open or "patternProperties" in parameters
    strict = parameters if is_open else {**parameters, "additionalProperties": False}
    fault = _Check(parameters).fault(strict, arguments, "")
    return f"{name}: {fault}" if fault else ""


class _Check:
    """Search for the first fault of a value; local `$ref` are resolved in the schema `root`.

    `memo` has the fault of a value at a place by a schema: two alternatives that both lead back to themselves would
    otherwise be tried twice at every level of a nested value.
    """

    def __init__(self, root: Mapping[str, JSON]):
        self.root = root
        self.memo: dict[tuple[int, int, str], str] = {}

    def fault(self, schema: JSON, value: JSON, place: str, depth: int = 0) -> str:
        """The first fault of a value; "" if it has none, or the schema isn't understood."""
        if schema is False:
            return f"{place} isn't allowed"
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return ""
        key = id(schema), id(value), place
        if key not in self.memo:
            self.memo[key] = next(filter(None, self._faults(schema, value, place, depth + 1)), "")
        return self.memo[key]

    def _faults(self, schema: Mapping[str, JSON], value: JSON, place: str, depth: int) -> Iterator[str]:
        """The fault that each keyword of a schema finds; "" if none."""
        yield self.fault(self._resolve(schema.get("$ref")), value, place, depth)
        kind = schema.get("type")
        yield _type_fault(kind if isinstance(kind, list) else [kind], value, place)
        choices = _list(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
        if choices and not any(x == value and isinstance(x, bool) == isinstance(value, bool) for x in choices):
            yield f"{place or 'they'} must be one of {', '.join(map(_shown, choices[:20]))}, not {_shown(value)}"
        for part in _list(schema.get("allOf")):
            yield self.fault(part, value, place, depth)
        for keyword in ("anyOf", "oneOf"):
            yield self._options_fault(_list(schema.get(keyword)), value, place, depth)
        for kind, keyword, compare, message in BOUNDS:
            bound, size = schema.get(keyword), value if kind == "number" or not _is(kind, value) else len(value)
            if _is(kind, value) and _is("number", bound) and not compare(size, bound):
                yield f"{place} must {message.format(bound)}, not {_shown(size)}"
        if isinstance(value, Mapping):
            yield from self._property_faults(schema, value, place, depth)
        if isinstance(value, list):
            prefix = _list(schema.get("prefixItems"))
            for index, item in enumerate(value):
                part = prefix[index] if index < len(prefix) else schema.get("items")
                yield self.fault(part, item, f"{place}[{index}]", depth)

    def _options_fault(self, options: list, value: JSON, place: str, depth: int) -> str:
        """The fault of a value that must fit one of several schemas; "" if it does.

        It is that of the types, or else that in the first schema whose type fits; if not every schema names one type,
        that in the first schema.
        """
        faults = [self.fault(option, value, place, depth) for option in options]
        if not faults or not all(faults):
            return ""
        kinds = [_mapping(option).get("type") for option in options]
        if not all(isinstance(kind, str) for kind in kinds):
            return faults[0]
        fitting = [fault for kind, fault in zip(kinds, faults, strict=True) if _is(kind, value)]
        return fitting[0] if fitting else _type_fault([*dict.fromkeys(kinds)], value, place)

    def _property_faults(
        self, schema: Mapping[str, JSON], value: Mapping[str, JSON], place: str, depth: int
    ) -> Iterator[str]:
        properties, additional = _mapping(schema.get("properties")), schema.get("additionalProperties", True)
        for name in _list(schema.get("required")):
            if isinstance(name, str) and name not in value:
                yield f"{_inside(place, name)} is missing"
        for name, item in value.items():
            if name not in properties and additional is False:
                if "patternProperties" not in schema:
                    yield f"{_inside(place, name)} is unknown; it takes {', '.join(properties) or 'none'}"
            else:
                yield self.fault(properties.get(name, additional), item, _inside(place, name), depth)

    def _resolve(self, target: JSON) -> JSON:
        """The schema that a local `$ref` ("#/...") names; None if it names nothing, or isn't local."""
        if not isinstance(target, str) or not target.startswith("#/"):
            return None
        schema: JSON = self.root
        for step in target.removeprefix("#").strip("/").split("/"):
            schema = _mapping(schema).get(step.replace("~1", "/").replace("~0", "~"))
        return schema


def _is(kind: JSON, value: JSON) -> bool:
    """Whether a value has a JSON type; every value has an unknown type."""
    if kind in ("number", "integer"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    types = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": Mapping}
    return not isinstance(kind, str) or kind not in types or isinstance(value, types[kind])


def _type_fault(kinds: list, value: JSON, place: str) -> str:
    if not kinds or any(_is(kind, value) for kind in kinds):
        return ""
    return f"{place or 'they'} must be {' or '.join(TYPE_NAMES[kind] for kind in kinds)}, not {_shown(value)}"


def _list(value: JSON) -> list:
    return value if isinstance(value, list) else []


def _mapping(value: JSON) -> Mapping[str, JSON]:
    return value if isinstance(value, Mapping) else {}


def _inside(place: str, name: str) -> str:
    """Name of a property's place: `argument "a"` at the top, `argument "a"."b"` within."""
    quoted = json.dumps(str(name)[:MAX_SHOWN])
    return f"{place}.{quoted}" if place else f"argument {quoted}"


def _shown(value: JSON) -> str:
    """A value in a message, never long."""
    if isinstance(value, (list, Mapping)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "a large integer"
    text = json.dumps(value[:MAX_SHOWN] if isinstance(value, str) else value, default=lambda item: type(item).__name__)
    return text if len(text) <= MAX_SHOWN + 2 else f"{text[:MAX_SHOWN]}…"
