"""Tools from functions, and the arguments of calls held against a tool's JSON Schema.

    def weather(city: str, days: int = 1) -> str:
        \"""The weather of the next days.

        city: where, as in "Zurich"
        days: how many, at most 7
        \"""

    tool(weather).schema == {"name": "weather", "description": "The weather of the next days.", "parameters": {...}}
    check_arguments(tool(weather).schema, {"city": 3}) == 'weather: argument "city" must be a string, not 3'

`tool` makes a `Tool` of a typed function with a docstring. `check_arguments` serves such schemas and those of MCP
servers: of JSON Schema it knows types, enum, const, bounds, properties, items, anyOf, oneOf, allOf and local $ref, and
what it doesn't know passes. Patterns are not tried, and hostile schemas cost no long time.
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
from flowgrpo.types import BadInput, check_range

__all__ = ["check_arguments", "check_name", "tool"]

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}")
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
WORDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
Keeps = Callable[[Any, Any], bool]
# The type that a keyword is about, whether a value keeps its bound, and words for it.
BOUNDS: tuple[tuple[str, str, Keeps, str], ...] = (
    ("number", "minimum", operator.ge, "be at least {}"),
    ("number", "maximum", operator.le, "be at most {}"),
    ("number", "exclusiveMinimum", operator.gt, "be more than {}"),
    ("number", "exclusiveMaximum", operator.lt, "be less than {}"),
    ("string", "minLength", operator.ge, "have at least {} characters"),
    ("string", "maxLength", operator.le, "have at most {} characters"),
    ("array", "minItems", operator.ge, "have at least {} items"),
    ("array", "maxItems", operator.le, "have at most {} items"),
)
DEEPEST = 64  # schemas within schemas that are followed
SHOWN = 80  # characters of a value in a sentence


# Tools --------------------------------------------------------------------------------------------------


def tool(
    function: Callable[..., Any], *, name: str | None = None, pure: bool = False, seconds: float | None = None
) -> Tool:
    """Make a `Tool` of a function; `pure` where equal arguments give equal results, `seconds` is a deadline of its own.

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
    parameters = {
        "type": "object",
        "properties": {item.name: _property(title, item, hints, lines) for item in given},
        "required": [item.name for item in given if item.default is item.empty],
        "additionalProperties": False,
    }
    schema = {"name": title, "description": description, "parameters": parameters}
    return Tool(title, schema, lambda arguments: function(**arguments), pure, seconds)


