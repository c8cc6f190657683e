"""Schemas from functions, and arguments held against schemas."""

from functools import partial
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.tools.schema import check_arguments, tool
from flowgrpo.types import BadInput


def weather(
    city: str,
    days: int = 1,
    *,
    units: Literal["metric", "imperial"] = "metric",
    parts: list[str] | None = None,
    weights: Optional[dict[str, float]] = None,  # noqa: UP045  what older code writes
    exact: bool = False,
) -> str:
    """The weather of the next days.

    From a table: it never changes.

    Args:
        city: where,
            as in "Zurich"
        days: how many
    """
    return f"{city} {days} {units} {parts} {weights} {exact}"


TOOL = tool(weather)


def test_a_schema_comes_from_signature_and_docstring():
    assert TOOL.name == TOOL.schema["name"] == "weather"
    assert TOOL.schema["description"] == "The weather of the next days.\n\nFrom a table: it never changes."
    parameters = TOOL.schema["parameters"]
    assert parameters["required"] == ["city"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"] == {
        "city": {"type": "string", "description": 'where, as in "Zurich"'},
        "days": {"type": "integer", "description": "how many", "default": 1},
        "units": {"type": "string", "enum": ["metric", "imperial"], "default": "metric"},
        "parts": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], "default": None},
        "weights": {
            "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}],
            "default": None,
        },
        "exact": {"type": "boolean", "default": False},
    }
    assert TOOL.call({"city": "Bern", "units": "imperial"}) == "Bern 1 imperial None None False"


def test_keywords_of_a_partial_are_no_arguments():
    bound = tool(partial(weather, days=3, exact=True), name="soon", pure=True, timeout=2.0)
    assert (bound.name, bound.pure, bound.timeout) == ("soon", True, 2.0)
    assert list(bound.schema["parameters"]["properties"]) == ["city", "units", "parts", "weights"]
    assert bound.call({"city": "Bern"}) == "Bern 3 metric None None True"


async def later(x: int):
    """Words."""


def odd(arguments):
    """A function of these arguments."""
    names = {"Any": Any}
    exec(f"def odd({arguments}):\n    'Words.'", names)
    return names["odd"]


@pytest.mark.parametrize(
    ("function", "settings", "words"),
    [
        (odd("x"), {}, "'odd'.*'x'.*no type"),
        (odd("x: Any"), {}, "'odd'.*'x'.*Any"),
        (odd("x: bytes"), {}, "'odd'.*'x'.*bytes"),
        (odd("x: dict[int, str]"), {}, "'odd'.*'x'.*dict"),
        (odd("*x: int"), {}, "'odd'.*'x'.*name of its own"),
        (odd("**x: int"), {}, "'odd'.*'x'.*name of its own"),
        (odd("x: int = 'a'"), {}, "'odd'.*'x'.*must be an integer"),
        (odd("x: float = float('nan')"), {}, "'odd'.*'x'.*JSON"),
        (odd("x: 'Nowhere'"), {}, "'odd'.*Nowhere"),
        (lambda x: x, {}, "'<lambda>'.*name"),
        (lambda x: x, {"name": "bare"}, "'bare'.*no docstring"),
        (later, {}, "'later'.*coroutine"),
        (weather, {"timeout": 0}, "'weather'.*timeout is 0"),
    ],
)
def test_a_function_that_makes_no_tool_is_refused(function, settings, words):
    with pytest.raises(BadInput, match=words):
        tool(function, **settings)


SERVER = {  # as MCP servers write it
    "name": "book",
    "parameters": {
        "type": "object",
        "$defs": {
            "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "required": ["id"]},
            "Loop": {"$ref": "#/$defs/Loop"},
        },
        "properties": {
            "node": {"$ref": "#/$defs/Node"},
            "loop": {"$ref": "#/$defs/Loop"},
            "lost": {"$ref": "#/$defs/Nowhere"},
            "far": {"$ref": "https://example.org/schema"},
            "either": {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "string", "minLength": 2}]},
            "both": {"allOf": [{"type": "number"}, {"exclusiveMaximum": 1}]},
            "kind": {"const": 1},
            "pair": {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
            "strange": {"type": "duration", "format": 7, "enum": "x", "items": 3, "required": 5, "anyOf": {}},
            "closed": False,
            "open": True,
        },
    },
}
NAMED = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}


