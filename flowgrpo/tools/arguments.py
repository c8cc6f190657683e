"""Arguments against a schema: what a model wrote flows in, one sentence on what is wrong with it flows out.

Of JSON Schema, as tools and MCP servers use it, this knows types, enum, const, bounds, properties, items, anyOf, oneOf,
allOf and local $ref; what it doesn't know passes.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

WORDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", lambda value, bound: value >= bound, "at least"),
    ("maximum", lambda value, bound: value <= bound, "at most"),
    ("exclusiveMinimum", lambda value, bound: value > bound, "more than"),
    ("exclusiveMaximum", lambda value, bound: value < bound, "less than"),
)
DEEPEST = 64  # schemas within schemas that are followed
SHOWN = 80  # characters of a value in a sentence


def check_arguments(schema: Mapping[str, Any], arguments: Any) -> str:
    """Say in one sentence what is wrong with the arguments of a call; "" where nothing is. `schema` is that of a tool.

    JSON types are strict: true is no integer, 3.0 neither. At the top, arguments that a schema doesn't name are
    unknown unless it says `additionalProperties`.
    """
    name, parameters = schema.get("name", "the tool"), schema.get("parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    if not isinstance(arguments, Mapping):
        return f"{name} takes its arguments as an object, not {_shown(arguments)}"
    properties = parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    open_ended = "additionalProperties" in parameters or "patternProperties" in parameters or not properties
    strict = parameters if open_ended else {**parameters, "additionalProperties": False}
    wrong = fault(strict, arguments, "", parameters)
    return f"{name}: {wrong}" if wrong else ""


def fault(
    schema: Any, value: Any, place: str, root: Mapping[str, Any], depth: int = 0, known: dict | None = None
) -> str:
    """Describe the first fault of a value in words; "" where it has none, or where the schema isn't understood.

    `known` keeps what was said of a value at its place by a schema: two alternatives that both lead back to themselves
    would otherwise be tried twice at every level of what a model nested.
    """
    if schema is False:
        return f"{place} isn't allowed"
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return ""
    known = {} if known is None else known
    key = id(schema), id(value), place
    if key not in known:
        known[key] = _fault(schema, value, place, root, partial(fault, root=root, depth=depth + 1, known=known))
    return known[key]


def _fault(schema: Mapping[str, Any], value: Any, place: str, root: Mapping[str, Any], following: Callable) -> str:
    if isinstance(target := schema.get("$ref"), str) and (wrong := following(_resolve(root, target), value, place)):
        return wrong
    if wrong := _type_fault(schema.get("type"), value, place) or _choice_fault(schema, value, place):
        return wrong
    for part in _list(schema.get("allOf")):
        if wrong := following(part, value, place):
            return wrong
    for options in (_list(schema.get("anyOf")), _list(schema.get("oneOf"))):
        if wrong := _options_fault(options, value, place, following):
            return wrong
    if isinstance(value, Mapping):
        return _object_fault(schema, value, place, following)
    if isinstance(value, list):
        return _items_fault(schema, value, place, following)
    return _bound_fault(schema, value, place)


def _options_fault(options: list, value: Any, place: str, following: Callable) -> str:
    """Describe the fault of a value that must fit one of several schemas; "" where it does.

    It is that of the types, or else that in the first schema whose type fits; where not every schema names one type,
    that in the first of all.
    """
    wrongs = [following(option, value, place) for option in options]
    if not wrongs or not all(wrongs):
        return ""
    kinds = [option.get("type") for option in options if isinstance(option, Mapping)]
    if len(kinds) == len(options) and all(isinstance(kind, str) for kind in kinds):
        fits = [wrong for kind, wrong in zip(kinds, wrongs, strict=True) if _is(kind, value)]
        return fits[0] if fits else _type_fault([*dict.fromkeys(kinds)], value, place)
    return wrongs[0]


def _resolve(root: Mapping[str, Any], target: str) -> Any:
    """Resolve a local `$ref` ("#/...") in the schema `root`; None where it names nothing, or isn't local."""
    found: Any = root
    for step in target.removeprefix("#").strip("/").split("/") if target.startswith("#/") else ():
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if target.startswith("#/") else None


def _is(kind: Any, value: Any) -> bool:
    """Whether a value has a JSON type; a type that isn't known has everything."""
    if kind == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    known = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": Mapping}
    return not isinstance(kind, str) or kind not in known or isinstance(value, known[kind])


def _type_fault(kind: Any, value: Any, place: str) -> str:
    kinds = kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else []
    if not kinds or any(_is(option, value) for option in kinds):
        return ""
    return f"{place or 'they'} must be {' or '.join(WORDS.get(option, str(option)) for option in kinds)}, " + (
        f"not {_shown(value)}"
    )


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON, where true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _choice_fault(schema: Mapping[str, Any], value: Any, place: str) -> str:
    options = _list(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
    if not options or any(_same(option, value) for option in options):
        return ""
    return f"{place or 'they'} must be one of {', '.join(map(_shown, options[:20]))}, not {_shown(value)}"


def _object_fault(schema: Mapping[str, Any], value: Mapping[str, Any], place: str, following: Callable) -> str:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    missing = [name for name in _list(schema.get("required")) if isinstance(name, str) and name not in value]
    if missing:
        return f"{_inside(place, missing[0])} is missing"
    rest = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in properties:
            wrong = following(properties[name], item, _inside(place, name))
        elif rest is False and "patternProperties" not in schema:
            takes = ", ".join(properties) or "none"
            wrong = f"{_inside(place, name)} is unknown; it takes {takes}"
        else:
            wrong = following(rest, item, _inside(place, name)) if isinstance(rest, Mapping) else ""
        if wrong:
            return wrong
    return ""


def _items_fault(schema: Mapping[str, Any], value: list, place: str, following: Callable) -> str:
    if wrong := _size_fault(schema.get("minItems"), schema.get("maxItems"), len(value), f"{place} must have", "items"):
        return wrong
    first = _list(schema.get("prefixItems"))
    for number, item in enumerate(value):
        part = first[number] if number < len(first) else schema.get("items")
        if wrong := following(part, item, f"{place}[{number}]"):
            return wrong
    return ""


def _bound_fault(schema: Mapping[str, Any], value: Any, place: str) -> str:
    """Describe the first bound of a number, or of the length of a string, that is not kept; "" where all are."""
    if isinstance(value, str):
        bounds = schema.get("minLength"), schema.get("maxLength")
        return _size_fault(*bounds, len(value), f"{place} must have", "characters")
    if not _is("number", value):
        return ""
    for key, kept, words in BOUNDS:
        bound = schema.get(key)
        if _is("number", bound) and not kept(value, bound):
            return f"{place} must be {words} {bound}, not {_shown(value)}"
    return ""


def _size_fault(least: Any, most: Any, size: int, words: str, things: str) -> str:
    if _is("integer", least) and size < least:
        return f"{words} at least {least} {things}, not {size}"
    if _is("integer", most) and size > most:
        return f"{words} at most {most} {things}, not {size}"
    return ""


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def _inside(place: str, name: str) -> str:
    """The place of a property: `argument "a"` at the top, `argument "a"."b"` within."""
    quoted = json.dumps(str(name)[:SHOWN])
    return f"{place}.{quoted}" if place else f"argument {quoted}"


def _shown(value: Any) -> str:
    """A value in a sentence, never long."""
    if isinstance(value, (list, Mapping)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "a large integer"
    text = json.dumps(value[:SHOWN] if isinstance(value, str) else value, default=lambda item: type(item).__name__)
    return text if len(text) <= SHOWN + 2 else f"{text[:SHOWN]}…"
