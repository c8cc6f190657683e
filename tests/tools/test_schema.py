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


def test_a_tool_calls_its_function():
    assert TOOL.call({"city": "Bern", "units": "imperial"}) == "Bern 1 imperial None None False"


def test_keywords_of_a_partial_are_no_arguments():
    bound = tool(partial(weather, days=3, exact=True), name="soon", pure=True, seconds=2.0)
    assert (bound.name, bound.pure, bound.seconds) == ("soon", True, 2.0)
    assert list(bound.schema["parameters"]["properties"]) == ["city", "units", "parts", "weights"]
    assert bound.call({"city": "Bern"}) == "Bern 3 metric None None True"


def bare(x: int):
    return x


def untyped(x):
    """Words."""


def anything(x: Any):
    """Words."""


def raw(x: bytes):
    """Words."""


def by_number(x: dict[int, str]):
    """Words."""


def many(*x: int):
    """Words."""


def rest(**x: int):
    """Words."""


def wrong_default(x: int = "a"):  # type: ignore
    """Words."""


def unwritable(x: float = float("nan")):
    """Words."""


def elsewhere(x: "Nowhere"):  # type: ignore
    """Words."""


async def later(x: int):
    """Words."""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (bare, "'bare'.*no docstring"),
        (untyped, "'untyped'.*'x'.*no type"),
        (anything, "'anything'.*'x'.*Any"),
        (raw, "'raw'.*'x'.*bytes"),
        (by_number, "'by_number'.*'x'.*dict"),
        (many, "'many'.*'x'.*name of its own"),
        (rest, "'rest'.*'x'.*name of its own"),
        (wrong_default, "'wrong_default'.*'x'.*must be an integer"),
        (unwritable, "'unwritable'.*'x'.*JSON"),
        (elsewhere, "'elsewhere'.*Nowhere"),
        (later, "'later'.*coroutine"),
        (lambda x: x, "'<lambda>'.*name"),
    ],
)
def test_a_function_that_is_no_tool_is_refused_by_name_and_argument(function, words):
    with pytest.raises(BadInput, match=words):
        tool(function)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"city": "Bern"}, ""),
        ({"city": "Bern", "days": 2, "parts": ["a"], "weights": {"a": 1}, "exact": True}, ""),
        ({}, 'argument "city" is missing'),
        ({"city": 3}, 'argument "city" must be a string, not 3'),
        ({"city": "Bern", "days": True}, "must be an integer, not true"),
        ({"city": "Bern", "days": 2.0}, "must be an integer, not 2.0"),
        ({"city": "Bern", "days": None}, "must be an integer, not null"),
        ({"city": "Bern", "exact": 1}, "must be true or false, not 1"),
        ({"city": "Bern", "units": "kelvin"}, 'must be one of "metric", "imperial", not "kelvin"'),
        ({"city": "Bern", "parts": "a"}, 'argument "parts" must be a list or null, not "a"'),
        ({"city": "Bern", "parts": ["a", 1]}, 'argument "parts"[1] must be a string'),
        ({"city": "Bern", "weights": {"a": "b"}}, 'argument "weights"."a" must be a number'),
        ({"city": "Bern", "town": 1}, 'argument "town" is unknown; it takes city, days,'),
        (["Bern"], "takes its arguments as an object"),
        (None, "takes its arguments as an object"),
    ],
)
def test_what_is_wrong_with_arguments_is_said_in_a_sentence(arguments, words):
    said = check_arguments(TOOL.schema, arguments)
    assert words in said
    assert bool(said) == bool(words)
    assert "\n" not in said


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"node": {"id": 1, "next": {"id": 2}}}, ""),
        ({"node": {"id": 1, "next": {"id": 2, "next": {}}}}, 'argument "node"."next"."next"."id" is missing'),
        ({"loop": 1, "lost": 1, "far": 1, "strange": {}, "open": 1}, ""),
        ({"either": 2}, "at least 3"),
        ({"either": "a"}, "at least 2 characters"),
        ({"either": []}, "an integer or a string"),
        ({"both": 1}, "less than 1"),
        ({"kind": True}, "one of 1, not true"),
        ({"kind": 1.0}, ""),
        ({"pair": ["a", 1]}, ""),
        ({"pair": ["a", "b"]}, '"pair"[1] must be an integer'),
        ({"pair": []}, "at least 1 items"),
        ({"pair": ["a", 1, 2]}, "at most 2 items"),
        ({"closed": 1}, "isn't allowed"),
        ({"other": 1}, "unknown"),
    ],
)
def test_schemas_of_servers_are_held_to_as_far_as_they_are_understood(arguments, words):
    said = check_arguments(SERVER, arguments)
    assert words in said
    assert bool(said) == bool(words)


@pytest.mark.parametrize(
    "parameters", [None, 3, {}, {"properties": 7}, {"type": "object", "additionalProperties": True}]
)
def test_a_schema_that_says_nothing_takes_everything(parameters):
    assert check_arguments({"name": "x", "parameters": parameters}, {"a": 1}) == ""


def test_a_schema_that_says_so_takes_arguments_it_does_not_name():
    parameters = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert check_arguments({"name": "x", "parameters": parameters}, {"a": 1, "b": "c"}) == ""
    assert "must be a string" in check_arguments({"name": "x", "parameters": parameters}, {"a": 1, "b": 2})
    open_ended = {"properties": {"a": {}}, "additionalProperties": True}
    assert check_arguments({"name": "x", "parameters": open_ended}, {"b": 2}) == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    arguments=JSON,
    parameters=JSON
    | st.dictionaries(
        st.sampled_from(
            [
                "type",
                "properties",
                "anyOf",
                "enum",
                "items",
                "required",
                "$ref",
                "minimum",
                "maxLength",
                "additionalProperties",
            ]
        ),
        JSON,
    ),
)
def test_no_schema_and_no_value_makes_the_check_raise(arguments, parameters):
    said = check_arguments({"name": "x", "parameters": parameters}, arguments)
    assert len(said) < 10_000
    assert check_arguments({"name": "x", "parameters": parameters}, arguments) == said