def takes(parameters):
    return {"name": "x", "parameters": parameters}


@pytest.mark.parametrize(
    ("schema", "arguments", "words"),
    [
        (TOOL.schema, {"city": "Bern"}, ""),
        (TOOL.schema, {"city": "Bern", "days": 2, "parts": ["a"], "weights": {"a": 1}, "exact": True}, ""),
        (TOOL.schema, {}, 'argument "city" is missing'),
        (TOOL.schema, {"city": 3}, 'argument "city" must be a string, not 3'),
        (TOOL.schema, {"city": "Bern", "days": True}, "must be an integer, not true"),
        (TOOL.schema, {"city": "Bern", "days": 2.0}, "must be an integer, not 2.0"),
        (TOOL.schema, {"city": "Bern", "days": None}, "must be an integer, not null"),
        (TOOL.schema, {"city": "Bern", "exact": 1}, "must be true or false, not 1"),
        (TOOL.schema, {"city": "Bern", "units": "kelvin"}, 'must be one of "metric", "imperial", not "kelvin"'),
        (TOOL.schema, {"city": "Bern", "parts": "a"}, 'argument "parts" must be a list or null, not "a"'),
        (TOOL.schema, {"city": "Bern", "parts": ["a", 1]}, 'argument "parts"[1] must be a string'),
        (TOOL.schema, {"city": "Bern", "weights": {"a": "b"}}, 'argument "weights"."a" must be a number'),
        (TOOL.schema, {"city": "Bern", "town": 1}, 'argument "town" is unknown; it takes city, days,'),
        (TOOL.schema, ["Bern"], "takes its arguments as an object"),
        (TOOL.schema, None, "takes its arguments as an object"),
        (SERVER, {"node": {"id": 1, "next": {"id": 2}}}, ""),
        (SERVER, {"node": {"id": 1, "next": {"id": 2, "next": {}}}}, 'argument "node"."next"."next"."id" is missing'),
        (SERVER, {"loop": 1, "lost": 1, "far": 1, "strange": {}, "open": 1}, ""),
        (SERVER, {"either": 2}, "at least 3"),
        (SERVER, {"either": "a"}, "at least 2 characters"),
        (SERVER, {"either": []}, "an integer or a string"),
        (SERVER, {"both": 1}, "less than 1"),
        (SERVER, {"kind": True}, "one of 1, not true"),
        (SERVER, {"kind": 1.0}, ""),
        (SERVER, {"pair": ["a", 1]}, ""),
        (SERVER, {"pair": ["a", "b"]}, '"pair"[1] must be an integer'),
        (SERVER, {"pair": []}, "at least 1 items"),
        (SERVER, {"pair": ["a", 1, 2]}, "at most 2 items"),
        (SERVER, {"closed": 1}, "isn't allowed"),
        (SERVER, {"other": 1}, "unknown"),
        *[(takes(odd), {"a": 1}, "") for odd in (None, 3, {}, {"properties": 7}, {"additionalProperties": True})],
        (takes(NAMED), {"a": 1, "b": "c"}, ""),
        (takes(NAMED), {"a": 1, "b": 2}, "must be a string"),
        (takes({**NAMED, "additionalProperties": True}), {"b": 2}, ""),
    ],
)
def test_faults_of_arguments_are_one_sentence(schema, arguments, words):
    """Of our own schemas, of those of servers as far as they are understood, and of those that say nothing."""
    message = check_arguments(schema, arguments)
    assert words in message
    assert bool(message) == bool(words)
    assert "\n" not in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["type", "properties", "anyOf", "enum", "items", "required", "$ref", "minimum", "additionalProperties"]


@given(JSON, JSON | st.dictionaries(st.sampled_from(KEYS), JSON))
def test_no_schema_and_no_value_makes_the_check_raise(arguments, parameters):
    assert len(check_arguments(takes(parameters), arguments)) < 10_000