def check_name(name: str) -> None:
    """Raise `BadInput` for a name that can't be written in a call."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadInput(f"tool {name!r:.200}: a name is letters, digits, _, -, . and /, at most 128 of them; pass name=")


# Signature and docstring --------------------------------------------------------------------------------


def _docstring(name: str, function: Callable[..., Any], arguments: list[str]) -> tuple[str, dict[str, str]]:
    """Read a docstring -> its description, and the texts of its lines `argument: text`."""
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
    """Make the JSON Schema of one argument."""
    place = f"tool {name!r}: argument {item.name!r}"
    if item.kind not in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY):
        raise BadInput(f"{place} is {item.kind.description}; give it a name of its own")
    if item.name not in hints:
        raise BadInput(f"{place} has no type; annotate it")
    schema = _schema_of(place, hints[item.name])
    if item.name in lines:
        schema = {**schema, "description": lines[item.name]}
    if item.default is not item.empty:
        try:
            json.dumps(item.default, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadInput(f"{place}: its default can't be written as JSON ({error}); give one that can") from error
        if wrong := _Check(schema).fault(schema, item.default, "the default"):
            raise BadInput(f"{place}: {wrong}; fix its annotation or its default")
        schema = {**schema, "default": item.default}
    return schema


def _schema_of(place: str, hint: Any) -> dict[str, Any]:
    """Make the JSON Schema of a type."""
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


# Arguments ----------------------------------------------------------------------------------------------


def check_arguments(schema: Mapping[str, Any], arguments: Any) -> str:
    """Say in one sentence what is wrong with the arguments of a call; "" where nothing is. `schema` is that of a tool.

    JSON types are strict: true is no integer, 3.0 neither. At the top, arguments that a schema doesn't name are
    unknown unless it says `additionalProperties`.
    """
    name, parameters = schema.get("name", "the tool"), _mapping(schema.get("parameters"))
    if not isinstance(arguments, Mapping):
        return f"{name} takes its arguments as an object, not {_shown(arguments)}"
    open_ended = not _mapping(parameters.get("properties")) or "additionalProperties" in parameters
    open_ended = open_ended or "patternProperties" in parameters
    strict = parameters if open_ended else {**parameters, "additionalProperties": False}
    wrong = _Check(parameters).fault(strict, arguments, "")
    return f"{name}: {wrong}" if wrong else ""


class _Check:
    """One search for the first fault of a value, by the schema `root` that local `$ref` lead back to.

    `known` keeps what was said of a value at its place by a schema: two alternatives that both lead back to themselves
    would otherwise be tried twice at every level of what a model nested.
    """

    def __init__(self, root: Mapping[str, Any]):
        self.root = root
        self.known: dict[tuple[int, int, str], str] = {}

    def fault(self, schema: Any, value: Any, place: str, depth: int = 0) -> str:
        """Describe the first fault of a value in words; "" where it has none, or the schema isn't understood."""
        if schema is False:
            return f"{place} isn't allowed"
        if not isinstance(schema, Mapping) or depth > DEEPEST:
            return ""
        key = id(schema), id(value), place
        if key not in self.known:
            self.known[key] = next(filter(None, self._faults(schema, value, place, depth + 1)), "")
        return self.known[key]

    def _faults(self, schema: Mapping[str, Any], value: Any, place: str, depth: int) -> Iterator[str]:
        """Yield what each keyword of a schema says of a value; "" where it finds nothing wrong."""
        yield self.fault(self._resolve(schema.get("$ref")), value, place, depth)
        kind = schema.get("type")
        yield _type_fault(kind if isinstance(kind, list) else [kind], value, place)
        choices = _list(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
        if choices and not any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in choices):
            yield f"{place or 'they'} must be one of {', '.join(map(_shown, choices[:20]))}, not {_shown(value)}"
        for part in _list(schema.get("allOf")):
            yield self.fault(part, value, place, depth)
        for keyword in ("anyOf", "oneOf"):
            yield self._options_fault(_list(schema.get(keyword)), value, place, depth)
        for kind, keyword, kept, words in BOUNDS:
            bound, size = schema.get(keyword), value if kind == "number" or not _is(kind, value) else len(value)
            if _is(kind, value) and _is("number", bound) and not kept(size, bound):
                yield f"{place} must {words.format(bound)}, not {_shown(size)}"
        if isinstance(value, Mapping):
            yield from self._property_faults(schema, value, place, depth)
        if isinstance(value, list):
            first = _list(schema.get("prefixItems"))
            for number, item in enumerate(value):
                part = first[number] if number < len(first) else schema.get("items")
                yield self.fault(part, item, f"{place}[{number}]", depth)

    def _options_fault(self, options: list, value: Any, place: str, depth: int) -> str:
        """Describe the fault of a value that must fit one of several schemas; "" where it does.

        It is that of the types, or else that in the first schema whose type fits; where not every schema names one
        type, that in the first of all.
        """
        wrongs = [self.fault(option, value, place, depth) for option in options]
        if not wrongs or not all(wrongs):
            return ""
        kinds = [_mapping(option).get("type") for option in options]
        if not all(isinstance(kind, str) for kind in kinds):
            return wrongs[0]
        fits = [wrong for kind, wrong in zip(kinds, wrongs, strict=True) if _is(kind, value)]
        return fits[0] if fits else _type_fault([*dict.fromkeys(kinds)], value, place)

    def _property_faults(
        self, schema: Mapping[str, Any], value: Mapping[str, Any], place: str, depth: int
    ) -> Iterator[str]:
        properties, rest = _mapping(schema.get("properties")), schema.get("additionalProperties", True)
        for name in _list(schema.get("required")):
            if isinstance(name, str) and name not in value:
                yield f"{_inside(place, name)} is missing"
        for name, item in value.items():
            if name not in properties and rest is False:
                if "patternProperties" not in schema:
                    yield f"{_inside(place, name)} is unknown; it takes {', '.join(properties) or 'none'}"
            else:
                yield self.fault(properties.get(name, rest), item, _inside(place, name), depth)

    def _resolve(self, target: Any) -> Any:
        """Find what a local `$ref` ("#/...") names; None where it names nothing, or isn't local."""
        if not isinstance(target, str) or not target.startswith("#/"):
            return None
        found: Any = self.root
        for step in target.removeprefix("#").strip("/").split("/"):
            found = _mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
        return found


def _is(kind: Any, value: Any) -> bool:
    """Say whether a value has a JSON type; a type that isn't known has everything."""
    if kind in ("number", "integer"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    known = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": Mapping}
    return not isinstance(kind, str) or kind not in known or isinstance(value, known[kind])


def _type_fault(kinds: list, value: Any, place: str) -> str:
    if not kinds or any(_is(kind, value) for kind in kinds):
        return ""
    return f"{place or 'they'} must be {' or '.join(WORDS[kind] for kind in kinds)}, not {_shown(value)}"


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _inside(place: str, name: str) -> str:
    """Name the place of a property: `argument "a"` at the top, `argument "a"."b"` within."""
    quoted = json.dumps(str(name)[:SHOWN])
    return f"{place}.{quoted}" if place else f"argument {quoted}"


def _shown(value: Any) -> str:
    """Write a value as it stands in a sentence, never long."""
    if isinstance(value, (list, Mapping)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "a large integer"
    text = json.dumps(value[:SHOWN] if isinstance(value, str) else value, default=lambda item: type(item).__name__)
    return text if len(text) <= SHOWN + 2 else f"{text[:SHOWN]}…"
